"""Groups of ranks, each a thread of this process with NumPy arrays: what they tell each other, and how they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..arrays import describe, is_int, is_number, require_callable
from ..errors import refuse
from ..keywords import explains_keywords
from ._schedule import Step

__all__ = ["Group", "PeerLost", "run"]

_Result = TypeVar("_Result")


@explains_keywords
class PeerLost(RuntimeError):
    """The error of a rank whose group has lost another rank: it raised, returned, or did not answer in time.

    Parameters
    ----------
    reason : str
        Which rank was lost, and where.

    Examples
    --------
    >>> print(PeerLost("rank 1 returned before attention, where rank 0 waited"))
    rank 1 returned before attention, where rank 0 waited. This group is closed: start the ranks again
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}. This group is closed: start the ranks again")


@dataclass
class _Meeting:
    """The state that the ranks of a group share; `changed` guards all of it."""

    size: int
    timeout: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: str = ""  # why the group is closed
    number: int = 0  # of the present exchange
    values: dict[int, tuple[str, Any]] = field(default_factory=dict)
    results: tuple[tuple[str, Any], ...] = ()
    done: dict[int, set[int]] = field(default_factory=dict)  # finished steps, by the number of the call's exchange
    returned: set[int] = field(default_factory=set)

    def close(self, error: str) -> None:
        """Close the group for a reason; the first one counts."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, is_over: Callable[[], bool], what: Callable[[], str], seconds: float) -> None:
        """Wait, with the lock held, until a condition holds; close the group if it does not within the timeout.

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


