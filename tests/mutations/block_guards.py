"""Guards for faults between thread blocks: they run together on the simulator, and races between them are errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cache_calls import KINDS, appended, attended, drawn, expected, same_bits
from cuflash.executors import sim as executor
from cuflash.testing import Structure, assert_within_bounds
from cuflash.executors.sim import Simulator
from executors import SIM
from fused_dq import on_few_processors
from poison import call
from test_score_kernels import MASKS, WRT, Probe
from test_sm90 import ALIGNED, SIM90

from cuflash import masks, sim

SIGNS = (AssertionError, sim.SimulationError)  # exceptions by which guards see a fault
IN_TURNS = Structure(
    num_heads=6, num_kv_heads=6, seqlen_q=70, seqlen_kv=280, head_dim=64, value_dim=40, dtype="float16",
    mask=masks.Causal("bottom_right"),
)  # fmt: skip
SHARED_DQ = Structure(num_heads=2, num_kv_heads=1, seqlen_q=40, seqlen_kv=150, sink=(2,))


def gradients_in_turns_are_right() -> None:
    """Blocks store, add to and finish dQ in the order of their semaphores, and take tiles from a counter."""
    example = SIM90.rounded(IN_TURNS.example())
    with on_few_processors():
        machine = Simulator(sim.Schedule(order="random", copies="random", resident_blocks=3), "blocks")
        assert_within_bounds(example, **call(example, SIM90, machine, margin=ALIGNED))


def sums_of_blocks_are_right() -> None:
    """Blocks add to dQ, and to gradients of arrays that a score function reads, at the same time."""
    example, run = SHARED_DQ.example(), replace(SIM, kernel="simt")
    machine = Simulator(sim.Schedule(order="random", resident_blocks=3), "blocks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_SIMULATOR", machine)
        assert_within_bounds(example, **run.everything(example))
        probe = Probe("float32", MASKS["lengths"])
        probe.check(probe.found(run, WRT))


def parts_are_merged_after_they_are_written() -> None:
    """The last block to arrive merges the parts of all, with the bits of blocks that run one after another."""
    call, device = drawn(KINDS["many parts"], (300, 130)), KINDS["many parts"]["device"]
    machine = Simulator(sim.Schedule(order="random", copies="random", resident_blocks=3), "blocks")
    results = attended(SIM, call, device=device, target=machine)[:2]
    assert same_bits(results, attended(SIM, call, device=device)[:2])


def lengths_are_set_after_they_are_read() -> None:
    """The last block of a sequence to read its length sets the new one."""
    machine = Simulator(sim.Schedule(order="random", resident_blocks=3), "blocks")
    counts = (26, 10, 1, 4)
    rows, k, v, lengths, _ = appended(SIM, np.float32, (256, 256), counts, num_rows=26, target=machine)
    pages, wanted = expected(rows, counts)
    assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1]) and lengths.tolist() == wanted
