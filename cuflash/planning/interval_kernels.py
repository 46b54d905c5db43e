"""Kernels that compute row intervals at each call, from device arrays of `Sequences`, `Lengths` or `Documents`.

The `intervals` methods of these masks compute the same intervals with NumPy, and are the specification of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
import numpy as np

from ..arrays import Array, ShapeDtype, is_array
from ..blocks.classify import extents, row_intervals
from ..blocks.sequence_tiles import num_tiles
from ..blocks.work_list import IntervalWork
from ..masks._interval_form import IntervalForm, KernelIntervals
from ..masks.base import And, Mask
from ..masks.content import held_arrays
from ..masks.shape import MaskShape
from ._params import UNLIMITED
from .launches import (
    BATCH, BATCH_AXES, BATCH_STRIDES, POINTER, Feature, Launch, Pass, Value, Workspace, over_batch, structure,
)  # fmt: skip
from .spec import SIMT, Entry, KernelSpec, untiled

AT_CALL = "lists"  # the name of the array of all results that kernels compute at each call
_ALIGNMENT = 256  # alignment in bytes of each result in the array that holds all of them
_SIDES = ("q", "kv")
_KINDS = ("sequences", "lengths", "documents")  # in the order of `IntervalKind` in kernels_cu/lists/interval_params.cuh
MOST_THREADS = 1 << 30  # maximum number of threads, since kernels number them in int32
_OF_ORDERS_ALONE = ("row_lengths", "column_lengths", "tile_lengths")  # results that attention kernels do not read
# This record mirrors `kernels_cu/lists/interval_params.cuh`.
INTERVAL_PARAMS = structure(
    (POINTER, "q_integers", "kv_integers"),
    (BATCH_STRIDES, "q_batch_strides", "kv_batch_strides"),
    (np.int64, "q_stride", "kv_stride"),
    (POINTER, "rows_lo", "rows_hi"),
    (np.int64, "rows_batch_stride", "rows_head_stride"),
    (POINTER, "lo", "hi", "row_lengths", "column_lengths", "row_order", "column_order"),
    (POINTER, "q_blocks", "kv_blocks", "tile_lengths", "column_entries"),
    (np.int64, "left", "right", "q_length", "kv_length"),
    (BATCH, "batch"),
    (np.int32, "num_matrices", "num_heads", "seqlen_q", "seqlen_kv", "num_offsets", "q_itemsize", "kv_itemsize"),
    (np.int32, "is_q_signed", "is_kv_signed", "is_bottom_right", "block_q", "block_kv", "num_q_blocks"),
    (np.int32, "num_kv_blocks", "tile_q", "tile_kv", "num_q_tiles", "num_kv_tiles", "kind"),
)
INTERVAL_SPECS = {
    name: untiled(Entry(family="lists", name=name, runs_as=SIMT)) for name in ("intervals", "interval_orders")
}


class _Integers:
    """The layout of an integer array: strides in bytes of the batch axes and the last axis, and the dtype.

    `number` is the value if the host passes an int instead of an array.
    """

    def __init__(self, integers: Array | int | None) -> None:
        self.number = integers if isinstance(integers, int) else 0
        self.is_array, self.shape = is_array(integers), tuple[int, ...]()
        self.batch_strides, self.stride, self.itemsize, self.is_signed = (0,) * BATCH_AXES, 0, 8, True
        if is_array(integers):
            assert integers is not None and not isinstance(integers, int)
            self.shape, self.batch_strides = tuple(integers.shape), over_batch(moving_strides(integers)[:-1], 0)
            self.stride, self.itemsize = int(integers.strides[-1]), int(integers.dtype.itemsize)
            self.is_signed = integers.dtype.kind == "i"


class SourceOfResults:
    """Base of sources whose kernels write all results into one array of bytes."""

    @cached_property
    def results(self) -> Mapping[str, Workspace]:
        """All results by name."""
        raise NotImplementedError

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The offset of each result in bytes."""
        return dict(zip(self.results, accumulate(map(_room, self.results.values()), initial=0)))

    @cached_property
    def nbytes(self) -> int:
        """Size of the array that holds all results."""
        return sum(map(_room, self.results.values()))

    def views(self, memory: Array, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Return results by name (default: all of them) as views of the array of bytes that holds them."""
        views, elements = {}, {dtype: memory.view(dtype) for dtype in {each.dtype for each in self.results.values()}}
        for name in self.results if names is None else names:
            result = self.results[name]
            itemsize, start, size = result.dtype.itemsize, self.offsets[name], prod(result.shape)
            flat = elements[result.dtype][start // itemsize : start // itemsize + size]
            views[name] = flat if len(result.shape) == 1 else flat.reshape(result.shape)
        return views


def _room(result: Workspace) -> int:
    """Return the bytes that a result takes in the array of all results, including padding."""
    return -(-result.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False, kw_only=True)
class IntervalSource(SourceOfResults):
    """The inputs of the kernels that compute row intervals: arrays that each call passes, and intervals on the host.

    Attributes
    ----------
    kind : str
        The kind of the `IntervalForm`.
    sides : dict of _Integers by "q" and "kv"
        The layouts of the form's arrays; without a key "kv", keys use the array of "q".
    left, right : int
        Keys before and after the diagonal that a query attends to.
    is_bottom_right : bool
        The diagonal goes through the last query and key of each sequence; otherwise through the first ones.
    rows : IntervalWork or None
        Row intervals on the host, with which the result is intersected.
    shape : MaskShape
    block : (int, int) or None
        Sizes of query and key blocks. Kernels sort blocks by the number of keys or queries that they visit.
    batch, num_heads : int
        Numbers of batch entries and of heads that have their own intervals; 1 if all share them.
    tile : (int, int), optional
        Sizes of sequence-aligned query and key tiles.
    """

    kind: str
    sides: Mapping[str, _Integers]
    left: int
    right: int
    is_bottom_right: bool
    rows: IntervalWork | None
    shape: MaskShape
    block: tuple[int, int] | None
    batch: int
    num_heads: int
    tile: tuple[int, int] | None = None

    @classmethod
    def of(cls, mask: Mask, shape: MaskShape, block: tuple[int, int] | None) -> IntervalSource | None:
        """Return the source of a resolved mask with one `IntervalForm` and no other arrays, or None."""
        parts = kept_and_closed(mask, lambda factor: interval_form(factor) is not None)
        if parts is None or not are_served(shape):
            return None
        (factor, closed), over, rows = parts, (1, 1), None
        form = interval_form(factor)
        assert form is not None
        sides = {side: _Integers(each) for side, each in zip(_SIDES, (form.q, form.kv)) if each is not None}
        if any(extent != 1 for each in sides.values() for extent in each.shape[:-1]):
            over = shape.num_batch, 1
        if closed:
            of_closed = extents(And(closed), shape)
            rows = rows_of(closed, shape, of_closed)
            over = max(over[0], of_closed[0]), max(over[1], of_closed[1])
        source = cls(
            kind=form.kind, sides=sides, left=_bounded(form.left), right=_bounded(form.right),
            is_bottom_right=form.is_bottom_right, rows=rows, shape=shape, block=block, batch=over[0],
            num_heads=over[1],
        )  # fmt: skip
        return source if source.num_threads <= MOST_THREADS else None

    @property
    def array_names(self) -> tuple[str, ...]:
        """Fields of the record for the arrays that each call passes."""
        return tuple(f"{side}_integers" for side, integers in self.sides.items() if integers.is_array)

    @property
    def num_offsets(self) -> int:
        """The number of sequence offsets; 0 if the kind is not "sequences"."""
        return self.sides["q"].shape[-1] if self.kind == "sequences" else 0

    @property
    def extents(self) -> tuple[int, int, int]:
        """The shape of lo and of hi."""
        return self.batch, self.num_heads, self.shape.seqlen_q

    @property
    def mean_length(self) -> float | None:
        """Mean number of keys per sequence, or keys in the window if there are fewer; None if unknown on the host."""
        if self.kind != "sequences":
            return None
        return min(self.shape.seqlen_kv / max(1, self.num_offsets - 1), self.left + self.right + 1)

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Numbers of query and key blocks per (batch, head) that kernels sort."""
        if self.block is None:
            return 0, 0
        return -(-self.shape.seqlen_q // self.block[0]), -(-self.shape.seqlen_kv // self.block[1])

    @property
    def num_tiles(self) -> tuple[int, int]:
        """Numbers of sequence-aligned query and key tiles per (batch, head), including empty tiles."""
        if self.tile is None:
            return 0, 0
        sequences = self.num_offsets + 1  # including the rows before the first offset and after the last one
        return num_tiles(self.shape.seqlen_q, self.tile[0], sequences), num_tiles(
            self.shape.seqlen_kv, self.tile[1], sequences
        )

    @property
    def num_threads(self) -> int:
        """Threads of the kernel "intervals": one per query, query block or tile start; a warp per key block or tile."""
        (rows, columns), (_, tiles) = self.num_blocks, self.num_tiles
        starts = 0 if self.tile is None else sum(self.num_tiles) + 2
        return self.batch * self.num_heads * (self.shape.seqlen_q + rows + starts + 32 * (columns + tiles))

    @cached_property
    def results(self) -> Mapping[str, Workspace]:
        rows, columns = ((self.batch * self.num_heads * number,) for number in self.num_blocks)
        shapes: dict[str, tuple[int, ...]] = {"lo": self.extents, "hi": self.extents}
        if self.block is not None:
            shapes |= {"row_lengths": rows, "column_lengths": columns, "row_order": rows, "column_order": columns}
        if self.tile is not None:
            matrices, (of_q, of_kv) = self.batch * self.num_heads, self.num_tiles
            shapes |= {"q_blocks": (matrices, of_q + 1), "kv_blocks": (matrices, of_kv + 1)}
            shapes |= {"tile_lengths": (matrices, of_kv), "column_entries": (matrices, of_kv)}
        return {name: Workspace(shape, np.dtype(np.int32)) for name, shape in shapes.items()}

    @cached_property
    def kernels(self) -> Pass:
        """The launches; they take the arrays of `array_names`, and the array of bytes that holds all results."""
        threads = {"intervals": self.num_threads}
        if self.block is not None:
            ordered = sum(self.num_blocks) + self.num_tiles[1]
            threads["interval_orders"] = 32 * self.batch * self.num_heads * ordered
        feature = Feature(
            "lists", INTERVAL_PARAMS, self._numbers(), (*self.array_names, "lo", "hi", AT_CALL), starts=self.offsets,
            names={"rows_lo": "lo", "rows_hi": "hi"} | dict.fromkeys(self.offsets, AT_CALL),
        )  # fmt: skip
        grids = {entry: -(-number // INTERVAL_SPECS[entry].num_threads) for entry, number in threads.items()}
        return Pass(
            {entry: list_launch(INTERVAL_SPECS[entry], grid, self.array_names) for entry, grid in grids.items()},
            features=(feature,),
        )

    def _numbers(self) -> dict[str, Value]:
        """Return the numbers in the kernels' record."""
        numbers: dict[str, Value] = {}
        for side, integers in self.sides.items():
            numbers |= {
                f"{side}_batch_strides": integers.batch_strides, f"{side}_stride": integers.stride,
                f"{side}_itemsize": integers.itemsize, f"is_{side}_signed": integers.is_signed,
                f"{side}_length": integers.number,
            }  # fmt: skip
        of_rows = leading_strides(None if self.rows is None else self.rows.lo)
        return numbers | {
            "rows_batch_stride": of_rows[0], "rows_head_stride": of_rows[1], "left": self.left, "right": self.right,
            "is_bottom_right": self.is_bottom_right, "batch": over_batch(self.shape.batch, 1),
            "num_matrices": self.batch * self.num_heads, "num_heads": self.num_heads,
            "seqlen_q": self.shape.seqlen_q, "seqlen_kv": self.shape.seqlen_kv, "num_offsets": self.num_offsets,
            "kind": _KINDS.index(self.kind), **_sides("block_{}", self.block or (0, 0)),
            **_sides("num_{}_blocks", self.num_blocks), **_sides("tile_{}", self.tile or (0, 0)),
            **_sides("num_{}_tiles", self.num_tiles),
        }  # fmt: skip


def list_launch(spec: KernelSpec, grid: int, arrays: tuple[str, ...]) -> Launch:
    """Return the launch of a kernel that computes lists or intervals of a mask from arrays at each call."""
    return Launch(spec=spec, tiles=grid, reads=arrays, writes=(AT_CALL,), features=("lists",))


def _sides(name: str, numbers: tuple[int, int]) -> dict[str, int]:
    """Return a number for queries and one for keys, by the names of their fields."""
    return {name.format(side): number for side, number in zip(_SIDES, numbers)}


def kept_and_closed(mask: Mask, is_selected: Callable[[Mask], bool]) -> tuple[Mask, tuple[Mask, ...]] | None:
    """Return the only factor of a mask for which `is_selected` is true, and all other factors.

    Return None if there is not exactly one such factor, or if another factor is not a row interval or holds arrays.
    """
    factors = mask.operands if type(mask) is And else (mask,)
    selected, closed = list[Mask](), list[Mask]()
    for factor in factors:
        (selected if is_selected(factor) else closed).append(factor)
    if len(selected) != 1 or not all(each._has_intervals and next(held_arrays(each), None) is None for each in closed):
        return None
    return selected[0], tuple(closed)


def interval_form(mask: Mask) -> IntervalForm | None:
    """Return the form from which a kernel computes a resolved mask's row intervals, or None if no kernel can."""
    return mask.interval_form if isinstance(mask, KernelIntervals) else None


def are_served(shape: MaskShape) -> bool:
    """True if kernels can compute lists or intervals of a shape: it is not empty and has at most `BATCH_AXES` axes."""
    return len(shape.batch) <= BATCH_AXES and 0 not in (shape.num_batch, *shape[1:])


def rows_of(closed: tuple[Mask, ...], shape: MaskShape, over: tuple[int, int]) -> IntervalWork:
    """Return the intersection of the row intervals of masks, separately for `over` batch entries and heads."""
    lo, hi = row_intervals(And(closed), shape.seqlen_q, shape.seqlen_kv, *over)
    return IntervalWork(seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv, block_q=1, block_kv=1, lo=lo, hi=hi)


def moving_strides(array: Array) -> tuple[int, ...]:
    """Return the strides of an array in bytes; 0 along axes of length 1."""
    return tuple(step if extent != 1 else 0 for step, extent in zip(array.strides, array.shape))


def leading_strides(side: Array | None) -> tuple[int, int]:
    """Return the strides in elements of the first two axes of lo or hi; 0 along axes of length 1."""
    if side is None:
        return 0, 0
    batch, heads, rows = side.shape
    return heads * rows if batch > 1 else 0, rows if heads > 1 else 0


def _bounded(keys: int | None) -> int:
    return UNLIMITED if keys is None else min(keys, UNLIMITED)


@dataclass(frozen=True, eq=False, kw_only=True)
class IntervalsAtCall(IntervalWork):
    """Work whose row intervals and tile orders are computed at each call, into one array of bytes.

    `lo` and `hi` have only shapes and dtypes.
    """

    source: IntervalSource
    carried = None

    @classmethod
    def of(cls, source: IntervalSource, tile: tuple[int, int], *, is_ordered: bool = False) -> IntervalsAtCall:
        """Return the work of a mask that `IntervalSource.of` accepts."""
        empty = ShapeDtype(source.extents, np.int32)
        return cls(
            seqlen_q=source.shape.seqlen_q, seqlen_kv=source.shape.seqlen_kv, block_q=tile[0], block_kv=tile[1],
            lo=empty, hi=empty, is_ordered=is_ordered, mean_length=source.mean_length, source=source,
        )  # fmt: skip

    def with_results(self, results: Array) -> IntervalsAtCall:
        """Return this work with the row intervals in an array of bytes that a call has filled."""
        views = self.source.views(results)
        return replace(self, lo=views["lo"], hi=views["hi"])

    def with_sequence_tiles(self, tile: tuple[int, int]) -> IntervalsAtCall:
        return replace(self, sequence_tile=tile, source=replace(self.source, tile=tile))

    @property
    def num_sequence_tiles(self) -> tuple[int, int]:
        return self.source.num_tiles

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def lists(self) -> dict[str, Array]:
        return {}

    @property
    def offsets(self) -> Mapping[str, int]:
        """The offset in bytes of each result that attention kernels read."""
        return {name: start for name, start in self.source.offsets.items() if name not in _OF_ORDERS_ALONE}
