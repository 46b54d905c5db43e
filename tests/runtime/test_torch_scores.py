"""Score functions, caps, biases and sinks of PyTorch's tensors: gradients follow `requires_grad`."""

from __future__ import annotations

import copy
from functools import reduce
from operator import matmul

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch_machine  # noqa: E402
from torch_machine import on_device  # noqa: E402

import cuflash.torch  # noqa: E402
from cuflash.calls._call import Call  # noqa: E402
from cuflash import masks, scores  # noqa: E402
from cuflash.scores import Score  # noqa: E402
from cuflash.testing import Example, assert_within_bounds  # noqa: E402
from refusals import reasons_of  # noqa: E402
from warped_score import warped  # noqa: E402

attention = cuflash.torch.attention


def drawn(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


Q, K, V, DO = drawn(2, 4, 6, 5), drawn(2, 2, 7, 5, seed=1), drawn(2, 2, 7, 3, seed=2), drawn(2, 4, 6, 3, seed=3)
BIAS, SINK, SLOPE = drawn(4, 1, 7, seed=4), drawn(4, seed=5), drawn(4, seed=6)
TABLE, PLACE = drawn(4, 9, seed=7), torch.arange(7) % 3


def options_of(bias=None, sink=None, slope=None, table=None, place=PLACE, to=lambda tensor: tensor):
    """Return the options of a call with these tensors."""
    options = {} if bias is None else {"bias": to(bias)}
    options |= {} if sink is None else {"sink": to(sink)}
    if slope is not None:
        options |= {"score": Score(warped, slope=to(slope), table=to(table), place=to(place)), "softcap": 5.0}
    return options


def as_numpy(tensor):
    return tensor.detach().numpy()


def expected(names, *, dtype, **tensors):
    """Return o, lse and gradients that calls with NumPy's arrays give."""
    q, k, v, do = (as_numpy(tensor).astype(dtype) for tensor in (Q, K, V, DO))
    options = options_of(**tensors, to=lambda x: as_numpy(x).astype(dtype) if x.is_floating_point() else as_numpy(x))
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, **options, wrt=tuple(names), causal="top_left", return_lse=True)
    gradients = vjp(do, lse)
    return o, lse, [*gradients, *(gradients[name] for name in names)]


EVERY = {"bias": BIAS, "sink": SINK, "slope": SLOPE, "table": TABLE}


def in_float32(tensor):
    """Return NumPy's array of a tensor, real numbers in float32."""
    return as_numpy(tensor.float() if tensor.is_floating_point() else tensor)


def require_bounds(results, *, do=DO, dlse=None, mask=None, wrt=(), sink=None, bias=None, score=None, softcap=None):
    """Require that float32 results of Q, K and V, by their names, are within their bounds of the exact ones.

    Options are those of a call with NumPy's arrays; the cap is first, then the bias, then the score.
    """
    parts = [] if score is None else [score if isinstance(score, Score) else Score(score)]
    parts += ([] if bias is None else [scores.bias(bias)]) + ([] if softcap is None else [scores.softcap(softcap)])
    arguments = {name: in_float32(tensor) for name, tensor in {"q": Q, "k": K, "v": V, "do": do}.items()}
    arguments |= {"dlse": dlse, "mask": mask, "sink": sink, "score": reduce(matmul, parts) if parts else None}
    named = {name: as_numpy(tensor.cpu()) for name, tensor in results.items()}
    others = {name: named.pop(name) for name in wrt}
    assert_within_bounds(Example(**arguments, wrt=wrt), **named, others=others)


def require_bounds_of_every_operand(results, needed, dlse):
    """Require that o, lse, and gradients of q, k, v and of these operands, in a call with all, are within bounds."""
    names = "o", "lse", "dq", "dk", "dv", *("dsink" if name == "sink" else name for name in needed)
    options = options_of(**EVERY, to=in_float32) | {"wrt": tuple(name for name in needed if name != "sink")}
    by_name = dict(zip(names, results, strict=True))
    require_bounds(by_name, dlse=dlse, mask=masks.Causal("top_left"), **options)


@pytest.mark.parametrize("name", EVERY)
def test_gradients_of_operands_are_those_of_differences(name):
    def call(leaf):
        options = options_of(**EVERY | {name: leaf})
        return attention(Q[:1, :, :3], K[:1], V[:1], **options, causal="top_left", return_lse=True)

    assert torch.autograd.gradcheck(call, [EVERY[name].clone().requires_grad_()])


@pytest.mark.parametrize("make", [scores.alibi, scores.temperature], ids=["alibi", "temperature"])
def test_scores_of_the_library_take_tensors_with_gradients(make):
    slopes = SLOPE.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(Q[:1], K[:1], V[:1], score=make(x)), [slopes])


