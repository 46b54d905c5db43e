"""Tiles of keys that share dQ in any order: the first to arrive stores its sums of dQ, and the last one finishes dQ.

NVIDIA's racecheck reports races in the kernels that finish dQ, because it does not model bar.arrive. These tests let
thread blocks arrive and run in every order, under the simulator's checks of shared data.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuflash.blocks.work_list import WorkList
from cuflash.executors.launch import Lists
from cuflash.executors.sim import Simulator
from cuflash.executors.workspaces import SeparateWorkspaces
from cuflash.planning.launches import Workspace
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import in_turn, is_long, needs_compiler
from fused_dq import on_few_processors
from poison import call
from test_dq_finishing import WAYS
from test_sm90 import ALIGNED, SIM90, half, plan_of

from cuflash import masks, sim

pytestmark = needs_compiler
ROOT = Path(__file__).parents[2]
# A short run has every fourth order of four tiles, so that each of them arrives first.
ORDERS = [
    order for number in (2, 3, 4) for order in [*permutations(range(number))][:: 1 if is_long() or number < 4 else 4]
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Ordered(Simulator):
    """A simulator in which thread block n takes tile `order[n]` of keys; `sums` collects the dq_sum of each pass."""

    order: tuple[int, ...] = ()
    sums: list[Any] = field(default_factory=list)

    def lists(self, work: WorkList) -> Lists:
        return Lists({**super().lists(work).arrays, "column_order": np.array(self.order, np.int32)})

    def workspaces(self, needs: Mapping[str, Workspace]) -> SeparateWorkspaces:
        def make(workspace: Workspace) -> Any:
            array = self.maker(workspace.shape, workspace.dtype)()
            if workspace is needs.get("dq_sum"):
                self.sums.append(array)
            return array

        return SeparateWorkspaces(needs, make, self.address)


def one_tile_of_queries(num_key_tiles: int) -> Example:
    blocks = np.ones((1, num_key_tiles), bool)
    return half(Structure(
        num_heads=1, seqlen_q=64, seqlen_kv=128 * num_key_tiles, head_dim=128, value_dim=128,
        mask=masks.BlockPattern(blocks, 128),
    ))  # fmt: skip


def sums_of_parts(example: Example, o: Any, lse: Any) -> Any:
    """Return, for each tile of keys, the sum of all elements of its unscaled part of dQ."""
    q, k, v, do = (np.asarray(getattr(example, name), np.float64) for name in ("q", "k", "v", "do"))
    scale = example.q.shape[-1] ** -0.5 if example.scale is None else example.scale
    p = np.exp(scale * q @ k.swapaxes(-1, -2) - np.asarray(lse, np.float64)[..., None])
    delta = (do * np.asarray(o, np.float64)).sum(-1, keepdims=True)
    if example.dlse is not None:
        delta -= np.asarray(example.dlse, np.float64)[..., None]
    ds = p * (do @ v.swapaxes(-1, -2) - delta)
    return (ds.sum(-2) * k.sum(-1)).reshape(-1, 128).sum(-1)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_order_of_arrivals_gives_dq(order: tuple[int, ...]) -> None:
    """Blocks first run one after another, so that they arrive in the given order; then under other schedules.

    The workspace is left with the sums of all tiles but the one that arrives last, which finishes dQ.
    """
    example, number = one_tile_of_queries(len(order)), len(order)
    with WAYS["lists"].plans():
        WAYS["lists"].check(plan_of(example), example)
        machine = Ordered(sim.Schedule(order="first_warp", resident_blocks=number), "blocks", order=order)
        outputs = call(example, SIM90, machine, margin=ALIGNED)
        assert_within_bounds(example, **outputs)
        parts = sums_of_parts(example, outputs["o"], outputs["lse"])
        (left,) = machine.sums
        others = [parts.sum() - part for part in parts]
        assert int(np.argmin(np.abs(np.array(others) - left[..., 0, :].sum(dtype=np.float64)))) == order[-1]
        seed = ORDERS.index(order)
        for schedule in (
            sim.Schedule(seed=seed, order="random", copies="late", shuffle_lanes=True, resident_blocks=number),
            sim.Schedule(seed=seed, order="priorities", copies="random", resident_blocks=number),
        ):
            again = call(example, SIM90, Ordered(schedule, "blocks", order=order), margin=ALIGNED)
            assert_within_bounds(example, **again)
            assert all(outputs[name].tobytes() == again[name].tobytes() for name in ("dk", "dv"))


BANDS: dict[str, Callable[[int], Structure]] = {
    "dense": lambda tiles: Structure(
        num_heads=6, num_kv_heads=6, seqlen_q=70, seqlen_kv=128 * tiles - 40, head_dim=64, value_dim=40
    ),
    "causal": lambda tiles: Structure(
        num_heads=6, num_kv_heads=6, seqlen_q=128 * tiles - 50, seqlen_kv=128 * tiles - 40, head_dim=128,
        value_dim=128, mask=masks.Causal("bottom_right"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, num_tiles, seed", [
    (name, num_tiles, seed)
    for number, (name, num_tiles) in enumerate(in_turn(BANDS, (2, 3, 4)))
    for seed in (range(3) if is_long() else [number % 3])
])
def test_tiles_of_a_band_share_dq_in_any_schedule(name: str, num_tiles: int, seed: int) -> None:
    """The block that starts first takes the first tile, so orders of blocks differ only in their schedules."""
    example, orders = half(BANDS[name](num_tiles)), ("first_warp", "random", "priorities")
    with on_few_processors():
        WAYS["order"].check(plan_of(example), example)
        schedule = sim.Schedule(
            seed=seed, order=orders[seed], copies="late" if seed else "eager", resident_blocks=num_tiles
        )
        outputs = call(example, SIM90, Simulator(schedule, "blocks"), margin=ALIGNED)
    assert_within_bounds(example, **outputs)


# Runs gradients in a separate process, which the sanitizer may end: as `sys.argv[1]` says, then with the edit that
# follows, under lists.
CHILD = """
import sys, tempfile
from pathlib import Path
from cuflash import sim
from cuflash.executors.sim import Simulator
from mutations import planting
import cuflash, numpy as np
from cuflash.executors.launch import run
from test_dq_finishing import WAYS
from test_dq_orders import BANDS, one_tile_of_queries
from test_sm90 import SIM90, half
first, *edit = sys.argv[1:]
def gradients(way):
    example = one_tile_of_queries(3) if way == "lists" else half(BANDS["dense"](3))
    arrays = {name: getattr(example, name) for name in ("q", "k", "v", "do", "dlse")}
    options = {"mask": example.mask, "scale": example.scale, "return_lse": True}
    arrays["o"], arrays["lse"] = cuflash.attention(*(arrays[name] for name in "qkv"), **options)
    with WAYS[way].plans():
        plan = SIM90.kernel_plan(example)
        results = {name: np.zeros(each.shape, each.dtype) for name, each in plan.kernel_gradients.items()}
        run(plan, plan.kernels.backward, Simulator(sim.Schedule(order="random"), "thread"), arrays | results)
