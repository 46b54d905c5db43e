"""Runs the tasks of a sweep on the workers of a Dask cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import cloudpickle
import distributed
import tasks as module
from tasks import Task, measure


def run(tasks: Sequence[Task], *, scheduler: str, workers: int) -> Iterator[tuple[Task, bool]]:
    """Yield each task when it ends, with True if it succeeded.

    Without the address of a scheduler, the workers are processes of this machine. A task whose worker dies is sent to
    another one, up to three times. Workers must have the results folder and a clone of the repository at the same
    paths; they select their own GPUs, like dask-cuda's.
    """
    cloudpickle.register_pickle_by_value(module)  # a worker cannot import it before its path is set
    with ExitStack() as stack:
        if scheduler:
            client = stack.enter_context(distributed.Client(scheduler))
        else:
            options = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": ":0"}
            client = stack.enter_context(distributed.Client(stack.enter_context(distributed.LocalCluster(**options))))
        futures = dict(zip(client.map(measure, tasks, pure=False), tasks))
        for future in distributed.as_completed(futures):
            yield futures[future], future.status == "finished" and future.result()
