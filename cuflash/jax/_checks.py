"""Checks of a call's arguments before JAX runs or traces it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from ..arrays import ShapeDtype, describe
from ..calls._call import Call
from ..layouts import is_tracer
from ..planning.device import DeviceSpec
from ..planning.options import Options
from ..scores import Score

_KNOWN = {type(None), bool, int, float, str}


@lru_cache(maxsize=64)
def holds_data(kind: Any) -> bool:
    """True if all values of a type are JAX arrays with data."""
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def has_data(value: Any) -> bool:
    """True if a value is an array with data, or a tracer of such an array: one of `jax.grad` outside of `jax.jit`."""
    kind: Any = type(value)
    return holds_data(kind) or kind is np.ndarray or is_tracer(value) and value.to_concrete_value() is not None


def traced_reasons(options: Options) -> list[str]:
    """Return why options that are tracers are refused: a plan is created from the options while JAX traces the call."""
    window, reasons = options.window, []
    if window is None and {type(options.scale), type(options.causal), type(options.softcap)} <= _KNOWN:
        return []
    if is_tracer(options.scale):
        fix = "name it in static_argnames of jax.jit, or multiply q by it"
        reasons.append(f"scale must be a Python number when JAX traces the call; got a tracer: {fix}")
    others = {"causal": is_tracer(options.causal), "softcap": is_tracer(options.softcap)}
    others["window"] = any(map(is_tracer, window)) if isinstance(window, (tuple, list)) else is_tracer(window)
    for name, is_traced in others.items():
        if is_traced:
            fix = f"name {name} in static_argnames of jax.jit"
            reasons.append(f"{name} must be known when JAX traces the call; got a tracer: {fix}")
    return reasons


def array_reasons(arrays: Mapping[str, jax.Array]) -> list[str]:
    """Return why arrays that have data are not on one device.

    Raises
    ------
    TypeError
        An argument is not a JAX array.
    """
    platforms = set[str]()
    for name, array in arrays.items():
        if not isinstance(array, (jax.Array, np.ndarray)):
            raise TypeError(f"{name} must be a jax.Array; got {describe(array)}: convert it with jax.numpy.asarray")
        value = array.to_concrete_value() if isinstance(array, jax.core.Tracer) else array
        if isinstance(value, jax.Array):  # otherwise None, or a NumPy array that a transformation holds
            platforms |= {device.platform for device in value.devices()}
    if len(platforms) > 1 or not platforms <= {"cpu", "gpu"}:
        return [f"all arrays must be on the CPU or on one GPU; got {', '.join(sorted(platforms))}: move them"]
    return []


def require(arrays: Mapping[str, jax.Array], options: Options) -> None:
    """Refuse a call that no platform supports, before JAX traces it; lowering refuses other calls.

    Raises
    ------
    TypeError, UnsupportedProblem
        Arguments break their rules. The message lists all reasons.
    """
    shapes = {name: ShapeDtype(tuple(each.shape), np.dtype(each.dtype)) for name, each in arrays.items()}
    score = options.score
    if isinstance(score, Score):
        score = score._over({name: shapes[name] for name in score.arrays})
    options = options._replace(score=score, sink=shapes.get("sink"))
    device = DeviceSpec.gpu("H100") if options.executor in ("gpu", "sim") else None
    if isinstance(options.executor, str) and options.executor == "auto":
        options, device = options._replace(executor="cpu", kernel="auto", precision="ieee"), DeviceSpec.host()
    Call.of(shapes["q"], shapes["k"], shapes["v"], options, device)
