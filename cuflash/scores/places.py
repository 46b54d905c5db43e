"""Score functions at positions that differ from those of a call: within a packed sequence, or in a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays import Array, describe, flag_reasons, is_int, namespace, of_list
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from ..layouts import is_foreign, is_on_cuda, is_tracer, taken, taken_on_cuda
from .library import alignment_reasons
from .offsets import end_reasons, offset_reasons, pair_reasons
from .score import MAX_ARRAYS, RESTARTED, UNALIGNED, Score
from .trace import shifted_by


_STARTS = ("q_starts", "kv_starts", "q_shifts")
_FARTHEST = 1 << 30  # the largest sequence length
_PLACE = "place"


@explains_keywords
def within(
    score: Score | Callable[..., Array],
    q_offsets: Array,
    kv_offsets: Array | None = None,
    *,
    seqlen_q: int | None = None,
    seqlen_kv: int | None = None,
    allow_gaps: bool = False,
    align: str | None = None,
) -> Score:
    """Return a score function whose positions start at 0 in each packed sequence.

    Parameters
    ----------
    score : Score, or callable (s, b, h, i, j)
        Called with i - q_offsets[n] and j - kv_offsets[n] instead of i and j, where n is the sequence of the query and
        of the key, respectively. With align="bottom_right", (keys - queries) of the sequence is added to the position
        of the query; it is negative for queries before the first key.
    q_offsets : list of ints, or int array [..., num_sequences + 1]
        Offsets with the rules of `masks.Sequences`. Use a mask with the same offsets in the call.
    kv_offsets : list of ints, or int array [..., num_sequences + 1], optional
        The offsets of the keys. Default: `q_offsets`.
    seqlen_q, seqlen_kv : int, optional
        Lengths of q and k. Default: the last offsets. Required for offsets on a device, which are not inspected; for
        them seqlen_kv is seqlen_q by default.
    allow_gaps : bool
        As in `masks.Sequences`. Rows after the last offset require seqlen_q, and seqlen_kv if it differs.
    align : "bottom_right", "top_left" or None
        "bottom_right" gives the last query of each sequence the position of its last key. "top_left" gives the first
        query and the first key position 0. None uses the alignment of the score within each sequence, if it has one,
        and otherwise "top_left".

    Returns
    -------
    Score
        The score function, with captured int32 arrays on the device of the offsets: "q_starts", "kv_starts", and, with
        kv_offsets and an alignment at the bottom right, "q_shifts". Different offsets do not recompile kernels. The
        arrays are computed at once: later changes of the offsets affect a mask that holds them, but not this function.

    Raises
    ------
    TypeError
        `score` is not a function.
    UnsupportedProblem
        An argument breaks its rule; the error lists all reasons.

    Notes
    -----
    The results for a packed sequence and for a call with only that sequence agree within their error bounds. The
    position of a query that attends no key is unspecified.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash import masks, scores
    >>> offsets = [0, 4, 10]
    >>> q = k = v = np.random.default_rng(0).standard_normal((2, 10, 8), np.float32)
    >>> slopes = scores.alibi(scores.alibi_slopes(2))
    >>> packed = cuflash.attention(q, k, v, mask=masks.Sequences(offsets), score=scores.within(slopes, offsets))
    >>> alone = cuflash.attention(q[:, 4:], k[:, 4:], v[:, 4:], score=slopes)
    >>> bool(np.allclose(packed[:, 4:], alone, atol=1e-6))
    True
    """
    score = score if isinstance(score, Score) else Score(score)
    is_aligned = score.program.shift_slot is not None
    reasons = flag_reasons("allow_gaps", allow_gaps)
    allow_gaps = not reasons and bool(allow_gaps)
    reasons += alignment_reasons(align)
    if is_aligned and align is not None:
        reasons.append(f"align must be None for a score that has its own alignment; got {describe(align)}")
    reasons += [
        f"score must not have an array named {name}, which is the name of an array of within: rename it"
        for name in _STARTS
        if name in score.arrays
    ]
    is_shared, is_one_length = kv_offsets is None, kv_offsets is None and seqlen_kv is None
    named = {"q_offsets": q_offsets} if is_shared else {"q_offsets": q_offsets, "kv_offsets": kv_offsets}
    held = {name: _taken_array(name, offsets) for name, offsets in named.items()}
    starts: dict[str, Array] = {}
    of_keys = "q_offsets" if is_shared else "kv_offsets"
    of_rows = ("seqlen_q", seqlen_q) if is_one_length else ("seqlen_kv", seqlen_kv)
    with collecting(reasons):
        starts["q_starts"] = _starts("q_offsets", held["q_offsets"], "seqlen_q", seqlen_q, allow_gaps)
    with collecting(reasons):
        starts["kv_starts"] = _starts(of_keys, held[of_keys], *of_rows, allow_gaps)
    if not reasons and not is_shared:
        reasons += pair_reasons(*held.values())
    refuse(dict.fromkeys(reasons))

    if not is_shared and (is_aligned or align == "bottom_right"):
        starts["q_shifts"] = _shifts(held["q_offsets"], held["kv_offsets"], starts["q_starts"].shape[-1])

    def restarted(
        s: Array, b: Array, h: Array, i: Array, j: Array, q_starts: Array, kv_starts: Array, **arrays: Array
    ) -> Array:
        q_shifts = arrays.pop("q_shifts", None)
        query, key = _behind(i, q_starts[..., i]), _behind(j, kv_starts[..., j])
        shift = 0 if q_shifts is None else np.clip(q_shifts[..., i], -_FARTHEST, _FARTHEST)
        if is_aligned:
            with shifted_by(shift):
                return score.function(s, b, h, query, key, **arrays)
        return score.function(s, b, h, query + shift, key, **arrays)

    restarted.__name__ = f"within of {score.name}"
    setattr(restarted, "facts", (score.facts if align is None else score.facts - {UNALIGNED}) | {RESTARTED})
    traced = Score._of_reserved(restarted, **score.arrays, **starts)
    own = [offsets.copy() for offsets in held.values()]  # pickles contain the current offsets
    options = {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "allow_gaps": allow_gaps, "align": align}
    return traced._remade_by(within, score, *own, **options)


def _taken_array(name: str, value: Array) -> Array:
    """Convert a list of ints, or an array of another library, to NumPy or CuPy; return other values unchanged.

    Raises
    ------
    UnsupportedProblem
        An array of another library cannot be converted, or nested lists have unequal lengths.
    """
    offsets = of_list(name, value, np.int64)
    if is_tracer(offsets):
        fix = "close over the offsets, or name them in static_argnames of jax.jit"
        raise UnsupportedProblem(f"{name} must be known when JAX traces the call; got a tracer: {fix}")
    if is_foreign(offsets):
        return taken_on_cuda(name, offsets) if is_on_cuda(name, offsets) else taken(name, offsets, np)
    return offsets


def _behind(position: Array, start: Array) -> Array:
    """Return the distance of a position from a start, or 0 if it is before the start.

    This proves that the result is a valid index of a captured array: at least 0 and less than the length.
    """
    return np.maximum(position - np.maximum(start, 0), 0)


def _starts(name: str, offsets: Array, of_length: str, length: Any, allow_gaps: bool) -> Array:
    """Return for each row the first row of its sequence, int32 [..., rows].

    Raises
    ------
    UnsupportedProblem
        The offsets or the number of rows break their rule; the error lists all reasons.
    """
    xp, reasons = namespace(offsets), offset_reasons(name, offsets, allow_gaps)
    least = int(offsets[..., -1].max(initial=0)) if xp is np and not reasons else 0
    if length is None and xp is not np:
        reasons.append(f"{of_length} is required for {name} on a device, which are not inspected; got None")
    elif length is not None and not (is_int(length) and least <= length < 2**31):
        reasons.append(f"{of_length} must be an int of at least {least}, the last of {name}; got {describe(length)}")
    elif length is None and least >= 2**31:
        reasons.append(f"{name} must be below 2**31; got {least}")
    elif not reasons:
        reasons += end_reasons(name, offsets, of_length, least if length is None else int(length), allow_gaps)
    refuse(reasons)
    rows = xp.arange(least if length is None else int(length))
    starts = xp.zeros((*offsets.shape[:-1], len(rows)), np.int32)
    for entry in np.ndindex(offsets.shape[:-1]):
        of_entry = offsets[entry].astype(np.int64)
        starts[entry] = of_entry[xp.maximum(xp.searchsorted(of_entry, rows, side="right") - 1, 0)]
    return starts


def _shifts(q_offsets: Array, kv_offsets: Array, rows: int) -> Array:
    """Return for each query its sequence's number of keys minus queries, int32 [..., rows]; 0 without sequences."""
    xp = namespace(q_offsets)
    leading = np.broadcast_shapes(q_offsets.shape[:-1], kv_offsets.shape[:-1])
    shifts, last = xp.zeros((*leading, rows), np.int32), q_offsets.shape[-1] - 2
    if last < 0:
        return shifts
    ends = (*leading, last + 2)
    q, kv = (xp.broadcast_to(offsets, ends).astype(np.int64) for offsets in (q_offsets, kv_offsets))
    for entry in np.ndindex(leading):
        more = (kv[entry][1:] - kv[entry][:-1]) - (q[entry][1:] - q[entry][:-1])
        shifts[entry] = more[xp.clip(xp.searchsorted(q[entry], xp.arange(rows), side="right") - 1, 0, last)]
    return shifts


