"""Fixtures for the tests of experiments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a module of the experiments by name, with all their folders on the path."""
    for folder in sorted({path.parent for path in EXPERIMENTS.glob("*/*.py")}):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module
