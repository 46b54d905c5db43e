"""Score functions on every executor are within their bounds, and match other ways to compute the same scores."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cupy_machine import installed
from executors import CPU, GPU, SIM, Run, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import masks, scores
from cuflash.scores import Score
from cuflash.testing import Structure, assert_within, assert_within_bounds
from cuflash.testing.strategies import examples

# On the simulator each function needs a kernel that takes seconds to build; test_score_kernels.py runs a few of them.
IS_LONG = settings.default.max_examples > 100
ON_SIM = (pytest.param(SIM, marks=needs_compiler),) if IS_LONG else ()
EVERYWHERE = (CPU, pytest.param(SIM, marks=needs_compiler), pytest.param(GPU, marks=pytest.mark.gpu))
RUNS = (CPU, *ON_SIM, pytest.param(GPU, marks=pytest.mark.gpu))
on_executors = pytest.mark.parametrize("run", RUNS, ids=str)


def put_score(run: Run, score: Score | None) -> Score | None:
    """Return a score with its arrays on the executor's device."""
    if score is None or not run.is_on_device:
        return score
    return Score._of_reserved(score.function, **{name: run.put(array) for name, array in score.arrays.items()})


def everything(run: Run, example: Any, **options: Any) -> dict[str, Any]:
    """Return all results of a call, with the gradients of the score's arrays as `others`."""
    q, k, v, do, dlse = (run.put(getattr(example, name)) for name in ("q", "k", "v", "do", "dlse"))
    mask = run.put_mask(example.mask, example.q, example.k, example.v)
    (o, lse), vjp = cuflash.attention_vjp(
        q, k, v, mask=mask, scale=example.scale, score=put_score(run, example.score), wrt=example.wrt,
        return_lse=True, **run.options, **options,
    )  # fmt: skip
    gradients = vjp(do, dlse)
    results = zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients))
    arrays = {name: run.get(x) for name, x in results}
    return arrays | {"others": {name: run.get(gradients[name]) for name in example.wrt}}


@on_executors
def test_random_functions_are_within_their_bounds(run: Run) -> None:
    @settings(max_examples=60 if run.most_examples is None else 4)
    @given(examples(most_scores=1 << 12, most_rows=300, widest=32, longest=100, has_score=True))
    def check(example: Any) -> None:
        example = run.rounded(example)
        assert_within_bounds(example, **everything(run, example))

    check()


# Score functions of the literature by name, with arrays for 4 heads, 90 queries and 130 keys.
RNG = np.random.default_rng(5)
SLOPES, PER_HEAD = scores.alibi_slopes(4), np.linspace(0.5, 2, 4, dtype=np.float32)
NEAR = RNG.standard_normal((4, 33)).astype(np.float32)
TEN = {
    "softcap": scores.softcap(3.0),
    "alibi": scores.alibi(SLOPES, align="top_left"),
    "alibi at the last key": scores.alibi(SLOPES, align="bottom_right"),
    "bias": scores.bias(RNG.standard_normal((2, 4, 90, 130)).astype(np.float16)),
    "T5": scores.relative_position(
        RNG.standard_normal((4, 32)).astype(np.float32), bidirectional=True, align="top_left"
    ),
    "T5 at the last key": scores.relative_position(
        RNG.standard_normal((4, 32)).astype(np.float32), 50, bidirectional=False, align="bottom_right"
    ),
    "clipped relative": Score(lambda s, b, h, i, j, near: s + near[h, np.clip(j - i, -16, 16) + 16], near=NEAR),
    "temperature": scores.temperature(PER_HEAD),
    "two temperatures": scores.temperature(PER_HEAD).renamed({"per_head": "again"}) @ scores.temperature(PER_HEAD + 1),
    "learnable number": Score(lambda s, b, h, i, j, tau: s * tau + tau, tau=np.array(0.7, np.float32)),
    "boost": Score(lambda s, b, h, i, j: np.where(np.abs(i - j) <= 8, 2 * s, s)),
    "softcap and alibi": scores.alibi(SLOPES, align="top_left") @ scores.softcap(2.0),
    "power of the distance": Score(
        lambda s, b, h, i, j, power: s - 0.1 * np.abs(i - j) ** power[h], power=PER_HEAD
    ),
    "cap by arctan": Score(lambda s, b, h, i, j: 2.0 * np.arctan(s / 2.0)),
    "polynomial": Score(lambda s, b, h, i, j: np.log(1.0 + s * s) + s**3 / 10.0),
}