@explains_keywords
class Group:  # numpydoc ignore=PR01
    """A rank's view of the ranks that work together: threads of this process, each with NumPy arrays.

    `run` makes the groups and passes one to each rank. All ranks make the same calls in the same order.

    Attributes
    ----------
    rank : int
        The number of this rank, 0 <= rank < size.
    size : int
        The number of ranks.

    Examples
    --------
    >>> from cuflash import distributed
    >>> distributed.run(lambda group: group.rank * 10 + group.size, size=3)
    [3, 13, 23]
    """

    def __init__(self, rank: int, meeting: Any, order: Any = None) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting
        self._order = order

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Wait until all ranks make the same call, and return the value of each rank.

        Parameters
        ----------
        what : str
            What the call is; ranks that pass different strings are refused together.
        value : object
            The value of this rank. It is not copied.

        Returns
        -------
        list
            The values of ranks 0, 1, ...

        Raises
        ------
        UnsupportedProblem
            Ranks ask for different calls.
        PeerLost
            Another rank raised, returned, or did not answer within the timeout.

        Examples
        --------
        >>> from cuflash import distributed
        >>> distributed.run(lambda group: sum(group.exchange("a sum", group.rank)), size=4)
        [6, 6, 6, 6]
        """
        return self._exchanged(what, value)[1]

    def _exchanged(self, what: str, value: Any) -> tuple[int, list[Any]]:
        """Return the number of the exchange, which counts those of the group, and the value of each rank."""
        meeting = self._meeting
        with meeting.changed:
            self._require_peers(what)
            number = meeting.number
            meeting.values[self.rank] = what, value
            if len(meeting.values) == self.size:
                meeting.results = tuple(meeting.values[rank] for rank in range(self.size))
                meeting.number, meeting.values = number + 1, {}
                meeting.changed.notify_all()
            meeting.wait(lambda: meeting.number > number, lambda: self._missing(what), meeting.timeout)
            results = meeting.results
        refuse(_call_reasons([name for name, _ in results]))
        return number, [each for _, each in results]

    def _require_peers(self, what: str) -> None:
        meeting = self._meeting
        if meeting.returned and not meeting.error:
            ranks = _listed(sorted(meeting.returned))
            meeting.close(f"{ranks} returned before {what}, where rank {self.rank} waited")
        meeting.require_open()

    def _missing(self, what: str) -> str:
        values = self._meeting.values
        missing = [rank for rank in range(self.size) if rank not in values]
        return f"{_listed(missing)} did not arrive at {what}, where {_listed(sorted(values))} waited,"

    def _perform(self, what: str, steps: Sequence[Step], do: Callable[[Step], None]) -> None:
        """Run the steps of this rank when they are ready, and wait until no rank reads the arrays of this rank.

        All ranks start together. With a seed, ready steps are run in an order drawn from it.
        """
        meeting, (number, _) = self._meeting, self._exchanged(what, None)
        with meeting.changed:  # all ranks have finished the steps of earlier calls
            meeting.done = {number: meeting.done.get(number, set())}
            done = meeting.done[number]
        own = [number for number, step in enumerate(steps) if step.rank == self.rank]
        read = {number for number, step in enumerate(steps) if step.source == self.rank}

        def ready() -> list[int]:
            return [number for number in own if done.issuperset(steps[number].after)]

        while own:
            with meeting.changed:
                meeting.wait(lambda: bool(ready()), lambda: self._waits(what, steps, own[0], done), meeting.timeout)
                choices = ready()
            number = choices[0] if self._order is None else int(self._order.choice(choices))
            do(steps[number])
            own.remove(number)
            with meeting.changed:
                done.add(number)
                meeting.changed.notify_all()
        with meeting.changed:
            meeting.wait(lambda: done >= read, lambda: self._reads(what, steps, read - done), meeting.timeout)

    @staticmethod
    def _waits(what: str, steps: Sequence[Step], number: int, done: set[int]) -> str:
        late = sorted({steps[other].rank for other in steps[number].after if other not in done})
        step = steps[number]
        needed = f"what rank {step.rank} needs to {step.kind} in {what} (group {step.group})"
        return f"{_listed(late)} did not finish {needed}"

    @staticmethod
    def _reads(what: str, steps: Sequence[Step], late: set[int]) -> str:
        return f"{_listed(sorted({steps[number].rank for number in late}))} did not finish {what}"


def _call_reasons(calls: list[str]) -> list[str]:
    """Return why ranks do not make the same call."""
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if other is None:
        return []
    return [f"ranks must ask for the same call: rank 0 asks for {calls[0]}, rank {other} for {calls[other]}"]


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@explains_keywords
def run(
    function: Callable[[Group], _Result], *, size: int, timeout: float = 60.0, seed: int | None = None
) -> list[_Result]:
    """Call a function once for each rank, each in a thread of its own with NumPy arrays.

    Parameters
    ----------
    function : callable (Group) -> object
        What a rank does.
    size : int
        The number of ranks, at least 1.
    timeout : float
        How many seconds a rank waits for the others before it raises `PeerLost`.
    seed : int, optional
        For tests: a rank does steps that are ready in an order that is drawn from the seed.

    Returns
    -------
    list
        What the function returned for ranks 0, 1, ...

    Raises
    ------
    TypeError
        `function` is not callable.
    UnsupportedProblem
        Another argument breaks its rule, or all ranks raised it together.
    PeerLost
        A rank did not answer within the timeout, or returned while others waited for it.
    Exception
        What the first rank raised that raised anything else. The other ranks raise `PeerLost` where they wait.

    Examples
    --------
    >>> from cuflash import distributed
    >>> distributed.run(lambda group: group.rank, size=2)
    [0, 1]
    """
    require_callable("function", function)
    reasons = [] if is_int(size) and size >= 1 else [f"size must be an int of at least 1; got {describe(size)}"]
    if not (is_number(timeout) and timeout > 0):
        reasons.append(f"timeout must be a positive number of seconds; got {describe(timeout)}")
    if not (seed is None or is_int(seed) and seed >= 0):
        reasons.append(f"seed must be an int of at least 0, or None; got {describe(seed)}")
    refuse(reasons)
    meeting = _Meeting(int(size), float(timeout))
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        order = None if seed is None else np.random.default_rng((seed, rank))
        try:
            results[rank] = function(Group(rank, meeting, order))
        except BaseException as error:  # even SystemExit must end the other ranks
            errors.append((rank, error))
            meeting.close(f"rank {rank} raised {type(error).__name__}: {error}")
        with meeting.changed:
            meeting.returned.add(rank)
            if meeting.values and not meeting.error:
                what = next(iter(meeting.values.values()))[0]
                meeting.close(f"rank {rank} returned before {what}, where {_listed(sorted(meeting.values))} waited")
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
