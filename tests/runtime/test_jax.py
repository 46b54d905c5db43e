"""JAX's arrays as arguments and results: on the CPU, traced or not, and on a GPU where there is one."""

from __future__ import annotations

import gc
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

from jax import test_util  # noqa: E402

import cuflash.jax  # noqa: E402
from cuflash.calls._call import Call  # noqa: E402
from cuflash import BlockIndex, masks, scores  # noqa: E402
from cuflash.testing import Example, assert_within_bounds  # noqa: E402
import cupy_machine  # noqa: E402
from executors import GPU  # noqa: E402
from library_parts import part  # noqa: E402
from refusals import reasons_of  # noqa: E402
import xla_handler  # noqa: E402

jnp = jax.numpy
attention = cuflash.jax.attention


@pytest.fixture(autouse=True)
def on_the_host():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


RNG = np.random.default_rng(0)
Q, K, V, DO = (RNG.standard_normal((2, heads, 20, 16), dtype=np.float32) for heads in (4, 2, 2, 4))


def jax_inputs():
    return [jnp.asarray(array) for array in (Q, K, V)]


def pulled_back(call, arrays, do, dlse):
    _, vjp = jax.vjp(call, *arrays)
    return vjp((do, dlse))


# Also subnormal numbers, which JAX's threads flush to 0.
@pytest.mark.parametrize(("executor", "way"), [("auto", "plain"), ("auto", "jit"), ("sim", "jit")])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
def test_results_and_gradients_are_those_of_the_same_arrays(executor, dtype, way):
    q, k, v, do = (array.astype(dtype) for array in (Q, K, V, DO))
    options = {"causal": True, "executor": executor, "deterministic": True, "return_lse": True}
    (host_o, host_lse), vjp = cuflash.attention_vjp(q, k, v, **options)

    def call(q, k, v):
        return attention(q, k, v, **options)

    ours = [jnp.asarray(array) for array in (q, k, v)]
    jitted = jax.jit if way == "jit" else lambda function: function
    o, lse = jitted(call)(*ours)
    results = jitted(lambda *x: pulled_back(call, x[:3], *x[3:]))(*ours, jnp.asarray(do), lse)
    assert o.dtype == dtype and lse.dtype == np.float32 and o.devices() == ours[0].devices()
    assert (np.asarray(o) == host_o).all() and (np.asarray(lse) == host_lse).all()
    for each, expected in zip(results, vjp(do, host_lse)):
        assert each.dtype == dtype and (np.asarray(each) == expected).all()


def test_gradients_of_gradients_of_jit_and_vmap():
    def loss(q, k, v):
        return (attention(q, k, v, window=(3, 0)) ** 2).sum()

    q, k, v = jax_inputs()
    expected = jax.grad(loss)(q, k, v)
    assert (jax.jit(jax.vmap(jax.grad(loss)))(q, k, v) == expected).all()
    assert (jax.vmap(jax.grad(loss))(q, k, v) == expected).all()
    assert (jax.grad(lambda q: jax.jit(loss)(q, k, v))(q) == expected).all()
    assert (jax.jit(jax.grad(jax.checkpoint(loss)))(q, k, v) == expected).all()


def test_float64_where_jax_has_it():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(array.astype(np.float64)) for array in (Q, K, V))
        o, lse = jax.jit(lambda q, k, v: attention(q, k, v, return_lse=True))(q, k, v)
        expected = cuflash.attention(*map(np.asarray, (q, k, v)))
        assert o.dtype == lse.dtype == np.float64 and (np.asarray(o) == expected).all()


def test_gradients_of_broadcast_axes_are_summed():
    q, k, v = jax_inputs()
    dq, dk, dv = jax.jit(jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2)))(q, k[:1], v[0])
    _, vjp = cuflash.attention_vjp(Q, K[:1], V[0])
    assert all((np.asarray(ours) == theirs).all() for ours, theirs in zip((dq, dk, dv), vjp(np.ones_like(Q))))


