"""A block index as a mask, to combine it with other masks or to list it at another block size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ..arrays import Array, namespace
from ..errors import UnsupportedProblem, refuse
from ..masks.base import Mask
from ..masks.block_set import BlockSet
from ..masks.coordinates import LeadingArray
from ..masks.shape import MaskShape
from .classify import BlockKind


@dataclass(frozen=True, eq=False, repr=False)
class IndexMask(Mask):
    """A block index as a mask."""

    index: Any

    def __repr__(self) -> str:
        return f"{' '.join(repr(self.index).split())}.as_mask()"

    @cached_property
    def works(self) -> dict[tuple[int, int], Any]:
        """The work lists of the mask by block size; plans with this mask share them and their device copies."""
        return {}

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """The numbers of batch entries, heads, block rows and block columns of the index."""
        index = self.index
        return index.batch, index.num_heads, index.num_q_blocks, index.num_kv_blocks

    @cached_property
    def blocks(self) -> BlockSet:
        """The listed blocks of an index on the host."""
        index = self.index
        keys = index._block_rows * index.num_kv_blocks + index.indices
        return BlockSet(self.grid, index.block, keys, index.kinds == BlockKind.FULL)

    @cached_property
    def table(self) -> LeadingArray:
        """The entry of each block of an index on a device; the capacity of the lists if a block has no entry."""
        index = self.index
        xp, capacity, num_cells = namespace(index.indptr), len(index.indices), prod(self.grid)
        entry = xp.arange(capacity, dtype=np.int32)
        cell = index._block_rows.astype(np.int64) * index.num_kv_blocks + index.indices
        table = xp.full(num_cells + 1, capacity, dtype=np.int32)
        table[xp.where(entry < index.indptr[-1], cell, num_cells)] = entry  # the last element of the table is dropped
        return LeadingArray(table[:-1].reshape(self.grid), (index.batch,))

    @cached_property
    def row_intervals(self) -> tuple[Array, Array] | None:
        """The interval of keys of each row, lo and hi; None if a row may attend something else.

        Kernels need no lists for such an index. Its blocks must be those that the intervals of its rows touch, and its
        full blocks must lie inside all of them. On a device, the kernels' maker marks them by `is_of_rows`.
        """
        index = self.index
        if not index.is_on_host:
            return (index.lo, index.hi) if "is_of_rows" in vars(index) else None
        if index.lo is None or not len(index.indices) or (index.kinds == BlockKind.BITS).any():
            return None
        lo, hi, (block_q, block_kv) = index.lo, index.hi, index.block
        if (lo[..., 1:] < lo[..., :-1]).any() or (hi[..., 1:] < hi[..., :-1]).any():
            return None
        tops, is_empty = np.arange(0, index.seqlen_q, block_q), lo >= hi

        def of_blocks(function: np.ufunc, sides: Array, of_empty: int) -> Array:
            sides = function.reduceat(np.where(is_empty, of_empty, sides), tops, axis=-1)
            return np.broadcast_to(sides, self.grid[:3]).reshape(-1)

        first, end = of_blocks(np.minimum, lo, index.seqlen_kv), of_blocks(np.maximum, hi, 0)
        first, end = first // block_kv, -(-end // block_kv)
        rows, columns = index._block_rows, index.indices.astype(np.int64)
        is_touched = (first[rows] <= columns) & (columns < end[rows])
        if (np.diff(index.indptr) != np.maximum(end - first, 0)).any() or not is_touched.all():
            return None
        last, least = of_blocks(np.maximum, lo, index.seqlen_kv), of_blocks(np.minimum, hi, 0)
        ends = np.minimum((columns + 1) * block_kv, index.seqlen_kv)
        is_inside = (last[rows] <= columns * block_kv) & (ends <= least[rows])
        return (lo, hi) if (is_inside | (index.kinds == BlockKind.INTERVAL)).all() else None

    @property
    def _natural_block(self) -> tuple[int, int]:
        block_q, block_kv = self.index.block
        return block_q, block_kv

    @property
    def _own_lengths(self) -> tuple[int | None, int | None]:
        return self.index.seqlen_q, self.index.seqlen_kv

    def resolve(self, shape: MaskShape) -> Mask:
        index, reasons = self.index, []
        if (index.seqlen_q, index.seqlen_kv) != (shape.seqlen_q, shape.seqlen_kv):
            reasons.append(
                f"the block index must be for lengths (seqlen_q={shape.seqlen_q}, seqlen_kv={shape.seqlen_kv}); "
                f"got one for ({index.seqlen_q}, {index.seqlen_kv})"
            )
        for name, have, want in (
            ("batch", index.batch, shape.num_batch),
            ("num_heads", index.num_heads, shape.num_heads),
        ):
            if have not in (1, want):
                reasons.append(f"the block index must have {name} 1 or {want}; got {have}")
        refuse(reasons)
        return self

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        index, (block_q, block_kv) = self.index, self.index.block
        row, col = i // block_q, j // block_kv
        if index.is_on_host:
            position, is_listed = self.blocks.find(b, h, row, col)
        else:
            position, is_listed = self._clipped(self.table.at(b, h, row, col))
        if len(index.indices) == 0:
            return is_listed
        kinds = index.kinds[position]
        allowed = is_listed & (kinds == int(BlockKind.FULL))
        if index.lo is not None and index.hi is not None:
            rows = (b if index.lo.shape[0] > 1 else 0, h if index.lo.shape[1] > 1 else 0, i)
            is_inside = (index.lo[rows] <= j) & (j < index.hi[rows])
            allowed = allowed | is_listed & (kinds == int(BlockKind.INTERVAL)) & is_inside
        if len(index.bits):
            tile = namespace(index.bits).clip(index.tiles[position], 0, len(index.bits) - 1)
            byte = index.bits[tile, i % block_q, j % block_kv // 8]
            bit = (byte >> (j % 8 if block_kv % 8 == 0 else j % block_kv % 8)) & 1
            allowed = allowed | is_listed & (kinds == int(BlockKind.BITS)) & (bit == 1)
        return allowed

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        return self.blocks.rectangle(b, h, i0, i1, j0, j1) if self.index.is_on_host else (True, False)

    def entries(self) -> tuple[Array, Array]:
        """Return whether each block of an index on a device is listed, and the kind of its entry."""
        position, is_listed = self._clipped(self.table.array)
        return is_listed, self.index.kinds[position] if len(self.index.kinds) else is_listed

    def _clipped(self, entry: Array) -> tuple[Array, Array]:
        """Return a valid position in the lists for each entry, and whether the entry exists."""
        capacity = len(self.index.indices)
        return namespace(entry).minimum(entry, max(capacity - 1, 0)), entry < capacity


def chosen_lists(index: Any) -> Array:
    """Return the block lists of a host index with full blocks of one query, int32 [..., heads, seqlen_q, n].

    Raises
    ------
    UnsupportedProblem
        The blocks have several queries, or one is not full.
    """
    if index.block[0] != 1:
        raise UnsupportedProblem(f"the index must have blocks of one query, such as (1, 64); got block={index.block}")
    if (index.kinds != BlockKind.FULL).any():
        raise UnsupportedProblem(
            "the index must have only full blocks; got partial ones: write index.filled().chosen() & mask"
        )
    counts = np.diff(index.indptr)
    blocks = np.full((len(counts), int(counts.max(initial=0))), -1, np.int32)
    blocks[index._block_rows, np.arange(len(index.indices)) - index.indptr[index._block_rows]] = index.indices
    leading = (index.batch,) if index.batch > 1 else ()
    return blocks.reshape(*leading, index.num_heads, index.seqlen_q, blocks.shape[1])
