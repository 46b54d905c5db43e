"""The sm80 family: FlashAttention-2 on tensor cores, for 16-bit elements and for float32 at reduced precision.

Tables list tiles from best to worst. A kernel uses the first that fits in shared memory and in the blocks of a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from ...arrays import HALVES
from ...blocks.work_list import IntervalWork, ListedWork, WorkList
from ..chosen_lists import ROWS, UnionWork
from ..device import DeviceSpec
from ..launches import MATRICES, Feature, Kernels, Pass, TileOrder, Workspace, structure
from ..problem import Problem
from ..sinks import sink_forward
from ..spec import SM80, Entry, KernelSpec
from ..tangent_launches import tangents_of_kernels
from ..split_kv import num_splits as best_num_splits
from ..tile_order import listed_heads, listed_kv_heads
from . import sm80_storage
from ._passes import backward_pass, forward_pass
from ._unions import union_kernels
from .family import (
    DIMS,
    FORWARD_INPUTS,
    WIDEST_CHUNK,
    Family,
    Request,
    first_fitting,
    launch_of,
    launch_over,
    no_tile_fits,
    order_of_waves,
    query_tiles,
    resident_blocks,
)
from .simt import Simt


class _Tile(NamedTuple):
    """A tile, the warps that share it, and the stages of the side that the kernel loops over."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int = 1
    threads_per_processor: int = 256  # with at most 256 threads, each can use 255 registers


_Tiles: TypeAlias = dict[int, tuple[_Tile, ...]]

# Tiles by the larger of head_dim and value_dim. A warp holds 32 query rows if registers suffice, so that each fragment
# of K and V that it loads is multiplied twice. Measurements: sm80_tiles.log at commit b648872e; to repeat them, run
# experiments/speed/tile_sweep.py --gpu.
_FORWARD_TILES: _Tiles = {
    64: (_Tile(128, 128, 4),),
    128: (_Tile(128, 64, 4),),
    256: (_Tile(128, 128, 8), _Tile(64, 64, 4)),
}
_ROWS: _Tiles = {
    64: (_Tile(128, 64, 4, 2),),
    128: (_Tile(64, 64, 4, 2), _Tile(64, 32, 4, 2)),
    256: (_Tile(128, 64, 8), _Tile(64, 32, 4, 2), _Tile(64, 32, 4, 1)),
}
_JVP_TILES: _Tiles = {
    64: (_Tile(128, 64, 4), _Tile(64, 64, 4)),
    128: (_Tile(64, 64, 4), _Tile(64, 32, 4)),
    256: (_Tile(64, 32, 4), _Tile(32, 32, 2)),
}
_SCORED_JVP_TILES: _Tiles = _JVP_TILES | {64: (_Tile(64, 64, 4),)}  # tiles of 128 queries spilled registers
# Kernels that differentiate gradients hold four tiles of scores in registers, each with 16 rows per warp.
_BACKWARD_JVP_ROWS_TILES: _Tiles = {64: (_Tile(64, 64, 4), _Tile(64, 32, 4)), 128: (_Tile(64, 32, 4), _Tile(32, 16, 2))}
_BACKWARD_JVP_COLUMNS_TILES: _Tiles = {64: (_Tile(32, 64, 4),), 128: (_Tile(32, 64, 4), _Tile(16, 32, 2))}
_MOST_COLUMNS_OF_SECOND = 128  # widest rows for which the sums of these kernels fit in registers
_BACKWARD_TILES: _Tiles = {
    64: (_Tile(128, 128, 8, 2), _Tile(64, 64, 4, 2), _Tile(32, 32, 2, 2), _Tile(16, 16, 1, 2)),
    128: (_Tile(64, 128, 8, 2), _Tile(64, 64, 4), _Tile(32, 32, 2, 2), _Tile(16, 16, 1, 2)),
    256: (_Tile(64, 64, 8, 2), _Tile(64, 64, 8), _Tile(32, 32, 4), _Tile(16, 16, 2)),
}
# Tiles for float32, whose elements take twice the memory: tf32_tiles.log at commit b648872e. The later tiles are for
# chips with little shared memory.
_TF32X3_FORWARD: _Tiles = {
    64: (_Tile(128, 32, 4),),
    128: (_Tile(64, 64, 4),),
    256: (_Tile(128, 32, 8), _Tile(128, 16, 8), _Tile(64, 16, 4)),
}
_TF32_FORWARD: _Tiles = _TF32X3_FORWARD | {64: (_Tile(128, 64, 4),), 128: (_Tile(128, 32, 4),)}
_TF32_ROWS: _Tiles = {
    64: (_Tile(64, 64, 4),),
    128: (_Tile(64, 32, 4),),
    256: (_Tile(64, 32, 4), _Tile(64, 16, 4), _Tile(32, 16, 2)),
}
_TF32_BACKWARD: _Tiles = {
    64: (_Tile(64, 64, 4),),
    128: (_Tile(64, 64, 8), _Tile(32, 32, 4)),
    256: (_Tile(32, 64, 8), _Tile(32, 32, 8), _Tile(32, 16, 4), _Tile(16, 16, 4)),
}
# Tiles for block lists per query: 64 rows, 16 per warp. With 16 heads, a warp has a single query and skips the blocks
# that are not in its list.
_UNION_FORWARD: _Tiles = {
    128: (_Tile(64, 64, 4),),
    256: (_Tile(64, 64, 4), _Tile(64, 32, 4)),
}
_UNION_ROWS: _Tiles = {
    128: (_Tile(64, 64, 4, 2), _Tile(64, 64, 4)),
    256: (_Tile(64, 32, 4, 2), _Tile(64, 32, 4)),
}
_UNION_BACKWARD: _Tiles = {
    64: (_Tile(64, 64, 4, 2),),
    128: (_Tile(64, 64, 4), _Tile(64, 32, 4)),
    256: (_Tile(64, 64, 8), _Tile(64, 32, 8)),
}
_LEAST_HEADS_OF_ROWS = 8  # of a tile of neighbouring queries whose dQ has a kernel of its own
_UNION_DIMS = (32, 64, 128, 256)  # dimensions of these kernels, both head_dim and value_dim
_MMA_SIDE = 16  # rows and columns of a warp's products are multiples of this
PARTS = structure((MATRICES, "o_parts", "lse_parts"))
MASS_CHUNK = 64  # columns per chunk if the block mass kernel loads rows in chunks
_MASS_QUERIES, _LEAST_MASS_KEYS = 128, 8  # queries of that kernel's tile, and its smallest block of keys


