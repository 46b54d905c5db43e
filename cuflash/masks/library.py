"""Masks as mathematics: who may see whom.

Frozen descriptions, combined by ``& | ~``. A mask holds no lengths but those it is about, so one mask serves many
problems; what it can be asked stands in `Mask`.

>>> import numpy as np
>>> mask = Causal() & SlidingWindow(1, 0)
>>> mask.dense(MaskShape((), 1, 4, 4))[0].astype(int)
array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [0, 1, 1, 0],
       [0, 0, 1, 1]])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import scipy.sparse

from ..arrays import Array, describe, is_array, is_int, is_integer_dtype, namespace, whole_number
from ..errors import UnsupportedProblem, collecting
from ..memory import is_foreign, is_on_cuda, kind_of, taken
from .base import (
    UNBOUNDED,
    And,
    Band,
    Intervals,
    LeadingArray,
    Mask,
    MaskShape,
    PerBatch,
    checked_answer,
    clipped,
    leading_reasons,
    widened,
)
from .block_set import BlockGrid, BlockSet, block_pair

__all__ = [
    "Band",
    "BlockPattern",
    "Causal",
    "Dense",
    "Dilated",
    "Documents",
    "FromFunction",
    "Lengths",
    "Mask",
    "MaskShape",
    "PrefixLM",
    "SlidingWindow",
]

# Around the diagonal


@dataclass(frozen=True, eq=False)
class _Aligned(Mask):
    """A mask about the diagonal; `align` says which diagonal when the lengths differ."""

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if self._alignment == "bottom_right":
            raise UnsupportedProblem(
                [f"{type(self).__name__}(align='bottom_right') depends on the lengths: call .resolve(shape) first"]
            )
        return self._at(0)(b, h, i, j)

    def resolve(self, shape: MaskShape) -> Mask:
        if self._alignment is None and shape.seqlen_q != shape.seqlen_kv:
            raise UnsupportedProblem([alignment_reason(type(self).__name__, "align", shape)])
        return self._at(shape.seqlen_kv - shape.seqlen_q if self._alignment == "bottom_right" else 0)

    @property
    def _alignment(self) -> str | None:
        return self.align  # type: ignore[attr-defined, no-any-return]

    def _at(self, offset: int) -> Mask:
        """The mask with query i meeting key i + offset on its diagonal."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        align = self._alignment
        if align is not None and not (isinstance(align, str) and align in ("bottom_right", "top_left")):
            raise UnsupportedProblem([f"align must be 'bottom_right', 'top_left' or None; got {describe(align)}"])


def alignment_reason(subject: str, argument: str, shape: MaskShape) -> str:
    """Why a diagonal without an alignment is refused."""
    return (
        f"{subject} needs {argument}= when the lengths differ (seqlen_q={shape.seqlen_q}, "
        f"seqlen_kv={shape.seqlen_kv}): 'bottom_right' lets the last query meet the last key, "
        f"'top_left' the first query the first key"
    )


@dataclass(frozen=True, eq=False)
class Causal(_Aligned):
    """Each query attends the keys up to its diagonal, and no later one.

    Parameters
    ----------
    align : "bottom_right", "top_left" or None
        Whether the last query meets the last key or the first the first. None is refused when the lengths differ.

    Examples
    --------
    >>> Causal("bottom_right").dense(MaskShape((), 1, 2, 4))[0].astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    >>> Causal("top_left").dense(MaskShape((), 1, 2, 4))[0].astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0]])
    """

    align: str | None = None

    def _at(self, offset: int) -> Mask:
        return Band(None, offset)


