"""The `gpu` executor: a plan's kernels on the CUDA device that CuPy has current, on its current stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import accumulate, starmap
from math import prod
from operator import and_
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from . import checks, compile, passes
from .arrays import Array, ShapeDtype
from .device import DeviceSpec
from .errors import UnsupportedProblem
from .memory import layout_reasons
from .params import View
from .plans import Plan
from .source import KernelSpec
from .tensor_map import Template, Tiles, encoded, template
from .tiles import shared_bytes
from .work_list import WorkList

_COLD = "call plan.compile() before the capture, then run the same plan inside it"


def current_device() -> DeviceSpec:
    """The device that CuPy has current.

    Raises
    ------
    RuntimeError
        CuPy or the GPU is missing.
    """
    return _device_spec(compile.current_device()[1])


@lru_cache(maxsize=64)
def _device_spec(number: int) -> DeviceSpec:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(number)
    return DeviceSpec(
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        num_processors=properties["multiProcessorCount"],
        tile_memory_bytes=properties["sharedMemPerBlockOptin"],
        cache_bytes=properties["l2CacheSize"],
    )


class _Resident:
    """The arrays of a work list on one device, and the streams that must not be overtaken when they go.

    CuPy's pool hands freed memory to the next array of the stream that it was made on. So another stream that still
    reads it is waited for first, by that stream and not by the host.
    """

    def __init__(self, cupy: Any, arrays: dict[str, Array]) -> None:
        self.arrays, self._cupy = arrays, cupy
        self._home = cupy.cuda.get_current_stream()
        self._made = self._home.record(cupy.cuda.Event(disable_timing=True))
        self._is_made = False  # seen by the host, so that no stream has to wait
        self._guests: dict[int, Any] = {}

    def on(self, stream: Any) -> dict[str, Array]:
        """The arrays, for kernels on a stream."""
        if not self._is_made:
            self._is_made = self._made.done
            if not self._is_made and stream.is_capturing():
                raise RuntimeError(f"the copy of a work list is still under way when a capture reads it: {_COLD}")
            if not self._is_made and stream.ptr != self._home.ptr:
                stream.wait_event(self._made)
        if stream.ptr != self._home.ptr:
            self._guests[stream.ptr] = stream
        return self.arrays

    def settle(self) -> None:
        """Wait, once, until the arrays are there for every stream and for captures."""
        self._made.synchronize()
        self._is_made = True

    @property
    def has_guests(self) -> bool:
        return bool(self._guests)

    def leave(self) -> bool:
        """Let the arrays go, unless a stream that may read them is being captured and cannot be waited for."""
        try:
            if any(stream.is_capturing() for stream in (self._home, *self._guests.values())):
                return False
        except self._cupy.cuda.runtime.CUDARuntimeError:  # the default stream, while another is captured
            return False
        for stream in self._guests.values():
            self._home.wait_event(stream.record(self._cupy.cuda.Event(disable_timing=True)))
        return True


_PER_THREAD = 2  # cudaStreamPerThread


class _Gpu:
    """CuPy, as what runs kernels."""

    def __init__(self) -> None:
        self._resident: WeakKeyDictionary[WorkList, dict[int, _Resident]] = WeakKeyDictionary()
        self._leaving: deque[_Resident] = deque()
        self._zeros: dict[tuple[Any, ...], dict[int, Array]] = {}
        self._lock = threading.Lock()

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        import cupy

        return cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """The same for all calls of a stream, one after the other, since each leaves zeros: making them takes long.

        But a graph's calls may run beside the stream's, and threads share the name of streams of their own.
        """
        import cupy

        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing() or stream.ptr == _PER_THREAD:
            return cupy.zeros(shape, dtype)
        by_stream = self.zeros_by_stream(cupy.cuda.runtime.getDevice(), shape, dtype)
        if stream.ptr not in by_stream:
            by_stream.setdefault(stream.ptr, cupy.zeros(shape, dtype))
        return by_stream[stream.ptr]

    def zeros_by_stream(self, device: int, shape: tuple[int, ...], dtype: Any) -> dict[int, Array]:
        return self._zeros.setdefault((device, shape, dtype), {})

    def lists(self, work: WorkList) -> dict[str, Array]:
        """The arrays of a work list on the current device, made there once."""
        import cupy

        resident = self.resident(work)
        return {} if resident is None else resident.on(cupy.cuda.get_current_stream())

    def resident(self, work: WorkList) -> _Resident | None:
        """What holds the arrays of a work list on the current device; None where it has none."""
        import cupy

        number = cupy.cuda.runtime.getDevice()
        found = self._resident.get(work, {}).get(number)
        if found is not None or not work.nbytes:
            return found
        if cupy.cuda.get_current_stream().is_capturing():
            raise RuntimeError(f"a work list cannot be made inside a stream capture: {_COLD}")
        with self._lock:
            residents = self._resident.setdefault(work, {})
            if number not in residents:
                for _ in range(len(self._leaving)):
                    self._release(self._leaving.popleft())
                arrays = {name: cupy.asarray(array) for name, array in work.lists.items()}
                residents[number] = _Resident(cupy, arrays)
                finalize(work, self._retire, residents[number]).atexit = False
            return residents[number]

    def _retire(self, resident: _Resident) -> None:
        """A work list is gone, at any moment and on any thread: what others may still read goes with the next copy."""
        if resident.has_guests:
            self._leaving.append(resident)

    def _release(self, resident: _Resident) -> None:
        if not resident.leave():
            self._leaving.append(resident)

    def tensor_map(self, tiles: Tiles) -> Template:
        return template(encoded, tiles)

    def launch(self, spec: KernelSpec, grid: int, shared_bytes: int, arguments: tuple[Any, ...]) -> None:
        import cupy

        _function(spec, shared_bytes)((grid,), (spec.num_threads,), arguments, shared_mem=shared_bytes)
        if checks.current() is not None:
            try:
                cupy.cuda.get_current_stream().synchronize()
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise RuntimeError(f"{spec.name} on {grid} blocks failed: {error}") from error


_GPU = _Gpu()


def _function(spec: KernelSpec, nbytes: int) -> Any:
    return compile.kernel(checks.built(spec), _capability(), shared_bytes=nbytes)


def _capability() -> tuple[int, int]:
    capability = current_device().compute_capability
    assert capability is not None
    return capability


def _cold(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Those that are yet to be compiled, or loaded, for the current device."""
    capability = _capability()
    return [spec for spec in map(checks.built, specs) if not compile.is_loaded(spec, capability, shared_bytes(spec))]


