"""Score programs equal the traced functions, have the derivatives of dual numbers, and errors name the line."""

from __future__ import annotations

import importlib
import linecache
import re
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from executors import is_long, needs_compiler
from hypothesis import given, settings, strategies as st
from library_parts import part

import cuflash
from cuflash import UnsupportedProblem
from cuflash.executors import tile_program
from cuflash.executors.tile_scores import coordinates
from cuflash.masks.shape import MaskShape
from cuflash.scores import Score
from cuflash.scores.program import derived, gradient_loads
from cuflash.scores.ranges import range_reasons, ranges
from cuflash.scores._primitives import PRIMITIVES, Arithmetic
from cuflash.scores.roundoff import values_and_errors
from cuflash.scores.values import Operands, run as evaluate, values
from cuflash.testing import Example, assert_within_bounds
from cuflash.testing.dual import Captured, Dual
from cuflash.testing import formulas as drawn
from cuflash.testing.formulas import Formula, formulas

SHAPE = MaskShape((2, 2), 2, 5, 7)


def places(shape: MaskShape = SHAPE) -> dict[str, np.ndarray]:
    """Return b, h, i and j as arrays that broadcast against [*batch, heads, queries, keys]."""
    h, i, j = np.ogrid[: shape.num_heads, : shape.seqlen_q, : shape.seqlen_kv]
    return {"b": np.arange(shape.num_batch).reshape(*shape.batch, 1, 1, 1), "h": h, "i": i, "j": j}


def some_scores(seed: int, dtype: type = np.float64, shape: MaskShape = SHAPE) -> np.ndarray:
    full = (*shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_kv)
    return (4 * np.random.default_rng(seed).standard_normal(full)).astype(dtype)


def drawn_score(formula: Formula, seed: int, dtype: type = np.float32) -> tuple[Score, Operands]:
    arrays = formula.arrays(SHAPE, seed, dtype)
    score = Score(formula, **arrays)
    return score, Operands(score.numbers, tuple(arrays.values()), SHAPE.batch)


def wide(array: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """Return an array with exact arithmetic: reals as `dtype`, and integers as int64, whose negation does not wrap."""
    kind = array.dtype.kind
    return array if kind == "b" else array.astype(np.int64 if kind in "iu" else dtype)


@settings(max_examples=150)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1))
def test_a_traced_program_gives_what_the_function_gives(formula: Formula, seed: int) -> None:
    score, operands = drawn_score(formula, seed)
    s, at = some_scores(seed), places()
    with np.errstate(all="ignore"):
        exact = formula(s, **at, **{name: wide(array) for name, array in score.arrays.items()})
        (traced,) = values(score.program, operands, s, **at)
    np.testing.assert_array_equal(np.broadcast_to(traced, s.shape), np.broadcast_to(exact, s.shape))


@settings(max_examples=150)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1))
def test_a_derived_program_gives_what_dual_numbers_give(formula: Formula, seed: int) -> None:
    score, operands = drawn_score(formula, seed)
    s, at = some_scores(seed), places()
    names = [array.name for array in score.program.arrays if array.kind == "real"]
    program = derived(score.program, tuple(names))
    evaluated = values_and_errors(program, operands, s, 0.0, **at, model=Arithmetic(2.0**-53, 1e-300, 1e300))
    exact = dual(formula, score, s.astype(np.longdouble))
    for number, ((value, error), wanted) in enumerate(zip(evaluated, exact, strict=True)):
        off = np.abs(value - wanted)
        is_right = (off <= 2 * error) | (np.isnan(value) & np.isnan(wanted)) | (value == wanted)
        assert is_right.all(), f"result {number} of {score}"


