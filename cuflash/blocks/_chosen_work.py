"""Work lists for queries with their own block lists: a tile visits the union of its lists, with a bit per query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..arrays import Array, namespace
from ..masks._chosen import ResolvedChosen
from ..masks.base import And, Mask
from ..masks.block_set import BlockSet
from ..masks.shape import MaskShape
from ._gathered_rows import GatheredRows
from .classify import BlockKind, extents, row_intervals
from .index import BlockIndex
from .index_mask import IndexMask
from .work_list import ListedWork

_TILE = 64  # queries per tile, one per bit of a word; also the minimum number of keys per tile
_LARGEST_BLOCK = 512  # maximum number of keys per block, since a tile of keys holds whole blocks


class Unions(NamedTuple):
    """For each tile, the union of the lists of its rows.

    Attributes
    ----------
    pointers : int64 array [matrices * tiles + 1]
        The start of each tile's entries.
    numbers : int64 array [entries]
        The numbers in each tile's union, in ascending order.
    words : uint64 array [entries]
        Bit r is set if the list of the tile's row r contains the number.
    """

    pointers: Array
    numbers: Array
    words: Array

    @classmethod
    def of(cls, matrix: Array, row: Array, number: Array, height: int, extents: tuple[int, int, int]) -> Unions:
        """Join the lists of every `height` consecutive rows.

        Parameters
        ----------
        matrix, row, number : int64 arrays [members]
            The matrix, row and number of each list element, without repetitions.
        height : int
            Rows per tile, at most 64.
        extents : (int, int, int)
            The number of matrices, the number of rows per matrix, and the number of possible list elements.

        Examples
        --------
        >>> rows, numbers = np.array([0, 1, 1, 2]), np.array([3, 0, 3, 1])
        >>> union = Unions.of(0 * rows, rows, numbers, 2, (1, 3, 4))
        >>> union.pointers.tolist(), union.numbers.tolist(), union.words.tolist()
        ([0, 2, 3], [0, 3, 1], [2, 3, 1])
        """
        num_matrices, num_rows, num_numbers = extents
        num_tiles = -(-num_rows // height)
        key = (matrix * num_tiles + row // height) * num_numbers + number
        order = np.argsort(key, kind="stable")
        key = key[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        bits = np.left_shift(np.uint64(1), (row % height).astype(np.uint64))
        words = np.bitwise_or.reduceat(bits[order], first) if len(first) else bits
        key = key[first]
        pointers = np.searchsorted(key, np.arange(num_matrices * num_tiles + 1) * num_numbers)
        return cls(pointers, key % max(1, num_numbers), words)

    def tile(self, number: int) -> tuple[Array, Array]:
        """Return the numbers and the words of a tile."""
        entries = slice(self.pointers[number], self.pointers[number + 1])
        return self.numbers[entries], self.words[entries]

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChosenWork(ListedWork):
    """Work on the host for queries that each have a list of blocks, optionally within row intervals.

    The index has blocks of one query, for each head with its own lists; its row intervals apply to all of its blocks. A
    tile of queries visits each block that at least one of these queries chose. A tile of keys holds whole blocks, and
    visits exactly the queries that chose at least one of these blocks.
    """

    heads_of_list: int = 1  # query heads that share a list

    @property
    def block_q(self) -> int:
        return _TILE

    @property
    def block_kv(self) -> int:
        return self._blocks_of_tile * self.block

    @property
    def block(self) -> int:
        return self.index.block[1]

    @property
    def _blocks_of_tile(self) -> int:
        return max(1, _TILE // self.block)

    @cached_property
    def rows(self) -> Unions:
        """The blocks that each tile of queries visits."""
        index = self.index
        extents = index.batch * index.num_heads, index.seqlen_q, index.num_kv_blocks
        return Unions.of(*np.divmod(index._block_rows, index.seqlen_q), index.indices, _TILE, extents)

    @cached_property
    def columns(self) -> Unions:
        """The queries that visit each tile of keys."""
        index = self.index
        matrix, query = np.divmod(index._block_rows, index.seqlen_q)
        extents = index.batch * index.num_heads, index.num_kv_blocks, index.seqlen_q
        return Unions.of(matrix, index.indices, query, self._blocks_of_tile, extents)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.rows.nbytes + self.columns.nbytes

    def make_ready(self) -> None:
        self.columns  # noqa: B018  (a cached property)

    def owner(self, b: int, h: int) -> tuple[int, int]:
        index = self.index
        by_batch, by_head = (1, 1) if index.lo is None else index.lo.shape[:2]
        of_list = h // self.heads_of_list * self.heads_of_list if index.num_heads > 1 else 0
        return (b if max(index.batch, by_batch) > 1 else 0), (h if by_head > 1 else of_list)

    def row(self, b: int, h: int, start: int, stop: int) -> Sequence[GatheredRows]:
        index = self.index
        blocks, words = self.rows.tile(self._matrix(b, h) * -(-index.seqlen_q // _TILE) + start // _TILE)
        keys = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
        first, end, is_cut = 0, index.seqlen_kv, False
        if index.lo is not None:
            lo, hi = self.bounds(b, h, start, stop)
            first, end = int(lo[0]), int(hi[-1])
        inside = slice(*np.searchsorted(keys, (first, end)))
        keys, words = keys[inside], np.repeat(words, self.block)[inside]
        if index.lo is not None and len(keys):
            is_cut = bool(keys[0] < lo[-1] or keys[-1] >= hi[0])
        return _gathered(keys, words, stop - start, 1, is_cut)

    def column(self, b: int, h: int, start: int, stop: int) -> Sequence[GatheredRows]:
        index = self.index
        number = self._matrix(b, h) * -(-index.seqlen_kv // self.block_kv) + start // self.block_kv
        (queries, words), is_cut = self.columns.tile(number), False
        if index.lo is not None:
            lo, hi = self.bounds(b, h, 0, index.seqlen_q)
            within = np.searchsorted(hi, start, side="right"), np.searchsorted(lo, stop - 1, side="right")
            inside = slice(*np.searchsorted(queries, within))
            queries, words = queries[inside], words[inside]
            is_cut = bool((lo[queries] > start).any() or (hi[queries] < stop).any())
        return _gathered(queries, words, -(-(stop - start) // self.block), self.block, is_cut)

    def hidden(
        self, batch_head: tuple[int, int], part: GatheredRows, queries: slice | None, keys: slice | None
    ) -> Array:
        """Return which pairs of a tile's rows and the rows that it visits are masked, bool [keys, queries].

        Pass the queries or the keys of the tile, and None for the side that it visits.
        """
        if queries is not None:
            hidden, j = part.unvisited(queries.stop - queries.start), part.rows
            if part.is_cut:
                lo, hi = self.bounds(*batch_head, queries.start, queries.stop)
                before, after = map(int, np.searchsorted(j, (lo[-1], hi[0])))  # lo and hi never decrease
                hidden[:before] |= j[:before, None] < lo
                hidden[after:] |= j[after:, None] >= hi
            return hidden
        assert keys is not None
        hidden = part.unvisited(keys.stop - keys.start).T
        if part.is_cut:
            lo, hi = (side[part.rows] for side in self.bounds(*batch_head, 0, self.index.seqlen_q))
            j = np.arange(keys.start, keys.stop)[:, None]
            hidden |= (j < lo) | (j >= hi)
        return hidden

    def _matrix(self, b: int, h: int) -> int:
        index = self.index
        of_list = h // self.heads_of_list if index.num_heads > 1 else 0
        return (b if index.batch > 1 else 0) * index.num_heads + of_list


def _gathered(rows: Array, words: Array, num_bits: int, tokens: int, is_cut: bool) -> list[GatheredRows]:
    if not len(rows):
        return []
    is_whole = bool((words == (1 << num_bits) - 1).all())
    return [GatheredRows(rows, None if is_whole else words, tokens, is_cut)]


def chosen_work(mask: Mask, shape: MaskShape) -> ChosenWork | None:
    """Return the work of a resolved host mask whose queries each have a list of blocks; None for other masks.

    Such a mask is a `ChosenBlocks`, or a block index with blocks of one query that are all full within row intervals,
    optionally intersected with masks of row intervals.
    """
    factors = mask.operands if type(mask) is And else (mask,)
    closed = tuple(factor for factor in factors if factor._has_intervals)
    others = [factor for factor in factors if not factor._has_intervals]
    if len(others) != 1 or 0 in (shape.num_batch, *shape[1:]):
        return None
    lists = _lists(others[0])
    if lists is None or lists[0].block[1] > _LARGEST_BLOCK:
        return None
    index, heads_of_list = lists
    lo, hi = index.lo, index.hi
    if closed:
        first, end = row_intervals(And(closed), *shape[2:], *extents(And(closed), shape))
        lo, hi = (first, end) if lo is None or hi is None else (np.maximum(lo, first), np.minimum(hi, end))
    if lo is not None:
        index = replace(index, kinds=np.full_like(index.kinds, BlockKind.INTERVAL), lo=lo, hi=hi)
    return ChosenWork(index=index, heads_of_list=heads_of_list)


def _lists(mask: Mask) -> tuple[BlockIndex, int] | None:
    """Return a host mask's lists as an index with blocks of one query, and the heads per list; None without lists."""
    if isinstance(mask, ResolvedChosen) and mask.source.sequences is None and namespace(mask.source.blocks) is np:
        assert isinstance(mask.cells, BlockSet)
        batch, num_heads, seqlen_q, _ = mask.cells.grid
        shape = MaskShape((batch,), num_heads, seqlen_q, mask.shape.seqlen_kv)
        return BlockIndex._of_mask(mask.cells, shape, mask.cells.block), mask.heads_of_list
    if isinstance(mask, IndexMask) and mask.index.block[0] == 1 and mask.index.is_on_host:
        return (mask.index, 1) if _is_cut_by_rows(mask.index) else None
    return None


def _is_cut_by_rows(index: BlockIndex) -> bool:
    """True if an index with blocks of one query allows exactly its blocks, within its row intervals if it has any."""
    if (index.kinds == BlockKind.BITS).any():
        return False
    if index.lo is None or index.hi is None:
        return True
    is_full = index.kinds == BlockKind.FULL
    matrix, row = np.divmod(index._block_rows[is_full], index.seqlen_q)
    b, h = np.divmod(matrix, index.num_heads)
    place = (b if len(index.lo) > 1 else 0 * b), (h if index.lo.shape[1] > 1 else 0 * h), row
    first = index.indices[is_full] * index.block[1]
    is_inside = (index.lo[place] <= first) & (np.minimum(first + index.block[1], index.seqlen_kv) <= index.hi[place])
    return bool(is_inside.all())
