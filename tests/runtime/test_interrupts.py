"""A warm call that is interrupted at any line leaves nothing behind: the next call has the same bits."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from executors import is_long

import cuflash

FOLDER = str(Path(cuflash.__file__).parent)
SIMULATED = (f"{FOLDER}/sim/", f"{FOLDER}/executors/sim.py")  # the device, where calls for a GPU are tested without one


@contextmanager
def interrupted(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the `line`-th line that the library executes, and count the executed lines."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(FOLDER) or file.startswith(SIMULATED):
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


def check_every_line(call: Callable[[], list[bytes]], lines: Callable[[int], list[int]], most_ignored: int) -> None:
    """Interrupt a call at some of its lines, and require that the call after it returns what it did before."""
    wanted = [call() for _ in range(3)][-1]
    with interrupted(0) as count:
        call()
    assert count[0] > 50
    num_ignored = 0  # in finalizers, where Python drops exceptions
    for line in lines(count[0]):
        with suppress(KeyboardInterrupt), interrupted(line):
            call()
            num_ignored += 1
        assert call() == wanted, f"line {line} of {count[0]}"
    assert num_ignored <= most_ignored


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mask", [cuflash.masks.Causal(), np.tri(40, dtype=bool)], ids=["cached", "listed"])
def test_a_call_after_an_interrupted_one_has_the_same_bits(mask: Any) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8))

    def call() -> list[bytes]:
        o, vjp = cuflash.attention_vjp(q, k, v, mask=mask)
        return [each.tobytes() for each in (o, *vjp(np.ones_like(o)))]

    def drawn(number: int) -> list[int]:
        lines: list[int] = (np.random.default_rng(1).choice(number - 1, 100, replace=False) + 1).tolist()
        return lines

    check_every_line(call, drawn, most_ignored=9)


def calls_on(xp: Any) -> dict[str, Callable[[], list[bytes]]]:
    """Return warm calls on a device, whose launches are bound."""
    q, k, v, do = map(xp.asarray, np.random.default_rng(0).standard_normal((4, 2, 40, 16)).astype(np.float32))
    ready = cuflash.plan(q, k, v, mask=cuflash.masks.Dilated(3), deterministic=True)

    def attention() -> list[bytes]:
        o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        return [o.get().tobytes(), lse.get().tobytes()]

    def gradients() -> list[bytes]:
        o, vjp = cuflash.attention_vjp(q, k, v, causal=True, deterministic=True)
        return [each.get().tobytes() for each in (o, *vjp(do))]

    def planned() -> list[bytes]:
        o, lse = ready.forward(q, k, v)
        return [each.get().tobytes() for each in (o, lse, *ready.backward(do, q, k, v, o, lse))]

    return {"attention": attention, "gradients": gradients, "planned": planned}


def every(number: int) -> list[int]:
    return list(range(1, number + 1))


def sampled(number: int) -> list[int]:
    """Return every line, or in a short run every fourth one."""
    return every(number)[:: 1 if is_long() else 4]


@pytest.mark.parametrize("name", ["attention", "gradients", "planned"])
def test_a_call_for_a_gpu_may_be_interrupted_at_every_line(cupy: Any, name: str) -> None:
    check_every_line(calls_on(cupy)[name], sampled, most_ignored=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "gradients", "planned"])
def test_a_call_on_a_gpu_may_be_interrupted_at_every_line(name: str) -> None:
    check_every_line(calls_on(pytest.importorskip("cupy"))[name], every, most_ignored=0)
