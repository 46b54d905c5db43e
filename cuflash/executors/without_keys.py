"""Results of every executor for calls without queries, without keys or with an empty batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import Array, namespace
from ..planning.plan import KernelPlan


def forward(plan: KernelPlan, arrays: Mapping[str, Array], check: object = None) -> None:
    """o = 0 and lse = -inf, or the sink; NaN in both where the sink is NaN or +inf."""
    if "sink" not in arrays:
        arrays["o"][...], arrays["lse"][...] = 0, -np.inf
        return
    xp, sink = namespace(arrays["sink"]), _sink_of_rows(plan, arrays["sink"])
    lse = xp.where(xp.isposinf(sink), np.nan, sink)
    arrays["lse"][...] = lse
    arrays["o"][...] = xp.where(xp.isnan(lse), np.nan, 0)[..., None]


def backward(plan: KernelPlan, arrays: Mapping[str, Array], check: object = None) -> None:
    """Gradients are 0, but for the sink's: lse is the sink, so that it is the sum of dlse."""
    for name in plan.gradients_made:
        arrays[name][...] = 0
    if "dsink" not in arrays:
        return
    xp, lse = namespace(arrays["lse"]), arrays["lse"]
    terms = xp.zeros_like(lse) if arrays.get("dlse") is None else arrays["dlse"]
    terms = xp.where(xp.isneginf(lse), 0, xp.where(xp.isnan(lse), lse, terms))
    arrays["dsink"][...] = terms.sum(axis=-1)


def _sink_of_rows(plan: KernelPlan, sink: Array) -> Array:
    """The sink in the accumulator's dtype, and in a shape that broadcasts to lse's."""
    with np.errstate(over="ignore"):  # what a narrower dtype cannot hold is infinite
        wide = sink.astype(plan.problem.accumulator)
    return wide[..., None] if plan.problem.has_heads else wide.reshape(1)
