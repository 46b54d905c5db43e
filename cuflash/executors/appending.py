"""Launches the kernel that appends rows to a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..arrays import Array
from ..planning.appending import APPEND, AppendPlan
from ..planning.launches import offset_of, record_of
from .bound_launch import BoundLaunch
from .decoding import fill_cache, fill_matrices, scale_records
from .launch import LaunchTarget


def bound_append(
    plan: AppendPlan, arrays: Mapping[str, Array | None], names: Sequence[str], target: LaunchTarget
) -> BoundLaunch:
    """Bind the launch that writes rows to the pages of a cache, and the new lengths.

    It is complete but for the addresses of the arrays that are named.

    Parameters
    ----------
    plan : AppendPlan
    arrays : dict by name
        k and v, the new rows; cache_k and cache_v, the cache's pages; int32 arrays table, lengths, counts and
        num_faults, of which table and counts may be None; k_scale and v_scale, where the cache has 8-bit numbers; and
        the plan's workspace. Of those that are named, their layouts alone matter.
    names : sequence of str
        The arrays whose addresses each call gives, in this order.
    target : LaunchTarget
        Where the arrays are.
    """
    record = record_of(APPEND, plan.numbers)
    fill_matrices(record, {name: arrays[name] for name in ("k", "v")}, target)
    pages = {name: arrays[f"cache_{name}"] for name in ("k", "v")}
    fill_cache(record["cache"], {**arrays, **pages}, target)
    record["arrivals"] = target.address(arrays["arrivals"])
    places = [(0, offset_of(APPEND, name)) for name in names]
    return BoundLaunch(plan.launch, plan.grid, [record, *scale_records(arrays, target)], places, target)
