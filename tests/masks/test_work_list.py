"""Work lists visit what the mask allows, from either side, and nothing that is absent."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_masks import SHAPES_AND_MASKS

from cuflash import BlockIndex, DeviceSpec, ShapeDtype, masks, patterns, plan
from cuflash.blocks.classify import BlockKind, row_intervals
from cuflash.masks import MaskShape
from cuflash.blocks.work_list import IntervalWork, ListedWork, requested_mask, work_list

TILES = st.tuples(st.integers(1, 12), st.integers(1, 12))


def listed_work(mask, shape, tile):
    return work_list(requested_mask(mask, False, None, shape), shape, tile)


def elements_of(work, segment, b, h, rows, keys):
    if segment.kind == BlockKind.FULL:
        return True
    if segment.kind == BlockKind.BITS:
        tile = work.bit_tile(segment.tile)
        return tile[np.ix_(np.arange(*rows) % work.block_q, np.arange(*keys) % work.block_kv)]
    lo, hi = work.bounds(b, h, *rows)
    j = np.arange(*keys)
    return (lo[:, None] <= j) & (j < hi[:, None])


def rebuilt(work, shape, transposed):
    """Return the mask that a work list describes by rows or by columns, and the elements that it visits."""
    allowed, visited = (np.zeros((shape.num_batch, *shape[1:]), bool) for _ in range(2))
    length = shape.seqlen_kv if transposed else shape.seqlen_q
    block = work.block_kv if transposed else work.block_q
    for b, h in np.ndindex(shape.num_batch, shape.num_heads):
        for start in range(0, length, block):
            block_range = (start, min(start + block, length))
            for segment in (work.column if transposed else work.row)(b, h, *block_range):
                segment_range = (segment.start, segment.stop)
                rows, keys = (segment_range, block_range) if transposed else (block_range, segment_range)
                place = (b, h, slice(*rows), slice(*keys))
                assert not visited[place].any() and segment.start < segment.stop
                visited[place] = True
                allowed[place] = elements_of(work, segment, b, h, rows, keys)
    return allowed, visited


@given(SHAPES_AND_MASKS, TILES)
def test_rows_and_columns_tell_the_same_mask(shape_and_mask, tile):
    shape, mask = shape_and_mask
    work = listed_work(mask, shape, tile)
    for transposed in (False, True):
        allowed, _ = rebuilt(work, shape, transposed)
        assert (allowed == mask.toarray(**shape._asdict()).reshape(allowed.shape)).all()


@given(SHAPES_AND_MASKS, TILES)
def test_no_tile_without_an_allowed_element_is_visited(shape_and_mask, tile):
    shape, mask = shape_and_mask
    work = listed_work(mask, shape, tile)
    allowed, visited = rebuilt(work, shape, False)
    for b, h in np.ndindex(allowed.shape[:2]):
        for row in range(0, shape.seqlen_q, work.block_q):
            rows = slice(row, row + work.block_q)
            for start in np.flatnonzero(visited[b, h, rows].any(axis=0)):
                near = slice(max(start - work.block_kv + 1, 0), start + work.block_kv)
                assert allowed[b, h, rows, near].any()


def test_dense_causal_and_windows_hold_no_array():
    shape = MaskShape((2,), 4, 1 << 20, 1 << 20)
    for mask in (None, masks.Causal(), masks.SlidingWindow(100, 5) & masks.Causal()):
        work = listed_work(mask, shape, (128, 128))
        assert isinstance(work, IntervalWork) and work.band is not None and work.nbytes == 0


def test_lengths_prefixes_and_sorted_documents_hold_two_integers_a_row():
    shape = MaskShape((2,), 4, 1000, 1000)
    ids = np.sort(np.random.default_rng(0).integers(0, 9, 1000))
    for mask in (masks.Lengths(kv=np.array([3, 900])), masks.PrefixLM(7), masks.Documents(ids) & masks.Causal()):
        work = listed_work(mask, shape, (128, 128))
        assert isinstance(work, IntervalWork) and work.nbytes <= 2 * 2 * 4 * 1000


CHANGES = ["", "drops", "fills", "moves", "turns"]


def with_a_change(index, number, change):
    """Return an index with a change of one entry, or with the intervals of a block row in reverse order.

    The entry is dropped, becomes a full block if it has no bits or, if it is the last of its row, moves by a block.
    """
    num_entries, block_rows = len(index.indices), index._block_rows
    if change == "turns" and index.lo is not None:
        rows, top = np.arange(index.seqlen_q), number % index.num_q_blocks * index.block[0]
        rows[top : top + index.block[0]] = rows[top : top + index.block[0]][::-1].copy()
        return replace(index, lo=index.lo[..., rows], hi=index.hi[..., rows])
    number %= max(num_entries, 1)
    is_changed = np.arange(num_entries) == number
    if change == "fills":
        return replace(index, kinds=np.where(is_changed & (index.tiles < 0), BlockKind.FULL, index.kinds))
    if change == "drops" and num_entries:
        fields = {name: getattr(index, name)[~is_changed] for name in ("indices", "kinds", "tiles")}
        return replace(index, indptr=index.indptr - (index.indptr > number).astype(np.int32), **fields)
    if change == "moves" and num_entries:
        is_last = number + 1 == index.indptr[block_rows[number] + 1]
        step = is_last and index.indices[number] + 1 < index.num_kv_blocks
        return replace(index, indices=index.indices + (is_changed * step).astype(np.int32))
    return index


@given(SHAPES_AND_MASKS, TILES, TILES, st.integers(0, 99), st.sampled_from(CHANGES))
def test_the_work_of_an_index_is_its_elements(shape_and_mask, block, tile, number, change):
    shape, mask = shape_and_mask
    index = with_a_change(BlockIndex.from_mask(mask, block=block, **shape._asdict()), number, change)
    work = listed_work(index, shape, tile)
    for transposed in (False, True):
        allowed, _ = rebuilt(work, shape, transposed)
        assert (allowed == index.as_mask().toarray(**shape._asdict()).reshape(allowed.shape)).all()


def test_an_index_of_packed_sequences_needs_no_list():
    offsets, shape = [0, 70, 75, 260], MaskShape((), 2, 260, 260)
    for mask in (masks.Sequences(offsets, causal=True), masks.Causal(), masks.SlidingWindow(70, 3)):
        index = BlockIndex.from_mask(mask, 260, 260, 32)
        work = listed_work(index, shape, (128, 128))
        assert isinstance(work, IntervalWork)
        for side, of_mask in zip((work.lo, work.hi), row_intervals(mask.resolve(shape), 260, 260, 1, 1)):
            assert (side == of_mask).all()
        assert isinstance(listed_work(with_a_change(index, 3, "drops"), shape, (128, 128)), ListedWork)


def test_a_block_index_is_walked_as_it_came():
    index = BlockIndex.from_blocks(np.eye(4, dtype=bool), 64, 64, 16)
    work = listed_work(index, MaskShape((), 1, 64, 64), (256, 512))
    assert isinstance(work, ListedWork) and work.index is index


def test_large_blocks_are_listed_as_several():
    index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 2048, 2048, 1024)
    work = listed_work(index, MaskShape((), 1, 2048, 2048), (256, 512))
    assert (work.block_q, work.block_kv) == (128, 128) and set(work.index.kinds) == {BlockKind.FULL}


def test_blocks_too_small_for_a_list_are_joined():
    mask = masks.BlockPattern(np.random.default_rng(0).random((25, 25)) < 0.5, 4)
    work = listed_work(mask, MaskShape((), 1, 100, 100), (256, 512))
    assert (work.block_q, work.block_kv) == (16, 16) and BlockKind.BITS in work.index.kinds


def test_documents_whose_queries_skip_keys_are_listed():
    queries, keys = np.array([0] * 8 + [2] * 8), np.array([0] * 8 + [1] * 64 + [2] * 8)
    work = listed_work(masks.Documents(queries, keys), MaskShape((), 1, 16, 80), (16, 8))
    assert isinstance(work, ListedWork) and work.index.num_entries == 2


def assert_longest_first(lists, num_matrices):
    """Assert that each matrix orders its rows and columns by decreasing number of entries, ties by decreasing index."""
    for side in ("row", "column"):
        order = lists[f"{side}_order"].reshape(num_matrices, -1)
        lengths = np.diff(lists[f"{side}_pointers"]).reshape(order.shape)
        assert (np.sort(order, axis=1) == np.arange(order.shape[1])).all()
        fall = np.diff(np.take_along_axis(lengths, order, axis=1), axis=1)
        assert (fall <= 0).all() and (np.diff(order, axis=1)[fall == 0] < 0).all()


@given(SHAPES_AND_MASKS, TILES)
def test_rows_and_columns_of_most_entries_come_first(shape_and_mask, tile):
    shape, mask = shape_and_mask
    index = BlockIndex.from_mask(mask, block=tile, **shape._asdict())
    assert_longest_first(ListedWork(index=index).lists, index.batch * index.num_heads)


def peak_bytes(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MILLION = 1 << 20


@pytest.mark.parametrize(
    "make, limit",
    [
        (lambda: masks.Causal(), 1 << 20),
        (lambda: masks.SlidingWindow(4096, 0), 1 << 20),
        (lambda: masks.Lengths(kv=np.array([1000])) & masks.Causal(), 64 << 20),
        (lambda: masks.Causal() & masks.Documents(np.arange(MILLION) // 5000), 96 << 20),
        (lambda: patterns.butterfly(MILLION) & masks.Causal(), 256 << 20),
        (lambda: masks.PrefixLM(5000), 64 << 20),
    ],
)
def test_a_million_tokens_never_need_a_square_array(make, limit):
    # A bit for each element would take 128 GiB, and a byte for each 128 x 128 block 64 MiB.
    shape = ShapeDtype((1, 1, MILLION, 64), np.float16)
    assert peak_bytes(lambda: plan(shape, shape, shape, mask=make())) < limit


def test_every_gpu_gets_a_tile_that_fits_its_shared_memory():
    for name in ("T4", "A100", "RTX 4090", "H100", "B200"):
        device = DeviceSpec.gpu(name)
        for head_dim in (1, 64, 128, 256):
            shape = ShapeDtype((1024, head_dim), np.float16)
            ready = plan(shape, shape, shape, causal=True, device=device)
            served = {"simt": {"backward_rows", "backward_columns"}, "sm80": {"backward", "convert_dq"}}
            assert {"forward"} | served["simt" if name == "T4" else "sm80"] <= set(ready._plan.specs)
            kernels = ready._plan.kernels
            launches = (*kernels.forward.launches.values(), *kernels.backward.launches.values())
            assert all(launch.shared_bytes <= device.tile_memory_bytes for launch in launches)
