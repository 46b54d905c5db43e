"""Passes for block lists per query: each tile of neighbouring queries walks the union of its lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..chosen_lists import NAME, UnionWork
from ..device import DeviceSpec
from ..launches import Feature, Kernels, Pass
from ..problem import Problem
from ..sinks import sink_forward
from ..spec import SM90, KernelSpec
from ._passes import QUERY_STATE, backward_pass, tile_counters
from .family import FORWARD_INPUTS, launch_of


def union_kernels(
    problem: Problem, device: DeviceSpec, work: UnionWork, specs: Mapping[str, KernelSpec]
) -> Kernels:
    """Return the launches of both passes.

    Parameters
    ----------
    specs : dict of KernelSpec by role
        "forward", "backward_statistics", "backward" and "backward_rows".
    """
    tiling, feature = work.tiling, work.feature
    tiles = problem.num_heads // tiling.heads_per_tile * tiling.num_tiles
    counted = tile_counters(specs["forward"], is_zeroed=True)
    launch = launch_of(specs["forward"], device, tiles, FORWARD_INPUTS, ("o", "lse", *counted), (NAME,))
    launch = replace(launch, boxes=tiling.boxes(launch.boxes))
    backward = backward_pass(problem, device, work, specs)
    launches = {**tiling.column_launches, **backward.launches}
    by_keys, parts = launches["backward"], tiling.parts(specs["backward"])
    launches["backward"] = replace(
        by_keys, tiles=by_keys.tiles * tiling.num_parts, reads=(*by_keys.reads, *tiling.columns, *parts),
        writes=(*by_keys.writes, *parts), features=(NAME,),
    )  # fmt: skip
    rows = replace(launches["backward_rows"], tiles=tiles, features=(NAME,))
    if rows.spec.family == SM90:
        counted = tile_counters(rows.spec, is_zeroed=True)
        rows = replace(
            rows, boxes=tiling.boxes(rows.boxes), reads=(*rows.reads, *counted), writes=(*rows.writes, *counted),
            features=("query_state", NAME),
        )  # fmt: skip
    launches["backward_rows"] = rows
    return Kernels(
        forward=sink_forward(Pass({"forward": launch}, counted, (feature,)), problem, "forward"),
        backward=replace(
            backward, launches=launches, workspaces={**backward.workspaces, **tiling.columns, **parts, **counted},
            features=(*backward.features, Feature("query_state", QUERY_STATE), feature),
        ),
    )  # fmt: skip
