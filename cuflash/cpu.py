"""The `cpu` executor: FlashAttention's tiled algorithm in NumPy and BLAS over a plan's work list.

A tile of queries walks its keys with a running row maximum and row sum (FlashAttention-2, arXiv 2307.08691,
algorithm 1); the backward pass recomputes P tile by tile, once by rows for dQ and once by columns for dK and dV
(algorithm 2 split in two), so that no sum depends on the order in which threads finish.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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


class _TileAt(NamedTuple):
    """A tile of rows (or of columns) start <= x < stop of head h in batch entry b."""

    b: int
    h: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class _Call:
    """The arrays of one call, their leading axes broadcast, and what every tile of it does."""

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

    def at(self, name: str, b: int, h: int) -> Array:
        """One matrix (or one row vector) of an array."""
        return self.arrays[name][(*self.places[b], h)]

    def row_tiles(self) -> Iterator[_TileAt]:
        """Tiles of queries, last first: under a causal mask those are the longest."""
        problem = self.plan.problem
        return _tiles(problem.mask_shape.num_batch, problem.num_heads, problem.seqlen_q, self.plan.work.block_q)

    def column_tiles(self) -> Iterator[_TileAt]:
        """Tiles of keys of each key/value head."""
        problem, work = self.plan.problem, self.plan.work
        block = work.block_kv if isinstance(work, ListedWork) else work.block_q
        return _tiles(problem.mask_shape.num_batch, problem.num_kv_heads, problem.seqlen_kv, block)

    def scaled_queries(self, b: int, h: int, segments: list[Segment]) -> Array:
        """Queries times softmax_scale log2(e), widened: exp2 of their products with keys is the exp of the scores."""
        return self.gather("q", b, h, segments) * self.wide(self.plan.problem.softmax_scale * LOG2_E)

    def gather(self, name: str, b: int, h: int, segments: list[Segment]) -> Array:
        """The rows of some segments, widened to the accumulator's dtype; a view where they are one run already."""
        matrix = self.at(name, b, h)
        if _is_one_run(segments):
            rows = matrix[segments[0].start : segments[-1].stop]
        else:
            rows = np.concatenate([matrix[segment.start : segment.stop] for segment in segments])
        return rows.astype(self.wide, copy=False)

    def forward_rows(self, tile: _TileAt) -> None:
        """One tile of queries through all of its keys: online softmax, then o and lse."""
        plan, (b, h, start, stop) = self.plan, tile
        kv_head, wide = h // self.group_size, self.wide
        o, lse = self.at("o", b, h)[start:stop], self.at("lse", b, h)[start:stop]
        row_max = np.full(stop - start, -np.inf, wide)
        row_sum = np.zeros(stop - start, wide)
        o_acc: Array = wide(0)
        q = self.scaled_queries(b, h, [Segment(start, stop, Kind.FULL)])
        for keys in _groups(plan.work.row(b, h, start, stop), plan.tile.block_kv):
            s = q @ self.gather("k", b, kv_head, keys).T
            _mask_keys(plan.work, tile, keys, s)
            new_max = np.maximum(row_max, s.max(axis=1))
            shift = np.where(new_max == -np.inf, wide(0), new_max)  # -inf - (-inf) must not arise
            s -= shift[:, None]
            p = np.exp2(s, out=s)
            rescale = np.exp2(row_max - shift)
            row_max, row_sum = new_max, row_sum * rescale + p.sum(axis=1)
            o_acc = p @ self.gather("v", b, kv_head, keys) + o_acc * rescale[:, None]
        empty = row_sum == 0
        divisor = np.where(empty, wide(1), row_sum)
        o[...] = o_acc / divisor[:, None]
        lse[...] = np.where(empty, -np.inf, row_max * wide(LN_2) + np.log(divisor))

    def backward_rows(self, tile: _TileAt) -> None:
        """delta = rowsum(dO * O) - dlse of one tile of queries, and its dQ."""
        plan, (b, h, start, stop) = self.plan, tile
        kv_head = h // self.group_size
        rows = [Segment(start, stop, Kind.FULL)]
        do = self._gradient_rows(b, h, rows)
        delta = self.at("delta", b, h)[start:stop]
        np.sum(do * self.gather("o", b, h, rows), axis=1, out=delta)
        if "dlse" in self.arrays:
            empty = self.at("lse", b, h)[start:stop] == -np.inf
            delta -= np.where(empty, 0, self.at("dlse", b, h)[start:stop])
        q = self.scaled_queries(b, h, rows)
        dq = np.zeros((stop - start, plan.problem.head_dim), self.wide)
        for keys in _groups(plan.work.row(b, h, start, stop), plan.tile.block_kv):
            k = self.gather("k", b, kv_head, keys)
            s, dp = q @ k.T, do @ self.gather("v", b, kv_head, keys).T
            _mask_keys(plan.work, tile, keys, s, dp)
            _, ds = self._score_gradient(b, h, rows, s, dp)
            dq += ds @ k
        self.at("dq", b, h)[start:stop] = dq * self.wide(plan.problem.softmax_scale)

    def backward_columns(self, tile: _TileAt) -> None:
        """dK and dV of one tile of keys, summed over the query heads that share it."""
        plan, (b, kv_head, start, stop) = self.plan, tile
        problem, wide = plan.problem, self.wide
        here = [Segment(start, stop, Kind.FULL)]
        k, v = self.gather("k", b, kv_head, here), self.gather("v", b, kv_head, here)
        dk = np.zeros((stop - start, problem.head_dim), wide)
        dv = np.zeros((stop - start, problem.value_dim), wide)
        for h in range(kv_head * self.group_size, (kv_head + 1) * self.group_size):
            for rows in _groups(plan.work.column(b, h, start, stop), plan.tile.block_kv):
                q = self.scaled_queries(b, h, rows)
                do = self._gradient_rows(b, h, rows)
                s, dp = q @ k.T, do @ v.T
                _mask_queries(plan.work, tile._replace(h=h), rows, s, dp)
                p, ds = self._score_gradient(b, h, rows, s, dp)
                dv += p.T @ do
                dk += ds.T @ q
        # q carries softmax_scale log2(e); dK wants softmax_scale.
        self.at("dk", b, kv_head)[start:stop] = dk * wide(LN_2)
        self.at("dv", b, kv_head)[start:stop] = dv

    def _gradient_rows(self, b: int, h: int, rows: list[Segment]) -> Array:
        """dO of some rows; 0 for rows without a key, whose gradients are 0 whatever came."""
        do, lse = self.gather("do", b, h, rows), self.gather("lse", b, h, rows)
        empty = lse == -np.inf
        return np.where(empty[:, None], self.wide(0), do) if empty.any() else do

    def _score_gradient(self, b: int, h: int, rows: list[Segment], s: Array, dp: Array) -> tuple[Array, Array]:
        """P and dS / softmax_scale from scores (base 2, masked) and dP, in the memory of both."""
        lse, delta = self.gather("lse", b, h, rows), self.gather("delta", b, h, rows)
        # An empty row has nothing but scores of -inf; +inf in place of its lse keeps them there.
        s -= np.where(lse == -np.inf, np.inf, lse * self.wide(LOG2_E))[:, None]
        p = np.exp2(s, out=s)
        np.minimum(p, 1, out=p)  # at logits of 1e6 and more the rounding of lse alone would lift P above 1
        dp -= delta[:, None]
        dp *= p
        return p, dp


