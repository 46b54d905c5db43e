"""Launches the kernels that attend from many new tokens to a cache, on its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import Array
from ..compiler.params_layout import PARAMS, SHAPE, TENSOR_MAP_ARRAYS, TENSOR_MAPS
from ..planning.launches import BATCH_AXES, TENSOR_MAP_PARAM, offset_of, record_of
from ..planning.prefill import PAGES, QUERY_INTERVALS, PrefillPlan
from .bound_launch import BoundLaunch
from .decoding import TABLES, address_or_0, fill_matrices, score_records, sink_record
from .launch import LaunchTarget
from .params import UNLIMITED, softmax_scale
from .tensor_map import BoxedArray

_OF_PARAMS = ("q", "k", "v", "o", "lse", "tile_counter")  # arrays whose addresses Params holds, beside lo and hi
_Places = list[tuple[int, int]]


class BoundPrefill:
    """The launches that write o [batch, heads, new tokens, value_dim] and lse [batch, heads, new tokens].

    They are complete but for the addresses of the arrays that are named.

    Parameters
    ----------
    plan : PrefillPlan
    arrays : dict by name
        Those of `executors.decoding.bound_decode`, and the plan's workspaces. Of those that are named, their layouts
        alone matter, and tables and workspaces among them may be None.
    names : sequence of str
        The arrays whose addresses each call gives, in this order.
    target : LaunchTarget
        Where the arrays are.
    """

    def __init__(
        self, plan: PrefillPlan, arrays: Mapping[str, Array | None], names: Sequence[str], target: LaunchTarget
    ) -> None:
        kernels = (
            (plan.intervals, plan.grids[0], *_intervals_records(plan, arrays, target)),
            (plan.launch, plan.grids[1], *_forward_records(plan, arrays, target)),
        )
        self._launches = []
        for launch, grid, records, places_of in kernels:
            numbered = [(number, place) for number, name in enumerate(names) for place in places_of.get(name, ())]
            bound = BoundLaunch(launch, grid, records, [place for _, place in numbered], target)
            self._launches.append((bound, tuple(number for number, _ in numbered)))

    def __call__(self, addresses: Iterable[int], stream: Any) -> None:
        """Launch the kernels on a stream, for arrays at these addresses in the order of the names."""
        given = list(addresses)
        for bound, numbers in self._launches:
            bound([given[number] for number in numbers], stream)


def _intervals_records(
    plan: PrefillPlan, arrays: Mapping[str, Array | None], target: LaunchTarget
) -> tuple[list[Any], dict[str, _Places]]:
    """The record of the kernel that makes intervals, and where it holds the addresses of arrays."""
    record = record_of(QUERY_INTERVALS, plan.numbers)
    fill_matrices(record, {name: arrays[name] for name in ("o", "lse")}, target)
    record["pages"] = _pages(plan, arrays, target)
    for name in plan.workspaces:
        record[name] = address_or_0(arrays[name], target)
    places = {name: [(0, offset_of(QUERY_INTERVALS, name))] for name in ("o", "lse", *plan.workspaces)}
    start = offset_of(QUERY_INTERVALS, "pages")
    places |= {name: [(0, start + offset_of(PAGES, name))] for name in TABLES}
    return [record, *_sink_records(plan, arrays, target, places, 1)], places


def _forward_records(
    plan: PrefillPlan, arrays: Mapping[str, Array | None], target: LaunchTarget
) -> tuple[list[Any], dict[str, _Places]]:
    """The records of the forward kernel, and where they hold the addresses of arrays."""
    record = np.zeros((), PARAMS)
    fill_matrices(record, {name: arrays[name] for name in ("q", "k", "v", "o", "lse")}, target)
    for name in ("q", "k", "v", "o", "lse"):  # the batch is the last of its axes, as tensor maps have it
        record[name]["batch_strides"] = record[name]["batch_strides"][::-1]
    record["lse"]["is_accumulator"] = 1
    record["shape"] = _shape(plan)
    lo, hi = (address_or_0(arrays[name], target) for name in ("lo", "hi"))
    tile = plan.launch.spec.block_q, plan.launch.spec.block_kv
    work = record["work"]
    work["lower"], work["upper"], work["lo"], work["hi"] = -UNLIMITED, UNLIMITED, lo, hi
    work["interval_batch_stride"] = plan.problem.seqlen_q
    work["block_q"], work["block_kv"] = tile
    places = {name: [(0, offset_of(PARAMS, name))] for name in _OF_PARAMS}
    places |= {name: [(0, offset_of(PARAMS, "work") + offset_of(PARAMS["work"], name))] for name in ("lo", "hi")}
    records = [record]
    if "tile_counter" in plan.workspaces:
        record["tile_counter"]["data"] = address_or_0(arrays["tile_counter"], target)
        records.append(_maps(plan, arrays, target, places))
    else:
        del places["tile_counter"]
    records += _sink_records(plan, arrays, target, places, len(records))
    if plan.score is not None:
        score = plan.score
        places |= {name: [(len(records), offset_of(score.dtype, name))] for name in score.tables}
    records += score_records(plan.score, arrays, target)
    places |= {name: [(len(records), offset_of(PAGES, name))] for name in TABLES}
    return [*records, _pages(plan, arrays, target)], places


def _sink_records(
    plan: PrefillPlan, arrays: Mapping[str, Array | None], target: LaunchTarget, places: dict[str, _Places], number: int
) -> list[Any]:
    """The record of the sink, which is that of a number among a kernel's, where there is one; adds its place."""
    sink = arrays.get("sink")
    if sink is None or not plan.launch.spec.has_sink:
        return []
    places["sink"] = [(number, 0)]
    return [sink_record(sink, target)]


