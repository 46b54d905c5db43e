"""The simulator follows PTX for each operation, and reports every broken rule at its line, and nothing else."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import numpy as np
import probing
import pytest
import sim_probes
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from sim_probes import build, line_of

import cuflash
from cuflash import sim
from cuflash.compiler import host_cache
from cuflash.sim import compiler

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
ORDERS = ("round_robin", "first_warp", "last_warp", "random", "priorities")
COPIES = ("eager", "late", "random")
KEPT = compiler.cache_directory  # for objects that are slow to build, in tests that do not test the build


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder that contains only the simulator's runtime, which takes seconds to build."""
    folder = tmp_path_factory.mktemp("kernels")
    with compiler._build_runtime(compiler._compiler(), "") as runtime:
        shutil.copy(runtime.name, folder)
    return folder


@pytest.fixture(autouse=True)
def _cold_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cache_directory", lambda: cache)


def schedules(count: int) -> Iterator[sim.Schedule]:
    kinds = itertools.cycle(itertools.product(ORDERS, COPIES, (False, True)))
    for seed, (order, copies, shuffle_lanes) in zip(range(count), kinds):
        yield sim.Schedule(seed=seed, order=order, copies=copies, shuffle_lanes=shuffle_lanes)


# ---- operations under every schedule; tests/kernels/test_probes.py tests each operation ----


def test_copies_fill_with_zeros_and_named_barriers_order_their_warps() -> None:
    launch = probing.copy()
    for schedule in schedules(60):
        probing.assert_expected(launch, launch.on_simulator(schedule))


@pytest.mark.parametrize("order", ORDERS)
def test_atomics_lose_nothing_and_spinning_starves_nobody(order: str) -> None:
    launch = probing.atomics()
    probing.assert_expected(launch, launch.on_simulator(sim.Schedule(order=order, seed=5)))


# ---- schedules ----


def test_no_schedule_troubles_a_correct_kernel() -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    for schedule in schedules(200):
        out, expected = sim_probes.run_pipeline(kernel, schedule)
        assert_array_equal(out, expected, err_msg=repr(schedule))


@pytest.mark.parametrize("fault", range(1, 5), ids=sim_probes.PIPELINE_FAULTS)
def test_a_missing_barrier_or_wait_shows_under_hostile_schedules(fault: int) -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    wrong = 0
    for seed in range(20):
        hostile = sim.Schedule(seed=seed, order="random", copies="late" if seed % 2 else "random", shuffle_lanes=True)
        out, expected = sim_probes.run_pipeline(kernel, hostile, fault)
        wrong += not np.array_equal(out, expected)
    assert wrong >= 10


def test_a_launch_is_repeated_bit_for_bit_by_its_schedule() -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    for schedule in schedules(30):
        first, again = (sim_probes.run_pipeline(kernel, schedule, fault=1)[0] for _ in range(2))
        assert first.tobytes() == again.tobytes()


# ---- subnormal numbers; tests/kernels/test_probes.py tests which operations keep them ----

DOUBLED = 'extern "C" __global__ void doubled(float* x, double* y) { *x += *x, *y += *y; }'


def keeps_subnormals() -> bool:
    """Return whether this thread computes with subnormal numbers."""
    return bool(np.array(1e-40, np.float32) * np.float32(0.5) > 0)


@pytest.mark.parametrize("resident_blocks", [1, 2])
def test_a_launch_flushes_subnormal_numbers_and_its_thread_does_not(resident_blocks: int) -> None:
    x, y = np.full(1, 1e-40, np.float32), np.full(1, 1e-310)
    schedule = sim.Schedule(resident_blocks=resident_blocks)
    build(DOUBLED, "doubled")(1, 1, (x, y), 0, schedule, flushes=False)
    assert x == np.float32(1e-40) * 2 and y == 2e-310
    build(DOUBLED, "doubled")(2, 1, (x, y), 0, schedule)
    assert x == 0 and keeps_subnormals()


# ---- broken rules ----

