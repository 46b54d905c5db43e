"""Threads of the `cpu` executor: they compute batches of tiles, each with its own scratch memory, and add in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from ..arrays import Array
from ..planning.host import HostTiling
from ._host_tiles import BatchHead, Tile
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


@dataclass(eq=False, slots=True)
class Turn:
    """The turn of a batch of key tiles to add to sums of queries, after the batches before it.

    Attributes
    ----------
    earlier : set of Turn
        The last batches before it with the same key/value heads.
    num_finished : list of float
        By query head within a group: how many rows this batch and all before it have finished.
    changed : threading.Condition
        Notified if a number changes.
    stop : threading.Event
        Set if the call fails; then nothing waits.
    """

    earlier: set[Turn]
    num_finished: list[float]
    changed: threading.Condition
    stop: threading.Event

    def wait(self, head: int, stop: float) -> bool:
        """Wait until the earlier batches have finished the rows before `stop`; return False if the call has failed."""
        with self.changed:
            for each in self.earlier:
                while each.num_finished[head] < stop:
                    if self.stop.is_set():
                        return False
                    self.changed.wait(0.1)  # an interrupt sets `stop` without a notification
        return True

    def advance(self, head: int, stop: float) -> None:
        """Record that the rows before `stop` are finished."""
        with self.changed:
            self.num_finished[head] = stop
            self.changed.notify_all()


def in_turn(batches: Iterator[list[Tile]], stop: threading.Event) -> Iterator[tuple[list[Tile], Turn]]:
    """Yield batches of key tiles and their turns, in the order in which they add to the sums of their heads."""
    last: dict[BatchHead, Turn] = {}
    changed = threading.Condition()
    for tiles in batches:
        heads = set(map(itemgetter(0, 1), tiles))
        turn = Turn(set(filter(None, map(last.get, heads))), [0] * len(tiles[0].visits), changed, stop)
        last.update(dict.fromkeys(heads, turn))
        yield tiles, turn


def run(
    tiling: HostTiling, *passes: _Pass, in_order: bool = False, num_tiles: int = 2, stop: threading.Event | None = None
) -> None:
    """Compute every batch of each pass once, one pass after the other, on the plan's number of threads.

    The batches of a pass must write to separate memory, unless `in_order` runs them in order on the calling thread,
    with BLAS's own threads. A step has memory for `num_tiles` tiles of scores. `stop` is set if one of them fails.
    """
    stop = stop or threading.Event()
    if tiling.num_workers == 1 or in_order:
        for step, batches in passes:
            _work_off(tiling, num_tiles, step, batches, threading.Lock(), stop)
        return

    def share_all() -> None:
        for step, batches in passes:
            _share(tiling, num_tiles, step, batches, stop)

    on_one_thread(share_all)


def _share(
    tiling: HostTiling, num_tiles: int, step: _Step, batches: Iterator[Any], stop: threading.Event
) -> None:
    """Compute batches on the calling thread and others, all of which have ended when this returns or raises.

    If a thread cannot be started, for example at interpreter exit, fewer threads compute bitwise identical results.
    """
    lock, errors = threading.Lock(), list[BaseException]()

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
    except BaseException:
        stop.set()  # after an error or an interrupt, the other threads stop at their next batch
        raise
    finally:
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
