"""Score functions of the literature, each a few lines of NumPy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import reduce, wraps
from operator import matmul
from typing import Any, ParamSpec

import numpy as np

from ..arrays import (
    DTYPES, Array, ShapeDtype, describe, flag_reasons, is_array, is_flag, is_int, is_number, namespace, no_array,
    of_list, whole_number,
)  # fmt: skip
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from ..layouts import dtype_of, is_differentiated, is_tensor
from .score import UNALIGNED, Score
from .trace import key_shift, tanh_fast


_Parameters = ParamSpec("_Parameters")
_MOST = 1 << 30  # maximum number of tokens or heads


def _remade_by_name(make: Callable[_Parameters, Score]) -> Callable[_Parameters, Score]:
    """Decorate a function that returns a score, so that pickles of the score call the function again."""
    make = explains_keywords(make)

    @wraps(make)
    def wrapper(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> Score:
        return make(*arguments, **options)._remade_by(wrapper, *arguments, **options)

    return wrapper


@_remade_by_name
def softcap(cap: float, *, fast: bool = False) -> Score:
    """Return a score function that limits scores smoothly to the range from -cap to cap: cap tanh(s / cap).

    Parameters
    ----------
    cap : float
        Positive and finite. A different value does not recompile kernels. Calls refuse a value that is too large or too
        small for float32, or for float64 if q, k and v are float64.
    fast : bool
        Use the GPU's tanh instruction, whose error is at most 2^-10.9 times cap.

    Returns
    -------
    Score
        The score function.

    Raises
    ------
    UnsupportedProblem
        `cap` is not positive and finite.

    Notes
    -----
    Gemma 2, arXiv 2408.00118, section 2.

    Examples
    --------
    >>> float(softcap(30.0)(1e6, 0, 0, 0, 0))
    30.0
    """
    refuse(softcap_reasons(cap) + flag_reasons("fast", fast))
    number, tanh = float(cap), tanh_fast if fast else np.tanh

    def softcap(s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        return number * tanh(s / number)

    return Score(softcap)


def softcap_reasons(cap: Any) -> list[str]:
    """Return the reasons why a value cannot cap scores."""
    # Compare in float64: a comparison with a narrower NumPy float would round the largest float64 to infinity.
    wide = float(cap) if isinstance(cap, np.floating) else cap
    if is_number(wide) and 0 < wide <= sys.float_info.max:
        return []
    return [f"softcap must be a positive finite number; got {describe(cap)}"]


_ALIGNMENTS = (None, "bottom_right", "top_left")


def alignment_reasons(align: Any) -> list[str]:
    """Return the reasons why a value is not an alignment of positions."""
    if align is None or isinstance(align, str) and align in _ALIGNMENTS:
        return []
    return [f"align must be 'bottom_right', 'top_left' or None; got {describe(align)}"]


def _aligned(score: Score, align: str | None) -> Score:
    """Mark a score that depends on j - i and has no alignment, so that calls that need one refuse it."""
    if align is None:
        setattr(score.function, "facts", frozenset((UNALIGNED,)))
    return score


@_remade_by_name
def alibi(slopes: Array, *, align: str | None = None) -> Score:
    """Return a penalty proportional to the distance, with a slope per head: s - slopes[h] |i - j|.

    Parameters
    ----------
    slopes : array [num_heads]
        `alibi_slopes` returns those of the paper. The captured array is called "slopes" and may have a gradient.
    align : "bottom_right", "top_left" or None
        If the lengths differ, "bottom_right" gives the last query and the last key the distance 0, and "top_left" the
        first query and the first key. None means "top_left", but is refused together with a mask of unequal lengths
        that is aligned at the bottom right, such as ``causal="bottom_right"``.

    Returns
    -------
    Score
        The score function. If it is called directly on numbers or arrays, it assumes equal lengths.

    Raises
    ------
    TypeError, UnsupportedProblem
        `slopes` is not a 1-D array of reals, or `align` is not an alignment. Calls raise it if an alignment is
        required.

    Notes
    -----
    Press, Smith and Lewis, arXiv 2108.12409.

    Examples
    --------
    >>> import numpy as np
    >>> score = alibi(np.array([0.5, 0.25], np.float32))
    >>> score(np.zeros((2, 3)), 0, 1, np.arange(2)[:, None], np.arange(3))
    array([[ 0.  , -0.25, -0.5 ],
           [-0.25,  0.  , -0.25]])
    """
    slopes = of_list("slopes", slopes, np.float64)
    _require_axes("slopes", slopes, 1)
    refuse(alignment_reasons(align))
    if dtype_of(slopes) not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise UnsupportedProblem(f"slopes must be {known}; got {slopes.dtype}: cast them to float32")

    def alibi(s: Array, b: Array, h: Array, i: Array, j: Array, slopes: Array) -> Array:
        distance = i - j + key_shift(i) if align == "bottom_right" else i - j
        return s - slopes[h] * np.abs(distance)

    return _aligned(Score(alibi, slopes=slopes), align)


@explains_keywords
def alibi_slopes(num_heads: int) -> Array:
    """Return the slopes of ALiBi, float32 [num_heads]: 2^(-8 n / num_heads) for n = 1 to num_heads.

    If num_heads is not a power of two, the slopes for the next lower power of two are followed by every other slope for
    the next higher one.

    Parameters
    ----------
    num_heads : int
        Number of query heads.

    Returns
    -------
    float32 array [num_heads]
        The slopes.

    Raises
    ------
    UnsupportedProblem
        `num_heads` is not an int from 1 to 2**30.

    Examples
    --------
    >>> alibi_slopes(8)[:3]
    array([0.5  , 0.25 , 0.125], dtype=float32)
    """
    num_heads = _count("num_heads", num_heads)
    lower = 1 << (num_heads.bit_length() - 1)
    steps = np.arange(1, lower + 1) / lower
    between = (np.arange(1, 2 * lower + 1) / (2 * lower))[::2]
    return np.exp2(-8 * np.concatenate([steps, between[: num_heads - lower]])).astype(np.float32)


@_remade_by_name
def bias(array: Array) -> Score:
    """Return a score function that adds an array to the scores, as the argument ``bias=`` does.

    Parameters
    ----------
    array : real array that broadcasts against [*batch, num_heads, seqlen_q, seqlen_kv], or [seqlen_q, seqlen_kv]
        The captured array is called "bias": ``wrt="bias"`` returns its gradient, summed over broadcast axes.

    Returns
    -------
    Score
        The score function.

    Raises
    ------
    TypeError
        `array` is not an array.
    UnsupportedProblem
        The elements are not reals.

    Examples
    --------
    >>> import numpy as np
    >>> float(bias(np.array([[0.0, 1.0], [2.0, 3.0]], np.float32))(10.0, 0, 0, 1, 0))
    12.0
    """
    array = of_list("bias", array, np.float64)
    if not _has_axes(array):
        raise TypeError(no_array("bias", array))
    dtype = dtype_of(array)
    if dtype not in DTYPES:
        fix = "a bool array is a mask: write mask=bias" if dtype == np.bool else "cast it to float32"
        raise UnsupportedProblem(f"bias must be {', '.join(map(str, DTYPES))}; got {array.dtype}: {fix}")
    # An axis of length 1 is broadcast: it is always read at index 0.
    is_single = [extent == 1 for extent in array.shape[-3:]]
    num_leading = max(array.ndim - 3, 0)

    def bias(s: Array, b: Array, h: Array, i: Array, j: Array, bias: Array) -> Array:
        own = [0 if single else n for n, single in zip((h, i, j)[3 - len(is_single) :], is_single)]
        return s + (bias[..., *own] if num_leading else bias[*own] if own else bias)

    return Score._of_reserved(bias, bias=array)


@_remade_by_name
def relative_position(
    table: Array, max_distance: int = 128, *, bidirectional: bool, align: str | None = None
) -> Score:
    """Return a learnable bias per head and bucket of distances: s + table[h, bucket of j - i].

    Parameters
    ----------
    table : real array [num_heads, num_buckets]
        The learnable biases.
    max_distance : int
        Distances of at least this share the last bucket; at most 2^30.
    bidirectional : bool
        If True, half of the buckets are for keys after the query; else these keys share the bucket of distance 0.
    align : "bottom_right", "top_left" or None
        As in `alibi`.

    Returns
    -------
    Score
        The score function. If it is called directly on numbers or arrays, it assumes equal lengths.

    Raises
    ------
    TypeError
        `table` is not an array.
    UnsupportedProblem
        `table` has wrong axes or too few buckets, or another argument breaks its rule.

    Notes
    -----
    T5, arXiv 1910.10683, section 2.1: half of the buckets of a direction hold one distance each; the sizes of the
    others grow logarithmically. The bucket of each distance is computed once, in the captured integer array "bucket".

    Examples
    --------
    >>> import numpy as np
    >>> score = relative_position(np.arange(8, dtype=np.float32)[None], 16, bidirectional=False)
    >>> score(0.0, 0, 0, np.array([0, 1, 3, 5, 9, 99]), 0)
    array([0., 1., 3., 4., 6., 7.], dtype=float32)
    """
    table = of_list("table", table, np.float64)
    _require_axes("table", table, 2)
    reasons = flag_reasons("bidirectional", bidirectional) + alignment_reasons(align)
    num_buckets, least = int(table.shape[1]), 4 if is_flag(bidirectional) and bidirectional else 2
    with collecting(reasons):
        max_distance = _count("max_distance", max_distance)
    if num_buckets < least:
        reasons.append(f"table must have at least {least} buckets; got shape {tuple(table.shape)}")
    refuse(reasons)
    bucket = _buckets(num_buckets, max_distance, bidirectional)
    bucket = _beside(table, bucket)

    def relative_position(s: Array, b: Array, h: Array, i: Array, j: Array, table: Array, bucket: Array) -> Array:
        distance = j - i - key_shift(i) if align == "bottom_right" else j - i
        distance = np.clip(distance + max_distance, 0, 2 * max_distance)
        return s + table[h, np.clip(bucket[distance], 0, num_buckets - 1)]

    return _aligned(Score(relative_position, table=table, bucket=bucket), align)


def _beside(array: Array, numbers: Array) -> Array:
    """Convert numbers to the library and the device of an array, since all arrays of a call must be on one device."""
    if isinstance(array, ShapeDtype):
        return numbers
    if is_tensor(array):
        return array.new_tensor(numbers, dtype=sys.modules["torch"].int32, requires_grad=False)
    return namespace(array).asarray(numbers)


def _buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> Array:
    """Return T5's bucket of each relative position j - i from -max_distance to max_distance, int32."""
    relative = np.arange(-max_distance, max_distance + 1)
    size = num_buckets // 2 if bidirectional else num_buckets
    offset = np.where(relative > 0, size, 0) if bidirectional else 0
    distance = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
    exact = size // 2
    growth = np.log2(np.maximum(distance, 1) / exact) / math.log2(max(max_distance / exact, 1 + 1e-9))
    coarse = np.minimum(exact + (growth * (size - exact)).astype(np.int64), size - 1)
    return (offset + np.where(distance < exact, distance, coarse)).astype(np.int32)


