"""Tiles of packed sequences as kernels of the sm90 family cut them: each row is in one tile; what this cutting saves.

In the forward pass, kernels cut queries by row intervals; in the backward pass, arrays hold the starts of query and key
tiles.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuflash.blocks.work_list import IntervalWork
from executors import Run, needs_compiler, sampled_on_simulator
from hypothesis import given
from hypothesis import strategies as st
from probing import sequence_tiles
from test_packed_sequences import check_alone, packed_structure
from test_sm90 import on_sm90

import cuflash
from cuflash import masks, sim
from cuflash.masks import MaskShape

HEIGHT, WIDTH = 32, 16
HOSTILE = sim.Schedule(seed=3, order="random", shuffle_lanes=True)
places = pytest.mark.parametrize(
    "place", [pytest.param("sim", marks=needs_compiler), pytest.param("gpu", marks=pytest.mark.gpu)]
)


def tiles_of(mask: masks.Mask, seqlen_q: int, seqlen_kv: int, place: str = "sim") -> list[tuple[int, int]]:
    """Return the first query and the end of each tile, in the order of the thread blocks."""
    listed = sequence_tiles(mask, seqlen_q, seqlen_kv, HEIGHT, WIDTH)
    left = listed.launch.on_gpu() if place == "gpu" else listed.launch.on_simulator(HOSTILE)
    assert isinstance(listed.plan.work, IntervalWork) and listed.plan.work.lo is not None
    tiles, counts = left[1], left[2]
    taken = [(int(first), int(last)) for first, last in tiles[: counts.sum()]]
    blocks = np.repeat(np.arange(len(counts)), counts)
    assert all(number == first // HEIGHT or number + 1 == first // HEIGHT for number, (first, _) in zip(blocks, taken))
    return taken


def alone(offsets: Any, height: int = HEIGHT) -> list[tuple[int, int]]:
    """Return the tiles that each sequence would have in a call of its own."""
    return [
        (first, min(first + height, end)) for start, end in pairwise(offsets) for first in range(start, end, height)
    ]


def assert_parts(mask: masks.Mask, length: int, place: str = "sim") -> None:
    """Assert that each query is in exactly one tile."""
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
    if kind == "lengths":  # rows past the lengths belong to no sequence
        mask = mask & masks.Lengths(q=int(offsets[-1]) - 1, kv=int(offsets[-2]) + 1)
    assert_parts(mask, int(offsets[-1]), place)


@needs_compiler
@given(st.lists(st.integers(2 * HEIGHT, 200), min_size=2, max_size=6))
def test_long_sequences_have_the_tiles_of_calls_of_their_own(lengths: list[int]) -> None:
    """No tile has queries of two sequences, and each starts a multiple of HEIGHT keys after its sequence's start."""
    offsets = np.cumsum([0, *lengths])
    assert tiles_of(masks.Sequences(offsets, causal=True), offsets[-1], offsets[-1]) == alone(offsets)


@needs_compiler
def test_steps_end_with_the_diagonal_where_queries_follow_other_keys() -> None:
    """After a sequence's first block, a multiple of HEIGHT keys of the sequence precedes the diagonal of each tile."""
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
@pytest.mark.parametrize(("offsets", "window"), [([0, 300], (50, None)), ([*range(0, 161, 10)], None)])
def test_windows_and_short_sequences_have_the_tiles_of_a_single_sequence(offsets: list[int], window: Any) -> None:
    mask = masks.Sequences(np.array(offsets), causal=True, window=window)
    assert tiles_of(mask, offsets[-1], offsets[-1]) == alone([0, offsets[-1]])


@needs_compiler
def test_a_tile_ends_with_its_sequence_whatever_follows() -> None:
    assert (64, 70) in tiles_of(masks.Sequences(np.array([0, 70, 75, 80, 160]), causal=True), 160, 160)


def backward_tiles(mask: masks.Mask, seqlen_q: int, seqlen_kv: int, library: ModuleType = cuflash) -> list[Any]:
    """Return the first rows of the backward tiles of queries and of keys, followed by the length."""
    work_list = import_module(f"{library.__name__}.blocks.work_list").work_list
    shape = MaskShape((), 1, seqlen_q, seqlen_kv)
    work = work_list(mask.resolve(shape), shape, (16, 16), is_ordered=True).with_sequence_tiles((HEIGHT, WIDTH))
    assert work.num_sequence_tiles == tuple(work.lists[name].shape[1] - 1 for name in ("q_blocks", "kv_blocks"))
    return [work.lists[name][0] for name in ("q_blocks", "kv_blocks")]


