"""Blocks of Hopper's gradients that finish dQ: the order of their tiles, what they wait for, and what comes out."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuflash.planning.launches import DqSemaphoreOrder
from cuflash.planning.plan import KernelPlan
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import (
    HALVES, Run, holds_for_examples, hostile_schedules, in_turn, needs_compiler, sampled_on_simulator,
)  # fmt: skip
from fused_dq import KeyTile, finishing_order, on_few_processors, taken_order
from hypothesis import given
from hypothesis import strategies as st
from poison import call
from test_sm90 import ALIGNED, SIM90, FewBlocks, FewBlocksGpu, half, on_sm90, plan_of, planned

import cuflash
from cuflash import DeviceSpec, masks

ORDERS = st.builds(
    DqSemaphoreOrder,
    heads_per_group=st.integers(1, 5),
    last_tile_lead=st.integers(0, 3),
    first_tile_lag=st.integers(1, 4),
    min_unfused_heads=st.just(0),
)
FINISHED_OF_LONG = {(64, True), (64, False), (128, True)}  # dims and whether a mask is causal, of 512 and 2048 tokens


# The order.


@given(ORDERS, st.integers(0, 4), st.integers(2, 9))
def test_blocks_take_each_tile_once(dq_order: DqSemaphoreOrder, more: int, num_tiles: int) -> None:
    num_groups = dq_order.last_tile_lead + dq_order.first_tile_lag + 1 + more
    order = finishing_order(dq_order, num_groups, num_tiles)
    assert sorted(order) == sorted(map(KeyTile._make, np.ndindex(num_groups * dq_order.heads_per_group, num_tiles)))


@given(ORDERS, st.integers(0, 4), st.integers(2, 9))
def test_no_tile_waits_for_one_that_is_taken_later(dq_order: DqSemaphoreOrder, more: int, num_tiles: int) -> None:
    """A tile that adds to dQ waits for the tiles that store it, and the tile that finishes dQ waits for all others."""
    order = finishing_order(dq_order, dq_order.last_tile_lead + dq_order.first_tile_lag + 1 + more, num_tiles)
    number = {tile: x for x, tile in enumerate(order)}
    for tile in order:
        for other in range(num_tiles):
            waits = tile.number == 0 or other > tile.number
            assert not waits or other == tile.number or number[KeyTile(tile.place, other)] < number[tile]


def ends_of_blocks(
    plan: KernelPlan, num_places: int, beside: float = 2, finishing: float = 1.3
) -> tuple[list[float], float]:
    """Simulate blocks that take tiles in order; return when each block ends, and the time that all of them waited.

    A step takes a time of 1, and more in tiles that finish dQ.
    """
    spec, dq_order, problem = plan.specs["backward"], plan.kernels.order.dq, plan.problem
    assert dq_order is not None
    num_tiles, num_steps = (-(-problem.seqlen_kv // spec.block_kv), -(-problem.seqlen_q // spec.block_q))
    hides, finished = dq_order.last_tile_lead == 0, dq_order.num_fused_heads(num_places)
    blocks, done, waited = [0.0] * plan.device.num_processors, dict[KeyTile, float](), 0.0
    for tile in taken_order(dq_order, num_places, num_tiles):
        start = heapq.heappop(blocks) + beside
        steps = num_steps - (tile.number * num_steps // num_tiles if hides else 0)
        is_first = tile.number == 0 and tile.place < finished
        end = start + steps * (finishing if is_first else 1)
        if tile.place < finished and (is_first or not hides):  # the diagonal is stored after one step
            others = range(1, num_tiles) if is_first else [num_tiles - 1] if tile.number < num_tiles - 1 else []
            late = max([0.0, *(done[KeyTile(tile.place, other)] - (start + 1) for other in others)])
            waited, end = waited + late, end + late
        done[tile] = end
        heapq.heappush(blocks, end)
    return blocks, waited


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048])
def test_blocks_that_finish_dq_end_together_and_hardly_wait(seqlen: int, dim: int) -> None:
    num_places = 2048 // dim * 16384 // seqlen
    plan = planned(num_places, seqlen, dim, causal=True)
    ends, waited = ends_of_blocks(plan, num_places)
    assert max(ends) <= 1.06 * np.mean(ends)
    assert waited <= 0.02 * np.sum(ends)


@pytest.mark.parametrize("launch_places", [0, 1, 7, 100, 513])
def test_places_that_are_finished_are_whole_groups_of_those_there_are(launch_places: int) -> None:
    dq_order = DqSemaphoreOrder(heads_per_group=8, last_tile_lead=2, first_tile_lag=3, min_unfused_heads=16)
    finished = dq_order.num_fused_heads(launch_places)
    assert finished % 8 == 0 and finished in (0, (launch_places - 16) // 8 * 8)
    assert (finished > 0) == (launch_places >= 16 + 8 * 6)


# Calls whose blocks finish dQ.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096])
def test_blocks_finish_dq_where_it_was_measured_to_be_faster(seqlen: int, dim: int, causal: bool) -> None:
    plan = planned(2048 // dim * 16384 // seqlen, seqlen, dim, causal=causal)
    pays = seqlen == 1024 or (seqlen < 4096 and (dim, causal) in FINISHED_OF_LONG)
    assert plan.specs["backward"].fuses_dq_epilogue == (plan.kernels.order.dq is not None) == pays
    convert = plan.kernels.backward.launches["convert_dq"]
    left = convert.grid(1)
    assert (0 < left < convert.tiles) if pays else left == convert.tiles


OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "few heads": ((16, 1024, 64), {"causal": True}),
    "documents": ((512, 1024, 64), {"mask": masks.Documents(np.arange(1024) // 100)}),
    "a list": ((512, 4096, 64), {"mask": masks.BlockPattern(np.tri(32) > 0, 128)}),
    "columns that are no whole packets": ((512, 1024, 60), {"causal": True}),
    "wide": ((512, 1024, 192), {"causal": True}),
    "one tile of keys": ((2048, 128, 64), {"causal": True}),
    "deterministic": ((512, 1024, 64), {"causal": True, "deterministic": True}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_elsewhere_a_kernel_of_its_own_rounds_dq(name: str) -> None:
    shape, options = OTHERS[name]
    plan = planned(*shape, **options)
    assert not plan.specs["backward"].fuses_dq_epilogue and plan.kernels.order.dq is None


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "align", "finishes"), [
    (1024, 1024, "bottom_right", True), (1000, 1024, "bottom_right", True), (1024, 1000, "bottom_right", False),
    (1024, 1000, "top_left", True), (1000, 1024, "top_left", True), (1000, 1400, "top_left", False),
])  # fmt: skip
def test_the_first_keys_must_see_all_queries_and_all_keys_some(
    seqlen_q: int, seqlen_kv: int, align: str, finishes: bool
) -> None:
    q, k = (cuflash.ShapeDtype((512, length, 64), "float16") for length in (seqlen_q, seqlen_kv))
    plan = cuflash.plan(q, k, k, causal=align, kernel="sm90", device=DeviceSpec.gpu("H100")).plan
    assert plan.specs["backward"].fuses_dq_epilogue == finishes


# Results.


def structures() -> dict[str, Structure]:
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


STRUCTURES = structures()


def finished(example: Example, run: Run) -> int:
    plan = plan_of(example, run)
    dq_order = plan.kernels.order.dq
    return 0 if dq_order is None else dq_order.num_fused_heads(plan.problem.num_batch_heads // plan.problem.group_size)


@sampled_on_simulator(on_sm90, "name, dtype", in_turn(STRUCTURES, HALVES), 3)
def test_gradients_are_within_their_bounds(run: Run, name: str, dtype: str) -> None:
    example = half(STRUCTURES[name], dtype)
    with on_few_processors(finishes=False):
        expected = call(example, run, margin=ALIGNED)
    with on_few_processors():
        assert finished(example, run) > 0
        found = call(example, run, margin=ALIGNED)
    assert_within_bounds(example, **found)
    assert all(found[each].tobytes() == expected[each].tobytes() for each in ("dk", "dv"))


@on_sm90
@pytest.mark.parametrize(
    ("name", "most"), in_turn(["dense", "causal, 128 columns", "a launch for each of two"], [1, 2])
)
def test_any_number_of_blocks_ends(run: Run, name: str, most: int) -> None:
    """No block waits for work of a block that does not run yet, however few blocks run at a time."""
    example = half(STRUCTURES[name])
    with on_few_processors():
        machine = FewBlocksGpu(most) if run.is_on_device else FewBlocks(most=most)
        assert_within_bounds(example, **call(example, run, machine, margin=ALIGNED))


@needs_compiler
@pytest.mark.parametrize("name", ["dense", "causal", "causal, 128 columns", "more keys", "grouped heads"])
def test_gradients_are_within_their_bounds_under_every_schedule(name: str) -> None:
    example = half(STRUCTURES[name])
    with on_few_processors():
        for schedule in hostile_schedules(name):
            machine = FewBlocks(schedule, most=1 + schedule.seed % 3)
            assert_within_bounds(example, **call(example, SIM90, machine, margin=ALIGNED))


DRAWN_MASKS = [None, masks.Causal("bottom_right"), masks.Causal("top_left")]


@holds_for_examples(on_sm90, longest=400, tile=128, most_rows=1200, most_scores=1 << 18, widest=128, max_leaves=1)
def test_drawn_problems_are_within_their_bounds(run: Run, example: Example) -> None:
    """Drawn problems are within their bounds under each mask with which blocks may finish dQ."""
    with on_few_processors(2):
        for mask in DRAWN_MASKS:
            other = example.but(mask=mask)
            if not plan_of(other, run).is_empty:
                assert_within_bounds(other, **call(other, run, margin=ALIGNED))


@on_sm90
def test_what_lies_past_a_length_never_matters(run: Run) -> None:
    """Sums of queries past the end are stored and finished, and never read."""
    structure = replace(STRUCTURES["causal"], seqlen_q=290, seqlen_kv=290)
    example = half(structure)
    with on_few_processors():
        assert finished(example, run) > 0
        first, second = (call(example, run, margin=margin) for margin in (ALIGNED, 8 * ALIGNED))
    assert_within_bounds(example, **first)
    assert all(first[each].tobytes() == second[each].tobytes() for each in ("dk", "dv"))
