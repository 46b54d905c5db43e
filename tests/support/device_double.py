"""A test double of CuPy for machines without a GPU: its arrays refuse what would be expensive or wrong on a device.

>>> import numpy as np, device_double as device
>>> x = device.to_device(np.arange(3))
>>> xp = x.__array_namespace__()
>>> xp.where(x > 0, x, -1)
DeviceArray(shape=(3,), dtype=int64)
>>> device.to_host(x + 1)
array([1, 2, 3])
>>> int(x.sum())
Traceback (most recent call last):
    ...
device_double.Synchronises: int() waits for the device and copies to the host
>>> np.add(x, 1)
Traceback (most recent call last):
    ...
device_double.LeavesNamespace: np.add was called on a device array: take the function from array.__array_namespace__()

`DeviceArray` is not a subclass of ndarray, and neither is CuPy's: ``np.asarray`` would bypass the methods of a
subclass, and ``isinstance`` would return the wrong answer. It is deliberately stricter than CuPy, which accepts
``np.add``, and iterates without waiting.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np


class Synchronises(RuntimeError):
    """The error raised where the host would wait for the device."""


class LeavesNamespace(TypeError):
    """The error for a NumPy function that is called on a device array, and for a mix of host and device arrays."""


# Functions with results whose size depends on the data, so that the host has to wait for it; bincount needs the largest
# element, and the others raise for values out of range.
_DATA_DEPENDENT = {
    "nonzero", "flatnonzero", "argwhere", "extract", "compress", "trim_zeros", "bincount", "histogram",
    "unique", "unique_all", "unique_counts", "unique_inverse", "unique_values",
    "union1d", "intersect1d", "setdiff1d", "setxor1d", "place", "putmask", "delete", "average", "gradient",
    "unravel_index", "ravel_multi_index", "choose", "histogram2d", "histogramdd", "quantile", "percentile", "median",
    "nanquantile", "nanpercentile", "nanmedian", "ediff1d", "interp", "corrcoef",
}  # fmt: skip
# Names that library code might use, but that CuPy 14.2's __init__.py lacks.
_NOT_IN_CUPY = {
    "block", "char", "datetime64", "emath", "errstate", "flexible", "float128", "frompyfunc", "geomspace", "geterr",
    "insert", "lib", "longdouble", "ma", "matrix", "matvec", "memmap", "ndenumerate", "nditer", "rec", "seterr",
    "spacing", "strings", "testing", "timedelta64", "typing", "unstack", "vecdot", "vecmat", "False_", "True_",
}  # fmt: skip
# Functions that need cuBLAS, cuRAND, cuSOLVER or cuFFT, which a minimal installation lacks.
_NEEDS_LIBRARY = {
    "matmul", "dot", "vdot", "inner", "outer", "tensordot", "einsum", "kron", "cov", "corrcoef", "convolve",
    "correlate", "random", "linalg", "fft", "polyfit",
}  # fmt: skip
# Positions of the arguments, without a method's array, that determine the size of a result: the host has to know them.
_SIZES = {
    "arange": (0, 1, 2), "linspace": (0, 1, 2), "logspace": (0, 1, 2), "zeros": (0,), "ones": (0,), "empty": (0,),
    "full": (0,), "eye": (0, 1, 2), "identity": (0,), "tri": (0, 1, 2), "reshape": (1,), "broadcast_to": (1,),
    "repeat": (1,), "tile": (1,), "roll": (1, 2), "split": (1,), "array_split": (1,), "resize": (1,), "pad": (1,),
    "indices": (0,), "expand_dims": (1,),
}  # fmt: skip
_REDUCTIONS = {"sum", "prod", "max", "min", "amax", "amin", "any", "all", "mean"}
# Functions that read only shape and dtype.
_METADATA = {"ndim", "shape", "size", "isscalar", "issubdtype", "isdtype", "can_cast", "result_type", "isrealobj",
             "iscomplexobj", "may_share_memory", "shares_memory"}  # fmt: skip
_transfers_allowed = False
_operations = 0


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count operations that launch kernels: functions, operators, indexing and assignments, but no views."""
    before = _operations
    yield lambda: _operations - before