@on_executors
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", TEN)
def test_functions_of_the_literature_are_within_their_bounds(run: Run, name: str, dtype: str) -> None:
    plain = example_of(run, Structure(
        q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=4, num_kv_heads=2, seqlen_q=90, seqlen_kv=130, head_dim=24,
        value_dim=16, dtype=dtype, mask=masks.Causal("bottom_right"),
    ))  # fmt: skip
    wrt = tuple(array.name for array in TEN[name].program.arrays if array.kind == "real")
    example = plain.but(score=TEN[name], wrt=wrt)
    assert assert_within_bounds(example, **everything(run, example)) < 1


@on_executors
def test_a_sink_takes_part_beside_a_score(run: Run) -> None:
    causal = masks.Causal("top_left")
    structure = Structure(num_heads=4, num_kv_heads=2, seqlen_q=40, seqlen_kv=60, sink=(4,), mask=causal)
    example = example_of(run, structure).but(score=TEN["softcap and alibi"], wrt=("slopes",))
    assert_within_bounds(example, **everything(run, example, sink=run.put(example.sink)))


# Functions that can be computed in another way


STRUCTURES = (
    Structure(num_heads=4, num_kv_heads=2, seqlen_q=37, seqlen_kv=53, head_dim=16, mask=masks.Causal("bottom_right")),
    Structure(q_batch=(2,), k_batch=(1,), v_batch=(2,), num_heads=2, num_kv_heads=1, seqlen_q=70, seqlen_kv=33,
              dtype="float16", has_dlse=False),
    Structure(has_heads=False, seqlen_q=20, seqlen_kv=20, dtype="float64", mask=masks.SlidingWindow(3, 5)),
)  # fmt: skip
on_structures = pytest.mark.parametrize("structure", STRUCTURES, ids=["causal", "batch", "2-D"])


def example_of(run: Run, structure: Structure) -> Any:
    return run.rounded(structure.example())


def array_of(example: Any, *axes: str, seed: int = 1) -> np.ndarray:
    """Return random reals with some of the axes b, h, i, j and "..." of an example, in the dtype of its sums."""
    shape = example.problem.mask_shape
    extents = {"b": (shape.num_batch,), "h": (shape.num_heads,), "i": (shape.seqlen_q,), "j": (shape.seqlen_kv,)}
    full = sum((extents.get(axis, shape.batch) for axis in axes), ())
    return np.random.default_rng(seed).standard_normal(full).astype(example.problem.accumulator)


def biased(example: Any, bias: np.ndarray, wrt: tuple[str, ...] = ()) -> Any:
    """Return an example with a bias [..., heads, queries, keys]; 2-D operands use the bias's only head."""
    return example.but(score=scores.bias(bias if example.problem.has_heads else bias[0]), wrt=wrt)


def with_score(example: Any, function: Any, wrt: tuple[str, ...] = (), **arrays: Any) -> Any:
    return example.but(score=Score._of_reserved(function, **arrays), wrt=wrt)


def same(first: dict[str, Any], second: dict[str, Any], *of: Any, names: tuple[str, ...] = ()) -> None:
    """Assert that results agree within the sum of the bounds of their examples."""
    for name in names or ("o", "lse", "dq", "dk", "dv"):
        bound = sum(getattr(each.bounds, name) for each in of)
        assert_within(name, second[name], first[name], bound, of[0])


