"""Functions that all experiments share: flags from a Config, the machine's record, progress, timing, atomic files.

    records = harness.main(Config, run, table, plot)     # the last line of an experiment

An experiment consists of `Config` (a frozen dataclass whose defaults are the published run), `run(config) -> records`,
`table(records) -> what rich prints` and optionally `plot(records) -> matplotlib figure`. An experiment that can be run
in parts names the columns that identify a row, `replacing=`: then each row is written as soon as it is measured and
replaces the row with the same values, and all other rows stay.
"""

import argparse
import csv
import dataclasses
import datetime
import functools
import inspect
import itertools
import os
import platform
import shutil
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cuflash
import numpy as np
import scipy
from command_line import Parser, check_values, check_writable
from threadpoolctl import threadpool_limits

try:
    import matplotlib
    from rich.console import Console
    from rich.progress import track as rich_track
    from rich.table import Table
except ImportError as error:
    raise ImportError("the experiments need matplotlib and rich: pip install -e '.[experiments]'") from error

matplotlib.use("Agg")

EXPERIMENTS = Path(__file__).parents[1]
RESULTS = EXPERIMENTS / "results"
UNPUBLISHED = EXPERIMENTS.parent / "build" / "results"  # ignored by git
SUBJECTS = "support", "speed", "sparsity", "proof", "language", "derivatives", "sweeps"
FOLDERS = [str(EXPERIMENTS / name) for name in SUBJECTS]
# Many times the size of any level-2 cache. Writing this many bytes takes 0.2 ms, in which the host queues the timed
# calls.
FLUSH_BYTES = 512 << 20
Record = dict[str, Any]
Item = TypeVar("Item")
Config = TypeVar("Config")


class Timing(NamedTuple):
    """Median of the repeats, and width of their middle half, both in milliseconds."""

    median_ms: float
    spread_ms: float
    repeats: int

    def over(self, calls: int) -> "Timing":
        """Return the time per call if this is the time of `calls` calls."""
        return Timing(self.median_ms / calls, self.spread_ms / calls, self.repeats)


@functools.cache
def machine() -> Record:
    """Return the machine's record: CPU, GPU, system, versions, commit, date; all values are text or integers."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "none",
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        "scipy": scipy.__version__,
        "cuflash": cuflash.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str:
    git = ("git", "-C", str(Path(__file__).parents[2]))
    # Files whose changes make a commit dirty; results and pages may change between two experiments.
    code = ("cuflash", "kernels_cu", "experiments/*.py")
    changed = _output(*git, "status", "--porcelain", "--", *code)
    return _output(*git, "rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """Return the first line that a command prints; empty if the command is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [""])[0] if done.returncode == 0 else ""


