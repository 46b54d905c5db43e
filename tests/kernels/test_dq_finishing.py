"""Thread blocks of sm90's gradients that share or finish dQ: the order of their tiles, which calls do so, and results.

There are two ways. Tiles of keys of a band have a fixed order, in which each waits for others. Under lists, row
intervals and windows, tiles count their arrivals: the first tile stores its part of dQ, and the last one finishes dQ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest
from cuflash.planning.launches import DqSemaphoreOrder
from cuflash.planning.plan import KernelPlan
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import (
    HALVES, Run, holds_for_examples, hostile_schedules, in_turn, needs_compiler, sampled, sampled_on_simulator,
)  # fmt: skip
from fused_dq import KeyTile, by_last, cut_from, finishing_order, on_few_processors
from hypothesis import given
from hypothesis import strategies as st
from poison import call
from test_sm90 import (
    ALIGNED, GPU90, SIM90, FewBlocks, FewBlocksGpu, half, on_sm90, plan_of, planned, with_fewest_tiles,
)  # fmt: skip

import cuflash
from cuflash import DeviceSpec, masks


# The order of tiles.

ORDERS = st.builds(
    DqSemaphoreOrder,
    heads_per_group=st.integers(1, 5),
    last_tile_lead=st.integers(0, 3),
    first_tile_lag=st.integers(1, 4),
    min_unfused_heads=st.just(0),
)


@given(ORDERS, st.integers(0, 4), st.integers(2, 9))
def test_blocks_take_each_tile_once_and_none_waits_for_one_that_is_taken_later(
    dq_order: DqSemaphoreOrder, more: int, num_tiles: int
) -> None:
    """A tile that adds to dQ waits for the tile that stores it, and the tile that finishes dQ waits for all others."""
    num_groups = dq_order.last_tile_lead + dq_order.first_tile_lag + 1 + more
    order = finishing_order(dq_order, num_groups, num_tiles)
    assert sorted(order) == sorted(map(KeyTile._make, np.ndindex(num_groups * dq_order.heads_per_group, num_tiles)))
    number = {tile: x for x, tile in enumerate(order)}
    for tile in order:
        for other in range(num_tiles):
            waits = tile.number == 0 or other > tile.number
            assert not waits or other == tile.number or number[KeyTile(tile.place, other)] < number[tile]


# Calls whose blocks finish dQ.


OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "few heads": ((16, 1024, 64), {"causal": True}),
    "documents": ((512, 1024, 64), {"mask": masks.Documents(np.arange(1024) // 100)}),
    "a list": ((512, 4096, 64), {"mask": masks.BlockPattern(np.tri(32) > 0, 128)}),
    "columns that are not whole packets": ((512, 1024, 60), {"causal": True}),
    "wide": ((512, 1024, 192), {"causal": True}),
    "one tile of keys": ((2048, 128, 64), {"causal": True}),
    "deterministic": ((512, 1024, 64), {"causal": True, "deterministic": True}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_elsewhere_a_kernel_of_its_own_rounds_dq(name: str) -> None:
    shape, options = OTHERS[name]
    plan = planned(*shape, **options)
    assert not plan.specs["backward"].finishes_dq and plan.kernels.order.dq is None


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "align", "finishes"), [
    (1024, 1024, "bottom_right", True), (1000, 1024, "bottom_right", True), (1024, 1000, "bottom_right", False),
    (1024, 1000, "top_left", True), (1000, 1024, "top_left", True), (1000, 1400, "top_left", False),
])  # fmt: skip
def test_the_first_keys_must_see_all_queries_and_all_keys_some(
    seqlen_q: int, seqlen_kv: int, align: str, finishes: bool
) -> None:
    q, k = (cuflash.ShapeDtype((512, length, 64), "float16") for length in (seqlen_q, seqlen_kv))
    plan = cuflash.plan(q, k, k, causal=align, kernel="sm90", device=DeviceSpec.gpu("H100"))._plan
    assert plan.specs["backward"].finishes_dq_in_order == finishes


def planned_list(blocks: Any, dim: int = 128, block: Any = 128, q_batch: tuple[int, ...] = (2,)) -> KernelPlan:
    rows, columns = np.multiply(np.asarray(blocks).shape[-2:], block)
    q = cuflash.ShapeDtype((*q_batch, 16, rows, dim), "bfloat16")
    k = cuflash.ShapeDtype((2, 16, columns, dim), "bfloat16")
    mask = masks.BlockPattern(blocks, block)
    return cuflash.plan(q, k, k, mask=mask, kernel="sm90", device=DeviceSpec.gpu("H100"))._plan


def finishes(plan: KernelPlan) -> bool:
    """Return whether the backward kernel of a plan finishes dQ; then no other kernel rounds dQ."""
    of = {entry: plan.specs[entry].last_finishes_dq for entry in ("backward_statistics", "backward")}
    assert of["backward"] == of["backward_statistics"] == ("convert_dq" not in plan.specs)
    assert plan.kernels.order.dq is None
    assert "dq_sum" in plan.kernels.backward.workspaces
    return of["backward"]


def test_what_it_takes_beside_the_arrays_is_what_adding_takes() -> None:
    plan = planned_list(np.eye(16, dtype=bool))
    with by_last(finishes=False):
        other = planned_list(np.eye(16, dtype=bool))
    assert finishes(plan) and not finishes(other)
    counts = 16 * 2 * 16 * 2048 // plan.specs["backward"].block_q  # arrival counts: 16 bytes for each query tile
    # the last number is the size of float32 sums of dQ
    assert plan.workspace_bytes - counts == other.workspace_bytes > 4 * 2 * 16 * 2048 * 128
    assert "convert_dq" in other.specs and "convert_dq" not in plan.specs


@pytest.mark.parametrize(
    ("options", "expected"), [({}, True), ({"dim": 120}, False), ({"q_batch": ()}, False), ({"q_batch": (1,)}, False)]
)
def test_dq_is_written_as_it_is_returned_and_in_whole_packets(options: dict[str, Any], expected: bool) -> None:
    assert finishes(planned_list(np.eye(8, dtype=bool), **options)) == expected


@pytest.mark.parametrize(("columns", "expected"), [((1 << 15) - 1, True), (1 << 15, False)])
def test_half_a_count_holds_all_tiles_that_come(columns: int, expected: bool) -> None:
    blocks = np.zeros((1, columns), bool)
    blocks[0, -1] = True
    assert finishes(planned_list(blocks)) == expected


# Results.


def bands() -> dict[str, Structure]:
    """Return calls under bands, whose tiles of keys have a fixed order."""
    square = {"num_heads": 6, "num_kv_heads": 6, "seqlen_q": 300, "seqlen_kv": 300}
    narrow, wide = {"head_dim": 64, "value_dim": 40}, {"head_dim": 128, "value_dim": 128}
    right, left = masks.Causal("bottom_right"), masks.Causal("top_left")
    return {
        "dense": Structure(**square, **narrow),
        "dense, 128 columns": Structure(**square, **wide),
        "causal": Structure(**square, **narrow, mask=right),
        "causal, 128 columns": Structure(**square, **wide, mask=right),
        "causal, 32 columns, whole tiles": Structure(
            **square | {"seqlen_q": 384, "seqlen_kv": 384}, head_dim=32, value_dim=32, mask=left
        ),
        "more keys": Structure(**square | {"seqlen_q": 200, "seqlen_kv": 430}, **wide, mask=right),
        "fewer queries than a tile": Structure(**square | {"seqlen_q": 5}, **narrow, mask=right),
        "more queries": Structure(**square | {"seqlen_q": 430, "seqlen_kv": 200}, **narrow, mask=left),
        "grouped heads": Structure(**square | {"num_heads": 12, "num_kv_heads": 6}, **narrow, mask=right),
        "grouped heads, dense": Structure(**square | {"num_heads": 12, "num_kv_heads": 6}, **wide),
        "batch": Structure(q_batch=(3, 2), k_batch=(3, 1), v_batch=(2,), **square | {"num_heads": 1, "num_kv_heads": 1},
                           **narrow, mask=left),
        "a launch for each of two": Structure(
            q_batch=(3, 2, 2), k_batch=(3, 1, 2), v_batch=(1, 2, 1), num_heads=1, seqlen_q=150, seqlen_kv=150, **narrow,
            mask=left,
        ),
        "not aligned": Structure(**square, head_dim=64, value_dim=33, layouts=("padded",) * 5, mask=right),
    }  # fmt: skip


def lists() -> dict[str, Structure]:
    """Return calls under block lists with few blocks per row."""
    rng = np.random.default_rng(0)
    square = {"num_heads": 2, "num_kv_heads": 2, "seqlen_q": 600, "seqlen_kv": 520}
    narrow, wide = {"head_dim": 64, "value_dim": 40}, {"head_dim": 128, "value_dim": 128}
    causal, blocks = masks.Causal("bottom_right"), rng.random((2, 5, 5)) < 0.6
    blocks[:, 2], blocks[:, :, 3] = False, False  # queries that attend no key, keys that no query attends
    of_128, of_256 = masks.BlockPattern(blocks, 128), masks.BlockPattern(rng.random((3, 3)) < 0.7, 256)
    unlike_rows = np.array([[True, False], [False, True], [True, True], [True, False]])
    all_of_256 = masks.BlockPattern(np.ones((3, 3), bool), 256)
    return {
        "blocks of 128": Structure(**square, **narrow, mask=of_128),
        "blocks of 128, 128 columns": Structure(**square, **wide, mask=of_128),
        "one block a row": Structure(**square, **wide, mask=masks.BlockPattern(np.eye(5, dtype=bool), 128)),
        "blocks of 256": Structure(**square, **narrow, mask=of_256),
        "causal blocks of 256": Structure(**square, **wide, mask=of_256 & causal),
        "blocks of 192 x 320": Structure(
            **square, **narrow, mask=masks.BlockPattern(unlike_rows, (192, 320)) & causal
        ),
        "bits": Structure(**square, **wide, mask=of_128 & masks.Dense(rng.random((600, 520)) < 0.5)),
        "lengths": Structure(**square, **narrow, mask=of_256 & masks.Lengths(q=490, kv=330)),
        "a window": Structure(**square, **wide, mask=of_256 & masks.SlidingWindow(100, 20, align="top_left")),
        "a window into tiles by one key": Structure(
            **square, **narrow, mask=all_of_256 & masks.SlidingWindow(129, 1, "top_left")
        ),
        "a window up to tiles": Structure(
            **square, **narrow, mask=all_of_256 & masks.SlidingWindow(128, 0, "top_left")
        ),
        "grouped heads": Structure(**square | {"num_kv_heads": 1}, **narrow, mask=of_128 & causal),
        "a launch for each of two": Structure(
            q_batch=(2, 2, 2), k_batch=(2, 1, 2), v_batch=(1, 2, 1), seqlen_q=300, seqlen_kv=300, **narrow,
            mask=masks.BlockPattern(np.tri(3) > 0, 128) & causal,
        ),
        "not aligned": Structure(**square, head_dim=64, value_dim=33, layouts=("padded",) * 5, mask=of_128 & causal),
    }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Chunks(masks.Mask):
    """A mask whose queries attend overlapping chunks of keys; each further head has more queries per chunk."""

    def intervals(self, b: Any, h: Any, i: Any) -> Any:
        first = i // (70 + 10 * h) * 50 + 0 * b
        return first, first + 160


def intervals() -> dict[str, Structure]:
    """Return calls under row intervals, and under bands whose tiles also count arrivals."""
    heads = {"num_heads": 2, "num_kv_heads": 2}
    narrow, wide = {"head_dim": 64, "value_dim": 40}, {"head_dim": 128, "value_dim": 128}
    square = heads | {"seqlen_q": 520, "seqlen_kv": 520}
    sequences = masks.Sequences(np.array([5, 69, 69, 133, 400, 500]), causal=True, allow_gaps=True)
    return {
        "sequences": Structure(**square, **wide, mask=sequences),
        "long sequences": Structure(**square, **wide, mask=masks.Sequences(np.array([0, 20, 520]), causal=True)),
        "a sequence that ends in a tile": Structure(
            **square, **wide, mask=masks.Sequences(np.array([0, 300, 301, 520]), causal=True)
        ),
        # each sequence starts a new tile, so tile numbers are up to 50 larger than if tiles started at plain multiples
        "a long sequence after 50 short ones": Structure(
            **heads, **wide, seqlen_q=400, seqlen_kv=400,
            mask=masks.Sequences(np.array([*range(0, 150, 3), 400]), causal=True),
        ),
        "of full sequences": Structure(
            **square, **wide, mask=masks.Sequences(np.array([0, 70, 200, 500]), allow_gaps=True)
        ),
        "sequences in a window": Structure(
            **square, **wide, mask=masks.Sequences(np.array([0, 90, 350, 520]), causal=True, window=(100, None))
        ),
        # 40 queries of the second sequence follow the first one's last tile; that tile's slot also has queries of no
        # sequence
        "an end past the next sequence": Structure(
            **heads, **wide, seqlen_q=200, seqlen_kv=200,
            mask=masks.Sequences(np.array([3, 77, 117]), causal=True, allow_gaps=True),
        ),
        "chunks of keys": Structure(**square, **wide, mask=Chunks()),
        "chunks of heads that share keys": Structure(**square | {"num_kv_heads": 1}, **wide, mask=Chunks()),
        "grouped heads": Structure(**square | {"num_kv_heads": 1}, **wide, mask=sequences),
        "a window": Structure(**square, **wide, mask=masks.SlidingWindow(200, 0)),
        "a window of tiles": Structure(**square, **narrow, mask=masks.SlidingWindow(128, 128, "top_left")),
        "of each entry": Structure(
            **square, **narrow, q_batch=(2,), k_batch=(2,), v_batch=(2,),
            mask=masks.Sequences(np.array([[0, 64, 520], [0, 130, 140]]), allow_gaps=True),
        ),
        "of each entry and wide": Structure(
            **square, **wide, q_batch=(2,), k_batch=(2,), v_batch=(2,),
            mask=masks.Sequences(np.array([[0, 64, 520], [0, 130, 140]]), causal=True, allow_gaps=True),
        ),
        "not aligned": Structure(**square, head_dim=64, value_dim=33, layouts=("padded",) * 5, mask=sequences),
        "queries past all sequences": Structure(
            **heads, **wide, seqlen_q=330, seqlen_kv=300, mask=masks.Sequences(
                np.array([0, 100, 256]), np.array([0, 128, 300]), causal="bottom_right", allow_gaps=True
            ),
        ),
    }  # fmt: skip


BANDS, LISTS, INTERVALS = bands(), lists(), intervals()


@dataclass(frozen=True)
class Way:
    """A way in which blocks share or finish dQ.

    Attributes
    ----------
    plans : callable
        Returns a context manager that makes plans use this way.
    others : callable
        Returns a context manager under which plans do not use this way, with equal bits of the results in `same`.
    check : callable
        Requires that an example's plan uses this way.
    """

    plans: Callable[[], AbstractContextManager[None]]
    others: Callable[[Example], AbstractContextManager[None]]
    check: Callable[[KernelPlan, Example], None]
    same: tuple[str, ...] = ("dk", "dv")


def of_order() -> Way:
    def check(plan: KernelPlan, example: Example) -> None:
        num_places = plan.problem.num_batch_heads // plan.problem.group_size
        assert plan.kernels.order.dq is not None and plan.kernels.order.dq.num_fused_heads(num_places) > 0

    return Way(on_few_processors, lambda example: on_few_processors(finishes=False), check)


def of_last_arrivals() -> Way:
    @contextmanager
    def plans(finishes: bool) -> Iterator[None]:
        with with_fewest_tiles(0), by_last(finishes=finishes):
            yield

    def check(plan: KernelPlan, example: Example) -> None:
        assert finishes(plan)

    return Way(partial(plans, True), lambda example: plans(False), check)


CUTS = {"cut": 0.0, "whole": inf}  # shortest mean sequence length for which backward tiles end with sequences


def of_sequences(cut: str, *, adds: bool = False) -> Way:
    @contextmanager
    def plans(finishes: bool) -> Iterator[None]:
        with with_fewest_tiles(0), cut_from(CUTS[cut]), by_last(finishes=finishes):
            yield

    def is_cut(example: Example) -> bool:
        return cut == "cut" and isinstance(example.mask, masks.Sequences | Chunks) and example.q.shape[-1] == 128

    def check(plan: KernelPlan, example: Example) -> None:
        backward, statistics = plan.specs["backward"], plan.specs["backward_statistics"]
        assert finishes(plan) is not adds
        assert backward.cuts_sequences == statistics.cuts_sequences == is_cut(example)

    # dK and dV sum the same parts in the same order, whichever kernel finishes dQ.
    return Way(partial(plans, not adds), lambda example: plans(adds), check, ("o", "lse", "dk", "dv"))


OF_INTERVALS = {cut: of_sequences(cut) for cut in CUTS}
WAYS = {"order": of_order(), "lists": of_last_arrivals(), **OF_INTERVALS, "cut, adding": of_sequences("cut", adds=True)}
CUT = ("sequences", "a sequence that ends in a tile", "of each entry and wide", "an end past the next sequence")


def cases_of(bands: Iterable[str], lists: Iterable[str], intervals: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of a way and a structure's name; structures of intervals take turns with the ways that suit them."""
    cases = [("order", name) for name in bands] + [("lists", name) for name in lists]
    cases += [("cut, adding", name) for name in intervals if name in CUT]
    return cases + [(way, name) for name, way in in_turn(intervals, OF_INTERVALS)]


