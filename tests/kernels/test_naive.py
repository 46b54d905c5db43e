"""The naive kernels on the simulator compute standard attention over whole matrices of scores, under all masks."""

from __future__ import annotations

from typing import Any

import cuflash
import ml_dtypes
import numpy as np
import pytest
from cuflash import DeviceSpec, ShapeDtype, UnsupportedProblem, masks
from cuflash.testing import assertions
from cuflash.testing.assertions import Example
from cuflash.blocks.work_list import IntervalWork, ListedWork
from executors import in_turn

RNG = np.random.default_rng(0)


def drawn(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


def example(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None) -> Example:
    """Make an example of these operands with drawn cotangents."""
    ready = cuflash.plan(q, k, v)
    o_shape, lse_shape = ready.plan.problem.o_shape(), ready.plan.problem.lse_shape()
    return Example(q=q, k=k, v=v, do=drawn(*o_shape, dtype=q.dtype), dlse=drawn(*lse_shape), mask=mask, scale=scale)


def run(example: Example) -> dict[str, Any]:
    """Return o, lse, dq, dk and dv of the naive kernels."""
    (o, lse), vjp = cuflash.attention_vjp(
        example.q, example.k, example.v, mask=example.mask, scale=example.scale, kernel="naive", executor="sim",
        return_lse=True,
    )  # fmt: skip
    dq, dk, dv = vjp(example.do, example.dlse)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def work_of(mask: Any, q: Any, k: Any, v: Any) -> Any:
    return cuflash.plan(q, k, v, mask=mask, kernel="naive", executor="sim").plan.work


# 70 queries and 90 keys: neither is a multiple of a tile, nor of any block below.
LENGTHS = np.array([70, 0]), np.array([90, 33])
MASKS = {
    "none": None,
    "causal": masks.Causal("bottom_right"),
    "band that leaves rows without a key": masks.Band(30, 60),
    "lengths": masks.Lengths(q=LENGTHS[0], kv=LENGTHS[1]),
    "documents": masks.Documents(np.arange(70) // 20, np.arange(90) // 25),
    "blocks of 16": masks.BlockPattern(RNG.random((2, 4, 5, 6)) < 0.4, 16),
    "blocks of 64": masks.BlockPattern(RNG.random((2, 2)) < 0.7, 64),
    "blocks of 16 x 64": masks.BlockPattern(RNG.random((5, 2)) < 0.6, (16, 64)),
    "blocks of 24": masks.BlockPattern(RNG.random((3, 4)) < 0.6, 24),
    "blocks under a diagonal": masks.BlockPattern(RNG.random((3, 3)) < 0.7, 32) & masks.Causal("bottom_right"),
    "bits": masks.FromFunction(lambda b, h, i, j: (i + 2 * j + h) % 5 < 2),
    "bits that leave rows without a key": masks.FromFunction(lambda b, h, i, j: (i * j) % 3 == 1),
    "bits within lengths": masks.Lengths(q=LENGTHS[0], kv=LENGTHS[1])
    & masks.FromFunction(lambda b, h, i, j: (i + j) % 5 != 0),
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(MASKS, [np.float16, np.float32]))
def test_results_and_gradients_are_within_their_bounds(name: str, dtype: Any) -> None:
    q, k, v = drawn(2, 4, 70, 40, dtype=dtype), drawn(2, 2, 90, 40, dtype=dtype), drawn(2, 2, 90, 24, dtype=dtype)
    one = example(q, k, v, MASKS[name])
    assertions.assert_within_bounds(one, **run(one))


def test_the_masks_above_are_of_every_kind() -> None:
    q, k, v = drawn(2, 4, 70, 8), drawn(2, 2, 90, 8), drawn(2, 2, 90, 8)
    works = {name: work_of(mask, q, k, v) for name, mask in MASKS.items()}
    intervals = [work for work in works.values() if isinstance(work, IntervalWork)]
    assert {work.band is None for work in intervals} == {False, True}
    listed = [work for work in works.values() if isinstance(work, ListedWork)]
    assert set(np.concatenate([work.index.kinds for work in listed])) == {1, 2, 3}
    assert {(work.block_q, work.block_kv) for work in listed} >= {(16, 16), (64, 64), (16, 64), (24, 24), (32, 32)}


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "seqlen_q", "seqlen_kv"), [(1, 256, 3, 33), (256, 1, 33, 1), (33, 96, 32, 64)]
)
def test_all_dims_and_lengths_are_served(head_dim: int, value_dim: int, seqlen_q: int, seqlen_kv: int) -> None:
    one = example(drawn(2, seqlen_q, head_dim), drawn(2, seqlen_kv, head_dim), drawn(2, seqlen_kv, value_dim))
    assertions.assert_within_bounds(one, **run(one))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_leading_axes_broadcast(dtype: Any) -> None:
    q, k, v = drawn(2, 1, 2, 20, 8, dtype=dtype), drawn(3, 2, 40, 8, dtype=dtype), drawn(2, 3, 2, 40, 8, dtype=dtype)
    one = example(q, k, v, masks.Causal("bottom_right"))
    assertions.assert_within_bounds(one, **run(one))