def track(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Iterate with a progress bar on standard error."""
    yield from rich_track(items, label, console=Console(stderr=True))


def time_alternately(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 1, budget_s: float = float("inf")
) -> dict[str, Timing]:
    """Time calls alternately, so that temporary slowness affects all of them; return a Timing by name.

    No new round starts after `budget_s` seconds, but there are at least three rounds, or `repeats` if that is less.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(warmup):
            call()
    start = time.perf_counter()
    for turn in range(repeats):
        if turn >= 3 and time.perf_counter() - start > budget_s:
            break
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return {name: _timing(values) for name, values in seconds.items()}


def time_on_device(calls: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 3) -> dict[str, Timing]:
    """Time calls on CuPy's current stream alternately, each between two events; return a Timing by name.

    The level-2 cache is flushed before each call. Nothing waits in between, and the host queues a call before the flush
    ends, so only device time is measured.
    """
    import cupy

    for call in calls.values():
        for _ in range(warmup):
            call()
    cache = cupy.empty(FLUSH_BYTES, np.uint8)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            cache.data.memset_async(0, FLUSH_BYTES)
            start.record()
            call()
            stop.record()
            events[name].append((start, stop))
    cupy.cuda.get_current_stream().synchronize()
    return {
        name: _timing([cupy.cuda.get_elapsed_time(start, stop) / 1e3 for start, stop in pairs])
        for name, pairs in events.items()
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS to one thread: with small matrices, more threads do not help, and wait long on a busy machine."""
    with threadpool_limits(1, "blas"):
        yield


def why_no_gpu() -> str | None:
    """Return why no GPU can be used, or None if one can.

    This function does not import the library, since before_after.py uses it together with older versions.
    """
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    except Exception as error:  # CuPy's CUDARuntimeError has no base class that is available without CuPy
        return f"CuPy finds no GPU ({error})"
    return None if count else "CuPy finds no GPU"


def cases_on_gpu(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield each combination of field values, with a progress bar; exit with one line if there is no GPU."""
    if reason := why_no_gpu():
        sys.exit(f"this experiment needs a GPU: {reason}")
    yield from track(list(itertools.product(*axes)), "cases")


def gpu_versions() -> Record:
    """Return the versions on which a GPU measurement depends in addition to the machine's record."""
    import cupy

    return {
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "driver": cupy.cuda.runtime.driverGetVersion(),
    }


def _timing(seconds: list[float]) -> Timing:
    low, median, high = 1e3 * np.percentile(seconds, (25, 50, 75))
    return Timing(float(median), float(high - low), len(seconds))


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which is renamed to `path` only if the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_csv(path: Path, records: Sequence[Record], replacing: Sequence[str] = ()) -> None:
    """Write one row for each record, with the machine's columns last; records may lack columns that others have.

    With `replacing`, the columns that identify a row, rows with other values stay in the file.
    """
    rows = [{name: _text(value) for name, value in (machine() | record).items()} for record in records]
    if replacing:
        named = {} if not path.exists() else {_key(row, replacing): row for row in read_csv(path)}
        rows = list((named | {_key(row, replacing): row for row in rows}).values())
    columns = dict.fromkeys(name for row in rows for name in row if name not in machine())
    with atomic_path(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *machine()], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _key(row: Mapping[str, str], columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(row.get(name, "") for name in columns)


def archive_folder(results: Path) -> Path:
    """Return the folder of an archive of arrays: the committed data with --publish, else the results folder."""
    return EXPERIMENTS / "data" if results == RESULTS else results


def write_archive(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a compressed .npz file, and print their provenance and the file's size."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    print(arrays["provenance"], f"\nwrote {os.path.relpath(path)}, {path.stat().st_size / 2**20:.2f} MiB")


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a result as text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def check_names(config: object, known: Mapping[str, Iterable[str]]) -> None:
    """Refuse a configuration whose fields contain unknown names.

    Raises
    ------
    ValueError
        A field contains a name that `known` does not list for it.
    """
    for field, names in known.items():
        if unknown := set(getattr(config, field)) - set(names):
            raise ValueError(f"no {', '.join(sorted(unknown))} in {field}; there are {', '.join(names)}")


def parse_config(
    config_type: Callable[..., Config], doc: str | None, argv: Sequence[str] | None = None
) -> tuple[Config, Path]:
    """Parse (config, results folder) from the command line.

    There is a flag for each field of the dataclass, --results and --publish. A field's metadata may contain its help
    text.
    """
    parser = Parser(doc)
    types = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        flag, kind, default = "--" + field.name.replace("_", "-"), types[field.name], field.default
        description = field.metadata.get("help", "")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=description)
        else:
            convert = _list_of(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else kind
            description = f"{description}{description and '; '}default {_shown(default)}"
            parser.add_argument(flag, type=convert, default=default, help=description)
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--results", type=Path, default=UNPUBLISHED, metavar="DIR", help="default: build/results")
    folder.add_argument(
        "--publish", dest="results", action="store_const", const=RESULTS, help="write to experiments/results"
    )
    values = vars(parser.parse_args(argv))
    results = values.pop("results")
    try:
        check_values(config_type, values)
        return config_type(**values), results
    except ValueError as error:
        parser.error(str(error))


def _shown(default: object) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _list_of(kind: type) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {kind.__name__}s with commas between; got {text!r}") from None

    return parse


def tabulated(title: str, columns: Sequence[str], records: list[Record]) -> Table:
    """Return a table of columns of records; numbers have four digits."""
    result = Table(*columns, title=title)
    for record in records:
        values = (record.get(column) for column in columns)
        result.add_row(*("" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x) for x in values))
    return result


def main(
    config_type: Callable[..., Config],
    run: Callable[[Config], Iterable[Record]],
    table: Callable[[list[Record]], object],
    plot: Callable[[list[Record]], Any] | None = None,
    *,
    replacing: Sequence[str] | Callable[[Config], Sequence[str]] = (),
    name: Callable[[Config], str] | None = None,
) -> list[Record]:
    """Parse, run, print the table, and write results/NAME.csv and NAME.png; NAME is `name` or the script's name."""
    source = Path(inspect.getfile(run))
    config, results = parse_config(config_type, sys.modules[run.__module__].__doc__)
    stem = source.stem if name is None else name(config)
    columns = replacing(config) if callable(replacing) else replacing
    written, records = [results / f"{stem}.csv"], list[Record]()
    check_writable(results)
    try:
        for record in run(config):
            records.append(record)
            if columns:
                write_csv(written[0], [record], columns)
        Console(width=None if sys.stdout.isatty() else 120).print(table(records))
        if not columns:
            write_csv(written[0], records)
        if plot is not None:
            written.append(results / f"{stem}.png")
            with atomic_path(written[1]) as partial:
                plot(records).savefig(partial, dpi=150)
    except KeyboardInterrupt:
        sys.exit("interrupted: files that were not finished are as they were before")
    except cuflash.UnsupportedProblem as error:
        sys.exit(f"{source.stem}: {' '.join(str(error).split())}")
    print("wrote", *(os.path.relpath(path) for path in written))
    return records
