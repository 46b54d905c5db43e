"""`jax.vmap` of attention: one call for all entries, whose results are those of one call per entry."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import cuflash.jax  # noqa: E402
from library_parts import part  # noqa: E402

jnp = jax.numpy


@pytest.fixture(autouse=True)
def on_the_host():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


RNG = np.random.default_rng(0)
N, B, H, S, D = 3, 2, 4, 6, 8


def drawn(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def allowed(*shape):
    return (RNG.random(shape) < 0.6) | np.eye(S, dtype=bool)


# For each case: arguments, the axes that are mapped, and the function of the arguments and of a library.
def call(**options):
    return lambda library: lambda q, k, v, *x: part(library, "jax").attention(
        q, k, v, **{name: make(library, *x) for name, make in options.items()}, return_lse=True
    )


Q, K = drawn(B, H, S, D), drawn(B, 2, S, D)
LISTS, LENGTHS = RNG.integers(-1, S // 2, (N, H, S, 2)), np.array([S, S - 1])
KEYS = jax.random.key_data(jax.random.split(jax.random.key(0), N))
CASES = {
    "q": ((np.stack([Q, -Q, 2 * Q]), K, K), (0, None, None), call()),
    "k": ((Q, np.stack([K, -K, 2 * K]), K), (None, 0, None), call(causal=lambda library: True)),
    "a middle axis": ((np.stack([Q, -Q, 2 * Q], 2), K, K), (2, None, None), call()),
    "two axes": ((drawn(N, S, D), drawn(N, S, D), drawn(S, D)), (0, 0, None), call()),
    "batches of different ranks": ((drawn(N, B, H, S, D), drawn(N, 2, S, D), drawn(2, S, D)), (0, 0, None), call()),
    "bias": (
        (Q, K, K, drawn(N, H, S, S)), (None, None, None, 0), call(bias=lambda library, bias: bias)
    ),
    "bias of two axes": (
        (Q, K, K, drawn(N, S, S)), (None, None, None, 0), call(bias=lambda library, bias: bias)
    ),
    "a shared bias of two axes": (
        (np.stack([Q, -Q, 2 * Q]), K, K, drawn(S, S)), (0, None, None, None), call(bias=lambda library, bias: bias)
    ),
    "a shared slope of calls without heads": (
        (drawn(N, S, D), drawn(S, D), drawn(S, D), drawn(1)), (0, None, None, None),
        call(score=lambda library, slopes: library.scores.alibi(slopes)),
    ),
    "shared lists of blocks": (
        (np.stack([Q, -Q, 2 * Q]), K, K, LISTS[0]), (0, None, None, None),
        call(mask=lambda library, lists: library.masks.ChosenBlocks(lists, 2)),
    ),
    "lists of blocks, and lengths": (
        (np.stack([Q, -Q, 2 * Q]), K, K, LISTS, LENGTHS), (0, None, None, 0, None),
        call(mask=lambda library, lists, n: library.masks.Lengths(kv=n) & library.masks.ChosenBlocks(lists, 2)),
    ),
    "lengths, and documents of the host": (
        (Q, K, K, RNG.integers(1, S, (N, B))), (None, None, None, 0),
        call(mask=lambda library, n: library.masks.Lengths(kv=n) & library.masks.Documents(np.arange(S) // 4)),
    ),
    "bias of one entry": (
        (np.stack([Q, -Q, 2 * Q]), K, K, drawn(B, H, S, S)), (0, None, None, None),
        call(bias=lambda library, bias: bias)
    ),
    "sink": ((Q, K, K, drawn(N, H)), (None, None, None, 0), call(sink=lambda library, sink: sink)),
    "slopes": (
        (Q, K, K, drawn(N, H)), (None, None, None, 0), call(score=lambda library, slopes: library.scores.alibi(slopes))
    ),
    "a score of keys in each batch entry": (
        (Q, K, K, drawn(N, B, H, S)), (None, None, None, 0),
        call(score=lambda library, w: library.scores.Score(lambda s, b, h, i, j, w: s + w[..., h, j], w=w)),
    ),
    "an array with two numbers of indices": (
        (drawn(H, H, S, D), drawn(2, S, D), drawn(2, S, D), drawn(N, H, S)), (None, None, None, 0),
        call(score=lambda library, w: library.scores.Score(lambda s, b, h, i, j, w: w[..., j] + s * w[..., h, j], w=w)),
    ),
    "lengths": (
        (Q, K, K, RNG.integers(1, S, (N, B))), (None, None, None, 0),
        call(mask=lambda library, lengths: library.masks.Lengths(kv=lengths)),
    ),
    "one length for a batch": (
        (Q, K, K, RNG.integers(1, S, N)), (None, None, None, 0),
        call(mask=lambda library, lengths: library.masks.Lengths(kv=lengths) & library.masks.Causal()),
    ),
    "elements": ((Q, K, K, allowed(N, S, S)), (None, None, None, 0), call(mask=lambda library, x: x)),
    "elements of each batch entry": (
        (np.stack([Q, -Q, 2 * Q]), K, K, allowed(B, 1, S, S)), (0, None, None, None), call(mask=lambda library, x: x)
    ),
    "a function of the batch entry": (
        (np.stack([Q, -Q, 2 * Q]), K, K), (0, None, None),
        call(mask=lambda library: lambda b, h, i, j: j <= i + b),
    ),
    "a mask of a function": (
        (np.stack([Q, -Q, 2 * Q]), K, K), (0, None, None),
        call(mask=lambda library: library.masks.FromFunction(lambda b, h, i, j: j <= b + 1) | library.masks.Causal()),
    ),
    "a score of the batch entry": (
        (np.stack([Q, -Q, 2 * Q]), K, K), (0, None, None),
        call(score=lambda library: lambda s, b, h, i, j: s + b * j),
    ),
    "dropout": (
        (np.stack([Q, -Q, 2 * Q]), K, K), (0, None, None), call(dropout=lambda library: library.Dropout(0.5, 3))
    ),
    "dropout of keys": (
        (Q, K, K, np.asarray(KEYS)), (None, None, None, 0),
        call(dropout=lambda library, key: library.Dropout(0.5, key)),
    ),
    "documents of keys, and those of queries on the host": (
        (Q, K, K, RNG.integers(-1, 2, (N, S))), (None, None, None, 0),
        call(mask=lambda library, ids: library.masks.Documents(np.arange(S) // 3, ids)),
    ),
    "offsets of keys, and those of queries on the host": (
        (Q, K, K, np.array([[0, 1, S], [0, 4, S], [0, S, S]])), (None, None, None, 0),
        call(mask=lambda library, x: library.masks.Sequences(np.array([0, 3, S]), x, causal="bottom_right")),
    ),
}  # fmt: skip


def check_mapped_calls(library, names=tuple(CASES)):
    """Compare results, gradients and tangents of mapped calls with those of one call per entry."""
    for name in names:
        arrays, axes, make = CASES[name]
        arrays, function = tuple(map(jnp.asarray, arrays)), make(library)
        reals = tuple(n for n, array in enumerate(arrays) if array.dtype == jnp.float32)

        def gradients(*x, function=function, reals=reals):
            return jax.grad(lambda *x: sum((y**2).sum() for y in function(*x)), reals)(*x)

        def tangents(*x, function=function, reals=reals):
            def of_reals(*own):
                return function(*(own[reals.index(n)] if n in reals else each for n, each in enumerate(x)))

            moving = [x[n] for n in reals]
            return jax.jvp(of_reals, moving, moving)[1]

        for run in (function, gradients, tangents):
            mapped = jax.tree.leaves(jax.vmap(run, axes)(*arrays))
            entries = [
                [array if axis is None else jnp.moveaxis(array, axis, 0)[n] for array, axis in zip(arrays, axes)]
                for n in range(N)
            ]
            each = [jax.tree.leaves(run(*entry)) for entry in entries]
            for number, actual in enumerate(mapped):
                expected = np.stack([results[number] for results in each])
                np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_mapped_calls_are_those_of_each_entry(name):
    check_mapped_calls(cuflash, [name])


@pytest.mark.parametrize("name", [
    "q", "sink", "slopes", "a score of keys in each batch entry", "lengths", "elements", "bias"
])  # fmt: skip
def test_all_entries_take_one_call(name):
    arrays, axes, make = CASES[name]
    jaxpr = str(jax.make_jaxpr(jax.vmap(make(cuflash), axes))(*arrays))
    assert jaxpr.count("cuflash_forward[") == 1 and "while[" not in jaxpr and "scan[" not in jaxpr
