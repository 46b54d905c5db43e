"""NumPy's memory for the data of arrays, whose allocations fail at a place.

NumPy calls the functions of a handler that is set by its C interface. The ones here count, fail, and call those of the
C library. They are compiled, because arrays are also freed while Python raises an error.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_SET_HANDLER = 304  # the place of PyDataMem_SetHandler in NumPy's table of functions, which does not change
_TEXT = """
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <atomic>
extern "C" {
std::atomic<int64_t> left{INT64_MAX}, allocated{0}, live{0};
static bool is_left() { ++allocated; return left-- > 0; }
static void* kept(void* data) { live += malloc_usable_size(data); return data; }
static void* take(void*, size_t size) { return is_left() ? kept(malloc(size)) : nullptr; }
static void* take_zeros(void*, size_t number, size_t size) { return is_left() ? kept(calloc(number, size)) : nullptr; }
static void* resize(void*, void* data, size_t size) {
  if (!is_left()) return nullptr;
  live -= malloc_usable_size(data);
  return kept(realloc(data, size));
}
static void give_back(void*, void* data, size_t) { live -= malloc_usable_size(data); free(data); }
struct Handler {
  char name[127];
  uint8_t version;
  void *context, *malloc, *calloc, *realloc, *free;
} handler = {"counted", 1, nullptr, (void*)take, (void*)take_zeros, (void*)resize, (void*)give_back};
}
"""


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "memory.cpp", Path(folder) / "memory.so"
        source.write_text(_TEXT, "utf-8")
        subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        return ctypes.CDLL(str(library))


def _number(name: str) -> ctypes.c_int64:
    return ctypes.c_int64.in_dll(_library(), name)


class NumpyMemory:
    """Memory of the arrays that this thread makes inside of `counted`."""

    def used_bytes(self) -> int:
        """Return how many bytes are allocated and not freed."""
        return _number("live").value

    def allocations(self) -> int:
        """Return the number of allocations so far, failed ones among them."""
        return _number("allocated").value

    @contextmanager
    def failing(self, place: int) -> Iterator[None]:
        """Let this many allocations succeed, and the next ones fail."""
        _number("left").value = place
        try:
            yield
        finally:
            _number("left").value = 1 << 62

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Let NumPy allocate this thread's arrays with the counting allocator inside a `with` block."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        handler = ctypes.addressof(ctypes.c_char.in_dll(_library(), "handler"))
        before = _set_handler(make(handler, b"mem_handler", None))
        try:
            yield
        finally:
            _set_handler(before)


def _set_handler(capsule: Any) -> Any:
    """Set the handler of this thread, and return the one before."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = pointer(np._core._multiarray_umath._ARRAY_API, None)  # type: ignore[attr-defined]
    function = (ctypes.c_void_p * (_SET_HANDLER + 1)).from_address(table)[_SET_HANDLER]
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(function)(capsule)
