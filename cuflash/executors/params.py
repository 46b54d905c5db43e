"""The records that attention kernels receive, filled from arrays, a problem and its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

import numpy as np

from ..blocks.work_list import IntervalWork, WorkList
from ..planning._params import HEAD_VECTORS, OF_RECORDS_WITHIN, PARAMS, ROW_VECTORS, TABLES, TENSOR_MAPS, UNLIMITED
from ..planning.interval_kernels import leading_strides
from ..planning.launches import BATCH_AXES, MATRICES, DqSemaphoreOrder, Feature, Launch, Pass, Workspace
from ..planning.list_kernels import AT_CALL, WorkAtCall
from ..planning.options import DOT
from ..planning.plan import KernelPlan
from ._records import Argument, LaunchRecord, View
from .tensor_map import BoxedArray, Template

_MAP_BATCH_AXES = 2  # a tensor map has five axes; more batch axes need a launch for each of their entries
_NO_STRIDE = -1  # an invalid stride, so that broadcast rows get no tensor map


def attention_record(
    plan: KernelPlan, kernels: Pass, views: Sequence[View], tensor_map: Callable[[BoxedArray], Template],
    lists: Mapping[str, int], unwanted: Mapping[str, Workspace] = MappingProxyType({}),
) -> LaunchRecord:  # fmt: skip
    """Return the launches of a pass of attention over arrays of these layouts.

    Parameters
    ----------
    views : sequence of View
        The layouts of the arrays whose addresses calls supply, in their order.
    tensor_map : callable
        Builds tensor maps.
    lists : dict of int by name
        The addresses of the work list's arrays.
    unwanted : dict of Workspace by name
        Results that the caller does not need.
    """
    workspaces = {**unwanted, **kernels.workspaces}
    every = *views, *(View.of_new(name, workspace) for name, workspace in workspaces.items())
    templates = templates_of(plan, kernels, every, tensor_map)
    launches = {
        role: replace(launch, features=("params", *_maps_of(launch, kernels), *launch.features))
        for role, launch in kernels.launches.items()
    }
    named, num_batch = {view.name: view for view in views}, plan.problem.mask_shape.num_batch // len(templates)
    kernels = replace(kernels, launches=launches)
    return LaunchRecord.of(kernels, templates, list(named), named, workspaces, lists, num_batch)


def templates_of(
    plan: KernelPlan, kernels: Pass, views: Sequence[View], tensor_map: Callable[[BoxedArray], Template]
) -> list[dict[str, Argument]]:
    """Return the records of a pass by name: "params", those of `_maps_of`, and those of its features.

    If the leading axes cannot be merged into `BATCH_AXES` axes, there are several sets of records, and each kernel is
    launched once for each set.
    """
    problem, features = plan.problem, (_params(plan), *kernels.features)
    tables = {AT_CALL} | {name for feature in features for name in feature.tables}
    strides = {view.name: _strides(view, plan) for view in views if view.name not in tables}
    arrays = [view for view in views if view.name in strides]
    axes = _folded(problem.batch, [steps[:-3] for steps in strides.values()])
    most = _MAP_BATCH_AXES if kernels.boxes else BATCH_AXES
    inner, outer = axes[-most:], axes[:-most]
    padding = BATCH_AXES - len(inner)
    of_tables = {view.name: view for view in views if view.name in tables}
    first_batch, templates = 0, []
    for outer_index in np.ndindex(*(extent for extent, _ in outer)):
        arguments = {feature.name: Argument.of(feature, of_tables, tensor_map) for feature in features}
        for launch in kernels.launches.values():
            for each in _maps_of(launch, kernels):
                arguments[each] = Argument.of(Feature(each, TENSOR_MAPS), {}, tensor_map)
        shape = arguments["params"].record["shape"]
        shape["batch"], shape["first_batch"] = [1] * padding + [extent for extent, _ in inner], first_batch
        _put_dq_numbers(shape, plan, prod(extent for extent, _ in inner) * problem.num_kv_heads)
        matrices = {}
        for index, view in enumerate(arrays):
            steps = strides[view.name][-3:]
            start = sum(number * by[index] for number, (_, by) in zip(outer_index, outer)) * view.dtype.itemsize
            steps_of_batch = [0] * padding + [by[index] for _, by in inner]
            matrices[view.name] = (start, steps_of_batch, *steps, view.dtype == problem.accumulator)
            for number, boxes in enumerate(kernels.boxes):
                if view.name not in boxes:
                    continue
                batch = [(1, 0)] * (_MAP_BATCH_AXES - len(inner)) + [(extent, by[index]) for extent, by in inner]
                boxed = _boxed(view, plan, batch, steps, boxes[view.name])
                record = arguments[_map_names(number)[view.name.endswith(DOT)]]
                record.put_map(view.name.removesuffix(DOT), view.name, boxed, tensor_map, start)
        for feature in features:
            for name, kind, offset in feature.addresses():
                if kind == MATRICES and name in matrices:
                    arguments[feature.name].fill(offset // 8, matrices[name])
        templates.append(arguments)
        first_batch += prod(extent for extent, _ in inner)
    return templates


def _map_names(number: int) -> tuple[str, str]:
    """Return the names of the records of tensor maps with the pass's boxes `number`: of arrays, and of tangents."""
    return f"maps {number}", f"dot_maps {number}"


def _maps_of(launch: Launch, kernels: Pass) -> tuple[str, ...]:
    """Return the names of the records of tensor maps that a kernel of a pass takes."""
    if not launch.boxes:
        return ()
    return _map_names(kernels.boxes.index(launch.boxes))[: 1 + bool(launch.spec.tangents)]