def _is_one_run(segments: list[Segment]) -> bool:
    return segments[-1].stop - segments[0].start == sum(segment.stop - segment.start for segment in segments)


def _tiles(num_batch: int, num_heads: int, length: int, block: int) -> Iterator[_TileAt]:
    for start in reversed(range(0, length, block)):
        for b in range(num_batch):
            for h in range(num_heads):
                yield _TileAt(b, h, start, min(start + block, length))


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


def _mask_keys(work: WorkList, tile: _TileAt, keys: list[Segment], s: Array, dp: Array | None = None) -> None:
    """Set the scores of masked keys to -inf, and their dP to 0: rows of `tile`, columns of `keys`."""
    column = 0
    for segment in keys:
        here = slice(column, column + segment.stop - segment.start)
        if segment.kind != Kind.FULL:
            outside = _outside(work, tile.b, tile.h, segment, (tile.start, tile.stop), (segment.start, segment.stop))
            _mask(s[:, here], None if dp is None else dp[:, here], outside)
        column = here.stop


def _mask_queries(work: WorkList, tile: _TileAt, rows: list[Segment], s: Array, dp: Array) -> None:
    """Set the scores of masked queries to -inf, and their dP to 0: rows of `rows`, columns of `tile`."""
    row = 0
    for segment in rows:
        here = slice(row, row + segment.stop - segment.start)
        if segment.kind != Kind.FULL:
            outside = _outside(work, tile.b, tile.h, segment, (segment.start, segment.stop), (tile.start, tile.stop))
            _mask(s[here], dp[here], outside)
        row = here.stop


def _mask(s: Array, dp: Array | None, outside: Array) -> None:
    np.copyto(s, -np.inf, where=outside)
    if dp is not None:
        np.copyto(dp, 0, where=outside)  # P is 0 there, and 0 times what a masked value holds may not be


def _outside(work: WorkList, b: int, h: int, segment: Segment, rows: tuple[int, int], keys: tuple[int, int]) -> Array:
    """Which elements of a partial segment are masked, bool [rows, keys]."""
    if segment.kind == Kind.BITS:
        assert isinstance(work, ListedWork)
        first_row, first_key = rows[0] % work.block_q, keys[0] % work.block_kv
        tile = work.bit_tile(segment.tile)
        return ~tile[first_row : first_row + rows[1] - rows[0], first_key : first_key + keys[1] - keys[0]]
    lo, hi = work.bounds(b, h, *rows)
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


def _run(plan: Plan, step: Callable[[_TileAt], None], tiles: Iterable[_TileAt]) -> None:
    """Every tile once, on the plan's number of threads. Tiles write to places of their own."""
    with np.errstate(all="ignore"):
        if plan.num_workers == 1:
            for tile in tiles:
                step(tile)
            return
    queue = deque(tiles)

    def drain() -> None:
        with np.errstate(all="ignore"):
            while queue:
                try:
                    tile = queue.popleft()
                except IndexError:  # another thread took the last one
                    return
                step(tile)

    with _one_thread_blas(), ThreadPoolExecutor(plan.num_workers) as pool:
        try:
            for future in [pool.submit(drain) for _ in range(plan.num_workers)]:
                future.result()
        finally:
            queue.clear()  # after an error or an interrupt the other threads stop at their next tile
