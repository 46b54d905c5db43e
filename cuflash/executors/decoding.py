"""Launches the decode kernel on the arrays of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import Array, DTYPES
from ..planning.decoding import CACHE_SCALES, DECODE, DecodePlan
from ..planning.launches import BATCH_AXES, Feature, offset_of, record_of
from ..planning.sinks import SINK
from . import gpu, sim
from .bound_launch import BoundLaunch
from .launch import LaunchTarget
from .params import View, feature_record, softmax_scale

TABLES = ("table", "lengths", "counts", "num_faults")


def target_of(executor: str) -> LaunchTarget:
    """Return the object that launches kernels of the executor "gpu" or "sim"."""
    return gpu.current_target() if executor == "gpu" else sim.Simulator()


def bound_decode(
    plan: DecodePlan, arrays: Mapping[str, Array | None], names: Sequence[str], target: LaunchTarget
) -> BoundLaunch:
    """Bind the launch that writes o [batch, heads, new tokens, value_dim] and lse [batch, heads, new tokens].

    It is complete but for the addresses of the arrays that are named.

    Parameters
    ----------
    plan : DecodePlan
    arrays : dict by name
        q, o, lse; k and v, the cache's pages; int32 arrays table, lengths, counts and num_faults, of which table and
        counts may be None; k_scale and v_scale, where the cache has 8-bit numbers; sink, where the problem has one; the
        tables of the plan's score function; and the plan's workspaces. Of those that are named, their layouts alone
        matter, and tables and workspaces among them may be None.
    names : sequence of str
        The arrays whose addresses each call gives, in this order.
    target : LaunchTarget
        Where the arrays are.
    """
    record = record_of(DECODE, plan.numbers)
    record["softmax_scale"] = softmax_scale(plan.problem)
    fill_matrices(record, {name: arrays[name] for name in ("q", "o", "lse")}, target)
    fill_cache(record["cache"], arrays, target)
    for name in plan.workspaces:
        record[name] = address_or_0(arrays[name], target)
    records = [record, *scale_records(arrays, target)]
    sink = arrays.get("sink")
    if sink is not None:
        records.append(sink_record(sink, target))
    of_sink = len(records) - 1
    records += score_records(plan.score, arrays, target)

    def place(name: str) -> tuple[int, int]:
        if name == "sink":
            return of_sink, offset_of(SINK, name)
        if plan.score is not None and name in plan.score.tables:
            return len(records) - 1, offset_of(plan.score.dtype, name)
        return 0, offset_of(DECODE, name)

    places = [place(name) for name in names]
    return BoundLaunch(plan.launch, plan.grid, records, places, target)


def score_records(
    score: Feature | None, arrays: Mapping[str, Array | None], target: LaunchTarget
) -> list[Any]:
    """The record of a score function's arrays and numbers; none without a score function."""
    if score is None:
        return []
    captured = {name: arrays[name] for name in score.tables}
    record = feature_record(score, [View.of(name, array) for name, array in captured.items()])
    for name, array in captured.items():
        record[name] = target.address(array)
    return [record]


def sink_record(sink: Array, target: LaunchTarget) -> Any:
    """The record SINK of a sink of one number a head, or of one for all."""
    record = np.zeros((), SINK)
    head_stride = 0 if sink.shape[-1] == 1 else sink.strides[-1] // sink.dtype.itemsize
    record["sink"] = (target.address(sink), (0,) * BATCH_AXES, head_stride, 0, 0, 0)
    record["dtype"] = DTYPES.index(sink.dtype)
    return record


def fill_cache(record: Any, arrays: Mapping[str, Array | None], target: LaunchTarget) -> None:
    """Fill the addresses of a CACHE_PAGES record: the pages k and v, and the tables, of which some may be None."""
    fill_matrices(record, {name: arrays[name] for name in ("k", "v")}, target)
    for name in TABLES:
        record[name] = address_or_0(arrays[name], target)


def address_or_0(array: Array | None, target: LaunchTarget) -> int:
    """The address of an array; 0 where there is none."""
    return 0 if array is None else target.address(array)


def scale_records(arrays: Mapping[str, Array | None], target: LaunchTarget) -> list[Any]:
    """The record of a cache's scales, k_scale and v_scale among some arrays; none where there are no scales."""
    scales = {name: arrays.get(name) for name in CACHE_SCALES.names or ()}
    if any(scale is None for scale in scales.values()):
        return []
    record = np.zeros((), CACHE_SCALES)
    fill_matrices(record, scales, target)
    return [record]


def fill_matrices(record: Any, arrays: Mapping[str, Any], target: LaunchTarget) -> None:
    """Fill the MATRICES of arrays [batch, heads, rows], or [batch, heads, rows, columns], in a record."""
    for name, array in arrays.items():
        steps = [step // array.dtype.itemsize * (extent != 1) for step, extent in zip(array.strides, array.shape)]
        batch, head, row, column = (*steps, 0)[:4]
        record[name] = (target.address(array), (batch, *(0,) * (BATCH_AXES - 1)), head, row, column, 0)
