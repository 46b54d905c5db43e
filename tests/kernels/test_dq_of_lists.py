"""dQ of lists with few blocks a row, which the last tile of keys that arrives finishes in the sm90 family's gradients.

Tests say which calls do so, and that results are right under every schedule, in the simulator and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import (
    HALVES, Run, holds_for_examples, hostile_schedules, in_turn, needs_compiler, sampled_on_simulator,
)  # fmt: skip
from fused_dq import of_lists
from poison import call
from test_sm90 import ALIGNED, GPU90, SIM90, FewBlocks, FewBlocksGpu, half, on_sm90, plan_of, with_fewest_tiles

import cuflash
from cuflash import DeviceSpec, masks
from cuflash.planning.plan import KernelPlan


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_tiles_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0):
        yield


# Calls in which the last tile of keys that arrives finishes dQ.


def planned(blocks: Any, dim: int = 128, block: Any = 128, q_batch: tuple[int, ...] = (2,)) -> KernelPlan:
    rows, columns = np.multiply(np.asarray(blocks).shape[-2:], block)
    q = cuflash.ShapeDtype((*q_batch, 16, rows, dim), "bfloat16")
    k = cuflash.ShapeDtype((2, 16, columns, dim), "bfloat16")
    mask = masks.BlockPattern(blocks, block)
    return cuflash.plan(q, k, k, mask=mask, kernel="sm90", device=DeviceSpec.gpu("H100")).plan


def finishes(plan: KernelPlan) -> bool:
    """Return whether the backward kernel of a plan finishes dQ; no kernel then rounds dQ."""
    of = {entry: plan.specs[entry].fuses_dq_epilogue for entry in ("backward_statistics", "backward")}
    assert of["backward"] == of["backward_statistics"] == ("convert_dq" not in plan.specs)
    assert plan.kernels.order.dq is None
    assert "dq_sum" in plan.kernels.backward.workspaces
    return of["backward"]


@pytest.mark.parametrize("block, most", [(128, 7), (256, 3), ((384, 128), 7), (512, 1), (1024, 0)])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_the_last_tile_of_keys_finishes_where_few_come(dim: int, block: Any, most: int) -> None:
    for number in range(1, 10):
        blocks = np.zeros((8, 12), bool)
        blocks[:, :number] = True
        assert finishes(planned(blocks, dim, block)) == (number <= most)
    blocks[::2] = False
    assert finishes(planned(blocks, dim, block)) == (number / 2 < most + 1)  # on average


def test_what_it_takes_beside_the_arrays_is_what_adding_takes() -> None:
    plan = planned(np.eye(16, dtype=bool))
    with of_lists(finishes=False):
        other = planned(np.eye(16, dtype=bool))
    assert finishes(plan) and not finishes(other)
    assert plan.workspace_bytes == other.workspace_bytes > 4 * 2 * 16 * 2048 * 128  # float32 sums
    assert "convert_dq" in other.specs and "convert_dq" not in plan.specs


@pytest.mark.parametrize(
    ("options", "expected"), [({}, True), ({"dim": 120}, False), ({"q_batch": ()}, False), ({"q_batch": (1,)}, False)]
)
def test_dq_is_written_as_it_is_returned_and_in_whole_packets(options: dict[str, Any], expected: bool) -> None:
    assert finishes(planned(np.eye(8, dtype=bool), **options)) == expected


@pytest.mark.parametrize(("columns", "expected"), [((1 << 15) - 1, True), (1 << 15, False)])
def test_half_a_count_holds_all_tiles_that_come(columns: int, expected: bool) -> None:
    blocks = np.zeros((1, columns), bool)
    blocks[0, -1] = True
    assert finishes(planned(blocks)) == expected


# Results.


def structures() -> dict[str, Structure]:
    rng = np.random.default_rng(0)
    square = {"num_heads": 2, "num_kv_heads": 2, "seqlen_q": 600, "seqlen_kv": 520}
    narrow, wide = {"head_dim": 64, "value_dim": 40}, {"head_dim": 128, "value_dim": 128}
    causal, blocks = masks.Causal("bottom_right"), rng.random((2, 5, 5)) < 0.6
    blocks[:, 2], blocks[:, :, 3] = False, False  # queries and keys that nobody sees
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


STRUCTURES = structures()


def assert_all_right(example: Example, run: Run, machine: Any = None, margin: int = ALIGNED) -> dict[str, Any]:
    with of_lists(finishes=True):
        assert finishes(plan_of(example, run))
        found = call(example, run, machine, margin=margin)
    assert_within_bounds(example, **found)
    return found


@sampled_on_simulator(on_sm90, "name, dtype", in_turn(STRUCTURES, HALVES), 3)
def test_gradients_are_within_their_bounds(run: Run, name: str, dtype: str) -> None:
    example = half(STRUCTURES[name], dtype)
    with of_lists(finishes=False):
        assert not finishes(plan_of(example, run))
        expected = call(example, run, margin=ALIGNED)
    found = assert_all_right(example, run)
    assert all(found[each].tobytes() == expected[each].tobytes() for each in ("dk", "dv"))


@on_sm90
@pytest.mark.parametrize(
    ("name", "most"), in_turn(["blocks of 128", "causal blocks of 256", "a launch for each of two"], [1, 2])
)
def test_any_number_of_blocks_ends(run: Run, name: str, most: int) -> None:
    machine = FewBlocksGpu(most) if run.is_on_device else FewBlocks(most=most)
    assert_all_right(half(STRUCTURES[name]), run, machine)


@needs_compiler
@pytest.mark.parametrize("name", ["blocks of 128", "one block a row", "causal blocks of 256", "bits", "grouped heads"])
def test_gradients_are_within_their_bounds_under_every_schedule(name: str) -> None:
    example = half(STRUCTURES[name])
    for schedule in hostile_schedules(name):
        assert_all_right(example, SIM90, FewBlocks(schedule, most=1 + schedule.seed % 3))


@holds_for_examples(on_sm90, longest=500, tile=128, most_rows=1200, most_scores=1 << 18, widest=128, max_leaves=2)
def test_drawn_masks_within_blocks_are_within_their_bounds(run: Run, example: Example) -> None:
    """Drawn masks, alone and within blocks, are within their bounds whether or not the last tile finishes dQ."""
    rows, columns = (-(-array.shape[-2] // 128) for array in (example.q, example.k))
    blocks = masks.BlockPattern(np.arange(rows)[:, None] % 3 <= np.arange(columns) % 3, 128)
    for mask in (example.mask, blocks if example.mask is None else blocks & example.mask):
        other = example.but(mask=mask)
        with of_lists(finishes=True):
            assert_within_bounds(other, **run.everything(other))


@on_sm90
def test_what_stands_at_queries_and_keys_that_nobody_sees_never_matters(run: Run) -> None:
    clean = half(STRUCTURES["blocks of 128"])
    unseen = {"q": 256, "do": 256, "k": 384, "v": 384}
    poisoned = {name: getattr(clean, name).copy() for name in unseen}
    for name, start in unseen.items():
        poisoned[name][..., start : start + 128, :] = np.nan
    with of_lists(finishes=True):
        found = call(clean.but(**poisoned), run, margin=ALIGNED)
    assert_within_bounds(clean, **found)
    assert not found["dq"][..., 256:384, :].any()


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block", [128, 256])
def test_tiles_that_come_at_once_are_waited_for(dim: int, block: int) -> None:
    """There are more tiles of keys than the GPU works on at a time. All results but dQ repeat bit for bit."""
    mask = masks.BlockPattern(np.random.default_rng(0).random((40, 1024 // block, 1024 // block)) < 0.5, block)
    example = half(Structure(num_heads=40, seqlen_q=1024, seqlen_kv=1024, head_dim=dim, value_dim=dim, mask=mask))
    first = assert_all_right(example, GPU90)
    for _ in range(20):
        found = assert_all_right(example, GPU90)
        assert all(found[each].tobytes() == first[each].tobytes() for each in ("o", "lse", "dk", "dv"))
