"""Planted faults in gradients to which key tiles add in a fixed order, and in parts of a shared array's gradient."""

from __future__ import annotations

import importlib
from types import ModuleType

import cuflash
from cuflash.compiler import source as sources
from cuflash.sim import SimulationError
from mutations.planting import Edit
from test_dq_in_order import (
    TOGETHER, check, check_bound_of_parts, check_one_head, check_parts, check_stored_parts, check_tiles_that_see_no_key
)  # fmt: skip

SIGNS = (AssertionError, RuntimeError, SimulationError)


def sums_of_dq_are_in_order() -> None:
    """Run blocks concurrently, so that a block that fails to wait for another gives other bits or a missing sum."""
    check("dropout", "causal", "128", TOGETHER)


def checks_pass_where_no_key_is_seen() -> None:
    check_tiles_that_see_no_key()


def tiles_without_keys_have_no_sums() -> None:
    """Run packed sequences that end before the last tile of queries, for whose last rows no key tile stores sums."""
    check("table", "sequences", "128", TOGETHER)


def sums_of_arrays_end_with_a_tile() -> None:
    check_one_head()


def stored_parts_are_right() -> None:
    check_stored_parts(cuflash)


def parts_are_printed(library: ModuleType) -> None:
    """Check functions printed by the copy of the library, with the kernels of the installed one."""
    importlib.import_module(f"{library.__name__}.compiler.source").KERNELS = sources.KERNELS
    check_stored_parts(library)


def parts_are_planned(library: ModuleType) -> None:
    check_parts(library)


def roundings_of_parts_are_counted(library: ModuleType) -> None:
    check_bound_of_parts(library)


WRITER, PRODUCER, SUMS = "sm90/dq_writer.cuh", "sm90/q_producer.cuh", "planning/captured_sums.py"
FAULTS = {
    sums_of_dq_are_in_order: {
        "a tile adds before its turn": Edit(
            WRITER, "wait_for_key_tiles", "if (num_before > 0) tile::wait_at_least(num_done, num_before);", ""
        ),
        "the first tile adds too": Edit(WRITER, "wait_for_key_tiles", "return num_before == 0;", "return false;"),
        "every tile stores": Edit(WRITER, "wait_for_key_tiles", "return num_before == 0;", "return true;"),
        "a step is signalled before its additions are complete": Edit(
            WRITER, "signal_addition", "tile::wait_bulk_copies();", ""
        ),
        "the last step of a block is not signalled": Edit(
            WRITER, "dq_writer", "if (unsignalled != nullptr)", "if (unsignalled != nullptr && !is_end)"
        ),
        "a step's own sums are signalled before they are there": Edit(
            WRITER, "dq_writer",
            "if (unsignalled != nullptr) signal_addition(unsignalled); unsignalled = arrivals;",
            "if (!is_end) signal_addition(arrivals);",
        ),
        "tiles are counted from the first one": Edit(
            WRITER, "num_key_tiles_before", ".queries[stage].stats.visitors.last - smem.works[smem.", ".works[smem."
        ),
        "tiles are taken from the first one": Edit(
            PRODUCER, "advance_tile", "number, Config::kAddsDqInOrder)", "number, false)"
        ),
        "nobody is the last visitor": Edit(
            "sm90/backward_statistics.cu", "run",
            "if (threadIdx.x == 0) stats.visitors.last = last_visiting_key_tile<kBlockKv>(params, work);", ";",
        ),
        "tiles are counted from anywhere": Edit(
            "sm90/backward_statistics.cu", "run", "if (threadIdx.x == 0) *dq_count(record) = {};", ";"
        ),
        "the last visitor is one too far": Edit(
            "sm90/dq_arrivals.cuh", "last_visiting_key_tile", "/ Width - 1, 0)", "/ Width, 0)"
        ),
    },
    tiles_without_keys_have_no_sums: {
        "what nobody stored is dQ": Edit("sm90/convert_dq.cu", "run", "if (has_sums)", "if (true)"),
    },
    checks_pass_where_no_key_is_seen: {
        "no last visitor is a negative number": Edit(
            "sm90/dq_arrivals.cuh", "last_visiting_key_tile", "/ Width - 1, 0)", "/ Width - 1, -1)"
        ),
    },
    sums_of_arrays_end_with_a_tile: {
        "sums continue with a block's next tile": Edit(
            "sm90/backward.cu", "end_step", "finish_sums(score, of_steps); of_steps = {};", ""
        ),
        "a tile's sums are added again": Edit("sm90/backward.cu", "end_step", "of_steps = {};", ""),
    },
    stored_parts_are_right: {
        "the last part is left out": Edit(
            "simt/captured_sums.cu", "simt_captured_sums", "part < captured.num_parts", "part < captured.num_parts - 1"
        ),
    },
    parts_are_printed: {
        "every head has the first part": Edit(
            "compiler/score_text.py", "_of_levels",
            'terms = (f"{axis} * gradient_{n}_strides[{at}]" for at, axis in enumerate(axes_of_parts(self._kind(n))))',
            'terms = ("0",)',
        ),
    },
    parts_are_planned: {
        "parts are as wide as sums": Edit(
            SUMS, "with_captured_sums", "problem.dtype if gradient == stored else problem.", "problem."
        ),
        "hidden elements have what was there": Edit(
            SUMS, "with_captured_sums", "gradient != stored or not is_whole", "gradient != stored"
        ),
        "the default form stores parts": Edit(
            "planning/families/sm90.py", "Sm90.specs", "in_parts=deterministic", "in_parts=True"
        ),
    },
    roundings_of_parts_are_counted: {
        "parts are exact": Edit("bounds/captured.py", "_gradient_tolerance", "rounding[0] * masses +", ""),
    },
}
