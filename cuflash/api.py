"""The public functions: check, plan, run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, overload

import numpy as np

from .arrays import Array, describe, flag_reasons, is_array, namespace
from .blocks.work_list import requested_mask
from .compiler import nvrtc
from .compiler.nvrtc import Compiled
from .errors import UnsupportedProblem, collecting
from .executors import checks, gpu
from .masks.base import Mask
from .masks.content import Content, content, held_arrays
from .memory import device_number
from .planning.device import DeviceSpec
from .planning.plan import KernelPlan, gpu_plan, host_plan
from .planning.problem import Problem, precision_reasons
from .planning.routing import FAMILIES, routed
from .plans import EXECUTORS, Executable, Gradients, Pullback, Repeated, as_arrays, as_mask_of_arrays, lie_of

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
    mask : Mask, BlockIndex, bool array, scipy.sparse array of elements or function of (b, h, i, j), optional
        True = attend; an array broadcasts against (*batch, num_heads, seqlen_q, seqlen_kv). mask, causal and window
        are intersected.
    causal : bool, "bottom_right" or "top_left"
        No later keys. True needs equal lengths; otherwise say whether the last query meets the last key or the first
        the first.
    window : (left, right), optional
        Keys on either side of the diagonal that `causal` aligns, inclusive; None is unlimited.
    scale : float, optional
        1 / sqrt(head_dim) unless given. Of any size: q and k of 1e20 with a scale of 1e-40 have scores as any others.
        Arrays of any library with DLPack are taken where they lie and without a copy; results are NumPy's or CuPy's.
    kernel : str
        Of the gpu and sim executors "auto", the fastest that serves, or a family's name: "sm80", tensor cores, float16
        and bfloat16 from compute capability 8.0 on; "sm90", Hopper's own instructions, on compute capability 9.0 alone,
        whose backward pass is that of "sm80" for lists in blocks smaller than 64 and, where dims are wider than 128,
        where dq must be repeatable; "simt", which serves everything; "naive", a baseline that others are compared with:
        three kernels over whole matrices of scores, so memory is not linear; float16 and float32.
    executor : str
        "auto" lets the arrays decide: "gpu" for arrays on a CUDA device, which must be CuPy's current one, on whose
        current stream everything runs; "cpu" for all others. "sim" runs the GPU's kernels on a simulator, for tests.
    precision : str
        "ieee": products and sums in float32 (float64 for float64). On GPUs of compute capability 8.0 or newer float32
        can be multiplied on tensor cores, and summed in float32: "tf32" rounds the operands of each product to 11
        significant bits; "tf32x3" makes three products of their upper and lower halves, and errs about as "ieee" does,
        but that a product with an infinite operand is NaN. `error_bound` bounds each.
    deterministic : bool
        o, lse, dk and dv are bitwise repeatable either way. dq on a GPU is so only if this is True: otherwise
        blocks add to it in whichever order they come, where that is faster.
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
    RuntimeError
        The arrays are on a GPU and CuPy is missing, or the stream is captured before the kernels are compiled.

    Notes
    -----
    FlashAttention-2, arXiv 2307.08691, algorithm 1.
    """
    _require_flag("return_lse", return_lse)
    *_, o, lse = _call(q, k, v, out, mask, causal, window, scale, kernel, executor, precision, deterministic)
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
        over broadcast axes and grouped heads. It reads q, k, v, o and lse again: leave them as they are until then. A
        pickle of it holds them.

    Raises
    ------
    TypeError, UnsupportedProblem, MemoryError
        As `attention`; `vjp` raises them for do and dlse.

    Notes
    -----
    FlashAttention-2, arXiv 2307.08691, algorithm 2: P is recomputed from lse, dS = P (dP - rowsum(dO O) + dlse).
    """
    _require_flag("return_lse", return_lse)
    ready, q, k, v, o, lse = _call(
        q, k, v, out, mask, causal, window, scale, kernel, executor, precision, deterministic
    )  # fmt: skip
    return ((o, lse) if return_lse else o), Pullback(ready, q, k, v, o, lse)


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

    Parameters
    ----------
    q, k, v : arrays, or ShapeDtype where only the shapes are known
    mask, causal, window, scale, kernel, executor, precision, deterministic
        As in `attention`.
    device : DeviceSpec, optional
        Plan for this device instead of the one here. A plan for a GPU runs on any of its compute capability.

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
    q, k, v = as_arrays({"q": q, "k": k, "v": v}).values()
    where = _executor((q, k, v), executor, device)
    reasons = _option_reasons((q, k, v), kernel, where, precision, is_elsewhere=device is not None)
    reasons += flag_reasons("deterministic", deterministic)
    where = where if isinstance(where, str) else ""
    precision = "ieee" if precision_reasons(q, precision) else precision  # what else is wrong is said too
    problem = None
    with collecting(reasons):
        problem = Problem.of(q, k, v, scale=scale, precision=precision)
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
    return Executable(_plan(problem, resolved, target, kernel if where != "cpu" else None, bool(deterministic)), where)


def precompile(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    device: DeviceSpec | None = None,
) -> tuple[Compiled, ...]:
    """Compile the kernels of a call before its data is there: on this machine's GPU, or for any GPU without one.

    >>> import numpy as np, cuflash
    >>> shape = cuflash.ShapeDtype((8, 4096, 64), np.float32)
    >>> made = cuflash.precompile(shape, shape, shape, device=cuflash.DeviceSpec.gpu("A100"))
    >>> [(each.spec.entry, each.architecture, each.resources.spill_bytes) for each in made]
    [('forward', 'sm_80', 0), ('backward_statistics', 'sm_80', 0), ('backward', 'sm_80', 0)]

    Parameters
    ----------
    q, k, v : arrays, or ShapeDtype where only the shapes are known
    mask, causal, window, scale, kernel, precision, deterministic
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
    """
    ready = plan(
        q, k, v, mask=mask, causal=causal, window=window, scale=scale, kernel=kernel, executor="gpu",
        precision=precision, deterministic=deterministic, device=device,
    )  # fmt: skip
    specs, capability = ready.plan.specs.values(), ready.plan.device.compute_capability
    if capability is None:
        raise UnsupportedProblem([f"device must be a GPU; got {ready.plan.device.name}: DeviceSpec.gpu has some"])
    if device is None:
        return nvrtc.precompile(map(checks.built, specs), capability)
    return nvrtc.precompile(specs, nvrtc.architecture(next(iter(specs)), capability))


_MOST_REPEATED = 512


_repeated: dict[Hashable, tuple[Executable, Repeated]] = {}


def _call(q: Any, k: Any, v: Any, out: Any, mask: Any, causal: Any, window: Any, *options: Any) -> tuple[Any, ...]:
    """What ran the forward pass of a call, its q, k and v as arrays, o and lse; equal calls look up what they need."""
    causal = bool(causal) if type(causal) is np.bool else causal
    is_plain = out is None and _are_plain(*options)
    key = None if not is_plain or checks.is_on() else _key(q, k, v, mask, causal, window, options)
    try:
        found = _repeated.get(key)
    except TypeError:  # an option that cannot be hashed
        key = found = None
    if found is not None:
        ready, forward = found
        return ready, q, k, v, *forward(q, k, v)
    q, k, v = as_arrays({"q": q, "k": k, "v": v}).values()
    names = ("scale", "kernel", "executor", "precision", "deterministic")
    ready = plan(q, k, v, mask=mask, causal=causal, window=window, **dict(zip(names, options)))
    o, lse = ready.forward(q, k, v, out=out)
    gpu.pin(ready.plan)
    if key is not None and ready.is_repeatable:
        if len(_repeated) >= _MOST_REPEATED:
            _repeated.clear()
        _repeated[key] = ready, ready.repeated(q, k, v, pins=True)
    return ready, q, k, v, o, lse


def _require_flag(name: str, value: Any) -> None:
    if type(value) is not bool and (reasons := flag_reasons(name, value)):
        raise UnsupportedProblem(reasons)


# Types of a scale and of a flag whose equal values mean the same; 1 equals True, and 0.5 + 0j equals 0.5.
_SCALES = {type(None), int, float, *(np.dtype(code).type for code in "efdbhilqBHILQ")}
_FLAGS = {bool, np.bool}


def _are_plain(scale: Any, kernel: Any, executor: Any, precision: Any, deterministic: Any) -> bool:
    if type(scale) not in _SCALES or type(deterministic) not in _FLAGS:
        return False
    return type(kernel) is str and type(executor) is str and type(precision) is str


def _key(q: Any, k: Any, v: Any, mask: Any, causal: Any, window: Any, options: Any) -> Hashable:
    """What decides a call but its data; None where equal values may mean different things, 1 and True say, or where a
    mask's contents may change."""
    if type(causal) is not bool and type(causal) is not str or not (mask is None or isinstance(mask, Mask)):
        return None
    if window is not None and (type(window) is not tuple or not set(map(type, window)) <= {int, type(None)}):
        return None
    lie = lie_of(q, k, v)
    try:
        return None if lie is None else (lie, None if mask is None else content(mask), causal, window, options)
    except TypeError:
        return None


