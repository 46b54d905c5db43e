"""Simulated launches of kernels that are compiled for the host: argument passing, and errors as exceptions."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

_ORDERS = ("round_robin", "first_warp", "last_warp", "random", "priorities")
_COPIES = ("eager", "late", "random")
_MAX_SHARED_BYTES = 227 << 10
_MAX_BLOCK = 1024
# Resident threads are limited because each has its own stack, and an operating system limits a process's mappings.
_MAX_RESIDENT_THREADS = 1 << 14
# The alignment of tensor maps, which is the strictest of all types that kernels take by value.
_ALIGNMENT = 128
_MESSAGE_BYTES = 8192

# The runtime can simulate only one launch at a time, so calls from several threads wait for this lock.
_one_launch = threading.Lock()


class SimulationError(RuntimeError):
    """The error for a kernel that breaks a rule; its message names line, block, thread and schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The choices of a simulated launch that do not affect the results of a correct kernel.

    >>> Schedule(seed=7, order="random", copies="late", shuffle_lanes=True).order
    'random'

    Attributes
    ----------
    seed : int
        The seed that determines all random choices of a launch.
    order : "round_robin", "first_warp", "last_warp", "random" or "priorities"
        Which warp runs next when one waits or has finished an operation. "priorities" runs the warp with the highest
        priority and changes priorities a few times: this finds bugs that need few switches at unlikely places.
    copies : "eager", "late" or "random"
        When asynchronous copies complete: when they are issued, when a thread waits for them, or randomly either.
    poison : bool
        True to fill shared memory and the destinations of pending copies with bytes 0xFF, which is NaN in any float
        dtype.
    shuffle_lanes : bool
        True to run the lanes of a warp in random order instead of from 0 up.
    resident_blocks : int
        How many blocks of a grid run concurrently. With 1, blocks run one after another. With more, the order also
        selects blocks: "first_warp" runs the first block that can continue, "priorities" the one with the highest
        priority. Races between them in global memory are errors if the kernel is built with ``sanitize="blocks"``.
    """

    seed: int = 0
    order: Literal["round_robin", "first_warp", "last_warp", "random", "priorities"] = "round_robin"
    copies: Literal["eager", "late", "random"] = "eager"
    poison: bool = True
    shuffle_lanes: bool = False
    resident_blocks: int = 1

    def __post_init__(self) -> None:
        if self.order not in _ORDERS:
            raise ValueError(f"order must be one of {', '.join(_ORDERS)}; got {self.order!r}")
        if self.copies not in _COPIES:
            raise ValueError(f"copies must be one of {', '.join(_COPIES)}; got {self.copies!r}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1; got {self.seed}")
        if self.resident_blocks < 1:
            raise ValueError(f"resident_blocks must be 1 or more; got {self.resident_blocks}")


class _Schedule(ctypes.Structure):
    """The C layout of Schedule in runtime/schedule.hpp."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("order", ctypes.c_int32),
        ("copies", ctypes.c_int32),
        ("poison", ctypes.c_int32),
        ("shuffle_lanes", ctypes.c_int32),
        ("resident_blocks", ctypes.c_int32),
    ]


