"""Calls on a cache on a GPU are bound once: later calls write the same rows and refuse the same arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy_machine
import numpy as np
import pytest
from cuflash import KVCache
from cuflash.cache import _doors, on_device, steps
from cuflash.cache.steps import Steps
from executors import needs_compiler
from refusals import refused

RNG = np.random.default_rng(0)
SIZES = {"batch": 3, "num_kv_heads": 2, "head_dim": 64, "capacity": 100, "dtype": np.float16}
PAGED = {"contiguous": {}, "pages": {"page_size": 16, "num_pages": 15}}
ROWS = RNG.standard_normal((12, 3, 4, 4, 64)).astype(np.float16)  # q, k and v rows of 12 steps


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Yield a test double of CuPy that counts arrays and logs stream operations."""
    with cupy_machine.installed(monkeypatch, tmp_path) as machine:
        yield machine


def a_cache(xp: Any, pages: str = "contiguous", counted: str = "host", **sizes: Any) -> KVCache:
    cache = KVCache(**SIZES | sizes, **PAGED[pages], xp=xp)
    prompt = xp.asarray(ROWS[0, :, :2])
    cache.append(prompt, prompt, counts=[4, 0, 3])
    cache.reserve([40, 40, 40])
    if counted == "device":
        cache.count_on_device()
    return cache


def rows_of(xp: Any, step: int, count: int = 1) -> tuple[Any, Any, Any]:
    """Return q, k and v of a step in newly allocated memory."""
    rows = ROWS[step, :, :, :count]
    q, k, v = (xp.asarray(np.ascontiguousarray(x)) for x in (rows, rows[:, :2], rows[:, 2:]))
    return q, k, v


def forgotten(cache: KVCache) -> None:
    assert cache._state.device is not None
    cache._state.steps = cache._state.device.steps = Steps(cache.k, cache.v)


def walked(xp: Any, cache: KVCache, before: Callable[[KVCache], None]) -> list[Any]:
    """Return the results of several kinds of steps, each run repeatedly, and the cache's rows and lengths."""
    outputs: list[Any] = []
    out = xp.asarray(np.zeros((3, 4, 1, 64), np.float16))
    counts = [1, 0, 2]
    if cache._state.is_counted_on_device:
        counts = xp.asarray(np.array(counts, np.int32))
    for step in range(4):
        before(cache)
        q, k, v = rows_of(xp, step)
        cache.append(k, v)
        before(cache)
        outputs += [cache.attention(q), *cache.attention(q, return_lse=True)]
        before(cache)
        outputs += cache.attention(q, window=(2, None), out=out, return_lse=True)
        outputs[-2] = out.copy()
        before(cache)
        q, k, v = rows_of(xp, step + 4, 2)
        cache.append(k, v, counts=counts)
        before(cache)
        outputs += cache.attention(q, counts=counts, scale=0.5, return_lse=True)
    outputs = [x.get() for x in (*outputs, cache.lengths)]
    if cache._state.is_counted_on_device:
        return outputs
    return [*outputs, *(x.get() for b in range(3) for x in cache.rows(b))]


@pytest.mark.parametrize("pages", PAGED)
@pytest.mark.parametrize("counted", ["host", "device"])
def test_a_bound_step_has_the_bits_of_an_unbound_one(xp: Any, pages: str, counted: str) -> None:
    bound, unbound = (
        walked(xp, a_cache(xp, pages, counted), before) for before in (lambda cache: None, forgotten)
    )
    assert len(bound) == len(unbound) and all(np.array_equal(*pair) for pair in zip(bound, unbound))
    assert all(np.isfinite(x).all() for x in bound[:3]) and not np.array_equal(bound[0], bound[7])


