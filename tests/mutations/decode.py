"""Faults in the kernels of KV caches."""

from __future__ import annotations

from mutations.decode_guards import append_is_right, decode_is_right, pages_out_of_range_are_counted
from mutations.planting import Edit

FAULTS = {
    decode_is_right: {
        "the last part to arrive waits for one more": Edit(
            "sm80/decode.cu", "arrives_last", "ptx::fetch_add(arrivals, 1) == num_parts - 1",
            "ptx::fetch_add(arrivals, 1) == num_parts",
        ),
        "the next launch finds parts that have arrived": Edit(
            "sm80/decode.cu", "sm80_decode", "if (threadIdx.x == 0) *arrivals = 0;", ""
        ),
        "a step starts before its keys and values are there": Edit(
            "sm80/decode.cu", "sm80_decode", "ptx::cp_async_wait<kNumStages - 2>();",
            "ptx::cp_async_wait<kNumStages - 1>();",
        ),
        "a step's place is filled before others have read it": Edit(
            "sm80/decode.cu", "sm80_decode", "ptx::cp_async_wait<kNumStages - 2>(); __syncthreads();",
            "ptx::cp_async_wait<kNumStages - 2>(); __syncwarp();",
        ),
        "rows past the end are copied": Edit(
            "sm80/decode.cu", "CacheCopy.start_next", "position >= first_key_ && position < stop_",
            "position >= first_key_",
        ),
        "rows before the window are copied": Edit(
            "sm80/decode.cu", "CacheCopy.start_next", "position >= first_key_ && position < stop_", "position < stop_"
        ),
        "a page is that of the step after": Edit(
            "sm80/decode.cu", "CacheCopy.start_next", "next_ += kBlockKv; look_up();", "next_ += kBlockKv;"
        ),
        "sums of parts are not brought to one maximum": Edit(
            "sm80/decode.cu", "merge_parts", "sum += of.at[1] * weight;", "sum += of.at[1];"
        ),
        "sums of warps are not brought to one maximum": Edit(
            "sm80/decode.cu", "merge_warps",
            "o.scale_row(i, RowStats::weight(stats.max[i], highest, softmax_scale_log2));", "",
        ),
        "parts depend on the batch": Edit(
            "attention/decode_work.cuh", "part_of", "max(1, (num_steps + params.max_parts - 1) / params.max_parts)",
            "max(1, (num_steps + params.max_parts - 1) / params.max_parts + params.cache.batch - 1)",
        ),
        "rows beyond a sequence's count see its keys": Edit(
            "attention/decode_work.cuh", "packed_row_mask", "&& number < of.count", ""
        ),
        "new tokens see those after them": Edit(
            "attention/decode_work.cuh", "packed_row_mask", "min(of.length - position, params.right + 1) + position",
            "of.length",
        ),
        "a sink is left out of o": Edit("sm80/decode.cu", "finish_row", "factor *= merge_sink(", "merge_sink("),
    },
    pages_out_of_range_are_counted: {
        "a negative page is read": Edit(
            "sm80/decode.cu", "CacheCopy.start_next", "page >= 0 && page < cache_.num_pages", "page < cache_.num_pages"
        ),
        "a page beyond the last is read": Edit(
            "sm80/decode.cu", "CacheCopy.start_next", "page >= 0 && page < cache_.num_pages", "page >= 0"
        ),
        "a length beyond the capacity is not told": Edit(
            "attention/decode_work.cuh", "sequence", "length == clamped && count == clamped_count",
            "count == clamped_count",
        ),
    },
    append_is_right: {
        "the next append finds blocks that have arrived": Edit(
            "cache/append.cu", "cache_append", "params.arrivals[sequence] = 0;", ""
        ),
        "the first block to read a length sets the next one": Edit(
            "cache/append.cu", "cache_append",
            "ptx::fetch_add(params.arrivals + sequence, 1) == params.blocks_per_sequence - 1",
            "ptx::fetch_add(params.arrivals + sequence, 1) == 0",
        ),
        "rows beyond the capacity are written": Edit(
            "cache/append.cu", "cache_append", "min(count, cache.capacity - length)", "count"
        ),
        "rows that have no room are not told": Edit("cache/append.cu", "cache_append", "|| count != num_rows", ""),
        "a page that is none is not told": Edit(
            "cache/append.cu", "copy_rows", "if (counts_faults && part == 0 && head == 0)", "if (false)"
        ),
        "odd rows are moved as whole chunks": Edit(
            "cache/append.cu", "append",
            "if (has_aligned_units(from, num_columns) && has_aligned_units(to, num_columns))", "if (num_columns > 0)",
        ),
        "a position is that of its first page": Edit("cache/append.cu", "page_of", "position / cache.page_size", "0"),
    },
}
