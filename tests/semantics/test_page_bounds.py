"""A cache stores the minimum and the maximum of the keys of each page; chosen blocks of a cache on a device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import launch
from cuflash.cache.paged_rows import PagedRows
from cuflash.cache.pages import Growth
from cuflash.masks import ChosenBlocks
from cuflash.planning.appending import append_pass
from cuflash.planning.decoding import CacheLayout
from executors import Run, on_sim_and_gpu

import cuflash
from cuflash import UnsupportedProblem

SIZES = {"batch": 3, "num_kv_heads": 2, "head_dim": 40, "capacity": 100, "page_size": 16, "num_pages": 24}


def check_bounds(library: Any, xp: Any = np, is_counted: bool = False, dtype: Any = np.float16) -> None:
    """Check bounds after appends of one row and of many, forks, truncation and new pages, also with NaN."""
    rng = np.random.default_rng(0)
    cache = library.KVCache(**SIZES, dtype=dtype, keeps_page_bounds=True, xp=xp)
    cache.page_bounds[...] = 7
    held = [np.zeros((2, 0, 40), dtype) for _ in range(3)]
    if is_counted:
        cache.reserve([100] * 3)
        cache.count_on_device()
    for step, counts in enumerate(([5, 0, 16], [1, 1, 1], [40, 17, 30], [1, 1, 16], [20, 3, 0])):
        k = rng.standard_normal((3, 2, max(counts), 40)).astype(dtype)
        k[0, 0, 0, 3] = np.nan if step == 3 else 9
        cache.append(xp.asarray(k), xp.asarray(k), counts=counts)
        held = [np.concatenate([rows, k[b, :, : counts[b]]], axis=1) for b, rows in enumerate(held)]
        assert_bounds(cache, held, xp)
    if is_counted:
        return
    cache.fork(0, 1)
    cache.truncate([60, 67, 20])
    held = [held[0][:, :60], held[0][:, :67], held[2][:, :20]]
    k = rng.standard_normal((3, 2, 13, 40)).astype(dtype)
    cache.append(xp.asarray(k), xp.asarray(k))
    held = [np.concatenate([rows, k[b]], axis=1) for b, rows in enumerate(held)]
    assert_bounds(cache, held, xp, is_tight=False)
    cache.reset([2])
    cache.append(xp.asarray(k), xp.asarray(k), counts=[0, 0, 13])
    assert_bounds(cache, [held[0], held[1], k[2]], xp, is_tight=False)


def assert_bounds(cache: Any, held: Any, xp: Any, is_tight: bool = True) -> None:
    """Assert that bounds are exact, or at least wide enough if not `is_tight`, for the rows of each page."""
    bounds, table = (x if xp is np else x.get() for x in (cache.page_bounds, cache.block_table))
    for b, rows in enumerate(held):
        for place in range(-(-rows.shape[1] // 16)):
            keys = rows[:, 16 * place : 16 * place + 16].astype(np.float64)
            least, greatest = bounds[table[b, place]].astype(np.float64).swapaxes(0, 1)
            wanted = [of.reduce(keys, axis=1) for of in (np.minimum, np.maximum)]
            if is_tight:
                assert np.array_equal(least, wanted[0], equal_nan=True)
                assert np.array_equal(greatest, wanted[1], equal_nan=True)
            else:
                is_number = ~np.isnan(least)
                assert (least <= wanted[0])[is_number].all() and (greatest >= wanted[1])[is_number].all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_bounds_on_the_host_are_those_of_pages(dtype: Any) -> None:
    check_bounds(cuflash, dtype=dtype)


@pytest.mark.parametrize("is_counted", [False, True])
def test_bounds_on_a_device_are_those_of_pages(xp: Any, is_counted: bool) -> None:
    check_bounds(cuflash, xp, is_counted)


def check_kernel(run: Run) -> None:
    """Check bounds of pages that start with old rows, new rows and both, and that no other bound is written."""
    (batch, heads, size), lengths, counts = (3, 2, 16), [14, 0, 32], [4, 0, 20]
    rng, table = np.random.default_rng(0), np.array([[3, 1, -1, -1], [7, -1, -1, -1], [9, 8, 2, 5]], np.int32)
    k = rng.standard_normal((batch, heads, 20, 8)).astype(np.float16)
    bounds = rng.standard_normal((11, heads, 2, 8)).astype(np.float16)
    pages = np.zeros((11, heads, size, 8), np.float16)
    host = {
        "k": k, "v": k, "cache_k": pages, "cache_v": pages.copy(), "table": table, "key_bounds": bounds,
        "lengths": np.array(lengths, np.int32), "num_faults": np.zeros(1, np.int32),
        "counts": np.array(counts, np.int32),
    }  # fmt: skip
    arrays = {name: run.put(array.copy()) for name, array in host.items()}
    layout = CacheLayout(64, size, 11, 4)
    launch(run, append_pass(k.shape, 8, k.dtype, layout, keeps_bounds=True), arrays)
    wanted = PagedRows(pages, pages.copy())
    wanted.keep_bounds()
    wanted.key_bounds[...] = bounds
    grown = [Growth(b, length, length + count) for b, (length, count) in enumerate(zip(lengths, counts)) if count]
    wanted.write(k, k, grown, table.tolist())
    assert np.array_equal(run.get(arrays["key_bounds"]), wanted.key_bounds)
    assert run.get(arrays["lengths"]).tolist() == [18, 0, 52] and not run.get(arrays["num_faults"]).any()


@on_sim_and_gpu
def test_the_kernel_writes_the_bounds_of_new_rows(run: Run) -> None:
    check_kernel(run)


def test_caches_without_pages_and_with_scales_keep_no_bounds() -> None:
    sizes = {"batch": 1, "num_kv_heads": 1, "head_dim": 8, "capacity": 64}
    assert cuflash.KVCache(**sizes, dtype=np.float16).page_bounds is None
    with pytest.raises(UnsupportedProblem, match="keeps_page_bounds must be False without pages; got True"):
        cuflash.KVCache(**sizes, dtype=np.float16, keeps_page_bounds=True)
    with pytest.raises(UnsupportedProblem, match="keeps_page_bounds must be False for keys with scales"):
        eight = ml_dtypes.float8_e4m3fn
        cuflash.KVCache(**sizes, dtype=eight, keeps_page_bounds=True, page_size=16, num_pages=4)
    with pytest.raises(UnsupportedProblem, match="keeps_page_bounds must be"):
        cuflash.KVCache(**sizes, dtype=np.float16, keeps_page_bounds=1, page_size=16, num_pages=4)


@pytest.mark.parametrize("is_counted", [False, True])
def test_chosen_blocks_of_a_cache_on_a_device_are_read_at_each_call(xp: Any, is_counted: bool) -> None:
    """Repeated calls use one bound step, which reads the lists of each call; results equal those on the host."""
    rng = np.random.default_rng(0)
    sizes = SIZES | {"head_dim": 16, "dtype": np.float16}
    caches = [cuflash.KVCache(**sizes, xp=each) for each in (np, xp)]
    k = rng.standard_normal((3, 2, 90, 16)).astype(np.float16)
    for cache, each in zip(caches, (np, xp)):
        cache.append(each.asarray(k), each.asarray(k), counts=[90, 33, 70])
    if is_counted:
        caches[1].count_on_device()
    for seed in range(3):
        q = rng.standard_normal((3, 4, 2, 16)).astype(np.float16)
        blocks = rng.integers(-1, 7, (3, 2, 2, 3)).astype(np.int32)
        host = caches[0].attention(q, mask=ChosenBlocks(blocks, 16), executor="cpu")
        o = caches[1].attention(xp.asarray(q), mask=ChosenBlocks(xp.asarray(blocks), 16), out=xp.asarray(q * 0))
        assert np.allclose(o.get().astype(np.float32), host.astype(np.float32), atol=4e-3), seed


def test_lists_are_where_the_cache_is(xp: Any) -> None:
    cache = cuflash.KVCache(**SIZES | {"head_dim": 16, "dtype": np.float16}, xp=xp)
    cache.append(*(xp.asarray(np.ones((3, 2, 5, 16), np.float16)) for _ in range(2)))
    q = xp.asarray(np.ones((3, 4, 1, 16), np.float16))
    with pytest.raises(UnsupportedProblem, match="blocks must be a cupy array, as the cache's are; got"):
        cache.attention(q, mask=ChosenBlocks(np.zeros((1, 1, 1), np.int32), 16))
