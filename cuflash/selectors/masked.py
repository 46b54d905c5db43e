"""Estimates under masks, which depend only on the queries that attend a key, and on the keys that they attend.

Blocks that a mask allows entirely are estimated as without a mask, from whole arrays. The other blocks, which are few
for masks with closed forms, are evaluated element by element; these values replace the estimates from whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..arrays import accumulator_dtype, Array, Namespace, namespace
from ..blocks.index import BlockIndex
from ..masks.coordinates import elements
from .grid import Grid, block_means, block_sums, of_strides, padded

_MOST_NUMBERS = 1 << 21  # maximum number of array elements per step, to limit memory


class Cut(NamedTuple):
    """Blocks that a mask may allow only in part, for all batch entries and heads that share the mask.

    Attributes
    ----------
    place : tuple of int arrays that broadcast to [n, batch, heads]
        Batch entry, head, block row and block column.
    queries : int array [n, 1, 1, block_q]
        Positions of queries; those past the end are replaced by the last position.
    keys : int array [n, 1, 1, block_kv]
        Positions of keys; those past the end are replaced by the last position.
    allowed : bool array [n, 1, 1, block_q, block_kv]
        The elements of the mask, False past the end.
    """

    place: tuple[Array, Array, Array, Array]
    queries: Array
    keys: Array
    allowed: Array


@dataclass(frozen=True, eq=False)
class MaskedBlocks:
    """The blocks of a grid under its mask.

    Attributes
    ----------
    grid : Grid
        The grid.
    block : (int, int)
        Sides of the blocks, which may differ from those of the grid.
    """

    grid: Grid
    block: tuple[int, int]

    @cached_property
    def index(self) -> BlockIndex:
        return BlockIndex.from_mask(self.grid.mask, block=self.block, **self.grid.shape._asdict())

    @cached_property
    def states(self) -> Array:
        """The result of `BlockIndex.states` on the device of q, in a shape that broadcasts against [*heads, ...]."""
        return self.grid.leading(self.grid.xp.asarray(self.index.states()))

    @cached_property
    def live(self) -> Array:
        """The queries that attend a key, bool [batch or 1, num_heads or 1, seqlen_q], on the device of the index."""
        if self.index.is_on_host:
            return self.index.row_counts() > 0
        whole_rows = MaskedBlocks(self.grid, (1, self.grid.shape.seqlen_kv))
        return whole_rows.index.states()[..., 0] > 0

    @cached_property
    def has_key(self) -> Array:
        """The array `live` on the device of q, in a shape that broadcasts against [*heads, seqlen_q]."""
        return self.grid.leading(self.grid.xp.asarray(self.live)[..., None])[..., 0]

    def queries(self) -> Array:
        """Return q in the accumulator's dtype, with zeros for queries that attend no key."""
        wide = self.grid.q.astype(accumulator_dtype(self.grid.q.dtype))
        return self.grid.xp.where(self.has_key[..., None], wide, wide.dtype.type(0))

    def cut(self, first: int, stop: int, dim: int) -> Iterator[Cut]:
        """Yield the partial blocks of the block rows first <= row < stop, in steps of bounded memory.

        On a device, yield all blocks, since the host does not know which are partial. `dim` is the number of columns of
        each query and key that the caller reads.
        """
        shape, index = self.grid.shape, self.index
        xp: Namespace = np if index.is_on_host else self.grid.xp
        extents = index.batch, index.num_heads, stop - first, index.num_kv_blocks
        if index.is_on_host:
            places = list(np.nonzero(index.states()[:, :, first:stop] == 2))
        else:
            places, number = [], xp.arange(int(np.prod(extents)))
            for extent in reversed(extents):
                places.insert(0, number % extent)
                number = number // extent
        each = (1 if index.batch > 1 else shape.num_batch), (1 if index.num_heads > 1 else shape.num_heads)
        of_block = each[0] * each[1] * (sum(self.block) * dim + 2 * self.block[0] * self.block[1])
        step = max(1, _MOST_NUMBERS // of_block)
        for start in range(0, len(places[0]), step):
            b, h, row, col = (place[start : start + step] for place in places)
            yield self._cut(xp, b, h, row + first, col, each)

    def _cut(self, xp: Namespace, b: Array, h: Array, row: Array, col: Array, each: tuple[int, int]) -> Cut:
        shape, to = self.grid.shape, self.grid.xp.asarray
        i = row[:, None] * self.block[0] + xp.arange(self.block[0])
        j = col[:, None] * self.block[1] + xp.arange(self.block[1])
        exists = (i < shape.seqlen_q)[:, :, None] & (j < shape.seqlen_kv)[:, None]
        i, j = xp.minimum(i, shape.seqlen_q - 1), xp.minimum(j, shape.seqlen_kv - 1)
        at = b[:, None, None], h[:, None, None], i[:, :, None], j[:, None]
        allowed = elements(self.grid.mask, *at) & exists
        b, h, row, col = (x[:, None, None] for x in (b, h, row, col))
        place = b + xp.arange(each[0])[:, None], h + xp.arange(each[1]), row, col
        return Cut(
            (to(place[0]), to(place[1]), to(place[2]), to(place[3])), to(i[:, None, None]), to(j[:, None, None]),
            to(allowed[:, None, None]),
        )  # fmt: skip


class Rows:
    """The rows of q or of k by batch entry, query head and position."""

    def __init__(self, grid: Grid, x: Array) -> None:
        shape, num_heads = grid.shape, x.shape[-3] if grid.has_heads else 1
        self._group = shape.num_heads // num_heads if num_heads else 1
        self._rows = grid.xp.broadcast_to(x, (*shape.batch, num_heads, *x.shape[-2:])).reshape(
            shape.num_batch, num_heads, *x.shape[-2:]
        )

    def of(self, cut: Cut, positions: Array) -> Array:
        """Return the rows [n, batch, heads, length, dim] at positions [n, 1, 1, length] of blocks."""
        b, h, _, _ = cut.place
        return self._rows[b[..., None], h[..., None] // self._group, positions]


def products(x: Array, y: Array) -> Array:
    """Multiply rows x [..., m, dim] and y [..., n, dim] to [..., m, n]; on a device, do not use a matrix library."""
    if isinstance(x, np.ndarray):
        product: Array = x @ y.swapaxes(-1, -2)
        return product
    sums = namespace(x).zeros((*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2]), x.dtype)
    for column in range(x.shape[-1]):
        sums = sums + x[..., :, None, column] * y[..., None, :, column]
    return sums


def softmax(scores: Array, is_seen: Array) -> Array:
    """Compute the softmax along the last axis over the elements where `is_seen` is True; other elements are 0."""
    xp = namespace(scores)
    scores = xp.where(is_seen, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    weights = xp.where(is_seen, xp.exp(scores - xp.where(xp.isneginf(largest), 0, largest)), 0)
    sums = weights.sum(axis=-1, keepdims=True)
    return (weights / xp.where(sums == 0, 1, sums)).astype(scores.dtype)


def mean_of_seen(x: Array, side: int, has_key: Array) -> Array:
    """Sum rows over blocks of `side` rows, and divide by the number of rows that have a key, at least 1."""
    sums, counts = block_sums(x, side), block_sums(has_key[..., None], side)
    return sums / namespace(x).maximum(counts, 1).astype(x.dtype)


def mass_of_means(grid: Grid, threshold: float | None) -> tuple[Array, Array | None]:
    """Return the softmax of mean queries times mean keys, and the blocks of dissimilar rows (None without threshold).

    The mean of a block's keys is over the keys that at least one query of the block row attends.
    """
    blocks = MaskedBlocks(grid, grid.block)
    queries = blocks.queries()
    of_queries = mean_of_seen(queries, grid.block[0], blocks.has_key)
    scores, unlike = _of_mean_keys(grid, blocks, of_queries, threshold)
    is_seen = blocks.states != 0
    mass = softmax(scores * scores.dtype.type(grid.scale), is_seen if unlike is None else is_seen & ~unlike)
    if threshold is None or unlike is None:
        return mass, None
    means = mean_of_seen(directions_of(queries), grid.block[0], blocks.has_key)
    of_rows = (means * means).sum(axis=-1) < threshold
    return mass, unlike | of_rows[..., None]


def mass_by_query(grid: Grid, is_past: Array | None, threshold: float | None) -> tuple[Array, Array, Array | None]:
    """Compute the softmax of each query times the means of the keys of each block that it attends.

    Parameters
    ----------
    grid : Grid
        The grid.
    is_past : bool array [seqlen_q, columns], optional
        With `causal`, the blocks over which the softmax of each query extends.
    threshold : float, optional
        The similarity below which the keys of a block count as dissimilar.

    Returns
    -------
    mass, attended : arrays [*heads, seqlen_q, columns]
        The masses, and whether the query attends a key of the block.
    unlike : bool array [*heads, seqlen_q, columns], or None
        Whether the keys of the block that the block row attends are dissimilar; None without threshold.
    """
    xp, num_queries, blocks = grid.xp, grid.shape.seqlen_q, MaskedBlocks(grid, grid.block)
    sums, counts = (x[..., :num_queries, :] for x in sums_by_query(grid, blocks, 0, grid.size[0]))
    scores = sums * sums.dtype.type(grid.scale) / xp.maximum(counts, 1).astype(sums.dtype)
    is_seen, unlike = counts > 0 if is_past is None else (counts > 0) & is_past, None
    if threshold is not None:
        nothing = xp.zeros((*grid.heads, grid.size[0], grid.k.shape[-1]), sums.dtype)
        of_rows = _of_mean_keys(grid, blocks, nothing, threshold)[1]
        unlike = xp.repeat(of_rows, grid.block[0], axis=-2)[..., :num_queries, :]
    return softmax(scores, is_seen if unlike is None else is_seen & ~unlike), counts > 0, unlike


def _of_mean_keys(
    grid: Grid, blocks: MaskedBlocks, of_queries: Array, threshold: float | None
) -> tuple[Array, Array | None]:
    """Return scores [*heads, rows, columns] of mean keys, and the blocks of dissimilar keys or None."""
    xp, (num_rows, num_columns), dim = grid.xp, grid.size, grid.k.shape[-1]
    shape = grid.shape
    keys = grid.k.astype(of_queries.dtype)
    scores = products(of_queries, grid.of_query_heads(block_means(grid.k, grid.block[1])))
    scores = xp.broadcast_to(scores, (*grid.heads, num_rows, num_columns)).copy()
    unlike, directions = None, None
    if threshold is not None:
        directions = directions_of(keys)
        means = block_means(directions, grid.block[1])
        of_block = (means * means).sum(axis=-1) < threshold
        unlike = xp.broadcast_to(grid.of_query_heads(of_block[..., None])[..., 0][..., None, :], scores.shape).copy()
    flat = scores.reshape(shape.num_batch, shape.num_heads, num_rows, num_columns)
    rows, columns = Rows(grid, of_queries), Rows(grid, keys)
    for cut in blocks.cut(0, num_rows, dim):
        attended = cut.allowed.any(axis=-2)[..., None]
        number = xp.maximum(attended.sum(axis=-2), 1)
        mean = xp.where(attended, columns.of(cut, cut.keys), 0).sum(axis=-2) / number
        flat[cut.place] = (rows.of(cut, cut.place[2][..., None])[..., 0, :] * mean).sum(axis=-1)
        if unlike is not None and directions is not None:
            mean = xp.where(attended, Rows(grid, directions).of(cut, cut.keys), 0).sum(axis=-2) / number
            of_cut = (mean * mean).sum(axis=-1) < threshold
            unlike.reshape(flat.shape)[cut.place] = of_cut
    return scores, unlike


def directions_of(x: Array) -> Array:
    """Divide rows by their norms; rows of zeros stay zero."""
    xp = namespace(x)
    norms = xp.sqrt((x * x).sum(axis=-1))[..., None]
    return x / xp.where(norms == 0, 1, norms)


def sums_by_query(grid: Grid, blocks: MaskedBlocks, first: int, stop: int) -> tuple[Array, Array]:
    """Sum q . k over the keys that each query attends in each block, for the queries of block rows first to stop.

    Returns
    -------
    sums, counts : arrays [*heads, (stop - first) * block_q, columns]
        The sums, and the numbers of keys; both are 0 for queries past the end.
    """
    xp, shape, (block_q, block_kv) = grid.xp, grid.shape, blocks.block
    num_queries, num_columns = (stop - first) * block_q, blocks.index.num_kv_blocks
    q, keys = (x.astype(accumulator_dtype(x.dtype)) for x in (grid.q, grid.k))
    lengths = xp.minimum(shape.seqlen_kv - xp.arange(0, num_columns * block_kv, block_kv), block_kv)
    of_blocks = grid.of_query_heads(block_means(grid.k, block_kv) * lengths[:, None].astype(keys.dtype))
    sums = products(padded(q[..., first * block_q : stop * block_q, :], num_queries), of_blocks)
    is_full = xp.repeat(blocks.states[..., first:stop, :] == 1, block_q, axis=-2)
    is_full = is_full & (xp.arange(num_queries) < shape.seqlen_q - first * block_q)[:, None]
    shown = (*grid.heads, num_queries, num_columns)
    sums = xp.where(xp.broadcast_to(is_full, shown), sums, sums.dtype.type(0))
    counts = xp.broadcast_to(is_full * lengths, shown).copy()
    of_sums, of_counts = (x.reshape(shape.num_batch, shape.num_heads, *shown[-2:]) for x in (sums, counts))
    rows, columns = Rows(grid, q), Rows(grid, keys)
    for cut in blocks.cut(first, stop, grid.k.shape[-1]):
        s = xp.where(cut.allowed, products(rows.of(cut, cut.queries), columns.of(cut, cut.keys)), 0)
        b, h, row, col = (x[..., None] for x in cut.place)
        at = (row - first) * block_q + xp.arange(block_q)
        of_sums[b, h, at, col], of_counts[b, h, at, col] = s.sum(axis=-1), cut.allowed.sum(axis=-1)
    return sums, counts


def row_steps(grid: Grid, num_rows: int, numbers_of_row: int) -> Iterator[tuple[int, int]]:
    """Yield runs first <= row < stop of block rows, so that arrays of `numbers_of_row` per row have a limited size."""
    step = max(1, 8 * _MOST_NUMBERS // max(1, numbers_of_row * grid.shape.num_batch * grid.shape.num_heads))
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def mass_of_runs(grid: Grid, length: int, stride: int) -> Array:
    """Compute masses [*heads, rows, columns] of blocks by softmax over means of runs of keys that a query attends.

    A query sees a run if it attends a key of the run and, with `causal`, if the run ends at or before the query.
    """
    xp, shape, block_q, num_rows = grid.xp, grid.shape, grid.block[0], grid.size[0]
    blocks, num_parts = MaskedBlocks(grid, (block_q, stride)), length // stride
    count = (shape.seqlen_kv - length) // stride + 1
    ends, parts = xp.arange(count) * stride + length - 1, []
    for first, stop in row_steps(grid, num_rows, block_q * blocks.index.num_kv_blocks):
        sums, counts = sums_by_query(grid, blocks, first, stop)
        of_runs, attended = (sum(x[..., n : n + count] for n in range(num_parts)) for x in (sums, counts))
        is_seen = attended > 0
        if grid.is_causal:
            is_seen = is_seen & (ends <= xp.arange(first * block_q, stop * block_q)[:, None] + grid.offset)
        scores = of_runs * of_runs.dtype.type(grid.scale) / xp.maximum(attended, 1).astype(of_runs.dtype)
        mass = mean_of_seen(softmax(scores, is_seen), block_q, is_seen.any(axis=-1))
        parts.append(mass_of_blocks(grid, mass, num_parts, stride))
    return xp.concatenate(parts, axis=-2)


def mass_of_blocks(grid: Grid, mass: Array, num_parts: int, stride: int) -> Array:
    """Sum the masses of runs of keys over blocks; each part of a run, `stride` keys, is in one block."""
    num_columns, parts_of_block = grid.size[1], grid.block[1] // stride
    pieces = grid.xp.zeros((*mass.shape[:-1], num_columns * parts_of_block), dtype=mass.dtype)
    for n in range(num_parts):
        pieces[..., n : n + mass.shape[-1]] += mass
    return pieces.reshape(*mass.shape[:-1], num_columns, parts_of_block).sum(axis=-1)


def mass_of_antidiagonals(grid: Grid, stride: int) -> Array:
    """Compute masses [*heads, rows, columns] of blocks by softmax over sums of scores on antidiagonals of cells.

    An element counts in its cell if its query attends a key, and if a query in the row of cells attends its key.
    """
    xp, shape, num_rows, dim = grid.xp, grid.shape, grid.size[0], grid.k.shape[-1]
    cells, per_row = MaskedBlocks(grid, (stride, stride)), grid.block[0] // stride
    num_cells = cells.index.num_kv_blocks
    queries, keys = cells.queries(), grid.k.astype(accumulator_dtype(grid.k.dtype))
    queries = padded(queries, cells.index.num_q_blocks * stride)
    rows = of_strides(queries, stride, turned=True)
    columns = grid.of_query_heads(of_strides(padded(keys, num_cells * stride), stride, turned=False))
    of_queries, of_keys, parts = Rows(grid, queries), Rows(grid, keys), []
    for first, stop in row_steps(grid, num_rows, per_row * num_cells):
        begin, end = first * per_row, min(stop * per_row, cells.index.num_q_blocks)
        shown = (*grid.heads, end - begin, num_cells)
        scores = xp.broadcast_to(products(rows[..., begin:end, :], columns), shown).copy()
        flat = scores.reshape(shape.num_batch, shape.num_heads, *shown[-2:])
        for cut in cells.cut(begin, end, dim):
            attended = cut.allowed.any(axis=-2)[..., None]
            at = cut.place[2][..., None] * stride + xp.arange(stride - 1, -1, -1)
            pairs = of_queries.of(cut, at) * xp.where(attended, of_keys.of(cut, cut.keys), 0)
            b, h, row, col = cut.place
            flat[b, h, row - begin, col] = pairs.sum(axis=(-1, -2))
        is_seen = xp.broadcast_to(cells.states[..., begin:end, :] != 0, shown)
        mass = softmax(scores * scores.dtype.type(grid.scale / stride), is_seen)
        mass = mean_of_seen(mass, per_row, is_seen.any(axis=-1)).swapaxes(-1, -2)
        parts.append(block_sums(mass, grid.block[1] // stride).swapaxes(-1, -2))
    return xp.concatenate(parts, axis=-2)


def bounds_of_pages(grid: Grid, bounds: Array) -> tuple[Array, Array]:
    """Bound the scores of each query over the keys of a page that it attends; also return which pages have such keys.

    Parameters
    ----------
    grid : Grid
        A grid with blocks of one query and one page.
    bounds : array [*heads, seqlen_q, num_pages]
        The bounds over all keys of a page; they are kept for pages that the query attends entirely. The bound of a
        page that the query does not attend becomes -inf, since other heads of the query's group may attend it.
    """
    xp, shape, blocks = grid.xp, grid.shape, MaskedBlocks(grid, grid.block)
    q, k = (x.astype(accumulator_dtype(x.dtype)) for x in (grid.q, grid.k))
    bounds = xp.broadcast_to(bounds, (*grid.heads, *grid.size)).copy()
    flat = bounds.reshape(shape.num_batch, shape.num_heads, *grid.size)
    rows, columns = Rows(grid, q), Rows(grid, k)
    for cut in blocks.cut(0, grid.size[0], k.shape[-1]):
        keys, attended = columns.of(cut, cut.keys), cut.allowed[..., 0, :, None]
        least, greatest = (xp.where(attended, keys, end) for end in (np.inf, -np.inf))
        query = rows.of(cut, cut.queries)[..., 0, :]
        of_columns = xp.maximum(query * least.min(axis=-2), query * greatest.max(axis=-2))
        flat[cut.place] = of_columns.sum(axis=-1)
    is_attended = blocks.states != 0
    return xp.where(is_attended, bounds, -np.inf), is_attended


def last_queries(grid: Grid, most: int) -> tuple[Array, Array, Array]:
    """Select the last queries that attend a key.

    If there are fewer than `most`, queries that attend no key fill up the rest, as rows of zeros.

    Returns
    -------
    positions : int array, broadcasts against [*heads, rows, 1]
        The positions of the queries.
    queries : array [*heads, rows, dim]
        The queries.
    allowed : bool array, broadcasts against [*heads, rows, seqlen_kv]
        The keys that each query attends.
    """
    xp, shape, blocks = grid.xp, grid.shape, MaskedBlocks(grid, grid.block)
    at, number = namespace(blocks.live), namespace(blocks.live).arange(shape.seqlen_q)
    order = at.sort(at.where(blocks.live, number, number - shape.seqlen_q), axis=-1)
    order = order[..., shape.seqlen_q - min(most, shape.seqlen_q) :]  # queries that attend a key come last, in order
    rows = order[..., None] % shape.seqlen_q
    b, h = at.arange(rows.shape[0])[:, None, None, None], at.arange(rows.shape[1])[:, None, None]
    allowed = at.broadcast_to(
        elements(grid.mask, b, h, rows, at.arange(shape.seqlen_kv)), (*rows.shape[:-1], shape.seqlen_kv)
    )
    positions = grid.leading(xp.asarray(rows))
    places = xp.broadcast_to(positions, (*grid.heads, *positions.shape[-2:]))
    q = xp.broadcast_to(blocks.queries().astype(grid.q.dtype), (*grid.heads, *grid.q.shape[-2:]))
    return positions, xp.take_along_axis(q, places, axis=-2), grid.leading(xp.asarray(allowed))
