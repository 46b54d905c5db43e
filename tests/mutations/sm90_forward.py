"""Planted faults in sm90's forward pass, and in the loading of keys and values."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.sm90_guards import forward_is_right, gradients_in_two_walks_are_right

FAULTS = {
    forward_is_right: {
        "barriers are not fenced": Edit("sm90/kv_pipeline.cuh", "init_barriers", "ptx::fence_mbarrier_init();", ""),
        "copied rows count as there before they are": Edit(
            "sm90/kv_producer.cuh", "load_rows",
            "tile::copy<32>(boxes(), all.rows(first, last), tile::lane(), [](int) { return true; "
            "}); tile::arrive(slot.full);",
            "tile::arrive(slot.full); tile::copy<32>(boxes(), all.rows(first, last), tile::lane(), "
            "[](int) { return true; });",
        ),
        "V past a step is what stands there": Edit(
            "sm90/kv_producer.cuh", "load_values", "zero_fills = ends_inside_block(block, length)", "zero_fills = false"
        ),
        "keys of the step before count again": Edit(
            "sm90/kv_pipeline.cuh", "mask_block", "row_mask.lo = max(row_mask.lo, message.unread_start);", ""
        ),
        "a wider step is whole": Edit(
            "sm90/kv_producer.cuh", "step_flags", "is_unmasked = !is_shifted &&", "is_unmasked ="
        ),
        "V is that of a step that is not wider": Edit(
            "sm90/kv_producer.cuh", "load_values",
            "shift_short_block<kBlockKv, kKeepsSteps>(block, tile_info.visit_range, length);",
            "",
        ),
        "an array without a map is left to the accelerator": Edit(
            "sm90/tensor_maps.cuh", "has_tensor_map", "map.is_valid &&", ""
        ),
        "an odd start is left to the accelerator": Edit(
            "sm90/tensor_maps.cuh", "has_tensor_map", "&& reinterpret_cast<uint64_t>(matrices.data) % 16 == 0", ""
        ),
        "a broadcast axis is stepped over": Edit(
            "sm90/tensor_maps.cuh", "tma_coords", "strides[2] == 0 ? 0 :", ""
        ),
        "K is that of the query's head": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles", ".head / params.shape.group_size", ".head"
        ),
        "one stage serves all": Edit("sm90/kv_storage.cuh", "stage_of", "return count % kNumStages;", "return 0;"),
        "every lane asks for a tile": Edit(
            "sm90/kv_tile_scheduler.cuh", "advance_tile", "if (is_first_lane()) number = attention",
            "number = attention"
        ),
        "nobody has the first tiles": Edit(
            "sm90/kv_tile_scheduler.cuh", "advance_tile", "if (is_first) return attention::first_tile_number();", ""
        ),
        "K is left before it is multiplied": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages",
            "next_operands.start_products(s, o, p, group, num_k_blocks);",
            "next_operands.start_products(s, o, p, group, num_k_blocks); "
            "tile::arrive(shared().k[stage_of(num_k_blocks)].empty);",
        ),
        "V is left before it is multiplied": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages",
            "tile::wait_wgmma<0>(o); if (num_k_blocks > 0) tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);",
            "if (num_k_blocks > 0) tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty); tile::wait_wgmma<0>(o);",
        ),
        "V is left before it is multiplied, with one room for Q": Edit(
            "sm90/forward.cu", "consume_with_one_q_stage",
            "tile::wait_wgmma<0>(o); if (!is_first) tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);",
            "if (!is_first) tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty); tile::wait_wgmma<0>(o);",
        ),
        "Q is left with the first step": Edit(
            "sm90/forward.cu", "release_k", "(is_last", "(shared().messages[stage_of(num_k_blocks)].block.start == 0"
        ),
        "Q's room is left before O went through it": Edit(
            "sm90/forward_epilogue.cuh", "epilogue",
            "store_boxes<Element>",
            "tile::arrive(shared().q[q_stage_of(num_tiles_done)].empty); store_boxes<Element>",
        ),
        "O is written before it is there": Edit("sm90/store_boxes.cuh", "store_boxes", "__syncwarp();", ""),
        "O is not fenced": Edit("sm90/store_boxes.cuh", "store_boxes", "ptx::fence_proxy_async();", ""),
        "Q's room is left while O leaves it": Edit(
            "sm90/forward_epilogue.cuh", "release_q", "ptx::bulk_wait_read<0>();", ""
        ),
        "O is put where another warp's is": Edit(
            "sm90/store_boxes.cuh", "store_boxes", "(o_smem, rounded, o.warp_row());", "(o_smem, rounded, 0);"
        ),
        "a panel of O is written over the first": Edit(
            "sm90/store_boxes.cuh", "store_boxes", "panel * SmemO::kPanelWidth,", "0 * panel,"
        ),
        "a panel of O is the first one's": Edit(
            "sm90/store_boxes.cuh", "store_boxes", "o_smem.panel(panel).address(o", "o_smem.panel(0).address(o"
        ),
        "rows past a tile are written": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles", "(num_rows % kBoxRows == 0 ||", "(true ||"
        ),
        "warps past a tile write": Edit(
            "sm90/store_boxes.cuh", "store_boxes", "&& o.warp_row() < target.num_rows; ++panel", "; ++panel"
        ),
        "lse past a tile is written": Edit(
            "sm90/forward_tiles.cuh", "store_lse", "row < target.num_rows) target.lse", "true) target.lse"
        ),
        "results of queries without a key stay as they are": Edit(
            "sm90/forward_hooks.cuh", "write_empty_rows", "o.at(row, column) = zero", "continue"
        ),
        "lse of queries without a key stays as it is": Edit(
            "sm90/forward_hooks.cuh", "write_empty_rows", "if (is_first_lane()) lse.at(row, 0)",
            "if (false) lse.at(row, 0)"
        ),
        "scores are read before they are there": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages", "tile::wait_wgmma<1>(s);", "tile::wait_wgmma<2>(s);"
        ),
        "scores are read before they are there, with one room for Q": Edit(
            "sm90/forward.cu", "consume_with_one_q_stage", "tile::wait_wgmma<1>(s);", "tile::wait_wgmma<2>(s);"
        ),
        "O is not rescaled": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages", ", o, max_has_risen && !is_first,", ", o, false,"
        ),
        "O is not rescaled, with one room for Q": Edit(
            "sm90/forward.cu", "consume_with_one_q_stage", "(s, softmax, o, max_has_risen,", "(s, softmax, o, false,"
        ),
        "scores that are large are scaled first": Edit(
            "sm90/forward.cu", "make_p", "if (softmax.max_reasons & Softmax::kLargeMax) softmax.subtract_max(s);", ""
        ),
        "lost scores are weighed again": Edit(
            "sm90/forward.cu", "process_other_block",
            "if (recomputes) recompute_scores(of_tile, function, s, num_tiles_done, num_k_blocks);",
            "",
        ),
        "lost scores are weighed again, of two warpgroups": Edit(
            "sm90/forward.cu", "process_other_block",
            "if (scores_are_lost) recompute_scores(of_tile, function, s, num_tiles_done, num_k_blocks);",
            "",
        ),
        "lost scores are not masked again": Edit(
            "sm90/forward.cu", "process_other_block",
            "if (!(flags & StepMessage::kUnmasked)) negate_and_mask(params, s, num_tiles_done, num_k_blocks, chosen); "
            "if",
            "if (!(flags & StepMessage::kUnmasked) && !recomputes) negate_and_mask(params, s, num_tiles_done, "
            "num_k_blocks, chosen); if",
        ),
        "masks are read after others may write them": Edit(
            "sm90/forward.cu", "process_other_block",
            "if (!(flags & StepMessage::kUnmasked)) negate_and_mask(params, s, num_tiles_done, num_k_blocks, chosen); "
            "release_k(num_k_blocks, flags & StepMessage::kLastForWarpgroup);",
            "release_k(num_k_blocks, flags & StepMessage::kLastForWarpgroup); if (!(flags & StepMessage::kUnmasked)) "
            "negate_and_mask(params, s, num_tiles_done, num_k_blocks, chosen);",
        ),
        "scores are made again of the first stage": Edit(
            "sm90/forward.cu", "recompute_scores", "(k_smem(stage_of(num_k_blocks)).panel", "(k_smem(0).panel"
        ),
        "scores are made again of the last tile's queries": Edit(
            "sm90/forward.cu", "recompute_scores", "(q_stage_of(num_tiles_done)).", "(q_stage_of(num_tiles_done + 1))."
        ),
        "scores are made again of one panel": Edit(
            "sm90/forward.cu", "recompute_scores", "panel(k / kInPanel), 0);", "panel(0), 0);"
        ),
        "a warp makes scores of others again": Edit(
            "sm90/forward.cu", "recompute_scores", "panel(k / kInPanel), s.warp_row());", "panel(k / kInPanel), 0);"
        ),
        "scores are added to those that were": Edit("sm90/forward.cu", "recompute_scores", "s.fill(0);", ""),
        "a masked step is plain": Edit(
            "sm90/forward.cu", "is_plain", "= StepMessage::kSkipMax | StepMessage::kUnmasked", "= StepMessage::kSkipMax"
        ),
        "a tile's last step is plain": Edit(
            "sm90/forward.cu", "is_plain", "(kPlainFlags | StepMessage::kLastForWarpgroup)) ==", "kPlainFlags) =="
        ),
        "turned scores are as they are": Edit(
            "sm90/kv_producer.cuh", "step_flags",
            "!kMarksMasked && attention::LazySoftmax<2>::needs_negation(params.shape.softmax_scale)",
            "false",
        ),
        "V is left before it is multiplied in a plain step": Edit(
            "sm90/forward.cu", "wait_output",
            "tile::wait_wgmma<0>(o); tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty);",
            "tile::arrive(shared().v[stage_of(num_k_blocks - 1)].empty); tile::wait_wgmma<0>(o);",
        ),
        "keys of a plain step are those of the one before": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages",
            "++num_k_blocks; next_operands = NextOperands(group, num_tiles_done, num_k_blocks);",
            "next_operands = NextOperands(group, num_tiles_done, num_k_blocks); ++num_k_blocks;",
        ),
        "a warpgroup has the mask of the first": Edit(
            "sm90/kv_pipeline.cuh", "flags_of_warpgroup", ": group % kNumConsumers];", ": 0];"
        ),
        "warpgroups see what the tile's first rows see": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles", "work, 64 * tile::lane());", "work, 0);"
        ),
        "what some of a warpgroup's queries see all do": Edit(
            "sm90/kv_tile_scheduler.cuh", "group_visit_range", ", visit_range.full_stop}", ", visit_range.stop}"
        ),
        "a warpgroup leaves a tile a step too soon": Edit(
            "sm90/kv_producer.cuh", "step_flags", ".stop >= group_range.stop)", ".stop + kBlockKv >= group_range.stop)"
        ),
        "keys that a warpgroup passes over are not left": Edit(
            "sm90/forward.cu", "skip_blocks", "tile::arrive(shared().k[stage].empty);", ""
        ),
        "values that a warpgroup passes over are left unread": Edit(
            "sm90/forward.cu", "skip_blocks", "tile::wait_full(shared().v[stage], phase);", ""
        ),
        "values that a warpgroup passed over are left twice": Edit(
            "sm90/forward.cu", "skip_blocks", "if (!is_end || !keeps_last_v) tile", "tile"
        ),
        "who passes over a step has no turn": Edit(
            "sm90/forward.cu", "skip_blocks", "ping_pong_wait(); ping_pong_signal();", ""
        ),
        "who passed over a tile's end starts without a turn": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages", "num_k_blocks, num_k_blocks > 0);", "num_k_blocks, false);"
        ),
        "Q's room is left a tile too late": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages", "(is_first && !is_last) *", "is_first *"
        ),
        "Q's room is not left by plain steps": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages",
            "if (flags & StepMessage::kOStoreInFlight) release_q(num_tiles_done - 1);",
            "",
        ),
        "Q's room is not left by other steps": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages",
            "if (flags & StepMessage::kOStoreInFlight || is_first && is_last) release_q",
            "if (is_first && is_last) release_q",
        ),
        "Q's room is not left after a single step": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages", "kOStoreInFlight || is_first && is_last", "kOStoreInFlight"
        ),
        "K that had not arrived at the first test counts as arrived": Edit(
            "sm90/forward.cu", "NextOperands.start_products", "if (!has_k_) tile", "if (false) tile"
        ),
        "V that had not arrived at the first test counts as arrived": Edit(
            "sm90/forward.cu", "NextOperands.start_products", "if (!has_v_) tile", "if (false) tile"
        ),
        "O continues from tile to tile": Edit("sm90/forward.cu", "consume_with_two_q_stages", "o.fill(0); }", "}"),
        "a tile has the sums of the next one": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages", "1, previous_softmax, o, false,", "1, softmax, o, false,"
        ),
        "a tile continues with the maximum of the one before": Edit(
            "sm90/forward.cu", "consume_with_two_q_stages", "softmax = Softmax();", ""
        ),
        "there is a task for each room": Edit(
            "sm90/kv_storage.cuh", "tile_info_index", "count % kNumTileInfos", "count % 2"
        ),
        "a task is left before V is brought": Edit(
            "sm90/kv_pipeline.cuh", "init_barriers", "&tile_info_slot.empty), (2 +", "&tile_info_slot.empty), (1 +"
        ),
        "a task is left before its results are written": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles", "(num_tiles_done + kNumTileInfos - 1))", "(num_tiles_done))"
        ),
        "a row that ends within a chunk is left to the accelerator": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles",
            "params.shape.value_dim % tile::kChunkOf<Element> == 0 &&",
            "true &&",
        ),
        "nobody has the first turn": Edit(
            "sm90/forward.cu", "consume", "if (group == kNumConsumers) ping_pong_signal();", ""
        ),
        "a warpgroup has another's queries": Edit(
            "sm90/forward_tiles.cuh", "q_operand", "64 * (group % kNumConsumers)", "64 * (group - 1)"
        ),
        "a task overwrites the one before": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles", "tile_infos[tile_info_index(num_tiles_done)", "tile_infos[0"
        ),
        "every step is whole": Edit(
            "sm90/kv_producer.cuh", "step_flags", "!is_shifted && attention::is_unmasked<kBlockKv>(group_block)", "true"
        ),
        "a negative scale is not turned": Edit(
            "sm90/forward_tiles.cuh", "negate_and_mask", "if (Signs::needs_negation(softmax_scale))", "if (false)"
        ),
    },
    gradients_in_two_walks_are_right: {
        "dO is not counted": Edit("sm90/kv_pipeline.cuh", "init_barriers", "is_q ? kQOperands :", "is_q ? 1 :"),
        "the end is signalled once": Edit(
            "sm90/kv_producer.cuh", "load_keys", "i < kQOperands; ++i)", "i < 1; ++i)"
        ),
        "dO is not brought": Edit(
            "sm90/kv_producer.cuh", "load_keys", "(kLoadsDo) load_queries<kDo>", "(false) load_queries<kDo>"
        ),
        "dO is that of another head": Edit(
            "sm90/kv_tile_scheduler.cuh", "schedule_tiles",
            "if constexpr (kLoadsDo) tile_info.coords[kDo] = tma_coords(params.do_, work.batch_head, "
            "work.batch_head.head);",
            "if constexpr (kLoadsDo) tile_info.coords[kDo] = tma_coords(params.do_, work.batch_head, "
            "tile_info.kv_head);",
        ),
        "dO that is copied is that of another head": Edit(
            "sm90/kv_producer.cuh", "load_rows", "= kOperand == kQ || kOperand == kDo,", "= kOperand == kQ,"
        ),
        "dO that is copied is as wide as Q": Edit(
            "sm90/kv_producer.cuh", "load_rows", "= kOperand == kV || kOperand == kDo;", "= kOperand == kV;"
        ),
        "dO is Q": Edit("sm90/kv_producer.cuh", "load_operand", "kOperand == kDo ? params.do_ :", ""),
        "dO lies where V does": Edit(
            "sm90/kv_storage.cuh", "do_smem", "kDoOffset + slot * SmemDo::kBytes}", "v_smem(0).start}"
        ),
        "K past a step is what stands there": Edit(
            "sm90/kv_producer.cuh", "load_keys", "kLoadsDo && ends_inside_block(block, params.shape.seqlen_kv)", "false"
        ),
        "keys of the step before count again": Edit(
            "sm90/kv_pipeline.cuh", "mask_block", "row_mask.lo = max(row_mask.lo, message.unread_start);", ""
        ),
        "under a band too": Edit(
            "sm90/kv_pipeline.cuh", "mask_block", ", tile_info.band, message.unread_start)", ", tile_info.band, 0)"
        ),
        "scores are hidden behind -inf": Edit(
            "sm90/kv_pipeline.cuh", "mask_block", "kMarksMasked ? attention::masked_score() : ptx::", "ptx::"
        ),
    },
}  # fmt: skip
