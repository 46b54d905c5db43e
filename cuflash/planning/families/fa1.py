"""The fa1 family: the loops of FlashAttention-1 on tensor cores, to compare the algorithms of the papers.

A thread block works on one head. Its outer loop visits the keys and its inner loop the queries, whose running sums are
stored in device memory between iterations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...arrays import HALVES
from ...blocks.work_list import WorkList
from ..device import DeviceSpec
from ..launches import MATRICES, Feature, Kernels, Pass, Workspace, structure
from ..problem import Problem
from ..spec import FA1, Entry, KernelSpec
from .family import (
    BACKWARD_INPUTS,
    FORWARD_INPUTS,
    Family,
    Request,
    first_fitting,
    launch_of,
    no_tile_fits,
    query_tiles,
)
from .sm80 import Sm80

RUNNING = structure((MATRICES, "running_o", "running_statistics"))
_WIDEST = 128  # maximum head_dim and value_dim
_ROWS_OF_WARP = 16
_STATE_BYTES = 52  # bytes of the state of a thread block's outer loop
_STATISTICS = 2  # running numbers per query in addition to O: the maximum and the sum


class _Tile(NamedTuple):
    """The queries of an inner iteration, the keys of an outer iteration, and the stages of query tiles."""

    block_q: int
    block_kv: int
    num_stages: int


# Tiles by the compiled dimension, best first. The first tiles have the key counts of the authors' kernels,
# because the running sums are read and written once per tile of keys.
_FORWARD_TILES: dict[int, tuple[_Tile, ...]] = {
    64: (_Tile(128, 256, 2), _Tile(64, 128, 1)),
    128: (_Tile(128, 128, 2), _Tile(64, 128, 2), _Tile(64, 64, 1)),
}
# Maximum queries and keys of a backward tile: the keys of sm80's tile, and few enough queries that their sums fit
# in registers in addition to the state of the two loops.
_LARGEST_BACKWARD = {64: (64, 128), 128: (32, 128)}


def _forward_bytes(spec: KernelSpec) -> int:
    """Return the bytes of keys and values, and of the queries of all stages."""
    elements = spec.block_kv * (spec.head_dim + spec.value_dim) + spec.num_stages * spec.block_q * spec.head_dim
    return spec.dtype.itemsize * elements + _STATE_BYTES


def _backward_bytes(spec: KernelSpec) -> int:
    """Return the bytes of keys and values, of queries and dO of all stages, and of P and dS."""
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
    """FlashAttention-1 (arXiv 2205.14135), algorithms 1, 4 and 5, for compute capability 8.0 or higher."""

    name = FA1
    dtypes = HALVES
    rounds_weights = True
    oldest = (8, 0)

    def reasons(self, problem: Problem, device: DeviceSpec | None) -> list[str]:
        """Return why the family does not serve a problem; it supports only the features of the paper's algorithms."""
        reasons = [
            f"kernel='fa1' takes {name} of at most {_WIDEST}; got {dim}: use kernel='auto'"
            for name, dim in (("a head_dim", problem.head_dim), ("a value dim", problem.value_dim))
            if dim > _WIDEST
        ]
        if problem.score is not None:
            reasons.append("kernel='fa1' does not support score, softcap or bias; got one: use kernel='auto'")
        if problem.dropout is not None and not problem.dropout.reads_seed:  # a seed array is an operand
            reasons.append("kernel='fa1' does not support dropout; got one: use kernel='auto'")
        return reasons + super().reasons(problem, device)

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        forward = _forward_spec(Request(problem, device))
        return forward.block_q, forward.block_kv

    def specs(self, request: Request) -> dict[str, KernelSpec]:
        """Return the kernels by entry; the backward kernel shares sm80's products, and therefore its tile."""
        problem, largest, width = request.problem, request.largest, _width(request.problem)
        most = _LARGEST_BACKWARD[width]
        block = tuple(map(min, most, largest or most))
        wide = replace(problem, head_dim=width, value_dim=width)
        of_sm80 = Sm80().specs(Request(wide, request.device, (block[0], block[1])))["backward"]
        is_listed = largest is not None
        backward = replace(of_sm80, entry=_BACKWARD, min_blocks=1, dq_atomic_width=0, is_listed=is_listed)
        return {"forward": _forward_spec(request), "backward": backward}

    def launches(self, request: Request, work: WorkList) -> Kernels:
        problem, device, chosen = request.problem, request.device, self.specs(request)
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
    """Return the bytes that the forward and backward loops move to and from device memory, without a cache.

    Since an inner iteration visits `block_kv` keys, all inner iterations visit `visited_scores / block_kv` queries in
    total. For each, the forward pass reads q, and reads and writes O, m and l. The backward pass reads q, dO, lse and
    delta, and reads and writes dQ. Everything else is moved once.
    """
    forward, backward = kernels.forward.launches["forward"].spec, kernels.backward.launches["backward"].spec
    itemsize, number = problem.dtype.itemsize, problem.accumulator.itemsize
    q, v = itemsize * problem.head_dim, itemsize * problem.value_dim  # bytes of a row of q or k, and of v or o
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
    """Return the compiled dimension of the kernels, which is both their head_dim and their value_dim."""
    return next(width for width in _FORWARD_TILES if width >= max(problem.head_dim, problem.value_dim))


def _forward_spec(request: Request) -> KernelSpec:
    """Return the forward kernel with the first tile that fits; tiles are reduced to the block sizes of a list."""
    problem, device, largest = request.problem, request.device, request.largest
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
