"""Rows that a tile visits, with a bit per group of the tile's rows, which is set if the group visits the row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..arrays import Array


class GatheredRows(NamedTuple):
    """Rows that a tile visits, and which of the tile's own rows visit each of them.

    Attributes
    ----------
    rows : int64 array [n]
        Keys that a tile of queries visits, or queries that visit a tile of keys, ascending.
    words : uint64 array [n], or None
        Bit t is set if the tile's rows from t * tokens to (t + 1) * tokens visit the row; None if all rows do.
    tokens : int
        Number of rows of the tile per bit.
    is_cut : bool
        True if row intervals mask some of the pairs.
    """

    rows: Array
    words: Array | None
    tokens: int
    is_cut: bool

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def is_partial(self) -> bool:
        """True if some of the pairs are masked."""
        return self.words is not None or self.is_cut

    def parts(self, width: int) -> Iterator[GatheredRows]:
        """Yield the rows in parts of at most `width` rows."""
        for first in range(0, len(self.rows), width):
            part = slice(first, first + width)
            yield self._replace(rows=self.rows[part], words=None if self.words is None else self.words[part])

    def unvisited(self, height: int) -> Array:
        """Return which rows of a tile of this height do not visit each row, bool [n, height]."""
        if self.words is None:
            return np.zeros((len(self.rows), height), bool)
        octets = self.words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
        bits = np.unpackbits(octets, axis=1, bitorder="little")
        return (np.repeat(bits, self.tokens, axis=1) if self.tokens > 1 else bits)[:, :height] == 0
