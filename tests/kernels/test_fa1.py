"""The fa1 family: FlashAttention-1's loops within all kernels' bounds, their memory, and the calls they refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from cuflash import DeviceSpec, Dropout, ShapeDtype, UnsupportedProblem, masks
from cuflash.executors.sim import Simulator
from cuflash.planning.families.fa1 import traffic
from cuflash.sim import Schedule
from cuflash.testing import FORWARD_PROPERTIES, Example, Structure, assert_within_bounds
from cuflash.testing.assertions import assert_lse_counts_the_keys, assert_ones_stay_ones, assert_wide_accumulators
from executors import (
    GPU, HALVES, SIM, Run, holds_for_examples, hostile_schedules, is_long, needs_compiler, sampled_on_simulator,
)  # fmt: skip
from poison import call

import cuflash

FA1 = replace(SIM, kernel="fa1", most_examples=2)
on_fa1 = pytest.mark.parametrize(
    "run",
    [pytest.param(FA1, marks=needs_compiler), pytest.param(replace(GPU, kernel="fa1"), marks=pytest.mark.gpu)],
    ids=str,
)
DRAWN = {"dtypes": HALVES, "widest": 64}  # the family refuses wider heads, as a test below shows


@holds_for_examples(on_fa1, **DRAWN)
def test_every_result_is_within_its_bound(run: Run, example: Example) -> None:
    assert_within_bounds(example, **run.everything(example))


@holds_for_examples(on_fa1, **DRAWN)
def test_the_probes_of_sums_are_exact(run: Run, example: Example) -> None:
    """Sums of weights are exact.

    Means of integers are only bounded, since FlashAttention-1 divides O in each iteration.
    """
    assert_lse_counts_the_keys(run.attend, example)
    assert_ones_stay_ones(run.attend, example)
    assert_wide_accumulators(run.attend, example.q.dtype)


@holds_for_examples(sampled_on_simulator(on_fa1, "check", FORWARD_PROPERTIES, 3, 1), most_scores=1 << 12, **DRAWN)
def test_forward(run: Run, example: Example, check: Any) -> None:
    check(run.attend, example)


class KeysOfHead(masks.Mask):
    """A mask under which the first head attends keys 20 to 99, and the second head keys 60 to 139."""

    def intervals(self, b: Any, h: Any, i: Any) -> Any:
        lo = 20 + 40 * h + 0 * (b + i)
        return lo, lo + 80


# Three tiles of queries and of keys, so that sums in memory are read back; no length is a multiple of its tile.
LONG = Structure(num_heads=2, num_kv_heads=1, seqlen_q=300, seqlen_kv=530, dtype="float16", head_dim=64, value_dim=64)
SHORT = replace(LONG, seqlen_q=150, seqlen_kv=140, head_dim=24, value_dim=40)
BLOCKS = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool)
CASES = {
    "all keys": LONG,
    "causal": replace(LONG, seqlen_q=270, seqlen_kv=270, mask=masks.Causal("bottom_right")),
    "a band that leaves rows without a key": replace(SHORT, mask=masks.Band(30, 60)),
    "lengths, and axes that broadcast": replace(
        SHORT, q_batch=(2,), k_batch=(1,), v_batch=(2,),
        mask=masks.Lengths(q=np.array([150, 0]), kv=np.array([140, 33])),
    ),
    "heads see other keys": replace(SHORT, mask=KeysOfHead()),
    "blocks of 64": replace(SHORT, mask=masks.BlockPattern(BLOCKS, 64)),
    "blocks of 24 x 72": replace(SHORT, seqlen_q=70, seqlen_kv=200, mask=masks.BlockPattern(BLOCKS, (24, 72))),
    "blocks under a diagonal": replace(SHORT, mask=masks.BlockPattern(BLOCKS, 64) & masks.Causal("bottom_right")),
    "bits": replace(SHORT, mask=masks.Dilated(3, align="bottom_right")),
    "96 columns": replace(SHORT, head_dim=90, value_dim=70),
    "128 columns": replace(SHORT, head_dim=128, value_dim=100),
    "a negative scale": replace(SHORT, scale=-0.3),
}  # fmt: skip


@sampled_on_simulator(
    on_fa1, "case, dtype",
    product(CASES, HALVES) if is_long() else [(case, HALVES["columns" in case]) for case in CASES], 2,
)  # fmt: skip
def test_all_work_is_within_its_bounds_in_the_midst_of_poison(run: Run, case: str, dtype: str) -> None:
    example = run.rounded(replace(CASES[case], dtype=dtype).example())
    assert_within_bounds(example, **call(example, run))


@needs_compiler
@pytest.mark.parametrize("schedule", hostile_schedules("fa1"), ids=str)
def test_every_schedule_gives_the_same_bits(schedule: Any) -> None:
    """Kernels have two stages, or one on a chip with little shared memory; one case has a block list."""
    for case, chip, num_stages in (("128 columns", "L4", 1), ("blocks under a diagonal", "H100", 2)):
        example = FA1.rounded(CASES[case].example())
        arrays, options = (example.q, example.k, example.v), {"mask": example.mask, "device": DeviceSpec.gpu(chip)}
        ready = cuflash.plan(*arrays, **options, executor="sim", kernel="fa1")
        assert ready._plan.specs["backward"].num_stages == num_stages
        expected, results = (call(example, FA1, Simulator(each), ready=ready) for each in (Schedule(), schedule))
        assert all(results[name].tobytes() == expected[name].tobytes() for name in expected)
        assert_within_bounds(example, **results)


@on_fa1
def test_all_results_repeat_bit_for_bit(run: Run) -> None:
    example = run.rounded(CASES["causal"].example())
    first, second = run.everything(example), run.everything(example)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


# Plans.


def plan_of(*shape: int, dtype: Any = np.float16, chip: str = "H100", **options: Any) -> Any:
    x = ShapeDtype(shape, np.dtype(dtype))
    return cuflash.plan(x, x, x, kernel="fa1", device=DeviceSpec.gpu(chip), **options)


def test_memory_is_linear_in_the_length_and_explain_tells_the_traffic() -> None:
    """The forward pass needs a float32 O and two numbers per row; the backward pass needs less: dQ and delta."""
    short, long = plan_of(16, 8, 1024, 64), plan_of(16, 8, 4096, 64)
    assert long.workspace_bytes == 16 * 8 * 4096 * 4 * (64 + 2) == 4 * short.workspace_bytes
    text = long.explain()
    forward, backward = traffic(long._plan.problem, long._plan.kernels, long._plan.visited_scores)
    assert f"traffic    {forward} bytes of device memory forward, {backward} backward" in text
    assert "all results are bitwise reproducible" in text and "grid 128" in text


@pytest.mark.parametrize(("dim", "keys", "backward_keys"), [(64, 256, 128), (128, 128, 128)])
def test_traffic_counts_what_every_turn_moves(dim: int, keys: int, backward_keys: int) -> None:
    """Traffic equals the sums for algorithms 1 and 4 of the FlashAttention paper, if tiles divide the lengths."""
    ready = plan_of(2, 3, 1024, dim)
    specs = ready._plan.specs
    assert (specs["forward"].block_kv, specs["backward"].block_kv) == (keys, backward_keys)
    per_head = [0, 0]
    for _ in range(1024 // keys):
        # read K, V and Q; read and write O, m and l
        per_head[0] += 2 * keys * dim * 2 + 1024 * (2 * dim + 2 * 4 * (dim + 2))
    per_head[0] += 1024 * (2 * 4 * (dim + 2) + 2 * dim + 4)  # clear and read O, m and l; write O and lse
    for _ in range(1024 // backward_keys):
        # K, V, dK and dV; Q, dO, dQ and lse
        per_head[1] += 4 * backward_keys * dim * 2 + 1024 * (4 * dim + 2 * 4 * dim + 8)
    per_head[1] += 1024 * (4 * dim + 8 + 4 * dim) + 1024 * (4 * dim + 2 * dim)  # O, dO, lse and delta; dQ
    counted = traffic(ready._plan.problem, ready._plan.kernels, ready._plan.visited_scores)
    assert list(counted) == [6 * each for each in per_head]


def test_a_mask_of_half_the_blocks_moves_about_half() -> None:
    dense, causal = plan_of(1, 1, 8192, 64), plan_of(1, 1, 8192, 64, causal=True)
    moved = [traffic(x._plan.problem, x._plan.kernels, x._plan.visited_scores) for x in (dense, causal)]
    assert all(0.5 < half / whole < 0.6 for half, whole in zip(moved[1], moved[0]))


def test_auto_never_chooses_it() -> None:
    x = ShapeDtype((2, 8, 4096, 64), np.dtype(np.float16))
    families = {cuflash.plan(x, x, x, device=DeviceSpec.gpu(chip))._plan.family.name for chip in ("T4", "A100", "H100")}
    assert families == {"simt", "sm80", "sm90"}


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((2, 9, 8), {"dtype": np.float32}, ["kernel='fa1' takes float16 or bfloat16; got float32", "kernel='simt'"]),
        ((2, 9, 8), {"softcap": 10.0}, ["does not support score, softcap or bias; got one: use kernel='auto'"]),
        ((2, 9, 8), {"sink": np.zeros(2, np.float32)}, ["does not support sink; got one: use kernel='auto'"]),
        ((2, 9, 8), {"dropout": Dropout(0.1, seed=0)}, ["does not support dropout; got one: use kernel='auto'"]),
        ((2, 9, 8), {"dropout": Dropout(0.1, seed=np.array(3))}, ["does not support dropout_seed; got one"]),
        ((2, 9, 129), {}, ["takes a head_dim of at most 128; got 129", "takes a value dim of at most 128; got 129"]),
        ((2, 9, 8), {"chip": "T4"}, ["kernel='fa1' needs compute capability 8.0 or newer; got 7.5"]),
        ((2, 9, 136), {"dtype": np.float32, "softcap": 1.0, "causal": "up"}, ["136", "float32", "softcap", "causal"]),
    ],
)
def test_what_the_paper_lacks_is_refused_with_all_reasons(
    shape: tuple[int, ...], options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        plan_of(*shape, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_problems_have_shaped_results(lengths: tuple[int, int]) -> None:
    example = Structure(num_heads=2, seqlen_q=lengths[0], seqlen_kv=lengths[1], dtype="float16").example()
    results = FA1.everything(example)
    assert (results["lse"] == -np.inf).all() and all((results[name] == 0).all() for name in ("o", "dq", "dk", "dv"))
