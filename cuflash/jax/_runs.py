"""Passes on buffers of XLA: the functions that XLA calls, on the CPU and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.experimental.buffer_callback import Buffer, buffer_callback

from ..arrays import Array, ShapeDtype, accumulator_dtype
from ..blocks.work_list import WorkList
from ..compiler import nvrtc
from ..errors import UnsupportedProblem
from ..executors import checks, gpu, xla_gpu
from ..executors._records import View
from ..layouts import dense_strides
from ..masks.one_array import at_each_call
from ..planning._call_cache import CALLS
from ..planning.dropout_launches import SEED
from ..planning.list_kernels import AT_CALL, WorkAtCall
from ..planning.options import DOT, MaskLike
from ..plans.plan import Plan
from ._call import MASK, JaxCall, mask_over
from ._native import TARGET, NativePass, handler, number_of

if TYPE_CHECKING:
    from jax.experimental.buffer_callback import ExecutionContext

_ENVIRONMENT_BYTES = 64  # at least the size of C's fenv_t
_LIKE_LSE = ("lse", "dlse")


class Pass(NamedTuple):
    """A pass of a call with its arrays: the parameters of a primitive.

    Attributes
    ----------
    call : JaxCall
    name : str
        "forward", "jvp", "backward" or "backward_jvp".
    names : tuple of str
        The names of the arrays, in order.
    shapes : tuple of tuple of int
        The shapes to which the arrays are broadcast, without a copy.
    wrt : tuple of str
        The operands whose gradients are results.
    """

    call: JaxCall
    name: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    wrt: tuple[str, ...] = ()

    @property
    def of(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays by name."""
        return dict(zip(self.names, self.shapes))

    @property
    def results(self) -> list[ShapeDtype]:
        """The shapes and dtypes of the results."""
        of = self.of
        if self.name.startswith("backward"):
            return [ShapeDtype(of[name], self.dtype(name)) for name in ("q", "k", "v", *self.wrt)]
        q, k, v = of["q"], of["k"], of["v"]
        lse = (*np.broadcast_shapes(q[:-3], k[:-3], v[:-3]), *q[-3:-1])
        return [ShapeDtype((*lse, v[-1]), self.dtype("o")), ShapeDtype(lse, self.dtype("lse"))]

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """Return the dtype that an array has in plans."""
        name = name.removesuffix(DOT)
        dtypes = self.call.dtypes
        if name == SEED:
            return np.dtype(np.uint64)
        if name in _LIKE_LSE:
            return accumulator_dtype(np.dtype(dtypes["q"]))
        dtype: np.dtype[np.generic] = np.dtype(dtypes["q" if name in ("o", "do") else name])
        return dtype


def prepared(
    one: Pass, platform: str, shapes: Sequence[tuple[int, ...]], keep: Callable[[object], None] | None = None
) -> Callable[..., list[jax.Array]]:
    """Return the function that runs a pass on JAX arrays on a platform.

    Parameters
    ----------
    shapes : sequence of tuple of int
        The shapes of the arrays.
    keep : callable, optional
        Keeps an object as long as the compiled program. Without it, XLA calls Python.
    """
    runner: OnHost | OnGpu = RUNNERS[platform](one, shapes)
    native = runner.native() if keep is not None else None
    if native is not None and keep is not None:
        keep(native)
    return _called_by_xla(runner, native, one.results)


def executable(
    one: Pass, shapes: Sequence[tuple[int, ...]], device: jax.Device
) -> Callable[..., list[jax.Array]] | None:
    """Return the function that runs a pass on arrays with data on a device, without tracing it.

    Passes that differ only in the contents of their masks share a function that XLA compiles, which takes the lists of
    blocks as arrays; on the CPU XLA is not needed. Return None if the lists must be parts of the compiled function.
    The function takes `call.held` before the arrays.
    """
    runner: OnHost | OnGpu = RUNNERS[device.platform](one, shapes, True)
    if isinstance(runner, OnHost):
        return partial(runner.on_data, one.results, device)
    if not runner.takes_lists:
        return None

    def compiled() -> Any:
        return jax.jit(_called_by_xla(runner, runner.native(), one.results))

    key = "jax lists", None if one.call.held else runner.number(), tuple(one.results)
    shared: Callable[..., list[jax.Array]] = compiled() if one.call.held else CALLS.get_or_make(key, compiled)
    lists = [jax.device_put(each, device) for each in runner.lists]
    return lambda held, *arrays: shared(*arrays, *lists, *map(_bytes_of, held))


