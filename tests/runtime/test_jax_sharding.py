"""Attention on arrays that are sharded over devices: by `jax.jit` alone, eagerly, and within `jax.shard_map`."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import cuflash.jax  # noqa: E402
from library_parts import part  # noqa: E402
from cuflash import BlockIndex, masks  # noqa: E402

jnp = jax.numpy
P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
B, H, KV, S, D = 4, 8, 4, 6, 4


def drawn(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def allowed(*shape):
    return (RNG.random(shape) < 0.6) | np.eye(S, dtype=bool)


Q, K, V = drawn(B, H, S, D), drawn(B, KV, S, D), drawn(B, KV, S, D)
QKV, OF_HEADS = (Q, K, V), allowed(H, S, S)
BOTH, BATCH, WHOLE = P("data", "model"), P("data"), P()
PLAIN = (BOTH, BOTH, BOTH)


# For each case: arrays, their shardings, options of the library and of arrays after q, k, v, and whether the results
# of the forward pass need no other device.
CASES = {
    "batch and heads": (QKV, PLAIN, lambda of: {"causal": True}, True),
    "batch": (QKV, (BATCH,) * 3, lambda of: {"window": (2, 1)}, True),
    "heads": (QKV, (P(None, "model"),) * 3, lambda of: {"softcap": 3.0}, True),
    "batch over both axes": ((drawn(8, 2, S, D),) * 3, (P(("data", "model")),) * 3, lambda of: {}, True),
    "q alone": (QKV, (BOTH, WHOLE, WHOLE), lambda of: {}, None),
    "rows": (QKV, (P(None, None, "model"), WHOLE, WHOLE), lambda of: {"causal": True}, False),
    "columns": (QKV, (P("data", None, None, "model"),) * 3, lambda of: {"causal": True}, False),
    "fewer key heads than devices": (
        (Q, K[:, :1], V[:, :1]), (P(None, ("data", "model")), WHOLE, WHOLE), lambda of: {}, True
    ),
    "key heads that devices do not divide": (
        (Q, *2 * [drawn(B, 2, S, D)]), (P(None, "data"), WHOLE, WHOLE), lambda of: {}, False
    ),
    "keys of all batch entries": ((Q, K[:1], V[0]), (BOTH, P(None, "model"), P("model")), lambda of: {}, True),
    "two batch axes": (
        (drawn(2, B, H, S, D), *2 * [drawn(B, KV, S, D)]), (P(None, "data", "model"), BOTH, BOTH), lambda of: {}, True
    ),
    "matrices": ((Q[0, 0], K[0, 0], V[0, 0]), (P("model"), WHOLE, WHOLE), lambda of: {}, False),
    "bias": ((*QKV, drawn(B, H, S, S)), (*PLAIN, BOTH), lambda of, bias: {"bias": bias}, True),
    "bias of heads": ((*QKV, drawn(H, S, S)), (*PLAIN, P("model")), lambda of, bias: {"bias": bias}, True),
    "bias of all": ((*QKV, drawn(S, S)), (*PLAIN, WHOLE), lambda of, bias: {"bias": bias}, True),
    "sink": ((*QKV, drawn(H)), (*PLAIN, P("model")), lambda of, sink: {"sink": sink}, True),
    "slopes": ((*QKV, drawn(H)), (*PLAIN, P("model")), lambda of, slopes: {"score": of.scores.alibi(slopes)}, True),
    "a table": (
        (*QKV, drawn(H, 8)), (*PLAIN, P("model")),
        lambda of, table: {"score": of.scores.relative_position(table, 6, bidirectional=True)}, True,
    ),
    "lengths": ((*QKV, RNG.integers(1, S, B)), (*PLAIN, BATCH), lambda of, n: {"mask": of.masks.Lengths(kv=n)}, True),
    "elements": (
        (*QKV, allowed(B, H, S, S)), (*PLAIN, BOTH), lambda of, x: {"mask": of.masks.Dense(x) & of.masks.Causal()}, True
    ),
    "elements of all heads": ((*QKV, allowed(B, 1, S, S)), (*PLAIN, BATCH), lambda of, x: {"mask": x}, True),
    "elements of NumPy": (QKV, PLAIN, lambda of: {"mask": np.tri(S, dtype=bool)}, True),
    "elements of NumPy for heads": (QKV, PLAIN, lambda of: {"mask": of.masks.Dense(OF_HEADS)}, False),
    "an index": (
        QKV, PLAIN, lambda of: {"mask": part(of, "blocks.index").BlockIndex.from_mask(of.masks.Causal(), S, S, 2)}, True
    ),
    "a function of the head": (
        QKV, PLAIN, lambda of: {"mask": of.masks.FromFunction(lambda b, h, i, j: j <= i + h)}, False
    ),
    "a function as mask": (QKV, PLAIN, lambda of: {"mask": lambda b, h, i, j: j <= i + b}, False),
    "a score of the head": (QKV, PLAIN, lambda of: {"score": lambda s, b, h, i, j: s + h * j}, False),
    "a score of the batch entry": (QKV, PLAIN, lambda of: {"score": lambda s, b, h, i, j: s + b * j}, False),
    "dropout": (QKV, PLAIN, lambda of: {"dropout": of.Dropout(0.5, 3)}, False),
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_host():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def the_mesh():
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("XLA_FLAGS has no --xla_force_host_platform_device_count=8")
    return jax.sharding.Mesh(np.array(devices[:8]).reshape(4, 2), ("data", "model"))


def of_mesh(mesh, specs, arrays):
    return [jax.device_put(array, jax.sharding.NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs)]


def functions_of(library, make, arrays):
    """Return the forward pass, gradients and the tangent of gradients with respect to all real arrays."""
    attention, reals = part(library, "jax").attention, [n for n, x in enumerate(arrays) if x.dtype == np.float32]

    def forward(q, k, v, *x):
        return attention(q, k, v, **make(library, *x), return_lse=True)

    def gradients(*x):
        def of_reals(*own):
            values = dict(zip(reals, own))
            o, lse = forward(*(values.get(n, each) for n, each in enumerate(x)))
            return (o**2).sum() + lse.sum()

        return jax.grad(of_reals, tuple(range(len(reals))))(*(x[n] for n in reals))

    def products(*x):
        moving = [x[n] for n in reals]

        def of_reals(*own):
            values = dict(zip(reals, own))
            return gradients(*(values.get(n, each) for n, each in enumerate(x)))

        return jax.jvp(of_reals, moving, moving)[1]

    return forward, gradients, products


def check_sharded_calls(library, names=tuple(CASES)):
    """Compare results of jitted calls on sharded arrays with those on one device."""
    mesh = the_mesh()
    for name in names:
        arrays, specs, make, is_apart = CASES[name]
        on_mesh, own = of_mesh(mesh, specs, arrays), [jnp.asarray(array) for array in arrays]
        for number, function in enumerate(functions_of(library, make, arrays)):
            compiled = jax.jit(function).lower(*on_mesh).compile()
            for actual, expected in zip(compiled(*on_mesh), function(*own), strict=True):
                np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5, err_msg=f"{name}, {number}")
            if number == 0 and is_apart is not None:
                moves = re.findall("all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
                assert is_apart == (not moves), name


@pytest.mark.parametrize("name", CASES)
def test_sharded_calls_are_those_of_one_device(name):
    check_sharded_calls(cuflash, [name])


def test_results_stay_where_they_are_computed():
    mesh = the_mesh()
    arrays = of_mesh(mesh, PLAIN, QKV)
    expected = cuflash.jax.attention(*map(jnp.asarray, QKV), causal=True)
    for call in (cuflash.jax.attention, jax.jit(cuflash.jax.attention, static_argnames="causal")):
        o = call(*arrays, causal=True)
        assert o.sharding.spec == BOTH and (o == expected).all()
    gradients = jax.jit(jax.grad(lambda *x: cuflash.jax.attention(*x).sum(), (0, 1, 2)))(*arrays)
    assert {each.sharding.spec for each in gradients} == {BOTH}


@pytest.mark.parametrize("is_traced", [False, True])
def test_steps_in_shard_map_are_those_outside(is_traced):
    """Each device computes its batch entries and heads; gradients of what devices share are added up."""
    mesh = the_mesh()

    def call(q, k, v, sink, lengths):
        return cuflash.jax.attention(q, k, v, sink=sink, mask=masks.Lengths(kv=lengths))

    arrays = [*map(jnp.asarray, QKV), jnp.asarray(drawn(H)), jnp.array([6, 2, 1, 5])]
    specs = (*PLAIN, P("model"), BATCH)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=BOTH)

    def gradients(function):
        def step(*x):
            return jax.grad(lambda *own: (function(*own, x[4]) ** 2).sum(), (0, 1, 2, 3))(*x[:4])

        return step

    step = gradients(mapped)
    results = (jax.jit(step) if is_traced else step)(*arrays)
    for actual, expected in zip(results, gradients(call)(*arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_loops_and_mapped_calls_on_sharded_arrays_are_right():
    mesh = the_mesh()
    q, k, v = of_mesh(mesh, PLAIN, QKV)

    @jax.jit
    def looped(q):
        step = jax.checkpoint(partial(cuflash.jax.attention, causal=True))
        return jax.lax.scan(lambda q, _: (step(q, k, v) + q, None), q, None, length=2)[0]

    @jax.jit
    def mapped(q):
        return jax.vmap(lambda q: cuflash.jax.attention(q, k, v, causal=True))(jnp.stack([q, -q]))

    loss = jax.jit(jax.grad(lambda q: (looped(q) ** 2).sum()))
    for function in (looped, mapped, loss):
        np.testing.assert_allclose(function(q), function(jnp.asarray(Q)), rtol=1e-5, atol=1e-5)


def test_shards_of_an_index_with_batch_entries_are_gathered():
    mesh = the_mesh()
    index = BlockIndex.from_mask(masks.Dense(allowed(B, 1, S, S)), S, S, 2, batch=(B,))
    call = jax.jit(partial(cuflash.jax.attention, mask=index))
    np.testing.assert_allclose(call(*of_mesh(mesh, PLAIN, QKV)), call(*map(jnp.asarray, QKV)), rtol=1e-5, atol=1e-5)


def test_a_large_array_that_is_gathered_is_named(monkeypatch):
    mesh = the_mesh()
    monkeypatch.setattr(cuflash.jax._sharding, "GATHERED_BYTES", 1000)
    q, k, v = of_mesh(mesh, (P(None, None, "model"), WHOLE, WHOLE), QKV)
    with pytest.warns(UserWarning, match="q is sharded over 'model' along axis 2, which each device needs as a whole"):
        jax.jit(cuflash.jax.attention)(q, k, v)
