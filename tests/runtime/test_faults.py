"""Faults on purpose: after memory that runs out, interrupts, failed kernels and killed processes, calls are right.

Tests on a stand-in for CuPy fail at each place; those on a GPU at drawn ones.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cupy_double
import numpy as np
import pytest
from executors import is_long, needs_compiler
from cuflash.executors import host_threads
from library_parts import part
from numpy_memory import NumpyMemory

import cuflash
from cuflash import masks

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
Q, K, V, DO = RNG.standard_normal((4, 2, 40, 16), dtype=np.float32)
BIAS = RNG.standard_normal((2, 40, 40), dtype=np.float32)
Call = Callable[[], Sequence[Any]]


# Calls, on arrays of CuPy or of its stand-in, whose results have the same bits each time.


def attend(library: ModuleType, xp: Any, **options: Any) -> Call:
    arrays = [xp.asarray(x) for x in (Q, K, V)]
    return lambda: library.attention(*arrays, causal=True, deterministic=True, return_lse=True, **options)


def gradients(library: ModuleType, xp: Any, *, batch: int = 1) -> Call:
    """Return a call whose keys and values have no axis for the batch, over which their gradients are summed."""
    q, k, v, do = (xp.asarray(x) for x in (np.stack([Q] * batch), K, V, np.stack([DO] * batch)))

    def call() -> Sequence[Any]:
        o, vjp = library.attention_vjp(q, k, v, deterministic=True)
        return [o, *vjp(do)]

    return call


def gradients_of_a_new_mask(library: ModuleType, xp: Any) -> Call:
    """Return a call with a new mask, whose lists go to the device, and leave with the mask."""
    q, k, v, do = (xp.asarray(x) for x in (Q, K, V, DO))

    def call() -> Sequence[Any]:
        mask = library.BlockIndex.from_blocks(np.tri(3, dtype=bool), 40, 40, 16)
        o, vjp = library.attention_vjp(q, k, v, mask=mask, deterministic=True)
        return [o, *vjp(do)]

    return call


def gradients_of_a_bias(library: ModuleType, xp: Any) -> Call:
    q, k, v, do, bias = (xp.asarray(x) for x in (Q, K, V, DO, BIAS))

    def call() -> Sequence[Any]:
        o, vjp = library.attention_vjp(q, k, v, bias=bias, wrt="bias", deterministic=True)
        pulled = vjp(do)
        return [o, *pulled, pulled["bias"]]

    return call


def a_plan(library: ModuleType, xp: Any) -> Call:
    q, k, v, do = (xp.asarray(x) for x in (Q, K, V, DO))

    def call() -> Sequence[Any]:
        ready = library.plan(q, k, v, mask=library.masks.Lengths(kv=17), deterministic=True)
        ready.compile()
        o, lse = ready.forward(q, k, v)
        return [o, lse, *ready.backward(do, q, k, v, o, lse)]

    return call


def merged(library: ModuleType, xp: Any) -> Call:
    o = xp.asarray(np.stack([Q, K]))
    lse = xp.asarray(np.stack([Q[..., 0], K[..., 0]]))
    return lambda: library.merge(o, lse)


CASES: dict[str, Callable[[ModuleType, Any], Call]] = {
    "attention": attend,
    "gradients": gradients,
    "gradients of a new mask": gradients_of_a_new_mask,
    "gradients over a broadcast axis": lambda library, xp: gradients(library, xp, batch=3),
    "a scale far from 1": lambda library, xp: attend(library, xp, scale=1e-30),
    "gradients of a bias": gradients_of_a_bias,
    "a plan": a_plan,
    "merge": merged,
}


def bits(results: Sequence[Any]) -> list[bytes]:
    return [each.get().tobytes() for each in results]


# Memory that runs out, at each allocation of a call.


class Pool:
    """The memory of a device, whose allocations fail at a place."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def used_bytes(self) -> int:
        return int(self.xp.live_bytes)

    @contextmanager
    def failing(self, place: int) -> Iterator[None]:
        self.xp.allocations_left = place
        try:
            yield
        finally:
            self.xp.allocations_left = 1 << 62

    def allocations(self, call: Call) -> int:
        before = self.xp.allocated
        call()
        return int(self.xp.allocated - before)


