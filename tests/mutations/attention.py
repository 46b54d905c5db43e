"""Planted faults in kernel code that several families share: masks, softmax, work tiles and gradients."""

from __future__ import annotations

from mutations import kernel_guards, sm90_guards
from mutations.planting import Edit

FAULTS = {
    kernel_guards.attention_is_right: {
        "keys that no query of a step sees bring their NaN": Edit(
            "attention/score_gradient.cuh", "visited_keys", "if (block.kind != BlockKind::kInterval)", "if (true)"
        ),
        "the last visited key is lost": Edit(
            "attention/score_gradient.cuh", "visited_keys", ".hi - work.first, height)", ".hi - work.first - 1, height)"
        ),
        "o is not rescaled": Edit(
            "attention/softmax_simt.cuh", "OnlineSoftmax.update", "o.scale_row(i, rescale);", ""
        ),
        "row_sum is not rescaled": Edit(
            "attention/softmax_simt.cuh", "OnlineSoftmax.update", "row_sum[i] * rescale + sum", "row_sum[i] + sum"
        ),
        "lse is base 2": Edit(
            "attention/softmax_simt.cuh", "OnlineSoftmax.finalize", "fma(row_max[i], T(kLn2),", "fma(row_max[i], T(1),"
        ),
        "the maximum of an empty start is subtracted": Edit(
            "attention/softmax_simt.cuh", "OnlineSoftmax.update", "tile::maximum(highest, tile::lowest<T>())", "highest"
        ),
        "the key past a step is seen": Edit(
            "attention/mask_simt.cuh", "score_mask_of_queries", ", block.stop);", ", block.stop + 1);"
        ),
        "bits of a query are its neighbour's": Edit(
            "attention/mask_simt.cuh", "score_mask", "|= keys << (i * NumKeys);", "|= keys << ((i ^ 1) * NumKeys);"
        ),
        "bits are read key by key": Edit(
            "attention/mask_simt.cuh", "ScoreMask.allows", "(query * NumKeys + key)", "(key * NumKeys + query)"
        ),
        "bits past the thirty-second are lost": Edit(
            "attention/mask_simt.cuh", "score_mask",
            "bits |= keys << (i * NumKeys);",
            "bits |= static_cast<uint32_t>(keys << (i * NumKeys));",
        ),
        "delta is left out": Edit("attention/score_gradient.cuh", "score_gradient", "p * (dp - delta)", "p * dp"),
        "masked dP is multiplied": Edit(
            "attention/score_gradient.cuh", "score_gradients_of_keys", "is_masked(p(i, j)) ? T(0) :", ""
        ),
        "P of masked keys is kept": Edit(
            "attention/score_gradient.cuh", "probabilities_of_keys",
            "if (!score_mask.allows(j, i)) s.at[i][j] = -T(0);",
            ";",
        ),
        "lse behind a row is base e": Edit(
            "attention/score_gradient.cuh", "load_statistics", "? lse_in_base_2(lse.at(query, 0))", "? lse.at(query, 0)"
        ),
        "delta behind a row is lost": Edit(
            "attention/score_gradient.cuh", "load_statistics",
            "to.at(row, Column + 1) = in_bounds ? delta.at(query, 0) : T(0);",
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
            "attention/score_gradient.cuh", "row_statistics", ", 0) = sum;", ", 0) = query < work.last - 1 ? sum : 0;"
        ),
        "a P that masks hide looks like any 0": Edit(
            "attention/score_gradient.cuh", "probabilities_of_keys", "s.at[i][j] = -T(0);", "s.at[i][j] = 0;"
        ),
        "dS of rows is not masked": Edit(
            "attention/score_gradient.cuh", "score_gradients_of_queries",
            "mask_scores(dp, params, work, block, T(0));",
            "",
        ),
    },
    kernel_guards.all_steps_are_right: {
        "the first key of an interval is lost": Edit(
            "attention/block_iterator.cuh", "RowMask.allows", "j < lo ||", "j <= lo ||"
        ),
        "the last key of a band is lost": Edit(
            "attention/block_iterator.cuh", "interval", "i + list.upper + 1, length", "i + list.upper, length"
        ),
        "what follows the full part is called full": Edit(
            "attention/block_iterator.cuh", "BlockIterator.next", "&& block.stop <= visit_range_.full_stop)", ")"
        ),
        "the last entry of a row is lost": Edit(
            "attention/block_iterator.cuh", "visit_range_of_queries", "= row[1];", "= row[1] - 1;"
        ),
        "the last entry of a column is lost": Edit(
            "attention/block_iterator.cuh", "find_list_entries", "= column[1];", "= column[1] - 1;"
        ),
        "a list starts one entry late": Edit(
            "attention/block_iterator.cuh", "BlockIterator.BlockIterator", ".first_entry;", ".first_entry + 1;"
        ),
        "bits are mirrored": Edit(
            "attention/block_iterator.cuh", "RowMask.allows", ">> key % 8 & 1", ">> (7 - key % 8) & 1"
        ),
        "intervals of the first entry serve all": Edit(
            "attention/block_iterator.cuh", "interval", "batch_head.batch_index * list.interval_batch_stride +", ""
        ),
        "a tile of keys visits too few queries": Edit(
            "attention/block_iterator.cuh", "visit_range_of_keys",
            "rows_starting_by(params, tile.batch_head, tile.last - 1),",
            "rows_starting_by(params, tile.batch_head, tile.first),",
        ),
        "a step of a column is another entry's": Edit(
            "attention/block_iterator.cuh", "OverQBlocks.first", "column_steps[position] / 4", "column_steps[0] / 4"
        ),
        "a column of a list is found by blocks of queries": Edit(
            "attention/block_iterator.cuh", "find_list_entries", "tile.first, list.block_kv", "tile.first, list.block_q"
        ),
        "tiles of dQ start with blocks of keys": Edit(
            "attention/block_iterator.cuh", "aligned_to_tiles", ", params.work.block_q)", ", params.work.block_kv)"
        ),
        "steps start within a tile of dQ": Edit(
            "attention/block_iterator.cuh", "aligned_to_tiles", "visit_range.start -= offset_in_block % height;", ""
        ),
    },
    kernel_guards.work_is_shared_out: {
        "one list serves all heads": Edit(
            "attention/tile_scheduler.cuh", "list_index", "+ batch_head.head * list.list_head_stride", ""
        ),
        "one list serves all batch entries": Edit(
            "attention/tile_scheduler.cuh", "list_index", "batch_head.batch_index * list.list_batch_stride +", ""
        ),
        "a tile runs over its block": Edit(
            "attention/tile_scheduler.cuh", "work_tile",
            "min(min(work.first + height, start + scheduler.block), axis.length)",
            "min(work.first + height, axis.length)",
        ),
        "every tile of a block is its first": Edit(
            "attention/tile_scheduler.cuh", "work_tile", "start + block_and_tile.remainder * height", "start"
        ),
        "a block is worked on twice": Edit(
            "attention/tile_scheduler.cuh", "work_tile", "block_and_tile.quotient;", "block_and_tile.quotient / 2 * 2;"
        ),
        "blocks of a list come as they stand": Edit(
            "attention/tile_scheduler.cuh", "work_tile",
            "axis.order[list_index(params.work, work.batch_head) * scheduler.num_blocks + block_rank]",
            "block_rank",
        ),
        "the order of one list serves all": Edit(
            "attention/tile_scheduler.cuh", "work_tile",
            "[list_index(params.work, work.batch_head) * scheduler.num_blocks + block_rank]",
            "[order.rank]",
        ),
        "a head is done before the next begins": Edit(
            "attention/tile_scheduler.cuh", "tile_order_at",
            "first_batch_head + head_and_tile.remainder, head_and_tile.quotient}",
            "first_batch_head + groups.remainder / scheduler.num_tiles, groups.remainder % scheduler.num_tiles}",
        ),
        "powers of two leave nothing": Edit("attention/tile_scheduler.cuh", "divmod", "number & (by - 1)}", "0}"),
        "other numbers leave nothing": Edit("attention/tile_scheduler.cuh", "divmod", "number - quotient * by}", "0}"),
        "every launch takes the masks of the first": Edit(
            "attention/tile_scheduler.cuh", "work_tile", "shape.first_batch + batch_entry", "batch_entry"
        ),
    },
    kernel_guards.tensor_cores_are_right: {
        "dQ leaves before it is there": Edit("attention/epilogue_mma.cuh", "write_gradient", "__syncthreads();", ""),
        "sums of dQ start at 1": Edit(
            "attention/delta.cuh", "clear_dq_sum", "(sums + x) = {", "(sums + x) = {{0x3f800000}"
        ),
        "delta of tensor cores misses dlse": Edit(
            "attention/delta.cuh", "for_each_delta", "sum - dlse.at(row, 0));", "sum);"
        ),
        "P that is made meanwhile misses its first columns": Edit(
            "attention/score_gradient_mma.cuh", "overlap_probabilities_with_dp", "!= k_step)", "!= k_step + 1)"
        ),
        "dS that is made apart misses delta": Edit(
            "attention/score_gradient_mma.cuh", "score_gradient_columns", ".at(i, j), row.delta[i])", ".at(i, j), 0.0f)"
        ),
        "all columns of P are stored as the first eight": Edit(
            "attention/score_gradient_mma.cuh", "overlap_probabilities_with_dp", "(j / 2);", "(0);"
        ),
        "a gradient that is summed afterwards loses its last column": Edit(
            "attention/score_gradient_mma.cuh", "write_accumulators", "(j) < num_columns)", "(j) < num_columns - 1)"
        ),
        "o of tensor cores is not rescaled": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax.update",
            "if (update_max(s, softmax_scale_log2, factor)) rescale(o, factor);",
            "update_max(s, softmax_scale_log2, factor);",
        ),
        "a fragment's second row takes the first's mask": Edit(
            "attention/mask_softmax_mma.cuh", "mask_rows", "+ Tile::row(i));", "+ Tile::row(i / 2 * 2));"
        ),
        "bits of a fragment are its neighbour's": Edit(
            "attention/mask_softmax_mma.cuh", "mask_rows", "::first_column() % 8)", "::first_column() % 8 / 4 * 4)"
        ),
        "masked scores count": Edit(
            "attention/score_gradient_mma.cuh", "score_gradients", "!IsMasked || !is_masked_score(s.at(i, j));", "true;"
        ),
    },
    kernel_guards.parts_are_right: {
        "a part's last step is lost": Edit(
            "attention/block_iterator.cuh", "split_range",
            "Width * split_start(num_steps, part + 1, num_parts));",
            "Width * (split_start(num_steps, part + 1, num_parts) - 1));",
        ),
        "a part's last entry is lost": Edit(
            "attention/block_iterator.cuh", "split_range", ", part + 1, num_parts);", ", part + 1, num_parts) - 1;"
        ),
        "a packed row past the first head sees what a later query does": Edit(
            "attention/mask_softmax_mma.cuh", "PackedQuery.operator()", "return row % seqlen_q;", "return row;"
        ),
    },
    sm90_guards.forward_is_right: {
        "the first tile starts before the first query": Edit(
            "attention/tile_scheduler.cuh", "query_tile_at", "max(first, 0)", "first"
        ),
        "queries share their sums": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax.finalize",
            "ptx::reciprocal_approx(divisor)",
            "ptx::reciprocal_approx(sum[0])",
        ),
        "lse is another query's": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax.finalize", "::log_accurate(divisor", "::log_accurate(sum[0]"
        ),
        "weights that are too large count": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax.try_exp_with_stale_max",
            "if (__any_sync(0xffffffffu, !is_small)) return false;",
            "",
        ),
        "a warp looks at its first thread's weights alone": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax.try_exp_with_stale_max",
            "if (__any_sync(0xffffffffu, !is_small))",
            "if (!__shfl_sync(0xffffffffu, is_small, 0))",
        ),
        "weights of a row are another's sum": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax.try_exp_with_stale_max", "[i] += sum[i];", "[i] += sum[0];"
        ),
        "a tile's first step is plain": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax", "int max_reasons = kNoKeyYet;", "int max_reasons = 0;"
        ),
        "steps with large maxima are plain": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax.update_max", "max_reasons = kLargeMax *", "max_reasons = 0 *"
        ),
        "steps are plain for queries that have seen no key": Edit(
            "attention/mask_softmax_mma.cuh", "LazySoftmax.update_max", "+ kNoKeyYet * __any_sync", "+ 0 * __any_sync"
        ),
        "a band ends with the first row's": Edit(
            "attention/mask_softmax_mma.cuh", "mask_band", "columns_before(keys.hi + row)", "columns_before(keys.hi)"
        ),
        "a band starts with the first row's": Edit(
            "attention/mask_softmax_mma.cuh", "mask_band", "columns_before(keys.lo + row)", "columns_before(keys.lo)"
        ),
        "a band ends alike for all rows of a thread": Edit(
            "attention/mask_softmax_mma.cuh", "mask_band", "min(hi + 2 * i, last)", "min(hi, last)"
        ),
        "a band starts alike for all rows of a thread": Edit(
            "attention/mask_softmax_mma.cuh", "mask_band", "max(lo + 2 * i, first)", "max(lo, first)"
        ),
        "a band continues past the last key": Edit(
            "attention/mask_softmax_mma.cuh", "mask_band", "min(hi + 2 * i, last)", "hi + 2 * i"
        ),
        "keys of the step before count again in a band": Edit(
            "attention/mask_softmax_mma.cuh", "mask_band", "max(lo + 2 * i, first)", "lo + 2 * i"
        ),
        "a thread's two columns are one": Edit(
            "attention/mask_softmax_mma.cuh", "mask_band", "min(key - first_key & 7, 2)", "min(key - first_key & 7, 1)"
        ),
    },
    sm90_guards.gradients_are_right: {
        "a second launch finds the count of the first": Edit(
            "attention/tile_scheduler.cuh", "next_tile_number", "if (fetched == num_tiles - 1) tile::reset(next);", ""
        ),
        "wide gradients lose a row": Edit(
            "attention/score_gradient_mma.cuh", "write_accumulators", "row(i) >= work.last)", "row(i) >= work.last - 1)"
        ),
    },
    sm90_guards.finished_gradients_are_right: {
        "first keys are taken with the others": Edit(
            "attention/tile_scheduler.cuh", "FusedDqTileOrder.at",
            "rank == 0 ? last_tile_lead + first_tile_lag : last_tile_lead", "last_tile_lead"
        ),
        "dQ of the first places is rounded at the end": Edit(
            "attention/tile_scheduler.cuh", "query_tile_reversed",
            "scheduler.num_tiles - 1 - blockIdx.x;",
            "scheduler.num_tiles - 1 - (gridDim.x - 1 - blockIdx.x) - (scheduler.num_batch_heads * "
            "scheduler.num_tiles - gridDim.x);",
        ),
    },
    sm90_guards.gradients_of_lists_are_right: {
        "tiles do not end with blocks": Edit(
            "attention/tile_scheduler.cuh", "query_tile_end", "min(last, (first / block + 1) * block) :", "last :"
        ),
    },
}  # fmt: skip
