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
from planting import Edit, chosen, misfits, planted
from poison import MARGIN, call
from test_dq_turns import STRUCTURES
from test_sm90 import ALIGNED, SIM90, FewBlocks, half

from cuflash import sim

pytestmark = needs_compiler

_TURNS, _RING, _WORK = "attention/dq_turns.cuh", "attention/query_ring.cuh", "attention/work_tile.cuh"
_BACKWARD, _STATISTICS = "sm90/backward.cu", "sm90/backward_statistics.cu"
_STORE, _COUNT, _ORDER = "tile/opaque_copy.cuh", "tile/count.cuh", "tile/fragment_order.cuh"
EDITS = {
    "who adds waits for tiles that store nothing": Edit(
        _TURNS, "dq_turn", "min(from_last, last - first_stored + 1)", "(from_last + 1)"
    ),
    "who finishes waits for itself too": Edit(
        _TURNS, "dq_turn", "counts, 0, 0, last, false, true}", "counts, 0, 0, last + 1, false, true}"
    ),
    "all tiles have the same bit": Edit(_TURNS, "dq_turn", "1 << min(from_last, 31), awaited", "1, awaited"),
    "part of a tile of queries counts as stored": Edit(
        _TURNS, "dq_turn", "(work.last - upper) / Height * Height", "work.last - upper + 1"
    ),
    "the step after those that store stores too": Edit(_TURNS, "DqTurn.at", "stores = false;", ""),
    "who adds first stores": Edit(
        _TURNS, "dq_turn", "counts, 0, 0, awaited, false, false}", "counts, 0, 0, awaited, true, false}"
    ),
    "sums of the first keys' own queries are anything": Edit(
        _TURNS, "stores_dq", "interval(params, queries.place, queries.last - 1).hi > Width", "true"
    ),
    "sums are those of the place before": Edit(_TURNS, "dq_counts", "+ place_number(params.shape, place);", "+ 0;"),
    "nobody tells that a tile is done": Edit(_TURNS, "DqTurn.at", "is_last && !finishes}", "false}"),
    "what is told may not be made yet": Edit(_COUNT, "await_copies", "ptx::bulk_wait<0>();", ""),
    "sums are taken before they are brought": Edit(
        _RING, "bring_sums", "ptx::mbarrier_wait(ptx::shared_address(&own.dq_taken), parity);", ""
    ),
    "all sums are awaited in one phase": Edit(_RING, "add_up", "parity ^= 1;", ""),
    "half of the sums are brought": Edit(
        _RING, "bring_sums",
        "ptx::bulk_load(dq_address(0), sum, kConsumers * kDqPart,",
        "ptx::bulk_load(dq_address(0), sum, kDqPart,",
    ),
    "sums are stored where they should be added": Edit(
        _RING, "add_up", "kFinishesInTurn && kind & Note::kStoresDq", "kFinishesInTurn"
    ),
    "sums are added where they should be stored": Edit(
        _RING, "add_up", "kFinishesInTurn && kind & Note::kStoresDq", "false"
    ),
    "the room is left before it is read": Edit(
        _BACKWARD, "finish", "softmax_scale);", "softmax_scale); ptx::bar_arrive(kDqIsThere + part, kGroup + 32);"
    ),
    "dQ is that of the step after": Edit(
        _BACKWARD, "consume",
        "finish(params, dq, own_dq, own.notes[turn.stage], part,",
        "finish(params, dq, own_dq, own.notes[next.stage], part,",
    ),
    "dQ is not scaled": Edit(
        _BACKWARD, "finish", "tile::store_whole(rows, dq, first, scale)", "tile::store_whole(rows, dq, first, 1.0f)"
    ),
    "dQ does not have its own keys'": Edit(
        _ORDER, "FragmentOrder.add_from", "part.tiles[i][j][e] += sums.at[e]", "part.tiles[i][j][e] = sums.at[e]"
    ),
    "columns stand on each other": Edit(
        _STORE, "store_whole", "from.warp_column() + 8 * first + ptx::lane()", "from.warp_column() + ptx::lane()"
    ),
    "dQ is written past the end": Edit(
        _STORE, "store_whole", "if (row < to.num_rows) *reinterpret_cast", "*reinterpret_cast"
    ),
    "steps that finish are walked as others": Edit(
        _RING, "produce", "(head_work.dq.finishes ? Note::kFinishesDq : 0)", "0"
    ),
    "first keys are taken with the others": Edit(
        _WORK, "FinishingTurns.at", "turn == 0 ? ahead + behind : ahead", "ahead"
    ),
    "blocks have their first tiles by their own numbers": Edit(
        _RING, "next_tile",
        "if constexpr (kFinishesInTurn) number = attention::number_in_order",
        "if (false) number = attention::number_in_order",
    ),
    "dQ of the first places is rounded at the end": Edit(
        _WORK, "query_tile_from_last",
        "cut.num_tiles - 1 - blockIdx.x;",
        "cut.num_tiles - 1 - (gridDim.x - 1 - blockIdx.x) - (cut.num_places * cut.num_tiles - gridDim.x);",
    ),
    "the last places' sums are not set to 0": Edit(
        _STATISTICS, "sm90_backward_statistics",
        "if (!kFirstStoresDq && !stores_dq<kBlockKv>(params, work)) clear_dq_sum(params, work);",
        "",
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
    with planted(tmp_path / "kernels_cu", EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        finished_gradients_are_right()


def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    finished_gradients_are_right()


def test_every_edit_fits_the_sources() -> None:
    assert misfits(EDITS.values()) == []
