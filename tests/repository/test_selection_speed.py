"""The experiment on the time of selections: what it refuses, and how its published rows were measured."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def speed(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("selection_speed")


@pytest.mark.parametrize("changes", [{"seqlens": (100,)}, {"share": 0}, {"repeats": 0}, {"seqlens": (128, 0)}])
def test_what_cannot_be_timed_is_refused(speed: ModuleType, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        speed.Config(**changes)


def test_without_a_gpu_it_says_so_before_any_work(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "why_no_gpu", lambda: "there is none")
    with pytest.raises(SystemExit, match="selection_speed times kernels on a GPU: there is none"):
        next(speed.run(speed.Config()))
