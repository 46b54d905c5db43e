"""Calls with a new mask each time retain no memory, on the host or on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors import is_long
from library_parts import part
from workspace_memory import memory, stream

import cuflash
from cuflash import BlockIndex, masks

STATM = Path("/proc/self/statm")
WARM, MOST_GROWTH = 300, 5 << 20
RNG = np.random.default_rng(0)
ARRAYS = RNG.standard_normal((4, 2, 64, 16), dtype=np.float32)
BLOCKS = RNG.random((64, 4, 4)) < 0.6

pytestmark = pytest.mark.skipif(not STATM.exists(), reason="this system does not tell a process its memory")


def resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * 4096


def growth(call: Callable[[int], object], calls: int) -> int:
    """Return by how many bytes the process has grown between the first calls and all calls."""
    for turn in range(WARM):
        call(turn)
    before = resident_bytes()
    for turn in range(WARM, calls):
        call(turn)
    return resident_bytes() - before


def calls_with(arrays: Any, do: Any, mask_of: Callable[[int], Any]) -> Callable[[int], object]:
    def call(turn: int) -> object:
        _, vjp = cuflash.attention_vjp(*arrays, mask=mask_of(turn))
        return vjp(do)

    return call


def index_of(turn: int) -> BlockIndex:
    return BlockIndex.from_blocks(BLOCKS[turn % 64], 64, 64, 16)


def test_new_indices_leave_nothing_on_the_host() -> None:
    *arrays, do = ARRAYS
    assert growth(calls_with(arrays, do, index_of), 3000 if is_long() else 700) < MOST_GROWTH


def check_workspaces_share_memory(library: Any) -> None:
    """Check that workspaces of a thousand unlike calls have little memory, and those of one call each their own."""
    room, need = part(library, "executors.workspaces"), part(library, "planning.launches").Workspace
    where, whole, byte = memory(), np.dtype(np.int32), np.dtype(np.uint8)
    for rows in range(1, 1000):
        needs = {"a": need((rows,), whole, True), "b": need((rows,), whole, True), "c": need((8 * rows,), byte)}
        workspaces = room.Workspaces(needs, where)
        taken = workspaces.take(stream())
        starts = sorted(taken.addresses)
        assert all(later - start >= 4 * rows for start, later in zip(starts, starts[1:]))
        sizes = {each.address: each.nbytes for by_stream in where.kept.values() for each in by_stream.values()}
        assert all(sizes[address] >= 4 * rows for address in taken.addresses[:2])
        workspaces.give_back(stream(), taken)
    zeros = [each for by_stream in where.kept.values() for each in by_stream.values()]
    assert sum(each.nbytes for each in zeros) <= 2 * 2 * 4096 and len(where.kept_pieces()[7]) == 1


def test_workspaces_of_unlike_calls_share_memory() -> None:
    check_workspaces_share_memory(cuflash)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["BlockIndex", "bool array", "BlockPattern", "plan"])
def test_new_masks_leave_nothing_on_the_host_and_on_the_device(kind: str) -> None:
    cupy = pytest.importorskip("cupy")
    *arrays, do = map(cupy.asarray, ARRAYS.astype(np.float16))
    rows = np.arange(64)[:, None] >= np.arange(64) - np.arange(64)[:, None, None]
    dense, blocks = [cupy.asarray(each) for each in rows], [cupy.asarray(each) for each in BLOCKS]
    pool = cupy.get_default_memory_pool()

    def planned(turn: int) -> object:
        ready = cuflash.plan(*arrays, mask=dense[turn % 64])
        return ready.backward(do, *arrays, *ready.forward(*arrays))

    call = {
        "BlockIndex": calls_with(arrays, do, index_of),
        "bool array": calls_with(arrays, do, lambda turn: dense[turn % 64] | False),
        "BlockPattern": calls_with(arrays, do, lambda turn: masks.BlockPattern(blocks[turn % 64], 16)),
        "plan": planned,
    }[kind]
    for turn in range(WARM):
        call(turn)
    cupy.cuda.Device().synchronize()
    total = pool.total_bytes()
    assert growth(call, 3000) < MOST_GROWTH
    cupy.cuda.Device().synchronize()
    assert pool.total_bytes() == total
