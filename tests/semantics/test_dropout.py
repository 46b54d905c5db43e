"""Dropout on every executor drops the same weights as the host's function, bit for bit."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuflash.dropout import philox4x32
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import CPU, GPU, SIM, holds_for_examples, needs_compiler, on_every_executor, sampled
from hypothesis import given, target
from hypothesis import strategies as st

import cuflash
from cuflash import Dropout, ShapeDtype, UnsupportedProblem, masks, scores

SEED = 0x9ABCDEF012345678
PARTIAL = masks.FromFunction(lambda b, h, i, j: (i + 2 * j + h) % 5 != 0)
BLOCKS = masks.BlockPattern(np.array([[1, 0, 1], [0, 1, 1], [1, 0, 0]], bool), (40, 24))
TWO = {"q_batch": (2,), "k_batch": (2,), "v_batch": (2,), "num_heads": 4, "num_kv_heads": 2}
SHORT = {**TWO, "seqlen_q": 40, "seqlen_kv": 32, "value_dim": 32}
# Cases: a list of blocks that start anywhere, a window that starts anywhere, packed sequences, keys that thread blocks
# share, heads that share a tile of queries, and several full tiles.
SHAPES: dict[str, dict[str, Any]] = {
    "list": {**SHORT, "seqlen_q": 120, "seqlen_kv": 72, "value_dim": 72, "mask": BLOCKS & PARTIAL},
    "window": {
        **SHORT, "seqlen_q": 43, "seqlen_kv": 61, "value_dim": 61, "mask": masks.SlidingWindow(9, 3, "top_left")
    },
    "packed": {**SHORT, "mask": masks.Sequences(np.array([0, 7, 7, 40]), np.array([0, 11, 16, 32]))},
    "shared": {**TWO, "seqlen_q": 3, "seqlen_kv": 400, "value_dim": 8},
    "tiles": {**TWO, "seqlen_q": 150, "seqlen_kv": 270, "value_dim": 128, "mask": masks.Causal("bottom_right")},
}  # fmt: skip
KERNELS = [
    ("simt", "list", "float32"), ("simt", "window", "float64"), ("naive", "list", "float16"),
    ("sm80", "list", "float16"), ("sm80", "shared", "bfloat16"), ("sm90", "window", "float16"),
    ("sm90", "packed", "bfloat16"), ("sm90", "tiles", "float16"),
]  # fmt: skip


def runs(first: int) -> list[Any]:
    """Return every executor, kernel and shape; a short run on the simulator has every second kernel."""
    return [
        pytest.param(run, shape, dtype, id=f"{run}-{shape}", marks=marks)
        for base, marks, kernels in (
            (SIM, needs_compiler, sampled(KERNELS, 2, first)), (GPU, pytest.mark.gpu, KERNELS)
        )
        for kernel, shape, dtype in kernels
        for run in [replace(base, kernel=kernel, deterministic=shape == "window")]
    ] + [pytest.param(CPU, shape, "float32", id=f"cpu-{shape}") for shape in SHAPES]


WITH_SCORE = {("simt", "list"), ("sm80", "list"), ("sm90", "packed"), ("auto", "list")}
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 20, 8), np.float32)
K, V = RNG.standard_normal((2, 2, 2, 30, 8), np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_known_answers_of_random123(counter, key, words) -> None:
    low, high = (int(word, 16) for word in key.split())
    numbers = philox4x32(low + (high << 32), np.array([int(word, 16) for word in counter.split()], np.uint64))
    assert [f"{int(word):08x}" for word in numbers] == words.split()


def cell_and_bit(i: Any, j: Any) -> tuple[Any, Any, Any]:
    """Return two words of a weight's Philox counter, and which bit of each half of the output words belongs to it."""
    bit = 8 * (j % 2) + 4 * (i % 2) + 2 * (i // 8 % 2) + j // 8 % 2
    return 4 * (i // 16) + i % 8 // 2, 4 * (j // 16) + j % 8 // 2, bit


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(1, 2**8 - 1), st.integers(0, 5),
    st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_a_weight_is_kept_by_the_number_of_its_place(seed, offset, threshold, head, i, j) -> None:
    """One weight is checked against the formula in the module's docstring."""
    row, column, bit = cell_and_bit(i, j)
    words = philox4x32(seed, np.array([row, column, head, offset], np.uint64))
    number = sum(((int(words[n // 2]) >> 16 * (n % 2) + bit) & 1) << n for n in range(8))
    keeps = Dropout(threshold / 2**8, seed, offset).keep((3, 2, 2**31, 2**31), np.array([i]), np.array([j, i, j]))
    assert keeps.shape == (3, 2, 1, 3)
    assert keeps[head // 2, head % 2, 0, 0] == keeps[head // 2, head % 2, 0, 2] == (number >= threshold)


def test_every_number_belongs_to_one_weight() -> None:
    """No two weights of a 16 x 16 tile use the same bit of the same counter."""
    i, j = np.mgrid[:16, :16]
    assert len(set(zip(*(x.ravel().tolist() for x in cell_and_bit(i, j))))) == 256


@pytest.mark.parametrize("threshold", [26, 128, 230])
def test_weights_are_dropped_as_often_as_p_says(threshold) -> None:
    """Each position of a 16 x 16 tile, and each pair of neighbors, is within five standard deviations."""
    p = threshold / 256
    dropped = ~Dropout(p, SEED).keep((4, 512, 512))
    tiles = dropped.reshape(4, 32, 16, 32, 16).swapaxes(2, 3).reshape(-1, 16, 16)
    both = (tiles[:, 1:] & tiles[:, :-1], tiles[:, :, 1:] & tiles[:, :, :-1])
    for actual, expected in ((tiles, p), *((each, p * p) for each in both)):
        deviation = np.sqrt(expected * (1 - expected) / len(actual))
        assert (np.abs(actual.mean(axis=0) - expected) < 5 * deviation).all()


@pytest.mark.parametrize(("run", "shape", "dtype"), runs(0))
def test_kernels_drop_the_weights_that_the_host_drops(run, shape, dtype) -> None:
    """With q = 0 and an identity matrix as v, o shows which weights are kept; so does dV with an identity as dO."""
    dropout = Dropout(0.4, SEED, offset=2**32 - 1)
    structure = Structure(**SHAPES[shape], dtype=dtype, sink=(4,))
    example = structure.example().but(mask=structure.mask, dropout=dropout)
    probe = np.broadcast_to(np.eye(structure.seqlen_kv, structure.value_dim), example.v.shape).astype(example.v.dtype)
    pulled = np.broadcast_to(np.eye(structure.seqlen_q, structure.value_dim), example.do.shape).astype(example.v.dtype)
    results = run.everything(example.but(q=np.zeros_like(example.q), v=probe, do=pulled, scale=None))
    keeps = dropout.keep((2, 4, structure.seqlen_q, structure.seqlen_kv)) & example.allowed
    shown = min(structure.seqlen_kv, structure.value_dim)
    np.testing.assert_array_equal(results["o"][..., :shown] != 0, keeps[..., :shown])
    of_groups = keeps.reshape(2, 2, 2, *keeps.shape[2:]).any(axis=2).swapaxes(-1, -2)
    shown = min(structure.seqlen_q, structure.value_dim)
    np.testing.assert_array_equal(results["dv"][..., :shown] != 0, of_groups[..., :shown])


@pytest.mark.parametrize(("run", "shape", "dtype"), runs(1))
def test_every_result_of_a_kernel_is_within_its_bound(run, shape, dtype) -> None:
    """All calls have a sink, and some also have a score function."""
    score = scores.softcap(2.0) if (run.kernel, shape) in WITH_SCORE else None
    structure = Structure(**SHAPES[shape], dtype=dtype, sink=(4,), dropout=Dropout(0.3, SEED, 7))
    example = run.rounded(structure.example().but(score=score))
    o, vjp = cuflash.attention_vjp(
        *(run.put(x) for x in (example.q, example.k, example.v)), sink=run.put(example.sink), wrt="sink", score=score,
        mask=run.put_mask(example.mask, example.q, example.k, example.v), dropout=example.dropout, return_lse=True,
        **run.options,
    )  # fmt: skip
    gradients = vjp(run.put(example.do), run.put(example.dlse))
    results = dict(zip(("o", "lse", "dq", "dk", "dv", "dsink"), (*o, *gradients, gradients["sink"])))
    assert_within_bounds(example, **{name: run.get(x) for name, x in results.items()})


@holds_for_examples(
    has_dropout=True, most_scores=1 << 11, longest=40, widest=8, max_leaves=1, dtypes=["float16", "float64"]
)  # fmt: skip
def test_every_result_with_dropout_is_within_its_bound(run, example):
    target(assert_within_bounds(example, **run.everything(example)))


@on_every_executor
@pytest.mark.parametrize("dtype", ["float16"])
def test_lse_is_that_of_all_weights_and_calls_repeat(run, dtype) -> None:
    example = run.rounded(Structure(**SHORT, dtype=dtype, mask=PARTIAL).example())
    plain, nothing = run.everything(example), run.everything(example.but(dropout=Dropout(0, SEED)))
    assert {name: x.tobytes() for name, x in nothing.items()} == {name: x.tobytes() for name, x in plain.items()}
    dropped = example.but(dropout=Dropout(0.5, SEED))
    first, second = run.everything(dropped), run.everything(dropped)
    assert first["lse"].tobytes() == plain["lse"].tobytes() and not np.array_equal(first["o"], plain["o"])
    repeating = first.keys() - (set() if run.deterministic or run.executor == "cpu" else {"dq"})
    assert all(first[name].tobytes() == second[name].tobytes() for name in repeating)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        pytest.param(CPU, "float32", id="cpu"),
        *(
            pytest.param(replace(SIM, kernel=kernel), "float16", id=kernel, marks=needs_compiler)
            for kernel in ("simt", "naive", "sm80", "sm90")
        ),
    ],
)
def test_a_row_of_nan_gives_nan_to_dv_where_its_weights_are_kept(run, dtype) -> None:
    dropout = Dropout(0.5, SEED)
    example = Structure(num_heads=2, num_kv_heads=2, seqlen_q=20, seqlen_kv=30, dtype=dtype, dropout=dropout).example()
    q = example.q.copy()
    q[:, 7, 3] = np.nan
    results = run.everything(example.but(q=q))
    for name in ("o", "lse", "dq"):
        assert np.isnan(results[name][:, 7]).all() and not np.isnan(np.delete(results[name], 7, axis=1)).any()
    assert np.isnan(results["dk"]).all()
    keeps = dropout.keep((2, 20, 30))[:, 7]
    assert (np.isnan(results["dv"]) == keeps[..., None]).all()


@on_every_executor
def test_a_seed_in_an_array_is_read_by_each_call(run) -> None:
    q, k, v = map(run.put, (Q[:1], K[:1], V[:1]))
    seed = run.put(np.array(-5))
    ready = cuflash.plan(q, k, v, dropout=Dropout(0.5, seed, 3), executor=run.executor)

    def results(seeds: dict[str, Any], plan: Any = ready) -> list[Any]:
        o, lse = plan.forward(q, k, v, **seeds)
        return [o, *plan.backward(o, q, k, v, o, lse, **seeds)]

    def check(results: list[Any], number: int) -> None:
        """Assert that o, and gradients for dO = o, are those of a seed."""
        actual = dict(zip(("o", "dq", "dk", "dv"), map(run.get, results)))
        dropout = Dropout(0.5, number % 2**64, 3)
        assert_within_bounds(Example(q=Q[:1], k=K[:1], v=V[:1], do=actual["o"], dropout=dropout), **actual)

    for number in (-5, 7, 9):
        fixed = cuflash.plan(q, k, v, dropout=Dropout(0.5, number % 2**64, 3), executor=run.executor)
        check(results({}, fixed), number)
    check(results({}), -5)
    seed[...] = 7
    check(results({}), 7)
    check(results({"dropout_seed": run.put(np.array(9, np.uint64).view(np.int64))}), 9)
    o, vjp = cuflash.attention_vjp(q, k, v, dropout=Dropout(0.5, seed, 3), executor=run.executor)
    check([o, *vjp(o)], 7)
    seed[...] = 8
    on_host = pytest.raises(RuntimeError, match="^dropout_seed must stay unchanged")
    with nullcontext() if run.executor == "gpu" else on_host:
        vjp(o)
    check([o], 7)


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_again() -> None:
    import cupy

    q, seed = cupy.asarray(Q), cupy.array(1)
    ready = cuflash.plan(q, q, q, dropout=Dropout(0.5, seed))
    ready.compile()
    expected = {}
    for number in (1, 2):
        seed[...] = number
        o, lse = ready.forward(q, q, q)
        expected[number] = cupy.asnumpy(o), cupy.asnumpy(ready.backward(o, q, q, q, o, lse).dv)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        o, lse = ready.forward(q, q, q)
        gradients = ready.backward(o, q, q, q, o, lse)
        graph = stream.end_capture()
        for number in (2, 1):
            seed[...] = number
            graph.launch(stream)
            stream.synchronize()
            assert cupy.asnumpy(o).tobytes() == expected[number][0].tobytes()
            assert cupy.asnumpy(gradients.dv).tobytes() == expected[number][1].tobytes()


def test_a_dropout_is_what_its_numbers_say() -> None:
    assert Dropout(0.1, 3).p == 26 / 256
    assert Dropout(np.float32(0.5), np.int64(3), np.uint8(2)) == Dropout(0.5, 3, 2)
    assert len({Dropout(0.1, 3), Dropout(0.1, 3, 0), Dropout(0.1 + 1e-9, 3), Dropout(0.1, 4)}) == 2
    assert pickle.loads(pickle.dumps(Dropout(0.1, 3))) == Dropout(0.1, 3)
    array = np.array(3)
    assert Dropout(0.1, array) == Dropout(0.1, array) != Dropout(0.1, np.array(3))
    np.testing.assert_array_equal(Dropout(0.1, array).keep((9, 9)), Dropout(0.1, 3).keep((9, 9)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0), r"p must be a number, 0 <= p < 1; got 1.0"),
        ((-0.1, 0), "p must be a number, 0 <= p < 1; got -0.1"),
        ((float("nan"), 0), "p must be a number, 0 <= p < 1; got nan"),
        ((np.float64(1 - 1e-9), 0), "p must be 0, or round to one of 1/256, 2/256, ..., 255/256; got .*0.9"),
        ((0.001, 0), "p must be 0, or round to one of 1/256, 2/256, ..., 255/256; got 0.001"),
        ((0.1, 0.5), "seed must be an int, or a 0-d array"),
        ((0.1, np.random.default_rng(0)), r"got Generator: pass it as rng=$"),
        ((0.1,), "seed must be an int, or a 0-d array .*; got None: pass seed= or rng=$"),
        ((0.1, np.random.RandomState(0)), r"got RandomState: seed=int\(rng\.randint\(2\*\*31\)\)$"),
        ((0.1, -1), "seed must be an int from 0 to 2.64 - 1; got -1"),
        ((0.1, 2**64), "seed must be an int from 0 to 2.64 - 1"),
        ((0.1, np.zeros(1, int)), "seed must be a 0-d array of int64 or uint64; got an array of shape"),
        ((0.1, np.array(1.0)), "seed must be a 0-d array of int64 or uint64"),
        ((0.1, 0, -1), r"offset must be an int from 0 to 2.32 - 1; got -1"),
        ((0.1, 0, 2**32), "offset must be an int from 0 to 2.32 - 1; got 4294967296"),
        ((0.1, 0, 0.5), "offset must be an int from 0 to 2.32 - 1; got 0.5"),
    ],
)  # fmt: skip
def test_a_wrong_dropout_is_refused(arguments, message) -> None:
    with pytest.raises(UnsupportedProblem, match=message):
        Dropout(*arguments)


def check_rng(library: Any) -> None:
    """Assert that a seed takes one draw from a generator, and that an int seeds a new generator."""
    rng, alike = np.random.default_rng(7), np.random.default_rng(7)
    first, second = (library.Dropout(0.5, rng=rng) for _ in range(2))
    assert first.seed == int(alike.integers(1 << 64, dtype=np.uint64)) != second.seed
    assert first == library.Dropout(0.5, first.seed) == library.Dropout(0.5, rng=7) != second
    assert replace(second, p=0.25).seed == second.seed
    rng, alike = np.random.default_rng(7), np.random.default_rng(7)
    patterns, selectors, q = library.patterns, library.selectors, np.zeros((1, 64, 4))
    for draw in (
        lambda **seed: patterns.random(40, block=4, density=0.3, **seed).blocks,
        lambda **seed: patterns.bigbird(60, block=4, **seed).blocks,
        lambda **seed: selectors.random(q, q, block=4, budget=selectors.Budget(top_k=3), **seed).states(),
    ):
        first, second = draw(rng=rng), draw(rng=rng)
        assert (first != second).any() and (draw(rng=alike) == first).all() and (draw(rng=alike) == second).all()
        assert (draw(rng=3) == draw(rng=np.random.default_rng(3))).all() and (draw(seed=3) == draw(seed=3)).all()


def test_a_generator_gives_the_seed() -> None:
    check_rng(cuflash)
    assert pickle.loads(pickle.dumps(Dropout(0.5, rng=7))) == Dropout(0.5, rng=7)
    with pytest.raises(UnsupportedProblem, match="seed must not be passed with rng: leave one out"):
        Dropout(0.5, 3, rng=3)
    for wrong in (-1, 0.5, "7", np.random.RandomState(0)):
        with pytest.raises(UnsupportedProblem, match="rng must be a numpy.random.Generator, or an int of at least 0"):
            Dropout(0.5, rng=wrong)


def test_all_that_is_wrong_with_a_dropout_is_said_at_once() -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        Dropout(2, "7", -1)
    assert len(caught.value.reasons) == 3
    with pytest.raises(UnsupportedProblem, match="dropout must be a Dropout; got 0.1: write") as caught:
        cuflash.attention(Q, K, V, dropout=0.1, causal=True, sink=np.zeros(3, np.float32))
    assert len(caught.value.reasons) == 3
    with pytest.raises(UnsupportedProblem, match="shape must be .*; got .5,"):
        Dropout(0.1, 0).keep((5,))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"queries": [1, 2]}, r"queries must be a 1-d int array with values from 0 to 2 for this shape; got \[1, 2\]"),
        ({"queries": np.array([0, 3])}, r"queries must be .* from 0 to 2 for this shape; got 0\.\.3"),
        ({"keys": np.array([-1, 4])}, r"keys must be .* from 0 to 4 for this shape; got -1\.\.4"),
        ({"keys": np.array([0.0])}, "keys must be .*; got an array of shape .* and dtype float64"),
    ],
)
def test_rows_and_columns_of_what_is_kept_are_those_of_the_shape(places: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedProblem, match=message):
        Dropout(0.1, 0).keep((3, 5), **places)
    actual = Dropout(0.5, 0).keep((3, 5), queries=np.array([2, 0]), keys=np.array([4]))
    np.testing.assert_array_equal(actual, Dropout(0.5, 0).keep((3, 5))[[2, 0]][:, [4]])


