"""Planted faults in score functions of KV caches, in parts at fixed positions, and in positions in packed sequences."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from cache_calls import NEW, cache_of, drawn, same_bits
from cuflash.scores import Score
from cuflash.cache import one_by_one
from executors import SIM
from mutations.calls import refuses
from mutations.planting import Edit
from scored_caches import arrays_of, assert_is_scored_attention, chunked, mixed

SIGNS = (AssertionError, ValueError, IndexError, KeyError)  # exceptions with which a guard reports a fault
_ARRAYS = arrays_of(2, 4)
_CALLS = {"auto": drawn(NEW | {"rows": 3, "heads": 4}, (193, 2)).fitting()} | {
    kernel: drawn(NEW | {"rows": 70, "heads": 4}, (193, 2)).fitting() for kernel in ("sm80", "sm90")
}


def _is_scored(kernel: str) -> None:
    """Check that a cache kernel evaluates the score function at cache positions."""
    call, original = _CALLS[kernel], one_by_one.Call
    one_by_one.Call = None  # type: ignore[assignment, misc]
    try:
        cache = cache_of(SIM, call, {"page_size": 16, "num_pages": 20})
        results = cache.attention(call.q, score=Score(mixed, **_ARRAYS), scale=0.2, kernel=kernel, executor="sim",
                                  return_lse=True, counts=call.counts)  # fmt: skip
    finally:
        one_by_one.Call = original  # type: ignore[misc]
    assert_is_scored_attention(SIM, call, _ARRAYS, *results, scale=0.2)


def decode_is_scored() -> None:
    _is_scored("auto")


def sm80_prefill_is_scored() -> None:
    _is_scored("sm80")


def sm90_prefill_is_scored() -> None:
    _is_scored("sm90")


def parts_are_at_fixed_positions() -> None:
    """Check that a chunk cut in two has equal bits; its first piece visits a part that the last does not."""
    for left in (132, 60):
        outputs = [chunked(SIM, np.dtype(np.float16), 64, left, cuts) for cuts in ((190, 200), (190, 197, 200))]
        assert same_bits(*outputs)


def host_scores_are_right(library: ModuleType) -> None:
    """Check that each sequence's results equal those of a separate call at cache positions, also in parts."""
    rng, capacity = np.random.default_rng(0), 60
    rows = rng.standard_normal((2, 3, 2, 50, 8), np.float32)
    q = rng.standard_normal((3, 4, 5, 8), np.float32)
    arrays = arrays_of(3, 4, capacity)
    score = library.scores.Score(mixed, **arrays)
    outputs = []
    for part_keys in (None, 64):
        sizes = {"batch": 3, "num_kv_heads": 2, "head_dim": 8, "capacity": capacity, "dtype": np.float32}
        cache = library.KVCache(**sizes, page_size=16, num_pages=12, part_keys=part_keys)
        cache.append(*rows, counts=[50, 7, 33])
        outputs.append(cache.attention(q, score=score, window=(20, 0)))
        assert np.array_equal(cache.attention(q, softcap=2.0), cache.attention(q, softcap=np.float64(2.0)))
    for b, length in enumerate((50, 7, 33)):
        new = min(5, length)

        def alone(s: Any, _: Any, h: Any, i: Any, j: Any, b: int = b, first: int = length - new, **held: Any) -> Any:
            return mixed(s, b, h, i + first, j, **held)

        held = arrays | {"slope": arrays["slope"][b]}
        operands, window = (q[b, :, 5 - new :], *rows[:, b, :, :length]), {"causal": "bottom_right", "window": (20, 0)}
        own = library.scores.Score(lambda s, _, h, i, j, slope, of_query, of_key, near, alone=alone: alone(
            s, 0, h, i, j, slope=slope, of_query=of_query, of_key=of_key, near=near), **held)  # fmt: skip
        one = library.attention(*operands, **window, score=own)
        bound = library.error_bound(*operands, **window, score=own).o
        for each in outputs:
            assert (np.abs(each[b, :, 5 - new :] - one) <= 2 * bound).all()
    _chunks_are_tokens(library, rows, q)


def _chunks_are_tokens(library: ModuleType, rows: Any, q: Any) -> None:
    results = []
    for cuts in ((0, 45, 50), (0, 45, 46, 48, 50)):
        cache = library.KVCache(
            batch=3, num_kv_heads=2, head_dim=8, capacity=60, dtype=np.float32, part_keys=64
        )
        for first, stop in zip(cuts, cuts[1:]):
            cache.append(*rows[:, :, :, first:stop])
            results += [cache.attention(q[:, :, first - 45 : stop - 45], causal=True)] if first else []
    assert np.array_equal(results[0], np.concatenate(results[1:], axis=2))


def steps_are_of_their_score(library: ModuleType) -> None:
    """Check that calls share a step if and only if their programs, numbers and array layouts are equal."""
    steps = import_module(f"{library.__name__}.cache.steps")
    original = steps.layout_key
    steps.layout_key = lambda *arrays: tuple(array.shape for array in arrays)
    try:
        q, options = np.zeros((1, 2, 1, 8)), steps.RequestedOptions(True, None, None, "auto", "auto", "ieee")
        scores = library.scores
        functions = [scores.softcap(3.0), scores.softcap(5.0), *(scores.temperature(np.ones(n)) for n in (2, 3)), None]
        functions.append(scores.softcap(3.0))
        requests = [steps.Request(q, None, None, options, score, None) for score in functions]
        *keys, again = [steps.decode_key(None, request) for request in requests]
        assert len(set(keys)) == len(keys) and None not in keys and again == keys[0]
    finally:
        steps.layout_key = original


