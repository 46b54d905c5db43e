"""Runs an experiment over every combination of some values of its flags, on processes or on a cluster.

    python -m experiments sweep crossover --over seqlens=1024,2048 --over blocks=32,64 --fixed repeats=5
    python -m experiments sweep crossover --over ... --engine dask --scheduler tcp://host:8786
    python -m experiments sweep crossover --over ... --engine submitit --folder logs --parameter slurm_partition=gpu

A combination is one task, and its rows are one file: DIR/sweeps/NAME/HASH.json, with configuration, machine and
seconds. An interrupted sweep, or one that lost workers, continues when you run the same command again: finished tasks
of the same commit are not measured again. A failed task leaves HASH.failed.json with its traceback, and the sweep
continues; the next run tries it again. At the end, DIR/sweeps/NAME.csv has the rows of this sweep and of all earlier
ones of the experiment, which differ in the columns of flags and of the commit; delete files of DIR/sweeps/NAME to drop
rows. A flag that takes several values, such as seqlens, gets one of them in each task.

A flag may name your own files: `sweep study --over patterns=window,my_module:mask --fixed archive=my.npz`, and `sweep
selector_shootout --over names=pooled,my_module:selector`. Workers find modules and files in the folder in which you run
the sweep, and a task whose module or file has changed is measured again.

Engines: `local` (processes of this machine; with --gpus N each has its own GPU), `dask` (the workers of a scheduler, or
processes), `submitit` (Slurm; --cluster debug or local runs jobs on this machine). To install the latter two: pip
install -e '.[experiments,sweeps]'.

Cost: that of its tasks, plus a few seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command_line import Parser, check_values, check_writable
from harness import EXPERIMENTS, RESULTS, UNPUBLISHED, Record, machine, track, write_csv
from tasks import Task

ENGINES = {"local": "on_processes", "dask": "on_dask", "submitit": "on_submitit"}


def experiment_of(name: str) -> Any:
    """Import the module of an experiment.

    Raises
    ------
    ValueError
        No experiment has that name, or it has no Config.
    """
    paths = {path.stem for path in EXPERIMENTS.glob("*/*.py")}
    module = importlib.import_module(name) if name in paths else None
    if not hasattr(module, "run") or not dataclasses.is_dataclass(getattr(module, "Config", None)):
        raise ValueError(f"{name!r} is not an experiment with a configuration; python -m experiments lists all")
    return module


def parsed(config_type: Any, text: str) -> tuple[str, tuple[Any, ...]]:
    """Parse a field's name and its values from NAME=VALUE,VALUE.

    Raises
    ------
    ValueError
        There is no such field, or a value does not have its type.
    """
    name, sign, listed = text.partition("=")
    name = name.replace("-", "_")
    types = typing.get_type_hints(config_type)
    names = [field.name for field in dataclasses.fields(config_type)]
    if not sign or name not in names:
        raise ValueError(f"{text!r} must be NAME=VALUE,...; names are {', '.join(names)}")
    kind = typing.get_args(types[name])[0] if typing.get_origin(types[name]) is tuple else types[name]
    convert = {"true": True, "false": False}.__getitem__ if kind is bool else kind
    try:
        return name, tuple(convert(part) for part in listed.split(","))
    except (ValueError, KeyError):
        raise ValueError(f"{name} takes values of type {kind.__name__}; got {listed!r}") from None


def combinations(config_type: Any, over: Sequence[str], fixed: Sequence[str]) -> list[dict[str, Any]]:
    """Return, for each configuration, the fields that differ from their defaults.

    Raises
    ------
    ValueError
        A field is named twice, or a configuration is invalid.
    """
    types = typing.get_type_hints(config_type)
    several = {name for name, kind in types.items() if typing.get_origin(kind) is tuple}
    swept = [parsed(config_type, text) for text in over]
    rest = [parsed(config_type, text) for text in fixed]
    names = [name for name, _ in (*swept, *rest)]
    if len(set(names)) < len(names):
        raise ValueError(f"each field may be given once; got {', '.join(names)}")
    for name, values in rest:
        if name not in several and len(values) != 1:
            raise ValueError(f"{name} takes one value; --over takes several")
    shared = {name: values if name in several else values[0] for name, values in rest}
    configs = []
    for chosen in itertools.product(*(values for _, values in swept)):
        assigned = {name: (value,) if name in several else value for (name, _), value in zip(swept, chosen)}
        check_values(config_type, shared | assigned)
        config_type(**shared, **assigned)
        configs.append(shared | assigned)
    return configs


def own_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of the .npz files and of the modules in MODULE:NAME among the values; empty if there are none."""
    texts = [text for value in config.values() for text in (value if isinstance(value, tuple) else (value,))]
    digest = hashlib.sha256()
    is_own = False
    for text in texts:
        path = own_file(text) if isinstance(text, str) else None
        if path is not None:
            digest.update(path.read_bytes())
            is_own = True
    return digest.hexdigest()[:16] if is_own else ""


def own_file(text: str) -> Path | None:
    """Return the file that FILE.npz, FILE.npz:ARRAY or MODULE:NAME names, or None if it does not exist."""
    name = text.rpartition(":")[0] or text
    if name.endswith(".npz"):
        return Path(name) if Path(name).is_file() else None
    spec = importlib.util.find_spec(name) if ":" in text else None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def engine_of(name: str) -> Any:
    """Import the module of an engine; exit with one line if its package is missing."""
    try:
        return importlib.import_module(ENGINES[name])
    except ModuleNotFoundError as error:
        sys.exit(f"--engine {name} needs the module {error.name}: pip install -e '.[experiments,sweeps]'")