def dual(formula: Formula, score: Score, s: np.ndarray) -> list[np.ndarray]:
    """Return f and its derivatives by s and by each read of a real array, in long double."""
    arrays = {name: wide(array, np.longdouble) for name, array in score.arrays.items()}
    reals = {name: Captured(array) for name, array in arrays.items() if array.dtype == np.longdouble and array.ndim}
    values_by_name = arrays | reals
    values_by_name |= {name: Dual(array, {name: 1.0}) for name, array in arrays.items() if not array.ndim}
    with np.errstate(all="ignore"):
        f = formula(Dual(s, {"s": np.ones_like(s)}), **places(), **values_by_name)
    f = f if isinstance(f, Dual) else Dual(f, {})
    results, order = [f.value, f.tangents.get("s", 0.0)], []
    for load in gradient_loads(score.program, reals | arrays):
        name = score.program.arrays[score.program.instructions[load].value].name
        own = [each for each in f.tangents if each == name or name in reals and each[0] == id(reals[name])]
        order.append(sum(f.tangents[each] for each in own))  # one instruction stands for equal reads
    return results + order


@settings(max_examples=100)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1))
def test_float32_stays_within_the_errors(formula: Formula, seed: int) -> None:
    score, operands = drawn_score(formula, seed)
    rng, at = np.random.default_rng(seed), places()
    exact = some_scores(seed)
    e_s = 1e-5 * np.abs(exact)
    near = (exact + e_s * rng.uniform(-0.9, 0.9, exact.shape)).astype(np.float32)
    program = derived(score.program, tuple(array.name for array in score.program.arrays if array.kind == "real"))
    info = np.finfo(np.float32)
    model = Arithmetic(float(info.eps) / 2, float(info.smallest_normal), float(info.max))
    bounds = values_and_errors(program, operands, exact, e_s, **at, model=model)
    for actual, (value, error) in zip(values(program, operands, near, **at), bounds, strict=True):
        assert np.asarray(actual).dtype in (np.float32, np.bool_)
        off = np.abs(np.subtract(actual, value, dtype=np.float64))
        assert ((off <= error) | np.equal(actual, value) | np.isnan(value)).all(), score


@settings(max_examples=60)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1), size=st.sampled_from((1, 12, 40, 1000)))
def test_blocks_hold_the_values_of_the_program(formula: Formula, seed: int, size: int) -> None:
    score, operands = drawn_score(formula, seed)
    program = derived(score.program, tuple(score.arrays))
    heads = [(b, h) for b in range(SHAPE.num_batch) for h in range(SHAPE.num_heads)]
    queries, keys = slice(0, SHAPE.seqlen_q), slice(0, SHAPE.seqlen_kv)
    at = coordinates(None, heads, [queries] * len(heads), [keys] * len(heads))
    s = np.random.default_rng(seed).standard_normal((len(heads), keys.stop, queries.stop)).astype(np.float32)
    whole = evaluate(program, operands, s, *at)
    is_done = np.zeros(s.shape, int)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(tile_program, "_BLOCK", size)
        for block in tile_program.blocks(program, operands, s.copy(), at, frozenset(program.results)):
            cells = block.tiles, block.keys
            is_done[cells] += 1
            for n in program.results:
                actual = np.broadcast_to(block.values[n], s[cells].shape)
                np.testing.assert_array_equal(actual, np.broadcast_to(whole[n], s.shape)[cells])
    assert (is_done == 1).all()


NARROW = [
    np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float16, ml_dtypes.bfloat16
]  # fmt: skip
OF_ARRAYS = {
    "difference": lambda s, b, h, i, j, t: s + 0.1 * (t[j] - t[i]),
    "product": lambda s, b, h, i, j, t: s + 0.001 * (t[j] * t[i]),
    "negative": lambda s, b, h, i, j, t: s - 0.1 * np.abs(-t[j]),
    "square": lambda s, b, h, i, j, t: s + np.square(t[j]) / 1e3,
    "exponential": lambda s, b, h, i, j, t: s + np.exp2(t[j] / 64),
}


