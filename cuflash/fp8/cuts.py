"""Terms of the error bound for the bits that tensor cores cut off sums of e4m3.

A product with 32 terms and an accumulator cuts each of the 33, towards zero, to multiples of 2^(e - 13), e being the
largest of their exponents, and its result to 13 bits of mantissa. The exponent of a product is the sum of its factors',
where a subnormal factor counts as 2^-6. With |x|' = max(|x|, 2^-6) of numbers x that are not 0, one instruction costs
at most 34 2^-13 times the sum of |a|'|b|' over all that was added before and in it::

    |error of S| <= ceil(d / 32) 34 2^-13 |scale| |Q|'|K|'^T
    |error of O| <= 16 34 2^-13 sum_j max(P_j, 2^-7 exp(m - L)) |v_j|'

The second line has the sixteen instructions of 512 keys, whose sum is then added in float32. A row's largest weight
is 2^2 or more in the tensor cores, and weights are divided by at most 2 more where the scale of their values is smaller
than the sum's: the smallest normal number, 2^-6, is 2^-7 of the largest weight or less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..reference import expand_heads, with_heads
from . import e4m3
from .quantize import Quantized

LOST_WEIGHT = 2.0**-11  # half of the smallest subnormal number, 2^-9, over 2^2 / 2
_CUT = 34 * 2.0**-13
_DEPTH = 32  # terms of an instruction
_KEYS_OF_SUM = 512  # whose values are summed in the tensor cores
_SMALLEST_NORMAL, _SMALLEST_NORMAL_WEIGHT = 2.0**-6, 2.0**-7


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Magnitudes of quantised operands, in which no number but 0 is smaller than the smallest normal one."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def of(cls, q: Quantized, k: Quantized, v: Quantized) -> Cuts:
        """The magnitudes of a call's operands, with k and v for each query head."""
        queries = with_heads(_magnitudes(q))
        keys, values = (expand_heads(_magnitudes(x), queries.shape[-3]) for x in (k, v))
        return cls(queries, keys, values)

    def of_scores(self, allowed: Array, scale: float) -> Array:
        """Return the largest errors of scores, 0 where they are masked."""
        instructions = -(-self.q.shape[-1] // _DEPTH)
        return np.where(allowed, instructions * _CUT * abs(scale) * (self.q @ np.swapaxes(self.k, -1, -2)), 0)

    def of_output(self, p: Array, allowed: Array, largest: Array) -> Array:
        """Return the largest errors of o, for weights p of which the largest is at most `largest`."""
        weights = np.where(allowed, np.maximum(p, _SMALLEST_NORMAL_WEIGHT * largest), 0)
        values = np.where(allowed.any(axis=-2)[..., None], self.v, 0)
        cut: Array = _KEYS_OF_SUM // _DEPTH * _CUT * (weights @ values)
        return cut


def _magnitudes(x: Quantized) -> Array:
    numbers = np.abs(e4m3.to_float32(x.data).astype(np.float64))
    floored = np.where(numbers == 0, 0, np.maximum(numbers, _SMALLEST_NORMAL))
    made: Array = floored * x._of_rows(x.scale.astype(np.float64))
    return made
