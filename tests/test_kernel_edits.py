"""Faults planted in the CUDA sources: every one must be seen on the simulator, as a wrong number and not as a crash.

Barriers that are taken away are seen under hostile schedules. CUFLASH_PROFILE=long plants
all, the ci profile every third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import splitting
from executors import SIM, needs_compiler
from planting import Edit, chosen, misfits, planted
from poison import STRUCTURES, call
from probing import (
    FRAGMENTS,
    TF32,
    WALKS,
    assert_expected,
    loads,
    maps,
    products,
    quotients,
    stores,
    transposed_products,
    walk,
    wrong_tiles,
)
from test_probes import shared_banks

from cuflash import masks, sim
from cuflash.simulated import Simulator
from cuflash.testing import Example, Structure, assert_within_bounds

pytestmark = needs_compiler

EDITS = {
    # the entries
    "K is overwritten before it is read": Edit(
        "simt/forward.cu", "simt_forward",
        "tile::add_product_nt(s, q_smem, k_smem); __syncthreads();",
        "tile::add_product_nt(s, q_smem, k_smem);",
    ),
    "P is read before it is there": Edit(
        "simt/forward.cu", "simt_forward", "tile::store(p_smem, s); __syncthreads();", "tile::store(p_smem, s);"
    ),
    "V is overwritten before it is read": Edit(
        "simt/forward.cu", "simt_forward",
        "for (Step step; steps.next(step);) { __syncthreads();",
        "for (Step step; steps.next(step);) {",
    ),
    "scores are not scaled": Edit("simt/forward.cu", "simt_forward", "s.scale(softmax_scale_log2);", ""),
    "scores are not masked": Edit("simt/forward.cu", "simt_forward", "mask_scores(s, params, work, step);", ""),
    "lse of the last row is lost": Edit(
        "simt/forward.cu", "simt_forward", "o.row(i) < lse.num_rows)", "o.row(i) < lse.num_rows - 1)"
    ),
    "heads are grouped by remainder": Edit(
        "simt/forward.cu", "simt_forward",
        "place.head / shape.group_size",
        "place.head % (shape.num_heads / shape.group_size)",
    ),
    "dS is read before it is there": Edit(
        "simt/backward_rows.cu", "simt_backward_rows",
        "tile::store(ds_smem, dp); __syncthreads();",
        "tile::store(ds_smem, dp);",
    ),
    "dq is not scaled": Edit("simt/backward_rows.cu", "simt_backward_rows", "dq.scale(shape.softmax_scale);", ""),
    "P is overwritten before it is read": Edit(
        "simt/backward_columns.cu", "simt_backward_columns",
        "__syncthreads(); tile::store(p_smem, dp);",
        "tile::store(p_smem, dp);",
    ),
    "dq is not zeroed": Edit("simt/backward_statistics.cu", "simt_backward_statistics", "dq.fill(0);", "dq.fill(1);"),
    "dq is left as it came": Edit(
        "simt/backward_statistics.cu", "simt_backward_statistics",
        "store_gradient<Element>(",
        "if (false) store_gradient<Element>(",
    ),
    "what is added to dq is not scaled": Edit(
        "simt/backward.cu", "simt_backward", "dq_frag.scale(shape.softmax_scale);", ""
    ),
    "dq is added a row late": Edit(
        "simt/backward.cu", "simt_backward", "dq.rows(step.start, step.stop)", "dq.rows(step.start + 1, step.stop)"
    ),
    "all heads of a group add to the first one's dq": Edit(
        "simt/backward.cu", "simt_backward", "params.dq, work.place, head,", "params.dq, work.place, first_head,"
    ),
    "Q is overwritten before it is read": Edit(
        "simt/backward.cu", "simt_backward",
        "tile::store(p_smem, scores); __syncthreads();",
        "tile::store(p_smem, scores);",
    ),
    "dO is read before it is there": Edit(
        "simt/backward.cu", "simt_backward",
        "__syncthreads(); tile::add_product_nn<kSteps>(dv, p_smem, do_smem);",
        "tile::add_product_nn<kSteps>(dv, p_smem, do_smem);",
    ),
    "P takes dS before it is read": Edit(
        "simt/backward.cu", "simt_backward",
        "tile::add_product_nt<kScoreSteps>(scores, v_smem, do_smem); __syncthreads();",
        "tile::add_product_nt<kScoreSteps>(scores, v_smem, do_smem);",
    ),
    "Q takes dQ before it is read": Edit(
        "simt/backward.cu", "simt_backward",
        "__syncthreads(); const Interval keys = visited_keys(params, work, step);",
        "const Interval keys = visited_keys(params, work, step);",
    ),
    "dQ is added before it is there": Edit("simt/backward.cu", "simt_backward", "} __syncthreads();", "}"),
    "dQ is overwritten before it is added": Edit(
        "simt/backward.cu", "simt_backward",
        "tile::RegisterTile<Accumulator, kBlockKv, kBlockQ> scores; __syncthreads();",
        "tile::RegisterTile<Accumulator, kBlockKv, kBlockQ> scores;",
    ),
    "one head of a group gives dk and dv": Edit(
        "simt/backward.cu", "simt_backward", "head < first_head + shape.group_size", "head < first_head + 1"
    ),
    "P of keys past the tile is kept": Edit(
        "simt/backward.cu", "simt_backward", "probabilities_of_keys(scores, params, work, step, lse_2);", ""
    ),
    "keys that no query of a step sees bring their NaN": Edit(
        "attention/score_gradient.cuh", "visited_keys",
        "if (step.kind != Kind::kInterval) return {",
        "if (true) return {",
    ),
    "the last visited key is lost": Edit(
        "attention/score_gradient.cuh", "visited_keys", ".hi - work.first, height)", ".hi - work.first - 1, height)"
    ),
    "only the first head of a group gives dk and dv": Edit(
        "simt/backward_columns.cu", "simt_backward_columns",
        "head < first_head + shape.group_size",
        "head < first_head + 1",
    ),
    "dk takes P in the place of dS": Edit(
        "simt/backward_columns.cu", "simt_backward_columns", "tile::store(p_smem, dp);", ""
    ),
    # the room attention
    "o is not rescaled": Edit("attention/online_softmax.cuh", "OnlineSoftmax.update", "o.scale_row(i, rescale);", ""),
    "row_sum is not rescaled": Edit(
        "attention/online_softmax.cuh", "OnlineSoftmax.update", "row_sum[i] * rescale + sum", "row_sum[i] + sum"
    ),
    "lse is base 2": Edit(
        "attention/online_softmax.cuh", "OnlineSoftmax.finalize",
        "ptx::fma(row_max[i], T(kLn2),",
        "ptx::fma(row_max[i], T(1),",
    ),
    "the maximum of an empty start is subtracted": Edit(
        "attention/online_softmax.cuh", "OnlineSoftmax.update", "tile::greater(highest, tile::lowest<T>())", "highest"
    ),
    "the key past a step is seen": Edit(
        "attention/mask_scores.cuh", "seen_by_rows", ", step.stop);", ", step.stop + 1);"
    ),
    "bits of a query are its neighbour's": Edit(
        "attention/mask_scores.cuh", "seen_scores",
        "bits |= keys << (i * NumKeys);",
        "bits |= keys << ((i ^ 1) * NumKeys);",
    ),
    "bits are read key by key": Edit(
        "attention/mask_scores.cuh", "SeenScores.has", "(query * NumKeys + key)", "(key * NumKeys + query)"
    ),
    "bits past the thirty-second are lost": Edit(
        "attention/mask_scores.cuh", "seen_scores",
        "bits |= keys << (i * NumKeys);",
        "bits |= static_cast<uint32_t>(keys << (i * NumKeys));",
    ),
    "the first key of an interval is lost": Edit("attention/steps.cuh", "Seen.has", "j < lo ||", "j <= lo ||"),
    "the last key of a band is lost": Edit(
        "attention/steps.cuh", "interval", "i + work.upper + 1, length", "i + work.upper, length"
    ),
    "what follows the full part is called full": Edit(
        "attention/steps.cuh", "Steps.next", "&& step.stop <= reach_.full_stop)", ")"
    ),
    "the last entry of a row is lost": Edit("attention/steps.cuh", "reach_of_queries", "= row[1];", "= row[1] - 1;"),
    "the last entry of a column is lost": Edit(
        "attention/steps.cuh", "find_places", "= column[1];", "= column[1] - 1;"
    ),
    "a list starts one entry late": Edit(
        "attention/steps.cuh", "Steps.Steps", "place_ = reach.first_place;", "place_ = reach.first_place + 1;"
    ),
    "bits are mirrored": Edit("attention/steps.cuh", "Seen.has", ">> key % 8 & 1", ">> (7 - key % 8) & 1"),
    "one list serves all heads": Edit(
        "attention/work_tile.cuh", "list_matrix", "+ place.head * work.list_head_stride", ""
    ),
    "one list serves all batch entries": Edit(
        "attention/work_tile.cuh", "list_matrix", "place.entry * work.list_batch_stride +", ""
    ),
    "intervals of the first entry serve all": Edit(
        "attention/steps.cuh", "interval", "place.entry * work.interval_batch_stride +", ""
    ),
    "a tile of keys visits too few queries": Edit(
        "attention/steps.cuh", "reach_of_keys",
        "rows_starting_by(params, tile.place, tile.last - 1),",
        "rows_starting_by(params, tile.place, tile.first),",
    ),
    "a tile runs over its block": Edit(
        "attention/work_tile.cuh", "work_tile",
        "min(min(work.first + height, start + cut.block), side.length)",
        "min(work.first + height, side.length)",
    ),
    "every tile of a block is its first": Edit(
        "attention/work_tile.cuh", "work_tile", "start + turn.rest * height", "start"
    ),
    "a block is worked on twice": Edit(
        "attention/work_tile.cuh", "work_tile", "rank = turn.quotient;", "rank = turn.quotient / 2 * 2;"
    ),
    "blocks of a list come as they stand": Edit(
        "attention/work_tile.cuh", "work_tile",
        "side.order[list_matrix(params.work, work.place) * cut.num_blocks + rank]",
        "rank",
    ),
    "the order of one list serves all": Edit(
        "attention/work_tile.cuh", "work_tile",
        "[list_matrix(params.work, work.place) * cut.num_blocks + rank]",
        "[rank]",
    ),
    "a head is done before the next begins": Edit(
        "attention/work_tile.cuh", "turns_at",
        "first_place + turns.rest, turns.quotient}",
        "first_place + groups.rest / cut.num_tiles, groups.rest % cut.num_tiles}",
    ),
    "a step of a column is another entry's": Edit(
        "attention/steps.cuh", "OverQueries.first", "column_steps[place] / 4", "column_steps[0] / 4"
    ),
    "powers of two leave nothing": Edit("attention/work_tile.cuh", "divided", "number & (by - 1)}", "0}"),
    "other numbers leave nothing": Edit("attention/work_tile.cuh", "divided", "number - quotient * by}", "0}"),
    "every launch takes the masks of the first": Edit(
        "attention/work_tile.cuh", "work_tile", "shape.first_batch + place", "place"
    ),
    "delta is left out": Edit("attention/score_gradient.cuh", "score_gradient", "p * (dp - delta)", "p * dp"),
    "masked dP is multiplied": Edit(
        "attention/score_gradient.cuh", "score_gradient", "p == 0 ? T(0) : p * (dp - delta)", "p * (dp - delta)"
    ),
    "P of rows is not masked": Edit(
        "attention/score_gradient.cuh", "score_gradients_of_queries", "mask_scores(s, params, work, step, T(0));", ""
    ),
    "P of masked keys is kept": Edit(
        "attention/score_gradient.cuh", "probabilities_of_keys", "if (!seen.has(j, i)) s.at[i][j] = 0;", ";"
    ),
    "lse behind a row is base e": Edit(
        "attention/score_gradient.cuh", "load_statistics",
        "to.at(row, Column) = is_there ? base_2(lse.at(query, 0))",
        "to.at(row, Column) = is_there ? lse.at(query, 0)",
    ),
    "delta behind a row is lost": Edit(
        "attention/score_gradient.cuh", "load_statistics",
        "to.at(row, Column + 1) = is_there ? delta.at(query, 0) : T(0);",
        "",
    ),
    "lse behind another row is read": Edit(
        "attention/score_gradient.cuh", "probabilities_of_keys", "lse_2(Tile::column(j))", "lse_2(j)"
    ),
    "delta behind another row is read": Edit(
        "attention/score_gradient.cuh", "score_gradients_of_keys", "delta(Tile::column(j))", "delta(j)"
    ),
    "dlse has the wrong sign": Edit(
        "attention/score_gradient.cuh", "row_statistics", "sum -= dlse.at", "sum += dlse.at"
    ),
    "delta of the last row is lost": Edit(
        "attention/score_gradient.cuh", "row_statistics",
        "kept.at(query, 0) = sum;",
        "kept.at(query, 0) = query < work.last - 1 ? sum : 0;",
    ),
    # the entries on tensor cores
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
        "sm80/backward.cu", "keep_head", "has_rows_of<OTile>(kept.d_o, params.do_, params.shape.value_dim);", "true;"
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
    "dQ leaves before it is there": Edit("attention/mma_gradient.cuh", "write_gradient", "__syncthreads();", ""),
    "sums of dQ are one sum": Edit(
        "tile/fragment_order.cuh", "FragmentOrder.load", "[e + x] = sums.at[x];", "[e + x] = sums.at[0];"
    ),
    "blocks of a list end where tiles do": Edit(
        "sm80/backward.cu", "sm80_backward", "query_tile_number(params, step.start, kBlockQ)", "(step.start / kBlockQ)"
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
        "sm80/backward_rows.cu", "sm80_backward_rows", "&& has_rows_of<VTile>(kept.v, params.v, shape.value_dim);", ";"
    ),
    "whole rows lie too close": Edit(
        "tile/async_copy.cuh", "WholeRows.start",
        "data += Share::kRowsAtOnce * row_stride_)",
        "data += Share::kRowsAtOnce * (row_stride_ - 8))",
    ),
    "whole rows lack their last chunks": Edit(
        "tile/async_copy.cuh", "WholeRows.start",
        "chunk < Tile::kChunks; chunk += Share::kThreadsOfRow) ptx",
        "chunk < Tile::kChunks - 4; chunk += Share::kThreadsOfRow) ptx",
    ),
    "dQ of rows is not scaled": Edit(
        "sm80/backward_rows.cu", "sm80_backward_rows", "dq.scale(shape.softmax_scale);", ""
    ),
    "converted dQ is not scaled": Edit("sm80/convert_dq.cu", "sm80_convert_dq", "dq.scale(shape.softmax_scale);", ""),
    "sums of dQ start at 1": Edit(
        "attention/delta.cuh", "clear_dq_sum", "(sums + x) = {", "(sums + x) = {{0x3f800000}"
    ),
    "delta of tensor cores misses dlse": Edit("attention/delta.cuh", "each_delta", "sum - dlse.at(row, 0));", "sum);"),
    "P that is made meanwhile misses its first columns": Edit(
        "attention/fragment_gradient.cuh", "probabilities_meanwhile", "kColumns != turn)", "kColumns != turn + 1)"
    ),
    "dS that is made apart misses delta": Edit(
        "attention/fragment_gradient.cuh", "score_gradient_columns",
        "p.at(i, j) * (dp.at(i, j) - row.delta[i]);",
        "p.at(i, j) * dp.at(i, j);",
    ),
    "all columns of P are stored as the first eight": Edit(
        "attention/fragment_gradient.cuh", "probabilities_meanwhile", "put(j / 2);", "put(0);"
    ),
    "four sums of dQ go where others are": Edit(
        "tile/fragment_order.cuh", "FragmentOrder.place", "+ Run * ptx::lane()", "+ 4 * (ptx::lane() / 2)"
    ),
    "a result is written past its last row": Edit(
        "tile/async_copy.cuh", "store", "to.num_rows >= Rows &&", "to.num_rows >= Rows - 8 &&"
    ),
    "rows of a result lie too close": Edit(
        "tile/async_copy.cuh", "store",
        "data += Share::kRowsAtOnce * to.row_stride;",
        "data += Share::kRowsAtOnce * (to.row_stride - 8);",
    ),
    "a gradient that is summed afterwards loses its last column": Edit(
        "attention/fragment_gradient.cuh", "write_wide",
        "Gradient::column(j) < num_columns)",
        "Gradient::column(j) < num_columns - 1)",
    ),
    "o of tensor cores is not rescaled": Edit(
        "attention/fragments.cuh", "LazySoftmax.update",
        "if (raise(s, softmax_scale_log2, by)) rescale(o, by);",
        "raise(s, softmax_scale_log2, by);",
    ),
    "a fragment's second row takes the first's mask": Edit(
        "attention/fragments.cuh", "mask_rows",
        "seen_by(first_row + Tile::row(i));",
        "seen_by(first_row + Tile::row(i / 2 * 2));",
    ),
    "bits of a fragment are its neighbour's": Edit(
        "attention/fragments.cuh", "mask_rows", ">> Tile::first_column() % 8)", ">> Tile::first_column() % 8 / 4 * 4)"
    ),
    "a column of a list is found by blocks of queries": Edit(
        "attention/steps.cuh", "find_places", "divided(tile.first, work.block_kv)", "divided(tile.first, work.block_q)"
    ),
    "tiles of dQ start with blocks of keys": Edit(
        "attention/steps.cuh", "from_whole_tiles",
        "divided(reach.start, params.work.block_q)",
        "divided(reach.start, params.work.block_kv)",
    ),
    "steps start within a tile of dQ": Edit(
        "attention/steps.cuh", "from_whole_tiles", "reach.start -= within % height;", ""
    ),
    # the room tile
    "the last column is the first": Edit(
        "tile/copy.cuh", "load", "widen(*element)", "widen(column + 1 < from.num_columns ? *element : from.at(row, 0))"
    ),
    "a vector past the last column is loaded": Edit(
        "tile/copy.cuh", "has_vectors", "&& matrix.num_columns % kVector == 0", ""
    ),
    "one column too many is stored": Edit(
        "tile/copy.cuh", "store", "Tile::column(j + e) < to.num_columns", "Tile::column(j + e) <= to.num_columns"
    ),
    "a vector past the last column is stored": Edit(
        "tile/copy.cuh", "store_in_vectors", "if (Tile::column(j) < to.num_columns) *", "*"
    ),
    "columns apart are stored as vectors": Edit("tile/copy.cuh", "has_vectors", "matrix.column_stride == 1 &&", ""),
    "a vector is stored in reverse": Edit(
        "tile/copy.cuh", "store_in_vectors",
        "narrow(from.at[i][j + e], x.at[e]);",
        "narrow(from.at[i][j + e], x.at[Run - 1 - e]);",
    ),
    "the last row is not stored": Edit(
        "tile/copy.cuh", "store",
        "(Tile::row(i) >= to.num_rows) continue;",
        "(Tile::row(i) + 1 >= to.num_rows) continue;",
    ),
    "the last row is not stored in vectors": Edit(
        "tile/copy.cuh", "store_in_vectors",
        "(Tile::row(i) >= to.num_rows) continue;",
        "(Tile::row(i) + 1 >= to.num_rows) continue;",
    ),
    "rows of a thread are neighbours": Edit(
        "tile/register_tile.cuh", "RegisterTile.row",
        "return row_lane() + kRowLanes * i;",
        "return row_lane() * kRows + i;",
    ),
    "runs of a thread overlap": Edit(
        "tile/register_tile.cuh", "RegisterTile.column",
        "(j / Run * kColumnLanes + column_lane()) * Run + j % Run",
        "j / Run * kColumnLanes * Run + column_lane() + j % Run",
    ),
    "half a row is summed": Edit(
        "tile/register_tile.cuh", "row_sum",
        "x += __shfl_xor_sync(0xffffffffu, x, step);",
        "x += step > 2 ? T(0) : __shfl_xor_sync(0xffffffffu, x, step);",
    ),
    "elements lie closer than vectors": Edit(
        "tile/shared_tile.cuh", "SharedTile.at", "data[row * kPitch + column]", "data[row * Columns + column]"
    ),
    "a vector is multiplied backwards": Edit(
        "tile/product.cuh", "add_product_nt", "b_frag[j].at[e]", "b_frag[j].at[kVector - 1 - e]"
    ),
    "what is added misses the last column": Edit(
        "tile/copy.cuh", "add",
        "if (column < to.num_columns) ptx::red_add",
        "if (column < to.num_columns - 1) ptx::red_add",
    ),
    "a^T b starts a row late": Edit(
        "tile/product.cuh", "add_product_tn", "for (int k = first; k < last", "for (int k = first + 1; k < last"
    ),
    "a row of b is multiplied again and again": Edit(
        "tile/product.cuh", "add_product_nn", "b.vector(k + e,", "b.vector(k,"
    ),
    "a fragment of a is another lane's": Edit(
        "tile/product.cuh", "add_product_by_mma", "a += column_lane() * AStride;", "a += (column_lane() ^ 1) * AStride;"
    ),
    "a fragment of b is transposed": Edit(
        "tile/product.cuh", "add_product_by_mma",
        "column_lane() * BStride + row_lane() % 8 * ColumnStride",
        "column_lane() * ColumnStride + row_lane() % 8 * BStride",
    ),
    "a fragment of b is its neighbour's": Edit(
        "tile/product.cuh", "add_product_by_mma",
        "j * kColumnLanes * ColumnStride",
        "(j ^ 2) * kColumnLanes * ColumnStride",
    ),
    "fragments take a row too many": Edit(
        "tile/product.cuh", "add_product_by_mma", "k + column_lane() < last;", "k + column_lane() <= last;"
    ),
    "fragments of a^T miss the first row": Edit(
        "tile/product.cuh", "add_product_by_mma",
        "is_there = first <= k + column_lane()",
        "is_there = first < k + column_lane()",
    ),
    "two fragments of a change places": Edit(
        "tile/product.cuh", "add_product_by_mma", "a_frag[i], a_frag[i + 1], b_frag", "a_frag[i + 1], a_frag[i], b_frag"
    ),
    "a quotient is not corrected": Edit(
        "tile/register_tile.cuh", "RegisterTile.divide_row",
        "= ptx::fma(ptx::fma(-quotient, by, at[i][j]), reciprocal, quotient);",
        "= quotient;",
    ),
    "what is not finite is corrected": Edit(
        "tile/register_tile.cuh", "RegisterTile.divide_row", "rounded == rounded ? rounded : quotient;", "rounded;"
    ),
    "two rows of fragments are summed": Edit(
        "tile/register_tile.cuh", "row_sum", "step < kColumnLanes; step *= 2) x +=", "step < 8; step *= 2) x +="
    ),
    "rows of fragments meet in the banks": Edit(
        "tile/shared_tile.cuh", None, "(config::kMmaRows > 0 ? 2 : 1) * Vector<T>::kLength", "Vector<T>::kLength"
    ),
    # float32 on tensor cores
    "the lower half of a left operand is lost": Edit(
        "tile/tf32.cuh", "multiply_add", "ptx::mma_m16n8k8_tf32(d, a.lo, b.hi);", ""
    ),
    "the lower half of a right operand is lost": Edit(
        "tile/tf32.cuh", "multiply_add", "ptx::mma_m16n8k8_tf32(d, a.hi, b.lo);", ""
    ),
    "a NaN is rounded to -0": Edit(
        "tile/tf32.cuh", "Tf32.Tf32",
        "hi[e] = ptx::to_tf32(__uint_as_float(x[e]));",
        "hi[e] = (x[e] + 0x1000u) & 0xffffe000u;",
    ),
    "words come from the other four rows": Edit(
        "tile/tf32.cuh", "Words.at", "which_row * (AsNeighbours ? 1 : 4)", "(1 - which_row) * (AsNeighbours ? 1 : 4)"
    ),
    "words of the second column are the first's": Edit(
        "tile/tf32.cuh", "Words.at", "4 * tile + 2 * which_column", "4 * tile"
    ),
    "words are their neighbours'": Edit(
        "tile/tf32.cuh", "Words.at", "ptx::lane() / 4 % 4 * 4;", "(ptx::lane() / 4 + 1) % 4 * 4;"
    ),
    "a left fragment is transposed": Edit("tile/tf32.cuh", "load", "IsLeft ? e / 2 : e % 2, IsLeft", "e % 2, IsLeft"),
    "columns of a product are not neighbours": Edit("tile/tf32.cuh", "load", "[e % 2 * 2 + e / 2]);", "[e]);"),
    "a product is not added to what there was": Edit(
        "tile/tf32.cuh", "multiply_tf32", "sum = kIsApart ? sum +", "sum = kIsApart ?"
    ),
    "one product starts from 0": Edit(
        "tile/tf32.cuh", "multiply_tf32", "IsAdded && !kIsApart ? c.tiles", "false ? c.tiles"
    ),
    "every group of columns is the first": Edit(
        "tile/tf32.cuh", "multiply_tf32", "load(b_frag, b, (first + j) / 2, k);", "load(b_frag, b, j / 2, k);"
    ),
    "a pair is stored at the start of its chunk": Edit(
        "tile/tf32.cuh", "store", "+ from.first_column() % kChunkOf<float> * 4;", ";"
    ),
    "rows of floats meet in the banks": Edit(
        "tile/swizzled_tile.cuh", "SwizzledTile.first_chunk",
        "row % 2 * 2 ^ row / 2 % 2 * 7 ^ row / 4 % 2 * 4",
        "row % 8",
    ),
}  # fmt: skip


# Where blocks share a tile's keys.
SPLIT_EDITS = {
    "a part's last step is lost": Edit(
        "attention/steps.cuh", "part_of",
        "Width * part_start(num_steps, part + 1, num_parts));",
        "Width * (part_start(num_steps, part + 1, num_parts) - 1));",
    ),
    "a part's last entry is lost": Edit(
        "attention/steps.cuh", "part_of",
        "part_start(num_places, part + 1, num_parts);",
        "part_start(num_places, part + 1, num_parts) - 1;",
    ),
    "every block does the first part": Edit(
        "sm80/forward.cu", "reach_of_block",
        "part_of<kBlockKv, Listed>(params, whole, work_part(num_splits), num_splits)",
        "part_of<kBlockKv, Listed>(params, whole, 0, num_splits)",
    ),
    "every part is left in one place": Edit(
        "sm80/forward.cu", "rows_of_part", "first = attention::work_part(shape.num_splits) * seqlen_q;", "first = 0;"
    ),
    "lse of a part without a key is not written": Edit(
        "sm80/forward.cu", "write_part",
        "if (o.first_column() == 0) *lse_rows",
        "if (o.first_column() == 0 && row_lse[i] != ptx::negative_infinity<float>()) *lse_rows",
    ),
    "a packed row past the first head sees what a later query does": Edit(
        "attention/fragments.cuh", "HeadAfterHead.operator()", "return row % seqlen_q;", "return row;"
    ),
    "packed rows are all the first head's": Edit(
        "tile/async_copy.cuh", "RowsOfMatrices.row", "i / first.num_rows * stride +", ""
    ),
    "packed rows are of 16-bit elements": Edit(
        "tile/async_copy.cuh", "load_async",
        "there, min(max(rest, 0), kChunk) * sizeof(T));",
        "there, min(max(rest, 0), kChunk) * 2);",
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
    "a part without a key poisons": Edit("sm80/combine.cu", "sm80_combine", "if (by > 0) o[c]", "o[c]"),
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
}  # fmt: skip


def examples() -> Iterator[Structure]:
    """A few that reach every line, of few tiles: implicit work, intervals, lists of every kind, groups, many axes."""
    dims = {"head_dim": 24, "value_dim": 20, "layouts": ("padded",) * 5}
    two = {"q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
    lengths = masks.Lengths(q=np.array([150, 60]), kv=np.array([130, 200]))
    yield Structure(
        **two, num_heads=4, num_kv_heads=2, seqlen_q=150, seqlen_kv=200, **dims,
        mask=masks.Causal("bottom_right") & lengths,
    )  # fmt: skip
    yield Structure(num_heads=2, seqlen_q=300, seqlen_kv=290, **dims, mask=masks.SlidingWindow(170, 30, "top_left"))
    rng = np.random.default_rng(0)
    yield Structure(
        **two, num_heads=2, seqlen_q=150, seqlen_kv=140, **dims,
        mask=masks.BlockPattern(rng.random((2, 2, 7, 6)) < 0.5, 24) & masks.Dilated(2, align="top_left"),
    )  # fmt: skip
    yield STRUCTURES["five axes that do not fold"]


@cache
def beside_clean() -> list[tuple[Example, Example]]:
    """What kernels are given, and the same without NaN, which knows what is exact: made once for all edits."""
    given = [*(structure.example() for structure in examples()), padded_with_nan()]
    return [(example, without_nan(example)) for example in given]


def attention_is_right() -> None:
    """Every result within its bound, in one walk and in two, in the midst of poison, in order and then out of it."""
    for schedule in (sim.Schedule(), *(sim.Schedule(seed=seed, order="random") for seed in range(3))):
        for (example, clean), run in product(beside_clean(), (SIM, replace(SIM, deterministic=True))):
            call(example, run, Simulator(schedule), check=partial(assert_within_bounds, clean))


def padded_with_nan(dtype: str = "float32", head_dim: int = 24, value_dim: int = 20) -> Example:
    """Keys and values that stand past a length, in the middle of a tile, are NaN."""
    example = Structure(
        num_heads=2, seqlen_q=150, seqlen_kv=90, head_dim=head_dim, value_dim=value_dim, mask=masks.Lengths(kv=40),
        dtype=dtype,
    ).example()  # fmt: skip
    k, v = example.k.copy(), example.v.copy()
    k[..., 40:, :] = v[..., 40:, :] = np.nan
    return example.but(k=k, v=v)


def beside_nan(example: Example, names: Iterable[str], width: int) -> Example:
    """Rows of some inputs stand in wider ones, and NaN behind them."""
    wide = {}
    for name in names:
        values = getattr(example, name)
        room = np.full((*values.shape[:-1], width), np.nan, np.float32).astype(values.dtype)
        wide[name] = room[..., : values.shape[-1]]
        wide[name][...] = values
    return example.but(**wide)


def without_nan(example: Example) -> Example:
    return example.but(k=np.nan_to_num(example.k), v=np.nan_to_num(example.v))


@cache
def halves_beside_clean() -> list[tuple[Example, Example]]:
    """The same of 16-bit elements, and of a negative scale; fewer, since kernels take seconds to build."""
    dims = {"head_dim": 24, "value_dim": 20, "layouts": ("padded",) * 5, "dtype": "float16"}
    rng = np.random.default_rng(0)
    made = [
        Structure(
            num_heads=4, num_kv_heads=2, seqlen_q=200, seqlen_kv=210, **dims,
            mask=masks.Causal("bottom_right") & masks.Lengths(kv=180), scale=-3.0,
        ),
        *(
            # Blocks whose sides differ, and are no multiples of tiles.
            Structure(
                num_heads=2, seqlen_q=150, seqlen_kv=140, **dims,
                mask=masks.BlockPattern(rng.random((2, 4, 6)) < 0.7, (40, 24)) & within,
            )
            for within in (masks.Dilated(3, align="top_left"), masks.Causal("top_left"))
        ),
        # Whole tiles of more than 64 columns, and rows of whole packets; gradients that are summed over an axis.
        Structure(
            q_batch=(2,), k_batch=(1,), v_batch=(1,), num_heads=1, seqlen_q=186, seqlen_kv=130, head_dim=128,
            value_dim=128, dtype="float16",
        ),
        # More than 128 columns: a whole step and others.
        Structure(num_heads=1, seqlen_q=90, seqlen_kv=80, head_dim=136, value_dim=136, dtype="float16"),
    ]  # fmt: skip
    given = [
        *(structure.example() for structure in made), padded_with_nan("float16"), padded_with_nan("float16", 32, 32),
    ]  # fmt: skip
    examples = [SIM.rounded(example) for example in given]
    # Rows of Q and K, or of dO and V, are not as wide as those of their tiles.
    narrow = Structure(num_heads=1, seqlen_q=270, seqlen_kv=270, head_dim=32, value_dim=24, dtype="float16")
    examples.append(beside_nan(SIM.rounded(narrow.example()), ("v", "do"), 32))
    narrow = replace(narrow, head_dim=24, value_dim=32)
    examples.append(beside_nan(SIM.rounded(narrow.example()), ("q", "k"), 32))
    return [(example, without_nan(example)) for example in examples]


def tensor_cores_are_right() -> None:
    """The same of 16-bit elements."""
    for example, clean in halves_beside_clean():
        for run, order in product((SIM, replace(SIM, deterministic=True)), ("round_robin", "random")):
            check = partial(assert_within_bounds, clean)
            call(example, run, Simulator(sim.Schedule(order=order)), margin=8, check=check)  # rows of whole packets


def work_is_shared_out() -> None:
    """Every query and key is in one tile, a list's longest come first, and then `attention_is_right`."""
    for name in ("blocks of 16, 16 x 16", "blocks of 100 x 64, causal, 32 x 8"):
        plan, launch = walk(*WALKS[name])
        left = launch.on_simulator()
        assert wrong_tiles(plan, left[8]) == []
    attention_is_right()


