"""The decode kernel: attention of new tokens to a cache, with bits that depend on nothing but their own sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import CAPACITY, FEW, KINDS, LENGTHS, NEW, assert_attention, attended, drawn, paged, same_bits
from cuflash import DeviceSpec, KVCache, UnsupportedProblem
from cuflash.cache import kv_cache
from cuflash.executors import gpu
from cuflash.executors.sim import Simulator
from cuflash.planning.decoding import decode_reasons, num_parts
from cuflash.planning.problem import Problem
from executors import RUNS, SIM, Run, hostile_schedules

import cuflash

on_kernels = pytest.mark.parametrize("run", RUNS[1:], ids=str)


@on_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_attention_and_depends_on_its_own_sequence_alone(run: Run, kind: str) -> None:
    """Within the bound; alone, in another order, and in pages of any size in any place: the same bits."""
    call, device = drawn(KINDS[kind]), KINDS[kind]["device"]
    *results, faults = attended(run, call, device)
    assert not faults
    assert_attention(run, call, *results)
    for rows in ([6], [2, 0, 5], range(len(LENGTHS))[::-1]):
        made = attended(run, call.of(rows), device)[:2]
        assert same_bits(made, [x[list(rows)] for x in results])
    for seed, page_size in enumerate((16, 48, 64, 128)):
        *made, faults = attended(run, call, device, paged(call, page_size, seed))
        assert same_bits(made, results) and not faults


@on_kernels
def test_rows_of_a_sequence_may_be_fewer_than_those_given(run: Run) -> None:
    """With counts of 3, 1 and 0 of 3 rows."""
    call = replace(drawn(NEW | {"rows": 3, "heads": 4}, (193, 70, 9)), counts=(3, 1, 0))
    o, lse, faults = attended(run, call, FEW)
    for b, count in enumerate(call.counts or ()):
        one = replace(call.of([b]), q=call.q[b : b + 1, :, :count], counts=None)
        if count:
            assert same_bits(attended(run, one, FEW)[:2], (o[b : b + 1, :, :count], lse[b : b + 1, :, :count]))
        assert not o[b, :, count:].any() and np.isneginf(lse[b, :, count:]).all()
    assert not faults


@on_kernels
def test_numbers_out_of_range_are_counted_and_lead_nowhere(run: Run) -> None:
    """Page numbers, lengths and counts: nothing but the sequence's own result is lost, which is finite."""
    call = drawn(NEW, (100, 200, 33))
    k, v, table = paged(call, 16, 0)
    right = attended(run, call, FEW, (k, v, table))
    assert right[2] == 0
    for junk in (-1, len(k), 2**31 - 1, -(2**31)):
        wrong = table.copy()
        wrong[1, 3] = junk
        o, lse, faults = attended(run, call, FEW, (k, v, wrong))
        assert faults > 0 and np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
        assert same_bits([x[[0, 2]] for x in (o, lse)], [x[[0, 2]] for x in right[:2]])
    for lengths in ((100, CAPACITY + 1, 33), (100, 2**31 - 1, 33), (100, -7, 33)):
        o, lse, faults = attended(run, replace(call, lengths=lengths), FEW, (k, v, table * 0))
        assert faults > 0


@pytest.mark.parametrize("kind", ["many parts", "a full tile"])
def test_every_schedule_gives_the_same_bits(kind: str) -> None:
    call, device = drawn(KINDS[kind], (300, 130)), KINDS[kind]["device"]
    results = attended(SIM, call, device)[:2]
    for schedule in hostile_schedules(kind):
        assert same_bits(attended(SIM, call, device, target=Simulator(schedule))[:2], results)


@on_kernels
@pytest.mark.parametrize("pages", [{}, {"page_size": 16, "num_pages": 40}], ids=["contiguous", "pages"])
def test_a_cache_takes_the_kernel_where_it_serves(run: Run, pages: dict[str, int], monkeypatch: Any) -> None:
    call = drawn(KINDS["many parts"], (300, 7))
    sizes = {"batch": 2, "num_kv_heads": 2, "head_dim": 64, "capacity": CAPACITY, "dtype": call.q.dtype, **pages}
    cache = KVCache(**sizes, **({"xp": pytest.importorskip("cupy")} if run.is_on_device else {}))
    cache.k[...], cache.v[...] = np.nan, np.nan
    cache.append(run.put(call.k), run.put(call.v), counts=call.lengths)
    q, sink, options = run.put(call.q), run.put(call.sink), {"executor": run.executor, "return_lse": True}
    assert_attention(run, call, *(run.get(x) for x in cache.attention(q, sink=sink, kernel="simt", **options)))
    monkeypatch.setattr(kv_cache, "attention", None)  # what else would serve
    made = [run.get(x) for x in cache.attention(q, sink=sink, **options)]
    device = gpu.current_device() if run.is_on_device else DeviceSpec.gpu("H100")
    assert same_bits(made, attended(run, call, device)[:2])
    assert_attention(run, call, *made)


REASONS = {
    "too many rows": ({"rows": 33, "heads": 4}, {}, "q must have 1 to 64 rows for each key/value head; got 66"),
    "a dim in half a chunk": ({"dim": 36}, {}, "head_dim must be a multiple of 8; got 36"),
    "float32": ({"dtype": np.float32}, {}, "kernel='sm80' takes float16 or bfloat16; got float32"),
    "a scale like no other": ({"dtype": ml_dtypes.bfloat16}, {"scale": 1e36}, "scale must be near enough to 1"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_the_kernel_does_not_serve_is_told(name: str) -> None:
    kind, options, told = REASONS[name]
    call = drawn(NEW | kind, (3,))
    assert told in str(UnsupportedProblem(decode_reasons(Problem.of(call.q, call.k, call.v, **options), FEW)))


@pytest.mark.parametrize("heads, parts", [(1, 128), (2, 64), (8, 16), (32, 4), (132, 1), (1000, 1)])
def test_parts_follow_from_the_chip_and_the_heads(heads: int, parts: int) -> None:
    q = cuflash.ShapeDtype((7, heads, 1, 64), np.float16)
    assert num_parts(Problem.of(q, q, q), DeviceSpec.gpu("H100")) == parts
