"""The fa1 family: FlashAttention-1's own loops on tensor cores, to compare the algorithms of the papers.

A thread block works on one head. Its outer loop walks the keys and its inner loop the queries, whose running sums lie
in device memory between two iterations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...arrays import HALVES
from ...blocks.work_list import WorkList
from ..device import DeviceSpec
from ..launches import MATRICES, Feature, Kernels, Pass, Workspace
from ..problem import Problem
from ..spec import FA1, Entry, KernelSpec
from .family import (
    BACKWARD_INPUTS,
    FORWARD_INPUTS,
    Family,
    first_fitting,
    launch_of,
    list_block_of,
    no_tile_fits,
    query_tiles,
)
from .sm80 import Sm80

RUNNING = np.dtype([("running_o", MATRICES), ("running_statistics", MATRICES)], align=True)
_WIDEST = 128  # columns of q, k and v
_ROWS_OF_WARP = 16
_STATE_BYTES = 52  # what a block remembers of its outer loop
_STATISTICS = 2  # numbers of a query beside O: its maximum and its sum


class _Tile(NamedTuple):
    """Queries of an inner iteration, keys of an outer one, and stages of the tiles of queries."""

    block_q: int
    block_kv: int
    num_stages: int


# Tiles by the columns that kernels are compiled for, best first: as many keys as the paper's own kernels keep at a
# time, since device memory is read and written once for each tile of keys.
_FORWARD_TILES: dict[int, tuple[_Tile, ...]] = {
    64: (_Tile(128, 256, 2), _Tile(64, 128, 1)),
    128: (_Tile(128, 128, 2), _Tile(64, 128, 2), _Tile(64, 64, 1)),
}
# Queries and keys of a backward tile at most: as many keys as sm80's, and so few queries that their sums fit registers
# beside what the two loops count with.
_LARGEST_BACKWARD = {64: (64, 128), 128: (32, 128)}


def _forward_bytes(spec: KernelSpec) -> int:
    """Keys and values; queries of all stages."""
    elements = spec.block_kv * (spec.head_dim + spec.value_dim) + spec.num_stages * spec.block_q * spec.head_dim
    return spec.dtype.itemsize * elements + _STATE_BYTES


def _backward_bytes(spec: KernelSpec) -> int:
    """Keys and values; queries and dO of all stages; P and dS."""
    rows = spec.block_kv + spec.num_stages * spec.block_q
    elements = rows * (spec.head_dim + spec.value_dim) + 2 * spec.block_q * spec.block_kv
    return spec.dtype.itemsize * elements + _STATE_BYTES


_FORWARD = Entry(
    family=FA1, name="forward", shared_bytes=_forward_bytes, has_exponentials=True, products=(1, 1)
)  # fmt: skip
_BACKWARD = Entry(
    family=FA1, name="backward", shared_bytes=_backward_bytes, loads_do=True, holds_keys=True,
    has_exponentials=True, products=(3, 2),
)  # fmt: skip


class FlashAttention1(Family):
    """FlashAttention-1 (arXiv 2205.14135), algorithms 1, 4 and 5, for compute capability 8.0 and newer."""

    name = FA1
    dtypes = HALVES
    rounds_weights = True
    oldest = (8, 0)

    def reasons(self, problem: Problem, device: DeviceSpec | None) -> list[str]:
        """Why the family does not serve a problem: it has no kernels for what the paper's loops lack."""
        reasons = [
            f"kernel='fa1' takes {name} of at most {_WIDEST}; got {dim}: use kernel='auto'"
            for name, dim in (("a head_dim", problem.head_dim), ("a value dim", problem.value_dim))
            if dim > _WIDEST
        ]
        if problem.score is not None:
            reasons.append("kernel='fa1' must be given no score, softcap or bias; got one: use kernel='auto'")
        if problem.dropout is not None and not problem.dropout.reads_seed:  # else its seed is an operand
            reasons.append("kernel='fa1' must be given no dropout; got one: use kernel='auto'")
        return reasons + super().reasons(problem, device)

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        forward = _forward_spec(problem, device, None)
        return forward.block_q, forward.block_kv

    def specs(
        self,
        problem: Problem,
        device: DeviceSpec,
        largest: tuple[int, int] | None = None,
        *,
        deterministic: bool = False,
    ) -> dict[str, KernelSpec]:
        """The backward kernel has a part of sm80's tile, whose products it makes."""
        width = _width(problem)
        most = _LARGEST_BACKWARD[width]
        block = tuple(map(min, most, largest or most))
        wide = replace(problem, head_dim=width, value_dim=width)
        of_sm80 = Sm80().specs(wide, device, (block[0], block[1]))["backward"]
        is_listed = largest is not None
        backward = replace(of_sm80, entry=_BACKWARD, min_blocks=1, dq_atomic_width=0, is_listed=is_listed)
        return {"forward": _forward_spec(problem, device, largest), "backward": backward}

    def launches(
        self,
        problem: Problem,
        device: DeviceSpec,
        work: WorkList,
        *,
        deterministic: bool = False,
    ) -> Kernels:
        chosen = self.specs(problem, device, list_block_of(work))
        forward, backward = chosen["forward"], chosen["backward"]
        lse_shape, accumulator = problem.lse_shape(), problem.accumulator

        def sums(spec: KernelSpec, dim: int) -> Workspace:
            tiles = query_tiles(problem, work, spec.block_q)
            return Workspace((*lse_shape[:-1], tiles, spec.block_q * dim), accumulator)

        running = {
            "running_o": sums(forward, forward.value_dim),
            "running_statistics": Workspace((*lse_shape, _STATISTICS), accumulator),
        }
        forward_launch = launch_of(
            forward, device, problem.num_heads, (*FORWARD_INPUTS, *running), ("o", "lse", *running), ("running",)
        )
        between = {"delta": Workspace(lse_shape, accumulator), "dq_sum": sums(backward, backward.head_dim)}
        backward_launch = launch_of(
            backward, device, problem.num_kv_heads, (*BACKWARD_INPUTS, "o", "dlse", *between),
            ("dq", "dk", "dv", *between),
        )  # fmt: skip
        return Kernels(
            forward=Pass({"forward": forward_launch}, running, (Feature("running", RUNNING),)),
            backward=Pass({"backward": backward_launch}, between),
        )


