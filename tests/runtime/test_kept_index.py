"""A block index in several calls is read once: the calls share its work list and copies, which are freed with it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from cached_calls import cached
import pytest
from cuflash.calls._call import Call
from cuflash import BlockIndex, masks
from cuflash.blocks import index as indices
from cuflash.executors import gpu
from cuflash.testing import Example, assert_within_bounds
from executors import needs_compiler, on_every_executor
from library_parts import part

import cuflash

RNG = np.random.default_rng(0)
Q, K, V, DO = RNG.standard_normal((4, 2, 40, 16), dtype=np.float32)
LISTED = masks.Dilated(3)
EXAMPLE = Example(q=Q, k=K, v=V, do=DO, mask=LISTED)


def an_index(mask=LISTED):
    return BlockIndex.from_mask(mask, 40, 40, 8)


@contextmanager
def without_collector() -> Iterator[None]:
    """Check that reference counts alone, without Python's cycle collector, free the objects within the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def on_device(cupy, *arrays):
    return [cupy.asarray(array) for array in arrays]


def copies(cupy):
    return [kind for kind, *_ in cupy.log].count("copy")


def test_a_second_call_with_an_index_asks_nothing_again_in_both_passes(cupy, monkeypatch):
    index, arrays, do = an_index(), on_device(cupy, Q, K, V), cupy.asarray(DO)
    o, vjp = cuflash.attention_vjp(*arrays, mask=index)
    first = [o.get(), *(gradient.get() for gradient in vjp(do))]
    before = copies(cupy)
    for place, name in ((Call, "plan"), (gpu, "BoundPass"), (indices, "classify")):
        monkeypatch.setattr(place, name, lambda *args, **options: pytest.fail("asked again"))
    o, vjp = cuflash.attention_vjp(*arrays, mask=index)
    again = [o.get(), *(gradient.get() for gradient in vjp(do))]
    assert all((ours == theirs).all() for ours, theirs in zip(again, first)) and copies(cupy) == before
    assert_within_bounds(EXAMPLE, **dict(zip(("o", "dq", "dk", "dv"), again, strict=True)))


def test_everything_on_the_device_goes_with_the_index_without_a_collection(cupy):
    arrays, do = on_device(cupy, Q, K, V), cupy.asarray(DO)
    with without_collector():
        index = an_index()
        for _ in range(2):
            _, vjp = cuflash.attention_vjp(*arrays, mask=index)
            vjp(do)
        ready = cuflash.plan(*arrays, mask=index)
        ready.forward(*arrays)
        (by_device,) = gpu._GPU._device_lists.values()
        held = [weakref.ref(index), *(weakref.ref(array) for array in by_device[0].arrays.values())]
        assert len(held) == 12
        del by_device, index, vjp, ready
        assert [each() for each in held] == [None] * 12
    assert len(gpu._GPU._device_lists) == 0 and not gpu._GPU._to_release


