"""Guards that must detect faults in how PyTorch and JAX arrays are accepted, returned and differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cupy_machine import a_machine_for
from mutations.python_guards import part

# Exceptions with which a guard reports a fault. A fault may also show as an error of the other library, instead of the
# expected message or result.
SIGNS = (
    AssertionError, ValueError, TypeError, AttributeError, LookupError, RuntimeError, BufferError, pytest.fail.Exception
)  # fmt: skip
Q, K, V, DO = (np.random.default_rng(0).standard_normal((heads, 6, 4)) for heads in (4, 2, 2, 4))
SINK = np.array([0.5, -1.0, 2.0, 0.0])
UPPER = np.triu(np.ones((6, 6), bool), 1)


def expected(library: ModuleType) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return o and lse, and the gradients of q, k, v and sink."""
    results, vjp = library.attention_vjp(Q, K, V, sink=SINK, wrt="sink", causal=True, return_lse=True)
    gradients = vjp(DO, results[1])
    return list(results), [*gradients, gradients["sink"]]


def tensors_are_right(library: ModuleType) -> None:
    """Check that results and gradients of tensors equal those of arrays, with and without outputs."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    results, gradients = expected(library)
    inputs = [torch.from_numpy(array.copy()).requires_grad_() for array in (Q, K, V, SINK)]
    do, dlse, out = torch.from_numpy(DO), torch.tensor(results[1]), torch.zeros(Q.shape, dtype=torch.float64)
    for options in ({}, {"out": out}):
        actual = module.attention(*inputs[:3], sink=inputs[3], causal=True, return_lse=True, **options)
        assert all((ours.detach().numpy() == theirs).all() for ours, theirs in zip(actual, results))
        for cotangent in (do, torch._neg_view(-do)):
            pulled = torch.autograd.grad(actual, inputs, [cotangent, dlse], retain_graph=True)
            assert all((ours.numpy() == theirs).all() for ours, theirs in zip(pulled, gradients, strict=True))
    (alone,) = torch.autograd.grad(actual[1], inputs[:1], dlse, retain_graph=True)
    _, vjp = library.attention_vjp(Q, K, V, sink=SINK, causal=True)
    assert (alone.numpy() == vjp(np.zeros_like(DO), results[1]).dq).all()
    out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(actual, inputs, [do, dlse])


BIAS, TABLE = np.random.default_rng(1).standard_normal((4, 6, 6)), np.random.default_rng(2).standard_normal((4, 4))


def expected_of_scores(library: ModuleType, wrt: tuple[str, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return o with a bias, a sink and a table of relative positions, and gradients of sum(o DO)."""
    score = library.scores.relative_position(TABLE, 3, bidirectional=True)
    o, vjp = library.attention_vjp(Q, K, V, sink=SINK, bias=BIAS, score=score, wrt=wrt)
    gradients = vjp(DO)
    return o, [*gradients, *(gradients[name] for name in wrt)]


def scores_of_tensors_are_right(library: ModuleType) -> None:
    """Check results and gradients of calls whose bias, sink and score hold tensors; one needs a gradient."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    for name in ("bias", "sink", "table"):
        o, gradients = expected_of_scores(library, (name,))
        tensors = {each: torch.from_numpy(array.copy()) for each, array in zip("qkv", (Q, K, V))}
        others = {"bias": torch.from_numpy(BIAS), "sink": torch.from_numpy(SINK), "table": torch.from_numpy(TABLE)}
        others[name] = others[name].clone().requires_grad_()
        leaves = [*(tensor.requires_grad_() for tensor in tensors.values()), others[name]]
        score = library.scores.relative_position(others.pop("table"), 3, bidirectional=True)
        with watched(part(library, "torch._passes"), "run") as calls:
            actual = module.attention(**tensors, score=score, **others)
        assert (actual.detach().numpy() == o).all() and calls[0][3].wrt == (name,)
        pulled = torch.autograd.grad(actual, leaves, torch.from_numpy(DO))
        assert all((ours.numpy() == theirs).all() for ours, theirs in zip(pulled, gradients, strict=True))


def scores_of_jax_are_right(library: ModuleType) -> None:
    """Check that bias, sink and score with JAX arrays give the results and gradients of NumPy arrays.

    JAX also differentiates the score's integer array, because it is an argument.
    """
    jax, module = pytest.importorskip("jax"), part(library, "jax")

    def gathered(s, b, h, i, j, table, places):
        return s + table[h, np.clip(places[j], 0, 3)]

    score = library.scores.Score(gathered, table=TABLE, places=np.arange(6) % 4)
    o, vjp = library.attention_vjp(Q, K, V, score=score, bias=BIAS, sink=SINK, wrt=("bias", "table"))
    gradients = vjp(DO)
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        q, k, v, bias, sink, table, places = map(jax.numpy.asarray, (Q, K, V, BIAS, SINK, TABLE, np.arange(6) % 4))

        def call(table, places, bias):
            score = library.scores.Score(gathered, table=table, places=places)
            return module.attention(q, k, v, score=score, bias=bias, sink=sink)

        def pulled(table, places, bias):
            result, of_table = jax.vjp(lambda table, places: call(table, places, bias), table, places)
            _, of_bias = jax.vjp(lambda bias: call(table, places, bias), bias)
            (dtable, _), (dbias,) = of_table(DO), of_bias(DO)
            return call(table, places, bias), result, dtable, dbias

        for run in (pulled, jax.jit(pulled)):
            with watched(part(library, "calls._call").Call, "of") as calls:
                ours, actual, dtable, dbias = run(table, places, bias)
            wrt = {arguments[3].wrt for arguments in calls}  # of calls that are not in the cache
            assert wrt in (set(), {()}, {(), ("table",), ("bias",)})
            assert (np.asarray(ours) == o).all() and (np.asarray(actual) == o).all()
            assert (np.asarray(dtable) == gradients["table"]).all() and (np.asarray(dbias) == gradients["bias"]).all()


@contextmanager
def watched(owner: ModuleType, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of the calls of a function within a block."""
    calls, function = [], getattr(owner, name)

    def watching(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **options)

    setattr(owner, name, watching)
    try:
        yield calls
    finally:
        setattr(owner, name, function)


