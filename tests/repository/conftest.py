"""Fixtures of the tests of experiments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of the experiments by its name, with all their folders on the path as for a script."""
    for folder in sorted({path.parent for path in EXPERIMENTS.glob("*/*.py")}):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module
