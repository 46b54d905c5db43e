"""The public functions, which check, plan and run calls of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, Unpack, overload

import numpy as np

from .arrays import Array, ShapeDtype
from .calls._forward import run
from .calls._call import planned
from .calls.listed_plan import listed_plan
from .calls.pullback import Pullback
from .calls.tangents import pull, push
from .calls.unchanged import writeable
from .compiler import nvrtc
from .compiler.nvrtc import Compiled
from .dropout import Dropout
from .executors import checks
from .fp8 import Quantized
from .keywords import explains_keywords
from .planning.device import DeviceSpec
from .planning.options import (
    AnyArray, CallOptions, Causality, Directions, ExecutorName, KernelFamily, MaskLike, Options, Precision, ScoreLike,
    Tangents, VjpOptions, Window,
)  # fmt: skip
from .planning.tangents import gathered
from .plans.conversion import Out, as_arrays
from .plans.plan import Gradients, Plan

_Operand: TypeAlias = AnyArray | Quantized


@overload
def attention(
    q: _Operand, k: _Operand, v: _Operand, *, out: Out = None, return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Array: ...


@overload
def attention(
    q: _Operand, k: _Operand, v: _Operand, *, out: Out = None, return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Array, Array]: ...


@overload
def attention(
    q: _Operand, k: _Operand, v: _Operand, *, out: Out = None, return_lse: bool,
    **options: Unpack[CallOptions],
) -> Array | tuple[Array, Array]: ...


@explains_keywords
def attention(
    q: _Operand,
    k: _Operand,
    v: _Operand,
    *,
    mask: MaskLike | None = None,
    causal: Causality = False,
    window: Window | None = None,
    scale: float | None = None,
    score: ScoreLike | None = None,
    softcap: float | None = None,
    bias: AnyArray | None = None,
    sink: AnyArray | None = None,
    dropout: Dropout | None = None,
    kernel: KernelFamily = "auto",
    executor: ExecutorName = "auto",
    precision: Precision = "ieee",
    deterministic: bool = False,
    q_start: int = 0,
    kv_start: int = 0,
    out: Out = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Compute exact attention, softmax(scale q k^T + mask) v, with memory linear in the sequence length.

    Parameters
    ----------
    q : array [..., num_heads, seqlen_q, head_dim] or [seqlen_q, head_dim]
        Queries: float16, bfloat16, float32 or float64, with any strides. Arrays of other libraries are used in place
        by DLPack, without a copy. Nested lists of numbers are accepted for every array. q, k and v may be `Quantized`:
        then o has the dtype that v had before quantization.
    k : array [..., num_kv_heads, seqlen_kv, head_dim] or [seqlen_kv, head_dim]
        Keys, in q's dtype. The axes before the heads broadcast by NumPy's rules. Query head h reads key/value head
        h // (num_heads / num_kv_heads).
    v : array [..., num_kv_heads, seqlen_kv, value_dim] or [seqlen_kv, value_dim]
        Values, in q's dtype.
    mask : Mask, BlockIndex, bool array, scipy.sparse array, or function of (b, h, i, j), optional
        True means that the query attends the key. An array must broadcast to (*batch, num_heads, seqlen_q, seqlen_kv);
        for padding of shape (batch, seqlen_kv), pass ``pad[:, None, None, :]``. A scipy.sparse array has shape
        (seqlen_q, seqlen_kv). A function takes index arrays of batch entries, heads, queries and keys. `mask`,
        `causal` and `window` are intersected.
    causal : bool, "bottom_right" or "top_left"
        If not False, queries attend no later keys. "bottom_right" aligns the last query with the last key, "top_left"
        the first query with the first key; True requires equal lengths.
    window : (left, right), optional
        Numbers of keys on both sides of the diagonal that `causal` aligns, inclusive; None is unlimited.
    scale : float, optional
        Factor of the scores; default: 1 / sqrt(head_dim). It may be extreme: q and k of about 1e20 with a scale of
        1e-40 are computed without overflow.
    score : Score, or callable (s, b, h, i, j), optional
        A function of each score and its position, in NumPy operations. `cuflash.scores` has functions from the
        literature, and `cuflash.scores.Score` adds captured arrays to a function. softcap and bias are applied first.
    softcap : float, optional
        If present, scores s become softcap tanh(s / softcap); must be positive.
    bias : array, optional
        Added to the scores after softcap: float16, bfloat16, float32 or float64, with any strides. Must broadcast to
        (*batch, num_heads, seqlen_q, seqlen_kv), or to (seqlen_q, seqlen_kv) for two-dimensional q, k and v. -inf masks
        a key. If q is not float64, a float64 bias, sink or array of a score function is cast to float32; values out of
        range become infinite.
    sink : array, optional
        One logit per query head that takes part in every softmax of the head but has no value, so the weights of a
        row's keys add up to less than 1. Shape (num_heads,), or any that broadcasts to (*batch, num_heads); () or (1,)
        for two-dimensional q, k and v. float16, bfloat16, float32, or float64, which is cast like a bias; any strides.
        -inf means no sink; NaN and +inf set all rows of the head to NaN.
    dropout : Dropout, optional
        Drops weights at random after the softmax; lse includes all of them.
    kernel : {"auto", "sm90", "sm80", "simt", "fa1", "naive"}
        Kernel family of the gpu and sim executors. "auto" selects the fastest family that supports the call; see
        Notes.
    executor : {"auto", "cpu", "gpu", "sim"}
        "auto" selects "gpu" for arrays on a CUDA device, which must be CuPy's current device; kernels run on its
        current stream. It selects "cpu" for all other arrays. "sim" runs the GPU kernels on a simulator, for tests.
    precision : {"ieee", "tf32", "tf32x3"}
        "ieee" multiplies and adds in float32, or in float64 if q is float64. The others multiply float32 elements on
        tensor cores of compute capability 8.0 or higher: "tf32" rounds the operands of each product to 11 significant
        bits; "tf32x3" computes three products of their upper and lower halves, with errors similar to "ieee", except
        that a product with an infinite operand is NaN. See `error_bound` for bounds. For FP8 products pass `Quantized`
        q, k and v.
    deterministic : bool
        If True, dq and the gradients of arrays of a score function are bitwise reproducible on a GPU. Otherwise thread
        blocks add to them in the order of arrival if that is faster. All other results are bitwise reproducible in
        either case.
    q_start, kv_start : int
        Positions of the first query and the first key in a longer sequence, of which q, k and v are a part. Masks,
        score functions, bias and dropout use these positions, and their arrays must cover the sequence up to the last
        query and key of the call. For chunked prefill, pass all keys so far and the chunk's start as `q_start`.
    out : array, or pair (o, lse), optional
        Arrays for the results, instead of new ones. They must not overlap q, k or v. Not available with `Quantized`
        operands.
    return_lse : bool
        If True, also return lse.

    Returns
    -------
    o : array [..., num_heads, seqlen_q, value_dim]
        C-contiguous, in q's dtype; a NumPy array, or a CuPy array on a GPU. Rows without a key are 0, with or without
        a sink.
    lse : array [..., num_heads, seqlen_q]
        Log-sum-exp of the scores and the sink, in natural units; float64 if q is float64, otherwise float32. In rows
        without a key it is the sink's logit, or -inf.

    Raises
    ------
    TypeError
        An argument is not an array of a supported library.
    UnsupportedProblem
        The arguments are invalid or not supported. The error lists every reason; nothing is computed.
    MemoryError
        The results or the tiles do not fit into memory; inputs are unchanged.
    RuntimeError
        The arrays are on a GPU and CuPy is missing, or the stream is captured before the kernels are compiled.

    Notes
    -----
    The algorithm is FlashAttention-2, arXiv 2307.08691, algorithm 1.

    The kernel families are:

    - "sm90": instructions of Hopper, for float16 and bfloat16, compute capability 9.0. Its backward pass is that of
      "sm80" for block lists with blocks smaller than 64, and for `deterministic=True` with head_dim or value_dim above
      128.
    - "sm80": tensor cores, for float16 and bfloat16, compute capability 8.0 or higher; float32 with
      `precision="tf32"` or "tf32x3".
    - "simt": every dtype, on every supported GPU.
    - "fa1": the loop of FlashAttention-1 on tensor cores, to compare algorithms; for float16 and bfloat16, head_dim and
      value_dim up to 128, compute capability 8.0 or higher; without score functions, bias, sink or dropout.
    - "naive": a baseline of three kernels that store every score, so memory is not linear; float16 and float32.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 4, 100, 64), dtype=np.float32)   # batch 2, heads 4, seqlen 100
    >>> o_causal = cuflash.attention(q, k, v, causal=True)
    >>> o_causal.shape
    (2, 4, 100, 64)
    >>> o, lse = cuflash.attention(q, k, v, mask=cuflash.masks.SlidingWindow(15, 0), return_lse=True)
    >>> lse.shape
    (2, 4, 100)
    >>> chunk = cuflash.attention(q[:, :, 60:80], k[:, :, :80], v[:, :, :80], causal=True, q_start=60)
    >>> bool(np.allclose(chunk, o_causal[:, :, 60:80], atol=1e-6))
    True
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, (), kernel, executor, precision,
        deterministic, q_start, kv_start,
    )  # fmt: skip
    _, _, o, lse = run(q, k, v, options, out, return_lse, later=())
    return (o, lse) if return_lse else o


@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *, out: Out = None, return_lse: Literal[False] = False,
    **options: Unpack[VjpOptions],
) -> tuple[Array, Callable[..., Gradients]]: ...


@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *, out: Out = None, return_lse: Literal[True],
    **options: Unpack[VjpOptions],
) -> tuple[tuple[Array, Array], Callable[..., Gradients]]: ...


@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *, out: Out = None, return_lse: bool,
    **options: Unpack[VjpOptions],
) -> tuple[Array | tuple[Array, Array], Callable[..., Gradients]]: ...


@explains_keywords
def attention_vjp(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mask: MaskLike | None = None,
    causal: Causality = False,
    window: Window | None = None,
    scale: float | None = None,
    score: ScoreLike | None = None,
    softcap: float | None = None,
    bias: AnyArray | None = None,
    sink: AnyArray | None = None,
    dropout: Dropout | None = None,
    wrt: str | Sequence[str] = (),
    kernel: KernelFamily = "auto",
    executor: ExecutorName = "auto",
    precision: Precision = "ieee",
    deterministic: bool = False,
    q_start: int = 0,
    kv_start: int = 0,
    out: Out = None,
    return_lse: bool = False,
) -> tuple[Array | tuple[Array, Array], Callable[..., Gradients]]:
    """Compute attention and return it with the function that pulls gradients back through it.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention`.
    mask, causal, window, scale, score, softcap, bias, sink, dropout : optional
        As in `attention`. The backward pass draws the dropped weights again, so an array that holds the seed must be
        unchanged until then.
    wrt : str or sequence of str
        Names of further arrays for which `vjp` returns gradients: "sink", "bias", real arrays of the score function.
    kernel, executor, precision, deterministic, q_start, kv_start, out : optional
        As in `attention`.
    return_lse : bool
        If True, return (o, lse) instead of o.

    Returns
    -------
    o : array, or pair (o, lse)
        Results of `attention`. NumPy arrays, including `out`, are read-only as long as `vjp` or a copy of it exists; to
        modify them, copy them first with ``o.copy()``.
    vjp : callable (do, dlse=None) -> Gradients
        Takes the gradients of o and, optionally, of lse; returns dq, dk, dv with the shapes and dtype of q, k, v,
        summed over broadcast axes and grouped heads. `Gradients[name]` is the gradient of an array that `wrt` names,
        with its shape and dtype. The function reads q, k, v, o, lse and the other arrays on which gradients depend: do
        not change these before the last call. A pickle of the function contains them.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError, RuntimeError
        For the same reasons as in `attention`; `vjp` raises them for do and dlse. It also raises RuntimeError if an
        array that it reads again has changed: always on the host, and on a GPU with CUFLASH_CHECK=1.

    Notes
    -----
    FlashAttention-2, arXiv 2307.08691, algorithm 2: recompute P from lse, then dS = P (dP - rowsum(dO O) + dlse).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 50, 32), dtype=np.float32)
    >>> o, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(np.ones_like(o))
    >>> dq.shape, bool(abs(dk.sum(axis=1)).max() < 1e-4)       # every row of dS sums to 0
    ((4, 50, 32), True)
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, wrt, kernel, executor, precision,
        deterministic, q_start, kv_start,
    )  # fmt: skip
    with writeable(out):
        plan, arrays, o, lse = run(q, k, v, options, out, return_lse)
    operands = {name: array for name, array in arrays.items() if name not in ("q", "k", "v")}
    return ((o, lse) if return_lse else o), Pullback(plan, arrays["q"], arrays["k"], arrays["v"], o, lse, operands)


@overload
def attention_jvp(
    q: AnyArray, k: AnyArray, v: AnyArray, q_dot: AnyArray | None = None, k_dot: AnyArray | None = None,
    v_dot: AnyArray | None = None, *, tangents: Tangents | None = None, out: Out = None,
    return_lse: Literal[False] = False, **options: Unpack[CallOptions],
) -> tuple[Array, Array]: ...


@overload
def attention_jvp(
    q: AnyArray, k: AnyArray, v: AnyArray, q_dot: AnyArray | None = None, k_dot: AnyArray | None = None,
    v_dot: AnyArray | None = None, *, tangents: Tangents | None = None, out: Out = None, return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[tuple[Array, Array], tuple[Array, Array]]: ...


@explains_keywords
def attention_jvp(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    q_dot: AnyArray | None = None,
    k_dot: AnyArray | None = None,
    v_dot: AnyArray | None = None,
    *,
    tangents: Tangents | None = None,
    mask: MaskLike | None = None,
    causal: Causality = False,
    window: Window | None = None,
    scale: float | None = None,
    score: ScoreLike | None = None,
    softcap: float | None = None,
    bias: AnyArray | None = None,
    sink: AnyArray | None = None,
    dropout: Dropout | None = None,
    kernel: KernelFamily = "auto",
    executor: ExecutorName = "auto",
    precision: Precision = "ieee",
    deterministic: bool = False,
    q_start: int = 0,
    kv_start: int = 0,
    out: Out = None,
    return_lse: bool = False,
) -> tuple[Array | tuple[Array, Array], Array | tuple[Array, Array]]:
    """Compute attention and its tangent, the derivative along tangents of its arrays, by forward-mode differentiation.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention`.
    q_dot, k_dot, v_dot : array, optional
        Tangents of q, k and v, with their shapes and dtype. Omitted ones are 0 at no cost; at least one is required.
    tangents : dict of arrays by name, optional
        Tangents of further arrays of the call, with their shapes and dtypes: "bias", "sink", and real arrays of the
        score function.
    mask, causal, window, scale, score, softcap, bias, sink, dropout : optional
        As in `attention`.
    kernel, executor, precision, deterministic, q_start, kv_start : optional
        As in `attention`. If the family of o has no tangents for a call, another family computes them: "sm90" has those
        of 16-bit dtypes up to 128 columns, without score functions and dropout, "sm80" and "simt" the others.
    out : array, or pair (o, lse), optional
        As in `attention`, for o and lse, and must not overlap tangents either; o_dot and lse_dot are new arrays.
    return_lse : bool
        If True, return (o, lse) and (o_dot, lse_dot) instead of o and o_dot.

    Returns
    -------
    o : array, or pair (o, lse)
        Bitwise identical to the results of `attention`.
    o_dot : array, or pair (o_dot, lse_dot)
        The tangents, with the shapes and dtypes of o and lse. In rows without a key, o_dot is 0 and lse_dot is the
        tangent of the sink, or 0.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError
        For the same reasons as in `attention`.

    Notes
    -----
    P_dot = P (S_dot - rowsum(P S_dot)) and o_dot = P_dot v + P v_dot, with memory linear in the length: P is recomputed
    from lse. Tangents of scores are computed relative to one number per row, so a change that all keys share costs no
    precision.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, q_dot = rng.standard_normal((4, 2, 50, 16))
    >>> o, o_dot = cuflash.attention_jvp(q, k, v, q_dot, causal=True)
    >>> step = 1e-6
    >>> moved = cuflash.attention(q + step * q_dot, k, v, causal=True)
    >>> bool(abs((moved - o) / step - o_dot).max() < 1e-5)
    True
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, (), kernel, executor, precision,
        deterministic, q_start, kv_start,
    )  # fmt: skip
    directions = Directions("attention_jvp", gathered(tangents, q=q_dot, k=k_dot, v=v_dot))
    with writeable(out):
        (_, _, o, lse), _, o_dot, lse_dot = push(q, k, v, directions, options, out, return_lse)
    return ((o, lse), (o_dot, lse_dot)) if return_lse else (o, o_dot)


