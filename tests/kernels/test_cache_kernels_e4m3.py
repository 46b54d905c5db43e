"""Kernels of FP8 caches: append rounds as the host does, and decode attends to the stored rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import (
    KINDS, LENGTHS, NEW, appended, assert_bits_are_of_own_sequences, assert_is_attention, attended, drawn,
    expected, same_bits,
)  # fmt: skip
from cuflash import DeviceSpec
from cuflash.executors.sim import Simulator
from cuflash.fp8.rows import dequantized_rows, quantized_rows
from cuflash.planning.decoding import decode_reasons
from cuflash.planning.problem import Problem
from cuflash.testing import Example
from executors import SIM, Run, hostile_schedules, on_sim_and_gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = {"float16": np.float16, "bfloat16": BFLOAT16}
OF_DECODE = {
    "one token": KINDS["one token"],
    "many parts": KINDS["many parts"],
    "several tokens, grouped heads": KINDS["several tokens, grouped heads"] | {"dim": 128},
    "a full tile": KINDS["a full tile"],
    "a window": KINDS["a window"],
    "dims that are padded": NEW | {"dim": 48, "rows": 2, "dtype": BFLOAT16},
    "wide": NEW | {"dim": 256, "dtype": BFLOAT16},
}


def stored_rows(rows: Any, dtype: Any) -> Any:
    """Round rows as an FP8 cache does, in a dtype that holds the results exactly."""
    wide = dequantized_rows(*quantized_rows(rows), np.float32)
    stored = wide.astype(dtype)
    assert np.array_equal(stored.astype(np.float32), wide)
    return stored


@on_sim_and_gpu
@pytest.mark.parametrize("kind", OF_DECODE)
def test_it_is_attention_to_the_rows_that_are_kept(run: Run, kind: str) -> None:
    """Results are within the bounds of bfloat16 weights; bits are equal alone, in another order, and in any pages."""
    call, attend = drawn(OF_DECODE[kind]), partial(attended, run, device=OF_DECODE[kind]["device"], is_quantized=True)
    o, lse, faults = attend(call)
    assert not faults
    rounded = partial(Example.but, product_dtype=BFLOAT16)
    assert_is_attention(call, o, lse, rounded, partial(stored_rows, dtype=call.q.dtype))
    assert_bits_are_of_own_sequences(attend, call, (o, lse), ([6], range(len(LENGTHS))[::-1]), (16, 48, 128))


@on_sim_and_gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_of_8_bits_are_multiplied_exactly(run: Run, dtype: str) -> None:
    """With one key per query, lse is the score, and o is the key's row of values, for all 256 FP8 numbers but NaN."""
    bits = np.arange(256, dtype=np.uint8)
    bits[[0x7F, 0xFF]] = 0
    numbers = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    call = drawn(NEW | {"dim": 256, "dtype": HALVES[dtype], "heads": 2}, (1,))
    rows = np.stack([numbers, numbers[::-1] * 2**-5])[None, :, None].astype(call.q.dtype)
    call.k[:, :, :1], call.v[:, :, :1] = rows, rows
    call = replace(call, q=np.zeros_like(call.q))
    for column in (3, 0x46, 0x81, 0xFE):
        call.q[...] = 0
        call.q[..., column] = 0.5
        o, lse, _ = attended(run, call, is_quantized=True)
        assert np.array_equal(o[:, :, 0], rows[:, :, 0])
        assert np.array_equal(lse[:, :, 0], np.float32(rows[:, :, 0, column]) * np.float32(0.5 / 16))


@on_sim_and_gpu
def test_a_row_of_nan_reaches_the_queries_that_see_it(run: Run) -> None:
    for array in ("k", "v"):
        call = drawn(NEW, (70, 33))
        getattr(call, array)[0, 0, 3, 5] = np.inf
        o, lse, _ = attended(run, call, is_quantized=True)
        assert np.isnan(o[0, 0].astype(np.float32)).all() and np.isfinite(o[0, 1].astype(np.float32)).all()
        assert np.isfinite(o[1].astype(np.float32)).all() and np.isnan(lse[0, 0, 0]) == (array == "k")


