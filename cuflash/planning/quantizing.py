"""Plans of the kernels that quantize arrays to FP8 and transpose them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..arrays import UP_TO_FLOAT32
from .launches import Pass
from .spec import SM90, Entry, KernelSpec

QUANTIZE = np.dtype(
    [
        *((name, np.uint64) for name in ("x", "data", "scale", "signs")),
        *((name, np.int32) for name in ("num_rows", "num_blocks")),
        *((name, np.float32) for name in ("largest", "normalizer")),
    ],
    align=True,
)
TRANSPOSE = np.dtype(
    [
        *((name, np.uint64) for name in ("data", "transposed")),
        *((name, np.int32) for name in ("num_rows", "padded_rows")),
    ],
    align=True,
)
CAPABILITY = (9, 0)  # compute capability of the chips that run these kernels
KEYS = 128  # number of keys that a thread block transposes; lengths are rounded up to a multiple of it
_LANE_COLUMNS = 16  # columns of a row per lane
_COLUMNS = (64, 128, 256)
_BLOCKS = (16, 32, 64, 128)
_MOST_WARPS = 16


def _maximum_bytes(spec: KernelSpec) -> int:
    """Return the bytes of shared memory for one float32 maximum per warp."""
    return 4 * _MOST_WARPS


def _block_bytes(spec: KernelSpec) -> int:
    """Return the bytes of a block of FP8 rows."""
    return spec.block_kv * spec.head_dim


_QUANTIZE = Entry(family="fp8", name="quantize", runs_as=SM90, shared_bytes=_maximum_bytes)
_TRANSPOSE = Entry(family="fp8", name="transpose", runs_as=SM90, shared_bytes=_block_bytes)


def quantize_spec(dtype: np.dtype[np.generic], columns: int, block: int) -> KernelSpec | None:
    """Return the kernel that quantizes blocks of rows, or None if no kernel supports the arguments."""
    if dtype not in UP_TO_FLOAT32 or columns not in _COLUMNS or block not in _BLOCKS:
        return None
    return KernelSpec(
        entry=_QUANTIZE, dtype=dtype, head_dim=columns, value_dim=columns, block_q=block, block_kv=16,
        num_warps=min(block * columns // (32 * _LANE_COLUMNS), _MOST_WARPS), min_blocks=1,
    )  # fmt: skip


def transpose_spec(columns: int) -> KernelSpec | None:
    """Return the kernel that transposes values, or None if no kernel serves this number of columns."""
    if columns not in _COLUMNS:
        return None
    return KernelSpec(
        entry=_TRANSPOSE, dtype=np.dtype(np.float32), head_dim=columns, value_dim=columns, block_q=16,
        block_kv=KEYS, num_warps=8, min_blocks=1,
    )  # fmt: skip


def quantizing(spec: KernelSpec, shape: tuple[int, ...], num_blocks: int, largest: Any) -> Pass:
    """Return the launch that quantizes a dense array x [..., rows, columns] to data and scale.

    If the call passes `signs`, one float32 per column, each row is first rotated with them.

    Parameters
    ----------
    spec : KernelSpec
    shape : tuple of int
        Shape of x and of data, which is an array of bytes.
    num_blocks : int
        Number of blocks of rows; each block has one scale.
    largest : float
        As in `quantize`.
    """
    numbers = {
        "num_rows": shape[-2], "num_blocks": num_blocks, "largest": largest,
        "normalizer": np.float32(1 / np.sqrt(shape[-1])),
    }  # fmt: skip
    return Pass.of_kernel(
        spec, prod(shape[:-2]) * num_blocks, QUANTIZE, numbers, reads=("x", "signs"), writes=("data", "scale")
    )  # fmt: skip


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