def _shape(plan: PrefillPlan) -> Any:
    """The SHAPE of the call: no mask depends on the batch, and blocks do not share tiles."""
    problem = plan.problem
    sizes = ("num_heads", "group_size", "seqlen_q", "seqlen_kv", "head_dim", "value_dim")
    return record_of(SHAPE, {
        "batch": (*[1] * (BATCH_AXES - 1), problem.mask_shape.num_batch), "softmax_scale": softmax_scale(problem),
        **{name: getattr(problem, name) for name in sizes},
        **dict.fromkeys(("heads_per_l2_group", "kv_heads_per_l2_group", "num_splits"), 1),
    })  # fmt: skip


def _pages(plan: PrefillPlan, arrays: Mapping[str, Array | None], target: LaunchTarget) -> Any:
    """The record PAGES of a call."""
    record = record_of(PAGES, plan.pages)
    for name in TABLES:
        record[name] = address_or_0(arrays[name], target)
    return record


def _maps(
    plan: PrefillPlan, arrays: Mapping[str, Array | None], target: LaunchTarget, places: dict[str, _Places]
) -> Any:
    """Tensor maps of those arrays that the hardware can copy; adds the places of their addresses."""
    record = np.zeros((), TENSOR_MAPS)
    for name, box in plan.launch.boxes.items():
        array = arrays[name]
        boxed = boxed_array(array, box)
        if boxed.reasons(address=0):
            continue
        made = target.tensor_map(boxed)
        words = np.array(made.words, np.uint64)
        words[made.offset] = address_or_0(array, target)
        record[name] = words, 1
        start = TENSOR_MAP_ARRAYS.index(name) * TENSOR_MAP_PARAM.itemsize
        places[name] = [*places[name], (1, start + 8 * made.offset)]
    return record


def boxed_array(array: Any, box: tuple[int, int]) -> BoxedArray:
    """An array [batch or pages, heads, rows, columns] as boxes of rows and columns."""
    shape = (1, *(int(extent) for extent in array.shape))
    return BoxedArray(
        array.dtype, shape, (0, *array.strides), (1, 1, 1, *box), swizzle_bytes=box[1] * array.dtype.itemsize
    )