@dataclass(frozen=True, eq=False)
class SlidingWindow(_Aligned):
    """A query sees `left` keys before its diagonal, the diagonal, and `right` keys after it.

    Parameters
    ----------
    left, right : int or None
        Keys on either side, inclusive, counted from the aligned diagonal; None is unlimited. left=w, right=0 is
        w + 1 keys.
    align : "bottom_right", "top_left" or None
        As in `Causal`.

    Examples
    --------
    >>> SlidingWindow(1, 0).dense(MaskShape((), 1, 3, 3))[0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    left: int | None
    right: int | None
    align: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _convert_sides(self, "the window's keys on that side, or None for all")

    def _at(self, offset: int) -> Mask:
        return _band(offset, self.left, self.right)


@dataclass(frozen=True, eq=False)
class Dilated(_Aligned):
    """A query sees every `dilation`-th key, counted from its diagonal (Longformer, arXiv 2004.05150, section 3.1).

    Parameters
    ----------
    dilation : int
        Distance between neighbouring keys, at least 1.
    left, right : int or None
        Steps of `dilation` on either side, inclusive; None is unlimited.
    align : "bottom_right", "top_left" or None
        As in `Causal`.

    Examples
    --------
    >>> Dilated(2, 1, 1).dense(MaskShape((), 1, 5, 5))[0].astype(int)
    array([[1, 0, 1, 0, 0],
           [0, 1, 0, 1, 0],
           [1, 0, 1, 0, 1],
           [0, 1, 0, 1, 0],
           [0, 0, 1, 0, 1]])
    """

    dilation: int
    left: int | None = None
    right: int | None = None
    align: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dilation", whole_number("dilation", self.dilation, 1))
        _convert_sides(self, "steps of the dilation on that side, or None for all")

    def _at(self, offset: int) -> Mask:
        left, right = (None if side is None else side * self.dilation for side in (self.left, self.right))
        return And((_band(offset, left, right), Comb(min(self.dilation, UNBOUNDED), offset)))


@dataclass(frozen=True, eq=False)
class Comb(Mask):
    """Keys whose distance j - i - offset is a multiple of `period`; what `Dilated` resolves to."""

    period: int
    offset: int

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return (widened(j) - widened(i) - self.offset) % self.period == 0

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        smallest = j0 - (i1 - 1) - self.offset
        largest = j1 - 1 - i0 - self.offset
        may = largest // self.period >= -(-smallest // self.period)
        return may, may & ((smallest == largest) | (self.period == 1))


@dataclass(frozen=True, eq=False)
class PrefixLM(_Aligned):
    """Every query sees the first `prefix` keys, and the rest causally.

    Parameters
    ----------
    prefix : int or int array [*batch]
        Length of the prefix; an array broadcasts over the leading axes. Past either end it is that end.
    align : "bottom_right", "top_left" or None
        As in `Causal`.

    Examples
    --------
    >>> PrefixLM(2).dense(MaskShape((), 1, 4, 4))[0].astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """

    prefix: int | Array
    align: str | None = None

    def __post_init__(self) -> None:
        _take_arrays(self, {"prefix": "prefix"})
        super().__post_init__()
        object.__setattr__(self, "prefix", _converted_length("prefix", self.prefix))

    def resolve(self, shape: MaskShape) -> Mask:
        causal = super().resolve(shape)
        return ResolvedPrefix(PerBatch.of("prefix", self.prefix, shape.batch), causal)

    def _at(self, offset: int) -> Mask:
        return Band(None, offset)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return super().__call__(b, h, i, j) | (j < PerBatch.of("prefix", self.prefix, None).at(b))


@dataclass(frozen=True, eq=False)
class ResolvedPrefix(Mask):
    """What `PrefixLM` resolves to."""

    prefix: PerBatch
    causal: Mask

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        lo, hi = self.causal.closed_form(b, h, i)
        prefix = self.prefix.at(b)
        return lo, namespace(hi, prefix).maximum(hi, prefix)


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Only the first `q` queries and the first `kv` keys exist.

    Parameters
    ----------
    q, kv : int, int array [*batch], or None
        Lengths of queries and keys; arrays broadcast over the leading axes; None is all. Past either end is that end.

    Examples
    --------
    >>> Lengths(kv=np.array([1, 3])).dense(MaskShape((2,), 1, 1, 3)).astype(int)
    array([[[[1, 0, 0]]],
    <BLANKLINE>
    <BLANKLINE>
           [[[1, 1, 1]]]])
    """

    q: int | Array | None = None
    kv: int | Array | None = None

    def __post_init__(self) -> None:
        _take_arrays(self, {"q": "q", "kv": "kv"})
        for name, length in (("q", self.q), ("kv", self.kv)):
            if length is not None:
                object.__setattr__(self, name, _converted_length(name, length))

    def resolve(self, shape: MaskShape) -> Mask:
        reasons: list[str] = []
        resolved = []
        for name, length in (("q", self.q), ("kv", self.kv)):
            with collecting(reasons):
                resolved.append(PerBatch.of(name, UNBOUNDED if length is None else length, shape.batch))
        if reasons:
            raise UnsupportedProblem(reasons)
        return ResolvedLengths(*resolved)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        q, kv = (UNBOUNDED if length is None else length for length in (self.q, self.kv))
        return ResolvedLengths(PerBatch.of("q", q, None), PerBatch.of("kv", kv, None))(b, h, i, j)


