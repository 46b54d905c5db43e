"""The `cpu` executor: FlashAttention's tiled algorithm in NumPy and BLAS over a plan's work list.

A tile of queries visits its keys with a running row maximum and row sum (FlashAttention-2, arXiv 2307.08691,
algorithm 1). In the backward pass, a tile of keys visits its queries (algorithm 2), and adds to their dQ in turn, so
that no sum depends on the order in which threads finish.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..arrays import Array
from ..blocks._chosen_work import ChosenWork
from ..planning.dropout_launches import SEED
from ..planning.plan import KernelPlan
from ._host_tiles import BatchHead, KeptTiles, Step, Tile, masked_elements, row_numbers, steps_side_by_side
from .checks import Check
from .host_threads import Turn, in_turn, run
from .launch import BoundCall, PassLayout
from .tile_dropout import TileDropout
from .tile_scores import TileScores, coordinates

# A pass of a call, which takes its results by name and the arrays by name that it reads.
_Pass: TypeAlias = Callable[["HostCall", Mapping[str, Array], Mapping[str, Array]], None]

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)


def _is_exp2_vectorized() -> bool:
    """True if NumPy has vector code for float32 exp2 on this processor: AVX-512. Its exp needs only AVX2."""
    targets = np.lib.introspect.opt_func_info("^exp2$", "float32").get("exp2", {})
    return any(not each["current"].startswith("baseline") for each in targets.values())


WEIGHTS_USE_EXP2 = _is_exp2_vectorized()  # whether scores are in base 2


def bind(plan: KernelPlan, of: PassLayout, passes: Mapping[str, _Pass] | None = None) -> BoundCall:
    """Return the function that runs a pass on arrays in the order of the inputs.

    The default of `passes`, which has functions by name, is the passes of this module.
    """
    names, run_pass = tuple(of.inputs), (passes or _PASSES)[of.name]
    bound_tiles = KeptTiles(plan, step_tiles=2 if of.name == "forward" else 1)  # the forward pass holds no dP

    def call(
        *arrays: Array, numbers: Sequence[int] = (), check: Check | None = None, tiles: KeptTiles = bound_tiles
    ) -> list[Array]:
        empty = _empty if check is None else check.empty
        new = {name: empty(name, each.shape, each.dtype) for name, each in {**of.results, **of.unwanted}.items()}
        read = dict(zip(names, arrays))
        host_call = HostCall.of(tiles, numbers, **read, **new)
        if of.name != "forward":
            lse, accumulator = host_call.arrays["lse"], tiles.plan.problem.accumulator
            empty = lse == -np.inf
            # Scores of an empty row are all -inf; with +inf as its lse, exp(score - lse) is 0 instead of NaN.
            with np.errstate(all="ignore"):
                in_unit = lse / host_call.natural
                host_call.arrays["shift"] = np.where(empty, np.inf, in_unit).astype(accumulator, copy=False)
            if empty.any():
                host_call.arrays["empty"] = empty
        run_pass(host_call, new, read)
        if check is not None:
            check.after("the cpu executor", new)
        return [new[name] for name in of.results]

    return call


def _empty(name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    return np.empty(shape, dtype)


def _forward(call: HostCall, results: Mapping[str, Array], read: Mapping[str, Array]) -> None:
    """Compute o [*batch, heads, seqlen_q, value_dim] and lse [*batch, heads, seqlen_q]."""
    run(call.tiles.tiling, (call.forward_rows, call.tiles.of_rows()))


def backward(
    call: HostCall, results: Mapping[str, Array], read: Mapping[str, Array], of: _Backward | None = None,
    num_tiles: int = 2,
) -> None:  # fmt: skip
    """Compute dq [*batch, heads, ...], and dk and dv [*batch, kv_heads, ...], with broadcast leading axes.

    If they are among the arrays, also compute dsink [*batch, heads] and the gradients of a score function's arrays.
    `of` has the terms, by default those of the call's gradients, whose steps use `num_tiles` tiles of scratch memory.
    """
    of, dq, stop = of or call, call.arrays["dq"], threading.Event()
    call.arrays["delta"] = np.empty_like(call.arrays["shift"])
    call.arrays["dq_sum"] = dq_sum = dq if dq.dtype == call.wide else np.empty(dq.shape, call.wide)
    dq_sum[...] = 0
    # If tiles add to gradients of captured arrays, they run in order, because many of them add to one array.
    in_order = call.score is not None and call.score.adds_gradients
    run(call.tiles.tiling, (of.backward_deltas, call.tiles.of_rows()), in_order=in_order)
    columns = partial(call.backward_columns, of.column_terms), in_turn(call.tiles.of_columns(), stop)
    run(call.tiles.tiling, columns, in_order=in_order, num_tiles=num_tiles, stop=stop)
    with np.errstate(all="ignore"):  # values that overflow a narrower dtype become infinite
        dq[...] = np.multiply(dq_sum, call.wide(call.plan.problem.scaling.scale), out=dq_sum)
    if "dsink" in results:
        results["dsink"][...] = of.sink_gradient()


_PASSES: Mapping[str, _Pass] = {"forward": _forward, "backward": backward}


_OF_HEADS = ("sink", "dsink", "sink.dot")  # arrays with one number per head
_OF_ROWS = ("lse", "shift", "dlse", "delta", "empty", "lse.dot", "dlse.dot", "delta.dot")  # with one number per query
_OF_SCORE = ("score.", "dscore.")  # prefixes of a score function's arrays, tangents and gradients
BATCH_HEAD, ROWS = attrgetter("b", "h"), attrgetter("rows")  # of a tile
_OF_KEYS = ("k", "v", "k.dot", "v.dot")
RowIndex: TypeAlias = tuple[int | slice | Array, ...]  # selects rows [tiles, rows, ...] of several matrices
# Returns what a step of key tiles adds to dQ, dK and dV.
_ColumnTerms: TypeAlias = Callable[
    [list[Tile], Mapping[str, Array], list[BatchHead], tuple[Step, ...], RowIndex, Array], tuple[Array, Array, Array]
]


class _Backward(Protocol):
    """The terms of gradients, or of their tangents."""

    @property
    def column_terms(self) -> _ColumnTerms: ...

    def backward_deltas(self, tiles: list[Tile], scratch: Array) -> None: ...

    def sink_gradient(self) -> Array: ...


@dataclass(frozen=True, eq=False)
class HostCall:
    """The arrays of one call, with broadcast leading axes, and the computations on a batch of tiles.

    All tiles of a batch visit the same number of rows, so their arrays are stacked along a first axis. The number of
    NumPy calls matters as much as the number of bytes, since each call may wait for the interpreter lock.
    Scores are transposed, [tiles, keys, queries], so that values per query are added along whole rows of memory.
    They are in base 2 if `power` is exp2, else in natural units; `natural` times a score is in natural units.
    """

    plan: KernelPlan
    tiles: KeptTiles
    arrays: dict[str, Array]
    batch_indices: tuple[tuple[int, ...], ...]  # indices into the leading axes, by flat batch index
    wide: Any  # the accumulator's scalar type
    group_size: int
    q_factor: float
    score_factor: float  # power of two >= 1; q_factor * score_factor = scale / natural
    power: np.ufunc  # the exponential function that converts scores to weights
    natural: float
    score: TileScores | None = None
    dropout: TileDropout | None = None

    @classmethod
    def of(cls, tiles: KeptTiles, numbers: Sequence[int] = (), **arrays: Array | None) -> HostCall:
        plan, problem, batch = tiles.plan, tiles.plan.problem, tiles.plan.problem.batch
        broadcast = {}
        score = None if problem.score is None else TileScores.of(problem, arrays)
        for name, array in arrays.items():
            if name.startswith(_OF_SCORE) or name == SEED:
                continue
            if array is not None and name in _OF_HEADS:
                broadcast[name] = np.broadcast_to(array, problem.heads_shape())
            elif array is not None:
                rank = 1 + problem.has_heads + (name not in _OF_ROWS)
                full = (*batch, *array.shape[array.ndim - rank :])
                view = array if array.shape == full else np.broadcast_to(array, full)
                broadcast[name] = view if problem.has_heads else view[None]
        wide = problem.accumulator.type
        # exp2 of -inf takes 20 times as long as of a finite number; most scores of tiles with chosen blocks are masked.
        uses_exp2 = WEIGHTS_USE_EXP2 and score is None and not isinstance(plan.work, ChosenWork)
        power, natural, unit = (np.exp2, _LN_2, _LOG2_E) if uses_exp2 else (np.exp, 1.0, 1.0)
        mantissa, exponent = math.frexp(wide(problem.scaling.scale * unit))
        lift = max(exponent, 0)
        factors = math.ldexp(mantissa, exponent - lift), 2.0**lift
        dropout = None if problem.dropout is None else TileDropout.of(problem, numbers, arrays.get(SEED))
        indices = tuple(np.ndindex(batch))
        return cls(
            plan, tiles, broadcast, indices, wide, problem.group_size, *factors, power, natural, score, dropout
        )

    def row_index(self, batch_heads: list[BatchHead], rows: Sequence[slice | Array]) -> RowIndex:
        """Return an index of the rows of each (batch entry, head); for adjacent heads, it selects a view."""
        (b, h), row_set = batch_heads[0], rows[0]
        if any(other is not row_set for other in rows):
            row_set = np.stack([row_numbers(other) for other in rows])
        elif isinstance(row_set, slice) and batch_heads == [*zip(repeat(b), range(h, h + len(batch_heads)))]:
            return (*self.batch_indices[b], slice(h, h + len(batch_heads)), row_set)
        else:
            row_set = row_numbers(row_set)[None]
        return (*np.array([(*self.batch_indices[b], h) for b, h in batch_heads]).T[..., None], row_set)

    def read(self, name: str, row_index: RowIndex) -> Array:
        """Return rows [tiles, rows, ...], converted to the accumulator's dtype."""
        return self.arrays[name][row_index].astype(self.wide, copy=False)

    def read_queries(self, row_index: RowIndex) -> Array:
        """Return queries times a factor <= 1, so that none overflows; `scores` applies the rest of the scale."""
        return self.read("q", row_index) * self.wide(self.q_factor)

    def scores(self, k: Array, q: Array, scratch: Array) -> Array:
        """Return scores before the score function, transposed."""
        s = product(k, q, scratch)
        return s if self.score_factor == 1 else np.multiply(s, self.wide(self.score_factor), out=s)

    def read_gradients(self, row_index: RowIndex, name: str = "do") -> Array:
        """Return dO, or its tangent; 0 for rows without a key, whose gradients are 0 whatever dO is."""
        do = self.read(name, row_index)
        return np.where(self.arrays["empty"][row_index][..., None], self.wide(0), do) if "empty" in self.arrays else do

    def forward_rows(self, tiles: list[Tile], scratch: Array) -> None:
        """Compute o and lse of query tiles by an online softmax over all of their keys."""
        rows, kv_batch_heads = self.rows_of(tiles)
        row_max, row_sum, o_acc = self.wide(-np.inf), self.wide(0), None
        for steps, keys, s in self.score_steps(tiles, rows, kv_batch_heads, scratch.reshape(-1)):
            new_max = s.max(axis=-2) if o_acc is None else np.maximum(row_max, s.max(axis=-2))
            shift = np.maximum(new_max, np.finfo(self.wide).min)  # avoids -inf - (-inf)
            s -= shift[..., None, :]
            p = self.power(s, out=s)
            p_sum = np.ones(p.shape[-2], self.wide) @ p
            if self.dropout is not None:
                self.dropout.dropped(self._row_places(tiles, steps)).apply(p)
            p_v = p.swapaxes(-1, -2) @ self.read("v", keys)
            if o_acc is None:
                row_sum, o_acc = p_sum, p_v
            else:
                rescale = self.power(row_max - shift)
                row_sum = row_sum * rescale + p_sum
                o_acc *= rescale[..., None]
                o_acc += p_v
            row_max = new_max
        divisor = np.maximum(row_sum, 1)  # if there is a key, the largest score adds 1; otherwise o is 0 and lse -inf
        o = np.zeros((), self.wide) if o_acc is None else np.divide(o_acc, divisor[..., None], out=o_acc)
        lse = row_max * self.wide(self.natural) + np.log(divisor)
        if "sink" in self.arrays:
            factor, lse = _with_sink(lse, self.read("sink", rows[:-1]).reshape(len(tiles), 1))
            factor = np.broadcast_to(factor, (len(tiles), tiles[0].rows.stop - tiles[0].rows.start))
            o = o * factor[..., None]
        if self.dropout is not None:
            o = o * self.wide(self.dropout.draws.factor)
        self.arrays["o"][rows] = o
        self.arrays["lse"][rows] = lse

    def score_steps(
        self, tiles: list[Tile], rows: RowIndex, kv_batch_heads: list[BatchHead], scratch: Array
    ) -> Iterator[tuple[tuple[Step, ...], RowIndex, Array]]:
        """Yield the steps of query tiles, the index of their keys, and final scores, -inf for masked keys."""
        q = self.read_queries(rows)
        for steps in steps_side_by_side(tiles):
            keys = self.row_index(kv_batch_heads, [step.rows for step in steps])
            s = self.scores(self.read("k", keys), q, scratch)
            if self.score is not None:
                self.score.apply(s, self._row_places(tiles, steps))
            self.mask_keys(tiles, steps, -np.inf, s)
            yield steps, keys, s

    def backward_deltas(self, tiles: list[Tile], scratch: Array) -> None:
        """Compute delta = rowsum(dO * O) - dlse of query tiles."""
        rows, _ = self.rows_of(tiles)
        delta = np.vecdot(self.read_gradients(rows), self.read("o", rows))
        if "dlse" in self.arrays:
            delta -= np.where(self.read("shift", rows) == np.inf, 0, self.read("dlse", rows))
        self.arrays["delta"][rows] = delta

    def sink_gradient(self) -> Array:
        """Return dsink [*batch, heads]: minus the sum over queries of the sink's weight times delta."""
        with np.errstate(over="ignore"):  # values that overflow a narrower dtype become infinite
            sink = self.arrays["sink"].astype(self.wide)[..., None]
        lse, delta = self.arrays["lse"], self.arrays["delta"]
        if np.isnan(delta).any():
            # In a row without a key, o is 0 and lse is the sink: only dlse counts, and dO has no effect, even if NaN.
            is_alone = np.isnan(delta) & (lse == sink) & ~self.arrays["o"].any(axis=-1)
            delta = np.where(is_alone, -self.arrays["dlse"] if "dlse" in self.arrays else 0, delta)
        with np.errstate(all="ignore"):
            terms = np.exp(sink - lse) * delta
            return -np.where(sink == -np.inf, self.wide(0), terms).sum(axis=-1)

    def backward_columns(self, terms: _ColumnTerms, drawn: tuple[list[Tile], Turn], scratch: Array) -> None:
        """Compute dK and dV of key tiles, summed over the query heads that share them, and add to dQ in turn."""
        tiles, turn = drawn
        keys = self.row_index([*map(BATCH_HEAD, tiles)], [*map(ROWS, tiles)])
        of_keys = dict[str, Array]()
        for name in _OF_KEYS:
            if name in self.arrays:
                of_keys[name] = self.read(name, keys)
        dk: Array | None = None
        dv: Array | None = None
        for head in range(self.group_size):
            batch_heads = [(tile.b, tile.h * self.group_size + head) for tile in tiles]
            for steps in steps_side_by_side(tiles, head):
                rows = self.row_index(batch_heads, [step.rows for step in steps])
                dq, dk_term, dv_term = terms(tiles, of_keys, batch_heads, steps, rows, scratch)
                dk, dv = added(dk, dk_term), added(dv, dv_term)
                stops = list(map(attrgetter("stop"), steps))
                if turn.earlier and not turn.wait(head, max(stops)):
                    return
                dq_sum = self.arrays["dq_sum"]
                if len(set(batch_heads)) == len(batch_heads):
                    dq_sum[rows] += dq
                else:
                    for (b, h), step, part in zip(batch_heads, steps, dq):
                        dq_sum[(*self.batch_indices[b], h, step.rows)] += part
                turn.advance(head, min(stops))
            if turn.earlier and not turn.wait(head, math.inf):
                return
            turn.advance(head, math.inf)
        # q includes scale / (natural * score_factor); dK needs the scale.
        self.arrays["dk"][keys] = 0 if dk is None else dk * self.wide(self.natural * self.score_factor)
        of_kept = 1.0 if self.dropout is None else self.dropout.draws.factor
        self.arrays["dv"][keys] = 0 if dv is None else dv if of_kept == 1 else dv * self.wide(of_kept)

    def column_terms(
        self, tiles: list[Tile], of_keys: Mapping[str, Array], batch_heads: list[BatchHead], steps: tuple[Step, ...],
        rows: RowIndex, scratch: Array,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """Return what a step of key tiles adds to dQ, dK and dV."""
        k, q, do = of_keys["k"], self.read_queries(rows), self.read_gradients(rows)
        s, dp = self.scores(k, q, scratch[0]), product(of_keys["v"], do, scratch[1])
        shift, delta = self.read("shift", rows), self.read("delta", rows)
        at: tuple[Array, ...] = ()
        if self.score is not None or self.dropout is not None:
            queries, own = [step.rows for step in steps], [tile.rows for tile in tiles]
            at = coordinates(self.plan.problem.places, batch_heads, queries, own)
        dropped = None if self.dropout is None else self.dropout.dropped(at)
        if dropped is not None:
            dropped.apply_to_gradients(dp)
        if self.score is None:
            s -= shift[..., None, :]
            p = self.power(s, out=s)
            np.clip(p, 0, 1, out=p)  # at logits of 1e6 and more, the rounding of lse alone could make P exceed 1
            dp -= delta[..., None, :]
            ds = np.multiply(dp, p, out=dp)
        else:
            mask = partial(self.mask_queries, tiles, batch_heads, steps) if self.score.adds_gradients else None
            p, ds = self.score.gradients(s, dp, shift, delta, at, mask)
        self.mask_queries(tiles, batch_heads, steps, p, ds)  # if lse is NaN, P is NaN even at masked scores
        if dropped is not None:
            dropped.apply(p)
        is_finite = np.isfinite(k).all()
        dq = ds.swapaxes(-1, -2) @ k if is_finite else self.by_attended_keys(tiles, batch_heads, steps, ds, k)
        return dq, ds @ q, p @ do

    def by_attended_keys(
        self, tiles: list[Tile], batch_heads: list[BatchHead], steps: tuple[Step, ...], ds: Array, k: Array
    ) -> Array:
        """Return dQ of a step if some keys are not finite: these affect only the queries that attend them."""
        seen, is_finite = np.ones(ds.shape, bool), np.isfinite(k).all(axis=-1)
        self.mask_queries(tiles, batch_heads, steps, seen.view(np.uint8))
        dq: Array = ds.swapaxes(-1, -2) @ np.where(is_finite[..., None], k, 0)
        for tile, key in np.argwhere(~is_finite):
            queries = seen[tile, key]
            dq[tile, queries] += ds[tile, key, queries, None] * k[tile, key]
        return dq

    def rows_of(self, tiles: list[Tile]) -> tuple[RowIndex, list[BatchHead]]:
        """Return the rows of query tiles, and the key/value heads that they read."""
        rows = self.row_index([*map(BATCH_HEAD, tiles)], [*map(ROWS, tiles)])
        return rows, [(tile.b, tile.h // self.group_size) for tile in tiles]

    def _row_places(self, tiles: list[Tile], steps: tuple[Step, ...]) -> tuple[Array, ...]:
        """Return b, h, i and j of the scores of query tiles."""
        batch_heads, places = [(tile.b, tile.h) for tile in tiles], self.plan.problem.places
        return coordinates(places, batch_heads, [tile.rows for tile in tiles], [step.rows for step in steps])

    def mask_keys(self, tiles: list[Tile], steps: tuple[Step, ...], value: float, *scores: Array) -> None:
        """Set scores, or weights, of masked keys to a value."""
        for numbers, (tile, step) in _unlike(tiles, steps):
            for each in step.partial:
                masked = masked_elements(self.plan.work, (tile.b, tile.h), each, tile.rows, None)
                for x in scores:
                    np.copyto(x[numbers, each.rows], value, where=masked)

    def mask_queries(
        self, tiles: list[Tile], batch_heads: list[BatchHead], steps: tuple[Step, ...], *weights: Array
    ) -> None:
        """Set P, or P and dS, of masked queries to 0."""
        for numbers, (tile, step) in _unlike(tiles, steps):
            for each in step.partial:
                masked = masked_elements(self.plan.work, batch_heads[numbers.start], each, None, tile.rows)
                for x in weights:
                    np.copyto(x[numbers, :, each.rows], 0, where=masked)


def _unlike(tiles: list[Tile], steps: tuple[Step, ...]) -> Iterator[tuple[slice, tuple[Tile, Step]]]:
    """Yield tiles and their steps, adjacent ones with the same rows once, with the slice of their numbers."""
    first = 0
    for stop in range(1, len(tiles) + 1):
        if stop == len(tiles) or steps[stop] is not steps[first] or tiles[stop].rows is not tiles[first].rows:
            yield slice(first, stop), (tiles[first], steps[first])
            first = stop


def product(keys: Array, queries: Array, scratch: Array) -> Array:
    """Return keys @ queries^T in reused memory: touching new pages would take longer than the product."""
    shape = *keys.shape[:-1], queries.shape[-2]
    return np.matmul(keys, queries.swapaxes(-1, -2), out=scratch[: math.prod(shape)].reshape(shape))


def added(total: Array | None, term: Array) -> Array:
    return term if total is None else np.add(total, term, out=total)


def _with_sink(lse: Array, sink: Array) -> tuple[Array, Array]:
    """Return the factor of a row's o, and its lse, after (o, lse) is merged with (0, sink)."""
    top = np.maximum(lse, sink)  # NaN if either operand is NaN
    shift = np.where(top == -np.inf, 0, top).astype(lse.dtype, copy=False)  # avoids -inf - (-inf)
    weight = np.exp(lse - shift)
    total = weight + np.exp(sink - shift)
    is_sink = sink != -np.inf
    factor = np.where(is_sink, weight / total, 1).astype(lse.dtype, copy=False)
    return factor, np.where(is_sink, shift + np.log(total), lse)
