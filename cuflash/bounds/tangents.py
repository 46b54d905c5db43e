"""Bounds on o_dot and lse_dot, and on the tangents of gradients, from the exact forward pass and its tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..reference import expand_heads, sum_heads_to, sum_to, with_heads
from ..scores.roundoff import PushedErrors
from .captured import Captured
from .forward import Forward, excess_of
from .gradients import delta_of, gap_of
from .rounding import SECOND_ORDER, Rounding, limits, nan_to_inf, rounded_up, roundoff, underflow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operands:
    """q, k, v and their tangents, in float64 and for each query head; 0 where they do not affect results."""

    queries: Array
    keys: Array
    values: Array
    queries_dot: Array
    keys_dot: Array
    values_dot: Array
    scale: float

    @classmethod
    def of(
        cls, qkv: tuple[Array, Array, Array], tangents: Mapping[str, Array], is_row: Array, is_seen: Array,
        scale: float,
    ) -> Operands:  # fmt: skip
        """Return operands with their tangents; rows without a key, and keys that no query attends, are set to 0."""
        num_heads = qkv[0].shape[-3]
        queries_dot, keys_dot, values_dot = (
            np.where(counts, expand_heads(np.asarray(tangents[name]).astype(np.float64), num_heads), 0)
            if name in tangents else np.zeros(np.shape(x))
            for name, x, counts in zip("qkv", qkv, (is_row, is_seen, is_seen))
        )  # fmt: skip
        queries, keys, values = qkv
        return cls(
            queries=queries, keys=keys, values=values, queries_dot=queries_dot, keys_dot=keys_dot,
            values_dot=values_dot, scale=scale,
        )  # fmt: skip


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


def push_tolerances(
    operands: Operands, forward: Forward, tangents: Mapping[str, Array], logit: Array, e_logit: Array,
    model: Rounding, captured: Captured | None,
) -> Push:  # fmt: skip
    """Bound the pass "jvp": the derivation is that of `cuflash.bounds`."""
    sink_dot, e_sink_dot = (
        np.asarray(x, np.float64)[..., None, None] if np.ndim(x) else x
        for x in model.as_read(np.atleast_1d(tangents.get("sink", 0.0)))
    )
    ua, wa, allowed, p = model.ua, model.wa, forward.allowed, forward.p
    seqlen_kv, head_dim = operands.keys.shape[-2], operands.keys.shape[-1]
    k_n, k_2n = model.k(seqlen_kv), model.k(2 * seqlen_kv)
    f_dot, e_f, pushed = _final_tangents(operands, forward, model, captured, tangents)
    eta = forward.eta + forward.tol_lse + 4 * ua * (np.abs(forward.score) + np.abs(forward.lse))
    p_excess = excess_of(forward.log_p, p, np.where(allowed, eta, 0)) + np.where(allowed, np.minimum(p, wa), 0)
    p_larger = p + p_excess

    p_sink = np.exp(forward.log_p_sink)
    is_sink = ~np.isneginf(logit)  # a weight that underflows to 0 does not hide infinity and NaN
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
    abs_sink = np.abs(np.where(np.isneginf(logit), 0, logit))
    log_error = forward.tol_lse + e_logit + 4 * ua * (abs_sink + np.abs(forward.lse))
    sink_excess = excess_of(forward.log_p_sink, p_sink, log_error + 4 * ua)
    of_sink = (sink_excess + 4 * ua * (p_sink + sink_excess)) * sink_gap + p_sink * e_sink_dot
    e_rise = e_rise + np.where(is_sink, of_sink, 0) + 2 * ua * spread
    tol_lse_dot = e_rise + 4 * ua * (np.abs(lse_dot) + spread) + wa

    z, z_rounding = forward.weights.factors, forward.weights.roundoffs * ua
    rounding = model.up + model.t + (k_2n + 8) * ua + z_rounding
    values, values_dot = operands.values, operands.values_dot
    o_dot = (z * (p * from_mean)) @ values + (z * p) @ values_dot
    e_sum = (z * (e_w + rounding * w + np.minimum(w, model.wp))) @ np.abs(values)
    e_sum = e_sum + (z * (p_excess + rounding * p_larger + np.minimum(p, model.wp))) @ np.abs(values_dot)
    abs_o, abs_o_dot = np.abs(forward.o), np.abs(o_dot)
    tol_o_dot = e_sum + e_rise * (abs_o + forward.tol_o) + spread * forward.tol_o
    tol_o_dot = tol_o_dot + 3 * ua * (abs_o_dot + e_sum + spread * (abs_o + forward.tol_o))
    tol_o_dot = tol_o_dot + model.u * abs_o_dot + model.w + 2 * seqlen_kv * wa + head_dim * wa
    # Tangents of gradients read the stored o_dot, which has been rounded.
    tol_o_dot = np.where(abs_o_dot + SECOND_ORDER * tol_o_dot > model.largest, np.inf, tol_o_dot)
    is_row = allowed.any(axis=-1, keepdims=True)
    return Push(
        p_excess=p_excess, from_mean=from_mean, e_final=e_f, pushed=pushed, lse_dot=lse_dot,
        tol_lse_dot=np.where(is_row, tol_lse_dot, np.where(is_sink, e_sink_dot, 0)), o_dot=o_dot,
        tol_o_dot=np.where(is_row, tol_o_dot, 0), sink_dot=sink_dot, e_sink_dot=e_sink_dot,
    )  # fmt: skip


def _final_tangents(
    operands: Operands, forward: Forward, model: Rounding, captured: Captured | None, tangents: Mapping[str, Array]
) -> tuple[Array, Array, PushedErrors | None]:
    """Return the tangents of final scores, their errors (0 where masked), and the results of the score function."""
    ua, scale, allowed, depth = model.ua, operands.scale, forward.allowed, 2 * operands.keys.shape[-1]
    keys, keys_dot = (np.swapaxes(x, -1, -2) for x in (operands.keys, operands.keys_dot))
    s_dot = np.where(allowed, scale * (operands.queries_dot @ keys + operands.queries @ keys_dot), 0)
    mass = np.abs(operands.queries_dot) @ np.abs(keys) + np.abs(operands.queries) @ np.abs(keys_dot)
    e_s_dot = ((model.k(depth) + 4) * ua + model.t) * abs(scale) * mass + depth * model.wa * (1 + abs(scale))
    e_s_dot = np.where(allowed & (mass > 0), e_s_dot, 0)
    if captured is None:
        return s_dot, e_s_dot, None
    assert forward.final is not None and forward.raw is not None
    pushed = captured.pushed(*forward.raw, s_dot, e_s_dot, tangents, allowed, model)
    return pushed.f_dot, pushed.e_f_dot, pushed


class _Finals(NamedTuple):
    """dF, dF_dot, P_dot and delta_dot, with their errors and that of P."""

    df: Array
    e_df: Array
    df_dot: Array
    e_df_dot: Array
    p_excess: Array
    p_dot: Array
    e_p_dot: Array
    of_delta: tuple[Array, Array]


def _second_finals(
    operands: Operands, forward: Forward, push: Push, do: Array, dlse: Array | float, do_dot: Array,
    dlse_dot: Array | float, model: Rounding,
) -> _Finals:  # fmt: skip
    """Return the gradients of final scores and their tangents, with errors."""
    ua, wa, p = model.ua, model.wa, forward.p
    value_dim = operands.values.shape[-1]
    p_excess, g, e_g = gap_of(operands.values, do, dlse, model, forward)
    p_larger, g_larger = p + p_excess, np.abs(g) + e_g
    z, z_rounding = forward.weights.factors, forward.weights.roundoffs * ua

    values, values_dot = (np.swapaxes(x, -1, -2) for x in (operands.values, operands.values_dot))
    delta_dot, e_delta = delta_tangents(forward, push, do, do_dot, dlse_dot, model)
    dp_dot = z * (do_dot @ values + do @ values_dot)
    mass = np.abs(do_dot) @ np.abs(values) + np.abs(do) @ np.abs(values_dot)
    e_dp = z * (((model.k(2 * value_dim) + 2) * ua + model.t + z_rounding) * mass + 2 * value_dim * wa)
    h = dp_dot - delta_dot
    e_h = e_dp + e_delta + 2 * ua * (np.abs(dp_dot) + np.abs(delta_dot))

    e_mean = push.e_final + push.tol_lse_dot
    mean_larger = np.abs(push.from_mean) + e_mean
    p_dot = p * push.from_mean
    e_p_dot = (p_excess + 2 * ua * p_larger) * mean_larger + p * e_mean + wa
    p_dot_larger = np.abs(p_dot) + e_p_dot
    df = p * g
    e_df = (p_excess + np.minimum(p, wa) + 2 * ua * p_larger) * g_larger + p * e_g + wa
    df_dot = p_dot * g + p * h
    e_df_dot = np.abs(g) * e_p_dot + p_dot_larger * e_g + p_excess * np.abs(h) + p_larger * e_h
    e_df_dot = e_df_dot + 4 * ua * (p_dot_larger * g_larger + p_larger * (np.abs(h) + e_h)) + 3 * wa
    is_allowed = ~np.isneginf(forward.log_p)
    e_p_dot, e_df, e_df_dot = (np.where(is_allowed, x, 0) for x in (e_p_dot, e_df, e_df_dot))
    return _Finals(df, e_df, df_dot, e_df_dot, p_excess, p_dot, e_p_dot, (delta_dot, e_delta))


def second_tolerances(
    operands: Operands, forward: Forward, push: Push, do: Array, dlse: Array | float, do_dot: Array,
    dlse_dot: Array | float, model: Rounding, shapes: tuple[tuple[int, ...], ...],
) -> tuple[tuple[Array, ...], list[Array], tuple[Array, Array]]:  # fmt: skip
    """Return (dF, its error, dF_dot, its error), bounds on tangents of dq, dk and dv, and delta_dot with its error."""
    ua, wa, p, scale = model.ua, model.wa, forward.p, operands.scale
    second = _second_finals(operands, forward, push, do, dlse, do_dot, dlse_dot, model)
    finals, p_larger = second[:4], p + second.p_excess
    ds, e_ds, ds_dot, e_ds_dot = finals if push.pushed is None else _through_slopes(push.pushed, *finals, model)
    p_dot_larger, is_allowed = np.abs(second.p_dot) + second.e_p_dot, ~np.isneginf(forward.log_p)
    z, z_rounding = forward.weights.factors, forward.weights.roundoffs * ua

    size = math.prod(p.shape[:-2])
    terms_q, terms_k, terms_v = (
        2 * rows * (size // max(1, math.prod(shape[:-2])))
        for rows, shape in zip((p.shape[-1], p.shape[-2], p.shape[-2]), shapes)
    )
    turned, turned_dot = np.swapaxes(ds, -1, -2), np.swapaxes(ds_dot, -1, -2)
    rounding_q, rounding_k = (_rounded(ds, e_ds, terms, model) for terms in (terms_q, terms_k))
    dot_q, dot_k = (_rounded(ds_dot, e_ds_dot, terms, model) for terms in (terms_q, terms_k))
    dot_k, rounding_k = (np.swapaxes(x, -1, -2) for x in (dot_k, rounding_k))
    of_v = model.up + model.t + (model.k(terms_v) + 2) * ua + z_rounding
    weights = z * (second.p_excess + np.minimum(p, max(model.wp, wa)) + of_v * p_larger)
    weights_dot = z * (second.e_p_dot + np.minimum(p_dot_larger, max(model.wp, wa)) + of_v * p_dot_larger)
    weights, weights_dot, exact, exact_dot = (
        np.swapaxes(np.where(is_allowed, x, 0), -1, -2) for x in (weights, weights_dot, z * p, z * second.p_dot)
    )
    q_shape, k_shape, v_shape = shapes
    results = (
        sum_to(scale * (ds_dot @ operands.keys + ds @ operands.keys_dot), q_shape),
        sum_heads_to(scale * (turned_dot @ operands.queries + turned @ operands.queries_dot), k_shape),
        sum_heads_to(exact_dot @ do + exact @ do_dot, v_shape),
    )
    tolerances = (
        sum_to(abs(scale) * (dot_q @ np.abs(operands.keys) + rounding_q @ np.abs(operands.keys_dot)), q_shape),
        sum_heads_to(
            abs(scale) * (dot_k @ np.abs(operands.queries) + rounding_k @ np.abs(operands.queries_dot)), k_shape
        ),
        sum_heads_to(weights_dot @ np.abs(do) + weights @ np.abs(do_dot), v_shape),
    )
    underflows = ((1 + abs(scale)) * terms * wa + model.w for terms in (terms_q, terms_k, terms_v))
    bounds = [
        rounded_up(tolerance + model.u * np.abs(result) + underflow, result, model)
        for tolerance, result, underflow in zip(tolerances, results, underflows)
    ]
    return finals, bounds, second.of_delta


def delta_tangents(
    forward: Forward, push: Push, do: Array, do_dot: Array, dlse_dot: Array | float, model: Rounding
) -> tuple[Array, Array]:
    """Return the tangent of delta = rowsum(dO O) - dlse and its error, [..., rows, 1]."""
    ua, value_dim = model.ua, forward.o.shape[-1]
    delta_dot = np.sum(do_dot * forward.o + do * push.o_dot, axis=-1, keepdims=True) - dlse_dot
    error = np.abs(do_dot) * forward.tol_o + np.abs(do) * push.tol_o_dot
    mass = np.abs(do_dot) * (np.abs(forward.o) + forward.tol_o) + np.abs(do) * (np.abs(push.o_dot) + push.tol_o_dot)
    total = np.sum(error + (model.k(2 * value_dim) + 2) * ua * mass, axis=-1, keepdims=True)
    return delta_dot, total + 2 * ua * (np.abs(delta_dot) + np.abs(dlse_dot)) + 2 * value_dim * model.wa


def sink_second_tolerance(
    forward: Forward, push: Push, of_delta: tuple[Array, Array], of_dot: tuple[Array, Array], logit: Array,
    e_logit: Array, model: Rounding, sink: Array,
) -> Array:  # fmt: skip
    """Return the bound on the tangent of dsink, in the shape of the sink, from delta, delta_dot and their errors."""
    (delta, e_delta), (delta_dot, e_delta_dot) = of_delta, of_dot
    ua, wa, p_sink = model.ua, model.wa, np.exp(forward.log_p_sink)
    move, e_move = push.sink_dot - push.lse_dot, push.e_sink_dot + push.tol_lse_dot
    inner = move * delta + delta_dot
    larger = (np.abs(move) + e_move) * (np.abs(delta) + e_delta)
    e_inner = np.abs(move) * e_delta + e_move * (np.abs(delta) + e_delta) + e_delta_dot
    e_inner = e_inner + 4 * ua * (larger + np.abs(delta_dot) + e_delta_dot) + 2 * wa

    abs_sink = np.abs(np.where(np.isneginf(logit), 0, logit))
    eta = forward.tol_lse + e_logit + 4 * ua * (abs_sink + np.abs(forward.lse)) + 4 * ua
    excess = excess_of(forward.log_p_sink, p_sink, eta)
    terms = p_sink.size // max(1, sink.size)
    rounding = (model.k(terms) + 4) * ua
    each = (excess + np.minimum(p_sink, wa) + rounding * (p_sink + excess)) * (np.abs(inner) + e_inner)
    is_sink = ~np.isneginf(logit)  # where P underflows to 0, its product with an infinite error is NaN: no bound
    each = np.where(is_sink, each + p_sink * e_inner, 0)
    exact = sum_to(np.sum(np.where(is_sink, -p_sink * inner, 0), axis=(-1, -2)), sink.shape)
    own = replace(model, u=roundoff(sink.dtype), w=underflow(sink.dtype), largest=float(limits(sink.dtype).max))
    tolerance = sum_to(np.sum(each, axis=(-1, -2)), sink.shape) + terms * wa + own.u * np.abs(exact) + own.w
    return rounded_up(tolerance, exact, own)


def published(push: Push, model: Rounding, has_heads: bool) -> dict[str, Array]:
    """Return the bounds on o_dot and lse_dot."""
    tol_o, tol_lse = rounded_up(push.tol_o_dot, push.o_dot, model), nan_to_inf(SECOND_ORDER * push.tol_lse_dot[..., 0])
    return {"o_dot": tol_o, "lse_dot": tol_lse} if has_heads else {"o_dot": tol_o[0], "lse_dot": tol_lse[0]}


def moved(
    do: Array, dlse: Array | float, tangents: Mapping[str, Array], is_row: Array, counts: Array
) -> tuple[Array, Array | float, Array, Array | float]:
    """Return dO, dlse and their tangents, 0 in rows where they have no effect."""
    do_dot = np.zeros(do.shape)
    if "do" in tangents:
        do_dot = np.where(is_row, with_heads(np.asarray(tangents["do"]).astype(np.float64)), 0)
    dlse_dot: Array | float = 0.0
    if "dlse" in tangents:
        dlse_dot = np.where(counts, np.asarray(tangents["dlse"]).astype(np.float64).reshape(is_row.shape), 0)
    return do, dlse, do_dot, dlse_dot


def second_bounds(
    operands: Operands, forward: Forward, push: Push, moving: tuple[Array, Array | float, Array, Array | float],
    model: Rounding, captured: Captured | None, shapes: tuple[tuple[int, ...], ...], sink: Array | None,
    logits: tuple[Array, Array],
) -> dict[str, Array]:  # fmt: skip
    """Return the bounds on the tangents of all gradients, by their names in `Bounds`."""
    do, dlse, do_dot, dlse_dot = moving
    finals, tolerances, delta_dot = second_tolerances(operands, forward, push, *moving, model, shapes)
    bounds = dict(zip(("dq_dot", "dk_dot", "dv_dot"), tolerances))
    if sink is not None:
        delta = delta_of(operands.values, do, dlse, model, forward)
        bounds["dsink_dot"] = sink_second_tolerance(forward, push, delta, delta_dot, *logits, model, sink)
    if captured is not None and push.pushed is not None:
        bounds["others_dot"] = captured.second_tolerances(push.pushed, finals, model)
    return bounds


def _rounded(ds: Array, e_ds: Array, terms: int, model: Rounding) -> Array:
    """Return the error of dS, or of its tangent, after rounding and summation."""
    larger = np.abs(ds) + e_ds
    error = e_ds + model.up * larger + np.minimum(larger, model.wp)
    error = np.where(np.abs(ds) + SECOND_ORDER * error > model.largest_product, np.inf, error)
    return error + ((model.k(terms) + 8) * model.ua + model.t) * larger


def _through_slopes(
    pushed: PushedErrors, df: Array, e_df: Array, df_dot: Array, e_df_dot: Array, model: Rounding
) -> tuple[Array, Array, Array, Array]:
    """Return dS and dS_dot with their errors, from dF and dF_dot; results are 0 where dF and dF_dot are exactly 0."""
    ua, wa = model.ua, model.wa
    larger, larger_dot = np.abs(df) + e_df, np.abs(df_dot) + e_df_dot
    slope, slope_dot = np.abs(pushed.slope), np.abs(pushed.slope_dot)
    e_ds = slope * e_df + pushed.e_slope * larger + 2 * ua * slope * larger + wa
    e_dot = slope * e_df_dot + pushed.e_slope * larger_dot + slope_dot * e_df + pushed.e_slope_dot * larger
    e_dot = e_dot + 4 * ua * (slope * larger_dot + slope_dot * larger) + 2 * wa
    is_none, is_still = larger == 0, (larger == 0) & (larger_dot == 0)
    ds, e_ds = (np.where(is_none, 0, x) for x in (pushed.slope * df, e_ds))
    ds_dot, e_dot = (np.where(is_still, 0, x) for x in (pushed.slope * df_dot + pushed.slope_dot * df, e_dot))
    return ds, e_ds, ds_dot, e_dot
