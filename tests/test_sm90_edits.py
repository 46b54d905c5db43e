"""Faults planted in the sm90 family: every one must be seen on the simulator, as a wrong number or as a broken rule.

As in test_kernel_edits.py; but what is not waited for, or waited for in vain, the simulator reports by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuflash.simulated import Simulator
from cuflash.testing import Structure, assert_within_bounds
from executors import needs_compiler
from planting import chosen, planted, without_their_line
from poison import MARGIN, call
from test_sm90 import ALIGNED, SIM90, OnTwoBlocks, forward, half, plan_of

from cuflash import masks, sim

pytestmark = needs_compiler

_FORWARD, _PANELS, _STORE = "sm90/forward.cu", "tile/panel_tile.cuh", "tile/opaque_copy.cuh"
EDITS = {
    "barriers are not fenced": (_FORWARD, "    ptx::mbarrier_init_fence();\n", ""),
    "copied rows are not fenced": (_FORWARD, "  ptx::fence_proxy_async();\n", ""),
    "copied rows are not waited for": (_FORWARD, "  ptx::cp_async_wait_all();\n", ""),
    "copied chunks are not permuted": (
        _FORWARD, "chunk % in_panel ^ row * in_panel / kChunk % in_panel", "chunk % in_panel"
    ),
    "the last column is not copied": (_FORWARD, "int e = rest - 1; e >= 0", "int e = rest - 2; e >= 0"),
    "V past a step is what stands there": (_FORWARD, "const bool clears = operand == kV", "const bool clears = false"),
    "an array without a map is left to the accelerator": (_FORWARD, "map.is_there && ", ""),
    "an odd start is left to the accelerator": (
        _FORWARD, " && reinterpret_cast<uint64_t>(matrices.data) % 16 == 0", ""
    ),
    "only the first panel is brought": (_FORWARD, "column < to.columns; column +=", "column < to.width; column +="),
    "a broadcast axis is stepped over": (_FORWARD, "matrices.batch_strides[2] == 0 ? 0 : ", ""),
    "K is that of the query's head": (
        _FORWARD, "own.work.place.head / params.shape.group_size", "own.work.place.head"
    ),
    "a room counts as empty in the wrong phase": (_FORWARD, "&room.empty), parity ^ 1);", "&room.empty), parity);"),
    "a room counts as full in the wrong phase": (_FORWARD, "&room.full), parity);", "&room.full), parity ^ 1);"),
    "one stage serves all": (_FORWARD, "return count % kNumStages;", "return 0;"),
    "K is left before it is multiplied": (
        _FORWARD, "  tile::wait_for<1>(s);\n}", "  leave(board().k[stage_of(num_keys)]);\n  tile::wait_for<1>(s);\n}"
    ),
    "V is left before it is multiplied": (
        _FORWARD, "    tile::wait_for<0>(o);\n    if (num_keys > 0) leave(board().v[stage_of(num_keys - 1)]);\n",
        "    if (num_keys > 0) leave(board().v[stage_of(num_keys - 1)]);\n    tile::wait_for<0>(o);\n",
    ),
    "V is left before it is multiplied, with one room for Q": (
        _FORWARD, "      tile::wait_for<0>(o);\n      if (!is_first) leave(board().v[stage_of(num_keys - 1)]);\n",
        "      if (!is_first) leave(board().v[stage_of(num_keys - 1)]);\n      tile::wait_for<0>(o);\n",
    ),
    "Q is left with the first step": (
        _FORWARD, "if (is_last) leave(board().q[", "if (note.step.start == 0) leave(board().q["
    ),
    "results of queries without a key stay as they are": (_FORWARD, " o.at(row, column) = {};", " continue;"),
    "lse of queries without a key stays as it is": (
        _FORWARD, "    if (threadIdx.x == 32) lse.at(row, 0)", "    if (false) lse.at(row, 0)"
    ),
    "scores are read before they are there": (_FORWARD, "tile::wait_for<1>(s);", "tile::wait_for<2>(s);"),
    "O is not rescaled": (
        _FORWARD, "    if (has_risen) Softmax::rescale(o, by);\n    ++num_keys;\n    is_first",
        "    ++num_keys;\n    is_first",
    ),
    "O is not rescaled, with one room for Q": (
        _FORWARD, "      if (has_risen) Softmax::rescale(o, by);\n      ++num_keys;\n      if (is_last)",
        "      ++num_keys;\n      if (is_last)",
    ),
    "O goes on from tile to tile": (_FORWARD, "      o.fill(0);\n    }\n    p = s;", "    }\n    p = s;"),
    "a tile has the sums of the next one": (_FORWARD, "work, finished, o);", "work, softmax, o);"),
    "a tile goes on with the maximum of the one before": (_FORWARD, "      softmax = Softmax();\n", ""),
    "there is a task for each room": (_FORWARD, "kTasks = 2 * kQRooms;", "kTasks = kQRooms;"),
    "nobody has the first turn": (_FORWARD, "  if (group == kConsumers) pass_turn();\n", ""),
    "a warpgroup has another's queries": (_FORWARD, "64 * (group % kConsumers)", "64 * (group - 1)"),
    "a task overwrites the one before": (
        _FORWARD, "board().tasks[num_tasks % kTasks] = {work,", "board().tasks[0] = {work,"
    ),
    "a note is overwritten before the warp has read it": (
        _FORWARD, "        __syncwarp();  // all have read what is said anew\n", ""
    ),
    "every step is whole": (_FORWARD, "is_whole<kBlockKv>(step), is_last}", "true, is_last}"),
    "a negative scale is not turned": (_FORWARD, "if (softmax_scale <= 0) ", "if (false) "),
    "panels of V lie too close": (_PANELS, "kSwizzle, Tile::Panel::kBytes, 8", "kSwizzle, 1024, 8"),
    "the second panel of K is the first": (_PANELS, "at(panel * Tile::Panel::kBytes + ", "at(0 * panel + "),
    "rows of a fragment change places": (_PANELS, "fragments[k][e] = ptx::pack2", "fragments[k][e ^ 1] = ptx::pack2"),
    "a chunk of O is another's": (_STORE, "is_upper ? first : second, step", "is_upper ? second : first, step"),
    "a row too many of O is stored": (
        _STORE, "if (row >= to.num_rows) continue;\n      Packet", "if (row > to.num_rows) continue;\n      Packet"
    ),
    "chunks past the last column are stored": (
        _STORE, "from.warp_column() + 8 * Tile::kColumnTiles <= to.num_columns", "true"
    ),
    "the last element of a short chunk is lost": (
        _STORE, "min(column + kChunkOf<T>, to.num_columns); ++x", "min(column + kChunkOf<T>, to.num_columns - 1); ++x"
    ),
}  # fmt: skip

_BACKWARD, _ROOMS = "sm90/backward.cu", "tile/rooms.cuh"
BACKWARD_EDITS = {
    "rooms are not fenced": (_BACKWARD, "    ptx::mbarrier_init_fence();\n", ""),
    "copied tiles are not fenced": (_ROOMS, "  ptx::fence_proxy_async();\n", ""),
    "a panel of dO is not brought": (_ROOMS, "column < to.columns; column +=", "column < to.width; column +="),
    "queries past a step are alive": (
        _BACKWARD, "  if (step.stop < min(step.start", "  if (false && step.stop < min(step.start"
    ),
    "queries without a key are alive": (
        _BACKWARD, "return first.lo >= first.hi || last.lo >= last.hi;", "return false;"
    ),
    "K is kept where no query sees it": (
        _BACKWARD,
        "{max(work.first, interval(params, work.place, 0).lo),\n          min(work.last, ",
        "{work.first, max(work.last, ",
    ),
    "every step is whole": (_BACKWARD, "note.kind = is_whole ?", "note.kind = true ?"),
    "a step's keys are all seen": (_BACKWARD, "before_hi & ~before_lo;", "~0u;"),
    "bits of a list are all 1": (_BACKWARD, "    bits &= listed;\n", ""),
    "a warp has another's bits": (_BACKWARD, "Scores::warp_row() / 16 +", "0 +"),
    "a query has its neighbour's delta": (_BACKWARD, "delta[Scores::column(j)]", "delta[Scores::column(j ^ 1)]"),
    "lse is that of the step before": (
        _BACKWARD, "own.queries[turn.stage];\n    const Note&", "own.queries[0];\n    const Note&"
    ),
    "dS is multiplied before it is there": (
        _BACKWARD, "  ptx::bar_sync(kConsumersMeet, kConsumers * kGroup);", "  "
    ),
    "dS is not fenced": (_BACKWARD, "  ptx::fence_proxy_async();\n", ""),
    "dS has one room": (_BACKWARD, "kDs + is_odd * DsPanels::kBytes", "kDs"),
    "both warpgroups make one part of dQ": (_BACKWARD, "kRowParts == 1 ? part * KPart::kBytes : 0", "0"),
    "Q is left before dK is made": (
        _BACKWARD,
        "    tile::wait_for<1>(dv);\n",
        "    tile::arrive(own.q[turn.stage].empty);\n    tile::wait_for<1>(dv);\n",
    ),
    "dO is left before dV is made": (
        _BACKWARD,
        "    tile::wait_for<1>(dv);\n    tile::keep_in_place(p);",
        "    tile::wait_for<2>(dv);\n    tile::keep_in_place(p);",
    ),
    "the last part of dQ is lost": (
        _BACKWARD, "      DqSum(note.dq_sum).add(dq);\n      return;", "      return;"
    ),
    "dK is not scaled": (_BACKWARD, "  dk.scale(params.shape.softmax_scale);\n", ""),
    "one head gives dK and dV": (_BACKWARD, "head < shape.group_size", "head < 1"),
    "sums of dQ go to the first tile": (_BACKWARD, "query_tile_number(params, step.start, kBlockQ)", "0"),
    "dQ is not scaled": ("sm90/convert_dq.cu", "  dq.scale(shape.softmax_scale);\n", ""),
    "wide gradients lose a row": (
        "attention/fragment_gradient.cuh", "Gradient::row(i) >= work.last) continue;",
        "Gradient::row(i) >= work.last - 1) continue;",
    ),
    "dS is not transposed": ("tile/panel_tile.cuh", "stmatrix_x4_trans(Panel", "stmatrix_x4(Panel"),
}  # fmt: skip


def structures() -> list[Structure]:
    """Of kernels for 128 columns, one without a list and one with, and of one with a single room for Q."""
    rng = np.random.default_rng(0)
    square = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_kv": 300, "head_dim": 128}
    return [
        Structure(**square | {"num_heads": 4, "num_kv_heads": 2}, value_dim=104, mask=masks.Lengths(q=290, kv=290)),
        Structure(
            **square | {"head_dim": 100}, value_dim=100, mask=masks.Causal(), scale=-0.5, layouts=("odd_strides",) * 5
        ),
        Structure(**square, value_dim=128),
        Structure(
            **square | {"seqlen_q": 70}, q_batch=(2, 1), k_batch=(1, 3), v_batch=(3,), value_dim=128,
            mask=masks.Lengths(kv=np.array([[300, 0, 200], [40, 300, 0]])),
        ),
        Structure(
            **square, value_dim=128, mask=masks.BlockPattern(rng.random((3, 4)) < 0.6, (100, 88)), values="outliers"
        ),
        Structure(
            num_heads=2, num_kv_heads=1, seqlen_q=160, seqlen_kv=400, head_dim=136, value_dim=130,
            mask=masks.Lengths(q=150), values="outliers",
        ),
    ]  # fmt: skip


def started_oddly(x: Any) -> Any:
    """The same array 8 bytes after a multiple of 16, where its rows may well be multiples of 16 apart."""
    wider = np.zeros((*x.shape[:-1], x.shape[-1] + 16), x.dtype)
    start = (8 - wider.ctypes.data) % 16 // 2
    wider[..., start : start + x.shape[-1]] = x
    return wider[..., start : start + x.shape[-1]]


def hopper_is_right() -> None:
    """On blocks that go on to further tiles, out of order; NaN stands past the keys' length."""
    for number, structure in enumerate(structures()):
        clean = half(structure)
        example = clean
        if number == 0:
            v = clean.v.copy()
            v[..., 290:, :] = np.nan
            example = clean.but(v=v)
        if number == 2:
            example = clean.but(k=started_oddly(clean.k), v=started_oddly(clean.v))
        plan = OnTwoBlocks.of(plan_of(example))
        for seed, order in enumerate(("random", "last_warp", "first_warp")):
            schedule = sim.Schedule(seed=seed, order=order, copies="random")
            margin = ALIGNED if seed else MARGIN
            assert_within_bounds(clean, **forward(plan, example, Simulator(schedule), margin=margin))


