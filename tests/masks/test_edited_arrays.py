"""Calls see writes to arrays between calls; plans, and objects derived from the arrays earlier, do not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse
from executors import RUNS, Run
from hypothesis import given
from hypothesis import strategies as st
from library_parts import part
from refusals import refused

import cuflash
from cuflash import masks, scores

SEQLEN = 40
FORMATS = ("bsr", "coo", "csc", "csr", "dia")


class Kind(NamedTuple):
    """Masks of one class: a function that creates one from arrays, and a function that draws such arrays."""

    make: Callable[..., masks.Mask]
    arrays: Callable[[np.random.Generator], tuple[Any, ...]]


def offsets(rng: np.random.Generator) -> np.ndarray:
    return np.sort(rng.integers(0, SEQLEN, 4, endpoint=True))


def ids(rng: np.random.Generator) -> np.ndarray:
    return np.sort(rng.integers(0, 5, SEQLEN))


KINDS = {
    "Dense": Kind(masks.Dense, lambda rng: (rng.random((2, SEQLEN, SEQLEN)) < 0.5,)),
    "BlockPattern": Kind(lambda blocks: masks.BlockPattern(blocks, 8), lambda rng: (rng.random((5, 5)) < 0.5,)),
    "ChosenBlocks": Kind(
        lambda blocks, counts: masks.ChosenBlocks(blocks, 8, counts=counts),
        lambda rng: (rng.integers(-1, 5, (SEQLEN, 3)), rng.integers(0, 4, SEQLEN)),
    ),
    "ChosenBlocks in sequences": Kind(
        lambda blocks, q: masks.ChosenBlocks(blocks, 8, sequences=masks.Sequences(q, allow_gaps=True)),
        lambda rng: (rng.integers(-1, 1, (SEQLEN, 2)), offsets(rng)),
    ),
    "Sequences": Kind(lambda q: masks.Sequences(q, causal=True, allow_gaps=True), lambda rng: (offsets(rng),)),
    "Sequences of two arrays": Kind(
        lambda q, kv: masks.Sequences(q, kv, causal="bottom_right", allow_gaps=True),
        lambda rng: (offsets(rng), offsets(rng)),
    ),
    "Sequences of equal arrays": Kind(
        lambda q, kv: masks.Sequences(q, kv, causal="top_left", allow_gaps=True),
        lambda rng: (each := offsets(rng), each.copy()),
    ),
    "Documents": Kind(masks.Documents, lambda rng: (ids(rng), ids(rng))),
    "Lengths": Kind(lambda q, kv: masks.Lengths(q=q, kv=kv), lambda rng: tuple(rng.integers(0, SEQLEN, (2, 2)))),
    "PrefixLM": Kind(masks.PrefixLM, lambda rng: (rng.integers(0, SEQLEN, 2),)),
}
# other cases write arrays of their own kind
EDITS = {"Sequences of equal arrays": KINDS["Sequences of two arrays"].arrays}


def attend(library: ModuleType, mask: Any, run: Run) -> Any:
    x = [run.put(x) for x in np.random.default_rng(0).standard_normal((3, 2, 2, SEQLEN, 16), np.float32)]
    return run.get(library.attention(*x, mask=mask, **run.options))


def check_calls(library: ModuleType, make: Callable[..., Any], before: Any, after: Any, run: Run) -> None:
    """Check that a call with an edited mask equals a call with a new mask of the edited arrays."""
    live = [run.put(array.copy()) for array in before]
    mask = make(*live)
    old = attend(library, mask, run)
    np.testing.assert_array_equal(old, attend(library, make(*map(run.put, before)), run))
    for array, written in zip(live, after):
        array[...] = run.put(written)
    np.testing.assert_array_equal(attend(library, mask, run), attend(library, make(*map(run.put, after)), run))


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_calls_see_what_is_written_to_arrays_of_a_mask(name: str, run: Run) -> None:
    kind = KINDS[name]

    @run.settings
    @given(st.integers(0, 2**32), st.integers(0, 2**32))
    def check(first: int, second: int) -> None:
        before = kind.arrays(np.random.default_rng(first))
        after = EDITS.get(name, kind.arrays)(np.random.default_rng(second))
        check_calls(cuflash, kind.make, before, after, run)

    check()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("make", [masks.Sparse, lambda blocks: masks.BlockPattern(blocks, 1)], ids=["elements", "1x1"])
def test_calls_see_what_is_written_to_a_scipy_sparse_array(form: str, make: Callable[[Any], masks.Mask]) -> None:
    table = np.tri(SEQLEN)
    matrix = scipy.sparse.coo_array(table).asformat(form)
    mask = make(matrix)
    assert (mask.toarray(SEQLEN) == (table != 0)).all()
    for seed in range(5):
        matrix.data[...] *= np.random.default_rng(seed).random(matrix.data.shape) < 0.9
        assert (mask.toarray(SEQLEN) == (matrix.toarray() != 0)).all()
    assert 0 < matrix.toarray().sum() < table.sum()


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_plan_has_the_mask_that_was_there_when_it_was_made(name: str, run: Run) -> None:
    kind, rng = KINDS[name], np.random.default_rng(7)
    live = [run.put(array.copy()) for array in kind.arrays(rng)]
    x = [run.put(x) for x in rng.standard_normal((3, 2, 2, SEQLEN, 16), np.float32)]
    ready = cuflash.plan(*x, mask=kind.make(*live), **run.options)
    before = run.get(ready.forward(*x)[0])
    for array, written in zip(live, EDITS.get(name, kind.arrays)(rng)):
        array[...] = run.put(written)
    now = run.get(cuflash.attention(*x, mask=kind.make(*live), **run.options))
    assert not np.allclose(before, now)
    np.testing.assert_array_equal(run.get(ready.forward(*x)[0]), before)


def check_refusals(library: ModuleType, causal: Any, before: Any, after: Any, allow_gaps: bool = False) -> bool:
    """Check that a call refuses an edited mask for the same reasons as a new one; return whether it does."""
    live = [array.copy() for array in before]
    mask = library.masks.Sequences(*live, causal=causal, allow_gaps=allow_gaps)
    for array, written in zip(live, after):
        array[...] = written
    x = np.zeros((1, 8, 4), np.float32)
    why = ""
    try:
        shape = part(library, "masks.shape").MaskShape((), 1, 8, 8)
        library.masks.Sequences(*after, causal=causal, allow_gaps=allow_gaps).resolve(shape)
    except library.UnsupportedProblem as error:
        why = str(error)
    try:
        library.attention(x, x, x, mask=mask)
    except library.UnsupportedProblem as error:
        assert str(error) == why, f"says {error}, not {why}"
    else:
        assert not why, f"is taken, despite: {why}"
    return bool(why)


LISTS = st.lists(st.integers(-1, 8), min_size=3, max_size=3)


@given(st.sampled_from([True, False, "top_left"]), LISTS, LISTS, st.booleans())
def test_offsets_are_checked_at_each_call(causal: Any, q: list[int], kv: list[int], allow_gaps: bool) -> None:
    good = np.array([0, 3, 8])
    check_refusals(cuflash, causal, (good, good), (np.array(q), np.array(kv)), allow_gaps)


def test_offsets_that_are_wrong_after_an_edit_are_refused() -> None:
    good, unlike = np.array([0, 3, 8]), np.array([0, 4, 8])
    assert check_refusals(cuflash, False, (good, good), (np.array([0, 5, 3]), good))
    assert check_refusals(cuflash, True, (good, good), (good, unlike))
    assert not check_refusals(cuflash, "top_left", (good, good), (good, unlike))


@given(st.lists(st.integers(-1, 9), max_size=4), st.none() | st.lists(st.integers(-1, 9), max_size=4))
def test_scores_and_masks_refuse_the_same_offsets_in_the_same_words(q: list[int], kv: list[int] | None) -> None:
    messages = []
    for make in (masks.Sequences, lambda *arrays: scores.within(scores.alibi(np.ones(2)), *arrays)):
        try:
            make(np.array(q, int), None if kv is None else np.array(kv, int))
        except cuflash.UnsupportedProblem as error:
            messages.append(error.reasons)
        else:
            messages.append(())
    assert messages[0] == messages[1]


def test_scores_and_masks_refuse_what_are_no_offsets_in_the_same_words() -> None:
    alibi = scores.alibi(np.ones(2))
    for value in (None, 3, "ab", [0, 0.5], np.zeros((2, 0), int), np.array(3), np.array([0.0, 2.0]), [["a"]]):
        words = refused(lambda value=value: masks.Sequences(value))
        assert words == refused(lambda value=value: scores.within(alibi, value))
        assert "for lengths use masks.Sequences.of(lengths)" in words


def test_a_score_within_sequences_and_its_pickles_keep_their_offsets() -> None:
    live = np.array([0, 3, 8])
    score = scores.within(scores.alibi(np.ones(2)), live)
    starts = score.arrays["q_starts"].tolist()
    live[1] = 6
    assert score.arrays["q_starts"].tolist() == starts == [0] * 3 + [3] * 5
    assert pickle.loads(pickle.dumps(score)).arrays["q_starts"].tolist() == starts


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_calls_and_plans_see_what_is_written_to_arrays_of_a_score(run: Run) -> None:
    x = [run.put(x) for x in np.random.default_rng(0).standard_normal((3, 2, SEQLEN, 16), np.float32)]
    slopes = run.put(np.ones(2, np.float32))
    score = scores.alibi(slopes)
    ready = cuflash.plan(*x, score=score, **run.options)
    ready.forward(*x)
    slopes[...] = run.put(np.array([0.5, 0.25], np.float32))
    now = scores.alibi(slopes.copy())
    of_calls = [run.get(cuflash.attention(*x, score=each, **run.options)) for each in (score, now)]
    np.testing.assert_array_equal(*of_calls)
    of_plans = [run.get(plan.forward(*x)[0]) for plan in (ready, cuflash.plan(*x, score=now, **run.options))]
    np.testing.assert_array_equal(*of_plans)


def test_sparse_blocks_have_two_axes() -> None:
    message = refused(lambda: masks.BlockPattern(scipy.sparse.coo_array(np.ones(3)), 8))
    assert message == "blocks must have two axes as a scipy.sparse array; got shape (3,)"
