"""Planted faults in sm90's gradients of more than 128 columns."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.sm90_guards import wide_gradients_are_right

FAULTS = {
    wide_gradients_are_right: {
        "scores are not fenced": Edit("sm90/backward_wide.cu", "publish_scores", "ptx::fence_proxy_async();", ""),
        "scores are multiplied before they are there": Edit(
            "sm90/backward_wide.cu", "publish_scores",
            "ptx::bar_sync(kConsumersSync, kNumConsumers * kWarpgroupThreads);",
            "",
        ),
        "P has one room": Edit(
            "sm90/backward_wide.cu", "p_smem", "kScoreOffset + is_odd * kScoreBytes", "kScoreOffset"
        ),
        "dS lies where P does": Edit("sm90/backward_wide.cu", None, "kScoreOffset + 2 * kScoreBytes}", "kScoreOffset}"),
        "both warpgroups store the same keys": Edit(
            "sm90/backward_wide.cu", "publish_scores", "warp_row(), part * kBlockKv / kNumConsumers", "warp_row(), 0"
        ),
        "a query has another's bits": Edit(
            "sm90/backward_wide.cu", "ThreadMask.ThreadMask", "Scores::first_row() * kRowBytes +", ""
        ),
        "both warpgroups see the same keys": Edit(
            "sm90/backward_wide.cu", "ThreadMask.ThreadMask", "part * kBlockKv / 16)", "0)"
        ),
        "a bit is its neighbour's": Edit(
            "sm90/backward_wide.cu", "ThreadMask.at", ">> (first + j % 2) & 1", ">> first & 1"
        ),
        "a query has another's lse": Edit(
            "sm90/backward_wide.cu", "make_p", ".stats.lse_2[Scores::first_row() + Scores::row(i)]", ".stats.lse_2[i]"
        ),
        "a query has another's delta": Edit(
            "sm90/backward_wide.cu", "make_ds", ".stats.delta[Scores::first_row() + Scores::row(i)]", ".stats.delta[i]"
        ),
        "P of masked keys is kept": Edit(
            "sm90/backward_wide.cu", "make_p", "s.at(i, j) = !IsMasked || mask.at(i, j) ? p : 0.0f;", "s.at(i, j) = p;"
        ),
        "dS of masked keys is kept": Edit(
            "sm90/backward_wide.cu", "make_ds", "dp.at(i, j) = !IsMasked || mask.at(i, j) ?", "dp.at(i, j) = true ?"
        ),
        "S is read before it is there": Edit(
            "sm90/backward_wide.cu", "consume", "tile::wait_wgmma<1>(s);", "tile::wait_wgmma<2>(s);"
        ),
        "dP is read before it is there": Edit(
            "sm90/backward_wide.cu", "consume", "<1 + WarpgroupDv::kOtherGemms>(dp", "<2 + WarpgroupDv::kOtherGemms>(dp"
        ),
        "dQ is read before it is there": Edit(
            "sm90/backward_wide.cu", "consume", "tile::wait_wgmma<1>(dq);", "tile::wait_wgmma<2>(dq);"
        ),
        "the second part of dQ is read before it is there": Edit(
            "sm90/backward_wide.cu", "consume", "<WarpgroupDk::kOtherGemms>(dq);", "<1 + WarpgroupDk::kOtherGemms>(dq);"
        ),
        "dO is left while dV is made": Edit(
            "sm90/backward_wide.cu", "consume",
            "tile::wait_wgmma<1>(dq); dv.fence_registers(); if constexpr (kReleasesDo) "
            "tile::arrive(smem.d_o[do_stage(state)].empty);",
            "if constexpr (kReleasesDo) tile::arrive(smem.d_o[do_stage(state)].empty); tile::wait_wgmma<1>(dq); "
            "dv.fence_registers();",
        ),
        "Q is left while dK is made": Edit(
            "sm90/backward_wide.cu", "consume",
            "ptx::wgmma_wait<1>(); dk.fence_registers(); } tile::arrive(smem.q[state.stage].empty);",
            "tile::arrive(smem.q[state.stage].empty); ptx::wgmma_wait<1>(); dk.fence_registers(); }",
        ),
        "dK is not waited for in the end": Edit("sm90/backward_wide.cu", "consume", "ptx::wgmma_wait<0>();", ""),
        "Q is never left": Edit("sm90/backward_wide.cu", "consume", "tile::arrive(smem.q[state.stage].empty);", ""),
        "wide gradients start with those of the last tile": Edit(
            "sm90/backward_wide.cu", "consume", "return; dk.each(part, clear); dv.each(part, clear);", "return;"
        ),
        "the next tile's keys are not awaited": Edit(
            "sm90/backward_wide.cu", "consume", "wait_kv(flags); start_s(s, next_state,", "start_s(s, next_state,"
        ),
        "keys are left before gradients go through their rooms": Edit(
            "sm90/backward_wide.cu", "consume", "write_gradients(params,", "release_kv(); write_gradients(params,"
        ),
        "dO is not awaited": Edit(
            "sm90/backward_wide.cu", "start_dp", "tile::wait_full(shared().d_o[do_stage(state)], do_phase(state));", ""
        ),
        "both warpgroups make the same half of dQ": Edit(
            "sm90/backward_wide.cu", "start_dq", "(part * kDqSlices + slice) *", "slice *"
        ),
        "the second part of dQ is the first": Edit(
            "sm90/backward_wide.cu", "start_dq", "(part * kDqSlices + slice) *", "part * kDqSlices *"
        ),
        "the second part of dQ is lost at the end": Edit(
            "sm90/backward_wide.cu", "consume",
            "dq_sum.atomic_add(dq, DqSlice::kColumnTiles); write_gradients(",
            "{} write_gradients(",
        ),
        "sums of dQ are those of the next step": Edit(
            "sm90/backward_wide.cu", "consume", "(message.dq_sum);", "(smem.messages[state.next().stage].dq_sum);"
        ),
        "both warpgroups sum the same columns": Edit(
            "sm90/backward_wide.cu", "GradientPart.start_first_sum", "(left, part * kPanelsPerWarpgroup),", "(left, 0),"
        ),
        "the second panel of a warpgroup is the first": Edit(
            "sm90/backward_wide.cu", "GradientPart.start_other_sums", "kPanelsPerWarpgroup + 1)", "kPanelsPerWarpgroup)"
        ),
        "of a panel that they share both have the first keys": Edit(
            "sm90/backward_wide.cu", "GradientPart.start_other_sums", "right, part * kBlockKv / kNumConsumers", "right"
        ),
        "the panel that they share is the first": Edit(
            "sm90/backward_wide.cu", "GradientPart.start_other_sums", "Columns(left, kLast),", "Columns(left, 0),"
        ),
        "what both share is written to the first keys": Edit(
            "sm90/backward_wide.cu", "GradientPart.each", ", kLast, part * kBlockKv / kNumConsumers)", ", kLast, 0)"
        ),
        "panels of both are written to one place": Edit(
            "sm90/backward_wide.cu", "GradientPart.each", "[x], part * kPanelsPerWarpgroup + x, 0)", "[x], x, 0)"
        ),
        "wide dK is not scaled": Edit(
            "sm90/backward_wide.cu", "write_gradients", "sums.scale(params.shape.softmax_scale);", ""
        ),
        "dK is written over K that is read": Edit(
            "sm90/backward_wide.cu", "write_gradients",
            "sums.scale(params.shape.softmax_scale); }); ptx::bar_sync(kConsumersSync, kNumConsumers * "
            "kWarpgroupThreads);",
            "sums.scale(params.shape.softmax_scale); });",
        ),
        "gradients are copied before they are there": Edit(
            "sm90/backward_wide.cu", "write_gradients",
            "dv, v_smem, part); ptx::bar_sync(kConsumersSync, kNumConsumers * kWarpgroupThreads);",
            "dv, v_smem, part);",
        ),
        "gradients of float32 lose a key": Edit(
            "sm90/backward_wide.cu", "write_accumulators", "::column(j) < to.num_rows", "::column(j) < to.num_rows - 1"
        ),
        "gradients of float32 lose a column": Edit(
            "sm90/backward_wide.cu", "write_accumulators", "::row(i) < to.num_columns", "::row(i) < to.num_columns - 1"
        ),
        "gradients of float32 start with the tile before": Edit(
            "sm90/backward_wide.cu", "write_part", ".rows(work.first, work.last);", ";"
        ),
        "half a warpgroup copies gradients": Edit(
            "sm90/backward_wide.cu", "write_gradients", "from, threadIdx.x -", "from, threadIdx.x %"
        ),
    },
}  # fmt: skip
