"""The simt family: FlashAttention-2 in float32 and float64 arithmetic, for all dtypes, masks and chips."""

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
from ..tangent_launches import tangents_of_kernels
from ._passes import forward_pass
from .family import (
    BACKWARD_INPUTS,
    DIMS,
    SIMT_DTYPES,
    STATISTICS_INPUTS,
    WIDEST_CHUNK,
    Family,
    Request,
    first_fitting,
    launch_over,
    no_tile_fits,
    order_of_waves,
)

_THREADS = 128  # threads per block; must equal kThreads of the kernels
_SPARE_REGISTERS = 32
_SIDES = (128, 64, 32, 16, 8)  # possible rows, or columns, of a tile
_STATISTICS = 4  # numbers per query that kernels for tangents of gradients store in shared memory
_SMALLEST_ROWS = 16  # minimum rows over which the threads of a block can be distributed


@dataclass(frozen=True, kw_only=True)
class _Entry(Entry):
    """A kernel that holds a tile of queries or keys and loops over the other side, with the limits of its tiles."""

    family: str = SIMT
    num_scores: int  # tiles of scores in registers
    sums: tuple[str, ...]  # dimensions of the accumulators in registers
    registers: int  # maximum registers per thread for scores and accumulators; more were slower, or spilled
    mma_registers: int  # the same limit if tensor cores compute the products
    max_rows: int = _SIDES[0]
    min_step: int = _SIDES[-1]
    adds_to_dq: bool = False  # each step computes a part of dQ, in the registers of a tile of scores


def _entry(spec: KernelSpec) -> _Entry:
    assert isinstance(spec.entry, _Entry)
    return spec.entry


def rows_and_step(spec: KernelSpec) -> tuple[int, int]:
    """Return the rows that a work tile holds, and the rows of the other side that each step loads."""
    sides = spec.block_q, spec.block_kv
    return sides[::-1] if spec.entry.holds_keys else sides


def _padding(spec: KernelSpec) -> int:
    """Return the padding of a shared memory row in elements: 16 bytes, or 32 bytes for tensor cores."""
    return (32 if spec.mma_rows else 16) // spec.accumulator.itemsize


def _padded_dims(spec: KernelSpec) -> tuple[int, int]:
    return spec.head_dim + _padding(spec), spec.value_dim + _padding(spec)


def _with_scores(spec: KernelSpec, elements: int) -> int:
    """Return the bytes of this number of elements and of a tile of scores."""
    rows, step = rows_and_step(spec)
    return (elements + rows * (step + _padding(spec))) * spec.accumulator.itemsize


def _forward_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, of keys and values, which share one buffer, and of scores."""
    return _with_scores(spec, spec.block_q * _padded_dims(spec)[0] + spec.block_kv * max(_padded_dims(spec)))


def _jvp_bytes(spec: KernelSpec) -> int:
    """Return the bytes of the forward kernel, and of the tangents of queries."""
    of_queries = spec.block_q * _padded_dims(spec)[0] * spec.accumulator.itemsize
    return _forward_bytes(spec) + of_queries * ("q" in spec.tangents)


def _backward_jvp_rows_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, dO and their tangents, of a buffer for rows of keys, and of scores."""
    (head_dim, value_dim), named = _padded_dims(spec), spec.tangents
    row = head_dim * (1 + ("q" in named)) + value_dim * (1 + ("do" in named))
    return _with_scores(spec, spec.block_q * row + spec.block_kv * max(head_dim, value_dim))


def _backward_jvp_columns_bytes(spec: KernelSpec) -> int:
    """Return the bytes of keys, values and their tangents, of a buffer for queries, of statistics and scores."""
    (head_dim, value_dim), named = _padded_dims(spec), spec.tangents
    row = head_dim * (1 + ("k" in named)) + value_dim * (1 + ("v" in named))
    return _with_scores(spec, spec.block_kv * row + spec.block_q * (max(head_dim, value_dim) + _STATISTICS))


