"""Kinds of arrays that the library takes: namespaces, dtypes, and arrays that are only a shape and a dtype."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from .errors import UnsupportedProblem, refuse
from .keywords import explains_keywords

Array: TypeAlias = Any  # an array of any namespace: NumPy's, CuPy's
Namespace: TypeAlias = Any


class DType(NamedTuple):
    """A dtype of q, k and v, by the names that it has elsewhere; NumPy's name is PyTorch's and JAX's too.

    Attributes
    ----------
    numpy : numpy.dtype
    element : str
        Its type in kernels.
    tensor_map : str
        The end of the CUDA driver's name for it; empty if no tensor map copies it.
    has_scale : bool
        Each number is multiplied by a scale, which is an operand of its own.
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
_LONGEST = 60  # characters of a value that a message shows
_MOST_ITEMS = 8  # of a list
_SHORT = (int, float, complex, str, bytes, np.generic, np.dtype)  # types of values that messages write out


@explains_keywords
@dataclass(frozen=True, slots=True)
class ShapeDtype:
    """An array's shape and dtype without its data, for planning.

    Parameters
    ----------
    shape : tuple of int
        Extents of the axes.
    dtype : dtype
        Anything that NumPy takes for a dtype.

    Raises
    ------
    UnsupportedProblem
        The shape is no tuple of ints from 0 to 2**63 - 1, or NumPy knows no such dtype.

    Examples
    --------
    >>> import numpy as np
    >>> ShapeDtype((2, 8, 1024, 64), np.float32)
    ShapeDtype(shape=(2, 8, 1024, 64), dtype=dtype('float32'))
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    if TYPE_CHECKING:  # the dtype is whatever NumPy takes for one

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
    """The array namespace of the first argument that has one; NumPy for plain numbers."""
    for array in arrays:
        if hasattr(array, "__array_namespace__") and not isinstance(array, type):
            return array.__array_namespace__()
        if _is_cupy(array):
            return sys.modules["cupy"]
    return np


def is_array(value: object) -> bool:
    """Return whether `value` is an array of a known kind: one that names its namespace and hides no mask of its own.

    NumPy's scalars are numbers, and classes of arrays are none.
    """
    names_itself = hasattr(value, "__array_namespace__") or _is_cupy(value)
    return names_itself and not isinstance(value, (np.ma.MaskedArray, np.matrix, np.generic, type))


def _is_cupy(value: object) -> bool:
    """CuPy's arrays do not name their namespace (version 14)."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def is_sparse(value: object) -> bool:
    """Return whether a value is a scipy.sparse array; none exists before the process has imported scipy.sparse."""
    if "scipy.sparse" not in sys.modules:
        return False
    from scipy.sparse import issparse

    return bool(issparse(value))


def accumulator_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The dtype of sums, softmax and lse: float64 for float64, else float32."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def times_power_of_two(array: Array, exponent: int) -> Array:
    """An array times 2^exponent, exact but where its dtype has no room; itself for exponent 0."""
    if not exponent:
        return array
    with np.errstate(all="ignore"):
        wide = array.astype(accumulator_dtype(array.dtype), copy=False)
        return namespace(array).ldexp(wide, exponent).astype(array.dtype, copy=False)


