"""Quantization to FP8 and transposition of arrays on a GPU, by kernels that exist only for Hopper."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from ..arrays import Array, namespace
from ..executors import checks, gpu
from ..executors.launch import BoundPass
from ..layouts import address, device_number
from ..planning._call_cache import CALLS
from ..planning.launches import Pass
from ..planning.quantizing import (
    CAPABILITY, KEYS, PLACES, Rounding, quantize_spec, quantizing, transpose_spec, transposing,
)  # fmt: skip
from .rotation import Rotation


class Blocks(NamedTuple):
    """The bytes and the scales of blocks of rows, and the transposed bytes if they were requested."""

    data: Array
    scale: Array
    transposed: Array | None


def quantized_blocks(
    arrays: Sequence[Array], rotations: Sequence[Rotation | None], transposes: Sequence[bool], block: int,
    largest: float,
) -> list[Blocks] | None:
    """Quantize up to three arrays of one dtype and width by one launch; None if no kernel supports them.

    Parameters
    ----------
    arrays : sequence of arrays
    rotations : sequence of Rotation or None
        The rotation of the rows of each array.
    transposes : sequence of bool
        Whether the bytes of each array are also transposed.
    block, largest
        As in `quantize`.
    """
    first = arrays[0]
    if any(not _is_on_hopper(x) or not x.size or x.dtype != first.dtype for x in arrays):
        return None
    spec = quantize_spec(np.dtype(first.dtype), first.shape[-1], block)
    if spec is None or any(x.shape[-1] != first.shape[-1] for x in arrays):
        return None
    xp, roundings = namespace(first), [Rounding(x.shape, is_value) for x, is_value in zip(arrays, transposes)]
    results, by_name = list[Blocks](), dict[str, Array | None]()
    for place, x, rotation, rounding in zip(PLACES, arrays, rotations, roundings):
        x = xp.ascontiguousarray(x)
        if address(x) % 32:  # each lane loads its columns with one aligned instruction
            x = x.copy()
        transposed = xp.empty((*x.shape[:-2], x.shape[-1], rounding.padded_rows), np.uint8) if rounding[1] else None
        scale = xp.empty((*x.shape[:-2], rounding.num_scales(block)), np.float32)
        results.append(Blocks(xp.empty(x.shape, np.uint8), scale, transposed))
        by_name |= {f"{place}.{name}": array for name, array in results[-1]._asdict().items() if array is not None}
        by_name[f"{place}.x"] = x
        by_name[f"{place}.signs"] = None if rotation is None else _signs(rotation, device_number(x))
    key = "quantize", first.dtype, *roundings, block, largest
    _launch(key, partial(quantizing, spec, roundings, largest), by_name)
    return results


def transposed_bytes(data: Array) -> Array | None:
    """Return the bytes that `transposed_values` returns, computed on the GPU; None if no kernel supports the array."""
    spec = transpose_spec(data.shape[-1]) if _is_on_hopper(data) and data.size else None
    if spec is None:
        return None
    xp = namespace(data)
    data = xp.ascontiguousarray(data)
    if address(data) % 8:  # a thread loads two words of a row with one instruction
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