@_remade_by_name
def relative_position_2d(table: Array, width: int) -> Score:
    """Return a learnable bias per head and offset in an image: s + table[h, row offset, column offset].

    Parameters
    ----------
    table : real array [num_heads, 2 height - 1, 2 width - 1]
        The learnable biases.
    width : int
        Width of the image; positions number its pixels in C order.

    Returns
    -------
    Score
        The score function.

    Raises
    ------
    TypeError
        `table` is not an array.
    UnsupportedProblem
        `width` is not an int of at least 1, or `table` has a wrong shape.

    Notes
    -----
    Swin, arXiv 2103.14030, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> table = np.arange(9, dtype=np.float32).reshape(1, 3, 3)      # offsets -1, 0 and 1 in both directions
    >>> relative_position_2d(table, 2)(0.0, 0, 0, 3, np.arange(4))   # pixel 3 of 2 x 2
    array([8., 7., 5., 4.], dtype=float32)
    """
    table = of_list("table", table, np.float64)
    _require_axes("table", table, 3)
    width = whole_number("width", width, 1)
    height = (int(table.shape[1]) + 1) // 2
    if tuple(table.shape[1:]) != (2 * height - 1, 2 * width - 1):
        raise UnsupportedProblem(
            f"table must have shape (num_heads, 2 height - 1, {2 * width - 1}); got {tuple(table.shape)}"
        )

    def relative_position_2d(s: Array, b: Array, h: Array, i: Array, j: Array, table: Array) -> Array:
        rows, columns = i // width - j // width, i % width - j % width
        return s + table[h, rows + (height - 1), columns + (width - 1)]

    return Score(relative_position_2d, table=table)


