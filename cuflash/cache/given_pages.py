"""Pages, a page table and lengths from the caller, checked before a cache uses them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import describe, is_array, is_integer_dtype, to_host
from ..errors import collecting, refuse
from ..layouts import is_broadcast
from ..plans.conversion import as_arrays
from .arguments import dtype_of, numbers, overlap_reasons, page_reasons, row_reasons, size_reasons
from .paged_rows import PagedRows


def checked_pages(
    k_pages: Any, v_pages: Any, block_table: Any, lengths: Any
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
        f"{name} must not be a broadcast view, since rows are written to it; got strides {each.strides}: pass a copy"
        for name, each in (("k_pages", k), ("v_pages", v))
        if is_broadcast(each)
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
