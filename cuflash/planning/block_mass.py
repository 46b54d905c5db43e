"""The launch of the kernel that sums softmax weights over the blocks of a grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import UnsupportedProblem
from .device import DeviceSpec
from .families.family import DIMS
from .families.simt import shared_bytes
from .launches import MATRICES, Feature, Kernels, Launch, Pass
from .problem import Problem
from .score_launches import with_score
from .spec import KernelSpec

MASS_GRID = np.dtype(
    [("mass", MATRICES), ("block_q", np.int64), ("block_kv", np.int64), ("has_lse", np.int64)], align=True
)
_WIDEST_CHUNK = 128  # columns of head_dim that shared memory holds at a time
_SIDES = {np.dtype(np.float32): 64, np.dtype(np.float64): 32}  # of a tile, by accumulator


def mass_shape(problem: Problem, block: tuple[int, int]) -> tuple[int, ...]:
    """(*batch, num_heads, num_q_blocks, num_kv_blocks), without the heads for 2-D arguments."""
    grid = -(-problem.seqlen_q // block[0]), -(-problem.seqlen_kv // block[1])
    return (*problem.lse_shape()[:-1], *grid)


def mass_spec(problem: Problem, device: DeviceSpec) -> KernelSpec:
    """The kernel with the widest chunks of head_dim that fit a multiprocessor twice, or else once.

    Raises
    ------
    UnsupportedProblem
        No chunk fits.
    """
    side = _SIDES[problem.accumulator]
    needed = next((dim for dim in DIMS if dim >= problem.head_dim), _WIDEST_CHUNK)
    specs = [
        KernelSpec(
            family="simt", entry="block_mass", dtype=problem.dtype, head_dim=dim, value_dim=DIMS[0],
            block_q=side, block_kv=side,
        )
        for dim in reversed(DIMS)
        if dim <= min(needed, _WIDEST_CHUNK)
    ]  # fmt: skip
    for available in (device.tile_memory_bytes // 2, device.tile_memory_bytes):
        for spec in specs:
            if shared_bytes(spec) <= available:
                return spec
    raise UnsupportedProblem(
        [f"{device.name} must have {shared_bytes(specs[-1])} bytes of shared memory a block; it has "
         f"{device.tile_memory_bytes}: use a narrower dtype"]
    )  # fmt: skip


def mass_kernels(problem: Problem, device: DeviceSpec, block: tuple[int, int], *, has_lse: bool) -> Kernels:
    """A forward pass of one launch that writes the sums of each block's weights, and lse unless it is given."""
    spec = mass_spec(problem, device)
    height = _queries_of_thread_block(block[0], spec.block_q)
    launch = Launch(
        spec=spec,
        tiles=problem.num_heads * -(-problem.seqlen_q // height),
        shared_bytes=shared_bytes(spec),
        reads=("q", "k", "lse") if has_lse else ("q", "k"),
        writes=("mass",) if has_lse else ("mass", "lse"),
        features=("mass",),
    )
    numbers: dict[str, Any] = {"block_q": block[0], "block_kv": block[1], "has_lse": has_lse}
    feature = Feature("mass", MASS_GRID, numbers)
    kernels = Kernels(
        forward=Pass({"block_mass": launch}, features=(feature,), zeroed=("mass",)), backward=Pass({})
    )
    return kernels if problem.score is None else replace(with_score(kernels, problem), backward=Pass({}))


def _queries_of_thread_block(block_q: int, tile_rows: int) -> int:
    """Rows of whole blocks that a thread block owns, as `mass_queries` of the kernels counts them."""
    return block_q if block_q >= tile_rows else tile_rows // block_q * block_q
