"""A task of a sweep, which is one configuration of an experiment, and the file with its result.

A task is a frozen value of text, numbers and a path, so that any engine can send it. Its file is named by a hash of
experiment, configuration and commit, and is renamed to this name when it is complete: a task whose file exists is
finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDERS = tuple(str(folder) for folder in Path(__file__).parents[1].iterdir() if folder.is_dir())


@dataclass(frozen=True, kw_only=True)
class Task:
    """An experiment's name, the fields of its configuration that differ from their defaults, and the results folder.

    `own` is a digest of the user's modules and files that the values name, which are looked up from `place`.
    """

    experiment: str
    values: tuple[tuple[str, Any], ...]
    commit: str
    folder: Path
    modules: tuple[str, ...] = FOLDERS  # folders in which a worker looks for the experiment
    own: str = ""
    place: str = ""

    @property
    def stem(self) -> Path:
        """The path of the result without its suffix."""
        named = [self.experiment, sorted(self.values), self.commit, *filter(None, [self.own])]
        text = json.dumps(named, default=str)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def result(self) -> Path:
        """The file of a finished task."""
        return self.stem.with_suffix(".json")

    @property
    def failure(self) -> Path:
        """The file with the traceback of a failed task."""
        return self.stem.with_suffix(".failed.json")


def measure(task: Task) -> bool:
    """Run a task in this process and write its file; return True if it succeeded.

    The experiment's output is discarded. A finished task, which an engine may restart after a worker died, is left
    unchanged.
    """
    if task.result.exists():
        return True
    folders = (*task.modules, task.place) if task.own else task.modules
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    harness = importlib.import_module("harness")
    result: dict[str, Any] = {"experiment": task.experiment, "config": dict(task.values)}
    start = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            if task.own:
                stack.enter_context(contextlib.chdir(task.place))
            experiment = importlib.import_module(task.experiment)
            result["records"] = list(experiment.run(experiment.Config(**dict(task.values))))
    except (Exception, SystemExit) as error:
        result |= {"failure": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    result |= {"seconds": time.perf_counter() - start, "machine": harness.machine()}
    task.failure.unlink(missing_ok=True)
    with harness.atomic_path(task.failure if "failure" in result else task.result) as partial:
        partial.write_text(json.dumps(result, indent=1, default=_plain), encoding="utf-8")
    return "failure" not in result


def _plain(value: Any) -> Any:
    """Convert a NumPy number to a Python number, and everything else to text."""
    return value.item() if hasattr(value, "item") else str(value)
