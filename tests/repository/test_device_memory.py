"""Peaks of memory on a GPU count workspaces, even those that earlier calls kept. A double stands in for CuPy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash.executors.workspaces import Workspaces
from cuflash.planning.launches import Workspace


class Stream:
    def __init__(self, ptr: int, cuda: SimpleNamespace) -> None:
        self.ptr, self._cuda = ptr, cuda

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> None:
        self._cuda.streams.append(self)

    def __exit__(self, *raised: object) -> None:
        self._cuda.streams.pop()


class MemoryPool:
    """A pool that counts the bytes that it gives out, and has a limit."""

    def __init__(self) -> None:
        self.taken, self.limit = 0, 0

    def set_limit(self, size: int) -> None:
        self.limit = size

    def malloc(self, nbytes: int) -> np.ndarray:
        self.taken += nbytes
        if self.limit and self.taken > self.limit:
            raise MemoryError
        return np.zeros(nbytes, np.uint8)

    def total_bytes(self) -> int:
        return self.taken

    def free_all_blocks(self) -> None:
        self.taken = 0


@contextlib.contextmanager
def double() -> Iterator[SimpleNamespace]:
    """Replace CuPy's module `cuda` by one that has only streams and pools."""
    found = SimpleNamespace(MemoryPool=MemoryPool, allocators=[MemoryPool().malloc])
    found.streams = [Stream(0, found)]
    found.Stream = SimpleNamespace(ptds=Stream(2, found))
    found.Device = lambda: SimpleNamespace(synchronize=lambda: None)

    @contextlib.contextmanager
    def using_allocator(allocator: Any) -> Iterator[None]:
        found.allocators.append(allocator)
        yield
        found.allocators.pop()

    found.using_allocator = using_allocator
    cupy = ModuleType("cupy")
    cupy.cuda = found  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        yield found


class Memory:
    """Memory of workspaces as the gpu executor has it, from the allocator of the double."""

    def __init__(self, cuda: SimpleNamespace) -> None:
        self._cuda, self._pieces, self._zeros = cuda, dict[int, list[Any]](), dict[int, Any]()

    def maker(self, shape: tuple[int, ...], dtype: Any) -> Callable[[], Any]:
        return lambda: self._cuda.allocators[-1](int(np.prod(shape)) * np.dtype(dtype).itemsize)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.maker(shape, dtype)()

    def kept_zeros(self, workspace: Workspace) -> dict[int, Any]:
        return self._zeros

    def kept_pieces(self) -> dict[int, list[Any]]:
        return self._pieces

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data


def call_of(cuda: SimpleNamespace) -> Callable[[], str]:
    """Return a call with a workspace of 1024 bytes, and one of 64 bytes that must be zero."""
    needs = {"scores": Workspace((1024,), np.dtype(np.uint8)), "counts": Workspace((16,), np.dtype(np.int32), True)}
    workspaces = Workspaces(needs, Memory(cuda))

    def call() -> str:
        stream = cuda.streams[-1]
        workspaces.give_back(stream, workspaces.take(stream))
        return "results"

    return call


def test_a_call_after_others_has_the_peak_of_the_first(load) -> None:
    peak_on_device = load("device_memory").peak_on_device
    with double() as cuda:
        call = call_of(cuda)
        peaks = [peak_on_device(call)]
        call()  # which leaves its workspaces to the stream
        peaks += [peak_on_device(call), peak_on_device(call)]
        assert peaks == [("results", 1024 + 64)] * 3
        assert cuda.streams[-1].ptr == 0 and len(cuda.allocators) == 1


def test_more_than_a_limit_is_a_memory_error(load) -> None:
    peak_on_device = load("device_memory").peak_on_device
    with double() as cuda:
        assert peak_on_device(call_of(cuda), 1088)[1] == 1088
        try:
            taken = peak_on_device(call_of(cuda), 1087)[1]
        except MemoryError:
            taken = 0
        assert taken == 0
