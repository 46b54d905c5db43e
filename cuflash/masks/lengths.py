"""Masks of padding: the lengths of the queries and keys that exist."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Array, is_array
from ..errors import collecting, refuse
from ..keywords import explains_keywords
from ._interval_form import IntervalForm, KernelIntervals
from .base import Mask
from .content import DeviceForm
from .coordinates import UNBOUNDED, Intervals, PerBatch, of_batch, per_batch, widened
from .fields import converted_length, take_arrays
from .shape import MaskShape

_KEYWORDS = "Lengths takes keywords: masks.Lengths(kv=lengths) for key padding, q= for query padding"


@explains_keywords(advice=_KEYWORDS)
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Lengths(Mask):
    """Only the first `q` queries and the first `kv` keys exist.

    Key padding is ``Lengths(kv=lengths)``. Both arguments are keywords, since a positional one could mean either.

    Parameters
    ----------
    q, kv : int, int array [*batch], or None
        Lengths of queries and keys; at least one is required, and None means all. An int must be at least 0. Arrays
        broadcast over the leading axes, and negative elements count as 0. Values above the problem's length count as
        that length.

    Raises
    ------
    TypeError
        There is a positional argument, or neither `q` nor `kv`.
    UnsupportedProblem
        A length is not an int of at least 0, an integer array or None. Calls, and `resolve`, raise it if an array does
        not fit the batch.

    Examples
    --------
    >>> import numpy as np
    >>> Lengths(kv=np.array([1, 3])).toarray(1, 3, batch=(2,), num_heads=1).astype(int)
    array([[[[1, 0, 0]]],
    <BLANKLINE>
    <BLANKLINE>
           [[[1, 1, 1]]]])
    """

    q: int | Array | None = None
    kv: int | Array | None = None

    def __post_init__(self) -> None:
        if self.q is None and self.kv is None:
            raise TypeError(f"{_KEYWORDS}; got None for both")
        take_arrays(self, {"q": "q", "kv": "kv"})
        for name, length in (("q", self.q), ("kv", self.kv)):
            if length is not None:
                object.__setattr__(self, name, converted_length(name, length))

    @property
    def _device_form(self) -> DeviceForm | None:
        arrays = tuple(length for length in (self.q, self.kv) if is_array(length))
        facts = tuple("array" if is_array(length) else length for length in (self.q, self.kv))
        return DeviceForm(arrays, facts) if arrays else None

    def resolve(self, shape: MaskShape) -> Mask:
        reasons: list[str] = []
        resolved = []
        for name, length in (("q", self.q), ("kv", self.kv)):
            with collecting(reasons):
                resolved.append(per_batch(name, UNBOUNDED if length is None else length, shape.batch))
        refuse(reasons)
        return ResolvedLengths(*resolved)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        q, kv = (UNBOUNDED if length is None else length for length in (self.q, self.kv))
        return ResolvedLengths(per_batch("q", q, None), per_batch("kv", kv, None))(b, h, i, j)


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedLengths(KernelIntervals):
    """The resolved form of `Lengths`."""

    q: PerBatch
    kv: PerBatch

    @property
    def interval_form(self) -> IntervalForm | None:
        if isinstance(self.q, int) and isinstance(self.kv, int):
            return None
        q, kv = (side if isinstance(side, int) else side.array[..., None] for side in (self.q, self.kv))
        return IntervalForm("lengths", q, kv)

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        # Queries past their length get lo = UNBOUNDED: then their interval is empty, and lo never decreases.
        return (i >= of_batch(self.q, b)) * UNBOUNDED, of_batch(self.kv, b) + 0 * widened(i)
