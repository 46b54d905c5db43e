"""Score functions of calls on a cache, from `score=`, `softcap=` and `bias=`, at positions of the cache."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import CAPACITY, NEW, Drawn, cache_of, drawn, same_bits
from executors import CPU
from refusals import refused
from scored_caches import arrays_of, assert_is_scored_attention, mixed, of_sequences

import cuflash
from cuflash import KVCache, ShapeDtype, scores
from cuflash.scores import Score
from cuflash.scores.score import MAX_ARRAYS

RNG = np.random.default_rng(0)
CALLS = {
    "one token": NEW | {"heads": 4},
    "several, with a window and a sink": NEW | {"rows": 5, "heads": 4, "window": (70, None), "sink": True},
    "float32": NEW | {"rows": 3, "heads": 2, "dtype": np.float32},
}
LENGTHS = (193, 0, 2, 64)
PAGES = {"page_size": 16, "num_pages": 30}


def attended(call: Drawn, arrays: dict[str, Any], **pages: int) -> Any:
    score, options = Score(mixed, **arrays), {"window": call.window, "sink": call.sink, "counts": call.counts}
    return cache_of(CPU, call, pages).attention(call.q, score=score, return_lse=True, **options)


@pytest.mark.parametrize("kind", CALLS)
def test_scores_are_those_of_positions_and_bits_depend_on_the_own_sequence(kind: str) -> None:
    """Results on the host are within bounds of a call per sequence, with equal bits alone and in pages."""
    call = drawn(CALLS[kind], LENGTHS).fitting()
    arrays = arrays_of(len(LENGTHS), call.q.shape[1])
    results = attended(call, arrays)
    assert_is_scored_attention(CPU, call, arrays, *results)
    for rows in ([0, 1, 2, 3], [3, 0], [2]):
        result = attended(call.of(rows), of_sequences(arrays, rows), **PAGES)
        assert same_bits(result, [x[rows] for x in results])


def filled(**fields: Any) -> tuple[KVCache, Any]:
    """Return a cache of two sequences with 50 and 20 positions, and the queries of two tokens."""
    sizes = {"batch": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 60, "dtype": np.float32}
    cache = KVCache(**sizes | fields)
    cache.append(*RNG.standard_normal((2, 2, 2, 50, 8), np.float32), counts=[50, 20])
    return cache, RNG.standard_normal((2, 4, 2, 8), np.float32)


def test_a_cap_a_bias_and_a_function_are_one_score_in_their_order() -> None:
    cache, q = filled()
    bias = RNG.standard_normal((2, 1, 60, 60)).astype(np.float32)
    alibi, options = scores.alibi(scores.alibi_slopes(4)), {"executor": "cpu"}
    one = cache.attention(q, softcap=3.0, bias=bias, score=alibi, **options)
    two = cache.attention(q, score=alibi @ scores.bias(bias) @ scores.softcap(3.0), **options)
    assert np.array_equal(one, two) and not np.array_equal(one, cache.attention(q, softcap=3.0, score=alibi))
    rows = [cuflash.attention(q[b], *cache.rows(b), causal="bottom_right", softcap=3.0) for b in range(2)]
    assert np.array_equal(cache.attention(q, softcap=3), rows)


def test_a_score_may_have_as_many_arrays_as_elsewhere() -> None:
    cache, q = filled()
    held = {f"a{n}": np.float32([n]) for n in range(MAX_ARRAYS)}
    many = Score(lambda s, b, h, i, j, **arrays: s + sum(arrays[name][0] for name in arrays) * j, **held)
    total = sum(range(MAX_ARRAYS))
    one = Score(lambda s, b, h, i, j: s + float(total) * j)
    np.testing.assert_array_equal(cache.attention(q, score=many), cache.attention(q, score=one))


WRONG = {
    "no cap": (lambda cache, q: cache.attention(q, softcap=0.0), "softcap must be a positive finite number; got 0.0"),
    "a bias of the tokens": (
        lambda cache, q: cache.attention(q, bias=np.ones((2, 50), np.float32)),
        "bias must broadcast to (*batch, num_heads, seqlen_q, seqlen_kv) = (2, 4, 60, 60); got (2, 50)",
    ),
    "a table of what was appended": (
        lambda cache, q: cache.attention(q, score=Score(lambda s, b, h, i, j, t: s + t[j], t=np.ones(50))),
        "index 0 of t may be 0..59 and the axis has 50",
    ),
    "an array of another batch": (
        lambda cache, q: cache.attention(q, score=Score(lambda s, b, h, i, j, t: s + t[..., h], t=np.ones((3, 4)))),
        "the axes of t before its 1 indices must broadcast against the batch (2,); got (3,)",
    ),
    "a shape": (
        lambda cache, q: cache.attention(q, score=scores.alibi(ShapeDtype((4,), np.float32))),
        "slopes must be an array; got only a shape and dtype",
    ),
    "all at once": (
        lambda cache, q: cache.attention(q, softcap=-1, scale="x", window=3),
        "3 reasons",
    ),
    "parts of odd keys": (lambda cache, q: filled(part_keys=100), "part_keys must be a multiple of 64 that splits"),
    "too many parts": (
        lambda cache, q: filled(part_keys=64, capacity=64 * 128 + 1), "the capacity into at most 128 parts; got 64"
    ),
    "parts of given pages": (
        lambda cache, q: KVCache.over(*np.ones((2, 3, 2, 16, 8), "f4"), np.array([[0]]), [0], part_keys=-64),
        "part_keys must be a multiple of 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_before_any_work(name: str) -> None:
    call, message = WRONG[name]
    cache, q = filled()
    assert message in str(refused(lambda: call(cache, q)))


def test_what_is_no_function_and_no_array_is_a_type_error() -> None:
    cache, q = filled()
    with pytest.raises(TypeError, match="score must be a Score or a function"):
        cache.attention(q, score=3)
    with pytest.raises(TypeError, match="bias must be an array"):
        cache.attention(q, bias=["1.0"])


def test_parts_are_shown_and_a_longest_cache_has_them() -> None:
    cache = KVCache(batch=1, num_kv_heads=1, head_dim=8, capacity=64 * 128, dtype=ml_dtypes.bfloat16, part_keys=64)
    assert "part_keys=64" in repr(cache) and CAPACITY < cache.capacity
