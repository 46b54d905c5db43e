"""Attention to a cache by one call of `cuflash.attention` for each sequence, on its own rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..api import attention
from ..arrays import Array, namespace
from ..masks import SlidingWindow
from ..planning.decoding import MOST_ROWS
from ..scores.places import in_cache, names_in_cache
from ..scores.score import Score
from ._passes import DecodeOptions
from .paged_rows import PagedRows


class OwnRows(NamedTuple):
    """The rows of a sequence, and which of a call's queries belong to it.

    Attributes
    ----------
    table : sequence of int
        Its pages.
    length, new : int
        Its positions, and the queries that are the last of them.
    """

    table: Sequence[int]
    length: int
    new: int


class _Part(NamedTuple):
    """Queries that one call attends from, the keys first <= j < stop that it attends to, and its mask."""

    queries: slice
    first: int
    stop: int
    options: dict[str, Any]


def attend_one_by_one(
    rows: PagedRows,
    sequences: Sequence[OwnRows],
    arrays: dict[str, Array | None],
    window: tuple[int | None, int | None] | None,
    causal: bool,
    options: DecodeOptions,
    score: Score | None,
    capacity: int,
) -> None:
    """Write o and lse of all sequences.

    Parameters
    ----------
    rows : PagedRows
    sequences : sequence of OwnRows
    arrays : dict by name
        q, o, lse and sink, of which the last may be None.
    window, causal
        As `KVCache.attention` takes them.
    options : DecodeOptions
        Where it has `part_keys`, each query has a call of its own, up to the rows that the decode kernel takes: its
        result then depends on no other query.
    score : Score, optional
    capacity : int
        The most positions of a sequence.
    """
    q, o, lse, sink = (arrays[name] for name in ("q", "o", "lse", "sink"))
    assert q is not None and o is not None and lse is not None
    xp, placed = namespace(q), None if score is None else in_cache(score, len(sequences), capacity)
    is_by_query = options.part_keys is not None and q.shape[2] * (q.shape[1] // rows.k.shape[1]) <= MOST_ROWS
    for sequence, own in enumerate(sequences):
        results, own_sink = [], sink
        if sink is not None and sink.ndim == 2:
            own_sink = sink[sequence if sink.shape[0] > 1 else 0]
        for part in _parts(own, window, causal, is_by_query):
            given = part.options
            if score is not None and placed is not None:
                position = own.length - own.new + part.queries.start
                place = xp.asarray(np.array([sequence, position, part.first], np.int32))
                held = {name: score.arrays[of_call] for of_call, name in names_in_cache(score).items()}
                given = given | {"score": placed._with_arrays({**held, "place": place})}
            k, v = rows.gather(own.table, part.first, part.stop, q.dtype)
            made: tuple[Array, Array] = attention(
                xp.ascontiguousarray(q[sequence, :, part.queries], k.dtype), k, v, return_lse=True, sink=own_sink,
                scale=options.scale, kernel=options.kernel, executor=options.executor, precision=options.precision,
                **given,
            )  # fmt: skip
            results.append((part.queries, *made))
        o[sequence], lse[sequence] = _without_keys(own_sink, lse)
        for queries, own_o, own_lse in results:
            o[sequence, :, queries], lse[sequence, :, queries] = own_o, own_lse


def _without_keys(sink: Array | None, lse: Array) -> tuple[Any, Any]:
    """o and lse of queries that see no key: 0, and -inf or the sink; NaN where the sink is NaN or +inf."""
    if sink is None:
        return 0, -np.inf
    xp, logit = namespace(lse), sink.astype(lse.dtype)[..., None]
    own_lse = xp.where(xp.isposinf(logit), np.nan, logit)
    return xp.where(xp.isnan(own_lse), np.nan, 0)[..., None], own_lse


def _parts(
    own: OwnRows, window: tuple[int | None, int | None] | None, causal: bool, is_by_query: bool
) -> Iterator[_Part]:
    """The calls of a sequence, which has at least as many keys as queries; one call at least, which checks options."""
    length, new = own.length, own.new
    left, right = window or (None, None)
    right = 0 if causal else right
    if is_by_query and new:  # a query sees one run of keys
        for query in range(new):
            position = length - new + query
            first = 0 if left is None else max(0, position - left)
            stop = length if right is None else min(length, position + right + 1)
            yield _Part(slice(query, query + 1), first, stop, {})
        return
    first = 0 if left is None else max(0, length - new - left)
    mask = None if window is None else SlidingWindow(window, "bottom_right")
    yield _Part(slice(0, new), first, length, {"causal": "bottom_right" if causal else False, "mask": mask})