@contextmanager
def transfers_allowed() -> Iterator[None]:
    """Allow waits and copies, for code that may need them by contract: reports, pictures, conversions to SciPy."""
    global _transfers_allowed
    before, _transfers_allowed = _transfers_allowed, True
    try:
        yield
    finally:
        _transfers_allowed = before


def to_device(array: Any) -> DeviceArray:
    return DeviceArray(np.array(array))


def to_host(array: DeviceArray) -> np.ndarray[Any, Any]:
    return array._host.copy()


def _synchronise(what: str) -> None:
    if not _transfers_allowed:
        raise Synchronises(f"{what} waits for the device and copies to the host")


def _unwrapped(value: Any) -> Any:
    """Return the value with device arrays replaced by their host memory; host arrays are refused."""
    if isinstance(value, DeviceArray):
        return value._host
    if isinstance(value, np.ndarray) and not _transfers_allowed:
        raise LeavesNamespace(f"a host array of shape {value.shape} met a device array or the device's namespace")
    if isinstance(value, enum.Enum):
        raise LeavesNamespace(f"{value!r} met a device array: CuPy takes plain numbers for scalars")
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_unwrapped, value))
    return value


def _wrapped(value: Any) -> Any:
    global _operations
    _operations += getattr(value, "base", None) is None
    if isinstance(value, (np.ndarray, np.generic)):
        return DeviceArray(np.asarray(value))
    if isinstance(value, (list, tuple)):
        return [_wrapped(item) for item in value] if type(value) in (list, tuple) else value
    return value


def _holds_array(value: Any) -> bool:
    return isinstance(value, DeviceArray) or isinstance(value, (list, tuple)) and any(map(_holds_array, value))


