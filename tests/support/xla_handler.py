"""The function that XLA calls on a GPU, on JAX's CPU: it launches kernels on the stand-in for a GPU."""

from __future__ import annotations

import ctypes
from functools import cache
from types import ModuleType
from typing import Any

import cupy_machine
from library_parts import part

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_SET_ZERO = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
LAUNCH_FAILED = 719


@cache
def on_cpu(library: ModuleType) -> Any:
    """Return the handler of a library for JAX's CPU; it launches on the machine that is installed."""
    native, runs = part(library, "jax._native"), part(library, "jax._runs")

    def launch(function: int, *sizes: Any) -> int:
        *of_grid, stream, table, extra = sizes
        try:
            with runs._subnormal_numbers():
                cupy_machine.Ndarray.machine._launch(function, *of_grid, stream or 0, table, extra or 0)
        except Exception:
            return LAUNCH_FAILED
        return 0

    def set_zero(address: int, value: int, nbytes: int, stream: Any) -> int:
        ctypes.memset(address, value, nbytes)
        return 0

    def device(number: Any) -> int:
        number[0] = 0
        return 0

    functions = _LAUNCH(launch), _SET_ZERO(set_zero), _DEVICE(device)
    addresses = native.Functions(*map(native._address, functions))
    handler = native.Handler("cpu", addresses, ("-DCUFLASH_WITHOUT_STREAM",))
    handler.functions = functions
    return handler
