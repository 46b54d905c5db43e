"""Groups of ranks: the exchange of values, the movement of arrays, and the errors if a rank fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..arrays import describe, is_number
from ..keywords import explains_keywords
from ._lanes import Arranged, HostLanes, Route
from ._schedule import Program, Step


@explains_keywords
class PeerLost(RuntimeError):
    """The error of a rank if another rank of its group raised an error, returned, or did not answer in time.

    Parameters
    ----------
    reason : str
        The rank that was lost, and the call in which it was lost.

    Examples
    --------
    >>> print(PeerLost("rank 1 returned before attention, where rank 0 waited"))
    rank 1 returned before attention, where rank 0 waited. This group is closed: start the ranks again
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}. This group is closed: start the ranks again")


class Work(Arranged, Protocol):
    """The steps of all ranks in one pass, and the arrays of this rank in them."""

    @property
    def steps(self) -> Sequence[Step]: ...

    @property
    def program(self) -> Program:
        """The steps in their order, with the events that they wait for."""

    def routes(self, number: int) -> Sequence[Route]:
        """Return the rows that a step moves, on any rank."""


@explains_keywords
class Group:  # numpydoc ignore=PR01
    """A rank's view of the ranks that work together: threads of this process, or processes.

    `run` creates a group of threads and passes it to each rank; `group_of` creates the group of this process from a
    PyTorch process group. All ranks make the same calls in the same order.

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

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._lanes = HostLanes()

    @property
    def _is_on_host(self) -> bool:
        """True if ranks have NumPy arrays."""
        return self._lanes.namespace is np

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Wait until all ranks make the same call, and return the value of each rank.

        Parameters
        ----------
        what : str
            A description of the call. If ranks pass different strings, all of them raise an error.
        value : object
            The value of this rank. Threads can pass any object, processes only values that JSON can represent.

        Returns
        -------
        list
            The values of ranks 0, 1, ...

        Raises
        ------
        UnsupportedProblem
            Ranks make different calls.
        PeerLost
            Another rank raised an error, returned, or did not answer within the timeout.

        Examples
        --------
        >>> from cuflash import distributed
        >>> distributed.run(lambda group: sum(group.exchange("a sum", group.rank)), size=4)
        [6, 6, 6, 6]
        """
        raise NotImplementedError

    def _perform(self, what: str, texts: Mapping[str, str], reasons: Sequence[str], work: Work | None = None) -> None:
        """Run this rank's steps of a pass if all ranks make the same call, and wait until none reads its arrays.

        On GPUs, the steps are queued when this returns, and work that is queued later waits for them.

        Parameters
        ----------
        what : str
            A description of the call.
        texts : dict of str by name
            The arguments that must be equal on all ranks.
        reasons : sequence of str
            Why this rank refuses the call.
        work : Work, optional
            Without it, ranks only compare their texts and reasons.

        Raises
        ------
        UnsupportedProblem
            The reasons of all ranks, or the first difference of their texts; every rank raises it.
        PeerLost
            Another rank is lost.
        """
        raise NotImplementedError


def call_reasons(calls: list[str]) -> list[str]:
    """Return why ranks do not make the same call."""
    if calls.count(calls[0]) == len(calls):
        return []
    other = next(rank for rank, call in enumerate(calls) if call != calls[0])
    return [f"ranks must ask for the same call: rank 0 asks for {calls[0]}, rank {other} for {calls[other]}"]


def listed(ranks: Sequence[int]) -> str:
    """Return a text that lists ranks by number."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def timeout_reasons(timeout: Any) -> list[str]:
    """Return why a value cannot be a timeout."""
    if is_number(timeout) and timeout > 0:
        return []
    return [f"timeout must be a positive number of seconds; got {describe(timeout)}"]
