"""Chooses how many heads have their tiles taken alternately: for even ends under a band, for the cache with a list."""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from ..blocks.work_list import IntervalWork, ListedWork, WorkList
from ..masks.base import Band
from .device import DeviceSpec
from .launches import TileOrder
from .problem import Problem

# Persistent blocks: the time that a tile takes beside its steps, in steps; how unevenly blocks may end; the most rounds
# of blocks that are simulated; and the fewest blocks that read the same K and V at a time.
_OVERHEAD_STEPS, _MAX_IMBALANCE, _MAX_ROUNDS, _MIN_BLOCKS_PER_HEAD = 2, 1.005, 64, 16


def is_uneven_band(work: WorkList) -> bool:
    """Return whether tiles of a band see unlike numbers of keys."""
    return isinstance(work, IntervalWork) and work.band not in (None, Band())


def heads_per_wave(work: WorkList, num_blocks: int, num_tiles: int) -> int:
    """Heads whose tiles together are no more than the blocks that work at once, so that few long tiles start late.

    One where all tiles take equally long.
    """
    return max(1, num_blocks // max(1, num_tiles)) if is_uneven_band(work) else 1


def heads_in_cache(problem: Problem, device: DeviceSpec, num_elements: int) -> int:
    """Heads whose `num_elements`, of the inputs' dtype, fit a third of the level-2 cache; at least one."""
    return max(1, device.cache_bytes // max(1, 3 * num_elements * problem.dtype.itemsize))


def listed_heads(problem: Problem, device: DeviceSpec) -> int:
    """Heads whose K and V fit a third of the level-2 cache while tiles of queries walk a list."""
    return heads_in_cache(problem, device, problem.seqlen_kv * (problem.head_dim + problem.value_dim))


def listed_kv_heads(problem: Problem, device: DeviceSpec) -> int:
    """Heads whose Q, dO and sums of dQ fit a third of the level-2 cache while tiles of keys walk a list."""
    dq = problem.head_dim * problem.accumulator.itemsize // problem.dtype.itemsize
    return heads_in_cache(problem, device, problem.seqlen_q * (problem.head_dim + problem.value_dim + dq))


def balanced_heads(
    problem: Problem, device: DeviceSpec, work: IntervalWork, tile: tuple[int, int], num_blocks: int
) -> int:
    """Heads that persistent blocks take alternately under a band.

    As many as have K and V in a third of the level-2 cache; or more, if many blocks read each at a time, until all
    blocks end together: the assignment of tiles to blocks is simulated for each candidate.
    """
    assert work.band is not None
    block_q, block_kv = tile
    last = np.arange(problem.seqlen_q, 0, -block_q) - 1  # the longest tile first
    first = np.maximum(last + 1 - block_q, 0)
    lo = 0 if work.band.lower is None else np.maximum(first + work.band.lower, 0)
    hi = problem.seqlen_kv if work.band.upper is None else np.minimum(last + work.band.upper + 1, problem.seqlen_kv)
    steps = _OVERHEAD_STEPS + np.maximum(-(-(hi - lo) // block_kv), 0)
    num_heads = problem.num_batch_heads
    simulated = min(num_heads, -(-_MAX_ROUNDS * num_blocks // len(steps)))
    num_elements = problem.seqlen_kv * (problem.head_dim + problem.value_dim) // problem.group_size
    in_cache = heads_in_cache(problem, device, num_elements)
    if in_cache >= simulated:
        return simulated
    group, imbalance = 1 << in_cache.bit_length() - 1, dict[int, float]()
    while not imbalance or group <= min(simulated, num_blocks // _MIN_BLOCKS_PER_HEAD):
        tiles = [np.repeat(steps, min(group, simulated - start)) for start in range(0, simulated, group)]
        imbalance[group] = _relative_makespan(np.concatenate(tiles).tolist(), num_blocks)
        if imbalance[group] <= _MAX_IMBALANCE:
            break
        group *= 2
    return min(imbalance, key=imbalance.__getitem__)


def forward_order(
    problem: Problem, device: DeviceSpec, work: WorkList, block: tuple[int, int], num_blocks: int
) -> TileOrder:
    """Heads that alternate in a kernel for tiles of queries, and in those for keys with a list.

    With a list they are those that fit the cache together; under an uneven band, those whose tiles end together.

    Parameters
    ----------
    block : (block_q, block_kv)
        The kernel's tile.
    num_blocks : int
        Thread blocks of the kernel that the device holds at once.
    """
    if isinstance(work, ListedWork):
        return TileOrder(listed_heads(problem, device), listed_kv_heads(problem, device))
    if not is_uneven_band(work) or not problem.seqlen_q:
        return TileOrder()
    return TileOrder(balanced_heads(problem, device, work, block, num_blocks))


def _relative_makespan(tiles: list[int], num_blocks: int) -> float:
    """The time of the last block over the mean, where each block takes the next tile as it ends one; at least 1."""
    ends = [0] * num_blocks
    for tile in tiles:
        heapreplace(ends, ends[0] + tile)
    return max(ends) * num_blocks / sum(tiles)
