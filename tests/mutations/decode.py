"""Planted faults in the kernels of KV caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from cache_calls import NEW, appended, assert_is_attention, attended, drawn, expected, paged, same_bits
from cuflash import DeviceSpec, sim
from cuflash.executors.sim import Simulator
from executors import SIM
from mutations.planting import Edit

SIGNS = (AssertionError, sim.SimulationError)  # exceptions with which a guard reports a fault
_CALL = drawn(NEW | {"rows": 3, "heads": 4, "window": (130, None), "sink": True}, (193, 2, 70))
_HOSTILE = [
    Simulator(sim.Schedule(seed=1, order=order, copies="late")) for order in ("last_warp", "first_warp", "random")
]


def decode_is_right() -> None:
    """Check that results in pages are within bounds, with equal bits alone, for fewer rows, and if copies land late."""
    call = replace(_CALL, counts=(3, 3, 2))
    o, lse, faults = attended(SIM, call, paged(call, 16, 0))
    assert_is_attention(call, o, lse, SIM.rounded)
    assert not faults
    for target in _HOSTILE:
        assert same_bits(attended(SIM, call, target=target)[:2], (o, lse))
    alone = attended(SIM, call.of([0]))
    assert same_bits(alone[:2], (o[:1], lse[:1]))


def steps_use_stages_in_turn() -> None:
    """Check that parts of many steps are within bounds, with equal bits for any stages and order."""
    call, device = drawn(NEW, (700, 690, 641), 700), replace(DeviceSpec.gpu("H100"), num_processors=2)
    o, lse, _ = attended(SIM, call, device=device, target=_HOSTILE[0])
    assert_is_attention(call, o, lse, SIM.rounded)
    for rows in ([0], [1, 0]):
        assert same_bits(attended(SIM, call.of(rows), device=device)[:2], [x[rows] for x in (o, lse)])
    call = drawn(NEW | {"rows": 20}, (700,), 700)  # two warps read the same keys
    o, lse, _ = attended(SIM, call, device=device)
    assert_is_attention(call, o, lse, SIM.rounded)
    for target in _HOSTILE:
        assert same_bits(attended(SIM, call, device=device, target=target)[:2], (o, lse))


def parts_are_merged_in_turn() -> None:
    """Check that more parts than a warp merges at once are within bounds, if the last ones have the largest scores."""
    call = drawn(NEW, (1200,), 1200)
    call.k[:, :, 1100:] *= 4
    o, lse, _ = attended(SIM, call, device=DeviceSpec.gpu("H100"))
    assert_is_attention(call, o, lse, SIM.rounded)


def pages_out_of_range_are_counted() -> None:
    """Check that page numbers and lengths out of range are counted, and that nothing is read for them."""
    k, v, table = paged(_CALL, 16, 0)
    for junk in (-1, len(k)):
        wrong = table.copy()
        wrong[0, 6] = junk
        o, lse, faults = attended(SIM, _CALL, (k, v, wrong))
        assert faults > 0 and np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
    assert attended(SIM, replace(_CALL, lengths=(301, 2, 70)), (k, v, table * 0))[2] > 0


def append_is_right() -> None:
    """Check that rows go to their pages, full or not, with one or several blocks; rows that do not fit are counted."""
    for dims, num_rows, counts in (((8, 3), 5, (5, 2, 0, 4)), ((256, 256), 26, (26, 10, 1, 4))):
        rows, k, v, lengths, faults = appended(SIM, np.float32, dims, counts, num_rows)
        pages, wanted = expected(rows, counts)
        assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1]) and lengths.tolist() == wanted
        assert not faults[0]
    for counts in ((0, 0, 0, 5), (0, 0, 3, 0)):  # beyond the capacity, and on a page that does not exist
        rows, k, _, lengths, faults = appended(SIM, np.float32, (8, 8), counts)
        pages, wanted = expected(rows, counts)
        assert faults[0] and np.array_equal(k, pages[0]) and lengths.tolist() == wanted


FAULTS = {
    decode_is_right: {
        "the last part to arrive waits for one more": Edit(
            "sm80/decode_epilogue.cuh", "arrives_last", "(arrivals, 1) == num_parts - 1", "(arrivals, 1) == num_parts"
        ),
        "the next launch finds parts that have arrived": Edit(
            "sm80/decode.cuh", "decode", "if (threadIdx.x == 0) tile::reset(arrivals);", ""
        ),
        "a step starts before its keys and values are there": Edit(
            "sm80/decode.cuh", "decode", "ptx::cp_async_wait<kNumStages - 1>()", "ptx::cp_async_wait<kNumStages>()"
        ),
        "parts of a unit's rows are copied as if they were whole": Edit(
            "sm80/cache_copy.cuh", "CacheCopy.copy_rows", "first_row <= 0 && last_row >= kUnit &&", ""
        ),
        "rows past the end are copied": Edit(
            "sm80/cache_copy.cuh", "CacheCopy.start_next", "? valid_.hi - position : 0", "? kUnit : 0"
        ),
        "rows before the window are copied": Edit(
            "sm80/cache_copy.cuh", "CacheCopy.start_next", "is_page ? valid_.lo - position :", "is_page ? 0 :"
        ),
        "a page is that of the step after": Edit(
            "sm80/cache_copy.cuh", "CacheCopy.start_next", "next_ += kBlockKv; look_up();", "next_ += kBlockKv;"
        ),
        "sums of parts are not brought to one maximum": Edit(
            "sm80/decode_epilogue.cuh", "RowSum.add", "(stats.at[1] * weight)", "(stats.at[1])"
        ),
        "o of parts is not brought to one maximum": Edit(
            "sm80/decode_epilogue.cuh", "RowSum.add", "+= of_summand * summands", "+= summands"
        ),
        "sixteen keys lie on the page of those before them": Edit(
            "sm80/cache_copy.cuh", "CacheCopy.advance", "number += pages;", ""
        ),
        "the first part is left out": Edit(
            "sm80/decode_epilogue.cuh", "RowSum.add", "if (i < num &&", "if (i > 0 && i < num &&"
        ),
        "a warp's rows overwrite those of the warp before": Edit(
            "sm80/decode_epilogue.cuh", "merge_warps", "(key_group() * 16 + row)", "row"
        ),
        "blocks without a part do not wait for the queries": Edit(
            "sm80/decode.cuh", "decode_cache", "num_parts) return ptx::cp_async_wait<0>(); if (!of.is_valid",
            "num_parts) return; if (!of.is_valid",
        ),
        "sums of warps are not brought to one maximum": Edit(
            "sm80/decode_softmax.cuh", "bring_to_one_maximum",
            "ptx::fma(RowStats::weight(of_row[group * kBlockQ].at[0], highest, softmax_scale_log2),", "ptx::fma(1.0f,",
        ),
        "rows are added before all warps have stored theirs": Edit(
            "sm80/decode_epilogue.cuh", "merge_warps", "return; __syncthreads();", "return;"
        ),
        "half of the warps are left out of a row": Edit(
            "sm80/decode_epilogue.cuh", "sum_of_pairs", "half = kKeyGroups / 2;", "half = 1;"
        ),
        "sums are not brought to a maximum that rose": Edit(
            "sm80/decode_softmax.cuh", "RowStats.update",
            "if (__any_sync(0xffffffffu, factor != 1)) o.scale_row(i, factor);", "",
        ),
        "the last query's keys count as seen by all": Edit(
            "attention/decode_work.cuh", "seen_by_all", "min(of.count - 1, params.right) + first + 1", "of.length"
        ),
        "the first query's window counts as seen by all": Edit(
            "attention/decode_work.cuh", "seen_by_all", "max(0, of.length - 1 - params.left)", "0"
        ),
        "parts depend on the batch": Edit(
            "attention/decode_work.cuh", "part_of", "params.max_parts).quotient",
            "params.max_parts).quotient + params.cache.batch - 1",
        ),
        "rows beyond a sequence's count see its keys": Edit(
            "attention/decode_work.cuh", "packed_row_mask", "&& number < of.count", ""
        ),
        "new tokens see those after them": Edit(
            "attention/decode_work.cuh", "packed_row_mask", "min(of.length - position, params.right + 1) + position",
            "of.length",
        ),
        "a sink is left out of o": Edit(
            "sm80/decode_epilogue.cuh", "RowSum.write", "factor *= merge_sink(", "merge_sink("
        ),
    },
    steps_use_stages_in_turn: {
        "a step is copied to the stage of the next one": Edit(
            "sm80/decode.cuh", "decode", "num_steps) copy.start_next(stage); ptx::cp_async_commit(); stage =",
            "num_steps) copy.start_next(stage + 1 == kNumStages ? 0 : stage + 1); ptx::cp_async_commit(); stage =",
        ),
        "a step is copied over the one that is read": Edit(
            "sm80/decode.cuh", "decode", "sync_key_group(); if (step + kNumStages", "if (step + kNumStages"
        ),
        "warps that share keys do not wait for each other": Edit(
            "sm80/decode_tiles.cuh", "sync_key_group", "if constexpr (kRowGroups == 1)", "if constexpr (true)"
        ),
        "warps that share no keys count as those that do": Edit(
            "sm80/decode_tiles.cuh", "sync_key_group", "(1 + key_group(),", "(1,"
        ),
        "sums of pairs of warps are not brought to one maximum": Edit(
            "sm80/decode_softmax.cuh", "bring_to_one_maximum", "ptx::fma(o.at(i, j), factor, 0.0f)", "o.at(i, j)"
        ),
        "warps add tiles before they are stored": Edit(
            "sm80/decode_epilogue.cuh", "add_pairs", "__syncthreads(); if (own_group < half)", "if (own_group < half)"
        ),
        "warps overwrite tiles before they are added": Edit(
            "sm80/decode_epilogue.cuh", "add_pairs", "Output::kColumnTiles); __syncthreads();", "Output::kColumnTiles);"
        ),
        "the last stage is left out": Edit(
            "sm80/decode.cuh", "decode", "+ 1 == kNumStages ? 0 : stage + 1;", "+ 1 == kNumStages - 1 ? 0 : stage + 1;"
        ),
    },
    parts_are_merged_in_turn: {
        "parts that were merged before keep their maximum": Edit(
            "sm80/decode_epilogue.cuh", "RowSum.add", "scale(RowStats::weight(max, highest, softmax_scale_log2));", ""
        ),
        "only the first parts are merged": Edit(
            "sm80/decode_epilogue.cuh", "RowSum.add", "first < num_summands; first", "first < 1; first"
        ),
    },
    pages_out_of_range_are_counted: {
        "a negative page is read": Edit(
            "sm80/cache_copy.cuh", "CacheCopy.start_next", "page >= 0 && page < cache_.", "page < cache_."
        ),
        "a page beyond the last is read": Edit(
            "sm80/cache_copy.cuh", "CacheCopy.start_next", "page >= 0 && page < cache_.num_pages", "page >= 0"
        ),
        "a length beyond the capacity is not told": Edit(
            "attention/decode_work.cuh", "sequence", "length == clamped && count ==", "count =="
        ),
    },
    append_is_right: {
        "the next append finds blocks that have arrived": Edit(
            "attention/append_work.cuh", "set_length", "tile::reset(params.arrivals + sequence);", ""
        ),
        "the first block to read a length sets the next one": Edit(
            "attention/append_work.cuh", "set_length", ", 1) != params.blocks_per_sequence - 1", ", 1) != 0"
        ),
        "rows beyond the capacity are written": Edit(
            "attention/append_work.cuh", "new_rows", "min(count, cache.capacity - length)", "count"
        ),
        "rows that have no room are not told": Edit(
            "attention/append_work.cuh", "new_rows", "|| count != num_rows", ""
        ),
        "a page that is none is not told": Edit(
            "cache/append.cu", "copy_rows", "if (start.remainder == 0) ptx::fetch_add", "if (false) ptx::fetch_add"
        ),
        "odd rows are moved as whole chunks": Edit(
            "cache/append.cu", "cache_append", "has_aligned_units(params.k,", "true || has_aligned_units(params.k,"
        ),
        "values are taken for keys": Edit(
            "cache/append.cu", "Place", "is_value = number >= of_keys;", "is_value = number > of_keys;"
        ),
        "the row that is read first is written to all places": Edit(
            "cache/append.cu", "copy_rows", "if (row != start.quotient || number != start.remainder)", "if (false)"
        ),
        "a position is that of its first page": Edit(
            "attention/append_work.cuh", "page_of", "position / cache.page_size", "0"
        ),
    },
}
