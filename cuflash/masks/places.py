"""The position of a call within a larger call, and the part of the larger call's mask that applies to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays import Array, int_reasons, is_array, namespace
from .base import And, Band, Mask, intersection
from .coordinates import Intervals, clipped, elements
from .shape import MAX_SEQLEN, MaskShape


class Places(NamedTuple):
    """The position of a call in a larger call; masks, score functions and dropout use the larger call's coordinates.

    >>> Places(q_start=4).whole(MaskShape((), 1, 2, 6))
    MaskShape(batch=(), num_heads=1, seqlen_q=6, seqlen_kv=6)

    Attributes
    ----------
    q_start, kv_start : int
        Positions of the first query and of the first key.
    batch_start, head_start : int
        Numbers of the first batch entry and of the first query head.
    q_runs : tuple of (int, int)
        The positions first <= i < stop of the queries, in ascending runs, if they are not adjacent; else empty.
    of_all : MaskShape, optional
        The shape of the larger call. Default: it ends where this call ends.
    """

    q_start: int = 0
    kv_start: int = 0
    batch_start: int = 0
    head_start: int = 0
    q_runs: tuple[tuple[int, int], ...] = ()
    of_all: MaskShape | None = None

    @property
    def starts(self) -> tuple[int, int, int, int]:
        """The first batch entry, head, query and key."""
        return self.batch_start, self.head_start, self.q_start, self.kv_start

    def whole(self, shape: MaskShape) -> MaskShape:
        """Return the shape of the larger call, of which a call of this shape is a part."""
        if self.of_all is not None:
            return self.of_all
        last = self.q_runs[-1][1] if self.q_runs else self.q_start + shape.seqlen_q
        return MaskShape(shape.batch, self.head_start + shape.num_heads, last, self.kv_start + shape.seqlen_kv)

    def coordinates(self, b: Array, h: Array, i: Array, j: Array) -> tuple[Array, Array, Array, Array]:
        """Convert coordinates of scores in this call to coordinates in the larger call."""
        return b + self.batch_start, h + self.head_start, self.queries(i), j + self.kv_start

    def queries(self, i: Array) -> Array:
        """Return the positions of queries in the larger call; an index past the last query gets the last position."""
        if not self.q_runs:
            return i + self.q_start
        xp, positions = namespace(i) if is_array(i) else np, _positions(self.q_runs)
        return xp.asarray(positions)[xp.clip(i, 0, len(positions) - 1)]

    def reasons(self, shape: MaskShape) -> list[str]:
        """Return the reasons why a call of this shape does not fit at these positions."""
        reasons = int_reasons(0, MAX_SEQLEN, q_start=self.q_start, kv_start=self.kv_start)
        if reasons:
            return reasons
        ends = self.whole(shape)
        return [
            f"{name} + {length} must be at most {MAX_SEQLEN}; got {start} + {getattr(shape, length)}"
            for name, length, start in (("q_start", "seqlen_q", self.q_start), ("kv_start", "seqlen_kv", self.kv_start))
            if getattr(ends, length) > MAX_SEQLEN
        ]


@lru_cache(maxsize=64)
def _positions(runs: tuple[tuple[int, int], ...]) -> Array:
    """Return the positions of all queries in some runs."""
    positions = np.concatenate([np.arange(first, stop) for first, stop in runs])
    positions.flags.writeable = False
    return positions


def placed(mask: Mask, places: Places) -> Mask:
    """Return the part of a resolved mask that applies to a call at these places, in the call's own coordinates."""
    parts = mask.operands if type(mask) is And else (mask,)
    return intersection([_placed(part, places) for part in parts])


def _placed(mask: Mask, places: Places) -> Mask:
    if type(mask) is not Band:
        return Placed(mask, places)
    if places.q_runs and not mask == Band():
        return Placed(mask, places)
    shift = places.q_start - places.kv_start
    return Band(*(None if bound is None else clipped(bound + shift) for bound in (mask.lower, mask.upper)))


@dataclass(frozen=True, eq=False, repr=False)
class Placed(Mask):
    """A resolved mask of a larger call at the queries and keys of a part of it."""

    mask: Mask
    places: Places

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return elements(self.mask, *self.places.coordinates(b, h, i, j))

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals | None:
        b, h, i, start = self.places.coordinates(b, h, i, 0)
        bounds = self.mask.intervals(b, h, i)
        return None if bounds is None else (bounds[0] - start, bounds[1] - start)

    @property
    def _has_intervals(self) -> bool:
        return self.mask._has_intervals

    @property
    def _natural_block(self) -> tuple[int, int] | None:
        block, places = self.mask._natural_block, self.places
        if block is None or places.q_runs or places.q_start % block[0] or places.kv_start % block[1]:
            return None
        return block

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        last = self.places.queries(i1 - 1)
        b, h, first, j0 = self.places.coordinates(b, h, i0, j0)
        return self.mask.rectangle(b, h, first, last + 1, j0, j1 + self.places.kv_start)
