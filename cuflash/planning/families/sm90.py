"""The sm90 family: FlashAttention-3 on Hopper, with TMA copies and wgmma.

A consumer warpgroup computes 64 queries of a tile, or 64 keys in the backward pass. A producer warpgroup loads the
operands. Thread blocks are persistent.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from ...arrays import HALVES
from ...blocks.work_list import IntervalWork, ListedWork, WorkList
from ...scores.products import can_take_products
from ...scores.program import Program, curvature, depends
from ..device import DeviceSpec
from ..launches import Kernels, TileOrder
from ..problem import Problem
from ..score_bins import num_bins
from ..spec import SM90, Entry, KernelSpec
from ..staged_array import can_stage, can_store_gradient, staged_load
from ..tangent_launches import tangents_of_kernels
from ..tile_order import forward_order, heads_per_wave
from ..chosen_lists import UnionWork
from . import sm90_dq, sm90_storage
from ._passes import backward_pass, forward_pass
from ._unions import union_kernels
from .family import Family, Request, first_fitting, resident_blocks
from .sm80 import Sm80, power_of_two
from .sm90_storage import BACKWARD, BACKWARD_STATISTICS, FORWARD, ROWS

LIST_BLOCK = (128, 128)  # queries and keys of a block in lists for these kernels
_SEQUENCE_TILE = (64, 128)  # queries and keys of sequence-aligned backward tiles
_STAGES, _NARROW_STAGES = 2, 4  # powers of two, as rings require; the second is for head_dim up to 64
_MMA_COLUMNS = 16  # minimum block_kv of listed tiles
_STATISTICS_WARPS = 4  # the fastest number in step 28 of sm90_steps.log at commit b648872e
_BACKWARD_KEYS, _BACKWARD_STAGES, _WIDE_STAGES = 128, 3, 2


class _Tile(NamedTuple):
    block_q: int
    block_kv: int


# Tiles by the larger of head_dim and value_dim. With two consumer warpgroups, registers hold O and as many scores as
# possible. Three warpgroups have fewer registers each, and are faster if queries attend to enough keys that the cost
# of starting a tile matters less. Four have short steps, and are faster if queries attend to fewer keys and there are
# MIN_TILES_PER_PROCESSOR tiles per multiprocessor; with fewer tiles, the last ones would end late. Kernels that walk
# lists have too few registers for three or four consumer warpgroups.
_FORWARD = {64: _Tile(128, 128), 128: _Tile(128, 128), 192: _Tile(128, 96), 256: _Tile(128, 80)}
_FORWARD_3_CONSUMERS = {64: (512, _Tile(192, 128)), 128: (4096, _Tile(192, 80))}
_FORWARD_4_CONSUMERS = {64: (1536, _Tile(256, 64))}
MIN_TILES_PER_PROCESSOR = 2
# Limits for packed sequences, from steps 13 and 14 of packed_steps.log at commit b648872e. The dimensions in the last
# two are the larger of head_dim and value_dim.
LONG_SEQUENCE = 768  # minimum mean keys per sequence for which tiles are taken in order, longest first
SHORT_SEQUENCES = {64: 512, 128: 256}  # maximum mean keys per sequence for which tiles are small
CUT_WIDTHS = frozenset({128})  # dimensions for which forward tiles are aligned to long sequences
_STAGED_KEYS = 128  # keys of a step if elements of a captured array are staged
# Listed kernels with one consumer warpgroup, by the larger dimension: thread blocks per multiprocessor, and stages.
_LISTED_SMALL = {64: (3, _STAGES), 128: (2, _STAGES + 1)}


# Keys of a step of the kernels for tangents, and for tangents of gradients, by the larger dimension.
_JVP_KEYS, _BACKWARD_JVP_KEYS = {64: 112, 128: 80}, {64: 80, 128: 64}

_MOST_GATHERED = 8  # queries of a step of gathered queries, as kMaxGathered of sm90/q_storage.cuh
_SAMPLED_QUERIES = 256  # number of queries sampled for the mean number of attended keys


class Sm90(Family):
    """Kernels for compute capability 9.0 only.

    If their backward tiles do not fit, sm80's backward kernels are used. With a score function or dropout, this is also
    the case above head_dim 128, and for block lists whose dQ needs a separate kernel.
    """

    name = SM90
    dtypes = HALVES
    rounds_weights = True
    operands = ("sink", "dropout_seed")
    oldest = (9, 0)
    waits_at_barriers = True
    takes_orders = True

    def _device_reasons(self, problem: Problem, device: DeviceSpec) -> list[str]:
        if device.compute_capability in (None, self.oldest):
            return []
        return [f"kernel='sm90' needs compute capability 9.0; got {device.name}: use kernel='auto'"]

    def _capability_reasons(self, capability: tuple[int, int]) -> list[str]:
        if capability == self.oldest:
            return []
        major, minor = capability
        return [f"kernel='sm90' needs compute capability 9.0; got {major}.{minor}: use kernel='auto'"]

    def architecture(self, capability: tuple[int, int]) -> str:
        return super().architecture(capability) + "a"

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        return LIST_BLOCK

    def tangent_reasons(self, problem: Problem) -> list[str]:
        return []

    def jvp_spec(self, request: Request) -> KernelSpec:
        """Return the kernel; sm80's for wide rows, score functions, dropout and small blocks of a list."""
        tile = _tangent_tile(request, _JVP_KEYS)
        if tile is None:
            return _SM80.jvp_spec(request)
        return _tangent_spec(sm90_storage.JVP, request, tile)

    def backward_jvp_specs(self, request: Request) -> tuple[KernelSpec, KernelSpec]:
        """Return the kernels; sm80's for the calls that `jvp_spec` also leaves to sm80."""
        tile, largest = _tangent_tile(request, _BACKWARD_JVP_KEYS), request.largest
        if tile is None:
            return _SM80.backward_jvp_specs(request)
        rows = _tangent_spec(sm90_storage.BACKWARD_JVP_ROWS, request, tile)
        if rows.shared_bytes > request.device.tile_memory_bytes:  # with the tangent of dO
            rows = replace(rows, num_stages=1)
        has_long_tiles = request.problem.seqlen_kv > ROWS and (largest is None or largest[1] % (2 * ROWS) == 0)
        block_kv = 2 * ROWS if has_long_tiles else ROWS
        columns = replace(
            rows, entry=sm90_storage.BACKWARD_JVP_COLUMNS, num_warps=4 * (1 + block_kv // ROWS), block_kv=block_kv,
            block_q=ROWS if max(rows.head_dim, rows.value_dim) <= 64 else ROWS // 2, num_stages=_STAGES,
        )  # fmt: skip
        # Loading a step includes reading its statistics, which takes nearly as long as multiplying one.
        deeper = [replace(columns, num_stages=stages) for stages in (4, 3)]
        return rows, first_fitting(deeper, request.device) or columns

    def with_sequence_tiles(self, work: WorkList) -> WorkList:
        if not isinstance(work, IntervalWork) or not work.is_ordered:
            return work
        keys = _keys_of_sequence(work)
        return work if keys is None or keys < LONG_SEQUENCE else work.with_sequence_tiles(_SEQUENCE_TILE)

    def specs(self, request: Request, num_keys: float | None = None) -> dict[str, KernelSpec]:
        """Return the kernels by entry; `num_keys` is the mean number of keys per query, or None if it may be small."""
        problem, dims, largest, deterministic = request.problem, request.dims, request.largest, request.deterministic
        forward = forward_spec(request, num_keys or 0)
        changes_weights = problem.score is not None or problem.dropout is not None
        if deterministic and changes_weights and largest is None and max(dims) <= 128:
            backward = sm90_dq.adding_in_order(backward_specs(problem.dtype, dims, None, deterministic=False))
        else:
            backward = backward_specs(problem.dtype, dims, largest, deterministic=deterministic)
        if not backward or (changes_weights and not _takes_changed_weights(backward["backward"])):
            backward = _SM80.specs(request)
        elif can_stage(problem) and backward["backward"].block_q == ROWS:
            backward["backward"] = replace(
                backward["backward"], num_stages=_STAGES, score_is_staged=True,
                score_is_stored=can_store_gradient(problem, in_parts=deterministic),
            )  # fmt: skip
        elif num_bins(problem) and not deterministic:
            backward["backward"] = _with_bins(backward["backward"], num_bins(problem), request.device)
        return {"forward": forward} | backward | {"forward": forward}

    def launches(self, request: Request, work: WorkList) -> Kernels:
        if isinstance(work, UnionWork):
            return union_kernels(self, request, work)
        problem = request.problem
        chosen = _ordered(problem, self.specs(request, _mean_visible_keys(work, problem)), work)
        forward, backward = chosen["forward"], chosen["backward"]
        order = self._order(request, work, forward, backward)
        chosen, order = self._with_fused_dq(request, work, chosen, order)
        chosen = _with_cut_sequences(problem, work, chosen)
        return Kernels(
            forward=forward_pass(request, work, forward),
            backward=backward_pass(request, work, chosen, order.dq), order=order,
            is_repeatable="backward_rows" in chosen or backward.adds_dq_in_order,
        )  # fmt: skip

    def union_specs(self, request: Request, block: int, heads: int) -> dict[str, KernelSpec]:
        problem, widest = request.problem, max(request.dims)
        if problem.score is not None or widest > max(_LISTED_SMALL):
            return {}
        width = next(width for width in _LISTED_SMALL if width >= widest)
        blocks, stages = _LISTED_SMALL[width]
        forward = KernelSpec(
            entry=FORWARD, dtype=problem.dtype, head_dim=width, value_dim=width, block_q=ROWS,
            block_kv=min(block, ROWS), num_warps=8, min_blocks=blocks, is_listed=True, num_stages=stages,
            packs_queries=True,
        )  # fmt: skip
        stages = _NARROW_STAGES if width <= 64 else _STAGES
        rows = replace(forward, entry=sm90_storage.BACKWARD_ROWS, min_blocks=2, num_stages=stages)
        specs = _SM80.union_specs(request, block, heads) | {"forward": forward}
        # on a GPU, the backward kernels are tested only for whole groups
        if heads != problem.group_size or "backward_rows" not in specs:
            return specs
        specs["backward_rows"] = rows
        if ROWS // heads > _MOST_GATHERED or block % ROWS:
            return specs
        return specs | {"backward": replace(rows, entry=BACKWARD)}

    def _with_fused_dq(
        self, request: Request, work: WorkList, specs: dict[str, KernelSpec], order: TileOrder
    ) -> tuple[dict[str, KernelSpec], TileOrder]:
        """Decide whether blocks that add to dQ also finish it, and return the changed kernels and order of tiles."""
        problem, backward = request.problem, specs["backward"]
        num_heads = problem.mask_shape.num_batch * problem.num_kv_heads
        if backward.adds_dq_in_order or 0 in (num_heads, problem.seqlen_q, problem.seqlen_kv):
            return specs, order
        if isinstance(work, IntervalWork):
            dq_order = sm90_dq.dq_semaphore_order(problem, work.band, backward, request.device)
            if dq_order is not None and dq_order.num_fused_heads(num_heads):
                order = order._replace(kv_heads_per_group=dq_order.heads_per_group, dq=dq_order)
                return specs | {"backward": replace(backward, finishes_dq_in_order=True)}, order
        return sm90_dq.finished_by_last(specs) if sm90_dq.last_finishes(problem, work, backward) else specs, order

    def _order(self, request: Request, work: WorkList, forward: KernelSpec, backward: KernelSpec) -> TileOrder:
        """Return between how many heads tiles alternate.

        With a block list, these heads fit in the cache together. Under a band, their number balances the thread blocks.
        """
        problem, device, tile = request.problem, request.device, (forward.block_q, forward.block_kv)
        order = forward_order(problem, device, work, tile, resident_blocks(forward, device))
        if isinstance(work, ListedWork):
            return order
        kv_heads = heads_per_wave(work, resident_blocks(backward, device), -(-problem.seqlen_kv // backward.block_kv))
        return order._replace(kv_heads_per_group=kv_heads)

    def mass_spec(self, request: Request, block_kv: int) -> KernelSpec | None:
        """Return the sm80 family's kernel with a producer warp that copies.

        Two thread blocks share a multiprocessor, unless rows are loaded in chunks.
        """
        spec = _SM80.mass_spec(request, block_kv)
        if spec is None or request.device.compute_capability != self.oldest:
            return None
        stages, blocks = (6, 1) if spec.splits_head_dim else (2, 2)
        spec = replace(spec, entry=sm90_storage.BLOCK_MASS, num_warps=9, min_blocks=blocks, num_stages=stages)
        return first_fitting([spec], request.device)


_SM80 = Sm80()


def _tangent_tile(request: Request, keys_of_step: dict[int, int]) -> _Tile | None:
    """Return the tile of a kernel that differentiates along tangents; None if other kernels serve the problem."""
    problem, widest, (rows, keys) = request.problem, max(request.dims), request.largest or (2 * ROWS, ROWS)
    changes_weights = problem.score is not None or problem.dropout is not None
    if changes_weights or widest > max(keys_of_step) or rows % ROWS or keys % ROWS:
        return None
    block_q = 2 * ROWS if rows % (2 * ROWS) == 0 and problem.seqlen_q > ROWS else ROWS
    width = next(width for width in keys_of_step if width >= widest)
    return _Tile(block_q, keys_of_step[width] if request.largest is None else ROWS)


def _tangent_spec(entry: Entry, request: Request, tile: _Tile) -> KernelSpec:
    head_dim, value_dim = request.dims
    return KernelSpec(
        entry=entry, dtype=request.problem.dtype, head_dim=head_dim, value_dim=value_dim, block_q=tile.block_q,
        block_kv=tile.block_kv, num_warps=4 * (1 + tile.block_q // ROWS), min_blocks=1,
        is_listed=request.largest is not None, num_stages=_STAGES, tangents=tangents_of_kernels(request.problem),
    )  # fmt: skip


def _with_bins(backward: KernelSpec, bins: int, device: DeviceSpec) -> KernelSpec:
    """Return the kernel with bins for a table's gradient if they fit, if necessary with fewer stages."""
    binned = [replace(backward, num_stages=stages, score_bins=bins) for stages in (backward.num_stages, _STAGES)]
    return first_fitting(binned, device) or backward


def _takes_changed_weights(backward: KernelSpec) -> bool:
    """True if the kernel supports score functions and dropout: head_dim is at most 128, and it also computes dQ."""
    return backward.entry.applies_score and backward.dq_atomic_width > 0


def _ordered(problem: Problem, specs: dict[str, KernelSpec], work: WorkList) -> dict[str, KernelSpec]:
    """Return the kernels; with ordered row intervals, those whose tiles divide the ordered blocks use the order."""
    if not isinstance(work, IntervalWork) or not work.is_ordered:
        return specs
    divides = {
        role: (work.block_kv % spec.block_kv if spec.entry.holds_keys else work.block_q % spec.block_q) == 0
        for role, spec in specs.items()
    }
    ordered = {
        role: replace(spec, is_ordered=divides[role] and spec.entry.takes_order and not spec.adds_dq_in_order)
        for role, spec in specs.items()
    }
    return ordered | {"forward": _forward_of_sequences(problem, ordered["forward"], _keys_of_sequence(work))}


def _with_cut_sequences(problem: Problem, work: WorkList, specs: dict[str, KernelSpec]) -> dict[str, KernelSpec]:
    """Return the kernels, with sequence-aligned backward tiles if the work has such tiles of the kernel's size.

    The backward kernel must also compute dQ, with additions in any order. Staged arrays and gradients of sinks need
    tiles that start at multiples of the tile size, and bins of a table leave too little shared memory.
    """
    backward = specs["backward"]
    if not isinstance(work, IntervalWork) or work.sequence_tile != (backward.block_q, backward.block_kv):
        return specs
    adds_in_any_order = backward.entry.can_finish_dq and backward.dq_atomic_width and not backward.adds_dq_in_order
    if not adds_in_any_order or backward.score_is_staged or backward.score_bins or "sink" in problem.wrt:
        return specs
    return sm90_dq.of_backward(specs, lambda spec: replace(spec, cuts_sequences=True))


def _forward_of_sequences(problem: Problem, forward: KernelSpec, keys: float | None) -> KernelSpec:
    """Return the forward kernel for packed sequences with `keys` keys on average; unchanged if that is None.

    Tiles of shorter sequences take nearly equal time, so that sorting them costs more than it saves. With small tiles,
    two thread blocks share a multiprocessor, and one computes while the other changes tiles.
    """
    if keys is None:
        return forward
    width = next(width for width in _FORWARD if width >= max(forward.head_dim, forward.value_dim))
    if keys >= LONG_SEQUENCE:
        return replace(forward, cuts_sequences=forward.is_ordered and width in CUT_WIDTHS)
    unordered = replace(forward, is_ordered=False)
    changes_weights = problem.score is not None or problem.dropout is not None
    return unordered if changes_weights or keys > SHORT_SEQUENCES.get(width, 0) else in_small_tiles(unordered)


def in_small_tiles(forward: KernelSpec) -> KernelSpec:
    """Return the forward kernel with tiles of 64 queries, so that two thread blocks share a multiprocessor."""
    return replace(forward, block_q=ROWS, block_kv=ROWS, num_warps=8, min_blocks=2, num_stages=_STAGES)


def _keys_of_sequence(work: IntervalWork) -> float | None:
    """Return the mean keys per sequence, or the window if shorter; None if that needs data from a device.

    On the host, a new sequence is assumed wherever the first key of a row advances by more than one.
    """
    if work.mean_length is not None or not isinstance(work.lo, np.ndarray):
        return work.mean_length
    assert work.hi is not None
    keys = work.seqlen_kv / (1 + (np.diff(work.lo, axis=-1) > 1).sum(axis=-1).max(initial=0))
    return float(min(keys, (work.hi - work.lo).max(initial=0)))


def _mean_visible_keys(work: WorkList, problem: Problem) -> float | None:
    """Return the mean number of keys that a query attends to, from a sample of queries; None for other work."""
    if not isinstance(work, IntervalWork) or work.band is None or not problem.seqlen_q:
        return None
    query = np.linspace(0, problem.seqlen_q - 1, min(problem.seqlen_q, _SAMPLED_QUERIES))
    lo = 0 if work.band.lower is None else np.maximum(query + work.band.lower, 0)
    hi = problem.seqlen_kv if work.band.upper is None else np.minimum(query + work.band.upper + 1, problem.seqlen_kv)
    return float(np.mean(np.maximum(hi - lo, 0)))


def forward_spec(request: Request, num_keys: float) -> KernelSpec:
    """Return the forward kernel for queries that attend to `num_keys` keys on average."""
    problem, dims, device, largest = request.problem, request.dims, request.device, request.largest
    width = next(width for width in _FORWARD if width >= max(dims))
    (block_q, block_kv), num_queries = _FORWARD[width], problem.seqlen_q
    # Large score functions need more registers than three or four consumer warpgroups have. With dropout, these are
    # slower than two with another warpgroup that draws the random bits: step 4 of dropout_steps.log at commit
    # b648872e.
    score = problem.score
    is_large = problem.dropout is not None or (score is not None and _is_large(score, can_stage(problem)))
    if largest is None and not is_large:
        min_keys, tile_3_consumers = _FORWARD_3_CONSUMERS.get(width, (inf, _FORWARD[width]))
        max_keys, tile_4_consumers = _FORWARD_4_CONSUMERS.get(width, (0, tile_3_consumers))
        num_tiles = problem.num_batch_heads * -(-num_queries // tile_4_consumers.block_q)
        if num_keys < max_keys and num_tiles >= MIN_TILES_PER_PROCESSOR * device.num_processors:
            block_q, block_kv = tile_4_consumers
        elif num_keys >= min_keys:
            block_q, block_kv = tile_3_consumers
    if num_queries <= block_q - ROWS:
        block_q = ROWS * max(1, -(-num_queries // ROWS))
        block_kv = max(block_kv, _FORWARD[width].block_kv)
    if largest is not None:
        block_q = next((rows for rows in (2 * ROWS, ROWS) if rows <= block_q and largest[0] % rows == 0), ROWS)
        if block_q == ROWS:
            block_kv = min(block_kv, ROWS)  # so that several thread blocks fit on a multiprocessor
        if largest[1] % block_kv:
            block_kv = max(_MMA_COLUMNS, power_of_two(min(largest[1], block_kv)))
    is_staged = largest is None and block_q > ROWS and width <= 128 and can_stage(problem)
    if is_staged:
        block_q, block_kv = 2 * ROWS, _STAGED_KEYS
    spec = KernelSpec(
        entry=FORWARD, dtype=problem.dtype, head_dim=dims[0], value_dim=dims[1], block_q=block_q,
        block_kv=block_kv, num_warps=4 * (1 + block_q // ROWS), min_blocks=1, is_listed=largest is not None,
        num_stages=_NARROW_STAGES if width <= 64 and block_q > ROWS else _STAGES,
    )  # fmt: skip
    if is_staged:
        return replace(spec, num_stages=_STAGES, score_is_staged=True)
    if score is not None:
        takes_products = can_take_products(score, problem.numbers, problem.scaling.scale)
        spec = replace(spec, score_takes_products=takes_products)
    if problem.dropout is not None and problem.score is None and width <= 128 and block_q == 2 * ROWS:
        spec = replace(spec, num_warps=spec.num_warps + 4)  # one more warpgroup draws random bits for the others
    # A single consumer warpgroup leaves the tensor cores idle between its products, so several thread blocks should
    # share a multiprocessor.
    if block_q > ROWS or width > 128:
        return spec
    blocks, stages = (2, _STAGES) if largest is None else _LISTED_SMALL[width]
    small = replace(spec, min_blocks=blocks, num_stages=stages)
    return small if blocks * (small.shared_bytes + 1024) <= device.tile_memory_bytes + 1024 else spec


def _is_large(program: Program, is_staged: bool) -> bool:
    """True if a score function is nonlinear in the score, or reads array elements per query or key."""
    if curvature(program) == "curved":
        return True
    dependencies, staged = depends(program), staged_load(program) if is_staged else None
    return any(
        load.op == "load" and n != staged and dependencies[n] & {"i", "j"}
        for n, load in enumerate(program.instructions)
    )


def backward_specs(
    dtype: np.dtype[np.generic], dims: tuple[int, int], largest: tuple[int, int] | None, *, deterministic: bool
) -> dict[str, KernelSpec]:
    """Return the backward kernels by entry, compiled for `dims` or larger dimensions.

    Return {} if no tile supports the dimensions or the block sizes of a list.

    The two consumer warpgroups divide dQ of a query tile: each takes 64 of its rows, or if it has only 64 rows, half of
    the panels of columns. Above head_dim 128, the number of keys in a tile is the largest for which dK and dV fit in
    registers, or a divisor of a list's block_kv. If results must be bitwise reproducible, or a list's blocks are
    smaller, a separate kernel computes dQ, up to head_dim 128.
    """
    widest = max(dims)
    if widest <= 128 and (deterministic or (largest is not None and min(largest) < 2 * ROWS)):
        return _backward_in_two_kernels(dtype, dims, largest)
    if deterministic:
        return {}
    head_dim, block_q = (dims[0], 2 * ROWS) if widest <= 64 else (max(dims[0], 128), ROWS)
    entry, value_dim, block_kv, stages = BACKWARD, dims[1], _BACKWARD_KEYS, _BACKWARD_STAGES
    if widest > 128:
        entry, value_dim, stages = sm90_storage.BACKWARD_WIDE, max(dims[1], 128), _WIDE_STAGES
        block_kv = 96 if head_dim + value_dim <= 384 else 80
        if largest is not None and largest[1] % block_kv:
            block_kv = ROWS
    if largest is not None and (largest[0] < block_q or largest[1] < block_kv):
        return {}
    backward = KernelSpec(
        entry=entry, dtype=dtype, head_dim=head_dim, value_dim=value_dim, block_q=block_q,
        block_kv=block_kv, num_warps=12, min_blocks=1, is_listed=largest is not None, num_stages=stages,
        dq_atomic_width=4,
    )  # fmt: skip
    convert = replace(backward, entry=sm90_storage.CONVERT_DQ, num_warps=8, num_stages=1)
    statistics = replace(convert, entry=BACKWARD_STATISTICS, num_warps=_STATISTICS_WARPS, dq_atomic_width=0)
    return {"backward_statistics": statistics, "backward": backward, "convert_dq": convert}


def _backward_in_two_kernels(
    dtype: np.dtype[np.generic], dims: tuple[int, int], largest: tuple[int, int] | None
) -> dict[str, KernelSpec]:
    """Return the kernels of a backward pass in which one kernel computes dK and dV, and another computes dQ.

    Each has one consumer warpgroup, and two thread blocks of either kernel share a multiprocessor.
    """
    if largest is not None and min(largest) < ROWS:
        return {}
    stages = _NARROW_STAGES if max(dims) <= 64 else _STAGES
    rows = KernelSpec(
        entry=sm90_storage.BACKWARD_ROWS, dtype=dtype, head_dim=dims[0], value_dim=dims[1], block_q=ROWS,
        block_kv=ROWS, num_warps=8, min_blocks=2, is_listed=largest is not None, num_stages=stages,
    )  # fmt: skip
    statistics = replace(
        rows, entry=BACKWARD_STATISTICS, num_warps=_STATISTICS_WARPS, min_blocks=1, num_stages=1
    )  # fmt: skip
    return {"backward_statistics": statistics, "backward": replace(rows, entry=BACKWARD), "backward_rows": rows}
