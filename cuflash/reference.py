"""The specification of attention and its gradients: full matrices, and only NumPy.

>>> import numpy as np
>>> q = np.zeros((2, 1))
>>> k = np.zeros((3, 1))
>>> v = np.array([[1.0], [2.0], [6.0]])
>>> causal = np.array([[1, 0, 0], [1, 1, 0]], bool)
>>> o, lse = attention(q, k, v, mask=causal)
>>> o.ravel().tolist(), np.exp(lse).round(9).tolist()
([1.0, 1.5], [1.0, 2.0])

This module follows the papers and is written to be correct, not fast: memory is O(seqlen_q seqlen_kv). Arithmetic is
float64 for all inputs, also for a float64 sink with float32 q, which `cuflash.attention` casts to float32
(`error_bound` includes that rounding). Long double and complex arguments are not converted: long double distinguishes
rounding from errors, and complex arguments differentiate the forward pass by a complex step of 1e-20. `numpy.errstate`
decides which warnings are raised. The module must not use any of the tiled code, since the two check each other.

NaN and infinities follow the rule of docs/semantics.md. The whole matrix counts as one partial block: P and dS are 0 at
masked positions, and 0 times a NaN or infinity of v, k, q or do at these positions is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array, as_number, describe, is_number
from .errors import UnsupportedProblem
from .keywords import explains_keywords

__all__ = ["attention", "attention_hvp", "attention_jvp", "attention_vjp"]


def __dir__() -> list[str]:
    return __all__


@np.errstate(invalid="ignore")
@explains_keywords
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    scale: float | None = None,
    sink: Array | None = None,
    *,
    score: Callable[[Array], Array] | None = None,
    weight_factors: Array | None = None,
    return_weights: bool = False,
) -> tuple[Array, ...]:
    """Compute softmax attention and the log-sum-exp of its scores.

    Parameters
    ----------
    q : array [*batch, num_heads, seqlen_q, head_dim], or [seqlen_q, head_dim]
        Queries.
    k : array [*batch, num_kv_heads, seqlen_kv, head_dim], or [seqlen_kv, head_dim]
        Keys.
    v : array [*batch, num_kv_heads, seqlen_kv, value_dim], or [seqlen_kv, value_dim]
        Values. Axes before the heads broadcast. Query head h reads key/value head h // (num_heads / num_kv_heads).
    mask : bool array, optional
        True = attend; broadcasts to [*batch, num_heads, seqlen_q, seqlen_kv].
    scale : float, optional
        The factor of q . k. Default: 1 / sqrt(head_dim).
    sink : array, optional
        An additional logit of every row of a head, without a value; broadcasts to [*batch, num_heads], or to [1] for
        2-D arguments.
    score : callable, optional
        Computes final scores from scale q k^T, an array [*batch, num_heads, seqlen_q, seqlen_kv] with 1 head for 2-D
        arguments. Its results at masked positions are ignored.
    weight_factors : array, optional
        Factors of P before the product with v. For dropout: 0 if a weight is dropped, else 1 / (1 - p). Broadcasts to
        [*batch, num_heads, seqlen_q, seqlen_kv].
    return_weights : bool
        Also return the weights, for small problems.

    Returns
    -------
    o : array [*batch, num_heads, seqlen_q, value_dim], or [seqlen_q, value_dim]
        The output, softmax(scale q k^T) v. A row with no key is 0.
    lse : array [*batch, num_heads, seqlen_q], or [seqlen_q]
        Natural logarithm of the sum of exp(scale q k^T) over the row's keys plus exp(sink). For a row with no key, it
        is the sink, or -inf without a sink.
    weights : array [*batch, num_heads, seqlen_q, seqlen_kv], or [seqlen_q, seqlen_kv]
        The factors of v, softmax(scale q k^T) times `weight_factors`; only with `return_weights`. A row sums to 1
        without a sink and factors; a row with no key is 0.

    Raises
    ------
    TypeError
        The mask is not boolean, or `return_weights` is not a bool.
    UnsupportedProblem
        The shapes of q, k and v do not fit each other.

    Notes
    -----
    S = scale Q K^T, P = softmax(S), O = P V: FlashAttention (arXiv 2205.14135), section 2.2; the shift by the row
    maximum and L = m + log(l) are FlashAttention-2's (arXiv 2307.08691, section 2.3 and algorithm 1).

    Examples
    --------
    >>> import numpy as np
    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> o, lse = attention(q, k, np.eye(2), scale=np.log(3.0))
    >>> o.round(9).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    >>> np.exp(lse).round(9).tolist()
    [4.0, 4.0]
    >>> o, lse, weights = attention(q, k, np.eye(2), scale=np.log(3.0), return_weights=True)
    >>> weights.round(9).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    if not isinstance(return_weights, (bool, np.bool)):
        raise TypeError(f"return_weights must be True or False; got {describe(return_weights)}")
    probability, lse, _ = _softmax(scores(q, k, v, scale), mask, sink, score)
    weights = _times(probability, weight_factors)
    o = weights @ expand_heads(widened(v), weights.shape[-3])
    o = np.where(np.isnan(lse)[..., None], np.nan, o)  # a sink that is NaN or +inf, in rows with no key too
    results = (o, lse, weights) if return_weights else (o, lse)
    return results if np.ndim(q) > 2 else tuple(each[0] for each in results)


