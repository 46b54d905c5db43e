"""Array namespaces, dtypes, and checks and conversions of arguments that are arrays or numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from .errors import UnsupportedProblem, refuse
from .keywords import explains_keywords

Array: TypeAlias = Any  # an array of any namespace, such as NumPy or CuPy
Namespace: TypeAlias = Any


class DType(NamedTuple):
    """A dtype of q, k and v, with its names in NumPy, kernels and tensor maps; PyTorch and JAX use NumPy's name.

    Attributes
    ----------
    numpy : numpy.dtype
    element : str
        The name of the element type in kernels.
    tensor_map : str
        The last part of the CUDA driver's name for it; empty if tensor maps do not support it.
    has_scale : bool
        True if the numbers are multiplied by scales, which are a separate operand.
    """

    numpy: np.dtype[np.generic]
    element: str
    tensor_map: str = ""
    has_scale: bool = False


BFLOAT16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
KNOWN_DTYPES = (
    DType(np.dtype(np.float16), "ptx::Half", "FLOAT16"),
    DType(BFLOAT16, "ptx::BFloat16", "BFLOAT16"),
    DType(np.dtype(np.float32), "float", "FLOAT32"),
    DType(np.dtype(np.float64), "double"),
    DType(E4M3, "uint8_t", has_scale=True),
)
DTYPES = tuple(each.numpy for each in KNOWN_DTYPES if not each.has_scale)
SCALED_DTYPES = tuple(each.numpy for each in KNOWN_DTYPES if each.has_scale)
HALVES = tuple(dtype for dtype in DTYPES if dtype.itemsize == 2)
UP_TO_FLOAT32 = (*HALVES, np.dtype(np.float32))  # dtypes that are rounded to FP8
_LONGEST = 60  # maximum number of characters of a value in a message
_MOST_ITEMS = 8  # maximum number of items of a list in a message
_SHORT = (int, float, complex, str, bytes, np.generic, np.dtype)  # types whose values messages show


@explains_keywords
@dataclass(frozen=True, slots=True)
class ShapeDtype:
    """An array's shape and dtype without its data, for planning.

    Parameters
    ----------
    shape : tuple of int
        Lengths of the axes.
    dtype : dtype
        Anything that NumPy accepts as a dtype.

    Raises
    ------
    UnsupportedProblem
        The shape is not a tuple of ints from 0 to 2**63 - 1, or NumPy does not accept the dtype.

    Examples
    --------
    >>> import numpy as np
    >>> ShapeDtype((2, 8, 1024, 64), np.float32)
    ShapeDtype(shape=(2, 8, 1024, 64), dtype=dtype('float32'))
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    if TYPE_CHECKING:  # the constructor accepts anything that NumPy accepts as a dtype

        def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None: ...

    def __post_init__(self) -> None:
        reasons = []
        shape = tuple(self.shape) if isinstance(self.shape, (tuple, list)) else (None,)
        if all(is_int(extent) and 0 <= extent < 2**63 for extent in shape):
            object.__setattr__(self, "shape", tuple(map(int, shape)))
        else:
            reasons.append(f"shape must be a tuple of ints from 0 to 2**63 - 1; got {describe(self.shape)}")
        try:
            object.__setattr__(self, "dtype", as_dtype("dtype", self.dtype))
        except UnsupportedProblem as error:
            reasons.extend(error.reasons)
        refuse(reasons)

    @property
    def ndim(self) -> int:
        return len(self.shape)


def namespace(*arrays: Any) -> Namespace:
    """Return the array namespace of the first argument that has one, or NumPy if all are numbers."""
    for array in arrays:
        if hasattr(array, "__array_namespace__") and not isinstance(array, type):
            return array.__array_namespace__()
        if is_cupy(array):
            return sys.modules["cupy"]
    return np


def is_array(value: object) -> bool:
    """True if `value` is an array with an array namespace, or a CuPy array.

    False for masked arrays, for NumPy's matrices and scalars, and for the array classes themselves.
    """
    names_itself = hasattr(value, "__array_namespace__") or is_cupy(value)
    return names_itself and not isinstance(value, (np.ma.MaskedArray, np.matrix, np.generic, type))


