"""Fixtures for the tests of caches on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cupy_machine
from executors import needs_compiler


@pytest.fixture(
    params=[pytest.param("stand-in", marks=needs_compiler), pytest.param("cupy", marks=pytest.mark.gpu)]
)
def xp(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Yield CuPy on a GPU, or a test double of CuPy that runs its kernels on the simulator."""
    if request.param == "cupy":
        yield pytest.importorskip("cupy")
        return
    with cupy_machine.installed(monkeypatch, tmp_path) as machine:
        yield machine
