"""Planted faults in sm90's kernel that computes only dQ."""

from __future__ import annotations

from mutations.planting import Edit
from mutations.sm90_guards import gradients_in_two_walks_are_right

FAULTS = {
    gradients_in_two_walks_are_right: {
        "all steps are whole": Edit(
            "sm90/backward_rows.cu", "process_tile", "is_plain = flags & StepMessage::kUnmasked", "is_plain = true"
        ),
        "lse is that of another query": Edit(
            "sm90/backward_rows.cu", "row_statistics", ".lse_2[query - first]", ".lse_2[0]"
        ),
        "delta is that of another query": Edit(
            "sm90/backward_rows.cu", "row_statistics", ".delta[query - first]", ".delta[0]"
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
            "Config::kIsListed ? work.first : query / kBlockQ * kBlockQ",
            "work.first",
        ),
        "hidden keys count": Edit(
            "sm90/backward_rows.cu", "make_p",
            "IsPlain || !attention::is_masked_score(s.at(i, j)) ? p : s.at(i, j)",
            "p",
        ),
        "what stands at hidden keys matters": Edit(
            "sm90/backward_rows.cu", "make_ds", "IsPlain || !attention::is_masked_score(p.at(i, j)) ? ds : 0.0f", "ds"
        ),
        "delta is left out": Edit(
            "sm90/backward_rows.cu", "make_ds", "dp.at(i, j), stats.delta[i])", "dp.at(i, j), 0.0f)"
        ),
        "scores are read before they are there": Edit(
            "sm90/backward_rows.cu", "process_tile", "wait_wgmma<1>(s); while (true)", "wait_wgmma<2>(s); while (true)"
        ),
        "scores of further steps are read before they are there": Edit(
            "sm90/backward_rows.cu", "process_tile", "tile::wait_wgmma<1>(s); ptx::", "tile::wait_wgmma<2>(s); ptx::"
        ),
        "dP is read before it is there": Edit(
            "sm90/backward_rows.cu", "process_tile", "tile::wait_wgmma<0>(dp);", "tile::wait_wgmma<1>(dp);"
        ),
        "V is left before it is multiplied": Edit(
            "sm90/backward_rows.cu", "process_tile",
            "tile::wait_wgmma<0>(dp); tile::arrive(smem.v[stage].empty);",
            "tile::arrive(smem.v[stage].empty); tile::wait_wgmma<0>(dp);",
        ),
        "K is left before it is multiplied": Edit(
            "sm90/backward_rows.cu", "process_tile", "++", "tile::arrive(smem.k[stage].empty); ++"
        ),
        "K of a tile's last step is not left": Edit(
            "sm90/backward_rows.cu", "process_tile", "tile::arrive(smem.k[stage_of(num_k_blocks - 1)].empty);", ""
        ),
        "Q is not left": Edit("sm90/backward_rows.cu", "process_tile", "tile::arrive(smem.q[0].empty);", ""),
        "Q is left before it is multiplied": Edit(
            "sm90/backward_rows.cu", "process_tile", ".work, chosen);", ".work, chosen); tile::arrive(smem.q[0].empty);"
        ),
        "dQ is written before it is there": Edit(
            "sm90/backward_rows.cu", "process_tile", "tile::wait_wgmma<0>(dq);", ""
        ),
        "dQ is not scaled": Edit("sm90/backward_rows.cu", "consume", "dq.scale(params.shape.softmax_scale);", ""),
        "dQ is added to that of the tile before": Edit(
            "sm90/backward_rows.cu", "consume", "Dq dq; dq.fill(0);", "static thread_local Dq dq;"
        ),
        "dQ of queries without a key is anything": Edit(
            "sm90/epilogue_gradient.cuh", "clear_rows",
            "else tile::clear(matrix<Element>(to, work.batch_head, head, 0, num_columns)",
            "else tile::clear(matrix<Element>(to, work.batch_head, head, 0, 0)",
        ),
        "hidden keys are marked no more": Edit("sm90/backward_rows.cu", "make_p", "? p : s.at(i, j);", "? p : 0.0f;"),
    },
}  # fmt: skip
