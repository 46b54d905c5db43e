"""Tangents of attention and of its gradients on tiles of the cpu executor.

Each pass visits the same tiles as the pass that it differentiates. A dot marks a tangent. Let S be the scores, F the
final scores, P = exp(F - lse), Z the factors of dropout, and c one number per row: the mean of F_dot over the keys
that the row attends to in its first step with such keys::

    S_dot = scale (q_dot . k + q . k_dot)                   F_dot = f_s S_dot + sum f_a a_dot
    w     = P (F_dot - c)                                   rise  = sum w + P_sink (sink_dot - c)
    o_dot = sum Z w v + sum Z P v_dot - rise o              lse_dot = c + rise

    delta_dot = rowsum(do_dot o + do o_dot) - dlse_dot      P_dot  = P (F_dot - lse_dot)
    dF_dot    = P_dot (dP - delta) + P (dP_dot - delta_dot) dS_dot = f_s dF_dot + (f_s)_dot dF
    dq_dot    = scale (dS_dot k + dS k_dot)                 dv_dot = (Z P_dot)^T do + (Z P)^T do_dot

Without c, a change of F_dot that all keys share would cost precision: F_dot - c is small if rise is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..arrays import Array
from ..planning.host import BACKWARD_JVP_TILES, JVP_TILES
from ..planning.options import DOT
from ..planning.plan import KernelPlan
from . import cpu
from ._host_tiles import BatchHead, Step, Tile, steps_side_by_side
from .cpu import HostCall, RowIndex, added, product
from .host_threads import run
from .launch import BoundCall, PassLayout
from .tile_scores import coordinates
from .tile_tangents import ScoreTangents


def bind(plan: KernelPlan, of: PassLayout) -> BoundCall:
    """Return the function that runs the pass "jvp" or "backward_jvp" on arrays in the order of the inputs."""
    return cpu.bind(plan, of, _PASSES)


def _jvp(call: HostCall, results: Mapping[str, Array], read: Mapping[str, Array]) -> None:
    """Compute the tangents of o and lse, with the shapes of o and lse."""
    run(call.tiles.tiling, (HostTangents.of(call, read).jvp_rows, call.tiles.of_rows()), num_tiles=JVP_TILES)


def _backward_jvp(call: HostCall, results: Mapping[str, Array], read: Mapping[str, Array]) -> None:
    """Compute the tangents of the gradients, with the names and shapes of the backward pass."""
    call.arrays["delta.dot"] = np.empty_like(call.arrays["shift"])
    cpu.backward(call, results, read, HostTangents.of(call, read), BACKWARD_JVP_TILES)


_PASSES = {"jvp": _jvp, "backward_jvp": _backward_jvp}


class _Centers:
    """The number c of each query [tiles, queries], and whether the query has attended to a key yet."""

    def __init__(self, shape: tuple[int, int], wide: Any) -> None:
        self.c, self.has_key = np.zeros(shape, wide), np.zeros(shape, bool)

    def see(self, f_dot: Array | None, count: Array | int) -> None:
        """Set c of queries that attend to their first keys, of which there are `count`; masked tangents must be 0."""
        is_first = ~self.has_key & (count > np.zeros_like(self.has_key))
        if f_dot is not None:
            num_keys = f_dot.shape[-2]
            mean = np.full(num_keys, 1 / num_keys, f_dot.dtype) @ f_dot  # of all keys: a sum could overflow
            mean *= num_keys / np.maximum(count, 1)
            np.copyto(self.c, mean, where=is_first)
        self.has_key |= is_first


@dataclass(frozen=True, eq=False)
class _Side:
    """Rows of one matrix, and their tangents or None."""

    x: Array
    dot: Array | None


@dataclass(frozen=True, eq=False)
class HostTangents:
    """The computations on a batch of tiles in the passes "jvp" and "backward_jvp"."""

    call: HostCall
    score: ScoreTangents | None

    @classmethod
    def of(cls, call: HostCall, arrays: Mapping[str, Array | None]) -> HostTangents:
        """Create the tangents of a call from all its arrays, including those of a score function."""
        score = None if call.score is None else ScoreTangents.of(call.score, call.plan.problem, arrays)
        return cls(call, score)

    @property
    def moves_scores(self) -> bool:
        """True if q or k has a tangent."""
        return "q.dot" in self.call.arrays or "k.dot" in self.call.arrays

    @property
    def moves_finals(self) -> bool:
        """True if final scores have tangents."""
        return self.moves_scores or self.score is not None and self.score.moves_arrays

    def jvp_rows(self, tiles: list[Tile], scratch: Array) -> None:
        """Compute o_dot and lse_dot of query tiles from all of their keys, o and lse."""
        call, wide = self.call, self.call.wide
        rows, kv_batch_heads = call.rows_of(tiles)
        q, shift = self._queries(rows), call.read("shift", rows)
        centers, total, o_acc = _Centers(shift.shape, wide), wide(0), None  # o_acc is transposed, which is faster
        for steps in steps_side_by_side(tiles):
            keys = call.row_index(kv_batch_heads, [step.rows for step in steps])
            at = call._row_places(tiles, steps) if self._reads_places else ()
            s, f_dot = self._finals(self._read("k", keys), q, at, scratch)
            p = self._weights(s, shift)
            is_seen: Array | None = None  # with the mask; None if all keys are seen, or nothing depends on it
            if any(step.partial for step in steps) and not centers.has_key.all():
                is_seen = np.ones(p.shape, np.uint8)
            call.mask_keys(tiles, steps, 0, *(x for x in (p, f_dot, is_seen) if x is not None))
            dropped = None if call.dropout is None else call.dropout.dropped(at)
            if self.moves_finals or "sink.dot" in call.arrays:
                self._center(centers, p, f_dot, is_seen)
            if f_dot is not None:
                f_dot -= centers.c[:, None, :]
                f_dot *= p
                total = total + np.ones(p.shape[-2], wide) @ f_dot
                if dropped is not None:
                    dropped.apply(f_dot)
                o_acc = added(o_acc, call.read("v", keys).swapaxes(-1, -2) @ f_dot)
            if "v.dot" in call.arrays:
                if dropped is not None:
                    dropped.apply(p)
                o_acc = added(o_acc, call.read("v.dot", keys).swapaxes(-1, -2) @ p)
        self._finish(rows, len(tiles), centers, total, np.zeros((), wide) if o_acc is None else o_acc.swapaxes(-1, -2))

    def _center(self, centers: _Centers, p: Array, f_dot: Array | None, is_seen: Array | None) -> None:
        """Update the centers with a step, and set tangents to 0 where a score function makes P 0."""
        if self.score is not None and f_dot is not None:
            np.copyto(f_dot, 0, where=p == 0)
        if not centers.has_key.all():
            seen = is_seen if self.score is None else (p != 0).view(np.uint8)  # P of masked keys is 0
            # A step has fewer than 2^16 keys.
            centers.see(f_dot, p.shape[-2] if seen is None else seen.sum(axis=-2, dtype=np.uint16))

    def _finish(self, rows: RowIndex, num_tiles: int, centers: _Centers, total: Array, o_dot: Array) -> None:
        """Compute o_dot and lse_dot from the sums of w and of its products with the values."""
        call, lse = self.call, self.call.read("lse", rows)
        of_kept = 1.0 if call.dropout is None else call.dropout.draws.factor
        if of_kept != 1:
            o_dot = o_dot * call.wide(of_kept)
        lse_dot = np.zeros_like(lse)
        if self.moves_finals or "sink.dot" in call.arrays:
            rise = total
            if "sink" in call.arrays:
                sink, sink_dot = (
                    call.read(name, rows[:-1]).reshape(num_tiles, 1) if name in call.arrays else call.wide(0)
                    for name in ("sink", "sink.dot")
                )
                p_sink = np.minimum(np.exp(sink - lse), 1)
                rise = rise + np.where(sink == -np.inf, 0, p_sink * (sink_dot - centers.c))
            lse_dot = centers.c + rise
            o_dot = np.where(centers.has_key[..., None], o_dot - rise[..., None] * call.read("o", rows), 0)
        is_nan = np.isnan(lse)
        lse_dot = np.where(is_nan, lse, np.where(lse == -np.inf, 0, lse_dot))
        o_dot = np.where(is_nan[..., None], lse[..., None], np.where(lse[..., None] == -np.inf, 0, o_dot))
        call.arrays["o.dot"][rows] = o_dot
        call.arrays["lse.dot"][rows] = lse_dot

    def backward_deltas(self, tiles: list[Tile], scratch: Array) -> None:
        """Compute delta and delta_dot of query tiles."""
        call = self.call
        rows, _ = call.rows_of(tiles)
        do, o = self._gradients(rows), call.read("o", rows)
        delta, delta_dot = np.vecdot(do.x, o), np.vecdot(do.x, call.read("o.dot", rows))
        if do.dot is not None:
            delta_dot += np.vecdot(do.dot, o)
        for name, each in (("dlse", delta), ("dlse.dot", delta_dot)):
            if name in call.arrays:
                each -= np.where(call.read("shift", rows) == np.inf, 0, call.read(name, rows))
        call.arrays["delta"][rows] = delta
        call.arrays["delta.dot"][rows] = delta_dot

    def column_terms(
        self, tiles: list[Tile], of_keys: Mapping[str, Array], batch_heads: list[BatchHead], steps: tuple[Step, ...],
        rows: RowIndex, scratch: Array,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """Return what a step of key tiles adds to dq_dot, dk_dot and dv_dot."""
        call = self.call
        k, v = (_Side(of_keys[name], of_keys.get(f"{name}{DOT}")) for name in "kv")
        q, do, at = self._queries(rows), self._gradients(rows), tuple[Array, ...]()
        if self._reads_places:
            queries, own = [step.rows for step in steps], [tile.rows for tile in tiles]
            at = coordinates(call.plan.problem.places, batch_heads, queries, own)
        adds = call.score is not None and call.score.adds_gradients
        mask = partial(call.mask_queries, tiles, batch_heads, steps) if adds else None
        statistics = tuple(call.read(name, rows) for name in ("shift", "lse.dot", "delta", "delta.dot"))
        p, p_dot, ds, ds_dot = self._tile(k, v, q, do, statistics, at, scratch, mask)
        call.mask_queries(tiles, batch_heads, steps, p, p_dot, ds, ds_dot)
        if call.dropout is not None:
            dropped = call.dropout.dropped(at)
            dropped.apply(p)
            dropped.apply(p_dot)
        dq: Array | None = None
        for terms, each in ((ds_dot, k.x), (ds, k.dot)):
            if each is not None and np.isfinite(each).all():
                dq = added(dq, terms.swapaxes(-1, -2) @ each)
            elif each is not None:
                dq = added(dq, call.by_attended_keys(tiles, batch_heads, steps, terms, each))
        assert dq is not None
        dk, dv = ds_dot @ q.x, p_dot @ do.x
        dk = dk if q.dot is None else added(dk, ds @ q.dot)
        return dq, dk, dv if do.dot is None else added(dv, p @ do.dot)

    def sink_gradient(self) -> Array:
        """Return the tangent of dsink [*batch, heads]: -sum P_sink ((sink_dot - lse_dot) delta + delta_dot)."""
        arrays, wide = self.call.arrays, self.call.wide
        with np.errstate(all="ignore"):
            sink = arrays["sink"].astype(wide)[..., None]
            sink_dot = arrays["sink.dot"].astype(wide)[..., None] if "sink.dot" in arrays else wide(0)
            lse, delta, delta_dot = arrays["lse"], arrays["delta"], arrays["delta.dot"]
            # In a row without a key, o is 0 and lse is the sink: dO has no effect, even if it is NaN.
            is_alone = (lse == sink) & ~arrays["o"].any(axis=-1) & (np.isnan(delta) | np.isnan(delta_dot))
            delta, delta_dot = (
                np.where(is_alone, -arrays[name] if name in arrays else 0, each)
                for name, each in (("dlse", delta), ("dlse.dot", delta_dot))
            )
            terms = np.minimum(np.exp(sink - lse), 1) * ((sink_dot - arrays["lse.dot"]) * delta + delta_dot)
            return -np.where(sink == -np.inf, wide(0), terms).sum(axis=-1)

    @property
    def _reads_places(self) -> bool:
        return self.score is not None or self.call.dropout is not None

    def _read(self, name: str, index: RowIndex) -> _Side:
        call, dot = self.call, f"{name}{DOT}"
        return _Side(call.read(name, index), call.read(dot, index) if dot in call.arrays else None)

    def _queries(self, rows: RowIndex) -> _Side:
        """Return queries and their tangents, both times the factor of `HostCall.read_queries`."""
        q = self._read("q", rows)
        factor = self.call.wide(self.call.q_factor)
        return _Side(q.x * factor, None if q.dot is None else q.dot * factor)

    def _gradients(self, rows: RowIndex) -> _Side:
        """Return dO and its tangent; 0 for rows without a key."""
        call = self.call
        return _Side(
            call.read_gradients(rows), call.read_gradients(rows, "do.dot") if "do.dot" in call.arrays else None
        )

    def _finals(self, k: _Side, q: _Side, at: tuple[Array, ...], scratch: Array) -> tuple[Array, Array | None]:
        """Return final scores, in the call's unit, and their tangents in natural units."""
        s, s_dot = self._raw(k, q, scratch)
        if self.score is None:
            return s, s_dot
        if not self.moves_finals:
            assert self.call.score is not None
            self.call.score.apply(s, at)
            return s, None
        f_dot = _part(scratch[1], s.shape)
        self.score.apply(s, f_dot, at)
        return s, f_dot

    def _raw(self, k: _Side, q: _Side, scratch: Array) -> tuple[Array, Array | None]:
        """Return scores before a score function, in the call's unit, and their tangents in natural units."""
        call = self.call
        s_dot = _sum_of_products((k.x, q.dot), (k.dot, q.x), scratch[1:], call.natural)
        if s_dot is not None and call.score_factor != 1:
            s_dot *= call.wide(call.score_factor)
        return call.scores(k.x, q.x, scratch[0]), s_dot

    def _weights(self, s: Array, shift: Array) -> Array:
        """Return P from final scores and lse, in place."""
        s -= shift[..., None, :]
        p = self.call.power(s, out=s)
        return np.clip(p, 0, 1, out=p)

    def _tile(
        self, k: _Side, v: _Side, q: _Side, do: _Side, statistics: tuple[Array, ...], at: tuple[Array, ...],
        scratch: Array, mask: partial[None] | None = None,
    ) -> tuple[Array, Array, Array, Array]:  # fmt: skip
        """Return P, P_dot, dS and dS_dot, the last two without the scale; the caller masks all of them.

        With a mask, the terms of captured arrays are added to the tangents of their gradients.
        """
        call, (shift, lse_dot, delta, delta_dot) = self.call, statistics
        s, s_dot = self._raw(k, q, scratch)
        gap = product(v.x, do.x, scratch[2])
        dp_dot = _sum_of_products((v.x, do.dot), (v.dot, do.x), scratch[3:])
        if dp_dot is None:
            dp_dot = _part(scratch[3], s.shape)
            dp_dot[...] = 0
        if call.dropout is not None:
            dropped = call.dropout.dropped(at)
            dropped.apply_to_gradients(gap)
            dropped.apply_to_gradients(dp_dot)
        gap -= delta[..., None, :]
        dp_dot -= delta_dot[..., None, :]
        p_dot = _part(scratch[1], s.shape)
        if self.score is not None:
            self.score.gradients(s, p_dot, gap, dp_dot, shift, lse_dot, at, mask)
            return s, p_dot, gap, dp_dot
        p = self._weights(s, shift)
        np.subtract(call.wide(0) if s_dot is None else s_dot, lse_dot[..., None, :], out=p_dot)
        p_dot *= p
        ds_dot = np.multiply(dp_dot, p, out=dp_dot)
        ds_dot += np.multiply(p_dot, gap, out=_part(scratch[4], s.shape))
        return p, p_dot, np.multiply(gap, p, out=gap), ds_dot


def _part(memory: Array, shape: tuple[int, ...]) -> Array:
    return memory[: int(np.prod(shape))].reshape(shape)


def _sum_of_products(
    first: tuple[Array | None, Array | None], second: tuple[Array | None, Array | None], scratch: Array,
    factor: float = 1.0,
) -> Array | None:  # fmt: skip
    """Return the sum of keys @ queries^T over two pairs times a factor, without pairs that lack a side; or None."""
    total: Array | None = None
    for keys, queries in (first, second):
        if keys is not None and queries is not None:
            queries = queries if factor == 1 else queries * queries.dtype.type(factor)
            total = added(total, product(keys, queries, scratch[0 if total is None else 1]))
    return total
