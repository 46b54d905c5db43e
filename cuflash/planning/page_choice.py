"""Kernels that choose pages of a KV cache for each query, by bounds of its scores from the key bounds of the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arrays import Array, accumulator_dtype
from .decoding import CacheLayout
from .launches import POINTER, Feature, Launch, Pass, Workspace, structure
from .list_kernels import AT_CALL
from .selection_kernels import CHOICE, STRIDED_ROWS, ChoiceRule, layout_of_rows, selection_spec
from .spec import KernelSpec

# This record mirrors `kernels_cu/lists/page_choice.cuh`.
_OF_CACHE = ("key_bounds", "table", "lengths")
PAGE_CHOICE = structure(
    (STRIDED_ROWS, "q"),
    (POINTER, *_OF_CACHE, "scores"),
    (CHOICE, "choice"),
    (np.float64, "scale"),
    (np.int32, "batch", "num_heads", "num_kv_heads", "heads_of_list", "num_queries", "num_columns"),
    (np.int32, "num_pages", "max_pages", "page_size", "capacity", "is_bottom_right", "padding"),
)
_SEARCH_BYTES = 24  # bytes of a warp's numbers in the search for the last chosen page


def page_choosing(
    q: Array, key_bounds: Array, layout: CacheLayout, rule: ChoiceRule, *, heads_of_list: int, is_bottom_right: bool,
    scale: float = 1.0, room: int = 48 << 10,
) -> Pass:  # fmt: skip
    """Return the launches that choose pages; they take the arrays q, key_bounds, table, lengths and lists.

    Parameters
    ----------
    q : array or Rows [batch, heads, queries, columns]
        Only the layouts of q and `key_bounds` are read.
    key_bounds : array or Rows [num_pages, kv_heads, 2, columns]
    layout : CacheLayout
        The layout of the cache.
    rule : ChoiceRule
        A rule for sequences as long as the capacity, with a `list_length` that is not 0.
    heads_of_list : int
        Query heads that share a list: 1, or the heads of a key/value head.
    is_bottom_right : bool
        The last query is at the last position of its sequence; otherwise the first one is at the first.
    scale : float
        A factor of q.
    room : int
        Bytes of shared memory of a thread block for the sort keys of a row; if they do not fit, they are recomputed.

    Returns
    -------
    Pass
        The lists are the array `AT_CALL`, int32 [batch, lists, queries, list_length].
    """
    batch, num_heads, num_queries, num_columns = q.shape
    kv_heads, num_lists = key_bounds.shape[1], num_heads // heads_of_list
    of_scores, of_choice = _specs(q.dtype)
    fixed = _SEARCH_BYTES * of_choice.num_warps
    keeps_places = fixed + 4 * layout.max_pages <= room
    numbers = {
        "q": layout_of_rows(q, q, (batch,))[1]["q"],
        "choice": rule.numbers((batch * num_lists, num_queries, layout.max_pages), keeps_places), "scale": scale,
        "batch": batch, "num_heads": num_heads, "num_kv_heads": kv_heads, "heads_of_list": heads_of_list,
        "num_queries": num_queries, "num_columns": num_columns, "is_bottom_right": is_bottom_right,
        **layout._asdict(),
    }  # fmt: skip
    names = {"q.data": "q", "choice.kept": AT_CALL}
    arrays = ("q", *_OF_CACHE, "scores", AT_CALL)
    name = "page_choice"
    launches = {
        "page_scores": Launch(
            spec=of_scores, tiles=batch * kv_heads * -(-layout.max_pages // of_scores.num_warps),
            reads=("q", *_OF_CACHE), writes=("scores",), features=(name,),
        ),
        name: Launch(
            spec=of_choice, tiles=batch * num_lists * num_queries, reads=("lengths", "scores"), writes=(AT_CALL,),
            features=(name,), row_bytes=fixed + 4 * layout.max_pages * keeps_places,
        ),
    }  # fmt: skip
    scores = Workspace((batch, num_lists, num_queries, layout.max_pages), accumulator_dtype(q.dtype))
    return Pass(launches, {"scores": scores}, (Feature(name, PAGE_CHOICE, numbers, arrays, names=names),))


def _specs(dtype: np.dtype[np.generic]) -> tuple[KernelSpec, KernelSpec]:
    """Return the kernels for q of a dtype: the one that computes scores, and the one that writes lists."""
    choosing = replace(selection_spec("page_choice", accumulator_dtype(dtype)), num_warps=8)
    return selection_spec("page_scores", dtype), choosing


def every_page_spec(dtypes: tuple[np.dtype[np.generic], ...]) -> set[KernelSpec]:
    """Return the specifications of the kernels for arrays of these dtypes."""
    return {spec for dtype in dtypes for spec in _specs(dtype)}
