"""The launch of the kernel that sums softmax weights over the blocks of a grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..blocks.work_list import ListedWork, WorkList
from ..errors import UnsupportedProblem
from .device import DeviceSpec
from .families import SIMT, SM80, SM90, sm80, sm90
from .families.family import DIMS, Family
from .families.simt import shared_bytes as simt_shared_bytes
from .launches import MATRICES, Feature, Kernels, Launch, Pass, TileOrder, Workspace
from .problem import Problem
from .score_launches import with_score
from .spec import KernelSpec

MASS_GRID = np.dtype(
    [
        ("mass", MATRICES), ("block_q", np.int64), ("block_kv", np.int64), ("has_lse", np.int64),
        ("turned_columns", np.int64), ("row_masses", np.uint64),
    ],
    align=True,
)  # fmt: skip
_WIDEST_CHUNK = 128  # columns of head_dim that shared memory holds at a time
# On tensor cores: columns of a chunk where rows come in chunks, queries of a tile, and keys of the narrowest block.
_CHUNK, _QUERIES, _LEAST_KEYS = 64, 128, 8
_FAMILIES: dict[str, Family] = {SM80: sm80.Sm80(), SM90: sm90.Sm90()}
_SIDES = {np.dtype(np.float32): 64, np.dtype(np.float64): 32}  # sides of a tile, by accumulator


def mass_shape(problem: Problem, block: tuple[int, int]) -> tuple[int, ...]:
    """(*batch, num_heads, num_q_blocks, num_kv_blocks), without the heads for 2-D arguments."""
    grid = -(-problem.seqlen_q // block[0]), -(-problem.seqlen_kv // block[1])
    return (*problem.lse_shape()[:-1], *grid)


def mass_spec(problem: Problem, device: DeviceSpec, block_kv: int, *, is_listed: bool) -> KernelSpec:
    """The kernel of tensor cores where that serves elements, chip and blocks of keys, else the one of multiply-adds.

    Raises
    ------
    UnsupportedProblem
        No tile fits a multiprocessor.
    """
    capability = device.compute_capability or (0, 0)
    if problem.dtype in sm80.Sm80.dtypes and capability >= sm80.Sm80.oldest and block_kv >= _LEAST_KEYS:
        spec = _tensor_core_spec(problem, is_listed, is_hopper=capability[0] == 9)
        if _FAMILIES[spec.family].shared_bytes(spec) <= device.tile_memory_bytes:
            return spec
    return _multiply_add_spec(problem, device)


def _tensor_core_spec(problem: Problem, is_listed: bool, *, is_hopper: bool) -> KernelSpec:
    """Rows of q that fit shared memory twice stay there; longer ones come in chunks, as those of k do.

    On Hopper a warp beside those that multiply copies, and two thread blocks share a multiprocessor unless rows
    come in chunks.
    """
    splits_head_dim = problem.head_dim > _WIDEST_CHUNK
    dim = _CHUNK if splits_head_dim else next(dim for dim in DIMS if dim >= problem.head_dim)
    spec = KernelSpec(
        family=SM80, entry="block_mass", dtype=problem.dtype, head_dim=dim, value_dim=DIMS[0], block_q=_QUERIES,
        block_kv=128, num_warps=8, min_blocks=1, num_stages=3 if splits_head_dim else 2, is_listed=is_listed,
        splits_head_dim=splits_head_dim,
    )  # fmt: skip
    if not is_hopper:
        return spec
    stages, blocks = (6, 1) if splits_head_dim else (2, 2)
    return replace(spec, family=SM90, num_warps=9, min_blocks=blocks, num_stages=stages)


def _multiply_add_spec(problem: Problem, device: DeviceSpec) -> KernelSpec:
    """The kernel with the widest chunks of head_dim that fit a multiprocessor twice, or else once."""
    side = _SIDES[problem.accumulator]
    needed = next((dim for dim in DIMS if dim >= problem.head_dim), _WIDEST_CHUNK)
    specs = [
        KernelSpec(
            family=SIMT, entry="block_mass", dtype=problem.dtype, head_dim=dim, value_dim=DIMS[0],
            block_q=side, block_kv=side,
        )
        for dim in reversed(DIMS)
        if dim <= min(needed, _WIDEST_CHUNK)
    ]  # fmt: skip
    for available in (device.tile_memory_bytes // 2, device.tile_memory_bytes):
        for spec in specs:
            if simt_shared_bytes(spec) <= available:
                return spec
    raise UnsupportedProblem(
        [f"{device.name} must have {simt_shared_bytes(specs[-1])} bytes of shared memory a block; it has "
         f"{device.tile_memory_bytes}: use a narrower dtype"]
    )  # fmt: skip


def mass_kernels(
    problem: Problem,
    device: DeviceSpec,
    block: tuple[int, int],
    work: WorkList,
    *,
    has_lse: bool,
    turned_columns: int = 0,
) -> Kernels:
    """A forward pass of one launch that writes the sums of each block's weights, and lse unless it is given.

    Rows of q are groups of `turned_columns`, of which the last comes first, unless that is 0; `takes_turned_columns`
    says whether the kernel takes them.
    """
    spec = mass_spec(problem, device, block[1], is_listed=isinstance(work, ListedWork))
    tiles = problem.num_heads * -(-problem.seqlen_q // _queries_of_thread_block(block[0], spec.block_q))
    launch = Launch(
        spec=spec,
        tiles=tiles,
        shared_bytes=_shared_bytes(spec),
        reads=("q", "k", "lse") if has_lse else ("q", "k"),
        writes=("mass",) if has_lse else ("mass", "lse"),
        features=("mass",),
    )
    numbers: dict[str, Any] = {"block_q": block[0], "block_kv": block[1], "has_lse": has_lse,
                               "turned_columns": turned_columns}  # fmt: skip
    workspaces: dict[str, Workspace] = {}
    tables: tuple[str, ...] = ()
    if spec.family != SIMT:
        most = _FAMILIES[spec.family].resident_blocks(spec, device)
        boxes = sm90.boxes(spec) if spec.family == SM90 else {}
        counted = (*launch.writes, "row_masses", "tile_counter")
        launch = replace(launch, max_blocks=most, boxes=boxes, writes=counted)
        rows = launch.grid(problem.mask_shape.num_batch) * -(-problem.seqlen_kv // block[1]) * spec.block_q
        workspaces, tables = {"row_masses": Workspace((rows,), np.dtype(np.float32))}, ("row_masses",)
        workspaces["tile_counter"] = Workspace((1,), np.dtype(np.int32), is_zeroed=True)
    forward = Pass({"block_mass": launch}, workspaces, (Feature("mass", MASS_GRID, numbers, tables),))
    # The longest tiles of the heads that thread blocks work on together come first.
    heads = max(1, (launch.max_blocks or 1) * problem.num_heads // max(tiles, 1))
    kernels = Kernels(forward=forward, backward=Pass({}), order=TileOrder(heads))
    return kernels if problem.score is None else replace(with_score(kernels, problem), backward=Pass({}))


def takes_turned_columns(problem: Problem, device: DeviceSpec, block_kv: int, columns: int) -> bool:
    """Return whether the kernel takes rows of q in reversed groups of columns: chunks must lie in one group."""
    return mass_spec(problem, device, block_kv, is_listed=False).splits_head_dim and columns % _CHUNK == 0


def _shared_bytes(spec: KernelSpec) -> int:
    return simt_shared_bytes(spec) if spec.family == SIMT else _FAMILIES[spec.family].shared_bytes(spec)


def _queries_of_thread_block(block_q: int, tile_rows: int) -> int:
    """Rows of whole blocks that a thread block owns, as `mass_queries` of the kernels counts them."""
    return block_q if block_q >= tile_rows else tile_rows // block_q * block_q
