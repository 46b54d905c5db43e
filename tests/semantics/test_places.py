"""Calls on a part of a longer sequence: masks, score functions and dropout see positions in the whole sequence."""

from dataclasses import replace

import numpy as np
import pytest
from cuflash.calls._call import Call, planned
from cuflash.masks.places import Places
from cuflash.masks.shape import MaskShape
from cuflash.planning.options import Options
from cuflash.testing import assert_within
from executors import CPU, SIM, needs_compiler
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import Dropout, UnsupportedProblem, masks, merge, scores

RNG = np.random.default_rng(0)
LENGTH, HEADS = 40, 4
Q, K, V, DO = RNG.standard_normal((4, 2, HEADS, LENGTH, 16), dtype=np.float32)
BIAS = RNG.standard_normal((HEADS, LENGTH, LENGTH), dtype=np.float32)
DISTANCES = RNG.standard_normal((HEADS, 2 * LENGTH), dtype=np.float32)


def by_place(s, b, h, i, j, table):
    return s + table[h, np.clip(i - j + 40, 0, 79)] * (1 + b)


CALLS = {
    "all keys": {},
    "causal": {"causal": True},
    "a window": {"window": (5, 2)},
    "documents": {"mask": masks.Sequences([0, 7, 23, LENGTH], causal=True)},
    "a dense mask": {"mask": RNG.random((2, HEADS, LENGTH, LENGTH)) < 0.5},
    "a block index": {"mask": cuflash.BlockIndex.from_mask(masks.Causal(), LENGTH, LENGTH, 8)},
    "a function": {"mask": lambda b, h, i, j: (7 * i + 3 * j + h + b) % 5 > 0},
    "windows and lengths": {"mask": masks.SlidingWindow(9, 3) & masks.Lengths(kv=np.array([20, 31]))},
    "alibi": {"score": scores.alibi(scores.alibi_slopes(HEADS)), "causal": True},
    "a bias": {"bias": BIAS},
    "a table": {"score": scores.Score(by_place, table=DISTANCES), "wrt": "table"},
    "a sink": {"sink": np.linspace(-1, 1, HEADS, dtype=np.float32), "causal": True},
    "dropout": {"dropout": Dropout(0.3, seed=5), "causal": True},
}
# cases that use different kernels
ON_KERNELS = ("causal", "documents", "a function", "alibi", "a bias", "a table", "a sink")
RUNS_OF_QUERIES = ((0, 13), (13, 40)), ((3, 17), (0, 3), (17, 40))


def parts_of(runs, length=LENGTH, heads=1):
    """Return places of calls, one for each run of queries and each group of `heads` heads."""
    of_all = MaskShape((2,), HEADS, length, LENGTH)
    step = HEADS // heads
    return [
        (Places(first, 0, 0, head, of_all=of_all), slice(first, stop), slice(head, head + step))
        for first, stop in runs for head in range(0, HEADS, step)
    ]  # fmt: skip


def call_at(places, arrays, options, **executor):
    """Return o, lse and all gradients of a call at places; gradients of k and v stay in the accumulator's dtype."""
    q, k, v, do = arrays
    sink = {name: each[places.head_start :][: q.shape[-3]] for name, each in options.items() if name == "sink"}
    posed = Options(**{**options, **sink, **executor}, places=places)
    call = Call.of(q, k, v, posed)
    wide = replace(call, problem=replace(call.problem, wide_gradients=True)).plan()
    ready = replace(planned(q, k, v, posed), _plan=wide._plan)
    o, lse = ready.forward(q, k, v, **sink)
    return o, lse, ready.backward(do, q, k, v, o, lse, **sink)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("runs", RUNS_OF_QUERIES)
def test_parts_of_the_queries_are_rows_of_the_whole(name, runs):
    check_parts(name, runs, executor="cpu")


@needs_compiler
@pytest.mark.parametrize("name", ON_KERNELS)
def test_kernels_on_parts_of_the_queries_are_rows_of_the_whole(name):
    check_parts(name, RUNS_OF_QUERIES[0], executor="sim")


