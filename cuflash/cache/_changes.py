"""Changes of a cache other than new rows: each checks its arguments, and then changes the state."""

from __future__ import annotations


import numpy as np

from ..arrays import Array, describe, is_array, is_integer_dtype, to_host
from ..errors import UnsupportedProblem, collecting, refuse
from ..layouts import overlaps_itself
from ..plans.conversion import as_arrays
from ._state import CacheState
from .arguments import (
    Counts, dtype_of, growth_reasons, listed_ints, numbers, overlap_reasons, page_reasons, part_reasons, row_reasons,
    sequence_reasons, size_reasons,
)  # fmt: skip
from .on_device import capture_reasons
from .paged_rows import PagedRows
from .pages import PagePool, length_faults, sharing_reasons


def state_over(
    k_pages: Array, v_pages: Array, block_table: Array, lengths: Counts, part_keys: int | None
) -> CacheState:
    """Return the state of a cache over existing pages; parameters and errors are those of `KVCache.over`."""
    arrays, tables, positions, max_pages = _checked_pages(k_pages, v_pages, block_table, lengths)
    page_size, num_pages = int(arrays.k.shape[2]), int(arrays.k.shape[0])
    refuse(part_reasons(part_keys, max_pages * page_size))
    pages = PagePool(page_size, num_pages, tables, owns_rest=False)
    return CacheState(arrays, pages, positions, max_pages * page_size, part_keys)


def rows_of(state: CacheState, sequence: int) -> tuple[Array, Array]:
    """Return the keys and values of a sequence, as `KVCache.rows` does."""
    refuse(sequence_reasons("sequence", sequence, len(state.lengths)))
    length, table = state.lengths_now()[sequence], state.pages.tables[sequence]
    if faults := length_faults(state.pages, sequence, length, state.capacity):
        raise RuntimeError("the cache contradicts itself: " + "; ".join(faults))
    return state.rows.gather(table, 0, length)


def truncate(state: CacheState, lengths: Counts) -> None:
    """Shorten sequences, as `KVCache.truncate` does."""
    new_lengths = state.numbers("lengths", lengths)
    if state.is_counted_on_device:
        refuse(sharing_reasons(new_lengths, state.pages) if isinstance(new_lengths, list) else [])
        state.on_device().truncate(new_lengths)
        return
    assert isinstance(new_lengths, list)  # an array would have started counting on the device
    refuse(growth_reasons(new_lengths, state.lengths))
    state.lengths = new_lengths  # before pages are freed: an interrupted call leaves no rows without pages
    for sequence, length in enumerate(new_lengths):
        state.pages.shrink(sequence, length)


def reset(state: CacheState, rows: Counts | None) -> None:
    """Empty sequences, or all of them if `rows` is None, as `KVCache.reset` does."""
    batch = len(state.lengths)
    listed = listed_ints(range(batch) if rows is None else as_arrays({"rows": rows})["rows"])
    if listed is None:
        raise UnsupportedProblem(f"rows must be a list of sequences, or None for all; got {describe(rows)}")
    reasons = [reason for row in listed for reason in sequence_reasons("rows", row, batch)]
    reasons += capture_reasons("reset", state.pages) if state.is_counted_on_device else []
    refuse(reasons)
    for row in listed:
        state.lengths[row] = 0
        if state.device is not None and state.is_counted_on_device:
            state.device.lengths[row] = 0
        state.pages.shrink(row, 0)
    if state.is_counted_on_device:
        state.on_device()  # copy now, since a replayed graph copies nothing from the host


def fork(state: CacheState, source: int, target: int) -> None:
    """Replace the contents of a sequence by those of another one, as `KVCache.fork` does."""
    if state.is_counted_on_device:
        raise UnsupportedProblem(
            "fork must have lengths on the host; got a cache that is counted on the device: fill another cache"
        )
    batch = len(state.lengths)
    reasons = sequence_reasons("source", source, batch) + sequence_reasons("target", target, batch)
    if not reasons and source == target:
        reasons.append(f"target must differ from source; got {target}")
    if not reasons and not state.lengths[source]:
        fix = "use reset to empty the target"
        reasons.append(f"source must hold rows; got sequence {source}, which is empty: {fix}")
    refuse(reasons)
    state.require_no_capture()
    state.lengths[target] = 0  # until its rows are replaced
    for copy in state.pages.fork(source, target, state.lengths[source]):
        state.rows.copy(copy)
    state.lengths[target] = state.lengths[source]


