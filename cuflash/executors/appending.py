"""Launches the kernel that appends rows to a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays import Array
from ..planning.appending import APPEND, AppendPlan
from . import checks
from .bound_launch import BoundLaunch
from .decoding import fill_cache, fill_matrices, offset_of, scale_records
from .launch import LaunchTarget


def append(
    plan: AppendPlan, arrays: Mapping[str, Array | None], target: LaunchTarget, made: list[Array] | None = None
) -> list[Array]:
    """Write rows to the pages of a cache, and the new lengths.

    Parameters
    ----------
    plan : AppendPlan
    arrays : dict by name
        k and v, the new rows; cache_k and cache_v, the cache's pages; int32 arrays table, lengths, counts and
        num_faults, of which table and counts may be None; k_scale and v_scale, where the cache has 8-bit numbers.
    target : LaunchTarget
        Where the arrays are.
    made : list of arrays, optional
        The plan's workspaces, in their order, which no other launch uses meanwhile; new ones unless given.

    Returns
    -------
    list of arrays
        The workspaces, which the kernel may still use.
    """
    stream = target.stream()
    made = target.allocator(plan.workspaces)(stream) if made is None else made
    bound_append(plan, {**arrays, "arrivals": made[0]}, (), target)((), stream)
    if checks.is_on():
        target.wait(plan.launch)
    return made


def bound_append(
    plan: AppendPlan, arrays: Mapping[str, Array | None], names: Sequence[str], target: LaunchTarget
) -> BoundLaunch:
    """The launch on arrays, complete but for the addresses of those that are named.

    Parameters
    ----------
    plan : AppendPlan
    arrays : dict by name
        As `append` takes them, and the plan's workspace; of those that are named, their layouts alone matter.
    names : sequence of str
        The arrays whose addresses each call gives, in this order.
    target : LaunchTarget
        Where the arrays are.
    """
    record = np.zeros((), APPEND)
    fill_matrices(record, {name: arrays[name] for name in ("k", "v")}, target)
    pages = {name: arrays[f"cache_{name}"] for name in ("k", "v")}
    fill_cache(record["cache"], plan.numbers["cache"], {**arrays, **pages}, target)
    for name in ("num_rows", "blocks_per_sequence"):
        record[name] = plan.numbers[name]
    record["arrivals"] = target.address(arrays["arrivals"])
    places = [(0, offset_of(APPEND, name)) for name in names]
    return BoundLaunch(plan.launch, plan.grid, [record, *scale_records(arrays, target)], places, target)