def identical(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert first[name].tobytes() == second[name].tobytes(), name
    for name, result in first["others"].items():
        assert result.tobytes() == second["others"][name].tobytes(), name


@on_executors
@on_structures
def test_a_bias_of_minus_infinity_is_a_mask(run: Run, structure: Structure) -> None:
    plain = example_of(run, structure)
    hides = array_of(plain, "h", "i", "j") < -1
    hides[:, 0] = True  # the first query attends no key
    hidden = biased(plain, np.where(hides, -np.inf, 0).astype(np.float32), ("bias",))
    hides = hides if plain.problem.has_heads else hides[0]
    masked = plain.but(mask=plain.allowed & ~hides)
    results = everything(run, hidden)
    same(everything(run, masked), results, masked, hidden)
    assert (results["others"]["bias"][hides] == 0).all()


@on_executors
@on_structures
def test_positions_are_those_of_queries_and_keys(run: Run, structure: Structure) -> None:
    """The function keeps one key for each query, and o equals that key's value bit for bit."""
    plain = example_of(run, replace(structure, mask=None))
    seqlen_q, seqlen_kv = plain.problem.mask_shape[2:]
    order = np.random.default_rng(4).integers(0, seqlen_kv, (plain.problem.num_heads, seqlen_q))

    def f(s, b, h, i, j, order):
        return np.where(order[h, i] == j, 0.0, -np.inf)

    results = everything(run, with_score(plain, f, order=order))
    values = plain.v[None] if plain.v.ndim == 2 else np.repeat(plain.v, plain.problem.group_size, axis=-3)
    batch = plain.problem.batch
    index = np.broadcast_to(order, (*batch, *order.shape))[..., None]
    picked = np.take_along_axis(np.broadcast_to(values, (*batch, *values.shape[-3:])), index, axis=-2)
    np.testing.assert_array_equal(results["o"], picked.reshape(results["o"].shape))
    np.testing.assert_array_equal(results["lse"], 0)


@on_executors
@on_structures
def test_what_a_function_gives_at_masked_places_does_not_matter(run: Run, structure: Structure) -> None:
    plain = example_of(run, structure)
    bias = array_of(plain, "...", "h", "i", "j")
    allowed = np.broadcast_to(plain.allowed, bias.shape).copy()
    allowed[..., 3] = False
    masked = plain.but(mask=allowed if plain.problem.has_heads else allowed[0])
    first, second = (
        everything(run, biased(masked, each, ("bias",))) for each in (bias, np.where(allowed, bias, np.nan))
    )
    identical(first, second)
    assert (first["others"]["bias"][~masked.mask] == 0).all()


@on_executors
@pytest.mark.parametrize("layout", ["transposed", "padded", "stepped", "negative", "offset", "broadcast"])
def test_arrays_may_lie_in_any_way(run: Run, layout: str) -> None:
    from cuflash.testing.strategies import laid_out

    plain = example_of(run, STRUCTURES[0])
    bias = laid_out(array_of(plain, "h", "i", "j"), layout)
    first, second = (
        everything(run, plain.but(score=scores.bias(each), wrt=("bias",))) for each in (bias, bias.copy("C"))
    )
    identical(first, second)


@on_executors
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 5), (5, 0), (1, 1), (0, 0)])
def test_the_smallest_problems(run: Run, seqlen_q: int, seqlen_kv: int) -> None:
    plain = example_of(run, Structure(num_heads=2, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv))
    example = plain.but(score=scores.bias(array_of(plain, "h", "i", "j")), wrt=("bias",))
    assert_within_bounds(example, **everything(run, example))


@on_executors
def test_a_hidden_row_is_empty(run: Run) -> None:
    plain = example_of(run, STRUCTURES[0])
    example = with_score(plain, lambda s, b, h, i, j: np.where(i % 3 == 0, -np.inf, s))
    results = everything(run, example)
    assert (results["o"][..., ::3, :] == 0).all() and (results["lse"][..., ::3] == -np.inf).all()
    assert (results["dq"][..., ::3, :] == 0).all() and np.isfinite(results["dk"]).all()
    assert_within_bounds(example, **results)


@on_executors
def test_nan_stays_in_its_row(run: Run) -> None:
    plain = example_of(run, replace(STRUCTURES[0], mask=None))
    results = everything(run, with_score(plain, lambda s, b, h, i, j: np.where((i == 5) & (j == 7), np.nan, s)))
    is_row = np.arange(37) == 5
    assert np.isnan(results["o"][:, is_row]).all() and np.isnan(results["lse"][:, is_row]).all()
    assert np.isfinite(results["o"][:, ~is_row]).all() and np.isfinite(results["dq"][:, ~is_row]).all()


