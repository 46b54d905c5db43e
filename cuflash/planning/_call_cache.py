"""The cache of calls: what runs a repeated call, under a key that is known before the call is checked."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Any

MAX_CALLS = 1024


class CallCache:
    """What runs repeated calls, by key; if there are too many, the least recently used one leaves.

    A key starts with the kind of call, so that one cache serves all kinds. It holds no array, and nothing that would
    keep one alive.

    Parameters
    ----------
    size : int
        The number of calls that are kept.
    """

    def __init__(self, size: int = MAX_CALLS) -> None:
        self._size = size
        self._calls: OrderedDict[Hashable, tuple[Any, set[Hashable] | None]] = OrderedDict()
        self._owned: dict[int, set[Hashable]] = {}  # keys by the number of their owner
        self._last: tuple[Hashable, Any] = (object(), None)
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, key: Hashable) -> Any:
        """Return what runs the call of a key, or None if it is not known."""
        last, call = self._last
        if key == last:
            return call
        found = self._calls.get(key)
        if found is None:
            return None
        call, _ = found
        try:
            self._calls.move_to_end(key)
        except KeyError:  # another thread has dropped it
            return call
        self._last = key, call
        return call

    def put(self, key: Hashable, call: Any, owner: Any = None) -> None:
        """Keep what runs the call of a key.

        Parameters
        ----------
        key : hashable
            It may hold the owner's `id`, which no other object has as long as the call is cached.
        call : object
            What runs the call. It must not refer to the owner.
        owner : object, optional
            The call leaves the cache as soon as nothing refers to this object.
        """
        displaced: list[Any] = []  # destructors run after the lock is released
        with self._lock:
            keys = None if owner is None else self._keys_of(owner)
            if keys is not None:
                keys.add(key)
            displaced.append(self._calls.pop(key, None))
            self._calls[key] = call, keys
            self._last = key, call
            if len(self._calls) > self._size:
                oldest, (_, its_keys) = displaced_call = self._calls.popitem(last=False)
                displaced.append(displaced_call)
                if its_keys is not None:
                    its_keys.discard(oldest)

    def clear(self) -> None:
        """Forget all calls."""
        self._drop(list(self._calls))

    def _keys_of(self, owner: Any) -> set[Hashable]:
        number = id(owner)
        keys = self._owned.get(number)
        if keys is None:
            keys = self._owned[number] = set()
            weakref.finalize(owner, self._forget, number).atexit = False
        return keys

    def _forget(self, owner: int) -> None:
        """Drop the calls of an owner that is about to be freed, before another object may have its number."""
        with self._lock:
            keys = self._owned.pop(owner, None)
        self._drop(keys or ())

    def _drop(self, keys: Collection[Hashable]) -> None:
        with self._lock:
            displaced = [self._calls.pop(key, None) for key in keys]
            if self._last[0] in keys:
                displaced.append(self._last)
                self._last = object(), None
        del displaced


CALLS = CallCache()