class WithSlopes(torch.nn.Module):
    """Attention with slopes that are learnt, in a score that is made once."""

    def __init__(self, make=scores.alibi):
        super().__init__()
        self.slopes = torch.nn.Parameter(SLOPE.clone())
        self.scores = {"of": make(self.slopes)}

    def forward(self, q, k, v):
        return attention(q, k, v, score=self.scores["of"])


@pytest.mark.parametrize("make", [scores.alibi, lambda x: scores.within(scores.temperature(x), [0, 6], [0, 7])])
def test_a_copied_module_computes_with_its_own_parameter_and_trains_it(make):
    module = WithSlopes(make)
    before = module(Q, K, V).detach()
    copies = [copy.deepcopy(each) for each in [module] * 2]
    averaged = torch.optim.swa_utils.AveragedModel(module)
    sum(each(Q, K, V).square().sum() for each in copies).backward()
    assert module.slopes.grad is None and all(each.slopes.grad.count_nonzero() for each in copies)
    with torch.no_grad():
        module.slopes.fill_(3.0)
    assert all(torch.equal(each(Q, K, V), before) for each in (*copies, averaged))
    assert not torch.equal(module(Q, K, V), before)


def test_a_cast_module_says_that_the_score_is_to_be_made_again():
    module = WithSlopes().float()
    with pytest.raises(cuflash.UnsupportedProblem) as caught:
        module(Q.float(), K.float(), V.float())
    assert caught.value.reasons == (
        "slopes must be a float64 array of shape (n,), as when the Score was created; got an array of shape (4,) and "
        "dtype float32: create the Score again after a cast, for example in a module's forward method",
    )
    module.scores["of"] = scores.alibi(module.slopes)
    assert module(Q.float(), K.float(), V.float()).requires_grad


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_packed_sequences_have_scores_of_tensors_and_of_none(kind):
    """The starts of the sequences are arrays of the library's own."""
    q_offsets, kv_offsets = kind([0, 2, 6]), kind([0, 3, 7])
    mask = masks.Sequences(q_offsets, kv_offsets)

    def of(slopes):
        return scores.within(scores.alibi(slopes), q_offsets, kv_offsets)

    o, vjp = cuflash.attention_vjp(*map(as_numpy, (Q, K, V)), mask=mask, score=of(as_numpy(SLOPE)), wrt="slopes")
    slopes = SLOPE.clone().requires_grad_()
    actual = attention(Q, K, V, mask=mask, score=of(slopes))
    assert (as_numpy(actual) == o).all()
    (dslopes,) = torch.autograd.grad(actual, slopes, DO)
    assert (as_numpy(dslopes) == vjp(as_numpy(DO))["slopes"]).all()
    plain = scores.within(lambda s, b, h, i, j: s - 0.5 * abs(i - j), q_offsets, kv_offsets)
    halves = of(torch.full((4,), 0.5, dtype=torch.float64))
    assert torch.equal(attention(Q, K, V, mask=mask, score=plain), attention(Q, K, V, mask=mask, score=halves))


@pytest.mark.parametrize("make", [torch.nn.Parameter, lambda x: x, lambda x: x[None].requires_grad_()])
def test_a_scale_or_cap_that_is_a_tensor_is_refused_and_a_temperature_is_learnt(make):
    scale = make(torch.tensor(0.3, dtype=torch.float64))
    for call in (attention, cuflash.attention):
        (reason,) = reasons_of(call, Q, K, V, scale=scale)
        assert reason.startswith("scale must be a finite number or None; got ") and "scores.temperature(" in reason
        (reason,) = reasons_of(call, Q, K, V, softcap=scale)
        assert reason.startswith("softcap must be a positive finite number; got ")
    per_head = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)
    actual = attention(Q, K, V, scale=1.0, score=scores.temperature(per_head))
    torch.testing.assert_close(actual, attention(Q, K, V, scale=0.3))
    assert torch.autograd.grad(actual.sum(), per_head)[0].count_nonzero()


