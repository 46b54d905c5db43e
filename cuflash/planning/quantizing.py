"""Plans of the kernels that quantize arrays to FP8 and transpose them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ..arrays import UP_TO_FLOAT32
from .launches import POINTER, Pass, Value, structure
from .spec import SM90, Entry, KernelSpec

QUANTIZED_ARRAY = structure(
    (POINTER, "x", "data", "scale", "signs", "transposed"),
    (np.int32, "num_rows", "num_scales", "num_blocks", "end_block"),
)
PLACES = ("first", "second", "third")  # the arrays of one launch: q, k and v
QUANTIZE = structure((QUANTIZED_ARRAY, *PLACES), (np.float32, "largest", "normalizer"))
TRANSPOSE = structure((POINTER, "data", "transposed"), (np.int32, "num_rows", "padded_rows"))
CAPABILITY = (9, 0)  # compute capability of the chips that run these kernels
KEYS = 128  # number of keys that a thread block transposes; lengths are rounded up to a multiple of it
_LANES_OF_ROW = 4
_LANE_NUMBERS = 32  # numbers that a lane holds if the block has enough rows
_COLUMNS = (64, 128, 256)
_BLOCKS = (16, 32, 64, 128)
_MOST_WARPS = 16


class Rounding(NamedTuple):
    """An array [..., rows, columns] that a launch rounds, and whether the launch also transposes its bytes."""

    shape: tuple[int, ...]
    is_transposed: bool

    def num_scales(self, block: int) -> int:
        """Return the number of blocks of rows in a matrix."""
        return -(-self.shape[-2] // block)

    @property
    def padded_rows(self) -> int:
        """The length of a row of the transposed array."""
        return self.shape[-2] + -self.shape[-2] % KEYS


def _quantize_bytes(spec: KernelSpec) -> int:
    """Return the bytes of shared memory for a block of FP8 rows and one float32 maximum per warp."""
    return spec.block_q * spec.head_dim + 4 * _MOST_WARPS


def _block_bytes(spec: KernelSpec) -> int:
    """Return the bytes of a block of FP8 rows."""
    return spec.block_kv * spec.head_dim


_QUANTIZE = Entry(family="fp8", name="quantize", runs_as=SM90, shared_bytes=_quantize_bytes)
_TRANSPOSE = Entry(family="fp8", name="transpose", runs_as=SM90, shared_bytes=_block_bytes)


def quantize_spec(dtype: np.dtype[np.generic], columns: int, block: int) -> KernelSpec | None:
    """Return the kernel that quantizes blocks of rows, or None if no kernel supports the arguments."""
    if dtype not in UP_TO_FLOAT32 or columns not in _COLUMNS or block not in _BLOCKS:
        return None
    rows = max(1, _LANE_NUMBERS * _LANES_OF_ROW // columns)  # of a lane
    num_warps = block * _LANES_OF_ROW // (32 * rows)
    has_few_registers = columns // _LANES_OF_ROW <= _LANE_NUMBERS and dtype.itemsize == 2
    resident = _MOST_WARPS * (2 if has_few_registers else 1)
    return KernelSpec(
        entry=_QUANTIZE, dtype=dtype, head_dim=columns, value_dim=columns, block_q=block, block_kv=16,
        num_warps=num_warps, min_blocks=resident // num_warps,
    )  # fmt: skip


def transpose_spec(columns: int) -> KernelSpec | None:
    """Return the kernel that transposes values, or None if no kernel serves this number of columns."""
    if columns not in _COLUMNS:
        return None
    return KernelSpec(
        entry=_TRANSPOSE, dtype=np.dtype(np.float32), head_dim=columns, value_dim=columns, block_q=16,
        block_kv=KEYS, num_warps=8, min_blocks=1,
    )  # fmt: skip


def quantizing(spec: KernelSpec, arrays: Sequence[Rounding], largest: float) -> Pass:
    """Return the launch that quantizes up to three dense arrays, whose arguments are named by `PLACES`.

    The launch reads ``first.x`` and writes ``first.data``, ``first.scale`` [..., number of blocks] and, if the array is
    transposed, ``first.transposed`` [..., columns, padded rows]; likewise for the other arrays. If the call passes
    ``first.signs``, one float32 per column, each row is first rotated with them.

    Parameters
    ----------
    spec : KernelSpec
    arrays : sequence of Rounding
    largest : float
        As in `quantize`.
    """
    numbers: dict[str, Value] = {"largest": largest, "normalizer": np.float32(1 / np.sqrt(spec.head_dim))}
    reads, writes, end = list[str](), list[str](), 0
    for place, array in zip(PLACES, arrays):
        num_scales = array.num_scales(spec.block_q)
        num_blocks = array.padded_rows // spec.block_q if array.is_transposed else num_scales
        end += prod(array.shape[:-2]) * num_blocks
        numbers[place] = {
            "num_rows": array.shape[-2], "num_scales": num_scales, "num_blocks": num_blocks, "end_block": end,
        }  # fmt: skip
        reads += [f"{place}.x", f"{place}.signs"]
        writes += [f"{place}.data", f"{place}.scale", *([f"{place}.transposed"] if array.is_transposed else [])]
    return Pass.of_kernel(spec, end, QUANTIZE, numbers, reads=tuple(reads), writes=tuple(writes))


def transposing(spec: KernelSpec, shape: tuple[int, ...], padded_rows: int) -> Pass:
    """Return the launch that transposes a dense array data [..., rows, columns] of bytes, and pads it with zeros.

    Parameters
    ----------
    spec : KernelSpec
    shape : tuple of int
        Shape of data.
    padded_rows : int
        Number of columns of the transposed array.
    """
    numbers, grid = {"num_rows": shape[-2], "padded_rows": padded_rows}, prod(shape[:-2]) * padded_rows // KEYS
    return Pass.of_kernel(spec, grid, TRANSPOSE, numbers, reads=("data",), writes=("transposed",))