def tiles_are_right() -> None:
    """Every index map is the one that NumPy says."""
    launches = [maps("float32"), *loads("float32"), *stores("float32"), products("float32", 32, 64, 40)]
    launches += [maps(*FRAGMENTS), products("float64", 64, 40, 24, 8), products("float64", 128, 24, 40, 16)]
    launches += [transposed_products("float32", 5, 18), transposed_products("float64", 5, 18, 16)]
    launches += [quotients("float32")]
    for launch in launches:
        assert_expected(launch, launch.on_simulator())


@cache
def shared_among_parts() -> list[tuple[Example, int]]:
    """With how many parts; once more than groups of threads merge."""
    parts = {"few queries, causal": 3, "window": 3, "bits": 3, "float32, few queries": 3, "wide": 9}
    return [(splitting.rounded(splitting.STRUCTURES[name].example()), number) for name, number in parts.items()]


def parts_are_right() -> None:
    """Results within their bounds where blocks share keys, without a list, packed and with one; then out of order."""
    for schedule in (sim.Schedule(), sim.Schedule(seed=1, order="random")):
        for example, num_parts in shared_among_parts():
            left = splitting.forward(example, num_parts, machine=Simulator(schedule))
            assert_within_bounds(example, o=left.o, lse=left.lse)


def all_steps_are_right() -> None:
    """Those of plain arithmetic, then those that keep to the tiles of dQ."""
    attention_is_right()
    tensor_cores_are_right()