@dataclass(frozen=True, eq=False)
class ResolvedLengths(Mask):
    """What `Lengths` resolves to."""

    q: PerBatch
    kv: PerBatch

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        # Queries past their length get lo = UNBOUNDED: empty, and lo still never decreases.
        return (i >= self.q.at(b)) * UNBOUNDED, self.kv.at(b) + 0 * widened(i)


# Documents


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """A query sees the keys of its own document.

    Parameters
    ----------
    q_ids : int array [..., seqlen_q]
        Document of each query; leading axes broadcast over the problem's.
    kv_ids : int array [..., seqlen_kv], optional
        Document of each key; `q_ids` when the same tokens ask and answer.

    Notes
    -----
    Ids in non-decreasing order, as packing leaves them, have a closed form (a row sees one interval of keys);
    ids in any order are right too, compared element by element.

    Device arrays are never looked at, since that would wait for the device: there the order is a condition. Equal ids
    of `q_ids` alone must be neighbours (each run is a document); with `kv_ids`, neither may decrease. Other ids read
    no memory that is not theirs, and mean nothing; ``Dense(q_ids[:, None] == kv_ids)`` takes ids in any order.

    Examples
    --------
    >>> Documents(np.array([7, 7, 9])).dense(MaskShape((), 1, 3, 3))[0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """

    q_ids: Array
    kv_ids: Array | None = None

    def __post_init__(self) -> None:
        _take_arrays(self, {"q_ids": "q_ids", "kv_ids": "kv_ids"})
        given = {"q_ids": self.q_ids} if self.kv_ids is None else {"q_ids": self.q_ids, "kv_ids": self.kv_ids}
        reasons = [
            f"{name} must be an integer array (..., seqlen); got {describe(ids)}"
            for name, ids in given.items()
            if not (is_array(ids) and ids.ndim >= 1 and is_integer_dtype(ids.dtype))
        ]
        if reasons:
            raise UnsupportedProblem(reasons)

    def resolve(self, shape: MaskShape) -> Mask:
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        reasons: list[str] = []
        for name, ids, length in (("q_ids", self.q_ids, shape.seqlen_q), ("kv_ids", kv_ids, shape.seqlen_kv)):
            if ids.shape[-1] != length:
                which = "seqlen_q" if name == "q_ids" else "seqlen_kv"
                missing = " (give kv_ids=)" if name == "kv_ids" and self.kv_ids is None else ""
                reasons.append(f"{name} must have shape (..., {which}={length}); got {tuple(ids.shape)}{missing}")
            reasons.extend(leading_reasons(name, tuple(ids.shape[:-1]), shape.batch))
        if reasons:
            raise UnsupportedProblem(reasons)
        q_leading = LeadingArray.of(self.q_ids, shape.batch, 1)
        kv_leading = LeadingArray.of(kv_ids, shape.batch, 1)
        if namespace(self.q_ids) is not np:
            bounds = _run_bounds(q_leading) if kv_ids is self.q_ids else _document_bounds(q_leading, kv_leading)
            return SortedDocuments(*bounds)
        if _never_decreases(self.q_ids) and _never_decreases(kv_ids):
            return SortedDocuments(*_document_bounds(q_leading, kv_leading))
        return ResolvedDocuments(q_leading, kv_leading)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        if self.q_ids.ndim != 1 or kv_ids.ndim != 1:
            raise UnsupportedProblem(["Documents with leading axes depends on the batch: call .resolve(shape) first"])
        return _are_equal(self.q_ids[i], kv_ids[j])


