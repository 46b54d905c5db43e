"""Faults planted where Hopper's gradients make dQ by itself: every one must be seen on the simulator.

As in test_sm90_edits.py, which has those of the kernel that makes dK and dV, and of what both share.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cuflash.testing import Structure, assert_within_bounds
from executors import needs_compiler
from planting import chosen, planted, without_their_line
from poison import MARGIN, call
from test_sm90 import ALIGNED, TILES, FewBlocks, half
from test_sm90_two_walks import (
    BANDS, LISTS, SIM_REPEATS, assert_queries_past_a_step_never_matter, assert_what_lies_past_a_length_never_matters,
)  # fmt: skip

from cuflash import sim

pytestmark = needs_compiler

_ROWS, _KEYS = "sm90/backward_rows.cu", "attention/key_ring.cuh"
_RING, _BACKWARD = "attention/query_ring.cuh", "sm90/backward.cu"
_COUNTED = "(kBringsDo && i < kQRooms ? 2 : 1) * tile::kArrivals"
EDITS = {
    "dO is not counted": (_KEYS, _COUNTED, "tile::kArrivals"),
    "the end is told once": (_KEYS, "      if constexpr (kBringsDo) tile::arrive(q.full);\n", ""),
    "dO is not brought": (_KEYS, "      if constexpr (kBringsDo) fill<kDo>", "      if constexpr (false) fill<kDo>"),
    "dO is that of another head": (
        _KEYS, "if constexpr (kBringsDo) task.at[kDo] = in_stack(params.do_, work.place, work.place.head);",
        "if constexpr (kBringsDo) task.at[kDo] = in_stack(params.do_, work.place, task.kv_head);",
    ),
    "dO that is copied is that of another head": (
        _KEYS, "kIsOfQueries = kOperand == kQ || kOperand == kDo,", "kIsOfQueries = kOperand == kQ,"
    ),
    "dO that is copied is as wide as Q": (
        _KEYS, "kHasValueDim = kOperand == kV || kOperand == kDo;", "kHasValueDim = kOperand == kV;"
    ),
    "dO is Q": (_KEYS, "kOperand == kDo ? params.do_ : ", ""),
    "dO lies where V does": (_KEYS, "{kAfterValues + room * DoPanels::kBytes}", "{v_smem(0).start}"),
    "K past a step is what stands there": (_KEYS, "kBringsDo && ends_early(step, params.shape.seqlen_kv)", "false"),
    "keys of the step before count again": (_KEYS, "    seen.lo = max(seen.lo, note.start);\n", ""),
    "under a band too": (
        _KEYS, "mask_band(s, note.step, hidden, task.band, note.start)", "mask_band(s, note.step, hidden, task.band, 0)"
    ),
    "all steps are whole": (_ROWS, "is_plain = kind & Note::kAsTheyAre", "is_plain = true"),
    "lse is that of another query": (_ROWS, "known.lse_2[query - first]", "known.lse_2[0]"),
    "delta is that of another query": (_ROWS, "known.delta[query - first]", "known.delta[0]"),
    "queries are those of the first tile": (
        _ROWS, "attention::query_tile_number<Listed>(params, first, kBlockQ) : 0", "0 : 0"
    ),
    "tiles of a list are numbered as if there were none": (
        _ROWS, "attention::query_tile_number<Listed>(params, first, kBlockQ) : 0", "first / kBlockQ : 0"
    ),
    "queries of a band are cut as its tiles are": (
        _ROWS, "config::kIsListed ? work.first : query / kBlockQ * kBlockQ", "work.first"
    ),
    "hidden keys count": (_ROWS, "IsPlain || !attention::is_masked_score(s.at(i, j)) ? p : s.at(i, j)", "p"),
    "hidden keys are marked no more": (_ROWS, "? p : s.at(i, j);", "? p : 0.0f;"),
    "scores are hidden behind -inf": (
        _KEYS, "kBringsDo ? attention::masked_score() : ptx::negative_infinity<float>();",
        "ptx::negative_infinity<float>();",
    ),
    "what stands at hidden keys matters": (
        _ROWS, "IsPlain || !attention::is_masked_score(p.at(i, j)) ? ds : 0.0f", "ds"
    ),
    "delta is left out": (_ROWS, "(dp.at(i, j) - row.delta[i])", "dp.at(i, j)"),
    "scores are read before they are there": (
        _ROWS, "  // asked for meanwhile\n  tile::wait_for<1>(s);", "\n  tile::wait_for<2>(s);"
    ),
    "scores of further steps are read before they are there": (
        _ROWS, "    tile::wait_for<1>(s);\n    ptx::keep", "    tile::wait_for<2>(s);\n    ptx::keep"
    ),
    "dP is read before it is there": (_ROWS, "    tile::wait_for<0>(dp);\n", "    tile::wait_for<1>(dp);\n"),
    "V is left before it is multiplied": (
        _ROWS, "    tile::wait_for<0>(dp);\n    tile::arrive(own.v[stage].empty);\n",
        "    tile::arrive(own.v[stage].empty);\n    tile::wait_for<0>(dp);\n",
    ),
    "K is left before it is multiplied": (
        _ROWS, "    ++num_keys;\n    if", "    tile::arrive(own.k[stage].empty);\n    ++num_keys;\n    if"
    ),
    "K of a tile's last step is not left": (
        _ROWS, "  tile::arrive(own.k[stage_of(num_keys - 1)].empty);\n", ""
    ),
    "Q is not left": (_ROWS, "  tile::arrive(own.q[0].empty);\n", ""),
    "Q is left before it is multiplied": (
        _ROWS, "  // asked for meanwhile\n", "\n  tile::arrive(own.q[0].empty);\n"
    ),
    "dQ is written before it is there": (_ROWS, "  tile::wait_for<0>(dq);\n", ""),
    "dQ is not scaled": (_ROWS, "    dq.scale(params.shape.softmax_scale);\n", ""),
    "dQ is added to that of the tile before": (
        _ROWS, "    Gradient dq;\n    dq.fill(0);\n", "    static thread_local Gradient dq;\n"
    ),
    "dQ of queries without a key is anything": (
        _ROWS, "else tile::clear(matrix<Element>(params.dq, work.place, head, 0, num_columns)",
        "else tile::clear(matrix<Element>(params.dq, work.place, head, 0, 0)",
    ),
    "Q's room awaits who adds up": (_RING, "(kAddsDqUp && has_notes)", "has_notes"),
    "rows past a step are copied": (_RING, "(kIsWide || row < note.step.stop - note.step.start) && ", ""),
    "dK is that of the last step but one": (
        _BACKWARD, "      tile::wait_for<0>(dk);\n      if constexpr", "      if constexpr"
    ),
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
    with planted(tmp_path / "kernels_cu", *EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        gradients_are_right()


def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    gradients_are_right()


def test_every_edit_has_its_line() -> None:
    assert without_their_line(EDITS) == []
