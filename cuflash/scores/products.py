"""Score programs that take the product q . k, for kernels that do not multiply it by the softmax scale first.

Factors before or after the score function, such as the softmax scale and the reciprocal of a cap, are combined to one
factor per batch entry and head. So a kernel multiplies each score once, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from .program import Builder, Program, curvature, depends, needed_for

_LEAST_SCALE, _GREATEST_SCALE = 2.0**-20, 2.0**20
_LEAST_NUMBER, _GREATEST_NUMBER = 2.0**-60, 2.0**60
_TWO_LOG2_E = 2 / math.log(2)


class OfProducts(NamedTuple):
    """A score program whose input is q . k instead of the scaled score.

    Attributes
    ----------
    program : Program
        The program, with instructions that other programs do not have: ``scale`` is the softmax scale,
        ``inverse_scale`` its reciprocal, and ``logistic`` of x is 1 / (1 + 2^x).
    is_unscaled : bool
        True if the result must be multiplied by the softmax scale.
    """

    program: Program
    is_unscaled: bool


def can_take_products(program: Program, numbers: Sequence[float], scale: float) -> bool:
    """True if factors can be combined: none can overflow or underflow, and no array is read at a query or key index."""
    dependencies = depends(program)
    loads = [n for n, each in enumerate(program.instructions) if each.op == "load"]
    return (
        _LEAST_SCALE <= scale <= _GREATEST_SCALE
        and all(_LEAST_NUMBER <= abs(x) <= _GREATEST_NUMBER for x in numbers if x)
        and not any(dependencies[n] & {"i", "j"} for n in loads)
    )


def of_products(program: Program) -> OfProducts:
    """Convert a program with one result to a program that computes the same score from q . k."""
    is_unscaled = curvature(program) == "shift"
    rewriting = _Rewriting(program)
    result = rewriting.unscaled(program.results[0]) if is_unscaled else rewriting.value(program.results[0])
    return OfProducts(rewriting.program(result), is_unscaled)


class _Rewriting:
    """The construction of the new program from the instructions of the old one."""

    def __init__(self, program: Program) -> None:
        self._old, self._new = program, Builder(program.arrays, program.num_numbers)
        self._of_tile = [names <= {"b", "h"} for names in depends(program)]
        self._users = [sum(each.args.count(n) for each in program.instructions) for n in range(len(self._of_tile))]
        self._values: dict[int, int] = {}

    def program(self, result: int) -> Program:
        needed = needed_for(self._new.instructions, [result])
        place = {n: count for count, n in enumerate(needed)}
        instructions = (self._new.instructions[n] for n in needed)
        renumbered = tuple(each._replace(args=tuple(place[a] for a in each.args)) for each in instructions)
        return Program(renumbered, self._old.arrays, self._old.num_numbers, (place[result],))

    def value(self, n: int) -> int:
        """Return the new instruction that computes the value of an old one."""
        if n not in self._values:
            self._values[n] = self._rewritten(n)
        return self._values[n]

    def unscaled(self, n: int) -> int:
        """Return the new instruction that computes the value of an old one, divided by the softmax scale."""
        op, kind, args, _ = self._old.instructions[n]
        if op == "s":
            return self._new.put("s", "real")
        if op in ("add", "sub", "neg"):
            return self._new.put(op, kind, *(self.unscaled(a) for a in args))
        return self._times(n, [self._new.put("inverse_scale", "real")])

    def _rewritten(self, n: int) -> int:
        op, kind, args, number = self._old.instructions[n]
        if self._of_tile[n]:
            return self._new.put(op, kind, *(self.value(a) for a in args), value=number)
        if op in ("s", "tanh") or (op == "mul" and kind == "real"):
            return self._times(n, [])
        return self._new.put(op, kind, *(self.value(a) for a in args), value=number)

    def _times(self, n: int, factors: list[int]) -> int:
        """Return the new instruction for an old value times factors; all factors that a tile shares become one."""
        new = self._new
        while True:
            op, kind, args, _ = self._old.instructions[n]
            of_tile = [a for a in args if self._of_tile[a]]
            if self._of_tile[n] or op != "mul" or len(of_tile) != 1:
                break
            factors = [*factors, self.value(of_tile[0])]
            n = next(a for a in args if not self._of_tile[a])
            if self._users[n] > 1 and self._old.instructions[n].op != "s":  # other instructions need its value
                return new.put("mul", "real", self.value(n), self._product(factors))
        if self._of_tile[n]:
            return self._product([self.value(n), *factors])
        if op == "s":
            return new.put("mul", "real", new.put("s", "real"), self._product([new.put("scale", "real"), *factors]))
        if op == "tanh":  # tanh x = 1 - 2 / (1 + 2^(2 log2(e) x))
            exponent = self._times(args[0], [new.const(_TWO_LOG2_E)])
            one = self._product(factors) if factors else new.const(1.0)
            logistic = new.put("logistic", "real", exponent)
            return new.put("sub", "real", one, new.put("mul", "real", self._product([one, new.const(2.0)]), logistic))
        value = new.put(op, kind, *(self.value(a) for a in args), value=self._old.instructions[n].value)
        return new.put("mul", "real", value, self._product(factors)) if factors else value

    def _product(self, factors: list[int]) -> int:
        return reduce(lambda a, b: self._new.put("mul", "real", a, b), factors)
