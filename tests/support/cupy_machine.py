"""A test double of CuPy and a GPU: `cupy_double` compiles; this module has arrays, streams, captures and launches.

Device memory is host memory, kernels run on the simulator as soon as they are launched, and `log` lists all stream
operations. Operations that CUDA forbids during a capture raise here: waits, copies from the host, compilation.
"""

from __future__ import annotations

import ctypes
import operator
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy_double
import numpy as np
import pytest
from cuflash.compiler.source import KERNELS
from cuflash.executors import sim as simulated
from cuflash.planning.spec import KernelSpec
from library_parts import part

import cuflash

H100 = {
    "name": b"NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multiProcessorCount": 132,
    "sharedMemPerBlockOptin": 232448, "l2CacheSize": 50 << 20,
}  # fmt: skip


_IN_CAPTURES = {"ascontiguousarray", "broadcast_to", "isfinite", "ldexp"}  # array functions that captures may contain


class OutOfMemoryError(MemoryError):
    pass


class Pointer:
    __slots__ = ("ptr", "device_id")

    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id


class Ndarray:
    """A device array: like CuPy's, not a subclass of NumPy's, and without `__array_namespace__`.

    Called with a shape and a dtype, like CuPy's class, it is a new array of the machine.
    """

    machine: Cupy
    __array_ufunc__ = None  # NumPy scalars leave operators with arrays to this class

    def __new__(cls, host: Any, device_id: Any = None) -> Ndarray:
        return cls.machine.empty(host, device_id) if isinstance(host, tuple) else object.__new__(cls)

    def __init__(self, host: Any, device_id: Any) -> None:
        if isinstance(host, tuple):
            return
        self.host, self.shape, self.strides, self.dtype = host, host.shape, host.strides, host.dtype
        self.data = Pointer(host.ctypes.data, device_id)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.host, name)
        if not callable(value):
            return value
        return lambda *args, **options: self._like(value(*args, **options))

    def _like(self, value: Any) -> Any:
        return Ndarray(np.asarray(value), self.data.device_id)

    def get(self) -> Any:
        return self.host.copy()

    def __deepcopy__(self, memo: Any) -> Ndarray:
        return Ndarray(self.host.copy(), self.data.device_id)

    def __getitem__(self, key: Any) -> Any:
        return self._like(self.host[_hosts(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        to, places, values = self.host, _hosts(key), getattr(value, "host", value)
        self.machine.stream.do(lambda: to.__setitem__(places, values))

    def __bool__(self) -> bool:
        return bool(self.host)

    def __len__(self) -> int:
        return len(self.host)

    __hash__ = None  # type: ignore[assignment]


def _hosts(value: Any) -> Any:
    """Replace arrays by their host memory, also in lists and tuples."""
    return type(value)(map(_hosts, value)) if type(value) in (list, tuple) else getattr(value, "host", value)


def _operator(function: Callable[..., Any], *, is_reflected: bool = False) -> Callable[..., Any]:
    def operate(self: Ndarray, *others: Any) -> Any:
        operands = [self.host, *map(_hosts, others)]
        return self._like(function(*operands[:: -1 if is_reflected else 1]))

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "lt", "le", "gt", "ge", "eq", "ne",
              "lshift", "rshift", "xor", "pow", "neg", "invert", "abs"):  # fmt: skip
    _function = getattr(operator, f"__{_name}__")
    setattr(Ndarray, f"__{_name}__", _operator(_function))
    setattr(Ndarray, f"__r{_name}__", _operator(_function, is_reflected=True))


class Event:
    """An event; `is_reached` is the answer of the device to a query."""

    def __init__(self, machine: Cupy, number: int) -> None:
        self._machine, self.number = machine, number
        self.is_reached = machine.events_are_reached

    @property
    def done(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self._machine.waits("event.synchronize")
        self.is_reached = True


class Graph:
    def __init__(self, nodes: list[Callable[[], None]]) -> None:
        self.nodes = nodes

    def launch(self, stream: Any = None) -> None:
        for node in self.nodes:
            node()


class Stream:
    def __init__(self, machine: Cupy, ptr: int) -> None:
        self._machine, self.ptr = machine, ptr
        machine.streams[ptr] = self
        self.nodes: list[Callable[[], None]] | None = None

    def __enter__(self) -> Stream:
        self._before, self._machine.stream = self._machine.stream, self
        return self

    def __exit__(self, *error: Any) -> None:
        self._machine.stream = self._before

    def is_capturing(self) -> bool:
        self._machine.works(cupy_double.CUDARuntimeError)
        return self.nodes is not None

    def do(self, work: Callable[[], None]) -> None:
        """Execute an operation of the stream, now or at each replay of a capture."""
        if self.nodes is None:
            work()
        else:
            self.nodes.append(work)

    def begin_capture(self) -> None:
        self.nodes = []

    def end_capture(self) -> Graph:
        assert self.nodes is not None
        graph, self.nodes = Graph(self.nodes), None
        return graph

    def record(self, event: Event) -> Event:
        self._machine.log.append(("record", self.ptr, event.number))
        return event

    def wait_event(self, event: Event) -> None:
        self._machine.log.append(("wait", self.ptr, event.number))

    def synchronize(self) -> None:
        self._machine.waits("stream.synchronize")
        self._machine.log.append(("synchronize", self.ptr))
        if self._machine.fault:
            raise cupy_double.CUDARuntimeError(self._machine.fault)


class Function(cupy_double.Function):
    machine: Cupy
    spec: KernelSpec

    def launch(self, grid: int, threads: int, shared_bytes: int, stream: Stream, table: int) -> None:
        """Run a kernel with the arguments that a table of addresses points to, now or at each replay of a capture."""
        machine = self.machine
        machine.log.append(("launch", stream.ptr, self.spec.entry.name))
        if not machine.runs_kernels:
            return
        kernel = simulated._kernel(self.spec, "")
        sizes = kernel._parameter_sizes
        addresses = (ctypes.c_void_p * len(sizes)).from_address(table)
        copied = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes)]
        records = tuple(np.frombuffer(each, np.dtype([("bytes", np.void, len(each))]))[0] for each in copied)
        stream.do(lambda: kernel((grid,), threads, records, shared_bytes))


class Cupy(cupy_double.Double):
    """The module that `import cupy` returns once it is in sys.modules.

    Attributes
    ----------
    log : list of tuple
        Operations of streams, in order.
    allocated : int
        Arrays made so far.
    live_bytes : int
        Bytes of those that are not freed.
    most_bytes : int
        The most that `live_bytes` has been.
    room : int
        Bytes that one array may have.
    allocations_left : int
        Allocations that succeed; the one after them fails, and later ones succeed again.
    launches_left : int
        Launches that succeed; the one after them raises KeyboardInterrupt, and later ones succeed again.
    fault : str
        What the next wait for a stream finds.
    has_failed : bool
        True if a kernel has failed, so that CUDA refuses all work.
    """

    def __init__(self, cache: Path) -> None:
        super().__init__(cache)
        self.specs: dict[str, KernelSpec] = {}
        self.launchable: list[Function] = []
        self.log: list[tuple[Any, ...]] = []
        self.allocated, self.live_bytes, self.most_bytes, self.room, self.fault = 0, 0, 0, 1 << 30, ""
        self.allocations_left, self.launches_left, self.has_failed = 1 << 62, 1 << 62, False
        self.runs_kernels = self.events_are_reached = True
        self._number = 0
        self.streams: dict[int, Stream] = {}
        self.null = self.stream = Stream(self, 0)
        self.ndarray, self.uint8 = Ndarray, np.uint8
        cuda = self.cuda
        cuda.Stream = lambda non_blocking=False: Stream(self, self._next())
        cuda.Event = lambda disable_timing=False: Event(self, self._next())
        cuda.get_current_stream = lambda: self.stream
        cuda.runtime.getDeviceProperties = lambda number: H100
        cuda.runtime.getDeviceCount = lambda: 2
        cuda.runtime.getDevice = lambda: self.device
        cuda.runtime.deviceSynchronize = lambda: self.works(cupy_double.CUDARuntimeError)
        cuda.runtime.memsetAsync = lambda start, value, nbytes, stream: ctypes.memset(start, value, nbytes)
        cuda.driver.launchKernel = self._launch
        self.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=self._as_strided))

    @property
    def launched(self) -> list[str]:
        """Entries of the kernels that were launched, in order."""
        return [entry for kind, *_, entry in self.log if kind == "launch"]

    def _next(self) -> int:
        self._number += 1
        return self._number

    def waits(self, what: str) -> None:
        if self.stream.is_capturing():
            raise cupy_double.CUDARuntimeError(f"{what}: operation not permitted when stream is capturing")

    def works(self, error: type[Exception]) -> None:
        if self.has_failed:
            raise cupy_double.sticky(error)

    def _loaded(self, code: str, options: tuple[str, ...], log_stream: Any) -> Any:
        self.waits("compiling")
        self.works(cupy_double.CUDADriverError)
        return super()._loaded(code, options, log_stream)

    def _function(self, module: Any, code: str, name: str) -> Any:
        function = Function(super()._function(module, code, name).name, module)
        function.machine, function.spec = self, self.specs[code]
        self.launchable.append(function)
        return function

    def _launch(self, pointer: int, *sizes: int) -> None:
        """Launch as the driver does: a grid and a block of three sizes, bytes of shared memory, a stream, arguments."""
        self.works(cupy_double.CUDADriverError)
        self.launches_left -= 1
        if self.launches_left == -1:
            raise KeyboardInterrupt
        grid, _, _, threads, _, _, shared_bytes, stream, table, _ = sizes
        (function,) = (function for function in self.launchable if function.ptr == pointer)
        function.launch(grid, threads, shared_bytes, self.streams[stream], table)

    # Arrays.

    def _as_strided(self, array: Ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> Ndarray:
        return Ndarray(np.lib.stride_tricks.as_strided(array.host, shape, strides), array.data.device_id)

    def empty(self, shape: Any, dtype: Any) -> Ndarray:
        host = np.empty(shape, dtype)
        self.allocations_left -= 1
        if host.nbytes > self.room or self.allocations_left == -1:
            raise OutOfMemoryError(f"Out of memory allocating {host.nbytes} bytes")
        self.allocated += 1
        self.live_bytes += host.nbytes
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        weakref.finalize(host, self._freed, host.nbytes).atexit = False
        host.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in every dtype
        return Ndarray(host, self.device)

    def _freed(self, nbytes: int) -> None:
        self.live_bytes -= nbytes

    def zeros(self, shape: Any, dtype: Any) -> Ndarray:
        return self.full(shape, 0, dtype)

    def full(self, shape: Any, value: Any, dtype: Any) -> Ndarray:
        array = self.empty(shape, dtype)
        array[...] = value
        return array

    def asarray(self, array: Any) -> Ndarray:
        if isinstance(array, Ndarray):
            return array
        self.waits("a copy from the host")
        copied = self.empty(array.shape, array.dtype)
        copied[...] = array
        self.log.append(("copy", self.stream.ptr))
        return copied

    def __getattr__(self, name: str) -> Any:
        """Return any other array function: NumPy's, applied immediately; during a capture only a few are allowed."""
        if name.startswith("_") or not hasattr(np, name):
            raise AttributeError(name)
        function = getattr(np, name)
        if isinstance(function, type) or not callable(function):
            return function

        def applied(*args: Any, **options: Any) -> Any:
            if name not in _IN_CAPTURES:
                self.waits(name)
            result = function(*map(_hosts, args), **{key: _hosts(value) for key, value in options.items()})
            return Ndarray(np.asarray(result), self.device) if isinstance(result, (np.ndarray, np.generic)) else result

        return applied

    def minimum(self, one: Any, other: Any, out: Any = None) -> Any:
        if out is None:
            return self.__getattr__("minimum")(one, other)

        def work() -> None:
            np.minimum(one.host, other.host, out=out.host)

        self.stream.do(work)
        return out

    def from_dlpack(self, array: Any) -> Ndarray:
        return Ndarray(np.from_dlpack(array.host), int(array.__dlpack_device__()[1]))


@contextmanager
def installed(monkeypatch: Any, cache: Path, library: ModuleType = cuflash) -> Iterator[Cupy]:
    """Install the test double as `import cupy`, and empty the caches that may hold an earlier one."""
    gpu, tensor_map = part(library, "executors.gpu"), part(library, "executors.tensor_map")
    plan_cache, calls = part(library, "planning.plan_cache"), part(library, "planning._call_cache")
    compiling, sources = part(library, "compiler.nvrtc"), part(library, "compiler.source")
    machine = Cupy(cache)

    def remembered(spec: KernelSpec) -> str:
        machine.specs[sources.source(spec)] = spec
        return str(sources.source(spec))

    monkeypatch.setitem(__import__("sys").modules, "cupy", machine)
    monkeypatch.setattr(compiling, "source", remembered)
    if library is not cuflash:
        monkeypatch.setattr(sources, "KERNELS", KERNELS)  # a copy of the library has no kernels
    for name, fresh in (("_loaded", {}), ("_compiled", {}), ("_process", None), ("_is_started", False)):
        monkeypatch.setattr(compiling, name, fresh)
    monkeypatch.setattr(gpu, "_GPU", gpu.Gpu())
    monkeypatch.setattr(gpu, "encoded", tensor_map.simulated)
    monkeypatch.setattr(gpu, "_pinned", set())
    for name, fresh in vars(calls.CallCache()).items():
        monkeypatch.setattr(calls.CALLS, name, fresh)
    monkeypatch.setattr(Ndarray, "machine", machine, raising=False)
    gpu._device_spec.cache_clear()
    plan_cache._cached_plan.cache_clear()
    yield machine
    gpu._device_spec.cache_clear()
    plan_cache._cached_plan.cache_clear()


@contextmanager
def a_machine_for(library: ModuleType) -> Iterator[Cupy]:
    """Yield a test double of CuPy and a GPU, for a copy of the library."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        with installed(patch, Path(folder), library) as machine:
            yield machine


def copies_at_once(machine: Cupy) -> list[tuple[int, int]]:
    """Make copies of device memory be done at once; return the list of the widths and heights of those done."""
    copies = list[tuple[int, int]]()

    def copy(
        target: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:  # fmt: skip
        assert to_pitch >= width and pitch >= width
        for row in range(height):
            ctypes.memmove(target + row * to_pitch, source + row * pitch, width)
        copies.append((width, height))

    runtime = machine.cuda.runtime
    runtime.memcpy2DAsync, runtime.memcpyDefault = copy, 4
    runtime.deviceCanAccessPeer = lambda device, peer: True
    runtime.deviceEnablePeerAccess = lambda peer: machine.log.append(("access", machine.device, peer))
    return copies
