"""The exact forward pass in float64, and tolerances for computed o and lse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..dropout import Dropout
from ..masks.places import Places
from ..fp8.cuts import Cuts
from ..planning.problem import Problem
from ..reference import allowed_of, expand_heads
from ..scores.roundoff import ScoreErrors
from .captured import Captured
from .rounding import Rounding


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The factors by which dropout multiplies weights, their maximum, and how many times each factor is rounded."""

    factors: Array = 1.0
    most: float = 1.0
    roundoffs: int = 0

    @classmethod
    def of(cls, dropout: Dropout | None, problem: Problem) -> Weights:
        if dropout is None or problem.dropout is None:
            return cls()
        shape, factor = problem.mask_shape, problem.dropout.factor
        whole, places = problem.whole_shape, problem.places or Places()
        queries, keys = places.queries(np.arange(shape.seqlen_q)), places.kv_start + np.arange(shape.seqlen_kv)
        factors = dropout.keep((whole.num_batch, *whole[1:]), queries, keys)
        b, h = places.batch_start, places.head_start
        factors = factors[b : b + shape.num_batch, h : h + shape.num_heads]
        return cls(factor * factors.reshape(*shape.batch, *factors.shape[1:]), factor, 2)

    @property
    def is_dropping(self) -> bool:
        return self.roundoffs > 0