BUGS = """#include <ptx/barrier.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/mma.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;

__noinline__ int descend(volatile int* x, int depth) {
  volatile int here[64];
  here[depth % 64] = x[0];
  return depth == 0 ? 0 : descend(x, depth - 1) + here[depth % 64];
}

extern "C" __global__ void bugs(const char* name, int* x, int zero) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* shared = ptx::dynamic_shared<float>();
  const uint32_t address = ptx::shared_address(shared);
  uint32_t matrix[1];
  const auto is = [&](const char* other) {
    int i = 0;
    while (name[i] && name[i] == other[i]) ++i;
    return name[i] == other[i];
  };
  if (is("barrier in a branch") && lane < 16)
    __syncthreads();  // barrier in a branch
  if (is("barriers in two branches")) {
    if (lane < 16) __syncthreads();
    else __syncthreads();  // barriers in two branches
  }
  if (is("exited lane")) {
    if (lane == 5) return;
    x[lane] = __shfl_sync(0xffffffffu, lane, 0);  // exited lane
  }
  if (is("lane outside the mask") && lane < 16)
    x[lane] = __shfl_sync(0x0000ffffu, lane, 20);  // lane outside the mask
  if (is("not in the mask"))
    __syncwarp(0x0000ffffu);  // not in the mask
  if (is("shuffles in two branches")) {
    if (lane < 16) x[lane] = __shfl_xor_sync(0xffffffffu, lane, 1);
    else x[lane] = __shfl_xor_sync(0xffffffffu, lane, 2);  // shuffles in two branches
  }
  if (is("overlapping masks")) {
    if (lane < 16) __syncwarp(0x0001ffffu);
    else if (lane > 16) __syncwarp(0xffff0000u);
    else __syncwarp(0x00010003u);  // overlapping masks
  }
  if (is("left waiting")) {
    if (lane < 16) __syncwarp(0x0001ffffu);  // left waiting
    else __syncwarp(0xffff0000u);
  }
  if (is("misaligned row"))
    ptx::ldmatrix_x1(matrix, address + 16 * lane + 8);  // misaligned row
  if (is("row outside"))
    ptx::ldmatrix_x1(matrix, address + 512 * lane);  // row outside
  if (is("copy not waited for"))
    ptx::cp_async_ca_4(address + 4 * lane, x + lane, 4);  // copy not waited for
  if (is("misaligned copy"))
    ptx::cp_async_ca_16(address + 16 * lane, x + 1, 16);  // misaligned copy
  if (is("copy too long"))
    ptx::cp_async_ca_4(address + 4 * lane, x + lane, 5);  // copy too long
  if (is("lonely barrier") && warp == 0)
    ptx::bar_sync(1, 64);  // lonely barrier
  if (is("barrier of two sizes"))
    ptx::bar_sync(1, warp == 0 ? 64 : 32);  // barrier of two sizes
  if (is("barrier too large"))
    ptx::bar_sync(1, 96);  // barrier too large
  if (is("barrier 16"))
    ptx::bar_sync(16, 64);  // barrier 16
  if (is("nobody waits") && warp == 0)
    ptx::bar_arrive(3, 64);  // nobody waits
  if (is("arrives twice") && warp == 0)
    for (int i = 0; i < 2; ++i) ptx::bar_arrive(3, 64);  // arrives twice
  if (is("past shared memory")) {
    __syncwarp();  // past shared memory
    shared[512 + lane] = 1.0f;
  }
  if (is("not shared"))
    x[lane] = static_cast<int>(ptx::shared_address(x));  // not shared
  if (is("trap"))
    __trap();  // trap
  if (is("wild store") && lane == 3)
    *reinterpret_cast<volatile int*>(static_cast<uint64_t>(zero) + 4) = 1;  // wild store
  if (is("deep recursion"))
    x[lane] = descend(x, 1 << 20);
  if (is("division by zero"))
    x[lane] = 5 / zero;  // division by zero
  if (is("endless operations"))
    for (;;) __syncwarp();  // endless operations
  if (is("endless rare operations"))
    for (volatile int* there = x;; __syncwarp())  // endless rare operations
      for (int i = 0; i < 1 << 20; ++i) there[0] = i;
  if (is("endless atomics"))
    while (atomicAdd(x, 0) == 0) {}  // endless atomics
}
"""
REPORTS = {
    "barrier in a branch": r"deadlock.*\n  warp 0 lanes 0-15: waits in __syncthreads at bugs.cu:{line}\n"
    r"  warp 0 lanes 16-31: exited\n",
    "barriers in two branches": r"bugs.cu:{line}: the warp diverged: this lane reaches barrier 0 here, lanes 0000ffff",
    "exited lane": r"bugs.cu:{line}: __shfl_sync: mask ffffffff names lanes 00000020, which have exited|"
    r"exits while lanes 0000001f of its warp wait for it in __shfl_sync",
    "lane outside the mask": r"bugs.cu:{line}: __shfl_sync: lane 0 reads lane 20, which does not take part",
    "not in the mask": r"bugs.cu:{line}: __syncwarp: the calling lane is not in its mask 0000ffff\n.*lane 16\)",
    "shuffles in two branches": r"bugs.cu:{line}: the warp diverged: .* lanes 0000ffff wait in __shfl_xor_sync",
    "overlapping masks": r"bugs.cu:{line}: the warp diverged: .* with mask 00010003 here, while lanes 0000ffff wait",
    "left waiting": r"bugs.cu:{line}: the thread exits while lanes 0000ffff of its warp wait for it in __syncwarp",
    "misaligned row": r"bugs.cu:{line}: ldmatrix_x1: shared address must be a multiple of 16; got offset 8",
    "row outside": r"bugs.cu:{line}: ldmatrix_x1: 16 bytes at shared offset 2048 are outside the 2048 bytes",
    "copy not waited for": r"bugs.cu:{line}: the thread exits with 1 copies of cp.async",
    "misaligned copy": r"bugs.cu:{line}: cp_async_ca_16: address must be a multiple of 16",
    "copy too long": r"bugs.cu:{line}: cp_async_ca_4 copies from 0 to 4 bytes; got 5",
    "lonely barrier": r"deadlock.*\n  warp 0 lanes 0-31: waits in bar_sync at bugs.cu:{line}\n"
    r"  warp 1 lanes 0-31: exited",
    "barrier of two sizes": r"bugs.cu:{line}: barrier 1 is for 32 threads here, and for 64 at bugs.cu:{line}",
    "barrier too large": r"bugs.cu:{line}: barrier 1: .* at most the block's 64; got 96",
    "barrier 16": r"bugs.cu:{line}: a barrier's id is from 0 to 15; got 16",
    "nobody waits": r"bugs.cu:{line}: the block \(0, 0, 0\) ends with 32 of 64 threads counted at barrier 3",
    "arrives twice": r"bugs.cu:{line}: this thread arrives at barrier 3 a second time",
    "past shared memory": r"bugs.cu:{line}: block \(0, 0, 0\) wrote into the byte 0 past the end of its 2048 bytes",
    "not shared": r"bugs.cu:{line}: shared_address: the pointer is not into the 2048 bytes",
    "trap": r"bugs.cu:{line}: __trap: the kernel gave up",
    "wild store": r"a load or store at 0x4, which is not memory(.*\n)*  interrupted at bugs.cu:{line}\n",
    "deep recursion": r"the thread's stack of 262144 bytes overflowed",
    "endless operations": r"bugs.cu:{line}: the launch passed its time limit of 0.2 s here, in __syncwarp",
    "endless rare operations": r"bugs.cu:{line}: the launch passed its time limit of 0.2 s here, in __syncwarp",
    "endless atomics": r"the launch passed its time limit of 0.2 s",
}
if platform.machine() == "x86_64":  # other architectures divide by zero and continue
    REPORTS["division by zero"] = r"integer division by zero(.*\n)*  interrupted at bugs.cu:{line}\n"


