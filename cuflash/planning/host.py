"""Chooses the tiles of the cpu executor, and how many threads and how much memory they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..blocks.work_list import IntervalWork, WorkList
from ..masks.content import without_memos
from .device import DeviceSpec
from .problem import Problem

# A tile of scores passes through max, exp2 and two matrix products; experiments/results/tile_sweep.csv has the times.
# Tall tiles spare Python's share; the backward pass slows down once two tiles leave the level-2 cache.
_BLOCK_Q = 512
_LEAST_BLOCK_KV, _MOST_BLOCK_KV = 512, 4096  # the backward pass holds block_kv^2 scores
# Under a short window, or in short sequences, the keys of a tile grow with its queries, and most scores are masked.
# Each pair is the height of a flatter tile, and the factor of keys by which a tall tile must exceed it.
_FLAT_TILES = ((64, 4), (128, 2))
JVP_TILES, BACKWARD_JVP_TILES = 3, 5  # tiles of scores that these passes hold; others hold two
_SHARED_SCORES = 1 << 23  # fewer scores than that are too little work to share among threads


def host_tile(problem: Problem, device: DeviceSpec) -> tuple[int, int]:
    """Queries and keys of a tile of the cpu executor."""
    keys = min(device.tile_memory_bytes // (problem.accumulator.itemsize * _BLOCK_Q), _MOST_BLOCK_KV)
    return _BLOCK_Q, max(_LEAST_BLOCK_KV, (1 << keys.bit_length()) // 2)


def in_flat_tiles(work: WorkList) -> WorkList:
    """Return the work in flatter tiles of queries and keys if tall tiles visit several times as many keys."""
    if isinstance(work, IntervalWork) and work.seqlen_q > work.block_q:
        visited = work.visited_keys(work.block_q)
        for height, factor in _FLAT_TILES:
            if visited > factor * work.visited_keys(height):
                return replace(work, block_q=height)
    return work


@dataclass(frozen=True, eq=False)
class HostTiling:
    """Tiles, and batches of tiles, into which the cpu executor cuts a problem's work.

    Attributes
    ----------
    problem : Problem
    device : DeviceSpec
        The host.
    block_q, block_kv : int
        Queries and keys of a tile.
    work : WorkList
    """

    problem: Problem
    device: DeviceSpec
    block_q: int
    block_kv: int
    work: WorkList

    def __getstate__(self) -> Any:
        return without_memos(self)

    @cached_property
    def is_small(self) -> bool:
        """Return whether the work is too little to share among threads, whatever their number."""
        return self.problem.num_batch_heads * self.problem.seqlen_q * self.problem.seqlen_kv < _SHARED_SCORES

    @cached_property
    def num_workers(self) -> int:
        """Threads that a call uses; one, beside BLAS's own, where the work is too little to share."""
        return 1 if self.is_small else max(1, min(self.device.num_processors, self.num_tiles))

    @cached_property
    def num_tiles(self) -> int:
        """Tiles of queries over all batch entries and heads."""
        return self.problem.num_batch_heads * -(-self.problem.seqlen_q // self.work.block_q)

    @cached_property
    def batch_area(self) -> int:
        """Scores that the tiles of a batch hold together, unless a single tile is larger.

        Small calls run on BLAS's threads and share nothing, so two tiles at once spare Python's part of the second.
        """
        return (1 + self.is_small) * self.block_q * self.block_kv

    @cached_property
    def scratch_scores(self) -> int:
        """The most scores that a batch holds: those of some tiles, or all that there are."""
        rows, problem = max(self.block_q, self.work.block_q, self.work.block_kv), self.problem
        scores = problem.num_batch_heads * problem.seqlen_q * problem.seqlen_kv
        return min(max(self.batch_area, rows * self.block_kv), max(1, scores))

    def step_width(self, height: int) -> int:
        """Rows that a tile of some height visits at once: a flat tile is as wide as its area allows, up to 8 tiles."""
        area = self.block_q * self.block_kv
        return min(max(self.block_kv, area // height), 8 * self.block_kv)

    @property
    def workspace_bytes(self) -> int:
        """Memory of a call beside inputs and results.

        Each worker holds two tiles of scores, or five with tangents, gathered and widened rows, and accumulators;
        beside them lie one number a query, or two, and the work list.
        """
        problem = self.problem
        rows = max(self.block_q, self.work.block_q, self.work.block_kv)
        columns = self.step_width(min(self.work.block_q, self.work.block_kv))
        has_tangents = bool(problem.tangents)
        num_tiles, num_sides = (BACKWARD_JVP_TILES, 2) if has_tangents else (2, 1)
        gathered = 2 * num_sides * (rows + columns) * (problem.head_dim + problem.value_dim)
        delta = num_sides * self.problem.num_batch_heads * problem.seqlen_q
        elements = self.num_workers * (num_tiles * self.scratch_scores + gathered) + delta
        return elements * problem.accumulator.itemsize + self.work.nbytes