def reserve(state: CacheState, lengths: Counts) -> None:
    """Allocate pages for sequences of these lengths, as `KVCache.reserve` does."""
    stops = numbers("lengths", as_arrays({"lengths": lengths})["lengths"], len(state.lengths))
    if state.is_counted_on_device and (reasons := capture_reasons("reserve", state.pages)):
        raise UnsupportedProblem(reasons)
    state.make_room("lengths", stops)
    if state.is_counted_on_device:
        state.on_device()  # copy now, since a replayed graph copies nothing from the host


def _checked_pages(
    k_pages: Array, v_pages: Array, block_table: Array, lengths: Counts
) -> tuple[PagedRows, list[list[int]], list[int], int]:
    """Return the arrays of pages, the pages and the length of each sequence, and the maximum number of pages.

    Raises
    ------
    TypeError
        The pages or the table are not arrays.
    UnsupportedProblem
        Shapes or dtypes do not match, or a sequence has fewer pages than its length needs; the error lists all reasons.
    """
    pages = as_arrays({"k_pages": k_pages, "v_pages": v_pages}, {"k_pages": np.float64, "v_pages": np.float64})
    k, v = pages.values()
    shape = ("num_pages", "num_kv_heads", "page_size", "head_dim")
    reasons = row_reasons({"k_pages": k}, k, {"k_pages": shape})
    refuse(reasons)
    reasons += row_reasons({"v_pages": v}, k, {"v_pages": (*k.shape[:3], "value_dim")})
    with collecting(reasons):
        dtype_of(k.dtype, has_scales=False)
    reasons += [
        f"{name} must not overlap itself in memory, since rows are written to it; got strides {each.strides}: pass a "
        "copy"
        for name, each in (("k_pages", k), ("v_pages", v))
        if overlaps_itself(each)
    ]
    reasons += overlap_reasons("v_pages", v, {"k_pages": k})  # keys and values are written separately
    page_size, num_pages = int(k.shape[2]), int(k.shape[0])
    reasons += page_reasons(page_size, num_pages) + size_reasons(head_dim=k.shape[3])
    integers = as_arrays({"block_table": block_table, "lengths": lengths}, {"block_table": np.int64}, like=k)
    table, lengths = integers.values()
    if not (is_array(table) and table.ndim == 2 and is_integer_dtype(table.dtype) and all(table.shape)):
        reasons.append(f"block_table must be an integer array (batch, max_pages); got {describe(table)}")
    positions: list[int] = []
    with collecting(reasons):
        batch = int(table.shape[0]) if is_array(table) and table.ndim else None
        positions = numbers("lengths", to_host(lengths) if is_array(lengths) else lengths, batch)
    refuse(reasons)
    tables, max_pages = [_until_negative(row) for row in to_host(table).tolist()], table.shape[1]
    refuse(_table_reasons(tables, positions, page_size, num_pages))
    return PagedRows(k, v), tables, positions, int(max_pages)


def _until_negative(row: list[int]) -> list[int]:
    stop = next((place for place, page in enumerate(row) if page < 0), len(row))
    return row[:stop]


def _table_reasons(tables: list[list[int]], lengths: list[int], page_size: int, num_pages: int) -> list[str]:
    """Return why the pages of sequences are invalid, or too few for the sequences' lengths."""
    reasons = []
    for sequence, (table, length) in enumerate(zip(tables, lengths)):
        wrong = [page for page in table if page >= num_pages]
        if wrong:
            reasons.append(
                f"block_table must name pages below {num_pages}; got {wrong[0]} for sequence {sequence}: mark missing "
                "pages with -1"
            )
        if length > len(table) * page_size:
            reasons.append(
                f"lengths must fit the pages of the sequences; got {length} for sequence {sequence}, which has "
                f"{len(table)} pages of {page_size}"
            )
    return reasons
