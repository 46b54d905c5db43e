"""The simulator's reports on mbarriers, TMA and wgmma. Their results are tested in tests/kernels/test_probes.py."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import sim_probes
from cuflash.executors.tensor_map import BoxedArray, simulated
from numpy.testing import assert_array_equal
from sim_probes import HOPPER_FAULTS, HOPPER_PIPELINE, HOPPER_RACES, build, line_of, run_hopper_pipeline
from test_sim import in_child, schedules

from cuflash import sim
from cuflash.sim import compiler

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")


def test_no_schedule_troubles_a_correct_kernel() -> None:
    kernel = build(HOPPER_PIPELINE, "hopper_pipeline")
    for schedule in schedules(90):
        out, expected = run_hopper_pipeline(kernel, schedule, tiles=1 + schedule.seed % 6)
        assert_array_equal(out, expected, err_msg=repr(schedule))


def test_a_launch_is_repeated_bit_for_bit_by_its_schedule() -> None:
    kernel = build(HOPPER_PIPELINE, "hopper_pipeline")
    for schedule in schedules(15):
        first, again = (run_hopper_pipeline(kernel, schedule)[0] for _ in range(2))
        assert first.tobytes() == again.tobytes()


# Faults that are reported under every schedule, even the friendliest.
ALWAYS = {
    "wrong_parity": r"deadlock(.*\n)*  warp 0 lanes (\d+)-\2: waits in mbarrier_wait at {waits for a slot} "
    r"\(the barrier at shared offset 49168 is in a phase of parity 0, which 4 of 4 arrivals and 0 bytes are missing",
    "no_full_wait": r"no thread waited for the end of the previous phase|all 1 arrivals of this phase have already|"
    r"an operand of this wgmma changed",
    "too_few_bytes": r"too few (bytes )?were expected|while th(e|is) copy (was|is) pending|changed before",
    "too_many_bytes": r"deadlock.*(\n.*)*{waits for tiles} .* which 0 of 1 arrivals and 8192 bytes are missing from\)",
    "no_init_fence": r"tma_load_4d: the barrier made at .* was not followed by mbarrier_init_fence",
    "no_wgmma_fence": r"{multiplies}: there is no wgmma_fence between this wgmma and other",
    "no_proxy_fence": r"{copies out}: tma_store_4d reads shared offset \d+, which a thread wrote to without",
    "no_store_wait": r"{copies out}: the thread exits without bulk_wait_read or bulk_wait for this copy",
    "three_warps": r"the warpgroup diverged: this warp does",
}


@pytest.mark.parametrize("name", ALWAYS)
def test_a_broken_rule_is_reported_under_every_schedule(name: str) -> None:
    kernel, match = build(HOPPER_PIPELINE, "hopper_pipeline"), ALWAYS[name]
    for marker in ("waits for a slot", "waits for tiles", "multiplies", "copies out"):
        match = match.replace(f"{{{marker}}}", f"hopper_pipeline.cu:{line_of(HOPPER_PIPELINE, f'// {marker}')}")
    for schedule in schedules(30):
        with pytest.raises(sim.SimulationError, match=match):
            run_hopper_pipeline(kernel, schedule, HOPPER_FAULTS.index(name) + 1)


@pytest.mark.parametrize("name", HOPPER_RACES)
def test_a_race_shows_under_hostile_schedules(name: str) -> None:
    kernel, shown = build(HOPPER_PIPELINE, "hopper_pipeline"), 0
    for seed in range(20):
        copies = "late" if seed % 2 else "random"
        hostile = sim.Schedule(seed=seed, order="random", copies=copies, shuffle_lanes=True)
        try:
            out, expected = run_hopper_pipeline(kernel, hostile, HOPPER_FAULTS.index(name) + 1)
            shown += not np.array_equal(out, expected)
        except sim.SimulationError:
            shown += 1
    assert shown >= 10


def test_every_fault_is_in_one_of_both_tests() -> None:
    assert sorted([*ALWAYS, *HOPPER_RACES]) == sorted(HOPPER_FAULTS)


@pytest.mark.slow
def test_thread_sanitizer_sees_every_race_in_a_friendly_run() -> None:
    run = in_child("thread", compiler.cache_directory(), sim_probes.HOPPER_CHILD)
    correct, *faulty, end = run.stderr.split(": done\n")
    assert "WARNING" not in correct, correct
    assert len(faulty) == len(HOPPER_RACES) and end.startswith("end\n"), run.stderr
    for report, markers in zip(faulty, HOPPER_RACES.values()):
        assert "WARNING: ThreadSanitizer: data race" in report
        for marker in markers:
            assert f"hopper_pipeline.cu:{line_of(HOPPER_PIPELINE, f'// {marker}')}" in report, report


@pytest.mark.slow
def test_address_sanitizer_has_nothing_against_a_correct_kernel() -> None:
    run = in_child("address", compiler.cache_directory(), sim_probes.HOPPER_CHILD)
    assert run.stderr == "correct: done\nend\n", run.stderr


BUGS = """#include <ptx/mbarrier.cuh>
#include <ptx/shared.cuh>
#include <ptx/tma.cuh>
#include <ptx/warpgroup.cuh>
#include <ptx/wgmma.cuh>
using namespace cuflash;

