"""How large a tile is: legality by arithmetic, choice by preference; the numbers come from DeviceSpec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from .arrays import BFLOAT16, accumulator_dtype
from .device import DeviceSpec
from .errors import UnsupportedProblem
from .problem import Problem
from .source import KernelSpec

# On the host a tile of scores passes through max, exp2 and two matrix products; experiments/results/tile_sweep.csv has
# the times. Tall tiles spare Python's share; the backward pass slows down once two tiles leave the level-2 cache.
_HOST_BLOCK_Q = 512


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys that one step of a kernel holds.

    >>> Tile(128, 64)
    Tile(block_q=128, block_kv=64)
    """

    block_q: int
    block_kv: int


def host_tile(problem: Problem, device: DeviceSpec) -> Tile:
    """The tile that the cpu executor works with."""
    keys = device.tile_memory_bytes // (problem.accumulator.itemsize * _HOST_BLOCK_Q)
    return Tile(_HOST_BLOCK_Q, max(512, 1 << (keys.bit_length() - 1)))


# Kernels have room for these dimensions; a problem's own are rounded up.
DIMS = (32, 64, 96, 128, 192, 256)
THREADS = 128  # of a block of the simt family: kThreads
_SPARE = 32
_SIDES = (128, 64, 32, 16, 8)  # of a tile of the simt family


class _Entry(NamedTuple):
    """What an entry of the simt family works on: it keeps rows of one side and steps over the other."""

    rows_are_queries: bool
    num_scores: int  # tiles of scores in registers
    sums: tuple[str, ...]  # dimensions of the accumulators in registers
    registers: int  # that both may fill of a thread's 255: beyond it times rose or registers spilled


_SIMT = {
    "forward": _Entry(True, 1, ("value_dim",), 144),
    "backward_rows": _Entry(True, 2, ("head_dim",), 112),
    "backward_columns": _Entry(False, 2, ("head_dim", "value_dim"), 160),
}
ENTRIES = {"simt": tuple(_SIMT)}


def kernel_specs(
    family: str, problem: Problem, device: DeviceSpec, largest: tuple[int, int] | None = None
) -> dict[str, KernelSpec]:
    """The kernels of a family that serve a problem on a device, by entry.

    Parameters
    ----------
    largest : (block_q, block_kv), optional
        What tiles may not exceed: the blocks of a list.

    Raises
    ------
    UnsupportedProblem
        No tile fits the device's shared memory.
    """
    if problem.dtype == BFLOAT16 and device.compute_capability is not None and device.compute_capability < (8, 0):
        raise UnsupportedProblem([f"bfloat16 needs compute capability 8.0; {device.name} is older: use float16 or float32"])
    head_dim, value_dim = (next(room for room in DIMS if room >= dim) for dim in (problem.head_dim, problem.value_dim))
    specs = {}
    for entry in ENTRIES[family]:
        smallest = KernelSpec(
            family=family, entry=entry, dtype=problem.dtype, head_dim=head_dim, value_dim=value_dim,
            block_q=_SIDES[-1], block_kv=_SIDES[-1],
        )  # fmt: skip
        specs[entry] = _simt_spec(smallest, device, largest or (_SIDES[0], _SIDES[0]))
    return specs


def _simt_spec(smallest: KernelSpec, device: DeviceSpec, largest: tuple[int, int]) -> KernelSpec:
    """The tile that multiplies most for what it loads, of those that fit a multiprocessor twice, or else once."""
    sides = [replace(smallest, block_q=block_q, block_kv=block_kv) for block_q, block_kv in product(_SIDES, _SIDES)]
    legal = [
        spec for spec in sides if spec.block_q <= largest[0] and spec.block_kv <= largest[1] and _is_simt_tile(spec)
    ]
    legal.sort(key=_preference, reverse=True)
    for room in (device.tile_memory_bytes // 2, device.tile_memory_bytes):
        for spec in legal:
            if shared_bytes(spec) <= room:
                return spec
    raise UnsupportedProblem(
        [
            f"{device.name} must have {min(map(shared_bytes, legal))} bytes of shared memory a block for "
            f"{smallest.name} with head_dim {smallest.head_dim}, value dim {smallest.value_dim} in {smallest.dtype}; "
            f"it has {device.tile_memory_bytes}: use a narrower dtype"
        ]
    )


def _preference(spec: KernelSpec) -> tuple[float, int]:
    """Products for every element loaded, where those of a step count twice: the rows stay. Then the tallest."""
    rows, step = _rows_and_step(spec)
    return rows * step / (rows + 2 * step), rows


def _rows_and_step(spec: KernelSpec) -> tuple[int, int]:
    sides = spec.block_q, spec.block_kv
    return sides if _SIMT[spec.entry].rows_are_queries else sides[::-1]


def _is_simt_tile(spec: KernelSpec) -> bool:
    """Whether threads share its rows evenly and its accumulators fit their registers."""
    entry = _SIMT[spec.entry]
    rows, step = _rows_and_step(spec)
    sums = sum(getattr(spec, dim) for dim in entry.sums)
    words = rows * (entry.num_scores * step + sums) * accumulator_dtype(spec.dtype).itemsize // (4 * THREADS)
    # Conversions take registers too, and so do the operands of very wide rows.
    spare = _SPARE * (spec.dtype != np.float32) + _SPARE * (sums > 384)
    return rows % 16 == 0 and (words <= entry.registers - spare or rows == 16 and step == _SIDES[-1])


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a block; every row is one vector of 16 bytes longer than it is wide."""
    itemsize = accumulator_dtype(spec.dtype).itemsize
    vector = 16 // itemsize
    rows, step = _rows_and_step(spec)
    head_row, value_row = spec.head_dim + vector, spec.value_dim + vector
    if spec.entry == "forward":  # keys and values take turns
        elements = rows * head_row + step * max(head_row, value_row)
    else:
        elements = (rows + step) * (head_row + value_row)
    return (elements + rows * (step + vector)) * itemsize