def writing_is_told(library: ModuleType) -> None:
    """Check that PyTorch is notified of the write to an output, and that gradients can be differentiated."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    q, k, v = (torch.from_numpy(array.copy()).requires_grad_() for array in (Q, K, V))
    out = torch.zeros(Q.shape, dtype=torch.float64)
    before = out._version
    o = module.attention(q, k, v, out=out)
    assert out._version > before and o.data_ptr() == out.data_ptr() and not out.requires_grad
    (dq,) = torch.autograd.grad(o, [q], torch.from_numpy(DO), create_graph=True)
    dq.sum().backward()
    assert q.grad.count_nonzero()
    with torch.no_grad():
        assert not module.attention(q, k, v).requires_grad


def bfloat16_is_taken_and_given(library: ModuleType) -> None:
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    arrays = [array.astype(ml_dtypes.bfloat16) for array in (Q, K, V)]
    tensors = [torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16) for array in arrays]
    o = library.attention(*arrays)
    assert (library.attention(*tensors) == o).all()
    actual = module.attention(*tensors)
    assert actual.dtype == torch.bfloat16 and (actual.float().numpy() == o.astype(np.float32)).all()


def tensors_without_elements_are_named(library: ModuleType) -> None:
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    q, k, v = (torch.from_numpy(array.astype(np.float32)) for array in (Q, K, V))
    bad = {
        "on the device 'meta'": q.to("meta"), "the layout torch.sparse_coo": q.to_sparse(),
        "a lazily negated view": torch._neg_view(q),
    }  # fmt: skip
    for words, tensor in bad.items():
        for call in (library.attention, module.attention):
            with pytest.raises(part(library, "errors").UnsupportedProblem, match=f"^q must .*; got .*{words}.*: "):
                call(tensor, k, v)
    with pytest.raises(part(library, "errors").UnsupportedProblem, match="bias must .*got torch.int64: .*float"):
        module.attention(q, k, v, bias=torch.arange(6))
    with pytest.raises(part(library, "errors").UnsupportedProblem, match="q must hold data; got a tracer.* batch"):
        torch.vmap(lambda x: library.attention(x, k, v))(q[None])

    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, kinds, arguments=(), options=None):
            return super().__torch_function__(function, kinds, arguments, options or {})

    with pytest.raises(part(library, "errors").UnsupportedProblem, match="q must be a plain torch.Tensor; got a T"):
        library.attention(q.as_subclass(Tagged), k, v)
    with pytest.raises(part(library, "errors").UnsupportedProblem, match="k must not require gradients"):
        library.attention(q, k.requires_grad_(), v)


def tangents_are_refused(library: ModuleType) -> None:
    """Check that tangents are refused or used, and batched gradients refused."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    refused, forward_ad = part(library, "errors").UnsupportedProblem, torch.autograd.forward_ad
    q, k, v, do = (torch.from_numpy(array.copy()) for array in (Q, K, V, DO))
    leaf = q.clone().requires_grad_()
    o = module.attention(leaf, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, k)
        with pytest.raises(refused, match="k must not carry a tangent"):
            library.attention(q, dual, v)
        assert forward_ad.unpack_dual(module.attention(q, dual, v)).tangent is not None
        (dq,) = torch.autograd.grad(o, leaf, forward_ad.make_dual(do, do), retain_graph=True)
        assert forward_ad.unpack_dual(dq).tangent is not None
    with pytest.raises(refused, match="do must be one gradient, outside of torch.vmap; got a batch of them"):
        torch.autograd.grad(o, leaf, torch.stack([do, do]), is_grads_batched=True)


