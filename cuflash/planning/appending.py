"""Plans of the kernel that appends rows to a KV cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .decoding import CACHE_PAGES, OF_CACHE, SCALE_NAMES, TABLES, CacheLayout, scale_features
from .launches import MATRICES, POINTER, Feature, Launch, Pass, Workspace, structure
from .spec import SIMT, Entry, KernelSpec, smallest

APPEND = structure(
    (MATRICES, "k", "v"),
    (CACHE_PAGES, "cache"),
    (POINTER, "arrivals"),
    (np.int32, "num_rows", "blocks_per_sequence"),
)
KEY_BOUNDS = structure((POINTER, "key_bounds"), (np.int32, "pages_per_sequence", "padding"))
_KEY_BOUNDS = Entry(family="cache", name="key_bounds", runs_as=SIMT)
_APPEND = Entry(family="cache", name="append", runs_as=SIMT)
_APPEND_E4M3 = Entry(family="cache", name="append_e4m3", runs_as=SIMT)
_WARPS = 8
_WARPS_OF_ROWS = 16  # warps per thread block of the kernel for FP8; each rounds one row of a head at a time
_ROWS_OF_A_WARP = 2
_BYTES_OF_A_THREAD = 64  # bytes of keys or values per thread
_MOST_BLOCKS = 256  # maximum number of thread blocks per sequence


def append_pass(
    k_shape: tuple[int, ...],
    value_dim: int,
    dtype: np.dtype[np.generic],
    layout: CacheLayout,
    *,
    is_quantized: bool = False,
    keeps_bounds: bool = False,
) -> Pass:
    """Return the launches that append keys and values to a cache, whose pages are the arrays cache_k and cache_v.

    Parameters
    ----------
    k_shape : tuple of int
        [batch, num_kv_heads, new rows, head_dim]
    dtype : dtype
        Dtype of the new rows.
    is_quantized : bool
        The kernel rounds the rows to FP8, the dtype of the cache.
    keeps_bounds : bool
        Another kernel first updates key_bounds, the elementwise minimum and maximum of the keys in each page.
    """
    batch, heads, rows, head_dim = k_shape
    work, of_block = rows * heads * max(head_dim, value_dim) * dtype.itemsize, 32 * _WARPS * _BYTES_OF_A_THREAD
    if is_quantized:
        work, of_block = 2 * rows * heads, _WARPS_OF_ROWS * _ROWS_OF_A_WARP
    blocks = max(1, min(_MOST_BLOCKS, work // of_block))
    workspaces = {"arrivals": Workspace((batch,), np.dtype(np.int32), is_zeroed=True)}
    scales = scale_features(is_quantized)
    launch = Launch(
        spec=append_spec(dtype, is_quantized=is_quantized), tiles=batch * blocks,
        reads=("k", "v", "table", "counts", "lengths"),
        writes=("cache_k", "cache_v", *SCALE_NAMES * is_quantized, "lengths", "num_faults", *workspaces),
        features=("append", *(each.name for each in scales)),
    )  # fmt: skip
    cache = layout.numbers(batch, heads, (head_dim, value_dim))
    append = Feature(
        "append", APPEND, {"cache": cache, "num_rows": rows, "blocks_per_sequence": blocks}, (*TABLES, *workspaces),
        names=OF_CACHE | {"cache.k": "cache_k", "cache.v": "cache_v"},
    )  # fmt: skip
    kernels = Pass({"append": launch}, workspaces, (append, *scales))
    if not keeps_bounds:
        return kernels
    pages = (rows + layout.page_size - 2) // layout.page_size + 1
    bounds = Feature("key_bounds", KEY_BOUNDS, {"pages_per_sequence": pages}, ("key_bounds",))
    first = Launch(
        spec=bounds_spec(dtype), tiles=-(-batch * pages * heads // _WARPS),
        reads=("k", "table", "counts", "lengths", "key_bounds"), writes=("key_bounds",),
        features=("append", "key_bounds"),
    )  # fmt: skip
    return replace(
        kernels, launches={"key_bounds": first, **kernels.launches}, features=(*kernels.features, bounds)
    )  # fmt: skip


def bounds_spec(dtype: np.dtype[np.generic]) -> KernelSpec:
    """Return the kernel that updates the minimum and maximum of each page's keys; it depends only on the dtype."""
    return replace(append_spec(dtype), entry=_KEY_BOUNDS)


def append_spec(dtype: np.dtype[np.generic], *, is_quantized: bool = False) -> KernelSpec:
    """Return the kernel that appends rows of a dtype to a cache of this dtype or, if `is_quantized`, of FP8."""
    entry, num_warps = (_APPEND_E4M3, _WARPS_OF_ROWS) if is_quantized else (_APPEND, _WARPS)
    return smallest(entry, dtype, num_warps)