def _params(plan: KernelPlan) -> Feature:
    """Return the record PARAMS without the arrays and the fields that depend on their layouts."""
    problem, kernels = plan.problem, plan.kernels
    assert kernels is not None
    sizes = ("num_heads", "group_size", "seqlen_q", "seqlen_kv", "head_dim", "value_dim")
    shape = {
        **{name: getattr(problem, name) for name in sizes}, "heads_per_l2_group": kernels.order.heads_per_group,
        "kv_heads_per_l2_group": kernels.order.kv_heads_per_group, "num_splits": kernels.num_splits,
        "softmax_scale": problem.kernel_scale,
    }  # fmt: skip
    values = {"shape": shape, "work": _work(plan.work)}
    if not isinstance(plan.work, WorkAtCall):
        return Feature("params", PARAMS, values, TABLES, names=OF_RECORDS_WITHIN)
    starts = {f"work.{name}": start for name, start in plan.work.offsets.items()}
    names = OF_RECORDS_WITHIN | dict.fromkeys(starts, AT_CALL)
    return Feature("params", PARAMS, values, (*TABLES, AT_CALL), names=names, starts=starts)


def _put_dq_numbers(shape: np.void, plan: KernelPlan, num_kv_heads: int) -> None:
    """Set the number of heads whose dQ is finished in order, and the lead and lag of tiles, if there is an order."""
    assert plan.kernels is not None
    order: DqSemaphoreOrder | None = plan.kernels.order.dq
    if order is not None:
        shape["num_fused_dq_heads"] = plan.problem.group_size * order.num_fused_heads(num_kv_heads)
        shape["last_tile_lead"], shape["first_tile_lag"] = order.last_tile_lead, order.first_tile_lag


def _strides(view: View, plan: KernelPlan) -> tuple[int, ...]:
    """Return strides in elements over (*batch, heads, rows, columns), 0 for broadcast or missing axes."""
    problem = plan.problem
    if view.name in HEAD_VECTORS:
        of_axes = [0 if extent == 1 else step // view.dtype.itemsize for step, extent in zip(view.strides, view.shape)]
        return (*[0] * (len(problem.heads_shape()) - len(of_axes)), *of_axes, 0, 0)
    columns = () if view.name in ROW_VECTORS else (view.shape[-1],)
    rank = 1 + problem.has_heads + len(columns)
    steps = [step // view.dtype.itemsize for step in view.strides]
    missing = len(problem.batch) - (len(steps) - rank)
    steps = [0] * missing + steps
    shape = (1,) * missing + view.shape
    batch = [step if extent != 1 else 0 for step, extent in zip(steps, shape[: len(problem.batch)])]
    heads = [] if problem.has_heads else [0]
    return (*batch, *heads, *steps[len(batch) :], *([] if columns else [0]))


def _boxed(
    view: View, plan: KernelPlan, batch: Sequence[tuple[int, int]], steps: Sequence[int], box: tuple[int, ...]
) -> BoxedArray:
    """Return an array as boxes of (rows, columns), or of (queries, heads, columns)."""
    is_of_queries = view.name.removesuffix(DOT) in ("q", "do", "o")
    num_heads = plan.problem.num_heads if is_of_queries else plan.problem.num_kv_heads
    heads, rows = (num_heads, steps[0]), (view.shape[-2], steps[1] or _NO_STRIDE)
    if len(box) == 3:
        heads, rows = rows, (num_heads, steps[0] or _NO_STRIDE)
    axes = *batch, heads, rows, (view.shape[-1], steps[2])
    shape, strides = zip(*((extent, step * view.dtype.itemsize) for extent, step in axes))
    return View(view.name, view.dtype, shape, strides).boxes(box)


def _folded(batch: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Return leading axes as (extent, stride for each array); adjacent axes are merged if all strides allow it."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for extent, steps in zip(batch, zip(*strides)):
        if extent == 1:
            continue
        if axes and all(outer == step * extent for outer, step in zip(axes[-1][1], steps)):
            axes[-1] = axes[-1][0] * extent, steps
        else:
            axes.append((extent, steps))
    return axes


def _work(work: WorkList) -> dict[str, int]:
    """Return the numbers in the record of a work list."""
    if isinstance(work, IntervalWork):
        lower, upper = (None, None) if work.band is None else (work.band.lower, work.band.upper)
        (batch, num_heads, _), of_rows = (1, 1, 0) if work.lo is None else work.lo.shape, leading_strides(work.lo)
        block, grid = (work.block_q, work.block_kv), work.num_sequence_tiles
        # strides of the tile orders along batch entries and heads, in matrices
        shared = (num_heads if batch > 1 else 0, 1 if num_heads > 1 else 0)
    else:
        index, lower, upper = work.index, None, None
        shared = (index.num_heads if index.batch > 1 else 0, 1 if index.num_heads > 1 else 0)
        block, grid, of_rows = index.block, (index.num_q_blocks, index.num_kv_blocks), leading_strides(index.lo)
    return {
        "lower": -UNLIMITED if lower is None else lower, "upper": UNLIMITED if upper is None else upper,
        "interval_batch_stride": of_rows[0], "interval_head_stride": of_rows[1], "list_batch_stride": shared[0],
        "list_head_stride": shared[1], "block_q": block[0], "block_kv": block[1], "num_q_blocks": grid[0],
        "num_kv_blocks": grid[1],
    }  # fmt: skip