def _document_bounds(q_ids: LeadingArray, kv_ids: LeadingArray) -> tuple[LeadingArray, LeadingArray]:
    """First key of each query's document, and the one past its last, by binary search in the sorted key ids.

    Of uint64 and signed ids, those of the queries that the keys' kind does not hold come before all keys, or after.
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
        bounds.append(LeadingArray(places, q_ids.batch, 1))
    return bounds[0], bounds[1]


def _share_integers(x: Array, y: Array) -> bool:
    """Whether some integer dtype holds what both hold: not of uint64 and signed integers, which meet as float64."""
    return np.result_type(x.dtype, y.dtype).kind in "iu"


def _are_equal(x: Array, y: Array) -> Array:
    """Which integers are equal, whatever their dtypes."""
    if _share_integers(x, y):
        return x == y
    return (x >= 0) & (y >= 0) & (x.astype(np.uint64) == y.astype(np.uint64))


def _run_bounds(ids: LeadingArray) -> tuple[LeadingArray, LeadingArray]:
    """The same for ids that ask themselves, all entries at once: runs of equal ids, numbered through the entries."""
    xp, length = namespace(ids.array), ids.array.shape[-1]
    starts = xp.ones(ids.array.shape, dtype=bool)
    starts[..., 1:] = ids.array[..., 1:] != ids.array[..., :-1]
    runs = xp.cumsum(starts.reshape(-1), dtype=np.int64)
    before = xp.arange(runs.size) // length * length if runs.size > length else 0  # tokens of the entries before
    first, end = (
        LeadingArray((xp.searchsorted(runs, runs, side=side) - before).reshape(ids.array.shape), ids.batch, 1)
        for side in ("left", "right")
    )
    return first, end


@dataclass(frozen=True, eq=False)
class SortedDocuments(Mask):
    """What `Documents` resolves to when no id is followed by a smaller one."""

    first: LeadingArray
    end: LeadingArray

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        return self.first.at(b, i), self.end.at(b, i)


@dataclass(frozen=True, eq=False)
class ResolvedDocuments(Mask):
    """What `Documents` resolves to when ids come in any order."""

    q_ids: LeadingArray
    kv_ids: LeadingArray

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return _are_equal(self.q_ids.at(b, i), self.kv_ids.at(b, j))


# Arrays and functions


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array, True = attend.

    Parameters
    ----------
    allowed : bool array
        Broadcasts against (*batch, num_heads, seqlen_q, seqlen_kv) by NumPy's rules.

    Examples
    --------
    >>> Dense(np.eye(3, dtype=bool)).dense(MaskShape((), 1, 3, 3))[0].astype(int)
    array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """

    allowed: Array

    def __post_init__(self) -> None:
        _take_arrays(self, {"allowed": "mask"})
        if not is_array(self.allowed):
            fix = ": masks.BlockPattern takes it as blocks, its toarray() as elements"
            fix = fix if scipy.sparse.issparse(self.allowed) else ""
            kind = type(self.allowed).__name__
            raise TypeError(f"mask must be a Mask, a BlockIndex or a boolean array; got {kind}{fix}")
        if self.allowed.dtype != np.bool_:
            raise UnsupportedProblem(
                [
                    f"mask must be boolean, True = attend; got dtype {self.allowed.dtype}: write mask != 0 for a 0/1 "
                    f"array, or mask == 0 for an additive one of 0 and -inf"
                ]
            )

    def resolve(self, shape: MaskShape) -> Mask:
        full = (*shape.batch, *shape[1:])
        given = tuple(self.allowed.shape)
        fits = len(given) <= len(full) and all(extent in (1, wanted) for extent, wanted in zip(given[::-1], full[::-1]))
        if not fits:
            raise UnsupportedProblem(
                [f"mask must broadcast to (*batch, num_heads, seqlen_q, seqlen_kv) = {full}; got shape {given}"]
            )
        return ResolvedDense(LeadingArray.of(self.allowed, shape.batch, 3))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if self.allowed.ndim > 2:
            raise UnsupportedProblem(["Dense with leading axes depends on the batch: call .resolve(shape) first"])
        return ResolvedDense(LeadingArray.of(self.allowed, (), 3))(b, h, i, j)