def derivatives_of_tensors_are_right(library: ModuleType) -> None:
    """Check tangents, second derivatives and batches against differences, and against calls one by one."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    gradcheck = pytest.importorskip("torch.autograd.gradcheck")
    bias = torch.from_numpy(BIAS)
    tensors = [torch.from_numpy(array.copy()).requires_grad_() for array in (Q, K, V, SINK, TABLE)]

    def call(q, k, v, sink, table):
        score = library.scores.relative_position(table, 3, bidirectional=True)
        return module.attention(q, k, v, sink=sink, bias=bias, score=score, return_lse=True)

    fast = {"fast_mode": True, "check_undefined_grad": False}
    assert gradcheck.gradcheck(call, tensors, check_forward_ad=True, **fast)
    assert gradcheck.gradgradcheck(call, tensors, **fast)
    assert gradcheck.gradgradcheck(call, tensors, check_fwd_over_rev=True, check_rev_over_rev=False, **fast)
    only_q = tensors[0], *(tensor.detach() for tensor in tensors[1:])
    assert gradcheck.gradgradcheck(lambda q: call(q, *only_q[1:]), only_q[:1], **fast)
    plain = [tensor.detach() for tensor in tensors]

    def loss(q):
        o, lse = call(q, *plain[1:])
        return o.square().sum() + lse.sin().sum()

    def slope(q):
        _, tangent = torch.func.jvp(loss, (q,), (q,))
        return tangent

    value = loss(tensors[0])
    for _ in range(2):
        (gradient,) = torch.autograd.grad(value, tensors[0], create_graph=True)
        value = gradient.square().sum()
    with pytest.raises(part(library, "errors").UnsupportedProblem, match="at most twice"):
        value.backward()
    by_gradients = torch.func.grad(lambda q: (torch.func.grad(loss)(q) * q).sum())(plain[0])
    assert torch.allclose(torch.func.grad(slope)(plain[0]), by_gradients)
    with watched(part(library, "torch._functions"), "run_pass") as calls:
        torch.autograd.grad(loss(tensors[0]), tensors[0], torch._efficientzerotensor((), dtype=torch.float64))
    assert all(tensor is None or tensor.data_ptr() for *_, read in calls for tensor in read)
    _batches_are_right(library, module, torch, plain)


def _batches_are_right(library: ModuleType, module: ModuleType, torch: ModuleType, plain: list[Any]) -> None:
    """Check that batches of calls, and of their gradients, equal single calls."""
    q, k, v, sink, _ = plain
    slopes = torch.arange(4.0, dtype=torch.float64) / 4
    # in each call, the four heads of q share the two heads of k and v
    calls = {
        "sink": ((0, None, None, 0), lambda q, k, v, sink: module.attention(q, k, v, sink=sink)),
        "axes": ((1, 2, 0, None), lambda q, k, v, sink: module.attention(q, k, v)),
        "dropout": (
            (0, 0, 0, 0), lambda q, k, v, sink: module.attention(q, k, v, dropout=library.Dropout(0.5, seed=1))
        ),
        "places": (
            (0, 0, 0, 0), lambda q, k, v, sink: module.attention(q, k, v, score=lambda s, b, h, i, j: s * (1 + b))
        ),
        "mask": (
            (0, 0, 0, 0),
            lambda q, k, v, sink: module.attention(q, k, v, mask=library.masks.FromFunction(lambda b, h, i, j: j >= b)),
        ),
        "slopes": (
            (0, None, None, None),
            lambda q, k, v, sink: module.attention(q, k, v, score=library.scores.alibi(sink)),
        ),
        "matrices": (
            (0, None, None, None),
            lambda q, k, v, sink: module.attention(
                q[0], k[0], v[0], score=lambda s, b, h, i, j: s * (1 + h), scale=2.0
            ),
        ),
    }  # fmt: skip
    for axes, call in calls.values():

        def pulled(*tensors: Any, call: Any = call) -> Any:
            return torch.func.grad(lambda *tensors: call(*tensors).sin().sum(), (0, 1, 2, 3))(*tensors)

        shared = q, k, v, slopes if axes[3] is None else sink
        mapped = [x if axis is None else torch.stack([x, -x, x / 2], axis) for x, axis in zip(shared, axes)]
        for function in (call, pulled):
            batched = torch.vmap(function, axes)(*mapped)
            for number in range(3):
                own = [x if axis is None else x.select(axis, number) for x, axis in zip(mapped, axes)]
                pairs = zip(function(*own), batched) if function is pulled else [(function(*own), batched)]
                assert all(torch.allclose(alone, each[number]) for alone, each in pairs)


def own_integers_are_taken(library: ModuleType) -> None:
    torch, module, scores = pytest.importorskip("torch"), part(library, "torch"), library.scores
    q, k, v = (torch.from_numpy(array) for array in (Q, K, V))
    slopes, offsets, mask = np.arange(4.0), [0, 2, 6], q[0] @ q[0].T > 0
    expected = library.attention(Q, K, V, score=scores.within(scores.alibi(slopes), offsets))
    actual = module.attention(q, k, v, score=scores.within(scores.alibi(torch.from_numpy(slopes)), offsets))
    assert (actual.numpy() == expected).all()
    with pytest.raises(TypeError, match="slopes must be a torch.Tensor; got an array"):
        module.attention(q, k, v, score=scores.alibi(slopes))
    with pytest.raises(TypeError, match="sink must be a torch.Tensor; got an array"):
        module.attention(q, k, v, sink=np.arange(4))
    inside = torch.func.grad(lambda q: module.attention(q, k, v, mask=q[0] @ q[0].T > 0).sum())(q)
    assert (inside == torch.func.grad(lambda q: module.attention(q, k, v, mask=mask).sum())(q)).all()


def recorded_calls_use_their_own_mask(library: ModuleType) -> None:
    """Check gradients of a call that a graph runs twice, with two masks, before the first gradient."""
    torch, module = pytest.importorskip("torch"), part(library, "torch._transformed")
    options = part(library, "planning.options").Options()
    call = module.Transformed(("q", "k", "v", module.MASK), options)
    call.is_traced = True
    q, k, v, do = map(torch.from_numpy, (Q, K, V, DO))
    outputs = [call.forward(q, k, v, torch.from_numpy(mask)) for mask in (UPPER, ~UPPER)]
    for (o, lse), mask in zip(outputs, (UPPER, ~UPPER)):
        tensors = do, None, o, lse, q, k, v, torch.from_numpy(mask)  # as names_of says; dlse is None
        gradients = module.run_pass(call, "backward", (), tensors)
        _, vjp = library.attention_vjp(Q, K, V, mask=mask)
        assert all((ours.numpy() == theirs).all() for ours, theirs in zip(gradients, vjp(DO), strict=True))


def graphs_leave_calls_to_python(library: ModuleType) -> None:
    """Check that one graph contains neither calls with outputs nor other calls of the library."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    q, k, v = map(torch.from_numpy, (Q, K, V))
    o = torch.empty_like(q)
    for call in (lambda: module.attention(q, k, v, out=o), lambda: library.attention(Q, K, V)):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compiled graphs contain only"):
            torch.compile(call, backend="eager", fullgraph=True)()


