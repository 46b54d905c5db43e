"""The decode kernel: attention of new tokens to a cache, where a result's bits depend only on its own sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import (
    FEW, KINDS, LENGTHS, NEW, assert_bits_are_of_own_sequences, assert_is_attention,
    assert_numbers_out_of_range_lead_nowhere, assert_rows_may_be_fewer, attended, cache_of, drawn, paged, same_bits,
)  # fmt: skip
from cuflash import DeviceSpec, UnsupportedProblem, sim
from cuflash.cache import one_by_one as calls_of_sequences
from cuflash.executors import gpu
from cuflash.executors.sim import Simulator
from cuflash.planning.decoding import decode_reasons, decode_spec, num_parts
from cuflash.planning.problem import Problem
from executors import SIM, Run, blocks_together, hostile_schedules, on_sim_and_gpu

import cuflash


@on_sim_and_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_attention_and_depends_on_its_own_sequence_alone(run: Run, kind: str) -> None:
    """Results are within their bounds; bits are equal alone, in another order, and in pages of any size and place."""
    call, attend = drawn(KINDS[kind]), partial(attended, run, device=KINDS[kind]["device"])
    o, lse, faults = attend(call)
    assert not faults
    assert_is_attention(call, o, lse, run.rounded)
    parts = [6], [2, 0, 5], range(len(LENGTHS))[::-1]
    assert_bits_are_of_own_sequences(attend, call, (o, lse), parts, (16, 48, 64, 128))


@on_sim_and_gpu
def test_rows_of_a_sequence_may_be_fewer_than_those_given(run: Run) -> None:
    """Sequences use 3, 1 and 0 of the 3 rows that the call has for each."""
    call = replace(drawn(NEW | {"rows": 3, "heads": 4}, (193, 70, 9)), counts=(3, 1, 0))
    assert_rows_may_be_fewer(partial(attended, run), call)


@on_sim_and_gpu
def test_numbers_out_of_range_are_counted_and_lead_nowhere(run: Run) -> None:
    assert_numbers_out_of_range_lead_nowhere(partial(attended, run), drawn(NEW, (100, 200, 33)))


@pytest.mark.parametrize("kind", ["many parts", "a full tile"])
def test_every_schedule_gives_the_same_bits(kind: str) -> None:
    call, device = drawn(KINDS[kind], (300, 130)), KINDS[kind]["device"]
    results = attended(SIM, call, device=device)[:2]
    for schedule in hostile_schedules(kind):
        assert same_bits(attended(SIM, call, device=device, target=Simulator(schedule))[:2], results)


@on_sim_and_gpu
@pytest.mark.parametrize("is_quantized", [False, True], ids=["16 bits", "8 bits"])
def test_parts_of_many_steps_have_the_same_bits_for_any_number_of_stages(run: Run, is_quantized: bool) -> None:
    """With fewer thread blocks, each has more stages. Steps reuse the stages many times, even if copies arrive late."""
    device = replace(DeviceSpec.gpu("H100"), num_processors=2)
    call = drawn(NEW, (1200, 1190, 1153), 1200)
    attend = partial(attended, run, device=device, is_quantized=is_quantized)
    specs = [decode_spec(Problem.of(call.q[:n], call.k[:n], call.v[:n]), device) for n in (1, 2, 3)]
    assert [spec.num_stages for spec in specs] == [4, 3, 2]
    o, lse, faults = attend(call)
    assert not faults
    if not is_quantized:
        assert_is_attention(call, o, lse, run.rounded)
        assert same_bits(attend(call, paged(call, 16, 0))[:2], (o, lse))
    late = None if run.is_on_device else Simulator(sim.Schedule(seed=1, order="random", copies="late"))
    for rows in ([0], [2], [1, 0], [2, 0, 1]):
        assert same_bits(attend(call.of(rows), target=late)[:2], [x[rows] for x in (o, lse)])


@on_sim_and_gpu
@pytest.mark.parametrize("rows", [1, 20])  # warps share 16 rows
def test_more_parts_than_are_merged_at_once_are_attention(run: Run, rows: int) -> None:
    """The last parts, which are merged last, have the largest scores."""
    call = drawn(NEW | {"rows": rows}, (1200, 130), 1200)
    call.k[:, :, 1100:] *= 4
    o, lse, _ = attended(run, call, device=DeviceSpec.gpu("H100"))
    assert_is_attention(call, o, lse, run.rounded)


@pytest.mark.parametrize("kind", ["many parts", "a full tile"])
def test_blocks_that_run_together_give_the_same_bits(kind: str) -> None:
    """Some blocks write parts while others merge parts, without a race between them."""
    call, device = drawn(KINDS[kind], (300, 130)), KINDS[kind]["device"]
    results = attended(SIM, call, device=device)[:2]
    for target in blocks_together(kind):
        assert same_bits(attended(SIM, call, device=device, target=target)[:2], results)


@on_sim_and_gpu
@pytest.mark.parametrize("pages", [{}, {"page_size": 16, "num_pages": 40}], ids=["contiguous", "pages"])
def test_a_cache_takes_the_kernel_where_it_serves(run: Run, pages: dict[str, int], monkeypatch: Any) -> None:
    call = drawn(KINDS["many parts"], (300, 7))
    cache = cache_of(run, call, pages)
    q, sink, options = run.put(call.q), run.put(call.sink), {"executor": run.executor, "return_lse": True}
    one_by_one = [run.get(x) for x in cache.attention(q, sink=sink, kernel="simt", **options)]
    monkeypatch.setattr(calls_of_sequences, "Call", None)  # the fall-back that would otherwise serve the call
    results = [run.get(x) for x in cache.attention(q, sink=sink, **options)]
    device = gpu.current_device() if run.is_on_device else DeviceSpec.gpu("H100")
    assert same_bits(results, attended(run, call, device=device)[:2])
    for o, lse in (results, one_by_one):
        assert_is_attention(call, o, lse, run.rounded)


REASONS = {
    "too many rows": ({"rows": 33, "heads": 4}, {}, "q must have 1 to 64 rows per key/value head; got 66"),
    "a dim in half a chunk": ({"dim": 36}, {}, "head_dim must be a multiple of 8; got 36"),
    "float32": ({"dtype": np.float32}, {}, "kernel='sm80' takes float16 or bfloat16; got float32"),
    "a large scale": ({"dtype": ml_dtypes.bfloat16}, {"scale": 1e36}, "scale must be 0, or from 2**-64 to 2**64"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_the_kernel_does_not_serve_is_told(name: str) -> None:
    kind, options, message = REASONS[name]
    call = drawn(NEW | kind, (3,))
    assert message in str(UnsupportedProblem(decode_reasons(Problem.of(call.q, call.k, call.v, **options), FEW)))


@pytest.mark.parametrize("heads, parts", [(1, 128), (2, 64), (8, 16), (32, 4), (132, 1), (1000, 1)])
def test_parts_follow_from_the_chip_and_the_heads(heads: int, parts: int) -> None:
    q = cuflash.ShapeDtype((7, heads, 1, 64), np.float16)
    assert num_parts(Problem.of(q, q, q), DeviceSpec.gpu("H100")) == parts
