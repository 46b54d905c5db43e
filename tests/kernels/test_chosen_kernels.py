"""Queries that each choose their blocks, on the kernels of tiles of neighbours: lists as arrays, results, and calls.

Checks take the library as an argument where planted faults have them as guards.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import reduce
from itertools import product
from operator import and_
from typing import Any

import device_double
import numpy as np
import pytest
from cuflash import BlockIndex, DeviceSpec, ShapeDtype, masks, testing
from cuflash.calls._call import Call
from cuflash.executors import gpu
from cuflash.executors.index_maker import index_of
from cuflash.executors.launch import run as run_pass
from cuflash.executors.list_maker import ListMaker
from cuflash.executors.sim import Simulator
from cuflash.masks import ChosenBlocks, MaskShape
from cuflash.masks.one_array import AtEachCall
from cuflash.planning import chosen_lists
from cuflash.planning.chosen_lists import UnionsAtCall, UnionWork
from cuflash.testing import Example, assert_within_bounds
from executors import GPU, SIM, Run, blocks_together, hostile_schedules, is_long, needs_compiler, sampled, to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from library_parts import part
from test_chosen_blocks import rewritten, sets_of
from test_list_kernels import passes

import cuflash

INTEGERS = "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"
EXECUTORS = [pytest.param("sim", marks=needs_compiler), pytest.param("gpu", marks=pytest.mark.gpu)]
SIM80, SIM90 = (replace(SIM, kernel=kernel) for kernel in ("sm80", "sm90"))
KERNELS = ("sm80", "sm90")
on_kernels = pytest.mark.parametrize("kernel", KERNELS)
on_runs = pytest.mark.parametrize(
    "run",
    [
        pytest.param(replace(run, kernel=kernel), marks=mark, id=f"{run}-{kernel}")
        for run, mark in ((SIM, needs_compiler), (GPU, pytest.mark.gpu))
        for kernel in KERNELS
    ],
)
DRAWN = {"dtypes": ["float16"], "most_scores": 1 << 14, "longest": 200, "widest": 16}
CLOSED = [
    None, masks.Causal("top_left"), masks.Causal("bottom_right"), masks.SlidingWindow(70, 20, "top_left"),
    masks.Lengths(q=30, kv=90), masks.Causal("bottom_right") & masks.Lengths(kv=50),
]  # fmt: skip


def is_served(example: Example) -> bool:
    """Return whether kernels of tiles of neighbours serve an example's blocks and shape."""
    lists = next(part for part in getattr(example.mask, "operands", (example.mask,)) if type(part) is ChosenBlocks)
    return (lists.block in (16, 32) or lists.block % 64 == 0) and 0 not in example.problem.mask_shape[1:]


def chosen(**changed: Any) -> st.SearchStrategy[Example]:
    return testing.chosen(**DRAWN | changed).filter(is_served)


def of_library(library: Any, mask: Any) -> Any:
    """Return a mask as one of a library, which may be a copy with a planted fault."""
    if mask is None or type(mask).__module__.partition(".")[0] == library.__name__:
        return mask
    if hasattr(mask, "operands"):
        return reduce(and_, (of_library(library, each) for each in mask.operands))
    held = {each.name: getattr(mask, each.name) for each in fields(mask) if each.init}
    return getattr(library.masks, type(mask).__name__)(**held)


# Lists as arrays


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any, Any, int]:
    """Draw a shape, lists for it in any layout, an optional mask of row intervals, and the heads of a group."""
    group, num_kv_heads = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 48, 80])), draw(st.integers(1, 2))
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 3), (1, 2, 2)]))
    shape = MaskShape(batch, group * num_kv_heads, draw(st.integers(1, 200)), draw(st.integers(1, 300)))
    lists = draw(testing.mask_strategies.chosen_blocks(shape, num_kv_heads))
    lists = replace(lists, block=draw(st.sampled_from([16, 32, 64, 128])))
    closed = draw(st.sampled_from(CLOSED))
    if batch and draw(st.booleans()):  # lengths are read from the device
        lengths = draw(st.lists(st.integers(0, shape.seqlen_kv), min_size=shape.num_batch, max_size=shape.num_batch))
        kv = masks.Lengths(kv=np.array(lengths, np.int32).reshape(batch))
        closed = kv if closed is None or isinstance(closed, masks.Lengths) else kv & masks.Causal("bottom_right")
    return shape, lists, closed, num_kv_heads


def problem_of(library: Any, shape: MaskShape, num_kv_heads: int) -> Any:
    heads = shape.num_heads, num_kv_heads, num_kv_heads
    lengths = shape.seqlen_q, shape.seqlen_kv, shape.seqlen_kv
    arrays = [library.ShapeDtype((*shape.batch, h, n, 8), np.dtype(np.float16)) for h, n in zip(heads, lengths)]
    return part(library, "planning.problem").Problem.of(*arrays)


