"""Attention to a cache by one call per sequence, with the rows of that sequence only."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..api import attention
from ..arrays import Array, ShapeDtype, namespace
from ..calls._call import Call
from ..executors._bound_plan import BoundPlan
from ..executors._host_tiles import KeptTiles
from ..executors._layout_key import layout_key
from ..masks import ChosenBlocks
from ..masks.base import Band, Mask
from ..planning._call_cache import CALLS
from ..planning.decoding import MOST_ROWS
from ..planning.options import Options
from ..plans.fit import require_fit
from ..scores.places import in_cache, names_in_cache
from ..scores.score import Score
from ._passes import DecodeOptions
from ._state import CacheState
from .on_device import require_no_capture
from .steps import AttendStep, Request, lists_of

_EVERY = Band()


class Part(NamedTuple):
    """The queries of one call, the keys first <= j < stop that the call reads, and its mask."""

    queries: slice
    first: int
    stop: int
    band: Band


class OneByOneStep(AttendStep):
    """A call of `attention` as calls for one sequence each, with the rows of that sequence only.

    Parameters
    ----------
    cache : CacheState
    arrays : dict by name
        q, o, lse and sink, where sink may be None, the arrays of the score function, and lists.
    options : DecodeOptions
    request : Request
    """

    _is_by_query = True  # each query is a separate call

    def __init__(
        self, cache: CacheState, arrays: Mapping[str, Array], options: DecodeOptions, request: Request
    ) -> None:
        super().__init__(arrays, request.names)
        score, self._options = request.score, options
        self._placed = None if score is None else in_cache(score, len(cache.lengths), cache.capacity)
        self._dtype = cache.rows.gathered_dtype(arrays["q"].dtype)

    def attend(
        self, cache: CacheState, request: Request, o: Array, lse: Array | None, counts: Sequence[int] | None
    ) -> None:
        """Compute o and lse; the first counts[b] rows of q belong to sequence b, or all rows if `counts` is None."""
        if cache.device is not None:
            require_no_capture()  # a replay would not see later lengths
        q, sink, lse = request.q, request.sink, self.make_lse() if lse is None else lse
        for sequence, (table, length) in enumerate(zip(cache.pages.tables, cache.lengths)):
            own_sink, new = sink_of(sink, sequence), q.shape[2] if counts is None else counts[sequence]
            if new < q.shape[2]:
                o[sequence], lse[sequence] = results_without_keys(own_sink, lse)
            for part in self._parts(length, new):
                k, v = cache.rows.gather(table, part.first, part.stop, q.dtype)
                arrays = {"q": q[sequence, :, part.queries], "k": k, "v": v}
                if own_sink is not None:
                    arrays["sink"] = own_sink
                position, placed = length - new + part.queries.start, None
                if request.score is not None:
                    placed = self._score_at(request.score, [sequence, position, part.first])
                mask = part.band if request.chosen is None else list_of(request.chosen, sequence, part) & part.band
                self._run(arrays, placed, mask, part, o[sequence, :, part.queries], lse[sequence, :, part.queries])

    def _run(self, arrays: dict[str, Array], score: Score | None, mask: Mask, part: Part, o: Array, lse: Array) -> None:
        """Compute o and lse of one call."""
        raise NotImplementedError

    def _score_at(self, score: Score, place: list[int]) -> Score:
        """Return the score function for a sequence and the positions of the call's first query and key."""
        assert self._placed is not None
        xp = namespace(*self._placed.arrays.values())
        held = {name: score.arrays[of_call] for of_call, name in names_in_cache(score).items()}
        return self._placed._over({**held, "place": xp.asarray(np.array(place, np.int32))})

    def _parts(self, length: int, new: int) -> Iterator[Part]:
        """Yield the calls of a sequence, which has no fewer keys than queries."""
        left, right = self._options.left, self._options.right
        if self._is_by_query or new == 1:  # one query per call, which attends one run of keys
            for query in range(new):
                position = length - new + query
                first = 0 if left is None else max(0, position - left)
                stop = length if right is None else min(length, position + right + 1)
                yield Part(slice(query, query + 1), first, stop, _EVERY)
        elif new:
            first = 0 if left is None else max(0, length - new - left)
            offset = length - new - first
            band = Band(None if left is None else offset - left, None if right is None else offset + right)
            yield Part(slice(0, new), first, length, band)


