"""Row intervals that a kernel computes from the mask arrays of each call."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple

from ..arrays import Array
from .base import Mask
from .coordinates import Intervals, LeadingArray


class IntervalForm(NamedTuple):
    """Row intervals as a function of integers on a device, which a kernel evaluates.

    Attributes
    ----------
    kind : {"sequences", "lengths", "documents"}
        The function, as kernels_cu/lists/interval_params.cuh defines it.
    q : int array [*batch, n], or int
        The integers of the queries; an int if the host knows one length for all of them.
    kv : int array [*batch, n], int, or None
        The integers of the keys; None if they equal those of the queries.
    left, right : int or None
        Number of keys before and after the diagonal of a sequence; None is unlimited.
    is_bottom_right : bool
        If True, the diagonal passes through the bottom right corner of each sequence's matrix, else through the top
        left.
    """

    kind: Literal["sequences", "lengths", "documents"]
    q: Array | int
    kv: Array | int | None
    left: int | None = None
    right: int | None = None
    is_bottom_right: bool = False


class KernelIntervals(Mask):
    """A resolved mask whose row intervals a kernel can compute; `intervals` computes the same with array operations."""

    @property
    def interval_form(self) -> IntervalForm | None:
        """The inputs from which the kernel computes the intervals, or None if the mask holds no array."""
        raise NotImplementedError


class BoundedRows(KernelIntervals):
    """Row intervals of which the mask holds the bounds, once they are needed."""

    @cached_property
    def bounds(self) -> tuple[LeadingArray, LeadingArray]:
        """The first key that each query attends, and one past the last; unused if the kernel computes them."""
        raise NotImplementedError

    @property
    def _has_intervals(self) -> bool:
        return True

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        first, end = self.bounds
        return first.at(b, i), end.at(b, i)