class Operands(NamedTuple):
    """The operands of a call in float64, with k and v for each query head, and the model of its kernel's arithmetic."""

    queries: Array
    keys: Array
    values: Array
    allowed: Array
    scale: float
    sink: Array | None
    logit: Array  # [..., 1, 1], -inf without a sink
    e_logit: Array
    shapes: tuple[tuple[int, ...], ...]  # of q, k and v
    model: Rounding
    captured: Captured | None
    weights: Weights
    cuts: Cuts | None

    @classmethod
    @np.errstate(over="ignore", invalid="ignore", under="ignore")
    def of(
        cls, qkv: Sequence[Array], sink: Array | None, allowed: Array, problem: Problem, model: Rounding,
        captured: Captured | None, dropout: Dropout | None, cuts: Cuts | None,
    ) -> Operands:  # fmt: skip
        """Convert the operands; those that affect no result, whatever they contain, are set to 0."""
        shapes, num_heads = tuple(np.shape(x) for x in qkv), problem.num_heads
        batch = np.broadcast_shapes(*(shape[:-3] for shape in shapes))
        allowed = allowed_of(allowed, (*batch, num_heads, shapes[0][-2], shapes[1][-2]))
        # Keys that no query attends, and rows without a key
        is_seen, is_row = allowed.any(axis=-2)[..., None], allowed.any(axis=-1)[..., None]
        wide = (expand_heads(np.asarray(x).astype(np.float64), num_heads) for x in qkv)
        queries, keys, values = (np.where(counts, x, 0) for counts, x in zip((is_row, is_seen, is_seen), wide))
        logit, e_logit = model.as_read(np.full(1, -np.inf) if sink is None else np.atleast_1d(sink))
        logit = logit.astype(np.float64)[..., None, None]
        e_logit = np.broadcast_to(e_logit, logit.shape[:-2])[..., None, None]
        weights = Weights.of(dropout, problem)
        return cls(
            queries, keys, values, allowed, problem.softmax_scale, sink, logit, e_logit, shapes, model, captured,
            weights, cuts,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forward:
    """The exact forward pass and its unscaled tolerances, as needed for the gradients."""

    allowed: Array
    score: Array  # final scores, 0 where masked
    p: Array
    log_p: Array  # -inf where masked
    eta: Array
    lse: Array  # [..., rows, 1], 0 in empty rows
    o: Array
    tol_lse: Array  # [..., rows, 1]
    tol_o: Array
    final: ScoreErrors | None
    raw: tuple[Array, Array] | None  # scores before a score function, and their error
    log_p_sink: Array  # [..., rows, 1], -inf without a sink
    z: Array  # factors of weights by dropout
    z_rounding: float


def forward_tolerances(operands: Operands) -> Forward:
    model, weights, cuts = operands.model, operands.weights, operands.cuts
    values, logit, e_logit = operands.values, operands.logit, operands.e_logit
    seqlen_kv = values.shape[-2]
    ua, k_n, has_sink = model.ua, model.k(seqlen_kv), ~np.isneginf(logit)
    score, e_score, allowed, final, raw = _scores(operands)
    is_row = allowed.any(axis=-1, keepdims=True)
    row_max = np.max(score, axis=-1, keepdims=True, initial=-np.inf, where=allowed)
    row_max = np.where(is_row, row_max, 0)
    row_sum = np.sum(np.exp(score - row_max), axis=-1, keepdims=True, where=allowed)
    lse_of_keys = row_max + np.log(np.where(is_row, row_sum, 1))
    lse = np.logaddexp(np.where(is_row, lse_of_keys, -np.inf), logit)
    lse = np.where(np.isneginf(lse), 0, lse)
    log_p_sink = np.broadcast_to(logit - lse, lse.shape)
    log_p = np.where(allowed, score - lse, -np.inf)
    p = np.exp(log_p)

    eta = e_score + 4 * ua * (np.abs(score) + np.abs(row_max)) + 4 * ua
    eta = np.where(allowed, eta, 0)
    p_excess = excess_of(log_p, p, eta)
    abs_max, abs_lse, abs_sink = np.abs(row_max), np.abs(lse_of_keys), np.abs(np.where(has_sink, logit, 0))
    eta_sink = e_logit + 4 * ua * (abs_max + abs_lse) + 2 * ua * (abs_sink + abs_lse) + 8 * ua
    p_sink = np.exp(log_p_sink)
    r = p_excess.sum(axis=-1, keepdims=True) + excess_of(log_p_sink, p_sink, eta_sink)
    tol_lse = np.log1p(r) + (k_n + 8) * ua + 4 * ua * (abs_max + np.abs(lse))
    tol_lse = tol_lse + has_sink * 4 * ua * ((1 - p_sink) * abs_lse + 1)

    z, z_rounding = weights.factors, weights.roundoffs * ua
    o = (z * p) @ values
    lost = np.minimum(p, model.wp * np.exp(row_max - lse) + model.wa)
    rounding = model.up + model.t + 2 * (k_n + 8) * ua + has_sink * 4 * ua + z_rounding
    first = (z * (p_excess + lost + rounding * (p + p_excess))) @ np.abs(values)
    cut = 0.0 if cuts is None else cuts.of_output(p + p_excess, allowed, np.exp(row_max - lse))
    first = first + cut
    by_weights = (1 + r) * (first + r * np.abs(o)) + model.u * np.abs(o)
    of_mean = _rounding_of_sum(values, rounding + seqlen_kv * model.wp + model.u, has_sink | weights.is_dropping)
    tol_o = np.fmin(by_weights, weights.most * of_mean + cut)
    tol_o = tol_o + model.w + weights.most * seqlen_kv * model.wa
    tol_o = np.where(np.isfinite(eta).all(axis=-1, keepdims=True), tol_o, np.inf)  # o may be NaN
    return Forward(
        allowed=allowed, score=score, p=p, log_p=log_p, eta=eta, lse=lse, o=o,
        tol_lse=np.where(is_row, tol_lse, e_logit), tol_o=np.where(is_row, tol_o, 0), final=final, raw=raw,
        log_p_sink=log_p_sink, z=z, z_rounding=z_rounding,
    )  # fmt: skip


def _scores(
    operands: Operands,
) -> tuple[Array, Array, Array, ScoreErrors | None, tuple[Array, Array] | None]:
    """Return final scores, their errors, the attended keys, the results of the score function, and its inputs."""
    queries, keys, _, allowed, scale, *_ = operands
    model, captured, cuts = operands.model, operands.captured, operands.cuts
    head_dim, transposed = keys.shape[-1], np.swapaxes(keys, -1, -2)
    score = np.where(allowed, scale * (queries @ transposed), 0)
    mass = np.where(allowed, abs(scale) * (np.abs(queries) @ np.abs(transposed)), 0)
    e_score = ((model.k(head_dim) + 4) * model.ua + model.t) * mass
    e_score = np.where(mass * math.log2(math.e) > model.largest_sum, np.inf, e_score)  # the score may overflow
    e_score = e_score if cuts is None else e_score + cuts.of_scores(allowed, scale)
    if captured is None:
        return score, e_score, allowed, None, None
    raw = score, e_score + head_dim * model.wa * abs(scale)
    final = captured.final(*raw, allowed, model)
    allowed = allowed & ~(np.isneginf(final.f) & (final.e_f == 0))  # the function masks these keys
    score, e_score = (np.where(allowed, x, 0) for x in final[:2])
    return score, e_score, allowed, final, raw


def excess_of(log_p: Array, p: Array, eta: Array) -> Array:
    """Return p (exp(eta) - 1), also if exp(eta) overflows and p underflows."""
    return np.where(eta < 1, p * np.expm1(np.minimum(eta, 1)), np.exp(log_p + eta))


def _rounding_of_sum(values: Array, rounding: Array, has_sink: Array) -> Array:
    """Bound the distance between two weighted means of v's rows, with a relative rounding of the result.

    With a sink, 0 is one of the rows.
    """
    if not values.shape[-2]:
        return np.zeros((*values.shape[:-2], 1, values.shape[-1]))
    largest, smallest = (reduce(values, axis=-2, keepdims=True) for reduce in (np.max, np.min))
    largest = np.where(has_sink, np.maximum(largest, 0), largest)
    smallest = np.where(has_sink, np.minimum(smallest, 0), smallest)
    return largest - smallest + rounding * np.maximum(np.abs(largest), np.abs(smallest))
