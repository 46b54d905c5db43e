"""Thread blocks run together in the simulator, which reports races and deadlocks between them; sound kernels pass."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from cuflash.compiler.source import flatten_text
from executors import needs_compiler
from numpy.testing import assert_array_equal
from probing import PROBES
from sim_probes import line_of
from test_sim import in_child

from cuflash import sim
from cuflash.sim import compiler

pytestmark = needs_compiler
TEXT = (PROBES / "blocks.cu").read_text("utf-8")
ORDERS = ("round_robin", "first_warp", "last_warp", "random", "priorities")
BLOCKS, THREADS = 6, 64
MERGE_FAULTS = ("no_fence_before", "no_fence_after", "no_barrier", "merges_too_early", "reset_too_soon")
TURN_FAULTS = ("relaxed", "waits_for_too_few", "no_wait")
BACKWARD = 4


@lru_cache(maxsize=None)
def built(entry: str, sanitize: sim.Sanitizer = "blocks") -> sim.Kernel:
    return sim.build(flatten_text(TEXT, "blocks.cu", host=True), entry, sanitize=sanitize)


def schedules(resident_blocks: int = 3, seeds: int = 2) -> list[sim.Schedule]:
    return [
        sim.Schedule(seed=seed, order=order, shuffle_lanes=bool(seed % 2), resident_blocks=resident_blocks)
        for seed in range(seeds)
        for order in ORDERS
    ]


def merges(schedule: sim.Schedule, fault: int = 0, sanitize: sim.Sanitizer = "blocks") -> None:
    x = np.arange(BLOCKS * THREADS, dtype=np.float32)
    parts, out, count = np.full_like(x, np.nan), np.full(THREADS, np.nan, np.float32), np.zeros(1, np.int32)
    built("merges", sanitize)(BLOCKS, THREADS, (x, parts, out, count, np.int32(fault)), 16, schedule)
    assert_array_equal(out, x.reshape(BLOCKS, THREADS).sum(0))
    assert count[0] == 0


def takes_turns(schedule: sim.Schedule, fault: int = 0, sanitize: sim.Sanitizer = "blocks") -> None:
    x = np.arange(BLOCKS * 32, dtype=np.int32).reshape(BLOCKS, 32)
    total, turn, expected = np.ones(32, np.int32), np.zeros(1, np.int32), np.ones(32, np.int32)
    for each in x[:: -1 if fault == BACKWARD else 1]:
        expected = 2 * expected + each
    built("takes_turns", sanitize)(BLOCKS, 32, (x, total, turn, np.int32(fault)), 0, schedule)
    assert_array_equal(total, expected)


# Sound kernels.


@pytest.mark.parametrize("resident_blocks", [1, 2, BLOCKS, 100])
def test_sound_kernels_pass_with_any_number_of_blocks_together(resident_blocks: int) -> None:
    for schedule in schedules(resident_blocks):
        merges(schedule)
        takes_turns(schedule)


def test_blocks_run_together_without_reports_of_accesses() -> None:
    for schedule in schedules():
        merges(schedule, sanitize="")
        takes_turns(schedule, sanitize="")


def test_a_launch_of_several_blocks_is_repeated_by_its_schedule() -> None:
    for schedule in schedules():
        messages = set()
        for _ in range(2):
            with pytest.raises(sim.SimulationError) as caught:
                merges(schedule, MERGE_FAULTS.index("no_fence_before") + 1)
            messages.add(re.sub("0x[0-9a-f]+", "", str(caught.value)))
        assert len(messages) == 1


def test_blocks_of_a_grid_of_three_axes_have_their_indices() -> None:
    text = """extern "C" __global__ void indices(int* out) {
      out[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)] =
          blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z;
    }"""
    out = np.zeros((4, 3, 2), np.int32)
    sim.build(text, "indices", sanitize="blocks")((2, 3, 4), 1, (out,), 0, sim.Schedule(resident_blocks=5))
    z, y, x = np.indices(out.shape)
    assert_array_equal(out, x + 10 * y + 100 * z)


# Planted faults, which do not show if blocks run one after another.


@pytest.mark.parametrize("fault", range(1, 4), ids=MERGE_FAULTS[:3])
def test_blocks_one_after_another_do_not_show_a_missing_fence(fault: int) -> None:
    for order in ORDERS:
        merges(sim.Schedule(order=order), fault)


@pytest.mark.parametrize("fault", range(1, 6), ids=MERGE_FAULTS)
def test_a_faulty_merge_is_seen_under_every_schedule(fault: int) -> None:
    merged, part = (f"blocks.cu:{line_of(TEXT, f'// {marker}')}" for marker in ("merges", "a part"))
    for schedule in schedules():
        with pytest.raises((sim.SimulationError, AssertionError)) as caught:
            merges(schedule, fault)
        if MERGE_FAULTS[fault - 1] != "reset_too_soon":
            report = str(caught.value)
            assert "a race between blocks: " in report and merged in report and part in report


@pytest.mark.parametrize("fault", ["relaxed", "no_wait"])
def test_turns_that_nothing_orders_are_seen_under_every_schedule(fault: str) -> None:
    adds = f"is at blocks.cu:{line_of(TEXT, '// adds')}"
    for schedule in schedules():
        with pytest.raises(sim.SimulationError, match="a race between blocks: this ") as caught:
            takes_turns(schedule, 1 + TURN_FAULTS.index(fault))
        assert str(caught.value).count(adds) == 2


def test_a_count_that_is_one_too_low_is_seen_under_some_schedule() -> None:
    """Under schedules that run blocks in order, each block happens to wait for the previous one anyway."""
    seen = 0
    for schedule in schedules():
        try:
            takes_turns(schedule, 1 + TURN_FAULTS.index("waits_for_too_few"))
        except (sim.SimulationError, AssertionError):
            seen += 1
    assert seen > 0


def test_a_flag_that_is_no_atomic_is_a_race_and_looking_at_it_starves_nobody() -> None:
    for schedule in schedules(2, seeds=1):
        built("looks")(2, 1, (np.zeros(1, np.int32), np.int32(1)), 0, schedule)
        with pytest.raises(sim.SimulationError, match="a race between blocks"):
            built("looks")(2, 1, (np.zeros(1, np.int32), np.int32(0)), 0, schedule)


# Deadlocks.


def test_an_order_that_needs_all_blocks_at_once_is_a_deadlock_of_fewer() -> None:
    for schedule in schedules(BLOCKS):
        takes_turns(schedule, BACKWARD)
    line = line_of(TEXT, "// waits")
    for schedule in schedules(BLOCKS - 1):
        with pytest.raises(sim.SimulationError) as caught:
            takes_turns(schedule, BACKWARD)
        message = str(caught.value)
        assert "deadlock of blocks: no thread can run" in message
        assert "; 5 blocks run concurrently, and 1 further blocks of the grid cannot start" in message
        assert f"block (4, 0, 0):\n  warp 0 lanes 0-0: waits in wait_for_counter at blocks.cu:{line}" in message


def test_a_time_limit_tells_how_many_blocks_have_started() -> None:
    text = 'extern "C" __global__ void waits(int* x) { while (atomicAdd(x, blockIdx.x == 2 ? 1 : 0) == 0) {} }'
    kernel = sim.build(text, "waits", sanitize="blocks")
    kernel(3, 1, (np.zeros(1, np.int32),), 0, sim.Schedule(resident_blocks=3))
    with pytest.raises(sim.SimulationError, match="time limit of 0.2 s.*; 2 blocks run concurrently, and 1 further"):
        kernel(3, 1, (np.zeros(1, np.int32),), 0, sim.Schedule(resident_blocks=2), time_limit=0.2)


# Under ThreadSanitizer, which distinguishes the threads of a block.

CHILD = """
import sys
import test_sim_blocks as blocks
from cuflash import sim
for order in ("round_robin", "random"):
    for resident_blocks in (3, blocks.BLOCKS):
        schedule = sim.Schedule(order=order, resident_blocks=resident_blocks)
        blocks.merges(schedule, sanitize="thread")
        blocks.takes_turns(schedule, sanitize="thread")
