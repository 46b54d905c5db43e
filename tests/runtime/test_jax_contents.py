"""Masks whose contents only the host knows, in eager calls of JAX: new contents compile nothing, and leave nothing."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="JAX is not installed")


import cuflash.jax  # noqa: E402
from cuflash import BlockIndex  # noqa: E402
from cuflash.executors.xla_gpu import packed  # noqa: E402
from library_parts import part  # noqa: E402
import test_jax_gpu  # noqa: E402
from test_jax_gpu import DO, Q, K, V  # noqa: E402

jnp = jax.numpy
attention, place = cuflash.jax.attention, test_jax_gpu.place
LENGTH, BLOCK = 40, 8
COMPILED: list[str] = []  # an item for each function that XLA has compiled


def count(name, *durations, **facts):
    if name == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(name)


jax.monitoring.register_event_duration_secs_listener(count)


def grid(number, *leading):
    """Return the blocks of a mask, of which each row keeps at least one."""
    sides = (*leading, LENGTH // BLOCK, LENGTH // BLOCK)
    return (np.random.default_rng(number).random(sides) < 0.6) | np.eye(sides[-1], dtype=bool)


def elements(number):
    return (np.random.default_rng(number).random((LENGTH, LENGTH)) < 0.6) | np.eye(LENGTH, dtype=bool)


def index_of(of, mask, block=BLOCK):
    return of.BlockIndex.from_mask(mask, LENGTH, LENGTH, block)


# A new mask of a library by its number; `share` copies an array to the device.
ON_A_DEVICE = {
    "an index": lambda of, share, n: of.BlockIndex.from_blocks(grid(n), LENGTH, LENGTH, BLOCK),
    "partial blocks": lambda of, share, n: index_of(of, of.masks.BlockPattern(grid(n), BLOCK) & of.masks.Causal()),
    "lists per head": lambda of, share, n: of.BlockIndex.from_blocks(grid(n, 4), LENGTH, LENGTH, BLOCK),
    "lists per query": lambda of, share, n: index_of(of, of.masks.Dense(elements(n)), (1, 16)),
    "row intervals": lambda of, share, n: index_of(of, of.masks.Documents(np.arange(LENGTH) // (n + 3))),
    "a pattern": lambda of, share, n: of.masks.BlockPattern(grid(n), BLOCK),
    "a function": lambda of, share, n: lambda b, h, i, j: abs(i - j) < 2 + n,
    "an index on the device": lambda of, share, n: of.BlockIndex.from_blocks(share(grid(n)), LENGTH, LENGTH, BLOCK),
    "elements on the device": lambda of, share, n: of.masks.Dense(share(elements(n))) & of.masks.Causal(),
}  # fmt: skip
ON_THE_HOST = {name: make for name, make in ON_A_DEVICE.items() if "the device" not in name} | {
    "an array": lambda of, share, n: elements(n),
    "documents": lambda of, share, n: of.masks.Documents(np.arange(LENGTH) // (n + 3)),
    "lists and a rule": lambda of, share, n: of.masks.BlockPattern(grid(n), BLOCK) & of.masks.Causal(),
    "bigbird": lambda of, share, n: of.patterns.bigbird(LENGTH, block=BLOCK),
}  # fmt: skip


def check_new_contents(library, make, share, is_on_device, turns=3):
    """Check that new masks have the bits of other libraries' arrays, and that only the first of them compiles.

    Of masks on the device, the first is planned.
    """
    call = part(library, "jax._call").JaxCall
    with mock.patch.object(call, "planned", autospec=True, side_effect=call.planned) as planned:
        compare_turns(library, make, share, turns)
    assert planned.call_count <= 2 * (1 if is_on_device else turns)


def compare_turns(library, make, share, turns):
    arrays, of_jax = (*map(share, (Q, K, V)),), part(library, "jax").attention
    q, k, v, do = map(jnp.asarray, (Q, K, V, DO))
    for turn in range(turns):
        mask = make(library, share, turn)
        call = partial(of_jax, mask=mask, deterministic=True)
        COMPILED.clear()
        o = call(q, k, v)
        differentiated, pull = jax.vjp(call, q, k, v)
        gradients = pull(do)
        assert turn == 0 or not COMPILED
        expected, vjp = library.attention_vjp(*arrays, mask=mask, deterministic=True)
        for actual, wanted in zip((o, differentiated, *gradients), (expected, expected, *vjp(share(DO))), strict=True):
            wanted = wanted.get() if hasattr(wanted, "get") else wanted
            np.testing.assert_array_equal(np.asarray(actual), wanted)


@pytest.mark.parametrize("kind", ON_A_DEVICE)
def test_new_contents_on_a_gpu_compile_nothing(place, kind):
    check_new_contents(cuflash, ON_A_DEVICE[kind], place.share, "the device" in kind)


@pytest.fixture
def on_the_host():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("kind", ON_THE_HOST)
def test_new_contents_on_the_host_compile_nothing(kind):
    check_new_contents(cuflash, ON_THE_HOST[kind], lambda array: array, False)


def check_edits(library):
    """Check that calls and their gradients read a mask of NumPy as it is at the time of each call."""
    q, k, v, do = map(jnp.asarray, (Q, K, V, DO))
    mask = elements(0)
    for turn in range(3):
        o, pull = jax.vjp(partial(part(library, "jax").attention, mask=mask), q, k, v)
        expected, vjp = library.attention_vjp(Q, K, V, mask=mask.copy())
        np.testing.assert_array_equal(o, expected)
        np.testing.assert_array_equal(part(library, "jax").attention(q, k, v, mask=mask), expected)
        if turn == 2:  # gradients of a call are those of the mask that it read
            mask[...] = elements(7)
        for actual, wanted in zip(pull(do), vjp(DO), strict=True):
            np.testing.assert_array_equal(actual, wanted)
        mask[...] = elements(turn + 1)


@pytest.mark.usefixtures("on_the_host")
def test_edits_are_seen_by_calls_and_their_gradients():
    check_edits(cuflash)


@pytest.mark.usefixtures("on_the_host")
def test_calls_of_one_mask_differ_by_dtypes_lengths_and_dropout():
    index = BlockIndex.from_blocks(grid(0), LENGTH, LENGTH, BLOCK)
    for dtype in (np.float16, np.float32):
        for heads in (slice(None), slice(2)):
            arrays = Q[:, heads].astype(dtype), K[:, heads].astype(dtype), V[:, heads].astype(dtype)
            for options in ({}, {"softcap": 7.0}, *({"dropout": cuflash.Dropout(0.5, seed)} for seed in (3, 4))):
                o, lse = attention(*map(jnp.asarray, arrays), mask=index, return_lse=True, **options)
                expected = cuflash.attention(*arrays, mask=index, return_lse=True, **options)
                np.testing.assert_array_equal(o, expected[0])
                np.testing.assert_array_equal(lse, expected[1])
                np.testing.assert_array_equal(attention(*map(jnp.asarray, arrays), mask=index, **options), expected[0])


def check_places(library):
    """Check that results lie where those of a call without a mask lie, and are bound to the device as those are."""
    index, device = library.BlockIndex.from_blocks(grid(0), LENGTH, LENGTH, BLOCK), jax.devices("cpu")[-1]
    free = [jnp.asarray(array) for array in (Q, K, V)]
    for arrays in (free, jax.device_put(free, device)):
        o, plain = (part(library, "jax").attention(*arrays, mask=mask) for mask in (index, None))
        assert (o.devices(), o.committed) == (plain.devices(), plain.committed)


@pytest.mark.usefixtures("on_the_host")
def test_results_lie_where_the_arrays_lie():
    check_places(cuflash)


def check_without_jit(library):
    """Check that `jax.disable_jit`, which shows values to debuggers, changes no bit of results and derivatives."""
    q, k, v = (jnp.asarray(array, np.float32) for array in (Q, K, V))
    for mask in (None, library.masks.Causal(), elements(0), library.masks.Documents(jnp.arange(LENGTH) // 7)):

        def total(q, mask=mask):
            return part(library, "jax").attention(q, k, v, mask=mask).sum()

        def derivatives():
            tangents = jax.jvp(jax.grad(total), (q,), (q,))
            return total(q), jax.grad(total)(q), tangents, jax.vmap(total)(jnp.stack([q, q]))

        expected = derivatives()
        with jax.disable_jit():
            actual = derivatives()
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("on_the_host")
def test_derivatives_are_the_same_without_jit():
    check_without_jit(cuflash)


@pytest.mark.usefixtures("on_the_host")
def test_mapped_and_checked_calls_take_new_contents(monkeypatch):
    q, k, v = map(jnp.asarray, (Q, K, V))
    index = BlockIndex.from_blocks(grid(3), LENGTH, LENGTH, BLOCK)
    expected = cuflash.attention(Q, K, V, mask=index)
    mapped = jax.vmap(lambda q, k, v: attention(q, k, v, mask=index))(q, k, v)
    np.testing.assert_array_equal(mapped, expected)
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    np.testing.assert_array_equal(attention(q, k, v, mask=index), expected)


def check_integers(library):
    """Check that integers in a mask have no tangents."""
    q, k, v = map(jnp.asarray, (Q, K, V))
    lengths = jnp.asarray(np.array([3, 5]))
    o, pull = jax.vjp(lambda n: part(library, "jax").attention(q, k, v, mask=library.masks.Lengths(kv=n)), lengths)
    (nothing,) = pull(o)
    assert nothing.dtype == jax.dtypes.float0


@pytest.mark.usefixtures("on_the_host")
def test_integers_of_masks_have_no_tangents():
    check_integers(cuflash)


def check_that_nothing_is_left(library, turns):
    """Check that calls with many masks, and their gradients, leave no mask, call or compiled function."""
    q, k, v, do = map(jnp.asarray, (Q, K, V, DO))
    calls, left, sizes = part(library, "planning._call_cache").CALLS, [], []
    for turn in range(turns):
        mask = library.masks.BlockPattern(grid(turn), BLOCK)
        left.append(weakref.ref(mask))
        _, pull = jax.vjp(partial(part(library, "jax").attention, mask=mask), q, k, v)
        pull(do)
        del mask, pull
        if turn == 1:
            COMPILED.clear()
        if turn in (1, turns - 1):
            gc.collect()
            sizes.append(len(calls))
    assert not COMPILED and sizes[0] == sizes[1]
    assert not any(mask() for mask in left)


@pytest.mark.usefixtures("on_the_host")
def test_masks_leave_nothing_on_the_host():
    check_that_nothing_is_left(cuflash, 200)


def test_masks_leave_nothing_on_a_gpu(place):
    check_that_nothing_is_left(cuflash, 200 if place.launched is None else 12)


@given(st.lists(st.tuples(st.sampled_from((np.uint8, np.int32)), st.integers(0, 3000)), max_size=5), st.integers(0, 9))
@settings(max_examples=30)
def test_packed_lists_are_apart_and_alike(kinds, more):
    lists = {str(n): (np.arange(size) % 251).astype(dtype) for n, (dtype, size) in enumerate(kinds)}
    starts, memory = packed(lists)
    ends = [start + lists[name].nbytes for name, start in starts.items()]
    assert list(starts) == list(lists) and all(start % 256 == 0 for start in starts.values())
    assert all(end <= start for end, start in zip(ends, [*starts.values(), len(memory)][1:]))
    for name, start in starts.items():
        part_of = memory[start : start + lists[name].nbytes].view(lists[name].dtype)
        np.testing.assert_array_equal(part_of, lists[name])
    # lists that are at most twice as long have one of two layouts
    longer = {name: np.resize(array, len(array) + len(array) * more // 9) for name, array in lists.items()}
    assert len(memory) <= len(packed(longer)[1]) <= 2 * len(memory)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_drawn_indexes_have_the_bits_of_numpy(data):
    block = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    lengths = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    leading = data.draw(st.sampled_from([(), (4,), (2, 1), (2, 4)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    sides = [-(-length // side) for length, side in zip(lengths, block)]
    index = BlockIndex.from_blocks(rng.random((*leading, *sides)) < 0.5, *lengths, block)
    q, do = (array[:, :, : lengths[0]] for array in (Q, DO))
    k, v = (array[:, :, : lengths[1]] for array in (K, V))
    with jax.default_device(jax.devices("cpu")[0]):
        o, pull = jax.vjp(partial(attention, mask=index), *map(jnp.asarray, (q, k, v)))
        gradients = pull(jnp.asarray(do))
    expected, vjp = cuflash.attention_vjp(q, k, v, mask=index)
    for actual, wanted in zip((o, *gradients), (expected, *vjp(do)), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), wanted)
