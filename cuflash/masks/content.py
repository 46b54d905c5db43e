"""The contents by which masks are compared and cached, and the arrays that they hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from ..arrays import Array, Namespace, describe, is_array, namespace, require_callable
from ..errors import UnsupportedProblem
from ..keywords import explains_keywords
from .coordinates import LeadingArray

_CONTENT = "_content_of_mask"
UNCHECKED = "_is_unchecked"  # the attribute of a mask that a compiled function created without the mask's own checks


class DeviceForm(NamedTuple):
    """The arrays of a mask that kernels read at each call, and all other values that define the mask.

    Attributes
    ----------
    arrays : tuple of arrays
        In the order of the kernels' arguments.
    facts : tuple of hashable
        Masks of one class with equal facts and equal array layouts differ only in the contents of their arrays.
    """

    arrays: tuple[Array, ...]
    facts: tuple[Hashable, ...] = ()


class Memoized:
    """An object that is pickled and copied without its cached properties.

    The copy computes these again, since hashes of types differ in another process.
    """

    def __getstate__(self) -> Any:
        state: Any = object.__getstate__(self)
        values, *slots = state if isinstance(state, tuple) else (state,)
        lasting = {name: held for name, held in (values or {}).items() if not _is_memo(type(self), name)}
        return (lasting, *slots) if slots else lasting


class Described(Memoized):
    """A frozen description: compared by its contents, and pickled without cached properties."""

    @explains_keywords
    def to(self, convert: Callable[[Array], Array]) -> Self:
        """Return a copy with each array converted: ``mask.to(cupy.asarray)`` copies them to the device.

        Raises
        ------
        TypeError
            `convert` is not callable. Exceptions that it raises are not caught.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash import masks
        >>> (masks.Lengths(kv=np.array([3, 5])) & masks.Causal()).to(np.copy)
        Lengths(kv=array([3, 5])) & Causal()
        """
        require_callable("convert", convert)
        if "__dataclass_fields__" in vars(type(self)):
            described: Any = self
            held = [field.name for field in fields(described) if field.init]
            twin: Self = replace(described, **{name: _converted(getattr(self, name), convert) for name in held})
            return twin
        twin = copy(self)
        for name in _held_names(twin):
            object.__setattr__(twin, name, _converted(getattr(twin, name), convert))
        return twin

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Described) or type(self) is not type(other):
            return NotImplemented
        return self is other or _tokens(self) == _tokens(other)

    def __hash__(self) -> int:
        return hash(content(self))


def _converted(value: Any, convert: Callable[[Array], Array]) -> Any:
    """Convert the arrays in a field of a mask."""
    if isinstance(value, Described):
        return value.to(convert)
    if type(value) is tuple:
        return tuple(_converted(part, convert) for part in value)
    if isinstance(value, LeadingArray):
        return replace(value, array=_converted(value.array, convert))
    return convert(value) if is_array(value) else value


class Content:
    """A cache key for a mask; does not call an `__eq__` or `__hash__` that a user's class may define."""

    __slots__ = ("_hash", "_tokens")

    def __init__(self, tokens: list[Any]) -> None:
        self._tokens, self._hash = tuple(tokens), hash(tuple(tokens))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Content) and self._tokens == other._tokens)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Replace the key by None in pickles, since the ids in the key are not valid in another process."""
        return type(None), ()


def content(mask: Described) -> Content:
    """Return the key that distinguishes a mask from all others; computed once per mask.

    Raises
    ------
    TypeError
        The mask may hold undeclared attributes, or values that can change.
    """
    known: Content | str | None = mask.__dict__.get(_CONTENT)  # a str says why the mask has no content
    if known is None:
        tokens = _tokens(mask)
        reasons = (each.why for each in tokens if type(each) is _Opaque)
        known = mask.__dict__[_CONTENT] = next(reasons, None) or Content(tokens)
    if isinstance(known, str):
        raise TypeError(known)
    return known


def has_content(mask: Described) -> bool:
    """True if the `content` of a mask has been computed and exists."""
    return type(mask.__dict__.get(_CONTENT)) is Content


def opaque_values(mask: Any) -> list[Any]:
    """Return the values in a mask whose contents are not part of `content`; return [mask] if `mask` is not a mask."""
    if not isinstance(mask, Described):
        return [mask]
    return [each.value for each in _tokens(mask) if type(each) is _Opaque]


class _Opaque:
    """A value whose contents are not inspected: it equals only itself."""

    __slots__ = ("value", "why")

    def __init__(self, value: Any, why: str) -> None:
        self.value, self.why = value, why

    def __eq__(self, other: object) -> bool:
        return type(other) is _Opaque and self.value is other.value


def _tokens(mask: Described) -> list[Any]:
    """List the contents of a mask in order: values with their types; for masks and tuples, type and number of parts."""
    tokens: list[Any] = []
    rest: list[tuple[Any, Described]] = [(mask, mask)]
    while rest:
        value, holder = rest.pop()
        kind: Any = type(value)
        if isinstance(value, Described):
            if value.__dict__.pop(UNCHECKED, False):
                kind.__post_init__(value)
            why = _undeclared(value)
            if why:
                tokens.append(_Opaque(value, why))
                continue
            parts = [getattr(value, name) for name in _Layout.of(kind).fields]
            holder = value
        elif kind is tuple:
            parts = list(value)
        else:
            held = token(value)
            if held is None:
                why = f"{type(holder).__name__} holds {describe(value)}, whose contents are never hashed"
                held = _Opaque(value, why)
            tokens.append(held)
            continue
        tokens.append((kind, len(parts)))
        rest.extend((part, holder) for part in reversed(parts))
    return tokens


def token(value: Any) -> Any:
    """Return a hashable token of an immutable value, in which 1, 1.0 and True differ; None for any other value."""
    kind = type(value)
    if kind in (int, bool, str, bytes, type(None)):
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)  # distinguishes -0.0 from 0.0, and makes NaN equal to itself
    if isinstance(value, Enum):
        return kind, id(value)  # valid because the class keeps its members alive
    if isinstance(value, np.generic) and kind is value.dtype.type and not isinstance(value, np.void):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, np.dtype):
        return None if value.metadata or value.kind == "O" or value.names else (np.dtype, value.type, value.str)
    if kind is frozenset:
        parts = [token(part) for part in value]
        return None if None in parts else (kind, frozenset(parts))
    return None


class _Layout(NamedTuple):
    """The names of the attributes in which masks of a class hold their content."""

    is_declared: bool  # the class itself is decorated as a dataclass, not only a parent
    fields: tuple[str, ...]
    slots: tuple[str, ...]
    computed: frozenset[str]  # cached values that the class computes from the other attributes

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, kind: Any) -> _Layout:
        names = dict.fromkeys(name for base in kind.__mro__ for name in vars(base))
        return cls(
            "__dataclass_fields__" in vars(kind),
            tuple(field.name for field in fields(kind)),
            tuple(name for base in kind.__mro__ for name in _slots(base)),
            frozenset(name for name in names if isinstance(getattr(kind, name, None), cached_property)) | {_CONTENT},
        )


def _undeclared(mask: Described) -> str:
    """Explain why a mask may hold values besides its fields; return "" if it does not."""
    kind: Any = type(mask)  # mypy mistakes the class for an instance that cannot be hashed
    layout, name = _Layout.of(kind), kind.__name__
    if not layout.is_declared:
        return f"{name} is not hashed, since it is not a dataclass itself: add @dataclass(frozen=True, eq=False)"
    besides = vars(mask).keys() | set(layout.slots)
    besides -= layout.computed.union(layout.fields)
    return f"{name} is not hashed, since it holds {sorted(besides)}, which are not fields" if besides else ""


def _held_names(mask: Described) -> list[str]:
    """Return the names of all values that a mask holds, in fields, slots and other attributes, except computed ones."""
    kind: Any = type(mask)
    layout = _Layout.of(kind)
    named = dict.fromkeys((*layout.fields, *layout.slots, *vars(mask)))
    return [name for name in named if name not in layout.computed and hasattr(mask, name)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    owner = kind.__name__.lstrip("_")
    named = (f"_{owner}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


def _held(value: Any, besides: tuple[type, ...] = ()) -> Iterator[Any]:
    """Yield a mask, or a part of one, and all values nested in it, but do not enter objects of the types `besides`."""
    rest = [value]
    while rest:
        value = rest.pop()
        yield value
        if isinstance(value, besides):
            continue
        if isinstance(value, tuple):
            rest.extend(reversed(value))
        elif isinstance(value, Described):
            rest.extend(getattr(value, name) for name in reversed(_held_names(value)))
        elif is_dataclass(value) and not isinstance(value, type):
            rest.extend(getattr(value, field.name) for field in reversed(fields(value)))


def held_arrays(value: Any, besides: tuple[type, ...] = ()) -> Iterator[Array]:
    """Yield the arrays nested in a mask, or in a part of one, except those inside objects of the types `besides`."""
    return filter(is_array, _held(value, besides))


def held_masks(mask: Described) -> Iterator[Described]:
    """Yield a mask and all masks nested in it: the operands of a tree, and the pattern of a mask of whole blocks."""
    return (value for value in _held(mask) if isinstance(value, Described))


def mask_namespace(mask: Described | Array) -> Namespace:
    """Return the namespace of a mask's arrays; NumPy for a mask without arrays.

    Raises
    ------
    UnsupportedProblem
        The mask has arrays of several namespaces.
    """
    spaces = {namespace(array) for array in held_arrays(mask)}
    if len(spaces) > 1:
        names = ", ".join(sorted(space.__name__ for space in spaces))
        raise UnsupportedProblem(
            f"mask's arrays must all be of one array library; got arrays of {names}: convert them to one"
        )
    return spaces.pop() if spaces else np


def _is_memo(kind: type, name: str) -> bool:
    return name == _CONTENT or isinstance(getattr(kind, name, None), cached_property)