@pytest.mark.parametrize("kind", ["many parts", "a full tile"])
def test_every_schedule_decodes_alike(kind: str) -> None:
    call, device = drawn(OF_DECODE[kind], (300, 130)), OF_DECODE[kind]["device"]
    results = attended(SIM, call, device=device, is_quantized=True)[:2]
    for schedule in hostile_schedules(kind):
        assert same_bits(attended(SIM, call, device=device, target=Simulator(schedule), is_quantized=True)[:2], results)


def test_dims_that_are_no_whole_chunks_are_refused() -> None:
    call = drawn(NEW | {"dim": 40}, (3,))
    problem = Problem.of(call.q, call.k, call.v)
    reasons = decode_reasons(problem, DeviceSpec.gpu("H100"), is_quantized=True)
    assert reasons == [f"{name} must be a multiple of 16; got 40" for name in ("head_dim", "value_dim")]
    assert decode_reasons(problem, DeviceSpec.gpu("H100")) == []


# Appending


@on_sim_and_gpu
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
@pytest.mark.parametrize("dims", [(8, 16), (256, 3)], ids=str)
def test_rows_are_rounded_as_on_the_host(run: Run, dtype: Any, dims: tuple[int, int]) -> None:
    """New rows get the host's bits and go where rows of a plain cache go.

    Rows that do not fit are dropped and counted.
    """
    for counts, num_rows in (((5, 2, 0, 4), 5), ((26, 10, 1, 4), 26)):
        rows, k, v, lengths, faults, *scales = appended(run, dtype, dims, counts, num_rows, is_quantized=True)
        expected_rows = [quantized_rows(x) for x in rows]
        pages, wanted = expected([data.view(np.uint8) for data, _ in expected_rows], counts)
        assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1])
        assert all(map(np.array_equal, scales, expected([scale for _, scale in expected_rows], counts)[0]))
        assert lengths.tolist() == wanted and not faults[0]
    assert appended(run, dtype, dims, (6, 0, 0, 0), is_quantized=True)[4][0]


@on_sim_and_gpu
def test_hard_numbers_are_rounded_as_on_the_host(run: Run) -> None:
    """The rows include ties, subnormals, NaN, infinities, the limits of both formats, and a single nonzero number."""
    counts = (26, 10, 1, 4)
    rows, k, v, _, _, *scales = appended(run, np.float32, (64, 40), counts, 26, is_quantized=True, is_hard=True)
    for new_rows, pages, scale in zip(rows, (k, v), scales):
        data, wanted = quantized_rows(new_rows)
        assert np.isnan(wanted).any() and (wanted == 1).any() and (wanted == np.float32(2.0**-126)).any()
        assert np.array_equal(pages, expected([data.view(np.uint8)], counts)[0][0])
        assert np.array_equal(scale, expected([wanted], counts)[0][0], equal_nan=True)


def test_every_schedule_rounds_alike() -> None:
    rows, k, *_ = appended(SIM, np.float16, (64, 64), (26, 10, 1, 4), 26, is_quantized=True)
    wanted = expected([quantized_rows(rows[0])[0].view(np.uint8)], (26, 10, 1, 4))[0][0]
    assert np.array_equal(k, wanted)
    for schedule in hostile_schedules("append e4m3"):
        rows, k, _, lengths, *_ = appended(
            SIM, np.float16, (64, 64), (26, 10, 1, 4), 26, Simulator(schedule), is_quantized=True
        )
        assert np.array_equal(k, expected([quantized_rows(rows[0])[0].view(np.uint8)], (26, 10, 1, 4))[0][0])
        assert lengths.tolist() == [40, 13, 16, 40]
