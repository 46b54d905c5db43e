"""Positions of score functions: the last query of a call, or of a packed sequence, may be aligned with the last key.

Checks take the library as an argument, so that they can also guard copies of it with planted faults.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from executors import CPU, RUNS, Run, needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import cuflash
from cuflash import masks, patterns, scores
from cuflash.scores import places
from cuflash.scores.trace import key_shift
from cuflash.testing import Example, assert_within_bounds

SLOPES, TABLE = scores.alibi_slopes(2), np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)


def alibi(library: Any = cuflash, **options: Any) -> Any:
    return library.scores.alibi(SLOPES, **options)


def t5(library: Any = cuflash, **options: Any) -> Any:
    return library.scores.relative_position(TABLE, 20, bidirectional=True, **options)


def both(library: Any = cuflash, **options: Any) -> Any:
    return t5(library, **options) @ library.scores.softcap(3.0) @ alibi(library, **options)


MAKES = {"alibi": alibi, "T5": t5, "both": both}
on_scores = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def operands(seqlen_q: int, seqlen_kv: int, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((2, rows, 8)).astype(np.float32) for rows in (seqlen_q, seqlen_kv, seqlen_kv)]


def check_cache(library: Any) -> None:
    """Check that cache positions are absolute for every alignment, because queries are already the last positions."""
    q, k, v = operands(20, 20)
    cache = library.KVCache(batch=1, num_kv_heads=2, head_dim=8, capacity=64, dtype=np.float32)
    cache.append(k[None], v[None])
    o = cache.attention(q[None, :, -3:], score=both(library, align="bottom_right"))
    whole = library.attention(q, k, v, causal=True, score=both(library))
    np.testing.assert_allclose(o[0], whole[:, -3:], rtol=1e-4, atol=1e-5)


def put(run: Run, score: Any) -> Any:
    return score._with_arrays({name: run.put(array) for name, array in score.arrays.items()})


def attend(library: Any, run: Run, arrays: Any, score: Any, **options: Any) -> dict[str, np.ndarray]:
    """Return o and lse of a call."""
    inputs = [run.put(x) for x in arrays]
    results = library.attention(*inputs, score=put(run, score), return_lse=True, **run.options, **options)
    return dict(zip(("o", "lse"), map(run.get, results)))


def check_whole_text(library: Any, make: Any, seqlen_q: int, seqlen_kv: int, run: Run) -> None:
    """Check that the last queries of a sequence have the results of a call with all queries, within both bounds."""
    q, k, v = operands(seqlen_kv, seqlen_kv)
    last = slice(seqlen_kv - seqlen_q, None)
    part = attend(library, run, (q[:, last], k, v), make(library, align="bottom_right"), causal="bottom_right")
    whole = attend(library, run, (q, k, v), make(library), causal=True)
    bounds = run.rounded(Example(q=q, k=k, v=v, mask=masks.Causal(), score=make())).bounds
    for name, rows in (("o", (..., last, slice(None))), ("lse", (..., last))):
        np.testing.assert_array_less(np.abs(part[name] - whole[name][rows]), 2 * getattr(bounds, name)[rows] + 1e-30)


@pytest.mark.parametrize("run", RUNS, ids=str)
@on_scores
def test_the_last_queries_of_a_text_have_the_scores_of_the_whole_text(run: Run, make: Any) -> None:
    check_whole_text(cuflash, make, 3, 70, run)


@given(st.sampled_from([*MAKES.values()]), st.integers(1, 40), st.integers(1, 40))
def test_other_lengths_are_within_their_bounds(make: Any, seqlen_q: int, seqlen_kv: int) -> None:
    """The oracle calls the function with the shift of the call; there may be more queries than keys."""
    q, k, v = operands(seqlen_q, seqlen_kv)
    score = make(align="bottom_right")
    example = Example(q=q, k=k, v=v, do=q, mask=masks.Causal("bottom_right"), score=score, wrt=tuple(
        array.name for array in score.program.arrays if array.kind == "real"
    ))  # fmt: skip
    (o, lse), vjp = cuflash.attention_vjp(
        q, k, v, causal="bottom_right", score=score, wrt=example.wrt, return_lse=True
    )
    gradients = vjp(q)
    dq, dk, dv = gradients
    others = {name: gradients[name] for name in example.wrt}
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv, others=others)
    if seqlen_q <= seqlen_kv:
        check_whole_text(cuflash, make, seqlen_q, seqlen_kv, CPU)


@on_scores
def test_equal_lengths_have_the_bits_of_a_score_without_an_alignment(make: Any) -> None:
    arrays = operands(30, 30)
    plain, top_left, bottom_right = (
        attend(cuflash, CPU, arrays, make(**options), causal=True)
        for options in ({}, {"align": "top_left"}, {"align": "bottom_right"})
    )
    for name in plain:
        np.testing.assert_array_equal(plain[name], top_left[name])
        np.testing.assert_allclose(plain[name], bottom_right[name], rtol=1e-5)
    assert make().program == make(align="top_left").program


@on_scores
def test_other_lengths_are_a_number_of_one_program(make: Any) -> None:
    """One kernel is compiled for the program; the difference of the lengths is a number that it receives."""
    q, k, v = operands(3, 70)
    score = make(align="bottom_right")
    plans = [cuflash.plan(q, k[:, :n], v[:, :n], causal="bottom_right", score=score)._plan for n in (3, 40, 70)]
    assert len({plan.problem.score for plan in plans}) == 1
    assert [plan.problem.numbers[score.program.shift_slot] for plan in plans] == [0, 37, 67]


def test_an_index_that_is_shifted_is_proven() -> None:
    q, k, v = operands(3, 40)
    table = np.zeros(43, np.float32)

    def unproven(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return s + table[i + key_shift(i)]

    words = refused(lambda: cuflash.attention(q, k, v, score=cuflash.scores.Score(unproven, table=table)))
    assert "index 0 of table may be -3..42" in words and "clip it, np.clip(i + (seqlen_kv - seqlen_q), 0, 42)" in words


Q_LENGTHS, KV_LENGTHS = [3, 0, 7, 4], [40, 5, 7, 2]


def check_within(library: Any, make: Any, run: Run, is_inner: bool = True) -> None:
    """Check that each packed sequence has the results of a separate call; one has more queries than keys."""
    offsets = [np.cumsum([0, *lengths]) for lengths in (Q_LENGTHS, KV_LENGTHS)]
    q, k, v = operands(int(offsets[0][-1]), int(offsets[1][-1]))
    align = {"align": "bottom_right"}
    inner, outer = (align, {}) if is_inner else ({}, align)
    packed = library.scores.within(make(library, **inner), *offsets, **outer)
    mask = library.masks.Sequences(*map(run.put, offsets), causal="bottom_right")
    results = attend(library, run, (q, k, v), packed, mask=mask)
    for n in range(len(Q_LENGTHS)):
        rows, keys = (slice(*each[n : n + 2]) for each in offsets)
        if rows.start == rows.stop:
            continue
        example = Example(
            q=q[:, rows], k=k[:, keys], v=v[:, keys], mask=masks.Causal("bottom_right"), score=make(**align)
        )
        assert_within_bounds(run.rounded(example), o=results["o"][:, rows], lse=results["lse"][:, rows])


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("is_inner", [True, False], ids=["of the score", "of within"])
def test_the_last_query_of_each_packed_sequence_is_at_its_last_key(run: Run, is_inner: bool) -> None:
    check_within(cuflash, both, run, is_inner)


def test_a_function_of_the_users_is_aligned_within_sequences() -> None:
    offsets = [0, 3, 10], [0, 40, 47]
    q, k, v = operands(10, 47)
    score = scores.within(lambda s, b, h, i, j: s - 0.5 * np.abs(i - j), *offsets, align="bottom_right")
    mask = masks.Sequences(*offsets, causal="bottom_right")
    o = cuflash.attention(q, k, v, score=score, mask=mask)
    alone = cuflash.attention(
        q[:, :3], k[:, :40], v[:, :40], causal="bottom_right", score=lambda s, b, h, i, j: s - 0.5 * np.abs(i + 37 - j)
    )
    np.testing.assert_allclose(o[:, :3], alone, rtol=1e-4, atol=1e-5)


def test_offsets_of_batch_entries_and_of_a_device_are_aligned_alike(device: Any) -> None:
    q_offsets, kv_offsets = np.array([[0, 2, 6], [0, 5, 6]]), np.array([0, 9, 11])
    on_host = scores.within(alibi(align="bottom_right"), q_offsets, kv_offsets)
    assert on_host.arrays["q_shifts"].tolist() == [[7, 7, -2, -2, -2, -2], [4, 4, 4, 4, 4, 1]]
    with device.transfers_allowed():
        on_device = [device.to_device(offsets) for offsets in (q_offsets, kv_offsets)]
    shifts = places._shifts(*on_device, 6)
    with device.transfers_allowed():
        assert (device.to_host(shifts) == on_host.arrays["q_shifts"]).all()


@pytest.mark.parametrize("executor", ["cpu", pytest.param("sim", marks=needs_compiler)])
@on_scores
def test_positions_of_a_cache_are_those_of_the_whole_text(make: Any, executor: str) -> None:
    q, k, v = operands(20, 20)
    cache = cuflash.KVCache(batch=1, num_kv_heads=2, head_dim=8, capacity=64, dtype=np.float32)
    cache.append(k[None], v[None])
    plain, bottom_right, top_left = (
        cache.attention(q[None, :, -3:], score=make(**options), executor=executor)
        for options in ({}, {"align": "bottom_right"}, {"align": "top_left"})
    )
    np.testing.assert_allclose(plain, bottom_right, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(plain, top_left)
    whole = cuflash.attention(q, k, v, causal=True, score=make())
    np.testing.assert_allclose(bottom_right[0], whole[:, -3:], rtol=1e-4, atol=1e-5)


@on_scores
def test_pickles_and_copies_keep_their_alignment(make: Any) -> None:
    arrays = operands(3, 40)
    for score in (make(align="bottom_right"), scores.within(make(align="bottom_right"), [0, 3], [0, 40])):
        expected = attend(cuflash, CPU, arrays, score, causal="bottom_right")["o"]
        for twin in (pickle.loads(pickle.dumps(score)), copy.deepcopy(score)):
            np.testing.assert_array_equal(attend(cuflash, CPU, arrays, twin, causal="bottom_right")["o"], expected)
    unaligned = pickle.loads(pickle.dumps(make()))
    assert "score must have an alignment" in refused(
        lambda: cuflash.attention(*arrays, causal="bottom_right", score=unaligned)
    )


X = operands(3, 40)
ALIGNED = {
    "causal": {"causal": "bottom_right"},
    "a mask": {"mask": masks.Causal("bottom_right")},
    "a window": {"causal": "bottom_right", "window": (5, None)},
    "a mask of a window": {"mask": masks.SlidingWindow(5, 0, align="bottom_right")},
    "a prefix among others": {"mask": masks.Lengths(kv=30) & ~masks.PrefixLM(3, "bottom_right")},
    "a pattern": {"mask": patterns.longformer((4, 0), align="bottom_right")},
    "blocks": {"mask": masks.Causal("bottom_right").on_blocks(2)},
    "sequences": {"mask": masks.Sequences([0, 3], [0, 40], causal="bottom_right")},
}
SCORES = {
    "alibi": alibi(), "T5": t5(), "composed": scores.softcap(5.0) @ alibi(),
    "renamed": alibi().renamed({"slopes": "steep"}), "within": scores.within(alibi(), [0, 3], [0, 40]),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIGNED)
@pytest.mark.parametrize("score", SCORES)
def test_a_score_without_an_alignment_is_refused_beside_a_mask_with_one(name: str, score: str) -> None:
    for call in (cuflash.attention, cuflash.attention_vjp, cuflash.plan, cuflash.error_bound):
        words = refused(lambda call=call: call(*X, score=SCORES[score], **ALIGNED[name]))
        assert "aligns the last query with the last key; got" in words
        assert "pass align='bottom_right' to scores.alibi, scores.relative_position or scores.within" in words


@pytest.mark.parametrize(
    "options",
    [
        {"causal": "top_left"}, {}, {"mask": masks.SlidingWindow(5, 0, "top_left")}, {"mask": masks.Lengths(kv=30)},
        {"mask": masks.Sequences([0, 3], [0, 40], causal="top_left")},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("score", SCORES)
def test_beside_other_masks_it_counts_from_the_first_query_and_key(options: Any, score: str) -> None:
    o = cuflash.attention(*X, score=SCORES[score], **options)
    top_left = cuflash.attention(*X, score=alibi(align="top_left"), **options)
    if score == "alibi":
        np.testing.assert_array_equal(o, top_left)
    assert np.isfinite(o).all()


def test_equal_lengths_and_sequences_need_no_alignment() -> None:
    q, k, v = operands(10, 10)
    sequences = masks.Sequences([0, 4, 10], np.array([0, 4, 10]), causal="bottom_right")
    for options in ({"causal": "bottom_right"}, {"mask": masks.Causal("bottom_right")}, {"mask": sequences}):
        assert np.isfinite(cuflash.attention(q, k, v, score=alibi(), **options)).all()


def test_an_equal_call_with_an_alignment_does_not_let_one_without_pass() -> None:
    for _ in range(2):
        cuflash.attention(*X, causal="bottom_right", score=alibi(align="top_left"))
        assert "got alibi, which" in refused(lambda: cuflash.attention(*X, causal="bottom_right", score=alibi()))


def test_offsets_on_a_device_are_taken_for_shifted(device: Any) -> None:
    with device.transfers_allowed():
        on_device = [device.to_device(np.array([0, 3])) for _ in range(2)]
    assert masks.Sequences(*on_device, causal="bottom_right")._has_shifted_diagonals
    assert not masks.Sequences(on_device[0], causal="bottom_right")._has_shifted_diagonals
    assert not masks.Sequences(*on_device, causal="top_left")._has_shifted_diagonals


WRONG = {
    "a word": (lambda: alibi(align="left"), "align must be 'bottom_right', 'top_left' or None; got 'left'"),
    "a flag": (lambda: t5(align=True), "align must be 'bottom_right', 'top_left' or None; got True"),
    "a word of within": (lambda: scores.within(alibi(), [0, 3], align=3), "'top_left' or None; got 3"),
    "two alignments": (
        lambda: scores.within(alibi(align="bottom_right"), [0, 3], align="top_left"),
        "align must be None for a score that has its own alignment; got 'top_left'",
    ),
    "lengths that float32 does not distinguish": (
        lambda: cuflash.plan(
            cuflash.ShapeDtype((2, 1, 8), "f4"), *[cuflash.ShapeDtype((2, 2**24 + 2, 8), "f4")] * 2,
            score=alibi(align="bottom_right"), device=cuflash.DeviceSpec.host(),
        ),
        "seqlen_kv - seqlen_q must be at most 2**24 in magnitude",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_an_alignment_is_refused(name: str) -> None:
    call, words = WRONG[name]
    assert words in refused(call)
