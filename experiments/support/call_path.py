"""How many modules and functions of the library does a call of each kind pass?

    python -m experiments call_path

A profile hook counts the modules that a call enters, the transitions between modules, and the distinct functions, as a
JSON object of three numbers per kind of call. Calls on the simulator are counted only if there is a compiler. The
counts are those of a new process, in which no other call has been made.

Cost: Seconds on one core; the simulator's first build takes longer.
"""

from __future__ import annotations

import functools
import gc
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
from cuflash.planning._call_cache import CALLS

import cuflash

LIBRARY = str(Path(cuflash.__file__).parent)


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
    """Return q, k and v in one array, float32 [3, batch, 2, seqlen, 32]."""
    return np.random.default_rng(0).standard_normal((3, batch, 2, seqlen, 32), dtype=np.float32)


def attention(seqlen: int, executor: Literal["cpu", "sim"]) -> None:
    """Call the forward pass."""
    cuflash.attention(*operands(1, seqlen), causal=True, executor=executor)


def gradients(seqlen: int, executor: Literal["cpu", "sim"]) -> None:
    """Call both passes."""
    o, vjp = cuflash.attention_vjp(*operands(1, seqlen), causal=True, executor=executor)
    vjp(o)


def decode(cache: cuflash.KVCache) -> None:
    """Append a token to each sequence of a cache, and attend to it."""
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


if __name__ == "__main__":
    print(json.dumps(counts_of_calls()))