def graphs_hold_texts(library: ModuleType) -> None:
    """Check that operators compute a call by its text alone, and refuse the names of calls that have no text."""
    torch, operators = pytest.importorskip("torch"), part(library, "torch._operators")
    q, k, v = map(torch.from_numpy, (Q, K, V))
    score, bias = library.scores.alibi(torch.from_numpy(TABLE[0])), torch.from_numpy(BIAS)

    @dataclass(frozen=True, eq=False)
    class Causal(library.masks.Mask):  # no other process has this class
        def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
            return j < 3

    held = [{"mask": Causal()}, {"mask": Causal().__call__}]
    for options in ({"causal": True, "bias": bias}, {"mask": library.masks.Causal()}, {"score": score}, *held):
        call, tensors = operators.Transformed.of(q, k, v, part(library, "planning.options").Options(**options))
        name = operators.name_of(call, is_traced=True)
        operators._calls.clear()
        if options in held:
            with pytest.raises(library.UnsupportedProblem, match="torch.export cannot save"):
                operators._OPERATORS.forward(tensors, (), name)
        else:
            options = {each: BIAS if each == "bias" else value for each, value in options.items()}
            o, _ = operators._OPERATORS.forward(tensors, (), name)
            assert (o.numpy() == library.attention(Q, K, V, **options)).all() and operators._call(name).name == name