def check_arrays(library: ModuleType, name: str, dtype: Any) -> None:
    """Check that a score on arrays has the values of its program, whatever integers and reals it captures."""
    evaluation = importlib.import_module(f"{library.__name__}.scores.values")
    most = 200 if np.dtype(dtype).kind != "i" or np.dtype(dtype).itemsize > 1 else 100
    table = np.linspace(0, most, 9).astype(dtype)
    score = library.scores.Score(OF_ARRAYS[name], t=table)
    (i, j), s = np.ogrid[:9, :9], np.ones((9, 9))
    operands = evaluation.Operands(score.numbers, (table,))
    (expected,) = evaluation.values(score.program, operands, s, 0, 0, i, j)
    narrow = [x.astype(np.uint8) for x in (i, j)]
    for places_ in ((i, j), narrow):
        np.testing.assert_allclose(score(s, 0, 0, *places_), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_a_score_on_arrays_has_the_values_of_its_program(name: str, dtype: Any) -> None:
    check_arrays(cuflash, name, dtype)


def test_integers_beyond_int32_count_as_the_nearest_of_it() -> None:
    table = np.array([2**63, 5], np.uint64)
    assert Score(lambda s, b, h, i, j, t: s + t[j], t=table)(0.0, 0, 0, 0, 0) == 2**31 - 1
    assert Score(lambda s, b, h, i, j, t: s + t[j], t=-table.astype(np.int64))(0.0, 0, 0, 0, 0) == -(2**31)


# Derivatives at 0


POWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "of the score, by 0": (lambda s, b, h, i, j: s + s**0, {}),
    "by a real 0": (lambda s, b, h, i, j: s + np.float_power(np.abs(s), 0.0), {}),
    "by a number of an array": (lambda s, b, h, i, j, e: s + np.maximum(s, 0) ** e, {"e": np.zeros((), np.float32)}),
    "by an array": (lambda s, b, h, i, j, e: s + np.power(np.abs(s), e[h]), {"e": np.array([0, 2.5], np.float32)}),
    "by an index": (lambda s, b, h, i, j: s + np.abs(s) ** (i % 2), {}),
    "by integers of an array": (lambda s, b, h, i, j, e: s + np.abs(s) ** e[h], {"e": np.array([0, 3], np.int8)}),
    "of an array": (lambda s, b, h, i, j, a: s + np.abs(a[h]) ** 0.0, {"a": np.zeros(2, np.float32)}),
    "of an array by another": (
        lambda s, b, h, i, j, a, e: s + np.abs(a[h]) ** e[h],
        {"a": np.zeros(2, np.float32), "e": np.zeros(2, np.float32)},
    ),
}


def check_powers(library: ModuleType, name: str, executor: str) -> None:
    """Check that a power with exponent 0 does not depend on its base: the derivative is 0, also at 0."""
    function, arrays = POWERS[name]
    rng = np.random.default_rng(0)
    q, k, v = np.zeros((2, 3, 4), np.float32), *rng.standard_normal((2, 2, 5, 4)).astype(np.float32)
    wrt = tuple(name for name, array in arrays.items() if array.dtype == np.float32)
    score = library.scores.Score(function, **arrays)
    (o, lse), vjp = library.attention_vjp(q, k, v, score=score, executor=executor, wrt=wrt, return_lse=True)
    gradients = vjp(do := np.ones_like(o))
    dq, dk, dv = gradients
    others = {name: gradients[name] for name in wrt}
    assert all(np.isfinite(x).all() for x in (dq, dk, dv, *others.values()))
    example = Example(q=q, k=k, v=v, do=do, score=Score(function, **arrays), wrt=wrt)
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv, others=others)


# On the simulator each function needs a kernel that takes seconds to build.
SIMULATED = POWERS if is_long() else ("by an array", "of an array by another")


@pytest.mark.parametrize("name", POWERS)
def test_a_power_by_0_has_the_derivative_0(name: str) -> None:
    check_powers(cuflash, name, "cpu")


@needs_compiler
@pytest.mark.parametrize("name", SIMULATED)
def test_a_power_by_0_has_the_derivative_0_in_kernels(name: str) -> None:
    check_powers(cuflash, name, "sim")


# Programs


def capped(s, b, h, i, j, slope):
    return 30 * np.tanh(s / 30) - slope[h] * np.abs(i - j)


SLOPE = np.array([0.5, 0.25], np.float32)


