"""Fill the record that a launch passes to a kernel from arrays, a problem and its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype
from ..blocks.work_list import IntervalWork, WorkList
from ..compiler.params_layout import (
    ARRAYS,
    HEAD_VECTORS,
    LISTS,
    TENSOR_MAP_ARRAYS,
    PARAMS,
    PART_ARRAYS,
    ROW_VECTORS,
    TENSOR_MAPS,
    NAIVE_ARRAYS,
)
from ..layouts import dense_strides
from ..planning.interval_kernels import leading_strides
from ..planning.launches import (
    BATCH_AXES, MATRICES, TENSOR_MAP_PARAM, DqSemaphoreOrder, Feature, Workspace, offset_of, record_of,
)  # fmt: skip
from ..planning.list_kernels import AT_CALL, WorkAtCall
from ..planning.plan import KernelPlan
from ..planning.problem import Problem
from .arguments import Arguments, Place
from .tensor_map import Template, BoxedArray

UNLIMITED = 1 << 40  # beyond any length, and far from overflow
_MAP_BATCH_AXES = 2  # a tensor map has five axes; further ones take a launch for each of their entries
_NO_STRIDE = -1  # rows that all are the same have no tensor map
_NESTED_RECORDS = {"naive": NAIVE_ARRAYS, "parts": PART_ARRAYS}  # arrays that have a record of their own


def _word_offsets() -> dict[str, int]:
    """Return the position of each address in a record, in words of 8 bytes."""
    bytes_before = {name: offset_of(PARAMS, name) for name in ARRAYS}
    for record, names in {"work": ("lo", "hi", *LISTS), **_NESTED_RECORDS}.items():
        bytes_before |= {name: offset_of(PARAMS, record) + offset_of(PARAMS[record], name) for name in names}
    return {name: number // 8 for name, number in bytes_before.items()}


_WORD_OFFSETS = _word_offsets()


class View(NamedTuple):
    """The layout of an array in memory: all that a kernel needs of it but its address."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes

    @classmethod
    def of(cls, name: str, array: Array) -> View:
        return cls(name, array.dtype, array.shape, array.strides)

    @classmethod
    def of_new(cls, name: str, made: ShapeDtype | Workspace, axes: Sequence[int] | None = None) -> View:
        """The layout of a dense array that is yet to be allocated, its axes in memory from the outermost inwards."""
        steps = dense_strides(made.shape, axes)
        return cls(name, made.dtype, made.shape, tuple(made.dtype.itemsize * step for step in steps))