def example_of(way: str, name: str, dtype: str = "float16") -> Example:
    return half({"order": BANDS, "lists": LISTS}.get(way, INTERVALS)[name], dtype)


def assert_all_right(way: str, example: Example, run: Run, machine: Any = None) -> dict[str, Any]:
    with WAYS[way].plans():
        WAYS[way].check(plan_of(example, run), example)
        results = call(example, run, machine, margin=ALIGNED)
    assert_within_bounds(example, **results)
    return results


@sampled_on_simulator(
    on_sm90, "way, name, dtype",
    [(*case, dtype) for case, dtype in in_turn(cases_of(BANDS, LISTS, INTERVALS), HALVES)], 7,
)  # fmt: skip
def test_gradients_are_within_their_bounds(run: Run, way: str, name: str, dtype: str) -> None:
    example = example_of(way, name, dtype)
    with WAYS[way].others(example):
        other = plan_of(example, run).specs["backward"]
        expected = call(example, run, margin=ALIGNED)
    results = assert_all_right(way, example, run)
    with WAYS[way].plans():
        assert plan_of(example, run).specs["backward"] != other
    assert all(results[each].tobytes() == expected[each].tobytes() for each in WAYS[way].same)


@sampled_on_simulator(on_sm90, "case, most", in_turn(cases_of(
    ["dense", "causal, 128 columns", "a launch for each of two"],
    ["causal blocks of 256", "blocks of 128", "a launch for each of two"], ["sequences"],
), [1, 2]), 3)  # fmt: skip
def test_any_number_of_blocks_ends(run: Run, case: tuple[str, str], most: int) -> None:
    """No block waits for a block that has not started, however few blocks run at a time."""
    machine = FewBlocksGpu(most) if run.is_on_device else FewBlocks(most=most)
    assert_all_right(case[0], example_of(*case), run, machine)


