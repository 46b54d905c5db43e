"""Thread, lane and block orders never change a bit, and the sanitizers report nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cuflash.executors.sim import Simulator
from executors import SIM, hostile_schedules, is_long, needs_compiler
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
    for schedule in hostile_schedules(name, 1):
        results = call(example, run, Simulator(schedule))
        assert all(results[each].tobytes() == expected[each].tobytes() for each in expected), schedule


# Runs in a separate process, which a sanitizer may end. `sys.argv`: sanitizer, names of structures, then the structure
# and the parts of an edit that is planted last. Its fault shows in the forward pass, after which the process ends.
CHILD = """
import functools, sys, tempfile
from pathlib import Path
import poison
from cuflash import sim
from cuflash.executors.sim import Simulator
from cuflash.testing import assert_within_bounds
from executors import SIM
from mutations import planting
sanitize, names, of_edit, *edit = sys.argv[1:]
def call(name, check):
    example = poison.STRUCTURES[name].example()
    if sanitize == "address":  # the ends of arrays are the ends of their memory
        example = example.but(**{x: getattr(example, x).copy() for x in ("q", "k", "v", "do", "dlse")})
    machine, margin = Simulator(sim.Schedule(order="random"), sanitize), 0 if sanitize == "address" else poison.MARGIN
    poison.call(example, SIM, machine, margin=margin, check=functools.partial(check, example))
for name in names.split("; "):
    call(name, assert_within_bounds)
print("end", file=sys.stderr, flush=True)
with tempfile.TemporaryDirectory() as folder, planting.planted(Path(folder), planting.Edit(*edit)):
    call(of_edit, lambda *example, **forward: sys.exit())
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


# Work lists with bits, with intervals, and with block lists. In a short run a slow sanitizer checks one of them, and
# the fast one checks all.
SANITIZED = ("mask: a few bits", "mask: causal, with lengths", "mask: full and interval blocks of 128")
IN_SHORT = {"thread": SANITIZED[2:], "address": SANITIZED[1:2], "undefined": SANITIZED}


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", PLANTED)
def test_sanitizers_find_what_is_planted_and_nothing_else(sanitize: sim.Sanitizer) -> None:
    (edit, report), names = PLANTED[sanitize], SANITIZED if is_long() else IN_SHORT[sanitize]
    paths = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in (".", "support", "kernels"))]
    code = f"import sys; sys.path[:0] = {paths}\n{CHILD}"
    command = ["env", *(f"{name}={value}" for name, value in sim.preload_environment(sanitize).items())]
    command += [sys.executable, "-c", code, sanitize, "; ".join(names), SANITIZED[0], *edit]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    without, end, planted = run.stderr.partition("end\n")
    assert end and "WARNING" not in without and "ERROR" not in without, without
    assert re.search(report, planted), planted
