"""Operators, block patterns and scipy.sparse arrays of masks and block indexes agree with NumPy on full arrays."""

import importlib
import operator

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import BlockIndex, UnsupportedProblem, masks, patterns
from cuflash.testing import Example, assert_within_bounds, strategies

OF_NUMPY = {
    operator.and_: np.logical_and, operator.or_: np.logical_or, operator.xor: np.logical_xor,
    operator.sub: lambda x, y: x & ~y,
}  # fmt: skip
FORMATS = ("csr", "csc", "coo", "bsr", "lil", "dok", "dia")
# Forms of a boolean table. All but the first two need one of the first two as the other operand.
FORMS = {
    "mask": lambda library, table, block: library.masks.Dense(table),
    "index": lambda library, table, block: library.BlockIndex.from_mask(table, *table.shape, block),
    "array": lambda library, table, block: table,
    "function": lambda library, table, block: lambda b, h, i, j: table[i, j],
    **{
        name: lambda library, table, block, name=name: scipy.sparse.coo_array(table).asformat(name) for name in FORMATS
    },
}


@st.composite
def tables(draw, most=11):
    """Draw two boolean tables of the same shape, and a block size."""
    shape = draw(st.integers(1, most)), draw(st.integers(1, most))
    rng, densities = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), st.sampled_from((0.5, 0.0, 1.0, 0.1))
    pair = [rng.random(shape) < draw(densities) for _ in range(2)]
    return *pair, (draw(st.integers(1, 5)), draw(st.integers(1, 5)))


@st.composite
def operations(draw):
    ours, theirs = draw(st.sampled_from(("mask", "index"))), draw(st.sampled_from(["index", *FORMS, "index", "array"]))
    names = (ours, theirs) if draw(st.booleans()) else (theirs, ours)
    return *draw(tables()), names, draw(st.sampled_from(list(OF_NUMPY)))


def check_operators(library, drawn):
    """Check that an operator with a mask or an index on either side gives what NumPy gives for their arrays."""
    first, second, block, names, combine = drawn
    combined = combine(*(FORMS[name](library, table, block) for name, table in zip(names, (first, second))))
    expected = OF_NUMPY[combine](first, second)
    if names == ("index", "index"):
        assert isinstance(combined, library.BlockIndex) and combined.block == block
        actual = combined.toarray()[0, 0]
    else:
        assert isinstance(combined, library.masks.Mask)
        actual = combined.toarray(*first.shape)
    assert np.array_equal(actual, expected), names


def check_index_operators(library, drawn):
    """Check that an index has a complement, equality and hashes by elements, and the same counts as its array."""
    first, second, block = drawn
    ours, theirs = (library.BlockIndex.from_mask(table, *table.shape, block) for table in (first, second))
    assert np.array_equal((~ours).toarray()[0, 0], ~first)
    assert ours.shape == ours.toarray().shape and ours.nnz == first.sum()
    assert np.array_equal(ours.T.toarray()[0, 0], first.T) and ours.T.T == ours
    assert (ours == theirs) is bool((first == second).all()) and (ours != theirs) is bool((first != second).any())
    again = library.BlockIndex.from_mask(library.masks.Dense(first) | first, *first.shape, block)
    assert again == ours and hash(again) == hash(ours)
    other_block = library.BlockIndex.from_mask(first, *first.shape, (block[0] + 1, block[1]))
    assert ours != other_block and ours != 3


def check_indices_of_masks(library, drawn):
    """Check that closed forms of composed masks agree with their elements, which determine the blocks of an index."""
    shape, mask, block = drawn
    index = library.BlockIndex.from_mask(mask, block=block, **shape._asdict())
    expected = mask.toarray(**shape._asdict()).reshape(shape.num_batch, *shape[1:])
    assert np.array_equal(np.broadcast_to(index.toarray(), expected.shape), expected)