def programs_hold_no_symbols(library: ModuleType) -> None:
    """Check that torch.export refuses to vary a length from which a call computes its window."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")

    class Windowed(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return module.attention(q, k, v, window=(q.shape[-2] // 2, 0))

    length = torch.export.Dim("length", min=4, max=64)
    with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
        torch.export.export(Windowed(), (*map(torch.from_numpy, (Q, K, V)),), dynamic_shapes=[{1: length}] * 3)


def graphs_follow_numbers(library: ModuleType) -> None:
    """Check that seeds and offsets of dropout do not compile a function again, and that other numbers do."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v = map(torch.from_numpy, (Q, K, V))

    def call(seed: int, offset: int, left: int) -> Any:
        return module.attention(q, k, v, dropout=library.Dropout(0.5, seed, offset), window=(left, 0))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    numbers = [(1, 2, 3), (2, 3, 3), (4, 5, 3), (6, 7, 3), (6, 7, 4), (1 << 63, 8, 4)]
    for each in numbers:
        assert torch.equal(compiled(*each), call(*each))
        assert counter.frame_count <= 2 or each[2] > 3
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: call(x, 1, 3), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.tensor(5)), call(5, 1, 3))


def equal_masks_share_a_graph(library: ModuleType) -> None:
    """Check that new masks with equal parts do not compile a function again, and that each part counts."""
    torch, module, masks = pytest.importorskip("torch"), part(library, "torch"), library.masks
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v = map(torch.from_numpy, (Q, K, V))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda mask: module.attention(q, k, v, mask=mask), backend=counter, fullgraph=True)
    score = library.scores.Score(lambda s, b, h, i, j, mask: s * mask[h], mask=torch.arange(4.0))
    o = torch.compile(lambda: module.attention(q, k, v, score=score), backend="eager", fullgraph=True)()
    assert (o.numpy() == library.attention(Q, K, V, score=score)).all()
    for left in (1, 1, 1, 2, 3, None):
        mask = masks.Causal("top_left") & ~masks.SlidingWindow(left, 0, align="top_left")
        assert (compiled(mask).numpy() == library.attention(Q, K, V, mask=mask)).all()
        assert counter.frame_count == 1 or left != 1
    mask = masks.Dense(np.tri(Q.shape[-2], K.shape[-2], dtype=bool))
    assert (compiled(mask).numpy() == library.attention(Q, K, V, mask=mask)).all()


def graphs_create_masks(library: ModuleType) -> None:
    """Check masks that a compiled function creates: their tensors are inputs, and their checks run with the call."""
    torch, module, masks = pytest.importorskip("torch"), part(library, "torch"), library.masks
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v = (torch.from_numpy(each).requires_grad_() for each in (Q, K, V))

    def call(least: Any, most: Any, left: int) -> Any:
        return module.attention(q, k, v, mask=masks.Lengths(q=most, kv=least) & masks.SlidingWindow(left, None))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for number in range(3):
        numbers = torch.tensor(2 + number), torch.tensor(5 + number), 2
        ours, theirs = (torch.autograd.grad(each(*numbers).sum(), (q, k, v)) for each in (compiled, call))
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
        assert counter.frame_count == 1
    torch._dynamo.reset()
    closed = torch.compile(
        lambda left: module.attention(q, k, v, mask=masks.SlidingWindow(left, 0)), backend="eager", fullgraph=True
    )
    for refused in (lambda: compiled(*numbers[:2], -1), lambda: closed(-1)):
        with pytest.raises(library.UnsupportedProblem, match="left must be an int of at least 0"):
            refused()
    torch._dynamo.reset()
    mixed = torch.compile(
        lambda: module.attention(q, k, v, mask=masks.Causal() | (lambda b, h, i, j: j % 3 == 0)), backend="eager"
    )
    assert torch.equal(mixed(), module.attention(q, k, v, mask=masks.Causal() | (lambda b, h, i, j: j % 3 == 0)))
    outside: list[Any] = []
    torch.compile(lambda x: torch._dynamo.disable(outside.append)(masks.Lengths(kv=x)), backend="eager")(numbers[0])
    assert isinstance(outside[0].kv, torch.Tensor)
    module.attention(q, k, v, mask=outside[0])
    assert isinstance(outside[0].kv, np.ndarray)
    tensors, parts = {}, part(library, "torch._mask_parts")
    mask = parts.MaskOfTensors(parts.parts_of(masks.Causal(), tensors))
    options = part(library, "planning.options").Options(mask=mask)
    transformed = part(library, "torch._transformed").Transformed(("q", "k", "v"), options)
    assert type(transformed).read(transformed.text)._options.mask == mask and not tensors


