"""The sm80 family: FlashAttention-2 on tensor cores, for 16-bit elements and for float32 at reduced precision.

A tile is the first of a few, best first, that a chip's shared memory and a list's blocks allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...arrays import BFLOAT16
from ...blocks.work_list import IntervalWork, ListedWork, WorkList
from ...errors import UnsupportedProblem
from ..device import DeviceSpec
from ..launches import Kernels, Launch, Pass, TileOrder, Workspace
from ..problem import Problem
from ..sinks import sink_backward, sink_forward
from ..spec import KernelSpec
from ..split_kv import num_splits as best_num_splits
from ..tile_order import listed_heads, listed_kv_heads
from . import SM80
from .family import (
    BACKWARD_INPUTS,
    DIMS,
    FORWARD_INPUTS,
    STATISTICS_INPUTS,
    WIDEST_CHUNK,
    Family,
    key_tiles,
    list_block_of,
    query_tiles,
    rounded_dims,
)


class _Tile(NamedTuple):
    """A tile, the warps that share it, and how many of what it steps over are at hand."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int = 1
    threads_per_processor: int = 256  # so many threads have all the registers they can use


_Tiles: TypeAlias = dict[int, tuple[_Tile, ...]]

# Tiles by the wider of the two dimensions. A warp holds 32 rows of queries where its registers suffice, so that each
# fragment of K and V that it reads is multiplied twice; sm80_tiles.log of b648872e has the times, and
# experiments/speed/tile_sweep.py --gpu takes them anew.
_FORWARD: _Tiles = {
    64: (_Tile(128, 128, 4),),
    128: (_Tile(128, 64, 4),),
    256: (_Tile(128, 128, 8), _Tile(64, 64, 4)),
}
_ROWS: _Tiles = {
    64: (_Tile(128, 64, 4, 2),),
    128: (_Tile(64, 64, 4, 2), _Tile(64, 32, 4, 2)),
    256: (_Tile(128, 64, 8), _Tile(64, 32, 4, 2), _Tile(64, 32, 4, 1)),
}
_BACKWARD: _Tiles = {
    64: (_Tile(128, 128, 8, 2), _Tile(64, 64, 4, 2), _Tile(32, 32, 2, 2), _Tile(16, 16, 1, 2)),
    128: (_Tile(64, 128, 8, 2), _Tile(64, 64, 4), _Tile(32, 32, 2, 2), _Tile(16, 16, 1, 2)),
    256: (_Tile(64, 64, 8, 2), _Tile(64, 64, 8), _Tile(32, 32, 4), _Tile(16, 16, 2)),
}
# Tiles of float32, which has twice the bytes: tf32_tiles.log of b648872e. The later ones are for chips with
# little shared memory.
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
# Tiles by precision: of the forward kernel, of backward_rows, and of the other kernels.
_TABLES: dict[str, tuple[_Tiles, _Tiles, _Tiles]] = {
    "ieee": (_FORWARD, _ROWS, _BACKWARD),
    "tf32": (_TF32_FORWARD, _TF32_ROWS, _TF32_BACKWARD),
    "tf32x3": (_TF32X3_FORWARD, _TF32_ROWS, _TF32_BACKWARD),
}
_MMA_SIDE = 16  # rows and columns of a product
MOST_PARTS = 128  # of the keys of a sequence in decode kernels, kMostParts
MASS_CHUNK = 64  # columns of a chunk, where rows of the kernel of block masses come in chunks
_MASS_QUERIES, _LEAST_MASS_KEYS = 128, 8  # queries of that kernel's tile, and keys of the narrowest block of masses
# Most accumulators of a thread of the gradients, by precision, where flat blocks of a list, or rows of 32 or 96, leave
# fewer warps than the tables have: threads with more spilled up to 5750 bytes each.
_MAX_ACCUMULATORS = {"ieee": 208, "tf32": 192, "tf32x3": 128}