@on_executors
def test_calls_repeat_bitwise(run: Run) -> None:
    plain = example_of(run, STRUCTURES[0])
    example = with_score(
        plain, lambda s, b, h, i, j, t, c: t[h] * np.tanh(s) + c[np.clip(i - j, 0, 3)], ("t", "c"),
        t=array_of(plain, "h"), c=np.arange(4, dtype=np.float32),
    )  # fmt: skip
    first, second = everything(run, example), everything(run, example)
    if run.is_on_device:  # blocks that run concurrently add to dq and to captured gradients in any order
        assert all(first[name].tobytes() == second[name].tobytes() for name in ("o", "lse", "dk", "dv"))
    else:
        identical(first, second)


def test_sums_of_gradients_do_not_depend_on_threads(monkeypatch) -> None:
    from cuflash.planning import host

    plain = example_of(CPU, replace(STRUCTURES[0], seqlen_q=1100, seqlen_kv=90, num_heads=2, mask=None))
    example = plain.but(score=scores.temperature(array_of(plain, "h")), wrt=("per_head",))
    monkeypatch.setattr(host, "_SCORES_PER_WORKER", 1)
    runs = []
    for processors in (2, 3, 2):
        device = replace(cuflash.DeviceSpec.host(), num_processors=processors)
        ready = cuflash.plan(example.q, example.k, example.v, score=example.score, wrt=example.wrt, device=device)
        o, lse = ready.forward(example.q, example.k, example.v)
        runs.append(ready.backward(example.do, example.q, example.k, example.v, o, lse)["per_head"])
    assert runs[0].tobytes() == runs[1].tobytes() == runs[2].tobytes()


# The calls


@on_executors
def test_the_cap_is_first_then_the_bias_then_the_score(run: Run) -> None:
    plain = example_of(run, STRUCTURES[0])
    bias, slopes = array_of(plain, "h", "i", "j"), scores.alibi_slopes(4)

    def all_in_one(s, b, h, i, j, bias, slopes):
        return 2 * (1.5 * np.tanh(s / 1.5) + bias[h, i, j]) - slopes[h] * np.abs(i - j)

    def doubled(s, b, h, i, j, slopes):
        return 2 * s - slopes[h] * np.abs(i - j)

    whole = with_score(plain, all_in_one, ("bias",), bias=bias, slopes=slopes)
    parts = plain.but(score=Score(doubled, slopes=slopes), wrt=("bias",))
    identical(everything(run, whole), everything(run, parts, softcap=1.5, bias=run.put(bias)))


def test_a_bare_function_is_traced_at_each_call() -> None:
    q = np.ones((2, 4, 8), np.float32)
    factor = 1.0

    def f(s, b, h, i, j):
        return s - factor * j

    first = cuflash.attention(q, q, q, score=f, return_lse=True)[1]
    factor = 3.0
    second = cuflash.attention(q, q, q, score=f, return_lse=True)[1]
    wanted = np.log(np.exp(np.sqrt(8) - factor * np.arange(4)).sum())
    assert_within("lse", second, np.full((2, 4), wanted), cuflash.error_bound(q, q, q, score=f).lse)
    assert (first != second).all()


def test_another_array_of_equal_shape_is_read() -> None:
    """Calls are looked up by layouts; neither the contents of arrays nor the values of numbers are part of the key."""
    q = np.ones((2, 4, 8), np.float32)
    for cap, value in ((2.0, 0.0), (2.0, 5.0), (3.0, 5.0)):
        bias = np.full((4, 4), value, np.float32)
        options = {"softcap": cap, "bias": bias}
        lse = cuflash.attention(q, q, q, **options, return_lse=True)[1]
        wanted = cap * np.tanh(np.sqrt(8) / cap) + value + np.log(4)
        assert_within("lse", lse, np.full((2, 4), wanted), cuflash.error_bound(q, q, q, **options).lse)