@np.errstate(invalid="ignore")
@explains_keywords
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    dlse: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    sink: Array | None = None,
    *,
    score: Callable[[Array], Array] | None = None,
    score_slope: Callable[[Array], Array] | None = None,
    weight_factors: Array | None = None,
) -> tuple[Array, ...]:
    """Compute the gradients of sum(do * o) + sum(dlse * lse).

    Parameters
    ----------
    q, k, v : arrays
        As in `attention`.
    do : array
        The gradient of o, shaped as `attention` returns o.
    dlse : array, optional
        The gradient of lse, shaped as `attention` returns lse; zero by default.
    mask, scale, sink, score : optional
        As in `attention`.
    score_slope : callable, optional
        The derivative of `score`, element by element.
    weight_factors : array, optional
        As in `attention`.

    Returns
    -------
    dq : array
        The gradient of q, shaped as q. Rows with no key contribute nothing to any gradient.
    dk : array
        The gradient of k, shaped as k. Gradients are summed over the query heads that share a key/value head, and over
        the axes that were broadcast.
    dv : array
        The gradient of v, shaped as v.
    dsink : array
        The gradient of the sink, shaped as sink; only if there is a sink.

    Notes
    -----
    FlashAttention-2 (arXiv 2307.08691), section 2.2 and algorithm 2::

        dV = P^T dO     dP = dO V^T     D = rowsum(dO * O)     dS = P * (dP - D)
        dQ = scale dS K     dK = scale dS^T Q

    with D replaced by D - dlse, since the derivative of a row's lse with respect to its scores is P. A sink has
    P = exp(sink - lse) and, having no value, dP = 0; its gradient is the sum of its dS over the rows.
    With a score function, dS is multiplied by its slope. Weight factors multiply P in the formula of dV, and dP.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 1)), np.array([[1.0], [3.0]]), np.array([[0.0], [8.0]])
    >>> dq, dk, dv = attention_vjp(q, k, v, np.ones((1, 1)))
    >>> dq.tolist(), dk.tolist(), dv.tolist()
    ([[4.0]], [[0.0], [0.0]], [[0.5], [0.5]])
    """
    raw = scores(q, k, v, scale)
    probability, lse, allowed = _softmax(raw, mask, sink, score)
    num_heads = probability.shape[-3]
    keys, values = (expand_heads(widened(x), num_heads) for x in (k, v))
    queries, do = with_heads(widened(q)), with_heads(_alike("do", widened(do), _shape_of_o(q, v, probability)))

    dropped = _times(probability, weight_factors)
    o = dropped @ values
    d = np.where(allowed.any(axis=-1, keepdims=True), np.sum(do * o, axis=-1, keepdims=True), 0)
    if dlse is not None:
        _alike("dlse", dlse, _shape_of_o(q, v, probability)[:-1])
        d = d - np.where(np.isneginf(lse[..., None]), 0, widened(dlse).reshape(d.shape))
    dp = _times(do @ np.swapaxes(values, -1, -2), weight_factors)
    ds = np.where(allowed, probability * (dp - d), 0)
    if score_slope is not None:  # dS is 0 if P is 0, even if the slope is infinite or NaN
        ds = np.where(probability == 0, 0, ds * score_slope(raw))

    softmax_scale = default_scale(q, scale)
    dq = softmax_scale * (ds @ keys)
    dk = softmax_scale * (np.swapaxes(ds, -1, -2) @ queries)
    dv = np.swapaxes(dropped, -1, -2) @ do
    gradients = sum_to(dq, np.shape(q)), sum_heads_to(dk, np.shape(k)), sum_heads_to(dv, np.shape(v))
    if sink is None:
        return gradients
    logit = np.atleast_1d(widened(sink))
    terms = np.where(np.isneginf(logit)[..., None], 0, np.exp(logit[..., None] - lse) * (0 - d[..., 0]))
    return *gradients, sum_to(terms.sum(axis=-1), logit.shape).reshape(np.shape(sink))