# Arrays that broadcast over the batch, without a batch, and without heads; jax.vmap adds an axis to two of three.
@pytest.mark.parametrize("arrays", [(Q, K[:1], V[0]), (Q[0], K[0], V[0]), (Q[0, 0], K[0, 0], V[0, 0])])
@pytest.mark.parametrize("way", ["jit", "vmap"])
def test_orders_in_memory_have_the_same_bits(arrays, way):
    def call(memory, *arrays):
        o, pull = jax.vjp(partial(attention, mask=masks.Causal(), memory=memory), *arrays)
        return o, pull(jnp.ones_like(o))

    def results(memory):
        function, inputs = partial(call, memory), [jnp.asarray(array) for array in arrays]
        if way == "vmap":
            function, inputs = jax.vmap(function, (0, None, 0)), [jnp.stack([x, 2 * x]) for x in inputs]
            inputs[1] = inputs[1][0]
        return jax.tree.leaves(jax.jit(function)(*inputs))

    for first, second in zip(results("heads_first"), results("tokens_first"), strict=True):
        assert first.shape == second.shape and (first == second).all()


def test_places_are_those_of_the_whole():
    q, k, v = jax_inputs()
    options = {"causal": True, "dropout": cuflash.Dropout(0.5, 3), "q_start": 8}
    expected = cuflash.attention(Q[..., 8:, :], K, V, **options)
    step = jax.jit(lambda q: attention(q, k, v, **options))
    assert (np.asarray(step(q[..., 8:, :])) == expected).all()
    assert (np.asarray(jax.vmap(step)(q[None, ..., 8:, :])) == expected).all()
    assert (np.asarray(attention(q[..., 8:, :], k, v, **options)) == expected).all()


@pytest.mark.parametrize(
    "make",
    [
        jnp.asarray, np.asarray, lambda cells: masks.Causal() & masks.Dense(jnp.asarray(cells)),
        lambda cells: BlockIndex.from_mask(masks.Dense(cells), 20, 20, 4),
    ],
    ids=["jax", "numpy", "mask of an array", "index"],
)  # fmt: skip
def test_masks_are_arrays_and_indexes(make):
    blocks = RNG.random((20, 20)) < 0.6
    expected = cuflash.attention(Q, K, V, mask=make(blocks))
    call = partial(attention, mask=make(blocks))
    assert (np.asarray(call(*jax_inputs())) == expected).all() and (
        np.asarray(jax.jit(call)(*jax_inputs())) == expected
    ).all()


def test_blocks_that_each_query_chooses_are_taken_with_their_gradients():
    blocks, counts = RNG.integers(-1, 4, (2, 20, 3)).astype(np.int32), np.full((2, 20), 2)
    mask = masks.ChosenBlocks(jnp.asarray(blocks), 5, counts=jnp.asarray(counts))
    same = masks.ChosenBlocks(blocks, 5, counts=counts)
    assert (np.asarray(mask.toarray(20, num_heads=4)) == same.toarray(20, num_heads=4)).all()
    assert mask.index(20) == same.index(20) and mask.distinct(queries=4) == same.distinct(queries=4)
    o, vjp = jax.vjp(partial(attention, mask=mask), *jax_inputs())
    expected, host_vjp = cuflash.attention_vjp(Q, K, V, mask=same)
    assert (np.asarray(o) == expected).all()
    assert all((np.asarray(x) == y).all() for x, y in zip(vjp(jnp.asarray(Q)), host_vjp(Q)))
    traced = jax.jit(lambda blocks: attention(*jax_inputs(), mask=masks.ChosenBlocks(blocks, 5)))(jnp.asarray(blocks))
    assert (np.asarray(traced) == cuflash.attention(Q, K, V, mask=masks.ChosenBlocks(blocks, 5))).all()


