"""Roundoffs and underflow of dtypes, in the notation of `cuflash.bounds`."""

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
    """Error bounds of rounding and underflow in a call's dtypes, in the notation of `cuflash.bounds`.

    Attributes
    ----------
    u, ua, up : float
        Unit roundoffs of the storage dtype, of the accumulator, and of the dtype that P and dS are rounded to.
    t : float
        Relative error of a product by rounding its operands; 0 unless precision is tf32 or tf32x3.
    w, wa, wp : float
        Largest error of an element by underflow, in the same three dtypes.
    largest, largest_product, largest_sum : float
        Largest finite number of the storage dtype, of the dtype of P and dS, and of the accumulator.
    probable : bool
        If True, `k` counts the roundoffs that a sum most probably collects, instead of the worst case.
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
        """Return the model for operands that are rounded to A at dequantization, and results rounded to A before T."""
        model = replace(self, t=2 * self.ua * (1 + self.ua), u=self.u if self.u == self.ua else self.u + 2 * self.ua)
        return replace(model, wp=LOST_WEIGHT) if are_products_cut else model

    def as_read(self, array: Array) -> tuple[Array, Array]:
        """Return an array (not q, k, v) as kernels read it, and the largest error of rounding its values to A.

        A float64 value that overflows A becomes infinite; every other value is returned unrounded.
        """
        if array.dtype != np.float64 or self.ua <= roundoff(array.dtype):
            return array, 0.0
        narrow = array.astype(np.float32)
        is_held = ~np.isinf(narrow)
        return np.where(is_held, array, narrow), np.where(is_held & (array != 0), self.ua * np.abs(array) + self.wa, 0)

    def k(self, terms: int) -> float:
        return min(terms, 6 * math.sqrt(terms)) if self.probable else terms


def limits(dtype: np.dtype) -> Any:
    """Return the `finfo` of a dtype, which may also be bfloat16."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def roundoff(dtype: np.dtype) -> float:
    return float(limits(dtype).eps) / 2


def underflow(dtype: np.dtype) -> float:
    """Return half the smallest subnormal of float16, or the smallest normal number, since CUDA may flush below it."""
    info = limits(dtype)
    return float(info.smallest_subnormal) / 2 if dtype == np.float16 else float(info.smallest_normal)


def rounded_up(tolerance: Array, exact: Array, model: Rounding) -> Array:
    """Return the published bound: with the margin for second-order terms; inf if the result or a sum may overflow."""
    bound = nan_to_inf(SECOND_ORDER * summable(tolerance, model))
    return np.where(np.abs(exact) + bound > model.largest, np.inf, bound)


def summable(error: Array, model: Rounding) -> Array:
    """Return the error of a sum, or inf if the sum may overflow: an error is at least 2 ua times the absolute terms."""
    return np.where(error > 2 * model.ua * model.largest_sum, np.inf, error)


def nan_to_inf(bound: Array) -> Array:
    return np.where(np.isnan(bound), np.inf, bound)