def _compile_at_once(plan: Plan, kernels: passes.Pass) -> None:
    """A pass waits for the slowest of its kernels, not for one after the other."""
    cold = _cold(plan.specs[entry] for entry in kernels.entries)
    if len(cold) > 1:
        compile.precompile(cold, _capability())


def namespace() -> Any:
    """CuPy.

    Raises
    ------
    RuntimeError
        It or the GPU is missing.
    """
    return compile.current_device()[0]


def make_ready(plan: Plan) -> None:
    """Compile and load the kernels of all passes for the current device, and put the work list there; waits for it."""
    compile.precompile(map(checks.built, plan.specs.values()), _capability())
    for spec in plan.specs.values():
        _function(spec, shared_bytes(spec))
    resident = _GPU.resident(plan.work)
    if resident is not None:
        resident.settle()


def require_capturable(plan: Plan) -> None:
    """Where the current stream is captured, everything that a capture cannot make is there.

    Raises
    ------
    RuntimeError
        Something is not, or CUFLASH_CHECK asks for waits.
    """
    cupy, _ = compile.current_device()
    if checks.is_on():
        refuse_capture("CUFLASH_CHECK waits for each kernel, which a stream capture cannot")
    if not cupy.cuda.get_current_stream().is_capturing():
        return
    cold = _cold(plan.specs.values())
    if cold:
        raise RuntimeError(f"{cold[0].name} is not compiled yet, which a stream capture cannot wait for: {_COLD}")
    _GPU.resident(plan.work)


def refuse_capture(reason: str) -> None:
    """RuntimeError where the current stream is captured."""
    if namespace().cuda.get_current_stream().is_capturing():
        raise RuntimeError(f"this call cannot be captured: {reason}")


def forward(plan: Plan, q: Array, k: Array, v: Array, o: Array, lse: Array) -> None:
    """Write o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q]."""
    _compile_at_once(plan, passes.of_plan(plan, passes.FORWARD))
    keep(plan, *passes.forward(plan, _GPU, q, k, v, o, lse))


