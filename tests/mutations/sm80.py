"""Faults in the kernels of the sm80 family."""

from __future__ import annotations

from mutations.kernel_guards import parts_are_right, tensor_cores_are_right
from mutations.planting import Edit

FAULTS = {
    tensor_cores_are_right: {
        "Q K^T starts before K is there": Edit(
            "sm80/forward.cu", "sm80_forward",
            "while (has_step) { ptx::cp_async_wait<0>(); __syncthreads();",
            "while (has_step) { ptx::cp_async_wait<0>();",
        ),
        "V is multiplied before it is there": Edit(
            "sm80/forward.cu", "sm80_forward",
            "tile::product_nt(s, q_smem, k_smem); ptx::cp_async_wait<0>(); __syncthreads();",
            "tile::product_nt(s, q_smem, k_smem); ptx::cp_async_wait<0>();",
        ),
        "a negative scale is not turned": Edit(
            "sm80/forward.cu", "sm80_forward", "if (Softmax::turns(shape.softmax_scale))", "if (false)"
        ),
        "lse of tensor cores loses its last row": Edit(
            "sm80/forward.cu", "write_results",
            "first_row + o.row(i) < lse.num_rows)",
            "first_row + o.row(i) < lse.num_rows - 1)",
        ),
        "dS is multiplied before it is there": Edit(
            "sm80/backward.cu", "sm80_backward",
            "if (!kStoresApart) store_scores(s, dp); __syncthreads();",
            "if (!kStoresApart) store_scores(s, dp);",
        ),
        "whole steps of many scores keep the last one's": Edit(
            "sm80/backward.cu", "sm80_backward", "if (kStoresApart) store_scores(s, dp); }", "}"
        ),
        "masked steps of many scores keep the last one's": Edit(
            "sm80/backward.cu", "sm80_backward",
            "if (kStoresApart) store_scores(s, dp); if (kMakesDsMeanwhile) {",
            "if (kMakesDsMeanwhile) {",
        ),
        "P of wide whole steps is multiplied before it is there": Edit(
            "sm80/backward.cu", "add_dv_meanwhile", "__syncthreads();", ""
        ),
        "P of wide masked steps is multiplied before it is there": Edit(
            "sm80/backward.cu", "sm80_backward", "if (kMakesDsMeanwhile) { __syncthreads();", "if (kMakesDsMeanwhile) {"
        ),
        "P of wide whole steps is the last one's": Edit(
            "sm80/backward.cu", "add_dv_meanwhile", "tile::store_columns(p_smem, s, column_tile); }", "}"
        ),
        "dS of wide whole steps is the last one's": Edit(
            "sm80/backward.cu", "add_dv_meanwhile", "tile::store_columns(ds_smem, dp, j);", ""
        ),
        "dS of wide whole steps misses its first columns": Edit(
            "sm80/backward.cu", "add_dv_meanwhile", "kColumnTiles != turn)", "kColumnTiles != turn + 1)"
        ),
        "wide masked steps bring no dV": Edit(
            "sm80/backward.cu", "sm80_backward",
            "__syncthreads(); tile::add_product_tn(dv, p_smem, do_smem);",
            "__syncthreads();",
        ),
        "wide steps bring dV twice": Edit("sm80/backward.cu", "sm80_backward", "if (!kMakesDsMeanwhile) tile", "tile"),
        "dK is not scaled": Edit("sm80/backward.cu", "sm80_backward", "dk.scale(shape.softmax_scale);", ""),
        "one head of a group gives dK and dV": Edit(
            "sm80/backward.cu", "sm80_backward", "head < shape.group_size", "head < 1"
        ),
        "sums of dQ go to the first tile": Edit(
            "sm80/backward.cu", "sm80_backward", "query_tile_number(params, step.start, kBlockQ)", "0"
        ),
        "K is kept where no query sees it": Edit("sm80/backward.cu", "load_k", "min(work.last, last)", "work.last"),
        "a step of few queries is copied as a whole one": Edit(
            "sm80/backward.cu", "load_step", "& (step.stop - step.start == kBlockQ)", "& (step.start < step.stop)"
        ),
        "rows of Q are not asked about": Edit(
            "sm80/backward.cu", "keep_head", "has_rows_of<QTile>(kept.q, params.q, params.shape.head_dim) &&", ""
        ),
        "rows of dO are not asked about": Edit(
            "sm80/backward.cu", "keep_head",
            "has_rows_of<OTile>(kept.d_o, params.do_, params.shape.value_dim);",
            "true;",
        ),
        "lse of a whole step is delta": Edit(
            "sm80/backward.cu", "load_whole_step", "is_lse ? kept.lse : kept.delta;", "kept.delta;"
        ),
        "heads of a group have the first one's queries": Edit(
            "sm80/backward.cu", "begin_next_head", "++kept.work.place.head;", ""
        ),
        "heads of a group have the first one's steps": Edit(
            "sm80/backward.cu", "begin_next_head",
            "kept.work.place, reach_of_head(params, kept.work), kept);",
            "kept.work.place, kept.reach, kept);",
        ),
        "the next head is noted before the last one is read": Edit(
            "sm80/backward.cu", "begin_next_head", "__syncthreads();", ""
        ),
        "dK and dV leave before they are there": Edit(
            "sm80/backward.cu", "sm80_backward",
            "__syncthreads(); write_held(params.dk, kept.work, kv_head, shape.head_dim, k_smem);",
            "write_held(params.dk, kept.work, kv_head, shape.head_dim, k_smem);",
        ),
        "blocks of a list end where tiles do": Edit(
            "sm80/backward.cu", "sm80_backward",
            "query_tile_number(params, step.start, kBlockQ)",
            "(step.start / kBlockQ)",
        ),
        "whole steps start with the first query": Edit(
            "sm80/backward.cu", "load_whole_step", "kept.q + first * params.q.row_stride", "kept.q"
        ),
        "a step of few keys is copied as a whole one": Edit(
            "sm80/forward.cu", "load_step", "has_rows && step.stop - step.start == kBlockKv", "has_rows"
        ),
        "rows of K are not asked about": Edit(
            "sm80/forward.cu", "keep", "has_rows_of<KTile>(kept.k, params.k, shape.head_dim) &&", ""
        ),
        "a step of few keys is copied as a whole one for dQ": Edit(
            "sm80/backward_rows.cu", "load_step", "kept.has_rows && step.stop - step.start == kBlockKv", "kept.has_rows"
        ),
        "rows of V are not asked about for dQ": Edit(
            "sm80/backward_rows.cu", "sm80_backward_rows",
            "&& has_rows_of<VTile>(kept.v, params.v, shape.value_dim);",
            ";",
        ),
        "dQ of rows is not scaled": Edit(
            "sm80/backward_rows.cu", "sm80_backward_rows", "dq.scale(shape.softmax_scale);", ""
        ),
        "converted dQ is not scaled": Edit(
            "sm80/convert_dq.cu", "sm80_convert_dq", "dq.scale(shape.softmax_scale);", ""
        ),
        "masked steps of dQ hide scores behind -inf": Edit(
            "sm80/backward_rows.cu", "sm80_backward_rows",
            "kept.work, step, masked_score()); score_gradients<true>(",
            "kept.work, step, ptx::negative_infinity<float>()); score_gradients<true>(",
        ),
        "masked steps hide scores behind -inf": Edit(
            "sm80/backward.cu", "mask_step",
            "queries, keys, attention::masked_score());",
            "queries, keys, ptx::negative_infinity<float>());",
        ),
    },
    parts_are_right: {
        "every block does the first part": Edit(
            "sm80/forward.cu", "reach_of_block",
            "part_of<kBlockKv, Listed>(params, whole, work_part(num_splits), num_splits)",
            "part_of<kBlockKv, Listed>(params, whole, 0, num_splits)",
        ),
        "every part is left in one place": Edit(
            "sm80/forward.cu", "rows_of_part",
            "first = attention::work_part(shape.num_splits) * seqlen_q;",
            "first = 0;",
        ),
        "lse of a part without a key is not written": Edit(
            "sm80/forward.cu", "write_part",
            "if (o.first_column() == 0) *lse_rows",
            "if (o.first_column() == 0 && row_lse[i] != ptx::negative_infinity<float>()) *lse_rows",
        ),
        "the last part is lost": Edit(
            "sm80/combine.cu", "sm80_combine",
            "row < num_rows; row += kGroups * seqlen_q",
            "row < num_rows - seqlen_q; row += kGroups * seqlen_q",
        ),
        "half of the groups' sums are left out": Edit(
            "sm80/combine.cu", "sm80_combine", "group < kGroups", "group < kGroups / 2"
        ),
        "parts are not weighted": Edit(
            "sm80/combine.cu", "sm80_combine", "o[c].at[e] += by * x.at[e];", "o[c].at[e] += x.at[e];"
        ),
        "a part without a key poisons": Edit(
            "sm80/combine.cu", "sm80_combine", "if (lse != ptx::negative_infinity<float>()) o[c]", "o[c]"
        ),
        "lse is that of the largest part": Edit(
            "sm80/combine.cu", "sm80_combine", "most + ptx::log_accurate(total)", "most"
        ),
        "weights are base 2": Edit("sm80/combine.cu", "weight", "* static_cast<float>(attention::kLog2E)", ""),
        "threads disagree on the largest part": Edit(
            "sm80/combine.cu", "sm80_combine",
            "most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));",
            "__shfl_xor_sync(0xffffffffu, most, step);",
        ),
        "sums are read before they are there": Edit("sm80/combine.cu", "sm80_combine", "__syncthreads();", ""),
    },
}  # fmt: skip
