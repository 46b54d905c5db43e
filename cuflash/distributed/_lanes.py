"""Lanes of a rank, which run its steps and move rows; on a GPU, each lane is a stream."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import EllipsisType, ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..arrays import Array, Namespace
from ..executors import gpu
from ..executors._results import bound_row_sums
from ..executors.launch import BoundPass, PassLayout
from ..plans.plan import Plan
from ._schedule import RECEIVING, Issue

Arrays = Mapping[str, Array]
_CURRENT = nullcontext()  # the current stream
Event = Any  # an object that other lanes wait for; None on the host, where a step is over when it returns


class Addresses(dict[str, int]):
    """Addresses of a pass's device arrays by name, each of which is looked up once; the name "" has the address 0."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__({"": 0})
        self._arrays = arrays

    def __missing__(self, name: str) -> int:
        address: int = self._arrays[name].data.ptr
        self[name] = address
        return address


class Arranged(Protocol):
    """A pass of a rank, with the arrays that steps read and write, by name."""

    @property
    def arrays(self) -> Arrays: ...

    @property
    def addresses(self) -> Addresses: ...

    def do(self, number: int, source: Arranged) -> None:
        """Run a step of this rank that reads arrays of another, or of this one."""


# Takes the passes of the rank that runs a step, and of the rank whose rows it reads.
Task = Callable[[Arranged, Arranged], None]


class Region(NamedTuple):
    """A part of an array of a pass.

    Attributes
    ----------
    name : str
        The name of the array.
    where : tuple
        The index of the part.
    start, shape : int, tuple of int
        If there is a shape, the array has one axis, and its elements from `start` on, in this shape, are indexed.
    """

    name: str
    where: tuple[int | slice | EllipsisType, ...] = (...,)
    start: int = 0
    shape: tuple[int, ...] = ()

    def of(self, arrays: Arrays) -> Array:
        whole = arrays[self.name]
        if self.shape:
            whole = whole[self.start : self.start + math.prod(self.shape)].reshape(self.shape)
        return whole[self.where]


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

    def written(self, target: Array) -> list[Array]:
        """Return the runs as views of the target."""
        return [target[..., self.to_heads, to : to + rows, :] for _, to, rows in self.runs]

    def read(self, source: Array) -> list[Array]:
        """Return the runs as views of the source."""
        return [source[..., self.heads, first : first + rows, :] for first, _, rows in self.runs]


Route = tuple[Move, Region, Region]  # rows, and the parts of arrays to which and from which they move


