"""Bounds on dq, dk, dv and dsink, from the exact forward pass and its tolerances."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..reference import sum_heads_to, sum_to
from ..scores.roundoff import ScoreErrors
from .forward import Forward, excess_of
from .rounding import SECOND_ORDER, Rounding, limits, rounded_up, roundoff, underflow


def gradient_tolerances(
    queries: Array,
    keys: Array,
    values: Array,
    do: Array,
    dlse: Array | float,
    scale: float,
    model: Rounding,
    forward: Forward,
    shapes: tuple[tuple[int, ...], ...],
) -> tuple[Array, Array, list[Array]]:
    """Return the gradient of final scores, its error, and the bounds on dq, dk and dv in the shapes of q, k and v."""
    ua, wa = model.ua, model.wa
    p, seqlen_q, seqlen_kv = forward.p, queries.shape[-2], keys.shape[-2]
    size = math.prod(p.shape[:-2])
    # How many rows add up to one row of each gradient.
    terms_q, terms_k, terms_v = (
        rows * (size // max(1, math.prod(shape[:-2]))) for rows, shape in zip((seqlen_kv, seqlen_q, seqlen_q), shapes)
    )

    p_excess, g, e_g = gap_of(values, do, dlse, model, forward)
    p_larger, abs_do = p + p_excess, np.abs(do)
    z, z_rounding = forward.weights.factors, forward.weights.roundoffs * ua

    ds = p * g
    is_allowed = ~np.isneginf(forward.log_p)
    g_larger = np.abs(g) + e_g
    e_ds = (p_excess + np.minimum(p, wa) + 2 * ua * p_larger) * g_larger + p * e_g + wa
    df, e_df = ds, np.where(is_allowed, e_ds, 0)
    ds, e_ds = (df, e_df) if forward.final is None else _through_slope(forward.final, df, e_df, model)
    ds_larger = np.abs(ds) + e_ds
    t_ds = e_ds + model.up * ds_larger + np.minimum(ds_larger, model.wp)
    t_ds = np.where(np.abs(ds) + SECOND_ORDER * t_ds > model.largest_product, np.inf, t_ds)

    tol_dq = abs(scale) * ((t_ds + ((model.k(terms_q) + 8) * ua + model.t) * ds_larger) @ np.abs(keys))
    transposed = np.swapaxes(t_ds + ((model.k(terms_k) + 8) * ua + model.t) * ds_larger, -1, -2)
    tol_dk = abs(scale) * (transposed @ np.abs(queries))
    lost = np.minimum(p, max(model.wp, wa))
    weights = z * (p_excess + lost + (model.up + model.t + (model.k(terms_v) + 2) * ua + z_rounding) * p_larger)
    tol_dv = np.swapaxes(np.where(is_allowed, weights, 0), -1, -2) @ abs_do

    q_shape, k_shape, v_shape = shapes
    exact = (
        sum_to(scale * (ds @ keys), q_shape),
        sum_heads_to(scale * (np.swapaxes(ds, -1, -2) @ queries), k_shape),
        sum_heads_to(np.swapaxes(z * p, -1, -2) @ do, v_shape),
    )
    tolerances = sum_to(tol_dq, q_shape), sum_heads_to(tol_dk, k_shape), sum_heads_to(tol_dv, v_shape)
    underflows = ((1 + abs(scale)) * terms * wa + model.w for terms in (terms_q, terms_k, terms_v))
    return df, e_df, [
        rounded_up(tolerance + model.u * np.abs(gradient) + underflow, gradient, model)
        for tolerance, gradient, underflow in zip(tolerances, exact, underflows)
    ]


def gap_of(
    values: Array, do: Array, dlse: Array | float, model: Rounding, forward: Forward
) -> tuple[Array, Array, Array]:
    """Return the error of P recomputed from lse, and dP - D + dlse with its error."""
    ua, wa, p, o, value_dim = model.ua, model.wa, forward.p, forward.o, values.shape[-1]
    eta = forward.eta + forward.tol_lse + 4 * ua * (np.abs(forward.score) + np.abs(forward.lse))
    p_excess = excess_of(forward.log_p, p, eta)

    abs_do = np.abs(do)
    z, z_rounding = forward.weights.factors, forward.weights.roundoffs * ua
    dp = z * (do @ np.swapaxes(values, -1, -2))
    d = np.sum(do * o, axis=-1, keepdims=True)
    k_dv = model.k(value_dim) + 2
    e_dp = (k_dv * ua + model.t + z_rounding) * (abs_do @ np.swapaxes(np.abs(values), -1, -2)) + value_dim * wa
    e_dp = z * e_dp
    e_d = np.sum(abs_do * (forward.tol_o + k_dv * ua * (np.abs(o) + forward.tol_o)), axis=-1, keepdims=True)
    g = dp - d + dlse
    e_g = e_dp + e_d + value_dim * wa + 2 * ua * (np.abs(dp) + np.abs(d) + np.abs(dlse))
    return p_excess, g, e_g


def _through_slope(final: ScoreErrors, df: Array, e_df: Array, model: Rounding) -> tuple[Array, Array]:
    """Return dS and its error from the gradient of final scores; both are 0 if that gradient is exactly 0."""
    larger, slope = np.abs(df) + e_df, np.abs(final.slope)
    e_ds = slope * e_df + final.e_slope * larger + 2 * model.ua * slope * larger + model.wa
    is_none = larger == 0
    return np.where(is_none, 0, df * final.slope), np.where(is_none, 0, e_ds)


def delta_of(
    values: Array, do: Array, dlse: Array | float, model: Rounding, forward: Forward
) -> tuple[Array, Array]:
    """Return delta = D - dlse and its error, [..., rows, 1]."""
    ua, wa, value_dim = model.ua, model.wa, values.shape[-1]
    k_dv = model.k(value_dim) + 2
    d = np.sum(do * forward.o, axis=-1, keepdims=True)
    abs_o, abs_do = np.abs(forward.o), np.abs(do)
    e_d = np.sum(abs_do * (forward.tol_o + k_dv * ua * (abs_o + forward.tol_o)), axis=-1, keepdims=True)
    delta, e_delta = d - dlse, e_d + 2 * ua * (np.abs(d) + np.abs(dlse)) + value_dim * wa
    return delta, e_delta


def sink_tolerance(
    values: Array, do: Array, dlse: Array | float, logit: Array, e_logit: Array, model: Rounding, forward: Forward,
    sink: Array,
) -> Array:  # fmt: skip
    """Return the bound on dsink, in the shape of the sink, whose logits have the error `e_logit`."""
    ua, wa = model.ua, model.wa
    p_sink = np.exp(forward.log_p_sink)
    delta, e_delta = delta_of(values, do, dlse, model, forward)
    larger = np.abs(delta) + e_delta

    abs_sink = np.abs(np.where(np.isneginf(logit), 0, logit))
    eta = forward.tol_lse + e_logit + 4 * ua * (abs_sink + np.abs(forward.lse)) + 4 * ua
    excess = excess_of(forward.log_p_sink, p_sink, eta)
    terms = p_sink.size // max(1, sink.size)
    rounding = (model.k(terms) + 4) * ua
    each = (excess + np.minimum(p_sink, wa) + rounding * (p_sink + excess)) * larger + p_sink * e_delta
    exact = sum_to(np.sum(-p_sink * delta, axis=(-1, -2)), sink.shape)
    own = replace(model, u=roundoff(sink.dtype), w=underflow(sink.dtype), largest=float(limits(sink.dtype).max))
    tolerance = sum_to(np.sum(each, axis=(-1, -2)), sink.shape) + terms * wa + own.u * np.abs(exact) + own.w
    return rounded_up(tolerance, exact, own)
