"""Work lists of kernels: the keys that each tile of queries visits, and the queries that visit each tile of keys.

Implicit work is a band (a few integers) or row intervals (two integers per row), without a list. Explicit work is a
block index and its transpose. Both kinds have the methods `row` and `column`, which return segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from ..arrays import Array, Namespace, describe, is_flag, namespace, to_host
from ..errors import UnsupportedProblem, collecting, refuse
from ..masks.arrays import as_mask
from ..masks.base import Band, Mask, intersection
from ..masks.block_pattern import BlockPattern
from ..masks.content import Memoized, held_arrays, mask_namespace
from ..masks.diagonal import Causal, SlidingWindow, alignment_reason
from ..masks.fields import window_sides
from ..masks.shape import MaskShape
from ._gathered_rows import GatheredRows
from .classify import BlockKind, extents, row_intervals, unpack
from .index import BlockIndex
from .index_mask import IndexMask
from .sequence_tiles import sequence_bounds, tile_starts


MAX_LENGTH = 255  # in blocks; longer row intervals count as this length when they are sorted


class Segment(NamedTuple):
    """A run of keys (or, in a column, of queries) start <= x < stop with one kind of mask."""

    start: int
    stop: int
    kind: BlockKind
    tile: int = -1

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False, kw_only=True)
class IntervalWork(Memoized):
    """Work in which a row attends to one interval of keys, as in causal masks, windows, lengths and sorted documents.

    If `band` is set, it is the whole description: a few integers, no array.
    Otherwise `lo` and `hi` [batch or 1, num_heads or 1, seqlen_q] never decrease with the row, so that binary searches
    find the keys of a tile of rows, the rows of a tile of keys, and the full part of both.
    If `is_ordered`, kernels process blocks of rows, and of keys, in descending order of their lengths. `mean_length` is
    the mean number of keys of packed sequences, if the host knows it.
    `sequence_tile` is (rows, keys) of tiles that end with their sequences, if the work also has such tiles.
    """

    seqlen_q: int
    seqlen_kv: int
    block_q: int
    block_kv: int
    band: Band | None = None
    lo: Array | None = None
    hi: Array | None = None
    is_ordered: bool = False
    mean_length: float | None = None
    sequence_tile: tuple[int, int] | None = None

    @cached_property
    def on_host(self) -> IntervalWork:
        """A copy of the work in NumPy arrays; waits for a device."""
        if self.lo is None or self.hi is None or namespace(self.lo) is np:
            return self
        return replace(self, lo=to_host(self.lo), hi=to_host(self.hi))

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.lists.values())

    @property
    def lists(self) -> dict[str, Array]:
        """The arrays that kernels read, by name."""
        return {} if self.lo is None else {"lo": self.lo, "hi": self.hi} | self.orders | self.sequence_tiles

    @cached_property
    def sequence_tiles(self) -> dict[str, Array]:
        """The tiles that end with their sequences, int32, for kernels.

        q_blocks [matrices, tiles + 1] has the first row of each tile and kv_blocks, of the same form, the first key.
        column_entries [matrices, tiles] lists the tiles of keys by descending number of queries that attend to them.
        """
        if self.sequence_tile is None or self.lo is None or self.hi is None:
            return {}
        lo, hi = (np.reshape(side, (-1, self.seqlen_q)) for side in (self.lo, self.hi))
        bounds = sequence_bounds(lo, self.seqlen_kv)
        starts_q, starts_kv = (tile_starts(each, height) for each, height in zip(bounds, self.sequence_tile))
        each = zip(lo, hi, starts_kv)
        lengths = np.stack([_num_rows(of_lo, of_hi, keys[:-1], keys[1:] - 1) for of_lo, of_hi, keys in each])
        order = _longest_first(_in_blocks(lengths, self.sequence_tile[0]))
        return {"q_blocks": starts_q, "kv_blocks": starts_kv, "column_entries": order}

    def with_sequence_tiles(self, tile: tuple[int, int]) -> IntervalWork:
        """Add tiles of at most (queries, keys) that end with their sequences."""
        return replace(self, sequence_tile=tile)

    @property
    def num_sequence_tiles(self) -> tuple[int, int]:
        """The numbers of query tiles and key tiles per matrix that end with their sequences, including empty ones."""
        tiles = self.sequence_tiles
        return (tiles["q_blocks"].shape[1] - 1, tiles["kv_blocks"].shape[1] - 1) if tiles else (0, 0)

    @cached_property
    def orders(self) -> dict[str, Array]:
        """The numbers of the row blocks and key blocks of each matrix, int32, longest first.

        Among equal lengths, the last block comes first. Lengths are counted in blocks, up to `MAX_LENGTH`.
        """
        if not self.is_ordered or self.lo is None or self.hi is None:
            return {}
        xp, (batch, num_heads, _) = namespace(self.lo), self.lo.shape
        lo, hi = (side.reshape(batch * num_heads, self.seqlen_q) for side in (self.lo, self.hi))
        first_row, last_row = (xp.asarray(side) for side in _block_ends(self.seqlen_q, self.block_q))
        first_key, last_key = (xp.asarray(side) for side in _block_ends(self.seqlen_kv, self.block_kv))
        rows = hi[:, last_row] - lo[:, first_row]
        columns = xp.stack([_num_rows(of_lo, of_hi, first_key, last_key) for of_lo, of_hi in zip(lo, hi)])
        return {
            "row_order": _longest_first(_in_blocks(rows, self.block_kv)).reshape(-1),
            "column_order": _longest_first(_in_blocks(columns, self.block_q)).reshape(-1),
        }

    def owner(self, b: int, h: int) -> tuple[int, int]:
        """Return the batch entry and head whose work (b, h) shares."""
        return _owner(b, h, (1, 1) if self.lo is None else self.lo.shape)

    def bounds(self, b: int, h: int, start: int, stop: int) -> tuple[Array, Array]:
        """Return lo and hi of rows start <= i < stop."""
        if self.band is not None:
            lo, hi = self.band.intervals(0, 0, np.arange(start, stop))
            return np.clip(lo, 0, self.seqlen_kv), np.clip(hi, 0, self.seqlen_kv)
        lo, hi = self._rows(b, h)
        return lo[start:stop], hi[start:stop]

    def visited_keys(self, height: int) -> float:
        """Return the mean number of keys that a tile of this many rows visits."""
        first = np.arange(0, self.seqlen_q, height)
        last = np.minimum(first + height, self.seqlen_q) - 1
        if self.band is None:
            assert self.lo is not None and self.hi is not None
            lo, hi = self.lo[..., first], self.hi[..., last]
        else:
            lo, hi = self.band.intervals(0, 0, first)[0], self.band.intervals(0, 0, last)[1]
        visited = np.maximum(np.clip(hi, 0, self.seqlen_kv) - np.clip(lo, 0, self.seqlen_kv), 0)
        return float((visited @ (last - first + 1.0)).mean() / self.seqlen_q) if visited.size else 0.0

    def row(self, b: int, h: int, start: int, stop: int) -> list[Segment]:
        """Return the keys that queries start <= i < stop visit."""
        lo, hi = self.bounds(b, h, start, stop)
        return _segments_of_run(int(lo[0]), int(hi[-1]), int(lo[-1]), int(hi[0]))

    def column(self, b: int, h: int, start: int, stop: int) -> list[Segment]:
        """Return the queries that visit keys start <= j < stop."""
        return _segments_of_run(
            self._rows_ending_by(b, h, start),
            self._rows_starting_by(b, h, stop - 1),
            self._rows_ending_by(b, h, stop - 1),
            self._rows_starting_by(b, h, start),
        )

    def _rows(self, b: int, h: int) -> tuple[Array, Array]:
        assert self.lo is not None and self.hi is not None
        return self.lo[self.owner(b, h)], self.hi[self.owner(b, h)]

    def _rows_ending_by(self, b: int, h: int, key: int) -> int:
        """Return the number of rows that end at or before a key: hi <= key."""
        if self.band is None:
            return int(np.searchsorted(self._rows(b, h)[1], key, side="right"))
        return 0 if self.band.upper is None else min(max(key - self.band.upper, 0), self.seqlen_q)

    def _rows_starting_by(self, b: int, h: int, key: int) -> int:
        """Return the number of rows that start at or before a key: lo <= key."""
        if self.band is None:
            return int(np.searchsorted(self._rows(b, h)[0], key, side="right"))
        return self.seqlen_q if self.band.lower is None else min(max(key - self.band.lower + 1, 0), self.seqlen_q)


def _segments_of_run(start: int, stop: int, full_start: int, full_stop: int) -> list[Segment]:
    """Split a visited run into the part before its full part, the full part, and the part after it."""
    if start >= stop:
        return []
    if full_start >= full_stop:
        return [Segment(start, stop, BlockKind.INTERVAL)]
    parts = [
        Segment(start, full_start, BlockKind.INTERVAL),
        Segment(full_start, full_stop, BlockKind.FULL),
        Segment(full_stop, stop, BlockKind.INTERVAL),
    ]
    return [part for part in parts if part.start < part.stop]


@dataclass(frozen=True, eq=False, kw_only=True)
class ListedWork(Memoized):
    """Work listed block by block: a block index, by rows and by columns."""

    index: BlockIndex

    @property
    def block_q(self) -> int:
        return self.index.block[0]

    @property
    def block_kv(self) -> int:
        return self.index.block[1]

    @cached_property
    def max_entries_in_row(self) -> int:
        """The number of entries of the longest block row; on a device, an upper bound that is known without a wait."""
        index = self.index
        return int(np.diff(index.indptr).max(initial=0)) if index.is_on_host else index.num_kv_blocks

    @property
    def nbytes(self) -> int:
        return self.index._nbytes

    def make_ready(self) -> None:
        """List the blocks by columns now, instead of in the first backward pass."""
        self.index._columns  # noqa: B018  (a cached property)

    @cached_property
    def on_host(self) -> ListedWork:
        """A copy of the work in NumPy arrays; waits for a device."""
        return self if self.index.is_on_host else ListedWork(index=self.index._on_host)

    @cached_property
    def lists(self) -> dict[str, Array]:
        """The arrays that kernels read, by name, in C order, on the device of the index.

        A matrix is a batch entry and head of the index.

        - uint8: kinds [entries] and bits [tiles, block_q, ceil(block_kv / 8)].
        - int32: row_pointers [matrices * num_q_blocks + 1] and column_pointers [matrices * num_kv_blocks + 1].
        - int32 [entries]: kv_blocks and q_blocks within their matrix; tiles; column_entries, the numbers of the entries
          column by column; and column_steps, 4 * q_block + kind of each of these. Elements after the last entry are not
          read.
        - int32: row_order [matrices * num_q_blocks] and column_order [matrices * num_kv_blocks], the numbers of the
          block rows and columns of each matrix, with the most entries first; among equals, the last is first.
        - lo and hi as in `BlockIndex`.
        """
        index = self.index
        if index._carried is not None:
            return index._carried.arrays | ({} if index.lo is None else {"lo": index.lo, "hi": index.hi})
        pointers, entries = index._columns
        rows = index._block_rows % max(index.num_q_blocks, 1)
        lists = {
            "row_pointers": index.indptr,
            "kv_blocks": index.indices,
            "q_blocks": rows,
            "kinds": index.kinds,
            "tiles": index.tiles,
            "bits": index.bits,
            "column_pointers": pointers,
            "column_entries": entries,
            "column_steps": 4 * rows[entries] + index.kinds[entries],
            "row_order": self._longest_first(index.indptr, index.num_q_blocks),
            "column_order": self._longest_first(pointers, index.num_kv_blocks),
        }
        if index.lo is not None:
            lists |= {"lo": index.lo, "hi": index.hi}
        xp, byte_arrays = namespace(index.indptr), ("kinds", "bits")
        return {
            name: xp.ascontiguousarray(array, dtype=np.uint8 if name in byte_arrays else np.int32)
            for name, array in lists.items()
        }

    def _longest_first(self, pointers: Array, num_blocks: int) -> Array:
        """Sort the block rows, or columns, of each matrix by descending number of entries, so that the last are short.

        Among equals, the last comes first, which is also the order of kernels without a list.
        """
        lengths = (pointers[1:] - pointers[:-1]).reshape(self.index.batch * self.index.num_heads, num_blocks)
        return _longest_first(lengths).reshape(-1)

    def owner(self, b: int, h: int) -> tuple[int, int]:
        """Return the batch entry and head whose work (b, h) shares."""
        return _owner(b, h, (self.index.batch, self.index.num_heads))

    def bounds(self, b: int, h: int, start: int, stop: int) -> tuple[Array, Array]:
        """Return lo and hi of rows start <= i < stop, for segments of kind INTERVAL."""
        lo, hi = self.index.lo, self.index.hi
        assert lo is not None and hi is not None
        owner = _owner(b, h, lo.shape)
        return lo[owner][start:stop], hi[owner][start:stop]

    def bit_tile(self, tile: int) -> Array:
        """Return a bit tile as booleans [block_q, block_kv]."""
        return unpack(self.index.bits[tile], self.index.block[1])

    @cached_property
    def used_keys(self) -> tuple[Array, Array]:
        """For each bit tile, the first key and one past the last key that any row attends to."""
        return _used_range(unpack(np.bitwise_or.reduce(self.index.bits, axis=1), self.index.block[1]))

    @cached_property
    def used_rows(self) -> tuple[Array, Array]:
        """For each bit tile, the first row and one past the last row that attends to a key."""
        return _used_range(self.index.bits.any(-1))

    def row(self, b: int, h: int, start: int, stop: int) -> Sequence[Segment | GatheredRows]:
        """Return the keys that the block row of queries start <= i < stop visits."""
        index = self.index
        row = self._matrix(b, h) * index.num_q_blocks + start // self.block_q
        entries = slice(int(index.indptr[row]), int(index.indptr[row + 1]))
        within = (0, index.seqlen_kv)
        if index.lo is not None:
            lo, hi = self.bounds(b, h, start, stop)
            within = int(lo[0]), int(hi[-1])
        return _segments(index, index.indices[entries], entries, self.block_kv, index.seqlen_kv, within, self.used_keys)

    def column(self, b: int, h: int, start: int, stop: int) -> Sequence[Segment | GatheredRows]:
        """Return the queries that visit the block column of keys start <= j < stop."""
        index = self.index
        pointers, order = index._columns
        column = self._matrix(b, h) * index.num_kv_blocks + start // self.block_kv
        entries = order[pointers[column] : pointers[column + 1]]
        rows = index._block_rows[entries] % max(index.num_q_blocks, 1)
        within = (0, index.seqlen_q)
        if index.lo is not None:
            lo, hi = self.bounds(b, h, 0, index.seqlen_q)
            within = int(np.searchsorted(hi, start, side="right")), int(np.searchsorted(lo, stop - 1, side="right"))
        return _segments(index, rows, entries, self.block_q, index.seqlen_q, within, self.used_rows)

    def _matrix(self, b: int, h: int) -> int:
        b, h = self.owner(b, h)
        return b * self.index.num_heads + h


def _num_rows(lo: Array, hi: Array, first: Array, last: Array) -> Array:
    """Return how many rows attend to keys first <= j <= last, for each pair of first and last."""
    xp = namespace(lo)
    return xp.searchsorted(lo, last, side="right") - xp.searchsorted(hi, first, side="right")


def _block_ends(length: int, block: int) -> tuple[Array, Array]:
    """Return the first and the last element of each block, int32."""
    first = np.arange(0, length, block, dtype=np.int32)
    return first, np.minimum(first + block, length).astype(np.int32) - 1


def _in_blocks(lengths: Array, block: int) -> Array:
    """Convert lengths to blocks, up to `MAX_LENGTH`."""
    return namespace(lengths).clip(-(-lengths // block), 0, MAX_LENGTH)


def _longest_first(lengths: Array) -> Array:
    """Return the rows sorted by descending length, int32 [matrices, rows]; among equals, the last comes first."""
    xp, (num_matrices, num_rows) = namespace(lengths), lengths.shape
    if xp is np:
        return np.argsort(lengths, axis=1, kind="stable")[:, ::-1].astype(np.int32)
    # Compute each row's position by counting the rows before it, because CuPy's sorts may wait for the device.
    number = xp.arange(num_rows, dtype=np.int64)
    key = lengths.astype(np.int64) * num_rows + number
    place = (key[:, None, :] > key[:, :, None]).sum(axis=2)
    order = xp.empty(lengths.shape, dtype=np.int32)
    order[xp.arange(num_matrices)[:, None], place] = number.astype(np.int32)
    return order


def _owner(b: int, h: int, extents: tuple[int, ...]) -> tuple[int, int]:
    """Return the index of (b, h) in arrays whose first two axes may have extent 1."""
    return (b if extents[0] > 1 else 0), (h if extents[1] > 1 else 0)


def _used_range(any_used: Array) -> tuple[Array, Array]:
    return any_used.argmax(axis=1), any_used.shape[1] - any_used[:, ::-1].argmax(axis=1)


def _segments(
    index: BlockIndex,
    blocks: Array,
    entries: Array,
    block: int,
    length: int,
    within: tuple[int, int],
    used: tuple[Array, Array],
) -> list[Segment]:
    """Convert listed blocks to segments: merge full neighbors, and trim partial blocks to their keys (or rows)."""
    segments: list[Segment] = []
    for number, kind, tile in zip(blocks.tolist(), index.kinds[entries].tolist(), index.tiles[entries].tolist()):
        start, stop = number * block, min((number + 1) * block, length)
        last = segments[-1] if segments else None
        if kind == BlockKind.FULL and last is not None and last.kind == BlockKind.FULL and last.stop == start:
            segments[-1] = Segment(last.start, stop, BlockKind.FULL)
        elif kind == BlockKind.FULL:
            segments.append(Segment(start, stop, BlockKind.FULL))
        elif kind == BlockKind.INTERVAL:
            segments.append(Segment(max(start, within[0]), min(stop, within[1]), BlockKind.INTERVAL))
        else:
            segments.append(Segment(start + int(used[0][tile]), start + int(used[1][tile]), BlockKind.BITS, tile))
    return segments


WorkList = IntervalWork | ListedWork

LISTED_BLOCK = 128  # maximum block size for masks without a natural block size
NATURAL_BLOCKS = (16, 512)  # smallest and largest natural block size that is used unchanged


def work_list(mask: Mask, shape: MaskShape, tile: tuple[int, int], *, is_ordered: bool = False) -> WorkList:
    """Return the work of a resolved mask for a kernel's tile size; a mask of blocks is listed at its own block size.

    If `is_ordered`, row intervals also have orders in which kernels take tiles.

    Arrays on a device are not inspected: their row intervals are used even if neighboring rows have gaps between them.
    """
    xp = mask_namespace(mask)
    intervals = partial(
        IntervalWork, seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv, block_q=tile[0], block_kv=tile[1]
    )
    if type(mask) is Band:
        return intervals(band=mask)
    if 0 not in (shape.num_batch, *shape[1:]) and mask._has_intervals:
        # On a device the shape of the intervals shows the extents, which is cheaper than evaluating elements.
        over = extents(mask, shape) if xp is np else (shape.num_batch, shape.num_heads)
        lo, hi = row_intervals(mask, shape.seqlen_q, shape.seqlen_kv, *over, xp)
        if xp is not np or _widest_gap(lo, hi) < min(tile[1], LISTED_BLOCK):
            return intervals(lo=lo, hi=hi, is_ordered=is_ordered)
    block = listed_block(mask, tile)
    if isinstance(mask, IndexMask):
        rows = mask.row_intervals
        if rows is not None and (xp is not np or _widest_gap(*rows) < min(tile[1], LISTED_BLOCK)):
            return intervals(lo=rows[0], hi=rows[1], is_ordered=is_ordered)
        return _work_of_index(mask, block)
    return ListedWork(index=BlockIndex._of_mask(mask, shape, block))


def _work_of_index(mask: IndexMask, block: tuple[int, int]) -> ListedWork:
    """Return the work of an index at a block size; built once for all plans with the mask."""
    work: ListedWork | None = mask.works.get(block)
    if work is None:
        index = mask.index
        if index.block != block:
            shape = MaskShape((index.batch,), index.num_heads, index.seqlen_q, index.seqlen_kv)
            index = BlockIndex._of_mask(mask, shape, block)
        work = mask.works.setdefault(block, ListedWork(index=index))
    return work


def listed_block(mask: Mask, tile: tuple[int, int]) -> tuple[int, int]:
    """Return the mask's own block size if it is in the range for lists, else a size that fits the tile."""
    natural = mask._natural_block or (NATURAL_BLOCKS[1] + 1,) * 2
    block_q, block_kv = (_listed_side(natural_side, side) for natural_side, side in zip(natural, tile))
    return block_q, block_kv