def members_of(shape: MaskShape, lists: Any, closed: Any, num_lists: int) -> np.ndarray[Any, Any]:
    """Return whether each query chose each block and attends a key of it, bool [*batch, lists, seqlen_q, blocks]."""
    num_blocks = -(-shape.seqlen_kv // lists.block)
    sets = sets_of(lists, shape._replace(num_heads=num_lists))
    chose = np.array([[number in each for number in range(num_blocks)] for each in sets.reshape(-1)], bool)
    chose = chose.reshape(*sets.shape, num_blocks)
    if closed is None:
        return chose
    table = closed.toarray(**shape._asdict())
    padding = num_blocks * lists.block - shape.seqlen_kv
    table = np.pad(np.broadcast_to(table, (*shape.batch, shape.num_heads, *shape[2:])), [(0, 0)] * (table.ndim - 1)
                   + [(0, padding)])  # fmt: skip
    seen = table.reshape(*table.shape[:-1], num_blocks, lists.block).any(-1)
    return chose & seen[..., :num_lists, :, :]  # no closed form here differs by head


def unions_as_arrays(tiling: Any, members: np.ndarray[Any, Any]) -> list[tuple[list[int], list[int]]]:
    """Return blocks and words of each tile, from the definition."""
    height, unions = tiling.queries_per_tile, []
    for rows in members.reshape(-1, *members.shape[-2:]):
        for first in range(0, len(rows), height):
            tile = rows[first : first + height]
            blocks = np.flatnonzero(tile.any(0))
            words = [sum(1 << int(row) for row in np.flatnonzero(tile[:, block])) for block in blocks]
            unions.append((blocks.tolist(), words))
    return unions


def unions_by_kernels(source: Any, views: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return blocks and words of each tile, as the kernel wrote them."""
    words = views["words"].astype(object) @ [1 << 32 * n for n in range(source.tiling.words_per_entry)]
    return [
        (views["kv_blocks"][first:last].tolist(), words[first:last].tolist())
        for first, last in views["ranges"].tolist()
    ]  # fmt: skip


def source_of(library: Any, case: Any, convert: Any) -> tuple[Any, Any, list[Any]]:
    """Return a plan's work of lists on a device, the lists, and their arrays."""
    shape, lists, closed, num_kv_heads = case
    lists = of_library(library, lists.to(convert))
    closed = None if closed is None else of_library(library, closed.to(convert))
    mask = lists if closed is None else closed & lists
    at_call = part(library, "masks.one_array").AtEachCall(mask).resolve(shape)
    work = part(library, "planning.chosen_lists").union_work(at_call, problem_of(library, shape, num_kv_heads))
    contents = part(library, "masks.one_array").mask_contents(mask, lambda *arrays: len(arrays))
    return work, lists, list(contents.arrays)


def check_unions(library: Any, case: Any, machine: Any = None) -> None:
    """Assert that the kernel joins lists as NumPy does."""
    work, lists, arrays = source_of(library, case, device_double.DeviceArray)
    maker = part(library, "executors.list_maker").ListMaker(work.source, machine or Simulator())
    buffer = maker([array._host.ctypes.data for array in arrays], None)
    require_unions(case, work, work.source.views(buffer))


def require_unions(case: Any, work: Any, views: Any) -> None:
    shape, lists, closed, _ = case
    members = members_of(shape, lists, closed, work.tiling.num_lists)
    if work.tiling.batch == 1:
        members = members.reshape(-1, *members.shape[-3:])
        assert (members == members[:1]).all(), "batch entries that differ have unions of their own"
        members = members[:1]
    assert unions_by_kernels(work.source, views) == unions_as_arrays(work.tiling, members)


def check_unions_on(executor: str, case: Any) -> None:
    if executor == "sim":
        return check_unions(cuflash, case)
    import cupy

    work, _, arrays = source_of(cuflash, case, to_device)
    buffer = ListMaker(work.source, gpu.Gpu())([array.data.ptr for array in arrays], cupy.cuda.get_current_stream())
    require_unions(case, work, {name: cupy.asnumpy(each) for name, each in work.source.views(buffer).items()})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_kernel_joins_lists_as_numpy_does(executor: str) -> None:
    @settings(max_examples=min(60, settings.default.max_examples))
    @given(cases())
    def check(case: Any) -> None:
        check_unions_on(executor, case)

    check()


def check_signs(executor: str, dtype: str) -> None:
    """Check that counts below 0 are 0, and those past the end all entries; numbers outside the blocks are none."""
    of_counts = np.iinfo(dtype)
    counts = np.array([0, 1, 2, 4, 5, of_counts.min, of_counts.max], dtype)
    for of_blocks in (np.int32, np.int64):
        far = np.iinfo(of_blocks)
        blocks = np.array([[1, far.min, far.max, 2], [far.max // 2 + 2, -2, 0, 3]] * 4, of_blocks)[:7]
        lists = ChosenBlocks(blocks, 16, counts=counts)
        check_unions_on(executor, (MaskShape((), 2, 7, 60), lists, None, 1))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_lists_and_counts_of_every_dtype_keep_their_sign(executor: str, dtype: str) -> None:
    check_signs(executor, dtype)


@st.composite
def cases_of_indices(draw: st.DrawFn) -> tuple[Any, Any, Any, Any, int]:
    """Draw a shape, the blocks of an index, masks of row intervals of the index and of a call, and key/value heads."""
    group, num_kv_heads = draw(st.sampled_from([1, 2, 3, 5, 8, 16])), draw(st.integers(1, 2))
    batch, block = draw(st.sampled_from([(), (1,), (2,), (2, 3)])), draw(st.sampled_from([16, 32, 64, 128]))
    shape = MaskShape(batch, group * num_kv_heads, draw(st.integers(1, 100)), draw(st.integers(1, 300)))
    leading = draw(st.sampled_from([batch, (1,) * len(batch)])), draw(st.sampled_from([shape.num_heads, 1]))
    rng, density = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.sampled_from([0.1, 0.5, 1.0]))
    cells = rng.random((*leading[0], leading[1], shape.seqlen_q, -(-shape.seqlen_kv // block))) < density
    return shape, masks.BlockPattern(cells, (1, block)), draw(st.sampled_from(CLOSED)), draw(st.sampled_from(CLOSED)), (
        num_kv_heads
    )  # fmt: skip


def check_unions_of_index(library: Any, case: Any, machine: Any = None) -> None:
    """Assert that the kernel joins the lists of a block index, which other kernels have made, as NumPy does."""
    machine = machine or Simulator()
    shape, pattern, own, closed, num_kv_heads = case
    room, kernels = part(library, "executors.list_maker"), part(library, "planning.list_kernels")
    cells = device_double.to_device(pattern.blocks)
    of_index = library.masks.BlockPattern(cells, pattern.block)
    of_index = of_index if own is None else of_index & of_library(library, own)
    source, cells = kernels.ListSource.of(of_index.resolve(shape), shape, pattern.block)
    lists = room.ListMaker(source, machine)([cells._host.ctypes.data], None)
    index = library.BlockIndex._of_lists(
        part(library, "blocks.carried").CarriedLists(device_double.DeviceArray(lists), source), seqlen_q=shape.seqlen_q,
        seqlen_kv=shape.seqlen_kv, block=pattern.block, batch=source.batch, num_heads=source.num_heads, lo=None,
        hi=None,
    )  # fmt: skip
    mask = index.as_mask() if closed is None else index.as_mask() & of_library(library, closed)
    at_call = part(library, "masks.one_array").AtEachCall(mask).resolve(shape)
    work = part(library, "planning.chosen_lists").union_work(at_call, problem_of(library, shape, num_kv_heads))
    assert work.carried is source and work.source is not source
    assert (work.tiling.batch, work.tiling.num_lists) == (source.batch, source.num_heads)
    lo, hi = (side[:, None] for side in work.bounds(0, 0, 0, shape.seqlen_q))
    j, rows = np.arange(shape.seqlen_kv), [each for each in (own, closed) if each is not None]
    seen = reduce(and_, rows, masks.Band()).toarray(shape.seqlen_q, shape.seqlen_kv)
    np.testing.assert_array_equal((lo <= j) & (j < hi), seen)
    views = work.source.views(room.ListMaker(work.source, machine)([lists.ctypes.data], None))
    table = np.broadcast_to(reduce(and_, rows, pattern).toarray(**shape._asdict()), (*shape.batch, *shape[1:]))
    num_blocks, side = -(-shape.seqlen_kv // pattern.block[1]), pattern.block[1]
    table = np.pad(table, [(0, 0)] * (table.ndim - 1) + [(0, num_blocks * side - shape.seqlen_kv)])
    members = table.reshape(shape.num_batch, shape.num_heads, shape.seqlen_q, num_blocks, side).any(-1)
    members = members[: work.tiling.batch, : work.tiling.num_lists]
    assert unions_by_kernels(work.source, views) == unions_as_arrays(work.tiling, members)


@needs_compiler
def test_the_kernel_joins_the_lists_of_an_index_as_numpy_does() -> None:
    @settings(max_examples=min(60, settings.default.max_examples))
    @given(cases_of_indices())
    def check(case: Any) -> None:
        check_unions_of_index(cuflash, case)

    check()


def case_of_many_blocks() -> Any:
    """Return lists of more blocks than shared memory holds words for, at a word and at two words for each."""
    rng = np.random.default_rng(0)
    shape = MaskShape((), 1, 70, 9000 * 16)
    return shape, ChosenBlocks(rng.integers(0, 9000, (70, 5)), 16), masks.Causal("bottom_right"), 1


@needs_compiler
def test_lists_of_many_blocks_come_in_ranges() -> None:
    shape, lists, closed, _ = case_of_many_blocks()
    for group in (1, 8):
        check_unions(cuflash, (shape._replace(num_heads=group), lists, closed, 1))
        check_columns(cuflash, (shape._replace(num_heads=group), lists, closed, 1))


@needs_compiler
def test_any_order_of_threads_joins_the_same_lists() -> None:
    rng = np.random.default_rng(0)
    shape = MaskShape((2,), 8, 300, 640)
    lists = ChosenBlocks(rng.integers(-2, 12, (2, 2, 300, 7)), 64)
    for schedule in hostile_schedules("unions", 1):
        check_unions(cuflash, (shape, lists, masks.Causal("bottom_right"), 2), Simulator(schedule))
        check_columns(cuflash, (shape, lists, masks.Causal("bottom_right"), 2), Simulator(schedule))


def check_columns(library: Any, case: Any, machine: Any = None) -> None:
    """Assert that the kernels list the queries of each block as NumPy does, in ascending order."""
    shape, lists, closed, num_kv_heads = case
    num_blocks = -(-shape.seqlen_kv // lists.block)
    lists = replace(lists, blocks=np.where(lists.blocks < 0, -1, lists.blocks % num_blocks))
    mask = lists if closed is None else lists & closed
    heads = shape.num_heads, num_kv_heads, num_kv_heads
    arrays = [
        ShapeDtype((*shape.batch, h, n, 8), np.dtype(np.float16))
        for h, n in zip(heads, (shape.seqlen_q, shape.seqlen_kv, shape.seqlen_kv))
    ]
    plan = library.plan(*arrays, mask=mask, executor="sim", kernel="sm80")._plan
    tiling = plan.work.tiling
    launches = {name: plan.kernels.backward.launches[name] for name in tiling.column_launches}
    outputs = {name: np.full(each.shape, -1, each.dtype) for name, each in tiling.columns.items()}
    kernels = part(library, "planning.launches").Pass(launches, features=(plan.work.feature,))
    part(library, "executors.launch").run(plan, kernels, machine or Simulator(), outputs)
    members = members_of(shape, lists, None, tiling.num_lists)
    if tiling.batch == 1:
        members = members.reshape(-1, *members.shape[-3:])[:1]
    for number, rows in enumerate(members.reshape(-1, *members.shape[-2:])):
        pointers = outputs["column_pointers"][number]
        queries = outputs["queries"].reshape(-1)
        assert pointers[0] == number * tiling.max_members
        for block in range(tiling.num_blocks):
            listed = queries[pointers[block] : pointers[block + 1]]
            assert listed.tolist() == np.flatnonzero(rows[:, block]).tolist()


@needs_compiler
def test_the_kernels_list_the_queries_of_each_block_as_numpy_does() -> None:
    @settings(max_examples=min(60, settings.default.max_examples))
    @given(cases())
    def check(case: Any) -> None:
        check_columns(cuflash, case)

    check()


# Results


@on_runs
def test_results_are_within_their_bounds(run: Run) -> None:
    @settings(run.settings, max_examples=settings.default.max_examples if is_long() else 3)
    @given(chosen(has_sink=True))
    def check(example: Example) -> None:
        assert_within_bounds(run.rounded(example), **run.everything(run.rounded(example)))

    check()


@on_runs
def test_order_and_repetition_change_no_bit(run: Run) -> None:
    @settings(run.settings, max_examples=settings.default.max_examples if is_long() else 2)
    @given(chosen(has_intervals=False), st.integers(0, 2**32 - 1))
    def check(example: Example, seed: int) -> None:
        same = example.but(mask=rewritten(np.random.default_rng(seed), example.mask))
        first, second = run.everything(example), run.everything(same)
        for name, x in first.items():
            np.testing.assert_array_equal(x, second[name], err_msg=name)

    check()


@on_runs
def test_all_blocks_are_no_mask(run: Run) -> None:
    @settings(run.settings, max_examples=settings.default.max_examples if is_long() else 2)
    @given(chosen(has_intervals=False))
    def check(example: Example) -> None:
        number = -(-example.problem.seqlen_kv // example.mask.block)
        every = np.broadcast_to(np.arange(number), (example.problem.seqlen_q, number))
        results = run.everything(example.but(mask=ChosenBlocks(every, example.mask.block)))
        assert_within_bounds(run.rounded(example.but(mask=None)), **results)

    check()


def groups_example(group: int, block: int, closed: Any = None, **changed: Any) -> Example:
    """Return an example with `group` heads per list, several tiles of queries and several steps of a tile of keys.

    It has row intervals too if `closed` is a mask of them.
    """
    rng = np.random.default_rng(group)
    seqlen_q, num_blocks = 150 if group < 16 else 40, -(-200 // block)
    mask = ChosenBlocks(rng.integers(-1, num_blocks, (2, 2, seqlen_q, 3)), block)
    structure = testing.Structure(
        q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=2 * group, num_kv_heads=2, seqlen_q=seqlen_q,
        seqlen_kv=200, head_dim=16, value_dim=16, dtype="float16", mask=mask,
    )  # fmt: skip
    example = SIM80.rounded(replace(structure, **changed).example())
    return example if closed is None else example.but(mask=example.mask & closed)


def check_group(
    library: Any, group: int, block: int, closed: Any = None, kernel: str = "sm80", **options: Any
) -> None:
    """Assert that all results with `group` heads per list are within their bounds."""
    example = groups_example(group, block, closed)
    given_ = {"mask": of_library(library, example.mask), "executor": "sim", "kernel": kernel, **options}
    (o, lse), vjp = library.attention_vjp(example.q, example.k, example.v, return_lse=True, **given_)
    dq, dk, dv = vjp(example.do, example.dlse)
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


# On the simulator, a short run has each group once, alone or cut, of one family or the other.
GROUPS = [
    pytest.param(*run.values, group, closed, marks=run.marks, id=f"{run.id}-{group}-{name}")
    for number, (run, group) in enumerate(product(on_runs.args[1], (1, 3, 12, 16, 80)))
    for turn, (name, closed) in enumerate({"alone": None, "cut": CLOSED[-1]}.items())
    if is_long() or run.values[0].is_on_device or (number // 5 == number % 5 % 2 and turn == number // 2 % 2)
]


@pytest.mark.parametrize("run, group, closed", GROUPS)
def test_groups_of_any_size_share_their_keys(run: Run, group: int, closed: Any) -> None:
    example = groups_example(group, 64 if group != 3 else 32, closed)
    results = run.everything(example)
    assert set(results) == {"o", "lse", "dq", "dk", "dv"}
    assert_within_bounds(run.rounded(example), **results)
    if group < 8:  # dQ has a kernel of its own then, as in larger groups
        repeatable = replace(run, deterministic=True)
        assert_within_bounds(run.rounded(example), **repeatable.everything(example))


def check_far_columns(library: Any, kernel: str = "sm80", group: int = 2) -> None:
    """Assert bounds for rows that fill no chunk, and K and V that broadcast over the batch.

    Groups of two heads have a list for each query head, larger ones a list for each key/value head.
    """
    rng, num_heads = np.random.default_rng(0), 2 * group
    mask = ChosenBlocks(rng.integers(-1, 4, (num_heads if group == 2 else 2, 70, 2)), 64)
    structure = testing.Structure(
        q_batch=(2,), k_batch=(1,), v_batch=(2,), num_heads=num_heads, num_kv_heads=2, seqlen_q=70, seqlen_kv=200,
        head_dim=13, value_dim=9, dtype="float16", mask=mask, layouts=("padded",) * 5,
    )  # fmt: skip
    example = SIM80.rounded(structure.example())
    (o, lse), vjp = library.attention_vjp(
        example.q, example.k, example.v, mask=of_library(library, mask), executor="sim", return_lse=True, kernel=kernel
    )
    dq, dk, dv = vjp(example.do, example.dlse)
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


@needs_compiler
@pytest.mark.parametrize("kernel, group", [("sm80", 2), ("sm90", 2), ("sm90", 9)])
def test_rows_that_fill_no_tile_and_broadcast_keys_are_served(kernel: str, group: int) -> None:
    check_far_columns(cuflash, kernel, group)


def check_many_members(library: Any) -> None:
    """Check that lists are joined only if kernels can add the numbers of two (query, block) pairs in int32."""
    tiling_of = part(library, "planning.chosen_lists").UnionTiling
    for num_chosen, is_served in ((255, True), (256, False)):
        shape = library.masks.MaskShape((), 1, 1 << 22, 1 << 22)
        tiling = tiling_of(shape=shape, batch=1, num_lists=1, num_chosen=num_chosen, block=64, group_size=1)
        assert tiling.can_be_numbered == is_served


def test_lists_whose_pairs_kernels_cannot_number_are_not_joined() -> None:
    check_many_members(cuflash)


def popular_example(block: int = 64) -> Example:
    """Return an example whose block 0 all queries chose, and its last block none."""
    example = groups_example(8, block)
    blocks = np.minimum(example.mask.blocks, 200 // block - 1)
    blocks[..., 0] = 0
    return example.but(mask=ChosenBlocks(blocks, block) & masks.Causal("bottom_right"))


def check_parts(library: Any, queries_per_part: int = 40, block: int = 64, kernel: str = "sm80") -> None:
    """Assert that several thread blocks share the keys of a block that many queries chose."""
    example, lists = popular_example(block), part(library, "planning.chosen_lists")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lists, "QUERIES_PER_PART", queries_per_part)
        (o, lse), vjp = library.attention_vjp(
            example.q, example.k, example.v, mask=example.mask, executor="sim", kernel=kernel, return_lse=True
        )
        dq, dk, dv = vjp(example.do, example.dlse)
    part(library, "testing.assertions").assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


@needs_compiler
@pytest.mark.parametrize("queries_per_part, block", [(40, 64), (9, 128)])
@on_kernels
def test_parts_of_what_many_queries_chose_are_added(kernel: str, queries_per_part: int, block: int) -> None:
    check_parts(cuflash, queries_per_part, block, kernel)


def check_scores(library: Any, name: str) -> None:
    """Check results if a score function depends on head, query and key, and the rows of a tile have several heads."""
    rng, example = np.random.default_rng(0), groups_example(6, 64)
    scores = part(library, "scores")
    score = {
        "softcap": lambda: scores.softcap(2.0),
        "alibi": lambda: scores.alibi(rng.random(12).astype(np.float32), align="bottom_right"),
        "bias": lambda: scores.bias(rng.standard_normal((2, 12, 150, 200)).astype(np.float16)),
    }[name]()
    example = example.but(mask=example.mask & masks.Lengths(kv=170), score=score)
    (o, lse), vjp = library.attention_vjp(
        example.q, example.k, example.v, mask=example.mask, score=score, executor="sim", kernel="sm80", return_lse=True
    )
    dq, dk, dv = vjp(example.do, example.dlse)
    part(library, "testing.assertions").assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


@needs_compiler
@pytest.mark.parametrize("name", ["softcap", "alibi", "bias"])
def test_score_functions_change_scores_of_chosen_blocks(name: str) -> None:
    check_scores(cuflash, name)


def check_bits(run: Run, example: Example, num_tiles: int, name: str) -> None:
    """Assert that results have the same bits in any order of threads and blocks, of which each has several tiles."""
    plan = run.kernel_plan(example)
    tiling = plan.work.tiling
    assert tiling.num_list_heads * tiling.num_tiles * (tiling.heads_per_list // tiling.heads_per_tile) == num_tiles
    passes_of_few_blocks = [
        replace(each, launches={
            role: replace(launch, max_blocks=launch.max_blocks and 3) for role, launch in each.launches.items()
        })
        for each in (plan.kernels.forward, plan.kernels.backward)
    ]  # fmt: skip
    cotangents = {"do": example.do, "dlse": example.dlse}
    results = []
    for machine in (Simulator(), *map(Simulator, hostile_schedules(name, 1)), *blocks_together(name, most=1)):
        arrays = {name: getattr(example, name) for name in "qkv"}
        outputs = {name: np.full(each.shape, np.nan, each.dtype) for name, each in plan.results("forward").items()}
        gradients = {name: np.full(each.shape, np.nan, each.dtype) for name, each in plan.kernel_gradients.items()}
        forward, backward = passes_of_few_blocks
        run_pass(plan, forward, machine, arrays | outputs)
        run_pass(plan, backward, machine, arrays | outputs | cotangents | gradients)
        results.append(outputs | gradients)
    assert_within_bounds(example, **results[0])
    for other in results[1:]:
        for name, x in results[0].items():
            np.testing.assert_array_equal(x, other[name], err_msg=name)


def check_bits_of_parts(run: Run) -> None:
    """Assert the same bits if several thread blocks share the keys of a block that many queries chose."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chosen_lists, "QUERIES_PER_PART", 40)
        assert run.kernel_plan(popular_example()).work.tiling.num_parts == 4
        check_bits(run, popular_example(), 76, "chosen")


def check_bits_of_large_groups(run: Run) -> None:
    """Assert the same bits if several tiles share a group's heads, and some queries attend no key."""
    lists = ChosenBlocks(np.random.default_rng(0).integers(-1, 4, (30, 2)), 64)
    one = dict.fromkeys(("q_batch", "k_batch", "v_batch"), ()) | {"num_heads": 80, "num_kv_heads": 1, "seqlen_q": 30}
    check_bits(run, groups_example(80, 64, masks.Lengths(kv=170), mask=lists, **one), 60, "chosen by a large group")


@needs_compiler
@pytest.mark.parametrize(("check", "run"), [
    (check_bits_of_large_groups, SIM80), (check_bits_of_large_groups, SIM90),
    *((check_bits_of_parts, run) for run in sampled((SIM90, SIM80), 2)),
])  # fmt: skip
def test_gradients_have_the_same_bits_under_every_schedule(run: Run, check: Any) -> None:
    check(run)


@pytest.mark.gpu
@pytest.mark.parametrize("group, seqlen", [(1, 18000), (8, 2300), (12, 1400), (80, 300)])
@on_kernels
def test_results_repeat_on_a_gpu(kernel: str, group: int, seqlen: int) -> None:
    """Thread blocks have several tiles each, most queries choose few blocks, and some choose none.

    Groups of fewer than 8 heads repeat only if they are asked to.
    """
    import cupy

    rng = np.random.default_rng(group)
    q, do = (cupy.asarray(rng.standard_normal((2 * group, seqlen, 128)).astype(np.float16)) for _ in range(2))
    k, v = (cupy.asarray(rng.standard_normal((2, seqlen, 128)).astype(np.float16)) for _ in range(2))
    blocks = cupy.asarray(rng.integers(-1, -(-seqlen // 64), (2, seqlen, 3)))
    mask = ChosenBlocks(blocks, 64) & masks.Lengths(kv=seqlen - 40)
    first = None
    for _ in range(20):
        (o, lse), vjp = cuflash.attention_vjp(
            q, k, v, mask=mask, return_lse=True, kernel=kernel, deterministic=group < 8
        )
        results = {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), vjp(do), strict=True))}
        host = {name: each.get() for name, each in results.items()}
        first = first or host
        for name, x in first.items():
            assert np.isfinite(x).all() or name == "lse", name
            np.testing.assert_array_equal(x, host[name], err_msg=f"{name}, {np.isnan(host[name]).sum()} NaN")


# Calls, on a stand-in for CuPy that runs the kernels


RNG = np.random.default_rng(0)
Q, DO = RNG.standard_normal((2, 2, 8, 40, 16)).astype(np.float16)
K, V = RNG.standard_normal((2, 2, 2, 130, 16)).astype(np.float16)
LISTS = RNG.integers(-1, 3, (3, 2, 2, 40, 2))
LENGTHS = RNG.integers(60, 130, (3, 2)).astype(np.int32)
OFFSETS = np.array([[[0, 9, 40], [0, 50, 130]], [[0, 22, 40], [0, 70, 120]], [[3, 30, 40], [10, 64, 130]]], np.int64)
WAYS = {
    "lists": lambda take, turn: ChosenBlocks(take(LISTS[turn]), 64),
    "lists for all": lambda take, turn: ChosenBlocks(take(LISTS[turn, 0, :1].astype(np.int32)), 64),
    "counts": lambda take, turn: ChosenBlocks(take(LISTS[turn]), 64, counts=take(LISTS[turn, 0, :, :, 0] % 3)),
    "within intervals": lambda take, turn: (
        ChosenBlocks(take(LISTS[turn].swapaxes(1, 2)).swapaxes(1, 2), 64) & masks.Causal("bottom_right")
        & masks.Lengths(kv=120)
    ),
    "within lengths": lambda take, turn: (
        masks.Lengths(q=take(LENGTHS[turn] // 4), kv=take(LENGTHS[turn])) & ChosenBlocks(take(LISTS[turn, 0]), 64)
        & masks.Causal("bottom_right")
    ),
    "within sequences": lambda take, turn: (
        ChosenBlocks(take(LISTS[turn]), 64, counts=take(LISTS[turn, 0, :, :, 0] % 3))
        & masks.Sequences(take(OFFSETS[turn, 0]), take(OFFSETS[turn, 1]), allow_gaps=True)
    ),
}  # fmt: skip


def require_bounds(mask: Any, **results: Any) -> float:
    """Require that results are within their bounds; return the largest share of one. The mask holds host arrays."""
    return assert_within_bounds(SIM80.rounded(Example(q=Q, k=K, v=V, mask=mask, do=DO)), **results)


def plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in ((Call, "plan"), (gpu, "BoundPass"), (gpu, "ListMaker")):
        monkeypatch.setattr(place, name, lambda *args, name=name, **options: pytest.fail(f"{name} again"))


@needs_compiler
@pytest.mark.parametrize("name", WAYS)
def test_calls_with_new_lists_share_their_launches(cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arrays, do, got = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO), []
    with monkeypatch.context() as patched:
        for turn in range(3):
            cupy.log.clear()
            got.append(passes(WAYS[name](cupy.asarray, turn), arrays, do))
            intervals = ["intervals"] if name in ("within lengths", "within sequences") else []
            assert cupy.launched == [
                *intervals, "unions", "forward", "columns_count", "columns_scan", "columns_fill", "backward_statistics",
                "backward", "convert_dq",
            ]  # fmt: skip
            if turn == 0:
                plans_nothing(patched)
    for turn, results in enumerate(got):
        named = dict(zip(("o", "lse", "dq", "dk", "dv"), results, strict=True))
        assert 0 < require_bounds(WAYS[name](np.asarray, turn), **named) < 1


@needs_compiler
def test_gradients_read_the_lists_of_their_own_call(cupy: Any) -> None:
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    lists, pullbacks = cupy.asarray(LISTS[0]), []
    for turn in (0, 1):
        lists[...] = LISTS[turn]
        pullbacks.append(cuflash.attention_vjp(*arrays, mask=ChosenBlocks(lists, 64))[1])
    for turn, vjp in enumerate(pullbacks):
        dq, dk, dv = (x.get() for x in vjp(do))
        assert 0 < require_bounds(ChosenBlocks(LISTS[turn], 64), dq=dq, dk=dk, dv=dv) < 1


@needs_compiler
@pytest.mark.parametrize("name", ["lists", "within lengths"])
def test_plans_of_new_lists_share_their_launches_and_tell_what_they_visit(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    arrays, plans = [cupy.asarray(each) for each in (Q, K, V)], []
    with monkeypatch.context() as patched:
        for turn in range(3):
            plans.append(cuflash.plan(*arrays, mask=WAYS[name](cupy.asarray, turn)))
            plans[turn].forward(*arrays)
            if turn == 0:
                plans_nothing(patched)
    for turn, plan in enumerate(plans):
        o, lse = plan.forward(*arrays)
        assert 0 < require_bounds(WAYS[name](np.asarray, turn), o=o.get(), lse=lse.get()) < 1
        on_host = cuflash.plan(Q, K, V, mask=WAYS[name](np.asarray, turn), executor="sim")._plan
        visited = plan._plan.visited_scores, on_host.visited_scores
        # on a device, blocks that no query of a tile attends are dropped
        assert 0 < visited[0] < visited[1] if name == "within lengths" else visited[0] == visited[1]
        assert "16 neighbouring queries" in plan.explain()


@needs_compiler
def test_lists_with_masks_that_kernels_do_not_join_are_planned_at_each_call(cupy: Any) -> None:
    """Two masks of arrays in float32, and lists with a second mask of blocks, are attended too."""
    pattern = RNG.random((10, 9)) < 0.6
    for dtype, mask_of in (
        (np.float32, lambda take: WAYS["within lengths"](take, 0)),
        (np.float16, lambda take: ChosenBlocks(take(LISTS[0]), 64) & masks.BlockPattern(take(pattern), (4, 16))),
    ):
        example = Example(
            q=Q.astype(dtype), k=K.astype(dtype), v=V.astype(dtype), mask=mask_of(np.asarray), do=DO.astype(dtype)
        )
        for _ in range(2):
            arrays = [cupy.asarray(getattr(example, name)) for name in ("q", "k", "v")]
            got = passes(mask_of(cupy.asarray), arrays, cupy.asarray(example.do))
            results = dict(zip(("o", "lse", "dq", "dk", "dv"), got, strict=True))
            assert_within_bounds(SIM80.rounded(example) if dtype == np.float16 else example, **results)


@needs_compiler
def test_numbers_outside_the_blocks_are_ignored_on_a_device(cupy: Any) -> None:
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    wild = np.where(LISTS[0] < 0, RNG.choice([-(2**40), -2, 3, 2**40], LISTS[0].shape), LISTS[0])
    got = passes(ChosenBlocks(cupy.asarray(wild), 64), arrays, do)
    named = dict(zip(("o", "lse", "dq", "dk", "dv"), got, strict=True))
    assert 0 < require_bounds(ChosenBlocks(LISTS[0], 64), **named) < 1


@needs_compiler
def test_a_block_index_of_one_query_a_block_takes_the_kernels(cupy: Any) -> None:
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    lists = ChosenBlocks(LISTS[0, :1, :1], 64)
    index = lists.index(130, num_heads=1)
    cupy.log.clear()
    got = passes(index, arrays, do)
    assert "columns_fill" in cupy.launched and "classify" not in cupy.launched
    assert 0 < require_bounds(lists, **dict(zip(("o", "lse", "dq", "dk", "dv"), got, strict=True))) < 1


CELLS = RNG.random((3, 2, 8, 40, 3)) < 0.5
CAUSAL = masks.Causal("bottom_right")


def index_of_cells(take: Any, turn: int, heads: int = 8, closed: Any = None) -> BlockIndex:
    """Return an index with blocks of one query, from booleans that `take` converts."""
    pattern = masks.BlockPattern(take(CELLS[turn, :, :heads]), (1, 64))
    mask = pattern if closed is None else pattern & closed
    return BlockIndex.from_mask(mask, 40, 130, (1, 64), batch=(2,), num_heads=heads)


# Indices with blocks of one query: functions of `take` and of a number, and options of their calls.
INDICES = {
    "blocks": (lambda take, turn: BlockIndex.from_blocks(take(CELLS[turn]), 40, 130, (1, 64)), {}),
    "shared blocks": (lambda take, turn: BlockIndex.from_blocks(take(CELLS[turn, 0, :1]), 40, 130, (1, 64)), {}),
    "a pattern": (index_of_cells, {"window": (50, 20), "causal": "bottom_right"}),
    "lists": (lambda take, turn: ChosenBlocks(take(LISTS[turn]), 64).index(130, num_heads=8), {}),
    "a copy": (
        lambda take, turn: ChosenBlocks(LISTS[turn, :1, :1], 64).index(130, num_heads=1).to(take),
        {"causal": "bottom_right"},
    ),
    "filled": (lambda take, turn: index_of_cells(take, turn, 1, CAUSAL).filled(), {"causal": "bottom_right"}),
    "all blocks": (lambda take, turn: BlockIndex.from_blocks(take(CELLS[turn] | True), 40, 130, (1, 64)), {}),
    "no blocks": (lambda take, turn: BlockIndex.from_blocks(take(CELLS[turn] & False), 40, 130, (1, 64)), {}),
}  # fmt: skip


def require_bounds_of_index(index: BlockIndex, options: Any, *results: Any) -> float:
    """Require that o, lse and gradients are within their bounds; the index is on the host."""
    mask: Any = index.as_mask()
    for name in options:
        mask &= {"causal": CAUSAL, "window": masks.SlidingWindow(*options.get("window", (0, 0)), "bottom_right")}[name]
    return require_bounds(mask, **dict(zip(("o", "lse", "dq", "dk", "dv"), results, strict=True)))


@needs_compiler
@pytest.mark.parametrize("name", INDICES)
def test_an_index_on_a_device_takes_the_kernels(cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Calls with new indices of one layout share their launches, and list no block again."""
    (make, options), arrays, do = INDICES[name], [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    indices = [make(cupy.asarray, turn) for turn in range(3)]
    assert all(index._carried is not None and not index.is_on_host for index in indices)
    with monkeypatch.context() as patched:
        for turn, index in enumerate(indices):
            cupy.log.clear()
            results = passes(index, arrays, do, **options)
            assert cupy.launched == [
                "unions", "forward", "columns_count", "columns_scan", "columns_fill", "backward_statistics",
                "backward", "convert_dq",
            ]  # fmt: skip
            share = require_bounds_of_index(make(np.asarray, turn), options, *results)
            assert 0 < share < 1 or name == "no blocks"
            plans_nothing(patched)


@needs_compiler
def test_plans_of_an_index_on_a_device_tell_what_they_visit(cupy: Any) -> None:
    arrays = [cupy.asarray(each) for each in (Q, K, V)]
    for turn in range(2):
        plan = cuflash.plan(*arrays, mask=index_of_cells(cupy.asarray, turn))
        o, lse = plan.forward(*arrays)
        assert 0 < require_bounds(index_of_cells(np.asarray, turn).as_mask(), o=o.get(), lse=lse.get()) < 1
        on_host = cuflash.plan(Q, K, V, mask=index_of_cells(np.asarray, turn), executor="sim")._plan
        assert plan._plan.visited_scores == on_host.visited_scores
        assert "up to 3 blocks of 64 keys" in plan.explain() and "not joined" not in plan.explain()


@needs_compiler
def test_an_index_on_a_device_with_partial_blocks_takes_lists_of_16_queries(cupy: Any) -> None:
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    elements = RNG.random((40, 130)) < 0.5
    index = BlockIndex.from_mask(cupy.asarray(elements), 40, 130, (1, 64))
    cupy.log.clear()
    results = passes(index, arrays, do)
    assert "unions" not in cupy.launched and 0 < require_bounds_of_index(
        BlockIndex.from_mask(elements, 40, 130, (1, 64)), {}, *results
    ) < 1
    assert "an index on a device only if it has no partial blocks" in cuflash.plan(*arrays, mask=index).explain()


@needs_compiler
def test_an_index_on_a_device_within_row_intervals_is_joined(cupy: Any) -> None:
    """Row intervals that an index was made with hide keys of its blocks, also in addition to those of a call."""
    arrays, do = [cupy.asarray(each) for each in (Q, K, V)], cupy.asarray(DO)
    for options in ({}, {"window": (50, 9), "causal": "top_left"}):
        index = index_of(
            cupy.asarray(CELLS[0]), CAUSAL.resolve(MaskShape((2,), 8, 40, 130)), MaskShape((2,), 8, 40, 130), (1, 64)
        )
        cupy.log.clear()
        results = passes(index, arrays, do, **options)
        assert "unions" in cupy.launched and "classify" not in cupy.launched
        mask: Any = index_of_cells(np.asarray, 0, 8, CAUSAL).as_mask()
        if options:
            mask &= masks.SlidingWindow(50, 9, "top_left") & masks.Causal("top_left")
        assert 0 < require_bounds(mask, **dict(zip(("o", "lse", "dq", "dk", "dv"), results, strict=True))) < 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", INDICES)
def test_an_index_waits_for_nothing_and_can_be_captured(name: str) -> None:
    import cupy

    (make, options), (q, k, v, do) = INDICES[name], map(cupy.asarray, (Q, K, V, DO))
    index, stream = make(cupy.asarray, 0), cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.attention_vjp(q, k, v, mask=index, **options)[1](do)
        stream.synchronize()
        stream.begin_capture()
        (o, lse), vjp = cuflash.attention_vjp(q, k, v, mask=index, return_lse=True, **options)
        gradients = tuple(vjp(do))
        graph = stream.end_capture()
        for turn in (1, 0):
            index._carried.lists[...] = make(cupy.asarray, turn)._carried.lists
            graph.launch(stream)
            stream.synchronize()
            share = require_bounds_of_index(
                make(np.asarray, turn), options, *(each.get() for each in (o, lse, *gradients))
            )
            assert 0 < share < 1 or name == "no blocks"


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
def test_new_lists_wait_for_nothing_and_can_be_captured(name: str) -> None:
    import cupy

    q, k, v, do = (cupy.asarray(each) for each in (Q, K, V, DO))
    arrays: list[Any] = []
    mask = WAYS[name](lambda array: arrays.append(cupy.asarray(array)) or arrays[-1], 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.attention_vjp(q, k, v, mask=mask)[1](do)
        stream.synchronize()
        stream.begin_capture()
        o, vjp = cuflash.attention_vjp(q, k, v, mask=mask)
        dq, dk, dv = vjp(do)
        graph = stream.end_capture()
        for turn in (1, 2, 0):
            new: list[Any] = []
            WAYS[name](lambda array: new.append(array) or array, turn)
            for array, contents in zip(arrays, new, strict=True):
                array[...] = cupy.asarray(contents)
            graph.launch(stream)
            stream.synchronize()
            results = {"o": o.get(), "dq": dq.get(), "dk": dk.get(), "dv": dv.get()}
            assert 0 < require_bounds(WAYS[name](np.asarray, turn), **results) < 1


# Which kernels a call takes


def planned(mask: Any, dtype: Any = np.float16, group: int = 4, device: str = "H100", **options: Any) -> Any:
    sides = (2 * group, 100), (2, 200), (2, 200)
    shapes = [ShapeDtype((heads, length, 64), np.dtype(dtype)) for heads, length in sides]
    return cuflash.plan(*shapes, mask=mask, executor="gpu", device=DeviceSpec.gpu(device), **options)


def test_tiles_of_neighbours_are_taken_where_kernels_serve_the_call() -> None:
    rng = np.random.default_rng(0)

    def lists(block: int) -> ChosenBlocks:
        return ChosenBlocks(rng.integers(0, 2, (2, 100, 3)), block)

    for block in (16, 32, 64, 128, 192):
        for device in ("A100", "L4", "H100", "B200"):
            assert isinstance(planned(lists(block), device=device)._plan.work, UnionWork)
    aligned = {"causal": "bottom_right"}
    served = [
        planned(lists(64), **aligned), planned(lists(64) & masks.Lengths(kv=150)), planned(lists(64), kernel="sm80"),
        planned(lists(64).index(200, num_heads=8)), planned(lists(64), window=(30, 0), causal="bottom_right"),
        planned(lists(64), softcap=9.0),
    ]  # fmt: skip
    assert all(isinstance(each._plan.work, UnionWork) and each._plan.family.name == "sm80" for each in served)
    on_hopper = planned(lists(64), kernel="sm90")
    assert isinstance(on_hopper._plan.work, UnionWork) and on_hopper._plan.family.name == "sm90"
    others = [
        planned(lists(24)), planned(lists(64), np.float32), planned(lists(64), device="T4"), planned(~lists(64)),
        planned(lists(64) | masks.Lengths(kv=3)), planned(lists(64), kernel="sm90", softcap=9.0),
        planned(lists(64), bias=ShapeDtype((8, 100, 200), np.dtype(np.float16)), wrt="bias"),
        planned(lists(64), dropout=cuflash.Dropout(0.1, 1)), planned(lists(64), kernel="simt"),
    ]  # fmt: skip
    assert not any(isinstance(each._plan.work, UnionWork) for each in others)
    assert "4 neighbouring queries, with 16 heads each" in planned(lists(64), group=16).explain()
    assert "block lists per query are not joined" in others[0].explain()
    assert "block lists per query" not in planned(None).explain()
    assert "not joined" not in planned(lists(64).index(200, num_heads=8)).explain()


@pytest.mark.parametrize("kernel", KERNELS)
def test_few_heads_add_to_dq_unless_gradients_must_repeat(kernel: str) -> None:
    mask = ChosenBlocks(np.zeros((2, 100, 1), int), 64)
    for group in (1, 7, 8, 16):
        for deterministic in (False, True):
            kernels = planned(mask, group=group, kernel=kernel, deterministic=deterministic)._plan.kernels
            is_summed = group < 8 and not deterministic
            assert ("convert_dq" in kernels.backward.launches) is is_summed is not kernels.is_repeatable
            assert ("backward_rows" in kernels.backward.launches) is not is_summed


@pytest.mark.parametrize(
    "group, heads, queries", [(1, 1, 64), (12, 12, 5), (16, 16, 4), (64, 64, 1), (80, 40, 1), (67, 1, 64)]
)
def test_a_tile_has_as_many_neighbours_as_rows_hold(group: int, heads: int, queries: int) -> None:
    tiling = planned(ChosenBlocks(np.zeros((2, 100, 1), int), 64), group=group)._plan.work.tiling
    assert (tiling.heads_per_tile, tiling.queries_per_tile) == (heads, queries)
    by_head = planned(ChosenBlocks(np.zeros((2 * group, 100, 1), int), 64), group=group)._plan.work.tiling
    assert (by_head.heads_per_tile, by_head.queries_per_tile) == (1, 64)


def test_workspaces_are_counted() -> None:
    """Bytes of unions, of the queries of each block and of sums of parts follow from the shapes alone."""
    seqlen, n, heads = 4096, 16, 4
    q, k = (ShapeDtype((h, seqlen, 128), np.dtype(np.float16)) for h in (64, heads))
    mask = AtEachCall(ChosenBlocks(device_double.to_device(np.zeros((heads, seqlen, n), np.int32)), 64))
    plan = cuflash.plan(q, k, k, mask=mask, executor="gpu", device=DeviceSpec.gpu("H100"))._plan
    assert isinstance(plan.work, UnionsAtCall)
    tiles, blocks = heads * seqlen // 4, seqlen // 64
    unions = tiles * (2 * 4 + min(4 * n, blocks) * 8)
    columns = heads * 4 * (seqlen * n + blocks + 1 + seqlen // 4 // 64 * blocks)
    delta = 64 * seqlen * 4
    parts = heads * (seqlen * n // 512 + blocks) * 64 * 2 * 128 * 4
    assert plan.workspace_bytes == pytest.approx(unions + columns + delta + parts, rel=0.01)
    assert plan.workspace_bytes - parts == pytest.approx(unions + columns + delta, rel=0.01)
    keys_and_values = 2 * heads * seqlen * 128 * 2
    assert unions + columns < 0.5 * keys_and_values
