"""The `cpu` executor: FlashAttention's tiled algorithm in NumPy and BLAS over a plan's work list.

A tile of queries walks its keys with a running row maximum and row sum (FlashAttention-2, arXiv 2307.08691,
algorithm 1); the backward pass recomputes P tile by tile, once by rows for dQ and once by columns for dK and dV
(algorithm 2 split in two), so that no sum depends on the order in which threads finish.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from threadpoolctl import ThreadpoolController

from .arrays import Array
from .classify import Kind
from .plans import Plan
from .work_list import ListedWork, Segment, WorkList

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def forward(plan: Plan, q: Array, k: Array, v: Array, o: Array, lse: Array) -> None:
    """Write o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q]."""
    call = _Call.of(plan, q=q, k=k, v=v, o=o, lse=lse)
    _run(plan, call.forward_rows, call.row_tiles())


def backward(
    plan: Plan,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Write dq [*batch, heads, ...], dk and dv [*batch, kv_heads, ...], over the broadcast leading axes."""
    delta = np.empty(lse.shape, plan.problem.accumulator)
    call = _Call.of(plan, q=q, k=k, v=v, o=o, lse=lse, do=do, dlse=dlse, delta=delta, dq=dq, dk=dk, dv=dv)
    _run(plan, call.backward_rows, call.row_tiles())
    _run(plan, call.backward_columns, call.column_tiles())


class _Tile(NamedTuple):
    """Queries start <= i < stop of a head, or keys of a key/value head, and the segments that they visit.

    A tile of keys visits the queries of each head of its group, one list a head.
    """

    b: int
    h: int
    start: int
    stop: int
    visits: tuple[list[Segment], ...]


_Place: TypeAlias = tuple[int, int]  # batch entry, head