def check_coarsening(library, drawn):
    """Check that `filled` keeps listed blocks whole, and that `on_blocks` repeats each element over a block."""
    first, _, block = drawn
    index = library.BlockIndex.from_mask(first, *first.shape, block)
    filled = index.filled()
    assert np.array_equal(filled.states() > 0, index.states() > 0) and set(np.unique(filled.states())) <= {0, 1}
    whole = np.kron(index.states()[0, 0] > 0, np.ones(block, bool))[: first.shape[0], : first.shape[1]]
    assert np.array_equal(filled.toarray()[0, 0], whole) and (filled.toarray()[0, 0] >= first).all()
    assert filled == filled.filled() == library.BlockIndex.from_mask(whole, *first.shape, block)

    pattern = library.masks.Dense(first)
    lengths = first.shape[0] * block[0] - block[0] // 2, first.shape[1] * block[1] - block[1] // 2
    spread = np.kron(first, np.ones(block, bool))[: lengths[0], : lengths[1]]
    drawn_on_blocks = pattern.on_blocks(block)
    assert np.array_equal(drawn_on_blocks.toarray(*lengths), spread) and drawn_on_blocks._natural_block == block
    listed = library.BlockIndex.from_mask(drawn_on_blocks, *lengths, block)
    assert np.array_equal(listed.states()[0, 0], first.astype(np.uint8))
    square = first[: min(first.shape), : min(first.shape)]
    mirrored = library.masks.Dense(square).on_blocks(block, mirrored=True)
    lengths = tuple(side * len(square) for side in block)
    index = library.BlockIndex.from_mask(mirrored, *lengths, block)
    assert np.array_equal(index.states()[0, 0], (square | square.T).astype(np.uint8))
    everything = library.masks.Causal("top_left").on_blocks(block, mirrored=True)
    assert (library.BlockIndex.from_mask(everything, *lengths, block).states() == 1).all()


def check_scipy(library, drawn, name):
    """Check that a scipy.sparse array of elements or blocks equals its dense array; stored zeros hide."""
    first, second, block = drawn
    from_scipy = library.BlockIndex.from_scipy
    matrix = scipy.sparse.coo_array(first.astype(np.float32)).asformat(name)
    index = from_scipy(matrix, *first.shape, block)
    assert index.block == block and np.array_equal(index.toarray()[0, 0], first)
    assert index == from_scipy(index.to_scipy(elements=True), *first.shape) == from_scipy(
        index.to_scipy(elements=True), *first.shape, block
    )
    assert np.array_equal(library.masks.Sparse(matrix).toarray(*first.shape), first)

    stored = scipy.sparse.csr_array(np.ones(first.shape))
    stored.data[~first.ravel()] = 0  # all elements are stored, some of them as zeros
    assert np.array_equal(from_scipy(stored, *first.shape, block).toarray()[0, 0], first)
    assert np.array_equal(library.masks.BlockPattern(stored, 1).toarray(*first.shape), first)

    lengths = tuple(extent * side for extent, side in zip(first.shape, block))
    of_blocks = from_scipy(stored, *lengths, block)
    assert np.array_equal(of_blocks.states()[0, 0], first.astype(np.uint8))


@given(operations())
def test_operators_from_either_side_are_numpy_s(drawn):
    check_operators(cuflash, drawn)


@given(tables())
def test_a_block_index_is_an_array_of_its_elements(drawn):
    check_index_operators(cuflash, drawn)


@given(tables())
def test_coarsening(drawn):
    check_coarsening(cuflash, drawn)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15)
@given(tables())
def test_scipy_sparse_arrays(name, drawn):
    check_scipy(cuflash, drawn, name)


def test_a_long_chain_of_exclusive_ors_stays_small():
    mask = masks.Causal()
    for number in range(60):
        mask ^= masks.Band(-number, -number)
    expected = np.tri(70, dtype=bool) ^ (np.tri(70, k=0, dtype=bool) & ~np.tri(70, k=-60, dtype=bool))
    assert np.array_equal(mask.toarray(70), expected)
    assert len(mask.operands) == 61


@pytest.mark.parametrize("executor", ["cpu", "sim"])
@pytest.mark.parametrize("name", ["csr", "coo", "function", "array", "index"])
def test_attention_takes_what_stands_for_a_mask(executor, name):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 20, 8)).astype(np.float32)
    table = rng.random((20, 20)) < 0.3
    given_so = cuflash.attention(q, k, v, mask=FORMS[name](cuflash, table, 4), executor=executor)
    assert_within_bounds(Example(q=q, k=k, v=v, mask=table), o=given_so)


