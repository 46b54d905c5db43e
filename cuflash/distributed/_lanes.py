"""Lanes of a rank, which run its steps and move rows; on a GPU, one stream for kernels and one for copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..executors import gpu
from ._schedule import COPY, TAKE, Step

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
    """Steps of a rank with NumPy arrays: a step is over when it returns."""

    namespace: Any = np

    def current(self) -> Any:
        """Return a context in which the rank allocates arrays."""
        return nullcontext()

    def start(self) -> Event:
        """Return the event that other lanes wait for before they read the arrays of this rank."""
        return None

    def run(self, step: Step, events: Sequence[Event], do: Callable[[], None]) -> Event:
        """Run a step after these events, and return the event of its end."""
        do()
        return None

    def copy(self, target: Array, source: Array, move: Move) -> None:
        """Copy rows to this rank."""
        for own, other in move.parts(target, source):
            own[...] = other

    def finish(self, events: Sequence[Event]) -> None:
        """Make later work of this rank wait for these events."""


class DeviceLanes:
    """Steps of a rank on a GPU: kernels on its current stream, and copies of peer memory on a separate stream.

    Copies use the copy engines, so that kernels keep all multiprocessors. The host never waits: streams wait for
    events of other streams, including those on other GPUs.

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

    def current(self) -> Any:
        return self._cuda.Device(self.device)

    def start(self) -> Event:
        self._kernels = self._cuda.get_current_stream()
        return self._recorded(self._kernels)

    def run(self, step: Step, events: Sequence[Event], do: Callable[[], None]) -> Event:
        stream = self._copies if step.kind in (COPY, TAKE) else self._kernels
        for event in events:
            stream.wait_event(event)
        do()
        return self._recorded(stream)

    def copy(self, target: Array, source: Array, move: Move) -> None:
        """Queue one copy of all heads per run of rows and batch entry; the elements of a row must be adjacent."""
        copy, kind = self._cuda.runtime.memcpy2DAsync, self._cuda.runtime.memcpyDefault
        itemsize, stream = target.dtype.itemsize, self._copies.ptr
        heads = len(range(*move.heads.indices(source.shape[-3])))
        row = target.shape[-1] * itemsize
        to_head, from_head = (x.strides[-3] for x in (target, source))
        if not heads:
            return
        for entry in itertools.product(*map(range, target.shape[:-3])):
            to, start = (
                x.data.ptr + sum(n * stride for n, stride in zip(entry, x.strides)) + (each.start or 0) * x.strides[-3]
                for x, each in ((target, move.to_heads), (source, move.heads))
            )
            for first, place, rows in move.runs:
                width = rows * row
                copy(
                    to + place * row, max(to_head, width), start + first * row, max(from_head, width), width, heads,
                    kind, stream,
                )  # fmt: skip

    def finish(self, events: Sequence[Event]) -> None:
        for event in events:
            self._kernels.wait_event(event)

    def _recorded(self, stream: Any) -> Event:
        return stream.record(self._cuda.Event(disable_timing=True))


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
