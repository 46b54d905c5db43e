"""Rows of 8 bits with a power of two for each: what a KV cache of float8_e4m3fn holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, namespace
from . import e4m3

SCALE_BYTES = 4
_NAN = np.float32(np.nan)
_SMALLEST = np.float32(2.0**-126)
_LAST_EXPONENT = 127 + 120  # of a scale: 256 2^120 is more than float32 holds


def quantized_rows(x: Array) -> tuple[Array, Array]:
    """Round rows to 8 bits, with a scale for each.

    The scale of a row is the least power of two by which no number exceeds 448, at least 2^-126, and 1 where all are 0.
    Rows are divided by it, and multiplied with it, exactly. Numbers below 2^-126 count as 0, numbers above 1.875 2^127
    count as 1.875 2^127, whose successor in 8 bits would be infinite, and a row that holds NaN or an infinity is NaN.

    Parameters
    ----------
    x : array [..., columns]
        An array of float16, bfloat16 or float32.

    Returns
    -------
    data : array [..., columns]
        Of float8_e4m3fn in NumPy, of uint8 with the same bits in CuPy.
    scale : array [...]
        Of float32.

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
    # The sum carries into the exponent where the mantissa is above that of 448 = 1.75 2^8.
    exponent = xp.maximum(largest.view(np.int32) + 0x1FFFFF >> 23, 9) - 8
    scale, inverse = ((each << 23).astype(np.int32).view(np.float32) for each in (exponent, 254 - exponent))
    scale = xp.where(is_finite, xp.where(largest == 0, np.float32(1), scale), _NAN)
    most = xp.where(exponent == _LAST_EXPONENT, np.float32(240), np.float32(e4m3.LARGEST))[..., None]
    return e4m3.from_float32(xp.clip(wide * inverse[..., None], -most, most)), scale


def dequantized_rows(data: Array, scale: Array, dtype: Any) -> Array:
    """Multiply rows of 8 bits by their scales.

    Parameters
    ----------
    data, scale : arrays
        As `quantized_rows` makes them.
    dtype : dtype
        Either bfloat16 or float32, both of which hold the products exactly, as far as they are no smaller than 2^-126.

    Returns
    -------
    array [..., columns]
    """
    made: Array = (e4m3.to_float32(data) * scale[..., None]).astype(dtype)
    return made
