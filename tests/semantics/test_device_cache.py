"""A cache on a GPU: kernels append and decode by device lengths, also in CUDA graphs, and count rows without room."""

from __future__ import annotations

from typing import Any

import cupy_machine
import ml_dtypes
import numpy as np
import pytest
import cuflash
from cache_calls import HEADS, PAGE, PAGES, ROOM, appended, expected
from cache_machine import KINDS, walk
from cuflash import KVCache, UnsupportedProblem
from cuflash.executors.sim import Simulator
from cuflash.planning.appending import append_pass
from cuflash.planning.decoding import CacheLayout
from executors import SIM, Run, blocks_together, hostile_schedules, on_sim_and_gpu

RNG = np.random.default_rng(0)


@on_sim_and_gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("dims", [(8, 16), (8, 3)], ids=str)
def test_rows_go_behind_those_that_are_there(run: Run, dtype: Any, dims: tuple[int, int]) -> None:
    """Pages are in any order. Rows past the capacity, or on pages that do not exist, are dropped and counted."""
    for counts in (None, (5, 2, 0, 4)):
        rows, k, v, lengths, faults = appended(run, dtype, dims, counts)
        pages, wanted = expected(rows, counts or [5] * 4)
        assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1]) and lengths.tolist() == wanted
        assert bool(faults[0]) == (counts is None)
    assert appended(run, dtype, dims, (6, 0, 0, 0))[4][0] and appended(run, dtype, dims, (-1, 0, 0, 0))[4][0]


@on_sim_and_gpu
def test_blocks_that_share_a_sequence_agree_on_its_length(run: Run) -> None:
    rows, k, v, lengths, _ = appended(run, np.float32, (256, 256), (26, 10, 1, 4), num_rows=26)
    pages, wanted = expected(rows, (26, 10, 1, 4))
    assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1]) and lengths.tolist() == wanted
    kernels = append_pass(rows[0].shape, 256, np.dtype(np.float32), CacheLayout(ROOM, PAGE, PAGES, 3))
    assert kernels.launches["append"].tiles > 4


def test_every_schedule_appends_alike() -> None:
    for schedule in hostile_schedules("append"):
        rows, k, v, lengths, _ = appended(SIM, np.float16, (8, 8), None, target=Simulator(schedule))
        pages, wanted = expected(rows, [5] * 4)
        assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1]) and lengths.tolist() == wanted


def test_blocks_that_run_together_append_alike() -> None:
    """The last of a sequence's blocks to read its length writes the new length, without a race between the blocks."""
    for target in blocks_together("append"):
        rows, k, v, lengths, _ = appended(
            SIM, np.float32, (256, 256), (26, 10, 1, 4), num_rows=26, target=target
        )
        pages, wanted = expected(rows, (26, 10, 1, 4))
        assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1]) and lengths.tolist() == wanted


# Caches of CuPy


@pytest.mark.parametrize("kind", KINDS)
def test_operations_at_random_hold_what_arrays_hold(xp: Any, kind: str) -> None:
    """The host counts rows, and sends changed lengths and pages to the device before a kernel needs them."""
    walk(cuflash, kind, seed=5, steps=40, xp=xp, most_rows=45)


SIZES = {"batch": 3, "num_kv_heads": HEADS, "head_dim": 64, "capacity": 100, "dtype": np.float16}
PAGED = {"contiguous": {}, "pages": {"page_size": 16, "num_pages": 15}}
OF_8_BITS = {"dtype": ml_dtypes.float8_e4m3fn}
REPLAYS = 1000


def a_step() -> tuple[Any, ...]:
    """Return q, k and v of one token per sequence."""
    return tuple(RNG.standard_normal((3, heads, 1, 64)).astype(np.float16) for heads in (4, 2, 2))


