"""Faults planted where the last tile of keys to come to queries of a list finishes their dQ: every one must be seen on
the simulator.

As in test_dq_turns_edits.py. Blocks run one after another there, so that whoever comes last finds all others done.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from executors import needs_compiler
from planting import Edit, chosen, misfits, planted
from poison import MARGIN
from test_dq_of_lists import STRUCTURES, assert_all_right
from test_sm90 import ALIGNED, SIM90, FewBlocks, half, with_fewest_tiles

from cuflash import sim

pytestmark = needs_compiler


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_tiles_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0):
        yield


_VISITS, _RING, _BACKWARD = "attention/dq_visits.cuh", "attention/query_ring.cuh", "sm90/backward.cu"
EDITS = {
    "blocks that are cut count as whole": Edit(
        _VISITS, "num_visits", "num += !is_cut || (lo < min(key + Width, last) && hi > key);", "++num;"
    ),
    "a tile whose last key is the first of a query counts not": Edit(
        _VISITS, "num_visits", "lo < min(key + Width, last)", "lo + 1 < min(key + Width, last)"
    ),
    "a tile whose first key is the last of a query counts not": Edit(
        _VISITS, "num_visits", "&& hi > key)", "&& hi > key + 1)"
    ),
    "a tile past the last key of all counts": Edit(_VISITS, "num_visits", "&& hi > key)", "&& hi >= key)"),
    "a tile before the first key of all counts": Edit(
        _VISITS, "num_visits", "lo < min(key + Width, last)", "lo <= min(key + Width, last)"
    ),
    "a block counts as one tile": Edit(
        _VISITS, "num_visits", "key < last; key += Width)", "key < last; key += list.block_kv)"
    ),
    "keys past the end count": Edit(
        _VISITS, "num_visits", "min(first + list.block_kv, params.shape.seqlen_kv);", "first + list.block_kv;"
    ),
    "all rows have the visits of the first": Edit(_VISITS, "num_visits", "+ work.first / list.block_q;", ";"),
    "all heads have the visits of the first": Edit(
        _VISITS, "num_visits", "list_matrix(list, work.place) * list.num_q_blocks", "0 * list.num_q_blocks"
    ),
    "dQ that nobody makes is what stands there": Edit(
        _VISITS, "expect_visits",
        "tile::clear(matrix<Element>(params.dq,",
        "if (false) tile::clear(matrix<Element>(params.dq,",
    ),
    "who comes before the last finishes": Edit(
        _VISITS, "DqVisit.of", "const bool is_last = before == num - 1;", "const bool is_last = before == num - 2;"
    ),
    "nobody finishes": Edit(
        _VISITS, "DqVisit.of", "const bool is_last = before == num - 1;", "const bool is_last = false;"
    ),
    "who comes alone adds sums": Edit(
        _RING, "add_up_or_finish", "is_first ? Finish::kAlone : Finish::kWithSums;", "Finish::kWithSums;"
    ),
    "sums of others are left out": Edit(
        _RING, "add_up_or_finish", "is_first ? Finish::kAlone : Finish::kWithSums;", "Finish::kAlone;"
    ),
    "who comes first adds": Edit(
        _RING, "add_up_or_finish", "leave_sums(note.dq_sum, part, is_first);", "leave_sums(note.dq_sum, part, false);"
    ),
    "who comes second stores": Edit(
        _RING, "add_up_or_finish",
        "leave_sums(note.dq_sum, part, is_first);",
        "leave_sums(note.dq_sum, part, visit.before <= 1);",
    ),
    "who finishes adds too": Edit(_RING, "add_up_or_finish", "if (!is_last) leave_sums(", "leave_sums("),
    "sums are brought while the room is read": Edit(
        _RING, "add_up_or_finish", "ptx::bulk_wait_read<0>(); __syncwarp();", ""
    ),
    "all sums are awaited in one phase": Edit(_RING, "add_up_or_finish", "parity ^= 1;", ""),
    "nobody tells that a visit is done": Edit(
        _RING, "add_up_or_finish", "tile::tell(untold, attention::kVisitIsDone);", ""
    ),
    "the last addition is not told": Edit(_RING, "add_up_or_finish", "} tell();", "}"),
    "what is told may not be made yet": Edit(
        _RING, "add_up_or_finish", "tile::await_copies(); tile::tell(untold", "tile::tell(untold"
    ),
    "the queries' room is left before they are asked": Edit(
        _RING, "add_up_or_finish",
        "const Turn next = turn.next();",
        "tile::arrive(own.q[turn.stage].empty); const Turn next = turn.next();",
    ),
    "dQ is added before it is there": Edit(
        _RING, "add_up_or_finish", "ptx::bar_sync(kDqIsThere + part, kGroup + 32);", ""
    ),
    "steps that hide nothing are not noted": Edit(_RING, "produce", "if (kLastFinishesDq || kind & (", "if (kind & ("),
    "whether a step finishes is asked too early": Edit(
        _BACKWARD, "consume", "await_room(part); how = own.finish;", "how = own.finish; await_room(part);"
    ),
    "queries past the step's last one are left": Edit(
        _BACKWARD, "finish", "attention::query_tile_end<Listed>(params, note.step.start, kBlockQ)", "note.step.stop"
    ),
    "tiles do not end with blocks": Edit(
        "attention/work_tile.cuh", "query_tile_end", "min(last, (first / block + 1) * block) : last", "last : last"
    ),
    "dQ is not scaled": Edit(
        _BACKWARD, "finish", "tile::store_whole(rows, dq, first, scale)", "tile::store_whole(rows, dq, first, 1.0f)"
    ),
}  # fmt: skip


def dq_of_lists_is_right() -> None:
    for number, structure in enumerate(STRUCTURES.values()):
        example = half(structure)
        for seed, order in enumerate(("random", "last_warp", "first_warp")):
            schedule = sim.Schedule(seed=seed, order=order, copies="late" if order == "last_warp" else "random")
            machine = FewBlocks(schedule, most=1 + (seed + number) % 3)
            assert_all_right(example, SIM90, machine, ALIGNED if seed else MARGIN)


@pytest.mark.parametrize("name", chosen(EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        dq_of_lists_is_right()


def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    dq_of_lists_is_right()


def test_every_edit_fits_the_sources() -> None:
    assert misfits(EDITS.values()) == []
