"""Faults in dropout: of Python and of kernels."""

from __future__ import annotations

from mutations.dropout_guards import (
    bounds_are_sharp,
    calls_are_told_apart,
    calls_hand_over_their_numbers,
    hopper_gradients_are_right,
    naive_is_right,
    simt_is_right,
    sm80_is_right,
    sm90_is_right,
    the_host_is_right,
    wrong_numbers_are_refused,
)
from mutations.planting import Edit

FAULTS = {
    the_host_is_right: {
        "heads of all batch entries draw alike": Edit(
            "executors/tile_dropout.py", "TileDropout.dropped", "(b * self.num_heads + h)", "(0 * b + h)"
        ),
        "a number at the threshold is dropped": Edit(
            "dropout/weights.py", "kept", "is_kept: Array = np.uint64(0xFFFF)", "is_kept: Array = np.uint64(0)"
        ),
        "gradients by dropped weights count": Edit(
            "executors/tile_dropout.py", "Dropped.apply_to_gradients", "np.copyto(dp, 0, where=self.where)", "pass"
        ),
        "dv is that of all weights": Edit(
            "executors/cpu.py", "_HostCall.backward_columns", "dropped.apply(p)", "pass"
        ),
    },
    bounds_are_sharp: {
        "what dropout multiplies does not round": Edit(
            "bounds/forward.py", "Weights.of", "factor * dropout.keep((*shape.batch, *shape[1:])), factor, 2",
            "factor * dropout.keep((*shape.batch, *shape[1:])), factor, 1",
        ),
        "dropped weights count in dv": Edit(
            "bounds/gradients.py", "gradient_tolerances", "weights = z * (", "weights = ("
        ),
    },
    wrong_numbers_are_refused: {
        "an offset may have 33 bits": Edit(
            "dropout/weights.py", "Dropout.__post_init__", "0 <= self.offset <= _MASK", "0 <= self.offset <= 2 * _MASK"
        ),
        "the row after the last one is taken": Edit("dropout/weights.py", "_is_places", "< length", "<= length"),
    },
    calls_are_told_apart: {
        "calls do not differ by what they draw": Edit(
            "planning/options.py", "Options.key", "scale, program, draws, wrt,", "scale, program, wrt,"
        ),
    },
    calls_hand_over_their_numbers: {
        "an offset clears the other half of its word": Edit(
            "executors/params.py", "ParamsTemplate.with_lists", "Place(offset, int(words[offset]), number)",
            "Place(offset, 0, number)",
        ),
        "seed and offset change places": Edit(
            "planning/dropout_launches.py", None, 'NUMBERS = ("seed", "offset")', 'NUMBERS = ("offset", "seed")'
        ),
        "kernels draw by no seed": Edit(
            "executors/launch.py", "BoundPass.launch", "addresses += numbers", "addresses += [0 for _ in numbers]"
        ),
    },
    simt_is_right: {
        "neighbouring keys change places": Edit(
            "attention/dropout.cuh", "WeightDraw.keeps", "position.key % 2 * 8", "(1 - position.key % 2) * 8"
        ),
        "numbers drawn last are another head's": Edit(
            "attention/dropout.cuh", "head_number", "batch_head.batch_index", "0 * batch_head.batch_index"
        ),
        "dropped weights stay in dv": Edit(
            "simt/backward.cu", "simt_backward", "drop_weights<decltype(scores)>(p_at, kept);", ";"
        ),
        "gradients by dropped weights count": Edit(
            "attention/dropout.cuh", "drop_gradients", "kept.at(i, j) ? element(dp, i, j) * factor : T(0)",
            "element(dp, i, j) * factor",
        ),
    },
    naive_is_right: {
        "the offset is not drawn with": Edit(
            "attention/dropout.cuh", "Draws.counter", "{{row, column, head, dropout_.offset}}",
            "{{row, column, head, 0}}",
        ),
        "P of the gradients keeps its size": Edit(
            "naive/gradient_scores.cu", "naive_gradient_scores", "s.scale(dropout.factor);", ";"
        ),
    },
    sm80_is_right: {
        "a step draws the next one's numbers": Edit(
            "sm80/forward.cu", "sm80_forward", "drop_step(s, params, state.work, first_key, dropout);",
            "drop_step(s, params, state.work, block.start, dropout);",
        ),
        "parts keep the size of their weights": Edit(
            "sm80/forward.cu", "write_part", "if constexpr (config::kHasDropout) o.scale(dropout.factor);", ""
        ),
        "heads of a tile draw alike": Edit(
            "sm80/forward.cu", "drop_step", "work.batch_head.head + heads.quotient", "work.batch_head.head"
        ),
        "rows of a cell change places": Edit(
            "attention/dropout.cuh", "KeptFragments.bit", "4 * number + 2 * (i % 2)", "4 * number + 2 * (1 - i % 2)"
        ),
        "a level of numbers is not compared": Edit(
            "attention/dropout.cuh", "Draws.kept", "level < 8; ++level", "level < 7; ++level"
        ),
        "dropped weights have no gradient at all": Edit(
            "attention/dropout_gradient_mma.cuh", "dropout_score_gradients",
            "is_allowed ? score_gradient(p, by_weight, row.delta[i])",
            "is_allowed && is_kept ? score_gradient(p, by_weight, row.delta[i])",
        ),
    },
    hopper_gradients_are_right: {
        "where a plain step stands is not told": Edit(
            "sm90/q_tiles.cuh", None, "constexpr bool kMessagesHaveBlocks = kHasScore || config::kHasDropout;",
            "constexpr bool kMessagesHaveBlocks = false;",
        ),
        "neighbours keep what they drew": Edit(
            "attention/dropout.cuh", "kept_fragments", "__shfl_xor_sync(0xffffffffu, drawn, 4)", "drawn"
        ),
        "a thread takes its own half of the other's": Edit(
            "attention/dropout.cuh", "kept_fragments", "IsTransposed ? (number == 0 ? 8 : 24)",
            "IsTransposed ? (number == 0 ? 24 : 8)",
        ),
        "neighbours draw the same cells": Edit(
            "attention/dropout.cuh", "kept_fragments", "2 * (first + n) + number", "2 * (first + n)"
        ),
        "steps that start anywhere draw as aligned ones": Edit(
            "attention/dropout.cuh", "kept_fragments", "if ((first_row | first_column) % 16 != 0)", "if (false)",
        ),
        "the next step has this one's weights": Edit(
            "sm90/backward.cu", "consume", "draw_step(kept, next_positions, dropout, params.shape);", ";"
        ),
        "dP of a dropped weight is kept": Edit(
            "sm90/backward_changed_scores.cuh", "make_changed_operands",
            "(kept.at(i, j) ? dp.at(i, j) : 0.0f) * dropout.single_factor",
            "dp.at(i, j) * dropout.single_factor",
        ),
        "dV has what is dropped": Edit(
            "sm90/backward_changed_scores.cuh", "make_changed_operands",
            "s.at(i, j) = kept.at(i, j) ? s.at(i, j) : 0.0f;", ";"
        ),
        "dV keeps its size": Edit(
            "sm90/backward_epilogue.cuh", "write_gradients", "dv.scale(dropout.single_factor);", ";"
        ),
    },
    sm90_is_right: {
        "tiles that start anywhere draw as aligned ones": Edit(
            "attention/dropout.cuh", "kept_fragments", "if ((first_row | first_column) % 16 != 0)", "if (false)"
        ),
        "neighbouring keys change places": Edit(
            "attention/dropout.cuh", "KeptFragments.halves_at", "0x9988 : 0xbbaa", "0x8899 : 0xaabb"
        ),
        "drawers draw one warpgroup's rows for all": Edit(
            "sm90/drawn_weights.cuh", "draw_steps", "work.first + 64 * group - own_row", "work.first - own_row"
        ),
        "warpgroups read what was drawn for one": Edit(
            "sm90/drawn_weights.cuh", "read_kept", "Tile::warp_row() / 64 * kWarpgroupThreads", "0"
        ),
        "a warpgroup never leaves the rooms of what it passes over": Edit(
            "sm90/forward.cu", "skip_blocks", "if constexpr (kHasDrawers) skip_kept(num_k_blocks);", ""
        ),
        "no weight is dropped": Edit(
            "sm90/forward.cu", "pack_step", "p.fragments[k][e] &=", "p.fragments[k][e] |= 0 &"
        ),
    },
}
