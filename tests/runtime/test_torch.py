"""PyTorch's tensors as arguments and results, on the CPU and on a stand-in for a GPU. test_torch_gpu has a real one."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cupy_machine  # noqa: E402
import torch_machine  # noqa: E402
from torch_machine import on_device  # noqa: E402

import cuflash.torch  # noqa: E402
from cuflash.calls._call import Call  # noqa: E402
from cuflash import BlockIndex, masks, scores  # noqa: E402
from cuflash.executors import gpu, torch_gpu  # noqa: E402
from cuflash.planning.options import Options  # noqa: E402
from cuflash.testing import Example, assert_within_bounds  # noqa: E402
from cuflash.torch._mask_parts import MASK, MaskOfTensors  # noqa: E402
from cuflash.torch._transformed import Transformed  # noqa: E402
from refusals import reasons_of  # noqa: E402

attention = cuflash.torch.attention
LISTED = masks.Dilated(3)  # its work is a list


def an_index():
    return BlockIndex.from_mask(LISTED, 20, 20, 4)


def drawn(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


Q, K, V, DO = drawn((2, 4, 20, 16), (2, 2, 20, 16), (2, 2, 20, 16), (2, 4, 20, 16))


def as_numpy(tensor):
    """Return the values in NumPy's dtype of the same name."""
    host = tensor.detach()
    return host.float().numpy().astype(ml_dtypes.bfloat16) if host.dtype == torch.bfloat16 else host.numpy()


def example_of(*, q=Q, k=K, v=V, do=DO, **operands):
    """Return a call's operands, of which the first four are tensors."""
    arguments = {name: as_numpy(tensor) for name, tensor in {"q": q, "k": k, "v": v, "do": do}.items()}
    return Example(**arguments, **operands)


PLAIN = example_of()


def require_bounds(results, example=PLAIN):
    """Require that results, by their names, are within their bounds of the exact ones."""
    assert_within_bounds(example, **{name: as_numpy(tensor) for name, tensor in results.items()})


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def gradients(call, tensors, do, dlse=None):
    """Return PyTorch's gradients of sum(do * o) + sum(dlse * lse)."""
    inputs = leaves(*tensors)
    o, lse = call(*inputs)
    return torch.autograd.grad([o, lse][: 1 + (dlse is not None)], inputs, [do, dlse][: 1 + (dlse is not None)])


# On the CPU.


