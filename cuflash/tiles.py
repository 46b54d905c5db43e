"""How large a tile is: legality by arithmetic, choice by preference; the numbers come from DeviceSpec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from . import sm80_tiles, sm90_tiles
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
_THREADS = 128  # of a block of the simt family: kThreads
_SPARE = 32
_SIDES = (128, 64, 32, 16, 8)  # of a tile of the simt family


class _Entry(NamedTuple):
    """What an entry of the simt family works on: it keeps rows of one side and steps over the other."""

    rows_are_queries: bool
    num_scores: int  # tiles of scores in registers
    sums: tuple[str, ...]  # dimensions of the accumulators in registers
    registers: int  # that both may fill of a thread's 255: beyond it times rose or registers spilled
    mma_registers: int  # the same where tensor cores multiply
    most_rows: int = _SIDES[0]
    least_step: int = _SIDES[-1]


_SIMT = {
    "forward": _Entry(True, 1, ("value_dim",), 144, 176),
    "backward_rows": _Entry(True, 2, ("head_dim",), 112, 176),
    "backward_columns": _Entry(False, 2, ("head_dim", "value_dim"), 160, 192),
    "backward": _Entry(False, 1, ("head_dim", "value_dim"), 160, 144, most_rows=64, least_step=16),  # 128 rows spill
}
_STATISTICS_BLOCK_Q = 64  # of backward_statistics, which multiplies nothing and keeps nothing
FAMILIES = ("simt", "sm80", "sm90", "naive")
_NAIVE_SIDE = 32  # of a tile of the naive family, and the columns that it multiplies at a time
_SERVED = {  # dtypes that a family serves; the simt family serves all
    "naive": (np.dtype(np.float16), np.dtype(np.float32)),
    "sm80": (np.dtype(np.float16), BFLOAT16),
    "sm90": (np.dtype(np.float16), BFLOAT16),
}


def family_reasons(family: str | None, problem: Problem) -> list[str]:
    """Why a family of kernels does not serve a problem on any device."""
    if problem.precision != "ieee" and family in FAMILIES:
        if family == "sm80":
            return []
        return [f"kernel={family!r} has precision='ieee'; got {problem.precision!r}: use kernel='auto'"]
    if family not in _SERVED or problem.dtype in _SERVED[family]:
        return []
    served = " or ".join(dtype.name for dtype in _SERVED[family])
    instead = "convert q, k and v, or use kernel='simt'"
    if family == "sm80" and problem.dtype == np.float32:
        instead = "use precision='tf32x3' or 'tf32', or kernel='simt'"
    return [f"kernel={family!r} takes {served}; got {problem.dtype}: {instead}"]


def routed(problem: Problem, device: DeviceSpec) -> tuple[str, str]:
    """The family that kernel="auto" stands for, and why: the first row that serves the problem on the device.

    ============================================  ======
    precision 'tf32' or 'tf32x3'                  sm80
    float16, bfloat16, compute capability 9.0     sm90
    float16, bfloat16, compute capability >= 8.0  sm80
    everything                                    simt
    ============================================  ======

    sm90 is passed over where its tiles of 128 queries are fewer than multiprocessors, and by the plan where a list's
    blocks are not made of 64 x 64: sm80 is faster there.
    """
    if problem.precision != "ieee":
        return "sm80", "it has the precision asked for"
    capability = device.compute_capability
    num_tiles = problem.mask_shape.num_batch * problem.num_heads * -(-problem.seqlen_q // 128)
    is_hopper = capability == (9, 0) and num_tiles >= device.num_processors
    if problem.dtype in _SERVED["sm90"] and is_hopper:
        return "sm90", "16-bit elements on Hopper's tensor cores"
    if problem.dtype in _SERVED["sm80"] and capability is not None and capability >= (8, 0):
        return "sm80", "16-bit elements on tensor cores, from compute capability 8.0 on"
    return "simt", "it serves every dtype, mask and chip"


def entries(family: str, problem: Problem, *, deterministic: bool) -> tuple[str, ...]:
    """The kernels of a family's passes, the forward pass's first.

    Where bits may differ from call to call, dQ is summed by atomic additions in its own memory, in one walk over the
    scores. In float32 that takes 0.79, 0.78 and 0.85 times as long as two walks at 32, 64 and 96 columns; in float64
    0.72 at 32, 1.20 at 64 and 0.90 at 128 (experiments/results/simt_walks.log), so gradients of float64 with 33 to 64
    columns are made in two. So are those of 16-bit elements, whose memory cannot hold sums.
    """
    if family == "naive":
        return ("scores", "softmax", "output", "gradient_scores", "gradient_queries", "gradient_keys")
    is_slower_in_one = problem.dtype == np.float64 and 32 < max(problem.head_dim, problem.value_dim) <= 64
    if deterministic or problem.dtype != problem.accumulator or is_slower_in_one:
        return ("forward", "backward_rows", "backward_columns")
    return ("forward", "backward_statistics", "backward")


def kernel_specs(
    family: str,
    problem: Problem,
    device: DeviceSpec,
    largest: tuple[int, int] | None = None,
    *,
    deterministic: bool = False,
    num_keys: float | None = None,
) -> dict[str, KernelSpec]:
    """The kernels of a family that serve a problem on a device, by entry.

    Parameters
    ----------
    largest : (block_q, block_kv), optional
        What tiles may not exceed: the blocks of a list.
    deterministic : bool
        Whether every result must be bitwise repeatable.
    num_keys : float, optional
        What a query sees on average, where that is known; else it may be few.

    Raises
    ------
    UnsupportedProblem
        The family does not serve the dtype, or no tile fits the device's shared memory.
    """
    reasons = family_reasons(family, problem)
    if reasons:
        raise UnsupportedProblem(reasons)
    if family == "naive":
        names = entries(family, problem, deterministic=deterministic)
        return {entry: _naive_spec(entry, problem, largest) for entry in names}
    is_old = device.compute_capability is not None and device.compute_capability < (8, 0)
    if problem.precision != "ieee" and is_old:
        needed = f"precision={problem.precision!r} needs compute capability 8.0"
        raise UnsupportedProblem([f"{needed}; {device.name} is older: use precision='ieee'"])
    if problem.dtype == BFLOAT16 and is_old:
        raise UnsupportedProblem(
            [f"bfloat16 needs compute capability 8.0; {device.name} is older: use float16 or float32"]
        )
    head_dim, value_dim = (next(room for room in DIMS if room >= dim) for dim in (problem.head_dim, problem.value_dim))
    if family in ("sm80", "sm90"):
        dims, length = (head_dim, value_dim), problem.seqlen_q
        chosen = sm80_tiles.specs(problem, dims, device, largest, length, deterministic=deterministic)
        if family == "sm90":
            chosen["forward"] = sm90_tiles.forward_spec(problem, dims, device, largest, num_keys or 0)
            backward = sm90_tiles.backward_specs(problem.dtype, dims, largest, deterministic=deterministic)
            if backward:  # else tiles are too large, and sm80's serve
                chosen = {"forward": chosen["forward"]} | backward
        return chosen
    specs = {}
    for entry in entries(family, problem, deterministic=deterministic):
        smallest = KernelSpec(
            family=family, entry=entry, dtype=problem.dtype, head_dim=head_dim, value_dim=value_dim,
            block_q=_SIDES[-1], block_kv=_SIDES[-1],
        )  # fmt: skip
        if entry == "backward_statistics":
            block_q = max(side for side in _SIDES if side <= min(_STATISTICS_BLOCK_Q, (largest or _SIDES)[0]))
            specs[entry] = replace(smallest, block_q=block_q)
        else:
            specs[entry] = _simt_spec(smallest, device, largest or (_SIDES[0], _SIDES[0]))
    return specs


def _mma_rows(dtype: np.dtype[Any], device: DeviceSpec) -> tuple[int, ...]:
    """How a chip can make products of a dtype, fastest first: float64 on tensor cores, with 16 rows on sm_90 alone."""
    if dtype != np.float64 or device.compute_capability is None or device.compute_capability < (8, 0):
        return (0,)
    return (16 if device.compute_capability == (9, 0) else 8, 0)


def _naive_spec(entry: str, problem: Problem, largest: tuple[int, int] | None) -> KernelSpec:
    """One tile for all chips and dims, but half as long where blocks are shorter: a baseline is not tuned."""
    side = _NAIVE_SIDE if largest is None or min(largest) >= _NAIVE_SIDE else _NAIVE_SIDE // 2
    return KernelSpec(
        family="naive", entry=entry, dtype=problem.dtype, head_dim=_NAIVE_SIDE, value_dim=_NAIVE_SIDE,
        block_q=side, block_kv=side,
    )  # fmt: skip


def _simt_spec(smallest: KernelSpec, device: DeviceSpec, largest: tuple[int, int]) -> KernelSpec:
    """The tile that multiplies most for what it loads, of those that fit a multiprocessor twice, or else once.

    Tensor cores multiply where any tile of theirs fits: they share 32 rows, so blocks of a list may be too short.
    """
    legal: tuple[KernelSpec, ...] = ()
    for mma_rows in _mma_rows(smallest.dtype, device):
        legal = _legal_tiles(replace(smallest, mma_rows=mma_rows), largest)
        for room, spec in product((device.tile_memory_bytes // 2, device.tile_memory_bytes), legal):
            if shared_bytes(spec) <= room:
                return spec
    raise UnsupportedProblem(
        [
            f"{device.name} must have {min(map(shared_bytes, legal))} bytes of shared memory a block for "
            f"{smallest.name} with head_dim {smallest.head_dim}, value dim {smallest.value_dim} in {smallest.dtype}; "
            f"it has {device.tile_memory_bytes}: use a narrower dtype"
        ]
    )


@lru_cache(maxsize=1 << 13)
def _legal_tiles(smallest: KernelSpec, largest: tuple[int, int]) -> tuple[KernelSpec, ...]:
    """From the smallest tile up to the largest that is asked for, the preferred first: the same on every device."""
    sides = (
        replace(smallest, block_q=block_q, block_kv=block_kv)
        for block_q, block_kv in product(_SIDES, _SIDES)
        if block_q <= largest[0] and block_kv <= largest[1]
    )
    return tuple(sorted(filter(_is_simt_tile, sides), key=_preference, reverse=True))


def _preference(spec: KernelSpec) -> tuple[float, int]:
    """Products for every element loaded, where those of a step count twice: the rows stay. Then the tallest."""
    rows, step = rows_and_step(spec)
    return rows * step / (rows + 2 * step), rows


def rows_and_step(spec: KernelSpec) -> tuple[int, int]:
    """Of a tile of the simt family: the rows that stay, and how many of the other side a step takes."""
    sides = spec.block_q, spec.block_kv
    return sides if _SIMT[spec.entry].rows_are_queries else sides[::-1]


def _num_sums(spec: KernelSpec) -> int:
    """Columns of the accumulators that a row keeps."""
    return sum(getattr(spec, dim) for dim in _SIMT[spec.entry].sums)


def accumulator_words(spec: KernelSpec) -> int:
    """Registers of a thread of the simt family that scores and sums fill."""
    rows, step = rows_and_step(spec)
    sums = _num_sums(spec)
    elements = rows * (_SIMT[spec.entry].num_scores * step + sums)
    if spec.entry == "backward":  # scores, then columns of dQ, as many as kDqWidth
        dq_width = 32 if spec.mma_rows else 64 if spec.head_dim % 64 == 0 else spec.head_dim
        elements = rows * sums + step * max(rows, dq_width)
    return elements * accumulator_dtype(spec.dtype).itemsize // (4 * _THREADS)


def _is_simt_tile(spec: KernelSpec) -> bool:
    """Whether threads share its rows evenly and its accumulators fit their registers."""
    entry, words = _SIMT[spec.entry], accumulator_words(spec)
    rows, step = rows_and_step(spec)
    if spec.mma_rows:  # of the backward pass in one walk dQ has as many rows as a step
        shared_rows = (rows, step) if spec.entry == "backward" else (rows,)
        return all(height % 32 == 0 for height in shared_rows) and words <= entry.mma_registers
    # Conversions take registers too, and so do the operands of very wide rows.
    spare = _SPARE * (spec.dtype != np.float32) + _SPARE * (_num_sums(spec) > 384)
    fits = words <= entry.registers - spare or (rows, step) == (16, entry.least_step)
    return rows % 16 == 0 and rows <= entry.most_rows and step >= entry.least_step and fits


def blocks_at_once(spec: KernelSpec, device: DeviceSpec) -> int:
    """Blocks of a kernel that a GPU holds at once: as many as its registers are shared among, or as find room.

    Each takes a KiB of shared memory more than it asks for, and a multiprocessor has one more than a block may ask for.
    """
    rooms = (device.tile_memory_bytes + 1024) // (shared_bytes(spec) + 1024)
    return device.num_processors * max(1, min(spec.min_blocks, rooms))


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a block; every row is 16 bytes longer than it is wide, or 32 for tensor cores."""
    itemsize = accumulator_dtype(spec.dtype).itemsize
    vector = (32 if spec.mma_rows else 16) // itemsize
    if spec.family == "naive":
        return _naive_shared_bytes(spec, itemsize, vector)
    if spec.family == "sm80":
        return sm80_tiles.shared_bytes(spec)
    if spec.family == "sm90":
        return sm90_tiles.shared_bytes(spec)
    if spec.entry == "backward_statistics":
        return 0
    rows, step = rows_and_step(spec)
    head_row, value_row = spec.head_dim + vector, spec.value_dim + vector
    if spec.entry == "backward":  # queries and dO take turns, and what is read along rows alone is not padded
        padding = vector if spec.mma_rows else 0
        p_padding = 8 if padding == 0 and step > 64 else padding
        kept_row = spec.head_dim + spec.value_dim + step + 2 * padding + p_padding
        return (rows * kept_row + step * max(head_row, value_row)) * itemsize
    if spec.entry == "forward":  # keys and values take turns
        elements = rows * head_row + step * max(head_row, value_row)
    else:
        elements = (rows + step) * (head_row + value_row)
    return (elements + rows * (step + vector)) * itemsize


def _naive_shared_bytes(spec: KernelSpec, itemsize: int, vector: int) -> int:
    """Two tiles, and an int for each row of the second that says whether it is multiplied."""
    head_row, value_row, scores_row = spec.head_dim + vector, spec.value_dim + vector, spec.block_kv + vector
    return {
        "scores": (spec.block_q + spec.block_kv) * head_row * itemsize,
        "softmax": 0,
        "output": (spec.block_q * scores_row + spec.block_kv * value_row) * itemsize + 4 * spec.block_kv,
        "gradient_scores": (spec.block_q + spec.block_kv) * value_row * itemsize,
        "gradient_queries": (spec.block_q * scores_row + spec.block_kv * head_row) * itemsize + 4 * spec.block_kv,
        "gradient_keys": spec.block_q * (scores_row + head_row) * itemsize + 4 * spec.block_q,
    }[spec.entry]