def positions_restart(library: ModuleType) -> None:
    x, offsets = np.random.default_rng(0).standard_normal((2, 9, 8)), [0, 4, 4, 9]
    alibi = library.scores.alibi(np.array([0.5, 2.0]))
    score = library.scores.within(library.scores.Score(lambda s, b, h, i, j: s * (i + 1.0) - j), offsets) @ alibi
    o = library.attention(x, x, x, mask=library.masks.Sequences(offsets), score=score)
    for rows in (slice(0, 4), slice(4, 9)):
        function, part = library.scores.Score(lambda s, b, h, i, j: s * (i + 1.0) - j) @ alibi, x[:, rows]
        bound = library.error_bound(part, part, part, score=function).o
        assert (np.abs(o[:, rows] - library.attention(part, part, part, score=function)) <= 2 * bound).all()


def _cache(library: ModuleType, **options: Any) -> Any:
    sizes = {"batch": 1, "num_kv_heads": 1, "head_dim": 4, "capacity": 40, "dtype": np.float32}
    return library.KVCache(**sizes | options)


def _over(library: ModuleType) -> Any:
    pages = np.ones((2, 1, 16, 4), np.float32)
    return library.KVCache.over(pages, pages, np.array([[0]]), [3])


QUERY = np.ones((1, 1, 1, 4), np.float32)
DECODE, WORK, ONE, PLACES = "sm80/decode.cuh", "attention/decode_work.cuh", "cache/one_by_one.py", "scores/places.py"
FAULTS = {
    decode_is_scored: {
        "all heads of a group are its first": Edit(DECODE, "score_step", "heads.head + row.quotient", "heads.head"),
        "queries stand at the start": Edit(
            "attention/decode_work.cuh", "NewTokens.position", "of.length - of.count + number", "number"
        ),
        "keys count from the part's first": Edit(
            DECODE, "decode", "own.positions(start, stop)", "own.positions(start - part.start, stop)"
        ),
        "the scale is applied again": Edit(DECODE, "decode", "kHasScore ? 1.0 : params.softmax_scale",
                                           "params.softmax_scale"),
    },
    sm80_prefill_is_scored: {
        "queries count from the first new one": Edit("sm80/forward.cu", "head_and_query", "position(row)}", "row}"),
    },
    sm90_prefill_is_scored: {
        "queries count from the first new one": Edit(
            "sm90/tile_score.cuh", "TileScore.position", "position_(queries_.at(row))", "queries_.at(row)"
        ),
    },
    parts_are_at_fixed_positions: {
        "parts follow from the length": Edit(WORK, "part_of", "if constexpr (Config::kPartKeys > 0)", "if (false)"),
        "parts count from the first position": Edit(WORK, "part_of", "(first_part + number) * kKeys", "number * kKeys"),
    },
    host_scores_are_right: {
        "keys stand at the start": Edit(
            ONE, "OneByOneStep.attend", "[sequence, position, part.first]", "[sequence, position, 0]"
        ),
        "all sequences are the first": Edit(
            ONE, "OneByOneStep.attend", "[sequence, position, part.first]", "[0, position, part.first]"
        ),
        "the batch's axis is read at its start": Edit(
            PLACES, "_OfSequence.__getitem__", "0 if extent == 1 else self._sequence", "0"
        ),
        "a query alone sees one key less": Edit(
            ONE, "OneByOneStep._parts", "min(length, position + right + 1)", "min(length, position + right)"
        ),
    },
    steps_are_of_their_score: {
        "numbers are those of the first call": Edit(
            "cache/steps.py", "decode_key", "(score.program, score.numbers)", "(score.program,)"
        ),
        "any arrays are taken": Edit(
            "cache/steps.py", "decode_key", "captured, lists)", "(), lists)"
        ),
    },
    positions_restart: {
        "positions continue": Edit(PLACES, "_behind", "position - np.maximum(start, 0)", "position"),
    },
    refuses(
        lambda library: _cache(library).attention(QUERY, bias=np.ones((1, 1), np.float32)[:, :0]), "bias must broadcast"
    ): {
        "arrays are checked where keys are": Edit(
            "cache/_doors.py", "checked_queries", "if score is None else fit_reasons", "if True else fit_reasons"
        ),
    },
    refuses(
        lambda library: _cache(library).attention(
            QUERY, score=library.scores.Score(lambda s, b, h, i, j, t: s + t[i], t=np.ones(1))
        ),
        "index 0 of t may be 0..39 and the axis has 1",
    ): {
        "queries have the positions of the new": Edit(
            "cache/scoring.py", "ScoreKind.of", "problem.num_heads, problem.seqlen_kv,", "problem.num_heads, 1,"
        ),
    },
    refuses(lambda library: _cache(library, part_keys=65), "part_keys must be a multiple of 64"): {
        "parts are of any size": Edit("cache/arguments.py", "part_reasons", "and part_keys % PART_STEP == 0", ""),
    },
    refuses(_over, "v_pages must not overlap k_pages"): {
        "one array is keys and values": Edit(
            "cache/_changes.py", "_checked_pages", 'overlap_reasons("v_pages", v, {"k_pages": k})', "[]"
        ),
    },
    refuses(lambda library: _cache(library, part_keys=64, capacity=8193), "into at most 128 parts"): {
        "parts are too many": Edit("cache/arguments.py", "part_reasons", "> MOST_PARTS * part_keys", "> 2**40"),
    },
}  # fmt: skip
