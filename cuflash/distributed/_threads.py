"""Ranks as threads of this process, with NumPy arrays or with a GPU each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..arrays import describe, is_int, require_callable
from ..errors import refuse
from ..keywords import explains_keywords
from ._group import Group, PeerLost, Work, call_reasons, listed, timeout_reasons
from ._lanes import DeviceLanes, Event, HostLanes, Lanes, device_count
from ._schedule import ADD, ATTEND, Step

__all__ = ["run"]

_Result = TypeVar("_Result")


@dataclass
class _Meeting:
    """The state that the ranks of a group share; `changed` guards all of it."""

    size: int
    timeout: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: str = ""  # why the group is closed
    number: int = 0  # number of the current exchange
    values: dict[int, tuple[str, Any, Event]] = field(default_factory=dict)  # call, value and start event by rank
    results: tuple[tuple[str, Any, Event], ...] = ()
    done: dict[int, dict[int, Event]] = field(default_factory=dict)  # events of finished steps, by number of exchange
    returned: set[int] = field(default_factory=set)

    def close(self, error: str) -> None:
        """Close the group for a reason; only the first reason counts."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, is_over: Callable[[], bool], what: Callable[[], str], seconds: float) -> None:
        """Wait, with the lock held, until a condition holds; close the group if it does not hold within the timeout.

        Raises
        ------
        PeerLost
            The group is closed.
        """
        deadline = time.monotonic() + seconds
        while not is_over():
            left = deadline - time.monotonic()
            if left <= 0:
                self.close(f"{what()} within {seconds:g} s")
            self.require_open()
            self.changed.wait(left)

    def require_open(self) -> None:
        """Raise `PeerLost` if the group is closed."""
        if self.error:
            raise PeerLost(self.error)


class ThreadGroup(Group):
    """The group of a rank that is a thread, whose arrays all ranks can read."""

    _shares_memory = True

    def __init__(self, rank: int, meeting: _Meeting, lanes: Lanes, order: Any = None) -> None:
        super().__init__(rank, meeting.size)
        self._meeting, self._lanes, self._order = meeting, lanes, order
        self._starts = list[Event]()  # start events of the ranks in the last exchange

    def _exchanged(self, what: str, value: Any) -> tuple[int, list[Any]]:
        meeting, start = self._meeting, self._lanes.start()
        with meeting.changed:
            self._require_peers(what)
            number = meeting.number
            meeting.values[self.rank] = what, value, start
            if len(meeting.values) == self.size:
                meeting.results = tuple(meeting.values[rank] for rank in range(self.size))
                meeting.number, meeting.values = number + 1, {}
                meeting.changed.notify_all()
            meeting.wait(lambda: meeting.number > number, lambda: self._missing(what), meeting.timeout)
            results = meeting.results
        names, values, starts = (list(each) for each in zip(*results))
        self._starts = starts
        refuse(call_reasons(names))
        return number, values

    def _require_peers(self, what: str) -> None:
        meeting = self._meeting
        if meeting.returned and not meeting.error:
            ranks = listed(sorted(meeting.returned))
            meeting.close(f"{ranks} returned before {what}, where rank {self.rank} waited")
        meeting.require_open()

    def _missing(self, what: str) -> str:
        values = self._meeting.values
        missing = [rank for rank in range(self.size) if rank not in values]
        return f"{listed(missing)} did not arrive at {what}, where {listed(sorted(values))} waited,"

    def _perform(self, what: str, number: int, work: Work) -> None:
        """Run the steps of this rank in their order; with a seed, those that are ready in an order drawn from it."""
        meeting, steps = self._meeting, work.steps
        with meeting.changed:  # all ranks have finished the steps of earlier calls
            meeting.done = {number: meeting.done.get(number, {})}
            done = meeting.done[number]
        own = [number for number, step in enumerate(steps) if step.rank == self.rank]
        used = {number for number, step in enumerate(steps) if self.rank in (step.rank, step.source)}

        def ready() -> list[int]:
            candidates = own[:1] if self._order is None else own
            return [number for number in candidates if all(each in done for each in steps[number].after)]

        while own:
            with meeting.changed:
                meeting.wait(lambda: bool(ready()), lambda: self._waits(what, steps, own[0], done), meeting.timeout)
                choices = ready()
            number = choices[0] if len(choices) == 1 else int(self._order.choice(choices))
            event = self._step(steps[number], [done[each] for each in steps[number].after], work)
            own.remove(number)
            with meeting.changed:
                done[number] = event
                meeting.changed.notify_all()
        with meeting.changed:
            meeting.wait(lambda: done.keys() >= used, lambda: self._reads(what, steps, used - {*done}), meeting.timeout)
        self._lanes.finish([done[number] for number in sorted(used)])

    def _step(self, step: Step, events: list[Event], work: Work) -> Event:
        """Run a step after these events, and return the event of its end."""
        if step.kind in (ATTEND, ADD):
            return self._lanes.run(step, events, lambda: work.act(step))

        def copy() -> None:
            for move in work.moves(step):
                self._lanes.copy(work.target(step, move), work.source(step, move), move)

        return self._lanes.run(step, [self._starts[self.rank], self._starts[step.source], *events], copy)

    @staticmethod
    def _waits(what: str, steps: Sequence[Step], number: int, done: dict[int, Event]) -> str:
        late = sorted({steps[other].rank for other in steps[number].after if other not in done})
        step = steps[number]
        needed = f"what rank {step.rank} needs to {step.kind} in {what} (group {step.group})"
        return f"{listed(late)} did not finish {needed}"

    @staticmethod
    def _reads(what: str, steps: Sequence[Step], late: set[int]) -> str:
        return f"{listed(sorted({steps[number].rank for number in late}))} did not finish {what}"


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
        For tests: each rank runs its ready steps in a random order, drawn from this seed.

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
    require_callable("function", function)
    reasons = [*_rank_reasons(size, devices), *timeout_reasons(timeout)]
    if not (seed is None or is_int(seed) and seed >= 0):
        reasons.append(f"seed must be an int of at least 0, or None; got {describe(seed)}")
    refuse(reasons)
    lanes: list[Lanes] = [HostLanes()] * (size or 0)
    if devices is not None:
        lanes = [DeviceLanes(device, devices) for device in devices]
    size = len(lanes)
    meeting = _Meeting(size, float(timeout))
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        order = None if seed is None else np.random.default_rng((seed, rank))
        try:
            with lanes[rank].current():
                results[rank] = function(ThreadGroup(rank, meeting, lanes[rank], order))
        except BaseException as error:  # even SystemExit must end the other ranks
            errors.append((rank, error))
            meeting.close(f"rank {rank} raised {type(error).__name__}: {error}")
        with meeting.changed:
            meeting.returned.add(rank)
            if meeting.values and not meeting.error:
                what = next(iter(meeting.values.values()))[0]
                meeting.close(f"rank {rank} returned before {what}, where {listed(sorted(meeting.values))} waited")
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
