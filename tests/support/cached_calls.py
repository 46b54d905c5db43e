"""The calls in the library's cache, for tests that count them."""

from __future__ import annotations

from typing import Any

from cuflash.planning._call_cache import CALLS


def cached(kind: str, cache: Any = CALLS) -> dict[Any, Any]:
    """Return what runs the cached calls of a kind, by key."""
    return {key: entry.call for key, entry in cache._calls.items() if key[0] == kind}