def _bytes_of(array: Array) -> jax.Array:
    """Return a dense array of CuPy as bytes, without a copy."""
    return jax.dlpack.from_dlpack(array.reshape(-1).view(np.uint8))


def _called_by_xla(
    runner: OnHost | OnGpu, native: NativePass | None, own: Sequence[ShapeDtype]
) -> Callable[..., list[jax.Array]]:
    """Return the function whose lowering makes XLA call a runner or, without Python, launch a native pass."""
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (*own, *runner.scratch)]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        if native is None:
            return list(buffer_callback(runner, results)(*arrays))[: len(own)]
        return list(jax.ffi.ffi_call(TARGET, results)(*arrays, call=np.int64(native.number)))[: len(own)]

    return run


def _require_executor(executor: Any, platform: str, *others: str) -> None:
    """Refuse an executor that cannot access arrays on a platform."""
    if executor in ("cpu", "sim", "gpu") and executor not in (platform, *others):
        wanted = "gpu" if executor == "gpu" else "cpu"
        rule = f"executor={executor!r} takes arrays on {wanted!r}"
        raise UnsupportedProblem([f"{rule}; got q on {platform!r}: move them"])


def _names_of_arrays(one: Pass, plan: Plan) -> list[str]:
    """Return the names of the arrays that a pass reads, without those of the mask."""
    is_of_forward, is_backward = plan._plan.problem.is_of_forward, one.name.startswith("backward")
    names = [name for name in one.names if not name.startswith(MASK)]
    return [name for name in names if not (is_backward and is_of_forward(name.removesuffix(DOT)))]


@contextmanager
def _subnormal_numbers() -> Iterator[None]:
    """Run with C's default floating-point environment, since XLA's threads flush subnormals to 0."""
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    ctypes.pythonapi.fegetenv(before)
    ctypes.pythonapi.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        ctypes.pythonapi.fesetenv(before)


class OnHost:
    """A pass on the CPU, as XLA calls it.

    Attributes
    ----------
    scratch : list of ShapeDtype
        Memory that a call needs in addition to its results.

    Parameters
    ----------
    one : Pass
    shapes : sequence of tuple of int
        The shapes of the arrays in memory.
    takes_lists : bool
        True if each call passes the lists of blocks that the GPU's kernels read, as an array after the others.
    """

    scratch: Sequence[ShapeDtype] = ()

    def __init__(self, one: Pass, shapes: Sequence[tuple[int, ...]], takes_lists: bool = False) -> None:
        options = one.call.options
        _require_executor(options.executor, "cpu", "sim")
        executor = "cpu" if options.executor == "auto" else options.executor
        self._names, self._shapes, self._name = one.names, one.shapes, one.name
        self._plan_of: Callable[[Mapping[str, Array]], Plan]
        if one.call.has_slots:  # the mask may differ at each call; everything else is checked now
            planned = partial(one.call.planned, executor, one.of, one.wrt)
            plan, self._plan_of = planned(None), lambda arrays: planned(mask_over(options.mask, arrays))
        else:  # the cache of calls may hold this object, which must not keep the mask
            plan = one.call.cached_plan(executor, one.of, one.wrt, lambda: options.mask)
            self._plan_of = lambda arrays: plan
        self._read = _names_of_arrays(one, plan)

    def native(self) -> None:
        """Return None: XLA calls Python."""

    def on_data(
        self, own: Sequence[ShapeDtype], device: jax.Device, held: tuple[Array, ...], *arrays: jax.Array
    ) -> list[jax.Array]:
        """Return the results, of these shapes and dtypes, of a pass on arrays with data on a device."""
        results = [np.empty(each.shape, each.dtype) for each in own]
        with _subnormal_numbers():
            self._run(results, arrays)
        is_placed = any(isinstance(array, jax.Array) and array.committed for array in arrays)
        return [jax.device_put(result, device if is_placed else None) for result in results]

    def __call__(self, context: ExecutionContext, results: Sequence[Buffer], *buffers: Buffer) -> None:
        with _subnormal_numbers():
            self._run(results, buffers)

    def _run(self, results: Sequence[Array], buffers: Sequence[Array]) -> None:
        arrays = dict[str, Array]()
        for name, shape, buffer in zip(self._names, self._shapes, buffers):
            array = np.asarray(buffer)
            if name == SEED:
                arrays[name] = array.reshape(-1).view(np.uint64).reshape(())
            else:
                arrays[name] = array if array.shape == shape else np.broadcast_to(array, shape)
        read = {name: arrays[name] for name in self._read}
        for buffer, result in zip(results, self._plan_of(arrays)._run(self._name, read, {})):
            np.asarray(buffer)[...] = result


