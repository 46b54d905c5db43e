"""Evaluation of score programs on NumPy arrays: tiles of scores, and index arrays that broadcast against them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ._primitives import PRIMITIVES
from .program import Instruction, Program
from .ranges import integer_range


class Operands(NamedTuple):
    """The inputs of a program other than the scores.

    Attributes
    ----------
    numbers : sequence of float
        One number per slot.
    arrays : sequence of array
        The captured arrays, in the program's order.
    batch : tuple of int
        The leading axes, whose entries b numbers in C order.
    """

    numbers: Sequence[float]
    arrays: Sequence[Array]
    batch: tuple[int, ...] = ()

    def place(self, program: Program, load: Instruction, b: Array, indices: Sequence[Array]) -> tuple[Array, ...]:
        """Return the index of the elements that a load reads, as a tuple of index arrays that broadcast."""
        num_leading = program.num_leading_axes(load)
        if not num_leading:
            return tuple(indices)
        shape = self.arrays[load.value].shape[:num_leading]
        entries = np.unravel_index(b, self.batch) if self.batch else ()
        own = entries[len(self.batch) - num_leading :]
        return (*(0 if extent == 1 else entry for entry, extent in zip(own, shape)), *indices)

    def loaded(self, load: Instruction, place: tuple[Array, ...], real: type[np.floating]) -> Array:
        """Return the elements at an index: reals converted to `real`, integers clipped to int32 and as int64."""
        x = self.arrays[load.value][place]
        if load.kind == "real":
            return np.asarray(x).astype(real, copy=False)
        if load.kind == "bool":
            return x
        return np.clip(x, *integer_range(x.dtype)).astype(np.int64)


def values(
    program: Program, operands: Operands, s: Array, b: Array, h: Array, i: Array, j: Array, s_dot: Array = None
) -> list[Array]:
    """Evaluate a program; its results broadcast against s.

    Parameters
    ----------
    s : array of float32, float64 or wider
        Scores; all computations use their dtype.
    b, h, i, j : int arrays
        Batch entries, heads, and positions of queries and of keys; they broadcast against s.
    s_dot : array, optional
        The tangent of s, for a program that reads it.
    """
    computed = run(program, operands, s, b, h, i, j, s_dot)
    return [computed[n] for n in program.results]


def run(
    program: Program, operands: Operands, s: Array, b: Array, h: Array, i: Array, j: Array, s_dot: Array = None
) -> list[Array]:
    """Compute the value of each instruction."""
    real = np.asarray(s).dtype.type
    inputs = {"s": s, "s_dot": s_dot, "b": b, "h": h, "i": i, "j": j}
    computed: list[Array] = []
    with np.errstate(all="ignore"):
        for instruction in program.instructions:
            if instruction.op in inputs:
                computed.append(inputs[instruction.op])
            else:
                args = [computed[n] for n in instruction.args]
                computed.append(result(program, operands, instruction, args, b, real))
    return computed


def result(
    program: Program, operands: Operands, instruction: Instruction, args: list[Array], b: Array, real: type[np.floating]
) -> Array:
    """Compute an instruction that is neither the score, nor its tangent, nor a coordinate.

    Parameters
    ----------
    args : list
        The values of the instruction's arguments.
    b : int array
        Batch entries.
    real : type
        The scalar type of reals.
    """
    op = instruction.op
    if op == "const":
        return real(instruction.value) if instruction.kind == "real" else instruction.value
    if op == "number":
        number = operands.numbers[instruction.value]
        return int(number) if instruction.kind == "int" else real(number)
    if op == "real":
        return np.asarray(args[0]).astype(real)
    if op == "load":
        return operands.loaded(instruction, operands.place(program, instruction, b, args), real)
    return PRIMITIVES[op].value(*args)