_host = lru_cache(maxsize=1)(DeviceSpec.host)


def _made(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str | None, deterministic: bool) -> KernelPlan:
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
class _Known:
    """A mask that counts as equal to all of its content."""

    mask: Mask
    content: Content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


@lru_cache(maxsize=256)
def _remembered(
    problem: Problem, known: _Known, device: DeviceSpec, kernel: str | None, deterministic: bool
) -> KernelPlan:
    return _made(problem, known.mask, device, kernel, deterministic)


def _plan(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str | None, deterministic: bool) -> KernelPlan:
    """Plans whose masks hold no arrays are remembered: calls of one shape plan once."""
    try:
        known = _Known(mask, content(mask))
    except TypeError:
        return _made(problem, mask, device, kernel, deterministic)
    return _remembered(problem, known, device, kernel, deterministic)


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
    not_made = precision_reasons(arrays[0], precision)
    if executor == "cpu" and not not_made and precision != "ieee":
        not_made = [f"precision={precision!r} needs a GPU's tensor cores; executor='cpu' has precision='ieee'"]
    reasons += not_made
    return reasons


def _mask_device_reasons(mask: Mask) -> list[str]:
    """Why kernels on the current device cannot read what a mask holds."""
    _, current = nvrtc.current_device()
    numbers = {device_number(array) for array in held_arrays(mask)} - {None, current}
    return [f"mask's arrays must be on the current device, {current}; got device {number}" for number in numbers]
