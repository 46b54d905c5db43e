"""Exact attention for tests, by a loop over heads.

>>> import numpy as np
>>> operands = np.zeros((1, 1)), np.zeros((3, 1)), np.array([[1.0], [2.0], [6.0]])
>>> o, lse = Heads(*operands).attention()
>>> o.round(9).astype(float).tolist(), np.exp(lse).round(9).astype(float).tolist()
([[3.0]], [3.0])

This is written from the definition, independently of `cuflash.reference`, so that the two check each other. The results
of a query depend only on the keys that it attends, and gradients use the Jacobian of the softmax instead of
D = rowsum(dO O). The computation is in float64, or in long double for float64 inputs. NaN and infinities follow the
rule of docs/semantics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from ..arrays import Array
from .dual import Captured, Dual


class FunctionOfScores(Protocol):
    """An object with a function of (s, b, h, i, j, **arrays), and with the arrays that it captures, by name."""

    @property
    def function(self) -> Callable[..., Array]: ...
    @property
    def arrays(self) -> Mapping[str, Array]: ...


class Heads:
    """The heads of all batch entries of one call, whose results share the probabilities.

    Iteration yields the index of each query head and that of its key/value head.
    """

    def __init__(
        self, q: Array, k: Array, v: Array, mask: Array | None = None, scale: float | None = None,
        sink: Array | None = None, score: FunctionOfScores | None = None, factors: Array | None = None,
    ) -> None:
        q_shape, k_shape, v_shape = (np.shape(x) for x in (q, k, v))
        self.dtype = np.dtype(np.longdouble if np.dtype(q.dtype).itemsize >= 8 else np.float64)
        self.scale = self.dtype.type(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        q, k, v = (_headed(x).astype(self.dtype) for x in (q, k, v))
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        self.queries, self.keys, self.values = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (q, k, v))
        self.group = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
        self.shape = (*batch, q.shape[-3], q.shape[-2], k.shape[-2])
        self.allowed = np.broadcast_to(True if mask is None else mask, self.shape)
        self.factors = np.broadcast_to(self.dtype.type(1) if factors is None else factors, self.shape)
        sinks = self.dtype.type(-np.inf) if sink is None else np.asarray(sink).astype(self.dtype)
        self.sinks = np.broadcast_to(sinks, self.shape[:-2])
        self.final = None if score is None else _Final(score, self.raw())
        self._computed: dict[tuple[int, ...], tuple[Array, Array, Array, Array]] = {}
        self._arguments = q_shape, k_shape, v_shape, None if sink is None else np.shape(sink)

    def raw(self) -> np.ndarray:
        """Return the scores of all heads before the score function."""
        raw = np.empty(self.shape, self.dtype)
        for head, kv_head in self:
            raw[head] = self.scale * np.dot(self.queries[head], self.keys[kv_head].T)
        return raw

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for *leading, head in np.ndindex(self.shape[:-2]):
            yield (*leading, head), (*leading, head // self.group)

    @np.errstate(invalid="ignore")
    def attention(self) -> tuple[Array, Array]:
        """Return o and lse."""
        o = np.zeros((*self.shape[:-1], self.values.shape[-1]), self.dtype)
        lse = np.zeros(self.shape[:-1], self.dtype)
        for head, kv_head in self:
            allowed, p, lse[head], _ = self.probabilities(head, kv_head)
            o[head] = _weighted(p * self.factors[head], self.values[kv_head], allowed)
            o[head][np.isnan(lse[head])] = np.nan
        return (o, lse) if len(self._arguments[0]) > 2 else (o[0], lse[0])

    @np.errstate(invalid="ignore")
    def vjp(self, do: Array, dlse: Array, wrt: tuple[str, ...]) -> tuple[Array, ...]:
        """Return dq, dk, dv, dsink if there is a sink, and the gradients of the score's arrays that `wrt` names."""
        q_shape, k_shape, v_shape, sink_shape = self._arguments
        final_gradient = np.zeros(self.shape, self.dtype)
        dq, dk, dv = (np.zeros(_headed(np.empty(x)).shape, self.dtype) for x in (q_shape, k_shape, v_shape))
        do = _headed(do).astype(self.dtype)
        dlse = np.zeros(self.shape[:-1]) if dlse is None else np.asarray(dlse).reshape(self.shape[:-1])
        dsink = np.zeros(self.sinks.shape, self.dtype)
        for head, kv_head in self:
            allowed, p, lse, p_sink = self.probabilities(head, kv_head)
            slope_of_lse = np.where(np.isneginf(lse), 0, dlse[head])[:, None]
            factors = self.factors[head]
            by_weight = np.dot(do[head], self.values[kv_head].T)
            slope = np.where(allowed & (factors != 0), by_weight * factors, 0)  # with respect to probabilities
            mean = (p * slope).sum(axis=-1, keepdims=True)
            ds = np.where(allowed, p * slope - p * mean + p * slope_of_lse, 0)
            if self.final is not None:
                final_gradient[head] = ds = np.where(p == 0, 0, ds)
                ds = np.where(p == 0, 0, ds * self.final.slope[head])
            dq[_own(head, dq)] += self.scale * _weighted(ds, self.keys[kv_head], allowed)
            dk[_own(kv_head, dk)] += self.scale * _weighted(ds.T, self.queries[head], allowed.T)
            dv[_own(kv_head, dv)] += _weighted((p * factors).T, do[head], allowed.T)
            dsink[head] = np.where(p_sink == 0, 0, p_sink * (slope_of_lse - mean)[:, 0]).sum()
        gradients: tuple[Array, ...] = dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(v_shape)
        if sink_shape is not None:
            gradients = *gradients, _summed_to(dsink, sink_shape)
        return gradients if self.final is None else (*gradients, *self.final.gradients(wrt, final_gradient))

    def probabilities(self, head: tuple[int, ...], kv_head: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
        """Return the mask, the probabilities (0 for masked keys) and the lse of a head, and P of the sink."""
        if head not in self._computed:
            self._computed[head] = self._softmax(head, kv_head)
        return self._computed[head]

    def _softmax(self, head: tuple[int, ...], kv_head: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
        allowed = self.allowed[head]
        if self.final is None:
            score = self.scale * np.dot(self.queries[head], self.keys[kv_head].T)
        else:
            score = self.final.value[head]
        score = np.where(allowed, score, -np.inf)
        sink = np.broadcast_to(self.sinks[head], len(score))
        largest = np.maximum(score.max(axis=-1, initial=-np.inf), sink)
        shift = np.where(np.isfinite(largest), largest, 0)
        with np.errstate(divide="ignore", over="ignore"):
            p, p_sink = np.exp(score - shift[:, None]), np.exp(sink - shift)
            total = p.sum(axis=-1) + p_sink
            lse = shift + np.log(total)
        lse = np.where(lse == np.inf, np.nan, lse)  # the weight of an infinite score is exp(inf - inf) = NaN
        total = np.where(np.isfinite(lse), total, np.where(np.isneginf(lse), 1, np.nan))
        return allowed, np.where(allowed, p / total[:, None], 0), lse, p_sink / total


def _widened(array: np.ndarray) -> np.ndarray:
    """Convert integers to int64, because supported programs never overflow int32 but narrower dtypes may."""
    return np.asarray(array).astype(np.int64) if array.dtype.kind in "iu" and array.dtype.itemsize < 8 else array


class _Final:
    """The final scores of all heads, with derivatives with respect to the scores and to the arrays of the function."""

    def __init__(self, score: FunctionOfScores, raw: np.ndarray) -> None:
        *batch, num_heads, seqlen_q, seqlen_kv = raw.shape
        h, i, j = np.ogrid[:num_heads, :seqlen_q, :seqlen_kv]
        b = np.arange(math.prod(batch)).reshape(*batch, 1, 1, 1)
        arrays = {
            name: _widened(array) if array.dtype.kind in "iub" else np.asarray(array).astype(raw.dtype)
            for name, array in score.arrays.items()
        }
        self.reads = {name: Captured(array) for name, array in arrays.items() if array.dtype == raw.dtype}
        arguments = {name: self.reads[name].read() if name in self.reads else array for name, array in arrays.items()}
        with np.errstate(all="ignore"):
            result = score.function(Dual(raw, {"s": np.ones_like(raw)}), b, h, i, j, **arguments)
        self._result = result if isinstance(result, Dual) else Dual(result, {})
        self.value = np.broadcast_to(self._result.value, raw.shape)
        self.slope = np.broadcast_to(self._result.tangents.get("s", 0), raw.shape)

    def gradients(self, names: tuple[str, ...], final_gradient: np.ndarray) -> Iterator[Array]:
        """Yield the gradients of the arrays with these names."""
        return (self.reads[name].gradient(self._result, final_gradient) for name in names)


def _weighted(weights: np.ndarray, terms: np.ndarray, allowed: np.ndarray) -> Array:
    """Return the sums of terms with a row's weights; masked terms are not read, so NaN in them have no effect."""
    if np.isfinite(terms).all():
        return np.dot(weights, terms)  # faster than @ for long double
    products = np.zeros((*weights.shape, terms.shape[-1]), weights.dtype)
    np.multiply(weights[..., None], terms, out=products, where=allowed[..., None])
    return products.sum(axis=-2)


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> Array:
    """Sum an array over the axes along which an array of this shape was broadcast."""
    missing = x.ndim - len(shape)
    stretched = [missing + axis for axis, extent in enumerate(shape) if extent != x.shape[missing + axis]]
    return x.sum(axis=(*range(missing), *stretched)).reshape(shape)


def _headed(x: np.ndarray) -> np.ndarray:
    return x[None] if x.ndim == 2 else x


def _own(index: tuple[int, ...], x: np.ndarray) -> tuple[int, ...]:
    """Return the index of a head in an array whose batch axes may have length 1 or be missing."""
    *leading, head = index
    own = x.shape[:-3]
    return (*(0 if extent == 1 else at for at, extent in zip(leading[len(leading) - len(own) :], own)), head)