def graphs_keep_positions(library: ModuleType) -> None:
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    q, k, v = map(torch.from_numpy, (Q, K, V))
    torch._dynamo.reset()
    options = {"causal": "top_left", "kv_start": 1}
    compiled = torch.compile(
        lambda start: module.attention(q, k, v, q_start=start, **options), backend="eager", fullgraph=True
    )
    for start in (3, 2):
        assert (compiled(start).numpy() == library.attention(Q, K, V, q_start=start, **options)).all()


def models_are_served(library: ModuleType) -> None:
    """Check that the attention function for transformers applies mask, window and bias."""
    torch, module, masks = pytest.importorskip("torch"), part(library, "torch"), library.masks
    layer, causal = torch.nn.Module(), torch.nn.Module()
    layer.is_causal, causal.is_causal = False, True
    q, k, v, bias = (torch.from_numpy(array)[None] for array in (Q, K, V, BIAS))
    allowed, offsets = torch.ones(6, 6, dtype=torch.bool).tril(1), torch.tensor([0, 2, 6])

    def require(module_asked: Any, options: dict[str, Any], **expected: Any) -> None:
        queries, keys, values = (options.pop(name, each) for name, each in (("q", q), ("k", k), ("v", v)))
        actual, _ = module.transformers_attention(module_asked, queries, keys, values, **options)
        assert torch.equal(actual, module.attention(queries, keys, values, **expected).transpose(1, 2))

    require(layer, {})
    require(layer, {"is_causal": True}, causal=True)
    require(causal, {"is_causal": False})
    require(causal, {"q": q[:, :, :3]}, causal="top_left")
    require(causal, {"attention_mask": allowed}, mask=allowed)
    require(causal, {"position_bias": bias}, causal=True, bias=bias)
    require(causal, {"sliding_window": 3}, causal=True, window=(2, 0))
    require(layer, {"sliding_window": 3}, window=(2, 2))
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    require(causal, dict(packed), mask=masks.Sequences(offsets, causal=True))
    with pytest.raises(part(library, "errors").UnsupportedProblem, match="sliding_window must be an int of at least 1"):
        require(causal, {"sliding_window": True})


def arrays_of_numpy_are_taken_by_jax(library: ModuleType) -> None:
    jax, module, scores = pytest.importorskip("jax"), part(library, "jax"), library.scores
    with jax.default_device(jax.devices("cpu")[0]):
        q, k, v, slopes = (array.astype(np.float32) for array in (Q, K, V, np.arange(4)))
        expected = library.attention(q, k, v, score=scores.alibi(slopes), sink=slopes)
        for each in (slopes, slopes.astype(np.float64)):
            actual = module.attention(q, k, v, score=scores.alibi(each), sink=each)
            assert (np.asarray(actual) == expected).all()
        (dq,) = jax.grad(lambda arrays: module.attention(arrays[0], k, v).sum())([q])
        _, vjp = library.attention_vjp(q, k, v)
        assert (np.asarray(dq) == vjp(np.ones_like(expected)).dq).all()


def parts_of_a_mesh_are_differentiated(library: ModuleType) -> None:
    jax, module = pytest.importorskip("jax"), part(library, "jax")
    (device, *_), spec = jax.devices("cpu"), jax.sharding.PartitionSpec
    with jax.default_device(device):
        q, k, v, sink = (jax.numpy.asarray(array, np.float32) for array in (Q[None], K[None], V[None], SINK))

        def loss(function, sink):
            return function(q, k, v, sink).sum()

        def call(q, k, v, sink):
            return module.attention(q, k, v, sink=sink)

        mesh = jax.sharding.Mesh(np.array([device]), ("part",))
        mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec("part"),) * 3 + (spec(),), out_specs=spec("part"))
        ours, theirs = (jax.grad(loss, 1)(function, sink) for function in (mapped, call))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def traced_options_are_named(library: ModuleType) -> None:
    jax, module = pytest.importorskip("jax"), part(library, "jax")
    with jax.default_device(jax.devices("cpu")[0]):
        q, k, v = (jax.numpy.asarray(array, np.float32) for array in (Q, K, V))
        sentence = "^scale must be .* when JAX traces the call; got a tracer: "
        with pytest.raises(part(library, "errors").UnsupportedProblem, match=sentence):
            jax.jit(lambda x: module.attention(q, k, v, scale=x))(1.0)


def masks_of_jax_on_a_device_are_listed(library: ModuleType) -> None:
    pytest.importorskip("jax")
    from test_jax import check_device_masks

    with a_machine_for(library) as machine, pytest.MonkeyPatch.context() as patch:
        try:
            check_device_masks(patch, machine, library)
        except part(library, "errors").UnsupportedProblem as error:
            raise AssertionError(error) from error


