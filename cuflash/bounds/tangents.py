"""Bounds on o_dot and lse_dot, and on the tangents of gradients, from the exact forward pass and its tolerances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..reference import expand_heads
from ..scores.roundoff import PushedErrors
from .forward import Forward, Operands, excess_of
from .gradients import (
    Cotangents, delta_of, gap_of, rounded, sink_tolerance, sink_weight, stored_error, summed, terms_of, through_slope,
    turned, weight_error,
)  # fmt: skip
from .rounding import SECOND_ORDER, Rounding, nan_to_inf, rounded_up, summable


class Dots(NamedTuple):
    """The tangents of q, k, v, do and dlse in float64, for each query head; 0 where they do not affect results."""

    queries: Array
    keys: Array
    values: Array
    do: Array
    dlse: Array | float

    @classmethod
    def of(cls, operands: Operands, forward: Forward, tangents: Mapping[str, Array]) -> Dots:
        """Convert tangents, of which those that are missing are 0."""
        num_heads, (is_row, has_lse) = operands.queries.shape[-3], rows_of(operands, forward)
        is_seen = operands.allowed.any(axis=-2)[..., None]
        wide = {name: np.asarray(x).astype(np.float64) for name, x in tangents.items() if name != "sink"}
        counts = {"q": is_row, "k": is_seen, "v": is_seen, "do": is_row}
        zeros = (*(np.zeros(np.shape(x)) for x in operands[:3]), np.zeros(forward.o.shape))
        q, k, v, do = (
            np.where(counts[name], expand_heads(wide[name], num_heads), 0) if name in wide else zero
            for name, zero in zip(counts, zeros)
        )
        dlse = np.where(has_lse, wide["dlse"].reshape(is_row.shape), 0) if "dlse" in wide else 0.0
        return cls(q, k, v, do, dlse)


def rows_of(operands: Operands, forward: Forward) -> tuple[Array, Array]:
    """Return which rows attend a key, and which have an lse, of keys or of the sink, [..., rows, 1]."""
    is_row = forward.allowed.any(axis=-1)[..., None]
    return is_row, is_row | ~np.isneginf(operands.logit)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Push:
    """The exact tangents of the forward pass and their unscaled tolerances, as needed for the tangents of gradients."""

    p_excess: Array
    from_mean: Array  # F_dot - lse_dot; 0 where masked
    e_final: Array  # error of F_dot
    pushed: PushedErrors | None
    lse_dot: Array  # [..., rows, 1]
    tol_lse_dot: Array
    o_dot: Array
    tol_o_dot: Array
    sink_dot: Array  # [..., 1, 1]
    e_sink_dot: Array


def push_tolerances(operands: Operands, forward: Forward, dots: Dots, tangents: Mapping[str, Array]) -> Push:
    """Bound the pass "jvp": the derivation is that of `cuflash.bounds`."""
    model = operands.model
    sink_dot, e_sink_dot = (
        np.asarray(x, np.float64)[..., None, None] if np.ndim(x) else x
        for x in model.as_read(np.atleast_1d(tangents.get("sink", 0.0)))
    )
    ua, wa, allowed, p = model.ua, model.wa, forward.allowed, forward.p
    seqlen_kv, head_dim = operands.keys.shape[-2], operands.keys.shape[-1]
    k_n, k_2n = model.k(seqlen_kv), model.k(2 * seqlen_kv)
    f_dot, e_f, pushed = _final_tangents(operands, forward, dots, tangents)
    eta = forward.eta + forward.tol_lse + 4 * ua * (np.abs(forward.score) + np.abs(forward.lse))
    p_excess = excess_of(forward.log_p, p, np.where(allowed, eta, 0)) + np.where(allowed, np.minimum(p, wa), 0)
    p_larger = p + p_excess

    p_sink, sink_excess = sink_weight(operands, forward)
    is_sink = ~np.isneginf(operands.logit)  # a weight that underflows to 0 does not hide infinity and NaN
    lse_dot = np.sum(p * f_dot, axis=-1, keepdims=True) + np.where(is_sink, p_sink * sink_dot, 0)
    from_mean = np.where(allowed, f_dot - lse_dot, 0)
    spread = np.max(np.abs(from_mean), axis=-1, keepdims=True, initial=0)
    most_error = np.max(e_f, axis=-1, keepdims=True, initial=0)
    # c is a computed mean of tangents of attended keys.
    spread = spread + most_error + (k_n + 3) * ua * (np.abs(lse_dot) + spread + most_error)
    spread = np.where(allowed.any(axis=-1, keepdims=True), spread, 0)
    gap = np.where(allowed, np.abs(from_mean) + spread, 0)

    e_w = (p_excess + 2 * ua * p_larger) * (gap + e_f) + p * e_f + np.where(allowed, wa, 0)
    w = p * gap + e_w
    e_rise = e_w.sum(axis=-1, keepdims=True) + (k_n + 8) * ua * w.sum(axis=-1, keepdims=True)
    sink_gap = np.abs(sink_dot - lse_dot) + spread + e_sink_dot
    of_sink = (sink_excess + 4 * ua * (p_sink + sink_excess)) * sink_gap + p_sink * e_sink_dot
    e_rise = e_rise + np.where(is_sink, of_sink, 0) + 2 * ua * spread
    tol_lse_dot = e_rise + 4 * ua * (np.abs(lse_dot) + spread) + wa

    z, values, values_dot = forward.z, operands.values, dots.values
    rounding = model.up + model.t + (k_2n + 8) * ua + forward.z_rounding
    o_dot = (z * (p * from_mean)) @ values + (z * p) @ values_dot
    e_sum = (z * (e_w + rounding * w + np.minimum(w, model.wp))) @ np.abs(values)
    e_sum = e_sum + (z * (p_excess + rounding * p_larger + np.minimum(p, model.wp))) @ np.abs(values_dot)
    abs_o, abs_o_dot = np.abs(forward.o), np.abs(o_dot)
    tol_o_dot = e_sum + e_rise * (abs_o + forward.tol_o) + spread * forward.tol_o
    tol_o_dot = tol_o_dot + 3 * ua * (abs_o_dot + e_sum + spread * (abs_o + forward.tol_o))
    tol_o_dot = tol_o_dot + model.u * abs_o_dot + model.w + 2 * operands.weights.most * seqlen_kv * wa + head_dim * wa
    # Tangents of gradients read the stored o_dot, which has been rounded.
    tol_o_dot = np.where(abs_o_dot + SECOND_ORDER * tol_o_dot > model.largest, np.inf, summable(tol_o_dot, model))
    is_row = allowed.any(axis=-1, keepdims=True)
    return Push(
        p_excess=p_excess, from_mean=from_mean, e_final=e_f, pushed=pushed, lse_dot=lse_dot,
        tol_lse_dot=np.where(is_row, tol_lse_dot, np.where(is_sink, e_sink_dot, 0)), o_dot=o_dot,
        tol_o_dot=np.where(is_row, tol_o_dot, 0), sink_dot=sink_dot, e_sink_dot=e_sink_dot,
    )  # fmt: skip


def _final_tangents(
    operands: Operands, forward: Forward, dots: Dots, tangents: Mapping[str, Array]
) -> tuple[Array, Array, PushedErrors | None]:
    """Return the tangents of final scores, their errors (0 where masked), and the results of the score function."""
    model, captured, allowed, depth = operands.model, operands.captured, forward.allowed, 2 * operands.keys.shape[-1]
    ua, scale, keys, keys_dot = model.ua, operands.scale, turned(operands.keys), turned(dots.keys)
    s_dot = np.where(allowed, scale * (dots.queries @ keys + operands.queries @ keys_dot), 0)
    mass = np.abs(dots.queries) @ np.abs(keys) + np.abs(operands.queries) @ np.abs(keys_dot)
    e_s_dot = abs(scale) * summable(((model.k(depth) + 4) * ua + model.t) * mass, model)
    e_s_dot = e_s_dot + depth * model.wa * (1 + abs(scale))
    e_s_dot = np.where(allowed & (mass > 0), e_s_dot, 0)
    if captured is None:
        return s_dot, e_s_dot, None
    assert forward.final is not None and forward.raw is not None
    pushed = captured.pushed(*forward.raw, s_dot, e_s_dot, tangents, allowed, model)
    return pushed.f_dot, pushed.e_f_dot, pushed


class _Finals(NamedTuple):
    """dF, dF_dot and P_dot with their errors, and the error of P."""

    df: Array
    e_df: Array
    df_dot: Array
    e_df_dot: Array
    p_excess: Array
    p_dot: Array
    e_p_dot: Array


def _second_finals(
    operands: Operands, forward: Forward, push: Push, cotangents: Cotangents, dots: Dots, of_dot: tuple[Array, Array]
) -> _Finals:
    """Return the gradients of final scores and their tangents, with errors; `of_dot` is delta_dot and its error."""
    model, p, z, do, value_dim = operands.model, forward.p, forward.z, cotangents.do, operands.values.shape[-1]
    ua, wa, (delta_dot, e_delta) = model.ua, model.wa, of_dot
    p_excess, g, e_g, df, e_df = gap_of(operands, forward, cotangents)
    p_larger, g_larger = p + p_excess, np.abs(g) + e_g
    values, values_dot = turned(operands.values), turned(dots.values)
    dp_dot = z * (dots.do @ values + do @ values_dot)
    mass = np.abs(dots.do) @ np.abs(values) + np.abs(do) @ np.abs(values_dot)
    rounding = (model.k(2 * value_dim) + 2) * ua + model.t + forward.z_rounding
    e_dp = z * (rounding * mass + 2 * value_dim * wa)
    h = dp_dot - delta_dot
    e_h = summable(e_dp + e_delta + 2 * ua * (np.abs(dp_dot) + np.abs(delta_dot)), model)

    e_mean = push.e_final + push.tol_lse_dot
    mean_larger = np.abs(push.from_mean) + e_mean
    p_dot = p * push.from_mean
    e_p_dot = (p_excess + 2 * ua * p_larger) * mean_larger + p * e_mean + wa
    p_dot_larger = np.abs(p_dot) + e_p_dot
    df_dot = p_dot * g + p * h
    e_df_dot = np.abs(g) * e_p_dot + p_dot_larger * e_g + p_excess * np.abs(h) + p_larger * e_h
    e_df_dot = e_df_dot + 4 * ua * (p_dot_larger * g_larger + p_larger * (np.abs(h) + e_h)) + 3 * wa
    e_p_dot, e_df_dot = (np.where(np.isneginf(forward.log_p), 0, x) for x in (e_p_dot, e_df_dot))
    return _Finals(df, e_df, df_dot, e_df_dot, p_excess, p_dot, e_p_dot)


def second_bounds(
    operands: Operands, forward: Forward, push: Push, cotangents: Cotangents, dots: Dots
) -> dict[str, Array]:
    """Return the bounds on the tangents of all gradients, by their names in `Bounds`."""
    model, scale, p, z, do = operands.model, operands.scale, forward.p, forward.z, cotangents.do
    of_dot = _delta_tangents(operands, forward, push, cotangents, dots)
    second = _second_finals(operands, forward, push, cotangents, dots, of_dot)
    ds, e_ds, ds_dot, e_ds_dot = finals = second[:4]
    if push.pushed is not None:
        ds, e_ds, ds_dot, e_ds_dot = _through_slopes(push.pushed, *finals, model)
    terms = [2 * n for n in terms_of(operands, p)]
    rounding_q, rounding_k = (rounded(ds, e_ds, n, model) for n in terms[:2])
    dot_q, dot_k = (rounded(ds_dot, e_ds_dot, n, model) for n in terms[:2])
    larger, larger_dot = p + second.p_excess, np.abs(second.p_dot) + second.e_p_dot
    errors = (
        z * weight_error(operands, forward, second.p_excess, p, larger, terms[2]),
        z * weight_error(operands, forward, second.e_p_dot, larger_dot, larger_dot, terms[2]),
    )
    weights, weights_dot, product, product_dot = (
        turned(np.where(np.isneginf(forward.log_p), 0, x)) for x in (*errors, z * p, z * second.p_dot)
    )
    exact = (
        scale * (ds_dot @ operands.keys + ds @ dots.keys),
        scale * (turned(ds_dot) @ operands.queries + turned(ds) @ dots.queries),
        product_dot @ do + product @ dots.do,
    )
    tolerances = (
        abs(scale) * (dot_q @ np.abs(operands.keys) + rounding_q @ np.abs(dots.keys)),
        abs(scale) * (turned(dot_k) @ np.abs(operands.queries) + turned(rounding_k) @ np.abs(dots.queries)),
        weights_dot @ np.abs(do) + weights @ np.abs(dots.do),
    )
    bounds: dict[str, Any] = dict(zip(("dq_dot", "dk_dot", "dv_dot"), summed(operands, exact, tolerances, terms)))
    if operands.sink is not None:
        delta = delta_of(operands, forward, cotangents)
        bounds["dsink_dot"] = _sink_second_tolerance(operands, forward, push, delta, of_dot)
    if operands.captured is not None and push.pushed is not None:
        bounds["others_dot"] = operands.captured.second_tolerances(push.pushed, finals, model)
    return bounds


def _delta_tangents(
    operands: Operands, forward: Forward, push: Push, cotangents: Cotangents, dots: Dots
) -> tuple[Array, Array]:
    """Return the tangent of delta = rowsum(dO O) - dlse and its error, [..., rows, 1]."""
    model, value_dim, do, do_dot = operands.model, forward.o.shape[-1], cotangents.do, dots.do
    delta_dot = np.sum(do_dot * forward.o + do * push.o_dot, axis=-1, keepdims=True) - dots.dlse
    tol_o = stored_error(operands, forward)
    error = np.abs(do_dot) * tol_o + np.abs(do) * push.tol_o_dot
    mass = np.abs(do_dot) * (np.abs(forward.o) + tol_o) + np.abs(do) * (np.abs(push.o_dot) + push.tol_o_dot)
    total = np.sum(error + (model.k(2 * value_dim) + 2) * model.ua * mass, axis=-1, keepdims=True)
    return delta_dot, total + 2 * model.ua * (np.abs(delta_dot) + np.abs(dots.dlse)) + 2 * value_dim * model.wa


def _sink_second_tolerance(
    operands: Operands, forward: Forward, push: Push, of_delta: tuple[Array, Array], of_dot: tuple[Array, Array]
) -> Array:
    """Return the bound on the tangent of dsink, in the shape of the sink, from delta, delta_dot and their errors."""
    (delta, e_delta), (delta_dot, e_delta_dot), ua = of_delta, of_dot, operands.model.ua
    move, e_move = push.sink_dot - push.lse_dot, push.e_sink_dot + push.tol_lse_dot
    larger = (np.abs(move) + e_move) * (np.abs(delta) + e_delta)
    e_inner = np.abs(move) * e_delta + e_move * (np.abs(delta) + e_delta) + e_delta_dot
    e_inner = e_inner + 4 * ua * (larger + np.abs(delta_dot) + e_delta_dot) + 2 * operands.model.wa
    is_none = np.isneginf(operands.logit)  # where P underflows to 0, its product with an infinite error has no bound
    return sink_tolerance(operands, forward, move * delta + delta_dot, e_inner, is_none)


def published(push: Push, operands: Operands) -> dict[str, Array]:
    """Return the bounds on o_dot and lse_dot."""
    tol_o = rounded_up(push.tol_o_dot, push.o_dot, operands.model)
    return {"o_dot": tol_o, "lse_dot": nan_to_inf(SECOND_ORDER * push.tol_lse_dot[..., 0])}


def _through_slopes(
    pushed: PushedErrors, df: Array, e_df: Array, df_dot: Array, e_df_dot: Array, model: Rounding
) -> tuple[Array, Array, Array, Array]:
    """Return dS and dS_dot with their errors, from dF and dF_dot; results are 0 where dF and dF_dot are exactly 0."""
    ds, e_ds = through_slope(pushed, df, e_df, model)
    ua, wa = model.ua, model.wa
    larger, larger_dot = np.abs(df) + e_df, np.abs(df_dot) + e_df_dot
    slope, slope_dot = np.abs(pushed.slope), np.abs(pushed.slope_dot)
    e_dot = slope * e_df_dot + pushed.e_slope * larger_dot + slope_dot * e_df + pushed.e_slope_dot * larger
    e_dot = e_dot + 4 * ua * (slope * larger_dot + slope_dot * larger) + 2 * wa
    is_still = (larger == 0) & (larger_dot == 0)
    ds_dot, e_dot = (np.where(is_still, 0, x) for x in (pushed.slope * df_dot + pushed.slope_dot * df, e_dot))
    return ds, e_ds, ds_dot, e_dot
