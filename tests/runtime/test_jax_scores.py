"""Score functions, caps, biases and sinks of JAX's arrays, traced or not: gradients follow what JAX differentiates."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

from jax import test_util  # noqa: E402

import cuflash.jax  # noqa: E402
from cuflash import scores  # noqa: E402
from cuflash.scores import Score  # noqa: E402
from cuflash.testing import Example, assert_within_bounds  # noqa: E402
from warped_score import warped  # noqa: E402

jnp = jax.numpy
attention = cuflash.jax.attention


@pytest.fixture(autouse=True)
def on_the_host():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


Q, K, V, DO = drawn(2, 4, 6, 5), drawn(2, 2, 7, 5, seed=1), drawn(2, 2, 7, 3, seed=2), drawn(2, 4, 6, 3, seed=3)
OPERANDS = {
    "bias": drawn(4, 1, 7, seed=4), "sink": drawn(4, seed=5), "slope": drawn(4, seed=6), "table": drawn(4, 9, seed=7),
    "place": np.arange(7, dtype=np.int32) % 3,
}  # fmt: skip


def options_of(bias, sink, slope, table, place):
    return {"bias": bias, "sink": sink, "score": Score(warped, slope=slope, table=table, place=place), "softcap": 5.0}


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("needed", [(), ("bias", "slope"), ("sink", "table")])
def test_results_and_gradients_are_those_of_the_same_arrays(is_traced, needed):
    names = [name for name in OPERANDS if name in needed]
    (o, lse), vjp = cuflash.attention_vjp(Q, K, V, **options_of(**OPERANDS), wrt=tuple(names), return_lse=True)
    gradients = vjp(DO, lse)

    def pulled(arrays, others, do, dlse):
        def call(arrays):
            arguments = options_of(**others | arrays["operands"])
            return attention(*arrays["qkv"], **arguments, return_lse=True)

        results, vjp = jax.vjp(call, arrays)
        return results, vjp((do, dlse))

    arrays = {"qkv": (Q, K, V), "operands": {name: OPERANDS[name] for name in names}}
    argument = jax.tree.map(jnp.asarray, (arrays, OPERANDS, DO, lse))
    results, (actual,) = (jax.jit(pulled) if is_traced else pulled)(*argument)
    for ours, theirs in zip(results, (o, lse), strict=True):
        assert (np.asarray(ours) == theirs).all()
    for ours, theirs in zip(actual["qkv"], gradients, strict=True):
        assert (np.asarray(ours) == theirs).all()
    for name in names:
        assert (np.asarray(actual["operands"][name]) == gradients[name]).all()
        assert actual["operands"][name].shape == OPERANDS[name].shape


def test_gradients_are_those_of_differences():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(array[:1], np.float64) for array in (Q, K, V))
        table = jnp.asarray(OPERANDS["table"][:, :8], np.float64)

        def call(table):
            score = scores.relative_position(jnp.asarray(table), 5, bidirectional=True)
            return attention(q, k, v, score=score, return_lse=True)

        test_util.check_grads(call, (table,), order=1, modes=("rev",))


def test_gradients_of_a_gathered_table_repeat_on_kernels():
    q, k, v = map(jnp.asarray, (Q, K, V))
    operands = {name: jnp.asarray(array) for name, array in OPERANDS.items() if name not in ("bias", "sink")}

    def loss(q, table, deterministic):
        score = Score(warped, **operands | {"table": table})
        return attention(q, k, v, score=score, executor="sim", deterministic=deterministic).sum()

    assert jax.grad(loss)(q, operands["table"], True).shape == q.shape
    score = Score(warped, **{name: OPERANDS[name] for name in operands})
    example = Example(q=Q, k=K, v=V, do=np.ones_like(DO), score=score, wrt=("table",))
    for deterministic in (False, True):
        actual = np.asarray(jax.grad(loss, argnums=1)(q, operands["table"], deterministic))
        assert_within_bounds(example, others={"table": actual})
        assert actual.any()


def test_another_number_function_or_bias_is_another_call():
    q, k, v = map(jnp.asarray, (Q, K, V))
    for _ in range(2):
        for options in ({"softcap": 2.0}, {"softcap": 3.0}, {}, {"score": lambda s, b, h, i, j: s + 1.5 * h}):
            expected = cuflash.attention(Q, K, V, **options)
            assert (np.asarray(attention(q, k, v, **options)) == expected).all()
    for bias in (OPERANDS["bias"], 2 * OPERANDS["bias"], OPERANDS["bias"].astype(ml_dtypes.bfloat16)):
        expected = cuflash.attention(Q, K, V, bias=bias)
        assert (np.asarray(attention(q, k, v, bias=jnp.asarray(bias))) == expected).all()


def test_captured_arrays_of_numpy_are_taken():
    """Also of dtypes that JAX does not have by default, and the integers of the library's own."""
    q, k, v = map(jnp.asarray, (Q, K, V))
    places, offsets = np.arange(7) % 3, [0, 2, 7]

    def gathered(s, b, h, i, j, table, places):
        return s + table[h, np.clip(places[j], 0, 8)]

    wide = Score(gathered, table=OPERANDS["table"].astype(np.float64), places=places)
    expected = cuflash.attention(Q, K, V, score=Score(gathered, table=OPERANDS["table"], places=places), softcap=3.0)
    assert (attention(q, k, v, score=wide, softcap=3.0) == expected).all()
    within = scores.within(scores.alibi(OPERANDS["slope"]), [0, 2, 6], offsets)
    assert (attention(q, k, v, score=within) == cuflash.attention(Q, K, V, score=within)).all()

    def loss(slope, offsets):
        score = scores.within(scores.alibi(slope), [0, 2, 6], offsets)
        return (attention(q, k, v, score=score) ** 2).sum()

    slope = jnp.asarray(OPERANDS["slope"])
    results = [jax.jit(jax.grad(loss), static_argnums=1)(slope, tuple(offsets))]
    results += [jax.grad(loss)(slope, kind(offsets)) for kind in (list, np.array, jnp.array)]
    o, vjp = cuflash.attention_vjp(Q, K, V, score=within, wrt="slopes")
    assert all((np.asarray(each) == vjp(2 * o)["slopes"]).all() for each in results)


