"""A mask as mathematics: what it can be asked, and the algebra of ``& | ~``.

A mask answers element by element, and, where it has a closed form, for a whole rectangle or a whole row at once.
It knows no lengths but those it is about, and nothing of blocks or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, reduce
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays import Array, Namespace, describe, is_array, is_int, namespace
from ..errors import UnsupportedProblem, collecting

UNBOUNDED = 2**31 - 1  # beyond any key; fits int32, so that it may meet int32 coordinates

Intervals: TypeAlias = tuple[Array, Array]


class MaskShape(NamedTuple):
    """The shape a mask is asked for: the leading axes, the query heads and the two lengths.

    >>> MaskShape((2, 3), 8, 128, 256).num_batch
    6
    """

    batch: tuple[int, ...]
    num_heads: int
    seqlen_q: int
    seqlen_kv: int

    @property
    def num_batch(self) -> int:
        return prod(self.batch)


@dataclass(frozen=True, eq=False)
class Mask:
    """Who may see whom: True where query i of head h in batch entry b attends key j.

    Combine masks by ``&``, ``|`` and ``~``. ``bool(mask)`` raises, since ``and``, ``or`` and ``not`` would ask for it.
    Masks that hold no arrays compare by value and can be hashed; array contents are never hashed or copied.

    >>> bool(Band(None, 0))
    Traceback (most recent call last):
        ...
    TypeError: a mask has no truth value: combine masks with & | ~ instead of and, or, not
    """

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        """Element-wise: integer arrays that broadcast against each other in, booleans out.

        ``b`` counts the leading axes as one, in C order. The default reads the closed form of `intervals`.
        """
        lo, hi = self.closed_form(b, h, i)
        return (lo <= j) & (j < hi)

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals | None:
        """``lo, hi`` such that row i attends exactly the keys lo <= j < hi; None without such a closed form.

        For fixed b and h, lo and hi never decrease with i; that makes rows and columns, rectangles and the
        transposed question closed forms too. An empty row is one with lo >= hi.
        """
        return None

    @property
    def has_intervals(self) -> bool:
        """Whether `intervals` answers at all."""
        return self.intervals(0, 0, 0) is not None

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        """``may, must`` for rectangles of rows i0 <= i < i1 and keys j0 <= j < j1, none of them empty.

        Not ``may`` proves that no element is allowed, ``must`` proves that all are. ``(True, False)`` is always right.
        """
        first, last = self.intervals(b, h, i0), self.intervals(b, h, i1 - 1)
        if first is None or last is None:
            return True, False
        may = (first[0] < j1) & (last[1] > j0)
        must = (last[0] <= j0) & (first[1] >= j1)
        return may, must

    def resolve(self, shape: MaskShape) -> Mask:
        """The same mask in absolute coordinates for this shape: alignments become offsets, arrays are checked.

        Raises
        ------
        UnsupportedProblem
            An alignment is needed and not given, or an array's shape does not fit.
        """
        return self

    def to(self, convert: Callable[[Array], Array]) -> Mask:
        """The same mask with each array converted: ``mask.to(cupy.asarray)`` copies them to the device.

        >>> import numpy as np
        >>> from cuflash import masks
        >>> (masks.Lengths(kv=np.array([3, 5])) & masks.Causal()).to(np.copy)
        And(operands=(Lengths(q=None, kv=array([3, 5])), Causal(align=None)))
        """
        return replace(self, **{field.name: _converted(getattr(self, field.name), convert) for field in fields(self)})

    @property
    def natural_block(self) -> tuple[int, int] | None:
        """The block size the mask is made of, if it is made of blocks."""
        return None

    def dense(self, shape: MaskShape) -> Array:
        """The whole mask as a bool array [*batch, num_heads, seqlen_q, seqlen_kv]: for tests and small problems.

        >>> Band(0, 1).dense(MaskShape((), 1, 1, 3))
        array([[[ True,  True, False]]])
        """
        resolved = self.resolve(shape)
        xp = mask_namespace(resolved)
        batch, heads, rows, keys = (
            xp.arange(extent).reshape([-1 if axis == place else 1 for axis in range(4)])
            for place, extent in enumerate((shape.num_batch, *shape[1:]))
        )
        allowed = resolved(batch, heads, rows, keys)
        flat = xp.broadcast_to(allowed, (shape.num_batch, *shape[1:]))
        return flat.reshape(*shape.batch, *shape[1:]).copy()

    def __and__(self, other: Mask) -> Mask:
        return And((self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or((self, other)) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & | ~ instead of and, or, not")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        pairs = zip(self._key(), other._key())
        return all(a is b or (not is_array(a) and not is_array(b) and a == b) for a, b in pairs)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs, where types have other hashes."""
        return without_memos(self)

    @cached_property
    def _hash(self) -> int:
        if any(is_array(value) or callable(value) and not isinstance(value, Mask) for value in self._key()):
            raise TypeError(f"{type(self).__name__} holds arrays or a function, whose contents are never hashed")
        return hash((type(self), self._key()))

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def closed_form(self, b: Array, h: Array, i: Array) -> Intervals:
        bounds = self.intervals(b, h, i)
        if bounds is None:
            raise NotImplementedError(f"{type(self).__name__} defines neither __call__ nor intervals")
        return bounds


