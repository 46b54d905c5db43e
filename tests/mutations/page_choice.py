"""Faults in the choice of a cache's pages by their bounds: the kernels, the formulas, and what is refused."""

from __future__ import annotations

from types import ModuleType

import pytest
from cuflash.sim import SimulationError
from executors import SIM
from mutations.planting import Edit
from mutations.python_guards import part
from test_page_choice import CASES, check_cache, check_kernels, check_refusals

SIGNS = (AssertionError, SimulationError, ValueError, IndexError, pytest.fail.Exception)


def bounds_are_right() -> None:
    """Assert lists of single heads and of groups, of several tokens, and of rows longer than registers."""
    for name in ("a list of each group", "several tokens", "longer rows than registers", "a negative scale"):
        check_kernels(SIM, CASES[name])


def lists_are_right() -> None:
    """Assert lists for budgets of all kinds, without a causal mask, and with more queries than tokens."""
    for name in ("several tokens", "a share of the pages", "a limit", "no causal mask", "more queries than tokens"):
        check_kernels(SIM, CASES[name])


def many_pages_are_listed() -> None:
    check_kernels(SIM, CASES["many pages"])


def records_are_right(library: ModuleType) -> None:
    for name in ("a list of each group", "a negative scale", "no causal mask"):
        check_kernels(SIM, CASES[name], planning=part(library, "planning.page_choice"))


def formulas_are_right(library: ModuleType) -> None:
    for case in CASES.values():
        check_cache(case, library=library)


def arguments_are_checked(library: ModuleType) -> None:
    check_refusals(library)


BOUND, CHOICE, RECORD, SEARCH = (
    "lists/page_scores.cu", "lists/page_choice.cu", "lists/page_choice.cuh", "lists/searched_row.cuh"
)  # fmt: skip
FORMULA, DOOR, PLAN = "selectors/cache_pages.py", "selectors/pages.py", "planning/page_choice.py"
FAULTS = {
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
            BOUND, "lists_page_scores", "most = greater(most, bound(head + other, query))",
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
    arguments_are_checked: {
        "masses are bounds": Edit(DOOR, "mass_reasons", "budget.mass is None", "True"),
        "any share is one of queries": Edit(DOOR, "_of_cache", "share_reasons(of_pages.share) +", "[] +"),
        "other reasons are dropped": Edit(FORMULA, "chosen_pages", "options.scale, reasons", "options.scale, []"),
    },
}  # fmt: skip
