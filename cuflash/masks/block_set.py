"""Sets of blocks as masks: sorted block numbers or a boolean grid, with fast queries of rectangles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from ..arrays import Array, namespace
from .base import Mask
from .coordinates import LeadingArray, widened


@dataclass(frozen=True, eq=False, repr=False)
class BlockSet(Mask):
    """A set of blocks as sorted numbers, with flags for full blocks: the resolved form of `BlockPattern` and `Sparse`.

    Level l of `levels` lists the cells of 2^l by 2^l blocks that contain any block, and whether all blocks of the cell
    are full. So four look-ups decide whether a rectangle of any size contains a block, and whether it is full.
    """

    grid: tuple[int, int, int, int]  # batch or 1, heads or 1, num_q_blocks, num_kv_blocks
    block: tuple[int, int]
    keys: Array
    full: Array
    _natural_block: tuple[int, int] | None = None  # `block`, or None if block lists may use any block size

    @cached_property
    def levels(self) -> list[tuple[Array, Array]]:
        return _pyramid(self.grid, self.keys, self.full)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        _, is_kept = self.find(b, h, widened(i) // self.block[0], widened(j) // self.block[1])
        return is_kept

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        rows = i0 // self.block[0], (i1 - 1) // self.block[0]
        cols = j0 // self.block[1], (j1 - 1) // self.block[1]
        extent = max(int(np.max(rows[1] - rows[0], initial=0)), int(np.max(cols[1] - cols[0], initial=0)))
        level = min(extent.bit_length(), len(self.levels) - 1)  # a rectangle touches at most two cells per side
        corners = [self.find(b, h, row >> level, col >> level, level) for row in rows for col in cols]
        _, full = self.levels[level]
        may = reduce(np.logical_or, (hit for _, hit in corners))
        must = reduce(np.logical_and, (hit & full[position] if len(full) else hit for position, hit in corners))
        return may, must

    def find(self, b: Array, h: Array, row: Array, col: Array, level: int = 0) -> tuple[Array, Array]:
        """Return the position of a cell's number in the sorted list of a level, and whether it is present."""
        keys, _ = self.levels[level]
        batch, heads, num_rows, num_cols = self.grid
        num_rows, num_cols = _coarse(num_rows, level), _coarse(num_cols, level)
        matrix = (b if batch > 1 else 0) * heads + (h if heads > 1 else 0)
        key = np.asarray((matrix * num_rows + row) * num_cols + col)
        if len(keys) == 0:
            return np.zeros(key.shape, np.int64), np.zeros(key.shape, bool)
        position = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        return position, keys[position] == key


@dataclass(frozen=True, eq=False, repr=False)
class BlockGrid(Mask):
    """One boolean per block: the resolved form of `Dense`, and of `BlockPattern` with an array on a device.

    If `_natural_block` is None, block lists may use any block size, and rectangles have no closed form.
    """

    blocks: LeadingArray  # heads or 1, num_q_blocks, num_kv_blocks after the leading axes
    block: tuple[int, int] = (1, 1)
    _natural_block: tuple[int, int] | None = None

    @cached_property
    def sums(self) -> LeadingArray:
        """The number of kept blocks above and to the left of each corner of the grid."""
        is_kept = self.blocks.array
        xp, (*leading, num_rows, num_cols) = namespace(is_kept), is_kept.shape
        sums = xp.zeros((*leading, num_rows + 1, num_cols + 1), dtype=np.int64)
        sums[..., 1:, 1:] = xp.cumsum(xp.cumsum(is_kept, axis=-2, dtype=np.int64), axis=-1)
        return LeadingArray(sums, self.blocks.batch)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.blocks.at(b, h, i // self.block[0], j // self.block[1])

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        if self._natural_block is None:
            return True, False
        top, bottom = i0 // self.block[0], (i1 - 1) // self.block[0] + 1
        left, right = j0 // self.block[1], (j1 - 1) // self.block[1] + 1
        above, below = (self.sums.at(b, h, row, right) - self.sums.at(b, h, row, left) for row in (top, bottom))
        return below - above > 0, below - above == (bottom - top) * (right - left)


def _coarse(extent: int, level: int) -> int:
    return (extent + (1 << level) - 1) >> level


def _pyramid(grid: tuple[int, int, int, int], keys: Array, full: Array) -> list[tuple[Array, Array]]:
    """Return the cells of each level, and whether all blocks in them are full."""
    num_rows, num_cols = grid[2:]
    levels = [(keys, full)]
    while num_rows > 1 or num_cols > 1:
        up_rows, up_cols = (num_rows + 1) // 2, (num_cols + 1) // 2
        matrix, cell = np.divmod(keys, num_rows * num_cols)
        row, col = np.divmod(cell, num_cols)
        parents = (matrix * up_rows + row // 2) * up_cols + col // 2
        up_keys, group = np.unique(parents, return_inverse=True)
        num_full = np.bincount(group, weights=full, minlength=len(up_keys))
        up_row, up_col = np.divmod(up_keys % (up_rows * up_cols), up_cols)
        num_children = np.minimum(2, num_rows - 2 * up_row) * np.minimum(2, num_cols - 2 * up_col)
        keys, full = up_keys, num_full == num_children
        num_rows, num_cols = up_rows, up_cols
        levels.append((keys, full))
    return levels


def sorted_places(matrix: Array) -> tuple[Array, Array]:
    """Return the sorted flat indices of a scipy.sparse array's nonzeros, and flags: True for each, as all are full."""
    stored = matrix.tocoo(copy=True)
    stored.sum_duplicates()
    is_kept = stored.data != 0
    keys = np.sort(stored.row[is_kept].astype(np.int64) * matrix.shape[1] + stored.col[is_kept])
    return keys, np.ones(len(keys), bool)
