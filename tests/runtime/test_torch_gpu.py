"""PyTorch's tensors on a GPU: results within their bounds, PyTorch's stream and memory, captures, masks of tensors."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cuflash.torch  # noqa: E402
from cuflash import BlockIndex, masks  # noqa: E402
from cuflash.testing.assertions import Example, assert_within_bounds  # noqa: E402
from executors import GPU  # noqa: E402

pytestmark = pytest.mark.gpu

attention = cuflash.torch.attention
SHAPES = (2, 4, 190, 64), (2, 2, 250, 64), (2, 2, 250, 64), (2, 4, 190, 64)
KEPT = np.random.default_rng(0).random((190, 250)) < 0.4


@pytest.fixture(autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")


def drawn(dtype="bfloat16", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)).cuda() for shape in SHAPES]


def as_numpy(tensor):
    """Return the values in NumPy's dtype of the same name."""
    import ml_dtypes

    host = tensor.detach().cpu()
    return host.float().numpy().astype(ml_dtypes.bfloat16) if host.dtype == torch.bfloat16 else host.numpy()


def within_bounds(tensors, mask, results, **operands):
    q, k, v, do = map(as_numpy, tensors)
    example = GPU.rounded(Example(q=q, k=k, v=v, mask=mask, do=do, **operands))
    assert_within_bounds(example, **{name: as_numpy(tensor) for name, tensor in results.items()})


