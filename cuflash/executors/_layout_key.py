"""The layout of a call's arrays, by which the cache of calls distinguishes calls."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from operator import attrgetter

import numpy as np

from ..arrays import Array
from ..compiler import nvrtc

_host_layout = attrgetter("shape", "strides", "dtype")
_device_layout = attrgetter("shape", "strides", "dtype", "data.device_id")


def layout_key(*arrays: Array) -> Hashable:
    """Return the shapes, strides, dtypes and device of NumPy or CuPy arrays; None for other arrays.

    If one call with a key is accepted, so is every other, except for misaligned addresses.
    """
    kind = type(arrays[0])
    for array in arrays:
        if type(array) is not kind:
            return None
    if kind is np.ndarray:
        return tuple(map(_host_layout, arrays))
    cupy = sys.modules.get("cupy")
    if cupy is None or kind is not cupy.ndarray:
        return None
    return nvrtc.current_number(), *map(_device_layout, arrays)
