"""The `gpu` executor: a plan's kernels on CuPy's current CUDA device and current stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial, reduce
from itertools import starmap
from operator import and_, attrgetter, or_
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array, Namespace, summed_to
from ..blocks.work_list import WorkList
from ..compiler import nvrtc
from ..compiler.earlier_failure import raise_earlier
from ..errors import UnsupportedProblem
from ..layouts import layout_reasons
from ..planning.device import DeviceSpec
from ..planning.launches import Launch, Pass, Workspace
from ..planning.plan import KernelPlan
from ..planning.spec import KernelSpec
from . import checks
from ._records import View
from .arguments import KernelArguments
from ..planning.list_kernels import WorkAtCall
from .launch import BoundCall, BoundPass, Lists, LaunchTarget, PassLayout
from .list_maker import ListMaker
from .tensor_map import Template, BoxedArray, encoded, template
from .workspaces import Piece, Stream, Workspaces

_COMPILE_FIRST = "make the same call once, or call plan.compile() before the capture, then run the same plan inside it"


def current_device() -> DeviceSpec:
    """Return CuPy's current device.

    Raises
    ------
    RuntimeError
        CuPy or the GPU is missing.
    """
    return _device_spec(nvrtc.current_device()[1])


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


class DeviceLists(Lists):
    """The arrays of a work list on one device, and the streams that must have read them before they are freed.

    CuPy's pool reuses freed memory for the next array of the stream that it was allocated on. So if another stream
    still reads the memory, the allocating stream, not the host, first waits for the other one.
    """

    def __init__(self, cupy: Namespace, arrays: dict[str, Array]) -> None:
        super().__init__(arrays)
        self._cupy = cupy
        self._stream = cupy.cuda.get_current_stream()
        self._copied = self._stream.record(cupy.cuda.Event(disable_timing=True))
        self._is_copied = False  # the host knows that the copy has finished, so that no stream has to wait
        self._other_streams: dict[int, Any] = {}

    def use(self, stream: Any) -> None:
        """Make a stream that is about to read the arrays wait until they are copied, and remember the stream."""
        if not self._is_copied:
            self._is_copied = self._copied.done
            if not self._is_copied and stream.is_capturing():
                raise RuntimeError(
                    f"a capture reads a work list whose copy has not finished: {_COMPILE_FIRST}"
                )
            if not self._is_copied and stream.ptr != self._stream.ptr:
                stream.wait_event(self._copied)
        if stream.ptr != self._stream.ptr:
            self._other_streams[stream.ptr] = stream

    def wait_until_copied(self) -> None:
        """Wait, once, until the arrays are copied; then all streams and captures can use them."""
        if not self._is_copied:
            self._copied.synchronize()
            self._is_copied = True

    @property
    def has_other_streams(self) -> bool:
        return bool(self._other_streams)

    def release_when_read(self) -> bool:
        """Release the arrays, unless a stream that may read them is being captured and cannot be waited for."""
        try:
            if any(stream.is_capturing() for stream in (self._stream, *self._other_streams.values())):
                return False
        # CuPy raises this for the default stream while another stream is being captured.
        except self._cupy.cuda.runtime.CUDARuntimeError:
            return False
        for stream in self._other_streams.values():
            self._stream.wait_event(stream.record(self._cupy.cuda.Event(disable_timing=True)))
        return True


_NO_LISTS = Lists(MappingProxyType({}))


class Gpu:
    """The current CUDA device, which runs kernels that CuPy compiles, on CuPy's arrays and stream.

    A subclass uses another library's arrays and stream instead.
    """

    def __init__(self) -> None:
        self._device_lists: WeakKeyDictionary[WorkList, dict[int, DeviceLists]] = WeakKeyDictionary()
        self._sending: WeakKeyDictionary[WorkList, threading.Lock] = WeakKeyDictionary()
        self._to_release: deque[DeviceLists] = deque()
        self._zeroed: dict[tuple[int, int, int], dict[int, Piece]] = {}
        self._pieces: dict[int, dict[int, list[Piece]]] = {}
        self._lock = threading.Lock()

    executor = "gpu"
    address: Callable[[Array], int] = attrgetter("data.ptr")
    mask_address: Callable[[Array], int] = attrgetter("data.ptr")
    waits_for_copies = False  # the host waits for the copy of a work list, so that no call queries its event

    @property
    def device(self) -> int:
        """The number of the current device."""
        return nvrtc.current_number()

    def set_zero(self, array: Array) -> None:
        """Set an array to zeros on the current stream."""
        array.fill(0)

    @property
    def stream(self) -> Callable[[], Any]:
        """CuPy's function that returns the current stream."""
        stream: Callable[[], Any] = namespace().cuda.get_current_stream
        return stream

    def maker(self, shape: tuple[int, ...], dtype: DTypeLike, axes: Sequence[int] | None = None) -> Callable[[], Array]:
        """Return a function that allocates an array on the device that is current now.

        `axes` is the order of the array's axes in memory, outermost first; default: C order.
        """
        import cupy

        if axes is not None:
            in_memory, back = tuple(shape[axis] for axis in axes), [axes.index(axis) for axis in range(len(axes))]
            return lambda: cupy.ndarray(in_memory, dtype).transpose(back)
        return partial(cupy.ndarray, shape, dtype)  # cupy.empty calls this function, and takes 0.6 µs more

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new array of zeros on the current device."""
        return namespace().zeros(shape, dtype)

    def sent(self, array: Array) -> Array:
        """Return an array of a work list, copied to the current device."""
        return namespace().asarray(array)

    def layout(self, array: Array) -> Array:
        """Return an object with an array's shape, dtype, strides and address under CuPy's names."""
        return array

    def sum_to(self, gradient: Array, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return the sum of a gradient over broadcast axes, rounded once."""
        return summed_to(gradient, shape, dtype)

    def refuse_copies(self, reason: str) -> None:
        """Raise RuntimeError if the current stream is captured: the call allocates memory that a graph outlives."""
        refuse_capture(reason)

    def keep_captured(self, plan: KernelPlan, arrays: Iterable[Array], pins: bool) -> None:
        """Keep the arrays that a captured call allocated, and with `pins` its plan, since each replay uses them."""
        _captured.setdefault(plan, []).extend(arrays)
        if pins:
            hold(plan)

    def lasting(self, nbytes: int) -> Piece:
        """Return a new piece of zeros on the current device, in CuPy's memory, which may outlive the call."""
        array = namespace().zeros((nbytes,), np.uint8)
        return Piece(nbytes, array, array.data.ptr)

    def kept_zeros(self, number: int, nbytes: int) -> dict[int, Piece]:
        """Return, by stream, the current device's pieces of a size that stay zero between calls, one of several."""
        return self._zeroed.setdefault((nvrtc.current_device()[1], number, nbytes), {})

    def kept_pieces(self) -> dict[int, list[Piece]]:
        """Return, by stream, the pieces of memory for workspaces of calls on the current device."""
        return self._pieces.setdefault(nvrtc.current_device()[1], {})

    def prepare(self, kernels: Pass, *later: Pass) -> None:
        """Compile the kernels of a pass in parallel, so that a first call waits only for the slowest.

        If there are any to compile, those of the passes that follow, `later`, are compiled at the same time.

        Raises
        ------
        RuntimeError
            The stream is captured, and a kernel of the first pass is not compiled.
        """
        not_compiled = _not_compiled(kernels.launches.values())
        if not_compiled:
            not_compiled += _not_compiled(launch for each in later for launch in each.launches.values())
            _compile(not_compiled, self)

    def workspaces(self, needs: Mapping[str, Workspace]) -> Workspaces:
        """Return the memory of the workspaces of a pass."""
        return Workspaces(needs, self)

    def lists(self, work: WorkList) -> Lists:
        """Return the arrays of a work list on the current device, copied there once."""
        return self.device_lists(work) or _NO_LISTS

    def device_lists(self, work: WorkList) -> DeviceLists | None:
        """Return the holder of a work list's arrays on the current device; None if the list has no arrays."""
        import cupy

        number = cupy.cuda.runtime.getDevice()
        device_lists = self._device_lists.get(work, {}).get(number)
        if device_lists is not None or not work.nbytes:
            return device_lists
        if cupy.cuda.get_current_stream().is_capturing():
            raise RuntimeError(f"a work list cannot be made inside a stream capture: {_COMPILE_FIRST}")
        with self._lock:  # not held while a list is copied: threads may copy different lists at the same time
            by_device = self._device_lists.setdefault(work, {})
            sending = self._sending.setdefault(work, threading.Lock())
        with sending:
            if number not in by_device:
                self._release_retired()
                device_lists = self.guarded(work, {name: self.sent(array) for name, array in work.lists.items()})
                if self.waits_for_copies:
                    device_lists.wait_until_copied()
                by_device[number] = device_lists
            return by_device[number]

    def guarded(self, owner: object, arrays: dict[str, Array]) -> DeviceLists:
        """Hold arrays that the current stream wrote; the holder outlives `owner` until all streams have read them."""
        device_lists = DeviceLists(namespace(), arrays)
        finalize(owner, self._retire, device_lists).atexit = False
        return device_lists

    def _retire(self, device_lists: DeviceLists) -> None:
        """Keep the arrays of a deleted work list if other streams may read them; runs at any time, on any thread."""
        if device_lists.has_other_streams:
            self._to_release.append(device_lists)

    def _release_retired(self) -> None:
        """Release retired arrays, except those that another thread is releasing or that cannot be released yet."""
        for _ in range(len(self._to_release)):
            with suppress(IndexError):
                device_lists = self._to_release.popleft()
                if not device_lists.release_when_read():
                    self._to_release.append(device_lists)

    def tensor_map(self, tiles: BoxedArray) -> Template:
        return template(encoded, tiles)

    def launcher(self, spec: KernelSpec, grid: int, shared_bytes: int) -> Callable[[KernelArguments, Stream], None]:
        """Return a function (arguments, stream) that launches a kernel, compiled and loaded now.

        With CUFLASH_CHECK, first wait for all earlier work, whose failures would otherwise be attributed to the kernel.
        """
        function, threads = _function(spec, shared_bytes), spec.num_threads
        cuda = namespace().cuda
        launch = cuda.driver.launchKernel
        if checks.is_on():
            try:
                cuda.runtime.deviceSynchronize()
            except cuda.runtime.CUDARuntimeError as error:
                raise_earlier(error)
                raise

        def start(arguments: KernelArguments, stream: Stream) -> None:
            try:
                launch(function.ptr, grid, 1, 1, threads, 1, 1, shared_bytes, stream.ptr, arguments.table, 0)
            except RuntimeError as error:
                raise_earlier(error)
                raise

        return start

    def wait(self, launch: Launch) -> None:
        """Wait until a launch has ended.

        Raises
        ------
        RuntimeError
            The launch failed.
        """
        import cupy

        try:
            cupy.cuda.get_current_stream().synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise RuntimeError(f"{launch.spec.name} failed: {error}") from error


