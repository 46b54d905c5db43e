"""Recall of a mask: the share of the softmax that its keys hold, and the error of the output."""

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
    """Result of `recall`.

    Parameters
    ----------
    mass : array [..., num_heads, seqlen_q]
        For each query the sum of its softmax weights over the keys that the mask allows, from 0 to 1.
    output_error : float, or CuPy array of shape ()
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
    """Measure the softmax mass that a mask keeps for each query, and how much the output changes.

    The mass is exact and takes memory linear in the length: it is exp(lse_masked - lse), the log-sum-exps of two calls
    of `attention`.

    Parameters
    ----------
    q, k, v : arrays
        As `attention` takes them.
    mask : Mask, BlockIndex, bool array, scipy.sparse array, or function of (b, h, i, j)
        The keys to keep.
    causal, window, scale, score, softcap, bias, kernel, executor, precision : optional
        As in `attention`, for both calls: the mass is a share of what `causal` and `window` allow.

    Returns
    -------
    Recall
        The mass, [..., num_heads, seqlen_q] in the dtype of sums, float32 or float64, and the output error, a float; on
        a GPU a float64 array of shape () there, so that nothing waits: `float` copies it. A query that has no key
        without the mask loses nothing: its mass is 1.

    Raises
    ------
    TypeError
        `mask` is None, or stands for no mask; or as `attention` raises it.
    UnsupportedProblem
        As `attention` raises it.

    Notes
    -----
    In float16 and bfloat16 both outputs are rounded, so that output_error is not exactly 0 for a mask that keeps all
    but a few weights.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 64, 16))
    >>> kept = cuflash.study.recall(q, k, v, mask=cuflash.masks.SlidingWindow(7, 0), causal=True)
    >>> kept.mass.shape, bool((kept.mass[:, :8] > 0.999999).all())
    ((4, 64), True)
    """
    if mask is None:
        raise TypeError(
            "mask must be a Mask, a BlockIndex, a boolean or scipy.sparse array, or a function of (b, h, i, j), of the "
            "keys to keep; got None: masks.Band() keeps all"
        )
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "score": score, "softcap": softcap, "bias": bias,
        "kernel": kernel, "executor": executor, "precision": precision,
    }  # fmt: skip
    # The call with the mask is first: it finds whatever is wrong before anything is computed.
    masked = attention(q, k, v, mask=mask, **options, return_lse=True)
    return compared(attention(q, k, v, **options, return_lse=True), masked)


def compared(dense: tuple[Array, Array], masked: tuple[Array, Array]) -> Recall:
    """Return the `Recall` of o and lse without the mask, and with it."""
    (o, lse), (kept_o, kept_lse) = dense, masked
    if not isinstance(lse, np.ndarray):
        return Recall(*compared_on_device(o, lse, kept_o, kept_lse))
    is_empty = lse == -np.inf
    with np.errstate(invalid="ignore"):
        mass = np.where(is_empty, 1, np.exp(np.minimum(kept_lse - lse, 0)))  # above 0 by rounding alone
    o, kept_o = o.astype(np.float64), kept_o.astype(np.float64)
    change, whole = (float(np.linalg.norm(x)) for x in (kept_o - o, o))
    return Recall(mass.astype(lse.dtype), change / whole if whole else np.inf if change else 0.0)
