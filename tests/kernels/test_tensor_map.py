"""Tensor maps that hardware cannot use are refused with every reason. Copies with valid maps are in test_probes.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuflash.arrays import BFLOAT16
from cuflash.executors.tensor_map import BYTES, BoxedArray, encoded, simulated

FITTING = {
    "dtype": np.dtype(np.float16), "shape": (2, 3, 100, 72), "strides": (43200, 14400, 144, 2), "box": (1, 1, 64, 64),
    "swizzle_bytes": 128,
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": np.dtype(np.float64)}, "dtype must be float16, bfloat16, float32 or uint8; got float64"),
    "no axis": ({"shape": (), "strides": (2,), "box": (8,)}, "must have 2 to 5 axes and a box the same number; got ()"),
    "one axis": (
        {"shape": (72,), "strides": (2,), "box": (8,)}, "must have 2 to 5 axes and a box the same number; got (72,)"
    ),
    "six axes": (
        {"shape": (1,) * 6, "strides": (16,) * 5 + (2,), "box": (1,) * 5 + (8,)}, "must have 2 to 5 axes and a box",
    ),
    "a box of fewer axes": ({"box": (64, 64)}, "a box the same number; got (2, 3, 100, 72) and (64, 64)"),
    "empty": ({"shape": (2, 0, 100, 72)}, "no axis may be empty; got shape (2, 0, 100, 72)"),
    "columns apart": ({"strides": (43200, 14400, 144, 4)}, "the last axis must be dense; got a stride of 4 bytes"),
    "rows at odd places": ({"strides": (43200, 14400, 150, 2)}, "strides must be multiples of 16 bytes below 2**40"),
    "rows backwards": ({"strides": (43200, 14400, -144, 2)}, "strides must be multiples of 16 bytes below 2**40"),
    "far apart": ({"strides": (1 << 40, 14400, 144, 2)}, "strides must be multiples of 16 bytes below 2**40"),
    "a tall box": ({"box": (1, 1, 257, 64)}, "a box has 1 to 256 elements along each axis; got (1, 1, 257, 64)"),
    "a wide box": ({"box": (1, 1, 64, 72)}, "multiples of 16 bytes, at most 128; got 144"),
    "an odd box": ({"box": (1, 1, 64, 12)}, "multiples of 16 bytes, at most 128; got 24"),
    "an unknown swizzle": ({"swizzle_bytes": 256}, "multiples of 16 bytes, at most 256; got 128"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_hardware_cannot_copy_is_refused(name: str) -> None:
    changed, reason = REFUSED[name]
    tiles = BoxedArray(**{**FITTING, **changed})
    assert any(reason in each for each in tiles.reasons(4096)), tiles.reasons(4096)
    for make in (simulated, encoded):
        with pytest.raises(ValueError, match="cannot make a tensor map of BoxedArray"):
            make(tiles, 4096)


def test_an_array_at_an_odd_address_is_refused() -> None:
    assert BoxedArray(**FITTING).reasons(4104) == ["the first element must be at a multiple of 16 bytes; got 0x1008"]


FITTING_TOO: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": BFLOAT16},
    {"strides": (0, 14400, 144, 2)},
    {"box": (1, 2, 256, 32), "swizzle_bytes": 64},
    {"box": (1, 1, 1, 256), "swizzle_bytes": 0},
    {"shape": (1, 1), "strides": (34, 2), "box": (1, 8)},
    {"shape": (2, 1, 100, 72), "strides": (43200, -7, 144, 2)},
)


@pytest.mark.parametrize("changed", FITTING_TOO)
def test_a_map_is_a_scalar_of_128_bytes(changed: dict[str, Any]) -> None:
    tensor_map = simulated(BoxedArray(**{**FITTING, **changed}), 4096)
    assert isinstance(tensor_map, np.generic) and len(tensor_map.tobytes()) == BYTES == 128


@pytest.mark.gpu
def test_the_driver_takes_what_is_not_refused() -> None:
    import cupy

    memory = cupy.empty(1 << 20, cupy.uint8)
    for changed in FITTING_TOO:
        tensor_map = encoded(BoxedArray(**{**FITTING, **changed}), memory.data.ptr)
        assert len(tensor_map.tobytes()) == BYTES and any(tensor_map.tobytes())
