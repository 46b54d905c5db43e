"""Checks of quantized q, k and v: the reasons why a call refuses them, and the executor that computes with them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import Array, describe
from .quantize import Quantized


def are_quantized(*arrays: Quantized | Array) -> bool:
    """True if at least one of the arguments is quantized."""
    return any(isinstance(array, Quantized) for array in arrays)


def operand_reasons(operands: Mapping[str, Quantized | Array]) -> list[str]:
    """Return why quantized q, k and v, in this order and under these names, cannot be used in one call."""
    q, k, v = operands.values()
    reasons = [
        f"{name} must be Quantized, since another operand is; got {describe(array)}: use cuflash.quantize({name})"
        for name, array in operands.items()
        if not isinstance(array, Quantized)
    ]
    q_name, k_name, v_name = operands
    if isinstance(q, Quantized) and isinstance(k, Quantized) and q.rotation != k.rotation:
        reasons.append(f"{q_name} and {k_name} must have the same rotation; got {q.rotation} and {k.rotation}")
    if isinstance(v, Quantized) and v.rotation is not None:
        reasons.append(f"{v_name} must not be rotated; got {v.rotation}: quantize it with rotate=None")
    quantized = {name: array for name, array in operands.items() if isinstance(array, Quantized)}
    if len({isinstance(array.data, np.ndarray) for array in quantized.values()}) > 1:
        names = ", ".join(quantized)
        reasons.append(f"{names} must be of the same library; got NumPy and CuPy arrays: copy them explicitly")
    return reasons


def executor_of(q: Array, k: Array, v: Array, executor: str) -> str:
    """Return the executor for quantized operands: for "auto", the one of their device; otherwise `executor` itself."""
    if not isinstance(executor, str) or executor != "auto":
        return executor
    return "cpu" if are_on_host(q, k, v) else "gpu"


def are_on_host(*arrays: Quantized | Array) -> bool:
    """True if all quantized operands hold NumPy arrays or, if none is quantized, if all operands are NumPy arrays."""
    checked = [array.data for array in arrays if isinstance(array, Quantized)] or arrays
    return all(isinstance(array, np.ndarray) for array in checked)


def place_reasons(q: Array, k: Array, v: Array, executor: str) -> list[str]:
    """Return why an executor cannot read quantized operands: their arrays are of the wrong library."""
    quantized = [array for array in (q, k, v) if isinstance(array, Quantized)]
    are_on_host = {isinstance(array.data, np.ndarray) for array in quantized}
    if executor not in ("cpu", "gpu", "sim") or len(are_on_host) != 1 or are_on_host == {executor != "gpu"}:
        return []
    wanted, actual = ("CuPy", "NumPy") if executor == "gpu" else ("NumPy", "CuPy")
    rule = f"executor={executor!r} takes {wanted} arrays in Quantized q, k and v; got {actual} arrays"
    return [f"{rule}: copy them explicitly"]


def gradient_reasons(*arrays: Quantized | Array) -> list[str]:
    """Return why a plan, or a call with gradients, refuses arrays of which one is `Quantized`."""
    if not are_quantized(*arrays):
        return []
    return ["q, k and v must not be Quantized here, because FP8 has neither gradients nor plans: pass q.dequantized()"]


def call_reasons(q: Array, k: Array, v: Array, executor: str, out: Array | None) -> list[str]:
    """Return why a call refuses `Quantized` operands: because of their properties, their device, or its `out`."""
    reasons = operand_reasons({"q": q, "k": k, "v": v}) + place_reasons(q, k, v, executor)
    if out is not None:
        fix = "leave it out, and copy the result"
        reasons.append(f"out must be None for Quantized q, k and v; got {describe(out)}: {fix}")
    return reasons


def bound_reasons(q: Array, k: Array, v: Array, do: Array | None, precision: str) -> list[str]:
    """Return why the error of a call with quantized operands cannot be bounded."""
    reasons = operand_reasons({"q": q, "k": k, "v": v})
    if not all(isinstance(array.data, np.ndarray) for array in (q, k, v) if isinstance(array, Quantized)):
        fix = "copy data and scale with .get()"
        reasons.append(f"q, k and v must hold NumPy arrays if they are Quantized; got CuPy arrays: {fix}")
    if do is not None:
        reasons.append("do must be None for Quantized q, k and v, which have no gradients: pass q.dequantized()")
    if precision != "ieee":
        reasons.append(f"precision must be 'ieee' for Quantized q, k and v; got {describe(precision)}: leave it out")
    return reasons
