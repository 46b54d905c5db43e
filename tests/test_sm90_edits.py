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
from planting import chosen, planted, without_their_line
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
_SCORES_ARE_AWAITED = (
    "      tile::wait_for<1>(s);\n    }\n    add_last_values(o, p, num_keys);\n"
    "    if (!(kind & Note::kEndsTile)) pass_over(group, num_keys, "
)
_ONE_PANEL = ("column < to.columns; column += to.width) {", "column < to.width; column += to.width) {")
_COPY = (
    "  tile::copy<32>(panels_of<kOperand>(stage), all.rows(first, last), tile::number_in_warp(), "
    "[](int) { return true; });\n"
)
_V_IS_LEFT = "tile::arrive(board().v[stage_of(num_keys - 1)].empty);\n"
EDITS = {
    "barriers are not fenced": (_KEYS, "  ptx::mbarrier_init_fence();\n", ""),
    "copied rows are not fenced": (_ROOMS, "  ptx::fence_proxy_async();\n", ""),
    "copied rows are not waited for": (_ROOMS, "  ptx::cp_async_wait_all();\n", ""),
    "copied chunks are not permuted": (_ROOMS, "chunk % in_panel ^ row * in_panel / kChunkOf<uint16_t>", "chunk"),
    "the last column is not copied": (_ROOMS, "int e = rest - 1; e >= 0", "int e = rest - 2; e >= 0"),
    "copied rows count as there before they are": (
        _KEYS, f"{_COPY}  tile::arrive(room.full);\n", f"  tile::arrive(room.full);\n{_COPY}"
    ),
    "V past a step is what stands there": (_KEYS, "bool clears = ends_early(step, length)", "bool clears = false"),
    "keys of the step before count again": (_KEYS, "    seen.lo = max(seen.lo, note.start);\n", ""),
    "a wider step is whole": (_KEYS, "is_whole = !is_wider && ", "is_whole = "),
    "V is that of a step that is not wider": (
        _KEYS, "      widen<kBlockKv, config::kIsListed>(step, task.reach, length);\n", ""
    ),
    "an array without a map is left to the accelerator": (_MAPS, "map.is_there && ", ""),
    "an odd start is left to the accelerator": (
        _MAPS, " && reinterpret_cast<uint64_t>(matrices.data) % 16 == 0", ""
    ),
    "only the first panel is brought": (_ROOMS, *_ONE_PANEL),
    "a broadcast axis is stepped over": (_MAPS, "strides[2] == 0 ? 0 : ", ""),
    "K is that of the query's head": (
        _KEYS, "task.kv_head = work.place.head / params.shape.group_size", "task.kv_head = work.place.head"
    ),
    "a room counts as empty in the wrong phase": (_ROOMS, "&room.empty), parity ^ 1);", "&room.empty), parity);"),
    "a room counts as full in the wrong phase": (
        _ROOMS, "mbarrier_wait(ptx::shared_address(&room.full), parity);",
        "mbarrier_wait(ptx::shared_address(&room.full), parity ^ 1);",
    ),
    "one stage serves all": (_KEYS, "return count % kNumStages;", "return 0;"),
    "every lane asks for a tile": (_KEYS, "if (leads()) number = attention::next", "number = attention::next"),
    "nobody has the first tiles": (_KEYS, "  if (is_first) return attention::first_number();\n", ""),
    "K is left before it is multiplied": (
        _FORWARD, "             next.start_products(s, o, p, group, num_keys);\n",
        "             next.start_products(s, o, p, group, num_keys);\n"
        "      tile::arrive(board().k[stage_of(num_keys)].empty);\n",
    ),
    "V is left before it is multiplied": (
        _FORWARD, f"        tile::wait_for<0>(o);\n        if (num_keys > 0) {_V_IS_LEFT}",
        f"        if (num_keys > 0) {_V_IS_LEFT}        tile::wait_for<0>(o);\n",
    ),
    "V is left before it is multiplied, with one room for Q": (
        _FORWARD, f"        tile::wait_for<0>(o);\n        if (!is_first) {_V_IS_LEFT}",
        f"        if (!is_first) {_V_IS_LEFT}        tile::wait_for<0>(o);\n",
    ),
    "Q is left with the first step": (
        _FORWARD, "if (is_last && kQRooms == 1) tile",
        "if (board().notes[stage_of(num_keys)].start == 0 && kQRooms == 1) tile",
    ),
    "Q's room is left before O went through it": (
        _FORWARD, "    rounded = o;\n    tile::store(room",
        "    rounded = o;\n    tile::arrive(board().q[q_room_of(num_tasks)].empty);\n    tile::store(room",
    ),
    "O is written before it is there": (
        _FORWARD, "    ptx::fence_proxy_async();\n    __syncwarp();\n", "    ptx::fence_proxy_async();\n"
    ),
    "O is not fenced": (_FORWARD, "    ptx::fence_proxy_async();\n", ""),
    "Q's room is left while O leaves it": (_FORWARD, "  ptx::bulk_wait_read<0>();\n", ""),
    "O is put where another warp's is": (_FORWARD, "(room, rounded, o.warp_row());", "(room, rounded, 0);"),
    "all panels of O are the first": (_PANELS, " + k / kSteps * Panel::kBytes, from", ", from"),
    "a panel of O is written over the first": (_FORWARD, "panel * OPanels::kPanelWidth,", "0 * panel,"),
    "a panel of O is the first one's": (_FORWARD, "room.panel(panel).address(o", "room.panel(0).address(o"),
    "rows past a tile are written": (_KEYS, "(num_rows % kBoxRows == 0 ||", "(true ||"),
    "warps past a tile write": (_FORWARD, " && o.warp_row() < to.num_rows; ++panel", "; ++panel"),
    "the first tile starts before the first query": ("attention/work_tile.cuh", "max(first, 0)", "first"),
    "lse past a tile is written": (_FORWARD, "row < to.num_rows) to.lse", "true) to.lse"),
    "queries share their sums": (
        "attention/fragments.cuh", "ptx::reciprocal_approx(divisor)", "ptx::reciprocal_approx(sum[0])"
    ),
    "lse is another query's": ("attention/fragments.cuh", "ptx::log_accurate(divisor)", "ptx::log_accurate(sum[0])"),
    "results of queries without a key stay as they are": (_FORWARD, " o.at(row, column) = {};", " continue;"),
    "lse of queries without a key stays as it is": (
        _FORWARD, "    if (leads()) lse.at(row, 0)", "    if (false) lse.at(row, 0)"
    ),
    "scores are read before they are there": (
        _FORWARD, f"{_SCORES_ARE_AWAITED}true);", f"{_SCORES_ARE_AWAITED}true);".replace("<1>", "<2>")
    ),
    "scores are read before they are there, with one room for Q": (
        _FORWARD, f"{_SCORES_ARE_AWAITED}false);", f"{_SCORES_ARE_AWAITED}false);".replace("<1>", "<2>")
    ),
    "O is not rescaled": (
        _FORWARD, "make_weights(s, softmax, o, has_risen && !is_first, by);",
        "make_weights(s, softmax, o, false, by);",
    ),
    "O is not rescaled, with one room for Q": (
        _FORWARD, "make_weights(s, softmax, o, has_risen, by);\n", "make_weights(s, softmax, o, false, by);\n"
    ),
    "scores that are large are scaled first": (
        _FORWARD, "  if (softmax.reasons & Softmax::kIsLarge) softmax.take_off(s);\n", ""
    ),
    "weights that are too large count": (_FRAGMENTS, "    if (__any_sync(0xffffffffu, !is_small)) return false;\n", ""),
    "a warp looks at its first thread's weights alone": (
        _FRAGMENTS, "if (__any_sync(0xffffffffu, !is_small))", "if (!__shfl_sync(0xffffffffu, is_small, 0))"
    ),
    "weights of a row are another's sum": (_FRAGMENTS, "row_sum[i] += sum[i];", "row_sum[i] += sum[0];"),
    "lost scores are weighed again": (
        _FORWARD, "      if (again) remake_scores(s, num_tasks, num_keys);\n", ""
    ),
    "lost scores are weighed again, of two warpgroups": (
        _FORWARD, "    if (is_lost) remake_scores(s, num_tasks, num_keys);\n", ""
    ),
    "lost scores are not masked again": (
        _FORWARD, "      if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys);\n      if",
        "      if (!(kind & Note::kAsTheyAre) && !again) mend_scores(params, s, num_tasks, num_keys);\n      if",
    ),
    "masks are read after others may write them": (
        _FORWARD, "    if (!(kind & Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys);\n    leave_keys"
        "(num_keys, kind & Note::kLast);\n", "    leave_keys(num_keys, kind & Note::kLast);\n    if (!(kind & "
        "Note::kAsTheyAre)) mend_scores(params, s, num_tasks, num_keys);\n",
    ),
    "scores are made again of the first stage": (
        _FORWARD, "right_along(k_smem(stage_of(num_keys)).panel", "right_along(k_smem(0).panel"
    ),
    "scores are made again of the last tile's queries": (
        _FORWARD, "left_along(q_smem(q_room_of(num_tasks)).panel", "left_along(q_smem(q_room_of(num_tasks + 1)).panel"
    ),
    "scores are made again of one panel": (_FORWARD, "panel(k / kInPanel), 0);", "panel(0), 0);"),
    "a warp makes scores of others again": (
        _FORWARD, "panel(k / kInPanel), s.warp_row());", "panel(k / kInPanel), 0);"
    ),
    "scores are added to those that were": (
        _FORWARD, "  s.fill(0);\n#pragma unroll 1  // rare", "#pragma unroll 1  // rare"
    ),
    "a masked step is plain": (_FORWARD, "kAsPlain = Note::kUnseen | Note::kAsTheyAre;", "kAsPlain = Note::kUnseen;"),
    "a tile's last step is plain": (_FORWARD, "(kAsPlain | Note::kLast)) == kAsPlain", "kAsPlain) == kAsPlain"),
    "turned scores are as they are": (
        _KEYS, "!kBringsDo && attention::LazySoftmax<2>::turns(params.shape.softmax_scale)", "false"
    ),
    "a tile's first step is plain": (_FRAGMENTS, "int reasons = kSeesNone;", "int reasons = 0;"),
    "steps with large maxima are plain": (_FRAGMENTS, "reasons = kIsLarge * __any_sync", "reasons = 0 * __any_sync"),
    "steps are plain for queries that have seen no key": (_FRAGMENTS, " + kSeesNone * __any", " + 0 * __any"),
    "V is left before it is multiplied in a plain step": (
        _FORWARD, f"  tile::wait_for<0>(o);\n  {_V_IS_LEFT}}}\n\n// What is multiplied next",
        f"  {_V_IS_LEFT}  tile::wait_for<0>(o);\n}}\n\n// What is multiplied next",
    ),
    "keys of a plain step are those of the one before": (
        _FORWARD, "++num_keys;\n        next = Operands(group, num_tasks, num_keys);\n        p = s",
        "next = Operands(group, num_tasks, num_keys);\n        ++num_keys;\n        p = s",
    ),
    "a warpgroup has the mask of the first": (_KEYS, ".kinds[group % kConsumers];", ".kinds[0];"),
    "warpgroups see what the tile's first rows see": (_KEYS, "work, 64 * tile::number_in_warp());", "work, 0);"),
    "what some of a warpgroup's queries see all do": (
        _KEYS, "return {reach.stop, reach.full_start, reach.full_stop};",
        "return {reach.stop, reach.full_start, reach.stop};",
    ),
    "a warpgroup leaves a tile a step too soon": (
        _KEYS, "step.stop >= span.stop);", "step.stop + kBlockKv >= span.stop);"
    ),
    "keys that a warpgroup passes over are not left": (
        _FORWARD, "    tile::arrive(board().k[stage].empty);\n    await_turn", "    await_turn"
    ),
    "values that a warpgroup passes over are left unread": (
        _FORWARD, "    tile::await_full(board().v[stage], parity);\n", ""
    ),
    "values that a warpgroup passed over are left twice": (
        _FORWARD, "if (!is_end || !keeps_values) tile", "tile"
    ),
    "who passes over a step has no turn": (_FORWARD, "    await_turn();\n    pass_turn();\n", ""),
    "who passed over a tile's end starts without a turn": (
        _FORWARD, "num_tasks, num_keys, num_keys > 0);", "num_tasks, num_keys, false);"
    ),
    "Q's room is left a tile too late": (
        _FORWARD, "(is_first && !is_last) * Note::kOLeaves", "is_first * Note::kOLeaves"
    ),
    "Q's room is not left by plain steps": (
        _FORWARD, "        if (kind & Note::kOLeaves) leave_queries(num_tasks - 1);\n        ++num", "        ++num"
    ),
    "Q's room is not left by other steps": (
        _FORWARD, "if (kind & Note::kOLeaves || is_first && is_last) leave", "if (is_first && is_last) leave"
    ),
    "Q's room is not left after a single step": (
        _FORWARD, "if (kind & Note::kOLeaves || is_first && is_last) leave", "if (kind & Note::kOLeaves) leave"
    ),
    "K that was not there when it was asked for counts as there": (
        _FORWARD, "    if (!has_k_) tile", "    if (false) tile"
    ),
    "V that was not there when it was asked for counts as there": (
        _FORWARD, "    if (!has_v_) tile", "    if (false) tile"
    ),
    "O goes on from tile to tile": (
        _FORWARD, "          o.fill(0);\n        }\n        if", "        }\n        if"
    ),
    "a tile has the sums of the next one": (_FORWARD, "- 1, finished, o, false);", "- 1, softmax, o, false);"),
    "a tile goes on with the maximum of the one before": (_FORWARD, "      softmax = Softmax();\n", ""),
    "there is a task for each room": (_KEYS, "kTasks = 4;", "kTasks = 2;"),
    "a task is left before V is brought": (
        _KEYS, "&told.empty), 2 * tile::kArrivals);", "&told.empty), tile::kArrivals);"
    ),
    "a task is left before its results are written": (
        _KEYS, "await_room(told, task_parity_of(num_tasks + kTasks - 1));",
        "await_room(told, task_parity_of(num_tasks));",
    ),
    "a row that ends within a chunk is left to the accelerator": (
        _KEYS, "params.shape.value_dim % tile::kChunkOf<Element> == 0 &&", "true &&"
    ),
    "a band ends with the first row's": (_FRAGMENTS, "columns_before(keys.hi + row)", "columns_before(keys.hi)"),
    "a band starts with the first row's": (_FRAGMENTS, "columns_before(keys.lo + row)", "columns_before(keys.lo)"),
    "a band ends alike for all rows of a thread": (_FRAGMENTS, "min(hi + 2 * i, last)", "min(hi, last)"),
    "a band starts alike for all rows of a thread": (_FRAGMENTS, "max(lo + 2 * i, first)", "max(lo, first)"),
    "a band goes on past the last key": (_FRAGMENTS, "min(hi + 2 * i, last)", "hi + 2 * i"),
    "keys of the step before count again in a band": (_FRAGMENTS, "max(lo + 2 * i, first)", "lo + 2 * i"),
    "a thread's two columns are one": (
        _FRAGMENTS, "* 2 + min(key - first_key & 7, 2);", "* 2 + min(key - first_key & 7, 1);"
    ),
    "nobody has the first turn": (_FORWARD, "  if (group == kConsumers) pass_turn();\n", ""),
    "a warpgroup has another's queries": (_FORWARD, "64 * (group % kConsumers)", "64 * (group - 1)"),
    "a task overwrites the one before": (
        _KEYS, "    Task& task = board().tasks[task_of(num_tasks)];\n    if (!is_end",
        "    Task& task = board().tasks[0];\n    if (!is_end",
    ),
    "every step is whole": (_KEYS, "!is_wider && attention::is_whole<kBlockKv>(own)", "true"),
    "a negative scale is not turned": (_FORWARD, "if (Softmax::turns(softmax_scale)) ", "if (false) "),
    "panels of V lie too close": (_PANELS, "kSwizzle, Tile::Panel::kBytes, 8", "kSwizzle, 1024, 8"),
    "the second panel of K is the first": (_PANELS, "at(panel * Tile::Panel::kBytes + ", "at(0 * panel + "),
    "rows of a fragment change places": (_PANELS, "fragments[k][e] = ptx::pack2", "fragments[k][e ^ 1] = ptx::pack2"),
    "a chunk of O is another's": (_STORE, "is_upper ? first : second, step", "is_upper ? second : first, step"),
    "a row too many of O is stored": (
        _STORE, "if (row >= to.num_rows) continue;\n      Packet", "if (row > to.num_rows) continue;\n      Packet"
    ),
    "chunks past the last column are stored": (
        _STORE, "from.warp_column() + 8 * Tile::kColumnTiles <= to.num_columns", "true"
    ),
    "the last element of a short chunk is lost": (
        _STORE, "min(column + kChunkOf<T>, to.num_columns); ++x", "min(column + kChunkOf<T>, to.num_columns - 1); ++x"
    ),
}  # fmt: skip

