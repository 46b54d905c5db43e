"""Conversion of the arguments of masks: arrays of other libraries, window sides, lengths per batch entry."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array, describe, is_array, is_cupy, is_int, is_integer_dtype, of_list, whole_number
from ..errors import UnsupportedProblem, collecting, refuse
from ..layouts import is_differentiated, is_foreign, is_on_cuda, layout_reasons, taken, taken_on_cuda
from .base import Mask
from .content import held_arrays
from .shape import MAX_SEQLEN

KEYS = "the window's keys on that side, or None for all"
_Mask = TypeVar("_Mask", bound=Mask)


def take_arrays(mask: Mask, names: dict[str, str], dtype: DTypeLike = np.int64) -> None:
    """Convert arrays of other libraries in some fields of a new mask, on their device and without a copy.

    `names` maps fields to their names in messages. Device arrays of a library with an array namespace stay as they are;
    calls read them. Lists become NumPy arrays; `dtype` is that of an empty list. Layouts that kernels cannot read are
    refused.
    """
    reasons: list[str] = []
    for field, name in names.items():
        value = getattr(mask, field)
        if is_cupy(value):
            reasons += layout_reasons(name, value)
        elif value is not None:
            with collecting(reasons):
                array = taken_array(name, value, dtype)
                if array is not value:
                    object.__setattr__(mask, field, array)
    refuse(reasons)


def taken_array(name: str, value: Array, dtype: DTypeLike = np.int64) -> Array:
    """Convert another library's array to NumPy or CuPy without a copy, and a list to NumPy; return other values as is.

    Raises
    ------
    UnsupportedProblem
        The array cannot be converted.
    """
    if not is_foreign(value):
        return of_list(name, value, dtype)
    if not is_on_cuda(name, value):
        return taken(name, value, np)
    return value if is_array(value) else taken_on_cuda(name, value)


def with_cupy_arrays(mask: _Mask) -> _Mask:
    """Convert a mask's JAX arrays on CUDA devices to CuPy without a copy, so that a block index can be built from them.

    Raises
    ------
    UnsupportedProblem
        An array cannot be converted.
    """

    def take(array: Array) -> Array:
        is_taken = is_differentiated(array) and is_on_cuda("mask", array)
        return taken_on_cuda("mask", array) if is_taken else array

    return mask.to(take) if any(map(is_differentiated, held_arrays(mask))) else mask


def convert_sides(mask: Mask, meaning: str) -> None:
    for name in ("left", "right"):
        object.__setattr__(mask, name, converted_side(name, getattr(mask, name), meaning))


def window_sides(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """Return the sides of a window as ints, or None for no limit.

    Raises
    ------
    UnsupportedProblem
        The window is not a pair of ints of at least 0 or None.
    """
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not is_pair or not all(side is None or is_int(side) for side in window):
        fix = f": ({describe(window)}, 0) is {describe(window)} keys before the diagonal, and the diagonal"
        fix = fix if is_int(window) and 0 <= window <= MAX_SEQLEN else ""
        raise UnsupportedProblem(f"window must be (left, right), each an int or None; got {describe(window)}{fix}")
    left, right = (converted_side(f"window's {name}", side, KEYS) for name, side in zip(("left", "right"), window))
    return left, right


def converted_side(name: str, side: int | None, meaning: str) -> int | None:
    """Return one side of a window as an int, or None for no limit (which other libraries write as -1)."""
    fix = "write None, which is what -1 means in flash-attention" if is_int(side) and side == -1 else ""
    return None if side is None else whole_number(name, side, 0, meaning, fix)


def converted_length(name: str, value: Array) -> Array:
    if is_int(value) and value >= 0:
        return int(value)
    if not (is_array(value) and is_integer_dtype(value.dtype)):
        rule = f"{name} must be an int of at least 0, or an integer array over the leading axes"
        raise UnsupportedProblem(f"{rule}; got {describe(value)}")
    return value