@np.errstate(invalid="ignore")
@explains_keywords
def attention_jvp(
    q: Array,
    k: Array,
    v: Array,
    q_dot: Array | None = None,
    k_dot: Array | None = None,
    v_dot: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    sink: Array | None = None,
    *,
    sink_dot: Array | None = None,
    score: Callable[[Array], Array] | None = None,
    score_tangent: Callable[[Array, Array], Array] | None = None,
    weight_factors: Array | None = None,
) -> tuple[Array, Array]:
    """Compute the tangents of o and lse.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention`.
    q_dot, k_dot, v_dot : arrays, optional
        Tangents of q, k and v, with their shapes; zero by default.
    mask, scale, sink : optional
        As in `attention`.
    sink_dot : array, optional
        The tangent of the sink, with its shape; zero by default.
    score : callable, optional
        As in `attention`.
    score_tangent : callable, optional
        Computes the tangents of final scores from scale q k^T and its tangents.
    weight_factors : array, optional
        As in `attention`.

    Returns
    -------
    o_dot : array
        The tangent of o, shaped as o; 0 in rows with no key.
    lse_dot : array
        The tangent of lse, shaped as lse; in rows with no key it is the tangent of the sink, or 0 without a sink.

    Notes
    -----
    ::

        S_dot = scale (Q_dot K^T + Q K_dot^T)     mu = rowsum(P S_dot) + P_sink sink_dot
        O_dot = (P * (S_dot - mu)) V + P V_dot    L_dot = mu

    With a score function, S_dot stands for the tangents of final scores. Weight factors multiply P in its products with
    V and V_dot.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 1)), np.array([[1.0], [3.0]]), np.array([[0.0], [8.0]])
    >>> o_dot, lse_dot = attention_jvp(q, k, v, q_dot=np.ones((1, 1)))
    >>> o_dot.tolist(), lse_dot.tolist()
    ([[4.0]], [2.0])
    """
    dots, sinks, functions = (q_dot, k_dot, v_dot), (sink, sink_dot), (score, score_tangent)
    pushed = _Pushed.of(q, k, v, dots, mask, scale, sinks, functions, weight_factors)
    return (pushed.o_dot, pushed.lse_dot) if np.ndim(q) > 2 else (pushed.o_dot[0], pushed.lse_dot[0])