def run_bug(name: str, schedule: sim.Schedule = sim.Schedule(), block: int = 64) -> None:
    text = np.frombuffer(name.encode() + b"\0", np.uint8)
    time_limit = 0.2 if name.startswith("endless") else 60.0
    params = (text, np.zeros(64, np.int32), np.int32(0))
    build(BUGS, "bugs")(1, block, params, 2048, schedule, time_limit=time_limit)


def test_a_loop_without_operations_is_stopped_where_it_runs() -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    before = line_of(sim_probes.PIPELINE, "// before")
    match = rf"pipeline.cu:{before}: the launch passed its time limit(.*\n)*  interrupted at pipeline.cu:{before + 1}"
    with pytest.raises(sim.SimulationError, match=match):
        sim_probes.run_pipeline(kernel, sim.Schedule(), sim_probes.ENDLESS, time_limit=0.2)


@pytest.mark.parametrize("name", REPORTS)
def test_a_broken_rule_is_reported_at_its_line(name: str) -> None:
    line = 0 if name == "deep recursion" else line_of(BUGS, f"// {name}")
    with pytest.raises(sim.SimulationError, match=REPORTS[name].replace("{line}", str(line))) as caught:
        run_bug(name)
    assert "block (0, 0, 0)" in str(caught.value) and "under Schedule(seed=0, " in str(caught.value)
    assert keeps_subnormals()
    run_bug("")  # the error does not disturb the next launch


