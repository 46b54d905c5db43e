"""Planted faults in kernels for queries that choose their own blocks: lists joined on a device, tiles, and plans."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from cuflash import masks, sim
from cuflash.compiler import source
from cuflash.executors.sim import Simulator
from cuflash.masks import ChosenBlocks, MaskShape
from library_parts import part
from mutations.planting import Edit
from test_chosen_kernels import (
    INTEGERS, SIM80, SIM90, case_of_many_blocks, check_bits_of_large_groups, check_columns, check_far_columns,
    check_group, check_many_members, check_parts, check_scores, check_signs, check_unions, check_unions_of_index,
)  # fmt: skip

import cuflash

SIGNS = (AssertionError, sim.SimulationError)  # exceptions with which a guard reports a fault
CAUSAL = masks.Causal("bottom_right")


def _cases() -> list[tuple[MaskShape, ChosenBlocks, masks.Mask | None, int]]:
    """Return lists of groups of several sizes, in several layouts, with several interval masks."""
    rng, shape = np.random.default_rng(0), MaskShape((2, 3), 6, 130, 300)
    by_group = rng.integers(-1, 5, (2, 1, 130, 2, 4)).swapaxes(-3, -2)
    counts = rng.integers(0, 4, (2, 1, 2, 130), endpoint=True).astype(np.uint8)
    near, far = rng.integers(0, 19, (6, 130, 4)), rng.choice([-9, 20, 2**32, 2**40], (6, 130, 4))
    wild = np.where(rng.random((6, 130, 4)) < 0.2, far, near)
    return [
        (shape, ChosenBlocks(by_group, 64, counts=counts), None, 2),
        (shape, ChosenBlocks(wild, 16), None, 2),
        (shape, ChosenBlocks(by_group, 64), CAUSAL & masks.Lengths(kv=280), 2),
        (shape, ChosenBlocks(wild, 16), masks.SlidingWindow(40, 9, "top_left"), 2),
        (shape, ChosenBlocks(rng.integers(0, 5, (130, 2)).astype(np.int32), 64), CAUSAL, 2),
        (MaskShape((), 1, 80, 200), ChosenBlocks(rng.integers(0, 4, (80, 3)), 64), CAUSAL, 1),
        (shape, ChosenBlocks(by_group[:1], 64), CAUSAL & masks.Lengths(kv=rng.integers(50, 300, (2, 3))), 2),
    ]


def lists_are_joined() -> None:
    """Check that kernels join lists as NumPy does, in any order of threads."""
    for number, case in enumerate(_cases()):
        schedule = sim.Schedule(seed=number, order=("random", "priorities")[number % 2], shuffle_lanes=True)
        check_unions(cuflash, case, Simulator(schedule))


def _cases_of_indices() -> list[tuple[Any, ...]]:
    """Return blocks of indices, of heads, batch entries and row intervals of all kinds, as `cases_of_indices` does."""
    rng, shape = np.random.default_rng(0), MaskShape((2, 3), 4, 70, 300)

    def pattern(*leading: int) -> masks.BlockPattern:
        return masks.BlockPattern(rng.random((*leading, 70, 5)) < 0.4, (1, 64))

    return [
        (shape, pattern(2, 3, 4), None, CAUSAL, 2), (shape, pattern(1, 1, 1), masks.Lengths(kv=200), CAUSAL, 2),
        (shape, pattern(1, 1, 4), None, None, 4),
    ]  # fmt: skip


def lists_of_an_index_are_joined(library: ModuleType = cuflash) -> None:
    """Check that the kernel joins the lists of a block index as NumPy does, in any order of threads."""
    for number, case in enumerate(_cases_of_indices()):
        schedule = sim.Schedule(seed=number, order=("random", "priorities")[number % 2], shuffle_lanes=True)
        check_unions_of_index(library, case, Simulator(schedule))


def indices_are_read(library: ModuleType) -> None:
    lists_of_an_index_are_joined(library)


def counts_keep_their_sign() -> None:
    for dtype in INTEGERS:
        check_signs("sim", dtype)


def queries_are_listed() -> None:
    """Check that kernels list the queries of each block as NumPy does, in any order of threads."""
    long = MaskShape((), 2, 5000, 200)  # spans several chunks
    lists = ChosenBlocks(np.random.default_rng(0).integers(-1, 4, (5000, 2)), 64)
    for number, case in enumerate([*_cases(), (long, lists, None, 1)]):
        schedule = sim.Schedule(seed=number, order=("random", "priorities")[number % 2], shuffle_lanes=True)
        check_columns(cuflash, case, Simulator(schedule))


def many_blocks_come_in_ranges() -> None:
    check_unions(cuflash, case_of_many_blocks())
    check_columns(cuflash, case_of_many_blocks())


def pairs_are_numbered(library: ModuleType) -> None:
    check_many_members(library)


def tiles_are_right() -> None:
    """Check all results of groups whose heads or queries do not fill a tile, with and without intervals."""
    check_group(cuflash, 12, 64, CAUSAL & masks.Lengths(kv=170))
    check_group(cuflash, 3, 64)


def sums_of_few_heads_are_right() -> None:
    """Check dQ of groups whose backward kernel adds to it, a row at a time."""
    check_group(cuflash, 6, 64, CAUSAL)
    check_far_columns(cuflash)


def large_groups_and_single_heads_are_right() -> None:
    check_group(cuflash, 80, 64, CAUSAL)
    check_far_columns(cuflash)


def large_groups_repeat() -> None:
    check_bits_of_large_groups(SIM80)


def large_groups_repeat_on_hopper() -> None:
    """Assert the same bits if each thread block takes several tiles of part of a group's heads."""
    check_bits_of_large_groups(SIM90)