class CupyPool(Pool):
    """CuPy's own memory pool."""

    def used_bytes(self) -> int:
        return int(self.xp.get_default_memory_pool().used_bytes())

    @contextmanager
    def failing(self, place: int) -> Iterator[None]:
        left, malloc = place, self.xp.get_default_memory_pool().malloc

        def allocate(nbytes: int) -> Any:
            nonlocal left
            left -= 1
            self.allocated = place - left
            if left == -1:
                raise self.xp.cuda.memory.OutOfMemoryError(nbytes, 0)
            return malloc(nbytes)

        with self.xp.cuda.using_allocator(allocate):
            yield

    def allocations(self, call: Call) -> int:
        self.allocated = 0
        with self.failing(1 << 62):
            call()
        return self.allocated


def has_grown(memory: Pool | NumpyMemory, baseline: int) -> bool:
    """Return whether more is used than a baseline, even after a garbage collection."""
    return memory.used_bytes() > baseline and gc.collect() >= 0 and memory.used_bytes() > baseline


def check_a_call_that_runs_out_of_memory(pool: Pool, call: Call, places: Sequence[int]) -> None:
    """Check that a failed allocation is one MemoryError, leaves no memory behind, and that the next call is right."""
    expected = bits(call())
    number = pool.allocations(call)
    assert number > 0
    gc.collect()
    baseline = pool.used_bytes()
    for place in places or range(number):
        with pool.failing(place % number), pytest.raises(MemoryError):
            call()
        assert not has_grown(pool, baseline), f"allocation {place % number} of {number}"
        assert bits(call()) == expected, f"allocation {place % number} of {number}"
        assert not has_grown(pool, baseline), f"allocation {place % number} of {number}"


@pytest.mark.parametrize("name", CASES)
def test_memory_that_runs_out_at_any_allocation_leaves_nothing(cupy: Any, name: str) -> None:
    check_a_call_that_runs_out_of_memory(Pool(cupy), CASES[name](cuflash, cupy), ())


