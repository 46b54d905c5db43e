"""Every wrapper of the room ptx, every index map of the room tile and every step of a work list, alone: a small kernel
against a line of NumPy on the simulator, and the same bits on a GPU."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from probing import LAUNCHES, WALKS, Launch, Walk, assert_expected, same_bits, walk, wrong_steps

from cuflash import sim

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
HOSTILE = sim.Schedule(seed=3, order="random", copies="random", shuffle_lanes=True)

launches = pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)


@launches
@needs_compiler
def test_a_probe_leaves_what_numpy_says(launch: Launch) -> None:
    for schedule in (sim.Schedule(), HOSTILE):
        assert_expected(launch, launch.on_simulator(schedule))


@pytest.mark.gpu
@launches
@needs_compiler
def test_a_gpu_leaves_the_same_bits_as_the_simulator(launch: Launch) -> None:
    on_gpu, simulated = launch.on_gpu(), launch.on_simulator()
    assert_expected(launch, on_gpu)
    for place, expected in launch.expected.items():
        if expected.ulps:
            where = np.ones(np.shape(expected.values), bool) if expected.where is None else expected.where
            np.testing.assert_allclose(
                on_gpu[place][where], simulated[place][where], rtol=expected.ulps * np.finfo(on_gpu[place].dtype).eps
            )
        else:
            assert same_bits(on_gpu[place], simulated[place])


@pytest.fixture(params=WALKS)
def walked(request: pytest.FixtureRequest) -> Walk:
    return walk(*WALKS[request.param])


@needs_compiler
def test_steps_visit_what_the_work_list_says_and_allow_what_the_mask_says(walked: Walk) -> None:
    left = walked.launch.on_simulator()
    assert_expected(walked.launch, left)
    (number,), records = left[3], left[4]
    assert 0 < number <= len(records)
    assert wrong_steps(walked.plan, records[:number]) == []


@pytest.mark.gpu
@needs_compiler
def test_steps_on_a_gpu_are_those_of_the_simulator(walked: Walk) -> None:
    on_gpu, simulated = walked.launch.on_gpu(), walked.launch.on_simulator()
    assert_expected(walked.launch, on_gpu)
    assert on_gpu[3] == simulated[3]
    # Blocks run in any order.
    first, second = (sorted(left[4][: left[3][0]].tolist()) for left in (on_gpu, simulated))
    assert first == second