def check_exact_zeros(library: ModuleType = cuflash) -> None:
    """Check that a power of the distance has no error at distance 0, and a finite error elsewhere."""
    roundoff, evaluation = (importlib.import_module(f"{library.__name__}.scores.{x}") for x in ("roundoff", "values"))
    power = np.array(0.5, np.float32)
    score = library.scores.Score(lambda s, b, h, i, j, power: s - np.abs(i - j) ** power, power=power)
    (i, j), s = np.ogrid[:3, :3], np.zeros((3, 3))
    operands, model = evaluation.Operands(score.numbers, (power,)), roundoff.Arithmetic(2.0**-24, 1e-38, 1e38)
    ((_, error),) = roundoff.values_and_errors(score.program, operands, s, 0.0, 0, 0, i, j, model)
    assert (error[i == j] == 0).all() and (error[i != j] > 0).all() and np.isfinite(error).all()


def test_a_power_of_0_is_exact() -> None:
    check_exact_zeros()


SIMPLE = [
    (lambda s, b, h, i, j: s + 0, ["s"]),
    (lambda s, b, h, i, j: 0.0 + s * 1.0, ["s"]),
    (lambda s, b, h, i, j: s / 1 - 0, ["s"]),
    (lambda s, b, h, i, j: s**2, ["s", "mul"]),
    (lambda s, b, h, i, j: s / 3, ["s", "number", "mul"]),
    (lambda s, b, h, i, j: s / 2, ["s", "const", "mul"]),
    (lambda s, b, h, i, j: -1 * s, ["s", "neg"]),
    (lambda s, b, h, i, j: np.where(i < j, s, s), ["s"]),
    (lambda s, b, h, i, j: s + (i + 0 - 0 * 1), ["s", "i", "real", "add"]),
    (lambda s, b, h, i, j: s + (2 - 1) * (i - j), ["s", "i", "j", "real", "real", "sub", "add"]),
]


@pytest.mark.parametrize(("function", "ops"), SIMPLE)
def test_a_program_is_simple(function, ops: list[str]) -> None:
    assert [instruction.op for instruction in Score(function).program.instructions] == ops


def test_wide_integers_of_arrays_are_subtracted_as_integers() -> None:
    def f(s, b, h, i, j, time):
        return s - (time[i] - time[j])

    time = np.array([2**30, 2**30 + 1], np.int64)
    score = Score(f, time=time)
    s = np.zeros((2, 2), np.float32)
    i, j = np.ogrid[:2, :2]
    (actual,) = values(score.program, Operands(score.numbers, (time,)), s, 0, 0, i, j)
    np.testing.assert_array_equal(actual, [[0, 1], [-1, 0]])


def test_another_number_is_the_same_program() -> None:
    def of(cap):
        return Score(lambda s, b, h, i, j: cap * np.tanh(s / cap) + (i - j) * cap)

    assert of(30).program == of(17.5).program
    assert hash(of(30).program) == hash(of(17.5).program)
    assert of(30).numbers == (30.0, 1 / 30) and of(17.5).numbers == (17.5, 1 / 17.5)
    assert of(1.0).program != of(30).program  # the number 1 is folded away


def test_a_program_that_was_finished_before_has_its_own_numbers() -> None:
    """Score functions with equal instructions share a program, unless an integer constant equals a captured number."""
    first, second = (Score(lambda s, b, h, i, j: cap * np.tanh(s / cap) - 0.25) for cap in (3.0, 7.0))
    assert first.program is second.program
    assert first.numbers == (3.0, 1 / 3, 0.25) and second.numbers == (7.0, 1 / 7, 0.25)
    for factor in (3.0, 2.5, 4.0):  # if the factor is 3.0, the integer 3 equals it

        def counted(s, b, h, i, j):
            return s * factor + 3 * j

        score = Score(counted)
        (actual,) = values(score.program, Operands(score.numbers, ()), np.ones(1), 0, 0, 0, 2)
        assert actual == factor + 6 and len(score.numbers) == len({factor, 3.0})


def test_the_sign_of_zero_is_kept() -> None:
    for sign in (1.0, -1.0):
        score = Score(lambda s, b, h, i, j: s / (sign * np.where(i < j, 0.0, 0.0)))
        assert values(score.program, Operands(score.numbers, ()), np.ones(1), 0, 0, 0, 0) == [sign * np.inf]


