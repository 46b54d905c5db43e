"""Planted faults in attention to chosen blocks of a cache: the kernel, the rules of lists, and bounds of pages."""

from __future__ import annotations

from types import ModuleType

import pytest
from cuflash import sim
from executors import SIM
from mutations.planting import Edit
from test_chosen_pages import KINDS, check_all_chosen, check_eight_bits, check_refusals, check_results, check_scores
from test_page_bounds import check_bounds, check_kernel

# Exceptions with which a guard reports a fault.
SIGNS = (AssertionError, sim.SimulationError, pytest.fail.Exception, AttributeError)


def results_are_right() -> None:
    """Check bounds, bits and reads for lists of all kinds of heads, all counts, and blocks smaller than a page."""
    for name in ("a list of each key/value head", "a list of each query head", "a quarter of a page"):
        check_results(SIM, KINDS[name])


def windows_are_right() -> None:
    """Check the same for blocks that span several steps and are cut by a window, without pages."""
    check_results(SIM, KINDS["blocks of two steps"])


def all_blocks_are_all_keys() -> None:
    check_all_chosen(SIM)


def eight_bits_are_right() -> None:
    check_eight_bits(SIM)


def scores_are_right() -> None:
    check_scores(SIM, "a quarter of a page")


def lists_are_checked(library: ModuleType) -> None:
    check_refusals(library)


def bounds_are_kept(library: ModuleType) -> None:
    check_bounds(library)


def kernels_keep_bounds() -> None:
    check_kernel(SIM)


