"""Packed sequences match literal matrices, and each sequence alone on every executor; invalid calls are refused.

Checks take the library as an argument, so that they can also guard copies of it with planted faults.
"""

from __future__ import annotations

from dataclasses import replace

import device_double
import numpy as np
import pytest
from executors import CPU, on_every_backward
from foreign import Foreign
from hypothesis import example, given
from hypothesis import strategies as st

import cuflash
from cuflash import masks, scores
from cuflash.masks.shape import MaskShape
from cuflash.testing import Structure, assert_within, assert_within_bounds
from refusals import refused
from library_parts import part

CAUSAL = (False, True, "bottom_right", "top_left")


def table(mask, seqlen_q, seqlen_kv):
    return mask.toarray(seqlen_q, seqlen_kv).astype(int).tolist()


def test_the_last_query_of_each_sequence_meets_its_last_key():
    mask = masks.Sequences.of([2, 3, 1], [3, 2, 0], causal="bottom_right")
    assert table(mask, 6, 5) == [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0],
    ]


def test_offsets_differ_by_batch_entry_and_there_may_be_no_sequence():
    mask = masks.Sequences(np.array([[0, 2, 3], [0, 0, 1]]), causal=True, allow_gaps=True)
    assert mask.toarray(3, batch=(2,), num_heads=1).astype(int)[:, 0].tolist() == [
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]],
    ]
    assert table(masks.Sequences(np.array([0]), allow_gaps=True), 1, 2) == [[0, 0]]


@st.composite
def sequences(draw):
    """Draw lengths of queries and keys, the start of the first sequence, and a causal flag and a window that fit."""
    count = draw(st.integers(0, 5))
    lengths = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    q_lengths, causal = draw(lengths), draw(st.sampled_from(CAUSAL))
    kv_lengths = q_lengths if causal is True or draw(st.booleans()) else draw(lengths)
    sides = st.none() | st.integers(0, 12) | st.just(2**70)
    window = draw(st.none() | st.tuples(sides, sides)) if causal or kv_lengths == q_lengths else None
    first = draw(st.integers(0, 3))
    return q_lengths, kv_lengths, first, causal, window


def offsets_of(lengths, first, dtype=np.int64):
    return (first + np.cumsum([0, *lengths])).astype(dtype)


def expected_of(q_lengths, kv_lengths, first, causal, window):
    """Return the matrix by its definition, sequence by sequence, without the closed form."""
    allowed = np.zeros((first + sum(q_lengths) + 2, first + sum(kv_lengths) + 1), bool)
    q_start = kv_start = first
    left, right = (None, None) if window is None else window
    for q_length, kv_length in zip(q_lengths, kv_lengths):
        shift = 0 if causal == "top_left" else kv_length - q_length
        for i in range(q_length):
            for j in range(kv_length):
                at = j - i - shift
                is_seen = (left is None or at >= -left) and (right is None or at <= right)
                allowed[q_start + i, kv_start + j] = is_seen and (not causal or at <= 0)
        q_start, kv_start = q_start + q_length, kv_start + kv_length
    return allowed


def check_mask(library, drawn):
    """Check that a mask of sequences equals its definition by elements and by intervals, on any machine."""
    q_lengths, kv_lengths, first, causal, window = drawn
    expected = expected_of(*drawn)
    shape = part(library, "masks.base").MaskShape((), 1, *expected.shape)
    for dtype in (np.int32, np.uint64):
        offsets = offsets_of(q_lengths, first, dtype), offsets_of(kv_lengths, first, dtype)
        mask = library.masks.Sequences(*offsets, causal=causal, window=window, allow_gaps=True)
        assert (mask.toarray(**shape._asdict())[0] == expected).all()
        i, j = np.ogrid[: expected.shape[0], : expected.shape[1]]
        assert (mask(0, 0, i.astype(np.uint8), j.astype(np.uint8)) == expected).all()
        lo, hi = mask.resolve(shape).intervals(0, 0, np.arange(shape.seqlen_q))
        assert (np.diff(lo) >= 0).all() and (np.diff(hi) >= 0).all()
        same = q_lengths == kv_lengths
        placed = [None if same and name else device_double.to_device(side) for name, side in enumerate(offsets)]
        resolved = library.masks.Sequences(*placed, causal=causal, window=window).resolve(shape)
        rows = resolved.intervals(0, 0, device_double.to_device(np.arange(shape.seqlen_q)))
        assert all((device_double.to_host(side) == on_host).all() for side, on_host in zip(rows, (lo, hi)))


