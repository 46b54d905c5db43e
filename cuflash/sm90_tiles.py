"""Tiles of the sm90 family: warpgroups of 64 queries, backward of 64 keys, and one more that brings what they read."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from .device import DeviceSpec
from .errors import UnsupportedProblem
from .problem import Problem
from .source import KernelSpec

ROWS = 64  # of queries, of a warpgroup
LIST_BLOCK = (128, 128)  # of a list that is made for the kernels
_STAGES, _NARROW_STAGES = 2, 4  # a power of two, as rings count; up to 64 columns there is room for more
_SMALLEST = 16  # columns of a product
_TASKS = 4  # tiles that they know of
_ROOM, _BARRIER, _TASK, _SPAN, _NOTE, _KIND, _REST = 16, 8, 144, 12, 20, 4, 8  # bytes that warpgroups tell each other
_IN_STACK = 12  # more of a task where dO is brought too
_BACKWARD_KEYS, _BACKWARD_STAGES, _BACKWARD_NOTE, _BACKWARD_WORK, _BACKWARD_REST = 128, 3, 88, 104, 48
_STATISTICS_WARPS = 4  # as measured: experiments/results/sm90_steps.log, 28
_WIDE_STAGES, _MOST_BYTES, _TOLD_BYTES = 2, 227 << 10, 5 << 10  # of attention/query_ring.cuh


class _Tile(NamedTuple):
    block_q: int
    block_kv: int


# By the wider of the two dimensions: as many scores as registers hold beside O, in two warpgroups. Without a list,
# which leaves no registers for it, in more: in three, with fewer registers each, where a query sees so many keys that
# it counts less what a tile costs beside its steps; in four, whose steps are short, where it sees fewer, if there are
# FEWEST_TILES for each multiprocessor: of fewer, long ones would end late.
_FORWARD = {64: _Tile(128, 128), 128: _Tile(128, 128), 192: _Tile(128, 96), 256: _Tile(128, 80)}
_FORWARD_OF_THREE = {64: (512, _Tile(192, 128)), 128: (4096, _Tile(192, 80))}
_FORWARD_OF_FOUR = {64: (1536, _Tile(256, 64))}
FEWEST_TILES = 2
# Of a list: how many blocks of one warpgroup share a multiprocessor, and stages.
_LISTED_SMALL = {64: (3, _STAGES), 128: (2, _STAGES + 1)}


def forward_spec(
    problem: Problem, dims: tuple[int, int], device: DeviceSpec, largest: tuple[int, int] | None, num_keys: float
) -> KernelSpec:
    """The forward kernel for a problem in rooms for dims (head_dim, value_dim), with tiles that divide `largest`, if
    given, for queries that see so many keys on average.

    Raises
    ------
    UnsupportedProblem
        The device has another compute capability than 9.0.
    """
    if device.compute_capability != (9, 0):
        raise UnsupportedProblem([f"kernel='sm90' needs compute capability 9.0; got {device.name}: use kernel='auto'"])
    width = next(width for width in _FORWARD if width >= max(dims))
    (block_q, block_kv), num_queries = _FORWARD[width], problem.seqlen_q
    if largest is None:
        fewest, of_three = _FORWARD_OF_THREE.get(width, (inf, _FORWARD[width]))
        most, of_four = _FORWARD_OF_FOUR.get(width, (0, of_three))
        num_tiles = problem.mask_shape.num_batch * problem.num_heads * -(-num_queries // of_four.block_q)
        if num_keys < most and num_tiles >= FEWEST_TILES * device.num_processors:
            block_q, block_kv = of_four
        elif num_keys >= fewest:
            block_q, block_kv = of_three
    if num_queries <= block_q - ROWS:
        block_q = ROWS * max(1, -(-num_queries // ROWS))
        block_kv = max(block_kv, _FORWARD[width].block_kv)
    if largest is not None:
        block_q = next((rows for rows in (2 * ROWS, ROWS) if rows <= block_q and largest[0] % rows == 0), ROWS)
        if block_q == ROWS:
            block_kv = min(block_kv, ROWS)  # so that several blocks fit
        if largest[1] % block_kv:
            block_kv = max(_SMALLEST, _power_of_two(min(largest[1], block_kv)))
    spec = KernelSpec(
        family="sm90", entry="forward", dtype=problem.dtype, head_dim=dims[0], value_dim=dims[1], block_q=block_q,
        block_kv=block_kv, num_warps=4 * (1 + block_q // ROWS), min_blocks=1, is_listed=largest is not None,
        num_stages=_NARROW_STAGES if width <= 64 and block_q > ROWS else _STAGES,
    )  # fmt: skip
    # One warpgroup of consumers leaves tensor cores idle while it reckons, so several blocks share a multiprocessor.
    if block_q > ROWS or width > 128:
        return spec
    blocks, stages = (2, _STAGES) if largest is None else _LISTED_SMALL[width]
    small = replace(spec, min_blocks=blocks, num_stages=stages)
    return small if blocks * (shared_bytes(small) + 1024) <= device.tile_memory_bytes + 1024 else spec


def backward_specs(
    dtype: np.dtype[Any], dims: tuple[int, int], largest: tuple[int, int] | None, *, deterministic: bool
) -> dict[str, KernelSpec]:
    """The backward kernels by entry, of rooms for dims or wider ones; none where dims are wider, or a list's blocks
    smaller, than their tiles.

    The two warpgroups of consumers share dQ of a tile of queries: 64 rows each, or of 64 rows whole panels of columns.
    Beyond 128 columns a tile has as many keys as dK and dV leave registers for, or of a list's blocks an even part.
    Where every result must repeat, or a list's blocks are smaller, dQ has a kernel of its own, up to 128 columns.
    """
    widest = max(dims)
    if widest <= 128 and (deterministic or (largest is not None and min(largest) < 2 * ROWS)):
        return _backward_in_two_walks(dtype, dims, largest)
    if deterministic:
        return {}
    head_dim, block_q = (dims[0], 2 * ROWS) if widest <= 64 else (max(dims[0], 128), ROWS)
    entry, value_dim, block_kv, stages = "backward", dims[1], _BACKWARD_KEYS, _BACKWARD_STAGES
    if widest > 128:
        entry, value_dim, stages = "backward_wide", max(dims[1], 128), _WIDE_STAGES
        block_kv = 96 if head_dim + value_dim <= 384 else 80
        if largest is not None and largest[1] % block_kv:
            block_kv = ROWS
    if largest is not None and (largest[0] < block_q or largest[1] < block_kv):
        return {}
    backward = KernelSpec(
        family="sm90", entry=entry, dtype=dtype, head_dim=head_dim, value_dim=value_dim, block_q=block_q,
        block_kv=block_kv, num_warps=12, min_blocks=1, is_listed=largest is not None, num_stages=stages, dq_adds=4,
    )  # fmt: skip
    convert = replace(backward, entry="convert_dq", num_warps=8, num_stages=1)
    statistics = replace(convert, entry="backward_statistics", num_warps=_STATISTICS_WARPS, dq_adds=0)
    return {"backward_statistics": statistics, "backward": backward, "convert_dq": convert}


def _backward_in_two_walks(
    dtype: np.dtype[Any], dims: tuple[int, int], largest: tuple[int, int] | None
) -> dict[str, KernelSpec]:
    """The same where one kernel makes dK and dV and another dQ: one warpgroup of consumers each, of which two share a
    multiprocessor."""
    if largest is not None and min(largest) < ROWS:
        return {}
    stages = _NARROW_STAGES if max(dims) <= 64 else _STAGES
    rows = KernelSpec(
        family="sm90", entry="backward_rows", dtype=dtype, head_dim=dims[0], value_dim=dims[1], block_q=ROWS,
        block_kv=ROWS, num_warps=8, min_blocks=2, is_listed=largest is not None, num_stages=stages,
    )  # fmt: skip
    statistics = replace(
        rows, entry="backward_statistics", num_warps=_STATISTICS_WARPS, min_blocks=1, num_stages=1
    )  # fmt: skip
    return {"backward_statistics": statistics, "backward": replace(rows, entry="backward"), "backward_rows": rows}


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a block: its tile, rings of what it steps over, and what warpgroups tell each other."""
    both, stages = spec.head_dim + spec.value_dim, spec.num_stages
    if spec.entry in ("backward_statistics", "convert_dq"):
        return 0
    if spec.entry in ("backward", "backward_wide"):
        scores = spec.block_q * spec.block_kv
        elements = spec.block_kv * both + stages * spec.block_q * spec.head_dim
        if spec.entry == "backward_wide":
            elements += 3 * scores
        elif spec.dq_adds:
            elements += scores + 2 * spec.block_q * spec.head_dim
        of_do = spec.block_q * spec.value_dim
        fits = spec.dtype.itemsize * (elements + stages * of_do) + _TOLD_BYTES <= _MOST_BYTES
        do_stages = stages if spec.entry == "backward" or fits else 1
        queries = 4 * (spec.block_q // 16 + known_words(spec) + spec.block_q * -(-spec.block_kv // 32))
        told = stages * (queries + _BACKWARD_NOTE + _BARRIER) + (stages + 1) * _BACKWARD_WORK + _BACKWARD_REST
        told += _ROOM * (2 + stages + do_stages)
        told += -told % 16
        return spec.dtype.itemsize * (elements + do_stages * of_do) + told
    brings_do = spec.entry == "backward_rows"
    is_small = spec.is_listed and spec.block_q == ROWS
    q_rooms = 2 if max(spec.head_dim, spec.value_dim) <= 128 and not is_small and not brings_do else 1
    of_queries = spec.head_dim + spec.value_dim * brings_do
    elements = q_rooms * spec.block_q * of_queries + stages * spec.block_kv * both
    groups = spec.block_q // ROWS
    task = _TASK + _SPAN * groups + _IN_STACK * brings_do
    told = _ROOM * (q_rooms + 2 * stages) + _TASKS * (_ROOM + -(-task // 16) * 16)
    told += (_NOTE + _KIND * groups) * stages + _REST
    return spec.dtype.itemsize * elements + told


def known_words(spec: KernelSpec) -> int:
    """Words of what gradients know of a tile of queries, KnownQueries of attention/known_queries.cuh."""
    words = 2 * spec.block_q + spec.block_q // 16 + 3
    return words + -words % 4


def boxes(spec: KernelSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of the boxes that bring operands: a panel of a tile each, PanelTile of tile/panel_tile.cuh."""
    head_panel, value_panel = (64 if dim % 64 == 0 else 32 for dim in (spec.head_dim, spec.value_dim))
    found = {"q": (spec.block_q, head_panel), "k": (spec.block_kv, head_panel), "v": (spec.block_kv, value_panel)}
    if spec.entry == "forward":
        return found | {"o": (ROWS // 4, value_panel)}  # of a warp
    if spec.entry == "backward_wide" and spec.head_dim % 128:  # half of the columns are whole panels
        found["k"] = (spec.block_kv, 32)
    return found | {"do": (spec.block_q, value_panel)}


def _power_of_two(most: int) -> int:
    return 1 << most.bit_length() - 1
