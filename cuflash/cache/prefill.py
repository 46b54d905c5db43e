"""Calls the kernels that attend from many new tokens to a cache, where they serve the call."""

from __future__ import annotations

from functools import lru_cache

from ..arrays import Array, ShapeDtype
from ..errors import UnsupportedProblem
from ..executors.prefill import boxed_array
from ..planning.decoding import MOST_ROWS, CacheLayout
from ..planning.device import DeviceSpec
from ..planning.prefill import PrefillPlan, prefill_plan, prefill_reasons
from ..planning.routing import PREFILL_FAMILIES
from .decoding import DecodeOptions, device_of, has_layout, shapes_of, problem_of

_KERNELS = ("auto", *PREFILL_FAMILIES)  # names of families that may be asked for


def prefill_plan_of(
    arrays: dict[str, Array | None], layout: CacheLayout, options: DecodeOptions
) -> PrefillPlan | None:
    """The plan of the first family whose kernels serve a call; None where none does.

    Parameters
    ----------
    arrays : dict by name
        q, k, v, o, lse and sink, as `executors.prefill.BoundPrefill` takes them.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    device = device_of(options, given, _KERNELS)
    if device is None or "k_scale" in given or not has_layout(given):  # rows of 8 bits are gathered and scaled
        return None
    rows = given["q"].shape[2] * (given["q"].shape[1] // given["k"].shape[1])
    if options.part_keys is not None and rows <= MOST_ROWS:  # bits would depend on the number of new tokens
        return None
    for family in PREFILL_FAMILIES if options.kernel == "auto" else (options.kernel,):
        try:
            plan = _plan(*shapes_of(given), layout, device, options, family)
        except (UnsupportedProblem, TypeError):  # `attention` says all that is wrong with a call
            return None
        if plan is not None and _has_maps(plan, given):
            return plan
    return None


def _has_maps(plan: PrefillPlan, given: dict[str, Array]) -> bool:
    """Tell whether the hardware copies boxes of keys and values, where the plan's kernel has it do so."""
    boxes = plan.launch.boxes
    return not boxes or not any(boxed_array(given[name], boxes[name]).reasons(address=0) for name in ("k", "v"))


@lru_cache(maxsize=256)
def _plan(
    q: ShapeDtype,
    k: ShapeDtype,
    v: ShapeDtype,
    sink: ShapeDtype | None,
    layout: CacheLayout,
    device: DeviceSpec,
    options: DecodeOptions,
    family: str,
) -> PrefillPlan | None:
    """A family's plan for a cache's pages; None where it does not serve the problem."""
    problem = problem_of(q, k, v, sink, layout, options)
    if problem is None or prefill_reasons(problem, device, family):
        return None
    return prefill_plan(problem, device, layout, family, left=options.left, right=options.right)
