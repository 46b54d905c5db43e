"""Arrays of sequences of unequal lengths as one array, and back: what `masks.Sequences` needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .arrays import (
    Array, describe, flag_reasons, is_int, is_integer_dtype, namespace, of_list, require_arrays, to_host,
)  # fmt: skip
from .errors import UnsupportedProblem, refuse
from .keywords import explains_keywords
from .plans import as_arrays
from .scores.offsets import end_reasons, offset_reasons

_LAYOUTS = "axis=-2 packs (heads, length, dim), axis=-3 (length, heads, dim), axis=-1 (heads, length)"


@explains_keywords
def pack(arrays: Sequence[Array], axis: int = -2) -> tuple[Array, Array]:
    """Put sequences one after the other into one array, without padding between them.

    Parameters
    ----------
    arrays : sequence of arrays [..., length, dim]
        One for each sequence, at least one. They differ in their lengths alone, and lie in one place. Arrays of other
        libraries are taken as `attention` takes them.
    axis : int
        The axis of the lengths: -2 for [..., heads, length, dim], -3 for [..., length, heads, dim], -1 for lse and dlse
        [..., length].

    Returns
    -------
    packed : array [..., sum of lengths, dim]
        A new array, where the arrays are.
    offsets : int64 array [num_sequences + 1]
        Sequence n is packed[..., offsets[n] : offsets[n + 1], :]. It lies where the arrays do.

    Raises
    ------
    TypeError
        A sequence is not an array.
    UnsupportedProblem
        No arrays, or arrays that do not fit each other; all reasons at once.

    Notes
    -----
    `attention` takes heads before lengths: ``packed.swapaxes(-3, -2)`` of an array that was packed along axis -3.

    The layout cannot be told from the shapes if all lengths are equal: arrays [length, heads, dim] then fit along axis
    -2 too, which packs their heads. Pass ``axis=-3`` for them.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> x = [rng.standard_normal((4, length, 32), dtype=np.float32) for length in (5, 0, 9)]   # heads 4, head_dim 32
    >>> packed, offsets = cuflash.pack(x)
    >>> packed.shape, offsets
    ((4, 14, 32), array([ 0,  5,  5, 14]))
    >>> o = cuflash.attention(packed, packed, packed, mask=cuflash.masks.Sequences(offsets, causal=True))
    >>> [part.shape for part in cuflash.unpack(o, offsets)]
    [(4, 5, 32), (4, 0, 32), (4, 9, 32)]
    >>> cuflash.pack([part.swapaxes(0, 1) for part in x], axis=-3)[0].shape        # lengths before heads
    (14, 4, 32)
    """
    given = _given(arrays)
    refuse(_axis_reasons(axis, "arrays[0]", given[0]) or _unlike_reasons(given, axis))
    xp = namespace(given[0])
    ends = np.cumsum([0, *(array.shape[axis] for array in given)], dtype=np.int64)
    return xp.concatenate(given, axis=axis), xp.asarray(ends)


@explains_keywords
def unpack(packed: Array, offsets: Array, axis: int = -2, *, allow_gaps: bool = False) -> list[Array]:
    """The sequences of a packed array, as views of it.

    Parameters
    ----------
    packed : array [..., length, dim]
        Packed arrays, or results of `attention` on them.
    offsets : list of ints, or int array [num_sequences + 1]
        As `pack` returns them: from 0 to the length. Offsets on a device are copied to the host, which waits for the
        device.
    axis : int
        The axis that was packed: -2 for [..., heads, length, dim], -3 for [..., length, heads, dim], -1 for lse and
        dlse [..., length].
    allow_gaps : bool
        The first offset may be greater than 0, and the last less than the length: rows of no sequence are left out.

    Returns
    -------
    list of arrays [..., length of the sequence, dim]
        Views; writing to one writes to `packed`.

    Raises
    ------
    TypeError
        `packed` or `offsets` is not an array.
    UnsupportedProblem
        The offsets decrease, leave gaps, or reach beyond the array; all reasons at once.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> [part.tolist() for part in cuflash.unpack(np.arange(5), np.array([0, 2, 2, 5]), axis=-1)]
    [[0, 1], [], [2, 3, 4]]
    """
    offsets = of_list("offsets", offsets, np.int64)
    given = as_arrays({"packed": packed, "offsets": offsets}, {"packed": np.float64})
    require_arrays(given)
    packed, offsets = given.values()
    reasons = _axis_reasons(axis, "packed", packed) + flag_reasons("allow_gaps", allow_gaps)
    if offsets.ndim != 1 or not offsets.size or not is_integer_dtype(offsets.dtype):
        reasons.append(f"offsets must be an integer array (num_sequences + 1,); got {describe(offsets)}")
    refuse(reasons)
    ends = to_host(offsets)
    refuse(offset_reasons("offsets", ends, allow_gaps) or _end_reasons(ends, packed, axis, allow_gaps))
    rest = (slice(None),) * (axis % packed.ndim)
    return [packed[(*rest, slice(start, stop))] for start, stop in pairwise(ends.tolist())]


def _given(arrays: Any) -> list[Array]:
    """The sequences as a list of arrays."""
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(f"arrays must be a list of arrays, one for each sequence; got {describe(arrays)}")
    if not arrays:
        raise UnsupportedProblem(["arrays must hold at least one sequence, which may be empty; got none"])
    named = {f"arrays[{place}]": array for place, array in enumerate(arrays)}
    given = as_arrays(named, dict.fromkeys(named, np.float64))
    require_arrays(given)
    return list(given.values())


def _axis_reasons(axis: Any, name: str, array: Array) -> list[str]:
    """Why an axis is not one of an array's."""
    if not is_int(axis):
        return [f"axis must be an int; got {describe(axis)}: {_LAYOUTS}"]
    if not -array.ndim <= axis < array.ndim:
        got = f"{describe(axis)}, {describe(array)}"
        return [f"axis must be an axis of {name}, which has {array.ndim}; got {got}: {_LAYOUTS}"]
    return []


def _unlike_reasons(given: list[Array], axis: int) -> list[str]:
    """Why arrays cannot be packed into one."""
    first, reasons = given[0], []
    others = [other for other in range(-first.ndim, 0) if other != axis and all(_fit(x, first, other) for x in given)]
    fix = f": they fit along axis={others[-1]}; {_LAYOUTS}" if others else ""
    for place, array in enumerate(given):
        if not _fit(array, first, axis) or array.dtype != first.dtype:
            reasons.append(
                f"arrays[{place}] must be of arrays[0]'s dtype, {first.dtype}, and of its shape {tuple(first.shape)} "
                f"but for axis {axis}; got {describe(array)}{fix}"
            )
        if namespace(array) is not namespace(first):
            reasons.append(f"arrays[{place}] must be where arrays[0] is: copy either")
    return reasons


def _fit(array: Array, first: Array, axis: int) -> bool:
    """Return whether two arrays have equal shapes but for an axis."""
    axis %= first.ndim
    shapes = [(*x.shape[:axis], *x.shape[axis + 1 :]) for x in (array, first)]
    return array.ndim == first.ndim and shapes[0] == shapes[1]


def _end_reasons(ends: Array, packed: Array, axis: int, allow_gaps: bool) -> list[str]:
    """Why offsets on the host do not end with an axis of an array."""
    reasons = end_reasons("offsets", ends, f"packed.shape[{axis}]", int(packed.shape[axis]), allow_gaps)
    others = [other for other in range(-packed.ndim, 0) if packed.shape[other] == ends[-1]]
    return [f"{reason}; axis={others[-1]} ends there" if others else reason for reason in reasons]
