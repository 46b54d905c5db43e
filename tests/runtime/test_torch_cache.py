"""PyTorch's tensors in a `KVCache`, on a stand-in for a GPU, are read in place or refused, as CuPy's arrays are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cupy_machine  # noqa: E402
import torch_machine  # noqa: E402
from torch_machine import on_device  # noqa: E402

from cuflash import KVCache, UnsupportedProblem, layouts  # noqa: E402
from cuflash.cache import _doors, steps as cache_steps  # noqa: E402
from cuflash.compiler import nvrtc as compiling  # noqa: E402
from executors import needs_compiler  # noqa: E402

ROWS = np.random.default_rng(0).standard_normal((6, 3, 2, 4, 1, 64)).astype(np.float16)  # of 6 steps
SINK = np.array([0.5, -1.0, 2.0, 0.0], np.float32)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[cupy_machine.Cupy]:
    """Return the stand-ins for PyTorch and CuPy, with one current stream for both."""
    with torch_machine.installed(monkeypatch, tmp_path) as (machine, _):
        monkeypatch.setattr(layouts, "_is_on_stream_of", lambda tensor, cupy: True)
        monkeypatch.setattr(layouts, "_of_tensor", lambda tensor, cupy: cupy.from_dlpack(tensor))
        yield machine


def a_cache(cupy: Any) -> KVCache:
    return KVCache(batch=2, num_kv_heads=2, head_dim=64, capacity=40, dtype=np.float16, xp=cupy)


def walked(cupy: Any, send: Any, after: Any = lambda step: None) -> list[Any]:
    """Return results of steps whose queries, new rows and sink a function sends to the device."""
    cache, outputs = a_cache(cupy), []
    for step, (q, k, v) in enumerate(ROWS):
        q, k, v = send(q), send(np.ascontiguousarray(k[:, :2])), send(np.ascontiguousarray(v[:, :2]))
        cache.append(k, v)
        outputs += [cache.attention(q).get(), *(x.get() for x in cache.attention(q, sink=send(SINK), return_lse=True))]
        after(step)
    return outputs


@needs_compiler
def test_tensors_of_a_layout_seen_twice_are_read_in_place(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = walked(cupy, cupy.asarray)

    def after(step: int) -> None:
        if step == 1:
            for module in (_doors, cache_steps):
                monkeypatch.setattr(module, "as_arrays", lambda *args: pytest.fail("taken again"))

    outputs = walked(cupy, on_device, after)
    assert len(outputs) == 18 and all(np.array_equal(*pair) for pair in zip(outputs, wanted))


@needs_compiler
def test_tensors_of_another_stream_are_taken_each_time(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DLPack makes CuPy's stream wait for that of the tensors, at each call."""
    cache, taken = a_cache(cupy), []
    take = cupy.from_dlpack
    monkeypatch.setattr(cupy, "from_dlpack", lambda tensor: taken.append(tensor) or take(tensor))
    q, k = on_device(ROWS[0, 0]), on_device(ROWS[0, 1, :, :2])
    for _ in range(3):
        cache.append(k, k)
        cache.attention(q)
    monkeypatch.setattr(layouts, "_is_on_stream_of", lambda tensor, cupy: False)
    for _ in range(2):
        taken.clear()
        cache.append(k, k)
        cache.attention(q)
        assert len(taken) == 3


@needs_compiler
def test_counts_are_taken_from_tensors(cupy: Any) -> None:
    counts_are_taken(cupy, on_device)


@pytest.mark.gpu
def test_counts_are_taken_from_tensors_on_a_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    counts_are_taken(cupy, lambda x: torch.from_numpy(x).cuda())


def counts_are_taken(cupy: Any, send: Any) -> None:
    """Check that host counts leave a cache as it is, and that counts on its device let the device count."""
    counts, q, k = np.array([1, 0], np.int32), ROWS[0, 0], np.ascontiguousarray(ROWS[0, 1, :, :2])
    lengths = np.array([2, 1], np.int32)
    outputs = []
    for of_counts in (lambda x: x.tolist(), torch.from_numpy, send):
        cache = a_cache(cupy)
        cache.append(send(k), send(k))
        cache.reserve(torch.from_numpy(lengths))
        for _ in range(2):  # the second is bound
            cache.append(send(k), send(k), counts=of_counts(counts))
            outputs.append(cache.attention(send(q), counts=of_counts(counts)).get())
        assert cache._state.is_counted_on_device == (of_counts is send) and cache.lengths.get().tolist() == [3, 1]
        cache.truncate(of_counts(lengths))
        assert cache._state.is_counted_on_device == (of_counts is send) and cache.lengths.get().tolist() == [2, 1]
    assert all(np.array_equal(*pair) for pair in zip(outputs, outputs[:2] * 3))
    with pytest.raises(UnsupportedProblem, match="counts on a device must be .* of 2 int32, .* dtype int64"):
        a_cache(cupy).append(send(k), send(k), counts=send(counts.astype(np.int64)))


@needs_compiler
def test_a_forked_child_is_told_so_of_tensors_too(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q, k = a_cache(cupy), on_device(ROWS[0, 0]), on_device(ROWS[0, 1, :, :2])
    for _ in range(3):
        cache.append(k, k)
        cache.attention(q)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    compiling._after_fork()
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: pytest.fail("CUDA was asked in a forked child"))
    for call in (lambda: cache.append(k, k), lambda: cache.attention(q)):
        with pytest.raises(RuntimeError, match="this process was forked from one that had used CUDA"):
            call()


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_read_as_arrays_are() -> None:
    cupy = pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    outputs, wanted = walked(cupy, lambda x: torch.from_numpy(x).cuda()), walked(cupy, cupy.asarray)
    assert all(np.array_equal(*pair) for pair in zip(outputs, wanted))


@needs_compiler
@pytest.mark.parametrize(
    "change, reason",
    [
        pytest.param(lambda x: x.requires_grad_(), "must not require gradients", id="with gradients"),
        pytest.param(lambda x: torch._neg_view(x).as_subclass(type(x)), "a lazily negated view", id="negated"),
        pytest.param(lambda x: on_device(x, 1), "must be on the cache's device, 0; got device 1", id="elsewhere"),
        pytest.param(lambda x: x[:, :, :, :32], "must have shape", id="of another shape"),
        pytest.param(lambda x: x.float(), "dtype", id="of another dtype"),
    ],
)
def test_tensors_that_are_refused_at_first_are_refused_later(cupy: Any, change: Any, reason: str) -> None:
    messages = []
    for steps in (0, 3):
        cache = a_cache(cupy)
        q, k = on_device(ROWS[0, 0]), on_device(ROWS[0, 1, :, :2])
        for _ in range(steps):
            cache.append(k, k)
            cache.attention(q)
        for call in (lambda x: cache.append(x, k), cache.attention):
            argument = q if call == cache.attention else k
            with pytest.raises(UnsupportedProblem, match=reason) as caught:
                call(change(argument.clone().as_subclass(type(argument))))
            messages.append(str(caught.value))
            cache.append(k, k)  # so that the query has keys
    assert messages[:2] == messages[2:]
