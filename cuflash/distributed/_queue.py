"""The calls of CUDA by which one thread queues a pass of all ranks: recorded once, and repeated for other arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..executors.arguments import Buffer, Place
from ._lanes import Arranged, Call, Copies, DeviceLanes, Event, Launching, Task, Turn
from ._schedule import Issue, Program


class Queue:
    """The calls of CUDA of one pass on all ranks, in order, for arrays of one layout.

    Passes differ in the addresses of their arrays alone, which are written into the arguments of all kernels at once.

    Attributes
    ----------
    key : list
        The program, what each rank keeps for its passes, and the current stream of each.

    Parameters
    ----------
    visit : object
        Its attribute `rank` becomes the rank whose steps are being prepared.
    """

    def __init__(
        self, key: list[Any], issued: Program, passes: Sequence[Arranged], lanes: Sequence[Any], visit: Any
    ) -> None:
        self.key, self._passes, self._turns = key, passes, list[Turn]()
        self._arrays = dict[tuple[int, str], int]()  # their numbers, by rank and name
        self._places, self._ends = list[tuple[int, int, int]](), list[tuple[int, int]]()
        self._words, self._kernels = [np.zeros(0, np.uint64)], list[list[slice]]()
        self._launches = list[Any]()
        events: dict[int, Event] = {~rank: each.events[-1] for rank, each in enumerate(lanes)}
        for rank, issues in issued.turns:
            visit.rank = rank
            with lanes[rank].current(), lanes[rank].kernels:
                calls = [call for issue in issues for call in self._calls(issue, lanes[rank], events)]
            self._turns.append((rank, calls))
        for rank, numbers in enumerate(issued.ends):
            self._turns.append((rank, [(lanes[rank].kernels.wait_event, (events[number],)) for number in numbers]))
        self._turns.append((0, [(self._forget, ())]))
        self._buffer = Buffer(np.concatenate(self._words), self._kernels)
        self._all_words = np.frombuffer(self._buffer.words, np.int64)
        self._set = np.array([word for word, _, _ in self._places], np.int64)
        ends = [*((array, offset) for _, array, offset in self._places), *self._ends]
        self._of, self._offsets = np.array(ends, np.int64).reshape(-1, 2).T

    def of(self, passes: Sequence[Arranged]) -> Sequence[Turn]:
        """Return the calls of each rank in turn for these passes of all ranks."""
        self._passes = passes
        starts = [passes[rank].arrays[name].data.ptr for rank, name in self._arrays]
        addresses = np.array(starts, np.int64)[self._of] + self._offsets
        self._all_words[self._set] = addresses[: len(self._set)]
        self._addresses = addresses[len(self._set) :].tolist()
        return self._turns

    def _forget(self) -> None:
        """Release the arrays of the passes."""
        self._passes = ()

    def _number(self, rank: int, name: str) -> int:
        return self._arrays.setdefault((rank, name), len(self._arrays))

    def _calls(self, issue: Issue, lanes: DeviceLanes, events: dict[int, Event]) -> Iterator[Call]:
        """Yield the calls of a step."""
        step, stream = issue.step, lanes.stream_of(issue.lane)
        for number in issue.waits:
            yield stream.wait_event, (events[number],)
        for task in self._passes[step.rank].tasks(issue.number, self._passes[step.source]):
            if isinstance(task, Copies):
                for to_name, at, name, begin, *sizes in task.rows:
                    yield self._copy, (task.copy, len(self._ends), *sizes, task.kind, stream.ptr)
                    self._ends.append((self._number(step.rank, to_name), at))
                    self._ends.append((self._number(step.source, name), begin))
            elif isinstance(task, Launching):
                yield self._launch, (self._added(task, step.rank), stream)
            else:
                yield self._run, (task, step.rank, step.source, stream)
        if issue.is_awaited:
            events[issue.number] = lanes.events[issue.number]
            yield stream.record, (events[issue.number],)

    def _copy(self, copy: Any, end: int, to_pitch: int, pitch: int, *others: int) -> None:
        copy(self._addresses[end], to_pitch, self._addresses[end + 1], pitch, *others)

    def _run(self, task: Task, rank: int, source: int, stream: Any) -> None:
        with stream:  # to which memory belongs that the task allocates
            task(self._passes[rank], self._passes[source])

    def _added(self, task: Launching, rank: int) -> int:
        """Add the arguments of kernels to those of all kernels; return the number of the launch."""
        bound, first, own = task.bound, sum(map(len, self._words)), list[Place]()
        words = bound.record.words.copy()
        known = [*task.places, *(("", number) for number in task.numbers)]
        for word, offset, number in bound.record.places:
            if number >= len(known):
                own.append(Place(first + word, offset, number - len(known)))
                continue
            name, start = known[number]
            if name:
                self._places.append((first + word, self._number(rank, name), start + offset))
            else:
                words[word] = start + offset
        kernels = range(len(self._kernels), len(self._kernels) + len(bound.starts))
        for kernel in bound.record.kernels:
            self._kernels.append([slice(first + each.start, first + each.stop) for each in kernel.arguments])
        self._words.append(words)
        self._launches.append((bound, own, kernels))
        return len(self._launches) - 1

    def _launch(self, number: int, stream: Any) -> None:
        bound, places, kernels = self._launches[number]
        for use in bound.uses:
            use(stream)
        if bound.workspaces is not None:
            with stream:
                taken = bound.workspaces.take(stream)
            for word, offset, workspace in places:
                self._buffer.words[word] = taken.addresses[workspace] + offset
        for start, kernel in zip(bound.starts, kernels):
            start(self._buffer.kernels[kernel], stream)
        if bound.workspaces is not None:
            bound.workspaces.give_back(stream, taken)
