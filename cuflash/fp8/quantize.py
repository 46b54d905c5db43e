"""FP8 (e4m3) arrays with a scale for each block of rows, for each head, or for the whole array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import E4M3, UP_TO_FLOAT32, Array, as_dtype, describe, is_int, is_number, namespace, require_arrays
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from ..planning.problem import MAX_HEAD_DIM
from ..plans.conversion import as_arrays
from . import e4m3, on_device
from .rotation import Rotation, large_units

PARTS = ("block", "head", "tensor")
BLOCK = 128  # rows that share a scale by default
_SMALLEST_SCALE, _LARGEST_SCALE = np.float32(2.0**-126), np.finfo(np.float32).max
_LEAST = 2.0**-9  # the smallest positive e4m3 number


@explains_keywords
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """An FP8 array with scales, which `attention` accepts instead of q, k or v.

    Parameters
    ----------
    data : array [..., rows, columns]
        The FP8 numbers: float8_e4m3fn (ml_dtypes) in NumPy, or uint8 with the same bits in CuPy.
    scale : array
        The scales, positive and finite, as float32. The shape is (..., number of blocks of rows) for `per` "block",
        (..., 1) for "head" and (1, ..., 1) for "tensor", with one axis fewer than data. Only `quantize` itself uses a
        scale that is NaN or infinite, for a part that contains NaN or infinity. Scales on a device are not checked,
        because that would wait for the device: a scale that is not finite makes its part NaN, and the results for a
        scale of 0 or below are undefined.
    per : {"block", "head", "tensor"}
        The part of the array that shares a scale.
    block : int
        Number of rows in a block.
    rotation : Rotation, optional
        The rotation that was applied to the rows before they were rounded.
    source_dtype : dtype
        The dtype of the array that was quantized; o of `attention` has the source dtype of v.

    Raises
    ------
    TypeError
        data or scale is not an array.
    UnsupportedProblem
        The arguments do not match, or a scale on the host is not positive and finite. The error lists every reason.

    Notes
    -----
    data and scale are not copied, and must not be written to afterwards: the scales have been checked, and the first
    call stores a transposed copy of the data.

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
        """The shape of the array that was quantized.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.quantize(np.ones((2, 200, 64), np.float32)).shape
        (2, 200, 64)
        """
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the array that was quantized.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.quantize(np.ones((2, 200, 64), np.float32)).ndim
        3
        """
        return int(self.data.ndim)

    def __repr__(self) -> str:
        return f"Quantized(shape={self.shape}, per={self.per!r}, block={self.block}, rotation={self.rotation})"

    def scaled(self, dtype: DTypeLike = np.float32) -> Array:
        """Multiply the FP8 numbers by their scales; rotated rows stay rotated.

        Parameters
        ----------
        dtype : dtype
            Either float32, in which the products are rounded, or float64, in which they are exact.

        Returns
        -------
        array
            An array with the shape of data.

        Raises
        ------
        UnsupportedProblem
            The dtype is neither float32 nor float64.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> x = np.float32([[1, 2, 3, 448]])
        >>> cuflash.quantize(x).scaled()
        array([[  1.,   2.,   3., 448.]], dtype=float32)
        """
        dtype = as_dtype("dtype", dtype)
        if dtype not in (np.float32, np.float64):
            raise UnsupportedProblem(f"dtype must be float32 or float64; got {dtype}: cast the result")
        with np.errstate(all="ignore"):
            scaled: Array = e4m3.to_float32(self.data).astype(dtype) * self._of_rows(self.scale).astype(dtype)
        return scaled

    def _of_rows(self, scale: Array) -> Array:
        """Repeat one value per part for each row of the part, and append an axis of length 1 for the columns."""
        if self.per == "block":
            scale = namespace(scale).repeat(scale, min(self.block, self.shape[-2]), axis=-1)[..., : self.shape[-2]]
        return scale[..., None]

    def _fields(self) -> dict[str, Any]:
        names = ("data", "scale", "per", "block", "rotation", "source_dtype")
        return {name: getattr(self, name) for name in names}

    def dequantized(self) -> Array:
        """Return the float32 array that the FP8 numbers represent.

        Returns
        -------
        array
            A float32 array, with the rotation undone.

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
        # Rotated numbers may exceed float32's range, and so may an element after rounding. Dividing by 2^16 is exact.
        xp = namespace(self.scale)
        units = xp.where(self.scale >= np.float32(2.0**100), np.float32(2.0**16), np.float32(1))
        rows = _unchecked(**{**self._fields(), "scale": self.scale / units, "_transposed": []}).scaled()
        most = np.finfo(np.float32).max / self._of_rows(units)
        return xp.clip(self.rotation.undo(rows), -most, most) * self._of_rows(units)

    def transposed(self) -> Array:
        """Return the transposed bytes of data, as kernels read values; the first call computes and stores them.

        Returns
        -------
        array
            An array of uint8 with shape (..., columns, rows rounded up to a multiple of 128). Within each group of 16
            consecutive rows the order is 0, 1, 8, 9, 2, 3, 10, 11, ...

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.quantize(np.ones((2, 200, 64), np.float32)).transposed().shape
        (2, 64, 256)
        """
        if not self._transposed:
            transposed = on_device.transposed_bytes(self.data)
            self._transposed.append(e4m3.transposed_values(self.data) if transposed is None else transposed)
        return self._transposed[0]

    def _data_reasons(self) -> list[str]:
        wanted = E4M3 if isinstance(self.data, np.ndarray) else np.dtype(np.uint8)
        reasons = []
        if self.data.dtype != wanted:
            reasons.append(f"data must have dtype {wanted}; got {self.data.dtype}: use cuflash.quantize")
        if self.data.ndim < 2:
            reasons.append(f"data must have shape (..., rows, columns); got {tuple(self.data.shape)}")
        if namespace(self.data) is not namespace(self.scale):
            reasons.append("data and scale must be arrays of the same library: copy one explicitly")
        return reasons

    def _scale_reasons(self) -> list[str]:
        shape = scale_shape(self.shape, self.per, self.block)
        if self.scale.dtype != np.float32 or tuple(self.scale.shape) != shape:
            rule = f"scale must have shape {shape} and dtype float32"
            return [f"{rule}; got {describe(self.scale)}: use cuflash.quantize"]
        if isinstance(self.scale, np.ndarray):
            wrong = self.scale[~((self.scale > 0) & np.isfinite(self.scale))]
            if wrong.size:
                return [f"scale must be positive and finite; got {wrong[0]}: use cuflash.quantize"]
        return []


