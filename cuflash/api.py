"""The public functions: check, plan, run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, overload

from . import gpu
from .arrays import Array, is_array, namespace
from .device import DeviceSpec
from .errors import UnsupportedProblem, collecting
from .launch import EXECUTORS, Executable, Gradients
from .mask import Mask
from .plans import Plan, make_plan
from .problem import Problem
from .tiles import family_reasons
from .work_list import requested_mask

_FAMILIES = ("simt", "naive")  # of kernels
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
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    out: Any = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Exact attention, softmax(scale q k^T + mask) v, in memory linear in the length.

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 4, 100, 64), dtype=np.float32)   # batch 2, heads 4, seqlen 100
    >>> o = cuflash.attention(q, k, v, causal=True)
    >>> o.shape
    (2, 4, 100, 64)
    >>> o, lse = cuflash.attention(q, k, v, mask=cuflash.masks.SlidingWindow(15, 0), return_lse=True)
    >>> lse.shape
    (2, 4, 100)

    Parameters
    ----------
    q : array [..., num_heads, seqlen_q, head_dim] or [seqlen_q, head_dim]
    k : array [..., num_kv_heads, seqlen_kv, head_dim] or [seqlen_kv, head_dim]
    v : array [..., num_kv_heads, seqlen_kv, value_dim] or [seqlen_kv, value_dim]
        float16, bfloat16, float32 or float64, all the same; any strides. The axes before the heads broadcast by
        NumPy's rules; query head h reads key/value head h // (num_heads / num_kv_heads).
    mask : Mask, BlockIndex or bool array, optional
        True = attend; an array broadcasts against (*batch, num_heads, seqlen_q, seqlen_kv). mask, causal and window
        are intersected.
    causal : bool, "bottom_right" or "top_left"
        No later keys. True needs equal lengths; otherwise say whether the last query meets the last key or the first
        the first.
    window : (left, right), optional
        Keys on either side of the diagonal that `causal` aligns, inclusive; None is unlimited.
    scale : float, optional
        1 / sqrt(head_dim) unless given.
    kernel, executor, precision : str
        "auto" lets the arrays decide: NumPy arrays go to executor "cpu", which has one kernel and sums in float32
        (float64 for float64), precision "ieee". On a GPU kernel "naive" is the baseline that the others are compared
        with: three kernels over whole matrices of scores, so memory is not linear; float16 and float32.
    deterministic : bool
        Results of the cpu executor are bitwise repeatable either way.
    out : array, or pair (o, lse), optional
        Written to instead of new arrays; must not overlap q, k or v.
    return_lse : bool
        Also return lse.

    Returns
    -------
    o : array [..., num_heads, seqlen_q, value_dim]
        C-contiguous, of q's dtype. 0 in rows without a key.
    lse : array [..., num_heads, seqlen_q]
        Log-sum-exp of the scores, natural logarithm, float32 (float64 for float64). -inf in rows without a key.

    Raises
    ------
    TypeError
        An argument is not an array of a known kind.
    UnsupportedProblem
        Anything else that cannot be, all reasons at once, before any work.
    MemoryError
        The results or the tiles do not fit; inputs stay as they were.

    Notes
    -----
    FlashAttention-2, arXiv 2307.08691, algorithm 1.
    """
    ready = plan(
        q, k, v, mask=mask, causal=causal, window=window, scale=scale, kernel=kernel, executor=executor,
        precision=precision, deterministic=deterministic,
    )  # fmt: skip
    o, lse = ready.forward(q, k, v, out=out)
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
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    out: Any = None,
    return_lse: bool = False,
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention and the function that pulls gradients back through it.

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 50, 32), dtype=np.float32)
    >>> o, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(np.ones_like(o))
    >>> dq.shape, bool(abs(dk.sum(axis=1)).max() < 1e-4)       # every row of dS sums to 0
    ((4, 50, 32), True)

    Parameters
    ----------
    q, k, v, mask, causal, window, scale, kernel, executor, precision, deterministic, out
        As in `attention`.
    return_lse : bool
        Return (o, lse) in o's place.

    Returns
    -------
    o : array, or pair (o, lse)
    vjp : callable (do, dlse=None) -> Gradients
        Takes cotangents of o and, optionally, of lse; returns dq, dk, dv of the shapes and dtype of q, k, v, summed
        over broadcast axes and grouped heads. It reads q, k, v, o and lse again: leave them as they are until then.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError
        As `attention`; `vjp` raises them for do and dlse.

    Notes
    -----
    FlashAttention-2, arXiv 2307.08691, algorithm 2: P is recomputed from lse, dS = P (dP - rowsum(dO O) + dlse).
    """
    ready = plan(
        q, k, v, mask=mask, causal=causal, window=window, scale=scale, kernel=kernel, executor=executor,
        precision=precision, deterministic=deterministic,
    )  # fmt: skip
    o, lse = ready.forward(q, k, v, out=out)

    def vjp(do: Array, dlse: Array | None = None) -> Gradients:
        return ready.backward(do, q, k, v, o, lse, dlse)

    return ((o, lse) if return_lse else o), vjp


def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    device: DeviceSpec | None = None,
) -> Executable:
    """Decide everything about a call once, to run it many times.

    >>> import numpy as np, cuflash
    >>> shape = cuflash.ShapeDtype((8, 4096, 64), np.float32)
    >>> ready = cuflash.plan(shape, shape, shape, causal=True, device=cuflash.DeviceSpec.gpu("H100"))
    >>> print(ready.explain())
    executor   gpu
    problem    batch (), 8 heads, 4096 queries, 4096 keys, dims 64 and 64, float32, scale 0.125
    device     H100: sm_90, 132 multiprocessors, 227 KiB for a tile
    tile       128 queries x 128 keys
    work       implicit: keys with None <= j - i <= 0, no list
    FLOPs      17716740096 forward
    workspace  131072 bytes, 0 of them the work list

    Parameters
    ----------
    q, k, v : arrays, or ShapeDtype where only the shapes are known
    mask, causal, window, scale, kernel, executor, precision, deterministic
        As in `attention`.
    device : DeviceSpec, optional
        Plan for this device instead of the one here. A plan for a GPU explains itself and is not run by this version.

    Returns
    -------
    Executable
        With ``forward(q, k, v, out=)``, ``backward(do, q, k, v, o, lse, dlse=)``, ``explain()``,
        ``workspace_bytes`` and ``compile()``.

    Raises
    ------
    TypeError, UnsupportedProblem
        As `attention`.
    """
    where = _executor((q, k, v), executor, device)
    reasons = _option_reasons((q, k, v), kernel, where, precision)
    family = None if where == "cpu" else "simt" if kernel == "auto" else kernel
    problem = None
    with collecting(reasons):
        problem = Problem.of(q, k, v, scale=scale)
    resolved = None
    if problem is not None:
        with collecting(reasons):
            resolved = requested_mask(mask, causal, window, problem.mask_shape, namespace(q) if is_array(q) else None)
        reasons += family_reasons(family, problem)
    if reasons or problem is None or resolved is None:
        raise UnsupportedProblem(reasons)
    return Executable(_plan(problem, resolved, device or _device(where), family), where)


_host = lru_cache(maxsize=1)(DeviceSpec.host)
_remembered = lru_cache(maxsize=256)(make_plan)


def _executor(arrays: tuple[Any, ...], executor: str, device: DeviceSpec | None) -> str:
    """The executor that "auto" stands for: where the arrays are, or what a device given is."""
    if executor != "auto":
        return executor
    if device is not None:
        return "cpu" if device.compute_capability is None else "gpu"
    return "gpu" if any(namespace(array).__name__ == "cupy" for array in arrays) else "cpu"


def _device(executor: str) -> DeviceSpec:
    if executor == "gpu":
        return gpu.current_device()
    return _host() if executor == "cpu" else _SIMULATED


def _plan(problem: Problem, mask: Mask, device: DeviceSpec, family: str | None) -> Plan:
    """Plans whose masks hold no arrays are remembered: calls of one shape plan once."""
    try:
        hash(mask)
    except TypeError:
        return make_plan(problem, mask, device, family)
    return _remembered(problem, mask, device, family)


def _option_reasons(arrays: tuple[Any, ...], kernel: str, executor: str, precision: str) -> list[str]:
    if executor not in EXECUTORS:
        return [f"executor must be 'auto', {', '.join(map(repr, EXECUTORS))}; got {executor!r}"]
    reasons = []
    spaces = {namespace(array).__name__ for array in arrays if is_array(array)}
    if len(spaces) > 1:
        reasons.append(
            f"q, k and v must be of one kind; got arrays of {', '.join(sorted(spaces))}: copy them explicitly"
        )
    elif spaces - {"cupy" if executor == "gpu" else "numpy"}:
        wanted = "CuPy" if executor == "gpu" else "NumPy"
        reasons.append(f"executor {executor!r} takes {wanted} arrays; got arrays of {spaces.pop()}: copy them explicitly")
    families = () if executor == "cpu" else _FAMILIES
    if kernel not in ("auto", *families):
        known = "'auto': the cpu executor has one kernel" if executor == "cpu" else f"'auto', {str(families)[1:-2]}"
        reasons.append(f"kernel must be {known}; got {kernel!r}")
    if precision != "ieee":
        reasons.append(f"precision must be 'ieee'; got {precision!r}")
    return reasons
