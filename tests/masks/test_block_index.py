"""Block indexes are exact: what they report about blocks is true of the elements."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_masks import SHAPES_AND_MASKS

import cuflash
from cuflash import BlockIndex, UnsupportedProblem, masks
from cuflash.blocks.classify import BlockKind
from cuflash.masks import MaskShape
from cuflash.testing import strategies

BLOCKS = st.tuples(st.integers(1, 12), st.integers(1, 12))


def blocks_of(dense, block):
    """Yield every block of a mask [batch, heads, seqlen_q, seqlen_kv], cut by plain slices."""
    for b, h in np.ndindex(dense.shape[:2]):
        for row in range(0, dense.shape[2], block[0]):
            for col in range(0, dense.shape[3], block[1]):
                place = (b, h, row // block[0], col // block[1])
                yield place, dense[b, h, row : row + block[0], col : col + block[1]]


@given(SHAPES_AND_MASKS, BLOCKS)
def test_densities_are_shares_of_pairs_and_of_blocks(shape_and_mask: Any, block: Any) -> None:
    shape, mask = shape_and_mask
    elements = mask.toarray(*shape[2:], batch=shape.batch, num_heads=shape.num_heads)
    share = elements.mean() if elements.size else 0
    assert mask.density(*shape[2:], batch=shape.batch, num_heads=shape.num_heads) == share
    index = BlockIndex.from_mask(mask, *shape[2:], block, batch=shape.batch, num_heads=shape.num_heads)
    assert index.density == index.report().density


@given(SHAPES_AND_MASKS, BLOCKS)
def test_lists_increase_and_bit_tiles_are_stored_once(shape_and_mask, block):
    shape, mask = shape_and_mask
    index = BlockIndex.from_mask(mask, block=block, **shape._asdict())
    for start, stop in zip(index.indptr, index.indptr[1:]):
        assert (np.diff(index.indices[start:stop]) > 0).all()
    assert len({tile.tobytes() for tile in index.bits}) == len(index.bits)
    assert set(index.tiles[index.kinds == BlockKind.BITS]) == set(range(len(index.bits)))
    assert (index.tiles[index.kinds != BlockKind.BITS] == -1).all()


@given(SHAPES_AND_MASKS, BLOCKS)
def test_transposing_swaps_queries_and_keys_and_twice_is_nothing(shape_and_mask, block):
    shape, mask = shape_and_mask
    index = BlockIndex.from_mask(mask, block=block, **shape._asdict())
    transposed = index.transpose()
    assert (transposed.toarray() == index.toarray().swapaxes(-1, -2)).all()
    back = transposed.transpose()
    assert (back.toarray() == index.toarray()).all()
    assert (back.indices == index.indices).all() and (back.kinds == index.kinds).all()


@given(SHAPES_AND_MASKS, BLOCKS, st.data())
def test_union_and_intersection_are_those_of_elements(shape_and_mask, block, data):
    shape, mask = shape_and_mask
    other = data.draw(strategies.masks(shape))
    ours, theirs = (BlockIndex.from_mask(each, block=block, **shape._asdict()) for each in (mask, other))
    assert ((ours & theirs).toarray() == (ours.toarray() & theirs.toarray())).all()
    assert ((ours | theirs).toarray() == (ours.toarray() | theirs.toarray())).all()


@given(SHAPES_AND_MASKS, BLOCKS, BLOCKS)
def test_an_index_compiled_again_at_another_block_is_the_same_mask(shape_and_mask, block, other):
    shape, mask = shape_and_mask
    index = BlockIndex.from_mask(mask, block=block, **shape._asdict())
    again = BlockIndex.from_mask(index.as_mask(), block=other, **shape._asdict())
    assert (again.toarray() == index.toarray()).all()


@given(SHAPES_AND_MASKS, BLOCKS)
def test_scipy_gives_back_what_it_was_given(shape_and_mask, block):
    shape, mask = shape_and_mask
    index = BlockIndex.from_mask(mask, block=block, **shape._asdict())
    elements = BlockIndex.from_scipy(index.to_scipy(elements=True), shape.seqlen_q, shape.seqlen_kv)
    assert (elements.toarray()[0, 0] == index.toarray()[0, 0]).all()
    assert (index.to_scipy().toarray() == index.states()[0, 0]).all()


@given(SHAPES_AND_MASKS, BLOCKS)
def test_the_report_counts_what_is_there(shape_and_mask, block):
    shape, mask = shape_and_mask
    index = BlockIndex.from_mask(mask, block=block, **shape._asdict())
    report, dense = index.report(head_dim=4, value_dim=2, itemsize=2), index.toarray()
    sizes = [elements.size for _, elements in blocks_of(dense, block) if elements.any()]
    assert report.num_full + report.num_partial == len(sizes) and report.elements_visited == sum(sizes)
    assert report.elements_allowed == dense.sum() and report.empty_rows == (~dense.any(axis=-1)).sum()
    assert report.forward_flops == 2 * sum(sizes) * 6 and report.backward_flops == 2 * sum(sizes) * 16
    assert (index.row_counts() == dense.sum(axis=-1)).all()


def test_density_may_be_stated_over_the_eligible_blocks():
    shape = MaskShape((), 1, 8, 8)
    causal = BlockIndex.from_mask(masks.Causal(), block=2, **shape._asdict())
    local = BlockIndex.from_mask(masks.Causal() & masks.SlidingWindow(1, 0), block=2, **shape._asdict())
    assert local.report().density == 7 / 16
    report = local.report(eligible=causal)
    assert report.density == 7 / 10 and "eligible blocks" in str(report)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from([(), (2,), (3, 2)]))
def test_lengths_of_whole_blocks_need_not_be_given(num_q, num_kv, block_q, block_kv, leading):
    blocks = np.random.default_rng(0).random((*leading, num_q, num_kv)) < 0.5
    lengths, block = (num_q * block_q, num_kv * block_kv), (block_q, block_kv)
    index = BlockIndex.from_blocks(blocks, *lengths, block)
    assert BlockIndex.from_blocks(blocks, block=block) == index
    assert BlockIndex.from_blocks(blocks, lengths[0], block=block) == index == BlockIndex.from_blocks(
        blocks, seqlen_kv=lengths[1], block=block
    )
    q = np.ones((1, lengths[0] + 1, 2), np.float32)
    if leading == ():
        with pytest.raises(UnsupportedProblem, match="the block index must be for lengths"):
            cuflash.attention(q, q, q, mask=BlockIndex.from_blocks(blocks, block=block))


def test_numbers_for_blocks_are_told_to_be_compared():
    for make in (lambda cells: BlockIndex.from_blocks(cells, 8, 8, 4), lambda cells: masks.BlockPattern(cells, 4)):
        for dtype in (int, float, np.uint8):
            with pytest.raises(UnsupportedProblem, match="blocks must be a boolean array .* blocks != 0"):
                make(np.eye(2, dtype=dtype))


@pytest.mark.parametrize(
    ("eligible", "message"),
    [
        (3, "eligible must be a BlockIndex or None; got 3"),
        (BlockIndex.from_mask(masks.Causal(), 8, 8, block=4), r"\(2, 2\); got \(8, 8\) in blocks of \(4, 4\)"),
        (BlockIndex.from_mask(masks.Band(), 8, 9, block=2), r"got \(8, 9\) in blocks of \(2, 2\)"),
    ],
)
def test_no_density_is_stated_over_other_blocks(eligible, message):
    with pytest.raises(UnsupportedProblem, match=message):
        BlockIndex.from_mask(masks.Causal(), 8, 8, block=2).report(eligible=eligible)


@pytest.mark.parametrize(
    "described",
    [
        masks.Causal(),
        masks.Causal() & masks.Lengths(kv=np.array([3])),
        masks.Sequences([0, 8]),
        BlockIndex.from_mask(masks.Causal(), 8, 8, block=2),
    ],
    ids=lambda described: type(described).__name__,
)
def test_a_name_of_a_device_converts_no_array(described):
    with pytest.raises(TypeError, match="convert must be a function of an array, such as cupy.asarray; got 'cuda'"):
        described.to("cuda")


def test_causal_has_one_interval_a_row_and_no_bit_tile():
    index = BlockIndex.from_mask(masks.Causal(), 256, 256, 64, num_heads=4)
    assert (index.batch, index.num_heads, len(index.bits)) == (1, 1, 0)
    assert set(index.kinds) == {BlockKind.FULL, BlockKind.INTERVAL}


def test_a_function_of_distance_is_stored_as_few_tiles():
    mask = masks.FromFunction(lambda b, h, i, j: (j <= i) & ((i - j) % 4 == 0))
    index = BlockIndex.from_mask(mask, 512, 512, 64, num_heads=2)
    # one bit tile for blocks just below the diagonal, one for blocks on it
    assert index.num_entries == 36 and len(index.bits) == 2


def test_a_mask_that_ignores_batch_and_heads_is_compiled_once_for_all():
    shape = MaskShape((3,), 2, 16, 16)
    by_head = masks.FromFunction(lambda b, h, i, j: (i + j + h) % 2 == 0)
    by_entry = masks.Lengths(kv=np.array([3, 9, 16]))
    indices = [BlockIndex.from_mask(mask, block=8, **shape._asdict()) for mask in (by_head, by_entry)]
    assert [(index.batch, index.num_heads) for index in indices] == [
        (1, 2),
        (3, 1),
    ]


@pytest.mark.parametrize("shape", [((), 1, 0, 5), ((), 1, 5, 0), ((0,), 2, 0, 5), ((2,), 0, 5, 0)])
def test_an_empty_problem_has_an_empty_index(shape):
    index = BlockIndex.from_mask(masks.Causal("top_left"), block=2, **MaskShape(*shape)._asdict())
    assert index.num_entries == 0 and index.report().density == 0.0


@pytest.mark.parametrize("batch, num_heads", [((0,), 2), ((2,), 0), ((0,), 0)])
def test_an_index_of_no_matrices_is_that_of_a_mask_which_ignores_them_or_fits_no_others(batch, num_heads):
    """It never hides keys from calls on other shapes."""
    q = np.random.default_rng(0).standard_normal((2, 4, 5, 8))
    empty = np.ones((*batch, num_heads, 5, 8))
    index = BlockIndex.from_mask(masks.Causal(), 5, 5, 2, batch=batch, num_heads=num_heads)
    assert (cuflash.attention(q, q, q, mask=index) == cuflash.attention(q, q, q, mask=masks.Causal())).all()
    own = BlockIndex.from_mask(np.ones((*batch, num_heads, 5, 5), bool), 5, 5, 2, batch=batch, num_heads=num_heads)
    assert own.shape == (*batch, num_heads, 5, 5) and own.num_entries == 0
    for each in (index, own):
        assert cuflash.attention(empty, empty, empty, mask=each).shape == empty.shape
    with pytest.raises(UnsupportedProblem, match="the block index must have (batch|num_heads) 1 or .; got 0"):
        cuflash.attention(q, q, q, mask=own)


def make_lists(library=cuflash, **changes):
    """Return the index of blocks 0 and 2, and 1, with other lists."""
    lists = {"indptr": [0, 2, 3], "indices": [0, 2, 1], "kinds": [1, 1, 1], "tiles": [-1, -1, -1]} | changes
    arrays = {name: np.array(numbers) for name, numbers in lists.items()}
    sizes = {"seqlen_q": 4, "seqlen_kv": 6, "block": (2, 2), "batch": 1, "num_heads": 1}
    return library.BlockIndex(**sizes, bits=np.zeros((1, 2, 1), np.uint8), **arrays)


WRONG_LISTS = {
    "numbers that are not ints": ({"indices": [0.0, 2.0, 1.0]}, "indices must be an integer array with one axis"),
    "a row too few": ({"indptr": [0, 3]}, "indptr must have 3 numbers"),
    "rows that end before the last entry": ({"indptr": [0, 2, 2]}, "indptr must have .* from 0 to the 3 entries"),
    "rows that end before they start": ({"indptr": [0, 4, 3]}, "numbers that never decrease"),
    "a row that decreases": ({"indices": [2, 0, 1]}, "indices must increase within each row"),
    "a block twice": ({"indices": [0, 0, 1]}, "indices must increase within each row"),
    "a block past the last": ({"indices": [0, 3, 1]}, "from 0 to 2: sort each row"),
    "a block before the first": ({"indices": [-1, 2, 1]}, "from 0 to 2"),
    "no such kind": ({"kinds": [1, 4, 1]}, "kinds must be a BlockKind"),
    "intervals that are missing": ({"kinds": [1, 2, 1]}, "INTERVAL only with lo and hi"),
    "no such tile": ({"kinds": [1, 3, 1], "tiles": [-1, 1, -1]}, "tiles must be a row of bits, from 0 to 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_LISTS)
def test_lists_of_other_blocks_are_refused(name):
    changes, message = WRONG_LISTS[name]
    with pytest.raises(cuflash.UnsupportedProblem, match=message):
        make_lists(**changes)
    assert make_lists().toarray()[0, 0, ::2, ::2].tolist() == [[True, False, True], [False, True, False]]
