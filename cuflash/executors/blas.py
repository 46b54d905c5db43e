"""BLAS limited to one thread while calls use several threads to multiply matrices.

OpenBLAS with its own threads, BLIS and FlexiBLAS have one thread count per process, which overlapping calls share. The
first call saves a count above one, and the last call to end restores it. MKL and OpenBLAS with OpenMP have a count per
thread, which each thread sets and restores for itself.

threadpoolctl finds the libraries, but their functions are called directly: from version 3.8 on, only the thread that
set OpenBLAS's count first can change it through threadpoolctl, and its setter does nothing on other threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, TypeAlias

from threadpoolctl import LibController, ThreadpoolController

_NAMES = {
    "openblas": ("openblas_get_num_threads", "openblas_set_num_threads"),
    "blis": ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
    "flexiblas": ("flexiblas_get_num_threads", "flexiblas_set_num_threads"),
}
_PREFIXES, _SUFFIXES = ("", "scipy_"), ("", "64_", "_64")  # added to function names by some builds of OpenBLAS


class _OfProcess:
    """A library with one thread count for the whole process."""

    def __init__(self, get: Callable[[], int | None], set_: Callable[[int], object]) -> None:
        self._get, self._set = get, set_
        self._saved: int | None = None  # the thread count to restore

    def hold(self) -> None:
        """Set one thread, and save the previous count if it is above one; other threads may set it during a call."""
        number = self._get() or 1
        if number > 1:
            self._saved = number
            self._set(1)

    def release(self) -> None:
        """Restore the saved count, unless another thread has changed the count during the calls."""
        if self._saved is not None and self._get() == 1:
            self._set(self._saved)
        self._saved = None


_Swap: TypeAlias = Callable[[int], int]  # sets the count of a library with one per thread, and returns the previous one
_lock = threading.RLock()  # reentrant: a signal handler may make a call while its thread holds the lock
_users = 0  # number of threads between `enter` and `leave`
_known: list[_OfProcess | _Swap] | None = None


def _libraries() -> list[_OfProcess | _Swap]:
    """Return the libraries that were loaded at the first call; NumPy's BLAS is among them."""
    global _known
    if _known is None:
        _known = [_library(controller) for controller in ThreadpoolController().select(user_api="blas").lib_controllers]
    return _known


def _library(controller: LibController) -> _OfProcess | _Swap:
    if controller.internal_api == "mkl":
        swap: _Swap | None = _function(controller, "MKL_Set_Num_Threads_Local")  # returns 0 if the thread has no count
        if swap is not None:
            return swap
    if controller.internal_api == "openblas" and controller.threading_layer == "openmp":
        of_openmp = _function(controller, "omp_get_max_threads"), _function(controller, "omp_set_num_threads")
        if None not in of_openmp:
            return partial(_swapped, *of_openmp)
    get, set_ = (_function(controller, name) for name in _NAMES.get(controller.internal_api, ("", "")))
    return _OfProcess(get or controller.get_num_threads, set_ or controller.set_num_threads)


def _swapped(get: Callable[[], int], set_: Callable[[int], object], number: int) -> int:
    before = get()
    set_(number)
    return before


def _function(controller: LibController, name: str) -> Any:
    """Return a function of a loaded library, or None if the library does not have it."""
    for prefix, suffix in product(_PREFIXES, _SUFFIXES) if name else ():
        try:
            return controller.dynlib[f"{prefix}{name}{suffix}"]
        except AttributeError:
            continue
    return None


def on_one_thread(run: Callable[[], None]) -> None:
    """Run a function while BLAS uses only the calling thread; the limit is removed even after an interrupt."""
    blas = OneThread()
    try:
        blas.enter()
        run()
    finally:
        try:
            blas.leave()
        except BaseException:  # `leave` was interrupted; the second call continues where it stopped
            blas.leave()
            raise


class OneThread:
    """One request that BLAS use a single thread, valid from `enter` to `leave` on the calling thread."""

    def __init__(self) -> None:
        self._is_inside = False
        self._before: list[tuple[_Swap, int]] = []

    def enter(self) -> None:
        global _users
        with _lock:
            self._is_inside, _users = True, _users + 1
            for library in _libraries():
                if isinstance(library, _OfProcess):
                    library.hold()
                else:
                    self._before.append((library, library(1)))

    def leave(self) -> None:
        """End the limit if no other call needs it. Call again if an interrupt stopped this function or `enter`."""
        global _users
        while self._before:
            swap, number = self._before[-1]
            swap(number)
            self._before.pop()
        with _lock:
            if self._is_inside:
                # the count may already be 0 in a forked child
                self._is_inside, _users = False, max(_users - 1, 0)
            if _users == 0:
                for shared in _known or ():
                    if isinstance(shared, _OfProcess):
                        shared.release()


def _after_fork() -> None:
    """Release the parent's limits in a child process, where the threads that set them do not exist."""
    global _lock, _users
    _lock, _users = threading.RLock(), 0
    for library in _known or ():
        if isinstance(library, _OfProcess):
            library.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
