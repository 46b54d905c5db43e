"""The score function on tiles of the cpu executor: its values, its derivative, and the gradients of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..masks.places import Places
from ..planning.problem import Problem
from ..scores.program import Program, derived, gradient_loads
from ..scores.values import Operands
from .tile_program import Block, blocks


@dataclass(frozen=True, eq=False)
class TileScores:
    """A problem's score function with its arrays, and the sums of their gradients.

    Scores are tiles [tiles, keys, queries], in natural units.

    Attributes
    ----------
    program, slopes, derivatives : Program
        The function; the function and its derivative with respect to the score; and both with the derivatives with
        respect to the captured arrays that have gradients.
    operands : Operands
    sums : dict of arrays by number
        Gradients of captured arrays, by the array's number; `gradients` adds to them.
    """

    program: Program
    slopes: Program
    derivatives: Program
    operands: Operands
    sums: dict[int, Array]
    loads: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, arrays: Mapping[str, Array | None]) -> TileScores:
        """Create the score function of a problem on the arrays of a call; gradients start at 0."""
        program = problem.score
        assert program is not None
        keys = [operand.key for operand in problem.operands if operand.is_captured]
        operands = Operands(problem.numbers, [arrays[key] for key in keys], problem.whole_shape.batch)
        gradients: dict[int, Array] = {number: arrays.get(f"d{key}") for number, key in enumerate(keys)}
        sums = {number: total for number, total in gradients.items() if total is not None}
        for total in sums.values():
            total[...] = 0
        names = tuple(program.arrays[number].name for number in sums)
        derivatives = derived(program, names)
        return cls(program, derived(program), derivatives, operands, sums, gradient_loads(derivatives, names))

    @property
    def adds_gradients(self) -> bool:
        """True if captured arrays have gradients."""
        return bool(self.sums)

    def apply(self, s: Array, at: tuple[Array, ...]) -> None:
        """Replace scores by final scores, in place."""
        (f,) = self.program.results
        for block in blocks(self.program, self.operands, s, at, frozenset((f,))):
            np.copyto(s[block.tiles, block.keys], block.values[f])

    def gradients(
        self,
        s: Array,
        dp: Array,
        lse: Array,
        delta: Array,
        at: tuple[Array, ...],
        mask: Callable[[Array], None] | None = None,
    ) -> tuple[Array, Array]:
        """Return P and dS / softmax_scale from scores and dP; dS is 0 if P is 0, whatever the derivative is.

        The caller masks both.

        Parameters
        ----------
        lse : array [tiles, queries]
            The lse of the final scores; inf for rows without a key.
        mask : callable, optional
            Sets masked elements of an array to 0. If present, the gradients of captured arrays are accumulated, too.
        """
        program = self.slopes if mask is None else self.derivatives
        f, slope, *by_loads = program.results
        loads = self.loads if by_loads else ()
        requested = frozenset(program.results).union(*(program.instructions[load].args for load in loads))
        is_read_late = any(program.instructions[n].op == "s" for n in (slope, *by_loads))
        is_seen: Array | None = None
        if mask is not None and loads:
            is_seen = np.ones(s.shape, bool)
            mask(is_seen.view(np.uint8))
        for block in blocks(program, self.operands, s, at, requested):
            part, values = (block.tiles, block.keys), block.values
            p = np.empty_like(s[part]) if is_read_late else s[part]
            np.subtract(values[f], lse[block.tiles, None, :], out=p)
            np.exp(p, out=p)
            np.minimum(p, 1, out=p)
            is_zero = zeros_of(p, None if is_seen is None else is_seen[part])
            ds = dp[part]
            ds -= delta[block.tiles, None, :]
            ds *= p
            for load, by_load in zip(loads, by_loads):
                terms = np.multiply(ds, values[by_load])
                clear(terms, is_zero)
                self._add(program, load, block, at[0], terms)
            ds *= values[slope]
            clear(p, is_zero)
            clear(ds, is_zero)
            if is_read_late:
                s[part] = p
        return s, dp

    def _add(self, program: Program, load: int, block: Block, b: Array, terms: Array) -> None:
        """Add terms, summed over axes that the index lacks, to the gradients of the elements that a load read."""
        instruction = program.instructions[load]
        total = self.sums[instruction.value]
        indices = [block.values[a] for a in instruction.args]
        place = self.operands.place(program, instruction, block.of(b), indices)
        shape = np.broadcast_shapes((1,) * terms.ndim, *map(np.shape, place))
        axes = tuple(axis for axis, extent in enumerate(shape) if extent == 1 != terms.shape[axis])
        terms = terms.sum(axis=axes, keepdims=True)
        flat = np.ravel_multi_index(np.broadcast_arrays(*place), total.shape) if place else 0
        np.add.at(total.reshape(-1), np.broadcast_to(flat, terms.shape).ravel(), terms.ravel())


def zeros_of(p: Array, is_seen: Array | None) -> Array | None:
    """Return where elements of P are 0 or masked, or None if there are no such elements."""
    if is_seen is None and p.min() > 0:
        return None
    is_zero = np.equal(p, 0)
    if is_seen is not None:
        is_zero |= ~is_seen
    return is_zero if is_zero.any() else None


def clear(x: Array, where: Array | None) -> None:
    """Set elements to 0, even if they are NaN; None means no elements."""
    if where is not None:
        np.copyto(x, 0, where=where)


def coordinates(
    places: Places | None, heads: Sequence[tuple[int, int]], queries: Sequence[slice | Array],
    keys: Sequence[slice | Array],
) -> tuple[Array, ...]:  # fmt: skip
    """Return b, h, i and j of tiles of scores, which broadcast against [tiles, keys, queries].

    Parameters
    ----------
    places : Places, optional
        The place of the call in a larger one, whose coordinates are then returned.
    heads : sequence of (batch entry, query head)
        One per tile.
    queries, keys : sequence of slices or int arrays
        The rows of each tile.
    """
    b, h = np.array(heads, np.int64).T[..., None, None]
    at = b, h, _stacked(queries)[:, None, :], _stacked(keys)[:, :, None]
    return at if places is None else places.coordinates(*at)


def _stacked(rows: Sequence[slice | Array]) -> Array:
    """Return the row numbers [tiles, rows], or [1, rows] if all tiles have the same rows."""
    first = rows[0]
    alike = [first] if all(each is first for each in rows) else rows
    return np.stack([np.arange(each.start, each.stop) if isinstance(each, slice) else each for each in alike])
