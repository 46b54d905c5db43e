"""Ranks as threads of this process, with NumPy arrays or with a GPU each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..arrays import describe, is_int
from ..errors import refuse
from ..keywords import explains_keywords
from ._agreement import refusal
from ._group import Group, PeerLost, Work, call_reasons, listed, timeout_reasons
from ._lanes import DeviceLanes, Event, HostLanes, device_count
from ._schedule import drawn_order, program

_Result = TypeVar("_Result")


@dataclass(eq=False)
class _Visit:
    """One meeting of all ranks: what they bring, and how far the last to arrive is with the work of all.

    Attributes
    ----------
    values : dict by rank
        The call of each rank that has arrived, its value, and its start event.
    number : int
        How many steps have been started.
    rank : int
        The rank whose step runs.
    is_over : bool
        The ranks may return.
    reasons : list of str
        Why the ranks refuse the call.
    failures : dict of exceptions by rank
        What steps of ranks raised.
    """

    values: dict[int, tuple[str, Any, Event]] = field(default_factory=dict)
    number: int = 0
    rank: int = 0
    is_over: bool = False
    reasons: list[str] = field(default_factory=list)
    failures: dict[int, BaseException] = field(default_factory=dict)

    def late(self, size: int) -> str:
        """Return what the ranks wait for."""
        what = next(iter(self.values.values()))[0]
        missing = [rank for rank in range(size) if rank not in self.values]
        if missing:
            return f"{listed(missing)} did not arrive at {what}, where {listed(sorted(self.values))} waited,"
        return f"rank {self.rank} did not finish {what}"


@dataclass(eq=False)
class _Meeting:
    """The state that the ranks of a group share; `changed` guards all of it except progress within a visit."""

    lanes: Sequence[HostLanes]
    timeout: float
    order: np.random.Generator | None = None  # a random generator if steps run in a drawn order
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: str = ""  # why the group is closed
    visit: _Visit = field(default_factory=_Visit)  # the one that ranks arrive at next
    returned: set[int] = field(default_factory=set)

    def close(self, error: str) -> None:
        """Close the group for a reason; only the first reason counts."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def require_open(self) -> None:
        """Raise `PeerLost` if the group is closed."""
        if self.error:
            raise PeerLost(self.error)

    def meet(self, rank: int, what: str, value: Any, act: Callable[[_Visit], list[str]] | None = None) -> list[Any]:
        """Wait for all ranks, and return their values; the last to arrive first does the work of all.

        `act` returns why the ranks refuse the call.

        Raises
        ------
        UnsupportedProblem
            Ranks make different calls, or refuse this one.
        PeerLost
            The group is closed.
        """
        start, size = self.lanes[rank].start(), len(self.lanes)
        with self.changed:
            if self.returned and not self.error:
                ranks = listed(sorted(self.returned))
                self.close(f"{ranks} returned before {what}, where rank {rank} waited")
            self.require_open()
            visit = self.visit
            visit.values[rank] = what, value, start
            is_last = len(visit.values) == size
            if is_last:
                self.visit = _Visit()
            else:
                self._wait(visit)
        if is_last:
            try:
                visit.reasons = call_reasons([visit.values[each][0] for each in range(size)])
                if act is not None and not visit.reasons:
                    visit.reasons = act(visit)
            finally:
                with self.changed:
                    visit.is_over = True
                    self.changed.notify_all()
        if visit.failures:
            raise visit.failures.get(rank) or PeerLost(self.error)
        refuse(visit.reasons)
        return [visit.values[each][1] for each in range(size)]

    def _wait(self, visit: _Visit) -> None:
        """Wait, with the lock held, until a visit is over; close the group if nothing proceeds within the timeout."""
        number, deadline = -1, 0.0
        while not (visit.is_over or visit.failures):
            if visit.number != number:
                number, deadline = visit.number, time.monotonic() + self.timeout
            left = deadline - time.monotonic()
            if left <= 0:
                self.close(f"{visit.late(len(self.lanes))} within {self.timeout:g} s")
            self.require_open()
            self.changed.wait(left)

    def work(self, visit: _Visit) -> list[str]:
        """Queue the steps of all ranks on their lanes, or return why the call is refused."""
        values = [visit.values[rank] for rank in range(len(self.lanes))]
        works = [work for _, (*_, work), _ in values]
        if (reasons := refusal([offer for _, (*offer, _), _ in values])) or works[0] is None:
            return reasons
        issued = works[0].program
        if (order := self.order) is not None:
            steps = works[0].steps
            issued = program(steps, len(works), drawn_order(steps, lambda ready: int(order.choice(ready))))
        events: dict[int, Event] = {~rank: start for rank, (_, _, start) in enumerate(values)}
        try:
            for rank, issues in issued.turns:
                lanes, visit.rank = self.lanes[rank], rank
                with lanes.current(), lanes.kernels:
                    for issue in issues:
                        visit.number += 1
                        self.require_open()
                        events[issue.number] = lanes.run(issue, events, works)
            for rank, ends in enumerate(issued.ends):
                self.lanes[rank].finish([events[number] for number in ends])
        except BaseException as error:  # also of the rank whose thread this is not
            with self.changed:
                visit.failures[visit.rank] = error
                self.close(f"rank {visit.rank} raised {type(error).__name__}: {error}")
        return []


