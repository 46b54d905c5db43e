"""Entry points of a cache's calls: arguments are checked once, and all reasons to refuse them are raised together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import UP_TO_FLOAT32, Array, ShapeDtype, accumulator_dtype, flag_reasons, namespace
from ..calls._call import Call
from ..errors import UnsupportedProblem, collecting, refuse
from ..planning.options import Options
from ..planning.score_launches import array_name
from ..plans.conversion import as_arrays
from ..scores import Score
from ._passes import DecodeOptions, SimulatedStep, pass_of
from ._state import CacheState
from .arguments import checked_window, not_served, out_reasons, overlap_reasons, row_reasons, sink_reasons
from .on_device import device_reasons, is_on_device
from .chosen import ChosenRowsStep, form_of, mask_reasons
from .one_by_one import OwnRowsStep
from .scoring import ScoreKind, arrays_of, fit_reasons
from .steps import RequestedOptions, AttendStep, Step, StepCall, lists_of


class _Rows(NamedTuple):
    """The arguments of `append` for the rules below; `unfit` has the reasons why k and v do not fit the cache."""

    cache: CacheState
    k: Array
    v: Array
    counts: Any
    unfit: Sequence[str]


class _Queries(NamedTuple):
    """The arguments of `attention` for the rules below; `unfit` has reasons to refuse some of them."""

    cache: CacheState
    q: Array
    counts: Any
    out: Any
    sink: Any
    options: RequestedOptions
    score: Score | None
    mask: Any
    unfit: Sequence[str]


def checked_rows(cache: CacheState, k: Any, v: Any, counts: Any) -> tuple[Array, Array]:
    """Return new rows as arrays of the cache's library, after checking that they and the counts fit."""
    arrays = as_arrays({"k": k, "v": v}, dict.fromkeys("kv", _row_dtypes(cache)[-1]), like=cache.rows.k)
    batch, heads = len(cache.lengths), cache.rows.k.shape[1]
    wanted = {name: (batch, heads, "n", own.shape[3]) for name, own in (("k", cache.rows.k), ("v", cache.rows.v))}
    unfit = row_reasons(arrays, cache.rows.k, wanted, _row_dtypes(cache))
    rows = _Rows(cache, arrays["k"], arrays["v"], counts, unfit)
    refuse([reason for rule in _APPEND_RULES for reason in rule(rows)])
    if cache.device is None:
        cache.steps.keep_append(rows.k, rows.v, Step(arrays, ("k", "v"), ("k", "v")))
    return rows.k, rows.v


def checked_queries(
    cache: CacheState, q: Any, counts: Any, out: Any, sink: Any, options: RequestedOptions, score: Score | None,
    mask: Any, reasons: Sequence[str],
) -> tuple[StepCall, Array, Array | None]:  # fmt: skip
    """Return a new `StepCall` for a call of `attention` that has none in the cache, and q and the sink as arrays.

    `reasons` are the caller's reasons to refuse the call.
    """
    unfit, window, dtypes = list(reasons), None, _row_dtypes(cache)
    q, sink = as_arrays({"q": q, "sink": sink}, {"q": dtypes[-1]}, like=cache.rows.k).values()
    with collecting(unfit):
        window = checked_window(options.window)
    unfit += flag_reasons("causal", options.causal)
    wanted = {"q": (len(cache.lengths), "num_heads", "n", cache.rows.k.shape[3])}
    unfit = row_reasons({"q": q}, cache.rows.k, wanted, dtypes) + unfit
    queries = _Queries(cache, q, counts, out, sink, options, score, mask, unfit)
    refused = [reason for rule in _ATTENTION_RULES for reason in rule(queries)]
    if refused:
        like = ShapeDtype((1, 1, int(cache.rows.k.shape[3])), dtypes[0])
        *_, scale, kernel, executor, precision = options
        requested = Options(scale=scale, kernel=kernel, executor=executor, precision=precision)
        Call.of(like, like, like, requested, reasons=refused)
    left, right = window or (None, None)
    kind = None if score is None else ScoreKind.of_score(score)
    words = options.scale, options.kernel, options.executor, options.precision
    lists = None if mask is None else form_of(mask)
    decode_options = DecodeOptions(left, 0 if options.causal else right, *words, cache.part_keys, kind, lists)
    return _bound_queries(queries, decode_options), q, sink


