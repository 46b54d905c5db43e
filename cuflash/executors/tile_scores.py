"""The score function on tiles of the cpu executor: its values, its derivative, and gradients of its arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array
from ..planning.problem import Problem
from ..scores.program import Program, derived, gradient_loads
from ..scores.values import Operands, run, values

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class TileScores:
    """A problem's score function with its arrays, and the sums of their gradients.

    Scores are tiles [tiles, keys, queries]. They come in natural units and leave times log2(e).

    Attributes
    ----------
    program, slopes, derivatives : Program
        The function; it and its derivative by the score; these and its derivatives by the arrays that have gradients.
    operands : Operands
    sums : dict by array's number
        Gradients of captured arrays, which calls of `gradients` add to.
    """

    program: Program
    slopes: Program
    derivatives: Program
    operands: Operands
    sums: dict[int, Array]
    loads: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, arrays: Mapping[str, Array | None]) -> TileScores:
        """Make the scores of a problem with a score function, on the arrays of a call; gradients start from 0."""
        program = problem.score
        assert program is not None
        keys = [operand.key for operand in problem.operands if operand.is_captured]
        operands = Operands(problem.numbers, [arrays[key] for key in keys], problem.batch)
        gradients: dict[int, Array] = {number: arrays.get(f"d{key}") for number, key in enumerate(keys)}
        sums = {number: total for number, total in gradients.items() if total is not None}
        for total in sums.values():
            total[...] = 0
        names = [program.arrays[number].name for number in sums]
        derivatives = derived(program, names)
        return cls(program, derived(program), derivatives, operands, sums, gradient_loads(derivatives, names))

    @property
    def adds_gradients(self) -> bool:
        """Return whether captured arrays have gradients."""
        return bool(self.sums)

    def apply(self, s: Array, at: tuple[Array, ...]) -> None:
        """Scores become final ones, in their place."""
        (f,) = values(self.program, self.operands, s, *at)
        np.multiply(f, s.dtype.type(_LOG2_E), out=s)

    def gradients(
        self,
        s: Array,
        dp: Array,
        lse_2: Array,
        delta: Array,
        at: tuple[Array, ...],
        mask: Callable[[Array], None],
        *,
        adds: bool,
    ) -> tuple[Array, Array]:
        """P and dS / softmax_scale from scores and dP; where P is 0, so is dS, whatever the derivative is.

        Parameters
        ----------
        mask : callable
            Sets P of masked elements to 0.
        adds : bool
            Add to the gradients of captured arrays, too.
        """
        program = self.derivatives if adds else self.slopes
        found = run(program, self.operands, s, *at)
        f, slope, *by_loads = (found[n] for n in program.results)
        p = np.multiply(f, s.dtype.type(_LOG2_E), out=np.empty_like(s))
        p -= lse_2[..., None, :]
        np.exp2(p, out=p)
        np.minimum(p, 1, out=p)
        mask(p)
        is_zero = p == 0
        dp -= delta[..., None, :]
        dp *= p
        np.copyto(dp, 0, where=is_zero)
        if by_loads:
            for load, by_load in zip(self.loads, by_loads):
                terms = np.multiply(dp, by_load)
                np.copyto(terms, 0, where=is_zero)
                self._add(program, load, found, at[0], terms)
        ds = np.multiply(dp, slope, out=dp)
        np.copyto(ds, 0, where=is_zero)
        return p, ds

    def _add(self, program: Program, load: int, found: Sequence[Any], b: Array, terms: Array) -> None:
        """Add terms to the gradient of the elements that a load read: first over what the index does not depend on."""
        instruction = program.instructions[load]
        total = self.sums[instruction.value]
        indices = [found[a] for a in instruction.args]
        place = self.operands.place(program, instruction, b, indices)
        shape = np.broadcast_shapes((1,) * terms.ndim, *map(np.shape, place))
        axes = tuple(axis for axis, extent in enumerate(shape) if extent == 1 != terms.shape[axis])
        terms = terms.sum(axis=axes, keepdims=True)
        flat = np.ravel_multi_index(np.broadcast_arrays(*place), total.shape) if place else 0
        np.add.at(total.reshape(-1), np.broadcast_to(flat, terms.shape).ravel(), terms.ravel())


def coordinates(
    places: Sequence[tuple[int, int]], queries: Sequence[slice | Array], keys: Sequence[slice | Array]
) -> tuple[Array, ...]:
    """b, h, i and j of tiles of scores, which broadcast against [tiles, keys, queries].

    Parameters
    ----------
    places : sequence of (batch entry, query head)
        One a tile.
    queries, keys : sequence of slices or int arrays
        The rows of each tile.
    """
    b, h = np.array(places, np.int64).T[..., None, None]
    return b, h, _stacked(queries)[:, None, :], _stacked(keys)[:, :, None]


def _stacked(rows: Sequence[slice | Array]) -> Array:
    """The numbers of rows, [tiles, rows], or [1, rows] where all tiles have the same."""
    first = rows[0]
    alike = [first] if all(each is first for each in rows) else rows
    return np.stack([np.arange(each.start, each.stop) if isinstance(each, slice) else each for each in alike])
