"""Results of every executor for calls without queries, without keys or with an empty batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays import Array, namespace
from ..planning.plan import KernelPlan
from ._host_tiles import KeptTiles
from .checks import Check
from .launch import BoundCall, PassLayout


def bind(plan: KernelPlan, of: PassLayout) -> BoundCall:
    """Return the function that runs a pass on arrays in the order of the inputs."""
    names, run_pass = tuple(of.inputs), _PASSES[of.name]

    def call(
        *arrays: Array, numbers: Sequence[int] = (), check: Check | None = None, tiles: KeptTiles | None = None
    ) -> list[Array]:
        xp = namespace(arrays[0])
        new = {name: xp.empty(each.shape, each.dtype) for name, each in {**of.results, **of.unwanted}.items()}
        run_pass(plan, {**dict(zip(names, arrays)), **new})
        return [new[name] for name in of.results]

    return call


def _forward(plan: KernelPlan, arrays: Mapping[str, Array]) -> None:
    """Write o = 0 and lse = -inf, or the sink; NaN in both if the sink is NaN or +inf."""
    if "sink" not in arrays:
        arrays["o"][...], arrays["lse"][...] = 0, -np.inf
        return
    xp, sink = namespace(arrays["sink"]), _sink_of_rows(plan, arrays["sink"])
    lse = xp.where(xp.isposinf(sink), np.nan, sink)
    arrays["lse"][...] = lse
    arrays["o"][...] = xp.where(xp.isnan(lse), np.nan, 0)[..., None]


def _backward(plan: KernelPlan, arrays: Mapping[str, Array]) -> None:
    """Write gradients of 0, except dsink, which is the sum of dlse because lse is the sink."""
    _write_gradients(plan, arrays, "backward", arrays.get("dlse"))


def _jvp(plan: KernelPlan, arrays: Mapping[str, Array]) -> None:
    """Write o_dot = 0, and lse_dot = 0 or the sink's tangent; NaN in both if lse is NaN."""
    xp, lse = namespace(arrays["lse"]), arrays["lse"]
    lse_dot = _sink_of_rows(plan, arrays["sink.dot"]) if "sink.dot" in arrays else 0
    arrays["lse.dot"][...] = xp.where(xp.isnan(lse), lse, xp.where(xp.isneginf(lse), 0, lse_dot))
    arrays["o.dot"][...] = xp.where(xp.isnan(lse), lse, 0)[..., None]


def _backward_jvp(plan: KernelPlan, arrays: Mapping[str, Array]) -> None:
    """Write tangents of the gradients: 0, except the sink's, which is the sum of dlse_dot."""
    _write_gradients(plan, arrays, "backward_jvp", arrays.get("dlse.dot"))


def _write_gradients(plan: KernelPlan, arrays: Mapping[str, Array], name: str, of_lse: Array | None) -> None:
    """Write zeros to the results of a pass, and the sum of the terms of lse to dsink."""
    for result in plan.kernel_results(name):
        arrays[result][...] = 0
    if "dsink" not in arrays:
        return
    xp, lse = namespace(arrays["lse"]), arrays["lse"]
    terms = xp.zeros_like(lse) if of_lse is None else of_lse
    terms = xp.where(xp.isneginf(lse), 0, xp.where(xp.isnan(lse), lse, terms))
    arrays["dsink"][...] = terms.sum(axis=-1)


_PASSES = {"forward": _forward, "backward": _backward, "jvp": _jvp, "backward_jvp": _backward_jvp}


def _sink_of_rows(plan: KernelPlan, sink: Array) -> Array:
    """Return the sink in the accumulator's dtype, in a shape that broadcasts to lse's."""
    with np.errstate(over="ignore"):  # values that overflow a narrower dtype become infinite
        wide = sink.astype(plan.problem.accumulator)
    return wide[..., None] if plan.problem.has_heads else wide.reshape(1)
