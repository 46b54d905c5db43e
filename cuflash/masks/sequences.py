"""Packed sequences: many sequences, one after the other in one array, that do not attend each other."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

import numpy as np

from ..arrays import Array, describe, flag_reasons, is_array, is_flag, is_integer_dtype, namespace
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from ..scores.offsets import end_reasons, offset_reasons, pair_reasons
from ._interval_form import BoundedRows, IntervalForm
from .base import Mask
from .content import DeviceForm
from .coordinates import UNBOUNDED, Intervals, LeadingArray, as_int64, clipped, leading_reasons
from .fields import take_arrays, taken_array, window_sides
from .shape import MaskShape


_ALIGNMENTS = ("bottom_right", "top_left")


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class Sequences(Mask):
    """A query attends the keys of its own sequence; sequences are packed one after the other.

    A sequence may have different numbers of queries and keys. In the second example, the first sequence has one query
    and two keys, the second has two queries and three keys, and the last query of each is aligned with its last key.

    Parameters
    ----------
    q_offsets : list of ints, or int array [..., num_sequences + 1]
        Sequence n holds the queries q_offsets[n] <= i < q_offsets[n + 1]. Offsets never decrease, the first is 0 and
        the last is seqlen_q; a sequence may be empty. Leading axes broadcast over those of the problem.
    kv_offsets : list of ints, or int array [..., num_sequences + 1], optional
        The offsets of the keys, by the same rules. Default: `q_offsets`.
    causal : bool, "bottom_right" or "top_left"
        Mask later keys of the sequence. True requires equal offsets. Otherwise "bottom_right" aligns the last query of
        each sequence with its last key, and "top_left" the first query with the first key.
    window : (left, right), optional
        Number of keys on either side of the diagonal, which `causal` aligns; None is unlimited.
    allow_gaps : bool
        Allow a first offset greater than 0, and a last one less than the length. Queries outside all sequences attend
        no key, and keys outside all sequences are not attended.

    Raises
    ------
    UnsupportedProblem
        An argument breaks its rule. Calls, and `resolve`, raise it if offsets do not fit the lengths, or have been
        changed so that they break their rules.

    Notes
    -----
    `cuflash.pack` returns the packed array and its offsets for a list of arrays, and `of` builds the mask from lengths.

    A row attends one contiguous interval of keys in closed form, so kernels visit no block between two sequences.

    Arrays of offsets are not copied, and calls read their current contents. Host offsets are checked at construction
    and again at each call. Device offsets are not validated, since that would wait for the device, and may have gaps
    without `allow_gaps`. Unsorted device offsets give undefined results, but never out-of-bounds reads.

    The result of a sequence does not depend on the finite values of another sequence, and values after the last offset
    may be NaN. The results for a packed and an unpacked sequence agree within their error bounds, but are not bitwise
    equal, since tiles start at different positions.

    Examples
    --------
    >>> offsets = np.array([0, 2, 5])
    >>> Sequences(offsets, causal=True).toarray(5).astype(int)
    array([[1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0],
           [0, 0, 1, 0, 0],
           [0, 0, 1, 1, 0],
           [0, 0, 1, 1, 1]])

    >>> mask = Sequences(np.array([0, 1, 3]), offsets, causal="bottom_right")
    >>> mask.toarray(3, 5).astype(int)
    array([[1, 1, 0, 0, 0],
           [0, 0, 1, 1, 0],
           [0, 0, 1, 1, 1]])
    """

    q_offsets: Array
    kv_offsets: Array | None = None
    _: KW_ONLY
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    allow_gaps: bool = False

    def __post_init__(self) -> None:
        take_arrays(self, {"q_offsets": "q_offsets", "kv_offsets": "kv_offsets"})
        if self.kv_offsets is self.q_offsets:
            object.__setattr__(self, "kv_offsets", None)
        reasons = flag_reasons("allow_gaps", self.allow_gaps)
        object.__setattr__(self, "allow_gaps", not reasons and bool(self.allow_gaps))
        reasons += self._offset_reasons()
        with collecting(reasons):
            object.__setattr__(self, "window", None if self.window is None else window_sides(self.window))
        if is_flag(self.causal):
            object.__setattr__(self, "causal", bool(self.causal))
        elif not (isinstance(self.causal, str) and self.causal in _ALIGNMENTS):
            reasons.append(f"causal must be True, False, 'bottom_right' or 'top_left'; got {describe(self.causal)}")
        reasons = reasons or self._pair_reasons()
        refuse(reasons)

    @classmethod
    def of(
        cls,
        q_lengths: Array,
        kv_lengths: Array | None = None,
        *,
        causal: bool | str = False,
        window: tuple[int | None, int | None] | None = None,
        allow_gaps: bool = False,
    ) -> Sequences:
        """Build the mask of sequences without gaps from their lengths.

        Parameters
        ----------
        q_lengths : list of ints, or int array [..., num_sequences]
            Number of queries of each sequence.
        kv_lengths : list of ints, or int array [..., num_sequences], optional
            Number of keys of each sequence. Default: `q_lengths`.
        causal, window, allow_gaps : optional
            As in `Sequences`; the only possible gap is after the last sequence.

        Raises
        ------
        UnsupportedProblem
            An argument breaks its rule.

        Examples
        --------
        >>> Sequences.of([2, 0, 3]).q_offsets
        array([0, 2, 2, 5])
        """
        reasons: list[str] = []
        offsets = []
        for name, lengths in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths)):
            with collecting(reasons):
                offsets.append(None if lengths is None and name == "kv_lengths" else _sums(name, lengths))
        refuse(reasons)
        return cls(*offsets, causal=causal, window=window, allow_gaps=allow_gaps)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The offsets of queries, and those of keys if they are a different array.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash import masks
        >>> masks.Sequences(np.array([0, 2, 5])).arrays
        (array([0, 2, 5]),)
        """
        return (self.q_offsets,) if self.kv_offsets is None else (self.q_offsets, self.kv_offsets)

    @property
    def _device_form(self) -> DeviceForm | None:
        return DeviceForm(self.arrays, (self.causal, self.window))

    def resolve(self, shape: MaskShape) -> Mask:
        broken = self._offset_reasons() or self._pair_reasons()  # contents may have changed since construction
        reasons = list(broken)
        kv_offsets = self.q_offsets if self.kv_offsets is None else self.kv_offsets
        ends = (
            ("q_offsets", self.q_offsets, "seqlen_q", shape.seqlen_q),
            ("kv_offsets", kv_offsets, "seqlen_kv", shape.seqlen_kv),
        )
        for name, offsets, which, length in ends:
            own = "q_offsets" if self.kv_offsets is None else name
            reasons += leading_reasons(own, tuple(offsets.shape[:-1]), shape.batch)
            missing = "; give kv_offsets= where keys have other lengths" if own != name else ""
            wrong_end = [] if broken else end_reasons(own, offsets, which, length, self.allow_gaps)
            reasons += [reason + missing for reason in wrong_end]
        refuse(dict.fromkeys(reasons))
        has_more = self.kv_offsets is not None and self._has_equal_offsets
        return ResolvedSequences(replace(self, kv_offsets=None) if has_more else self, shape)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        kv_offsets = self.q_offsets if self.kv_offsets is None else self.kv_offsets
        if self.q_offsets.ndim != 1 or kv_offsets.ndim != 1:
            raise UnsupportedProblem("Sequences with leading axes depends on the batch: call .resolve(shape) first")
        lo, hi = self._keys_of(i, as_int64(self.q_offsets), as_int64(kv_offsets))
        return (lo <= j) & (j < hi)

    def _keys_of(self, i: Array, q: Array, kv: Array) -> Intervals:
        """Return the intervals of keys that queries attend, from the offsets of one batch entry.

        Every bound is clipped to the keys of the query's sequence; otherwise bounds could decrease after a sequence
        with more queries than keys. Queries after all sequences get a lo beyond all keys, as in `ResolvedLengths`, so
        that no kernel visits them and they may hold NaN.

        Parameters
        ----------
        i : array of int
            Positions of queries.
        q : array of int [num_sequences + 1]
            Offsets of the sequences' queries.
        kv : array of int [num_sequences + 1]
            Offsets of the sequences' keys.

        Returns
        -------
        lo : array of int
            The first key that a query attends.
        hi : array of int
            One past the last key that it attends.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash import masks
        >>> offsets = np.array([0, 2, 5])
        >>> lo, hi = masks.Sequences(offsets)._keys_of(np.arange(5), offsets, offsets)
        >>> lo.tolist(), hi.tolist()
        ([0, 0, 2, 2, 2], [2, 2, 5, 5, 5])
        """
        xp, last = namespace(q), q.shape[-1] - 1
        after = xp.searchsorted(q, i, side="right")
        first, end = xp.clip(after - 1, 0, last), xp.clip(after, 0, last)
        lo, hi = start, stop = kv[first], kv[end]
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        diagonal = i + (kv[end] - q[end] if self.causal == "bottom_right" else kv[first] - q[first])
        if left is not None:
            lo = xp.clip(diagonal - clipped(left), start, stop)
        if right is not None:
            hi = xp.clip(diagonal + min(right, UNBOUNDED) + 1, start, stop)
        return xp.where(after > last, UNBOUNDED, lo), hi

    def _offset_reasons(self) -> list[str]:
        """Return the reasons why the offsets of queries, or those of keys, break their rules by themselves."""
        named = zip(("q_offsets", "kv_offsets"), self.arrays)
        return [reason for name, offsets in named for reason in offset_reasons(name, offsets, self.allow_gaps)]

    def _pair_reasons(self) -> list[str]:
        """Return the reasons why offsets of queries and keys do not fit together, if each by itself is valid."""
        if self.kv_offsets is None:
            return []
        if reasons := pair_reasons(self.q_offsets, self.kv_offsets):
            return reasons
        needs_equal = self.causal is True or (self.window is not None and not self.causal)
        if needs_equal and not self._has_equal_offsets:
            subject = "causal=True" if self.causal else f"window={describe(self.window)}"
            return [
                f"causal must be 'bottom_right', which aligns the last query of each sequence with its last key, or "
                f"'top_left', the first with the first, if kv_offsets may differ from q_offsets; got {subject}"
            ]
        return []

    @property
    def _has_shifted_diagonals(self) -> bool:
        """True if causal="bottom_right" may align the first query of a sequence with a key other than its first.

        Offsets on a device are not read; for them the value is True.

        Examples
        --------
        >>> from cuflash import masks
        >>> masks.Sequences.of([1, 2], [3, 2], causal="bottom_right")._has_shifted_diagonals
        True
        """
        if self.causal != "bottom_right" or self.kv_offsets is None:
            return False
        lengths = [offsets[..., 1:] - offsets[..., :-1] for offsets in self.arrays if namespace(offsets) is np]
        return len(lengths) < 2 or bool((lengths[0] != lengths[1]).any())

    @property
    def _has_equal_offsets(self) -> bool:
        """True if keys have the same offsets as queries; False for device offsets, which are not read."""
        if self.kv_offsets is None:
            return True
        return all(namespace(offsets) is np for offsets in self.arrays) and np.array_equal(*self.arrays)


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedSequences(BoundedRows):
    """The resolved form of `Sequences`."""

    source: Sequences
    shape: MaskShape

    @cached_property
    def bounds(self) -> tuple[LeadingArray, LeadingArray]:
        q, kv = as_int64(self.source.arrays[0]), as_int64(self.source.arrays[-1])
        xp, batch = namespace(q, kv), self.shape.batch
        leading = np.broadcast_shapes(q.shape[:-1], kv.shape[:-1])
        q, kv = (xp.broadcast_to(offsets, (*leading, offsets.shape[-1])) for offsets in (q, kv))
        rows = xp.arange(self.shape.seqlen_q)
        lo, hi = (xp.empty((*leading, self.shape.seqlen_q), dtype=np.int64) for _ in range(2))
        for entry in np.ndindex(leading):
            lo[entry], hi[entry] = self.source._keys_of(rows, q[entry], kv[entry])
        return LeadingArray.of(lo, batch, 1), LeadingArray.of(hi, batch, 1)

    @property
    def interval_form(self) -> IntervalForm:
        source = self.source
        left, right = source.window or (None, None)
        return IntervalForm(
            "sequences", source.q_offsets, source.kv_offsets, left, 0 if source.causal else right,
            source.causal == "bottom_right",
        )  # fmt: skip


def _sums(name: str, lengths: Array) -> Array:
    """Return the offsets of sequences from their lengths, int64 [..., num_sequences + 1], on the same device."""
    lengths = taken_array(name, lengths)
    if not (is_array(lengths) and lengths.ndim >= 1 and is_integer_dtype(lengths.dtype)):
        raise UnsupportedProblem(
            f"{name} must be a list of ints of at least 0, or an integer array (..., num_sequences); "
            f"got {describe(lengths)}"
        )
    xp = namespace(lengths)
    if xp is np and lengths.size and lengths.min() < 0:
        raise UnsupportedProblem(f"{name} must be at least 0; got {int(lengths.min())}")
    offsets = xp.zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), dtype=np.int64)
    offsets[..., 1:] = xp.cumsum(as_int64(lengths), axis=-1)
    return offsets
