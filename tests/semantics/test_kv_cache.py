"""A KV cache holds the same rows as plain arrays, computes attention to them, and refuses what does not fit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_machine import CAPACITY, HEADS, KINDS, PAGE, walk
from executors import needs_compiler, on_every_executor
from foreign import Foreign
from hypothesis import given as drawn_by
from hypothesis import settings
from hypothesis import strategies as st

import cuflash
from cuflash import KVCache, UnsupportedProblem, masks
from cuflash.testing import Example, assert_within_bounds
from library_parts import part
from refusals import refused

RNG = np.random.default_rng(0)
SMALL = {"batch": 3, "num_kv_heads": HEADS, "head_dim": 8, "capacity": CAPACITY, "dtype": np.float32}
PAGES = {"page_size": PAGE, "num_pages": 15}


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_operations_in_any_order_hold_what_arrays_hold(kind: str) -> None:
    """CUFLASH_PROFILE=long runs 10,000 steps."""

    @settings(max_examples=36 if settings.default.max_examples > 100 else 2)
    @drawn_by(st.integers(0, 2**16), st.sampled_from([20, 40]))
    def check(seed: int, most_rows: int) -> None:
        walk(cuflash, kind, seed, steps=40 if settings.default.max_examples > 100 else 20, most_rows=most_rows)

    check()


# Attention


def cache_of(run: Any, k: Any, v: Any, lengths: list[int], **pages: Any) -> KVCache:
    """Return a cache with the first rows of some arrays, on the executor's device; all other rows hold NaN."""
    sizes = {"batch": len(lengths), "head_dim": k.shape[-1], "value_dim": v.shape[-1], "dtype": k.dtype}
    if run.is_on_device:
        sizes["xp"] = pytest.importorskip("cupy")
    cache = KVCache(**SMALL | sizes | pages)
    cache.k[...], cache.v[...] = np.nan, np.nan
    cache.append(run.put(k), run.put(v), counts=lengths)
    return cache


def options_of(run: Any) -> dict[str, Any]:
    return {"executor": run.executor, "kernel": run.kernel}