print("sound: done", file=sys.stderr)
for run, fault in ((blocks.merges, 1 + blocks.MERGE_FAULTS.index("no_barrier")), (blocks.takes_turns, 3)):
    try:
        run(sim.Schedule(resident_blocks=3), fault, "thread")
    except AssertionError:
        pass
    print("faulty: done", file=sys.stderr)
"""


@pytest.mark.slow
def test_thread_sanitizer_sees_races_between_blocks() -> None:
    folders = [folder for folder in sys.path if Path(folder).is_relative_to(PROBES.parents[1])]
    code = f"import sys; sys.path += {folders}\n{CHILD}"
    run = in_child("thread", compiler.cache_directory(), code)
    sound, *faulty = re.split("(?:sound|faulty): done\n", run.stderr)
    assert "WARNING" not in sound, sound
    assert len(faulty) == 3 and all("WARNING: ThreadSanitizer: data race" in each for each in faulty[:2]), run.stderr


# From Python.


def test_residency_is_checked() -> None:
    with pytest.raises(ValueError, match="resident_blocks must be 1 or more; got 0"):
        sim.Schedule(resident_blocks=0)
    with pytest.raises(ValueError, match="16384 threads in total; got 24576: set resident_blocks to 256 or less"):
        built("merges", "")(1000, 64, (np.zeros(4, np.float32),) * 4 + (np.int32(0),), 16,
                            sim.Schedule(resident_blocks=384))  # fmt: skip
