"""The pages of a cache with the least and greatest keys of each page, for selectors."""

from __future__ import annotations

from ..arrays import Array
from ..planning.decoding import CacheLayout
from ._state import CacheState
from .arguments import require_appended
from .kv_cache import KVCache


def require_tokens(cache: KVCache, num_queries: int) -> None:
    """Refuse more queries than a sequence has tokens, if the host counts these; an empty sequence may be idle.

    Raises
    ------
    UnsupportedProblem
        A sequence has fewer tokens than queries, and is not empty.
    """
    if not cache._state.is_counted_on_device:
        lengths = cache._state.lengths
        require_appended([num_queries if length else 0 for length in lengths], lengths, has_counts=False)


class BoundedPages:
    """The pages of a cache, and the least and greatest keys of each.

    Attributes
    ----------
    key_bounds : array [num_pages, num_kv_heads, 2, head_dim]
    owner : object
        An object that lives as long as the cache's arrays.
    """

    __slots__ = ("_state", "key_bounds", "owner")

    def __init__(self, state: CacheState, key_bounds: Array) -> None:
        self._state, self.key_bounds, self.owner = state, key_bounds, state.steps

    @classmethod
    def of(cls, cache: KVCache) -> BoundedPages | None:
        """Return the pages of a cache; None if it keeps no bounds."""
        state = cache._state
        return None if state.rows.key_bounds is None else cls(state, state.rows.key_bounds)

    @property
    def layout(self) -> CacheLayout:
        return self._state.layout

    def table_and_lengths(self) -> tuple[Array, Array]:
        """Return the pages [batch, max_pages] of each sequence, and its number of positions, int32.

        On a device they are the arrays that the kernels of the cache read, updated from the host's state; later calls
        on the cache update them in place.
        """
        state = self._state
        if state.device is None:
            return state.block_table(), state.length_array()
        device = state.on_device()
        assert device.table is not None
        return device.table, device.lengths