def is_cupy(value: object) -> bool:
    """True if a value is a CuPy array; CuPy 14 has no `__array_namespace__`."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def is_sparse(value: object) -> bool:
    """True if a value is a scipy.sparse array; False unless the process has imported scipy.sparse."""
    if "scipy.sparse" not in sys.modules:
        return False
    from scipy.sparse import issparse

    return bool(issparse(value))


def accumulator_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return the dtype of sums, softmax and lse: float64 for float64, otherwise float32."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def times_power_of_two(array: Array, exponent: int) -> Array:
    """Multiply an array by 2^exponent, exactly unless the dtype overflows or underflows; exponent 0 makes no copy."""
    if not exponent:
        return array
    with np.errstate(all="ignore"):
        wide = array.astype(accumulator_dtype(array.dtype), copy=False)
        return namespace(array).ldexp(wide, exponent).astype(array.dtype, copy=False)


def summed_to(gradient: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Sum a gradient over the axes along which its array was broadcast, and round it once."""
    if gradient.shape == shape and gradient.dtype == dtype:
        return gradient
    missing = gradient.ndim - len(shape)
    summed_axes = tuple(missing + axis for axis, extent in enumerate(shape) if extent != gradient.shape[missing + axis])
    # No warnings: results may overflow to inf, underflow to 0, or be NaN.
    with np.errstate(all="ignore"):
        if gradient.shape == shape:  # avoids the copy of a sum over no axes
            return gradient.astype(dtype, copy=False)
        # Without keepdims NumPy's sum over all axes would be a scalar instead of an array.
        summed = gradient.sum(axis=(*range(missing), *summed_axes), keepdims=True)
        return summed.reshape(shape).astype(dtype, copy=False)


def to_host(array: Array) -> Array:
    """Return an array as a NumPy array; a device array is copied, which waits for the device."""
    return array if namespace(array) is np else array.get()


def is_int(value: object) -> TypeGuard[int]:
    """True if a value is an integer of Python or NumPy, but not a bool or a NumPy timedelta."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def is_number(value: object) -> TypeGuard[float]:
    """True if a value is a real number of Python or NumPy."""
    return is_int(value) or isinstance(value, (float, np.floating))


def is_finite(value: object) -> TypeGuard[float]:
    """True if a value is a real number within the range of float64."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # an int
        return False


def as_number(value: Any) -> Any:
    """Convert a 0-d NumPy array to its element, and a bfloat16 scalar to a float; return any other value unchanged.

    `is_number` then decides. It refuses, for example, True and Fraction, and arrays of other libraries, whose gradients
    would be lost.
    """
    element = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
    return float(element) if isinstance(element, ml_dtypes.bfloat16) else element


def is_flag(value: object) -> TypeGuard[bool]:
    """True if a value is a boolean of Python or NumPy."""
    return isinstance(value, (bool, np.bool))