_GPU = Gpu()


def current_target() -> Gpu:
    """Return the current CUDA device with CuPy's arrays and stream."""
    return _GPU


def _function(spec: KernelSpec, nbytes: int) -> Any:
    return nvrtc.kernel(checks.with_watchdog(spec), _capability(), shared_bytes=nbytes)


def _capability() -> tuple[int, int]:
    capability = current_device().compute_capability
    assert capability is not None
    return capability


def _not_compiled(launches: Iterable[Launch]) -> list[KernelSpec]:
    """Return the kernels that are not yet compiled and loaded for the current device."""
    capability = _capability()
    guarded = ((checks.with_watchdog(launch.spec), launch.shared_bytes) for launch in launches)
    return [spec for spec, nbytes in guarded if not nvrtc.is_loaded(spec, capability, nbytes)]


def namespace() -> Namespace:
    """Return CuPy.

    Raises
    ------
    RuntimeError
        CuPy or the GPU is missing.
    """
    return nvrtc.current_device()[0]


def make_ready(plan: KernelPlan) -> None:
    """Compile and load the kernels of all passes for the current device, copy the work list to it, and wait."""
    nvrtc.precompile(map(checks.with_watchdog, plan.specs.values()), _capability())
    for launch in _launches(plan):
        _function(launch.spec, launch.shared_bytes)
    device_lists = _GPU.device_lists(plan.work)
    if device_lists is not None:
        device_lists.wait_until_copied()


