"""Attention on JAX's arrays, which JAX differentiates: `cuflash.jax.attention`. Importing it imports JAX.

Arrays on the CPU are NumPy's arrays to the library; what JAX traces there becomes a callback. Arrays on a GPU are taken
and given by DLPack, outside of what is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from . import api
from .arrays import Array, ShapeDtype, describe
from .dropout import Dropout
from .errors import UnsupportedProblem
from .executors import checks, gpu
from .layouts import kind_of, taken
from .planning.dropout_launches import require_number
from .plans import Executable

_OPTIONS = ("scale", "kernel", "executor", "precision", "deterministic", "wrt")
_MAX_READY_CALLS = 512
_ready_calls: dict[Hashable, Executable] = {}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    sink: jax.Array | None = None,
    dropout: Dropout | None = None,
    kernel: str = "auto",
    executor: str = "auto",
    precision: str = "ieee",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Exact attention of JAX's arrays, with gradients for q, k, v and sink, from o and from lse.

    >>> import jax, cuflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 100, 64))
    >>> def loss(q, k, v):
    ...     return cuflash.jax.attention(q, k, v, causal=True).sum()
    >>> dq, dk, dv = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    >>> dq.shape
    (2, 4, 100, 64)

    Parameters
    ----------
    q, k, v : jax.Array
        float16, bfloat16, float32 or float64, all the same, on the CPU or on one CUDA device, the one that CuPy has
        current; shapes as `cuflash.attention` takes them. Inside `jax.jit`, `jax.vmap` and the like on the CPU alone.
    mask, causal, window, scale, kernel, precision, deterministic
        As in `cuflash.attention`, and known when the call is traced; a mask's arrays may be JAX's, or of any library
        with DLPack, where q is.
    sink : jax.Array, optional
        As in `cuflash.attention`.
    dropout : Dropout, optional
        As in `cuflash.attention`, with a number as its seed, known when the call is traced.
    executor : str
        "auto" lets the arrays decide: "cpu" or "gpu". "sim" runs the GPU's kernels on a simulator.
    return_lse : bool
        Also return lse.

    Returns
    -------
    o : jax.Array [..., num_heads, seqlen_q, value_dim]
        Of q's dtype and device. 0 in rows without a key.
    lse : jax.Array [..., num_heads, seqlen_q]
        float32 (float64 for float64). -inf in rows without a key.

    Raises
    ------
    TypeError
        q, k, v or sink is no array of JAX.
    UnsupportedProblem
        Anything else that cannot be, all reasons at once, before any work; a tracer on a GPU, too.
    RuntimeError
        The arrays are on a GPU and CuPy is missing.

    Notes
    -----
    Reverse mode alone, once: `jax.jvp` and second derivatives are refused by JAX.
    """
    api.require_flag("return_lse", return_lse)
    require_number(dropout)
    given = {"q": q, "k": k, "v": v} if sink is None else {"q": q, "k": k, "v": v, "sink": sink}
    options = (scale, kernel, executor, precision, deterministic, tuple(given)[3:])
    reasons = _array_reasons(given, executor)
    if reasons:
        raise UnsupportedProblem(reasons)
    o, lse = _attention(_planned(given, mask, causal, window, options, dropout), *given.values())
    return (o, lse) if return_lse else o


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ready: Executable, *arrays: jax.Array) -> Sequence[jax.Array]:
    """o and lse of q, k, v and operands."""
    problem = ready.plan.problem
    names = problem.wrt

    def forward(q: Array, k: Array, v: Array, *operands: Array) -> Sequence[Array]:
        return ready.forward(q, k, v, **dict(zip(names, operands)))

    results = [(problem.o_shape(), problem.dtype), (problem.lse_shape(), problem.accumulator)]
    return _run(forward, results, arrays, ready)


def _forward(ready: Executable, *arrays: jax.Array) -> Any:
    o, lse = _attention(ready, *arrays)
    return (o, lse), (o, lse, arrays)


def _backward(ready: Executable, saved: Any, cotangents: Sequence[jax.Array]) -> Any:
    o, lse, arrays = saved
    names = ready.plan.problem.wrt

    def backward(*given: Array) -> Sequence[Array]:
        do, dlse, o, lse, q, k, v, *operands = given
        made = ready.backward(do, q, k, v, o, lse, dlse, **dict(zip(names, operands)))
        return *made, *(made[name] for name in names)

    return _run(backward, [(array.shape, array.dtype) for array in arrays], (*cotangents, o, lse, *arrays), ready)


