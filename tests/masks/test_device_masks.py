"""Masks, block lists and work lists created on a device equal those created on the host, without synchronization."""

from __future__ import annotations

import dataclasses

import device_double as device
import numpy as np
import pytest
from device_double import LeavesNamespace, Synchronises
from device_lists import assert_same_blocks
from hypothesis import assume, given
from hypothesis import strategies as st
from test_block_index import BLOCKS
from test_masks import SHAPES, SHAPES_AND_MASKS, assert_rectangles_never_claim_too_much
from test_work_list import TILES, rebuilt

from cuflash import BlockIndex, DeviceSpec, ShapeDtype, UnsupportedProblem, attention, masks, patterns, plan
from cuflash.executors import evaluation
from cuflash.masks.content import held_arrays
from cuflash.masks import MaskShape
from cuflash.planning._params import WORK
from cuflash.testing import strategies
from cuflash.blocks.work_list import IntervalWork, ListedWork, requested_mask, work_list


def changed(mask, change):
    """Return a mask in which a function has replaced each leaf."""
    if hasattr(mask, "operands"):
        return type(mask)(tuple(changed(operand, change) for operand in mask.operands))
    if hasattr(mask, "mask"):
        return dataclasses.replace(mask, mask=changed(mask.mask, change))
    return type(mask)(changed(mask.operand, change)) if hasattr(mask, "operand") else change(mask)


def in_order(mask):
    """Return documents whose ids never decrease, as devices require."""
    if not hasattr(mask, "q_ids"):
        return mask
    return type(mask)(np.sort(mask.q_ids), None if mask.kv_ids is None else np.sort(mask.kv_ids))


def with_arrays(shape_and_mask):
    return any(True for _ in held_arrays(shape_and_mask[1]))


@st.composite
def packed(draw, masks=masks):
    """Draw documents of self-attention, alone and causal, which random masks rarely are."""
    shape = draw(SHAPES)
    shape = shape._replace(seqlen_kv=shape.seqlen_q)
    steps = np.random.default_rng(draw(st.integers(0, 2**32))).random((*shape.batch, shape.seqlen_q)) < 0.2
    mask = masks.Documents(np.cumsum(steps, axis=-1))
    return shape, mask & masks.Causal() if draw(st.booleans()) else mask