@dataclass(frozen=True, eq=False)
class Band(Mask):
    """Keys with lower <= j - i <= upper, in absolute coordinates; None is unlimited.

    >>> Band(-1, 0).dense(MaskShape((), 1, 3, 3))[0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    lower: int | None = None
    upper: int | None = None

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        lo = 0 * i if self.lower is None else i + self.lower
        hi = 0 * i + UNBOUNDED if self.upper is None else i + (self.upper + 1)
        return lo, hi

    @property
    def transposed(self) -> Band:
        """The band of keys seen from the queries: lower <= i - j <= upper."""
        return Band(_negated(self.upper), _negated(self.lower))


# The algebra


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Allowed by every operand."""

    operands: tuple[Mask, ...]

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return reduce(lambda x, y: x & y, (mask(b, h, i, j) for mask in self.operands))

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals | None:
        bounds = [mask.intervals(b, h, i) for mask in self.operands]
        known = [pair for pair in bounds if pair is not None]
        if len(known) < len(bounds):
            return None
        xp = namespace(*(side for pair in known for side in pair))
        return reduce(xp.maximum, (lo for lo, _ in known)), reduce(xp.minimum, (hi for _, hi in known))

    @property
    def has_intervals(self) -> bool:
        return all(mask.has_intervals for mask in self.operands)

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        answers = [mask.rectangle(b, h, i0, i1, j0, j1) for mask in self.operands]
        return reduce(lambda x, y: x & y, (a[0] for a in answers)), reduce(lambda x, y: x & y, (a[1] for a in answers))

    def resolve(self, shape: MaskShape) -> Mask:
        return intersection(_flattened(And, _resolve_all(self.operands, shape)))

    @property
    def natural_block(self) -> tuple[int, int] | None:
        return _finest(self.operands)


