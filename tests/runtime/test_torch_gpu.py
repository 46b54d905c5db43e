"""PyTorch's tensors on a GPU: results within their bounds, PyTorch's stream and memory, captures, masks of tensors."""

from __future__ import annotations

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cuflash.torch  # noqa: E402
from cuflash import BlockIndex, masks  # noqa: E402
from cuflash.testing.assertions import Example, assert_within_bounds  # noqa: E402
from cuflash.testing.tangents import Moving, assert_tangents_within_bounds  # noqa: E402
from executors import GPU  # noqa: E402
from test_torch_compile import OF_TENSORS, CompileCounterWithBackend, K, Q, V  # noqa: E402

pytestmark = pytest.mark.gpu

attention = cuflash.torch.attention
SHAPES = (2, 4, 190, 64), (2, 2, 250, 64), (2, 2, 250, 64), (2, 4, 190, 64)
DOTS = "o_dot", "lse_dot", "dq_dot", "dk_dot", "dv_dot"
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


def along(tensors, seed=1):
    """Return tangents of q, k and v, laid out as these."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty_like(x).copy_(torch.randn(x.shape, generator=generator)) for x in tensors[:3]]


def derivatives(tensors, dots, **options):
    """Return tangents of o and lse by forward mode, and of the gradients, and of o again, by double backward."""
    inputs, do = [tensor.detach().requires_grad_() for tensor in tensors[:3]], tensors[3].detach().requires_grad_()

    def call(*inputs):
        return attention(*inputs, **options, return_lse=True)

    with torch.no_grad():
        _, (o_dot, lse_dot) = torch.func.jvp(call, tuple(tensors[:3]), tuple(dots))
    gradients = torch.autograd.grad(call(*inputs)[0], inputs, do, create_graph=True)
    again, dq_dot, dk_dot, dv_dot = torch.autograd.grad(gradients, [do, *inputs], dots)
    return {"again": again} | dict(zip(DOTS, (o_dot, lse_dot, dq_dot, dk_dot, dv_dot)))


def derivatives_within_bounds(tensors, dots, mask, results, **operands):
    q, k, v, do = map(as_numpy, tensors)
    example = GPU.rounded(Example(q=q, k=k, v=v, mask=mask, do=do, **operands))
    moving = Moving(example, dict(zip("qkv", map(as_numpy, dots))))
    assert torch.equal(results["again"], results["o_dot"])
    assert_tangents_within_bounds(moving, **{name: as_numpy(results[name]) for name in DOTS})


on_masks = pytest.mark.parametrize(
    "mask", [None, masks.Causal("bottom_right"), masks.Dilated(3, align="top_left")], ids=str
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@on_masks
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


def test_memory_of_derivatives_is_linear_in_the_length():
    tensors = [torch.randn(4, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    derivatives(tensors, tensors[:3], causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    derivatives(tensors, tensors[:3], causal=True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 4 * 4096 * 4096  # half of a matrix of weights


def test_results_are_pytorchs_and_what_calls_keep_is_cupys():
    """PyTorch gives a graph's pool to all its tensors, so memory that outlives a call is CuPy's, and does not grow."""
    import cupy

    pool, index = cupy.cuda.MemoryPool(), MASKS["index"]()
    before, sizes = cupy.cuda.get_allocator(), []
    cupy.cuda.set_allocator(pool.malloc)
    try:
        for seed in range(3):
            passes(drawn(seed=seed))
            passes(drawn(seed=seed), mask=index)
            derivatives(drawn(seed=seed), along(drawn()))
            torch.cuda.synchronize()
            sizes.append(pool.used_bytes())
        assert sizes[0] == sizes[1] == sizes[2] < 4 << 20
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


def test_a_capture_of_a_tangent_that_was_never_computed_is_refused():
    # No other test has these widths, so that no kernel for them is compiled.
    inputs = [torch.randn(1, 3, 70, dim, device="cuda", dtype=torch.float64) for dim in (104, 104, 24)]
    call = lambda q: attention(q, *inputs[1:])  # noqa: E731
    torch.func.grad(lambda q: call(q).sum())(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")  # PyTorch warns of an empty graph
        with pytest.raises(RuntimeError, match="jvp.* is not compiled yet.*make the same call once"):
            torch.func.jvp(call, (inputs[0],), (inputs[0],))


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


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # which PyTorch captures first
@pytest.mark.parametrize("kind", ["causal", "index", "mask of a tensor", "argument", "dropout"])
def test_compiled_steps_in_graphs_of_cuda_have_the_bits_of_eager_ones(kind):
    """`mode="reduce-overhead"` captures both passes; replays read new data, and allocate nothing."""
    pytest.importorskip("triton", reason="Inductor needs Triton")
    torch._dynamo.reset()

    options = {"causal": {"causal": "bottom_right"}, "dropout": {"dropout": cuflash.Dropout(0.3, seed=4)}}
    options |= {kind: {"mask": MASKS[kind]()}} if kind in MASKS else {}
    fixed = options.get(kind, {})

    def call(q, k, v, allowed):
        own = {"mask": allowed} if kind == "argument" else fixed
        # dQ of a block index is otherwise summed in any order.
        return attention(q, k, v, **own, deterministic=kind == "index", return_lse=True)

    def step(function, tensors, allowed):
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        o, lse = function(*inputs, allowed)
        gradients = torch.autograd.grad([o, lse], inputs, [tensors[3], torch.ones_like(lse)])
        return [each.clone() for each in (o, lse, *gradients)]

    compiled, allocated = torch.compile(call, mode="reduce-overhead", fullgraph=True), []
    for seed in range(9):
        torch.compiler.cudagraph_mark_step_begin()
        tensors, allowed = drawn(seed=seed), torch.from_numpy(KEPT).cuda().roll(seed, 1)
        actual = step(compiled, tensors, allowed)
        for ours, theirs in zip(actual, step(call, tensors, allowed), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        del actual, ours, theirs, tensors, allowed
        torch.cuda.synchronize()
        gc.collect()  # PyTorch's graphs have cycles of references
        allocated.append(torch.cuda.memory_allocated())
    # Results of a graph count as allocated as long as PyTorch wants, so that single steps may differ.
    assert min(allocated[6:]) <= max(allocated[3:6])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", OF_TENSORS)
def test_compiled_steps_read_the_tensors_of_new_masks(name, backend):
    """One graph computes the bits of eager calls for all contents of the tensors from which it creates a mask."""
    if backend == "inductor":
        pytest.importorskip("triton", reason="Inductor needs Triton")
    torch._dynamo.reset()
    draw, mask_of = OF_TENSORS[name]
    counter = CompileCounterWithBackend(backend)

    def call(q, k, v, x):
        return attention(q, k, v, mask=mask_of(x), deterministic=True)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for seed in range(4):
        x, results = draw(seed).cuda(), []
        for function in (compiled, call):
            inputs = [each.cuda().requires_grad_() for each in (Q, K, V)]
            o = function(*inputs, x)
            results.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_calls_for_cupy_take_tensors_of_bfloat16_too(dtype):
    tensors = drawn(dtype)
    (o, lse), vjp = cuflash.attention_vjp(*tensors[:3], return_lse=True)
    dq, dk, dv = vjp(tensors[3])
    q, k, v, do = map(as_numpy, tensors)
    results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert_within_bounds(GPU.rounded(Example(q=q, k=k, v=v, do=do)), **{name: x.get() for name, x in results.items()})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@on_masks
def test_every_derivative_is_within_its_bound(dtype, mask):
    tensors = drawn(dtype)
    for seed in range(2):
        dots = along(tensors, seed)
        results = derivatives(tensors, dots, mask=mask)
        derivatives_within_bounds(tensors, dots, mask, results)
    assert all(results[name].is_cuda and results[name].dtype == tensors[0].dtype for name in DOTS if name != "lse_dot")


@pytest.mark.parametrize("kind", MASKS)
def test_derivatives_under_masks_of_tensors_and_indexes_are_within_their_bounds(kind):
    expected = masks.BlockPattern(KEPT[:6, :8].copy(), 32) if "pattern" in kind else masks.Dense(KEPT)
    tensors, mask = drawn(), MASKS[kind]()
    for seed in range(2):
        dots = along(tensors, seed)
        derivatives_within_bounds(tensors, dots, expected, derivatives(tensors, dots, mask=mask))


def test_derivatives_with_dropout_and_a_constant_bias_are_within_their_bounds():
    tensors, bias = drawn(), torch.randn(4, 190, 250, generator=torch.Generator().manual_seed(7))
    dots = along(tensors)
    for seed in (1, 2):
        dropout = cuflash.Dropout(0.3, seed=seed)
        results = derivatives(tensors, dots, dropout=dropout, bias=bias.cuda())
        operands = {"dropout": dropout, "score": cuflash.scores.bias(bias.numpy())}
        derivatives_within_bounds(tensors, dots, None, results, **operands)


def test_second_derivatives_of_a_bias_are_refused():
    q, k, v, _ = drawn()
    bias = torch.zeros(4, 190, 250, device="cuda", requires_grad=True)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, k, v, bias=bias).sum(), q, create_graph=True)
    with pytest.raises(cuflash.UnsupportedProblem, match="wrt must not name 'bias' in second derivatives on a GPU"):
        dq.float().square().sum().backward()


def test_derivatives_have_the_bits_of_calls_for_cupy():
    tensors = drawn()
    dots = along(tensors)
    results = derivatives(tensors, dots, causal="bottom_right")
    options = {"causal": "bottom_right"}
    _, (o_dot, lse_dot) = cuflash.attention_jvp(*tensors[:3], *dots, **options, return_lse=True)
    _, _, products = cuflash.attention_hvp(*tensors, *dots, **options)
    for name, theirs in zip(DOTS, (o_dot, lse_dot, *products)):
        np.testing.assert_array_equal(as_numpy(results[name]), theirs.get(), err_msg=name)
    q, k, v, do = tensors
    gradient = torch.func.grad(lambda q: (attention(q, k, v, **options) * do).sum())
    _, product = torch.func.jvp(gradient, (q,), (dots[0],))
    _, _, (expected, _, _) = cuflash.attention_hvp(*tensors, dots[0], **options)
    np.testing.assert_array_equal(as_numpy(product), expected.get())


@pytest.mark.parametrize("mask", [None, masks.BlockPattern(np.tri(2, dtype=bool), 128)], ids=str)
def test_derivatives_lie_in_memory_as_tensors_do(mask):
    tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in drawn()]
    dots = along(tensors)
    results = derivatives(tensors, dots, mask=mask)
    derivatives_within_bounds(tensors, dots, mask, results)
    assert results["lse_dot"].is_contiguous()
    for name, like in zip(("o_dot", "dq_dot", "dk_dot", "dv_dot"), (tensors[0], *tensors)):
        assert results[name].stride() == like.stride()


def test_passes_of_tangents_run_on_pytorchs_current_stream():
    """Data arrives late on a stream of PyTorch: a kernel on another stream would read zeros."""
    tensors = drawn()
    dots = along(tensors)
    derivatives(tensors, dots)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(tensor) for tensor in (*tensors, *dots)]
        torch.cuda._sleep(200_000_000)
        for tensor, values in zip(late, (*tensors, *dots)):
            tensor.copy_(values)
        results = derivatives(late[:4], late[4:])
    stream.synchronize()
    derivatives_within_bounds(tensors, dots, None, results)


@pytest.mark.parametrize("kind", ["dense", "index"])
def test_after_one_call_derivatives_are_captured_and_replayed_with_new_data(kind):
    far = masks.Dilated(3, align="top_left")
    mask = BlockIndex.from_mask(far, 190, 250, 64) if kind == "index" else None
    tensors = drawn()
    dots, side = along(tensors), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        derivatives(tensors, dots, mask=mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = derivatives(tensors, dots, mask=mask)
    for seed in (1, 2):
        fresh = drawn("bfloat16", seed)
        for tensor, values in zip((*tensors, *dots), (*fresh, *along(fresh, seed + 5))):
            tensor.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        derivatives_within_bounds(tensors, dots, far if kind == "index" else None, results)
