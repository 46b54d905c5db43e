"""Gradients of the sm90 family with a separate kernel for dQ: for reproducible bits, and for lists of small blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuflash.planning.plan import KernelPlan
from cuflash.testing import Example, Structure, assert_exact_probes, assert_within_bounds
from executors import (
    HALVES, Run, holds_for_examples, hostile_schedules, in_turn, needs_compiler, sampled, sampled_on_simulator,
)  # fmt: skip
from poison import STRUCTURES, PoisonedGpu, call
from test_sm90 import (
    ALIGNED, GPU90, SIM90, TILES, Ends, FewBlocks, FewBlocksGpu, Watched, half, of_dims, plan_of, planned,
    with_fewest_tiles,
)  # fmt: skip

import cuflash
from cuflash import masks, sim

SIM_REPEATS, GPU_REPEATS = (replace(run, deterministic=True) for run in (SIM90, GPU90))
repeating = pytest.mark.parametrize(
    "run", [pytest.param(SIM_REPEATS, marks=needs_compiler), pytest.param(GPU_REPEATS, marks=pytest.mark.gpu(9, 0))],
    ids=str,
)  # fmt: skip
GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_tiles_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0):
        yield


def walks_twice(plan: KernelPlan) -> bool:
    return plan.specs.get("backward_rows") is not None and plan.specs["backward_rows"].family == "sm90"


def small_blocks(block: Any, seqlen: int = 330, heads: int = 2) -> masks.Mask:
    block_q, block_kv = np.broadcast_to(block, 2)
    shape = (heads, -(-seqlen // block_q), -(-seqlen // block_kv))
    blocks = np.random.default_rng(int(block_q)).random(shape) < 0.4
    blocks[:, 1] = False  # queries without a key
    blocks[:, :, -1] = False  # and keys without a query
    return masks.BlockPattern(blocks, (int(block_q), int(block_kv)))


_LISTED = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 330, "seqlen_kv": 330}
LISTS = {
    "blocks of 64": Structure(**_LISTED, head_dim=64, value_dim=64, mask=small_blocks(64)),
    "blocks of 64, 128 columns": Structure(**_LISTED, head_dim=128, value_dim=128, mask=small_blocks(64)),
    "blocks of 64, not aligned": Structure(**_LISTED, head_dim=33, value_dim=120, mask=small_blocks(64)),
    "blocks of 64, causal": Structure(
        **_LISTED, head_dim=96, value_dim=40, mask=small_blocks(64) & masks.Causal(), layouts=("padded",) * 5
    ),
    "blocks of 64 x 128": Structure(**_LISTED, head_dim=64, value_dim=64, mask=small_blocks((64, 128))),
    "blocks of 192 x 64": Structure(**_LISTED, head_dim=64, value_dim=64, mask=small_blocks((192, 64))),
    "blocks of 100": Structure(**_LISTED, head_dim=64, value_dim=64, mask=small_blocks(100)),
    "blocks of 64, bits": Structure(
        **_LISTED, head_dim=64, value_dim=64,
        mask=small_blocks(64) & masks.Dense(np.random.default_rng(1).random((330, 330)) < 0.7),
    ),
}  # fmt: skip
BANDS = {
    name: TILES[name]
    for name in (
        "dense", "few queries", "not aligned", "padded", "v alone is not aligned", "causal", "blocks of 256",
        "documents", "bits of heads", "broadcast", "documents, a launch for each of four", "every row without a key",
        "causal, long", "a wide window",
    )
}  # fmt: skip


@holds_for_examples(repeating)
def test_every_result_is_within_its_bound(run: Run, example: Example) -> None:
    assert_within_bounds(example, **run.everything(example))


@holds_for_examples(repeating, tile=64, longest=400, most_rows=600, widest=128, max_leaves=2)
def test_results_of_many_steps_are_within_their_bounds(run: Run, example: Example) -> None:
    assert_within_bounds(example, **run.everything(example))


@holds_for_examples(repeating)
def test_the_exact_probes_pass(run: Run, example: Example) -> None:
    assert_exact_probes(run.attend, example)


@sampled_on_simulator(repeating, "name", STRUCTURES, 8, 4)  # test_sm90 runs others, and test_poison all
def test_poison_around_every_array_is_neither_read_nor_overwritten(run: Run, name: str) -> None:
    structure = STRUCTURES[name]
    example = half(structure, structure.dtype if structure.dtype in HALVES else "float16")
    if walks_twice(plan_of(example, run)):
        assert_within_bounds(example, **call(example, run))
    else:
        assert plan_of(example, run).specs["backward_rows"].family == "sm80"


@sampled_on_simulator(
    repeating,
    "dims, mask, dtype",
    in_turn(
        [(32, 32), (64, 64), (96, 80), (128, 128), (64, 128), (128, 40), (33, 7)],
        [None, masks.Causal("bottom_right"), masks.Causal("top_left")],
        HALVES,
    ),
    3,
)
def test_every_width_is_within_its_bound(
    run: Run, dims: tuple[int, int], mask: masks.Mask | None, dtype: str
) -> None:
    structure = Structure(num_heads=2, seqlen_q=330, seqlen_kv=270, head_dim=dims[0], value_dim=dims[1], mask=mask)
    example = half(structure, dtype)
    assert walks_twice(plan_of(example, run))
    assert_within_bounds(example, **call(example, run, margin=ALIGNED))


@sampled_on_simulator(repeating, "name, is_asked", in_turn(LISTS, [False, True]), 3)
def test_lists_of_small_blocks_are_within_their_bounds(run: Run, name: str, is_asked: bool) -> None:
    example, run = half(LISTS[name]), replace(run, deterministic=is_asked)
    assert walks_twice(plan_of(example, run))
    assert_within_bounds(example, **call(example, run, margin=ALIGNED))


@needs_compiler
@pytest.mark.parametrize("name", sampled([*LISTS, *BANDS], 5))
def test_all_bits_are_the_same_under_every_schedule(name: str) -> None:
    example = half((LISTS | BANDS)[name])
    assert walks_twice(plan_of(example, SIM_REPEATS))
    expected = call(example, SIM_REPEATS, margin=ALIGNED)
    assert_within_bounds(example, **expected)
    for schedule in hostile_schedules(name, most=1):
        results = call(example, SIM_REPEATS, FewBlocks(schedule, most=1 + schedule.seed % 3), margin=ALIGNED)
        assert all(results[each].tobytes() == expected[each].tobytes() for each in GRADIENTS), schedule


@sampled_on_simulator(repeating, "name", ["causal", "blocks of 64, 128 columns", "broadcast"], 2)
def test_whichever_block_works_on_a_tile_all_is_the_same(run: Run, name: str) -> None:
    example = half((LISTS | BANDS)[name])
    expected = call(example, run, margin=ALIGNED)
    for most in (1, 3):
        results = call(example, run, FewBlocksGpu(most) if run.is_on_device else FewBlocks(most=most), margin=ALIGNED)
        assert all(results[each].tobytes() == expected[each].tobytes() for each in expected)


def assert_what_lies_past_a_length_never_matters(structure: Structure, run: Run, kv: int) -> None:
    lengths = masks.Lengths(q=290, kv=kv)
    example = half(replace(structure, mask=lengths if structure.mask is None else structure.mask & lengths))
    poisoned = {x: getattr(example, x).copy() for x in ("q", "k", "v", "do")}
    for x, end in (("q", 290), ("k", kv), ("v", kv), ("do", 290)):
        poisoned[x][..., end:, :] = np.nan
    assert_within_bounds(example, **call(example.but(**poisoned), run, margin=ALIGNED))


@repeating
@pytest.mark.parametrize(
    ("name", "dims", "kv"), in_turn(["dense", "not aligned", "causal"], [(64, 40), (128, 128)], [190, 40])
)
def test_what_lies_past_a_length_never_matters_to_gradients(
    run: Run, name: str, dims: tuple[int, int], kv: int
) -> None:
    assert_what_lies_past_a_length_never_matters(of_dims(TILES[name], dims), run, kv)


def assert_queries_past_a_step_never_matter(run: Run) -> None:
    """Assert that gradients of the first 64 keys do not change with query 100.

    Under the window only the first 94 queries attend these keys.
    """
    clean = half(replace(TILES["dense"], mask=masks.SlidingWindow(30, 0)))
    poisoned = {x: getattr(clean, x).copy() for x in ("q", "do")}
    for each in poisoned.values():
        each[..., 100, :] = np.nan
    results = [
        run.pull(example.q, example.k, example.v, example.do, dlse=None, mask=clean.mask, scale=clean.scale)
        for example in (clean, clean.but(**poisoned))
    ]
    for expected, actual in zip(results[0][1:], results[1][1:]):  # compare dk and dv
        assert actual[..., :64, :].tobytes() == expected[..., :64, :].tobytes()


@repeating
def test_queries_past_a_step_never_matter(run: Run) -> None:
    assert_queries_past_a_step_never_matter(run)


@repeating
def test_what_stands_in_absent_blocks_never_matters(run: Run) -> None:
    example = half(LISTS["blocks of 64, 128 columns"])
    poisoned = {x: getattr(example, x).copy() for x in ("q", "k", "v", "do")}
    for x in ("q", "do"):
        poisoned[x][..., 64:128, :] = np.nan
    for x in ("k", "v"):
        poisoned[x][..., 320:, :] = np.nan
    assert_within_bounds(example, **call(example.but(**poisoned), run, margin=ALIGNED))


@repeating
def test_heads_that_share_keys_may_see_other_ones_of_them(run: Run) -> None:
    clean = half(replace(TILES["dense"], num_kv_heads=1, mask=Ends(np.array([130, 70, 300, 180]))))
    do = clean.do.copy()
    do[..., :4, :] = np.nan  # rows of queries without a key
    assert_within_bounds(clean, **call(clean.but(do=do), run, margin=ALIGNED))


@needs_compiler
@pytest.mark.parametrize("name", sampled(["not aligned", "causal", "blocks of 64, causal"], 3, 2))
def test_watched_kernels_count_every_lane_that_arrives(name: str) -> None:
    example = half((LISTS | BANDS)[name])
    machine = Watched(sim.Schedule(order="random", copies="random"))
    assert_within_bounds(example, **call(example, SIM_REPEATS, machine, margin=ALIGNED))


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("name", ["dense", "causal, long", "blocks of 64, 128 columns"])
def test_a_thousand_calls_give_the_same_bits(name: str) -> None:
    example = half((LISTS | BANDS)[name])
    first = call(example, GPU_REPEATS, PoisonedGpu(), margin=ALIGNED)
    for _ in range(1000):
        again = call(example, GPU_REPEATS, margin=ALIGNED)
        assert all(again[each].tobytes() == first[each].tobytes() for each in first)


# Plans.


@pytest.mark.parametrize("block", [128, 192, (128, 384)])
def test_large_blocks_are_walked_once(block: Any) -> None:
    block_q, block_kv = np.broadcast_to(block, 2)
    mask = masks.BlockPattern(np.ones((384 // block_q, 384 // block_kv)) > 0, (int(block_q), int(block_kv)))
    assert "backward_rows" not in planned(2, 384, 128, mask=mask).specs


def test_the_memory_beside_the_arrays_has_no_sums_of_dq() -> None:
    x = cuflash.ShapeDtype((16, 4096, 128), "float16")
    once, twice = (
        cuflash.plan(x, x, x, kernel="sm90", deterministic=each, device=cuflash.DeviceSpec.gpu("H100"))
        for each in (False, True)
    )
    assert once.workspace_bytes - twice.workspace_bytes >= 16 * 4096 * 128 * 4
