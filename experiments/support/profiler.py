"""Counters of kernels, read by NVIDIA's profiler ncu in a process of their own."""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from harness import FOLDERS


class Launch(NamedTuple):
    """A launch of a kernel, and the values of the requested counters by name."""

    kernel: str
    counters: dict[str, float]


def profiled(module: str, call: str, metrics: Sequence[str], kernels: str, options: Sequence[str] = ()) -> list[Launch]:
    """Run `module.call` in a process whose kernels ncu counts, and return its launches in order.

    Parameters
    ----------
    module
        An experiment's module.
    call
        A call of one of its functions, as Python text such as ``"call(3)"``.
    metrics
        Names of ncu's metrics.
    kernels
        A regular expression for the names of the kernels to count.
    options
        Further options of ncu.

    Raises
    ------
    RuntimeError
        ncu is missing, may not read counters, or prints an unexpected message.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not on the PATH: install NVIDIA Nsight Compute")
    text = f"import sys; sys.path[:0] = {FOLDERS!r}; import {module}; {module}.{call}"
    command = [
        "ncu", "--csv", "--print-units", "base", "--metrics", ",".join(metrics), "-k", f"regex:{kernels}", *options,
        sys.executable, "-c", text,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode:
        complaints = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")]
        raise RuntimeError("; ".join(complaints) or f"ncu ended with {done.returncode}: {done.stderr[-300:]}")
    return parsed(done.stdout, metrics)


def parsed(printed: str, metrics: Sequence[str]) -> list[Launch]:
    """Parse what ncu prints: messages, followed by a table of comma-separated values.

    Raises
    ------
    RuntimeError
        No kernel was counted, or a counter has no value.
    """
    lines = printed.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[int, Launch] = {}
    for row in csv.DictReader(lines[start:]):
        value, name = row["Metric Value"].replace(",", ""), row["Kernel Name"]
        if row["Metric Name"] not in metrics:
            continue
        if not value.replace(".", "", 1).isdigit():
            raise RuntimeError(f"ncu has no number for {row['Metric Name']} of {name}: {value}")
        launches.setdefault(int(row["ID"]), Launch(name, {})).counters[row["Metric Name"]] = float(value)
    if not launches:
        raise RuntimeError(f"ncu saw no kernel: {printed[-300:]}")
    return [launches[number] for number in sorted(launches)]
