"""Rows that a tile visits one by one, each by some of the tile's own rows."""

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
        Keys that a tile of queries visits, or queries that a tile of keys does, ascending.
    words : uint64 array [n], or None
        Bit t says that the tile's rows from t * tokens to (t + 1) * tokens visit the row; None if all do.
    tokens : int
        Rows of the tile that a bit stands for.
    is_cut : bool
        True if row intervals hide some of the pairs.
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
        """Return whether some of the pairs are hidden."""
        return self.words is not None or self.is_cut

    def parts(self, width: int) -> Iterator[GatheredRows]:
        """The rows in runs of at most `width`."""
        for first in range(0, len(self.rows), width):
            here = slice(first, first + width)
            yield self._replace(rows=self.rows[here], words=None if self.words is None else self.words[here])

    def unvisited(self, height: int) -> Array:
        """Return which rows of a tile of some height do not visit each row, bool [n, height]."""
        if self.words is None:
            return np.zeros((len(self.rows), height), bool)
        octets = self.words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
        bits = np.unpackbits(octets, axis=1, bitorder="little")
        return (np.repeat(bits, self.tokens, axis=1) if self.tokens > 1 else bits)[:, :height] == 0