@pytest.mark.parametrize("executor", ["cpu", "sim"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_and_gradients_are_those_of_the_same_arrays(executor, dtype):
    tensors = [tensor.to(getattr(torch, dtype)) for tensor in (Q, K, V, DO)]
    q, k, v, do = map(as_numpy, tensors)
    options = {"causal": True, "executor": executor, "deterministic": True, "return_lse": True}
    o, lse = attention(*tensors[:3], **options)
    (host_o, host_lse), vjp = cuflash.attention_vjp(q, k, v, **options)
    assert (o.dtype, lse.dtype) == (tensors[0].dtype, torch.float64 if dtype == "float64" else torch.float32)
    assert (as_numpy(o) == host_o).all() and (as_numpy(lse) == host_lse).all() and not o.requires_grad
    results = gradients(lambda *x: attention(*x, **options), tensors[:3], tensors[3], lse)
    for ours, theirs, tensor in zip(results, vjp(do, host_lse), tensors):
        assert ours.dtype == tensor.dtype and (as_numpy(ours) == theirs).all()


@pytest.mark.parametrize("shapes", [[(4, 3, 2), (2, 4, 2), (2, 4, 1)], [(2, 1, 2, 2), (1, 1, 3, 2), (1, 3, 1)]])
def test_gradients_are_those_of_differences(shapes):
    inputs = [tensor.requires_grad_() for tensor in drawn(*shapes, dtype=torch.float64)]
    mask = torch.rand(shapes[0][-2], shapes[1][-2], generator=torch.Generator().manual_seed(1)) < 0.7
    assert torch.autograd.gradcheck(lambda *x: attention(*x, mask=mask, return_lse=True), inputs)


@pytest.mark.parametrize("executor", ["cpu", "sim"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_blocks_that_topk_chooses_are_taken_with_their_gradients(executor, is_packed):
    scores = torch.rand(1, Q.shape[-2], 4, generator=torch.Generator().manual_seed(1))
    blocks = scores.topk(2).indices
    one_sequence = masks.Sequences(*(torch.tensor([0, x.shape[-2]]) for x in (Q, K)))
    mask = masks.ChosenBlocks(blocks, -(-K.shape[-2] // 4), sequences=one_sequence if is_packed else None)
    options = {"executor": executor, "deterministic": True, "return_lse": True}
    (o, lse), vjp = cuflash.attention_vjp(
        *map(as_numpy, (Q, K, V)), mask=masks.ChosenBlocks(blocks.numpy(), mask.block), **options
    )
    call = attention(Q, K, V, mask=mask, **options)
    assert all((as_numpy(ours) == theirs).all() for ours, theirs in zip(call, (o, lse)))
    results = gradients(lambda *x: attention(*x, mask=mask, **options), (Q, K, V), DO, call[1])
    assert all((as_numpy(ours) == theirs).all() for ours, theirs in zip(results, vjp(as_numpy(DO), lse)))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_only_what_requires_gradients_has_them(needed):
    inputs = [tensor.clone().requires_grad_(number in needed) for number, tensor in enumerate((Q, K, V))]
    attention(*inputs, window=(3, 0)).backward(DO)
    everything = gradients(lambda *x: attention(*x, window=(3, 0), return_lse=True), (Q, K, V), DO)
    for number, (tensor, expected) in enumerate(zip(inputs, everything)):
        assert (tensor.grad == expected).all() if number in needed else tensor.grad is None


def test_gradients_of_lse_alone_need_no_gradient_of_o():
    inputs = leaves(Q, K, V)
    _, lse = attention(*inputs, return_lse=True)
    lse.sum().backward()
    _, vjp = cuflash.attention_vjp(*(tensor.numpy() for tensor in (Q, K, V)))
    expected = vjp(np.zeros(Q.shape, np.float32), np.ones(Q.shape[:-1], np.float32))
    assert all((tensor.grad.numpy() == theirs).all() for tensor, theirs in zip(inputs, expected))
    assert (inputs[0].grad != 0).any()


def test_a_lazily_negated_gradient_is_read_with_its_sign():
    inputs = leaves(Q, K, V)
    o = attention(*inputs)
    plain, negated = (torch.autograd.grad(o, inputs, do, retain_graph=True) for do in (-DO, torch._neg_view(DO)))
    assert all((ours == theirs).all() for ours, theirs in zip(negated, plain))


def test_no_graph_is_recorded_where_none_is_asked_for():
    with torch.no_grad():
        assert not attention(*leaves(Q, K, V)).requires_grad
    assert attention(*leaves(Q, K, V)).requires_grad


@pytest.mark.parametrize("has_lse", [False, True])
def test_outputs_are_written_in_place_and_carry_gradients(has_lse):
    out_o, out_lse = torch.full_like(Q, 7), torch.full(Q.shape[:-1], 7.0)
    out = (out_o, out_lse) if has_lse else out_o
    expected, expected_lse = attention(Q, K, V, return_lse=True)
    assert attention(Q, K, V, out=out) is out_o and (out_o == expected).all()
    out_o.fill_(7)
    before = out_o._version
    inputs = leaves(Q, K, V)
    o, lse = attention(*inputs, out=out, return_lse=True)
    assert o.data_ptr() == out_o.data_ptr() and (out_o == expected).all() and out_o._version > before
    assert (lse == expected_lse).all() and (lse.data_ptr() == out_lse.data_ptr()) == has_lse
    results = torch.autograd.grad(o, inputs, DO, retain_graph=True)
    expected = gradients(lambda *x: attention(*x, return_lse=True), (Q, K, V), DO)
    assert all((ours == theirs).all() for ours, theirs in zip(results, expected)) and not out_o.requires_grad
    out_o.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o, inputs, DO)


def test_a_tensor_changed_between_the_passes_is_noticed():
    q, k, v = leaves(Q, K, V)
    k_twice = k * 2
    o = attention(q, k_twice, v)
    k_twice.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(
    "make",
    [
        torch.from_numpy, np.asarray, lambda cells: masks.Causal() & masks.Dense(torch.from_numpy(cells)),
        lambda cells: BlockIndex.from_mask(masks.Dense(cells), 20, 20, 4),
    ],
    ids=["tensor", "array", "mask of a tensor", "index"],
)  # fmt: skip
def test_masks_are_tensors_arrays_and_indexes(make):
    blocks = np.random.default_rng(0).random((20, 20)) < 0.6
    expected = cuflash.attention(*(x.numpy() for x in (Q, K, V)), mask=make(blocks))
    assert (attention(Q, K, V, mask=make(blocks)).numpy() == expected).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile emits its own warnings
def test_compiled_functions_leave_attention_to_python():
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True) * 2, backend="eager")
    inputs = leaves(Q, K, V)
    o = compiled(*inputs)
    assert (o == 2 * attention(Q, K, V, causal=True)).all()
    o.backward(DO)
    expected = gradients(lambda *x: attention(*x, causal=True, return_lse=True), (Q, K, V), 2 * DO)
    assert all((tensor.grad == theirs).all() for tensor, theirs in zip(inputs, expected))


# Bad tensors.

BAD = {
    "meta": (lambda x: x.to("meta"), "must hold data; got a tensor on the device 'meta': make it on 'cpu' or 'cuda'"),
    "sparse": (lambda x: x.to_sparse(), "must be a dense tensor; got the layout torch.sparse_coo: pass "),
    "quantised": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "must not be quantized; got a tensor of torch.qint8: pass ",
    ),
    "nested": (lambda x: torch.nested.nested_tensor([*x]), "must be one dense tensor; got a nested tensor: use torch."),
    "negated": (torch._neg_view, "must hold its values; got a lazily negated view: pass "),
}


@pytest.mark.parametrize("call", [attention, cuflash.attention, cuflash.attention_vjp], ids=["torch", "numpy", "vjp"])
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "out"])
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_elements_to_read_are_named(call, name, kind):
    make, sentence = BAD[kind]
    arguments = {"q": Q[0], "k": K[0], "v": V[0]}
    bad = make(arguments.get(name, Q[0]))
    (reason,) = reasons_of(call, **arguments | {name: bad})
    assert reason.startswith(f"{name} {sentence}")