def require_callable(name: str, value: object) -> None:
    """Raise an error if a value is not callable: users may pass a device name instead of a function for arrays.

    Raises
    ------
    TypeError
        The value is not callable.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function of an array, such as cupy.asarray; got {describe(value)}")


def flag_reasons(name: str, value: object) -> list[str]:
    """Return why an argument that must be True or False is refused."""
    return [] if is_flag(value) else [f"{name} must be True or False; got {describe(value)}"]


def whole_number(name: str, value: Any, least: int | None = None, meaning: str = "", fix: str = "") -> int:
    """Return a Python or NumPy integer as a Python int, whose arithmetic cannot overflow.

    Raises
    ------
    UnsupportedProblem
        The value is not an integer, or is less than `least`.

    Examples
    --------
    >>> whole_number("window", np.uint8(3)) - 4
    -1
    """
    if is_int(value) and (least is None or value >= least):
        return int(value)
    at_least = "" if least is None else f" of at least {least}"
    rule = f"{name} must be an int{at_least}{meaning and f' ({meaning})'}"
    raise UnsupportedProblem(f"{rule}; got {describe(value)}{fix and f': {fix}'}")


def int_reasons(least: int, most: int | None = None, **values: int) -> list[str]:
    """Return the reasons why values, by the names of their arguments, are not ints from `least` to `most`.

    >>> int_reasons(0, 2**31 - 1, n=-1)
    ['n must be an int from 0 to 2**31 - 1; got -1']
    """
    rule = f"of at least {least}"
    if most is not None:
        is_long = most >= 2**31 - 1 and not most & most + 1
        rule = f"from {least} to {f'2**{most.bit_length()} - 1' if is_long else most}"
    reasons = []
    for name, value in values.items():
        if not (is_int(value) and least <= value and (most is None or value <= most)):
            reasons.append(f"{name} must be an int {rule}; got {describe(value)}")
    return reasons


def as_dtype(name: str, dtype: DTypeLike | None) -> np.dtype[np.generic]:
    """Convert a value to a NumPy dtype; None, which NumPy would convert to float64, is refused.

    Raises
    ------
    UnsupportedProblem
        NumPy does not accept the value as a dtype.
    """
    try:
        if dtype is not None:
            converted: np.dtype[np.generic] = np.dtype(dtype)
            return converted
    except Exception as error:  # np.dtype may run code of the value's class
        written = str(dtype) if type(dtype).__module__ == "torch" else describe(dtype)  # such as torch.float32
        like = written.rpartition(".")[2] if written.startswith("torch.") else "float32"
        reason = f'{name} must be a NumPy dtype or its name; got {written}: write {name}="{like}"'
        raise UnsupportedProblem(reason) from error
    raise UnsupportedProblem(f'{name} must be a NumPy dtype or its name; got None: write {name}="float32"')


def of_list(name: str, value: Any, dtype: DTypeLike | None = None) -> Any:
    """Convert a list or tuple of numbers, nested or not, to a NumPy array; return any other value unchanged.

    Parameters
    ----------
    name : str
        The name of the value in messages.
    value : object
        Any value. A list that contains anything other than numbers, such as strings, or booleans among numbers, is not
        converted.
    dtype : dtype, optional
        The dtype for Python numbers. A floating dtype applies to ints and floats, an integer dtype to ints that it can
        represent. It also applies to an empty list.

    Raises
    ------
    UnsupportedProblem
        Lists at one depth have unequal lengths.

    Examples
    --------
    >>> of_list("kv", [50, 37])
    array([50, 37])
    """
    if is_ragged(value):
        raise UnsupportedProblem(_unequal_lengths(name, value))
    if not is_list(value):
        return value
    first = _first_item(value)
    if _is_of_another_library(first):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:  # NumPy's error for lists of unequal lengths
        raise UnsupportedProblem(_unequal_lengths(name, value)) from error
    if array.dtype.kind in "OSU" or array.dtype != bool and _holds_flags(value):
        return value
    wanted = array.dtype if dtype is None else np.dtype(dtype)
    kinds = "iuf" if wanted in DTYPES else "iu" if wanted.kind in "iu" else ""
    if array.size and (array.dtype.kind not in kinds or isinstance(first, (np.ndarray, np.generic))):
        return array
    with np.errstate(all="ignore"):  # numbers that a narrower floating dtype cannot represent become infinite or 0
        cast = array.astype(wanted, copy=False)
    return cast if wanted in DTYPES or (cast == array).all() else array


def is_list(value: object) -> bool:
    """True if a value is a list or a tuple, but not a named tuple, which has a different meaning."""
    return isinstance(value, list) or type(value) is tuple


def _first_item(value: Any) -> Any:
    """Return the first item of a nested list that is not itself a list."""
    while is_list(value) and value:
        value = value[0]
    return value


def _holds_flags(value: Any) -> bool:
    """True if an item of a nested list is a boolean or an array of booleans."""
    if is_list(value):
        return any(map(_holds_flags, value))
    return is_flag(value) or isinstance(value, np.ndarray) and value.dtype == bool


def _is_of_another_library(value: object) -> bool:
    """True if a value is an array of a library other than NumPy."""
    return hasattr(value, "__dlpack_device__") and not isinstance(value, (np.ndarray, np.generic))


def fix_of_numbers(name: str, value: object, dtype: DTypeLike) -> str:
    """Return advice for a user who passed an array or list of numbers instead of booleans."""
    written = f"np.array({name})" if isinstance(value, (list, tuple)) else name
    additive = "pass additive numbers as bias=, and " if name == "mask" and np.dtype(dtype).kind == "f" else ""
    return f"{additive}convert 0/1 numbers to booleans with {written} != 0"


def is_ragged(value: object) -> bool:
    """True if a value is an object array of lists or arrays, for example of sequences of unequal lengths."""
    if not isinstance(value, np.ndarray) or value.dtype != object:
        return False
    return any(isinstance(part, (list, tuple, np.ndarray)) for part in value.flat)


def _unequal_lengths(name: str, parts: Any) -> str:
    """Return why lists or arrays of unequal lengths are refused as one array."""
    try:
        are_sequences = all(np.ndim(part) >= 2 for part in parts)
    except ValueError:  # a part itself contains lists of unequal lengths
        are_sequences = False
    if not are_sequences:
        return f"{name} must be one array; got lists of unequal lengths: give all lists at one depth the same length"
    fix = f"use packed, offsets = cuflash.pack({name}), and mask=masks.Sequences(offsets)"
    return f"{name} must be one array; got a list of sequences of unequal lengths: {fix}"


def is_integer_dtype(dtype: DTypeLike) -> bool:
    return np.dtype(dtype).kind in "iu"


def describe(value: object) -> str:
    """Return how messages show a value: an array's shape and dtype, a short value itself, otherwise the type."""
    if is_array(value):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"  # type: ignore[attr-defined]
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"  # Python refuses to convert very long ints to str
    if isinstance(value, tuple) and len(value) <= 4:
        return f"({', '.join(map(describe, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        items = list(map(describe, value[:_MOST_ITEMS]))
        shown = ", ".join(items)
        if len(shown) > 2 * _LONGEST or "list" in items:
            return "list"
        return f"[{shown}]" if len(value) <= _MOST_ITEMS else f"[{shown}, ...] of {len(value)} items"
    if value is None or isinstance(value, _SHORT):
        written = repr(value)
        return written if len(written) <= _LONGEST else f"{written[:_LONGEST]}..."
    return type(value).__name__


