"""Instructions of a score program that have one value in a whole tile of queries and keys.

An index such as a clipped distance, ``np.clip(j - i, -128, 128)``, is monotone in the query and in the key. So it has
one value in a tile if it has the same at two corners, and then each captured array has one element that it is read at.
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
    """The instructions that are uniform where some integers are.

    Attributes
    ----------
    roots : dict of Direction by int
        Integers that depend on query and key: monotone, and arguments of the others.
    values : frozenset of int
        Instructions that depend on query and key by the roots alone.
    """

    roots: dict[int, Direction]
    values: frozenset[int]


def uniform(program: Program) -> Uniform:
    """Find what is uniform in a program: nothing, unless monotone integers alone say where an array is read.

    >>> import numpy as np
    >>> from cuflash.scores import Score
    >>> table = np.zeros(9, np.float32)
    >>> made = Score(lambda s, b, h, i, j, table: s + table[np.clip(j - i, -4, 4) + 4], table=table).program
    >>> [made.instructions[n].op for n in sorted(uniform(made).values)]
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


def _has_steps(root: int, instructions: Sequence[Instruction]) -> bool:
    """Return whether an integer may stay the same from one query or key to the next."""
    ops = {instructions[n].op for n in needed_for(instructions, [root])}
    return any(PRIMITIVES[op].has_steps for op in ops.intersection(PRIMITIVES))


def _direction(
    instruction: Instruction, instructions: Sequence[Instruction], directions: dict[int, Direction]
) -> Direction | None:
    """Return the signs with which an integer changes with the query and the key; None if it may change both ways."""
    op = instruction.op
    if instruction.kind != "int":
        return None
    if op in ("b", "h", "const", "number", "i", "j"):
        return Direction(int(op == "i"), int(op == "j"))
    given = [directions[a] for a in instruction.args if a in directions]
    rule = PRIMITIVES[op].trend if op in PRIMITIVES else None
    if rule is None or len(given) < len(instruction.args):
        return None
    trend = rule(*(instructions[a].value if instructions[a].op == "const" else None for a in instruction.args))
    signs = [{sign * each for sign, each in zip(trend, pair)} - {0} for pair in zip(*given)]
    if not trend or any(len(each) > 1 for each in signs):
        return None
    return Direction(*(each.pop() if each else 0 for each in signs))