def test_plans_keep_arrays_and_take_others() -> None:
    q = np.ones((2, 4, 8), np.float32)
    slopes = np.array([0.5, 0.25], np.float32)
    ready = cuflash.plan(q, q, q, score=scores.alibi(slopes), wrt="slopes")
    o, lse = ready.forward(q, q, q)
    np.testing.assert_array_equal(lse, cuflash.attention(q, q, q, score=scores.alibi(slopes), return_lse=True)[1])
    _, other = ready.forward(q, q, q, slopes=2 * slopes)
    steeper = scores.alibi(2 * slopes)
    np.testing.assert_array_equal(other, cuflash.attention(q, q, q, score=steeper, return_lse=True)[1])
    gradient = ready.backward(o, q, q, q, o, lse)["slopes"]
    assert gradient.shape == (2,) and gradient.dtype == np.float32
    with pytest.raises(cuflash.UnsupportedProblem, match=r"slopes must have shape \(2,\) and dtype .*; got \(3,\)"):
        ready.forward(q, q, q, slopes=np.zeros(3, np.float32))


def test_plans_are_made_of_shapes() -> None:
    shape = cuflash.ShapeDtype((2, 4, 8), np.float32)
    q = np.ones((2, 4, 8), np.float32)
    bias = np.arange(16, dtype=np.float32).reshape(4, 4)
    ready = cuflash.plan(shape, shape, shape, bias=cuflash.ShapeDtype((4, 4), np.float32))
    o, _ = ready.forward(q, q, q, bias=bias)
    np.testing.assert_array_equal(o, cuflash.attention(q, q, q, bias=bias))
    with pytest.raises(cuflash.UnsupportedProblem, match="bias is required"):
        ready.forward(q, q, q)
    assert "score      " in ready.explain() and "arrays bias" in ready.explain()


Q = np.zeros((2, 3, 8), np.float32)
WRONG = [
    ({"softcap": 0.0}, "softcap must be a positive finite number; got 0.0"),
    ({"softcap": 2**2000}, "softcap must be a positive finite number; got an int of 2001 bits"),
    ({"softcap": 1e39}, r"softcap and .* must be from 1.2e-38 to 3.4e\+38 .* float32 scores; got 1e\+39: use such"),
    ({"score": lambda s, b, h, i, j: np.where(i < j, -1e300, s)}, r"numbers of a score function.*; got -1e\+300: use"),
    ({"bias": np.zeros((3, 3), bool)}, "bias must be .*; got bool: a bool array is a mask: write mask=bias"),
    ({"bias": np.zeros((3, 3), int)}, r"bias must be .*, float64; got int64: cast it to float32"),
    ({"bias": np.zeros((2, 3), np.float32)}, r"bias must broadcast to .* = \(2, 3, 3\); got \(2, 3\)"),
    (
        {"score": scores.alibi(np.zeros(1))},
        r"axis 0 of slopes must have an element for each of 2 query heads, since its index is h; got shape \(1,\)",
    ),
    ({"score": scores.alibi(np.zeros(2)), "wrt": "slope"}, "wrt must name array .* there are 'slopes'; got 'slope'"),
    (
        {"score": scores.relative_position(np.zeros((2, 8)), bidirectional=True), "wrt": "bucket"},
        "wrt must name real arrays; got 'bucket', which does not hold real numbers and so has no gradient",
    ),
    (
        {"score": scores.bias(Q[:, :, :3]), "bias": Q[:, :, :3] + 1},
        r"bias names an array of bias and another of bias: .* by renamed\({'bias': 'bias_2'}\)",
    ),
]


