"""Planted faults in blocks that each query chooses: lists as sets, unions of neighbors, grouped heads, merges."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st
from mutations.calls import refuses
from mutations.mask_inputs import numbers_are_right
from mutations.planting import Edit
from mutations.python_guards import hunt, part
from test_chosen_blocks import (
    DRAWN_FOR_MERGES,
    check_distinct,
    check_empty_parts,
    check_far_numbers_on_a_device,
    check_index,
    check_merge,
    check_merge_by_steps,
    check_narrow_steps,
    check_other_rows,
    check_results,
    check_table,
)

# Exceptions with which a guard reports a fault: shapes that do not match, or an index out of range, count too.
SIGNS = (AssertionError, ValueError, IndexError)
NUMBERS = st.integers(0, 2**32 - 1)


def shapes_and_lists(library: ModuleType, lists: Any = None) -> st.SearchStrategy[Any]:
    """Draw shapes with several heads and blocks, and lists for them."""
    lists = lists or part(library, "testing.mask_strategies").chosen_blocks
    shape_of = part(library, "masks.shape").MaskShape
    shapes = st.builds(
        lambda batch, kv, q: (shape_of(batch, 6, q, kv), 2), st.sampled_from([(), (2,), (2, 3)]), st.integers(1, 150),
        st.integers(1, 40),
    )  # fmt: skip
    return shapes.flatmap(lambda pair: st.tuples(st.just(pair[0]), lists(*pair)))


def examples(library: ModuleType, **changed: Any) -> st.SearchStrategy[Any]:
    drawn = {"dtypes": ["float64"], "most_scores": 1 << 14, "longest": 150, "widest": 16} | changed
    return part(library, "testing").chosen(**drawn)


def lists_are_their_sets(library: ModuleType) -> None:
    """Check that a mask equals the sets in its lists, by elements and as an index."""
    hunt(shapes_and_lists(library), seeds=2)(lambda drawn: check_table(library, drawn))


def numbers_count_in_sequences(library: ModuleType) -> None:
    """Check that numbers count from the first key of a query's sequence."""
    masks, strategies = part(library, "masks"), part(library, "testing.mask_strategies")
    shape = masks.MaskShape((), 6, 40, 90)
    telling = []
    for ends in ((0, 48, 90), (0, 30, 90)):
        sequences = masks.Sequences(np.array([0, 22, 40]), np.array(ends), causal="bottom_right")
        blocks = np.random.default_rng(0).integers(-1, 1, (2, 40, 3))
        blocks[:, ::3, 2] = 1 - np.arange(40)[::3] // 22 * (ends[1] == 48)
        telling.append((shape, masks.ChosenBlocks(blocks, 32 if ends[1] == 48 else 24, sequences=sequences)))
    drawn = shapes_and_lists(library, strategies.chosen_in_sequences)
    hunt(drawn, first=[(each,) for each in telling], seeds=2)(lambda drawn: check_table(library, drawn))


def lists_come_back(library: ModuleType) -> None:
    hunt(shapes_and_lists(library), seeds=1)(lambda drawn: check_index(library, drawn))


def unions_are_counted(library: ModuleType) -> None:
    hunt(shapes_and_lists(library), st.integers(2, 9), seeds=1)(
        lambda drawn, queries: check_distinct(library, drawn, queries)
    )


def far_numbers_are_ignored(library: ModuleType) -> None:
    check_far_numbers_on_a_device(library)


def telling_example(library: ModuleType) -> Any:
    """Return an example whose queries attend parts of blocks, singly and in groups, in several tiles on both sides."""
    masks = library.masks
    blocks = np.random.default_rng(0).integers(-1, 10, (2, 2, 150, 3))
    mask = masks.ChosenBlocks(blocks, 16) & masks.SlidingWindow(90, 5) & masks.Lengths(kv=140)
    of = part(library, "testing.strategies").Structure
    shape = {"num_heads": 6, "num_kv_heads": 2, "seqlen_q": 150, "seqlen_kv": 150, "dtype": "float64"}
    return of(**shape, q_batch=(2,), k_batch=(2,), v_batch=(2,), mask=mask).example()


def results_are_right(library: ModuleType) -> None:
    """Check that results and gradients of chosen blocks, alone and within row intervals, are within their bounds."""
    check_results(library, telling_example(library))
    hunt(examples(library), seeds=1, most=40)(lambda example: check_results(library, example))


def narrow_steps_are_right(library: ModuleType) -> None:
    check_narrow_steps(library, telling_example(library), 16)


