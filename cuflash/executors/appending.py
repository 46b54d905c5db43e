"""Launches the kernel that appends rows to a cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import Array
from ..planning.appending import APPEND, AppendPlan
from . import checks
from .decoding import fill_cache, fill_matrices, scalar
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
        num_faults, of which table and counts may be None.
    target : LaunchTarget
        Where the arrays are.
    made : list of arrays, optional
        The plan's workspaces, in their order, which no other launch uses meanwhile; new ones unless given.

    Returns
    -------
    list of arrays
        The workspaces, which the kernel may still use.
    """
    stream, launch = target.stream(), plan.launch
    made = target.allocator(plan.workspaces)(stream) if made is None else made
    record = np.zeros((), APPEND)
    fill_matrices(record, {name: arrays[name] for name in ("k", "v")}, target)
    pages = {name: arrays[f"cache_{name}"] for name in ("k", "v")}
    fill_cache(record["cache"], plan.numbers["cache"], {**arrays, **pages}, target)
    for name in ("num_rows", "blocks_per_sequence"):
        record[name] = plan.numbers[name]
    record["arrivals"] = target.address(made[0])
    target.launcher(launch.spec, plan.grid, launch.shared_bytes)((scalar(record),), stream)
    if checks.is_on():
        target.wait(launch)
    return made
