"""The `gpu` executor: a plan's kernels on the CUDA device that CuPy has current, on its current stream."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from . import compile, passes
from .arrays import Array
from .device import DeviceSpec
from .plans import Plan
from .source import KernelSpec
from .tiles import THREADS
from .work_list import WorkList


def current_device() -> DeviceSpec:
    """The device that CuPy has current."""
    import cupy

    return _device_spec(cupy.cuda.runtime.getDevice())


@lru_cache(maxsize=64)
def _device_spec(number: int) -> DeviceSpec:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(number)
    return DeviceSpec(
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        num_processors=properties["multiProcessorCount"],
        tile_memory_bytes=properties["sharedMemPerBlockOptin"],
    )


class _Gpu:
    """CuPy, as what runs kernels."""

    def __init__(self) -> None:
        self._resident: WeakKeyDictionary[WorkList, dict[int, tuple[dict[str, Array], Any]]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        import cupy

        return cupy.empty(shape, dtype)

    def lists(self, work: WorkList) -> dict[str, Array]:
        """The arrays of a work list on the current device: copied there once, which other streams wait for."""
        import cupy

        lists = work.lists
        if all(isinstance(array, cupy.ndarray) for array in lists.values()):
            return lists
        number, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream()
        with self._lock:
            copies = self._resident.setdefault(work, {})
            if number not in copies:
                if stream.is_capturing():
                    raise RuntimeError(
                        "a block list cannot be copied to the device while its stream is captured: "
                        "call the plan once before capturing"
                    )
                arrays = {name: cupy.asarray(array) for name, array in lists.items()}
                copies[number] = arrays, stream.record()
            arrays, copied = copies[number]
        if not copied.done and not stream.is_capturing():
            stream.wait_event(copied)
        return arrays

    def launch(self, spec: KernelSpec, grid: int, shared_bytes: int, params: Any) -> None:
        import cupy

        capability = _device_spec(cupy.cuda.runtime.getDevice()).compute_capability
        assert capability is not None
        kernel = compile.kernel(spec, capability, shared_bytes=shared_bytes)
        kernel((grid,), (THREADS,), (params,), shared_mem=shared_bytes)


_GPU = _Gpu()


def forward(plan: Plan, q: Array, k: Array, v: Array, o: Array, lse: Array) -> None:
    """Write o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q]."""
    passes.forward(plan, _GPU, q, k, v, o, lse)


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
    passes.backward(plan, _GPU, do, q, k, v, o, lse, dlse, dq, dk, dv)
