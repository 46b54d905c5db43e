"""BLAS keeps its number of threads, the caller's limits and its bits, whichever threads call, fail, fork or exit."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from cuflash.executors import blas, cpu

import cuflash

ROOT = Path(__file__).parents[2]
OLDEST = Path(sys.prefix) / "threadpoolctl-3.5.0"  # where `make test` installs it
Q, K, V, DO = np.random.default_rng(0).standard_normal((4, 8, 256, 8)).astype(np.float32)
_HAS_SHARED = any(isinstance(library, blas._OfProcess) for library in blas._libraries())
needs_shared = pytest.mark.skipif(not _HAS_SHARED, reason="no BLAS here has one number of threads for the process")


# NumPy's BLAS. SciPy's may be loaded later, but calls do not use it for products.
_NUMPYS = {pool["filepath"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}


def num_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["filepath"] in _NUMPYS}


def limited(number: int) -> Any:
    return threadpoolctl.threadpool_limits(number, user_api="blas")


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make calls share even little work among three threads, and require that BLAS's number of threads is unchanged."""
    monkeypatch.setattr("cuflash.planning.host.HostTiling.is_small", False)
    monkeypatch.setattr("cuflash.planning.host.HostTiling.num_workers", 3)
    with limited(3):
        before = num_threads()
        yield
        assert num_threads() == before
        assert blas._users == 0


class Caller:
    """A thread that runs to its next `yield` at each `step`, and stays alive between steps."""

    def __init__(self, steps: Iterator[Any]) -> None:
        self._go, self._done, self._steps = threading.Semaphore(0), threading.Semaphore(0), steps
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            for self._result in self._steps:
                self._done.release()
                self._go.acquire()
        except BaseException as error:
            self._result = error
        self._done.release()

    def start(self) -> None:
        self._go.release()

    def result(self) -> Any:
        assert self._done.acquire(timeout=60)
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def step(self) -> Any:
        self.start()
        return self.result()

    def end(self) -> None:
        self.step()
        self._thread.join()


@contextmanager
def one_thread(blas: ModuleType = blas) -> Iterator[None]:
    held = blas.OneThread()
    held.enter()
    try:
        yield
    finally:
        held.leave()


def inside() -> Iterator[set[int]]:
    """Yield the number of BLAS threads before, during and after a call."""
    yield num_threads()
    with one_thread():
        yield num_threads()
    yield num_threads()


def attended() -> bytes:
    return cuflash.attention(Q, K, V).tobytes()


def all_results() -> list[bytes]:
    (o, lse), vjp = cuflash.attention_vjp(Q, K, V, return_lse=True)
    return [x.tobytes() for x in (o, lse, *vjp(DO))]


def in_a_thread(run: Callable[[], Any]) -> Any:
    caller = Caller(iter(map(lambda _: run(), range(1))))
    result = caller.step()
    caller.end()
    return result


@contextmanager
def at_each_batch(look: Callable[[], Any], cpu: ModuleType = cpu) -> Iterator[list[Any]]:
    """Collect the results of `look` at each batch of the forward pass, on the batch's thread."""
    seen: list[Any] = []
    original = cpu.HostCall.forward_rows

    def forward_rows(self: Any, *arguments: Any) -> None:
        seen.append(look())
        original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu.HostCall, "forward_rows", forward_rows)
        yield seen


# Limits of a BLAS with one thread count per process


@needs_shared
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in, first out", "first in, last out"])
def test_limits_are_as_before_when_overlapping_calls_have_ended(order: tuple[int, int]) -> None:
    callers = [Caller(inside()), Caller(inside())]
    assert [caller.step() for caller in callers] == [{3}, {3}]
    assert [caller.step() for caller in callers] == [{1}, {1}]
    assert callers[order[0]].step() == {1}
    assert callers[order[1]].step() == {3}
    assert num_threads() == {3}
    with limited(2):  # the threads of both calls are alive
        assert num_threads() == {2}
        assert in_a_thread(lambda: list(inside())) == [{2}, {1}, {2}]
    for caller in callers:
        caller.end()


@needs_shared
def test_the_callers_own_limits_hold_around_calls_of_any_thread() -> None:
    caller = Caller(iter(map(lambda _: attended(), range(3))))
    caller.step()
    for call in (caller.step, attended):  # caller's thread made the first call, and is alive
        for number in (1, 2):
            with limited(number):
                call()
                assert num_threads() == {number}
            assert num_threads() == {3}
    caller.end()


