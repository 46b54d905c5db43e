"""Faults planted in the sm90 family: every one must be seen on the simulator, as a wrong number or as a broken rule.

As in test_kernel_edits.py; but what is not waited for, or waited for in vain, the simulator reports by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuflash.simulated import Simulator
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import needs_compiler
from finishing import of_lists
from planting import Edit, chosen, misfits, planted
from poison import MARGIN, call
from test_sm90 import (
    ALIGNED, SIM90, Ends, FewBlocks, assert_alike_keys_weigh_alike, forward, half, on_two_blocks, plan_of,
    with_fewest_tiles,
)  # fmt: skip

from cuflash import masks, sim

pytestmark = needs_compiler


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_kernels_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0), of_lists(finishes=False):
        yield


_ROOMS, _MAPS = "tile/rooms.cuh", "attention/tensor_maps.cuh"
_FORWARD, _PANELS, _STORE = "sm90/forward.cu", "tile/panel_tile.cuh", "tile/opaque_copy.cuh"
_FRAGMENTS, _KEYS = "attention/fragments.cuh", "attention/key_ring.cuh"
EDITS = {
    "barriers are not fenced": Edit(_KEYS, "make_barriers", "ptx::mbarrier_init_fence();", ""),
    "copied rows are not fenced": Edit(_ROOMS, "copy", "ptx::fence_proxy_async();", ""),
    "copied rows are not waited for": Edit(_ROOMS, "copy", "ptx::cp_async_wait_all();", ""),
    "copied chunks are not permuted": Edit(
        _ROOMS, "Panels.at", "chunk % in_panel ^ row * in_panel / kChunkOf<uint16_t>", "chunk"
    ),
    "the last column is not copied": Edit(_ROOMS, "copy", "int e = rest - 1; e >= 0", "int e = rest - 2; e >= 0"),
    "copied rows count as there before they are": Edit(
        _KEYS, "fill",
        "tile::copy<32>(panels_of<kOperand>(stage), all.rows(first, last), tile::number_in_warp(), [](int) { return "
        "true; }); tile::arrive(room.full);",
        "tile::arrive(room.full); tile::copy<32>(panels_of<kOperand>(stage), all.rows(first, last), "
        "tile::number_in_warp(), [](int) { return true; });",
    ),
    "V past a step is what stands there": Edit(
        _KEYS, "bring_values", "bool clears = ends_early(step, length)", "bool clears = false"
    ),
    "keys of the step before count again": Edit(_KEYS, "mask_step", "seen.lo = max(seen.lo, note.start);", ""),
    "a wider step is whole": Edit(_KEYS, "kind_of", "is_whole = !is_wider &&", "is_whole ="),
    "V is that of a step that is not wider": Edit(
        _KEYS, "bring_values", "widen<kBlockKv, config::kIsListed>(step, task.reach, length);", ""
    ),
    "an array without a map is left to the accelerator": Edit(_MAPS, "is_mapped", "map.is_there &&", ""),
    "an odd start is left to the accelerator": Edit(
        _MAPS, "is_mapped", "&& reinterpret_cast<uint64_t>(matrices.data) % 16 == 0", ""
    ),
    "only the first panel is brought": Edit(
        _ROOMS, "start_copies", "column < to.columns; column += to.width) {", "column < to.width; column += to.width) {"
    ),
    "a broadcast axis is stepped over": Edit(_MAPS, "in_stack", "strides[2] == 0 ? 0 :", ""),
    "K is that of the query's head": Edit(
        _KEYS, "look_up", "task.kv_head = work.place.head / params.shape.group_size", "task.kv_head = work.place.head"
    ),
    "a room counts as empty in the wrong phase": Edit(
        _ROOMS, "await_empty", "&room.empty), parity ^ 1);", "&room.empty), parity);"
    ),
    "a room counts as full in the wrong phase": Edit(
        _ROOMS, "await_full",
        "mbarrier_wait(ptx::shared_address(&room.full), parity);",
        "mbarrier_wait(ptx::shared_address(&room.full), parity ^ 1);",
    ),
    "one stage serves all": Edit(_KEYS, "stage_of", "return count % kNumStages;", "return 0;"),
    "every lane asks for a tile": Edit(
        _KEYS, "next_tile", "if (leads()) number = attention::next_number", "number = attention::next_number"
    ),
    "nobody has the first tiles": Edit(_KEYS, "next_tile", "if (is_first) return attention::first_number();", ""),
    "K is left before it is multiplied": Edit(
        _FORWARD, "consume_in_two_rooms",
        "next.start_products(s, o, p, group, num_keys);",
        "next.start_products(s, o, p, group, num_keys); tile::arrive(board().k[stage_of(num_keys)].empty);",
    ),
    "V is left before it is multiplied": Edit(
        _FORWARD, "consume_in_two_rooms",
        "tile::wait_for<0>(o); if (num_keys > 0) tile::arrive(board().v[stage_of(num_keys - 1)].empty);",
        "if (num_keys > 0) tile::arrive(board().v[stage_of(num_keys - 1)].empty); tile::wait_for<0>(o);",
    ),
    "V is left before it is multiplied, with one room for Q": Edit(
        _FORWARD, "consume_in_one_room",
        "tile::wait_for<0>(o); if (!is_first) tile::arrive(board().v[stage_of(num_keys - 1)].empty);",
        "if (!is_first) tile::arrive(board().v[stage_of(num_keys - 1)].empty); tile::wait_for<0>(o);",
    ),
    "Q is left with the first step": Edit(
        _FORWARD, "leave_keys",
        "if (is_last && kQRooms == 1) tile",
        "if (board().notes[stage_of(num_keys)].start == 0 && kQRooms == 1) tile",
    ),
    "Q's room is left before O went through it": Edit(
        _FORWARD, "write_results",
        "tile::store(room",
        "tile::arrive(board().q[q_room_of(num_tasks)].empty); tile::store(room",
    ),
    "O is written before it is there": Edit(_FORWARD, "write_results", "__syncwarp();", ""),
    "O is not fenced": Edit(_FORWARD, "write_results", "ptx::fence_proxy_async();", ""),
    "Q's room is left while O leaves it": Edit(_FORWARD, "leave_queries", "ptx::bulk_wait_read<0>();", ""),
    "O is put where another warp's is": Edit(
        _FORWARD, "write_results", "(room, rounded, o.warp_row());", "(room, rounded, 0);"
    ),
    "all panels of O are the first": Edit(_PANELS, "store", "+ k / kSteps * Panel::kBytes, from", ", from"),
    "a panel of O is written over the first": Edit(
        _FORWARD, "write_results", "panel * OPanels::kPanelWidth,", "0 * panel,"
    ),
    "a panel of O is the first one's": Edit(
        _FORWARD, "write_results", "room.panel(panel).address(o", "room.panel(0).address(o"
    ),
    "rows past a tile are written": Edit(_KEYS, "look_up", "(num_rows % kBoxRows == 0 ||", "(true ||"),
    "warps past a tile write": Edit(_FORWARD, "write_results", "&& o.warp_row() < to.num_rows; ++panel", "; ++panel"),
    "the first tile starts before the first query": Edit(
        "attention/work_tile.cuh", "query_tile_at", "max(first, 0)", "first"
    ),
    "lse past a tile is written": Edit(_FORWARD, "write_results", "row < to.num_rows) to.lse", "true) to.lse"),
    "queries share their sums": Edit(
        "attention/fragments.cuh", "LazySoftmax.finalize",
        "ptx::reciprocal_approx(divisor)",
        "ptx::reciprocal_approx(sum[0])",
    ),
    "lse is another query's": Edit(
        "attention/fragments.cuh", "LazySoftmax.finalize", "ptx::log_accurate(divisor)", "ptx::log_accurate(sum[0])"
    ),
    "results of queries without a key stay as they are": Edit(
        _FORWARD, "write_nothing", "o.at(row, column) = {}", "continue"
    ),
    "lse of queries without a key stays as it is": Edit(
        _FORWARD, "write_nothing", "if (leads()) lse.at(row, 0)", "if (false) lse.at(row, 0)"
    ),
    "scores are read before they are there": Edit(
        _FORWARD, "consume_in_two_rooms", "tile::wait_for<1>(s);", "tile::wait_for<2>(s);"
    ),
    "scores are read before they are there, with one room for Q": Edit(
        _FORWARD, "consume_in_one_room", "tile::wait_for<1>(s);", "tile::wait_for<2>(s);"
    ),
    "O is not rescaled": Edit(
        _FORWARD, "consume_in_two_rooms",
        "make_weights(s, softmax, o, has_risen && !is_first, by);",
        "make_weights(s, softmax, o, false, by);",
    ),
    "O is not rescaled, with one room for Q": Edit(
        _FORWARD, "consume_in_one_room",
        "make_weights(s, softmax, o, has_risen, by);",
        "make_weights(s, softmax, o, false, by);",
    ),
    "scores that are large are scaled first": Edit(
        _FORWARD, "make_weights", "if (softmax.reasons & Softmax::kIsLarge) softmax.take_off(s);", ""
    ),
    "weights that are too large count": Edit(
        _FRAGMENTS, "LazySoftmax.weigh_unseen", "if (__any_sync(0xffffffffu, !is_small)) return false;", ""
    ),
    "a warp looks at its first thread's weights alone": Edit(
        _FRAGMENTS, "LazySoftmax.weigh_unseen",
        "if (__any_sync(0xffffffffu, !is_small))",
        "if (!__shfl_sync(0xffffffffu, is_small, 0))",
    ),
    "weights of a row are another's sum": Edit(
        _FRAGMENTS, "LazySoftmax.weigh_unseen", "row_sum[i] += sum[i];", "row_sum[i] += sum[0];"
    ),
    "lost scores are weighed again": Edit(
        _FORWARD, "weigh_other_step", "if (again) remake_scores(s, num_tasks, num_keys);", ""
    ),
    "lost scores are weighed again, of two warpgroups": Edit(
        _FORWARD, "weigh_other_step", "if (is_lost) remake_scores(s, num_tasks, num_keys);", ""
    ),
    "lost scores are not masked again": Edit(
        _FORWARD, "weigh_other_step",
        "if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys); if",
        "if (!(kind & Note::kAsTheyAre) && !again) mend_scores(params, s, num_tasks, num_keys); if",
    ),
    "masks are read after others may write them": Edit(
        _FORWARD, "weigh_other_step",
        "if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys); leave_keys(num_keys, kind & "
        "Note::kLast);",
        "leave_keys(num_keys, kind & Note::kLast); if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, "
        "num_keys);",
    ),
    "scores are made again of the first stage": Edit(
        _FORWARD, "remake_scores", "right_along(k_smem(stage_of(num_keys)).panel", "right_along(k_smem(0).panel"
    ),
    "scores are made again of the last tile's queries": Edit(
        _FORWARD, "remake_scores",
        "left_along(q_smem(q_room_of(num_tasks)).panel",
        "left_along(q_smem(q_room_of(num_tasks + 1)).panel",
    ),
    "scores are made again of one panel": Edit(_FORWARD, "remake_scores", "panel(k / kInPanel), 0);", "panel(0), 0);"),
    "a warp makes scores of others again": Edit(
        _FORWARD, "remake_scores", "panel(k / kInPanel), s.warp_row());", "panel(k / kInPanel), 0);"
    ),
    "scores are added to those that were": Edit(_FORWARD, "remake_scores", "s.fill(0);", ""),
    "a masked step is plain": Edit(
        _FORWARD, "is_plain", "kAsPlain = Note::kUnseen | Note::kAsTheyAre;", "kAsPlain = Note::kUnseen;"
    ),
    "a tile's last step is plain": Edit(
        _FORWARD, "is_plain", "(kAsPlain | Note::kLast)) == kAsPlain", "kAsPlain) == kAsPlain"
    ),
    "turned scores are as they are": Edit(
        _KEYS, "kind_of", "!kBringsDo && attention::LazySoftmax<2>::turns(params.shape.softmax_scale)", "false"
    ),
    "a tile's first step is plain": Edit(_FRAGMENTS, "LazySoftmax", "int reasons = kSeesNone;", "int reasons = 0;"),
    "steps with large maxima are plain": Edit(
        _FRAGMENTS, "LazySoftmax.raise", "reasons = kIsLarge * __any_sync", "reasons = 0 * __any_sync"
    ),
    "steps are plain for queries that have seen no key": Edit(
        _FRAGMENTS, "LazySoftmax.raise", "+ kSeesNone * __any_sync", "+ 0 * __any_sync"
    ),
    "V is left before it is multiplied in a plain step": Edit(
        _FORWARD, "await_sum",
        "tile::wait_for<0>(o); tile::arrive(board().v[stage_of(num_keys - 1)].empty);",
        "tile::arrive(board().v[stage_of(num_keys - 1)].empty); tile::wait_for<0>(o);",
    ),
    "keys of a plain step are those of the one before": Edit(
        _FORWARD, "consume_in_two_rooms",
        "++num_keys; next = Operands(group, num_tasks, num_keys);",
        "next = Operands(group, num_tasks, num_keys); ++num_keys;",
    ),
    "a warpgroup has the mask of the first": Edit(_KEYS, "kind_for", ".kinds[group % kConsumers];", ".kinds[0];"),
    "warpgroups see what the tile's first rows see": Edit(
        _KEYS, "look_up", "work, 64 * tile::number_in_warp());", "work, 0);"
    ),
    "what some of a warpgroup's queries see all do": Edit(
        _KEYS, "span_of", "reach.stop, reach.full_start, reach.full_stop}", "reach.stop, reach.full_start, reach.stop}"
    ),
    "a warpgroup leaves a tile a step too soon": Edit(
        _KEYS, "kind_of", "step.stop >= span.stop);", "step.stop + kBlockKv >= span.stop);"
    ),
    "keys that a warpgroup passes over are not left": Edit(
        _FORWARD, "pass_over", "tile::arrive(board().k[stage].empty);", ""
    ),
    "values that a warpgroup passes over are left unread": Edit(
        _FORWARD, "pass_over", "tile::await_full(board().v[stage], parity);", ""
    ),
    "values that a warpgroup passed over are left twice": Edit(
        _FORWARD, "pass_over", "if (!is_end || !keeps_values) tile", "tile"
    ),
    "who passes over a step has no turn": Edit(_FORWARD, "pass_over", "await_turn(); pass_turn();", ""),
    "who passed over a tile's end starts without a turn": Edit(
        _FORWARD, "consume_in_two_rooms", "num_tasks, num_keys, num_keys > 0);", "num_tasks, num_keys, false);"
    ),
    "Q's room is left a tile too late": Edit(
        _FORWARD, "consume_in_two_rooms", "(is_first && !is_last) * Note::kOLeaves", "is_first * Note::kOLeaves"
    ),
    "Q's room is not left by plain steps": Edit(
        _FORWARD, "consume_in_two_rooms", "if (kind & Note::kOLeaves) leave_queries(num_tasks - 1);", ""
    ),
    "Q's room is not left by other steps": Edit(
        _FORWARD, "consume_in_two_rooms",
        "if (kind & Note::kOLeaves || is_first && is_last) leave_queries",
        "if (is_first && is_last) leave_queries",
    ),
    "Q's room is not left after a single step": Edit(
        _FORWARD, "consume_in_two_rooms",
        "if (kind & Note::kOLeaves || is_first && is_last) leave_queries",
        "if (kind & Note::kOLeaves) leave_queries",
    ),
    "K that was not there when it was asked for counts as there": Edit(
        _FORWARD, "Operands.start_products", "if (!has_k_) tile", "if (false) tile"
    ),
    "V that was not there when it was asked for counts as there": Edit(
        _FORWARD, "Operands.start_products", "if (!has_v_) tile", "if (false) tile"
    ),
    "O goes on from tile to tile": Edit(_FORWARD, "consume_in_two_rooms", "o.fill(0); }", "}"),
    "a tile has the sums of the next one": Edit(
        _FORWARD, "consume_in_two_rooms", "- 1, finished, o, false);", "- 1, softmax, o, false);"
    ),
    "a tile goes on with the maximum of the one before": Edit(
        _FORWARD, "consume_in_two_rooms", "softmax = Softmax();", ""
    ),
    "there is a task for each room": Edit(_KEYS, None, "kTasks = 4;", "kTasks = 2;"),
    "a task is left before V is brought": Edit(
        _KEYS, "make_barriers", "&told.empty), 2 * tile::kArrivals);", "&told.empty), tile::kArrivals);"
    ),
    "a task is left before its results are written": Edit(
        _KEYS, "look_up",
        "await_room(told, task_parity_of(num_tasks + kTasks - 1));",
        "await_room(told, task_parity_of(num_tasks));",
    ),
    "a row that ends within a chunk is left to the accelerator": Edit(
        _KEYS, "look_up", "params.shape.value_dim % tile::kChunkOf<Element> == 0 &&", "true &&"
    ),
    "a band ends with the first row's": Edit(
        _FRAGMENTS, "mask_band", "columns_before(keys.hi + row)", "columns_before(keys.hi)"
    ),
    "a band starts with the first row's": Edit(
        _FRAGMENTS, "mask_band", "columns_before(keys.lo + row)", "columns_before(keys.lo)"
    ),
    "a band ends alike for all rows of a thread": Edit(
        _FRAGMENTS, "mask_band", "min(hi + 2 * i, last)", "min(hi, last)"
    ),
    "a band starts alike for all rows of a thread": Edit(
        _FRAGMENTS, "mask_band", "max(lo + 2 * i, first)", "max(lo, first)"
    ),
    "a band goes on past the last key": Edit(_FRAGMENTS, "mask_band", "min(hi + 2 * i, last)", "hi + 2 * i"),
    "keys of the step before count again in a band": Edit(
        _FRAGMENTS, "mask_band", "max(lo + 2 * i, first)", "lo + 2 * i"
    ),
    "a thread's two columns are one": Edit(
        _FRAGMENTS, "mask_band", "* 2 + min(key - first_key & 7, 2);", "* 2 + min(key - first_key & 7, 1);"
    ),
    "nobody has the first turn": Edit(_FORWARD, "consume", "if (group == kConsumers) pass_turn();", ""),
    "a warpgroup has another's queries": Edit(_FORWARD, "q_operand", "64 * (group % kConsumers)", "64 * (group - 1)"),
    "a task overwrites the one before": Edit(
        _KEYS, "look_up", "Task& task = board().tasks[task_of(num_tasks)];", "Task& task = board().tasks[0];"
    ),
    "every step is whole": Edit(_KEYS, "kind_of", "!is_wider && attention::is_whole<kBlockKv>(own)", "true"),
    "a negative scale is not turned": Edit(_FORWARD, "mend_scores", "if (Softmax::turns(softmax_scale))", "if (false)"),
    "panels of V lie too close": Edit(
        _PANELS, "RowsAcrossSum", "kSwizzle, Tile::Panel::kBytes, 8", "kSwizzle, 1024, 8"
    ),
    "the second panel of K is the first": Edit(
        _PANELS, "RowsAlongSum.at", "at(panel * Tile::Panel::kBytes +", "at(0 * panel +"
    ),
    "rows of a fragment change places": Edit(
        _PANELS, "Rounded.round", "fragments[k][e] = ptx::pack2", "fragments[k][e ^ 1] = ptx::pack2"
    ),
    "a chunk of O is another's": Edit(
        _STORE, "transpose_in_quad", "is_upper ? first : second, step", "is_upper ? second : first, step"
    ),
    "a row too many of O is stored": Edit(
        _STORE, "store", "if (row >= to.num_rows) continue; Packet", "if (row > to.num_rows) continue; Packet"
    ),
    "chunks past the last column are stored": Edit(
        _STORE, "store", "from.warp_column() + 8 * Tile::kColumnTiles <= to.num_columns", "true"
    ),
    "the last element of a short chunk is lost": Edit(
        _STORE, "store",
        "min(column + kChunkOf<T>, to.num_columns); ++x",
        "min(column + kChunkOf<T>, to.num_columns - 1); ++x",
    ),
}  # fmt: skip

_KNOWN = "sm90/backward_statistics.cu"
_BACKWARD, _RING, _ORDER = "sm90/backward.cu", "attention/query_ring.cuh", "tile/fragment_order.cuh"
BACKWARD_EDITS = {
    "rooms are not fenced": Edit(_RING, "share_work", "ptx::mbarrier_init_fence();", ""),
    "copied tiles are not fenced": Edit(_ROOMS, "copy", "ptx::fence_proxy_async();", ""),
    "a panel of dO is not brought": Edit(
        _ROOMS, "start_copies", "column < to.columns; column += to.width) {", "column < to.width; column += to.width) {"
    ),
    "queries past a step are alive": Edit(
        _RING, "has_dead_rows", "if (step.stop < min(step.start", "if (false && step.stop < min(step.start"
    ),
    "queries without a key are alive": Edit(
        _RING, "has_dead_rows", "return first.lo >= first.hi || last.lo >= last.hi;", "return false;"
    ),
    "K is kept where no query sees it": Edit(
        _RING, "seen_keys",
        "max(work.first, interval(params, work.place, 0).lo), min(work.last,",
        "work.first, max(work.last,",
    ),
    "every step is whole": Edit(_RING, "produce", "own.parities | (is_whole ?", "own.parities | (true ?"),
    "a step's keys are all seen": Edit(
        _RING, "bits_of", "return ptx::bits_from(lo) & ~ptx::bits_from(hi);", "return ~0u;"
    ),
    "a band starts a query late": Edit(
        _RING, "know_keys", "(start - params.work.upper)", "(start + 1 - params.work.upper)"
    ),
    "a band ends a query early": Edit(
        _RING, "know_keys", "(start - params.work.lower + 1)", "(start - params.work.lower)"
    ),
    "queries past a step see keys": Edit(
        _RING, "know_keys", "min(last + key, step.stop - step.start) : 0", "last + key : 0"
    ),
    "bits of queries stand for keys": Edit(_RING, "know_seen", "tile::transpose_in_warp(bits)", "bits"),
    "half of the bits change places": Edit(_ROOMS, "transpose_in_warp", "low ^= low << step / 2;", ""),
    "a key's first query is searched for among rows that start": Edit(
        _RING, "find_reach", "(end % 2 == 0 ? keys.hi : keys.lo) <= key", "keys.lo <= key"
    ),
    "the last row is not searched": Edit(_RING, "find_reach", "row < last && (end", "row < last - 1 && (end"),
    "a head's work is read before it is written": Edit(
        _RING, "produce", "__syncwarp(); HeadWork& head_work", "HeadWork& head_work"
    ),
    "K comes while the last one is read": Edit(_RING, "help", "tile::await_empty(own.k, k_parity(note.kind));", ""),
    "P of masked keys is kept": Edit(_BACKWARD, "make_all", "if (!step.is_plain()) mend<true>(s, step);", ""),
    "bits of a list are all 1": Edit(_RING, "seen_bits", "bits &= listed;", ""),
    "a warp has another's bits": Edit(
        _BACKWARD, "SeenByThread.SeenByThread", "seen[Scores::first_row()]", "seen[ptx::lane() / 4]"
    ),
    "a thread has another's bits": Edit(
        _BACKWARD, "SeenByThread.SeenByThread", "[x] | all) >> step.first_query;", "[x] | all);"
    ),
    "a query has its neighbour's delta": Edit(
        _BACKWARD, "Asked.delta",
        "return queries.known.delta + first_query;",
        "return queries.known.delta + (first_query ^ 2);",
    ),
    "lse is that of the step before": Edit(
        _BACKWARD, "consume", "OfQueries(own.queries[next.stage].known", "OfQueries(own.queries[turn.stage].known"
    ),
    "lse of 128 queries is that of the first step": Edit(
        _BACKWARD, "consume", "lse_2(step.lse_2())", "lse_2(own.queries[0].known.lse_2 + first_query)"
    ),
    "delta is that of the step before": Edit(
        _BACKWARD, "consume", "make_p(next_s, delta, next_lse_2, next);", "make_p(next_s, delta, next_lse_2, turn);"
    ),
    "P is made before the scores are there": Edit(_BACKWARD, "consume", "tile::wait_for<1>(next_s);", ""),
    "minima are left out where an lse is large": Edit(_KNOWN, "know", "fabsf(lse_2) > kLargestLse2", "false"),
    "lse of the first rows count alone": Edit(
        _KNOWN, "know", "is_large |= is_live", "is_large |= first == 0 && is_live"
    ),
    "queries without a key count as others": Edit(_KNOWN, "know", "known.has_dead = is_dead;", "known.has_dead = 0;"),
    "queries without a key are copied": Edit(_KNOWN, "know", "__ballot_sync(0xffffffffu, is_live)", "0xffffffffu"),
    "delta lies a row further": Edit(
        _KNOWN, "sm90_backward_statistics", "known.delta[row - work.first]", "known.delta[(row - work.first) ^ 1]"
    ),
    "lse is in base e": Edit(_KNOWN, "know", "base_2(lse.at(work.first + row, 0))", "lse.at(work.first + row, 0)"),
    "what is known is the first tile's": Edit(_RING, "produce", "head_work.known[number]", "head_work.known[0]"),
    "what is known is not waited for": Edit(
        _RING, "produce", "kind & Note::kCopiesQ, sizeof known", "kind & Note::kCopiesQ"
    ),
    "a large lse hides keys": Edit(
        _BACKWARD, "SeenByThread.SeenByThread", "all = step.kind & Note::kMasked ? 0 : ~0u;", "all = 0;"
    ),
    "a mask hides nothing": Edit(
        _BACKWARD, "SeenByThread.SeenByThread", "all = step.kind & Note::kMasked ? 0 : ~0u;", "all = ~0u;"
    ),
    "dS is multiplied before it is there": Edit(
        _BACKWARD, "start_dq", "ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);", ""
    ),
    "dS is not fenced": Edit(_BACKWARD, "start_dq", "ptx::fence_proxy_async();", ""),
    "dS is written while the other warpgroup's dQ is made": Edit(
        _BACKWARD, "await_ds", "if constexpr (kMakesDq) ptx::bar_sync(kDsIsRead + part, kConsumers * kGroup);", ""
    ),
    "dQ is written while the last one is added": Edit(
        _RING, "add_up", "leave_dq<0>(1, is_end);", "leave_dq<2>(1, is_end);"
    ),
    "dQ's first part is written while the last one is added": Edit(
        _RING, "add_up", "leave_dq<1>(0, is_end);", "leave_dq<2>(0, is_end);"
    ),
    "dQ is added before it is there": Edit(
        _RING, "add_up", "ptx::bar_sync(kDqIsThere + part, kGroup + 32); leave_sums(sum,", "leave_sums(sum,"
    ),
    "dQ is not fenced": Edit(_RING, "leave_sums", "ptx::fence_proxy_async();", ""),
    "both parts of dQ are added to the first": Edit(_RING, "leave_sums", "= sum + part * kDqPart / 4;", "= sum;"),
    "both parts of dQ are the first": Edit(
        _RING, "leave_sums", "bulk_add(own, dq_address(part)", "bulk_add(own, dq_address(0)"
    ),
    "a note is read before it is there": Edit(
        _RING, "help", "ptx::mbarrier_wait(ptx::shared_address(&own.noted[turn.stage]), turn.parity);", ""
    ),
    "a head takes the place of one that helpers work on": Edit(
        _RING, "produce", "has_stepped ? (slot + 1) % kWorks", "has_stepped ? (slot + 1) % 2"
    ),
    "a head's queries have the mask of the one before": Edit(_RING, "produce", "note.work = slot;", "note.work = 0;"),
    "both warpgroups make one part of dQ": Edit(
        _BACKWARD, "start_dq", "kRowParts == 1 ? part * KPart::kBytes : 0", "0"
    ),
    "Q is left before dK is made": Edit(
        _BACKWARD, "consume", "tile::wait_for<1>(dv);", "tile::arrive(own.q[turn.stage].empty); tile::wait_for<1>(dv);"
    ),
    "dO is left before dV is made": Edit(_BACKWARD, "consume", "tile::wait_for<1>(dv);", "tile::wait_for<2>(dv);"),
    "the last part of dQ is lost": Edit(
        _BACKWARD, "consume", "else if constexpr (kMakesDq) hand_over(dq, own_dq, part);", ""
    ),
    "who comes first adds": Edit(_RING, "add_up", "is_first || (kFinishesInTurn", "false || (kFinishesInTurn"),
    "who comes second stores too": Edit(
        _RING, "visits_first", "return before == 0;", "return before <= 1 || before == kDqIsStored + 1;"
    ),
    "nobody tells that sums are stored": Edit(_RING, "add_up", "tile::tell(visits, attention::kDqIsStored);", ""),
    "sums may not be stored when it is told": Edit("tile/count.cuh", "await_copies", "ptx::bulk_wait<0>();", ""),
    "delta of a whole tile misses a chunk": Edit(
        _KNOWN, "each_delta_of_whole",
        "for (int c = 0; c < kOwn; ++c)\n#pragma unroll\nfor",
        "for (int c = 1; c < kOwn; ++c)\n#pragma unroll\nfor",
    ),
    "delta of a whole tile misses dlse": Edit(_KNOWN, "each_delta_of_whole", "sum - dlse.at(own, 0)", "sum"),
    "visits are counted from anywhere": Edit("sm90/backward_statistics.cu", "know", "known.visits.count = 0;", ""),
    "what nobody stored is dQ": Edit(
        "sm90/convert_dq.cu", "sm90_convert_dq", "if (kFirstStoresDq && known_queries", "if (false && known_queries"
    ),
    "results are those of the next tile": Edit(
        _BACKWARD, "consume", "own.notes[turn.stage].work", "own.notes[next.stage].work"
    ),
    "gradients start with those of the last tile": Edit(
        _BACKWARD, "consume", "dk.fill(0); dv.fill(0); await_keys(kind);", "await_keys(kind);"
    ),
    "the next tile's keys are not awaited": Edit(_BACKWARD, "consume", "await_keys(kind); }", "}"),
    "keys are left before dQ is made": Edit(
        _BACKWARD, "consume",
        "tile::wait_for<1>(dv);",
        "if (is_of_next_tile(kind)) leave_keys(); tile::wait_for<1>(dv);",
    ),
    "K of another head is let in before dQ is made": Edit(
        _BACKWARD, "consume",
        "if constexpr (kDpIsAhead) { kind = await_step(next);",
        "if constexpr (kDpIsAhead) { kind = await_step(next); await_other_k(kind);",
    ),
    "keys are never left": Edit(_BACKWARD, "consume", "if (is_of_next_tile(kind)) leave_keys();", ""),
    "K of every tile has one phase": Edit(
        _RING, "produce", "own.parities ^= Note::kParityOfK | (", "own.parities ^= 0 | ("
    ),
    "V of every tile has one phase": Edit(_RING, "produce", "(has_k ? 0 : Note::kParityOfV)", "0"),
    "a tile that nobody works on takes a place": Edit(_RING, "produce", "has_stepped = false; }", "}"),
    "a tile takes the place of the one before": Edit(
        _RING, "produce", "if (has_stepped) slot = (slot + 1)", "if (false) slot = (slot + 1)"
    ),
    "dK of keys that no query sees is what stands there": Edit(
        _RING, "produce", "write_nothing(params, params.dk, own.works[slot].tile, shape.head_dim);", ""
    ),
    "the count of tiles starts anywhere": Edit(_KNOWN, "sm90_backward_statistics", "reset_numbers(params);", ""),
    "a second launch finds the count of the first": Edit(
        "attention/work_tile.cuh", "next_number", "if (asked == num_tiles - 1) *next = 0;", ""
    ),
    "dK is not scaled": Edit(_BACKWARD, "write_gradients", "dk.scale(params.shape.softmax_scale);", ""),
    "one head gives dK and dV": Edit(_RING, "produce", "head < shape.group_size", "head < 1"),
    "sums of dQ go to the first tile": Edit(
        _RING, "produce", "head_work.dq_sum + number * params", "head_work.dq_sum + 0 * params"
    ),
    "dQ is not scaled": Edit("sm90/convert_dq.cu", "sm90_convert_dq", "dq.scale(shape.softmax_scale);", ""),
    "wide gradients lose a row": Edit(
        "attention/fragment_gradient.cuh", "write_wide",
        "Gradient::row(i) >= work.last) continue;",
        "Gradient::row(i) >= work.last - 1) continue;",
    ),
    "dS is not transposed": Edit(
        "tile/panel_tile.cuh", "store_transposed", "stmatrix_x4_trans(Tile", "stmatrix_x4(Tile"
    ),
}  # fmt: skip

_WIDE = "sm90/backward_wide.cu"
WIDE_EDITS = {
    "scores are not fenced": Edit(_WIDE, "share", "ptx::fence_proxy_async();", ""),
    "scores are multiplied before they are there": Edit(
        _WIDE, "share", "ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);", ""
    ),
    "P has one room": Edit(_WIDE, "p_smem", "kScoreRoom + is_odd * kScoreBytes", "kScoreRoom"),
    "dS lies where P does": Edit(_WIDE, None, "kScoreRoom + 2 * kScoreBytes}", "kScoreRoom}"),
    "both warpgroups store the same keys": Edit(
        _WIDE, "share", "rounded, Scores::warp_row(), part * kBlockKv / kConsumers", "rounded, Scores::warp_row(), 0"
    ),
    "a query has another's bits": Edit(_WIDE, "SeenByThread.SeenByThread", "Scores::first_row() * kRowBytes +", ""),
    "both warpgroups see the same keys": Edit(_WIDE, "SeenByThread.SeenByThread", "part * kBlockKv / 16)", "0)"),
    "a bit is its neighbour's": Edit(_WIDE, "SeenByThread.at", ">> (first + j % 2) & 1", ">> first & 1"),
    "a query has another's lse": Edit(
        _WIDE, "make_probabilities",
        "queries.known.lse_2[Scores::first_row() + Scores::row(i)]",
        "queries.known.lse_2[i]",
    ),
    "a query has another's delta": Edit(
        _WIDE, "make_gradients", "queries.known.delta[Scores::first_row() + Scores::row(i)]", "queries.known.delta[i]"
    ),
    "P of masked keys is kept": Edit(
        _WIDE, "make_probabilities", "s.at(i, j) = !IsMasked || seen.at(i, j) ? p : 0.0f;", "s.at(i, j) = p;"
    ),
    "dS of masked keys is kept": Edit(
        _WIDE, "make_gradients", "dp.at(i, j) = !IsMasked || seen.at(i, j) ?", "dp.at(i, j) = true ?"
    ),
    "S is read before it is there": Edit(_WIDE, "consume", "tile::wait_for<1>(s);", "tile::wait_for<2>(s);"),
    "dP is read before it is there": Edit(
        _WIDE, "consume", "tile::wait_for<1 + DvOfGroup::kOthers>(dp);", "tile::wait_for<2 + DvOfGroup::kOthers>(dp);"
    ),
    "dQ is read before it is there": Edit(_WIDE, "consume", "tile::wait_for<1>(dq);", "tile::wait_for<2>(dq);"),
    "the second part of dQ is read before it is there": Edit(
        _WIDE, "consume", "tile::wait_for<DkOfGroup::kOthers>(dq);", "tile::wait_for<1 + DkOfGroup::kOthers>(dq);"
    ),
    "dO is left while dV is made": Edit(
        _WIDE, "consume",
        "tile::wait_for<1>(dq); dv.keep_in_place(); if constexpr (kLeavesDo) "
        "tile::arrive(own.d_o[do_stage(turn)].empty);",
        "if constexpr (kLeavesDo) tile::arrive(own.d_o[do_stage(turn)].empty); tile::wait_for<1>(dq); "
        "dv.keep_in_place();",
    ),
    "dO is brought while the last one is read": Edit(
        _RING, "produce", "if constexpr (kLeavesDo) tile::await_empty(d_o, do_parity(turn));", ""
    ),
    "Q is left while dK is made": Edit(
        _WIDE, "consume",
        "ptx::wgmma_wait<1>(); dk.keep_in_place(); } tile::arrive(own.q[turn.stage].empty);",
        "tile::arrive(own.q[turn.stage].empty); ptx::wgmma_wait<1>(); dk.keep_in_place(); }",
    ),
    "dK is not waited for in the end": Edit(_WIDE, "consume", "ptx::wgmma_wait<0>();", ""),
    "Q is never left": Edit(_WIDE, "consume", "tile::arrive(own.q[turn.stage].empty);", ""),
    "K of a head is never left": Edit(_RING, "await_other_k", "tile::arrive(own.k.empty);", ""),
    "K of a head is awaited in the wrong phase": Edit(
        _RING, "await_other_k", "tile::await_full(own.k, k_parity(kind));", "tile::await_full(own.k, 0);"
    ),
    "V is not awaited": Edit(_RING, "await_keys", "tile::await_full(own.v, v_parity(kind));", ""),
    "wide gradients start with those of the last tile": Edit(
        _WIDE, "consume", "return; dk.each(part, clear); dv.each(part, clear);", "return;"
    ),
    "the next tile's keys are not awaited": Edit(
        _WIDE, "consume", "await_keys(kind); start_s(s, next, part);", "start_s(s, next, part);"
    ),
    "keys are left before gradients go through their rooms": Edit(
        _WIDE, "consume", "write_gradients(params, own", "leave_keys(); write_gradients(params, own"
    ),
    "dO is not awaited": Edit(_WIDE, "start_dp", "tile::await_full(board().d_o[do_stage(turn)], do_parity(turn));", ""),
    "helpers are a phase of dO ahead": Edit(
        _RING, "help", "tile::await_empty(own.d_o[do_stage(turn)], do_parity(turn));", "{}"
    ),
    "the one stage of dO has Q's phase": Edit(
        _RING, "do_parity", "kDoStages == 1 ? turn.stage : turn.parity", "turn.parity"
    ),
    "both warpgroups make the same half of dQ": Edit(_WIDE, "start_dq", "(part * kDqSlices + slice) *", "slice *"),
    "the second part of dQ is the first": Edit(_WIDE, "start_dq", "(part * kDqSlices + slice) *", "part * kDqSlices *"),
    "the second part of dQ is added to the first": Edit(
        _ORDER, "FragmentOrder.add", "at(i, first + j, 0)", "at(i, j, 0)"
    ),
    "the second part of dQ is lost at the end": Edit(
        _WIDE, "consume", "sum.add(dq, DqSlice::kColumnTiles); write_gradients(", "{} write_gradients("
    ),
    "sums of dQ are those of the next step": Edit(
        _WIDE, "consume", "const DqSum sum(note.dq_sum);", "const DqSum sum(own.notes[turn.next().stage].dq_sum);"
    ),
    "both warpgroups sum the same columns": Edit(
        _WIDE, "Gradient.start_first_sum", "Columns(left, part * kOwn), Keys(right)", "Columns(left, 0), Keys(right)"
    ),
    "the second panel of a warpgroup is the first": Edit(
        _WIDE, "Gradient.start_other_sums", "part * kOwn + 1), Keys", "part * kOwn), Keys"
    ),
    "of a panel that they share both have the first keys": Edit(
        _WIDE, "Gradient.start_other_sums", "Keys(right, part * kBlockKv / kConsumers)", "Keys(right)"
    ),
    "the panel that they share is the first": Edit(
        _WIDE, "Gradient.start_other_sums", "Columns(left, kLast),", "Columns(left, 0),"
    ),
    "what both share is written to the first keys": Edit(
        _WIDE, "Gradient.each", "call(shared, kLast, part * kBlockKv / kConsumers)", "call(shared, kLast, 0)"
    ),
    "panels of both are written to one place": Edit(
        _WIDE, "Gradient.each", "call(own[x], part * kOwn + x, 0)", "call(own[x], x, 0)"
    ),
    "wide dK is not scaled": Edit(_WIDE, "write_gradients", "sums.scale(params.shape.softmax_scale);", ""),
    "dK is written over K that is read": Edit(
        _WIDE, "write_gradients",
        "sums.scale(params.shape.softmax_scale); }); ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);",
        "sums.scale(params.shape.softmax_scale); });",
    ),
    "gradients are copied before they are there": Edit(
        _WIDE, "write_gradients",
        "dv, v_smem, part); ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);",
        "dv, v_smem, part);",
    ),
    "gradients of float32 lose a key": Edit(
        _WIDE, "write_wide", "Sums::column(j) < to.num_rows", "Sums::column(j) < to.num_rows - 1"
    ),
    "gradients of float32 lose a column": Edit(
        _WIDE, "write_wide", "Sums::row(i) < to.num_columns,", "Sums::row(i) < to.num_columns - 1,"
    ),
    "gradients of float32 start with the tile before": Edit(_WIDE, "put", ".rows(work.first, work.last);", ";"),
    "half a warpgroup copies gradients": Edit(
        _WIDE, "write_gradients", "from, threadIdx.x - kGroup);", "from, threadIdx.x % kGroup);"
    ),
    "the last column of a gradient is not copied": Edit(
        _ROOMS, "copy",
        "e < min(to.num_columns - column, kChunkOf<T>)",
        "e + 1 < min(to.num_columns - column, kChunkOf<T>)",
    ),
    "copied columns repeat": Edit(
        _ROOMS, "copy", "words.at[0] = words.at[0] >> 16 | words.at[1] << 48;", "words.at[0] >>= 16;"
    ),
    "a place in a panel is not permuted": Edit(
        _ROOMS, "Panels.at", "chunk % in_panel ^ row", "chunk % in_panel ^ 0 * row"
    ),
    "the last eight keys of P are not transposed": Edit(
        _PANELS, "store_transposed", "stmatrix_x2_trans(Panel", "stmatrix_x2(Panel"
    ),
    "rows of scores start with the first": Edit(
        _PANELS, "place_transposed", "first_row + lane / 16 * 8", "lane / 16 * 8"
    ),
}  # fmt: skip


def structures() -> list[Structure]:
    """Of kernels for 128 columns, one without a list and one with, of one with a single room for Q, and of one with
    three warpgroups, the first of which see no key of a tile's last steps."""
    rng = np.random.default_rng(0)
    square = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_kv": 300, "head_dim": 128}
    return [
        Structure(**square | {"num_heads": 4, "num_kv_heads": 2}, value_dim=104, mask=masks.Lengths(q=290, kv=290)),
        Structure(
            **square | {"head_dim": 100}, value_dim=100, mask=masks.Causal(), scale=-0.5, layouts=("odd_strides",) * 5
        ),
        Structure(**square, value_dim=128, scale=-0.1),
        Structure(
            **square | {"seqlen_q": 70}, q_batch=(2, 1), k_batch=(1, 3), v_batch=(3,), value_dim=128,
            mask=masks.Lengths(kv=np.array([[300, 0, 200], [40, 300, 0]])),
        ),
        Structure(
            **square, value_dim=128, mask=masks.BlockPattern(rng.random((3, 4)) < 0.6, (100, 88)), values="outliers"
        ),
        Structure(**square | {"seqlen_q": 60, "seqlen_kv": 200}, value_dim=128, scale=1e9),
        Structure(
            num_heads=2, num_kv_heads=1, seqlen_q=160, seqlen_kv=400, head_dim=136, value_dim=168,
            mask=masks.Lengths(q=150), values="outliers",
        ),
        Structure(**square | {"seqlen_q": 60}, value_dim=128, mask=masks.Lengths(kv=40)),
        Structure(seqlen_q=272, seqlen_kv=272, head_dim=64, value_dim=64, mask=masks.Causal()),
        Structure(**square, value_dim=128, mask=masks.SlidingWindow(70, 20)),
        Structure(seqlen_q=1, seqlen_kv=40, head_dim=128, value_dim=100),
        Structure(
            num_heads=3, seqlen_q=500, seqlen_kv=768, head_dim=40, value_dim=64, mask=masks.Causal("bottom_right")
        ),
    ]  # fmt: skip


