"""The report says what is there, what is missing and what to do, and survives a machine in any state."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

room = importlib.import_module("cuflash.doctor")  # `cuflash.doctor` itself is the function


def test_every_subject_is_reported_and_printed() -> None:
    report = room.doctor()
    assert [finding.subject for finding in report.findings] == list(room._CHECKS)
    assert all(f"{finding.subject}: {finding.detail}" in str(report) for finding in report.findings)
    assert all(report[subject].status == "ok" for subject in ("cuflash", "Python", "NumPy", "cores", "executor cpu"))


def test_what_is_missing_for_good_reason_says_so() -> None:
    assert room.doctor()["executor gpu"].status == "missing"
    assert "executor='cpu'" in room.doctor()["executor sim"].advice


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: str) -> Any:
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
    finding = room._look("NVIDIA driver", room._driver)
    assert (finding.status, words in str(finding)) == (status, True)


def test_no_driver_is_fine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert room._look("NVIDIA driver", room._driver).status == "missing"


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        ({}, "missing", "cuflash[cuda13]"),
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


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert room.doctor()["C++ compiler"].status == "missing"


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "cuflash"]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith("ok       cuflash: ")
