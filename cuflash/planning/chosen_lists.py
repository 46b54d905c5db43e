"""Block lists per query: the unions that tiles of neighboring queries visit, and the kernels that compute them.

The kernels join lists on a device at each call. `blocks._chosen_work` joins lists on the host, and is the specification
of these kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Array, namespace, to_host
from ..blocks._chosen_work import Unions, chosen_work
from ..blocks.classify import BlockKind, extents
from ..blocks.index_mask import IndexMask
from ..blocks.work_list import IntervalWork, Segment
from ..masks._chosen import ResolvedChosen
from ..masks.base import And, Band, Mask, intersection
from ..masks.content import held_arrays
from ..masks.one_array import without_at_each_call
from ..masks.shape import MaskShape
from ._params import UNLIMITED
from .interval_kernels import (
    AT_CALL, IntervalsAtCall, IntervalSource, SourceOfResults, are_served, leading_strides, list_launch, rows_of,
)  # fmt: skip
from .launches import (
    BATCH, BATCH_STRIDES, POINTER, Feature, Launch, Pass, Value, Workspace, over_batch, structure,
)  # fmt: skip
from .problem import Problem
from .query_lists import QueryLists
from .spec import SIMT, Entry, KernelSpec, int_per_thread, untiled

ROWS = 64  # rows of a tile: neighboring queries, each with all heads that share its list and its keys
_TILES_OF_CHUNK = 64  # must equal kTilesOfChunk in kernels_cu/attention/chosen_lists.cuh
_COLUMN_WARPS = 8  # warps that share the tiles of a chunk; each has its own counts
_NARROW_BLOCKS, _STEP = (16, 32), 64  # supported keys per block: these, and multiples of 64
_SHARED_BYTES = 32 << 10  # bytes of shared memory for the words or counts that a thread block processes at a time
_RESULTS, _INTERVALS = ("ranges", "kv_blocks", "words"), ("lo", "hi")
_COLUMNS = ("chunk_counts", "column_pointers", "queries")
_PARTS = ("part_pointers", "column_parts", "part_arrivals")
QUERIES_PER_PART = 512  # minimum queries per part of a key block; each part has its own thread block
_PARTS_IN_ALL = 1024  # approximate total number of parts: a few per thread block that a GPU holds at once
NAME = "chosen"  # the feature's name
NOT_JOINED = (
    "; block lists per query are not joined: only sm80 and sm90 kernels join the lists of neighbouring queries, for "
    "16-bit elements, blocks of 16, 32 or a multiple of 64 keys and row intervals, without dropout and without "
    "gradients of a score function's arrays, of an index on a device only if it has no partial blocks, and lists "
    "within sequences only if all sequences are on the host and begin at multiples of 16 keys"
)
# This record mirrors `kernels_cu/attention/chosen_lists.cuh`.
CHOSEN_LISTS = structure(
    (POINTER, "ranges", "words", *_COLUMNS, *_PARTS),
    (np.int32, "batch_stride", "head_stride", "num_list_heads", "heads_per_list"),
    (np.int32, "heads_per_tile", "queries_per_tile", "num_tiles", "num_blocks", "words_per_entry", "max_members"),
    (np.int32, "num_chunks", "blocks_at_once", "queries_per_part", "num_parts", "max_parts", "padding"),
)
# This record mirrors `kernels_cu/lists/chosen.cuh`.
CHOSEN_PARAMS = structure(
    (POINTER, "blocks", "counts"),
    (BATCH_STRIDES, "blocks_batch_strides", "counts_batch_strides"),
    (np.int64, "blocks_head_stride", "blocks_row_stride", "blocks_stride", "counts_head_stride", "counts_row_stride"),
    (np.int64, "lower", "upper"),
    (POINTER, *_INTERVALS),
    (np.int64, "rows_batch_stride"),
    (POINTER, *_RESULTS),
    (BATCH, "batch"),
    (np.int32, "num_heads", "seqlen_q", "seqlen_kv", "num_chosen", "block", "num_blocks"),
    (np.int32, "blocks_itemsize", "counts_itemsize", "is_counts_signed", "queries_per_tile", "num_tiles"),
    (np.int32, "words_per_entry", "max_entries", "blocks_at_once", "has_starts"),
)

UNIONS = untiled(Entry(family="lists", name="unions", runs_as=SIMT), num_warps=1)
COLUMN_SPECS = {
    entry.name: replace(untiled(entry, num_warps=num_warps), packs_queries=True)
    for entry, num_warps in {
        Entry(family="lists", name="columns_count", runs_as=SIMT): _COLUMN_WARPS,
        Entry(family="lists", name="columns_scan", runs_as=SIMT, shared_bytes=int_per_thread): 8,
        Entry(family="lists", name="columns_fill", runs_as=SIMT): _COLUMN_WARPS,
    }.items()
}


@dataclass(frozen=True, kw_only=True)
class UnionTiling:
    """The tiles of neighboring queries for block lists per query.

    Attributes
    ----------
    shape : MaskShape
    batch, num_lists : int
        Numbers of batch entries and of heads that have their own lists; 1 if all share their lists.
    num_chosen : int
        Maximum number of entries of a list.
    block : int
        Keys per block.
    group_size : int
        Query heads that share a key/value head.
    least_queries : int
        Minimum number of queries in a part. The queries that chose a key block are divided into parts, and one thread
        block sums dK and dV over a part.
    """

    shape: MaskShape
    batch: int
    num_lists: int
    num_chosen: int
    block: int
    group_size: int
    least_queries: int = field(default_factory=lambda: QUERIES_PER_PART)

    @property
    def heads_per_list(self) -> int:
        return self.shape.num_heads // self.num_lists

    @property
    def heads_per_tile(self) -> int:
        """Number of query heads in a tile: the most that fit and that share a list and a key/value head."""
        shared = math.gcd(self.heads_per_list, self.group_size)
        return max(heads for heads in range(1, min(shared, ROWS) + 1) if shared % heads == 0)

    @property
    def queries_per_part(self) -> int:
        """Maximum number of queries of a key block over which one thread block sums dK and dV."""
        fair = self.num_list_heads * self.max_members // _PARTS_IN_ALL
        return max(self.least_queries, 1 << fair.bit_length() if fair else 0)

    @property
    def num_parts(self) -> int:
        """Maximum number of thread blocks that share a key tile; 1 if the heads of a group have different lists."""
        is_shared = self.heads_per_list % self.group_size == 0
        return -(-self.shape.seqlen_q // self.queries_per_part) if is_shared else 1

    @property
    def max_parts(self) -> int:
        """Maximum number of parts per list head, counting only blocks with more than one part."""
        whole = self.max_members // self.queries_per_part  # each block with parts has at most one part that is not full
        return whole + min(whole, self.num_blocks) if self.num_parts > 1 else 0

    @property
    def num_list_heads(self) -> int:
        """Number of (batch entry, head) pairs that have lists."""
        return self.batch * self.num_lists

    @property
    def queries_per_tile(self) -> int:
        return ROWS // self.heads_per_tile

    @property
    def num_tiles(self) -> int:
        """Number of query tiles per list head."""
        return -(-self.shape.seqlen_q // self.queries_per_tile)

    @property
    def num_blocks(self) -> int:
        return -(-self.shape.seqlen_kv // self.block)

    @property
    def words_per_entry(self) -> int:
        return 1 if self.queries_per_tile <= 32 else 2

    @property
    def max_entries(self) -> int:
        """Maximum number of blocks in the union of a tile."""
        return min(self.queries_per_tile * self.num_chosen, self.num_blocks)

    @property
    def max_members(self) -> int:
        """Maximum number of (query, block) pairs per list head."""
        return self.shape.seqlen_q * min(self.num_chosen, self.num_blocks)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of tiles per list head; a thread block counts the queries of a chunk."""
        return -(-self.num_tiles // _TILES_OF_CHUNK)

    def blocks_at_once(self, words: int) -> int:
        """Return for how many blocks shared memory can hold `words` words each."""
        return max(1, min(self.num_blocks, _SHARED_BYTES // (4 * words)))

    @property
    def can_be_numbered(self) -> bool:
        """True if kernels can add two numbers of entries or of (query, block) pairs, and the queries of a part."""
        most = max(self.num_tiles * self.max_entries, self.max_members, self.num_chunks * self.num_blocks)
        return 2 * self.num_list_heads * most + self.queries_per_part <= np.iinfo(np.int32).max

    @property
    def values(self) -> dict[str, int]:
        """The numbers in the record `CHOSEN_LISTS` of attention kernels."""
        numbers = {
            name: getattr(self, name)
            for name in ("num_list_heads", "heads_per_list", "heads_per_tile", "queries_per_tile", "num_tiles",
                         "num_blocks", "words_per_entry", "max_members", "num_chunks", "queries_per_part", "num_parts",
                         "max_parts")
        }  # fmt: skip
        return numbers | {
            "batch_stride": self.num_lists if self.batch > 1 else 0, "head_stride": int(self.num_lists > 1),
            "blocks_at_once": self.blocks_at_once(_COLUMN_WARPS),
        }  # fmt: skip

    def boxes(self, boxes: Mapping[str, tuple[int, ...]], num_queries: int) -> dict[str, tuple[int, ...]]:
        """Return the boxes of a kernel's tensor maps; a box of queries has all heads of a tile."""
        rows = num_queries, self.heads_per_tile
        return {name: box if name in ("k", "v") else (*rows, box[-1]) for name, box in boxes.items() if name != "o"}

    @property
    def columns(self) -> dict[str, Workspace]:
        """Workspaces of the kernels that list, for each block, the queries that chose it."""
        heads, blocks = self.num_list_heads, self.num_blocks
        shapes = (heads, self.num_chunks, blocks), (heads, blocks + 1), (heads, self.max_members), (heads, blocks + 1)
        names = (*_COLUMNS, *_PARTS[:1]) if self.num_parts > 1 else _COLUMNS
        return {name: Workspace(shape, np.dtype(np.int32)) for name, shape in zip(names, shapes)}

    def parts(self, backward: KernelSpec) -> dict[str, Workspace]:
        """Return the workspaces of a backward kernel whose thread blocks share key tiles."""
        if self.num_parts == 1:
            return {}
        matrices = self.shape.num_batch * (self.shape.num_heads // self.group_size)
        slots = self.max_parts * -(-self.block // backward.block_kv)
        tiles = -(-self.shape.seqlen_kv // backward.block_kv)
        floats = backward.block_kv * (backward.head_dim + backward.value_dim)
        return {
            "column_parts": Workspace((matrices, slots, floats), np.dtype(np.float32)),
            "part_arrivals": Workspace((matrices, tiles), np.dtype(np.int32), is_zeroed=True),
        }

    @property
    def column_launches(self) -> dict[str, Launch]:
        """The launches that list, for each block, the queries that chose it."""
        counts, row_bytes = _COLUMNS[:1], 4 * _COLUMN_WARPS * self.blocks_at_once(_COLUMN_WARPS)
        scanned = (*_COLUMNS[:2], *_PARTS[:1]) if self.num_parts > 1 else _COLUMNS[:2]
        described = {
            "columns_count": (self.num_chunks, (), counts, row_bytes),
            "columns_scan": (1, counts, scanned, 0),
            "columns_fill": (self.num_chunks, _COLUMNS[:2], _COLUMNS[2:], row_bytes),
        }
        return {
            name: Launch(
                spec=COLUMN_SPECS[name], tiles=self.num_lists * grid, reads=reads, writes=writes, features=(NAME,),
                row_bytes=nbytes,
            )
            for name, (grid, reads, writes, nbytes) in described.items()
        }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class UnionWork(IntervalWork):
    """Work with a block list per query, intersected with row intervals.

    A tile of neighboring queries visits all blocks in the lists of these queries. Its rows are ordered by query, then
    by the heads that share the list. `unions` are on the host, or None if they are computed at each call.
    """

    tiling: UnionTiling
    unions: Unions | None = None

    @property
    def lists(self) -> dict[str, Array]:
        return super().lists | self._of_unions

    @cached_property
    def _of_unions(self) -> dict[str, Array]:
        if self.unions is None:
            return {}
        pointers, numbers, words = self.unions
        ranges = np.stack([pointers[:-1], pointers[1:]], axis=1).astype(np.int32)
        words = words.astype("<u8").view("<u4").reshape(-1, 2)[:, : self.tiling.words_per_entry]
        return {"ranges": ranges, "kv_blocks": numbers.astype(np.int32), "words": np.ascontiguousarray(words)}

    @property
    def feature(self) -> Feature:
        """The feature of kernels that walk unions, and of kernels that list the queries of each block."""
        tables = ("ranges", "words", *_COLUMNS, *_PARTS)
        return Feature(NAME, CHOSEN_LISTS, self.tiling.values, tables)

    def row(self, b: int, h: int, start: int, stop: int) -> list[Segment]:
        tiling, unions = self.tiling, self.unions
        assert unions is not None, "unions are computed at each call"
        matrix = (b if tiling.batch > 1 else 0) * tiling.num_lists + h * tiling.num_lists // tiling.shape.num_heads
        numbers, _ = unions.tile(matrix * tiling.num_tiles + start // tiling.queries_per_tile)
        ends = (min((number + 1) * tiling.block, tiling.shape.seqlen_kv) for number in numbers.tolist())
        return [Segment(n * tiling.block, end, BlockKind.INTERVAL) for n, end in zip(numbers.tolist(), ends)]


def _rows(tiling: UnionTiling, band: Band | None, lo: Array | None, hi: Array | None) -> dict[str, Any]:
    """Return the fields of an `IntervalWork` with these row intervals and the tiles of `tiling`."""
    return {
        "seqlen_q": tiling.shape.seqlen_q, "seqlen_kv": tiling.shape.seqlen_kv, "block_q": tiling.queries_per_tile,
        "block_kv": tiling.block, "band": band, "lo": lo, "hi": hi,
    }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class UnionSource(SourceOfResults):
    """The inputs of the kernels that compute unions: lists that each call passes, and row intervals.

    Attributes
    ----------
    tiling : UnionTiling
    lists : QueryLists
    rows : IntervalWork or None
        Row intervals of the host. Blocks in which a query attends no key are dropped from its list.
    intervals : IntervalSource or None
        The source of row intervals that a kernel computes from arrays of each call; it has `rows`.
    """

    tiling: UnionTiling
    lists: QueryLists
    rows: IntervalWork | None
    intervals: IntervalSource | None

    @cached_property
    def results(self) -> Mapping[str, Workspace]:
        tiling = self.tiling
        tiles = tiling.num_list_heads * tiling.num_tiles
        entries = tiles * tiling.max_entries
        shapes: dict[str, tuple[int, ...]] = {
            "ranges": (tiles, 2), "kv_blocks": (entries,), "words": (entries, tiling.words_per_entry)
        }
        dtypes = {"words": np.dtype(np.uint32)}
        results = {name: Workspace(shape, dtypes.get(name, np.dtype(np.int32))) for name, shape in shapes.items()}
        return results if self.intervals is None else {**self.intervals.results, **results}

    @property
    def attended(self) -> IntervalWork:
        """The row intervals; those that a kernel computes have only shapes and dtypes."""
        if self.intervals is not None:
            return IntervalsAtCall.of(self.intervals, (1, 1))
        assert self.rows is not None
        return self.rows

    @property
    def array_names(self) -> tuple[str, ...]:
        """Fields of the records for the arrays that each call passes."""
        names = self.lists.array_names
        return names if self.intervals is None else (*names, *self.intervals.array_names)

    @cached_property
    def kernels(self) -> Pass:
        """The launches; they take the arrays of `array_names`, and the array of bytes that holds all results."""
        starts = self.lists.starts
        feature = Feature(
            "lists", CHOSEN_PARAMS, self._numbers(), ("blocks", "counts", *_INTERVALS, AT_CALL),
            starts=self.offsets | starts, names=dict.fromkeys(starts, "blocks") | dict.fromkeys(self.offsets, AT_CALL),
        )  # fmt: skip
        tiling = self.tiling
        launch = list_launch(UNIONS, tiling.num_list_heads * tiling.num_tiles, self.array_names)
        words = tiling.words_per_entry
        launches = {"unions": replace(launch, row_bytes=4 * words * tiling.blocks_at_once(words))}
        if self.intervals is None:
            return Pass(launches, features=(feature,))
        first = self.intervals.kernels  # its results have the same offsets here
        renamed = {name: replace(each, features=("intervals",)) for name, each in first.launches.items()}
        return Pass(renamed | launches, features=(replace(first.features[0], name="intervals"), feature))

    def _numbers(self) -> dict[str, Value]:
        """Return the numbers of the kernel's record."""
        tiling, shape = self.tiling, self.tiling.shape
        band = None if self.rows is None else self.rows.band
        lower, upper = (None, None) if band is None else (band.lower, band.upper)
        return self.lists.numbers | {
            "batch": over_batch(shape.batch if tiling.batch > 1 else (), 1),
            "seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv,
            "lower": -UNLIMITED if lower is None else lower, "upper": UNLIMITED if upper is None else upper,
            "rows_batch_stride": 0 if self.intervals is None else leading_strides(self.attended.lo)[0],
            "num_blocks": tiling.num_blocks, "queries_per_tile": tiling.queries_per_tile,
            "num_tiles": tiling.num_tiles, "words_per_entry": tiling.words_per_entry,
            "max_entries": tiling.max_entries, "blocks_at_once": tiling.blocks_at_once(tiling.words_per_entry),
        }  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class UnionsAtCall(UnionWork):
    """Work whose unions are computed at each call, into one array of bytes that attention kernels take as `AT_CALL`."""

    source: UnionSource
    memory: Array | None = None

    @classmethod
    def of(cls, source: UnionSource) -> UnionsAtCall:
        rows = source.attended
        return cls(**_rows(source.tiling, rows.band, rows.lo, rows.hi), tiling=source.tiling, source=source)

    @property
    def carried(self) -> Any:
        """The source of the lists of a block index, which calls pass instead of arrays of a mask; otherwise None."""
        return self.source.lists.carried

    @property
    def lists(self) -> dict[str, Array]:
        return super().lists if self.source.intervals is None else {}

    @property
    def offsets(self) -> Mapping[str, int]:
        """The offset in bytes of each result that is a field of PARAMS."""
        return {name: start for name, start in self.source.offsets.items() if name in ("kv_blocks", *_INTERVALS)}

    @property
    def feature(self) -> Feature:
        starts = {name: self.source.offsets[name] for name in ("ranges", "words")}
        return replace(
            super().feature, tables=(*_COLUMNS, *_PARTS, AT_CALL), starts=starts, names=dict.fromkeys(starts, AT_CALL)
        )

    def with_results(self, results: Array) -> UnionsAtCall:
        """Return this work with the array of bytes that a call has filled."""
        intervals = self.source.views(results, () if self.source.intervals is None else _INTERVALS)
        return replace(self, memory=results, **intervals)

    @cached_property
    def on_host(self) -> UnionWork:
        """The work with a host copy of the unions that a call has computed; the copy synchronizes with the device."""
        if self.memory is None:
            return self
        tiling, views = self.tiling, {name: to_host(each) for name, each in self.source.views(self.memory).items()}
        first, last = views["ranges"].T.astype(np.int64)
        counts = last - first
        pointers = np.concatenate([[0], np.cumsum(counts)])
        entries = np.repeat(first - pointers[:-1], counts) + np.arange(pointers[-1])
        words = np.zeros((len(entries), 2), "<u4")
        words[:, : tiling.words_per_entry] = views["words"][entries]
        unions = Unions(pointers, views["kv_blocks"][entries].astype(np.int64), words.view("<u8")[:, 0])
        rows = _rows(tiling, self.band, views.get("lo", self.lo), views.get("hi", self.hi))
        return UnionWork(**rows, tiling=tiling, unions=unions)


def union_work(mask: Mask, problem: Problem) -> UnionWork | None:
    """Return the work of a resolved mask with block lists per query and possibly row intervals; otherwise None.

    The unions of an `AtEachCall` are computed at each call.
    """
    shape = problem.mask_shape
    mask, is_at_each_call = without_at_each_call(mask)
    if not are_served(shape):
        return None
    work = _work_at_call(mask, problem) if is_at_each_call else _work_on_host(mask, problem)
    return work if work is not None and work.tiling.can_be_numbered else None


def _is_served(block: int) -> bool:
    return block in _NARROW_BLOCKS or block % _STEP == 0


def _work_at_call(mask: Mask, problem: Problem) -> UnionsAtCall | None:
    factors, shape = mask.operands if type(mask) is And else (mask,), problem.mask_shape
    listed = [factor for factor in factors if isinstance(factor, (ResolvedChosen, IndexMask))]
    others = tuple(factor for factor in factors if not isinstance(factor, (ResolvedChosen, IndexMask)))
    lists = QueryLists.of(listed[0], shape) if len(listed) == 1 else None
    if lists is None or not _is_served(lists.block) or not all(each._has_intervals for each in others):
        return None
    batch, intervals = shape.num_batch if lists.varies else 1, None
    if any(True for each in others for _ in held_arrays(each)):
        intervals = IntervalSource.of(intersection(others), shape, None)
        if intervals is None or intervals.num_heads > 1:
            return None
        batch, rows = max(batch, intervals.batch), intervals.rows
    elif (rows := _closed_rows(others, shape, lists)) is None:
        return None
    tiling = UnionTiling(
        shape=shape, batch=batch, num_lists=lists.num_lists, num_chosen=lists.num_chosen, block=lists.block,
        group_size=problem.group_size,
    )  # fmt: skip
    return UnionsAtCall.of(UnionSource(tiling=tiling, lists=lists, rows=rows, intervals=intervals))


def _work_on_host(mask: Mask, problem: Problem) -> UnionWork | None:
    shape = problem.mask_shape
    work = chosen_work(mask, shape) if all(namespace(array) is np for array in held_arrays(mask)) else None
    if work is None or not _is_served(work.block):
        return None
    index = work.index
    tiling = UnionTiling(
        shape=shape, batch=index.batch, num_lists=index.num_heads, block=work.block,
        num_chosen=int(np.diff(index.indptr).max(initial=0)), group_size=problem.group_size,
    )  # fmt: skip
    if index.lo is not None and index.lo.shape[1] > 1 and tiling.heads_per_tile > 1:
        return None
    band = Band(None, None) if index.lo is None else None
    members = *np.divmod(index._block_rows, index.seqlen_q), index.indices
    over = tiling.num_list_heads, shape.seqlen_q, tiling.num_blocks
    unions = Unions.of(*members, tiling.queries_per_tile, over)
    return UnionWork(**_rows(tiling, band, index.lo, index.hi), tiling=tiling, unions=unions)


def _closed_rows(closed: tuple[Mask, ...], shape: MaskShape, lists: QueryLists) -> IntervalWork | None:
    """Return the intersection of row intervals without arrays, or None if it varies with the batch entry or head.

    It includes the row intervals of a block index.
    """
    if lists.carried is not None and lists.carried.rows is not None:
        own: IntervalWork = lists.carried.rows_within(closed)
        return own if own.lo is not None and own.lo.shape[:2] == (1, 1) else None
    joined = intersection(closed)
    if type(joined) is Band:
        return IntervalWork(seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv, block_q=1, block_kv=1, band=joined)
    return rows_of(closed, shape, (1, 1)) if extents(And(closed), shape) == (1, 1) else None