def test_a_branch_that_is_not_chosen_has_no_derivative() -> None:
    """log is -inf with an infinite slope at 0, where `np.where` does not choose it."""

    def f(s, b, h, i, j):
        log = np.log(s)
        return np.where(s > 0, log, 0) + np.where(s > 1, -log / 2, 0) - np.where(s > 2, np.sqrt(s - 2), 0)

    score = Score(f)
    s = np.array([-1.0, 0.0, 0.5, 1.5])
    _, slope = values(derived(score.program), Operands(score.numbers, ()), s, 0, 0, 0, 0)
    np.testing.assert_allclose(slope, [0, 0, 2, 1 / 3], rtol=1e-15)


def test_ties_and_corners_have_the_derivative_that_is_promised() -> None:
    def slope_of(function, x):
        score = Score(function)
        actual = values(derived(score.program), Operands(score.numbers, ()), np.array([x]), 0, 0, 0, 0)[1]
        return float(np.broadcast_to(actual, 1)[0])

    assert slope_of(lambda s, b, h, i, j: np.abs(s), 0.0) == 0
    assert slope_of(lambda s, b, h, i, j: np.sign(s), 0.0) == 0
    assert slope_of(lambda s, b, h, i, j: np.minimum(2 * s, s), 0.0) == 2
    assert slope_of(lambda s, b, h, i, j: np.maximum(s, 2 * s), 0.0) == 1
    assert slope_of(lambda s, b, h, i, j: np.sqrt(s), 0.0) == np.inf
    assert slope_of(lambda s, b, h, i, j: s**3, 2.0) == 12
    assert slope_of(lambda s, b, h, i, j: 2.5**s, 0.0) == np.log(2.5)
    assert slope_of(lambda s, b, h, i, j: np.abs(i - j) ** s, 0.5) == 0
    assert slope_of(lambda s, b, h, i, j: (2.0 + j) ** s, 0.0) == np.log(2)


# Errors


def branches(s, b, h, i, j):
    if s > 0:
        return s
    return 0.0


def takes(s, b, h, i, j):
    return s + np.take(SLOPE, h)


def other(x):
    raise TypeError(f"other() takes tensors, and got {x!r}")


