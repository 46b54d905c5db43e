"""Tiles of queries of packed sequences, as kernels of the sm90 family cut them: parts, and what they save."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuflash.blocks.work_list import IntervalWork
from executors import Run, needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from probing import sequence_tiles
from test_packed_sequences import check_alone, packed_structure
from test_sm90 import on_sm90

import cuflash
from cuflash import masks, sim

HEIGHT, WIDTH = 32, 16
HOSTILE = sim.Schedule(seed=3, order="random", shuffle_lanes=True)
places = pytest.mark.parametrize(
    "place", [pytest.param("sim", marks=needs_compiler), pytest.param("gpu", marks=pytest.mark.gpu)]
)


def tiles_of(mask: masks.Mask, seqlen_q: int, seqlen_kv: int, place: str = "sim") -> list[tuple[int, int]]:
    """Return the first and last query of each tile, in order of the blocks that have them."""
    found = sequence_tiles(mask, seqlen_q, seqlen_kv, HEIGHT, WIDTH)
    left = found.launch.on_gpu() if place == "gpu" else found.launch.on_simulator(HOSTILE)
    assert isinstance(found.plan.work, IntervalWork) and found.plan.work.lo is not None
    tiles, counts = left[1], left[2]
    taken = [(int(first), int(last)) for first, last in tiles[: counts.sum()]]
    blocks = np.repeat(np.arange(len(counts)), counts)
    assert all(number == first // HEIGHT or number + 1 == first // HEIGHT for number, (first, _) in zip(blocks, taken))
    return taken


def alone(offsets: Any) -> list[tuple[int, int]]:
    """Return the tiles that each sequence has in a call of its own."""
    return [
        (first, min(first + HEIGHT, end)) for start, end in pairwise(offsets) for first in range(start, end, HEIGHT)
    ]


def assert_parts(mask: masks.Mask, length: int, place: str = "sim") -> None:
    """Assert that each query is in one tile."""
    taken = tiles_of(mask, length, length, place)
    assert taken[0][0] == 0 and taken[-1][1] == length
    assert all(before[1] == after[0] for before, after in pairwise(taken))
    assert all(0 < last - first <= HEIGHT for first, last in taken)


@places
@given(
    lengths=st.lists(st.integers(1, 150), min_size=2, max_size=6),
    kind=st.sampled_from(["causal", "full", "window", "both sides", "lengths"]),
)
def test_each_query_is_in_one_tile(place: str, lengths: list[int], kind: str) -> None:
    offsets = np.cumsum([0, *lengths])
    options: dict[str, Any] = {
        "causal": {"causal": True}, "full": {}, "window": {"causal": True, "window": (9, None)},
        "both sides": {"window": (40, 3)}, "lengths": {"causal": True},
    }[kind]  # fmt: skip
    mask: masks.Mask = masks.Sequences(offsets, **options)
    if kind == "lengths":  # queries and keys past them belong to no sequence
        mask = mask & masks.Lengths(q=int(offsets[-1]) - 1, kv=int(offsets[-2]) + 1)
    assert_parts(mask, int(offsets[-1]), place)


@needs_compiler
@given(st.lists(st.integers(2 * HEIGHT, 200), min_size=2, max_size=6))
def test_long_sequences_have_the_tiles_of_calls_of_their_own(lengths: list[int]) -> None:
    """No tile has queries of two sequences, and each starts with a multiple of HEIGHT keys before it."""
    offsets = np.cumsum([0, *lengths])
    assert tiles_of(masks.Sequences(offsets, causal=True), offsets[-1], offsets[-1]) == alone(offsets)


@needs_compiler
def test_steps_end_with_the_diagonal_where_queries_follow_other_keys() -> None:
    """A multiple of HEIGHT keys precede each tile of a sequence that does not start in its first block."""
    offsets, keys = np.array([0, 170, 350]), np.array([0, 200, 405])
    taken = tiles_of(masks.Sequences(offsets, keys, causal="bottom_right"), 350, 405)
    for (start, end), more in zip(pairwise(offsets), np.diff(keys) - np.diff(offsets), strict=True):
        later = [first for first, _ in taken if start + HEIGHT <= first < end]
        assert len(later) >= 4 and all((first - start + more) % HEIGHT == 0 for first in later[1:])


@needs_compiler
def test_sequences_without_a_diagonal_are_cut_at_multiples_and_where_they_start() -> None:
    offsets = [0, 75, 170, 300]
    taken = tiles_of(masks.Sequences(np.array(offsets)), 300, 300)
    assert [first for first, _ in taken] == sorted({*range(0, 300, HEIGHT), *offsets[:-1]})


@needs_compiler
def test_a_window_has_the_tiles_of_a_single_sequence() -> None:
    mask = masks.Sequences(np.array([0, 300]), causal=True, window=(50, None))
    assert tiles_of(mask, 300, 300) == alone([0, 300])


@needs_compiler
def test_short_sequences_share_a_tile() -> None:
    offsets = np.arange(0, 161, 10)
    assert tiles_of(masks.Sequences(offsets, causal=True), 160, 160) == alone([0, 160])


@needs_compiler
def test_a_tile_ends_with_its_sequence_whatever_follows() -> None:
    assert (64, 70) in tiles_of(masks.Sequences(np.array([0, 70, 75, 80, 160]), causal=True), 160, 160)


def check_choice(library: ModuleType) -> None:
    """Kernels are chosen by the keys of a sequence on average, whether the host sees offsets or their number."""
    at_each_call = import_module(f"{library.__name__}.masks.at_each_call").at_each_call
    q = library.ShapeDtype((2, 8192, 128), np.dtype(np.float16))
    for sequences, rows in ((1, 128), (10, 128), (11, 128), (31, 128), (32, 64)):
        is_long = sequences <= 10
        mask = library.masks.Sequences(np.linspace(0, 8192, sequences + 1).astype(np.int32), causal=True)
        for asked in (mask, at_each_call(mask)):
            planned = library.plan(q, q, q, mask=asked, kernel="sm90", device=library.DeviceSpec.gpu("H100")).plan
            forward = planned.specs["forward"]
            chosen = forward.is_ordered, forward.cuts_sequences, forward.block_q
            assert chosen == (is_long, is_long, rows), (sequences, asked)


def test_long_and_short_sequences_have_kernels_of_their_own() -> None:
    check_choice(cuflash)


@on_sm90
@pytest.mark.parametrize("case", ["full", "causal", "last meets last"])
def test_short_sequences_are_each_sequence_alone_in_small_tiles(run: Run, case: str) -> None:
    """Tiles have 64 queries where rows have 128 columns and sequences at most 256 keys on average."""
    dims = {"head_dim": 128, "value_dim": 128}
    forward = run.kernel_plan(run.rounded(packed_structure(case, dtype="float16", **dims).example())).specs["forward"]
    assert (forward.block_q, forward.min_blocks, forward.is_ordered) == (64, 2, False)
    check_alone(run, case, "float16", **dims)