def test_no_rule_is_broken_where_no_bug_is_asked_for() -> None:
    for schedule in schedules(30):
        run_bug("", schedule)


def test_tensor_core_operations_ask_for_whole_warps() -> None:
    out = np.zeros((16, 16), np.float32)
    with pytest.raises(sim.SimulationError, match="ldmatrix_x4 needs all 32 lanes of a warp, and this one has 16"):
        sim.build(probing.mma().text(host=True), "mma")(1, 48, (out,) * 9, 4096)


UNDEFINED = """extern "C" __global__ void undefined(int which, int* x) {
  int small[4] = {1, 2, 3, 4};
  if (which == 0)
    x[0] = x[1] + 2147483647;  // 0
  if (which == 1)
    x[0] = *reinterpret_cast<int*>(reinterpret_cast<char*>(x) + 2 * x[1]);  // 1
  if (which == 2)
    x[0] = small[x[1] + 3];  // 2
  if (which == 3)
    x[0] = 1 << (x[1] + 31 + threadIdx.x);  // 3
  if (which == 4)
    x[0] = x[1] * 2147483647 / 2 - 7;
}
"""
UNDEFINED_REPORTS = ("overflow in an addition", "not aligned for its type", "index outside", "a shift by")


@pytest.mark.parametrize("which", range(4), ids=UNDEFINED_REPORTS)
def test_undefined_behaviour_is_an_exception(which: int) -> None:
    kernel = build(UNDEFINED, "undefined", "undefined")
    match = f"undefined.cu:{line_of(UNDEFINED, f'// {which}')}: undefined behaviour: .*{UNDEFINED_REPORTS[which]}"
    with pytest.raises(sim.SimulationError, match=match):
        kernel(1, 1, (np.int32(which), np.ones(8, np.int32)))
    kernel(1, 1, (np.int32(4), np.ones(8, np.int32)))


def in_child(
    sanitize: compiler.Sanitizer, cache: Path, child: str = sim_probes.CHILD
) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {paths}\n{child}"
    command = ["env", *(f"{name}={value}" for name, value in sim.preload_environment(sanitize).items())]
    command += [sys.executable, "-c", code, sanitize, str(cache)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_thread_sanitizer_sees_every_missing_barrier_and_wait_in_a_friendly_run() -> None:
    run = in_child("thread", KEPT())
    correct, *faulty = run.stderr.split(": done\n")[:5]
    assert "WARNING" not in correct, correct
    reads, copies, before = (
        f"pipeline.cu:{line_of(sim_probes.PIPELINE, f'// {marker}')}" for marker in ("reads", "copies", "before")
    )
    for report in faulty:
        assert "WARNING: ThreadSanitizer: data race" in report
        assert reads in report and copies in report
    # A loop that calls no operation cannot be interrupted in the process, so the process is ended.
    assert run.returncode == 70, run.stderr
    assert f"passed its time limit of 0.2 s in a loop without operations, entered after {before}" in run.stderr


@pytest.mark.slow
def test_address_sanitizer_sees_reads_and_stores_outside_arrays() -> None:
    run = in_child("address", KEPT())
    assert run.stderr.startswith("correct: done\n"), run.stderr
    line = line_of(sim_probes.PIPELINE, "// copies")
    assert "cp_async_cg_16 reads 16 bytes at 0x" in run.stdout and "is outside its buffer" in run.stdout, run.stdout
    assert f"pipeline.cu:{line}" in run.stdout, run.stdout
    assert "heap-buffer-overflow" in run.stderr
    assert f"pipeline.cu:{line_of(sim_probes.PIPELINE, '// past the end')}" in run.stderr
    assert "end" not in run.stderr.splitlines()[-1]


# ---- from Python ----

TWICE = 'extern "C" __global__ void twice(float* x, int count) { if (threadIdx.x < count) x[threadIdx.x] *= 2.0f; }\n'


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"params": [np.zeros(3)]}, TypeError, "params must be a tuple; got list"),
        ({"params": (np.zeros(3),)}, TypeError, "twice takes 2 parameters; got 1"),
        ({"params": (np.zeros(3), 3)}, TypeError, r"params\[1\] must be an array or a NumPy scalar such as np.int32"),
        ({"params": (np.zeros(3), np.int64(3))}, TypeError, r"params\[1\] must have 4 bytes.* got 8 \(int64 of"),
        ({"grid": 0}, ValueError, "grid must be 1 to 3 positive ints; got 0"),
        ({"grid": (1, 1, 1, 1)}, ValueError, "grid must be 1 to 3 positive ints"),
        ({"block": 1025}, ValueError, "block must be from 1 to 1024 threads; got 1025"),
        ({"shared_bytes": 1 << 20}, ValueError, "shared_bytes must be from 0 to 232448; got 1048576"),
        ({"time_limit": 0.0}, ValueError, "time_limit must be a positive number of seconds; got 0.0"),
    ],
)
def test_a_launch_refuses_what_it_cannot_pass(keywords: dict, error: type[Exception], match: str) -> None:
    arguments = {"grid": 1, "block": 4, "params": (np.zeros(4, np.float32), np.int32(4))} | keywords
    with pytest.raises(error, match=match):
        build(TWICE, "twice")(**arguments)