@_remade_by_name
def temperature(per_head: Array) -> Score:
    """Return a score function that multiplies the scores of each head by a factor: s per_head[h].

    Parameters
    ----------
    per_head : array [num_heads]
        The factors. The captured array is called "per_head" and may have a gradient.

    Returns
    -------
    Score
        The score function.

    Raises
    ------
    TypeError
        `per_head` is not an array.
    UnsupportedProblem
        `per_head` is not one-dimensional.

    Examples
    --------
    >>> import numpy as np
    >>> float(temperature(np.array([1.0, 0.5], np.float32))(3.0, 0, 1, 0, 0))
    1.5
    """
    per_head = of_list("per_head", per_head, np.float64)
    _require_axes("per_head", per_head, 1)

    def temperature(s: Array, b: Array, h: Array, i: Array, j: Array, per_head: Array) -> Array:
        return s * per_head[h]

    return Score(temperature, per_head=per_head)


def composed(score: Any, softcap_by: float | None, bias_by: Array) -> Score | None:
    """Compose `score=`, `softcap=` and `bias=` of a call: the cap is applied first, then the bias, then the score.

    Raises
    ------
    TypeError
        The score is not a function, or the bias is not an array.
    UnsupportedProblem
        An argument is not supported; the error lists all reasons.
    """
    reasons, parts = list[str](), list[Score]()
    if score is not None:
        with collecting(reasons):
            parts.append(score if isinstance(score, Score) else Score(score))
    if bias_by is not None:
        with collecting(reasons):
            parts.append(bias(bias_by))
    if softcap_by is not None:
        with collecting(reasons):
            parts.append(softcap(softcap_by))
    refuse(reasons)
    return reduce(matmul, parts) if parts else None


