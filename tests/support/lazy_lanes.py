"""A stand-in for the streams of GPUs: steps run as late, or copies as early, as events allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from cuflash.distributed._lanes import HostLanes

_LOCK = threading.RLock()  # ranks are threads, and each of them may run the steps of all


class Node:
    """A step in a queue, which is run once, after the one before it and after the events that it waits for."""

    def __init__(self, do: Callable[[], None], events: Sequence[Any]) -> None:
        self.do, self.events, self.is_done = do, list(events), False

    def force(self) -> None:
        with _LOCK:
            if self.is_done:
                return
            self.is_done = True
            for each in self.events:
                if each is not None:
                    each.force()
            self.do()


class LazyLanes(HostLanes):
    """Lanes of a rank with NumPy arrays, in the interface of `DeviceLanes`.

    Attributes
    ----------
    has_early_copies : bool
        Copies run when they are queued, after what they wait for; else all steps run when `synchronize` is called.
    """

    has_early_copies = False

    def __init__(self, device: int, devices: Sequence[int]) -> None:
        self.last: dict[bool, Any] = {True: None, False: None}

    def start(self) -> Any:
        return self.last[False]

    def run(self, issue: Any, events: Sequence[Any], do: Callable[[], None]) -> Node | None:
        is_copy = issue.step.rank != issue.step.source
        node = self.last[is_copy] = Node(do, [self.last[is_copy], *events])
        if is_copy and self.has_early_copies:
            node.force()
        return node if issue.is_awaited else None

    def queue(self, do: Callable[[], None], events: Sequence[Any] = ()) -> None:
        """Queue a function as a kernel of the rank."""
        self.last[False] = Node(do, [self.last[False], *events])

    def finish(self, events: Sequence[Any]) -> None:
        self.queue(lambda: None, events)

    def synchronize(self) -> None:
        """Run what the rank has queued, and what this waits for."""
        if self.last[False] is not None:
            self.last[False].force()