def test_a_schedule_refuses_unknown_words() -> None:
    with pytest.raises(ValueError, match="order must be one of round_robin, .*; got 'fifo'"):
        sim.Schedule(order="fifo")
    with pytest.raises(ValueError, match="copies must be one of eager, late, random; got 'never'"):
        sim.Schedule(copies="never")
    with pytest.raises(ValueError, match="seed must be from 0"):
        sim.Schedule(seed=-1)


def test_calls_from_several_threads_take_turns() -> None:
    kernel = build(sim_probes.PIPELINE, "pipeline")
    wrong: list[int] = []

    def run(seed: int) -> None:
        for again in range(10):
            out, expected = sim_probes.run_pipeline(kernel, sim.Schedule(seed=seed + again, order="random"))
            wrong.extend([seed] * (not np.array_equal(out, expected)))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build(TWICE, "twice")
    publish, compiled = compiler._publish, list[str]()

    def noted(commands: list[list[str]], target: Path, what: str, source: str = "") -> IO[bytes]:
        compiled.append(what)
        return publish(commands, target, what, source)

    monkeypatch.setattr(compiler, "_publish", noted)
    build(TWICE, "twice")
    assert compiled == []
    build(TWICE.replace("2.0f", "3.0f"), "twice")
    build(TWICE.replace("2.0f", "3.0f"), "twice")
    assert compiled == ["kernel twice"]


def test_a_compile_error_shows_our_line_and_where_the_text_is() -> None:
    text = TWICE + "\n#line 41 \"kernels_cu/simt/forward.cu\"\n__device__ int broken() { return one; }\n"
    with pytest.raises(sim.BuildError, match="kernels_cu/simt/forward.cu:41:.*one.* was not declared") as caught:
        build(text, "twice")
    path = Path(str(caught.value).rpartition("The whole text is in ")[2])
    assert "return one;" in path.read_text("utf-8")
    with pytest.raises(sim.BuildError, match=r"shared memory comes from ptx::dynamic_shared<T>\(\), not from"):
        build(TWICE + "__device__ void wrong() { __shared__ int x; }", "twice")


MATHEMATICS = """
extern "C" __global__ void mathematics(float* x, double* y, int* z) {
  const int i = threadIdx.x;
  x[i] = abs(-x[i]) + expf(x[i]) + tanhf(x[i]) + max(x[i], 2.0f) + (isnan(x[i]) ? 1 : 0);
  y[i] = exp(y[i]) + fma(y[i], 2.0, 1.0) + abs(-y[i]);
  z[i] = static_cast<int>(static_cast<__int128>(abs(z[i])) * 7 / (i + 2)) + __popc(z[i]);  // functions of the compiler
}
"""


def test_kernels_have_the_mathematics_of_c_and_name_no_library() -> None:
    kernel, i = build(MATHEMATICS, "mathematics"), np.arange(8)
    x, y, z = (i - 3).astype(np.float32), i - 3.5, (i - 4).astype(np.int32)
    expected = np.abs(x) + np.exp(x) + np.tanh(x) + np.maximum(x, 2), np.exp(y) + 2 * y + 1 + np.abs(y)
    bits = [int(value).bit_count() for value in z.view(np.uint32)]
    integers = 7 * np.abs(z) // (i + 2) + bits
    kernel(1, 8, (x, y, z))
    for actual, right in zip((x, y), expected):
        np.testing.assert_allclose(actual, right, rtol=4 * np.finfo(actual.dtype).eps)
    assert_array_equal(z, integers)
    output = subprocess.run(["readelf", "-d", str(kernel._library)], capture_output=True, text=True, check=True).stdout
    assert "Dynamic section" in output and "NEEDED" not in output


