"""Faults in FlashAttention-1's loops and in their plan."""

from __future__ import annotations

from mutations.fa1_guards import loops_are_right, the_plan_is_right
from mutations.planting import Edit

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
            FORWARD, "update_softmax", "tile_factor * ptx::reciprocal_approx(row_sum)",
            "ptx::reciprocal_approx(row_sum)",
        ),
        "a negative scale is not turned": Edit(
            FORWARD, "add_keys", "if (Softmax::needs_negation(params.shape.softmax_scale))", "if (false)"
        ),
        "O, l and m are not cleared": Edit(
            FORWARD, "fa1_forward", "clear_running(params, running, batch_head);", ""
        ),
        "the next keys are copied while the last ones are read": Edit(
            FORWARD, "fa1_forward",
            "__syncthreads(); begin_keys(params, {batch_head, range.first, range.last}, state);",
            "begin_keys(params, {batch_head, range.first, range.last}, state);",
        ),
        "an iteration starts before its queries are there": Edit(
            FORWARD, "fa1_forward",
            "ptx::cp_async_wait<0>(); __syncthreads(); if (kNumStages == 2",
            "ptx::cp_async_wait<0>(); if (kNumStages == 2",
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
            BACKWARD, "fa1_backward",
            "head < shape.group_size; ++head) begin_head", "head < 1; ++head) begin_head",
        ),
    },
    the_plan_is_right: {
        "O, m and l are counted once an iteration": Edit(PLAN, "traffic", "(q + 2 * running)", "(q + running)"),
        "keys are counted for each query head": Edit(PLAN, "traffic", "keys // problem.group_size", "keys"),
        "heads of 128 are refused": Edit(PLAN, "FlashAttention1.reasons", "if dim > _WIDEST", "if dim >= _WIDEST"),
        "a score is not refused": Edit(PLAN, "FlashAttention1.reasons", "problem.score is not None", "False"),
        "dropout is not refused": Edit(PLAN, "FlashAttention1.reasons", "problem.dropout is not None", "False"),
        "the backward pass has a block for each query head": Edit(
            PLAN, "FlashAttention1.launches", "tiles=problem.num_kv_heads", "tiles=problem.num_heads"
        ),
    },
}
