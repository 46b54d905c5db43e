"""How large a tile is: legality by arithmetic, choice by preference; the numbers come from DeviceSpec."""

from __future__ import annotations

from dataclasses import dataclass

from .device import DeviceSpec
from .errors import UnsupportedProblem
from .problem import Problem

# Tiles of a GPU kernel, best first: FlashAttention-2 (arXiv 2307.08691, section 3.3) keeps 128 queries and as many
# keys as shared memory holds beside them.
_GPU_TILES = ((128, 128), (128, 64), (64, 64), (64, 32), (32, 32), (16, 32), (16, 16))
_STAGES = 2  # key and value tiles in flight

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


def choose_tile(problem: Problem, device: DeviceSpec) -> Tile:
    """The tile for a problem on a device.

    >>> import numpy as np
    >>> q = np.zeros((16, 128), np.float16)
    >>> choose_tile(Problem.of(q, q, q), DeviceSpec.gpu("H100"))
    Tile(block_q=128, block_kv=128)

    Raises
    ------
    UnsupportedProblem
        No tile fits the device's shared memory.
    """
    if device.compute_capability is None:
        keys = device.tile_memory_bytes // (problem.accumulator.itemsize * _HOST_BLOCK_Q)
        return Tile(_HOST_BLOCK_Q, max(512, 1 << (keys.bit_length() - 1)))
    for block_q, block_kv in _GPU_TILES:
        if shared_bytes(problem, block_q, block_kv) <= device.tile_memory_bytes:
            return Tile(block_q, block_kv)
    raise UnsupportedProblem(
        [
            f"{device.name} must have {shared_bytes(problem, *_GPU_TILES[-1])} bytes of shared memory a block for "
            f"head_dim={problem.head_dim}, value dim {problem.value_dim} in {problem.dtype}; "
            f"it has {device.tile_memory_bytes}: use a narrower dtype"
        ]
    )


def shared_bytes(problem: Problem, block_q: int, block_kv: int) -> int:
    """Shared memory of one tile of queries and the key and value tiles in flight."""
    keys_and_values = _STAGES * block_kv * (problem.head_dim + problem.value_dim)
    return (block_q * problem.head_dim + keys_and_values) * problem.dtype.itemsize
