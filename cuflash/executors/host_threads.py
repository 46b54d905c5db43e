"""Threads of the `cpu` executor: they compute batches of tiles, each with its own scratch memory, and add in turn."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


class Turns:
    """The order in which batches of key tiles add to the sums of queries, whichever threads compute them.

    A batch adds to a row after all batches of the same key/value heads that were drawn before it.

    Attributes
    ----------
    stop : threading.Event
        Set if the call fails; then nothing waits for a turn.
    """

    def __init__(self) -> None:
        self.stop, self._changed = threading.Event(), threading.Condition()
        self._last: dict[BatchHead, Turn] = {}

    def of(self, batches: Iterator[list[Tile]]) -> Iterator[tuple[list[Tile], Turn]]:
        """Yield batches and their turns, in the order in which they add."""
        for tiles in batches:
            heads = {(tile.b, tile.h) for tile in tiles}
            earlier = {self._last[head] for head in heads if head in self._last}
            turn = Turn(self, tuple(earlier), len(tiles[0].visits))
            self._last.update(dict.fromkeys(heads, turn))
            yield tiles, turn


class Turn:
    """The turn of a batch: how many rows of its matrices it and all earlier batches have finished.

    The methods take the query head within the group that shares a key/value head.
    """

    __slots__ = ("_earlier", "_num_finished", "_turns")

    def __init__(self, turns: Turns, earlier: tuple[Turn, ...], group_size: int) -> None:
        self._turns, self._earlier = turns, earlier
        self._num_finished: list[float] = [0] * group_size

    def wait(self, head: int, stop: float) -> bool:
        """Wait until the earlier batches have finished the rows before `stop`; return False if the call has failed."""
        turns, earlier = self._turns, self._earlier
        with turns._changed:
            while any(each._num_finished[head] < stop for each in earlier):
                if turns.stop.is_set():
                    return False
                turns._changed.wait(0.1)  # an interrupt sets `stop` without a notification
        return True

    def advance(self, head: int, stop: float) -> None:
        """Record that the rows before `stop` are finished."""
        with self._turns._changed:
            self._num_finished[head] = stop
            self._turns._changed.notify_all()

    def end(self, head: int) -> None:
        """Record that all rows are finished, after the earlier batches have finished them."""
        if self.wait(head, math.inf):
            self.advance(head, math.inf)
            if head == len(self._num_finished) - 1:
                self._earlier = ()


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
