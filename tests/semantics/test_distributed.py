"""Ranks, as threads with NumPy arrays, compute the rows of one call; a rank that fails stops the others."""

import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
from cuflash.distributed import ContextParallel, Machine, PeerLost, run
from cuflash.distributed import _model as model
from cuflash.distributed._agreement import fingerprint
from cuflash.distributed import _posed as posed_calls
from cuflash.distributed import _processes as processes
from cuflash.distributed._layout import Costs, dealt
from cuflash.distributed._lanes import HostLanes
from cuflash.distributed import _threads as threads
from cuflash.distributed._schedule import (
    ADD, ATTEND, COPY, NUM_BUFFERS, RECEIVING, TAKE, drawn_order, exchanging_heads, gathering, head_groups, lane_of,
    program, rounds,
)  # fmt: skip
from cuflash.distributed._threads import _Meeting as Meeting
from cuflash.masks.shape import MaskShape
from cuflash.testing import Example, assert_within, assert_within_bounds
from executors import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_lanes import LazyLanes

import cuflash
import ranks_of_a_store
from cuflash import Dropout, UnsupportedProblem, masks, scores

OPTIONS = {
    "all keys": lambda n, heads: {},
    "causal": lambda n, heads: {"causal": True},
    "a window": lambda n, heads: {"window": (n // 5, 3)},
    "documents": lambda n, heads: {"mask": masks.Sequences([0, n // 7, n // 2, n], causal=True)},
    "lists": lambda n, heads: {"mask": lambda b, h, i, j: (i // 8 * 7 + j // 8 * 3 + h + b) % 4 == 0},
    "empty rows": lambda n, heads: {"mask": lambda b, h, i, j: (i // 5 % 3 > 0) & (j > i)},
    "alibi": lambda n, heads: {"score": scores.alibi(scores.alibi_slopes(heads)), "causal": True},
    "a bias": lambda n, heads: {"bias": np.sin(np.arange(1.0 * heads * n * n)).reshape(heads, n, n), "wrt": "bias"},
    "a sink": lambda n, heads: {"sink": np.linspace(-1, 1, heads, dtype=np.float32), "wrt": "sink"},
    "dropout": lambda n, heads: {"dropout": Dropout(0.25, seed=3), "causal": True},
}


@pytest.fixture
def many_groups(monkeypatch):
    """Make the cost model expect that groups of heads cost nothing, so that short calls have many, too."""
    monkeypatch.setattr(posed_calls, "TYPICAL", Machine(launch=0.0))


def arrays_of(shape, num_kv_heads, seqlen_kv=None, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    *batch, heads, n, dim = shape
    of_keys = (*batch, num_kv_heads, n if seqlen_kv is None else seqlen_kv, dim)
    shapes = {"q": shape, "k": of_keys, "v": of_keys, "do": shape}
    return {name: rng.standard_normal(each).astype(dtype) for name, each in shapes.items()}


def on_ranks(size, arrays, options, *, seed=None, dlse=None, repeat=1, **layout):
    """Return o, dq, dk, dv and other gradients of all rows from each rank."""
    q, k, v, do = arrays.values()

    def rank(group):
        heads = {"num_heads": q.shape[-3], "num_kv_heads": k.shape[-3]}
        cp = ContextParallel(group, seqlen=q.shape[-2], batch=q.shape[:-3], **heads, **layout, **options)
        for _ in range(repeat):
            (o, lse), vjp = cp.attention_vjp(cp.shard(q), cp.shard(k), cp.shard(v), return_lse=True)
            gradients = vjp(cp.shard(do), None if dlse is None else dlse[..., cp.rows])
        whole = {"o": o, "lse": lse[..., None], "dq": gradients.dq}
        whole = {name: cp.unshard(each) for name, each in whole.items()} | {"lse": cp.unshard(lse[..., None])[..., 0]}
        keys = {"dk": gradients.dk, "dv": gradients.dv}
        return whole, keys, cp.kv_rows, gradients.others

    results = []
    for whole, keys, _, others in (ranks := run(rank, size=size, timeout=30, seed=seed)):
        for name in keys:
            whole[name] = np.zeros_like(k if name == "dk" else v)
            for _, each, rows, _ in ranks:
                whole[name][..., rows, :] = each[name]
        results.append(whole | {f"d{name}": each for name, each in others.items()})
    return results


def one_call(arrays, options, dlse=None):
    q, k, v, do = arrays.values()
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    gradients = vjp(do, dlse)
    results = {"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    return results | {f"d{name}": each for name, each in gradients.others.items()}


def check(size, arrays, options, dlse=None, **how):
    posed = {name: each for name, each in options.items() if name != "executor"}
    bound = cuflash.error_bound(*arrays.values(), dlse=dlse, **posed)
    expected = one_call(arrays, options, dlse)
    ranks = on_ranks(size, arrays, options, dlse=dlse, **how)
    for name, exact in expected.items():
        of_name = bound.others[name[1:]] if name[1:] in bound.others else getattr(bound, name)
        for results in ranks:
            assert_within(name, results[name], exact, 2 * of_name)
    return ranks, expected


@st.composite
def problems(draw, size):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads, n = kv_heads * draw(st.sampled_from([1, 2])), draw(st.integers(1, 70))
    batch = draw(st.sampled_from([(), (2,)]))
    method = draw(st.sampled_from(["gather", "heads"])) if kv_heads % size == 0 else "gather"
    layout = draw(st.sampled_from(["auto", "contiguous", "zigzag", "drawn"]))
    block = draw(st.sampled_from([1, 4, 16]))
    if layout == "drawn":
        layout = draw(st.lists(st.integers(0, size - 1), min_size=-(-n // block), max_size=-(-n // block)))
    seed, name = draw(st.integers(0, 1 << 20)), draw(st.sampled_from(sorted(OPTIONS)))
    arrays = arrays_of((*batch, heads, n, 8), kv_heads, seed=seed)
    return arrays, OPTIONS[name](n, heads), {"method": method, "layout": layout, "block": block, "seed": seed}


@pytest.mark.parametrize("size", range(1, 9))
def test_drawn_problems_agree_with_one_call(size):
    """Each number of ranks, 1 to 8, gets an eighth of the profile's examples."""

    @settings(settings.default, max_examples=settings.default.max_examples // 8)
    @given(problems(size), st.sampled_from([0.0, Machine().launch]))
    def agree(problem, launch):
        arrays, options, how = problem
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(posed_calls, "TYPICAL", Machine(launch=launch))
            check(size, arrays, options, **how)

    agree()


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_agree_with_one_call(name, many_groups):
    arrays = arrays_of((2, 4, 75, 16), 2)
    check(3, arrays, OPTIONS[name](75, 4), block=8, seed=1)


@pytest.mark.parametrize("name", OPTIONS)
def test_exchanged_heads_have_the_bits_of_one_call(name):
    ranks, expected = check(2, arrays_of((4, 64, 16), 2), OPTIONS[name](64, 4), method="heads", block=8, seed=4)
    for results in ranks:
        for each, exact in expected.items():
            assert np.array_equal(results[each], exact), each


@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_and_gradients_of_lse(dtype, method):
    """Gradients of keys are added before they are rounded."""
    arrays = arrays_of((4, 60, 16), 4, dtype=dtype)
    dlse = np.linspace(-1, 1, 240).reshape(4, 60).astype("float64" if dtype == "float64" else "float32")
    check(4, arrays, {"causal": True}, dlse, method=method, block=4, seed=2, repeat=2)


def test_any_order_of_ready_steps_gives_equal_bits(many_groups):
    arrays, options = arrays_of((6, 61, 8), 6), {"causal": True}
    first, *others = (on_ranks(4, arrays, options, seed=seed, block=4, method="gather")[0] for seed in (None, 1, 2, 3))
    for each in others:
        assert all(np.array_equal(each[name], first[name]) for name in first)


@pytest.mark.parametrize("early", [(), (RECEIVING,), (1,), (1, RECEIVING)])
@pytest.mark.parametrize("method", ["gather", "heads"])
def test_events_order_the_steps_of_streams(method, early, monkeypatch, many_groups):
    """Steps are queued, and run as late or as early as the events that they wait for allow."""
    monkeypatch.setattr(threads, "DeviceLanes", LazyLanes)
    monkeypatch.setattr(threads, "device_count", lambda: 1)
    monkeypatch.setattr(LazyLanes, "early", early)
    arrays = arrays_of((6, 45, 8), 6)
    q, k, v, do = arrays.values()
    o, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    exact = o, *vjp(do)

    def rank(group):
        cp = ContextParallel(group, seqlen=45, num_heads=6, causal=True, block=4, method=method)
        own = [np.full_like(cp.shard(x), np.nan) for x in (q, k, v, do)]

        def fill():  # as a kernel that is queued before the call
            for mine, whole in zip(own, (q, k, v, do)):
                mine[...] = cp.shard(whole)

        def spoil():  # as a kernel that is queued after it
            for mine in own:
                mine[...] = np.nan

        for _ in range(2):
            group._lanes.queue(fill)
            o = cp.attention(*own[:3])
            group._lanes.queue(spoil)
            group._lanes.synchronize()
            np.testing.assert_allclose(o, cp.shard(exact[0]), atol=3e-5)
            group._lanes.queue(fill)
            o, vjp = cp.attention_vjp(*own[:3])
            gradients = vjp(own[3])
            group._lanes.queue(spoil)
        whole = [cp.unshard(x) for x in (o, gradients.dq, gradients.dk, gradients.dv)]
        group._lanes.synchronize()
        return whole

    for seed in (None, 1, 2, 3):
        for results in run(rank, devices=[0] * 3, timeout=30, seed=seed):
            for mine, wanted in zip(results, exact):
                np.testing.assert_allclose(mine, wanted, atol=3e-5)


@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_code_of_processes_agrees_with_one_call(size, method, many_groups):
    """Threads stand in for processes: PyTorch's store and its exchange of bytes are doubles."""
    q, k, v, do = arrays_of((2, 8, 45, 8), 4).values()
    o, vjp = cuflash.attention_vjp(q, k, v, **OPTIONS["a sink"](45, 8))
    gradients = vjp(do)

    def rank(group):
        shape = {"seqlen": 45, "batch": (2,), "num_heads": 8, "num_kv_heads": 4}
        cp = ContextParallel(group, **shape, block=4, method=method, **OPTIONS["a sink"](45, 8))
        o, vjp = cp.attention_vjp(cp.shard(q), cp.shard(k), cp.shard(v))
        gradients = vjp(cp.shard(do))
        whole = [cp.unshard(x) for x in (o, gradients.dq, gradients.dk, gradients.dv)]
        return *whole, gradients["sink"]

    for results in ranks_of_a_store.run(processes, size, rank):
        for mine, wanted in zip(results, (o, *gradients, gradients["sink"])):
            np.testing.assert_allclose(mine, wanted, atol=3e-5)


@pytest.mark.parametrize("kind", ["array", "sparse array", "blocks"])
@pytest.mark.parametrize("method", model.METHODS)
def test_arrays_of_a_mask_are_those_at_creation(method, kind):
    """Only rows of keys that the mask allowed at creation are moved, and the others hold no numbers."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 64, 8))
    blocks = np.eye(4, dtype=bool)
    elements = np.kron(blocks, np.ones((16, 16), bool))
    held = {"array": elements.copy(), "sparse array": scipy.sparse.csr_array(elements), "blocks": blocks}[kind]
    mask = masks.BlockPattern(held, 16) if kind == "blocks" else held
    created = threading.Barrier(2)

    def rank(group):
        cp = ContextParallel(
            group, seqlen=64, num_heads=2, mask=mask, block=16, method=method, layout="contiguous"
        )
        created.wait()
        if group.rank == 0:
            if kind == "sparse array":
                held.indices[...] = (held.indices + 16) % 64
            else:
                held[...] = True
        created.wait()
        return cp.unshard(cp.attention(*map(cp.shard, (q, k, v))))

    for o in run(rank, size=2):
        assert_within_bounds(Example(q=q, k=k, v=v, mask=elements), o=o)


def test_keys_may_have_their_own_layout():
    arrays = arrays_of((2, 40, 8), 1, seqlen_kv=52)
    for method, size in (("gather", 3), ("heads", 1)):
        check(size, arrays, {"causal": "bottom_right"}, seqlen_kv=52, block=8, method=method, seed=0)


# Layouts


def costs(mask, n, block):
    shape = MaskShape((), 1, n, n)
    return Costs.of(mask.resolve(shape), shape, block)


RANDOM = np.random.default_rng(0).random((128, 128)) < np.linspace(0.05, 0.4, 128)[:, None]
BALANCED = {  # bound on the largest work of a rank, divided by the mean
    "causal": (masks.Causal(), 1.01),
    "documents": (masks.Sequences.of([512, 192, 128, 64, 64, 64], causal=True), 1.05),
    "lists with unequal rows": (masks.BlockPattern(RANDOM, 8), 1.05),
    "dense rows and columns": (masks.SlidingWindow(16, 0) | (lambda b, h, i, j: (i < 64) | (j < 64)), 1.05),
}


@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_layouts_by_cost_are_balanced(name, size):
    mask, most = BALANCED[name]
    n = RANDOM.shape[0] * 8
    blocks = costs(mask, n, 8)
    rows = dealt("auto", blocks.work, n, 8, size)
    loads = blocks.loads(rows)
    assert loads.sum() == blocks.work.sum()
    assert loads.max() <= most * loads.mean()
    assert np.array_equal(np.sort(np.concatenate(rows.of_rank)), np.arange(n))
    share = -(-n // 8 // size)
    assert all(len(each) <= 8 * (share + -(-n // 8 // (8 * size))) for each in rows.of_rank)


def test_zigzag_gives_each_rank_two_chunks():
    rows = dealt("zigzag", np.ones(8, np.int64), 64, 8, 4)
    assert [rows.runs(rank) for rank in range(4)] == [
        ((0, 8), (56, 64)), ((8, 16), (48, 56)), ((16, 24), (40, 48)), ((24, 40),),
    ]  # fmt: skip


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 1000))
def test_needed_keys_are_those_of_the_mask(n, size, seed):
    """The blocks that a rank gathers are exactly those with a key that its rows attend."""
    allowed = np.random.default_rng(seed).random((n, n)) < 0.1
    needs, block = costs(masks.BlockPattern(allowed, 1), n, 4), 4
    rows = dealt("auto", needs.work, n, block, size)
    for rank in range(size):
        attended = allowed[rows.of_rank[rank]].any(axis=0)
        blocks = np.add.reduceat(attended, np.arange(0, n, block)) > 0
        assert np.array_equal(needs.needed(rows, rows, rank), np.repeat(blocks, block)[:n])


# Schedules


@pytest.mark.parametrize("steps", [
    gathering(3, 5, lambda rank, source: (rank + source) % 2 == 0, returns=True),
    gathering(4, 3, lambda rank, source: True, returns=False),
    exchanging_heads(4, lambda rank: rank != 2),
])  # fmt: skip
def test_steps_wait_only_for_earlier_ones(steps):
    for number, step in enumerate(steps):
        assert all(other < number for other in step.after)
    assert len({step[:4] for step in steps}) == len(steps)


@pytest.mark.parametrize("steps", [
    gathering(3, 5, lambda rank, source: (rank + source) % 2 == 0, returns=True),
    gathering(2, 1, lambda rank, source: True, returns=True),
    exchanging_heads(4, lambda rank: rank != 2),
])  # fmt: skip
def test_rounds_are_in_an_order_that_steps_allow(steps):
    order = rounds(steps)
    assert len({*order}) == len(order)
    places = {each: place for place, each in enumerate(order)}
    of = [places[step.kind, step.group] for step in steps]
    assert all(of[other] < of[number] for number, step in enumerate(steps) for other in step.after)
    copies = [place for (kind, _), place in places.items() if kind == COPY]
    computed = [place for (kind, _), place in places.items() if kind == ATTEND]
    assert all(copied < place for copied, place in zip(copies[1:], computed)), "the next group moves meanwhile"


@pytest.mark.parametrize("steps", [
    gathering(3, 5, lambda rank, source: (rank + source) % 2 == 0, returns=True),
    gathering(2, 3, lambda rank, source: True, returns=True),
    exchanging_heads(4, lambda rank: rank != 2),
])  # fmt: skip
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_program_waits_for_all_steps_that_must_be_finished(steps, seed):
    """Before each step, its lane has waited, directly or through others, for all steps that it needs."""
    rng, size = np.random.default_rng(seed), 1 + max(step.rank for step in steps)
    order = None if seed is None else drawn_order(steps, lambda ready: int(rng.choice(ready)))
    turns, ends = program(steps, size, order)
    issued = [each for _, of_rank in turns for each in of_rank]
    assert [each.number for each in issued] == list(range(len(steps)) if order is None else order)
    assert all(each.step.rank == rank for rank, of_rank in turns for each in of_rank)
    lanes, finished, awaited = {}, {~rank: {("start", rank)} for rank in range(size)}, {~rank for rank in range(size)}
    for number, step, of_rank, waits, is_awaited in issued:
        lane = lane_of(step)
        assert lane == (step.rank, of_rank)
        known = lanes.setdefault(lane, set())
        for other in waits:
            assert other in awaited, "an event is waited for before it is recorded"
            known |= finished[other]
        assert known >= {*step.after}
        if lane[1]:
            assert known >= {("start", step.rank)}
            assert step.kind == TAKE or ("start", step.source) in known
        known.add(number)
        finished[number] = set(known)
        if is_awaited:
            awaited.add(number)
    for rank, of_rank in enumerate(ends):
        known = set().union(*(finished[number] for number in of_rank), lanes.get((rank, 0), set()))
        assert known >= {n for n, step in enumerate(steps) if rank in (step.rank, step.source)}
        assert awaited >= {*of_rank}
    assert sum(len([n for n in each.waits if n >= 0]) for each in issued) <= sum(len(step.after) for step in steps)


def test_buffers_are_reused_after_they_were_read():
    steps = gathering(2, 4, lambda rank, source: True, returns=True)
    numbers = {step[:4]: number for number, step in enumerate(steps)}
    for kind, rank, source, group, after in steps:
        if group < NUM_BUFFERS:
            continue
        before = group - NUM_BUFFERS
        if kind == COPY:
            assert numbers[ATTEND, rank, rank, before] in after
        if kind == ATTEND:
            assert {numbers[TAKE, 1 - rank, rank, before], numbers[ADD, rank, rank, before]} <= {*after}
        if kind == ADD:
            assert {numbers[ATTEND, rank, rank, group], numbers[TAKE, rank, 1 - rank, group]} <= {*after}


# What moves


def test_traffic_counts_what_moves(monkeypatch):
    """Bytes counted from the copies of a call equal those of `traffic`."""
    arrays, counted = arrays_of((4, 64, 8), 2), {"forward": 0}
    run_step = HostLanes.run

    def counting(lanes, issue, events, passes):
        step = issue.step
        if step.kind == COPY:
            for move, _, source in passes[step.rank].routes(issue.number):
                counted["forward"] += sum(x.nbytes for x in move.read(source.of(passes[step.source].arrays)))
        return run_step(lanes, issue, events, passes)

    monkeypatch.setattr(HostLanes, "run", counting)
    q, k, v, _ = arrays.values()

    def rank(group):
        cp = ContextParallel(
            group, seqlen=64, num_heads=4, num_kv_heads=2, window=(9, 0), block=4, method="gather", layout="contiguous"
        )
        cp.attention(cp.shard(q), cp.shard(k), cp.shard(v))
        return cp.traffic(8)

    traffic = run(rank, size=3)[0]
    assert counted["forward"] == traffic["forward"].sum()
    assert traffic["forward"].sum() < 0.4 * 2 * 64 * 2 * 8 * 2 * 4, "only keys of a window move"
    assert (traffic["backward"] == traffic["forward"] + traffic["forward"].T).all(), "float32 gradients return"


@pytest.mark.parametrize("method", model.METHODS)
@pytest.mark.parametrize("kv_heads", [8, 32])
def test_the_model_counts_the_bytes_of_the_steps(method, kv_heads):
    def rank(group):
        cp = ContextParallel(
            group, seqlen=256, num_heads=32, num_kv_heads=kv_heads, block=8, method=method, layout="contiguous"
        )
        return cp.traffic(128, dtype="float16"), cp._posed.model_shape(128, 2)

    traffic, shape = run(rank, size=8)[0]
    for name in ("forward", "backward"):
        counted = traffic[name].sum(axis=1).max()
        expected = model.received(shape, method, backward=name == "backward")
        assert counted == pytest.approx(expected, rel=0.02)


def test_the_method_that_the_model_expects_to_be_faster_is_chosen(monkeypatch):
    """Heads move fewer bytes, and gather fewer arrays; products of long sequences hide all of them."""

    def methods(size, heads, kv_heads, seqlen=64, **options):
        def rank(group):
            options_of = {"num_heads": heads, "num_kv_heads": kv_heads, "block": seqlen // 8}
            cp = ContextParallel(group, seqlen=seqlen, **options_of, **options)
            other = "heads" if cp._posed.method == "gather" else "gather"
            if kv_heads % size == 0:
                assert cp._posed.model_seconds() <= replace(cp._posed, method=other).model_seconds()
            return cp._posed.method

        return set(run(rank, size=size))

    assert methods(2, 4, 4) == methods(4, 16, 4) == {"gather"}
    monkeypatch.setattr(posed_calls, "TYPICAL", Machine(launch=0.0, processors=0))
    assert methods(2, 4, 4) == methods(4, 16, 4) == {"heads"}
    assert methods(3, 4, 4) == {"gather"}
    assert methods(2, 32, 2) == {"gather"}
    assert methods(2, 32, 32, seqlen=16384, causal=True) == {"gather"}


def test_short_calls_have_few_groups_of_heads():
    """The host queues fewer copies; long calls have more groups, whose exchange is hidden and whose memory is less."""

    def rank(group, seqlen):
        cp = ContextParallel(
            group, seqlen=seqlen, num_heads=32, num_kv_heads=8, causal=True, block=seqlen // 64, method="gather"
        )
        return cp._posed.groups, cp.workspace_bytes(128, "float16") // seqlen, cp._posed

    sizes = []
    for seqlen in (1024, 16384, 65536):
        (groups, nbytes, posed), _ = run(lambda group: rank(group, seqlen), size=2)
        assert groups[0][0] == 0 and groups[-1][1] == 8
        assert all(one[1] == other[0] for one, other in pairwise(groups))
        seconds = posed.model_seconds()
        assert all(seconds <= 1.01 * replace(posed, groups=each).model_seconds() for each in head_groups(8))
        sizes.append((len(groups), nbytes))
    assert [count for count, _ in sizes] == sorted(count for count, _ in sizes)
    assert sizes[0][0] == 1 and sizes[-1][0] >= 4 and sizes[-1][1] < sizes[0][1]


@pytest.mark.parametrize("method", model.METHODS)
def test_the_model_hides_the_exchange_behind_products(method):
    def rank(group):
        cp = ContextParallel(
            group, seqlen=4096, num_heads=32, num_kv_heads=8, causal=True, block=32, method=method
        )
        return cp._posed

    posed, machine = run(rank, size=4)[0], Machine(launch=0.0, processors=0)
    half = np.dtype(np.float16)
    for name in ("forward", "backward"):
        shape = posed.model_shape(128, 2)
        alone = model.estimate(shape, method, machine, backward=name == "backward")
        assert posed.seconds(name, 128, half, replace(machine, link=1e30)) == pytest.approx(alone.compute)
        slow = replace(machine, link=1e9)
        received = posed.traffic((128, 128), half)[name].sum(axis=1).max() / slow.link
        assert received <= posed.seconds(name, 128, half, slow) <= 1.6 * received + alone.compute
        seconds = posed.seconds(name, 128, half, machine)
        assert alone.compute <= seconds <= alone.compute + alone.exchange * 1.1


@needs_compiler
@pytest.mark.parametrize("name", ["causal", "lists", "alibi", "dropout"])
def test_ranks_may_run_kernels(name, many_groups):
    """With a score function or dropout, each run of queries is a call of its own."""
    arrays = arrays_of((*((2,) if name == "causal" else ()), 2, 70, 16), 2)
    check(2, arrays, OPTIONS[name](70, 2) | {"executor": "sim"}, block=16, method="gather")


def test_explain_prints_both_methods():
    def rank(group):
        cp = ContextParallel(group, seqlen=4096, num_heads=32, num_kv_heads=8, causal=True)
        return cp.explain(machine=Machine(link=50e9)), cp.workspace_bytes(128, "float16")

    (text, nbytes), *others = run(rank, size=4)
    assert all(each == (text, nbytes) for each in others)
    assert "gather forward" in text and "heads backward" in text and f"{nbytes} bytes" in text


# Faults


def sharded(group, **options):
    cp = ContextParallel(group, seqlen=64, num_heads=2, block=8, method="gather", **options)
    x = np.ones((2, 64, 8), np.float32)
    return cp, [cp.shard(x) for _ in range(3)]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("step", range(9))
def test_a_rank_that_raises_at_any_step_ends_the_others(step, seed, monkeypatch, many_groups):
    ended, done = [], []
    run_step = HostLanes.run

    def failing(lanes, issue, events, passes):
        if issue.step.rank == 1:
            done.append(issue)
            if len(done) == step + 1:
                raise OSError("a disk is full")
        return run_step(lanes, issue, events, passes)

    monkeypatch.setattr(HostLanes, "run", failing)

    def rank(group):
        try:
            cp, (q, k, v) = sharded(group, causal=True)
            o, vjp = cp.attention_vjp(q, k, v)
            vjp(o)
        except PeerLost as error:
            ended.append((group.rank, str(error)))
            raise

    start = time.monotonic()
    with pytest.raises(OSError, match="a disk is full") as raised:
        run(rank, size=3, timeout=20, seed=seed)
    assert raised.value.__notes__ == ["Raised by rank 1 of 3."]
    assert time.monotonic() - start < 10
    sentence = "rank 1 raised OSError: a disk is full. This group is closed: start the ranks again"
    assert sorted(ended) == [(0, sentence), (2, sentence)]


def test_a_rank_that_exits_ends_the_others():
    def rank(group):
        if group.rank == 1:
            raise SystemExit(3)
        sharded(group)

    with pytest.raises(PeerLost, match="rank 1 raised SystemExit: 3"):
        run(rank, size=2)


@pytest.mark.parametrize("returns_first", [True, False])
def test_a_rank_that_returns_ends_the_others(returns_first):
    def rank(group):
        is_early = (group.rank == 1) == returns_first
        time.sleep(0 if is_early else 0.1)
        if group.rank == 0:
            sharded(group)

    with pytest.raises(PeerLost, match="rank 1 returned before ContextParallel, where rank"):
        run(rank, size=2, timeout=20)


def test_a_rank_that_does_not_answer_ends_the_others_in_time():
    released = threading.Event()

    def rank(group):
        if group.rank == 2:
            released.wait(20)
        sharded(group)

    start = time.monotonic()
    try:
        with pytest.raises(PeerLost, match="rank 2 did not arrive at ContextParallel, where ranks 0, 1 waited"):
            run(rank, size=3, timeout=0.3)
    finally:
        released.set()
    assert time.monotonic() - start < 5


def test_a_rank_that_stops_in_a_pass_ends_the_others_in_time(monkeypatch):
    run_step, released = HostLanes.run, threading.Event()

    def stopping(lanes, issue, *others):
        if issue.step.rank == 1 and issue.step.kind == COPY:
            released.wait(20)
        return run_step(lanes, issue, *others)

    monkeypatch.setattr(HostLanes, "run", stopping)

    def rank(group):
        cp, arrays = sharded(group)
        cp.attention(*arrays)

    try:
        with pytest.raises(PeerLost, match="rank 1 did not finish attention within 0.5 s"):
            run(rank, size=2, timeout=0.5)
    finally:
        released.set()


def test_ranks_wait_for_each_other_while_steps_proceed(monkeypatch):
    """The timeout is for each step, not for the call."""
    run_step = HostLanes.run

    def slow(lanes, issue, *others):
        time.sleep(0.1)
        return run_step(lanes, issue, *others)

    monkeypatch.setattr(HostLanes, "run", slow)

    def rank(group):
        cp, arrays = sharded(group)
        return cp.attention(*arrays).shape

    assert run(rank, size=2, timeout=0.4) == [(2, 32, 8)] * 2


def refused(rank, size=3):
    """Return the error message of the ranks, which must be the same on all of them."""
    errors = []

    def caught(group):
        try:
            rank(group)
        except UnsupportedProblem as error:
            errors.append(error.reasons)
            raise

    with pytest.raises(UnsupportedProblem):
        run(caught, size=size, timeout=20)
    assert errors == errors[:1] * size
    return errors[0]


DIFFERENT = {
    "rank 0 has causal=True, rank 2 has causal=False": {"causal": (True, True, False)},
    "rank 0 has seqlen=64, rank 1 has seqlen=65": {"seqlen": (64, 65, 64)},
    "rank 0 has block=8, rank 2 has block=16": {"block": (8, 8, 16)},
    "rank 0 has layout='auto', rank 1 has layout='zigzag'": {"layout": ("auto", "zigzag", "auto")},
}


@pytest.mark.parametrize("sentence", DIFFERENT)
def test_ranks_that_disagree_are_refused(sentence):
    ((name, values),) = DIFFERENT[sentence].items()

    def rank(group):
        ContextParallel(group, **{"seqlen": 64, "num_heads": 2, "block": 8} | {name: values[group.rank]})

    assert refused(rank) == (f"ranks must ask for the same call: {sentence}",)


def test_ranks_with_different_contents_of_arrays_are_refused():
    def rank(group):
        ContextParallel(group, seqlen=8, num_heads=1, mask=np.eye(8, dtype=bool) ^ (group.rank == 1))

    assert "rank 0 has mask=" in refused(rank)[0]


@pytest.mark.parametrize("name", ["a name", "a number", "a default", "an inner function", "a partial", "a mask"])
def test_ranks_with_different_functions_are_refused(name):
    def rank(group):
        own = group.rank == 1
        functions = {
            "a name": [lambda b, h, i, j: np.minimum(i, j) > 3, lambda b, h, i, j: np.maximum(i, j) > 3][own],
            "a number": (lambda limit: lambda b, h, i, j: i + j > limit)(own + 3),
            "a default": (lambda limit: lambda b, h, i, j, limit=limit: i + j > limit)(own + 3),
            "an inner function": [
                lambda b, h, i, j: (lambda x: x > 3)(i), lambda b, h, i, j: (lambda x: x > 4)(i)
            ][own],
            "a partial": partial(lambda limit, b, h, i, j: i + j > limit, own + 3),
        }
        functions["a mask"] = masks.FromFunction(functions["a number"]) & masks.Causal()
        ContextParallel(group, seqlen=8, num_heads=1, mask=functions[name])

    assert "rank 0 has mask=" in refused(rank)[0]


def test_equal_functions_of_ranks_are_one_call():
    def rank(group):
        mask = masks.FromFunction(lambda b, h, i, j: (lambda x: x > 3)(i) | (j < 4)) & masks.Causal()
        score = partial(lambda factor, s, b, h, i, j: factor * s, 2)
        return ContextParallel(group, seqlen=8, num_heads=1, mask=mask, score=score).rows

    assert len(np.concatenate(run(rank, size=2))) == 8


def test_texts_of_functions_have_no_addresses():
    source = "lambda b, h, i, j: (lambda x: x > 3)(i) & (j < limit)"
    limit = 5
    first, second = (eval(source, {"limit": limit}) for _ in range(2))
    assert fingerprint(first) == fingerprint(second) and first.__code__.co_consts != ()


def test_ranks_that_ask_for_other_calls_are_refused():
    def rank(group):
        cp, (q, k, v) = sharded(group)
        cp.unshard(q) if group.rank == 1 else cp.attention(q, k, v)

    assert refused(rank) == ("ranks must ask for the same call: rank 0 asks for attention, rank 1 for unshard",)


WRONG = {
    "method='heads' needs num_kv_heads (4) to be a multiple of the 3 ranks: use method='gather'": {"method": "heads"},
    "num_kv_heads must be at least 1 and divide num_heads; got 3 and 4": {"num_kv_heads": 3},
    "method must be 'auto', 'gather' or 'heads'; got 'ring'": {"method": "ring"},
    "num_kv_heads must be at least 1 and divide num_heads; got 0 and 4": {"num_kv_heads": 0},
    "block must be an int of at least 1; got 0": {"block": 0},
    "seqlen must be an int from 0 to 2**63 - 1; got None": {"seqlen": None},
    "seqlen must be an int from 0 to 2**63 - 1; got -1": {"seqlen": -1},
    "layout must be 'auto', 'contiguous', 'zigzag', or the rank of each of the 8 blocks; got 3.5": {"layout": 3.5},
    "q_start must be left out: ranks see the positions of the whole sequence; got 3": {"q_start": 3},
    "sink must be an array of shape (num_heads,); got 'a'": {"sink": "a"},
    "layout must have ranks from 0 to 2; got 0 to 3": {"layout": [0, 1, 2, 3, 0, 1, 2, 0]},
    "num_heads must be an int from 0 to 2**63 - 1; got True": {"num_heads": True},
    "softcap must be a positive finite number; got -1": {"softcap": -1},
    "scale must be a finite number or None; got True": {"scale": True},
    "deterministic must be True or False; got 1": {"deterministic": 1},
    "dropout must be a Dropout; got 0.3: write dropout=cuflash.Dropout(0.3, seed=0)": {"dropout": 0.3},
    "kernel must be 'auto', 'simt', 'sm80', 'sm90', 'naive', 'fa1'; got 'sm9'": {"kernel": "sm9", "executor": "sim"},
    "executor must be 'auto', 'cpu' or 'sim' for ranks with NumPy arrays; got 'gpu'": {"executor": "gpu"},
    "precision='tf32' needs a GPU's tensor cores; executor='cpu' has precision='ieee'": {"precision": "tf32"},
    "sink must have shape (num_heads,) = (4,); got (3,)": {"sink": np.ones(3)},
    "wrt must name array arguments of the call other than q, k and v, and there is none; got 'bias': pass this array "
    "as an argument too": {"wrt": "bias"},
}


@pytest.mark.parametrize(
    "options",
    [{"softcap": 1e-300}, {"sink": np.ones(4, np.float16)}, {"executor": "sim", "precision": "tf32"},
     {"executor": "sim", "kernel": "sm90"}],
    ids=str,
)  # fmt: skip
def test_options_that_some_dtype_allows_are_accepted_before_there_are_arrays(options):
    assert run(lambda group: ContextParallel(group, seqlen=8, num_heads=4, **options).rows.shape, size=1) == [(8,)]


@pytest.mark.parametrize("keyword, answer", [("out", "it takes mask, causal"), ("softmax_scale", "use scale=")])
def test_unknown_keywords_are_answered(keyword, answer):
    with pytest.raises(TypeError, match=rf"ContextParallel\(\) has no {keyword}: {answer}"):
        run(lambda group: ContextParallel(group, seqlen=8, num_heads=1, **{keyword: None}), size=1)


WRONG_RATES = {
    "link must be positive and finite; got 0": {"link": 0},
    "forward_rate must be positive and finite; got nan": {"forward_rate": float("nan")},
    "backward_rate must be positive and finite; got True": {"backward_rate": True},
    "launch must be a finite number of at least 0; got 'a'": {"launch": "a"},
    "processors must be an int of at least 0; got 1.5": {"processors": 1.5},
}


@pytest.mark.parametrize("sentence", WRONG_RATES)
def test_wrong_rates_of_machines_are_refused(sentence):
    with pytest.raises(UnsupportedProblem) as caught:
        Machine(**WRONG_RATES[sentence])
    assert caught.value.reasons == (sentence,)


def test_a_sink_may_be_a_list():
    arrays = arrays_of((2, 8, 8), 2)
    listed, array = (on_ranks(2, arrays, {"sink": sink}, block=2) for sink in ([0.5, -1.0], np.array([0.5, -1.0])))
    np.testing.assert_array_equal(listed[0]["o"], array[0]["o"])


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_arguments_are_refused_on_every_rank(sentence):
    def rank(group):
        ContextParallel(group, **{"seqlen": 64, "num_heads": 4, "block": 8} | WRONG[sentence])

    assert refused(rank) == (sentence,)


def test_wrong_arguments_of_methods_are_refused():
    def rank(group):
        cp = ContextParallel(group, seqlen=8, num_heads=2)
        x = np.ones((2, 8, 4), np.float32)
        wrong = {
            "head_dim must be an int of at least 1; got 'a'": lambda: cp.traffic("a"),
            "head_dim must be an int of at least 1; got 0": lambda: cp.workspace_bytes(0),
            "head_dim must be an int of at least 1; got 1.5": lambda: cp.explain(1.5),
            "value_dim must be an int of at least 1; got -1": lambda: cp.traffic(4, -1),
            "machine must be a Machine or None; got 3": lambda: cp.explain(machine=3),
            "return_lse must be True or False; got 1": lambda: cp.attention(x, x, x, return_lse=1),
        }
        for sentence, call in wrong.items():
            with pytest.raises(UnsupportedProblem) as caught:
                call()
            assert caught.value.reasons == (sentence,)
        return cp.attention(x, x, x).shape

    assert run(rank, size=1) == [(2, 8, 4)]


def test_arrays_that_do_not_fit_are_refused_on_every_rank():
    def rank(group):
        cp, (q, k, v) = sharded(group, layout="contiguous")
        cp.attention(q, k[:, :5] if group.rank == 1 else k, v)

    (reason,) = refused(rank)
    assert reason == (
        "rank 1: k must have the 24 rows of this rank (axis -2); got 5: pass cp.shard(k), or the rows cp.kv_rows of "
        "the whole array"
    )


def test_arrays_of_other_dtypes_are_refused_on_every_rank():
    def rank(group):
        cp, arrays = sharded(group)
        cp.attention(*(x.astype(np.float64 if group.rank == 2 else np.float32) for x in arrays))

    assert refused(rank)[0].startswith("ranks must ask for the same call: rank 0 has q=float32")


def test_ranks_meet_once_in_a_pass_and_one_of_them_runs_the_steps(monkeypatch, many_groups):
    meets, issuers = [], []
    do_meet, run_step = Meeting.meet, HostLanes.run

    def meeting(self, rank, what, *others):
        meets.append((rank, what))
        return do_meet(self, rank, what, *others)

    def issuing(self, issue, *others):
        issuers.append((threading.get_ident(), issue.number))
        return run_step(self, issue, *others)

    monkeypatch.setattr(Meeting, "meet", meeting)
    monkeypatch.setattr(HostLanes, "run", issuing)

    def rank(group):
        cp, (q, k, v) = sharded(group)
        o, vjp = cp.attention_vjp(q, k, v)
        vjp(o)
        return [len(each) for each in cp._posed.steps.values()]

    steps = run(rank, size=3)[0]
    assert sorted(meets) == [(rank, what) for rank in range(3) for what in ("ContextParallel", "attention", "vjp")]
    assert [number for _, number in issuers] == [*range(steps[0]), *range(steps[1])]
    assert len({*issuers[: steps[0]]}) == steps[0] and len({thread for thread, _ in issuers[: steps[0]]}) == 1


def test_a_group_goes_on_after_a_refusal():
    def rank(group):
        cp, (q, k, v) = sharded(group)
        with pytest.raises(UnsupportedProblem):
            cp.attention(q[:1], k, v)
        return cp.unshard(cp.attention(q, k, v)).shape

    assert run(rank, size=2) == [(2, 64, 8)] * 2


@pytest.mark.parametrize("arguments", [{"size": 0}, {"size": 1.5}, {"size": 2, "timeout": 0}, {"size": 2, "seed": -1}])
def test_wrong_arguments_of_run_are_refused(arguments):
    with pytest.raises(UnsupportedProblem):
        run(lambda group: None, **arguments)
    with pytest.raises(TypeError):
        run(3, size=2)
    with pytest.raises(TypeError):
        ContextParallel(None, seqlen=8, num_heads=1)
    with pytest.raises(TypeError, match="causall"):
        run(lambda group: ContextParallel(group, seqlen=8, num_heads=1, causall=True), size=1)
