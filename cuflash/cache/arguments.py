"""Checks of a cache's arguments: sizes, counts, shapes and arrays, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import (
    DTYPES, SCALED_DTYPES, Array, as_dtype, describe, flag_reasons, int_reasons, is_array, is_int, is_integer_dtype,
    namespace, require_arrays, to_host,
)  # fmt: skip
from ..errors import UnsupportedProblem, collecting
from ..layouts import COPIES, device_number, kind_of, overlap, overlaps_itself
from ..planning.decoding import PART_STEP
from ..planning.families.sm80_storage import MOST_PARTS
from ..planning.operands import operands_of
from ..planning.problem import MAX_HEAD_DIM
from .pages import Growth, Shortage

Counts: TypeAlias = Sequence[int] | Array  # a number for each sequence, on the host or on the device

PAGE_SIZE = 64
_LARGEST_PAGE = 1024
_PAGE_STEP = 16


def size_reasons(**sizes: int) -> list[str]:
    """Return why numbers are not valid sizes of a cache."""
    most = {"head_dim": MAX_HEAD_DIM, "value_dim": MAX_HEAD_DIM}
    checked = (int_reasons(1, most.get(name, 2**31 - 1), **{name: size}) for name, size in sizes.items())
    return [reason for reasons in checked for reason in reasons]


def page_size_reasons(page_size: int | None, name: str = "page_size") -> list[str]:
    """Return why pages cannot have this size; `name` is the argument's name in messages."""
    if is_int(page_size) and 0 < page_size <= _LARGEST_PAGE and page_size % _PAGE_STEP == 0:
        return []
    return [f"{name} must be a multiple of {_PAGE_STEP}, at most {_LARGEST_PAGE}; got {describe(page_size)}"]


def page_reasons(page_size: int | None, num_pages: int | None) -> list[str]:
    """Return why a cache cannot have this number of pages of this size."""
    reasons = page_size_reasons(page_size)
    if num_pages is None:
        return [*reasons, "num_pages must be passed with page_size: batch * capacity / page_size pages hold everything"]
    return reasons + size_reasons(num_pages=num_pages)


def bound_reasons(keeps_page_bounds: bool, is_paged: bool, dtype: DTypeLike) -> list[str]:
    """Return why a cache of a dtype cannot keep the least and the greatest keys of its pages."""
    reasons = flag_reasons("keeps_page_bounds", keeps_page_bounds)
    if reasons or not keeps_page_bounds:
        return reasons
    if not is_paged:
        reasons.append("keeps_page_bounds must be False without pages; got True: pass page_size and num_pages")
    if dtype in SCALED_DTYPES:
        reasons.append(f"keeps_page_bounds must be False for keys with scales; got True for {dtype}")
    return reasons


def part_reasons(part_keys: int | None, capacity: int) -> list[str]:
    """Return why the keys of a cache cannot be split at multiples of this number of positions."""
    if part_keys is None:
        return []
    is_right = is_int(part_keys) and part_keys > 0 and part_keys % PART_STEP == 0
    if is_right and not (is_int(capacity) and capacity > MOST_PARTS * part_keys):
        return []
    return [
        f"part_keys must be a multiple of {PART_STEP} that splits the capacity into at most {MOST_PARTS} parts; "
        f"got {describe(part_keys)}"
    ]


def dtype_of(dtype: DTypeLike, *, has_scales: bool = True) -> np.dtype[np.generic]:
    """Return the dtype of a cache; it may need scales only if the cache allocates its own arrays.

    Raises
    ------
    UnsupportedProblem
        Attention does not support the dtype.
    """
    known_dtype = as_dtype("dtype", dtype)
    if known_dtype in SCALED_DTYPES and not has_scales:
        raise UnsupportedProblem(
            "dtype must be that of pages without scales; got float8_e4m3fn: only KVCache(dtype=...) makes such pages"
        )
    supported = (*DTYPES, *SCALED_DTYPES)
    if known_dtype not in supported:
        names = ", ".join(each.name for each in supported)
        raise UnsupportedProblem(f"dtype must be one of {names}; got {known_dtype}")
    return known_dtype