def _launches(plan: KernelPlan) -> tuple[Launch, ...]:
    return tuple(launch for each in plan.passes.values() for launch in each.launches.values())


def require_capturable(plan: KernelPlan, machine: Gpu | None = None) -> None:
    """Require that a capture of the current stream, if there is one, finds everything compiled and copied.

    Raises
    ------
    RuntimeError
        Something is not ready, or CUFLASH_CHECK requires waiting.
    """
    if checks.is_on():
        refuse_capture("CUFLASH_CHECK waits for each kernel, which is impossible during a stream capture")
    if not namespace().cuda.get_current_stream().is_capturing():
        return
    require_compiled(_launches(plan), _COMPILE_FIRST)
    (machine or _GPU).device_lists(plan.work)


def require_compiled(launches: Iterable[Launch], fix: str) -> None:
    """Check that kernels that a capture is about to launch are compiled.

    Raises
    ------
    RuntimeError
        A kernel is not compiled.
    """
    _refuse_to_compile(_not_compiled(launches), fix)


def _refuse_to_compile(specs: list[KernelSpec], fix: str) -> None:
    """Raise RuntimeError if any kernel remains to be compiled."""
    if specs:
        raise RuntimeError(f"{specs[0].name} is not compiled yet, and a stream capture cannot wait for it: {fix}")


def refuse_capture(reason: str) -> None:
    """Raise RuntimeError if the current stream is captured."""
    if namespace().cuda.get_current_stream().is_capturing():
        raise RuntimeError(f"this call cannot be captured: {reason}")


