"""Kernels that build block lists at each call from an array on the device: their inputs, results and four launches.

The kernels take one boolean array, of elements or of blocks, and row intervals. `blocks.classify` lists any mask on the
host, and is the specification of the kernels. `executors.evaluation` evaluates other masks into such arrays on a
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
import numpy as np

from ..arrays import Array
from ..blocks.classify import extents
from ..blocks.index import BlockIndex
from ..blocks.index_mask import IndexMask
from ..blocks.work_list import IntervalWork, ListedWork, WorkList, listed_block, work_list
from ..masks.base import And, Mask
from ..masks.block_set import BlockGrid
from ..masks.one_array import without_at_each_call
from ..masks.shape import MaskShape
from ._params import LISTS
from .chosen_lists import UnionsAtCall
from .interval_kernels import AT_CALL as AT_CALL
from .interval_kernels import (
    MOST_THREADS, IntervalsAtCall, IntervalSource, SourceOfResults, are_served, kept_and_closed, list_launch,
    moving_strides, rows_of,
)  # fmt: skip
from .launches import BATCH, BATCH_STRIDES, POINTER, Feature, Pass, Value, Workspace, over_batch, structure
from .spec import SIMT, Entry, int_per_thread, untiled

_OF_LISTS_ALONE = ("grid_kinds", "ranks")  # results that attention kernels do not read
_RESULTS = (*_OF_LISTS_ALONE, *LISTS)
_BYTES = ("grid_kinds", "kinds", "bits")
# Fields of the kernels' record that are sizes. A divisor is the number of tokens that one boolean of the array covers.
_SIZES = (
    "num_matrices", "num_heads", "seqlen_q", "seqlen_kv", "block_q", "block_kv", "num_q_blocks", "num_kv_blocks",
    "divisor_q", "divisor_kv",
)  # fmt: skip
# This record mirrors `kernels_cu/lists/params.cuh`.
LIST_PARAMS = structure(
    (POINTER, "mask"),
    (BATCH_STRIDES, "mask_batch_strides"),
    (np.int64, "mask_head_stride", "mask_row_stride", "mask_column_stride"),
    (POINTER, "lo", "hi"),
    (np.int64, "interval_batch_stride", "interval_head_stride"),
    (POINTER, *_RESULTS),
    (BATCH, "batch"),
    (np.int32, *_SIZES, "padding"),
)
# The results of the kernels, by the fields of a block index that hold them.
_FIELDS = {"indptr": "row_pointers", "indices": "kv_blocks", "kinds": "kinds", "tiles": "tiles", "bits": "bits"}

LIST_SPECS = {
    entry.name: untiled(entry, num_warps=num_warps)
    for entry, num_warps in {
        Entry(family="lists", name="classify", runs_as=SIMT): 4,
        Entry(family="lists", name="ranks", runs_as=SIMT): 4,
        Entry(family="lists", name="pointers", runs_as=SIMT, shared_bytes=int_per_thread): 16,
        Entry(family="lists", name="entries", runs_as=SIMT, shared_bytes=int_per_thread): 8,
    }.items()
}


@dataclass(frozen=True, eq=False, kw_only=True)
class ListSource(SourceOfResults):
    """The inputs of the kernels that build lists: a boolean array on the device, and row intervals on the host.

    Attributes
    ----------
    strides : tuple of int
        Strides of the array in bytes, along batch axes, heads, rows and columns; 0 along broadcast axes.
    element : (int, int)
        Numbers of queries and keys that one boolean covers.
    is_whole : bool
        Each block of the lists is within one block of the mask, so that kernels need not read single elements.
    rows : IntervalWork or None
        Row intervals with which the mask is intersected.
    given_rows : (int, int) or None
        Batch entries and heads (or 1) of row intervals that each call passes instead of `rows`.
    shape : MaskShape
    block : (int, int)
        Queries and keys of a listed block.
    batch, num_heads : int
        Numbers of batch entries and of heads that have their own lists; 1 if all share them.
    """

    strides: tuple[int, ...]
    element: tuple[int, int]
    is_whole: bool
    rows: IntervalWork | None
    shape: MaskShape
    block: tuple[int, int]
    batch: int
    num_heads: int
    given_rows: tuple[int, int] | None = None

    @classmethod
    def of(cls, mask: Mask, shape: MaskShape, block: tuple[int, int]) -> tuple[ListSource, Array] | None:
        """Return the source of a mask's lists, and the mask's array; None if the kernels do not serve the mask."""
        parts = kept_and_closed(mask, _has_no_intervals)
        if parts is None:
            return None
        grid, closed = parts
        if not isinstance(grid, BlockGrid) or not are_served(shape):
            return None
        array, element = grid.blocks.array, grid.block
        batch = shape.num_batch if any(extent != 1 for extent in array.shape[:-3]) else 1
        over, rows = (batch, int(array.shape[-3])), None
        if closed:
            of_closed = extents(And(closed), shape)
            over = max(over[0], of_closed[0]), max(over[1], of_closed[1])
            rows = rows_of(closed, shape, over)
        is_whole = all(side % listed == 0 for side, listed in zip(element, block))
        source = cls(
            strides=moving_strides(array), element=element, is_whole=is_whole, rows=rows, shape=shape, block=block,
            batch=over[0], num_heads=over[1],
        )  # fmt: skip
        return (source, array) if source.can_be_numbered else None

    def in_blocks(self, block: tuple[int, int], closed: tuple[Mask, ...] = ()) -> ListSource:
        """Return a source of lists in blocks of another size that reads the results of this source as its array.

        The array consists of this source's `grid_kinds`, its first result, in which nonzero means that the block is
        attended. `closed` are resolved masks of row intervals, without arrays, with which the mask is intersected.
        """
        assert self.is_whole and self.offsets["grid_kinds"] == 0
        _, num_rows, num_columns = self.grid
        axes = (*self.shape.batch, self.num_heads, num_rows, num_columns)
        return replace(
            self,
            strides=tuple(prod(axes[axis + 1 :]) for axis in range(len(axes))),
            element=self.block,
            is_whole=all(side % listed == 0 for side, listed in zip(self.block, block)),
            rows=self.rows_within(closed),
            block=block,
        )

    def rows_within(self, closed: tuple[Mask, ...]) -> IntervalWork | None:
        """Return the intersection of this source's row intervals and those of the masks `closed`, if there are any."""
        if not closed:
            return self.rows
        rows, own = rows_of(closed, self.shape, (1, 1)), self.rows
        if own is None:
            return rows
        assert rows.lo is not None and rows.hi is not None and own.lo is not None and own.hi is not None
        return replace(rows, lo=np.maximum(rows.lo, own.lo), hi=np.minimum(rows.hi, own.hi))

    @property
    def can_be_numbered(self) -> bool:
        """True if kernels can add the numbers of a block of the grid and of a thread of a launch, in int32."""
        threads = self._grids()["entries"] * LIST_SPECS["entries"].num_threads
        return max(prod(self.grid), threads) <= MOST_THREADS

    @property
    def grid(self) -> tuple[int, int, int]:
        """The number of (batch, head) matrices, and the block rows and block columns of each."""
        rows, columns = -(-self.shape.seqlen_q // self.block[0]), -(-self.shape.seqlen_kv // self.block[1])
        return self.batch * self.num_heads, rows, columns

    @cached_property
    def results(self) -> Mapping[str, Workspace]:
        matrices, num_rows, num_columns = self.grid
        rows, columns = matrices * num_rows, matrices * num_columns
        cells = rows * num_columns
        bits = (0 if self.is_whole else cells, self.block[0], -(-self.block[1] // 8))
        sides = {"row_pointers": rows + 1, "column_pointers": columns + 1, "row_order": rows, "column_order": columns}
        shapes = {name: bits if name == "bits" else (sides.get(name, cells),) for name in _RESULTS}
        return {
            name: Workspace(shape, np.dtype(np.uint8 if name in _BYTES else np.int32))
            for name, shape in shapes.items()
        }

    def lists_of(self, lists: Array) -> dict[str, Array]:
        """Return the lists that attention kernels read, by name, as views of the array of all results."""
        return self.views(lists, LISTS)

    def fields_of(self, lists: Array) -> dict[str, Array]:
        """Return the arrays of a block index, by field, as views of the array of all results."""
        return dict(zip(_FIELDS, self.views(lists, _FIELDS.values()).values()))

    @property
    def array_names(self) -> tuple[str, ...]:
        """Fields of the record for the arrays that each call passes: the mask, and lo and hi if `given_rows` is set."""
        return ("mask",) if self.given_rows is None else ("mask", "lo", "hi")

    @cached_property
    def kernels(self) -> Pass:
        """The launches; they take the arrays of `array_names`, and the array of bytes that holds all results."""
        written = {name: start for name, start in self.offsets.items() if name != "bits" or not self.is_whole}
        feature = Feature(
            "lists", LIST_PARAMS, self._numbers(), ("mask", "lo", "hi", AT_CALL), starts=written,
            names=dict.fromkeys(written, AT_CALL),
        )  # fmt: skip
        launches = {
            name: list_launch(LIST_SPECS[name], grid, self.array_names) for name, grid in self._grids().items()
        }
        return Pass(launches, features=(feature,))

    def _numbers(self) -> dict[str, Value]:
        """Return the numbers in the kernels' record."""
        (matrices, num_rows, num_columns), over = self.grid, self.given_rows
        if self.rows is not None:
            assert self.rows.lo is not None
            over = self.rows.lo.shape[:2]
        batch, heads = over or (1, 1)
        values = (matrices, self.num_heads, *self.shape[2:], *self.block, num_rows, num_columns, *self.element)
        return {
            "mask_batch_strides": over_batch(self.strides[:-3], 0),
            **{f"mask_{axis}_stride": step for axis, step in zip(("head", "row", "column"), self.strides[-3:])},
            "interval_batch_stride": heads * self.shape.seqlen_q if batch > 1 else 0,
            "interval_head_stride": self.shape.seqlen_q if heads > 1 else 0,
            "batch": over_batch(self.shape.batch, 1), **dict(zip(_SIZES, values, strict=True)),
        }  # fmt: skip

    def _grids(self) -> dict[str, int]:
        """Return the number of thread blocks of each launch, in order."""
        matrices, num_rows, num_columns = self.grid
        rows, columns = matrices * num_rows, matrices * num_columns

        def blocks(entry: str, threads: int) -> int:
            return -(-threads // LIST_SPECS[entry].num_threads)

        return {
            "classify": blocks("classify", (1 if self.is_whole else 32) * rows * num_columns),
            "ranks": blocks("ranks", 32 * rows) + blocks("ranks", columns),
            "pointers": 2,
            "entries": blocks("entries", 32 * rows) + -(-columns // 32) + blocks("entries", columns + rows),
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class ListedAtCall(ListedWork):
    """Work whose lists kernels build at each call, into one array of bytes that attention kernels take as `AT_CALL`.

    `index` has only shapes and dtypes. `lists` are the arrays that are equal in all calls. If `carried` is not None,
    calls pass the lists of a block index. Attention kernels read these lists if `carried` is `source`; otherwise other
    kernels first convert them.
    """

    source: ListSource
    carried: ListSource | None = None

    @property
    def max_entries_in_row(self) -> int:
        return self.index.num_kv_blocks

    @classmethod
    def of(cls, source: ListSource, *, carried: ListSource | None = None) -> ListedAtCall:
        """Return the work of a mask that `ListSource.of` accepts."""
        results = source.results.items()
        empty = {name: np.broadcast_to(np.zeros((), each.dtype), each.shape) for name, each in results}
        lo, hi = (None, None) if source.rows is None or not source.is_whole else (source.rows.lo, source.rows.hi)
        index = BlockIndex._of_lists(
            None, seqlen_q=source.shape.seqlen_q, seqlen_kv=source.shape.seqlen_kv, block=source.block,
            batch=source.batch, num_heads=source.num_heads, indptr=empty["row_pointers"], indices=empty["kv_blocks"],
            kinds=empty["kinds"], tiles=empty["tiles"], bits=empty["bits"], lo=lo, hi=hi,
        )  # fmt: skip
        return cls(index=index, source=source, carried=carried)

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.lists.values())

    @property
    def lists(self) -> dict[str, Array]:
        lo, hi = self.index.lo, self.index.hi
        return {} if lo is None or hi is None else {"lo": lo, "hi": hi}

    @property
    def offsets(self) -> Mapping[str, int]:
        """The offset in bytes of each list that attention kernels read."""
        return {name: start for name, start in self.source.offsets.items() if name not in _OF_LISTS_ALONE}


# Work whose arrays are computed at each call and passed to attention kernels as `AT_CALL`.
WorkAtCall = ListedAtCall | IntervalsAtCall | UnionsAtCall


def _has_no_intervals(mask: Mask) -> bool:
    return not mask._has_intervals


def work_of_kernels(
    mask: Mask, shape: MaskShape, tile: tuple[int, int], *, is_ordered: bool = False
) -> WorkList:
    """Return the work of a resolved mask on a GPU; if kernels can, each call builds the lists of an `AtEachCall`.

    If `is_ordered`, row intervals come with an order of blocks.
    """
    mask, is_at_each_call = without_at_each_call(mask)
    if not is_at_each_call:
        return work_list(mask, shape, tile, is_ordered=is_ordered)
    if (carried := _work_of_carried(mask, tile)) is not None:
        return carried
    source = IntervalSource.of(mask, shape, tile if is_ordered else None)
    if source is not None:
        return IntervalsAtCall.of(source, tile, is_ordered=is_ordered)
    listed = ListSource.of(mask, shape, listed_block(mask, tile))
    return work_list(mask, shape, tile, is_ordered=is_ordered) if listed is None else ListedAtCall.of(listed[0])


def _work_of_carried(mask: Mask, tile: tuple[int, int]) -> ListedAtCall | None:
    """Return the work of a block index with device lists, possibly intersected with row intervals; otherwise None.

    Kernels neither join nor cut the bit tiles of an index.
    """
    parts = kept_and_closed(mask, _has_no_intervals)
    if parts is None:
        return None
    grid, closed = parts
    if not isinstance(grid, IndexMask) or grid.index._carried is None:
        return None
    carried, block = grid.index._carried.source, listed_block(mask, tile)
    is_ready = not closed and block == grid.index.block
    if not (is_ready or carried.is_whole):
        return None
    listed = carried if is_ready else carried.in_blocks(block, closed)
    return ListedAtCall.of(listed, carried=carried) if listed.can_be_numbered else None