def rows_of(tasks: Sequence[Task]) -> list[Record]:
    """Return the rows of all finished tasks, each with its configuration and the machine that measured it.

    Rows that other sweeps left in the same folders come last.
    """
    results = dict.fromkeys(task.result for task in tasks)
    for folder in dict.fromkeys(task.folder for task in tasks):
        results |= dict.fromkeys(sorted(folder.glob("[!.]*.json"), key=lambda path: path.stat().st_mtime_ns))
    rows: list[Record] = []
    for path in results:
        if path.exists() and not path.name.endswith(".failed.json"):
            result = json.loads(path.read_text("utf-8"))
            config = {name: str(value) for name, value in result["config"].items()}
            rows += [config | record | result["machine"] for record in result["records"]]
    return rows


def run(tasks: Sequence[Task], engine: Any, options: Mapping[str, Any]) -> list[Task]:
    """Run the remaining tasks with the module of an engine, and return those that failed."""
    left = [task for task in tasks if not task.result.exists()]
    if not left:
        return []
    ended = zip(track(range(len(left)), f"{len(left)} of {len(tasks)}"), engine.run(left, **options))
    return [task for _, (task, succeeded) in ended if not succeeded]


def arguments(argv: Sequence[str] | None = None) -> tuple[list[Task], str, dict[str, Any], Path]:
    """Parse tasks, engine, its options, and the path of the table from the command line."""
    parser = Parser(__doc__)
    parser.add_argument("experiment")
    parser.add_argument("--over", action="append", default=[], metavar="NAME=VALUE,...", help="values to combine")
    parser.add_argument("--fixed", action="append", default=[], metavar="NAME=VALUE", help="one value for all tasks")
    parser.add_argument("--engine", choices=ENGINES, default="local")
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=max(1, cores // 2), help="local, dask: number of processes")
    parser.add_argument("--gpus", type=int, default=0, help="local: number of the machine's GPUs, one for each worker")
    parser.add_argument("--scheduler", default="", help="dask: address of the scheduler")
    parser.add_argument("--folder", type=Path, default=Path("build/submitit"), help="submitit: folder of its logs")
    parser.add_argument("--cluster", choices=("slurm", "local", "debug"), help="submitit: where jobs run")
    parser.add_argument("--parameter", action="append", default=[], metavar="NAME=VALUE", help="submitit: of each job")
    parser.add_argument("--results", type=Path, default=UNPUBLISHED, metavar="DIR", help="default: build/results")
    parser.add_argument("--publish", dest="results", action="store_const", const=RESULTS)
    parsed = parser.parse_args(argv)
    try:
        config_type = experiment_of(parsed.experiment).Config
        if not parsed.over:
            raise ValueError("a sweep needs --over NAME=VALUE,VALUE at least once")
        if parsed.workers < 1 or parsed.gpus < 0:
            raise ValueError("workers must be positive, gpus not negative")
        if wrong := [text for text in parsed.parameter if "=" not in text]:
            raise ValueError(f"--parameter must be NAME=VALUE; got {wrong[0]!r}")
        configs = combinations(config_type, parsed.over, parsed.fixed)
    except ValueError as error:
        parser.error(str(error))
    folder = parsed.results.resolve() / "sweeps" / parsed.experiment
    shared: dict[str, Any] = {"experiment": parsed.experiment, "commit": machine()["commit"], "folder": folder}
    options: dict[str, dict[str, Any]] = {
        "local": {"workers": min(parsed.workers, len(configs)), "gpus": parsed.gpus},
        "dask": {"scheduler": parsed.scheduler, "workers": min(parsed.workers, len(configs))},
        "submitit": {"folder": parsed.folder, "cluster": parsed.cluster, "parameters": _numbers(parsed.parameter)},
    }
    shared["place"] = os.getcwd()
    tasks = [Task(values=tuple(config.items()), own=own_digest(config), **shared) for config in configs]
    return tasks, parsed.engine, options[parsed.engine], folder.with_suffix(".csv")


def _numbers(texts: Sequence[str]) -> dict[str, str | int]:
    """Parse NAME=VALUE pairs to a dictionary, in which digits become an integer."""
    pairs = (text.partition("=")[::2] for text in texts)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def main() -> None:
    tasks, name, options, path = arguments()
    engine = engine_of(name)
    check_writable(path.parent)
    num_done = sum(task.result.exists() for task in tasks)
    try:
        failed = run(tasks, engine, options)
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command continues from what is done")
    if rows := rows_of(tasks):
        write_csv(path, rows)
    print(f"{len(tasks)} tasks: {num_done} were done before, {len(tasks) - num_done - len(failed)} were done now")
    print("wrote", os.path.relpath(path))
    if failed:
        failures = [json.loads(x.failure.read_text("utf-8"))["failure"] for x in failed if x.failure.exists()]
        reasons = "; ".join(dict.fromkeys(failures)) or "their workers were killed"
        traces = path.with_suffix("")
        sys.exit(f"{len(failed)} tasks failed ({' '.join(reasons.split())}); their traces are in {traces}")


if __name__ == "__main__":
    main()
