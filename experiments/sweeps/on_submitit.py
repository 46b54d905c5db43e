"""Runs the tasks of a sweep as jobs of Slurm, or of this machine, through submitit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import cloudpickle
import submitit
import tasks as module
from tasks import Task, measure


def run(
    tasks: Sequence[Task], *, folder: Path, cluster: str, parameters: Mapping[str, str | int]
) -> Iterator[tuple[Task, bool]]:
    """Yield each task, with True if it succeeded, in the order of `tasks`.

    Slurm restarts jobs whose nodes were preempted. A job must have the results folder and a clone of the repository at
    the same paths, and uses the GPUs that Slurm assigns to it.
    """
    cloudpickle.register_pickle_by_value(module)  # a job cannot import it before its path is set
    executor = submitit.AutoExecutor(folder, cluster=cluster or None)
    executor.update_parameters(**parameters)
    for task, job in zip(tasks, executor.map_array(measure, tasks)):
        yield task, job.exception() is None and job.result()
