"""JAX's arrays as arguments and results: on the CPU, traced or not, and on a GPU where there is one."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import cuflash.jax  # noqa: E402
from cuflash import BlockIndex, api, masks  # noqa: E402
from cuflash.testing import Example, assert_within_bounds  # noqa: E402
from executors import GPU  # noqa: E402
from refusals import reasons_of  # noqa: E402

jnp = jax.numpy
attention = cuflash.jax.attention


@pytest.fixture(autouse=True)
def on_the_host():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


RNG = np.random.default_rng(0)
Q, K, V, DO = (RNG.standard_normal((2, heads, 20, 16), dtype=np.float32) for heads in (4, 2, 2, 4))


def given():
    return [jnp.asarray(array) for array in (Q, K, V)]


def pulled_back(call, arrays, do, dlse):
    _, vjp = jax.vjp(call, *arrays)
    return vjp((do, dlse))


# JAX's threads flush subnormal numbers to 0, and the simulator's numbers are those of its thread: they differ there.
@pytest.mark.parametrize(("executor", "way"), [("auto", "plain"), ("auto", "jit"), ("sim", "plain")])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
def test_results_and_gradients_are_those_of_the_same_arrays(executor, dtype, way):
    q, k, v, do = (array.astype(dtype) for array in (Q, K, V, DO))
    options = {"causal": True, "executor": executor, "deterministic": True, "return_lse": True}
    (host_o, host_lse), vjp = cuflash.attention_vjp(q, k, v, **options)

    def call(q, k, v):
        return attention(q, k, v, **options)

    ours = [jnp.asarray(array) for array in (q, k, v)]
    jitted = jax.jit if way == "jit" else lambda function: function
    o, lse = jitted(call)(*ours)
    found = jitted(lambda *x: pulled_back(call, x[:3], *x[3:]))(*ours, jnp.asarray(do), lse)
    assert o.dtype == dtype and lse.dtype == np.float32 and o.devices() == ours[0].devices()
    assert (np.asarray(o) == host_o).all() and (np.asarray(lse) == host_lse).all()
    for each, expected in zip(found, vjp(do, host_lse)):
        assert each.dtype == dtype and (np.asarray(each) == expected).all()


@pytest.mark.parametrize("is_traced", [False, True])
def test_sinks_have_gradients(is_traced):
    sink = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    (host_o, host_lse), vjp = cuflash.attention_vjp(Q, K, V, sink=sink, wrt="sink", causal=True, return_lse=True)
    gradients = vjp(DO, host_lse)

    def pulled(q, k, v, sink, do, dlse):
        call = partial(attention, causal=True, return_lse=True)
        results, vjp = jax.vjp(lambda q, k, v, sink: call(q, k, v, sink=sink), q, k, v, sink)
        return results, vjp((do, dlse))

    (o, lse), found = (jax.jit(pulled) if is_traced else pulled)(*given(), *map(jnp.asarray, (sink, DO, host_lse)))
    assert (np.asarray(o) == host_o).all() and (np.asarray(lse) == host_lse).all()
    for ours, theirs in zip(found, (*gradients, gradients["sink"]), strict=True):
        assert (np.asarray(ours) == theirs).all()


def test_gradients_of_gradients_of_jit_and_vmap():
    def loss(q, k, v):
        return (attention(q, k, v, window=(3, 0)) ** 2).sum()

    q, k, v = given()
    expected = jax.grad(loss)(q, k, v)
    assert (jax.jit(jax.vmap(jax.grad(loss)))(q, k, v) == expected).all()
    assert (jax.vmap(jax.grad(loss))(q, k, v) == expected).all()
    assert (jax.grad(lambda q: jax.jit(loss)(q, k, v))(q) == expected).all()
    assert (jax.jit(jax.grad(jax.checkpoint(loss)))(q, k, v) == expected).all()


def test_float64_where_jax_has_it():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(array.astype(np.float64)) for array in (Q, K, V))
        o, lse = jax.jit(lambda q, k, v: attention(q, k, v, return_lse=True))(q, k, v)
        expected = cuflash.attention(*map(np.asarray, (q, k, v)))
        assert o.dtype == lse.dtype == np.float64 and (np.asarray(o) == expected).all()


def test_gradients_of_broadcast_axes_are_summed():
    q, k, v = given()
    dq, dk, dv = jax.jit(jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2)))(q, k[:1], v[0])
    _, vjp = cuflash.attention_vjp(Q, K[:1], V[0])
    assert all((np.asarray(ours) == theirs).all() for ours, theirs in zip((dq, dk, dv), vjp(np.ones_like(Q))))


@pytest.mark.parametrize(
    "make",
    [
        jnp.asarray, np.asarray, lambda kept: masks.Causal() & masks.Dense(jnp.asarray(kept)),
        lambda kept: BlockIndex.from_mask(masks.Dense(kept), 20, 20, 4),
    ],
    ids=["jax", "numpy", "mask of an array", "index"],
)  # fmt: skip
def test_masks_are_arrays_and_indexes(make):
    kept = RNG.random((20, 20)) < 0.6
    expected = cuflash.attention(Q, K, V, mask=make(kept))
    call = partial(attention, mask=make(kept))
    assert (np.asarray(call(*given())) == expected).all() and (np.asarray(jax.jit(call)(*given())) == expected).all()


def test_calls_of_equal_shapes_and_options_plan_once(monkeypatch):
    q, k, v = given()
    first = attention(q, k, v, mask=masks.Dilated(3))
    monkeypatch.setattr(api, "planned", lambda *args, **options: pytest.fail("planned again"))
    assert (attention(q, k, v, mask=masks.Dilated(3)) == first).all()
    monkeypatch.undo()
    for options in ({"causal": True}, {"scale": 0.5}, {"window": (2, 2)}, {}):
        expected = cuflash.attention(Q, K, V, **options)
        assert (np.asarray(attention(q, k, v, **options)) == expected).all()
    assert attention(q[:, :, :7], k, v).shape == (2, 4, 7, 16)


@pytest.mark.parametrize(("kind", "most"), [("index", 1), ("array", 3)])
def test_a_call_plans_once_and_an_index_keeps_its_plans(monkeypatch, kind, most):
    kept = RNG.random((20, 20)) < 0.6
    index, planned, plans = BlockIndex.from_mask(masks.Dense(kept), 20, 20, 4), api.planned, []
    monkeypatch.setattr(api, "planned", lambda *args, **options: plans.append(args) or planned(*args, **options))
    for _ in range(2):
        found = attention(*given(), mask=index if kind == "index" else kept)
    o, vjp = jax.vjp(partial(attention, mask=index if kind == "index" else kept), *given())
    expected, host_vjp = cuflash.attention_vjp(Q, K, V, mask=kept)
    assert (np.asarray(found) == expected).all()
    assert all((np.asarray(ours) == theirs).all() for ours, theirs in zip(vjp(jnp.asarray(DO)), host_vjp(DO)))
    assert (np.asarray(o) == np.asarray(found)).all() and len(plans) == most + 1


# Wrong arguments.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"executor": "gpu"}, "executor='gpu' takes arrays on 'gpu'; got q on 'cpu': move them"),
        ({"executor": []}, "executor must be 'auto', 'cpu', 'gpu', 'sim'; got list"),
        ({"return_lse": 1}, "return_lse must be True or False; got 1"),
        ({"mask": 3}, "mask must be"),
        ({"causal": "yes"}, "causal must be True, False, 'bottom_right' or 'top_left'; got 'yes'"),
    ],
)
@pytest.mark.parametrize("is_traced", [False, True])
def test_wrong_arguments_are_named_when_the_call_is_made_or_traced(options, sentence, is_traced):
    def call(q, k, v):
        return attention(q, k, v, **options)

    try:
        (jax.jit(call) if is_traced else call)(*given())
    except (TypeError, cuflash.UnsupportedProblem) as error:
        assert sentence in str(error)
    else:
        raise AssertionError("is taken")


def test_wrong_arrays_are_named():
    q, k, v = given()
    reasons = reasons_of(attention, q.astype(int), k, v)
    assert reasons[0].startswith("q's dtype must be one of float16, bfloat16, float32, float64; got int")
    (reason,) = reasons_of(attention, q, k[..., :3], v)
    assert reason == "k must have q's head_dim=16 as its last axis; got shape (2, 2, 20, 3)"
    for name in "qkv":
        with pytest.raises(TypeError, match=rf"{name} must be a jax.Array; got an array .*: jax.numpy.asarray makes"):
            attention(**{"q": q, "k": k, "v": v, name: Q})


def test_a_shape_without_data_is_planned_as_shape_and_dtype():
    with pytest.raises(TypeError, match=r"q must be an array; got ShapeDtypeStruct: it holds no data, and plan takes"):
        cuflash.plan(*(jax.ShapeDtypeStruct((4, 8), jnp.float32),) * 3)


def test_a_traced_mask_is_refused():
    (reason,) = reasons_of(jax.jit(lambda kept: attention(*given(), mask=kept)), jnp.ones((20, 20), bool))
    assert reason.startswith("mask must be an array that DLPack gives away; got jax.")
    assert reason.endswith("call this outside of what is traced")


def test_a_tracer_on_a_gpu_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(cuflash.jax, "_platform", lambda arrays: "gpu")
    reasons = reasons_of(jax.jit(attention), *given())
    assert [reason.partition(": ")[0][2:].rpartition(",")[0] for reason in reasons] == [
        "must hold data where attention runs on a GPU; got a tracer"
    ] * 3
    assert "call cuflash.jax.attention outside of what is traced, or trace it for the CPU within jax.def" in reasons[0]


def test_derivatives_of_arrays_that_hold_data_are_taken_where_these_lie(monkeypatch):
    """Outside of traced functions, tracers of grad and vjp hold arrays, wherever JAX would run traced ones."""
    expected = jax.grad(lambda q: attention(q, *given()[1:]).sum())(given()[0])
    monkeypatch.setattr(cuflash.jax, "_default_platform", lambda: "gpu")
    q, k, v = given()
    dq = jax.grad(lambda q: attention(q, k, v).sum())(q)
    assert (dq == expected).all() and dq.devices() == q.devices()
    for traced in (jax.jit(jax.grad(lambda q: attention(q, k, v).sum())), jax.vmap(lambda q: attention(q, k[0], v[0]))):
        (reason,) = reasons_of(traced, q)
        assert reason.startswith("q must hold data where attention runs on a GPU; got a tracer")


def test_forward_mode_and_second_derivatives_are_refused_by_jax():
    q, k, v = given()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))
    with pytest.raises(Exception, match="callback|custom_vjp|differentia|convert"):
        jax.grad(lambda q: jax.grad(lambda q: (attention(q, k, v) ** 2).sum())(q).sum())(q)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
def test_arrays_on_a_gpu_are_taken_and_given_without_a_copy(dtype):
    try:
        (device, *_) = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX finds no GPU: {error}")
    q, k, v, do = (jax.device_put(jnp.asarray(array.astype(dtype)), device) for array in (Q, K, V, DO))

    def call(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True)

    (o, lse), vjp = jax.vjp(call, q, k, v)
    found = {"o": o} | dict(zip(("dq", "dk", "dv"), vjp((do, jnp.zeros_like(lse))), strict=True))
    assert all(array.devices() == {device} and array.dtype == dtype for array in found.values())
    operands = {name: np.asarray(array) for name, array in zip(("q", "k", "v", "do"), (q, k, v, do))}
    example = GPU.rounded(Example(**operands, mask=masks.Causal()))
    assert_within_bounds(example, lse=np.asarray(lse), **{name: np.asarray(array) for name, array in found.items()})
    with jax.default_device(device):
        reasons = reasons_of(jax.jit(lambda q: call(q, q, q)), q)
    assert reasons[0].startswith("q must hold data where attention runs on a GPU; got a tracer")


@pytest.mark.gpu
def test_masks_and_indices_are_made_of_arrays_on_a_gpu():
    try:
        (device, *_) = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX finds no GPU: {error}")
    q, k, v = (jax.device_put(jnp.asarray(array), device) for array in (Q, K, V))
    seqlen_q, seqlen_kv = Q.shape[-2], K.shape[-2]
    kept = np.random.default_rng(0).random((-(-seqlen_q // 8), -(-seqlen_kv // 8))) < 0.6
    there = jax.device_put(jnp.asarray(kept), device)
    made = BlockIndex.from_blocks(there, seqlen_q, seqlen_kv, 8)
    both = masks.BlockPattern(there, 8) & masks.Causal("top_left")
    listed = BlockIndex.from_mask(both, seqlen_q, seqlen_kv, 8)
    example = Example(q=Q, k=K, v=V, mask=masks.BlockPattern(kept, 8))
    for mask in (made, masks.BlockPattern(there, 8)):
        assert_within_bounds(example, o=np.asarray(attention(q, k, v, mask=mask)))
        assert_within_bounds(example, o=cuflash.attention(q, k, v, mask=mask).get())
    within = example.but(mask=masks.BlockPattern(kept, 8) & masks.Causal("top_left"))
    assert_within_bounds(within, o=cuflash.attention(q, k, v, mask=listed).get())