@np.errstate(invalid="ignore")
@explains_keywords
def attention_hvp(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    q_dot: Array | None = None,
    k_dot: Array | None = None,
    v_dot: Array | None = None,
    do_dot: Array | None = None,
    dlse: Array | None = None,
    dlse_dot: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    sink: Array | None = None,
    *,
    sink_dot: Array | None = None,
    score: Callable[[Array], Array] | None = None,
    score_tangent: Callable[[Array, Array], Array] | None = None,
    score_slope: Callable[[Array], Array] | None = None,
    score_slope_tangent: Callable[[Array, Array], Array] | None = None,
    weight_factors: Array | None = None,
) -> tuple[Array, ...]:
    """Compute the tangents of the results of `attention_vjp`.

    Parameters
    ----------
    q, k, v, do : arrays
        As in `attention_vjp`.
    q_dot, k_dot, v_dot, do_dot : arrays, optional
        Tangents of q, k, v and do, with their shapes; zero by default.
    dlse : array, optional
        As in `attention_vjp`.
    dlse_dot : array, optional
        The tangent of dlse, with its shape; zero by default.
    mask, scale, sink : optional
        As in `attention_vjp`.
    sink_dot : array, optional
        The tangent of the sink, with its shape; zero by default.
    score : callable, optional
        As in `attention_vjp`.
    score_tangent : callable, optional
        As in `attention_jvp`.
    score_slope : callable, optional
        As in `attention_vjp`.
    score_slope_tangent : callable, optional
        Computes the tangents of the slopes from scale q k^T and its tangents.
    weight_factors : array, optional
        As in `attention_vjp`.

    Returns
    -------
    dq_dot, dk_dot, dv_dot : array
        The tangents of the gradients of q, k and v, with their shapes.
    dsink_dot : array
        The tangent of the sink's gradient, shaped as sink; only if there is a sink.

    Notes
    -----
    With dots for tangents, D = rowsum(dO * O) - dlse, and the notation of `attention_jvp` and `attention_vjp`::

        P_dot = P * (S_dot - L_dot)               D_dot = rowsum(dO_dot * O + dO * O_dot) - dlse_dot
        dP_dot = dO_dot V^T + dO V_dot^T          dS_dot = P_dot * (dP - D) + P * (dP_dot - D_dot)
        dQ_dot = scale (dS_dot K + dS K_dot)      dK_dot = scale (dS_dot^T Q + dS^T Q_dot)
        dV_dot = P_dot^T dO + P^T dO_dot

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.zeros((1, 1)), np.array([[1.0], [3.0]]), np.array([[0.0], [8.0]])
    >>> dq, dk, dv = attention_hvp(q, k, v, np.ones((1, 1)), q_dot=np.ones((1, 1)))
    >>> dq.tolist(), dk.tolist(), dv.tolist()
    ([[0.0]], [[-2.0], [2.0]], [[-0.5], [0.5]])
    """
    dots, sinks, functions = (q_dot, k_dot, v_dot), (sink, sink_dot), (score, score_tangent)
    pushed = _Pushed.of(q, k, v, dots, mask, scale, sinks, functions, weight_factors)
    probability, lse, allowed = pushed.probability, pushed.lse, pushed.allowed
    q_and_dot, k_and_dot, v_and_dot = pushed.q_and_dot, pushed.k_and_dot, pushed.v_and_dot

    has_key, has_lse = allowed.any(axis=-1, keepdims=True), ~np.isneginf(lse[..., None])
    shape = _shape_of_o(q, v, probability)
    for name, x in {"do": do, "do_dot": do_dot, "dlse": dlse, "dlse_dot": dlse_dot}.items():
        _alike(name, x, shape[:-1] if "lse" in name else shape)
    do, do_dot = (np.where(has_key, x, 0) for x in _with_dot(do, do_dot, pushed.o.shape[-3]))
    dlse, dlse_dot = (
        0 if x is None else np.where(has_lse, widened(x).reshape(has_lse.shape), 0) for x in (dlse, dlse_dot)
    )
    d = np.sum(do * pushed.o, axis=-1, keepdims=True) - dlse
    d_dot = np.sum(do_dot * pushed.o + do * pushed.o_dot, axis=-1, keepdims=True) - dlse_dot
    values, values_dot = (np.swapaxes(x, -1, -2) for x in v_and_dot)
    gap = np.where(allowed, _times(do @ values, weight_factors) - d, 0)
    gap_dot = np.where(allowed, _times(do_dot @ values + do @ values_dot, weight_factors) - d_dot, 0)
    ds, ds_dot = probability * gap, pushed.probability_dot * gap + probability * gap_dot
    if score_slope is not None:
        slope = score_slope(pushed.raw)
        slope_dot = 0 if score_slope_tangent is None else score_slope_tangent(pushed.raw, pushed.raw_dot)
        ds, ds_dot = (np.where(probability == 0, 0, x) for x in (slope * ds, slope * ds_dot + slope_dot * ds))

    softmax_scale, turned, turned_dot = default_scale(q, scale), np.swapaxes(ds, -1, -2), np.swapaxes(ds_dot, -1, -2)
    dq = softmax_scale * (ds_dot @ k_and_dot[0] + ds @ k_and_dot[1])
    dk = softmax_scale * (turned_dot @ q_and_dot[0] + turned @ q_and_dot[1])
    weights, weights_dot = (
        np.swapaxes(_times(x, weight_factors), -1, -2) for x in (probability, pushed.probability_dot)
    )
    dv = weights_dot @ do + weights @ do_dot
    gradients = sum_to(dq, np.shape(q)), sum_heads_to(dk, np.shape(k)), sum_heads_to(dv, np.shape(v))
    if sink is None:
        return gradients
    p_sink = _sink_weight(sink, lse)
    move = 0 if sink_dot is None else np.atleast_1d(widened(sink_dot))[..., None]
    is_none = np.isneginf(np.atleast_1d(widened(sink)))[..., None]
    terms = -np.where(is_none, 0, p_sink * ((move - pushed.lse_dot) * d[..., 0] + d_dot[..., 0]))
    return *gradients, sum_to(terms.sum(axis=-1), np.atleast_1d(sink).shape).reshape(np.shape(sink))


