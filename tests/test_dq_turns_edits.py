"""Faults planted where blocks of Hopper's gradients finish dQ: every one must be seen on the simulator.

As in test_sm90_edits.py. What a block waits for in vain the simulator reports by itself, as it runs blocks one after
another; that a block does not wait at all it cannot show.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cuflash.testing import Structure, assert_within_bounds
from executors import needs_compiler
from finishing import on_few_processors
from planting import chosen, planted, without_their_line
from poison import MARGIN, call
from test_dq_turns import STRUCTURES
from test_sm90 import ALIGNED, SIM90, FewBlocks, half

from cuflash import sim

pytestmark = needs_compiler

_TURNS, _RING, _WORK = "attention/dq_turns.cuh", "attention/query_ring.cuh", "attention/work_tile.cuh"
_BACKWARD, _STATISTICS = "sm90/backward.cu", "sm90/backward_statistics.cu"
_STORE, _COUNT, _ORDER = "tile/opaque_copy.cuh", "tile/count.cuh", "tile/fragment_order.cuh"
EDITS = {
    "who adds waits for tiles that store nothing": (
        _TURNS, "min(from_last, last - first_stored + 1)",
        "(from_last + 1)",
    ),
    "who finishes waits for itself too": (
        _TURNS, "{counts, 0, 0, last, false, true}",
        "{counts, 0, 0, last + 1, false, true}",
    ),
    "all tiles have the same bit": (_TURNS, "1 << min(from_last, 31), awaited", "1, awaited"),
    "part of a tile of queries counts as stored": (
        _TURNS, "(work.last - upper) / Height * Height",
        "work.last - upper + 1",
    ),
    "the step after those that store stores too": (_TURNS, "    stores = false;\n", ""),
    "who adds first stores": (
        _TURNS, "return {counts, 0, 0, awaited, false, false};",
        "return {counts, 0, 0, awaited, true, false};",
    ),
    "sums of the first keys' own queries are anything": (
        _TURNS, "interval(params, queries.place, queries.last - 1).hi > Width", "true"
    ),
    "sums are those of the place before": (_TURNS, "+ place_number(params.shape, place);\n}\n", "+ 0;\n}\n"),
    "nobody tells that a tile is done": (_TURNS, "is_last && !finishes}", "false}"),
    "what is told may not be made yet": (_COUNT, "  ptx::bulk_wait<0>();\n", ""),
    "sums are taken before they are brought": (
        _RING, "  ptx::mbarrier_wait(ptx::shared_address(&own.dq_taken), parity);\n",
        "",
    ),
    "all sums are awaited in one phase": (_RING, "      parity ^= 1;\n#pragma", "#pragma"),
    "half of the sums are brought": (
        _RING, "ptx::bulk_load(dq_address(0), sum, kConsumers * kDqPart,",
        "ptx::bulk_load(dq_address(0), sum, kDqPart,",
    ),
    "sums are stored where they should be added": (
        _RING, "kFinishesInTurn && kind & Note::kStoresDq", "kFinishesInTurn"
    ),
    "sums are added where they should be stored": (_RING, "kFinishesInTurn && kind & Note::kStoresDq", "false"),
    "the room is left before it is read": (
        _BACKWARD, "softmax_scale);\n#pragma unroll\n  for (int first",
        "softmax_scale);\n  ptx::bar_arrive(kDqIsThere + part, kGroup + 32);\n#pragma unroll\n  for (int first",
    ),
    "dQ is that of the step after": (
        _BACKWARD, "finish(params, dq, own_dq, own.notes[turn.stage], part,",
        "finish(params, dq, own_dq, own.notes[next.stage], part,",
    ),
    "dQ is not scaled": (
        _BACKWARD, "tile::store_whole(rows, dq, first, scale)",
        "tile::store_whole(rows, dq, first, 1.0f)",
    ),
    "dQ does not have its own keys'": (_ORDER, "part.tiles[i][j][e] += sums.at[e]", "part.tiles[i][j][e] = sums.at[e]"),
    "columns stand on each other": (
        _STORE, "from.warp_column() + 8 * first + ptx::lane()",
        "from.warp_column() + ptx::lane()",
    ),
    "dQ is written past the end": (
        _STORE, "    if (row < to.num_rows)\n      *reinterpret_cast",
        "    *reinterpret_cast",
    ),
    "steps that finish are walked as others": (_RING, "(head_work.dq.finishes ? Note::kFinishesDq : 0)", "0"),
    "first keys are taken with the others": (_WORK, "turn == 0 ? ahead + behind : ahead", "ahead"),
    "blocks have their first tiles by their own numbers": (
        _RING, "if constexpr (kFinishesInTurn) number = attention::number_in_order",
        "if (false) number = attention::number_in_order",
    ),
    "dQ of the first places is rounded at the end": (
        _WORK, "cut.num_tiles - 1 - blockIdx.x;",
        "cut.num_tiles - 1 - (gridDim.x - 1 - blockIdx.x) - (cut.num_places * cut.num_tiles - gridDim.x);",
    ),
    "the last places' sums are not set to 0": (
        _STATISTICS, "  if (!kFirstStoresDq && !stores_dq<kBlockKv>(params, work)) clear_dq_sum(params, work);\n", "",
    ),
}  # fmt: skip


def guarded_structures() -> list[Structure]:
    names = ("dense", "causal, 128 columns", "more keys", "a launch for each of two", "grouped heads, dense")
    return [STRUCTURES[name] for name in names]


def finished_gradients_are_right() -> None:
    with on_few_processors():
        for number, structure in enumerate(guarded_structures()):
            example = half(structure)
            for seed, order in enumerate(("random", "last_warp", "first_warp")):
                schedule = sim.Schedule(seed=seed, order=order, copies="late" if order == "last_warp" else "random")
                machine, margin = FewBlocks(schedule, most=1 + (seed + number) % 3), ALIGNED if seed else MARGIN
                assert_within_bounds(example, **call(example, SIM90, machine, margin=margin))


@pytest.mark.parametrize("name", chosen(EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", *EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        finished_gradients_are_right()


def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    finished_gradients_are_right()


def test_every_edit_has_its_line() -> None:
    assert without_their_line(EDITS) == []