def test_four_leading_axes_that_do_not_fold_are_served() -> None:
    q, k, v = drawn(2, 1, 2, 1, 1, 9, 8), drawn(1, 2, 1, 2, 1, 11, 8), drawn(1, 1, 11, 8)
    one = example(q, k, v)
    assertions.assert_within_bounds(one, **run(one))


def test_any_strides_are_served() -> None:
    q, k, v = drawn(2, 40, 4, 12).swapaxes(1, 2), drawn(2, 2, 9, 50).swapaxes(2, 3), drawn(2, 2, 100, 14)[:, :, ::-2]
    one = example(q[..., 3:], k, v[..., ::2], masks.BlockPattern(np.eye(3, 4, dtype=bool), 16))
    assertions.assert_within_bounds(one, **run(one))


def test_arguments_without_heads_are_served() -> None:
    one = example(drawn(40, 8), drawn(35, 8), drawn(35, 3))
    results = run(one)
    assert results["o"].shape == (40, 3) and results["lse"].shape == (40,)
    assertions.assert_within_bounds(one, **results)


def test_logits_of_any_size_give_convex_combinations() -> None:
    q, k, v = drawn(20, 8), drawn(40, 8), drawn(40, 8)
    for scale in (1e6, 1e12):
        results = run(example(q, k, v, scale=scale))
        assert (results["o"] <= v.max(0)).all() and (results["o"] >= v.min(0)).all()
        assert all(np.isfinite(array).all() for array in results.values())


@pytest.mark.parametrize("name", ["lengths", "bits within lengths"])
def test_what_stands_past_a_length_never_matters(name: str) -> None:
    one = example(drawn(2, 2, 70, 8), drawn(2, 1, 90, 8), drawn(2, 1, 90, 8), MASKS[name])
    expected = run(one)
    q_lengths, kv_lengths = LENGTHS
    operands = {"q": q_lengths, "do": q_lengths, "k": kv_lengths, "v": kv_lengths}
    dirty = {field: getattr(one, field).copy() for field in operands}
    for field, lengths in operands.items():
        for b, length in enumerate(lengths):
            dirty[field][b, :, length:] = np.nan
    again = run(one.but(**dirty))
    assert all((again[name] == expected[name]).all() for name in expected)


def test_absent_blocks_never_matter() -> None:
    keep = np.tri(4, dtype=bool)
    one = example(drawn(64, 8), drawn(64, 8), drawn(64, 8), masks.BlockPattern(keep, 16))
    expected = run(one)["o"][:16]
    k, v = one.k.copy(), one.v.copy()
    k[16:], v[16:] = np.nan, np.inf
    assert (run(one.but(k=k, v=v))["o"][:16] == expected).all()


def test_a_row_without_a_key_is_zero_and_has_no_gradient_whatever_do_holds() -> None:
    allowed = RNG.random((40, 50)) < 0.5
    allowed[7] = False
    one = example(drawn(40, 8), drawn(50, 8), drawn(50, 8), allowed)
    do = one.do.copy()
    do[7] = np.nan
    results, expected = run(one.but(do=do)), run(one)
    assert (results["o"][7] == 0).all() and results["lse"][7] == -np.inf and (results["dq"][7] == 0).all()
    assert all((results[name] == expected[name]).all() for name in expected)


def test_nan_at_an_allowed_key_goes_where_arithmetic_takes_it() -> None:
    one = example(drawn(4, 8), drawn(4, 8), drawn(4, 8), masks.Causal())
    v = one.v.copy()
    v[3] = np.nan
    assert np.isnan(run(one.but(v=v))["o"][3]).all()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_problems_have_shaped_results(lengths: tuple[int, int]) -> None:
    results = run(example(drawn(2, lengths[0], 8), drawn(2, lengths[1], 8), drawn(2, lengths[1], 8)))
    assert results["o"].shape == (2, lengths[0], 8) and (results["lse"] == -np.inf).all()
    assert all((results[name] == 0).all() for name in ("o", "dq", "dk", "dv"))


def test_calls_repeat_bit_for_bit() -> None:
    one = example(drawn(4, 70, 16), drawn(2, 70, 16), drawn(2, 70, 16), masks.Causal())
    first, second = run(one), run(one)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


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
    assert "every score is made and kept" in ready.explain() and f"{ready.workspace_bytes} bytes" in ready.explain()