@given(sequences())
def test_the_closed_form_is_the_definition(drawn):
    check_mask(cuflash, drawn)


# Attention

LENGTHS = [70, 0, 1, 130, 33], [90, 5, 0, 100, 33]
CASES = {
    "full": {},
    "causal": {"causal": True},
    "last meets last": {"causal": "bottom_right", "kv": True},
    "first meets first in a window": {"causal": "top_left", "kv": True, "window": (40, None)},
    "a window to both sides": {"window": (20, 7)},
}


def packed_structure(case, **fields):
    options = dict(CASES[case])
    kv = LENGTHS[1] if options.pop("kv", False) else None
    mask = masks.Sequences.of(LENGTHS[0], kv, **options, allow_gaps=True)
    seqlen_q, seqlen_kv = sum(LENGTHS[0]) + 3, sum(kv or LENGTHS[0]) + 9
    small = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 24}
    return Structure(**small | {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "mask": mask} | fields)


def each_alone(example):
    """Yield, for each sequence, the slices of its queries and keys, and its separate example."""
    mask = example.mask
    kv_offsets = mask.q_offsets if mask.kv_offsets is None else mask.kv_offsets
    for n in range(len(mask.q_offsets) - 1):
        rows, keys = slice(*mask.q_offsets[n : n + 2]), slice(*kv_offsets[n : n + 2])
        align = mask.causal if isinstance(mask.causal, str) else None
        alone = masks.SlidingWindow(*(mask.window or (None, None)), align or "bottom_right")
        if mask.causal:
            alone &= masks.Causal(align)
        cut = {"q": rows, "do": rows, "k": keys, "v": keys}
        arrays = {name: getattr(example, name)[..., side, :] for name, side in cut.items()}
        yield rows, keys, example.but(**arrays, dlse=example.dlse[..., rows], mask=alone)


