"""Semantics on which attention libraries disagree, each with a test. test_properties.py has most tests of values."""

from dataclasses import fields

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl
from hypothesis import event, given, target
from hypothesis import strategies as st

import cuflash
from cuflash import DeviceSpec, masks
from cuflash.executors import cpu, host_threads
from cuflash.plans import Plan
from cuflash.planning.host import HostTiling
from cuflash.planning.plan import KernelPlan
from cuflash.planning.problem import Problem
from cuflash.testing import assertions, strategies
from cuflash.blocks.work_list import requested_mask, work_list

RNG = np.random.default_rng(0)


def drawn(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def at_tile(example, tile, num_processors=1):
    """Return a plan with a tile size that the test chooses, so that small problems have many tiles."""
    device = DeviceSpec(name="test", num_processors=num_processors, tile_memory_bytes=1 << 20)
    problem = Problem.of(example.q, example.k, example.v, scale=example.scale)
    mask = requested_mask(example.mask, False, None, problem.mask_shape)
    work = work_list(mask, problem.mask_shape, tile)
    tiling = HostTiling(problem, device, *tile, work)
    return Plan(KernelPlan(problem=problem, mask=mask, device=device, work=work, tiling=tiling))


@pytest.mark.parametrize("tile_memory_bytes", [1, 2**11, 2**24, 2**40, 2**200])
def test_a_host_of_any_memory_has_a_plan(tile_memory_bytes):
    q = drawn(2, 40, 8)
    device = DeviceSpec(name="x", num_processors=1, tile_memory_bytes=tile_memory_bytes)
    ready = cuflash.plan(q, q, q, device=device)
    o, lse = ready.forward(q, q, q)
    assert ready._plan.tiling.scratch_scores <= 2 * 40 * 40
    dq, dk, dv = ready.backward(o, q, q, q, o, lse)
    assert np.isfinite([dq, dk, dv]).all()
    exact_o, exact_lse = cuflash.reference.attention(*(x.astype(np.float64) for x in (q, q, q)))
    bound = cuflash.error_bound(q, q, q)
    assert (np.abs(o - exact_o) <= bound.o).all() and (np.abs(lse - exact_lse) <= bound.lse).all()


HEIGHTS = {
    "everything": (None, 512),
    "causal": (masks.Causal(), 256),
    "a window of 16": (masks.SlidingWindow(15, 0), 64),
    "a window of 120": (masks.SlidingWindow(60, 59), 128),
    "a window of 600": (masks.SlidingWindow(599, 0), 256),
    "sequences of 16": (masks.Sequences(np.arange(0, 801, 16), causal=True), 64),
    "sequences of 200": (masks.Sequences(np.arange(0, 801, 200), causal=True), 128),
    "sequences of 400": (masks.Sequences([0, 400, 800]), 256),
    "documents of 1 to 39": (masks.Documents(np.repeat(np.arange(40), np.arange(40))[:700]), 64),
    "few keys": (masks.Lengths(kv=16), 512),
    "a prefix": (masks.PrefixLM(16), 256),
}


@pytest.mark.parametrize("name", HEIGHTS)
def test_tiles_are_flat_where_tall_ones_would_visit_many_keys_for_few(name):
    mask, height = HEIGHTS[name]
    tokens = 700 if "documents" in name else 800
    q, k, v, do = drawn(4, tokens, 8)
    ready = cuflash.plan(q, k, v, mask=mask)
    assert ready._plan.work.block_q == height
    o, lse = ready.forward(q, k, v)
    gradients = ready.backward(do, q, k, v, o, lse)
    example = assertions.Example(q=q, k=k, v=v, do=do, mask=mask)
    assertions.assert_within_bounds(example, o=o, lse=lse, dq=gradients.dq, dk=gradients.dk, dv=gradients.dv)
    short = cuflash.ShapeDtype((64, 8), np.float32)  # no flat tile is taller than the sequence
    assert cuflash.plan(short, short, short, window=(15, 0))._plan.work.block_q == 512


def workspace(tokens, tile_memory_bytes):
    """Return the bytes that a call with one head needs in addition to its arrays, on one thread."""
    q = cuflash.ShapeDtype((1, tokens, 8), np.float32)
    device = DeviceSpec(name="x", num_processors=1, tile_memory_bytes=tile_memory_bytes)
    return cuflash.plan(q, q, q, device=device).workspace_bytes


@given(st.integers(12, 24), st.integers(0, 200))
def test_the_memory_of_a_call_is_linear_in_its_length_on_any_host(log_tokens, log_memory):
    """From 4096 tokens (the largest tile) on, twice the tokens take at most twice the memory."""
    assert workspace(2 << log_tokens, 1 << log_memory) <= 2 * workspace(1 << log_tokens, 1 << log_memory)


TILES = st.tuples(st.integers(8, 70), st.integers(8, 70))
SMALL = strategies.examples(most_scores=1 << 13)


@given(SMALL, TILES, st.booleans())
def test_results_and_gradients_are_within_their_bounds_at_every_tile(example, tile, uses_exp2):
    ready = at_tile(example, tile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "WEIGHTS_USE_EXP2", uses_exp2)
        o, lse = ready.forward(example.q, example.k, example.v)
        gradients = ready.backward(example.do, example.q, example.k, example.v, o, lse, example.dlse)
    event(type(ready._plan.work).__name__)
    dq, dk, dv = gradients
    target(assertions.assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv))