@dataclass(frozen=True, eq=False)
class _Call:
    """The arrays of one call, their leading axes broadcast, and what a batch of its tiles does.

    The tiles of a batch visit equally many rows: their arrays are stacked along a first axis.
    """

    plan: Plan
    arrays: dict[str, Array]
    places: tuple[tuple[int, ...], ...]  # indices into the leading axes, by flat batch index
    wide: Any  # the accumulator's scalar type
    group_size: int

    @classmethod
    def of(cls, plan: Plan, **arrays: Array | None) -> _Call:
        problem, batch = plan.problem, plan.problem.batch
        broadcast = {}
        for name, array in arrays.items():
            if array is not None:
                rank = 1 + problem.has_heads + (name not in ("lse", "dlse", "delta"))
                full = (*batch, *array.shape[array.ndim - rank :])
                view = array if array.shape == full else np.broadcast_to(array, full)
                broadcast[name] = view if problem.has_heads else view[None]
        return cls(plan, broadcast, tuple(np.ndindex(batch)), problem.accumulator.type, problem.group_size)

    def row_tiles(self) -> Iterator[_Tile]:
        """Tiles of queries, last first: under a causal mask those are the longest."""
        problem, work = self.plan.problem, self.plan.work
        for start, stop in _cuts(problem.seqlen_q, work.block_q):
            for b, h in np.ndindex(problem.mask_shape.num_batch, problem.num_heads):
                yield _Tile(b, h, start, stop, (work.row(b, h, start, stop),))

    def column_tiles(self) -> Iterator[_Tile]:
        """Tiles of keys."""
        problem, work = self.plan.problem, self.plan.work
        block = work.block_kv if isinstance(work, ListedWork) else work.block_q
        for start, stop in _cuts(problem.seqlen_kv, block):
            for b, kv_head in np.ndindex(problem.mask_shape.num_batch, problem.num_kv_heads):
                heads = range(kv_head * self.group_size, (kv_head + 1) * self.group_size)
                yield _Tile(b, kv_head, start, stop, tuple(work.column(b, h, start, stop) for h in heads))

    def at(self, name: str, place: _Place) -> Array:
        """One matrix (or one row vector) of an array."""
        return self.arrays[name][(*self.places[place[0]], place[1])]

    def gather(self, name: str, places: list[_Place], visits: Sequence[list[Segment]]) -> Array:
        """Rows [tiles, rows, dim] of some segments, widened to the accumulator's dtype; a view where one run is all."""
        matrices = [self.at(name, place) for place in places]
        runs = [matrix[start:stop] for matrix, segments in zip(matrices, visits) for start, stop in _runs(segments)]
        rows = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return rows.astype(self.wide, copy=False).reshape(len(places), -1, *rows.shape[1:])

    def scaled_queries(self, places: list[_Place], visits: Sequence[list[Segment]]) -> Array:
        """Queries times softmax_scale log2(e): exp2 of their products with keys is the exp of the scores."""
        return self.gather("q", places, visits) * self.wide(self.plan.problem.softmax_scale * LOG2_E)

    def steps(self, tiles: list[_Tile], head: int = 0) -> Iterator[tuple[list[Segment], ...]]:
        """What the tiles visit, in steps of as many rows as a tile of scores has room for."""
        width = self.plan.step_width(tiles[0].stop - tiles[0].start)
        return zip(*(_groups(tile.visits[head], width) for tile in tiles))

    def forward_rows(self, tiles: list[_Tile]) -> None:
        """Tiles of queries through all of their keys: online softmax, then o and lse."""
        wide, places, kv_places, rows = self.wide, *self._rows_of(tiles)
        shape = len(tiles), tiles[0].stop - tiles[0].start
        row_max, row_sum = np.full(shape, -np.inf, wide), np.zeros(shape, wide)
        o_acc: Array | None = None
        q = self.scaled_queries(places, rows)
        for keys in self.steps(tiles):
            s = q @ self.gather("k", kv_places, keys).swapaxes(-1, -2)
            self._mask_keys(tiles, keys, s)
            new_max = np.maximum(row_max, s.max(axis=-1))
            shift = np.where(new_max == -np.inf, wide(0), new_max)  # -inf - (-inf) must not arise
            s -= shift[..., None]
            p = np.exp2(s, out=s)
            p_sum, p_v = p @ np.ones(p.shape[-1], wide), p @ self.gather("v", kv_places, keys)
            if o_acc is None:
                row_sum, o_acc = p_sum, p_v
            else:
                rescale = np.exp2(row_max - shift)
                row_sum, o_acc = row_sum * rescale + p_sum, o_acc * rescale[..., None] + p_v
            row_max = new_max
        empty = row_sum == 0
        divisor = np.where(empty, wide(1), row_sum)
        self._write("o", places, rows, np.zeros(shape)[..., None] if o_acc is None else o_acc / divisor[..., None])
        self._write("lse", places, rows, np.where(empty, -np.inf, row_max * wide(LN_2) + np.log(divisor)))

    def backward_rows(self, tiles: list[_Tile]) -> None:
        """delta = rowsum(dO * O) - dlse of tiles of queries, and their dQ."""
        places, kv_places, rows = self._rows_of(tiles)
        do, lse = self._gradient_rows(places, rows), self.gather("lse", places, rows)
        delta = np.sum(do * self.gather("o", places, rows), axis=-1)
        if "dlse" in self.arrays:
            delta -= np.where(lse == -np.inf, 0, self.gather("dlse", places, rows))
        self._write("delta", places, rows, delta)
        q = self.scaled_queries(places, rows)
        dq: Array = self.wide(0)
        for keys in self.steps(tiles):
            k = self.gather("k", kv_places, keys)
            s, dp = q @ k.swapaxes(-1, -2), do @ self.gather("v", kv_places, keys).swapaxes(-1, -2)
            self._mask_keys(tiles, keys, s, dp)
            _, ds = self._score_gradient(lse, delta, s, dp)
            dq = dq + ds @ k
        self._write("dq", places, rows, np.broadcast_to(dq * self.wide(self.plan.problem.softmax_scale), q.shape))

    def backward_columns(self, tiles: list[_Tile]) -> None:
        """dK and dV of tiles of keys, summed over the query heads that share them."""
        here = [[Segment(tile.start, tile.stop, Kind.FULL)] for tile in tiles]
        kv_places = [(tile.b, tile.h) for tile in tiles]
        k, v = self.gather("k", kv_places, here), self.gather("v", kv_places, here)
        dk, dv = np.zeros(k.shape, self.wide), np.zeros(v.shape, self.wide)
        for head in range(self.group_size):
            places = [(tile.b, tile.h * self.group_size + head) for tile in tiles]
            for rows in self.steps(tiles, head):
                q, do = self.scaled_queries(places, rows), self._gradient_rows(places, rows)
                s, dp = q @ k.swapaxes(-1, -2), do @ v.swapaxes(-1, -2)
                self._mask_queries(tiles, places, rows, s, dp)
                lse, delta = self.gather("lse", places, rows), self.gather("delta", places, rows)
                p, ds = self._score_gradient(lse, delta, s, dp)
                dv += p.swapaxes(-1, -2) @ do
                dk += ds.swapaxes(-1, -2) @ q
        # q carries softmax_scale log2(e); dK wants softmax_scale.
        self._write("dk", kv_places, here, dk * self.wide(LN_2))
        self._write("dv", kv_places, here, dv)

    def _rows_of(self, tiles: list[_Tile]) -> tuple[list[_Place], list[_Place], list[list[Segment]]]:
        """Where tiles of queries lie: their heads, the key/value heads they read, and their own rows."""
        places = [(tile.b, tile.h) for tile in tiles]
        kv_places = [(tile.b, tile.h // self.group_size) for tile in tiles]
        return places, kv_places, [[Segment(tile.start, tile.stop, Kind.FULL)] for tile in tiles]

    def _write(self, name: str, places: list[_Place], rows: list[list[Segment]], values: Array) -> None:
        for place, (segment,), value in zip(places, rows, values):
            self.at(name, place)[segment.start : segment.stop] = value

    def _gradient_rows(self, places: list[_Place], rows: Sequence[list[Segment]]) -> Array:
        """dO of some rows; 0 for rows without a key, whose gradients are 0 whatever came."""
        do, lse = self.gather("do", places, rows), self.gather("lse", places, rows)
        empty = lse == -np.inf
        return np.where(empty[..., None], self.wide(0), do) if empty.any() else do

    def _score_gradient(self, lse: Array, delta: Array, s: Array, dp: Array) -> tuple[Array, Array]:
        """P and dS / softmax_scale from scores (base 2, masked) and dP, in the memory of both."""
        # An empty row has nothing but scores of -inf; +inf in place of its lse keeps them there.
        s -= np.where(lse == -np.inf, np.inf, lse * self.wide(LOG2_E))[..., None]
        p = np.exp2(s, out=s)
        np.minimum(p, 1, out=p)  # at logits of 1e6 and more the rounding of lse alone would lift P above 1
        dp -= delta[..., None]
        dp *= p
        return p, dp

    def _mask_keys(
        self, tiles: list[_Tile], keys: tuple[list[Segment], ...], s: Array, dp: Array | None = None
    ) -> None:
        """Set the scores of masked keys to -inf, and their dP to 0."""
        for place, (tile, segments) in enumerate(zip(tiles, keys)):
            column = 0
            for segment in segments:
                here = slice(column, column + segment.stop - segment.start)
                if segment.kind != Kind.FULL:
                    rows, run = (tile.start, tile.stop), (segment.start, segment.stop)
                    outside = _outside(self.plan.work, (tile.b, tile.h), segment, rows, run)
                    _mask(s[place, :, here], None if dp is None else dp[place, :, here], outside)
                column = here.stop

    def _mask_queries(
        self, tiles: list[_Tile], places: list[_Place], rows: tuple[list[Segment], ...], s: Array, dp: Array
    ) -> None:
        """Set the scores of masked queries to -inf, and their dP to 0."""
        for place, (tile, where, segments) in enumerate(zip(tiles, places, rows)):
            row = 0
            for segment in segments:
                here = slice(row, row + segment.stop - segment.start)
                if segment.kind != Kind.FULL:
                    run, keys = (segment.start, segment.stop), (tile.start, tile.stop)
                    _mask(s[place, here], dp[place, here], _outside(self.plan.work, where, segment, run, keys))
                row = here.stop


def _runs(segments: list[Segment]) -> list[tuple[int, int]]:
    """Segments as few runs of rows: one where they follow each other without a gap."""
    start, stop = segments[0].start, segments[-1].stop
    if stop - start == sum(segment.stop - segment.start for segment in segments):
        return [(start, stop)]
    return [(segment.start, segment.stop) for segment in segments]


def _cuts(length: int, block: int) -> Iterator[tuple[int, int]]:
    """Tiles of a length, the last first."""
    return ((start, min(start + block, length)) for start in reversed(range(0, length, block)))


def _batches(plan: Plan, tiles: Iterable[_Tile]) -> Iterator[list[_Tile]]:
    """Tiles of one height that visit equally many rows, as many together as fill a tile of scores.

    NumPy's price for a call, and the threads' for handing the interpreter to each other, are paid once a batch.
    A quarter of all tiles is the most, so that there is something to share; threads are not counted, since results
    may not depend on them.
    """
    room, most = plan.tile.block_q * plan.tile.block_kv, max(1, plan.num_tiles // 4)
    waiting: dict[tuple[int, ...], list[_Tile]] = {}
    for tile in tiles:
        visited = tuple(sum(segment.stop - segment.start for segment in segments) for segments in tile.visits)
        height, widest = tile.stop - tile.start, max(visited)
        limit = min(room // (height * max(widest, 1)), most) if widest <= plan.step_width(height) else 1
        group = waiting.setdefault((height, *visited), [])
        group.append(tile)
        if len(group) >= limit:
            yield waiting.pop((height, *visited))
    yield from waiting.values()


def _groups(segments: list[Segment], limit: int) -> Iterator[list[Segment]]:
    """Segments in steps of at most `limit` rows; bit tiles stay whole, longer runs are cut."""
    group: list[Segment] = []
    room = limit
    for segment in segments:
        while segment.stop - segment.start > room:
            if segment.kind != Kind.BITS and room == limit:
                yield [segment._replace(stop=segment.start + room)]
                segment = segment._replace(start=segment.start + room)
            elif group:
                yield group
                group, room = [], limit
            else:
                break
        group.append(segment)
        room -= segment.stop - segment.start
    if group:
        yield group


def _mask(s: Array, dp: Array | None, outside: Array) -> None:
    np.copyto(s, -np.inf, where=outside)
    if dp is not None:
        np.copyto(dp, 0, where=outside)  # P is 0 there, and 0 times what a masked value holds may not be


def _outside(work: WorkList, place: _Place, segment: Segment, rows: tuple[int, int], keys: tuple[int, int]) -> Array:
    """Which elements of a partial segment are masked, bool [rows, keys]."""
    if segment.kind == Kind.BITS:
        assert isinstance(work, ListedWork)
        first_row, first_key = rows[0] % work.block_q, keys[0] % work.block_kv
        tile = work.bit_tile(segment.tile)
        return ~tile[first_row : first_row + rows[1] - rows[0], first_key : first_key + keys[1] - keys[0]]
    lo, hi = work.bounds(*place, *rows)
    j = np.arange(*keys)
    return (j < lo[:, None]) | (j >= hi[:, None])


# Threads


_blas = threading.Lock()
_blas_users = 0
_blas_limits: Any = None


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@contextmanager
def _one_thread_blas() -> Iterator[None]:
    """BLAS on one thread while any call runs its tiles on threads of its own; the last one out restores it.

    The setting belongs to the process, so it is counted: two calls from two threads must not restore each other's.
    """
    global _blas_users, _blas_limits
    with _blas:
        if _blas_users == 0:
            _blas_limits = _controller().limit(limits=1, user_api="blas")
        _blas_users += 1
    try:
        yield
    finally:
        with _blas:
            _blas_users -= 1
            if _blas_users == 0:
                _blas_limits.restore_original_limits()


def _run(plan: Plan, step: Callable[[list[_Tile]], None], tiles: Iterable[_Tile]) -> None:
    """Every tile once, on the plan's number of threads. Tiles write to places of their own."""
    batches = _batches(plan, tiles)
    lock = threading.Lock()
    stop = threading.Event()

    def drain() -> None:
        with np.errstate(all="ignore"):
            while not stop.is_set():
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    return
                step(batch)

    if plan.num_workers == 1:
        drain()
        return
    with _one_thread_blas(), ThreadPoolExecutor(plan.num_workers - 1) as pool:
        try:
            others = [pool.submit(drain) for _ in range(plan.num_workers - 1)]
            drain()
            for other in others:
                other.result()
        finally:
            stop.set()  # after an error or an interrupt the other threads stop at their next batch