@pytest.mark.parametrize("name", chosen(EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", *EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        hopper_is_right()


def test_the_kernels_as_they_are_pass_the_same_guard() -> None:
    hopper_is_right()


def backward_structures() -> list[Structure]:
    """Of both tiles of queries, and of a list; small, but of several steps."""
    square = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_kv": 150}
    rng = np.random.default_rng(0)
    return [
        Structure(**square, head_dim=128, value_dim=104, mask=masks.Causal("bottom_right")),
        Structure(
            **square, q_batch=(2,), k_batch=(1,), v_batch=(1,), head_dim=64, value_dim=40,
            mask=masks.Lengths(q=290, kv=np.array([140, 100])),
        ),
        Structure(**square, head_dim=33, value_dim=20, mask=masks.Dense(rng.random((2, 300, 150)) < 0.3)),
    ]  # fmt: skip


def hopper_gradients_are_right() -> None:
    """NaN stands in queries without a key, and past the lengths."""
    for number, structure in enumerate(backward_structures()):
        clean = half(structure)
        changed = {x: getattr(clean, x).copy() for x in ("q", "k", "v", "do")}
        if number == 0:
            changed["do"][..., :150, :] = np.nan
        if number == 1:
            for x, end in (("q", 290), ("k", 140), ("v", 140), ("do", 290)):
                changed[x][..., end:, :] = np.nan
        for seed, order in enumerate(("random", "last_warp", "first_warp")):
            schedule = sim.Schedule(seed=seed, order=order, copies="random")
            margin = ALIGNED if seed else MARGIN
            assert_within_bounds(clean, **call(clean.but(**changed), SIM90, Simulator(schedule), margin=margin))


@pytest.mark.parametrize("name", chosen(BACKWARD_EDITS))
@pytest.mark.filterwarnings("ignore")
def test_a_fault_planted_in_gradients_is_seen(name: str, tmp_path: Path) -> None:
    with planted(tmp_path / "kernels_cu", *BACKWARD_EDITS[name]), pytest.raises((AssertionError, sim.SimulationError)):
        hopper_gradients_are_right()


def test_the_gradients_as_they_are_pass_the_same_guard() -> None:
    hopper_gradients_are_right()


def test_every_edit_has_its_line() -> None:
    assert without_their_line(EDITS | BACKWARD_EDITS) == []