_OF_TENSOR_CORES = (
    "attention/fragments.cuh", "attention/fragment_gradient.cuh", "attention/mma_gradient.cuh",
    "attention/delta.cuh", "tile/fragment_order.cuh", "tile/async_copy.cuh",
)  # fmt: skip


def floats_on_tensor_cores_are_right() -> None:
    """Every product of tf32 is the one that NumPy says, and no read of its operands meets a bank twice."""
    for launch in TF32:
        assert_expected(launch, launch.on_simulator())
    assert [shared_banks(columns) for columns in (32, 96)] == [[], []]


def guard_of(file: str) -> Callable[[], None]:
    if file.startswith("sm80/") or file in _OF_TENSOR_CORES:
        return tensor_cores_are_right
    if file == "attention/work_tile.cuh":
        return work_is_shared_out
    if file in ("tile/tf32.cuh", "tile/swizzled_tile.cuh"):
        return floats_on_tensor_cores_are_right
    if file == "attention/steps.cuh":
        return all_steps_are_right
    return tiles_are_right if file.startswith("tile/") else attention_is_right


@pytest.mark.parametrize("name", chosen(EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", EDITS[name]), pytest.raises(AssertionError):
        guard_of(EDITS[name].file)()


@pytest.mark.parametrize("name", chosen(SPLIT_EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_fault_planted_where_keys_are_shared_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", SPLIT_EDITS[name]), pytest.raises(AssertionError):
        parts_are_right()


GUARDS = (
    work_is_shared_out, tiles_are_right, tensor_cores_are_right, floats_on_tensor_cores_are_right, parts_are_right,
)  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_the_kernels_as_they_are_pass_the_same_guards(guard: Callable[[], None]) -> None:
    guard()


def test_every_edit_fits_the_sources() -> None:
    assert misfits((*EDITS.values(), *SPLIT_EDITS.values())) == []
