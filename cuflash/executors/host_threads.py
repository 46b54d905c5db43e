"""Threads of the `cpu` executor: they compute batches of tiles, each with its own scratch memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ..arrays import Array
from ..planning.host import HostTiling
from .blas import on_one_thread

_Step: TypeAlias = Callable[[Any, Array], None]  # computes a batch of tiles, with scratch memory
_Pass: TypeAlias = tuple[_Step, Iterator[Any]]  # the step of a pass, and its batches

_free_scratch: list[Array] = []  # memory of earlier calls, at most one piece per processor


@contextmanager
def _scratch(tiling: HostTiling, num_tiles: int) -> Iterator[Array]:
    """Yield memory for some tiles of scores, reused by later calls."""
    dtype = tiling.problem.accumulator
    size = num_tiles * tiling.scratch_scores * dtype.itemsize
    try:
        memory = _free_scratch.pop()
    except IndexError:
        memory = np.empty(0, np.uint8)
    if memory.size < size:
        memory = np.empty(size, np.uint8)
    yield memory[:size].view(dtype).reshape(num_tiles, -1)
    if len(_free_scratch) < tiling.device.num_processors:
        _free_scratch.append(memory)


def run(tiling: HostTiling, *passes: _Pass, in_order: bool = False, num_tiles: int = 2) -> None:
    """Compute every batch of each pass once, one pass after the other, on the plan's number of threads.

    The batches of a pass must write to separate memory, unless `in_order` runs them in order on the calling thread,
    with BLAS's own threads. A step has memory for `num_tiles` tiles of scores.
    """
    if tiling.num_workers == 1 or in_order:
        for step, batches in passes:
            _work_off(tiling, num_tiles, step, batches, threading.Lock(), threading.Event())
        return

    def share_all() -> None:
        for step, batches in passes:
            _share(tiling, num_tiles, step, batches)

    on_one_thread(share_all)


def _share(tiling: HostTiling, num_tiles: int, step: _Step, batches: Iterator[Any]) -> None:
    """Compute batches on the calling thread and others, all of which have ended when this returns or raises.

    If a thread cannot be started, for example at interpreter exit, fewer threads compute bitwise identical results.
    """
    lock, stop, errors = threading.Lock(), threading.Event(), list[BaseException]()

    drain = partial(_work_off, tiling, num_tiles, step, batches, lock, stop)

    def work() -> None:
        try:
            on_one_thread(drain)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=work, name="cuflash") for _ in range(tiling.num_workers - 1)]
    try:
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:
                break
        drain()
    finally:
        stop.set()  # after an error or an interrupt, the other threads stop at their next batch
        for thread in threads:
            if thread.is_alive():
                thread.join()
    if errors:
        error = errors.pop()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


def _work_off(
    tiling: HostTiling,
    num_tiles: int,
    step: _Step,
    batches: Iterator[Any],
    lock: threading.Lock,
    stop: threading.Event,
) -> None:
    """Compute batches until none is left; each thread runs this."""
    with np.errstate(all="ignore"), _scratch(tiling, num_tiles) as scratch:
        while not stop.is_set():
            with lock:
                batch = next(batches, None)
            if batch is None:
                return
            step(batch, scratch)