def test_a_plan_needs_the_seed_that_it_was_made_without() -> None:
    ready = cuflash.plan(Q, K, V, dropout=Dropout(0.5, ShapeDtype((), np.int64)))
    with pytest.raises(UnsupportedProblem, match=r"dropout_seed is required, with shape \(\) and dtype int64"):
        ready.forward(Q, K, V)
    with pytest.raises(UnsupportedProblem, match=r"dropout_seed must have shape \(\) and dtype int64; got \(1,\)"):
        ready.forward(Q, K, V, dropout_seed=np.zeros(1, int))
    o, _ = ready.forward(Q, K, V, dropout_seed=np.array(3))
    np.testing.assert_array_equal(o, cuflash.attention(Q, K, V, dropout=Dropout(0.5, 3)))
    with pytest.raises(UnsupportedProblem, match="dropout_seed must be left out"):
        cuflash.plan(Q, K, V, dropout=Dropout(0.5, 3)).forward(Q, K, V, dropout_seed=np.array(3))


def test_a_plan_tells_what_is_drawn() -> None:
    text = cuflash.plan(Q, K, V, dropout=Dropout(0.5, 3, 1)).explain()
    assert "dropout    p 0.5, seed 3, offset 1" in text
    assert "p 0.5, a seed from an array, offset 0" in cuflash.plan(Q, K, V, dropout=Dropout(0.5, np.array(3))).explain()


