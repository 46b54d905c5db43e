"""BLAS on one thread while calls multiply on threads of their own.

OpenBLAS with threads of its own, BLIS and FlexiBLAS have one number of threads for the whole process, and calls that
overlap share it: it is noted when a call finds more than one, and given back when the last call ends. MKL and OpenBLAS
on OpenMP have a number for each thread, which every thread sets and gives back for itself.

threadpoolctl finds the libraries, whose functions are called without it: from version 3.8 on, the one thread that set
OpenBLAS's number first can change it, and for all other threads its setter does nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

from threadpoolctl import ThreadpoolController

_NAMES = {
    "openblas": ("openblas_get_num_threads", "openblas_set_num_threads"),
    "blis": ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
    "flexiblas": ("flexiblas_get_num_threads", "flexiblas_set_num_threads"),
}
_PREFIXES, _SUFFIXES = ("", "scipy_"), ("", "64_", "_64")  # what some builds of OpenBLAS add to names of functions


class _OfProcess:
    """A library with one number of threads for the process."""

    def __init__(self, get: Callable[[], int | None], set_: Callable[[int], object]) -> None:
        self._get, self._set = get, set_
        self._found: int | None = None  # the number to give back

    def hold(self) -> None:
        """Set one thread; a number that another thread has set during a call is noted as the newest."""
        number = self._get() or 1
        if number > 1:
            self._found = number
            self._set(1)

    def release(self) -> None:
        """Give back what was noted, unless the number was set anew during the calls: then that stays."""
        if self._found is not None and self._get() == 1:
            self._set(self._found)
        self._found = None


class _OfThread:
    """A library with a number of threads for each thread; `swap` sets it and returns the one before."""

    def __init__(self, swap: Callable[[int], int]) -> None:
        self.swap = swap


_lock = threading.RLock()  # a signal handler may make a call while its thread is inside
_users = 0  # threads between `enter` and `leave`
_known: list[_OfProcess | _OfThread] | None = None


def _libraries() -> list[_OfProcess | _OfThread]:
    """Return the libraries that were loaded at the first call; NumPy's is one of them."""
    global _known
    if _known is None:
        _known = [_library(found) for found in ThreadpoolController().select(user_api="blas").lib_controllers]
    return _known


def _library(found: Any) -> _OfProcess | _OfThread:
    if found.internal_api == "mkl":
        swap = _function(found, "MKL_Set_Num_Threads_Local")  # returns 0 where the thread has no number of its own
        if swap is not None:
            return _OfThread(swap)
    if found.internal_api == "openblas" and found.threading_layer == "openmp":
        of_openmp = _function(found, "omp_get_max_threads"), _function(found, "omp_set_num_threads")
        if None not in of_openmp:
            return _OfThread(lambda number: _swapped(*of_openmp, number))
    get, set_ = (_function(found, name) for name in _NAMES.get(found.internal_api, ("", "")))
    return _OfProcess(get or found.get_num_threads, set_ or found.set_num_threads)


def _swapped(get: Any, set_: Any, number: int) -> int:
    before: int = get()
    set_(number)
    return before


def _function(found: Any, name: str) -> Any:
    """A function of a library that is loaded; None where it has none of that name."""
    for prefix, suffix in product(_PREFIXES, _SUFFIXES) if name else ():
        try:
            return found.dynlib[f"{prefix}{name}{suffix}"]
        except AttributeError:
            continue
    return None


def on_one_thread(run: Callable[[], None]) -> None:
    """Run a function while BLAS multiplies on the calling thread; an interrupt leaves no limit behind."""
    blas = OneThread()
    try:
        blas.enter()
        run()
    finally:
        try:
            blas.leave()
        except BaseException:  # an interrupt inside of `leave`, which goes on where it was
            blas.leave()
            raise


class OneThread:
    """The calling thread's share in holding BLAS on one thread, from `enter` to `leave`; once only."""

    def __init__(self) -> None:
        self._is_inside = False
        self._before: list[tuple[_OfThread, int]] = []

    def enter(self) -> None:
        global _users
        with _lock:
            self._is_inside, _users = True, _users + 1
            for library in _libraries():
                if isinstance(library, _OfProcess):
                    library.hold()
                else:
                    self._before.append((library, library.swap(1)))

    def leave(self) -> None:
        """End the limit that no call needs any more; it may be called again after it, or `enter`, was interrupted."""
        global _users
        while self._before:
            library, number = self._before[-1]
            library.swap(number)
            self._before.pop()
        with _lock:
            if self._is_inside:
                # 0 already in a child that a thread inside has forked
                self._is_inside, _users = False, max(_users - 1, 0)
            if _users == 0:
                for shared in _known or ():
                    if isinstance(shared, _OfProcess):
                        shared.release()


def _after_fork() -> None:
    """Release in a child what other threads of its parent held, since those do not run in the child."""
    global _lock, _users
    _lock, _users = threading.RLock(), 0
    for library in _known or ():
        if isinstance(library, _OfProcess):
            library.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
