"""Arrays that FP8 kernels read for quantized operands: bytes, V transposed, and one scale for each run of rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import Array, ShapeDtype, namespace
from ..layouts import address, kind_of
from ..planning.scales import RowsPerScale
from ..plans.fit import device_reasons
from .quantize import BLOCK, Quantized

_ONE_SCALE = 1 << 30  # rows per scale if a head has one scale: more than any sequence has, and a multiple of all blocks
_PACKET = 16  # bytes that the hardware copies at once


def kernel_arrays(q: Quantized, k: Quantized, v: Quantized) -> dict[str, Array]:
    """Return the arrays that a kernel reads for quantized operands, by name."""
    scales = {f"{name}_scale": _scales(x) for name, x in {"q": q, "k": k, "v": v}.items()}
    return {"q": _aligned(q.data), "k": _aligned(k.data), "v": v.transposed(), **scales}


def location_reasons(arrays: Mapping[str, Array]) -> list[str]:
    """Return why arrays cannot be used in one call: all must be of one library and, on GPUs, on the current device."""
    xp = namespace(arrays["q"])
    reasons = [
        f"{name} must be of the same library as q's data, {xp.__name__}; got {kind_of(array)}: copy it explicitly"
        for name, array in arrays.items()
        if namespace(array) is not xp
    ]
    if xp is np or reasons:
        return reasons
    return [reason for name, array in arrays.items() for reason in device_reasons(name, array)]


def rows_per_scale(q: Quantized | Array, k: Quantized | Array, v: Quantized | Array) -> RowsPerScale:
    """Return how many rows of q, k and v share a scale."""
    return RowsPerScale(*map(_rows_of_one_scale, (q, k, v)))


def shapes(q: Quantized, k: Quantized, v: Quantized) -> tuple[ShapeDtype, ShapeDtype, ShapeDtype]:
    """Return the shapes of the operands for a `Problem`, with the dtype of o as their dtype."""
    q_shape, k_shape, v_shape = (ShapeDtype(x.shape, v.source_dtype) for x in (q, k, v))
    return q_shape, k_shape, v_shape


def _rows_of_one_scale(x: Quantized | Array) -> int:
    """Return how many rows of an array share a scale, which is the default of `quantize` if it is not quantized yet."""
    if not isinstance(x, Quantized):
        return BLOCK
    return x.block if x.per == "block" else _ONE_SCALE


def _aligned(data: Array) -> Array:
    """Return the bytes of an array with rows aligned to 16 bytes for hardware copies; a view if they already are."""
    data = data.view(np.uint8)
    outer = (step for step, extent in zip(data.strides[:-1], data.shape[:-1]) if extent != 1)
    is_dense = data.strides[-1] == 1 or data.shape[-1] == 1
    if is_dense and not any(step % _PACKET for step in outer) and address(data) % _PACKET == 0 and data.shape[-1] != 1:
        return data
    columns = data.shape[-1]
    padded = namespace(data).zeros((*data.shape[:-1], columns + -columns % _PACKET), np.uint8)
    padded[..., :columns] = data
    return padded[..., :columns]


def _scales(x: Quantized) -> Array:
    """Return the scales broadcast to one row for each head, with strides of 0 if heads share them."""
    num_scales = x.scale.shape[-1]
    return namespace(x.scale).broadcast_to(x.scale, (*x.shape[:-2], num_scales))