class OwnRowsStep(OneByOneStep):
    """A call of `attention` with one plan for all sequences.

    The call is checked once, with the largest number of rows that a sequence may have. On the host it is also bound
    once, and its plan is cut to each number of rows; elsewhere, each number of rows has its own plan. Sequences and
    later calls with the same number of rows find plans and bound passes in the call cache.

    If the options have `part_keys`, each query is a separate call, up to the number of rows that the decode kernel
    takes: its result then does not depend on other queries.
    """

    def __init__(
        self, cache: CacheState, arrays: Mapping[str, Array], options: DecodeOptions, request: Request
    ) -> None:
        super().__init__(cache, arrays, options, request)
        q, sink, rows = request.q, request.sink, cache.rows
        self._is_by_query = options.part_keys is not None and q.shape[2] * (q.shape[1] // rows.k.shape[1]) <= MOST_ROWS
        k, v = (ShapeDtype((x.shape[1], cache.capacity, x.shape[3]), self._dtype) for x in (rows.k, rows.v))
        requested = Options(
            sink=sink_of(sink, 0), score=self._placed, scale=options.scale, kernel=options.kernel,
            executor=options.executor, precision=options.precision,
        )  # fmt: skip
        self._call = Call.of(q[0].astype(self._dtype, copy=False), k, v, requested)
        self._plan = self._call.plan()
        self._on_host: BoundPlan | None = None
        if self._call.executor == "cpu":
            of_names = np.empty(0, self._dtype)  # binding on the host uses only the dtype
            operands = (*(() if sink is None else ("sink",)), *({} if self._placed is None else self._placed.arrays))
            names = "q", "k", "v", *operands
            outs = {"o": of_names, "lse": of_names}
            self._on_host = self._plan._bind("forward", dict.fromkeys(names, of_names), outs)

    def _run(self, arrays: dict[str, Array], score: Score | None, mask: Mask, part: Part, o: Array, lse: Array) -> None:
        if score is not None:
            arrays |= score.arrays
        seqlen_q, seqlen_kv = part.queries.stop - part.queries.start, part.stop - part.first
        sizes: Hashable = (seqlen_q, seqlen_kv)  # the numbers of rows determine the band
        if self._on_host is None:
            arrays["q"] = namespace(arrays["q"]).ascontiguousarray(arrays["q"], self._dtype)
            sizes = layout_key(*arrays.values())
        key = None if self.is_checked or sizes is None else ("own rows", id(self), sizes)
        own = CALLS.get(key)
        if own is None:
            if self._on_host is None:
                own = self._bound(part.band, seqlen_q, seqlen_kv, arrays)
            else:
                own = KeptTiles(self._plan._plan.with_band(part.band, seqlen_q, seqlen_kv))
            if key is not None:
                CALLS.put(key, own, self)
        if self._on_host is None:
            o[...], lse[...] = own.run(arrays)
        else:
            self._on_host.run(arrays, {"o": o, "lse": lse}, tiles=own)

    def _bound(self, band: Band, seqlen_q: int, seqlen_kv: int, arrays: Mapping[str, Array]) -> BoundPlan:
        """Return a plan for these numbers of rows, bound to the layouts of arrays."""
        problem = replace(self._call.problem, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        plan = replace(self._call, problem=problem, mask=band).plan()
        require_fit(plan._plan, plan.executor, "forward", arrays, {})
        return plan._bind("forward", arrays, pins=True)


class ChosenRowsStep(OneByOneStep):
    """A call of `attention` on chosen blocks: a separate call for each query."""

    def _parts(self, length: int, new: int) -> Iterator[Part]:
        """Yield the calls of a sequence; all read the keys from the first one on, from which lists count blocks."""
        for part in super()._parts(length, new):
            yield part._replace(first=0, band=Band(part.first, part.stop - 1))

    def _run(self, arrays: dict[str, Array], score: Score | None, mask: Mask, part: Part, o: Array, lse: Array) -> None:
        arrays["q"], options = arrays["q"].astype(self._dtype, copy=False), self._options
        words: dict[str, Any] = {name: getattr(options, name) for name in ("scale", "kernel", "executor", "precision")}
        o[...], lse[...] = attention(**arrays, mask=mask, score=score, return_lse=True, **words)


def list_of(chosen: ChosenBlocks, sequence: int, part: Part) -> ChosenBlocks:
    """Return the lists of a call's queries, without the numbers of blocks that start at or after its last key."""
    lists = {name: array[sequence if array.shape[0] > 1 else 0] for name, array in lists_of(chosen).items()}
    blocks, counts = lists["blocks"][:, part.queries], lists.get("block_counts")
    if counts is not None and counts.shape[1] > 1:
        counts = counts[:, part.queries]
    xp, is_block = namespace(blocks), blocks < -(-part.stop // chosen.block)
    return ChosenBlocks(xp.where(is_block, blocks, xp.asarray(-1, blocks.dtype)), chosen.block, counts=counts)


def sink_of(sink: Array | None, sequence: int) -> Array | None:
    """Return the 1-d sink of a sequence."""
    if sink is None or sink.ndim < 2:
        return sink
    return sink[sequence if sink.shape[0] > 1 else 0]


def results_without_keys(sink: Array | None, lse: Array) -> tuple[Array | float, Array | float]:
    """Return o and lse of queries that attend no key: 0, and -inf or the sink; NaN if the sink is NaN or +inf."""
    if sink is None:
        return 0, -np.inf
    xp, logit = namespace(lse), sink.astype(lse.dtype)[..., None]
    own_lse = xp.where(xp.isposinf(logit), np.nan, logit)
    return xp.where(xp.isnan(own_lse), np.nan, 0)[..., None], own_lse
