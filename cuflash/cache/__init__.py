"""Keys and values of earlier tokens, kept for the queries of later ones."""

from .kv_cache import KVCache

__all__ = ["KVCache"]