class _Function:
    """A function of the namespace, with the methods of a ufunc: ``xp.add.reduce``."""

    def __init__(self, function: Callable[..., Any], name: str, *, is_method: bool = False) -> None:
        self._function, self.__name__, self._is_method = function, name, is_method

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, method = self.__name__, self.__name__.rpartition(".")[2]
        sizes = [place - self._is_method for place in _SIZES.get(name, ())]
        if name == "reshape" and self._is_method:
            sizes = list(range(len(args)))
        if any(_holds_array(args[place]) for place in sizes if 0 <= place < len(args)):
            _synchronise(f"{name}, whose result has a size that depends on the data,")
        if _holds_array([kwargs.get(key) for key in ("shape", "repeats", "start", "stop", "step", "num", "N", "M")]):
            _synchronise(f"{name}, whose result has a size that depends on the data,")
        if name in ("packbits", "unpackbits") and (len(args) > 1 or {"axis", "count"} & kwargs.keys()):
            raise NotImplementedError(f"CuPy's {name} has no axis or count")
        if name in _REDUCTIONS and {"initial", "where"} & kwargs.keys():
            raise TypeError(f"CuPy's {name} has no initial or where")
        if method in ("accumulate", "reduceat") and name not in ("add.accumulate", "multiply.accumulate"):
            raise NotImplementedError(f"CuPy has no {name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__
        self._check(args, kwargs)
        if name in _DATA_DEPENDENT or name == "where" and len(args) == 1:
            _synchronise(f"{name}, whose result has a size that depends on the data,")
        result = self._function(*_unwrapped(args), **{key: _unwrapped(value) for key, value in kwargs.items()})
        if name in _METADATA:
            return result
        if isinstance(result, (bool, int, float)) and _holds_array((*args, *kwargs.values())):
            _synchronise(f"{name}, which answers with a number of the host,")
            return result
        return tuple(_wrapped(result)) if type(result) is tuple else _wrapped(result)

    def __getattr__(self, method: str) -> Any:
        attribute = getattr(self._function, method)
        return _Function(attribute, f"{self.__name__}.{method}") if callable(attribute) else attribute


class DeviceNamespace(ModuleType):
    """NumPy's functions on device arrays, without those that CuPy or a minimal installation of it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_IN_CUPY or name.startswith("_"):
            raise AttributeError(f"CuPy has no {name}")
        if name in _NEEDS_LIBRARY:
            raise AttributeError(f"{name} needs a CUDA library that a minimal install of CuPy lacks")
        value = getattr(np, name)
        if name == "ndarray":
            return DeviceArray
        return value if isinstance(value, type) or not callable(value) else _Function(value, name)


namespace = DeviceNamespace("device_double.namespace")


def _operator(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: DeviceArray, *others: Any) -> Any:
        operands = [self._host, *map(_unwrapped, others)]
        return _wrapped(function(*(reversed(operands) if swapped else operands)))

    return method


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: DeviceArray, other: Any) -> DeviceArray:
        function(self._host, _unwrapped(other))
        return self

    return method


def _refused(what: str) -> Callable[..., Any]:
    def method(self: DeviceArray, *args: Any, **kwargs: Any) -> Any:
        _synchronise(what)
        return getattr(self._host, what.rstrip("()").removeprefix("."))(*args, **kwargs)

    return method


def _converted(what: str, function: Callable[[Any], Any]) -> Callable[..., Any]:
    def method(self: DeviceArray) -> Any:
        _synchronise(what)
        return function(self._host)

    return method


class DeviceArray:
    """An array with memory that the host must not access."""

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self._host = host

    def __array_namespace__(self, *, api_version: str | None = None) -> DeviceNamespace:
        return namespace

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"

    def __len__(self) -> int:
        return len(self._host)

    def __getattr__(self, name: str) -> Any:
        """Return metadata (shape, dtype, …), views (T, …) and the methods that stay on the device (sum, reshape, …)."""
        if name.startswith("_") or name in ("data", "ctypes", "base", "device"):
            raise AttributeError(name)
        value = getattr(self._host, name)
        if callable(value):
            return _Function(value, name, is_method=True)
        return _wrapped(value) if isinstance(value, np.ndarray) else value

    def __getitem__(self, key: Any) -> Any:
        for part in key if isinstance(key, tuple) else (key,):
            if isinstance(part, DeviceArray) and part.dtype == bool:
                _synchronise("indexing by a boolean array, whose result has a size that depends on the data,")
        return _wrapped(self._host[_unwrapped(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        for part in key if isinstance(key, tuple) else (key,):
            if isinstance(part, DeviceArray) and part.dtype == bool and isinstance(value, DeviceArray):
                _synchronise("assigning an array where a boolean array says,")
        global _operations
        _operations += 1
        self._host[_unwrapped(key)] = _unwrapped(value)

    # Methods that NumPy calls on arrays of other types.

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        host = isinstance(inputs[0], np.ndarray)
        if isinstance(inputs[0], np.generic) or host and _transfers_allowed:  # numpy.float32(2) * array
            return _Function(getattr(ufunc, method), ufunc.__name__)(*inputs, **kwargs)
        raise LeavesNamespace(
            f"host and device arrays met in {ufunc.__name__}" if host else
            f"np.{ufunc.__name__} was called on a device array: take the function from array.__array_namespace__()"
        )  # fmt: skip

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        raise LeavesNamespace(
            f"np.{function.__name__} was called on a device array: take the function from array.__array_namespace__()"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        _synchronise("conversion to a NumPy array")
        return np.array(self._host, dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)  # CUDA device 0

    def __dlpack__(self, **kwargs: Any) -> Any:
        _synchronise("__dlpack__ to the host")
        raise BufferError("a device array cannot be read on the host")

    # Operations that make the host wait for the device.

    __bool__ = _converted("bool()", bool)
    __int__ = _converted("int()", int)
    __float__ = _converted("float()", float)
    __complex__ = _converted("complex()", complex)
    __index__ = _converted("use as an index of the host", operator.index)
    __iter__ = _converted("iteration", iter)
    __hash__ = None  # type: ignore[assignment]
    get = _converted(".get()", np.copy)
    item, tolist, tobytes, tofile = (_refused(f".{name}()") for name in ("item", "tolist", "tobytes", "tofile"))
    nonzero, compress = (_refused(f".{name}()") for name in ("nonzero", "compress"))

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __matmul__(self, other: Any) -> Any:
        raise AttributeError("@ needs a CUDA library that a minimal install of CuPy lacks")

    __rmatmul__ = __matmul__


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert"):
    setattr(DeviceArray, f"__{_name}__", _operator(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"):
    _symbol = getattr(operator, f"__{_name}__")
    setattr(DeviceArray, f"__{_name}__", _operator(_symbol))
    setattr(DeviceArray, f"__r{_name}__", _operator(_symbol, swapped=True))
    setattr(DeviceArray, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))
