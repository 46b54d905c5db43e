"""Gradients of the sm90 family in tiles of 80 queries: long calls of 65 to 128 columns, whose queries see all keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuflash.plans import Plan
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import HALVES, Run, holds_for_examples, needs_compiler
from planting import chosen, planted, without_their_line
from poison import MARGIN, call
from test_sm90 import ALIGNED, SIM90, FewBlocks, FewBlocksGpu, Watched, half, on_sm90, plan_of, planned

from cuflash import api, masks, sim, sm90_tiles


@contextmanager
def from_so_many_keys_on(number: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90_tiles, "_FEWEST_KEYS_OF_80", number)
        api._remembered.cache_clear()
        yield
    api._remembered.cache_clear()


@pytest.fixture
def short_calls_too() -> Iterator[None]:
    with from_so_many_keys_on(1):
        yield


use = pytest.mark.usefixtures("short_calls_too")
_SQUARE = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 330, "seqlen_kv": 270}
FULL = {
    "128 columns": Structure(**_SQUARE, head_dim=128, value_dim=128),
    "96 and 72 columns": Structure(**_SQUARE, head_dim=96, value_dim=72),
    "33 and 100 columns, not aligned": Structure(**_SQUARE, head_dim=33, value_dim=100),
    "whole tiles": Structure(num_heads=2, seqlen_q=400, seqlen_kv=256, head_dim=128, value_dim=128),
    "padded": Structure(**_SQUARE, head_dim=128, value_dim=120, layouts=("padded",) * 5),
    "fewer queries than a tile": Structure(**_SQUARE | {"seqlen_q": 7}, head_dim=128, value_dim=128),
    "a window that hides nothing": Structure(
        **_SQUARE | {"seqlen_kv": 330}, head_dim=128, value_dim=128, mask=masks.SlidingWindow(400, 400)
    ),
    "broadcast": Structure(
        q_batch=(2, 1, 3), k_batch=(1, 2, 1), v_batch=(3,), num_heads=2, num_kv_heads=1, seqlen_q=170, seqlen_kv=90,
        head_dim=128, value_dim=40,
    ),
}  # fmt: skip


def has_tiles_of_80(plan: Plan) -> bool:
    found = {plan.specs[entry].block_q for entry in ("backward_statistics", "backward", "convert_dq")}
    assert len(found) == 1
    return found == {80}


@on_sm90
@use
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FULL)
def test_gradients_are_within_their_bounds(run: Run, name: str, dtype: str) -> None:
    example = half(FULL[name], dtype)
    assert has_tiles_of_80(plan_of(example, run))
    for margin in (MARGIN, ALIGNED):
        assert_within_bounds(example, **call(example, run, margin=margin))


@holds_for_examples(on_sm90, longest=400, tile=128, most_rows=1200, most_scores=1 << 18, widest=128, max_leaves=1)
def test_drawn_problems_are_within_their_bounds(run: Run, example: Example) -> None:
    other = example.but(mask=None)
    with from_so_many_keys_on(1):
        if not plan_of(other, run).is_empty:
            assert_within_bounds(other, **call(other, run, margin=ALIGNED))


@needs_compiler
@use
@pytest.mark.parametrize("name", ["128 columns", "33 and 100 columns, not aligned", "whole tiles", "broadcast"])
def test_gradients_are_within_their_bounds_under_every_schedule(name: str) -> None:
    example = half(FULL[name])
    orders = itertools.product(("round_robin", "random", "priorities", "first_warp", "last_warp"), ("late", "random"))
    for seed, (order, copies) in enumerate(orders):
        schedule = sim.Schedule(seed=seed, order=order, copies=copies, shuffle_lanes=bool(seed % 2))
        assert_within_bounds(example, **call(example, SIM90, FewBlocks(schedule, most=1 + seed % 3), margin=ALIGNED))


@on_sm90
@use
def test_whichever_block_works_on_a_tile_all_but_dq_is_the_same(run: Run) -> None:
    example = half(FULL["128 columns"])
    expected = call(example, run, margin=ALIGNED)
    for most in (1, 3):
        found = call(example, run, FewBlocksGpu(most) if run.is_on_device else FewBlocks(most=most), margin=ALIGNED)
        assert_within_bounds(example, **found)
        assert all(found[each].tobytes() == expected[each].tobytes() for each in ("o", "lse", "dk", "dv"))


@needs_compiler
@use
def test_watched_kernels_count_every_lane_that_arrives() -> None:
    example = half(FULL["33 and 100 columns, not aligned"])
    machine = Watched(sim.Schedule(order="random", copies="random"))
    assert_within_bounds(example, **call(example, SIM90, machine, margin=ALIGNED))


@pytest.mark.parametrize(("shape", "options", "is_taken"), [
    ((16, 4096, 128), {}, True), ((16, 2048, 96), {}, True), ((16, 4096, 128), {"window": (5000, 5000)}, True),
    ((16, 2047, 128), {}, False), ((16, 4096, 64), {}, False), ((16, 4096, 192), {}, False),
    ((16, 4096, 128), {"causal": True}, False), ((16, 4096, 128), {"window": (4000, 4000)}, False),
    ((16, 4096, 128), {"mask": masks.Lengths(kv=4096)}, False), ((16, 4096, 128), {"deterministic": True}, False),
    ((16, 4096, 128), {"mask": masks.BlockPattern(np.ones((32, 32)) > 0, 128)}, False),
])  # fmt: skip
def test_long_calls_whose_queries_see_all_keys_take_them(
    shape: tuple[int, ...], options: dict[str, Any], is_taken: bool
) -> None:
    assert (planned(*shape, **options).specs["backward"].block_q == 80) == is_taken


# Faults

_RING, _ORDER, _STATISTICS = "attention/query_ring.cuh", "tile/fragment_order.cuh", "sm90/backward_statistics.cu"
EDITS = {
    "both warpgroups make the first columns of dQ": (
        "sm90/backward.cu", "k_smem.start + (kRowParts == 1 ? part * KPart::kBytes : 0)", "k_smem.start"
    ),
    "sums of a product are those of the last step too": (
        "tile/panel_tile.cuh", "CUFLASH_DEVICE void start_product_tt(Tile& c, RowsAcrossSum<A> a, RowsAlongSum<B> b) {",
        "CUFLASH_DEVICE void start_product_tt(Tile& c, RowsAcrossSum<A> a, RowsAlongSum<B> b) {\n"
        "  return start_sum_tt(c, a, b);",
    ),
    "rows of dQ are mixed up": (_ORDER, "column % 8 / 2, e =", "column % 4 / 2, e ="),
    "columns of dQ are mixed up": (_ORDER, "row % 16 / 8 * 2 + column % 2", "column % 2"),
    "queries of dQ are mixed up": (_ORDER, "+ column / 8 * 128 +", "+ column / 16 * 128 +"),
    "queries past a tile are known": (_STATISTICS, "if (row < kBlockQ) known.lse_2", "known.lse_2"),
    "the last queries' bits are lost": (_RING, "kQueryWords = (kBlockQ + 31) / 32", "kQueryWords = kBlockQ / 32"),
}  # fmt: skip


def gradients_are_right() -> None:
    with from_so_many_keys_on(1):
        for number, name in enumerate(("128 columns", "33 and 100 columns, not aligned", "broadcast")):
            example = half(FULL[name])
            for seed, order in enumerate(("random", "last_warp", "first_warp")):
                schedule = sim.Schedule(seed=seed, order=order, copies="late" if order == "last_warp" else "random")
                machine, margin = FewBlocks(schedule, most=1 + (seed + number) % 3), ALIGNED if seed else MARGIN
                assert_within_bounds(example, **call(example, SIM90, machine, margin=margin))


@needs_compiler
@pytest.mark.parametrize("name", chosen(EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", *EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        gradients_are_right()


@needs_compiler
def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    gradients_are_right()


def test_every_edit_has_its_line() -> None:
    assert without_their_line(EDITS) == []