_KNOWN = "sm90/backward_statistics.cu"
_BACKWARD, _RING, _ORDER = "sm90/backward.cu", "attention/query_ring.cuh", "tile/fragment_order.cuh"
BACKWARD_EDITS = {
    "rooms are not fenced": (_RING, "    ptx::mbarrier_init_fence();\n", ""),
    "copied tiles are not fenced": (_ROOMS, "  ptx::fence_proxy_async();\n", ""),
    "a panel of dO is not brought": (_ROOMS, *_ONE_PANEL),
    "queries past a step are alive": (
        _RING, "  if (step.stop < min(step.start", "  if (false && step.stop < min(step.start"
    ),
    "queries without a key are alive": (
        _RING, "return first.lo >= first.hi || last.lo >= last.hi;", "return false;"
    ),
    "K is kept where no query sees it": (
        _RING,
        "{max(work.first, interval(params, work.place, 0).lo),\n          min(work.last, ",
        "{work.first, max(work.last, ",
    ),
    "every step is whole": (_RING, "own.parities | (is_whole ?", "own.parities | (true ?"),
    "a step's keys are all seen": (_RING, "return ptx::bits_from(lo) & ~ptx::bits_from(hi);", "return ~0u;"),
    "a band starts a query late": (_RING, "(start - params.work.upper)", "(start + 1 - params.work.upper)"),
    "a band ends a query early": (_RING, "(start - params.work.lower + 1)", "(start - params.work.lower)"),
    "queries past a step see keys": (_RING, "min(last + key, step.stop - step.start) : 0", "last + key : 0"),
    "bits of queries stand for keys": (_RING, "tile::transpose_in_warp(bits)", "bits"),
    "half of the bits change places": (_ROOMS, "low ^= low << step / 2;", ""),
    "a key's first query is searched for among rows that start": (
        _RING, "(end % 2 == 0 ? keys.hi : keys.lo) <= key", "keys.lo <= key"
    ),
    "the last row is not searched": (_RING, "row < last && (end", "row < last - 1 && (end"),
    "a head's work is read before it is written": (
        _RING, "    __syncwarp();\n    HeadWork& head_work", "    HeadWork& head_work"
    ),
    "K comes while the last one is read": (_RING, "      tile::await_empty(own.k, k_parity(note.kind));", "     "),
    "P of masked keys is kept": (_BACKWARD, "  if (!step.is_plain()) mend<true>(s, step);\n", ""),
    "bits of a list are all 1": (_RING, "    bits &= listed;\n", ""),
    "a warp has another's bits": (_BACKWARD, "seen[Scores::first_row()]", "seen[ptx::lane() / 4]"),
    "a thread has another's bits": (_BACKWARD, "[x] | all) >> step.first_query;", "[x] | all);"),
    "a query has its neighbour's delta": (
        _BACKWARD, "return queries.known.delta + first_query;", "return queries.known.delta + (first_query ^ 2);"
    ),
    "lse is that of the step before": (
        _BACKWARD, "OfQueries(own.queries[next.stage].known", "OfQueries(own.queries[turn.stage].known"
    ),
    "lse of 128 queries is that of the first step": (
        _BACKWARD, "lse_2(step.lse_2())", "lse_2(own.queries[0].known.lse_2 + first_query)"
    ),
    "delta is that of the step before": (
        _BACKWARD, "make_p(next_s, delta, next_lse_2, next);", "make_p(next_s, delta, next_lse_2, turn);"
    ),
    "P is made before the scores are there": (_BACKWARD, "      tile::wait_for<1>(next_s);\n", ""),
    "minima are left out where an lse is large": (_KNOWN, "fabsf(lse_2) > kLargestLse2", "false"),
    "lse of the first rows count alone": (_KNOWN, "is_large |= is_live", "is_large |= first == 0 && is_live"),
    "queries without a key count as others": (_KNOWN, "known.has_dead = is_dead;", "known.has_dead = 0;"),
    "queries without a key are copied": (_KNOWN, "__ballot_sync(0xffffffffu, is_live)", "0xffffffffu"),
    "delta lies a row further": (_KNOWN, "known.delta[row - work.first]", "known.delta[(row - work.first) ^ 1]"),
    "lse is in base e": (_KNOWN, "base_2(lse.at(work.first + row, 0))", "lse.at(work.first + row, 0)"),
    "what is known is the first tile's": (_RING, "head_work.known[number]", "head_work.known[0]"),
    "what is known is not waited for": (
        _RING, "kind & Note::kCopiesQ,\n             sizeof known", "kind & Note::kCopiesQ"
    ),
    "a large lse hides keys": (_BACKWARD, "all = step.kind & Note::kMasked ? 0 : ~0u;", "all = 0;"),
    "a mask hides nothing": (_BACKWARD, "all = step.kind & Note::kMasked ? 0 : ~0u;", "all = ~0u;"),
    "dS is multiplied before it is there": (
        _BACKWARD, "  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);", "  "
    ),
    "dS is not fenced": (_BACKWARD, "  ptx::fence_proxy_async();\n", ""),
    "dS is written while the other warpgroup's dQ is made": (
        _BACKWARD, "  if constexpr (kMakesDq) ptx::bar_sync(kDsIsRead + part, kConsumers * kGroup);\n", ""
    ),
    "dQ is written while the last one is added": (_RING, "leave_dq<0>(1, is_end);", "leave_dq<2>(1, is_end);"),
    "dQ's first part is written while the last one is added": (
        _RING, "leave_dq<1>(0, is_end);", "leave_dq<2>(0, is_end);"
    ),
    "dQ is added before it is there": (
        _RING, "      ptx::bar_sync(kDqIsThere + part, kGroup + 32);\n      leave_sums(sum,", "      leave_sums(sum,"
    ),
    "dQ is not fenced": (_RING, "  ptx::fence_proxy_async();  // of what others wrote: they are waited for\n", ""),
    "both parts of dQ are added to the first": (_RING, "= sum + part * kDqPart / 4;", "= sum;"),
    "both parts of dQ are the first": (_RING, "bulk_add(own, dq_address(part)", "bulk_add(own, dq_address(0)"),
    "a note is read before it is there": (
        _RING, "    ptx::mbarrier_wait(ptx::shared_address(&own.noted[turn.stage]), turn.parity);\n", ""
    ),
    "a head takes the place of one that helpers work on": (
        _RING, "has_stepped ? (slot + 1) % kWorks", "has_stepped ? (slot + 1) % 2"
    ),
    "a head's queries have the mask of the one before": (_RING, "note.work = slot;", "note.work = 0;"),
    "both warpgroups make one part of dQ": (_BACKWARD, "kRowParts == 1 ? part * KPart::kBytes : 0", "0"),
    "Q is left before dK is made": (
        _BACKWARD,
        "    tile::wait_for<1>(dv);\n",
        "    tile::arrive(own.q[turn.stage].empty);\n    tile::wait_for<1>(dv);\n",
    ),
    "dO is left before dV is made": (
        _BACKWARD,
        "    tile::wait_for<1>(dv);\n    tile::keep_in_place(p);",
        "    tile::wait_for<2>(dv);\n    tile::keep_in_place(p);",
    ),
    "the last part of dQ is lost": (_BACKWARD, "      else if constexpr (kMakesDq) hand_over(dq, own_dq, part);\n", ""),
    "who comes first adds": (_RING, "is_first || (kFinishes", "false || (kFinishes"),
    "who comes second stores too": (_RING, "return before == 0;", "return before <= 1 || before == kDqIsStored + 1;"),
    "nobody tells that sums are stored": (_RING, "      tile::tell(visits, attention::kDqIsStored);\n", ""),
    "sums may not be stored when it is told": ("tile/count.cuh", "  ptx::bulk_wait<0>();\n", ""),
    "delta of a whole tile misses a chunk": (
        _KNOWN, "        for (int c = 0; c < kOwn; ++c)\n#pragma unroll\n          for",
        "        for (int c = 1; c < kOwn; ++c)\n#pragma unroll\n          for",
    ),
    "delta of a whole tile misses dlse": (_KNOWN, "sum - dlse.at(own, 0)", "sum"),
    "visits are counted from anywhere": ("sm90/backward_statistics.cu", "  known.visits.count = 0;\n", ""),
    "what nobody stored is dQ": (
        "sm90/convert_dq.cu", "if (kFirstStoresDq && known", "if (false && known"
    ),
    "results are those of the next tile": (_BACKWARD, "own.notes[turn.stage].work", "own.notes[next.stage].work"),
    "gradients start with those of the last tile": (_BACKWARD, "        dk.fill(0);\n        dv.fill(0);\n", ""),
    "the next tile's keys are not awaited": (_BACKWARD, "        await_keys(kind);\n", ""),
    "keys are left before dQ is made": (
        _BACKWARD, "    tile::wait_for<1>(dv);\n",
        "    if (is_of_next_tile(kind)) leave_keys();\n    tile::wait_for<1>(dv);\n",
    ),
    "K of another head is let in before dQ is made": (
        _BACKWARD, "      kind = await_step(next);\n",
        "      kind = await_step(next);\n      await_other_k(kind);\n",
    ),
    "keys are never left": (_BACKWARD, "      if (is_of_next_tile(kind)) leave_keys();\n", ""),
    "K of every tile has one phase": (_RING, "own.parities ^= Note::kParityOfK | (", "own.parities ^= 0 | ("),
    "V of every tile has one phase": (_RING, "(has_k ? 0 : Note::kParityOfV)", "0"),
    "a tile that nobody works on takes a place": (_RING, "    has_stepped = false;\n  }\n  tile", "  }\n  tile"),
    "a tile takes the place of the one before": (
        _RING, "if (has_stepped) slot = (slot + 1)", "if (false) slot = (slot + 1)"
    ),
    "dK of keys that no query sees is what stands there": (
        _RING, "  write_nothing(params, params.dk, own.works[slot].tile, shape.head_dim);\n", ""
    ),
    "the count of tiles starts anywhere": (_KNOWN, "  reset_numbers(params);\n", ""),
    "a second launch finds the count of the first": (
        "attention/work_tile.cuh", "  if (asked == num_tiles - 1) *next = 0;\n", ""
    ),
    "dK is not scaled": (_BACKWARD, "  dk.scale(params.shape.softmax_scale);\n", ""),
    "one head gives dK and dV": (_RING, "head < shape.group_size", "head < 1"),
    "sums of dQ go to the first tile": (_RING, "head_work.dq_sum + number * params", "head_work.dq_sum + 0 * params"),
    "dQ is not scaled": ("sm90/convert_dq.cu", "  dq.scale(shape.softmax_scale);\n", ""),
    "wide gradients lose a row": (
        "attention/fragment_gradient.cuh", "Gradient::row(i) >= work.last) continue;",
        "Gradient::row(i) >= work.last - 1) continue;",
    ),
    "dS is not transposed": ("tile/panel_tile.cuh", "stmatrix_x4_trans(Tile", "stmatrix_x4(Tile"),
}  # fmt: skip

