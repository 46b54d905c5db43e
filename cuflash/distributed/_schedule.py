"""The steps of a call on all ranks, each with the steps that it waits for: data without arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

COPY, ATTEND, TAKE, ADD = "copy", "attend", "take", "add"
NUM_BUFFERS = 2  # a rank copies the next group while it computes one
RECEIVING = NUM_BUFFERS  # the number of a lane
_MOST_GROUPS = 8  # maximum number of groups of heads of equal size


class Step(NamedTuple):
    """A step of a call.

    Attributes
    ----------
    kind : str
        "copy" moves the inputs of a group to a rank, "attend" puts the rank's own keys in place and computes the group,
        "take" moves results of a group from the rank that computed them, and "add" sums these and its own in the order
        of ranks.
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
            sources = [source for source in ranks if source != rank and needs(rank, source)]
            for source in sources:
                build.add(COPY, rank, source, group, is_free)
            copied = [n for source in sources for n in build.number(COPY, rank, source, group)]
            owners = ranks if returns else ()
            returned = [n for owner in owners for n in build.number(TAKE, owner, rank, before)]
            returned += build.number(ADD, rank, rank, before)
            build.add(ATTEND, rank, rank, group, [*copied, *is_free, *returned])
        if returns and group > 0:  # after the copies for this group, which need not wait for gradients
            _return(build, size, group - 1, needs)
    if returns and num_groups:
        _return(build, size, num_groups - 1, needs)
    return tuple(build.steps)


def _return(build: _Builder, size: int, group: int, needs: Callable[[int, int], bool]) -> None:
    """Append the steps in which the owners of keys collect the gradients of a group, and add them."""
    for rank in range(size):
        sources = [source for source in range(size) if source != rank and needs(source, rank)]
        is_free = build.number(ADD, rank, rank, group - NUM_BUFFERS)
        for source in sources:
            build.add(TAKE, rank, source, group, [*build.number(ATTEND, source, source, group), *is_free])
        take_numbers = [n for each in sources for n in build.number(TAKE, rank, each, group)]
        build.add(ADD, rank, rank, group, [*build.number(ATTEND, rank, rank, group), *take_numbers])


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


class Issue(NamedTuple):
    """A step as its rank's lane gets it.

    Attributes
    ----------
    number : int
        The number of the step.
    step : Step
    lane : int
        The number of its lane among those of its rank.
    waits : tuple of int
        Numbers of the events for which the lane waits first: those of steps of other lanes, and ~rank of the ranks
        whose arrays must be ready.
    is_awaited : bool
        True if another lane waits for the event of the step.
    """

    number: int
    step: Step
    lane: int
    waits: tuple[int, ...]
    is_awaited: bool


class Program(NamedTuple):
    """The steps of all ranks in one order, in which a single thread issues them to the lanes of ranks.

    A rank has several lanes, which run their steps in order: `RECEIVING` for rows that it receives, and the lanes
    before it for computations and copies of its own rows, by groups in turn. At the end of a group, few multiprocessors
    have work; the next group is on another lane and uses the rest. Lane 0 is the current stream of the rank.

    Attributes
    ----------
    turns : tuple of (int, tuple of Issue)
        Ranks in turn, each with steps that it runs before the next rank has its turn.
    ends : tuple of tuples of int
        For each rank, the steps for whose events lane 0 waits at the end, because they use its arrays on other lanes.
    """

    turns: tuple[tuple[int, tuple[Issue, ...]], ...]
    ends: tuple[tuple[int, ...], ...]