@given(SMALL, TILES)
def test_the_number_of_threads_changes_no_bit(example, tile):
    alone, shared = at_tile(example, tile), at_tile(example, tile, num_processors=3)
    tiling = _Eager(*(getattr(shared._plan.tiling, field.name) for field in fields(HostTiling)))
    object.__setattr__(shared._plan, "tiling", tiling)
    # In `alone`, BLAS keeps its threads, and two threads round some 57 x 256 products differently from one.
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        results = [each.forward(example.q, example.k, example.v) for each in (alone, shared)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*results))
        rest = (example.q, example.k, example.v, *results[0], example.dlse)
        gradients = [each.backward(example.do, *rest) for each in (alone, shared)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*gradients))


class _Eager(HostTiling):
    """Tiles whose work is shared among all processors, however little it is."""

    @property
    def num_workers(self):
        return self.device.num_processors


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_o_has_the_inputs_dtype_and_lse_the_accumulators(dtype):
    q = drawn(2, 5, 8, dtype=dtype)
    o, lse = cuflash.attention(q, q, q, return_lse=True)
    assert o.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)


def test_results_are_c_contiguous_whatever_the_strides():
    q = drawn(2, 30, 4, 8).swapaxes(1, 2)
    o, lse = cuflash.attention(q, q, q, return_lse=True)
    assert o.flags.c_contiguous and lse.flags.c_contiguous and o.shape == q.shape


def test_mask_causal_and_window_are_intersected():
    q, k, v = drawn(20, 8, dtype=float), drawn(20, 8, dtype=float), drawn(20, 8, dtype=float)
    allowed = RNG.random((20, 20)) < 0.7
    o = cuflash.attention(q, k, v, mask=allowed, causal=True, window=(5, 3))
    i, j = np.ogrid[:20, :20]
    example = assertions.Example(q=q, k=k, v=v, mask=allowed & (j <= i) & (j >= i - 5))
    assertions.assert_within_bounds(example, o=o)


def test_what_earlier_calls_left_in_the_scratch_memory_never_matters():
    q, k, v, do = drawn(4, 3, 300, 24)
    plan = cuflash.plan(q, k, v, causal=True)
    o, lse = plan.forward(q, k, v)
    once = [o, lse, *plan.backward(do, q, k, v, o, lse)]
    assert host_threads._free_scratch
    for memory in host_threads._free_scratch:
        memory[:] = 0xFF  # NaN in every dtype
    o, lse = plan.forward(q, k, v)
    again = [o, lse, *plan.backward(do, q, k, v, o, lse)]
    assert all(first.tobytes() == second.tobytes() for first, second in zip(once, again))


def test_a_plan_gives_what_attention_gives():
    q, k, v, do = (drawn(2, 300, 16) for _ in range(4))
    ready = cuflash.plan(q, k, v, window=(40, 0))
    ready.compile()
    o, lse = ready.forward(q, k, v)
    expected, vjp = cuflash.attention_vjp(q, k, v, window=(40, 0))
    assert (o == expected).all()
    assert all((a == b).all() for a, b in zip(ready.backward(do, q, k, v, o, lse), vjp(do)))


def test_explain_says_what_was_decided():
    text = cuflash.plan(*(np.zeros((4, 1000, 64), np.float32),) * 3, window=(10, 0)).explain()
    assert "executor   cpu" in text and "4 heads" in text
    assert "work       computed on the fly: query i attends key j if i - 10 <= j <= i; no block list is stored" in text


def test_merge_keeps_the_arrays_namespace(device):
    outs, lses = drawn(2, 3, 4), drawn(2, 3)
    expected = cuflash.merge(outs, lses)
    with device.transfers_allowed():
        on_device = [device.to_device(x) for x in (*outs, *lses)]
    got = cuflash.merge(on_device[:2], on_device[2:])
    with device.transfers_allowed():
        assert all((device.to_host(a) == b).all() for a, b in zip(got, expected))
