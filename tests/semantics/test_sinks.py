"""Attention sinks on every executor: each head has a logit that takes part in its softmax but has no value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuflash.testing import Structure, assert_within, assert_within_bounds
from executors import (
    SIM,
    holds_for_examples,
    in_turn,
    on_every_backward,
    on_every_deterministic_backward,
    on_kernels,
)
from hypothesis import target

import cuflash
from cuflash import UnsupportedProblem, masks, reference

BLOCKS = masks.BlockPattern(np.array([[1, 0, 1], [0, 1, 1], [0, 0, 0]], bool), (64, 64))
PARTIAL = masks.FromFunction(lambda b, h, i, j: (i + 2 * j + h) % 5 != 0)
SHORT = {"seqlen_q": 40, "seqlen_kv": 70}
LONG = {"seqlen_q": 130, "seqlen_kv": 192}
OF_EACH_DTYPE = [  # some rows have no keys; few queries, with keys that thread blocks share
    Structure(num_heads=4, num_kv_heads=2, mask=masks.Lengths(q=30) & PARTIAL, sink=(4,), dtype="float32", **SHORT),
    Structure(num_heads=4, num_kv_heads=2, sink=(4,), dtype="float16", seqlen_q=3, seqlen_kv=600),
]
KERNELS_OF_SINKS = [
    {"kernel": "simt", "dtype": "float64", **SHORT},
    {"kernel": "simt", "dtype": "float32", "mask": PARTIAL, "deterministic": True, **SHORT},
    {"kernel": "naive", "dtype": "float16", "mask": PARTIAL, **SHORT},
    {"kernel": "sm80", "dtype": "bfloat16", "mask": masks.SlidingWindow(20, 0, "bottom_right"), **LONG},
    {"kernel": "sm80", "dtype": "float16", "seqlen_q": 3, "seqlen_kv": 600, "deterministic": True},
    {"kernel": "sm90", "dtype": "float16", "mask": BLOCKS & PARTIAL, **LONG},
    {"kernel": "sm90", "dtype": "float16", "deterministic": True, "mask": masks.Lengths(q=60), **LONG},
]

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 20, 8), np.float32)
K, V = RNG.standard_normal((2, 2, 2, 30, 8), np.float32)


def test_the_gradient_of_a_sink_is_the_derivative_of_the_forward_pass() -> None:
    """A complex step through the specification gives the derivative."""
    sink, do, dlse = RNG.standard_normal(4), RNG.standard_normal(Q.shape), RNG.standard_normal(Q.shape[:-1])
    *_, dsink = reference.attention_vjp(Q, K, V, do, dlse, sink=sink)
    slopes = np.empty(4)
    for head in range(4):
        step = np.zeros(4, complex)
        step[head] = 1e-20j
        o, lse = reference.attention(Q.astype(complex), K, V, sink=sink + step)
        slopes[head] = ((do * o).sum() + (dlse * lse).sum()).imag / 1e-20
    bounds = cuflash.error_bound(*(x.astype(np.float64) for x in (Q, K, V)), do, dlse=dlse, sink=sink)
    assert_within("dsink", dsink, slopes, 2 * bounds.dsink)


def test_gradients_are_asked_for_by_name() -> None:
    sink = np.zeros(4, np.float16)
    o, vjp = cuflash.attention_vjp(Q, K, V, sink=sink, wrt="sink")
    gradients = vjp(o)
    dq, dk, dv = gradients
    assert (dq.shape, dk.shape, dv.shape) == (Q.shape, K.shape, V.shape)
    assert (gradients["sink"].shape, gradients["sink"].dtype) == ((4,), np.float16)
    with pytest.raises(KeyError, match="'bias'.*wrt names 'sink'"):
        gradients["bias"]
    with pytest.raises(KeyError, match="'dq' .*, and those of q, k and v are the attributes dq, dk and dv"):
        gradients["dq"]
    with pytest.raises(KeyError, match="'sink'.*wrt names nothing"):
        cuflash.attention_vjp(Q, K, V, sink=sink)[1](o)["sink"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink": np.zeros(3, np.float32)}, r"sink must have shape \(num_heads,\) = \(4,\).*\(2, 4\); got \(3,\)"),
        ({"sink": np.zeros((3, 2, 4), np.float32)}, r"sink must have shape .*got \(3, 2, 4\)"),
        ({"sink": np.zeros(4, int)}, r"sink must be .*, float64; got int64: cast it to float32"),
        ({"sink": np.zeros(4, bool)}, r"sink must be .*; got bool: cast it to float32"),
        ({"sink": np.zeros(4, np.float32), "wrt": "q"}, "wrt must not name q: dq, dk and dv are always computed"),
        ({"sink": np.zeros(4, np.float32), "wrt": "bias"}, "wrt must name .*'sink'; got 'bias'"),
        ({"wrt": "sink"}, "wrt must name .*there is none; got 'sink'"),
        ({"wrt": ["sink", 3]}, r"wrt must be a name, or a sequence of names; got \['sink', 3\]: write wrt='sink'"),
    ],
)  # fmt: skip
def test_a_wrong_sink_is_refused(options, message) -> None:
    with pytest.raises(UnsupportedProblem, match=message):
        cuflash.attention_vjp(Q, K, V, **options)


@pytest.mark.parametrize("number", [0.5, 1, np.float32(0.5)])
def test_a_number_is_no_sink(number) -> None:
    with pytest.raises(TypeError, match=r"sink must be an array of shape \(num_heads,\) = \(4,\); got .*np.full\(4"):
        cuflash.attention(Q, K, V, sink=number)


def test_all_that_is_wrong_with_a_sink_is_said_at_once() -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        cuflash.attention_vjp(Q, K, V, sink=np.zeros(3, int), wrt="bias", causal=True)
    assert len(caught.value.reasons) == 4


def test_a_plan_takes_the_sink_that_it_was_made_with() -> None:
    sink = np.zeros(4, np.float32)
    ready = cuflash.plan(Q, K, V, sink=sink, wrt="sink")
    o, lse = ready.forward(Q, K, V, sink=sink)
    assert ready.backward(o, Q, K, V, o, lse, sink=sink)["sink"].shape == (4,)
    with pytest.raises(UnsupportedProblem, match=r"sink is required, with shape \(4,\) and dtype float32"):
        ready.forward(Q, K, V)
    with pytest.raises(UnsupportedProblem, match="sink is required"):
        ready.backward(o, Q, K, V, o, lse)
    with pytest.raises(UnsupportedProblem, match=r"sink must have shape \(4,\) and dtype float32; got \(1,\)"):
        ready.forward(Q, K, V, sink=sink[:1])
    with pytest.raises(TypeError, match="sink must be an array"):
        ready.forward(Q, K, V, sink=0.5)
    with pytest.raises(UnsupportedProblem, match="bias must be left out: the plan was created without it"):
        ready.forward(Q, K, V, sink=sink, bias=sink)
    with pytest.raises(UnsupportedProblem, match="sink must be left out: the plan was created without it"):
        cuflash.plan(Q, K, V).forward(Q, K, V, sink=sink)


@holds_for_examples(on_every_backward, has_sink=True, most_scores=1 << 14)
def test_every_result_with_a_sink_is_within_its_bound(run, example):
    target(assert_within_bounds(example, **run.everything(example)))


@pytest.mark.parametrize("options", KERNELS_OF_SINKS, ids=range(len(KERNELS_OF_SINKS)))
def test_each_kernel_is_within_its_bound(options) -> None:
    """Cases cover every family, lists and intervals, split keys, packed heads, and reproducible gradients."""
    fields = {"num_heads": 4, "num_kv_heads": 2, "sink": (4,), "q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
    structure = Structure(**fields | {name: options[name] for name in options.keys() - {"kernel", "deterministic"}})
    run = replace(SIM, kernel=options["kernel"], deterministic=options.get("deterministic", False))
    example = run.rounded(structure.example())
    assert_within_bounds(example, **run.everything(example))


@on_every_deterministic_backward
@pytest.mark.parametrize("structure", OF_EACH_DTYPE, ids=lambda structure: structure.dtype)
def test_a_sink_of_minus_infinity_is_none(run, structure):
    example = run.rounded(structure.example()).but(sink=None)
    heads = (*example.problem.batch, example.problem.num_heads)
    nothing = run.everything(example.but(sink=np.full(heads, -np.inf, np.float32)))
    plain = run.everything(example)
    assert not nothing.pop("dsink").any()
    assert {name: x.tobytes() for name, x in nothing.items()} == {name: x.tobytes() for name, x in plain.items()}


@on_every_deterministic_backward
@pytest.mark.parametrize("structure", OF_EACH_DTYPE, ids=lambda structure: structure.dtype)
def test_results_with_a_sink_repeat_bit_for_bit(run, structure):
    example = run.rounded(structure.example())
    first, second = run.everything(example), run.everything(example)
    assert {name: x.tobytes() for name, x in first.items()} == {name: x.tobytes() for name, x in second.items()}


@on_every_backward
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_without_a_key_have_the_sink_as_lse(run, dtype):
    """For the sink's gradient, a row without a key contributes the gradient of its lse."""
    is_seen = np.zeros((3, 70, 1), bool)
    is_seen[:, 40:] = True
    is_seen[1] = False
    example = run.rounded(
        Structure(num_heads=3, seqlen_q=70, seqlen_kv=90, dtype=dtype, mask=masks.Dense(is_seen), sink=(3,)).example()
    )
    results = run.everything(example)
    assert not results["o"][:, :40].any() and not results["o"][1].any()
    np.testing.assert_array_equal(results["lse"][:, :40], np.broadcast_to(example.sink[:, None], (3, 40)))
    assert_within_bounds(example, **results)