def bind(plan: KernelPlan, of: PassLayout, machine: LaunchTarget | None = None) -> BoundCall:
    """Return the function that runs a pass on arrays of one layout on the current device; it checks only alignment.

    Parameters
    ----------
    plan : KernelPlan
    of : PassLayout
    machine : LaunchTarget, optional
        The machine that runs the kernels, and the library of its arrays; default: CuPy's current device.

    Returns
    -------
    callable
        It takes arrays in the order of the inputs, the `numbers` of the features of the pass, and the checks of the
        call, and returns new results.

    Raises
    ------
    UnsupportedProblem
        Raised by the returned function for arrays that do not start at a multiple of their item size.
    """
    machine = machine or _GPU
    bound, results = bound_pass(plan, of, machine), of.results
    names, item_bits = tuple(of.inputs), [array.dtype.itemsize - 1 for array in of.inputs.values()]
    any_bits, sets_zeros, launch = reduce(or_, item_bits), bool(bound.record.zeroed), bound.launch
    makers = [machine.maker(result.shape, result.dtype, of.axes.get(name)) for name, result in results.items()]
    current_stream, address, layout, keep_captured = (
        machine.stream, machine.address, machine.layout, machine.keep_captured
    )  # fmt: skip

    def call(*arrays: Array, numbers: Sequence[int] = (), check: checks.Check | None = None) -> list[Array]:
        addresses = list(map(address, arrays))
        if reduce(or_, addresses) & any_bits and any(map(and_, addresses, item_bits)):
            raise UnsupportedProblem(
                reason for name, array in zip(names, arrays) for reason in layout_reasons(name, layout(array))
            )
        stream = current_stream()
        try:
            is_capturing = stream.is_capturing()
        except RuntimeError as error:
            raise_earlier(error)
            raise
        if check is not None:
            checked = {name: check.empty(name, result.shape, result.dtype) for name, result in results.items()}
            bound([*arrays, *checked.values()], stream, check, numbers)
            check.after(f"the {machine.executor} executor", checked)
            return list(checked.values())
        outputs = [make() for make in makers]
        if sets_zeros:
            workspaces = bound([*arrays, *outputs], stream, numbers=numbers)
        else:
            addresses += map(address, outputs)
            addresses += numbers
            workspaces = launch(addresses, stream)
        if is_capturing:
            keep_captured(plan, [*outputs, *workspaces], of.pins)
        return outputs

    return call


def bound_pass(plan: KernelPlan, of: PassLayout, machine: LaunchTarget | None = None) -> BoundPass:
    """Return the launches of a pass for arrays of these layouts; parameters as for `bind`."""
    kernels, machine = plan.pass_of(of.name, of.inputs), machine or _GPU
    machine.prepare(kernels)
    new = (View.of_new(name, result, of.axes.get(name)) for name, result in of.results.items())
    besides = {name: Workspace(result.shape, result.dtype) for name, result in of.unwanted.items()}
    return BoundPass.of_plan(plan, kernels, (*starmap(View.of, of.inputs.items()), *new), machine, besides)


def compile_kernels(specs: Iterable[KernelSpec], machine: Gpu) -> None:
    """Compile and load kernels, without a request for more than the default size of dynamic shared memory.

    Raises
    ------
    RuntimeError
        The stream is captured, and a kernel is not loaded yet.
    """
    _compile([spec for spec in specs if not nvrtc.is_loaded(spec, _capability())], machine)


def _compile(not_loaded: list[KernelSpec], machine: Gpu) -> None:
    """Compile and load kernels in parallel; a capture of the current stream refuses to wait for this."""
    if not_loaded and machine.stream().is_capturing():
        _refuse_to_compile(not_loaded, _COMPILE_FIRST)
    nvrtc.precompile(not_loaded, _capability())


def lists_of_calls(plan: KernelPlan, work: WorkAtCall, machine: Gpu | None = None) -> Callable[..., Array]:
    """Return a function that takes a mask's arrays and returns block lists for calls of a plan.

    The lists are built from the arrays, or are those of a block index.

    Raises
    ------
    RuntimeError
        The stream is captured, and the kernels that build lists are not compiled yet.
    """
    machine = machine or _GPU
    current_stream, address, keep_captured = machine.stream, machine.mask_address, machine.keep_captured
    make: ListMaker | None = None
    if work.carried is not work.source:
        compile_kernels(work.source.kernels.specs.values(), machine)
        make = ListMaker(work.source, machine)
    sent = None if work.carried is None else machine.sent

    def call(*arrays: Array) -> Array:
        stream = current_stream()
        read = list(arrays if sent is None else map(sent, arrays))
        lists = read[0] if make is None else make(list(map(address, read)), stream)
        if stream.is_capturing():
            keep_captured(plan, [lists] if sent is None else [*read, lists], True)
            if make is not None:
                hold(make)
        return lists

    return call


_captured: WeakKeyDictionary[KernelPlan, list[Array]] = WeakKeyDictionary()
_pinned: set[Hashable] = set()


def hold(owner: Hashable) -> None:
    """Keep a plan, a list maker or a selection alive forever, together with the arrays that it holds."""
    _pinned.add(owner)