class RowSums(NamedTuple):
    """Rows of two arrays, each the sum of rows of other arrays in a fixed order, or zero.

    Attributes
    ----------
    pairs : tuple of (Region, Region, Region)
        For each of the two arrays [..., heads, rows, dim]: where it is written, and where own and received terms are.
    table : int32 array [rows, 1 + terms]
        A row that is written, and its terms in order: own rows, then received rows after all own ones, -1 for none.
    """

    pairs: tuple[tuple[Region, Region, Region], ...]
    table: Array


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

    namespace: Namespace = np
    kernels: Any = nullcontext()

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which the rank allocates arrays."""
        return nullcontext()

    def start(self) -> Event:
        """Return the event that other lanes wait for before they read the arrays of this rank."""
        return None

    def run(self, issue: Issue, events: Mapping[int, Event], passes: Sequence[Arranged]) -> Event:
        """Run a step of the passes of all ranks after its events; return the event of its end if it is awaited."""
        passes[issue.step.rank].do(issue.number, passes[issue.step.source])
        return None

    def copier(self, routes: Sequence[Route], mine: Arrays, theirs: Arrays) -> Task:
        """Return a function that copies rows to this rank, for arrays with the layouts of these."""

        def copy(own: Arranged, other: Arranged) -> None:
            for move, to, start in routes:
                for target, source in zip(move.written(to.of(own.arrays)), move.read(start.of(other.arrays))):
                    target[...] = source

        return copy

    def sent(self, table: Array) -> Array:
        """Return a table where the arrays of the rank are."""
        return table

    def adder(self, sums: RowSums, arrays: Arrays) -> Task:
        """Return a function that writes rows as sums of rows, for arrays with the layouts of these."""
        terms = [(np.flatnonzero(places >= 0), places[places >= 0]) for places in sums.table.T[1:]]

        def add(own: Arranged, other: Arranged) -> None:
            for to, *sources in sums.pairs:
                target, rows = to.of(own.arrays), np.concatenate([each.of(own.arrays) for each in sources], axis=-2)
                total = np.zeros((*target.shape[:-2], len(sums.table), target.shape[-1]), rows.dtype)
                for n, (written, places) in enumerate(terms):
                    term = rows[..., places, :]
                    total[..., written, :] = total[..., written, :] + term if n else term  # 0 + -0 would be 0
                target[..., sums.table[:, 0], :] = total

        return add

    def launcher(
        self, plan: Plan, name: str, inputs: Mapping[str, Region], outs: Mapping[str, Region], arrays: Arrays
    ) -> Task | None:  # fmt: skip
        """Return a function that runs a pass on these parts of arrays; None if it does more than to launch kernels.

        Parameters
        ----------
        plan : Plan
        name : str
            The pass.
        inputs, outs : dict of Region by name
            What it reads and writes.
        arrays : dict of arrays by name
            The function takes arrays with their layouts.
        """
        return None

    def finish(self, events: Sequence[Event]) -> None:
        """Make later work of this rank wait for these events."""


class CudaLanes(HostLanes):
    """Lanes of a rank with CuPy arrays on its current device, all of which are its current stream.

    Attributes
    ----------
    kernels : cupy.cuda.Stream
        The current stream of the rank.
    stream : cupy.cuda.Stream
        The stream of the step that is being queued.
    """

    def __init__(self) -> None:
        self.namespace = gpu.namespace()
        self._cuda = self.namespace.cuda

    def start(self) -> Event:
        self.kernels = self.stream = self._cuda.get_current_stream()
        return None

    def sent(self, table: Array) -> Array:
        on_device = self.namespace.asarray(table)
        self._cuda.get_current_stream().synchronize()  # later calls may run on other streams
        return on_device

    def adder(self, sums: RowSums, arrays: Arrays) -> Task:
        parts = [[each.of(arrays) for each in pair] for pair in sums.pairs]
        bound = bound_row_sums(parts, sums.table, gpu.current_target())
        written, *terms = zip(*([_place(each, arrays) for each in pair] for pair in sums.pairs))
        table = "", sums.table.data.ptr  # which the prepared calls of the rank keep
        return self._launching(bound, [*itertools.chain(*zip(*terms)), table, *written])

    def launcher(
        self, plan: Plan, name: str, inputs: Mapping[str, Region], outs: Mapping[str, Region], arrays: Arrays
    ) -> Task | None:  # fmt: skip
        if not plan._is_launches_alone(name, outs):
            return None
        regions = {**inputs, **outs}
        parts = {each: region.of(arrays) for each, region in regions.items()}
        bound = gpu.bound_pass(plan._plan, PassLayout(name, plan._plan.problem.keyed(parts), {}))
        if bound.record.zeroed:
            return None
        return self._launching(bound, [_place(region, arrays) for region in regions.values()], plan._numbers)

    def _launching(self, bound: BoundPass, places: Sequence[tuple[str, int]], numbers: Sequence[int] = ()) -> Task:
        """Return a function that launches kernels on parts of arrays, and with numbers, on the stream of its step."""

        def launch(own: Arranged, other: Arranged) -> None:
            start_of = own.addresses
            addresses = [start_of[name] + offset for name, offset in places]
            addresses += numbers
            bound.launch(addresses, self.stream)

        return launch


class DeviceLanes(CudaLanes):
    """Lanes of a rank on a GPU: its current stream and another one for kernels, and one for copies of peer memory.

    Copies from peers use the copy engines, so that kernels keep all multiprocessors. Copies within a GPU do not: they
    would wait until a kernel leaves multiprocessors, so that they are queued among the kernels. The host never waits:
    streams wait for events of other streams, including those on other GPUs. Any thread may run the steps of a rank.

    Attributes
    ----------
    device : int
        The number of the GPU.
    """

    def __init__(self, device: int, devices: Sequence[int]) -> None:
        super().__init__()
        self.device, cuda = device, self._cuda
        with cuda.Device(device):
            self._streams = {lane: cuda.Stream(non_blocking=True) for lane in range(1, RECEIVING + 1)}
            for peer in {*devices} - {device}:
                _enable_access(cuda.runtime, device, peer)
            # by number of the step; each pass records them once more, which does not affect waits that are queued
            self._events = defaultdict[int, Event](partial(cuda.Event, disable_timing=True))
            self._start = self._events[-1]
            self.stream = self._streams[RECEIVING]

    def current(self) -> AbstractContextManager[object]:
        device: AbstractContextManager[object] = self._cuda.Device(self.device)
        return device

    def start(self) -> Event:
        super().start()
        return self.kernels.record(self._start)

    def run(self, issue: Issue, events: Mapping[int, Event], passes: Sequence[Arranged]) -> Event:
        lane = issue.lane
        stream = self.stream = self._streams[lane] if lane else self.kernels
        for number in issue.waits:
            stream.wait_event(events[number])
        with stream if 0 < lane < RECEIVING else _CURRENT:  # memory that a step allocates belongs to its stream
            super().run(issue, events, passes)
        return stream.record(self._events[issue.number]) if issue.is_awaited else None

    def copier(self, routes: Sequence[Route], mine: Arrays, theirs: Arrays) -> Task:
        """Return a function that queues copies: as few as possible, each of adjacent rows of heads at equal distances.

        The elements of a row must be adjacent.
        """
        copies, following = list[list[Any]](), dict[Any, list[Any]]()
        for move, to, start in routes:
            for target, source in zip(move.written(to.of(mine)), move.read(start.of(theirs))):
                width, height = target.shape[-2] * target.shape[-1] * target.dtype.itemsize, target.shape[-3]
                pitches = [max(each.strides[-3], width) for each in (target, source)]
                for entry in np.ndindex(target.shape[:-3]) if target.size else ():
                    at = target[entry].data.ptr - mine[to.name].data.ptr
                    begin = source[entry].data.ptr - theirs[start.name].data.ptr
                    kind = to.name, start.name, width, *pitches
                    copied = following.pop((kind, at, begin), None)
                    if copied is None:
                        copied = [to.name, at, pitches[0], start.name, begin, pitches[1], width, 0]
                        copies.append(copied)
                    copied[-1] += height
                    following[kind, at + height * pitches[0], begin + height * pitches[1]] = copied
        copy_rows, kind_of_copy = self._cuda.runtime.memcpy2DAsync, self._cuda.runtime.memcpyDefault

        def copy(own: Arranged, other: Arranged) -> None:
            start_of, start_of_source, stream = own.addresses, other.addresses, self.stream.ptr
            for to_name, at, to_pitch, name, begin, pitch, width, height in copies:
                target, source = start_of[to_name] + at, start_of_source[name] + begin
                copy_rows(target, to_pitch, source, pitch, width, height, kind_of_copy, stream)

        return copy

    def finish(self, events: Sequence[Event]) -> None:
        with self._cuda.Device(self.device):  # whose default stream the kernels may use
            for event in events:
                self.kernels.wait_event(event)


def _place(region: Region, arrays: Arrays) -> tuple[str, int]:
    """Return the name of an array, and the bytes from its start to that of a part of it."""
    return region.name, region.of(arrays).data.ptr - arrays[region.name].data.ptr


def _enable_access(runtime: ModuleType, device: int, peer: int) -> None:
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
