"""A score function that reads everything at cache positions, and its equivalent for a single sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cache_calls import CAPACITY, Drawn, assert_is_attention
from cuflash import KVCache, masks
from cuflash.scores import Score
from cuflash.testing import Example, assert_within_bounds
from executors import Run


def mixed(
    s: Any, b: Any, h: Any, i: Any, j: Any, slope: Any, of_query: Any, of_key: Any, near: Any, cap: float = 20.0
) -> Any:
    """Combine a number, arrays indexed by sequence (as a leading axis and explicitly), by position and by distance."""
    capped = cap * np.tanh(s / cap) - slope[..., h] * np.abs(i - j)
    return capped + of_query[b, i] + of_key[j] + near[np.clip(i - j, 0, 30)]


def arrays_of(batch: int, heads: int, capacity: int = CAPACITY, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"slope": (batch, heads), "of_query": (batch, capacity), "of_key": (capacity,), "near": (31,)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"slope": (arrays["slope"] / 8).astype(np.float16)}


def of_sequences(arrays: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Return the arrays of some of the sequences."""
    return arrays | {name: arrays[name][list(rows)] for name in ("slope", "of_query")}


def of_one(arrays: dict[str, Any], b: int, first: int) -> Score:
    """Return the score function for sequence b alone, whose first query has position `first`."""

    def alone(s: Any, _: Any, h: Any, i: Any, j: Any, **held: Any) -> Any:
        return mixed(s, 0, h, i + first, j, **held)

    return Score(alone, **of_sequences(arrays, [b]) | {"slope": arrays["slope"][b]})


def assert_is_scored_attention(
    run: Run, call: Drawn, arrays: dict[str, Any], o: Any, lse: Any, scale: float | None = None
) -> None:
    """Assert that each sequence's results are those of its own keys, with the score function at its own positions."""
    rows = call.q.shape[2]
    for b, length in enumerate(call.lengths):
        count = rows if call.counts is None else call.counts[b]
        score = of_one(arrays, b, max(0, length - count))
        assert_is_attention(call.of([b]), o[b : b + 1], lse[b : b + 1], partial(_scored, run, score, scale))


def _scored(run: Run, score: Score, scale: float | None, example: Any) -> Any:
    return run.rounded(example.but(score=score, scale=scale))


def chunked(run: Run, dtype: Any, dim: int, left: int, cuts: Sequence[int]) -> tuple[Any, Any]:
    """Compute attention of the last tokens of a sequence to a cache with parts of 128 keys.

    Rows are appended in chunks that end at the positions `cuts`, and queries attend to `left` keys before their own.
    The first chunk has no queries. Results must be within their bounds.

    Returns
    -------
    o, lse : array
    """
    rng, sizes = np.random.default_rng(dim), {"batch": 1, "num_kv_heads": 1, "head_dim": dim, "capacity": CAPACITY}
    cupy = {"xp": pytest.importorskip("cupy")} if run.is_on_device else {}
    cache = KVCache(**sizes, dtype=dtype, part_keys=128, **cupy)
    source = np.dtype(np.float16) if dtype.itemsize == 1 else dtype
    q, k, v = (rng.standard_normal((1, heads, 200, dim)).astype(source) for heads in (4, 1, 1))
    outputs, arrays = [], arrays_of(1, 4)
    score = Score(mixed, **{name: run.put(array) for name, array in arrays.items()})
    for first, stop in pairwise((0, *cuts)):
        cache.append(run.put(k[:, :, first:stop]), run.put(v[:, :, first:stop]))
        if first:
            options = {"window": (left, 0), "score": score, "executor": run.executor, "return_lse": True}
            outputs.append([run.get(x) for x in cache.attention(run.put(q[:, :, first:stop]), **options)])
    o, lse = (np.concatenate(each, axis=2) for each in zip(*outputs))
    if dtype.itemsize > 1:  # the cache stores keys and values unchanged
        mask = masks.Causal("bottom_right") & masks.SlidingWindow(left, 0, "bottom_right")
        example = Example(q=q[0, :, cuts[0] :], k=k[0], v=v[0], mask=mask, score=of_one(arrays, 0, cuts[0]))
        assert_within_bounds(run.rounded(example), o=o[0], lse=lse[0])
    return o, lse
