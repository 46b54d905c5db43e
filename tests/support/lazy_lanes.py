"""A stand-in for the streams of GPUs: steps of some lanes run as early as events allow, and all others as late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cuflash.distributed._lanes import HostLanes
from cuflash.distributed._schedule import RECEIVING

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
    early : tuple of int
        Lanes whose steps run when they are queued, after what they wait for; others run when `synchronize` is called.
    """

    early: tuple[int, ...] = ()

    def __init__(self, device: int, devices: Sequence[int]) -> None:
        self.last: list[Any] = [None] * (RECEIVING + 1)

    def start(self) -> Any:
        return self.last[0]

    def run(self, issue: Any, events: Mapping[int, Any], passes: Sequence[Any]) -> Node | None:
        lane, do = issue.lane, partial(super().run, issue, events, passes)
        node = self.last[lane] = Node(do, [self.last[lane], *(events[number] for number in issue.waits)])
        if lane in self.early:
            node.force()
        return node if issue.is_awaited else None

    def queue(self, do: Callable[[], None], events: Sequence[Any] = ()) -> None:
        """Queue a function as a kernel of the rank."""
        self.last[0] = Node(do, [self.last[0], *events])

    def finish(self, events: Sequence[Any]) -> None:
        self.queue(lambda: None, events)

    def synchronize(self) -> None:
        """Run what the rank has queued, and what this waits for."""
        if self.last[0] is not None:
            self.last[0].force()
