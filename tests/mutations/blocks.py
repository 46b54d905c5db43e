"""Planted faults in the cooperation of thread blocks, which do not show if blocks run one after another."""

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
from mutations.planting import Edit
from poison import call
from test_dq_finishing import WAYS
from test_dq_orders import Ordered, one_tile_of_queries
from test_score_kernels import MASKS, WRT, Probe
from test_sm90 import ALIGNED, SIM90

from cuflash import masks, sim

SIGNS = (AssertionError, sim.SimulationError)  # exceptions with which a guard reports a fault
IN_TURNS = Structure(
    num_heads=6, num_kv_heads=6, seqlen_q=70, seqlen_kv=280, head_dim=64, value_dim=40, dtype="float16",
    mask=masks.Causal("bottom_right"),
)  # fmt: skip
SHARED_DQ = Structure(num_heads=2, num_kv_heads=1, seqlen_q=40, seqlen_kv=150, sink=(2,))


def gradients_in_turns_are_right() -> None:
    """Check that blocks store, add to and finish dQ in the order of their semaphores, and take tiles from a counter."""
    example = SIM90.rounded(IN_TURNS.example())
    with on_few_processors():
        machine = Simulator(sim.Schedule(order="random", copies="random", resident_blocks=3), "blocks")
        assert_within_bounds(example, **call(example, SIM90, machine, margin=ALIGNED))


def last_arrivals_are_right() -> None:
    """Check dQ if tiles arrive one after another, so that none of them waits and the last one finishes dQ."""
    example = one_tile_of_queries(3)
    with WAYS["lists"].plans():
        machine = Ordered(sim.Schedule(order="first_warp", resident_blocks=3), "blocks", order=(2, 0, 1))
        assert_within_bounds(example, **call(example, SIM90, machine, margin=ALIGNED))


def sums_of_blocks_are_right() -> None:
    """Check that blocks can add concurrently to dQ, and to gradients of arrays that a score function reads."""
    example, run = SHARED_DQ.example(), replace(SIM, kernel="simt")
    machine = Simulator(sim.Schedule(order="random", resident_blocks=3), "blocks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_SIMULATOR", machine)
        assert_within_bounds(example, **run.everything(example))
        probe = Probe("float32", MASKS["lengths"])
        probe.check(probe.run_results(run, WRT))


def parts_are_merged_after_they_are_written() -> None:
    """Check that the last block to arrive merges all parts, with the bits of blocks that run one by one."""
    call, device = drawn(KINDS["many parts"], (300, 130)), KINDS["many parts"]["device"]
    machine = Simulator(sim.Schedule(order="random", copies="random", resident_blocks=3), "blocks")
    results = attended(SIM, call, device=device, target=machine)[:2]
    assert same_bits(results, attended(SIM, call, device=device)[:2])


def lengths_are_set_after_they_are_read() -> None:
    """Check that the last block of a sequence to read its length writes the new length."""
    machine = Simulator(sim.Schedule(order="random", resident_blocks=3), "blocks")
    counts = (26, 10, 1, 4)
    rows, k, v, lengths, _ = appended(SIM, np.float32, (256, 256), counts, num_rows=26, target=machine)
    pages, wanted = expected(rows, counts)
    assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1]) and lengths.tolist() == wanted


FAULTS = {
    gradients_in_turns_are_right: {
        "who tells that a tile is done releases nothing": Edit(
            "tile/counter.cuh", "signal", "ptx::red_add_release(counter, number);", "ptx::fetch_add(counter, number);"
        ),
        "a tile is done before its copies are made": Edit(
            "sm90/dq_semaphore.cuh", "signal_dq_semaphore", "tile::wait_bulk_copies();", ""
        ),
        "who finishes does not wait": Edit(
            "sm90/dq_semaphore.cuh", "wait_dq_semaphore",
            "tile::wait_at_least(&op.semaphore->done, op.awaited_bits_or_count);", ""
        ),
        "a semaphore is reset too soon": Edit(
            "sm90/dq_semaphore.cuh", "wait_dq_semaphore",
            "tile::wait_at_least(&op.semaphore->done, op.awaited_bits_or_count); tile::reset_counter(op.semaphore);",
            "tile::reset_counter(op.semaphore); tile::wait_at_least(&op.semaphore->done, op.awaited_bits_or_count);",
        ),
        "who adds does not wait for who stores": Edit(
            "sm90/dq_semaphore.cuh", "wait_dq_semaphore",
            "tile::wait_for_bits(&op.semaphore->stored, op.awaited_bits_or_count);", ""
        ),
        "the counter of tiles is reset before all have asked": Edit(
            "attention/tile_scheduler.cuh", "next_tile_number_in_order", "+ 1 - num_tiles ==", "+ 2 - num_tiles =="
        ),
    },
    last_arrivals_are_right: {
        "a tile that need not wait acquires nothing": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "wait_for_arrivals(arrival, message.arrivals);",
            "if (count / kArrivalIsDone < arrival.num_awaited) wait_for_arrivals(arrival, message.arrivals);",
        ),
        "a tile is done before its sums are": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "tile::wait_bulk_copies(); tile::signal(", "tile::signal("
        ),
    },
    sums_of_blocks_are_right: {
        "blocks add to dQ by loads and stores": Edit(
            "tile/copy.cuh", "add", "ptx::red_add(data, from.at(row, column));", "*data += from.at(row, column);"
        ),
        "warps add to sums of all blocks by loads and stores": Edit(
            "tile/global_sum.cuh", "add_of_warp", "ptx::lane() == 0) add(address, x)", "ptx::lane() == 0) *address += x"
        ),
    },
    parts_are_merged_after_they_are_written: {
        "a part is counted before others see it": Edit(
            "sm80/decode_epilogue.cuh", "arrives_last", "ptx::fetch_add_acq_rel(arrivals, 1)",
            "[&] { const int before = ptx::fetch_add(arrivals, 1); __threadfence(); return before; }()",
        ),
        "parts are read before it is known that all are written": Edit(
            "sm80/decode_epilogue.cuh", "arrives_last", "ptx::fetch_add_acq_rel(arrivals, 1)",
            "[&] { __threadfence(); return ptx::fetch_add(arrivals, 1); }()",
        ),
        "a part is counted before all warps have written theirs": Edit(
            "sm80/decode_epilogue.cuh", "arrives_last", "__syncthreads(); if (num_parts == 1)", "if (num_parts == 1)"
        ),
        "each part sets the count of parts back": Edit(
            "sm80/decode.cuh", "decode", ")) return;", ")) { if (threadIdx.x == 0) *arrivals = 0; return; }"
        ),
    },
    lengths_are_set_after_they_are_read: {
        "a block that has read the length is counted without a fence": Edit(
            "attention/append_work.cuh", "set_length", "__threadfence(); if (ptx::fetch_add", "if (ptx::fetch_add"
        ),
        "the length is set without a fence": Edit(
            "attention/append_work.cuh", "set_length", "return; __threadfence();", "return;"
        ),
    },
}  # fmt: skip
