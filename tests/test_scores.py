"""Score functions on every executor: within their bounds, and equal to what they mean by other means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from executors import CPU, Run
from hypothesis import given, settings

import cuflash
from cuflash import Score, masks, scores
from cuflash.testing import Structure, assert_within, assert_within_bounds
from cuflash.testing.strategies import examples

# Executors and families whose kernels take score functions.
RUNS = (CPU,)
on_executors = pytest.mark.parametrize("run", RUNS, ids=str)


def put_score(run: Run, score: Score | None) -> Score | None:
    """A score whose arrays are where the executor's are."""
    if score is None or not run.is_on_device:
        return score
    return Score.of_reserved(score.function, **{name: run.put(array) for name, array in score.arrays.items()})


def everything(run: Run, example: Any, **options: Any) -> dict[str, Any]:
    """All results of a call, with the gradients of the score's arrays as `others`."""
    q, k, v, do, dlse = (run.put(getattr(example, name)) for name in ("q", "k", "v", "do", "dlse"))
    mask = run.put_mask(example.mask, example.q, example.k, example.v)
    (o, lse), vjp = cuflash.attention_vjp(
        q, k, v, mask=mask, scale=example.scale, score=put_score(run, example.score), wrt=example.wrt,
        return_lse=True, **run.options, **options,
    )  # fmt: skip
    gradients = vjp(do, dlse)
    results = zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients))
    found = {name: run.get(x) for name, x in results}
    return found | {"others": {name: run.get(gradients[name]) for name in example.wrt}}


@on_executors
def test_random_functions_are_within_their_bounds(run: Run) -> None:
    @settings(max_examples=60)
    @given(examples(most_scores=1 << 12, most_rows=300, widest=32, longest=100, has_score=True))
    def check(example: Any) -> None:
        example = run.rounded(example)
        assert_within_bounds(example, **everything(run, example))

    check()
