"""Dropout on tiles of the cpu executor: the dropped weights, and their effect on weights and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..dropout import Draws, keep_mask, seed_of
from ..planning.problem import Problem


class Dropped(NamedTuple):
    """The dropped weights of tiles, bool [tiles, keys, queries], and the factor of the kept weights."""

    where: Array
    factor: float

    def apply(self, p: Array) -> None:
        """Set dropped weights to 0 in place; the caller later multiplies the others by the factor."""
        np.copyto(p, 0, where=self.where)

    def apply_to_gradients(self, dp: Array) -> None:
        """Convert the gradient with respect to dropped-out weights into that with respect to all weights, in place."""
        dp *= dp.dtype.type(self.factor)
        np.copyto(dp, 0, where=self.where)


@dataclass(frozen=True, eq=False)
class TileDropout:
    """A problem's dropout with its seed, on weights in tiles [tiles, keys, queries].

    Attributes
    ----------
    draws : Draws
    numbers : pair of int
        The seed and the offset.
    num_heads : int
        Query heads per batch entry of the larger call, if the call is a part of one.
    """

    draws: Draws
    numbers: tuple[int, int]
    num_heads: int

    @classmethod
    def of(cls, problem: Problem, numbers: Sequence[int], array: Array | None) -> TileDropout:
        """Create the dropout of a problem's tiles from a seed and an offset; an array may hold the seed."""
        draws, (seed, offset) = problem.dropout, numbers
        assert draws is not None
        return cls(draws, (seed_of(array) if draws.reads_seed else seed, offset), problem.whole_shape.num_heads)

    def dropped(self, at: tuple[Array, ...]) -> Dropped:
        """Return the dropped weights of tiles with coordinates b, h, i and j, as from `tile_scores.coordinates`."""
        b, h, i, j = at
        heads = (b * self.num_heads + h)[:, 0, 0]
        rows, columns = i[:, 0, :], j[:, :, 0]
        if len(rows) == len(columns) == 1:
            is_kept = keep_mask(self.draws, self.numbers, heads, rows[0], columns[0])
        else:
            shape = len(heads), rows.shape[-1], columns.shape[-1]
            rows, columns = (np.broadcast_to(x, (len(heads), x.shape[-1])) for x in (rows, columns))
            is_kept = np.empty(shape, bool)
            for number, head in enumerate(heads):
                (is_kept[number],) = keep_mask(self.draws, self.numbers, head[None], rows[number], columns[number])
        return Dropped(~is_kept.swapaxes(-1, -2), self.draws.factor)
