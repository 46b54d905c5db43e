"""The steps of a call on all ranks, each with the steps that it waits for: data without arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

COPY, ATTEND, TAKE, ADD = "copy", "attend", "take", "add"
NUM_BUFFERS = 2  # a rank copies the next group while it computes one


class Step(NamedTuple):
    """A step of a call.

    Attributes
    ----------
    kind : str
        "copy" moves the inputs of a group to a rank, "attend" computes the group, "take" moves results of a group from
        the rank that computed them, and "add" sums these results in the order of ranks.
    rank, source : int
        The rank that runs the step, and the rank whose arrays it reads.
    group : int
        The group of heads.
    after : tuple of int
        Numbers of the steps that must be finished first.
    """

    kind: str
    rank: int
    source: int
    group: int
    after: tuple[int, ...] = ()


class _Builder:
    """A growing list of steps, with a lookup by kind, rank, source and group."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._numbers: dict[tuple[str, int, int, int], int] = {}

    def add(self, kind: str, rank: int, source: int, group: int, after: Iterator[int] | Sequence[int]) -> None:
        self._numbers[kind, rank, source, group] = len(self.steps)
        self.steps.append(Step(kind, rank, source, group, tuple(after)))

    def number(self, kind: str, rank: int, source: int, group: int) -> list[int]:
        """Return the number of a step in a list, which is empty if no such step exists."""
        number = self._numbers.get((kind, rank, source, group))
        return [] if number is None else [number]


def gathering(size: int, num_groups: int, needs: Callable[[int, int], bool], *, returns: bool) -> tuple[Step, ...]:
    """Return the steps of a pass in which each rank gathers keys and values, one group of heads after the other.

    Parameters
    ----------
    needs : callable (rank, source) -> bool
        True if the rank attends to keys that the source holds.
    returns : bool
        The pass computes gradients of keys, which the owners of the keys collect and add.
    """
    build, ranks = _Builder(), range(size)
    for group in range(num_groups):
        before = group - NUM_BUFFERS
        for rank in ranks:
            is_free = build.number(ATTEND, rank, rank, before)
            sources = [source for source in ranks if needs(rank, source)]
            for source in sources:
                build.add(COPY, rank, source, group, is_free)
            copied = [n for source in sources for n in build.number(COPY, rank, source, group)]
            returned = [n for owner in ranks for n in build.number(TAKE, owner, rank, before)] if returns else []
            build.add(ATTEND, rank, rank, group, [*copied, *is_free, *returned])
        if returns and group > 0:  # after the copies for this group, which need not wait for gradients
            _return(build, size, group - 1, needs)
    if returns and num_groups:
        _return(build, size, num_groups - 1, needs)
    return tuple(build.steps)


def _return(build: _Builder, size: int, group: int, needs: Callable[[int, int], bool]) -> None:
    """Append the steps in which the owners of keys collect the gradients of a group, and add them."""
    for rank in range(size):
        sources = [source for source in range(size) if needs(source, rank)]
        is_free = build.number(ADD, rank, rank, group - NUM_BUFFERS)
        for source in sources:
            build.add(TAKE, rank, source, group, [*build.number(ATTEND, source, source, group), *is_free])
        build.add(ADD, rank, rank, group, [n for each in sources for n in build.number(TAKE, rank, each, group)])


def exchanging_heads(size: int, holds: Callable[[int], bool]) -> tuple[Step, ...]:
    """Return the steps of a pass in which each rank gathers all rows of its own heads, and returns rows of results.

    `holds` is true for ranks that have rows. All steps belong to one group.
    """
    build, ranks = _Builder(), range(size)
    for rank in ranks:
        for source in filter(holds, ranks):
            build.add(COPY, rank, source, 0, ())
        copied = [n for source in ranks for n in build.number(COPY, rank, source, 0)]
        build.add(ATTEND, rank, rank, 0, copied)
    for rank in filter(holds, ranks):
        for source in ranks:
            build.add(TAKE, rank, source, 0, build.number(ATTEND, source, source, 0))
    return tuple(build.steps)


def rounds(steps: Sequence[Step]) -> tuple[tuple[str, int], ...]:
    """Return kinds and groups of steps in an order in which all ranks can run them together.

    The copies of the next group start before a group is computed, and the results of a group move right after it.

    >>> rounds(gathering(2, 3, lambda rank, source: True, returns=False))
    (('copy', 0), ('copy', 1), ('attend', 0), ('copy', 2), ('attend', 1), ('attend', 2))
    """
    all_rounds = dict.fromkeys((step.kind, step.group) for step in steps)
    order = dict[tuple[str, int], None]()
    for kind, group in all_rounds:
        if kind != ATTEND:
            order.setdefault((kind, group))
            continue
        early = [each for each in all_rounds if each[0] == COPY and each not in order][:1]
        late = [each for each in ((TAKE, group),) if each in all_rounds]
        order |= dict.fromkeys([*early, (kind, group), *late])
    return tuple(order)


def finished(steps: Sequence[Step], seconds: Callable[[Step], float]) -> float:
    """Return the seconds until the last step ends, if each rank computes and receives concurrently, in order.

    >>> finished([Step(COPY, 0, 1, 0), Step(ATTEND, 0, 0, 0, (0,)), Step(COPY, 0, 1, 1)], lambda step: 2.0)
    4.0
    """
    ends, is_free = list[float](), dict[tuple[bool, int], float]()
    for step in steps:
        engine = step.kind == ATTEND, step.rank
        start = max([is_free.get(engine, 0.0), *(ends[number] for number in step.after)])
        is_free[engine] = start + seconds(step)
        ends.append(is_free[engine])
    return max(ends, default=0.0)


def head_groups(num_kv_heads: int) -> tuple[tuple[int, int], ...]:
    """Return the groups of key/value heads: 1, 1, 2, 2, ... heads, the first ones small to shorten the first copy.

    >>> head_groups(8)
    ((0, 1), (1, 2), (2, 4), (4, 6), (6, 8))
    """
    groups, first = list[tuple[int, int]](), 0
    while first < num_kv_heads:
        stop = min(first + (1 if first < 2 else 2), num_kv_heads)
        groups.append((first, stop))
        first = stop
    return tuple(groups)