@pytest.mark.parametrize(("value", "stays"), [("/lib/libasan.so", False), ("libtsan.so", False), ("libm.so.6", True)])
def test_a_compiler_inherits_no_sanitizer(monkeypatch: pytest.MonkeyPatch, value: str, stays: bool) -> None:
    monkeypatch.setenv("LD_PRELOAD", value)
    output = compiler._run([sys.executable, "-c", "import os; print('LD_PRELOAD' in os.environ)"])
    assert output.stdout == f"{stays}\n"


def test_a_missing_compiler_or_sanitizer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sim.BuildError, match=r"needs libtsan.so in the process .*sim.preload_environment\('thread'\)"):
        build(TWICE, "twice", "thread")
    known = "'', 'undefined', 'address', 'thread', 'blocks'"
    with pytest.raises(ValueError, match=f"sanitize must be one of {known}; got 'memory'"):
        build(TWICE, "twice", "memory")
    with pytest.raises(ValueError, match="entry must be the name of an extern \"C\" function; got 'a::b'"):
        build(TWICE, "a::b")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(sim.BuildError, match=r"^executor='sim' needs .* g\+\+, .* on the path: .* apt install g\+\+"):
        build(TWICE, "twice")


def test_an_unwritable_home_is_said_and_does_not_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("CUFLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiler.cache_directory() == tmp_path / "xdg" / "cuflash" / "sim"
    assert compiler.cache_directory().stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.cache_directory() == tmp_path / ".cache" / "cuflash" / "sim"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "chosen"))
    assert compiler.cache_directory() == cuflash.cache_info().simulator.folder == tmp_path / "chosen" / "sim"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "here")
    with pytest.warns(RuntimeWarning, match="kernels for the host again: here/sim is not an absolute path"):
        assert compiler.cache_directory().is_absolute()
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(file))
    with pytest.warns(RuntimeWarning, match="compiles its kernels for the host again: .*File exists: .*file"):
        folder = compiler.cache_directory()
    assert folder.is_dir() and compiler.cache_directory() == folder


# Cached programs, and programs that fail.

DAMAGES = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 139)),
    st.tuples(st.just("flipped"), st.integers(0, 139)),
    st.tuples(st.just("longer"), st.integers(1, 40)),
    st.tuples(st.sampled_from(["folder", "gone", "zeros", "before seals"]), st.just(0)),
)


def damage(file: Path, kind: str, place: int) -> None:
    data = bytearray(file.read_bytes())
    if kind == "flipped":
        data[place % len(data)] ^= 1
    wanted = {"cut": data[: place % len(data)], "longer": data + data[:place], "zeros": bytes(len(data))}
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind != "gone":
        file.write_bytes(wanted.get(kind, data if kind == "flipped" else data[: -compiler._SEAL_BYTES]))


def is_whole(file: Path) -> bool:
    """Return whether a cached file is accepted, without being built again."""
    opened = compiler._opened(file)
    if opened is not None:
        opened.close()
    return opened is not None


