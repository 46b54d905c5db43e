"""Cache of the keys and values of earlier tokens, for the queries of later ones."""

from .kv_cache import KVCache

__all__ = ["KVCache"]