class _Pushed(NamedTuple):
    """Attention and its tangents on full matrices: operands with their tangents, k and v expanded to query heads."""

    q_and_dot: tuple[Array, Array]
    k_and_dot: tuple[Array, Array]
    v_and_dot: tuple[Array, Array]
    raw: Array
    raw_dot: Array
    allowed: Array
    probability: Array
    probability_dot: Array
    lse: Array
    lse_dot: Array
    o: Array
    o_dot: Array

    @classmethod
    def of(
        cls, q: Array, k: Array, v: Array, dots: Sequence[Array | None], mask: Array | None, scale: float | None,
        sinks: Sequence[Array | None], functions: Sequence[Callable[..., Array] | None], factors: Array | None,
    ) -> _Pushed:  # fmt: skip
        (sink, sink_dot), (score, score_tangent) = sinks, functions
        raw = scores(q, k, v, scale)
        for name, x, dot in zip(("q_dot", "k_dot", "v_dot"), (q, k, v), dots):
            _alike(name, dot, np.shape(x))
        probability, lse, allowed = _softmax(raw, mask, sink, score)
        num_heads = probability.shape[-3]
        q_and_dot, k_and_dot, v_and_dot = (_with_dot(x, dot, num_heads) for x, dot in zip((q, k, v), dots))
        raw_dot = default_scale(q, scale) * (
            q_and_dot[1] @ np.swapaxes(k_and_dot[0], -1, -2) + q_and_dot[0] @ np.swapaxes(k_and_dot[1], -1, -2)
        )
        raw_dot = np.broadcast_to(raw_dot, raw.shape)
        moved = raw_dot if score_tangent is None else np.broadcast_to(score_tangent(raw, raw_dot), raw.shape)
        moved = np.where(allowed, moved, 0)
        if score is not None:  # tangents are 0 if P is 0, even if that of the score is infinite or NaN
            moved = np.where(probability == 0, 0, moved)
        p_sink = 0 if sink is None else _sink_weight(sink, lse)
        of_sink = np.zeros(1) if sink_dot is None else np.atleast_1d(widened(sink_dot))[..., None]
        is_sink = False if sink is None else ~np.isneginf(np.atleast_1d(widened(sink)))[..., None]

        def mean_of(change: Array, of_sink: Array) -> Array:
            """Return the mean of the tangents of a row's scores and of the sink by weight."""
            return np.sum(probability * change, axis=-1) + np.where(is_sink, p_sink * of_sink, 0)

        # The mean of the differences from the mean corrects it, so tangents that all keys share cancel without error.
        mean = mean_of(moved, of_sink)
        rest = moved - mean[..., None]
        correction = np.where(np.isfinite(mean), mean_of(rest, of_sink - mean), 0)
        lse_dot = np.where(np.isneginf(lse), 0, np.where(np.isnan(lse), np.nan, mean + correction))
        probability_dot = np.where(allowed, probability * (rest - correction[..., None]), 0)
        weights, weights_dot = (_times(x, factors) for x in (probability, probability_dot))
        o = weights @ v_and_dot[0]
        o_dot = weights_dot @ v_and_dot[0] + weights @ v_and_dot[1]
        o_dot = np.where(np.isnan(lse[..., None]), np.nan, np.where(np.isneginf(lse[..., None]), 0, o_dot))
        sides, softmax = (q_and_dot, k_and_dot, v_and_dot), (allowed, probability, probability_dot)
        return cls(*sides, raw, raw_dot, *softmax, lse, lse_dot, o, o_dot)


