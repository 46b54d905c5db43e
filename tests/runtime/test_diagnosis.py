"""The report lists what works, what is missing and how to fix it, on a machine in any state."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash import diagnosis as room


def test_every_subject_is_reported_and_printed() -> None:
    report = room.doctor()
    assert [finding.subject for finding in report.findings] == list(room._CHECKS)
    assert all(f"{finding.subject}: {finding.detail}" in str(report) for finding in report.findings)
    assert all(report[subject].status == "ok" for subject in ("cuflash", "Python", "NumPy", "cores", "executor cpu"))


def test_a_subject_that_is_not_there_is_told_those_that_are() -> None:
    with pytest.raises(KeyError, match="no finding is called 'numpy': the report has cuflash, Python, NumPy, "):
        room.doctor()["numpy"]


def test_what_is_missing_for_good_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_CUPY", ())
    monkeypatch.setattr(room.shutil, "which", lambda name: None)
    report = room.doctor()
    assert "CuPy" in report["executor gpu"].detail and "executor='cpu'" in report["executor gpu"].advice
    assert (report["executor sim"].status, report["executor sim"].detail) == ("missing", "needs C++ compiler")


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(room, "_CHECKS", dict.fromkeys(room._CHECKS, broken))
    assert all(finding.status == "unknown" and "disk on fire" in finding.detail for finding in room.doctor().findings)


def _driver_of(version: int, code: int = 0) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        def ask(place: Any) -> int:
            place._obj.value = version
            return code

        return SimpleNamespace(cuDriverGetVersion=ask)

    return load


@pytest.mark.parametrize(
    ("library", "status", "words"),
    [
        (_driver_of(13000), "ok", "CUDA 13.0"),
        (_driver_of(12080), "ok", "CUDA 12.8"),
        (_driver_of(11040), "missing", "update"),
        (_driver_of(0, code=999), "unknown", "999"),
    ],
)
def test_the_driver_is_asked_for_its_version(
    monkeypatch: pytest.MonkeyPatch, library: Any, status: str, words: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", library)
    finding = room._run_check("NVIDIA driver", room._driver)
    assert (finding.status, words in str(finding)) == (status, True)


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        ({}, "missing", ".[cuda13]"),
        ({"cupy-cuda13x": "14.2.0"}, "ok", "cupy-cuda13x 14.2.0"),
        ({"cupy-cuda13x": "14.2.0", "cupy-cuda12x": "14.2.0"}, "missing", "uninstall"),
    ],
)
def test_cupy_is_found_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], status: str, words: str
) -> None:
    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    finding = room.doctor()["CuPy"]
    assert (finding.status, words in str(finding)) == (status, True)


@pytest.mark.parametrize("name", ["clang++", "c++"])
def test_a_compiler_that_the_simulator_does_not_use_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("PATH", _program(tmp_path, name, "echo 1.0"))
    monkeypatch.setenv("CXX", name)
    assert room.doctor()["executor sim"].status == "missing"


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (r"printf 'g++ (caf\351) 12\n'", "ok", r"g++ (caf\xe9) 12"),
        ("exit 3", "missing", "g++ --version ends with status 3"),
        ("kill -9 $$", "missing", "g++ --version ends with status -9"),
    ],
)
def test_a_compiler_is_quoted_in_any_encoding_or_its_end_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, status: str, words: str
) -> None:
    monkeypatch.setenv("PATH", _program(tmp_path, "g++", script))
    finding = room.doctor()["C++ compiler"]
    assert (finding.status, words in finding.detail) == (status, True)


@pytest.mark.parametrize(
    ("is_installed", "has_compiler", "detail"),
    [
        (False, True, "not installed; only cuflash.jax needs it"),
        (True, True, "9.9; on a GPU, XLA launches kernels without Python"),
        (True, False, "9.9; on a GPU, XLA calls Python for each pass"),
    ],
)
def test_launches_for_jax_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_installed: bool, has_compiler: bool, detail: str
) -> None:
    monkeypatch.setenv("PATH", _program(tmp_path, "g++" if has_compiler else "other", "echo 12"))
    monkeypatch.setattr(room, "find_spec", lambda name: name if is_installed else None)
    monkeypatch.setattr(room.metadata, "version", lambda name: "9.9")
    finding = room.doctor()["JAX"]
    assert (finding.status, finding.detail) == ("ok", detail) and ("g++" in finding.advice) == (not has_compiler)


def _program(folder: Path, name: str, script: str) -> str:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("echo 'NVIDIA H100, 9.0'; echo 'Tesla T4, 7.5'", "ok", "NVIDIA H100, sm_90; Tesla T4, sm_75"),
        ("echo 'No devices were found'; exit 6", "missing", "No devices were found"),
        ("exit 6", "missing", "nvidia-smi ends with status 6 and prints nothing"),
        (r"printf 'NVIDIA \302\256 caf\351, 9.0\n'", "ok", r"NVIDIA ® caf\xe9, sm_90"),
    ],
)
def test_gpus_are_named_with_their_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, status: str, words: str
) -> None:
    monkeypatch.setenv("PATH", _program(tmp_path, "nvidia-smi", script))
    finding = room.doctor()["GPUs"]
    assert (finding.status, words in finding.detail) == (status, True)
    assert ("kernels for 7.5 were compiled and simulated" in finding.advice) == ("7.5" in script)
    assert not finding.advice or "7.5" in script


@pytest.mark.parametrize(
    ("system", "machine"), [("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"), ("Windows", "AMD64")]
)
def test_systems_without_tests_are_named(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(room.platform, "system", lambda: system)
    monkeypatch.setattr(room.platform, "machine", lambda: machine)
    advice = room.doctor()["Python"].advice
    assert (f"on {system} {machine} the cpu executor should work" in advice) == (machine != "x86_64")
    assert bool(advice) == (machine != "x86_64")


def test_python_without_its_lock_is_refused_at_import() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False; import cuflash"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: cuflash needs the global interpreter lock, which is disabled: set PYTHON_GIL=1"
    )


def test_a_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    finding = room.doctor()["NVRTC"]
    assert (finding.status, "pip install '.[cuda13]'" in finding.advice) == ("missing", True)


def test_the_kernel_cache_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / f"{'0f' * 20}.cubin").write_bytes(b"12345")
    (tmp_path / "tmpabc").write_bytes(b"left by a writer that was killed")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    assert room.doctor()["kernel cache"].detail == f"{tmp_path}, 1 kernels, 5 bytes"
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert "in memory" in room.doctor()["kernel cache"].detail


def test_a_kernel_cache_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    assert "CUPY_CACHE_DIR" in room.doctor()["kernel cache"].advice


def test_the_simulators_cache_is_measured_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    assert room.doctor()["simulator cache"].detail == f"{tmp_path / 'sim'}: 0 shared objects, 0 bytes"
    assert not (tmp_path / "sim").exists()
    (tmp_path / "sim").mkdir(0o700)
    (tmp_path / "sim" / f"kernel-{'0f' * 16}.so").write_bytes(b"12345")
    assert room.doctor()["simulator cache"].detail == f"{tmp_path / 'sim'}: 1 shared objects, 5 bytes"
    (tmp_path / "sim").chmod(0o777)
    finding = room.doctor()["simulator cache"]
    assert "other users can write" in finding.detail and "CUFLASH_CACHE_DIR" in finding.advice
    for unusable in (str(Path(__file__)), "not/absolute"):
        monkeypatch.setenv("CUFLASH_CACHE_DIR", unusable)
        assert room.doctor()["simulator cache"].status != "ok"


def test_what_a_terminal_has_no_letter_for_is_printed_too(tmp_path: Path) -> None:
    folder = tmp_path / "é"
    shutil.copytree(Path(room.__file__).parent, folder / "cuflash", ignore=shutil.ignore_patterns("__pycache__"))
    command, environment = [sys.executable, "-m", "cuflash"], {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert (run.returncode, r"\xe9" in run.stdout) == (0, True), run.stderr


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "cuflash"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith("ok       cuflash: ")
