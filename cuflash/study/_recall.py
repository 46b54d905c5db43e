"""Recall of a mask: the softmax mass of the keys that it keeps, and the error of the output."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..api import attention
from ..arrays import Array
from ..executors._results import compared as compared_on_device
from ..keywords import explains_keywords
from ..planning.options import (
    AnyArray, Causality, ExecutorName, KernelFamily, MaskLike, Precision, ScoreLike, Window,
)  # fmt: skip


@explains_keywords
class Recall(NamedTuple):
    """The result of `recall`.

    Parameters
    ----------
    mass : array [..., num_heads, seqlen_q]
        The sum of each query's softmax weights over the keys that the mask keeps, from 0 to 1.
    output_error : float, or 0-d CuPy array
        Frobenius norm of the change of the output, divided by the norm of the output without the mask.

    Examples
    --------
    >>> import numpy as np
    >>> Recall(np.ones((2, 4)), 0.0).mass.mean()
    np.float64(1.0)
    """

    mass: Array
    output_error: float | Array


@explains_keywords
def recall(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mask: MaskLike,
    causal: Causality = False,
    window: Window | None = None,
    scale: float | None = None,
    score: ScoreLike | None = None,
    softcap: float | None = None,
    bias: AnyArray | None = None,
    kernel: KernelFamily = "auto",
    executor: ExecutorName = "auto",
    precision: Precision = "ieee",
) -> Recall:
    """Measure the softmax mass that a mask keeps for each query, and how much the mask changes the output.

    The mass is exact and takes memory linear in the length: it is exp(lse_masked - lse), from two calls of `attention`,
    with and without the mask.

    Parameters
    ----------
    q, k, v : arrays
        Queries, keys and values, as in `attention`.
    mask : Mask, BlockIndex, bool array, scipy.sparse array, or function of (b, h, i, j)
        The keys to keep.
    causal, window, scale, score, softcap, bias, kernel, executor, precision : optional
        As in `attention`, for both calls: the mass is a share of what `causal` and `window` allow.

    Returns
    -------
    Recall
        The mass, [..., num_heads, seqlen_q] in float32 or float64, and the output error as a float. On a GPU the error
        is a 0-d float64 array, so that the call does not wait for the device; `float` copies it. The mass is 1 for a
        query that attends no key even without the mask.

    Raises
    ------
    TypeError
        `mask` is None or is not a mask, or `attention` raises the error.
    UnsupportedProblem
        For the same reasons as in `attention`.

    Notes
    -----
    In float16 and bfloat16 both outputs are rounded, so output_error may be above 0 even if the mask drops only
    negligible weights.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 64, 16))
    >>> result = cuflash.study.recall(q, k, v, mask=cuflash.masks.SlidingWindow(7, 0), causal=True)
    >>> result.mass.shape, bool((result.mass[:, :8] > 0.999999).all())
    ((4, 64), True)
    """
    if mask is None:
        raise TypeError(
            "mask must be a Mask, a BlockIndex, a boolean or scipy.sparse array, or a function of (b, h, i, j), of the "
            "keys to keep; got None: use masks.Band() to keep all keys"
        )
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "score": score, "softcap": softcap, "bias": bias,
        "kernel": kernel, "executor": executor, "precision": precision,
    }  # fmt: skip
    # The call with the mask comes first, because it checks all arguments before anything is computed.
    masked = attention(q, k, v, mask=mask, **options, return_lse=True)
    return compared(attention(q, k, v, **options, return_lse=True), masked)


@np.errstate(all="ignore")
def compared(dense: tuple[Array, Array], masked: tuple[Array, Array]) -> Recall:
    """Return the `Recall` for o and lse without the mask and with the mask."""
    (o, lse), (kept_o, kept_lse) = dense, masked
    if not isinstance(lse, np.ndarray):
        return Recall(*compared_on_device(o, lse, kept_o, kept_lse))
    is_empty = lse == -np.inf
    mass = np.where(is_empty, 1, np.exp(np.minimum(kept_lse - lse, 0)))  # only rounding makes the exponent exceed 0
    o, kept_o = o.astype(np.float64), kept_o.astype(np.float64)
    change, whole = (float(np.linalg.norm(x)) for x in (kept_o - o, o))
    return Recall(mass.astype(lse.dtype), change / whole if whole else np.inf if change else 0.0)