def _with_dot(x: Array, dot: Array | None, num_heads: int) -> tuple[Array, Array]:
    """Expand an array and its tangent, zeros by default, to a number of heads."""
    dot = np.zeros(np.shape(x)) if dot is None else dot
    return expand_heads(widened(x), num_heads), expand_heads(widened(dot), num_heads)


def _sink_weight(sink: Array, lse: Array) -> Array:
    """Return P of the sink in each row; 0 if the sink is -inf."""
    logit = np.atleast_1d(widened(sink))[..., None]
    is_none = np.isneginf(logit) | np.isneginf(lse)
    return np.where(is_none, 0, np.exp(np.where(is_none, 0, logit - np.where(np.isneginf(lse), 0, lse))))


def _times(x: Array, factors: Array | None) -> Array:
    """Multiply P, or dP, by factors; the product is 0 if the factor is 0, even if x is infinite or NaN."""
    if factors is None:
        return x
    factors = _fitting("weight_factors", np.asarray(factors), x.shape)
    return np.where(factors == 0, 0, x * factors)


def scores(q: Array, k: Array, v: Array, scale: float | None) -> Array:
    """Compute scale q k^T [*batch, num_heads, seqlen_q, seqlen_kv], broadcast against the batch axes of v."""
    _refuse_shapes(*(tuple(np.shape(x)) for x in (q, k, v)))
    queries = with_heads(widened(q))
    keys = expand_heads(widened(k), queries.shape[-3])
    score = default_scale(q, scale) * (queries @ np.swapaxes(keys, -1, -2))
    batch = np.broadcast_shapes(score.shape[:-3], np.shape(v)[:-3])
    return np.broadcast_to(score, (*batch, *score.shape[-3:]))


