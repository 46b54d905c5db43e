"""Score functions in cache kernels, at positions of the cache, and keys that are split at fixed positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import NEW, Drawn, assert_is_attention, cache_of, drawn, same_bits
from cuflash.scores import Score
from cuflash.cache import one_by_one
from executors import CPU, GPU, SIM, Run, on_sim_and_gpu
from scored_caches import arrays_of, assert_is_scored_attention, chunked, mixed, of_sequences

KERNELS = {
    "auto": NEW | {"rows": 3, "heads": 4, "dtype": ml_dtypes.bfloat16, "sink": True},
    "sm80": NEW | {"rows": 70, "heads": 4, "window": (70, None)},
    "sm90": NEW | {"rows": 70, "heads": 4, "window": (70, None), "sink": True},
}
LENGTHS = (193, 2, 65)
PAGES: dict[str, dict[str, int]] = {"contiguous": {}, "pages": {"page_size": 16, "num_pages": 20}}


def attended(run: Run, kernel: str, call: Drawn, arrays: dict[str, Any], pages: str) -> list[Any]:
    cache = cache_of(run, call, PAGES[pages])
    score = Score(mixed, **{name: run.put(array) for name, array in arrays.items()})
    options = {"window": call.window, "sink": run.put(call.sink), "kernel": kernel, "executor": run.executor}
    output = cache.attention(run.put(call.q), score=score, return_lse=True, counts=call.counts, **options)
    return [run.get(x) for x in output]


@on_sim_and_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_are_those_of_positions_and_bits_depend_on_the_own_sequence(
    run: Run, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are within the bounds of a call per sequence, with equal bits alone, in another order and in pages."""
    monkeypatch.setattr(one_by_one, "Call", None)  # the fall-back that would otherwise serve the call
    call = drawn(KERNELS[kernel], LENGTHS).fitting()
    arrays = arrays_of(len(LENGTHS), 4)
    results = attended(run, kernel, call, arrays, "contiguous")
    assert_is_scored_attention(run, call, arrays, *results)
    for rows, pages in (([2, 0], "pages"), ([1], "contiguous")):
        result = attended(run, kernel, call.of(rows), of_sequences(arrays, rows), pages)
        assert same_bits(result, [x[rows] for x in results])


def capped_distances(s: Any, b: Any, h: Any, i: Any, j: Any, first: int = 0) -> Any:
    return 4 * np.tanh(s / 4) - np.abs(i + first - j) / 16


@on_sim_and_gpu
def test_functions_of_products_have_positions_of_the_cache(run: Run) -> None:
    """The sm90 kernel passes q . k to functions without arrays, and cache positions to functions of distances."""
    call = drawn(KERNELS["sm90"], LENGTHS).fitting()
    o, lse = cache_of(run, call, PAGES["pages"]).attention(
        run.put(call.q), score=Score(capped_distances), window=call.window, sink=run.put(call.sink), kernel="sm90",
        executor=run.executor, return_lse=True, counts=call.counts,
    )  # fmt: skip
    for b, length in enumerate(call.lengths):
        count = call.q.shape[2] if call.counts is None else call.counts[b]
        alone = Score(partial(capped_distances, first=max(0, length - count)))
        assert_is_attention(
            call.of([b]), run.get(o)[b : b + 1], run.get(lse)[b : b + 1],
            lambda example, alone=alone: run.rounded(example.but(score=alone)),
        )  # fmt: skip


ROWS = (("float16", 64), ("float16", 200), ("float8_e4m3fn", 64), ("float32", 24))
OF_PARTS = [
    *(pytest.param(CPU, *each) for each in ROWS[2:]), *(pytest.param(SIM, *each) for each in ROWS[1:3]),
    *(pytest.param(GPU, *each, marks=pytest.mark.gpu) for each in ROWS),
]  # fmt: skip


@pytest.mark.parametrize("run, dtype, dim", OF_PARTS, ids=str)
def test_parts_at_fixed_positions_make_chunks_and_tokens_equal(run: Run, dtype: Any, dim: int) -> None:
    """Bits are equal token by token and in chunks of up to 64 rows, which visit parts that single tokens do not."""
    cache_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for left in (132, 60):
        results = chunked(run, cache_dtype, dim, left, (190, 200))
        for cuts in ((190, 191, 192, 193, 200), (190, 197, 200)):
            assert same_bits(chunked(run, cache_dtype, dim, left, cuts), results)
