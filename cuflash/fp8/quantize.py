"""Arrays rounded to 8 bits, with a scale for each block of rows, head or array."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import E4M3, UP_TO_FLOAT32, Array, as_dtype, describe, is_int, is_number, namespace, require_arrays
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from ..planning.problem import MAX_HEAD_DIM
from ..plans import as_arrays
from . import e4m3, on_device
from .rotation import Rotation, large_units
from .transposed import transposed_values

PARTS = ("block", "head", "tensor")
BLOCK = 128  # rows that share a scale unless a caller says otherwise
_SMALLEST_SCALE, _LARGEST_SCALE = np.float32(2.0**-126), np.finfo(np.float32).max
_LEAST = 2.0**-9  # the smallest positive e4m3 number


@explains_keywords
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """An array as numbers of 8 bits times scales, which `attention` takes in the place of q, k or v.

    Parameters
    ----------
    data : array [..., rows, columns]
        Of float8_e4m3fn (ml_dtypes) in NumPy, of uint8 with the same bits in CuPy.
    scale : array
        Positive, finite, of float32. Shape (..., number of blocks of rows) for `per` "block", (..., 1) for "head" and
        (1, ..., 1) for "tensor", with one axis less than data. `quantize` alone gives NaN or an infinity to a part that
        holds one. Values on a device are not looked at, since that would wait for it: what is not finite there makes
        its part NaN, and results of a scale of 0 or below mean nothing.
    per : {"block", "head", "tensor"}
        What shares a scale.
    block : int
        Rows of a block.
    rotation : Rotation, optional
        What the rows were multiplied by before they were rounded.
    source_dtype : dtype
        Of the array that was quantised; o of `attention` has that of v.

    Raises
    ------
    TypeError
        data or scale is not an array.
    UnsupportedProblem
        They do not fit together, or a scale on the host is not positive and finite. It lists every reason.

    Notes
    -----
    data and scale are not copied, and must not be written to afterwards: scales were checked, and the transposed data
    are kept once a call has made them.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x8 = cuflash.quantize(np.ones((2, 200, 64), np.float32))
    >>> x8.shape, x8.scale.shape, x8.per
    ((2, 200, 64), (2, 2), 'block')
    """

    data: Array
    scale: Array
    per: str
    block: int
    rotation: Rotation | None
    source_dtype: np.dtype[np.generic]
    _transposed: list[Array] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        require_arrays({"data": self.data, "scale": self.scale})
        reasons = self._data_reasons()
        reasons += _option_reasons(self.per, self.block, self.rotation, self.data)
        with collecting(reasons):
            object.__setattr__(self, "source_dtype", as_dtype("source_dtype", self.source_dtype))
            if self.source_dtype not in UP_TO_FLOAT32:
                reasons.append(f"source_dtype must be float16, bfloat16 or float32; got {self.source_dtype}")
        if not reasons:
            reasons += self._scale_reasons()
        refuse(reasons)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was quantised.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.quantize(np.ones((2, 200, 64), np.float32)).shape
        (2, 200, 64)
        """
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the array that was quantised.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.quantize(np.ones((2, 200, 64), np.float32)).ndim
        3
        """
        return int(self.data.ndim)

    def __repr__(self) -> str:
        return f"Quantized(shape={self.shape}, per={self.per!r}, block={self.block}, rotation={self.rotation})"

    def scaled(self, dtype: Any = np.float32) -> Array:
        """Multiply the numbers by their scales; rotated rows stay rotated.

        Parameters
        ----------
        dtype : dtype
            Either float32, in which products are rounded, or float64, in which they are exact.

        Returns
        -------
        array
            Of the shape of data.

        Raises
        ------
        UnsupportedProblem
            The dtype is neither of the two.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> x = np.float32([[1, 2, 3, 448]])
        >>> cuflash.quantize(x).scaled()
        array([[  1.,   2.,   3., 448.]], dtype=float32)
        """
        dtype = as_dtype("dtype", dtype)
        if dtype not in (np.float32, np.float64):
            raise UnsupportedProblem([f"dtype must be float32 or float64; got {dtype}: cast the result"])
        with np.errstate(invalid="ignore"):
            scaled: Array = e4m3.to_float32(self.data).astype(dtype) * self._of_rows(self.scale).astype(dtype)
        return scaled

    def _of_rows(self, scale: Array) -> Array:
        """Repeat what parts have for each of their rows, with an axis of columns."""
        if self.per == "block":
            scale = namespace(scale).repeat(scale, min(self.block, self.shape[-2]), axis=-1)[..., : self.shape[-2]]
        return scale[..., None]

    def _fields(self) -> dict[str, Any]:
        names = ("data", "scale", "per", "block", "rotation", "source_dtype")
        return {name: getattr(self, name) for name in names}

    def dequantized(self) -> Array:
        """Return the array that the numbers of 8 bits stand for.

        Returns
        -------
        array
            Of float32, without the rotation.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> x = np.random.default_rng(0).standard_normal((100, 64), dtype=np.float32)
        >>> x8 = cuflash.quantize(x, rotate=cuflash.Rotation(64))
        >>> bool(abs(x8.dequantized() - x).max() < 0.15)
        True
        """
        if self.rotation is None:
            return self.scaled()
        # Rotated numbers may be out of float32's range, and rounding may bring an element there. 2^-16 is exact.
        xp = namespace(self.scale)
        units = xp.where(self.scale >= np.float32(2.0**100), np.float32(2.0**16), np.float32(1))
        rows = _unchecked(**{**self._fields(), "scale": self.scale / units}).scaled()
        most = np.finfo(np.float32).max / self._of_rows(units)
        return xp.clip(self.rotation.undo(rows), -most, most) * self._of_rows(units)

    def transposed(self) -> Array:
        """Return the bytes of data transposed, as kernels read values; the first call makes them.

        Returns
        -------
        array
            Of uint8, of shape (..., columns, rows rounded up to a multiple of 128). Of 16 rows that follow each other,
            0, 1, 8, 9, 2, 3, 10, 11, ... stand in this order.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.quantize(np.ones((2, 200, 64), np.float32)).transposed().shape
        (2, 64, 256)
        """
        if not self._transposed:
            made = on_device.transposed_bytes(self.data)
            self._transposed.append(transposed_values(self.data) if made is None else made)
        return self._transposed[0]

    def _data_reasons(self) -> list[str]:
        wanted = E4M3 if isinstance(self.data, np.ndarray) else np.dtype(np.uint8)
        reasons = []
        if self.data.dtype != wanted:
            reasons.append(f"data must be of {wanted}; got {self.data.dtype}: quantize makes it")
        if self.data.ndim < 2:
            reasons.append(f"data must have shape (..., rows, columns); got {tuple(self.data.shape)}")
        if namespace(self.data) is not namespace(self.scale):
            reasons.append("data and scale must be arrays of one kind: copy one explicitly")
        return reasons

    def _scale_reasons(self) -> list[str]:
        shape = scale_shape(self.shape, self.per, self.block)
        if self.scale.dtype != np.float32 or tuple(self.scale.shape) != shape:
            return [f"scale must have shape {shape} and dtype float32; got {describe(self.scale)}: quantize makes it"]
        if isinstance(self.scale, np.ndarray):
            wrong = self.scale[~((self.scale > 0) & np.isfinite(self.scale))]
            if wrong.size:
                return [f"scale must be positive and finite; got {wrong[0]}: quantize makes it"]
        return []


@explains_keywords
def quantize(
    x: Array,
    *,
    dtype: Any = "float8_e4m3fn",
    per: str = "block",
    block: int = BLOCK,
    rotate: Rotation | None = None,
    largest: float = e4m3.LARGEST,
) -> Quantized:
    """Round an array to 8 bits, with a scale for each block of rows, for each head, or for all of it.

    Parameters
    ----------
    x : array [..., num_heads, seqlen, head_dim] or [seqlen, head_dim]
        An array of float16, bfloat16 or float32, of NumPy, CuPy, or any library with DLPack.
    dtype : dtype
        The only one is float8_e4m3fn: 4 significant bits, at most 448.
    per : {"block", "head", "tensor"}
        What shares a scale: `block` rows of a head, all rows of a head, or everything.
    block : int
        Rows of a block, a multiple of 16.
    rotate : Rotation, optional
        What the rows are multiplied by first. Queries and keys of one call need the same rotation, and values none.
    largest : float
        What the largest magnitude of a part becomes, from 2^-9, the smallest positive e4m3 number, to 448. It is larger
        if the scale would exceed float32's range.

    Returns
    -------
    Quantized
        The numbers of 8 bits and their scales, where x is.

    Raises
    ------
    TypeError
        x is not an array.
    UnsupportedProblem
        An argument is invalid. It lists every reason.

    Notes
    -----
    The scale of a part is max |x| / largest, 1 if all of it is 0. A part that holds NaN or an infinity is NaN. NumPy's
    and CuPy's arrays give the same bits, but for numbers below 2^-126 in magnitude, which count as 0 on a GPU.

    FlashAttention-3, arXiv 2407.08608, section 3.3, quantises in blocks and rotates.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 256, 64), dtype=np.float32)
    >>> rotation = cuflash.Rotation(64)
    >>> q8, k8 = (cuflash.quantize(x, rotate=rotation) for x in (q, k))
    >>> o = cuflash.attention(q8, k8, cuflash.quantize(v), causal=True)
    >>> bool(abs(o - cuflash.attention(q, k, v, causal=True)).max() < 0.2)
    True
    """
    x = as_arrays({"x": x}, {"x": np.float32})["x"]
    require_arrays({"x": x})
    reasons = _option_reasons(per, block, rotate, x)
    with collecting(reasons):
        if as_dtype("dtype", dtype) != E4M3:
            reasons.append(f"dtype must be float8_e4m3fn, the one that is supported; got {as_dtype('dtype', dtype)}")
    if x.dtype not in UP_TO_FLOAT32:
        reasons.append(f"x must be of float16, bfloat16 or float32; got {x.dtype}: cast it")
    if x.ndim < 2:
        reasons.append(f"x must have shape (..., rows, columns); got {tuple(x.shape)}")
    if not is_number(largest) or not _LEAST <= largest <= e4m3.LARGEST:
        rule = f"largest must be a number from 2**-9 to {e4m3.LARGEST:g}"
        reasons.append(f"{rule}; got {describe(largest)}: leave it out for {e4m3.LARGEST:g}")
    refuse(reasons)
    source = np.dtype(x.dtype)
    if per == "block" and (made := on_device.quantized_blocks(x, rotate, int(block), largest)) is not None:
        return Quantized(
            data=made[0], scale=made[1], per=per, block=int(block), rotation=rotate, source_dtype=source
        )
    parts, scale, units = _parts_and_scale(x.astype(np.float32), per, int(block), np.float32(largest), rotate)
    with np.errstate(invalid="ignore"):
        data = e4m3.from_float32(parts / scale[..., None, None])
    data = data.reshape(*x.shape[:-2], parts.shape[-3] * parts.shape[-2], x.shape[-1])[..., : x.shape[-2], :]
    shape = scale_shape(tuple(x.shape), per, int(block))
    return _unchecked(
        data=namespace(x).ascontiguousarray(data), scale=(scale * units).reshape(shape), per=per, block=int(block),
        rotation=rotate, source_dtype=source,
    )  # fmt: skip


def _unchecked(**fields: Any) -> Quantized:
    """Return a result of `quantize` unchecked: the scale of a part that holds NaN or an infinity is not finite."""
    made = object.__new__(Quantized)
    for name, value in {**fields, "_transposed": []}.items():
        object.__setattr__(made, name, value)
    return made


def scale_shape(shape: tuple[int, ...], per: str, block: int) -> tuple[int, ...]:
    """The shape of the scales of an array."""
    if per == "tensor":
        return (1,) * (len(shape) - 1)
    return (*shape[:-2], -(-shape[-2] // block) if per == "block" else 1)


def _parts_and_scale(
    x: Array, per: str, block: int, largest: Any, rotation: Rotation | None
) -> tuple[Array, Array, Array]:
    """The rotated rows as [..., parts, rows of a part, columns], with zeros behind the last, and [..., parts] scales.

    Both are in units that are 1, or large where rotated rows may be out of float32's range.
    """
    xp = namespace(x)
    *leading, rows, columns = x.shape
    if per == "block":
        block = min(block, max(rows, 1))  # a longer block has all rows, and no zeros are put behind them
        missing = -rows % block
        if missing:
            x = xp.concatenate([x, xp.zeros((*leading, missing, columns), x.dtype)], axis=-2)
        parts = x.reshape(*leading, (rows + missing) // block, block, columns)
    else:
        parts = x[..., None, :, :]
    units = np.float32(1)
    if not x.size:
        return parts, xp.ones((1,) * (parts.ndim - 2) if per == "tensor" else parts.shape[:-2], np.float32), units
    axes = tuple(range(parts.ndim)) if per == "tensor" else (-2, -1)
    if rotation is not None:
        units = large_units(xp.max(xp.abs(parts), axis=axes, keepdims=True))
        parts, units = rotation.apply(parts / units), units[..., 0, 0]
    found = xp.max(xp.abs(parts), axis=axes, keepdims=True)[..., 0, 0]
    with np.errstate(over="ignore"):
        scale = xp.where(found == 0, np.float32(1), xp.maximum(found / largest, _SMALLEST_SCALE))
    is_too_large = (scale > _LARGEST_SCALE / units) & xp.isfinite(found)
    return parts, xp.where(is_too_large, _LARGEST_SCALE / units, scale), units


def _option_reasons(per: Any, block: Any, rotation: Any, x: Array) -> list[str]:
    reasons = []
    if not isinstance(per, str) or per not in PARTS:
        reasons.append(f"per must be one of {', '.join(map(repr, PARTS))}; got {describe(per)}: 'block' is the default")
    if not is_int(block) or not 16 <= block < 2**31 or block % 16:
        reasons.append(f"block must be a multiple of 16, at least 16, below 2**31; got {describe(block)}: 128 is one")
    if rotation is not None and not isinstance(rotation, Rotation):
        reasons.append(f"rotate must be a Rotation or None; got {describe(rotation)}: Rotation(head_dim) makes one")
    elif rotation is not None and x.ndim and x.shape[-1] != rotation.head_dim:
        columns = x.shape[-1]
        fits = 0 < columns <= MAX_HEAD_DIM and not columns & (columns - 1)
        fix = f"Rotation({columns}) fits" if fits else "no rotation has it, so give None"
        reasons.append(f"rotate must have the rows' length, {columns}; got {rotation}: {fix}")
    return reasons
