"""What counts as an array here: its namespace, its dtypes, and arrays that are only a shape and a dtype."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from .errors import UnsupportedProblem

Array: TypeAlias = Any  # an array of any namespace: NumPy's, CuPy's
Namespace: TypeAlias = Any

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True)
class ShapeDtype:
    """An array's shape and dtype without its data, for planning.

    >>> import numpy as np
    >>> ShapeDtype((2, 8, 1024, 64), np.float32)
    ShapeDtype(shape=(2, 8, 1024, 64), dtype=dtype('float32'))
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(whole_number("an extent of shape", extent, 0) for extent in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)


def namespace(*arrays: Any) -> Namespace:
    """The array namespace of the first argument that has one; NumPy for plain numbers."""
    for array in arrays:
        if hasattr(array, "__array_namespace__"):
            return array.__array_namespace__()
        if _is_cupy(array):
            return sys.modules["cupy"]
    return np


def is_array(value: object) -> bool:
    """Whether `value` is an array of a known kind: one that names its namespace and hides no mask of its own."""
    names_itself = hasattr(value, "__array_namespace__") or _is_cupy(value)
    return names_itself and not isinstance(value, (np.ma.MaskedArray, np.matrix))


def _is_cupy(value: object) -> bool:
    """CuPy's arrays do not name their namespace (version 14)."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of sums, softmax and lse: float64 for float64, else float32."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def to_host(array: Array) -> Array:
    """The array as NumPy's. For a device array this waits for the device and copies, so only what shows things asks."""
    return array if namespace(array) is np else array.get()


def is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def whole_number(name: str, value: Any, least: int | None = None, meaning: str = "") -> int:
    """A Python int or NumPy integer as a Python int, which does not wrap around at a width.

    >>> whole_number("window", np.uint8(3)) - 4
    -1

    Raises
    ------
    UnsupportedProblem
        It is neither, or less than `least`.
    """
    if is_int(value) and (least is None or value >= least):
        return int(value)
    at_least = "" if least is None else f" of at least {least}"
    raise UnsupportedProblem([f"{name} must be an int{at_least}{meaning and f' ({meaning})'}; got {value!r}"])


def is_integer_dtype(dtype: Any) -> bool:
    return np.dtype(dtype).kind in "iu"


def describe(value: object) -> str:
    if is_array(value):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"  # type: ignore[attr-defined]
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__