_WIDE = "sm90/backward_wide.cu"
WIDE_EDITS = {
    "scores are not fenced": (
        _WIDE, "kConsumers);\n  ptx::fence_proxy_async();\n", "kConsumers);\n"
    ),
    "scores are multiplied before they are there": (
        _WIDE, "  ptx::fence_proxy_async();\n  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);\n",
        "  ptx::fence_proxy_async();\n",
    ),
    "P has one room": (_WIDE, "kScoreRoom + is_odd * kScoreBytes", "kScoreRoom"),
    "dS lies where P does": (_WIDE, "ds_smem{kScoreRoom + 2 * kScoreBytes}", "ds_smem{kScoreRoom}"),
    "both warpgroups store the same keys": (
        _WIDE, "rounded, Scores::warp_row(), part * kBlockKv / kConsumers", "rounded, Scores::warp_row(), 0"
    ),
    "a query has another's bits": (_WIDE, "Scores::first_row() * kRowBytes + ", ""),
    "both warpgroups see the same keys": (_WIDE, "part * kBlockKv / 16)", "0)"),
    "a bit is its neighbour's": (_WIDE, ">> (first + j % 2) & 1", ">> first & 1"),
    "a query has another's lse": (
        _WIDE, "queries.known.lse_2[Scores::first_row() + Scores::row(i)]", "queries.known.lse_2[i]"
    ),
    "a query has another's delta": (
        _WIDE, "queries.known.delta[Scores::first_row() + Scores::row(i)]", "queries.known.delta[i]"
    ),
    "P of masked keys is kept": (
        _WIDE, "s.at(i, j) = !IsMasked || seen.at(i, j) ? p : 0.0f;", "s.at(i, j) = p;"
    ),
    "dS of masked keys is kept": (_WIDE, "dp.at(i, j) = !IsMasked || seen.at(i, j) ?", "dp.at(i, j) = true ?"),
    "S is read before it is there": (_WIDE, "tile::wait_for<1>(s);", "tile::wait_for<2>(s);"),
    "dP is read before it is there": (
        _WIDE, "tile::wait_for<1 + DvOfGroup::kOthers>(dp);", "tile::wait_for<2 + DvOfGroup::kOthers>(dp);"
    ),
    "dQ is read before it is there": (_WIDE, "tile::wait_for<1>(dq);", "tile::wait_for<2>(dq);"),
    "the second part of dQ is read before it is there": (
        _WIDE, "tile::wait_for<DkOfGroup::kOthers>(dq);", "tile::wait_for<1 + DkOfGroup::kOthers>(dq);"
    ),
    "dO is left while dV is made": (
        _WIDE,
        "    tile::wait_for<1>(dq);\n    dv.keep_in_place();\n"
        "    if constexpr (kLeavesDo) tile::arrive(own.d_o[do_stage(turn)].empty);  // else with Q\n",
        "    if constexpr (kLeavesDo) tile::arrive(own.d_o[do_stage(turn)].empty);\n"
        "    tile::wait_for<1>(dq);\n    dv.keep_in_place();\n",
    ),
    "dO is brought while the last one is read": (
        _RING, "      if constexpr (kLeavesDo) tile::await_empty(d_o, do_parity(turn));", "     "
    ),
    "Q is left while dK is made": (
        _WIDE,
        "      ptx::wgmma_wait<1>();\n      dk.keep_in_place();\n    }\n    tile::arrive(own.q[turn.stage].empty);\n",
        "      tile::arrive(own.q[turn.stage].empty);\n      ptx::wgmma_wait<1>();\n      dk.keep_in_place();\n    }\n",
    ),
    "dK is not waited for in the end": (_WIDE, "      ptx::wgmma_wait<0>();\n", ""),
    "Q is never left": (_WIDE, "    tile::arrive(own.q[turn.stage].empty);\n", ""),
    "K of a head is never left": (_RING, "  tile::arrive(own.k.empty);\n", ""),
    "K of a head is awaited in the wrong phase": (
        _RING, "arrive(own.k.empty);\n  tile::await_full(own.k, k_parity(kind));",
        "arrive(own.k.empty);\n  tile::await_full(own.k, 0);",
    ),
    "V is not awaited": (_RING, "  tile::await_full(own.v, v_parity(kind));\n", ""),
    "wide gradients start with those of the last tile": (
        _WIDE, "return;\n      dk.each(part, clear);\n      dv.each(part, clear);\n", "return;\n"
    ),
    "the next tile's keys are not awaited": (_WIDE, "      await_keys(kind);\n", ""),
    "keys are left before gradients go through their rooms": (
        _WIDE, "      write_gradients(params, own", "      leave_keys();\n      write_gradients(params, own"
    ),
    "dO is not awaited": (_WIDE, "  tile::await_full(board().d_o[do_stage(turn)], do_parity(turn));\n", ""),
    "helpers are a phase of dO ahead": (
        _RING, "      tile::await_empty(own.d_o[do_stage(turn)], do_parity(turn));\n", "      {}\n"
    ),
    "the one stage of dO has Q's phase": (_RING, "kDoStages == 1 ? turn.stage : turn.parity", "turn.parity"),
    "both warpgroups make the same half of dQ": (_WIDE, "(part * kDqSlices + slice) *", "slice *"),
    "the second part of dQ is the first": (_WIDE, "(part * kDqSlices + slice) *", "part * kDqSlices *"),
    "the second part of dQ is added to the first": (_ORDER, "at(i, first + j, 0)", "at(i, j, 0)"),
    "the second part of dQ is lost at the end": (
        _WIDE, "sum.add(dq, DqSlice::kColumnTiles);\n      write_gradients(", "{}\n      write_gradients("
    ),
    "sums of dQ are those of the next step": (
        _WIDE, "    const DqSum sum(note.dq_sum);\n", "    const DqSum sum(own.notes[turn.next().stage].dq_sum);\n"
    ),
    "both warpgroups sum the same columns": (
        _WIDE, "Columns(left, part * kOwn), Keys(right)", "Columns(left, 0), Keys(right)"
    ),
    "the second panel of a warpgroup is the first": (_WIDE, "part * kOwn + 1), Keys", "part * kOwn), Keys"),
    "of a panel that they share both have the first keys": (
        _WIDE, "Keys(right, part * kBlockKv / kConsumers)", "Keys(right)"
    ),
    "the panel that they share is the first": (_WIDE, "Columns(left, kLast), ", "Columns(left, 0), "),
    "what both share is written to the first keys": (
        _WIDE, "call(shared, kLast, part * kBlockKv / kConsumers)", "call(shared, kLast, 0)"
    ),
    "panels of both are written to one place": (_WIDE, "call(own[x], part * kOwn + x, 0)", "call(own[x], x, 0)"),
    "wide dK is not scaled": (_WIDE, "sums.scale(params.shape.softmax_scale);", ""),
    "dK is written over K that is read": (
        _WIDE, "  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);  // both have read K and V\n", ""
    ),
    "gradients are copied before they are there": (
        _WIDE, "dv, v_smem, part);\n  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);\n", "dv, v_smem, part);\n"
    ),
    "gradients of float32 lose a key": (_WIDE, "Sums::column(j) < to.num_rows ", "Sums::column(j) < to.num_rows - 1 "),
    "gradients of float32 lose a column": (
        _WIDE, "Sums::row(i) < to.num_columns,", "Sums::row(i) < to.num_columns - 1,"
    ),
    "gradients of float32 start with the tile before": (_WIDE, ".rows(work.first, work.last);\n  grad", ";\n  grad"),
    "half a warpgroup copies gradients": (
        _WIDE, "from, threadIdx.x - kGroup);", "from, threadIdx.x % kGroup);"
    ),
    "the last column of a gradient is not copied": (
        _ROOMS, "e < min(to.num_columns - column, kChunkOf<T>)", "e + 1 < min(to.num_columns - column, kChunkOf<T>)"
    ),
    "copied columns repeat": (
        _ROOMS, "      words.at[0] = words.at[0] >> 16 | words.at[1] << 48;\n", "      words.at[0] >>= 16;\n"
    ),
    "a place in a panel is not permuted": (_ROOMS, "chunk % in_panel ^ row", "chunk % in_panel ^ 0 * row"),
    "the last eight keys of P are not transposed": (_PANELS, "stmatrix_x2_trans(Panel", "stmatrix_x2(Panel"),
    "rows of scores start with the first": (_PANELS, "first_row + lane / 16 * 8", "lane / 16 * 8"),
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
    with planted(tmp_path / "kernels_cu", *EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
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
    with planted(tmp_path / "kernels_cu", *BACKWARD_EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
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
    with planted(tmp_path / "kernels_cu", *WIDE_EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        wide_gradients_are_right()


def test_the_wide_gradients_as_they_are_pass_the_same_guard() -> None:
    wide_gradients_are_right()


def test_every_edit_has_its_line() -> None:
    assert [name for edits in (EDITS, BACKWARD_EDITS, WIDE_EDITS) for name in without_their_line(edits)] == []