def test_a_call_for_numpy_says_where_gradients_are():
    for name, call in {"q": cuflash.attention, "v": cuflash.attention_vjp, "k": cuflash.plan}.items():
        arguments = {"q": Q, "k": K, "v": V, name: Q.clone().requires_grad_()}
        (reason,) = reasons_of(call, **arguments)
        assert reason == (
            f"{name} must not require gradients, which NumPy calls do not record; got a torch.Tensor with "
            f"requires_grad=True: pass {name}.detach(), or call cuflash.torch.attention"
        )


@pytest.mark.parametrize("call", [cuflash.attention, cuflash.plan, attention])
def test_a_mask_with_gradients_is_not_sent_to_a_call_that_takes_none_either(call):
    (reason,) = reasons_of(call, Q, K, V, mask=torch.zeros(Q.shape[-2], K.shape[-2], requires_grad=True))
    assert reason == (
        "mask must not require gradients, because a mask has none; got a torch.Tensor with requires_grad=True: "
        "pass mask.detach()"
    )


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes_are_refused(dtype):
    (reason, *_) = reasons_of(attention, Q, K.to(getattr(torch, dtype)), V)
    assert reason == f"k must be float16, bfloat16, float32 or float64; got torch.{dtype}: convert it with .float()"


def test_a_bias_of_another_dtype_is_refused_like_other_tensors():
    (reason,) = reasons_of(attention, Q, K, V, bias=torch.zeros(20, 20, dtype=torch.int32))
    assert reason == "bias must be float16, bfloat16, float32 or float64; got torch.int32: convert it with .float()"
    (reason,) = reasons_of(attention, Q, K, V, bias=torch.ones(20, 20, dtype=torch.bool))
    assert reason.endswith("got torch.bool: a bool tensor is a mask: write mask=bias")


