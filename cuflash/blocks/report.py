"""Statistics of a block index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Array, describe
from ..errors import UnsupportedProblem
from .classify import BlockKind

if TYPE_CHECKING:
    from .index import BlockIndex


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """The counts of `BlockIndex.report`, summed over the index's batch and heads.

    Examples
    --------
    >>> from cuflash import BlockIndex, masks
    >>> index = BlockIndex.from_mask(masks.Causal(), 4, 4, block=2)
    >>> print(index.report(head_dim=8))
    density             75.0 % of all blocks (1 full + 2 partial of 4)
    elements            10 allowed of 12 visited of 16
    blocks in a row     1 to 2, mean 1.50
    rows without a key  0
    FLOPs               384 forward, 960 backward
    bytes               384 of k and v read, 71 of index
    """

    num_full: int
    num_partial: int
    num_eligible: int
    denominator: str
    elements_visited: int
    elements_allowed: int
    num_elements: int
    row_load: tuple[int, float, int]
    empty_rows: int
    forward_flops: int
    backward_flops: int
    kv_bytes: int
    index_bytes: int

    @property
    def density(self) -> float:
        """The number of kept blocks divided by the number of eligible blocks, which `denominator` describes."""
        return (self.num_full + self.num_partial) / self.num_eligible if self.num_eligible else 0.0

    @property
    def element_density(self) -> float:
        """The fraction of elements that are allowed."""
        return self.elements_allowed / self.num_elements if self.num_elements else 0.0

    def __str__(self) -> str:
        least, mean, most = self.row_load
        counts = f"({self.num_full} full + {self.num_partial} partial of {self.num_eligible})"
        return "\n".join(
            [
                f"density             {self.density:.1%} of {self.denominator} {counts}".replace("%", " %"),
                f"elements            {self.elements_allowed} allowed of {self.elements_visited} visited "
                f"of {self.num_elements}",
                f"blocks in a row     {least} to {most}, mean {mean:.2f}",
                f"rows without a key  {self.empty_rows}",
                f"FLOPs               {self.forward_flops} forward, {self.backward_flops} backward",
                f"bytes               {self.kv_bytes} of k and v read, {self.index_bytes} of index",
            ]
        )


def report_of(
    index: BlockIndex, *, head_dim: int, value_dim: int, itemsize: int, eligible: BlockIndex | None
) -> IndexReport:
    """Return the report of an index on the host; `BlockIndex.report` documents the parameters."""
    matrices = index.batch * index.num_heads
    first_rows = (index._block_rows % max(index.num_q_blocks, 1)) * index.block[0]
    rows = np.minimum(index.block[0], index.seqlen_q - first_rows)
    keys = np.minimum(index.block[1], index.seqlen_kv - index.indices.astype(np.int64) * index.block[1])
    visited, counts, load = int((rows * keys).sum()), row_counts_of(index), np.diff(index.indptr)
    num_eligible = index.num_q_blocks * index.num_kv_blocks * matrices
    if eligible is not None:
        _require_same_blocks(index, eligible)
        num_eligible = eligible.num_entries * matrices // (eligible.batch * eligible.num_heads)
    return IndexReport(
        num_full=int((index.kinds == BlockKind.FULL).sum()),
        num_partial=int((index.kinds != BlockKind.FULL).sum()),
        num_eligible=num_eligible,
        denominator="all blocks" if eligible is None else "eligible blocks",
        elements_visited=visited,
        elements_allowed=int(counts.sum()),
        num_elements=matrices * index.seqlen_q * index.seqlen_kv,
        row_load=(int(load.min()), float(load.mean()), int(load.max())) if len(load) else (0, 0.0, 0),
        empty_rows=int((counts == 0).sum()),
        forward_flops=2 * visited * (head_dim + value_dim),
        backward_flops=2 * visited * (3 * head_dim + 2 * value_dim),
        kv_bytes=int(keys.sum()) * (head_dim + value_dim) * itemsize,
        index_bytes=index._nbytes,
    )


def row_counts_of(index: BlockIndex) -> Array:
    """Return the number of keys that each query attends to, int64 [batch, num_heads, seqlen_q]."""
    block_q, block_kv = index.block
    counts = np.zeros((len(index.indptr) - 1, block_q), np.int64)
    first_key = index.indices.astype(np.int64) * block_kv
    num_keys = np.minimum(block_kv, index.seqlen_kv - first_key)
    full = index.kinds == BlockKind.FULL
    np.add.at(counts, index._block_rows[full], num_keys[full, None])
    partial = index.kinds == BlockKind.INTERVAL
    lo, hi = _entry_intervals(index, partial)
    inside = np.minimum(hi, (first_key + num_keys)[partial, None]) - np.maximum(lo, first_key[partial, None])
    np.add.at(counts, index._block_rows[partial], np.maximum(inside, 0))
    bits = index.kinds == BlockKind.BITS
    tile_counts = np.bitwise_count(index.bits).sum(-1, dtype=np.int64)
    np.add.at(counts, index._block_rows[bits], tile_counts[index.tiles[bits]])
    return counts.reshape(index.batch, index.num_heads, index.num_q_blocks * block_q)[..., : index.seqlen_q]


def _entry_intervals(index: BlockIndex, entries: Array) -> tuple[Array, Array]:
    """Return the row intervals [num_entries, block_q] of the chosen entries; empty for rows past the end."""
    block_q = index.block[0]
    if index.lo is None or index.hi is None:
        return np.zeros((0, block_q), np.int64), np.zeros((0, block_q), np.int64)
    matrix, row = np.divmod(index._block_rows[entries], index.num_q_blocks)
    b, h = np.divmod(matrix, index.num_heads)
    i = row[:, None] * block_q + np.arange(block_q)
    position = (
        b[:, None] if index.lo.shape[0] > 1 else 0,
        h[:, None] if index.lo.shape[1] > 1 else 0,
        np.minimum(i, index.seqlen_q - 1),
    )
    return index.lo[position].astype(np.int64), np.where(i < index.seqlen_q, index.hi[position], 0).astype(np.int64)


def elements_of(index: BlockIndex, entry: int) -> Array:
    """Return one listed block as booleans [block_q, block_kv], False past the lengths."""
    block_q, block_kv = index.block
    matrix, row = divmod(int(index._block_rows[entry]), index.num_q_blocks)
    b, h = divmod(matrix, index.num_heads)
    i = row * block_q + np.arange(block_q)[:, None]
    j = int(index.indices[entry]) * block_kv + np.arange(block_kv)
    exists = (i < index.seqlen_q) & (j < index.seqlen_kv)
    return exists & index.as_mask()(b, h, np.minimum(i, index.seqlen_q - 1), np.minimum(j, index.seqlen_kv - 1))


def _require_same_blocks(index: BlockIndex, eligible: BlockIndex) -> None:
    """Refuse `eligible` blocks that are not a `BlockIndex` with the same lengths and block size."""
    if type(eligible) is not type(index):
        raise UnsupportedProblem(f"eligible must be a BlockIndex or None; got {describe(eligible)}")
    ours, theirs = (((each.seqlen_q, each.seqlen_kv), each.block) for each in (index, eligible))
    if ours != theirs:
        of_index, got = (f"{lengths} in blocks of {block}" for lengths, block in (ours, theirs))
        raise UnsupportedProblem(f"eligible must be an index for lengths {of_index}; got {got}")
