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
from ..planning.spec import KernelSpec
from . import gpu
from ._records import View
from .arguments import Words
from .launch import BoundPass, Lists, PassLayout
from .list_maker import ListMaker
from .workspaces import Taken

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


def packed(lists: Mapping[str, Array]) -> tuple[dict[str, int], Array]:
    """Copy the arrays of a work list on the host, one after the other, into one array of bytes.

    The size of each is rounded up to three times a power of two, so that lists of similar lengths have equal positions.
    The lengths of lists that keep half or a quarter of the blocks are often near powers of two.

    Returns
    -------
    dict of int by name
        Where each array starts, in bytes.
    uint8 array
    """
    sizes = (3 * max(_ALIGNMENT, 1 << ((array.nbytes - 1) // 3).bit_length()) for array in lists.values())
    *starts, nbytes = accumulate(sizes, initial=0)
    memory = np.zeros(nbytes, np.uint8)
    for start, array in zip(starts, lists.values()):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return dict(zip(lists, starts)), memory


class _Workspaces:
    """Workspaces in one piece of memory that comes with the stream; those that must be zero come first.

    Attributes
    ----------
    starts : list of int
        Where each workspace starts, in bytes.
    zero_bytes : int
        Bytes at the start that each call sets to zero.
    nbytes : int
    """

    def __init__(self, needs: Mapping[str, Workspace]) -> None:
        order = sorted(needs, key=lambda name: not needs[name].is_zeroed)
        sizes = (-(-needs[name].nbytes // _ALIGNMENT) * _ALIGNMENT for name in order)
        *starts, self.nbytes = accumulate(sizes, initial=0)
        self.starts = [starts[order.index(name)] for name in needs]
        is_zeroed = [needs[name].is_zeroed for name in order]
        self.zero_bytes = (*starts, self.nbytes)[sum(is_zeroed)]

    def take(self, stream: XlaStream) -> Taken:
        """Return the addresses of the workspaces of a call on a stream."""
        return Taken([stream.workspace + start for start in self.starts], [])

    def give_back(self, stream: XlaStream, taken: Taken) -> None:
        """Return immediately: the memory belongs to XLA."""


def _set_zero(start: int, nbytes: int, stream: int) -> None:
    gpu.namespace().cuda.runtime.memsetAsync(start, 0, nbytes, stream)


class XlaGpu(gpu.Gpu):
    """The current CUDA device, which runs kernels on buffers and streams of XLA."""

    waits_for_copies = True

    def workspaces(self, needs: Mapping[str, Workspace]) -> Any:
        return _Workspaces(needs)


class _ListsOfCalls(XlaGpu):
    """The current CUDA device, if each call passes the arrays of the work list."""

    def lists(self, work: WorkList) -> Lists:
        return Lists({})


MACHINE = XlaGpu()


class _OnDevice(NamedTuple):
    """The launches of a pass on one device, and those that list the mask before them.

    Workspaces of the pass lie at the start of the scratch buffer, then those of the maker, then the lists.
    """

    launches: BoundPass
    maker: ListMaker | None

    @property
    def parts(self) -> list[tuple[BoundPass, int]]:
        """The launches of the maker, if there is one, and of the pass, and where the workspaces of each start."""
        parts = [(self.launches, 0)]
        if self.maker is not None:
            parts.insert(0, (self.maker.launches, _workspaces(self.launches).nbytes))
        return parts

    @property
    def zeros(self) -> list[tuple[int, int]]:
        """The parts of the scratch buffer that each call sets to zero, as (start, bytes)."""
        zeros = [(start, _workspaces(each).zero_bytes) for each, start in self.parts]
        return [(start, nbytes) for start, nbytes in zeros if nbytes]


def _workspaces(bound: BoundPass) -> _Workspaces:
    workspaces: Any = bound._workspaces
    return _Workspaces({}) if workspaces is None else workspaces


class Source(NamedTuple):
    """A value of a call: the address of a buffer of XLA plus an offset or, without a buffer, a number."""

    buffer: int | None
    offset: int


class Flat(NamedTuple):
    """The launches of a pass on one device as numbers.

    Attributes
    ----------
    words : array of uint64
        The arguments of all kernels, with numbers that are the same in each call.
    places : list of (int, int, int)
        (word, buffer, offset): words that a call sets to the address of a buffer plus an offset.
    kernels : list of (int, int, int, int, list of int)
        Function, grid, threads, bytes of shared memory, and the first word of each argument.
    zeros : list of (int, int, int)
        (buffer, offset, bytes): memory that is set to zero before the first kernel.
    num_buffers : int
        Arguments, then results, of which the last one is the scratch buffer, if there is one.
    text : str
        What the launches are in any process.
    """

    words: Words
    places: list[tuple[int, int, int]]
    kernels: list[tuple[int, int, int, int, list[int]]]
    zeros: list[tuple[int, int, int]]
    num_buffers: int
    text: str


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
    starts : dict of int by name, optional
        Where the arrays of the work list start in the array of bytes that each call passes in place of the mask's, from
        `packed`. Without it, the lists are in memory of the plan.
    """

    def __init__(
        self, plan: KernelPlan, name: str, inputs: Sequence[View], has_lists: bool,
        starts: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._plan, self._name, self._inputs, self._has_lists = plan, name, inputs, has_lists
        self._of_calls = starts
        self._starts = [0] if has_lists else list((starts or {}).values())
        self._on_devices: dict[int, _OnDevice] = {}
        self._lock = threading.Lock()
        bound = self._on_device(nvrtc.current_number())
        self._lists_start = sum(_workspaces(each).nbytes for each, _ in bound.parts)
        self.scratch_bytes = self._lists_start + (0 if bound.maker is None else self._source.nbytes)

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
        inputs: dict[str, View] = {view.name: view for view in self._inputs}
        maker, machine = None, MACHINE
        if self._of_calls is not None:
            lists, machine = self._plan.work.lists, _ListsOfCalls()
            inputs |= {name: View.of(name, lists[name]) for name in self._of_calls}
        if self._has_lists:
            source = self._source
            inputs[AT_CALL] = View(AT_CALL, np.dtype(np.uint8), (source.nbytes,), (1,))
            if self._plan.work.carried is not source:  # type: ignore[union-attr]
                gpu.compile_kernels(source.kernels.specs.values(), MACHINE)
                maker = ListMaker(source, MACHINE)
        layout = PassLayout(self._name, inputs, self._plan.kernel_results(self._name))
        return _OnDevice(gpu.bound_pass(self._plan, layout, machine), maker)

    @property
    def has_own_lists(self) -> bool:
        """True if kernels read lists in memory of the plan, which must not be freed before all streams have read it."""
        return any(each.lists for on_device in self._on_devices.values() for each, _ in on_device.parts)

    def flat(
        self, arrays: Sequence[Source], of_mask: Sequence[Source], numbers: Sequence[int], num_arguments: int,
        device: int,
    ) -> Flat:  # fmt: skip
        """Return the launches on a device as numbers.

        Parameters
        ----------
        arrays, of_mask : sequences of Source
            The inputs, and the mask's arrays.
        numbers : sequence of int
            Seed and offset of dropout.
        num_arguments : int
            Buffers before those of results.
        """
        on_device = list[_OnDevice]()
        within(device, lambda: on_device.append(self._on_device(device)))
        (bound,) = on_device
        num_results = len(self._plan.kernel_results(self._name))
        results, scratch = [Source(num_arguments + n, 0) for n in range(num_results)], num_arguments + num_results
        own = [Source(scratch, self._lists_start)] if bound.maker is not None else of_mask[:1]
        lists = [Source(each.buffer, each.offset + start) for each in own for start in self._starts]
        values = [[*arrays, *lists, *results, *(Source(None, number) for number in numbers)]]
        if bound.maker is not None:
            values.insert(0, [*of_mask, *lists])
        places, kernels = list[tuple[int, int, int]](), list[tuple[int, int, int, int, list[int]]]()
        zeros = [(scratch, *each) for each in bound.zeros]
        # Results that are set to zero come after the arrays and the lists, which the record counts, too.
        before, first = len(arrays) + len(lists) - num_arguments, 0
        zeros += ((place - before, 0, nbytes) for place, nbytes in bound.launches.record.zeroed)
        every, texts = list[Words](), list[tuple[KernelSpec, int, int, list[int]]]()
        for (each, start), sources in zip(bound.parts, values):
            record, words = each.record, each.record.words.copy()
            sources = [*sources, *(Source(scratch, start + more) for more in _workspaces(each).starts)]
            for word, offset, number in record.places:
                buffer, more = sources[number]
                if buffer is None:
                    words[word] = (offset + more) % (1 << 64)
                else:
                    places.append((first + word, buffer, (offset + more) % (1 << 64)))
            for launch, grid, parts in record.kernels:
                function = gpu._function(launch.spec, launch.shared_bytes).ptr
                starts = [first + part.start for part in parts]
                kernels.append((function, grid, launch.spec.num_threads, launch.shared_bytes, starts))
                texts.append((launch.spec, grid, launch.shared_bytes, starts))
            every.append(words)
            first += len(words)
        all_words = np.concatenate(every)
        text = repr((texts, all_words.tolist(), places, zeros))
        return Flat(all_words, places, kernels, zeros, scratch + bool(self.scratch_bytes), text)

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
        for start, nbytes in bound.zeros:
            _set_zero(scratch + start, nbytes, stream)
        own = [scratch + self._lists_start] if bound.maker is not None else of_mask[:1]
        lists = [each + start for each in own for start in self._starts]
        if bound.maker is not None:
            after = XlaStream(stream, scratch + _workspaces(bound.launches).nbytes)
            bound.maker.launches.launch((*of_mask, *lists), after)
        addresses = [*arrays, *lists, *results]
        for place, nbytes in bound.launches.record.zeroed:
            _set_zero(addresses[place], nbytes, stream)
        bound.launches.launch([*addresses, *numbers], XlaStream(stream, scratch))


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


def without_data(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return a CuPy array with the layout of a dense array of this shape, for plans; nothing may read its elements."""
    cupy = gpu.namespace()
    strides = tuple(step * dtype.itemsize for step in dense_strides(shape))
    return cupy.lib.stride_tricks.as_strided(cupy.empty((1,), dtype), shape, strides)
