"""Guards for faults of the library's Python code: properties of results, indexes and lists, on many examples.

Each guard takes a library: the installed one, or a copy with a fault under another name.
"""

import itertools

import functools

import device_double
import device_lists
import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from test_block_index import blocks_of
from test_device_masks import changed, in_order, packed
from test_work_list import CHANGES, assert_longest_first, rebuilt, with_a_change
from library_parts import part

SIGNS = (AssertionError, ValueError)  # exceptions with which a guard reports a fault; shapes may not match
MOST_SEEDS = 5  # without a fault, a guard passes with any number of seeds, so a short run lowers this number


def hunt(*strategies, first=(), seeds=MOST_SEEDS, most=120):
    """Check a property on some chosen examples, and then on many from several seeds, up to the first failure.

    The examples of a single seed may all be alike, so several seeds detect more.
    """

    def run(check):
        for each in first:
            check(*each)
        options = settings(
            max_examples=most, database=None, phases=[Phase.generate], report_multiple_bugs=False
        )  # fmt: skip
        for number in range(min(seeds, MOST_SEEDS)):
            seed(number)(options(given(*strategies)(check)))()

    return run


def telling_examples(library):
    """Yield examples in which most faults show, with tile heights and widths, because drawing them would take seconds.

    Heads are grouped, batch entries broadcast and differ in length, and masks have windows and bits.
    """
    of, masks = part(library, "testing.strategies").Structure, library.masks
    shape = {"num_heads": 4, "num_kv_heads": 2, "seqlen_q": 40, "seqlen_kv": 50, "head_dim": 8, "value_dim": 6}
    lengths, window = masks.Lengths(kv=np.array([50, 17])), masks.SlidingWindow(9, 3, "top_left")
    batch = {"q_batch": (2,), "k_batch": (1,), "v_batch": (2,)}
    yield of(**shape, **batch, mask=lengths & window).example(), 16, 12
    yield of(**shape, **batch, mask=lengths & masks.Dilated(3, align="top_left")).example(), 12, 16
    yield of(**shape, mask=window).example(), 8, 24


def in_base_2(guard):
    """Run a guard with scores in base 2 on any processor, because in natural units no fault in their unit shows."""

    @functools.wraps(guard)
    def guarded(library):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part(library, "executors.cpu"), "WEIGHTS_USE_EXP2", True)
            guard(library)

    return guarded


@in_base_2
def attention_is_right(library):
    """Check that every result is within its bound, for tiles of any size."""
    launch, work_list = (part(library, name) for name in ("plans", "blocks.work_list"))
    host, plan = (part(library, f"planning.{name}") for name in ("host", "plan"))
    device = part(library, "planning.device").DeviceSpec(name="test", num_processors=1, tile_memory_bytes=1 << 20)
    examples = part(library, "testing.strategies").examples(tile=16, most_scores=1 << 12, dtypes=["float32", "float64"])

    @hunt(examples, st.integers(8, 24), st.integers(8, 24), first=telling_examples(library))
    def check(example, block_q, block_kv):
        problem = part(library, "planning.problem").Problem.of(example.q, example.k, example.v, scale=example.scale)
        mask = work_list.requested_mask(example.mask, False, None, problem.mask_shape)
        work = work_list.work_list(mask, problem.mask_shape, (block_q, block_kv))
        # A plan's tiles are at least as large as the blocks of its lists.
        tile = max(block_q, work.block_q), max(block_kv, work.block_kv)
        tiling = host.HostTiling(problem, device, *tile, work)
        kernels = plan.KernelPlan(problem=problem, mask=mask, device=device, work=work, tiling=tiling)
        ready = launch.Plan(kernels)
        o, lse = ready.forward(example.q, example.k, example.v)
        dq, dk, dv = ready.backward(example.do, example.q, example.k, example.v, o, lse, example.dlse)
        part(library, "testing.assertions").assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


def rows_without_a_score_are_right(library):
    """Check that a row whose scores are all -inf without a mask is empty: its keys get no gradient from it."""
    x, q = np.ones((1, 3), np.float32), np.array([[-np.inf, 1, 1], [1, 1, 1]], np.float32)
    (o, lse), vjp = library.attention_vjp(q, x, x, return_lse=True)
    assert (o == [[0], [1]]).all() and np.isneginf(lse[0])
    assert (vjp(np.ones_like(q)).dv == 1).all()  # exact: the only weight of the other row is exp(0)


def shapes_and_masks(library):
    shapes = st.builds(
        part(library, "masks.shape").MaskShape,
        st.sampled_from([(3,), (2, 2), ()]),
        st.sampled_from([1, 3]),
        st.integers(1, 90),
        st.integers(1, 90),
    )
    return shapes.flatmap(lambda shape: st.tuples(st.just(shape), part(library, "testing.strategies").masks(shape)))


def indices_are_right(library):
    """Check that a block index represents exactly its mask, for blocks of any size."""
    index_of = part(library, "blocks.index").BlockIndex.from_mask

    @hunt(shapes_and_masks(library), st.tuples(st.integers(1, 12), st.integers(1, 12)))
    def check(shape_and_mask, block):
        shape, mask = shape_and_mask
        index = index_of(mask, block=block, **shape._asdict())
        expected = mask.toarray(**shape._asdict()).reshape(shape.num_batch, *shape[1:])
        dense, states = index.toarray(), index.states()
        assert (dense == expected).all()
        for place, elements in blocks_of(dense, block):
            assert states[place] == (1 if elements.all() else 2 if elements.any() else 0)


