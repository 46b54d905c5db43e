"""Exact attention for tests: SciPy's logsumexp and a loop over heads.

>>> import numpy as np
>>> o, lse = attention(np.zeros((1, 1)), np.zeros((3, 1)), np.array([[1.0], [2.0], [6.0]]))
>>> o.round(9).astype(float).tolist(), np.exp(lse).round(9).astype(float).tolist()
([[3.0]], [3.0])

Written from the definition and apart from `cuflash.reference`, so that the two check each other: a query's results
come from the keys that it attends alone, whatever the others hold, and gradients use the softmax's Jacobian instead of
D = rowsum(dO O). float64 throughout, and long double for float64 inputs, where it is wider. NaN and infinities follow
the rule of docs/semantics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import logsumexp

__all__ = ["attention", "attention_vjp"]


@np.errstate(invalid="ignore")
def attention(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None) -> tuple[Any, Any]:
    """o and lse, with the arguments and shapes of `cuflash.reference.attention`."""
    problem = _Heads(q, k, v, mask, scale)
    o = np.zeros((*problem.shape[:-1], v.shape[-1]), problem.dtype)
    lse = np.zeros(problem.shape[:-1], problem.dtype)
    for head, kv_head in problem:
        allowed, p, lse[head] = problem.probabilities(head, kv_head)
        o[head] = _weighted(p, problem.values[kv_head], allowed)
    return (o, lse) if q.ndim > 2 else (o[0], lse[0])


@np.errstate(invalid="ignore")
def attention_vjp(
    q: Any, k: Any, v: Any, do: Any, dlse: Any = None, mask: Any = None, scale: float | None = None
) -> tuple[Any, Any, Any]:
    """dq, dk and dv, with the arguments and shapes of `cuflash.reference.attention_vjp`."""
    problem = _Heads(q, k, v, mask, scale)
    dq, dk, dv = (np.zeros(_headed(x).shape, problem.dtype) for x in (q, k, v))
    do = _headed(do).astype(problem.dtype)
    dlse = np.zeros(problem.shape[:-1]) if dlse is None else np.asarray(dlse).reshape(problem.shape[:-1])
    for head, kv_head in problem:
        allowed, p, lse = problem.probabilities(head, kv_head)
        slope_of_lse = np.where(np.isneginf(lse), 0, dlse[head])[:, None]
        slope = np.where(allowed, np.dot(do[head], problem.values[kv_head].T), 0)  # the derivative by each probability
        mean = (p * slope).sum(axis=-1, keepdims=True)
        ds = np.where(allowed, p * slope - p * mean + p * slope_of_lse, 0)
        dq[_own(head, dq)] += problem.scale * _weighted(ds, problem.keys[kv_head], allowed)
        dk[_own(kv_head, dk)] += problem.scale * _weighted(ds.T, problem.queries[head], allowed.T)
        dv[_own(kv_head, dv)] += _weighted(p.T, do[head], allowed.T)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


class _Heads:
    """Iterates over the places of each head in its batch entry, of queries and of keys."""

    def __init__(self, q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> None:
        self.dtype = np.dtype(np.longdouble if np.dtype(q.dtype).itemsize >= 8 else np.float64)
        self.scale = self.dtype.type(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        q, k, v = (_headed(x).astype(self.dtype) for x in (q, k, v))
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        self.queries, self.keys, self.values = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (q, k, v))
        self.group = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
        self.shape = (*batch, q.shape[-3], q.shape[-2], k.shape[-2])
        self.allowed = np.broadcast_to(True if mask is None else mask, self.shape)

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for *leading, head in np.ndindex(self.shape[:-2]):
            yield (*leading, head), (*leading, head // self.group)

    def probabilities(self, head: tuple[int, ...], kv_head: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """What a head's queries may attend, with which probabilities, which are 0 elsewhere, and lse."""
        allowed = self.allowed[head]
        score = np.where(allowed, self.scale * np.dot(self.queries[head], self.keys[kv_head].T), -np.inf)
        lse = logsumexp(score, axis=-1)
        lse = np.where(lse == np.inf, np.nan, lse)  # exp(inf - inf) of one score
        attends = ~np.isneginf(lse)
        p = np.exp(score - np.where(attends, lse, 0)[:, None])
        # At scores of 10^6 rounding lse moves all of them by more than a long double's roundoff.
        total = np.where(attends, p.sum(axis=-1, where=allowed), 1)
        p = np.where(allowed, p / total[:, None], 0)
        return allowed, p, lse


def _weighted(weights: Any, terms: Any, allowed: Any) -> Any:
    """Sums of terms by a row's weights, which are 0 where they are not allowed: not even a NaN there is read."""
    if np.isfinite(terms).all():
        return np.dot(weights, terms)  # of long doubles faster than @
    products = np.zeros((*weights.shape, terms.shape[-1]), weights.dtype)
    np.multiply(weights[..., None], terms, out=products, where=allowed[..., None])
    return products.sum(axis=-2)


def _headed(x: Any) -> Any:
    return x[None] if x.ndim == 2 else x


def _own(place: tuple[int, ...], x: Any) -> tuple[int, ...]:
    """The place of a head in an array that may be broadcast."""
    *leading, head = place
    own = x.shape[:-3]
    return (*(0 if extent == 1 else at for at, extent in zip(leading[len(leading) - len(own) :], own)), head)
