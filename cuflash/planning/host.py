"""The tiles of the cpu executor, and the threads and memory that they need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..blocks.work_list import IntervalWork, WorkList
from ..masks.content import Memoized
from .device import DeviceSpec
from .problem import Problem

# Each tile of scores goes through max, exp2 and two matrix products; experiments/results/tile_sweep.csv has the times.
# Tall tiles reduce Python overhead. The backward pass slows down if two tiles exceed the level-2 cache.
_BLOCK_Q = 512
_LEAST_BLOCK_KV, _MOST_BLOCK_KV = 512, 4096  # the backward pass holds block_kv^2 scores
# At the edges of a causal mask or a window, and in short sequences, tall tiles visit more masked keys. A pair is
# (height, factor): tiles of this height are used if tall tiles visit more than `factor` times their number of keys.
_FLAT_TILES = ((64, 4), (128, 2), (256, 1.04))
# Tiles of scores that a worker holds in the passes "jvp" and "backward_jvp"; in other passes, it holds two.
JVP_TILES, BACKWARD_JVP_TILES = 3, 5
_SCORES_PER_WORKER = 1 << 17  # fewer scores are not worth the start of a thread


def host_tile(problem: Problem, device: DeviceSpec) -> tuple[int, int]:
    """Return the queries and keys of a tile of the cpu executor."""
    keys = min(device.tile_memory_bytes // (problem.accumulator.itemsize * _BLOCK_Q), _MOST_BLOCK_KV)
    return _BLOCK_Q, max(_LEAST_BLOCK_KV, (1 << keys.bit_length()) // 2)


def in_flat_tiles(work: WorkList) -> WorkList:
    """Return the work with flatter tiles if tall tiles visit several times their number of keys; else unchanged."""
    if isinstance(work, IntervalWork) and work.seqlen_q > _FLAT_TILES[0][0]:
        visited = work.visited_keys(work.block_q)
        for height, factor in _FLAT_TILES:
            if work.seqlen_q > height and visited > factor * work.visited_keys(height):
                return replace(work, block_q=height)
    return work


@dataclass(frozen=True, eq=False)
class HostTiling(Memoized):
    """The tiles, and batches of tiles, of a problem on the cpu executor.

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

    @cached_property
    def is_small(self) -> bool:
        """True if there is too little work to distribute over threads, regardless of their number."""
        return self.num_scores < 2 * _SCORES_PER_WORKER

    @cached_property
    def num_scores(self) -> int:
        """Number of scores of a call without a mask."""
        return self.problem.num_batch_heads * self.problem.seqlen_q * self.problem.seqlen_kv

    @cached_property
    def num_workers(self) -> int:
        """Number of worker threads of a call: one if the problem is small, in addition to the threads of BLAS."""
        limit = max(1, self.num_scores // _SCORES_PER_WORKER)
        return 1 if self.is_small else max(1, min(self.device.num_processors, self.num_tiles, limit))

    @cached_property
    def num_tiles(self) -> int:
        """Number of query tiles over all batch entries and heads."""
        return self.problem.num_batch_heads * -(-self.problem.seqlen_q // self.work.block_q)

    @cached_property
    def batch_area(self) -> int:
        """Maximum number of scores in a batch of tiles, unless a single tile is larger.

        Small calls use only BLAS's threads, so a batch of two tiles saves the Python overhead of the second.
        """
        return (1 + self.is_small) * self.block_q * self.block_kv

    @cached_property
    def scratch_scores(self) -> int:
        """Upper bound of the scores in a batch of tiles: the area of its tiles, or all scores of the problem."""
        rows = max(self.block_q, self.work.block_q, self.work.block_kv)
        return min(max(self.batch_area, rows * self.block_kv), max(1, self.num_scores))

    def step_width(self, height: int, num_tiles: int = 1) -> int:
        """Return the keys that a tile visits per step: their scores fill `num_tiles`, up to 8 * `block_kv` keys."""
        area = num_tiles * self.block_q * self.block_kv
        return min(max(self.block_kv, area // height), 8 * self.block_kv)

    @property
    def workspace_bytes(self) -> int:
        """Memory of a call in addition to inputs and results.

        Each worker holds two tiles of scores (five with tangents), rows that it gathered and converted, and
        accumulators. Workers share one number per query (two with tangents), the work list, and the sum of dQ if its
        dtype is narrower.
        """
        problem = self.problem
        rows = max(self.block_q, self.work.block_q, self.work.block_kv)
        columns = self.step_width(min(self.work.block_q, self.work.block_kv), num_tiles=2)
        has_tangents = bool(problem.tangents)
        num_tiles, num_sides = (BACKWARD_JVP_TILES, 2) if has_tangents else (2, 1)
        gathered = 2 * num_sides * (rows + columns) * (problem.head_dim + problem.value_dim)
        delta = num_sides * problem.num_batch_heads * problem.seqlen_q
        queries = problem.num_batch_heads * problem.seqlen_q
        dq = 0 if problem.dtype == problem.accumulator else queries * problem.head_dim
        elements = self.num_workers * (num_tiles * self.scratch_scores + gathered) + delta + dq
        return elements * problem.accumulator.itemsize + self.work.nbytes
