"""The launch of the kernel that sums softmax weights over blocks of a grid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .device import DeviceSpec
from .families.family import Request, launch_of
from .families.sm80 import MASS_CHUNK
from .launches import MATRICES, POINTER, Feature, Kernels, Pass, TileOrder, Value, Workspace, structure
from .plan import KernelPlan
from .problem import Problem
from .routing import mass_kernel
from .score_launches import with_score

MASS_GRID = structure(
    (MATRICES, "mass"), (np.int64, "block_q", "block_kv", "has_lse", "turned_columns"), (POINTER, "row_masses")
)


def mass_shape(problem: Problem, block: tuple[int, int]) -> tuple[int, ...]:
    """Return (*batch, num_heads, num_q_blocks, num_kv_blocks), without num_heads for 2-D arguments."""
    grid = -(-problem.seqlen_q // block[0]), -(-problem.seqlen_kv // block[1])
    return (*problem.lse_shape()[:-1], *grid)


def mass_kernels(plan: KernelPlan, block: tuple[int, int], *, has_lse: bool, turned_columns: int = 0) -> Kernels:
    """Return a forward pass of one launch, which sums the weights of each block and, unless `has_lse`, computes lse.

    If `turned_columns` is not 0, rows of q consist of groups of that number of columns, and the groups are stored in
    reverse order. `takes_turned_columns` is true if the kernel supports this.
    """
    problem, device = plan.problem, plan.device
    spec = mass_kernel(Request.over(problem, device, plan.work), block[1])
    tiles = problem.num_heads * -(-problem.seqlen_q // _queries_of_thread_block(block[0], spec.block_q))
    reads, writes = (("q", "k", "lse"), ("mass",)) if has_lse else (("q", "k"), ("mass", "lse"))
    launch = launch_of(spec, device, tiles, reads, writes, ("mass",))
    numbers: dict[str, Value] = {"block_q": block[0], "block_kv": block[1], "has_lse": has_lse,
                                 "turned_columns": turned_columns}  # fmt: skip
    workspaces: dict[str, Workspace] = {}
    tables: tuple[str, ...] = ()
    if launch.max_blocks is not None:
        launch = replace(launch, writes=(*launch.writes, "row_masses", "tile_counter"))
        rows = launch.grid(problem.mask_shape.num_batch) * -(-problem.seqlen_kv // block[1]) * spec.block_q
        workspaces, tables = {"row_masses": Workspace((rows,), np.dtype(np.float32))}, ("row_masses",)
        workspaces["tile_counter"] = Workspace((1,), np.dtype(np.int32), is_zeroed=True)
    forward = Pass({"block_mass": launch}, workspaces, (Feature("mass", MASS_GRID, numbers, tables),))
    # Alternate between the heads that thread blocks process at the same time, so that their longest tiles come first.
    heads = max(1, (launch.max_blocks or 1) * problem.num_heads // max(tiles, 1))
    kernels = Kernels(forward=forward, backward=Pass({}), order=TileOrder(heads))
    return kernels if problem.score is None else replace(with_score(kernels, problem), backward=Pass({}))


def takes_turned_columns(problem: Problem, device: DeviceSpec, block_kv: int, columns: int) -> bool:
    """True if the kernel supports rows of q whose groups of columns are reversed: each chunk must be in one group."""
    return mass_kernel(Request(problem, device), block_kv).splits_head_dim and columns % MASS_CHUNK == 0


def _queries_of_thread_block(block_q: int, tile_rows: int) -> int:
    """Return the number of queries of a thread block, in whole blocks of the grid; the kernels have `mass_queries`."""
    return block_q if block_q >= tile_rows else tile_rows // block_q * block_q