@dataclass(frozen=True, kw_only=True)
class _TiledEntry(Entry):
    """A kernel with its tables of tiles."""

    family: str = SM80
    tiles: Mapping[str, _Tiles] = field(hash=False)  # by precision
    is_shortened: bool = False  # tiles are reduced in height if there are few queries
    # Maximum accumulators per thread, by precision, if flat blocks of a list or a head_dim of 32 or 96 allow fewer
    # warps than the tables have: with more accumulators, threads spilled up to 5750 bytes each.
    max_accumulators: Mapping[str, int] | None = field(default=None, hash=False)


_FORWARD = _TiledEntry(
    name="forward", shared_bytes=sm80_storage.forward_bytes,
    applies_score=True, draws_dropout=True, has_exponentials=True,
    products=(1, 1), tiles={"ieee": _FORWARD_TILES, "tf32": _TF32_FORWARD, "tf32x3": _TF32X3_FORWARD},
    is_shortened=True,
)  # fmt: skip
_BACKWARD_ROWS = _TiledEntry(
    name="backward_rows", shared_bytes=sm80_storage.rows_bytes, loads_do=True, applies_score=True, draws_dropout=True,
    has_exponentials=True, products=(2, 1), tiles={"ieee": _ROWS, "tf32": _TF32_ROWS, "tf32x3": _TF32_ROWS},
)  # fmt: skip
_BACKWARD = _TiledEntry(
    name="backward", shared_bytes=sm80_storage.backward_bytes, loads_do=True, holds_keys=True, applies_score=True,
    adds_gradients=True, draws_dropout=True, has_exponentials=True, products=(3, 2),
    tiles={"ieee": _BACKWARD_TILES, "tf32": _TF32_BACKWARD, "tf32x3": _TF32_BACKWARD},
    max_accumulators={"ieee": 208, "tf32": 192, "tf32x3": 128},
)  # fmt: skip
_JVP = _TiledEntry(
    name="jvp", shared_bytes=sm80_storage.jvp_bytes, applies_score=True, draws_dropout=True, has_exponentials=True,
    products=(3, 2), tiles={"ieee": _JVP_TILES},
)  # fmt: skip
_SCORED_JVP = replace(_JVP, tiles={"ieee": _SCORED_JVP_TILES})
_BACKWARD_JVP_ROWS = _TiledEntry(
    name="backward_jvp_rows", shared_bytes=sm80_storage.backward_jvp_bytes, loads_do=True, applies_score=True,
    draws_dropout=True, has_exponentials=True, products=(5, 3), tiles={"ieee": _BACKWARD_JVP_ROWS_TILES},
)  # fmt: skip
_BACKWARD_JVP_COLUMNS = _TiledEntry(
    name="backward_jvp_columns", shared_bytes=sm80_storage.backward_jvp_bytes, loads_do=True, holds_keys=True,
    applies_score=True, draws_dropout=True, has_exponentials=True, products=(5, 5),
    tiles={"ieee": _BACKWARD_JVP_COLUMNS_TILES},
)  # fmt: skip
_OF_UNIONS = {
    "forward": replace(_FORWARD, tiles={"ieee": _UNION_FORWARD}, is_shortened=False),
    "backward": replace(_BACKWARD, tiles={"ieee": _UNION_BACKWARD}),
    "backward_rows": replace(_BACKWARD_ROWS, tiles={"ieee": _UNION_ROWS}),
}
_BACKWARD_STATISTICS = Entry(family=SM80, name="backward_statistics", loads_do=True)
_CONVERT_DQ = Entry(family=SM80, name="convert_dq", shared_bytes=sm80_storage.convert_bytes)
_COMBINE = Entry(family=SM80, name="combine", shared_bytes=sm80_storage.combine_bytes)
_BLOCK_MASS = Entry(
    family=SM80, name="block_mass", shared_bytes=sm80_storage.mass_bytes, is_persistent=True, applies_score=True
)  # fmt: skip
DECODING = Entry(family=SM80, name="decode", shared_bytes=sm80_storage.decode_bytes, applies_score=True)
DECODING_E4M3 = Entry(family=SM80, name="decode_e4m3", shared_bytes=sm80_storage.decode_e4m3_bytes, applies_score=True)