@explains_keywords
def attention_hvp(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    do: AnyArray,
    q_dot: AnyArray | None = None,
    k_dot: AnyArray | None = None,
    v_dot: AnyArray | None = None,
    *,
    dlse: AnyArray | None = None,
    do_dot: AnyArray | None = None,
    dlse_dot: AnyArray | None = None,
    tangents: Tangents | None = None,
    mask: MaskLike | None = None,
    causal: Causality = False,
    window: Window | None = None,
    scale: float | None = None,
    score: ScoreLike | None = None,
    softcap: float | None = None,
    bias: AnyArray | None = None,
    sink: AnyArray | None = None,
    dropout: Dropout | None = None,
    wrt: str | Sequence[str] = (),
    kernel: KernelFamily = "auto",
    executor: ExecutorName = "auto",
    precision: Precision = "ieee",
    deterministic: bool = False,
    q_start: int = 0,
    kv_start: int = 0,
    return_lse: bool = False,
) -> tuple[Array | tuple[Array, Array], Gradients, Gradients]:
    """Compute attention, its gradients, and tangents of the gradients: Hessian-vector products, forward over reverse.

    Without `do_dot` and `dlse_dot`, the tangents are the Hessian of sum(do * o) + sum(dlse * lse) times the vector of
    the arrays' tangents.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention_jvp`.
    do : array
        The gradient of o, with o's shape and dtype.
    q_dot, k_dot, v_dot : arrays, optional
        As in `attention_jvp`.
    dlse : array, optional
        The gradient of lse, with lse's shape and dtype; default: zero.
    do_dot, dlse_dot : array, optional
        Tangents of do and dlse. If a loss follows attention, they are its Hessian times the tangents of o and lse.
    tangents : dict of arrays by name, optional
        As in `attention_jvp`.
    mask, causal, window, scale, score, softcap, bias, sink, dropout : optional
        As in `attention`.
    wrt : str or tuple of str
        As in `attention_vjp`.
    kernel, executor, precision, deterministic, q_start, kv_start : optional
        As in `attention_jvp`.
    return_lse : bool
        If True, return (o, lse) instead of o.

    Returns
    -------
    o : array, or pair (o, lse)
        Results of `attention`.
    gradients : Gradients
        Results of the vjp of `attention_vjp` for do and dlse.
    gradients_dot : Gradients
        The tangents of the gradients, with the same names.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError
        For the same reasons as in `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, do, q_dot = rng.standard_normal((5, 2, 50, 16))
    >>> o, gradients, gradients_dot = cuflash.attention_hvp(q, k, v, do, q_dot, causal=True)
    >>> step = 1e-6
    >>> _, vjp = cuflash.attention_vjp(q + step * q_dot, k, v, causal=True)
    >>> bool(abs((vjp(do).dk - gradients.dk) / step - gradients_dot.dk).max() < 1e-4)
    True
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, wrt, kernel, executor, precision,
        deterministic, q_start, kv_start,
    )  # fmt: skip
    dots = gathered(tangents, q=q_dot, k=k_dot, v=v_dot, do=do_dot, dlse=dlse_dot)
    o, lse, gradients, gradients_dot = pull(q, k, v, do, dlse, dots, options, return_lse)
    return ((o, lse) if return_lse else o), gradients, gradients_dot


@explains_keywords
def plan(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mask: MaskLike | None = None,
    causal: Causality = False,
    window: Window | None = None,
    scale: float | None = None,
    score: ScoreLike | None = None,
    softcap: float | None = None,
    bias: AnyArray | None = None,
    sink: AnyArray | None = None,
    dropout: Dropout | None = None,
    wrt: str | Sequence[str] = (),
    kernel: KernelFamily = "auto",
    executor: ExecutorName = "auto",
    precision: Precision = "ieee",
    deterministic: bool = False,
    q_start: int = 0,
    kv_start: int = 0,
    device: DeviceSpec | None = None,
    tangents: str | Sequence[str] = (),
) -> Plan:
    """Plan a call once, to run it many times.

    Parameters
    ----------
    q, k, v : arrays or ShapeDtype
        As in `attention`; a ShapeDtype replaces an array of which only the shape and dtype are known.
    mask, causal, window, scale : optional
        As in `attention`.
    score, softcap, bias : optional
        As in `attention`; arrays may be `ShapeDtype`. Calls of the plan use the arrays that it was created with, or
        others with the same shapes and dtypes that are passed by name: ``forward(q, k, v, bias=another)``.
    sink : array, or ShapeDtype, optional
        As in `attention`; calls of the plan take a sink with this shape and dtype.
    dropout : Dropout, optional
        As in `attention`; a seed may be a `ShapeDtype`. Calls use the array that the plan was created with, or another
        one that is passed by name: ``forward(q, k, v, dropout_seed=another)``.
    wrt : str or sequence of str
        As in `attention_vjp`.
    kernel, executor, precision, deterministic, q_start, kv_start : optional
        As in `attention`.
    device : DeviceSpec, optional
        Plan for this device instead of the current one. A plan for a GPU runs on any GPU of its compute capability.
    tangents : str or tuple of str
        Names of arrays, including "q", "k" and "v", whose tangents ``jvp`` and ``backward_jvp`` will take: these passes
        are then part of the plan, and `compile` compiles their kernels. Both also accept tangents not named here.

    Returns
    -------
    Plan
        The plan, with ``forward(q, k, v, out=)``, ``backward(do, q, k, v, o, lse, dlse=)``, both also with ``sink=``,
        ``jvp``, ``backward_jvp``, ``explain()``, ``workspace_bytes`` and ``compile()``.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> shape = cuflash.ShapeDtype((8, 4096, 64), np.float32)
    >>> ready = cuflash.plan(shape, shape, shape, causal=True, device=cuflash.DeviceSpec.gpu("H100"))
    >>> print(ready.explain())  # doctest: +ELLIPSIS
    executor   gpu
    kernels    simt, by kernel='auto': it serves every dtype, mask and chip
    problem    batch (), 8 heads, 4096 queries, 4096 keys, dims 64 and 64, float32, scale 0.125
    device     H100: sm_90, 132 multiprocessors, 227 KiB for a tile
    kernel     simt_forward: 128 queries x 64 keys, grid 256, 87040 bytes of shared memory, ...
    kernel     simt_backward_statistics: ...
    kernel     simt_backward: ...
    gradients  dq by atomic additions: its bits may differ from call to call, for speed
    work       computed on the fly: query i attends key j if j <= i; no block list is stored
    FLOPs      17716740096 forward
    workspace  131072 bytes, 0 of them the work list
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, wrt, kernel, executor, precision,
        deterministic, q_start, kv_start, tangents,
    )  # fmt: skip
    listed = listed_plan(q, k, v, options) if options.mask is not None and device is None else None
    return listed or planned(q, k, v, options, device)


