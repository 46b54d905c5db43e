"""The cache of the keys and values of earlier tokens, which the queries of later tokens attend."""

from .kv_cache import KVCache

__all__ = ["KVCache"]