class _Request(ctypes.Structure):
    """The C layout of Request in runtime/cta.hpp."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("time_limit", ctypes.c_double),
        ("schedule", _Schedule),
        ("flushes", ctypes.c_int32),
    ]


class Kernel:
    """A kernel compiled for the host by `cuflash.sim.build`; a call launches it.

    >>> text = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
    >>> from cuflash import sim
    >>> x = np.arange(4, dtype=np.float32)
    >>> sim.build(text, "twice")(grid=1, block=4, params=(x,))           # doctest: +SKIP
    >>> x                                                                # doctest: +SKIP
    array([0., 2., 4., 6.], dtype=float32)
    """

    def __init__(self, library: Path, runtime: Path, entry: str) -> None:
        self.entry = entry
        self._library = library
        self._runtime = _load_runtime(runtime)
        kernel = ctypes.CDLL(str(library))
        self._kernel = ctypes.cast(kernel.cuflash_sim_kernel, ctypes.c_void_p)
        kernel.cuflash_sim_parameter_sizes.restype = ctypes.POINTER(ctypes.c_size_t)
        sizes = kernel.cuflash_sim_parameter_sizes()
        self._parameter_sizes: list[int] = []
        while sizes[len(self._parameter_sizes)]:
            self._parameter_sizes.append(sizes[len(self._parameter_sizes)])

    def __repr__(self) -> str:
        return f"<Kernel {self.entry} for the host, parameters of {self._parameter_sizes} bytes>"

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int,
        params: tuple[Any, ...],
        shared_bytes: int = 0,
        schedule: Schedule = Schedule(),
        *,
        time_limit: float = 60.0,
        flushes: bool = True,
    ) -> None:
        """Run every block of the grid under the schedule, and return when all have ended.

        Parameters
        ----------
        grid : int or tuple of 1 to 3 ints
        block : int
            Threads per block, 1 to 1024.
        params : tuple
            The arguments. An array is passed as the address of its first element; a NumPy scalar, which may be
            structured, is passed by value.
        shared_bytes : int
            Dynamic shared memory per block.
        time_limit : float
            Seconds after which a launch is stopped if it has not ended.
        flushes : bool
            True if arithmetic counts subnormal operands and results as 0, as that of floats does on a GPU; False for
            kernels that compute in double.

        Raises
        ------
        SimulationError
            The kernel broke a rule of CUDA.
        """
        request = _Request(self._kernel, None, shared_bytes, block=block, time_limit=time_limit, flushes=flushes)
        request.grid[:] = _grid(grid)
        if not 1 <= block <= _MAX_BLOCK:
            raise ValueError(f"block must be from 1 to {_MAX_BLOCK} threads; got {block}")
        resident_threads = block * min(schedule.resident_blocks, math.prod(request.grid))
        if resident_threads > _MAX_RESIDENT_THREADS:
            raise ValueError(
                f"schedule must have resident_blocks with at most {_MAX_RESIDENT_THREADS} threads in total; got "
                f"{resident_threads}: set resident_blocks to {_MAX_RESIDENT_THREADS // block} or less"
            )
        if not 0 <= shared_bytes <= _MAX_SHARED_BYTES:
            raise ValueError(f"shared_bytes must be from 0 to {_MAX_SHARED_BYTES}; got {shared_bytes}")
        if not 0 < time_limit < float("inf"):
            raise ValueError(f"time_limit must be a positive number of seconds; got {time_limit}")
        request.schedule = _Schedule(
            schedule.seed,
            _ORDERS.index(schedule.order),
            _COPIES.index(schedule.copies),
            schedule.poison,
            schedule.shuffle_lanes,
            schedule.resident_blocks,
        )
        values = self._values(params)
        addresses = (ctypes.c_void_p * max(len(values), 1))(*(value.ctypes.data for value in values))
        request.arguments = ctypes.cast(addresses, ctypes.c_void_p)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        offsets = (ctypes.c_uint64 * 2)()
        with _one_launch:
            room = ctypes.c_size_t(_MESSAGE_BYTES)
            failed = self._runtime.cuflash_sim_launch(ctypes.byref(request), message, room, offsets)
        if failed:
            lines = [f"kernel {self.entry}: {message.value.decode(errors='replace')}"]
            words = ("this access is", "the other access is") if offsets[1] else ("interrupted",)
            for word, offset in zip(words, offsets):
                lines += _source_lines(self._library, offset, word) if offset else []
            raise SimulationError("\n  ".join([*lines, f"under {schedule}"]))

    def _values(self, params: tuple[Any, ...]) -> list[np.ndarray[Any, Any]]:
        """Return the bytes of each argument, aligned for the type with the strictest alignment."""
        if not isinstance(params, tuple):
            raise TypeError(f"params must be a tuple; got {type(params).__name__}")
        if len(params) != len(self._parameter_sizes):
            raise TypeError(f"{self.entry} takes {len(self._parameter_sizes)} parameters; got {len(params)}")
        values = []
        for position, (param, size) in enumerate(zip(params, self._parameter_sizes)):
            if isinstance(param, np.ndarray):
                data = np.uint64(param.ctypes.data).tobytes()
            elif isinstance(param, np.generic):
                data = param.tobytes()
            else:
                raise TypeError(
                    f"params[{position}] must be an array or a NumPy scalar such as np.int32(3); "
                    f"got {type(param).__name__}"
                )
            if len(data) != size:
                raise TypeError(
                    f"params[{position}] must have {size} bytes, the size of {self.entry}'s parameter; "
                    f"got {len(data)} ({type(param).__name__} of dtype {param.dtype})"
                )
            buffer = np.empty(size + _ALIGNMENT, np.uint8)
            start = -buffer.ctypes.data % _ALIGNMENT
            buffer[start : start + size] = np.frombuffer(data, np.uint8)
            values.append(buffer[start : start + size])
        return values


def _grid(grid: int | tuple[int, ...]) -> tuple[int, int, int]:
    sizes = grid if isinstance(grid, tuple) else (grid,)
    if not 1 <= len(sizes) <= 3 or any(not 1 <= size < 2**31 for size in sizes):
        raise ValueError(f"grid must be 1 to 3 positive ints; got {grid}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


@functools.lru_cache(maxsize=None)
def _load_runtime(path: Path) -> ctypes.CDLL:
    """Load the runtime with global symbols, because kernels that call its functions do not name it as a dependency."""
    runtime = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    runtime.cuflash_sim_launch.restype = ctypes.c_int
    return runtime


def _source_lines(library: Path, offset: int, word: str) -> list[str]:
    """Return a message with the source line of a kernel's instruction, and the lines into which it was inlined."""
    tool = shutil.which("addr2line")
    if tool is None:
        return ["install binutils (addr2line) to see the source line that was interrupted"]
    command = [tool, "-i", "-e", str(library), hex(offset)]
    try:
        run = subprocess.run(command, capture_output=True, encoding="utf-8", errors="backslashreplace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"the source line that was interrupted is unknown ({error})"]
    lines = [os.path.normpath(line.split(" (")[0]) for line in run.stdout.split("\n") if line]
    return [f"{word} at {' in '.join(lines)}"] if lines and "?" not in lines[0] else []
