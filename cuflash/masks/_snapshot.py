"""Detection of changes to a mask on the host between two calls, with private copies of its contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dis import get_instructions
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from ..arrays import is_sparse
from .content import opaque_values, token

# Packages whose functions are assumed not to change.
_FIXED = frozenset({"builtins", "cupy", "math", "numpy", "operator", "scipy"})
# A function with one of these names in its code may read values that its code does not name.
_UNSEEN = frozenset({"__dict__", "__import__", "eval", "exec", "getattr", "globals", "random", "vars"})
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
    names_all = type(value) is not FunctionType or _names_what_it_reads(value.__code__)
    if names_all and (type(value) in (FunctionType, tuple) or is_sparse(value)):
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
    if isinstance(value, (ModuleType, CodeType, np.ufunc)):  # `_of_modules` covers the attributes of modules
        return True
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    if isinstance(value, (type, FunctionType)):
        return str(value.__module__).partition(".")[0] in _FIXED
    return callable(value) and value is getattr(np, getattr(value, "__name__", ""), None)


def _parts(value: Any) -> Iterator[Any]:
    """Yield the parts of a tuple, a sparse array or a function."""
    if type(value) is tuple:
        yield from value
    elif type(value) is FunctionType:
        read = list(_read_by(value))
        yield value.__code__
        yield from read
        yield from _of_modules(read, value, [])
    else:  # a sparse array; its flags are left out because reading the array may change them
        yield value.shape
        yield from (part for part in vars(value).values() if token(part) is None)


def _read_by(function: FunctionType) -> Iterator[Any]:
    """Yield the values that a function holds, and the globals that it may look up, or a marker for undefined ones."""
    yield function.__defaults__
    yield tuple((function.__kwdefaults__ or {}).items())
    yield tuple(vars(function).items())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is empty
            yield _MISSING
    for name in _names(function.__code__):
        yield function.__globals__.get(name, _MISSING)


def _of_modules(values: Iterable[Any], function: FunctionType, seen: list[ModuleType]) -> Iterator[Any]:
    """Yield the attributes that a function may read of each module among some values, and of modules among these.

    The names in a function's code include the names of attributes. It may pass the module to another function.
    """
    for module in _flat(values):
        if isinstance(module, ModuleType) and module not in seen and module.__name__.partition(".")[0] not in _FIXED:
            seen.append(module)
            names = dict.fromkeys(_all_names(function, []))
            read = [vars(module)[name] for name in names if name in vars(module)]
            yield from read
            yield from _of_modules(read, function, seen)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in tuples."""
    for value in values:
        yield from _flat(value) if type(value) is tuple else (value,)


def _all_names(function: FunctionType, seen: list[FunctionType]) -> Iterator[str]:
    """Yield the names in the code of a function, and of all functions that it may call."""
    seen.append(function)
    yield from _names(function.__code__)
    for each in _flat(_read_by(function)):
        if type(each) is FunctionType and each not in seen and not _is_fixed(each):
            yield from _all_names(each, seen)


def _names(code: CodeType) -> Iterator[str]:
    for each in _codes(code):
        yield from each.co_names


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of all functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names_what_it_reads(code: CodeType) -> bool:
    """True if a function finds all values that it reads by their names, and imports no module that may change."""
    instructions = (instruction for each in _codes(code) for instruction in get_instructions(each))
    imports = (each.argval for each in instructions if each.opname == "IMPORT_NAME")
    return _UNSEEN.isdisjoint(_names(code)) and all(name.partition(".")[0] in _FIXED for name in imports)


def _layout(array: np.ndarray) -> tuple[object, ...]:
    return array.shape, array.dtype


def _are_equal(array: np.ndarray, copy: np.ndarray) -> bool:
    return bool((_words(array) == _words(copy)).all())


def _words(array: np.ndarray) -> np.ndarray:
    """Return the elements of an array in C order as uint64 if their bytes are a multiple of eight, else as uint8."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.view(np.uint64) if flat.nbytes % 8 == 0 else flat
