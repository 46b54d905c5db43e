"""Ranges of the integers of a score program, which prove that indices stay within their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ._primitives import PRIMITIVES
from .program import Instruction, Program

LARGEST = 2**31 - 1  # integers of a program are int32 in kernels
_MOST_EXACT = 2**24  # float32 represents every integer up to this
_LONGEST = 40  # maximum number of characters of an expression in a message


class Range(NamedTuple):
    """The least and the greatest value of an integer expression."""

    least: int
    most: int


def ranges(program: Program, extents: Mapping[str, int]) -> dict[int, Range]:
    """Compute the range of each integer instruction, for b, h, i and j below these extents, each at least 1.

    The contents of integer arrays are not inspected: their range is that of their dtype, within int32.
    """
    known: dict[int, Range] = {}
    for n, instruction in enumerate(program.instructions):
        if instruction.kind == "int":
            args = [known[a] for a in instruction.args if a in known]
            known[n] = _range_of(program, instruction, args, extents)
    return known


def _range_of(
    program: Program, instruction: Instruction, args: Sequence[Range], extents: Mapping[str, int]
) -> Range:
    op = instruction.op
    if op in extents:
        return Range(0, extents[op] - 1)
    if op == "const":
        return Range(instruction.value, instruction.value)
    if op == "number":  # seqlen_kv - seqlen_q
        return Range(-extents["i"], extents["j"])
    if op == "load":
        return integer_range(program.arrays[instruction.value].dtype)
    primitive = PRIMITIVES[op]
    if primitive.range is not None:
        return Range(*primitive.range(*args))
    # All other operations are monotone in each argument, so that their extremes are at the corners of the ranges.
    assert primitive.fold is not None, op
    corners = [primitive.fold(*each) for each in product(*args)]
    return Range(min(corners), max(corners))


def integer_range(dtype: DTypeLike) -> Range:
    """Return the range of integers that are loaded from an array: that of its dtype, clipped to int32."""
    info = np.iinfo(dtype)
    return Range(max(int(info.min), -LARGEST - 1), min(int(info.max), LARGEST))


def range_reasons(
    program: Program, shapes: Sequence[tuple[int, ...]], batch: tuple[int, ...], extents: Mapping[str, int], dtype: str
) -> list[str]:
    """Return the reasons why a kernel, which does not check indices, might read out of bounds or overflow.

    Parameters
    ----------
    shapes : sequence of tuple of int
        Shapes of the program's arrays.
    batch : tuple of int
        The problem's leading axes.
    extents : mapping of "b", "h", "i" and "j" to int
        The number of values of each.
    dtype : str
        The dtype of the program's reals, float32 or float64.
    """
    if 0 in extents.values():  # nothing is computed
        return []
    reasons = _batch_reasons(program, shapes, batch)
    known = ranges(program, extents)
    for n, instruction in enumerate(program.instructions):
        if n in known and (known[n].least < -LARGEST - 1 or known[n].most > LARGEST):
            return [
                f"{expression(program, n)} may be {known[n].least}..{known[n].most} and integers of a score must be "
                f"within int32: clip its operands, or compute with reals, as in 1.0 * i"
            ]
        if instruction.op == "load":
            reasons += _index_reasons(program, instruction, shapes[instruction.value], known)
        if instruction.op == "real" and dtype == "float32":
            name = program.instructions[instruction.args[0]].op
            if extents.get(name, 0) > _MOST_EXACT:
                reasons.append(
                    f"{name} must be at most {_MOST_EXACT} to be exact in float32; got {extents[name]}: use float64"
                )
    return list(dict.fromkeys(reasons))


def _batch_reasons(program: Program, shapes: Sequence[tuple[int, ...]], batch: tuple[int, ...]) -> list[str]:
    reasons = []
    for load in program.instructions:
        if load.op == "load":
            leading = shapes[load.value][: program.num_leading_axes(load)]
            try:
                is_fit = np.broadcast_shapes(leading, batch) == batch
            except ValueError:
                is_fit = False
            if not is_fit:
                reasons.append(
                    f"the axes of {program.arrays[load.value].name} before its {len(load.args)} indices must broadcast "
                    f"against the batch {batch}; got {leading}"
                )
    return reasons


def _index_reasons(
    program: Program, load: Instruction, shape: tuple[int, ...], known: Mapping[int, Range]
) -> list[str]:
    reasons = []
    name, leading = program.arrays[load.value].name, program.num_leading_axes(load)
    for axis, n in enumerate(load.args, leading):
        extent = shape[axis]
        least, most = known[n]
        if program.instructions[n].op == "h" and extent != most + 1:
            reasons.append(
                f"axis {axis} of {name} must have an element for each of {most + 1} query heads, since its index is h; "
                f"got shape {shape}"
            )
            continue
        if least >= 0 and most < extent:
            continue
        fix = f"clip it, np.clip({expression(program, n)}, 0, {extent - 1})" if extent else "pass a nonempty array"
        sources = [program.arrays[each.value].name for each in _loads_in(program, n)]
        if sources:
            which = f"depends on the contents of {' and '.join(dict.fromkeys(sources))}"
        else:
            which = f"may be {least}..{most}"
        reasons.append(f"index {axis} of {name} {which} and the axis has {extent} elements: {fix}")
    return reasons


def _loads_in(program: Program, n: int) -> list[Instruction]:
    """Return the loads on which an instruction's value depends."""
    is_needed = {n}
    for m in range(n, -1, -1):
        if m in is_needed:
            is_needed.update(program.instructions[m].args)
    return [program.instructions[m] for m in sorted(is_needed) if program.instructions[m].op == "load"]


def expression(program: Program, n: int) -> str:
    """Format an instruction as a user would write it; "the index" if that is too long."""
    texts: list[str | None] = []
    for instruction in program.instructions[: n + 1]:
        args = [texts[a] for a in instruction.args]
        text = None if None in args else _written(program, instruction, [arg for arg in args if arg is not None])
        texts.append(text if text is not None and len(text) <= _LONGEST else None)
    return texts[n] or "the index"


def _written(program: Program, instruction: Instruction, args: list[str]) -> str:
    op, value = instruction.op, instruction.value
    if op == "const":
        return repr(value)
    if op == "number":
        return "(seqlen_kv - seqlen_q)"
    if op == "load":
        return f"{program.arrays[value].name}[{', '.join(args)}]"
    if op not in PRIMITIVES:
        return f"{op}({', '.join(args)})" if args else op
    if not PRIMITIVES[op].is_call:
        ops = [program.instructions[n].op for n in instruction.args]
        args = [f"({arg})" if each in PRIMITIVES and PRIMITIVES[each].is_infix else arg for each, arg in zip(ops, args)]
    return PRIMITIVES[op].text(args)
