"""The text of a score function that stages tiles of a captured array, and stores tiles of its gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..arrays import KNOWN_DTYPES
from ..planning.score_launches import num_leading
from ..scores.program import Instruction, Program

if TYPE_CHECKING:
    from .score_text import Printer

ELEMENTS = {each.numpy.name: each.element for each in KNOWN_DTYPES} | {
    "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t", "bool": "uint8_t",
}  # fmt: skip


def staged_matrices(printer: Printer) -> list[str]:
    """Return functions for the matrices of the staged array and its gradient at a tile's batch entry and head."""
    lines, program = list[str](), printer.program
    for n, what, const in ((printer.staged, "array", "const "), (printer.stored, "gradient", "")):
        if n is None:
            continue
        load = program.instructions[n]
        axes = program.num_leading_axes(load)
        row = axes + len(load.args) - 2 + (printer.num_part_axes(load.value) if what == "gradient" else 0)
        strides = ", ".join(f"{what}_{load.value}_strides[{axis}]" for axis in (row, row + 1))
        element = ELEMENTS[program.arrays[load.value].dtype]
        if what == "array":
            lines += [f"  using StagedElement = {element};", *_staged_coords(program, load)]
        lines += [
            f"  CUFLASH_DEVICE tile::Matrix<{const}{element}> staged_{what}(const Tile& tile) const {{",
            f"    return {{{printer.place(load._replace(args=load.args[:-2]), '', what, axes)}, {strides}, 0, 0}};",
            "  }",
        ]
    return lines


def _staged_coords(program: Program, load: Instruction) -> list[str]:
    """Return functions for the staged array's address, and for a tile's index in the last three leading axes."""
    member, axes = f"array_{load.value}", program.num_leading_axes(load)
    lines = [f"  CUFLASH_DEVICE const void* staged_data() const {{ return {member}; }}"]
    lines.append("  CUFLASH_DEVICE void staged_coords(int b, int h, int (&at)[3]) const {")
    indices = [program.instructions[n] for n in load.args[:-2]]
    values = [""] * axes + [constant(each) if each.op == "const" else each.op for each in indices]
    places = [*range(len(values))][::-1]
    for place, axis in enumerate(places[:3]):
        value = values[axis]
        if axis < axes:
            extent = f"static_cast<int>(batch_extents[{num_leading(program) - axes + axis}])"
            lines += [f"    const int n{axis} = b % {extent};", f"    b /= {extent};"]
            value = f"n{axis}"
        lines.append(f"    at[{place}] = {member}_strides[{axis}] == 0 ? 0 : {value};")
    return [*lines, *(f"    at[{place}] = 0;" for place in range(len(places[:3]), 3)), "  }"]


def constant(instruction: Instruction) -> str:
    """Return a constant as C++."""
    value = instruction.value
    if instruction.kind == "bool":
        return str(value).lower()
    if instruction.kind == "int":
        return f"({value})"
    if math.isinf(value):
        return f"({'-' * (value > 0)}ptx::negative_infinity<T>())"
    if math.isnan(value):
        return "(ptx::negative_infinity<T>() - ptx::negative_infinity<T>())"
    return f"T({value!r})"