@dataclass(frozen=True, eq=False)
class ParamsTemplate:
    """The records of one pass over one plan and arrays that lie as `views` say, complete but for addresses.

    More than one where leading axes do not fold into `BATCH_AXES`: a launch each.
    """

    views: tuple[View, ...]
    templates: tuple[tuple[Any, ...], ...]  # Params and features of each launch; their addresses are offsets in bytes
    maps: Any  # a record of tensor maps, whose addresses are missing
    map_offsets: Mapping[str, int]  # words at which addresses of arrays that have a map stand
    features: tuple[Feature, ...] = ()
    list_offsets: Mapping[str, int] = field(default_factory=dict)  # lists that a call hands over, in bytes

    @classmethod
    def of(
        cls,
        plan: KernelPlan,
        views: tuple[View, ...],
        boxes: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        tensor_map: Callable[[BoxedArray], Template] | None = None,
        features: tuple[Feature, ...] = (),
    ) -> ParamsTemplate:
        """The records of a pass over arrays of some layouts.

        Parameters
        ----------
        boxes : dict of (rows, columns) by array name
            Boxes that kernels copy by tensor maps, which `tensor_map` makes.
        features : tuple of Feature
            Features whose parameters are arguments of their own.
        """
        problem = plan.problem
        tables = {AT_CALL} | {name for feature in features for name in feature.tables}
        no_strides = (0,) * (len(problem.batch) + 3)
        strides = [no_strides if view.name in tables else _strides(view, plan) for view in views]
        axes = _folded(problem.batch, [steps[:-3] for steps in strides])
        most = _MAP_BATCH_AXES if boxes else BATCH_AXES
        inner, outer = axes[-most:], axes[:-most]
        padding = BATCH_AXES - len(inner)
        maps, map_offsets = np.zeros((), TENSOR_MAPS), dict[str, int]()
        for index, (view, steps) in enumerate(zip(views, strides)):
            if view.name not in boxes or tensor_map is None:
                continue
            batch = [(1, 0)] * (_MAP_BATCH_AXES - len(inner)) + [(extent, by[index]) for extent, by in inner]
            boxed = _boxed(view, plan, batch, steps[-3:], boxes[view.name])
            if not boxed.reasons(address=0):
                boxed_map = tensor_map(boxed)
                maps[view.name] = boxed_map.words, 1
                start = _WORDS + TENSOR_MAP_ARRAYS.index(view.name) * TENSOR_MAP_PARAM.itemsize // 8
                map_offsets[view.name] = start + boxed_map.offset
        record = np.zeros((), PARAMS)
        record["work"] = _work(plan.work)
        kernels = plan.kernels
        assert kernels is not None
        num_kv_heads = prod(extent for extent, _ in inner) * problem.num_kv_heads
        num_fused_heads, *leads = _dq_numbers(kernels.order.dq, num_kv_heads)
        record["shape"] = (
            [1] * padding + [extent for extent, _ in inner], 0, problem.num_heads, problem.group_size,
            problem.seqlen_q, problem.seqlen_kv, problem.head_dim, problem.value_dim, kernels.order.heads_per_group,
            kernels.order.kv_heads_per_group, kernels.num_splits, problem.group_size * num_fused_heads,
            *leads, softmax_scale(problem),
        )  # fmt: skip
        parts = {feature.name: feature_record(feature, views) for feature in features}
        if tensor_map is not None:
            map_offsets |= _map_features(features, parts, {view.name: view for view in views}, tensor_map)
        record_of_view = {name: record[part] for part, names in _NESTED_RECORDS.items() for name in names}
        record_of_view |= {name: parts[feature.name] for feature in features for name in feature.dtype.names or ()}
        templates = []
        for outer_index in np.ndindex(*(extent for extent, _ in outer)):
            for index, (view, steps) in enumerate(zip(views, strides)):
                start = sum(number * by[index] for number, (_, by) in zip(outer_index, outer)) * view.dtype.itemsize
                steps_of_batch = [0] * padding + [by[index] for _, by in inner]
                if view.name in tables:
                    continue
                filled = record_of_view.get(view.name, record)
                filled[view.name] = (start, steps_of_batch, *steps[-3:], view.dtype == problem.accumulator)
            templates.append((record.copy(), *(part.copy() for part in parts.values())))
            record["shape"]["first_batch"] += prod(extent for extent, _ in inner)
        list_offsets = plan.work.offsets if isinstance(plan.work, WorkAtCall) else {}
        return cls(views, tuple(templates), maps, map_offsets, features, list_offsets)

    def with_lists(self, lists: Mapping[str, int], kernels: Sequence[Sequence[int]] = ()) -> list[Arguments]:
        """The arguments of each launch of the kernels, complete but for the arrays' addresses in the views' order.

        Parameters
        ----------
        lists : dict of addresses by name
            Those of the work list's arrays.
        kernels : sequence of sequences of int
            The numbers of each kernel's arguments: 0 are Params, 1 the tensor maps, and further ones the features. One
            kernel that takes all of them, unless given.
        """
        at_call = [(_WORD_OFFSETS[name], start) for name, start in self.list_offsets.items()]
        of_features = _feature_offsets(self.features)
        first_of_features = {name: places[0] for name, places in of_features.items()}
        word_offsets = _WORD_OFFSETS | first_of_features | {AT_CALL: at_call[0][0] if at_call else 0}
        offsets = [word_offsets[view.name] for view in self.views]
        maps = self.maps.reshape(1).view(np.uint64)
        names = [view.name for view in self.views]
        sizes = (_WORDS, len(maps), *(feature.dtype.itemsize // 8 for feature in self.features))
        parts = [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        taken = [[parts[number] for number in numbers] for numbers in kernels] or [parts]
        made = []
        for params, *records in self.templates:
            feature_words = (record.reshape(1).view(np.uint64) for record in records)
            words = np.concatenate([params.reshape(1).view(np.uint64), maps, *feature_words])
            words[[_WORD_OFFSETS[name] for name in lists]] = list(lists.values())
            for offset, start in at_call:
                words[offset] = start
            starts = words[offsets].tolist()
            places = [Place(offset, start, number) for number, (offset, start) in enumerate(zip(offsets, starts))]
            for name, offset in self.map_offsets.items():
                number = names.index(name)
                places.append(Place(offset, starts[number], number))
            places += (Place(offset, start, names.index(AT_CALL)) for offset, start in at_call)
            for name, (_, *others) in of_features.items():  # arrays that several features take
                places += (Place(offset, 0, names.index(name)) for offset in others)
            given = enumerate(_number_offsets(self.features), len(self.views))
            places += (Place(offset, int(words[offset]), number) for number, offset in given)
            made.append(Arguments(words, taken, places))
        return made


def _dq_numbers(order: DqSemaphoreOrder | None, num_kv_heads: int) -> tuple[int, int, int]:
    """The key/value heads whose dQ is finished in order, and how far tiles lead and lag; zeros without an order."""
    if order is None:
        return 0, 0, 0
    return order.num_fused_heads(num_kv_heads), order.last_tile_lead, order.first_tile_lag


def feature_record(feature: Feature, views: Iterable[View]) -> Any:
    """A feature's record with its numbers and its tables' strides, and without addresses."""
    record = record_of(feature.dtype, feature.values)
    for view in views:
        if view.name in feature.tables and f"{view.name}_strides" in (feature.dtype.names or ()):
            steps = zip(view.shape, view.strides)
            record[f"{view.name}_strides"] = [step // view.dtype.itemsize * (extent != 1) for extent, step in steps]
    return record


def _map_features(
    features: tuple[Feature, ...], parts: Mapping[str, Any], views: Mapping[str, View],
    tensor_map: Callable[[BoxedArray], Template],
) -> dict[str, int]:  # fmt: skip
    """Fill the tensor maps in records of features; return the words of their addresses by array."""
    offsets = {}
    for feature, start in _starts(features):
        for name, (table, box) in feature.boxes.items():
            view = views[table]
            leading = [(1, 0)] * (5 - len(view.shape)) + list(zip(view.shape[:-2], view.strides[:-2]))
            # an axis of stride 0 has one index
            axes = [(extent if step else 1, step) for extent, step in leading]
            axes += list(zip(view.shape, view.strides))[-2:]
            shape, strides = (tuple(side) for side in zip(*axes))
            itemsize = view.dtype.itemsize
            boxed = BoxedArray(view.dtype, shape, strides, (1, 1, 1, *box), box[1] * itemsize)
            if not boxed.reasons(address=0):
                made = tensor_map(boxed)
                parts[feature.name][name] = made.words, 1
                offsets[table] = start + offset_of(feature.dtype, name) // 8 + made.offset
    return offsets


def _starts(features: tuple[Feature, ...]) -> Iterable[tuple[Feature, int]]:
    """The features, each with the word at which its record starts, after Params and the tensor maps."""
    return zip(features, accumulate((feature.dtype.itemsize // 8 for feature in features), initial=_ALL_WORDS))


def _feature_offsets(features: tuple[Feature, ...]) -> dict[str, list[int]]:
    """The words of addresses in the records of features, which follow Params and the tensor maps.

    Several features may take the address of one table.
    """
    found: dict[str, list[int]] = {}
    for feature, start in _starts(features):
        assert feature.dtype.fields is not None and feature.dtype.itemsize % 8 == 0
        for name, (kind, offset, *_) in feature.dtype.fields.items():
            if kind == MATRICES or name in feature.tables:
                found.setdefault(name, []).append(start + offset // 8)
    return found


def _number_offsets(features: tuple[Feature, ...]) -> list[int]:
    """The words of the numbers that a call gives in the records of features."""
    found = []
    for feature, start in _starts(features):
        for name in feature.numbers:
            first = offset_of(feature.dtype, name)
            assert first % 8 == 0, f"{name} is the second half of a word, to which its number cannot be added"
            found.append(start + first // 8)
    return found


_WORDS = PARAMS.itemsize // 8
_ALL_WORDS = _WORDS + TENSOR_MAPS.itemsize // 8


def softmax_scale(problem: Problem) -> float:
    """Return the scale, or 0 if it is too small for the kernels' numbers: no score is large enough to matter."""
    scale = problem.scaling.scale
    return scale if abs(scale) >= 2 * float(np.finfo(problem.accumulator).tiny) else 0.0


def _strides(view: View, plan: KernelPlan) -> tuple[int, ...]:
    """Strides in elements over (*batch, heads, rows, columns), 0 where an axis is broadcast or not there."""
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
    view: View, plan: KernelPlan, batch: Sequence[tuple[int, int]], steps: Sequence[int], box: tuple[int, int]
) -> BoxedArray:
    """An array [batch, batch, heads, rows, columns] as boxes. An axis of stride 0 has extent 1, and so does one that is
    not there."""
    problem, itemsize = plan.problem, view.dtype.itemsize
    heads = problem.num_heads if view.name in ("q", "do", "o") else problem.num_kv_heads
    leading = [(extent if step else 1, step) for extent, step in (*batch, (heads, steps[0]))]
    axes = [*leading, (view.shape[-2], steps[1] or _NO_STRIDE), (view.shape[-1], steps[2])]
    shape, strides = (tuple(side) for side in zip(*((extent, step * itemsize) for extent, step in axes)))
    return BoxedArray(view.dtype, shape, strides, (1, 1, 1, *box), box[1] * itemsize)


def _folded(batch: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Leading axes as (extent, a stride for each array), neighbours joined where all arrays step through both alike."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for extent, steps in zip(batch, zip(*strides)):
        if extent == 1:
            continue
        if axes and all(outer == step * extent for outer, step in zip(axes[-1][1], steps)):
            axes[-1] = axes[-1][0] * extent, steps
        else:
            axes.append((extent, steps))
    return axes


def _work(work: WorkList) -> tuple[Any, ...]:
    """The WORK record of a work list, its addresses 0."""
    lists = (0,) * len(LISTS)
    if isinstance(work, IntervalWork):
        lower, upper = (None, None) if work.band is None else (work.band.lower, work.band.upper)
        batch, num_heads, _ = (1, 1, 0) if work.lo is None else work.lo.shape
        shared = (num_heads if batch > 1 else 0, 1 if num_heads > 1 else 0)  # of the orders
        block = (work.block_q, work.block_kv)
        tiles = work.num_sequence_tiles
        return (*_band(lower, upper), 0, 0, *leading_strides(work.lo), *lists, *shared, *block, *tiles)
    index = work.index
    shared = (index.num_heads if index.batch > 1 else 0, 1 if index.num_heads > 1 else 0)
    grid = (index.num_q_blocks, index.num_kv_blocks)
    return (*_band(None, None), 0, 0, *leading_strides(index.lo), *lists, *shared, *index.block, *grid)


def _band(lower: int | None, upper: int | None) -> tuple[int, int]:
    return -UNLIMITED if lower is None else lower, UNLIMITED if upper is None else upper
