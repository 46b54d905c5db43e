"""Numbers of float8_e4m3fn, which CuPy lacks: conversions, and values in the layout that tensor cores read."""

from __future__ import annotations

import numpy as np

from ..arrays import E4M3, Array, namespace

LARGEST = 448.0
_NAN = 0x7F
_PADDING = 128  # the number of keys of transposed values is a multiple of this
_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def from_float32(x: Array) -> Array:
    """Round numbers of at most 464 in magnitude to the nearest e4m3 number, ties to even; every NaN gets equal bits.

    NumPy arrays become arrays of float8_e4m3fn, and CuPy arrays become arrays of uint8 with the same bits.
    """
    xp = namespace(x)
    if xp is not np:
        return bits_by_integers(x)
    with np.errstate(invalid="ignore"):
        bits = np.where(np.isnan(x), np.uint8(_NAN), x.astype(E4M3).view(np.uint8))
    return bits.view(E4M3)


def bits_by_integers(x: Array) -> Array:
    """Return the bits of `from_float32`, computed by integer operations of NumPy or CuPy."""
    xp = namespace(x)
    bits = x.view(np.int32)
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 24 & 0x80
    # float32 has 20 more mantissa bits than e4m3, and its exponent bias is larger by 120. To round to nearest, ties to
    # even: add half a unit in the last kept place, minus one if that place is even, and truncate.
    normal = magnitude - (120 << 23) + 0x7FFFF + (magnitude >> 20 & 1) >> 20
    # Below 2^-6, e4m3 numbers are multiples of 2^-9, and so are float32 numbers from 2^14 to 2^15. Therefore adding
    # 2^14 rounds to a multiple of 2^-9.
    with np.errstate(invalid="ignore"):
        aligned = magnitude.view(np.float32) + np.float32(2.0**14)
    subnormal = aligned.view(np.int32) - np.float32(2.0**14).view(np.int32)
    rounded = xp.where(magnitude < 0x3C800000, subnormal, normal)
    return xp.where(magnitude > 0x7F800000, _NAN, rounded | sign).astype(np.uint8)


def to_float32(data: Array) -> Array:
    """Convert an array of float8_e4m3fn, or of uint8 with its bits, to float32."""
    xp = namespace(data)
    return xp.asarray(_VALUES)[data.view(np.uint8)]


def transposed_values(data: Array) -> Array:
    """Transpose values [..., keys, columns] to bytes [..., columns, keys], with keys in the order of kernels' weights.

    Among 16 keys, thread t of four holds the weights of keys 2t, 2t + 1, 2t + 8 and 2t + 9, so that these follow each
    other. The keys are padded with zeros to a multiple of 128.
    """
    xp = namespace(data)
    *leading, keys, columns = data.shape
    padded = xp.zeros((*leading, keys + -keys % _PADDING, columns), np.uint8)
    padded[..., :keys, :] = data.view(np.uint8)
    groups = padded.shape[-2] // 16
    parts = padded.reshape(*leading, groups, 2, 4, 2, columns)  # axes: groups of 16 keys, halves, threads, pairs
    axes = len(leading)
    order = (*range(axes), axes + 4, axes, axes + 2, axes + 1, axes + 3)
    return xp.ascontiguousarray(parts.transpose(order)).reshape(*leading, columns, padded.shape[-2])