EDGES = [0, 1, PAGE - 1, PAGE, PAGE + 1, CAPACITY]
WINDOWS = {"all": None, "left": (PAGE // 2, None), "both": (3, 2)}


@on_every_executor
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("window", WINDOWS)
def test_each_sequence_gets_the_attention_of_its_own_rows(run: Any, dtype: Any, window: str) -> None:
    """Results are within bounds, with equal bits alone, in a batch, in pages and without; unused rows hold NaN."""
    num_rows, batch = 3, len(EDGES)
    q, k, v = (
        normal(batch, heads, rows, dim, dtype=dtype)
        for heads, rows, dim in ((2 * HEADS, num_rows, 8), (HEADS, CAPACITY, 8), (HEADS, CAPACITY, 4))
    )

    def attend(cache: KVCache, q: Any) -> list[Any]:
        counts = [min(num_rows, int(length)) for length in cache.lengths]
        arguments = {"window": WINDOWS[window], "counts": counts, **options_of(run)}
        results = cache.attention(run.put(q), return_lse=True, **arguments)
        return [run.get(x) for x in results]

    o, lse = attend(cache_of(run, k, v, EDGES), q)
    for one, other in zip((o, lse), attend(cache_of(run, k, v, EDGES, **PAGES), q)):
        assert np.array_equal(one, other)
    for b, length in enumerate(EDGES):
        alone = attend(cache_of(run, k[b : b + 1], v[b : b + 1], [length]), q[b : b + 1])
        assert np.array_equal(alone[0][0], o[b]) and np.array_equal(alone[1][0], lse[b])
        mask = masks.Causal("bottom_right")
        mask = mask if WINDOWS[window] is None else mask & masks.SlidingWindow(*WINDOWS[window], "bottom_right")
        new = min(num_rows, length)
        example = run.rounded(Example(q=q[b, :, :new], k=k[b, :, :length], v=v[b, :, :length], mask=mask))
        assert_within_bounds(example, o=o[b, :, :new], lse=lse[b, :, :new])
        assert not o[b, :, new:].any()


@pytest.mark.parametrize("of_each", [False, True], ids=["one for all", "of each sequence"])
def test_queries_without_keys_have_what_attention_gives_them_beside_a_sink(of_each: bool) -> None:
    """Queries past a sequence's count, also in sequences without rows, with sinks that are numbers and others."""
    cache, q = KVCache(**SMALL), normal(3, 2 * HEADS, 2, 8)
    k, v = normal(2, 3, HEADS, 2, 8)
    cache.append(k, v, counts=[2, 0, 2])
    sink = np.float32([0.5, np.nan, np.inf, -np.inf])
    full_sink = np.broadcast_to(sink, (3, 4)) if of_each else sink
    o, lse = cache.attention(q, counts=[2, 0, 1], sink=full_sink, return_lse=True)
    nothing = q[:1], k[:1, :, :0], v[:1, :, :0]
    wanted = cuflash.attention(*nothing, sink=sink, return_lse=True)
    assert np.isnan(wanted[1][0, :, 0]).tolist() == [False, True, True, False]
    for actual, without in zip((o, lse), wanted):
        np.testing.assert_array_equal(actual[1:2], without)
        np.testing.assert_array_equal(actual[2:, :, 1], without[:, :, 1])


MISSED = {
    "an empty cache": (0, [0, 0, 0], None, "q has 1 row and sequence 0 has 0 tokens, and 2 more"),
    "an idle sequence": (0, [2, 0, 1], None, "q has 1 row and sequence 1 has 0 tokens: append their keys and values "
                         "first, or pass counts= with 0 for idle sequences"),
    "a prompt": (50, [10, 50, 60], None, "q has 50 rows and sequence 0 has 10 tokens: append their keys and values"),
    "counts": (50, [10, 50, 60], [9, 51, 3], "must be at most the number of rows, 50; got 51 for sequence 1"),
    "too large counts": (50, [10, 50, 60], [9, 0, 50], ""),
    "counts of a short sequence": (50, [10, 50, 60], [11, 0, 50],
                                   "counts has 11 rows for sequence 0 and sequence 0 has 10 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": (3, 0)}, {"executor": "sim"}], ids=str)
@pytest.mark.parametrize("case", MISSED)
@pytest.mark.parametrize("pages", [{}, PAGES], ids=["contiguous", "pages"])
def test_queries_whose_keys_were_not_appended_are_refused(pages: Any, case: str, options: dict[str, Any]) -> None:
    """Nothing is written, and the same call succeeds once the keys have been appended."""
    num_rows, lengths, counts, words = MISSED[case]
    cache, num_rows = KVCache(**SMALL, **pages), num_rows or 1
    cache.append(*normal(2, 3, HEADS, 60, 8), counts=lengths)
    q, out = normal(3, 2 * HEADS, num_rows, 8), np.full((3, 2 * HEADS, num_rows, 8), np.nan, np.float32)
    if words:
        assert words in refused(lambda: cache.attention(q, counts=counts, out=out, **options))
        assert np.isnan(out).all()
    cache = KVCache(**SMALL, **pages)
    cache.append(*normal(2, 3, HEADS, 60, 8), counts=[60] * 3)
    counts = None if counts is None else [min(50, new) for new in counts]
    o, lse = cache.attention(q, counts=counts, return_lse=True, **options)
    for b, new in enumerate(counts or [num_rows] * 3):
        assert np.isfinite(lse[b, :, :new]).all() and o[b, :, :new].all() and not o[b, :, new:].any()


LISTED = {
    "tuple": tuple,
    "range": lambda counts: range(counts[0], counts[-1] + 1),
    "8 bits": lambda counts: np.array(counts, np.uint8),
    "strided": lambda counts: np.array(counts).repeat(2)[::2],
    "another library's": lambda counts: Foreign(np.array(counts)),
}


@pytest.mark.parametrize("kind", LISTED)
def test_counts_lengths_and_rows_in_any_array_of_the_host_are_those_in_a_list(kind: str) -> None:
    lengths = []
    for convert in (list, LISTED[kind]):
        cache = KVCache(**SMALL, **PAGES)
        rows, q = np.random.default_rng(0).standard_normal((2, 2, 3, HEADS, 4, 8), dtype=np.float32)
        cache.append(*rows, counts=convert([1, 2, 3]))
        cache.append(*rows, counts=convert([2, 3, 4]))
        result = cache.attention(q[0], counts=convert([0, 1, 2]))
        cache.reserve(convert([19, 20, 21]))
        cache.truncate(convert([2, 3, 4]))
        cache.reset(convert([0, 1]))
        lengths.append((result, cache.lengths, cache.block_table, cache.num_free_pages))
    assert lengths[0][1].tolist() == [0, 0, 4]
    assert all(np.array_equal(*pair) for pair in zip(*lengths))


# Pages


def test_a_fork_shares_pages_until_either_writes() -> None:
    cache = KVCache(**SMALL, page_size=16, num_pages=5)
    cache.append(*normal(2, 3, HEADS, 20, 8), counts=[20, 0, 0])
    cache.fork(0, 1)
    assert cache.block_table.tolist()[:2] == [[0, 1, -1, -1, -1]] * 2 and cache.num_free_pages == 3
    before = cache.k[1].copy()
    cache.append(*normal(2, 3, HEADS, 1, 8), counts=[0, 1, 0])
    assert cache.block_table.tolist()[:2] == [[0, 1, -1, -1, -1], [0, 2, -1, -1, -1]]
    assert np.array_equal(cache.k[1], before, equal_nan=True) and np.array_equal(cache.k[2, :, :4], before[:, :4])
    cache.append(*normal(2, 3, HEADS, 1, 8), counts=[1, 0, 0])
    assert cache.num_free_pages == 2  # no other sequence shares the page any more
    cache.reset([0])
    assert cache.num_free_pages == 3
    cache.reset()
    assert cache.num_free_pages == 5


def test_a_reservation_keeps_pages_from_the_others() -> None:
    cache = KVCache(**SMALL, page_size=16, num_pages=4)
    cache.reserve([33, 0, 0])
    assert cache.num_free_pages == 1
    message = refused(lambda: cache.append(*normal(2, 3, HEADS, 17, 8), counts=[0, 17, 0]))
    assert "got 17 rows for sequence 1, which need 2 more pages, but of 4 pages 1 are free" in message
    cache.append(*normal(2, 3, HEADS, 48, 8), counts=[48, 0, 0])
    assert cache.num_free_pages == 1 and cache.lengths.tolist() == [48, 0, 0]


def test_the_last_page_goes_to_the_first_that_asks() -> None:
    """Two forks write to one page. By the second write only one fork owns the page, so it needs no copy."""
    cache = KVCache(**SMALL, page_size=16, num_pages=2)
    cache.append(*normal(2, 3, HEADS, 3, 8), counts=[3, 0, 0])
    cache.fork(0, 1)
    cache.append(*normal(2, 3, HEADS, 1, 8), counts=[1, 1, 0])
    assert cache.num_free_pages == 0 and cache.lengths.tolist() == [4, 4, 0]
    message = refused(lambda: cache.append(*normal(2, 3, HEADS, 13, 8)))
    assert message.count("rows for sequence") == 3 and "sequence 2, which need 1 more page, but" in message


def test_a_refused_call_changes_nothing() -> None:
    cache = KVCache(**SMALL, page_size=16, num_pages=4)
    cache.append(*normal(2, 3, HEADS, 16, 8))
    before = cache.k.copy(), cache.lengths, cache.block_table
    calls = (
        lambda: cache.append(*normal(2, 3, HEADS, 1, 8)),
        lambda: cache.append(*normal(2, 3, HEADS, 60, 8)),
        lambda: cache.reserve([64, 16, 16]),
        lambda: cache.truncate([3, 17, 2]),
        lambda: cache.reset([0, 3]),
    )
    for call in calls:
        refused(call)
        now = cache.k, cache.lengths, cache.block_table
        assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(before, now))
        cache.check()


