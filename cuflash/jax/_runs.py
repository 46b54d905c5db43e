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
from ._native import TARGET, NativePass, handler
from ._own_axes import FROM_HEADS

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

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names of the results; gradients have the names of their arrays."""
        return ("q", "k", "v", *self.wrt) if self.name.startswith("backward") else ("o", "lse")

    def are_swapped(self, shapes: Sequence[tuple[int, ...]]) -> list[bool]:
        """Return which arrays have tokens before heads in memory; `shapes` are those in memory."""
        return [self._is_swapped(name, len(shape)) for name, shape in zip(self.names, shapes)]

    def are_results_swapped(self) -> list[bool]:
        """Return which results have tokens before heads in memory."""
        return [self._is_swapped(name, each.ndim) for name, each in zip(self.result_names, self.results)]

    def _is_swapped(self, name: str, rank: int) -> bool:
        return self.call.tokens_first and FROM_HEADS.get(name.removesuffix(DOT)) == 3 <= rank

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


def run_by_xla(
    one: Pass, platform: str, keep: Callable[[object], None] | None, *arrays: jax.Array
) -> list[jax.Array]:
    """Return the results of a pass on JAX arrays that are lowered for a platform.

    `keep` keeps an object as long as the compiled program. Without it, XLA calls Python.
    """
    shapes, are_swapped = [array.shape for array in arrays], one.are_results_swapped()
    runner: OnHost | OnGpu = RUNNERS[platform](one, shapes)
    native = runner.native() if keep is not None else None
    if native is not None and keep is not None:
        keep(native)
    own = [
        ShapeDtype(_swapped(each.shape), each.dtype) if is_swapped else each
        for each, is_swapped in zip(one.results, are_swapped)
    ]
    # XLA copies nothing for a swap that undoes one of the model.
    results = _called_by_xla(runner, native, own)(*_in_order(arrays, one.are_swapped(shapes)), *runner.lists)
    return _in_order(results, are_swapped)


def _in_order(arrays: Sequence[Any], are_swapped: Sequence[bool]) -> list[Any]:
    """Swap heads and tokens of some arrays."""
    return [array.swapaxes(-3, -2) if is_swapped else array for array, is_swapped in zip(arrays, are_swapped)]


def _swapped(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the items of the axes of an array after heads and tokens are swapped."""
    *leading, heads, tokens, last = axes
    return (*leading, tokens, heads, last)


