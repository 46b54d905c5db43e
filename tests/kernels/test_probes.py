"""Tests of each wrapper of ptx/, each index map of tile/ and each step over a work list, one at a time.

A small kernel on the simulator must agree with a line of NumPy, and return the same bits on a GPU.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys

import numpy as np
import pytest
from executors import sampled
from probing import (
    FRAGMENTS,
    LAUNCHES,
    WALKS,
    Launch,
    Walk,
    assert_expected,
    maps,
    same_bits,
    tf32_places,
    walk,
    wrong_steps,
    wrong_tiles,
)

from cuflash import sim

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
HOSTILE = sim.Schedule(seed=3, order="random", copies="random", shuffle_lanes=True)

launches = pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)


@launches
@needs_compiler
def test_a_probe_leaves_what_numpy_says(launch: Launch) -> None:
    for schedule in (sim.Schedule(), HOSTILE):
        assert_expected(launch, launch.on_simulator(schedule))


@needs_compiler
def test_half_a_warp_reads_a_fragment_from_all_banks() -> None:
    probe = maps(*FRAGMENTS)
    places = probe.on_simulator()[4]  # element offsets in shared memory
    row, k = np.divmod(np.arange(16), 4)
    for fragment in (places[row, k], places[k, row]):  # four columns (k) of four rows, and their transpose
        assert len(set(fragment % 16)) == 16


def shared_banks(columns: int) -> list[str]:
    """Return the reads of a tile of floats in which two lanes access the same bank."""
    places = tf32_places(columns).on_simulator()[0]
    assert sorted(places.ravel()) == list(range(16 * columns))
    shared_at = []
    for row, column in itertools.product((0, 8), range(0, columns, 8)):
        reads = {"ldmatrix": (np.arange(8), column + np.arange(4)), "a copy": ([row], np.arange(32) % columns)}
        for name, rows in {"halves": (0, 1, 2, 3), "neighbours": (0, 2, 4, 6)}.items():
            for second in (0, 4 if name == "halves" else 1):
                reads[f"{name} + {second}"] = (np.array(rows) + second, column + np.arange(8))
        for name, (rows, across) in reads.items():
            banks = places[np.ix_(np.asarray(rows) % 8 + row, across)].ravel() % 32
            if len(set(banks)) != len(banks):
                shared_at.append(f"{name} at {row}, {column}")
    return shared_at


@needs_compiler
@pytest.mark.parametrize("columns", [32, 64, 96, 256])
def test_fragments_of_floats_are_read_from_all_banks(columns: int) -> None:
    assert shared_banks(columns) == []


@pytest.fixture
def launch_here(launch: Launch) -> Launch:
    import cupy

    capability = cupy.cuda.Device().compute_capability
    if launch.architecture.endswith("a") and launch.architecture != f"sm_{capability}a":
        pytest.skip(f"{launch.architecture} has these instructions, and this GPU is sm_{capability}")
    return launch


@pytest.mark.gpu
@launches
def test_a_probe_on_a_gpu_leaves_what_numpy_says(launch_here: Launch) -> None:
    assert_expected(launch_here, launch_here.on_gpu())


@pytest.mark.gpu
@launches
@needs_compiler
def test_a_probe_on_a_gpu_leaves_the_simulators_bits(launch_here: Launch) -> None:
    launch = launch_here
    on_gpu, simulated = launch.on_gpu(), launch.on_simulator()
    for place, expected in launch.expected.items():
        first, second = on_gpu[place], simulated[place]
        if expected.ulps:
            where = np.ones(first.shape, bool) if expected.where is None else expected.where
            np.testing.assert_allclose(first[where], second[where], rtol=expected.ulps * np.finfo(first.dtype).eps)
        else:
            assert same_bits(first, second), (launch.name, place)


def texts() -> dict[str, Launch]:
    """Return one launch for each distinct kernel text."""
    walked_ = [walk(*WALKS[name]).launch for name in WALKS]
    return {launch.text(host=False): launch for launch in (*LAUNCHES, *walked_)}


TEXTS = texts()


# A short run compiles few texts, because kernels compile the same functions too.
@pytest.mark.parametrize("text", sampled(TEXTS, 24), ids=lambda text: TEXTS[text].name)
def test_every_probe_compiles_for_a_gpu(nvrtc: tuple[int, int], text: str) -> None:
    from cuda.core import Program, ProgramOptions

    # The test shows only that probes compile, so moderate optimization suffices.
    options = ProgramOptions(arch=TEXTS[text].architecture, std="c++17", ofast_compile="mid")
    assert TEXTS[text].entry.encode() in Program(text, "c++", options=options).compile("cubin").code


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
    assert wrong_tiles(walked.plan, left[8]) == []


@pytest.mark.gpu
@needs_compiler
def test_steps_on_a_gpu_are_those_of_the_simulator(walked: Walk) -> None:
    on_gpu, simulated = walked.launch.on_gpu(), walked.launch.on_simulator()
    assert_expected(walked.launch, on_gpu)
    assert on_gpu[3] == simulated[3] and (on_gpu[8] == simulated[8]).all()
    # Blocks run in any order.
    first, second = (sorted(left[4][: left[3][0]].tolist()) for left in (on_gpu, simulated))
    assert first == second


# Runs in a separate process, because the error makes the GPU unusable for the process.
HANGS = """
import cupy
from cuflash.compiler.source import flatten_text

text = '''#include <ptx/types.cuh>
namespace cuflash { struct Config { static constexpr bool kHasWatchdog = true; }; }
#include <ptx/mbarrier.cuh>
#include <ptx/shared.cuh>
using namespace cuflash;
extern "C" __global__ void hangs() {
  __shared__ uint64_t barrier;
  ptx::mbarrier_init(ptx::shared_address(&barrier), 2);
  ptx::mbarrier_wait(ptx::shared_address(&barrier), 0);
}
'''
kernel = cupy.RawKernel(flatten_text(text, "hangs.cu"), "hangs", ("-std=c++17", "-arch=sm_90a"))
kernel((1,), (1,), ())
try:
    cupy.cuda.Device().synchronize()
except cupy.cuda.runtime.CUDARuntimeError as error:
    print(error)
"""


@pytest.mark.gpu(9, 0)
def test_a_wait_that_never_ends_ends_a_watched_kernel() -> None:
    run = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120)
    assert "cudaErrorIllegalAddress" in run.stdout, run.stderr