LIST, SET, COPY, BODY = (
    "attention/chosen_pages.cuh", "tile/bit_set.cuh", "sm80/cache_copy.cuh", "sm80/decode.cuh"
)  # fmt: skip
RULES, ROWS, BOUNDS = "cache/chosen.py", "cache/paged_rows.py", "cache/key_bounds.cu"
FAULTS = {
    results_are_right: {
        "a repeated entry counts twice": Edit(SET, "BitSet.insert", "atomicOr(", "atomicXor("),
        "words start where the lane is": Edit(SET, "BitSet.list", "count + before - own", "count + before"),
        "the last number is left out": Edit(
            LIST, "ChosenKeys.ChosenKeys", "*count_ = set.list", "*count_ = -1 + set.list"
        ),
        "counts are not read": Edit(LIST, "OwnList.OwnList", "count = min(count,", "count = max(count,"),
        "rows have the list of the first": Edit(LIST, "OwnList.OwnList", "+ row * strides[2]", ""),
        "sequences have the list of the first": Edit(LIST, "OwnList.OwnList", "sequence * strides[0] +", ""),
        "heads have the list of the first": Edit(LIST, "OwnList.OwnList", "+ list_head * strides[1]", ""),
        "entries have four bytes": Edit(
            LIST, "OwnList.OwnList", "strides[3] * chosen.blocks_itemsize", "strides[3] * 4"
        ),
        "a logical page is a physical one": Edit(
            COPY, "CacheCopy.look_up_chosen", "? table_[at.quotient] : sequence_", "? at.quotient : sequence_"
        ),
        "a block starts at the start of its page": Edit(
            COPY, "CacheCopy.look_up_chosen", "rows_[0] = at.remainder;", "rows_[0] = next_ % 16;"
        ),
        "the page is that of the step after": Edit(
            COPY, "CacheCopy.start_next", "next_, chosen_position = position_;", "next_, chosen_position = next_;"
        ),
        "keys after the query's own are attended": Edit(
            BODY, "QueryOfChosenBlocks.mask", "is_part ? seen.hi - first : 0", "is_part ? kKeysOfWarp : 0"
        ),
        "places past the last are attended": Edit(
            BODY, "QueryOfChosenBlocks.mask", "is_part ? seen.hi - first : 0", "seen.hi - first"
        ),
        "tokens have the query of the first": Edit(
            BODY, "decode_cache", "own.q = from_row(params.q, row, sizeof(Element));", "own.q = params.q;"
        ),
        "tokens are written to the first": Edit(
            BODY, "decode_cache", "own.o = from_row(params.o, row, sizeof(Element));", "own.o = params.o;"
        ),
        "lse has rows of elements": Edit(
            BODY, "decode_cache", "from_row(params.lse, row, sizeof(float))", "from_row(params.lse, row, 2)"
        ),
        "lists of query heads have keys of their own": Edit(
            BODY, "decode_cache", "divmod(heads.head, params.group_size).quotient", "min(list_head, 1)"
        ),
        "all tokens are the first": Edit(
            BODY, "decode_cache", "at.quotient, row = at.remainder", "at.quotient, row = 0 * at.remainder"
        ),
    },
    windows_are_right: {
        "keys before the window are attended": Edit(
            BODY, "QueryOfChosenBlocks.mask", "lo = seen.lo - first", "lo = 0"
        ),
        "a block has one step": Edit(
            LIST, "ChosenKeys.position", "* block_ + at.remainder", "* block_ + at.remainder % 64"
        ),
    },
    all_blocks_are_all_keys: {
        "places end with the first block": Edit(LIST, "ChosenKeys.num_places", "(num_blocks - 1) * block_ +", ""),
    },
    eight_bits_are_right: {
        "scales are those of the place": Edit(
            COPY, "CacheCopy.start_next", "kv_head_}, rows[unit], first_row", "kv_head_}, place, first_row"
        ),
    },
    scores_are_right: {
        "positions are places": Edit(
            BODY, "QueryOfChosenBlocks.positions", "{first - key_group() * kKeysOfWarp,", "{start,"
        ),
        "the query is the last one": Edit(
            BODY, "decode_cache", "max(0, of.length - of.count + row)", "max(0, of.length - 1)"
        ),
    },
    bounds_are_kept: {
        "a second append starts again": Edit(
            ROWS, "PagedRows._widen", "if start < growth.length else keys", "if False else keys"
        ),
        "a new page has the bounds of the old one": Edit(
            ROWS, "PagedRows._widen", "if start < growth.length else", "if start <= growth.length else"
        ),
        "a copy has no bounds": Edit(
            ROWS, "PagedRows.copy", "self.key_bounds[copy.target] = self.key_bounds[copy.source]", "pass"
        ),
        "bounds are those of sequences": Edit(ROWS, "PagedRows._widen", "table[start // size]", "growth.sequence"),
    },
    kernels_keep_bounds: {
        "a second append starts again": Edit(
            BOUNDS, "cache_key_bounds", "is_new = start >= rows.length", "is_new = true"
        ),
        "a page has the bounds of the one before": Edit(
            BOUNDS, "cache_key_bounds", "is_new = start >= rows.length", "is_new = start > rows.length"
        ),
        "the last new row is left out": Edit(BOUNDS, "cache_key_bounds", "row < last; ++row", "row < last - 1; ++row"),
        "rows of the next page count": Edit(
            BOUNDS, "cache_key_bounds", "min(rows.num_rows, start + cache.page_size - rows.length)", "rows.num_rows"
        ),
        "a logical page is a physical one": Edit(
            BOUNDS, "cache_key_bounds", "attention::page_of(cache, sequence, start)", "start / cache.page_size"
        ),
        "greatest keys are least ones": Edit(
            BOUNDS, "cache_key_bounds", "high = greater(high, x);", "high = lesser(high, x);"
        ),
    },
    lists_are_checked: {
        "blocks fit any page": Edit(RULES, "mask_reasons", "if cache.is_paged and (", "if False and ("),
        "blocks fit in any step": Edit(
            RULES, "mask_reasons", "block % BLOCK_STEP or block % page_size", "block % page_size"
        ),
        "lists have any number of heads": Edit(
            RULES, "mask_reasons", "mask.require_heads(int(q.shape[1]), int(cache.rows.k.shape[1]))", "pass"
        ),
        "masks without lists are lists": Edit(RULES, "mask_reasons", "type(mask) is not ChosenBlocks", "False"),
    },
}  # fmt: skip