@overload
def quantize(
    x: Array, *, dtype: DTypeLike = ..., per: str = ..., block: int = ..., rotate: Rotation | None = ...,
    largest: float = ...,
) -> Quantized: ...  # fmt: skip


@overload
def quantize(
    x: Array, k: Array, v: Array, *, dtype: DTypeLike = ..., per: str = ..., block: int = ...,
    rotate: Rotation | None = ..., largest: float = ...,
) -> tuple[Quantized, Quantized, Quantized]: ...  # fmt: skip


@explains_keywords
def quantize(
    x: Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    dtype: DTypeLike = "float8_e4m3fn",
    per: str = "block",
    block: int = BLOCK,
    rotate: Rotation | None = None,
    largest: float = e4m3.LARGEST,
) -> Quantized | tuple[Quantized, Quantized, Quantized]:
    """Quantize an array, or q, k and v of a call, to FP8, with a scale for each block of rows, head, or whole array.

    Parameters
    ----------
    x : array [..., num_heads, seqlen, head_dim] or [seqlen, head_dim]
        An array of float16, bfloat16 or float32 from NumPy, CuPy, or any library with DLPack; q if k and v are passed.
    k, v : array [..., num_kv_heads, seqlen_kv, head_dim], optional
        The keys and values of the call. On a GPU, a single kernel then rotates, rounds and transposes all three.
    dtype : dtype
        The FP8 format. Only float8_e4m3fn is supported: 4 significant bits, at most 448.
    per : {"block", "head", "tensor"}
        The part that shares a scale: `block` rows of a head, all rows of a head, or the whole array.
    block : int
        Number of rows in a block, a multiple of 16.
    rotate : Rotation, optional
        The rotation of the rows of x and k before rounding; v is never rotated. Queries and keys of a call need the
        same rotation, and values none.
    largest : float
        The largest magnitude of each part after scaling, from 2^-9, the smallest positive e4m3 number, to 448. It is
        larger if the scale would exceed float32's range.

    Returns
    -------
    Quantized, or a tuple of three Quantized
        The FP8 numbers and their scales, on the device of x.

    Raises
    ------
    TypeError
        x, k or v is not an array, or only one of k and v is passed.
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Notes
    -----
    The scale of a part is max |x| / largest, or 1 if the whole part is 0. A part that contains NaN or infinity becomes
    NaN. NumPy and CuPy arrays give the same bits, except that a GPU treats numbers below 2^-126 in magnitude as 0.

    FlashAttention-3, arXiv 2407.08608, section 3.3, also quantizes in blocks and rotates queries and keys.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 256, 64), dtype=np.float32)
    >>> q8, k8, v8 = cuflash.quantize(q, k, v, rotate=cuflash.Rotation(64))
    >>> o = cuflash.attention(q8, k8, v8, causal=True)
    >>> bool(abs(o - cuflash.attention(q, k, v, causal=True)).max() < 0.2)
    True
    """
    is_one = k is None and v is None
    arrays = as_arrays({"x": x} if is_one else {"x": x, "k": k, "v": v}, dict.fromkeys("xkv", np.float32))
    require_arrays(arrays)
    reasons = _array_reasons(arrays) + _option_reasons(per, block, None, arrays["x"])
    with collecting(reasons):
        if as_dtype("dtype", dtype) != E4M3:
            reasons.append(f"dtype must be float8_e4m3fn, the only supported one; got {as_dtype('dtype', dtype)}")
    if not is_number(largest) or not _LEAST <= largest <= e4m3.LARGEST:
        rule = f"largest must be a number from 2**-9 to {e4m3.LARGEST:g}"
        reasons.append(f"{rule}; got {describe(largest)}: leave it out for {e4m3.LARGEST:g}")
    for name in ("x", "k"):
        reasons += _rotation_reasons(rotate, arrays[name]) if name in arrays else []
    refuse(list(dict.fromkeys(reasons)))
    rotations = [None if name == "v" else rotate for name in arrays]
    results = _of_blocks(arrays, rotations, int(block), largest) if per == "block" else None
    if results is None:
        results = [_of_parts(x, per, int(block), largest, rotate) for x, rotate in zip(arrays.values(), rotations)]
    return results[0] if is_one else (results[0], results[1], results[2])


