"""`scores.within`: positions of a score function start again in each packed sequence."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from cuflash.testing import Example, assert_within_bounds
from executors import RUNS, Run
from refusals import refused

import cuflash
from cuflash import masks, scores
from cuflash.scores import Score

RNG = np.random.default_rng(0)
Q_OFFSETS, KV_OFFSETS = np.array([1, 4, 4, 40, 41]), np.array([0, 70, 75, 100, 103])
SEQLEN_Q, SEQLEN_KV = 45, 110


def of_places(s: Any, b: Any, h: Any, i: Any, j: Any, slope: Any, of_query: Any, of_key: Any) -> Any:
    return s - slope[h] * np.abs(i - j) + of_query[i] + of_key[np.clip(j, 0, 109)]


def score_of(run: Run) -> Score:
    rng = np.random.default_rng(1)
    arrays = {"slope": (4,), "of_query": (SEQLEN_Q,), "of_key": (SEQLEN_KV,)}
    return Score(of_places, **{name: run.put(rng.standard_normal(shape, np.float32)) for name, shape in arrays.items()})


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_packed_sequence_has_the_scores_of_one_alone(run: Run, dtype: str) -> None:
    q, k, v = (
        RNG.standard_normal((heads, rows, 16)).astype(dtype)
        for heads, rows in ((4, SEQLEN_Q), (2, SEQLEN_KV), (2, SEQLEN_KV))
    )
    alone, offsets = score_of(run), [run.put(each) for each in (Q_OFFSETS, KV_OFFSETS)]
    packed = scores.within(alone, *offsets, seqlen_q=SEQLEN_Q, seqlen_kv=SEQLEN_KV, allow_gaps=True)
    mask = masks.Sequences(*offsets, causal="bottom_right", allow_gaps=True)
    arrays = [run.put(x) for x in (q, k, v)]
    o, lse = cuflash.attention(*arrays, mask=mask, score=packed, return_lse=True, **run.options)
    o, lse = run.get(o), run.get(lse)
    host = Score(of_places, **{name: run.get(array) for name, array in alone.arrays.items()})
    for n in range(len(Q_OFFSETS) - 1):
        rows, keys = slice(*Q_OFFSETS[n : n + 2]), slice(*KV_OFFSETS[n : n + 2])
        example = Example(q=q[:, rows], k=k[:, keys], v=v[:, keys], mask=masks.Causal("bottom_right"), score=host)
        assert_within_bounds(run.rounded(example), o=o[:, rows], lse=lse[:, rows])


def test_captured_arrays_keep_their_gradients() -> None:
    """Results are within the bounds of the function on plain numbers, which is what the oracle calls."""
    q, k, v, do = RNG.standard_normal((4, 2, 30, 8), np.float32)
    offsets = [0, 12, 30]
    score, mask = scores.within(scores.alibi(scores.alibi_slopes(2)), offsets), masks.Sequences(offsets)
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, score=score, mask=mask, wrt="slopes", return_lse=True)
    gradients = vjp(do)
    example = Example(q=q, k=k, v=v, do=do, mask=mask, score=score, wrt=("slopes",))
    dq, dk, dv = gradients
    others = {"slopes": gradients["slopes"]}
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv, others=others)


def test_offsets_of_each_batch_entry_are_its_own_and_others_compile_nothing() -> None:
    x, alibi = RNG.standard_normal((2, 1, 6, 8)), scores.alibi(np.ones(1))
    offsets = np.array([[0, 2, 6], [0, 5, 6]])
    score = scores.within(alibi, offsets)
    o = cuflash.attention(x, x, x, mask=masks.Sequences(offsets), score=score)
    for b in range(2):
        one = scores.within(alibi, offsets[b])
        np.testing.assert_array_equal(
            o[b], cuflash.attention(x[b], x[b], x[b], mask=masks.Sequences(offsets[b]), score=one)
        )
    assert scores.within(alibi, [0, 3, 9, 10]).program == one.program
    assert pickle.loads(pickle.dumps(score)).program == score.program


ALIBI = scores.alibi(np.ones(2))
WRONG = {
    "fewer rows": (lambda: scores.within(ALIBI, [0, 5], seqlen_q=4), "seqlen_q must be an int of at least 5, the last"),
    "more rows": (lambda: scores.within(ALIBI, [0, 5], seqlen_q=6), "must end at seqlen_q=6; got [0, 5]: for rows"),
    "far": (lambda: scores.within(ALIBI, [0, 2**31]), "q_offsets must be below 2**31; got 2147483648"),
    "twice": (lambda: scores.within(scores.within(ALIBI, [0, 1]), [0, 1]), "score must not have an array named q_st"),
    "all": (lambda: scores.within(ALIBI, [1, 0], "x", seqlen_q=1.5), "4 reasons"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    call, message = WRONG[name]
    assert message in str(refused(call))
    with pytest.raises(TypeError, match="score must be a Score or a function"):
        scores.within("x", [0, 1])