class ThreadGroup(Group):
    """The group of a rank that is a thread, whose arrays all ranks can read.

    In each call the ranks meet once. The last to arrive issues the steps of all ranks, in an order that is the same in
    every call: on GPUs it queues all copies and kernels, and streams wait for events of other streams. So no rank waits
    for another between two steps, and no event is waited for before it is recorded.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, len(meeting.lanes))
        self._meeting, self._lanes = meeting, meeting.lanes[rank]

    def exchange(self, what: str, value: Any) -> list[Any]:
        return self._meeting.meet(self.rank, what, value)

    def _perform(self, what: str, texts: Mapping[str, str], reasons: Sequence[str], work: Work | None = None) -> None:
        self._meeting.meet(self.rank, what, (reasons, texts, work), self._meeting.work)


@explains_keywords
def run(
    function: Callable[[Group], _Result],
    *,
    size: int | None = None,
    devices: Sequence[int] | None = None,
    timeout: float = 60.0,
    seed: int | None = None,
) -> list[_Result]:
    """Call a function once for each rank, each in its own thread, with NumPy arrays or with a GPU.

    Parameters
    ----------
    function : callable (Group) -> object
        The work of a rank. If the rank has a GPU, this GPU is the current device, and arrays are CuPy arrays.
    size : int, optional
        The number of ranks with NumPy arrays, at least 1.
    devices : sequence of int, optional
        Instead of `size`: the number of the GPU of each rank. Ranks may share a GPU.
    timeout : float
        Seconds that a rank waits for the others before it raises `PeerLost`.
    seed : int, optional
        For tests: steps run in a random order, each drawn from those that are ready.

    Returns
    -------
    list
        The results of the function for ranks 0, 1, ...

    Raises
    ------
    TypeError
        `function` is not callable.
    UnsupportedProblem
        Another argument breaks its rule, or all ranks raised this error together.
    PeerLost
        A rank did not answer within the timeout, or returned while others waited for it.
    Exception
        Any other error is the first one that a rank raised; the other ranks then raise `PeerLost` where they wait.

    Examples
    --------
    >>> from cuflash import distributed
    >>> distributed.run(lambda group: group.rank, size=2)
    [0, 1]
    """
    if not callable(function):
        raise TypeError(f"function must be a function of a Group; got {describe(function)}")
    reasons = [*_rank_reasons(size, devices), *timeout_reasons(timeout)]
    if not (seed is None or is_int(seed) and seed >= 0):
        reasons.append(f"seed must be an int of at least 0, or None; got {describe(seed)}")
    refuse(reasons)
    lanes: list[HostLanes] = [HostLanes()] * (size or 0)
    if devices is not None:
        lanes = [DeviceLanes(device, devices) for device in devices]
    size = len(lanes)
    meeting = _Meeting(lanes, float(timeout), None if seed is None else np.random.default_rng(seed))
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            with lanes[rank].current():
                results[rank] = function(ThreadGroup(rank, meeting))
        except BaseException as error:  # even SystemExit must end the other ranks
            errors.append((rank, error))
            meeting.close(f"rank {rank} raised {type(error).__name__}: {error}")
        with meeting.changed:
            meeting.returned.add(rank)
            if (arrived := meeting.visit.values) and not meeting.error:
                what = next(iter(arrived.values()))[0]
                meeting.close(f"rank {rank} returned before {what}, where {listed(sorted(arrived))} waited")
            meeting.changed.notify_all()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    with meeting.changed:
        while len(meeting.returned) < size and not meeting.error:
            meeting.changed.wait()
        deadline = time.monotonic() + timeout  # a rank that computes alone sees the error at its next call
        while len(meeting.returned) < size and (left := deadline - time.monotonic()) > 0:
            meeting.changed.wait(left)
    own = [(rank, error) for rank, error in errors if not isinstance(error, PeerLost)]
    for rank, error in own or errors:
        if not isinstance(error, Exception):  # SystemExit of a rank must not end the program
            raise PeerLost(f"rank {rank} raised {type(error).__name__}: {error}") from error
        error.add_note(f"Raised by rank {rank} of {size}.")
        raise error
    if meeting.error:
        raise PeerLost(meeting.error)
    return results


def _rank_reasons(size: Any, devices: Any) -> list[str]:
    """Return why values cannot be the number of ranks, or their GPUs."""
    if devices is None:
        is_size = is_int(size) and size >= 1
        return [] if is_size else [f"size must be an int of at least 1, or devices the GPUs; got {describe(size)}"]
    if size is not None:
        return [f"size must be left out with devices, which has the GPU of each rank; got {describe(size)}"]
    if not (isinstance(devices, (list, tuple, range)) and devices and all(is_int(each) for each in devices)):
        return [f"devices must be a list of the numbers of GPUs; got {describe(devices)}"]
    count = device_count()
    if count and 0 <= min(devices) and max(devices) < count:
        return []
    return [f"devices must be numbers of GPUs of this machine, which has {count}; got {describe(devices)}"]