def _bound_queries(call: _Queries, options: DecodeOptions) -> StepCall:
    """Return the `StepCall` of a call: the cache's kernels if they support it, otherwise one call per sequence.

    Raises
    ------
    UnsupportedProblem
        No kernel supports the call on a cache that is counted on the device, or on any cache.
    """
    cache, q, sink, score = call.cache, call.q, call.sink, call.score
    o = call.out
    if o is None:
        o = namespace(q).empty((*q.shape[:3], cache.rows.v.shape[3]), q.dtype)
    lse = namespace(q).empty(q.shape[:3], accumulator_dtype(q.dtype))
    arrays = {"q": q, "k": cache.rows.k, "v": cache.rows.v, "o": o, "lse": lse, "sink": sink, **cache.rows.scales}
    arrays |= lists_of(call.mask) | ({} if score is None else arrays_of(score))
    names = [] if score is None else list(map(array_name, score.arrays))
    kernels = pass_of(arrays, cache.layout, options)
    step: AttendStep
    if kernels is None and cache.is_counted_on_device:
        raise UnsupportedProblem(not_served(q, options.kernel, sink))
    if kernels is None and call.mask is not None:
        step = ChosenRowsStep(cache, arrays, options, names)
    elif kernels is None:
        step = OwnRowsStep(cache, arrays, options, score, names)
    elif cache.device is None:
        step = SimulatedStep(kernels, arrays, names)
    else:
        step = cache.on_device().decode_step(kernels, arrays, names)
    return cache.steps.keep_decode(arrays, call.out, call.options, score, call.mask, step)


def _row_dtypes(cache: CacheState) -> tuple[np.dtype[np.generic], ...]:
    """Return the dtypes that new rows and queries may have."""
    return UP_TO_FLOAT32 if cache.rows.is_quantized else (cache.rows.dtype,)


def _unfit_reasons(call: _Rows | _Queries) -> Sequence[str]:
    return call.unfit


def _pair_reasons(call: _Rows) -> list[str]:
    k, v = call.k, call.v
    if call.unfit:
        return []
    reasons = [] if k.dtype == v.dtype else [f"v must have k's dtype, {k.dtype}; got {v.dtype}"]
    return reasons + ([] if k.shape[2] == v.shape[2] else [f"v must have k's {k.shape[2]} rows; got {v.shape[2]}"])


def _own_memory_reasons(call: _Rows) -> list[str]:
    own = {"the cache's keys": call.cache.rows.k, "the cache's values": call.cache.rows.v}
    rows = {} if call.unfit else {"k": call.k, "v": call.v}
    return [reason for name, array in rows.items() for reason in overlap_reasons(name, array, own)]


def _writeable_reasons(call: _Rows) -> list[str]:
    if all(not isinstance(array, np.ndarray) or array.flags.writeable for array in call.cache.rows.arrays):
        return []
    return ["the cache must have writeable pages to append to; got read-only arrays: pass copies"]


def _new_reasons(call: _Rows) -> list[str]:
    return _count_reasons(call.cache, call.counts, call.k, call.cache.counted)


def _out_reasons(call: _Queries) -> list[str]:
    if call.unfit:
        return []
    cache, q = call.cache, call.q
    own = {"q": q, "the cache's keys": cache.rows.k, "the cache's values": cache.rows.v}
    return out_reasons(call.out, (*q.shape[:3], cache.rows.v.shape[3]), q, own)


def _capacity_reasons(call: _Queries) -> list[str]:
    if call.unfit or call.q.shape[2] <= call.cache.capacity:
        return []
    return [f"q must have at most as many rows as the capacity, {call.cache.capacity}; got {call.q.shape[2]}"]


def _sink_reasons(call: _Queries) -> list[str]:
    return [] if call.unfit else sink_reasons(call.sink, call.q, call.cache.rows.k)


def _score_reasons(call: _Queries) -> list[str]:
    if call.unfit or call.score is None:
        return []
    return fit_reasons(call.score, call.q, call.cache.rows.k, call.cache.rows.v, call.cache.capacity)


def _mask_reasons(call: _Queries) -> list[str]:
    return [] if call.unfit else mask_reasons(call.cache, call.mask, call.q)


def _query_reasons(call: _Queries) -> list[str]:
    cache, q = call.cache, call.q
    is_fitting = q.ndim == 4 and q.shape[2] <= cache.capacity
    return _count_reasons(cache, call.counts, q, cache.queried if is_fitting else cache.counted)


def _count_reasons(cache: CacheState, counts: Any, rows: Array, counted: Callable[[Any, int], Any]) -> list[str]:
    """Return why counts are not valid numbers of rows; if rows have a wrong shape, any count is accepted."""
    reasons: list[str] = []
    with collecting(reasons):
        counts = as_arrays({"counts": counts})["counts"]
        if cache.device is not None and is_on_device(counts):
            return device_reasons("counts", counts, len(cache.lengths), cache.rows.k)
        counted(counts, int(rows.shape[2]) if rows.ndim == 4 else 2**31)
    return reasons


_APPEND_RULES: tuple[Callable[[_Rows], Sequence[str]], ...] = (
    _unfit_reasons, _pair_reasons, _own_memory_reasons, _writeable_reasons, _new_reasons,
)  # fmt: skip
_ATTENTION_RULES: tuple[Callable[[_Queries], Sequence[str]], ...] = (
    _unfit_reasons, _out_reasons, _capacity_reasons, _sink_reasons, _score_reasons, _mask_reasons,
    _query_reasons,
)  # fmt: skip