def test_a_cache_has_no_dropout() -> None:
    cache = cuflash.KVCache(batch=1, num_kv_heads=2, head_dim=8, capacity=16, dtype=np.float32)
    with pytest.raises(TypeError, match="dropout"):
        cache.attention(Q[:1], dropout=Dropout(0.1, 0))


def test_pytorch_differentiates_attention_with_dropout() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import cuflash.torch

    o, vjp = cuflash.attention_vjp(Q, K, V, dropout=Dropout(0.5, 3, 1))
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in (Q, K, V))
    for _ in range(2):
        output = cuflash.torch.attention(q, k, v, dropout=Dropout(0.5, 3, 1))
        np.testing.assert_array_equal(output.detach().numpy(), o)
    gradients = torch.autograd.grad(output, (q, k, v), torch.from_numpy(o.copy()))
    assert all(np.array_equal(x.numpy(), y) for x, y in zip(gradients, vjp(o), strict=True))
    other = cuflash.torch.attention(q, k, v, dropout=Dropout(0.5, 3, 2))
    np.testing.assert_array_equal(other.detach().numpy(), cuflash.attention(Q, K, V, dropout=Dropout(0.5, 3, 2)))
    for array in (np.array(3), torch.tensor(3)):
        output = cuflash.torch.attention(q, k, v, dropout=Dropout(0.5, array, 1))
        np.testing.assert_array_equal(output.detach().numpy(), o)
        gradients = torch.autograd.grad(output, (q, k, v), torch.from_numpy(o.copy()))
        assert all(np.array_equal(x.numpy(), y) for x, y in zip(gradients, vjp(o), strict=True))


