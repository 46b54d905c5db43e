"""Planted faults in sm90's gradients up to 128 columns, in the loading of queries, and in the sums of dQ."""

from __future__ import annotations

from mutations import sm90_guards
from mutations.planting import Edit

PARTS = "sm90/sequence_parts.cuh"
FAULTS = {
    sm90_guards.gradients_are_right: {
        "keys of the last queries have no tile": Edit(
            "sm90/q_producer.cuh", "find_visit_range", "(visit_range.start >= params.shape.seqlen_q)",
            "(visit_range.start >= params.shape.seqlen_q - 32)",
        ),
        "rooms are not fenced": Edit("sm90/q_pipeline.cuh", "run_roles", "ptx::fence_mbarrier_init();", ""),
        "queries past a step are alive": Edit(
            "sm90/q_producer.cuh", "has_rows_to_zero", "(block.stop < min(block.", "(false && block.stop < min(block."
        ),
        "queries without a key are alive": Edit(
            "sm90/q_producer.cuh", "has_rows_to_zero", "first.lo >= first.hi || last.lo >= last.hi;", "false;"
        ),
        "K is kept where no query sees it": Edit(
            "sm90/q_producer.cuh", "visible_keys",
            "max(work.first, interval(params, work.batch_head, 0).lo), min(end_of_keys(params, work),",
            "work.first, max(end_of_keys(params, work),",
        ),
        "every step is whole": Edit(
            "sm90/q_producer.cuh", "load_tile", "smem.kv_phases | (is_full_block ?", "smem.kv_phases | (true ?"
        ),
        "a step's keys are all seen": Edit(
            "sm90/q_copy_warps.cuh", "bit_range", "ptx::bits_at_or_above(lo) & ~ptx::bits_at_or_above(hi);", "~0u;"
        ),
        "a band starts a query late": Edit(
            "sm90/q_copy_warps.cuh", "compute_band_masks", "start - params.work.upper", "start + 1 - params.work.upper"
        ),
        "a band ends a query early": Edit(
            "sm90/q_copy_warps.cuh", "compute_band_masks", "start - params.work.lower + 1", "start - params.work.lower"
        ),
        "queries past a step see keys": Edit(
            "sm90/q_copy_warps.cuh", "compute_band_masks", "min(last + key, block.stop - block.start) :", "last + key :"
        ),
        "bits of queries stand for keys": Edit(
            "sm90/q_copy_warps.cuh", "compute_row_masks", "tile::transpose_bits_in_warp(bits)", "bits"
        ),
        "a key's first query is searched for among rows that start": Edit(
            "sm90/q_producer.cuh", "find_visit_range", "(end % 2 == 0 ? keys.hi : keys.lo) <= key", "keys.lo <= key"
        ),
        "the last row is not searched": Edit(
            "sm90/q_producer.cuh", "find_visit_range", "row < last && (end", "row < last - 1 && (end"
        ),
        "a head's work is read before it is written": Edit(
            "sm90/q_producer.cuh", "load_tile", "__syncwarp(); HeadWork& head_work", "HeadWork& head_work"
        ),
        "K comes while the last one is read": Edit(
            "sm90/q_copy_warps.cuh", "prepare_steps", "tile::wait_empty(smem.k, k_phase(message.flags));", ""
        ),
        "P of masked keys is kept": Edit(
            "sm90/backward_scores.cuh", "make_p_and_ds",
            "if (!queries.is_plain()) clamp_and_mask<true>(s, queries);", ""
        ),
        "bits of a list are all 1": Edit("sm90/q_copy_warps.cuh", "row_mask_bits", "bits &= listed;", ""),
        "a warp has another's bits": Edit(
            "sm90/backward_tiles.cuh", "MaskOfThread", "[Scores::first_row()]", "[ptx::lane() / 4]"
        ),
        "a thread has another's bits": Edit(
            "sm90/backward_tiles.cuh", "MaskOfThread", "[x] | all) >> queries.first_query;", "[x] | all);"
        ),
        "a query has its neighbour's delta": Edit(
            "sm90/backward_tiles.cuh", "StepQueries.delta", ".delta + first_query;", ".delta + (first_query ^ 2);"
        ),
        "lse is that of the step before": Edit(
            "sm90/backward.cu", "consume_with_next_dp", "(smem.queries[next_state.stage].stats",
            "(smem.queries[state.stage].stats",
        ),
        "lse of 128 queries is that of the first step": Edit(
            "sm90/backward.cu", "consume_without_next_dp", "lse_2(queries.lse_2())",
            "lse_2(smem.queries[0].stats.lse_2 + first_query)",
        ),
        "delta is that of the step before": Edit(
            "sm90/backward.cu", "consume_with_next_dp", "delta, next_lse_2, next_state,", "delta, next_lse_2, state,"
        ),
        "P is made before the scores are there": Edit(
            "sm90/backward.cu", "consume_with_next_dp", "tile::wait_wgmma<1>(next_s);", ""
        ),
        "minima are left out where an lse is large": Edit(
            "sm90/backward_statistics.cu", "compute_query_stats", "fabsf(lse_2) > kLargestPlainLse2", "false"
        ),
        "lse of the first rows count alone": Edit(
            "sm90/backward_statistics.cu", "compute_query_stats", "has_large |=", "has_large |= first == 0 &&"
        ),
        "queries without a key count as others": Edit(
            "sm90/backward_statistics.cu", "compute_query_stats", "has_empty_rows = has_empty_row", "has_empty_rows = 0"
        ),
        "queries without a key are copied": Edit(
            "sm90/backward_statistics.cu", "compute_query_stats",
            "__ballot_sync(0xffffffffu, is_nonempty)",
            "0xffffffffu",
        ),
        "delta lies a row further": Edit(
            "sm90/backward_statistics.cu", "run", "[row - work.first]", "[(row - work.first) ^ 1]"
        ),
        "lse is in base e": Edit(
            "sm90/backward_statistics.cu", "compute_query_stats",
            "lse_in_base_2(lse.at(work.first + row, 0))",
            "lse.at(work.first + row, 0)",
        ),
        "what is known is the first tile's": Edit(
            "sm90/q_producer.cuh", "load_tile", "head_work.records[number]", "head_work.records[0]"
        ),
        "what is known is not waited for": Edit(
            "sm90/q_producer.cuh", "load_queries", "StepMessage::kThreadsCopyQ, sizeof stats",
            "StepMessage::kThreadsCopyQ",
        ),
        "a large lse hides keys": Edit(
            "sm90/backward_tiles.cuh", "MaskOfThread", "queries.flags & StepMessage::kMasked ? 0 : ~0u;", "0;"
        ),
        "a mask hides nothing": Edit(
            "sm90/backward_tiles.cuh", "MaskOfThread", "= queries.flags & StepMessage::kMasked ? 0 : ~", "= ~"
        ),
        "dS is multiplied before it is there": Edit(
            "sm90/backward_epilogue.cuh", "start_dq",
            "ptx::bar_sync(kConsumersSync, kNumConsumers * kWarpgroupThreads);", ""
        ),
        "dS is not fenced": Edit("sm90/backward_epilogue.cuh", "start_dq", "ptx::fence_proxy_async();", ""),
        "dS is written while the other warpgroup's dQ is made": Edit(
            "sm90/backward_epilogue.cuh", "wait_ds",
            "if constexpr (kMakesDq) ptx::bar_sync(kDsEmpty + part, kNumConsumers * kWarpgroupThreads);",
            "",
        ),
        "dQ is written while the last one is added": Edit(
            "sm90/dq_writer.cuh", "dq_writer", "release_dq<0>(1, is_end);", "release_dq<2>(1, is_end);"
        ),
        "dQ's first part is written while the last one is added": Edit(
            "sm90/dq_writer.cuh", "dq_writer", "release_dq<1>(0, is_end);", "release_dq<2>(0, is_end);"
        ),
        "dQ is added before it is there": Edit(
            "sm90/dq_writer.cuh", "dq_writer",
            "ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32); store_dq_sum(sum,",
            "store_dq_sum(sum,",
        ),
        "dQ is not fenced": Edit("sm90/dq_writer.cuh", "store_dq_sum", "ptx::fence_proxy_async();", ""),
        "both parts of dQ are added to the first": Edit(
            "sm90/dq_writer.cuh", "store_dq_sum", "= sum + part * kDqPartBytes / 4;", "= sum;"
        ),
        "both parts of dQ are the first": Edit(
            "sm90/dq_writer.cuh", "store_dq_sum",
            "bulk_add(part_sum, dq_address(part)",
            "bulk_add(part_sum, dq_address(0)",
        ),
        "a note is read before it is there": Edit(
            "sm90/q_copy_warps.cuh", "prepare_steps",
            "ptx::mbarrier_wait(ptx::shared_address(&smem.message_ready[state.stage]), state.phase);",
            "",
        ),
        "a head takes the place of one that helpers work on": Edit(
            "sm90/q_producer.cuh", "advance_head", "? (work_slot + 1) % kNumHeadWorks", "? (work_slot + 1) % 2"
        ),
        "a head's queries have the mask of the one before": Edit(
            "sm90/q_producer.cuh", "load_tile", "message.work = work_slot;", "message.work = 0;"
        ),
        "both warpgroups make one part of dQ": Edit(
            "sm90/backward_epilogue.cuh", "start_dq", "kRowParts == 1 ? part * KOfWarpgroup::kBytes : 0", "0"
        ),
        "Q is left before dK is made": Edit(
            "sm90/backward.cu", "consume_with_next_dp",
            "tile::wait_wgmma<1>(dv);",
            "tile::arrive(smem.q[state.stage].empty); tile::wait_wgmma<1>(dv);",
        ),
        "dO is left before dV is made": Edit(
            "sm90/backward.cu", "consume_with_next_dp", "tile::wait_wgmma<1>(dv);", "tile::wait_wgmma<2>(dv);"
        ),
        "the last part of dQ is lost": Edit(
            "sm90/backward.cu", "end_step", "else if constexpr (kMakesDq) stage_dq(dq, dq_staging, part);", ""
        ),
        "delta of a whole tile misses a chunk": Edit(
            "sm90/backward_statistics.cu", "for_each_delta_of_full_tile",
            "for (int c = 0; c < kChunksPerThread; ++c)\n#pragma unroll\nfor",
            "for (int c = 1; c < kChunksPerThread; ++c)\n#pragma unroll\nfor",
        ),
        "delta of a whole tile misses dlse": Edit(
            "sm90/backward_statistics.cu", "for_each_delta_of_full_tile", "sum - dlse.at(own, 0)", "sum"
        ),
        "results are those of the next tile": Edit(
            "sm90/backward.cu", "end_step", "smem.messages[state.stage].work", "smem.messages[state.next().stage].work"
        ),
        "gradients start with those of the last tile": Edit(
            "sm90/backward.cu", "end_step", "dk.fill(0); dv.fill(0); wait_kv(flags);", "wait_kv(flags);"
        ),
        "the next tile's keys are not awaited": Edit("sm90/backward.cu", "end_step", "wait_kv(flags); }", "}"),
        "keys are left before dQ is made": Edit(
            "sm90/backward.cu", "consume_with_next_dp",
            "tile::wait_wgmma<1>(dv);",
            "if (starts_next_tile(flags)) release_kv(); tile::wait_wgmma<1>(dv);",
        ),
        "K of another head is let in before dQ is made": Edit(
            "sm90/backward.cu", "consume_with_next_dp", "flags = wait_step(next_state);",
            "flags = wait_step(next_state); wait_next_head_k(flags);",
        ),
        "keys are never left": Edit("sm90/backward.cu", "end_step", "if (starts_next_tile(flags)) release_kv();", ""),
        "K of every tile has one phase": Edit(
            "sm90/q_producer.cuh", "load_tile", "smem.kv_phases ^= StepMessage::kPhaseOfK |", "smem.kv_phases ^= 0 |"
        ),
        "V of every tile has one phase": Edit(
            "sm90/q_producer.cuh", "load_tile", "(has_k ? 0 : StepMessage::kPhaseOfV)", "0"
        ),
        "a tile that nobody works on takes a place": Edit(
            "sm90/q_producer.cuh", "produce", "has_sent_step = false; }", "}"
        ),
        "a tile takes the place of the one before": Edit(
            "sm90/q_producer.cuh", "produce", "(has_sent_step) work_slot = (work_slot", "(false) work_slot = (work_slot"
        ),
        "dK of keys that no query sees is what stands there": Edit(
            "sm90/q_producer.cuh", "load_tile",
            "write_empty_rows(params, params.dk, smem.works[work_slot].tile, shape.head_dim);",
            "",
        ),
        "the count of tiles starts anywhere": Edit(
            "sm90/backward_statistics.cu", "run", "reset_tile_counter(params);", ""
        ),
        "dK is not scaled": Edit(
            "sm90/backward_epilogue.cuh", "write_gradients", "dk.scale(params.shape.softmax_scale);", ""
        ),
        "one head gives dK and dV": Edit("sm90/q_producer.cuh", "load_tile", "head < shape.group_size", "head < 1"),
        "sums of dQ go to the first tile": Edit(
            "sm90/q_producer.cuh", "load_tile", "head_work.dq_sum + number * params", "head_work.dq_sum + 0 * params"
        ),
        "dQ is not scaled": Edit("sm90/convert_dq.cu", "run", "dq.scale(shape.softmax_scale);", ""),
    },
    sm90_guards.wide_gradients_are_right: {
        "dO is brought while the last one is read": Edit(
            "sm90/q_producer.cuh", "load_tile", "if constexpr (kReleasesDo) tile::wait_empty(d_o, do_phase(state));", ""
        ),
        "K of a head is never left": Edit(
            "sm90/q_pipeline.cuh", "wait_next_head_k", "tile::arrive(smem.k.empty);", ""
        ),
        "K of a head is awaited in the wrong phase": Edit(
            "sm90/q_pipeline.cuh", "wait_next_head_k", "::wait_full(smem.k, k_phase(flags));", "::wait_full(smem.k, 0);"
        ),
        "V is not awaited": Edit("sm90/q_pipeline.cuh", "wait_kv", "tile::wait_full(smem.v, v_phase(flags));", ""),
        "helpers are a phase of dO ahead": Edit(
            "sm90/q_copy_warps.cuh", "prepare_steps",
            "tile::wait_empty(smem.d_o[do_stage(state)], do_phase(state));",
            "{}",
        ),
        "the one stage of dO has Q's phase": Edit(
            "sm90/q_storage.cuh", "do_phase", "kDoStages == 1 ? state.stage : state.phase", "state.phase"
        ),
    },
    sm90_guards.finished_gradients_are_right: {
        "who adds waits for tiles that store nothing": Edit(
            "sm90/dq_semaphore.cuh", "dq_schedule", "min(from_last, last - first_stored + 1)", "(from_last + 1)"
        ),
        "who finishes waits for itself too": Edit(
            "sm90/dq_semaphore.cuh", "dq_schedule", ", 0, 0, last, false, true}", ", 0, 0, last + 1, false, true}"
        ),
        "all tiles have the same bit": Edit("sm90/dq_semaphore.cuh", "dq_schedule", "1 << min(from_last, 31),", "1,"),
        "part of a tile of queries counts as stored": Edit(
            "sm90/dq_semaphore.cuh", "dq_schedule", "(work.last - upper) / Height * Height", "work.last - upper + 1"
        ),
        "the step after those that store stores too": Edit(
            "sm90/dq_semaphore.cuh", "DqSchedule.at", "stores = false;", ""
        ),
        "who adds first stores": Edit(
            "sm90/dq_semaphore.cuh", "dq_schedule", "0, awaited_bits_or_count, false", "0, awaited_bits_or_count, true"
        ),
        "sums of the first keys' own queries are anything": Edit(
            "sm90/dq_semaphore.cuh", "stores_dq",
            "interval(params, queries.batch_head, queries.last - 1).hi > Width",
            "true",
        ),
        "sums are those of the place before": Edit(
            "sm90/dq_semaphore.cuh", "dq_semaphore", "+ batch_head_number(params.shape, batch_head);", "+ 0;"
        ),
        "nobody tells that a tile is done": Edit(
            "sm90/dq_semaphore.cuh", "DqSchedule.at", "is_last && !finishes}", "false}"
        ),
        "sums are taken before they are brought": Edit(
            "sm90/dq_writer.cuh", "load_dq_sum",
            "ptx::mbarrier_wait(ptx::shared_address(&smem.dq_sum_loaded), phase);",
            "",
        ),
        "all sums are awaited in one phase": Edit("sm90/dq_writer.cuh", "dq_writer", "phase ^= 1;", ""),
        "half of the sums are brought": Edit(
            "sm90/dq_writer.cuh", "load_dq_sum", "(dq_address(0), sum, kNumConsumers *", "(dq_address(0), sum,"
        ),
        "sums are stored where they should be added": Edit(
            "sm90/dq_writer.cuh", "dq_writer",
            "Config::kFinishesDqInOrder && flags & StepMessage::kStoresDq",
            "Config::kFinishesDqInOrder",
        ),
        "sums are added where they should be stored": Edit(
            "sm90/dq_writer.cuh", "dq_writer", "Config::kFinishesDqInOrder && flags & StepMessage::kStoresDq",
            "false",
        ),
        "the room is left before it is read": Edit(
            "sm90/backward_epilogue.cuh", "finish_dq",
            "softmax_scale);",
            "softmax_scale); ptx::bar_arrive(kDqFull + part, kWarpgroupThreads + 32);",
        ),
        "dQ is that of the step after": Edit(
            "sm90/backward.cu", "end_step", "smem.messages[state.stage], part,",
            "smem.messages[state.next().stage], part,",
        ),
        "dQ is not scaled": Edit(
            "sm90/backward_epilogue.cuh", "finish_dq", "(rows, dq, first, scale)", "(rows, dq, first, 1.0f)"
        ),
        "steps that finish are walked as others": Edit(
            "sm90/q_producer.cuh", "store_head_work", "(head_work.dq.finishes ? StepMessage::kFinalizesDq : 0)", "0"
        ),
        "blocks have their first tiles by their own numbers": Edit(
            "sm90/q_producer.cuh", "advance_tile", "if constexpr (kTakesTilesInOrder) number =", "if (false) number ="
        ),
        "the last places' sums are not set to 0": Edit(
            "sm90/backward_statistics.cu", "run",
            "if (!kCountsDqTiles && !stores_dq<kBlockKv>(params, work)) clear_dq_sum(params, work, number);",
            "",
        ),
    },
    sm90_guards.gradients_of_intervals_are_right: {
        "the tile with the last key counts not": Edit(
            "sm90/dq_arrivals.cuh", "num_visiting_key_tiles", "(hi + Width - 1) / Width", "hi / Width"
        ),
        "all tiles before the last key count": Edit(
            "sm90/dq_arrivals.cuh", "num_visiting_key_tiles", "- lo / Width, 0)", ", 0)"
        ),
        "tiles count for queries past all keys": Edit(
            "sm90/dq_arrivals.cuh", "num_visiting_key_tiles", "lo < params.shape.seqlen_kv ?", "true ?"
        ),
        "tiles that the last query leaves count less": Edit(
            "sm90/dq_arrivals.cuh", "num_visiting_key_tiles", ".batch_head, work.first)", ".batch_head, work.last - 1)"
        ),
        "sums are not those of the sequence's tile": Edit(
            "sm90/backward_statistics.cu", "run", "clear_dq_sum(params, work, number)",
            "clear_dq_sum(params, work, work.first / kBlockQ)"
        ),
        "a block of an order has one tile": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles", "!Config::kCutsSequences || queries.is_empty()", "true"
        ),
        "the queries of a block are those of its positions": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles",
            "if (takes_number) queries = queries_of_block<kBlockQ>(params, tile_at(params, pages, chosen, number));",
            "if (takes_number) { queries = queries_of_block<kBlockQ>(params, tile_at(params, pages, chosen, number)); "
            "queries.last = tile_at(params, pages, chosen, number).last; }",
        ),
    },
    sm90_guards.gradients_of_cut_sequences_are_right: {
        "a tile continues in the next sequence": Edit(
            PARTS, "SequenceParts.last", "min(starts[number + 1], starts[number] + Height)", "starts[number] + Height"
        ),
        "keys of the next sequence are stored too": Edit(
            PARTS, "key_part_at", "work.last = keys.last(number);", "work.last = min(work.first + Height, keys.length);"
        ),
        "the first step is lost": Edit(
            PARTS, "PartIterator", "number_(visit_range.first_entry)", "number_(visit_range.first_entry + 1)"
        ),
        "the tile before a sequence is found": Edit(
            PARTS, "SequenceParts.find", "num_tiles)] > row)", "num_tiles)] >= row)"
        ),
        "the second tile that may have a row is found": Edit(
            PARTS, "SequenceParts.find", "__ffs(is_behind) - 1", "__ffs(is_behind)"
        ),
        "rows have the tiles of multiples": Edit(
            PARTS, "SequenceParts.find", "return from + __ffs(is_behind) - 1", "return from"
        ),
        "32 tiles are passed over": Edit(PARTS, "SequenceParts.find", "from += 32", "from += 64"),
        "queries of further entries start some elements early": Edit(
            PARTS, "SequenceParts.of_queries", "(list.num_q_blocks + 1)", "(list.num_q_blocks - 3)"
        ),
        "keys of further entries start some elements early": Edit(
            PARTS, "SequenceParts.of_keys", "(list.num_kv_blocks + 1)", "(list.num_kv_blocks - 3)"
        ),
        "heads that share keys have tiles of their own": Edit(
            PARTS, "SequenceParts.of_keys", "batch_head.head -= batch_head.head % params.shape.group_size;", ""
        ),
        "empty tiles count": Edit(PARTS, "num_visiting_parts", "first < last &&", ""),
        "a tile behind the last key counts": Edit(PARTS, "num_visiting_parts", "first < hi &&", "first <= hi &&"),
        "a tile before the first key counts": Edit(PARTS, "num_visiting_parts", "last > lo;", "last >= lo;"),
        "late sequences have too few tiles": Edit(
            PARTS, "num_visiting_parts", "hi / Height + 1 + keys.num_tiles - keys.length / Height", "hi / Height + 1"
        ),
        "tiles of the last query alone count": Edit(
            PARTS, "num_visiting_parts", "queries.first).lo", "queries.last - 1).lo"
        ),
        "steps end a tile late": Edit(
            PARTS, "PartIterator.next", "start >= visit_range_.stop", "start > visit_range_.stop"
        ),
        "steps are full before all queries see all keys": Edit(
            PARTS, "PartIterator.next", "start >= visit_range_.full_start &&", ""
        ),
        "steps are full where queries leave keys": Edit(
            PARTS, "PartIterator.next", "&& stop <= visit_range_.full_stop", ""
        ),
        "statistics lie by multiples": Edit(
            "sm90/query_stats.cuh", "own_query_number", "query_part_reversed<kBlockQ>(params).number",
            "work.first / kBlockQ",
        ),
        "steps read statistics by multiples": Edit(
            "sm90/q_producer.cuh", "step_number", "return block.entry;", "return block.start / kBlockQ;"
        ),
        "queries of no sequence are alive": Edit(
            "sm90/q_producer.cuh", "has_empty_rows_past", "is_empty |= keys.lo >= keys.hi;", ""
        ),
        "queries past the first 32 are alive": Edit(
            "sm90/q_producer.cuh", "has_empty_rows_past", "row += 32", "row += 64"
        ),
        "dQ of the next sequence is stored too": Edit(
            "sm90/backward_epilogue.cuh", "finish_dq", "? message.block.stop :", "? message.block.start + kBlockQ :"
        ),
        "tiles of keys that count are those of multiples": Edit(
            "sm90/dq_arrivals.cuh", "store_num_visitors", "num_visiting_parts<Width>(", "num_visiting_key_tiles<Width>("
        ),
    },
    sm90_guards.gradients_of_lists_are_right: {
        "blocks that are cut count as whole": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals",
            "num += !is_cut || (lo < min(key + Width, last) && hi > key);",
            "++num;",
        ),
        "a tile whose last key is the first of a query counts not": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals", "< min(key + Width, last)", "+ 1 < min(key + Width, last)"
        ),
        "a tile whose first key is the last of a query counts not": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals", "&& hi > key)", "&& hi > key + 1)"
        ),
        "a tile past the last key of all counts": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals", "&& hi > key)", "&& hi >= key)"
        ),
        "a tile before the first key of all counts": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals", "lo < min(key + Width, last", "lo <= min(key + Width, last"
        ),
        "a block counts as one tile": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals", "< last; key += Width)", "< last; key += list.block_kv)"
        ),
        "keys past the end count": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals",
            "min(first + list.block_kv, params.shape.seqlen_kv);",
            "first + list.block_kv;",
        ),
        "all rows have the visits of the first": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals", "+ work.first / list.block_q;", ";"
        ),
        "all heads have the visits of the first": Edit(
            "sm90/dq_arrivals.cuh", "num_expected_arrivals", "list_index(list, work.batch_head) * list.", "0 * list."
        ),
        "dQ that nobody makes is what stands there": Edit(
            "sm90/dq_arrivals.cuh", "store_num_visitors", "tile::clear(matrix<", "if (false) tile::clear(matrix<"
        ),
        "who comes before the last finishes": Edit(
            "sm90/dq_arrivals.cuh", "DqArrival.of", "is_last = before == num - 1;", "is_last = before == num - 2;"
        ),
        "nobody finishes": Edit(
            "sm90/dq_arrivals.cuh", "DqArrival.of", "bool is_last = before == num - 1;", "bool is_last = false;"
        ),
        "who comes alone adds sums": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "is_first ? DqFinish::kAlone : DqFinish::", "DqFinish::"
        ),
        "sums of others are left out": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused",
            "is_first ? DqFinish::kAlone : DqFinish::kWithSums;",
            "DqFinish::kAlone;",
        ),
        "who comes first adds": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "(message.dq_sum, part, is_first)", "(message.dq_sum, part, false)"
        ),
        "who comes second stores": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", ".dq_sum, part, is_first);", ".dq_sum, part, arrival.before <= 1);"
        ),
        "who finishes adds too": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "if (!is_last) store_dq_sum(", "store_dq_sum("
        ),
        "sums are brought while the room is read": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "ptx::bulk_wait_read<0>(); __syncwarp();", ""
        ),
        "all sums are awaited in one phase": Edit("sm90/dq_writer.cuh", "dq_writer_fused", "phase ^= 1;", ""),
        "nobody tells that a visit is done": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "tile::signal(unsignalled, kArrivalIsDone);", ""
        ),
        "the last addition is not told": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "} signal_previous();", "}"
        ),
        "a signal may precede the result": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "tile::wait_bulk_copies(); tile::signal(", "tile::signal("
        ),
        "the queries' room is left before they are asked": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused",
            "const PipelineState next_state = state.next();",
            "tile::arrive(smem.q[state.stage].empty); const PipelineState next_state = state.next();",
        ),
        "dQ is added before it is there": Edit(
            "sm90/dq_writer.cuh", "dq_writer_fused", "ptx::bar_sync(kDqFull + part, kWarpgroupThreads + 32);", ""
        ),
        "steps that hide nothing are not noted": Edit(
            "sm90/q_producer.cuh", "load_tile", "(Config::kLastFinishesDq || kMessagesHaveBlocks",
            "(kMessagesHaveBlocks",
        ),
        "whether a step finishes is asked too early": Edit(
            "sm90/backward.cu", "end_step",
            "wait_dq(part); dq_finish = smem.dq_finish;",
            "dq_finish = smem.dq_finish; wait_dq(part);",
        ),
        "queries past the step's last one are left": Edit(
            "sm90/backward_epilogue.cuh", "finish_dq",
            "attention::query_tile_end<Listed>(params, message.block.start, kBlockQ)",
            "message.block.stop",
        ),
        "dQ is not scaled": Edit(
            "sm90/backward_epilogue.cuh", "finish_dq", "(rows, dq, first, scale)", "(rows, dq, first, 1.0f)"
        ),
    },
    sm90_guards.gradients_in_two_walks_are_right: {
        "Q's room awaits who adds up": Edit(
            "sm90/q_pipeline.cuh", "run_roles", "(kHasDqWriter && has_messages)", "has_messages"
        ),
        "rows past a step are copied": Edit(
            "sm90/q_copy_warps.cuh", "copy_queries",
            "(kIsWide || row < message.block.stop - message.block.start) &&",
            "",
        ),
        "dK is that of the last step but one": Edit("sm90/backward.cu", "end_step", "tile::wait_wgmma<0>(dk);", ""),
    },
}  # fmt: skip