def executable(
    one: Pass, shapes: Sequence[tuple[int, ...]], device: jax.Device
) -> Callable[..., list[jax.Array]] | None:
    """Return the function that runs a pass on arrays with data on a device, without tracing it.

    Passes that differ only in the contents of their masks share a function that XLA compiles, which takes the lists of
    blocks as arrays; on the CPU XLA is not needed. Return None if that is impossible.
    The function takes `call.held` before the arrays.
    """
    runner: OnHost | OnGpu = RUNNERS[device.platform](one, shapes, True)
    if isinstance(runner, OnHost):
        return partial(runner.on_data, one.results, device)
    if not runner.is_plain or not all(array.size and array.flags.c_contiguous for array in one.call.held):
        return None

    def compiled() -> Any:
        return jax.jit(_called_by_xla(runner, runner.native(), one.results))

    shared = CALLS.get_or_make(("jax lists", runner.number, tuple(one.results)), compiled)
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

    def run(*arrays: jax.Array) -> list[jax.Array]:  # holds the native pass
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
    takes_held : bool
        True if calls pass `call.held`, too.
    """

    scratch: Sequence[ShapeDtype] = ()
    lists: Sequence[Array] = ()

    def __init__(self, one: Pass, shapes: Sequence[tuple[int, ...]], takes_held: bool = False) -> None:
        options = one.call.options
        _require_executor(options.executor, "cpu", "sim")
        executor = "cpu" if options.executor == "auto" else options.executor
        self._names, self._shapes, self._name = one.names, one.shapes, one.name
        self._are_swapped, self._are_results_swapped = one.are_swapped(shapes), one.are_results_swapped()
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
        in_order = _in_order([np.asarray(buffer) for buffer in buffers], self._are_swapped)
        for name, shape, array in zip(self._names, self._shapes, in_order):
            if name == SEED:
                arrays[name] = array.reshape(-1).view(np.uint64).reshape(())
            else:
                arrays[name] = array if array.shape == shape else np.broadcast_to(array, shape)
        read = {name: arrays[name] for name in self._read}
        computed = self._plan_of(arrays)._run(self._name, read, {})
        for buffer, result in zip(results, _in_order(computed, self._are_results_swapped)):
            np.asarray(buffer)[...] = result


class OnGpu:
    """A pass on a GPU, with the interface of `OnHost`: it launches kernels on XLA's buffers, and waits for nothing.

    Attributes
    ----------
    is_plain : bool
        True if the pass only launches kernels. XLA then needs no Python, if there is a C++ compiler.
    number : int
        That of the launches, if it is plain; they are the same for all lists of similar lengths.
    lists : list of uint8 arrays
        The lists of blocks that the host has made, which calls pass after the arrays.
    """

    def __init__(self, one: Pass, shapes: Sequence[tuple[int, ...]], takes_held: bool = False) -> None:
        _require_executor(one.call.options.executor, "gpu")
        ready, contents = _gpu_plan(one), one.call.looked_up.contents
        plan, work = ready._plan, ready._plan.work
        self._ready, self._name, self._lists_of = ready, one.name, None
        self._views = {
            name: _view(one.dtype(name), shape, in_memory, is_swapped)
            for name, shape, in_memory, is_swapped in zip(one.names, one.shapes, shapes, one.are_swapped(shapes))
        }
        self._read = _names_of_arrays(one, ready)
        self._are_results_swapped = one.are_results_swapped()
        self._results = [
            _view(each.dtype, each.shape, each.shape, is_swapped)
            for each, is_swapped in zip(one.results, self._are_results_swapped)
        ]
        self._held, self._slots = one.call.held if isinstance(work, WorkAtCall) else (), list[str]()
        if one.call.has_slots and contents is not None:
            self._slots = [f"{MASK}{slot.number}" for slot in contents.arrays]
        self.lists, self.scratch, self._flats = list[Array](), list[ShapeDtype](), dict[int, xla_gpu.Flat]()
        self.is_plain = plan.is_kernels_alone and plan.results(one.name) == plan.kernel_results(one.name)
        self.is_plain = self.is_plain and not checks.is_on()
        if self.is_plain:
            self._make_flat = self._maker(one.names, takes_held)
            flat = self._flat(nvrtc.current_number())
            self.number = flat.number
            if flat.scratch_bytes:
                self.scratch = [ShapeDtype((flat.scratch_bytes,), np.dtype(np.uint8))]
        elif isinstance(work, WorkAtCall):
            self._lists_of = gpu.lists_of_calls(plan, work)

    def _maker(self, names: Sequence[str], takes_held: bool) -> Callable[[], xla_gpu.Flat]:
        """Return the function that returns the launches on the current device, and set `lists`."""
        plan, buffers = self._ready._plan, {name: xla_gpu.Source(number) for number, name in enumerate(names)}
        inputs = plan.problem.keyed({name: (self._views[name], buffers[name]) for name in self._read})
        inputs = {name: (view._replace(name=name), buffer) for name, (view, buffer) in inputs.items()}
        starts, memory = xla_gpu.packed(xla_gpu.lists_of(plan.work))
        lists = {key: xla_gpu.Source(len(names), start) for key, start in starts.items()}
        self.lists = [memory] if lists else []
        of_mask, num_arguments = [buffers[name] for name in self._slots], len(names) + len(self.lists)
        if takes_held:
            of_mask += [xla_gpu.Source(num_arguments + number) for number in range(len(self._held))]
            num_arguments += len(self._held)
        else:
            of_mask += [xla_gpu.Source(None, array.data.ptr) for array in self._held]
        axes = {
            name: _swapped(range(each.ndim))
            for (name, each), is_swapped in zip(plan.kernel_results(self._name).items(), self._are_results_swapped)
            if is_swapped
        }
        numbers = self._ready._numbers
        return partial(xla_gpu.flat, plan, self._name, inputs, axes, of_mask, lists, numbers, num_arguments)

    def _flat(self, device: int) -> xla_gpu.Flat:
        """Return the launches on a device."""
        if device not in self._flats:
            self._flats[device] = xla_gpu.within(device, self._make_flat)
        return self._flats[device]

    def native(self) -> NativePass | None:
        """Return the pass that XLA launches without Python; None if Python has to prepare each call."""
        if not self.is_plain or (of_device := handler()) is None:
            return None
        return of_device(self._flat, nvrtc.current_number())

    def __call__(self, context: ExecutionContext, results: Sequence[Buffer], *buffers: Buffer) -> None:
        device = buffers[0].__dlpack_device__()[1]
        run = partial(self._with_cupy, device, context.stream, results, buffers)
        if self.is_plain:
            run = partial(self._flat(device).launch, [*map(xla_gpu.address, (*buffers, *results))], context.stream)
        xla_gpu.within(device, run)

    def _with_cupy(self, device: int, stream: int, results: Sequence[Buffer], buffers: Sequence[Buffer]) -> None:
        """Run the pass on CuPy arrays in the buffers' memory, if it is checked or does more than launch kernels."""
        with xla_gpu.as_cupy_stream(stream):
            views = zip(self._views.items(), buffers)
            arrays = {name: xla_gpu.as_cupy(buffer, view, device) for (name, view), buffer in views}
            read = {name: arrays[name] for name in self._read}
            if self._lists_of is not None:
                read[AT_CALL] = self._lists_of(*(self._held or [arrays[name] for name in self._slots]))
            for buffer, view, result in zip(results, self._results, self._ready._run(self._name, read, {})):
                xla_gpu.as_cupy(buffer, view, device)[...] = result


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


def _view(
    dtype: np.dtype[np.generic], shape: tuple[int, ...], in_memory: tuple[int, ...], is_swapped: bool
) -> View:
    """Return the layout of a dense array that is broadcast to a shape; heads and tokens may be swapped in memory."""
    if dtype == np.uint64 and in_memory == (2,):  # a seed in two words
        return View("", dtype, (), ())
    order = range(len(in_memory))
    steps = zip(in_memory, dense_strides(in_memory, _swapped(order) if is_swapped else order))
    strides = [step * dtype.itemsize if extent != 1 else 0 for extent, step in steps]
    return View("", dtype, shape, (*[0] * (len(shape) - len(strides)), *strides))


RUNNERS: dict[str, Callable[..., OnHost | OnGpu]] = {"cpu": OnHost, "gpu": OnGpu}
