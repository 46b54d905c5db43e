"""Decides whether the thread blocks of the sm90 family's backward kernel finish dQ, and in which order under a band.

The device's side is kernels_cu/attention/dq_turns.cuh, and for lists the end of query_ring.cuh.
"""

from __future__ import annotations

from ...blocks.work_list import ListedWork
from ...masks.base import Band
from ..device import DeviceSpec
from ..launches import DqTurns
from ..problem import Problem
from ..spec import KernelSpec

_MOST_STORING = 31  # tiles of keys of a batch entry and head that have a bit
_MOST_VISITS = 1 << 15  # by tiles of keys, of a tile of queries: what a half of their count holds
_VISITS_THAT_PAY = 8  # fewer, on average
_LAG = 2  # rounds of all blocks between a place's last tiles and its first one, of tiles of unlike lengths


def dq_turns(problem: Problem, band: Band | None, backward: KernelSpec, device: DeviceSpec) -> DqTurns | None:
    """The order for a band, or None where blocks cannot finish dQ, or had better not.

    They can where the first tile of keys sees every query, and every tile some, as under a causal mask or none; where
    dQ is written as it is made, in whole packets; and where those who store have a bit each.
    """
    lower, upper = (None, None) if band is None else (band.lower, band.upper)
    if band is None or not _writes_whole_dq(problem, backward):
        return None
    num_tiles = -(-problem.seqlen_kv // backward.block_kv)
    reaches_first_keys = lower is None or lower <= 1 - problem.seqlen_q
    hides = upper is not None and upper < problem.seqlen_kv - 1
    if num_tiles < 2 or not reaches_first_keys:
        return None
    if not _pays(problem.seqlen_kv, max(problem.head_dim, problem.value_dim), hides):
        return None
    if hides:
        assert upper is not None
        first_stored = (min(backward.block_q, problem.seqlen_q) - 1 + upper) // backward.block_kv
        has_all = upper >= 0 and (num_tiles - 1) * backward.block_kv < problem.seqlen_q + upper
        if not has_all or num_tiles - max(first_stored, 1) > _MOST_STORING:
            return None
    blocks = device.num_processors * backward.min_blocks
    places = max(1, blocks // num_tiles // 2)
    rounds = _LAG * blocks / (places * num_tiles)
    idle = max(0, blocks - places)
    if hides:
        return DqTurns(places, 0, max(1, round(rounds)), -(-2 * idle // (num_tiles + 1)))
    return DqTurns(places, max(1, round(rounds / 2)), max(1, round(rounds * 3 / 4)), -(-idle // num_tiles))


def last_finishes(problem: Problem, work: ListedWork, backward: KernelSpec) -> bool:
    """Whether, of a list, the last tile of keys to come to queries had better finish their dQ.

    It brings what others made once more, and others have to tell it: that pays where few come, as measured:
    experiments/results/sm90_steps.log, 28 and 29.
    """
    tiles_in_block = -(-work.block_kv // backward.block_kv)
    if not _writes_whole_dq(problem, backward) or work.index.num_kv_blocks * tiles_in_block >= _MOST_VISITS:
        return False
    rows = work.index.batch * work.index.num_heads * work.index.num_q_blocks
    return len(work.index.indices) * tiles_in_block < _VISITS_THAT_PAY * rows


def _writes_whole_dq(problem: Problem, backward: KernelSpec) -> bool:
    """Whether blocks that add to dQ can write it: in whole packets, as it is returned."""
    adds = backward.name == "sm90_backward" and backward.dq_adds > 0
    is_returned = problem.gradient_shapes()["q"] == problem.argument_shapes()["q"]
    return adds and is_returned and problem.head_dim == backward.head_dim


def _pays(seqlen_kv: int, width: int, hides: bool) -> bool:
    """Whether it is faster than two kernels beside the gradients', as measured: experiments/results/sm90_steps.log, 27.

    The more keys a query sees, the less of the time those take. Where all tiles are alike, blocks end together unless
    some take longer, as those that finish dQ do: beyond 64 columns 512 keys and 2048 lost more by it than they gained.
    """
    if hides or width <= 64:
        return seqlen_kv <= 2048
    return seqlen_kv <= 256 or 1024 <= seqlen_kv < 2048
