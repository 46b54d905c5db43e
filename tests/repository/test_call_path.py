"""Ceilings for the modules and functions that a public call passes, counted by a profile hook.

As a script, print the counts.
"""

from __future__ import annotations

import functools
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
from cuflash.planning._call_cache import CALLS

import cuflash

ROOT = Path(__file__).parents[2]
LIBRARY = str(ROOT / "cuflash")
# For each call: library modules that it enters, transitions between modules, and distinct functions. The ceilings only
# fall: lower a number whenever the code improves, and never raise one.
CEILINGS = {
    "cpu warm": (12, 16, 42),
    "cpu cold": (34, 177, 245),
    "gradients warm": (15, 39, 73),
    "cache warm": (22, 57, 104),
    "sim warm": (17, 31, 34),
    "sim gradients warm": (20, 74, 51),
}


def counted(call: Callable[[], object]) -> tuple[int, int, int]:
    """Return the numbers of modules that a call enters, of transitions between modules, and of distinct functions."""
    modules, functions, handovers = set(), set(), 0

    def hook(frame: FrameType, event: str, _: object) -> None:
        nonlocal handovers
        module = frame.f_code.co_filename
        if event != "call" or frame.f_code.co_name == "<module>" or not module.startswith(LIBRARY):
            return
        modules.add(module)
        functions.add(frame.f_code)
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        handovers += caller.startswith(LIBRARY) and caller != module

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(modules), handovers, len(functions)


def forget_calls() -> None:
    """Empty the library's caches in memory."""
    CALLS.clear()
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper) and each.__module__.startswith("cuflash"):
            each.cache_clear()


def operands(batch: int, seqlen: int) -> Any:
    return np.random.default_rng(0).standard_normal((3, batch, 2, seqlen, 32), dtype=np.float32)


def attention(seqlen: int, executor: Literal["cpu", "sim"]) -> None:
    cuflash.attention(*operands(1, seqlen), causal=True, executor=executor)


def gradients(seqlen: int, executor: Literal["cpu", "sim"]) -> None:
    o, vjp = cuflash.attention_vjp(*operands(1, seqlen), causal=True, executor=executor)
    vjp(o)


def decode(cache: cuflash.KVCache) -> None:
    q, k, v = operands(2, 1)
    cache.append(k, v)
    cache.attention(q)


def counts_of_calls() -> dict[str, tuple[int, int, int]]:
    """Count the calls in this process, on the simulator only if there is a compiler."""
    cache = cuflash.KVCache(batch=2, num_kv_heads=2, head_dim=32, capacity=100, dtype=np.float32)
    warm = {
        "cpu warm": lambda: attention(64, "cpu"),
        "gradients warm": lambda: gradients(64, "cpu"),
        "cache warm": lambda: decode(cache),
    }
    if shutil.which("g++"):
        warm |= {"sim warm": lambda: attention(16, "sim"), "sim gradients warm": lambda: gradients(16, "sim")}
    counts = {}
    for row, call in warm.items():
        call()
        call()  # a cache's first calls differ from later ones
        counts[row] = counted(call)
    forget_calls()
    return counts | {"cpu cold": counted(lambda: attention(48, "cpu"))}


def test_a_call_passes_no_more_modules_and_functions_than_it_did() -> None:
    # a new process, in which no other test has made calls
    command = [sys.executable, "-m", "tests.repository.test_call_path"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout)
    assert set(counts) >= {row for row in CEILINGS if "sim" not in row or shutil.which("g++")}
    above = [row for row, each in counts.items() if any(np.greater(each, CEILINGS[row])) or min(each) < 1]
    assert not above, f"{above} of {counts}"


if __name__ == "__main__":
    print(json.dumps(counts_of_calls()))
