"""Calls of kernels on quantised operands, which they read as bytes, V transposed, and a scale for each run of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array, ShapeDtype, namespace
from ..layouts import address, kind_of
from ..planning.scales import RowsPerScale
from ..plans import device_reasons
from .quantize import BLOCK, Quantized

_ONE_SCALE = 1 << 30  # rows, more than any sequence has; a multiple of all blocks
_PACKET = 16  # bytes that the hardware copies at once


def kernel_arrays(q: Quantized, k: Quantized, v: Quantized) -> dict[str, Array]:
    """The arrays of a kernel that computes with quantised operands, by name."""
    scales = {f"{name}_scale": _scales(x) for name, x in {"q": q, "k": k, "v": v}.items()}
    return {"q": _aligned(q.data), "k": _aligned(k.data), "v": v.transposed(), **scales}


def location_reasons(given: Mapping[str, Array]) -> list[str]:
    """Why the arrays of a call do not lie together: of one kind and, on GPUs, on the current device."""
    xp = namespace(given["q"])
    reasons = [
        f"{name} must be of one kind with q's data, {xp.__name__}; got {kind_of(array)}: copy it explicitly"
        for name, array in given.items()
        if namespace(array) is not xp
    ]
    if xp is np or reasons:
        return reasons
    return [reason for name, array in given.items() for reason in device_reasons(name, array)]


def rows_per_scale(q: Quantized | Array, k: Quantized | Array, v: Quantized | Array) -> RowsPerScale:
    """The numbers of rows that share a scale."""
    return RowsPerScale(*map(_rows_of_one_scale, (q, k, v)))


def shapes(q: Quantized, k: Quantized, v: Quantized) -> tuple[ShapeDtype, ShapeDtype, ShapeDtype]:
    """The operands as a problem sees them: their shapes, and the dtype of o."""
    q_shape, k_shape, v_shape = (ShapeDtype(x.shape, v.source_dtype) for x in (q, k, v))
    return q_shape, k_shape, v_shape


def _rows_of_one_scale(x: Any) -> int:
    """Rows of an array that share a scale; of one that is not quantised yet, those that `quantize` would choose."""
    if not isinstance(x, Quantized):
        return BLOCK
    return x.block if x.per == "block" else _ONE_SCALE


def _aligned(data: Array) -> Array:
    """The bytes of an array in rows of whole packets of 16 bytes, which the hardware copies: itself if it has them."""
    data = data.view(np.uint8)
    outer = (step for step, extent in zip(data.strides[:-1], data.shape[:-1]) if extent != 1)
    is_dense = data.strides[-1] == 1 or data.shape[-1] == 1
    if is_dense and not any(step % _PACKET for step in outer) and address(data) % _PACKET == 0 and data.shape[-1] != 1:
        return data
    columns = data.shape[-1]
    copied = namespace(data).zeros((*data.shape[:-1], columns + -columns % _PACKET), np.uint8)
    copied[..., :columns] = data
    return copied[..., :columns]


def _scales(x: Quantized) -> Array:
    """The scales with one for each head, by strides of 0 where heads share one."""
    number = x.scale.shape[-1]
    return namespace(x.scale).broadcast_to(x.scale, (*x.shape[:-2], number))