TABLE = np.zeros((2, 4096), np.float32)
REFUSED = {
    "branch": (branches, {}, "branches, line {line}: if s > 0: a score function must not branch on traced values"),
    "and": (lambda s, b, h, i, j: s > 0 and s, {}, "use np.where, & | ~, np.minimum and np.maximum"),
    "max": (lambda s, b, h, i, j: max(s, 0), {}, "use np.where"),
    "sinc": (lambda s, b, h, i, j: np.sinc(s), {}, "np.sinc has no counterpart in a kernel; use one of: absolute, add"),
    "a reciprocal of integers": (
        lambda s, b, h, i, j: s - np.reciprocal(j + 1), {}, "np.reciprocal of integers is an integer, 0 or 1 at most: w"
    ),
    "cos": (lambda s, b, h, i, j: np.cos(s), {}, "np.cos has no counterpart in a kernel; use one of: absolute, add,"),
    "reduce": (lambda s, b, h, i, j: np.add.reduce(s), {}, "np.add.reduce has no counterpart in a kernel"),
    "out": (lambda s, b, h, i, j: np.add(s, 1, out=np.zeros(1)), {}, "out= of a ufunc has no counterpart"),
    "closure": (
        lambda s, b, h, i, j: s + SLOPE,
        {},
        "an array of shape (2,) and dtype float32 is neither a number nor traced: pass arrays by name, "
        "Score(f, SLOPE=SLOPE)",
    ),
    "index of a closure": (
        lambda s, b, h, i, j: s + SLOPE[h], {},
        "so SLOPE[...] of an array from outside cannot be read: pass the array by name, Score(f, SLOPE=SLOPE)",
    ),
    "indices of a closure": (
        lambda s, b, h, i, j: s + TABLE[h, np.clip(j, 0, 9)], {},
        "so TABLE[...] of an array from outside cannot be read: pass the array by name, Score(f, TABLE=TABLE)",
    ),
    "take": (takes, {}, "takes, line "),
    "key": (lambda s, b, h, i, j: s + {0: 1.5}[h], {}, "unhashable type: 'Symbol': use NumPy's functions and Python's"),
    "bitwise": (lambda s, b, h, i, j: s + (i ^ j), {}, "unsupported operand type(s) for ^: 'Symbol' and 'Symbol': use"),
    "another library": (lambda s, b, h, i, j: other(s), {}, "and got a symbol (real): use NumPy's functions and"),
    "real index": (
        lambda s, b, h, i, j, table: s + table[h, s],
        {"table": TABLE},
        "an index must be an integer expression of b, h, i, j and integer arrays",
    ),
    "rank": (lambda s, b, h, i, j, table: s + table[h], {"table": TABLE}, "table has 2 axes and takes 2 indices; got"),
    "slice": (lambda s, b, h, i, j, table: s + table[h, :], {"table": TABLE}, "table takes integer expressions as"),
    "end": (lambda s, b, h, i, j, table: s + table[h, -1], {"table": TABLE}, "from the start of its axis; got -1"),
    "naive": (lambda s, b, h, i, j, table: s + table, {"table": TABLE}, "index it, as in table[..., i, j]"),
    "condition": (lambda s, b, h, i, j: s + (i == j), {}, "a comparison is not a number: use np.where(condition, a, b"),
    "where of one branch": (
        lambda s, b, h, i, j: np.where(s > 0, s), {}, "np.where must be called as np.where(condition, a, b)"
    ),
    "clip from below": (lambda s, b, h, i, j: np.clip(s, 0), {}, "np.clip must be called as np.clip(x, least, most)"),
    "where": (lambda s, b, h, i, j: np.where(s, s, 0), {}, "np.where takes a comparison first"),
    "bits": (lambda s, b, h, i, j: np.where(i & 1, s, 0), {}, "& | ~ and np.logical_* take comparisons"),
    "mod": (lambda s, b, h, i, j: s + i % j, {}, "// and % take an integer expression and a positive integer literal"),
    "floor": (lambda s, b, h, i, j: s // 2, {}, "// and % take an integer expression and a positive integer literal"),
    "float": (lambda s, b, h, i, j: float(s), {}, "are not Python numbers: use NumPy's functions instead of math's"),
    "list": (lambda s, b, h, i, j: s + [1, 2][h], {}, "pass arrays by name instead of lists and arrays from"),
    "method": (lambda s, b, h, i, j: s.clip(0, 1), {}, "has no attribute .clip: use NumPy's functions"),
    "None": (lambda s, b, h, i, j: None, {}, "the function must return a number for each s; got None"),
    "signature": (lambda s, b, h, i: s, {}, "must take (s, b, h, i, j); got <lambda>(s, b, h, i)"),
    "not given": (
        lambda s, b, h, i, j, slope: s * slope[h], {}, "argument: 'slope'; arrays follow j and are passed by name"
    ),
    "missing": (lambda s, b, h, i, j: s, {"slope": SLOPE}, "must take (s, b, h, i, j, slope)"),
    "reserved": (lambda s, b, h, i, j, bias: s, {"bias": SLOPE}, "score arrays may not be called q, k, v, o, lse, do,"),
    "self": (lambda s, b, h, i, j, self: s * self, {"self": SLOPE}, "got self"),
    "complex": (lambda s, b, h, i, j, x: s, {"x": np.zeros(2, complex)}, "x's dtype must be float16, bfloat16,"),
    "swapped": (lambda s, b, h, i, j, x: s, {"x": np.zeros(2, ">i4")}, "x's dtype must be float16"),
    "many": (
        lambda s, b, h, i, j, **x: s,
        {f"x{n}": SLOPE for n in range(9)},
        "a score takes at most 8 arrays; got 9",
    ),
}


def message_of(error: Exception) -> str:
    """Return an error's text without the quoted source line of this file, which contains the expected words itself."""

    def blank(match: re.Match[str]) -> str:
        return match[0].replace(linecache.getline(__file__, int(match[1])).strip().rstrip(":"), "")

    return re.sub(r"<lambda>, line (\d+): .*", blank, str(error))


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_can_do_is_refused(case: str) -> None:
    function, arrays, wanted = REFUSED[case]
    with pytest.raises(UnsupportedProblem) as error:
        Score(function, **arrays)
    assert wanted.format(line=branches.__code__.co_firstlineno + 1) in message_of(error.value)


@pytest.mark.parametrize(
    ("function", "kind", "own"),
    [
        (lambda s, b, h, i, j: s + SLOPE[5], IndexError, "index 5 is out of bounds"),
        (lambda s, b, h, i, j: s + len(5), TypeError, "object of type 'int' has no len()"),
        (lambda s, b, h, i, j: s / (1 // 0), ZeroDivisionError, "by zero"),
    ],
)
def test_an_error_of_the_users_own_stays_as_it_is(function, kind: type[Exception], own: str) -> None:
    with pytest.raises(kind, match=re.escape(own)) as error:
        Score(function)
    assert not isinstance(error.value, UnsupportedProblem)


def test_long_functions_are_refused() -> None:
    def long(s, b, h, i, j):
        for n in range(300):
            s = s * (n + 1.5)
        return s

    with pytest.raises(UnsupportedProblem) as error:
        Score(long)
    first, second = error.value.reasons
    assert first.startswith("long must have at most 256 operations; got 6")
    assert second.startswith("long must read at most 24 numbers; got 300")


@pytest.mark.parametrize("what", [3, "tanh", np.zeros(3)])
def test_a_score_is_made_of_a_function(what) -> None:
    with pytest.raises(TypeError, match=r"score must be a Score or a function of \(s, b, h, i, j\); got"):
        Score(what)


def test_a_captured_array_is_an_array() -> None:
    with pytest.raises(TypeError, match="slope must be an array; got 0.5"):
        Score(capped, slope=0.5)


def test_a_symbol_of_an_earlier_call_is_refused() -> None:
    leaked = []

    def f(s, b, h, i, j):
        leaked.append(s)
        return s + leaked[0]

    Score(f)
    with pytest.raises(UnsupportedProblem, match="the function used a symbol of an earlier call"):
        Score(f)


def check_repeated(library: Any, score: Any) -> None:
    """Compare a score with the one that its text describes, alone, and the values of both above a cap and a bias."""
    text, values = part(library, "calls._call_text"), part(library, "scores.values")
    again = type(score)._of_trace(text.parsed_call(text.call_text(score._traced), type(None)))
    parts = [(each.name, each.facts, each.program, each.numbers) for each in (again, score)]
    assert parts[0] == parts[1]
    results, shifts = [], set()
    for each in (again._with_arrays(score.arrays), score):
        composed = part(library, "scores.library").composed(each, 3.0, np.ones((2, 5, 7), np.float32))
        shifts.add(composed.program.shift_slot is None)
        operands = values.Operands(composed.numbers, tuple(composed.arrays.values()), SHAPE.batch)
        with np.errstate(all="ignore"):
            results += values.values(composed.program, operands, some_scores(0, np.float32), **places())
    assert np.array_equal(*results, equal_nan=True) and len(shifts) == 1


@settings(max_examples=150)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1))
def test_the_text_of_a_function_has_its_program(formula: Formula, seed: int) -> None:
    check_repeated(cuflash, drawn_score(formula, seed)[0])


def check_repeated_scores(library: Any) -> None:
    """Compare scores of the library, one of which counts from the last query and key, with those of their texts."""
    scores, ones = library.scores, np.ones(2)
    check_repeated(library, scores.alibi(ones))
    check_repeated(library, scores.alibi(ones, align="bottom_right"))
    check_repeated(library, scores.temperature(ones) @ scores.softcap(3.0))
    factor = np.array(3.0)
    check_repeated(library, scores.Score(lambda s, b, h, i, j, x: np.where(i > 3, s / 7 + 5.0, x), x=factor))


def test_the_text_of_a_score_of_the_library_has_its_program() -> None:
    check_repeated_scores(cuflash)


# Ranges


EXTENTS = {"b": 2, "h": 3, "i": 10, "j": 20}


@settings(max_examples=150)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1))
def test_integers_lie_within_their_ranges(formula: Formula, seed: int) -> None:
    score, operands = drawn_score(formula, seed)
    extents = dict(zip("bhij", (SHAPE.num_batch, *SHAPE[1:])))
    known = ranges(score.program, extents)
    program = score.program
    for n, (least, most) in known.items():
        part = type(program)(program.instructions, program.arrays, program.num_numbers, (n,))
        (integers,) = values(part, operands, some_scores(seed), **places())
        assert least <= np.min(integers) and np.max(integers) <= most, score