def in_threads(work, count):
    """Call `work` in concurrent threads with their numbers; return the results in order."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def check_threads(machine, library):
    """Check that threads can copy different lists to the device concurrently, and copy a list they share only once."""
    gpu = part(library, "executors.gpu")
    of_mask = part(library, "blocks.work_list").work_list
    shape = library.masks.MaskShape((), 2, 40, 40)
    target, room = gpu.Gpu(), threading.Barrier(3)

    def list_of(step):
        return of_mask(library.masks.Dilated(step).resolve(shape), shape, (8, 8))

    class Met(dict):
        """Lists that are copied only when three threads are about to copy theirs."""

        def items(self):
            room.wait(timeout=20)
            return super().items()

    different = [list_of(step) for step in (2, 3, 5)]
    for work in different:
        vars(work)["lists"] = Met(work.lists)
    try:
        assert len({id(each) for each in in_threads(lambda n: target.device_lists(different[n]), 3)}) == 3
    except threading.BrokenBarrierError as error:
        raise AssertionError("threads wait for each other's lists") from error
    same, before = list_of(7), machine.allocated
    assert len({id(each) for each in in_threads(lambda n: target.device_lists(same), 8)}) == 1
    assert machine.allocated - before == len(same.lists)


def test_threads_send_different_lists_at_once_and_each_once(cupy):
    check_threads(cupy, cuflash)


@pytest.mark.parametrize("executor", ["cpu", "gpu"])
def test_each_index_and_each_set_of_options_has_calls_of_its_own(cupy, executor):
    def call(**options):
        inputs = (Q, K, V) if executor == "cpu" else on_device(cupy, Q, K, V)
        o = cuflash.attention(*inputs, executor=executor, **options)
        return o if executor == "cpu" else o.get()

    one, other = an_index(), an_index(masks.Dilated(5))
    ways = [
        ({"mask": one}, {"mask": LISTED}), ({"mask": other}, {"mask": masks.Dilated(5)}),
        ({"mask": one, "causal": True}, {"mask": LISTED & masks.Causal()}),
        ({"mask": one, "window": (4, 4)}, {"mask": LISTED & masks.SlidingWindow(4, 4)}),
        ({"mask": one, "scale": 2.0}, {"mask": LISTED, "scale": 2.0}), ({}, {}),
    ]  # fmt: skip
    for _ in range(2):
        for options, named in ways:
            assert_within_bounds(Example(q=Q, k=K, v=V, **named), o=call(**options))


@on_every_executor
@pytest.mark.parametrize("changes", [False, True])
def test_an_index_of_packed_sequences_is_their_mask(run, changes):
    """With or without a block that the sequences attend, so that kernels need a list or none."""
    mask = masks.Sequences([0, 13, 14, 40], causal=True)
    if changes:
        mask &= masks.BlockPattern(np.arange(25).reshape(5, 5) != 16, 8)  # without block (3, 1)
    arrays = [*map(run.put, (Q, K, V))]
    for index in (an_index(mask), *([an_index(mask.to(run.put))] if run.is_on_device else [])):
        assert (index.as_mask().row_intervals is None) == changes
        (o, lse), vjp = cuflash.attention_vjp(*arrays, mask=index, return_lse=True, **run.options)
        results = dict(zip(("o", "lse", "dq", "dk", "dv"), map(run.get, (o, lse, *vjp(run.put(DO))))))
        assert_within_bounds(Example(q=Q, k=K, v=V, do=DO, mask=mask), **results)


@needs_compiler
def test_an_index_of_sequences_on_a_device_needs_no_list(cupy):
    mask = masks.Sequences([0, 13, 14, 40], causal=True)
    index = an_index(mask.to(cupy.asarray))
    assert index.as_mask().row_intervals is not None
    before = len(cupy.launched)
    o, vjp = cuflash.attention_vjp(*on_device(cupy, Q, K, V), mask=index)
    results = dict(zip(("o", "dq", "dk", "dv"), [x.get() for x in (o, *vjp(cupy.asarray(DO)))]))
    assert_within_bounds(Example(q=Q, k=K, v=V, do=DO, mask=mask), **results)
    assert not {"classify", "entries"} & {*cupy.launched[before:]}


def test_a_caller_s_own_arrays_stay_as_they_are():
    original = an_index()
    kinds = original.kinds.copy()
    index = BlockIndex(**{**{f: getattr(original, f) for f in original.__dataclass_fields__}, "kinds": kinds})
    kinds[...] = kinds
    assert kinds.flags.writeable and not index.kinds.flags.writeable


def test_copies_and_pickles_have_calls_of_their_own():
    index = an_index()
    cuflash.attention(Q, K, V, mask=index)
    for twin in (copy.copy(index), pickle.loads(pickle.dumps(index))):
        assert twin._kept.owner is not index._kept.owner and twin == index


def test_calls_leave_the_cache_with_their_index():
    index = an_index()
    cuflash.attention(Q, K, V, mask=index)
    owner, number = weakref.ref(index._kept.owner), id(index._kept.owner)

    def keys():
        return [key for key in cached("attention") if key[1] == number]

    assert len(keys()) == 1
    del index
    assert owner() is None and keys() == []