INTEGERS = torch.ones(2, 4, 20, 16, dtype=torch.int16)
OF_INTEGERS = {
    "k": lambda: cuflash.attention(Q, INTEGERS, V),
    "a plan": lambda: cuflash.plan(Q, K, V).forward(INTEGERS, K, V),
    "a tangent": lambda: cuflash.attention_jvp(Q, K, V, q_dot=INTEGERS),
    "a cotangent": lambda: cuflash.attention_vjp(Q, K, V)[1](INTEGERS),
    "a sink": lambda: cuflash.attention(Q, K, V, sink=INTEGERS[0, :, 0, 0]),
    "a bias": lambda: cuflash.attention(Q, K, V, bias=INTEGERS[0, 0, :, :1]),
    "slopes": lambda: scores.alibi(INTEGERS[0, :, 0, 0]),
    "blocks": lambda: masks.ChosenBlocks(INTEGERS, 16),
    "rows of a cache": lambda: cuflash.KVCache(
        batch=2, num_kv_heads=4, head_dim=16, capacity=64, dtype="float32"
    ).append(INTEGERS, INTEGERS),
    "an array of a score": lambda: scores.Score(lambda s, b, h, i, j, t: s * t[h], t=torch.ones(4, dtype=torch.cfloat)),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_messages_about_dtypes_name_no_method_of_another_library(name):
    with pytest.raises(cuflash.UnsupportedProblem) as refused:
        OF_INTEGERS[name]()
    message = str(refused.value)
    assert "astype" not in message and "np." not in message and ": cast" in message


def test_every_reason_comes_at_once_and_before_any_work():
    out = torch.full(Q.shape, 7.0)
    reasons = reasons_of(attention, Q.to("meta"), K.to_sparse(), V.int(), out=out.requires_grad_())
    assert [reason.split()[0] for reason in reasons] == ["q", "k", "v", "out"] and (out == 7).all()
    assert "out must not require gradients; got a tensor that does: pass its .detach()" in reasons


@pytest.mark.parametrize("name", ["q", "v", "out"])
def test_what_is_no_tensor_is_a_type_error(name):
    arguments = {"q": Q, "k": K, "v": V, name: Q.numpy()}
    sentence = rf"{name} must be a torch.Tensor; got an array of shape .*: convert it with torch.as_tensor"
    with pytest.raises(TypeError, match=sentence):
        attention(**arguments)
    if name != "out":
        with pytest.raises(TypeError, match=rf"{name} must be .*; got list: convert it with torch.as_tensor"):
            attention(**arguments | {name: Q.tolist()})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"executor": "gpu"}, "executor='gpu' takes tensors on 'cuda'; got q on 'cpu': move them with .to('cuda')"),
        ({"executor": "tpu"}, "executor must be 'auto', 'cpu', 'gpu', 'sim'; got 'tpu'"),
        ({"executor": []}, "executor must be 'auto', 'cpu', 'gpu', 'sim'; got []"),
        ({"return_lse": 1}, "return_lse must be True or False; got 1"),
        ({"scale": float("nan")}, "scale must be a finite number or None; got nan"),
        ({"out": Q}, "out must not overlap q in memory: pass a separate array"),
        ({"out": Q[:, :1].expand(Q.shape)}, "out must not overlap itself in memory"),
        ({"out": Q.double()}, "out must have shape (2, 4, 20, 16) and dtype float32; got"),
        ({"causal": "yes"}, "causal must be True, False, 'bottom_right' or 'top_left'; got 'yes'"),
    ],
)
def test_other_wrong_arguments_are_named(options, sentence):
    assert any(reason.startswith(sentence) for reason in reasons_of(attention, Q, K, V, **options))


def test_cuflash_imports_neither_pytorch_nor_jax():
    text = "import sys, cuflash; assert not {'torch', 'jax', 'cuflash.torch', 'cuflash.jax'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", text], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# On a stand-in for a GPU, which runs the kernels.