def check_backward_tiles(
    lengths: list[int], keys: list[int], causal: Any = False, library: ModuleType = cuflash
) -> None:
    """Check that tiles are those of each sequence alone, and that a tile's number is near its first row / height."""
    offsets = [np.cumsum([0, *side]) for side in (lengths, keys)]
    mask = library.masks.Sequences(*offsets, causal=causal)
    listed = backward_tiles(mask, int(offsets[0][-1]), int(offsets[1][-1]), library)
    for starts, bounds, height in zip(listed, offsets, (HEIGHT, WIDTH)):
        tiles = [(int(first), int(last)) for first, last in pairwise(starts) if first < last]
        assert tiles == alone(bounds, height), (bounds, height)
        for number, (first, last) in enumerate(pairwise(starts)):
            assert first == last or last - 1 - height * len(lengths) < number * height < last + height * len(lengths)
        assert len(starts) - 1 == bounds[-1] // height + len(lengths)


@given(st.lists(st.tuples(st.integers(1, 150), st.integers(2, 150)), min_size=1, max_size=6), st.booleans())
def test_backward_tiles_are_those_of_calls_of_their_own(lengths: list[tuple[int, int]], is_square: bool) -> None:
    queries, keys = ([side[n] for side in lengths] for n in (1, 1 if is_square else 0))
    check_backward_tiles(queries, [max(2, each) for each in keys], "bottom_right" if is_square else False)


@given(
    offsets=st.lists(st.integers(0, 200), min_size=2, max_size=6).map(sorted),
    window=st.none() | st.tuples(st.integers(0, 60), st.none()),
    lengths=st.none() | st.tuples(st.integers(0, 200), st.integers(0, 200)),
)
def test_each_row_is_in_one_backward_tile(offsets: list[int], window: Any, lengths: Any) -> None:
    mask: masks.Mask = masks.Sequences(np.array(offsets), causal=True, window=window, allow_gaps=True)
    if lengths is not None:  # rows past the lengths belong to no sequence
        mask = mask & masks.Lengths(q=lengths[0], kv=lengths[1])
    for starts, height in zip(backward_tiles(mask, 200, 200), (HEIGHT, WIDTH)):
        assert starts[0] == 0 and starts[-1] == 200 and starts.dtype == np.int32
        assert ((np.diff(starts) >= 0) & (np.diff(starts) <= height)).all()


def check_order(library: ModuleType) -> None:
    """Check that the tiles of keys that the most queries attend come first."""
    work = import_module(f"{library.__name__}.blocks.work_list").IntervalWork(
        seqlen_q=96, seqlen_kv=96, block_q=16, block_kv=16, lo=np.repeat([0, 20], [20, 76])[None, None],
        hi=1 + np.arange(96)[None, None], sequence_tile=(HEIGHT, WIDTH),
    )  # fmt: skip
    tiles = work.lists
    starts, order = tiles["kv_blocks"][0], tiles["column_entries"][0]
    assert starts.tolist() == [0, 16, 20, 36, 52, 68, 84, 96, 96]  # sequences of 20 and 76 keys
    # 20, 4, 76, 60, 44, 28, 12 and 0 queries attend these tiles; among tiles with equal numbers of blocks of 32
    # queries, the last comes first
    assert order.tolist() == [2, 4, 3, 6, 5, 1, 0, 7]


def test_tiles_of_keys_that_most_queries_see_come_first() -> None:
    check_order(cuflash)


# head_dim -> number of sequences in 8192 keys -> are forward tiles ordered, do they end with sequences, their queries.
CHOICES = {
    64: {10: (True, False, 128), 11: (False, False, 128), 15: (False, False, 128), 16: (False, False, 64)},
    128: {1: (True, True, 128), 10: (True, True, 128), 11: (False, False, 128), 31: (False, False, 128),
          32: (False, False, 64)},
    256: {10: (True, False, 128), 11: (False, False, 128), 64: (False, False, 128)},
}  # fmt: skip


TWO = (0, 4096, 8192)
OTHER_CHOICES = [  # offsets and a window -> whether forward tiles are ordered, and their number of queries
    (((0, 4096, *range(4160, 8193, 64)), None), (False, 64)),
    (((0, 1192, *range(1892, 8193, 700)), None), (False, 128)),
    ((TWO, (199, None)), (False, 64)),
    ((TWO, (199, 100)), (False, 128)),
    ((TWO, (3000, None)), (True, 128)),
]


