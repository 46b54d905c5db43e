"""Errors of a score program's results: each value beside its largest distance from the exact one.

Errors of arguments go through the largest change of a function within them, not through its derivative at the value,
so that they hold where they are large. Each operation then adds its own roundoff, in units of the accumulator's ua:
`PRIMITIVES` has the rules. A number errs by 1 ua of it, and so does an element of a float64 array in float32. An
integer that becomes a real errs by 1 ua of it beyond 1 / ua. The loss by underflow is added to each result, and a
result that may overflow has an error of inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ._primitives import PRIMITIVES, Approximation, Arithmetic, error_of_integers
from .program import FOLDED_NUMBERS, Instruction, Program, derived, gradient_loads, pushed
from .values import Operands, run


class LoadErrors(NamedTuple):
    """The derivative by a load of an array that has a gradient."""

    array: int
    place: tuple[Array, ...]
    value: Array
    error: Array


class ScoreErrors(NamedTuple):
    """Final scores f and their derivative by the scores, with errors, and the derivatives by loads of arrays."""

    f: Array
    e_f: Array
    slope: Array
    e_slope: Array
    loads: tuple[LoadErrors, ...]


class PushedErrors(NamedTuple):
    """Tangents of final scores and of the derivative by the scores, that derivative, and all errors.

    The loads are the derivatives by loads of arrays that have gradients, and their tangents.
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
    program: Program, operands: Operands, wrt: Sequence[str], s: Array, e_s: Array, model: Arithmetic
) -> ScoreErrors:
    """Evaluate a program on all scores [*batch, num_heads, seqlen_q, seqlen_kv] and their errors."""
    at = _places(s)
    slopes = derived(program, wrt)
    (f, e_f), (slope, e_slope), *by_loads = values_and_errors(slopes, operands, s, e_s, *at, model)
    found = run(slopes, operands, s, *at)
    loads = _load_errors(slopes, operands, wrt, at[0], found, by_loads)
    f, e_f, slope, e_slope = (np.broadcast_to(x, s.shape) for x in (f, e_f, slope, e_slope))
    return ScoreErrors(f, e_f, slope, e_slope, loads)


def pushed_errors(
    program: Program, operands: Operands, tangents: Sequence[str], wrt: Sequence[str], s: Array, e_s: Array,
    s_dot: Array, e_s_dot: Array, model: Arithmetic,
) -> PushedErrors:
    """Evaluate a program and its tangents on all scores, their tangents and the errors of both.

    The operands end with the tangents of the arrays that `tangents` names.
    """
    at, slopes = _places(s), pushed(derived(program, wrt), tangents)
    results = values_and_errors(slopes, operands, s, e_s, *at, model, s_dot, e_s_dot)
    found = run(slopes, operands, s, *at, s_dot)
    half = len(results) // 2
    (_, slope, *by_loads), (f_dot, slope_dot, *by_loads_dot) = results[:half], results[half:]
    finals = (np.broadcast_to(x, s.shape) for x in (*f_dot, *slope, *slope_dot))
    loads, loads_dot = (
        _load_errors(slopes, operands, wrt, at[0], found, each) for each in (by_loads, by_loads_dot)
    )
    return PushedErrors._make((*finals, loads, loads_dot))


def _places(s: Array) -> tuple[Array, Array, Array, Array]:
    """b, h, i and j of all scores [*batch, num_heads, seqlen_q, seqlen_kv]."""
    *batch, num_heads, seqlen_q, seqlen_kv = s.shape
    h, i, j = np.ogrid[:num_heads, :seqlen_q, :seqlen_kv]
    return np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1), h, i, j


def _load_errors(
    program: Program, operands: Operands, wrt: Sequence[str], b: Array, found: Sequence[Array],
    by_loads: Sequence[tuple[Array, Array]],
) -> tuple[LoadErrors, ...]:
    """Name the elements that each load reads, beside the derivative by it; `found` are all values of the program."""
    loads = []
    for n, (value, error) in zip(gradient_loads(program, wrt), by_loads, strict=True):
        load = program.instructions[n]
        place = operands.place(program, load, b, [found[a] for a in load.args])
        loads.append(LoadErrors(load.value, place, value, error))
    return tuple(loads)


def values_and_errors(
    program: Program, operands: Operands, s: Array, e_s: Array, b: Array, h: Array, i: Array, j: Array,
    model: Arithmetic, s_dot: Array = None, e_s_dot: Array = None,
) -> list[tuple[Array, Array]]:
    """(value, error) of each result, float64; they broadcast against s.

    Parameters
    ----------
    s, e_s : float64 arrays
        Exact scores, and how far a kernel's may be from them.
    b, h, i, j : int arrays
        As in `values`.
    s_dot, e_s_dot : float64 arrays, optional
        Exact tangents of the scores, and how far a kernel's may be from them, for a program that reads them.
    """
    values, given = run(program, operands, s, b, h, i, j, s_dot), {"s": e_s, "s_dot": e_s_dot}
    approximations: list[Approximation] = []
    with np.errstate(all="ignore"):
        for instruction, x in zip(program.instructions, values):
            args = [approximations[a] for a in instruction.args]
            is_given = instruction.op in given
            error: Array = given[instruction.op] if is_given else _error(program, instruction, x, args, model)
            if instruction.kind == "real" and not is_given:
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
    """Return whether no rounding can make a result negative."""
    op = instruction.op
    if op in ("const", "number"):
        value = instruction.value if op == "const" else operands.numbers[instruction.value]
        return instruction.kind != "bool" and bool(value >= 0)
    is_square = op == "mul" and len({*instruction.args}) == 1
    return is_square or op in PRIMITIVES and PRIMITIVES[op].is_nonnegative(args)