@pytest.fixture
def machines(tmp_path, monkeypatch):
    with torch_machine.installed(monkeypatch, tmp_path / "cache") as both:
        yield both


CASES = {
    "dense": {}, "causal": {"causal": True}, "lists": {"mask": LISTED}, "lengths": {"mask": masks.Lengths(kv=13)},
    "repeatable dq": {"deterministic": True},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_broadcast", [False, True])
def test_calls_on_a_gpu_are_within_their_bounds_and_keep_no_tensor(machines, case, is_broadcast):
    """The first call allocates, from CuPy's pool, the memory that calls keep; PyTorch's pools may belong to a graph."""
    cupy, pytorch = machines
    tensors = {"q": Q, "k": K[:1] if is_broadcast else K, "v": V[0] if is_broadcast else V}
    options, mask = CASES[case], masks.Causal() if case == "causal" else CASES[case].get("mask")
    dlse = attention(*tensors.values(), **options, return_lse=True)[1]
    examples = [example_of(**tensors, dlse=each, mask=mask) for each in (None, as_numpy(dlse))]
    on_gpu = [on_device(tensor).requires_grad_() for tensor in tensors.values()]
    allocated = []
    for tensors_used in (leaves(*tensors.values()), on_gpu, on_gpu):
        o, lse = attention(*tensors_used, **options, return_lse=True)
        assert o.requires_grad and lse.requires_grad
        for cotangents, example in zip(([DO], [DO, dlse]), examples):
            slopes = torch.autograd.grad([o, lse][: len(cotangents)], tensors_used, cotangents, retain_graph=True)
            results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *slopes), strict=True))
            require_bounds(results, example)
        del o, lse, slopes, results
        gc.collect()
        assert not any(tensor() is not None for tensor in pytorch.allocated)
        allocated.append(cupy.allocated)
    assert pytorch.allocated and allocated[1] == allocated[2]


def test_a_call_that_pytorch_differentiates_compiles_the_kernels_of_both_passes(machines):
    cupy, _ = machines
    cupy.runs_kernels, tensors = False, [on_device(tensor) for tensor in (Q, K, V)]
    attention(*tensors, return_lse=True)
    assert len(cupy.compiled) == 1
    o = attention(*(on_device(tensor.double()).requires_grad_() for tensor in (Q, K, V)))
    assert len(cupy.compiled) == 4
    o.backward(o.detach())
    assert len(cupy.compiled) == 4


def test_calls_with_an_index_share_its_copy_and_it_goes_with_the_index(machines):
    index = an_index()
    inputs = [on_device(tensor).requires_grad_() for tensor in (Q, K, V)]
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            attention(*inputs, mask=index, causal=number == 2).backward(on_device(DO))
            assert len(torch_gpu.MACHINE._device_lists) == (2 if number == 2 else 1)
        held = weakref.ref(index)
        del index
        assert held() is None and len(torch_gpu.MACHINE._device_lists) == 0
    finally:
        gc.enable()


def test_tensors_of_another_kind_are_refused_after_ones_that_lie_so(machines):
    arguments = {
        name: on_device(tensor) for name, tensor in {"q": Q, "k": K, "v": V, "out": torch.empty(Q.shape)}.items()
    }
    for _ in range(2):
        attention(**arguments)
    for name in arguments:
        negated = torch._neg_view(arguments[name]).as_subclass(type(arguments[name]))
        (reason,) = reasons_of(attention, **arguments | {name: negated})
        assert reason.startswith(f"{name} {BAD['negated'][1]}")
    elsewhere = on_device(K)
    elsewhere.number = 1
    (reason,) = reasons_of(attention, **arguments | {"k": elsewhere})
    assert reason.startswith("all tensors must be on one device")
    kind = type("Kind", (torch_machine.DeviceTensor,), {})
    (reason,) = reasons_of(attention, **arguments | {"k": on_device(K).as_subclass(kind)})
    assert reason.startswith("k must be a plain torch.Tensor; got a Kind")
    arguments["out"].requires_grad_()
    (reason,) = reasons_of(attention, **arguments)
    assert reason.startswith("out must not require gradients")