extern "C" __global__ void bugs(const char* name, float* x, const __grid_constant__ ptx::TensorMap map,
                                const __grid_constant__ ptx::TensorMap no_map) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* shared = ptx::dynamic_shared<float>();
  const uint32_t tile = ptx::shared_address(shared), barrier = tile + 8192, other = barrier + 8;
  const auto is = [&](const char* other) {
    int i = 0;
    while (name[i] && name[i] == other[i]) ++i;
    return name[i] == other[i];
  };
  constexpr auto kK = ptx::Major::kK;
  const uint64_t matrix = ptx::wgmma_descriptor(ptx::Swizzle::k128, tile, 0, 1024);
  float d[16], wide[32];
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) shared[i] = 0.0f;
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (is("barrier of none"))
      ptx::mbarrier_init(other, 0);  // barrier of none
    if (is("barrier made twice"))
      ptx::mbarrier_init(barrier, 1);  // barrier made twice
    if (is("barrier not aligned"))
      ptx::mbarrier_init(barrier + 4, 1);  // barrier not aligned
    if (is("barrier nobody made"))
      ptx::mbarrier_arrive(other);  // barrier nobody made
    if (is("barrier overwritten")) {
      shared[2048] = 1.0f;
      ptx::mbarrier_arrive(barrier);  // barrier overwritten
    }
    if (is("one arrival too many")) {
      ptx::mbarrier_arrive_expect_tx(barrier, 16);
      ptx::mbarrier_arrive(barrier);  // one arrival too many
    }
    if (is("phase nobody awaits")) {
      ptx::mbarrier_arrive(barrier);
      ptx::mbarrier_arrive(barrier);  // phase nobody awaits
    }
    if (is("no parity"))
      ptx::mbarrier_wait(barrier, 2);  // no parity
    if (is("waits alone"))
      ptx::mbarrier_wait(barrier, 0);  // waits alone
    if (is("looks for ever"))
      while (!ptx::mbarrier_try_wait(barrier, 0)) {}  // looks for ever
    if (is("tile not aligned"))
      ptx::tma_load_4d(tile + 64, &map, barrier, 0, 0, 0, 0);  // tile not aligned
    if (is("tile outside"))
      ptx::tma_load_4d(tile + 7168, &map, barrier, 0, 0, 0, 0);  // tile outside
    if (is("stored before the first"))
      ptx::tma_store_4d(&map, tile, 0, 0, -1, 0);  // stored before the first
    if (is("row not aligned"))
      ptx::tma_load_4d(tile, &map, barrier, 4, 0, 0, 0);  // row not aligned
    if (is("another rank"))
      ptx::tma_load_5d(tile, &map, barrier, 0, 0, 0, 0, 0);  // another rank
    if (is("no tensor map"))
      ptx::tma_load_4d(tile, &no_map, barrier, 0, 0, 0, 0);  // no tensor map
    if (is("odd run"))
      ptx::bulk_load(tile, x, 24, barrier);  // odd run
    if (is("copy under way")) {
      ptx::mbarrier_arrive_expect_tx(barrier, 64);
      ptx::bulk_load(tile, x, 64, barrier);  // copy under way
    }
    if (is("written meanwhile")) {
      ptx::mbarrier_arrive_expect_tx(barrier, 64);
      ptx::bulk_load(tile, x, 64, barrier);  // written meanwhile
      shared[5] = 1.0f;
      ptx::mbarrier_wait(barrier, 0);
    }
    if (is("source written meanwhile")) {
      ptx::bulk_store(x, tile, 64);  // source written meanwhile
      ptx::bulk_commit();
      shared[5] = 1.0f;
      ptx::bulk_wait<0>();
    }
  }
  if (is("matrix not aligned"))
    ptx::wgmma_descriptor(ptx::Swizzle::k64, tile + 256, 0, 512);  // matrix not aligned
  if (is("distances"))
    ptx::wgmma_descriptor(ptx::Swizzle::kNone, tile, 8, 128);  // distances
  ptx::wgmma_fence();
  if (is("matrix outside"))
    ptx::wgmma<kK, kK>(ptx::Half{}, d, matrix, matrix + (7168 >> 4), false);  // matrix outside
  if (is("lanes differ"))
    ptx::wgmma<kK, kK>(ptx::Half{}, d, matrix, matrix + (lane == 7 ? 2 : 0), false);  // lanes differ
  if (is("warps differ"))
    ptx::wgmma<kK, kK>(ptx::Half{}, d, matrix, matrix + (warp == 2 ? 2 : 0), false);  // warps differ
  if (is("not waited for"))
    ptx::wgmma<kK, kK>(ptx::Half{}, d, matrix, matrix, false);  // not waited for
  if (is("registers written")) {
    ptx::wgmma<kK, kK>(ptx::Half{}, d, matrix, matrix, false);  // registers written
    ptx::wgmma_commit();
    if (lane == 5) d[3] = 1.0f;
  }
  if (is("two widths")) {
    ptx::wgmma<kK, kK>(ptx::Half{}, wide, matrix, matrix, false);
    ptx::wgmma<kK, kK>(ptx::Half{}, reinterpret_cast<float(&)[16]>(wide), matrix, matrix, false);  // two widths
  }
  if (is("fence forgotten")) {
    for (int i = 0; i < 2; ++i) {
      ptx::wgmma<kK, kK>(ptx::Half{}, d, matrix, matrix, false);  // fence forgotten
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      d[0] += 1.0f;
    }
  }
  if (is("operand written")) {
    ptx::wgmma<kK, kK>(ptx::Half{}, d, matrix, matrix, false);  // operand written
    ptx::wgmma_commit();
    __syncthreads();
    shared[5] = 1.0f;
    ptx::fence_proxy_async();
  }
  if (is("a lane stops fencing") && warp == 0) {
    for (int round = 0; round < 3; ++round) {
      shared[lane] = 1.0f + round;
      if (round == 0 || lane < 31) ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        ptx::bulk_store(x, tile, 128);  // a lane stops fencing
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
      }
      __syncwarp();
    }
  }
  if (is("three warps") && warp != 1)
    ptx::wgmma_fence();  // three warps
  if (!is("not waited for")) ptx::wgmma_wait<0>();
  if (is("registers"))
    ptx::setmaxnreg_inc<100>();  // registers
  if (is("fewer is more")) {
    ptx::setmaxnreg_inc<240>();
    ptx::setmaxnreg_inc<160>();  // fewer is more
  }
}
"""
REPORTS = {
    "barrier of none": "{line}: mbarrier_init: the count of arrivals is from 1 to 1048575; got 0",
    "barrier made twice": "{line}: mbarrier_init: there is a barrier at shared offset 8192 already, made at bugs.cu:",
    "barrier not aligned": "{line}: mbarrier_init: shared address must be a multiple of 8; got offset 8196",
    "barrier nobody made": "{line}: mbarrier_arrive: there is no barrier at shared offset 8200",
    "barrier overwritten": "{line}: mbarrier_arrive: the barrier at shared offset 8192, made at .*, was overwritten",
    "one arrival too many": "{line}: mbarrier_arrive: all 1 arrivals of this phase have already happened .* 16 bytes",
    "phase nobody awaits": "{line}: mbarrier_arrive: no thread waited for the end of the previous phase",
    "no parity": "{line}: mbarrier_wait: a parity is 0 or 1; got 2",
    "waits alone": r"deadlock.*\n  warp 0 lanes 0-0: waits in mbarrier_wait at {line} \(the barrier at shared",
    "looks for ever": "passed its time limit of 0.2 s",
    "tile not aligned": "{line}: tma_load_4d: shared address must be a multiple of 128; got offset 64",
    "tile outside": "{line}: tma_load_4d: 2048 bytes at shared offset 7168 are outside the 8208 bytes",
    "stored before the first": "{line}: tma_store_4d: a box that is stored starts at 0 or later; got -1",
    "row not aligned": "{line}: tma_load_4d: rows of a box start at multiples of 16 bytes; got element 4",
    "another rank": "{line}: tma_load_5d: the tensor map has rank 4",
    "no tensor map": "{line}: tma_load_4d: this is not a tensor map",
    "odd run": "{line}: bulk_load: copies multiples of 16 bytes; got 24",
    "copy under way": r"{line}: the block \(0, 0, 0\) ends while this copy is pending",
    "written meanwhile": "{line}: bulk_load: shared offset 20 was written to while the copy was pending",
    "source written meanwhile": "{line}: bulk_store: shared offset 16 was written to before the copy had read it",
    # Detected at the second fence: once all lanes of a warp have reached a fence, the simulator expects all of them at
    # the next one.
    "a lane stops fencing": "{line}: bulk_store reads shared offset 112, which a thread wrote to without fence_proxy_a",
    "matrix not aligned": "{line}: wgmma_matrix: the pattern of this swizzle starts at multiples of 512; got .* 256",
    "distances": "{line}: wgmma_matrix: address and distances must be multiples of 16; got shared offset 0, 8 and 128",
    "matrix outside": "{line}: wgmma: 16 bytes at shared offset 8.* are outside the 8208 bytes",
    "lanes differ": "{line}: wgmma: matrices or `adds` of lane 7 are not those of lane 0",
    "warps differ": "{line}: the warpgroup diverged: this warp does wgmma of a .*, another wgmma .* at {line}",
    "not waited for": "{line}: the thread exits with pending products that it never waited for",
    "registers written": "{line}: register 3 of lane 5 was written to while a wgmma on it was pending",
    "two widths": "{line}: a pending wgmma of a different width has",
    "fence forgotten": "{line}: there is no wgmma_fence between this wgmma and other accesses to its registers",
    "operand written": "{line}: an operand of this wgmma changed before the product was waited for",
    "three warps": "the warpgroup diverged: this warp does wgmma_wait<0> here, another wgmma_fence at {line}|"
    "{line}: the warpgroup diverged: this warp does wgmma_fence here, another wgmma_wait<0>",
    "registers": "{line}: setmaxnreg: a multiple of 8 from 24 to 256; got 100",
    "fewer is more": r"{line}: setmaxnreg_inc<160>: the warpgroup has 240 registers a thread already",
}


def run_bug(name: str, block: int = 128, copies: str = "late") -> None:
    text = np.frombuffer(name.encode() + b"\0", np.uint8)
    array, x = np.zeros((1, 1, 16, 64), np.float16), np.zeros(64, np.float32)
    memory = np.zeros(1024, np.uint8)
    x = memory[-memory.ctypes.data % 16 :][:256].view(np.float32)
    tiles = BoxedArray(array.dtype, array.shape, array.strides, (1, 1, 16, 64))
    params = (text, x, simulated(tiles, array.ctypes.data), np.zeros(1, "V128")[0])
    schedule = sim.Schedule(copies=copies)
    time_limit = 0.2 if name == "looks for ever" else 60.0
    build(BUGS, "bugs")(1, block, params, 8208, schedule, time_limit=time_limit)


@pytest.mark.parametrize("name", REPORTS)
def test_a_broken_rule_is_reported_at_its_line(name: str) -> None:
    message = REPORTS[name].replace("{line}", f"bugs.cu:{line_of(BUGS, f'// {name}')}")
    with pytest.raises(sim.SimulationError, match=message):
        run_bug(name)
    run_bug("")  # the error does not disturb the next launch


@pytest.mark.parametrize("copies", ("eager", "late", "random"))
def test_no_rule_is_broken_where_no_bug_is_asked_for(copies: str) -> None:
    run_bug("", copies=copies)


def test_wgmma_asks_for_whole_warpgroups() -> None:
    with pytest.raises(sim.SimulationError, match="wgmma_fence needs a warpgroup of four whole warps"):
        run_bug("", block=96)


def test_registers_of_warpgroups_fit_a_multiprocessor() -> None:
    text = """#include <ptx/warpgroup.cuh>
extern "C" __global__ void greedy(int) { cuflash::ptx::setmaxnreg_inc<232>(); }
"""
    kernel = build(text, "greedy")
    kernel(1, 256, (np.int32(0),))
    with pytest.raises(sim.SimulationError, match="request 89088 registers in total; a multiprocessor has 6"):
        kernel(1, 384, (np.int32(0),))


def test_another_lane_may_be_elected() -> None:
    text = """#include <ptx/warpgroup.cuh>
extern "C" __global__ void elect(int* chosen) { if (cuflash::ptx::elect_one()) chosen[threadIdx.x / 32] = threadIdx.x; }
"""
    chosen = np.zeros(2, np.int32)
    build(text, "elect")(1, 64, (chosen,), 0, sim.Schedule(seed=37, shuffle_lanes=True))
    assert chosen.tolist() == [5, 37]
