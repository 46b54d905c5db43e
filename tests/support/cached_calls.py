"""Access to the library's call cache, for tests that count cached calls."""

from __future__ import annotations

from typing import Any

from cuflash.planning._call_cache import CALLS


def cached(kind: str, cache: Any = CALLS) -> dict[Any, Any]:
    """Return the objects that run the cached calls of a kind, by key."""
    return {key: entry.call for key, entry in cache._calls.items() if key[0] == kind}