def passes_of_jax_on_a_device_are_right(library: ModuleType) -> None:
    """Compare passes on JAX buffers with those on CuPy arrays, on a simulated GPU."""
    jax = pytest.importorskip("jax")
    from test_jax import on_a_machine
    from test_jax_gpu import check_atomic_sums, check_case, check_workspaces

    with a_machine_for(library) as machine, pytest.MonkeyPatch.context() as patch:
        on_a_machine(patch, machine, library)
        check_workspaces(library)
        with jax.default_device(jax.devices("cpu")[0]):
            check_case(library, machine.asarray, "sm90")
            check_atomic_sums(library)


def memory_orders_of_jax_are_right(library: ModuleType) -> None:
    """Compare results of models that store tokens before heads, on the host and on a simulated GPU."""
    jax = pytest.importorskip("jax")
    from test_jax import on_a_machine
    from test_jax_gpu import check_memory_orders

    with jax.default_device(jax.devices("cpu")[0]):
        check_memory_orders(library, np.float32)
        with a_machine_for(library) as machine, pytest.MonkeyPatch.context() as patch:
            on_a_machine(patch, machine, library)
            check_memory_orders(library, np.float32)


def launches_of_xla_are_right(library: ModuleType) -> None:
    """Compare passes that XLA launches without Python with those on CuPy arrays, on a simulated GPU."""
    jax = pytest.importorskip("jax")
    from test_jax import on_a_machine
    from test_jax_gpu import check_case

    with a_machine_for(library) as machine, pytest.MonkeyPatch.context() as patch:
        on_a_machine(patch, machine, library, is_native=True)
        with jax.default_device(jax.devices("cpu")[0]):
            for case in ("causal", "elements", "lengths", "dropout"):
                check_case(library, machine.asarray, case)


def new_contents_of_jax_compile_nothing(library: ModuleType) -> None:
    """Compare eager calls with new lists with calls on CuPy's arrays, on a simulated GPU, with Python and without."""
    jax = pytest.importorskip("jax")
    from test_jax import on_a_machine
    from test_jax_contents import ON_A_DEVICE, check_new_contents

    with a_machine_for(library) as machine, jax.default_device(jax.devices("cpu")[0]):
        for is_native in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                on_a_machine(patch, machine, library, is_native)
                for kind in ("partial blocks", "lists per head", "an index on the device"):
                    check_new_contents(library, ON_A_DEVICE[kind], machine.asarray, "the device" in kind)


def contents_of_jax_on_the_host_are_right(library: ModuleType) -> None:
    """Check eager calls with masks of arrays: edits, places of results, what is left, tangents of integers, no jit."""
    jax = pytest.importorskip("jax")
    from test_jax_contents import (
        check_edits, check_integers, check_places, check_that_nothing_is_left, check_without_jit,
    )  # fmt: skip

    with jax.default_device(jax.devices("cpu")[0]):
        check_edits(library)
        check_places(library)
        check_that_nothing_is_left(library, 4)
        check_integers(library)
        check_without_jit(library)


def arrays_of_jax_are_right(library: ModuleType) -> None:
    """Check that results and gradients of JAX arrays, traced and not, equal those of NumPy arrays."""
    jax, module = pytest.importorskip("jax"), part(library, "jax")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        results, gradients = expected(library)
        arrays = [jax.numpy.asarray(array) for array in (Q, K, V, SINK, DO, results[1])]

        def pulled(q, k, v, sink, do, dlse):
            call = jax.tree_util.Partial(module.attention, causal=True, return_lse=True)
            result, vjp = jax.vjp(lambda q, k, v, sink: call(q, k, v, sink=sink), q, k, v, sink)
            return result, vjp((do, dlse))

        module.attention(*(array.astype(np.float32) for array in arrays[:3]), sink=arrays[3], causal=True)
        for run in (pulled, jax.jit(pulled)):
            actual, pulled_back = run(*arrays)
            for ours, theirs in zip((*actual, *pulled_back), (*results, *gradients), strict=True):
                assert (np.asarray(ours) == theirs).all()
        alone = module.attention(*arrays[:3], sink=arrays[3], causal=True)
        assert isinstance(alone, jax.Array) and (np.asarray(alone) == results[0]).all()
        tiny = V * 1e-310
        o = module.attention(*arrays[:2], jax.numpy.asarray(tiny))
        assert (np.asarray(o) == library.attention(Q, K, tiny)).all() and np.asarray(o).any()
        with pytest.raises(TypeError, match="q must be a jax.Array"):
            module.attention(3.0, *arrays[1:3])