@pytest.mark.parametrize("needed", [("bias",), ("slope", "sink"), ("table",), tuple(EVERY)])
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_only_operands_that_require_gradients_have_them(tmp_path, monkeypatch, place, needed):
    dtype = np.float64 if place == "cpu" else np.float32
    of_torch = torch.float64 if place == "cpu" else torch.float32
    names = [name for name in ("sink", "slope", "table", "bias") if name in needed]
    o, lse, gradients = expected(sorted(names, key=list(needed).index), dtype=dtype, **EVERY)

    def check(send):
        def to(tensor):
            return send(tensor.to(of_torch) if tensor.is_floating_point() else tensor)

        q, k, v = (to(tensor).requires_grad_() for tensor in (Q, K, V))
        leaves = {name: to(tensor).requires_grad_(name in needed) for name, tensor in EVERY.items()}
        for _ in range(2):
            options = options_of(**leaves, place=to(PLACE))
            ours = attention(q, k, v, **options, causal="top_left", return_lse=True)
            results = torch.autograd.grad(
                ours, [q, k, v, *(leaves[name] for name in needed)], [DO.to(of_torch), torch.tensor(lse)]
            )
            assert all(mine.dtype == of_torch for mine in (*ours, *results))
            if place == "gpu":
                require_bounds_of_every_operand([*ours, *results], needed, lse)
                continue
            for mine, theirs in zip([*ours, *results], [o, lse, *gradients], strict=True):
                assert (as_numpy(mine) == theirs).all()

    if place == "cpu":
        check(torch.clone)
    else:
        with torch_machine.installed(monkeypatch, tmp_path / "cache"):
            check(on_device)


@pytest.mark.gpu
@pytest.mark.parametrize("needed", [(), ("bias", "slope"), ("sink", "table"), ("table", "bias", "slope", "sink")])
def test_operands_on_a_gpu_have_gradients_captured_or_not(needed):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")

    def to(tensor):
        return tensor.to("cuda", torch.float32 if tensor.is_floating_point() else None)

    q, k, v = (to(tensor).requires_grad_() for tensor in (Q, K, V))
    leaves = {name: to(tensor).requires_grad_(name in needed) for name, tensor in EVERY.items()}
    dlse = np.random.default_rng(8).standard_normal(DO.shape[:-1], dtype=np.float32)
    place, cotangents = to(PLACE), [to(DO), torch.from_numpy(dlse).to("cuda")]

    def step():
        ours = attention(q, k, v, **options_of(**leaves, place=place), causal="top_left", return_lse=True)
        return [*ours, *torch.autograd.grad(ours, [q, k, v, *(leaves[name] for name in needed)], cotangents)]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        require_bounds_of_every_operand(step(), needed, dlse)
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        graph.replay()
    torch.cuda.synchronize()
    require_bounds_of_every_operand(captured, needed, dlse)


@pytest.mark.parametrize("executor", ["cpu", "sim"])
def test_results_are_those_of_the_same_arrays(executor):
    arguments = options_of(**EVERY, to=lambda x: x.float() if x.is_floating_point() else x)
    ours = attention(
        Q.float(), K.float(), V.float(), **arguments, causal="top_left", executor=executor, return_lse=True
    )
    assert not ours[0].requires_grad
    arrays, options = map(in_float32, (Q, K, V)), options_of(**EVERY, to=in_float32)
    theirs = cuflash.attention(*arrays, **options, causal="top_left", executor=executor, return_lse=True)
    assert all((as_numpy(mine) == right).all() for mine, right in zip(ours, theirs, strict=True))
    require_bounds(dict(zip(("o", "lse"), ours)), mask=masks.Causal("top_left"), **options)


def test_gradients_of_a_gathered_table_repeat_on_kernels():
    """The gradient is within its bound in both forms, and gradients that no tensor requires are not computed."""
    tensors = [tensor.float().requires_grad_() for tensor in (Q, K, V)]
    options = options_of(slope=SLOPE, table=TABLE, to=in_float32)
    for deterministic in (False, True):
        table = TABLE.float().requires_grad_()
        arguments = options_of(slope=SLOPE.float(), table=table)
        attention(*tensors, **arguments, executor="sim", deterministic=deterministic).sum().backward()
        require_bounds({"table": table.grad}, do=torch.ones_like(DO), wrt=("table",), **options)
        assert table.grad.any()


def test_a_repeated_call_on_a_gpu_reads_new_numbers_and_tensors(tmp_path, monkeypatch):
    """Another number is an argument of the same kernels; another function, bias or sink makes another call."""
    q, k, v = (tensor.float() for tensor in (Q, K, V))
    calls = [
        {"softcap": 2.0}, {"softcap": 3.0}, {}, {"bias": BIAS.float()}, {"sink": SINK.float()},
        {"bias": 2 * BIAS.float()}, {"score": scores.alibi(SLOPE.float())},
        {"score": scores.temperature(SLOPE.float())}, {"score": lambda s, b, h, i, j: s + 1.5 * h},
        {"score": lambda s, b, h, i, j: s * 1.5},
    ]  # fmt: skip

    def sent(options, send=on_device):
        score = options.get("score")
        if isinstance(score, Score):
            return {"score": score._with_arrays({name: send(array) for name, array in score.arrays.items()})}
        return {name: send(each) if isinstance(each, torch.Tensor) else each for name, each in options.items()}

    for options in calls:
        require_bounds({"o": attention(q, k, v, **options)}, **sent(options, as_numpy))
    with torch_machine.installed(monkeypatch, tmp_path / "cache"):
        for _ in range(2):
            for options in calls:
                o = attention(*map(on_device, (q, k, v)), **sent(options))
                require_bounds({"o": o}, **sent(options, as_numpy))
        monkeypatch.setattr(Call, "plan", lambda *arguments: pytest.fail("planned again"))
        attention(*map(on_device, (q, k, v)), **sent({"score": scores.alibi(2 * SLOPE.float())}))


