"""Faults in block masses, in selectors and in rooflines: of Python and of the kernel."""

from __future__ import annotations

from mutations.mass_guards import tensor_cores_sum_masses
from mutations.planting import Edit
from mutations.selector_guards import (
    an_index_hands_its_lists_over,
    budgets_are_exact,
    rooflines_are_right,
    selections_are_right,
    slashes_are_right,
    the_host_sums_masses,
    the_kernel_chooses,
    the_kernel_makes_means,
    the_kernel_sums_masses,
)

MASS, KERNEL, SUMS = "executors/cpu_mass.py", "simt/block_mass.cu", "attention/block_mass.cuh"
CUTS, HALVES, HOPPER = "attention/mass_grid.cuh", "attention/mass_walk.cuh", "sm90/block_mass.cu"
CHOOSE, POOL, AT_CALL = "lists/choose.cu", "lists/pool.cu", "planning/list_kernels.py"
BUDGET, GRID, ESTIMATES = "selectors/budget.py", "selectors/grid.py", "selectors/estimates.py"
SLASHES, PAGES, NSA = "selectors/slashes.py", "selectors/pages.py", "selectors/compressed.py"
ROOFLINE = "study/roofline.py"
FAULTS = {
    the_host_sums_masses: {
        "masses overwrite each other": Edit(MASS, "_add_to_grid", "+= sums.T", "= sums.T"),
        "sums are not rescaled": Edit(MASS, "_from_scores", "row_sum * np.exp2(row_max - shift)", "row_sum"),
        "lse is in base 2 already": Edit(MASS, "_from_lse", "lse * lse.dtype.type(LOG2_E)", "lse"),
        "means are over all queries": Edit("study/block_mass.py", "_mean", "lse != -np.inf", "lse == lse"),
        "a row without a key divides by 0": Edit("study/block_mass.py", "_mean", "xp.maximum(counts, 1)", "counts"),
    },
    the_kernel_sums_masses: {
        "a tile of queries is as tall as the grid's block": Edit(
            KERNEL, "simt_block_mass", "min(query_tile_end(params, work.first, kBlockQ), owned.last)", "owned.last"
        ),
        "Q stays where it is read in chunks": Edit(KERNEL, "step_scores", "|| head_dim > kHeadDim", ""),
        "lse of a row without a key is not told apart": Edit(
            KERNEL, "simt_block_mass", "factor[i] = is_empty ? Accumulator(0) : 1 / sum", "factor[i] = 1 / sum"
        ),
        "masses overwrite each other": Edit(SUMS, "add_masses", "+= total;\n", "= total;"),
        "a block of keys goes on past the step": Edit(
            CUTS, "BlockCuts", "n + 1 == count() ? last - first : start(n + 1)", "start(n + 1)"
        ),
        "a block of queries starts with the tile": Edit(
            CUTS, "BlockCuts", "n == 0 ? 0 : (first_block() + n) * block - first", "n * block"
        ),
        "weights are summed before they are there": Edit(
            SUMS, "add_masses", "__syncthreads();", ""
        ),
    },
    tensor_cores_sum_masses: {
        "every chunk is a block's last": Edit(
            HALVES, "ChunkLoader", "const bool is_last = last_column == head_dim;", "const bool is_last = true;"
        ),
        "Q stays where it comes in chunks": Edit(HALVES, "ChunkLoader", "if (kSplitsHeadDim)", "if (false)"),
        "parts of a block overwrite each other": Edit(
            HALVES, "RowMasses", "is_whole ? log_sum : add_logarithms(to, log_sum)", "log_sum"
        ),
        "what rows give to blocks is not cleared": Edit(
            HALVES, "RowMasses", "data[i] = ptx::negative_infinity<float>();", "data[i] = 0;"
        ),
        "masses are summed before lse is there": Edit(
            HALVES, "add_tile", "scale_log2, state);\n  __syncthreads();", "scale_log2, state);"
        ),
        "a block of keys has the first column after it": Edit(
            HALVES, "add_step", "columns_from(stop))", "columns_from(stop + 1))"
        ),
        "lse of a row without a key is not told apart": Edit(
            HALVES, "save_shifts", "row_lse[i] != ptx::negative_infinity<float>()", "true"
        ),
        "lse that is given is not read": Edit(HALVES, "save_shifts", "if (grid.has_lse)", "if (false)"),
        "tiles of queries overwrite each other": Edit(HALVES, "add_masses", "+= sum;", "= sum;"),
        "warpgroups have the same queries": Edit(HOPPER, "WgmmaProduct", "threadIdx.x / 128 * 64", "0"),
        "products see no copies": Edit(HOPPER, "WgmmaProduct", "ptx::fence_proxy_async();", ""),
        "warps of Ampere have the same queries": Edit(
            "sm80/block_mass.cu", "MmaProduct", "QTile{q}, s.warp_row()", "QTile{q}, 0"
        ),
    },
    the_kernel_chooses: {
        "the last of equal scores comes first": Edit(
            CHOOSE, "Row", "--missing) end = start + __ffs(equal) - 1;", "--missing) end = start + 31 - __clz(equal);"
        ),
        "-0 is less than 0": Edit(CHOOSE, "Row", "0.0f - (", "-("),
        "NaN comes first": Edit(CHOOSE, "Row", "as_float != as_float", "false"),
        "scores above 0 are in reverse": Edit(CHOOSE, "Row", "bits ^ (bits >> 31 & 0x7fffffff)", "bits"),
        "equal scores are all taken": Edit(
            CHOOSE, "lists_choose", "!end.is_before(End{place, column})", "place <= end.place"
        ),
        "forced blocks beyond the budget are dropped": Edit(
            CHOOSE, "lists_choose", "if (end.is_before(of_count)) end", "end"
        ),
        "a score of the threshold is too low": Edit(
            CHOOSE, "lists_choose", "row.score(column) >=", "row.score(column) >"
        ),
        "diagonals before key 0 are rounded up": Edit(CHOOSE, "floor_divided", "-((by - 1 - x) / by)", "x / by"),
        "local blocks begin one too early": Edit(CHOOSE, "Row", "(choice.num_local - 1)", "choice.num_local"),
        "shares that reach the part are not enough": Edit(
            CHOOSE, "Row", "return !(shares_before(at) >= needed);", "return shares_before(at) <= needed;"
        ),
    },
    the_kernel_makes_means: {
        "means of a short block count missing rows": Edit(
            POOL, "pool_block", "static_cast<Accumulator>(last - first)", "static_cast<Accumulator>(rows.block)"
        ),
        "heads are batch entries": Edit(POOL, "pool_block", "matrix /= rows.num_heads;", ""),
    },
    an_index_hands_its_lists_over: {
        "lists of small blocks are walked as they are": Edit(
            AT_CALL, "work_of_kernels", "listed_block(mask, tile) == mask.index.block", "True"
        ),
        "lists are made of the index's array": Edit(AT_CALL, "work_of_kernels", ", is_carried=True", ""),
    },
    budgets_are_exact: {
        "the last of equal scores comes first": Edit(
            BUDGET, "_keys", "xp.arange(scores.shape[-1])", "xp.arange(scores.shape[-1])[::-1]"
        ),
        "-0 is less than 0": Edit(
            BUDGET, "_keys", "np.float32(0) - xp.fmax(scores, -np.inf)", "-xp.fmax(scores, -np.inf)"
        ),
        "NaN comes first": Edit(BUDGET, "_keys", "xp.fmax(scores, -np.inf)", "scores"),
        "scores above 0 are in reverse": Edit(BUDGET, "_keys", "bits ^ ((bits >> 31) & _MAGNITUDE)", "bits"),
        "forced blocks are taken by their scores": Edit(
            BUDGET, "_keys", "xp.where(forced, _FORCED, places)", "places"
        ),
        "forced blocks beyond the budget are dropped": Edit(
            BUDGET, "choose", "xp.clip(last, _NOT_FORCED - 1, _NOT_ELIGIBLE - 1)",
            "xp.minimum(last, _NOT_ELIGIBLE - 1)",
        ),
        "blocks that are not eligible fill a budget up": Edit(
            BUDGET, "choose", "xp.clip(last, _NOT_FORCED - 1, _NOT_ELIGIBLE - 1)",
            "xp.maximum(last, _NOT_FORCED - 1)",
        ),
        "blocks that are not eligible hold mass": Edit(
            BUDGET, "choose", "weights.astype(np.float64) * eligible", "weights.astype(np.float64)"
        ),
        "shares are summed in the order of the blocks": Edit(
            BUDGET, "_last_needed", "(in_order & _BLOCK) + starts", "xp.arange(num_blocks) + starts"
        ),
        "the last block does not count": Edit(BUDGET, "_last_needed", "~(before >= ", "~(sums >= "),
        "few blocks are enough": Edit(
            BUDGET, "choose", "max(budget.top_k or 0, budget.min_blocks)", "budget.top_k or 0"
        ),
    },
    selections_are_right: {
        "means of a short block count missing rows": Edit(
            GRID, "block_means", "if length % side == 0:", "if True:"
        ),
        "an index allows what the mask hides": Edit(
            GRID, "Grid.index", "pattern if self.mask == Band() else pattern & self.mask", "pattern"
        ),
        "queries of a group are not reversed": Edit(ESTIMATES, "antidiagonal", "rows[..., ::-1, :]", "rows"),
        "sums of scores are not means": Edit(ESTIMATES, "antidiagonal", "grid.scale / stride", "grid.scale"),
        "a compressed key lies in its first block": Edit(
            NSA, "nsa", "pieces[..., n : n + count] += mass", "pieces[..., :count] += mass"
        ),
        "heads of a group choose for themselves": Edit(
            NSA, "nsa", ".sum(axis=-3)", "[..., 0, :, :]"
        ),
        "compressed keys may end after the query": Edit(NSA, "nsa", "stairs(1, stride, length)", "stairs(1, 1)"),
        "bounds are of the greatest key alone": Edit(PAGES, "_bounds", "q * least[", "q * greatest["),
        "the last page holds zeros": Edit(
            PAGES, "_bounds", "xp.minimum(xp.arange(num_pages * page), max(length - 1, 0))",
            "xp.arange(num_pages * page) % length",
        ),
    },
    slashes_are_right: {
        "distances run one too far": Edit(SLASHES, "vertical_slash", "- stop_kv + 1", "- stop_kv"),
        "no column is kept": Edit(SLASHES, "vertical_slash", "start_kv, stop_kv)", "start_kv, start_kv)"),
    },
    rooflines_are_right: {
        "hidden elements count": Edit(ROOFLINE, "_elements", "int(of_lists[owner]), runs", "runs, runs"),
        "values are as wide as keys": Edit(
            ROOFLINE, "_bounded", "of_value * problem.value_dim)", "of_value * problem.head_dim)"
        ),
        "lse is not written": Edit(ROOFLINE, "_bounded", '!= "dlse"', '!= "lse"'),
        "the chip has one multiprocessor": Edit(ROOFLINE, "_bounded", "* plan.device.num_processors", ""),
        "the share is upside down": Edit(
            ROOFLINE, "Roofline.share", "self.least_seconds / self.measured_seconds",
            "self.measured_seconds / self.least_seconds",
        ),
    },
}  # fmt: skip
