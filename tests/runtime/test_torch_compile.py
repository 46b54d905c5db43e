"""Attention within compiled functions and below modes of PyTorch's dispatcher: one operator per pass, the same bits."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts,
)  # fmt: skip

import cuflash.torch  # noqa: E402
from cuflash import BlockIndex, masks, scores  # noqa: E402
from cuflash.planning.options import CallOptions  # noqa: E402
from executors import needs_compiler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # compilers emit their own

attention = cuflash.torch.attention


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = drawn(2, 4, 32, 16, seed=0), drawn(2, 2, 32, 16, seed=1), drawn(2, 2, 32, 16, seed=2)
BIAS, SINK = drawn(4, 32, 32, seed=3), drawn(4, seed=4)
ALLOWED = BIAS[0] > 0
SLOPES = drawn(4, seed=5).abs().requires_grad_()
WINDOW_OF_3, COUNTS = masks.SlidingWindow(3, 0), np.array([32, 20])
SCORE, LENGTHS = scores.alibi(SLOPES), masks.Lengths(kv=torch.tensor([32, 20]))
WINDOW = masks.Causal() & masks.SlidingWindow(8, 0)
INDEX = BlockIndex.from_mask(masks.Causal(), 32, 32, 16)
NAMED = scores.Score(lambda s, b, h, i, j, mask: s * mask[h], mask=SINK)
CALLS = {
    "plain": lambda q, k, v: attention(q, k, v),
    "causal": lambda q, k, v: attention(q, k, v, causal=True, scale=0.3),
    "window": lambda q, k, v: attention(q, k, v, window=(3, 0), deterministic=True),
    "softcap": lambda q, k, v: attention(q, k, v, softcap=5.0),
    "bias and sink": lambda q, k, v: attention(q, k, v, bias=BIAS, sink=SINK),
    "a mask in closed form": lambda q, k, v: attention(q, k, v, mask=WINDOW),
    "a new mask": lambda q, k, v: attention(q, k, v, mask=masks.Causal("top_left")),
    "a new window": lambda q, k, v: attention(q, k, v, mask=masks.SlidingWindow(8, 0)),
    "new lengths": lambda q, k, v: attention(q, k, v, mask=masks.Lengths(kv=torch.tensor([32, 20]))),
    "lengths": lambda q, k, v: attention(q, k, v, mask=LENGTHS),
    "a tensor as mask": lambda q, k, v: attention(q, k, v, mask=ALLOWED),
    "an index": lambda q, k, v: attention(q, k, v, mask=INDEX),
    "a score": lambda q, k, v: attention(q, k, v, score=SCORE),
    "a score whose array is called mask": lambda q, k, v: attention(q, k, v, score=NAMED, mask=ALLOWED),
    "a function as score": lambda q, k, v: attention(q, k, v, score=lambda s, b, h, i, j: s - abs(i - j)),
    "dropout": lambda q, k, v: attention(q, k, v, dropout=cuflash.Dropout(0.3, seed=4)),
    "lse": lambda q, k, v: sum(each.sum() for each in attention(q, k, v, return_lse=True)),
    "matrices": lambda q, k, v: attention(q[0, 0], k[0, 0], v[0, 0]),
    "torch.func.grad": lambda q, k, v: torch.func.grad(lambda q: attention(q, k, v).square().sum())(q),
    "torch.vmap": lambda q, k, v: torch.vmap(lambda q: attention(q, k[0], v[0], causal=True))(q),
}  # fmt: skip


OPTIONS = {
    "mask": ALLOWED, "causal": True, "window": (3, 0), "scale": 0.3, "score": SCORE, "softcap": 5.0, "bias": BIAS,
    "sink": SINK, "dropout": cuflash.Dropout(0.3, seed=4), "executor": "cpu", "deterministic": True,
    "q_start": 3, "kv_start": 2, "kernel": "auto", "precision": "ieee",
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_lost_in_a_graph(name):
    torch._dynamo.reset()
    options = {"causal": "top_left"} if name.endswith("start") else {}
    options[name] = OPTIONS[name]
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **options), backend="eager", fullgraph=True)
    assert torch.equal(compiled(Q, K, V), attention(Q, K, V, **options))
    assert OPTIONS.keys() == CallOptions.__annotations__.keys()


def results(function):
    """Return a function's value, and gradients of its square with respect to q, k, v and the slopes."""
    inputs = [each.clone().requires_grad_() for each in (Q, K, V)]
    value = function(*inputs)
    return value, *torch.autograd.grad(value.square().sum(), [*inputs, SLOPES], allow_unused=True)


