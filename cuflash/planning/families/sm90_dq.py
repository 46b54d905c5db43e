"""Decides whether the thread blocks of the sm90 family's backward kernel finish dQ, and in which order under a band.

Under a band whose first keys see all queries, they finish it in the order of their tiles of keys: the device's side is
kernels_cu/sm90/dq_semaphore.cuh. Elsewhere the last tile to arrive does: kernels_cu/sm90/dq_arrivals.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from ...blocks.work_list import IntervalWork, ListedWork, WorkList
from ...masks.base import Band
from ..device import DeviceSpec
from ..launches import DqSemaphoreOrder
from ..problem import Problem
from ..spec import KernelSpec

_MAX_STORING_TILES = 31  # tiles of keys of a batch entry and head that have a bit
_MAX_ARRIVALS = 1 << 15  # of tiles of keys at a tile of queries: half of the counter's bits hold them
_MOST_FINISHED_TILES = 16  # of keys that visit a tile of queries, on average
_LEAD_IN_WAVES = 2  # rounds of all blocks between a place's last tiles and its first one, of tiles of unlike lengths


def dq_semaphore_order(
    problem: Problem, band: Band | None, backward: KernelSpec, device: DeviceSpec
) -> DqSemaphoreOrder | None:
    """Return the order for a band, or None if blocks cannot finish dQ, or if it is slower.

    Blocks can finish dQ if every query sees the first tile of keys, and every tile of keys some query, as under a
    causal mask or none; if dQ is written in whole packets and in its final dtype; and if each tile that stores sums has
    a bit of its own.
    """
    lower, upper = (None, None) if band is None else (band.lower, band.upper)
    if band is None or not _can_write_dq(problem, backward):
        return None
    num_tiles = -(-problem.seqlen_kv // backward.block_kv)
    first_tile_sees_all = lower is None or lower <= 1 - problem.seqlen_q
    is_masked = upper is not None and upper < problem.seqlen_kv - 1
    if num_tiles < 2 or not first_tile_sees_all:
        return None
    if not _is_faster(problem.seqlen_kv, max(problem.head_dim, problem.value_dim), is_masked):
        return None
    if is_masked:
        assert upper is not None
        first_stored = (min(backward.block_q, problem.seqlen_q) - 1 + upper) // backward.block_kv
        has_all = upper >= 0 and (num_tiles - 1) * backward.block_kv < problem.seqlen_q + upper
        if not has_all or num_tiles - max(first_stored, 1) > _MAX_STORING_TILES:
            return None
    blocks = device.num_processors * backward.min_blocks
    heads_per_group = max(1, blocks // num_tiles // 2)
    lead = _LEAD_IN_WAVES * blocks / (heads_per_group * num_tiles)
    # These blocks have no tile of a group while the first tiles of keys of the last group are computed. Unfused heads
    # keep them busy: a tile of these takes as long as a first one, or half as long in the mean under a causal mask.
    idle_blocks = max(0, blocks - heads_per_group)
    if is_masked:
        return DqSemaphoreOrder(
            heads_per_group,
            last_tile_lead=0,
            first_tile_lag=max(1, round(lead)),
            min_unfused_heads=-(-2 * idle_blocks // (num_tiles + 1)),
        )
    return DqSemaphoreOrder(
        heads_per_group,
        last_tile_lead=max(1, round(lead / 2)),
        first_tile_lag=max(1, round(lead * 3 / 4)),
        min_unfused_heads=-(-idle_blocks // num_tiles),
    )


def last_finishes(problem: Problem, work: WorkList, backward: KernelSpec) -> bool:
    """Return True if the last tile of keys that arrives at a tile of queries finishes its dQ.

    No kernel then sets sums to 0 before and none rounds them afterwards, but the sums are loaded once more, and tiles
    wait for each other. Published rows that lose more than 2 % without it, in milliseconds with it and without: lists
    of density 0.031, which have 4 tiles on average, 0.468 and 0.488; packed sequences of 2048 keys, 1.597 and 1.701, of
    64 to 4096 keys, 2.115 and 2.223; a window of 1024 keys, 0.456 and 0.470. Lists of 8 and 16 tiles take as long
    either way; one of 32 takes 5 % more, and a causal band of 8192 keys 12 % more (sm90_steps.log of b648872e, 28 and
    29; packed_steps.log of b648872e, 5).
    """
    if not _can_write_dq(problem, backward):
        return False
    if isinstance(work, ListedWork):
        tiles_in_block = -(-work.block_kv // backward.block_kv)
        rows = work.index.batch * work.index.num_heads * work.index.num_q_blocks
        most, mean = work.index.num_kv_blocks * tiles_in_block, len(work.index.indices) * tiles_in_block / max(1, rows)
    else:
        most, mean = -(-problem.seqlen_kv // backward.block_kv), _mean_keys(work) / backward.block_kv
    return most < _MAX_ARRIVALS and mean <= _MOST_FINISHED_TILES


def _mean_keys(work: IntervalWork) -> float:
    """The keys of a sequence on average, or of a window; infinite if they are not known."""
    if work.band is not None and work.band.lower is not None and work.band.upper is not None:
        return work.band.upper - work.band.lower + 1
    return inf if work.mean_length is None else work.mean_length


def finished_by_last(specs: Mapping[str, KernelSpec]) -> dict[str, KernelSpec]:
    """Return the kernels without the one that converts dQ: the last tile of keys that arrives finishes it."""
    finished = of_backward(specs, lambda spec: replace(spec, last_finishes_dq=True))
    del finished["convert_dq"]
    return finished


def of_backward(
    specs: Mapping[str, KernelSpec], change: Callable[[KernelSpec], KernelSpec]
) -> dict[str, KernelSpec]:
    """Return the kernels of both passes, those of the backward pass with a change."""
    return {role: spec if role == "forward" else change(spec) for role, spec in specs.items()}


def adding_in_order(specs: Mapping[str, KernelSpec]) -> dict[str, KernelSpec]:
    """The kernels of the backward pass where tiles of keys add to dQ in their order, so that every result repeats."""
    return {entry: replace(spec, adds_dq_in_order=True) for entry, spec in specs.items()}


def _can_write_dq(problem: Problem, backward: KernelSpec) -> bool:
    """Return whether blocks that add to dQ can write it: in whole packets, as it is returned."""
    adds_to_dq = backward.entry.can_finish_dq and backward.dq_atomic_width > 0
    is_returned = problem.gradient_shapes()["q"] == problem.argument_shapes()["q"]
    return adds_to_dq and is_returned and problem.head_dim == backward.head_dim


def _is_faster(seqlen_kv: int, width: int, is_masked: bool) -> bool:
    """Return whether writing dQ so was measured faster than two more kernels (sm90_steps.log of b648872e, 27).

    The more keys a query sees, the less of the time those take. Where all tiles are alike, blocks end together unless
    some take longer, as those that finish dQ do: beyond 64 columns 512 keys and 2048 lost more by it than they gained.
    """
    if is_masked or width <= 64:
        return seqlen_kv <= 2048
    return seqlen_kv <= 256 or 1024 <= seqlen_kv < 2048