def traffic(problem: Problem, kernels: Kernels, visited_scores: int) -> tuple[int, int]:
    """Bytes that the loops read from device memory or write to it, forward and backward, where no cache holds them.

    An inner iteration visits `block_kv` keys, so that all of them together visit `visited_scores / block_kv` queries.
    Forward it reads q, and reads and writes O, m and l. Backward it reads q, dO, lse and delta, and reads and writes
    dQ. Everything else is moved once.
    """
    forward, backward = kernels.forward.launches["forward"].spec, kernels.backward.launches["backward"].spec
    itemsize, number = problem.dtype.itemsize, problem.accumulator.itemsize
    q, v = itemsize * problem.head_dim, itemsize * problem.value_dim  # bytes of a row; those of k and o are the same
    num_heads = problem.num_batch_heads
    queries, keys = num_heads * problem.seqlen_q, num_heads * problem.seqlen_kv

    running = number * (forward.value_dim + _STATISTICS)
    inner = visited_scores // forward.block_kv * (q + 2 * running)
    forward_bytes = inner + keys * (q + v) + queries * (2 * running + v + number)

    dq, statistics = number * backward.head_dim, 2 * number
    inner = visited_scores // backward.block_kv * (q + v + 2 * dq + statistics)
    ends = queries * (2 * v + statistics + 2 * dq + q)
    return forward_bytes, inner + keys // problem.group_size * 2 * (q + v) + ends


def _width(problem: Problem) -> int:
    """Columns of q, k and v that the kernels are compiled for: one number for both dimensions."""
    return next(width for width in _FORWARD_TILES if width >= max(problem.head_dim, problem.value_dim))


def _forward_spec(problem: Problem, device: DeviceSpec, largest: tuple[int, int] | None) -> KernelSpec:
    """The forward kernel with the first of its tiles that fits; in a list, cut to its blocks."""
    width, specs = _width(problem), list[KernelSpec]()
    for tile in _FORWARD_TILES[width]:
        block_q, block_kv = (
            1 << min(side, most).bit_length() - 1 for side, most in zip(tile[:2], largest or tile[:2])
        )
        specs.append(KernelSpec(
            entry=_FORWARD, dtype=problem.dtype, head_dim=width, value_dim=width,
            block_q=block_q, block_kv=block_kv, num_warps=block_q // _ROWS_OF_WARP, min_blocks=1,
            is_listed=largest is not None, num_stages=tile.num_stages,
        ))  # fmt: skip
    if spec := first_fitting(specs, device):
        return spec
    raise no_tile_fits(specs[-1].shared_bytes, " for fa1_forward", device, "use kernel='auto'")