def check_parts(name, runs, heads=1, **executor):
    options = CALLS[name]
    bound = cuflash.error_bound(Q, K, V, DO, **options)
    (o, lse), vjp = cuflash.attention_vjp(Q, K, V, return_lse=True, **options)
    whole = vjp(DO)
    dk, dv, others = np.zeros(K.shape), np.zeros(V.shape), {name: 0 for name in whole.others}
    for places, rows, own in parts_of(runs, heads=heads):
        arrays = Q[:, own, rows], K[:, own], V[:, own], DO[:, own, rows]
        part_o, part_lse, gradients = call_at(places, arrays, options, **executor)
        assert_within("o", part_o, o[:, own, rows], 2 * bound.o[:, own, rows])
        assert_within("lse", part_lse, lse[:, own, rows], 2 * bound.lse[:, own, rows])
        assert_within("dq", gradients.dq, whole.dq[:, own, rows], 2 * bound.dq[:, own, rows])
        dk[:, own] += gradients.dk
        dv[:, own] += gradients.dv
        others = {name: total + gradients[name] for name, total in others.items()}
    assert_within("dk", dk, whole.dk, 2 * bound.dk)
    assert_within("dv", dv, whole.dv, 2 * bound.dv)
    for each, total in others.items():
        assert_within(each, total, whole[each], 2 * bound.others[each])


@pytest.mark.parametrize("name", CALLS)
def test_parts_of_the_heads_are_heads_of_the_whole(name):
    check_parts(name, RUNS_OF_QUERIES[0], heads=2, executor="cpu")


@pytest.mark.parametrize("name", CALLS)
def test_queries_need_not_be_adjacent(name):
    options, runs = CALLS[name], ((3, 9), (12, 13), (30, 40))
    rows = np.concatenate([np.arange(*run) for run in runs])
    bound = cuflash.error_bound(Q, K, V, DO, **options)
    (o, lse), vjp = cuflash.attention_vjp(Q, K, V, return_lse=True, **options)
    places = Places(q_runs=runs, of_all=MaskShape((2,), HEADS, LENGTH, LENGTH))
    part_o, part_lse, gradients = call_at(places, (Q[:, :, rows], K, V, DO[:, :, rows]), options, executor="cpu")
    assert_within("o", part_o, o[:, :, rows], 2 * bound.o[:, :, rows])
    assert_within("lse", part_lse, lse[:, :, rows], 2 * bound.lse[:, :, rows])
    assert_within("dq", gradients.dq, vjp(DO).dq[:, :, rows], 2 * bound.dq[:, :, rows])


@pytest.mark.parametrize("run", [CPU, pytest.param(SIM, marks=needs_compiler)], ids=str)
@pytest.mark.parametrize("name", ["all keys", "causal", "a window", "alibi"])
def test_parts_of_the_keys_merge_to_the_whole(name, run):
    options = CALLS[name] | {"causal": "top_left"}
    bound, whole = cuflash.error_bound(Q, K, V, **options), cuflash.attention(Q, K, V, **options)
    parts = [
        cuflash.attention(
            Q, K[:, :, keys], V[:, :, keys], kv_start=keys.start, return_lse=True, **run.options, **options
        )
        for keys in (slice(0, 11), slice(11, 26), slice(26, 40))
    ]
    o, _ = merge(*zip(*parts))
    assert_within("o", o, whole, 8 * bound.o)


@given(st.integers(1, LENGTH - 1), st.data())
def test_chunked_prefill_gives_the_rows_of_one_call(first, data):
    stop = data.draw(st.integers(first + 1, LENGTH))
    options = CALLS[data.draw(st.sampled_from(["causal", "alibi", "dropout", "a sink"]))]
    o = cuflash.attention(Q[:, :, first:stop], K[:, :, :stop], V[:, :, :stop], q_start=first, **options)
    whole = cuflash.attention(Q, K, V, **options)[:, :, first:stop]
    assert_within("o", o, whole, 2 * cuflash.error_bound(Q, K, V, **options).o[:, :, first:stop])


def test_bounds_of_a_part_are_those_of_the_whole():
    for name in ("alibi", "dropout", "a table"):
        options = {each: value for each, value in CALLS[name].items() if each != "wrt"}
        whole = cuflash.error_bound(Q, K, V, **options).o[:, :, 13:]
        np.testing.assert_allclose(cuflash.error_bound(Q[:, :, 13:], K, V, q_start=13, **options).o, whole)


def test_equal_calls_at_other_places_differ():
    """A cached call is not reused at another place."""
    options = {"window": (3, 0), "causal": "top_left"}
    first, second = (cuflash.attention(Q[:, :, :8], K, V, q_start=start, **options) for start in (8, 20))
    assert (first != second).any()
    assert (first == cuflash.attention(Q[:, :, :8], K, V, q_start=8, **options)).all()