@dataclass(frozen=True, eq=False)
class Or(Mask):
    """Allowed by any operand."""

    operands: tuple[Mask, ...]

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return reduce(lambda x, y: x | y, (mask(b, h, i, j) for mask in self.operands))

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        answers = [mask.rectangle(b, h, i0, i1, j0, j1) for mask in self.operands]
        return reduce(lambda x, y: x | y, (a[0] for a in answers)), reduce(lambda x, y: x | y, (a[1] for a in answers))

    def resolve(self, shape: MaskShape) -> Mask:
        return Or(_flattened(Or, _resolve_all(self.operands, shape)))

    @property
    def natural_block(self) -> tuple[int, int] | None:
        return _finest(self.operands)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """Allowed where the operand is not."""

    operand: Mask

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return namespace(b, h, i, j).logical_not(self.operand(b, h, i, j))

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        may, must = self.operand.rectangle(b, h, i0, i1, j0, j1)
        return namespace(must, i0).logical_not(must), namespace(may, i0).logical_not(may)

    def resolve(self, shape: MaskShape) -> Mask:
        inner = self.operand.resolve(shape)
        if isinstance(inner, Band) and inner.lower is None and inner.upper is not None:
            return Band(inner.upper + 1, None)
        if isinstance(inner, Band) and inner.upper is None and inner.lower is not None:
            return Band(None, inner.lower - 1)
        return Not(inner)

    @property
    def natural_block(self) -> tuple[int, int] | None:
        return self.operand.natural_block


def intersection(masks: Sequence[Mask]) -> Mask:
    """One resolved mask for several resolved ones; bands become one band. No mask at all allows everything."""
    bands = [mask for mask in masks if isinstance(mask, Band)]
    lowers = [band.lower for band in bands if band.lower is not None]
    uppers = [band.upper for band in bands if band.upper is not None]
    band = Band(max(lowers, default=None), min(uppers, default=None))
    rest = [mask for mask in masks if not isinstance(mask, Band)]
    if not rest:
        return band
    factors = rest if band == Band() else [band, *rest]
    return factors[0] if len(factors) == 1 else And(tuple(factors))


def _converted(value: Any, convert: Callable[[Array], Array]) -> Any:
    """A field of a mask with the arrays that it holds converted."""
    if isinstance(value, Mask):
        return value.to(convert)
    if isinstance(value, tuple) and any(isinstance(part, Mask) for part in value):
        return tuple(_converted(part, convert) for part in value)
    if isinstance(value, (LeadingArray, PerBatch)):
        parts = {field.name: _converted(getattr(value, field.name), convert) for field in fields(value)}
        return replace(value, **parts)
    return convert(value) if is_array(value) else value


def _resolve_all(masks: Sequence[Mask], shape: MaskShape) -> list[Mask]:
    reasons: list[str] = []
    resolved = []
    for mask in masks:
        with collecting(reasons):
            resolved.append(mask.resolve(shape))
    if reasons:
        raise UnsupportedProblem(dict.fromkeys(reasons))
    return resolved


def _flattened(node: type[And] | type[Or], masks: Sequence[Mask]) -> tuple[Mask, ...]:
    return tuple(leaf for mask in masks for leaf in (mask.operands if isinstance(mask, node) else (mask,)))


def _finest(masks: Sequence[Mask]) -> tuple[int, int] | None:
    blocks = [mask.natural_block for mask in masks if mask.natural_block is not None]
    return (min(block[0] for block in blocks), min(block[1] for block in blocks)) if blocks else None


# Arrays over the leading axes


@dataclass(frozen=True, eq=False, slots=True)
class LeadingArray:
    """An array whose axes before the last `trailing` broadcast over the leading axes, read without copying it."""

    array: Array
    batch: tuple[int, ...]
    trailing: int

    __hash__ = None  # type: ignore[assignment]  # contents are never hashed

    @staticmethod
    def of(array: Array, batch: tuple[int, ...], trailing: int) -> LeadingArray:
        missing = len(batch) + trailing - array.ndim
        return LeadingArray(array.reshape((1,) * missing + tuple(array.shape)), batch, trailing)

    def at(self, b: Array, *rest: Array) -> Array:
        """Elements at flat batch index b and the trailing coordinates; an axis of extent 1 ignores its coordinate."""
        places: tuple[Array, ...] = (0,) * len(self.batch)
        if any(extent != 1 for extent in self.array.shape[: len(self.batch)]):
            places = _unravelled(b, self.batch) if len(self.batch) > 1 else (b,)
        coordinates = (*places, *rest)
        return self.array[tuple(c if extent != 1 else 0 for c, extent in zip(coordinates, self.array.shape))]