def check_alone(run, case, dtype, **dims):
    """Check that each packed sequence gets the results of that sequence alone, within the bounds of both."""
    example = run.rounded(packed_structure(case, dtype=dtype, **dims).example())
    results, bounds = run.everything(example), example.bounds
    outside = np.ones(example.q.shape[-2], bool)
    for rows, keys, alone in each_alone(example):
        outside[rows] = False
        expected = run.everything(alone)
        for name, side in (("o", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            bound = getattr(bounds, name)[..., side, :] + getattr(alone.bounds, name)
            assert_within(name, results[name][..., side, :], expected[name], bound, alone)
        lse_bound = bounds.lse[..., rows] + alone.bounds.lse
        assert_within("lse", results["lse"][..., rows], expected["lse"], lse_bound, alone)
    assert not results["o"][..., outside, :].any() and not results["dq"][..., outside, :].any()
    assert np.isneginf(results["lse"][..., outside]).all()


@on_every_backward
@pytest.mark.parametrize(("case", "dtype"), [("causal", "float16"), ("first meets first in a window", "float32")])
def test_packed_sequences_are_each_sequence_alone(run, case, dtype):
    check_alone(run, case, dtype)


@pytest.mark.parametrize("case", ["full", "last meets last", "a window to both sides"])
def test_packed_sequences_are_each_sequence_alone_on_the_host(case):
    check_alone(CPU, case, "float32")


@on_every_backward
@pytest.mark.parametrize("kind", ["a sink", "blocks of each head"])
def test_packed_sequences_have_sinks_and_lists_of_heads(run, kind):
    structure = packed_structure("last meets last", dtype="float16")
    if kind == "a sink":
        structure = replace(structure, sink=(4,))
    else:
        blocks = np.random.default_rng(0).random((4, -(-structure.seqlen_q // 32), -(-structure.seqlen_kv // 32))) < 0.7
        structure = replace(structure, mask=structure.mask & masks.BlockPattern(blocks, 32))
    example = run.rounded(structure.example())
    assert_within_bounds(example, **run.everything(example))


@on_every_backward
@pytest.mark.parametrize("where", ["queries", "keys"])
def test_nan_after_the_last_sequence_changes_nothing(run, where):
    mask = masks.Sequences(np.array([0, 30, 30, 70]), causal=True, allow_gaps=True)
    example = run.rounded(Structure(num_heads=2, seqlen_q=200, seqlen_kv=200, dtype="float16", mask=mask).example())
    names = ("q", "do") if where == "queries" else ("k", "v")
    poisoned = {name: getattr(example, name).copy() for name in names}
    for array in poisoned.values():
        array[..., 70:, :] = np.nan
    clean, other = run.everything(example), run.everything(example.but(**poisoned))
    for name in ("o", "lse", "dk", "dv"):
        assert np.array_equal(clean[name], other[name])
    assert_within("dq", other["dq"], clean["dq"], 2 * example.bounds.dq, example)
    assert not any(other[name][..., 70:, :].any() for name in ("o", "dq", "dk", "dv"))


def test_sequences_in_lists_and_together_with_other_masks():
    """A mask without a closed form gives lists of blocks."""
    structure = packed_structure("causal", dtype="float32")
    sequences_alone = structure.mask
    example = replace(structure, mask=sequences_alone & ~masks.SlidingWindow(3, 0, "top_left")).example()
    expected = example.but(mask=example.dense_mask)
    results, dense = CPU.everything(example), CPU.everything(expected)
    for name, result in results.items():
        assert_within(name, result, dense[name], 2 * getattr(example.bounds, name), example)


def test_ten_thousand_sequences():
    lengths = np.random.default_rng(0).integers(0, 3, 10_000)
    offsets = masks.Sequences.of(lengths).q_offsets
    x = np.random.default_rng(1).standard_normal((1, int(offsets[-1]), 4))
    o = cuflash.attention(x, x, x, mask=masks.Sequences(offsets, causal=True))
    firsts = offsets[:-1][lengths > 0]
    assert (o[:, firsts] == x[:, firsts]).all() and np.isfinite(o).all()


# Packing


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_unpacking_undoes_packing(lengths, num_axes, data):
    axis = data.draw(st.integers(-num_axes, num_axes - 1))
    rng = np.random.default_rng(len(lengths))
    others = [2, 3, 4][: num_axes - 1]
    shapes = [(*others[: axis % num_axes], length, *others[axis % num_axes :]) for length in lengths]
    arrays = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
    packed, offsets = cuflash.pack(arrays, axis)
    assert offsets.tolist() == np.cumsum([0, *lengths]).tolist() and offsets.dtype == np.int64
    parts = cuflash.unpack(packed, offsets, axis)
    assert all(np.array_equal(one, other) for one, other in zip(parts, arrays, strict=True))
    assert all(np.shares_memory(one, packed) for one in parts if one.size)


def test_offsets_lie_where_the_arrays_do(device):
    with device.transfers_allowed():
        arrays = [device.to_device(np.ones((2, length, 3))) for length in (4, 1)]
        packed = arrays[0].__array_namespace__().concatenate(arrays, axis=-2)
        lengths = device.to_device(np.array([4, 1]))
    offsets = masks.Sequences.of(lengths).q_offsets
    assert isinstance(offsets, device.DeviceArray) and device.to_host(offsets).tolist() == [0, 4, 5]
    assert packed.shape == (2, 5, 3)


# Refused calls


OFFSETS = np.array([0, 4, 10])
WRONG = {
    "decreasing": (lambda: masks.Sequences(np.array([0, 5, 3])), "q_offsets must never decrease; got 3 after 5"),
    "negative": (lambda: masks.Sequences(np.array([-1, 5])), "q_offsets must start at 0 or later; got -1"),
    "floats": (lambda: masks.Sequences(np.array([0.0, 5.0])), "q_offsets must be a list of ints, or an integer"),
    "a word": (lambda: masks.Sequences("ab"), "for lengths use masks.Sequences.of(lengths)"),
    "nothing": (lambda: masks.Sequences(np.zeros(0, int)), "q_offsets must be a list of ints, or an integer array"),
    "booleans": (lambda: masks.Sequences(np.array([False, True])), "q_offsets must be a list of ints, or an integer"),
    "unequal numbers": (lambda: masks.Sequences(OFFSETS, OFFSETS[:2]), "as many sequences as q_offsets, 2; got 1"),
    "no alignment": (
        lambda: masks.Sequences(OFFSETS, 2 * OFFSETS, causal=True), "causal must be 'bottom_right', which aligns"
    ),
    "no alignment of a window": (
        lambda: masks.Sequences(OFFSETS, 2 * OFFSETS, window=(1, 0)), "may differ from q_offsets; got window=(1, 0)"
    ),
    "no such alignment": (
        lambda: masks.Sequences(OFFSETS, causal="left"), "causal must be True, False, 'bottom_right' or 'top_left'"
    ),
    "a negative side": (lambda: masks.Sequences(OFFSETS, window=(-1, 0)), "got -1: write None, which is what -1 means"),
    "half a window": (lambda: masks.Sequences(OFFSETS, window=3), "window must be (left, right)"),
    "too long for the queries": (
        lambda: masks.Sequences(OFFSETS).resolve(MaskShape((), 1, 9, 10)),
        "q_offsets must end at seqlen_q=9; got [0, 4, 10]",
    ),
    "too long for the keys": (
        lambda: masks.Sequences(OFFSETS).resolve(MaskShape((), 1, 10, 9)),
        "q_offsets must end at seqlen_kv=9; got [0, 4, 10]; give kv_offsets= where keys have other lengths",
    ),
    "another batch": (
        lambda: masks.Sequences(np.tile(OFFSETS, (3, 1))).resolve(MaskShape((2,), 1, 10, 10)),
        "the leading axes of q_offsets must broadcast to (2,); got (3,)",
    ),
    "unresolved": (
        lambda: masks.Sequences(np.tile(OFFSETS, (2, 1)))(0, 0, OFFSETS, OFFSETS), "call .resolve(shape) first"
    ),
    "negative lengths": (lambda: masks.Sequences.of(np.array([3, -1])), "q_lengths must be at least 0; got -1"),
    "lengths as offsets": (lambda: masks.Sequences([5, 3]), "of the last one; for lengths use masks.Sequences.of"),
    "lengths of words": (lambda: masks.Sequences.of(["a"]), "q_lengths must be a list of ints of at least 0"),
    "both lengths": (lambda: masks.Sequences.of([-1], 3), "2 reasons"),
    "not a list": (lambda: cuflash.pack(OFFSETS), "arrays must be a list of arrays"),
    "no arrays": (lambda: cuflash.pack([]), "arrays must hold at least one sequence"),
    "a number": (lambda: cuflash.pack([1.0]), "arrays[0] must be an array; got 1.0"),
    "other dtypes": (
        lambda: cuflash.pack([np.ones((2, 3)), np.ones((2, 3), "f4")]), "arrays[1] must have arrays[0]'s dtype"
    ),
    "other dims": (lambda: cuflash.pack([np.ones((2, 3)), np.ones((2, 4))]), "shape (2, 3) except along axis -2"),
    "other axes": (lambda: cuflash.pack([np.ones((2, 3)), np.ones(3)]), "arrays[1] must have arrays[0]'s dtype"),
    "one axis": (lambda: cuflash.pack([np.ones(3)]), "axis must be an axis of arrays[0], which has 1; got -2"),
    "an axis": (lambda: cuflash.pack([np.ones((2, 3))], axis=2), "axis must be an axis of arrays[0], which has 2; got"),
    "half an axis": (lambda: cuflash.pack([np.ones((2, 3))], axis=0.5), "axis must be an int; got 0.5: axis=-2 packs"),
    "lengths before heads": (
        lambda: cuflash.pack([np.ones((5, 2, 8)), np.ones((3, 2, 8))]),
        "they match along axis=-3; axis=-2 packs (heads, length, dim), axis=-3 (length, heads, dim)",
    ),
    "beyond the array": (
        lambda: cuflash.unpack(np.ones((9, 2)), OFFSETS), "offsets must end at packed.shape[-2]=9; got [0, 4, 10]"
    ),
    "offsets of another axis": (lambda: cuflash.unpack(np.ones((10, 4, 2)), OFFSETS), "; axis=-3 ends there"),
    "an axis that is not packed": (lambda: cuflash.unpack(np.ones(9), OFFSETS), "packed, which has 1; got -2"),
    "a flag": (lambda: masks.Sequences(OFFSETS, allow_gaps=1), "allow_gaps must be True or False; got 1"),
    "falling offsets": (lambda: cuflash.unpack(np.ones((9, 2)), OFFSETS[::-1]), "offsets must never decrease"),
    "offsets of floats": (lambda: cuflash.unpack(np.ones((9, 2)), OFFSETS / 2), "offsets must be an integer array"),
}  # fmt: skip


def reads_offsets(offsets, allow_gaps):
    """Return calls that read the offsets of 50 rows, by name."""
    x = np.ones((1, 50, 4))
    sequences = lambda: masks.Sequences(offsets, allow_gaps=allow_gaps)  # noqa: E731
    score = scores.alibi(np.ones(1))
    within = lambda: scores.within(score, offsets, seqlen_q=50, allow_gaps=allow_gaps)  # noqa: E731
    return {
        "attention": lambda: cuflash.attention(x, x, x, mask=sequences()),
        "keys": lambda: masks.Sequences(np.array([0] * len(offsets)), offsets, allow_gaps=allow_gaps).toarray(0, 50),
        "unpack": lambda: cuflash.unpack(x, offsets, allow_gaps=allow_gaps),
        "within": lambda: cuflash.attention(x, x, x, mask=masks.Causal(), score=within()),
    }


@given(st.lists(st.integers(0, 50), min_size=2, max_size=12).map(sorted))
@example([20, 30])
@example([0, 20, 30])
@example([5, 50])
def test_offsets_leave_no_gaps_unless_these_are_asked_for(offsets):
    is_whole = offsets[0] == 0 and offsets[-1] == 50
    for call in reads_offsets(offsets, True).values():
        call()
    for name, call in reads_offsets(offsets, False).items():
        if is_whole:
            call()
            continue
        words = refused(call)
        assert "must start at 0" in words if offsets[0] else "must end at" in words, name
        assert "pass allow_gaps=True" in words and str(offsets[-1]) in words, name


def test_lengths_in_the_place_of_offsets_are_told_the_call_that_takes_them() -> None:
    for call in (lambda: masks.Sequences([20, 30]), lambda: cuflash.unpack(np.ones((50, 2)), [20, 30])):
        message = refused(call)
        assert "got [20, 30]: for lengths write masks.Sequences.of([20, 30]), or np.cumsum([0, *lengths])" in message
    many = refused(lambda: masks.Sequences(np.arange(1, 40)))
    assert "got [1, 2, 3, 4, 5, 6, 7, ..., 39]" in many


@pytest.mark.parametrize("offsets", [[0, 20, 60], [0, 20, 30], [0, 60]])
def test_offsets_of_a_score_are_those_of_the_rows(offsets):
    x, score = np.ones((1, 50, 4), np.float32), scores.within(scores.alibi(np.ones(1)), offsets)
    for one in (score, scores.softcap(5.0) @ score):
        words = refused(lambda one=one: cuflash.attention(x, x, x, score=one))
        assert f"q_offsets of scores.within must end at seqlen_q=50; got offsets of {offsets[-1]} rows" in words
    longer = scores.within(scores.alibi(np.ones(1)), offsets, seqlen_q=60, allow_gaps=True)
    assert "got offsets of 60 rows" in refused(lambda: cuflash.attention(x, x, x, score=longer))


def test_lengths_of_another_library_are_those_in_a_list() -> None:
    lengths = [4, 0, 6]
    assert masks.Sequences.of(Foreign(np.array(lengths))).q_offsets.tolist() == [0, 4, 4, 10]
    mask = masks.Sequences.of(lengths, Foreign(np.array([5, 1, 6])), causal="bottom_right")
    assert mask.kv_offsets.tolist() == [0, 5, 6, 12]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sequences_are_refused_with_a_reason(name):
    call, words = WRONG[name]
    assert words in refused(call)


def test_arrays_of_another_place_are_refused(device):
    with device.transfers_allowed():
        on_device = device.to_device(OFFSETS)
    assert "kv_offsets must be on the same device as q_offsets" in refused(lambda: masks.Sequences(OFFSETS, on_device))
    x = np.ones((1, 10, 4), np.float32)
    message = refused(lambda: cuflash.attention(x, x, x, mask=masks.Sequences(on_device)))
    assert "mask's arrays must be on q's device" in message
    assert "causal must be 'bottom_right'" in refused(lambda: masks.Sequences(on_device, on_device + 0, causal=True))
    assert masks.Sequences(on_device, on_device, causal=True).kv_offsets is None