@pytest.fixture
def device() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_memory_of_a_gpu_that_runs_out_leaves_nothing(device: Any, name: str) -> None:
    drawn = random.Random(name)
    places = [drawn.randrange(1 << 20) for _ in range(1000 // len(CASES))]
    check_a_call_that_runs_out_of_memory(CupyPool(device), CASES[name](cuflash, device), places)


# The same on the host, where NumPy's own allocations fail.

HOST_CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal float16": {"mask": masks.Causal(), "dtype": np.float16},
    "a list": {"mask": masks.Dilated(3)},
    "broadcast keys and a scale far from 1": {"batch": 3, "scale": 1e-30},
    "a bias and a cap": {"bias": BIAS, "softcap": 5.0, "wrt": "bias"},
    "dropout and a sink": {"dropout": cuflash.Dropout(0.3, 1), "sink": np.zeros(2, np.float32), "wrt": "sink"},
}


def on_the_host(*, batch: int = 1, dtype: Any = np.float32, **options: Any) -> Call:
    q, k, v, do = (x.astype(dtype) for x in (np.stack([Q] * batch), K, V, np.stack([DO] * batch)))

    def call() -> Sequence[Any]:
        (o, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
        pulled = vjp(do)
        return [o, lse, *pulled, *pulled.others.values()]

    return call


@needs_compiler
@pytest.mark.parametrize("name", HOST_CASES)
def test_memory_of_the_host_that_runs_out_at_any_allocation_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(host_threads, "_free_scratch", [])  # so that all memory that calls keep is counted
    call, memory = on_the_host(**HOST_CASES[name]), NumpyMemory()

    def host_bits() -> list[bytes]:
        return [each.tobytes() for each in call()]

    with memory.counted():
        expected = [host_bits() for _ in range(3)][-1]
        before = memory.allocations()
        assert host_bits() == expected
        gc.collect()
        number, baseline = memory.allocations() - before, memory.used_bytes()
        assert number > 10
        for place in range(0, number, 1 if is_long() else 1 + number // 24):
            with memory.failing(place), pytest.raises(MemoryError):
                call()
            assert not has_grown(memory, baseline), f"allocation {place} of {number}"
            assert host_bits() == expected, f"allocation {place} of {number}"
            assert not has_grown(memory, baseline), f"allocation {place} of {number}"


def in_process(code: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return what a process of its own prints."""
    command = [sys.executable, "-c", code, *arguments]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, env=environment)
    assert child.returncode == 0, child.stderr
    return child.stdout


# Interrupts between the kernels of a call.


@pytest.mark.parametrize("name", ["gradients", "gradients of a new mask", "gradients of a bias", "a plan"])
def test_an_interrupt_before_any_launch_leaves_the_next_call_right(cupy: Any, name: str) -> None:
    call = CASES[name](cuflash, cupy)
    expected = bits(call())
    before = len(cupy.launched)
    call()
    gc.collect()
    number, baseline = len(cupy.launched) - before, Pool(cupy).used_bytes()
    assert number >= 3
    for place in range(number):
        cupy.launches_left = place
        with pytest.raises(KeyboardInterrupt):
            call()
        assert bits(call()) == expected, f"launch {place} of {number}"
        assert not has_grown(Pool(cupy), baseline), f"launch {place} of {number}"


# Kernels of others that failed before.

EARLIER = "an earlier kernel of this process failed .*CUDA_ERROR_ILLEGAL_ADDRESS"


def check_earlier_failures_are_named(library: ModuleType, machine: Any, name: str) -> None:
    """Check that a call after a kernel failed says so, whether its kernels are loaded, or must be loaded first."""
    cases = [CASES[name](library, machine) for _ in range(2)]
    cases[0]()
    machine.has_failed = True
    compiled, launched = len(machine.compiled), len(machine.launched)
    for call in (cases[0], cases[1]):
        with pytest.raises(RuntimeError, match=EARLIER):
            call()
    part(library, "compiler.nvrtc")._loaded.clear()
    part(library, "planning._call_cache").CALLS.clear()
    with pytest.raises(RuntimeError, match=EARLIER):
        cases[0]()
    assert (len(machine.compiled), len(machine.launched)) == (compiled, launched)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("merge", "a scale far from 1")])
def test_the_failure_of_an_earlier_kernel_is_named(cupy: Any, name: str) -> None:
    check_earlier_failures_are_named(cuflash, cupy, name)


def check_checks_blame_no_kernel_for_an_earlier_one(library: ModuleType, machine: Any) -> None:
    """Check that CUFLASH_CHECK finds an earlier failure before it launches a kernel, which it would blame."""
    call = attend(library, machine)
    call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUFLASH_CHECK", "1")

        def failed() -> None:
            raise cupy_double.sticky(cupy_double.CUDARuntimeError)

        patch.setattr(machine.cuda.runtime, "deviceSynchronize", failed)
        launched = len(machine.launched)
        with pytest.raises(RuntimeError, match=EARLIER):
            call()
        assert len(machine.launched) == launched


def test_checks_blame_no_kernel_for_an_earlier_one(cupy: Any) -> None:
    check_checks_blame_no_kernel_for_an_earlier_one(cuflash, cupy)


def test_an_error_of_the_launch_itself_is_not_taken_for_an_earlier_one(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: int) -> None:
        raise cupy_double.CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")

    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", refuse)
    with pytest.raises(cupy_double.CUDADriverError, match="INVALID_VALUE"):
        attend(cuflash, cupy)()


FAILED = """
import sys
import cupy, numpy as np, cuflash
is_warm, is_checked = sys.argv[1] == "warm", sys.argv[2] == "checked"
q = cupy.asarray(np.random.default_rng(0).standard_normal((2, 40, 16)).astype(np.float32))
if is_warm:
    for _ in range(2):
        o, vjp = cuflash.attention_vjp(q, q, q)
        vjp(o)
faulty = cupy.RawKernel('extern "C" __global__ void f(float* x) { *x = 1.0f; }', "f")
faulty((1,), (1,), (np.uint64(16),))
import os
if is_checked:
    os.environ["CUFLASH_CHECK"] = "1"
else:
    try:
        cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        pass
errors = []
for call in (
    lambda: cuflash.attention(q, q, q),
    lambda: vjp(o) if is_warm else cuflash.attention_vjp(q, q, q),
    lambda: cuflash.attention(q, q, q, causal=True),
    lambda: cuflash.plan(q, q, q).forward(q, q, q),
):
    try:
        call()
        errors.append("nothing")
    except RuntimeError as error:
        errors.append(str(error).partition(":")[0])
print("; ".join(errors), flush=True)
os._exit(0)  # the libraries' own clean-up meets the failure too
"""


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["warm", "cold"])
@pytest.mark.parametrize("checks", ["plain", "checked"])
def test_the_failure_of_an_earlier_kernel_on_a_gpu_is_named(state: str, checks: str) -> None:
    said = in_process(FAILED, state, checks).strip().split("; ")
    assert len(said) == 4 and all("an earlier kernel of this process failed" in each for each in said), said


# Threads that end, and streams that are destroyed while their kernels run.


@pytest.mark.gpu
def test_threads_and_streams_that_end_while_their_kernels_run_disturb_nobody(device: Any) -> None:
    """A later stream may have the handle of a destroyed one, and the memory that was kept for it."""
    q, k, v, do = (device.asarray(RNG.standard_normal((8, 2048, 64)).astype(np.float16)) for _ in range(4))

    def results() -> list[Any]:
        o, vjp = cuflash.attention_vjp(q, k, v, mask=masks.Dilated(3), deterministic=True)
        return [o, *vjp(do)]

    expected, outputs, handles = results(), [], set()
    device.cuda.Device().synchronize()

    def work(number: int) -> None:
        stream = device.cuda.Stream(non_blocking=True)
        handles.add(stream.ptr)
        with stream:
            for _ in range(4):
                outputs.append(results())
        if number % 2:
            stream.synchronize()

    for start in range(0, 64, 8):
        threads = [threading.Thread(target=work, args=(start + number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del threads
        gc.collect()
    device.cuda.Device().synchronize()
    assert len(outputs) == 256
    for each in outputs:
        assert all(bool((ours == first).all()) for ours, first in zip(each, expected))


# CuPy's cache, with processes that are killed while they compile, and with many at once.

COMPILES = """
import hashlib, sys, time
started = time.perf_counter()
import cupy, numpy as np, cuflash
print(time.perf_counter() - started, flush=True)
rng, digest = np.random.default_rng(0), hashlib.sha256()
for dim in (16, 40):
    q, k, v, do = (cupy.asarray(x) for x in rng.standard_normal((4, 2, 40, dim)).astype(np.float32))
    o, vjp = cuflash.attention_vjp(q, k, v, causal=True, deterministic=True)
    for x in (o, *vjp(do)):
        digest.update(x.get().tobytes())
print(digest.hexdigest(), time.perf_counter() - started)
"""


def started(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache), **variables}
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", COMPILES], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    """Return the digest of the results of a process that ran to its end without a warning."""
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return output.split()[1]


@pytest.mark.gpu
@pytest.mark.slow
def test_a_process_killed_while_it_compiles_leaves_a_cache_that_works(device: Any, tmp_path: Path) -> None:
    expected = ended(started(tmp_path / "alone"))
    seconds = 4.0
    killed = [(started(tmp_path / "shared"), seconds * (number + 1) / 8) for number in range(8)]
    begun = time.monotonic()
    for process, moment in killed:
        time.sleep(max(0.0, begun + moment - time.monotonic()))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert ended(started(tmp_path / "shared")) == expected
    whole = [path for path in (tmp_path / "shared").glob("*.cubin")]
    assert len(whole) >= 4
    for path in whole:
        data = path.read_bytes()
        assert data[:40] == hashlib.sha1(data[40:]).hexdigest().encode()


@pytest.mark.gpu
@pytest.mark.slow
def test_64_processes_share_cupys_cache(device: Any, tmp_path: Path) -> None:
    processes = [started(tmp_path / "cache") for _ in range(64)]
    assert len({ended(process) for process in processes}) == 1
    left = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert left and all(name.endswith(".cubin") for name in left), left


@pytest.mark.gpu
def test_home_umask_locale_and_names_of_the_cache_change_no_bit(device: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    processes = [
        started(tmp_path / "caf\u00e9 \u6f22", LC_ALL="C"), started(tmp_path / ("x" * 240)),
        started(tmp_path / "link", HOME="/nowhere"),
    ]  # fmt: skip
    before = os.umask(0o077)
    try:
        processes.append(started(tmp_path / "private"))
    finally:
        os.umask(before)
    assert len({ended(process) for process in processes}) == 1


WITHOUT_A_GPU = """
import numpy as np, cuflash
q = np.ones((2, 9, 8), np.float32)
assert (cuflash.attention(q, q, q) == 1).all()
try:
    cuflash.precompile(q, q, q)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.gpu
def test_a_process_that_sees_no_gpu_is_told_so_and_computes_on_the_host(device: Any) -> None:
    said = in_process(WITHOUT_A_GPU, environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert "CuPy finds no usable GPU" in said and "python -m cuflash" in said
