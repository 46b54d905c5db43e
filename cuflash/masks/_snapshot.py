"""Detection of changes to a mask on the host between two calls, with private copies of its contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from ..arrays import is_sparse
from .content import opaque_values, token

# Packages whose functions are assumed not to change.
_FIXED = frozenset({"builtins", "cupy", "math", "numpy", "operator", "scipy"})
_MISSING = object()
Comparison: TypeAlias = Callable[[Any], bool]  # True if a value is like the copied one


class Snapshot:
    """Private copies of the NumPy arrays that a mask holds, and of all values that its functions read.

    The mask's own arrays and functions are held by weak references: a snapshot keeps no mask alive.
    """

    def __init__(self, values: list[Any]) -> None:
        if not all(type(value) in (np.ndarray, FunctionType) or is_sparse(value) for value in values):
            raise _Unseen
        self._held = [(ref(value), _copied(value, ())) for value in values]

    @staticmethod
    def of(mask: Any) -> Snapshot | None:
        """Copy the contents of a mask; return None if changes to any of them could not be detected."""
        try:
            return Snapshot(opaque_values(mask))
        except _Unseen:
            return None

    def is_current(self) -> bool:
        """True if the contents of the mask have not changed."""
        return all(is_like(held()) for held, is_like in self._held)


class _Unseen(Exception):
    """Raised for a value that may change in place without detection."""


def _copied(value: Any, inside: tuple[Any, ...]) -> Comparison:
    """Copy a value that is nested inside other values; return a comparison of the copy with other values.

    Raises
    ------
    _Unseen
        Changes to the value could not be detected.
    """
    if type(value) is np.ndarray and not value.dtype.hasobject:
        layout, copy = _layout(value), value.copy("K")
        return lambda other: type(other) is np.ndarray and _layout(other) == layout and _are_equal(other, copy)
    if value is _MISSING or _is_fixed(value) or any(value is each for each in inside):
        # It cannot change in place, or it is a function that calls itself.
        held = ref(value) if type(value) is FunctionType else lambda: value
        return lambda other: other is held()
    if type(value) in (FunctionType, tuple) or is_sparse(value):
        return _copied_parts(type(value), [_copied(part, (*inside, value)) for part in _parts(value)])
    constant = token(value)
    if constant is None:
        raise _Unseen
    return lambda other: bool(token(other) == constant)


def _copied_parts(kind: type, copies: list[Comparison]) -> Comparison:
    """Return a comparison of the parts of a tuple, a function or a sparse array."""

    def is_like(other: Any) -> bool:
        if type(other) is not kind:
            return False
        parts = list(_parts(other))
        return len(parts) == len(copies) and all(copy(part) for copy, part in zip(copies, parts))

    return is_like


def _is_fixed(value: Any) -> bool:
    """True if a value cannot change while it is the same object."""
    if isinstance(value, (ModuleType, CodeType, np.ufunc)):  # `_read_of_modules` covers the attributes of modules
        return True
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    if isinstance(value, (type, FunctionType)):
        return str(value.__module__).partition(".")[0] in _FIXED
    return callable(value) and value is getattr(np, getattr(value, "__name__", ""), None)


def _parts(value: Any) -> Iterator[Any]:
    """Yield the parts of a tuple, a sparse array or a function.

    For a function these include the globals that it may look up, with a marker for those that are not defined.
    """
    if type(value) is tuple:
        yield from value
    elif type(value) is FunctionType:
        yield value.__code__
        yield value.__defaults__
        yield tuple((value.__kwdefaults__ or {}).items())
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the cell is empty
                yield _MISSING
        names = tuple(_names(value.__code__))
        yield from (value.__globals__.get(name, _MISSING) for name in names)
        yield from _read_of_modules(value.__globals__, names, [])
    else:  # a sparse array; its flags are left out because reading the array may change them
        yield value.shape
        yield from (part for part in vars(value).values() if token(part) is None)


def _read_of_modules(space: Mapping[str, Any], names: tuple[str, ...], seen: list[ModuleType]) -> Iterator[Any]:
    """Yield the attributes with these names of each module that a name refers to, and of modules reached through it.

    The names in a function's code include the names of attributes.
    """
    for name in names:
        module = space.get(name)
        if isinstance(module, ModuleType) and module not in seen and module.__name__.partition(".")[0] not in _FIXED:
            seen.append(module)
            yield from (vars(module)[each] for each in names if each in vars(module))
            yield from _read_of_modules(vars(module), names, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _layout(array: np.ndarray) -> tuple[object, ...]:
    return array.shape, array.dtype


def _are_equal(array: np.ndarray, copy: np.ndarray) -> bool:
    return bool((_words(array) == _words(copy)).all())


def _words(array: np.ndarray) -> np.ndarray:
    """Return the elements of an array in C order as uint64 if their bytes are a multiple of eight, else as uint8."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.view(np.uint64) if flat.nbytes % 8 == 0 else flat