def _mass_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries, keys and scores."""
    return _with_scores(spec, (spec.block_q + spec.block_kv) * _padded_dims(spec)[0])


def _two_walks_bytes(spec: KernelSpec) -> int:
    """Return the bytes of queries and dO, of keys and values, and of scores."""
    return _with_scores(spec, (spec.block_q + spec.block_kv) * sum(_padded_dims(spec)))


def _one_walk_bytes(spec: KernelSpec) -> int:
    """Return the bytes of keys and values, of queries and dO, which share one buffer, and of scores.

    Operands that are read along rows are not padded.
    """
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
    num_scores=1, sums=("head_dim", "value_dim"), registers=160, mma_registers=144, max_rows=64,  # more spill
    min_step=16, adds_to_dq=True,
)  # fmt: skip
JVP = _Entry(
    name="jvp", shared_bytes=_jvp_bytes, applies_score=True, draws_dropout=True, has_exponentials=True,
    products=(3, 2), num_scores=2, sums=("value_dim",), registers=112, mma_registers=176,
)  # fmt: skip
BACKWARD_JVP_ROWS = _Entry(
    name="backward_jvp_rows", shared_bytes=_backward_jvp_rows_bytes, loads_do=True, applies_score=True,
    draws_dropout=True, has_exponentials=True, products=(5, 3), num_scores=4, sums=("head_dim",), registers=112,
    mma_registers=144,
)  # fmt: skip
BACKWARD_JVP_COLUMNS = _Entry(
    name="backward_jvp_columns", shared_bytes=_backward_jvp_columns_bytes, loads_do=True, holds_keys=True,
    applies_score=True, draws_dropout=True, has_exponentials=True, products=(5, 5), num_scores=4,
    sums=("head_dim", "value_dim"), registers=144, mma_registers=144,
)  # fmt: skip
BACKWARD_STATISTICS = Entry(family=SIMT, name="backward_statistics", loads_do=True)
_MASS_SIDES = {np.dtype(np.float32): 64, np.dtype(np.float64): 32}  # sides of block_mass's tile, by accumulator
_STATISTICS_BLOCK_Q = 64  # queries per tile of backward_statistics, which has no products and no accumulators


class Simt(Family):
    """Kernels that use fused multiply-adds, and tensor cores for float64."""

    name = SIMT
    dtypes = SIMT_DTYPES
    operands = ("sink", "dropout_seed")

    def list_block(self, problem: Problem, device: DeviceSpec) -> tuple[int, int]:
        """Return the forward tile, but at least the smallest tile of the backward kernels."""
        forward = self._spec(FORWARD, Request(problem, device))
        return max(_SMALLEST_ROWS, forward.block_q), max(_SMALLEST_ROWS, forward.block_kv)

    def specs(self, request: Request) -> dict[str, KernelSpec]:
        """Return the kernels by entry. The backward pass computes scores twice if atomic additions are slower.

        Atomic additions need dq to have the accumulator's dtype. In float32, computing scores once with atomic
        additions takes 0.79, 0.78 and 0.85 of the time of computing them twice at head_dim 32, 64 and 96; in float64,
        0.72 at 32, 1.20 at 64 and 0.90 at 128 (simt_walks.log at commit b648872e). The backward
        pass in float64 with a head_dim of 33 to 64 therefore computes scores twice.
        """
        problem = request.problem
        is_slower_in_one = problem.dtype == np.float64 and 32 < max(problem.head_dim, problem.value_dim) <= 64
        in_two_walks = request.deterministic or problem.dtype != problem.accumulator or is_slower_in_one
        backward = (BACKWARD_ROWS, BACKWARD_COLUMNS) if in_two_walks else (BACKWARD_STATISTICS, BACKWARD)
        return {entry.name: self._spec(entry, request) for entry in (FORWARD, *backward)}

    def _spec(self, entry: Entry, request: Request, tangents: tuple[str, ...] = ()) -> KernelSpec:
        (head_dim, value_dim), largest = request.dims, request.largest
        smallest = KernelSpec(
            entry=entry, dtype=request.problem.dtype, head_dim=head_dim, value_dim=value_dim,
            block_q=_SIDES[-1], block_kv=_SIDES[-1], tangents=tangents,
        )  # fmt: skip
        if isinstance(entry, _Entry):
            return self._largest_fitting(smallest, request.device, largest or (_SIDES[0], _SIDES[0]))
        block_q = max(side for side in _SIDES if side <= min(_STATISTICS_BLOCK_Q, (largest or _SIDES)[0]))
        return replace(smallest, block_q=block_q)

    def launches(self, request: Request, work: WorkList) -> Kernels:
        problem, chosen = request.problem, self.specs(request)

        def launch(role: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Launch:
            return launch_over(chosen[role], request, work, reads, writes)

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
            forward=forward_pass(request, work, chosen["forward"]),
            backward=sink_backward(Pass(backward, {"delta": delta}), problem),
            order=self._order(request, work, chosen["forward"], [*chosen.values()][-1]),
            is_repeatable=not is_one_walk,
        )

    def tangent_reasons(self, problem: Problem) -> list[str]:
        return []

    def jvp_spec(self, request: Request) -> KernelSpec:
        spec = self._spec(JVP, request, ("q",))
        return replace(spec, tangents=tangents_of_kernels(request.problem))

    def backward_jvp_specs(self, request: Request) -> tuple[KernelSpec, KernelSpec]:
        every, named = ("q", "k", "v", "do"), tangents_of_kernels(request.problem)
        rows, columns = (
            replace(self._spec(entry, request, every), tangents=named)
            for entry in (BACKWARD_JVP_ROWS, BACKWARD_JVP_COLUMNS)
        )
        return rows, columns

    def _order(self, request: Request, work: WorkList, forward: KernelSpec, backward: KernelSpec) -> TileOrder:
        """Return the order of tiles, which alternates between all heads if there is a block list.

        The bottleneck is multiply-adds instead of loads of K and V, and if fewer heads alternate, more of the GPU is
        idle at the end (simt_sparse.log at commit b648872e).
        """
        if isinstance(work, ListedWork):
            num_heads = request.problem.num_batch_heads
            return TileOrder(num_heads, num_heads)
        return order_of_waves(request, work, forward, backward)

    def _largest_fitting(
        self, smallest: KernelSpec, device: DeviceSpec, largest: tuple[int, int]
    ) -> KernelSpec:
        """Return the tile with the most products per loaded element, if possible with two blocks per multiprocessor.

        Tensor cores are used if one of their tiles fits. Their tiles have multiples of 32 rows, and may be taller than
        the blocks of a list.
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

    def mass_spec(self, request: Request, block_kv: int) -> KernelSpec | None:
        """Return the kernel with the widest chunks of head_dim, if possible with two blocks per multiprocessor.

        Raises
        ------
        UnsupportedProblem
            No chunk fits.
        """
        problem, device = request.problem, request.device
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
    """Return the rows of a chip's mma instructions for a dtype, fastest first; 0 means fused multiply-adds.

    Only float64 uses such instructions in this family: with 8 rows, or 16 on compute capability 9.0.
    """
    if dtype != np.float64 or device.compute_capability is None or device.compute_capability < (8, 0):
        return (0,)
    return (16 if device.compute_capability == (9, 0) else 8, 0)


