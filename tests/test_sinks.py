"""Attention sinks on every executor: a logit of each head that takes part in its softmax and has no value."""

from __future__ import annotations

import numpy as np
import pytest
from cuflash.testing import assert_within_bounds
from executors import holds_for_examples, on_every_backward
from hypothesis import target

import cuflash
from cuflash import UnsupportedProblem, reference

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 20, 8), np.float32)
K, V = RNG.standard_normal((2, 2, 2, 30, 8), np.float32)


def test_the_gradient_of_a_sink_is_the_derivative_of_the_forward_pass() -> None:
    """By a complex step through the specification."""
    sink, do, dlse = RNG.standard_normal(4), RNG.standard_normal(Q.shape), RNG.standard_normal(Q.shape[:-1])
    *_, dsink = reference.attention_vjp(Q, K, V, do, dlse, sink=sink)
    for head in range(4):
        step = np.zeros(4, complex)
        step[head] = 1e-20j
        o, lse = reference.attention(Q.astype(complex), K, V, sink=sink + step)
        slope = ((do * o).sum() + (dlse * lse).sum()).imag / 1e-20
        np.testing.assert_allclose(dsink[head], slope, rtol=1e-12)


def test_gradients_are_asked_for_by_name() -> None:
    sink = np.zeros(4, np.float16)
    o, vjp = cuflash.attention_vjp(Q, K, V, sink=sink, wrt="sink")
    gradients = vjp(o)
    dq, dk, dv = gradients
    assert (dq.shape, dk.shape, dv.shape) == (Q.shape, K.shape, V.shape)
    assert (gradients["sink"].shape, gradients["sink"].dtype) == ((4,), np.float16)
    with pytest.raises(KeyError, match="'bias'.*wrt names 'sink'"):
        gradients["bias"]
    with pytest.raises(KeyError, match="'sink'.*wrt names nothing"):
        cuflash.attention_vjp(Q, K, V, sink=sink)[1](o)["sink"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sink": np.zeros(3, np.float32)}, r"sink must have shape \(num_heads,\) = \(4,\).*\(2, 4\); got \(3,\)"),
        ({"sink": np.zeros((3, 2, 4), np.float32)}, r"sink must have shape .*got \(3, 2, 4\)"),
        ({"sink": np.zeros(4)}, "sink must be float16, bfloat16, float32; got float64: float64 is for float64"),
        ({"sink": np.zeros(4, int)}, "sink must be .*; got int64: convert it"),
        ({"sink": np.zeros(4, bool)}, "sink must be .*; got bool: convert it"),
        ({"sink": np.zeros(4, np.float32), "wrt": "q"}, "wrt must not name q: dq, dk and dv are always computed"),
        ({"sink": np.zeros(4, np.float32), "wrt": "bias"}, "wrt must name .*'sink'; got 'bias'"),
        ({"wrt": "sink"}, "wrt must name .*there is none; got 'sink'"),
        ({"sink": np.zeros(4, np.float32), "wrt": ["sink"]}, "wrt must be a name or a tuple of names; got list"),
        ({"wrt": ("sink", 3)}, "wrt must be a name or a tuple of names"),
    ],
)  # fmt: skip
def test_a_wrong_sink_is_refused(options, told) -> None:
    with pytest.raises(UnsupportedProblem, match=told):
        cuflash.attention_vjp(Q, K, V, **options)


@pytest.mark.parametrize("number", [0.5, 1, np.float32(0.5)])
def test_a_number_is_no_sink(number) -> None:
    with pytest.raises(TypeError, match=r"sink must be an array of shape \(num_heads,\) = \(4,\); got .*np.full\(4"):
        cuflash.attention(Q, K, V, sink=number)


def test_all_that_is_wrong_with_a_sink_is_said_at_once() -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        cuflash.attention_vjp(Q, K, V, sink=np.zeros(3), wrt="bias", causal=True)
    assert len(caught.value.reasons) == 4


def test_a_plan_takes_the_sink_that_it_was_made_with() -> None:
    sink = np.zeros(4, np.float32)
    ready = cuflash.plan(Q, K, V, sink=sink, wrt="sink")
    o, lse = ready.forward(Q, K, V, sink=sink)
    assert ready.backward(o, Q, K, V, o, lse, sink=sink)["sink"].shape == (4,)
    with pytest.raises(UnsupportedProblem, match=r"sink must be given, of shape \(4,\) and dtype float32"):
        ready.forward(Q, K, V)
    with pytest.raises(UnsupportedProblem, match="sink must be given"):
        ready.backward(o, Q, K, V, o, lse)
    with pytest.raises(UnsupportedProblem, match=r"sink must have shape \(4,\) and dtype float32; got \(1,\)"):
        ready.forward(Q, K, V, sink=sink[:1])
    with pytest.raises(TypeError, match="sink must be an array"):
        ready.forward(Q, K, V, sink=0.5)
    with pytest.raises(UnsupportedProblem, match="bias must not be given: the plan was made without it"):
        ready.forward(Q, K, V, sink=sink, bias=sink)
    with pytest.raises(UnsupportedProblem, match="sink must not be given: the plan was made without it"):
        cuflash.plan(Q, K, V).forward(Q, K, V, sink=sink)


@holds_for_examples(on_every_backward, has_sink=True, most_scores=1 << 14)
def test_every_result_with_a_sink_is_within_its_bound(run, example):
    target(assert_within_bounds(example, **run.everything(example)))