def backward(
    plan: Plan,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Write dq [*batch, heads, ...], dk and dv [*batch, kv_heads, ...], over the broadcast leading axes."""
    _compile_at_once(plan, passes.of_plan(plan, passes.BACKWARD))
    keep(plan, *passes.backward(plan, _GPU, do, q, k, v, o, lse, dlse, dq, dk, dv), dq, dk, dv)


_captured: WeakKeyDictionary[Plan, list[Array]] = WeakKeyDictionary()
_pinned: set[Plan] = set()


def keep(plan: Plan, *arrays: Array) -> None:
    """Hold what was allocated inside a stream capture as long as the plan: its graph writes there at each replay."""
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        _captured.setdefault(plan, []).extend(arrays)


def pin(plan: Plan) -> None:
    """Hold a plan that nobody else may hold for ever, if a graph needs what it keeps."""
    if plan in _captured:
        _pinned.add(plan)


def repeated(
    plan: Plan,
    kernels: passes.Pass,
    given: Mapping[str, Array],
    results: dict[str, ShapeDtype],
    *,
    pins: bool = False,
) -> Callable[..., list[Array]]:
    """A pass without its questions: for the current device, and for arrays that lie as these do, wherever they are.

    Parameters
    ----------
    given : dict of arrays by name
        What the pass reads.
    results : dict of ShapeDtype by name
        What it writes.
    pins : bool
        What a capture needs stays for ever.

    Returns
    -------
    callable
        Takes arrays in the order of `given`, and returns new results.

    Raises
    ------
    UnsupportedProblem
        The function returned does, of arrays that do not start at a multiple of their item size.
    """
    import cupy

    _compile_at_once(plan, kernels)
    rooms = results | passes.workspaces(plan, kernels)
    views = *starmap(View.of, given.items()), *starmap(View.of_new, rooms.items())
    records, launches = passes.bound(plan, kernels.entries, views, _GPU)
    resident = _GPU.resident(plan.work)
    lists = {} if resident is None else resident.arrays
    filler = records.placed({name: _GPU.address(array) for name, array in lists.items()})
    ready = [(spec, _function(spec, nbytes), (grid,), (spec.num_threads,), nbytes) for spec, grid, nbytes in launches]
    names, odd = tuple(given), [array.dtype.itemsize - 1 for array in given.values()]
    device = cupy.cuda.runtime.getDevice()
    left = [room for name, room in rooms.items() if name not in results]
    zeros = [(_GPU.zeros_by_stream(device, room.shape, room.dtype), room) for room in left if kernels.zeros]
    *starts, num_bytes = accumulate((prod(room.shape) * room.dtype.itemsize for room in left), initial=0)
    new = [(room.shape, room.dtype) for room in results.values()]
    if left and not zeros:  # one array for all: each takes a microsecond of a call
        new.append(((num_bytes,), np.dtype(np.uint8)))
    current_stream, empty, num_results = cupy.cuda.get_current_stream, cupy.empty, len(results)

    def run(*arrays: Array) -> list[Array]:
        addresses = [array.data.ptr for array in arrays]
        if any(map(and_, addresses, odd)):
            raise UnsupportedProblem(reason for pair in zip(names, arrays) for reason in layout_reasons(*pair))
        stream = current_stream()
        is_captured = stream.is_capturing()
        own = -1 if is_captured else stream.ptr  # no stream's
        made = [empty(shape, dtype) for shape, dtype in new]
        addresses += [array.data.ptr for array in made[:num_results]]
        if zeros:
            counts = [known[own] if own in known else _GPU.zeros(room.shape, room.dtype) for known, room in zeros]
            addresses += [array.data.ptr for array in counts]
            made += counts
        elif left:
            start = made[-1].data.ptr
            addresses += [start + offset for offset in starts]
        if resident is not None:
            resident.on(stream)
        filled = filler.filled(addresses)
        for spec, function, grid, threads, nbytes in ready:
            for arguments in filled.arguments(spec):
                function(grid, threads, arguments, nbytes)
        filler.reuse(filled)
        if is_captured:
            _captured.setdefault(plan, []).extend(made)
            if pins:
                _pinned.add(plan)
        return made[:num_results]

    return run
