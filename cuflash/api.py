"""The public functions: check, plan, run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from .arrays import Array, ShapeDtype, describe, flag_reasons, is_array, namespace
from .blocks.work_list import requested_mask
from .compiler import nvrtc
from .compiler.nvrtc import Compiled
from .dropout import Dropout
from .errors import UnsupportedProblem, collecting
from .executors import checks, gpu
from .masks.base import Mask
from .masks.content import Content, content, held_arrays
from .layouts import device_number
from .planning.device import DeviceSpec
from .planning.dropout_launches import seed_array
from .planning.plan import KernelPlan, gpu_plan, host_plan
from .planning.problem import Problem, precision_reasons, with_operands
from .planning.routing import FAMILIES, routed
from .plans import EXECUTORS, Executable, Gradients, Pullback, BoundCall, as_arrays, as_mask_of_arrays, layout_key
from .scores import Score, library

_SIMULATED = replace(DeviceSpec.gpu("H100"), name="simulator")


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    dropout: Dropout | None = None,
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    out: Any = None,
    return_lse: Literal[False] = False,
) -> Array: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    dropout: Dropout | None = None,
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    out: Any = None,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    dropout: Dropout | None = None,
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    out: Any = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Exact attention, softmax(scale q k^T + mask) v, in memory linear in the length.

    Parameters
    ----------
    q : array [..., num_heads, seqlen_q, head_dim] or [seqlen_q, head_dim]
        Queries, of float16, bfloat16, float32 or float64, with any strides. An array of any library with DLPack is
        used where it lies, without a copy.
    k : array [..., num_kv_heads, seqlen_kv, head_dim] or [seqlen_kv, head_dim]
        Keys, of q's dtype. The axes before the heads broadcast by NumPy's rules. Query head h reads key/value head
        h // (num_heads / num_kv_heads).
    v : array [..., num_kv_heads, seqlen_kv, value_dim] or [seqlen_kv, value_dim]
        Values, of q's dtype.
    mask : Mask, BlockIndex or bool array, optional
        True means that the query attends the key. An array broadcasts against
        (*batch, num_heads, seqlen_q, seqlen_kv). `mask`, `causal` and `window` are intersected.
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
        Added to the scores, after softcap: float16, bfloat16 or float32, or with float64 q, k and v also float64, that
        broadcasts to (*batch, num_heads, seqlen_q, seqlen_kv), or (seqlen_q, seqlen_kv) for two-dimensional q, k and
        v; any strides. -inf hides a key.
    sink : array, optional
        A logit for each query head that takes part in every softmax of the head and has no value: the weights of a
        row's keys add up to less than 1. Shape (num_heads,), or any that broadcasts to (*batch, num_heads); () or (1,)
        for two-dimensional q, k and v. float16, bfloat16 or float32, or with float64 q, k and v also float64; any
        strides. -inf is no sink; NaN and +inf make all rows of the head NaN.
    dropout : Dropout, optional
        Which weights are dropped, after the softmax; lse is that of all of them.
    kernel : {"auto", "sm90", "sm80", "simt", "naive"}
        Kernel family of the gpu and sim executors. "auto" takes the fastest that supports the call; Notes has the
        rest.
    executor : {"auto", "cpu", "gpu", "sim"}
        "auto" takes "gpu" for arrays on a CUDA device, which must be CuPy's current one; everything runs on its
        current stream. It takes "cpu" for all other arrays. "sim" runs the GPU's kernels on a simulator, for tests.
    precision : {"ieee", "tf32", "tf32x3"}
        "ieee" multiplies and sums in float32 (float64 for float64). The others multiply float32 on tensor cores of
        compute capability 8.0 or newer: "tf32" rounds the operands of each product to 11 significant bits; "tf32x3"
        makes three products of their upper and lower halves and errs about as "ieee" does, except that a product with
        an infinite operand is NaN. `error_bound` bounds each.
    deterministic : bool
        Whether dq must be bitwise repeatable on a GPU. Otherwise thread blocks add to it in the order in which they
        arrive, where that is faster. All other results are bitwise repeatable either way.
    out : array, or pair (o, lse), optional
        Arrays that are written to instead of new ones. They must not overlap q, k or v.
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
    require_flag("return_lse", return_lse)
    of_score, operands = _operands(score, softcap, bias, sink, dropout)
    _, _, o, lse = _call(
        q, k, v, operands, of_score, dropout, out, mask, causal, window, scale, kernel, executor, precision,
        deterministic, (),
    )  # fmt: skip
    return (o, lse) if return_lse else o


def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    dropout: Dropout | None = None,
    wrt: str | tuple[str, ...] = (),
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
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
        As in `attention`. The backward pass draws the weights that are dropped anew: an array that holds the seed must
        still hold it then.
    wrt : str or tuple of str
        Names of further arrays that `vjp` gives a gradient of: "sink", "bias", and real arrays of the score function.
    kernel, executor, precision, deterministic, out : optional
        As in `attention`.
    return_lse : bool
        Return (o, lse) in o's place.

    Returns
    -------
    o : array, or pair (o, lse)
        What `attention` returns.
    vjp : callable (do, dlse=None) -> Gradients
        Takes cotangents of o and, optionally, of lse; returns dq, dk, dv of the shapes and dtype of q, k, v, summed
        over broadcast axes and grouped heads. Of an array that `wrt` names, `Gradients[name]` is the gradient, of its
        shape and dtype. It reads q, k, v, o and lse again: leave them as they are until then. A pickle of it holds
        them.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError
        As `attention`; `vjp` raises them for do and dlse.

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
    require_flag("return_lse", return_lse)
    of_score, operands = _operands(score, softcap, bias, sink, dropout)
    ready, (q, k, v, *others), o, lse = _call(
        q, k, v, operands, of_score, dropout, out, mask, causal, window, scale, kernel, executor, precision,
        deterministic, wrt,
    )  # fmt: skip
    return ((o, lse) if return_lse else o), Pullback(ready, q, k, v, o, lse, dict(zip(operands, others)))


def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    dropout: Dropout | None = None,
    wrt: str | tuple[str, ...] = (),
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    device: DeviceSpec | None = None,
) -> Executable:
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
    wrt : str or tuple of str
        As in `attention_vjp`.
    kernel, executor, precision, deterministic : optional
        As in `attention`.
    device : DeviceSpec, optional
        Plan for this device instead of the current one. A plan for a GPU runs on any GPU of its compute capability.

    Returns
    -------
    Executable
        The plan, with ``forward(q, k, v, out=)``, ``backward(do, q, k, v, o, lse, dlse=)``, both also with ``sink=``,
        ``explain()``, ``workspace_bytes`` and ``compile()``.

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
    work       implicit: keys with None <= j - i <= 0, no list
    FLOPs      17716740096 forward
    workspace  131072 bytes, 0 of them the work list
    """
    q, k, v, sink, bias = as_arrays({"q": q, "k": k, "v": v, "sink": sink, "bias": bias}).values()
    where = _executor((q, k, v), executor, device)
    reasons = _option_reasons((q, k, v), kernel, where, precision, is_elsewhere=device is not None)
    reasons += flag_reasons("deterministic", deterministic)
    where = where if isinstance(where, str) else ""
    precision = "ieee" if precision_reasons(q, precision) else precision  # what else is wrong is said too
    problem = composed = None
    with collecting(reasons):
        composed = library.composed(score, softcap, bias)
    with collecting(reasons):
        problem = Problem.of(q, k, v, scale=scale, precision=precision)
        problem = with_operands(problem, {"sink": sink}, wrt, composed, dropout)
    if device is not None and not isinstance(device, DeviceSpec):
        reasons.append(f"device must be a DeviceSpec or None; got {describe(device)}: DeviceSpec.gpu('H100') is one")
    elif device is not None and (where == "cpu") != (device.compute_capability is None):
        kind = "the host" if where == "cpu" else "a GPU"
        reasons.append(f"device must be {kind} for executor={where!r}; got {device.name}")
    resolved = None
    if problem is not None:
        with collecting(reasons):
            # A plan for elsewhere leaves a mask's arrays where they are.
            if device is None or not isinstance(mask, Mask):
                mask = as_mask_of_arrays(mask, where)
            resolved = requested_mask(mask, causal, window, problem.mask_shape, namespace(q) if is_array(q) else None)
        if isinstance(kernel, str) and kernel in FAMILIES and where != "cpu":
            reasons += FAMILIES[kernel].reasons(problem, None)
    if resolved is not None and where == "gpu" and device is None and not reasons:
        reasons += _mask_device_reasons(resolved)
    if reasons or problem is None or resolved is None:
        raise UnsupportedProblem(reasons)
    target = device or _device(where)
    if where != "cpu":
        family = routed(problem, target)[0] if kernel == "auto" else FAMILIES[kernel]
        reasons = family.reasons(problem, target)
        if reasons:
            raise UnsupportedProblem(reasons)
    made = _plan(problem, resolved, target, kernel if where != "cpu" else None, bool(deterministic))
    captured = seed_array(dropout) | ({} if composed is None else dict(composed.arrays))
    return Executable(made, where, {name: each for name, each in captured.items() if not isinstance(each, ShapeDtype)})


