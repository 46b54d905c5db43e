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

_ROWS, _RING, _BACKWARD = "sm90/backward_rows.cu", "attention/query_ring.cuh", "sm90/backward.cu"
_COPY = "  tile::copy<32>(to, all.rows(first, last), ptx::lane(), [](int) { return true; });\n"
_NOTE = "    if (leads()) own.notes[stage] = {step, start, is_last};\n"
_K = (
    "    fill(tile::Panels(k_smem(stage)), maps.k, params.k, kv_head, shape.head_dim, step.start, step.stop, "
    "own.k[stage],\n         clears);\n"
)
EDITS = {
    "barriers are not fenced": (_ROWS, "    ptx::mbarrier_init_fence();\n", ""),
    "dO is not counted": (_ROWS, "2 * tile::kArrivals);  // of Q, and of dO", "tile::kArrivals);"),
    "a warp too few leaves a room": (_ROWS, "4 * tile::kArrivals", "3 * tile::kArrivals"),
    "rooms are filled before they are empty": (
        _ROWS, "    tile::await_empty(rooms[turn.stage], turn.parity);\n", ""
    ),
    "a room counts as empty in the wrong phase": (
        _ROWS, "tile::await_empty(rooms[turn.stage], turn.parity)",
        "tile::await_empty(rooms[turn.stage], turn.parity ^ 1)",
    ),
    "one phase serves all": (_ROWS, "    parity ^= is_last;\n", ""),
    "K past a step is what stands there": (_ROWS, "clears = step.stop - step.start < kBlockKv &&", "clears = false &&"),
    "keys of the step before count again": (_ROWS, "    seen.lo = max(seen.lo, note.start);\n", ""),
    "under a band too": (_ROWS, "mask_band(s, note.step, band, note.start)", "mask_band(s, note.step, band, 0)"),
    "a wider step is whole": (_ROWS, " && note.start == note.step.start", ""),
    "all steps are whole": (_ROWS, "attention::is_whole<kBlockKv>(note.step) && ", ""),
    "copied rows count as there before they are": (
        _ROWS, f"{_COPY}  tile::arrive(room.full);\n", f"  tile::arrive(room.full);\n{_COPY}"
    ),
    "K is that of the query's head": (_ROWS, "maps.k, params.k, kv_head", "maps.k, params.k, head"),
    "V is that of the query's head": (_ROWS, "maps.v, params.v, kv_head", "maps.v, params.v, own.work.place.head"),
    "what is noted is the next step's": (
        _ROWS, f"{_NOTE}    __syncwarp();\n{_K}", f"{_K}{_NOTE}"
    ),
    "lse is that of another query": (
        _ROWS, "known.lse_2[Scores::first_row() + Scores::row(i)]", "known.lse_2[Scores::first_row()]"
    ),
    "delta is that of another query": (
        _ROWS, "known.delta[Scores::first_row() + Scores::row(i)]", "known.delta[Scores::first_row()]"
    ),
    "queries are those of the first tile": (
        _ROWS, "known_queries(params, work.place)[query_tile_number<Listed>(params, work.first, kBlockQ)]",
        "known_queries(params, work.place)[0]",
    ),
    "hidden keys count": (_ROWS, "IsPlain || s.at(i, j) != ptx::negative_infinity<float>() ? p : 0.0f", "p"),
    "what stands at hidden keys matters": (_ROWS, "IsPlain || p.at(i, j) != 0 ? ds : 0.0f", "ds"),
    "delta is left out": (_ROWS, "(dp.at(i, j) - row.delta[i])", "dp.at(i, j)"),
    "scores are read before they are there": (
        _ROWS, "  tile::wait_for<1>(s);\n  while", "  tile::wait_for<2>(s);\n  while"
    ),
    "scores of further steps are read before they are there": (
        _ROWS, "    tile::wait_for<1>(s);\n    ptx::keep", "    tile::wait_for<2>(s);\n    ptx::keep"
    ),
    "dP is read before it is there": (_ROWS, "    tile::wait_for<0>(dp);\n", "    tile::wait_for<1>(dp);\n"),
    "V is left before it is multiplied": (
        _ROWS, "    tile::wait_for<0>(dp);\n    tile::arrive(own.v[turn.stage].empty);\n",
        "    tile::arrive(own.v[turn.stage].empty);\n    tile::wait_for<0>(dp);\n",
    ),
    "K is left before it is multiplied": (
        _ROWS, "    const tile::Room& k = own.k[turn.stage];\n",
        "    const tile::Room& k = own.k[turn.stage];\n    tile::arrive(k.empty);\n",
    ),
    "dQ is written before it is there": (_ROWS, "  tile::wait_for<0>(dq);\n", ""),
    "dQ is not scaled": (_ROWS, "    dq.scale(params.shape.softmax_scale);\n", ""),
    "dQ of queries without a key is anything": (_ROWS, "    dq.fill(0);\n", ""),
    "Q is not waited for": (_ROWS, "  tile::await_full(own.q, 0);\n", ""),
    "blocks without a step bring something": (_ROWS, "    if (!own.has_steps) return;\n", ""),
    "Q's room awaits who adds up": (_RING, "(kAddsDqUp && has_notes)", "has_notes"),
    "rows past a step are copied": (_RING, "(kIsWide || row < note.step.stop - note.step.start) && ", ""),
    "dK is that of the last step but one": (
        _BACKWARD, "      tile::wait_for<0>(dk);\n      if (finishes)", "      if (finishes)"
    ),
}  # fmt: skip


def guarded_structures() -> list[Structure]:
    names = ("causal", "not aligned", "broadcast", "a wide window", "every row without a key", "documents")
    lists = ("blocks of 64, 128 columns", "blocks of 64, bits", "blocks of 192 x 64")
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
