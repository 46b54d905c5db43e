"""No order of threads, lanes or blocks changes a bit, and the sanitizers report nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cuflash.executors.sim import Simulator
from executors import SIM, hostile_schedules, needs_compiler
from poison import STRUCTURES, call

from cuflash import sim
from mutations.planting import Edit

pytestmark = needs_compiler
ROOT = Path(__file__).parents[2]
WALKED = (
    "mask: a band", "mask: intervals of heads", "mask: full and interval blocks of 128", "mask: bits",
    "mask: blocks of 100 x 24, each head its own", "float64, grouped heads", "bfloat16, grouped heads",
    "five axes that do not fold",
)  # fmt: skip


@pytest.mark.parametrize("name", WALKED)
def test_every_schedule_gives_the_bits_of_the_default(name: str) -> None:
    example, run = STRUCTURES[name].example(), replace(SIM, deterministic=True)
    expected = call(example, run)
    for schedule in hostile_schedules(name):
        results = call(example, run, Simulator(schedule))
        assert all(results[each].tobytes() == expected[each].tobytes() for each in expected), schedule


# In a process of its own, which a sanitizer may end. `sys.argv`: sanitizer, then the edit to plant, if any, which the
# first call shows.
CHILD = """
import contextlib, sys, tempfile
from pathlib import Path
import poison
from cuflash import sim
from cuflash.executors.sim import Simulator
from cuflash.testing import assert_within_bounds
from executors import SIM
from mutations import planting
sanitize, *edit = sys.argv[1:]
folder = tempfile.TemporaryDirectory()
with planting.planted(Path(folder.name), planting.Edit(*edit)) if edit else contextlib.nullcontext():
    names = ["mask: a few bits", "mask: causal, with lengths", "mask: full and interval blocks of 128"]
    for name in names[:1] if edit else names:
        example = poison.STRUCTURES[name].example()
        if sanitize == "address":  # the ends of arrays are the ends of their memory
            example = example.but(**{x: getattr(example, x).copy() for x in ("q", "k", "v", "do", "dlse")})
        machine = Simulator(sim.Schedule(order="random"), sanitize)
        results = poison.call(example, SIM, machine, margin=0 if sanitize == "address" else poison.MARGIN)
        if not edit:
            assert_within_bounds(example, **results)
print("end", file=sys.stderr)
"""
PLANTED = {
    "thread": (
        Edit(
            "simt/forward.cu", "simt_forward",
            "tile::gemm_add_nt(s, q_smem, k_smem); __syncthreads();",
            "tile::gemm_add_nt(s, q_smem, k_smem);",
        ),
        "WARNING: ThreadSanitizer: data race",
    ),
    "address": (
        Edit("tile/copy.cuh", "store_vectorized", "if (Tile::row(i) >= to.num_rows) continue;", ""),
        "ERROR: AddressSanitizer: heap-buffer-overflow",
    ),
    "undefined": (
        Edit("attention/block_iterator.cuh", "RowMask.allows", ">> key % 8 & 1", ">> key & 1"),
        "undefined behaviour: .*a shift by",
    ),
}  # fmt: skip


def in_child(sanitize: sim.Sanitizer, edit: Edit | tuple[()] = ()) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in (".", "support", "kernels"))]
    code = f"import sys; sys.path[:0] = {paths}\n{CHILD}"
    command = ["env", *(f"{name}={value}" for name, value in sim.preload_environment(sanitize).items())]
    return subprocess.run(
        [*command, sys.executable, "-c", code, sanitize, *edit], capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", PLANTED)
def test_sanitizers_find_nothing(sanitize: sim.Sanitizer) -> None:
    run = in_child(sanitize)
    assert run.returncode == 0 and run.stderr.endswith("end\n"), run.stderr
    assert "WARNING" not in run.stderr and "ERROR" not in run.stderr, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", PLANTED)
def test_sanitizers_find_what_is_planted(sanitize: sim.Sanitizer) -> None:
    edit, report = PLANTED[sanitize]
    run = in_child(sanitize, edit)
    assert re.search(report, run.stderr), run.stderr
