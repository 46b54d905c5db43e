"""The public functions: check, plan, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, Unpack, overload

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
from .plans import Gradients, Plan, as_arrays

_Operand: TypeAlias = AnyArray | Quantized


@overload
def attention(
    q: _Operand, k: _Operand, v: _Operand, *, out: Any = None, return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Array: ...


@overload
def attention(
    q: _Operand, k: _Operand, v: _Operand, *, out: Any = None, return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Array, Array]: ...


@overload
def attention(
    q: _Operand, k: _Operand, v: _Operand, *, out: Any = None, return_lse: bool,
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
    out: Any = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Exact attention, softmax(scale q k^T + mask) v, in memory linear in the length.

    Parameters
    ----------
    q : array [..., num_heads, seqlen_q, head_dim] or [seqlen_q, head_dim]
        Queries, of float16, bfloat16, float32 or float64, with any strides. An array of any library with DLPack is
        used where it lies, without a copy. Nested lists of numbers are taken wherever an array is. q, k and v may be
        `Quantized`: o has the dtype from which v was quantised.
    k : array [..., num_kv_heads, seqlen_kv, head_dim] or [seqlen_kv, head_dim]
        Keys, of q's dtype. The axes before the heads broadcast by NumPy's rules. Query head h reads key/value head
        h // (num_heads / num_kv_heads).
    v : array [..., num_kv_heads, seqlen_kv, value_dim] or [seqlen_kv, value_dim]
        Values, of q's dtype.
    mask : Mask, BlockIndex, bool array, scipy.sparse array, or function of (b, h, i, j), optional
        True means that the query attends the key. An array broadcasts against
        (*batch, num_heads, seqlen_q, seqlen_kv): padding of shape (batch, seqlen_kv) is ``pad[:, None, None, :]``. A
        scipy.sparse array has shape (seqlen_q, seqlen_kv), and a function takes index arrays of batch entries, heads,
        queries and keys. `mask`, `causal` and `window` are intersected.
    causal : bool, "bottom_right" or "top_left"
        Queries attend no later keys. "bottom_right" aligns the last query with the last key, "top_left" the first with
        the first; True needs equal lengths.
    window : (left, right), optional
        Keys on either side of the diagonal that `causal` aligns, inclusive; None is unlimited.
    scale : float, optional
        Factor of the scores, 1 / sqrt(head_dim) unless given. It may be of any size: q and k of 1e20 with a scale of
        1e-40 have scores as any others.
    score : Score, or callable (s, b, h, i, j), optional
        A function of each score and its place that NumPy's operations make up; `cuflash.scores` has those of the
        literature, and `cuflash.scores.Score` captures arrays for one. softcap and bias are applied first.
    softcap : float, optional
        Scores s become softcap tanh(s / softcap); positive.
    bias : array, optional
        Added to the scores, after softcap: float16, bfloat16, float32 or float64, that broadcasts to
        (*batch, num_heads, seqlen_q, seqlen_kv), or (seqlen_q, seqlen_kv) for two-dimensional q, k and v; any strides.
        -inf hides a key. Unless q is float64, each number of a float64 bias, sink or array of a score function is cast
        to float32; beyond float32's range it is infinite.
    sink : array, optional
        A logit for each query head that takes part in every softmax of the head and has no value: the weights of a
        row's keys add up to less than 1. Shape (num_heads,), or any that broadcasts to (*batch, num_heads); () or (1,)
        for two-dimensional q, k and v. float16, bfloat16, float32, or float64, which is cast as that of a bias; any
        strides. -inf is no sink; NaN and +inf make all rows of the head NaN.
    dropout : Dropout, optional
        Which weights are dropped, after the softmax; lse is that of all of them.
    kernel : {"auto", "sm90", "sm80", "simt", "fa1", "naive"}
        Kernel family of the gpu and sim executors. "auto" takes the fastest that supports the call; Notes has the
        rest.
    executor : {"auto", "cpu", "gpu", "sim"}
        "auto" takes "gpu" for arrays on a CUDA device, which must be CuPy's current one; everything runs on its
        current stream. It takes "cpu" for all other arrays. "sim" runs the GPU's kernels on a simulator, for tests.
    precision : {"ieee", "tf32", "tf32x3"}
        "ieee" multiplies and sums in float32 (float64 for float64). The others multiply float32 on tensor cores of
        compute capability 8.0 or newer: "tf32" rounds the operands of each product to 11 significant bits; "tf32x3"
        makes three products of their upper and lower halves and errs about as "ieee" does, except that a product with
        an infinite operand is NaN. `error_bound` bounds each. For FP8 products pass `Quantized` q, k and v.
    deterministic : bool
        Whether dq, and gradients of arrays of a score function, must be bitwise repeatable on a GPU. Otherwise thread
        blocks add to them in the order in which they arrive, where that is faster. All other results are bitwise
        repeatable either way.
    out : array, or pair (o, lse), optional
        Arrays that are written to instead of new ones. They must not overlap q, k or v. A call with `Quantized`
        operands does not take it.
    return_lse : bool
        Also return lse.

    Returns
    -------
    o : array [..., num_heads, seqlen_q, value_dim]
        C-contiguous, of q's dtype; a NumPy array, or a CuPy array on a GPU. 0 in rows without a key, with or without
        a sink.
    lse : array [..., num_heads, seqlen_q]
        Log-sum-exp of the scores and the sink, natural logarithm, float32 (float64 for float64). In rows without a key
        it is the sink, or -inf.

    Raises
    ------
    TypeError
        An argument is not an array of a known kind.
    UnsupportedProblem
        The arguments are invalid or not supported. It lists every reason; nothing has been computed.
    MemoryError
        The results or the tiles do not fit; inputs stay as they were.
    RuntimeError
        The arrays are on a GPU and CuPy is missing, or the stream is captured before the kernels are compiled.

    Notes
    -----
    FlashAttention-2, arXiv 2307.08691, algorithm 1.

    The families of kernels are:

    - "sm90": Hopper's own instructions, float16 and bfloat16, compute capability 9.0. Its backward pass is that of
      "sm80" for block lists with blocks smaller than 64, and for `deterministic=True` with dims above 128.
    - "sm80": tensor cores, float16 and bfloat16, compute capability 8.0 or newer; float32 with `precision="tf32"` or
      "tf32x3".
    - "simt": every dtype, on every supported chip.
    - "fa1": the loop of FlashAttention-1 on tensor cores, to compare algorithms; float16 and bfloat16, dims up to 128,
      compute capability 8.0 or newer; no score function, bias, sink or dropout.
    - "naive": a baseline of three kernels that store every score, so that memory is not linear; float16 and float32.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 4, 100, 64), dtype=np.float32)   # batch 2, heads 4, seqlen 100
    >>> o = cuflash.attention(q, k, v, causal=True)
    >>> o.shape
    (2, 4, 100, 64)
    >>> o, lse = cuflash.attention(q, k, v, mask=cuflash.masks.SlidingWindow(15, 0), return_lse=True)
    >>> lse.shape
    (2, 4, 100)
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, (), kernel, executor, precision,
        deterministic,
    )  # fmt: skip
    _, _, o, lse = run(q, k, v, options, out, return_lse, has_gradient=False)
    return (o, lse) if return_lse else o


@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *, out: Any = None, return_lse: Literal[False] = False,
    **options: Unpack[VjpOptions],
) -> tuple[Array, Callable[..., Gradients]]: ...


@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *, out: Any = None, return_lse: Literal[True],
    **options: Unpack[VjpOptions],
) -> tuple[tuple[Array, Array], Callable[..., Gradients]]: ...


@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *, out: Any = None, return_lse: bool,
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
    out: Any = None,
    return_lse: bool = False,
) -> tuple[Any, Callable[..., Gradients]]:
    """Compute attention and return it with the function that pulls gradients back through it.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention`.
    mask, causal, window, scale, score, softcap, bias, sink, dropout : optional
        As in `attention`. The backward pass draws the dropped weights a second time: an array that holds the seed must
        still hold it then.
    wrt : str or sequence of str
        Names of further arrays that `vjp` gives a gradient of: "sink", "bias", and real arrays of the score function.
    kernel, executor, precision, deterministic, out : optional
        As in `attention`.
    return_lse : bool
        Return (o, lse) in o's place.

    Returns
    -------
    o : array, or pair (o, lse)
        What `attention` returns. NumPy arrays are read-only as long as `vjp` or a copy of it lives, `out` among them:
        write to ``o.copy()``.
    vjp : callable (do, dlse=None) -> Gradients
        Takes cotangents of o and, optionally, of lse; returns dq, dk, dv of the shapes and dtype of q, k, v, summed
        over broadcast axes and grouped heads. Of an array that `wrt` names, `Gradients[name]` is the gradient, of its
        shape and dtype. It reads q, k, v, o and lse again, and further arrays that gradients need: leave them as they
        are until then. A pickle of it holds them.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError, RuntimeError
        As `attention`; `vjp` raises them for do and dlse. It also raises RuntimeError if an array that it reads again
        has changed: always on the host, and on a GPU with CUFLASH_CHECK=1.

    Notes
    -----
    FlashAttention-2, arXiv 2307.08691, algorithm 2: P is recomputed from lse, dS = P (dP - rowsum(dO O) + dlse).

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
        deterministic,
    )  # fmt: skip
    with writeable(out):
        plan, arrays, o, lse = run(q, k, v, options, out, return_lse)
    operands = {name: array for name, array in arrays.items() if name not in ("q", "k", "v")}
    return ((o, lse) if return_lse else o), Pullback(plan, arrays["q"], arrays["k"], arrays["v"], o, lse, operands)


@overload
def attention_jvp(
    q: AnyArray, k: AnyArray, v: AnyArray, q_dot: AnyArray | None = None, k_dot: AnyArray | None = None,
    v_dot: AnyArray | None = None, *, tangents: Tangents | None = None, out: Any = None,
    return_lse: Literal[False] = False, **options: Unpack[CallOptions],
) -> tuple[Array, Array]: ...


@overload
def attention_jvp(
    q: AnyArray, k: AnyArray, v: AnyArray, q_dot: AnyArray | None = None, k_dot: AnyArray | None = None,
    v_dot: AnyArray | None = None, *, tangents: Tangents | None = None, out: Any = None, return_lse: Literal[True],
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
    out: Any = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    """Compute attention and its tangent: the derivative along tangents of its arrays, by forward-mode differentiation.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention`; NumPy arrays, or arrays of other libraries on the host.
    q_dot, k_dot, v_dot : array, optional
        Tangents of q, k and v, of their shapes and dtype. An absent one is 0 and costs nothing; one must be there.
    tangents : dict of arrays by name, optional
        Tangents of further arrays of the call, of their shapes and dtypes: "bias", "sink", and real arrays of the
        score function.
    mask, causal, window, scale, score, softcap, bias, sink, dropout : optional
        As in `attention`.
    kernel, executor, precision, deterministic : optional
        As in `attention`. Tangents need executor="cpu", which "auto" takes for arrays on the host.
    out : array, or pair (o, lse), optional
        As in `attention`, for o and lse; tangents are new arrays.
    return_lse : bool
        Return (o, lse) and (o_dot, lse_dot) instead of o and o_dot.

    Returns
    -------
    o : array, or pair (o, lse)
        What `attention` returns, bit for bit.
    o_dot : array, or pair (o_dot, lse_dot)
        The tangents, of the shapes and dtypes of o and lse; 0 in rows without a key, where lse_dot is the tangent of
        the sink if there is one.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError
        As `attention`.

    Notes
    -----
    P_dot = P (S_dot - rowsum(P S_dot)) and o_dot = P_dot v + P v_dot, in memory linear in the length: P is recomputed
    from lse. Scores' tangents are taken relative to a number of each row, so that a drift that all keys share costs no
    digits.

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
        deterministic,
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
    return_lse: bool = False,
) -> tuple[Any, Gradients, Gradients]:
    """Compute attention, its gradients, and the tangents of these: Hessian-vector products by forward over reverse.

    With `do_dot` and `dlse_dot` left out, the tangents are the Hessian of sum(do * o) + sum(dlse * lse) times the
    vector that the tangents make.

    Parameters
    ----------
    q, k, v : arrays
        As in `attention_jvp`.
    do : array
        The gradient of o, of o's shape and dtype.
    q_dot, k_dot, v_dot, tangents : optional
        As in `attention_jvp`.
    dlse : array, optional
        The gradient of lse, of lse's shape and dtype; zero by default.
    do_dot, dlse_dot : array, optional
        Tangents of do and dlse; of a loss behind attention, its Hessian times the tangents of o and lse.
    mask, causal, window, scale, score, softcap, bias, sink, dropout : optional
        As in `attention`.
    wrt : str or tuple of str
        As in `attention_vjp`.
    kernel, executor, precision, deterministic : optional
        As in `attention_jvp`.
    return_lse : bool
        Return (o, lse) instead of o.

    Returns
    -------
    o : array, or pair (o, lse)
        What `attention` returns.
    gradients : Gradients
        What the vjp of `attention_vjp` returns for do and dlse.
    gradients_dot : Gradients
        Their tangents, under the same names.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError
        As `attention`.

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
        deterministic,
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
    device: DeviceSpec | None = None,
    tangents: str | Sequence[str] = (),
) -> Plan:
    """Decide everything about a call once, to run it many times.

    Parameters
    ----------
    q, k, v : arrays or ShapeDtype
        As in `attention`; ShapeDtype stands for an array of which only the shape and dtype are known.
    mask, causal, window, scale : optional
        As in `attention`.
    score, softcap, bias : optional
        As in `attention`; arrays may be `ShapeDtype`. The calls of the plan use the arrays that it was made with, or
        others of their shapes and dtypes by name: ``forward(q, k, v, bias=another)``.
    sink : array, or ShapeDtype, optional
        As in `attention`; the calls of the plan take one of its shape and dtype.
    dropout : Dropout, optional
        As in `attention`; a seed may be a `ShapeDtype`. Calls use the array that the plan was made with, or another
        one: ``forward(q, k, v, dropout_seed=another)``.
    wrt : str or sequence of str
        As in `attention_vjp`.
    kernel, executor, precision, deterministic : optional
        As in `attention`.
    device : DeviceSpec, optional
        Plan for this device instead of the current one. A plan for a GPU runs on any GPU of its compute capability.
    tangents : str or tuple of str
        Names of arrays, "q", "k" and "v" among them, that ``jvp`` and ``backward_jvp`` will have tangents of: these
        passes are planned too. They also run without having been named here. Only the cpu executor has them.

    Returns
    -------
    Plan
        The plan, with ``forward(q, k, v, out=)``, ``backward(do, q, k, v, o, lse, dlse=)``, both also with ``sink=``,
        ``jvp``, ``backward_jvp``, ``explain()``, ``workspace_bytes`` and ``compile()``.

    Raises
    ------
    TypeError, UnsupportedProblem
        As `attention`.

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
        deterministic, tangents,
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
    device: DeviceSpec | None = None,
) -> tuple[Compiled, ...]:
    """Compile the kernels of a call before its data is there: on this machine's GPU, or for any GPU without one.

    Parameters
    ----------
    q, k, v : arrays or ShapeDtype
        As in `attention`, but only shapes and dtypes count: ShapeDtype or a NumPy array stands for an array on a GPU.
    mask, causal, window, scale : optional
        As in `attention`.
    score, softcap, bias, sink, dropout, wrt : optional
        As in `plan`.
    kernel, precision, deterministic : optional
        As in `attention`.
    device : DeviceSpec, optional
        Compile for this GPU; the machine code is returned and not kept. Without it, kernels are loaded on the current
        device, where a later call finds them, and CuPy's cache keeps them for other processes.

    Returns
    -------
    tuple of records
        Of each kernel: `spec`, `architecture`, `seconds`, `is_from_cache`, `resources` (registers, stack, shared memory
        and spills), the compiler's `log`, and `code`, empty where the driver holds it.

    Raises
    ------
    TypeError, UnsupportedProblem
        As `attention`.
    CompileError, RuntimeError
        A kernel does not compile; a package or, without `device`, the GPU is missing.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> shape = cuflash.ShapeDtype((8, 4096, 64), np.float32)
    >>> made = cuflash.precompile(shape, shape, shape, device=cuflash.DeviceSpec.gpu("A100"))
    >>> [(each.spec.entry.name, each.architecture, each.resources.spill_bytes) for each in made]
    [('forward', 'sm_80', 0), ('backward_statistics', 'sm_80', 0), ('backward', 'sm_80', 0)]
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, wrt, kernel, "gpu", precision,
        deterministic,
    )  # fmt: skip
    q, k, v = as_arrays({"q": q, "k": k, "v": v}).values()
    if device is None:  # arrays on the host stand for their shapes: the kernels are those of a GPU
        q, k, v = (ShapeDtype(x.shape, x.dtype) if type(x) is np.ndarray else x for x in (q, k, v))
    ready = planned(q, k, v, options, device)
    specs, capability = ready._plan.specs.values(), ready._plan.device.compute_capability
    assert capability is not None
    if device is None:
        return nvrtc.precompile(map(checks.with_watchdog, specs), capability)
    return nvrtc.precompile(specs, nvrtc.architecture(next(iter(specs)), capability))