class Sm80(Family):
    """Kernels with cp.async copies and mma.sync, for compute capability 8.0 and newer."""

    name = SM80
    dtypes = (np.dtype(np.float16), BFLOAT16)
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
        forward = _fitting("forward", problem, rounded_dims(problem), device, None, problem.seqlen_q)
        return forward.block_q, forward.block_kv

    def specs(
        self,
        problem: Problem,
        device: DeviceSpec,
        largest: tuple[int, int] | None = None,
        *,
        deterministic: bool = False,
    ) -> dict[str, KernelSpec]:
        dq_atomic_width = 0 if deterministic else 4 if (device.compute_capability or (0, 0)) >= (9, 0) else 1
        last = "backward_rows" if deterministic else "convert_dq"
        chosen, fitting = {}, {}
        for entry in ("forward", "backward_statistics", "backward", last):
            # dQ is summed in the layout of the backward kernel's warps, so its neighbours cut queries alike.
            tile_entry = entry if entry in ("forward", "backward_rows") else "backward"
            if tile_entry not in fitting:
                fitting[tile_entry] = _fitting(
                    tile_entry, problem, rounded_dims(problem), device, largest, problem.seqlen_q
                )
            multiplies = entry not in ("backward_statistics", "convert_dq")
            chosen[entry] = replace(
                fitting[tile_entry], entry=entry,
                dq_atomic_width=dq_atomic_width if entry in ("backward", "convert_dq") else 0,
                precision=problem.precision if multiplies else "ieee",
            )  # fmt: skip
        return chosen

    def launches(
        self,
        problem: Problem,
        device: DeviceSpec,
        work: WorkList,
        *,
        deterministic: bool = False,
        num_splits: int | None = None,
    ) -> Kernels:
        """The launches; as many thread blocks share each tile's keys as `num_splits` says, or else as many as pay."""
        chosen = self.specs(problem, device, list_block_of(work), deterministic=deterministic)
        forward, num_splits = self._forward(problem, device, work, chosen["forward"], num_splits)
        return Kernels(
            forward=sink_forward(forward, problem, "combine" if "combine" in forward.launches else "forward"),
            backward=self.backward(problem, work, chosen),
            order=self.order(problem, device, work, forward.launches["forward"].spec, chosen["backward"]),
            num_splits=num_splits,
            is_repeatable="backward_rows" in chosen,
        )

    def _forward(
        self, problem: Problem, device: DeviceSpec, work: WorkList, unsplit: KernelSpec, num_splits: int | None
    ) -> tuple[Pass, int]:
        """The forward pass, and how many thread blocks share a tile's keys."""
        shares_masks = isinstance(work, IntervalWork) and (work.lo is None or work.lo.shape[1] == 1)
        spec = split_spec(unsplit, problem, device, problem.group_size if shares_masks else 1)
        heads = problem.num_kv_heads if spec.pack_gqa else problem.num_heads
        tiles = heads * (1 if spec.pack_gqa else query_tiles(problem, work, spec.block_q))
        chosen = num_splits
        if chosen is None and 0 in (problem.mask_shape.num_batch, *problem.mask_shape[1:]):
            chosen, spec = 1, unsplit
        elif chosen is None:
            num_tiles = problem.mask_shape.num_batch * tiles
            chosen = best_num_splits(problem, work, spec, num_tiles, self.resident_blocks(spec, device))
        if num_splits is None and chosen == 1 and not spec.pack_gqa:
            unsplit_tiles = problem.num_heads * query_tiles(problem, work, unsplit.block_q)
            return Pass({"forward": self._launch(unsplit, unsplit_tiles, FORWARD_INPUTS, ("o", "lse"))}), 1
        *leading, seqlen_q = problem.lse_shape()
        parts = (*leading, chosen * seqlen_q)
        combine = combine_spec(spec)
        launches = {
            "forward": self._launch(spec, chosen * tiles, FORWARD_INPUTS, ("o_parts", "lse_parts")),
            "combine": self._launch(
                combine, problem.num_heads * query_tiles(problem, work, combine.block_q), ("o_parts", "lse_parts"),
                ("o", "lse"),
            ),
        }  # fmt: skip
        workspaces = {
            "o_parts": Workspace((*parts, spec.value_dim), problem.accumulator),
            "lse_parts": Workspace(parts, problem.accumulator),
        }
        return Pass(launches, workspaces), chosen

    def backward(self, problem: Problem, work: WorkList, specs: Mapping[str, KernelSpec]) -> Pass:
        """The backward pass with these kernels; the sm90 family takes it too where its own kernels do not serve."""
        backward = specs["backward"]
        rows = query_tiles(problem, work, backward.block_q)
        query_tile_count = problem.num_heads * rows
        key_tile_count = problem.num_kv_heads * key_tiles(problem, work, backward.block_kv)
        workspaces = {"delta": Workspace(problem.lse_shape(), problem.accumulator)}
        statistics = specs["backward_statistics"]
        if "backward_rows" in specs:
            rows_spec = specs["backward_rows"]
            rows_tiles = problem.num_heads * query_tiles(problem, work, rows_spec.block_q)
            launches = {
                "backward_statistics": self._launch(statistics, query_tile_count, STATISTICS_INPUTS, ("delta",)),
                "backward": self._launch(backward, key_tile_count, (*BACKWARD_INPUTS, "delta"), ("dk", "dv")),
                "backward_rows": self._launch(rows_spec, rows_tiles, (*BACKWARD_INPUTS, "delta"), ("dq",)),
            }
            return sink_backward(Pass(launches, workspaces), problem)
        *leading, _ = problem.lse_shape()
        sums = Workspace((*leading, rows, backward.block_q * backward.head_dim), problem.accumulator)
        inputs = (*BACKWARD_INPUTS, "delta", "dq_sum")
        launches = {
            "backward_statistics": self._launch(statistics, query_tile_count, STATISTICS_INPUTS, ("delta", "dq_sum")),
            "backward": self._launch(backward, key_tile_count, inputs, ("dq_sum", "dk", "dv")),
            "convert_dq": self._launch(specs["convert_dq"], query_tile_count, ("dq_sum",), ("dq",)),
        }
        return sink_backward(Pass(launches, {"dq_sum": sums, **workspaces}), problem)

    def order(
        self, problem: Problem, device: DeviceSpec, work: WorkList, forward: KernelSpec, backward: KernelSpec
    ) -> TileOrder:
        """Heads that alternate: those that fit the cache with a list, those of one wave of blocks under a band."""
        if isinstance(work, ListedWork):
            return TileOrder(listed_heads(problem, device), listed_kv_heads(problem, device))
        return self.order_of_waves(problem, device, work, forward, backward)

    def _launch(self, spec: KernelSpec, tiles: int, reads: tuple[str, ...], writes: tuple[str, ...]) -> Launch:
        return Launch(spec=spec, tiles=tiles, shared_bytes=self.shared_bytes(spec), reads=reads, writes=writes)

    def shared_bytes(self, spec: KernelSpec) -> int:
        return shared_bytes(spec)

    def max_blocks(self, spec: KernelSpec, device: DeviceSpec) -> int | None:
        return self.resident_blocks(spec, device) if spec.entry == "block_mass" else None

    def mass_spec(
        self, problem: Problem, device: DeviceSpec, block_kv: int, *, is_listed: bool
    ) -> KernelSpec | None:
        """The kernel, or None where it does not serve the elements, the chip or such narrow blocks of keys.

        Rows of q that fit shared memory twice stay there; longer ones come in chunks, as those of k do.
        """
        if problem.dtype not in self.dtypes or block_kv < _LEAST_MASS_KEYS:
            return None
        if device.compute_capability is None or device.compute_capability < self.oldest:
            return None
        splits_head_dim = problem.head_dim > WIDEST_CHUNK
        spec = KernelSpec(
            family=self.name, entry="block_mass", dtype=problem.dtype, value_dim=DIMS[0], block_q=_MASS_QUERIES,
            head_dim=MASS_CHUNK if splits_head_dim else next(dim for dim in DIMS if dim >= problem.head_dim),
            block_kv=128, num_warps=8, min_blocks=1, num_stages=3 if splits_head_dim else 2, is_listed=is_listed,
            splits_head_dim=splits_head_dim,
        )  # fmt: skip
        return spec if shared_bytes(spec) <= device.tile_memory_bytes else None