def numbers(name: str, value: Counts, batch: int | None) -> list[int]:
    """Return one int >= 0 per sequence, from a list or a host array, whose length may be any if `batch` is None.

    Raises
    ------
    UnsupportedProblem
        The value is not such a list or array.
    """
    listed = listed_ints(value)
    batch = batch if batch is not None or listed is None else len(listed)
    if listed is None or len(listed) != batch or not all(is_int(each) and 0 <= each < 2**31 for each in listed):
        got = value if listed is None else listed
        raise UnsupportedProblem(
            f"{name} must be a list or array of{'' if batch is None else f' {batch}'} ints of at least 0, one for "
            f"each sequence, on the host, since rows are counted there; got {describe(got)}"
        )
    return [int(each) for each in listed]


def listed_ints(value: Counts) -> list[int] | None:
    """Return the items of a list, tuple, range or 1-d NumPy integer array, or None for anything else."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 and is_integer_dtype(value.dtype) else None
    return list(value) if isinstance(value, (list, tuple, range)) else None


def sequence_reasons(name: str, value: int, batch: int) -> list[str]:
    """Return why a value is not the number of a sequence of a cache."""
    if is_int(value) and 0 <= value < batch:
        return []
    return [f"{name} must be a sequence's number, from 0 to {batch - 1}; got {describe(value)}"]


def row_reasons(
    arrays: Mapping[str, Array],
    like: Array,
    wanted: Mapping[str, tuple[int | str, ...]],
    dtypes: Sequence[np.dtype[np.generic]] = (),
) -> list[str]:
    """Return why arrays do not fit a cache whose arrays are like `like`; a string in `wanted` stands for any extent.

    The dtype of the arrays must be in `dtypes`; by default it must be the dtype of `like`.

    Raises
    ------
    TypeError
        An argument is not an array.
    """
    reasons = []
    require_arrays(arrays)
    for name, array in arrays.items():
        dtypes = dtypes or (like.dtype,)
        shape, expected = tuple(array.shape), wanted[name]
        pairs = zip(shape, expected)
        fits = len(shape) == len(expected) and all(isinstance(want, str) or have == want for have, want in pairs)
        if not fits or array.dtype not in dtypes:
            written, known = ", ".join(map(str, expected)), " or ".join(map(str, dtypes))
            fix = f": cast it to {dtypes[0].name}" if fits else ""
            reasons.append(f"{name} must have shape ({written}) and dtype {known}; got {shape} and {array.dtype}{fix}")
        reasons += place_reasons(name, array, like)
    return reasons


def place_reasons(name: str, array: Array, like: Array) -> list[str]:
    """Return why an array is not in the library and on the device of a cache's array."""
    if namespace(array) is not namespace(like):
        home = namespace(like).__name__
        return [f"{name} must be a {home} array, as the cache's are; got {kind_of(array)}: copy it with {COPIES[home]}"]
    if device_number(array) != device_number(like):
        return [
            f"{name} must be on the cache's device, {device_number(like)}; got device {device_number(array)}: "
            f"copy it there"
        ]
    return []


