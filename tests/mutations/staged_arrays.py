"""Planted faults in arrays that sm90's kernels stage in shared memory, and in tables that they read once per step."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from cuflash.sim import Schedule, SimulationError
from executors import SIM
from mutations.planting import Edit
from test_staged_arrays import (
    check_hidden, check_layouts, check_maps, check_masks, check_plans, check_schedules, check_unaligned, check_zeros
)  # fmt: skip
from test_uniform_steps import check_bins, check_clipped, check_directions, check_distances, check_zero_weights

SIGNS = (AssertionError, ValueError, SimulationError)  # exceptions with which a guard reports a fault
_HOPPER = replace(SIM, kernel="sm90")


def staged_results_are_right() -> None:
    check_masks(_HOPPER, ("window", "lengths"))


def unaligned_steps_are_right() -> None:
    check_unaligned(_HOPPER)


def late_copies_are_waited_for() -> None:
    """Run consumers before the warp that copies a bias has waited for its copies, which complete one by one."""
    check_schedules([Schedule(seed=seed, order="priorities", copies="random") for seed in range(2)])


def layouts_change_no_bit() -> None:
    check_layouts(_HOPPER)


def hidden_elements_have_no_gradient() -> None:
    try:
        check_hidden(_HOPPER)
    except RuntimeError as error:  # of CUFLASH_CHECK
        assert "wrote outside" not in str(error)
        raise


def uniform_steps_are_right() -> None:
    check_clipped(_HOPPER)


def sums_by_distance_are_right() -> None:
    check_distances(_HOPPER)


def weights_of_zero_add_nothing() -> None:
    check_zero_weights(_HOPPER)


def arrays_are_staged_where_they_can_be(library: ModuleType) -> None:
    check_plans(library)


def tables_have_bins(library: ModuleType) -> None:
    check_bins(library)


def arrays_have_maps(library: ModuleType) -> None:
    check_maps(library)


def zeros_are_planned(library: ModuleType) -> None:
    check_zeros(library)


def monotone_integers_are_found(library: ModuleType) -> None:
    check_directions(library)


BINS, DIAGONALS, HIDDEN = "tile/thread_bins.cuh", "tile/diagonal_sums.cuh", "sm90/hidden_gradient.cuh"
STAGED, WEIGHTS, PRODUCER = "sm90/staged_array.cuh", "sm90/changed_weights.cuh", "sm90/kv_producer.cuh"
FAULTS = {
    staged_results_are_right: {
        "a step has the elements of the first keys": Edit(
            PRODUCER, "load_array_step", "slot.full, 0, block.start)", "slot.full, 0, 0)"
        ),
        "a warpgroup has the elements of another's queries": Edit(
            PRODUCER, "load_array_step", "first = work.first + 64 * consumer", "first = work.first"
        ),
        "every batch entry has the first one's elements": Edit(
            STAGED, "staged_coords", "return {at[0], at[1], at[2]};", "return {at[0], 0, 0};"
        ),
        "chunks of a row are not permuted": Edit(
            "sm90/tile_score.cuh", "apply", "Panel::advanced(first, 0, j / 4 % kFragments * 2)",
            "first + j / 4 % kFragments * 32",
        ),
        "P has the element of a pair's other key": Edit(
            "sm90/tile_score.cuh", "apply", "pairs[i][j % 2]", "pairs[i][1 - j % 2]"
        ),
        "a step reads the elements of the step before": Edit(
            "sm90/forward.cu", "score_step", "array_smem(stage,", "array_smem(1 - stage,"
        ),
        "gradients read elements of other queries": Edit(WEIGHTS, "staged_words", "16 * k, 0)", "0, 0)"),
    },
    unaligned_steps_are_right: {
        "TMA copies rows that start between packets": Edit(
            PRODUCER, "load_array_step", "&& block.start % tile::kChunkOf<ptx::Half> == 0", ""
        ),
    },
    late_copies_are_waited_for: {
        "elements are read before they are there": Edit(
            "sm90/forward.cu", "score_step",
            "tile::wait_full(array_slot(stage, consumer_number()), phase_of(num_k_blocks));", ";",
        ),
        "a slot is filled again while it is read": Edit(
            PRODUCER, "load_array", "wait_slot_empty(array_slot(stage, consumer), phase_of(num_blocks));", ""
        ),
        "Q does not wait for the elements of its step": Edit(
            "sm90/q_producer.cuh", "load_queries", "? SmemArray::kBytes : 0", "? 0 : 0"
        ),
    },
    layouts_change_no_bit: {
        "TMA copies arrays whose strides it cannot take": Edit(STAGED, "has_staged_map", "map.array.is_valid &&", ""),
        "the first element may lie anywhere": Edit(
            STAGED, "has_staged_map", "&& reinterpret_cast<uint64_t>(score.staged_data()) % 16 == 0", ""
        ),
        "threads copy elements of the first queries": Edit(
            STAGED, "staged_part", "all.at(queries.first, keys.first)", "all.at(0, keys.first)"
        ),
    },
    arrays_have_maps: {
        "a tensor map has an index for each head of an axis that heads share": Edit(
            "executors/_records.py", "View.boxes", "(extent if step else 1, step)", "(extent, step)"
        ),
    },
    hidden_elements_have_no_gradient: {
        "a gradient is stored where another step's is": Edit(
            WEIGHTS, "store_gradient", "all.at(queries.first, keys.first)", "all.at(keys.first, keys.first)"
        ),
        "a step clears what the next one clears": Edit(
            HIDDEN, "clear_hidden_gradient", "split_start(num_hidden, part, num_parts)",
            "split_start(num_hidden, part + 1, num_parts)",
        ),
        "the last, short tile has no opposite": Edit(
            HIDDEN, "clear_hidden_gradient", "(length - 1) / BlockKv * BlockKv", "(length / BlockKv - 1) * BlockKv"
        ),
        "queries after the visited ones keep what was there": Edit(
            HIDDEN, "clear_hidden_gradient", "params.shape.seqlen_q - (visited.hi - visited.lo)", "visited.lo"
        ),
        "elements past the last key are cleared": Edit(
            HIDDEN, "clear_hidden_gradient", "if (column < last) ptx::store_aligned", "ptx::store_aligned"
        ),
        "a tile without steps clears nothing": Edit(
            "sm90/q_producer.cuh", "load_tile",
            "clear_hidden_gradient_of_tile(params, score, smem.works[work_slot].tile);", ";",
        ),
        "a tile without steps clears the elements of one head": Edit(
            "sm90/q_producer.cuh", "clear_hidden_gradient_of_tile", "--work.batch_head.head", "true"
        ),
    },
    uniform_steps_are_right: {
        "the first and the last query make a tile": Edit(
            "sm90/tile_score.cuh", "apply", "position(Tile::warp_row() + 15)", "position(Tile::warp_row())"
        ),
        "a tile of gradients has one key": Edit(
            WEIGHTS, "StepScore", "rows.at(Tile::warp_row() + 15)", "rows.at(Tile::warp_row())"
        ),
        "warps share bins": Edit("sm90/q_storage.cuh", "bins_of_warp", "+ warp * 32", "+ 0 * warp * 32"),
        "a head's sums go to the next head": Edit(BINS, "start", "flush(bins);", ""),
        "a head's sums are added again": Edit(BINS, "start", "bins[32 * element + ptx::lane()] = 0;", ""),
        "a lane adds up its own bins": Edit(BINS, "flush", "(ptx::lane() + lane) % 32", "ptx::lane()"),
        "the last sums are lost": Edit(WEIGHTS, "finish_sums", "score.finish_bins(bins_of_warp(), of_steps);", ";"),
    },
    sums_by_distance_are_right: {
        "sums of uniform steps are lost": Edit(WEIGHTS, "finish_sums", "score.flush(of_steps);", ";"),
        "a sum continues with the next element": Edit("tile/global_sum.cuh", "join", "sum = 0;", ""),
        "all queries of a step are as far as the first ones": Edit(WEIGHTS, "flush_distances", "- 16 * k", ""),
        "a warp counts from the first key of its tile": Edit(
            WEIGHTS, "StepScore", "positions.keys.first + Tile::warp_row() - positions.queries.first",
            "positions.keys.first - positions.queries.first",
        ),
        "sums of a step are added again": Edit(WEIGHTS, "flush_distances", "sums.of_distances = {};", ""),
        "blocks on a diagonal are on the other one": Edit(DIAGONALS, "at", "i - j / 2 + 1", "j / 2 - i + 1"),
        "elements in odd columns are added to their row": Edit(DIAGONALS, "of_lane", "(lane + 4) % 32", "lane"),
        "lanes that have other diagonals are added": Edit(DIAGONALS, "of_lane", "2 * (other - pair)", "(other - pair)"),
        "a lane keeps what it gives": Edit(
            DIAGONALS, "of_lane", "keeps_second ? halves[0] : halves[1]", "keeps_second ? halves[1] : halves[0]"
        ),
        "blocks of a lane are one further": Edit(DIAGONALS, "part", "first() - parity < 8", "first() < 8"),
    },
    weights_of_zero_add_nothing: {
        "a score without weight adds its dF": Edit(
            WEIGHTS, "apply_slopes_in", "p.at(i, j) != 0 ? df.at(i, j) : T(0)", "df.at(i, j)"
        ),
        "0 times an infinite slope is NaN": Edit(
            "attention/score_math.cuh", "df_times", "df == 0 ? T(0) : df * slope", "df * slope"
        ),
    },
    tables_have_bins: {
        "one of two tables has bins": Edit("planning/score_bins.py", "num_bins", "len(loads) != 1", "not loads"),
        "a row is chosen by the query": Edit(
            "planning/score_bins.py", "num_bins", 'or any(names & {"i", "j", "s"} for names in leading)', ""
        ),
    },
    arrays_are_staged_where_they_can_be: {
        "indices change places": Edit("planning/staged_array.py", "staged_load", '("i", "j")', '("j", "i")'),
        "rows may end within a packet": Edit("planning/staged_array.py", "can_stage", "== 0", ">= 0"),
        "a slope is stored that is another's": Edit(
            "planning/staged_array.py", "can_store_gradient", "slope == slope_of_array and", ""
        ),
        "a gradient is stored that others add to": Edit(
            "planning/staged_array.py", "can_store_gradient", "and (kind == OWN or", "and (True or"
        ),
    },
    zeros_are_planned: {
        "hidden elements keep what was there": Edit(
            "planning/plan.py", "_is_band", "work.band is not None", "True"
        ),
    },
    monotone_integers_are_found: {
        "a sum is a distance": Edit("scores/uniform.py", "of_distance", 'each.op == "sub" and', ""),
        "what depends on the query too is a distance": Edit(
            "scores/uniform.py", "of_distance", "distances.issuperset(varying)", "not distances.isdisjoint(varying)"
        ),
        "what is subtracted keeps its direction": Edit(
            "scores/_primitives.py", None, "trend=lambda a, b: (1, -1)", "trend=lambda a, b: (1, 1)"
        ),
    },
}
