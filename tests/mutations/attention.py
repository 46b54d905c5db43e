"""Faults in what the kernels of several families share: masks, softmax, tiles of work and gradients."""

from __future__ import annotations

from mutations.kernel_guards import (
    all_steps_are_right,
    attention_is_right,
    parts_are_right,
    tensor_cores_are_right,
    work_is_shared_out,
)
from mutations.planting import Edit
from mutations.sm90_guards import (
    finished_gradients_are_right,
    forward_is_right,
    gradients_are_right,
    gradients_of_lists_are_right,
)

FAULTS = {
    attention_is_right: {
        "keys that no query of a step sees bring their NaN": Edit(
            "attention/score_gradient.cuh", "visited_keys",
            "if (step.kind != Kind::kInterval) return {",
            "if (true) return {",
        ),
        "the last visited key is lost": Edit(
            "attention/score_gradient.cuh", "visited_keys", ".hi - work.first, height)", ".hi - work.first - 1, height)"
        ),
        "o is not rescaled": Edit(
            "attention/online_softmax.cuh", "OnlineSoftmax.update", "o.scale_row(i, rescale);", ""
        ),
        "row_sum is not rescaled": Edit(
            "attention/online_softmax.cuh", "OnlineSoftmax.update", "row_sum[i] * rescale + sum", "row_sum[i] + sum"
        ),
        "lse is base 2": Edit(
            "attention/online_softmax.cuh", "OnlineSoftmax.finalize",
            "ptx::fma(row_max[i], T(kLn2),",
            "ptx::fma(row_max[i], T(1),",
        ),
        "the maximum of an empty start is subtracted": Edit(
            "attention/online_softmax.cuh", "OnlineSoftmax.update",
            "tile::greater(highest, tile::lowest<T>())",
            "highest",
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
        "delta is left out": Edit("attention/score_gradient.cuh", "score_gradient", "p * (dp - delta)", "p * dp"),
        "masked dP is multiplied": Edit(
            "attention/score_gradient.cuh", "score_gradients_of_keys", "is_masked(p(i, j)) ? T(0) :", ""
        ),
        "P of masked keys is kept": Edit(
            "attention/score_gradient.cuh", "probabilities_of_keys", "if (!seen.has(j, i)) s.at[i][j] = -T(0);", ";"
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
        "a P that masks hide looks like any 0": Edit(
            "attention/score_gradient.cuh", "probabilities_of_keys", "s.at[i][j] = -T(0);", "s.at[i][j] = 0;"
        ),
        "dS of rows is not masked": Edit(
            "attention/score_gradient.cuh", "score_gradients_of_queries",
            "mask_scores(dp, params, work, step, T(0));",
            "",
        ),
    },
    all_steps_are_right: {
        "the first key of an interval is lost": Edit("attention/steps.cuh", "Seen.has", "j < lo ||", "j <= lo ||"),
        "the last key of a band is lost": Edit(
            "attention/steps.cuh", "interval", "i + work.upper + 1, length", "i + work.upper, length"
        ),
        "what follows the full part is called full": Edit(
            "attention/steps.cuh", "Steps.next", "&& step.stop <= reach_.full_stop)", ")"
        ),
        "the last entry of a row is lost": Edit(
            "attention/steps.cuh", "reach_of_queries", "= row[1];", "= row[1] - 1;"
        ),
        "the last entry of a column is lost": Edit(
            "attention/steps.cuh", "find_places", "= column[1];", "= column[1] - 1;"
        ),
        "a list starts one entry late": Edit(
            "attention/steps.cuh", "Steps.Steps", "place_ = reach.first_place;", "place_ = reach.first_place + 1;"
        ),
        "bits are mirrored": Edit("attention/steps.cuh", "Seen.has", ">> key % 8 & 1", ">> (7 - key % 8) & 1"),
        "intervals of the first entry serve all": Edit(
            "attention/steps.cuh", "interval", "place.entry * work.interval_batch_stride +", ""
        ),
        "a tile of keys visits too few queries": Edit(
            "attention/steps.cuh", "reach_of_keys",
            "rows_starting_by(params, tile.place, tile.last - 1),",
            "rows_starting_by(params, tile.place, tile.first),",
        ),
        "a step of a column is another entry's": Edit(
            "attention/steps.cuh", "OverQueries.first", "column_steps[place] / 4", "column_steps[0] / 4"
        ),
        "a column of a list is found by blocks of queries": Edit(
            "attention/steps.cuh", "find_places",
            "divided(tile.first, work.block_kv)",
            "divided(tile.first, work.block_q)",
        ),
        "tiles of dQ start with blocks of keys": Edit(
            "attention/steps.cuh", "from_whole_tiles",
            "divided(reach.start, params.work.block_q)",
            "divided(reach.start, params.work.block_kv)",
        ),
        "steps start within a tile of dQ": Edit(
            "attention/steps.cuh", "from_whole_tiles", "reach.start -= within % height;", ""
        ),
    },
    work_is_shared_out: {
        "one list serves all heads": Edit(
            "attention/work_tile.cuh", "list_matrix", "+ place.head * work.list_head_stride", ""
        ),
        "one list serves all batch entries": Edit(
            "attention/work_tile.cuh", "list_matrix", "place.entry * work.list_batch_stride +", ""
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
        "powers of two leave nothing": Edit("attention/work_tile.cuh", "divided", "number & (by - 1)}", "0}"),
        "other numbers leave nothing": Edit("attention/work_tile.cuh", "divided", "number - quotient * by}", "0}"),
        "every launch takes the masks of the first": Edit(
            "attention/work_tile.cuh", "work_tile", "shape.first_batch + place", "place"
        ),
    },
    tensor_cores_are_right: {
        "dQ leaves before it is there": Edit("attention/mma_gradient.cuh", "write_gradient", "__syncthreads();", ""),
        "sums of dQ start at 1": Edit(
            "attention/delta.cuh", "clear_dq_sum", "(sums + x) = {", "(sums + x) = {{0x3f800000}"
        ),
        "delta of tensor cores misses dlse": Edit(
            "attention/delta.cuh", "each_delta", "sum - dlse.at(row, 0));", "sum);"
        ),
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
            "attention/fragments.cuh", "mask_rows",
            ">> Tile::first_column() % 8)",
            ">> Tile::first_column() % 8 / 4 * 4)",
        ),
        "masked scores count": Edit(
            "attention/fragment_gradient.cuh", "score_gradients", "!IsMasked || !is_masked_score(s.at(i, j));", "true;"
        ),
    },
    parts_are_right: {
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
        "a packed row past the first head sees what a later query does": Edit(
            "attention/fragments.cuh", "HeadAfterHead.operator()", "return row % seqlen_q;", "return row;"
        ),
    },
    forward_is_right: {
        "the first tile starts before the first query": Edit(
            "attention/work_tile.cuh", "query_tile_at", "max(first, 0)", "first"
        ),
        "queries share their sums": Edit(
            "attention/fragments.cuh", "LazySoftmax.finalize",
            "ptx::reciprocal_approx(divisor)",
            "ptx::reciprocal_approx(sum[0])",
        ),
        "lse is another query's": Edit(
            "attention/fragments.cuh", "LazySoftmax.finalize", "ptx::log_accurate(divisor)", "ptx::log_accurate(sum[0])"
        ),
        "weights that are too large count": Edit(
            "attention/fragments.cuh", "LazySoftmax.weigh_unseen",
            "if (__any_sync(0xffffffffu, !is_small)) return false;",
            "",
        ),
        "a warp looks at its first thread's weights alone": Edit(
            "attention/fragments.cuh", "LazySoftmax.weigh_unseen",
            "if (__any_sync(0xffffffffu, !is_small))",
            "if (!__shfl_sync(0xffffffffu, is_small, 0))",
        ),
        "weights of a row are another's sum": Edit(
            "attention/fragments.cuh", "LazySoftmax.weigh_unseen", "row_sum[i] += sum[i];", "row_sum[i] += sum[0];"
        ),
        "a tile's first step is plain": Edit(
            "attention/fragments.cuh", "LazySoftmax", "int reasons = kSeesNone;", "int reasons = 0;"
        ),
        "steps with large maxima are plain": Edit(
            "attention/fragments.cuh", "LazySoftmax.raise",
            "reasons = kIsLarge * __any_sync",
            "reasons = 0 * __any_sync",
        ),
        "steps are plain for queries that have seen no key": Edit(
            "attention/fragments.cuh", "LazySoftmax.raise", "+ kSeesNone * __any_sync", "+ 0 * __any_sync"
        ),
        "a band ends with the first row's": Edit(
            "attention/fragments.cuh", "mask_band", "columns_before(keys.hi + row)", "columns_before(keys.hi)"
        ),
        "a band starts with the first row's": Edit(
            "attention/fragments.cuh", "mask_band", "columns_before(keys.lo + row)", "columns_before(keys.lo)"
        ),
        "a band ends alike for all rows of a thread": Edit(
            "attention/fragments.cuh", "mask_band", "min(hi + 2 * i, last)", "min(hi, last)"
        ),
        "a band starts alike for all rows of a thread": Edit(
            "attention/fragments.cuh", "mask_band", "max(lo + 2 * i, first)", "max(lo, first)"
        ),
        "a band goes on past the last key": Edit(
            "attention/fragments.cuh", "mask_band", "min(hi + 2 * i, last)", "hi + 2 * i"
        ),
        "keys of the step before count again in a band": Edit(
            "attention/fragments.cuh", "mask_band", "max(lo + 2 * i, first)", "lo + 2 * i"
        ),
        "a thread's two columns are one": Edit(
            "attention/fragments.cuh", "mask_band",
            "* 2 + min(key - first_key & 7, 2);",
            "* 2 + min(key - first_key & 7, 1);",
        ),
    },
    gradients_are_right: {
        "a second launch finds the count of the first": Edit(
            "attention/work_tile.cuh", "next_number", "if (asked == num_tiles - 1) *next = 0;", ""
        ),
        "wide gradients lose a row": Edit(
            "attention/fragment_gradient.cuh", "write_wide",
            "Gradient::row(i) >= work.last) continue;",
            "Gradient::row(i) >= work.last - 1) continue;",
        ),
    },
    finished_gradients_are_right: {
        "first keys are taken with the others": Edit(
            "attention/work_tile.cuh", "FinishingTurns.at", "turn == 0 ? ahead + behind : ahead", "ahead"
        ),
        "dQ of the first places is rounded at the end": Edit(
            "attention/work_tile.cuh", "query_tile_from_last",
            "cut.num_tiles - 1 - blockIdx.x;",
            "cut.num_tiles - 1 - (gridDim.x - 1 - blockIdx.x) - (cut.num_places * cut.num_tiles - gridDim.x);",
        ),
    },
    gradients_of_lists_are_right: {
        "tiles do not end with blocks": Edit(
            "attention/work_tile.cuh", "query_tile_end", "min(last, (first / block + 1) * block) : last", "last : last"
        ),
    },
}  # fmt: skip
