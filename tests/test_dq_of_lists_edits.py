"""Faults planted where the last tile of keys to come to queries of a list finishes their dQ: every one must be seen on
the simulator.

As in test_dq_turns_edits.py. Blocks run one after another there, so that whoever comes last finds all others done.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from executors import needs_compiler
from planting import chosen, planted, without_their_line
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
_LAST = "const bool is_last = before == num - 1;"
_COUNT = "num += !is_cut || (lo < min(key + Width, last) && hi > key);"
EDITS = {
    "blocks that are cut count as whole": (_VISITS, _COUNT, "++num;"),
    "a tile whose last key is the first of a query counts not": (
        _VISITS, "lo < min(key + Width, last)", "lo + 1 < min(key + Width, last)"
    ),
    "a tile whose first key is the last of a query counts not": (_VISITS, "&& hi > key)", "&& hi > key + 1)"),
    "a tile past the last key of all counts": (_VISITS, "&& hi > key)", "&& hi >= key)"),
    "a tile before the first key of all counts": (
        _VISITS, "lo < min(key + Width, last)", "lo <= min(key + Width, last)"
    ),
    "a block counts as one tile": (_VISITS, "key < last; key += Width)", "key < last; key += list.block_kv)"),
    "keys past the end count": (
        _VISITS, "min(first + list.block_kv, params.shape.seqlen_kv);",
        "first + list.block_kv;",
    ),
    "all rows have the visits of the first": (_VISITS, " + work.first / list.block_q;", ";"),
    "all heads have the visits of the first": (
        _VISITS, "list_matrix(list, work.place) * list.num_q_blocks", "0 * list.num_q_blocks"
    ),
    "dQ that nobody makes is what stands there": (
        _VISITS, "  tile::clear(matrix<Element>(params.dq,",
        "  if (false) tile::clear(matrix<Element>(params.dq,",
    ),
    "who comes before the last finishes": (_VISITS, _LAST, _LAST.replace("- 1", "- 2")),
    "nobody finishes": (_VISITS, _LAST, "const bool is_last = false;"),
    "who comes alone adds sums": (
        _RING, "is_first ? Finish::kAlone : Finish::kWithSums;", "Finish::kWithSums;"
    ),
    "sums of others are left out": (
        _RING, "is_first ? Finish::kAlone : Finish::kWithSums;", "Finish::kAlone;"
    ),
    "who comes first adds": (
        _RING, "leave_sums(note.dq_sum, part, is_first);",
        "leave_sums(note.dq_sum, part, false);",
    ),
    "who comes second stores": (
        _RING, "leave_sums(note.dq_sum, part, is_first);",
        "leave_sums(note.dq_sum, part, visit.before <= 1);",
    ),
    "who finishes adds too": (_RING, "      if (!is_last) leave_sums(", "      leave_sums("),
    "sums are brought while the room is read": (
        _RING, "      ptx::bulk_wait_read<0>();\n      __syncwarp();\n      bring_sums", "      bring_sums"
    ),
    "all sums are awaited in one phase": (
        _RING, "      bring_sums(note.dq_sum, parity);\n      parity ^= 1;\n",
        "      bring_sums(note.dq_sum, parity);\n",
    ),
    "nobody tells that a visit is done": (_RING, "    tile::tell(untold, attention::kVisitIsDone);\n", ""),
    "the last addition is not told": (_RING, "    turn = next;\n  }\n  tell();\n", "    turn = next;\n  }\n"),
    "what is told may not be made yet": (
        _RING, "    tile::await_copies();\n    tile::tell(untold",
        "    tile::tell(untold",
    ),
    "the queries' room is left before they are asked": (
        _RING, "    const Turn next = turn.next();\n    come(next);\n",
        "    tile::arrive(own.q[turn.stage].empty);\n    const Turn next = turn.next();\n    come(next);\n",
    ),
    "dQ is added before it is there": (
        _RING, "      ptx::bar_sync(kDqIsThere + part, kGroup + 32);\n      if (!is_last)", "      if (!is_last)"
    ),
    "steps that hide nothing are not noted": (_RING, "if (kLastFinishesDq || kind & (", "if (kind & ("),
    "whether a step finishes is asked too early": (
        _BACKWARD, "      await_room(part);\n      how = own.finish;\n",
        "      how = own.finish;\n      await_room(part);\n"
    ),
    "queries past the step's last one are left": (
        _BACKWARD, "attention::query_tile_end<Listed>(params, note.step.start, kBlockQ)", "note.step.stop"
    ),
    "tiles do not end with blocks": (
        "attention/work_tile.cuh", "min(last, (first / block + 1) * block) : last", "last : last"
    ),
    "dQ is not scaled": (
        _BACKWARD, "tile::store_whole(rows, dq, first, scale)",
        "tile::store_whole(rows, dq, first, 1.0f)",
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
    with planted(tmp_path / "kernels_cu", *EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        dq_of_lists_is_right()


def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    dq_of_lists_is_right()


def test_every_edit_has_its_line() -> None:
    assert without_their_line(EDITS) == []