def _of_blocks(
    arrays: Mapping[str, Array], rotations: Sequence[Rotation | None], block: int, largest: float
) -> list[Quantized] | None:
    """Quantize blocks of rows on a GPU, with values also transposed; None if no kernel supports the arrays."""
    are_values = [name == "v" for name in arrays]
    blocks = on_device.quantized_blocks(list(arrays.values()), rotations, are_values, block, largest)
    if blocks is None:
        return None
    return [
        _unchecked(
            data=data, scale=scale, per="block", block=block, rotation=rotation, source_dtype=np.dtype(x.dtype),
            _transposed=[] if transposed is None else [transposed],
        )
        for x, rotation, (data, scale, transposed) in zip(arrays.values(), rotations, blocks)
    ]  # fmt: skip


@np.errstate(all="ignore")
def _of_parts(x: Array, per: str, block: int, largest: float, rotation: Rotation | None) -> Quantized:
    """Quantize an array by operations of its library."""
    parts, scale, units = _parts_and_scale(x.astype(np.float32), per, block, np.float32(largest), rotation)
    data = e4m3.from_float32(parts / scale[..., None, None])
    data = data.reshape(*x.shape[:-2], parts.shape[-3] * parts.shape[-2], x.shape[-1])[..., : x.shape[-2], :]
    shape = scale_shape(tuple(x.shape), per, block)
    return _unchecked(
        data=namespace(x).ascontiguousarray(data), scale=(scale * units).reshape(shape), per=per, block=block,
        rotation=rotation, source_dtype=np.dtype(x.dtype), _transposed=[],
    )  # fmt: skip