def test_pages_of_another_layout_are_used_where_they_lie() -> None:
    """In these pages tokens come before heads, as in other libraries."""
    pages = np.full((2, 9, PAGE, HEADS, 8), np.nan, np.float32)
    k_pages, v_pages = pages.transpose(0, 1, 3, 2, 4)
    rows = normal(2, 1, HEADS, 30, 8)
    for at in range(30):
        pages[:, (7, 2)[at // PAGE], at % PAGE] = rows[:, 0, :, at]
    cache = KVCache.over(k_pages, v_pages, np.array([[7, 2, -1]], np.int32), np.array([30]))
    assert np.shares_memory(cache.k, pages) and cache.capacity == 3 * PAGE
    q = normal(1, 2 * HEADS, 2, 8)
    own = KVCache(**SMALL | {"batch": 1})
    own.append(*rows)
    assert np.array_equal(cache.attention(q), own.attention(q))
    more = normal(2, 1, HEADS, 2, 8)
    cache.append(*more)
    assert np.array_equal(pages[:, 2, 14:16], more[:, 0].swapaxes(1, 2))
    assert "which need 1 more page, but" in refused(lambda: cache.append(*more))


def test_queries_without_heads_have_results_without_elements() -> None:
    cache = a_cache()
    o, lse = cache.attention(normal(3, 0, 1, 8), return_lse=True)
    assert o.shape == (3, 0, 1, 8) and lse.shape == (3, 0, 1)


@pytest.mark.parametrize("executor", ["cpu", pytest.param("sim", marks=needs_compiler)])
def test_each_sequence_of_pages_in_a_file_has_a_plan_of_its_own(executor: Any, tmp_path: Path) -> None:
    """An array of a subclass has no layout that would distinguish the plan of one length from that of another."""
    k, v = normal(2, 2, HEADS, PAGE, 8)
    files = [np.memmap(tmp_path / name, x.dtype, "w+", shape=x.shape) for name, x in (("k", k), ("v", v))]
    for file, x in zip(files, (k, v)):
        file[...] = x
    cache, q = KVCache.over(*files, np.array([[0], [1]]), [5, 9]), normal(2, 2 * HEADS, 1, 8)
    o, lse = cache.attention(q, executor=executor, return_lse=True)
    for b, length in enumerate([5, 9]):
        assert_within_bounds(Example(q=q[b], k=k[b, :, :length], v=v[b, :, :length]), o=o[b], lse=lse[b])


def test_a_page_of_two_sequences_is_written_to_by_neither() -> None:
    pages = normal(2, 4, HEADS, PAGE, 8)
    before = pages.copy()
    cache = KVCache.over(*pages, np.array([[0], [0]]), [5, 5])
    assert "got 1 rows for sequence 0" in refused(lambda: cache.append(*normal(2, 2, HEADS, 1, 8), counts=[1, 0]))
    assert np.array_equal(pages, before)


def test_a_cache_that_contradicts_itself_is_told() -> None:
    cache = KVCache(**SMALL, **PAGES)
    cache.append(*normal(2, 3, HEADS, 20, 8))
    cache.check()
    cache._state.lengths[1] = 40
    with pytest.raises(RuntimeError, match="sequence 1 has 40 positions and 2 pages of 16"):
        cache.check()
    cache._state.lengths[1] = 20
    cache._state.pages.tables[0][1] = 0
    with pytest.raises(RuntimeError, match="page 1 is in 0 tables and is counted as in 1"):
        cache.check()


def test_a_copy_of_a_cache_holds_rows_of_its_own() -> None:
    cache = a_cache(**PAGES)
    for copied in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        copied.append(K, K)
        assert copied.lengths.tolist() == [4] * 3 and not np.shares_memory(copied.k, cache.k)
        assert cache.lengths.tolist() == [2] * 3 and cache.num_free_pages == 12
        copied.check(), cache.check()


def test_a_cache_says_what_it_is() -> None:
    assert repr(KVCache(**SMALL, **PAGES)) == (
        "KVCache(batch=3, num_kv_heads=2, head_dim=8, value_dim=8, capacity=70, dtype=float32, page_size=16, "
        "num_pages=15, lengths=[0, 0, 0])"
    )
    assert repr(a_cache()).endswith(", dtype=float32, lengths=[2, 2, 2])")
    long = KVCache(**SMALL | {"batch": 100})
    long.append(*np.ones((2, 100, HEADS, 9, 8), np.float32), counts=[n % 10 for n in range(100)])
    assert repr(long).endswith(", lengths=[0, 1, 2, 3, ..., 6, 7, 8, 9])")
    assert KVCache(**SMALL).nbytes == 2 * 3 * HEADS * CAPACITY * 8 * 4
    assert KVCache(**SMALL, num_pages=2).k.shape == (2, HEADS, 64, 8)


# Refused calls

class TorchDtype:
    """A substitute for a PyTorch dtype, which NumPy does not know."""

    __module__ = "torch"

    def __repr__(self) -> str:
        return "torch.bfloat16"


def test_messages_about_caches_spell_the_fix() -> None:
    message = 'dtype must be a NumPy dtype or its name; got torch.bfloat16: write dtype="bfloat16"'
    assert message in refused(lambda: KVCache(**SMALL | {"dtype": TorchDtype()}))
    assert KVCache(**SMALL | {"dtype": "bfloat16"}).k.dtype == ml_dtypes.bfloat16


K = np.ones((3, HEADS, 2, 8), np.float32)
TABLE = np.array([[0, 1], [2, -1]])
BOTH = np.zeros((3, 2, 16, 8), np.float32)  # holds both keys and values


def a_cache(num_rows: int = 2, **fields: Any) -> KVCache:
    cache = KVCache(**SMALL, **fields)
    cache.append(*normal(2, 3, HEADS, num_rows, 8))
    return cache


def windows_of(*shape):
    """Return an array whose rows overlap in memory."""
    return np.lib.stride_tricks.as_strided(np.zeros(10_000, np.float32), shape, (64, 32, 4, 4))


@settings(max_examples=50, deadline=None)
@drawn_by(st.integers(0, 2**32 - 1))
def test_no_row_is_lost_if_a_table_names_pages_twice(seed):
    """Sequences read pages that others, or they themselves, have listed; a change that would write there fails."""
    rng = np.random.default_rng(seed)
    table = np.where(rng.random((3, 3)) < 0.15, -1, rng.integers(0, 7, (3, 3)))
    held = [16 * int(np.argmax([*(row < 0), True])) for row in table]
    pages, lengths = rng.standard_normal((2, 7, HEADS, 16, 4)), [int(rng.integers(0, most + 1)) for most in held]
    cache = KVCache.over(*pages.copy(), table, lengths)
    rows = [[np.array(each) for each in cache.rows(sequence)] for sequence in range(3)]
    for sequence, length in enumerate(lengths):
        parts = [np.empty((HEADS, 0, 4)), *(pages[0, page] for page in table[sequence, : -(-length // 16)])]
        np.testing.assert_array_equal(rows[sequence][0], np.concatenate(parts, axis=1)[:, :length])
    for change in rng.choice(["append", "truncate", "fork", "reset"], 8, p=[0.55, 0.25, 0.1, 0.1]):
        new, which = rng.standard_normal((2, 3, HEADS, 20, 4)), int(rng.integers(3))
        try:
            if change == "append":
                counts = (rng.integers(0, 21, 3) * (rng.random(3) < 0.5)).tolist()
                cache.append(*new, counts=counts)
                rows = [
                    [np.concatenate([old, more[b, :, : counts[b]]], axis=1) for old, more in zip(rows[b], new)]
                    for b in range(3)
                ]
            elif change == "truncate":
                lengths = [int(rng.integers(each[0].shape[1] + 1)) for each in rows]
                cache.truncate(lengths)
                rows = [[x[:, :length] for x in each] for each, length in zip(rows, lengths)]
            elif change == "fork":
                cache.fork(which, (which + 1) % 3)
                rows[(which + 1) % 3] = rows[which]
            else:
                cache.reset([which])
                rows[which] = [x[:, :0] for x in rows[which]]
        except UnsupportedProblem:
            pass
        cache.check()
        for sequence, each in enumerate(rows):
            for ours, wanted in zip(cache.rows(sequence), each):
                np.testing.assert_array_equal(ours, wanted)


def over_read_only_pages() -> KVCache:
    pages = normal(2, 3, 2, 16, 8)
    pages.flags.writeable = False
    return KVCache.over(*pages, TABLE, [0, 0])


def check_interrupted_changes(library: Any) -> None:
    """Check that changes which are interrupted at any step leave each sequence with its rows or with none."""
    rows_of_cache, pool = part(library, "cache.paged_rows").PagedRows, part(library, "cache.pages").PagePool
    k, row = normal(3, HEADS, 20, 8), normal(3, HEADS, 1, 8)
    changes: list[tuple[Any, str, dict[str, int], Any, list[int]]] = [
        (rows_of_cache, "copy", PAGES, lambda cache: cache.append(row, row), [20, 20, 3]),
        (rows_of_cache, "copy", PAGES, lambda cache: cache.reserve([40, 40, 40]), [20, 20, 3]),
        (rows_of_cache, "copy", {}, lambda cache: cache.fork(2, 1), [20, 0, 3]),
        (pool, "_take", PAGES, lambda cache: cache.append(row, row), [20, 20, 3]),
        (pool, "_drop", PAGES, lambda cache: cache.append(row, row), [20, 20, 3]),
        (pool, "_drop", PAGES, lambda cache: cache.truncate([5, 20, 3]), [5, 20, 3]),
        (pool, "_drop", PAGES, lambda cache: cache.reset([1]), [20, 0, 3]),
        (pool, "_drop", PAGES, lambda cache: cache.fork(2, 1), [20, 0, 3]),
    ]
    for owner, name, pages, change, lengths in changes:
        cache, original = library.KVCache(**SMALL, **pages), getattr(owner, name)
        cache.append(k, k, counts=[20, 0, 3])
        cache.fork(0, 1)

        def interrupted(self: Any, *arguments: Any, original: Any = original, name: str = name) -> None:
            if name != "copy":
                original(self, *arguments)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            change(cache)
        for _ in range(2):
            cache.check()
            assert cache.lengths.tolist() == lengths
            for b, length in enumerate(lengths):
                assert np.array_equal(cache.rows(b)[0][:, :3], k[0 if b == 1 else b, :, : min(length, 3)])
                assert np.array_equal(cache.rows(b)[0][:, 16:length], k[0 if b == 1 else b, :, 16:length])
            cache.append(row, row)
            cache.truncate(lengths)
            free = cache.num_free_pages
            assert not pages or free == 15 - len({page for page in cache.block_table.ravel() if page >= 0})


def check_overlaps(library: Any) -> None:
    """Check that rows and results overlap no array of a cache or a call, also if an equal call is cached."""
    fp8 = library.KVCache(**SMALL | {"batch": 1, "capacity": 32, "dtype": ml_dtypes.float8_e4m3fn})
    bounded = library.KVCache(**SMALL, page_size=16, num_pages=3, keeps_page_bounds=True)
    k, of_one, buffer = normal(3, HEADS, 2, 8), normal(1, HEADS, 4, 8), np.zeros((3, HEADS, 2, 8), np.float32)
    fp8.append(of_one, of_one)
    of_fp8 = [scale.reshape(of_one.shape) for scale in (fp8.k_scale, fp8.v_scale)]
    bounded.append(k, k)
    calls: list[tuple[str, Any, Any, Any]] = [
        ("scales of keys", lambda out: fp8.attention(of_one, out=out), of_one.copy(), of_fp8[0]),
        ("scales of values", lambda out: fp8.append(of_one, out), of_one, of_fp8[1]),
        ("page bounds", lambda out: bounded.attention(k, out=out), k.copy(), bounded.page_bounds),
        ("sink", lambda out: bounded.attention(k, out=out, sink=buffer.ravel()[:HEADS]), k.copy(), buffer),
        ("bias", lambda out: bounded.attention(k, out=out, bias=buffer.ravel()[:1]), k.copy(), buffer),
    ]
    for name, call, right, wrong in calls:
        call(right)
        before = wrong.tobytes()
        try:
            call(wrong)
        except library.UnsupportedProblem as error:
            assert "must not overlap" in str(error) and name in str(error)
            assert wrong.tobytes() == before
        else:
            raise AssertionError(f"results are written to {name}")


def test_results_overlap_no_array_of_a_cache_or_a_call() -> None:
    check_overlaps(cuflash)


def test_a_change_that_is_interrupted_loses_no_rows() -> None:
    check_interrupted_changes(cuflash)


@pytest.mark.parametrize("num_kv_heads", [2**12, 2**31 - 1], ids=["more than there is", "more than can be addressed"])
@pytest.mark.parametrize("more", [{}, {"page_size": 1024, "num_pages": 2**31 - 1}], ids=["contiguous", "pages"])
def test_a_cache_without_room_is_an_error_before_its_tables_take_memory(
    more: dict[str, Any], num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating lists of 2^31 items would take all memory of the machine instead of raising an error."""
    for name in ("OwnPages", "PagePool"):
        monkeypatch.setattr(f"cuflash.cache.kv_cache.{name}", pytest.fail)
    sizes = {"batch": 2**31 - 1, "num_kv_heads": num_kv_heads, "head_dim": 256, "capacity": 1024}
    with pytest.raises(MemoryError):
        KVCache(**sizes, dtype=np.float64, **more)


WRONG = {
    "no batch": (lambda: KVCache(**SMALL | {"batch": 0}), "batch must be an int from 1 to 2**31 - 1; got 0"),
    "wide heads": (lambda: KVCache(**SMALL | {"head_dim": 257}), "head_dim must be an int from 1 to 256; got 257"),
    "integers": (lambda: KVCache(**SMALL | {"dtype": int}), "dtype must be one of float16, bfloat16, float32, float64"),
    "no pages": (lambda: KVCache(**SMALL, page_size=64), "num_pages must be passed with page_size"),
    "odd pages": (lambda: KVCache(**SMALL, page_size=40, num_pages=3), "page_size must be a multiple of 16"),
    "long pages": (lambda: KVCache(**SMALL, page_size=2048, num_pages=3), "at most 1024; got 2048"),
    "another module": (lambda: KVCache(**SMALL, xp=ml_dtypes), "xp must be the module numpy or cupy; got module"),
    "several": (lambda: KVCache(**SMALL | {"batch": -1, "capacity": 1.5}, page_size=3), "4 reasons"),
    "another batch": (lambda: a_cache().append(K[:2], K[:2]), "k must have shape (3, 2, n, 8) and dtype float32"),
    "another dtype": (lambda: a_cache().append(K, K.astype("f2")), "v must have shape (3, 2, n, 8) and dtype float32"),
    "other rows": (lambda: a_cache().append(K, K[:, :, :1]), "v must have k's 2 rows; got 1"),
    "a list of words": (lambda: a_cache().append([["a"]], K), "k must be an array; got [['a']]: a list may"),
    "its own rows": (lambda: (lambda x: x.append(x.k, x.v))(a_cache()), "k must not overlap the cache's keys"),
    "too many counts": (lambda: a_cache().append(K, K, counts=[1] * 4), "counts must be a list or array of 3 ints"),
    "counts beyond rows": (lambda: a_cache().append(K, K, counts=[1, 3, 0]), "number of rows, 2; got 3 for sequence 1"),
    "negative counts in an array": (lambda: a_cache().append(K, K, counts=np.array([1, -1, 0])), "got [1, -1, 0]"),
    "counts of floats": (
        lambda: a_cache().append(K, K, counts=np.ones(3)), "got an array of shape (3,) and dtype float64"
    ),
    "no room": (
        lambda: a_cache(CAPACITY - 1).append(K, K, counts=[0, 0, 2]),
        "k must fit the room of sequence 2; got 2 rows, which need 71 positions, and the cache has 70",
    ),
    "longer than they are": (lambda: a_cache().truncate([2, 3, 0]), "got 3 for sequence 1, which has 2"),
    "one length for all": (lambda: a_cache().truncate(1), "lengths must be a list or array of 3 ints"),
    "no such row": (lambda: a_cache().reset([3]), "rows must be a sequence's number, from 0 to 2; got 3"),
    "a row": (lambda: a_cache().reset(1), "rows must be a list of sequences, or None for all; got 1"),
    "to itself": (lambda: a_cache().fork(1, 1), "target must differ from source; got 1"),
    "of nothing": (lambda: a_cache(0).fork(1, 0), "source must hold rows; got sequence 1, which is empty"),
    "rows and counts": (lambda: a_cache().append(K, K[:, :1], counts=[1]), "2 reasons"),
    "counts as they came": (lambda: a_cache().append(K, K, counts=[1, 2, -3]), "got [1, 2, -3]"),
    "queries, counts and options": (
        lambda: a_cache().attention(K[:2], counts=[9], causal=2, scale="x", kernel="x", precision="x"), "6 reasons"
    ),
    "read-only pages": (lambda: over_read_only_pages().append(K[:2], K[:2]), "writeable pages to append to"),
    "pages, a table and lengths": (
        lambda: KVCache.over(normal(3, 2, 16, 8), normal(4, 2, 16, 8), TABLE * 1.0, [1]), "3 reasons"
    ),
    "no such source": (lambda: a_cache().fork(-1, 1), "source must be a sequence's number, from 0 to 2; got -1"),
    "beyond the capacity": (lambda: a_cache().reserve([71, 0, 0]), "lengths must fit the room of sequence 0"),
    "queries of two axes": (lambda: a_cache().attention(K[0, 0]), "q must have shape (3, num_heads, n, 8)"),
    "odd heads": (lambda: a_cache().attention(normal(3, 3, 1, 8)), "q's 3 heads must be a multiple of k's 2"),
    "more queries than positions": (
        lambda: a_cache().attention(normal(3, 2, 71, 8)), "not have more rows than the capacity, 70; got 71"
    ),
    "an alignment": (lambda: a_cache().attention(K, causal="top_left"), "causal must be True or False; got 'top_left'"),
    "half a window": (lambda: a_cache().attention(K, window=3), "window must be (left, right), each an int or None"),
    "a negative window": (lambda: a_cache().attention(K, window=(-1, 0)), "window's left must be an int of at least 0"),
    "another out": (lambda: a_cache().attention(K, out=K[:1]), "out must have shape (3, 2, 2, 8) and dtype float32"),
    "out over q": (lambda: (lambda x: a_cache().attention(x, out=x))(K.copy()), "out must not overlap q in memory"),
    "out in the cache": (
        lambda: (lambda x: x.attention(K, out=x.k[:, :, :2]))(a_cache()), "out must not overlap the cache's keys"
    ),
    "broadcast out": (
        lambda: a_cache().attention(K, out=np.broadcast_to(np.float32(0), K.shape)), "out must be writeable"
    ),
    "broadcast pages": (
        lambda: KVCache.over(np.broadcast_to(np.float32(0), (3, 2, 16, 8)), normal(3, 2, 16, 8), TABLE, [0, 0]),
        "k_pages must not overlap itself in memory, since rows are written to it; got strides (0, 0, 0, 0): pass a",
    ),
    "pages that share rows": (
        lambda: KVCache.over(windows_of(3, 2, 16, 8), normal(3, 2, 16, 8), TABLE, [0, 0]),
        "k_pages must not overlap itself in memory, since rows are written to it; got strides (64, 32, 4, 4)",
    ),
    "out that shares rows": (
        lambda: a_cache().attention(K, out=windows_of(*K.shape)), "out must not overlap itself in memory"
    ),
    "pages of three axes": (
        lambda: KVCache.over(K[0], K[0], TABLE, [0, 0]), "k_pages must have shape (num_pages, num_kv_heads, page_size"
    ),
    "other pages of values": (
        lambda: KVCache.over(normal(3, 2, 16, 8), normal(4, 2, 16, 8), TABLE, [0, 0]), "v_pages must have shape (3, 2, "
    ),
    "pages of integers": (lambda: KVCache.over(*np.zeros((2, 3, 2, 16, 8), int), TABLE, [0, 0]), "dtype must be one"),
    "one array twice": (
        lambda: KVCache.over(BOTH, BOTH, TABLE, [0, 0]), "v_pages must not overlap k_pages in memory: pass a copy"
    ),
    "values within keys": (
        lambda: KVCache.over(BOTH, BOTH[..., 4:], TABLE, [0, 0]), "v_pages must not overlap k_pages in memory"
    ),
    "a table of one axis": (lambda: KVCache.over(*normal(2, 3, 2, 16, 8), TABLE[0], [0]), "block_table must be an int"),
    "pages that are not there": (
        lambda: KVCache.over(*normal(2, 2, 2, 16, 8), TABLE, [0, 0]), "pages below 2; got 2 for sequence 1"
    ),
    "too few pages": (
        lambda: KVCache.over(*normal(2, 3, 2, 16, 8), TABLE, [32, 17]), "got 17 for sequence 1, which has 1 pages of 16"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_a_reason(name: str) -> None:
    call, words = WRONG[name]
    assert words in refused(call)


@pytest.mark.parametrize("parts", [{}, {"part_keys": 64}], ids=["whole", "in parts"])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 2, 0], [2, 0, 1]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"sink": np.zeros(3, np.float32)}, {"sink": np.zeros((2, 4), np.float32)}, {"sink": np.zeros(4, int)},
        {"sink": 0.5}, {"sink": np.zeros((3, 4, 1), np.float32)}, {"scale": "x"}, {"scale": np.nan},
        {"kernel": "other"}, {"executor": "other"}, {"precision": "other"}, {"executor": "gpu"},
    ],
    ids=str,
)  # fmt: skip
def test_options_are_refused_before_anything_is_written(options, lengths, parts) -> None:
    """Options are refused for all lengths, even if a sequence has no keys."""
    cache, q = KVCache(**SMALL | parts), normal(3, 2 * HEADS, 1, 8)
    cache.append(*normal(2, 3, HEADS, 2, 8), counts=lengths)
    out = np.full(q.shape, 7, np.float32)
    with pytest.raises((UnsupportedProblem, TypeError), match=next(iter(options))):
        cache.attention(q, out=out, counts=np.minimum(lengths, 1), **options)
    assert (out == 7).all()
