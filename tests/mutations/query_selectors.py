"""Planted faults in the choice of blocks for each query: in its estimates, budgets and lists."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from mutations.planting import Edit
from mutations.python_guards import part
from test_query_scores import TELLING, check_lists, check_nan_key
from test_query_selectors import DIM, HEADS, KV_HEADS, NAMES, RUN, STRIDE, check, check_pages_of_a_group
from test_selection_kernels import check_choice
from test_selectors import check_unlike_keys

import cuflash
from cuflash.sim import SimulationError
from executors import CPU

SIGNS = (AssertionError, ValueError, SimulationError)  # exceptions with which a guard reports a fault
BY_QUERY, BUDGET, ESTIMATES, NSA = (
    f"selectors/{name}.py" for name in ("by_query", "budget", "estimates", "compressed")
)
BASELINES, PAGES, SLASHES = (f"selectors/{name}.py" for name in ("baselines", "pages", "slashes"))
CHOOSE, SCORES, FEW, LANES = (
    "lists/row_choice.cuh", "lists/query_scores.cu", "lists/few_columns.cuh", "lists/rows_of_lanes.cuh"
)  # fmt: skip
PLANNING = "planning/query_scores.py"
KINDS = (
    (False, {}, {"top_k": 3}), (True, {"sink": 1, "local": 2}, {"top_k": 4}),
    ("bottom_right", {"diagonal": False}, {"density": 0.4}), (True, {}, {"mass": 0.6, "max_blocks": 3}),
    (False, {}, {"threshold": 0.2, "max_blocks": 2}), ("bottom_right", {}, {"top_k": 2}),
    (True, {"local": 2, "diagonal": False}, {"top_k": 1}),
)  # fmt: skip


def lists_are_right(library: ModuleType) -> None:
    """Check every selector, some rows at a time, by head and by group, with all kinds of budgets and causality."""
    with pytest.MonkeyPatch.context() as patch:
        by_query = library.selectors.by_query
        patch.setattr(by_query, "row_steps", lambda grid, num_rows, numbers: [(0, 7), (7, num_rows)])
        for number, (causal, forced, budget) in enumerate(KINDS):
            for name in NAMES:
                if name != "quest" or "mass" not in budget:
                    lengths = (25, 31) if causal == "bottom_right" or not causal else (25, 25)
                    share = ("query", "group")[number % 2]
                    check(CPU, name, lengths, causal, forced, budget, share, number, library=library)


def compressed_keys_are_right(library: ModuleType) -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((2, KV_HEADS, (40 - RUN) // STRIDE + 1, DIM))
    q = np.random.default_rng(1).standard_normal((2, HEADS, 40, DIM))
    _, lse = cuflash.attention(q, keys, keys, mask=cuflash.masks.Compressed(RUN, STRIDE), return_lse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.selectors.by_query, "row_steps", lambda grid, num_rows, numbers: [(0, 7), (7, num_rows)])
        for budget in ({"top_k": 2}, {"threshold": 0.3, "max_blocks": 4, "min_blocks": 0}):
            options = {"compressed_k": keys, "library": library}
            check(CPU, "nsa", (40, 40), True, {"diagonal": False}, budget, "group", 1, lse=lse, **options)
    of = library.selectors
    few = of.Budget(threshold=0.01, max_blocks=4, min_blocks=0)
    none = {"block": (1, 8), "compression": (RUN, STRIDE), "forced": of.Forced(diagonal=False)}
    assert (of.nsa(q, keys, budget=few, lse=lse + 50, **none).blocks == -1).all()


def pages_of_a_group_are_attended(library: ModuleType) -> None:
    check_pages_of_a_group(library)


def unlike_keys_take_no_part(library: ModuleType) -> None:
    check_unlike_keys(library)


def columns_and_diagonals_are_listed(library: ModuleType) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, HEADS, 40, DIM))
    of = library.selectors
    options = {"causal": True, "num_queries": 8, "vertical": of.Budget(top_k=3), "slash": of.Budget(top_k=2)}
    chosen = of.vertical_slash(q, k, block=(1, 6), forced=of.Forced(sink=1), **options)
    elements = of.vertical_slash(q, k, block=(1, 1), **options)
    assert chosen.blocks.shape[-1] == 7 and elements.blocks.shape[-1] == 6
    for h, i in np.ndindex(HEADS, 40):
        wanted = {0, *(int(j) // 6 for j in elements.blocks[h, i] if j >= 0)}
        assert {int(j) for j in chosen.blocks[h, i] if j >= 0} == wanted
    budget = library.selectors.Budget(threshold=0.0, max_blocks=5, min_blocks=4)
    first, second = budget.halves()
    assert (first.max_blocks, second.max_blocks, first.min_blocks, second.min_blocks) == (3, 2, 3, 2)


def the_kernel_lists() -> None:
    """Check lists of more than 32 columns, shorter than their rows' choice or equally long, with ties at the end."""
    rng, must = np.random.default_rng(0), cuflash.selectors.Forced(sink=1, local=1)
    for turn, rule in enumerate((
        {"top_k": 40}, {"mass": 0.75, "max_blocks": 20}, {"threshold": 0.25, "max_blocks": 33}, {"top_k": 5},
    )):  # fmt: skip
        scores = rng.integers(0, 99, (2, 23, 90)).astype(np.float32) / 99
        scores[:, ::3] = np.round(scores[:, ::3] * 2) / 2
        shares = (rng.integers(1, 5, scores.shape) / 64).astype(np.float32)
        budget = cuflash.selectors.Budget(**rule)
        lengths = (181 + 2 * (turn % 2), 450)
        check_choice("sim", (scores, shares, None, None, budget, must, lengths, (8, 5), 269, turn < 2))


