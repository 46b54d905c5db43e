"""The `gpu` executor on buffers of XLA: XLA provides the memory, workspaces included, and the stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..blocks.work_list import WorkList
from ..compiler import nvrtc
from ..layouts import dense_strides
from ..planning.launches import Workspace
from ..planning.list_kernels import AT_CALL
from ..planning.plan import KernelPlan
from . import gpu
from ._records import View
from .launch import BoundPass
from .list_maker import ListMaker
from .workspaces import Taken, kept_bytes

_ALIGNMENT = 256  # alignment in bytes of each part of a scratch buffer


def address(buffer: Any) -> int:
    """Return the address of a buffer's first element; DLPack would take twice as long."""
    return int(buffer.__cuda_array_interface__["data"][0])


class XlaStream(NamedTuple):
    """A stream of XLA during a call, with the workspaces of the call.

    Attributes
    ----------
    ptr : int
        The address of the CUDA stream.
    workspace : int
        The address of the workspaces.
    """

    ptr: int
    workspace: int

    def is_capturing(self) -> bool:
        """Return False: XLA does not record calls into Python in a graph."""
        return False

    def record(self, event: Any) -> Any:
        """Record an event on the stream."""
        return as_cupy_stream(self.ptr).record(event)


class _Workspaces:
    """Workspaces in one piece of memory that comes with the stream, except those that must be zero.

    Workspaces that must be zero are zero again after the kernels, so each stream keeps an array for each of them.
    """

    def __init__(self, needs: Mapping[str, Workspace], machine: XlaGpu) -> None:
        sizes = [0 if need.is_zeroed else -(-need.nbytes // _ALIGNMENT) * _ALIGNMENT for need in needs.values()]
        *self._starts, self.nbytes = accumulate(sizes, initial=0)
        self._machine = machine
        zeroed = [(place, kept_bytes(need)) for place, need in enumerate(needs.values()) if need.is_zeroed]
        self._zeros = [
            (place, nbytes, machine.kept_zeros(number, nbytes)) for number, (place, nbytes) in enumerate(zeroed)
        ]

    def take(self, stream: XlaStream) -> Taken:
        """Return the addresses of the workspaces of a call on a stream."""
        addresses = [stream.workspace + start for start in self._starts]
        for place, nbytes, by_stream in self._zeros:
            zeros = by_stream.get(stream.ptr)
            if zeros is None:
                with as_cupy_stream(stream.ptr):
                    zeros = by_stream.setdefault(stream.ptr, self._machine.lasting(nbytes))
            addresses[place] = zeros.address
        return Taken(addresses, [])

    def give_back(self, stream: XlaStream, taken: Taken) -> None:
        """Return immediately: the memory belongs to XLA."""


def _set_zero(start: int, nbytes: int, stream: int) -> None:
    gpu.namespace().cuda.runtime.memsetAsync(start, 0, nbytes, stream)


class XlaGpu(gpu.Gpu):
    """The current CUDA device, which runs kernels on buffers and streams of XLA."""

    def workspaces(self, needs: Mapping[str, Workspace]) -> Any:
        return _Workspaces(needs, self)

    def device_lists(self, work: WorkList) -> Any:
        """Return lists on the device after waiting, once, for their copy."""
        device_lists = super().device_lists(work)
        if device_lists is not None:
            device_lists.wait_until_copied()
        return device_lists


MACHINE = XlaGpu()


class _OnDevice(NamedTuple):
    """The launches of a pass on one device, and those that list the mask before them."""

    launches: BoundPass
    maker: ListMaker | None
    workspace_bytes: int


class XlaPass:
    """A pass of a plan on dense buffers of XLA, for any device of the plan's kind.

    Attributes
    ----------
    scratch_bytes : int
        Memory that each call needs in addition to its arrays and results.

    Parameters
    ----------
    plan : KernelPlan
    name : str
        The pass.
    inputs : sequence of View
        The layouts of the arrays, with the names that executors use.
    has_lists : bool
        True if kernels build the lists of the mask from its arrays at each call.
    """

    def __init__(self, plan: KernelPlan, name: str, inputs: Sequence[View], has_lists: bool) -> None:
        self._plan, self._name, self._inputs, self._has_lists = plan, name, inputs, has_lists
        self._on_devices: dict[int, _OnDevice] = {}
        self._lock = threading.Lock()
        bound = self._on_device(nvrtc.current_number())
        self._lists_start = bound.workspace_bytes
        self.scratch_bytes = bound.workspace_bytes + (0 if bound.maker is None else self._source.nbytes)

    @property
    def _source(self) -> Any:
        return self._plan.work.source  # type: ignore[union-attr]

    def _on_device(self, number: int) -> _OnDevice:
        """Return the launches on the current device, whose number is `number`."""
        with self._lock:
            if number not in self._on_devices:
                self._on_devices[number] = self._bound()
            return self._on_devices[number]

    def _bound(self) -> _OnDevice:
        inputs: dict[str, Any] = {view.name: view for view in self._inputs}
        maker = None
        if self._has_lists:
            source = self._source
            inputs[AT_CALL] = View(AT_CALL, np.dtype(np.uint8), (source.nbytes,), (1,))
            if self._plan.work.carried is not source:  # type: ignore[union-attr]
                gpu.compile_kernels(source.kernels.specs.values(), MACHINE)
                maker = ListMaker(source, MACHINE)
        results = self._plan.kernel_results(self._name)
        launches = gpu.bound_pass(self._plan, self._name, inputs, results, machine=MACHINE)
        workspaces: Any = launches._workspaces
        return _OnDevice(launches, maker, 0 if workspaces is None else workspaces.nbytes)

    def launch(
        self, device: int, stream: int, arrays: Sequence[int], of_mask: Sequence[int], results: Sequence[int],
        scratch: int, numbers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Launch the kernels.

        Parameters
        ----------
        device : int
            The number of the current device.
        stream : int
            The address of the stream.
        arrays, of_mask, results : sequences of int
            Addresses of the inputs, of the mask's arrays, and of the results.
        scratch : int
            The address of a buffer of `scratch_bytes` bytes.
        numbers : sequence of int
            Seed and offset of dropout.
        """
        bound = self._on_devices.get(device) or self._on_device(device)
        on_stream, lists = XlaStream(stream, scratch), list[int]()
        if self._has_lists:
            lists = [of_mask[0] if bound.maker is None else scratch + self._lists_start]
        if bound.maker is not None:
            bound.maker.launches.launch((*of_mask, *lists), on_stream)
        addresses = [*arrays, *lists, *results]
        for place, nbytes in bound.launches.record.zeroed:
            _set_zero(addresses[place], nbytes, stream)
        bound.launches.launch([*addresses, *numbers], on_stream)


def within(device: int, work: Callable[[], None]) -> None:
    """Call a function while a device is current; XLA's threads may have another current device."""
    cuda = gpu.namespace().cuda
    if cuda.runtime.getDevice() == device:
        work()
    else:
        with cuda.Device(device):
            work()


def as_cupy_stream(ptr: int) -> Any:
    """Return an XLA stream as a CuPy stream; a `with` block makes it CuPy's current stream."""
    return gpu.namespace().cuda.Stream.from_external(_Exported(ptr))


class _Exported(NamedTuple):
    """A stream that exports itself by CUDA's stream protocol."""

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


def as_cupy(buffer: Any, view: View, device: int) -> Array:
    """Return a buffer as a CuPy array with the layout of a view, without a copy."""
    cupy = gpu.namespace()
    memory = cupy.cuda.UnownedMemory(address(buffer), view.nbytes, buffer, device)
    return cupy.ndarray(view.shape, view.dtype, cupy.cuda.MemoryPointer(memory, 0), view.strides)


def without_data(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a CuPy array with the layout of a dense array of this shape, for plans; nothing may read its elements."""
    cupy = gpu.namespace()
    strides = tuple(step * dtype.itemsize for step in dense_strides(shape))
    return cupy.lib.stride_tricks.as_strided(cupy.empty((1,), dtype), shape, strides)