def started_oddly(x: Any) -> Any:
    """The same array 8 bytes after a multiple of 16, where its rows may well be multiples of 16 apart."""
    wider = np.zeros((*x.shape[:-1], x.shape[-1] + 16), x.dtype)
    start = (8 - wider.ctypes.data) % 16 // 2
    wider[..., start : start + x.shape[-1]] = x
    return wider[..., start : start + x.shape[-1]]


@cache
def cleaned(made: Callable[[], list[Structure]]) -> list[Example]:
    """Examples, which know what is exact: made once for all edits."""
    return [half(structure) for structure in made()]


@cache
def with_plain_steps() -> list[Example]:
    """Steps that every query sees whole, with scores that grow, stay alike, grow large, are large at first, and are
    too large where some warpgroups mask them; and after a step in which some queries see nothing."""
    square, made = {"num_heads": 1, "seqlen_q": 130, "seqlen_kv": 384, "head_dim": 128, "value_dim": 128}, []
    for scale, first, other in ((0.1, 0.1, 4), (0.1, 1, 1), (400, 0.05, 2), (400, 2, 0.05)):
        clean = half(Structure(**square, scale=scale))
        k = clean.k * np.where(np.arange(384) < 128, first, other)[:, None]
        made.append(clean.but(k=k.astype(clean.k.dtype)))
    for length in (640, 1700):  # four warpgroups, and three
        late = Structure(seqlen_q=200, seqlen_kv=length, head_dim=64, value_dim=64, mask=masks.Causal("bottom_right"))
        clean = half(late)
        k = clean.k * np.where(np.arange(length) < length - 128, 0.1, 6)[:, None]  # in steps that are masked
        made.append(clean.but(k=k.astype(clean.k.dtype)))
    allowed = np.ones((130, 384), bool)
    allowed[::3, :128] = False
    return [*made, half(Structure(**square, mask=masks.Dense(allowed)))]


