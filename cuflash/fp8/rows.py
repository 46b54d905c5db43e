"""Quantization of the rows of a float8_e4m3fn KV cache, with a power of two as the scale of each row."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array, namespace
from . import e4m3

SCALE_BYTES = 4
_NAN = np.float32(np.nan)
_SMALLEST = np.float32(2.0**-126)
_LAST_EXPONENT = 127 + 120  # biased exponent of the largest scale: 256 times 2^120 exceeds float32's range


@np.errstate(all="ignore")
def quantized_rows(x: Array) -> tuple[Array, Array]:
    """Quantize rows to FP8, with a scale for each row.

    The scale of a row is the smallest power of two, at least 2^-126, that makes all numbers of the divided row at most
    448, or 1 if all numbers are 0. Division and multiplication by the scale are exact. Numbers below 2^-126 become 0.
    Numbers above 1.875 2^127 become 1.875 2^127, because the next FP8 number times the scale would be infinite. A row
    that contains NaN or infinity becomes NaN.

    Parameters
    ----------
    x : array [..., columns]
        An array of float16, bfloat16 or float32.

    Returns
    -------
    data : array [..., columns]
        The FP8 numbers, as float8_e4m3fn in NumPy, or as uint8 with the same bits in CuPy.
    scale : array [...]
        The scales, as float32.

    Examples
    --------
    >>> import numpy as np
    >>> data, scale = quantized_rows(np.float32([[1, 3, -448], [0.25, 0, 450]]))
    >>> (data.astype(np.float32) * scale[:, None]).tolist(), scale.tolist()
    ([[1.0, 3.0, -448.0], [0.25, 0.0, 448.0]], [1.0, 2.0])
    """
    xp = namespace(x)
    wide = x.astype(np.float32)
    wide = xp.where(xp.abs(wide) < _SMALLEST, xp.copysign(np.float32(0), wide), wide)
    largest = xp.abs(wide).max(axis=-1)
    is_finite = xp.isfinite(largest)
    wide = xp.where(is_finite[..., None], wide, _NAN)
    # Adding 0x1FFFFF carries into the exponent if the mantissa is larger than that of 448 = 1.75 2^8.
    exponent = xp.maximum(largest.view(np.int32) + 0x1FFFFF >> 23, 9) - 8
    scale, inverse = ((each << 23).astype(np.int32).view(np.float32) for each in (exponent, 254 - exponent))
    scale = xp.where(is_finite, xp.where(largest == 0, np.float32(1), scale), _NAN)
    most = xp.where(exponent == _LAST_EXPONENT, np.float32(240), np.float32(e4m3.LARGEST))[..., None]
    return e4m3.from_float32(xp.clip(wide * inverse[..., None], -most, most)), scale


def dequantized_rows(data: Array, scale: Array, dtype: DTypeLike) -> Array:
    """Multiply FP8 rows by their scales.

    Parameters
    ----------
    data, scale : arrays
        The results of `quantized_rows`.
    dtype : dtype
        Either bfloat16 or float32. Both represent the products exactly if they are at least 2^-126 in magnitude.

    Returns
    -------
    array [..., columns]
    """
    rows: Array = (e4m3.to_float32(data) * scale[..., None]).astype(dtype)
    return rows
