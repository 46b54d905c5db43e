"""Faults of score functions in the kernels of every family, and in the text that is printed of a program."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.score_kernel_guards import (
    exact_sums_are_right, hopper_gradients_are_exact, naive_is_exact, nothing_past_the_end_matters,
    packed_heads_are_exact, printed_functions_are_exact, repeatable_sums_are_planned, repeatable_sums_are_right,
    simt_is_exact, simt_waits_for_its_warps, sm80_is_exact, sm90_is_exact, warps_that_share_elements_are_exact,
)  # fmt: skip

FAULTS = {
    simt_is_exact: {
        "scores are not scaled before their function": Edit(
            "attention/score.cuh", "apply_score", "key.whole, x * scale)", "key.whole, x)"
        ),
        "a function is that of the first head": Edit(
            "attention/score.cuh", "apply_score",
            "score.of_tile(batch_head.batch_index, rows[i].head)",
            "score.of_tile(batch_head.batch_index, 0)",
        ),
        "a function is that of the first batch entry": Edit(
            "attention/score.cuh", "apply_score",
            "score.of_tile(batch_head.batch_index, rows[i].head)",
            "score.of_tile(0, rows[i].head)",
        ),
        "keys and queries change places": Edit(
            "attention/score.cuh", "score_of_queries",
            "queries{work.first, work.last}, keys{block.start, block.stop}",
            "keys{work.first, work.last}, queries{block.start, block.stop}",
        ),
        "scores get their function after their mask": Edit(
            "simt/forward.cu", "simt_forward",
            "if constexpr (kHasScore) score_of_queries(s, score_function, params.shape.softmax_scale, work, block, "
            "kLog2E); else "
            "s.scale(softmax_scale_log2); mask_scores(s, params, work, block);",
            "mask_scores(s, params, work, block); if constexpr (kHasScore) score_of_queries(s, score_function, "
            "params.shape.softmax_scale, work, block, kLog2E); else s.scale(softmax_scale_log2);",
        ),
        "the slope is left out": Edit("attention/score_slopes.cuh", "score_to_p_and_ds", "df * slopes.d0", "df"),
        "masked elements have a gradient": Edit(
            "attention/score_slopes.cuh", "score_to_p_and_ds", "is_seen && lse_2", "lse_2"
        ),
        "slopes are taken at products that are not scaled": Edit(
            "attention/score_slopes.cuh", "score_to_p_and_ds", "const T scaled = s * scale;", "const T scaled = s;"
        ),
        "gradients of heads are added twice": Edit(
            "attention/score_slopes.cuh", "scores_to_p_and_ds",
            "if (adds) score.flush(of_tile, tile_sums);",
            "if (adds) score.flush(of_tile, tile_sums); if (adds) score.flush(of_tile, tile_sums);",
        ),
        "a running sum goes on with the next element": Edit("tile/global_sum.cuh", "RunningSum.add", "sum = 0;", ""),
        "a running sum is lost where another element follows": Edit(
            "tile/global_sum.cuh", "RunningSum.add", "if (address != nullptr) tile::add(address, sum);", ""
        ),
        "the last running sum is lost": Edit(
            "attention/score_slopes.cuh", "scores_to_p_and_ds", "if (adds) score.flush(score_sums);", ""
        ),
        "a warp's sums go to its first lane's element": Edit(
            "tile/global_sum.cuh", "RunningSum.flush", "__all_sync(0xffffffffu, own == first)",
            "__any_sync(0xffffffffu, own == first)",
        ),
        "S^T is taken for S": Edit(
            "attention/score_slopes.cuh", "scores_to_p_and_ds_of_keys",
            "{work.first, work.last}, {block.start, block.stop}",
            "{block.start, block.stop}, {work.first, work.last}",
        ),
        "P is made before there is dP": Edit(
            "simt/backward.cu", "simt_backward",
            "if constexpr (!kHasScore) probabilities_of_keys(",
            "probabilities_of_keys(",
        ),
        "rows have slopes of no score function": Edit(
            "simt/backward_rows.cu", "simt_backward_rows", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "columns have slopes of no score function": Edit(
            "simt/backward_columns.cu", "simt_backward_columns", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "indices beyond an int wrap around": Edit(
            "attention/score_math.cuh", "whole",
            "if (x > static_cast<Element>(kMost)) return kMost;",
            "",
        ),
        "remainders of a wrong divisor": Edit(
            "attention/score_math.cuh", "remainder", "x % by +", "x % (by - 1) +"
        ),
        "batch entries are taken from the first axis on": Edit(
            "attention/score_math.cuh", "leading_offset", "b /= extent;", ""
        ),
    },
    simt_waits_for_its_warps: {
        "P of a score function is read before it is there": Edit(
            "simt/backward.cu", "simt_backward",
            "{ __syncthreads(); tile::gemm_add_nn<kUnroll>(dv, p_smem, do_smem); }",
            "{ tile::gemm_add_nn<kUnroll>(dv, p_smem, do_smem); }",
        ),
        "dO is overwritten before it is read": Edit(
            "simt/backward.cu", "simt_backward",
            "} __syncthreads(); if constexpr (!kHasScore && !config::kHasDropout) score_gradients_of_keys(",
            "} if constexpr (!kHasScore && !config::kHasDropout) score_gradients_of_keys(",
        ),
    },
    naive_is_exact: {
        "scores keep what they are without their function": Edit(
            "naive/scores.cu", "naive_scores", "kHasScore && !score::Function::kIsDerived", "false"
        ),
        "gradients have no score function": Edit(
            "naive/gradient_scores.cu", "naive_gradient_scores",
            "delta_of_row[i] = delta;",
            "delta_of_row[i] = 0;",
        ),
    },
    sm80_is_exact: {
        "scores get no function": Edit(
            "sm80/forward.cu", "sm80_forward", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "exponents are scaled as well": Edit(
            "attention/score.cuh", "exponent_scale", "? 1.0 :", "? shape.softmax_scale :"
        ),
        "gradients have the positions of the first keys": Edit(
            "sm80/backward.cu", "sm80_backward",
            "{state.work.first, state.work.last}, is_masked",
            "{0, state.work.last}, is_masked",
        ),
        "hidden elements are taken for seen ones": Edit(
            "attention/fragment_slopes.cuh", "scores_to_p_and_ds_of_rows",
            "!is_masked || !is_masked_score(s.at(i, j))",
            "true",
        ),
        "rows have no score function": Edit(
            "sm80/backward_rows.cu", "sm80_backward_rows", "if constexpr (kHasScore || config::kHasDropout)",
            "if constexpr (false)",
        ),
    },
    packed_heads_are_exact: {
        "heads in one tile have the first one's function": Edit(
            "sm80/forward.cu", "score_step", "work.batch_head.head + heads.quotient", "work.batch_head.head"
        ),
        "queries of a further head are counted on": Edit("sm80/forward.cu", "score_step", "heads.remainder", "row"),
    },
    warps_that_share_elements_are_exact: {
        "elements that two warps hold are added twice": Edit(
            "sm80/backward.cu", "sm80_backward", "Scores::is_first_owner()); } else", "true); } else"
        ),
    },
    nothing_past_the_end_matters: {
        "queries past the end have a P": Edit(
            "attention/score_slopes.cuh", "score_to_p_and_ds",
            "is_seen && lse_2 != -ptx::negative_infinity<T>()",
            "is_seen",
        ),
    },
    sm90_is_exact: {
        "scores get no function": Edit(
            "sm90/forward.cu", "score_step", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "scores have the function of a later tile": Edit(
            "sm90/forward.cu", "prepare_tile_score",
            "shared().tile_infos[tile_info_index(num_tiles_done)]",
            "shared().tile_infos[tile_info_index(num_tiles_done + 1)]",
        ),
    },
    hopper_gradients_are_exact: {
        "a step has the keys of the first tile": Edit(
            "sm90/changed_weights.cuh", "positions_of_step", "{work.first, work.last}", "{0, work.last}"
        ),
        "a step has the queries of the first one": Edit(
            "sm90/changed_weights.cuh", "positions_of_step", "{message.block.start, message.block.stop}",
            "{0, message.block.stop}",
        ),
        "a slope that is constant is left out": Edit(
            "sm90/changed_weights.cuh", "apply_slopes_in", "df.at(i, j) * slopes.d0", "df.at(i, j)"
        ),
        "what keys have in common goes to a thread's first key": Edit(
            "sm90/changed_weights.cuh", "StepScore.flush", "score_.flush(of_tile_, of_key_[i],",
            "score_.flush(of_tile_, of_key_[0],",
        ),
        "running sums are not added": Edit(
            "sm90/changed_weights.cuh", "StepScore.flush", "score_.flush(sums.of_score);", ""
        ),
        "P of a masked step is kept": Edit(
            "sm90/backward_changed_scores.cuh", "make_changed_p", "clamp_and_mask<true>(s, queries);", ""
        ),
        "a hidden query has a P": Edit(
            "sm90/backward_changed_scores.cuh", "make_changed_p",
            "== -ptx::negative_infinity<float>()) s.at(i, j) = 0;",
            "== -ptx::negative_infinity<float>()) s.at(i, j) = s.at(i, j);",
        ),
        "dO of hidden queries is multiplied": Edit(
            "sm90/q_producer.cuh", "has_rows_to_zero", "if constexpr (kHasScore)", "if constexpr (false)"
        ),
        "exponents are scaled twice": Edit(
            "sm90/q_pipeline.cuh", "run_roles", "(kHasScore ? 1 : attention::kLog2E)", "attention::kLog2E"
        ),
    },
    printed_functions_are_exact: {
        "numbers are read a slot late": Edit(
            "planning/score_launches.py", "_values", "list(numbers[: program.num_numbers])",
            "list(numbers[1 : program.num_numbers]) + list(numbers[:1])",
        ),
        "leading axes are the batch's first": Edit(
            "compiler/score_text.py", "Printer._of_levels",
            'f"batch_extents + {extents - axes}, {member}_strides"',
            'f"batch_extents, {member}_strides"',
        ),
        "gradients are not zeroed": Edit(
            "executors/launch.py", "__call__", "self._target.set_zero(arrays[i])", "pass"
        ),
        "slopes of arrays are those of the score": Edit(
            "compiler/score_text.py", "Printer.part",
            'f"df * slopes.d{place + 1}"', 'f"df * slopes.d{place}"',
        ),
        "both kernels of two walks add gradients": Edit(
            "planning/score_launches.py", None, '_ADDING = ("gradient_scores", "backward", "backward_columns")',
            '_ADDING = ("gradient_scores", "backward_columns")',
        ),
    },
    exact_sums_are_right: {
        "a subnormal term lies a bit too high": Edit(
            "tile/exact_sum.cuh", "add", "exponent == 0 ? 0 : exponent - 1", "exponent"
        ),
        "a normal term lacks its first bit": Edit(
            "tile/exact_sum.cuh", "add", "static_cast<uint64_t>(exponent != 0)", "static_cast<uint64_t>(exponent == 0)"
        ),
        "negative terms are added": Edit("tile/exact_sum.cuh", "add_bits", "is_negative ? -value : value", "value"),
        "infinities are counted as NaN": Edit("tile/exact_sum.cuh", "add", "mantissa != 0 ? 0", "true ? 0"),
        "carries are lost": Edit(
            "tile/exact_sum.cuh", "for_digits", "sign * words[digit] + carry", "sign * words[digit]"
        ),
        "a negative sum is rounded by its low digits": Edit(
            "tile/exact_sum.cuh", "rounded", "carry_out(words, 1) < 0", "false"
        ),
    },
    repeatable_sums_are_right: {
        "sums hold what was there": Edit(
            "simt/captured_sums.cu", "simt_captured_sums", "static_cast<int*>(captured.sums)[n] = 0", "continue"
        ),
        "one part is the gradient": Edit(
            "simt/captured_sums.cu", "simt_captured_sums", "part < captured.num_parts", "part < 1"
        ),
        "exact sums are a word apart": Edit(
            "simt/captured_sums.cu", "simt_captured_sums", "Exact::kNumWords * n", "n"
        ),
    },
    repeatable_sums_are_planned: {
        "half of the words are set to 0": Edit(
            "planning/captured_sums.py", "with_captured_sums", "workspace.nbytes // _WORD", "workspace.nbytes // 8"
        ),
    },
}