@cache
def with_large_lse() -> list[Example]:
    """Steps of 128 queries and of 64, whole but for those of the first 128; in the last 128, where a step has the first
    one's place, lse is large of those alone that the second helper finds out about: so large that any P is within
    bounds, and just large enough."""
    made, query, causal = [], np.arange(512), masks.Causal("top_left")
    for head_dim, scale in ((64, 1e9), (64, 1e3), (128, 1e3)):
        clean = half(Structure(seqlen_q=512, seqlen_kv=128, head_dim=head_dim, value_dim=40, scale=scale, mask=causal))
        q = clean.q.copy()
        q[..., (query < 384) | (query % 64 < 32), :] = 0
        made.append(clean.but(q=q))
    return made


def hopper_is_right() -> None:
    """On blocks that go on to further tiles, out of order; NaN stands past the keys' length."""
    for dim in (128, 192):
        assert_alike_keys_weigh_alike(dim, SIM90)
    for number, clean in enumerate(cleaned(structures) + with_plain_steps()):
        example = clean
        if number in (0, 7):
            v = clean.v.copy()
            v[..., 290 if number == 0 else 40 :, :] = np.nan
            example = clean.but(v=v)
        if number == 2:
            example = clean.but(k=started_oddly(clean.k), v=started_oddly(clean.v))
        plan = on_two_blocks(plan_of(example))
        for seed, order in enumerate(("random", "last_warp", "first_warp")):
            schedule = sim.Schedule(seed=seed, order=order, copies="late" if order == "last_warp" else "random")
            margin = ALIGNED if seed else MARGIN
            machine = Simulator(schedule, time_limit=5)  # a fault may have a block ask for tiles for ever
            assert_within_bounds(clean, **forward(plan, example, machine, margin=margin))


