"""Bounds on dq, dk, dv and dsink, from the exact forward pass and its tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..reference import sum_heads_to, sum_to
from ..scores.roundoff import PushedErrors, ScoreErrors
from .forward import Forward, Operands, excess_of
from .rounding import SECOND_ORDER, Rounding, limits, rounded_up, roundoff, summable, underflow


class Cotangents(NamedTuple):
    """Cotangents of o and lse in float64, do and dlse; they are 0 where they have no effect."""

    do: Array
    dlse: Array | float


class Gap(NamedTuple):
    """The error of P recomputed from lse, G = dP - D + dlse and the gradient dF of final scores, with their errors."""

    p_excess: Array
    g: Array
    e_g: Array
    df: Array
    e_df: Array


def gradient_tolerances(
    operands: Operands, forward: Forward, cotangents: Cotangents
) -> tuple[Array, Array, list[Array]]:
    """Return the gradient of final scores, its error, and the bounds on dq, dk and dv in the shapes of q, k and v."""
    model, scale, p, z = operands.model, operands.scale, forward.p, forward.z
    terms = terms_of(operands, p)
    p_excess, _, _, df, e_df = gap_of(operands, forward, cotangents)
    ds, e_ds = (df, e_df) if forward.final is None else through_slope(forward.final, df, e_df, model)
    weights = z * weight_error(operands, forward, p_excess, p, p + p_excess, terms[2])
    weights = np.where(np.isneginf(forward.log_p), 0, weights)
    exact = scale * (ds @ operands.keys), scale * (turned(ds) @ operands.queries), turned(z * p) @ cotangents.do
    tolerances = (
        abs(scale) * summable(rounded(ds, e_ds, terms[0], model) @ np.abs(operands.keys), model),
        abs(scale) * summable(turned(rounded(ds, e_ds, terms[1], model)) @ np.abs(operands.queries), model),
        turned(weights) @ np.abs(cotangents.do),
    )
    return df, e_df, summed(operands, exact, tolerances, terms)


def terms_of(operands: Operands, p: Array) -> tuple[int, int, int]:
    """Return how many rows add up to one row of dq, dk and dv."""
    size, lengths = math.prod(p.shape[:-2]), (p.shape[-1], p.shape[-2], p.shape[-2])
    q, k, v = (n * (size // max(1, math.prod(shape[:-2]))) for n, shape in zip(lengths, operands.shapes))
    return q, k, v


def turned(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def rounded(ds: Array, e_ds: Array, terms: int, model: Rounding) -> Array:
    """Return the error of dS, or of its tangent, after rounding and summation."""
    larger = np.abs(ds) + e_ds
    error = e_ds + model.up * larger + np.minimum(larger, model.wp)
    error = np.where(np.abs(ds) + SECOND_ORDER * error > model.largest_product, np.inf, error)
    return error + ((model.k(terms) + 8) * model.ua + model.t) * larger


def weight_error(operands: Operands, forward: Forward, error: Array, least: Array, larger: Array, terms: int) -> Array:
    """Return the error of weights of dv, or of their tangents, after rounding and summation."""
    model = operands.model
    rounding = model.up + model.t + (model.k(terms) + 2) * model.ua + forward.z_rounding
    return error + np.minimum(least, model.wp) + rounding * larger


def summed(
    operands: Operands, exact: Sequence[Array], tolerances: Sequence[Array], terms: Sequence[int]
) -> list[Array]:
    """Return the bounds on dq, dk and dv, or on their tangents, in the shapes of q, k and v."""
    model, most, bounds = operands.model, operands.weights.most, []
    for x, tolerance, shape, n, add in zip(exact, tolerances, operands.shapes, terms, (sum_to, *[sum_heads_to] * 2)):
        gradient, lost = add(x, shape), (most + abs(operands.scale)) * n * model.wa + model.w
        bounds.append(rounded_up(add(tolerance, shape) + model.u * np.abs(gradient) + lost, gradient, model))
    return bounds


def gap_of(operands: Operands, forward: Forward, cotangents: Cotangents) -> Gap:
    """Return the error of P, and G and dF with their errors."""
    model, values, (do, dlse) = operands.model, operands.values, cotangents
    ua, wa, p, z, value_dim = model.ua, model.wa, forward.p, forward.z, values.shape[-1]
    eta = forward.eta + forward.tol_lse + 4 * ua * (np.abs(forward.score) + np.abs(forward.lse))
    p_excess = excess_of(forward.log_p, p, eta) + np.minimum(p, wa)
    dp = z * (do @ turned(values))
    rounding = (model.k(value_dim) + 2) * ua + model.t + forward.z_rounding
    e_dp = z * (rounding * (np.abs(do) @ turned(np.abs(values))) + value_dim * wa)
    d, e_d = _row_sums(operands, forward, do)
    g = dp - d + dlse
    e_g = summable(e_dp + e_d + value_dim * wa + 2 * ua * (np.abs(dp) + np.abs(d) + np.abs(dlse)), model)
    e_df = (p_excess + 2 * ua * (p + p_excess)) * (np.abs(g) + e_g) + p * e_g + wa
    return Gap(p_excess, g, e_g, p * g, np.where(np.isneginf(forward.log_p), 0, e_df))


def stored_error(operands: Operands, forward: Forward) -> Array:
    """Return the error of o before it is rounded for gradients to read; infinite if o, or its sums, may overflow."""
    may_overflow = np.abs(forward.o) + SECOND_ORDER * forward.tol_o > operands.model.largest
    return np.where(may_overflow, np.inf, summable(forward.tol_o, operands.model))


def _row_sums(operands: Operands, forward: Forward, do: Array) -> tuple[Array, Array]:
    """Return D = rowsum(dO O) and its error without underflow, [..., rows, 1]."""
    k_dv, tol_o = operands.model.k(operands.values.shape[-1]) + 2, stored_error(operands, forward)
    error = np.abs(do) * (tol_o + k_dv * operands.model.ua * (np.abs(forward.o) + tol_o))
    return np.sum(do * forward.o, axis=-1, keepdims=True), np.sum(error, axis=-1, keepdims=True)


def through_slope(final: ScoreErrors | PushedErrors, df: Array, e_df: Array, model: Rounding) -> tuple[Array, Array]:
    """Return dS and its error from the gradient of final scores; both are 0 if that gradient is exactly 0."""
    larger, slope = np.abs(df) + e_df, np.abs(final.slope)
    e_ds = slope * e_df + final.e_slope * larger + 2 * model.ua * slope * larger + model.wa
    is_none = larger == 0
    return np.where(is_none, 0, df * final.slope), np.where(is_none, 0, e_ds)


def delta_of(operands: Operands, forward: Forward, cotangents: Cotangents) -> tuple[Array, Array]:
    """Return delta = D - dlse and its error, [..., rows, 1]."""
    model, (do, dlse) = operands.model, cotangents
    d, e_d = _row_sums(operands, forward, do)
    error = e_d + 2 * model.ua * (np.abs(d) + np.abs(dlse)) + operands.values.shape[-1] * model.wa
    return d - dlse, summable(error, model)


def sink_weight(operands: Operands, forward: Forward) -> tuple[Array, Array]:
    """Return P of the sink and its error, recomputed from lse."""
    p_sink, ua = np.exp(forward.log_p_sink), operands.model.ua
    abs_sink = np.abs(np.where(np.isneginf(operands.logit), 0, operands.logit))
    eta = forward.tol_lse + operands.e_logit + 4 * ua * (abs_sink + np.abs(forward.lse)) + 4 * ua
    return p_sink, excess_of(forward.log_p_sink, p_sink, eta) + np.minimum(p_sink, operands.model.wa)


def sink_tolerance(
    operands: Operands, forward: Forward, factor: Array, e_factor: Array, is_none: Array | bool = False
) -> Array:
    """Return the bound on dsink, the sum of -P of the sink times a factor, or on its tangent, in the sink's shape.

    Rows where `is_none` is True add nothing.
    """
    model, sink = operands.model, operands.sink
    assert sink is not None
    p_sink, excess = sink_weight(operands, forward)
    terms = p_sink.size // max(1, sink.size)
    rounding = (model.k(terms) + 4) * model.ua
    larger = np.abs(factor) + e_factor
    each = (excess + rounding * (p_sink + excess)) * larger
    each, exact = (np.where(is_none, 0, x) for x in (each + p_sink * e_factor, -p_sink * factor))
    each, exact = (sum_to(np.sum(x, axis=(-1, -2)), sink.shape) for x in (each, exact))
    own = replace(model, u=roundoff(sink.dtype), w=underflow(sink.dtype), largest=float(limits(sink.dtype).max))
    return rounded_up(each + terms * model.wa + own.u * np.abs(exact) + own.w, exact, own)