def program(steps: Sequence[Step], size: int, order: Sequence[int] | None = None) -> Program:
    """Return the steps in an order, each with the events that its lane waits for, without those that are implied.

    Parameters
    ----------
    order : sequence of int, optional
        Numbers of all steps, each after the steps that it waits for. Default: 0, 1, 2, ...

    >>> issued = program([Step(COPY, 0, 1, 0), Step(COPY, 0, 0, 0), Step(ATTEND, 0, 0, 0, (0, 1))], 2)
    >>> [(each.waits, each.is_awaited) for each in issued.turns[0][1]], issued.ends
    ([((-1, -2), True), ((), False), ((0,), False)], ((), (0,)))
    """
    order = range(len(steps)) if order is None else order
    place = {number: n for n, number in enumerate(order)}
    known, awaited = dict[tuple[Hashable, Hashable], int](), set[int]()
    drafts, ends = list[tuple[int, list[int]]](), [dict[tuple[int, int], int]() for _ in range(size)]
    for number in order:
        step = steps[number]
        lane, waits = lane_of(step), list[int]()
        if lane[1]:
            for rank in dict.fromkeys((step.rank, step.source if step.kind == COPY else step.rank)):
                if known.setdefault((lane, rank), number) == number:
                    waits.append(~rank)
            ends[step.rank][lane] = ends[step.source][lane] = number
        for other in sorted(step.after, key=place.__getitem__, reverse=True):
            of_other = lane_of(steps[other])
            if of_other != lane and known.get((lane, of_other), -1) < place[other]:
                known[lane, of_other] = place[other]
                waits.append(other)
        awaited.update(waits)
        drafts.append((number, waits))
    last = tuple(
        tuple(sorted(n for lane, n in of_lanes.items() if known.get(((rank, 0), lane), -1) < place[n]))
        for rank, of_lanes in enumerate(ends)
    )
    awaited.update(number for each in last for number in each)
    issues = [Issue(n, steps[n], lane_of(steps[n])[1], tuple(waits), n in awaited) for n, waits in drafts]
    turns = groupby(issues, key=lambda each: each.step.rank)
    return Program(tuple((rank, tuple(each)) for rank, each in turns), last)


def lane_of(step: Step) -> tuple[int, int]:
    """Return the lane that runs a step: its rank, and the number of the lane."""
    return step.rank, RECEIVING if step.rank != step.source else step.group % NUM_BUFFERS


def drawn_order(steps: Sequence[Step], choose: Callable[[list[int]], int]) -> list[int]:
    """Return the numbers of all steps in an order in which each is chosen from those that are ready."""
    order, left = list[int](), dict.fromkeys(range(len(steps)))
    while left:
        order.append(choose([number for number in left if left.keys().isdisjoint(steps[number].after)]))
        del left[order[-1]]
    return order


def finished(steps: Sequence[Step], seconds: Sequence[float], issue: Sequence[float]) -> float:
    """Return the seconds until the last step ends, if each rank computes and receives concurrently, in order.

    `seconds` has the time of each step, and `issue` that of the host to queue it, which it does one after the other.

    >>> finished([Step(COPY, 0, 1, 0), Step(ATTEND, 0, 0, 0, (0,)), Step(COPY, 0, 1, 1)], [2.0] * 3, [0.0] * 3)
    4.0
    >>> finished([Step(COPY, 0, 1, 0), Step(ATTEND, 0, 0, 0, (0,))], [2.0, 2.0], [3.0, 3.0])
    8.0
    """
    ends, is_free, queued = list[float](), dict[tuple[int, bool], float](), 0.0
    for step, spent, of_host in zip(steps, seconds, issue):
        engine, queued = (step.rank, step.rank != step.source), queued + of_host  # computations share one
        start = max([is_free.get(engine, 0.0), queued, *(ends[number] for number in step.after)])
        is_free[engine] = start + spent
        ends.append(is_free[engine])
    return max(ends, default=0.0)


def head_groups(num_kv_heads: int) -> list[tuple[tuple[int, int], ...]]:
    """Return ways to divide key/value heads into groups, those with small groups first.

    The first and the last group may be smaller than those between, since no computation hides the first copy and the
    last return of gradients.

    >>> [[stop - first for first, stop in groups] for groups in head_groups(4)]
    [[1, 1, 1, 1], [1, 2, 1], [2, 2], [4]]
    """
    ways = dict[tuple[int, ...], None]()
    for most in (1 << n for n in range(num_kv_heads.bit_length()) if _MOST_GROUPS << n >= num_kv_heads):
        for end in dict.fromkeys((max(1, most // 4), max(1, most // 2), most)):
            if (between := num_kv_heads - 2 * end) >= 0:
                full, rest = divmod(between, most)
                ways[tuple(filter(None, (end, *[most] * full, rest, end)))] = None
    ways[(num_kv_heads,)] = None
    ordered = sorted(ways, key=lambda way: (max(way), -len(way)))
    return [tuple(pairwise(accumulate(way, initial=0))) for way in ordered]
