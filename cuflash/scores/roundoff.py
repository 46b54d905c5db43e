"""Errors of a score program's results: each value beside its largest distance from the exact one.

Errors of arguments go through the largest change of a function within them, not through its derivative at the value,
so that they hold where they are large. Each operation then adds its own roundoff, in units of the accumulator's ua::

    + - *               1 of the result                 exp, exp2       4 of the result
    /, sqrt             2 of the result                 log, log2       4 of 1 + the result
    a number            1 of it                         tanh            8 of 1; tanh_fast 2^-10.9
    a load of float64   1 of it in float32, else 0      pow             exp(y log(x)), each of these as here

An integer that becomes a real errs by 1 beyond 1 / ua. Where a comparison of reals may turn out either way, `where`
errs by the difference of its branches too. What underflow loses is added to each result, and a result that may overflow
has an error of inf. A sum of exact terms that is 0, and a positive power of an exact 0, are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from .program import COMPARISONS, FOLDED_NUMBERS, Instruction, Program, derived, gradient_loads
from .values import Operands, run


class Arithmetic(NamedTuple):
    """Unit roundoff, the smallest normal and the largest number of the dtype in which a kernel computes."""

    ua: float
    wa: float
    largest: float


class LoadErrors(NamedTuple):
    """The derivative by a load of an array that has a gradient."""

    array: int
    place: tuple[Any, ...]
    value: Any
    error: Any


class ScoreErrors(NamedTuple):
    """Final scores f and their derivative by the scores, with errors, and the derivatives by loads of arrays."""

    f: Any
    e_f: Any
    slope: Any
    e_slope: Any
    loads: tuple[LoadErrors, ...]


def score_errors(
    program: Program, operands: Operands, wrt: Sequence[str], s: Array, e_s: Array, model: Arithmetic
) -> ScoreErrors:
    """Evaluate a program on all scores [*batch, num_heads, seqlen_q, seqlen_kv] and their errors."""
    *batch, num_heads, seqlen_q, seqlen_kv = s.shape
    h, i, j = np.ogrid[:num_heads, :seqlen_q, :seqlen_kv]
    b = np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1)
    slopes = derived(program, wrt)
    (f, e_f), (slope, e_slope), *by_loads = values_and_errors(slopes, operands, s, e_s, b, h, i, j, model)
    found = run(slopes, operands, s, b, h, i, j)
    loads = []
    for n, (value, error) in zip(gradient_loads(slopes, wrt), by_loads, strict=True):
        load = slopes.instructions[n]
        place = operands.place(slopes, load, b, [found[a] for a in load.args])
        loads.append(LoadErrors(load.value, place, value, error))
    f, e_f, slope, e_slope = (np.broadcast_to(x, s.shape) for x in (f, e_f, slope, e_slope))
    return ScoreErrors(f, e_f, slope, e_slope, tuple(loads))


class _Pair(NamedTuple):
    value: Any
    error: Any  # for a bool, whether it may be the other one


def values_and_errors(
    program: Program, operands: Operands, s: Array, e_s: Array, b: Any, h: Any, i: Any, j: Any, model: Arithmetic
) -> list[tuple[Any, Any]]:
    """(value, error) of each result, float64; they broadcast against s.

    Parameters
    ----------
    s, e_s : float64 arrays
        Exact scores, and how far a kernel's may be from them.
    b, h, i, j : int arrays
        As in `values`.
    """
    values = run(program, operands, s, b, h, i, j)
    pairs: list[_Pair] = []
    is_positive = _nonnegative(program, operands)
    with np.errstate(all="ignore"):
        for n, instruction in enumerate(program.instructions):
            args = [pairs[a] for a in instruction.args]
            if instruction.op == "s":
                error: Any = e_s
            elif instruction.kind == "bool":
                error = _may_flip(instruction, args)
            elif instruction.kind == "int":
                error = _int_error(instruction, args)
            else:
                given = [is_positive[a] for a in instruction.args]
                error = _real_error(program, instruction, values[n], args, given, model)
                error = np.where(np.isfinite(values[n]) & (np.abs(values[n]) + error > model.largest), np.inf, error)
                error = np.where(np.isnan(error), np.inf, error)
            pairs.append(_Pair(values[n], error))
    return [pairs[n] for n in program.results]


def _real_error(
    program: Program, instruction: Instruction, x: Any, args: list[_Pair], is_positive: list[bool], model: Arithmetic
) -> Any:
    """The error of a real result x."""
    op, ua = instruction.op, model.ua
    if op == "const":
        return 0.0 if instruction.value in FOLDED_NUMBERS else ua * abs(instruction.value)
    if op == "number":
        return ua * abs(float(x))
    if op == "load":
        is_rounded = program.arrays[instruction.value].dtype == "float64" and ua > 2.0**-52
        error = np.where(np.isinf(x) | np.equal(x, 0), 0, ua * np.abs(x) + model.wa) if is_rounded else 0.0
        return np.inf if any(np.any(np.greater(arg.error, 0)) for arg in args) else error
    if op == "real":
        return np.maximum(args[0].error, np.where(np.abs(x) > 1 / ua, ua * np.abs(x), 0))
    if op == "where":
        condition, first, second = args
        chosen = np.where(condition.value, first.error, second.error)
        either = np.abs(np.subtract(first.value, second.value)) + np.maximum(first.error, second.error)
        return np.where(condition.error, either, chosen)
    if op in ("add", "sub"):
        given = args[0].error + args[1].error
        error = np.where(np.equal(x, 0) & np.equal(given, 0), 0, given + ua * (np.abs(x) + given) + model.wa)
        return np.where(np.isinf(x) & np.isfinite(args[0].error + args[1].error), 0, error)
    if op in ("neg", "abs"):
        return args[0].error
    if op in ("min", "max"):
        return np.maximum(args[0].error, args[1].error)
    if op == "sign":
        return np.where((np.abs(args[0].value) > args[0].error) | np.equal(args[0].error, 0), 0, 2)
    return _ERRORS[op](x, *args, model) if op != "sqrt" else _error_of_sqrt(x, args[0], is_positive[0], model)


def _error_of_product(x: Any, a: _Pair, b: _Pair, model: Arithmetic) -> Any:
    error = np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error
    error = error + model.ua * (np.abs(x) + error) + model.wa
    is_certain = (np.abs(a.value) > a.error) & (np.abs(b.value) > b.error)  # no argument may be 0, or change its sign
    return np.where(np.isinf(x), np.where(is_certain, 0, np.inf), error)


def _error_of_quotient(x: Any, a: _Pair, b: _Pair, model: Arithmetic) -> Any:
    room = np.abs(b.value) - b.error
    error = (a.error + np.abs(x) * b.error) / room
    return np.where(room > 0, error + 2 * model.ua * (np.abs(x) + error) + model.wa, np.inf)


def _error_of_power(x: Any, a: _Pair, b: _Pair, model: Arithmetic) -> Any:
    """x = exp(b log(a)), for an a that cannot be 0; of b = 1 or 0, where kernels and NumPy err less, too.

    0 to a positive power is 0 exactly.
    """
    log = np.log(np.abs(a.value))
    e_log = _error_of_log(log, _Pair(np.abs(a.value), a.error), model)
    exponent = np.abs(b.value) * e_log + np.abs(log) * b.error + b.error * e_log
    exponent = exponent + 2 * model.ua * (np.abs(b.value * log) + exponent)
    is_integer = np.equal(np.trunc(b.value), b.value) & np.equal(b.error, 0)
    error = np.abs(x) * (np.expm1(exponent) + 4 * model.ua * np.exp(exponent)) + model.wa
    error = np.where((a.value > 0) | is_integer, error, np.inf)
    return np.where(np.equal(a.value, 0) & np.equal(a.error, 0) & (b.value > b.error), 0, error)


def _error_of_exp(x: Any, a: _Pair, model: Arithmetic, base: float = 1.0) -> Any:
    error = np.abs(x) * np.expm1(a.error * base)
    return error + 4 * model.ua * (np.abs(x) + error) + model.wa


def _error_of_log(x: Any, a: _Pair, model: Arithmetic, base: float = 1.0) -> Any:
    error = -np.log1p(-np.minimum(a.error / a.value, 1)) / base
    error = np.where(np.equal(a.error, 0), 0, error)
    return np.where(a.value >= a.error, error + 4 * model.ua * (1 + np.abs(x) + error), np.inf)


def _error_of_sqrt(x: Any, a: _Pair, is_positive: bool, model: Arithmetic) -> Any:
    lowest = a.value - a.error
    error = a.error / (x + np.sqrt(np.maximum(lowest, 0)))
    error = np.where(np.equal(a.value, 0), np.sqrt(a.error), error)
    error = error + 2 * model.ua * (x + error) + np.sqrt(model.wa)
    return np.where((lowest >= 0) | is_positive, error, np.inf)


def _error_of_tanh(x: Any, a: _Pair, model: Arithmetic, own: float | None = None) -> Any:
    nearest = np.maximum(np.abs(a.value) - a.error, 0)
    error = np.minimum(a.error / np.cosh(nearest) ** 2, 2)
    return error + (8 * model.ua if own is None else own)


_LN_2 = float(np.log(2))
_ERRORS: dict[str, Callable[..., Any]] = {
    "mul": _error_of_product,
    "div": _error_of_quotient,
    "pow": _error_of_power,
    "exp": _error_of_exp,
    "exp2": lambda x, a, model: _error_of_exp(x, a, model, _LN_2),
    "log": _error_of_log,
    "log2": lambda x, a, model: _error_of_log(x, a, model, _LN_2),
    "tanh": _error_of_tanh,
    "tanh_fast": lambda x, a, model: _error_of_tanh(x, a, model, 2.0**-10.9),
}


def _may_flip(instruction: Instruction, args: list[_Pair]) -> Any:
    """Return whether a condition may turn out the other way."""
    if instruction.op in COMPARISONS:
        a, b = args
        room = a.error + b.error
        return np.greater(room, 0) & ~(np.abs(np.subtract(a.value, b.value)) > room)
    if instruction.op == "isfinite":
        return np.isinf(args[0].error)
    flips: Any = False
    for arg in args:
        flips = flips | np.asarray(arg.error, bool)
    return flips


def _int_error(instruction: Instruction, args: list[_Pair]) -> Any:
    """The error of an integer: 0, unless a comparison of reals chose it."""
    if instruction.op == "where":
        condition, first, second = args
        return np.where(condition.error, np.abs(np.subtract(first.value, second.value)), first.error + second.error)
    return np.inf if any(np.any(np.greater(arg.error, 0)) for arg in args) else 0.0


_ALWAYS = ("abs", "exp", "exp2", "sqrt")
_OF_BOTH = ("add", "mul", "div", "min", "pow", "where")


def _nonnegative(program: Program, operands: Operands) -> list[bool]:
    """Return whether no rounding can make a result negative: of each instruction."""
    found: list[bool] = []
    for instruction in program.instructions:
        op, args = instruction.op, instruction.args
        given = [found[a] for a in (args[1:] if op == "where" else args)]
        if op in ("const", "number") and instruction.kind != "bool":
            value = instruction.value if op == "const" else operands.numbers[instruction.value]
            found.append(value >= 0)
        elif op == "mul" and args[0] == args[1]:
            found.append(True)
        else:
            is_kept = op in _OF_BOTH and all(given)
            found.append(op in _ALWAYS or is_kept or op == "max" and any(given))
    return found
