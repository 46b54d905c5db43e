"""Faults in Hopper's gradients of more than 128 columns."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.sm90_guards import wide_gradients_are_right

FAULTS = {
    wide_gradients_are_right: {
        "scores are not fenced": Edit("sm90/backward_wide.cu", "share", "ptx::fence_proxy_async();", ""),
        "scores are multiplied before they are there": Edit(
            "sm90/backward_wide.cu", "share", "ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);", ""
        ),
        "P has one room": Edit("sm90/backward_wide.cu", "p_smem", "kScoreRoom + is_odd * kScoreBytes", "kScoreRoom"),
        "dS lies where P does": Edit("sm90/backward_wide.cu", None, "kScoreRoom + 2 * kScoreBytes}", "kScoreRoom}"),
        "both warpgroups store the same keys": Edit(
            "sm90/backward_wide.cu", "share",
            "rounded, Scores::warp_row(), part * kBlockKv / kConsumers",
            "rounded, Scores::warp_row(), 0",
        ),
        "a query has another's bits": Edit(
            "sm90/backward_wide.cu", "SeenByThread.SeenByThread", "Scores::first_row() * kRowBytes +", ""
        ),
        "both warpgroups see the same keys": Edit(
            "sm90/backward_wide.cu", "SeenByThread.SeenByThread", "part * kBlockKv / 16)", "0)"
        ),
        "a bit is its neighbour's": Edit(
            "sm90/backward_wide.cu", "SeenByThread.at", ">> (first + j % 2) & 1", ">> first & 1"
        ),
        "a query has another's lse": Edit(
            "sm90/backward_wide.cu", "make_probabilities",
            "queries.known.lse_2[Scores::first_row() + Scores::row(i)]",
            "queries.known.lse_2[i]",
        ),
        "a query has another's delta": Edit(
            "sm90/backward_wide.cu", "make_gradients",
            "queries.known.delta[Scores::first_row() + Scores::row(i)]",
            "queries.known.delta[i]",
        ),
        "P of masked keys is kept": Edit(
            "sm90/backward_wide.cu", "make_probabilities",
            "s.at(i, j) = !IsMasked || seen.at(i, j) ? p : 0.0f;",
            "s.at(i, j) = p;",
        ),
        "dS of masked keys is kept": Edit(
            "sm90/backward_wide.cu", "make_gradients",
            "dp.at(i, j) = !IsMasked || seen.at(i, j) ?",
            "dp.at(i, j) = true ?",
        ),
        "S is read before it is there": Edit(
            "sm90/backward_wide.cu", "consume", "tile::wait_for<1>(s);", "tile::wait_for<2>(s);"
        ),
        "dP is read before it is there": Edit(
            "sm90/backward_wide.cu", "consume",
            "tile::wait_for<1 + DvOfGroup::kOthers>(dp);",
            "tile::wait_for<2 + DvOfGroup::kOthers>(dp);",
        ),
        "dQ is read before it is there": Edit(
            "sm90/backward_wide.cu", "consume", "tile::wait_for<1>(dq);", "tile::wait_for<2>(dq);"
        ),
        "the second part of dQ is read before it is there": Edit(
            "sm90/backward_wide.cu", "consume",
            "tile::wait_for<DkOfGroup::kOthers>(dq);",
            "tile::wait_for<1 + DkOfGroup::kOthers>(dq);",
        ),
        "dO is left while dV is made": Edit(
            "sm90/backward_wide.cu", "consume",
            "tile::wait_for<1>(dq); dv.keep_in_place(); if constexpr (kLeavesDo) "
            "tile::arrive(own.d_o[do_stage(turn)].empty);",
            "if constexpr (kLeavesDo) tile::arrive(own.d_o[do_stage(turn)].empty); tile::wait_for<1>(dq); "
            "dv.keep_in_place();",
        ),
        "Q is left while dK is made": Edit(
            "sm90/backward_wide.cu", "consume",
            "ptx::wgmma_wait<1>(); dk.keep_in_place(); } tile::arrive(own.q[turn.stage].empty);",
            "tile::arrive(own.q[turn.stage].empty); ptx::wgmma_wait<1>(); dk.keep_in_place(); }",
        ),
        "dK is not waited for in the end": Edit("sm90/backward_wide.cu", "consume", "ptx::wgmma_wait<0>();", ""),
        "Q is never left": Edit("sm90/backward_wide.cu", "consume", "tile::arrive(own.q[turn.stage].empty);", ""),
        "wide gradients start with those of the last tile": Edit(
            "sm90/backward_wide.cu", "consume", "return; dk.each(part, clear); dv.each(part, clear);", "return;"
        ),
        "the next tile's keys are not awaited": Edit(
            "sm90/backward_wide.cu", "consume", "await_keys(kind); start_s(s, next, part);", "start_s(s, next, part);"
        ),
        "keys are left before gradients go through their rooms": Edit(
            "sm90/backward_wide.cu", "consume",
            "write_gradients(params, own",
            "leave_keys(); write_gradients(params, own",
        ),
        "dO is not awaited": Edit(
            "sm90/backward_wide.cu", "start_dp", "tile::await_full(board().d_o[do_stage(turn)], do_parity(turn));", ""
        ),
        "both warpgroups make the same half of dQ": Edit(
            "sm90/backward_wide.cu", "start_dq", "(part * kDqSlices + slice) *", "slice *"
        ),
        "the second part of dQ is the first": Edit(
            "sm90/backward_wide.cu", "start_dq", "(part * kDqSlices + slice) *", "part * kDqSlices *"
        ),
        "the second part of dQ is lost at the end": Edit(
            "sm90/backward_wide.cu", "consume",
            "sum.add(dq, DqSlice::kColumnTiles); write_gradients(",
            "{} write_gradients(",
        ),
        "sums of dQ are those of the next step": Edit(
            "sm90/backward_wide.cu", "consume",
            "const DqSum sum(note.dq_sum);",
            "const DqSum sum(own.notes[turn.next().stage].dq_sum);",
        ),
        "both warpgroups sum the same columns": Edit(
            "sm90/backward_wide.cu", "Gradient.start_first_sum",
            "Columns(left, part * kOwn), Keys(right)",
            "Columns(left, 0), Keys(right)",
        ),
        "the second panel of a warpgroup is the first": Edit(
            "sm90/backward_wide.cu", "Gradient.start_other_sums", "part * kOwn + 1), Keys", "part * kOwn), Keys"
        ),
        "of a panel that they share both have the first keys": Edit(
            "sm90/backward_wide.cu", "Gradient.start_other_sums",
            "Keys(right, part * kBlockKv / kConsumers)",
            "Keys(right)",
        ),
        "the panel that they share is the first": Edit(
            "sm90/backward_wide.cu", "Gradient.start_other_sums", "Columns(left, kLast),", "Columns(left, 0),"
        ),
        "what both share is written to the first keys": Edit(
            "sm90/backward_wide.cu", "Gradient.each",
            "call(shared, kLast, part * kBlockKv / kConsumers)",
            "call(shared, kLast, 0)",
        ),
        "panels of both are written to one place": Edit(
            "sm90/backward_wide.cu", "Gradient.each", "call(own[x], part * kOwn + x, 0)", "call(own[x], x, 0)"
        ),
        "wide dK is not scaled": Edit(
            "sm90/backward_wide.cu", "write_gradients", "sums.scale(params.shape.softmax_scale);", ""
        ),
        "dK is written over K that is read": Edit(
            "sm90/backward_wide.cu", "write_gradients",
            "sums.scale(params.shape.softmax_scale); }); ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);",
            "sums.scale(params.shape.softmax_scale); });",
        ),
        "gradients are copied before they are there": Edit(
            "sm90/backward_wide.cu", "write_gradients",
            "dv, v_smem, part); ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);",
            "dv, v_smem, part);",
        ),
        "gradients of float32 lose a key": Edit(
            "sm90/backward_wide.cu", "write_wide", "Sums::column(j) < to.num_rows", "Sums::column(j) < to.num_rows - 1"
        ),
        "gradients of float32 lose a column": Edit(
            "sm90/backward_wide.cu", "write_wide",
            "Sums::row(i) < to.num_columns,",
            "Sums::row(i) < to.num_columns - 1,",
        ),
        "gradients of float32 start with the tile before": Edit(
            "sm90/backward_wide.cu", "put", ".rows(work.first, work.last);", ";"
        ),
        "half a warpgroup copies gradients": Edit(
            "sm90/backward_wide.cu", "write_gradients", "from, threadIdx.x - kGroup);", "from, threadIdx.x % kGroup);"
        ),
    },
}  # fmt: skip