_attention.defvjp(_forward, _backward)


def _run(
    function: Callable[..., Sequence[Array]], results: Sequence[Any], arrays: Sequence[jax.Array], ready: Executable
) -> tuple[jax.Array, ...]:
    """A pass of a plan on arrays: at once, or by a callback where they are traced.

    `results` are pairs of shape and dtype.
    """

    def on_host(*arrays: Any) -> tuple[Array, ...]:
        return tuple(function(*map(np.asarray, arrays)))

    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        shapes = tuple(jax.ShapeDtypeStruct(*result) for result in results)
        made: tuple[jax.Array, ...] = jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential")
        return made
    if ready.executor == "gpu":
        on_device = (taken("q", array, gpu.namespace()) for array in arrays)
        return tuple(map(jax.dlpack.from_dlpack, function(*on_device)))
    (device,) = arrays[0].devices()
    return tuple(jax.device_put(array, device) for array in on_host(*arrays))


def _planned(
    arrays: dict[str, jax.Array], mask: Any, causal: Any, window: Any, options: tuple[Any, ...], dropout: Any
) -> Executable:
    """The plan of a call; calls of equal shapes and options look it up."""
    place = _platform(arrays.values())
    shapes: dict[str, Any] = {name: ShapeDtype(array.shape, array.dtype) for name, array in arrays.items()}
    lie = place, *shapes.values()
    key = None if checks.is_on() else api.call_key(lie, mask, causal, window, options, dropout, *arrays)
    try:
        found = _ready_calls.get(key) if key is not None else None
    except TypeError:  # an option that cannot be hashed
        key = found = None
    if found is not None:
        return found
    given = dict(zip(_OPTIONS, options))
    if given["executor"] == "auto":
        given["executor"] = "gpu" if place == "gpu" else "cpu"
    ready = api.plan(**shapes, mask=mask, causal=causal, window=window, dropout=dropout, **given)
    if key is not None:
        if len(_ready_calls) >= _MAX_READY_CALLS:
            _ready_calls.clear()
        _ready_calls[key] = ready
    return ready


def _platform(arrays: Iterable[jax.Array]) -> str:
    """Where arrays lie, or where what is traced is going to run: "cpu", "gpu" or another of JAX's names."""
    held = [array for array in arrays if not isinstance(array, jax.core.Tracer)]
    device = next(iter(held[0].devices())) if held else jax.config.jax_default_device or jax.devices()[0]
    return device if isinstance(device, str) else str(device.platform)


def _array_reasons(given: dict[str, Any], executor: Any) -> list[str]:
    """Why q, k, v and operands are no arrays that an executor reaches.

    Raises
    ------
    TypeError
        One is no array of JAX.
    """
    reasons, platforms = [], set()
    for name, array in given.items():
        if not isinstance(array, jax.Array):
            raise TypeError(f"{name} must be a jax.Array; got {describe(array)}: jax.numpy.asarray makes one")
        is_traced = isinstance(array, jax.core.Tracer)
        if not is_traced and len(array.devices()) > 1:
            count = len(array.devices())
            reasons.append(f"{name} must lie on one device; got {count} of them: jax.device_put moves it")
        platforms.add(_platform([array]))
        if is_traced and _platform([array]) != "cpu":
            reasons.append(
                f"{name} must hold data where attention runs on a GPU; got a tracer, {kind_of(array)}: call "
                f"cuflash.jax.attention outside of what is traced, or trace it for the CPU within "
                f"jax.default_device(jax.devices('cpu')[0])"
            )
    if not reasons and (len(platforms) > 1 or not platforms <= {"cpu", "gpu"}):
        reasons.append(f"all arrays must lie on the CPU or on one GPU; got {', '.join(sorted(platforms))}: move them")
    wanted = {"cpu": {"cpu"}, "sim": {"cpu"}, "gpu": {"gpu"}}.get(executor) if isinstance(executor, str) else None
    if not reasons and wanted is not None and platforms != wanted:
        here = platforms.pop()
        reasons.append(f"executor={executor!r} takes arrays on {wanted.pop()!r}; got q on {here!r}: move them")
    return reasons
