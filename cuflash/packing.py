"""Packing of sequences of unequal lengths into one array, as `masks.Sequences` needs them, and unpacking."""

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
from .plans.conversion import as_arrays
from .scores.offsets import end_reasons, offset_reasons

_LAYOUTS = "axis=-2 packs (heads, length, dim), axis=-3 (length, heads, dim), axis=-1 (heads, length)"


@explains_keywords
def pack(arrays: Sequence[Array], axis: int = -2) -> tuple[Array, Array]:
    """Concatenate sequences into one array, without padding between them.

    Parameters
    ----------
    arrays : sequence of arrays [..., length, dim]
        One array for each sequence, at least one. They may differ only in length, and must be on the same device.
        Arrays of other libraries are accepted as in `attention`.
    axis : int
        The axis of the lengths: -2 for [..., heads, length, dim], -3 for [..., length, heads, dim], -1 for lse and dlse
        [..., length].

    Returns
    -------
    packed : array [..., sum of lengths, dim]
        A new array on the device of the sequences.
    offsets : int64 array [num_sequences + 1]
        Offsets of the sequences, on the same device: sequence n is packed[..., offsets[n] : offsets[n + 1], :].

    Raises
    ------
    TypeError
        A sequence is not an array.
    UnsupportedProblem
        There are no arrays, or their shapes, dtypes or devices do not match. The error lists every reason.

    Notes
    -----
    `attention` needs heads before lengths: pass ``packed.swapaxes(-3, -2)`` if the array was packed along axis -3.

    If all lengths are equal, the shapes do not show the layout: arrays [length, heads, dim] then match along axis -2,
    too, and the default axis would pack their heads. Pass ``axis=-3`` for such arrays.

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
    sequences = _as_sequences(arrays)
    refuse(_axis_reasons(axis, "arrays[0]", sequences[0]) or _mismatch_reasons(sequences, axis))
    xp = namespace(sequences[0])
    ends = np.cumsum([0, *(array.shape[axis] for array in sequences)], dtype=np.int64)
    return xp.concatenate(sequences, axis=axis), xp.asarray(ends)


@explains_keywords
def unpack(packed: Array, offsets: Array, axis: int = -2, *, allow_gaps: bool = False) -> list[Array]:
    """Split a packed array into views of its sequences.

    Parameters
    ----------
    packed : array [..., length, dim]
        A packed array, or the result of `attention` on packed arrays.
    offsets : list of ints, or int array [num_sequences + 1]
        Offsets as `pack` returns them, from 0 to the length. Offsets on a device are copied to the host, which waits
        for the device.
    axis : int
        The axis that was packed: -2 for [..., heads, length, dim], -3 for [..., length, heads, dim], -1 for lse and
        dlse [..., length].
    allow_gaps : bool
        True to allow a first offset above 0 and a last offset below the length. Rows that belong to no sequence are
        left out.

    Returns
    -------
    list of arrays [..., length of the sequence, dim]
        Views: writing to them changes `packed`.

    Raises
    ------
    TypeError
        `packed` or `offsets` is not an array.
    UnsupportedProblem
        The offsets decrease, leave gaps, or exceed the array. The error lists every reason.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> [part.tolist() for part in cuflash.unpack(np.arange(5), np.array([0, 2, 2, 5]), axis=-1)]
    [[0, 1], [], [2, 3, 4]]
    """
    offsets = of_list("offsets", offsets, np.int64)
    converted = as_arrays({"packed": packed, "offsets": offsets}, {"packed": np.float64})
    require_arrays(converted)
    packed, offsets = converted.values()
    reasons = _axis_reasons(axis, "packed", packed) + flag_reasons("allow_gaps", allow_gaps)
    if offsets.ndim != 1 or not offsets.size or not is_integer_dtype(offsets.dtype):
        reasons.append(f"offsets must be an integer array (num_sequences + 1,); got {describe(offsets)}")
    refuse(reasons)
    ends = to_host(offsets)
    refuse(offset_reasons("offsets", ends, allow_gaps) or _end_reasons(ends, packed, axis, allow_gaps))
    rest = (slice(None),) * (axis % packed.ndim)
    return [packed[(*rest, slice(start, stop))] for start, stop in pairwise(ends.tolist())]


def _as_sequences(arrays: Any) -> list[Array]:
    """Return the sequences as a list of arrays."""
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(f"arrays must be a list of arrays, one for each sequence; got {describe(arrays)}")
    if not arrays:
        raise UnsupportedProblem("arrays must hold at least one sequence, which may be empty; got none")
    named = {f"arrays[{n}]": array for n, array in enumerate(arrays)}
    converted = as_arrays(named, dict.fromkeys(named, np.float64))
    require_arrays(converted)
    return list(converted.values())


def _axis_reasons(axis: Any, name: str, array: Array) -> list[str]:
    """Return why `axis` is not an axis of an array."""
    if not is_int(axis):
        return [f"axis must be an int; got {describe(axis)}: {_LAYOUTS}"]
    if not -array.ndim <= axis < array.ndim:
        got = f"{describe(axis)}, {describe(array)}"
        return [f"axis must be an axis of {name}, which has {array.ndim}; got {got}: {_LAYOUTS}"]
    return []


def _mismatch_reasons(arrays: list[Array], axis: int) -> list[str]:
    """Return why arrays cannot be packed into one."""
    first, reasons = arrays[0], []
    others = [n for n in range(-first.ndim, 0) if n != axis and all(_match(array, first, n) for array in arrays)]
    fix = f": they match along axis={others[-1]}; {_LAYOUTS}" if others else ""
    for n, array in enumerate(arrays):
        if not _match(array, first, axis) or array.dtype != first.dtype:
            reasons.append(
                f"arrays[{n}] must have arrays[0]'s dtype, {first.dtype}, and its shape {tuple(first.shape)} except "
                f"along axis {axis}; got {describe(array)}{fix}"
            )
        if namespace(array) is not namespace(first):
            reasons.append(f"arrays[{n}] must be on the same device as arrays[0]: copy one of them")
    return reasons


def _match(array: Array, first: Array, axis: int) -> bool:
    """True if two arrays have equal shapes except along one axis."""
    axis %= first.ndim
    shapes = [(*x.shape[:axis], *x.shape[axis + 1 :]) for x in (array, first)]
    return array.ndim == first.ndim and shapes[0] == shapes[1]


def _end_reasons(ends: Array, packed: Array, axis: int, allow_gaps: bool) -> list[str]:
    """Return why offsets on the host do not end at the length of an axis of an array."""
    reasons = end_reasons("offsets", ends, f"packed.shape[{axis}]", int(packed.shape[axis]), allow_gaps)
    others = [other for other in range(-packed.ndim, 0) if packed.shape[other] == ends[-1]]
    return [f"{reason}; axis={others[-1]} ends there" if others else reason for reason in reasons]
