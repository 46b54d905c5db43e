"""Faults planted in the CUDA sources: every one must be seen on the simulator, as a wrong number and not as a crash.

Each edit is a line of a file of kernels_cu/ and what stands in its place. An edit whose line is gone fails, so that the
list keeps up with the code. Barriers that are taken away are seen under hostile schedules. CUFLASH_PROFILE=long plants
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
from planting import chosen, planted, without_their_line
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
    "K is overwritten before it is read": ("simt/forward.cu", "    __syncthreads();  // K is read\n", ""),
    "P is read before it is there": ("simt/forward.cu", "    __syncthreads();  // V and P are there\n", ""),
    "V is overwritten before it is read": (
        "simt/forward.cu", "    __syncthreads();  // V and P of the last step are read\n", ""
    ),
    "scores are not scaled": ("simt/forward.cu", "    s.scale(softmax_scale_log2);\n", ""),
    "scores are not masked": ("simt/forward.cu", "    mask_scores(s, params, work, step);\n", ""),
    "lse of the last row is lost": ("simt/forward.cu", "o.row(i) < lse.num_rows)", "o.row(i) < lse.num_rows - 1)"),
    "heads are grouped by remainder": (
        "simt/forward.cu", "place.head / shape.group_size", "place.head % (shape.num_heads / shape.group_size)"
    ),
    "dS is read before it is there": ("simt/backward_rows.cu", "    __syncthreads();  // dS is there\n", ""),
    "dq is not scaled": ("simt/backward_rows.cu", "  dq.scale(shape.softmax_scale);\n", ""),
    "P is overwritten before it is read": ("simt/backward_columns.cu", "      __syncthreads();  // P is read\n", ""),
    "dq is not zeroed": ("simt/backward_statistics.cu", "  dq.fill(0);\n", "  dq.fill(1);\n"),
    "dq is left as it came": (
        "simt/backward_statistics.cu", "  store_gradient<Element>(", "  if (false) store_gradient<Element>("
    ),
    "what is added to dq is not scaled": ("simt/backward.cu", "        dq_frag.scale(shape.softmax_scale);\n", ""),
    "dq is added a row late": (
        "simt/backward.cu", "dq.rows(step.start, step.stop)", "dq.rows(step.start + 1, step.stop)"
    ),
    "all heads of a group add to the first one's dq": (
        "simt/backward.cu", "params.dq, work.place, head,", "params.dq, work.place, first_head,"
    ),
    "Q is overwritten before it is read": (
        "simt/backward.cu", "      __syncthreads();  // P is there, and Q is read\n", ""
    ),
    "dO is read before it is there": ("simt/backward.cu", "      __syncthreads();  // dO is there\n", ""),
    "P takes dS before it is read": ("simt/backward.cu", "      __syncthreads();  // P and dO are read\n", ""),
    "Q takes dQ before it is read": ("simt/backward.cu", "      __syncthreads();  // Q is read\n", ""),
    "dQ is added before it is there": ("simt/backward.cu", "      __syncthreads();  // dQ is there\n", ""),
    "dQ is overwritten before it is added": (
        "simt/backward.cu", "      __syncthreads();  // dQ and dS of the last step are read\n", ""
    ),
    "one head of a group gives dk and dv": (
        "simt/backward.cu", "head < first_head + shape.group_size", "head < first_head + 1"
    ),
    "P of keys past the tile is kept": (
        "simt/backward.cu", "      probabilities_of_keys(scores, params, work, step, lse_2);\n", ""
    ),
    "keys that no query of a step sees bring their NaN": (
        "attention/score_gradient.cuh", "  if (step.kind != Kind::kInterval) return {0, height};",
        "  if (true) return {0, height};",
    ),
    "the last visited key is lost": (
        "attention/score_gradient.cuh", ".hi - work.first, height)", ".hi - work.first - 1, height)"
    ),
    "only the first head of a group gives dk and dv": (
        "simt/backward_columns.cu", "head < first_head + shape.group_size", "head < first_head + 1"
    ),
    "dk takes P in the place of dS": ("simt/backward_columns.cu", "      tile::store(p_smem, dp);\n", ""),
    # the room attention
    "o is not rescaled": ("attention/online_softmax.cuh", "      o.scale_row(i, rescale);\n", ""),
    "row_sum is not rescaled": ("attention/online_softmax.cuh", "row_sum[i] * rescale + sum", "row_sum[i] + sum"),
    "lse is base 2": ("attention/online_softmax.cuh", "ptx::fma(row_max[i], T(kLn2),", "ptx::fma(row_max[i], T(1),"),
    "the maximum of an empty start is subtracted": (
        "attention/online_softmax.cuh", "tile::greater(highest, tile::lowest<T>())", "highest"
    ),
    "the key past a step is seen": (
        "attention/mask_scores.cuh", "return step.start + Tile::column(j); }, step.stop);\n}\ntemplate",
        "return step.start + Tile::column(j); }, step.stop + 1);\n}\ntemplate",
    ),
    "bits of a query are its neighbour's": (
        "attention/mask_scores.cuh", "bits |= keys << (i * NumKeys);", "bits |= keys << ((i ^ 1) * NumKeys);"
    ),
    "bits are read key by key": ("attention/mask_scores.cuh", "(query * NumKeys + key)", "(key * NumKeys + query)"),
    "bits past the thirty-second are lost": (
        "attention/mask_scores.cuh", "bits |= keys << (i * NumKeys);",
        "bits |= static_cast<uint32_t>(keys << (i * NumKeys));",
    ),
    "the first key of an interval is lost": ("attention/steps.cuh", "j < lo ||", "j <= lo ||"),
    "the last key of a band is lost": ("attention/steps.cuh", "i + work.upper + 1, length", "i + work.upper, length"),
    "what follows the full part is called full": ("attention/steps.cuh", " && step.stop <= reach_.full_stop)", ")"),
    "the last entry of a row is lost": ("attention/steps.cuh", "= row[1];", "= row[1] - 1;"),
    "the last entry of a column is lost": ("attention/steps.cuh", "= column[1];", "= column[1] - 1;"),
    "a list starts one entry late": (
        "attention/steps.cuh", "place_ = reach.first_place;", "place_ = reach.first_place + 1;"
    ),
    "bits are mirrored": ("attention/steps.cuh", ">> key % 8 & 1", ">> (7 - key % 8) & 1"),
    "one list serves all heads": ("attention/work_tile.cuh", " + place.head * work.list_head_stride", ""),
    "one list serves all batch entries": (
        "attention/work_tile.cuh", "place.entry * work.list_batch_stride + ", ""
    ),
    "intervals of the first entry serve all": (
        "attention/steps.cuh", "place.entry * work.interval_batch_stride + ", ""
    ),
    "a tile of keys visits too few queries": (
        "attention/steps.cuh", "rows_starting_by(params, tile.place, tile.last - 1),",
        "rows_starting_by(params, tile.place, tile.first),",
    ),
    "a tile runs over its block": (
        "attention/work_tile.cuh", "min(min(work.first + height, start + cut.block), side.length)",
        "min(work.first + height, side.length)",
    ),
    "every tile of a block is its first": (
        "attention/work_tile.cuh", "start + turn.rest * height", "start"
    ),
    "a block is worked on twice": (
        "attention/work_tile.cuh", "rank = turn.quotient;", "rank = turn.quotient / 2 * 2;"
    ),
    "blocks of a list come as they stand": (
        "attention/work_tile.cuh", "side.order[list_matrix(params.work, work.place) * cut.num_blocks + rank]", "rank"
    ),
    "the order of one list serves all": (
        "attention/work_tile.cuh", "[list_matrix(params.work, work.place) * cut.num_blocks + rank]", "[rank]"
    ),
    "a head is done before the next begins": (
        "attention/work_tile.cuh", "{first_place + turns.rest, turns.quotient}",
        "{first_place + groups.rest / cut.num_tiles, groups.rest % cut.num_tiles}",
    ),
    "a step of a column is another entry's": ("attention/steps.cuh", "column_steps[place] / 4", "column_steps[0] / 4"),
    "powers of two leave nothing": ("attention/work_tile.cuh", "number & (by - 1)};", "0};"),
    "other numbers leave nothing": ("attention/work_tile.cuh", "number - quotient * by};", "0};"),
    "every launch takes the masks of the first": ("attention/work_tile.cuh", "shape.first_batch + place", "place"),
    "delta is left out": ("attention/score_gradient.cuh", "p * (dp - delta)", "p * dp"),
    "a P that masks hide looks like any 0": (
        "attention/score_gradient.cuh", "s.at[i][j] = -T(0);", "s.at[i][j] = 0;"
    ),
    "masked dP is multiplied": ("attention/score_gradient.cuh", "is_masked(p(i, j)) ? T(0) : ", ""),
    "dS of rows is not masked": ("attention/score_gradient.cuh", "  mask_scores(dp, params, work, step, T(0));\n", ""),
    "P of masked keys is kept": ("attention/score_gradient.cuh", "if (!seen.has(j, i)) s.at[i][j] = -T(0);", ";"),
    "lse behind a row is base e": (
        "attention/score_gradient.cuh", "to.at(row, Column) = is_there ? base_2(lse.at(query, 0))",
        "to.at(row, Column) = is_there ? lse.at(query, 0)",
    ),
    "delta behind a row is lost": (
        "attention/score_gradient.cuh", "to.at(row, Column + 1) = is_there ? delta.at(query, 0) : T(0);", ""
    ),
    "lse behind another row is read": ("attention/score_gradient.cuh", "lse_2(Tile::column(j))", "lse_2(j)"),
    "delta behind another row is read": ("attention/score_gradient.cuh", "delta(Tile::column(j))", "delta(j)"),
    "dlse has the wrong sign": ("attention/score_gradient.cuh", "sum -= dlse.at", "sum += dlse.at"),
    "delta of the last row is lost": (
        "attention/score_gradient.cuh", "kept.at(query, 0) = sum;",
        "kept.at(query, 0) = query < work.last - 1 ? sum : 0;",
    ),
    # the entries on tensor cores
    "Q K^T starts before K is there": (
        "sm80/forward.cu",
        "    __syncthreads();  // K, and Q before the first step, is there; V of the last step is read\n", "",
    ),
    "V is multiplied before it is there": ("sm80/forward.cu", "    __syncthreads();  // V is there; K is read\n", ""),
    "a negative scale is not turned": ("sm80/forward.cu", "if (Softmax::turns(shape.softmax_scale)) ", "if (false) "),
    "lse of tensor cores loses its last row": (
        "sm80/forward.cu", "first_row + o.row(i) < lse.num_rows)", "first_row + o.row(i) < lse.num_rows - 1)"
    ),
    "dS is multiplied before it is there": ("sm80/backward.cu", "      __syncthreads();  // P and dS are there\n", ""),
    "whole steps of many scores keep the last one's": (
        "sm80/backward.cu", "          if (kStoresApart) store_scores(s, dp);\n", ""
    ),
    "masked steps of many scores keep the last one's": (
        "sm80/backward.cu", "\n        if (kStoresApart) store_scores(s, dp);\n", "\n"
    ),
    "P of wide whole steps is multiplied before it is there": (
        "sm80/backward.cu", "\n  __syncthreads();  // P is there\n", "\n"
    ),
    "P of wide masked steps is multiplied before it is there": (
        "sm80/backward.cu", "          __syncthreads();  // P is there\n", ""
    ),
    "P of wide whole steps is the last one's": (
        "sm80/backward.cu", "{ tile::store_columns(p_smem, s, column_tile); }", "{}"
    ),
    "dS of wide whole steps is the last one's": (
        "sm80/backward.cu", "      tile::store_columns(ds_smem, dp, j);\n", ""
    ),
    "dS of wide whole steps misses its first columns": (
        "sm80/backward.cu", "kColumnTiles != turn)", "kColumnTiles != turn + 1)"
    ),
    "wide masked steps bring no dV": (
        "sm80/backward.cu", "          tile::add_product_tn(dv, p_smem, do_smem);\n", ""
    ),
    "wide steps bring dV twice": ("sm80/backward.cu", "if (!kMakesDsMeanwhile) tile", "tile"),
    "dK is not scaled": ("sm80/backward.cu", "  dk.scale(shape.softmax_scale);\n", ""),
    "one head of a group gives dK and dV": ("sm80/backward.cu", "head < shape.group_size", "head < 1"),
    "sums of dQ go to the first tile": ("sm80/backward.cu", "query_tile_number(params, step.start, kBlockQ)", "0"),
    "K is kept where no query sees it": ("sm80/backward.cu", "min(work.last, last)", "work.last"),
    "a step of few queries is copied as a whole one": (
        "sm80/backward.cu", " & (step.stop - step.start == kBlockQ)", " & (step.start < step.stop)"
    ),
    "rows of Q are not asked about": (
        "sm80/backward.cu", "has_rows_of<QTile>(kept.q, params.q, params.shape.head_dim) &&", ""
    ),
    "rows of dO are not asked about": (
        "sm80/backward.cu", "has_rows_of<OTile>(kept.d_o, params.do_, params.shape.value_dim);", "true;"
    ),
    "lse of a whole step is delta": ("sm80/backward.cu", "is_lse ? kept.lse : kept.delta;", "kept.delta;"),
    "heads of a group have the first one's queries": ("sm80/backward.cu", "++kept.work.place.head;", ""),
    "heads of a group have the first one's steps": (
        "sm80/backward.cu", "kept.work.place, reach_of_head(params, kept.work), kept);",
        "kept.work.place, kept.reach, kept);",
    ),
    "the next head is noted before the last one is read": (
        "sm80/backward.cu", "  __syncthreads();  // what was kept of the last head is read\n", ""
    ),
    "dK and dV leave before they are there": (
        "sm80/backward.cu", "  __syncthreads();  // all of both is there\n", ""
    ),
    "dQ leaves before it is there": (
        "attention/mma_gradient.cuh", "  __syncthreads();  // all of it is there\n", ""
    ),
    "sums of dQ are one sum": ("tile/fragment_order.cuh", "[e + x] = sums.at[x];", "[e + x] = sums.at[0];"),
    "blocks of a list end where tiles do": (
        "sm80/backward.cu", "query_tile_number(params, step.start, kBlockQ)", "(step.start / kBlockQ)"
    ),
    "whole steps start with the first query": ("sm80/backward.cu", "kept.q + first * params.q.row_stride", "kept.q"),
    "a step of few keys is copied as a whole one": (
        "sm80/forward.cu", "has_rows && step.stop - step.start == kBlockKv", "has_rows"
    ),
    "rows of K are not asked about": (
        "sm80/forward.cu", "has_rows_of<KTile>(kept.k, params.k, shape.head_dim) &&", ""
    ),
    "a step of few keys is copied as a whole one for dQ": (
        "sm80/backward_rows.cu", "kept.has_rows && step.stop - step.start == kBlockKv", "kept.has_rows"
    ),
    "rows of V are not asked about for dQ": (
        "sm80/backward_rows.cu", " && has_rows_of<VTile>(kept.v, params.v, shape.value_dim);", ";"
    ),
    "whole rows lie too close": (
        "tile/async_copy.cuh", "data += Share::kRowsAtOnce * row_stride_)",
        "data += Share::kRowsAtOnce * (row_stride_ - 8))",
    ),
    "whole rows lack their last chunks": (
        "tile/async_copy.cuh", "chunk < Tile::kChunks; chunk += Share::kThreadsOfRow)\n        ptx",
        "chunk < Tile::kChunks - 4; chunk += Share::kThreadsOfRow)\n        ptx",
    ),
    "masked steps of dQ hide scores behind -inf": (
        "sm80/backward_rows.cu", "kept.work, step, masked_score());",
        "kept.work, step, ptx::negative_infinity<float>());",
    ),
    "masked steps hide scores behind -inf": (
        "sm80/backward.cu", "queries, keys, attention::masked_score());",
        "queries, keys, ptx::negative_infinity<float>());",
    ),
    "masked scores count": ("attention/fragment_gradient.cuh", "!IsMasked || !is_masked_score(s.at(i, j));", "true;"),
    "dQ of rows is not scaled": ("sm80/backward_rows.cu", "  dq.scale(shape.softmax_scale);\n", ""),
    "converted dQ is not scaled": ("sm80/convert_dq.cu", "  dq.scale(shape.softmax_scale);\n", ""),
    "sums of dQ start at 1": ("attention/delta.cuh", "(sums + x) = {};", "(sums + x) = {{0x3f800000}};"),
    "delta of tensor cores misses dlse": ("attention/delta.cuh", "sum - dlse.at(row, 0));", "sum);"),
    "P that is made meanwhile misses its first columns": (
        "attention/fragment_gradient.cuh", "kColumns != turn)", "kColumns != turn + 1)"
    ),
    "dS that is made apart misses delta": (
        "attention/fragment_gradient.cuh", "p.at(i, j) * (dp.at(i, j) - row.delta[i]);", "p.at(i, j) * dp.at(i, j);"
    ),
    "all columns of P are stored as the first eight": ("attention/fragment_gradient.cuh", "put(j / 2);", "put(0);"),
    "four sums of dQ go where others are": (
        "tile/fragment_order.cuh", "+ Run * ptx::lane()", "+ 4 * (ptx::lane() / 2)"
    ),
    "a result is written past its last row": (
        "tile/async_copy.cuh", "to.num_rows >= Rows &&", "to.num_rows >= Rows - 8 &&"
    ),
    "rows of a result lie too close": (
        "tile/async_copy.cuh", "      data += Share::kRowsAtOnce * to.row_stride;",
        "      data += Share::kRowsAtOnce * (to.row_stride - 8);",
    ),
    "a gradient that is summed afterwards loses its last column": (
        "attention/fragment_gradient.cuh", "Gradient::column(j) < num_columns)",
        "Gradient::column(j) < num_columns - 1)",
    ),
    "o of tensor cores is not rescaled": (
        "attention/fragments.cuh", "if (raise(s, softmax_scale_log2, by)) rescale(o, by);",
        "raise(s, softmax_scale_log2, by);",
    ),
    "a fragment's second row takes the first's mask": (
        "attention/fragments.cuh", "seen_by(first_row + Tile::row(i));", "seen_by(first_row + Tile::row(i / 2 * 2));"
    ),
    "bits of a fragment are its neighbour's": (
        "attention/fragments.cuh", ">> Tile::first_column() % 8)", ">> Tile::first_column() % 8 / 4 * 4)"
    ),
    "a column of a list is found by blocks of queries": (
        "attention/steps.cuh", "divided(tile.first, work.block_kv)", "divided(tile.first, work.block_q)"
    ),
    "tiles of dQ start with blocks of keys": (
        "attention/steps.cuh", "divided(reach.start, params.work.block_q)", "divided(reach.start, params.work.block_kv)"
    ),
    "steps start within a tile of dQ": ("attention/steps.cuh", "  reach.start -= within % height;\n", ""),
    # the room tile
    "the last column is the first": (
        "tile/copy.cuh", "widen(*element)",
        "widen(column + 1 < from.num_columns ? *element : from.at(row, 0))",
    ),
    "a vector past the last column is loaded": ("tile/copy.cuh", " && matrix.num_columns % kVector == 0", ""),
    "one column too many is stored": (
        "tile/copy.cuh", "Tile::column(j + e) < to.num_columns", "Tile::column(j + e) <= to.num_columns"
    ),
    "a vector past the last column is stored": ("tile/copy.cuh", "if (Tile::column(j) < to.num_columns) *", "*"),
    "columns apart are stored as vectors": ("tile/copy.cuh", "matrix.column_stride == 1 && ", ""),
    "a vector is stored in reverse": (
        "tile/copy.cuh", "narrow(from.at[i][j + e], x.at[e]);", "narrow(from.at[i][j + e], x.at[Run - 1 - e]);"
    ),
    "the last row is not stored": (
        "tile/copy.cuh", "(Tile::row(i) >= to.num_rows) continue;\n    Element* run",
        "(Tile::row(i) + 1 >= to.num_rows) continue;\n    Element* run",
    ),
    "the last row is not stored in vectors": (
        "tile/copy.cuh", "(Tile::row(i) >= to.num_rows) continue;\n      Element* const",
        "(Tile::row(i) + 1 >= to.num_rows) continue;\n      Element* const",
    ),
    "rows of a thread are neighbours": (
        "tile/register_tile.cuh", "return row_lane() + kRowLanes * i;", "return row_lane() * kRows + i;"
    ),
    "runs of a thread overlap": (
        "tile/register_tile.cuh", "(j / Run * kColumnLanes + column_lane()) * Run + j % Run",
        "j / Run * kColumnLanes * Run + column_lane() + j % Run",
    ),
    "half a row is summed": (
        "tile/register_tile.cuh", "x += __shfl_xor_sync(0xffffffffu, x, step);",
        "x += step > 2 ? T(0) : __shfl_xor_sync(0xffffffffu, x, step);",
    ),
    "elements lie closer than vectors": (
        "tile/shared_tile.cuh", "data[row * kPitch + column]", "data[row * Columns + column]"
    ),
    "a vector is multiplied backwards": ("tile/product.cuh", "b_frag[j].at[e]", "b_frag[j].at[kVector - 1 - e]"),
    "what is added misses the last column": (
        "tile/copy.cuh", "if (column < to.num_columns) ptx::red_add", "if (column < to.num_columns - 1) ptx::red_add"
    ),
    "a^T b starts a row late": ("tile/product.cuh", "for (int k = first; k < last", "for (int k = first + 1; k < last"),
    "a row of b is multiplied again and again": ("tile/product.cuh", "b.vector(k + e, ", "b.vector(k, "),
    "a fragment of a is another lane's": (
        "tile/product.cuh", "a += column_lane() * AStride;", "a += (column_lane() ^ 1) * AStride;"
    ),
    "a fragment of b is transposed": (
        "tile/product.cuh", "column_lane() * BStride + row_lane() % 8 * ColumnStride",
        "column_lane() * ColumnStride + row_lane() % 8 * BStride",
    ),
    "a fragment of b is its neighbour's": (
        "tile/product.cuh", "j * kColumnLanes * ColumnStride", "(j ^ 2) * kColumnLanes * ColumnStride"
    ),
    "fragments take a row too many": ("tile/product.cuh", "k + column_lane() < last;", "k + column_lane() <= last;"),
    "fragments of a^T miss the first row": (
        "tile/product.cuh", "is_there = first <= k + column_lane()", "is_there = first < k + column_lane()"
    ),
    "two fragments of a change places": (
        "tile/product.cuh", "a_frag[i], a_frag[i + 1], b_frag", "a_frag[i + 1], a_frag[i], b_frag"
    ),
    "a quotient is not corrected": (
        "tile/register_tile.cuh", "= ptx::fma(ptx::fma(-quotient, by, at[i][j]), reciprocal, quotient);", "= quotient;"
    ),
    "what is not finite is corrected": (
        "tile/register_tile.cuh", "rounded == rounded ? rounded : quotient;", "rounded;"
    ),
    "two rows of fragments are summed": (
        "tile/register_tile.cuh", "step < kColumnLanes; step *= 2) x += ", "step < 8; step *= 2) x += "
    ),
    "rows of fragments meet in the banks": (
        "tile/shared_tile.cuh", "(config::kMmaRows > 0 ? 2 : 1) * Vector<T>::kLength", "Vector<T>::kLength"
    ),
    # float32 on tensor cores
    "the lower half of a left operand is lost": ("tile/tf32.cuh", "    ptx::mma_m16n8k8_tf32(d, a.lo, b.hi);\n", ""),
    "the lower half of a right operand is lost": ("tile/tf32.cuh", "    ptx::mma_m16n8k8_tf32(d, a.hi, b.lo);\n", ""),
    "a NaN is rounded to -0": (
        "tile/tf32.cuh", "hi[e] = ptx::to_tf32(__uint_as_float(x[e]));", "hi[e] = (x[e] + 0x1000u) & 0xffffe000u;"
    ),
    "words come from the other four rows": (
        "tile/tf32.cuh", "which_row * (AsNeighbours ? 1 : 4)", "(1 - which_row) * (AsNeighbours ? 1 : 4)"
    ),
    "words of the second column are the first's": ("tile/tf32.cuh", "4 * tile + 2 * which_column", "4 * tile"),
    "words are their neighbours'": ("tile/tf32.cuh", "ptx::lane() / 4 % 4 * 4;", "(ptx::lane() / 4 + 1) % 4 * 4;"),
    "a left fragment is transposed": ("tile/tf32.cuh", "IsLeft ? e / 2 : e % 2, IsLeft", "e % 2, IsLeft"),
    "columns of a product are not neighbours": ("tile/tf32.cuh", "[e % 2 * 2 + e / 2]);", "[e]);"),
    "a product is not added to what there was": ("tile/tf32.cuh", "sum = kIsApart ? sum + ", "sum = kIsApart ? "),
    "one product starts from 0": ("tile/tf32.cuh", "IsAdded && !kIsApart ? c.tiles", "false ? c.tiles"),
    "every group of columns is the first": (
        "tile/tf32.cuh", "load(b_frag, b, (first + j) / 2, k);", "load(b_frag, b, j / 2, k);"
    ),
    "a pair is stored at the start of its chunk": (
        "tile/tf32.cuh", " + from.first_column() % kChunkOf<float> * 4;", ";"
    ),
    "rows of floats meet in the banks": (
        "tile/swizzled_tile.cuh", "row % 2 * 2 ^ row / 2 % 2 * 7 ^ row / 4 % 2 * 4", "row % 8"
    ),
}  # fmt: skip


# Where blocks share a tile's keys.
SPLIT_EDITS = {
    "a part's last step is lost": (
        "attention/steps.cuh", "Width * part_start(num_steps, part + 1, num_parts));",
        "Width * (part_start(num_steps, part + 1, num_parts) - 1));",
    ),
    "a part's last entry is lost": (
        "attention/steps.cuh", "part_start(num_places, part + 1, num_parts);",
        "part_start(num_places, part + 1, num_parts) - 1;",
    ),
    "every block does the first part": (
        "sm80/forward.cu", "part_of<kBlockKv, Listed>(params, whole, work_part(num_splits), num_splits)",
        "part_of<kBlockKv, Listed>(params, whole, 0, num_splits)",
    ),
    "every part is left in one place": (
        "sm80/forward.cu", "first = attention::work_part(shape.num_splits) * seqlen_q;", "first = 0;"
    ),
    "lse of a part without a key is not written": (
        "sm80/forward.cu", "if (o.first_column() == 0) *lse_rows",
        "if (o.first_column() == 0 && row_lse[i] != ptx::negative_infinity<float>()) *lse_rows",
    ),
    "a packed row past the first head sees what a later query does": (
        "attention/fragments.cuh", "return row % seqlen_q;", "return row;"
    ),
    "packed rows are all the first head's": ("tile/async_copy.cuh", "i / first.num_rows * stride + ", ""),
    "packed rows are of 16-bit elements": (
        "tile/async_copy.cuh", "there, min(max(rest, 0), kChunk) * sizeof(T));",
        "there, min(max(rest, 0), kChunk) * 2);",
    ),
    "the last part is lost": (
        "sm80/combine.cu", "row < num_rows; row += kGroups * seqlen_q",
        "row < num_rows - seqlen_q; row += kGroups * seqlen_q",
    ),
    "half of the groups' sums are left out": ("sm80/combine.cu", "group < kGroups", "group < kGroups / 2"),
    "parts are not weighted": ("sm80/combine.cu", "o[c].at[e] += by * x.at[e];", "o[c].at[e] += x.at[e];"),
    "a part without a key poisons": ("sm80/combine.cu", "if (lse != ptx::negative_infinity<float>()) o[c]", "o[c]"),
    "lse is that of the largest part": ("sm80/combine.cu", "most + ptx::log_accurate(total)", "most"),
    "weights are base 2": ("sm80/combine.cu", " * static_cast<float>(attention::kLog2E)", ""),
    "threads disagree on the largest part": (
        "sm80/combine.cu", "most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));",
        "__shfl_xor_sync(0xffffffffu, most, step);",
    ),
    "sums are read before they are there": (
        "sm80/combine.cu", "  __syncthreads();  // every group's sums are there\n", ""
    ),
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
    file, line, replacement = EDITS[name]
    with planted(tmp_path / "kernels_cu", file, line, replacement), pytest.raises(AssertionError):
        guard_of(file)()


@pytest.mark.parametrize("name", chosen(SPLIT_EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_fault_planted_where_keys_are_shared_is_seen(name: str, tmp_path: Path) -> None:
    file, line, replacement = SPLIT_EDITS[name]
    with planted(tmp_path / "kernels_cu", file, line, replacement), pytest.raises(AssertionError):
        parts_are_right()


GUARDS = (
    work_is_shared_out, tiles_are_right, tensor_cores_are_right, floats_on_tensor_cores_are_right, parts_are_right,
)  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_the_kernels_as_they_are_pass_the_same_guards(guard: Callable[[], None]) -> None:
    guard()


def test_an_edit_whose_line_is_gone_fails(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="stands 0 times in simt/forward.cu: bring the edit up to date"):
        with planted(tmp_path / "kernels_cu", "simt/forward.cu", "no such line", ""):
            pass


def test_every_edit_has_its_line() -> None:
    assert without_their_line(EDITS | SPLIT_EDITS) == []