def check_choice(library: ModuleType) -> None:
    """Check that the mean sequence length decides which kernels are chosen, from host offsets or from their number."""
    at_each_call = import_module(f"{library.__name__}.masks.one_array").at_each_call
    device = library.DeviceSpec.gpu("H100")
    for columns, choices in CHOICES.items():
        q = library.ShapeDtype((2, 8192, columns), np.dtype(np.float16))
        for sequences, expected in choices.items():
            mask = library.masks.Sequences(np.linspace(0, 8192, sequences + 1).astype(np.int32), causal=True)
            for each in (mask, at_each_call(mask)):
                planned = library.plan(q, q, q, mask=each, kernel="sm90", device=device)._plan
                forward = planned.specs["forward"]
                chosen = forward.is_ordered, forward.cuts_sequences, forward.block_q
                assert chosen == expected, (columns, sequences, each)
                if columns == 128:
                    check_backward_launches(planned, expected[1], sequences + 2 * (each is not mask))
    for (offsets, window), expected in OTHER_CHOICES:
        is_causal = window is None or window[1] is None
        mask = library.masks.Sequences(np.array(offsets, np.int32), causal=is_causal, window=window)
        q = library.ShapeDtype((2, 8192, 128), np.dtype(np.float16))
        for each in (mask, at_each_call(mask)):
            forward = library.plan(q, q, q, mask=each, kernel="sm90", device=device)._plan.specs["forward"]
            assert (forward.is_ordered, forward.block_q) == expected, (offsets, window, each)


def check_backward_launches(planned: Any, is_cut: bool, sequences: int) -> None:
    """Check that backward kernels are cut in the same way, and that arrays have an entry for each of their tiles."""
    launches, backward = planned.kernels.backward.launches, planned.kernels.backward
    assert all(launch.spec.cuts_sequences == is_cut for launch in launches.values())
    assert planned.work.num_sequence_tiles == ((8192 // 64 + sequences, 8192 // 128 + sequences) if is_cut else (0, 0))
    more = sequences if is_cut else 0
    assert launches["backward"].tiles == 2 * (8192 // 128 + more)
    assert launches["backward_statistics"].tiles == 2 * (8192 // 64 + more)
    assert all(
        backward.workspaces[name].shape[1] == 8192 // 64 + more for name in ("dq_sum",) if name in backward.workspaces
    )


def check_other_kernels(library: ModuleType) -> None:
    """Check that kernels whose tiles start at plain multiples do not cut sequences."""
    half, table = np.dtype(np.float16), np.zeros((2, 32), np.float32)
    relative = library.scores.relative_position(table, bidirectional=True)
    changes: dict[str, dict[str, Any]] = {
        "results repeat": {"deterministic": True},
        "results repeat with a score function": {"deterministic": True, "softcap": 30.0},
        "a bias is staged": {"bias": library.ShapeDtype((2, 4096, 4096), half), "wrt": "bias"},
        "a table has bins": {"score": relative, "wrt": "table"},
        "a sink has a gradient": {"sink": library.ShapeDtype((2,), np.dtype(np.float32)), "wrt": "sink"},
        "64 columns": {"dim": 64},
        "192 columns": {"dim": 192},
    }
    mask, device = library.masks.Sequences(np.array([0, 2000, 4096]), causal=True), library.DeviceSpec.gpu("H100")
    for change, options in changes.items():
        q = library.ShapeDtype((2, 4096, options.pop("dim", 128)), half)
        planned = library.plan(q, q, q, mask=mask, kernel="sm90", device=device, **options)._plan
        launches = planned.kernels.backward.launches.values()
        assert planned.specs["forward"].cuts_sequences == ("columns" not in change), change
        assert not any(launch.spec.cuts_sequences for launch in launches), change


def test_other_kernels_cut_keys_at_multiples() -> None:
    check_other_kernels(cuflash)


def test_long_and_short_sequences_have_kernels_of_their_own() -> None:
    check_choice(cuflash)


@sampled_on_simulator(on_sm90, "case, columns", [("full", 128), ("last meets last", 128), ("causal", 64)], 2)
def test_short_sequences_are_each_sequence_alone_in_small_tiles(run: Run, case: str, columns: int) -> None:
    """Tiles have 64 queries if the mean sequence length is at most 256 keys."""
    dims = {"head_dim": columns, "value_dim": columns}
    forward = run.kernel_plan(run.rounded(packed_structure(case, dtype="float16", **dims).example())).specs["forward"]
    assert (forward.block_q, forward.min_blocks, forward.is_ordered) == (64, 2, False)
    check_alone(run, case, "float16", **dims)
