"""A KV cache of float8_e4m3fn rounds rows once, stores a scale for each row, and attends to the rounded rows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_machine import rounded_to_8_bits
from cuflash import KVCache, UnsupportedProblem, masks
from cuflash.arrays import E4M3
from cuflash.fp8.rows import quantized_rows
from cuflash.selectors import Budget, quest
from cuflash.testing import Example, assert_within_bounds
from executors import on_every_executor, sampled_on_simulator

import cuflash

RNG = np.random.default_rng(0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HEADS, CAPACITY, PAGE = 2, 90, 16
SMALL = {"batch": 2, "num_kv_heads": HEADS, "head_dim": 16, "capacity": CAPACITY, "dtype": E4M3}
PAGES = {"page_size": PAGE, "num_pages": 24}


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


@sampled_on_simulator(
    on_every_executor, "dtype, num_rows",
    [(np.float16, 1), (np.float16, 70), (BFLOAT16, 70), (BFLOAT16, 1), (np.float32, 1), (np.float32, 70)], 2,
)  # fmt: skip
def test_it_attends_to_the_rows_that_it_keeps(run: Any, dtype: Any, num_rows: int) -> None:
    """Bits are equal in pages or contiguous, and alone, for one token and for more than the decode kernel supports."""
    lengths = [CAPACITY, 0, 17, 33]
    q, k, v = (normal(4, heads, rows, 16, dtype=dtype) for heads, rows in ((4, num_rows), (2, CAPACITY), (2, CAPACITY)))

    def attend(numbers: list[int], **pages: Any) -> list[Any]:
        sizes = SMALL | {"batch": len(numbers)} | ({"xp": pytest.importorskip("cupy")} if run.is_on_device else {})
        cache = KVCache(**sizes, **pages)
        for array in (cache.k, cache.v):
            array[...] = 0x7F if run.is_on_device else np.nan
        cache.k_scale[...] = cache.v_scale[...] = np.nan
        cache.append(run.put(k[numbers]), run.put(v[numbers]), counts=[lengths[b] for b in numbers])
        options = {"executor": run.executor, "kernel": run.kernel, "return_lse": True}
        news = [min(num_rows, lengths[b]) for b in numbers]
        return [run.get(x) for x in cache.attention(run.put(q[numbers]), counts=news, **options)]

    o, lse = attend([0, 1, 2, 3])
    assert o.dtype == dtype and lse.dtype == np.float32
    for one, other in zip((o, lse), attend([0, 1, 2, 3], **PAGES)):
        assert np.array_equal(one, other)
    for b, length in enumerate(lengths):
        if b % 2 == 0:
            assert all(np.array_equal(one[0], x[b]) for one, x in zip(attend([b]), (o, lse)))
        rounded = [rounded_to_8_bits(x[b, :, :length].astype(np.float32)) for x in (k, v)]
        exact = [x.astype(dtype) for x in rounded]
        assert all(np.array_equal(x.astype(np.float32), y) for x, y in zip(exact, rounded))
        new = min(num_rows, length)
        example = Example(q=q[b, :, :new], k=exact[0], v=exact[1], mask=masks.Causal("bottom_right"))
        if dtype != np.float32:
            example = example.but(product_dtype=BFLOAT16)
        assert_within_bounds(example, o=o[b, :, :new], lse=lse[b, :, :new])


def test_rows_are_rounded_once() -> None:
    """Rows have equal bits whether they are appended one by one or at once, forked, copied, truncated or read."""
    k, v = normal(2, 2, HEADS, 40, 16)
    caches = []
    for pages in ({}, PAGES):
        at_once, one_by_one = KVCache(**SMALL, **pages), KVCache(**SMALL, **pages)
        at_once.append(k, v)
        for t in range(40):
            one_by_one.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        one_by_one.fork(0, 1)
        one_by_one.append(k[:, :, :3], v[:, :, :3])
        one_by_one.truncate([40, 40])
        caches += [at_once.rows(0), one_by_one.rows(0), one_by_one.rows(1), copy.copy(one_by_one).rows(0)]
        caches.append(pickle.loads(pickle.dumps(one_by_one)).rows(0))
    for rows in caches:
        for stored, original in zip(rows, (k, v)):
            assert stored.dtype == np.float32 and np.array_equal(stored, rounded_to_8_bits(original[0]))


def test_scales_are_powers_of_two_that_fill_the_format() -> None:
    x = normal(500, 64) * np.exp2(RNG.integers(-100, 100, (500, 1))).astype(np.float32)
    data, scale = quantized_rows(x)
    assert np.array_equal(np.frexp(scale)[0], np.full(500, 0.5))
    largest = np.abs(x).max(axis=-1) / scale
    assert ((largest > 224) & (largest <= 448)).all()
    error = np.abs(data.astype(np.float64) * scale[:, None] - x)
    assert (error <= np.maximum(np.abs(x) * 2.0**-4, scale[:, None] * 2.0**-10)).all()
    for row in ([np.nan, 1], [np.inf, 1], [-np.inf, np.nan]):
        data, scale = quantized_rows(np.float32(row))
        assert np.isnan(scale) and np.isnan(data.astype(np.float32)).all()
    data, scale = quantized_rows(np.zeros((2, 3), np.float16))
    assert (scale == 1).all() and not data.astype(np.float32).any()


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_the_largest_numbers_stay_finite(dtype: Any) -> None:
    """Above 1.9375 * 2^127, the nearest FP8 number times its scale would be 2^128."""
    top = np.finfo(np.float32).max if dtype == np.float32 else ml_dtypes.finfo(dtype).max
    x = (np.float64(top) * np.linspace(0.9, 1, 40)[:, None] * np.array([1, -1, 0.1, 1e-38])).astype(dtype)[None, None]
    cache = KVCache(batch=1, num_kv_heads=1, head_dim=4, capacity=40, dtype="float8_e4m3fn")
    with np.errstate(all="raise"):
        cache.append(x, 0 * x)
        actual = cache.rows(0)[0].astype(np.float64)
        cache.attention(0 * x[:, :, :1])
    assert (np.abs(actual - x[0].astype(np.float64)) <= np.abs(x[0].astype(np.float64)) * 2.0**-4 + 2.0**108).all()
    assert np.abs(actual).max() == 1.875 * 2.0**127


def test_a_cache_of_8_bits_says_what_it_is_and_takes() -> None:
    cache = KVCache(**SMALL, **PAGES)
    assert "dtype=float8_e4m3fn" in repr(cache) and cache.k.dtype == E4M3
    assert cache.k_scale.shape == cache.v_scale.shape == (24, HEADS, PAGE)
    tokens = {"tokens": 24 * PAGE, "dtype": E4M3}
    assert cache.nbytes == cuflash.study.kv_cache_bytes(num_layers=1, num_kv_heads=HEADS, head_dim=16, **tokens)
    plain = KVCache(**SMALL | {"dtype": np.float32})
    assert plain.k_scale is None and plain.v_scale is None


def test_pages_are_chosen_from_the_rows_that_are_kept() -> None:
    cache, q, k = KVCache(**SMALL), normal(2, HEADS, 1, 16), normal(2, HEADS, 40, 16)
    cache.append(k, k)
    chosen = quest(q, cache, budget=Budget(top_k=2))
    wanted = [quest(q[b], rounded_to_8_bits(k[b]), budget=Budget(top_k=2)) for b in range(2)]
    np.testing.assert_array_equal(chosen.blocks, np.stack([each.blocks for each in wanted]))


ROWS = normal(2, HEADS, 3, 16)
WRONG = {
    "rows of doubles": (
        lambda cache: cache.append(ROWS.astype(float), ROWS.astype(float)),
        "k must have shape (2, 2, n, 16) and dtype float16 or bfloat16 or float32; got (2, 2, 3, 16) and float64",
    ),
    "FP8 rows": (lambda cache: cache.append(ROWS.astype(E4M3), ROWS.astype(E4M3)), "k must have shape"),
    "rows of two dtypes": (
        lambda cache: cache.append(ROWS, ROWS.astype(BFLOAT16)), "v must have k's dtype, float32; got bfloat16"
    ),
    "queries of doubles": (
        lambda cache: cache.attention(ROWS.astype(float)), "q must have shape (2, num_heads, n, 16) and dtype float16"
    ),
    "another out": (
        lambda cache: cache.attention(ROWS.astype(BFLOAT16), out=ROWS.copy()),
        "out must have shape (2, 2, 3, 16) and dtype bfloat16; got (2, 2, 3, 16) and float32",
    ),
    "a precision that is not one, and a scale": (
        lambda cache: cache.attention(ROWS, precision="fp8", scale="large"),
        "precision must be 'ieee', 'tf32', 'tf32x3'; got 'fp8'",
    ),
    "pages without scales": (
        lambda cache: KVCache.over(cache.k, cache.v, np.zeros((2, 1), int), [0, 0]),
        "dtype must be that of pages without scales; got float8_e4m3fn",
    ),
    "another FP8 format": (
        lambda cache: KVCache(**SMALL | {"dtype": ml_dtypes.float8_e5m2}),
        "dtype must be one of float16, bfloat16, float32, float64, float8_e4m3fn; got float8_e5m2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_a_reason(name: str) -> None:
    call, words = WRONG[name]
    cache = KVCache(**SMALL)
    cache.append(ROWS, ROWS)
    before = cache.k.copy()
    with pytest.raises(UnsupportedProblem) as caught:
        call(cache)
    assert words in str(caught.value)
    assert np.array_equal(cache.k.view(np.uint8), before.view(np.uint8)) and cache.lengths.tolist() == [3, 3]
