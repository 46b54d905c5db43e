"""Lists of blocks made on a device, where a mask's arrays are. Every shape is known beforehand, so nothing waits.

All blocks of the grid are classified at once, and each list has space for all of them. The number of listed blocks is
on the device alone, last in `indptr`; the unused space behind them holds zeros. Memory grows with the grid here, not
with the blocks kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import NamedTuple

import numpy as np

from ..arrays import Array, Namespace, namespace
from ..masks.base import And, Mask
from ..masks.content import mask_namespace
from ..masks.coordinates import elements
from ..masks.shape import MaskShape
from ..masks.block_set import BlockGrid
from .classify import Blocking, BlockKind, ClassifiedBlocks, extents, row_intervals

_MAX_ELEMENTS_PER_SWEEP = 1 << 24  # elements evaluated in one sweep: bounds the memory of compiling a mask

# CuPy takes plain numbers for scalars, not enumerations.
_FULL, _INTERVAL, _BITS = int(BlockKind.FULL), int(BlockKind.INTERVAL), int(BlockKind.BITS)


@dataclass(frozen=True, eq=False)
class _Grid(Blocking):
    """All blocks of all matrices over which a mask varies, on the device of an array namespace."""

    xp: Namespace

    @property
    def num_rows(self) -> int:
        return self.size[0]

    @property
    def num_cols(self) -> int:
        return self.size[1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.num_heads, *self.size

    @property
    def num_cells(self) -> int:
        return prod(self.shape)

    def strips(self, elements: int) -> Iterator[tuple[slice, slice]]:
        """Runs of matrices, or of block rows of one, of so many elements a block row that a sweep has room for them."""
        height = max(1, min(self.num_rows, _MAX_ELEMENTS_PER_SWEEP // elements))
        at_once = max(1, _MAX_ELEMENTS_PER_SWEEP // (elements * self.num_rows))
        for first in range(0, self.batch * self.num_heads, at_once):
            for top in range(0, self.num_rows, height):
                matrices = slice(first, min(first + at_once, self.batch * self.num_heads))
                yield matrices, slice(top, min(top + height, self.num_rows))


def classify_grid(mask: Mask, shape: MaskShape, block: tuple[int, int]) -> ClassifiedBlocks:
    """`classify` for a resolved mask whose arrays are on a device: blocks as there, but a bit tile for each block.

    Partial blocks are intervals where the mask is one of intervals and of whole blocks, and bits in all other cases.
    """
    xp = mask_namespace(mask)
    if 0 in (shape.num_batch, *shape[1:]):
        grid = _Grid(shape.seqlen_q, shape.seqlen_kv, block, 1, 1, xp)
        return _assembled(grid, xp.zeros(grid.shape, dtype=np.uint8), None, None)
    grid = _Grid(shape.seqlen_q, shape.seqlen_kv, block, *extents(mask, shape, xp), xp)
    if grid.num_cells > np.iinfo(np.int32).max:
        raise MemoryError(f"the grid has {grid.num_cells} blocks, more than int32 counts: use larger blocks")
    factors = mask.operands if type(mask) is And else (mask,)
    closed = tuple(factor for factor in factors if factor.has_intervals)
    whole = [factor for factor in factors if isinstance(factor, BlockGrid) and _divides(block, factor.block)]
    if len(closed) + len(whole) < len(factors):
        kinds, bits = _by_elements(grid, mask)
        return _assembled(grid, kinds, bits, None)
    rows = None
    if closed:
        rows = row_intervals(And(closed), shape.seqlen_q, shape.seqlen_kv, grid.batch, grid.num_heads, xp)
    return _assembled(grid, _by_closed_forms(grid, whole, rows), None, rows)


def _divides(block: tuple[int, int], larger: tuple[int, int]) -> bool:
    return larger[0] % block[0] == 0 and larger[1] % block[1] == 0


def _by_closed_forms(grid: _Grid, whole: list[BlockGrid], rows: tuple[Array, Array] | None) -> Array:
    """Kinds of all blocks, uint8 [batch, heads, rows, cols], of an intersection of whole blocks and row intervals."""
    xp = grid.xp
    first = [
        (xp.arange(extent) * side).reshape([-1 if axis == position else 1 for axis in range(4)])
        for position, (extent, side) in enumerate(zip(grid.shape, (1, 1, *grid.block)))
    ]
    # One element of a block stands for all where blocks are whole.
    some = every = reduce(lambda x, y: x & y, (mask(*first) for mask in whole), xp.ones((1, 1, 1, 1), dtype=bool))
    if rows is not None:
        meets, covers = _met_by_rows(grid, *rows)
        some, every = some & meets, every & covers
    kinds = xp.where(every, _FULL, xp.where(some, _INTERVAL, 0)).astype(np.uint8)
    return xp.broadcast_to(kinds, grid.shape)


def _met_by_rows(grid: _Grid, lo: Array, hi: Array) -> tuple[Array, Array]:
    """Return which blocks hold a key of any row's interval, and which lie in the intervals of all their rows."""
    xp = grid.xp
    block_q, block_kv = grid.block
    start = xp.arange(grid.num_cols) * block_kv
    stop = xp.minimum(start + block_kv, grid.seqlen_kv)
    leading = lo.shape[:2]
    shape = (*leading, grid.num_rows, grid.num_cols)
    meets, covers = xp.empty(shape, dtype=bool), xp.empty(shape, dtype=bool)
    height = max(1, _MAX_ELEMENTS_PER_SWEEP // (leading[0] * leading[1] * block_q * grid.num_cols))
    for top in range(0, grid.num_rows, height):
        bottom = min(top + height, grid.num_rows)
        # The last row stands in for those past the end.
        i = xp.minimum(xp.arange(top * block_q, bottom * block_q), grid.seqlen_q - 1)
        first, end = (side[..., i].reshape(*leading, bottom - top, block_q, 1) for side in (lo, hi))
        meets[:, :, top:bottom] = (xp.maximum(first, start) < xp.minimum(end, stop)).any(axis=3)
        covers[:, :, top:bottom] = ((first <= start) & (stop <= end)).all(axis=3)
    return meets, covers


def _by_elements(grid: _Grid, mask: Mask) -> tuple[Array, Array]:
    """Kinds of all blocks and a bit tile for each, from every element."""
    xp = grid.xp
    block_q, block_kv = grid.block
    num_bytes = -(-block_kv // 8)
    kinds = xp.empty((grid.batch * grid.num_heads, grid.num_rows, grid.num_cols), dtype=np.uint8)
    bits = xp.empty((*kinds.shape, block_q, num_bytes), dtype=np.uint8)
    # Keys of each block, padded to whole bytes.
    key = xp.arange(8 * num_bytes)
    j = (xp.arange(grid.num_cols)[:, None] * block_kv + key).reshape(-1)
    is_key = xp.broadcast_to(key < block_kv, (grid.num_cols, 8 * num_bytes)).reshape(-1) & (j < grid.seqlen_kv)
    for matrices, strip in grid.strips(block_q * grid.num_cols * 8 * num_bytes):
        matrix = xp.arange(matrices.start, matrices.stop)[:, None, None]
        i = xp.arange(strip.start * block_q, strip.stop * block_q)[:, None]
        exists = (i < grid.seqlen_q) & is_key
        allowed = exists & elements(
            mask,
            matrix // grid.num_heads,
            matrix % grid.num_heads,
            xp.minimum(i, grid.seqlen_q - 1),
            xp.minimum(j, grid.seqlen_kv - 1),
        )
        blocks = (strip.stop - strip.start, block_q, grid.num_cols, 8 * num_bytes)
        tiles = xp.broadcast_to(allowed, (len(matrix), *exists.shape)).reshape(len(matrix), *blocks)
        full = (tiles | ~exists.reshape(blocks)).all(axis=(2, 4))
        kinds[matrices, strip] = xp.where(full, _FULL, xp.where(tiles.any(axis=(2, 4)), _BITS, 0))
        packed = xp.packbits(tiles.swapaxes(2, 3).reshape(-1), bitorder="little")
        bits[matrices, strip] = packed.reshape(*full.shape, block_q, num_bytes)
    return kinds.reshape(grid.shape), bits.reshape(-1, block_q, num_bytes)


def _assembled(grid: _Grid, kinds: Array, bits: Array | None, rows: tuple[Array, Array] | None) -> ClassifiedBlocks:
    """Compressed sparse rows with room for every block."""
    xp, capacity = grid.xp, grid.num_cells
    flat = kinds.reshape(-1)
    listed = _Listed.of(kinds.reshape(grid.batch * grid.num_heads * grid.num_rows, grid.num_cols) != 0, capacity)
    cells = xp.arange(capacity, dtype=np.int32)
    tiles = xp.where(flat == _BITS, cells, -1).astype(np.int32)
    if bits is None:
        bits = xp.zeros((0, grid.block[0], -(-grid.block[1] // 8)), dtype=np.uint8)
    lo, hi = (None, None) if rows is None else rows
    return ClassifiedBlocks(
        batch=grid.batch,
        num_heads=grid.num_heads,
        indptr=listed.pointers,
        indices=listed.list(cells % max(grid.num_cols, 1)),
        kinds=listed.list(flat),
        tiles=listed.list(tiles),
        bits=bits,
        lo=lo,
        hi=hi,
    )


class _Listed(NamedTuple):
    """Positions in a list for the chosen cells of a grid, in order; the host does not count them."""

    position: Array  # each cell's place in the list; one past the room of the list where the cell is not listed
    pointers: Array  # where each row's cells start
    capacity: int

    @classmethod
    def of(cls, chosen: Array, capacity: int) -> _Listed:
        """List the cells that booleans [rows, cells of a row] choose."""
        xp = namespace(chosen)
        pointers = xp.zeros(len(chosen) + 1, dtype=np.int32)
        ends = xp.cumsum(chosen.reshape(-1), dtype=np.int32)
        if chosen.size:
            pointers[1:] = ends.reshape(chosen.shape)[:, -1]
        return cls(xp.where(chosen.reshape(-1), ends - 1, capacity), pointers, capacity)

    def list(self, values: Array) -> Array:
        """The values of the cells listed, then zeros."""
        line = namespace(values).zeros(self.capacity + 1, dtype=values.dtype)
        line[self.position] = values  # cells that are not listed write to the last place, which is cut off
        return line[: self.capacity]


def entry_rows(indptr: Array, capacity: int) -> Array:
    """Block row of each entry, int32, and of the room behind them the last one."""
    xp = namespace(indptr)
    rows = xp.searchsorted(indptr, xp.arange(capacity, dtype=np.int32), side="right") - 1
    return xp.clip(rows, 0, max(len(indptr) - 2, 0)).astype(np.int32)


def entry_grid(indptr: Array, indices: Array, num_cols: int) -> Array:
    """The entry of each cell of the grid, int32 [block rows, num_cols]; one past the room of the list for no entry."""
    xp, capacity, num_rows = namespace(indptr), len(indices), len(indptr) - 1
    entry = xp.arange(capacity, dtype=np.int32)
    cell = entry_rows(indptr, capacity).astype(np.int64) * num_cols + xp.clip(indices, 0, max(num_cols - 1, 0))
    grid = xp.full(num_rows * num_cols + 1, capacity, dtype=np.int32)
    grid[xp.where(entry < indptr[-1], cell, num_rows * num_cols)] = entry
    return grid[:-1].reshape(num_rows, num_cols)


def column_lists(
    indptr: Array, indices: Array, num_matrices: int, num_rows: int, num_cols: int
) -> tuple[Array, Array]:
    """Pointers and entry numbers, int32, of each block column of each matrix, rows increasing."""
    grid = entry_grid(indptr, indices, num_cols).reshape(num_matrices, num_rows, num_cols)
    columns = grid.swapaxes(1, 2).reshape(num_matrices * num_cols, num_rows)
    listed = _Listed.of(columns < len(indices), len(indices))
    return listed.pointers, listed.list(columns.reshape(-1))


def longest_first(lengths: Array, longest: int) -> Array:
    """Numbers of rows, int32 [matrices, rows], by their lengths 0..longest, the longest first; of equal ones the last.

    A count for each length, not a sort: CuPy's may wait for the device.
    """
    xp, (num_matrices, num_rows) = namespace(lengths), lengths.shape
    numbers = xp.arange(num_rows - 1, -1, -1, dtype=np.int32)
    has_length = lengths[:, None, ::-1] == xp.arange(longest, -1, -1)[:, None]
    listed = _Listed.of(has_length.reshape(num_matrices * (longest + 1), num_rows), lengths.size)
    return listed.list(xp.broadcast_to(numbers, has_length.shape).reshape(-1)).reshape(num_matrices, num_rows)


def transposed_tiles(bits: Array, block_kv: int) -> Array:
    """Bit tiles [tiles, block_q, ceil(block_kv / 8)] seen from the keys."""
    xp, (num_tiles, block_q, num_bytes) = namespace(bits), bits.shape
    elements = xp.unpackbits(bits.reshape(-1), bitorder="little").reshape(num_tiles, block_q, 8 * num_bytes)
    turned = xp.zeros((num_tiles, block_kv, 8 * -(-block_q // 8)), dtype=np.uint8)
    turned[:, :, :block_q] = elements[:, :, :block_kv].swapaxes(1, 2)
    return xp.packbits(turned.reshape(-1), bitorder="little").reshape(num_tiles, block_kv, -(-block_q // 8))
