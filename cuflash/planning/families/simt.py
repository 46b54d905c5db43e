"""The simt family: FlashAttention-2 in float32 and float64 arithmetic, for every dtype, mask and chip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from ...blocks.work_list import ListedWork, WorkList
from ...errors import UnsupportedProblem
from ..device import DeviceSpec
from ..launches import Kernels, Launch, Pass, TileOrder, Workspace
from ..problem import Problem
from ..sinks import sink_backward
from ..spec import SIMT, Entry, KernelSpec
from ._passes import forward_pass
from .family import (
    BACKWARD_INPUTS,
    DIMS,
    SIMT_DTYPES,
    STATISTICS_INPUTS,
    WIDEST_CHUNK,
    Family,
    first_fitting,
    launch_of,
    list_block_of,
    no_tile_fits,
    num_tiles,
    order_of_waves,
    rounded_dims,
)

_THREADS = 128  # threads of a block, kThreads
_SPARE_REGISTERS = 32
_SIDES = (128, 64, 32, 16, 8)  # rows, or columns, of a tile
_SMALLEST_ROWS = 16  # that threads can share


@dataclass(frozen=True, kw_only=True)
class _Entry(Entry):
    """A kernel that keeps rows of one side in place and steps over the other, with the limits of its tiles."""

    family: str = SIMT
    num_scores: int  # tiles of scores in registers
    sums: tuple[str, ...]  # dimensions of the accumulators in registers
    registers: int  # that both may fill of a thread's 255; beyond it times rose or registers spilled
    mma_registers: int  # the limit where tensor cores multiply
    max_rows: int = _SIDES[0]
    min_step: int = _SIDES[-1]
    adds_to_dq: bool = False  # with each step, in registers of a tile of scores


def _entry(spec: KernelSpec) -> _Entry:
    assert isinstance(spec.entry, _Entry)
    return spec.entry


def rows_and_step(spec: KernelSpec) -> tuple[int, int]:
    """A tile's rows that stay in place, and how many rows of the other side a step takes."""
    sides = spec.block_q, spec.block_kv
    return sides[::-1] if spec.entry.holds_keys else sides


def _padding(spec: KernelSpec) -> int:
    """Elements by which rows are longer than they are wide: 16 bytes, or 32 for tensor cores."""
    return (32 if spec.mma_rows else 16) // spec.accumulator.itemsize


def _padded_dims(spec: KernelSpec) -> tuple[int, int]:
    return spec.head_dim + _padding(spec), spec.value_dim + _padding(spec)


def _with_scores(spec: KernelSpec, elements: int) -> int:
    """Bytes of so many elements and of a tile of scores."""
    rows, step = rows_and_step(spec)
    return (elements + rows * (step + _padding(spec))) * spec.accumulator.itemsize


def _forward_bytes(spec: KernelSpec) -> int:
    """Queries; keys and values, which take turns; scores."""
    return _with_scores(spec, spec.block_q * _padded_dims(spec)[0] + spec.block_kv * max(_padded_dims(spec)))


def _mass_bytes(spec: KernelSpec) -> int:
    """Queries, keys and scores."""
    return _with_scores(spec, (spec.block_q + spec.block_kv) * _padded_dims(spec)[0])


def _two_walks_bytes(spec: KernelSpec) -> int:
    """Rows of both dimensions on both sides, and scores."""
    return _with_scores(spec, (spec.block_q + spec.block_kv) * sum(_padded_dims(spec)))


def _one_walk_bytes(spec: KernelSpec) -> int:
    """Keys and values; queries and dO, which take turns; scores. Operands that are read along rows are not padded."""
    padding = _padding(spec) if spec.mma_rows else 0
    p_padding = 8 if padding == 0 and spec.block_q > 64 else padding
    persistent_row = spec.head_dim + spec.value_dim + spec.block_q + 2 * padding + p_padding
    elements = spec.block_kv * persistent_row + spec.block_q * max(_padded_dims(spec))
    return elements * spec.accumulator.itemsize


