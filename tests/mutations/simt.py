"""Planted faults in the kernels of the simt family."""

from __future__ import annotations

from mutations.kernel_guards import attention_is_right
from mutations.planting import Edit

FAULTS = {
    attention_is_right: {
        "K is overwritten before it is read": Edit(
            "simt/forward.cu", "simt_forward", "(s, q_smem, k_smem); __syncthreads();", "(s, q_smem, k_smem);"
        ),
        "P is read before it is there": Edit(
            "simt/forward.cu", "simt_forward", "tile::store(p_smem, s); __syncthreads();", "tile::store(p_smem, s);"
        ),
        "V is overwritten before it is read": Edit(
            "simt/forward.cu", "simt_forward", "; blocks.next(block);) { __syncthreads();", "; blocks.next(block);) {"
        ),
        "scores are not scaled": Edit("simt/forward.cu", "simt_forward", "s.scale(softmax_scale_log2);", ""),
        "scores are not masked": Edit("simt/forward.cu", "simt_forward", "mask_scores(s, params, work, block);", ""),
        "lse of the last row is lost": Edit(
            "simt/forward.cu", "simt_forward", "o.row(i) < lse.num_rows)", "o.row(i) < lse.num_rows - 1)"
        ),
        "heads are grouped by remainder": Edit(
            "simt/forward.cu", "simt_forward", "head / shape.group_size", "head % (shape.num_heads / shape.group_size)"
        ),
        "dS is read before it is there": Edit(
            "simt/backward_rows.cu", "simt_backward_rows", "store(ds_smem, dp); __syncthreads();", "store(ds_smem, dp);"
        ),
        "dq is not scaled": Edit("simt/backward_rows.cu", "simt_backward_rows", "dq.scale(shape.softmax_scale);", ""),
        "P is overwritten before it is read": Edit(
            "simt/backward_columns.cu", "simt_backward_columns", "__syncthreads(); tile::store(", "tile::store("
        ),
        "dq is not zeroed": Edit(
            "simt/backward_statistics.cu", "simt_backward_statistics", "dq.fill(0);", "dq.fill(1);"
        ),
        "dq is left as it came": Edit(
            "simt/backward_statistics.cu", "simt_backward_statistics", "store_gradient<", "if (false) store_gradient<"
        ),
        "what is added to dq is not scaled": Edit(
            "simt/backward.cu", "simt_backward", "dq_frag.scale(shape.softmax_scale);", ""
        ),
        "dq is added a row late": Edit(
            "simt/backward.cu", "simt_backward", "dq.rows(block.start, block.", "dq.rows(block.start + 1, block."
        ),
        "all heads of a group add to the first one's dq": Edit(
            "simt/backward.cu", "simt_backward", ".dq, work.batch_head, head,", ".dq, work.batch_head, first_head,"
        ),
        "Q is overwritten before it is read": Edit(
            "simt/backward.cu", "simt_backward", "::store(p_smem, scores); __syncthreads();", "::store(p_smem, scores);"
        ),
        "dO is read before it is there": Edit(
            "simt/backward.cu", "simt_backward",
            "__syncthreads(); if constexpr (!kHasScore && !Config::kHasDropout) tile::gemm_add_nn<kUnroll>(dv",
            "if constexpr (!kHasScore && !Config::kHasDropout) tile::gemm_add_nn<kUnroll>(dv",
        ),
        "P takes dS before it is read": Edit(
            "simt/backward.cu", "simt_backward", "} __syncthreads(); if constexpr (!", "} if constexpr (!"
        ),
        "Q takes dQ before it is read": Edit(
            "simt/backward.cu", "simt_backward", "__syncthreads(); const Interval keys =", "const Interval keys ="
        ),
        "dQ is added before it is there": Edit(
            "simt/backward.cu", "simt_backward", "} __syncthreads(); tile::add(", "} tile::add("
        ),
        "dQ is overwritten before it is added": Edit(
            "simt/backward.cu", "simt_backward", ", kBlockQ> scores; __syncthreads();", ", kBlockQ> scores;"
        ),
        "one head of a group gives dk and dv": Edit(
            "simt/backward.cu", "simt_backward", "head < first_head + shape.group_size", "head < first_head + 1"
        ),
        "P of keys past the tile is kept": Edit(
            "simt/backward.cu", "simt_backward", "probabilities_of_keys(scores, params, work, block, lse_2);", ""
        ),
        "only the first head of a group gives dk and dv": Edit(
            "simt/backward_columns.cu", "simt_backward_columns", "< first_head + shape.group_size", "< first_head + 1"
        ),
        "dk takes P instead of dS": Edit(
            "simt/backward_columns.cu", "simt_backward_columns", "tile::store(p_smem, dp);", ""
        ),
    },
}  # fmt: skip