class OnGpu:
    """A pass on a GPU, with the interface of `OnHost`: it launches kernels on XLA's buffers, and waits for nothing.

    Attributes
    ----------
    takes_lists : bool
        True if calls pass the lists of blocks, or the arrays of CuPy from which kernels list them, after the arrays.
    lists : list of uint8 arrays
        These lists.
    """

    def __init__(self, one: Pass, shapes: Sequence[tuple[int, ...]], takes_lists: bool = False) -> None:
        _require_executor(one.call.options.executor, "gpu")
        ready, contents = _gpu_plan(one), one.call.looked_up.contents
        plan = ready._plan
        work, self._lists_of = plan.work, None
        is_listed = isinstance(work, WorkAtCall)
        self._ready, self._name, self._numbers = ready, one.name, ready._numbers
        self._views = {
            name: _view(one.dtype(name), shape, in_memory)
            for name, shape, in_memory in zip(one.names, one.shapes, shapes)
        }
        self._read = _names_of_arrays(one, ready)
        places = {name: place for place, name in enumerate(one.names)}
        self._places = [places[name] for name in self._read]
        self._of_mask, self._held = list[int](), one.call.held if is_listed else ()
        is_plain = plan.is_kernels_alone and plan.results(one.name) == plan.kernel_results(one.name)
        is_plain = is_plain and not checks.is_on()
        self.takes_lists, self.lists, starts = takes_lists and is_plain, list[Array](), None
        self.takes_lists = self.takes_lists and _can_be_passed(one.call.held, work)
        if one.call.has_slots and contents is not None:
            self._of_mask = [places[f"{MASK}{slot.number}"] for slot in contents.arrays]
        elif self.takes_lists:
            if not is_listed and work.nbytes:
                starts, lists = xla_gpu.packed(work.lists)
                self.lists.append(lists)
            self._of_mask = [len(shapes) + number for number in range(len(self._held or self.lists))]
            self._held = ()
        self._num_arguments = len(shapes) + (0 if one.call.has_slots else len(self._of_mask))
        self.scratch: list[ShapeDtype] = []
        self._results = [_view(each.dtype, each.shape, each.shape) for each in one.results]
        self._xla_pass: xla_gpu.XlaPass | None = None
        if is_plain:
            inputs = plan.problem.keyed({name: self._views[name] for name in self._read})
            views = [view._replace(name=name) for name, view in inputs.items()]
            self._xla_pass = xla_gpu.XlaPass(plan, one.name, views, is_listed, starts)
            if self._xla_pass.scratch_bytes:
                self.scratch = [ShapeDtype((self._xla_pass.scratch_bytes,), np.dtype(np.uint8))]
        elif isinstance(work, WorkAtCall):
            self._lists_of = gpu.lists_of_calls(plan, work)

    def native(self) -> NativePass | None:
        """Return the pass that XLA launches without Python; None if Python has to prepare each call."""
        launches = self._xla_pass
        if launches is None or launches.has_own_lists or (of_device := handler()) is None:
            return None
        return of_device(partial(self._flat, launches), nvrtc.current_number(), self._held)

    def number(self) -> int:
        """Return a digest of the launches, which are the same for all lists of similar lengths."""
        assert self._xla_pass is not None
        return number_of(self._flat(self._xla_pass, nvrtc.current_number()))

    def _flat(self, launches: xla_gpu.XlaPass, device: int) -> xla_gpu.Flat:
        """Return the launches on a device as numbers."""
        arrays = [xla_gpu.Source(place, 0) for place in self._places]
        of_mask = [xla_gpu.Source(place, 0) for place in self._of_mask]
        of_mask += [xla_gpu.Source(None, array.data.ptr) for array in self._held]
        return launches.flat(arrays, of_mask, self._numbers, self._num_arguments, device)

    def __call__(self, context: ExecutionContext, results: Sequence[Buffer], *buffers: Buffer) -> None:
        device = buffers[0].__dlpack_device__()[1]
        run = self._with_cupy if self._xla_pass is None else self._launch
        xla_gpu.within(device, lambda: run(device, context.stream, results, buffers))

    def _launch(self, device: int, stream: int, results: Sequence[Buffer], buffers: Sequence[Buffer]) -> None:
        """Launch the kernels of the pass on the buffers."""
        assert self._xla_pass is not None
        addresses = list(map(xla_gpu.address, buffers))
        written = list(map(xla_gpu.address, results))
        scratch = written.pop() if self.scratch else 0
        of_mask = [addresses[place] for place in self._of_mask] or [array.data.ptr for array in self._held]
        arrays = [addresses[place] for place in self._places]
        self._xla_pass.launch(device, stream, arrays, of_mask, written, scratch, self._numbers)

    def _with_cupy(self, device: int, stream: int, results: Sequence[Buffer], buffers: Sequence[Buffer]) -> None:
        """Run the pass on CuPy arrays in the buffers' memory, if it is checked or does more than launch kernels."""
        with xla_gpu.as_cupy_stream(stream):
            views = zip(self._views.items(), buffers)
            arrays = {name: xla_gpu.as_cupy(buffer, view, device) for (name, view), buffer in views}
            read = {name: arrays[name] for name in self._read}
            if self._lists_of is not None:
                names = list(self._views)
                of_mask = [arrays[names[place]] for place in self._of_mask] or self._held
                read[AT_CALL] = self._lists_of(*of_mask)
            for buffer, view, result in zip(results, self._results, self._ready._run(self._name, read, {})):
                xla_gpu.as_cupy(buffer, view, device)[...] = result