TWO_ARRAYS = Score(lambda s, b, h, i, j, x, y: s + x[h] * y[h], x=SLOPES, y=SLOPES)
WRONG_CALLS = [
    *((lambda options=options: cuflash.attention_vjp(Q, Q, Q, **options), message) for options, message in WRONG),
    (  # other libraries store T5's table as [num_buckets, num_heads]
        lambda: cuflash.plan(Q, Q, Q, score=scores.relative_position(np.zeros((32, 2)), bidirectional=False)),
        r"axis 0 of table .* 2 query heads, .*; got shape \(32, 2\)",
    ),
    (
        lambda: scores.alibi(SLOPES).renamed({"slope": "x"}),
        "names must have names of captured arrays, slopes; got 'slope'",
    ),
    (lambda: scores.alibi(SLOPES).renamed({"slopes": "q"}), "names must be Python names other than q, .*; got 'q'"),
    (lambda: scores.alibi(SLOPES).renamed({"slopes": "a b"}), "names must be Python names other than .*; got 'a b'"),
    (lambda: scores.alibi(SLOPES).renamed({"slopes": "lambda"}), "got 'lambda'"),
    (lambda: scores.alibi(SLOPES).renamed({"slopes": "self"}), "got 'self'"),
    (lambda: scores.alibi(SLOPES).renamed({"slopes": 3}), "got 3"),
    (lambda: scores.softcap(2.0).renamed({"x": "y"}), "captured arrays, of which softcap has none; got 'x'"),
    (lambda: TWO_ARRAYS.renamed({"x": "y"}), "names must differ from array to array; got y, y"),
    (
        lambda: scores.alibi(np.arange(4)),
        "slopes must be float16, bfloat16, float32, float64; got int64: cast them to float32",
    ),
    (lambda: scores.softcap(-3), "softcap must be a positive finite number; got -3"),
    (lambda: scores.softcap(3, fast=1), "fast must be True or False; got 1"),
    (lambda: scores.alibi(np.zeros((2, 2))), r"slopes must have 1 axes; got shape \(2, 2\)"),
    (lambda: scores.alibi_slopes(10**30), "num_heads must be an int from 1 to .*; got an int of 100 bits"),
    (
        lambda: scores.relative_position(np.zeros((2, 8)), bidirectional=np.zeros(3)),  # type: ignore[arg-type]
        "bidirectional must be True or False; got an array",
    ),
    (lambda: scores.alibi_slopes(0), r"num_heads must be an int from 1 to 2\*\*30; got 0"),
    (lambda: scores.temperature(np.zeros(())), "per_head must have 1 axes"),
    (lambda: scores.relative_position(np.zeros((2, 3)), bidirectional=True), "table must have at least 4 buckets"),
    (lambda: scores.relative_position(np.zeros((2, 8)), 0, bidirectional=1), "max_distance must be an int from 1"),
    (lambda: scores.relative_position_2d(np.zeros((2, 4, 3)), 2), r"table must have shape \(num_heads, 2 height"),
    (lambda: scores.relative_position_2d(np.zeros((2, 3, 3)), 2.0), "width must be an int of at least 1; got 2.0"),
    (lambda: scores.bias(np.zeros(3, bool)), "a bool array is a mask"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(cuflash.UnsupportedProblem, match=message):
        call()


def test_arrays_of_other_names_are_the_same_arrays() -> None:
    table = NEAR[:2, :5]
    score = Score(lambda s, b, h, i, j, near, far: s + near[h, 0] - far[h, 1], near=table, far=table + 1)
    other = score.renamed({"far": "near", "near": "far"})
    assert other.arrays["near"] is score.arrays["far"] and other.name == score.name
    assert float(other(0.0, 0, 1, 0, 0)) == float(score(0.0, 0, 1, 0, 0)) == table[1, 0] - (table + 1)[1, 1]
    shared = scores.temperature(PER_HEAD)
    unpickled = pickle.loads(pickle.dumps(shared.renamed({"per_head": "again"}) @ shared))
    assert [*unpickled.arrays] == ["per_head", "again"] and float(unpickled(1.0, 0, 3, 0, 0)) == PER_HEAD[3] ** 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble, np.int8])
def test_a_cap_may_be_a_number_of_numpy(dtype: Any) -> None:
    assert scores.softcap(dtype(3)).numbers == scores.softcap(3.0).numbers
    infinity = np.inf if dtype is np.int8 else dtype(np.inf)
    for wrong in (infinity, -infinity, dtype(0)):
        with pytest.raises(cuflash.UnsupportedProblem, match="softcap must be a positive finite number"):
            scores.softcap(wrong)
        with pytest.raises(cuflash.UnsupportedProblem, match="softcap must be a positive finite number"):
            cuflash.attention(Q, Q, Q, softcap=wrong)