def _listed_side(natural: int, tile: int) -> int:
    smallest, largest = NATURAL_BLOCKS
    if natural > largest:
        return min(tile, LISTED_BLOCK)
    return natural * -(-smallest // natural)  # several small blocks form one listed block with a bit tile


def _widest_gap(lo: Array, hi: Array) -> int:
    """Return the largest gap between the intervals of adjacent rows, whose keys kernels would visit needlessly."""
    gaps = np.where(lo[..., 1:] < hi[..., 1:], lo[..., 1:] - hi[..., :-1], 0)
    return int(gaps.max(initial=0))


def requested_mask(
    mask: Mask | Array | None, causal: bool | str, window: tuple[int | None, int | None] | None, shape: MaskShape,
    where: Namespace | None = None,
) -> Mask:
    """Return the intersection of a call's mask, causal and window, resolved for a shape; `Band()` without any of them.

    `where` is the namespace of q, if q is an array.

    Raises
    ------
    TypeError
        `mask` is not a Mask, a BlockIndex, an array, a scipy.sparse array or a function.
    UnsupportedProblem
        An argument breaks its rule or does not fit the shape. The message lists all reasons.
    """
    reasons: list[str] = []
    parts: list[Mask] = []
    causal = bool(causal) if is_flag(causal) else causal
    align = causal if isinstance(causal, str) and causal in ("bottom_right", "top_left") else None
    if causal is True or align is not None:
        if align is None and shape.seqlen_q != shape.seqlen_kv:
            reasons.append(alignment_reason("causal=True", "causal", shape))
        else:
            parts.append(Causal(align).resolve(shape))
    elif causal is not False:
        reasons.append(f"causal must be True, False, 'bottom_right' or 'top_left'; got {describe(causal)}")
    if window is not None:
        with collecting(reasons):
            parts.append(_window(window, align, shape))
    if mask is not None:
        with collecting(reasons):
            converted = as_mask(mask)
            misplaced = _location_reasons(converted, where)
            reasons.extend(misplaced)
            if not misplaced:
                parts.append(converted.resolve(shape))
    refuse(reasons)
    return intersection(parts)


def _location_reasons(mask: Mask, where: Namespace | None) -> list[str]:
    """Return the reasons why a mask's arrays are not on the device of q.

    Block lists on the host are allowed with q on a device, since the launch copies them. All other arrays must be on
    the device of q, because no call silently copies a caller's host arrays.
    """
    present, plain = (
        {space for space in map(namespace, held_arrays(mask, besides)) if space.__name__ != "jax.numpy"}
        for besides in ((), (BlockPattern, IndexMask))
    )  # without arrays that JAX traces: it calls plans with arrays on the device of q
    allowed = {where} if where is not None else present | {np}
    if len(present) <= 1 and plain <= allowed and present <= allowed | {np}:
        return []
    names = " and ".join(sorted(space.__name__ for space in present))
    q = "" if where is None else f" with q of {where.__name__}"
    to_host = "cupy.asnumpy" if "cupy" in names else "numpy.asarray"
    convert = "cupy.asarray" if where is not None and where.__name__ == "cupy" else to_host
    return [
        f"mask's arrays must be on the same device as q; got arrays of {names}{q}: copy them once with "
        f"mask.to({convert}), or make a BlockIndex of the whole mask"
    ]


def _window(window: tuple[int | None, int | None], align: str | None, shape: MaskShape) -> Mask:
    left, right = window_sides(window)
    if align is None and shape.seqlen_q != shape.seqlen_kv:
        raise UnsupportedProblem(
            alignment_reason(f"window={describe(tuple(window))}", "causal", shape)
            + "; or pass mask=masks.SlidingWindow(left, right, align=...)"
        )
    return SlidingWindow(left, right, align).resolve(shape)
