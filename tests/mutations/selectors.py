"""Planted faults in block masses, selectors and rooflines, in Python and in kernels."""

from __future__ import annotations

from mutations import mass_guards, selector_guards
from mutations.planting import Edit

MASS, KERNEL, SUMS = "executors/cpu_mass.py", "simt/block_mass.cu", "attention/block_mass.cuh"
CUTS, HALVES, WALK = "attention/mass_grid.cuh", "attention/mass_sums.cuh", "attention/mass_walk.cuh"
HOPPER = "sm90/block_mass.cu"
CHOOSE, WIDE, POOL = "lists/row_choice.cuh", "lists/choose_wide.cu", "lists/pool.cu"
AT_CALL = "planning/list_kernels.py"
BUDGET, GRID, ESTIMATES = "selectors/budget.py", "selectors/grid.py", "selectors/estimates.py"
PAGES, NSA = "selectors/pages.py", "selectors/compressed.py"
MASKED = "selectors/masked.py"
SELECTING, LAUNCHES = "executors/selecting.py", "planning/selection_kernels.py"
WORKSPACES, RECORDS = "executors/workspaces.py", "executors/_records.py"
SPREAD, KEY_SCORES, SLASH_SUMS, CROSSINGS, BOUNDS = (
    f"lists/{name}.cu" for name in ("spread", "key_scores", "slash_sums", "crossings", "page_bounds")
)
FAULTS = {
    selector_guards.selections_share_memory: {
        "blocks that are kept lie over the scores": Edit(
            WORKSPACES, "Workspaces.__init__", "-(-size // _ALIGNMENT) * _ALIGNMENT", "size // 2"
        ),
        "all kernels take the arrays of the first": Edit(
            RECORDS, "LaunchRecord.joined", "Place(start + word, offset, positions[own[number]])",
            "Place(word, offset, positions[own[number]])",
        ),
        "numbers that were drawn count as shares": Edit(
            "selectors/bound.py", "_by_scores", "if has_shares and budget", "if budget"
        ),
        "arrays keep their names": Edit(RECORDS, "LaunchRecord.joined", "renamed.get(name, name)", "name"),
        "a graph writes to memory that is free": Edit(
            SELECTING, "Selection.__call__", "self._captured += [*taken, q, k]", "pass"
        ),
        "a graph's selection is forgotten": Edit(SELECTING, "Selection.__call__", "gpu.hold(self)", "pass"),
    },
    selector_guards.the_host_sums_masses: {
        "masses overwrite each other": Edit(MASS, "_add_to_grid", "+= sums.T", "= sums.T"),
        "sums are not rescaled": Edit(MASS, "_from_scores", "row_sum * call.power(row_max - shift)", "row_sum"),
        "lse is in base 2 already": Edit(MASS, "_from_lse", "lse / call.wide(call.natural)", "lse"),
        "means are over all queries": Edit("study/_masses.py", "_mean", "lse != -np.inf", "lse == lse"),
        "a row without a key divides by 0": Edit("study/_masses.py", "_mean", "xp.maximum(counts, 1)", "counts"),
    },
    selector_guards.masses_are_of_chosen_blocks: {
        "kernels get the unions of queries' lists": Edit(
            "study/_masses.py", "_planned", "isinstance(ready._plan.work, UnionWork)", "False"
        ),
    },
    selector_guards.the_kernel_sums_masses: {
        "a tile of queries is as tall as the grid's block": Edit(
            KERNEL, "simt_block_mass", "min(query_tile_end(params, work.first, kBlockQ), owned.last)", "owned.last"
        ),
        "Q stays where it is read in chunks": Edit(KERNEL, "step_scores", "|| head_dim > kHeadDim", ""),
        "lse of a row without a key is not distinguished": Edit(
            KERNEL, "simt_block_mass", "factor[i] = is_empty ? Accumulator(0) : 1 / sum", "factor[i] = 1 / sum"
        ),
        "masses overwrite each other": Edit(SUMS, "add_masses", "+= total;\n", "= total;"),
        "a block of keys continues past the step": Edit(
            CUTS, "BlockCuts", "n + 1 == count() ? last - first : start(n + 1)", "start(n + 1)"
        ),
        "a block of queries starts with the tile": Edit(
            CUTS, "BlockCuts", "n == 0 ? 0 : (first_block() + n) * block - first", "n * block"
        ),
        "weights are summed before they are there": Edit(
            SUMS, "add_masses", "__syncthreads();", ""
        ),
    },
    mass_guards.tensor_cores_sum_masses: {
        "every chunk is a block's last": Edit(
            WALK, "ChunkLoader", "const bool is_last = last_column == head_dim;", "const bool is_last = true;"
        ),
        "Q stays where it comes in chunks": Edit(WALK, "ChunkLoader", "if (kSplitsHeadDim)", "if (false)"),
        "warps of Ampere have the same queries": Edit(
            WALK, "walk_keys", "tile::left_k_major(q_slot(slot), s.warp_row())", "tile::left_k_major(q_slot(slot), 0)"
        ),
        "what rows give to blocks is not cleared": Edit(
            HALVES, "RowMasses", "data[i] = ptx::negative_infinity<float>();", "data[i] = 0;"
        ),
        "masses are summed before lse is there": Edit(
            HALVES, "add_all_tiles", "add_tile(row_masses);\n      __syncthreads();", "add_tile(row_masses);"
        ),
        "sums of blocks before are not rescaled": Edit(HALVES, "KeySums", "*= factor[i];", "*= 1;"),
        "a block of keys has the first column after it": Edit(
            HALVES, "KeySums", "columns_from(stop - block.start))", "columns_from(stop - block.start + 1))"
        ),
        "eight columns count to the block before": Edit(
            HALVES, "KeySums", "if (key == stop_)", "if (key == stop_ + 8)"
        ),
        "a thread block takes one tile": Edit(
            HALVES, "add_all_tiles", "number = tile.next_number", "number = num_rows"
        ),
        "a block of keys continues in the next step of any": Edit(
            HALVES, "KeySums", "if (block.start < stop_) return;", "if (number_ >= 0) return;"
        ),
        "lse of a row without a key is not distinguished": Edit(
            HALVES, "save_shifts", "row_lse[i] != ptx::negative_infinity<float>()", "true"
        ),
        "lse that is given is not read": Edit(HALVES, "save_shifts", "if (grid.has_lse)", "if (false)"),
        "tiles of queries overwrite each other": Edit(HALVES, "add_masses", "+= sum[x];\n", "= sum[x];"),
        "warpgroups have the same queries": Edit(HOPPER, "multiply", "64 * group", "0"),
        "chunks replace each other": Edit(HOPPER, "multiply", "tile::start_gemm_add_nt", "tile::start_gemm_nt"),
        "chunks are not left": Edit(HOPPER, "multiply", "tile::arrive(smem.chunks[last_stage].empty);", ""),
        "a step is left before its scores are made again": Edit(
            HOPPER, "walk_keys", "if (!is_added)", "tile::arrive(smem.chunks[stage].empty); if (!is_added)"
        ),
        "scores that are lost are not made again": Edit(
            HOPPER, "walk_keys", "if (!is_added) recompute_scores(s, stage);", ""
        ),
        "queries of every tile arrive in one phase": Edit(HOPPER, "walk_keys", "counts.tiles % 2", "0"),
        "keys are those of the tile's first step": Edit(
            HOPPER, "load_tile", ".start, block.stop), k_coords, block.start", ".start, block.stop), k_coords, 0"
        ),
    },
    mass_guards.groups_of_columns_are_turned: {
        "masses are not cleared": Edit(
            CUTS, "clear_masses", "mass.at(queries.first_block() + n, kv_block) = 0;", "(void)0;"
        ),
        "groups of columns are in their order": Edit(
            CUTS, "MassGrid", "shape.head_dim - (column / group + 1) * group + column % group", "column"
        ),
        "columns of a group are reversed too": Edit(
            CUTS, "MassGrid", "- (column / group + 1) * group + column % group", "- column - 64"
        ),
    },
    selector_guards.the_kernel_chooses: {
        "the last of equal scores comes first": Edit(
            CHOOSE, "Row", "--missing) end = from + __ffs(equal) - 1;", "--missing) end = from + 31 - __clz(equal);"
        ),
        "-0 is less than 0": Edit(CHOOSE, "place_of", "0.0f - (", "-("),
        "NaN comes first": Edit(CHOOSE, "place_of", "score != score", "false"),
        "scores above 0 are in reverse": Edit(CHOOSE, "place_of", "bits ^ (bits >> 31 & 0x7fffffff)", "bits"),
        "equal scores are all taken": Edit(
            CHOOSE, "choose_of_row", "!end.is_before(at)", "at.place <= end.place"
        ),
        "forced blocks beyond the budget are dropped": Edit(
            CHOOSE, "choose_of_row", "if (end.is_before(of_count)) end", "end"
        ),
        "a score of the threshold is too low": Edit(
            CHOOSE, "choose_of_row", "row.score(column) >=", "row.score(column) >"
        ),
        "diagonals before key 0 are rounded up": Edit(CHOOSE, "floor_divided", "-((by - 1 - x) / by)", "x / by"),
        "local blocks begin one too early": Edit(CHOOSE, "BlocksOfRow", "(choice.num_local - 1)", "choice.num_local"),
        "shares that reach the part are not enough": Edit(
            CHOOSE, "Row", "return !(shares_before(at) >= needed);", "return shares_before(at) <= needed;"
        ),
    },
    selector_guards.thread_blocks_choose_from_wide_rows: {
        "blocks of a run are not counted": Edit(CHOOSE, "Row", "missing -= count_of_run;", ""),
        "a run is taken that has too many equal blocks": Edit(
            CHOOSE, "Row", "count_of_run <= missing", "count_of_run <= missing + 512"
        ),
        "the last block of a run is left out": Edit(
            CHOOSE, "Row", "missing -= count_of_run; end = start + Threads::kThreads - 1;",
            "missing -= count_of_run; end = start + Threads::kThreads - 2;",
        ),
        "shares of a run are not added": Edit(CHOOSE, "Row", "sum += sum_of_run;", ""),
        "blocks end with the first warp of a run": Edit(
            CHOOSE, "Row", "from < start + Threads::kThreads && missing > 0", "from < start + 32 && missing > 0"
        ),
        "shares end with the first warp of a run": Edit(
            CHOOSE, "Row", "from < start + Threads::kThreads && !(sum", "from < start + 32 && !(sum"
        ),
        "a warp's sum is the block's": Edit(
            CHOOSE, "BlockOfRow", "x = sum_of_warp(ptx::lane() < Config::kNumWarps ? of_warps[ptx::lane()] : T(0));", ""
        ),
        "sums are read before all warps have written": Edit(
            CHOOSE, "BlockOfRow", "] = x; __syncthreads();", "] = x;"
        ),
        "sums are replaced before all warps have read": Edit(
            CHOOSE, "BlockOfRow", "T(0)); __syncthreads();", "T(0));"
        ),
        "places lie over sums": Edit(WIDE, "lists_choose_wide", "storage + BlockOfRow::kBytes", "storage"),
        "bits of neighbours are swapped": Edit(
            CHOOSE, "choose_of_row", "word * 32 + ptx::lane()", "word * 32 + (ptx::lane() ^ 1)"
        ),
        "bits of rows replace each other": Edit(
            CHOOSE, "choose_of_row", "number * num_words", "0"
        ),
        "the second grid is the first": Edit(
            WIDE, "lists_choose_wide", "? choices.first : choices.second", "? choices.first : choices.first"
        ),
        "the second grid has one row": Edit(WIDE, "lists_choose_wide", "? number : number - num_first", "? number : 0"),
    },
    selector_guards.the_kernel_makes_means: {
        "means of a short block count missing rows": Edit(
            POOL, "pool_block", "static_cast<Accumulator>(last - first)", "static_cast<Accumulator>(rows.block)"
        ),
        "heads are batch entries": Edit(POOL, "pool_block", "matrix /= rows.num_heads;", ""),
    },
    selector_guards.the_kernels_of_pages_and_slashes_are_right: {
        "a compressed key counts once in each block": Edit(
            SPREAD, "lists_spread", "static_cast<Accumulator>(end - begin) * masses[c]", "masses[c]"
        ),
        "a block has the compressed keys that begin in it": Edit(
            SPREAD, "lists_spread", "start - spread.num_parts + 1 > 0 ? start - spread.num_parts + 1 : 0", "start"
        ),
        "compressed keys beyond the last are read": Edit(
            SPREAD, "lists_spread", "stop < spread.num_compressed ? stop : spread.num_compressed", "stop"
        ),
        "scores are written for the first head of a group": Edit(
            SPREAD, "lists_spread", "[row * spread.num_kv_blocks", "[first_row * spread.num_kv_blocks"
        ),
        "groups are as large as heads": Edit(
            SPREAD, "lists_spread", "/ spread.num_q_blocks * spread.group_size", "/ spread.num_q_blocks"
        ),
        "a query sees the key after its last": Edit(KEY_SCORES, "lists_key_scores", "key > row", "key >= row"),
        "keys after the last have scores": Edit(KEY_SCORES, "lists_key_scores", "key >= last_key ||", ""),
        "every chunk has the first columns": Edit(
            KEY_SCORES, "lists_key_scores", "k.columns(first, last)", "k.columns(0, last - first)"
        ),
        "heads of a group have other keys": Edit(KEY_SCORES, "rows_of", "/ group_size", "% group_size"),
        "batch entries share queries": Edit(KEY_SCORES, "rows_of", "% params.batch[axis] * rows", "% 1 * rows"),
        "runs of a query replace each other": Edit(KEY_SCORES, "lists_key_scores", "* num_runs + run]", "* num_runs]"),
        "the exponentials of a run without a key are NaN": Edit(
            KEY_SCORES, "lists_key_scores",
            "greatest == ptx::negative_infinity<Accumulator>() ? Accumulator(0) : greatest", "greatest",
        ),
        "a row has the scores of the tile's first": Edit(
            KEY_SCORES, "lists_key_scores", "+ first_row) * params.num_keys", ") * params.num_keys"
        ),
        "a row without a key divides by 0": Edit(
            SLASH_SUMS, "mass_of_row", "sum == 0 ? Accumulator(0) : 1 / sum", "1 / sum"
        ),
        "exponentials of runs are added under their own maxima": Edit(
            SLASH_SUMS, "mass_of_row", "* ptx::exp2_accurate(runs[run].greatest - shift)", ""
        ),
        "lse is of the first 32 runs' last": Edit(
            SLASH_SUMS, "mass_of_row", "sum += runs[run].sum", "sum = runs[run].sum"
        ),
        "masses are added before their rows' lse is there": Edit(
            SLASH_SUMS, "lists_slash_sums", "] = mass; } __syncthreads();", "] = mass; }"
        ),
        "distances are of the first queries": Edit(
            SLASH_SUMS, "lists_slash_sums", "row + sums.first_diagonal_key - distance", "row - distance"
        ),
        "keys after the last are those of the next row": Edit(
            SLASH_SUMS, "lists_slash_sums", "key >= 0 && key < sums.num_keys", "key >= 0"
        ),
        "distances of a head are those of the first": Edit(
            SLASH_SUMS, "lists_slash_sums", "[matrix * sums.num_distances + distance]", "[distance]"
        ),
        "distances run one too far": Edit(CROSSINGS, "lists_crossings", "- stop_kv + 1", "- stop_kv"),
        "a short block crosses distances beyond its queries": Edit(
            CROSSINGS, "lists_crossings", "end_q < grid.seqlen_q ? end_q : grid.seqlen_q", "end_q"
        ),
        "no column is kept": Edit(
            CROSSINGS, "lists_crossings", "start_kv, stop_kv, num_keys", "start_kv, start_kv, num_keys"
        ),
        "forced blocks are left out": Edit(CROSSINGS, "lists_crossings", "row.is_forced(column) ||", ""),
        "blocks after the diagonal are kept": Edit(CROSSINGS, "lists_crossings", "row.is_eligible(column) &&", ""),
        "all bits of the last word are read": Edit(CROSSINGS, "has_any", "~0u >> (31 - (stop - 1) % 32)", "~0u"),
        "all bits of the first word are read": Edit(CROSSINGS, "has_any", "~0u << start % 32", "~0u"),
        "a word is left out": Edit(CROSSINGS, "has_any", "word <= last", "word < last"),
        "distances are keys": Edit(CROSSINGS, "lists_crossings", "+ num_matrices * words_of_keys +", "+"),
        "distances before 0 are read": Edit(CROSSINGS, "has_any", "start > 0 ? start : 0", "start"),
        "bounds are of the greatest key alone": Edit(BOUNDS, "lists_page_bounds", "x * least", "x * greatest"),
        "NaN of a key is lost": Edit(
            "attention/score_math.cuh", "maximum", "x >= y || x != x ? x : y", "x >= y ? x : y"
        ),
        "a short page continues": Edit(
            BOUNDS, "lists_page_bounds", "end < bounds.num_keys ? end : bounds.num_keys", "end"
        ),
        "heads of a group have keys of their own": Edit(
            BOUNDS, "lists_page_bounds", "head / bounds.group_size", "head % bounds.group_size"
        ),
    },
    selector_guards.selections_tell_kernels_where: {
        "no more local blocks are forced than there are blocks of keys": Edit(
            "planning/selection_kernels.py", "ChoiceRule.numbers", "min(self.num_local, np.iinfo(np.int32).max)",
            "min(self.num_local, num_kv_blocks)",
        ),
        "runs begin at each row": Edit(LAUNCHES, "runs_of_rows", "row_step * stride", "row_step"),
        "all batch entries share keys": Edit(
            LAUNCHES, "layout_of_rows", "step if extent == size else 0", "0"
        ),
        "exponentials are in base e": Edit(LAUNCHES, "key_scoring", "scale * log2(e)", "scale"),
        "queries before key 0 have distances": Edit(LAUNCHES, "num_distances", "seqlen_q + offset", "seqlen_q"),
        "blocks have as many parts as compressed keys": Edit(
            LAUNCHES, "spreading", '"parts_of_block": parts[1]', '"parts_of_block": parts[0]'
        ),
    },
    selector_guards.fixed_blocks_stay: {
        "a stream does not wait for the copy": Edit(
            SELECTING, "FixedSelection.__call__", "self._lists.use(stream)", "pass"
        ),
    },
    selector_guards.the_kernel_draws: {
        "numbers have 32 bits": Edit("lists/draw.cu", "lists_draw", "words[0].at[0] >> 8", "words[0].at[0]"),
        "two cells have one number": Edit("lists/draw.cu", "lists_draw", "<uint32_t>(cell)", "<uint32_t>(cell / 2)"),
        "the upper half of the seed is not read": Edit(
            "lists/draw.cu", "lists_draw", "draw.seed >> 32", "draw.seed"
        ),
    },
    selector_guards.an_index_hands_its_lists_over: {
        "lists of small blocks are walked as they are": Edit(
            AT_CALL, "_work_of_carried", "is_ready = not closed and block == grid.index.block", "is_ready = not closed"
        ),
        "lists are made of the index's array": Edit(AT_CALL, "_work_of_carried", ", carried=carried", ""),
        "an intersection has the closed form's keys": Edit(
            AT_CALL, "ListSource.rows_within", "if own is None:", "if True:"
        ),
        "the array of an index has the axes of another": Edit(AT_CALL, "in_blocks", "axes[axis + 1 :]", "axes[axis:]"),
        "elements are taken for blocks": Edit(AT_CALL, "in_blocks", "element=self.block", "element=(1, 1)"),
        "larger blocks are taken for whole ones": Edit(
            AT_CALL, "in_blocks", "all(side % listed == 0 for side, listed in zip(self.block, block))", "True"
        ),
    },
    selector_guards.budgets_are_exact: {
        "the last of equal scores comes first": Edit(
            BUDGET, "_keys", "xp.arange(scores.shape[-1])", "xp.arange(scores.shape[-1])[::-1]"
        ),
        "forced blocks are taken by their scores": Edit(
            BUDGET, "_keys", "xp.where(forced, _FORCED, places)", "places"
        ),
        "forced blocks beyond the budget are dropped": Edit(
            BUDGET, "choose", "xp.clip(last, _NOT_FORCED - 1, _NOT_ELIGIBLE - 1)", "xp.minimum(last, _NOT_ELIGIBLE - 1)"
        ),
        "blocks that are not eligible hold mass": Edit(
            BUDGET, "choose", "shares if eligible is None else shares * eligible", "shares"
        ),
        "the last block does not count": Edit(BUDGET, "_last_needed", "~(before >= ", "~(sums >= "),
        "few blocks are enough": Edit(
            BUDGET, "choose", "max(budget.top_k or 0, budget.min_blocks)", "budget.top_k or 0"
        ),
        "-0 is less than 0": Edit(
            BUDGET, "_keys", "np.float32(0) - xp.fmax(scores, -np.inf)", "-xp.fmax(scores, -np.inf)"
        ),
    },
    selector_guards.selections_are_right: {
        "an index allows what the mask hides": Edit(
            GRID, "Grid.index", "pattern if self.mask == Band() else pattern & self.mask", "pattern"
        ),
        "queries of a group are not reversed": Edit(GRID, "of_strides", "groups[..., ::-1, :]", "groups"),
        "sums of scores are not means": Edit(ESTIMATES, "antidiagonal", "grid.scale / stride", "grid.scale"),
        "compressed keys may end after the query": Edit(NSA, "nsa", "stairs(1, stride, length)", "stairs(1, 1)"),
        "a compressed key lies in its first block": Edit(
            MASKED, "mass_of_blocks", "pieces[..., n : n + mass.shape[-1]] += mass",
            "pieces[..., : mass.shape[-1]] += mass",
        ),
    },
    selector_guards.masked_selections_are_right: {
        "a mean is over all keys of a block": Edit(
            MASKED, "_of_mean_keys", "number = xp.maximum(attended.sum(axis=-2), 1)", "number = grid.block[1]"
        ),
        "queries without a key are in the mean": Edit(
            MASKED, "MaskedBlocks.queries", "self.has_key[..., None], wide, wide.dtype.type(0)", "True, wide, wide"
        ),
        "hidden blocks take part in the softmax": Edit(
            MASKED, "mass_of_means", "blocks.states != 0", "blocks.states != 9"
        ),
        "keys that a query does not attend have scores": Edit(
            MASKED, "sums_by_query", "s = xp.where(cut.allowed, products(", "s = xp.where(cut.allowed | True, products("
        ),
        "runs may end after the query": Edit(MASKED, "mass_of_runs", "if grid.is_causal:", "if False:"),
        "an antidiagonal has keys that its row does not attend": Edit(
            MASKED, "mass_of_antidiagonals", "xp.where(attended, of_keys.of(cut, cut.keys), 0)",
            "of_keys.of(cut, cut.keys)",
        ),
        "bounds are over hidden keys": Edit(
            MASKED, "bounds_of_pages", "xp.where(attended, keys, end)", "keys"
        ),
        "blocks that end after the query are chosen": Edit(
            MASKED, "mass_by_query", "counts > 0 if is_past is None else (counts > 0) & is_past", "counts > 0"
        ),
        "the last queries attend nothing": Edit(
            MASKED, "last_queries", "at.where(blocks.live, number, number - shape.seqlen_q)", "number + 0 * blocks.live"
        ),
        "masks of some heads are those of all": Edit(
            MASKED, "MaskedBlocks.cut", "1 if index.num_heads > 1 else shape.num_heads", "1"
        ),
        "blocks that are hidden from a query keep their sums": Edit(
            MASKED, "sums_by_query", "xp.where(xp.broadcast_to(is_full, shown), sums, sums.dtype.type(0))",
            "sums.copy()",
        ),
    },
    selector_guards.selectors_take_caches: {
        "a page as long as the capacity is none": Edit(
            PAGES, "_of_cache", "if block is None and page_size is None", "if (cache.page_size or 64) < cache.capacity"
        ),
        "16-bit queries meet 32-bit rows": Edit(
            PAGES, "_of_cache", "q = q.astype(np.float32, copy=False)", "pass"
        ),
    },
    selector_guards.densities_are_counted: {
        "a density is rounded up twice": Edit(BUDGET, "Budget.part", "* (1 - 2**-50)", "* (1 + 2**-50)"),
        "a density is a mass": Edit(
            BUDGET, "choose", "if budget.density is None else xp.ones(scores.shape)", "* 1"
        ),
    },
}  # fmt: skip
