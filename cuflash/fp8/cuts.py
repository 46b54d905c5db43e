"""Error bound terms for the bits that tensor cores truncate when they sum e4m3 products.

An FP8 instruction adds 32 products and an accumulator. It truncates each of these 33 terms, towards zero, to a multiple
of 2^(e - 13), where e is the largest of their exponents, and truncates the result to 13 mantissa bits. The exponent of
a product is the sum of the exponents of its factors, and a subnormal factor counts as 2^-6. Let |x|' = max(|x|, 2^-6)
for x != 0, and |0|' = 0. The error of one instruction is at most 34 2^-13 times the sum of |a|'|b|' over all products
added so far::

    |error of S| <= ceil(d / 32) 34 2^-13 |scale| |Q|'|K|'^T
    |error of O| <= 16 34 2^-13 sum_j max(P_j, 2^-7 exp(m - L)) |v_j|'

The second line covers the sixteen instructions for 512 keys, whose sum is then added in float32. In the tensor cores
the largest weight of a row is at least 2^2. Weights are divided by at most 2 more if the scale of their values is
smaller than the scale of the sum. The smallest normal number, 2^-6, is therefore at most 2^-7 of the largest weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..reference import expand_heads, with_heads
from . import e4m3
from .quantize import Quantized

LOST_WEIGHT = 2.0**-11  # half of the smallest subnormal number, 2^-9, divided by 2^2 / 2
_CUT = 34 * 2.0**-13
_DEPTH = 32  # products that one instruction adds
_KEYS_OF_SUM = 512  # keys that are summed in the tensor cores before the sum is added in float32
_SMALLEST_NORMAL, _SMALLEST_NORMAL_WEIGHT = 2.0**-6, 2.0**-7


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Magnitudes of quantized operands; nonzero magnitudes below the smallest normal number are rounded up to it."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def of(cls, q: Quantized, k: Quantized, v: Quantized) -> Cuts:
        """Return the magnitudes of the operands of a call, with k and v repeated for each query head."""
        queries = with_heads(_magnitudes(q))
        keys, values = (expand_heads(_magnitudes(x), queries.shape[-3]) for x in (k, v))
        return cls(queries, keys, values)

    def of_scores(self, allowed: Array, scale: float) -> Array:
        """Return bounds on the errors of the scores; the bound of a masked score is 0."""
        instructions = -(-self.q.shape[-1] // _DEPTH)
        return np.where(allowed, instructions * _CUT * abs(scale) * (self.q @ np.swapaxes(self.k, -1, -2)), 0)

    def of_output(self, p: Array, allowed: Array, largest: Array) -> Array:
        """Return bounds on the errors of o for weights `p`, none of which exceeds `largest`."""
        weights = np.where(allowed, np.maximum(p, _SMALLEST_NORMAL_WEIGHT * largest), 0)
        values = np.where(allowed.any(axis=-2)[..., None], self.v, 0)
        cut: Array = _KEYS_OF_SUM // _DEPTH * _CUT * (weights @ values)
        return cut


def _magnitudes(x: Quantized) -> Array:
    numbers = np.abs(e4m3.to_float32(x.data).astype(np.float64))
    floored = np.where(numbers == 0, 0, np.maximum(numbers, _SMALLEST_NORMAL))
    magnitudes: Array = floored * x._of_rows(x.scale.astype(np.float64))
    return magnitudes