def is_shape(value: object) -> bool:
    """True if a value is a nonempty list or tuple of ints, which may be the shape of an array."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_int, value))


def require_arrays(values: Mapping[str, Any]) -> None:
    """Raise an error unless all values, by their names in messages, are arrays.

    Raises
    ------
    TypeError
        A value is not an array of a known kind.
    """
    for name, value in values.items():
        if not is_array(value):
            raise TypeError(no_array(name, value))


def no_array(name: str, value: object) -> str:
    """Return why an argument that must be an array is refused."""
    fix = f"use numpy.asarray({name})" if hasattr(value, "__array__") or isinstance(value, range) else ""
    if type(value).__name__ == "KVCache":
        fix = "call cache.attention(q), or pass the keys and values of one sequence, cache.rows(0)"
        return f"{name} must be an array; got a KVCache: {fix}"
    if hasattr(value, "toarray"):
        fix = f"use {name}.toarray()"
    elif isinstance(value, np.ma.MaskedArray):
        fix = f"use {name}.filled(0), and mask= for the hidden elements"
    elif hasattr(value, "dequantized"):
        fix = f"use {name}.dequantized()"
    elif isinstance(value, type):
        fix = "call it"
    elif is_shape(value):
        fix = f"plan accepts cuflash.ShapeDtype({describe(value)}, dtype) instead of an array"
    elif isinstance(value, (list, tuple)):
        is_of_arrays = _is_of_another_library(_first_item(value))
        fix = "stack them into one array first" if is_of_arrays else "a list may contain only numbers, or only booleans"
    elif hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__"):
        fix = "it holds no data, and plan accepts cuflash.ShapeDtype(shape, dtype) instead of such a value"
    return f"{name} must be an array; got {describe(value)}{fix and f': {fix}'}"
