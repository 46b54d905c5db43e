"""Faults in Hopper's kernel that makes dQ by itself."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.sm90_guards import gradients_in_two_walks_are_right

FAULTS = {
    gradients_in_two_walks_are_right: {
        "all steps are whole": Edit(
            "sm90/backward_rows.cu", "walk", "is_plain = kind & Note::kAsTheyAre", "is_plain = true"
        ),
        "lse is that of another query": Edit(
            "sm90/backward_rows.cu", "row_statistics", "known.lse_2[query - first]", "known.lse_2[0]"
        ),
        "delta is that of another query": Edit(
            "sm90/backward_rows.cu", "row_statistics", "known.delta[query - first]", "known.delta[0]"
        ),
        "queries are those of the first tile": Edit(
            "sm90/backward_rows.cu", "row_statistics",
            "attention::query_tile_number<Listed>(params, first, kBlockQ) : 0",
            "0 : 0",
        ),
        "tiles of a list are numbered as if there were none": Edit(
            "sm90/backward_rows.cu", "row_statistics",
            "attention::query_tile_number<Listed>(params, first, kBlockQ) : 0",
            "first / kBlockQ : 0",
        ),
        "queries of a band are cut as its tiles are": Edit(
            "sm90/backward_rows.cu", "row_statistics",
            "config::kIsListed ? work.first : query / kBlockQ * kBlockQ",
            "work.first",
        ),
        "hidden keys count": Edit(
            "sm90/backward_rows.cu", "make_probabilities",
            "IsPlain || !attention::is_masked_score(s.at(i, j)) ? p : s.at(i, j)",
            "p",
        ),
        "what stands at hidden keys matters": Edit(
            "sm90/backward_rows.cu", "make_gradients",
            "IsPlain || !attention::is_masked_score(p.at(i, j)) ? ds : 0.0f",
            "ds",
        ),
        "delta is left out": Edit(
            "sm90/backward_rows.cu", "make_gradients", "(dp.at(i, j) - row.delta[i])", "dp.at(i, j)"
        ),
        "scores are read before they are there": Edit(
            "sm90/backward_rows.cu", "walk",
            "tile::wait_for<1>(s); while (true) {",
            "tile::wait_for<2>(s); while (true) {",
        ),
        "scores of further steps are read before they are there": Edit(
            "sm90/backward_rows.cu", "walk",
            "tile::wait_for<1>(s); ptx::keep_in_place",
            "tile::wait_for<2>(s); ptx::keep_in_place",
        ),
        "dP is read before it is there": Edit(
            "sm90/backward_rows.cu", "walk", "tile::wait_for<0>(dp);", "tile::wait_for<1>(dp);"
        ),
        "V is left before it is multiplied": Edit(
            "sm90/backward_rows.cu", "walk",
            "tile::wait_for<0>(dp); tile::arrive(own.v[stage].empty);",
            "tile::arrive(own.v[stage].empty); tile::wait_for<0>(dp);",
        ),
        "K is left before it is multiplied": Edit(
            "sm90/backward_rows.cu", "walk", "++num_keys;", "tile::arrive(own.k[stage].empty); ++num_keys;"
        ),
        "K of a tile's last step is not left": Edit(
            "sm90/backward_rows.cu", "walk", "tile::arrive(own.k[stage_of(num_keys - 1)].empty);", ""
        ),
        "Q is not left": Edit("sm90/backward_rows.cu", "walk", "tile::arrive(own.q[0].empty);", ""),
        "Q is left before it is multiplied": Edit(
            "sm90/backward_rows.cu", "walk",
            "const Statistics row = row_statistics(params, task.work);",
            "const Statistics row = row_statistics(params, task.work); tile::arrive(own.q[0].empty);",
        ),
        "dQ is written before it is there": Edit("sm90/backward_rows.cu", "walk", "tile::wait_for<0>(dq);", ""),
        "dQ is not scaled": Edit("sm90/backward_rows.cu", "consume", "dq.scale(params.shape.softmax_scale);", ""),
        "dQ is added to that of the tile before": Edit(
            "sm90/backward_rows.cu", "consume", "Gradient dq; dq.fill(0);", "static thread_local Gradient dq;"
        ),
        "dQ of queries without a key is anything": Edit(
            "sm90/backward_rows.cu", "write_nothing",
            "else tile::clear(matrix<Element>(params.dq, work.place, head, 0, num_columns)",
            "else tile::clear(matrix<Element>(params.dq, work.place, head, 0, 0)",
        ),
        "hidden keys are marked no more": Edit(
            "sm90/backward_rows.cu", "make_probabilities", "? p : s.at(i, j);", "? p : 0.0f;"
        ),
    },
}  # fmt: skip
