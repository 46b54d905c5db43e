"""Planted faults in the FP8 kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from cuflash.executors.launch import run_alone
from cuflash.executors.sim import Simulator
from cuflash.fp8.e4m3 import transposed_values
from cuflash.planning.quantizing import transpose_spec, transposing
from executors import SIM
from mutations.planting import Edit
from test_fp8_kernels import (
    NAN_BLOCKS, SCHEDULED, attention, beside_ties, on_simulator, operands, require_bits, require_bounds,
    require_nan_of_attended_blocks, require_nan_of_numbers, require_same_nan, require_tiny_scales, rising_scores,
    without_one_block,
)  # fmt: skip
from test_sm90 import FewBlocks

import cuflash
from cuflash import Rotation, masks, sim

SIGNS = (AssertionError, sim.SimulationError)  # exceptions with which a guard reports a fault


@cache
def quantised(seqlen: int, dim: int, dtype: str) -> tuple[Any, ...]:
    """Return operands with scales that differ from block to block, those of values by factors of 8 and 1.7."""
    x = operands(seqlen, seqlen, (dim, dim), (4, 2), dtype)
    x[1][:, :128] *= x[1].dtype.type(4)
    x[2] = np.abs(x[2])  # so that errors do not cancel
    x[2][:, 128:] *= np.array([8, 1.7], x[2].dtype)[:, None, None]
    return tuple(cuflash.quantize(each) for each in x)


def fp8_is_right() -> None:
    """Check a kernel with two warpgroups, a band and a sink, and one with one warpgroup and a list."""
    x8 = quantised(300, 64, "bfloat16")
    sink = np.float32([0.5, -1.0, 30.0, -np.inf])
    for named in ({"causal": True, "sink": sink}, {"window": (150, 3)}, {"scale": -0.3}, {"scale": 2.0}):
        require_bounds(attention(SIM, x8, **named), x8, **named)
    rising = rising_scores(512)
    require_bounds(attention(SIM, rising), rising)
    y8 = [replace(x, scale=np.repeat(x.scale, 2, axis=-1)[..., :5], block=64) for x in x8]
    mask = masks.Documents(np.repeat(np.arange(3), 100)) & masks.Causal() & without_one_block(300, 64)
    index = cuflash.BlockIndex.from_mask(mask, block=64, batch=(), num_heads=4, seqlen_q=300, seqlen_kv=300)
    require_bounds(attention(SIM, y8, mask=index), y8, mask=mask)


def fp8_is_scheduled_right() -> None:
    """Check that one block computing all tiles under hostile schedules gives the bits of one block per tile."""
    x8 = [cuflash.quantize(x, block=64) for x in operands(600, 600, (64, 64), (4, 2), "bfloat16")]
    for name in ("causal", "list"):
        right = attention(SIM, x8, **SCHEDULED[name])
        for copies, order in (("late", "priorities"), ("random", "first_warp")):
            schedule = sim.Schedule(seed=1, order=order, copies=copies, shuffle_lanes=True)
            with on_simulator(FewBlocks(schedule)):
                results = attention(SIM, x8, **SCHEDULED[name])
            np.testing.assert_array_equal(results[0].view(np.uint16), right[0].view(np.uint16))
            np.testing.assert_array_equal(results[1], right[1])


def nan_of_early_values_stays() -> None:
    """Check that a sum of values whose scale is NaN is added to O."""
    require_same_nan(SIM, 0, np.nan)


def nan_reaches_attended_keys_alone() -> None:
    """Check that blocks of keys that are NaN change no query that attends none of their keys."""
    for name in NAN_BLOCKS:
        require_nan_of_attended_blocks(SIM, name)


def masked_keys_have_no_weight_beside_tiny_scales() -> None:
    require_tiny_scales(SIM)


def nan_of_numbers_stays() -> None:
    """Check NaN with a finite scale in a step that skips the maximum."""
    require_nan_of_numbers(SIM, 300)


def rounding_is_right() -> None:
    """Check the bits for short last blocks, rotated rows, blocks with NaN or infinity, and values next to ties."""
    x = np.random.default_rng(0).standard_normal((4, 100, 64)).astype(np.float16)
    x[1, 70, 3] = np.nan
    x[2] = 0
    x[3, 50, 9] = np.inf
    rotation = Rotation(64, seed=2)
    require_bits(x, cuflash.quantize(x, block=32, rotate=rotation), 32, rotation, 448.0)
    require_bits(x, cuflash.quantize(x, block=32), 32, None, 448.0)
    require_bits(-abs(x), cuflash.quantize(-abs(x), block=32), 32, None, 448.0)  # also zeros with a sign
    x = x.astype(np.float32).clip(-1, 1) * np.float32(3.4e38)  # numbers with sums that overflow
    for largest in (448.0, 2.0**-9):
        require_bits(x, cuflash.quantize(x, block=32, rotate=rotation, largest=largest), 32, rotation, largest)
    # sums of the first warp's rows overflow
    x = np.broadcast_to(rotation.signs * np.float32(2.0**122), (1, 32, 64)) * (np.arange(32)[:, None] % 16 < 8)
    early = Simulator(sim.Schedule(order="first_warp"))
    require_bits(x, cuflash.quantize(x, block=32, rotate=rotation), 32, rotation, 448.0, early)
    for exponent in (0, -110):
        near = beside_ties(exponent)
        require_bits(near, cuflash.quantize(near, block=16, largest=256), 16, None, 256.0)


def transposition_is_right() -> None:
    """Check that values are transposed correctly for lengths that are not multiples of 128."""
    data = np.random.default_rng(0).integers(0, 256, (2, 150, 64), dtype=np.uint8)
    transposed = np.full((2, 64, 256), 0xA5, np.uint8)
    spec = transpose_spec(64)
    assert spec is not None
    arrays = {"data": data, "transposed": transposed}
    run_alone(transposing(spec, data.shape, transposed.shape[-1]), arrays, Simulator())
    np.testing.assert_array_equal(transposed, transposed_values(data))


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
            "if (Config::kIsQuantized && visit_range.start < visit_range.stop) "
            "visit_range.start -= visit_range.start % kBlockKv;",
            "",
        ),
        "V of all steps is that of the first": Edit(
            PIPELINE, "load_rows", "slot.full, 0, kIsTransposed ? first : 0)", "slot.full, 0, 0)"
        ),
        "a sum of values has the next one's scale": Edit(
            FORWARD, "store_scales", "is_first ? 0 : written.sum_scale}", "is_first ? 0 : value}"
        ),
        "weights leave out what their values' scale is beyond the sum's": Edit(
            FORWARD, "store_scales", "starts ? 0 : shift,", "0,"
        ),
        "sums of weights take it in": Edit(FORWARD, "store_scales", "starts ? 1 : ptx::exp2_approx(-shift)", "1"),
        "values of a step are added to a sum that has ended": Edit(
            FORWARD, "consume_tiles", ", p, group, num_k_blocks, ended_scale < 0,", ", p, group, num_k_blocks, true,"
        ),
        "O keeps its size as maxima rise": Edit(
            FORWARD, "rescale", "o.scale_row(i, factor[i]);", ""
        ),
        "sums of values keep their size as maxima rise": Edit(
            FORWARD, "rescale", "values.scale_row(i, factor[i]);", ""
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
    nan_of_early_values_stays: {
        "a sum with a scale of NaN is dropped": Edit(
            FORWARD, "consume_tiles", "if (!(ended_scale < 0)) add_scaled", "if (ended_scale >= 0) add_scaled"
        ),
    },
    nan_reaches_attended_keys_alone: {
        "masked scores are multiplied by a scale of NaN": Edit(
            FORWARD, "are_positive", "return __all_sync(0xffffffffu, is_positive);", "return scale[0] != 0;"
        ),
    },
    masked_keys_have_no_weight_beside_tiny_scales: {
        "masked scores are multiplied by a scale of 0": Edit(FORWARD, "apply_scale", "scale[i] = 1;", ""),
        "a scale of 0 is taken for positive": Edit(FORWARD, "are_positive", "scale[i] > 0", "scale[i] >= 0"),
    },
    nan_of_numbers_stays: {
        "NaN is 480 in scores that are computed again": Edit(
            FORWARD, "e4m3_to_float", "fabsf(x) > 448 ? __uint_as_float(0x7fc00000u) : x", "x"
        ),
    },
    fp8_is_scheduled_right: {
        "K comes without its scales": Edit(
            "sm90/kv_pipeline.cuh", "init_barriers", "kKOperands + Config::kIsQuantized", "kKOperands"
        ),
        "a tile is left before its scales are stored": Edit(
            "sm90/kv_pipeline.cuh", "init_barriers", "kStagesArray + Config::kIsQuantized)", "kStagesArray)"
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
            FORWARD, "consume_tiles", "().steps[stage];", "().steps[stage]; tile::arrive(shared().k[stage].empty);"
        ),
    },
    rounding_is_right: {
        "warps have maxima of their own": Edit(
            "fp8/quantize.cu", "block_maximum", "ptx::lane() < Config::kNumWarps ? of_warps[ptx::lane()] : 0",
            "of_warps[threadIdx.x / 32]",
        ),
        "sums are out of range": Edit("fp8/quantize.cu", "fp8_quantize", "largest < kInfinity || units > 1", "true"),
        "scales are in units": Edit("fp8/quantize.cu", "fp8_quantize", "= scale * units;", "= scale;"),
        "scales are infinite": Edit("fp8/quantize.cu", "fp8_quantize", "is_too_large ? most : divided", "divided"),
        "the scale of what is not finite is finite": Edit(
            "fp8/quantize.cu", "fp8_quantize", "divided > most && largest < kInfinity", "divided > most"
        ),
        "maxima are written while they are read": Edit(
            "fp8/quantize.cu", "fp8_quantize", "units = kLargeUnits; __syncthreads();", "units = kLargeUnits;"
        ),
        "differences of lanes have the wrong sign": Edit(
            "fp8/quantize.cu", "butterfly", "ptx::lane() & kLanes ? -1.0f : 1.0f", "ptx::lane() & kLanes ? 1.0f : -1.0f"
        ),
        "the chunks of a row do not meet": Edit(
            "fp8/quantize.cu", "butterfly", "kHalf < kChunk ? kHalf : kHalf / kLanesOfRow", "kHalf < kChunk ? kHalf : 1"
        ),
        "rows past the last are read": Edit(
            "fp8/quantize.cu", "LaneRows", "if (in_bounds(i)) packet", "packet"
        ),
        "all chunks have the signs of the first": Edit(
            "fp8/quantize.cu", "rotate", "signs + column_of(column, j)", "signs + column_of(column, j % kChunk)"
        ),
        "a lane's chunks are neighbours": Edit(
            "fp8/quantize.cu", "LaneRows", "array.data + offset(i) + column_of(0, j)", "array.data + offset(i) + j"
        ),
        "the first difference is a sum": Edit(
            "fp8/quantize.cu", "rotate", "upper, -sign, lower", "upper, sign, lower"
        ),
        "zeros lose their signs": Edit(
            "fp8/quantize.cu", "quotient",
            "excess = ptx::fma(near, divisor_, -x); return ptx::fma(-excess, reciprocal_, near);",
            "rest = ptx::fma(-near, divisor_, x); return ptx::fma(rest, reciprocal_, near);",
        ),
        "padding is not written": Edit(
            "fp8/quantize.cu", "LaneRows", "if (array.transposed != nullptr)",
            "if (array.transposed != nullptr && in_bounds(i))",
        ),
        "columns are read before they are written": Edit(
            "fp8/quantize.cu", "fp8_quantize", "__syncthreads(); const int64_t padded_rows", "const int64_t padded_rows"
        ),
        "quotients are not corrected by their remainder": Edit(
            "fp8/quantize.cu", "quotient", "return ptx::fma(-excess, reciprocal_, near);", "return near;"
        ),
        "small scales have no exact remainder": Edit(
            "fp8/quantize.cu", "fp8_quantize", "scale >= kLeastDivisor && scale <=", "scale <="
        ),
        "infinite scales have a reciprocal": Edit(
            "fp8/quantize.cu", "fp8_quantize", ">= kLeastDivisor && scale <= kMostDivisor", ">= kLeastDivisor"
        ),
    },
    transposition_is_right: {
        "keys keep their order": Edit(
            "fp8/transposed_words.cuh", "KeyRows", "2 * t + e / 2 * 8 + e % 2", "4 * t + e"
        ),
        "bytes of two columns are exchanged": Edit(
            "fp8/transposed_words.cuh", "KeyRows", "from[2 * pair + 1], 0x7362", "from[2 * pair + 1], 0x3762"
        ),
        "keys past the last are not zeros": Edit(
            "fp8/transpose.cu", "fp8_transpose", "first_key + key < params.num_rows", "true"
        ),
    },
}
