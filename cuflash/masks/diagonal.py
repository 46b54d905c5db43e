"""Masks aligned to the diagonal: causal masks, sliding and dilated windows, and prefix-LM masks."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Array, describe, namespace, whole_number
from ..errors import UnsupportedProblem
from ..keywords import explains_keywords
from .base import And, Band, Mask
from .coordinates import UNBOUNDED, Intervals, PerBatch, clipped, of_batch, per_batch, widened
from .fields import KEYS, convert_sides, converted_length, take_arrays
from .shape import MaskShape


class _Aligned(Mask):
    """A mask aligned to the diagonal; `align` selects the diagonal if the lengths differ."""

    align: str | None

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if self.align == "bottom_right":
            raise UnsupportedProblem(
                f"{type(self).__name__}(align='bottom_right') depends on the lengths: call .resolve(shape) first"
            )
        return self._at(0)(b, h, i, j)

    def resolve(self, shape: MaskShape) -> Mask:
        if self.align is None and shape.seqlen_q != shape.seqlen_kv:
            raise UnsupportedProblem(alignment_reason(type(self).__name__, "align", shape))
        return self._at(shape.seqlen_kv - shape.seqlen_q if self.align == "bottom_right" else 0)

    def _at(self, offset: int) -> Mask:
        """Return the mask whose diagonal aligns query i with key i + offset."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        align = self.align
        if align is not None and not (isinstance(align, str) and align in ("bottom_right", "top_left")):
            raise UnsupportedProblem(f"align must be 'bottom_right', 'top_left' or None; got {describe(align)}")


def alignment_reason(subject: str, argument: str, shape: MaskShape) -> str:
    """Explain why a mask without an alignment is refused."""
    return (
        f"{subject} is for equal lengths; got seqlen_q={shape.seqlen_q} and seqlen_kv={shape.seqlen_kv}: pass "
        f"{argument}='bottom_right' (aligns the last query with the last key) or {argument}='top_left' (aligns the "
        f"first query with the first key)"
    )


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class Causal(_Aligned):
    """A query attends the keys up to the diagonal, and no later ones.

    Parameters
    ----------
    align : "bottom_right", "top_left" or None
        Align the last query with the last key, or the first query with the first key. None is refused if the lengths
        differ.

    Raises
    ------
    UnsupportedProblem
        `align` is not one of these. Calls, and `resolve`, raise it if `align` is None and the lengths differ.

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


@explains_keywords(
    advice="SlidingWindow takes both sides: masks.SlidingWindow(8, 0) has the query's own key and 8 keys before it, "
    "and masks.SlidingWindow(8, 8) also 8 keys after it"
)
@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(_Aligned):
    """A query attends `left` keys before the diagonal, the key on the diagonal, and `right` keys after it.

    Parameters
    ----------
    left, right : int or None
        Number of keys on either side of the aligned diagonal; None is unlimited. With left=w and right=0 a query
        attends w + 1 keys.
    align : "bottom_right", "top_left" or None
        As in `Causal`.

    Raises
    ------
    TypeError
        `left` or `right` is missing.
    UnsupportedProblem
        `left` or `right` is neither an int of at least 0 nor None, or `align` is invalid. Calls, and `resolve`, raise
        it if `align` is None and the lengths differ.

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
        convert_sides(self, KEYS)

    def _at(self, offset: int) -> Mask:
        return _band(offset, self.left, self.right)


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class Dilated(_Aligned):
    """A query attends every `dilation`-th key, counted from the diagonal (Longformer, arXiv 2004.05150, section 3.1).

    Parameters
    ----------
    dilation : int
        Distance between neighbouring keys, at least 1.
    left, right : int or None
        Number of attended keys on either side of the diagonal; None is unlimited.
    align : "bottom_right", "top_left" or None
        As in `Causal`.

    Raises
    ------
    UnsupportedProblem
        `dilation` is not an int of at least 1, `left` or `right` is neither an int of at least 0 nor None, or `align`
        is invalid. Calls, and `resolve`, raise it if `align` is None and the lengths differ.

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
    """Keys whose distance j - i - offset is a multiple of `period`; part of the resolved form of `Dilated`."""

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
    """A query attends the first `prefix` keys and all keys up to the diagonal.

    Parameters
    ----------
    prefix : int or int array [*batch]
        Length of the prefix. An int must be at least 0. An array broadcasts over the leading axes, and negative
        elements count as 0. Values above seqlen_kv count as seqlen_kv.
    align : "bottom_right", "top_left" or None
        As in `Causal`.

    Raises
    ------
    UnsupportedProblem
        `prefix` is neither an int of at least 0 nor an integer array, or `align` is invalid. Calls, and `resolve`,
        raise it if `align` is None and the lengths differ, or if an array does not fit the batch.

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
    """The resolved form of `PrefixLM`."""

    prefix: PerBatch
    causal: Mask

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        lo, hi = self.causal._closed_form(b, h, i)
        prefix = of_batch(self.prefix, b)
        return lo, namespace(hi, prefix).maximum(hi, prefix)


def _band(offset: int, left: int | None, right: int | None) -> Band:
    """Return the band of `left` and `right` keys around a diagonal, with bounds clipped to the range of coordinates."""
    return Band(
        None if left is None else clipped(offset - left), None if right is None else clipped(offset + right)
    )