def test_block_numbers_within_sequences_may_be_traced():
    def packed(blocks, offsets):
        return masks.ChosenBlocks(blocks, 3, sequences=masks.Sequences(offsets))

    blocks, offsets = RNG.integers(-1, 2, (2, 20, 2)).astype(np.int32), np.array([0, 5, 13, 20])
    call = jax.jit(lambda *arrays: attention(*jax_inputs(), mask=packed(*arrays)))
    traced = call(jnp.asarray(blocks), jnp.asarray(offsets))
    expected = cuflash.attention(Q, K, V, mask=packed(blocks, offsets))
    assert (np.asarray(traced) == expected).all()


@pytest.mark.parametrize("kind", ["index", "array"])
def test_calls_with_one_mask_plan_once(monkeypatch, kind):
    blocks = RNG.random((20, 20)) < 0.6
    index, planned, plans = BlockIndex.from_mask(masks.Dense(blocks), 20, 20, 4), Call.plan, []
    monkeypatch.setattr(Call, "plan", lambda *args, **options: plans.append(args) or planned(*args, **options))
    mask = index if kind == "index" else blocks
    for _ in range(2):
        actual = attention(*jax_inputs(), mask=mask)
    o, vjp = jax.vjp(partial(attention, mask=mask), *jax_inputs())
    gradients = vjp(jnp.asarray(DO))
    assert (np.asarray(o) == np.asarray(actual)).all() and len(plans) == 1
    expected, host_vjp = cuflash.attention_vjp(Q, K, V, mask=mask)
    assert (np.asarray(actual) == expected).all()
    assert all((np.asarray(ours) == theirs).all() for ours, theirs in zip(gradients, host_vjp(DO)))
    if kind == "array":
        mask[...] = ~mask
        assert (np.asarray(attention(*jax_inputs(), mask=mask)) == cuflash.attention(Q, K, V, mask=mask)).all()


def check_equal_calls(monkeypatch, library):
    """Check that JAX traces and lowers equal calls and their gradients once, also if masks of arrays differ."""
    of_call, primitives, work = part(library, "jax._call").JaxCall, part(library, "jax._primitives"), []
    of, run_by_xla = of_call.of, primitives.run_by_xla
    part(library, "planning._call_cache").CALLS.clear()  # equal calls of another test may be in the cache
    monkeypatch.setattr(of_call, "of", lambda *args: work.append("traced") or of(*args))
    monkeypatch.setattr(primitives, "run_by_xla", lambda *args: work.append("lowered") or run_by_xla(*args))
    dropout = library.Dropout(0.5, 3)
    for dtype in (np.float32, np.float16):
        q, k, v, do = (array.astype(dtype) for array in (Q, K, V, DO))
        arrays = [jnp.asarray(array) for array in (q, k, v)]
        for turn in range(3):
            allowed = np.random.default_rng(turn).random((20, 20)) < 0.6
            call = partial(part(library, "jax").attention, softcap=7.0, mask=jnp.asarray(allowed), dropout=dropout)
            work.clear()
            o = call(*arrays)
            differentiated, vjp = jax.vjp(call, *arrays)
            gradients = vjp(jnp.asarray(do))
            assert set(work) == (set() if turn else {"traced", "lowered"})
            expected, host_vjp = library.attention_vjp(q, k, v, softcap=7.0, mask=allowed, dropout=dropout)
            assert (np.asarray(o) == expected).all() and (o == differentiated).all()
            assert all((np.asarray(ours) == theirs).all() for ours, theirs in zip(gradients, host_vjp(do)))


def test_equal_calls_and_their_gradients_are_traced_once(monkeypatch):
    check_equal_calls(monkeypatch, cuflash)


class _OnMachine:
    """The function that XLA calls on a GPU, with buffers on the host and the null stream."""

    def __init__(self, runner, runs):
        self._runner, self.scratch, self._runs = runner, runner.scratch, runs
        self.is_plain, self.lists, self.native = runner.is_plain, runner.lists, runner.native
        self.number = runner.number if runner.is_plain else None

    def __call__(self, context, results, *buffers):
        for buffer in results:  # memory of a device holds anything
            np.asarray(buffer).reshape(-1).view(np.uint8)[...] = 0xFF
        with self._runs._subnormal_numbers():
            self._runner(SimpleNamespace(stream=0), results, *buffers)


