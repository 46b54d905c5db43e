"""The decision whether thread blocks of the sm90 family's backward kernel finish dQ, and in which order.

Under a band in which all queries attend to the first keys, thread blocks finish dQ in the order of their key tiles
(kernels_cu/sm90/dq_semaphore.cuh). Otherwise, the last key tile that adds to dQ of a query tile may finish it
(kernels_cu/sm90/dq_arrivals.cuh).
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

_MAX_STORING_TILES = 31  # maximum number of key tiles of a (batch, head), each with its own bit
_MAX_ARRIVALS = 1 << 15  # maximum key tiles that visit a query tile: they are counted in half of the counter's bits
_MOST_FINISHED_TILES = 16  # maximum of the mean number of key tiles that visit a query tile
_LEAD_IN_WAVES = 2  # waves of blocks between the last and the first key tile of a head, as tiles differ in length


def dq_semaphore_order(
    problem: Problem, band: Band | None, backward: KernelSpec, device: DeviceSpec
) -> DqSemaphoreOrder | None:
    """Return the order for a band, or None if blocks cannot finish dQ or if that is slower.

    Blocks can finish dQ on three conditions. Every query attends to the first key tile, and every key tile has a query
    that attends to it, as with a causal mask or none. dQ is written in whole packets and in its final dtype. And each
    tile that stores sums has its own bit.
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
    # While the first key tiles of the last group are computed, these blocks have no tile of a group. Unfused heads keep
    # them busy: their tiles take as long as a first tile, or on average half as long under a causal mask.
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
    """True if the last key tile that adds to dQ of a query tile should also finish this dQ.

    This saves the kernels that clear and round the sums, but the sums are loaded once more, and tiles wait for each
    other. It speeds up these published benchmarks by more than 2 % (milliseconds with it, and without): block lists of
    density 0.031, with 4 tiles on average, 0.468 and 0.488; packed sequences of 2048 keys, 1.597 and 1.701, of 64 to
    4096 keys, 2.115 and 2.223; a window of 1024 keys, 0.456 and 0.470. Lists of 8 and 16 tiles take the same time; with
    it, a list of 32 tiles takes 5 % longer, and a causal band of 8192 keys 12 % (steps 28
    and 29 of sm90_steps.log and step 5 of packed_steps.log, at commit b648872e).
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
    """Return the mean number of keys per sequence, or the number of keys in a window; infinity if unknown."""
    if work.band is not None and work.band.lower is not None and work.band.upper is not None:
        return work.band.upper - work.band.lower + 1
    return inf if work.mean_length is None else work.mean_length


def finished_by_last(specs: Mapping[str, KernelSpec]) -> dict[str, KernelSpec]:
    """Return the kernels without "convert_dq", since the last key tile that adds to dQ finishes it."""
    finished = of_backward(specs, lambda spec: replace(spec, last_finishes_dq=True))
    del finished["convert_dq"]
    return finished


def of_backward(
    specs: Mapping[str, KernelSpec], change: Callable[[KernelSpec], KernelSpec]
) -> dict[str, KernelSpec]:
    """Return the kernels of both passes, with `change` applied to those of the backward pass."""
    return {role: spec if role == "forward" else change(spec) for role, spec in specs.items()}


def adding_in_order(specs: Mapping[str, KernelSpec]) -> dict[str, KernelSpec]:
    """Return the backward kernels in which key tiles add to dQ in a fixed order, for bitwise reproducible results."""
    return {entry: replace(spec, adds_dq_in_order=True) for entry, spec in specs.items()}


def _can_write_dq(problem: Problem, backward: KernelSpec) -> bool:
    """True if blocks that add to dQ can write the final array: in whole packets, without sums over broadcast axes."""
    adds_to_dq = backward.entry.can_finish_dq and backward.dq_atomic_width > 0
    is_returned = problem.gradient_shapes()["q"] == problem.argument_shapes()["q"]
    return adds_to_dq and is_returned and problem.head_dim == backward.head_dim


def _is_faster(seqlen_kv: int, width: int, is_masked: bool) -> bool:
    """True if finishing dQ in order is faster than two more kernels (step 27 of sm90_steps.log at commit b648872e).

    The more keys a query attends to, the less of the time these kernels take. Without a mask, all blocks would end
    together, but blocks that finish dQ take longer: above head_dim 64, calls with 512 and 2048 keys became slower.
    """
    if is_masked or width <= 64:
        return seqlen_kv <= 2048
    return seqlen_kv <= 256 or 1024 <= seqlen_kv < 2048
