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
from .program import FOLDED_NUMBERS, Instruction, Program, derived, gradient_loads
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


def values_and_errors(
    program: Program, operands: Operands, s: Array, e_s: Array, b: Array, h: Array, i: Array, j: Array,
    model: Arithmetic,
) -> list[tuple[Array, Array]]:
    """(value, error) of each result, float64; they broadcast against s.

    Parameters
    ----------
    s, e_s : float64 arrays
        Exact scores, and how far a kernel's may be from them.
    b, h, i, j : int arrays
        As in `values`.
    """
    values = run(program, operands, s, b, h, i, j)
    approximations: list[Approximation] = []
    with np.errstate(all="ignore"):
        for instruction, x in zip(program.instructions, values):
            args = [approximations[a] for a in instruction.args]
            error: Array = e_s if instruction.op == "s" else _error(program, instruction, x, args, model)
            if instruction.kind == "real" and instruction.op != "s":
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
