"""Faults in Hopper's gradients up to 128 columns, and where they bring queries and add dQ up."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.sm90_guards import (
    finished_gradients_are_right,
    gradients_are_right,
    gradients_in_two_walks_are_right,
    gradients_of_lists_are_right,
    wide_gradients_are_right,
)

FAULTS = {
    gradients_are_right: {
        "rooms are not fenced": Edit("attention/query_ring.cuh", "share_work", "ptx::mbarrier_init_fence();", ""),
        "queries past a step are alive": Edit(
            "attention/query_ring.cuh", "has_dead_rows",
            "if (step.stop < min(step.start",
            "if (false && step.stop < min(step.start",
        ),
        "queries without a key are alive": Edit(
            "attention/query_ring.cuh", "has_dead_rows",
            "return first.lo >= first.hi || last.lo >= last.hi;",
            "return false;",
        ),
        "K is kept where no query sees it": Edit(
            "attention/query_ring.cuh", "seen_keys",
            "max(work.first, interval(params, work.place, 0).lo), min(work.last,",
            "work.first, max(work.last,",
        ),
        "every step is whole": Edit(
            "attention/query_ring.cuh", "produce", "own.parities | (is_whole ?", "own.parities | (true ?"
        ),
        "a step's keys are all seen": Edit(
            "attention/query_ring.cuh", "bits_of", "return ptx::bits_from(lo) & ~ptx::bits_from(hi);", "return ~0u;"
        ),
        "a band starts a query late": Edit(
            "attention/query_ring.cuh", "know_keys", "(start - params.work.upper)", "(start + 1 - params.work.upper)"
        ),
        "a band ends a query early": Edit(
            "attention/query_ring.cuh", "know_keys", "(start - params.work.lower + 1)", "(start - params.work.lower)"
        ),
        "queries past a step see keys": Edit(
            "attention/query_ring.cuh", "know_keys", "min(last + key, step.stop - step.start) : 0", "last + key : 0"
        ),
        "bits of queries stand for keys": Edit(
            "attention/query_ring.cuh", "know_seen", "tile::transpose_in_warp(bits)", "bits"
        ),
        "a key's first query is searched for among rows that start": Edit(
            "attention/query_ring.cuh", "find_reach", "(end % 2 == 0 ? keys.hi : keys.lo) <= key", "keys.lo <= key"
        ),
        "the last row is not searched": Edit(
            "attention/query_ring.cuh", "find_reach", "row < last && (end", "row < last - 1 && (end"
        ),
        "a head's work is read before it is written": Edit(
            "attention/query_ring.cuh", "produce", "__syncwarp(); HeadWork& head_work", "HeadWork& head_work"
        ),
        "K comes while the last one is read": Edit(
            "attention/query_ring.cuh", "help", "tile::await_empty(own.k, k_parity(note.kind));", ""
        ),
        "P of masked keys is kept": Edit(
            "sm90/backward.cu", "make_all", "if (!step.is_plain()) mend<true>(s, step);", ""
        ),
        "bits of a list are all 1": Edit("attention/query_ring.cuh", "seen_bits", "bits &= listed;", ""),
        "a warp has another's bits": Edit(
            "sm90/backward.cu", "SeenByThread.SeenByThread", "seen[Scores::first_row()]", "seen[ptx::lane() / 4]"
        ),
        "a thread has another's bits": Edit(
            "sm90/backward.cu", "SeenByThread.SeenByThread", "[x] | all) >> step.first_query;", "[x] | all);"
        ),
        "a query has its neighbour's delta": Edit(
            "sm90/backward.cu", "Asked.delta",
            "return queries.known.delta + first_query;",
            "return queries.known.delta + (first_query ^ 2);",
        ),
        "lse is that of the step before": Edit(
            "sm90/backward.cu", "consume",
            "OfQueries(own.queries[next.stage].known",
            "OfQueries(own.queries[turn.stage].known",
        ),
        "lse of 128 queries is that of the first step": Edit(
            "sm90/backward.cu", "consume", "lse_2(step.lse_2())", "lse_2(own.queries[0].known.lse_2 + first_query)"
        ),
        "delta is that of the step before": Edit(
            "sm90/backward.cu", "consume",
            "make_p(next_s, delta, next_lse_2, next);",
            "make_p(next_s, delta, next_lse_2, turn);",
        ),
        "P is made before the scores are there": Edit("sm90/backward.cu", "consume", "tile::wait_for<1>(next_s);", ""),
        "minima are left out where an lse is large": Edit(
            "sm90/backward_statistics.cu", "know", "fabsf(lse_2) > kLargestLse2", "false"
        ),
        "lse of the first rows count alone": Edit(
            "sm90/backward_statistics.cu", "know", "is_large |= is_live", "is_large |= first == 0 && is_live"
        ),
        "queries without a key count as others": Edit(
            "sm90/backward_statistics.cu", "know", "known.has_dead = is_dead;", "known.has_dead = 0;"
        ),
        "queries without a key are copied": Edit(
            "sm90/backward_statistics.cu", "know", "__ballot_sync(0xffffffffu, is_live)", "0xffffffffu"
        ),
        "delta lies a row further": Edit(
            "sm90/backward_statistics.cu", "sm90_backward_statistics",
            "known.delta[row - work.first]",
            "known.delta[(row - work.first) ^ 1]",
        ),
        "lse is in base e": Edit(
            "sm90/backward_statistics.cu", "know", "base_2(lse.at(work.first + row, 0))", "lse.at(work.first + row, 0)"
        ),
        "what is known is the first tile's": Edit(
            "attention/query_ring.cuh", "produce", "head_work.known[number]", "head_work.known[0]"
        ),
        "what is known is not waited for": Edit(
            "attention/query_ring.cuh", "produce", "kind & Note::kCopiesQ, sizeof known", "kind & Note::kCopiesQ"
        ),
        "a large lse hides keys": Edit(
            "sm90/backward.cu", "SeenByThread.SeenByThread", "all = step.kind & Note::kMasked ? 0 : ~0u;", "all = 0;"
        ),
        "a mask hides nothing": Edit(
            "sm90/backward.cu", "SeenByThread.SeenByThread", "all = step.kind & Note::kMasked ? 0 : ~0u;", "all = ~0u;"
        ),
        "dS is multiplied before it is there": Edit(
            "sm90/backward.cu", "start_dq", "ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);", ""
        ),
        "dS is not fenced": Edit("sm90/backward.cu", "start_dq", "ptx::fence_proxy_async();", ""),
        "dS is written while the other warpgroup's dQ is made": Edit(
            "sm90/backward.cu", "await_ds",
            "if constexpr (kMakesDq) ptx::bar_sync(kDsIsRead + part, kConsumers * kGroup);",
            "",
        ),
        "dQ is written while the last one is added": Edit(
            "attention/query_ring.cuh", "add_up", "leave_dq<0>(1, is_end);", "leave_dq<2>(1, is_end);"
        ),
        "dQ's first part is written while the last one is added": Edit(
            "attention/query_ring.cuh", "add_up", "leave_dq<1>(0, is_end);", "leave_dq<2>(0, is_end);"
        ),
        "dQ is added before it is there": Edit(
            "attention/query_ring.cuh", "add_up",
            "ptx::bar_sync(kDqIsThere + part, kGroup + 32); leave_sums(sum,",
            "leave_sums(sum,",
        ),
        "dQ is not fenced": Edit("attention/query_ring.cuh", "leave_sums", "ptx::fence_proxy_async();", ""),
        "both parts of dQ are added to the first": Edit(
            "attention/query_ring.cuh", "leave_sums", "= sum + part * kDqPart / 4;", "= sum;"
        ),
        "both parts of dQ are the first": Edit(
            "attention/query_ring.cuh", "leave_sums", "bulk_add(own, dq_address(part)", "bulk_add(own, dq_address(0)"
        ),
        "a note is read before it is there": Edit(
            "attention/query_ring.cuh", "help",
            "ptx::mbarrier_wait(ptx::shared_address(&own.noted[turn.stage]), turn.parity);",
            "",
        ),
        "a head takes the place of one that helpers work on": Edit(
            "attention/query_ring.cuh", "produce", "has_stepped ? (slot + 1) % kWorks", "has_stepped ? (slot + 1) % 2"
        ),
        "a head's queries have the mask of the one before": Edit(
            "attention/query_ring.cuh", "produce", "note.work = slot;", "note.work = 0;"
        ),
        "both warpgroups make one part of dQ": Edit(
            "sm90/backward.cu", "start_dq", "kRowParts == 1 ? part * KPart::kBytes : 0", "0"
        ),
        "Q is left before dK is made": Edit(
            "sm90/backward.cu", "consume",
            "tile::wait_for<1>(dv);",
            "tile::arrive(own.q[turn.stage].empty); tile::wait_for<1>(dv);",
        ),
        "dO is left before dV is made": Edit(
            "sm90/backward.cu", "consume", "tile::wait_for<1>(dv);", "tile::wait_for<2>(dv);"
        ),
        "the last part of dQ is lost": Edit(
            "sm90/backward.cu", "consume", "else if constexpr (kMakesDq) hand_over(dq, own_dq, part);", ""
        ),
        "who comes first adds": Edit(
            "attention/query_ring.cuh", "add_up", "is_first || (kFinishesInTurn", "false || (kFinishesInTurn"
        ),
        "who comes second stores too": Edit(
            "attention/query_ring.cuh", "visits_first",
            "return before == 0;",
            "return before <= 1 || before == kDqIsStored + 1;",
        ),
        "nobody tells that sums are stored": Edit(
            "attention/query_ring.cuh", "add_up", "tile::tell(visits, attention::kDqIsStored);", ""
        ),
        "delta of a whole tile misses a chunk": Edit(
            "sm90/backward_statistics.cu", "each_delta_of_whole",
            "for (int c = 0; c < kOwn; ++c)\n#pragma unroll\nfor",
            "for (int c = 1; c < kOwn; ++c)\n#pragma unroll\nfor",
        ),
        "delta of a whole tile misses dlse": Edit(
            "sm90/backward_statistics.cu", "each_delta_of_whole", "sum - dlse.at(own, 0)", "sum"
        ),
        "visits are counted from anywhere": Edit("sm90/backward_statistics.cu", "know", "known.visits.count = 0;", ""),
        "what nobody stored is dQ": Edit(
            "sm90/convert_dq.cu", "sm90_convert_dq", "if (kFirstStoresDq && known_queries", "if (false && known_queries"
        ),
        "results are those of the next tile": Edit(
            "sm90/backward.cu", "consume", "own.notes[turn.stage].work", "own.notes[next.stage].work"
        ),
        "gradients start with those of the last tile": Edit(
            "sm90/backward.cu", "consume", "dk.fill(0); dv.fill(0); await_keys(kind);", "await_keys(kind);"
        ),
        "the next tile's keys are not awaited": Edit("sm90/backward.cu", "consume", "await_keys(kind); }", "}"),
        "keys are left before dQ is made": Edit(
            "sm90/backward.cu", "consume",
            "tile::wait_for<1>(dv);",
            "if (is_of_next_tile(kind)) leave_keys(); tile::wait_for<1>(dv);",
        ),
        "K of another head is let in before dQ is made": Edit(
            "sm90/backward.cu", "consume",
            "if constexpr (kDpIsAhead) { kind = await_step(next);",
            "if constexpr (kDpIsAhead) { kind = await_step(next); await_other_k(kind);",
        ),
        "keys are never left": Edit("sm90/backward.cu", "consume", "if (is_of_next_tile(kind)) leave_keys();", ""),
        "K of every tile has one phase": Edit(
            "attention/query_ring.cuh", "produce", "own.parities ^= Note::kParityOfK | (", "own.parities ^= 0 | ("
        ),
        "V of every tile has one phase": Edit(
            "attention/query_ring.cuh", "produce", "(has_k ? 0 : Note::kParityOfV)", "0"
        ),
        "a tile that nobody works on takes a place": Edit(
            "attention/query_ring.cuh", "produce", "has_stepped = false; }", "}"
        ),
        "a tile takes the place of the one before": Edit(
            "attention/query_ring.cuh", "produce", "if (has_stepped) slot = (slot + 1)", "if (false) slot = (slot + 1)"
        ),
        "dK of keys that no query sees is what stands there": Edit(
            "attention/query_ring.cuh", "produce",
            "write_nothing(params, params.dk, own.works[slot].tile, shape.head_dim);",
            "",
        ),
        "the count of tiles starts anywhere": Edit(
            "sm90/backward_statistics.cu", "sm90_backward_statistics", "reset_numbers(params);", ""
        ),
        "dK is not scaled": Edit("sm90/backward.cu", "write_gradients", "dk.scale(params.shape.softmax_scale);", ""),
        "one head gives dK and dV": Edit("attention/query_ring.cuh", "produce", "head < shape.group_size", "head < 1"),
        "sums of dQ go to the first tile": Edit(
            "attention/query_ring.cuh", "produce", "head_work.dq_sum + number * params", "head_work.dq_sum + 0 * params"
        ),
        "dQ is not scaled": Edit("sm90/convert_dq.cu", "sm90_convert_dq", "dq.scale(shape.softmax_scale);", ""),
    },
    wide_gradients_are_right: {
        "dO is brought while the last one is read": Edit(
            "attention/query_ring.cuh", "produce",
            "if constexpr (kLeavesDo) tile::await_empty(d_o, do_parity(turn));",
            "",
        ),
        "K of a head is never left": Edit(
            "attention/query_ring.cuh", "await_other_k", "tile::arrive(own.k.empty);", ""
        ),
        "K of a head is awaited in the wrong phase": Edit(
            "attention/query_ring.cuh", "await_other_k",
            "tile::await_full(own.k, k_parity(kind));",
            "tile::await_full(own.k, 0);",
        ),
        "V is not awaited": Edit(
            "attention/query_ring.cuh", "await_keys", "tile::await_full(own.v, v_parity(kind));", ""
        ),
        "helpers are a phase of dO ahead": Edit(
            "attention/query_ring.cuh", "help", "tile::await_empty(own.d_o[do_stage(turn)], do_parity(turn));", "{}"
        ),
        "the one stage of dO has Q's phase": Edit(
            "attention/query_ring.cuh", "do_parity", "kDoStages == 1 ? turn.stage : turn.parity", "turn.parity"
        ),
    },
    finished_gradients_are_right: {
        "who adds waits for tiles that store nothing": Edit(
            "attention/dq_turns.cuh", "dq_turn", "min(from_last, last - first_stored + 1)", "(from_last + 1)"
        ),
        "who finishes waits for itself too": Edit(
            "attention/dq_turns.cuh", "dq_turn",
            "counts, 0, 0, last, false, true}",
            "counts, 0, 0, last + 1, false, true}",
        ),
        "all tiles have the same bit": Edit(
            "attention/dq_turns.cuh", "dq_turn", "1 << min(from_last, 31), awaited", "1, awaited"
        ),
        "part of a tile of queries counts as stored": Edit(
            "attention/dq_turns.cuh", "dq_turn", "(work.last - upper) / Height * Height", "work.last - upper + 1"
        ),
        "the step after those that store stores too": Edit(
            "attention/dq_turns.cuh", "DqTurn.at", "stores = false;", ""
        ),
        "who adds first stores": Edit(
            "attention/dq_turns.cuh", "dq_turn",
            "counts, 0, 0, awaited, false, false}",
            "counts, 0, 0, awaited, true, false}",
        ),
        "sums of the first keys' own queries are anything": Edit(
            "attention/dq_turns.cuh", "stores_dq",
            "interval(params, queries.place, queries.last - 1).hi > Width",
            "true",
        ),
        "sums are those of the place before": Edit(
            "attention/dq_turns.cuh", "dq_counts", "+ place_number(params.shape, place);", "+ 0;"
        ),
        "nobody tells that a tile is done": Edit(
            "attention/dq_turns.cuh", "DqTurn.at", "is_last && !finishes}", "false}"
        ),
        "sums are taken before they are brought": Edit(
            "attention/query_ring.cuh", "bring_sums",
            "ptx::mbarrier_wait(ptx::shared_address(&own.dq_taken), parity);",
            "",
        ),
        "all sums are awaited in one phase": Edit("attention/query_ring.cuh", "add_up", "parity ^= 1;", ""),
        "half of the sums are brought": Edit(
            "attention/query_ring.cuh", "bring_sums",
            "ptx::bulk_load(dq_address(0), sum, kConsumers * kDqPart,",
            "ptx::bulk_load(dq_address(0), sum, kDqPart,",
        ),
        "sums are stored where they should be added": Edit(
            "attention/query_ring.cuh", "add_up", "kFinishesInTurn && kind & Note::kStoresDq", "kFinishesInTurn"
        ),
        "sums are added where they should be stored": Edit(
            "attention/query_ring.cuh", "add_up", "kFinishesInTurn && kind & Note::kStoresDq", "false"
        ),
        "the room is left before it is read": Edit(
            "sm90/backward.cu", "finish",
            "softmax_scale);",
            "softmax_scale); ptx::bar_arrive(kDqIsThere + part, kGroup + 32);",
        ),
        "dQ is that of the step after": Edit(
            "sm90/backward.cu", "consume",
            "finish(params, dq, own_dq, own.notes[turn.stage], part,",
            "finish(params, dq, own_dq, own.notes[next.stage], part,",
        ),
        "dQ is not scaled": Edit(
            "sm90/backward.cu", "finish",
            "tile::store_whole(rows, dq, first, scale)",
            "tile::store_whole(rows, dq, first, 1.0f)",
        ),
        "steps that finish are walked as others": Edit(
            "attention/query_ring.cuh", "produce", "(head_work.dq.finishes ? Note::kFinishesDq : 0)", "0"
        ),
        "blocks have their first tiles by their own numbers": Edit(
            "attention/query_ring.cuh", "next_tile",
            "if constexpr (kFinishesInTurn) number = attention::number_in_order",
            "if (false) number = attention::number_in_order",
        ),
        "the last places' sums are not set to 0": Edit(
            "sm90/backward_statistics.cu", "sm90_backward_statistics",
            "if (!kFirstStoresDq && !stores_dq<kBlockKv>(params, work)) clear_dq_sum(params, work);",
            "",
        ),
    },
    gradients_of_lists_are_right: {
        "blocks that are cut count as whole": Edit(
            "attention/dq_visits.cuh", "num_visits",
            "num += !is_cut || (lo < min(key + Width, last) && hi > key);",
            "++num;",
        ),
        "a tile whose last key is the first of a query counts not": Edit(
            "attention/dq_visits.cuh", "num_visits", "lo < min(key + Width, last)", "lo + 1 < min(key + Width, last)"
        ),
        "a tile whose first key is the last of a query counts not": Edit(
            "attention/dq_visits.cuh", "num_visits", "&& hi > key)", "&& hi > key + 1)"
        ),
        "a tile past the last key of all counts": Edit(
            "attention/dq_visits.cuh", "num_visits", "&& hi > key)", "&& hi >= key)"
        ),
        "a tile before the first key of all counts": Edit(
            "attention/dq_visits.cuh", "num_visits", "lo < min(key + Width, last)", "lo <= min(key + Width, last)"
        ),
        "a block counts as one tile": Edit(
            "attention/dq_visits.cuh", "num_visits", "key < last; key += Width)", "key < last; key += list.block_kv)"
        ),
        "keys past the end count": Edit(
            "attention/dq_visits.cuh", "num_visits",
            "min(first + list.block_kv, params.shape.seqlen_kv);",
            "first + list.block_kv;",
        ),
        "all rows have the visits of the first": Edit(
            "attention/dq_visits.cuh", "num_visits", "+ work.first / list.block_q;", ";"
        ),
        "all heads have the visits of the first": Edit(
            "attention/dq_visits.cuh", "num_visits",
            "list_matrix(list, work.place) * list.num_q_blocks",
            "0 * list.num_q_blocks",
        ),
        "dQ that nobody makes is what stands there": Edit(
            "attention/dq_visits.cuh", "expect_visits",
            "tile::clear(matrix<Element>(params.dq,",
            "if (false) tile::clear(matrix<Element>(params.dq,",
        ),
        "who comes before the last finishes": Edit(
            "attention/dq_visits.cuh", "DqVisit.of",
            "const bool is_last = before == num - 1;",
            "const bool is_last = before == num - 2;",
        ),
        "nobody finishes": Edit(
            "attention/dq_visits.cuh", "DqVisit.of",
            "const bool is_last = before == num - 1;",
            "const bool is_last = false;",
        ),
        "who comes alone adds sums": Edit(
            "attention/query_ring.cuh", "add_up_or_finish",
            "is_first ? Finish::kAlone : Finish::kWithSums;",
            "Finish::kWithSums;",
        ),
        "sums of others are left out": Edit(
            "attention/query_ring.cuh", "add_up_or_finish",
            "is_first ? Finish::kAlone : Finish::kWithSums;",
            "Finish::kAlone;",
        ),
        "who comes first adds": Edit(
            "attention/query_ring.cuh", "add_up_or_finish",
            "leave_sums(note.dq_sum, part, is_first);",
            "leave_sums(note.dq_sum, part, false);",
        ),
        "who comes second stores": Edit(
            "attention/query_ring.cuh", "add_up_or_finish",
            "leave_sums(note.dq_sum, part, is_first);",
            "leave_sums(note.dq_sum, part, visit.before <= 1);",
        ),
        "who finishes adds too": Edit(
            "attention/query_ring.cuh", "add_up_or_finish", "if (!is_last) leave_sums(", "leave_sums("
        ),
        "sums are brought while the room is read": Edit(
            "attention/query_ring.cuh", "add_up_or_finish", "ptx::bulk_wait_read<0>(); __syncwarp();", ""
        ),
        "all sums are awaited in one phase": Edit("attention/query_ring.cuh", "add_up_or_finish", "parity ^= 1;", ""),
        "nobody tells that a visit is done": Edit(
            "attention/query_ring.cuh", "add_up_or_finish", "tile::tell(untold, attention::kVisitIsDone);", ""
        ),
        "the last addition is not told": Edit("attention/query_ring.cuh", "add_up_or_finish", "} tell();", "}"),
        "what is told may not be made yet": Edit(
            "attention/query_ring.cuh", "add_up_or_finish",
            "tile::await_copies(); tile::tell(untold",
            "tile::tell(untold",
        ),
        "the queries' room is left before they are asked": Edit(
            "attention/query_ring.cuh", "add_up_or_finish",
            "const Turn next = turn.next();",
            "tile::arrive(own.q[turn.stage].empty); const Turn next = turn.next();",
        ),
        "dQ is added before it is there": Edit(
            "attention/query_ring.cuh", "add_up_or_finish", "ptx::bar_sync(kDqIsThere + part, kGroup + 32);", ""
        ),
        "steps that hide nothing are not noted": Edit(
            "attention/query_ring.cuh", "produce", "if (kLastFinishesDq || kind & (", "if (kind & ("
        ),
        "whether a step finishes is asked too early": Edit(
            "sm90/backward.cu", "consume", "await_room(part); how = own.finish;", "how = own.finish; await_room(part);"
        ),
        "queries past the step's last one are left": Edit(
            "sm90/backward.cu", "finish",
            "attention::query_tile_end<Listed>(params, note.step.start, kBlockQ)",
            "note.step.stop",
        ),
        "dQ is not scaled": Edit(
            "sm90/backward.cu", "finish",
            "tile::store_whole(rows, dq, first, scale)",
            "tile::store_whole(rows, dq, first, 1.0f)",
        ),
    },
    gradients_in_two_walks_are_right: {
        "Q's room awaits who adds up": Edit(
            "attention/query_ring.cuh", "share_work", "(kAddsDqUp && has_notes)", "has_notes"
        ),
        "rows past a step are copied": Edit(
            "attention/query_ring.cuh", "copy_queries", "(kIsWide || row < note.step.stop - note.step.start) &&", ""
        ),
        "dK is that of the last step but one": Edit("sm90/backward.cu", "consume", "tile::wait_for<0>(dk);", ""),
    },
}  # fmt: skip
