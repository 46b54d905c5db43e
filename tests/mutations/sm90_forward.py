"""Faults in Hopper's forward pass, and where it brings keys and values."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.sm90_guards import forward_is_right, gradients_in_two_walks_are_right

FAULTS = {
    forward_is_right: {
        "barriers are not fenced": Edit("attention/key_ring.cuh", "make_barriers", "ptx::mbarrier_init_fence();", ""),
        "copied rows count as there before they are": Edit(
            "attention/key_ring.cuh", "fill",
            "tile::copy<32>(panels_of<kOperand>(stage), all.rows(first, last), tile::number_in_warp(), [](int) { "
            "return true; }); tile::arrive(room.full);",
            "tile::arrive(room.full); tile::copy<32>(panels_of<kOperand>(stage), all.rows(first, last), "
            "tile::number_in_warp(), [](int) { return true; });",
        ),
        "V past a step is what stands there": Edit(
            "attention/key_ring.cuh", "bring_values", "bool clears = ends_early(step, length)", "bool clears = false"
        ),
        "keys of the step before count again": Edit(
            "attention/key_ring.cuh", "mask_step", "seen.lo = max(seen.lo, note.start);", ""
        ),
        "a wider step is whole": Edit("attention/key_ring.cuh", "kind_of", "is_whole = !is_wider &&", "is_whole ="),
        "V is that of a step that is not wider": Edit(
            "attention/key_ring.cuh", "bring_values",
            "widen<kBlockKv, config::kIsListed>(step, task.reach, length);",
            "",
        ),
        "an array without a map is left to the accelerator": Edit(
            "attention/tensor_maps.cuh", "is_mapped", "map.is_there &&", ""
        ),
        "an odd start is left to the accelerator": Edit(
            "attention/tensor_maps.cuh", "is_mapped", "&& reinterpret_cast<uint64_t>(matrices.data) % 16 == 0", ""
        ),
        "a broadcast axis is stepped over": Edit("attention/tensor_maps.cuh", "in_stack", "strides[2] == 0 ? 0 :", ""),
        "K is that of the query's head": Edit(
            "attention/key_ring.cuh", "look_up",
            "task.kv_head = work.place.head / params.shape.group_size",
            "task.kv_head = work.place.head",
        ),
        "one stage serves all": Edit("attention/key_ring.cuh", "stage_of", "return count % kNumStages;", "return 0;"),
        "every lane asks for a tile": Edit(
            "attention/key_ring.cuh", "next_tile",
            "if (leads()) number = attention::next_number",
            "number = attention::next_number",
        ),
        "nobody has the first tiles": Edit(
            "attention/key_ring.cuh", "next_tile", "if (is_first) return attention::first_number();", ""
        ),
        "K is left before it is multiplied": Edit(
            "sm90/forward.cu", "consume_in_two_rooms",
            "next.start_products(s, o, p, group, num_keys);",
            "next.start_products(s, o, p, group, num_keys); tile::arrive(board().k[stage_of(num_keys)].empty);",
        ),
        "V is left before it is multiplied": Edit(
            "sm90/forward.cu", "consume_in_two_rooms",
            "tile::wait_for<0>(o); if (num_keys > 0) tile::arrive(board().v[stage_of(num_keys - 1)].empty);",
            "if (num_keys > 0) tile::arrive(board().v[stage_of(num_keys - 1)].empty); tile::wait_for<0>(o);",
        ),
        "V is left before it is multiplied, with one room for Q": Edit(
            "sm90/forward.cu", "consume_in_one_room",
            "tile::wait_for<0>(o); if (!is_first) tile::arrive(board().v[stage_of(num_keys - 1)].empty);",
            "if (!is_first) tile::arrive(board().v[stage_of(num_keys - 1)].empty); tile::wait_for<0>(o);",
        ),
        "Q is left with the first step": Edit(
            "sm90/forward.cu", "leave_keys",
            "if (is_last && kQRooms == 1) tile",
            "if (board().notes[stage_of(num_keys)].start == 0 && kQRooms == 1) tile",
        ),
        "Q's room is left before O went through it": Edit(
            "sm90/forward.cu", "write_results",
            "tile::store(room",
            "tile::arrive(board().q[q_room_of(num_tasks)].empty); tile::store(room",
        ),
        "O is written before it is there": Edit("sm90/forward.cu", "write_results", "__syncwarp();", ""),
        "O is not fenced": Edit("sm90/forward.cu", "write_results", "ptx::fence_proxy_async();", ""),
        "Q's room is left while O leaves it": Edit("sm90/forward.cu", "leave_queries", "ptx::bulk_wait_read<0>();", ""),
        "O is put where another warp's is": Edit(
            "sm90/forward.cu", "write_results", "(room, rounded, o.warp_row());", "(room, rounded, 0);"
        ),
        "a panel of O is written over the first": Edit(
            "sm90/forward.cu", "write_results", "panel * OPanels::kPanelWidth,", "0 * panel,"
        ),
        "a panel of O is the first one's": Edit(
            "sm90/forward.cu", "write_results", "room.panel(panel).address(o", "room.panel(0).address(o"
        ),
        "rows past a tile are written": Edit(
            "attention/key_ring.cuh", "look_up", "(num_rows % kBoxRows == 0 ||", "(true ||"
        ),
        "warps past a tile write": Edit(
            "sm90/forward.cu", "write_results", "&& o.warp_row() < to.num_rows; ++panel", "; ++panel"
        ),
        "lse past a tile is written": Edit(
            "sm90/forward.cu", "write_results", "row < to.num_rows) to.lse", "true) to.lse"
        ),
        "results of queries without a key stay as they are": Edit(
            "sm90/forward.cu", "write_nothing", "o.at(row, column) = zero", "continue"
        ),
        "lse of queries without a key stays as it is": Edit(
            "sm90/forward.cu", "write_nothing", "if (leads()) lse.at(row, 0)", "if (false) lse.at(row, 0)"
        ),
        "scores are read before they are there": Edit(
            "sm90/forward.cu", "consume_in_two_rooms", "tile::wait_for<1>(s);", "tile::wait_for<2>(s);"
        ),
        "scores are read before they are there, with one room for Q": Edit(
            "sm90/forward.cu", "consume_in_one_room", "tile::wait_for<1>(s);", "tile::wait_for<2>(s);"
        ),
        "O is not rescaled": Edit(
            "sm90/forward.cu", "consume_in_two_rooms",
            "make_weights(s, softmax, o, has_risen && !is_first, by);",
            "make_weights(s, softmax, o, false, by);",
        ),
        "O is not rescaled, with one room for Q": Edit(
            "sm90/forward.cu", "consume_in_one_room",
            "make_weights(s, softmax, o, has_risen, by);",
            "make_weights(s, softmax, o, false, by);",
        ),
        "scores that are large are scaled first": Edit(
            "sm90/forward.cu", "make_weights", "if (softmax.reasons & Softmax::kIsLarge) softmax.take_off(s);", ""
        ),
        "lost scores are weighed again": Edit(
            "sm90/forward.cu", "weigh_other_step",
            "if (again) remake_scores(params, function, s, num_tasks, num_keys);",
            "",
        ),
        "lost scores are weighed again, of two warpgroups": Edit(
            "sm90/forward.cu", "weigh_other_step",
            "if (is_lost) remake_scores(params, function, s, num_tasks, num_keys);",
            "",
        ),
        "lost scores are not masked again": Edit(
            "sm90/forward.cu", "weigh_other_step",
            "if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys); if",
            "if (!(kind & Note::kAsTheyAre) && !again) mend_scores(params, s, num_tasks, num_keys); if",
        ),
        "masks are read after others may write them": Edit(
            "sm90/forward.cu", "weigh_other_step",
            "if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys); leave_keys(num_keys, kind & "
            "Note::kLast);",
            "leave_keys(num_keys, kind & Note::kLast); if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, "
            "num_tasks, num_keys);",
        ),
        "scores are made again of the first stage": Edit(
            "sm90/forward.cu", "remake_scores",
            "right_along(k_smem(stage_of(num_keys)).panel",
            "right_along(k_smem(0).panel",
        ),
        "scores are made again of the last tile's queries": Edit(
            "sm90/forward.cu", "remake_scores",
            "left_along(q_smem(q_room_of(num_tasks)).panel",
            "left_along(q_smem(q_room_of(num_tasks + 1)).panel",
        ),
        "scores are made again of one panel": Edit(
            "sm90/forward.cu", "remake_scores", "panel(k / kInPanel), 0);", "panel(0), 0);"
        ),
        "a warp makes scores of others again": Edit(
            "sm90/forward.cu", "remake_scores", "panel(k / kInPanel), s.warp_row());", "panel(k / kInPanel), 0);"
        ),
        "scores are added to those that were": Edit("sm90/forward.cu", "remake_scores", "s.fill(0);", ""),
        "a masked step is plain": Edit(
            "sm90/forward.cu", "is_plain", "kAsPlain = Note::kUnseen | Note::kAsTheyAre;", "kAsPlain = Note::kUnseen;"
        ),
        "a tile's last step is plain": Edit(
            "sm90/forward.cu", "is_plain", "(kAsPlain | Note::kLast)) == kAsPlain", "kAsPlain) == kAsPlain"
        ),
        "turned scores are as they are": Edit(
            "attention/key_ring.cuh", "kind_of",
            "!kBringsDo && attention::LazySoftmax<2>::turns(params.shape.softmax_scale)",
            "false",
        ),
        "V is left before it is multiplied in a plain step": Edit(
            "sm90/forward.cu", "await_sum",
            "tile::wait_for<0>(o); tile::arrive(board().v[stage_of(num_keys - 1)].empty);",
            "tile::arrive(board().v[stage_of(num_keys - 1)].empty); tile::wait_for<0>(o);",
        ),
        "keys of a plain step are those of the one before": Edit(
            "sm90/forward.cu", "consume_in_two_rooms",
            "++num_keys; next = Operands(group, num_tasks, num_keys);",
            "next = Operands(group, num_tasks, num_keys); ++num_keys;",
        ),
        "a warpgroup has the mask of the first": Edit(
            "attention/key_ring.cuh", "kind_for", ".kinds[group % kConsumers];", ".kinds[0];"
        ),
        "warpgroups see what the tile's first rows see": Edit(
            "attention/key_ring.cuh", "look_up", "work, 64 * tile::number_in_warp());", "work, 0);"
        ),
        "what some of a warpgroup's queries see all do": Edit(
            "attention/key_ring.cuh", "span_of",
            "reach.stop, reach.full_start, reach.full_stop}",
            "reach.stop, reach.full_start, reach.stop}",
        ),
        "a warpgroup leaves a tile a step too soon": Edit(
            "attention/key_ring.cuh", "kind_of", "step.stop >= span.stop);", "step.stop + kBlockKv >= span.stop);"
        ),
        "keys that a warpgroup passes over are not left": Edit(
            "sm90/forward.cu", "pass_over", "tile::arrive(board().k[stage].empty);", ""
        ),
        "values that a warpgroup passes over are left unread": Edit(
            "sm90/forward.cu", "pass_over", "tile::await_full(board().v[stage], parity);", ""
        ),
        "values that a warpgroup passed over are left twice": Edit(
            "sm90/forward.cu", "pass_over", "if (!is_end || !keeps_values) tile", "tile"
        ),
        "who passes over a step has no turn": Edit("sm90/forward.cu", "pass_over", "await_turn(); pass_turn();", ""),
        "who passed over a tile's end starts without a turn": Edit(
            "sm90/forward.cu", "consume_in_two_rooms",
            "num_tasks, num_keys, num_keys > 0);",
            "num_tasks, num_keys, false);",
        ),
        "Q's room is left a tile too late": Edit(
            "sm90/forward.cu", "consume_in_two_rooms",
            "(is_first && !is_last) * Note::kOLeaves",
            "is_first * Note::kOLeaves",
        ),
        "Q's room is not left by plain steps": Edit(
            "sm90/forward.cu", "consume_in_two_rooms", "if (kind & Note::kOLeaves) leave_queries(num_tasks - 1);", ""
        ),
        "Q's room is not left by other steps": Edit(
            "sm90/forward.cu", "consume_in_two_rooms",
            "if (kind & Note::kOLeaves || is_first && is_last) leave_queries",
            "if (is_first && is_last) leave_queries",
        ),
        "Q's room is not left after a single step": Edit(
            "sm90/forward.cu", "consume_in_two_rooms",
            "if (kind & Note::kOLeaves || is_first && is_last) leave_queries",
            "if (kind & Note::kOLeaves) leave_queries",
        ),
        "K that was not there when it was asked for counts as there": Edit(
            "sm90/forward.cu", "Operands.start_products", "if (!has_k_) tile", "if (false) tile"
        ),
        "V that was not there when it was asked for counts as there": Edit(
            "sm90/forward.cu", "Operands.start_products", "if (!has_v_) tile", "if (false) tile"
        ),
        "O goes on from tile to tile": Edit("sm90/forward.cu", "consume_in_two_rooms", "o.fill(0); }", "}"),
        "a tile has the sums of the next one": Edit(
            "sm90/forward.cu", "consume_in_two_rooms", "- 1, finished, o, false, sink);", "- 1, softmax, o, false);"
        ),
        "a tile goes on with the maximum of the one before": Edit(
            "sm90/forward.cu", "consume_in_two_rooms", "softmax = Softmax();", ""
        ),
        "there is a task for each room": Edit("attention/key_ring.cuh", None, "kTasks = 4;", "kTasks = 2;"),
        "a task is left before V is brought": Edit(
            "attention/key_ring.cuh", "make_barriers",
            "&told.empty), 2 * tile::kArrivals);",
            "&told.empty), tile::kArrivals);",
        ),
        "a task is left before its results are written": Edit(
            "attention/key_ring.cuh", "look_up",
            "await_room(told, task_parity_of(num_tasks + kTasks - 1));",
            "await_room(told, task_parity_of(num_tasks));",
        ),
        "a row that ends within a chunk is left to the accelerator": Edit(
            "attention/key_ring.cuh", "look_up", "params.shape.value_dim % tile::kChunkOf<Element> == 0 &&", "true &&"
        ),
        "nobody has the first turn": Edit("sm90/forward.cu", "consume", "if (group == kConsumers) pass_turn();", ""),
        "a warpgroup has another's queries": Edit(
            "sm90/forward.cu", "q_operand", "64 * (group % kConsumers)", "64 * (group - 1)"
        ),
        "a task overwrites the one before": Edit(
            "attention/key_ring.cuh", "look_up",
            "Task& task = board().tasks[task_of(num_tasks)];",
            "Task& task = board().tasks[0];",
        ),
        "every step is whole": Edit(
            "attention/key_ring.cuh", "kind_of", "!is_wider && attention::is_whole<kBlockKv>(own)", "true"
        ),
        "a negative scale is not turned": Edit(
            "sm90/forward.cu", "mend_scores", "if (Softmax::turns(softmax_scale))", "if (false)"
        ),
    },
    gradients_in_two_walks_are_right: {
        "dO is not counted": Edit(
            "attention/key_ring.cuh", "make_barriers",
            "(kBringsDo && i < kQRooms ? 2 : 1) * tile::kArrivals",
            "tile::kArrivals",
        ),
        "the end is told once": Edit(
            "attention/key_ring.cuh", "bring_keys", "if constexpr (kBringsDo) tile::arrive(q.full);", ""
        ),
        "dO is not brought": Edit(
            "attention/key_ring.cuh", "bring_keys",
            "if constexpr (kBringsDo) fill<kDo>",
            "if constexpr (false) fill<kDo>",
        ),
        "dO is that of another head": Edit(
            "attention/key_ring.cuh", "look_up",
            "if constexpr (kBringsDo) task.at[kDo] = in_stack(params.do_, work.place, work.place.head);",
            "if constexpr (kBringsDo) task.at[kDo] = in_stack(params.do_, work.place, task.kv_head);",
        ),
        "dO that is copied is that of another head": Edit(
            "attention/key_ring.cuh", "fill",
            "kIsOfQueries = kOperand == kQ || kOperand == kDo,",
            "kIsOfQueries = kOperand == kQ,",
        ),
        "dO that is copied is as wide as Q": Edit(
            "attention/key_ring.cuh", "fill",
            "kHasValueDim = kOperand == kV || kOperand == kDo;",
            "kHasValueDim = kOperand == kV;",
        ),
        "dO is Q": Edit("attention/key_ring.cuh", "fill", "kOperand == kDo ? params.do_ :", ""),
        "dO lies where V does": Edit(
            "attention/key_ring.cuh", "do_smem", "kAfterValues + room * DoPanels::kBytes}", "v_smem(0).start}"
        ),
        "K past a step is what stands there": Edit(
            "attention/key_ring.cuh", "bring_keys", "kBringsDo && ends_early(step, params.shape.seqlen_kv)", "false"
        ),
        "keys of the step before count again": Edit(
            "attention/key_ring.cuh", "mask_step", "seen.lo = max(seen.lo, note.start);", ""
        ),
        "under a band too": Edit(
            "attention/key_ring.cuh", "mask_step",
            "mask_band(s, note.step, hidden, task.band, note.start)",
            "mask_band(s, note.step, hidden, task.band, 0)",
        ),
        "scores are hidden behind -inf": Edit(
            "attention/key_ring.cuh", "mask_step",
            "kBringsDo ? attention::masked_score() : ptx::negative_infinity<float>();",
            "ptx::negative_infinity<float>();",
        ),
    },
}  # fmt: skip
