"""Guards for faults of the kernels for 8 bits, on the simulator: a fault gives a wrong number, or breaks a rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from cuflash.executors import quantizing
from cuflash.executors.sim import Simulator
from cuflash.fp8.transposed import transposed_values
from cuflash.planning.quantizing import transpose_spec
from executors import SIM
from test_fp8_kernels import (
    SCHEDULED, attention, beside_ties, on_simulator, operands, require_bits, require_bounds, rising_scores,
)  # fmt: skip
from test_sm90 import FewBlocks

import cuflash
from cuflash import Rotation, masks, sim

SIGNS = (AssertionError, sim.SimulationError)  # exceptions by which guards see a fault


@cache
def quantised(seqlen: int, dim: int, dtype: str) -> tuple[Any, ...]:
    """Return operands whose scales differ from block to block, those of values by factors of 8 and 1.7."""
    x = operands(seqlen, seqlen, (dim, dim), (4, 2), dtype)
    x[1][:, :128] *= x[1].dtype.type(4)
    x[2] = np.abs(x[2])  # so that errors do not cancel
    x[2][:, 128:] *= np.array([8, 1.7], x[2].dtype)[:, None, None]
    return tuple(cuflash.quantize(each) for each in x)


def fp8_is_right() -> None:
    """A kernel has two warpgroups, a band and a sink; another has one warpgroup and a list."""
    x8 = quantised(300, 64, "bfloat16")
    sink = np.float32([0.5, -1.0, 30.0, -np.inf])
    for named in ({"causal": True, "sink": sink}, {"window": (150, 3)}, {"scale": -0.3}, {"scale": 2.0}):
        require_bounds(attention(SIM, x8, **named), x8, **named)
    rising = rising_scores(512)
    require_bounds(attention(SIM, rising), rising)
    y8 = [replace(x, scale=np.repeat(x.scale, 2, axis=-1)[..., :5], block=64) for x in x8]
    mask = masks.Documents(np.repeat(np.arange(3), 100)) & masks.Causal()
    index = cuflash.BlockIndex.from_mask(mask, block=64, batch=(), num_heads=4, seqlen_q=300, seqlen_kv=300)
    require_bounds(attention(SIM, y8, mask=index), y8, mask=mask)


def fp8_is_scheduled_right() -> None:
    """One thread block that computes all tiles under hostile schedules gives the bits of one block for each tile."""
    x8 = [cuflash.quantize(x, block=64) for x in operands(600, 600, (64, 64), (4, 2), "bfloat16")]
    for name in ("causal", "list"):
        right = attention(SIM, x8, **SCHEDULED[name])
        for copies, order in (("late", "priorities"), ("random", "first_warp")):
            schedule = sim.Schedule(seed=1, order=order, copies=copies, shuffle_lanes=True)
            with on_simulator(FewBlocks(schedule)):
                found = attention(SIM, x8, **SCHEDULED[name])
            np.testing.assert_array_equal(found[0].view(np.uint16), right[0].view(np.uint16))
            np.testing.assert_array_equal(found[1], right[1])


def rounding_is_right() -> None:
    """Bits are right for short last blocks, for rotated rows, for blocks with NaN or infinity, and beside ties."""
    x = np.random.default_rng(0).standard_normal((4, 100, 64)).astype(np.float16)
    x[1, 70, 3] = np.nan
    x[2] = 0
    x[3, 50, 9] = np.inf
    rotation = Rotation(64, seed=2)
    require_bits(x, cuflash.quantize(x, block=32, rotate=rotation), 32, rotation, 448.0)
    require_bits(x, cuflash.quantize(x, block=32), 32, None, 448.0)
    x = x.astype(np.float32).clip(-1, 1) * np.float32(3.4e38)  # sums of which are out of range
    for largest in (448.0, 2.0**-9):
        require_bits(x, cuflash.quantize(x, block=32, rotate=rotation, largest=largest), 32, rotation, largest)
    x = np.broadcast_to(rotation.signs * np.float32(2.0**118), (1, 32, 64)).copy()  # rotated ones exceed 2^119
    early = Simulator(sim.Schedule(order="first_warp"))
    require_bits(x, cuflash.quantize(x, block=32, rotate=rotation), 32, rotation, 448.0, early)
    for exponent in (0, -110):
        near = beside_ties(exponent)
        require_bits(near, cuflash.quantize(near, block=16, largest=256), 16, None, 256.0)


def transposition_is_right() -> None:
    """Values are transposed right for lengths that are no multiple of 128."""
    data = np.random.default_rng(0).integers(0, 256, (2, 150, 64), dtype=np.uint8)
    transposed = np.full((2, 64, 256), 0xA5, np.uint8)
    spec = transpose_spec(64)
    assert spec is not None
    quantizing.transpose(spec, data, transposed, Simulator())
    np.testing.assert_array_equal(transposed, transposed_values(data))