CASES = st.one_of(
    SHAPES_AND_MASKS.filter(with_arrays).map(lambda pair: (pair[0], changed(pair[1], in_order))), packed()
)
LARGE = [
    (MaskShape((2,), 2, 300, 260), masks.Dense(np.random.default_rng(0).random((2, 1, 300, 260)) < 0.5)),
    (MaskShape((), 3, 300, 300), masks.Causal() & patterns.bigbird(300, block=16, num_heads=3, num_random_blocks=2)),
    (MaskShape((3,), 1, 200, 200), masks.Causal() & masks.Documents(np.arange(600).reshape(3, 200) // 37)),
    (MaskShape((3,), 1, 200, 250), masks.PrefixLM(np.array([0, 9, 250]), "top_left") | masks.Lengths(kv=3)),
]


def assert_same_lists(got, expected, num_entries):
    """Assert that the arrays that kernels read are equal, except for unused elements after the last entry."""
    for name in ("row_pointers", "column_pointers", "row_order", "column_order"):
        np.testing.assert_array_equal(got[name], expected[name])
    for name in ("kv_blocks", "q_blocks", "column_entries"):
        np.testing.assert_array_equal(got[name][:num_entries], expected[name][:num_entries])


def on_host(lists):
    return {name: device.to_host(array) for name, array in lists.items()}


def index_on_both(shape, mask, block):
    """Return the index of a mask with arrays on the device, and the index of the same mask on the host."""
    return (BlockIndex.from_mask(each, block=block, **shape._asdict()) for each in (mask.to(device.to_device), mask))


@given(CASES, BLOCKS)
def test_an_index_and_its_lists_are_the_same_wherever_they_are_made(case, block):
    index, expected = index_on_both(*case, block)
    turned, lists = index.transpose(), ListedWork(index=index).lists
    for each in (index, expected):
        assert_flat_arrays(each)
    with device.transfers_allowed():
        assert_same_blocks(index._on_host, expected)
        assert_same_blocks(turned._on_host, expected.transpose())
    host_lists = on_host(lists)
    assert_same_lists(host_lists, ListedWork(index=expected).lists, expected.num_entries)
    # The unused elements after the last entry are safe to read.
    behind = slice(int(host_lists["row_pointers"][-1]), None)
    assert not any(host_lists[name][behind].any() for name in ("kv_blocks", "kinds", "tiles", "column_entries"))
    assert ((0 <= host_lists["q_blocks"]) & (host_lists["q_blocks"] < index.num_q_blocks)).all()


def assert_flat_arrays(index):
    """Assert that kernels get flat arrays of known dtypes and shapes."""
    matrices, lists, room = index.batch * index.num_heads, ListedWork(index=index).lists, len(index.indices)
    is_on_host = isinstance(index.indices, np.ndarray)
    assert is_on_host or room == matrices * index.num_q_blocks * index.num_kv_blocks
    assert {name for name, array in lists.items() if array.dtype == np.uint8} == {"kinds", "bits"}
    assert all(array.dtype in (np.uint8, np.int32) and array.flags.c_contiguous for array in lists.values())
    shapes = {name: array.shape for name, array in lists.items()}
    for side, blocks in (("row", index.num_q_blocks), ("column", index.num_kv_blocks)):
        assert shapes.pop(f"{side}_pointers") == (matrices * blocks + 1,)
        assert shapes.pop(f"{side}_order") == (matrices * blocks,)
    assert shapes.pop("bits")[1:] == (index.block[0], -(-index.block[1] // 8))
    assert {shapes.pop(name, None) for name in ("lo", "hi")} == {None if index.lo is None else index.lo.shape}
    assert set(shapes.values()) == {(room,)}


def test_copies_on_the_host_have_no_unused_space():
    index, expected = index_on_both(MaskShape((), 1, 20, 20), masks.Dense(np.tri(20, dtype=bool)), (4, 4))
    with device.transfers_allowed():
        copied = index.to(device.to_host)
    assert len(index.indices) == 25 and len(copied.indices) == 15 and copied == expected


@given(CASES, BLOCKS, BLOCKS)
def test_an_index_on_a_device_is_a_mask(case, block, other):
    shape, mask = case
    again, expected = (
        BlockIndex.from_mask(index.as_mask(), block=other, **shape._asdict())
        for index in index_on_both(shape, mask, block)
    )
    with device.transfers_allowed():
        assert_same_blocks(again._on_host, expected)


@given(CASES, BLOCKS, st.data())
def test_union_and_intersection_stay_on_the_device(case, block, data):
    shape, mask = case
    other = changed(data.draw(strategies.masks(shape)), in_order)
    assume(with_arrays((shape, other)))
    (ours, first), (theirs, second) = (index_on_both(shape, each, block) for each in (mask, other))
    got = ours & theirs, ours | theirs
    with device.transfers_allowed():
        assert_same_blocks(got[0]._on_host, first & second)
        assert_same_blocks(got[1]._on_host, first | second)


@given(CASES, TILES)
def test_work_on_a_device_tells_the_mask_by_rows_and_by_columns(case, tile):
    shape, mask = case
    on_device = mask.to(device.to_device)
    work = work_list(requested_mask(on_device, False, None, shape, device.namespace), shape, tile)
    assert all(isinstance(array, device.DeviceArray) for array in held_arrays(work))
    with device.transfers_allowed():
        on_host = work.on_host
    for transposed in (False, True):
        allowed, _ = rebuilt(on_host, shape, transposed)
        assert (allowed == mask.toarray(**shape._asdict()).reshape(allowed.shape)).all()


@pytest.mark.parametrize("case", LARGE, ids=lambda case: type(case[1]).__name__)
@pytest.mark.parametrize("at_once", [1, 5000, 1 << 24])
def test_sweeps_of_any_size_say_the_same(monkeypatch, case, at_once):
    monkeypatch.setattr(evaluation, "_MAX_ELEMENTS_AT_ONCE", at_once)
    index, expected = index_on_both(*case, (32, 20))
    with device.transfers_allowed():
        assert_same_blocks(index._on_host, expected)


@given(CASES)
def test_elements_and_intervals_are_computed_on_the_device(case):
    shape, mask = case
    resolved, on_device = mask.resolve(shape), mask.to(device.to_device).resolve(shape)
    grid = np.ogrid[tuple(slice(extent) for extent in (shape.num_batch, *shape[1:]))]
    coordinates = [device.to_device(side) for side in grid]
    got = device.to_host(on_device(*coordinates))
    full = (shape.num_batch, *shape[1:])
    assert (np.broadcast_to(got, full) == np.broadcast_to(resolved(*grid), full)).all()
    got = mask.to(device.to_device).toarray(**shape._asdict())
    assert (device.to_host(got) == mask.toarray(**shape._asdict())).all()
    bounds, expected = on_device.intervals(*coordinates[:3]), resolved.intervals(*grid[:3])
    assert (bounds is None) == (expected is None)
    for side, wanted in zip(bounds or (), expected or ()):
        limits = (0, shape.seqlen_kv)
        assert (np.clip(device.to_host(side), *limits) == np.clip(wanted, *limits)).all()


@given(SHAPES, st.data())
def test_rectangles_on_a_device_never_claim_too_much(shape, data):
    mask = changed(data.draw(strategies.masks(shape)), in_order)
    assume(with_arrays((shape, mask)))
    resolved = mask.to(device.to_device).resolve(shape)

    def rectangle(*boxes):
        answers = resolved.rectangle(*map(device.to_device, boxes))
        return [device.to_host(each) if isinstance(each, device.DeviceArray) else each for each in answers]

    assert_rectangles_never_claim_too_much(mask, shape, rectangle, data.draw(st.integers(0, 2**32)))


def test_rectangles_of_whole_blocks_are_exact_on_a_device():
    rng = np.random.default_rng(0)
    blocks = rng.random((2, 6, 5)) < 0.5
    grid = masks.BlockPattern(device.to_device(blocks), 4).resolve(MaskShape((), 2, 24, 20))
    first = np.array([[0, 0, 4, 1, 5], [1, 3, 8, 0, 20], [0, 8, 24, 0, 4], [1, 0, 24, 0, 20]]).T
    may, must = grid.rectangle(device.to_device(np.zeros(4, int)), *map(device.to_device, first))
    h, i0, i1, j0, j1 = first
    inside = [blocks[h[n], i0[n] // 4 : -(-i1[n] // 4), j0[n] // 4 : -(-j1[n] // 4)] for n in range(4)]
    assert device.to_host(may).tolist() == [part.any() for part in inside]
    assert device.to_host(must).tolist() == [part.all() for part in inside]


# Lists that kernels read


def test_lists_are_named_as_in_the_record_of_kernels():
    rows = masks.Lengths(kv=np.array([3, 9])) & masks.Causal()
    index = BlockIndex.from_mask(rows, 16, 16, 4, batch=(2,))
    assert set(ListedWork(index=index).lists) <= set(WORK.names)


def test_intervals_lie_in_c_order():
    shape = MaskShape((3,), 2, 40, 40)
    for to in (lambda x: x, device.to_device):
        for mask in (masks.Lengths(kv=to(np.array([1, 2, 3]))), masks.Lengths(q=to(np.array([3, 2, 1])), kv=9)):
            work = work_list(mask.resolve(shape), shape, (16, 16))
            assert isinstance(work, IntervalWork)
            for side in (work.lo, work.hi):
                assert side.dtype == np.int32 and side.flags.c_contiguous and side.shape == (3, 1, 40)


def test_an_index_is_sent_as_it_is():
    index = BlockIndex.from_mask(masks.Causal() | patterns.strided(3), 50, 50, 8)
    with device.transfers_allowed():
        on_device = index.to(device.to_device)
    lists = ListedWork(index=on_device).lists
    assert_same_lists(on_host(lists), ListedWork(index=index).lists, index.num_entries)
    with device.transfers_allowed():
        assert_same_blocks(on_device._on_host, index)


# Number of operations


@pytest.mark.parametrize(("batch", "most"), [((), 23), ((3,), 27), ((2, 4), 35)])
def test_causal_documents_take_a_handful_of_operations(batch, most):
    length = 1 << 17
    ids = device.to_device(np.broadcast_to(np.arange(length) // 5000, (*batch, length)))
    shape = MaskShape(batch, 8, length, length)
    with device.counted() as operations:
        work = work_list(requested_mask(masks.Documents(ids), True, None, shape, device.namespace), shape, (128, 128))
    assert isinstance(work, IntervalWork) and operations() <= most


def test_listing_takes_operations_that_do_not_follow_the_blocks():
    counts = []
    for num_blocks in (4, 64):
        blocks = device.to_device(np.eye(num_blocks, dtype=bool))
        shape = MaskShape((), 1, 16 * num_blocks, 16 * num_blocks)
        with device.counted() as operations:
            work_list(masks.BlockPattern(blocks, 16).resolve(shape), shape, (128, 128)).lists
        counts.append(operations())
    assert counts[0] == counts[1] <= 60


# Operations that may synchronize, and arrays on any device

SHOWN = {
    "num_entries": lambda index: index.num_entries,
    "report": lambda index: index.report(eligible=index),
    "picture": lambda index: index.picture(),
    "to_scipy": lambda index: index.to_scipy(elements=True).toarray().tolist(),
    "row_counts": lambda index: index.row_counts().tolist(),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_shows_an_index_waits_and_says_what_the_host_says(name):
    shape, mask = MaskShape((2,), 1, 20, 20), masks.Lengths(kv=np.array([3, 17])) & masks.Causal()
    index = BlockIndex.from_mask(mask.to(device.to_device), block=4, **shape._asdict())
    with pytest.raises(Synchronises):
        SHOWN[name](index)
    with device.transfers_allowed():
        got, expected = SHOWN[name](index), SHOWN[name](BlockIndex.from_mask(mask, block=4, **shape._asdict()))
    assert got == expected


def test_an_index_on_a_device_is_walked_as_it_came():
    shape = MaskShape((), 1, 64, 64)
    index = BlockIndex.from_blocks(device.to_device(np.eye(4, dtype=bool)), 64, 64, 16)
    work = work_list(requested_mask(index, False, None, shape, device.namespace), shape, (256, 512))
    assert isinstance(work, ListedWork) and work.index is index


def test_an_index_on_a_device_is_not_hashed():
    index = BlockIndex.from_blocks(device.to_device(np.eye(4, dtype=bool)), 64, 64, 16)
    with pytest.raises(TypeError, match="never hashed"):
        hash(index.as_mask() & masks.Causal())


def test_a_grid_of_more_blocks_than_int32_counts_is_refused():
    mask = masks.Lengths(kv=device.to_device(np.array(3))) | masks.Causal()
    with pytest.raises(MemoryError, match="use larger blocks"):
        BlockIndex.from_mask(mask, 1 << 20, 1 << 20, 8)


def test_states_stay_on_the_device():
    blocks = np.random.default_rng(0).random((3, 4, 5)) < 0.5
    shape = MaskShape((), 3, 16, 20)
    mask = masks.Causal("top_left") & masks.BlockPattern(blocks, 4)
    index = BlockIndex.from_mask(mask.to(device.to_device), block=4, **shape._asdict())
    assert (device.to_host(index.states()) == BlockIndex.from_mask(mask, block=4, **shape._asdict()).states()).all()


def test_a_plan_explains_work_on_a_device():
    shape = ShapeDtype((64, 16), np.float16)
    for mask in (masks.Documents(np.arange(64) // 9), masks.BlockPattern(np.eye(4, dtype=bool), 16)):
        ready = plan(shape, shape, shape, mask=mask.to(device.to_device), device=DeviceSpec.gpu("H100"))
        with pytest.raises(Synchronises):
            ready.explain()
        with device.transfers_allowed():
            said = ready.explain()
        host = plan(shape, shape, shape, mask=mask, device=DeviceSpec.gpu("H100")).explain()
        assert said.splitlines()[:4] == host.splitlines()[:4]


def test_contents_out_of_order_or_range_leave_intervals_in_range():
    shape = MaskShape((2,), 1, 30, 20)
    rng = np.random.default_rng(0)
    ids = rng.integers(-9, 9, (2, 30)), rng.integers(-9, 9, (2, 20))
    for mask in (
        masks.Documents(*map(device.to_device, ids)),
        masks.Lengths(q=device.to_device(np.array([-5, 99])), kv=device.to_device(np.array([2**40, -1]))),
        masks.PrefixLM(device.to_device(np.array([-(2**40), 2**40])), "top_left"),
    ):
        work = work_list(mask.resolve(shape), shape, (16, 16))
        for side in map(device.to_host, (work.lo, work.hi)):
            assert ((0 <= side) & (side <= 20)).all()


def test_runs_of_ids_in_any_order_are_documents_on_a_device():
    ids = np.array([5, 5, 1, 7, 7, 7])
    dense = masks.Documents(device.to_device(ids)).toarray(6, num_heads=1)
    assert (device.to_host(dense)[0] == (ids[:, None] == ids)).all()


@pytest.mark.parametrize(
    "mask", [masks.Dense(np.ones((4, 4), bool)), masks.Lengths(kv=np.array([2])), masks.Documents(np.zeros(4, int))]
)
def test_arrays_of_a_mask_must_be_where_q_is(mask):
    shape = MaskShape((), 1, 4, 4)
    with pytest.raises(UnsupportedProblem, match="mask's arrays must be on the same device as q"):
        requested_mask(mask, False, None, shape, device.namespace)
    q = np.ones((4, 2), np.float32)
    with pytest.raises(UnsupportedProblem, match="mask's arrays must be on q's device"):
        attention(q, q, q, mask=mask.to(device.to_device))


def test_arrays_of_a_mask_must_be_in_one_place():
    mask = masks.Lengths(kv=np.array(2)) & masks.Documents(device.to_device(np.zeros(4, int)))
    reason = "mask.s arrays must be on the same device as q; got arrays of .* and "
    with pytest.raises(UnsupportedProblem, match=reason):
        requested_mask(mask, False, None, MaskShape((), 1, 4, 4))
    with pytest.raises(UnsupportedProblem, match="must all be of one array library"):
        BlockIndex.from_mask(mask, 4, 4, 2)


def test_lists_of_blocks_made_on_the_host_serve_a_device():
    shape = MaskShape((), 2, 64, 64)
    index = BlockIndex.from_mask(masks.Causal(), block=16, **shape._asdict())
    for mask in (index, patterns.random(64, block=16, density=0.5, num_heads=2), masks.SlidingWindow(3, 0), None):
        work = work_list(requested_mask(mask, True, None, shape, device.namespace), shape, (64, 64))
        assert all(isinstance(array, np.ndarray) for array in held_arrays(work))


def test_a_function_answers_where_it_is_asked():
    shape, lengths = MaskShape((2,), 1, 8, 8), masks.Lengths(kv=device.to_device(np.array([3, 8])))
    host = np.ones((8, 8), bool)
    with pytest.raises(UnsupportedProblem, match="or build a BlockIndex of the mask with NumPy"):
        BlockIndex.from_mask(lengths & masks.FromFunction(lambda b, h, i, j: host), block=4, **shape._asdict())
    closed_over = device.to_device(host)
    with pytest.raises(UnsupportedProblem, match="must return numpy arrays for numpy coordinates"):
        BlockIndex.from_mask(masks.FromFunction(lambda b, h, i, j: closed_over), block=4, **shape._asdict())
    with pytest.raises(LeavesNamespace):
        rule = masks.FromFunction(lambda b, h, i, j: np.less_equal(j, i))
        BlockIndex.from_mask(lengths & rule, block=4, **shape._asdict())


@pytest.mark.parametrize("shape", [((), 1, 0, 5), ((), 1, 5, 0), ((0,), 2, 5, 5), ((2,), 0, 5, 5), ((), 1, 0, 0)])
def test_an_empty_problem_has_an_empty_index_on_a_device(shape):
    shape = MaskShape(*shape)
    index = BlockIndex.from_mask(masks.Lengths(kv=device.to_device(np.array(3))), block=2, **shape._asdict())
    lists = ListedWork(index=index).lists
    assert lists["column_pointers"].shape == (index.num_kv_blocks + 1,)
    assert lists["column_order"].shape == (index.num_kv_blocks,)
    assert index.transpose().indptr.shape == (index.num_kv_blocks + 1,)
    with device.transfers_allowed():
        assert index.num_entries == 0 and index.picture() is not None