FORWARD = _Entry(
    name="forward", shared_bytes=_forward_bytes, applies_score=True, draws_dropout=True, has_exponentials=True,
    products=(1, 1), num_scores=1, sums=("value_dim",), registers=144, mma_registers=176,
)  # fmt: skip
BLOCK_MASS = Entry(family=SIMT, name="block_mass", shared_bytes=_mass_bytes, applies_score=True)
BACKWARD_ROWS = _Entry(
    name="backward_rows", shared_bytes=_two_walks_bytes, loads_do=True, applies_score=True, draws_dropout=True,
    has_exponentials=True, products=(2, 1), num_scores=2, sums=("head_dim",), registers=112, mma_registers=176,
)  # fmt: skip
BACKWARD_COLUMNS = _Entry(
    name="backward_columns", shared_bytes=_two_walks_bytes, loads_do=True, holds_keys=True, applies_score=True,
    adds_gradients=True, draws_dropout=True, has_exponentials=True, products=(2, 2),
    num_scores=2, sums=("head_dim", "value_dim"), registers=160, mma_registers=192,
)  # fmt: skip
BACKWARD = _Entry(
    name="backward", shared_bytes=_one_walk_bytes, loads_do=True, holds_keys=True, applies_score=True,
    adds_gradients=True, draws_dropout=True, has_exponentials=True, products=(3, 2),
    num_scores=1, sums=("head_dim", "value_dim"), registers=160, mma_registers=144, max_rows=64,  # 128 rows spill
    min_step=16, adds_to_dq=True,
)  # fmt: skip
BACKWARD_STATISTICS = Entry(family=SIMT, name="backward_statistics", loads_do=True)
_MASS_SIDES = {np.dtype(np.float32): 64, np.dtype(np.float64): 32}  # sides of block_mass's tile, by accumulator
_STATISTICS_BLOCK_Q = 64  # queries of backward_statistics, which multiplies nothing and keeps nothing