def precompile(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    score: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    sink: Array | None = None,
    dropout: Dropout | None = None,
    wrt: str | tuple[str, ...] = (),
    kernel: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    device: DeviceSpec | None = None,
) -> tuple[Compiled, ...]:
    """Compile the kernels of a call before its data is there: on this machine's GPU, or for any GPU without one.

    Parameters
    ----------
    q, k, v : arrays or ShapeDtype
        As in `attention`; ShapeDtype stands for an array of which only the shape and dtype are known.
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
    >>> [(each.spec.entry, each.architecture, each.resources.spill_bytes) for each in made]
    [('forward', 'sm_80', 0), ('backward_statistics', 'sm_80', 0), ('backward', 'sm_80', 0)]
    """
    ready = plan(
        q, k, v, mask=mask, causal=causal, window=window, scale=scale, score=score, softcap=softcap, bias=bias,
        sink=sink, dropout=dropout, wrt=wrt, kernel=kernel, executor="gpu", precision=precision,
        deterministic=deterministic, device=device,
    )  # fmt: skip
    specs, capability = ready.plan.specs.values(), ready.plan.device.compute_capability
    if capability is None:
        raise UnsupportedProblem([f"device must be a GPU; got {ready.plan.device.name}: DeviceSpec.gpu has some"])
    if device is None:
        return nvrtc.precompile(map(checks.with_watchdog, specs), capability)
    return nvrtc.precompile(specs, nvrtc.architecture(next(iter(specs)), capability))