@dataclass(frozen=True, eq=False)
class ResolvedDense(Mask):
    """What `Dense` resolves to."""

    allowed: LeadingArray

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.allowed.at(b, h, i, j)


@dataclass(frozen=True, eq=False)
class FromFunction(Mask):
    """Any rule, as a function of the four coordinates.

    Parameters
    ----------
    function : callable (b, h, i, j) -> bool array
        Element-wise over integer arrays that broadcast against each other. What it returns may keep an extent of 1
        along an axis that the rule does not depend on: a rule that ignores b and h is evaluated once for all.

    Notes
    -----
    Every element is evaluated, tile by tile, never sampled. The function runs as given: it is code, not data.
    Coordinates are NumPy arrays unless the rule is combined with masks whose arrays are on a device; the answer must
    be an array of their kind.

    Examples
    --------
    >>> FromFunction(lambda b, h, i, j: (i + j) % 2 == 0).dense(MaskShape((), 1, 2, 3))[0].astype(int)
    array([[1, 0, 1],
           [0, 1, 0]])
    """

    function: Callable[[Array, Array, Array, Array], Array]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable as f(b, h, i, j); got {type(self.function).__name__}")

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        allowed = self.function(b, h, i, j)
        asked, answered = namespace(b, h, i, j).__name__, namespace(allowed).__name__
        if asked != answered and is_array(allowed):
            raise UnsupportedProblem(
                [
                    f"FromFunction's function must answer coordinates of {asked} with an array of {asked}; got one of "
                    f"{answered}: use arrays of {asked}, or make a BlockIndex of the mask with NumPy and pass that"
                ]
            )
        return checked_answer("FromFunction's function", allowed, b, h, i, j)


# Blocks


