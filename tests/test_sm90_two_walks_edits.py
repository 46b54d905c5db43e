"""Faults planted where Hopper's gradients make dQ by itself: every one must be seen on the simulator.

As in test_sm90_edits.py, which has those of the kernel that makes dK and dV, and of what both share.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cuflash.testing import Structure, assert_within_bounds
from executors import needs_compiler
from planting import Edit, chosen, misfits, planted
from poison import MARGIN, call
from test_sm90 import ALIGNED, TILES, FewBlocks, half
from test_sm90_two_walks import (
    BANDS, LISTS, SIM_REPEATS, assert_queries_past_a_step_never_matter, assert_what_lies_past_a_length_never_matters,
)  # fmt: skip

from cuflash import sim

pytestmark = needs_compiler

_ROWS, _KEYS = "sm90/backward_rows.cu", "attention/key_ring.cuh"
_RING, _BACKWARD = "attention/query_ring.cuh", "sm90/backward.cu"
EDITS = {
    "dO is not counted": Edit(
        _KEYS, "make_barriers", "(kBringsDo && i < kQRooms ? 2 : 1) * tile::kArrivals", "tile::kArrivals"
    ),
    "the end is told once": Edit(_KEYS, "bring_keys", "if constexpr (kBringsDo) tile::arrive(q.full);", ""),
    "dO is not brought": Edit(
        _KEYS, "bring_keys", "if constexpr (kBringsDo) fill<kDo>", "if constexpr (false) fill<kDo>"
    ),
    "dO is that of another head": Edit(
        _KEYS, "look_up",
        "if constexpr (kBringsDo) task.at[kDo] = in_stack(params.do_, work.place, work.place.head);",
        "if constexpr (kBringsDo) task.at[kDo] = in_stack(params.do_, work.place, task.kv_head);",
    ),
    "dO that is copied is that of another head": Edit(
        _KEYS, "fill", "kIsOfQueries = kOperand == kQ || kOperand == kDo,", "kIsOfQueries = kOperand == kQ,"
    ),
    "dO that is copied is as wide as Q": Edit(
        _KEYS, "fill", "kHasValueDim = kOperand == kV || kOperand == kDo;", "kHasValueDim = kOperand == kV;"
    ),
    "dO is Q": Edit(_KEYS, "fill", "kOperand == kDo ? params.do_ :", ""),
    "dO lies where V does": Edit(_KEYS, "do_smem", "kAfterValues + room * DoPanels::kBytes}", "v_smem(0).start}"),
    "K past a step is what stands there": Edit(
        _KEYS, "bring_keys", "kBringsDo && ends_early(step, params.shape.seqlen_kv)", "false"
    ),
    "keys of the step before count again": Edit(_KEYS, "mask_step", "seen.lo = max(seen.lo, note.start);", ""),
    "under a band too": Edit(
        _KEYS, "mask_step", "mask_band(s, note.step, task.band, note.start)", "mask_band(s, note.step, task.band, 0)"
    ),
    "all steps are whole": Edit(_ROWS, "walk", "is_plain = kind & Note::kAsTheyAre", "is_plain = true"),
    "lse is that of another query": Edit(_ROWS, "row_statistics", "known.lse_2[query - first]", "known.lse_2[0]"),
    "delta is that of another query": Edit(_ROWS, "row_statistics", "known.delta[query - first]", "known.delta[0]"),
    "queries are those of the first tile": Edit(
        _ROWS, "row_statistics", "attention::query_tile_number<Listed>(params, first, kBlockQ) : 0", "0 : 0"
    ),
    "tiles of a list are numbered as if there were none": Edit(
        _ROWS, "row_statistics",
        "attention::query_tile_number<Listed>(params, first, kBlockQ) : 0",
        "first / kBlockQ : 0",
    ),
    "queries of a band are cut as its tiles are": Edit(
        _ROWS, "row_statistics", "config::kIsListed ? work.first : query / kBlockQ * kBlockQ", "work.first"
    ),
    "hidden keys count": Edit(
        _ROWS, "make_probabilities", "IsPlain || s.at(i, j) != ptx::negative_infinity<float>() ? p : 0.0f", "p"
    ),
    "what stands at hidden keys matters": Edit(_ROWS, "make_gradients", "IsPlain || p.at(i, j) != 0 ? ds : 0.0f", "ds"),
    "delta is left out": Edit(_ROWS, "make_gradients", "(dp.at(i, j) - row.delta[i])", "dp.at(i, j)"),
    "scores are read before they are there": Edit(
        _ROWS, "walk", "tile::wait_for<1>(s); while (true) {", "tile::wait_for<2>(s); while (true) {"
    ),
    "scores of further steps are read before they are there": Edit(
        _ROWS, "walk", "tile::wait_for<1>(s); ptx::keep_in_place", "tile::wait_for<2>(s); ptx::keep_in_place"
    ),
    "dP is read before it is there": Edit(_ROWS, "walk", "tile::wait_for<0>(dp);", "tile::wait_for<1>(dp);"),
    "V is left before it is multiplied": Edit(
        _ROWS, "walk",
        "tile::wait_for<0>(dp); tile::arrive(own.v[stage].empty);",
        "tile::arrive(own.v[stage].empty); tile::wait_for<0>(dp);",
    ),
    "K is left before it is multiplied": Edit(
        _ROWS, "walk", "++num_keys;", "tile::arrive(own.k[stage].empty); ++num_keys;"
    ),
    "K of a tile's last step is not left": Edit(
        _ROWS, "walk", "tile::arrive(own.k[stage_of(num_keys - 1)].empty);", ""
    ),
    "Q is not left": Edit(_ROWS, "walk", "tile::arrive(own.q[0].empty);", ""),
    "Q is left before it is multiplied": Edit(
        _ROWS, "walk",
        "const Statistics row = row_statistics(params, task.work);",
        "const Statistics row = row_statistics(params, task.work); tile::arrive(own.q[0].empty);",
    ),
    "dQ is written before it is there": Edit(_ROWS, "walk", "tile::wait_for<0>(dq);", ""),
    "dQ is not scaled": Edit(_ROWS, "consume", "dq.scale(params.shape.softmax_scale);", ""),
    "dQ is added to that of the tile before": Edit(
        _ROWS, "consume", "Gradient dq; dq.fill(0);", "static thread_local Gradient dq;"
    ),
    "dQ of queries without a key is anything": Edit(
        _ROWS, "write_nothing",
        "else tile::clear(matrix<Element>(params.dq, work.place, head, 0, num_columns)",
        "else tile::clear(matrix<Element>(params.dq, work.place, head, 0, 0)",
    ),
    "Q's room awaits who adds up": Edit(_RING, "share_work", "(kAddsDqUp && has_notes)", "has_notes"),
    "rows past a step are copied": Edit(
        _RING, "copy_queries", "(kIsWide || row < note.step.stop - note.step.start) &&", ""
    ),
    "dK is that of the last step but one": Edit(_BACKWARD, "consume", "tile::wait_for<0>(dk);", ""),
}  # fmt: skip


def guarded_structures() -> list[Structure]:
    names = ("causal", "not aligned", "broadcast", "a wide window", "every row without a key", "documents")
    lists = ("blocks of 64, 128 columns", "blocks of 64, not aligned", "blocks of 64, bits", "blocks of 100")
    negative = replace(BANDS["causal"], scale=-0.125)
    return [*(BANDS[name] for name in names), *(LISTS[name] for name in lists), negative]


def gradients_are_right() -> None:
    for number, structure in enumerate(guarded_structures()):
        example = half(structure)
        for seed, order in enumerate(("random", "last_warp", "first_warp")):
            schedule = sim.Schedule(seed=seed, order=order, copies="late" if order == "last_warp" else "random")
            machine, margin = FewBlocks(schedule, most=1 + (seed + number) % 3), ALIGNED if seed else MARGIN
            assert_within_bounds(example, **call(example, SIM_REPEATS, machine, margin=margin))
    for kv in (190, 40):
        assert_what_lies_past_a_length_never_matters(TILES["dense"], SIM_REPEATS, kv=kv)
    assert_queries_past_a_step_never_matter(SIM_REPEATS)


@pytest.mark.parametrize("name", chosen(EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        gradients_are_right()


def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    gradients_are_right()


def test_every_edit_fits_the_sources() -> None:
    assert misfits(EDITS.values()) == []
