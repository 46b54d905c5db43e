"""Tensors that carry more than their elements: tangents, transformations of torch.func, operations of their own.

A call either uses what a tensor carries or refuses it; none is computed without.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.autograd import forward_ad  # noqa: E402

import cuflash.torch  # noqa: E402
import torch_machine  # noqa: E402
from cuflash import KVCache, masks, scores, selectors  # noqa: E402
from refusals import reasons_of  # noqa: E402

# PyTorch's own, where it loads forward mode.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

attention = cuflash.torch.attention
Q, K, V = torch.randn(3, 4, 12, 8, generator=torch.Generator().manual_seed(0))
BIAS, HEADS = torch.zeros(12, 12), torch.ones(4)
LSE = torch.zeros(4, 12)


def an_empty_cache():
    return KVCache(batch=1, num_kv_heads=4, head_dim=8, capacity=64, dtype=np.float32)


def a_cache():
    cache = an_empty_cache()
    cache.append(K[None], V[None])
    return cache


# Each passes one tensor that `put` makes; the name is how the refusal calls it.
ADAPTER = {
    "q": lambda put: attention(put(Q), K, V),
    "k": lambda put: attention(Q, put(K), V),
    "v": lambda put: attention(Q, K, put(V)),
    "bias": lambda put: attention(Q, K, V, bias=put(BIAS)),
    "sink": lambda put: attention(Q, K, V, sink=put(HEADS)),
    "slopes": lambda put: attention(Q, K, V, score=scores.alibi(put(HEADS))),
    "out": lambda put: attention(Q, K, V, out=put(Q.clone())),
    "out[0]": lambda put: attention(Q, K, V, out=(put(Q.clone()), LSE.clone())),
    "out[1]": lambda put: attention(Q, K, V, out=(Q.clone(), put(LSE.clone())), return_lse=True),
}
CORE = {
    "q": lambda put: cuflash.attention(put(Q), K, V),
    "k": lambda put: cuflash.attention_vjp(Q, put(K), V),
    "v": lambda put: cuflash.plan(Q, K, put(V)),
    "bias": lambda put: cuflash.attention(Q, K, V, bias=put(BIAS)),
    "sink": lambda put: cuflash.attention(Q, K, V, sink=put(HEADS)),
    "slopes": lambda put: cuflash.attention(Q, K, V, score=scores.alibi(put(HEADS))),
    "out": lambda put: cuflash.attention(Q, K, V, out=put(Q.clone())),
    "do": lambda put: cuflash.attention_vjp(Q, K, V)[1](put(Q)),
    "q of a plan": lambda put: cuflash.plan(Q, K, V).forward(put(Q), K, V),
    "sink of a plan": lambda put: cuflash.plan(Q, K, V, sink=HEADS).forward(Q, K, V, sink=put(HEADS)),
    "outs[1]": lambda put: cuflash.merge([Q, put(Q)], [LSE, LSE]),
    "lses[0]": lambda put: cuflash.merge([Q, Q], [put(LSE), LSE]),
    "outs": lambda put: cuflash.merge(put(torch.stack([Q, Q])), torch.stack([LSE, LSE])),
    "q of recall": lambda put: cuflash.study.recall(put(Q), K, V, mask=masks.Band(0, 9)),
    "k of block_mass": lambda put: cuflash.study.block_mass(Q, put(K), block=4),
    "v of error_bound": lambda put: cuflash.error_bound(Q, K, put(V)),
    "do of error_bound": lambda put: cuflash.error_bound(Q, K, V, put(Q)),
    "x": lambda put: cuflash.quantize(put(Q)),
    "q of a selector": lambda put: selectors.pooled(put(Q), K, block=4, budget=selectors.Budget(top_k=1)),
    "k of a selector": lambda put: selectors.antidiagonal(
        Q, put(K), stride=4, block=4, budget=selectors.Budget(top_k=1)
    ),
    "arrays[1]": lambda put: cuflash.pack([Q, put(Q)]),
    "packed": lambda put: cuflash.unpack(put(Q), [0, 5, 12]),
    "k of a cache": lambda put: an_empty_cache().append(put(K[None]), V[None]),
    "q of a cache": lambda put: a_cache().attention(put(Q[None, :, -1:])),
    "sink of a cache": lambda put: a_cache().attention(Q[None, :, -1:], sink=put(HEADS)),
    "slopes of a cache": lambda put: a_cache().attention(Q[None, :, -1:], score=scores.alibi(put(HEADS))),
    "k_pages": lambda put: KVCache.over(
        put(torch.zeros(4, 4, 16, 8)), torch.zeros(4, 4, 16, 8), torch.zeros(1, 4, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    ),
}  # fmt: skip
CALLS = {
    f"{kind}: {name}": call for kind, calls in (("torch", ADAPTER), ("numpy", CORE)) for name, call in calls.items()
}


def dual(tensor):
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


class Tagged(torch.Tensor):
    """A tensor with operations of its own."""

    @classmethod
    def __torch_function__(cls, function, kinds, arguments=(), options=None):
        return super().__torch_function__(function, kinds, arguments, options or {})


OUTPUTS = ("out", "out[0]", "out[1]")


@pytest.mark.parametrize("name", [f"numpy: {name}" for name in CORE])
def test_a_tangent_is_refused_and_its_primal_is_taken(name):
    argument = name.split()[1]
    with forward_ad.dual_level():
        (reason,) = reasons_of(CALLS[name], dual)
        CALLS[name](lambda tensor: forward_ad.unpack_dual(dual(tensor)).primal)
    CALLS[name](lambda tensor: tensor)
    assert reason == (
        f"{argument} must not carry a tangent, which NumPy calls and outputs do not use; got a dual tensor: pass "
        f"torch.autograd.forward_ad.unpack_dual({argument}).primal, or call cuflash.torch.attention"
    )


@pytest.mark.parametrize("name", [name for name in ADAPTER if name not in OUTPUTS])
def test_a_tangent_moves_the_result(name):
    with forward_ad.dual_level():
        o = ADAPTER[name](lambda tensor: dual(tensor + torch.arange(tensor.shape[-1]) / 8))
        o, o_dot = forward_ad.unpack_dual(o)
    assert o_dot.isfinite().all() and (name == "bias" or o_dot.any())  # a bias of ones moves all scores alike
    assert torch.equal(o, ADAPTER[name](lambda tensor: tensor + torch.arange(tensor.shape[-1]) / 8))


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_refused_where_tensors_may_have_tangents(name):
    with forward_ad.dual_level():
        (reason,) = reasons_of(ADAPTER[name], dual)
    kind = "Tensor" if name == "out" else "tuple"
    assert reason == (
        f"out must be None for tensors with tangents and within torch.func; got {kind}: leave it out, and use the "
        "returned tensors"
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_with_operations_of_its_own_is_refused(name):
    argument = name.split()[1]
    (reason,) = reasons_of(CALLS[name], lambda tensor: tensor.as_subclass(Tagged))
    assert reason == f"{argument} must be a plain torch.Tensor; got a Tagged: pass {argument}.as_subclass(torch.Tensor)"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("call", [attention, cuflash.attention], ids=["torch", "numpy"])
def test_masked_and_distributed_tensors_are_named_with_what_makes_plain_ones(call):
    masked = torch.masked.masked_tensor(Q, Q > 0)
    (reason,) = reasons_of(call, masked, K, V)
    assert reason == (
        "q must be a plain torch.Tensor; got a MaskedTensor: pass q.to_tensor(0), and mask= for the hidden elements"
    )
    DTensor = type("DTensor", (Tagged,), {})
    (reason,) = reasons_of(call, Q, K.as_subclass(DTensor), V)
    assert reason.endswith("got a DTensor: pass k.full_tensor(), or k.to_local() for the part of this process")


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.nn.Buffer])
def test_parameters_and_buffers_are_plain(kind):
    expected = attention(Q, K, V)
    assert torch.equal(attention(kind(Q.clone()), K, V), expected)
    assert (cuflash.attention(kind(Q.clone()).detach(), K, V) == expected.numpy()).all()


TRANSFORMS = {
    "vmap": (
        lambda function: torch.vmap(lambda x: function(lambda tensor: tensor * x))(torch.ones(2)),
        "call this outside of torch.vmap: leading axes are batch axes, so call it once on the whole batch",
    ),
    "grad": (
        lambda function: torch.func.grad(lambda x: function(lambda tensor: tensor * x))(torch.ones(())),
        "call this outside of torch.func, or call cuflash.torch.attention",
    ),
    "jvp": (
        lambda function: torch.func.jvp(lambda x: function(lambda tensor: tensor * x), *[(torch.ones(()),)] * 2),
        "call this outside of torch.func, or call cuflash.torch.attention",
    ),
    "functionalize": (
        lambda function: torch.func.functionalize(lambda x: function(lambda tensor: tensor * x))(torch.ones(())),
        "call this outside of torch.compile, torch.export, torch.vmap and torch.func",
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["numpy: q", "numpy: slopes", "numpy: x"])
def test_tensors_of_transformations_are_refused_with_what_to_call(name, transform):
    transformed, fix = TRANSFORMS[transform]
    argument = name.split()[1]
    reason = f"{argument} must hold data; got a tracer, a torch.Tensor without memory: {fix}"
    assert reason in reasons_of(transformed, CALLS[name])


@pytest.mark.parametrize("name", [name for name in ADAPTER if name not in OUTPUTS])
def test_functionalize_is_refused_by_the_adapter_too(name):
    transformed, fix = TRANSFORMS["functionalize"]
    reason = f"{name} must hold data; got a tracer, a torch.Tensor without memory: {fix}"
    assert reason in reasons_of(transformed, ADAPTER[name])


def test_arrays_of_a_mask_are_not_batched():
    fix = "call this outside of torch.vmap: leading axes are batch axes, so call it once on the whole batch"
    (reason,) = reasons_of(torch.vmap(lambda mask: attention(Q, K, V, mask=mask)), torch.ones(3, 12, 12) > 0)
    assert reason == f"mask must hold data; got a tracer, a torch.Tensor without memory: {fix}"


def test_a_repeated_call_on_a_gpu_looks_for_tangents(tmp_path, monkeypatch):
    """A repeated call does not lose a tangent silently."""
    with torch_machine.installed(monkeypatch, tmp_path / "cache"):
        torch_machine.put_every_tensor_on_the_device(monkeypatch)
        for _ in range(2):
            attention(Q, K, V)
            with forward_ad.dual_level():
                assert forward_ad.unpack_dual(attention(Q, dual(K), V)).tangent is not None


@pytest.mark.parametrize("of", ["do", "dlse"])
@pytest.mark.parametrize("creates_graph", [False, True])
def test_several_gradients_at_once_are_refused(of, creates_graph):
    q = Q.double().requires_grad_()
    o, lse = attention(q, K.double(), V.double(), return_lse=True)
    result = {"do": o, "dlse": lse}[of]
    cotangents = torch.ones(3, *result.shape, dtype=torch.float64)
    (reason,) = reasons_of(
        torch.autograd.grad, result, q, cotangents, is_grads_batched=True, create_graph=creates_graph
    )
    assert reason == (
        f"{of} must be one gradient, outside of torch.vmap; got a batch of them: call torch.autograd.grad for each, "
        "without is_grads_batched=True or vectorize=True"
    )


MADE_INSIDE = {
    "elements": lambda x: x[0] @ x[0].T > 0,
    "lengths": lambda x: masks.Lengths(kv=(x[0, :, 0] > 0).sum()),
    "chosen blocks": lambda x: masks.ChosenBlocks((x @ x.mT)[..., ::4].topk(2).indices, 4),
}


@pytest.mark.parametrize("kind", MADE_INSIDE)
def test_a_mask_may_be_made_inside_of_a_transformation(kind):
    def loss(x, mask=None):
        return attention(x, x, x, mask=MADE_INSIDE[kind](x) if mask is None else mask).square().sum()

    outside = MADE_INSIDE[kind](Q)
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        assert (transform(loss)(Q) == transform(lambda x: loss(x, outside))(Q)).all()