def on_a_machine(monkeypatch, machine, library, is_native=False):
    """Let JAX's CPU be the stand-in for a GPU; with `is_native`, XLA launches kernels without Python."""
    runs, xla_gpu = part(library, "jax._runs"), part(library, "executors.xla_gpu")

    def as_cupy(buffer, view, device):
        host = np.asarray(buffer) if view.shape else np.asarray(buffer).view(np.uint64)[0:1].reshape(())
        return cupy_machine.Ndarray(np.broadcast_to(host, view.shape) if host.shape != view.shape else host, device)

    part(library, "planning._call_cache").CALLS.clear()
    gc.collect()  # functions that launch kernels on another stand-in
    monkeypatch.setattr(xla_gpu, "address", lambda buffer: np.asarray(buffer).ctypes.data)
    monkeypatch.setattr(xla_gpu, "as_cupy", as_cupy)
    monkeypatch.setattr(xla_gpu, "as_cupy_stream", lambda ptr: machine.streams[ptr])
    monkeypatch.setattr(runs, "_bytes_of", lambda array: jnp.array(array.host.reshape(-1).view(np.uint8)))
    monkeypatch.setattr(runs, "handler", lambda: xla_handler.on_cpu(library) if is_native else None)
    monkeypatch.setattr(part(library, "masks.fields"), "is_on_cuda", lambda name, value: isinstance(value, jax.Array))
    monkeypatch.setitem(runs.RUNNERS, "cpu", lambda *arguments: _OnMachine(runs.OnGpu(*arguments), runs))


DEVICE_MASKS = {
    "dense": lambda x, of: of.Dense(x), "an array": lambda x, of: x,
    "causal": lambda x, of: of.Causal() & of.Dense(x), "lengths": lambda x, of: of.Lengths(kv=x[0].sum(keepdims=True)),
}  # fmt: skip


def check_device_masks(monkeypatch, machine, library):
    """Check that kernels list masks on a JAX device in repeated calls, without planning again."""
    module = part(library, "jax")
    on_a_machine(monkeypatch, machine, library)
    q, k, v, do = (array.astype(np.float16) for array in (Q, K, V, DO))
    on_device = [jnp.asarray(array) for array in (q, k, v)]
    of_library, plans = part(library, "calls._call").Call, []
    planned = of_library.of
    monkeypatch.setattr(of_library, "of", lambda *args, **options: plans.append(args) or planned(*args, **options))
    for make in DEVICE_MASKS.values():
        jitted = jax.jit(lambda x, q, k, v, make=make: module.attention(q, k, v, mask=make(x, library.masks)))
        for turn in range(3):
            blocks = (np.random.default_rng(turn).random((20, 20)) < 0.6) | np.eye(20, dtype=bool)
            example = GPU.rounded(Example(q=q, k=k, v=v, do=do, mask=make(blocks, masks)))
            o = module.attention(*on_device, mask=make(jnp.asarray(blocks), library.masks))
            assert_within_bounds(example, o=np.asarray(o))
            assert (jitted(jnp.asarray(blocks), *on_device) == o).all()
            call = partial(module.attention, mask=make(jnp.asarray(blocks), library.masks))
            o, pull = jax.vjp(call, *on_device)
            results = dict(zip(("dq", "dk", "dv"), map(np.asarray, pull(jnp.asarray(do)))))
            assert_within_bounds(example, o=np.asarray(o), **results)
            assert turn == 0 or all(options.executor == "sim" for *_, options in plans)  # those of bounds
            plans.clear()


def test_masks_on_a_device_are_listed_by_kernels(tmp_path, monkeypatch):
    with cupy_machine.installed(monkeypatch, tmp_path) as machine:
        check_device_masks(monkeypatch, machine, cuflash)
        assert {"classify", "intervals"} < set(machine.launched)


