"""Faults in the kernels for 8 bits."""

from __future__ import annotations

from mutations.fp8_guards import fp8_is_right, fp8_is_scheduled_right, rounding_is_right, transposition_is_right
from mutations.planting import Edit

FORWARD, SOFTMAX, PIPELINE = "sm90/forward_fp8.cu", "attention/softmax_fp8.cuh", "sm90/kv_producer.cuh"
FAULTS = {
    fp8_is_right: {
        "K's scale is V's": Edit(
            FORWARD, "store_scales", "written.steps[stage] = {key,", "written.steps[stage] = {value,"
        ),
        "scales of V are those of the first head": Edit(
            FORWARD, "read_scales", "scales_of_head(scales.v_scale, tile_info.work.batch_head, tile_info.kv_head)",
            "scales_of_head(scales.v_scale, tile_info.work.batch_head, 0)",
        ),
        "windows begin in the middle of a scale": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles",
            "if (config::kIsQuantized && visit_range.start < visit_range.stop) "
            "visit_range.start -= visit_range.start % kBlockKv;",
            "",
        ),
        "V of all steps is that of the first": Edit(
            PIPELINE, "load_operand", "slot.full, 0, kIsTransposed ? first : 0)", "slot.full, 0, 0)"
        ),
        "a sum of values has the next one's scale": Edit(
            FORWARD, "store_scales", "is_first ? 0 : written.sum_scale}", "is_first ? 0 : value}"
        ),
        "weights leave out what their values' scale is beyond the sum's": Edit(
            FORWARD, "store_scales", "starts ? 0 : shift,", "0,"
        ),
        "sums of weights take it in": Edit(FORWARD, "store_scales", "starts ? 1 : ptx::exp2_approx(-shift)", "1"),
        "values of a step are added to a sum that has ended": Edit(
            FORWARD, "consume_tiles", "next.start(s, values, p, group, num_k_blocks, ended_scale < 0,",
            "next.start(s, values, p, group, num_k_blocks, true,",
        ),
        "O keeps its size as maxima rise": Edit(
            FORWARD, "consume_tiles", "o.scale_row(i, factor[i]);", ""
        ),
        "sums of values keep their size as maxima rise": Edit(
            FORWARD, "consume_tiles", "values.scale_row(i, factor[i]);", ""
        ),
        "weights exceed e4m3": Edit(SOFTMAX, "QuantizedSoftmax", "kMaxRise = 2", "kMaxRise = 60"),
        "scores of infinite weights are not made again": Edit(
            FORWARD, "consume_tiles", "if (is_plain) recompute_scores(s, num_tiles_done, num_k_blocks);", ""
        ),
        "maxima rise without the weights": Edit(SOFTMAX, "lower_weights", "s.at(i, j) *= factor[i];", ""),
        "lse has the weights' exponent": Edit(
            SOFTMAX, "finalize", "row_max[i] - kWeightExponent", "row_max[i]"
        ),
        "all rows have the first row's scale": Edit(
            FORWARD, "read_row_scales", "scales.q_scale, row, scales.q_rows", "scales.q_scale, 0, scales.q_rows",
        ),
    },
    fp8_is_scheduled_right: {
        "K comes without its scales": Edit(
            "sm90/kv_pipeline.cuh", "init_barriers", "(config::kIsQuantized && is_k)", "false"
        ),
        "a tile is left before its scales are stored": Edit(
            "sm90/kv_pipeline.cuh", "init_barriers", "kStagesArray + config::kIsQuantized)", "kStagesArray)"
        ),
        "scales are stored in a slot that is not empty": Edit(
            PIPELINE, "write_scales", "wait_slot_empty(k, phase_of(num_k_blocks));", ""
        ),
        "Q is left before the scores are made": Edit(
            FORWARD, "consume_tiles",
            "read_row_scales(scales, num_tiles_done); flags",
            "read_row_scales(scales, num_tiles_done); "
            "tile::arrive(shared().q[q_stage_of(num_tiles_done)].empty); flags",
        ),
        "V is left before it is multiplied": Edit(
            FORWARD, "consume_tiles",
            "tile::wait_wgmma<0>(values); if (flags & StepMessage::kValuesPending) "
            "tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);",
            "if (flags & StepMessage::kValuesPending) tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty); "
            "tile::wait_wgmma<0>(values);",
        ),
        "products start before their operands have arrived": Edit(
            FORWARD, "arrival_flag",
            "has_v = tile::try_wait_full(shared().v[stage_of(num_k_blocks - 1)], phase_of(num_k_blocks - 1))",
            "has_v = true",
        ),
        "the room of O is written while the last O leaves it": Edit(
            "sm90/forward_fp8_epilogue.cuh", "stage_and_store", "ptx::bulk_wait_read<0>();", ""
        ),
        "a tile's scores have the scales of the one before": Edit(
            FORWARD, "consume_tiles", "if (has_scores) read_row_scales(scales, num_tiles_done + 1);", ""
        ),
        "scales of a step are read after the next one's are written": Edit(
            FORWARD, "consume_tiles", "const StepScales::Step& step = step_scales().steps[stage];",
            "const StepScales::Step& step = step_scales().steps[stage]; tile::arrive(shared().k[stage].empty);",
        ),
    },
    rounding_is_right: {
        "warps have maxima of their own": Edit(
            "fp8/quantize.cu", "block_maximum", "ptx::lane() < config::kNumWarps ? of_warps[ptx::lane()] : 0",
            "of_warps[threadIdx.x / 32]",
        ),
        "sums are out of range": Edit(
            "fp8/quantize.cu", "fp8_quantize", "block_maximum(x, of_warps) >= kLarge", "false"
        ),
        "scales are in units": Edit("fp8/quantize.cu", "fp8_quantize", "= scale * units;", "= scale;"),
        "scales are infinite": Edit("fp8/quantize.cu", "fp8_quantize", "is_too_large ? most : divided", "divided"),
        "the scale of what is not finite is finite": Edit(
            "fp8/quantize.cu", "fp8_quantize", "divided > most && largest < 0x7f800000u", "divided > most"
        ),
        "maxima are read before they are written": Edit(
            "fp8/quantize.cu", "fp8_quantize", "units = kLargeUnits; __syncthreads();", "units = kLargeUnits;"
        ),
        "differences of lanes have the wrong sign": Edit(
            "fp8/quantize.cu", "butterfly", "ptx::lane() & kLanes ? -1.0f : 1.0f", "ptx::lane() & kLanes ? 1.0f : -1.0f"
        ),
        "the halves of a row do not meet": Edit(
            "fp8/quantize.cu", "butterfly", "kHalf < kChunk || kHalf == kChunkStride", "kHalf < kChunk"
        ),
        "rows past the last are read": Edit(
            "fp8/quantize.cu", "fp8_quantize", "if (row < params.num_rows) packet", "packet"
        ),
        "both chunks have the signs of the first": Edit(
            "fp8/quantize.cu", "fp8_quantize", "column + j / kChunk * kChunkStride + j % kChunk",
            "column + j % kChunk",
        ),
        "a lane's chunks are neighbours": Edit(
            "fp8/quantize.cu", "store_rows", "data + chunk * kChunkStride", "data + chunk * kChunk"
        ),
        "quotients are not corrected by their remainder": Edit(
            "fp8/quantize.cu", "quotient", "return ptx::fma(remainder, reciprocal_, near);", "return near;"
        ),
        "small scales have no exact remainder": Edit(
            "fp8/quantize.cu", "fp8_quantize", "scale >= kLeastDivisor && scale <= kMostDivisor",
            "scale <= kMostDivisor",
        ),
        "infinite scales have a reciprocal": Edit(
            "fp8/quantize.cu", "fp8_quantize", "scale >= kLeastDivisor && scale <= kMostDivisor",
            "scale >= kLeastDivisor",
        ),
    },
    transposition_is_right: {
        "keys keep their order": Edit(
            "fp8/transpose.cu", "fp8_transpose", "2 * t + e / 2 * 8 + e % 2", "4 * t + e"
        ),
        "keys past the last are not zeros": Edit(
            "fp8/transpose.cu", "fp8_transpose", "first_key + key < params.num_rows", "true"
        ),
    },
}