REFUSED = {
    "a list": (lambda: masks.Causal() & ["a"], TypeError, r"mask must be an array; got \['a'\]: a list may contain"),
    "an int": (lambda: masks.Causal() | 3, TypeError, "mask must be a Mask, .* got 3"),
    "a class": (lambda: masks.Causal() & masks.Causal, TypeError, "got the class Causal: call it"),
    "the class BlockIndex": (lambda: BlockIndex & masks.Causal(), TypeError, "got the class BlockIndex: call it"),
    "ints": (lambda: np.eye(3) & masks.Causal(), UnsupportedProblem, "mask must be boolean, .* bias=.* with mask != 0"),
    "a rule of two": (
        lambda: masks.Causal() | (lambda i, j: i == j), TypeError, r"coordinates \(b, h, i, j\); .*\(i, j\)"
    ),
    "a rule with if": (
        lambda: (masks.Causal() | (lambda b, h, i, j: bool((i > j).all()))).toarray(3),
        UnsupportedProblem, "must return a boolean array; got bool: use i >= j",
    ),
    "a rule of ints": (
        lambda: (masks.Causal() | (lambda b, h, i, j: (i >= j) * 1)).toarray(3),
        UnsupportedProblem, "must return a boolean array; got int64: compare it with 0",
    ),
    "a sparse mask of blocks": (
        lambda: (masks.Causal() & scipy.sparse.eye_array(3)).toarray(6), UnsupportedProblem,
        r"a scipy.sparse mask must have shape \(seqlen_q, seqlen_kv\) = \(6, 6\); got \(3, 3\): BlockIndex.from_scipy",
    ),
    "another shape of SciPy's": (
        lambda: BlockIndex.from_scipy(scipy.sparse.eye_array(7), 10, 10, 4), UnsupportedProblem,
        r"matrix must have shape \(10, 10\) if it holds elements, or \(3, 3\) if it holds blocks of \(4, 4\); got",
    ),
    "elements in the padding": (
        lambda: BlockIndex.from_scipy(scipy.sparse.eye_array(12), 10, 10, 4), UnsupportedProblem,
        "matrix must have no nonzero beyond the lengths",
    ),
    "no block": (
        lambda: BlockIndex.from_scipy(scipy.sparse.csr_array(np.eye(4)), 4, 4), UnsupportedProblem,
        r"block must be .* if matrix is not a BSR array.*matrix.tobsr\(\(16, 16\)\)",
    ),
    "an array of NumPy": (
        lambda: BlockIndex.from_scipy(np.eye(2), 4, 4, 2), TypeError, "must be a scipy.sparse array; got ndarray"
    ),
    "indices of two blocks": (
        lambda: BlockIndex.from_mask(masks.Causal(), 8, 8, 2) ^ BlockIndex.from_mask(masks.Causal(), 8, 8, 4),
        UnsupportedProblem, "must share lengths, block",
    ),
    "bool of an index": (lambda: bool(BlockIndex.from_mask(masks.Causal(), 8, 8, 2)), TypeError, "no truth value"),
    "mirrored blocks that are not square": (
        lambda: patterns.strided(2, align="top_left").on_blocks(4, mirrored=True).toarray(8, 4), UnsupportedProblem,
        "mirrored=True needs as many query blocks as key blocks; got 2 and 1",
    ),
    "two faults of on_blocks": (
        lambda: masks.Causal().on_blocks(0, mirrored="yes"), UnsupportedProblem,
        "(?s)2 reasons.*mirrored must be True or False.*block must be an int",
    ),
    "a tuple of lengths": (
        lambda: masks.Causal().toarray((4, 4)), UnsupportedProblem, r"seqlen_q must be an int .* \(4, 4\)"
    ),
    "all at once": (
        lambda: BlockIndex.from_mask(masks.Causal(), -1, 2.0, 0, batch=3), UnsupportedProblem,
        "(?s)4 reasons.*block.*batch.*seqlen_q.*seqlen_kv",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_mask_is_refused_in_words(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


SHAPES_MASKS_AND_BLOCKS = st.builds(
    masks.MaskShape, st.sampled_from([(), (2,)]), st.integers(1, 2), st.integers(1, 20), st.integers(1, 20)
).flatmap(
    lambda shape: st.tuples(
        st.just(shape), strategies.masks(shape, max_leaves=4), st.tuples(st.integers(1, 9), st.integers(1, 9))
    )
)


@given(SHAPES_MASKS_AND_BLOCKS)
def test_indices_of_composed_masks_hold_their_elements(drawn):
    check_indices_of_masks(cuflash, drawn)


def drawn_for(library):
    """Return a strategy for shapes, masks and blocks of another copy of the library."""
    parts = importlib.import_module(f"{library.__name__}.testing.strategies"), library.masks.MaskShape
    return st.builds(parts[1], st.just(()), st.just(1), st.integers(1, 20), st.integers(1, 20)).flatmap(
        lambda shape: st.tuples(
            st.just(shape), parts[0].masks(shape, max_leaves=4), st.tuples(st.integers(1, 9), st.integers(1, 9))
        )
    )
