"""The record detects a changed refusal, a changed bit, a changed kernel and a call that occupies the host longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cuflash

ROOT = Path(__file__).parents[2]
CALLS = (
    "gradients(Structure(num_heads=2, seqlen_q=5, seqlen_kv=7, sink=(2,)))", "packed(0)", "options(2)", "options(8)",
    "fp8(1)", "cached(4)", "selected(0)", "masses(1)",
)  # fmt: skip

TESTS = """
import numpy as np, pytest, cuflash

def test_refusals() -> None:
    q = np.ones((3, 2), np.float32)
    with pytest.raises(ValueError):
        cuflash.attention(q, q, q, scale=float("inf"))
    with pytest.raises(TypeError):
        cuflash.attention(q, q, object())
    with pytest.raises(ZeroDivisionError):
        1 / 0
"""


@pytest.mark.parametrize("call", CALLS)
def test_a_digest_has_every_bit(load: Callable[[str], ModuleType], call: str) -> None:
    drawn_calls = load("drawn_calls")
    first = drawn_calls.digest(call, "cpu")
    assert " " not in first and drawn_calls.digest(call, "cpu") == first
    evaluated = eval(call, drawn_calls.NAMES)  # noqa: S307
    results = evaluated(executor="cpu")
    for name, array in results.items():
        if array.size:
            flipped = array.copy()
            flipped.reshape(-1).view("u1")[0] ^= 1
            assert drawn_calls.digest_of({**results, name: flipped}) != first == drawn_calls.digest_of(results)


def test_a_refused_call_is_its_class_and_text(load: Callable[[str], ModuleType]) -> None:
    drawn_calls = load("drawn_calls")
    calls = (f"gradients(Structure(scale={scale}))" for scale in ("float('inf')", "'a'"))
    digests = {drawn_calls.digest(call, "cpu") for call in calls}
    assert len(digests) == 2 and all(each.startswith("UnsupportedProblem ") for each in digests)


def test_expected_refusals_of_the_library_are_written(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    path = os.pathsep.join([str(ROOT), str(ROOT / "experiments" / "proof")])
    environment = os.environ | {"CUFLASH_REFUSALS": str(tmp_path), "PYTHONPATH": path}
    plugins = ["-p", "expected_refusals", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "test_some.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    (written,) = tmp_path.glob("*.json")
    refused: list[Any] = json.loads(written.read_text("utf-8"))
    assert [name for name, _ in refused] == ["TypeError", "UnsupportedProblem"]
    q = [[1.0, 1.0]] * 3
    with pytest.raises(cuflash.UnsupportedProblem) as caught:
        cuflash.attention(*[cuflash.reference.np.array(q, "f")] * 3, scale=float("inf"))
    assert refused[1][1] == str(caught.value)


def test_changed_rows_are_shown_with_both_sides(load: Callable[[str], ModuleType]) -> None:
    changes = load("record").changes
    before = [("call", "cpu"), ("a", "1"), ("b", "2")]
    assert changes("results", before, before) == []
    assert changes("results", before, [*before[:2], ("b", "3")]) == ["- ('b', '2')", "+ ('b', '3')"]


def test_host_times_are_compared_by_launch_times(load: Callable[[str], ModuleType]) -> None:
    changes = load("record").changes
    header = ("library", "operation", "mask", "tokens", "us", "launch_us")

    def rows(us: float, launch: float) -> list[tuple[str, ...]]:
        return [header, ("cupy", "attention", "none", "256", str(us), str(launch))]

    assert changes("times", rows(20, 6), rows(20.9, 6)) == [] == changes("times", rows(20, 6), rows(40, 12))
    (risen,) = changes("times", rows(20, 6), rows(21.2, 6))
    assert risen.startswith("cupy attention none 256: 20.0 us")
    assert changes("times", rows(20, 6), [header]) == ["- ('cupy', 'attention', 'none', '256')"]
