"""Memory layouts of operands: views whose strides differ from those of a C-ordered copy."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import numpy as np


LAYOUTS = ("contiguous", "transposed", "padded", "stepped", "negative", "offset", "broadcast", "odd_strides")


def laid_out(values: np.ndarray, layout: str) -> np.ndarray:
    """Copy values into an array with a memory layout; memory between its elements holds NaN.

    - contiguous: C order
    - transposed: (batch, seqlen, heads, dim) in memory, viewed as (batch, heads, seqlen, dim); 2-D: Fortran order
    - padded: a part of a larger array
    - stepped: every other row and every other element of a larger array
    - negative: the last two axes have negative strides
    - offset: starts one element after the start of the allocation
    - broadcast: stride 0 along the first axis, so that all entries equal the first one
    - odd_strides: axes of length 1 have arbitrary strides, which no access uses

    Examples
    --------
    >>> laid_out(np.zeros((2, 3, 4)), "negative").strides
    (96, -32, -8)
    """
    if layout == "transposed":
        other = -3 if values.ndim > 2 else -1
        return np.ascontiguousarray(values.swapaxes(other, -2)).swapaxes(other, -2)
    if layout == "padded":
        return _embedded(values, tuple(extent + 3 for extent in values.shape), [slice(1, -2)] * values.ndim)
    if layout == "stepped":
        *leading, rows, columns = values.shape
        return _embedded(values, (*leading, 2 * rows, 2 * columns), [..., slice(None, None, 2), slice(1, None, 2)])
    if layout == "negative":
        return _embedded(values, values.shape, [..., slice(None, None, -1), slice(None, None, -1)])
    if layout == "offset":
        return _embedded(values.ravel(), (values.size + 1,), [slice(1, None)]).reshape(values.shape)
    if layout == "broadcast" and values.shape[0]:
        return np.broadcast_to(values[:1].copy(), values.shape)
    if layout == "odd_strides":
        contiguous = np.array(values, order="C")
        strides = [
            99_990_001 * values.itemsize if extent == 1 else stride
            for extent, stride in zip(values.shape, contiguous.strides)
        ]
        return np.lib.stride_tricks.as_strided(contiguous, strides=strides)
    return np.array(values, order="C")


def _embedded(values: np.ndarray, shape: Sequence[int], place: Sequence[slice | EllipsisType]) -> np.ndarray:
    buffer = np.full(shape, np.nan).astype(values.dtype)
    view = buffer[tuple(place)]
    view[...] = values
    return view
