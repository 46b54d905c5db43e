"""Planted faults in the choice of a cache's pages and attention to them: kernels, rules of lists, bounds of pages."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import test_chosen_pages
import test_page_choice
from cuflash import sim
from executors import SIM
from library_parts import part
from mutations.planting import Edit
from test_chosen_kernels import INTEGERS
from test_chosen_pages import KINDS, check_all_chosen, check_eight_bits, check_results, check_scores, check_signs
from test_page_bounds import check_bounds, check_kernel
from test_page_choice import CASES, check_cache, check_far_pages, check_kernels, check_tokens

# Exceptions with which a guard reports a fault.
SIGNS = (
    AssertionError, sim.SimulationError, pytest.fail.Exception, AttributeError, ValueError, IndexError,
)  # fmt: skip


def _check_each(check: Callable[..., None], cases: dict[str, Any], *names: str, **options: Any) -> None:
    """Check cases by name on the simulator."""
    for name in names:
        check(SIM, cases[name], **options)


def bounds_are_right() -> None:
    """Assert lists of single heads and of groups, of several tokens, and of rows longer than registers."""
    names = "a list of each group", "several tokens", "longer rows than registers", "a negative scale"
    _check_each(check_kernels, CASES, *names)


def far_pages_have_bounds() -> None:
    check_far_pages()


def lists_are_right() -> None:
    """Assert lists for budgets of all kinds, without a causal mask, and with more queries than tokens."""
    names = "several tokens", "a share of the pages", "a limit", "no causal mask", "more queries than tokens"
    _check_each(check_kernels, CASES, *names)


def many_pages_are_listed() -> None:
    _check_each(check_kernels, CASES, "many pages")


def records_are_right(library: ModuleType) -> None:
    names = "a list of each group", "a negative scale", "no causal mask"
    _check_each(check_kernels, CASES, *names, planning=part(library, "planning.page_choice"))


def formulas_are_right(library: ModuleType) -> None:
    for case in CASES.values():
        check_cache(case, library=library)


def choices_are_checked(library: ModuleType) -> None:
    test_page_choice.check_refusals(library)


def results_are_right() -> None:
    """Check bounds, bits and reads for lists of all kinds of heads, all counts, and blocks smaller than a page."""
    names = "a list of each key/value head", "a list of each query head", "a quarter of a page"
    _check_each(check_results, KINDS, *names)


def windows_are_right() -> None:
    """Check the same for blocks that span several steps and are cut by a window, without pages."""
    _check_each(check_results, KINDS, "blocks of two steps")


def all_blocks_are_all_keys() -> None:
    check_all_chosen(SIM)


def counts_keep_their_sign() -> None:
    for dtype in INTEGERS:
        check_signs(SIM, dtype)


def eight_bits_are_right() -> None:
    check_eight_bits(SIM)


def scores_are_right() -> None:
    check_scores(SIM, "a quarter of a page")


def lists_are_checked(library: ModuleType) -> None:
    test_chosen_pages.check_refusals(library)


def bounds_are_kept(library: ModuleType) -> None:
    check_bounds(library)


def kernels_keep_bounds() -> None:
    check_kernel(SIM)


LIST, SET, COPY, BODY = (
    "attention/chosen_pages.cuh", "tile/bit_set.cuh", "sm80/cache_copy.cuh", "sm80/decode.cuh"
)  # fmt: skip
RULES, ROWS, BOUNDS = "cache/_doors.py", "cache/paged_rows.py", "cache/key_bounds.cu"
BOUND, CHOICE, RECORD, SEARCH = (
    "lists/page_scores.cu", "lists/page_choice.cu", "lists/page_choice.cuh", "lists/searched_row.cuh"
)  # fmt: skip
FORMULA, DOOR, PLAN = "selectors/cache_pages.py", "selectors/pages.py", "planning/page_choice.py"


def short_sequences_are_refused(library: ModuleType) -> None:
    for keeps in (True, False):
        check_tokens(keeps, {}, library)


FAULTS = {
    short_sequences_are_refused: {
        "a sequence has fewer tokens than queries": Edit(
            "selectors/pages.py", "_of_cache", "    require_tokens(cache, q.shape[2])\n    if block", "    if block"
        ),
        "a sequence has one query": Edit(
            "cache/bounded_pages.py", "require_tokens", "num_queries if length else 0", "min(length, 1)"
        ),
        "empty sequences are refused": Edit(
            "cache/bounded_pages.py", "require_tokens", "num_queries if length else 0", "num_queries"
        ),
    },
    bounds_are_right: {
        "a logical page is a physical one": Edit(
            BOUND, "lists_page_scores", "params.table[static_cast<int64_t>(sequence) * params.max_pages + place]",
            "place",
        ),
        "greatest keys are least ones": Edit(BOUND, "lists_page_scores", "least + params.num_columns", "least"),
        "key/value heads have the bounds of the first": Edit(
            BOUND, "lists_page_scores", "params.num_kv_heads + kv_head) * 2", "params.num_kv_heads) * 2"
        ),
        "columns after those in registers are left out": Edit(
            BOUND, "lists_page_scores", "column = 32 * kWidth + ptx::lane()", "column = params.num_columns"
        ),
        "bounds are not scaled": Edit(BOUND, "lists_page_scores", ") * scale;", ");"),
        "a list has the bound of its first head": Edit(
            BOUND, "lists_page_scores", "other < params.heads_of_list", "other == 0"
        ),
        "a group has the sum of its bounds": Edit(
            BOUND, "lists_page_scores", "most = score::maximum(most, bound(head + other, query))",
            "most = (other == 0 ? 0 : most) + bound(head + other, query)",
        ),
        "queries have the bounds of the first": Edit(
            BOUND, "lists_page_scores", "+ query * params.q.row_stride", ""
        ),
        "sequences have the queries of the first": Edit(
            BOUND, "lists_page_scores", "+ sequence * params.q.batch_strides[2]", ""
        ),
        "rows of q have no gaps": Edit(BOUND, "lists_page_scores", "column * params.q.column_stride", "column"),
    },
    counts_keep_their_sign: {
        "counts have a sign": Edit(LIST, "OwnList", "chosen.is_counts_signed != 0", "true"),
        "counts have no sign": Edit(LIST, "OwnList", "chosen.is_counts_signed != 0", "false"),
    },
    far_pages_have_bounds: {
        "warps have numbers of int32": Edit(
            BOUND, "lists_page_scores",
            "block % blocks * Config::kNumWarps + ptx::thread_index() / 32, matrix = block / blocks;",
            "(block * Config::kNumWarps + ptx::thread_index() / 32) % params.max_pages, "
            "matrix = block * Config::kNumWarps / params.max_pages;",
        ),
    },
    lists_are_right: {
        "sequences have as many pages as the longest": Edit(
            CHOICE, "choice_of", "choice.num_kv_blocks = params.num_pages_of(sequence);", ""
        ),
        "queries are at the end of the longest sequence": Edit(
            CHOICE, "choice_of", "params.length_of(sequence) - params.num_queries", "choice.offset"
        ),
        "queries are where those of a causal mask are": Edit(
            CHOICE, "choice_of", "params.is_bottom_right ?", "true ?"
        ),
        "lists have the scores of the first": Edit(
            CHOICE, "lists_page_choice", "static_cast<int64_t>(number) * params.max_pages}", "0 * params.max_pages}"
        ),
        "empty sequences keep what their lists held": Edit(CHOICE, "lists_page_choice", "list[at] = -1;", ";"),
        "a share is a number": Edit(CHOICE, "lists_page_choice", "choice.mass == 0 &&", ""),
        "the last page must be full": Edit(
            RECORD, "PageChoice.num_pages_of", "length_of(sequence) + page_size - 1", "length_of(sequence)"
        ),
        "lengths may exceed the capacity": Edit(
            RECORD, "PageChoice.length_of", "min(lengths[sequence], capacity)", "lengths[sequence]"
        ),
    },
    many_pages_are_listed: {
        "warps write over one another": Edit(SEARCH, "write_runs", "length += before;", ""),
        "ties of warps before do not count": Edit(SEARCH, "write_runs", "ties_before += ties;", ""),
        "every warp takes all ties": Edit(SEARCH, "write_runs", "chosen.missing -= ties_before;", ""),
        "ties of columns before do not count": Edit(
            SEARCH, "write_runs", "chosen.missing -= min(chosen.missing, __popc(ties));", ""
        ),
        "no equal bound is taken": Edit(
            SEARCH, "search_places", "max(0, count - places.count_before(least))", "0"
        ),
        "blocks before the last place are not counted": Edit(
            SEARCH, "search_places", "count - places.count_before(least))", "count)"
        ),
        "runs of warps overlap": Edit(SEARCH, "write_runs", "first = min(warp * of_warp, num_columns)", "first = 0"),
        "the first warp fills the rest": Edit(SEARCH, "write_runs", "warp == kRowWarps - 1", "warp == 0"),
        "numbers of warps are read before they are stored": Edit(SEARCH, "exchange", "__syncthreads();", ""),
        "places lie over the numbers of warps": Edit(
            SEARCH, "list_by_block", "room + kSearchWords", "room + kStepWords"
        ),
    },
    records_are_right: {
        "lists are those of heads": Edit(
            PLAN, "page_choosing", '"heads_of_list": heads_of_list', '"heads_of_list": 1'
        ),
        "bounds have a factor of 1": Edit(PLAN, "page_choosing", '"scale": scale', '"scale": 1.0'),
        "there are as many thread blocks as lists": Edit(
            PLAN, "page_choosing", "tiles=batch * num_lists * num_queries", "tiles=batch"
        ),
    },
    formulas_are_right: {
        "bounds are of the least keys": Edit(
            FORMULA, "_of_sequence", "q * greatest[..., None, :, :]", "q * least[..., None, :, :]"
        ),
        "pages are logical ones": Edit(
            FORMULA, "chosen_pages", "bounds[own[: -(-count // layout.page_size)]]",
            "bounds[: -(-count // layout.page_size)]",
        ),
        "queries are the first ones": Edit(
            FORMULA, "_of_sequence", "num_keys - num_queries if options.is_bottom_right else 0", "0"
        ),
        "groups have the sum of their bounds": Edit(FORMULA, "_of_sequence", '"max"', '"sum"'),
        "the scale is that of scores": Edit(FORMULA, "chosen_pages", "scale=1.0", "scale=-grid.scale"),
    },
    choices_are_checked: {
        "masses are bounds": Edit(DOOR, "mass_reasons", "budget.mass is None", "True"),
        "any share is one of queries": Edit(DOOR, "_of_cache", "share_reasons(of_pages.share) +", "[] +"),
        "other reasons are dropped": Edit(FORMULA, "chosen_pages", "options.scale, reasons", "options.scale, []"),
    },
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
        "blocks fit any page": Edit(RULES, "_mask_reasons", "if cache.is_paged and (", "if False and ("),
        "blocks fit in any step": Edit(
            RULES, "_mask_reasons", "block % BLOCK_STEP or block % page_size", "block % page_size"
        ),
        "lists have any number of heads": Edit(
            RULES, "_mask_reasons", "mask.require_heads(int(q.shape[1]), int(cache.rows.k.shape[1]))", "pass"
        ),
        "lists may count from packed sequences": Edit(RULES, "_mask_reasons", "mask.sequences is not None", "False"),
        "masks without lists are lists": Edit(RULES, "_mask_reasons", "type(mask) is not ChosenBlocks", "False"),
    },
}  # fmt: skip