@on_every_backward
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("seqlen_kv", [0, 50])
def test_a_sink_that_is_nan_or_infinite_makes_its_rows_nan(run, value, seqlen_kv):
    mask = masks.Lengths(kv=30) & masks.FromFunction(lambda b, h, i, j: i != 7)
    clean = Structure(
        num_heads=3, num_kv_heads=3, seqlen_q=20, seqlen_kv=seqlen_kv, mask=mask if seqlen_kv else None, sink=(3,)
    ).example()
    sink = clean.sink.copy()
    sink[1] = value
    results, before = run.everything(clean.but(sink=sink)), run.everything(clean)
    for name in ("o", "lse", "dsink"):
        assert np.isnan(results[name][1]).all()
        assert not np.isnan(np.delete(results[name], 1, axis=0)).any()
    for name in ("o", "lse", "dsink", "dk", "dv"):
        np.testing.assert_array_equal(np.delete(results[name], 1, axis=0), np.delete(before[name], 1, axis=0))
    assert np.isnan(results["dv"][1, :30]).all()  # rows with NaN that are not masked attend these keys


@on_every_backward
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_large_sink_takes_all_weight(run, dtype):
    example = run.rounded(Structure(num_heads=2, seqlen_q=40, seqlen_kv=60, dtype=dtype).example())
    dlse = example.dlse.astype(np.float64)
    # lse equals the sink, so its weight is exactly 1, and o is 0: the bound on dsink is that of a sum of 40 terms.
    bound = (40 + 4) * np.finfo(np.float32).eps / 2 * np.abs(dlse).sum(axis=-1)
    for value in (1e4, 1e38):
        results = run.everything(example.but(sink=np.full(2, value, np.float32)))
        assert not results["o"].any() and not results["dv"].any() and not results["dq"].any()
        np.testing.assert_array_equal(results["lse"], np.float32(value))
        assert_within("dsink", results["dsink"], dlse.sum(axis=-1), bound, example)