@explains_keywords
def precompile(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mask: MaskLike | None = None,
    causal: Causality = False,
    window: Window | None = None,
    scale: float | None = None,
    score: ScoreLike | None = None,
    softcap: float | None = None,
    bias: AnyArray | None = None,
    sink: AnyArray | None = None,
    dropout: Dropout | None = None,
    wrt: str | Sequence[str] = (),
    kernel: KernelFamily = "auto",
    precision: Precision = "ieee",
    deterministic: bool = False,
    q_start: int = 0,
    kv_start: int = 0,
    device: DeviceSpec | None = None,
    tangents: str | Sequence[str] = (),
) -> tuple[Compiled, ...]:
    """Compile the kernels of a call in advance: for this machine's GPU, or for any GPU, even without one.

    Parameters
    ----------
    q, k, v : arrays or ShapeDtype
        As in `attention`, but only shapes and dtypes matter: ShapeDtype or a NumPy array represents an array on a GPU.
    mask, causal, window, scale : optional
        As in `attention`.
    score, softcap, bias, sink, dropout, wrt : optional
        As in `plan`.
    kernel, precision, deterministic, q_start, kv_start : optional
        As in `attention`.
    device : DeviceSpec, optional
        Compile for this GPU; the machine code is returned but not cached. By default, kernels are loaded on the
        current device, where later calls use them, and CuPy's cache stores them for other processes.
    tangents : str or tuple of str
        As in `plan`: the kernels of these passes are compiled, too.

    Returns
    -------
    tuple of records
        For each kernel: `spec`, `architecture`, `seconds`, `is_from_cache`, `resources` (registers, stack, shared
        memory and spills), the compiler's `log`, and `code`, which is empty if only the driver has it.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`.
    CompileError, RuntimeError
        A kernel does not compile; a package is missing; or, without `device`, the GPU is missing.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> shape = cuflash.ShapeDtype((8, 4096, 64), np.float32)
    >>> compiled = cuflash.precompile(shape, shape, shape, device=cuflash.DeviceSpec.gpu("A100"))
    >>> [(each.spec.entry.name, each.architecture, each.resources.spill_bytes) for each in compiled]
    [('forward', 'sm_80', 0), ('backward_statistics', 'sm_80', 0), ('backward', 'sm_80', 0)]
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, wrt, kernel, "gpu", precision,
        deterministic, q_start, kv_start, tangents,
    )  # fmt: skip
    q, k, v = as_arrays({"q": q, "k": k, "v": v}).values()
    if device is None:  # host arrays only define shapes: the kernels are for a GPU
        q, k, v = (ShapeDtype(x.shape, x.dtype) if type(x) is np.ndarray else x for x in (q, k, v))
    ready = planned(q, k, v, options, device)
    specs, capability = ready._plan.specs.values(), ready._plan.device.compute_capability
    assert capability is not None
    if device is None:
        return nvrtc.precompile(map(checks.with_watchdog, specs), capability)
    return nvrtc.precompile(specs, nvrtc.architecture(next(iter(specs)), capability))