def queries_are_apart(library: ModuleType) -> None:
    drawn = examples(library, has_intervals=False), NUMBERS, NUMBERS
    hunt(*drawn, seeds=1, most=40)(lambda example, row, seed: check_other_rows(library, example, row, seed))


def branches_merge(library: ModuleType) -> None:
    """Check that disjoint lists merge to their union, with gradients."""
    drawn = part(library, "testing").chosen(**DRAWN_FOR_MERGES), NUMBERS
    lists = library.masks.ChosenBlocks(np.random.default_rng(0).integers(-1, 6, (2, 40, 4)), 8)
    of = part(library, "testing.strategies").Structure
    telling = of(num_heads=4, num_kv_heads=2, seqlen_q=40, seqlen_kv=48, mask=lists).example()
    hunt(*drawn, first=[(telling, 1)], seeds=1, most=20)(lambda example, seed: check_merge(library, example, seed))


def merges_have_derivatives(library: ModuleType) -> None:
    check_merge_by_steps(library)


def empty_parts_are_left_out(library: ModuleType) -> None:
    check_empty_parts(library)


def full_blocks_beyond_intervals_are_seen(library: ModuleType) -> None:
    """Check that an index with full blocks beyond its row intervals allows all elements of these blocks."""
    index = library.BlockIndex.from_mask(library.masks.Causal(), 6, 6, (1, 2))
    whole = replace(index, kinds=np.ones_like(index.kinds))
    q, k, v = np.zeros((6, 1)), np.zeros((6, 1)), np.eye(6)
    assert ((library.attention(q, k, v, mask=whole) > 0) == whole.toarray()[0, 0]).all()


def call(**options: Any) -> Any:
    """Return a call with two key/value heads, four queries and eight keys, for lists of blocks of 4."""

    def attend(library: ModuleType) -> Any:
        q, k = np.ones((4, 4, 2), np.float32), np.ones((2, 8, 2), np.float32)
        arguments = {"blocks": np.zeros((2, 4, 2), int), "block": 4} | options
        return library.attention(q, k, k, mask=library.masks.ChosenBlocks(**arguments))

    return attend