REFUSED = {
    "q_start must be an int from 0 to 1073741824; got -1": {"q_start": -1},
    "q_start must be an int from 0 to 1073741824; got None": {"q_start": None},
    "kv_start must be an int from 0 to 1073741824; got False": {"kv_start": False},
    "kv_start must be an int from 0 to 1073741824; got 0.0": {"kv_start": 0.0},
    "q_start must be an int from 0 to 1073741824; got an array of shape (0,)": {"q_start": np.zeros(0)},
    "kv_start must be an int from 0 to 1073741824; got 1.5": {"kv_start": 1.5},
    "q_start + seqlen_q must be at most 1073741824; got 1073741824 + 40": {"q_start": 1 << 30},
    "causal=True is for equal lengths; got seqlen_q=41 and seqlen_kv=40": {"q_start": 1, "causal": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_wrong_places_are_refused(reason):
    with pytest.raises(UnsupportedProblem) as error:
        cuflash.attention(Q, K, V, **REFUSED[reason])
    assert any(each.startswith(reason) for each in error.value.reasons)


def test_kernels_refuse_what_they_cannot_place():
    with pytest.raises(UnsupportedProblem, match="must be multiples of 16 for dropout on kernels; got 3 and 0"):
        cuflash.attention(Q, K, V, q_start=3, dropout=Dropout(0.3, seed=5), executor="sim")
    places = Places(q_runs=((0, 16), (32, 56)))
    for options in ({"dropout": Dropout(0.3, seed=5)}, {"bias": np.zeros((HEADS, 56, LENGTH), np.float32)}):
        with pytest.raises(UnsupportedProblem, match="queries that are not adjacent do not run on kernels"):
            planned(Q, K, V, Options(executor="sim", places=places, **options))


@needs_compiler
@pytest.mark.parametrize("kernel", ["simt", "sm80", "sm90"])
@pytest.mark.parametrize("heads", [slice(0, 4), slice(2, 4)])
def test_kernels_draw_the_weights_of_the_whole(kernel, heads):
    """A weight that is wrongly dropped or kept moves results by far more than rounding."""
    dtype, dropout = ("float32" if kernel == "simt" else "float16"), Dropout(0.4, seed=5, offset=2)
    q, k, v, do = (x.astype(dtype) for x in (Q, K, V, DO))
    of_all = MaskShape((2,), HEADS, 72, 56)
    places = Places(32, 16, 0, heads.start, of_all=of_all)
    arrays = [x[:, heads] for x in (q, k, v, do)]
    results = []
    for executor in ("cpu", "sim"):
        options = Options(dropout=dropout, executor=executor, places=places)
        ready = planned(*arrays[:3], options if executor == "cpu" else options._replace(kernel=kernel))
        o, lse = ready.forward(*arrays[:3])
        results.append((o, *ready.backward(arrays[3], *arrays[:3], o, lse)))
    is_kept = dropout.keep((2, HEADS, 72, 56))[:, heads, 32:, 16:]
    p, _ = cuflash.reference.attention(*arrays[:2], np.broadcast_to(np.eye(40), (2, is_kept.shape[1], 40, 40)))
    np.testing.assert_allclose(results[1][0], (p * is_kept / 0.6) @ arrays[2].astype(float), atol=0.01)
    for wanted, mine in zip(*results):
        np.testing.assert_allclose(mine.astype(float), wanted.astype(float), atol=0.02 if kernel != "simt" else 1e-4)


def test_tangents_of_a_part_are_rows_of_the_whole():
    options = {"score": scores.alibi(scores.alibi_slopes(HEADS)), "causal": True}
    q, k, v, q_dot = (x.astype(np.float64) for x in (Q, K, V, DO))
    whole = cuflash.attention_jvp(q, k, v, q_dot, **options)
    part = cuflash.attention_jvp(q[:, :, 13:], k, v, q_dot[:, :, 13:], q_start=13, **options)
    for each, exact in zip(part, whole):
        np.testing.assert_allclose(each, exact[:, :, 13:], atol=1e-12)


def test_a_plan_of_a_part_has_its_places():
    ready = cuflash.plan(Q[:, :, 13:], K, V, causal=True, q_start=13)
    o, _ = ready.forward(Q[:, :, 13:], K, V)
    assert np.array_equal(o, cuflash.attention(Q[:, :, 13:], K, V, causal=True, q_start=13))
    call = Call.of(Q[:, :, 13:], K, V, Options(causal=True, q_start=13))
    assert Call.parse(call.text) == call
