"""Entry points of a cache's calls: arguments are checked once, and all reasons to refuse them are raised together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..arrays import UP_TO_FLOAT32, Array, ShapeDtype, accumulator_dtype, describe, flag_reasons, is_array, namespace
from ..calls._call import Call
from ..errors import collecting, refuse
from ..executors import checks
from ..masks import ChosenBlocks, MaskShape
from ..masks.fields import window_sides
from ..planning.chosen_pages import BLOCK_STEP, ChosenForm
from ..planning.options import Options
from ..plans.conversion import as_arrays
from ._passes import DecodeOptions, SimulatedStep, pass_of
from ._state import CacheState
from .arguments import Counts, out_reasons, overlap_reasons, place_reasons, row_reasons, sink_reasons
from .on_device import device_reasons, is_on_device
from .one_by_one import ChosenRowsStep, OwnRowsStep
from .scoring import ScoreKind, arrays_of, fit_reasons
from .steps import AttendStep, Request, Step, StepCall, lists_of


def checked_rows(cache: CacheState, k: Array, v: Array, counts: Counts | None) -> tuple[Array, Array]:
    """Return new rows as arrays of the cache's library, after checking that they and the counts fit."""
    arrays = as_arrays({"k": k, "v": v}, dict.fromkeys("kv", _row_dtypes(cache)[-1]), like=cache.rows.k)
    k, v = arrays.values()
    leading, own = (len(cache.lengths), cache.rows.k.shape[1], "n"), _own_arrays(cache)
    wanted = {"k": (*leading, cache.rows.k.shape[3]), "v": (*leading, cache.rows.v.shape[3])}
    reasons = row_reasons(arrays, cache.rows.k, wanted, _row_dtypes(cache))
    if not reasons:
        reasons += [] if k.dtype == v.dtype else [f"v must have k's dtype, {k.dtype}; got {v.dtype}"]
        reasons += [] if k.shape[2] == v.shape[2] else [f"v must have k's {k.shape[2]} rows; got {v.shape[2]}"]
        reasons += overlap_reasons("k", k, own) + overlap_reasons("v", v, own)
    if any(isinstance(array, np.ndarray) and not array.flags.writeable for array in cache.rows.arrays):
        reasons.append("the cache must have writeable pages to append to; got read-only arrays: pass copies")
    refuse(reasons + _count_reasons(cache, counts, k, cache.counted))
    if cache.device is None:
        cache.steps.keep_append(k, v, Step(arrays, ("k", "v"), ("k", "v")))
    return k, v


def checked_queries(
    cache: CacheState, request: Request, counts: Counts | None, reasons: Sequence[str]
) -> tuple[StepCall, Request]:
    """Return a new `StepCall` for a call of `attention` that has none in the cache, and the request with known arrays.

    `reasons` are the caller's reasons to refuse the call.
    """
    k, v, dtypes, window = cache.rows.k, cache.rows.v, _row_dtypes(cache), None
    request = request._replace(**as_arrays({"q": request.q, "sink": request.sink}, {"q": dtypes[-1]}, like=k))
    q, out, sink, options, score, mask = request
    reasons = row_reasons({"q": q}, k, {"q": (len(cache.lengths), "num_heads", "n", k.shape[3])}, dtypes) + [*reasons]
    with collecting(reasons):
        window = None if options.window is None else window_sides(options.window)
    reasons += flag_reasons("causal", options.causal)
    if not reasons:
        read = {"q": q, "sink": sink, **({} if score is None else score.arrays), **_own_arrays(cache)}
        read |= lists_of(mask) if type(mask) is ChosenBlocks else {}
        inputs = {name: array for name, array in read.items() if is_array(array)}
        reasons += out_reasons(out, (*q.shape[:3], v.shape[3]), q, inputs)
        if q.shape[2] > cache.capacity:
            reasons.append(f"q must not have more rows than the capacity, {cache.capacity}; got {q.shape[2]}")
        reasons += sink_reasons(sink, q, k)
        reasons += [] if score is None else fit_reasons(score, q, k, v, cache.capacity)
        reasons += _mask_reasons(cache, mask, q)
    is_fitting = q.ndim == 4 and q.shape[2] <= cache.capacity
    reasons += _count_reasons(cache, counts, q, cache.queried if is_fitting else cache.counted)
    *_, scale, kernel, executor, precision = options
    if reasons:
        like = ShapeDtype((1, 1, int(k.shape[3])), dtypes[0])
        requested = Options(scale=scale, kernel=kernel, executor=executor, precision=precision)
        Call.of(like, like, like, requested, reasons=reasons)
    left, right = window or (None, None)
    kind, lists = None if score is None else ScoreKind.of_score(score), None if mask is None else _form_of(mask)
    words = scale, kernel, executor, precision
    decode_options = DecodeOptions(left, 0 if options.causal else right, *words, cache.part_keys, kind, lists)
    return cache.steps.keep_decode(request, _bound_step(cache, request, decode_options)), request