KEPT = torch.rand((2, 4, 20, 20), generator=torch.Generator().manual_seed(3)) < 0.5


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_is_listed_at_each_call_and_in_replays(machines, monkeypatch, has_out, causal):
    cupy, pytorch = machines
    arrays, allowed, do = [on_device(tensor).requires_grad_() for tensor in (Q, K, V)], on_device(KEPT), on_device(DO)
    out, stream = on_device(torch.empty(Q.shape)) if has_out else None, cupy.cuda.Stream()

    def step():
        o = attention(*arrays, mask=allowed, causal=causal, out=out)
        return [o, *torch.autograd.grad(o, arrays, do)]

    def of_host(mask):
        inputs = leaves(Q, K, V)
        o = attention(*inputs, mask=mask, causal=causal)
        return [o, *torch.autograd.grad(o, inputs, DO)]

    kept_in_turn = KEPT, ~KEPT, KEPT.flip(-1)
    turns = [masks.Dense(each.numpy()) for each in kept_in_turn]
    examples = [example_of(mask=mask & masks.Causal() if causal else mask) for mask in turns]

    def check(results, turn):
        require_bounds(dict(zip(("o", "dq", "dk", "dv"), results, strict=True)), examples[turn])

    for turn, each in enumerate(kept_in_turn):
        check(of_host(each), turn)
    with pytorch.stream(stream):
        check(step(), 0)
        monkeypatch.setattr(Call, "plan", lambda *args, **options: pytest.fail("planned again"))
        with torch.no_grad():
            allowed.copy_(~KEPT)
        check(step(), 1)
        stream.begin_capture()
        actual = step()
        graph = stream.end_capture()
    with torch.no_grad():
        allowed.copy_(KEPT.flip(-1))
    graph.launch()
    check(actual, 2)


