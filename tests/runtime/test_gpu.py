"""The gpu executor on a GPU: results within their bounds, streams, captures, memory, other libraries and processes."""

from __future__ import annotations

import multiprocessing
import os
import threading

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import BlockIndex, masks
from cuflash.testing.assertions import Example, assert_within_bounds
from executors import GPU

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
SHAPE = masks.MaskShape((2,), 4, 190, 250)
IDS = np.sort(RNG.integers(0, 5, 190)), np.sort(RNG.integers(0, 5, 250))
MASKS = {
    "dense": None,
    "causal": masks.Causal("bottom_right"),
    "lengths": masks.Lengths(q=np.array([0, 190]), kv=np.array([250, 17])),
    "documents": masks.Documents(*IDS),
    "blocks": masks.BlockPattern(RNG.random((4, 6, 8)) < 0.4, 32),
    "random": masks.Dense(RNG.random((190, 250)) < 0.3),
}


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def drawn(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def example_of(mask=None, *, q=(2, 4, 190, 48), k=(2, 2, 250, 48), v=(2, 2, 250, 24), dtype=np.float32):
    batch = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
    o = (*batch, *q[-3:-1], v[-1])
    arrays = {"q": drawn(*q, dtype=dtype), "k": drawn(*k, dtype=dtype), "v": drawn(*v, dtype=dtype)}
    wide = np.float64 if dtype == np.float64 else np.float32
    return GPU.rounded(Example(**arrays, mask=mask, do=drawn(*o, dtype=dtype), dlse=drawn(*o[:-1], dtype=wide)))


def sent(cupy, *arrays):
    """Copy arrays to the device; skip the test for bfloat16 if this CuPy lacks it."""
    try:
        return [cupy.asarray(array) for array in arrays]
    except (TypeError, ValueError) as error:
        if arrays[0].dtype != ml_dtypes.bfloat16:
            raise
        pytest.skip(f"this CuPy has no bfloat16 ({error})")


def on_the_device(mask):
    """Return a mask without arrays unchanged, and a mask with host arrays as an index, which is copied once."""
    try:
        hash(mask)
        return mask
    except TypeError:
        return BlockIndex.from_mask(mask, block=32, **SHAPE._asdict())


def results(cupy, example, **options):
    q, k, v, do, dlse = sent(cupy, example.q, example.k, example.v, example.do, example.dlse)
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, mask=on_the_device(example.mask), return_lse=True, **options)
    dq, dk, dv = vjp(do, dlse)
    return {name: x.get() for name, x in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items()}


def test_checks_pass(cupy, monkeypatch):
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    for name in ("dense", "documents", "random"):
        example = example_of(MASKS[name])
        assert_within_bounds(example, **results(cupy, example))


def test_checks_see_an_array_that_changed_before_its_vjp(cupy, monkeypatch):
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    q, k, v = sent(cupy, *drawn(3, 2, 100, 64))
    for dtype in (cupy.float16, cupy.float32):
        q, k, v = (array.astype(dtype) for array in (q, k, v))
        o, vjp = cuflash.attention_vjp(q, k, v)
        vjp(o)
        for name, array in {"q": q, "o": o}.items():
            before = array.copy()
            array[1, 99, 63] += 1
            with pytest.raises(RuntimeError, match=f"^{name} must stay unchanged until vjp is called"):
                vjp(v)
            array[...] = before
        vjp(o)


def test_explain_knows_the_registers_of_compiled_kernels(cupy):
    ready = cuflash.plan(*sent(cupy, *drawn(3, 2, 100, 64)))
    ready.compile()
    assert ready.explain().count(" registers, 0 bytes of stack") == 3


# Streams and captures.


def test_streams_do_not_disturb_each_other(cupy):
    """Four concurrent streams, and plans that come and go, each have their own lists, temporaries and results."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    examples = [example_of(MASKS[name]) for name in ("dense", "random", "blocks", "documents")]
    arrays = [sent(cupy, example.q, example.k, example.v, example.do) for example in examples]
    shared = cuflash.plan(*arrays[1][:3], mask=on_the_device(MASKS["random"]), deterministic=True)
    expected = [results_of(shared, arrays[1])]
    cupy.cuda.Device().synchronize()
    outputs = []
    for turn in range(20):
        for number, stream in enumerate(streams):
            example, (q, k, v, do) = examples[(turn + number) % 4], arrays[(turn + number) % 4]
            with stream:
                outputs.append((stream, results_of(shared, arrays[1])))
                # the plan's list is freed while kernels run
                passing = cuflash.plan(q, k, v, mask=on_the_device(example.mask))
                results_of(passing, (q, k, v, do))
    del passing
    cupy.cuda.Device().synchronize()
    for _, result in outputs:
        assert all((ours == first).all() for ours, first in zip(result, expected[0]))


def test_a_new_thread_s_first_call_may_be_a_repeated_one(cupy):
    """The thread has no CUDA context before the call, and its allocations may come from CuPy's pool."""
    q, k, v, do = sent(cupy, *drawn(4, 2, 190, 48))
    _, vjp = cuflash.attention_vjp(q, k, v)
    expected, outputs = [cuflash.attention(q, k, v), *vjp(do)], []
    for _ in range(2):
        cuflash.attention(q, k, v)
        vjp(do)
    cupy.cuda.Device().synchronize()

    def calls():
        outputs.extend([cuflash.attention(q, k, v), *vjp(do)])
        cupy.cuda.get_current_stream().synchronize()

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert len(outputs) == 4 and (outputs[0] == expected[0]).all() and (outputs[2] == expected[2]).all()