@dataclass(frozen=True, eq=False)
class BlockPattern(Mask):
    """Whole blocks kept or dropped.

    Parameters
    ----------
    blocks : bool array [..., num_q_blocks, num_kv_blocks], or 2-D scipy.sparse array
        True, or stored, where the block is kept; the axes before the last two broadcast over (*batch, num_heads).
    block : int or (int, int)
        Size of a block in tokens, or block_q and block_kv. The length may cut off the last block of either side.

    Examples
    --------
    >>> BlockPattern(np.array([[1, 0], [1, 1]], bool), block=2).dense(MaskShape((), 1, 3, 4))[0].astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 1]])
    """

    blocks: Array
    block: Any  # (int, int) once built; the field takes the place of Mask.block

    def __post_init__(self) -> None:
        reasons: list[str] = []
        _take_arrays(self, {"blocks": "blocks"})
        with collecting(reasons):
            object.__setattr__(self, "block", block_pair(self.block))
        if scipy.sparse.issparse(self.blocks):
            object.__setattr__(self, "blocks", scipy.sparse.csr_array(self.blocks))
        elif not (is_array(self.blocks) and self.blocks.ndim >= 2 and self.blocks.dtype == np.bool_):
            reasons.append(
                f"blocks must be a boolean array (..., num_q_blocks, num_kv_blocks) or a scipy.sparse array; "
                f"got {describe(self.blocks)}"
            )
        if reasons:
            raise UnsupportedProblem(reasons)

    @property
    def natural_block(self) -> tuple[int, int]:
        block_q, block_kv = self.block
        return block_q, block_kv

    def resolve(self, shape: MaskShape) -> Mask:
        grid = (-(-shape.seqlen_q // self.block[0]), -(-shape.seqlen_kv // self.block[1]))
        reasons = []
        if tuple(self.blocks.shape[-2:]) != grid:
            reasons.append(
                f"blocks must have shape (..., {grid[0]}, {grid[1]}) for lengths ({shape.seqlen_q}, {shape.seqlen_kv}) "
                f"in blocks of {self.block}; got {tuple(self.blocks.shape)}"
            )
        leading = tuple(self.blocks.shape[:-2])
        reasons.extend(leading_reasons("blocks", leading, (*shape.batch, shape.num_heads)))
        if reasons:
            raise UnsupportedProblem(reasons)
        if scipy.sparse.issparse(self.blocks):
            kept = self.blocks.tocoo()
            stored = kept.data != 0
            keys = np.unique(kept.row[stored].astype(np.int64) * grid[1] + kept.col[stored])
            return BlockSet((1, 1, *grid), self.block, keys, np.ones(len(keys), bool))
        if namespace(self.blocks) is not np:
            return BlockGrid(LeadingArray.of(self.blocks, shape.batch, 3), self.block)
        padded = self.blocks.reshape((1,) * (len(shape.batch) + 1 - len(leading)) + tuple(self.blocks.shape))
        if any(extent > 1 for extent in padded.shape[:-3]):
            padded = np.broadcast_to(padded, (*shape.batch, *padded.shape[-3:]))
        flat = padded.reshape(prod(padded.shape[:-3]), *padded.shape[-3:])
        keys = np.flatnonzero(flat)
        return BlockSet(flat.shape, self.block, keys, np.ones(len(keys), bool))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if len(self.blocks.shape) > 2 or scipy.sparse.issparse(self.blocks):
            raise UnsupportedProblem(
                ["BlockPattern with leading axes or a sparse array depends on the shape: call .resolve(shape) first"]
            )
        return self.blocks[widened(i) // self.block[0], widened(j) // self.block[1]]


def _take_arrays(mask: Mask, names: dict[str, str]) -> None:
    """Take the host arrays of other libraries in some fields of a mask being made, where they lie; names of fields, and
    what messages call them.

    What is on a CUDA device is taken by the call that knows which library reads it there.
    """
    reasons: list[str] = []
    for field, name in names.items():
        value = getattr(mask, field)
        with collecting(reasons):
            if not is_foreign(value):
                continue
            if not is_on_cuda(name, value):
                object.__setattr__(mask, field, taken(name, value, np))
            elif not is_array(value):
                reasons.append(f"{name} lies on a CUDA device, as {kind_of(value)}: give cupy.from_dlpack({name})")
    if reasons:
        raise UnsupportedProblem(reasons)


def _convert_sides(mask: SlidingWindow | Dilated, meaning: str) -> None:
    for name in ("left", "right"):
        side = getattr(mask, name)
        if side is not None:
            object.__setattr__(mask, name, whole_number(name, side, 0, meaning))


def _band(offset: int, left: int | None, right: int | None) -> Band:
    """Keys on either side of the diagonal, as far as coordinates reach."""
    return Band(
        None if left is None else clipped(offset - left), None if right is None else clipped(offset + right)
    )


def _converted_length(name: str, value: Any) -> Any:
    if is_int(value) and value >= 0:
        return int(value)
    if not (is_array(value) and is_integer_dtype(value.dtype)):
        raise UnsupportedProblem(
            [f"{name} must be an int of at least 0, or an integer array over the leading axes; got {describe(value)}"]
        )
    return value


def _never_decreases(ids: Array) -> bool:
    return bool((ids[..., 1:] >= ids[..., :-1]).all())