def test_jax_differentiates_attention_with_dropout() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cuflash.jax

    o, vjp = cuflash.attention_vjp(Q, K, V, dropout=Dropout(0.5, 3, 1))

    def pulled(q: Any, k: Any, v: Any) -> Any:
        o, pullback = jax.vjp(lambda *x: cuflash.jax.attention(*x, dropout=Dropout(0.5, 3, 1)), q, k, v)
        return o, pullback(o)

    with jax.default_device(jax.devices("cpu")[0]):
        output, gradients = jax.jit(pulled)(*map(jax.numpy.asarray, (Q, K, V)))
        np.testing.assert_array_equal(output, o)
        assert all(np.array_equal(x, y) for x, y in zip(gradients, vjp(o), strict=True))
        other = cuflash.jax.attention(*map(jax.numpy.asarray, (Q, K, V)), dropout=Dropout(0.5, 3, 2))
        np.testing.assert_array_equal(other, cuflash.attention(Q, K, V, dropout=Dropout(0.5, 3, 2)))


def test_seeds_of_jax_are_keys_and_words() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cuflash.jax

    with jax.default_device(jax.devices("cpu")[0]):
        arrays, key = list(map(jax.numpy.asarray, (Q, K, V))), jax.random.key(5)  # its words are 0 and 5

        def call(seed: Any) -> Any:
            return cuflash.jax.attention(*arrays, dropout=Dropout(0.5, seed, 7))

        for seed, number in ((key, 5 << 32), (jax.numpy.array([5, 1], np.uint32), 5 + (1 << 32))):
            expected = cuflash.attention(Q, K, V, dropout=Dropout(0.5, number, 7))
            for output in (call(seed), jax.jit(call)(seed), jax.vmap(call)(seed[None])[0], call(number)):
                np.testing.assert_array_equal(output, expected)
            assert (Dropout(0.5, seed, 7).keep((2, 4, 4)) == Dropout(0.5, number, 7).keep((2, 4, 4))).all()
        np.testing.assert_array_equal(call(np.array(3)), call(3))
        with pytest.raises(UnsupportedProblem, match="seed must be an int, or a 0-d array .*; got a key of JAX: call "):
            cuflash.attention(Q, K, V, dropout=Dropout(0.5, key))
        wide = jax.random.key(5, impl="rbg")
        for wrong in (wide, jax.numpy.zeros(3, np.uint32), jax.random.split(key), jax.numpy.int32(3)):
            with pytest.raises(UnsupportedProblem, match=r"seed must be a key of .*: pass jax.random.bits\(key, 2, "):
                Dropout(0.5, wrong)
