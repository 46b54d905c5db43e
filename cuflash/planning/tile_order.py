"""The choice of how many heads' tiles thread blocks take alternately.

Under a band, alternating heads balances the load of thread blocks. With a block list, it keeps K and V in the level-2
cache.
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from ..blocks.work_list import IntervalWork, ListedWork, WorkList
from ..masks.base import Band
from .device import DeviceSpec
from .launches import TileOrder
from .problem import Problem

# Constants for persistent thread blocks.
_OVERHEAD_STEPS = 2  # overhead of a tile, in steps
_MAX_IMBALANCE = 1.005  # accepted ratio of the last block's end to the mean
_MAX_ROUNDS = 64  # maximum number of simulated tiles per block
_MIN_BLOCKS_PER_HEAD = 16  # minimum number of blocks that read the same K and V at a time


def is_uneven_band(work: WorkList) -> bool:
    """True if the work is a band, so that its tiles may visit different numbers of keys."""
    return isinstance(work, IntervalWork) and work.band not in (None, Band())


def heads_per_wave(work: WorkList, num_blocks: int, num_tiles: int) -> int:
    """Return how many heads' tiles fit in one wave of thread blocks, so that few long tiles start late.

    Return 1 if all tiles take the same time.
    """
    return max(1, num_blocks // max(1, num_tiles)) if is_uneven_band(work) else 1


def heads_in_cache(problem: Problem, device: DeviceSpec, num_elements: int) -> int:
    """Return how many heads of `num_elements` of the inputs' dtype fit in a third of the level-2 cache (>= 1)."""
    return max(1, device.cache_bytes // max(1, 3 * num_elements * problem.dtype.itemsize))


def listed_heads(problem: Problem, device: DeviceSpec) -> int:
    """Return how many heads' K and V fit in a third of the level-2 cache while query tiles walk a block list."""
    return heads_in_cache(problem, device, problem.seqlen_kv * (problem.head_dim + problem.value_dim))


def listed_kv_heads(problem: Problem, device: DeviceSpec) -> int:
    """Return how many heads' Q, dO and dQ sums fit in a third of the level-2 cache while key tiles walk a list."""
    dq = problem.head_dim * problem.accumulator.itemsize // problem.dtype.itemsize
    return heads_in_cache(problem, device, problem.seqlen_q * (problem.head_dim + problem.value_dim + dq))


def balanced_heads(
    problem: Problem, device: DeviceSpec, work: IntervalWork, tile: tuple[int, int], num_blocks: int
) -> int:
    """Return how many heads' tiles persistent blocks take alternately under a band.

    The smallest candidate is the number of heads whose K and V fit in a third of the level-2 cache. It is doubled until
    all blocks end at nearly the same time, as long as enough blocks share each head's K and V. The assignment of tiles
    to blocks is simulated for each candidate.
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
    """Return between how many heads query tiles alternate and, with a block list, key tiles.

    With a block list, these heads fit in the cache together. Under a band, their number balances the thread blocks.

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
    """Return the latest end of a block divided by the mean end, if a free block always takes the next tile."""
    ends = [0] * num_blocks
    for tile in tiles:
        heapreplace(ends, ends[0] + tile)
    return max(ends) * num_blocks / sum(tiles)
