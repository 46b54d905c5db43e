"""Exact classification of a mask's blocks as absent, full or partial: by closed forms or element by element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from ..arrays import Array, Namespace, describe, is_array, is_integer_dtype, namespace
from ..masks.base import And, Mask
from ..masks.coordinates import elements
from ..masks.shape import MaskShape
from ..masks.block_set import BlockSet

_MAX_BLOCKS_PER_SWEEP = 1 << 20  # maximum number of blocks classified at once, to limit memory
_MAX_ELEMENTS_PER_SWEEP = 1 << 21  # maximum number of elements evaluated at once, to limit memory


class BlockKind(IntEnum):
    """The content of a listed block. Blocks that are not listed have no allowed elements."""

    FULL = 1
    """All elements within the lengths are allowed."""
    INTERVAL = 2
    """In row i, the keys lo[i] <= j < hi[i] of the block are allowed."""
    BITS = 3
    """One bit per element."""


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Blocks by matrix (a batch entry and head), block row and block column."""

    matrix: Array
    row: Array
    col: Array

    def __getitem__(self, chosen: Array) -> _Blocks:
        return _Blocks(self.matrix[chosen], self.row[chosen], self.col[chosen])

    def __len__(self) -> int:
        return len(self.matrix)


@dataclass(frozen=True, eq=False)
class _Grid:
    """All blocks of all matrices (batch entries and heads) over which a mask varies."""

    seqlen_q: int
    seqlen_kv: int
    block: tuple[int, int]
    batch: int
    num_heads: int

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of query blocks and key blocks."""
        return -(-self.seqlen_q // self.block[0]), -(-self.seqlen_kv // self.block[1])

    def rectangle(
        self, mask: Mask, matrix: Array, row0: Array, row1: Array, col0: Array, col1: Array
    ) -> tuple[Array, Array]:
        """Evaluate `Mask.rectangle` over block rows row0..row1 and columns col0..col1, as two boolean arrays."""
        b, h = np.divmod(matrix, self.num_heads)
        answers = mask.rectangle(
            b,
            h,
            row0 * self.block[0],
            np.minimum(row1 * self.block[0], self.seqlen_q),
            col0 * self.block[1],
            np.minimum(col1 * self.block[1], self.seqlen_kv),
        )
        may, must = (np.broadcast_to(answer, matrix.shape) for answer in answers)
        return may, must

    def is_uniform(self, mask: Mask, blocks: _Blocks) -> Array:
        """Return which blocks are known to be allowed entirely by a mask."""
        return self.rectangle(mask, blocks.matrix, blocks.row, blocks.row + 1, blocks.col, blocks.col + 1)[1]

    def coordinates(self, blocks: _Blocks) -> tuple[Array, Array, Array, Array, Array]:
        """Return b, h [n, 1, 1], i [n, block_q, 1], j [n, 1, block_kv], clipped to the lengths, and which exist."""
        b, h = np.divmod(blocks.matrix[:, None, None], self.num_heads)
        i = blocks.row[:, None, None] * self.block[0] + np.arange(self.block[0])[:, None]
        j = blocks.col[:, None, None] * self.block[1] + np.arange(self.block[1])
        exists = (i < self.seqlen_q) & (j < self.seqlen_kv)
        return b, h, np.minimum(i, self.seqlen_q - 1), np.minimum(j, self.seqlen_kv - 1), exists


def classify(mask: Mask, shape: MaskShape, block: tuple[int, int]) -> dict[str, Any]:
    """List the blocks of a mask; return the fields of a `BlockIndex` by name, except for the lengths and the block.

    Descend from large rectangles to single blocks by closed forms; evaluate the elements of undecided blocks.
    """
    if isinstance(mask, BlockSet) and mask.block == block and mask.full.all():
        return _listed(mask, _Grid(shape.seqlen_q, shape.seqlen_kv, block, *mask.grid[:2]))
    varying = extents(mask, shape) if all(shape[2:]) else (1, 1)
    grid = _Grid(shape.seqlen_q, shape.seqlen_kv, block, *varying)
    if 0 in (*shape[2:], *varying):
        return _assembled(grid, [], {}, None)
    factors = mask.operands if type(mask) is And else (mask,)
    closed = [factor for factor in factors if factor._has_intervals]
    others = [factor for factor in factors if not factor._has_intervals]
    rows = And(tuple(closed)) if closed else None
    listed: list[tuple[_Blocks, Array, Array]] = []
    dictionary: dict[bytes, int] = {}
    for full, undecided in _descend(mask, grid):
        listed.append(_without_bits(full, BlockKind.FULL))
        by_rows = np.full(len(undecided), rows is not None)
        for other in others:
            by_rows &= grid.is_uniform(other, undecided)
        if rows is not None and by_rows.any():
            inside = undecided[by_rows]
            inside = inside[_overlaps_interval(rows, grid, inside)]
            is_full = grid.is_uniform(rows, inside)
            listed.append(_without_bits(inside, np.where(is_full, BlockKind.FULL, BlockKind.INTERVAL)))
        listed.extend(_evaluate(factors, grid, undecided[~by_rows], dictionary))
    return _assembled(grid, listed, dictionary, rows)


def _without_bits(blocks: _Blocks, kind: Array) -> tuple[_Blocks, Array, Array]:
    """Return blocks with their kinds, and -1 as the bit tile of each."""
    return blocks, np.broadcast_to(kind, len(blocks)), np.full(len(blocks), -1)


def _listed(mask: BlockSet, grid: _Grid) -> dict[str, Any]:
    """List a set of full blocks at its own block size, without evaluating the mask."""
    matrix, cell = np.divmod(mask.keys, grid.size[0] * grid.size[1])
    blocks = _Blocks(matrix, *np.divmod(cell, grid.size[1]))
    return _assembled(grid, [_without_bits(blocks, BlockKind.FULL)], {}, None)


def extents(mask: Mask, shape: MaskShape, xp: Namespace = np) -> tuple[int, int]:
    """Return the numbers of batch entries and heads over which a mask varies, from how its result broadcasts."""
    b = xp.arange(shape.num_batch)[:, None, None, None]
    h = xp.arange(shape.num_heads)[:, None, None]
    first = xp.zeros((1, 1), dtype=np.int64)
    answer = getattr(elements(mask, b, h, first, first), "shape", ())
    return (1, 1, 1, 1, *answer)[-4], (1, 1, 1, 1, *answer)[-3]


def _descend(mask: Mask, grid: _Grid) -> Iterator[tuple[_Blocks, _Blocks]]:
    """Yield, for each strip of the grid, the blocks known to be full, and those that closed forms do not decide."""
    num_rows, num_cols = grid.size
    matrices = grid.batch * grid.num_heads
    height = 1 << max(0, (max(_MAX_BLOCKS_PER_SWEEP // num_cols, 1)).bit_length() - 1)
    per_sweep = max(1, _MAX_BLOCKS_PER_SWEEP // (min(height, num_rows) * num_cols))
    for first in range(0, matrices, per_sweep):
        matrix = np.arange(first, min(first + per_sweep, matrices))
        for top in range(0, num_rows, height):
            row0 = np.full(len(matrix), top)
            row1 = np.full(len(matrix), min(top + height, num_rows))
            yield _descend_strip(
                mask, grid, (matrix, row0, row1, np.zeros_like(matrix), np.full_like(matrix, num_cols))
            )


def _descend_strip(mask: Mask, grid: _Grid, boxes: tuple[Array, ...]) -> tuple[_Blocks, _Blocks]:
    full: list[_Blocks] = []
    undecided: list[_Blocks] = []
    while len(boxes[0]):
        may, must = grid.rectangle(mask, *boxes)
        full.append(_single_blocks(*(side[must & may] for side in boxes)))
        boxes = tuple(side[may & ~must] for side in boxes)
        matrix, row0, row1, col0, col1 = boxes
        single = (row1 - row0 == 1) & (col1 - col0 == 1)
        undecided.append(_Blocks(matrix[single], row0[single], col0[single]))
        boxes = _split(*(side[~single] for side in boxes))
    return _joined(full), _joined(undecided)


def _split(matrix: Array, row0: Array, row1: Array, col0: Array, col1: Array) -> tuple[Array, ...]:
    """Split boxes into quarters at powers of two, so that the cells of coarser grids stay whole."""
    row_middle, col_middle = row0 + _half(row1 - row0), col0 + _half(col1 - col0)
    quarters = [
        (matrix, top, bottom, left, right)
        for top, bottom in ((row0, row_middle), (row_middle, row1))
        for left, right in ((col0, col_middle), (col_middle, col1))
    ]
    joined = tuple(np.concatenate(sides) for sides in zip(*quarters))
    some = (joined[1] < joined[2]) & (joined[3] < joined[4])
    return tuple(side[some] for side in joined)


def _half(extent: Array) -> Array:
    """Return the largest power of two below the extent, or 1 if the extent is 1."""
    power = 1 << (np.frexp(np.maximum(extent - 1, 0).astype(np.float64))[1] - 1).clip(0).astype(np.int64)
    return np.where(extent > 1, power, extent)


def _single_blocks(matrix: Array, row0: Array, row1: Array, col0: Array, col1: Array) -> _Blocks:
    """Return the single blocks that boxes consist of."""
    width, area = col1 - col0, (row1 - row0) * (col1 - col0)
    box = np.repeat(np.arange(len(matrix)), area)
    offset = np.arange(len(box)) - np.repeat(np.cumsum(area) - area, area)
    return _Blocks(matrix[box], row0[box] + offset // width[box], col0[box] + offset % width[box])


def _joined(parts: list[_Blocks]) -> _Blocks:
    empty = np.zeros(0, np.int64)
    columns = [(empty, *(getattr(part, name) for part in parts)) for name in ("matrix", "row", "col")]
    return _Blocks(*(np.concatenate(column) for column in columns))


def _chunks(blocks: _Blocks, elements: int) -> Iterator[_Blocks]:
    size = max(1, _MAX_ELEMENTS_PER_SWEEP // elements)
    return (blocks[start : start + size] for start in range(0, len(blocks), size))


def _overlaps_interval(rows: Mask, grid: _Grid, blocks: _Blocks) -> Array:
    """Return which blocks overlap the interval of at least one row."""
    overlaps = [np.zeros(0, bool)]
    for chunk in _chunks(blocks, grid.block[0]):
        b, h, i, _, _ = grid.coordinates(chunk)
        lo, hi = rows._closed_form(b, h, i)
        first = chunk.col[:, None, None] * grid.block[1]
        overlaps.append(
            (np.maximum(lo, first) < np.minimum(hi, np.minimum(first + grid.block[1], grid.seqlen_kv))).any((1, 2))
        )
    return np.concatenate(overlaps)


def _evaluate(
    factors: tuple[Mask, ...], grid: _Grid, blocks: _Blocks, dictionary: dict[bytes, int]
) -> Iterator[tuple[_Blocks, Array, Array]]:
    """Evaluate blocks element by element; yield nonempty blocks, kinds and bit tiles, and add these to `dictionary`."""
    for chunk in _chunks(blocks, grid.block[0] * grid.block[1]):
        b, h, i, j, exists = grid.coordinates(chunk)
        allowed = exists.copy()
        for factor in factors:
            open_ = ~grid.is_uniform(factor, chunk)
            if open_.any():
                allowed[open_] &= elements(factor, b[open_], h[open_], i[open_], j[open_])
        some, every = allowed.any((1, 2)), (allowed == exists).all((1, 2))
        kind = np.where(every, BlockKind.FULL, BlockKind.BITS)[some]
        tile = np.full(len(kind), -1)
        packed = pack(allowed[some & ~every])
        tile[kind == BlockKind.BITS] = [dictionary.setdefault(bits.tobytes(), len(dictionary)) for bits in packed]
        yield chunk[some], kind, tile


def _assembled(
    grid: _Grid, listed: list[tuple[_Blocks, Array, Array]], dictionary: dict[bytes, int], rows: Mask | None
) -> dict[str, Any]:
    blocks = _joined([each for each, _, _ in listed])
    kind = np.concatenate([np.zeros(0, np.uint8), *(kinds for _, kinds, _ in listed)]).astype(np.uint8)
    tile = np.concatenate([np.zeros(0, np.int32), *(tiles for _, _, tiles in listed)]).astype(np.int32)
    num_rows, num_cols = grid.size
    row = blocks.matrix * num_rows + blocks.row
    order = np.argsort(row * num_cols + blocks.col)
    bits = np.frombuffer(b"".join(dictionary), np.uint8)
    lo = hi = None
    if rows is not None and (kind == BlockKind.INTERVAL).any():
        lo, hi = row_intervals(rows, grid.seqlen_q, grid.seqlen_kv, grid.batch, grid.num_heads)
    return dict(
        batch=grid.batch,
        num_heads=grid.num_heads,
        indptr=pointers(row, grid.batch * grid.num_heads * num_rows),
        indices=blocks.col[order].astype(np.int32),
        kinds=kind[order],
        tiles=tile[order],
        bits=bits.reshape(len(dictionary), grid.block[0], -(-grid.block[1] // 8)),
        lo=lo,
        hi=hi,
    )


def row_intervals(
    mask: Mask, seqlen_q: int, seqlen_kv: int, batch: int, num_heads: int, xp: Namespace = np
) -> tuple[Array, Array]:
    """Return a mask's row intervals clipped to the keys, int32 [batch or 1, num_heads or 1, seqlen_q], in C order."""
    b, h = xp.arange(batch)[:, None, None], xp.arange(num_heads)[:, None]
    lo, hi = (xp.clip(side, 0, seqlen_kv) for side in mask._closed_form(b, h, xp.arange(seqlen_q)))
    leading = np.broadcast_shapes(lo.shape, hi.shape, (1, 1, seqlen_q))
    first, end = (xp.broadcast_to(side, leading).astype(np.int32, order="C") for side in (lo, hi))
    return first, end


