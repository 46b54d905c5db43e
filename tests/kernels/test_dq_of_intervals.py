"""dQ of row intervals and bands, where tiles of keys count their arrivals at queries in the sm90 family's gradients.

The first tile that arrives stores its part of dQ, and the last one may finish it. Results are right under every
schedule, in the simulator and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuflash import masks
from cuflash.planning.families.sm90_dq import ArrivalUse
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import (
    HALVES, Run, holds_for_examples, hostile_schedules, in_turn, needs_compiler, sampled_on_simulator,
)  # fmt: skip
from fused_dq import of_intervals
from poison import call
from test_sm90 import ALIGNED, GPU90, SIM90, FewBlocks, half, on_sm90, plan_of, with_fewest_tiles


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_tiles_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0):
        yield


USES = (ArrivalUse.STORE, ArrivalUse.FINISH)


def structures() -> dict[str, Structure]:
    heads = {"num_heads": 2, "num_kv_heads": 2}
    narrow, wide = {"head_dim": 64, "value_dim": 40}, {"head_dim": 128, "value_dim": 128}
    square = heads | {"seqlen_q": 520, "seqlen_kv": 520}
    sequences = masks.Sequences(np.array([5, 69, 69, 133, 400, 500]), causal=True)
    return {
        "sequences": Structure(**square, **wide, mask=sequences),
        "long sequences": Structure(**square, **wide, mask=masks.Sequences(np.array([0, 20, 520]), causal=True)),
        "a sequence that ends in a tile": Structure(
            **square, **wide, mask=masks.Sequences(np.array([0, 300, 301, 520]), causal=True)
        ),
        "grouped heads": Structure(**square | {"num_kv_heads": 1}, **wide, mask=sequences),
        "a window": Structure(**square, **wide, mask=masks.SlidingWindow(200, 0)),
        "a window of tiles": Structure(**square, **narrow, mask=masks.SlidingWindow(128, 128, "top_left")),
        "of each entry": Structure(
            **square, **narrow, q_batch=(2,), k_batch=(2,), v_batch=(2,),
            mask=masks.Sequences(np.array([[0, 64, 520], [0, 130, 140]])),
        ),
        "not aligned": Structure(**square, head_dim=64, value_dim=33, layouts=("padded",) * 5, mask=sequences),
        "queries past all sequences": Structure(
            **heads, **wide, seqlen_q=330, seqlen_kv=300, mask=masks.Sequences(
                np.array([0, 100, 256]), np.array([0, 128, 300]), causal="bottom_right"
            ),
        ),
    }  # fmt: skip


STRUCTURES = structures()


def assert_all_right(
    example: Example, run: Run, use: ArrivalUse, machine: Any = None, margin: int = ALIGNED
) -> dict[str, Any]:
    with of_intervals(use):
        specs = plan_of(example, run).specs
        assert specs["backward"].counts_dq_arrivals and specs["backward_statistics"].counts_dq_arrivals
        finishes = use is ArrivalUse.FINISH
        assert specs["backward"].fuses_dq_epilogue == finishes == ("convert_dq" not in specs)
        found = call(example, run, machine, margin=margin)
    assert_within_bounds(example, **found)
    return found


@sampled_on_simulator(on_sm90, "name, dtype, use", in_turn(STRUCTURES, HALVES, USES), 3)
def test_gradients_are_within_their_bounds(run: Run, name: str, dtype: str, use: ArrivalUse) -> None:
    example = half(STRUCTURES[name], dtype)
    with of_intervals(ArrivalUse.NONE):
        assert not plan_of(example, run).specs["backward"].counts_dq_arrivals
        expected = call(example, run, margin=ALIGNED)
    found = assert_all_right(example, run, use)
    assert all(found[each].tobytes() == expected[each].tobytes() for each in ("o", "lse", "dk", "dv"))


@needs_compiler
@pytest.mark.parametrize(("name", "use"), in_turn(["sequences", "a window", "grouped heads"], USES))
def test_gradients_are_within_their_bounds_under_every_schedule(name: str, use: ArrivalUse) -> None:
    example = half(STRUCTURES[name])
    for schedule in hostile_schedules(name):
        assert_all_right(example, SIM90, use, FewBlocks(schedule, most=1 + schedule.seed % 3))


@holds_for_examples(on_sm90, longest=500, tile=128, most_rows=1200, most_scores=1 << 18, widest=128, max_leaves=2)
def test_drawn_masks_are_within_their_bounds(run: Run, example: Example) -> None:
    for use in USES:
        with of_intervals(use):
            assert_within_bounds(example, **run.everything(example))


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_that_come_at_once_are_waited_for(dim: int, use: ArrivalUse) -> None:
    """There are more tiles of keys than the GPU works on at a time. All results but dQ repeat bit for bit."""
    mask = masks.Sequences(np.sort(np.random.default_rng(0).integers(0, 1025, 9)), causal=True)
    example = half(Structure(num_heads=40, seqlen_q=1024, seqlen_kv=1024, head_dim=dim, value_dim=dim, mask=mask))
    first = assert_all_right(example, GPU90, use)
    for _ in range(20):
        found = assert_all_right(example, GPU90, use)
        assert all(found[each].tobytes() == first[each].tobytes() for each in ("o", "lse", "dk", "dv"))
