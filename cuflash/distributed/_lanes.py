"""Lanes of a rank, which run its steps and move rows; on a GPU, one stream for kernels and one for copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..executors import gpu
from ..executors.launch import PassLayout
from ..plans.plan import Plan
from ._schedule import Issue, receives

Launcher = Callable[[Sequence[Array]], None]
Event = Any  # an object that other lanes wait for; None on the host, where a step is over when it returns


class Move(NamedTuple):
    """Rows of an array of one rank, and their place in an array of another; both are [..., heads, rows, dim].

    Attributes
    ----------
    name : str
        The name of the array at its source.
    heads, to_heads : slice
        The heads in the source and in the target.
    runs : tuple of (int, int, int)
        Runs of adjacent rows: the first row in the source, the first row in the target, and the number of rows.
    """

    name: str
    heads: slice
    to_heads: slice
    runs: tuple[tuple[int, int, int], ...]

    def parts(self, target: Array, source: Array) -> list[tuple[Array, Array]]:
        """Return each run as views of the target and of the source."""
        return [
            (target[..., self.to_heads, to : to + rows, :], source[..., self.heads, first : first + rows, :])
            for first, to, rows in self.runs
        ]

    def written(self, target: Array) -> list[Array]:
        """Return the runs as views of the target alone."""
        return [target[..., self.to_heads, to : to + rows, :] for _, to, rows in self.runs]

    def read(self, source: Array) -> list[Array]:
        """Return the runs as views of the source alone."""
        return [source[..., self.heads, first : first + rows, :] for first, _, rows in self.runs]


def joint_runs(source: Array, target: Array) -> tuple[tuple[int, int, int], ...]:
    """Return the runs of rows that are adjacent in two arrays, from the ascending positions of the rows in both.

    >>> joint_runs(np.array([0, 1, 2, 3]), np.array([4, 5, 8, 9]))
    ((0, 4, 2), (2, 8, 2))
    """
    if not len(source):
        return ()
    ends = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    firsts, stops = [0, *ends.tolist()], [*ends.tolist(), len(source)]
    return tuple((int(source[n]), int(target[n]), stop - n) for n, stop in zip(firsts, stops))


class HostLanes:
    """Lanes of a rank with NumPy arrays: a step is over when it returns."""

    namespace: Any = np

    def current(self) -> Any:
        """Return a context in which the rank allocates arrays."""
        return nullcontext()

    def start(self) -> Event:
        """Return the event that other lanes wait for before they read the arrays of this rank."""
        return None

    def run(self, issue: Issue, events: Sequence[Event], do: Callable[[], None]) -> Event:
        """Run a step after these events; return the event of its end if it is awaited."""
        do()
        return None

    def bound(self, target: Array, source: Array, move: Move) -> Any:
        """Return what `copy` needs to know of a move between arrays with the layouts of these."""
        return move

    def copy(self, target: Array, source: Array, bound: Any) -> None:
        """Copy rows to this rank, from an array of any rank."""
        for own, other in bound.parts(target, source):
            own[...] = other

    def launcher(
        self, plan: Plan, name: str, arrays: Mapping[str, Array], outs: Mapping[str, Array], wholes: Sequence[Array]
    ) -> Launcher | None:  # fmt: skip
        """Return a function that runs a pass on the same parts of other arrays; None if the pass is not bound so.

        Parameters
        ----------
        plan : Plan
        name : str
            The pass.
        arrays, outs : dict of arrays by name
            The arrays that it reads and writes, each a part of an array.
        wholes : sequence of arrays
            These arrays, in the same order. The function takes arrays with their layouts.
        """
        return None

    def finish(self, events: Sequence[Event]) -> None:
        """Make later work of this rank wait for these events."""


class DeviceLanes:
    """Lanes of a rank on a GPU: its current stream for kernels, and a separate stream for copies of peer memory.

    Copies from peers use the copy engines, so that kernels keep all multiprocessors. Copies within a GPU do not: they
    would wait until a kernel leaves multiprocessors, so that they are queued among the kernels. The host never waits:
    streams wait for events of other streams, including those on other GPUs. Any thread may run the steps of a rank.

    Attributes
    ----------
    device : int
        The number of the GPU.
    """

    def __init__(self, device: int, devices: Sequence[int]) -> None:
        self.device, self.namespace = device, gpu.namespace()
        cuda = self._cuda = self.namespace.cuda
        with cuda.Device(device):
            self._copies = cuda.Stream(non_blocking=True)
            for peer in {*devices} - {device}:
                _enable_access(cuda.runtime, device, peer)
        self._kernels: Any = None
        self._stream = self._copies  # of the step that is being queued
        self._events: dict[int, Event] = {}  # by number of the step; recorded by each pass

    def current(self) -> Any:
        return self._cuda.Device(self.device)

    def start(self) -> Event:
        self._kernels = self._cuda.get_current_stream()
        return self._kernels.record(self._event(-1))

    def run(self, issue: Issue, events: Sequence[Event], do: Callable[[], None]) -> Event:
        if receives(issue.step):
            return self._queue(self._copies, issue, events, do)
        with self._cuda.Device(self.device), self._kernels:
            return self._queue(self._kernels, issue, events, do)

    def _queue(self, stream: Any, issue: Issue, events: Sequence[Event], do: Callable[[], None]) -> Event:
        for event in events:
            stream.wait_event(event)
        self._stream = stream
        do()
        return stream.record(self._event(issue.number)) if issue.is_awaited else None

    def bound(self, target: Array, source: Array, move: Move) -> Any:
        """Return the copies of a move, one for each run of rows and batch entry: offsets, pitches, width and height.

        All heads of a run are one copy; the elements of a row must be adjacent.
        """
        row = target.shape[-1] * target.dtype.itemsize
        heads = len(range(*move.heads.indices(source.shape[-3])))
        to_first, from_first = move.to_heads.start or 0, move.heads.start or 0
        return [
            (
                _offset(target, (*entry, to_first)) + to * row, max(target.strides[-3], rows * row),
                _offset(source, (*entry, from_first)) + first * row, max(source.strides[-3], rows * row),
                rows * row, heads,
            )
            for entry in itertools.product(*map(range, target.shape[:-3])) if heads
            for first, to, rows in move.runs
        ]  # fmt: skip

    def copy(self, target: Array, source: Array, bound: Any) -> None:
        copy, kind, stream = self._cuda.runtime.memcpy2DAsync, self._cuda.runtime.memcpyDefault, self._stream.ptr
        to, start = target.data.ptr, source.data.ptr
        for to_offset, to_pitch, offset, pitch, width, height in bound:
            copy(to + to_offset, to_pitch, start + offset, pitch, width, height, kind, stream)

    def launcher(
        self, plan: Plan, name: str, arrays: Mapping[str, Array], outs: Mapping[str, Array], wholes: Sequence[Array]
    ) -> Launcher | None:  # fmt: skip
        """Return a function that launches a pass; None if it does more than to launch kernels."""
        if not plan._is_launches_alone(name, outs):
            return None
        parts = [*arrays.values(), *outs.values()]
        bound = gpu.bound_pass(plan._plan, PassLayout(name, {**plan._plan.problem.keyed(arrays), **outs}, {}))
        zeroed, numbers, set_memory = bound.record.zeroed, plan._numbers, self._cuda.runtime.memsetAsync
        if not all(parts[place].flags.c_contiguous for place, _ in zeroed):
            return None
        offsets = [part.data.ptr - whole.data.ptr for part, whole in zip(parts, wholes)]

        def launch(wholes: Sequence[Array]) -> None:
            addresses = [whole.data.ptr + offset for whole, offset in zip(wholes, offsets)]
            for place, nbytes in zeroed:
                set_memory(addresses[place], 0, nbytes, self._kernels.ptr)
            bound.launch([*addresses, *numbers], self._kernels)

        return launch

    def finish(self, events: Sequence[Event]) -> None:
        with self._cuda.Device(self.device):  # whose default stream the kernels may use
            for event in events:
                self._kernels.wait_event(event)

    def _event(self, number: int) -> Event:
        """Return the event of a step, which each pass records once more; waits that are queued are not affected."""
        event = self._events.get(number)
        if event is None:
            with self._cuda.Device(self.device):
                event = self._events[number] = self._cuda.Event(disable_timing=True)
        return event


def _offset(array: Array, index: tuple[int, ...]) -> int:
    """Return the bytes from the start of an array to the element at an index of its first axes."""
    return sum(n * stride for n, stride in zip(index, array.strides))


Lanes = HostLanes | DeviceLanes


def _enable_access(runtime: Any, device: int, peer: int) -> None:
    """Let kernels and copies of a device access another's memory if the hardware can; otherwise, copies are staged."""
    if not runtime.deviceCanAccessPeer(device, peer):
        return
    try:
        runtime.deviceEnablePeerAccess(peer)
    except runtime.CUDARuntimeError as error:
        if "AlreadyEnabled" not in str(error):
            raise


def device_count() -> int:
    """Return the number of GPUs that CuPy can use; 0 without CuPy."""
    try:
        return int(gpu.namespace().cuda.runtime.getDeviceCount())
    except Exception:  # CuPy is missing, broken, or finds no driver
        return 0
