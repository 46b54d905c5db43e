"""Block lists: those that kernels create equal those that the host creates, for every mask that the kernels support."""

from __future__ import annotations

import cupy_machine
import device_double as device
import numpy as np
from cuflash.calls._call import Call
from cuflash.planning._call_cache import CALLS
import pytest
from cuflash import masks
from cuflash.compiler import nvrtc as compiling
from cuflash.executors import gpu
from cuflash.executors.list_maker import ListMaker
from cuflash.executors.sim import Simulator
from cuflash.masks import MaskShape
from cuflash.planning.list_kernels import ListSource
from cuflash.testing import Example, assert_within_bounds
from device_lists import assert_lists_of
from executors import hostile_schedules, needs_compiler, to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from library_parts import part

import cuflash

RNG = np.random.default_rng(0)
EXECUTORS = [pytest.param("sim", marks=needs_compiler), pytest.param("gpu", marks=pytest.mark.gpu)]
CLOSED = [
    None, masks.Causal("top_left"), masks.Causal("bottom_right"), masks.SlidingWindow(5, 3, "top_left"),
    masks.Lengths(kv=11), masks.Lengths(q=7, kv=30), masks.Causal("top_left") & masks.Lengths(kv=9),
]  # fmt: skip


@st.composite
def cases(draw):
    """Draw a shape, a mask of one broadcast boolean array, perhaps with closed-form masks, and a block."""
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 3), (1, 2, 2)]))
    shape = MaskShape(batch, draw(st.integers(1, 3)), draw(st.integers(1, 75)), draw(st.integers(1, 75)))
    block = draw(st.sampled_from([(8, 8), (16, 16), (16, 20), (5, 32), (32, 7), (64, 64)]))
    rng, density = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    element = draw(st.sampled_from([None, block, (2 * block[0], 3 * block[1]), (4, 4), (6, 10)]))
    sides = shape[2:] if element is None else [-(-length // side) for length, side in zip(shape[2:], element)]
    leading = [draw(st.sampled_from([1, extent])) for extent in (*batch, shape.num_heads)]
    if element is None:
        sides = [draw(st.sampled_from([1, extent])) if extent != sides[0] else extent for extent in sides]
    array = rng.random((*leading, *sides)) < density
    lie = draw(st.sampled_from(["plain", "fewer axes", "transposed", "gaps", "backwards"]))
    if lie == "fewer axes":
        array = array.reshape(array.shape[next((n for n, extent in enumerate(leading) if extent > 1), len(leading)) :])
    elif lie == "transposed":
        array = array.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    elif lie == "gaps":
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    elif lie == "backwards":
        array = array[..., ::-1, ::-1].copy()[..., ::-1, ::-1]
    mask = masks.Dense(array) if element is None else masks.BlockPattern(array, element)
    closed = draw(st.sampled_from(CLOSED))
    return shape, mask if closed is None else draw(st.sampled_from([mask & closed, closed & mask])), block


def lists_by_kernels(mask, shape, block, machine=None):
    """Return the lists that the kernels create on the simulator, and the source of the lists."""
    source, array = ListSource.of(mask.to(device.DeviceArray).resolve(shape), shape, block)
    lists = ListMaker(source, machine or Simulator())((array._host.ctypes.data,), None)
    return source, source.views(lists)


def lists_on_gpu(mask, shape, block):
    import cupy

    source, array = ListSource.of(mask.to(to_device).resolve(shape), shape, block)
    lists = ListMaker(source, gpu.Gpu())((array.data.ptr,), cupy.cuda.get_current_stream())
    return source, {name: cupy.asnumpy(each) for name, each in source.views(lists).items()}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_kernels_list_what_the_host_lists(executor):
    @settings(max_examples=min(60, settings.default.max_examples))
    @given(cases())
    def check(case):
        mask, shape, block = case[1], case[0], case[2]
        make = lists_on_gpu if executor == "gpu" else lists_by_kernels
        assert_lists_of(*make(mask, shape, block), mask)

    check()


@st.composite
def cases_of_whole_blocks(draw):
    """Draw a shape, a block mask, perhaps intersected with closed-form masks, and another block size for the lists."""
    batch = draw(st.sampled_from([(), (2,), (2, 3), (1, 2, 2)]))
    shape = MaskShape(batch, draw(st.integers(1, 3)), draw(st.integers(1, 75)), draw(st.integers(1, 75)))
    own = draw(st.sampled_from([(1, 16), (3, 5), (16, 1), (32, 48), (100, 100)]))
    sides = [-(-length // side) for length, side in zip(shape[2:], own)]
    leading = [draw(st.sampled_from([1, extent])) for extent in (*batch, shape.num_heads)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = masks.BlockPattern(rng.random((*leading, *sides)) < draw(st.sampled_from([0.0, 0.1, 0.6, 1.0])), own)
    closed = draw(st.sampled_from(CLOSED))
    return shape, mask if closed is None else mask & closed, own, draw(st.sampled_from([(16, 16), (15, 20), (32, 8)]))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_lists_are_made_of_lists_in_blocks_of_another_size(executor):
    """Instead of the mask's array, kernels may read the kinds of the blocks of a list, for lists of other blocks."""
    if executor == "gpu":
        import cupy

        machine, send = gpu.Gpu(), cupy.asarray
    else:
        machine, send = Simulator(), device.to_device

    @settings(max_examples=min(60, settings.default.max_examples))
    @given(cases_of_whole_blocks())
    def check(case):
        shape, mask, own, block = case
        source, array = ListSource.of(mask.to(send).resolve(shape), shape, own)
        address = machine.mask_address if executor == "gpu" else lambda x: getattr(x, "_host", x).ctypes.data
        lists = ListMaker(source, machine)((address(array),), machine.stream())
        other = source.in_blocks(block)
        views = other.views(ListMaker(other, machine)((address(lists),), machine.stream()))
        got = {name: cupy.asnumpy(each) if executor == "gpu" else each for name, each in views.items()}
        assert_lists_of(other, got, mask)

    check()


LONG = MaskShape((2,), 2, 300, 700)
MANY = [
    (LONG, masks.Dense(RNG.random((2, 2, 300, 700)) < 0.01) & masks.Causal("bottom_right"), (16, 8)),
    (LONG, masks.BlockPattern(RNG.random((2, 1, 75, 88)) < 0.2, (4, 8)) & masks.Band(-90, 40), (4, 8)),
    (MaskShape((), 1, 2600, 16), masks.BlockPattern(RNG.random((1300, 8)) < 0.5, 2), (2, 2)),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", MANY, ids=["elements", "blocks", "more rows than threads"])
def test_any_order_of_threads_gives_the_same_lists(case):
    shape, mask, block = case
    for schedule in hostile_schedules("lists", 1):
        assert_lists_of(*lists_by_kernels(mask, shape, block, Simulator(schedule)), mask)


def test_calls_list_no_mask_of_several_arrays_or_of_many_axes():
    shape = MaskShape((2,), 1, 40, 40)
    dense, blocks = masks.Dense(np.ones((40, 40), bool)), masks.BlockPattern(np.eye(5, dtype=bool), 8)
    rule = masks.FromFunction(lambda b, h, i, j: (i + j) % 2 == 0)
    lengths = masks.Lengths(kv=np.array([1, 2]))
    for mask in (dense & blocks, dense | masks.Causal(), ~dense, dense & rule, dense & lengths):
        assert ListSource.of(mask.to(device.to_device).resolve(shape), shape, (8, 8)) is None
    five = MaskShape((1, 1, 1, 2), 1, 40, 40)
    assert ListSource.of(dense.to(device.to_device).resolve(five), five, (8, 8)) is None


def check_large_grids(library=cuflash):
    """Check that kernels list no grid of which they cannot add the numbers of a block and of a thread in int32.

    The first grid has the largest number of blocks, the second one more row, and the third too many rows for threads.
    """
    source_of = part(library, "planning.list_kernels").ListSource.of
    pattern = library.masks.BlockPattern(device.to_device(np.ones((1, 1), bool)), (1 << 25, 1 << 20))
    cases = (1 << 20, (32, 32), True), ((1 << 20) + 1, (32, 32), False), (1 << 25, (1, 1 << 20), False)
    for seqlen_q, block, is_served in cases:
        shape = library.masks.MaskShape((), 1, seqlen_q, 1 << 20)
        assert (source_of(pattern.resolve(shape), shape, block) is not None) == is_served


def test_the_host_lists_grids_that_kernels_cannot_number():
    check_large_grids()


# Calls on a test double of CuPy that runs the kernels.

Q, K, V, DO = RNG.standard_normal((4, 2, 3, 40, 16), dtype=np.float32)
KEPT = RNG.random((2, 3, 40, 40)) < 0.4
BLOCKS = RNG.random((3, 5, 5)) < 0.4


MASKS = {
    "elements": (lambda array: array, KEPT),
    "elements and causal": (lambda array: masks.Dense(array) & masks.Causal(), KEPT[:1]),
    "blocks": (lambda array: masks.BlockPattern(array, 8), BLOCKS),
    "blocks and causal": (lambda array: masks.Causal() & masks.BlockPattern(array, 8), BLOCKS),
}


def passes(mask, arrays, do, **options):
    """Return results and gradients of a call, on the host."""
    (o, lse), vjp = cuflash.attention_vjp(*arrays, mask=mask, return_lse=True, **options)
    return [each.get() if hasattr(each, "get") else each for each in (o, lse, *vjp(do))]


def require_bounds(results, *, q=Q, k=K, **operands):
    """Require that o, lse and gradients of a call are within their bounds; the mask holds host arrays."""
    example = Example(q=q, k=k, v=V, do=DO, **operands)
    assert_within_bounds(example, **dict(zip(("o", "lse", "dq", "dk", "dv"), results, strict=True)))


@pytest.mark.parametrize("name", MASKS)
def test_kernels_list_the_mask_at_each_call(cupy, monkeypatch, name):
    make, contents = MASKS[name]
    arrays, array, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(contents), cupy.asarray(DO)
    for number in range(3):
        cupy.log.clear()
        got = passes(make(array), arrays, do)
        assert cupy.launched.count("forward") == 1
        assert cupy.launched[:4] == ["classify", "ranks", "pointers", "entries"]
        require_bounds(got, mask=make(np.roll(contents, number, axis=-1)))
        array[...] = np.roll(array.get(), 1, axis=-1)  # modified in place: the next call sees it
        if number == 0:
            monkeypatch.setattr(Call, "plan", lambda *args, **options: pytest.fail("planned again"))
            monkeypatch.setattr(gpu, "ListMaker", lambda *args: pytest.fail("bound again"))


def test_gradients_read_the_lists_of_their_own_call(cupy):
    arrays, array, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(KEPT), cupy.asarray(DO)
    _, first = cuflash.attention_vjp(*arrays, mask=array)
    array[...] = ~KEPT
    _, second = cuflash.attention_vjp(*arrays, mask=array)
    for vjp, mask in ((first, KEPT), (second, ~KEPT)):
        dq, dk, dv = (x.get() for x in vjp(do))
        assert_within_bounds(Example(q=Q, k=K, v=V, do=DO, mask=mask), dq=dq, dk=dk, dv=dv)


def test_calls_of_other_layouts_masks_and_options_are_not_mixed_up(cupy):
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    ways = [
        (masks.BlockPattern, BLOCKS, 8, {}, None), (masks.BlockPattern, BLOCKS[:, ::-1], 8, {}, None),
        (masks.BlockPattern, BLOCKS, 8, {"causal": True}, masks.Causal()),
        (masks.BlockPattern, BLOCKS, 8, {"window": (9, 3)}, masks.SlidingWindow(9, 3)),
        (masks.BlockPattern, BLOCKS[:, :4, :4].copy(), 10, {}, None), (lambda array, _: array, KEPT, None, {}, None),
        (lambda array, _: array, KEPT[:, :, :1], None, {}, None),
        (lambda array, _: masks.Dense(array), KEPT[0], None, {}, None),
    ]  # fmt: skip
    for _ in range(2):
        for make, array, block, options, within in ways:
            on_device, mask = cupy_machine.Ndarray(array, 0), make(array, block)
            got = passes(make(on_device, block), arrays, do, **options)
            require_bounds(got, mask=mask if within is None else mask & within)


def test_a_call_allocates_one_array_for_its_lists_and_keeps_none(cupy):
    arrays, array = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(KEPT)
    cuflash.attention(*arrays, mask=array)
    before = cupy.allocated
    cuflash.attention(*arrays, mask=array)
    # o and the lists; lse, which the caller does not request, is in a reused workspace
    assert cupy.allocated == before + 2
    cuflash.attention(*arrays)
    before = cupy.allocated
    cuflash.attention(*arrays)
    assert cupy.allocated == before + 1


def test_gradients_over_broadcast_axes_and_checks_take_masks_that_kernels_list(cupy, monkeypatch):
    arrays, array = [cupy.asarray(each) for each in (Q, K[:1], V)], cupy.asarray(KEPT)
    for _ in range(2):
        require_bounds(passes(array, arrays, cupy.asarray(DO)), k=K[:1], mask=KEPT)


@pytest.mark.parametrize("name", ["elements", "blocks and causal"])
def test_a_call_with_out_makes_lists_too(cupy, name):
    make, contents = MASKS[name]
    arrays, array = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(contents)
    for _ in range(2):
        out, lse = cupy.empty(Q.shape, np.float32), cupy.empty(Q.shape[:-1], np.float32)
        (o, _), vjp = cuflash.attention_vjp(*arrays, mask=make(array), out=(out, lse), return_lse=True)
        assert o is out
        require_bounds([each.get() for each in (out, lse, *vjp(cupy.asarray(DO)))], mask=make(contents))


# Calls that write to the caller's arrays, under any mask.


def test_a_repeated_call_writes_to_its_out_and_plans_nothing(cupy, monkeypatch):
    arrays = [cupy.asarray(each) for each in (Q, K, V)]
    example = Example(q=Q, k=K, v=V, mask=masks.Causal())
    for number in range(3):
        out, lse = cupy.empty(Q.shape, np.float32), cupy.empty(Q.shape[:-1], np.float32)
        assert cuflash.attention(*arrays, causal=True, out=out) is out
        both = cupy.empty(Q.shape, np.float32)
        assert cuflash.attention(*arrays, causal=True, out=(both, lse)) is both
        assert (both.get() == out.get()).all()
        assert_within_bounds(example, o=out.get(), lse=lse.get())
        monkeypatch.setattr(Call, "plan", lambda *args, **options: pytest.fail("planned again"))


def test_outputs_that_overlap_arrays_are_refused_by_repeated_calls_too(cupy):
    arrays, size = [cupy.asarray(each) for each in (Q, K, V)], Q.size // Q.shape[-1]
    room = cupy.asarray(np.concatenate([Q, Q]))
    cuflash.attention(*arrays, out=room[:2])
    for out in (arrays[2], arrays[0]):
        with pytest.raises(cuflash.UnsupportedProblem, match="out must not overlap"):
            cuflash.attention(*arrays, out=out)
    with pytest.raises(cuflash.UnsupportedProblem, match="out must not overlap q"):
        cuflash.attention(room[1:3], *arrays[1:], out=room[:2])
    cuflash.attention(room[2:], *arrays[1:], out=room[:2])
    assert_within_bounds(Example(q=Q, k=K, v=V), o=room[:2].get())
    flat = room.reshape(-1)
    o, lses = flat[: Q.size].reshape(*Q.shape), [flat[Q.size - x : Q.size - x + size] for x in (0, 1)]
    cuflash.attention(*arrays, out=(o, lses[0].reshape(*Q.shape[:-1])))
    with pytest.raises(cuflash.UnsupportedProblem, match=r"out\[0\] and out\[1\] must not overlap"):
        cuflash.attention(*arrays, out=(o, lses[1].reshape(*Q.shape[:-1])))


def test_an_output_in_the_gaps_of_an_input_is_written_to_each_time(cupy):
    room, k, v = cupy.asarray(np.zeros((*Q.shape, 2), np.float32)), cupy.asarray(K), cupy.asarray(V)
    q, out = room[..., 0], room[..., 1]
    for factor in (1, 2):
        q[...] = factor * Q
        assert cuflash.attention(q, k, v, out=out) is out
        assert_within_bounds(Example(q=factor * Q, k=K, v=V), o=out.get())


# Invalid masks.


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda cupy: cupy.asarray(KEPT[..., :39]), "must broadcast to"),
        (lambda cupy: cupy.asarray(KEPT.astype(np.int8)), "must be boolean, True = attend; got dtype int8"),
        (lambda cupy: masks.BlockPattern(cupy.asarray(BLOCKS[:, :4]), 8), r"blocks must have shape \(\.\.\., 5, 5\)"),
        (lambda cupy: cupy_machine.Ndarray(KEPT, 1), "must be on the current device, 0; got device 1"),
        (lambda cupy: KEPT, "mask's arrays must be on the same device as q"),
    ],
    ids=["shape", "dtype", "blocks", "device", "host"],
)
def test_a_wrong_mask_is_refused_after_right_ones_too(cupy, make, reason):
    arrays = [cupy.asarray(each) for each in (Q, K, V)]
    for right in (cupy.asarray(KEPT), masks.BlockPattern(cupy.asarray(BLOCKS), 8)):
        cuflash.attention(*arrays, mask=right)
    cupy.log.clear()
    for _ in range(2):
        with pytest.raises(cuflash.UnsupportedProblem, match=reason):
            cuflash.attention(*arrays, mask=make(cupy))
    with pytest.raises(cuflash.UnsupportedProblem, match="kernel must be"):
        cuflash.attention(*arrays, mask=make(cupy), kernel="sm75")
    assert cupy.launched == []


def test_a_first_call_inside_a_capture_is_refused(cupy):
    arrays, array, stream = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(KEPT), cupy.cuda.Stream()
    with stream:
        cuflash.attention_vjp(*arrays, mask=array)[1](cupy.asarray(DO))
        # as if no kernel of lists had been loaded yet
        for key in [key for key in compiling._loaded if key[0].family == "lists"]:
            del compiling._loaded[key]
        CALLS.clear()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="lists_classify is not compiled yet.*make the same call once"):
            cuflash.attention(*arrays, mask=array)
        stream.end_capture()


def test_each_replay_lists_the_mask_again(cupy):
    arrays, array, stream = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(KEPT), cupy.cuda.Stream()
    with stream:
        cuflash.attention(*arrays, mask=masks.Dense(array) & masks.Causal())
        stream.begin_capture()
        o = cuflash.attention(*arrays, mask=masks.Dense(array) & masks.Causal())
        graph = stream.end_capture()
    array[...] = ~KEPT
    CALLS.clear()
    graph.launch()
    assert_within_bounds(Example(q=Q, k=K, v=V, mask=masks.Dense(~KEPT) & masks.Causal()), o=o.get())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_each_call_lists_a_changed_mask_on_every_path(executor, request):
    cupy = request.getfixturevalue("cupy") if executor == "sim" else pytest.importorskip("cupy")
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    array, blocks = cupy.asarray(KEPT), cupy.asarray(BLOCKS)
    ways = [
        (lambda cells, blocks: cells, {}, None),
        (lambda cells, blocks: masks.BlockPattern(blocks, 8), {"causal": True}, masks.Causal()),
        (lambda cells, blocks: masks.Dense(cells) & masks.BlockPattern(blocks, 8), {}, None),
        (lambda cells, blocks: ~masks.Dense(cells), {}, None), (lambda cells, blocks: cells, {"scale": 1e-30}, None),
    ]  # fmt: skip
    for number in range(3):
        for make, options, within in ways:
            got, mask = passes(make(array, blocks), arrays, do, **options), make(array.get(), blocks.get())
            require_bounds(got, mask=mask if within is None else mask & within, scale=options.get("scale"))
        array[...] = cupy.roll(array, 1, axis=-1)
        blocks[...] = cupy.roll(blocks, 1, axis=-1)
