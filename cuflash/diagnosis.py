"""A report of what works on this machine, and how to install what is missing; ``python -m cuflash`` prints it."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import threadpoolctl

from .compiler import host_cache
from .compiler.nvrtc import cache_info, nvrtc_version
from .keywords import explains_keywords
from .planning.device import DeviceSpec

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_OLDEST_DRIVER = (12, 0)
_TESTED = "9.0"  # the compute capability of the GPUs on which the test suite has run
_TESTED_SYSTEM = ("Linux", "x86_64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A line of a report, with status ``ok``, ``missing``, or ``unknown`` if the check failed, and optional advice."""

    subject: str
    status: Literal["ok", "missing", "unknown"] = "ok"
    detail: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.status:8} {self.subject}: {self.detail}"
        return f"{line}\n{'':9}-> {self.advice}" if self.advice else line


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The findings, in the order in which they are printed; ``report["NumPy"]`` returns the finding about NumPy."""

    findings: tuple[Finding, ...]

    def __getitem__(self, subject: str) -> Finding:
        by_subject = {finding.subject: finding for finding in self.findings}
        if subject not in by_subject:
            raise KeyError(f"no finding is called {subject!r}: the report has {', '.join(by_subject)}")
        return by_subject[subject]

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


@explains_keywords
def doctor() -> Report:
    """Report what works on this machine, what is missing, and what to do about it. This never raises an error.

    It neither creates a CUDA context nor imports CuPy, so the process can still be forked afterwards.

    Returns
    -------
    Report
        A printable record, whose `findings` have `subject`, `status`, `detail` and `advice`.

    Examples
    --------
    >>> report = doctor()
    >>> report["executor cpu"].status
    'ok'
    >>> print(report)                                          # doctest: +ELLIPSIS
    ok       cuflash: ...
    """
    return Report(findings=tuple(_run_check(subject, check) for subject, check in _CHECKS.items()))


def _run_check(subject: str, check: Callable[[], _State]) -> Finding:
    try:
        state = check()
    except Exception as error:  # the report must not fail if the machine is broken
        state = _State(f"could not be examined: {type(error).__name__}: {error}", status="unknown")
    return Finding(subject=subject, **state._asdict())


class _State(NamedTuple):
    """The result of a check: a finding without its subject."""

    detail: str
    advice: str = ""
    status: Literal["ok", "missing", "unknown"] = "ok"


def _missing(detail: str, advice: str = "") -> _State:
    return _State(detail, advice, "missing")


def _cuflash() -> _State:
    place = Path(__file__).parent
    version = _version("cuflash")
    return _State(f"{version} in {place}" if version else f"not installed, runs from {place}")


def _python() -> _State:
    system = platform.system(), platform.machine()
    advice = f"tests have run on Linux on x86-64; on {' '.join(system)} the cpu executor should work"
    return _State(f"{platform.python_version()}, {sys.executable}", "" if system == _TESTED_SYSTEM else advice)


def _numpy() -> _State:
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    names = {f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} threads" for pool in pools}
    if not names:
        names = {np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]}
    return _State(f"{np.__version__}, BLAS: {'; '.join(sorted(names))}")


def _depending_on(detail: str, *needed: str) -> _State:
    missing = [subject for subject in needed if _CHECKS[subject]().status == "missing"]
    if missing:
        return _missing(f"needs {', '.join(missing)}", "use executor='cpu', or see below")
    return _State(detail)


def _compiler() -> _State:
    path = shutil.which("g++")
    advice = "only the sim executor and JAX on a GPU use it: apt install g++"
    if path is None:
        return _missing("no g++ on PATH", advice)
    run = _run([path, "--version"], 10)
    if run.returncode != 0:
        return _missing(f"{path} --version ends with status {run.returncode}", advice)
    return _State(f"{path}, {run.stdout.partition(chr(10))[0]}")


def _jax() -> _State:
    """Report how kernels are launched for JAX, without importing it."""
    if find_spec("jax") is None:
        return _State("not installed; only cuflash.jax needs it")
    version = metadata.version("jax")
    if _compiler().status != "ok":
        advice = "XLA launches kernels without Python, which takes less time, if there is a compiler: apt install g++"
        return _State(f"{version}; on a GPU, XLA calls Python for each pass", advice)
    return _State(f"{version}; on a GPU, XLA launches kernels without Python")


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output as text, in which invalid bytes are shown as escapes."""
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="backslashreplace", timeout=seconds,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _driver() -> _State:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int()
    try:
        code = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return _missing(f"no {name}", "fine without an NVIDIA GPU")
    if code != 0:
        return _State(f"cuDriverGetVersion returns error {code}", status="unknown")
    major, minor = version.value // 1000, version.value % 1000 // 10
    if (major, minor) < _OLDEST_DRIVER:
        return _missing(f"only for CUDA {major}.{minor}", "update the driver to one for CUDA 12 or newer")
    return _State(f"for CUDA {major}.{minor} and older")


