"""Launches the kernels that round arrays to 8 bits and transpose them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..arrays import Array
from ..planning.quantizing import KEYS, QUANTIZE, TRANSPOSE
from ..planning.spec import KernelSpec
from .arguments import Buffer
from .launch import LaunchTarget


def quantize(
    spec: KernelSpec, x: Array, data: Array, scale: Array, signs: Array | None, largest: float, target: LaunchTarget
) -> None:
    """Write the numbers and scales of a dense array [..., rows, columns], with the signs of a rotation or without one.

    Parameters
    ----------
    spec : KernelSpec
    x, data, scale : array
        Dense arrays, of which data is of bytes.
    signs : array, optional
        float32, one for each column.
    largest : float
    target : LaunchTarget
        Where the arrays are.
    """
    record = np.zeros((), QUANTIZE)
    for name, array in {"x": x, "data": data, "scale": scale}.items():
        record[name] = target.address(array)
    record["signs"] = 0 if signs is None else target.address(signs)
    record["num_rows"], record["num_blocks"] = x.shape[-2], scale.shape[-1]
    record["largest"], record["normalizer"] = largest, np.float32(1 / np.sqrt(x.shape[-1]))
    _launch(spec, record, scale.size, target)


def transpose(spec: KernelSpec, data: Array, transposed: Array, target: LaunchTarget) -> None:
    """Write the transposed bytes of a dense array [..., rows, columns], with zeros past the last row.

    Parameters
    ----------
    spec : KernelSpec
    data, transposed : array
        Dense arrays of bytes.
    target : LaunchTarget
        Where the arrays are.
    """
    record = np.zeros((), TRANSPOSE)
    record["data"], record["transposed"] = target.address(data), target.address(transposed)
    record["num_rows"], record["padded_rows"] = data.shape[-2], transposed.shape[-1]
    grid = prod(data.shape[:-2]) * transposed.shape[-1] // KEYS
    _launch(spec, record, grid, target)


def _launch(spec: KernelSpec, record: Any, grid: int, target: LaunchTarget) -> None:
    """Launch a kernel on the current stream with its record."""
    if grid == 0:
        return
    words = record.reshape(1).view(np.uint64)
    buffer = Buffer(words, [[slice(0, len(words))]])
    target.launcher(spec, grid, spec.shared_bytes)(buffer.kernels[0], target.stream())
