"""The cache of calls keeps the most recently used calls, and an owner's calls as long as the owner lives."""

from __future__ import annotations

import gc
import threading
import weakref
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st

import cuflash
from cuflash.executors import blas
from cuflash.planning import _call_cache
from cuflash.planning._call_cache import CallCache

SIZE = 3
KEYS = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), KEYS),
        st.tuples(st.just("put"), KEYS, st.sampled_from([None, 0, 1])),
        st.tuples(st.just("drop"), st.sampled_from([0, 1])),
        st.just(("clear",)),
    ),
    max_size=40,
)


class Owner:
    """An object that owns calls."""


def check_steps(steps, kind=CallCache):
    """Compare a cache with a dict in order of use, from which the calls of dead owners are removed."""
    cache, owners, model = kind(SIZE), {0: Owner(), 1: Owner()}, {}
    for number, (operation, *arguments) in enumerate(steps):
        if operation == "get":
            (key,) = arguments
            if key in model:
                model[key] = model.pop(key)
            assert cache.get(key) == (model[key][0] if key in model else None)
        elif operation == "put":
            key, owner = arguments
            cache.put(key, number, owner if owner is None else owners[owner])
            model.pop(key, None)
            model[key] = number, owner
            while len(model) > SIZE:
                del model[next(iter(model))]
        elif operation == "drop":
            (owner,) = arguments
            owners[owner] = Owner()
            model = {key: value for key, value in model.items() if value[1] != owner}
        else:
            cache.clear()
            model = {}
        assert len(cache) == len(model)
    for key, (number, _) in model.items():
        assert cache.get(key) == number


@given(STEPS)
def test_it_is_a_least_recently_used_cache_without_the_calls_of_dead_owners(steps):
    check_steps(steps)


def check_freed(kind=CallCache):
    """Check that calls that have left the cache are freed, even the most recently used one."""
    cache, owner, call = kind(1), Owner(), Owner()
    seen = weakref.ref(call)
    cache.put((id(owner), 1), call, owner)
    assert cache.get((id(owner), 1)) is call
    del owner, call
    assert seen() is None and len(cache) == 0
    first = Owner()
    seen = weakref.ref(first)
    cache.put("first", first)
    del first
    cache.put("second", Owner())
    assert seen() is None and len(cache) == 1


def test_calls_that_have_left_are_freed():
    check_freed()


class Collecting:
    """The entry of a call, which collects garbage when its last use is read."""

    keys, call = None, "call"

    @property
    def last_use(self) -> int:
        gc.collect()
        return 0


def test_an_owner_may_die_while_the_queue_is_renewed():
    """The garbage collector may free owners in cycles at any allocation, in the thread that puts a call, too."""
    cache, owner = CallCache(3), Owner()
    cache._calls["collecting"] = Collecting()
    owner.itself = owner
    cache.put("owned", "call", owner)
    del owner
    for _ in range(6):
        cache.put("again", "call")
    assert cache.get("owned") is None and cache.get("again") == "call"


@pytest.mark.parametrize("narrow", [np.float16(0.3), np.float32(0.3)])
@pytest.mark.parametrize("is_narrow_first", [False, True])
def test_scales_that_compare_equal_but_differ_have_calls_of_their_own(narrow, is_narrow_first):
    """NumPy compares a narrow number with a Python number in its own dtype."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 8))
    assert narrow == 0.3 and float(narrow) != 0.3
    scales = (narrow, 0.3) if is_narrow_first else (0.3, narrow)
    for scale, o in [(scale, cuflash.attention(q, k, v, scale=scale)) for scale in scales]:
        assert (o == cuflash.plan(q, k, v, scale=scale).forward(q, k, v)[0]).all()


def test_threads_may_use_it_at_the_same_time():
    cache, errors, start = CallCache(8), [], threading.Barrier(4)

    def use(first):
        start.wait()
        try:
            for number in range(2000):
                key = (first + number) % 12
                owner = Owner()
                assert cache.get(key) in (None, key)
                cache.put(key, key, owner if number % 3 else None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(cache) <= 8


def test_a_full_cache_looks_at_few_calls_to_let_one_go():
    """Inserting a call costs about as much as in an empty cache, however many of the other calls are in use."""
    cache = CallCache(1000)
    for key in range(1000):
        cache.put(key, key)
    popped = 0
    pop = _call_cache.heappop

    def counting(queue):
        nonlocal popped
        popped += 1
        return pop(queue)

    with patch.object(_call_cache, "heappop", counting):
        for key in range(1000, 5000):
            cache.put(key, key)
            assert cache.get(key % 7 + key - 7) is not None
    assert len(cache) == 1000 and popped < 3 * 4000 and len(cache._queue) <= 2000


class CountedLock:
    """A lock that counts how often it is taken."""

    def __init__(self) -> None:
        self.taken, self._lock = 0, threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.taken += 1

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_repeated_calls_take_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads whose calls are repeated, and need one thread each, never wait for each other in the library."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 40, 16)).astype(np.float32)
    blocks = cuflash.BlockIndex.from_blocks(np.tri(3, dtype=bool), 40, 40, 16)

    def calls() -> None:
        for mask in (None, cuflash.masks.Causal(), blocks):
            _, vjp = cuflash.attention_vjp(q, k, v, mask=mask)
            vjp(do)
            cuflash.attention_jvp(q, k, v, k, mask=mask)

    locks = {(_call_cache.CALLS, "_lock"): CountedLock(), (blas, "_lock"): CountedLock()}
    for (owner, name), lock in locks.items():
        monkeypatch.setattr(owner, name, lock)
    cuflash.attention(q[:, :3], k, v)
    assert locks[_call_cache.CALLS, "_lock"].taken > 0
    calls()
    before = [lock.taken for lock in locks.values()]
    calls()
    assert [lock.taken for lock in locks.values()] == before