@pytest.mark.parametrize("run", EVERYWHERE, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_cap_is_within_its_bounds_or_refused(run: Run, dtype: str) -> None:
    """A softcap of any size that the dtype of scores can represent gives no NaN; any other is refused."""
    limits = np.finfo(np.float64 if dtype == "float64" else np.float32)
    plain = Structure(dtype=dtype, num_heads=2, seqlen_q=5, seqlen_kv=9, head_dim=8).example()
    plain = plain.but(q=plain.q * np.arange(5).astype(plain.q.dtype)[:, None])  # the first query's scores are 0

    @run.settings
    @given(st.floats(5e-324, sys.float_info.max) | st.sampled_from([float(limits.max), float(limits.smallest_normal)]))
    def check(cap: float) -> None:
        example = plain.but(score=scores.softcap(cap))
        if float(limits.smallest_normal) <= cap <= float(limits.max):
            results = everything(run, run.rounded(example))
            assert np.isfinite(results["o"].astype(np.float64)).all()
            assert_within_bounds(run.rounded(example), **results)
        else:
            for options in ({"score": example.score}, {"softcap": cap}):
                with pytest.raises(cuflash.UnsupportedProblem, match="softcap and finite nonzero numbers .* scores"):
                    cuflash.attention(*map(run.put, (plain.q, plain.k, plain.v)), **options, **run.options)
                with pytest.raises(cuflash.UnsupportedProblem, match="softcap and finite nonzero numbers .* scores"):
                    cuflash.error_bound(plain.q, plain.k, plain.v, **options)

    check()


def test_infinite_numbers_and_0_are_numbers_of_a_score() -> None:
    least = float(np.finfo(np.float32).min)
    for hidden in (-np.inf, least):
        o = cuflash.attention(Q, Q, Q + 1, score=lambda s, b, h, i, j, hidden=hidden: np.where(i < j, hidden, s * 0.0))
        np.testing.assert_array_equal(o, Q + 1)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(cuflash.UnsupportedProblem) as error:
        cuflash.attention_vjp(Q, Q, Q, softcap=-1, score=lambda s, b, h, i, j: s if s else 0, scale="1", wrt=3)
    assert len(error.value.reasons) >= 3


# The library


def test_the_buckets_of_t5_are_the_papers() -> None:
    """Half of the buckets are for single distances, others grow logarithmically, and one has all longer distances."""

    def bucket(relative: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
        first = 0
        if bidirectional:
            num_buckets //= 2
            first, distance = (num_buckets, relative) if relative > 0 else (0, -relative)
        else:
            distance = max(-relative, 0)
        exact = num_buckets // 2
        if distance < exact:
            return first + distance
        steps = np.log2(distance / exact) / np.log2(max_distance / exact) * (num_buckets - exact)
        return first + min(exact + int(steps), num_buckets - 1)

    for size, furthest, both in ((32, 128, True), (32, 128, False), (8, 20, True), (6, 16, False)):
        score = scores.relative_position(np.arange(size, dtype=np.float64)[None], furthest, bidirectional=both)
        i, j = np.ogrid[:300, :300]
        wanted = [bucket(each, size, furthest, both) for each in range(-299, 300)]
        np.testing.assert_array_equal(score(0.0, 0, 0, i, j), np.array(wanted)[j - i + 299])


def test_buckets_lie_where_the_table_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with installed(monkeypatch, tmp_path) as cupy:
        score = scores.relative_position(cupy.asarray(np.zeros((2, 8))), 16, bidirectional=True)
        assert type(score.arrays["bucket"]) is type(score.arrays["table"]) is cupy.ndarray
        host = scores.relative_position(np.zeros((2, 8)), 16, bidirectional=True)
        np.testing.assert_array_equal(score.arrays["bucket"].get(), host.arrays["bucket"])


def test_the_slopes_of_alibi_are_the_papers() -> None:
    np.testing.assert_array_equal(scores.alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    assert scores.alibi_slopes(12)[8:].tolist() == (2.0 ** -np.array([0.5, 1.5, 2.5, 3.5])).astype(np.float32).tolist()
    assert scores.alibi_slopes(1).tolist() == [2.0**-8]


def test_offsets_in_an_image_are_those_of_its_pixels() -> None:
    height, width = 3, 4
    table = np.random.default_rng(0).standard_normal((2, 2 * height - 1, 2 * width - 1))
    q = np.random.default_rng(1).standard_normal((2, height * width, 8))
    rows, columns = np.divmod(np.arange(height * width), width)
    bias = table[:, rows[:, None] - rows + height - 1, columns[:, None] - columns + width - 1]
    o = cuflash.attention(q, q, q, score=scores.relative_position_2d(table, width))
    np.testing.assert_array_equal(o, cuflash.attention(q, q, q, bias=bias))


USES_OF_SCORES: dict[str, Any] = {
    "attention": lambda f: cuflash.attention(Q, Q, Q, score=f),
    "softcap": lambda f: cuflash.attention(Q, Q, Q, score=f, softcap=3.0),
    "further faults": lambda f: cuflash.attention(Q, Q, Q, score=f, scale="1"),
    "vjp": lambda f: cuflash.attention_vjp(Q, Q, Q, score=f),
    "plan": lambda f: cuflash.plan(Q, Q, Q, score=f),
    "Score": Score,
    "recall": lambda f: cuflash.study.recall(Q, Q, Q, mask=cuflash.masks.Causal(), score=f),
    "error_bound": lambda f: cuflash.error_bound(Q, Q, Q, score=f),
}


@pytest.mark.parametrize("use", USES_OF_SCORES)
@pytest.mark.parametrize("kind", [ZeroDivisionError, TypeError, ValueError, KeyError, IndexError, AttributeError])
def test_an_error_of_a_score_function_comes_first_and_alone(kind: type[Exception], use: str) -> None:
    def mine(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        raise kind("no such table")

    with pytest.raises(kind, match="no such table") as caught:
        USES_OF_SCORES[use](mine)
    error = caught.value
    assert type(error) is kind and error.__context__ is error.__cause__ is None
    assert error.__notes__ == ["Raised in the score function mine, which was called with symbols for s, b, h, i and j."]


SCORE = scores.softcap(3.0)
OPERATORS: dict[str, tuple[Any, str]] = {
    "sum": (lambda: SCORE + SCORE, "scores have no +: compose them with @, where (a @ b)(s) is a(b(s)), or write one"),
    "difference": (lambda: SCORE - scores.alibi(SLOPES), "scores have no -: compose them with @"),
    "sum with a number": (lambda: 1 + SCORE, "scores have no +: compose them with @"),
    "product with an array": (lambda: SLOPES * SCORE, "scores have no *: compose them with @"),
    "product of matrices": (lambda: SLOPES @ SCORE, "scores have no @: compose them with @"),
    "and of bits": (lambda: SCORE & SCORE, "scores have no &: compose them with @"),
    "or of bits": (lambda: SCORE | SCORE, "scores have no |: compose them with @"),
    "quotient": (lambda: SCORE / 2, "scores have no /: compose them with @"),
    "negative": (lambda: -SCORE, "scores have no unary -: compose them with @"),
    "composition with a function": (lambda: SCORE @ np.tanh, "@ composes two scores; got ufunc: convert a function"),
    "composition of a function": (lambda: (lambda s: s) @ SCORE, "scores have no @: compose them with @"),
    "and": (lambda: SCORE and SCORE, "scores have no truth value: compose them with @"),
    "not": (lambda: not SCORE, "scores have no truth value: compose them with @"),
    "slopes of a number of heads": (
        lambda: scores.alibi(8), "slopes must be an array with numbers for each head; got 8: pass scores.alibi_slopes"
    ),
    "one slope": (lambda: scores.alibi(0.5), "got 0.5: pass scores.alibi_slopes(num_heads)"),
    "one temperature": (lambda: scores.temperature(2.0), "got 2.0: for the same number for all heads pass np.full("),
    "a list of words": (lambda: scores.alibi(["a"]), "slopes must be an array"),
    "a number as a bias": (lambda: scores.bias(1.0), "must be an array"),
    "a bias of a call": (lambda: cuflash.attention(Q, Q, Q, bias=1.0), "bias must be"),
    "a word as a score": (lambda: cuflash.attention(Q, Q, Q, score="alibi"), "score must be a Score or a function"),
    "a word as names": (lambda: TWO_ARRAYS.renamed("x"), "names must be a mapping"),
    "a number as arrays": (lambda: TWO_ARRAYS._with_arrays(3), "arrays must be a mapping of names to arrays; got 3"),
    "a number of buckets": (
        lambda: scores.relative_position(32, bidirectional=True), "may start as np.zeros((num_heads, 32), np.float32)"
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_a_score_is_not_made_of_is_told_in_words(name: str) -> None:
    make, message = OPERATORS[name]
    with pytest.raises(TypeError) as error:
        make()
    assert message in str(error.value)
