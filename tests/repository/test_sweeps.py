"""Sweeps run the named configurations; interruptions, failures and killed workers lose no finished task."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
COMMAND = [sys.executable, "-m", "experiments", "sweep"]


@pytest.fixture
def sweep(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # imported together, since tasks are pickled
    for module in ("sweep", "tasks", "on_processes", "on_dask", "on_submitit"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return load("sweep")


class InTurn:
    """An engine that runs tasks sequentially in this process."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def run(self, tasks: Any) -> Any:
        for task in tasks:
            self.ran.append(task)
            yield task, importlib.import_module("tasks").measure(task)


def naps(sweep: ModuleType, folder: Path, **values: tuple[Any, ...]) -> list[Any]:
    over = [part for name, several in values.items() for part in ("--over", f"{name}={','.join(map(str, several))}")]
    return sweep.arguments(["nap", *over, "--results", str(folder)])[0]


def test_a_sweep_is_a_product_and_a_field_of_several_values_gets_one_of_them(sweep: ModuleType) -> None:
    config = importlib.import_module("crossover").Config
    configs = sweep.combinations(config, ["seqlens=1024,2048", "head-dim=16,32"], ["blocks=32,64", "repeats=3"])
    rest = {"blocks": (32, 64), "repeats": 3}
    assert configs == [rest | {"seqlens": (n,), "head_dim": d} for n in (1024, 2048) for d in (16, 32)]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["crossover"], "a sweep needs --over"),
        (["crosover", "--over", "repeats=1"], "'crosover' is not an experiment with a configuration"),
        (["pictures", "--over", "repeats=1"], "'pictures' is not an experiment with a configuration"),
        (["crossover", "--over", "repeat=1"], "'repeat=1' must be NAME=VALUE,...; names are gpu, blocks"),
        (["crossover", "--over", "repeats=1,x"], "repeats takes values of type int; got '1,x'"),
        (["crossover", "--over", "gpu=maybe"], "gpu takes values of type bool; got 'maybe'"),
        (["crossover", "--over", "repeats=3,0"], "repeats must be positive and finite; got 0"),
        (["crossover", "--over", "blocks=48"], "1024 tokens in blocks of 48"),
        (["crossover", "--over", "repeats=1", "--fixed", "repeats=2"], "each field may be given once"),
        (["crossover", "--over", "blocks=32", "--fixed", "repeats=2,3"], "repeats takes one value"),
        (["crossover", "--over", "repeats=1", "--workers", "0"], "workers must be positive"),
        (["crossover", "--over", "repeats=1", "--engine", "ray"], "argument --engine: invalid choice: 'ray'"),
        (["crossover", "--over", "repeats=1", "--parameter", "x"], "--parameter must be NAME=VALUE; got 'x'"),
    ],
)
def test_what_a_sweep_cannot_run_is_refused_in_one_line(
    sweep: ModuleType, capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep.arguments(argv)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and complaint in message and message.count("\n") == 1


def test_what_is_done_is_not_measured_again_and_other_commits_are(sweep: ModuleType, tmp_path: Path) -> None:
    engine, tasks = InTurn(), naps(sweep, tmp_path, seconds=(0.0001,), number=(1, 2, 3))
    assert sweep.run(tasks[:2], engine, {}) == [] and engine.ran == tasks[:2]
    assert sweep.run(tasks, engine, {}) == [] and engine.ran == tasks
    files = {path.name: path.stat().st_mtime_ns for path in tasks[0].folder.iterdir()}
    assert sweep.run(tasks, engine, {}) == [] and engine.ran == tasks
    assert importlib.import_module("tasks").measure(tasks[0])  # measures twice, like an engine whose worker died
    assert files == {path.name: path.stat().st_mtime_ns for path in tasks[0].folder.iterdir()} and len(files) == 3
    assert [row["number"] for row in sweep.rows_of(tasks)] == ["1", "2", "3"]
    other = importlib.import_module("dataclasses").replace(tasks[0], commit="other")
    assert other.result not in [task.result for task in tasks]


def test_the_table_keeps_the_rows_of_earlier_sweeps(sweep: ModuleType, tmp_path: Path) -> None:
    """Rows of the tasks come first, in their order; failures and unfinished files give no rows."""
    first, second = (naps(sweep, tmp_path, seconds=(0.0001,), number=numbers) for numbers in ((1, 2), (4, 3)))
    for tasks in (first, second):
        assert sweep.run(tasks, InTurn(), {}) == []
    broken = importlib.import_module("dataclasses").replace(first[0], values=(("seconds", "x"), ("number", 9)))
    assert sweep.run([broken], InTurn(), {}) == [broken]
    (first[0].folder / ".partial.1.json").write_text("{")
    assert [row["number"] for row in sweep.rows_of(second)] == ["4", "3", "1", "2"]
    assert [row["number"] for row in sweep.rows_of(first)] == ["1", "2", "4", "3"]


def test_a_task_is_named_by_what_its_files_hold(sweep: ModuleType, tmp_path: Path) -> None:
    (task,) = naps(sweep, tmp_path, number=(1,))
    path, results, replace = tmp_path / "my.npz", set(), importlib.import_module("dataclasses").replace
    for text in ("one", "two"):
        path.write_text(text)
        digests = {sweep.own_digest({"archive": str(path), "several": (3, f"{path}:kept", "window")}) for _ in range(2)}
        results |= {replace(task, own=digest).result for digest in digests}
    assert len(results) == 2 and task.result not in results
    assert sweep.own_digest({"archive": str(tmp_path / "none.npz"), "names": ("window", "no_module_of_ours:x")}) == ""


def test_a_failure_is_recorded_and_the_sweep_goes_on(sweep: ModuleType, tmp_path: Path) -> None:
    tasks = naps(sweep, tmp_path, seconds=(0.0001,), number=(1, 2))
    broken = importlib.import_module("dataclasses").replace(tasks[0], values=(("seconds", "x"), ("number", 1)))
    assert sweep.run([broken, tasks[1]], InTurn(), {}) == [broken]
    assert broken.failure.exists() and not broken.result.exists() and tasks[1].result.exists()
    failure = json.loads(broken.failure.read_text("utf-8"))
    assert failure["failure"].startswith("TypeError: ") and "nap.py" in failure["trace"]
    assert len(sweep.rows_of([broken, tasks[1]])) == 1


@pytest.mark.parametrize("engine", ["local", "dask"])
def test_a_killed_worker_loses_nothing_that_was_done(sweep: ModuleType, tmp_path: Path, engine: str) -> None:
    """A worker is killed during the second task: the first file stays, and the other tasks still run."""
    if engine == "dask":
        pytest.importorskip("distributed")
        pytest.importorskip("cloudpickle")
    tasks = naps(sweep, tmp_path, seconds=(0.3,), number=(1, 2, 3))
    options = {"local": {"workers": 1, "gpus": 0}, "dask": {"scheduler": "", "workers": 1}}[engine]
    ended = sweep.engine_of(engine).run(tasks, **options)
    first, succeeded = next(ended)
    written = first.result.stat().st_mtime_ns
    assert succeeded
    for worker in children():
        os.kill(worker, signal.SIGKILL)
    rest = dict(ended)
    assert set(rest) == {*tasks} - {first} and all(rest.values())
    assert first.result.stat().st_mtime_ns == written and all(task.result.exists() for task in tasks)


def children() -> list[int]:
    """Return the ids of child processes that multiprocessing started, which exclude its resource tracker."""
    started = [child.pid for child in multiprocessing.active_children()]
    return [pid for pid in started if pid is not None]


def test_a_killed_sweep_goes_on_from_what_was_done(sweep: ModuleType, tmp_path: Path) -> None:
    """The command and its worker are killed after the first file; the next command runs only the other task."""
    command = [*COMMAND, "nap", "--over", "number=1,2", "--fixed", "seconds=0.5", "--workers", "1"]
    command += ["--results", str(tmp_path)]
    options = {"cwd": EXPERIMENTS.parent, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(command, **options) as child:
        while not (done := list(tmp_path.glob("sweeps/nap/[!.]*.json"))) and child.poll() is None:
            time.sleep(0.02)
        os.killpg(child.pid, signal.SIGKILL)
    (first,) = done
    written, tasks, engine = first.stat().st_mtime_ns, naps(sweep, tmp_path, seconds=(0.5,), number=(1, 2)), InTurn()
    assert sweep.run(tasks, engine, {}) == []
    assert engine.ran == [task for task in tasks if task.result != first]
    assert first.stat().st_mtime_ns == written and len(sweep.rows_of(tasks)) == 2


def test_jobs_of_submitit_write_the_same_files(sweep: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    tasks = naps(sweep, tmp_path, seconds=(0.0001,), number=(1, 2))
    options = {"folder": tmp_path / "logs", "cluster": "debug", "parameters": {}}
    assert sweep.run(tasks, sweep.engine_of("submitit"), options) == []
    assert all(task.result.exists() for task in tasks)


def test_published_sweeps_of_processes_add_less_than_a_fiftieth(sweep: ModuleType) -> None:
    """Processor time counts, which other programs do not affect; no task failed with any engine."""
    rows = importlib.import_module("harness").read_csv(EXPERIMENTS / "results" / "sweep_overhead.csv")
    assert {row["engine"] for row in rows} == set(sweep.ENGINES) and {row["failed"] for row in rows} == {"0"}
    assert all(float(row["task_s"]) == 60 for row in rows)
    assert {row["engine"]: float(row["cpu_overhead"]) for row in rows}["local"] <= 0.02
