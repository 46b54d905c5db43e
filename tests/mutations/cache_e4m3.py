"""Planted faults in the kernels of FP8 caches, and the guards that must detect them."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from cache_calls import NEW, appended, assert_is_attention, attended, drawn, expected, paged, same_bits
from cuflash.fp8.rows import dequantized_rows, quantized_rows
from executors import SIM
from mutations.planting import Edit

SIGNS = (AssertionError,)  # exceptions with which a guard reports a fault
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_CALL = drawn(NEW | {"rows": 3, "heads": 8, "dtype": _BFLOAT16}, (193, 70))


def decode_is_right() -> None:
    """Check that rows with very different scales give results within bounds, with equal bits in pages and without."""
    factors = np.exp2(np.arange(300) % 5 - 2)[:, None]
    call = replace(_CALL, k=(_CALL.k * factors[::-1]).astype(_BFLOAT16), v=(_CALL.v * factors).astype(_BFLOAT16))
    o, lse, faults = attended(SIM, call, is_quantized=True)
    assert not faults and same_bits(attended(SIM, call, paged(call, 16, 0), is_quantized=True)[:2], (o, lse))
    assert_is_attention(
        call, o, lse, SIM.rounded, lambda rows: dequantized_rows(*quantized_rows(rows), _BFLOAT16)
    )


def append_is_right() -> None:
    """Check that rows, scales and lengths equal the host's, for rows of zeros, of NaN, and of numbers of all sizes."""
    counts = (26, 10, 1, 4)
    rows, k, v, lengths, _, *scales = appended(SIM, np.float32, (64, 40), counts, 26, is_quantized=True, is_hard=True)
    for new_rows, pages, scale in zip(rows, (k, v), scales):
        data, wanted = quantized_rows(new_rows)
        assert np.array_equal(pages, expected([data.view(np.uint8)], counts)[0][0])
        assert np.array_equal(scale, expected([wanted], counts)[0][0], equal_nan=True)
    assert lengths.tolist() == [40, 13, 16, 40]


FAULTS = {
    decode_is_right: {
        "values are added without their scales": Edit(
            "sm80/decode_e4m3.cu", "ScaledStage.add", "scale_columns(weights, scales(true));", ""
        ),
        "keys have the scales of values": Edit(
            "sm80/decode_e4m3.cu", "ScaledStage.multiply", "scales(false)", "scales(true)"
        ),
        "scales are those of another warp's keys": Edit(
            "sm80/decode_e4m3.cu", "ScaledStage.scale_columns", "() + s.column(j)", "() % 16 + s.column(j)"
        ),
        "scales past the end are read": Edit(
            "sm80/decode_e4m3.cu", "ScaledStage.start_scales", ">= first_row && own_row < last_row", ">= first_row"
        ),
        "signs are lost": Edit(
            "tile/e4m3.cuh", None, "(x >> 4 & kBits) | (x & kSigns)", "(x >> 4 & kBits)"
        ),
        "queries stand in another order than keys": Edit(
            "tile/e4m3.cuh", "load_interleaved", "2 * k + lane % 4 / 2", "2 * k + lane % 2"
        ),
        "columns of the output change places": Edit(
            "tile/e4m3.cuh", "store_interleaved_row", "[0], odd[0], even[1], odd[1]}}", "[0], even[1], odd[0], odd[1]}}"
        ),
    },
    append_is_right: {
        "numbers exceed the format": Edit("cache/append_e4m3.cu", "Row.store", "(largest + 0x1fffffu)", "largest"),
        "the largest numbers become infinite": Edit(
            "cache/append_e4m3.cu", "Row.store", "exponent == kLastExponent ? 240.0f : 448.0f", "448.0f"
        ),
        "ties are rounded up": Edit(
            "tile/e4m3.cuh", "to_e4m3", "0x7ffffu + (magnitude >> 20 & 1u)", "0x80000u"
        ),
        "NaN is a number": Edit("cache/append_e4m3.cu", "Row.store", "is_finite = largest <", "is_finite = largest <="),
        "rows of zeros have a scale of their own": Edit(
            "cache/append_e4m3.cu", "Row.store", "largest == 0 ? 0x3f800000u : exponent << 23", "exponent << 23"
        ),
        "a lane's columns alone make the scale": Edit(
            "cache/append_e4m3.cu", "Row.largest_bits", "offset > 0", "offset > 1"
        ),
    },
}
