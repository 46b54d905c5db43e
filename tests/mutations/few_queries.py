"""Planted faults in attention of few queries to keys and values in arrays: the kernel, and which plans use it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from cuflash import sim
from cuflash.testing import assert_within_bounds
from executors import SIM, blocks_together
from mutations.planting import Edit
from test_few_queries import STRUCTURES, check_parts, check_plans, check_rule, forward
from test_score_kernels import Probe

from cuflash import masks

SIGNS = (AssertionError, sim.SimulationError)  # exceptions with which a guard reports a fault
_SOME = ("lengths, causal", "causal, across steps", "window", "from the last element", "axes that do not fold")


def results_are_right() -> None:
    """Check the bounds of results for intervals, a window, strides, and batch axes that broadcast."""
    for name in _SOME:
        example = SIM.rounded(STRUCTURES[name].example())
        o, lse = forward(example)
        assert_within_bounds(example, o=o, lse=lse)


def other_keys_never_matter() -> None:
    """Check that keys past the lengths, which hold NaN, change no bit."""
    example = SIM.rounded(STRUCTURES["lengths"].example())
    k, v = example.k.copy(), example.v.copy()
    k[0], v[0], k[1, :, 170:], v[1, :, 170:] = np.nan, np.inf, np.nan, np.inf
    for x, y in zip(forward(example), forward(example.but(k=k, v=v))):
        assert x.tobytes() == y.tobytes()


def parts_are_apart() -> None:
    """Check that concurrent thread blocks give the same bits as blocks that run one after another."""
    example = SIM.rounded(STRUCTURES["causal"].example())
    for machine in blocks_together("parts", most=1):
        assert all(x.tobytes() == y.tobytes() for x, y in zip(forward(example), forward(example, machine=machine)))


def scores_are_right() -> None:
    probe = Probe("float16", masks.Lengths(kv=np.array([31, 600])), batch=(2,), heads=(4, 1), lengths=(2, 600))
    probe.check(probe.run_results(SIM, is_backward=False))


def plans_are_right(library: ModuleType) -> None:
    check_plans(library)
    check_rule(library)
    check_parts(library)


KERNEL, WORK, COPY = "sm80/few_queries.cu", "attention/decode_work.cuh", "sm80/cache_copy.cuh"
PLAN = "planning/few_queries.py"
FAULTS = {
    results_are_right: {
        "rows have the intervals of later queries": Edit(
            WORK, "PackedQueries.row_mask", "row % num_queries", "min(row, num_queries - 1)"
        ),
        "the first query's keys count as seen by all": Edit(
            WORK, "PackedQueries.seen_by_all", "keys.full_start,", "keys.start,"
        ),
        "the last query's keys count as seen by all": Edit(
            WORK, "PackedQueries.seen_by_all", "keys.full_stop", "keys.stop"
        ),
        "keys are those of the first batch entry": Edit(
            KERNEL, "decode_of", "of.cache.k = of_batch_entry(params.k, heads);", "of.cache.k = params.k;"
        ),
        "values are those of the first batch entry": Edit(
            KERNEL, "decode_of", "of.cache.v = of_batch_entry(params.v, heads);", "of.cache.v = params.v;"
        ),
        "all heads have the keys of the first": Edit(
            KERNEL, "sm80_few_queries", "divmod(heads.head, params.shape.group_size).quotient", "0"
        ),
        "the columns of a row follow each other": Edit(
            COPY, "CacheCopy.copy_elements", "column * matrices.column_stride", "column"
        ),
        "rows without chunks are copied in chunks": Edit(
            COPY, "CacheCopy.copy_rows", "if (!are_chunks_) return copy_elements(", "if (false) return copy_elements("
        ),
        "blocks of a head have the first part": Edit(
            KERNEL, "sm80_few_queries", "by_part.remainder", "0"
        ),
    },
    parts_are_apart: {
        "heads of one batch entry share parts": Edit(
            KERNEL, "sm80_few_queries", "0, kv_head, by_part.quotient,", "0, kv_head, heads.batch_index,"
        ),
    },
    other_keys_never_matter: {
        "all keys are visited": Edit(
            KERNEL, "sm80_few_queries", "max(keys.start, keys.stop)", "params.shape.seqlen_kv"
        ),
        "rows past the end are copied as elements": Edit(
            COPY, "CacheCopy.start_next", "? valid_.hi - position : 0", "? kUnit : 0"
        ),
    },
    scores_are_right: {
        "a query's position is that of the last key": Edit(
            WORK, "PackedQueries.position", "return number;", "return keys.stop - 1 - number;"
        ),
    },
    plans_are_right: {
        "rows beyond a half tile are decoded": Edit(PLAN, "with_few_queries", "rows <= _MOST_DECODED and", ""),
        "any number of rows is few": Edit(PLAN, "with_few_queries", "1 <= rows <= _MOST_ROWS", "1 <= rows"),
        "heads of a group share any mask": Edit(PLAN, "_is_decoded", "problem.group_size > 1 and", "False and"),
        "no weight is dropped": Edit(PLAN, "_is_decoded", "problem.dropout is not None or", ""),
        "lists are intervals": Edit(PLAN, "with_few_queries", "or isinstance(work, UnionWork)", ""),
        "nearly empty tiles stay": Edit(PLAN, "with_few_queries", "forward=other.forward, ", ""),
        "parts of a window are those of all keys": Edit(
            PLAN, "_decoded", "max_steps(problem, work, spec)", "-(-problem.seqlen_kv // spec.block_kv)"
        ),
        "more parts than run at once": Edit(PLAN, "_decoded", ", at_once)", ", 128)"),
        "a grid has one part": Edit(PLAN, "_decoded", "problem.num_kv_heads * num_parts", "problem.num_kv_heads"),
    },
}  # fmt: skip