@needs_shared
def test_a_limit_that_is_set_during_a_call_stays() -> None:
    caller = Caller(inside())
    caller.step()
    assert caller.step() == {1}
    limited(4)
    assert caller.step() == {4}
    assert num_threads() == {4}
    caller.end()
    limited(3)


# Batches and bits


@needs_shared
@pytest.mark.parametrize("call", [lambda run: run(), in_a_thread], ids=["main thread", "another thread"])
@pytest.mark.parametrize("number", [1, 2])
def test_blas_has_one_thread_in_every_batch(call: Callable[..., Any], number: int) -> None:
    with limited(number), at_each_batch(num_threads) as seen:
        call(attended)
        assert num_threads() == {number}
    assert len(seen) > 2 and all(each == {1} for each in seen)


def test_bits_are_the_same_from_every_thread_and_under_every_limit() -> None:
    expected = all_results()
    assert in_a_thread(all_results) == expected
    for number in (1, 2):
        with limited(number):
            assert all_results() == expected
            assert in_a_thread(all_results) == expected


def test_calls_do_without_a_blas_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_known", [])
    with limited(1):
        assert all_results() == all_results()


# Libraries with a count per thread, and names of functions


class Numbers(threading.local):
    """A number of threads for each thread, and a function that sets it like MKL's."""

    threads = 0

    def swap(self, number: int) -> int:
        before, self.threads = self.threads, number
        return before

    def set(self, number: int) -> None:
        self.threads = number

    def get(self) -> int:
        return self.threads


