"""Documents packed into one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..arrays import Array, describe, is_array, is_integer_dtype, namespace
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords
from ._interval_form import BoundedRows, IntervalForm
from .base import Mask
from .content import DeviceForm
from .coordinates import LeadingArray, leading_reasons
from .fields import take_arrays
from .shape import MaskShape


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """A query attends the keys of its own document.

    Parameters
    ----------
    q_ids : int array [..., seqlen_q]
        Document of each query; leading axes broadcast over those of the problem.
    kv_ids : int array [..., seqlen_kv], optional
        Document of each key. Default: `q_ids`, for queries and keys of the same tokens.

    Raises
    ------
    UnsupportedProblem
        The ids are not integer arrays with at least one axis. Calls, and `resolve`, raise it if they do not fit the
        lengths.

    Notes
    -----
    Ids in non-decreasing order, the usual result of packing, have a closed form: a row attends one interval of keys.
    Host arrays may hold ids in any order; unsorted ids are compared element by element.

    Device arrays are not inspected, since that would wait for the device, and must therefore be ordered. Equal ids of
    `q_ids` alone must be neighbours (each run is a document); with `kv_ids`, neither array may decrease. Other ids give
    undefined results, but never out-of-bounds reads; ``Dense(q_ids[:, None] == kv_ids)`` accepts ids in any order.

    Examples
    --------
    >>> import numpy as np
    >>> Documents(np.array([7, 7, 9])).toarray(3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """

    q_ids: Array
    kv_ids: Array | None = None

    def __post_init__(self) -> None:
        take_arrays(self, {"q_ids": "q_ids", "kv_ids": "kv_ids"})
        named = {"q_ids": self.q_ids} if self.kv_ids is None else {"q_ids": self.q_ids, "kv_ids": self.kv_ids}
        reasons = [
            f"{name} must be an integer array (..., seqlen); got {describe(ids)}"
            for name, ids in named.items()
            if not (is_array(ids) and ids.ndim >= 1 and is_integer_dtype(ids.dtype))
        ]
        refuse(reasons)

    @property
    def _ids(self) -> tuple[Array, Array]:
        """The ids of queries and of keys."""
        return self.q_ids, self.q_ids if self.kv_ids is None else self.kv_ids

    @property
    def _own_lengths(self) -> tuple[int | None, int | None]:
        q_ids, kv_ids = self._ids
        return int(q_ids.shape[-1]), int(kv_ids.shape[-1])

    @property
    def _device_form(self) -> DeviceForm:
        shares_ids = self.kv_ids is None or self.kv_ids is self.q_ids
        return DeviceForm((self.q_ids,) if shares_ids else (self.q_ids, self.kv_ids))

    def resolve(self, shape: MaskShape) -> Mask:
        _, kv_ids = self._ids
        reasons: list[str] = []
        for name, ids, length in (("q_ids", self.q_ids, shape.seqlen_q), ("kv_ids", kv_ids, shape.seqlen_kv)):
            if ids.shape[-1] != length:
                which = "seqlen_q" if name == "q_ids" else "seqlen_kv"
                missing = " (give kv_ids=)" if name == "kv_ids" and self.kv_ids is None else ""
                reasons.append(f"{name} must have shape (..., {which}={length}); got {tuple(ids.shape)}{missing}")
            reasons.extend(leading_reasons(name, tuple(ids.shape[:-1]), shape.batch))
        refuse(reasons)
        q_leading = LeadingArray.of(self.q_ids, shape.batch, 1)
        kv_leading = LeadingArray.of(kv_ids, shape.batch, 1)
        if not {namespace(self.q_ids), namespace(kv_ids)} <= {np}:
            return SortedDocuments(q_leading, None if kv_ids is self.q_ids else kv_leading)
        is_sorted = _never_decreases(self.q_ids) and _never_decreases(kv_ids)
        return (SortedDocuments if is_sorted else ResolvedDocuments)(q_leading, kv_leading)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        _, kv_ids = self._ids
        if self.q_ids.ndim != 1 or kv_ids.ndim != 1:
            raise UnsupportedProblem("Documents with leading axes depends on the batch: call .resolve(shape) first")
        return _are_equal(self.q_ids[i], kv_ids[j])


def _document_bounds(q_ids: LeadingArray, kv_ids: LeadingArray) -> tuple[LeadingArray, LeadingArray]:
    """Find the first key of each query's document, and one past the last, by binary search in the sorted key ids.

    If one array is uint64 and the other signed, query ids outside the range of the keys' dtype are placed before or
    after all keys.
    """
    leading = np.broadcast_shapes(q_ids.array.shape[:-1], kv_ids.array.shape[:-1])
    xp = namespace(q_ids.array)
    q = xp.broadcast_to(q_ids.array, (*leading, q_ids.array.shape[-1]))
    kv = xp.broadcast_to(kv_ids.array, (*leading, kv_ids.array.shape[-1]))
    within = _share_integers(q, kv)
    looked_up = q if within else q.astype(np.int64 if kv.dtype.kind == "i" else np.uint64)
    bounds = []
    for side in ("left", "right"):
        places = xp.empty(q.shape, dtype=np.int64)
        for entry in np.ndindex(leading):
            places[entry] = xp.searchsorted(kv[entry], looked_up[entry], side=side)
        if not within:
            is_out, end = (q < 0, 0) if q.dtype.kind == "i" else (q > np.iinfo(np.int64).max, kv.shape[-1])
            places = xp.where(is_out, end, places)
        bounds.append(LeadingArray(places, q_ids.batch))
    return bounds[0], bounds[1]


def _share_integers(x: Array, y: Array) -> bool:
    """True if an integer dtype holds the values of both; NumPy promotes uint64 and signed integers to float64."""
    return np.result_type(x.dtype, y.dtype).kind in "iu"


def _are_equal(x: Array, y: Array) -> Array:
    """Compare integers exactly, for any combination of dtypes."""
    if _share_integers(x, y):
        return x == y
    return (x >= 0) & (y >= 0) & (x.astype(np.uint64) == y.astype(np.uint64))


def _run_bounds(ids: LeadingArray) -> tuple[LeadingArray, LeadingArray]:
    """Return the start and the end of the run of equal ids at each position, for queries and keys that share their ids.

    Runs are numbered through all batch entries, so that one search serves all entries.
    """
    xp, length = namespace(ids.array), ids.array.shape[-1]
    starts = xp.ones(ids.array.shape, dtype=bool)
    starts[..., 1:] = ids.array[..., 1:] != ids.array[..., :-1]
    runs = xp.cumsum(starts.reshape(-1), dtype=np.int64)
    before = xp.arange(runs.size) // length * length if runs.size > length else 0  # tokens of earlier batch entries
    first, end = (
        LeadingArray((xp.searchsorted(runs, runs, side=side) - before).reshape(ids.array.shape), ids.batch)
        for side in ("left", "right")
    )
    return first, end


@dataclass(frozen=True, eq=False, repr=False)
class SortedDocuments(BoundedRows):
    """The resolved form of `Documents` with sorted ids or, if `kv_ids` is None, with adjacent ids of each document."""

    q_ids: LeadingArray
    kv_ids: LeadingArray | None

    @cached_property
    def bounds(self) -> tuple[LeadingArray, LeadingArray]:
        return _run_bounds(self.q_ids) if self.kv_ids is None else _document_bounds(self.q_ids, self.kv_ids)

    @property
    def interval_form(self) -> IntervalForm:
        return IntervalForm("documents", self.q_ids.array, None if self.kv_ids is None else self.kv_ids.array)


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedDocuments(Mask):
    """The resolved form of `Documents` with ids in any order."""

    q_ids: LeadingArray
    kv_ids: LeadingArray

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return _are_equal(self.q_ids.at(b, i), self.kv_ids.at(b, j))


def _never_decreases(ids: Array) -> bool:
    return bool((ids[..., 1:] >= ids[..., :-1]).all())
