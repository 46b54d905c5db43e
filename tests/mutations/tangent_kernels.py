"""Planted faults in kernels that compute tangents."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from unittest.mock import patch

import numpy as np
import test_tangent_kernels as checks
from cuflash import masks, sim
from cuflash.executors import sim as simulated
from cuflash.executors.sim import Simulator
from cuflash.testing import Structure
from cuflash.testing.tangents import Moving
from executors import SIM, Run
from mutations.planting import Edit

SIGNS = (AssertionError, sim.SimulationError)  # exceptions by which guards see a fault
SIMT, SM80, SM90 = (replace(SIM, kernel=kernel) for kernel in ("simt", "sm80", "sm90"))
PLAIN = replace(checks.FULL, dropout=None, sink=None)


def _tangents_are_right(run: Run, dtype: str) -> None:
    """Check tangents of all and of some arrays, with masks that leave rows without keys, lists, and several steps."""
    listed = replace(PLAIN, mask=masks.BlockPattern(np.array([[1, 0, 1], [0, 1, 1]], bool), (64, 64)))
    for structure in (PLAIN, listed):
        example = replace(structure, dtype=dtype).example()
        for names in ("qkv", "v"):
            checks.check(run, checks.moved_along(example, dict.fromkeys(names, "normal"), layout="padded"))
    example = Structure(seqlen_q=50, seqlen_kv=700, head_dim=20, value_dim=12, dtype=dtype).example()
    later = np.where(np.arange(700)[:, None] < 300, 0 * example.k, example.k.dtype.type(4))
    checks.check(run, Moving(example, {"k": later}))
    if dtype == "float32":
        checks.test_rows_without_a_key_have_tangents_of_zero(run)


def simt_is_right() -> None:
    for order in ("round_robin", "random"):
        with patch.object(simulated, "_SIMULATOR", Simulator(sim.Schedule(seed=1, order=order))):
            _tangents_are_right(SIMT, "float32")
    checks.test_a_drift_that_all_keys_share_costs_no_digits(SIMT)
    checks.test_nan_and_infinities_reach_what_they_should(SIMT)


def sm80_is_right() -> None:
    """Check under schedules with late copies."""
    for schedule in (sim.Schedule(copies="late"), sim.Schedule(seed=1, order="random", copies="random")):
        with patch.object(simulated, "_SIMULATOR", Simulator(schedule)):
            _tangents_are_right(SM80, "float16")
            checks.check(SM80, checks.moved_along(replace(checks.FULL, dtype="float16").example(), checks.EVERY))


def sm90_is_right() -> None:
    """Check under schedules in which copies land late."""
    every = checks.moved_along(checks.HOPPER.example(), checks.EVERY)
    listed = replace(checks.HOPPER, sink=None, mask=checks.HOPPER_MASKS["list"]).example()
    few = replace(checks.HOPPER, sink=None, mask=checks.HOPPER_MASKS["few keys"]).example()
    for schedule in (sim.Schedule(copies="late"), sim.Schedule(seed=1, order="random", copies="random")):
        with patch.object(simulated, "_SIMULATOR", Simulator(schedule)):
            checks.check(SM90, every)
            for names in ("v", "k"):
                checks.check(SM90, checks.moved_along(listed, dict.fromkeys(names, "normal"), layout="padded"))
            checks.check(SM90, checks.moved_along(few, checks.QKV))
    checks.test_sm90_takes_axes_that_do_not_fold_and_tangents_that_are_repeated(SM90)
    checks.test_sm90_ignores_tangents_of_absent_keys(SM90, checks.push)


def second_derivatives_are_right() -> None:
    """Check tangents of all and of some arrays, with every feature, and rows without a key."""
    example = checks.FULL.example()
    every = checks.EVERY | {"do": "normal", "dlse": "normal"}
    for order in ("round_robin", "random"):
        with patch.object(simulated, "_SIMULATOR", Simulator(sim.Schedule(seed=1, order=order))):
            checks.check_gradients(SIMT, checks.moved_along(example, every))
    for names in ("v", ("k", "sink"), ("q", "do")):
        checks.check_gradients(SIMT, checks.moved_along(example, {name: every[name] for name in names}))
    checks.test_rows_without_a_key_have_no_second_derivative(SIMT)


def sm90_has_second_derivatives() -> None:
    """Check under schedules in which copies land late."""
    every = checks.moved_along(checks.HOPPER.example(), checks.EVERY | {"do": "normal"})
    masked = replace(checks.HOPPER, sink=None)
    few, listed = (replace(masked, mask=checks.HOPPER_MASKS[name]).example() for name in ("few keys", "list"))
    for schedule in (sim.Schedule(copies="late"), sim.Schedule(seed=1, order="random", copies="random")):
        with patch.object(simulated, "_SIMULATOR", Simulator(schedule)):
            checks.check_gradients(SM90, every)
            for example in (few, listed):
                checks.check_gradients(SM90, checks.moved_along(example, checks.QKV))
    checks.test_sm90_pulls_tangents_back_along_axes_that_do_not_fold(SM90)
    checks.test_sm90_ignores_tangents_of_absent_keys(SM90, checks.pull)
    checks.test_sm90_rows_without_a_key_have_no_second_derivative(SM90)


def scores_have_second_derivatives() -> None:
    checks.test_tangents_of_gradients_have_every_feature(SIMT, "float64")


def every_feature_is_right() -> None:
    """Check a score function with arrays, a sink and dropout."""
    checks.test_every_feature_at_once_is_within_its_bounds(SIMT, "float32")
    example = checks.FULL.example()
    checks.check(SIMT, checks.moved_along(example, checks.EVERY))
    for dtype in ("float16", "float64"):
        moving = checks.moved_along(example.but(sink=example.sink.astype(dtype)), {"sink": "normal"})
        checks.check(SIMT, moving)


def plans_are_right(library: ModuleType) -> None:
    """Check the kernels that a copy of the library plans for tangents of some arrays and of others."""
    # Fewer tangents would leave room for a taller tile of 96 columns of float64.
    x, device = library.ShapeDtype((8, 1000, 96), np.dtype(np.float64)), library.DeviceSpec.gpu("H100")
    moved = library.scores.Score(lambda s, b, h, i, j, slopes: s + slopes[h], slopes=library.ShapeDtype((8,), x.dtype))
    specs = []
    for names in ("v", ("q", "k", "v"), ("slopes",)):
        plan = library.plan(x, x, x, device=device, score=moved, tangents=names)._plan
        specs.append(plan.specs["jvp"])
        other = plan.pass_of("jvp", ["q", "k", "v", "o", "lse", "score.slopes", "k.dot"]).launches["jvp"]
        assert other.spec.tangents == ("k",) and "k.dot" in other.reads and "v.dot" not in other.reads
    assert len({(spec.block_q, spec.block_kv) for spec in specs}) == 1
    assert [spec.tangents for spec in specs] == [("v",), ("q", "k", "v"), ("score",)]
    assert [len(spec.score.arrays) for spec in specs] == [1, 1, 2]
    half = library.ShapeDtype((8, 1000, 64), np.dtype(np.float16))
    kernels = library.plan(half, half, half, device=device, kernel="sm90")._plan.pass_of("backward_jvp", ["k.dot"])
    assert kernels.boxes == tuple(launch.boxes for launch in kernels.launches.values() if launch.boxes)


WEIGHTS, GRADIENTS = "attention/tangent_weights.cuh", "attention/gradient_tangents.cuh"
JVP, MMA, PRODUCTS = "simt/jvp.cu", "sm80/jvp.cu", "sm80/tangent_tiles.cuh"
WGMMA, PRODUCER, PIPELINE = "sm90/jvp.cu", "sm90/kv_producer.cuh", "sm90/tangent_pipeline.cuh"
HOPPER_PRODUCTS = "sm90/tangent_products.cuh"
HOPPER_ROWS, HOPPER_COLUMNS = "sm90/backward_jvp_rows.cu", "sm90/backward_jvp_columns.cu"
ROWS, COLUMNS = "simt/backward_jvp_rows.cu", "simt/backward_jvp_columns.cu"
FAULTS = {
    simt_is_right: {
        "k's tangent moves no score": Edit(JVP, "simt_jvp", "tile::gemm_add_nt(s_dot, q_smem, k_smem);", ""),
        "q's tangent moves no score": Edit(JVP, "simt_jvp", "tile::gemm_add_nt(s_dot, q_dot_smem, k_smem);", ""),
        "k's tangent is read with k's strides": Edit(
            JVP, "simt_jvp", "of_keys(tangents.k_dot, shape.head_dim)", "of_keys(params.k, shape.head_dim)"
        ),
        "k's tangent has the head of the query": Edit(
            JVP, "simt_jvp", "batch_head, kv_head, shape.seqlen_kv,", "batch_head, head, shape.seqlen_kv,"
        ),
        "values do not move": Edit(JVP, "simt_jvp", "if constexpr (Config::kHasVDot) {", "if constexpr (false) {"),
        "weights of values' tangents are those of scores'": Edit(
            JVP, "simt_jvp", "tile::store(p_smem, s);", "tile::store(p_smem, s_dot);"
        ),
        "K is overwritten before it is read": Edit(
            JVP, "simt_jvp", "if constexpr (Config::kHasKDot) { __syncthreads();", "if constexpr (Config::kHasKDot) {"
        ),
        "the tangent of K is read before it is there": Edit(
            JVP, "simt_jvp", "__syncthreads(); tile::gemm_add_nt(s_dot, q_smem", "tile::gemm_add_nt(s_dot, q_smem"
        ),
        "V overwrites the tangent of K": Edit(
            JVP, "simt_jvp", "if constexpr (kMovesScores) { __syncthreads();", "if constexpr (kMovesScores) {"
        ),
        "the tangent of V overwrites V": Edit(
            JVP, "simt_jvp", "if constexpr (Config::kHasVDot) { __syncthreads();", "if constexpr (Config::kHasVDot) {"
        ),
        "K overwrites the tangent of V": Edit(
            JVP, "simt_jvp", "blocks.next(block);) { __syncthreads();", "blocks.next(block);) {"
        ),
        "lse_dot of the last row is lost": Edit(
            JVP, "write_results", "is_row_leader() && in_bounds)", "is_row_leader() && row < lse.num_rows - 1)"
        ),
        "tangents of scores are not scaled": Edit(
            JVP, "update", "kHasScore ? Accumulator(1) : scale,", "Accumulator(1),"
        ),
        "scores are not masked": Edit(
            JVP, "update", "[&](int i, int j) { return mask.allows(i, j); }", "[&](int i, int j) { return true; }"
        ),
        "o does not move with the mean": Edit(WEIGHTS, "o_dot", "ptx::fma(-rise, o, products)", "products"),
        "lse moves relative to the center": Edit(WEIGHTS, "row_result", "T(0) : center + rise", "T(0) : rise"),
        "the center changes in later steps": Edit(
            WEIGHTS, "find_centers", "if (has_key >> i & 1 || count", "if (count"
        ),
        "tangents are relative to nothing": Edit(
            WEIGHTS, "find_centers", "center[i] = total / count;", ""
        ),
        "the center has masked keys": Edit(
            WEIGHTS, "find_centers", "if (!is_seen(i, j)) continue;", ""
        ),
        "all rows of a thread have the first one's center": Edit(
            WEIGHTS, "weights_and_tangents", "scale, -rows.center[i])", "scale, -rows.center[0])"
        ),
        "a row has the keys of its first thread": Edit(
            WEIGHTS, "find_centers", "total = row_sum(total);", "total = total * 8;"
        ),
        "w is not summed": Edit(WEIGHTS, "weights_and_tangents", "rows.sum[i] += w;", ""),
        "rows without a key move": Edit(WEIGHTS, "row_result", "is_empty || !has_key", "is_empty"),
        "a row of -inf moves": Edit(WEIGHTS, "row_result", "is_empty ? T(0) : center", "false ? T(0) : center"),
        "hidden keys move": Edit(
            WEIGHTS, "weights_and_tangents", "if (!is_seen(i, j)) element(s_dot, i, j) = 0;", ";"
        ),
    },
    every_feature_is_right: {
        "the sink does not move": Edit(
            WEIGHTS, "row_result", "Config::kHasSinkDot ? of_head", "false ? of_head"
        ),
        "the sink's tangent is the sink": Edit(WEIGHTS, "row_result", "(tangents.sink_dot,", "(sink.sink,"),
        "the sink is taken relative to nothing": Edit(
            WEIGHTS, "row_result", "* (logit_dot - center)", "* logit_dot"
        ),
        "all heads have the first one's sink": Edit(
            WEIGHTS, "row_result", "sink_logit<T>(sink, batch_head, head)", "sink_logit<T>(sink, batch_head, 0)"
        ),
        "dropped weights move": Edit(JVP, "simt_jvp", "drop_weights(s_dot, kept);", ";"),
        "dropped weights carry values' tangents": Edit(JVP, "simt_jvp", "drop_weights(s, kept);", ""),
        "kept weights are not scaled": Edit(JVP, "write_results", "o_dot.scale_row(i, dropout.factor);", ";"),
        "the score function takes no tangent": Edit(
            WEIGHTS, "score_tangent", "moved, s_dot * scale)", "moved, s_dot * T(0))"
        ),
        "the score's tangent is not scaled": Edit(WEIGHTS, "score_tangent", "s_dot * scale", "s_dot"),
    },
    sm80_is_right: {
        "K is read before it is there": Edit(
            MMA, "sm80_jvp", "ptx::cp_async_wait<0>(); __syncthreads(); load_v(", "load_v("
        ),
        "V is read before it is there": Edit(
            MMA, "sm80_jvp", "ptx::cp_async_wait<0>(); __syncthreads(); has_block =", "has_block ="
        ),
        "K is overwritten before it is read": Edit(
            MMA, "sm80_jvp", "__syncthreads(); has_block =", "has_block ="
        ),
        "k's tangent moves no score": Edit(
            PRODUCTS, "multiply_with_tangents", "if constexpr (HasBDot) tile", "if constexpr (false) tile"
        ),
        "q's tangent is q": Edit(PRODUCTS, "multiply_with_tangents", "left_k_major(a_dot,", "left_k_major(a,"),
        "without q's tangent scores begin with others": Edit(
            PRODUCTS, "multiply_with_tangents", "step == 0 && !HasADot", "false"
        ),
        "k's tangent has the strides of k": Edit(
            MMA, "load_k", "state.k_dot, tangents.k_dot, columns", "state.k_dot, params.k, columns"
        ),
        "v's tangent is v": Edit(MMA, "save_state", "start(VTile{0}, tangents.v_dot,", "start(VTile{0}, params.v,"),
        "weights of values' tangents are those of scores'": Edit(
            MMA, "sm80_jvp", "gemm_add_nn(o_dot, s, v_dot_smem)", "gemm_add_nn(o_dot, s_dot, v_dot_smem)"
        ),
        "scores are not masked": Edit(
            MMA, "update", "mask_scores<Config::kIsListed>(s, params, state.work, block, masked_score());", ""
        ),
        "steps are not the next ones": Edit(MMA, "sm80_jvp", "block = next_block;", ""),
        "dropped weights move": Edit(MMA, "drop_step", "drop_weights(s_dot, kept);", ";"),
        "kept weights are not scaled": Edit(MMA, "write_results", "o_dot.scale(dropout.single_factor);", ";"),
    },
    sm90_is_right: {
        "k's tangent moves no score": Edit(
            HOPPER_PRODUCTS, "start_with_tangents", "tile::start_gemm_add_nt(c_dot, left, Right(b_dot));", ";"
        ),
        "q's tangent is q": Edit(
            HOPPER_PRODUCTS, "start_with_tangents", "Left(a_dot, first_row), right", "left, right"
        ),
        "both warpgroups have the same queries' tangents": Edit(
            HOPPER_PRODUCTS, "start_with_tangents", "Left(a_dot, first_row)", "Left(a_dot)"
        ),
        "values do not move": Edit(
            WGMMA, "add_values", "if constexpr (Config::kHasVDot) tile", "if constexpr (false) tile"
        ),
        "v's tangent is v": Edit(WGMMA, "add_values", "V(v_dot_smem(stage))", "V(v_smem(stage))"),
        "V is read before it is there": Edit(
            WGMMA, "add_values", "tile::wait_full(shared().v[stage], phase);", ""
        ),
        "K is released before it is read": Edit(
            WGMMA, "process_tile", "start_scores(s, s_dot, group, stage);",
            "tile::arrive(smem.k[stage].empty); start_scores(s, s_dot, group, stage);"
        ),
        "Q is released after the first step": Edit(
            WGMMA, "process_tile", "if (flags & StepMessage::kLastForWarpgroup) tile::arrive(smem.q[0].empty);",
            "tile::arrive(smem.q[0].empty);"
        ),
        "scores are not masked": Edit(
            WGMMA, "update", "mask_block(params, s, tile_info, message, chosen);", ""
        ),
        "a warpgroup sees keys past its last": Edit(
            PIPELINE, "visit_steps", "is_done = flags & StepMessage::kLastForWarpgroup;",
            "is_done = flags & (StepMessage::kLastForWarpgroup | StepMessage::kUnmasked);"
        ),
        "lse_dot of the last row is lost": Edit(
            WGMMA, "write_results", "== 0 && in_bounds) lse_dot", "== 0 && row < lse_dot.num_rows - 1) lse_dot"
        ),
        "queries without a key are not written": Edit(
            WGMMA, "write_empty_rows", "row < work.last; ++row", "row < work.first; ++row"
        ),
        "k's tangent is copied as k lies": Edit(
            PRODUCER, "load_dot", "tma_coords(matrices, batch_head,", "tma_coords(params.k, batch_head,"
        ),
        "k's tangent has the head of the query": Edit(
            PRODUCER, "load_dot", "is_of_queries ? batch_head.head : tile_info.kv_head", "batch_head.head"
        ),
        "rows of v's tangent past a step are left": Edit(
            PRODUCER, "load_values", "block.start, block.stop, zero_fills);", "block.start, block.stop, false);"
        ),
    },
    second_derivatives_are_right: {
        "delta does not move with o": Edit(
            GRADIENTS, "store_query_tangents", "delta_dot += of_do * tile::to_accumulator(o_dot.at(query, column));", ""
        ),
        "delta does not move with do": Edit(
            GRADIENTS, "store_query_tangents", "tile::to_accumulator(do_dot.at(query, column)) * of_o", "0"
        ),
        "dlse does not move": Edit(GRADIENTS, "store_query_tangents", "delta_dot -= dlse_dot;", ""),
        "the sink's gradient does not move with the sink": Edit(
            GRADIENTS, "store_query_tangents", "(logit_dot - lse_dot) * delta + delta_dot", "delta_dot"
        ),
        "do_dot of rows without keys counts": Edit(
            GRADIENTS, "store_query_tangents", "lse == logit && has_o == 0", "false"
        ),
        "P_dot is relative to nothing": Edit(GRADIENTS, "gradient_tangents", "T(0)) - row.lse_dot)", "T(0)))"),
        "dF does not move with P": Edit(
            GRADIENTS, "gradient_tangents", "ptx::fma(p_dot, gap, p * gap_dot)", "p * gap_dot"
        ),
        "masked keys move": Edit(GRADIENTS, "gradient_tangents", "is_allowed(i, j) && row.lse_2", "row.lse_2"),
        "dP does not move with v": Edit(
            ROWS, "simt_backward_jvp_rows", "tile::gemm_add_nt(dp_dot, do_smem, v_smem);", ""
        ),
        "dP does not move with do": Edit(
            ROWS, "simt_backward_jvp_rows", "tile::gemm_add_nt(dp_dot, do_dot_smem, v_smem);", ";"
        ),
        "dQ leaves k's tangent out": Edit(
            ROWS, "simt_backward_jvp_rows", "__syncthreads(); tile::gemm_add_nn(dq, ds_smem, k_smem); } }", "} }"
        ),
        "dP_dot is not dropped": Edit(
            ROWS, "differentiate", "drop_gradients(dp_dot, kept,", "if (false) drop_gradients(dp_dot, kept,"
        ),
        "the tile is overwritten before it is read": Edit(
            ROWS, "simt_backward_jvp_rows", "{ __syncthreads(); tile::load(to,", "{ tile::load(to,"
        ),
        "dS_dot is read before it is there": Edit(
            ROWS, "simt_backward_jvp_rows", "(ds_smem, dp_dot); __syncthreads();", "(ds_smem, dp_dot);"
        ),
        "dq is not scaled": Edit(ROWS, "simt_backward_jvp_rows", "dq.scale(shape.softmax_scale);", ""),
        "dK leaves q's tangent out": Edit(COLUMNS, "simt_backward_jvp_columns", "tile::store(tiles.p, dp);", ""),
        "dV leaves do's tangent out": Edit(COLUMNS, "simt_backward_jvp_columns", "tile::store(tiles.p, s);", ""),
        "P_dot is not dropped in dV": Edit(COLUMNS, "differentiate", "drop_weights(s_dot, kept);", ";"),
        "dO is overwritten before it is read": Edit(
            COLUMNS, "simt_backward_jvp_columns", "{ __syncthreads(); tile::load(tiles.d_o,", "{ tile::load(tiles.d_o,"
        ),
        "one head of a group gives dk and dv": Edit(
            COLUMNS, "simt_backward_jvp_columns", "head < first_head + shape.group_size", "head < first_head + 1"
        ),
    },
    sm90_has_second_derivatives: {
        "dP does not move with do": Edit(
            HOPPER_ROWS, "process_step", "do_dot_smem(0), v_smem(stage)", "do_smem(0), v_smem(stage)"
        ),
        "dQ leaves k's tangent out": Edit(
            HOPPER_ROWS, "process_step", "start_gemm_add_nn(dq, ds, tile::MnMajor<SmemK>(k_dot_smem(stage)));",
            "start_gemm_add_nn(dq, ds, tile::MnMajor<SmemK>(k_smem(stage)));"
        ),
        "dQ has dS in place of its tangent": Edit(HOPPER_ROWS, "process_step", "ds_dot = dp_dot;", "ds_dot = dp;"),
        "V is read before it arrives": Edit(
            HOPPER_ROWS, "process_step", "tile::wait_full(smem.v[stage], phase);", ""
        ),
        "K is released before the last product": Edit(
            HOPPER_ROWS, "process_step", "Weights ds_dot, ds;", "tile::arrive(smem.k[stage].empty); Weights ds_dot, ds;"
        ),
        "dO is released after the first step": Edit(
            HOPPER_ROWS, "process_step", "if (flags & StepMessage::kLastForWarpgroup) tile::arrive(smem.q[0].empty);",
            "tile::arrive(smem.q[0].empty);"
        ),
        "scores are not masked": Edit(
            HOPPER_ROWS, "process_step", "mask_block(params, s, tile_info, message, chosen);", ""
        ),
        "all rows have the first one's statistics": Edit(HOPPER_ROWS, "differentiate", "rows[i]", "rows[0]"),
        "dq is not scaled": Edit(HOPPER_ROWS, "consume", "dq.scale(params.shape.softmax_scale);", ""),
        "queries without a key are not written": Edit(
            HOPPER_ROWS, "write_empty_rows",
            "GradientEpilogue<Config>::clear_rows(params.dq, work, work.batch_head.head, params.shape.head_dim);", ""
        ),
        "do's tangent has the head of the keys": Edit(
            PRODUCER, "load_dot", "kOperand == kQ || kOperand == kDo;", "kOperand == kQ;"
        ),
        "do's tangent is copied as do lies": Edit(
            PRODUCER, "load_dot", "kOperand == kDo ? dots.arrays.do_dot", "kOperand == kDo ? params.do_"
        ),
        "rows of k's tangent past a step are left": Edit(
            PRODUCER, "load_keys", "block.start, block.stop, zero_fills);", "block.start, block.stop, false);"
        ),
        "dK leaves q's tangent out": Edit(
            HOPPER_COLUMNS, "process_step", "Q(q_dot_smem(stage))", "Q(q_smem(stage))"
        ),
        "dV leaves do's tangent out": Edit(
            HOPPER_COLUMNS, "process_step", "Do(do_dot_smem(stage))", "Do(do_smem(stage))"
        ),
        "scores of keys are not masked": Edit(
            HOPPER_COLUMNS, "process_step", "attention::mask_scores_of_keys(s, params, work, message.block);", ""
        ),
        "a step's slot is released before it is read": Edit(
            HOPPER_COLUMNS, "process_step", "Weights p, p_dot, ds, ds_dot;",
            "tile::arrive(shared().queries[stage].empty); Weights p, p_dot, ds, ds_dot;"
        ),
        "keys are read before they arrive": Edit(
            HOPPER_COLUMNS, "consume", "tile::wait_full(shared().keys, 0);", ""
        ),
        "both warpgroups have the same keys": Edit(
            HOPPER_COLUMNS, "consume", "first_row = 64 * (group % kNumConsumers);", "first_row = 0;"
        ),
        "dk is not scaled": Edit(HOPPER_COLUMNS, "consume", "dk.scale(params.shape.softmax_scale);", ""),
        "one head of a group gives dk and dv": Edit(
            HOPPER_COLUMNS, "produce", "head < first_head + params.shape.group_size", "head < first_head + 1"
        ),
        "do of queries without a key is read": Edit(
            HOPPER_COLUMNS, "load_step", "__any_sync(0xffffffffu, has_empty_rows) || is_cut", "is_cut"
        ),
    },
    scores_have_second_derivatives: {
        "slopes do not move": Edit(
            GRADIENTS, "gradient_tangents", "ptx::fma(df_dot, slope, df * slope_dot)", "df_dot * slope"
        ),
        "gradients of scores are those of final scores": Edit(
            GRADIENTS, "gradient_tangents", "element(dp, i, j) = df * slope;", "element(dp, i, j) = df;"
        ),
        "captured arrays do not move": Edit(GRADIENTS, "gradient_tangents", "f_dot = moved.d1;", ""),
    },
    plans_are_right: {
        "captured arrays do not move": Edit(
            "planning/score_launches.py", "with_pushed_score", "pushed(program, names,", "pushed(program, (),"
        ),
        "tiles depend on the names of tangents": Edit(
            "planning/families/simt.py", "Simt.jvp_spec", 'request, ("q",))', "request, request.problem.tangents)"
        ),
        "a plan's own tangents are taken for those of the call": Edit(
            "planning/plan.py", "KernelPlan.pass_of", "is_planned = tangents == problem.tangents and", "is_planned ="
        ),
        "kernels with other boxes have no tensor maps": Edit(
            "planning/launches.py", "Pass.boxes", "if boxes not in every[:number])", "if number == 0)"
        ),
        "arrays of results are tangents": Edit(
            "planning/plan.py", "KernelPlan.pass_of", "keys.items() if key in arrays)", "keys.items())"
        ),
    },
}  # fmt: skip
