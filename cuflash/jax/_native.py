"""Passes that XLA launches by a function in C++, without Python, if this machine has a C++ compiler."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import numpy as np

from ..executors.xla_gpu import Flat
from ..sim.compiler import BuildError, host_library

TARGET = f"{__name__.partition('.')[0]}_pass"  # so that another copy of the library has a target of its own
_SOURCE = Path(__file__).with_name("handler.cpp")


class _Kernel(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("starts", ctypes.c_void_p), ("grid", ctypes.c_uint32),
                ("threads", ctypes.c_uint32), ("shared_bytes", ctypes.c_uint32),
                ("num_arguments", ctypes.c_uint32)]  # fmt: skip


class _Pass(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("words", "places", "kernels", "zeros")] + [
        (name, ctypes.c_uint32) for name in ("num_words", "num_places", "num_kernels", "num_zeros", "num_buffers")
    ]


_BIND = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)


class Functions(NamedTuple):
    """Addresses of functions of the CUDA driver: cuLaunchKernel, cuMemsetD8Async and cuCtxGetDevice."""

    launch: int
    set_zero: int
    device: int


class _Driver(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (*Functions._fields, "bind")]


def driver() -> Functions:
    """Return the functions of the driver of this machine.

    Raises
    ------
    OSError
        There is no driver.
    """
    library = ctypes.CDLL("libcuda.so.1")
    names = "cuLaunchKernel", "cuMemsetD8Async", "cuCtxGetDevice"
    return Functions(*(_address(getattr(library, name)) for name in names))


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


class Handler:
    """The function that XLA calls, registered as `TARGET` for a platform.

    Parameters
    ----------
    platform : str
        A platform of JAX.
    functions : Functions
    flags : sequence of str
        Flags of the compiler.

    Raises
    ------
    BuildError
        There is no compiler, or it fails.
    """

    def __init__(self, platform: str, functions: Functions, flags: Sequence[str] = ()) -> None:
        self._library = host_library("handler", _SOURCE, tuple(flags))
        self._set = self._library.cuflash_set
        self._set.argtypes = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._passes: WeakValueDictionary[int, NativePass] = WeakValueDictionary()
        self._lock = threading.RLock()
        self._bind = _BIND(self._bound)
        self._library.cuflash_set_driver(ctypes.byref(_Driver(*functions, _address(self._bind))))
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(self._library.cuflash_pass), platform=platform)

    def __call__(self, flat: Callable[[int], Flat], device: int) -> NativePass | None:
        """Return the pass that XLA launches, or None if it exceeds a limit; equal ones are one object.

        Parameters
        ----------
        flat : callable
            Returns the launches on the device of a number, and holds what the kernels read besides buffers of calls.
        device : int
            The number of the current device.
        """
        number = flat(device).number
        with self._lock:
            native = self._passes.setdefault(number, NativePass(number, flat, self._set))
            return native if native.bind(device) else None

    def _bound(self, number: int, device: int) -> int:
        """Bind a pass to a device that runs it for the first time; return 0 if that fails."""
        with self._lock:
            native = self._passes.get(number)
        try:
            return 0 if native is None else native.bind(device)
        except Exception as error:  # XLA's thread cannot receive it
            warnings.warn(f"a pass cannot be bound to device {device}: {error}", RuntimeWarning, stacklevel=2)
            return 0


class NativePass:
    """A pass that XLA launches while this object exists.

    Attributes
    ----------
    number : int
        The attribute of the custom call, that of `Flat`, so that programs stored on disk are right in other
        processes, too.
    """

    def __init__(self, number: int, flat: Callable[[int], Flat], set_pass: Callable[..., int]) -> None:
        self.number, self._flat, self._set = number, flat, set_pass
        self._held: dict[int, tuple[Any, ...]] = {}

    def bind(self, device: int) -> int:
        """Enter the launches on a device into the handler's table; return their address, or 0 if it is refused."""
        if device not in self._held:
            flat = self._flat(device)
            starts = [np.array(each, np.uint32) for *_, each in flat.kernels]
            kernels = (_Kernel * len(flat.kernels))(*(
                _Kernel(function, own.ctypes.data, grid, threads, shared_bytes, len(own))
                for (function, grid, threads, shared_bytes, _), own in zip(flat.kernels, starts)
            ))  # fmt: skip
            words, places, zeros = flat.words.copy(), np.array(flat.places, np.int64), np.array(flat.zeros, np.int64)
            packed = _Pass(
                words.ctypes.data, places.ctypes.data, ctypes.addressof(kernels), zeros.ctypes.data, len(words),
                len(places), len(kernels), len(zeros), flat.num_buffers,
            )  # fmt: skip
            if not self._set(self.number, device, ctypes.addressof(packed)):
                return 0
            self._held[device] = packed, words, places, kernels, zeros, starts
        return ctypes.addressof(self._held[device][0])

    def __del__(self) -> None:
        for device in self._held:
            self._set(self.number, device, None)


@cache
def handler() -> Handler | None:
    """Return the handler of GPUs, or None after a warning that Python launches kernels."""
    try:
        return Handler("CUDA", driver())
    except (BuildError, OSError) as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"JAX calls Python to launch kernels, which takes longer: {reason}", RuntimeWarning, stacklevel=2)
        return None
