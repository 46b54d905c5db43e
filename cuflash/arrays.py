"""Kinds of arrays that the library takes: namespaces, dtypes, and arrays that are only a shape and a dtype."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from .errors import UnsupportedProblem
from .keywords import explains_keywords

Array: TypeAlias = Any  # an array of any namespace: NumPy's, CuPy's
Namespace: TypeAlias = Any

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
_LONGEST = 60  # characters of a value that a message shows
_MOST_ITEMS = 8  # of a list
_SHORT = (int, float, complex, str, bytes, np.generic)  # types of values that messages write out


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
    dtype: np.dtype[Any]

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
        if reasons:
            raise UnsupportedProblem(reasons)

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


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of sums, softmax and lse: float64 for float64, else float32."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


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


def as_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """Return NumPy's dtype of a value; None, which NumPy would take for float64, is refused.

    Raises
    ------
    UnsupportedProblem
        NumPy knows no such dtype.
    """
    try:
        if dtype is not None:
            made: np.dtype[Any] = np.dtype(dtype)
            return made
    except Exception as error:  # dtypes are made by whatever the argument holds
        written = str(dtype) if type(dtype).__module__ == "torch" else describe(dtype)  # as torch.float32
        like = written.rpartition(".")[2] if written.startswith("torch.") else "float32"
        reason = f'{name} must be a NumPy dtype or its name; got {written}: write {name}="{like}"'
        raise UnsupportedProblem([reason]) from error
    raise UnsupportedProblem([f'{name} must be a NumPy dtype or its name; got None: write {name}="float32"'])


def as_int_array(value: Any) -> Any:
    """A list or tuple of ints as an int64 array; anything else as it is."""
    if isinstance(value, (list, tuple)) and all(is_int(each) and -(2**62) < each < 2**62 for each in value):
        return np.array([int(each) for each in value], np.int64)
    return value


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
    if isinstance(value, list) and value and all(isinstance(each, _SHORT) for each in value[:_MOST_ITEMS]):
        shown = ", ".join(map(describe, value[:_MOST_ITEMS]))
        return f"[{shown}]" if len(value) <= _MOST_ITEMS else f"[{shown}, ...] of {len(value)} items"
    if value is None or isinstance(value, _SHORT):
        written = repr(value)
        return written if len(written) <= _LONGEST else f"{written[:_LONGEST]}..."
    return type(value).__name__


def fix_of_list(value: object) -> str:
    """Return the end of a message about an array: the fix if a list or a tuple came in its place, else nothing."""
    return ": numpy.asarray makes an array" if isinstance(value, (list, tuple)) else ""


def no_array(name: str, value: object) -> str:
    """Why an argument that has to be an array is refused."""
    makes = "numpy.asarray makes one"
    if type(value).__name__ == "KVCache":
        return f"{name} must be an array; got a KVCache: call cache.attention(q)"
    if hasattr(value, "toarray"):
        makes = "its toarray() makes one"
    elif isinstance(value, np.ma.MaskedArray):
        makes = "its filled() makes one, and mask= takes what it hides"
    elif hasattr(value, "dequantized"):
        makes = "its dequantized() makes one"
    elif isinstance(value, type):
        makes = "call it"
    elif hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__"):
        makes = "it holds no data, and plan takes cuflash.ShapeDtype(shape, dtype) in the place of such a value"
    return f"{name} must be an array; got {describe(value)}: {makes}"
