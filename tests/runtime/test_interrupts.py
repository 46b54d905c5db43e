"""A warm call on the host that is interrupted at any line leaves nothing behind: the next call has the same bits."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import cuflash

Array = np.ndarray[Any, Any]
FOLDER = str(Path(cuflash.__file__).parent)


@contextmanager
def interrupted(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the `line`-th line that the library executes, and count the executed lines."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(previous)


def _results(mask: Any) -> Callable[[], tuple[Array, ...]]:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8))

    def call() -> tuple[Array, ...]:
        o, vjp = cuflash.attention_vjp(q, k, v, mask=mask)
        return o, *vjp(np.ones_like(o))

    return call


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mask", [cuflash.masks.Causal(), np.tri(40, dtype=bool)], ids=["cached", "listed"])
def test_a_call_after_an_interrupted_one_has_the_same_bits(mask: Any) -> None:
    call = _results(mask)
    wanted = [call() for _ in range(3)][-1]
    with interrupted(0) as count:
        call()
    assert count[0] > 100
    lines = np.random.default_rng(1).choice(count[0] - 1, 100, replace=False) + 1
    num_ignored = 0  # interrupts in finalizers, where Python ignores exceptions
    for line in lines.tolist():
        with suppress(KeyboardInterrupt), interrupted(line):
            call()
            num_ignored += 1
        assert all(map(np.array_equal, call(), wanted)), f"line {line} of {count[0]}"
    assert num_ignored < 10
