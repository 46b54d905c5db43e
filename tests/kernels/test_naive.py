"""The naive kernels on the simulator compute standard attention over whole matrices of scores, under all masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
import pytest
from cuflash import DeviceSpec, ShapeDtype, UnsupportedProblem, masks
from cuflash.testing import FORWARD_PROPERTIES, GRADIENT_PROPERTIES, Example, Structure, assert_within_bounds
from executors import SIM, Run, holds_for_examples, in_turn, needs_compiler, sampled, sampled_on_simulator
from poison import call

pytestmark = needs_compiler
NAIVE = replace(SIM, kernel="naive")
DTYPES = ("float16", "float32")
on_naive = pytest.mark.parametrize("run", [NAIVE], ids=str)
RNG = np.random.default_rng(0)

# 70 queries and 90 keys: neither length is a multiple of a tile or of any block below.
SHAPE = Structure(
    q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=4, num_kv_heads=2, seqlen_q=70, seqlen_kv=90, head_dim=40,
    value_dim=24,
)  # fmt: skip
LENGTHS = masks.Lengths(q=np.array([70, 0]), kv=np.array([90, 33]))
MASKS = {
    "none": None,
    "causal": masks.Causal("bottom_right"),
    "band that leaves rows without a key": masks.Band(30, 60),
    "lengths": LENGTHS,
    "documents": masks.Documents(np.arange(70) // 20, np.arange(90) // 25),
    "blocks of 16": masks.BlockPattern(RNG.random((2, 4, 5, 6)) < 0.4, 16),
    "blocks of 64": masks.BlockPattern(RNG.random((2, 2)) < 0.7, 64),
    "blocks of 16 x 64": masks.BlockPattern(RNG.random((5, 2)) < 0.6, (16, 64)),
    "blocks of 24": masks.BlockPattern(RNG.random((3, 4)) < 0.6, 24),
    "blocks under a diagonal": masks.BlockPattern(RNG.random((3, 3)) < 0.7, 32) & masks.Causal("bottom_right"),
    "bits": masks.FromFunction(lambda b, h, i, j: (i + 2 * j + h) % 5 < 2),
    "bits that leave rows without a key": masks.FromFunction(lambda b, h, i, j: (i * j) % 3 == 1),
    "bits within lengths": LENGTHS & masks.FromFunction(lambda b, h, i, j: (i + j) % 5 != 0),
}
CASES = {name: replace(SHAPE, mask=mask) for name, mask in MASKS.items()} | {
    "1 and 256 columns": Structure(num_heads=2, seqlen_q=3, seqlen_kv=33, head_dim=1, value_dim=256),
    "256 columns and 1": Structure(num_heads=2, seqlen_q=33, seqlen_kv=1, head_dim=256, value_dim=1),
    "four leading axes that do not fold": Structure(
        q_batch=(2, 1, 2, 1), k_batch=(1, 2, 1, 2), v_batch=(1,), num_heads=1, seqlen_q=9, seqlen_kv=11
    ),
    "any strides": replace(
        SHAPE, mask=masks.BlockPattern(np.eye(5, 6, dtype=bool), 16),
        layouts=("padded", "transposed", "stepped", "negative", "odd_strides"),
    ),
    "no heads": Structure(has_heads=False, seqlen_q=40, seqlen_kv=35, value_dim=3),
    "no query": Structure(num_heads=2, seqlen_q=0, seqlen_kv=5),
    "no key": Structure(num_heads=2, seqlen_q=5, seqlen_kv=0),
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), sampled(in_turn(CASES, DTYPES), 3))
def test_results_and_gradients_are_within_their_bounds(name: str, dtype: str) -> None:
    example = NAIVE.rounded(replace(CASES[name], dtype=dtype).example())
    is_empty = not example.q.size or not example.k.size
    assert_within_bounds(example, **(NAIVE.everything(example) if is_empty else call(example, NAIVE)))


# test_fa1 and test_sm90 check the other thirds, and test_properties all, on kernels of their own choice.
@holds_for_examples(sampled_on_simulator(on_naive, "check", FORWARD_PROPERTIES, 3), dtypes=DTYPES)
def test_forward(run: Run, example: Example, check: Any) -> None:
    check(run.attend, example)


@holds_for_examples(sampled_on_simulator(on_naive, "check", GRADIENT_PROPERTIES, 3), dtypes=DTYPES)
def test_gradients(run: Run, example: Example, check: Any) -> None:
    check(run.pull, example)


def test_logits_of_any_size_give_convex_combinations() -> None:
    q, k, v = (RNG.standard_normal((rows, 8)).astype(np.float32) for rows in (20, 40, 40))
    for scale in (1e6, 1e12):
        results = NAIVE.everything(Example(q=q, k=k, v=v, do=q, scale=scale))
        assert (results["o"] <= v.max(0)).all() and (results["o"] >= v.min(0)).all()
        assert all(np.isfinite(array).all() for array in results.values())


def test_what_stands_past_a_length_never_matters() -> None:
    for name in ("lengths", "bits within lengths"):
        example = CASES[name].example()
        expected = NAIVE.everything(example)
        dirty = {each: getattr(example, each).copy() for each in ("q", "do", "k", "v")}
        for each, array in dirty.items():
            for b, length in enumerate((70, 0) if each in ("q", "do") else (90, 33)):
                array[b, :, length:] = np.nan
        again = NAIVE.everything(example.but(**dirty))
        assert all((again[each] == expected[each]).all() for each in expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("executor", ["sim", "gpu"])
def test_other_dtypes_are_refused_by_name(dtype: Any, executor: str) -> None:
    shape = ShapeDtype((2, 5, 8), dtype)
    with pytest.raises(UnsupportedProblem, match=r"kernel='naive' takes float16 or float32; got .*use kernel='simt'"):
        cuflash.plan(shape, shape, shape, kernel="naive", executor=executor, device=DeviceSpec.gpu("H100"))


def test_all_reasons_come_at_once() -> None:
    shape = ShapeDtype((2, 5, 8), np.float64)
    with pytest.raises(UnsupportedProblem) as caught:
        cuflash.plan(shape, shape, shape, kernel="naive", device=DeviceSpec.gpu("H100"), precision="tf32", causal="up")
    assert len(caught.value.reasons) == 3


def test_the_workspace_is_two_whole_matrices_and_explain_says_so() -> None:
    q = ShapeDtype((3, 4, 1000, 64), np.float16)
    ready = cuflash.plan(q, q, q, kernel="naive", device=DeviceSpec.gpu("A100"))
    assert ready.workspace_bytes == 2 * 3 * 4 * 1000 * 1000 * 4
    assert "all are computed and stored" in ready.explain() and f"{ready.workspace_bytes} bytes" in ready.explain()