@given(st.binary(min_size=100, max_size=108), st.lists(DAMAGES, min_size=1, max_size=2))
def test_what_is_not_as_it_was_published_is_published_again(content: bytes, damages: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel-1.so"
        (Path(folder) / "made").write_bytes(content)
        for kind, place in damages:
            compiler._publish([["cp", str(Path(folder) / "made"), target.name]], target, "a kernel").close()
            assert is_whole(target) and target.read_bytes()[: len(content)] == content
            damage(target, kind, place)
            assert not is_whole(target)


@pytest.mark.parametrize("kind", ["cut", "zeros", "folder"])
def test_a_damaged_kernel_or_prelude_is_made_again(cache: Path, kind: str) -> None:
    text, x = TWICE.replace("2.0f", f"{len(kind)}.5f"), np.ones(4, np.float32)
    library = build(text, "twice")._library
    preludes = list(cache.glob("prelude-*/prelude.hpp.gch"))  # including those of sanitizers
    for file in (library, *preludes):
        damage(file, kind, 1000)
    build(text, "twice")(1, 4, (x, np.int32(4)))
    assert_array_equal(x, np.full(4, len(kind) + 0.5, np.float32))
    assert is_whole(library) and any(map(is_whole, preludes))


def published(folder: Path, name: str, data: bytes = b"machine code") -> IO[bytes]:
    """Publish a file with `cp` as its compiler, and return the opened file."""
    (folder / "made").write_bytes(data)
    target = folder / name
    return compiler._publish([["cp", str(folder / "made"), target.name]], target, "a file")


@pytest.mark.parametrize("name", [f"kernel-{'0f' * 16}.so", f"prelude-{'0f' * 16}/prelude.hpp.gch"])
def test_a_file_that_is_about_to_be_loaded_is_not_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    folder = KEPT()
    with published(folder, name):
        assert cuflash.cache_clear().nbytes == 0 and is_whole(folder / name)
    opened = compiler._opened(folder / name)
    assert opened is not None
    with opened:
        assert cuflash.cache_clear().nbytes == 0 and is_whole(folder / name)
    assert cuflash.cache_clear().nbytes > 0 and os.listdir(folder) == ["made"]


def test_a_file_that_was_removed_or_replaced_is_not_taken_for_the_one_that_is_there(tmp_path: Path) -> None:
    name = f"kernel-{'0f' * 16}.so"
    published(tmp_path, name).close()
    with (tmp_path / name).open("rb") as before:
        published(tmp_path, name).close()
        assert host_cache.hold(before)  # an intact file is not published again: another process may be about to load it
        os.replace(shutil.copy(tmp_path / name, tmp_path / "copy"), tmp_path / name)
        assert not host_cache.hold(before)
        (tmp_path / name).unlink()
        assert not host_cache.hold(before)


@given(st.permutations(range(5)), st.integers(0, 5))
def test_the_least_recently_used_files_are_removed_beyond_a_size(order: list[int], most: int) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        folder = Path(place)
        names = [f"kernel-{number:032x}.so" for number in range(5)]
        for name in names:
            published(folder, name).close()
        for age, number in enumerate(reversed(order)):
            os.utime(folder / names[number], ns=(age, age))
        opened = compiler._opened(folder / names[order[-1]])  # the oldest file is used again
        assert opened is not None
        opened.close()
        (folder / "notes.so").write_bytes(bytes(1 << 20))  # belongs to someone else
        patch.setattr(host_cache, "MOST_BYTES", most * (folder / names[0]).stat().st_size)
        host_cache.shrink(folder)
        by_use = [names[number] for number in (order[-1], *order[:-1])]
        assert sorted(os.listdir(folder)) == sorted([*by_use[:most], "made", "notes.so"])


def test_a_cache_that_is_too_large_shrinks_when_a_kernel_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published(tmp_path, f"kernel-{1:032x}.so").close()
    monkeypatch.setattr(host_cache, "MOST_BYTES", 60)
    published(tmp_path, f"kernel-{2:032x}.so").close()
    assert sorted(os.listdir(tmp_path)) == [f"kernel-{2:032x}.so", "made"]


def test_a_full_cache_is_not_looked_through_for_each_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size, looks, shrink = 12 + compiler._SEAL_BYTES, list[Path](), host_cache.shrink
    monkeypatch.setattr(host_cache, "MOST_BYTES", 128 * size)  # the cache looks for old files once per 2 new files

    def noted(place: Path) -> None:
        looks.append(place)
        shrink(place)

    monkeypatch.setattr(host_cache, "shrink", noted)
    for number in range(150):
        published(tmp_path, f"kernel-{number:032x}.so").close()
        assert len(list(tmp_path.glob("kernel-*"))) <= 128 + 2
    assert looks == [tmp_path] * (1 + 149 // 2)


def test_a_prelude_is_read_once_and_made_again_after_the_cache_was_cleared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with compiler._build_runtime(compiler._compiler(), "") as runtime:
        monkeypatch.setattr(compiler, "_build_runtime", lambda *_: open(runtime.name, "rb"))
    for module, name in ((compiler, "cache_directory"), (host_cache, "folder")):
        monkeypatch.setattr(module, name, lambda: tmp_path)
    sealed, seal = list[int](), compiler._seal

    def noted(data: bytes) -> bytes:
        sealed.append(len(data))
        return seal(data)

    monkeypatch.setattr(compiler, "_seal", noted)
    for number in (0, 1):
        build(TWICE + f"// {number}", "twice")
    assert sum(size > 1 << 20 for size in sealed) == 2  # once when it is built, and once before it is used
    assert cuflash.cache_clear().nbytes > 1 << 20 and os.listdir(tmp_path) == []
    build(TWICE + "// again", "twice")
    assert len(list(tmp_path.glob("prelude-*/*"))) == 1


def test_a_kernel_that_vanishes_before_it_is_loaded_is_made_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = compiler.Kernel

    def vanish(library: Path, *rest: object) -> object:
        library.unlink()  # like `rm`, which takes no lock
        monkeypatch.setattr(compiler, "Kernel", loaded)
        raise OSError(f"{library}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(compiler, "Kernel", vanish)
    x = np.ones(4, np.float32)
    build(TWICE.replace("2.0f", "7.0f"), "twice")(1, 4, (x, np.int32(4)))
    assert_array_equal(x, np.full(4, 7, np.float32))


def stand_in(folder: Path, script: str) -> str:
    """Return a PATH on which g++ is this script."""
    program = folder / "g++"
    program.write_bytes(b"#!/bin/sh\n" + script.encode("latin-1") + b"\n")
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 4", r"kernel twice|the prelude.*\n.* ended with exit status 4; the command was /.*g\+\+ -std=c\+\+20 "),
        ("kill -9 $$", r"printed nothing and ended with signal 9; the command was /.*g\+\+ -std=c\+\+20 "),
        ("echo 'caf\xe9.cu:1: error' >&2; exit 1", r"caf\\xe9\.cu:1: error"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_quoted_or_its_end_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    monkeypatch.setattr(compiler, "cache_directory", lambda: tmp_path)
    monkeypatch.setenv("PATH", stand_in(tmp_path, script))
    with pytest.raises(sim.BuildError, match=words):
        build(TWICE, "twice")


def test_a_compiler_that_does_not_start_or_never_ends_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "cache_directory", lambda: tmp_path)
    monkeypatch.setenv("PATH", stand_in(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(compiler, "_COMPILER_SECONDS", 0.1)
    with pytest.raises(sim.BuildError, match=r"g\+\+ did not end within 0.1 s; the command was /.*g\+\+ --version"):
        build(TWICE, "twice")
    (tmp_path / "g++").write_bytes(b"\x7fELF")
    with pytest.raises(sim.BuildError, match=r"g\+\+ does not start \(.*Exec format error.*\): reinstall g\+\+"):
        build(TWICE, "twice")


def test_a_folder_that_libraries_may_not_be_loaded_from_is_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=real(path).f_flag | os.ST_NOEXEC))
    with pytest.warns(RuntimeWarning, match="host again: libraries cannot be loaded from .* mounted with noexec"):
        folder = KEPT()
    assert folder.is_dir() and not folder.is_relative_to(tmp_path)


def test_a_library_that_is_not_loaded_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str | None, *rest: object, **options: object) -> object:
        raise OSError(f"{name}: failed to map segment from shared object")

    build(TWICE, "twice")
    monkeypatch.setattr(compiler, "_unusable", {})  # later tests use the folder again
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    words = "twice must be loaded .*failed to map segment.*set CUFLASH_CACHE_DIR, or TMPDIR"
    with pytest.raises(sim.BuildError, match=words) as caught:
        build(TWICE, "twice")
    assert "noexec" not in str(caught.value)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(sim.BuildError, match=f"{words[:-30]}.*mounted with noexec"):
        build(TWICE, "twice")


def test_what_the_locale_cannot_decode_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "\u00e9\u6f22"
    shutil.copytree(Path(cuflash.__file__).parent, folder / "cuflash", ignore=shutil.ignore_patterns("__pycache__"))
    code = """from cuflash.sim import compiler
compiler._target("kernel", compiler._identity("g++"), str(compiler._RUNTIME))
print(ascii(compiler._run(["echo", str(compiler._RUNTIME)]).stdout))"""
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(folder),
    }
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and r"\xe9\u6f22" in run.stdout, run.stderr


def names(file: Path) -> set[str]:
    """Return the functions and types in a file of instructions that kernels may use."""
    room = file.read_text("utf-8").rpartition("namespace cuflash::ptx {")[2]
    functions = r"(?:constexpr )?CUFLASH_DEVICE (?:\S+|T\*)"
    return set(re.findall(rf"^(?:{functions}|struct) (\w+(?:<\w+>)?)", room, re.MULTILINE))


def test_both_rooms_of_instructions_have_the_same_names() -> None:
    device = Path(__file__).parents[2] / "kernels_cu" / "ptx"
    files = sorted(path.name for path in device.iterdir())
    assert files == sorted(path.name for path in sim_probes.PTX.iterdir()) and len(files) == 19
    for file in files:
        assert names(device / file) == names(sim_probes.PTX / file) != set()