IDS, COUNTS = torch.arange(20) // 6, torch.tensor([[9], [20]])
OF_ARRAYS = {
    "documents": lambda to: masks.Documents(to(IDS), to(IDS + 1)),
    "lengths": lambda to: masks.Causal() & masks.Lengths(q=to(COUNTS[:, 0]), kv=to(COUNTS[:, 0] - 3)),
    "chosen blocks": lambda to: masks.ChosenBlocks(to((IDS % 3)[None, :, None]), 8, counts=to(IDS[None] % 2)),
    "chosen blocks of lengths": lambda to: (
        masks.ChosenBlocks(to((IDS % 3)[None, :, None]), 8) & masks.Lengths(kv=to(COUNTS[:, 0]))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_masks_of_several_tensors_on_a_gpu_are_within_their_bounds(machines, name):
    mask = OF_ARRAYS[name](np.asarray)
    for _ in range(2):
        tensors = [on_device(each).requires_grad_() for each in (Q, K, V)]
        o = attention(*tensors, mask=OF_ARRAYS[name](on_device))
        results = o, *torch.autograd.grad(o, tensors, on_device(DO))
        require_bounds(dict(zip(("o", "dq", "dk", "dv"), results, strict=True)), example_of(mask=mask))


def test_a_recorded_call_on_a_gpu_reads_its_mask_in_each_run(machines):
    """A mask on the host, whose values the call would keep, is refused."""
    call = Transformed(("q", "k", "v", MASK), Options())
    call.is_traced = True
    for allowed in (KEPT, ~KEPT):
        o, lse = call.forward(*map(on_device, (Q, K, V, allowed)))
        require_bounds({"o": o, "lse": lse}, example_of(mask=masks.Dense(allowed.numpy())))
        with pytest.raises(cuflash.UnsupportedProblem, match="mask's arrays must be on the same device as q"):
            call.forward(*map(on_device, (Q, K, V)), allowed)


def test_a_recorded_call_on_a_gpu_reads_the_tensors_of_its_mask_in_each_run(machines):
    """No kernel reads the tensors of three masks, so that the plan of each run contains their values."""
    names = [f"{MASK}{number}" for number in range(3)]
    first, second, third = ((name,) for name in names)
    factors = ("Lengths", ((None,), first)), ("Documents", (second, (None,))), ("Lengths", (third, (None,)))
    call = Transformed(("q", "k", "v", *names), Options(MaskOfTensors(("And", (("tuple", factors),)))))
    call.is_traced = True
    for shift in (0, 2):
        tensors = COUNTS[:, 0] - shift, IDS + (IDS > shift), COUNTS[:, 0] - 1
        o, lse = call.forward(*map(on_device, (Q, K, V, *tensors)))
        kv, ids, q = map(np.asarray, tensors)
        mask = masks.Lengths(kv=kv) & masks.Documents(ids) & masks.Lengths(q=q)
        require_bounds({"o": o, "lse": lse}, example_of(mask=mask))


@pytest.mark.parametrize("mask", [None, LISTED, KEPT], ids=["dense", "lists", "elements"])
@pytest.mark.parametrize("has_out", [False, True])
def test_a_new_seed_or_offset_of_dropout_asks_nothing_again(machines, monkeypatch, mask, has_out):
    """Graphs that are walked back in any order draw as their own calls did."""
    dropouts = [cuflash.Dropout(0.4, *numbers) for numbers in ((3, 0), (3, 1), (2**64 - 1, 2**32 - 1))]
    inputs, arrays = leaves(Q, K, V), [on_device(tensor).requires_grad_() for tensor in (Q, K, V)]
    on_host = [attention(*inputs, mask=mask, dropout=each) for each in dropouts]
    device_mask = mask if mask is not KEPT else on_device(KEPT)

    def call(dropout):
        out = on_device(torch.empty(Q.shape)) if has_out else None
        return attention(*arrays, mask=device_mask, dropout=dropout, out=out)

    torch.autograd.grad(call(dropouts[0]), arrays, DO)
    monkeypatch.setattr(Call, "plan", lambda *args, **options: pytest.fail("planned again"))
    monkeypatch.setattr(gpu, "BoundPass", lambda *args: pytest.fail("bound again"))
    outputs = [call(each) for each in dropouts]
    examples = [example_of(mask=mask.numpy() if mask is KEPT else mask, dropout=each) for each in dropouts]
    for results, tensors in ((outputs, arrays), (on_host, inputs)):
        for o, example in zip(reversed(results), reversed(examples)):
            named = dict(zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, tensors, DO)), strict=True))
            require_bounds(named, example)


@pytest.mark.parametrize("mask", [None, LISTED], ids=["dense", "lists"])
def test_a_seed_in_a_tensor_is_read_when_kernels_run(machines, monkeypatch, mask):
    """Another seed plans nothing again, and a replay of a graph draws other weights."""
    (cupy, pytorch), do, seed = machines, on_device(DO), on_device(torch.tensor(3))
    arrays, stream = [on_device(tensor).requires_grad_() for tensor in (Q, K, V)], cupy.cuda.Stream()

    def step():
        o = attention(*arrays, mask=mask, dropout=cuflash.Dropout(0.4, seed, 1))
        return [o, *torch.autograd.grad(o, arrays, do)]

    def check(results, number):
        example = example_of(mask=mask, dropout=cuflash.Dropout(0.4, number, 1))
        require_bounds(dict(zip(("o", "dq", "dk", "dv"), results, strict=True)), example)

    with pytorch.stream(stream):
        check(step(), 3)
        monkeypatch.setattr(Call, "plan", lambda *args, **options: pytest.fail("planned again"))
        seed.fill_(5)
        check(step(), 5)
        stream.begin_capture()
        actual = step()
        graph = stream.end_capture()
    seed.fill_(7)
    graph.launch()
    check(actual, 7)


