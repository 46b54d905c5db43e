"""Masks around the diagonal: causal, windows, combs of keys, and prefixes with a causal rest."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Array, describe, namespace, whole_number
from ..errors import UnsupportedProblem
from ..keywords import explains_keywords
from .base import And, Band, Mask
from .coordinates import UNBOUNDED, Intervals, PerBatch, clipped, of_batch, per_batch, widened
from .fields import convert_sides, converted_length, take_arrays
from .shape import MaskShape


class _Aligned(Mask):
    """A mask about the diagonal; `align` says which diagonal when the lengths differ."""

    align: str | None

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if self.align == "bottom_right":
            raise UnsupportedProblem(
                [f"{type(self).__name__}(align='bottom_right') depends on the lengths: call .resolve(shape) first"]
            )
        return self._at(0)(b, h, i, j)

    def resolve(self, shape: MaskShape) -> Mask:
        if self.align is None and shape.seqlen_q != shape.seqlen_kv:
            raise UnsupportedProblem([alignment_reason(type(self).__name__, "align", shape)])
        return self._at(shape.seqlen_kv - shape.seqlen_q if self.align == "bottom_right" else 0)

    def _at(self, offset: int) -> Mask:
        """The mask with query i meeting key i + offset on its diagonal."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        align = self.align
        if align is not None and not (isinstance(align, str) and align in ("bottom_right", "top_left")):
            raise UnsupportedProblem([f"align must be 'bottom_right', 'top_left' or None; got {describe(align)}"])


def alignment_reason(subject: str, argument: str, shape: MaskShape) -> str:
    """Why a diagonal without an alignment is refused."""
    return (
        f"{subject} is for equal lengths; got seqlen_q={shape.seqlen_q} and seqlen_kv={shape.seqlen_kv}: pass "
        f"{argument}='bottom_right' (the last query meets the last key) or {argument}='top_left' (the first query "
        f"meets the first key)"
    )


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class Causal(_Aligned):
    """Each query attends the keys up to its diagonal, and no later one.

    Parameters
    ----------
    align : "bottom_right", "top_left" or None
        Whether the last query meets the last key or the first the first. None is refused when the lengths differ.

    Raises
    ------
    UnsupportedProblem
        `align` is no alignment. Calls, and `resolve`, raise it where there is none and the lengths differ.

    Examples
    --------
    >>> Causal("bottom_right").toarray(2, 4).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    >>> Causal("top_left").toarray(2, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0]])
    """

    align: str | None = None

    def _at(self, offset: int) -> Mask:
        return Band(None, offset)


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(_Aligned):
    """A query sees `left` keys before its diagonal, the diagonal, and `right` keys after it.

    Parameters
    ----------
    left, right : int or None
        Keys on either side, inclusive, counted from the aligned diagonal; None is unlimited. left=w, right=0 is
        w + 1 keys.
    align : "bottom_right", "top_left" or None
        As in `Causal`.

    Raises
    ------
    UnsupportedProblem
        A side is no int of at least 0 or None, or `align` is no alignment. Calls, and `resolve`, raise it where there
        is none and the lengths differ.

    Examples
    --------
    >>> SlidingWindow(1, 0).toarray(3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    left: int | None
    right: int | None
    align: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        convert_sides(self, "the window's keys on that side, or None for all")

    def _at(self, offset: int) -> Mask:
        return _band(offset, self.left, self.right)


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
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

    Raises
    ------
    UnsupportedProblem
        `dilation` is no int of at least 1, a side no int of at least 0 or None, or `align` no alignment. Calls, and
        `resolve`, raise it where there is none and the lengths differ.

    Examples
    --------
    >>> Dilated(2, 1, 1).toarray(5).astype(int)
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
        convert_sides(self, "steps of the dilation on that side, or None for all")

    def _at(self, offset: int) -> Mask:
        left, right = (None if side is None else side * self.dilation for side in (self.left, self.right))
        return And((_band(offset, left, right), Comb(min(self.dilation, UNBOUNDED), offset)))


@dataclass(frozen=True, eq=False, repr=False)
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


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(_Aligned):
    """Every query sees the first `prefix` keys, and the rest causally.

    Parameters
    ----------
    prefix : int or int array [*batch]
        Length of the prefix; an array broadcasts over the leading axes. Values above seqlen_kv are clipped, and those
        of an array below 0 too; an int is at least 0.
    align : "bottom_right", "top_left" or None
        As in `Causal`.

    Raises
    ------
    UnsupportedProblem
        `prefix` is no int of at least 0 or integer array, or `align` is no alignment. Calls, and `resolve`, raise it
        where there is none and the lengths differ, or an array does not fit the batch.

    Examples
    --------
    >>> PrefixLM(2).toarray(4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """

    prefix: int | Array
    align: str | None = None

    def __post_init__(self) -> None:
        take_arrays(self, {"prefix": "prefix"})
        super().__post_init__()
        object.__setattr__(self, "prefix", converted_length("prefix", self.prefix))

    def resolve(self, shape: MaskShape) -> Mask:
        causal = super().resolve(shape)
        return ResolvedPrefix(per_batch("prefix", self.prefix, shape.batch), causal)

    def _at(self, offset: int) -> Mask:
        return Band(None, offset)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return super().__call__(b, h, i, j) | (j < of_batch(per_batch("prefix", self.prefix, None), b))


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedPrefix(Mask):
    """Resolved form of `PrefixLM`."""

    prefix: PerBatch
    causal: Mask

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        lo, hi = self.causal._closed_form(b, h, i)
        prefix = of_batch(self.prefix, b)
        return lo, namespace(hi, prefix).maximum(hi, prefix)


def _band(offset: int, left: int | None, right: int | None) -> Band:
    """Keys on either side of the diagonal, as far as coordinates reach."""
    return Band(
        None if left is None else clipped(offset - left), None if right is None else clipped(offset + right)
    )
