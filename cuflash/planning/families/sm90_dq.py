"""Decides whether the thread blocks of the sm90 family's backward kernel finish dQ, and in which order under a band.

The device's side is kernels_cu/sm90/dq_semaphore.cuh, and for lists kernels_cu/sm90/dq_writer.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum

from ...blocks.work_list import IntervalWork, ListedWork
from ...masks.base import Band
from ..device import DeviceSpec
from ..launches import DqSemaphoreOrder
from ..problem import Problem
from ..spec import KernelSpec

_MAX_STORING_TILES = 31  # tiles of keys of a batch entry and head that have a bit
_MAX_ARRIVALS = 1 << 15  # of tiles of keys at a tile of queries: half of the counter's bits hold them
_MAX_FUSED_ARRIVALS = 8  # fewer, on average
_MOST_FINISHED_TILES = 16  # of keys, in a window or in a sequence of mean length, without a list
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


def fuses_dq_epilogue_of_list(problem: Problem, work: ListedWork, backward: KernelSpec) -> bool:
    """Return whether it pays that the last tile of keys that a list pairs with some queries finishes their dQ.

    That tile loads the sum of the others once more, and the others signal that they have added to it. It pays where
    few tiles add to one dQ: at 4 tiles the backward pass takes 0.468 ms instead of 0.488, at 8 as long as before
    (sm90_steps.log of b648872e, 29).
    """
    tiles_in_block = -(-work.block_kv // backward.block_kv)
    if not _can_write_dq(problem, backward) or work.index.num_kv_blocks * tiles_in_block >= _MAX_ARRIVALS:
        return False
    rows = work.index.batch * work.index.num_heads * work.index.num_q_blocks
    return len(work.index.indices) * tiles_in_block < _MAX_FUSED_ARRIVALS * rows


def with_counted_arrivals(problem: Problem, work: IntervalWork, specs: dict[str, KernelSpec]) -> dict[str, KernelSpec]:
    """Return the kernels of work without a list; those of the backward pass may count tiles that arrive at queries.

    Then no kernel sets sums of dQ to 0. Where few tiles of keys arrive, the last one finishes dQ, as with a list.
    """
    use = use_of_arrivals(problem, work, specs["backward"])
    if use is ArrivalUse.NONE:
        return specs
    counting = of_backward(specs, lambda spec: replace(spec, counts_dq_arrivals=True))
    return with_fused_epilogue(counting) if use is ArrivalUse.FINISH else counting


def with_fused_epilogue(specs: Mapping[str, KernelSpec]) -> dict[str, KernelSpec]:
    """Return the kernels without the one that converts dQ: thread blocks that add to dQ finish all of it."""
    fused = of_backward(specs, lambda spec: replace(spec, fuses_dq_epilogue=True))
    del fused["convert_dq"]
    return fused


def of_backward(
    specs: Mapping[str, KernelSpec], change: Callable[[KernelSpec], KernelSpec]
) -> dict[str, KernelSpec]:
    """Return the kernels of both passes, those of the backward pass with a change."""
    return {role: spec if role == "forward" else change(spec) for role, spec in specs.items()}


def adding_in_order(specs: Mapping[str, KernelSpec]) -> dict[str, KernelSpec]:
    """The kernels of the backward pass where tiles of keys add to dQ in their order, so that every result repeats."""
    return {entry: replace(spec, counts_dq_arrivals=True, adds_dq_in_order=True) for entry, spec in specs.items()}


class ArrivalUse(Enum):
    """The use of a counter of the tiles of keys that have arrived at a tile of queries."""

    NONE = "nothing"
    STORE = "the first stores its part of dQ"
    FINISH = "the first stores, and the last finishes dQ"


def use_of_arrivals(problem: Problem, work: IntervalWork, backward: KernelSpec) -> ArrivalUse:
    """Return how kernels of row intervals, or of a band, use the count of arrivals."""
    if not backward.entry.can_finish_dq or not backward.dq_atomic_width:
        return ArrivalUse.NONE
    if problem.mask_shape.seqlen_kv >= _MAX_ARRIVALS * backward.block_kv:
        return ArrivalUse.NONE
    use = best_use_of_arrivals(work, backward)
    return ArrivalUse.STORE if use is ArrivalUse.FINISH and not _can_write_dq(problem, backward) else use


def best_use_of_arrivals(work: IntervalWork, backward: KernelSpec) -> ArrivalUse:
    """Return the use of the count that is fastest by measurement, where kernels can have it.

    Where nothing bounds the keys of a band, neither use was faster; for row intervals the first use was never slower
    (packed_steps.log of b648872e, 5).
    """
    keys = work.mean_length
    if work.band is not None and work.band.lower is not None and work.band.upper is not None:
        keys = work.band.upper - work.band.lower + 1
    if keys is not None and keys <= _MOST_FINISHED_TILES * backward.block_kv:
        return ArrivalUse.FINISH
    return ArrivalUse.NONE if work.band is not None else ArrivalUse.STORE


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