_MAX_BOUND_CALLS = 512


_bound_calls: dict[Hashable, tuple[Executable, BoundCall]] = {}


_OfScore: TypeAlias = tuple[Any, Any, Any]  # score, softcap and bias


def _operands(score: Any, softcap: Any, bias: Any, sink: Any, dropout: Any) -> tuple[_OfScore, dict[str, Any]]:
    """score, softcap and bias of a call, as one Score if they make one, and the call's arrays beside q, k and v."""
    operands = ({} if sink is None else {"sink": sink}) | seed_array(dropout)
    if score is None and softcap is None and bias is None:
        return (None, None, None), operands
    try:
        composed = library.composed(score, softcap, as_arrays({"bias": bias})["bias"])
    except UnsupportedProblem:  # `plan` says so, with all that is wrong beside
        return (score, softcap, bias), operands
    return (composed, None, None), operands if composed is None else operands | dict(composed.arrays)


def _call(
    q: Any,
    k: Any,
    v: Any,
    operands: dict[str, Any],
    of_score: _OfScore,
    dropout: Any,
    out: Any,
    mask: Any,
    causal: Any,
    window: Any,
    *options: Any,
) -> tuple[Any, tuple[Any, ...], Any, Any]:
    """What ran the forward pass of a call, q, k, v and operands as arrays, o and lse; equal calls are looked up."""
    causal = bool(causal) if type(causal) is np.bool else causal
    draws = dropout.draws if isinstance(dropout, Dropout) else None
    is_plain = out is None and not checks.is_on() and (dropout is None or draws is not None)
    arrays = (q, k, v, *operands.values()) if operands else (q, k, v)
    score = of_score[0]
    program = (score.program, score.numbers) if isinstance(score, Score) else None
    key = None
    if is_plain and of_score[1] is of_score[2] is None:
        key = call_key(layout_key(*arrays), mask, causal, window, options, program, draws, *operands)
    try:
        found = _bound_calls.get(key)
    except TypeError:  # an option that cannot be hashed
        key = found = None
    if found is not None:
        ready, forward = found
        o, lse = forward(*arrays)
        return ready, arrays, o, lse
    given = as_arrays({"q": q, "k": k, "v": v, **operands})
    names = ("scale", "kernel", "executor", "precision", "deterministic", "wrt")
    chosen = dict(zip(names, options)) | dict(zip(("score", "softcap", "bias"), of_score))
    ready = plan(
        given["q"], given["k"], given["v"], mask=mask, causal=causal, window=window, sink=given.get("sink"),
        dropout=dropout, **chosen
    )  # fmt: skip
    ready = replace(ready, captured={})  # what is remembered must hold no arrays of a call
    o, lse = ready.forward(**given, out=out)
    gpu.pin(ready.plan)
    if key is not None and ready.can_bind:
        if len(_bound_calls) >= _MAX_BOUND_CALLS:
            _bound_calls.clear()
        _bound_calls[key] = ready, ready.bind(given, pins=True)
    return ready, tuple(given.values()), o, lse


def require_flag(name: str, value: Any) -> None:
    """Refuse an argument that is neither True nor False."""
    if type(value) is not bool and (reasons := flag_reasons(name, value)):
        raise UnsupportedProblem(reasons)


# Types of a scale and of a flag whose equal values mean the same; 1 equals True, and 0.5 + 0j equals 0.5.
_SCALES = {type(None), int, float, *(np.dtype(code).type for code in "efdbhilqBHILQ")}
_FLAGS = {bool, np.bool}


