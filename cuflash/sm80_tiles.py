"""Tiles of the sm80 family: the first of a few, best first, that a chip's shared memory and a list's blocks allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .device import DeviceSpec
from .errors import UnsupportedProblem
from .problem import Problem
from .source import KernelSpec


class _Tile(NamedTuple):
    """A tile, the warps that share it, and how many of what it steps over are at hand."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int = 1
    threads_at_once: int = 256  # of a multiprocessor, that have all the registers they can use


_Tiles: TypeAlias = dict[int, tuple[_Tile, ...]]

# By the wider of the two dimensions. A warp holds 32 rows of queries where its registers suffice, so that each fragment
# of K and V that it reads is multiplied twice; experiments/results/sm80_tiles.log has the times, and
# experiments/tile_sweep.py --gpu takes them anew.
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
# The same of float32, of twice the bytes: experiments/results/tf32_tiles.log. The later ones are for chips whose shared
# memory is small.
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
# By precision: of the forward kernel, of backward_rows, and of the other kernels.
_TABLES: dict[str, tuple[_Tiles, _Tiles, _Tiles]] = {
    "ieee": (_FORWARD, _ROWS, _BACKWARD),
    "tf32": (_TF32_FORWARD, _TF32_ROWS, _TF32_BACKWARD),
    "tf32x3": (_TF32X3_FORWARD, _TF32_ROWS, _TF32_BACKWARD),
}
_SMALLEST = 16  # rows and columns of a product
# Of a thread of the gradients, by precision, where flat blocks of a list, or rows of 32 or 96, leave fewer warps than
# the tables have: more spilled, up to 5750 bytes a thread.
_MOST_SUMS = {"ieee": 208, "tf32": 192, "tf32x3": 128}


def entries(*, deterministic: bool) -> tuple[str, ...]:
    """The kernels of the family's passes, the forward pass's first."""
    backward = ("backward_statistics", "backward")
    return ("forward", *backward, "backward_rows" if deterministic else "convert_dq")


