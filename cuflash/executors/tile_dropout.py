"""Dropout on tiles of the cpu executor: which weights are dropped, and what that does to weights and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..dropout import Draws, keep_mask, seed_of
from ..planning.problem import Problem


class Dropped(NamedTuple):
    """The weights of tiles that are dropped, bool [tiles, keys, queries], and what the others are multiplied by."""

    where: Array
    factor: float

    def apply(self, p: Array) -> None:
        """Set weights that are dropped to 0, in their place; the others are yet to be multiplied by the factor."""
        np.copyto(p, 0, where=self.where)

    def apply_to_gradients(self, dp: Array) -> None:
        """The gradient by all weights from that by the weights that are left, in its place."""
        dp *= dp.dtype.type(self.factor)
        np.copyto(dp, 0, where=self.where)


@dataclass(frozen=True, eq=False)
class TileDropout:
    """A problem's dropout with its seed. Weights are tiles [tiles, keys, queries].

    Attributes
    ----------
    draws : Draws
    numbers : pair of int
        The seed and the offset.
    num_heads : int
        Query heads of a batch entry.
    """

    draws: Draws
    numbers: tuple[int, int]
    num_heads: int

    @classmethod
    def of(cls, problem: Problem, numbers: Sequence[int], array: Array | None) -> TileDropout:
        """Make the dropout of a problem's tiles, by a seed and an offset; an array may hold the seed."""
        draws, (seed, offset) = problem.dropout, numbers
        assert draws is not None
        return cls(draws, (seed_of(array) if draws.reads_seed else seed, offset), problem.num_heads)

    def dropped(self, at: tuple[Array, ...]) -> Dropped:
        """Return the weights that are dropped, from b, h, i and j of tiles as `tile_scores.coordinates` has them."""
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