def _are_plain(scale: Any, kernel: Any, executor: Any, precision: Any, deterministic: Any, wrt: Any) -> bool:
    has_names = type(wrt) is str or type(wrt) is tuple and set(map(type, wrt)) <= {str}
    if type(scale) not in _SCALES or type(deterministic) not in _FLAGS or not has_names:
        return False
    return type(kernel) is str and type(executor) is str and type(precision) is str


def call_key(
    layout: Hashable, mask: Any, causal: Any, window: Any, options: tuple[Any, ...], *more: Hashable
) -> Hashable:
    """What decides a call but its data; None where equal values may mean different things, 1 and True say, or where a
    mask's contents may change.

    `layout` says how q, k, v and operands lie, None if that is not known; `options` are scale, kernel, executor,
    precision, deterministic and wrt; `more` is what else decides, as the names of operands.
    """
    if layout is None or not _are_plain(*options):
        return None
    if type(causal) is not bool and type(causal) is not str or not (mask is None or isinstance(mask, Mask)):
        return None
    if window is not None and (type(window) is not tuple or not set(map(type, window)) <= {int, type(None)}):
        return None
    try:
        return layout, None if mask is None else content(mask), causal, window, options, more
    except TypeError:
        return None


_host = lru_cache(maxsize=1)(DeviceSpec.host)


def _new_plan(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str | None, deterministic: bool) -> KernelPlan:
    """The plan of a call on the host where `kernel` is None, else on a GPU."""
    if kernel is None:
        return host_plan(problem, mask, device)
    return gpu_plan(problem, mask, device, kernel, deterministic)


def _executor(arrays: tuple[Any, ...], executor: str, device: DeviceSpec | None) -> str:
    """The executor that "auto" stands for: where the arrays are, or what a device given is."""
    if not isinstance(executor, str) or executor != "auto":
        return executor
    if isinstance(device, DeviceSpec):
        return "cpu" if device.compute_capability is None else "gpu"
    return "gpu" if any(namespace(array).__name__ == "cupy" for array in arrays) else "cpu"


def _device(executor: str) -> DeviceSpec:
    if executor == "gpu":
        return gpu.current_device()
    return _host() if executor == "cpu" else _SIMULATED


@dataclass(frozen=True, eq=False, slots=True)
class _MaskKey:
    """A mask that counts as equal to all of its content."""

    mask: Mask
    content: Content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MaskKey) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


@lru_cache(maxsize=256)
def _cached_plan(
    problem: Problem, mask_key: _MaskKey, device: DeviceSpec, kernel: str | None, deterministic: bool
) -> KernelPlan:
    return _new_plan(problem, mask_key.mask, device, kernel, deterministic)


def _plan(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str | None, deterministic: bool) -> KernelPlan:
    """Plans whose masks hold no arrays are remembered: calls of one shape plan once."""
    try:
        mask_key = _MaskKey(mask, content(mask))
    except TypeError:
        return _new_plan(problem, mask, device, kernel, deterministic)
    return _cached_plan(problem, mask_key, device, kernel, deterministic)


def _option_reasons(
    arrays: tuple[Any, ...], kernel: str, executor: str, precision: str, *, is_elsewhere: bool
) -> list[str]:
    if not isinstance(executor, str) or executor not in EXECUTORS:
        return [f"executor must be 'auto', {', '.join(map(repr, EXECUTORS))}; got {describe(executor)}"]
    reasons = []
    spaces = {namespace(array).__name__ for array in arrays if is_array(array)}
    if len(spaces) > 1:
        reasons.append(
            f"q, k and v must be of one kind; got arrays of {', '.join(sorted(spaces))}: copy them explicitly"
        )
    elif not is_elsewhere and spaces - {"cupy" if executor == "gpu" else "numpy"}:
        wanted = "CuPy" if executor == "gpu" else "NumPy"
        reasons.append(
            f"executor={executor!r} takes {wanted} arrays; got {spaces.pop()}'s as q, k and v: copy them explicitly"
        )
    families = () if executor == "cpu" else FAMILIES
    if not isinstance(kernel, str) or kernel not in ("auto", *families):
        known, why = ", ".join(map(repr, ("auto", *families))), "" if families else ": the cpu executor has one kernel"
        reasons.append(f"kernel must be {known}{why}; got {describe(kernel)}")
    precision_problems = precision_reasons(arrays[0], precision)
    if executor == "cpu" and not precision_problems and precision != "ieee":
        precision_problems = [
            f"precision={precision!r} needs a GPU's tensor cores; executor='cpu' has precision='ieee'"
        ]
    reasons += precision_problems
    return reasons


def _mask_device_reasons(mask: Mask) -> list[str]:
    """Why kernels on the current device cannot read what a mask holds."""
    _, current = nvrtc.current_device()
    numbers = {device_number(array) for array in held_arrays(mask)} - {None, current}
    return [f"mask's arrays must be on the current device, {current}; got device {number}" for number in numbers]
