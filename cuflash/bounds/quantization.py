"""Bounds on the difference between attention of quantized operands and attention of the original operands.

S, P, O and L are the scores, weights, output and log-sum-exp of q, k and v, and S', P', O' and L' those of the arrays
that `dequantized` returns. E = |S' - S| is computed in float64. With r = sum_j P_j (exp(E_j) - 1), quantization changes
each sum of weights by a factor between 1 / (1 + r) and 1 + r, where the lower limit follows from Jensen's inequality::

    |L' - L| <= log(1 + r)
    |P' - P| <= P (exp(E) (1 + r) - 1)
    |O' - O| <= sum_j P_j (exp(E_j) (1 + r) - 1) |v_j - O| + sum_j P_j exp(E_j) (1 + r) |v'_j - v_j|

The last line subtracts O from every row of v, which changes nothing because the weights add up to 1. The distance of O
from the farthest row of v' also bounds O' - O, and is smaller if E is large.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, describe, of_list, require_arrays
from ..calls._call import Call
from ..fp8.operands import operand_reasons
from ..fp8.quantize import Quantized
from ..keywords import explains_keywords
from ..planning.options import Causality, Options
from ..reference import allowed_of, expand_heads, with_heads


@explains_keywords
class QuantizationBound(NamedTuple):
    """Bounds on the changes of o and lse by quantization, as float64 arrays.

    Parameters
    ----------
    o, lse : array
        Arrays with the shapes of o and lse of `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.full((16, 64), 7.0, np.float32)                       # 448 times the scale, 2^-6: exact in FP8
    >>> x8 = cuflash.quantize(x)
    >>> float(cuflash.study.quantization_bound(x, x, x, x8, x8, x8).lse.max())
    0.0
    """

    o: Array
    lse: Array


@explains_keywords
def quantization_bound(
    q: Array,
    k: Array,
    v: Array,
    q8: Quantized,
    k8: Quantized,
    v8: Quantized,
    *,
    mask: Any = None,
    causal: Causality = False,
    window: Any = None,
    scale: float | None = None,
) -> QuantizationBound:
    """Bound how much quantization changes each element of o and lse in exact arithmetic.

    Parameters
    ----------
    q, k, v : arrays
        The NumPy arrays that were quantized.
    q8, k8, v8 : Quantized
        The results of `quantize` for these arrays.
    mask, causal, window, scale : optional
        As in `attention`.

    Returns
    -------
    QuantizationBound
        The bounds. They are infinite if the change of the scores is unbounded, and 0 in rows without a key.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`.

    See Also
    --------
    error_bound : The additional error by rounding in the kernels.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 100, 64), dtype=np.float32)
    >>> q8, k8, v8 = map(cuflash.quantize, (q, k, v))
    >>> o, o8 = cuflash.attention(q, k, v), cuflash.attention(q8, k8, v8)
    >>> bound = cuflash.study.quantization_bound(q, k, v, q8, k8, v8)
    >>> bool((abs(o8 - o) < bound.o + 1e-5).all()), bool(bound.o.max() < 0.2)
    (True, True)
    """
    q, k, v = (of_list(name, array, np.float64) for name, array in {"q": q, "k": k, "v": v}.items())
    require_arrays({"q": q, "k": k, "v": v})
    quantized = {"q8": q8, "k8": k8, "v8": v8}
    reasons = [
        f"{name} must be a NumPy array; got {describe(array)} of {type(array).__module__}: pass {name}.get()"
        for name, array in {"q": q, "k": k, "v": v}.items()
        if not isinstance(array, np.ndarray)
    ]
    reasons += operand_reasons(quantized)
    for (name, x), (name8, x8) in zip({"q": q, "k": k, "v": v}.items(), quantized.items()):
        if isinstance(x8, Quantized) and tuple(x.shape) != x8.shape:
            reasons.append(f"{name8} must have {name}'s shape, {tuple(x.shape)}; got {x8.shape}")
    options = Options(mask=mask, causal=causal, window=window, scale=scale)
    call = Call.of(q, k, v, options, reasons=reasons)
    allowed = call.mask.toarray(**call.problem.mask_shape._asdict())
    bound = _bound((q, k, v), (q8, k8, v8), allowed, call.problem.softmax_scale)
    return bound if call.problem.has_heads else QuantizationBound(bound.o[0], bound.lse[0])


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _bound(
    plain: tuple[Array, ...], quantized: tuple[Quantized, ...], allowed: Array | None, scale: float
) -> QuantizationBound:
    num_heads = with_heads(plain[0]).shape[-3]
    q, k, v = (expand_heads(x.astype(np.float64), num_heads) for x in plain)
    q8, k8, v8 = (expand_heads(x.scaled(np.float64), num_heads) for x in quantized)
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    allowed = allowed_of(allowed, (*batch, num_heads, q.shape[-2], k.shape[-2]))
    is_seen, is_row = allowed.any(axis=-2)[..., None], allowed.any(axis=-1, keepdims=True)
    # Keys that no query attends do not affect the result, so their values may be NaN or infinite.
    v, v8 = (np.where(is_seen, x, 0) for x in (v, v8))
    scores, scores8 = (scale * (x @ np.swapaxes(y, -1, -2)) for x, y in ((q, k), (q8, k8)))
    scores = np.where(allowed, scores, -np.inf)
    e = np.where(allowed, np.abs(scores8 - scores), 0)
    row_max = np.where(is_row, np.max(scores, axis=-1, keepdims=True, initial=-np.inf), 0)
    p = np.exp(scores - row_max)
    p = p / np.where(is_row, p.sum(axis=-1, keepdims=True), 1)
    r = (p * np.expm1(e)).sum(axis=-1, keepdims=True)
    o = p @ v
    grown = p * np.exp(e) * (1 + r)
    most, spread = np.empty(o.shape), np.empty(o.shape)
    for column in range(v.shape[-1]):  # a loop, because an array [..., queries, keys, columns] would be large
        from_o = np.abs(v[..., None, :, column] - o[..., column, None])
        added = np.abs(v8 - v)[..., None, :, column]
        most[..., column] = ((grown - p) * from_o + grown * added).sum(axis=-1)
        spread[..., column] = np.max(from_o + added, axis=-1, initial=0, where=allowed)
    bound_o, bound_lse = np.fmin(most, spread), np.log1p(r)[..., 0]
    bound_o, bound_lse = (np.where(np.isnan(x), math.inf, x) for x in (bound_o, bound_lse))
    return QuantizationBound(np.where(is_row, bound_o, 0), np.where(is_row[..., 0], bound_lse, 0))
