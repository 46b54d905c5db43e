"""PyTorch's derivatives of attention: tangents, second derivatives and batches of calls, by every transformation.

The passes themselves are judged elsewhere: results here are bitwise identical to those of the calls for NumPy.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuflash.testing.tangents import Moving, movings  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.autograd.gradcheck import gradcheck, gradgradcheck  # noqa: E402

import cuflash.torch  # noqa: E402
import torch_machine  # noqa: E402
from cuflash import masks, scores  # noqa: E402
from executors import needs_compiler  # noqa: E402
from refusals import reasons_of  # noqa: E402

# PyTorch's own, where it loads forward mode.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

attention = cuflash.torch.attention
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = {"most_scores": 1 << 10, "most_rows": 100, "widest": 12, "longest": 40}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = drawn(2, 4, 6, 3), drawn(2, 2, 6, 3, seed=1), drawn(2, 2, 6, 3, seed=2)
BIAS, SINK, SLOPES = drawn(4, 6, 6, seed=3), drawn(4, seed=4), drawn(4, seed=5).abs()


def penalized(s, b, h, i, j, slopes):
    return 3 * np.tanh(s / 3) - slopes[h] * np.abs(i - j)


# Options by name; tensors of FEATURES are arguments that can be differentiated.
FEATURES = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {}),
    "window": ({"window": (2, 1)}, {}),
    "listed": ({"mask": masks.Dilated(2)}, {}),
    "lengths": ({"mask": masks.Lengths(kv=torch.tensor([5, 3]))}, {}),
    "a tensor as mask": ({"mask": drawn(2, 1, 6, 6, seed=6) > 0}, {}),
    "bias and sink": ({"scale": 0.7}, {"bias": BIAS, "sink": SINK}),
    "a score": ({"softcap": 4.0}, {"slopes": SLOPES}),
    "dropout": ({"dropout": cuflash.Dropout(0.3, seed=5)}, {}),
    "a score of places": ({"score": lambda s, b, h, i, j: s - b * abs(i - j) / 8}, {}),
}  # fmt: skip


def call_of(options, names=()):
    """Return o and lse as a function of q, k, v and operands."""

    def call(q, k, v, *operands):
        named = dict(zip(names, operands))
        if "slopes" in named:
            named["score"] = scores.Score(penalized, slopes=named.pop("slopes"))
        return attention(q, k, v, **options, **named, return_lse=True)

    return call


def of_feature(name, device="cpu"):
    """Return a feature's call and its tensors that can be differentiated: on a GPU none that a score captures."""
    options, operands = FEATURES[name]
    if device == "cpu":
        return call_of(options, tuple(operands)), [Q, K, V, *operands.values()]
    names = ("sink",) if "sink" in operands else ()
    fixed = {name: x.to(device) for name, x in operands.items() if name not in names}
    if isinstance(mask := options.get("mask"), masks.Mask):
        options = options | {"mask": mask.to(lambda array: torch.as_tensor(array, device=device))}
    elif mask is not None:
        options = options | {"mask": mask.to(device)}
    call = call_of(options, (*names, *fixed))
    tensors = [x.to(device) for x in (Q, K, V, *(operands[name] for name in names))]
    return lambda *differentiated: call(*differentiated, *fixed.values()), tensors