def _gpus() -> _State:
    """Report the GPUs that nvidia-smi lists, since a call of the driver would start CUDA, which breaks later forks."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return _missing("no nvidia-smi", "fine without an NVIDIA GPU")
    command = [path, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    run = _run(command, 30)
    if run.returncode != 0:
        first_line = (run.stdout + run.stderr).strip().partition("\n")[0]
        return _missing(first_line or f"{path} ends with status {run.returncode} and prints nothing")
    chips = [line.rpartition(", ") for line in run.stdout.strip().splitlines()]
    others = sorted({cap for *_, cap in chips} - {_TESTED})
    of_others = f"kernels for {', '.join(others)} were compiled and simulated"
    advice = f"tests have run on compute capability {_TESTED}; {of_others}"
    detail = "; ".join(f"{name}, sm_{cap.replace('.', '')}" for name, _, cap in chips)
    return _State(detail, advice if others else "")


def _nvrtc() -> _State:
    try:
        major, minor = nvrtc_version()
    except RuntimeError as error:
        what, _, how = str(error).rpartition(": ")
        return _missing(what, f"only for a GPU: {how}")
    return _State(f"{major}.{minor}")


def _kernel_cache() -> _State:
    try:
        info = cache_info()
    except RuntimeError as error:
        what, _, how = str(error).rpartition(": ")
        return _missing(what, how)
    if info.folder is None:
        return _State("in memory, as set by CUPY_CACHE_IN_MEMORY")
    detail = f"{info.folder}, {info.entries} kernels, {info.nbytes} bytes"
    place = _nearest(info.folder)
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return _State(detail)
    advice = "each process compiles its kernels again: set CUPY_CACHE_DIR to a folder of your own"
    return _missing(f"{place} cannot be written", advice)


def _simulator_cache() -> _State:
    cache = host_cache.host_cache()
    place = _nearest(cache.folder)
    fault = host_cache.fault(place) if place == cache.folder else ""
    if cache.folder.is_absolute() and place.is_dir() and os.access(place, os.W_OK | os.X_OK) and not fault:
        return _State(str(cache))
    advice = "each process compiles its simulated kernels again: set CUFLASH_CACHE_DIR to a folder of your own"
    return _missing(fault or f"{cache.folder} cannot be made", advice)


def _nearest(folder: Path) -> Path:
    """Return a folder, or its nearest parent that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _cupy() -> _State:
    versions = {name: _version(name) for name in _CUPY}
    installed = [f"{name} {version}" for name, version in versions.items() if version]
    if len(installed) > 1:
        return _missing(f"{' and '.join(installed)} overwrite each other", "uninstall all, install one")
    if installed:
        return _State(installed[0])
    advice = "only for a GPU: pip install '.[cuda13]' in a clone, or '.[cuda12]' for a driver older than CUDA 13"
    return _missing("not installed", advice)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_CHECKS: dict[str, Callable[[], _State]] = {
    "cuflash": _cuflash,
    "Python": _python,
    "NumPy": _numpy,
    "cores": lambda: _State(f"{DeviceSpec.host().num_processors} of {os.cpu_count()} for this process"),
    "executor cpu": lambda: _State("NumPy arrays"),
    "executor sim": lambda: _depending_on("NumPy arrays, on simulated thread blocks, for tests", "C++ compiler"),
    "executor gpu": lambda: _depending_on(
        "CuPy arrays, and arrays of other libraries by DLPack", "NVIDIA driver", "GPUs", "NVRTC", "CuPy"
    ),
    "C++ compiler": _compiler,
    "NVIDIA driver": _driver,
    "GPUs": _gpus,
    "NVRTC": _nvrtc,
    "CuPy": _cupy,
    "JAX": _jax,
    "kernel cache": _kernel_cache,
    "simulator cache": _simulator_cache,
}
