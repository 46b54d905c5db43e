"""Derivatives of attention by JAX, first and second, in all combinations of modes, against those of dense formulas."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import cuflash.jax  # noqa: E402
from cuflash import masks  # noqa: E402

jnp = jax.numpy


@pytest.fixture(autouse=True)
def on_the_host():
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield


RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape) for shape in ((2, 4, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3)))
BIAS, SINK, LENGTHS = RNG.standard_normal((4, 4, 5)), RNG.standard_normal(4), np.array([3, 5])


def ours(q, k, v, bias, sink):
    mask = masks.Lengths(kv=jnp.asarray(LENGTHS))
    return cuflash.jax.attention(q, k, v, bias=bias, sink=sink, softcap=4.0, mask=mask, return_lse=True)


def dense(q, k, v, bias, sink):
    k, v = (jnp.repeat(array, 2, axis=-3) for array in (k, v))
    s = 4 * jnp.tanh(q @ jnp.swapaxes(k, -1, -2) / np.sqrt(3) / 4) + bias
    s = jnp.where(jnp.arange(5) < LENGTHS[:, None, None, None], s, -jnp.inf)
    lse = jnp.logaddexp(jax.nn.logsumexp(s, -1), sink[:, None])
    return jnp.exp(s - lse[..., None]) @ v, lse


def arrays():
    return [jnp.asarray(array) for array in (Q, K, V, BIAS, SINK)]


def loss(function):
    def of(*x):
        o, lse = function(*x)
        return (o**2).sum() + (lse**3).sum()

    return of


ALL = tuple(range(5))


def squared(tree):
    return sum((x**2).sum() for x in jax.tree.leaves(tree))


COMBINATIONS = {
    "jvp": lambda f, x: jax.jvp(f, x, x),
    "jvp of one": lambda f, x: jax.jvp(lambda q: f(q, *x[1:]), x[:1], x[:1]),
    "jvp of an operand": lambda f, x: jax.jvp(lambda sink: f(*x[:4], sink), x[4:], x[4:]),
    "grad": lambda f, x: jax.grad(loss(f), ALL)(*x),
    "grad of one": lambda f, x: jax.grad(loss(f), 3)(*x),
    "grad of o alone": lambda f, x: jax.grad(lambda *x: squared(f(*x)[0]), ALL)(*x),
    "grad of lse alone": lambda f, x: jax.grad(lambda *x: squared(f(*x)[1]), ALL)(*x),
    "linearize": lambda f, x: jax.linearize(f, *x)[1](*x),
    "vjp": lambda f, x: jax.vjp(f, *x)[1](tuple(f(*x))),
    "grad of grad": lambda f, x: jax.grad(lambda *x: squared(jax.grad(loss(f), ALL)(*x)), ALL)(*x),
    "grad of grad of q": lambda f, x: jax.grad(lambda q: squared(jax.grad(loss(f))(q, *x[1:])))(x[0]),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f), ALL), x, x),
    "grad of jvp": lambda f, x: jax.grad(lambda *y: squared(jax.jvp(f, y, x)[1]), ALL)(*x),
    "grad of jvp along its tangent": lambda f, x: jax.grad(
        lambda t: squared(jax.jvp(f, x, (t, *x[1:]))[1])
    )(x[0]),
    "hessian": lambda f, x: jax.hessian(lambda q: loss(f)(q, *x[1:]))(x[0]),
    "hessian of an operand": lambda f, x: jax.hessian(lambda sink: loss(f)(*x[:4], sink))(x[4]),
    "jacrev": lambda f, x: jax.jacrev(lambda q: f(q, *x[1:]))(x[0]),
    "jacfwd": lambda f, x: jax.jacfwd(lambda *x: f(*x), (0, 4))(*x),
    "vmap": lambda f, x: jax.vmap(f, (0, None, None, None, None))(jnp.stack([x[0], 2 * x[0]]), *x[1:]),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(loss(f), ALL), (None, 0, None, None, 0))(
        x[0], jnp.stack([x[1], 2 * x[1]]), *x[2:4], jnp.stack([x[4], -x[4]])
    ),
    "grad of vmap": lambda f, x: jax.grad(
        lambda *x: squared(jax.vmap(f, (0, None, None, 0, None))(jnp.stack([x[0], 2 * x[0]]), *x[1:3],
                                                                 jnp.stack([x[3], -x[3]]), x[4])), ALL
    )(*x),
    "grad of vmap of grad": lambda f, x: jax.grad(
        lambda *x: squared(jax.vmap(jax.grad(loss(f), ALL), (0, None, None, None, None))(
            jnp.stack([x[0], 2 * x[0]]), *x[1:])), ALL
    )(*x),
    "remat": lambda f, x: jax.grad(jax.checkpoint(loss(f)), ALL)(*x),
    "scan": lambda f, x: jax.grad(
        lambda q, *x: jax.lax.scan(lambda q, _: (f(q, *x)[0], None), q, None, length=3)[0].sum(), ALL
    )(*x),
}  # fmt: skip


@pytest.mark.parametrize("is_jitted", [False, True], ids=["", "jit"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_derivatives_are_those_of_dense_formulas(name, is_jitted):
    def of(function):
        run = lambda *x: COMBINATIONS[name](lambda *y: function(*y), x)  # noqa: E731
        return (jax.jit(run) if is_jitted else run)(*arrays())

    results, expected = map(jax.tree.leaves, (of(ours), of(dense)))
    for actual, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["", "jit"])
def test_third_derivatives_are_refused_in_words(outer):
    q, k, v, *_ = arrays()

    def of_q(q):
        return (cuflash.jax.attention(q, k, v) ** 2).sum()

    def pushed(function):
        return lambda q: jax.jvp(function, (q,), (q,))[1]

    sentence = "attention has first and second derivatives in JAX, and no jvp of jvp; .*: take finite differences"
    thirds = [
        jax.grad(pushed(jax.grad(of_q))), pushed(pushed(jax.grad(of_q))), pushed(pushed(of_q)),
        jax.jacfwd(jax.hessian(of_q)), jax.jacfwd(jax.jacfwd(of_q)),
    ]  # fmt: skip
    for third in thirds:
        with pytest.raises(NotImplementedError, match=sentence):
            outer(lambda q, third=third: jnp.sum(third(q)))(q)


def test_hessian_vector_products_run_each_pass_once():
    q, k, v, *_ = arrays()
    gradient = jax.grad(lambda q: (cuflash.jax.attention(q, k, v) ** 2).sum())
    product = str(jax.make_jaxpr(lambda q: jax.jvp(gradient, (q,), (q,)))(q))
    assert [product.count(f"cuflash_{name}[") for name in ("forward", "jvp", "backward", "backward_jvp")] == [1] * 4
