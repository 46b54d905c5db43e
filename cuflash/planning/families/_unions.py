"""Passes for block lists per query: each tile of neighboring queries walks the union of its lists."""

from __future__ import annotations

from dataclasses import replace

from ..chosen_lists import NAME, UnionTiling, UnionWork
from ..launches import Feature, Kernels, Launch, Pass, Workspace
from ..sinks import sink_forward
from ..spec import SM90
from ._passes import QUERY_STATE, backward_pass, tile_counters
from .family import FORWARD_INPUTS, Family, Request, launch_of


def union_kernels(family: Family, request: Request, work: UnionWork) -> Kernels:
    """Return the launches of both passes for block lists per query."""
    problem, tiling, feature = request.problem, work.tiling, work.feature
    specs = family.union_specs(request, tiling.block, tiling.heads_per_tile)
    tiles = problem.num_heads // tiling.heads_per_tile * tiling.num_tiles
    counted = tile_counters(specs["forward"], is_zeroed=True)
    launch = launch_of(specs["forward"], request.device, tiles, FORWARD_INPUTS, ("o", "lse", *counted), (NAME,))
    launch = replace(launch, boxes=tiling.boxes(launch.boxes, tiling.queries_per_tile))
    backward = backward_pass(request, work, specs)
    launches = {**tiling.column_launches, **backward.launches}
    by_keys, parts = launches["backward"], tiling.parts(specs["backward"])
    by_keys = replace(
        by_keys, tiles=by_keys.tiles * tiling.num_parts, reads=(*by_keys.reads, *tiling.columns, *parts),
        writes=(*by_keys.writes, *parts), features=(NAME,),
    )  # fmt: skip
    by_queries = "backward_rows" if "backward_rows" in specs else "convert_dq"
    rows = replace(launches[by_queries], tiles=tiles, features=(NAME,))
    launches |= {"backward": _with_boxes(by_keys, tiling), by_queries: _with_boxes(rows, tiling)}
    counters: dict[str, Workspace] = {}
    for role in ("backward", by_queries):
        counters |= tile_counters(specs[role], is_zeroed=True)
    return Kernels(
        forward=sink_forward(Pass({"forward": launch}, counted, (feature,)), problem, "forward"),
        backward=replace(
            backward, launches=launches, workspaces={**backward.workspaces, **tiling.columns, **parts, **counters},
            features=(*backward.features, Feature("query_state", QUERY_STATE), feature),
        ),
        is_repeatable="backward_rows" in specs,
    )  # fmt: skip


def _with_boxes(launch: Launch, tiling: UnionTiling) -> Launch:
    """Return the launch of a backward kernel, with the tensor maps and the tile counter that sm90's kernels share."""
    if launch.spec.family != SM90:
        return launch
    counted = tile_counters(launch.spec)
    return replace(
        launch, boxes=tiling.boxes(launch.boxes, 1), reads=tuple(dict.fromkeys((*launch.reads, *counted))),
        writes=tuple(dict.fromkeys((*launch.writes, *counted))), features=("query_state", *launch.features),
    )  # fmt: skip
