"""Instructions of a score program that have a single value in a tile of queries and keys.

An index such as a clipped distance, ``np.clip(j - i, -128, 128)``, is monotone in the query and in the key. So it is
constant in a tile if it is equal at two corners, and then a single element of each captured array is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ._primitives import PRIMITIVES
from .program import Instruction, Program, depends, needed_for


class Direction(NamedTuple):
    """The direction of an integer along queries and keys: 1 never decreases, 0 never changes, -1 never increases."""

    query: int
    key: int


@dataclass(frozen=True)
class Uniform:
    """The instructions that are constant in a tile if certain integers, the roots, are constant.

    Attributes
    ----------
    roots : dict of Direction by int
        Monotone integers that depend on query and key, and on which `values` depend.
    values : frozenset of int
        Instructions that depend on query and key only through the roots.
    """

    roots: dict[int, Direction]
    values: frozenset[int]


def uniform(program: Program) -> Uniform:
    """Find the instructions that may be uniform; there are none if no array index consists of monotone integers.

    >>> import numpy as np
    >>> from cuflash.scores import Score
    >>> table = np.zeros(9, np.float32)
    >>> program = Score(lambda s, b, h, i, j, table: s + table[np.clip(j - i, -4, 4) + 4], table=table).program
    >>> [program.instructions[n].op for n in sorted(uniform(program).values)]
    ['load']
    """
    instructions, dependencies = program.instructions, depends(program)
    directions: dict[int, Direction] = {}
    values: set[int] = set()
    roots: dict[int, Direction] = {}
    for n, instruction in enumerate(instructions):
        direction = _direction(instruction, instructions, directions)
        if direction is not None:
            directions[n] = direction
        elif "s" not in dependencies[n] and {"i", "j"} <= dependencies[n]:
            varying = [a for a in instruction.args if dependencies[a] & {"i", "j"}]
            if all(a in values or (a in directions and {"i", "j"} <= dependencies[a]) for a in varying):
                values.add(n)
                roots |= {a: directions[a] for a in varying if a not in values}
    reads = any(instructions[n].op == "load" for n in values)
    if not reads or not all(_has_steps(n, instructions) for n in roots):
        return Uniform({}, frozenset())
    return Uniform(roots, frozenset(values))


def of_distance(program: Program) -> frozenset[int]:
    """Return the instructions that depend on the query and the key only through their distance.

    >>> import numpy as np
    >>> from cuflash.scores import Score
    >>> table = np.zeros(9, np.float32)
    >>> program = Score(lambda s, b, h, i, j, table: s + table[np.clip(j - i, -4, 4) + 4], table=table).program
    >>> [program.instructions[n].op for n in sorted(of_distance(program))]
    ['sub', 'max', 'min', 'add', 'load']
    """
    instructions, dependencies = program.instructions, depends(program)
    distances: set[int] = set()
    for n, each in enumerate(instructions):
        varying = [a for a in each.args if dependencies[a] & {"i", "j"}]
        is_distance = each.op == "sub" and {instructions[a].op for a in varying} == {"i", "j"}
        if varying and (is_distance or (distances.issuperset(varying) and "s" not in dependencies[n])):
            distances.add(n)
    return frozenset(distances)


def _has_steps(root: int, instructions: Sequence[Instruction]) -> bool:
    """True if an integer may have the same value for two neighbouring queries or keys."""
    ops = {instructions[n].op for n in needed_for(instructions, [root])}
    return any(PRIMITIVES[op].has_steps for op in ops.intersection(PRIMITIVES))


def _direction(
    instruction: Instruction, instructions: Sequence[Instruction], directions: dict[int, Direction]
) -> Direction | None:
    """Return the signs of an integer's change with the query and the key; None if the sign is not fixed."""
    op = instruction.op
    if instruction.kind != "int":
        return None
    if op in ("b", "h", "const", "number", "i", "j"):
        return Direction(int(op == "i"), int(op == "j"))
    known = [directions[a] for a in instruction.args if a in directions]
    rule = PRIMITIVES[op].trend if op in PRIMITIVES else None
    if rule is None or len(known) < len(instruction.args):
        return None
    trend = rule(*(instructions[a].value if instructions[a].op == "const" else None for a in instruction.args))
    signs = [{sign * each for sign, each in zip(trend, pair)} - {0} for pair in zip(*known)]
    if not trend or any(len(each) > 1 for each in signs):
        return None
    return Direction(*(each.pop() if each else 0 for each in signs))
