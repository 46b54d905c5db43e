"""The pages of a cache with the least and greatest keys of each page, for selectors."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays import Array
from ..planning.decoding import CacheLayout
from .kv_cache import KVCache


class BoundedPages(NamedTuple):
    """The arrays by which kernels find the pages of sequences, and the least and greatest keys of each page.

    Attributes
    ----------
    key_bounds : array [num_pages, num_kv_heads, 2, head_dim]
    table : int32 array [batch, max_pages]
        The pages of each sequence; on a device, calls on the cache update it in place.
    lengths : int32 array [batch]
        Number of positions of each sequence, updated like the table.
    layout : CacheLayout
    owner : object
        An object that lives as long as the cache's arrays.
    """

    key_bounds: Array
    table: Array
    lengths: Array
    layout: CacheLayout
    owner: Any

    @classmethod
    def of(cls, cache: KVCache) -> BoundedPages | None:
        """Return the pages of a cache, updated from the host's state; None if it keeps no bounds."""
        state = cache._state
        if state.rows.key_bounds is None:
            return None
        if state.device is None:
            return cls(state.rows.key_bounds, state.block_table(), state.length_array(), state.layout, state.steps)
        device = state.on_device()
        assert device.table is not None
        return cls(state.rows.key_bounds, device.table, device.lengths, state.layout, state.steps)