def _has_axes(array: Array) -> bool:
    """True if a value has a shape and a dtype: an array, a tensor, or a `ShapeDtype`."""
    return isinstance(array, ShapeDtype) or is_array(array) or is_differentiated(array)


def _count(name: str, value: Any) -> int:
    """Return a number of heads or tokens as an int.

    Raises
    ------
    UnsupportedProblem
        The value is not an int from 1 to 2**30.
    """
    if is_int(value) and 1 <= value <= _MOST:
        return int(value)
    raise UnsupportedProblem(f"{name} must be an int from 1 to 2**30; got {describe(value)}")


_FIXES_OF_NUMBERS = {
    "slopes": "pass scores.alibi_slopes({})",
    "per_head": "for the same number for all heads pass np.full(num_heads, {}, np.float32)",
    "table": "a table to learn may start as np.zeros((num_heads, {}), np.float32)",
}


def _require_axes(name: str, array: Array, rank: int) -> None:
    """Refuse a value that is not an array with this number of axes."""
    if is_number(array):
        number = "num_heads" if name == "slopes" and not is_int(array) else describe(array)
        fix = _FIXES_OF_NUMBERS[name].format(number)
        raise TypeError(f"{name} must be an array with numbers for each head; got {describe(array)}: {fix}")
    if not _has_axes(array):
        raise TypeError(no_array(name, array))
    if array.ndim != rank:
        raise UnsupportedProblem(f"{name} must have {rank} axes; got shape {tuple(array.shape)}")
