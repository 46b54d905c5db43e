"""The choice of `num_splits`: the number of thread blocks that divide the keys of a query tile (split-KV)."""

from __future__ import annotations

from ..blocks.work_list import ListedWork, WorkList
from .problem import Problem
from .spec import KernelSpec

_FULL_SHARE = 0.8  # do not split if the tiles already fill this fraction of the GPU's block slots
_GOOD_SHARE = 0.85  # take the fewest splits that reach this fraction of the best occupancy
_MIN_STEPS, _MAX_WAVES, _MAX_SPLITS = 4, 4, 128


def num_splits(problem: Problem, work: WorkList, forward: KernelSpec, tiles: int, num_blocks: int) -> int:
    """Return the fewest thread blocks per tile whose occupancy of the GPU is close to the best.

    As in FlashAttention, the occupancy is the fraction of block slots in use, averaged over all waves. Each block
    computes at least one step, and loads at least as many bytes as it takes to write and read its partial result. For
    example, 48 tiles on 264 block slots fill 0.18 of the GPU; with 5 splits, 240 blocks fill 0.91 of one wave.

    Parameters
    ----------
    forward : KernelSpec
    tiles : int
        Number of query tiles over all batch entries and heads.
    num_blocks : int
        Thread blocks of the forward kernel that the GPU holds at once.
    """
    steps = max_steps(problem, work, forward)
    if tiles >= _FULL_SHARE * num_blocks or steps < _MIN_STEPS:
        return 1
    rows = min(forward.block_q, problem.seqlen_q * (problem.group_size if forward.pack_gqa else 1))
    step_bytes = forward.block_kv * (forward.head_dim + forward.value_dim) * problem.dtype.itemsize
    min_steps = -(-2 * rows * forward.value_dim * problem.accumulator.itemsize // step_bytes)
    max_splits = max(1, min(steps // min_steps, _MAX_WAVES * num_blocks // tiles, _MAX_SPLITS))
    busy = {}
    for splits in range(1, max_splits + 1):
        if splits == 1 or -(-steps // splits) < -(-steps // (splits - 1)):  # otherwise the longest block is not shorter
            busy[splits] = tiles * splits / num_blocks / -(-tiles * splits // num_blocks)
    return min(splits for splits, share in busy.items() if share >= _GOOD_SHARE * max(busy.values()))


def max_steps(problem: Problem, work: WorkList, forward: KernelSpec) -> int:
    """Return the steps of the longest tile of queries, or an upper bound if their number is known only on a device."""
    if isinstance(work, ListedWork):
        return work.max_entries_in_row * -(-work.block_kv // forward.block_kv)
    keys = problem.seqlen_kv
    if work.band is not None and work.band.lower is not None and work.band.upper is not None:
        keys = min(keys, work.band.upper - work.band.lower + min(forward.block_q, problem.seqlen_q))
    return -(-keys // forward.block_kv)
