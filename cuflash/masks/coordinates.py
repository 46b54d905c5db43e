"""Coordinates of mask elements, checks of the results of masks, and arrays over the leading axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from ..arrays import Array, Namespace, is_array, namespace
from ..errors import UnsupportedProblem, refuse
from .shape import MaskShape, broadcasts_to

UNBOUNDED = 1 << 62  # beyond any key; adding or subtracting a coordinate does not overflow int64

_MOST_PAIRS = 1 << 21  # maximum number of (query, key) pairs evaluated in one step

Intervals: TypeAlias = tuple[Array, Array]


def elements(mask: Callable[..., Array], b: Array, h: Array, i: Array, j: Array) -> Array:
    """Evaluate a mask at coordinates, and check the shape and dtype of the result.

    Raises
    ------
    UnsupportedProblem
        The result is not a boolean array, or does not broadcast to the coordinates.
    """
    try:
        allowed = mask(b, h, i, j)
    except Exception as error:
        note_call(error, f"the __call__ of the mask {type(mask).__name__}", b, h, i, j)
        raise
    if type(allowed) is bool:
        return allowed
    return checked_answer(f"{type(mask).__name__}'s __call__", allowed, b, h, i, j)


def note_call(error: Exception, who: str, *coordinates: Array) -> None:
    """Add the shapes of the arguments to an error raised by a user's function, unless a nested call already has."""
    if not isinstance(error, UnsupportedProblem) and not getattr(error, "__notes__", ()):
        shapes = ", ".join(f"{name} {tuple(np.shape(each))}" for name, each in zip("bhij", coordinates))
        error.add_note(f"Raised in {who}, which was called with integer arrays of the shapes {shapes}.")


def share_allowed(mask: Any, shape: MaskShape, xp: Namespace) -> float:
    """Return the fraction of all (query, key) pairs that a resolved mask allows, counted in steps of bounded memory."""
    extents, has_intervals = (shape.num_batch, *shape[1:]), mask._has_intervals
    b, h, j = xp.arange(extents[0])[:, None, None, None], xp.arange(extents[1])[:, None, None], xp.arange(extents[3])
    of_query = extents[0] * extents[1] * (1 if has_intervals else extents[3])
    step, allowed = max(1, _MOST_PAIRS // max(1, of_query)), 0
    for first in range(0, extents[2] if 0 not in extents else 0, step):
        i = xp.arange(first, min(first + step, extents[2]))[:, None]
        if has_intervals:
            lo, hi = (xp.clip(side, 0, extents[3]) for side in mask._closed_form(b, h, i))
            counts = xp.broadcast_to(xp.maximum(hi - lo, 0), (*extents[:2], len(i), 1))
        else:
            counts = xp.broadcast_to(elements(mask, b, h, i, j), (*extents[:2], len(i), extents[3]))
        allowed += int(counts.sum(dtype=np.int64))
    return allowed / max(1, int(prod(extents)))


def checked_answer(who: str, allowed: Array, *coordinates: Array) -> Array:
    """Return the result of a mask for coordinates; refuse one that is not boolean or does not broadcast to them."""
    if getattr(allowed, "dtype", None) != np.bool_:
        kind = getattr(allowed, "dtype", type(allowed).__name__)
        fix = "compare it with 0" if is_array(allowed) else "use i >= j, np.where, & and | instead of if, and, or"
        raise UnsupportedProblem(f"{who} must return a boolean array; got {kind}: {fix}")
    shapes = (getattr(coordinate, "shape", ()) for coordinate in coordinates)
    shape, wanted = tuple(allowed.shape), np.broadcast_shapes(*shapes)
    if not broadcasts_to(shape, wanted):
        raise UnsupportedProblem(
            f"{who} must return an array that broadcasts to the shape of its coordinates, {wanted}; got shape "
            f"{shape}: compute it from b, h, i and j, element by element"
        )
    return allowed


def widened(coordinate: Array) -> Array:
    """Convert a coordinate to int64, so that adding a bound does not overflow."""
    return coordinate if getattr(coordinate, "dtype", np.int64) == np.int64 else coordinate.astype(np.int64)


def clipped(number: int | None) -> int | None:
    """Restrict a bound, or a count, to the range of coordinates, without changing how it compares with them."""
    return None if number is None else max(-UNBOUNDED, min(number, UNBOUNDED))


@dataclass(frozen=True, eq=False, slots=True)
class LeadingArray:
    """An array that is read without a copy; its first axes broadcast over the batch axes."""

    array: Array
    batch: tuple[int, ...]

    __hash__ = None  # type: ignore[assignment]  # contents are never hashed

    @staticmethod
    def of(array: Array, batch: tuple[int, ...], trailing: int) -> LeadingArray:
        """Return an array whose axes before the last `trailing` ones broadcast over the batch axes."""
        missing = len(batch) + trailing - array.ndim
        return LeadingArray(array.reshape((1,) * missing + tuple(array.shape)), batch)

    def at(self, b: Array, *rest: Array) -> Array:
        """Return the elements at flat batch index b and trailing coordinates; use index 0 on axes of extent 1."""
        places: tuple[Array, ...] = (0,) * len(self.batch)
        if any(extent != 1 for extent in self.array.shape[: len(self.batch)]):
            places = _unravelled(b, self.batch) if len(self.batch) > 1 else (b,)
        coordinates = (*places, *rest)
        return self.array[tuple(c if extent != 1 else 0 for c, extent in zip(coordinates, self.array.shape))]


def _unravelled(index: Array, extents: tuple[int, ...]) -> tuple[Array, ...]:
    """Compute `unravel_index` without the check of its argument, which would wait for the device."""
    places = []
    for extent in reversed(extents):
        places.append(index % extent)
        index = index // extent
    return tuple(reversed(places))


PerBatch: TypeAlias = int | LeadingArray  # one int for all batch entries, or one number for each


def per_batch(name: str, value: Array, batch: tuple[int, ...] | None) -> PerBatch:
    if not is_array(value):
        return min(int(value), UNBOUNDED)
    if batch is None:
        raise UnsupportedProblem(f"{name} per batch entry depends on the batch: call .resolve(shape) first")
    reasons = leading_reasons(name, tuple(value.shape), batch)
    refuse(reasons)
    return 0 if 0 in batch else LeadingArray.of(value, batch, 0)  # an empty batch has no entry to read


def of_batch(value: PerBatch, b: Array) -> Array:
    """Return the value of each batch entry as int64, the dtype of coordinates."""
    return value if isinstance(value, int) else as_int64(value.at(b))


def as_int64(numbers: Array) -> Array:
    """Convert integers to int64, the dtype of coordinates; clip larger uint64 numbers, which are beyond all keys."""
    is_widest = numbers.dtype == np.uint64
    return widened(namespace(numbers).minimum(numbers, np.uint64(UNBOUNDED)) if is_widest else numbers)


def leading_reasons(
    name: str, leading: tuple[int, ...], wanted: tuple[int, ...], has_heads: bool = False
) -> list[str]:
    if broadcasts_to(leading, wanted):
        return []
    axes = "q's axes before its length" if has_heads else "q's axes before its heads"
    numbers = "batch= and num_heads=" if has_heads else "batch="
    return [
        f"the leading axes of {name} must broadcast to {wanted}; got {leading}: "
        f"they stand for {axes}, or for {numbers} in toarray, picture and BlockIndex.from_mask"
    ]
