"""Planted faults in the kernels of the sm80 family."""

from __future__ import annotations

from mutations.kernel_guards import parts_are_right, tensor_cores_are_right
from mutations.planting import Edit

FAULTS = {
    tensor_cores_are_right: {
        "Q K^T starts before K is there": Edit(
            "sm80/forward.cu", "sm80_forward",
            "while (has_block) { ptx::cp_async_wait<0>(); __syncthreads();",
            "while (has_block) { ptx::cp_async_wait<0>();",
        ),
        "V is multiplied before it is there": Edit(
            "sm80/forward.cu", "sm80_forward",
            "tile::gemm_nt(s, q_smem, k_smem); ptx::cp_async_wait<0>(); __syncthreads();",
            "tile::gemm_nt(s, q_smem, k_smem); ptx::cp_async_wait<0>();",
        ),
        "a negative scale is not turned": Edit(
            "sm80/forward.cu", "sm80_forward", "if (Softmax::needs_negation(shape.softmax_scale))", "if (false)"
        ),
        "lse of tensor cores loses its last row": Edit(
            "sm80/forward.cu", "write_results", "+ o.row(i) < lse.num_rows)", "+ o.row(i) < lse.num_rows - 1)"
        ),
        "dS is multiplied before it is there": Edit(
            "sm80/backward.cu", "sm80_backward", ") store_scores(s, dp); __syncthreads();", ") store_scores(s, dp);"
        ),
        "whole steps of many scores keep the last one's": Edit(
            "sm80/backward.cu", "make_scores_of_full_step", "if (kStoresScoresEarly) store_scores(s, dp); }", "}"
        ),
        "masked steps of many scores keep the last one's": Edit(
            "sm80/backward.cu", "sm80_backward", "if (kStoresScoresEarly) store_scores(s, dp); if (", "if ("
        ),
        "P of wide whole steps is multiplied before it is there": Edit(
            "sm80/backward.cu", "add_dv_overlapped", "__syncthreads();", ""
        ),
        "P of wide masked steps is multiplied before it is there": Edit(
            "sm80/backward.cu", "sm80_backward", "if (kOverlapsDs) { __syncthreads();", "if (kOverlapsDs) {"
        ),
        "P of wide whole steps is the last one's": Edit(
            "sm80/backward.cu", "add_dv_overlapped", "tile::store_columns(p_smem, s, column_tile); }", "}"
        ),
        "dS of wide whole steps is the last one's": Edit(
            "sm80/backward.cu", "add_dv_overlapped", "tile::store_columns(ds_smem, dp, j);", ""
        ),
        "dS of wide whole steps misses its first columns": Edit(
            "sm80/backward.cu", "add_dv_overlapped", "kColumnTiles != k_step)", "kColumnTiles != k_step + 1)"
        ),
        "wide masked steps bring no dV": Edit(
            "sm80/backward.cu", "sm80_backward", "(); tile::gemm_add_tn(dv, p_smem, do_smem);", "();"
        ),
        "wide steps bring dV twice": Edit("sm80/backward.cu", "sm80_backward", "if (!kOverlapsDs) tile", "tile"),
        "dK is not scaled": Edit("sm80/backward.cu", "write_gradients", "dk.scale(shape.softmax_scale);", ""),
        "one head of a group gives dK and dV": Edit(
            "sm80/backward.cu", "sm80_backward", "head < shape.group_size", "head < 1"
        ),
        "sums of dQ go to the first tile": Edit(
            "sm80/backward.cu", "add_dq", "query_tile_number(params, block.start, kBlockQ)", "0"
        ),
        "K is kept where no query sees it": Edit("sm80/backward.cu", "load_k", "min(work.last, last)", "work.last"),
        "a step of few queries is copied as a whole one": Edit(
            "sm80/backward.cu", "load_block", "& (block.stop - block.start == kBlockQ)", "& (block.start < block.stop)"
        ),
        "rows of Q are not asked about": Edit(
            "sm80/backward.cu", "save_head_state",
            "has_full_rows<QTile>(state.q, params.q, params.shape.head_dim) &&",
            "",
        ),
        "rows of dO are not asked about": Edit(
            "sm80/backward.cu", "save_head_state",
            "has_full_rows<OTile>(state.d_o, params.do_, params.shape.value_dim);",
            "true;",
        ),
        "lse of a whole step is delta": Edit(
            "sm80/backward.cu", "load_full_block", "is_lse ? state.lse : state.delta;", "state.delta;"
        ),
        "heads of a group have the first one's queries": Edit(
            "sm80/backward.cu", "begin_next_head",
            "state.work.batch_head.head += attention::heads_per_tile(chosen);", "",
        ),
        "heads of a group have the first one's steps": Edit(
            "sm80/backward.cu", "begin_next_head", ", visit_range_of_head(params, chosen, state.work),",
            ", state.visit_range,",
        ),
        "the next head is noted before the last one is read": Edit(
            "sm80/backward.cu", "begin_next_head", "__syncthreads();", ""
        ),
        "dK and dV leave before they are there": Edit(
            "sm80/backward.cu", "write_gradients", "__syncthreads(); write_staged_gradient(", "write_staged_gradient("
        ),
        "blocks of a list end where tiles do": Edit(
            "sm80/backward.cu", "add_dq", "query_tile_number(params, block.start, kBlockQ)", "(block.start / kBlockQ)"
        ),
        "whole steps start with the first query": Edit(
            "sm80/backward.cu", "load_full_block", "state.q + first * params.q.row_stride", "state.q"
        ),
        "a step of few keys is copied as a whole one": Edit(
            "sm80/forward.cu", "load_block",
            "rows_fill_tiles && block.stop - block.start == kBlockKv",
            "rows_fill_tiles",
        ),
        "rows of K are not asked about": Edit(
            "sm80/forward.cu", "save_state", "has_full_rows<KTile>(state.k, params.k, shape.head_dim) &&", ""
        ),
        "a step of few keys is copied as a whole one for dQ": Edit(
            "sm80/backward_rows.cu", "load_block",
            "state.rows_fill_tiles && block.stop - block.start == kBlockKv",
            "state.rows_fill_tiles",
        ),
        "rows of V are not asked about for dQ": Edit(
            "sm80/backward_rows.cu", "sm80_backward_rows",
            "&& has_full_rows<VTile>(state.v, params.v, shape.value_dim);",
            ";",
        ),
        "dQ of rows is not scaled": Edit(
            "sm80/backward_rows.cu", "sm80_backward_rows", "dq.scale(shape.softmax_scale);", ""
        ),
        "converted dQ is not scaled": Edit(
            "sm80/convert_dq.cu", "sm80_convert_dq", "dq.scale(shape.softmax_scale);", ""
        ),
        "masked steps of dQ hide scores behind -inf": Edit(
            "sm80/backward_rows.cu", "make_ds",
            "state.work, block, masked_score(), members); score_gradients<true>(",
            "state.work, block, ptx::negative_infinity<float>(), members); score_gradients<true>(",
        ),
        "masked steps hide scores behind -inf": Edit(
            "sm80/backward.cu", "sm80_backward", ", masked_score());", ", ptx::negative_infinity<float>());"
        ),
    },
    parts_are_right: {
        "every block does the first part": Edit(
            "sm80/forward.cu", "visit_range_of_block", ", full_range, split_index(num_splits),", ", full_range, 0,"
        ),
        "every part is left in one place": Edit(
            "sm80/forward.cu", "rows_of_part", "= attention::split_index(shape.num_splits) * seqlen_q;", "= 0;"
        ),
        "lse of a part without a key is not written": Edit(
            "sm80/forward.cu", "write_part", "() == 0) *", "() == 0 && row_lse[i] != ptx::negative_infinity<float>()) *"
        ),
        "the last part is lost": Edit(
            "sm80/combine.cu", "sm80_combine", "< num_rows; row += kGroups *", "< num_rows - seqlen_q; row += kGroups *"
        ),
        "half of the groups' sums are left out": Edit(
            "sm80/combine.cu", "sm80_combine", "group < kGroups", "group < kGroups / 2"
        ),
        "parts are not weighted": Edit(
            "sm80/combine.cu", "sm80_combine", "o[c].at[e] += factor * x.at[e];", "o[c].at[e] += x.at[e];"
        ),
        "a part without a key poisons": Edit(
            "sm80/combine.cu", "sm80_combine", "if (lse != ptx::negative_infinity<float>()) o[c]", "o[c]"
        ),
        "lse is that of the largest part": Edit(
            "sm80/combine.cu", "sm80_combine", "max_lse + ptx::log_accurate(total)", "max_lse"
        ),
        "weights are base 2": Edit("sm80/combine.cu", "weight", "* static_cast<float>(attention::kLog2E)", ""),
        "threads disagree on the largest part": Edit(
            "sm80/combine.cu", "sm80_combine",
            "max_lse = fmaxf(max_lse, __shfl_xor_sync(0xffffffffu, max_lse, lane_offset));",
            "__shfl_xor_sync(0xffffffffu, max_lse, lane_offset);",
        ),
        "sums are read before they are there": Edit("sm80/combine.cu", "sm80_combine", "__syncthreads();", ""),
    },
}  # fmt: skip