@on_kernels
@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn([(4,), (1,), (), (2, 1, 4), (3, 1), (2, 3, 1), (2, 1, 1)], ["float16", "bfloat16", "float32"]),
    ids=str,
)
def test_the_gradient_is_summed_over_broadcast_axes(run, shape, dtype):
    structure = Structure(
        q_batch=(2, 3), k_batch=(2, 3), v_batch=(1, 3), num_heads=4, num_kv_heads=2, seqlen_q=9, seqlen_kv=8,
        sink=shape, sink_dtype=dtype,
    )  # fmt: skip
    example = structure.example()
    assert_within_bounds(example, dsink=run.everything(example)["dsink"])


@on_every_backward
@pytest.mark.parametrize("step", [2, -1])
def test_a_sink_may_have_any_strides(run, step):
    example = Structure(num_heads=4, seqlen_q=9, seqlen_kv=8, sink=(8,)).example()
    sink = example.sink[::step][:4]
    results = run.everything(example.but(sink=sink))
    packed = run.everything(example.but(sink=sink.copy()))
    assert all(np.array_equal(results[name], packed[name]) for name in ("o", "lse", "dsink"))


def test_a_batch_of_many_axes_takes_several_launches() -> None:
    leading = {"q_batch": (2, 1, 2, 1, 2), "k_batch": (1, 2, 1, 2, 1), "v_batch": (2, 1, 1, 2, 2)}
    example = Structure(**leading, num_heads=2, seqlen_q=3, seqlen_kv=4, sink=(2,)).example()
    assert_within_bounds(example, **SIM.everything(example))


def test_a_gradient_that_overflows_its_dtype_is_infinite_without_a_warning() -> None:
    q, k, v = (np.full((1, 8, 4), x, np.float16) for x in (0, 0, 100))
    _, vjp = cuflash.attention_vjp(q, k, v, sink=np.zeros(1, np.float16), wrt="sink")
    assert np.isneginf(vjp(np.full((1, 8, 4), 1000, np.float16))["sink"]).all()
