"""Launches the decode kernel on the arrays of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import Array, DTYPES
from ..planning.decoding import DECODE, DecodePlan
from ..planning.launches import BATCH_AXES
from ..planning.sinks import SINK
from . import checks, gpu, sim
from .bound_launch import BoundLaunch
from .launch import LaunchTarget
from .params import softmax_scale

_TABLES = ("table", "lengths", "counts", "num_faults")


def target_of(executor: str) -> LaunchTarget:
    """Return the object that launches kernels of the executor "gpu" or "sim"."""
    return gpu.current_target() if executor == "gpu" else sim.Simulator()


def decode(
    plan: DecodePlan, arrays: Mapping[str, Array | None], target: LaunchTarget, made: list[Array] | None = None
) -> list[Array]:
    """Write o [batch, heads, new tokens, value_dim] and lse [batch, heads, new tokens].

    Parameters
    ----------
    plan : DecodePlan
    arrays : dict by name
        q, o, lse; k and v, the cache's pages; int32 arrays table, lengths, counts and num_faults, of which table and
        counts may be None; and sink, where the problem has one.
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
    bound_decode(plan, {**arrays, **dict(zip(plan.workspaces, made))}, (), target)((), stream)
    if checks.is_on():
        target.wait(plan.launch)
    return made


def bound_decode(
    plan: DecodePlan, arrays: Mapping[str, Array | None], names: Sequence[str], target: LaunchTarget
) -> BoundLaunch:
    """The launch on arrays, complete but for the addresses of those that are named.

    Parameters
    ----------
    plan : DecodePlan
    arrays : dict by name
        As `decode` takes them, and the plan's workspaces. Of those that are named, their layouts alone matter, and
        tables and workspaces among them may be None.
    names : sequence of str
        The arrays whose addresses each call gives, in this order.
    target : LaunchTarget
        Where the arrays are.
    """
    record = np.zeros((), DECODE)
    for name, number in plan.numbers.items():
        if name != "cache":
            record[name] = number
    record["softmax_scale"] = softmax_scale(plan.problem)
    fill_matrices(record, {name: arrays[name] for name in ("q", "o", "lse")}, target)
    fill_cache(record["cache"], plan.numbers["cache"], arrays, target)
    for name in plan.workspaces:
        record[name] = 0 if arrays[name] is None else target.address(arrays[name])
    records = [record]
    sink = arrays.get("sink")
    if sink is not None:
        records.append(sink_record(sink, target))
    places = [(1, offset_of(SINK, name)) if name == "sink" else (0, offset_of(DECODE, name)) for name in names]
    return BoundLaunch(plan.launch, plan.grid, records, places, target)


def sink_record(sink: Array, target: LaunchTarget) -> Any:
    """The record SINK of a sink of one number a head, or of one for all."""
    record = np.zeros((), SINK)
    head_stride = 0 if sink.shape[-1] == 1 else sink.strides[-1] // sink.dtype.itemsize
    record["sink"] = (target.address(sink), (0,) * BATCH_AXES, head_stride, 0, 0, 0)
    record["dtype"] = DTYPES.index(sink.dtype)
    return record


def offset_of(dtype: np.dtype[Any], name: str) -> int:
    """The offset in bytes of an array's address in a record, or in the record of the cache that it holds."""
    assert dtype.fields is not None
    if name in dtype.fields:
        return int(dtype.fields[name][1])
    kind, start = dtype.fields["cache"][:2]
    return int(start) + offset_of(kind, name)


def fill_cache(
    record: Any, numbers: Mapping[str, int], arrays: Mapping[str, Array | None], target: LaunchTarget
) -> None:
    """Fill a CACHE_PAGES record: its numbers, the pages k and v, and the tables, of which some may be None."""
    for name, number in numbers.items():
        record[name] = number
    fill_matrices(record, {name: arrays[name] for name in ("k", "v")}, target)
    for name in _TABLES:
        table = arrays[name]
        record[name] = 0 if table is None else target.address(table)


def fill_matrices(record: Any, arrays: Mapping[str, Any], target: LaunchTarget) -> None:
    """Fill the MATRICES of arrays [batch, heads, rows], or [batch, heads, rows, columns], in a record."""
    for name, array in arrays.items():
        steps = [step // array.dtype.itemsize * (extent != 1) for step, extent in zip(array.strides, array.shape)]
        batch, head, row, column = (*steps, 0)[:4]
        record[name] = (target.address(array), (batch, *(0,) * (BATCH_AXES - 1)), head, row, column, 0)
