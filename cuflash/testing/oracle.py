"""Exact attention for tests: SciPy's logsumexp and a loop over rows.

>>> import numpy as np
>>> o, lse = attention(np.zeros((1, 1)), np.zeros((3, 1)), np.array([[1.0], [2.0], [6.0]]))
>>> o.round(9).astype(float).tolist(), np.exp(lse).round(9).astype(float).tolist()
([[3.0]], [3.0])

Written from the definition and apart from `cuflash.reference`, so that the two check each other: only the keys that a
row attends are ever read, a row without keys is never computed, and gradients use the softmax's Jacobian instead of
D = rowsum(dO O). float64 throughout, and long double for float64 inputs, where it is wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import logsumexp

__all__ = ["attention", "attention_vjp"]


def attention(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None) -> tuple[Any, Any]:
    """o and lse, with the arguments and shapes of `cuflash.reference.attention`."""
    problem = _Rows(q, k, v, mask, scale)
    o = np.zeros((*problem.shape[:-1], v.shape[-1]), problem.dtype)
    lse = np.full(problem.shape[:-1], -np.inf, problem.dtype)
    for place, _, values, _, p, row_lse in problem:
        o[place] = p @ values
        lse[place] = row_lse
    return (o, lse) if q.ndim > 2 else (o[0], lse[0])


def attention_vjp(
    q: Any, k: Any, v: Any, do: Any, dlse: Any = None, mask: Any = None, scale: float | None = None
) -> tuple[Any, Any, Any]:
    """dq, dk and dv, with the arguments and shapes of `cuflash.reference.attention_vjp`."""
    problem = _Rows(q, k, v, mask, scale)
    dq, dk, dv = (np.zeros(_headed(x).shape, problem.dtype) for x in (q, k, v))
    do = _headed(do).astype(problem.dtype)
    dlse = np.zeros(problem.shape[:-1]) if dlse is None else np.asarray(dlse).reshape(problem.shape[:-1])
    for place, keys, values, attended, p, _ in problem:
        slope = values @ do[place]  # the derivative by each probability
        ds = p * slope - p * (p @ slope) + p * dlse[place]
        *leading, head, row = place
        kv_head = head // problem.group
        dq[(*_stretched(leading, dq), head, row)] += problem.scale * (ds @ keys)
        dk[(*_stretched(leading, dk), kv_head)][attended] += problem.scale * np.outer(ds, problem.queries[place])
        dv[(*_stretched(leading, dv), kv_head)][attended] += np.outer(p, do[place])
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


class _Rows:
    """Iterates over the rows that attend a key: place, its keys and values, their positions, probabilities, lse."""

    def __init__(self, q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> None:
        self.dtype = np.dtype(np.longdouble if np.dtype(q.dtype).itemsize >= 8 else np.float64)
        self.scale = self.dtype.type(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        q, k, v = (_headed(x).astype(self.dtype) for x in (q, k, v))
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        self.queries, self.keys, self.values = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (q, k, v))
        self.group = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
        self.shape = (*batch, q.shape[-3], q.shape[-2], k.shape[-2])
        self.allowed = np.broadcast_to(True if mask is None else mask, self.shape)

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], Any, Any, Any, Any, Any]]:
        for *leading, head in np.ndindex(self.shape[:-2]):
            where, where_kv = (*leading, head), (*leading, head // self.group)
            allowed, keys, values = self.allowed[where], self.keys[where_kv], self.values[where_kv]
            score = np.where(allowed, self.scale * (self.queries[where] @ keys.T), -np.inf)
            lse = logsumexp(score, axis=-1)
            for row in np.flatnonzero(allowed.any(axis=-1)):
                attended = _as_slice(np.flatnonzero(allowed[row]))
                p = np.exp(score[row, attended] - lse[row])
                p /= p.sum()  # at scores of 10^6 rounding lse moves all of them by more than a long double's roundoff
                yield (*where, int(row)), keys[attended], values[attended], attended, p, lse[row]


def _as_slice(positions: Any) -> Any:
    """Ascending positions; as a slice, whose rows need no copy, where they follow each other without a gap."""
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions


def _headed(x: Any) -> Any:
    return x[None] if x.ndim == 2 else x


def _stretched(leading: list[int], x: Any) -> tuple[int, ...]:
    """The leading coordinates of a broadcast array's own element."""
    own = x.shape[:-3]
    return tuple(0 if extent == 1 else place for place, extent in zip(leading[len(leading) - len(own) :], own))
