"""A block index as a mask, to combine with others or to list in other blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ..arrays import Array, namespace
from ..errors import UnsupportedProblem
from ..masks.base import Mask
from ..masks.block_set import BlockSet
from ..masks.coordinates import LeadingArray
from ..masks.shape import MaskShape
from .classify import BlockKind


@dataclass(frozen=True, eq=False, repr=False)
class IndexMask(BlockSet):
    """A block index as a mask."""

    index: Any = None

    rectangle = BlockSet.rectangle
    natural_block = BlockSet.natural_block

    def __repr__(self) -> str:
        return _shown(self.index)

    @cached_property
    def works(self) -> dict[tuple[int, int], Any]:
        """Work of the mask by the size of its blocks: plans with one mask share it, and its copies on devices."""
        return {}

    @classmethod
    def of_index(cls, index: Any) -> IndexMask:
        grid = (index.batch, index.num_heads, index.num_q_blocks, index.num_kv_blocks)
        keys = index.block_rows * grid[3] + index.indices
        return cls(grid, index.block, keys, index.kinds == BlockKind.FULL, index)

    @property
    def own_lengths(self) -> tuple[int | None, int | None]:
        return self.index.seqlen_q, self.index.seqlen_kv

    def resolve(self, shape: MaskShape) -> Mask:
        _check_fit(self.index, shape)
        return self

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        position, is_listed = self._find(0, b, h, i // self.block[0], j // self.block[1])
        return _element_is_allowed(self.index, position, is_listed, b, h, i, j)


@dataclass(frozen=True, eq=False, repr=False)
class IndexGrid(Mask):
    """A block index on a device as a mask: a table of all blocks says which entry each is."""

    index: Any

    def __repr__(self) -> str:
        return _shown(self.index)

    @cached_property
    def table(self) -> LeadingArray:
        """Entry of each block, one past the capacity for entries where there is no entry."""
        index = self.index
        grid = (index.batch, index.num_heads, index.num_q_blocks, index.num_kv_blocks)
        xp, capacity, num_cells = namespace(index.indptr), len(index.indices), prod(grid)
        entry = xp.arange(capacity, dtype=np.int32)
        cell = index.block_rows.astype(np.int64) * grid[3] + index.indices
        table = xp.full(num_cells + 1, capacity, dtype=np.int32)
        table[xp.where(entry < index.indptr[-1], cell, num_cells)] = entry  # the last place is cut off
        return LeadingArray(table[:-1].reshape(grid), (index.batch,), 3)

    @property
    def natural_block(self) -> tuple[int, int]:
        block_q, block_kv = self.index.block
        return block_q, block_kv

    @property
    def own_lengths(self) -> tuple[int | None, int | None]:
        return self.index.seqlen_q, self.index.seqlen_kv

    def resolve(self, shape: MaskShape) -> Mask:
        _check_fit(self.index, shape)
        return self

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        entry = self.table.at(b, h, i // self.index.block[0], j // self.index.block[1])
        return _element_is_allowed(self.index, *self._clipped(entry), b, h, i, j)

    def entries(self) -> tuple[Array, Array]:
        """Return whether each block is listed, and the kind of its entry."""
        position, is_listed = self._clipped(self.table.array)
        return is_listed, self.index.kinds[position] if len(self.index.kinds) else is_listed

    def _clipped(self, entry: Array) -> tuple[Array, Array]:
        """A position in the lists, any position where there is no entry, and whether there is an entry."""
        capacity = len(self.index.indices)
        return namespace(entry).minimum(entry, max(capacity - 1, 0)), entry < capacity


def _shown(index: Any) -> str:
    return f"{' '.join(repr(index).split())}.as_mask()"


def _check_fit(index: Any, shape: MaskShape) -> None:
    reasons = []
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
    if reasons:
        raise UnsupportedProblem(reasons)


def _element_is_allowed(index: Any, position: Array, is_listed: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
    """Elements of an index, given the entry of the block that each lies in and whether it is listed."""
    if len(index.indices) == 0:
        return is_listed
    block_q, block_kv = index.block
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