RANGES = [
    (lambda i, j, x: i - j, 20, "near may be -19..9 and the axis has 20 elements: clip it, np.clip(i - j, 0, 19)"),
    (lambda i, j, x: -j, 20, "near may be -19..0 and the axis has 20 elements: clip it, np.clip(-j, 0, 19)"),
    (lambda i, j, x: np.clip(i - j, 0, 4), 5, ""),
    (lambda i, j, x: np.clip(i - j, 0, 5), 5, "index 0 of near may be 0..5 and the axis has 5"),
    (lambda i, j, x: abs(i - j), 20, ""),
    (lambda i, j, x: abs(i - j), 19, "index 0 of near may be 0..19 and the axis has 19"),
    (lambda i, j, x: (i - j) % 4, 4, ""),
    (lambda i, j, x: (i - j) % 4 + j // 5, 7, ""),
    (lambda i, j, x: (i - j) % 4 + j // 5, 6, "index 0 of near may be 0..6 and the axis has 6"),
    (lambda i, j, x: i + np.sign(j - 5), 11, "index 0 of near may be -1..10 and the axis has 11"),
    (lambda i, j, x: np.where(i < j, i, j), 20, ""),
    (lambda i, j, x: np.where(i < j, i, j), 10, "index 0 of near may be 0..19 and the axis has 10"),
    (lambda i, j, x: 2 * i + 1 - -j, 39, ""),
    (lambda i, j, x: x[j], 5, "depends on the contents of x and the axis has 5 elements: clip it, np.clip(x[j],"),
    (lambda i, j, x: np.clip(x[j], 0, 4), 5, ""),
    (lambda i, j, x: j * j * j * 1000 * 1000, 5, "may be 0..6859000000 and integers of a score must be within"),
]


@pytest.mark.parametrize(("index", "extent", "reason"), RANGES)
def test_an_index_is_proven_or_refused(index, extent: int, reason: str) -> None:
    def f(s, b, h, i, j, near, x):
        return s + near[index(i, j, x)]

    score = Score(f, near=np.zeros(extent), x=np.zeros(20, np.int32))
    reasons = range_reasons(score.program, [(extent,), (20,)], (2,), EXTENTS, "float32")
    assert (reason in reasons[0]) if reason else (reasons == [])


def test_positions_that_float32_does_not_hold_are_refused() -> None:
    score = Score(lambda s, b, h, i, j: s - np.abs(i - j))
    far = {**EXTENTS, "j": 2**24 + 1}
    assert range_reasons(score.program, [], (), far, "float64") == []
    (reason,) = range_reasons(score.program, [], (), far, "float32")
    assert reason == "j must be at most 16777216 to be exact in float32; got 16777217: use float64"


def test_an_empty_problem_needs_no_proof() -> None:
    score = Score(lambda s, b, h, i, j, a: s + a[i - j], a=np.zeros(1))
    assert range_reasons(score.program, [(1,)], (), {**EXTENTS, "i": 0}, "float32") == []


def test_drawn_functions_have_every_operation_of_numbers() -> None:
    """A primitive that no drawn function calls would be missed by all tests that draw functions."""
    inputs = (("s",), ("j",))
    calls = [(name, *inputs[:1]) for name in drawn.UNARY] + [(name, *inputs) for name in (*drawn.BINARY, "power_of")]
    called = {each.op for call in calls for each in Score(Formula(call)).program.instructions}
    assert called.issuperset(
        each.name for each in PRIMITIVES.values() if each.signature in ("number", "real") and each.traced != ()
    )