def in_cache(score: Score, batch: int, capacity: int) -> Score:
    """Return a score function for a call on the rows of one sequence of a cache, without the batch axis.

    Its captured arrays are those of `score`, with the names of `names_in_cache`, and an int32 array "place" of three
    elements: the sequence, and the positions of the first query and of the first key of the call.
    """
    names = names_in_cache(score)

    def in_cache(s: Array, b: Array, h: Array, i: Array, j: Array, place: Array, **arrays: Array) -> Array:
        sequence = np.clip(place[0], 0, batch - 1)
        query, key = (np.clip(x + np.clip(place[n], 0, capacity), 0, capacity - 1) for n, x in ((1, i), (2, j)))
        captured = {name: _OfSequence(arrays[own], sequence, score.arrays[name].shape) for name, own in names.items()}
        with shifted_by(0):  # query and key positions in a cache both count from the start of the sequence
            return score.function(s, sequence, h, query, key, **captured)

    in_cache.__name__ = score.name
    arrays = {own: score.arrays[name] for name, own in names.items()}
    cached = Score.__new__(Score)
    cached._make(in_cache, {**arrays, _PLACE: np.zeros(3, np.int32)}, [], MAX_ARRAYS + 1)
    return cached


def names_in_cache(score: Score) -> Mapping[str, str]:
    """Return the names of a score's captured arrays in `in_cache`, which cannot equal those of a call's arguments."""
    return {name: f"cached_{name}" for name in score.arrays}


class _OfSequence:
    """A captured array that replaces `...` at the start of an index by the number of one sequence."""

    def __init__(self, array: Array, sequence: Array, shape: tuple[int, ...]) -> None:
        self._array, self._sequence, self._shape, self.ndim = array, sequence, shape, len(shape)

    def __getitem__(self, index: Array) -> Array:
        indices = index if isinstance(index, tuple) else (index,)
        if not indices or indices[0] is not Ellipsis:
            return self._array[indices]
        leading = self._shape[: self.ndim - len(indices) + 1]
        return self._array[(*(0 if extent == 1 else self._sequence for extent in leading), *indices[1:])]