def _unravelled(index: Array, extents: tuple[int, ...]) -> tuple[Array, ...]:
    """`unravel_index`, which waits for a device to check its argument."""
    places = []
    for extent in reversed(extents):
        places.append(index % extent)
        index = index // extent
    return tuple(reversed(places))


@dataclass(frozen=True, slots=True)
class PerBatch:
    """One int, or one int per batch entry."""

    value: int | LeadingArray

    @staticmethod
    def of(name: str, value: Any, batch: tuple[int, ...] | None) -> PerBatch:
        if not is_array(value):
            return PerBatch(int(value))
        if batch is None:
            raise UnsupportedProblem([f"{name} given per batch entry depends on the batch: call .resolve(shape) first"])
        reasons = leading_reasons(name, tuple(value.shape), batch)
        if reasons:
            raise UnsupportedProblem(reasons)
        return PerBatch(LeadingArray.of(value, batch, 0))

    def at(self, b: Array) -> Array:
        return self.value if isinstance(self.value, int) else self.value.at(b)


def length_reasons(**lengths: object) -> list[str]:
    """Why lengths, or numbers of heads, are refused."""
    return [
        f"{name} must be an int from 0 to 2**63 - 1; got {describe(length)}"
        for name, length in lengths.items()
        if not (is_int(length) and 0 <= length < 2**63)  # type: ignore[operator]
    ]


def shape_reasons(shape: Any) -> list[str]:
    """Why something is no shape that a mask can be resolved for."""
    if not isinstance(shape, MaskShape):
        return [f"shape must be a MaskShape(batch, num_heads, seqlen_q, seqlen_kv); got {describe(shape)}"]
    batch = shape.batch if isinstance(shape.batch, tuple) else (None,)
    told = f"shape's batch must be a tuple of ints from 0 to 2**63 - 1; got {describe(shape.batch)}"
    reasons = [told] if any(length_reasons(batch=extent) for extent in batch) else []
    lengths = {"num_heads": shape.num_heads, "seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv}
    return reasons + [f"shape's {reason}" for reason in length_reasons(**lengths)]


def without_memos(value: Any) -> dict[str, Any]:
    """The state of an object for pickles and copies: what cached properties have kept is left out, and made again."""
    return {name: kept for name, kept in vars(value).items() if not _is_memo(type(value), name)}


def _is_memo(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), cached_property)


def leading_reasons(name: str, leading: tuple[int, ...], wanted: tuple[int, ...]) -> list[str]:
    fits = len(leading) <= len(wanted) and all(have in (1, want) for have, want in zip(leading[::-1], wanted[::-1]))
    return [] if fits else [f"{name}'s leading axes must broadcast to {wanted}; got {leading}"]


def _negated(bound: int | None) -> int | None:
    return None if bound is None else -bound


# Where a mask's arrays are


def held_arrays(value: Any, besides: tuple[type, ...] = ()) -> Iterator[Array]:
    """The arrays that a mask, or a part of one, holds; those inside objects of the kinds `besides` are left out."""
    if is_array(value):
        yield value
    elif isinstance(value, besides):
        return
    elif isinstance(value, tuple):
        for part in value:
            yield from held_arrays(part, besides)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from held_arrays(getattr(value, field.name), besides)


def mask_namespace(mask: Any) -> Namespace:
    """The namespace of a mask's arrays; NumPy for a mask without any.

    Raises
    ------
    UnsupportedProblem
        Its arrays are of several namespaces.
    """
    spaces = {namespace(array) for array in held_arrays(mask)}
    if len(spaces) > 1:
        names = ", ".join(sorted(space.__name__ for space in spaces))
        raise UnsupportedProblem([f"mask's arrays must all be in one place; got arrays of {names}: copy them there"])
    return spaces.pop() if spaces else np
