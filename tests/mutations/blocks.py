"""Faults between thread blocks, which do not show where blocks run one after another."""

from __future__ import annotations

from mutations.block_guards import (
    gradients_in_turns_are_right, lengths_are_set_after_they_are_read, parts_are_merged_after_they_are_written,
    sums_of_blocks_are_right,
)  # fmt: skip
from mutations.planting import Edit

FAULTS = {
    gradients_in_turns_are_right: {
        "who tells that a tile is done releases nothing": Edit(
            "tile/counter.cuh", "signal", "ptx::red_add_release(counter, number);", "ptx::fetch_add(counter, number);"
        ),
        "a tile is done before its copies are made": Edit(
            "sm90/dq_semaphore.cuh", "signal_dq_semaphore", "tile::wait_bulk_copies();", ""
        ),
        "who finishes does not wait": Edit(
            "sm90/dq_semaphore.cuh", "wait_dq_semaphore",
            "tile::wait_at_least(&op.semaphore->done, op.awaited_bits_or_count);", ""
        ),
        "a semaphore is reset too soon": Edit(
            "sm90/dq_semaphore.cuh", "wait_dq_semaphore",
            "tile::wait_at_least(&op.semaphore->done, op.awaited_bits_or_count); tile::reset_counter(op.semaphore);",
            "tile::reset_counter(op.semaphore); tile::wait_at_least(&op.semaphore->done, op.awaited_bits_or_count);",
        ),
        "who adds does not wait for who stores": Edit(
            "sm90/dq_semaphore.cuh", "wait_dq_semaphore",
            "tile::wait_for_bits(&op.semaphore->stored, op.awaited_bits_or_count);", ""
        ),
        "the counter of tiles is reset before all have asked": Edit(
            "attention/tile_scheduler.cuh", "next_tile_number_in_order",
            "fetched + 1 - num_tiles == static_cast<int>(gridDim.x)",
            "fetched + 2 - num_tiles == static_cast<int>(gridDim.x)",
        ),
    },
    sums_of_blocks_are_right: {
        "blocks add to dQ by loads and stores": Edit(
            "tile/copy.cuh", "add", "ptx::red_add(data, from.at(row, column));", "*data += from.at(row, column);"
        ),
        "warps add to sums of all blocks by loads and stores": Edit(
            "tile/global_sum.cuh", "add_of_warp",
            "if (ptx::lane() == 0) add(address, x);", "if (ptx::lane() == 0) *address += x;",
        ),
    },
    parts_are_merged_after_they_are_written: {
        "a part is counted before others see it": Edit(
            "sm80/decode_epilogue.cuh", "arrives_last", "ptx::fetch_add_acq_rel(arrivals, 1)",
            "[&] { const int before = ptx::fetch_add(arrivals, 1); __threadfence(); return before; }()",
        ),
        "parts are read before it is known that all are written": Edit(
            "sm80/decode_epilogue.cuh", "arrives_last", "ptx::fetch_add_acq_rel(arrivals, 1)",
            "[&] { __threadfence(); return ptx::fetch_add(arrivals, 1); }()",
        ),
        "a part is counted before all warps have written theirs": Edit(
            "sm80/decode_epilogue.cuh", "arrives_last",
            "__syncthreads(); if (threadIdx.x == 0)", "if (threadIdx.x == 0)",
        ),
        "each part sets the count of parts back": Edit(
            "sm80/decode.cuh", "decode", "if (!arrives_last(arrivals, part.num_parts)) return;",
            "if (!arrives_last(arrivals, part.num_parts)) { if (threadIdx.x == 0) *arrivals = 0; return; }",
        ),
    },
    lengths_are_set_after_they_are_read: {
        "a block that has read the length is counted without a fence": Edit(
            "attention/append_work.cuh", "set_length", "__threadfence(); if (ptx::fetch_add", "if (ptx::fetch_add"
        ),
        "the length is set without a fence": Edit(
            "attention/append_work.cuh", "set_length", "return; __threadfence();", "return;"
        ),
    },
}  # fmt: skip
