"""Arrays on a GPU rounded to 8 bits and transposed by kernels, where there are kernels for them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..arrays import Array, namespace
from ..executors import gpu, quantizing
from ..layouts import address, device_number
from ..planning.quantizing import CAPABILITY, KEYS, quantize_spec, transpose_spec
from .rotation import Rotation


def quantized_blocks(x: Array, rotation: Rotation | None, block: int, largest: Any) -> tuple[Array, Array] | None:
    """The bytes and the scales of blocks of rows; None where no kernel makes them."""
    spec = quantize_spec(np.dtype(x.dtype), x.shape[-1], block) if _is_on_hopper(x) and x.size else None
    if spec is None:
        return None
    xp = namespace(x)
    x = xp.ascontiguousarray(x)
    if address(x) % 32:  # a lane's columns come at once
        x = x.copy()
    data = xp.empty(x.shape, np.uint8)
    scale = xp.empty((*x.shape[:-2], -(-x.shape[-2] // block)), np.float32)
    signs = None if rotation is None else _signs(rotation, device_number(x))
    quantizing.quantize(spec, x, data, scale, signs, largest, gpu.current_target())
    return data, scale


def transposed_bytes(data: Array) -> Array | None:
    """Values transposed as `transposed_values` does; None where no kernel makes them."""
    spec = transpose_spec(data.shape[-1]) if _is_on_hopper(data) and data.size else None
    if spec is None:
        return None
    xp = namespace(data)
    data = xp.ascontiguousarray(data)
    if address(data) % 4:
        data = data.copy()
    *leading, rows, columns = data.shape
    transposed = xp.empty((*leading, columns, rows + -rows % KEYS), np.uint8)
    quantizing.transpose(spec, data, transposed, gpu.current_target())
    return transposed


def _is_on_hopper(x: Array) -> bool:
    """Tell whether an array lies on the current device, and this is a chip that the kernels are for."""
    if isinstance(x, np.ndarray) or device_number(x) != int(namespace(x).cuda.runtime.getDevice()):
        return False
    return gpu.current_device().compute_capability == CAPABILITY


@lru_cache(maxsize=16)
def _signs(rotation: Rotation, device: int | None) -> Array:
    """The signs of a rotation on the current device, which has this number."""
    signs: Array = gpu.current_target().sent(rotation.signs)
    return signs