# Wrong arguments.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"executor": "gpu"}, "executor='gpu' takes arrays on 'gpu'; got q on 'cpu': move them"),
        ({"executor": []}, "executor must be 'auto', 'cpu', 'gpu', 'sim'; got []"),
        ({"return_lse": 1}, "return_lse must be True or False; got 1"),
        ({"memory": "heads"}, "memory must be 'heads_first' or 'tokens_first'; got 'heads'"),
        ({"memory": None}, "memory must be 'heads_first' or 'tokens_first'; got None"),
        ({"mask": 3}, "mask must be"),
        ({"dropout": 0.1}, "dropout must be a Dropout; got 0.1: write dropout=cuflash.Dropout(0.1, seed=0)"),
        ({"score": lambda s, b, h, i, j: jnp.tanh(s)}, "<lambda>, line "),
        ({"causal": "yes"}, "causal must be True, False, 'bottom_right' or 'top_left'; got 'yes'"),
    ],
)
@pytest.mark.parametrize("is_traced", [False, True])
def test_wrong_arguments_are_named_when_the_call_is_made_or_traced(options, sentence, is_traced):
    def call(q, k, v):
        return attention(q, k, v, **options)

    try:
        (jax.jit(call) if is_traced else call)(*jax_inputs())
    except (TypeError, cuflash.UnsupportedProblem) as error:
        assert sentence in str(error)
    else:
        raise AssertionError("is taken")


def test_wrong_arrays_are_named():
    q, k, v = jax_inputs()
    reasons = reasons_of(attention, q.astype(int), k, v)
    assert reasons[0].startswith("q's dtype must be one of float16, bfloat16, float32, float64; got int")
    (reason,) = reasons_of(attention, q, k[..., :3], v)
    assert reason == "k must have q's head_dim=16 as its last axis; got shape (2, 2, 20, 3)"
    for name in "qkv":
        with pytest.raises(TypeError, match=rf"{name} must be a jax.Array; got 3.0: convert it with jax.numpy.asarray"):
            attention(**{"q": q, "k": k, "v": v, name: 3.0})


def test_a_shape_without_data_is_planned_as_shape_and_dtype():
    with pytest.raises(TypeError, match=r"q must be an array; got ShapeDtypeStruct: it holds no data, and plan"):
        cuflash.plan(*(jax.ShapeDtypeStruct((4, 8), jnp.float32),) * 3)