def telling_masks(library):
    """Yield bands, gaps and rows of different lengths, each with a tile."""
    masks, shape = library.masks, part(library, "masks.shape").MaskShape((2,), 2, 60, 50)
    yield (shape, masks.SlidingWindow(7, 2, "top_left")), (8, 8)
    yield (shape, masks.Causal("bottom_right")), (7, 5)
    yield (shape, masks.BlockPattern(np.random.default_rng(0).random((2, 2, 8, 7)) < 0.5, 8)), (8, 8)


def work_is_right(library):
    """Check that a work list describes its mask by rows and columns, for tiles of any size; integers are widened."""
    work_list = part(library, "blocks.work_list")
    narrow = library.masks.PrefixLM(np.array([5, 3], np.uint8), "bottom_right")
    frame = part(library, "masks.shape").MaskShape((2,), 1, 14, 10)
    try:
        work_list.work_list(work_list.requested_mask(narrow, False, None, frame), frame, (4, 4))
    except OverflowError as error:
        raise AssertionError("a number of keys meets a negative coordinate as it is") from error

    @hunt(shapes_and_masks(library), st.tuples(st.integers(1, 24), st.integers(1, 24)), first=telling_masks(library))
    def check(shape_and_mask, tile):
        shape, mask = shape_and_mask
        work = work_list.work_list(work_list.requested_mask(mask, False, None, shape), shape, tile)
        for transposed in (False, True):
            allowed, _ = rebuilt(work, shape, transposed)
            assert (allowed == mask.toarray(**shape._asdict()).reshape(allowed.shape)).all()
        if isinstance(work, work_list.ListedWork):
            assert_longest_first(work.lists, work.index.batch * work.index.num_heads)


def changed_indices(library):
    """Yield packed sequences, a block, and each change of some entries."""
    shape = part(library, "masks.shape").MaskShape((), 2, 60, 60)
    mask = library.masks.Sequences([0, 25, 27, 60], causal=True)
    for change, number in itertools.product(CHANGES, range(0, 20)):
        yield (shape, mask), (16, 8), number, change


def work_of_an_index_is_right(library):
    """Check that the work of an index, also of one that is changed, is its elements."""
    work_list, index_of = part(library, "blocks.work_list"), part(library, "blocks.index").BlockIndex.from_mask
    sizes, changes = st.tuples(st.integers(1, 12), st.integers(1, 12)), st.sampled_from(CHANGES)

    @hunt(shapes_and_masks(library), sizes, st.integers(0, 99), changes, first=changed_indices(library), most=40)
    def check(shape_and_mask, block, number, change):
        shape, mask = shape_and_mask
        index = with_a_change(index_of(mask, block=block, **shape._asdict()), number, change)
        work = work_list.work_list(work_list.requested_mask(index, False, None, shape), shape, (8, 8))
        for transposed in (False, True):
            allowed, _ = rebuilt(work, shape, transposed)
            assert (allowed == index.as_mask().toarray(**shape._asdict()).reshape(allowed.shape)).all()


def lists_on_a_device_are_right(library):
    """Check that lists created on a device represent exactly their mask, and that columns match rows."""
    index_of, listed = part(library, "blocks.index").BlockIndex.from_mask, part(library, "blocks.work_list").ListedWork
    device_lists.install(part(library, "blocks.index"), part(library, "executors.index_maker"))
    # evaluates only some rows of a matrix at once
    part(library, "executors.evaluation")._MAX_ELEMENTS_AT_ONCE = 1 << 11

    def check_index(index, expected):
        lists = {name: device_double.to_host(array) for name, array in listed(index=index).lists.items()}
        pointers, entries = (lists[f"column_{name}"] for name in ("pointers", "entries"))
        assert_longest_first(lists, index.batch * index.num_heads)
        with device_double.transfers_allowed():
            index = index._on_host
        for name in ("indptr", "indices"):
            assert np.array_equal(getattr(index, name), getattr(expected, name))
        assert (index.toarray() == expected.toarray()).all() and (index.states() == expected.states()).all()
        bits = (index.kinds == 3) & (expected.kinds == 3)
        assert np.array_equal(index.bits[index.tiles[bits]], expected.bits[expected.tiles[bits]])
        column = index._block_rows // index.num_q_blocks * index.num_kv_blocks + index.indices
        assert np.array_equal(entries[: pointers[-1]], np.argsort(column, kind="stable"))
        assert np.array_equal(np.diff(pointers), np.bincount(column, minlength=len(pointers) - 1))

    drawn = st.one_of(shapes_and_masks(library), packed(part(library, "masks")))

    @hunt(drawn, st.tuples(st.integers(1, 12), st.integers(1, 12)))
    def check(shape_and_mask, block):
        shape, mask = shape_and_mask[0], changed(shape_and_mask[1], in_order)
        if not any(True for _ in part(library, "masks.content").held_arrays(mask)):
            return
        on_device = mask.to(device_double.to_device)
        result, expected = (index_of(each, block=block, **shape._asdict()) for each in (on_device, mask))
        for index in (result, result.transpose().transpose()):
            check_index(index, expected)