def _unchecked(**fields: Any) -> Quantized:
    """Create a Quantized without checks, since the scale of a part that contains NaN or infinity is not finite."""
    quantized = object.__new__(Quantized)
    for name, value in fields.items():
        object.__setattr__(quantized, name, value)
    return quantized


def scale_shape(shape: tuple[int, ...], per: str, block: int) -> tuple[int, ...]:
    """Return the shape of the scales of an array that has this shape."""
    if per == "tensor":
        return (1,) * (len(shape) - 1)
    return (*shape[:-2], -(-shape[-2] // block) if per == "block" else 1)


def _parts_and_scale(
    x: Array, per: str, block: int, largest: np.float32, rotation: Rotation | None
) -> tuple[Array, Array, Array]:
    """Split rows into parts, rotate them, and return parts, scales and units.

    Parts have shape [..., parts, rows per part, columns], with zeros after the last row, and scales [..., parts]. Both
    are divided by the units, which are 1, or a larger power of two if the rotated rows may exceed float32's range.
    """
    xp = namespace(x)
    *leading, rows, columns = x.shape
    if per == "block":
        block = min(block, max(rows, 1))  # a block that exceeds the array holds all rows, without padding
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
    magnitude = xp.max(xp.abs(parts), axis=axes, keepdims=True)[..., 0, 0]
    scale = xp.where(magnitude == 0, np.float32(1), xp.maximum(magnitude / largest, _SMALLEST_SCALE))
    is_too_large = (scale > _LARGEST_SCALE / units) & xp.isfinite(magnitude)
    return parts, xp.where(is_too_large, _LARGEST_SCALE / units, scale), units


def _array_reasons(arrays: Mapping[str, Array]) -> list[str]:
    reasons = []
    for name, x in arrays.items():
        if x.dtype not in UP_TO_FLOAT32:
            reasons.append(f"{name} must have dtype float16, bfloat16 or float32; got {x.dtype}: cast it")
        if x.ndim < 2:
            reasons.append(f"{name} must have shape (..., rows, columns); got {tuple(x.shape)}")
    return reasons


def _option_reasons(per: str, block: int, rotation: Rotation | None, x: Array) -> list[str]:
    reasons = []
    if not isinstance(per, str) or per not in PARTS:
        reasons.append(f"per must be one of {', '.join(map(repr, PARTS))}; got {describe(per)}: use 'block'")
    if not is_int(block) or not 16 <= block < 2**31 or block % 16:
        rule = "block must be a multiple of 16, at least 16, below 2**31"
        reasons.append(f"{rule}; got {describe(block)}: use 128, for example")
    return reasons + _rotation_reasons(rotation, x)


def _rotation_reasons(rotation: Rotation | None, x: Array) -> list[str]:
    if rotation is not None and not isinstance(rotation, Rotation):
        return [f"rotate must be a Rotation or None; got {describe(rotation)}: use Rotation(head_dim)"]
    if rotation is None or not x.ndim or x.shape[-1] == rotation.head_dim:
        return []
    columns = x.shape[-1]
    fits = 0 < columns <= MAX_HEAD_DIM and not columns & (columns - 1)
    fix = f"use Rotation({columns})" if fits else "no rotation has this length, so use rotate=None"
    return [f"rotate must have the length of the rows, {columns}; got {rotation}: {fix}"]