def scores_are_right() -> None:
    check_scores(cuflash, "alibi")


def parts_are_added() -> None:
    """Check that several thread blocks share the keys of a block that many queries chose."""
    check_parts(cuflash)
    check_parts(cuflash, 9, 128)


def tiles_on_hopper_are_right() -> None:
    """Check all results of the kernels with TMA, for groups that fill a tile's rows and groups that do not."""
    check_group(cuflash, 12, 64, CAUSAL & masks.Lengths(kv=170), "sm90")
    check_far_columns(cuflash, "sm90", 9)


def parts_on_hopper_are_added() -> None:
    check_parts(cuflash, kernel="sm90")


def plans_are_right(library: ModuleType) -> None:
    """Check that tilings, and unions of lists on the host, give correct results for any number of lists."""
    part(library, "compiler.source").KERNELS = source.KERNELS  # a copy of the library has no kernels
    check_group(library, 6, 64, CAUSAL)
    check_far_columns(library)


def sources_are_right(library: ModuleType) -> None:
    for case in _cases():
        check_unions(library, case)


UNIONS, LIST, COLUMNS = "lists/unions.cu", "lists/chosen.cuh", "lists/columns.cuh"
COUNT, SCAN, FILL = "lists/columns_count.cu", "lists/columns_scan.cu", "lists/columns_fill.cu"
KEYS, GATHERED, COPY_WARPS = "sm90/kv_producer.cuh", "sm90/gathered_queries.cuh", "sm90/q_copy_warps.cuh"
MEMBERS, COPY, PLAN = "attention/members.cuh", "tile/copy_async.cuh", "planning/chosen_lists.py"
QUERY_LISTS, INTERVALS = "planning/query_lists.py", "planning/interval_kernels.py"
FAULTS = {
    lists_are_joined: {
        "-1 is block 0": Edit(
            LIST, "ChosenList.at", "block = blocks_.at(place);", "block = blocks_.at(place) + (blocks_.at(place) < 0);"
        ),
        "numbers behind the last block are blocks": Edit(
            LIST, "ChosenList.at", "|| block >= params_.num_blocks", ""
        ),
        "the entry behind the last counts": Edit(LIST, "ChosenList.at", "place >= count_", "place > count_"),
        "counts are not read": Edit(LIST, "ChosenList.ChosenList", "count_ = counts.at(query);", ""),
        "a bit is that of the next query": Edit(UNIONS, "lists_unions", "1u << row % 32", "1u << (row + 1) % 32"),
        "all bits are in the first word": Edit(UNIONS, "lists_unions", "num_words + row / 32]", "num_words]"),
        "a repeated entry clears its bit": Edit(UNIONS, "lists_unions", "atomicOr(", "atomicXor("),
        "words of the tile before are left": Edit(UNIONS, "lists_unions", "words[x] = 0;", "words[x] &= 1;"),
        "entries start where the last lane is": Edit(
            UNIONS, "lists_unions", "__popc(chosen & ((1u << lane) - 1))", "lane"
        ),
        "list heads share lists": Edit(UNIONS, "lists_unions", "head = batch_head % params.num_heads;", "head = 0;"),
        "batch entries share lists": Edit(UNIONS, "lists_unions", "batch_head / params.num_heads,", "0,"),
        "queries that see no key of a block choose it": Edit(
            LIST, "ChosenList.at", "return is_seen ? static_cast<int>(block) : -1;", "return static_cast<int>(block);"
        ),
        "batch entries share intervals": Edit(
            LIST, "ChosenList.ChosenList", "batch_entry * params.rows_batch_stride + query", "query"
        ),
        "a block ends before its last key": Edit(LIST, "ChosenList.at", "first + params_.block;", "first + 1;"),
    },
    lists_of_an_index_are_joined: {
        "a list starts where the one before it does": Edit(
            LIST, "ChosenList.ChosenList", "blocks_.data += start * params.blocks_stride;",
            "blocks_.data += counts.at(max(query - 1, 0)) * params.blocks_stride;",
        ),
        "a list has the entries of all before it": Edit(
            LIST, "ChosenList.ChosenList", "count_ = counts.at(query + 1) - start;", "count_ = counts.at(query + 1);"
        ),
        "a tile's lists are as long as its first": Edit(
            LIST, "longest_list", "longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, offset));",
            "longest = __shfl_sync(0xffffffffu, longest, 0);",
        ),
        "a tile's lists have no entry beyond the last lane's": Edit(
            LIST, "longest_list", "offset > 0", "offset > 8"
        ),
    },
    queries_are_listed: {
        "a query counts once for each tile": Edit(
            COLUMNS, "count_queries", "+= __popcll(word)", "+= 1"
        ),
        "sums hold the chunk itself": Edit(
            SCAN, "lists_columns_scan", "count_of(chunk) = before;", "count_of(chunk) = before + own[chunk];"
        ),
        "list heads write over each other": Edit(
            SCAN, "lists_columns_scan", "blockIdx.x * chosen.max_members", "0"
        ),
        "a place is not advanced": Edit(FILL, "lists_columns_fill", "of_warp[block - base] = place;", ""),
        "warps write over each other": Edit(FILL, "lists_columns_fill", "place += count;", ""),
        "a warp is not counted": Edit(
            COUNT, "lists_columns_count", "count += counts[warp * chosen.blocks_at_once + block];",
            "if (warp > 0) count += counts[warp * chosen.blocks_at_once + block];",
        ),
        "queries are counted from the tile": Edit(
            FILL, "lists_columns_fill", "tile * chosen.queries_per_tile", "0"
        ),
        "chunks start at their block": Edit(
            FILL, "lists_columns_fill", "+ chunk.counts(chosen)[base + block]", ""
        ),
        "the last chunk is longer than the tiles": Edit(
            COLUMNS, "Chunk.Chunk", "min(first_tile + kTilesOfWarp, chosen.num_tiles)",
            "first_tile + kTilesOfWarp - (number == chosen.num_chunks - 1)",
        ),
    },
    many_blocks_come_in_ranges: {
        "ranges begin at 0 twice": Edit(
            UNIONS, "lists_unions", "params.kv_blocks[place] = base + block;", "params.kv_blocks[place] = block;"
        ),
        "counts of later ranges are lost": Edit(
            COUNT, "lists_columns_count", "[base + block] = count;", "[base + block] = base > 0 ? 0 : count;"
        ),
        "the last blocks of a range are left out": Edit(
            COLUMNS, "for_each_entry", "block < last)", "block < last - 300)"
        ),
    },
    tiles_are_right: {
        "a tile has the entries of the one before": Edit(
            MEMBERS, "visit_range_of_tile", "* chosen.num_tiles + tile)", "* chosen.num_tiles + max(tile - 1, 0))"
        ),
        "idle rows are stored": Edit(
            MEMBERS, "rows_of_tile", "(work.last - work.first) * chosen.heads_per_tile", "64"
        ),
        "neighbours see each other's blocks": Edit(
            MEMBERS, "row_mask_of_neighbour", "if ((word >> number & 1) == 0) return {0, 0, nullptr, 0};", ""
        ),
        "a block that all chose is whole": Edit(
            "sm80/forward.cu", "sm80_forward", "!is_unmasked<kBlockKv>(block) || !members.has_all()",
            "!members.has_all()",
        ),
        "a block that is whole was chosen by all": Edit(
            "sm80/forward.cu", "sm80_forward", "!is_unmasked<kBlockKv>(block) || !members.has_all()",
            "!is_unmasked<kBlockKv>(block)",
        ),
        "warps skip blocks of their last query": Edit(
            MEMBERS, "queries_of_rows", "~0ull >> (63 - last) & ~0ull << first", "1ull << first"
        ),
        "each step has the word of the next": Edit(
            "sm80/backward_rows.cu", "sm80_backward_rows", "members.read(block);",
            "members.read(has_next_block ? next_block : block);",
        ),
        "dQ lacks the last entry": Edit(
            MEMBERS, "visit_range_of_tile", "visit_range.last_entry = range[1];",
            "visit_range.last_entry = Config::kIsBackward ? range[1] - 1 : range[1];",
        ),
        "list heads are those of query heads": Edit(
            MEMBERS, "list_head", "divmod(batch_head.head, chosen.heads_per_list).quotient", "batch_head.head % 2"
        ),
        "batch entries share lists": Edit(MEMBERS, "list_head", "batch_head.batch_index * chosen.batch_stride +", ""),
        "queries before an interval visit keys": Edit(
            MEMBERS, "visit_range_of_keys", "place_of(queries.full_start), place_of(queries.full_stop)",
            "place_of(queries.start), place_of(queries.stop)",
        ),
        "gathered rows are those of neighbours": Edit(
            COPY, "GatheredRows.row", "matrices[i / first.num_rows]", "(matrices[0] + i / first.num_rows)"
        ),
        "columns of the block before": Edit(
            MEMBERS, "Column.Column", "+ block.quotient;", "+ max(block.quotient - 1, 0);"
        ),
    },
    sums_of_few_heads_are_right: {
        "all queries have the first one's sums": Edit(
            "attention/epilogue_mma.cuh", "dq_sum_rows", "rows.row_stride = kHeadDim;", "rows.row_stride = 0;"
        ),
        "a run has its first columns twice": Edit(
            "tile/accumulator_layout.cuh", "RowLayout.atomic_add", "second[0], second[1]", "first[0], first[1]"
        ),
        "a row has the sums of the one before": Edit(
            "tile/accumulator_layout.cuh", "RowLayout.for_each_run", "rows.row(row) +", "rows.row(max(row - 1, 0)) +"
        ),
        "sums are those of the first head of a group": Edit(
            "sm80/backward.cu", "save_head_state", "matrix<float>(params.dq_sum, batch_head, batch_head.head, 0, 0)",
            "matrix<float>(params.dq_sum, batch_head, 0, 0, 0)",
        ),
        "tiles of the head before are converted": Edit(
            "sm80/convert_dq.cu", "tile_to_convert",
            "return attention::tile_of_block<Listed>(params, chosen, kBlockQ);",
            "auto work = attention::tile_of_block<Listed>(params, chosen, kBlockQ);"
            "work.batch_head.head = max(work.batch_head.head - 1, 0); return work;",
        ),
    },
    scores_are_right: {
        "rows are head after head": Edit(
            MEMBERS, "head_and_query_of_neighbours", "divmod(row, chosen.heads_per_tile)",
            "divmod(row, chosen.queries_per_tile)",
        ),
        "rows have the first head's function": Edit(
            MEMBERS, "head_and_query_of_neighbours", "work.batch_head.head + number.remainder", "work.batch_head.head"
        ),
        "gathered rows are neighbours": Edit(
            "attention/members_slopes.cuh", "scores_to_p_and_ds_of_step",
            "chosen.queries[min(block.start + number.quotient, block.stop - 1)]",
            "min(chosen.queries[block.start] + number.quotient, params.shape.seqlen_q - 1)",
        ),
        "masked scores have slopes": Edit(
            "attention/members_slopes.cuh", "scores_to_p_and_ds_of_heads", "!is_masked || !is_masked_score(s.at(i, j))",
            "true",
        ),
    },
    large_groups_and_single_heads_are_right: {
        "a group has one tile of heads": Edit(
            "sm80/backward.cu", "sm80_backward", "head += heads_per_tile(chosen)", "head += shape.group_size"
        ),
        "the next tile of heads is the next head": Edit(
            "sm80/backward.cu", "begin_next_head", "+= attention::heads_per_tile(chosen)", "+= 1"
        ),
        "rows that fill no chunk are copied whole": Edit(
            "sm80/backward.cu", "load_block", "if (__builtin_expect(state.rows_fill_tiles, true)) {", "if (true) {"
        ),
    },
    large_groups_repeat: {
        "a tile of heads is read before it is stored": Edit(
            "sm80/backward.cu", "sm80_backward", "begin_next_head(params, chosen, state); __syncthreads();",
            "begin_next_head(params, chosen, state); if (head == 0) __syncthreads();",
        ),
        "a tile's gradient is stored while its queries arrive": Edit(
            "sm80/backward_rows.cu", "sm80_backward_rows",
            "ptx::cp_async_wait<0>(); __syncthreads(); dq.scale", "dq.scale",
        ),
    },
    large_groups_repeat_on_hopper: {
        "a tile's queries arrive while the last are read": Edit(
            KEYS, "KvProducer.load_keys", "wait_slot_empty(q, q_phase_of(num_tiles_done)); load_queries<kQ>",
            "load_queries<kQ>",
        ),
    },
    parts_are_added: {
        "a part has the queries of all": Edit(
            MEMBERS, "Column.last", "min(first(chosen) + chosen.queries_per_part, chosen.column_pointers[number + 1])",
            "chosen.column_pointers[number + 1]",
        ),
        "the last part is not added": Edit(
            "attention/column_parts.cuh", "add_parts", "part < num_parts;", "part < num_parts - 1;"
        ),
        "a block of one part more has none": Edit(
            SCAN, "lists_columns_scan", "(length + per_part - 1) / per_part", "length / per_part"
        ),
    },
    tiles_on_hopper_are_right: {
        "a warp skips blocks that only some of its queries chose": Edit(
            KEYS, "KvProducer.flags_of_members", "(members & own) == 0", "(members & own) != own"
        ),
        "blocks that a query of the warp chose are whole": Edit(
            KEYS, "KvProducer.flags_of_members", "(members & own) == own ? flags", "true ? flags"
        ),
        "warps have the members of the first": Edit(
            KEYS, "KvProducer.queries_of_lane", "16 * (tile::lane() % kNumFlags)", "0"
        ),
        "boxes have the tile's first query": Edit(
            KEYS, "KvProducer.load_queries", "tile_info.work.first + x", "tile_info.work.first"
        ),
        "boxes follow each other row by row": Edit(
            KEYS, "KvProducer.load_queries", "2 * x * heads * to.width", "2 * x * to.width"
        ),
        "weights of a skipped block are scores": Edit("sm90/forward.cu", "process_other_block", "s.fill(0);", ""),
        "gradients of a skipped block count": Edit("sm90/backward_rows.cu", "process_tile", "ds.clear();", ""),
        "lse of a tile is delta": Edit(
            "sm90/backward_rows.cu", "row_statistics", "rows_of_tile<float>(chosen, params.lse, work, 1)",
            "rows_of_tile<float>(chosen, params.delta, work, 1)",
        ),
        "slots of idle rows are left": Edit(
            GATHERED, "clear_rows_past_boxes", "tile::clear_rows_from(tile::TmaBoxes(do_smem(stage)), num_rows);", ""
        ),
        "the first step reads the column before": Edit(
            GATHERED, "step_before", "max(first, stop - chosen.queries_per_tile)", "stop - chosen.queries_per_tile"
        ),
        "gathered queries see all keys": Edit(
            GATHERED, "own_query", "keys.lo <= work.first && keys.hi >= work.last", "true"
        ),
        "lanes gather the same rows": Edit(GATHERED, "gather", "ptx::lane() * box_bytes", "0"),
        "statistics are the first head's": Edit(
            COPY_WARPS, "store_statistics", "(in_bounds ? number_and_head.remainder : 0)", "0"
        ),
        "masks are those of the first query": Edit(
            COPY_WARPS, "compute_row_masks", "shared().queries_of_steps[stage][number]",
            "shared().queries_of_steps[stage][0]",
        ),
        "threads copy rows of the first query": Edit(
            COPY_WARPS, "copy_queries", "shared().queries_of_steps[stage][query_and_head.quotient]",
            "shared().queries_of_steps[stage][0]",
        ),
    },
    parts_on_hopper_are_added: {
        "each part is the first": Edit(
            GATHERED, "load_part", "const Column column(params, chosen, work, part, kBlockKv);",
            "const Column column(params, chosen, work, 0, kBlockKv);",
        ),
        "parts without a query clear gradients": Edit(GATHERED, "load_part", "if (part > 0) return false;", ""),
        "sums of parts have one place": Edit(
            "sm90/backward_epilogue.cuh", "add_parts", "shared().parts[work_slot].number", "0"
        ),
    },
    plans_are_right: {
        "a tile has more heads than share its list": Edit(
            PLAN, "UnionTiling.heads_per_tile", "math.gcd(self.heads_per_list, self.group_size)", "self.group_size"
        ),
        "a tile has heads of two keys": Edit(
            PLAN, "UnionTiling.heads_per_tile", "math.gcd(self.heads_per_list, self.group_size)", "2 * self.group_size"
        ),
        "lists are shared by the batch": Edit(
            PLAN, "UnionTiling.values", "self.num_lists if self.batch > 1 else 0", "0"
        ),
        "one list is that of each head": Edit(PLAN, "UnionTiling.values", "int(self.num_lists > 1)", "0"),
    },
    counts_keep_their_sign: {
        "counts have a sign": Edit("lists/chosen.cuh", "ChosenList", "params.is_counts_signed != 0", "true"),
        "counts have no sign": Edit("lists/chosen.cuh", "ChosenList", "params.is_counts_signed != 0", "false"),
    },
    pairs_are_numbered: {
        "two pairs need not be added": Edit(
            PLAN, "UnionTiling.can_be_numbered", "2 * self.num_list_heads", "self.num_list_heads"
        ),
    },
    indices_are_read: {
        "batch entries share the lists of an index": Edit(
            QUERY_LISTS, "QueryLists._of_index", "varies = np.dtype(np.int32), index.batch > 1",
            "varies = np.dtype(np.int32), False",
        ),
        "heads share the lists of an index": Edit(
            QUERY_LISTS, "QueryLists._of_index", "num_lists=index.num_heads", "num_lists=1"
        ),
        "lists of an index end where the next but one starts": Edit(
            QUERY_LISTS, "QueryLists._of_index", "index.num_heads, shape.seqlen_q))",
            "index.num_heads, shape.seqlen_q + 1))",
        ),
        "numbers of entries are read as blocks": Edit(
            QUERY_LISTS, "QueryLists.starts", 'offsets["kv_blocks"]', 'offsets["q_blocks"]'
        ),
        "the row intervals of an index are not read": Edit(
            PLAN, "_closed_rows", "lists.carried is not None and lists.carried.rows is not None", "False"
        ),
    },
    sources_are_right: {
        "strides of axes of one entry count": Edit(INTERVALS, "moving_strides", "step if extent != 1 else 0", "step"),
        "leading axes come first": Edit(
            QUERY_LISTS, "QueryLists.numbers", '"blocks_batch_strides": over_batch(of_batch, 0),',
            '"blocks_batch_strides": (*of_batch, *over_batch((), 0))[:3],',
        ),
        "batch entries have the lengths of the first": Edit(
            PLAN, "UnionSource._numbers", "leading_strides(self.attended.lo)[0]", "0"
        ),
        "lists that a batch shares are joined once": Edit(
            PLAN, "_work_at_call", "batch, rows = max(batch, intervals.batch), intervals.rows", "rows = intervals.rows"
        ),
        "arrays have the order of the masks": Edit(
            "masks/one_array.py", "mask_contents", "arrays = *form.arrays, *arrays", "arrays = *arrays, *form.arrays"
        ),
        "bands hide nothing": Edit(
            PLAN, "UnionSource._numbers", "(None, None) if band is None else (band.lower, band.upper)", "(None, None)"
        ),
    },
}  # fmt: skip