def _bound_step(cache: CacheState, request: Request, options: DecodeOptions) -> AttendStep:
    """Bind a call: to the cache's kernels if they support it, otherwise to one call per sequence.

    Raises
    ------
    UnsupportedProblem
        No kernel supports the call.
    """
    q, o, sink, _, score, mask = request
    if o is None:
        o = namespace(q).empty((*q.shape[:3], cache.rows.v.shape[3]), q.dtype)
    lse = namespace(q).empty(q.shape[:3], accumulator_dtype(q.dtype))
    arrays = {"q": q, "k": cache.rows.k, "v": cache.rows.v, "o": o, "lse": lse, "sink": sink, **cache.rows.scales}
    arrays |= lists_of(mask) | ({} if score is None else arrays_of(score))
    kernels = pass_of(arrays, cache.layout, options)
    if kernels is None:
        return (OwnRowsStep if mask is None else ChosenRowsStep)(cache, arrays, options, request)
    if cache.device is None:
        return SimulatedStep(kernels, arrays, request.names)
    return cache.on_device().decode_step(kernels, arrays, request.names)


def _own_arrays(cache: CacheState) -> dict[str, Array]:
    """Return the arrays that no array of a call may overlap, by their names in messages."""
    names = "keys", "values", "scales of keys", "scales of values", "page bounds"
    rows = cache.rows
    arrays = zip(names, (rows.k, rows.v, rows.k_scale, rows.v_scale, rows.key_bounds))
    return {f"the cache's {name}": array for name, array in arrays if array is not None}


def _row_dtypes(cache: CacheState) -> tuple[np.dtype[np.generic], ...]:
    """Return the dtypes that new rows and queries may have."""
    return UP_TO_FLOAT32 if cache.rows.is_quantized else (cache.rows.dtype,)


def _count_reasons(
    cache: CacheState, counts: Counts | None, rows: Array, counted: Callable[[Counts | None, int], Counts]
) -> list[str]:
    """Return why counts are not valid numbers of rows; if rows have a wrong shape, any count is accepted."""
    reasons: list[str] = []
    with collecting(reasons):
        counts = as_arrays({"counts": counts})["counts"]
        if cache.device is not None and is_on_device(counts):
            return device_reasons("counts", counts, len(cache.lengths), cache.rows.k)
        counted(counts, int(rows.shape[2]) if rows.ndim == 4 else 2**31)
    return reasons


def _form_of(chosen: ChosenBlocks) -> ChosenForm:
    """Return the form of a mask's lists: everything except their contents."""
    counts = None if chosen.counts is None else np.dtype(chosen.counts.dtype)
    blocks = chosen.blocks
    return ChosenForm(chosen.block, chosen.num_lists, int(blocks.shape[-1]), int(blocks.dtype.itemsize), counts)


def _mask_reasons(cache: CacheState, mask: ChosenBlocks | None, q: Array) -> list[str]:
    """Return why a mask cannot be used for queries [batch, num_heads, n, head_dim] of a cache."""
    if mask is None:
        return []
    if type(mask) is not ChosenBlocks:
        return [
            "mask must be a masks.ChosenBlocks with blocks of each sequence's positions, or None; got "
            f"{describe(mask)}: pass causal= and window= for other masks"
        ]
    reasons: list[str] = []
    if mask.sequences is not None:
        reasons.append(
            "mask must not have sequences, since block numbers of a cache count from each sequence's first position; "
            f"got sequences={mask.sequences}: leave it out"
        )
    with collecting(reasons):
        mask.require_heads(int(q.shape[1]), int(cache.rows.k.shape[1]))
        mask.resolve(MaskShape((int(q.shape[0]),), int(q.shape[1]), int(q.shape[2]), cache.capacity))
    for name, array in lists_of(mask).items():
        reasons += place_reasons("counts" if name == "block_counts" else name, array, cache.rows.k)
    page_size, block = cache.pages.page_size, mask.block
    if cache.is_paged and (block % BLOCK_STEP or block % page_size and page_size % block):
        reasons.append(
            f"mask must have blocks that are multiples or divisors of a page of {page_size} positions, in multiples of "
            f"{BLOCK_STEP}; got block={block}"
        )
    if checks.is_on() and not reasons:
        with collecting(reasons):
            mask.require_numbers(cache.capacity)
    return reasons
