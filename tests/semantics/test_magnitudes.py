"""Only scores matter, not the sizes of q, k and scale: powers of two that cancel change no bit, and bounds always hold.

A call never raises a floating-point error, even if the caller has set NumPy to raise them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from cuflash.bounds.rounding import limits
from cuflash.testing import Example, assertions, strategies
from executors import RUNS, Run, on_every_backward, on_every_executor
from hypothesis import given
from hypothesis import strategies as st

import cuflash

Everything = Callable[[Example], dict[str, Any]]  # returns all results of an example by name

WIDE = ("bfloat16", "float32", "float64")  # no float16: products of two float16 numbers are normal in float32
on_the_host = pytest.mark.parametrize("run", RUNS[:2], ids=str)


def tame(**limits: Any) -> st.SearchStrategy[Example]:
    """Return a strategy for examples whose scores, weights and gradients are far from the limits of float32."""
    structures = strategies.structures(**{"most_scores": 1 << 12, "widest": 32, "dtypes": WIDE, **limits})
    values, scales = st.sampled_from(["normal", "lattice"]), st.sampled_from([None, 0.3, -0.3])
    return st.builds(
        lambda structure, values, scale: replace(structure, values=values, scale=scale).example(),
        structures, values, scales,
    )  # fmt: skip


@st.composite
def powers(draw: st.DrawFn) -> tuple[int, int]:
    """Draw exponents for q and for k, with sums around the limit below which the library leaves scales unchanged."""
    both = draw(st.sampled_from([0, 1, 60, 64, 65, 66, 67, 70, 130, 170])) * draw(st.sampled_from([-1, 1]))
    of_q = draw(st.integers(max(-85, both - 85), min(85, both + 85)))
    return of_q, both - of_q


def scaled(example: Example, of_q: int, of_k: int) -> Example:
    """Return an example with equal scores: q times 2^of_q, k times 2^of_k, and a scale that cancels both."""

    def times(array: Any, exponent: int) -> Any:
        return np.ldexp(array.astype(np.float64), exponent).astype(array.dtype)

    scale = float(np.ldexp(example.problem.softmax_scale, -of_q - of_k))
    return example.but(q=times(example.q, of_q), k=times(example.k, of_k), scale=scale)


def assert_powers_cancel(everything: Everything, example: Example, of_q: int, of_k: int) -> None:
    """Assert that all bits of results are equal, except for the powers of two by which gradients differ."""
    if example.q.dtype == np.float64:
        of_q, of_k = 6 * of_q, 6 * of_k
    plain, far = (everything(scaled(example, *powers)) for powers in ((0, 0), (of_q, of_k)))  # with equal layouts
    for name, exponent in {"o": 0, "lse": 0, "dq": of_q, "dk": of_k, "dv": 0}.items():
        if name in plain:
            actual = np.ldexp(far[name].astype(np.float64), exponent)
            assert np.array_equal(actual, plain[name].astype(np.float64)), name


def assert_operands_may_be_huge(everything: Everything, example: Example) -> None:
    """Assert that o and lse are within bounds if q or k is as large as its dtype allows, and the other as small."""
    most = 1021 if example.q.dtype == np.float64 else 125  # an exponent of 2; the smallest normal number is 2^-126
    lattice = {name: assertions.on_lattice(getattr(example, name)) for name in ("q", "k")}
    for of_q in (most, -most):
        far = scaled(example.but(**lattice), of_q, -of_q)
        results = everything(far)
        assertions.assert_within_bounds(far, o=results["o"], lse=results["lse"])


def _repeatable(run: Run) -> Everything:
    """Return a function that computes those results of a run that are bitwise reproducible."""

    def everything(example: Example) -> dict[str, Any]:
        results = run.everything(example)
        if run.is_on_device and not run.deterministic:
            del results["dq"]
        return results

    return everything


@on_every_backward
def test_powers_of_two_that_cancel_change_no_bit(run: Run) -> None:
    @run.settings
    @given(tame().map(run.rounded), powers())
    def check(example: Example, powers: tuple[int, int]) -> None:
        assert_powers_cancel(_repeatable(run), example, *powers)

    check()


@on_every_executor
def test_an_operand_may_be_as_large_as_its_dtype_holds(run: Run) -> None:
    @run.settings
    @given(tame(most_scores=1 << 10).map(run.rounded), st.sampled_from([0.125, 1.0, -3.7, 100.0]))
    def check(example: Example, scale: float) -> None:
        assert_operands_may_be_huge(run.everything, example.but(scale=scale))

    check()


@on_every_executor
def test_results_of_any_magnitudes_are_within_their_bounds(run: Run) -> None:
    @run.settings
    @given(tame().map(run.rounded), st.floats(-20, 20), st.floats(-20, 20))
    def check(example: Example, of_q: float, of_k: float) -> None:
        if example.q.dtype == np.float64:
            of_q, of_k = 7.5 * of_q, 7.5 * of_k
        q, k = (x.astype(np.float64) * 10.0**by for x, by in ((example.q, of_q), (example.k, of_k)))
        scale = example.problem.softmax_scale * 10.0**-of_q * 10.0**-of_k
        far = example.but(q=q.astype(example.q.dtype), k=k.astype(example.k.dtype), scale=scale)
        assertions.assert_within_bounds(far, **run.everything(far))

    check()


@on_every_executor
def test_results_of_values_and_their_gradients_of_any_size_are_within_their_bounds(run: Run) -> None:
    """Sums may overflow where their results do not; then the bounds promise nothing."""

    @run.settings
    @given(tame().map(run.rounded), *[st.floats(-1, 1)] * 2)
    def check(example: Example, of_v: float, of_do: float) -> None:
        largest = float(limits(example.q.dtype).max)
        with np.errstate(over="ignore"):
            v, do = (x.astype(np.float64) * largest**by for x, by in ((example.v, of_v), (example.do, of_do)))
        v, do = (np.clip(x, -largest, largest).astype(example.q.dtype) for x in (v, do))
        far = example.but(v=v, do=do)
        assertions.assert_within_bounds(far, **run.everything(far))

    check()


@on_every_executor
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [*product(("float16", *WIDE), (1e39, 1e-300, -5e-324)), ("float16", -1e300), ("float64", -1e300)],
)
def test_a_score_of_zero_stays_zero_at_any_scale(run: Run, dtype: str, scale: float) -> None:
    structure = strategies.Structure(seqlen_q=4, seqlen_kv=8, dtype=dtype, values="lattice", has_dlse=False)
    example = structure.example()
    example = example.but(q=np.zeros_like(example.q), scale=scale)
    results = run.everything(example)
    exact = example.but(scale=1.0).exact
    assertions.assert_within_bounds(example.but(scale=1.0), o=results["o"], lse=results["lse"], dv=results["dv"])
    assert np.array_equal(results["lse"], exact.lse.astype(results["lse"].dtype))


@on_the_host
def test_nothing_that_numpy_is_asked_to_raise_comes_out(run: Run) -> None:
    @run.settings
    @given(run.examples(), st.sampled_from(["as drawn", "huge", "tiny", "tiny do", "not finite"]))
    def check(example: Example, kind: str) -> None:
        assert_nothing_is_raised(run.everything, changed(example, kind))

    check()


# float16 gradients, many of them subnormal or 0, that are summed over two batch entries.
BROADCAST = strategies.Structure(
    q_batch=(2,), k_batch=(1,), seqlen_q=3, seqlen_kv=4, dtype="float16", values="small"
).example()  # fmt: skip


@on_the_host
def test_nothing_comes_out_of_sums_over_broadcast_axes(run: Run) -> None:
    assert_nothing_is_raised(run.everything, BROADCAST)


def test_nothing_comes_out_of_an_lse_that_is_too_large() -> None:
    assert_no_lse_is_too_large(cuflash)


def test_nothing_comes_out_of_other_calls() -> None:
    assert_other_calls_raise_nothing(cuflash)


def assert_no_lse_is_too_large(library: Any) -> None:
    """Assert that `backward` raises no NumPy floating-point error, whatever it gets as lse."""
    x = np.ones((2, 3), np.float32)
    ready = library.plan(x, x, x)
    for number in (3e38, np.inf, -np.inf, np.nan):
        try:
            with np.errstate(all="raise"):
                gradients = ready.backward(x, x, x, x, x, np.full(2, number, np.float32))
        except FloatingPointError as error:
            raise AssertionError(f"an error that the caller asks NumPy to raise comes out of lse={number}") from error
        assert number != 3e38 or not any(gradient.any() for gradient in gradients)


def other_calls(library: Any) -> dict[str, Callable[[], Any]]:
    """Return calls other than attention and its gradients, on rows that are not finite, overflow or underflow."""
    x = np.random.default_rng(0).standard_normal((2, 64, 16)).astype(np.float32)
    x *= np.float32([1e-37, 1e37]).reshape(2, 1, 1)
    x[1, 16:48:8, ::2] = np.float32([np.inf, -np.inf, np.nan, 0])[:, None]
    x[1, 20, :2] = np.inf, -np.inf
    x[1, :, 2] = x[0, :, 2]
    far, first, tiny = np.float32(1e38) * x[:1], np.arange(64) == 0, np.full((2, 64, 16), 6e-8, np.float16)
    tiny[:, ::2] = 0
    budget, rotation, half = library.selectors.Budget(top_k=2), library.Rotation(16), library.quantize(tiny)
    low = library.quantize(100 * x[0])
    cache = library.KVCache(batch=1, num_kv_heads=2, head_dim=16, capacity=64, dtype="float8_e4m3fn")
    calls = {
        "quantize": lambda: library.quantize(x, rotate=rotation), "scaled": low.scaled,
        "Rotation": lambda: rotation.apply(x), "FP8 attention": lambda: library.attention(half, half, half),
        "append": lambda: cache.append(x[None], x[None]),
        "block_mass": lambda: library.study.block_mass(far, far, block=16),
        "recall": lambda: library.study.recall(far, far, far, mask=first),
        "page_bounds": lambda: library.selectors.page_bounds(x, x),
    }  # fmt: skip
    for name in ("pooled", "antidiagonal", "oracle", "vertical_slash", "nsa", "quest"):
        options = {"compression": (8, 4)} if name == "nsa" else {}
        select = partial(getattr(library.selectors, name), block=16, budget=budget, **options)
        calls |= {
            name: partial(select, x, x), f"{name} with a mask": partial(select, x, x, mask=np.tri(64, dtype=bool)),
            f"{name} in float64": partial(select, far.astype(np.float64), far.astype(np.float64)),
        }  # fmt: skip
    return calls


def assert_other_calls_raise_nothing(library: Any) -> None:
    for name, call in other_calls(library).items():
        try:
            with np.errstate(all="raise"):
                call()
        except FloatingPointError as error:
            raise AssertionError(f"an error that the caller asks NumPy to raise comes out of {name}") from error


def changed(example: Example, kind: str) -> Example:
    """Return an example with other magnitudes, so that arithmetic overflows, underflows, or starts from inf and NaN."""
    factor = {"huge": 3e4, "tiny": 1e-6, "tiny do": 1e-6}.get(kind, 1.0)
    names = {"as drawn": (), "tiny do": ("do",)}.get(kind, ("q", "k", "v", "do"))
    operands = {}
    with np.errstate(all="ignore"):
        for number, name in enumerate(names):
            array = getattr(example, name)
            operands[name] = (array.astype(np.float64) * factor).astype(array.dtype)
            if kind == "not finite" and array.size:
                operands[name].flat[number % array.size] = (np.inf, -np.inf, np.nan)[number % 3]
    return example.but(**operands)


def assert_nothing_is_raised(everything: Everything, example: Example) -> None:
    """Assert that results have equal bits whichever errors the caller makes NumPy raise."""
    with np.errstate(all="ignore"):
        expected = everything(example)
    try:
        with np.errstate(all="raise"):
            results = everything(example)
    except FloatingPointError as error:
        raise AssertionError("an error that the caller asks NumPy to raise comes out") from error
    assert all(results[name].tobytes() == expected[name].tobytes() for name in expected)