BAD = {
    "a bias that is not an array": (lambda: {"bias": 3.0}, TypeError, "bias must be an array; got 3.0"),
    "a bool bias": (lambda: {"bias": jnp.ones(7, bool)}, cuflash.UnsupportedProblem, "write mask=bias"),
    "a bias of another length": (lambda: {"bias": jnp.ones(3)}, cuflash.UnsupportedProblem, "bias must broadcast to"),
    "a cap of 0, and a bias": (
        lambda: {"softcap": 0.0, "bias": jnp.ones(7)}, cuflash.UnsupportedProblem, "softcap must be a positive finite"
    ),
    "no function": (lambda: {"score": 3}, TypeError, "score must be a Score or a function"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("is_traced", [False, True])
def test_wrong_operands_are_named(kind, is_traced):
    make, error, sentence = BAD[kind]

    def call(q, k, v):
        return attention(q, k, v, **make())

    with pytest.raises(error, match=sentence):
        (jax.jit(call) if is_traced else call)(*map(jnp.asarray, (Q, K, V)))


@pytest.mark.gpu
def test_operands_on_a_gpu_have_gradients():
    try:
        (device, *_) = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX finds no GPU: {error}")
    q, k, v, do, operands = jax.device_put((Q, K, V, DO, OPERANDS), device)
    reals = {name: operands[name] for name in ("bias", "sink", "slope", "table")}
    (o, lse), pull = jax.vjp(lambda x: attention(q, k, v, **options_of(**operands | x), return_lse=True), reals)
    (dq,) = pull((do, lse))
    assert dq.keys() == reals.keys() and all(array.devices() == {device} for array in dq.values())
    options = options_of(**OPERANDS)
    score = options["score"] @ scores.bias(OPERANDS["bias"]) @ scores.softcap(options["softcap"])
    wrt = ("bias", "slope", "table")
    example = Example(q=Q, k=K, v=V, do=DO, dlse=np.asarray(lse), sink=OPERANDS["sink"], score=score, wrt=wrt)
    others = {name: np.asarray(dq[name]) for name in wrt}
    results = {"o": np.asarray(o), "lse": np.asarray(lse), "dsink": np.asarray(dq["sink"])}
    assert_within_bounds(example, **results, others=others)


@pytest.mark.parametrize("is_traced", [False, True])
def test_float64_operands_beside_float32_have_float64_gradients(is_traced):
    def call(bias, sink, slope):
        return attention(*map(jnp.asarray, (Q, K, V)), bias=bias, sink=sink, score=scores.alibi(slope))

    def pulled(*arrays):
        o, vjp = jax.vjp(call, *arrays)
        return (o, *vjp(jnp.asarray(DO)))

    with jax.enable_x64(True):
        wide = [jnp.asarray(OPERANDS[name].astype(np.float64)) / 3 for name in ("bias", "sink", "slope")]
        run = jax.jit(pulled) if is_traced else pulled
        results, expected = run(*wide), run(*(array.astype(np.float32) for array in wide))
    assert [x.dtype for x in results] == [np.float32, np.float64, np.float64, np.float64]
    for first, second in zip(results, expected):
        np.testing.assert_array_equal(first.astype(np.float32), second)
