"""Quantization to FP8 and transposition of arrays on a GPU, by kernels that exist only for Hopper."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..arrays import Array, namespace
from ..executors import checks, gpu
from ..executors.launch import BoundPass
from ..layouts import address, device_number
from ..planning._call_cache import CALLS
from ..planning.launches import Pass
from ..planning.quantizing import CAPABILITY, KEYS, quantize_spec, quantizing, transpose_spec, transposing
from .rotation import Rotation


def quantized_blocks(x: Array, rotation: Rotation | None, block: int, largest: Any) -> tuple[Array, Array] | None:
    """Return the bytes and the scales of blocks of rows, or None if no kernel supports the array."""
    spec = quantize_spec(np.dtype(x.dtype), x.shape[-1], block) if _is_on_hopper(x) and x.size else None
    if spec is None:
        return None
    xp = namespace(x)
    x = xp.ascontiguousarray(x)
    if address(x) % 32:  # each lane loads its columns with one aligned instruction
        x = x.copy()
    data = xp.empty(x.shape, np.uint8)
    scale = xp.empty((*x.shape[:-2], -(-x.shape[-2] // block)), np.float32)
    signs = None if rotation is None else _signs(rotation, device_number(x))
    key = "quantize", x.dtype, x.shape, block, largest
    arrays = {"x": x, "signs": signs, "data": data, "scale": scale}
    _launch(key, partial(quantizing, spec, x.shape, scale.shape[-1], largest), arrays)
    return data, scale


def transposed_bytes(data: Array) -> Array | None:
    """Return the bytes that `transposed_values` returns, computed on the GPU; None if no kernel supports the array."""
    spec = transpose_spec(data.shape[-1]) if _is_on_hopper(data) and data.size else None
    if spec is None:
        return None
    xp = namespace(data)
    data = xp.ascontiguousarray(data)
    if address(data) % 4:
        data = data.copy()
    *leading, rows, columns = data.shape
    transposed = xp.empty((*leading, columns, rows + -rows % KEYS), np.uint8)
    make = partial(transposing, spec, data.shape, transposed.shape[-1])
    _launch(("transpose", data.shape), make, {"data": data, "transposed": transposed})
    return transposed


def _launch(key: tuple[Hashable, ...], make: Callable[[], Pass], arrays: dict[str, Array | None]) -> None:
    """Launch a kernel on arrays. The launch is bound once for each layout of the arrays and each device."""
    target, is_checked = gpu.current_target(), checks.is_on()
    key = *key, target.device, is_checked
    bound = CALLS.get(key)
    if bound is None:
        bound = BoundPass.of(make(), {}, tuple(arrays), target)
        CALLS.put(key, bound)
    bound.launch([0 if array is None else target.address(array) for array in arrays.values()], target.stream())
    if is_checked:
        bound.wait()


def _is_on_hopper(x: Array) -> bool:
    """True if an array is on the current device and the kernels support this device."""
    if isinstance(x, np.ndarray) or device_number(x) != int(namespace(x).cuda.runtime.getDevice()):
        return False
    return gpu.current_device().compute_capability == CAPABILITY


@lru_cache(maxsize=16)
def _signs(rotation: Rotation, device: int | None) -> Array:
    """Return the signs of a rotation as an array on the current device, cached by the device's number."""
    signs: Array = gpu.current_target().sent(rotation.signs)
    return signs
