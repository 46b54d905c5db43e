"""A score function that reads everything at positions of a cache, and what it is of one sequence alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from cache_calls import CAPACITY, Drawn, assert_is_attention
from cuflash import Score
from executors import Run


def mixed(
    s: Any, b: Any, h: Any, i: Any, j: Any, slope: Any, of_query: Any, of_key: Any, near: Any, cap: float = 20.0
) -> Any:
    """Read a number, arrays at the sequence as a leading axis and by its number, at positions and at distances."""
    capped = cap * np.tanh(s / cap) - slope[..., h] * np.abs(i - j)
    return capped + of_query[b, i] + of_key[j] + near[np.clip(i - j, 0, 30)]


def arrays_of(batch: int, heads: int, capacity: int = CAPACITY, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"slope": (batch, heads), "of_query": (batch, capacity), "of_key": (capacity,), "near": (31,)}
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return made | {"slope": (made["slope"] / 8).astype(np.float16)}


def of_sequences(arrays: dict[str, Any], rows: Any) -> dict[str, Any]:
    """The arrays of some of the sequences."""
    return arrays | {name: arrays[name][list(rows)] for name in ("slope", "of_query")}


def of_one(arrays: dict[str, Any], b: int, first: int) -> Score:
    """The score function of sequence b in a call of its own, whose first query stands at a position."""

    def alone(s: Any, _: Any, h: Any, i: Any, j: Any, **held: Any) -> Any:
        return mixed(s, 0, h, i + first, j, **held)

    return Score(alone, **of_sequences(arrays, [b]) | {"slope": arrays["slope"][b]})


def assert_is_scored_attention(run: Run, call: Drawn, arrays: dict[str, Any], o: Any, lse: Any) -> None:
    """Assert that each sequence's results are those of its own keys and of the score function at its own positions."""
    rows = call.q.shape[2]
    for b, length in enumerate(call.lengths):
        count = rows if call.counts is None else call.counts[b]
        score = of_one(arrays, b, max(0, length - count))
        one = replace(call.of([b]))
        rounded = partial(_scored, run, score)
        assert_is_attention(one, o[b : b + 1], lse[b : b + 1], rounded)


def _scored(run: Run, score: Score, example: Any) -> Any:
    return run.rounded(example.but(score=score))