def split_spec(forward: KernelSpec, problem: Problem, device: DeviceSpec, group_size: int) -> KernelSpec:
    """The forward kernel whose thread blocks share each tile's keys.

    Where the queries of `group_size` heads that share a key/value head fit one tile, the tile holds them all.
    """
    if group_size > 1:
        num_rows = problem.seqlen_q * group_size
        packed = _fitting("forward", problem, (forward.head_dim, forward.value_dim), device, None, num_rows)
        if num_rows <= packed.block_q:
            forward = replace(packed, pack_gqa=True, precision=forward.precision)
    return replace(forward, is_split=True)


def combine_spec(forward: KernelSpec) -> KernelSpec:
    """The kernel that merges the partial results of a split forward pass."""
    return KernelSpec(
        family=forward.family, entry="combine", dtype=forward.dtype, head_dim=forward.value_dim,
        value_dim=forward.value_dim, block_q=1, block_kv=1,
    )  # fmt: skip


def _fitting(
    entry: str,
    problem: Problem,
    dims: tuple[int, int],
    device: DeviceSpec,
    largest: tuple[int, int] | None,
    num_queries: int,
) -> KernelSpec:
    """A kernel with the first of its tiles that fits."""
    forward, rows, backward = _TABLES[problem.precision]
    table = {"forward": forward, "backward_rows": rows, "backward": backward}[entry]
    tiles = next(tiles for width, tiles in table.items() if width >= max(dims))
    if entry == "forward":
        tiles = tuple(_shortened(tile, num_queries, max(dims), problem.dtype) for tile in tiles)
    max_accumulators = _MAX_ACCUMULATORS[problem.precision] if entry == "backward" else None
    for tile in _candidates(tiles, dims, largest, max_accumulators):
        spec = KernelSpec(
            family=SM80, entry=entry, dtype=problem.dtype, head_dim=dims[0], value_dim=dims[1],
            block_q=tile.block_q, block_kv=tile.block_kv, num_warps=tile.num_warps,
            min_blocks=max(1, tile.threads_per_processor // (32 * tile.num_warps)), is_listed=largest is not None,
            num_stages=tile.num_stages,
        )  # fmt: skip
        if shared_bytes(spec) <= device.tile_memory_bytes:
            return spec
    alternative = "kernel='simt'" if problem.precision == "ieee" else "precision='ieee'"
    raise UnsupportedProblem(
        [
            f"{device.name} must have {shared_bytes(spec)} bytes of shared memory a block for {spec.name} with "
            f"head_dim {dims[0]}, value dim {dims[1]} in {problem.dtype}; it has {device.tile_memory_bytes}: "
            f"use {alternative}"
        ]
    )


def _shortened(tile: _Tile, num_queries: int, widest: int, dtype: np.dtype[Any]) -> _Tile:
    """Return a tile of the forward pass that is no taller than few queries need.

    Its warps hold 16 rows each and so need fewer registers: more blocks run at a time, whose loads overlap, unless
    shared memory limits them; so wide rows come 64 at a time.
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
    """The tiles; where `largest` is given those that are no larger, the most scores first, and of larger ones a part.

    Where a thread's sums are bounded, warps share all products of a tile, as those of gradients do.
    """
    if largest is None:
        yield from (_fitted(tile, dims, tile[:2], max_accumulators) for tile in tiles)
        return
    fitted = [_fitted(tile, dims, largest, max_accumulators) for tile in tiles]
    yield from sorted(fitted, key=lambda tile: (tile.block_q * tile.block_kv, tile in tiles), reverse=True)


@lru_cache(maxsize=1024)
def _fitted(tile: _Tile, dims: tuple[int, int], largest: tuple[int, int], max_accumulators: int | None) -> _Tile:
    """A tile no larger than `largest`, of as many warps as can share what it is then."""
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
    """A tile of the gradients, but of no more warps than can share each of its products."""
    products = [(tile.block_q, dims[0]), (tile.block_kv, dims[0]), (tile.block_kv, dims[1])]
    if max(dims) <= 128:  # gradients of wider rows take more warps than scores of small blocks have parts for
        products.append(tile[:2])
    num_warps = tile.num_warps
    while not all(can_partition(rows, columns, num_warps) for rows, columns in products):
        num_warps //= 2
    return tile._replace(num_warps=num_warps)


def _num_accumulators(tile: _Tile, dims: tuple[int, int]) -> float:
    """Registers that a thread of the gradients fills with S, dP, dK and dV."""
    return tile.block_kv * (2 * tile.block_q + sum(dims)) / (32 * tile.num_warps)


def can_partition(rows: int, columns: int, num_warps: int) -> bool:
    """Return whether warps can share a product in pairs of fragments: `row_groups` of tile/warp_tile.cuh is not 0."""
    groups = (group for group in range(1, num_warps + 1) if num_warps % group == 0)
    return any(
        rows % (_MMA_SIDE * group) == 0 and columns % (_MMA_SIDE * (num_warps // group)) == 0 for group in groups
    )


def power_of_two(largest: int) -> int:
    """The greatest power of two that is no larger."""
    return 1 << largest.bit_length() - 1


_WORK_TILE, _VISIT_RANGE, _SCALE, _POINTER, _FLAG = 28, 24, 4, 8, 8  # bytes of what a block remembers of its tile
_CHUNK, _MATRIX = 20, 32  # and a step of the masses' walk, and an operand


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a block: tiles of operands, and what a block remembers of its own."""
    both = spec.head_dim + spec.value_dim
    queries, keys, scores = spec.block_q * both, spec.block_kv * both, spec.block_q * spec.block_kv
    state_bytes = _WORK_TILE + _VISIT_RANGE + _SCALE
    if spec.entry == "forward":  # o is staged in the tile of q
        elements = spec.block_q * max(spec.head_dim, spec.value_dim) + keys
        return spec.dtype.itemsize * elements + 2 * _POINTER + state_bytes + _FLAG
    if spec.entry == "backward_rows":
        return spec.dtype.itemsize * (queries + spec.num_stages * keys) + 2 * _POINTER + state_bytes + _FLAG
    if spec.entry == "backward":
        statistics = 2 * 4 * spec.num_stages * spec.block_q
        elements = keys + spec.num_stages * queries + 2 * scores
        return spec.dtype.itemsize * elements + statistics + 5 * _POINTER + state_bytes + _FLAG
    if spec.entry == "block_mass":  # there are no values; beside the operands lies lse of the queries
        slots = spec.num_stages * (spec.block_kv + spec.splits_head_dim * spec.block_q)
        rows = slots + (0 if spec.splits_head_dim else spec.block_q)
        state_bytes = 4 * (spec.block_q + 1) + _WORK_TILE + _VISIT_RANGE + spec.num_stages * _CHUNK
        state_bytes += -state_bytes % _POINTER + 2 * _MATRIX
        return spec.dtype.itemsize * rows * spec.head_dim + state_bytes
    if spec.entry in ("decode", "decode_e4m3"):  # queries, and keys and values of all stages; then weights of parts
        row = both + 2 * _SCALE if spec.entry == "decode_e4m3" else both * spec.dtype.itemsize
        tiles = spec.block_q * spec.head_dim * spec.dtype.itemsize + spec.num_stages * spec.block_kv * row
        return max(tiles, (2 * MOST_PARTS + 1) * spec.block_q * 4)
    if spec.entry == "combine":  # sums of its groups of threads
        return (8 if spec.value_dim > 192 else 16) * spec.value_dim * 4
    return spec.dtype.itemsize * spec.block_q * spec.head_dim if spec.entry == "convert_dq" else 0