def out_reasons(out: Array | None, shape: tuple[int, ...], like: Array, inputs: Mapping[str, Array]) -> list[str]:
    """Return why results cannot be written to an array."""
    if out is None:
        return []
    if not is_array(out) or namespace(out) is not namespace(like):
        home = namespace(like).__name__
        return [f"out must be a {home} array of shape {shape} and dtype {like.dtype}; got {describe(out)}"]
    reasons = []
    if tuple(out.shape) != shape or out.dtype != like.dtype:
        reasons.append(f"out must have shape {shape} and dtype {like.dtype}; got {tuple(out.shape)} and {out.dtype}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        reasons.append("out must be writeable; got a read-only array")
    if overlaps_itself(out):
        came = f"got strides {out.strides}: pass a separate array"
        reasons.append(f"out must not overlap itself in memory, as broadcast views do; {came}")
    return reasons + overlap_reasons("out", out, inputs)


def overlap_reasons(name: str, array: Array, others: Mapping[str, Array]) -> list[str]:
    """Return why an array overlaps others in memory."""
    return [
        f"{name} must not overlap {other} in memory: pass a copy"
        for other, value in others.items()
        if namespace(value) is namespace(array) and overlap(array, value)
    ]


def sink_reasons(sink: Array | None, q: Array, like: Array) -> list[str]:
    """Return why a sink does not fit queries [batch, num_heads, n, head_dim] and a cache with arrays like this one.

    Raises
    ------
    TypeError
        The sink is not an array.
    """
    if sink is None:
        return []
    reasons: list[str] = []
    with collecting(reasons):
        operands_of({"sink": sink}, (int(q.shape[0]), int(q.shape[1])))
    require_arrays({"sink": sink})  # operands_of also accepts a shape with a dtype
    return reasons + place_reasons("sink", sink, like)


def excess_reasons(counts: list[int], num_rows: int) -> list[str]:
    """Return why counts are refused: a sequence would get more rows than there are."""
    return [
        f"counts must be at most the number of rows, {num_rows}; got {new} for sequence {sequence}"
        for sequence, new in enumerate(counts)
        if new > num_rows
    ]


def growth_reasons(new_lengths: list[int], lengths: list[int]) -> list[str]:
    """Return why sequences cannot be truncated: a sequence is already shorter."""
    return [
        f"lengths must not exceed those of the sequences; got {new} for sequence {sequence}, which has {length}"
        for sequence, (new, length) in enumerate(zip(new_lengths, lengths))
        if new > length
    ]


def require_appended(news: Counts, lengths: list[int], *, has_counts: bool) -> None:
    """Refuse queries whose keys were not appended: a sequence has more queries than tokens.

    Parameters
    ----------
    news : list of int, or array on a device
        The number of rows of q that belong to each sequence.
    lengths : list of int
        The number of tokens of each sequence.
    has_counts : bool
        True if the caller passed `counts`; then the message names it.

    Raises
    ------
    UnsupportedProblem
        A sequence has more queries than tokens.
    """
    new_counts = news if isinstance(news, list) else to_host(news).tolist()
    short = [sequence for sequence, (new, length) in enumerate(zip(new_counts, lengths)) if new > length]
    if not short:
        return
    first = short[0]
    name, of_whom = ("counts", f" for sequence {first}") if has_counts else ("q", "")
    pairs = ((new_counts[first], "row"), (lengths[first], "token"))
    rows, tokens = (f"{n} {word}{'s' * (n != 1)}" for n, word in pairs)
    got = f"{name} has {rows}{of_whom} and sequence {first} has {tokens}"
    if len(short) > 1:
        got += f", and {len(short) - 1} more of {len(lengths)} sequences have too few"
    fix = "append their keys and values first"
    if not has_counts and len(short) < len(lengths) and not lengths[first]:
        fix += ", or pass counts= with 0 for idle sequences"
    raise UnsupportedProblem(f"{name} must not have more rows than a sequence has tokens; {got}: {fix}")


def shown_numbers(values: list[int]) -> str:
    """Return numbers per sequence as text for a repr; the middle is left out if there are many."""
    return np.array2string(np.array(values), separator=", ", threshold=16, edgeitems=4, max_line_width=10**6)


def capacity_reason(name: str, growth: Growth, capacity: int) -> str:
    """Return why a sequence cannot grow this far."""
    return (
        f"{name} must fit the room of sequence {growth.sequence}; got {growth.stop - growth.length} rows, which need "
        f"{growth.stop} positions, and the cache has {capacity}: truncate or reset the sequence, or create the "
        f"cache with a larger capacity"
    )


def shortage_reason(name: str, shortage: Shortage, num_pages: int) -> str:
    """Return why there are not enough pages for a sequence to grow."""
    sequence, length, stop = shortage.growth
    more = f"{shortage.wanted} more page{'s' * (shortage.wanted > 1)}"
    return (
        f"{name} must fit the free pages; got {stop - length} rows for sequence {sequence}, which need {more}, but of "
        f"{num_pages} pages {shortage.free} are free: truncate or reset sequences, or create the cache with more pages"
    )


def not_served(q: Array, kernel: str, sink: Array | None) -> str:
    """Return the reason to refuse a call that no kernel supports on a cache that is counted on the device."""
    return (
        "q must be supported by the cache's kernels if the cache is counted on the device: float16 or bfloat16, "
        f"head_dim and value_dim multiples of 8, kernel 'auto', 'sm80' or 'sm90', and no sink or a 1-d one; got "
        f"{q.shape} of {q.dtype}, kernel {describe(kernel)}, sink {describe(sink)}"
    )
