"""Chooses how many thread blocks share the keys of one tile of queries (split-KV)."""

from __future__ import annotations

from ..blocks.work_list import ListedWork, WorkList
from .problem import Problem
from .spec import KernelSpec

# No split where tiles fill this share of what a GPU holds at once; the fewest splits that reach this share of the best.
_FULL_SHARE, _GOOD_SHARE = 0.8, 0.85
_MIN_STEPS, _MAX_WAVES, _MAX_SPLITS = 4, 4, 128


def num_splits(problem: Problem, work: WorkList, forward: KernelSpec, tiles: int, num_blocks: int) -> int:
    """Thread blocks that share a tile's keys: the fewest that keep the GPU almost as busy as can be.

    FlashAttention's rule counts how much of its last wave of blocks fills the GPU. A block computes one step at least,
    and loads no less than writing and reading its partial result takes. For example, 48 tiles on 264 block slots fill
    0.18 of the GPU; 5 splits make 240 blocks, which fill 0.91 of one wave.

    Parameters
    ----------
    forward : KernelSpec
    tiles : int
        Tiles of queries over all batch entries and heads.
    num_blocks : int
        Thread blocks that the GPU holds at once.
    """
    steps = _max_steps(problem, work, forward)
    if tiles >= _FULL_SHARE * num_blocks or steps < _MIN_STEPS:
        return 1
    rows = min(forward.block_q, problem.seqlen_q * (problem.group_size if forward.pack_gqa else 1))
    step_bytes = forward.block_kv * (forward.head_dim + forward.value_dim) * problem.dtype.itemsize
    min_steps = -(-2 * rows * forward.value_dim * problem.accumulator.itemsize // step_bytes)
    max_splits = max(1, min(steps // min_steps, _MAX_WAVES * num_blocks // tiles, _MAX_SPLITS))
    busy = {}
    for splits in range(1, max_splits + 1):
        if splits == 1 or -(-steps // splits) < -(-steps // (splits - 1)):  # else no block has fewer steps
            busy[splits] = tiles * splits / num_blocks / -(-tiles * splits // num_blocks)
    return min(splits for splits, share in busy.items() if share >= _GOOD_SHARE * max(busy.values()))


def _max_steps(problem: Problem, work: WorkList, forward: KernelSpec) -> int:
    """Steps of the longest tile of queries, or a bound on them that does not wait for a device."""
    if isinstance(work, ListedWork):
        return work.max_entries_in_row * -(-work.block_kv // forward.block_kv)
    keys = problem.seqlen_kv
    if work.band is not None and work.band.lower is not None and work.band.upper is not None:
        keys = min(keys, work.band.upper - work.band.lower + min(forward.block_q, problem.seqlen_q))
    return -(-keys // forward.block_kv)