gradients(first)
print("end", file=sys.stderr, flush=True)
with tempfile.TemporaryDirectory() as folder, planting.planted(Path(folder), planting.Edit(*edit)):
    gradients("lists")
"""
# Races that racecheck reports: on the copy of sums to the staging buffer, and on the word that says whether a step
# finishes dQ.
UNORDERED = {
    "consumers read sums before they are there": (
        "sm90/backward_epilogue.cuh", "wait_dq", "ptx::bar_sync(kDqEmpty + part, kWarpgroupThreads + 32);", ""
    ),
    "consumers read the word before it is written": (
        "sm90/backward.cu", "end_step", "wait_dq(part); dq_finish = smem.dq_finish;",
        "dq_finish = smem.dq_finish; wait_dq(part);",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("way", "fault"), [*zip(("lists", "order"), UNORDERED)])
def test_threads_of_a_block_race_for_nothing_and_what_racecheck_reports_would_be_seen(way: str, fault: str) -> None:
    """Each process runs one way, then one fault, whose race ThreadSanitizer reports."""
    paths = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in (".", "support", "kernels"))]
    code = f"import sys; sys.path[:0] = {paths}\n{CHILD}"
    command = ["env", *(f"{name}={value}" for name, value in sim.preload_environment("thread").items())]
    command += [sys.executable, "-c", code, way, *UNORDERED[fault]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    without, end, planted = run.stderr.partition("end\n")
    assert end and "WARNING" not in without, without
    assert "WARNING: ThreadSanitizer: data race" in planted
