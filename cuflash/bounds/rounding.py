"""Roundoffs and underflow of dtypes, as the derivation of the bounds names them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array, accumulator_dtype
from ..fp8.cuts import LOST_WEIGHT

SECOND_ORDER = 1.5
_OPERAND_ROUNDING = {"ieee": 0.0, "tf32": 2 * 2.0**-11 + 2.0**-22, "tf32x3": 8 * 2.0**-24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Costs of rounding and underflow in a call's dtypes; letters are those of the derivation in `cuflash.bounds`.

    Attributes
    ----------
    u, ua, up : float
        Unit roundoffs of the storage dtype, of the accumulator, and of the dtype that P and dS are rounded to.
    t : float
        Relative error that rounded operands bring to a product; 0 unless precision is tf32 or tf32x3.
    w, wa, wp : float
        Largest error of an element by underflow, in the same three dtypes.
    largest, largest_product, largest_sum : float
        Largest finite number of the storage dtype, of the dtype of P and dS, and of the accumulator.
    probable : bool
        Whether `k` counts the roundoffs that a sum most probably collects, and not all that it may.
    """

    u: float
    ua: float
    up: float
    t: float
    w: float
    wa: float
    wp: float
    largest: float
    largest_product: float
    largest_sum: float
    probable: bool

    @classmethod
    def of(cls, storage: np.dtype, precision: str, product: DTypeLike | None, probable: bool) -> Rounding:
        accumulator = accumulator_dtype(storage)
        product = accumulator if product is None else np.dtype(product)
        return cls(
            u=roundoff(storage),
            ua=roundoff(accumulator),
            up=roundoff(product),
            t=_OPERAND_ROUNDING[precision],
            w=underflow(storage),
            wa=underflow(accumulator),
            wp=underflow(product),
            largest=float(limits(storage).max),
            largest_product=float(limits(product).max),
            largest_sum=float(limits(accumulator).max),
            probable=probable,
        )

    def of_quantized(self, are_products_cut: bool) -> Rounding:
        """Tolerances where operands are rounded to A as they are dequantised, and results to A before T."""
        made = replace(self, t=2 * self.ua * (1 + self.ua), u=self.u if self.u == self.ua else self.u + 2 * self.ua)
        return replace(made, wp=LOST_WEIGHT) if are_products_cut else made

    def as_read(self, array: Array) -> tuple[Array, Array]:
        """Values of an array beside q, k and v as a kernel reads them, and how far rounding them to A may move them.

        A number of a float64 array that A cannot hold is infinite; every other value counts as it is.
        """
        if array.dtype != np.float64 or self.ua <= roundoff(array.dtype):
            return array, 0.0
        narrow = array.astype(np.float32)
        is_held = ~np.isinf(narrow)
        return np.where(is_held, array, narrow), np.where(is_held & (array != 0), self.ua * np.abs(array) + self.wa, 0)

    def k(self, terms: int) -> float:
        return min(terms, 6 * math.sqrt(terms)) if self.probable else terms


def limits(dtype: np.dtype) -> Any:
    """Return `numpy.finfo` of a dtype, bfloat16 included."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def roundoff(dtype: np.dtype) -> float:
    return float(limits(dtype).eps) / 2


def underflow(dtype: np.dtype) -> float:
    """Half the smallest subnormal of float16; elsewhere the smallest normal, as CUDA compilers may flush below it."""
    info = limits(dtype)
    return float(info.smallest_subnormal) / 2 if dtype == np.float16 else float(info.smallest_normal)


def rounded_up(tolerance: Array, exact: Array, model: Rounding) -> Array:
    """The published bound: the margin for second-order terms, and inf where the storage dtype may overflow."""
    bound = nan_to_inf(SECOND_ORDER * tolerance)
    return np.where(np.abs(exact) + bound > model.largest, np.inf, bound)


def nan_to_inf(bound: Array) -> Array:
    return np.where(np.isnan(bound), np.inf, bound)