def summed_to(gradient: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the sum over the leading axes that were broadcast, rounded once."""
    if gradient.shape == shape:  # a sum over no axes would copy
        return gradient.astype(dtype, copy=False)
    missing = gradient.ndim - len(shape)
    summed_axes = tuple(missing + axis for axis, extent in enumerate(shape) if extent != gradient.shape[missing + axis])
    # Values that float16 cannot hold become inf or 0, and sums of inf NaN, as in the results that need no sum.
    with np.errstate(all="ignore"):
        # Without keepdims NumPy's sum over every axis is a number, which reshape leaves one.
        summed = gradient.sum(axis=(*range(missing), *summed_axes), keepdims=True)
        return summed.reshape(shape).astype(dtype, copy=False)


def to_host(array: Array) -> Array:
    """Return the array as NumPy's. For a device array this waits and copies, so that only displays call it."""
    return array if namespace(array) is np else array.get()


def is_int(value: object) -> bool:
    """Return whether a value is an integer of Python or NumPy; NumPy's durations are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def is_number(value: object) -> bool:
    """Return whether a value is a real number of Python or of NumPy."""
    return is_int(value) or isinstance(value, (float, np.floating))


def as_number(value: Any) -> Any:
    """Return what may be a number as one: the element of a 0-d NumPy array, and bfloat16 as a float.

    Anything else comes back as it is, so that `is_number` decides. Examples are True and Fraction, which are no numbers
    here, and arrays of other libraries, whose gradients a number would lose.
    """
    element = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
    return float(element) if isinstance(element, ml_dtypes.bfloat16) else element


def is_flag(value: object) -> TypeGuard[bool]:
    """Return whether a value is a boolean of Python or of NumPy."""
    return isinstance(value, (bool, np.bool))


def require_callable(name: str, value: object) -> None:
    """Refuse what converts no array, such as the name of a device.

    Raises
    ------
    TypeError
        It cannot be called.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function of an array, such as cupy.asarray; got {describe(value)}")


def flag_reasons(name: str, value: object) -> list[str]:
    """Why an argument that is either True or False is refused."""
    return [] if is_flag(value) else [f"{name} must be True or False; got {describe(value)}"]


def whole_number(name: str, value: Any, least: int | None = None, meaning: str = "", fix: str = "") -> int:
    """A Python int or NumPy integer as a Python int, which does not wrap around at a width.

    Raises
    ------
    UnsupportedProblem
        It is neither, or less than `least`.

    Examples
    --------
    >>> whole_number("window", np.uint8(3)) - 4
    -1
    """
    if is_int(value) and (least is None or value >= least):
        return int(value)
    at_least = "" if least is None else f" of at least {least}"
    rule = f"{name} must be an int{at_least}{meaning and f' ({meaning})'}"
    raise UnsupportedProblem([f"{rule}; got {describe(value)}{fix and f': {fix}'}"])


def as_dtype(name: str, dtype: Any) -> np.dtype[np.generic]:
    """Return NumPy's dtype of a value; None, which NumPy would take for float64, is refused.

    Raises
    ------
    UnsupportedProblem
        NumPy knows no such dtype.
    """
    try:
        if dtype is not None:
            made: np.dtype[np.generic] = np.dtype(dtype)
            return made
    except Exception as error:  # dtypes are made by whatever the argument holds
        written = str(dtype) if type(dtype).__module__ == "torch" else describe(dtype)  # as torch.float32
        like = written.rpartition(".")[2] if written.startswith("torch.") else "float32"
        reason = f'{name} must be a NumPy dtype or its name; got {written}: write {name}="{like}"'
        raise UnsupportedProblem([reason]) from error
    raise UnsupportedProblem([f'{name} must be a NumPy dtype or its name; got None: write {name}="float32"'])


def of_list(name: str, value: Any, dtype: Any = None) -> Any:
    """Return a list or a tuple of numbers, nested or not, as the array that NumPy makes of it; all else as it is.

    Parameters
    ----------
    name : str
        The name of the value in messages.
    value : object
        Anything. A list that holds something else than numbers, such as strings, or booleans among numbers, stays what
        it is.
    dtype : dtype, optional
        That of Python's numbers, which have none: of ints and floats if it is one of floats, of ints that it can hold
        if it is one of ints. An empty list has it too.

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
        raise UnsupportedProblem([_unequal_lengths(name, value)])
    if not is_list(value):
        return value
    first = _first_item(value)
    if _is_of_another_library(first):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:  # NumPy's word for lists of unequal lengths
        raise UnsupportedProblem([_unequal_lengths(name, value)]) from error
    if array.dtype.kind in "OSU" or array.dtype != bool and _holds_flags(value):
        return value
    wanted = array.dtype if dtype is None else np.dtype(dtype)
    kinds = "iuf" if wanted in DTYPES else "iu" if wanted.kind in "iu" else ""
    if array.size and (array.dtype.kind not in kinds or isinstance(first, (np.ndarray, np.generic))):
        return array
    with np.errstate(all="ignore"):  # what a narrower dtype of floats cannot hold becomes infinite, or 0
        cast = array.astype(wanted, copy=False)
    return cast if wanted in DTYPES or (cast == array).all() else array


def is_list(value: object) -> bool:
    """Return whether a value is a list or a tuple; named tuples, which stand for other things, are none."""
    return isinstance(value, list) or type(value) is tuple


def _first_item(value: Any) -> Any:
    """The first item of a nested list that is no list itself."""
    while is_list(value) and value:
        value = value[0]
    return value


def _holds_flags(value: Any) -> bool:
    """Return whether an item of a nested list is a boolean, or an array of them."""
    if is_list(value):
        return any(map(_holds_flags, value))
    return is_flag(value) or isinstance(value, np.ndarray) and value.dtype == bool


def _is_of_another_library(value: object) -> bool:
    """Return whether a value is an array of another library than NumPy."""
    return hasattr(value, "__dlpack_device__") and not isinstance(value, (np.ndarray, np.generic))


def fix_of_numbers(name: str, came: object, dtype: Any) -> str:
    """Return how numbers, an array or a list, become the booleans that an argument takes."""
    spelled = f"np.array({name})" if isinstance(came, (list, tuple)) else name
    additive = "additive numbers go to bias=, and " if name == "mask" and np.dtype(dtype).kind == "f" else ""
    return f"{additive}0/1 numbers become booleans by {spelled} != 0"


def is_ragged(value: object) -> bool:
    """Return whether a value is an array of objects that are lists or arrays, as of sequences of unequal lengths."""
    if not isinstance(value, np.ndarray) or value.dtype != object:
        return False
    return any(isinstance(part, (list, tuple, np.ndarray)) for part in value.flat)


def _unequal_lengths(name: str, parts: Any) -> str:
    """Why lists, or arrays, of unequal lengths cannot be one array."""
    try:
        are_sequences = all(np.ndim(part) >= 2 for part in parts)
    except ValueError:  # a part is itself of unequal lengths
        are_sequences = False
    if not are_sequences:
        return f"{name} must be one array; got lists of unequal lengths: make all lists at one depth equally long"
    fix = f"packed, offsets = cuflash.pack({name}), and mask=masks.Sequences(offsets)"
    return f"{name} must be one array; got a list of sequences of unequal lengths: {fix}"


def is_integer_dtype(dtype: Any) -> bool:
    return np.dtype(dtype).kind in "iu"


def describe(value: object) -> str:
    """A value in a message: an array by shape and dtype, what is short as it is written, anything else by its type."""
    if is_array(value):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"  # type: ignore[attr-defined]
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"  # Python writes no more than some thousand digits
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
    """Return whether a value is a list or a tuple of ints, as the shape of an array is."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_int, value))


def require_arrays(given: Mapping[str, Any]) -> None:
    """Refuse values, by their names in messages, that are not arrays.

    Raises
    ------
    TypeError
        A value is not an array of a known kind.
    """
    for name, value in given.items():
        if not is_array(value):
            raise TypeError(no_array(name, value))


def no_array(name: str, value: object) -> str:
    """Why an argument that has to be an array is refused."""
    makes = "numpy.asarray makes one" if hasattr(value, "__array__") or isinstance(value, range) else ""
    if type(value).__name__ == "KVCache":
        fix = "call cache.attention(q), or give the keys and values of one sequence, cache.rows(0)"
        return f"{name} must be an array; got a KVCache: {fix}"
    if hasattr(value, "toarray"):
        makes = "its toarray() makes one"
    elif isinstance(value, np.ma.MaskedArray):
        makes = "its filled() makes one, and mask= takes what it hides"
    elif hasattr(value, "dequantized"):
        makes = "its dequantized() makes one"
    elif isinstance(value, type):
        makes = "call it"
    elif is_shape(value):
        makes = f"plan takes cuflash.ShapeDtype({describe(value)}, dtype) in the place of an array"
    elif isinstance(value, (list, tuple)):
        is_of_arrays = _is_of_another_library(_first_item(value))
        makes = "stack them to one array first" if is_of_arrays else "lists may hold numbers alone, or booleans alone"
    elif hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__"):
        makes = "it holds no data, and plan takes cuflash.ShapeDtype(shape, dtype) in the place of such a value"
    return f"{name} must be an array; got {describe(value)}{makes and f': {makes}'}"
