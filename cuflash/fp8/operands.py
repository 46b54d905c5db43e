"""Quantised q, k and v of a call: why they are refused, and what the host computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import UP_TO_FLOAT32, Array, describe, require_arrays
from ..errors import UnsupportedProblem, collecting, refuse
from .quantize import Quantized, quantize
from .rotation import Rotation

PRECISION = "fp8"


def are_quantized(*arrays: Any) -> bool:
    """Tell whether one of the arguments is quantised."""
    return any(isinstance(array, Quantized) for array in arrays)


def is_asked_for(q: Any, k: Any, v: Any, precision: Any) -> bool:
    """Tell whether a call has quantised operands, or quantises its operands."""
    is_quantized = type(q) is Quantized or type(k) is Quantized or type(v) is Quantized
    return is_quantized or type(precision) is str and precision == PRECISION


def operand_reasons(given: Mapping[str, Any]) -> list[str]:
    """Why quantised q, k and v, in this order and under these names, do not make a call."""
    q, k, v = given.values()
    reasons = [
        f"{name} must be Quantized as the others are; got {describe(array)}: cuflash.quantize makes it"
        for name, array in given.items()
        if not isinstance(array, Quantized)
    ]
    q_name, k_name, v_name = given
    if isinstance(q, Quantized) and isinstance(k, Quantized) and q.rotation != k.rotation:
        reasons.append(f"{q_name} and {k_name} must have one rotation; got {q.rotation} and {k.rotation}")
    if isinstance(v, Quantized) and v.rotation is not None:
        reasons.append(f"{v_name} must not be rotated; got {v.rotation}: quantize it with rotate=None")
    found = {name: array for name, array in given.items() if isinstance(array, Quantized)}
    if len({isinstance(array.data, np.ndarray) for array in found.values()}) > 1:
        reasons.append(f"{', '.join(found)} must be of one kind; got NumPy's and CuPy's arrays: copy them explicitly")
    return reasons


def executor_of(q: Any, k: Any, v: Any, executor: Any) -> Any:
    """The executor that "auto" stands for: where the quantised operands are; any other value as it is."""
    if not isinstance(executor, str) or executor != "auto":
        return executor
    return "cpu" if are_on_host(q, k, v) else "gpu"


def are_on_host(*arrays: Any) -> bool:
    """Tell whether the quantised operands are NumPy's, or, where none is, all of them."""
    found = [array.data for array in arrays if isinstance(array, Quantized)] or arrays
    return all(isinstance(array, np.ndarray) for array in found)


def place_reasons(q: Any, k: Any, v: Any, executor: Any) -> list[str]:
    """Why quantised operands are refused by an executor for where they are."""
    found = [array for array in (q, k, v) if isinstance(array, Quantized)]
    are_on_host = {isinstance(array.data, np.ndarray) for array in found}
    if executor not in ("cpu", "gpu", "sim") or len(are_on_host) != 1 or are_on_host == {executor != "gpu"}:
        return []
    wanted, there = ("CuPy", "NumPy") if executor == "gpu" else ("NumPy", "CuPy")
    told = f"executor={executor!r} takes {wanted}'s arrays in Quantized q, k and v; got {there}'s"
    return [f"{told}: copy them explicitly"]


def gradient_reasons(*arrays: Any, precision: Any = None) -> list[str]:
    """Why a call that has to have gradients, or a plan of plain arrays, is refused."""
    reasons = []
    if are_quantized(*arrays):
        reasons.append(
            "q, k and v must not be Quantized here, as 8 bits have neither gradients nor plans: give dequantized()"
        )
    if isinstance(precision, str) and precision == PRECISION:
        reasons.append("precision must not be 'fp8' here, as it has neither gradients nor plans: use cuflash.attention")
    return reasons


def bound_reasons(q: Any, k: Any, v: Any, do: Any, precision: Any) -> list[str]:
    """Why the error of a call of quantised operands is not bounded."""
    reasons = operand_reasons({"q": q, "k": k, "v": v})
    if not all(isinstance(array.data, np.ndarray) for array in (q, k, v) if isinstance(array, Quantized)):
        fix = "copy data and scale with get()"
        reasons.append(f"q, k and v must be NumPy's arrays when they are Quantized; got CuPy's: {fix}")
    if do is not None:
        reasons.append("do must be None for Quantized q, k and v, which have no gradients: give dequantized()")
    if precision != "ieee":
        reasons.append(f"precision must be 'ieee' for Quantized q, k and v; got {describe(precision)}: leave it out")
    return reasons


def quantized_operands(q: Array, k: Array, v: Array) -> tuple[Quantized, Quantized, Quantized]:
    """Quantise plain arrays for precision="fp8": blocks of 128 rows, and one rotation of q and k."""
    reasons: list[str] = []
    if are_quantized(q, k, v):
        reasons.append("precision must not be 'fp8' where q, k or v is Quantized already: leave it out")
        raise UnsupportedProblem(reasons + operand_reasons({"q": q, "k": k, "v": v}))
    given = {"q": q, "k": k, "v": v}
    require_arrays(given)
    for name, x in given.items():
        if x.dtype not in UP_TO_FLOAT32 or x.ndim < 2:
            reasons.append(
                f"{name} must be of float16, bfloat16 or float32 and have two axes or more with precision='fp8'; "
                f"got {describe(x)}: cast it"
            )
    rotation = None
    with collecting(reasons):
        rotation = Rotation(q.shape[-1]) if q.ndim else None
    refuse(reasons)
    return quantize(q, rotate=rotation), quantize(k, rotate=rotation), quantize(v)
