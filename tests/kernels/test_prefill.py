"""Attention of many new tokens to a KV cache reads pages in place; a result's bits depend only on its own sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import (
    CAPACITY, assert_bits_are_of_own_sequences, assert_is_attention, assert_numbers_out_of_range_lead_nowhere,
    assert_rows_may_be_fewer, cache_of, drawn, paged, same_bits,
)  # fmt: skip
from cuflash import DeviceSpec, KVCache, UnsupportedProblem
from cuflash.cache import one_by_one as calls_of_sequences
from cuflash.executors.sim import Simulator
from cuflash.planning.prefill import prefill_reasons, prefill_spec
from cuflash.planning.problem import Problem
from cuflash.testing import Example, assert_within_bounds
from executors import SIM, Run, hostile_schedules, on_sim_and_gpu
from prefill_calls import CHIP, CHUNK, FAMILIES, KINDS, LENGTHS, prefilled, with_counts

of_families = pytest.mark.parametrize("family", FAMILIES)


@on_sim_and_gpu
@of_families
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_attention_and_depends_on_its_own_sequence_alone(run: Run, family: str, kind: str) -> None:
    """Results are within bounds; a sequence has equal bits alone, in another order, and in pages of any size."""
    call, attend = drawn(KINDS[kind], LENGTHS), partial(prefilled, run, family)
    o, lse, faults = attend(call)
    assert not faults
    assert_is_attention(call, o, lse, run.rounded)
    page_sizes = (16, 48, 128) if run.is_on_device else (16, 48)
    assert_bits_are_of_own_sequences(attend, call, (o, lse), ([2], [0, 1]), page_sizes)


@on_sim_and_gpu
@of_families
def test_rows_of_a_sequence_may_be_fewer_than_those_given(run: Run, family: str) -> None:
    """Rows that belong to no sequence may hold anything; the other rows keep the bits that they have alone."""
    assert_rows_may_be_fewer(partial(prefilled, run, family), with_counts())


@on_sim_and_gpu
@of_families
def test_numbers_out_of_range_are_counted_and_lead_nowhere(run: Run, family: str) -> None:
    """Invalid page numbers, lengths and counts affect only the result of their own sequence, which stays finite."""
    call = drawn(CHUNK, (100, 200))
    assert_numbers_out_of_range_lead_nowhere(partial(prefilled, run, family), call)
    assert prefilled(run, family, replace(call, counts=(70, 71)), paged(call, 16, 0))[2] > 0


@of_families
def test_every_schedule_gives_the_same_bits(family: str) -> None:
    call = drawn(CHUNK, (193,))
    results = prefilled(SIM, family, call)[:2]
    for schedule in hostile_schedules(f"prefill {family}"):
        assert same_bits(prefilled(SIM, family, call, paged(call, 16, 0), Simulator(schedule))[:2], results)


@on_sim_and_gpu
@pytest.mark.parametrize("pages", [{}, {"page_size": 16, "num_pages": 40}], ids=["contiguous", "pages"])
def test_a_cache_takes_the_kernels_where_they_serve(run: Run, pages: dict[str, int], monkeypatch: Any) -> None:
    call = drawn(KINDS["grouped heads and a sink"], (193, 7)).fitting()
    cache = cache_of(run, call, pages)
    q, sink = run.put(call.q), run.put(call.sink)
    options = {"executor": run.executor, "return_lse": True, "counts": call.counts}
    one_by_one = [run.get(x) for x in cache.attention(q, sink=sink, kernel="simt", **options)]
    assert_is_attention(call, *one_by_one, run.rounded)
    monkeypatch.setattr(calls_of_sequences, "Call", None)  # the fall-back that would otherwise serve the call
    for kernel in FAMILIES:
        results = [run.get(x) for x in cache.attention(q, sink=sink, kernel=kernel, **options)]
        assert same_bits(results, prefilled(run, kernel, call)[:2])
        assert_is_attention(call, *results, run.rounded)
    assert same_bits([run.get(x) for x in cache.attention(q, sink=sink, **options)], results)


def test_every_key_is_seen_without_causality() -> None:
    call = drawn(CHUNK, (193,))
    sizes = {"batch": 1, "num_kv_heads": 2, "head_dim": 64, "capacity": CAPACITY, "dtype": np.float16}
    cache = KVCache(**sizes, page_size=16, num_pages=19)
    cache.append(call.k[:, :, :193], call.v[:, :, :193])
    o = cache.attention(call.q, executor="sim", causal=False, return_lse=True)
    example = Example(q=call.q[0], k=call.k[0, :, :193], v=call.v[0, :, :193])
    assert_within_bounds(SIM.rounded(example), o=o[0][0], lse=o[1][0])


REASONS = {
    "a dim in half a chunk": ({"dim": 36}, {}, "head_dim must be a multiple of 8; got 36"),
    "float32": ({"dtype": np.float32}, {}, "takes float16 or bfloat16; got float32"),
    "a large scale": ({"dtype": ml_dtypes.bfloat16}, {"scale": 1e36}, "scale must be 0, or from 2**-64 to 2**64"),
    "no row": ({"rows": 0}, {}, "q must have at least one row"),
}


@of_families
@pytest.mark.parametrize("name", REASONS)
def test_what_the_kernels_do_not_serve_is_told(name: str, family: str) -> None:
    kind, options, message = REASONS[name]
    call = drawn(CHUNK | kind, (3,))
    assert message in str(
        UnsupportedProblem(prefill_reasons(Problem.of(call.q, call.k, call.v, **options), CHIP, family))
    )


def test_the_tile_depends_on_neither_the_batch_nor_the_rows() -> None:
    k, older = np.empty((9, 2, 300, 64), np.float16), DeviceSpec.gpu("A100")
    few, many = Problem.of(k[:1, :, :1], k[:1], k[:1]), Problem.of(k, k, k)
    for family in FAMILIES:
        assert prefill_spec(few, CHIP, family) == prefill_spec(many, CHIP, family)
    assert prefill_reasons(few, older, "sm90") and not prefill_reasons(few, older, "sm80")