@needs_compiler
@pytest.mark.parametrize("counted", ["host", "device"])
def test_a_later_step_plans_nothing_and_allocates_its_result_alone(
    stand_in: Any, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    xp = stand_in
    cache = a_cache(xp, "pages", counted)
    q, k, v = rows_of(xp, 1)
    cache.append(k, v)
    cache.attention(q)
    for place, name in (
        (on_device, "append_pass"), (_doors, "pass_of"), (_doors, "as_arrays"), (_doors, "row_reasons"),
        (steps, "as_arrays"), (steps, "BoundPass"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, lambda *args, name=name, **options: pytest.fail(f"{name} again"))
    q, k, v = rows_of(xp, 2)
    before = xp.allocated
    xp.log.clear()
    cache.append(k, v)
    cache.attention(q)
    assert xp.allocated == before + 1 and xp.log == [("launch", 0, "append"), ("launch", 0, "decode")]
    cache.attention(q, return_lse=True)
    assert xp.allocated == before + 3


@needs_compiler
@pytest.mark.parametrize("counted", ["host", "device"])
def test_a_later_step_reads_its_own_score_function(
    stand_in: Any, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call uses its own arrays and numbers; arrays of a kind seen before are not checked again."""
    rng, cache = np.random.default_rng(0), a_cache(stand_in, "pages", counted)
    q, k, v = rows_of(stand_in, 1)
    cache.append(k, v)
    biases = [stand_in.asarray(rng.standard_normal((4, 1, 100), np.float32)) for _ in range(2)]
    kinds: list[dict[str, Any]] = [{"bias": bias} for bias in biases] + [{"softcap": cap} for cap in (0.5, 2.0, 0.5)]

    def attended(kind: dict[str, Any]) -> Any:
        return cache.attention(q, **kind).get()

    outputs = [attended(kinds[0])]
    with monkeypatch.context() as checks:
        checks.setattr(_doors, "fit_reasons", lambda *args: pytest.fail("checked again"))
        outputs.append(attended(kinds[1]))
    outputs += map(attended, kinds[2:])
    for kind, bound in zip(kinds, outputs):
        forgotten(cache)
        assert np.array_equal(attended(kind), bound)
    assert not np.array_equal(outputs[0], outputs[1]) and not np.array_equal(outputs[2], outputs[3])
    assert np.array_equal(outputs[2], outputs[4])


class Foreign:
    """A GPU array of another library."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


@needs_compiler
@pytest.mark.parametrize("counted", ["host", "device"])
def test_a_later_step_of_another_librarys_arrays_plans_nothing(
    stand_in: Any, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [rows_of(stand_in, step) for step in range(3)]
    alone, outputs = a_cache(stand_in, "pages", counted), []
    wanted = [(alone.append(k, v), alone.attention(q).get())[1] for q, k, v in steps]
    cache = a_cache(stand_in, "pages", counted)
    for step, rows in enumerate(steps):
        q, k, v = (Foreign(x.get()) for x in rows)
        cache.append(k, v)
        outputs.append(cache.attention(q).get())
        if step == 0:
            for place, name in ((on_device, "append_pass"), (_doors, "pass_of"), (_doors, "row_reasons")):
                monkeypatch.setattr(place, name, lambda *args, **options: pytest.fail("planned again"))
    assert all(np.array_equal(*pair) for pair in zip(outputs, wanted))


def test_wrong_calls_are_refused_after_right_ones_as_before_them(xp: Any) -> None:
    def wrong_calls(cache: KVCache) -> list[Callable[[], Any]]:
        q, k, v = rows_of(xp, 1)
        own = cache.k[:, :, :1]
        junk = xp.asarray(np.zeros((3, 4, 2, 64), np.float16))
        appended: list[tuple[Any, Any]] = [
            (k, k[:2]), (k[:, :, :0], v), (k.astype(np.float32), v), (own, v), (k, own), (k, None),
        ]  # fmt: skip
        options: list[dict[str, Any]] = [
            {"causal": 1}, {"return_lse": 1}, {"window": (True, None)}, {"window": (1,)},
            {"scale": "1"}, {"kernel": 3}, {"kernel": "none"}, {"executor": "cpu"}, {"precision": "tf64"},
            {"counts": [1, 1]}, {"counts": [2, 1, 1]}, {"out": q}, {"out": junk}, {"out": cache.k[:, :, :1]},
            {"sink": xp.asarray(np.ones(3, np.float32))}, {"out": q[:, :, :, ::-1]},
        ]  # fmt: skip
        return [
            *(lambda k=k, v=v: cache.append(k, v) for k, v in appended),
            *(lambda each=each: cache.attention(q, **each) for each in options),
            lambda: cache.attention(q[:2]), lambda: cache.attention(None), lambda: cache.attention(q[0]),
        ]  # fmt: skip

    fresh = a_cache(xp)
    fresh.append(*rows_of(xp, 0)[1:])
    messages = [refused(call) for call in wrong_calls(fresh)]
    used = a_cache(xp)
    strided = rows_of(xp, 2, 4)[1][:, :, :1]
    for turn in range(2):
        q, k, v = rows_of(xp, turn)
        far = xp.asarray(np.zeros((3, 2, 100, 64), np.float16))[:, :, :1]  # has the same layout as the cache's own rows
        for rows in ((k, v), (far, v), (v, far), (strided, v)):
            used.append(*rows)
        for out in (None, xp.asarray(np.zeros((3, 4, 1, 64), np.float16))):
            used.attention(q, out=out)
            used.attention(q, window=(1, None), scale=1.0, out=out, return_lse=True)
        used.truncate([5, 1, 4])
    assert [refused(call) for call in wrong_calls(used)] == messages
    assert used.lengths.get().tolist() == [5, 1, 4]


def test_queries_without_keys_are_refused_after_steps_too(xp: Any) -> None:
    """If the host counts rows, always.

    If the device does, only under CUFLASH_CHECK=1, since calls do not wait for lengths.
    """
    cache, (q, k, v) = a_cache(xp), rows_of(xp, 1)
    cache.append(k, v)
    cache.attention(q)
    cache.attention(q, counts=[1, 0, 1])
    cache.reset([1])
    for _ in range(2):
        assert "q has 1 row and sequence 1 has 0 tokens: append" in refused(lambda: cache.attention(q))
        assert "counts has 1 row for sequence 1" in refused(lambda: cache.attention(q, counts=[0, 1, 1]))
        assert cache.attention(q, counts=[1, 0, 1]).get()[[0, 2]].any()
    cache.count_on_device()
    assert not cache.attention(q).get()[1].any()


def test_checks_find_queries_without_keys_that_the_device_counts(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    cache, (q, _, _) = a_cache(xp, counted="device"), rows_of(xp, 1)
    assert "q has 1 row and sequence 1 has 0 tokens: append" in refused(lambda: cache.attention(q))
    of_device = xp.asarray(np.array([1, 1, 1], np.int32))
    assert "counts has 1 row for sequence 1" in refused(lambda: cache.attention(q, counts=of_device))
    assert cache.attention(q, counts=[1, 0, 1]).get()[[0, 2]].any()
    assert "counted on the device" in repr(cache)


def test_rows_that_start_at_an_odd_byte_are_refused_after_a_step(xp: Any) -> None:
    cache = a_cache(xp, counted="device")
    memory = xp.asarray(np.zeros(3 * 4 * 64 * 2 + 1, np.uint8))
    even, odd = (memory[i : memory.size - 1 + i].view(np.float16).reshape(3, 4, 1, 64) for i in range(2))
    cache.attention(even)
    assert "q must be supported by the cache's kernels" in refused(lambda: cache.attention(odd))


def test_a_copy_of_a_cache_binds_steps_of_its_own(xp: Any) -> None:
    cache = a_cache(xp)
    q, k, v = rows_of(xp, 1)
    cache.append(k, v)
    first = cache.attention(q).get()
    other = copy.deepcopy(cache)
    q2, k2, v2 = rows_of(xp, 2)
    other.append(k2, v2)
    assert not np.array_equal(other.attention(q).get(), first) and np.array_equal(cache.attention(q).get(), first)
    assert other.lengths.get().tolist() == [6, 2, 5] and cache.lengths.get().tolist() == [5, 1, 4]
    cache.append(k2, v2)
    assert np.array_equal(other.attention(q2).get(), cache.attention(q2).get())


def test_steps_go_to_the_stream_that_is_current(xp: Any) -> None:
    cache, alone = a_cache(xp), a_cache(xp)
    streams = [xp.cuda.get_current_stream(), xp.cuda.Stream(non_blocking=True)]
    for step, number in enumerate((0, 1, 0)):
        q, k, v = rows_of(xp, step)
        alone.append(k, v)
        wanted = alone.attention(q).get()
        streams[1 - number].synchronize()
        with streams[number]:
            cache.append(k, v)
            o = cache.attention(q)
        if isinstance(xp, cupy_machine.Cupy):
            launched = [entry for entry in xp.log if entry[0] == "launch"]
            assert launched[-2:] == [("launch", streams[number].ptr, entry) for entry in ("append", "decode")]
        streams[number].synchronize()
        assert np.array_equal(o.get(), wanted)


def test_larger_calls_leave_the_memory_of_a_captured_one(xp: Any) -> None:
    """A graph replays correctly after calls that need more memory, because it shares no memory with them."""
    cache, alone = a_cache(xp, counted="device"), a_cache(xp, counted="device")
    q, k, v = rows_of(xp, 1)
    cache.append(k, v)
    cache.attention(q)
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        o = cache.attention(q)
        graph = stream.end_capture()
        wide = rows_of(xp, 2, 4)[0]
        cache.attention(wide)
        assert cache._state.device is not None and len(cache._state.device.steps._memory) == 2
        graph.launch(stream)
        stream.synchronize()
    alone.append(k, v)
    assert np.array_equal(o.get(), alone.attention(q).get())
    assert np.array_equal(cache.attention(wide).get(), alone.attention(wide).get())


@needs_compiler
def test_checks_that_are_asked_for_between_steps_are_made(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, waits = a_cache(stand_in), []
    q, k, v = rows_of(stand_in, 1)
    for value in ("0", "1", "0", "1"):
        monkeypatch.setenv("CUFLASH_CHECK", value)
        stand_in.log.clear()
        cache.append(k, v)
        cache.attention(q)
        waits.append([kind for kind, *_ in stand_in.log].count("synchronize"))
    assert waits == [0, 2, 0, 2]


def test_rows_of_other_layouts_have_steps_of_their_own(xp: Any) -> None:
    """After a step of one token, steps of three tokens and of rows with another order of axes are right."""
    cache, alone = a_cache(xp), a_cache(xp)
    for step, count in enumerate((1, 3, 1, 3)):
        rows = rows_of(xp, step, count)
        others = [xp.asarray(np.ascontiguousarray(x.get().transpose(0, 2, 1, 3))) for x in rows]
        q, k, v = (x.transpose(0, 2, 1, 3) for x in others)
        cache.append(*(rows[1:] if step < 2 else (k, v)))
        forgotten(alone)
        alone.append(*rows[1:])
        forgotten(alone)
        wanted = alone.attention(rows[0]).get()
        assert all(np.array_equal(cache.attention(each).get(), wanted) for each in (rows[0], q))
