"""Arguments of masks: arrays of other libraries, numbers of keys on either side, lengths a batch entry."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array, describe, is_array, is_int, is_integer_dtype, of_list, whole_number
from ..errors import UnsupportedProblem, collecting, refuse
from ..layouts import is_differentiated, is_foreign, is_on_cuda, taken, taken_on_cuda
from .base import Mask
from .content import held_arrays

_Mask = TypeVar("_Mask", bound=Mask)


def take_arrays(mask: Mask, names: dict[str, str], dtype: DTypeLike = np.int64) -> None:
    """Take the arrays of other libraries in some fields of a mask being made, where they lie and without a copy.

    `names` are those of fields, with what messages call them. A library whose arrays name their namespace is left to
    the call, which reads them. Lists become NumPy's arrays, an empty one of `dtype`.
    """
    reasons: list[str] = []
    for field, name in names.items():
        value = getattr(mask, field)
        with collecting(reasons):
            array = taken_array(name, value, dtype)
            if array is not value:
                object.__setattr__(mask, field, array)
    refuse(reasons)


def taken_array(name: str, value: Array, dtype: DTypeLike = np.int64) -> Array:
    """Another library's array as NumPy's or CuPy's, where it lies, and a list of numbers as NumPy's; all else as it is.

    Raises
    ------
    UnsupportedProblem
        It cannot be taken.
    """
    if not is_foreign(value):
        return of_list(name, value, dtype)
    if not is_on_cuda(name, value):
        return taken(name, value, np)
    return value if is_array(value) else taken_on_cuda(name, value)


def with_cupy_arrays(mask: _Mask) -> _Mask:
    """The mask with JAX's arrays on CUDA devices taken as CuPy's, where they lie, so that an index can be made of them.

    Raises
    ------
    UnsupportedProblem
        An array cannot be taken.
    """

    def take(array: Array) -> Array:
        is_taken = is_differentiated(array) and is_on_cuda("mask", array)
        return taken_on_cuda("mask", array) if is_taken else array

    return mask.to(take) if any(map(is_differentiated, held_arrays(mask))) else mask


def convert_sides(mask: Mask, meaning: str) -> None:
    for name in ("left", "right"):
        object.__setattr__(mask, name, converted_side(name, getattr(mask, name), meaning))


def converted_side(name: str, side: int | None, meaning: str) -> int | None:
    """Return one side of a window as an int; None is no limit, which other libraries write as -1."""
    fix = "write None, which is what -1 means in flash-attention" if is_int(side) and side == -1 else ""
    return None if side is None else whole_number(name, side, 0, meaning, fix)


def converted_length(name: str, value: Array) -> Array:
    if is_int(value) and value >= 0:
        return int(value)
    if not (is_array(value) and is_integer_dtype(value.dtype)):
        rule = f"{name} must be an int of at least 0, or an integer array over the leading axes"
        raise UnsupportedProblem([f"{rule}; got {describe(value)}"])
    return value