@pytest.mark.parametrize("name", chosen(EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        hopper_is_right()


def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    hopper_is_right()


def backward_structures() -> list[Structure]:
    """Of both tiles of queries, and of a list; small, but of several steps."""
    square = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_kv": 150}
    rng = np.random.default_rng(0)
    sees = np.arange(300)[:, None] // 10 % 3 > 0  # others see no key, in every tile of queries
    return [
        Structure(**square, head_dim=128, value_dim=104, mask=masks.Causal("bottom_right")),
        Structure(
            **square, q_batch=(2,), k_batch=(1,), v_batch=(1,), head_dim=64, value_dim=40,
            mask=masks.Lengths(q=290, kv=np.array([140, 100])),
        ),
        Structure(**square, head_dim=33, value_dim=20, mask=masks.Dense(rng.random((2, 300, 150)) < 0.3)),
        Structure(**square | {"num_heads": 8, "seqlen_q": 60}, head_dim=64, value_dim=40),  # heads of one step each
        Structure(
            num_heads=6, num_kv_heads=6, seqlen_q=60, seqlen_kv=600, head_dim=64, value_dim=40,
            mask=masks.BlockPattern(np.array([[True, False, True]]), 256),  # keys that no query sees, and empty tiles
        ),
        Structure(
            q_batch=(2, 1, 3), k_batch=(1, 2, 1), v_batch=(3,), num_heads=1, seqlen_q=20, seqlen_kv=140, head_dim=64,
            value_dim=40,
        ),  # of several launches
        Structure(**square | {"seqlen_q": 140}, head_dim=128, value_dim=104, mask=Ends(np.array([130, 70]))),
        Structure(
            num_heads=1, seqlen_q=300, seqlen_kv=400, head_dim=64, value_dim=40,
            mask=masks.SlidingWindow(left=50, right=0, align="top_left"),
        ),  # the last keys of which no query sees
        Structure(**square, head_dim=64, value_dim=64, mask=masks.Dense(sees & (rng.random((300, 150)) < 0.7))),
        Structure(
            **square, head_dim=64, value_dim=40, mask=masks.BlockPattern(np.array([[1, 1], [0, 0], [1, 0]], bool), 128)
        ),  # queries that no tile of keys visits
    ]  # fmt: skip


def hopper_gradients_are_right() -> None:
    """NaN stands in queries without a key, in keys that no query sees, and past the lengths."""
    for number, clean in enumerate(cleaned(backward_structures) + with_large_lse()):
        changed = {x: getattr(clean, x).copy() for x in ("q", "k", "v", "do")}
        if number == 0:
            changed["do"][..., :150, :] = np.nan
        if number == 1:
            for x, end in (("q", 290), ("k", 140), ("v", 140), ("do", 290)):
                changed[x][..., end:, :] = np.nan
        if number == 7:
            for x in ("k", "v"):
                changed[x][..., 300:, :] = np.nan
        if number == 8:
            for x in ("q", "do"):
                changed[x][..., np.arange(300) // 10 % 3 == 0, :] = np.nan
        for seed, order in enumerate(("random", "last_warp", "first_warp")):
            copies = "late" if order == "last_warp" else "random"
            schedule = sim.Schedule(seed=seed, order=order, copies=copies, shuffle_lanes=seed < 2)
            machine = FewBlocks(schedule, most=1 + seed)
            margin = ALIGNED if seed else MARGIN
            assert_within_bounds(clean, **call(clean.but(**changed), SIM90, machine, margin=margin))


@pytest.mark.parametrize("name", chosen(BACKWARD_EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_fault_planted_in_gradients_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", BACKWARD_EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        hopper_gradients_are_right()


def test_the_gradients_as_they_are_pass_the_same_guard() -> None:
    hopper_gradients_are_right()


def wide_structures() -> list[Structure]:
    """Of one stage of dO and of two; of panels that warpgroups share; of a list; and of heads that see other keys."""
    square = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_kv": 150}
    rng = np.random.default_rng(0)
    return [
        Structure(**square, head_dim=256, value_dim=200, mask=masks.Causal("bottom_right")),
        Structure(
            **square | {"seqlen_q": 140}, q_batch=(2,), k_batch=(1,), v_batch=(1,), head_dim=192, value_dim=131,
            mask=masks.Lengths(q=130, kv=np.array([140, 100])),
        ),
        Structure(
            **square | {"seqlen_q": 100}, head_dim=250, value_dim=130, mask=masks.Dense(rng.random((2, 100, 150)) < 0.3)
        ),
        Structure(**square | {"seqlen_q": 140}, head_dim=192, value_dim=128, mask=Ends(np.array([130, 70]))),
    ]  # fmt: skip


def wide_gradients_are_right() -> None:
    """NaN stands in queries without a key, and past the lengths."""
    for number, clean in enumerate(cleaned(wide_structures)):
        changed = {x: getattr(clean, x).copy() for x in ("q", "k", "v", "do")}
        if number == 0:
            changed["do"][..., :150, :] = np.nan
        if number == 1:
            for x, end in (("q", 130), ("k", 140), ("v", 140), ("do", 130)):
                changed[x][..., end:, :] = np.nan
        for seed, order in enumerate(("random", "last_warp", "first_warp")):
            schedule = sim.Schedule(seed=seed, order=order, copies="late" if order == "last_warp" else "random")
            machine, margin = FewBlocks(schedule, most=1 + seed), ALIGNED if seed else MARGIN
            assert_within_bounds(clean, **call(clean.but(**changed), SIM90, machine, margin=margin))


@pytest.mark.parametrize("name", chosen(WIDE_EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_fault_planted_in_wide_gradients_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", WIDE_EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        wide_gradients_are_right()


def test_the_wide_gradients_as_they_are_pass_the_same_guard() -> None:
    wide_gradients_are_right()


def test_every_edit_fits_the_sources() -> None:
    assert misfits((*EDITS.values(), *BACKWARD_EDITS.values(), *WIDE_EDITS.values())) == []
