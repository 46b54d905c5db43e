"""The simt family: FlashAttention-2 in float32 and float64 arithmetic, for every dtype, mask and chip."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...arrays import DTYPES
from ...blocks.work_list import ListedWork, WorkList
from ...errors import UnsupportedProblem
from ..device import DeviceSpec
from ..launches import Kernels, Launch, Pass, TileOrder, Workspace
from ..problem import Problem
from ..sinks import sink_backward, sink_forward
from ..spec import KernelSpec
from . import SIMT
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

_THREADS = 128  # threads of a block, kThreads
_SPARE_REGISTERS = 32
_SIDES = (128, 64, 32, 16, 8)  # rows, or columns, of a tile
_SMALLEST_ROWS = 16  # that threads can share


class _EntryLimits(NamedTuple):
    """Limits of a kernel's tiles: it keeps rows of one side and steps over the other."""

    rows_are_queries: bool
    num_scores: int  # tiles of scores in registers
    sums: tuple[str, ...]  # dimensions of the accumulators in registers
    registers: int  # that both may fill of a thread's 255; beyond it times rose or registers spilled
    mma_registers: int  # the limit where tensor cores multiply
    max_rows: int = _SIDES[0]
    min_step: int = _SIDES[-1]


_LIMITS = {
    "forward": _EntryLimits(True, 1, ("value_dim",), 144, 176),
    "block_mass": _EntryLimits(True, 1, (), 144, 176),  # its tile is the one of `Simt.mass_spec`
    "backward_rows": _EntryLimits(True, 2, ("head_dim",), 112, 176),
    "backward_columns": _EntryLimits(False, 2, ("head_dim", "value_dim"), 160, 192),
    "backward": _EntryLimits(False, 1, ("head_dim", "value_dim"), 160, 144, max_rows=64, min_step=16),  # 128 rows spill
}
_MASS_SIDES = {np.dtype(np.float32): 64, np.dtype(np.float64): 32}  # sides of block_mass's tile, by accumulator
_STATISTICS_BLOCK_Q = 64  # queries of backward_statistics, which multiplies nothing and keeps nothing