@lru_cache(maxsize=1 << 13)
def _legal_tiles(smallest: KernelSpec, largest: tuple[int, int]) -> tuple[KernelSpec, ...]:
    """Return all tiles up to the size `largest`, best first; cached, since they do not depend on the device."""
    sides = (
        replace(smallest, block_q=block_q, block_kv=block_kv)
        for block_q, block_kv in product(_SIDES, _SIDES)
        if block_q <= largest[0] and block_kv <= largest[1]
    )
    return tuple(sorted(filter(_is_simt_tile, sides), key=_preference, reverse=True))


def _preference(spec: KernelSpec) -> tuple[float, int]:
    """Rank a tile by products per loaded element, counting elements of a step twice, and then by height."""
    rows, step = rows_and_step(spec)
    return rows * step / (rows + 2 * step), rows


def _num_accumulators(spec: KernelSpec) -> int:
    """Return the number of accumulator columns per row."""
    return sum(getattr(spec, dim) for dim in _entry(spec).sums)


def accumulator_words(spec: KernelSpec) -> int:
    """Return the registers per thread that scores and accumulators take."""
    rows, step = rows_and_step(spec)
    sums, entry = _num_accumulators(spec), _entry(spec)
    elements = rows * (entry.num_scores * step + sums)
    if entry.adds_to_dq:  # scores and kDqWidth columns of dQ share registers
        dq_width = 32 if spec.mma_rows else 64 if spec.head_dim % 64 == 0 else spec.head_dim
        elements = rows * sums + step * max(rows, dq_width)
    return elements * spec.accumulator.itemsize // (4 * _THREADS)


def _is_simt_tile(spec: KernelSpec) -> bool:
    """True if the threads divide the tile's rows evenly, and its accumulators fit in registers."""
    entry, words = _entry(spec), accumulator_words(spec)
    rows, step = rows_and_step(spec)
    if spec.mma_rows:  # the dQ of a step has `step` rows
        shared_rows = (rows, step) if entry.adds_to_dq else (rows,)
        return all(height % 32 == 0 for height in shared_rows) and words <= entry.mma_registers
    # Conversions from other dtypes need registers too, and so do the operands of very wide rows.
    spare_registers = _SPARE_REGISTERS * (spec.dtype != np.float32) + _SPARE_REGISTERS * (_num_accumulators(spec) > 384)
    fits = words <= entry.registers - spare_registers or (rows, step) == (_SMALLEST_ROWS, entry.min_step)
    return rows % _SMALLEST_ROWS == 0 and rows <= entry.max_rows and step >= entry.min_step and fits
