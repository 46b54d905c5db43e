"""How much longer than its tasks does a sweep take?

    python -m experiments sweep_overhead                              # two minutes, processes of this machine
    python -m experiments sweep_overhead --engines local,dask,submitit --seconds 5

Tasks that only wait run on `workers` processes, each engine in turn; submitit runs them as processes of this machine,
all at once. Overhead is the time from the first call to the last result, over the time that the tasks sleep in a row
on one worker, minus 1: it holds the start of the workers, the import of the library in each, and the files. Other
programs on the machine make it larger. They do not change `cpu_s`, the seconds that the sweep and its workers keep a
processor: the naps need none, so that `cpu_overhead`, these seconds for each worker over the time that it sleeps, is
what a sweep adds to its tasks on a machine with nothing else to do.

Found:  on a machine with nothing else to do, one-minute tasks, two after another on each worker, take 0.6 % longer by
processes of that machine and 0.9 % by dask; a task that submitit starts on its own takes 2.7 % longer. The start of the
workers is nearly all of it.

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
    """The default is the published run."""

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
