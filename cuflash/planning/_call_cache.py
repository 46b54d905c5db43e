"""The cache of calls. Keys are computed from unchecked arguments, so that repeated calls skip the checks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

MAX_CALLS = 1024


class _Entry:
    """A cached call: the callable or plan that runs it, all keys of its owner, and the number of its last use."""

    __slots__ = ("call", "keys", "last_use")

    def __init__(self, call: Any, keys: set[Hashable] | None, use: int) -> None:
        self.call, self.keys, self.last_use = call, keys, use


class CallCache:
    """A least recently used cache of the callables and plans that run repeated calls.

    A key starts with the kind of call, so that one cache serves all kinds. Keys refer neither to arrays nor to objects
    that would keep arrays alive.

    Parameters
    ----------
    size : int
        Maximum number of cached calls.
    """

    def __init__(self, size: int = MAX_CALLS) -> None:
        self._size = size
        self._calls: dict[Hashable, _Entry] = {}
        self._uses = count()
        self._queue: list[tuple[int, Hashable]] = []  # a heap of (use, key); some were used later, or were removed
        self._owned: dict[int, set[Hashable]] = {}  # keys by the id of their owner
        self._last: tuple[Hashable, Any] = (object(), None)
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds the lock

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, key: Hashable) -> Any:
        """Return the object that runs the call of a key, or None if the key is not cached."""
        last, call = self._last
        if key == last:
            return call
        entry = self._calls.get(key)  # hashing the key takes most of the time, so it is hashed only once
        if entry is None:
            return None
        entry.last_use, self._last = next(self._uses), (key, entry.call)
        return entry.call

    def put(self, key: Hashable, call: Any, owner: Any = None) -> None:
        """Cache the object that runs the call of a key.

        Parameters
        ----------
        key : hashable
            It may contain the owner's `id`, which no other object has as long as the call is cached.
        call : object
            The object that runs the call. It must not refer to the owner.
        owner : object, optional
            The call is removed from the cache as soon as this object is freed.
        """
        with self._lock:
            left = [self._without_owner(key)]  # kept alive until unlocked, since destructors may take the lock
            keys = None if owner is None else self._keys_of(owner)
            if keys is not None:
                keys.add(key)
            entry = self._calls[key] = _Entry(call, keys, next(self._uses))
            self._last = key, call
            heappush(self._queue, (entry.last_use, key))
            if len(self._calls) > self._size:
                left.append(self._without_owner(self._least_recently_used()))
            if len(self._queue) > 2 * self._size:
                # a finalizer may remove calls while the tuples are created, but not while the keys are copied
                entries = ((self._calls.get(key), key) for key in list(self._calls))
                self._queue = [(entry.last_use, key) for entry, key in entries if entry is not None]
                heapify(self._queue)
        del left

    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the object that runs the call of a key; if the key is not cached, create and cache the object."""
        call = self.get(key)
        if call is None:
            call = make()
            self.put(key, call)
        return call

    def _least_recently_used(self) -> Hashable:
        """Remove the least recently used call from the queue and return its key; requeue calls that were used since."""
        while True:
            use, key = heappop(self._queue)
            entry = self._calls.get(key)
            if entry is None:  # the call was removed
                continue
            last_use = entry.last_use
            if last_use == use:
                return key
            heappush(self._queue, (last_use, key))

    def _without_owner(self, key: Hashable) -> _Entry | None:
        """Remove a key from the cache and from its owner's keys, and return its entry."""
        entry = self._calls.pop(key, None)
        if entry is not None and entry.keys is not None:
            entry.keys.discard(key)
        return entry

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
        """Drop the calls of an owner that is about to be freed, before another object can get its id."""
        with self._lock:
            keys = self._owned.pop(owner, None)
        self._drop(keys or ())

    def _drop(self, keys: Collection[Hashable]) -> None:
        with self._lock:
            left: list[Any] = [self._without_owner(key) for key in tuple(keys)]
            if self._last[0] not in self._calls:
                left.append(self._last)
                self._last = object(), None
        del left


CALLS = CallCache()
