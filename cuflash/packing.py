"""Arrays of sequences of unequal lengths as one array, and back: what `masks.Sequences` needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .arrays import Array, as_int_array, describe, is_array, is_int, is_integer_dtype, namespace, no_array, to_host
from .errors import UnsupportedProblem
from .keywords import explains_keywords
from .plans import as_arrays


@explains_keywords
def pack(arrays: Sequence[Array], axis: int = -2) -> tuple[Array, Array]:
    """Put sequences one after the other into one array, without padding between them.

    Parameters
    ----------
    arrays : sequence of arrays [..., length, dim]
        One for each sequence, at least one. They differ in their lengths alone, and lie in one place. Arrays of other
        libraries are taken as `attention` takes them.
    axis : int
        The axis of the lengths: -2, or -1 for lse and dlse [..., length].

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
    """
    given = _given(arrays)
    reasons = _axis_reasons(axis) or _unlike_reasons(given, axis)
    if reasons:
        raise UnsupportedProblem(reasons)
    xp = namespace(given[0])
    ends = np.cumsum([0, *(array.shape[axis] for array in given)], dtype=np.int64)
    return xp.concatenate(given, axis=axis), xp.asarray(ends)


@explains_keywords
def unpack(packed: Array, offsets: Array, axis: int = -2) -> list[Array]:
    """The sequences of a packed array, as views of it.

    Parameters
    ----------
    packed : array [..., length, dim]
        Packed arrays, or results of `attention` on them.
    offsets : list of ints, or int array [num_sequences + 1]
        As `pack` returns them. Offsets on a device are copied to the host, which waits for the device.
    axis : int
        The axis that was packed: -2, or -1 for lse and dlse [..., length].

    Returns
    -------
    list of arrays [..., length of the sequence, dim]
        Views; writing to one writes to `packed`.

    Raises
    ------
    TypeError
        `packed` or `offsets` is not an array.
    UnsupportedProblem
        The offsets decrease, or reach beyond the array; all reasons at once.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> [part.tolist() for part in cuflash.unpack(np.arange(5), np.array([0, 2, 2, 5]), axis=-1)]
    [[0, 1], [], [2, 3, 4]]
    """
    given = as_arrays({"packed": packed, "offsets": as_int_array(offsets)})
    for name, array in given.items():
        if not is_array(array):
            raise TypeError(no_array(name, array))
    packed, offsets = given.values()
    reasons = _axis_reasons(axis)
    if not reasons and packed.ndim < -axis:
        reasons.append(f"packed must have at least {-axis} axes; got {describe(packed)}")
    if offsets.ndim != 1 or not offsets.size or not is_integer_dtype(offsets.dtype):
        reasons.append(f"offsets must be an integer array (num_sequences + 1,); got {describe(offsets)}")
    if reasons:
        raise UnsupportedProblem(reasons)
    ends, length = to_host(offsets).tolist(), packed.shape[axis]
    if ends[0] < 0 or ends[-1] > length or any(start > stop for start, stop in pairwise(ends)):
        raise UnsupportedProblem(
            [f"offsets must never decrease, from 0 or later to packed's length {length} or before; got {ends[:8]}"]
        )
    rest = (slice(None),) * (-axis - 1)
    return [packed[(..., slice(start, stop), *rest)] for start, stop in pairwise(ends)]


def _given(arrays: Any) -> list[Array]:
    """The sequences as a list of arrays."""
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(f"arrays must be a list of arrays, one for each sequence; got {describe(arrays)}")
    if not arrays:
        raise UnsupportedProblem(["arrays must hold at least one sequence, which may be empty; got none"])
    given = as_arrays({f"arrays[{place}]": array for place, array in enumerate(arrays)})
    for name, array in given.items():
        if not is_array(array):
            raise TypeError(no_array(name, array))
    return list(given.values())


def _axis_reasons(axis: Any) -> list[str]:
    return [] if is_int(axis) and axis in (-2, -1) else [f"axis must be -2 or -1; got {describe(axis)}"]


def _unlike_reasons(given: list[Array], axis: int) -> list[str]:
    """Why arrays cannot be packed into one."""
    first = given[0]
    if first.ndim < -axis:
        return [f"arrays[0] must have at least {-axis} axes; got {describe(first)}"]
    reasons = []
    for place, array in enumerate(given):
        others, wanted = list(array.shape), list(first.shape)
        if len(others) == len(wanted):
            del others[axis], wanted[axis]
        if others != wanted or array.dtype != first.dtype:
            reasons.append(
                f"arrays[{place}] must be of arrays[0]'s dtype, {first.dtype}, and of its shape {tuple(first.shape)} "
                f"but for axis {axis}; got {describe(array)}"
            )
        if namespace(array) is not namespace(first):
            reasons.append(f"arrays[{place}] must be where arrays[0] is: copy either")
    return reasons
