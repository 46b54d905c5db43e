"""Faults of arrays that Hopper's kernels stage in shared memory, and of tables that they read once a step."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.staged_array_guards import (
    arrays_are_staged_where_they_can_be, hidden_elements_have_no_gradient, late_copies_are_waited_for,
    layouts_change_no_bit, monotone_integers_are_found, staged_results_are_right, uniform_steps_are_right,
    zeros_are_planned,
)  # fmt: skip

STAGED, WEIGHTS = "sm90/staged_array.cuh", "sm90/changed_weights.cuh"
FAULTS = {
    staged_results_are_right: {
        "a step has the elements of the first keys": Edit(
            STAGED, "start_copy",
            "const Element* from = &matrix.at(queries.first, keys.first) +",
            "const Element* from = &matrix.at(queries.first, 0) +",
        ),
        "chunks of a row are not permuted": Edit(
            STAGED, "start_copy", "to.address(row, chunk)", "to.address(row & ~7, chunk) + row % 8 * Slot::kChunks * 16"
        ),
        "P has the element of a pair's other key": Edit(
            "sm90/tile_score.cuh", "apply", "pairs[i][j % 2]", "pairs[i][1 - j % 2]"
        ),
        "a step reads the elements of the step before": Edit(
            "sm90/forward.cu", "score_step", "array_smem(stage_of(num_k_blocks))",
            "array_smem(stage_of(num_k_blocks + 1))",
        ),
        "gradients read elements of other queries": Edit(
            WEIGHTS, "function_at", "Tile::column(j), Tile::row(i) / 8", "Tile::column(0), Tile::row(i) / 8"
        ),
    },
    late_copies_are_waited_for: {
        "elements are read before they are there": Edit(
            "sm90/forward.cu", "score_step",
            "if constexpr (kStagesArray) tile::wait_full(array_slot(stage_of(num_k_blocks)), phase_of(num_k_blocks));",
            "",
        ),
    },
    layouts_change_no_bit: {
        "columns that are no neighbours are brought as such": Edit(
            STAGED, "start_copy", "is_aligned = matrix.column_stride == 1", "is_aligned = true"
        ),
        "threads copy neighbours": Edit(STAGED, "copy_each", "from[e * matrix.column_stride]", "from[e]"),
    },
    hidden_elements_have_no_gradient: {
        "a gradient is stored where another step's is": Edit(
            WEIGHTS, "store_gradient", "all.at(queries.first, keys.first)", "all.at(keys.first, keys.first)"
        ),
    },
    uniform_steps_are_right: {
        "the first and the last query make a tile": Edit(
            "sm90/tile_score.cuh", "apply", "position(Tile::warp_row() + 15)", "position(Tile::warp_row())"
        ),
        "a tile of gradients has one key": Edit(
            WEIGHTS, "StepScore", "rows.at(Tile::warp_row() + 15)", "rows.at(Tile::warp_row())"
        ),
        "sums of uniform steps are lost": Edit(
            WEIGHTS, "finish_sums", "score.flush(of_steps);", ";"
        ),
        "a sum goes on with the next element": Edit("tile/global_sum.cuh", "join", "sum = 0;", ""),
    },
    arrays_are_staged_where_they_can_be: {
        "indices change places": Edit("planning/staged_array.py", "staged_load", '("i", "j")', '("j", "i")'),
        "rows may end within a packet": Edit("planning/staged_array.py", "can_stage", "== 0", ">= 0"),
        "a slope is stored that is another's": Edit(
            "planning/staged_array.py", "can_store_gradient", "slope == slope_of_array and", ""
        ),
        "a gradient is stored that others add to": Edit(
            "planning/staged_array.py", "can_store_gradient",
            "and kinds_of_sums(problem, (array.name,)) == (OWN,)", "",
        ),
    },
    zeros_are_planned: {
        "hidden elements keep what was there": Edit(
            "planning/plan.py", "_visits_all", "work.band == Band(None, None)", "True"
        ),
    },
    monotone_integers_are_found: {
        "what is subtracted keeps its direction": Edit(
            "scores/uniform.py", "_direction", "known[1] = _times(known[1], -1)", "pass"
        ),
        "opposite directions make one": Edit("scores/uniform.py", "_direction", "len(each) > 1", "len(each) > 2"),
    },
}