def leaves(tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def as_tensor(array):
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def equal(ours, theirs):
    """Return whether a tensor is bitwise an array, except for signs of zeros and NaN."""
    return torch.equal(torch.nan_to_num(ours.detach(), 7), torch.nan_to_num(as_tensor(theirs), 7))


def in_c_order(moving):
    """Return a drawn example with dense arrays: BLAS may round differently for other strides."""
    example = moving.example
    own = {name: np.array(getattr(example, name)) for name in ("q", "k", "v", "do", "dlse", "sink")
           if getattr(example, name) is not None}  # fmt: skip
    if example.score is not None:
        arrays = {name: np.array(array) for name, array in example.score.arrays.items()}
        own["score"] = example.score._with_arrays(arrays)
    return Moving(replace(example, **own), {name: np.array(x) for name, x in moving.tangents.items()})


def moving_call(moving):
    """Return a drawn call of tensors, their names, and the keywords of the call for NumPy."""
    example = moving.example
    score = example.score
    names = ["q", "k", "v", *(["sink"] if example.sink is not None else [])]
    names += [] if score is None else [each.name for each in score.program.arrays if each.kind == "real"]
    options = {"mask": example.mask, "scale": example.scale, "dropout": example.dropout}

    def call(*tensors):
        named = dict(zip(names, tensors))
        q, k, v = (named[name] for name in "qkv")
        if score is not None:
            arrays = {name: named.get(name, array) for name, array in score.arrays.items()}
            arrays = {name: as_tensor(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
            return attention(
                q, k, v, **options, sink=named.get("sink"), score=score._with_arrays(arrays), return_lse=True
            )
        return attention(q, k, v, **options, sink=named.get("sink"), return_lse=True)

    tensors = [
        as_tensor(getattr(example, name) if name in ("q", "k", "v", "sink") else score.arrays[name]) for name in names
    ]
    return call, names, tensors, {**options, "sink": example.sink, "score": score}


@settings(max_examples=20)
@given(movings(**SMALL, has_sink=True, has_dropout=True, has_score=True))
def test_tangents_have_the_bits_of_the_call_for_numpy(moving):
    moving = in_c_order(moving)
    call, names, tensors, options = moving_call(moving)
    example, of_call = moving.example, moving.of_call()
    if not of_call:
        return
    dots = [as_tensor(moving.tangents[name]) if name in moving.tangents else None for name in names]
    (o, lse), (o_dot, lse_dot) = cuflash.attention_jvp(
        example.q, example.k, example.v, **of_call, **options, return_lse=True
    )
    with forward_ad.dual_level():
        duals = [x if dot is None else forward_ad.make_dual(x, dot) for x, dot in zip(tensors, dots)]
        ours = [forward_ad.unpack_dual(each) for each in call(*duals)]
    moved = [number for number, dot in enumerate(dots) if dot is not None]

    def of_moved(*some):
        every = list(tensors)
        for number, each in zip(moved, some):
            every[number] = each
        return call(*every)

    values, tangents = torch.func.jvp(of_moved, *(tuple(x[n] for n in moved) for x in (tensors, dots)))
    assert equal(values[0], o) and equal(values[1], lse) and equal(tangents[0], o_dot) and equal(tangents[1], lse_dot)
    assert all(equal(each.primal, x) for each, x in zip(ours, (o, lse)))
    assert all(equal(each.tangent, x) for each, x in zip(ours, (o_dot, lse_dot)))


@settings(max_examples=20)
@given(movings(**SMALL, has_sink=True, has_dropout=True, has_score=True))
def test_double_backward_runs_the_passes_of_tangents(moving):
    """Cotangents of gradients are tangents: that of do is o_dot, those of the arrays Hessian-vector products."""
    moving = in_c_order(moving)
    call, names, tensors, options = moving_call(moving)
    example = moving.example
    if example.dlse is None or not moving.of_call():
        return
    of_call = moving.of_call()
    wrt = names[3:]
    _, _, products = cuflash.attention_hvp(
        example.q, example.k, example.v, example.do, dlse=example.dlse, **of_call, **options, wrt=wrt
    )
    _, (o_dot, lse_dot) = cuflash.attention_jvp(
        example.q, example.k, example.v, **of_call, **options, return_lse=True
    )
    inputs = leaves(tensors)
    do, dlse = leaves([as_tensor(example.do), as_tensor(example.dlse)])
    gradients = torch.autograd.grad(call(*inputs), inputs, [do, dlse], create_graph=True)
    moved = {name: each for name, each in zip(names, gradients) if name in moving.tangents}
    cotangents = [as_tensor(moving.tangents[name]) for name in moved]
    of_do, of_dlse, *of_inputs = torch.autograd.grad([*moved.values()], [do, dlse, *inputs], cotangents)
    assert equal(of_do, o_dot) and equal(of_dlse, lse_dot)
    expected = [*products, *(products[name] for name in wrt)]
    assert all(equal(ours, theirs) for ours, theirs in zip(of_inputs, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("feature", FEATURES)
def test_derivatives_are_those_of_differences(feature, device):
    call, tensors = of_feature(feature, device)
    inputs = leaves(tensors)
    options = {"fast_mode": True, "atol": 1e-5, "nondet_tol": 0 if device == "cpu" else 1e-10}  # dq by atomic additions
    assert gradcheck(call, inputs, check_forward_ad=True, **options)
    assert gradgradcheck(call, inputs, **options)
    assert gradgradcheck(
        call, inputs, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False, **options
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("feature", FEATURES)
def test_transformations_of_torch_func_agree(feature, device):
    """Each derivative is computed in two ways."""
    call, (q, k, v, *operands) = of_feature(feature, device)

    def loss(q):
        o, lse = call(q, k, v, *operands)
        return o.square().sum() + lse.nan_to_num(0, 0, 0).sin().sum()

    along = torch.roll(q, 1, 0)
    _, slope = torch.func.jvp(loss, (q,), (along,))
    gradient = torch.func.grad(loss)(q)
    (leaf,) = leaves([q])
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(leaf), leaf)[0])
    torch.testing.assert_close(slope, (gradient * along).sum())
    _, product = torch.func.jvp(torch.func.grad(loss), (q,), (along,))
    of_grad = torch.func.grad(lambda q: (torch.func.grad(loss)(q) * along).sum())(q)
    of_jvp = torch.func.grad(lambda q: torch.func.jvp(loss, (q,), (along,))[1])(q)
    torch.testing.assert_close(of_grad, product)
    torch.testing.assert_close(of_jvp, product)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("feature", FEATURES)
def test_hessians_and_jacobians_are_batches_of_products(feature, device):
    call, (q, k, v, *operands) = of_feature(feature, device)

    def values(q):
        return call(q, k, v, *operands)[0][0, 0, 0]

    units = torch.eye(3, dtype=torch.float64, device=device)
    jacobian = torch.func.jacrev(values)(q)
    rows = [torch.func.vjp(values, q)[1](unit)[0] for unit in units]
    torch.testing.assert_close(jacobian, torch.stack(rows))
    torch.testing.assert_close(torch.func.jacfwd(values)(q), jacobian)
    hessian = torch.func.hessian(lambda q: values(q).square().sum())(q)
    unit = torch.zeros_like(q)
    unit[0, 0, 0, 1] = 1
    _, column = torch.func.jvp(torch.func.grad(lambda q: values(q).square().sum()), (q,), (unit,))
    torch.testing.assert_close(hessian[..., 0, 0, 0, 1], column)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_vmap_is_a_loop_over_the_calls(feature, axes, device):
    call, arrays = of_feature(feature, device)
    shared, operands = arrays[:3], arrays[3:]
    mapped = [
        x if axis is None else torch.stack([x, 2 * x, x.flip(-1)], axis) for x, axis in zip(shared, axes)
    ]
    in_dims = (*axes, *[0 if feature == "bias and sink" else None for _ in operands])
    operands = [x if axis is None else torch.stack([x, -x, x / 2]) for x, axis in zip(operands, in_dims[3:])]
    weights = drawn(2, 4, 6, 3, seed=8).to(device)

    def gradients(*tensors):
        def loss(*tensors):
            o, lse = call(*tensors)
            return (o * weights).sum() + lse.nan_to_num(0, 0, 0).sum()

        return torch.func.grad(loss, tuple(range(len(tensors))))(*tensors)

    tensors = [*mapped, *operands]
    for function in (call, gradients):
        batched = torch.vmap(function, in_dims)(*tensors)
        for n in range(3):
            alone = function(*(x if axis is None else x.select(axis, n) for x, axis in zip(tensors, in_dims)))
            for ours, theirs in zip(batched, alone, strict=True):
                torch.testing.assert_close(ours[n], theirs)


def test_vmap_maps_matrices_and_arrays_of_scores():
    q, k, v = Q[0, :, :, :], K[0, 0], V[0, 0]
    o, lse = torch.vmap(lambda q: attention(q, k, v, causal=True, return_lse=True))(q)
    for n in range(4):
        alone = attention(q[n], k, v, causal=True, return_lse=True)
        torch.testing.assert_close((o[n], lse[n]), alone)
    slopes = torch.stack([SLOPES, 2 * SLOPES])
    batched = torch.vmap(lambda slopes: attention(Q, K, V, score=scores.alibi(slopes), causal=True))(slopes)
    for each, expected in zip(slopes, batched):
        alone = attention(Q, K, V, score=scores.alibi(each), causal=True)
        torch.testing.assert_close(expected, alone)


def test_a_batch_of_calls_is_one_call_unless_its_entries_are_counted(monkeypatch):
    counts = []
    run = cuflash.torch._passes.run

    def counting(*arguments, **options):
        counts.append(arguments[0].shape)
        return run(*arguments, **options)

    monkeypatch.setattr(cuflash.torch._passes, "run", counting)
    for feature, count in (("plain", 1), ("listed", 1), ("bias and sink", 1), ("dropout", 2), ("a score of places", 2)):
        counts.clear()
        call, (q, *others) = of_feature(feature)
        torch.vmap(lambda q: call(q, *others))(torch.stack([q, -q]))
        assert len(counts) == count, feature


def objective(call, *, is_detached, device="cpu"):
    """Return the gradient of a loss of the value and the tangent with respect to weights, as MeanFlow and sCM train."""
    q, k, v, weights = (x.to(device) for x in (Q, K, V, drawn(3, 3, seed=9)))
    (weights,) = leaves([weights])
    o, o_dot = torch.func.jvp(lambda q: call(q @ weights, k @ weights, v)[0], (q,), (torch.roll(q, 1, 0),))
    o_dot = o_dot.detach() if is_detached else o_dot
    ((o - o_dot).square().sum() + o_dot.pow(3).sum()).backward()
    return weights.grad


def dense(q, k, v):
    k, v = (x.repeat_interleave(2, -3) for x in (k, v))
    scores = q @ k.mT / 3**0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_detached", [False, True])
def test_backward_through_a_tangent_trains_weights(is_detached, device):
    ours = objective(call_of({}), is_detached=is_detached, device=device)
    torch.testing.assert_close(ours, objective(dense, is_detached=is_detached, device=device))


def test_gradients_that_pytorch_keeps_without_memory_are_zero(monkeypatch):
    """The tangent of o times a constant has such a gradient of o."""

    def gradient(call):
        def tangent(q):
            return torch.func.jvp(lambda v: (call(q, K, v)[0] * Q).sum(), (V,), (V,))[1]

        return torch.func.grad(tangent)(Q)

    def running(call, name, wrt, tensors):
        assert all(tensor is None or tensor.data_ptr() for tensor in tensors)
        return run(call, name, wrt, tensors)

    run = cuflash.torch._functions.run
    monkeypatch.setattr(cuflash.torch._functions, "run", running)
    torch.testing.assert_close(gradient(call_of({})), gradient(dense))


@needs_compiler
def test_kernels_compute_the_derivatives_of_tensors_on_a_gpu(tmp_path, monkeypatch):
    """On a stand-in for a GPU, results have the bits of the calls for NumPy on the simulator, also repeated ones."""
    q, k, v, do, along = (x.float() for x in (Q, K, V, drawn(2, 4, 6, 3, seed=6), drawn(2, 4, 6, 3, seed=7)))
    options = {"causal": True, "executor": "sim"}
    arrays = [x.numpy() for x in (q, k, v)]
    _, (o_dot, lse_dot) = cuflash.attention_jvp(*arrays, q_dot=along.numpy(), **options, return_lse=True)
    _, _, dots = cuflash.attention_hvp(*arrays, do.numpy(), q_dot=along.numpy(), **options)
    expected = [*map(as_tensor, (o_dot, lse_dot, dots.dq, dots.dk, dots.dv))]
    with torch_machine.installed(monkeypatch, tmp_path / "cache"):
        torch_machine.put_every_tensor_on_the_device(monkeypatch)
        call = call_of({"causal": True})
        for number in range(2):
            if number:  # also where tensors may have tangents
                monkeypatch.setattr(cuflash.torch._passes, "_first", lambda *args: pytest.fail("planned again"))
            (_, lse), tangents = torch.func.jvp(lambda q: call(q, k, v), (q,), (along,))
            inputs = leaves([q, k, v])
            gradients = torch.autograd.grad(call(*inputs)[0], inputs, do, create_graph=True)
            products = torch.autograd.grad(gradients[0], inputs, along)
            pushed = torch.vmap(lambda q: torch.func.jvp(lambda q: call(q, k, v), (q,), (along,))[1])
            batched = [each[0] for each in pushed(torch.stack([q, -q]))]
            assert all(torch.equal(*pair) for pair in zip((*tangents, *products, *batched), (*expected, *expected[:2])))


def test_each_derivative_runs_its_passes_once(monkeypatch):
    """Absent tangents cost nothing, and a detached tangent is not differentiated."""
    passes = []
    bound = cuflash.plans.Plan._run

    def running(plan, name, arrays, outs):
        passes.append((name, tuple(each for each in arrays if each.endswith(".dot"))))
        return bound(plan, name, arrays, outs)

    monkeypatch.setattr(cuflash.plans.Plan, "_run", running)
    objective(call_of({}), is_detached=True)
    assert passes == [("jvp", ("q.dot",)), ("backward", ())]
    passes.clear()
    inputs = leaves([Q, K, V])
    (dq,) = torch.autograd.grad(attention(*inputs).square().sum(), inputs[:1], create_graph=True)
    torch.autograd.grad(dq.square().sum(), inputs)
    assert [name for name, _ in passes] == ["backward", "jvp", "backward_jvp", "backward"]
    assert passes[2][1] == ("o.dot", "lse.dot", "q.dot")


def test_duals_can_be_differentiated_after_their_level_and_not_within():
    def of_tangent(call, is_inside):
        (weights,) = leaves([drawn(3, 3, seed=9)])
        with forward_ad.dual_level():
            q = forward_ad.make_dual(Q, torch.roll(Q, 1, 0))
            tangent = forward_ad.unpack_dual(call(q @ weights, K @ weights, V)[0]).tangent
            if is_inside:
                return torch.autograd.grad(tangent.pow(3).sum(), weights)[0]
        return torch.autograd.grad(tangent.pow(3).sum(), weights)[0]

    (weights,) = leaves([drawn(3, 3, seed=9)])
    _, tangent = torch.func.jvp(lambda q: dense(q @ weights, K @ weights, V)[0], (Q,), (torch.roll(Q, 1, 0),))
    torch.testing.assert_close(
        of_tangent(call_of({}), False), torch.autograd.grad(tangent.pow(3).sum(), weights)[0]
    )
    (reason,) = reasons_of(of_tangent, call_of({}), True)
    assert reason == THIRD


@pytest.mark.parametrize("of", [0, 1])
def test_a_gradient_may_carry_a_tangent(of):
    (q,) = leaves([Q])
    result = attention(q, K, V, return_lse=True)[of]
    cotangent, dot = drawn(*result.shape, seed=1), drawn(*result.shape, seed=2)
    (expected,) = torch.autograd.grad(result, q, dot, retain_graph=True)
    with forward_ad.dual_level():
        (dq,) = torch.autograd.grad(result, q, forward_ad.make_dual(cotangent, dot))
        assert torch.equal(forward_ad.unpack_dual(dq).tangent, expected)


THIRD = (
    "attention must be differentiated at most twice; got a third derivative: take finite differences of the second, "
    "and leave torch.autograd.forward_ad.dual_level before backward"
)


def third_by_grad():
    (q,) = leaves([Q])
    value = attention(q, K, V).square().sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(value, q, create_graph=True)
        value = gradient.square().sum()


def third_of(*transforms):
    def call():
        function = lambda q: attention(q, K, V).square().sum()  # noqa: E731
        for transform in transforms:
            function = transform(function)
        return function(Q)

    return call


def along(function):
    return lambda q: torch.func.jvp(function, (q,), (Q,))[1]


def squared_grad(function):
    return lambda q: torch.func.grad(function)(q).square().sum()


@pytest.mark.parametrize(
    "call",
    [
        third_by_grad, third_of(squared_grad, squared_grad, squared_grad), third_of(squared_grad, along, along),
        third_of(squared_grad, squared_grad, along), third_of(along, torch.func.grad, along),
    ],
)  # fmt: skip
def test_third_derivatives_are_refused(call):
    (reason,) = reasons_of(call)
    assert reason == THIRD or reason.startswith("attention must not have a tangent of its tangent")


def test_a_tangent_of_a_tangent_is_refused():
    (reason,) = reasons_of(third_of(along, along))
    assert reason == (
        "attention must not have a tangent of its tangent, which no pass computes; got one: take torch.func.jvp of "
        "torch.func.grad, or finite differences of the tangent"
    )


def test_gradients_of_an_earlier_call_are_not_batched():
    (q,) = leaves([Q])
    o = attention(q, K, V)
    (reason,) = reasons_of(torch.vmap(lambda do: torch.autograd.grad(o, q, do)), torch.ones(3, *o.shape))
    assert reason == (
        "gradients of a call outside of torch.vmap must not be batched: make the call inside torch.vmap, or "
        "differentiate it with torch.func.vjp"
    )


def test_tangents_of_another_dtype_are_cast():
    q = Q.to(torch.bfloat16)
    k, v = K.to(torch.bfloat16), V.to(torch.bfloat16)
    with forward_ad.dual_level():
        o = attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert forward_ad.unpack_dual(o).tangent.dtype == torch.bfloat16
