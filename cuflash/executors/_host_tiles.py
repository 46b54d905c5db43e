"""Tiles of the `cpu` executor: the rows that each tile visits in each step, and batches of tiles of equal shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from ..arrays import Array
from ..blocks._chosen_work import ChosenWork
from ..blocks._gathered_rows import GatheredRows
from ..blocks.classify import BlockKind
from ..blocks.work_list import ListedWork, Segment, WorkList
from ..planning.host import HostTiling
from ..planning.plan import KernelPlan

_MOST_KEPT_TILES = 4096  # maximum number of tiles that are kept, with a few hundred bytes each
BatchHead: TypeAlias = tuple[int, int]  # batch entry, head


class PartialSegment:
    """A segment that needs a mask, the slice of its rows within a step, and its intervals once they are computed.

    The intervals are (lo, hi) of each query of the tile. Gathered rows have no intervals.
    """

    __slots__ = ("bounds", "rows", "segment")

    def __init__(self, segment: Segment | GatheredRows, rows: slice) -> None:
        self.segment, self.rows = segment, rows
        self.bounds: tuple[Array, Array] | None = None


class Step(NamedTuple):
    """Rows that a tile visits at once: index, number, segments that need a mask, and the number after the last row."""

    rows: slice | Array
    num_rows: int
    partial: list[PartialSegment]
    stop: int


class VisitedRows(NamedTuple):
    """All rows of one matrix that a tile visits, ascending, in steps that fit into a tile of scores."""

    steps: list[Step]
    num_rows: int

    @classmethod
    def of(cls, visits: Sequence[Segment | GatheredRows], width: int) -> VisitedRows:
        gathered = (part for each in visits if isinstance(each, GatheredRows) for part in each.parts(width))
        segments = [each for each in visits if isinstance(each, Segment)]
        steps = [*map(_gathered_step, gathered), *map(_step, _groups(segments, width))]
        return cls(steps, sum(step.num_rows for step in steps))


class Tile(NamedTuple):
    """Queries of a head, or keys of a key/value head, and the rows that they visit.

    A tile of keys has one visit for each query head of its group.
    """

    b: int
    h: int
    rows: slice
    visits: tuple[VisitedRows, ...]


class KeptTiles:
    """Batches of a plan's tiles. The first call creates them, and later calls reuse them unless there are too many.

    Tiles with gathered rows are created at each call: they hold row numbers, which take more memory.

    Attributes
    ----------
    tiling : HostTiling
        The plan's tiling.

    Parameters
    ----------
    plan : KernelPlan
        A plan of the cpu executor.
    step_tiles : int
        Number of tiles of scores that the scores of a step may fill.
    """

    def __init__(self, plan: KernelPlan, step_tiles: int = 1) -> None:
        assert plan.tiling is not None
        self.plan, self.tiling, self._step_tiles = plan, plan.tiling, step_tiles
        self._kept: dict[str, list[list[Tile]]] = {}

    def of_rows(self) -> Iterator[list[Tile]]:
        """Yield batches of query tiles, last tile first, since the last tiles are the longest under a causal mask."""
        return self._batches("rows", self._row_tiles)

    def of_columns(self) -> Iterator[list[Tile]]:
        """Yield batches of key tiles."""
        return self._batches("columns", self._column_tiles)

    def _batches(self, side: str, tiles: Callable[[], Iterator[Tile]]) -> Iterator[list[Tile]]:
        if side not in self._kept:
            if self.tiling.num_tiles > _MOST_KEPT_TILES or isinstance(self.plan.work, ChosenWork):
                return _batches(self.tiling, tiles())
            self._kept[side] = list(_batches(self.tiling, tiles()))
        return iter(self._kept[side])

    def _row_tiles(self) -> Iterator[Tile]:
        problem, work = self.plan.problem, self.plan.work
        for rows in _reversed_tiles(problem.seqlen_q, work.block_q):
            visits_of: dict[BatchHead, VisitedRows] = {}
            for b, h in product(range(prod(problem.batch)), range(problem.num_heads)):
                yield Tile(b, h, rows, (self._visit(visits_of, work.row, (b, h), rows),))

    def _column_tiles(self) -> Iterator[Tile]:
        problem, work = self.plan.problem, self.plan.work
        block, group_size = work.block_kv if isinstance(work, ListedWork) else work.block_q, problem.group_size
        for rows in _reversed_tiles(problem.seqlen_kv, block):
            visits_of: dict[BatchHead, VisitedRows] = {}
            for b, kv_head in product(range(prod(problem.batch)), range(problem.num_kv_heads)):
                heads = range(kv_head * group_size, (kv_head + 1) * group_size)
                yield Tile(b, kv_head, rows, tuple(self._visit(visits_of, work.column, (b, h), rows) for h in heads))

    def _visit(
        self, visits_of: dict[BatchHead, VisitedRows], visited: Callable[..., Sequence[Segment | GatheredRows]],
        batch_head: BatchHead, rows: slice
    ) -> VisitedRows:  # fmt: skip
        """Return the rows that a tile of a head visits, computed once for all heads that share them."""
        shared = self.plan.work.owner(*batch_head)
        if shared not in visits_of:
            width = self.tiling.step_width(rows.stop - rows.start, self._step_tiles)
            visits_of[shared] = VisitedRows.of(visited(*shared, rows.start, rows.stop), width)
        return visits_of[shared]


def steps_side_by_side(tiles: list[Tile], head: int = 0) -> Iterator[tuple[Step, ...]]:
    """Return an iterator over tuples with one step of each tile of a batch."""
    return zip(*(tile.visits[head].steps for tile in tiles))


def _step(segments: list[Segment]) -> Step:
    partial, count = [], 0
    for segment in segments:
        first, count = count, count + segment.stop - segment.start
        if segment.kind != BlockKind.FULL:
            partial.append(PartialSegment(segment, slice(first, count)))
    start, stop = segments[0].start, segments[-1].stop
    if stop - start == count:  # the segments are contiguous
        return Step(slice(start, stop), count, partial, stop)
    rows = np.concatenate([np.arange(segment.start, segment.stop) for segment in segments])
    return Step(rows, count, partial, stop)


def _gathered_step(part: GatheredRows) -> Step:
    start, stop, count = int(part.rows[0]), int(part.rows[-1]) + 1, part.num_rows
    rows = slice(start, stop) if stop - start == count else part.rows
    return Step(rows, count, [PartialSegment(part, slice(0, count))] if part.is_partial else [], stop)


def row_numbers(rows: slice | Array) -> Array:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _reversed_tiles(length: int, block: int) -> Iterator[slice]:
    """Return an iterator over the tiles of an axis, last tile first."""
    return (slice(start, min(start + block, length)) for start in reversed(range(0, length, block)))


def _batches(tiling: HostTiling, tiles: Iterable[Tile]) -> Iterator[list[Tile]]:
    """Yield groups of tiles of equal height and equal numbers of visited rows, with at most `HostTiling.batch_area`.

    The overhead of a NumPy call, and of passing the interpreter lock between threads, is paid once per batch.
    A batch has at most a quarter of all tiles, so that several threads have work. The number of threads has no
    influence, because results must not depend on it.
    """
    capacity, max_tiles = tiling.batch_area, tiling.num_tiles if tiling.is_small else max(1, tiling.num_tiles // 4)
    waiting: dict[tuple[int, ...], list[Tile]] = {}
    for tile in tiles:
        visited = tuple(visit.num_rows for visit in tile.visits)
        height, widest = tile.rows.stop - tile.rows.start, max(visited)
        limit = min(capacity // (height * max(widest, 1)), max_tiles) if widest <= tiling.step_width(height) else 1
        key = height, *visited
        group = waiting.setdefault(key, [])
        group.append(tile)
        if len(group) >= limit:
            yield waiting.pop(key)
    yield from waiting.values()


def _groups(segments: list[Segment], limit: int) -> Iterator[list[Segment]]:
    """Yield groups of segments with at most `limit` rows each; bit tiles stay whole, longer runs are cut."""
    group: list[Segment] = []
    remaining = limit
    for segment in segments:
        while segment.stop - segment.start > remaining:
            if segment.kind != BlockKind.BITS and remaining == limit:
                yield [segment._replace(stop=segment.start + remaining)]
                segment = segment._replace(start=segment.start + remaining)
            elif group:
                yield group
                group, remaining = [], limit
            else:
                break
        group.append(segment)
        remaining -= segment.stop - segment.start
    if group:
        yield group


def masked_elements(
    work: WorkList, batch_head: BatchHead, part: PartialSegment, rows: slice | None, keys: slice | None
) -> Array:
    """Return which elements of a tile and a partial segment are masked, bool [keys, queries].

    Pass the tile's own side (queries or keys) as a slice, and None for the side that the segment covers.
    """
    if isinstance(part.segment, GatheredRows):
        assert isinstance(work, ChosenWork)
        return work.hidden(batch_head, part.segment, rows, keys)
    visited = slice(part.segment.start, part.segment.stop)
    rows, keys = rows or visited, keys or visited
    if part.segment.kind == BlockKind.BITS:
        assert isinstance(work, ListedWork)
        first_row, first_key = rows.start % work.block_q, keys.start % work.block_kv
        tile = work.bit_tile(part.segment.tile)
        tile = tile[first_row : first_row + rows.stop - rows.start, first_key : first_key + keys.stop - keys.start]
        return ~tile.T
    if part.bounds is None:
        part.bounds = work.bounds(*batch_head, rows.start, rows.stop)
    # Narrow integers are compared several at a time, and under most masks only one end of the intervals matters.
    count = keys.stop - keys.start
    narrow = np.int16 if count < 2**15 else np.int64
    lo, hi = np.maximum(np.minimum(np.subtract(part.bounds, keys.start), count), 0).astype(narrow)
    j = np.arange(count, dtype=narrow)[:, None]
    masked: Array = j >= hi
    if lo.any():
        masked |= j < lo
    return masked