def transposed_intervals(lo: Array, hi: Array, seqlen_kv: int) -> tuple[Array, Array]:
    """Return the queries that attend to each key: one interval, because lo and hi of rows never decrease."""
    xp, leading = namespace(lo), lo.shape[:-1]
    keys = xp.arange(seqlen_kv)
    first, end = (xp.empty((*leading, seqlen_kv), dtype=np.int32) for _ in range(2))
    for position in np.ndindex(leading):
        first[position] = xp.searchsorted(hi[position], keys, side="right")
        end[position] = xp.searchsorted(lo[position], keys, side="right")
    return first, end


def pointers(rows: Array, num_rows: int) -> Array:
    """Return the start of each row's entries, int32 [num_rows + 1], from the row of every entry."""
    counts = np.bincount(rows, minlength=num_rows)
    if counts.sum() > np.iinfo(np.int32).max:
        raise MemoryError(f"the mask keeps {counts.sum()} blocks, more than int32 can count: use larger blocks")
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def list_reasons(index: Any) -> list[str]:
    """Return why the arrays of an index on the host are not lists of its blocks."""
    arrays = {name: getattr(index, name) for name in ("indptr", "indices", "kinds", "tiles")}
    reasons = [
        f"{name} must be an integer array with one axis; got {describe(array)}"
        for name, array in arrays.items()
        if not (is_array(array) and array.ndim == 1 and is_integer_dtype(array.dtype))
    ]
    if reasons:
        return reasons
    starts, columns, kinds, tiles = arrays.values()
    count, num_rows, last = len(columns), index.batch * index.num_heads * index.num_q_blocks, index.num_kv_blocks - 1
    if len(starts) != num_rows + 1 or (starts[0], starts[-1]) != (0, count) or (starts[1:] < starts[:-1]).any():
        reasons.append(f"indptr must have {num_rows + 1} numbers that never decrease, from 0 to the {count} entries")
    is_start = np.isin(np.flatnonzero(columns[1:] <= columns[:-1]) + 1, starts)
    if not is_start.all() or not ((0 <= columns) & (columns <= last)).all():
        reasons.append(f"indices must increase within each row, and be from 0 to {last}: sort each row")
    allowed = [BlockKind.FULL, BlockKind.BITS] + [BlockKind.INTERVAL] * (index.lo is not None and index.hi is not None)
    has_tile = kinds == BlockKind.BITS
    if len(kinds) != count or not np.isin(kinds, allowed).all():
        reasons.append("kinds must be a BlockKind for each entry, INTERVAL only with lo and hi")
    elif len(tiles) != count or not np.isin(tiles[has_tile], np.arange(len(index.bits))).all():
        reasons.append(f"tiles must be a row of bits, from 0 to {len(index.bits) - 1}, for each entry of kind BITS")
    return reasons


def pack(allowed: Array) -> Array:
    """Pack booleans [..., block_kv] into bits: key 8 c + r is bit r of byte c."""
    xp, (*leading, block_kv) = namespace(allowed), allowed.shape
    num_bytes = -(-block_kv // 8)
    whole = xp.zeros((*leading, 8 * num_bytes), dtype=bool)  # padded, since CuPy's packbits has no axis argument
    whole[..., :block_kv] = allowed
    return xp.packbits(whole.reshape(-1), bitorder="little").reshape(*leading, num_bytes)


def unpack(bits: Array, block_kv: int) -> Array:
    """Convert the bits of `pack` to booleans [..., block_kv]."""
    xp, (*leading, num_bytes) = namespace(bits), bits.shape
    elements = xp.unpackbits(bits.reshape(-1), bitorder="little").view(bool)
    return elements.reshape(*leading, 8 * num_bytes)[..., :block_kv]
