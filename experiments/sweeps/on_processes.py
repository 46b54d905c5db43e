"""Runs the tasks of a sweep in processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tasks import Task, measure

POOLS = 3  # maximum number of pools: a killed worker breaks its pool, and its unfinished tasks run in a new one


def begin(numbers: Any, num_gpus: int, num_threads: int) -> None:
    """Set a worker's GPU, if there are any, and limit its BLAS threads to its share of the cores."""
    import threadpoolctl

    number = numbers.get()
    if num_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % num_gpus)
    threadpoolctl.threadpool_limits(num_threads)


def run(tasks: Sequence[Task], *, workers: int, gpus: int) -> Iterator[tuple[Task, bool]]:
    """Yield each task when it ends, with True if it succeeded; tasks that killed their workers fail."""
    context, left = multiprocessing.get_context("spawn"), dict.fromkeys(tasks)
    num_threads = max(1, (os.cpu_count() or 1) // workers)
    for _ in range(POOLS):
        numbers = context.SimpleQueue()
        for number in range(workers):
            numbers.put(number)
        with ProcessPoolExecutor(workers, context, begin, (numbers, gpus, num_threads)) as pool:
            futures = {pool.submit(measure, task): task for task in left}
            for future in as_completed(futures):
                if not isinstance(future.exception(), BrokenProcessPool):
                    left.pop(futures[future])
                    yield futures[future], future.result()
        if not left:
            return
    yield from ((task, False) for task in left)
