"""Plans the kernels that round arrays to 8 bits and transpose them."""

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
CAPABILITY = (9, 0)  # chips that these kernels are for
KEYS = 128  # that a block transposes, and that lengths are rounded up to
_LANE_COLUMNS = 16  # of a row, in the registers of one lane
_COLUMNS = (64, 128, 256)
_BLOCKS = (16, 32, 64, 128)
_MOST_WARPS = 16


def _maximum_bytes(spec: KernelSpec) -> int:
    """A number of each warp."""
    return 4 * _MOST_WARPS


def _block_bytes(spec: KernelSpec) -> int:
    """A block of rows of 8 bits."""
    return spec.block_kv * spec.head_dim


_QUANTIZE = Entry(family="fp8", name="quantize", runs_as=SM90, shared_bytes=_maximum_bytes)
_TRANSPOSE = Entry(family="fp8", name="transpose", runs_as=SM90, shared_bytes=_block_bytes)


def quantize_spec(dtype: np.dtype[np.generic], columns: int, block: int) -> KernelSpec | None:
    """The kernel that rounds blocks of rows; None where there is none for these."""
    if dtype not in UP_TO_FLOAT32 or columns not in _COLUMNS or block not in _BLOCKS:
        return None
    return KernelSpec(
        entry=_QUANTIZE, dtype=dtype, head_dim=columns, value_dim=columns, block_q=block, block_kv=16,
        num_warps=min(block * columns // (32 * _LANE_COLUMNS), _MOST_WARPS), min_blocks=1,
    )  # fmt: skip


def transpose_spec(columns: int) -> KernelSpec | None:
    """The kernel that transposes values; None where there is none for so many columns."""
    if columns not in _COLUMNS:
        return None
    return KernelSpec(
        entry=_TRANSPOSE, dtype=np.dtype(np.float32), head_dim=columns, value_dim=columns, block_q=16,
        block_kv=KEYS, num_warps=8, min_blocks=1,
    )  # fmt: skip


def quantizing(spec: KernelSpec, shape: tuple[int, ...], num_blocks: int, largest: Any) -> Pass:
    """The launch that rounds a dense array x [..., rows, columns] to data and scale, perhaps rotated by signs.

    Parameters
    ----------
    spec : KernelSpec
    shape : tuple of int
        Of x and of data, which is of bytes.
    num_blocks : int
        Blocks of rows, each with a scale. A rotation has float32 signs, one for each column.
    largest : float
        As `quantize` takes it.
    """
    numbers = {
        "num_rows": shape[-2], "num_blocks": num_blocks, "largest": largest,
        "normalizer": np.float32(1 / np.sqrt(shape[-1])),
    }  # fmt: skip
    return Pass.of_kernel(
        spec, prod(shape[:-2]) * num_blocks, QUANTIZE, numbers, reads=("x", "signs"), writes=("data", "scale")
    )  # fmt: skip


def transposing(spec: KernelSpec, shape: tuple[int, ...], padded_rows: int) -> Pass:
    """The launch that transposes a dense array data [..., rows, columns] of bytes, with zeros past the last row.

    Parameters
    ----------
    spec : KernelSpec
    shape : tuple of int
        Of data.
    padded_rows : int
        The columns of transposed.
    """
    numbers, grid = {"num_rows": shape[-2], "padded_rows": padded_rows}, prod(shape[:-2]) * padded_rows // KEYS
    return Pass.of_kernel(spec, grid, TRANSPOSE, numbers, reads=("data",), writes=("transposed",))