def passes(tensors, **options):
    """Return results and gradients of leaves with the tensors' values."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    o, lse = attention(*inputs, **options, return_lse=True)
    dq, dk, dv = torch.autograd.grad(o, inputs, tensors[3])
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("mask", [None, masks.Causal("bottom_right"), masks.Dilated(3, align="top_left")], ids=str)
def test_every_result_is_within_its_bound(dtype, mask):
    tensors = drawn(dtype)
    for _ in range(2):
        results = passes(tensors, mask=mask)
        within_bounds(tensors, mask, results)
    assert all(tensor.is_cuda and tensor.dtype == tensors[0].dtype for name, tensor in results.items() if name != "lse")


@pytest.mark.parametrize("kernel", ["sm80", "sm90", "simt"])
@pytest.mark.parametrize("mask", [None, masks.Causal("bottom_right"), masks.BlockPattern(np.tri(2, dtype=bool), 128)])
def test_results_lie_in_memory_as_tensors_do(mask, kernel):
    """Tokens lie before heads, as models keep them."""
    if kernel == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU must have compute capability 9.0")
    tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in drawn()]
    results = passes(tensors, mask=mask, kernel=kernel)
    within_bounds(tensors, mask, results)
    assert results["lse"].is_contiguous()
    for name, like in zip(("o", "dq", "dk", "dv"), (tensors[0], *tensors)):
        assert results[name].stride() == like.stride()


MASKS = {
    "tensor": lambda: torch.from_numpy(KEPT).cuda(),
    "mask of a tensor": lambda: masks.Dense(torch.from_numpy(KEPT).cuda()),
    "index": lambda: BlockIndex.from_mask(masks.Dense(KEPT), 190, 250, 64, batch=(2,), num_heads=4),
    "pattern of a tensor": lambda: masks.BlockPattern(torch.from_numpy(KEPT[:6, :8].copy()).cuda(), 32),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("is_on_other_stream", [False, True])
def test_masks_are_tensors_and_indexes(kind, is_on_other_stream):
    tensors, expected = drawn(), masks.BlockPattern(KEPT[:6, :8].copy(), 32) if "pattern" in kind else masks.Dense(KEPT)
    stream = torch.cuda.Stream() if is_on_other_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = passes(tensors, mask=MASKS[kind]())
    torch.cuda.synchronize()
    within_bounds(tensors, expected, results)


def test_gradients_of_broadcast_axes_and_from_lse_are_within_their_bounds():
    q, k, v, do = drawn("float32")
    tensors = q, k[:1], v[0], do
    inputs = [each.requires_grad_() for each in tensors[:3]]
    o, lse = attention(*inputs, return_lse=True)
    dq, dk, dv = torch.autograd.grad([o, lse], inputs, [do, lse.detach()])
    within_bounds(tensors, None, {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, dlse=as_numpy(lse))


def test_results_and_workspaces_are_pytorchs_and_no_array_is_cupys():
    import cupy

    pool = cupy.cuda.MemoryPool()
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(pool.malloc)
    try:
        passes(drawn())
        passes(drawn(), mask=MASKS["index"]())
        torch.cuda.synchronize()
        assert pool.total_bytes() == 0
    finally:
        cupy.cuda.set_allocator(before)


def test_both_passes_run_on_pytorchs_current_stream():
    """Data arrives late on a stream of PyTorch: a kernel on another stream would read zeros."""
    tensors = drawn()
    passes(tensors, causal="bottom_right")
    late = [torch.zeros_like(tensor).requires_grad_() for tensor in tensors[:3]]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for tensor, values in zip(late, tensors):
                tensor.copy_(values)
        o, lse = attention(*late, causal="bottom_right", return_lse=True)
        torch.cuda._sleep(200_000_000)
        do = torch.zeros_like(tensors[3]).copy_(tensors[3])
        dq, dk, dv = torch.autograd.grad(o, late, do)
    stream.synchronize()
    results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    within_bounds(tensors, masks.Causal("bottom_right"), results)


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("kind", ["dense", "far", "index"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_after_one_call_both_passes_are_captured_and_replayed_with_new_data(dtype, kind, has_out):
    tensors = drawn(dtype)
    inputs, do = [tensor.detach().requires_grad_() for tensor in tensors[:3]], tensors[3]
    far = masks.Dilated(3, align="top_left")
    mask = {"dense": None, "far": far, "index": BlockIndex.from_mask(far, 190, 250, 64)}[kind]
    out = (torch.empty_like(do), torch.empty(do.shape[:-1], device="cuda")) if has_out else None

    def step():
        o, lse = attention(*inputs, mask=mask, out=out, return_lse=True)
        return {"o": o, "lse": lse} | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, inputs, do)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in (1, 2):
        fresh = drawn(dtype, seed)
        with torch.no_grad():
            for tensor, values in zip((*inputs, do), fresh):
                tensor.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        within_bounds(fresh, far if kind == "index" else mask, results)
    assert not has_out or (out[0].data_ptr(), out[1].data_ptr()) == (results["o"].data_ptr(), results["lse"].data_ptr())


def test_a_capture_with_an_index_that_was_never_used_is_refused():
    tensors = drawn()
    attention(*tensors[:3], mask=MASKS["index"]())
    graph, unused = torch.cuda.CUDAGraph(), MASKS["index"]()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")  # PyTorch warns of an empty graph
        with pytest.raises(RuntimeError, match="make the same call once"):
            attention(*tensors[:3], mask=unused)


def test_a_capture_of_a_call_that_was_never_made_is_refused():
    # No other test has these widths, so that no kernel for them is compiled.
    inputs = [torch.randn(1, 3, 70, dim, device="cuda", dtype=torch.float64) for dim in (200, 200, 24)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")  # PyTorch warns of an empty graph
        with pytest.raises(RuntimeError, match="make the same call once"):
            attention(*inputs, window=(11, 3))


def test_checks_run_and_empty_and_far_scaled_calls_too(monkeypatch):
    tensors = drawn("bfloat16")
    far = [tensor.float() * 1e19 for tensor in tensors[:2]]
    o = attention(*far, tensors[2].float(), scale=1e-39)
    within_bounds([*far, tensors[2].float(), tensors[3].float()], None, {"o": o}, scale=1e-39)
    assert (attention(tensors[0], tensors[1][..., :0, :], tensors[2][..., :0, :]) == 0).all()
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    within_bounds(tensors, None, passes(tensors))


def test_tensors_on_another_device_have_the_same_bits():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors = drawn()
    expected, actual = (passes(inputs, deterministic=True) for inputs in (tensors, [x.to("cuda:1") for x in tensors]))
    for name, result in actual.items():
        assert result.device.index == 1 and torch.equal(result.cpu(), expected[name].cpu())
    assert torch.cuda.current_device() == 0


def test_compiled_steps_in_graphs_of_cuda_have_the_bits_of_eager_ones():
    """`mode="reduce-overhead"` captures both passes; replays read new data, and allocate nothing."""
    pytest.importorskip("triton", reason="Inductor needs Triton")
    torch._dynamo.reset()

    def call(q, k, v):
        return attention(q, k, v, causal="bottom_right", return_lse=True)

    def step(function, tensors):
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        o, lse = function(*inputs)
        gradients = torch.autograd.grad([o, lse], inputs, [tensors[3], torch.ones_like(lse)])
        return [each.clone() for each in (o, lse, *gradients)]

    compiled, allocated = torch.compile(call, mode="reduce-overhead", fullgraph=True), []
    for seed in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        tensors = drawn(seed=seed)
        actual = step(compiled, tensors)
        for ours, theirs in zip(actual, step(call, tensors), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        del actual, ours, theirs, tensors
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert len({*allocated[3:]}) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_calls_for_cupy_take_tensors_of_bfloat16_too(dtype):
    tensors = drawn(dtype)
    (o, lse), vjp = cuflash.attention_vjp(*tensors[:3], return_lse=True)
    dq, dk, dv = vjp(tensors[3])
    q, k, v, do = map(as_numpy, tensors)
    results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert_within_bounds(GPU.rounded(Example(q=q, k=k, v=v, do=do)), **{name: x.get() for name, x in results.items()})