def _dq_atomic_width(device: DeviceSpec) -> int:
    """Return how many sums of dQ an atomic instruction adds to."""
    return 4 if (device.compute_capability or (0, 0)) >= (9, 0) else 1


class Sm80(Family):
    """Kernels with cp.async copies and mma.sync, for compute capability 8.0 or higher."""

    name = SM80
    dtypes = HALVES
    rounds_weights = True
    operands = ("sink", "dropout_seed")
    oldest = (8, 0)

    def _dtype_reasons(self, problem: Problem) -> list[str]:
        return [] if problem.precision != "ieee" else super()._dtype_reasons(problem)

    def _instead(self, problem: Problem) -> str:
        if problem.dtype == np.float32:
            return "use precision='tf32x3' or 'tf32', or kernel='simt'"
        return super()._instead(problem)

    def _device_reasons(self, problem: Problem, device: DeviceSpec) -> list[str]:
        capability = device.compute_capability
        if problem.precision != "ieee" and capability is not None and capability < self.oldest:
            needed = f"precision={problem.precision!r} needs compute capability 8.0"
            return [f"{needed}; {device.name} is older: use precision='ieee'"]
        return super()._device_reasons(problem, device)

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        forward = _fitting(_FORWARD, Request(problem, device))
        return forward.block_q, forward.block_kv

    def specs(self, request: Request) -> dict[str, KernelSpec]:
        dq_atomic_width = 0 if request.deterministic else _dq_atomic_width(request.device)
        forward = _fitting(_FORWARD, request)
        backward = replace(_fitting(_BACKWARD, request), dq_atomic_width=dq_atomic_width)
        # dQ is summed in the layout of the backward kernel's warps, so the kernels before and after it use its tiles.
        statistics = replace(backward, entry=_BACKWARD_STATISTICS, dq_atomic_width=0, precision="ieee")
        chosen = {"forward": forward, "backward_statistics": statistics, "backward": backward}
        if request.deterministic:
            return chosen | {"backward_rows": _fitting(_BACKWARD_ROWS, request)}
        return chosen | {"convert_dq": replace(backward, entry=_CONVERT_DQ, precision="ieee")}

    def launches(self, request: Request, work: WorkList, num_splits: int | None = None) -> Kernels:
        """Return the launches. `num_splits` thread blocks divide each tile's keys; by default, the fastest number."""
        if isinstance(work, UnionWork):
            return union_kernels(self, request, work)
        chosen = self.specs(request)
        forward, num_splits = self._forward(request, work, chosen["forward"], num_splits)
        return Kernels(
            forward=forward,
            backward=backward_pass(request, work, chosen),
            order=self.order(request, work, forward.launches["forward"].spec, chosen["backward"]),
            num_splits=num_splits,
            is_repeatable="backward_rows" in chosen,
        )

    def tangent_reasons(self, problem: Problem) -> list[str]:
        if problem.precision == "ieee":
            return []
        return [f"precision={problem.precision!r} does not support tangents: use precision='ieee'"]

    def jvp_spec(self, request: Request) -> KernelSpec:
        entry = _JVP if request.problem.score is None else _SCORED_JVP
        spec = _fitting(entry, request, tangents=("q", "k", "v"))
        return replace(spec, tangents=tangents_of_kernels(request.problem))

    def backward_jvp_specs(self, request: Request) -> tuple[KernelSpec, KernelSpec]:
        """Return the kernels, or simt's if rows are so wide that their sums do not fit in registers."""
        if max(request.dims) > _MOST_COLUMNS_OF_SECOND:
            return Simt().backward_jvp_specs(request)
        every, named = ("q", "k", "v", "do"), tangents_of_kernels(request.problem)
        rows = _fitting(_BACKWARD_JVP_ROWS, request, tangents=every)
        columns = _fitting(_BACKWARD_JVP_COLUMNS, request, tangents=every)
        num_warps = max(1, columns.block_kv // _MMA_SIDE)
        columns = replace(columns, num_warps=num_warps, min_blocks=max(1, 8 // num_warps))
        return replace(rows, tangents=named), replace(columns, tangents=named)

    def union_specs(self, request: Request, block: int, heads: int) -> dict[str, KernelSpec]:
        """Return the kernels; "backward" adds to dQ if that is faster than a kernel of its own, "backward_rows".

        A tile of neighbouring queries has 64 / `heads` of them, whose lists have few blocks in common: from few heads
        on, "backward_rows" would compute most products for queries that did not choose the block.
        """
        widest = next(dim for dim in _UNION_DIMS if dim >= max(request.dims))
        most = dict.fromkeys(_OF_UNIONS, ROWS)
        if request.problem.score is not None and widest > 64:
            most["backward"] = 32  # maximum keys of a tile without spilled registers
        chosen = {
            role: replace(
                _fitting(
                    entry, replace(request, largest=(ROWS, min(block, most[role]))), (widest, widest), num_queries=ROWS
                ),
                packs_queries=True,
            )
            for role, entry in _OF_UNIONS.items()
        }
        if request.deterministic or heads >= _LEAST_HEADS_OF_ROWS:
            statistics = self.specs(Request(request.problem, request.device))["backward_statistics"]
            return chosen | {"backward_statistics": statistics}
        del chosen["backward_rows"]
        backward = replace(chosen["backward"], dq_atomic_width=_dq_atomic_width(request.device))
        statistics = replace(backward, entry=_BACKWARD_STATISTICS, dq_atomic_width=0, packs_queries=False)
        convert = replace(backward, entry=_CONVERT_DQ)
        return chosen | {"backward": backward, "backward_statistics": statistics, "convert_dq": convert}

    def _forward(
        self, request: Request, work: WorkList, unsplit: KernelSpec, num_splits: int | None
    ) -> tuple[Pass, int]:
        """Return the forward pass, and the number of thread blocks that divide a tile's keys."""
        problem, device = request.problem, request.device
        shares_masks = isinstance(work, IntervalWork) and (work.lo is None or work.lo.shape[1] == 1)
        spec = split_spec(unsplit, problem, device, problem.group_size if shares_masks else 1)
        heads = problem.num_kv_heads if spec.pack_gqa else problem.num_heads
        tiles = heads * (1 if spec.pack_gqa else query_tiles(problem, work, spec.block_q))
        chosen = num_splits
        if chosen is None and 0 in (problem.mask_shape.num_batch, *problem.mask_shape[1:]):
            chosen, spec = 1, unsplit
        elif chosen is None:
            all_tiles = problem.mask_shape.num_batch * tiles
            chosen = best_num_splits(problem, work, spec, all_tiles, resident_blocks(spec, device))
        if num_splits is None and chosen == 1 and not spec.pack_gqa:
            return forward_pass(request, work, unsplit), 1
        *leading, seqlen_q = problem.lse_shape()
        parts = (*leading, chosen * seqlen_q)
        combine = combine_spec(spec)
        launches = {
            "forward": launch_of(
                spec, device, chosen * tiles, FORWARD_INPUTS, ("o_parts", "lse_parts"), ("parts",)
            ),
            "combine": launch_over(combine, request, work, ("o_parts", "lse_parts"), ("o", "lse"), ("parts",)),
        }
        workspaces = {
            "o_parts": Workspace((*parts, spec.value_dim), problem.accumulator),
            "lse_parts": Workspace(parts, problem.accumulator),
        }
        return sink_forward(Pass(launches, workspaces, (Feature("parts", PARTS),)), problem, "combine"), chosen

    def order(self, request: Request, work: WorkList, forward: KernelSpec, backward: KernelSpec) -> TileOrder:
        """Return between how many heads tiles alternate.

        With a block list, these heads fit in the cache together. Under a band, they fill one wave of thread blocks.
        """
        if isinstance(work, ListedWork):
            problem, device = request.problem, request.device
            return TileOrder(listed_heads(problem, device), listed_kv_heads(problem, device))
        return order_of_waves(request, work, forward, backward)

    def mass_spec(self, request: Request, block_kv: int) -> KernelSpec | None:
        """Return the kernel, or None if it does not support the dtype, the chip or blocks of so few keys.

        Rows of q up to `WIDEST_CHUNK` columns stay in shared memory; longer rows are loaded in chunks, like those of k.
        """
        problem, device = request.problem, request.device
        if problem.dtype not in self.dtypes or block_kv < _LEAST_MASS_KEYS:
            return None
        if device.compute_capability is None or device.compute_capability < self.oldest:
            return None
        splits_head_dim = problem.head_dim > WIDEST_CHUNK
        spec = KernelSpec(
            entry=_BLOCK_MASS, dtype=problem.dtype, value_dim=DIMS[0], block_q=_MASS_QUERIES,
            head_dim=MASS_CHUNK if splits_head_dim else next(dim for dim in DIMS if dim >= problem.head_dim),
            block_kv=128, num_warps=8, min_blocks=1, num_stages=3 if splits_head_dim else 2,
            is_listed=request.largest is not None, splits_head_dim=splits_head_dim,
        )  # fmt: skip
        return first_fitting([spec], device)


def split_spec(forward: KernelSpec, problem: Problem, device: DeviceSpec, group_size: int) -> KernelSpec:
    """Return the split-KV forward kernel, in which several thread blocks divide each tile's keys.

    If the queries of the `group_size` heads that share a key/value head fit in one tile, the tile holds all of them.
    """
    if group_size > 1:
        num_rows = problem.seqlen_q * group_size
        dims = forward.head_dim, forward.value_dim
        packed = _fitting(_FORWARD, Request(problem, device), dims, num_queries=num_rows)
        if num_rows <= packed.block_q:
            forward = replace(packed, pack_gqa=True)
    return replace(forward, is_split=True)


def combine_spec(forward: KernelSpec) -> KernelSpec:
    """Return the kernel that merges the partial results of a split-KV forward pass."""
    return KernelSpec(
        entry=_COMBINE, dtype=forward.dtype, head_dim=forward.value_dim, value_dim=forward.value_dim, block_q=1,
        block_kv=1,
    )  # fmt: skip


def _fitting(
    entry: _TiledEntry, request: Request, dims: tuple[int, int] | None = None, *, num_queries: int | None = None,
    tangents: tuple[str, ...] = (),
) -> KernelSpec:  # fmt: skip
    """Return a kernel with the first of its tiles that fits; by default, for the request's dimensions and queries."""
    problem, device, largest = request.problem, request.device, request.largest
    dims, num_queries = dims or request.dims, problem.seqlen_q if num_queries is None else num_queries
    tiles = next(tiles for width, tiles in entry.tiles[problem.precision].items() if width >= max(dims))
    if entry.is_shortened:
        tiles = tuple(_shortened(tile, num_queries, max(dims), problem.dtype) for tile in tiles)
    max_accumulators = None if entry.max_accumulators is None else entry.max_accumulators[problem.precision]
    specs = (
        KernelSpec(
            entry=entry, dtype=problem.dtype, head_dim=dims[0], value_dim=dims[1],
            block_q=tile.block_q, block_kv=tile.block_kv, num_warps=tile.num_warps,
            min_blocks=max(1, tile.threads_per_processor // (32 * tile.num_warps)), is_listed=largest is not None,
            num_stages=tile.num_stages, precision=problem.precision, tangents=tangents,
        )
        for tile in _candidates(tiles, dims, largest, max_accumulators)
    )  # fmt: skip
    for spec in specs:
        if spec.shared_bytes <= device.tile_memory_bytes:
            return spec
    what = f" for {spec.name} with head_dim {dims[0]}, value dim {dims[1]} in {problem.dtype}"
    alternative = "kernel='simt'" if problem.precision == "ieee" else "precision='ieee'"
    raise no_tile_fits(spec.shared_bytes, what, device, f"use {alternative}")


def _shortened(tile: _Tile, num_queries: int, widest: int, dtype: np.dtype[np.generic]) -> _Tile:
    """Return a forward tile whose height is reduced to the number of queries.

    Its warps hold 16 rows each and so need fewer registers. More thread blocks then run at a time and overlap their
    loads, unless shared memory is the limit; for this reason, steps of wide rows have at most 64 keys.
    """
    if num_queries > tile.block_q // 2:
        return tile
    block_q = max(_MMA_SIDE, power_of_two(2 * num_queries - 1))
    if widest > 128:
        tile = tile._replace(block_kv=min(tile.block_kv, 64))
    threads_per_processor = 384 if widest <= 128 and dtype.itemsize == 2 else 256
    return tile._replace(block_q=block_q, num_warps=block_q // 16, threads_per_processor=threads_per_processor)


def _candidates(
    tiles: tuple[_Tile, ...], dims: tuple[int, int], largest: tuple[int, int] | None, max_accumulators: int | None
) -> Iterator[_Tile]:
    """Yield the tiles; with `largest`, tiles are reduced to that size, and come in descending order of their area.

    If the accumulators per thread are limited, as in the kernels of gradients, warps share all products of a tile.
    """
    if largest is None:
        yield from (_fitted(tile, dims, tile[:2], max_accumulators) for tile in tiles)
        return
    fitted = [_fitted(tile, dims, largest, max_accumulators) for tile in tiles]
    yield from sorted(fitted, key=lambda tile: (tile.block_q * tile.block_kv, tile in tiles), reverse=True)


@lru_cache(maxsize=1024)
def _fitted(tile: _Tile, dims: tuple[int, int], largest: tuple[int, int], max_accumulators: int | None) -> _Tile:
    """Return a tile reduced to `largest`, with no more warps than can share the reduced tile."""
    block_q, block_kv = (power_of_two(min(pair)) for pair in zip(tile[:2], largest))
    if max_accumulators is None:
        num_warps = block_q // min(tile.block_q // tile.num_warps, block_q)
        return tile._replace(block_q=block_q, block_kv=block_kv, num_warps=num_warps)
    fitted = _with_partitionable_warps(tile._replace(block_q=block_q, block_kv=block_kv), dims)
    while (
        block_kv > _MMA_SIDE
        and fitted.num_warps < tile.num_warps
        and _num_accumulators(fitted, dims) > max_accumulators
    ):
        block_kv //= 2
        fitted = _with_partitionable_warps(tile._replace(block_q=block_q, block_kv=block_kv), dims)
    return fitted


def _with_partitionable_warps(tile: _Tile, dims: tuple[int, int]) -> _Tile:
    """Return a tile of the backward kernel with no more warps than can share each of its products."""
    products = [(tile.block_q, dims[0]), (tile.block_kv, dims[0]), (tile.block_kv, dims[1])]
    if max(dims) <= 128:  # the gradients of wider rows need more warps than can share small scores
        products.append(tile[:2])
    num_warps = tile.num_warps
    while not all(can_partition(rows, columns, num_warps) for rows, columns in products):
        num_warps //= 2
    return tile._replace(num_warps=num_warps)


def _num_accumulators(tile: _Tile, dims: tuple[int, int]) -> float:
    """Return the registers per thread of the backward kernel for S, dP, dK and dV."""
    return tile.block_kv * (2 * tile.block_q + sum(dims)) / (32 * tile.num_warps)


def can_partition(rows: int, columns: int, num_warps: int) -> bool:
    """True if warps can divide a product into pairs of fragments (`row_groups` of tile/warp_tile.cuh is not 0)."""
    groups = (group for group in range(1, num_warps + 1) if num_warps % group == 0)
    return any(
        rows % (_MMA_SIDE * group) == 0 and columns % (_MMA_SIDE * (num_warps // group)) == 0 for group in groups
    )


def power_of_two(largest: int) -> int:
    """Return the greatest power of two up to `largest`."""
    return 1 << largest.bit_length() - 1