@pytest.mark.parametrize("mask", [None, LISTED, an_index], ids=["dense", "lists", "index"])
@pytest.mark.parametrize("has_out", [False, True])
def test_after_one_call_both_passes_are_captured_and_replayed_with_new_data(machines, mask, has_out):
    (cupy, pytorch), mask = machines, mask() if mask is an_index else mask
    arrays = [on_device(tensor).requires_grad_() for tensor in (Q, K, V)]
    do, out = on_device(DO), on_device(torch.empty(Q.shape)) if has_out else None
    stream = cupy.cuda.Stream()
    with pytorch.stream(stream):
        attention(*arrays, mask=mask, out=out).backward(do)
        stream.begin_capture()
        o = attention(*arrays, mask=mask, out=out)
        ours = torch.autograd.grad(o, arrays, do)
        graph = stream.end_capture()
    fresh = drawn(Q.shape, K.shape, V.shape, DO.shape, seed=1)
    with torch.no_grad():
        for tensor, new in zip((*arrays, do), fresh):
            tensor.copy_(new)
    graph.launch()
    assert not has_out or o.data_ptr() == out.data_ptr()
    inputs, mask_of_host = leaves(*fresh[:3]), None if mask is None else LISTED
    example = example_of(**dict(zip(("q", "k", "v", "do"), fresh)), mask=mask_of_host)
    on_host = attention(*inputs, mask=mask)
    for results in ((o, *ours), (on_host, *torch.autograd.grad(on_host, inputs, fresh[3]))):
        require_bounds(dict(zip(("o", "dq", "dk", "dv"), results, strict=True)), example)


def test_tensors_must_be_on_one_device(machines):
    q, k, v = map(on_device, (Q, K, V))
    (reason,) = reasons_of(attention, q, K, v)
    places = "q on 'cuda:0', k on 'cpu', v on 'cuda:0'"
    assert reason == f"all tensors must be on one device; got {places}: move them with .to(q.device)"
    (reason,) = reasons_of(attention, q, k, v, out=torch.empty(Q.shape))
    assert "out on 'cpu'" in reason
    (reason,) = reasons_of(attention, q, k, v, executor="cpu")
    assert reason == "executor='cpu' takes tensors on 'cpu'; got q on 'cuda:0': move them with .to('cpu')"


def test_tensors_may_be_on_another_device_than_the_current_one(machines, monkeypatch):
    cupy, _ = machines
    devices, launch = [], cupy_machine.Function.launch
    monkeypatch.setattr(
        cupy_machine.Function, "launch", lambda *arguments: devices.append(cupy.device) or launch(*arguments)
    )
    monkeypatch.setattr(torch_machine.DeviceTensor, "number", 1)
    inputs = [on_device(tensor).requires_grad_() for tensor in (Q, K, V)]
    for _ in range(2):
        o, lse = attention(*inputs, return_lse=True)
        results = o, lse, *torch.autograd.grad(o, inputs, DO)
        require_bounds(dict(zip(("o", "lse", "dq", "dk", "dv"), results, strict=True)))
    assert cupy.device == 0 and devices and set(devices) == {1}


def test_a_call_after_others_gives_what_it_gives_alone(machines):
    """Everything that decides a call is part of the key by which repeated calls are looked up."""
    inputs = [on_device(tensor) for tensor in (Q, K, V)]
    ways = [
        ({}, PLAIN), ({"causal": True}, example_of(mask=masks.Causal())),
        ({"window": (3, 1)}, example_of(mask=masks.SlidingWindow(3, 1))), ({"scale": 0.5}, example_of(scale=0.5)),
        ({"mask": LISTED}, example_of(mask=LISTED)), ({"out": on_device(DO)}, PLAIN),
        ({"out": (None, on_device(DO[..., 0]))}, PLAIN),
        ({"out": (on_device(DO), on_device(DO[..., 0]))}, PLAIN),
    ]  # fmt: skip
    for _ in range(2):
        for options, example in ways:
            o, lse = attention(*inputs, **options, return_lse=True)
            require_bounds({"o": o, "lse": lse}, example)
            if "out" not in options:
                o, lse = attention(Q, K, V, **options, return_lse=True)
                require_bounds({"o": o, "lse": lse}, example)
    layouts = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (Q, K, V)]
    require_bounds({"o": attention(*map(on_device, layouts))})
