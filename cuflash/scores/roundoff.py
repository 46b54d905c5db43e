"""Error bounds of a score program's results: each exact value with a bound on a kernel's error.

The errors of arguments are propagated by the largest change of the function within them instead of its derivative at
the value, so that the bounds also hold for large errors. Each operation then adds its own roundoff, in units of the
accumulator's unit roundoff ua; the rules are in `PRIMITIVES`. A number, and an element of a float64 array in float32,
has a relative error of 1 ua. An integer that is converted to a real has a relative error of 1 ua if it is larger than 1
/ ua. The loss by underflow is added to each result, and the error of a result that may overflow is inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..arrays import Array
from ._primitives import PRIMITIVES, Approximation, Arithmetic, error_of_integers
from .program import FOLDED_NUMBERS, Instruction, Program, derived, gradient_loads, pushed
from .values import Operands, run


Coordinates: TypeAlias = tuple[Array, Array, Array, Array]  # b, h, i and j of scores


class LoadErrors(NamedTuple):
    """The derivative with respect to the elements that one load reads from an array that has a gradient."""

    array: int
    place: tuple[Array, ...]
    value: Array
    error: Array


class ScoreErrors(NamedTuple):
    """Final scores f, their derivatives with respect to scores and to loads of arrays, and all errors."""

    f: Array
    e_f: Array
    slope: Array
    e_slope: Array
    loads: tuple[LoadErrors, ...]


class PushedErrors(NamedTuple):
    """Tangents of final scores and of their derivative with respect to scores, that derivative, and all errors.

    `loads` has the derivatives with respect to loads of arrays that have gradients, and `loads_dot` their tangents.
    """

    f_dot: Array
    e_f_dot: Array
    slope: Array
    e_slope: Array
    slope_dot: Array
    e_slope_dot: Array
    loads: tuple[LoadErrors, ...]
    loads_dot: tuple[LoadErrors, ...]


def score_errors(
    program: Program, operands: Operands, wrt: Sequence[str], s: Array, e_s: Array, model: Arithmetic,
    at: Coordinates | None = None,
) -> ScoreErrors:  # fmt: skip
    """Evaluate a program and its errors on all scores [*batch, num_heads, seqlen_q, seqlen_kv].

    `at` has their coordinates, which start at 0 by default.
    """
    at = at or coordinates_of(s)
    slopes = derived(program, tuple(wrt))
    (f, e_f), (slope, e_slope), *by_loads = values_and_errors(slopes, operands, s, e_s, *at, model)
    results = run(slopes, operands, s, *at)
    loads = _load_errors(slopes, operands, wrt, at[0], results, by_loads)
    f, e_f, slope, e_slope = (np.broadcast_to(x, s.shape) for x in (f, e_f, slope, e_slope))
    return ScoreErrors(f, e_f, slope, e_slope, loads)


def pushed_errors(
    program: Program, operands: Operands, tangents: Sequence[str], wrt: Sequence[str], s: Array, e_s: Array,
    s_dot: Array, e_s_dot: Array, model: Arithmetic, at: Coordinates,
) -> PushedErrors:
    """Evaluate a program, its tangents and the errors of both on all scores and their tangents.

    The last operands are the tangents of the arrays that `tangents` names.
    """
    slopes = pushed(derived(program, tuple(wrt)), tangents)
    results = values_and_errors(slopes, operands, s, e_s, *at, model, s_dot, e_s_dot)
    run_results = run(slopes, operands, s, *at, s_dot)
    half = len(results) // 2
    (_, slope, *by_loads), (f_dot, slope_dot, *by_loads_dot) = results[:half], results[half:]
    finals = (np.broadcast_to(x, s.shape) for x in (*f_dot, *slope, *slope_dot))
    loads, loads_dot = (
        _load_errors(slopes, operands, wrt, at[0], run_results, each) for each in (by_loads, by_loads_dot)
    )
    return PushedErrors._make((*finals, loads, loads_dot))


def coordinates_of(s: Array) -> Coordinates:
    """Return b, h, i and j of all scores [*batch, num_heads, seqlen_q, seqlen_kv]."""
    *batch, num_heads, seqlen_q, seqlen_kv = s.shape
    h, i, j = np.ogrid[:num_heads, :seqlen_q, :seqlen_kv]
    return np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1), h, i, j


def _load_errors(
    program: Program, operands: Operands, wrt: Sequence[str], b: Array, results: Sequence[Array],
    by_loads: Sequence[tuple[Array, Array]],
) -> tuple[LoadErrors, ...]:
    """Return the elements that each load reads, and the derivative with respect to them.

    `results` has the values of all instructions.
    """
    loads = []
    for n, (value, error) in zip(gradient_loads(program, wrt), by_loads, strict=True):
        load = program.instructions[n]
        place = operands.place(program, load, b, [results[a] for a in load.args])
        loads.append(LoadErrors(load.value, place, value, error))
    return tuple(loads)


def values_and_errors(
    program: Program, operands: Operands, s: Array, e_s: Array, b: Array, h: Array, i: Array, j: Array,
    model: Arithmetic, s_dot: Array = None, e_s_dot: Array = None,
) -> list[tuple[Array, Array]]:
    """Return (value, error) of each result, float64; they broadcast against s.

    Parameters
    ----------
    s, e_s : float64 arrays
        Exact scores, and bounds on the errors of a kernel's scores.
    b, h, i, j : int arrays
        As in `values`.
    s_dot, e_s_dot : float64 arrays, optional
        Exact tangents of the scores, and bounds on a kernel's errors, for a program that reads them.
    """
    values, input_errors = run(program, operands, s, b, h, i, j, s_dot), {"s": e_s, "s_dot": e_s_dot}
    approximations: list[Approximation] = []
    with np.errstate(all="ignore"):
        for instruction, x in zip(program.instructions, values):
            args = [approximations[a] for a in instruction.args]
            is_input = instruction.op in input_errors
            error: Array = input_errors[instruction.op] if is_input else _error(program, instruction, x, args, model)
            if instruction.kind == "real" and not is_input:
                error = np.where(np.isfinite(x) & (np.abs(x) + error > model.largest), np.inf, error)
                error = np.where(np.isnan(error), np.inf, error)
            is_nonnegative = _is_nonnegative(instruction, [arg.is_nonnegative for arg in args], operands)
            approximations.append(Approximation(x, error, is_nonnegative))
    return [approximations[n][:2] for n in program.results]


def _error(program: Program, instruction: Instruction, x: Array, args: list[Approximation], model: Arithmetic) -> Array:
    """Return the error of x, the result of an instruction other than the score."""
    op, kind, ua = instruction.op, instruction.kind, model.ua
    if op == "const":
        return 0.0 if kind != "real" or instruction.value in FOLDED_NUMBERS else ua * abs(instruction.value)
    if op == "number":
        return ua * abs(float(x)) if kind == "real" else 0.0
    if op == "real":
        return np.maximum(args[0].error, np.where(np.abs(x) > 1 / ua, ua * np.abs(x), 0))
    if op == "load":
        is_rounded = kind == "real" and program.arrays[instruction.value].dtype == "float64" and ua > 2.0**-52
        error = np.where(np.isinf(x) | np.equal(x, 0), 0, ua * np.abs(x) + model.wa) if is_rounded else 0.0
        return np.maximum(error, error_of_integers(model, x, *args))
    if kind == "int" and op == "where":  # a comparison of reals may choose an integer
        condition, first, second = args
        return np.where(condition.error, np.abs(np.subtract(first.value, second.value)), first.error + second.error)
    if kind == "int" or op not in PRIMITIVES:
        return error_of_integers(model, x, *args)
    return PRIMITIVES[op].error(model, x, *args)


def _is_nonnegative(instruction: Instruction, args: list[bool], operands: Operands) -> bool:
    """True if rounding cannot make a result negative."""
    op = instruction.op
    if op in ("const", "number"):
        value = instruction.value if op == "const" else operands.numbers[instruction.value]
        return instruction.kind != "bool" and bool(value >= 0)
    is_square = op == "mul" and len({*instruction.args}) == 1
    return is_square or op in PRIMITIVES and PRIMITIVES[op].is_nonnegative(args)
