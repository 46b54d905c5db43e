"""Float64 biases, sinks and captured arrays with narrower q, k and v: each number is rounded to float32 once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuflash.testing import Structure, assert_within_bounds
from executors import CPU, GPU, SIM, Run, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import masks, scores, study

EVERYWHERE = (CPU, pytest.param(SIM, marks=needs_compiler), pytest.param(GPU, marks=pytest.mark.gpu))
RNG = np.random.default_rng(0)
Q, K, V, DO = RNG.standard_normal((4, 2, 4, 40, 16))
DLSE = RNG.standard_normal(Q.shape[:-1])
BIAS, SINK, SLOPES = RNG.standard_normal((4, 40, 40)), RNG.standard_normal(4), RNG.standard_normal(4)
SEEN = np.arange(40)[:, None] % 3 > 0  # rows with keys; the others have none
NARROW = ("float16", "float32")


def everything(run: Run, dtype: str, bias: np.ndarray, sink: np.ndarray, slopes: np.ndarray) -> dict[str, Any]:
    q, k, v, do = (run.put(x.astype(dtype)) for x in (Q, K, V, DO))
    (o, lse), vjp = cuflash.attention_vjp(
        q, k, v, bias=run.put(bias), sink=run.put(sink), score=scores.alibi(run.put(slopes)), mask=run.put(SEEN),
        wrt=("bias", "sink", "slopes"), return_lse=True, executor=run.executor, deterministic=True,
    )  # fmt: skip
    gradients = vjp(do, run.put(DLSE.astype(np.float32)))
    arrays = {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients)), **gradients.others}
    return {name: run.get(result) for name, result in arrays.items()}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("run", EVERYWHERE, ids=str)
def test_results_are_those_of_float32_and_gradients_have_their_arrays_dtype(run: Run, dtype: str) -> None:
    wide = BIAS.copy(), SINK.copy(), SLOPES.copy()
    # beyond float32: a hidden key and an absent sink
    wide[0][0, 1, :7], wide[0][1, 2, 3], wide[1][2] = -1e300, -np.inf, -1e300
    with np.errstate(over="ignore"):
        narrow = [x.astype(np.float32) for x in wide]
    results, expected = everything(run, dtype, *wide), everything(run, dtype, *narrow)
    for name, result in results.items():
        is_own = name in ("bias", "sink", "slopes")
        assert result.dtype == (np.float64 if is_own else expected[name].dtype)
        np.testing.assert_array_equal(result.astype(expected[name].dtype), expected[name])
    assert not results["bias"][0, 1, :7].any() and not results["sink"][2]


@settings(max_examples=40)
@given(
    st.sampled_from(NARROW), st.floats(-300, 30), st.sampled_from([(), (1,), (4,), (2, 1), (2, 4)]),
    st.sampled_from([(1,), (40,), (40, 1), (1, 1, 40), (4, 40, 40), (2, 1, 40, 40)]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_results_are_within_the_bounds_of_the_numbers_that_were_given(dtype, power, of_sink, of_bias, seed) -> None:
    """The bounds hold against the float64 numbers, and so include their rounding, also in rows without a key."""
    rng = np.random.default_rng(seed)
    bias, sink = (np.array(10.0**power * rng.standard_normal(shape)) for shape in (of_bias, of_sink))
    example = Structure(
        q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=4, num_kv_heads=2, seqlen_q=40, seqlen_kv=40, head_dim=8,
        value_dim=8, dtype=dtype, mask=masks.Dense(SEEN), seed=seed,
    ).example().but(score=scores.bias(bias), sink=sink, wrt=("bias",))  # fmt: skip
    (o, lse), vjp = cuflash.attention_vjp(
        example.q, example.k, example.v, mask=example.mask, scale=example.scale, bias=bias, sink=sink,
        wrt=("bias", "sink"), return_lse=True,
    )  # fmt: skip
    dq, dk, dv = gradients = vjp(example.do, example.dlse)
    assert_within_bounds(
        example, o=o, lse=lse, dq=dq, dk=dk, dv=dv, dsink=gradients["sink"], others={"bias": gradients["bias"]}
    )
    assert gradients["bias"].dtype == gradients["sink"].dtype == np.float64
    assert gradients["bias"].shape == bias.shape and gradients["sink"].shape == sink.shape


@pytest.mark.parametrize("seqlen_kv", [0, 40])
def test_numbers_beyond_float32_are_infinite_whatever_errstate_says(seqlen_kv: int) -> None:
    q, k, v = Q.astype(np.float32), K[..., :seqlen_kv, :].astype(np.float32), V[..., :seqlen_kv, :].astype(np.float32)
    with np.errstate(all="raise"):
        o, lse = cuflash.attention(q, k, v, sink=np.array([1e39, -1e39, 0, 0]), return_lse=True)
        assert np.isnan(o[:, 0]).all() and np.isnan(lse[:, 0]).all() and np.isfinite(o[:, 1:]).all()
        none, _ = cuflash.attention(q, k, v, return_lse=True)
        np.testing.assert_array_equal(o[:, 1], none[:, 1])
        bound = cuflash.error_bound(q, k, v, sink=np.array([-1e39, 0, 0, 0]))
        np.testing.assert_array_equal(bound.o[:, 0], cuflash.error_bound(q, k, v).o[:, 0])
        if seqlen_kv:
            assert np.isnan(cuflash.attention(q, k, v, bias=np.full((40, 40), 1e39))).all()


def test_plans_are_made_of_float64_shapes() -> None:
    q, k, v = (x.astype(np.float32) for x in (Q, K, V))
    bias, sink = (cuflash.ShapeDtype(x.shape, x.dtype) for x in (BIAS, SINK))
    ready = cuflash.plan(q, k, v, bias=bias, sink=sink, wrt=("bias", "sink"))
    o, lse = ready.forward(q, k, v, bias=BIAS, sink=SINK)
    np.testing.assert_array_equal(o, cuflash.attention(q, k, v, bias=BIAS, sink=SINK))
    gradients = ready.backward(o, q, k, v, o, lse, bias=BIAS, sink=SINK)
    assert gradients["bias"].dtype == gradients["sink"].dtype == np.float64


def test_every_call_that_takes_a_bias_or_a_sink_takes_float64() -> None:
    q, k, v = (x.astype(np.float32) for x in (Q, K, V))
    bias, sink = BIAS.astype(np.float32), SINK.astype(np.float32)
    keep, of_wide, of_narrow = masks.Causal(), scores.bias(BIAS), scores.bias(bias)
    pairs = [
        (study.recall(q, k, v, mask=keep, score=of_wide).mass, study.recall(q, k, v, mask=keep, score=of_narrow).mass),
        *((study.block_mass(q, k, block=8, score=score) for score in (of_wide, of_narrow)),),
    ]
    cache = cuflash.KVCache(batch=2, num_kv_heads=4, head_dim=16, capacity=40, dtype=np.float32)
    cache.append(k, v)
    pairs.append((cache.attention(q, bias=BIAS, sink=SINK), cache.attention(q, bias=bias, sink=sink)))
    eight = [cuflash.quantize(x) for x in (q, k, v)]
    pairs.append((cuflash.attention(*eight, bias=BIAS, sink=SINK), cuflash.attention(*eight, bias=bias, sink=sink)))
    for wide, narrow in pairs:
        np.testing.assert_array_equal(wide, narrow)