def results_of(ready, arrays):
    q, k, v, do = arrays
    o, lse = ready.forward(q, k, v)
    return (o, lse, *ready.backward(do, q, k, v, o, lse))


@pytest.mark.parametrize("name", ["causal", "lengths", "random"])
def test_a_captured_graph_replays_on_changed_data(cupy, name):
    first, second = example_of(MASKS[name], v=(2, 2, 250, 48)), example_of(MASKS[name], v=(2, 2, 250, 48))
    arrays = {part: cupy.asarray(getattr(first, part)) for part in ("q", "k", "v", "do", "dlse")}
    q, k, v, do, dlse = arrays.values()
    o, lse = cupy.empty(do.shape, np.float32), cupy.empty(dlse.shape, np.float32)
    ready = cuflash.plan(q, k, v, mask=on_the_device(first.mask))
    ready.compile()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        ready.forward(q, k, v, out=(o, lse))
        gradients = ready.backward(do, q, k, v, o, lse, dlse)
        graph = stream.end_capture()
        for example in (first, second):
            for part, array in arrays.items():
                array.set(getattr(example, part))
            graph.launch(stream)
            stream.synchronize()
            results = {"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
            assert_within_bounds(example, **{name: result.get() for name, result in results.items()})


def test_a_cold_plan_is_refused_inside_a_capture(cupy):
    arrays = sent(cupy, *drawn(3, 2, 64, 31))
    first, second = (BlockIndex.from_blocks(np.eye(4, dtype=bool), 64, 64, 16) for _ in range(2))
    cuflash.plan(*arrays, mask=first).compile()
    cold = cuflash.plan(*arrays, mask=second)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"call plan.compile\(\) before the capture"):
                cold.forward(*arrays)
        finally:
            stream.end_capture()


# Devices, memory, other libraries, other processes.


def test_arrays_on_another_device_are_refused_and_served_there(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    example = example_of(MASKS["random"])
    with cupy.cuda.Device(1):
        on_device = sent(cupy, example.q, example.k, example.v)
    with pytest.raises(cuflash.UnsupportedProblem, match="q must be on the current device, 0; got device 1"):
        cuflash.attention(*on_device)
    on_host = results(cupy, example, deterministic=True)
    with cupy.cuda.Device(1):
        same = results(cupy, example, deterministic=True)
    assert all((same[name] == on_host[name]).all() for name in on_host)


def test_out_of_memory_leaves_nothing_behind(cupy):
    pool = cupy.get_default_memory_pool()
    q, k, v = sent(cupy, *drawn(3, 4, 256, 64))
    expected = cuflash.attention(q, k, v).get()
    broadcast = cupy.broadcast_to(q[None], (1 << 24, 4, 256, 64))  # o would take 4 TiB
    used = pool.used_bytes()
    for _ in range(20):
        with pytest.raises(MemoryError):
            cuflash.attention(broadcast, k, v)
    assert pool.used_bytes() <= used  # less if leftovers of an earlier test were freed in the meantime
    assert (cuflash.attention(q, k, v).get() == expected).all()


def test_peak_memory_is_arrays_and_workspace(cupy):
    q, k, v, do = sent(cupy, drawn(3, 4, 512, 64), drawn(1, 2, 512, 64), drawn(3, 2, 512, 64), drawn(3, 4, 512, 64))
    ready = cuflash.plan(q, k, v, mask=masks.Dilated(3))
    ready.compile()
    resident = ready.workspace_bytes
    peak = cupy.cuda.MemoryPool()
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(peak.malloc)
    try:
        o, lse = ready.forward(q, k, v)
        gradients = ready.backward(do, q, k, v, o, lse)
        cupy.cuda.Device().synchronize()
        num_bytes = sum(array.nbytes for array in (o, lse, *gradients))
        # the pool rounds each array up to a multiple of 512 bytes
        assert peak.total_bytes() <= num_bytes + resident + 512 * 16
    finally:
        cupy.cuda.set_allocator(before)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_torch_tensors_are_taken_and_given_without_a_copy(cupy, dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    q, k, v = (torch.randn(2, 100, 64, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))
    out = torch.empty_like(q)
    o = cuflash.attention(q, k, v, causal=True, out=out)
    assert o.data.ptr == out.data_ptr() and torch.from_dlpack(o).data_ptr() == out.data_ptr()
    example = Example(q=q.cpu().numpy(), k=k.cpu().numpy(), v=v.cpu().numpy(), mask=masks.Causal())
    assert_within_bounds(GPU.rounded(example), o=out.cpu().numpy())


def _attend_in_a_child(answers):
    import cupy

    try:
        memory = cupy.cuda.UnownedMemory(4096, 1024, None, 0)  # an address that nothing reads
        q = cupy.ndarray((2, 16, 8), np.float32, cupy.cuda.MemoryPointer(memory, 0))
        answers.put(str(cuflash.attention(q, q, q)))
    except BaseException as error:
        answers.put(f"{type(error).__name__}: {error}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")  # JAX warns if another test imported it
def test_a_forked_child_is_told_so(cupy):
    cuflash.attention(*sent(cupy, *drawn(3, 2, 16, 8)))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_attend_in_a_child, args=(answers,))
    child.start()
    answer = answers.get(timeout=60)
    child.join(60)
    assert "RuntimeError: this process was forked from one that had used CUDA" in answer