def the_kernel_scores() -> None:
    for number, case in enumerate(TELLING):
        check_lists("sim", case, ("first_warp", "round_robin", "last_warp")[number % 3])


def nan_keys_are_right() -> None:
    """Check NaN keys whose scores are in each thread."""
    check_nan_key("sim")


def kernels_are_described(library: ModuleType) -> None:
    for case in TELLING:
        check_lists("sim", case, planning=part(library, "planning.query_scores"))


FAULTS = {
    nan_keys_are_right: {
        "a NaN score without another in its thread is left out": Edit(
            SCORES, "find_shifts", "const float shift = most ==",
            "if (most == ptx::negative_infinity<float>()) continue; const float shift = most ==",
        ),
        "a thread's NaN is left out where the thread has no maximum": Edit(
            SCORES, "find_shifts", "tile::quad_sum(sum[i] *",
            "tile::quad_sum(greatest[i] == ptx::negative_infinity<float>() ? 0.0f : sum[i] *",
        ),
    },
    the_kernel_scores: {
        "a query sees the key after its last": Edit(SCORES, "num_seen", "params.step) + 1", "params.step) + 2"),
        "tiles overlap": Edit(SCORES, "tile_of", "(num_tiles - 1 - number % num_tiles) * of_tile", "0"),
        "lists of a key/value head are those of the first": Edit(
            SCORES, "tile_of", "tile.matrix % num_lists * params.heads_of_list", "0"
        ),
        "heads of a group have keys of their own": Edit(SCORES, "tile_of", "head / params.group_size", "head"),
        "batch entries share queries": Edit(
            SCORES, "tile_of", "tile.q_start += place * params.q.batch_strides[axis];", ""
        ),
        "batch entries share the lse": Edit(
            SCORES, "tile_of", "tile.lse_start += place * params.lse.batch_strides[axis];", ""
        ),
        "a tile of keys is read before it has arrived": Edit(
            SCORES, "walk_keys", "ptx::cp_async_wait<0>(); __syncthreads(); start", "__syncthreads(); start"
        ),
        "keys are replaced before all warps have read them": Edit(
            SCORES, "walk_keys", "ptx::cp_async_wait<0>(); __syncthreads(); start", "ptx::cp_async_wait<0>(); start"
        ),
        "every tile of keys is the first": Edit(SCORES, "walk_keys", "k.rows(first,", "k.rows(0 * first,"),
        "the lse is in base 2": Edit(SCORES, "ThreadRows", "lse * 1.44269504088896340736f", "lse"),
        "the lse is that of the first head": Edit(
            SCORES, "ThreadRows", "+ row % params.heads_of_list * params.lse.head_stride", ""
        ),
        "sums are not rescaled": Edit(SCORES, "find_shifts", "sum[i] *= ptx::exp2_approx(greatest[i] - shift);", ""),
        "a thread's sum is the row's": Edit(
            SCORES, "find_shifts", "sum[i] * ptx::exp2_approx(greatest[i] - (has_maximum ? most : 0.0f))", "sum[i]"
        ),
        "keys that a query does not see have weights": Edit(
            SCORES, "store_scores", "first + column < rows.num_seen[i] ?", "true ?"
        ),
        "weights are summed before all heads have stored them": Edit(
            SCORES, "store_scores", "else __syncthreads();", ""
        ),
        "weights of lanes are summed before they are stored": Edit(
            SCORES, "store_scores", "if (is_local) __syncwarp();", "if (is_local) ;"
        ),
        "a query has the weights of its first head": Edit(
            SCORES, "store_scores", "(query * params.heads_of_list + head)", "(query * params.heads_of_list)"
        ),
        "tiles of scores replace each other": Edit(
            SCORES, "store_scores", "scores[query * pitch + first + column] = sum;",
            "scores[query * pitch + column] = sum;",
        ),
        "a run lies in its first block": Edit(
            SCORES, "ScoresOfKeys", "static_cast<float>(end - begin) * keys[n]",
            "n >= start ? static_cast<float>(end > begin) * keys[n] : 0.0f",
        ),
        "blocks have the runs that begin in them": Edit(
            SCORES, "ScoresOfKeys", "start - params.num_parts + 1 > 0 ? start - params.num_parts + 1 : 0", "start"
        ),
        "keys without scores are read": Edit(SCORES, "ScoresOfKeys", "n < stop && n < num_keys", "n < stop"),
        "all eligible blocks have equal shares": Edit(
            SCORES, "ScoresOfKeys", "params.has_shares ? static_cast<double>(score(row, column)) : 1.0", "1.0"
        ),
        "scores are read before they are stored": Edit(
            SCORES, "lists_query_scores", "__syncthreads(); const int warp", "const int warp"
        ),
        "warps have the places of the first": Edit(
            SCORES, "lists_query_scores", "places + warp * params.place_columns", "places"
        ),
        "blocks that end after the query are chosen": Edit(
            CHOOSE, "BlocksOfRow", "!choice.is_past_only ||", "true ||"
        ),
        "equal scores are all taken": Edit(FEW, "list_few", "< missing; missing -=", "< missing + 32; missing -="),
        "no equal score is taken": Edit(FEW, "list_few", "end = tied = least;", "end = least;"),
        "ties of columns before do not count": Edit(
            FEW, "list_few", "missing -= __popc(ties) < missing ? __popc(ties) : missing;", ""
        ),
        "blocks before the least are counted": Edit(
            FEW, "list_few", "missing = choice.count - places.count_before(least);", "missing = choice.count;"
        ),
        "rows without a block to choose are searched": Edit(FEW, "list_few", "least != kNotEligiblePlace &&", ""),
        "columns of a lane replace each other": Edit(FEW, "list_few", "length += __popc(bits);", ""),
        "a row has the list of the first": Edit(
            FEW, "list_few", "static_cast<int64_t>(row.number) * choice.list_length", "0"
        ),
        "a lane counts its own columns": Edit(LANES, "list_by_lanes", "before = sum_of_pair(before);", ""),
        "forced blocks are chosen in addition to those of the budget": Edit(
            LANES, "list_by_lanes", "choice.count - columns.num_forced()", "choice.count"
        ),
        "sinks that are local count twice": Edit(
            LANES, "ColumnsOfRow.num_forced", "max(first_forced, num_sinks)", "first_forced"
        ),
        "sinks are not listed": Edit(LANES, "ColumnsOfRow.forced_bits", "bits_of_run(start, 0, num_sinks) |", ""),
        "local blocks are one more": Edit(
            LANES, "ColumnsOfRow.ColumnsOfRow", "choice.num_local - 1", "choice.num_local"
        ),
        "blocks that end after the query are free": Edit(
            LANES, "ColumnsOfRow.ColumnsOfRow", "choice.is_past_only ?", "false ?"
        ),
        "ties of the other lane do not count": Edit(
            LANES, "list_by_lanes", "own = missing - (half == 0 ? 0 : other)", "own = missing"
        ),
        "ties of runs before do not count": Edit(
            LANES, "list_by_lanes", "missing -= min(missing, num_ties + other);", ""
        ),
        "blocks before the last place are not counted": Edit(
            LANES, "list_by_lanes", "missing = wanted - before;", "missing = wanted;"
        ),
        "lanes write over each other": Edit(
            LANES, "list_by_lanes", "at = length + (half == 0 ? 0 : other)", "at = length"
        ),
        "a run begins where the lane's own ended": Edit(
            LANES, "list_by_lanes", "length += count + other;", "length += count;"
        ),
        "lists are not filled": Edit(LANES, "list_by_lanes", "list[at] = -1;", ";"),
        "pairs of lanes have the list of the first row": Edit(
            LANES, "list_by_lanes", "static_cast<int64_t>(row.number) * choice.list_length", "0"
        ),
        "pairs of columns are exchanged": Edit(
            SCORES, "store_sums", "lane / 8 % 2 * 2 + lane / 4 % 2", "lane / 4 % 2 * 2 + lane / 8 % 2"
        ),
        "rows of one half are summed": Edit(SCORES, "store_scores", "sums[0][j] += sums[1][j];", "(void)0;"),
        "columns after the diagonal end one too early": Edit(
            CHOOSE, "BlocksOfRow", "static_cast<int>(diagonal_last) + 1 : 0", "static_cast<int>(diagonal_last) : 0"
        ),
    },
    kernels_are_described: {
        "exponentials are in base e": Edit(PLANNING, "QueryChoice.kernels", "self.scale * log2(e)", "self.scale"),
        "a tile has 64 queries": Edit(
            PLANNING, "QueryChoice.kernels", "num_lists * -(-rule.lengths[0] // of_tile)",
            "num_lists * -(-rule.lengths[0] // 64)",
        ),
        "the lse has the strides of bytes": Edit(
            PLANNING, "_layout_of_lse", "step // lse.dtype.itemsize", "step"
        ),
        "parts are exchanged": Edit(
            PLANNING, "QueryChoice.kernels", '"num_parts": self.parts[0]', '"num_parts": self.parts[1]'
        ),
    },
    lists_are_right: {
        "pieces begin at query 0": Edit(BY_QUERY, "_pieces", "offset = grid.offset + first", "offset = grid.offset"),
        "a piece has the queries of the first": Edit(
            BY_QUERY, "_pieces", "grid.q[..., first:stop, :]", "grid.q[..., : stop - first, :]"
        ),
        "a piece attends all keys": Edit(BY_QUERY, "_pieces", "Band() if stairs is None else stairs", "Band()"),
        "numbers of a piece are the first that are drawn": Edit(
            BASELINES, "random", "slice(piece.first_query, piece.first_query + piece.size[0])",
            "slice(0, piece.size[0])",
        ),
        "the number of a row is drawn for all matrices": Edit(
            BASELINES, "_drawn", "matrix * np.uint64(num_rows) + of_rows", "matrix * np.uint64(0) + of_rows"
        ),
        "lists have no order": Edit(BY_QUERY, "lists_of", "xp.sort(numbers, axis=-1)", "numbers"),
        "the rest of a list is the last block": Edit(BY_QUERY, "lists_of", "np.int32(-1)", "np.int32(num_blocks - 1)"),
        "lists are as long as the budget alone": Edit(
            BY_QUERY, "length_within", "max(count or 0, must)", "(count or 0)"
        ),
        "a density is rounded down": Edit(BY_QUERY, "count_within", "ceil((", "int(("),
        "heads of a group choose for themselves": Edit(BY_QUERY, "kept_blocks", "if share == QUERY:", "if True:"),
        "a group has the scores of neighbours in other groups": Edit(
            BY_QUERY, "_of_groups", "kv_heads, size, *x.shape[-2:]), how)(axis=-3)",
            "size, kv_heads, *x.shape[-2:]), how)(axis=-4)",
        ),
        "bounds of a group are added": Edit(PAGES, "quest", 'by="max"', 'by="sum"'),
        "the maximum of blocks is not applied": Edit(
            BUDGET, "choose", "budget.max_blocks is None or budget.max_blocks >= scores.shape[-1]", "True"
        ),
        "one block more than the maximum": Edit(
            BUDGET, "choose", "[..., budget.max_blocks - 1 : budget.max_blocks]",
            "[..., budget.max_blocks : budget.max_blocks + 1]",
        ),
        "means take part that end after the query": Edit(
            ESTIMATES, "_ByMeans.of_queries", "grid.stairs(1, block_kv, block_kv)", "grid.stairs(1, block_kv)"
        ),
        "blocks that end after the query are chosen": Edit(
            ESTIMATES, "_ByMeans.of_queries", "allowed = is_past | must | (not grid.is_causal)",
            "allowed = is_past | True",
        ),
        "rows of queries are one query": Edit(
            ESTIMATES, "_ByMeans.of_blocks", "block_means(grid.q, grid.block[0])",
            "block_means(grid.q, grid.shape.seqlen_q)",
        ),
    },
    compressed_keys_are_right: {
        "means replace the keys of the layer": Edit(
            NSA, "nsa", "if compressed_k is None and not grid.has_own_mask:", "if not grid.has_own_mask:"
        ),
        "lse is not read": Edit(NSA, "nsa", "lse=None if lse is None else lse[..., rows]", "lse=None"),
        "lse of a piece is that of the first": Edit(
            NSA, "nsa", "slice(piece.first_query, piece.first_query + piece.shape.seqlen_q)",
            "slice(0, piece.shape.seqlen_q)",
        ),
        "compressed keys may end after the query": Edit(NSA, "nsa", "stairs(1, stride, length)", "stairs(1, 1)"),
    },
    pages_of_a_group_are_attended: {
        "pages have bounds for heads that do not attend them": Edit(
            "selectors/masked.py", "bounds_of_pages", "xp.where(is_attended, bounds, -np.inf)", "bounds"
        ),
    },
    unlike_keys_take_no_part: {
        "unlike keys have a part of the mass": Edit(
            ESTIMATES, "_ByMeans._mass", "is_seen = ~self._left_out", "is_seen = self._left_out | True"
        ),
        "unlike keys of a mask have a part of the mass": Edit(
            "selectors/masked.py", "mass_of_means", "is_seen & ~unlike", "is_seen"
        ),
        "unlike keys of a query have a part of the mass": Edit(
            "selectors/masked.py", "mass_by_query", "is_seen & ~unlike", "is_seen"
        ),
    },
    columns_and_diagonals_are_listed: {
        "forced blocks have no room": Edit(BY_QUERY, "list_length", "+ _num_forced(forced)", ""),
        "halves have the whole maximum": Edit(
            BUDGET, "Budget.halves", "(most - most // 2, max(most // 2, 1))", "(most, most)"
        ),
    },
    the_kernel_lists: {
        "the maximum is for blocks of the budget alone": Edit(
            CHOOSE, "choose_of_row", "|| of_all.is_before(at)) return false;", ") return false;"
        ),
        "a list has holes": Edit(
            CHOOSE, "write_list", "__popc(bits & ((1u << ptx::lane()) - 1))", "static_cast<int>(ptx::lane())"
        ),
        "columns of 32 replace those before": Edit(CHOOSE, "write_list", "count += __popc(bits);", ""),
        "the rest of a list stays": Edit(
            CHOOSE, "write_list", "at < length; at += 32) list[at] = -1", "at < 0; at += 32) list[at] = -1"
        ),
        "lists of rows replace each other": Edit(
            CHOOSE, "choose_of_row", "number * choice.list_length", "0 * choice.list_length"
        ),
        "a place before which there are too few blocks is the end": Edit(
            CHOOSE, "Row", "if (before == count) exact = at;", "if (before <= count) exact = at;"
        ),
    },
}  # fmt: skip