class Simt(Family):
    """Kernels on multiply-add units, and for float64 on tensor cores."""

    name = SIMT
    dtypes = DTYPES
    operands = ("sink", "dropout_seed")

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        """The forward tile, but no smaller than the smallest tile of the backward kernels."""
        forward = self._spec("forward", problem, device, None)
        return max(_SMALLEST_ROWS, forward.block_q), max(_SMALLEST_ROWS, forward.block_kv)

    def specs(
        self,
        problem: Problem,
        device: DeviceSpec,
        largest: tuple[int, int] | None = None,
        *,
        deterministic: bool = False,
    ) -> dict[str, KernelSpec]:
        """The kernels by entry; in two walks over the scores where dQ cannot be added up atomically, or not as fast.

        Atomic additions need dQ's own memory in the accumulator's dtype. In float32 one walk takes 0.79, 0.78 and 0.85
        of two walks' time at 32, 64 and 96 columns; in float64 0.72 at 32, 1.20 at 64 and 0.90 at 128
        (simt_walks.log of b648872e), so gradients of float64 with 33 to 64 columns take two walks.
        """
        is_slower_in_one = problem.dtype == np.float64 and 32 < max(problem.head_dim, problem.value_dim) <= 64
        in_two_walks = deterministic or problem.dtype != problem.accumulator or is_slower_in_one
        backward = ("backward_rows", "backward_columns") if in_two_walks else ("backward_statistics", "backward")
        return {entry: self._spec(entry, problem, device, largest) for entry in ("forward", *backward)}

    def _spec(
        self, entry: str, problem: Problem, device: DeviceSpec, largest: tuple[int, int] | None
    ) -> KernelSpec:
        head_dim, value_dim = rounded_dims(problem)
        smallest = KernelSpec(
            family=self.name, entry=entry, dtype=problem.dtype, head_dim=head_dim, value_dim=value_dim,
            block_q=_SIDES[-1], block_kv=_SIDES[-1],
        )  # fmt: skip
        if entry == "backward_statistics":
            block_q = max(side for side in _SIDES if side <= min(_STATISTICS_BLOCK_Q, (largest or _SIDES)[0]))
            return replace(smallest, block_q=block_q)
        return self._largest_fitting(smallest, device, largest or (_SIDES[0], _SIDES[0]))

    def launches(
        self,
        problem: Problem,
        device: DeviceSpec,
        work: WorkList,
        *,
        deterministic: bool = False,
    ) -> Kernels:
        chosen = self.specs(problem, device, list_block_of(work), deterministic=deterministic)
        is_one_walk = "backward" in chosen
        backward_entries = ("backward_statistics", "backward") if is_one_walk else ("backward_rows", "backward_columns")
        launches = {entry: self._launch(chosen[entry], problem, work) for entry in ("forward", *backward_entries)}
        backward = Pass(
            {entry: launches[entry] for entry in backward_entries},
            {"delta": Workspace(problem.lse_shape(), problem.accumulator)},
        )
        return Kernels(
            forward=sink_forward(Pass({"forward": launches["forward"]}), problem, "forward"),
            backward=sink_backward(backward, problem),
            order=self._order(problem, device, work, chosen["forward"], chosen[backward_entries[1]]),
            is_repeatable=not is_one_walk,
        )

    def _launch(self, spec: KernelSpec, problem: Problem, work: WorkList) -> Launch:
        query_tile_count = problem.num_heads * query_tiles(problem, work, spec.block_q)
        key_tile_count = problem.num_kv_heads * key_tiles(problem, work, spec.block_kv)
        rows_inputs = ("q", "k", "v", *STATISTICS_INPUTS)
        tiles, reads, writes = {
            "forward": (query_tile_count, FORWARD_INPUTS, ("o", "lse")),
            "backward_statistics": (query_tile_count, STATISTICS_INPUTS, ("delta", "dq")),
            "backward": (key_tile_count, (*BACKWARD_INPUTS, "delta"), ("dq", "dk", "dv")),
            "backward_rows": (query_tile_count, rows_inputs, ("dq", "delta")),
            "backward_columns": (key_tile_count, (*BACKWARD_INPUTS, "delta"), ("dk", "dv")),
        }[spec.entry]
        return Launch(spec=spec, tiles=tiles, shared_bytes=self.shared_bytes(spec), reads=reads, writes=writes)

    def _order(
        self, problem: Problem, device: DeviceSpec, work: WorkList, forward: KernelSpec, backward: KernelSpec
    ) -> TileOrder:
        """Let all heads alternate with a list.

        Multiply-adds take the time, not copies of K and V. The fewer heads alternate, the more of the GPU is idle at
        the end (simt_sparse.log of b648872e).
        """
        if isinstance(work, ListedWork):
            num_heads = problem.num_batch_heads
            return TileOrder(num_heads, num_heads)
        return self.order_of_waves(problem, device, work, forward, backward)

    def _largest_fitting(
        self, smallest: KernelSpec, device: DeviceSpec, largest: tuple[int, int]
    ) -> KernelSpec:
        """The tile that multiplies most for what it loads, of those that fit a multiprocessor twice, or else once.

        Tensor cores multiply where any of their tiles fits: they share 32 rows, so blocks of a list may be too short.
        """
        legal = [_legal_tiles(replace(smallest, mma_rows=rows), largest) for rows in _mma_rows(smallest.dtype, device)]
        for tiles in legal:
            for available, spec in product((device.tile_memory_bytes // 2, device.tile_memory_bytes), tiles):
                if shared_bytes(spec) <= available:
                    return spec
        what = f"{smallest.name} with head_dim {smallest.head_dim}, value dim {smallest.value_dim} in {smallest.dtype}"
        needed = min((shared_bytes(spec) for tiles in legal for spec in tiles), default=None)
        if needed is None:
            raise UnsupportedProblem(
                [f"no tile of {what} fits a list's blocks of {largest}: use larger blocks or a narrower dtype"]
            )
        raise UnsupportedProblem(
            [
                f"{device.name} must have {needed} bytes of shared memory a block for {what}; it has "
                f"{device.tile_memory_bytes}: use a narrower dtype"
            ]
        )

    def shared_bytes(self, spec: KernelSpec) -> int:
        return shared_bytes(spec)

    def mass_spec(
        self, problem: Problem, device: DeviceSpec, block_kv: int, *, is_listed: bool
    ) -> KernelSpec | None:
        """The kernel with the widest chunks of head_dim that fit a multiprocessor twice, or else once.

        Raises
        ------
        UnsupportedProblem
            No chunk fits.
        """
        side = _MASS_SIDES[problem.accumulator]
        needed = next((dim for dim in DIMS if dim >= problem.head_dim), WIDEST_CHUNK)
        specs = [
            KernelSpec(
                family=self.name, entry="block_mass", dtype=problem.dtype, head_dim=dim, value_dim=DIMS[0],
                block_q=side, block_kv=side,
            )
            for dim in reversed(DIMS)
            if dim <= min(needed, WIDEST_CHUNK)
        ]  # fmt: skip
        for available in (device.tile_memory_bytes // 2, device.tile_memory_bytes):
            for spec in specs:
                if shared_bytes(spec) <= available:
                    return spec
        raise UnsupportedProblem(
            [f"{device.name} must have {shared_bytes(specs[-1])} bytes of shared memory a block; it has "
             f"{device.tile_memory_bytes}: use a narrower dtype"]
        )  # fmt: skip


def _mma_rows(dtype: np.dtype[Any], device: DeviceSpec) -> tuple[int, ...]:
    """Return the rows of the mma instructions that a chip has for a dtype, the fastest first; 0 stands for none.

    float64 has them: 8 rows, and 16 on compute capability 9.0.
    """
    if dtype != np.float64 or device.compute_capability is None or device.compute_capability < (8, 0):
        return (0,)
    return (16 if device.compute_capability == (9, 0) else 8, 0)


@lru_cache(maxsize=1 << 13)
def _legal_tiles(smallest: KernelSpec, largest: tuple[int, int]) -> tuple[KernelSpec, ...]:
    """Return the tiles from the smallest to the largest given, the preferred first; no device changes them."""
    sides = (
        replace(smallest, block_q=block_q, block_kv=block_kv)
        for block_q, block_kv in product(_SIDES, _SIDES)
        if block_q <= largest[0] and block_kv <= largest[1]
    )
    return tuple(sorted(filter(_is_simt_tile, sides), key=_preference, reverse=True))


def _preference(spec: KernelSpec) -> tuple[float, int]:
    """Rank a tile by products for every element loaded, where those of a step count twice, and then by height."""
    rows, step = rows_and_step(spec)
    return rows * step / (rows + 2 * step), rows


def rows_and_step(spec: KernelSpec) -> tuple[int, int]:
    """A tile's rows that stay in place, and how many rows of the other side a step takes."""
    sides = spec.block_q, spec.block_kv
    return sides if _LIMITS[spec.entry].rows_are_queries else sides[::-1]


def _num_accumulators(spec: KernelSpec) -> int:
    """Columns of the accumulators that a row keeps."""
    return sum(getattr(spec, dim) for dim in _LIMITS[spec.entry].sums)


def accumulator_words(spec: KernelSpec) -> int:
    """Registers of a thread that scores and sums fill."""
    rows, step = rows_and_step(spec)
    sums = _num_accumulators(spec)
    elements = rows * (_LIMITS[spec.entry].num_scores * step + sums)
    if spec.entry == "backward":  # scores, then columns of dQ, as many as kDqWidth
        dq_width = 32 if spec.mma_rows else 64 if spec.head_dim % 64 == 0 else spec.head_dim
        elements = rows * sums + step * max(rows, dq_width)
    return elements * spec.accumulator.itemsize // (4 * _THREADS)


def _is_simt_tile(spec: KernelSpec) -> bool:
    """Return whether threads share its rows evenly and its accumulators fit their registers."""
    entry, words = _LIMITS[spec.entry], accumulator_words(spec)
    rows, step = rows_and_step(spec)
    if spec.mma_rows:  # in one walk of the backward pass dQ has as many rows as a step
        shared_rows = (rows, step) if spec.entry == "backward" else (rows,)
        return all(height % 32 == 0 for height in shared_rows) and words <= entry.mma_registers
    # Conversions take registers too, and so do the operands of very wide rows.
    spare_registers = _SPARE_REGISTERS * (spec.dtype != np.float32) + _SPARE_REGISTERS * (_num_accumulators(spec) > 384)
    fits = words <= entry.registers - spare_registers or (rows, step) == (_SMALLEST_ROWS, entry.min_step)
    return rows % _SMALLEST_ROWS == 0 and rows <= entry.max_rows and step >= entry.min_step and fits


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a block; every row is 16 bytes longer than it is wide, or 32 for tensor cores."""
    itemsize = spec.accumulator.itemsize
    vector = (32 if spec.mma_rows else 16) // itemsize
    if spec.entry == "backward_statistics":
        return 0
    rows, step = rows_and_step(spec)
    head_row, value_row = spec.head_dim + vector, spec.value_dim + vector
    if spec.entry == "backward":  # queries and dO take turns, and what is read along rows alone is not padded
        padding = vector if spec.mma_rows else 0
        p_padding = 8 if padding == 0 and step > 64 else padding
        persistent_row = spec.head_dim + spec.value_dim + step + 2 * padding + p_padding
        return (rows * persistent_row + step * max(head_row, value_row)) * itemsize
    if spec.entry == "block_mass":  # there are no values
        elements = (rows + step) * head_row
    elif spec.entry == "forward":  # keys and values take turns
        elements = rows * head_row + step * max(head_row, value_row)
    else:
        elements = (rows + step) * (head_row + value_row)
    return (elements + rows * (step + vector)) * itemsize