def equal_calls_of_jax_are_traced_once(library: ModuleType) -> None:
    """Check that calls outside of `jax.jit` and their gradients are traced once, with the right results."""
    jax = pytest.importorskip("jax")
    from test_jax import check_equal_calls

    with pytest.MonkeyPatch.context() as monkeypatch, jax.default_device(jax.devices("cpu")[0]):
        check_equal_calls(monkeypatch, library)


def second_derivatives_of_jax_are_right(library: ModuleType) -> None:
    """Compare gradients of gradients and of tangents with those of dense formulas."""
    jax, module = pytest.importorskip("jax"), part(library, "jax")
    from test_jax_derivatives import COMBINATIONS, arrays, dense

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):

        def ours(q, k, v, bias, sink):
            mask = library.masks.Lengths(kv=jax.numpy.asarray(np.array([3, 5])))
            return module.attention(q, k, v, bias=bias, sink=sink, softcap=4.0, mask=mask, return_lse=True)

        names = "grad of grad", "jvp of grad", "grad of jvp", "grad of jvp along its tangent", "grad of vmap of grad"
        for name in names:
            actual, expected = (jax.tree.leaves(COMBINATIONS[name](each, tuple(arrays()))) for each in (ours, dense))
            for one, other in zip(actual, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def mapped_calls_of_jax_are_right(library: ModuleType) -> None:
    """Compare `jax.vmap` with one call per entry."""
    jax = pytest.importorskip("jax")
    from test_jax_vmap import check_mapped_calls

    with jax.default_device(jax.devices("cpu")[0]):
        check_mapped_calls(library)


def tensors_of_ranks_are_right(library: ModuleType) -> None:
    """Check context parallelism of tensors, on ranks that are threads, and its gradients."""
    torch, module = pytest.importorskip("torch"), part(library, "torch")
    (o, lse), vjp = library.attention_vjp(Q, K, V, causal=True, return_lse=True)
    for has_do in (True, False):

        def rank(group: Any) -> list[Any]:
            cp = module.ContextParallel(group, seqlen=6, num_heads=4, num_kv_heads=2, causal=True, block=1)
            q, k, v = (cp.shard(torch.from_numpy(x)).requires_grad_() for x in (Q, K, V))
            own = cp.attention(q, k, v, return_lse=True)
            loss = own[1].square().sum() / 2
            if has_do:
                loss = loss + (own[0] * cp.shard(torch.from_numpy(DO))).sum()
            loss.backward()
            return [cp.unshard(x) for x in (own[0].detach(), own[1].detach()[..., None], q.grad, k.grad, v.grad)]

        exact = [o, lse[..., None], *vjp(DO if has_do else np.zeros_like(DO), lse)]
        for results in part(library, "distributed").run(rank, size=2, timeout=20):
            for mine, wanted in zip(results, exact):
                np.testing.assert_allclose(mine.numpy(), wanted, atol=1e-12)


def rows_of_devices_are_those_of_the_sequence(library: ModuleType) -> None:
    """Check the rows that devices of JAX have, and the order of gathered ones."""
    jax = pytest.importorskip("jax")
    part(library, "jax")
    room = part(library, "jax._context_parallel")
    for size, layout in ((1, "zigzag"), (2, "zigzag"), (4, "zigzag"), (4, "contiguous")):
        positions = [
            np.concatenate([np.arange(*run) for run in room.runs_of(rank, size, 6, layout)]) for rank in range(size)
        ]
        assert all(len(each) == 6 and (np.diff(each) > 0).all() for each in positions)
        assert all(len(room.runs_of(rank, size, 6, layout)) == 1 + (np.diff(each) > 1).sum()
                   for rank, each in enumerate(positions))  # fmt: skip
        gathered = np.concatenate(positions)
        assert np.array_equal(np.sort(gathered), np.arange(6 * size))
        in_order = room._in_order(jax.numpy.asarray(gathered)[:, None], size, layout)
        assert np.array_equal(np.asarray(in_order)[:, 0], np.arange(6 * size))
        if layout == "zigzag":
            assert {int(each.sum()) for each in positions} == {6 * (6 * size - 1) // 2}, "ranks have equal work"


def sharded_calls_of_jax_are_right(library: ModuleType) -> None:
    """Compare calls on arrays of several devices with those on one."""
    jax = pytest.importorskip("jax")
    from test_jax_sharding import check_sharded_calls

    with jax.default_device(jax.devices("cpu")[0]):
        check_sharded_calls(library, (
            "keys of all batch entries", "sink", "a score of the head", "a score of the batch entry", "dropout",
            "a function of the head",
        ))  # fmt: skip