def _refuse_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    got = f"got shapes {q}, {k} and {v}"
    if min(len(q), len(k), len(v)) < 2 or (len(q) == 2) != (len(k) == 2):
        layouts = "(*batch, heads, length, dim), or all of them (length, dim)"
        raise UnsupportedProblem(f"q, k and v must be arrays of shape {layouts}; {got}")
    of_q, of_k, of_v = (shape[-3] if len(shape) > 2 else 1 for shape in (q, k, v))
    if q[-1] != k[-1] or k[-2] != v[-2] or of_v not in (1, of_k) or of_q != of_k * (of_q // max(of_k, 1)):
        rule = "k must have q's head_dim and a divisor of its heads, and v must have k's heads, or one, and its length"
        raise UnsupportedProblem(f"{rule}; {got}")


def _shape_of_o(q: Array, v: Array, probability: Array) -> tuple[int, ...]:
    shape = (*probability.shape[:-1], np.shape(v)[-1])
    return shape if np.ndim(q) > 2 else shape[1:]


def _alike(name: str, x: Array | None, shape: Sequence[int]) -> Array | None:
    """Return an array; refuse one with another shape, which could broadcast."""
    if x is not None and np.shape(x) != tuple(shape):
        raise UnsupportedProblem(f"{name} must have shape {tuple(shape)}; got {describe(x)}")
    return x


def _fitting(name: str, x: Array, shape: Sequence[int]) -> Array:
    """Return an array; refuse one that does not broadcast to a shape."""
    missing = len(shape) - np.ndim(x)
    if missing < 0 or any(extent not in (1, wanted) for extent, wanted in zip(np.shape(x), shape[missing:])):
        raise UnsupportedProblem(f"{name} must broadcast to {tuple(shape)}; got shape {np.shape(x)}")
    return x


def _softmax(
    raw: Array, mask: Array | None, sink: Array | None, change: Callable[[Array], Array] | None
) -> tuple[Array, Array, Array]:
    """Return P [*batch, num_heads, seqlen_q, seqlen_kv], lse [*batch, num_heads, seqlen_q], and the expanded mask."""
    score = raw if change is None else np.broadcast_to(change(raw), raw.shape)
    allowed = allowed_of(mask, score.shape)
    # Take the maximum of the real parts: any shift gives the same softmax, so it does not affect a complex step.
    row_max = np.max(score.real, axis=-1, keepdims=True, initial=-np.inf, where=allowed)
    logit: Array = np.float64(-np.inf)
    if sink is not None:
        logit = np.atleast_1d(_fitting("sink", widened(sink), score.shape[:-2]))[..., None, None]
    row_max = np.maximum(row_max, logit.real)
    row_max = np.where(np.isneginf(row_max), 0, row_max)  # a row without a score above -inf; -inf - -inf would be NaN
    weight = np.where(allowed, np.exp(np.where(allowed, score - row_max, 0)), 0)
    row_sum = np.sum(weight, axis=-1, keepdims=True) + np.exp(logit - row_max)
    empty = row_sum == 0  # otherwise the greatest score, or the sink, contributes 1
    row_sum_or_one = np.where(empty, 1, row_sum)
    lse = np.where(empty, -np.inf, row_max + np.log(row_sum_or_one))
    return np.where(allowed, weight / row_sum_or_one, 0), lse[..., 0], allowed


def widened(x: Array) -> Array:
    """Convert an array at least to float64, or to complex128 if it is complex; long double is kept."""
    array = np.asarray(x)
    return array.astype(np.result_type(array.dtype, np.float64))


def with_heads(x: Array) -> Array:
    """Add a heads axis of length 1 to a 2-D argument; return others unchanged."""
    return x[None] if x.ndim == 2 else x


def expand_heads(x: Array, num_heads: int) -> Array:
    """Repeat each key/value head for the consecutive query heads that read it."""
    headed = with_heads(x)
    num_kv_heads = headed.shape[-3]
    return headed if num_kv_heads == num_heads else np.repeat(headed, num_heads // num_kv_heads, axis=-3)


def sum_heads_to(gradient: Array, shape: Sequence[int]) -> Array:
    """Sum over each group of heads, then over leading axes: the transpose of `expand_heads` and of broadcasting."""
    num_kv_heads = shape[-3] if len(shape) > 2 else 1
    *batch, num_heads, rows, columns = gradient.shape
    group = num_heads // num_kv_heads if num_kv_heads else 1
    return sum_to(gradient.reshape(*batch, num_kv_heads, group, rows, columns).sum(axis=-3), shape)


def sum_to(gradient: Array, shape: Sequence[int]) -> Array:
    """Sum over broadcast axes: the transpose of broadcasting `shape` to the gradient's shape."""
    missing = gradient.ndim - len(shape)
    summed = gradient.sum(axis=tuple(range(missing))) if missing > 0 else gradient
    stretched = tuple(axis for axis, extent in enumerate(shape) if extent == 1 != summed.shape[axis])
    return summed.sum(axis=stretched, keepdims=True)


def allowed_of(mask: Array | None, shape: Sequence[int]) -> Any:
    """Return the mask as a full bool array; all True without a mask."""
    if hasattr(mask, "toarray"):
        raise TypeError(f"mask must be a boolean array, True = attend; got {describe(mask)}: pass mask.toarray()")
    allowed = np.asarray(True if mask is None else mask)
    if allowed.dtype != np.bool_:
        raise TypeError(f"mask must be boolean, True = attend; got dtype {allowed.dtype}")
    return np.broadcast_to(_fitting("mask", allowed, shape), shape)


def default_scale(q: Array, scale: float | None) -> float:
    if scale is None:
        return 1.0 / math.sqrt(np.shape(q)[-1])
    if not is_number(as_number(scale)):
        raise TypeError(f"scale must be a number or None; got {describe(scale)}")
    return scale
