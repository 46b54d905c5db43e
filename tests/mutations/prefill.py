"""Planted faults in the kernels for attention of many new tokens to a KV cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from cache_calls import assert_is_attention, drawn, paged, same_bits
from executors import SIM
from mutations.planting import Edit
from prefill_calls import CHUNK, prefilled, with_counts

SIGNS = (AssertionError,)  # exceptions with which a guard reports a fault
_COUNTS = (70, 68)
_CALL = drawn(CHUNK | {"window": (70, None), "sink": True}, (193, 65))


def sm80_prefill_is_right() -> None:
    _is_right("sm80")


def sm90_prefill_is_right() -> None:
    _is_right("sm90")
    call = with_counts().of([0])
    o, lse, _ = prefilled(SIM, "sm90", call)
    one = replace(call, q=call.q[:, :, :133], counts=None)
    assert same_bits(prefilled(SIM, "sm90", one)[:2], (o[:, :, :133], lse[:, :, :133]))


def _is_right(family: str) -> None:
    """Check that paged results are within bounds, out-of-range numbers are counted, and unused rows are empty."""
    k, v, table = paged(_CALL, 16, 0)
    call = replace(_CALL, counts=_COUNTS)
    o, lse, faults = prefilled(SIM, family, call, (k, v, table))
    assert_is_attention(call, o, lse, SIM.rounded)
    empty = [0, 1, 2, 68, 69]  # rows before the first position, and rows of no sequence
    assert not faults
    assert np.array_equal(lse[1][:, empty], np.broadcast_to(call.sink[:, None], (2, len(empty))))
    for junk in (-1, len(k)):
        wrong = table.copy()
        wrong[0, 6] = junk
        o, lse, faults = prefilled(SIM, family, call, (k, v, wrong))
        assert faults > 0 and np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
    assert prefilled(SIM, family, replace(call, lengths=(301, 65)), (k, v, table * 0))[2] > 0


FAULTS = {
    sm80_prefill_is_right: {
        "rows past the end are copied": Edit(
            "sm80/forward.cu", "load_block", "position >= first && position < block.stop", "position >= first"
        ),
        "rows before the window are copied": Edit(
            "sm80/forward.cu", "load_block", "position >= first && position < block.stop", "position < block.stop"
        ),
        "a page that is none is not counted": Edit(
            "sm80/forward.cu", "load_block", "ptx::fetch_add(pages.num_faults, 1)", "(void)0"
        ),
        "a row is that of its page's first position": Edit(
            "sm80/forward.cu", "load_block", "attention::divmod(position, pages.page_size).remainder", "0"
        ),
        "a negative page is read": Edit(
            "attention/page_table.cuh", "page_of", "page >= 0 && page < pages.num_pages", "page < pages.num_pages"
        ),
        "a length beyond the capacity is not told": Edit(
            "attention/page_table.cuh", "rows_of_sequence", "length == clamped && count ==", "count =="
        ),
        "queries that belong to no sequence have no result": Edit(
            "cache/query_intervals.cu", "write_empty_rows", "number < num_rows", "number < 0"
        ),
        "a sink is left out of their lse": Edit(
            "cache/query_intervals.cu", "write_empty_rows", "attention::merge_sink(lse,", "attention::sink_weight(lse,"
        ),
        "new tokens see those after them": Edit(
            "cache/query_intervals.cu", "write_interval", "min(of.length - position, params.right + 1) + position",
            "of.length",
        ),
        "a window has no start": Edit(
            "cache/query_intervals.cu", "write_interval", "position - min(params.left, position)", "0"
        ),
    },
    sm90_prefill_is_right: {
        "every tile is a band": Edit(
            "sm90/kv_tile_scheduler.cuh", "find_band",
            "__all_sync(0xffffffffu, is_band) && (lo_moves || lo_stays)", "true"
        ),
        "a box lies in two pages": Edit(
            "attention/page_table.cuh", "align_steps", "visit_range.start -= visit_range.start % width;", ""
        ),
        "a short last step starts earlier": Edit(
            "sm90/kv_producer.cuh", None, "Config::kIsListed || Config::kIsPaged", "Config::kIsListed"
        ),
        "a box's row is that of the sequence": Edit(
            "sm90/page_copies.cuh", "PageCopy", "attention::divmod(position, pages.page_size).remainder", "position"
        ),
        "pages past the end are looked up": Edit(
            "sm90/page_copies.cuh", "PageCopy", "< seen.hi && position + pages.box_rows >", "+ pages.box_rows >"
        ),
        "values past the end are those of their page": Edit(
            "sm90/page_copies.cuh", "PageCopy.copy_cut_boxes", "start < seen_.lo || stop > seen_.hi", "start < seen_.lo"
        ),
        "values before the window are those of their page": Edit(
            "sm90/page_copies.cuh", "PageCopy.copy_cut_boxes", "start < seen_.lo || stop > seen_.hi", "stop > seen_.hi"
        ),
        "a box that is copied row by row is copied once more": Edit(
            "sm90/page_copies.cuh", "PageCopy.start", "|| cut_ >> tile::lane() & 1", ""
        ),
        "a page that is none is not counted": Edit(
            "sm90/page_copies.cuh", "PageCopy.count_faults", "!has_page_", "false"
        ),
        "queries that belong to no sequence turn a warp's maxima": Edit(
            "sm90/kv_producer.cuh", "load_keys",
            "Config::kIsPaged && ends_before_unused_queries(params, tile_info.work)",
            "false",
        ),
        "a tile has queries that belong to no sequence": Edit(
            "attention/page_table.cuh", "query_tile_of_sequence",
            "work.last = min(work.last, rows_of_sequence(pages, work.batch_head.batch_index).count);", "",
        ),
    },
}
