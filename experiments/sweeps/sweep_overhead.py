"""How much longer than its tasks does a sweep take?

    python -m experiments sweep_overhead                              # two minutes, processes of this machine
    python -m experiments sweep_overhead --engines local,dask,submitit --seconds 5

Tasks that only wait run on `workers` processes, with one engine after another; submitit runs all tasks at once as
processes of this machine. Overhead is the time from the first call to the last result, divided by the time that one
worker's tasks sleep, minus 1: it includes the start of the workers, the import of the library in each, and the files.
Other programs on the machine increase it. They do not change `cpu_s`, the CPU seconds of the sweep and its workers:
naps need no CPU time, so that `cpu_overhead`, these seconds per worker divided by the time that it sleeps, is the
overhead of a sweep on an idle machine.

Found:  on an idle machine, two one-minute tasks per worker take 0.6 % longer with processes of that machine and 0.9 %
with dask; a task that submitit starts separately takes 2.7 % longer. Nearly all of this is the start of the workers.

Cost: twice `seconds` for each engine.
"""

import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sweep
from harness import Record, check_names, machine, main
from rich.table import Table
from tasks import Task


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; the defaults are those of the published run."""

    engines: tuple[str, ...] = ("local",)
    seconds: float = 60.0
    tasks: int = 4
    workers: int = 2

    def __post_init__(self) -> None:
        check_names(self, {"engines": sweep.ENGINES})
        if self.seconds <= 0 or min(self.tasks, self.workers) < 1:
            raise ValueError("seconds, tasks and workers must be positive")


def run(config: Config) -> Iterator[Record]:
    """Yield one row per engine."""
    for name in config.engines:
        engine = sweep.engine_of(name)
        with tempfile.TemporaryDirectory() as folder:
            shared: dict[str, Any] = {"experiment": "nap", "commit": machine()["commit"], "folder": Path(folder)}
            naps = [Task(values=(("seconds", config.seconds), ("number", n)), **shared) for n in range(config.tasks)]
            options: dict[str, dict[str, Any]] = {
                "local": {"workers": config.workers, "gpus": 0},
                "dask": {"scheduler": "", "workers": config.workers},
                "submitit": {"folder": Path(folder) / "logs", "cluster": "local", "parameters": {}},
            }
            start, busy = time.perf_counter(), processor_seconds()
            failed = sweep.run(naps, engine, options[name])
            seconds, busy = time.perf_counter() - start, processor_seconds() - busy
            at_once = config.tasks if name == "submitit" else config.workers
            asleep = config.seconds * -(-config.tasks // at_once)
            yield {
                "engine": name, "tasks": config.tasks, "workers": at_once, "task_s": config.seconds,
                "seconds": seconds, "overhead": seconds / asleep - 1, "cpu_s": busy,
                "cpu_overhead": busy / at_once / asleep, "failed": len(failed),
            }  # fmt: skip


def processor_seconds() -> float:
    """Return the CPU seconds of this process and of its ended child processes."""
    spent = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


def table(records: list[Record]) -> Table:
    result = Table(title="time of a sweep over that of its tasks, minus 1")
    for column in ("engine", "tasks", "at once", "seconds of a task", "of the sweep", "overhead", "of CPU"):
        result.add_column(column, justify="left" if column == "engine" else "right")
    for row in records:
        numbers = (f"{row['task_s']:.3g}", f"{row['seconds']:.2f}", f"{row['overhead']:.2%}")
        numbers += (f"{row['cpu_overhead']:.2%}",)
        result.add_row(row["engine"], str(row["tasks"]), str(row["workers"]), *numbers)
    return result


if __name__ == "__main__":
    main(Config, run, table)
