"""JAX on a GPU, and on the stand-in for one: results have the bits of calls on CuPy's arrays, jitted or not."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import cuflash.jax  # noqa: E402
import cupy_machine  # noqa: E402
from cuflash.jax import _runs as runs  # noqa: E402
from library_parts import part  # noqa: E402
from cuflash import masks  # noqa: E402
from test_jax import on_a_machine  # noqa: E402

jnp = jax.numpy
attention = cuflash.jax.attention
RNG = np.random.default_rng(0)
Q, K, V, DO = (RNG.standard_normal((2, heads, 40, 16)).astype(np.float16) for heads in (4, 2, 2, 4))
LISTS = np.random.default_rng(2).integers(-1, 3, (1, 40, 2)).astype(np.int32)
ALLOWED = (RNG.random((40, 40)) < 0.6) | np.eye(40, dtype=bool)


@pytest.fixture(params=["machine", "native", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request, monkeypatch, tmp_path):
    """Yield CuPy and the device of JAX that shares its memory; `share` makes an array of CuPy."""
    if request.param == "gpu":
        import cupy

        try:
            (device, *_) = jax.devices("gpu")
        except RuntimeError as error:
            pytest.skip(f"JAX finds no GPU: {error}")
        with jax.default_device(device):
            yield SimpleNamespace(share=cupy.asarray, launched=None)
        return
    with cupy_machine.installed(monkeypatch, tmp_path) as machine, jax.default_device(jax.devices("cpu")[0]):
        on_a_machine(monkeypatch, machine, cuflash, request.param == "native")
        yield SimpleNamespace(share=machine.asarray, launched=machine.launched)


# Options as functions of an array of the library, and the names of the operands that are differentiated.
CASES = {
    "causal": (lambda of, x: {"causal": True}, ()),
    "operands": (
        lambda of, x: {"score": of.scores.alibi(x(np.arange(4, dtype=np.float32))), "sink": x(np.ones(4, np.float32))},
        ("sink", "slopes"),
    ),
    "a table": (
        lambda of, x: {"score": of.scores.relative_position(x(np.ones((4, 8), np.float32)), 40, bidirectional=True)},
        ("table",),
    ),
    "sm90": (lambda of, x: {"kernel": "sm90"}, ()),
    "elements": (lambda of, x: {"mask": of.masks.Dense(x(ALLOWED)) & of.masks.Causal()}, ()),
    "lengths": (lambda of, x: {"mask": of.masks.Lengths(kv=x(np.array([40, 13])))}, ()),
    "lists within lengths": (
        lambda of, x: {"mask": of.masks.Lengths(kv=x(np.array([40, 13]))) & of.masks.ChosenBlocks(x(LISTS), 16)}, ()
    ),
    "sequences": (lambda of, x: {"mask": of.masks.Sequences(x(np.array([0, 7, 40])), causal=True)}, ()),
    "blocks of the host": (lambda of, x: {"mask": of.masks.BlockPattern(np.tri(5, dtype=bool), 8)}, ()),
    "a scale far from 1": (lambda of, x: {"scale": 2.0**-70}, ()),
    "dropout": (lambda of, x: {"dropout": of.Dropout(0.25, x(np.array([3, 5], np.uint32)), 2)}, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_have_the_bits_of_cupy(place, case):
    check_case(cuflash, place.share, case)


def check_case(library, share, case):
    """Compare a call on JAX's arrays, jitted and not, with one on CuPy's arrays, which `share` makes."""
    (make, wrt), attention = CASES[case], part(library, "jax").attention
    q, k, v, do = map(jnp.asarray, (Q, K, V, DO))
    held = []

    def of_jax(array):
        held.append(jnp.asarray(array))
        return held[-1]

    make(library, of_jax)
    if case == "dropout":
        theirs = {"dropout": library.Dropout(0.25, 3 + (5 << 32), 2)}
    else:
        theirs = make(library, share)
    ours_q, ours_k, ours_v, ours_do = map(share, (Q, K, V, DO))
    (o, lse), vjp = library.attention_vjp(
        ours_q, ours_k, ours_v, **theirs, wrt=wrt, return_lse=True, deterministic=True
    )
    gradients = vjp(ours_do, lse)
    expected = [each.get() for each in (o, lse, *gradients, *(gradients[name] for name in wrt))]

    def pulled(q, k, v, do, arrays):
        def call(q, k, v, arrays):
            values = iter(arrays)
            return attention(q, k, v, **make(library, lambda array: next(values)), return_lse=True, deterministic=True)

        results, vjp = jax.vjp(lambda *x: call(*x, arrays), q, k, v)
        more = []
        if wrt:
            reals = {"slopes": 0, "table": 0, "sink": 1}
            _, of = jax.vjp(lambda arrays: call(q, k, v, arrays), arrays)
            more = [of((do, results[1]))[0][reals[name]] for name in wrt]
        return [*results, *vjp((do, results[1])), *more]

    for run in (pulled, jax.jit(pulled)):
        for actual, wanted in zip(run(q, k, v, do, held), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(actual), wanted)


def check_atomic_sums(library):
    """Compare gradients that kernels add up in any order with those in a fixed one."""
    q, k, v, table = map(jnp.asarray, (Q, K, V, np.ones((4, 8), np.float32)))

    def loss(table, deterministic):
        score = library.scores.relative_position(table, 40, bidirectional=True)
        o = part(library, "jax").attention(q, k, v, score=score, deterministic=deterministic)
        return (o.astype(np.float32) ** 2).sum()

    expected = jax.grad(loss)(table, True)
    for _ in range(2):
        np.testing.assert_allclose(jax.grad(loss)(table, False), expected, rtol=1e-3, atol=1e-3)


def check_workspaces(library):
    """Check that workspaces are apart, and that those that must be zero come first."""
    xla_gpu, launches = part(library, "executors.xla_gpu"), part(library, "planning.launches")
    needs = {
        "sums": launches.Workspace((3,), np.dtype(np.float64)),
        "counter": launches.Workspace((5,), np.dtype(np.int32), is_zeroed=True),
        "parts": launches.Workspace((7,), np.dtype(np.float32)),
    }
    starts, end_of_zeros, end = xla_gpu.placed(list(needs.values()), 512)
    assert starts == [512 + 256, 512, 512 + 512]
    assert (end_of_zeros, end) == (512 + 256, 512 + 768)


def test_workspaces_are_apart_and_counters_first():
    check_workspaces(cuflash)


def test_gradients_that_kernels_add_up_start_at_zero(place):
    check_atomic_sums(cuflash)


def test_gradients_over_broadcast_axes_have_the_bits_of_cupy(place):
    arrays = Q, K[:1], V[0]
    o, vjp = cuflash.attention_vjp(*map(place.share, arrays), deterministic=True)
    expected = [each.get() for each in vjp(place.share(DO))]
    call = partial(attention, deterministic=True)
    _, pull = jax.vjp(jax.jit(call), *map(jnp.asarray, arrays))
    for actual, wanted in zip(pull(jnp.asarray(DO)), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual), wanted)


def test_tangents_and_second_derivatives_have_the_bits_of_cupy(place):
    arrays = [array.astype(np.float32) for array in (Q, K, V, DO)]
    q, k, v, do = map(jnp.asarray, arrays)
    of_q, of_k, of_v, of_do = map(place.share, arrays)
    dots = {"q_dot": of_q, "k_dot": of_k, "v_dot": of_v}
    (o, lse), (o_dot, lse_dot) = cuflash.attention_jvp(of_q, of_k, of_v, **dots, causal=True, return_lse=True)
    call = partial(attention, causal=True, return_lse=True, deterministic=True)
    results = jax.jit(lambda *x: jax.jvp(call, x, x))(q, k, v)
    for actual, wanted in zip(jax.tree.leaves(results), (o, lse, o_dot, lse_dot), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), wanted.get())
    pulled = cuflash.attention_hvp(of_q, of_k, of_v, of_do, **dots, causal=True, deterministic=True)

    def gradients(*x):
        return jax.vjp(lambda *x: call(*x)[0], *x)[1](do)

    results = jax.jit(lambda *x: jax.jvp(gradients, x, x))(q, k, v)
    for actual, wanted in zip(jax.tree.leaves(results), (*pulled[1], *pulled[2]), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), wanted.get())


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
def test_models_that_store_tokens_before_heads_are_not_copied(place, dtype):
    check_memory_orders(cuflash, dtype)


def check_memory_orders(library, dtype):
    """Compare results and derivatives in both memory orders, and look for copies in XLA's program."""
    mask = library.masks.BlockPattern(np.tri(5, dtype=bool), 8)
    call = partial(part(library, "jax").attention, mask=mask, deterministic=True, return_lse=True)
    q, k, v, do = (jnp.asarray(array.swapaxes(1, 2).astype(dtype)) for array in (Q, K, V, DO))

    def model(memory, *stored):
        o, lse = call(*(array.swapaxes(1, 2) for array in stored), memory=memory)
        return o.swapaxes(1, 2), lse

    def gradients(memory, *stored):
        (o, lse), pull = jax.vjp(partial(model, memory), *stored)
        return o, lse, pull((do, jnp.ones_like(lse)))

    def derivatives(memory, *stored):
        return jax.jvp(partial(gradients, memory), stored, stored)

    expected = jax.jit(partial(derivatives, "heads_first"))(q, k, v)
    compiled = jax.jit(partial(derivatives, "tokens_first")).lower(q, k, v).compile()
    for actual, wanted in zip(jax.tree.leaves(compiled(q, k, v)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted))
    program = compiled.as_text()
    assert not [line for line in program.splitlines() if " transpose(" in line or " copy(" in line]
    mapped = jax.vmap(partial(gradients, "tokens_first"))(q[None], k[None], v[None])
    for actual, wanted in zip(jax.tree.leaves(mapped), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_array_equal(np.asarray(actual[0]), np.asarray(wanted))


def test_mapped_steps_and_empty_calls_are_right(place):
    q, k, v = map(jnp.asarray, (Q, K, V))
    lengths = jnp.array([[40, 13], [3, 9]])

    def step(q, lengths):
        return attention(q, k, v, mask=masks.Lengths(kv=lengths)).astype(np.float32).sum()

    mapped = jax.jit(jax.vmap(jax.grad(step), (None, 0)))(q, lengths)
    for dq, own in zip(mapped, lengths, strict=True):
        np.testing.assert_allclose(dq, jax.grad(step)(q, own), rtol=1e-2, atol=1e-2)
    o, lse = jax.jit(lambda q, k: attention(q, k, k, return_lse=True))(q, k[..., :0, :])
    assert not o.any() and (lse == -np.inf).all()


def test_steps_in_a_loop_read_what_earlier_steps_wrote(place):
    q, k, v = map(jnp.asarray, (Q, K, V))

    def looped(q):
        return jax.lax.scan(lambda q, _: (attention(q, k, v) + q, None), q, None, length=3)[0]

    expected = q
    for _ in range(3):
        expected = attention(expected, k, v) + expected
    np.testing.assert_array_equal(jax.jit(looped)(q), expected)


def test_arrays_of_cupy_in_masks_are_read_at_each_call(place):
    q, k, v = map(jnp.asarray, (Q, K, V))
    for number in range(2):
        cells = (np.random.default_rng(number).random((40, 40)) < 0.5) | np.eye(40, dtype=bool)
        mask = masks.Dense(place.share(cells))
        expected = cuflash.attention(*map(place.share, (Q, K, V)), mask=mask).get()
        np.testing.assert_array_equal(np.asarray(attention(q, k, v, mask=mask)), expected)
        jitted = jax.jit(lambda q, mask=mask: attention(q, k, v, mask=mask))
        np.testing.assert_array_equal(np.asarray(jitted(q)), expected)


def test_masks_that_no_kernel_lists_are_refused(place):
    q, k, v = map(jnp.asarray, (Q, K, V))
    sentence = r"mask holds an array that JAX passes and no kernel lists \(Not\): make a BlockIndex outside of jax.jit"
    with pytest.raises(cuflash.UnsupportedProblem, match=sentence):
        jax.jit(lambda x: attention(q, k, v, mask=~masks.Dense(x)))(jnp.asarray(ALLOWED))
    with pytest.raises(cuflash.UnsupportedProblem, match="executor='cpu' takes arrays on 'cpu'; got q on 'gpu': move"):
        jax.jit(lambda q: attention(q, k, v, executor="cpu"))(q)


def test_xla_launches_kernels_without_python(place, monkeypatch):
    """Compiled programs contain one custom call per pass, and Python runs for none; other calls are refused by name."""
    q, k, v = map(jnp.asarray, (Q, K, V))
    step = jax.jit(lambda q: jax.vjp(lambda q: attention(q, k, v, causal=True), q)[1](q))
    text = step.lower(q).compile().as_text()
    if runs.handler() is None:
        assert "cuflash_pass" not in text
        return
    assert text.count('custom_call_target="cuflash_pass"') == 2
    monkeypatch.setattr(runs.OnGpu, "__call__", lambda *args: pytest.fail("XLA called Python"))
    assert jnp.isfinite(step(q)[0]).all()
    unknown = jax.jit(lambda q: jax.ffi.ffi_call("cuflash_pass", jax.typeof(q))(q, call=np.int64(7)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no launches 0000000000000007 on device 0"):
        unknown(q).block_until_ready()