class _Functions(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        raise AttributeError(name)


def fake(api: str, layer: str = "pthreads", **functions: Any) -> Any:
    """Return a substitute for a library that threadpoolctl lists; its own setter does nothing."""
    return SimpleNamespace(
        internal_api=api,
        threading_layer=layer,
        dynlib=_Functions(functions),
        get_num_threads=lambda: 7,
        set_num_threads=lambda number: None,
    )


def assert_limits_are_kept(blas: ModuleType) -> None:
    """Assert that libraries of each kind, represented by substitutes, keep limits; the module is left unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blas, "_known", None)
        patch.setattr(blas, "_lock", threading.RLock())
        _assert_limits_are_kept(blas)


def _assert_limits_are_kept(blas: ModuleType) -> None:
    mkl, openmp, shared = Numbers(), Numbers(), SimpleNamespace(threads=5)
    mkl.threads, openmp.threads = 0, 4
    interrupts = iter(())

    def set_shared(number: int) -> None:
        if next(interrupts, None) == number:
            raise KeyboardInterrupt
        shared.threads = number

    functions = {
        "scipy_openblas_get_num_threads64_": lambda: shared.threads,
        "scipy_openblas_set_num_threads64_": set_shared,
    }
    blas._known = [
        blas._library(fake("mkl", MKL_Set_Num_Threads_Local=mkl.swap)),
        blas._library(fake("openblas", "openmp", omp_get_max_threads=openmp.get, omp_set_num_threads=openmp.set)),
        blas._library(fake("openblas", **functions)),
        blas._library(fake("another")),
    ]

    def numbers() -> tuple[int, int, int]:
        return mkl.threads, openmp.threads, shared.threads

    def steps() -> Iterator[tuple[int, int, int]]:
        mkl.threads, openmp.threads = 6, 2
        with one_thread(blas):
            yield numbers()
            with one_thread(blas):
                yield numbers()
            yield numbers()
        yield numbers()

    first, second = Caller(steps()), Caller(steps())
    assert [first.step(), second.step(), first.step(), second.step()] == [(1, 1, 1)] * 4
    assert [first.step(), first.step()] == [(1, 1, 1), (6, 2, 1)]
    with one_thread(blas):
        assert numbers() == (1, 1, 1)
    assert numbers() == (0, 4, 1)
    assert second.step() == (1, 1, 1)
    assert second.step() == (6, 2, 5)
    with one_thread(blas):
        shared.threads = 3
        with one_thread(blas):
            assert numbers() == (1, 1, 1)
        assert shared.threads == 1
        shared.threads = 2
    assert numbers() == (0, 4, 2)

    def locked() -> Iterator[None]:
        with blas._lock:
            yield

    third = Caller(locked())
    with one_thread(blas):
        third.step()
        blas._after_fork()
        is_free, in_child = blas._lock.acquire(blocking=False), (shared.threads, blas._users)
        third.end()
    assert is_free and in_child == (2, 0)
    assert (shared.threads, blas._users) == (2, 0)
    blas._lock = threading.RLock()
    with pytest.raises(ZeroDivisionError):
        blas.on_one_thread(lambda: 1 // 0)
    assert numbers() == (0, 4, 2)
    for interrupts in (iter([1]), iter([None, 2])):
        with pytest.raises(KeyboardInterrupt):
            blas.on_one_thread(lambda: None)
        assert (numbers(), blas._users) == ((0, 4, 2), 0)
    shared.threads = 1
    blas.on_one_thread(lambda: None)
    assert numbers() == (0, 4, 1)
    for caller in (first, second):
        caller.end()


def test_every_kind_of_library_keeps_its_limits() -> None:
    known, lock = blas._known, blas._lock
    assert_limits_are_kept(blas)
    assert blas._known is known and blas._lock is lock


# Errors, interrupts, forks and exits


def assert_threads_are_right(library: ModuleType) -> None:
    """Assert bits, limits and errors of calls that three threads share, some of which cannot be started."""
    names = "executors.cpu", "executors.blas", "planning.host"
    cpu, blas, host = (importlib.import_module(f"{library.__name__}.{name}") for name in names)
    main, numbers, start = threading.current_thread(), Numbers(), threading.Thread.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.HostTiling, "is_small", False)
        patch.setattr(host.HostTiling, "num_workers", 3)
        patch.setattr(blas, "_known", [blas._library(fake("mkl", MKL_Set_Num_Threads_Local=numbers.swap))])

        def called() -> bytes:
            return library.attention(Q, K, V).tobytes()

        expected = called()
        for is_main in (True, False):
            has_failed = threading.Event()

            def fail() -> None:
                if (threading.current_thread() is main) == is_main:
                    has_failed.set()
                    raise MemoryError("no room for a tile")
                has_failed.wait(60)

            with at_each_batch(fail, cpu), pytest.raises(MemoryError, match="no room for a tile"):
                called()
        with at_each_batch(lambda: (numbers.get(), time.sleep(0.02)), cpu) as seen:
            assert called() == expected
        assert {number for number, _ in seen} == {1} and numbers.get() == 0
        assert not [thread for thread in threading.enumerate() if thread.name == "cuflash"]
        for most in range(2):
            left = iter(range(most))

            def start_few(thread: threading.Thread) -> None:
                if next(left, None) is None:
                    raise RuntimeError("can't create new thread at interpreter shutdown")
                start(thread)

            patch.setattr(threading.Thread, "start", start_few)
            try:
                assert called() == expected
            except RuntimeError as error:
                raise AssertionError("a thread that cannot be started is an error") from error


def test_calls_on_several_threads_are_right_whatever_fails() -> None:
    assert_threads_are_right(cuflash)


def assert_turns_are_kept(library: ModuleType) -> None:
    """Assert that tiles add to dQ in one order, whichever steps take long, and that all threads end if one fails."""
    cpu, host = (importlib.import_module(f"{library.__name__}.{name}") for name in ("executors.cpu", "planning.host"))
    q, do = np.random.default_rng(1).standard_normal((2, 1, 1500, 8)).astype(np.float32)
    every_other = np.ones((15, 15), bool)
    every_other[1:, ::2] = False  # these keys are visited by few queries, and their tiles end before earlier ones
    weigh = cpu.HostCall.column_terms
    with pytest.MonkeyPatch.context() as patch, limited(1):
        patch.setattr(host.HostTiling, "is_small", False)
        patch.setattr(f"{library.__name__}.planning.plan.host_tile", lambda problem, device: (100, 200))
        every_mask = library.masks.Causal(), library.masks.BlockPattern(every_other, 100)
        for mask, slow in itertools.product(every_mask, range(5)):
            patch.setattr(host.HostTiling, "num_workers", 1)
            patch.setattr(cpu.HostCall, "column_terms", weigh)
            plan = library.plan(q, q, q, mask=mask, scale=0.1)
            o, lse = plan.forward(q, q, q)
            expected, dots = plan.backward(do, q, q, q, o, lse), plan.jvp(q, q, q, o, lse, do)
            expected_dots = plan.backward_jvp(do, q, q, q, o, lse, *dots, do)
            patch.setattr(host.HostTiling, "num_workers", 3)
            number, has_failed = itertools.count(), threading.Event()

            def weighed(self: Any, *arguments: Any) -> Any:
                time.sleep(0.005 * (next(number) % 5 == slow))
                return weigh(self, *arguments)

            patch.setattr(cpu.HostCall, "column_terms", weighed)
            gradients = *plan.backward(do, q, q, q, o, lse), *plan.backward_jvp(do, q, q, q, o, lse, *dots, do)
            every = zip(gradients, (*expected, *expected_dots))
            assert all(a.tobytes() == b.tobytes() for a, b in every), "bits depend on threads"

            def fail(self: Any, *arguments: Any) -> Any:
                if not has_failed.is_set():
                    has_failed.set()
                    time.sleep(0.02)  # the other threads wait for the turn of this batch
                    raise MemoryError("no room for a tile")
                return weigh(self, *arguments)

            patch.setattr(cpu.HostCall, "column_terms", fail)
            with pytest.raises(MemoryError, match="no room for a tile"):
                plan.backward(do, q, q, q, o, lse)
        assert not [thread for thread in threading.enumerate() if thread.name == "cuflash"]


def test_tiles_add_to_dq_in_turn() -> None:
    assert_turns_are_kept(cuflash)


def test_an_interrupt_at_any_moment_leaves_nothing_behind() -> None:
    expected, former = attended(), sys.getprofile()
    before, moments, has_ended = num_threads(), 0, False

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        """Raise KeyboardInterrupt at the next point where Python handles signals in the code under test.

        Python handles signals where a Python function begins and where a C function has returned.
        """
        nonlocal left
        code = frame.f_code
        is_in_question = code.co_filename == blas.__file__ or code.co_name in ("_run", "_share", "share_all")
        if is_in_question and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    while not has_ended:
        moments += 1
        left = moments
        try:
            sys.setprofile(interrupt)
            attended()
            has_ended = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(former)
        for thread in threading.enumerate():
            if thread.name == "cuflash":
                thread.join()
        assert blas._users == 0, f"after an interrupt at moment {moments}"
        assert num_threads() == before, f"after an interrupt at moment {moments}"
    assert moments > 10
    assert attended() == expected


def _run(source: str, *flags: str) -> str:
    run = subprocess.run(
        [sys.executable, *flags, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


FORKS = """
import os, threading, numpy as np, threadpoolctl, cuflash
from cuflash.executors import blas
def numbers():
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
limit = threadpoolctl.threadpool_limits(3, user_api="blas")
q = np.random.default_rng(0).standard_normal((8, 1024, 8)).astype(np.float32)
before, expected = numbers(), cuflash.attention(q, q, q).tobytes()
inside, leave = threading.Event(), threading.Event()
def hold():
    held = blas.OneThread()
    held.enter()
    with blas._lock:
        inside.set()
        leave.wait()
    held.leave()
thread = threading.Thread(target=hold)
thread.start()
inside.wait()
child = os.fork()
if not child:
    is_right = numbers() == before and cuflash.attention(q, q, q).tobytes() == expected and numbers() == before
    os._exit(0 if is_right else 1)
leave.set()
thread.join()
print(os.waitpid(child, 0)[1], numbers() == before)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_during_a_call_of_another_thread_has_the_limits_and_no_lock() -> None:
    assert _run(FORKS, "-Wignore") == "0 True\n"


EXITS = """
import atexit, threading, numpy as np, cuflash
q = np.random.default_rng(0).standard_normal((8, 1024, 8)).astype(np.float32)
def call():
    (o, lse), vjp = cuflash.attention_vjp(q, q, q, return_lse=True)
    return [x.tobytes() for x in (o, lse, *vjp(o))]
def show(when):
    print(when, call() == expected, flush=True)
def at_exit():
    threading.main_thread().join()
    show("thread")
expected = call()
atexit.register(show, "atexit")
threading.Thread(target=at_exit).start()
"""


def test_calls_while_the_interpreter_exits_are_as_any() -> None:
    assert _run(EXITS) == "thread True\natexit True\n"
    assert _run(EXITS.replace("expected = call()", "expected = None")) == "thread False\natexit False\n"  # first calls


OLD = """
import sys, pytest, threadpoolctl
assert threadpoolctl.__version__ == "3.5.0", threadpoolctl.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "limit or every", sys.argv[1]]))
"""


@pytest.mark.skipif(not OLDEST.is_dir(), reason=f"{OLDEST} is missing: make test installs it")
def test_the_oldest_threadpoolctl_serves_as_well() -> None:
    path = os.pathsep.join([str(OLDEST), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-c", OLD, "tests/runtime/test_blas.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"PYTHONPATH": path},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