def test_calls_for_numpy_take_scores_over_tensors_without_gradients():
    q, k, v = map(as_numpy, (Q, K, V))
    expected = cuflash.attention(q, k, v, score=scores.alibi(as_numpy(SLOPE)), bias=as_numpy(BIAS))
    assert (cuflash.attention(q, k, v, score=scores.alibi(SLOPE), bias=BIAS) == expected).all()
    ready = cuflash.plan(q, k, v, score=scores.alibi(SLOPE), bias=BIAS)
    assert (ready.forward(q, k, v)[0] == expected).all()
    assert float(scores.alibi(SLOPE)(0.0, 0, 1, 3, 1)) == -2 * float(SLOPE[1])
    learnt = {"bias": BIAS.clone().requires_grad_(), "slopes": SLOPE.clone().requires_grad_()}
    for call in (cuflash.attention, cuflash.plan):
        with pytest.raises(cuflash.UnsupportedProblem) as caught:
            call(q, k, v, score=scores.alibi(learnt["slopes"]), bias=learnt["bias"])
        assert [reason.partition(" must not require gradients, which NumPy calls")[0] for reason in (
            caught.value.reasons
        )] == [*learnt]  # fmt: skip


BAD = {
    "a bias of NumPy": (lambda: {"bias": as_numpy(BIAS)}, TypeError, "bias must be a torch.Tensor; got an array of sh"),
    "a captured array of NumPy": (
        lambda: {"score": scores.alibi(as_numpy(SLOPE))}, TypeError, "slopes must be a torch.Tensor; got an array of"
    ),
    "a bias that is not an array": (lambda: {"bias": 3.0}, TypeError, "bias must be an array; got 3.0"),
    "a bool bias": (lambda: {"bias": BIAS > 0}, cuflash.UnsupportedProblem, "bias must be float16.*write mask=bias"),
    "an eighth of a bias": (
        lambda: {"bias": BIAS.to(torch.float8_e4m3fn)}, cuflash.UnsupportedProblem, "bias must be float16, bfloat16"
    ),
    "complex slopes": (
        lambda: {"score": scores.alibi(SLOPE.cfloat())}, cuflash.UnsupportedProblem,
        "slopes must be float16, .*; got torch.complex64: cast them to float32$",
    ),
    "a bias without data": (lambda: {"bias": BIAS.to("meta")}, cuflash.UnsupportedProblem, "bias must hold data; got"),
    "a bias of another length": (lambda: {"bias": BIAS[..., :3]}, cuflash.UnsupportedProblem, "bias must broadcast to"),
    "slopes of fewer heads": (
        lambda: {"score": scores.alibi(SLOPE[:3])},
        cuflash.UnsupportedProblem,
        r"axis 0 of slopes must have an element for each of 4 query heads, since its index is h; got shape \(3,\)",
    ),
    "a cap of 0": (lambda: {"softcap": 0.0}, cuflash.UnsupportedProblem, "softcap must be a positive finite number"),
    "no function": (lambda: {"score": 3}, TypeError, "score must be a Score or a function"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("has_graph", [False, True])
def test_wrong_operands_are_named(kind, has_graph):
    make, error, sentence = BAD[kind]
    with pytest.raises(error, match=sentence):
        attention(Q.clone().requires_grad_(has_graph), K, V, **make())


def test_float64_operands_beside_float32_have_float64_gradients():
    q, k, v, do = (tensor.float() for tensor in (Q, K, V, DO))
    wide = [tensor.clone().requires_grad_() for tensor in (BIAS, SINK, SLOPE)]
    narrow = [tensor.detach().float().requires_grad_() for tensor in wide]
    results = []
    for bias, sink, slope in (wide, narrow):
        o = attention(q, k, v, bias=bias, sink=sink, score=scores.alibi(slope))
        results.append((o, *torch.autograd.grad(o, (bias, sink, slope), do)))
    assert [x.dtype for x in results[0]] == [torch.float32, torch.float64, torch.float64, torch.float64]
    for first, second in zip(*results):
        assert torch.equal(first.float(), second)