def require_equal(first, other):
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_have_no_graph_break_and_the_same_bits(name, backend):
    torch._dynamo.reset()
    require_equal(results(torch.compile(CALLS[name], backend=backend, fullgraph=True)), results(CALLS[name]))


def test_a_compiled_call_follows_its_arguments():
    """Another mask compiles again; another tensor as mask does not."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda mask: attention(Q, K, V, mask=mask), backend="eager", fullgraph=True)
    for mask in (WINDOW, LENGTHS, ALLOWED, ~ALLOWED, WINDOW):
        assert torch.equal(compiled(mask), attention(Q, K, V, mask=mask))


NEW_MASKS = {
    "a window": lambda: masks.SlidingWindow(3, 0),
    "an intersection": lambda: masks.Causal() & masks.SlidingWindow(3, 0),
    "algebra": lambda: masks.Causal("top_left") | ~masks.Dilated(2) & masks.Band(None, 9),
    "blocks": lambda: masks.Causal().on_blocks(4),
}


@pytest.mark.parametrize("name", NEW_MASKS)
def test_equal_masks_share_a_graph(name):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda mask: attention(Q, K, V, mask=mask), backend=counter, fullgraph=True)
    for _ in range(12):
        assert torch.equal(compiled(NEW_MASKS[name]()), attention(Q, K, V, mask=NEW_MASKS[name]()))
    assert counter.frame_count == 1
    for mask in (masks.SlidingWindow(5, 1), masks.Band(-5, 1), ~masks.SlidingWindow(5, 1)):
        assert torch.equal(compiled(mask), attention(Q, K, V, mask=mask))


def numbers(most, *shape):
    return lambda seed: torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def ascending(most, *shape):
    return lambda seed: numbers(most, *shape)(seed).sort(dim=-1).values


OF_TENSORS = {
    "documents": (ascending(4, 2, 32), lambda x: masks.Causal() & masks.Documents(x)),
    "documents of queries and keys": (ascending(4, 2, 1, 32), lambda x: masks.Documents(x[0, 0], x[1, 0])),
    "lengths": (numbers(33, 2), lambda x: masks.Lengths(q=x, kv=x) & masks.Causal()),
    "a prefix": (numbers(33, 2), lambda x: masks.PrefixLM(x)),
    "sequences": (ascending(33, 1), lambda x: masks.Sequences(torch.cat([0 * x, x, 0 * x + 32])) & masks.Causal()),
    "blocks": (numbers(2, 4, 4, 4), lambda x: masks.BlockPattern(x > 0, 8) | masks.SlidingWindow(2, 2)),
    "elements": (numbers(2, 4, 32, 32), lambda x: masks.Dense(x > 0) - masks.Dilated(3)),
    "chosen blocks": (numbers(4, 2, 2, 32, 2), lambda x: masks.ChosenBlocks(x, 8, counts=x[..., 0] % 3)),
    "all but": (numbers(33, 2), lambda x: masks.Causal() - (masks.Lengths(kv=x) & masks.Lengths(q=x))),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("name", OF_TENSORS)
def test_masks_of_other_tensors_share_a_graph(name, backend):
    """A compiled function creates a mask from tensors, which are inputs of its graph."""
    torch._dynamo.reset()
    draw, mask_of = OF_TENSORS[name]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda q, k, v, x: attention(q, k, v, mask=mask_of(x)), backend=counter, fullgraph=True)
    for seed in range(12):
        x = draw(seed)
        require_equal(
            results(lambda *each, x=x: compiled(*each, x)),
            results(lambda *each, x=x: attention(*each, mask=mask_of(x))),
        )
    assert counter.frame_count == 1


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="older compilers do not trace ~ of a new mask")
def test_a_graph_contains_the_complement_of_a_new_mask():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attention(Q, K, V, mask=~masks.Lengths(kv=x)), backend="eager", fullgraph=True)
    for lengths in (torch.tensor([3, 30]), torch.tensor([0, 32])):
        assert torch.equal(compiled(lengths), attention(Q, K, V, mask=~masks.Lengths(kv=lengths)))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name, mask_of, message", [
    ("numbers", lambda x: masks.SlidingWindow(-3, 0), "left must be an int of at least 0"),
    ("tensors", lambda x: masks.Documents(x[:10]), "q_ids must have shape"),
    ("dtypes", lambda x: masks.Causal() & masks.Documents(x * 0.5), "q_ids must be an integer array"),
])  # fmt: skip
def test_invalid_masks_are_refused_when_a_compiled_call_runs(name, mask_of, message, fullgraph):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attention(Q, K, V, mask=mask_of(x)), backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        with pytest.raises(cuflash.UnsupportedProblem, match=message):
            compiled(torch.arange(32))


def test_masks_that_leave_a_graph_are_checked():
    torch._dynamo.reset()
    outside = []

    @torch._dynamo.disable
    def keep(mask):
        outside.append(mask)

    def call(left, x):
        keep(masks.SlidingWindow(left, 0) & masks.ChosenBlocks(x, 8))
        return 2 * x

    x = numbers(4, 1, 32, 2)(0)
    for left in (3, -3):
        torch.compile(call, backend="eager")(left, x)
    mask, invalid = outside
    assert torch.equal(attention(Q, K, V, mask=mask), attention(Q, K, V, mask=masks.ChosenBlocks(x, 8) & WINDOW_OF_3))
    with pytest.raises(cuflash.UnsupportedProblem, match="left must be an int of at least 0"):
        attention(Q, K, V, mask=invalid)


def test_a_mapped_tensor_of_a_mask_is_that_of_each_call():
    torch._dynamo.reset()

    def call(x):
        return torch.vmap(lambda x: attention(Q, K, V, mask=masks.Documents(x)))(x)

    x = ascending(4, 3, 32)(0)
    o = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(o, torch.stack([attention(Q, K, V, mask=masks.Documents(each)) for each in x]))


def test_a_deep_mask_is_compiled():
    torch._dynamo.reset()
    mask = masks.Causal()
    for left in range(40):
        mask = ~(mask & masks.SlidingWindow(left, 0))
    compiled = torch.compile(lambda: attention(Q, K, V, mask=mask), backend="eager", fullgraph=True)
    assert torch.equal(compiled(), attention(Q, K, V, mask=mask))


@pytest.mark.parametrize("name, values", {
    "scale": (0.3, 0.5, 0.7), "softcap": (2.0, 3.0), "window": ((1, 0), (2, None)), "q_start": (0, 3),
    "dropout": (cuflash.Dropout(0.3, seed=4), cuflash.Dropout(0.3, seed=5), cuflash.Dropout(0.5, seed=5)),
}.items())  # fmt: skip
@pytest.mark.parametrize("dynamic", [None, True])
def test_another_number_compiles_again(name, values, dynamic):
    """PyTorch turns numbers that change between calls into inputs of a graph."""
    torch._dynamo.reset()

    def call(value):
        return attention(Q, K, V, causal="top_left", **{name: value})

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=dynamic)
    for value in values:
        assert torch.equal(compiled(value), call(value))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_a_compiled_call_use_its_own_mask(backend):
    """A function is called with two masks before the first gradient."""
    torch._dynamo.reset()

    def gradients(function):
        inputs = [[each.clone().requires_grad_() for each in (Q, K, V)] for _ in range(2)]
        outputs = [function(*each, mask) for each, mask in zip(inputs, (ALLOWED, ~ALLOWED), strict=True)]
        return [x for o, each in zip(outputs, inputs) for x in torch.autograd.grad(o.square().sum(), each)]

    def call(q, k, v, mask):
        return attention(q, k, v, mask=mask)

    require_equal(gradients(torch.compile(call, backend=backend, fullgraph=True)), gradients(call))


DRAWS = {
    "a seed": (lambda x: x, lambda q, k, v, x: attention(q, k, v, dropout=cuflash.Dropout(0.3, x))),
    "an offset": (lambda x: x, lambda q, k, v, x: attention(q, k, v, dropout=cuflash.Dropout(0.3, 1, x))),
    "a dropout": (lambda x: cuflash.Dropout(0.3, x), lambda q, k, v, x: attention(q, k, v, dropout=x)),
    "a tensor": (torch.tensor, lambda q, k, v, x: attention(q, k, v, dropout=cuflash.Dropout(0.3, x))),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("name", DRAWS)
def test_seeds_and_offsets_are_inputs_of_one_graph(name, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    make, call = DRAWS[name]
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for number in range(12):
        x = make(number)
        require_equal(results(lambda *each: compiled(*each, x)), results(lambda *each: call(*each, x)))
    assert counter.frame_count <= 2  # the first number is a constant
    for seed in (2**63 - 1, 2**63, 2**64 - 1) if name == "a seed" else ():
        assert torch.equal(compiled(Q, K, V, seed), call(Q, K, V, seed))


def test_dropout_of_a_compiled_model_is_drawn_by_pytorch():
    torch._dynamo.reset()
    layer = torch.nn.Module()

    def call(q, k, v):
        return cuflash.torch.transformers_attention(layer, q, k, v, is_causal=True, dropout=0.3)[0]

    compiled, outputs = torch.compile(call, backend="aot_eager", fullgraph=True), []
    for function in (compiled, call):
        torch.manual_seed(0)
        outputs.append([function(Q, K, V) for _ in range(3)])
    require_equal(*outputs)
    assert not torch.equal(*outputs[0][:2])


def test_dynamic_lengths_have_the_same_bits():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for length in (32, 20, 9):
        tensors = [each[:, :, :length].contiguous() for each in (Q, K, V)]
        assert torch.equal(compiled(*tensors), attention(*tensors, causal=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_what_it_casts_for_pytorch(dtype):
    def call(q, k, v):
        return attention(q, k, v, causal=True)

    with torch.autocast("cpu", dtype):
        eager = call(Q, K, V)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(Q, K, V), eager)
        assert call(Q.double(), K.double(), V.double()).dtype == torch.float64
    assert eager.dtype == dtype and torch.equal(eager, call(Q.to(dtype), K.to(dtype), V.to(dtype)))


def test_operators_keep_the_rules_of_operators():
    options = 0, 0, None, None, False, None, None, None, None, None, False, *WORDS
    name = cuflash.torch._operators._named(("q", "k", "v"), *options)
    tensors = [each.clone().requires_grad_() for each in (Q, K, V)]
    torch.library.opcheck(torch.ops.cuflash.forward.default, (tensors, (), name))


WORDS = "auto", "auto", "ieee", False, 0, 0


def test_selective_checkpointing_keeps_results_of_attention(monkeypatch):
    counts = []
    forward = cuflash.torch._transformed.Transformed.forward
    monkeypatch.setattr(
        cuflash.torch._transformed.Transformed, "forward", lambda *tensors: counts.append(1) or forward(*tensors)
    )

    def policy(ctx, operator, *arguments, **options):
        is_ours = operator == torch.ops.cuflash.forward.default
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    def call(q, k, v):
        return attention(q.sin(), k.sin(), v.sin(), causal=True)

    def checkpointed(q, k, v):
        return checkpoint(
            call, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    ours = results(checkpointed)
    assert len(counts) == 1
    require_equal(ours, results(call))


def test_linearize_and_fake_tensors_see_operators():
    _, slope = torch.func.linearize(lambda q: attention(q, K, V), Q)
    torch.testing.assert_close(slope(K.repeat(1, 2, 1, 1)), torch.func.jvp(
        lambda q: attention(q, K, V), (Q,), (K.repeat(1, 2, 1, 1),)
    )[1])  # fmt: skip
    with torch._subclasses.FakeTensorMode() as mode:
        o, lse = attention(*map(mode.from_tensor, (Q, K, V)), return_lse=True)
    assert o.shape == Q.shape and lse.shape == Q.shape[:-1]


def with_out(q, k, v):
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    attention(2 * q, k, v, causal=True, bias=BIAS, out=(o, lse), return_lse=True)
    return o - lse[..., None]


def with_a_cache(q, k, v):
    cache = cuflash.KVCache(batch=2, num_kv_heads=2, capacity=64, head_dim=16, dtype="float32")
    cache.append(k, v)
    return torch.from_dlpack(cache.attention(q[:, :, -3:], causal=True))


def of_numpy(q, k, v):
    o, vjp = cuflash.attention_vjp(*(each.numpy() for each in (q, k, v)), causal=True)
    return torch.from_numpy(o + vjp(o).dq)


@torch._dynamo.disable
def printed(mask):
    assert repr(mask)
    return mask


def by_a_plan(q, k, v):
    plan = cuflash.plan(*(each.numpy() for each in (q, k, v)), causal=True)
    return torch.from_numpy(plan.forward(q.numpy(), k.numpy(), v.numpy())[0])


UNTRACED = {
    "outputs": with_out,
    "a cache": with_a_cache,
    "arrays of NumPy": of_numpy,
    "a plan": by_a_plan,
    "tensors in NumPy's call": lambda q, k, v: torch.from_dlpack(cuflash.attention(q, k, v, causal=True)),
    "a new intersection": lambda q, k, v: attention(q, k, v, mask=masks.Causal() & LENGTHS),
    "lengths in a list": lambda q, k, v: attention(q, k, v, mask=masks.Lengths(kv=[32, 20])),
    "lengths of NumPy": lambda q, k, v: attention(q, k, v, mask=masks.Lengths(kv=COUNTS)),
    "a function as mask": lambda q, k, v: attention(q, k, v, mask=masks.Causal() | (lambda b, h, i, j: j % 3 == 0)),
    "a mask that is printed": lambda q, k, v: attention(q, k, v, mask=printed(masks.Lengths(kv=torch.tensor([32, 9])))),
    "a new index": lambda q, k, v: attention(q, k, v, mask=BlockIndex.from_mask(masks.Causal(), 32, 32, 16)),
    "a new score": lambda q, k, v: attention(q, k, v, score=scores.Score(lambda s, b, h, i, j, t: s * t[h], t=SINK)),
    "a new score of the library": lambda q, k, v: attention(q, k, v, score=scores.alibi(SINK)),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("name", UNTRACED)
def test_calls_that_no_graph_contains_have_the_same_bits(name, backend):
    """Compiled functions break their graphs at these calls, whose NumPy code a compiler would change."""
    torch._dynamo.reset()
    assert torch.equal(torch.compile(UNTRACED[name], backend=backend)(Q, K, V), UNTRACED[name](Q, K, V))


@pytest.mark.parametrize("name", UNTRACED)
def test_one_graph_refuses_calls_that_no_graph_contains(name):
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(UNTRACED[name], backend="eager", fullgraph=True)(Q, K, V)