def captured(xp: Any, cache: KVCache, q: Any, k: Any, v: Any, **counts: Any) -> tuple[Any, Any, Any]:
    """Return a stream, a graph with an append and attention on that stream, and the arrays that each replay writes."""
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        cache.append(k, v, **counts)
        results = cache.attention(q, return_lse=True, **counts)
        return stream, stream.end_capture(), results


def same(actual: Any, wanted: Any) -> bool:
    """Return whether all bits are equal."""
    return all(np.array_equal(x.get(), y) for x, y in zip(actual, wanted))


@pytest.mark.parametrize("kept_rows", [{}, OF_8_BITS], ids=["plain", "8 bits"])
@pytest.mark.parametrize("pages", PAGED)
def test_many_replays_have_the_bits_of_calls_that_the_host_counts(
    xp: Any, pages: str, kept_rows: dict[str, Any]
) -> None:
    """Append and attention are captured once. Each replay (1,000 on a GPU) has the bits of a separate call."""
    is_stand_in = xp.__class__ is cupy_machine.Cupy
    replays, sizes = 8 if is_stand_in else REPLAYS, SIZES | PAGED[pages] | kept_rows
    sizes["capacity"] = replays + 40
    if pages == "pages":
        sizes["num_pages"] = 3 * -(-sizes["capacity"] // 16)
    of_graph, of_calls = KVCache(**sizes, xp=xp), KVCache(**sizes, xp=xp)
    prompt = RNG.standard_normal((2, 3, HEADS, 33, 64)).astype(np.float16)
    for cache in (of_graph, of_calls):
        cache.append(*map(xp.asarray, prompt), counts=[20, 0, 33])
    of_graph.reserve([sizes["capacity"]] * 3)
    of_graph.count_on_device()
    rows = [xp.asarray(x) for x in a_step()]
    of_graph.append(*rows[1:])
    of_graph.attention(rows[0])
    of_calls.append(*rows[1:])
    stream, graph, results = captured(xp, of_graph, *rows)
    with stream:
        for _ in range(replays):
            for array, new in zip(rows, a_step()):
                array[...] = xp.asarray(new)
            graph.launch(stream)
            of_calls.append(*rows[1:])
            wanted = of_calls.attention(rows[0], return_lse=True)
            stream.synchronize()
            assert all(np.array_equal(one.get(), other.get()) for one, other in zip(results, wanted))
    assert of_graph.lengths.get().tolist() == of_calls.lengths.get().tolist() == [n + 1 + replays for n in (20, 0, 33)]
    of_graph.check(), of_calls.check()


@pytest.mark.parametrize("rows", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_rows_of_8_bits_are_those_of_the_host(xp: Any, rows: Any) -> None:
    """Rows that are appended, forked, overwritten and read have the same bytes and scales as on the host."""
    caches = [KVCache(**SIZES | OF_8_BITS | PAGED["pages"], **place) for place in ({}, {"xp": xp})]
    for cache, put in zip(caches, (np.asarray, xp.asarray)):
        k, v = (put(x) for x in np.random.default_rng(0).standard_normal((2, 3, HEADS, 21, 64)).astype(rows))
        cache.append(k, v, counts=[20, 3, 0])
        cache.fork(0, 2)
        cache.append(k[:, :, :2], v[:, :, :2])
    host, device = caches
    assert host.block_table.tolist() == device.block_table.get().tolist()
    for b in range(3):
        for page, start in zip(host.block_table[b], range(0, int(host.lengths[b]), 16)):
            rows_there = slice(0, int(host.lengths[b]) - start)
            for name in ("k", "v", "k_scale", "v_scale"):
                one, other = getattr(host, name)[page, :, rows_there], getattr(device, name)[page].get()[:, rows_there]
                assert np.array_equal(one.view(np.uint8), other.view(np.uint8))


CHUNK = 35  # more rows than the decode kernel supports, with two query heads per key/value head


def test_a_graph_attends_chunk_by_chunk(xp: Any) -> None:
    """A graph with counts on the device is replayed for the next chunk, which has another length in each sequence."""
    counts = np.array([[CHUNK, 3, 0], [20, CHUNK, 1]], np.int32)
    chunks = [tuple(RNG.standard_normal((3, h, CHUNK, 64)).astype(np.float16) for h in (4, 2, 2)) for _ in counts]
    wanted, host = [], KVCache(**SIZES, **PAGED["pages"], xp=xp)
    for chunk, news in zip(chunks, counts):
        q, k, v = map(xp.asarray, chunk)
        host.append(k, v, counts=news)
        wanted.append([x.get() for x in host.attention(q, counts=news, return_lse=True)])
    cache = KVCache(**SIZES, **PAGED["pages"], xp=xp)
    cache.reserve([80, 80, 10])
    cache.count_on_device()
    q, k, v = (xp.asarray(x) for x in chunks[0])
    news = xp.asarray(counts[0])
    cache.append(k, v, counts=news)
    assert same(cache.attention(q, counts=news, return_lse=True), wanted[0])
    stream, graph, results = captured(xp, cache, q, k, v, counts=news)
    with stream:
        for array, rows in zip((q, k, v, news), (*chunks[1], counts[1])):
            array[...] = xp.asarray(rows)
        graph.launch(stream)
        stream.synchronize()
        assert same(results, wanted[1])
    assert cache.lengths.get().tolist() == counts.sum(0).tolist()
    cache.check()


@pytest.mark.parametrize("pages", PAGED)
def test_a_graph_takes_guessed_tokens_back(xp: Any, pages: str) -> None:
    """Three tokens are appended and attended to, and the device decides how many remain. Pages are not released."""
    guesses = [tuple(normal(3, heads, 3, 64) for heads in (4, HEADS, HEADS)) for _ in range(4)]
    kept_lengths = np.array([[1, 3, 0], [4, 3, 2], [5, 6, 5], [8, 7, 5]], np.int32)
    wanted, host = [], KVCache(**SIZES, **PAGED[pages], xp=xp)
    for rows, lengths in zip(guesses, kept_lengths):
        q, k, v = map(xp.asarray, rows)
        host.append(k, v)
        wanted.append([x.get() for x in host.attention(q, return_lse=True)])
        host.truncate(lengths)
    cache = KVCache(**SIZES, **PAGED[pages], xp=xp)
    cache.reserve([40, 40, 40])
    free = cache.num_free_pages
    q, k, v, lengths = (xp.asarray(x) for x in (*guesses[0], kept_lengths[0]))
    cache.append(k, v)
    assert same(cache.attention(q, return_lse=True), wanted[0]) and not cache._state.is_counted_on_device
    cache.truncate(lengths)
    assert cache._state.is_counted_on_device and cache.lengths.get().tolist() == kept_lengths[0].tolist()
    cache.truncate([40, 3, 40])  # no sequence is longer
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        cache.append(k, v)
        results = cache.attention(q, return_lse=True)
        cache.truncate(lengths)
        graph = stream.end_capture()
        for rows, remaining, expected_now in zip(guesses[1:], kept_lengths[1:], wanted[1:]):
            for array, new in zip((q, k, v, lengths), (*rows, remaining)):
                array[...] = xp.asarray(new)
            graph.launch(stream)
            stream.synchronize()
            assert same(results, expected_now) and cache.lengths.get().tolist() == remaining.tolist()
    assert cache.num_free_pages == free
    cache.check()


@pytest.mark.parametrize("rows_of_each", [4, CHUNK])
@pytest.mark.parametrize("pages", PAGED)
def test_counts_on_the_device_are_counts_on_the_host(xp: Any, pages: str, rows_of_each: int) -> None:
    rows = RNG.standard_normal((2, 3, HEADS, rows_of_each, 64)).astype(np.float16)
    q = RNG.standard_normal((3, 4, rows_of_each, 64)).astype(np.float16)
    outputs = []
    for counts in ([4, 0, 2], xp.asarray(np.array([4, 0, 2], np.int32))):
        cache = KVCache(**SIZES, **PAGED[pages], xp=xp)
        cache.reserve([10, 10, 10])
        for _ in range(2):
            cache.append(*map(xp.asarray, rows), counts=counts)
        outputs.append([x.get() for x in cache.attention(xp.asarray(q), counts=counts, return_lse=True)])
        assert cache.lengths.get().tolist() == [8, 0, 4]
        cache.check()
    assert all(np.array_equal(*pair) for pair in zip(*outputs))


@pytest.mark.parametrize("pages", PAGED)
def test_rows_without_room_are_left_out_and_told(xp: Any, pages: str) -> None:
    cache = KVCache(**SIZES | {"capacity": 32}, **PAGED[pages], xp=xp)
    cache.reserve([32, 16, 32])
    cache.count_on_device()
    k = xp.asarray(RNG.standard_normal((3, HEADS, 20, 64)).astype(np.float16))
    cache.append(k, k)
    if pages == "pages":
        with pytest.raises(RuntimeError, match="4 times a row did not fit"):
            cache.check()
    before = cache.k.get()
    cache.append(k, k, counts=[12, 0, 0])
    cache.append(k, k, counts=[5, 0, 0])
    cache.append(k, k)
    assert cache.lengths.get().tolist() == [32, 32, 32]
    places = (before.view(np.uint16) != cache.k.get().view(np.uint16)).any(axis=(1, 3)).nonzero()
    assert all(row >= 4 for _, row in zip(*places)) if pages == "pages" else all(row >= 20 for _, row in zip(*places))
    with pytest.raises(RuntimeError, match="did not fit"):
        cache.check()


def test_checks_of_every_call_tell_of_rows_that_were_left_out(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    cache = KVCache(**SIZES | {"capacity": 32}, xp=xp)
    cache.count_on_device()
    k = xp.asarray(RNG.standard_normal((3, HEADS, 20, 64)).astype(np.float16))
    cache.append(k, k)
    with pytest.raises(RuntimeError, match="times a row did not fit"):
        cache.append(k, k)


def test_forked_pages_are_copied_before_the_device_writes_to_them(xp: Any) -> None:
    cache = KVCache(**SIZES, **PAGED["pages"], xp=xp)
    k = xp.asarray(RNG.standard_normal((3, HEADS, 20, 64)).astype(np.float16))
    cache.append(k, k, counts=[20, 0, 0])
    cache.fork(0, 1)
    cache.count_on_device()
    assert cache.block_table.get()[:2].tolist() == [[0, 2, *[-1] * 5], [0, 1, *[-1] * 5]]
    cache.append(k, k, counts=[0, 1, 0])
    pages = cache.k.get()
    assert np.array_equal(pages[2, :, :4], pages[1, :, :4]) and not np.array_equal(pages[2, :, 4], pages[1, :, 4])


def check_captures(library: Any, xp: Any) -> None:
    """Check that a stream capture changes nothing of a cache whose rows the host counts, and refuses its calls.

    The capture would delay the copy of a shared page, and no replay would change the lengths on the host.
    """
    row, news = xp.asarray(normal(3, HEADS, 1, 64)), xp.asarray(np.ones(3, np.int32))
    calls: dict[str, Any] = {
        "append": lambda cache: cache.append(row, row), "counts": lambda cache: cache.append(row, row, counts=news),
        "attention": lambda cache: cache.attention(row),
        "by sequence": lambda cache: cache.attention(row, kernel="simt"),
        "count": lambda cache: cache.count_on_device(), "fork": lambda cache: cache.fork(1, 2),
        "reserve": lambda cache: cache.reserve([40, 40, 40]),
    }  # fmt: skip
    for pages, is_forked in (("pages", True), ("pages", False), ("contiguous", False)):
        for name, call in calls.items():
            if not is_forked and name in ("count", "counts") or pages == "contiguous" and name == "reserve":
                continue  # such calls only look at lengths that are on the device, and so may be captured
            cache = library.KVCache(**SIZES, **PAGED[pages], xp=xp)
            k = xp.asarray(normal(3, HEADS, 20, 64))
            cache.append(k, k, counts=[20, 17, 3])
            if is_forked:
                cache.fork(0, 1)
            cache.attention(row), cache.attention(row, kernel="simt")
            before = [cache.rows(b)[0].get().copy() for b in range(3)]
            lengths, table, stream = cache.lengths.get(), cache.block_table.get(), xp.cuda.Stream(non_blocking=True)
            xp.cuda.get_current_stream().synchronize()
            with stream:
                stream.begin_capture()
                try:
                    call(cache)
                except (library.UnsupportedProblem, RuntimeError) as error:
                    assert "stream capture" in str(error), error
                else:
                    raise AssertionError(f"{name} is captured while the host counts rows")
                finally:
                    stream.end_capture()
            assert np.array_equal(cache.lengths.get(), lengths) and np.array_equal(cache.block_table.get(), table)
            assert all(np.array_equal(cache.rows(b)[0].get(), rows) for b, rows in enumerate(before))


def test_a_capture_changes_nothing_of_a_cache_that_the_host_counts(xp: Any) -> None:
    check_captures(cuflash, xp)


def check_interrupted_launch(library: Any, machine: Any) -> None:
    """Check that rows are not attended whose append was interrupted after its kernel had counted them."""
    cache = library.KVCache(**SIZES, xp=machine)
    k, row = machine.asarray(normal(3, HEADS, 5, 64)), machine.asarray(normal(3, HEADS, 1, 64))
    cache.append(k, k)
    wanted, launch = cache.attention(row).get(), machine.cuda.driver.launchKernel

    def interrupted(*arguments: Any) -> None:
        launch(*arguments)
        raise KeyboardInterrupt

    machine.cuda.driver.launchKernel = interrupted
    with pytest.raises(KeyboardInterrupt):
        cache.append(row, row)
    machine.cuda.driver.launchKernel = launch
    assert cache.lengths.get().tolist() == [5, 5, 5] and np.array_equal(cache.attention(row).get(), wanted)


def test_an_append_that_is_interrupted_appends_nothing(cupy: Any) -> None:
    check_interrupted_launch(cuflash, cupy)


def test_a_device_does_not_write_to_shared_pages(xp: Any) -> None:
    """On the host, a fork gets a page of its own before rows are written to it; the device takes no new pages."""
    k = xp.asarray(normal(3, HEADS, 40, 64))
    cache = KVCache(**SIZES, **PAGED["pages"], xp=xp)
    cache.append(k, k, counts=[40, 0, 0])
    cache.fork(0, 1)
    cache.truncate([20, 40, 0])
    cache.count_on_device()
    shared = "must not end on pages that sequences share if the device counts rows; got 5 for sequence 1, which shares"
    assert f"{shared} its first 16 positions" in refused(lambda: cache.truncate([16, 5, 0]))
    assert cache.lengths.get().tolist() == [20, 40, 0]
    cache.truncate([16, 40, 0])
    cache.append(k, k, counts=[3, 0, 0])
    assert np.array_equal(cache.rows(1)[0].get(), k.get()[0])
    assert np.array_equal(cache.rows(0)[0].get()[:, 16:], k.get()[0, :, :3])


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("pages", PAGED)
def test_rows_are_those_that_the_device_has_counted(xp: Any, pages: str) -> None:
    cache = KVCache(**SIZES | {"capacity": 32}, **PAGED[pages], xp=xp)
    cache.reserve([16, 16, 32])
    cache.count_on_device()
    k, v = normal(2, 3, HEADS, 15, 64)
    cache.append(xp.asarray(k), xp.asarray(v), counts=xp.asarray(np.array([15, 0, 4], np.int32)))
    for sequence, length in enumerate([15, 0, 4]):
        for rows, original in zip(cache.rows(sequence), (k, v)):
            assert np.array_equal(rows.get(), original[sequence, :, :length])
    cache.check()
    cache.append(xp.asarray(k[:, :, :3]), xp.asarray(v[:, :, :3]))
    if pages == "pages":
        for call in (lambda: cache.rows(0), cache.check):
            with pytest.raises(RuntimeError, match="sequence 0 has 18 positions and 1 pages of 16"):
                call()
    assert np.array_equal(cache.rows(2)[1].get(), np.concatenate([v[2, :, :4], v[2, :, :3]], axis=1))


@pytest.mark.parametrize("pages", PAGED)
def test_a_graph_goes_on_after_a_reset_with_the_pages_that_sequences_have_by_then(xp: Any, pages: str) -> None:
    """Later replays neither read nor write pages that a reset frees, until `reserve` assigns them again."""
    few = {"page_size": 16, "num_pages": 4} if pages == "pages" else {}
    cache = KVCache(**SIZES | {"capacity": 48}, **few, xp=xp)
    cache.append(*map(xp.asarray, normal(2, 3, HEADS, 15, 64)))
    cache.count_on_device()
    q, k, v = (xp.asarray(normal(3, heads, 1, 64)) for heads in (4, HEADS, HEADS))
    cache.append(k, v)
    cache.attention(q)
    stream, graph, results = captured(xp, cache, q, k, v)
    with stream:
        if pages == "pages":
            stream.begin_capture()
            for change in (lambda: cache.reset([0]), lambda: cache.reserve([48, 0, 0])):
                assert "must come before or after a stream capture" in refused(change)
            stream.end_capture()
        assert cache.lengths.get().tolist() == [16, 16, 16]
        cache.reset([0, 2])
        before = cache.k.get()
        if pages == "pages":
            assert cache.num_free_pages == 3
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(cache.k.get().view(np.uint16), before.view(np.uint16))
            with pytest.raises(RuntimeError, match="sequence 0 has 1 positions and 0 pages of 16"):
                cache.check()
            cache.reset([0, 2])
        cache.reserve([16, 32, 16])
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        assert cache.lengths.get().tolist() == ([2, 19, 2] if pages == "pages" else [2, 18, 2])
        rows = [cache.rows(sequence) for sequence in (0, 2)]
    assert all(np.array_equal(x.get(), y.get()[b].repeat(2, axis=1)) for b, two in zip((0, 2), rows)
               for x, y in zip(two, (k, v)))  # fmt: skip
    alone = KVCache(**SIZES | {"capacity": 48, "batch": 1}, **PAGED[pages], xp=xp)
    alone.append(rows[0][0][None], rows[0][1][None])
    assert same([result[:1] for result in results], [x.get() for x in alone.attention(q[:1], return_lse=True)])


def refused(call: Any) -> str:
    with pytest.raises((UnsupportedProblem, RuntimeError)) as caught:
        call()
    return str(caught.value)


def test_what_cannot_be_counted_on_a_device_is_refused(xp: Any) -> None:
    ones = xp.asarray(np.ones((3, HEADS, 1, 64), np.float16))
    cache = KVCache(**SIZES, xp=xp)
    for counts in (np.ones(3), np.ones(3, np.int64), np.ones(2, np.int32), np.ones((3, 1), np.int32)):
        message = refused(lambda: cache.append(ones, ones, counts=xp.asarray(counts)))
        assert "counts on a device must be a contiguous" in message and "array of 3 int32" in message
    stream = xp.cuda.Stream(non_blocking=True)
    cache.append(ones, ones, counts=[1, 0, 0])
    cache.truncate([0, 0, 0])
    with stream:
        stream.begin_capture()
        assert "call count_on_device()" in refused(lambda: cache.append(ones, ones))
        stream.end_capture()
    cache.count_on_device()
    q = xp.asarray(np.ones((3, 2, 3, 64), ml_dtypes.bfloat16))
    other = KVCache(**SIZES | {"dtype": ml_dtypes.bfloat16}, xp=xp)
    other.append(*[xp.asarray(np.ones((3, HEADS, 3, 64), ml_dtypes.bfloat16))] * 2)
    with stream:
        stream.begin_capture()
        assert "make the same call on the cache once before the capture" in refused(lambda: other.attention(q))
        stream.end_capture()
    for lengths in (np.ones(3), np.ones(3, np.int64), np.ones(2, np.int32)):
        message = refused(lambda: cache.truncate(xp.asarray(lengths)))
        assert "lengths on a device must be a contiguous" in message and "array of 3 int32" in message
    assert "lengths must be a list or array of 3 ints" in refused(lambda: cache.truncate([0, -1, 0]))
    with stream:
        stream.begin_capture()
        assert "lengths must be on the device inside a stream capture" in refused(lambda: cache.truncate([0, 0, 0]))
        stream.end_capture()
    assert "fork must have lengths on the host" in refused(lambda: cache.fork(0, 1))
    many = xp.asarray(np.ones((3, 66, 1, 64), np.float16))
    wide = xp.asarray(np.ones((3, 2, 65, 64), np.float16))
    for q, options in ((wide, {"kernel": "naive"}), (many[:, :4], {"kernel": "simt"})):
        assert "q must be supported by the cache's kernels" in refused(lambda: cache.attention(q, **options))
    assert "the cache must be on a GPU" in refused(lambda: KVCache(**SIZES).count_on_device())


def check_calls_by_sequence(library: Any, xp: Any) -> None:
    """Check that calls that no kernel of the cache supports are refused once the device counts, and before it starts.

    These calls read the lengths that the host has counted. An equal call before may have bound their steps.
    """
    cache = library.KVCache(**SIZES | {"dtype": np.float32}, xp=xp)
    rows, q = (xp.asarray(np.ones((3, heads, 1, 64), np.float32)) for heads in (HEADS, 4))
    counts = xp.asarray(np.ones(3, np.int32))

    def is_refused(**options: Any) -> bool:
        try:
            cache.attention(q, **options)
        except Exception as error:
            of_cache = "q must be supported by the cache's kernels if the cache is counted on the device"
            return isinstance(error, library.UnsupportedProblem) and of_cache in str(error)
        return False

    cache.append(rows, rows)
    assert is_refused(counts=counts)
    before = cache.attention(q).get()
    assert is_refused(counts=counts) and np.array_equal(cache.attention(q).get(), before)
    cache.count_on_device()
    cache.append(rows, rows)
    assert is_refused() and is_refused(counts=[1, 1, 1])


def test_calls_by_sequence_are_refused_if_the_device_counts(xp: Any) -> None:
    check_calls_by_sequence(cuflash, xp)


def test_rows_of_another_place_are_refused(xp: Any) -> None:
    ones = np.ones((3, HEADS, 1, 64), np.float16)
    places = {"cupy": (xp, xp.asarray(ones), ones, "cupy.asarray"), "numpy": (np, ones, xp.asarray(ones), ".get()")}
    for home, (module, own, other, copying) in places.items():
        cache = KVCache(**SIZES, xp=module)
        for name, call in (
            ("k", lambda: cache.append(other, own)), ("v", lambda: cache.append(own, other)),
            ("q", lambda: cache.attention(other)), ("bias", lambda: cache.attention(own, bias=other[0, 0, 0, :1])),
        ):  # fmt: skip
            message = refused(call)
            assert f"{name} must be a {home} array, as the cache's are; got " in message
            assert f": copy it with {copying}" in message