def specs(
    problem: Problem,
    dims: tuple[int, int],
    device: DeviceSpec,
    largest: tuple[int, int] | None,
    num_queries: int,
    *,
    deterministic: bool,
) -> dict[str, KernelSpec]:
    """The kernels by entry: of rooms for dims (head_dim, value_dim), with tiles no larger than `largest`, if given.

    A tile of the forward pass is no taller than `num_queries` want.

    Raises
    ------
    UnsupportedProblem
        No tile fits the device's shared memory.
    """
    dq_adds = 0 if deterministic else 4 if (device.compute_capability or (0, 0)) >= (9, 0) else 1
    chosen, fitting = {}, {}
    for entry in entries(deterministic=deterministic):
        # dQ is summed as the warps of the backward kernel hold it, so its neighbours cut queries alike.
        like = entry if entry in ("forward", "backward_rows") else "backward"
        if like not in fitting:
            fitting[like] = _fitting(like, problem, dims, device, largest, num_queries)
        multiplies = entry not in ("backward_statistics", "convert_dq")
        chosen[entry] = replace(
            fitting[like], entry=entry, dq_adds=dq_adds if entry in ("backward", "convert_dq") else 0,
            precision=problem.precision if multiplies else "ieee",
        )  # fmt: skip
    return chosen


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
        tiles = tuple(_as_flat_as(tile, num_queries, max(dims), problem.dtype) for tile in tiles)
    most_sums = _MOST_SUMS[problem.precision] if entry == "backward" else None
    for tile in _allowed(tiles, dims, largest, most_sums):
        spec = KernelSpec(
            family="sm80", entry=entry, dtype=problem.dtype, head_dim=dims[0], value_dim=dims[1],
            block_q=tile.block_q, block_kv=tile.block_kv, num_warps=tile.num_warps,
            min_blocks=max(1, tile.threads_at_once // (32 * tile.num_warps)), is_listed=largest is not None,
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


def _as_flat_as(tile: _Tile, num_queries: int, widest: int, dtype: np.dtype[Any]) -> _Tile:
    """A tile of the forward pass, but no taller than few queries want.

    Its warps hold 16 rows each and so need fewer registers: more blocks are at work, whose loads overlap, unless shared
    memory has no room for more; so wide rows come 64 at a time.
    """
    if num_queries > tile.block_q // 2:
        return tile
    block_q = max(_SMALLEST, _power_of_two(2 * num_queries - 1))
    if widest > 128:
        tile = tile._replace(block_kv=min(tile.block_kv, 64))
    threads_at_once = 384 if widest <= 128 and dtype.itemsize == 2 else 256
    return tile._replace(block_q=block_q, num_warps=block_q // 16, threads_at_once=threads_at_once)


def split(
    chosen: dict[str, KernelSpec], problem: Problem, device: DeviceSpec, group_size: int
) -> dict[str, KernelSpec]:
    """The kernels `chosen`, but blocks share the keys of a forward tile, and a further kernel merges what they leave.

    Where the queries of `group_size` heads fit one tile, it holds them all.
    """
    forward, others = chosen["forward"], {entry: spec for entry, spec in chosen.items() if entry != "forward"}
    if group_size > 1:
        dims = forward.head_dim, forward.value_dim
        num_rows = problem.seqlen_q * group_size
        packed = specs(problem, dims, device, None, num_rows, deterministic=False)["forward"]
        if num_rows <= packed.block_q:
            forward = replace(packed, is_packed=True)
    combine = KernelSpec(
        family="sm80", entry="combine", dtype=forward.dtype, head_dim=forward.value_dim, value_dim=forward.value_dim,
        block_q=1, block_kv=1,
    )  # fmt: skip
    return {"forward": replace(forward, is_split=True), "combine": combine} | others


def _allowed(
    tiles: tuple[_Tile, ...], dims: tuple[int, int], largest: tuple[int, int] | None, most_sums: int | None
) -> Iterator[_Tile]:
    """The tiles; where `largest` is given those that are no larger, the most scores first, and of larger ones a part.

    Where a thread's sums are bounded, warps share all products of a tile, as those of gradients do.
    """
    if largest is None:
        yield from (_cut(tile, dims, tile[:2], most_sums) for tile in tiles)
        return
    cut = [_cut(tile, dims, largest, most_sums) for tile in tiles]
    yield from sorted(cut, key=lambda tile: (tile.block_q * tile.block_kv, tile in tiles), reverse=True)


@lru_cache(maxsize=1024)
def _cut(tile: _Tile, dims: tuple[int, int], largest: tuple[int, int], most_sums: int | None) -> _Tile:
    """A tile no larger than `largest`, of as many warps as can share what it is then."""
    block_q, block_kv = (_power_of_two(min(pair)) for pair in zip(tile[:2], largest))
    if most_sums is None:
        num_warps = block_q // min(tile.block_q // tile.num_warps, block_q)
        return tile._replace(block_q=block_q, block_kv=block_kv, num_warps=num_warps)
    cut = _shared(tile._replace(block_q=block_q, block_kv=block_kv), dims)
    while block_kv > _SMALLEST and cut.num_warps < tile.num_warps and _num_sums(cut, dims) > most_sums:
        block_kv //= 2
        cut = _shared(tile._replace(block_q=block_q, block_kv=block_kv), dims)
    return cut


def _shared(tile: _Tile, dims: tuple[int, int]) -> _Tile:
    """A tile of the gradients, but of no more warps than can share each of its products."""
    products = [(tile.block_q, dims[0]), (tile.block_kv, dims[0]), (tile.block_kv, dims[1])]
    if max(dims) <= 128:  # gradients of wider rows take more warps than scores of small blocks have parts for
        products.append(tile[:2])
    num_warps = tile.num_warps
    while not all(can_share(rows, columns, num_warps) for rows, columns in products):
        num_warps //= 2
    return tile._replace(num_warps=num_warps)


def _num_sums(tile: _Tile, dims: tuple[int, int]) -> float:
    """Registers that a thread of the gradients fills with S, dP, dK and dV."""
    return tile.block_kv * (2 * tile.block_q + sum(dims)) / (32 * tile.num_warps)


def can_share(rows: int, columns: int, num_warps: int) -> bool:
    """Whether warps can share a product in whole pairs of fragments: `row_groups` of tile/warp_tile.cuh is not 0."""
    groups = (group for group in range(1, num_warps + 1) if num_warps % group == 0)
    return any(
        rows % (_SMALLEST * group) == 0 and columns % (_SMALLEST * (num_warps // group)) == 0 for group in groups
    )


def _power_of_two(most: int) -> int:
    return 1 << most.bit_length() - 1


_WORK_TILE, _REACH, _SCALE, _POINTER, _FLAG = 28, 24, 4, 8, 8  # bytes of what a block remembers of its tile


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a block: tiles of operands, and what a block remembers of its own."""
    both = spec.head_dim + spec.value_dim
    queries, keys, scores = spec.block_q * both, spec.block_kv * both, spec.block_q * spec.block_kv
    kept = _WORK_TILE + _REACH + _SCALE
    if spec.entry == "forward":  # o leaves by way of q's room
        elements = spec.block_q * max(spec.head_dim, spec.value_dim) + keys
        return spec.dtype.itemsize * elements + 2 * _POINTER + kept + _FLAG
    if spec.entry == "backward_rows":
        return spec.dtype.itemsize * (queries + spec.num_stages * keys) + 2 * _POINTER + kept + _FLAG
    if spec.entry == "backward":
        statistics = 2 * 4 * spec.num_stages * spec.block_q
        elements = keys + spec.num_stages * queries + 2 * scores
        return spec.dtype.itemsize * elements + statistics + 5 * _POINTER + kept + _FLAG
    if spec.entry == "combine":  # sums of its groups of threads
        return (8 if spec.value_dim > 192 else 16) * spec.value_dim * 4
    return spec.dtype.itemsize * spec.block_q * spec.head_dim if spec.entry == "convert_dq" else 0