def _can_be_passed(held: Sequence[Array], work: WorkList) -> bool:
    """True if XLA can pass the mask's arrays, from which kernels list blocks, or the lists that the host has made."""
    if held:
        return isinstance(work, WorkAtCall) and all(array.size and array.flags.c_contiguous for array in held)
    return all(isinstance(array, np.ndarray) for array in work.lists.values())


def _gpu_plan(one: Pass) -> Plan:
    """Return the plan of a pass on the current GPU.

    Raises
    ------
    UnsupportedProblem
        The call is not supported, or kernels cannot list the mask from arrays that JAX passes.
    """
    call, of = one.call, one.of

    def mask() -> MaskLike | None:
        masks = {name: xla_gpu.without_data(of[name], one.dtype(name)) for name in of if name.startswith(MASK)}
        planned = mask_over(call.options.mask, masks)
        return planned if call.looked_up.contents is None else at_each_call(planned)

    ready = call.cached_plan("gpu", of, one.wrt, mask)
    if call.has_slots and not isinstance(ready._plan.work, WorkAtCall):
        kind = type(call.options.mask).__name__
        fix = "make a BlockIndex outside of jax.jit, or pass a boolean array or a BlockPattern"
        raise UnsupportedProblem([f"mask holds an array that JAX passes and no kernel lists ({kind}): {fix}"])
    return ready


def _view(dtype: np.dtype[np.generic], shape: tuple[int, ...], in_memory: tuple[int, ...]) -> View:
    """Return the layout of a dense array that is broadcast to a shape."""
    if dtype == np.uint64 and in_memory == (2,):  # a seed in two words
        return View("", dtype, (), ())
    steps = zip(in_memory, dense_strides(in_memory))
    strides = [step * dtype.itemsize if extent != 1 else 0 for extent, step in steps]
    return View("", dtype, shape, (*[0] * (len(shape) - len(strides)), *strides))


RUNNERS: dict[str, Callable[..., OnHost | OnGpu]] = {"cpu": OnHost, "gpu": OnGpu}
