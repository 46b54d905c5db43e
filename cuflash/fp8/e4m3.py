"""The format float8_e4m3fn as bytes: CuPy has no such dtype, and NumPy has it by ml_dtypes."""

from __future__ import annotations

import numpy as np

from ..arrays import E4M3, Array, namespace

LARGEST = 448.0
_NAN = 0x7F
_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def from_float32(x: Array) -> Array:
    """Numbers of at most 464 in magnitude, rounded to the nearest, ties to even; every NaN becomes the same one.

    NumPy's arrays become arrays of float8_e4m3fn, CuPy's arrays of uint8 with the same bits.
    """
    xp = namespace(x)
    if xp is not np:
        return bits_by_integers(x)
    with np.errstate(invalid="ignore"):
        bits = np.where(np.isnan(x), np.uint8(_NAN), x.astype(E4M3).view(np.uint8))
    return bits.view(E4M3)


def bits_by_integers(x: Array) -> Array:
    """The bits of `from_float32`, in NumPy's or CuPy's operations on integers."""
    xp = namespace(x)
    bits = x.view(np.int32)
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 24 & 0x80
    # A float has 20 bits of mantissa more and an exponent larger by 120. Adding half of the last place that is kept,
    # less one where that place is even, and cutting rounds to nearest.
    normal = magnitude - (120 << 23) + 0x7FFFF + (magnitude >> 20 & 1) >> 20
    # Below 2^-6 the last place is 2^-9, as that of floats from 2^14 on is: the sum with 2^14 is rounded there.
    with np.errstate(invalid="ignore"):
        aligned = magnitude.view(np.float32) + np.float32(2.0**14)
    subnormal = aligned.view(np.int32) - np.float32(2.0**14).view(np.int32)
    rounded = xp.where(magnitude < 0x3C800000, subnormal, normal)
    return xp.where(magnitude > 0x7F800000, _NAN, rounded | sign).astype(np.uint8)


def to_float32(data: Array) -> Array:
    """The numbers of an array of float8_e4m3fn, or of uint8 with its bits."""
    xp = namespace(data)
    return xp.asarray(_VALUES)[data.view(np.uint8)]
