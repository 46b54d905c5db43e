"""Ranks as threads that use the code of processes, with stand-ins for PyTorch's store and its exchange of bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Store:
    """The part of PyTorch's store that groups of processes use."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.is_lost = False

    def set(self, key: str, value: Any) -> None:
        if self.is_lost:
            raise RuntimeError("Connection reset by peer")
        with self._lock:
            self.values[key] = value if isinstance(value, bytes) else str(value).encode()

    def check(self, keys: list[str]) -> bool:
        if self.is_lost:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def delete_key(self, key: str) -> None:
        self.values.pop(key, None)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self._lock:
            if key not in self.values and not expected:
                self.values[key] = value.encode()
            return self.values[key]


class _Handle:
    """A transfer that is over when all ranks have sent their parts; it delivers late."""

    def __init__(
        self, posts: dict[Any, Any], number: int, rank: int, size: int, received: Any, sizes: list[int]
    ) -> None:
        self._key, self._posts, self._rank, self._size = number, posts, rank, size
        self._received, self._sizes = received, sizes

    def is_completed(self) -> bool:
        return all((self._key, source) in self._posts for source in range(self._size))

    def wait(self) -> None:
        first = 0
        for source, count in enumerate(self._sizes):
            sent, sizes = self._posts[self._key, source]
            begin = sum(sizes[: self._rank])
            assert sizes[self._rank] == count, "both ranks must expect as many bytes"
            self._received[first : first + count] = sent[begin : begin + count]
            first += count


def run(
    processes: ModuleType, size: int, function: Callable[[Any], Any], *, timeout: float = 20.0,
    is_alive: Callable[[int], bool] = lambda rank: True,
) -> list[Any]:
    """Return what each rank returns or raises, from a module with the code of processes."""
    store, posts, results = Store(), dict[Any, Any](), list[Any]([None] * size)

    def rank(number: int) -> None:
        group = object.__new__(processes.ProcessGroup)
        group.rank, group.size, group._lanes = number, size, processes.HostLanes()
        group._store, group._timeout, group._is_on_gpu = store, timeout, False
        group._number, group._beats, group._error = 0, {}, ""
        counter = iter(range(1 << 30))

        def exchange(received: Any, sent: Any, of_received: list[int], of_sent: list[int]) -> _Handle:
            turn = next(counter)
            posts[turn, number] = sent.copy(), of_sent
            return _Handle(posts, turn, number, size, received, of_received)

        group._exchange_bytes = exchange
        if is_alive(number):
            threading.Thread(target=group._beat, daemon=True).start()
        try:
            with group:
                results[number] = function(group)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    store.is_lost = True  # ends the threads that show signs of life
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