TRACED = {
    "a scale": (
        lambda x: {"scale": x[0, 0]}, "scale must be a Python number when JAX traces the call; got a tracer: name it "
        "in static_argnames of jax.jit, or multiply q by it",
    ),
    "a softcap": (
        lambda x: {"softcap": x[0, 0]}, "softcap must be known when JAX traces the call; got a tracer: name softcap in "
        "static_argnames of jax.jit",
    ),
    "causal": (lambda x: {"causal": x[0, 0] > 0}, "causal must be known when JAX traces the call; got a tracer:"),
    "a window": (lambda x: {"window": (x[0, 0].astype(int), 0)}, "window must be known when JAX traces the call;"),
    "a seed": (
        lambda x: {"dropout": cuflash.Dropout(0.5, x[0, 0].astype(int))}, "seed must be a key of jax.random.key, two "
        "numbers of uint32, or a 0-d array of int64 or uint64; got shape () and int32: pass jax.random.bits(key, 2, ",
    ),
    "an offset of dropout": (
        lambda x: {"dropout": cuflash.Dropout(0.5, 1, x[0, 0].astype(int))},
        "offset must be an int from 0 to 2^32 - 1; got an array of shape () and dtype int32: fold the training step ",
    ),
    "offsets": (
        lambda x: {"score": scores.within(lambda s, b, h, i, j: s + i, x[0].astype(int))},
        "q_offsets must be known when JAX traces the call; got a tracer: close over the offsets, or name them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRACED)
@pytest.mark.parametrize("transform", [jax.jit, lambda call: lambda x: jax.vmap(call)(x[None])], ids=["jit", "vmap"])
def test_options_that_are_traced_are_refused(kind, transform):
    make, sentence = TRACED[kind]
    (reason,) = reasons_of(transform(lambda x: attention(*jax_inputs(), **make(x))), jnp.ones((20, 20)))
    assert reason.startswith(sentence)


def test_what_is_said_of_traced_options_can_be_done():
    allowed, (q, k, v) = jnp.tri(20, dtype=bool), jax_inputs()
    as_bias = jax.jit(lambda cells: attention(q, k, v, bias=jnp.where(cells, 0, -jnp.inf)))(allowed)
    np.testing.assert_allclose(as_bias, attention(q, k, v, mask=allowed), atol=1e-6)
    scaled = jax.jit(lambda scale: attention(q * scale, k, v, scale=1))(jnp.float32(0.5))
    np.testing.assert_allclose(scaled, attention(q, k, v, scale=0.5), atol=1e-6)
    step = jax.jit(lambda q, seed: attention(q, k, v, dropout=cuflash.Dropout(0.5, seed)), static_argnames="seed")
    assert all((step(q, seed=seed) == attention(q, k, v, dropout=cuflash.Dropout(0.5, seed))).all() for seed in (1, 2))


@pytest.mark.parametrize("to", [np.asarray, lambda array: array.tolist()], ids=["numpy", "list"])
def test_arrays_of_numpy_and_lists_are_taken(to):
    q, k, v = jax_inputs()
    allowed = np.tri(20, dtype=bool)
    expected = attention(q, k, v, mask=allowed, bias=jnp.ones((4, 20, 20)), sink=jnp.ones(4))
    actual = attention(to(Q), to(K), to(V), mask=allowed, bias=to(np.ones((4, 20, 20))), sink=to(np.ones(4)))
    assert isinstance(actual, jax.Array) and (actual == expected).all()


@pytest.mark.parametrize("way", ["grad", "value_and_grad", "vjp", "jit", "checkpoint"])
def test_numpy_arguments_of_transformations_are_differentiated(way):
    def loss(q, k, v, bias, sink, slopes):
        score = scores.alibi(slopes)
        o, lse = attention(q, k, v, bias=bias, sink=sink, score=score, causal=True, return_lse=True)
        return (o**2).sum() + lse.sum()

    arrays = Q, K, V, *(RNG.standard_normal(shape, dtype=np.float32) for shape in ((20, 20), 4, 4))
    argnums = tuple(range(len(arrays)))
    expected = jax.grad(loss, argnums)(*map(jnp.asarray, arrays))
    results = {
        "grad": lambda: jax.grad(loss, argnums)(*arrays),
        "value_and_grad": lambda: jax.value_and_grad(loss, argnums)(*arrays)[1],
        "vjp": lambda: jax.vjp(loss, *arrays)[1](jnp.float32(1)),
        "jit": lambda: jax.jit(jax.grad(loss, argnums))(*arrays),
        "checkpoint": lambda: jax.grad(jax.checkpoint(loss), argnums)(*arrays),
    }[way]()
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_an_array_of_numpy_may_change_after_the_call():
    q, (_, k, v) = Q.copy(), jax_inputs()
    expected = jax.grad(lambda q: attention(q, k, v).sum())(jnp.asarray(Q))
    _, vjp = jax.vjp(lambda k: attention(q, k, v).sum(), k)
    _, of_numpy = jax.vjp(lambda q: attention(q, k, v).sum(), q)
    dk = jax.grad(lambda k: attention(jnp.asarray(Q), k, v).sum())(k)
    q[...] = 0
    assert (vjp(jnp.float32(1))[0] == dk).all() and (of_numpy(jnp.float32(1))[0] == expected).all()


def test_gradients_are_those_of_differences():
    with jax.enable_x64(True):
        q, k, v = (array[:1].astype(np.float64) for array in (Q, K, V))
        test_util.check_grads(partial(attention, causal=True), (q, k, v), order=1, modes=("rev",))


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_gradients_in_shard_map_are_those_outside(is_traced, check_vma):
    def call(q, k, v, sink, slopes):
        return attention(q, k, v, sink=sink, score=scores.alibi(slopes), causal=True, return_lse=True)

    def loss(function, *arrays):
        o, lse = function(*arrays)
        return (o**2).sum() + lse.sum()

    arrays = *jax_inputs(), jnp.ones(4), jnp.arange(4.0)
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("part",)), jax.sharding.PartitionSpec
    placed = spec("part"), spec("part"), spec("part"), spec(), spec()
    mapped = jax.shard_map(call, mesh=mesh, in_specs=placed, out_specs=spec("part"), check_vma=check_vma)
    argnums = 1, 2, 3, 4, 5
    expected = jax.grad(loss, argnums)(call, *arrays)
    of = jax.grad(partial(loss, mapped), tuple(range(5)))
    for ours, theirs in zip((jax.jit(of) if is_traced else of)(*arrays), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
def test_arrays_on_a_gpu_are_taken_where_they_lie(dtype):
    try:
        (device, *_) = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX finds no GPU: {error}")
    q, k, v, do = (jax.device_put(jnp.asarray(array.astype(dtype)), device) for array in (Q, K, V, DO))

    def call(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True)

    (o, lse), vjp = jax.vjp(call, q, k, v)
    results = {"o": o} | dict(zip(("dq", "dk", "dv"), vjp((do, jnp.zeros_like(lse))), strict=True))
    assert all(array.devices() == {device} and array.dtype == dtype for array in results.values())
    operands = {name: np.asarray(array) for name, array in zip(("q", "k", "v", "do"), (q, k, v, do))}
    example = GPU.rounded(Example(**operands, mask=masks.Causal()))
    assert_within_bounds(example, lse=np.asarray(lse), **{name: np.asarray(array) for name, array in results.items()})
    jitted, gradients = jax.jit(lambda *x: (call(*x[:3]), jax.vjp(call, *x[:3])[1](x[3:])))(q, k, v, do, lse * 0)
    assert all((ours == theirs).all() for ours, theirs in zip(jitted, (o, lse), strict=True))
    results = dict(zip(("dq", "dk", "dv"), map(np.asarray, gradients), strict=True))
    assert_within_bounds(example, lse=np.asarray(lse), o=np.asarray(o), **results)


@pytest.mark.gpu
def test_masks_and_indices_are_made_of_arrays_on_a_gpu():
    try:
        (device, *_) = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX finds no GPU: {error}")
    q, k, v = (jax.device_put(jnp.asarray(array), device) for array in (Q, K, V))
    seqlen_q, seqlen_kv = Q.shape[-2], K.shape[-2]
    blocks = np.random.default_rng(0).random((-(-seqlen_q // 8), -(-seqlen_kv // 8))) < 0.6
    on_device = jax.device_put(jnp.asarray(blocks), device)
    index = BlockIndex.from_blocks(on_device, seqlen_q, seqlen_kv, 8)
    both = masks.BlockPattern(on_device, 8) & masks.Causal("top_left")
    listed = BlockIndex.from_mask(both, seqlen_q, seqlen_kv, 8)
    example = Example(q=Q, k=K, v=V, mask=masks.BlockPattern(blocks, 8))
    for mask in (index, masks.BlockPattern(on_device, 8)):
        assert_within_bounds(example, o=np.asarray(attention(q, k, v, mask=mask)))
        assert_within_bounds(example, o=cuflash.attention(q, k, v, mask=mask).get())
    within = example.but(mask=masks.BlockPattern(blocks, 8) & masks.Causal("top_left"))
    assert_within_bounds(within, o=cuflash.attention(q, k, v, mask=listed).get())
