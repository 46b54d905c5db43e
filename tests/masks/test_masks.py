"""Masks as mathematics: literal tables, the algebra, closed forms against elements, and arrays that keep their kind."""

import importlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import UnsupportedProblem, masks, patterns
from cuflash.masks import MaskShape
from cuflash.testing import strategies

SHAPES = st.builds(
    MaskShape,
    st.sampled_from([(), (1,), (2,), (2, 3)]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 40),
    st.integers(1, 40),
)
SHAPES_AND_MASKS = SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), strategies.masks(shape)))

# patterns with lengths that are not fixed by their blocks
LENGTH_FREE = st.one_of(
    st.builds(
        lambda dilation, left, right, num_global: patterns.longformer(
            (left * dilation, right * dilation), num_global, dilation=dilation
        ),
        st.integers(1, 4), *[st.integers(0, 4)] * 2, st.integers(0, 5),
    ),
    st.builds(patterns.strided, st.integers(1, 9)),
    st.integers(1, 9).flatmap(lambda stride: st.builds(patterns.fixed, st.just(stride), st.integers(0, stride))),
    st.builds(patterns.sink_local, st.integers(0, 5), st.tuples(st.integers(0, 9), st.integers(0, 3))),
)


TABLES = {
    "causal with fewer queries than keys": (
        masks.Causal("bottom_right"), [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    ),
    "causal from the first key": (masks.Causal("top_left"), [[1, 0, 0, 0], [1, 1, 0, 0]]),
    "causal with more queries than keys": (
        masks.Causal("bottom_right"), [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    ),
    "causal beyond the last key": (masks.Causal("top_left"), [[1, 0], [1, 1], [1, 1]]),
    "a window of left 2 holds 3 keys": (
        masks.SlidingWindow(2, 0), [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    ),
    "a window at the last key": (masks.SlidingWindow(1, 0, "bottom_right"), [[0, 1, 1, 0], [0, 0, 1, 1]]),
    "a window at the first key": (masks.SlidingWindow(1, 0, "top_left"), [[1, 0, 0, 0], [1, 1, 0, 0]]),
    "a prefix": (masks.PrefixLM(3, "top_left"), [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]),
    "blocks that each query chooses": (
        masks.ChosenBlocks(np.array([[1, -1], [0, 2], [2, 2], [-1, -1]]), 2),
        [[0, 0, 1, 1, 0], [1, 1, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]],
    ),
    "compressed keys that end by the query": (masks.Compressed(2, 1), [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]),
    "documents in any order": (masks.Documents(np.array([2, 0]), np.array([0, 2, 0])), [[0, 1, 0], [1, 0, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_masks_are_their_tables(name):
    mask, table = TABLES[name]
    assert mask.toarray(len(table), len(table[0])).astype(int).tolist() == table


def test_lengths_differ_by_batch_entry():
    mask = masks.Lengths(q=np.array([1, 2]), kv=np.array([2, 0]))
    assert mask.toarray(2, 3, batch=(2,), num_heads=1).astype(int)[:, 0].tolist() == [
        [[1, 1, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0]],
    ]


def test_leading_axes_of_arrays_broadcast_over_the_batch():
    rng = np.random.default_rng(0)
    allowed = rng.random((3, 1, 2, 4, 5)) < 0.5  # broadcast to batch (3, 2) and 2 heads
    expected = np.broadcast_to(allowed, (3, 2, 2, 4, 5))
    assert (masks.Dense(allowed).toarray(4, 5, batch=(3, 2), num_heads=2) == expected).all()


@given(SHAPES_AND_MASKS, st.data())
def test_the_algebra_is_that_of_dense_logic(shape_and_mask, data):
    shape, first = shape_and_mask
    second = data.draw(strategies.masks(shape))
    ours, theirs = first.toarray(**shape._asdict()), second.toarray(**shape._asdict())
    assert ((first & second).toarray(**shape._asdict()) == (ours & theirs)).all()
    assert ((first | second).toarray(**shape._asdict()) == (ours | theirs)).all()
    assert ((~first).toarray(**shape._asdict()) == ~ours).all()


@given(SHAPES_AND_MASKS)
def test_row_intervals_hold_exactly_the_allowed_keys_and_never_decrease(shape_and_mask):
    shape, mask = shape_and_mask
    resolved = mask.resolve(shape)
    b, h = np.arange(shape.num_batch)[:, None, None], np.arange(shape.num_heads)[:, None]
    bounds = resolved.intervals(b, h, np.arange(shape.seqlen_q))
    if bounds is None:
        return
    full = (shape.num_batch, *shape[1:3])
    lo, hi = (np.broadcast_to(np.clip(side, 0, shape.seqlen_kv), full) for side in bounds)
    inside = (lo[..., None] <= np.arange(shape.seqlen_kv)) & (np.arange(shape.seqlen_kv) < hi[..., None])
    assert (inside.reshape(mask.toarray(**shape._asdict()).shape) == mask.toarray(**shape._asdict())).all()
    assert (np.diff(lo) >= 0).all() and (np.diff(hi) >= 0).all()


def assert_rectangles_never_claim_too_much(mask, shape, rectangle, seed):
    """Assert that rectangles reported as empty have no allowed element, and that full ones have no other."""
    dense = mask.toarray(**shape._asdict()).reshape(shape.num_batch, *shape[1:])
    rng = np.random.default_rng(seed)
    b, h = rng.integers(0, shape.num_batch, 50), rng.integers(0, shape.num_heads, 50)
    (i0, i1), (j0, j1) = (np.sort(rng.integers(0, length + 1, (2, 50)), axis=0) for length in shape[2:])
    boxes = [side[(i0 < i1) & (j0 < j1)] for side in (b, h, i0, i1, j0, j1)]
    may, must = (np.broadcast_to(answer, boxes[0].shape) for answer in rectangle(*boxes))
    for place, (b, h, i0, i1, j0, j1) in enumerate(zip(*boxes)):
        inside = dense[b, h, i0:i1, j0:j1]
        assert may[place] or not inside.any()
        assert not must[place] or inside.all()


@given(SHAPES, st.data())
def test_rectangles_never_claim_too_much(shape, data):
    mask = data.draw(st.one_of(strategies.masks(shape), LENGTH_FREE))
    try:
        resolved = mask.resolve(shape)
    except UnsupportedProblem:
        return  # the pattern has no alignment
    assert_rectangles_never_claim_too_much(mask, shape, resolved.rectangle, data.draw(st.integers(0, 2**32)))


@pytest.mark.parametrize("mask", [masks.Causal(), masks.SlidingWindow(3, 1) & ~masks.Causal(), masks.Lengths(kv=3)])
def test_masks_without_arrays_compare_and_hash_by_value(mask):
    twin = type(mask)(**{field: getattr(mask, field) for field in mask.__dataclass_fields__})
    assert mask == twin and hash(mask) == hash(twin)
    assert mask != masks.Causal("top_left")


@pytest.mark.parametrize("mask", [masks.Causal("top_left"), ~masks.Lengths(kv=3) & masks.Band(0, 1)], ids=str)
def test_a_hash_stays_in_the_process_that_made_it(mask):
    """A pickled mask holds no hash, since types and strings have other hashes in another process."""
    hash(mask)
    sent = pickle.loads(pickle.dumps(mask))
    assert vars(sent).keys() == mask.__dataclass_fields__.keys() and sent == mask and hash(sent) == hash(mask)


def test_bool_of_a_mask_says_which_operators_to_use():
    with pytest.raises(TypeError, match="combine masks with & | ~"):
        masks.Causal() and masks.Causal()


def check_aligned_patterns(library):
    """Check that the last queries of a sequence attend the keys that they attend in the whole."""
    of, lengths = importlib.import_module(f"{library.__name__}.patterns"), ((4, 9), (9, 9))
    for make in (
        lambda align: of.longformer((2, 1), 2, align=align),
        lambda align: of.strided(3, align=align),
        lambda align: of.fixed(3, 1, align=align),
        lambda align: of.sink_local(2, (3, 0), align=align),
    ):
        part, whole = (make("bottom_right").toarray(*each) for each in lengths)
        assert np.array_equal(part, whole[5:]) and np.array_equal(whole, make(None).toarray(9))
        assert np.array_equal(make("bottom_right").toarray(9, 4)[5:], make(None).toarray(4))
    before = of.longformer((0, 0), 2, align="bottom_right").toarray(9, 4)[:5]
    assert before.tolist() == [[True, True, False, False]] * 5


def test_aligned_patterns():
    check_aligned_patterns(cuflash)