@needs_compiler
@pytest.mark.parametrize(("way", "name"), cases_of(
    sampled(["dense", "causal", "causal, 128 columns", "more keys", "grouped heads"], 2),
    sampled(["blocks of 128", "one block a row", "causal blocks of 256", "bits", "grouped heads"], 2),
    sampled(["sequences", "a window", "grouped heads", "of full sequences"], 2),
))  # fmt: skip
def test_gradients_are_within_their_bounds_under_every_schedule(way: str, name: str) -> None:
    for schedule in hostile_schedules(f"{way}, {name}", 1):
        assert_all_right(way, example_of(way, name), SIM90, FewBlocks(schedule, most=1 + schedule.seed % 3))


def drawn_masks(way: str, example: Example) -> list[Any]:
    """Return masks under which blocks can share or finish dQ."""
    if way == "order":
        return [None, masks.Causal("bottom_right"), masks.Causal("top_left")]
    if way != "lists":
        return [example.mask]
    rows, columns = (-(-array.shape[-2] // 128) for array in (example.q, example.k))
    blocks = masks.BlockPattern(np.arange(rows)[:, None] % 3 <= np.arange(columns) % 3, 128)
    return [example.mask, blocks if example.mask is None else blocks & example.mask]


@holds_for_examples(on_sm90, longest=500, tile=128, most_rows=1200, most_scores=1 << 18, widest=128, max_leaves=2)
def test_drawn_problems_are_within_their_bounds(run: Run, example: Example) -> None:
    for name, way in WAYS.items():
        with way.plans():
            for mask in drawn_masks(name, example):
                other = example.but(mask=mask)
                assert_within_bounds(other, **run.everything(other))


@on_sm90
def test_what_lies_past_a_length_never_matters(run: Run) -> None:
    """Sums of queries past the end are stored and finished, but never read."""
    example = half(replace(BANDS["causal"], seqlen_q=290, seqlen_kv=290))
    first = assert_all_right("order", example, run)
    with on_few_processors():
        second = call(example, run, margin=8 * ALIGNED)
    assert all(first[each].tobytes() == second[each].tobytes() for each in ("dk", "dv"))


@on_sm90
def test_what_stands_at_queries_and_keys_that_nobody_sees_never_matters(run: Run) -> None:
    clean = half(LISTS["blocks of 128"])
    unseen = {"q": 256, "do": 256, "k": 384, "v": 384}
    poisoned = {name: getattr(clean, name).copy() for name in unseen}
    for name, start in unseen.items():
        poisoned[name][..., start : start + 128, :] = np.nan
    with WAYS["lists"].plans():
        results = call(clean.but(**poisoned), run, margin=ALIGNED)
    assert_within_bounds(clean, **results)
    assert not results["dq"][..., 256:384, :].any()


def outside_poisoned(example: Example) -> Example:
    """Return the example with NaN in all rows outside the sequences, also in tiles where a sequence ends."""
    assert isinstance(example.mask, masks.Sequences)
    changed = {name: getattr(example, name).copy() for name in ("q", "k", "v", "do")}
    for each in changed.values():
        each[..., : example.mask.q_offsets[0], :] = each[..., example.mask.q_offsets[-1] :, :] = np.nan
    return example.but(**changed)


@on_sm90
@pytest.mark.parametrize(("name", "way"), in_turn(["sequences", "an end past the next sequence"], OF_INTERVALS))
def test_what_belongs_to_no_sequence_never_matters(run: Run, name: str, way: str) -> None:
    clean = half(INTERVALS[name])
    with WAYS[way].plans():
        results = call(outside_poisoned(clean), run, margin=ALIGNED)
    assert_within_bounds(clean, **results)


@needs_compiler
@pytest.mark.parametrize("name", ["sequences", "of full sequences"])
@with_fewest_tiles(0)
def test_results_that_must_repeat_do_so_where_sequences_are_cut(name: str) -> None:
    """In the forward pass tiles end with sequences.

    Backward kernels with `deterministic=True` cut keys at multiples.
    """
    example, run = half(INTERVALS[name]), replace(SIM90, deterministic=True)
    specs = plan_of(example, run).specs
    assert specs["forward"].cuts_sequences and not specs["backward"].cuts_sequences
    first = call(example, run, margin=ALIGNED)
    assert_within_bounds(example, **first)
    for schedule in hostile_schedules(name):
        results = call(example, run, FewBlocks(schedule, most=1 + schedule.seed % 3), margin=ALIGNED)
        assert all(results[each].tobytes() == first[each].tobytes() for each in results)


def many_blocks(block: int) -> masks.Mask:
    return masks.BlockPattern(np.random.default_rng(0).random((40, 1024 // block, 1024 // block)) < 0.5, block)


MANY_SEQUENCES = masks.Sequences(
    np.sort(np.random.default_rng(0).integers(0, 1025, 9)), causal=True, allow_gaps=True
)  # fmt: skip


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize(("way", "mask"), [
    ("lists", many_blocks(128)), ("lists", many_blocks(256)), ("cut", MANY_SEQUENCES), ("cut, adding", MANY_SEQUENCES),
])  # fmt: skip
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_that_come_at_once_are_waited_for(dim: int, way: str, mask: masks.Mask) -> None:
    """The GPU cannot run all tiles of keys at once. All results but dQ are bitwise reproducible."""
    example = half(Structure(num_heads=40, seqlen_q=1024, seqlen_kv=1024, head_dim=dim, value_dim=dim, mask=mask))
    first = assert_all_right(way, example, GPU90)
    for _ in range(20):
        results = assert_all_right(way, example, GPU90)
        assert all(results[each].tobytes() == first[each].tobytes() for each in ("o", "lse", "dk", "dv"))