FILE, WORK, MERGE = "masks/_chosen.py", "blocks/_chosen_work.py", "merging.py"
FAULTS = {
    lists_are_their_sets: {
        "-1 is a block": Edit(FILE, "sorted_sets", "is_first = blocks >= 0", "is_first = blocks >= -1"),
        "lists are not sorted": Edit(FILE, "sorted_sets", "blocks.sort(axis=-1)", "pass"),
        "counts are not looked at": Edit(FILE, "sorted_sets", "if counts is not None:", "if False:"),
        "the entry behind the last counts": Edit(FILE, "sorted_sets", "< counts[", "<= counts["),
        "heads share lists by remainder": Edit(
            FILE, "ResolvedChosen.__call__", "h // self.heads_of_list", "h % max(1, self.source.num_lists)"
        ),
        "rectangles are those of the first list": Edit(
            FILE, "ResolvedChosen.rectangle", "h // self.heads_of_list", "0 * h"
        ),
        "batch entries have the lists of the first": Edit(
            FILE, "ResolvedChosen.cells", "blocks = np.broadcast_to(blocks, (*batch, *blocks.shape[-3:]))",
            "blocks = blocks[(slice(0, 1),) * len(batch)]",
        ),
        "a block is one key longer": Edit(
            FILE, "ResolvedChosen.cells", "BlockSet(grid, (1, source.block)", "BlockSet(grid, (1, 1 + source.block)"
        ),
    },
    numbers_count_in_sequences: {
        "numbers count from key 0": Edit(FILE, "ResolvedChosen.__call__", "j - first", "j"),
        "parts beyond a sequence are those of the next query": Edit(
            FILE, "ChosenBlocks._in_blocks_of", "| (keys >= end[..., None, :, None, None])", ""
        ),
        "the parts of blocks do not divide them": Edit(
            FILE, "ChosenBlocks._aligned_block", "initial=self.block", "initial=self.block // 2 * 3"
        ),
        "a rectangle has the blocks of its first query's sequence": Edit(
            FILE, "ResolvedChosen.rectangle", "may | ~is_within_one", "may"
        ),
        "counts count parts": Edit(FILE, "ChosenBlocks._in_blocks_of", "astype(np.int64) * parts", "astype(np.int64)"),
    },
    far_numbers_are_ignored: {
        "numbers outside the blocks wrap around": Edit(
            FILE, "_chosen_cells", "place, None] == number", "place, None] % num_blocks == number"
        ),
        "lists on a device lack counts": Edit(FILE, "_chosen_cells", "if counts is None else", "if True else"),
    },
    lists_come_back: {
        "short lists end with block 0": Edit(
            "blocks/index_mask.py", "chosen_lists", "(counts.max(initial=0))), -1,", "(counts.max(initial=0))), 0,"
        ),
    },
    unions_are_counted: {
        "a repeated entry counts twice": Edit(
            FILE, "sorted_sets", "is_first[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]", "pass"
        ),
        "queries are not neighbours": Edit(
            FILE, "ChosenBlocks.distinct", "place[-2] // queries", "place[-2] % num_runs"
        ),
    },
    numbers_are_right: {
        "a compressed key is seen by its last key's neighbour": Edit(
            FILE, "Compressed.resolve", "1 - min(self.length, UNBOUNDED)", "2 - min(self.length, UNBOUNDED)"
        ),
        "strides beyond int64 divide as they are": Edit(
            FILE, "Compressed.resolve", "min(self.stride, UNBOUNDED)", "self.stride"
        ),
    },
    results_are_right: {
        "a bit is that of the next query": Edit(WORK, "Unions.of", "(row % height)", "((row + 1) % height)"),
        "a tile has the words of the tile before": Edit(
            WORK, "ChosenWork.row", "+ start // _TILE", "+ max(start // _TILE - 1, 0)"
        ),
        "the last entry of a tile is lost": Edit(
            WORK, "Unions.tile", "self.pointers[number + 1]", "self.pointers[number + 1] - 1"
        ),
        "a query's own block lacks its interval": Edit(
            WORK, "ChosenWork.row", "is_cut = bool(keys[0] < lo[-1] or keys[-1] >= hi[0])", "pass"
        ),
        "a block that an interval begins in is whole": Edit(
            WORK, "ChosenWork.hidden", "hidden[:before] |= j[:before, None] < lo", "pass"
        ),
        "keys of later neighbours are dropped": Edit(
            WORK, "ChosenWork.row", "first, end = int(lo[0]), int(hi[-1])", "first, end = int(lo[0]), int(hi[0])"
        ),
        "keys that all chose are seen beyond intervals": Edit(
            "blocks/_gathered_rows.py", "GatheredRows.is_partial", "self.words is not None or self.is_cut",
            "self.words is not None",
        ),
        "heads have the lists of others": Edit(
            WORK, "ChosenWork._matrix", "h // self.heads_of_list", "h % index.num_heads"
        ),
        "all heads visit what the first does": Edit(
            WORK, "ChosenWork.owner", "h // self.heads_of_list * self.heads_of_list", "0"
        ),
        "batch entries visit what the first does": Edit(
            WORK, "ChosenWork.owner", "b if max(index.batch, by_batch) > 1 else 0", "0"
        ),
        "a bit of a tile of keys is one key": Edit(
            WORK, "ChosenWork.column", "-(-(stop - start) // self.block), self.block, is_cut",
            "-(-(stop - start) // self.block), 1, is_cut",
        ),
        "a tile of keys visits the queries of the one before": Edit(
            WORK, "ChosenWork.column", "+ start // self.block_kv", "+ max(start // self.block_kv - 1, 0)"
        ),
        "queries before their keys give gradients": Edit(
            WORK, "ChosenWork.hidden", "hidden |= (j < lo) | (j >= hi)", "hidden |= j < lo"
        ),
        "queries that intervals cut are dropped": Edit(
            WORK, "ChosenWork.column", 'lo, stop - 1, side="right"', 'lo, start, side="left"'
        ),
        "bits are read from the last": Edit(
            "blocks/_gathered_rows.py", "GatheredRows.unvisited", 'bitorder="little"', 'bitorder="big"'
        ),
    },
    narrow_steps_are_right: {
        "each step has the words of the first": Edit(
            "blocks/_gathered_rows.py", "GatheredRows.parts", "self.words[part]", "self.words[: len(self.rows[part])]"
        ),
        "a step begins where the last one began": Edit(
            "blocks/_gathered_rows.py", "GatheredRows.parts", "part = slice(first, first + width)",
            "part = slice(max(first - 1, 0), first + width)",
        ),
    },
    queries_are_apart: {
        "a tile's keys are seen by all of its queries": Edit(
            WORK, "_gathered", "is_whole = bool((words == (1 << num_bits) - 1).all())", "is_whole = True"
        ),
    },
    full_blocks_beyond_intervals_are_seen: {
        "intervals of an index cut all of its blocks": Edit(
            WORK, "_is_cut_by_rows", "return bool(is_inside.all())", "return True"
        ),
    },
    branches_merge: {
        "a part has all of do": Edit(MERGE, "MergePullback.__call__", "weight[..., None] * wide", "wide"),
    },
    merges_have_derivatives: {
        "weights are not normalised": Edit(MERGE, "MergePullback.__call__", "xp.exp(lse - self.lse)", "xp.exp(lse)"),
        "dlse replaces the mean": Edit(MERGE, "MergePullback.__call__", "else dlse - mean", "else dlse"),
        "without dlse the mean is 0": Edit(MERGE, "MergePullback.__call__", "by_lse = -mean if", "by_lse = 0 if"),
        "the gradient of lse lacks its weight": Edit(
            MERGE, "MergePullback.__call__", "weight * (slope + by_lse)", "(slope + by_lse)"
        ),
    },
    empty_parts_are_left_out: {
        "an empty part is read": Edit(
            MERGE, "MergePullback.__call__", "xp.where(no_key, 0, (wide * out.astype(wide.dtype)).sum(axis=-1))",
            "(wide * out.astype(wide.dtype)).sum(axis=-1)",
        ),
        "an empty part has a share of do": Edit(
            MERGE, "MergePullback.__call__", "xp.where(no_key[..., None], 0, weight[..., None] * wide)",
            "(weight[..., None] * wide)",
        ),
        "an empty part has a share of dlse": Edit(
            MERGE, "MergePullback.__call__", "xp.where(no_key, 0, weight * (slope + by_lse))",
            "(weight * (slope + by_lse))",
        ),
    },
    refuses(call(blocks=np.zeros((2, 4, 2), np.float32)), "blocks must be an int32 or int64 array"): {
        "floats are numbers of blocks": Edit(
            FILE, "ChosenBlocks.__post_init__", "self.blocks.dtype not in _DTYPES or", ""
        ),
    },
    refuses(call(counts=np.ones((2, 4), ">i2")), "and dtype >i2: cast them to int64"): {
        "counts may have swapped bytes": Edit(
            FILE, "ChosenBlocks.__post_init__", "and self.counts.dtype.isnative", ""
        ),
    },
    refuses(call(block=0), "block must be an int of at least 1; got 0"): {
        "a block may be empty": Edit(FILE, "_size", 'whole_number("block", block, 1)', 'whole_number("block", block)'),
    },
    refuses(call(blocks=np.full((2, 4, 2), 2)), "to 1 (seqlen_kv=8 in blocks of 4); got 2 at (0, 0, 0)"): {
        "the number behind the last block is taken": Edit(
            FILE, "ChosenBlocks.require_numbers", "(blocks >= -(-keys", "(blocks > -(-keys"
        ),
    },
    refuses(
        lambda library: library.masks.ChosenBlocks(
            np.full((4, 1), 1), 4, sequences=library.masks.Sequences([0, 4], [0, 4], allow_gaps=True)
        ).toarray(4, 8),
        "to 0 (a sequence of 4 keys in blocks of 4); got 1 at (0, 0, 0)",
    ): {
        "numbers may be beyond a sequence": Edit(
            FILE, "ChosenBlocks.require_numbers", "np.maximum(end - first, 0)", "np.array(seqlen_kv)"
        ),
    },
    refuses(call(blocks=np.full((2, 4, 2), -2)), "got -2 at (0, 0, 0)"): {
        "any negative number is none": Edit(
            FILE, "ChosenBlocks.require_numbers", "(blocks < -1) |", ""
        ),
    },
    refuses(call(counts=np.full((2, 4), 3)), "counts must be ints in 0..2; got 3 at (0, 0)"): {
        "counts may be beyond the lists": Edit(
            FILE, "ChosenBlocks.require_numbers", "(counts < 0) | (counts > n)", "counts < 0"
        ),
    },
    refuses(call(blocks=np.zeros((4, 3, 2), int)), "blocks must have seqlen_q=4 rows; got 3"): {
        "rows are not counted": Edit(FILE, "ChosenBlocks.resolve", "if axes[-2] != shape.seqlen_q:", "if False:"),
    },
    refuses(
        lambda library: library.attention(
            np.ones((8, 4, 2)), *[np.ones((2, 8, 2))] * 2, mask=library.masks.ChosenBlocks(np.zeros((4, 4, 2), int), 4)
        ),
        "blocks must have 1, 2 (num_kv_heads) or 8 (num_heads) heads; got 4",
    ): {
        "lists may be of any groups of heads": Edit(
            "calls/_call.py", "_posed",
            "chosen.require_heads(whole.num_heads, whole.num_heads // max(1, problem.group_size))", "pass"
        ),
    },
}  # fmt: skip