class Simt(Family):
    """Kernels on multiply-add units, and for float64 on tensor cores."""

    name = SIMT
    dtypes = SIMT_DTYPES
    operands = ("sink", "dropout_seed")

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        """The forward tile, but no smaller than the smallest tile of the backward kernels."""
        forward = self._spec(FORWARD, problem, device, None)
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
        backward = (BACKWARD_ROWS, BACKWARD_COLUMNS) if in_two_walks else (BACKWARD_STATISTICS, BACKWARD)
        return {entry.name: self._spec(entry, problem, device, largest) for entry in (FORWARD, *backward)}

    def _spec(
        self, entry: Entry, problem: Problem, device: DeviceSpec, largest: tuple[int, int] | None
    ) -> KernelSpec:
        head_dim, value_dim = rounded_dims(problem)
        smallest = KernelSpec(
            entry=entry, dtype=problem.dtype, head_dim=head_dim, value_dim=value_dim,
            block_q=_SIDES[-1], block_kv=_SIDES[-1],
        )  # fmt: skip
        if isinstance(entry, _Entry):
            return self._largest_fitting(smallest, device, largest or (_SIDES[0], _SIDES[0]))
        block_q = max(side for side in _SIDES if side <= min(_STATISTICS_BLOCK_Q, (largest or _SIDES)[0]))
        return replace(smallest, block_q=block_q)

    def launches(
        self,
        problem: Problem,
        device: DeviceSpec,
        work: WorkList,
        *,
        deterministic: bool = False,
    ) -> Kernels:
        chosen = self.specs(problem, device, list_block_of(work), deterministic=deterministic)

        def launch(role: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Launch:
            return launch_of(chosen[role], device, num_tiles(chosen[role], problem, work), reads, writes)

        is_one_walk, inputs = "backward" in chosen, (*BACKWARD_INPUTS, "delta")
        if is_one_walk:
            backward = {
                "backward_statistics": launch("backward_statistics", STATISTICS_INPUTS, ("delta", "dq")),
                "backward": launch("backward", inputs, ("dq", "dk", "dv")),
            }
        else:
            backward = {
                "backward_rows": launch("backward_rows", ("q", "k", "v", *STATISTICS_INPUTS), ("dq", "delta")),
                "backward_columns": launch("backward_columns", inputs, ("dk", "dv")),
            }
        delta = Workspace(problem.lse_shape(), problem.accumulator)
        return Kernels(
            forward=forward_pass(problem, device, work, chosen["forward"]),
            backward=sink_backward(Pass(backward, {"delta": delta}), problem),
            order=self._order(problem, device, work, chosen["forward"], [*chosen.values()][-1]),
            is_repeatable=not is_one_walk,
        )

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
        return order_of_waves(problem, device, work, forward, backward)

    def _largest_fitting(
        self, smallest: KernelSpec, device: DeviceSpec, largest: tuple[int, int]
    ) -> KernelSpec:
        """The tile that multiplies most for what it loads, of those that fit a multiprocessor twice, or else once.

        Tensor cores multiply where any of their tiles fits: they share 32 rows, so blocks of a list may be too short.
        """
        legal = [_legal_tiles(replace(smallest, mma_rows=rows), largest) for rows in _mma_rows(smallest.dtype, device)]
        for tiles in legal:
            if spec := first_fitting(tiles, device, 2) or first_fitting(tiles, device):
                return spec
        what = f"{smallest.name} with head_dim {smallest.head_dim}, value dim {smallest.value_dim} in {smallest.dtype}"
        needed = min((spec.shared_bytes for tiles in legal for spec in tiles), default=None)
        if needed is None:
            raise UnsupportedProblem(
                [f"no tile of {what} fits a list's blocks of {largest}: use larger blocks or a narrower dtype"]
            )
        raise no_tile_fits(needed, f" for {what}", device, "use a narrower dtype")

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
                entry=BLOCK_MASS, dtype=problem.dtype, head_dim=dim, value_dim=DIMS[0], block_q=side, block_kv=side
            )
            for dim in reversed(DIMS)
            if dim <= min(needed, WIDEST_CHUNK)
        ]  # fmt: skip
        if spec := first_fitting(specs, device, 2) or first_fitting(specs, device):
            return spec
        raise no_tile_fits(specs[-1].shared_bytes, "", device, "use a narrower dtype")


def _mma_rows(dtype: np.dtype[np.generic], device: DeviceSpec) -> tuple[int, ...]:
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


def _num_accumulators(spec: KernelSpec) -> int:
    """Columns of the accumulators that a row keeps."""
    return sum(getattr(spec, dim) for dim in _entry(spec).sums)


def accumulator_words(spec: KernelSpec) -> int:
    """Registers of a thread that scores and sums fill."""
    rows, step = rows_and_step(spec)
    sums, entry = _num_accumulators(spec), _entry(spec)
    elements = rows * (entry.num_scores * step + sums)
    if entry.adds_to_dq:  # scores, then columns of dQ, as many as kDqWidth
        dq_width = 32 if spec.mma_rows else 64 if spec.head_dim % 64 == 0 else spec.head_dim
        elements = rows * sums + step * max(rows, dq_width)
    return elements * spec.accumulator.itemsize // (4 * _THREADS)


def _is_simt_tile(spec: KernelSpec) -> bool:
    """Return whether threads share its rows evenly and its accumulators fit their registers."""
    entry, words = _entry(spec), accumulator_words(spec)
    rows, step = rows_and_step(spec)
    if spec.mma_rows:  # dQ of a step has as many rows as the step
        shared_rows = (rows, step) if entry.adds_to_dq else (rows,)
        return all(height % 32 == 0 for height in shared_rows) and words <= entry.mma_registers
    # Conversions take registers too, and so do the operands of very wide rows.
    spare_registers = _SPARE_REGISTERS * (spec.dtype != np.float32) + _SPARE_REGISTERS * (_num_accumulators(spec) > 384)
    fits = words <= entry.registers - spare_registers or (rows, step) == (_SMALLEST_ROWS, entry.min_step)
    return rows % _SMALLEST_ROWS == 0 and rows <= entry.max_rows and step >= entry.min_step and fits
