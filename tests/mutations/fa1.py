"""Planted faults in FlashAttention-1's loops and in their plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from cuflash import masks, sim
from cuflash.executors.sim import Simulator
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import SIM
from mutations.kernel_guards import padded_with_nan, without_nan
from mutations.planting import Edit
from poison import call

SIGNS = (AssertionError,)  # exceptions with which a guard reports a fault
FA1 = replace(SIM, kernel="fa1")


class KeysOfHead(masks.Mask):
    """A mask under which the first head attends keys 20 to 79, and the second head keys 60 to 119."""

    def intervals(self, b: Any, h: Any, i: Any) -> Any:
        lo = 20 + 40 * h + 0 * (b + i)
        return lo, lo + 60


# Tiles are 64 x 64 and 128 x 256: the list has several tiles of queries and of keys, the intervals have several of
# queries.
_SHORT = {"num_heads": 2, "num_kv_heads": 1, "dtype": "float16", "head_dim": 24, "value_dim": 40}
STRUCTURES = (
    Structure(
        **_SHORT, seqlen_q=150, seqlen_kv=140, scale=-0.3,
        mask=masks.BlockPattern(np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]], bool), 64) & masks.Causal("bottom_right"),
    ),
    Structure(**_SHORT, seqlen_q=150, seqlen_kv=120, mask=KeysOfHead()),
)  # fmt: skip


@cache
def _beside_clean() -> list[tuple[Example, Example]]:
    """Return inputs of the kernels, each with the same inputs without NaN, created once for all edits."""
    examples = [*(structure.example() for structure in STRUCTURES), padded_with_nan("float16", value_dim=40)]
    return [(FA1.rounded(example), FA1.rounded(without_nan(example))) for example in examples]


def loops_are_right() -> None:
    """Check that every result is within its bound, in poisoned memory and under hostile schedules."""
    schedules = (
        sim.Schedule(),
        sim.Schedule(seed=1, order="random", copies="late"),
        sim.Schedule(seed=2, order="priorities", copies="late"),
        sim.Schedule(seed=3, order="last_warp", copies="random"),
    )
    for schedule in schedules:
        for example, clean in _beside_clean():
            call(example, FA1, Simulator(schedule), check=partial(assert_within_bounds, clean))


def the_plan_is_right(library: ModuleType) -> None:
    """Check that the bytes moved by loops equal a count from the algorithms, and that memory and refusals are right."""
    x = library.ShapeDtype((2, 4, 1024, 64), np.float16)
    few = library.ShapeDtype((2, 2, 1024, 64), np.float16)
    ready = library.plan(x, few, few, kernel="fa1", device=library.DeviceSpec.gpu("H100"))
    traffic = import_module(f"{library.__name__}.planning.families.fa1").traffic
    forward, backward = traffic(ready._plan.problem, ready._plan.kernels, ready._plan.visited_scores)
    turns = {"forward": 1024 // 256, "backward": 1024 // 128}
    o, dq = 4 * (64 + 2), 4 * 64  # bytes per query that each iteration reads and writes
    assert forward == 8 * 1024 * (2 * 128 + turns["forward"] * (128 + 2 * o) + 2 * o + 128 + 4)
    ends = 2 * 128 + 8 + 2 * dq + 128
    assert backward == 8 * 1024 * (turns["backward"] * (256 + 2 * dq + 8) + ends) + 4 * 1024 * 4 * 128
    assert ready.workspace_bytes == 8 * 1024 * o
    assert [launch.grid(2) for launch in (*ready._plan.kernels.forward.launches.values(),)] == [8]
    assert [launch.grid(2) for launch in (*ready._plan.kernels.backward.launches.values(),)] == [4]
    wide, widest = (library.ShapeDtype((2, 4, 1024, dim), np.float16) for dim in (136, 128))
    problem = library.plan(widest, widest, widest, device=ready._plan.device)._plan.problem
    assert ready._plan.family.reasons(problem, None) == []
    dropped = {"dropout": library.Dropout(0.1, seed=0)}
    refused = (((wide, wide, x), {}), ((x, x, wide), {}), ((x, x, x), {"softcap": 3.0}), ((x, x, x), dropped))
    for arrays, options in refused:
        try:
            library.plan(*arrays, kernel="fa1", device=library.DeviceSpec.gpu("H100"), **options)
        except library.UnsupportedProblem as error:
            assert len(error.reasons) == 1, error
        else:
            raise AssertionError(f"a call with {options} is planned")


FORWARD, BACKWARD, RUNNING, PLAN = (
    "fa1/forward.cu", "fa1/backward.cu", "fa1/running.cuh", "planning/families/fa1.py"
)  # fmt: skip

FAULTS = {
    loops_are_right: {
        "l of earlier iterations is not scaled when m rises": Edit(
            FORWARD, "update_softmax",
            "ptx::exp2_approx((rows[i].row_max - finite(row_max)) * softmax_scale_log2) * rows[i].row_sum",
            "rows[i].row_sum",
        ),
        "what an iteration adds to l is not scaled to m": Edit(
            FORWARD, "update_softmax", "old_sum + tile_factor * tile_sum", "old_sum + tile_sum"
        ),
        "a row that sees no key in an iteration is divided by 0": Edit(
            FORWARD, "update_softmax", "tile_max == ptx::negative_infinity<float>() && tile_sum == 0", "false"
        ),
        "what an iteration adds to O is not scaled to m": Edit(
            FORWARD, "update_softmax", "tile_factor * ptx::reciprocal_approx(row_sum", "ptx::reciprocal_approx(row_sum"
        ),
        "a negative scale is not turned": Edit(
            FORWARD, "add_keys", "if (Softmax::needs_negation(params.shape.softmax_scale))", "if (false)"
        ),
        "O, l and m are not cleared": Edit(
            FORWARD, "fa1_forward", "clear_running(params, running, batch_head);", ""
        ),
        "the next keys are copied while the last ones are read": Edit(
            FORWARD, "fa1_forward", "__syncthreads(); begin_keys(params, {batch_head", "begin_keys(params, {batch_head"
        ),
        "an iteration starts before its queries are there": Edit(
            FORWARD, "fa1_forward", "ptx::cp_async_wait<0>(); __syncthreads(); if (", "ptx::cp_async_wait<0>(); if ("
        ),
        "lse is that of base 2": Edit(
            FORWARD, "write_results", "softmax_scale_log2 * static_cast<float>(kLn2)", "softmax_scale_log2"
        ),
        "hidden values meet weights of 0": Edit(
            RUNNING, "load_visible_rows", "max(keys.first, min(keys.last, last))", "keys.last"
        ),
        "dQ of earlier iterations is lost": Edit(
            BACKWARD, "add_queries", "dq.at(i, j) += added.at(i, j);", "dq.at(i, j) = added.at(i, j);"
        ),
        "dQ is not cleared": Edit(
            BACKWARD, "begin_head", "clear_sums(params, params.dq_sum, batch_head, kBlockQ * kHeadDim);", ""
        ),
        "P and dS are multiplied before they are there": Edit(
            BACKWARD, "add_queries", "__syncthreads(); tile::gemm_add_tn(dv", "tile::gemm_add_tn(dv"
        ),
        "heads of a group see the keys of its first one": Edit(
            BACKWARD, "fa1_backward", "head == 0 || params.work.interval_head_stride != 0", "head == 0"
        ),
        "delta is made of the first head alone": Edit(
            BACKWARD, "fa1_backward", "head < shape.group_size; ++head) begin_head", "head < 1; ++head) begin_head"
        ),
    },
    the_plan_is_right: {
        "O, m and l are counted once an iteration": Edit(PLAN, "traffic", "(q + 2 * running)", "(q + running)"),
        "keys are counted for each query head": Edit(PLAN, "traffic", "keys // problem.group_size", "keys"),
        "heads of 128 are refused": Edit(PLAN, "FlashAttention1.reasons", "if dim > _WIDEST", "if dim >= _WIDEST"),
        "a score is not refused": Edit(PLAN, "FlashAttention1.reasons", "problem.score is not None", "False"),
        "dropout is not refused": Edit(PLAN, "FlashAttention1.reasons", "problem.dropout is not None", "False"),
        "the backward pass has a block for each query head": Edit(
            PLAN, "FlashAttention1.launches", "device, problem.num_kv_heads", "device, problem.num_heads"
        ),
    },
}
