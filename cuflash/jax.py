"""Attention on JAX arrays, differentiable by JAX: `cuflash.jax.attention`. Importing this module imports JAX.

Arrays on the CPU are used as NumPy arrays; traced calls become callbacks there. Arrays on a GPU are exchanged by
DLPack, outside of traced code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .arrays import Array, describe, flag_reasons, is_array, ShapeDtype
from .calls._forward import run, with_one_score
from .calls._call import planned
from .dropout import Dropout
from .errors import refuse
from .executors._layout_key import layout_key
from .executors import checks
from .keywords import explains_keywords
from .layouts import is_tracer, kind_of
from .masks.base import Mask
from .masks.content import held_arrays
from .planning.dropout_launches import numbers_of, require_number
from .planning.list_kernels import AT_CALL
from .planning.lookup import lookup
from .planning.options import (
    AnyArray, CallOptions, Causality, ExecutorName, KernelFamily, MaskLike, Options, Precision, ScoreLike, Window,
)  # fmt: skip
from .plans import Plan, with_numbers
from .scores import Score

__all__ = ["attention"]


def __dir__() -> list[str]:
    return __all__


@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: Literal[False] = False, **options: Unpack[CallOptions]
) -> jax.Array: ...


@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: Literal[True], **options: Unpack[CallOptions]
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: bool, **options: Unpack[CallOptions]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explains_keywords
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
    return_lse: bool = False,
) -> Any:
    """Compute exact attention of JAX arrays; JAX can differentiate o and lse.

    Parameters
    ----------
    q, k, v : jax.Array
        Arrays of one dtype, float16, bfloat16, float32 or float64, on the CPU or on a single CUDA device, which must be
        CuPy's current device; shapes as in `cuflash.attention`. Inside `jax.jit`, `jax.vmap` etc. only on the CPU.
        NumPy arrays and lists are converted by `jax.numpy.array`, also in bias, sink and score.
    mask, causal, window, scale : optional
        As in `cuflash.attention`, but must be known when the call is traced; a mask's arrays may be JAX arrays, or
        arrays of any library with DLPack, on q's device.
    score : Score, or callable (s, b, h, i, j), optional
        As in `cuflash.attention`; captured arrays must be JAX arrays on q's device, and may be traced.
    softcap : float, optional
        As in `cuflash.attention`.
    bias, sink : jax.Array, optional
        As in `cuflash.attention`.
    dropout : Dropout, optional
        As in `cuflash.attention`; its seed must be a number that is known when the call is traced.
    kernel : {"auto", "sm90", "sm80", "simt", "fa1", "naive"}
        As in `cuflash.attention`.
    executor : {"auto", "cpu", "gpu", "sim"}
        "auto" selects "cpu" or "gpu" by the arrays' device. "sim" runs the GPU kernels on a simulator.
    precision, deterministic, q_start, kv_start : optional
        As in `cuflash.attention`.
    return_lse : bool
        If True, also return lse.

    Returns
    -------
    o : jax.Array [..., num_heads, seqlen_q, value_dim]
        In q's dtype and on its device. 0 in rows without a key.
    lse : jax.Array [..., num_heads, seqlen_q]
        In float32 (float64 for float64), as returned by `cuflash.attention`.

    Raises
    ------
    TypeError
        An argument is not an array.
    UnsupportedProblem
        The arguments are invalid or not supported, such as a tracer on a GPU. Lists every reason; nothing is computed.
    RuntimeError
        The arrays are on a GPU and CuPy is missing.

    Notes
    -----
    q, k, v, bias, sink and the real arrays of a score have gradients. Those of bias, sink and score arrays are computed
    only if JAX differentiates with respect to them. Only reverse mode is available, and only once: `jax.jvp` and second
    derivatives are refused. `jax.vmap` runs one call per entry: pass the mapped axis as a leading axis instead if you
    can.

    Examples
    --------
    >>> import jax, cuflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 100, 64))
    >>> def loss(q, bias):
    ...     return cuflash.jax.attention(q, k, v, bias=bias, causal=True).sum()
    >>> dq, dbias = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, jax.numpy.zeros((4, 100, 100)))
    >>> dq.shape, dbias.shape
    ((2, 4, 100, 64), (4, 100, 100))
    """
    refuse(flag_reasons("return_lse", return_lse))
    require_number(dropout)
    options = Options(
        mask, causal, window, scale, _with_arrays_of_jax(score), softcap, _of_jax(bias), _of_jax(sink), dropout, (),
        kernel, executor, precision, deterministic, q_start, kv_start,
    )  # fmt: skip
    options, operands = with_one_score(options)
    arrays = {"q": _of_jax(q), "k": _of_jax(k), "v": _of_jax(v), **operands}
    refuse(_array_reasons(arrays, executor) + _traced_reasons(options))
    call = _Call(tuple(arrays), options, _platform(arrays.values()))
    if not _are_traced(arrays.values()):
        o, lse = _forward_of(call, (), tuple(arrays.values())).results
        return (o, lse) if return_lse else o
    if any(_data(array) is None for array in arrays.values()):
        call.planned((), arrays.values())  # refuses unsupported arguments before JAX runs anything
    o, lse = _attention(call, *_varying_alike(arrays.values(), arrays.values()))
    return (o, lse) if return_lse else o


def _of_jax(value: Any) -> Any:
    """Return a NumPy array, or a list of numbers, as a JAX array in a dtype that JAX supports; other values unchanged.

    It is a copy, since later changes of the NumPy array must not affect gradients.
    """
    is_numpy = isinstance(value, np.ndarray) and is_array(value)
    return jax.numpy.array(value) if is_numpy or isinstance(value, list) else value


def _with_arrays_of_jax(score: Any) -> Any:
    """Return a Score over JAX arrays instead of NumPy arrays; any other value unchanged."""
    if not isinstance(score, Score) or not any(isinstance(array, np.ndarray) for array in score.arrays.values()):
        return score
    arrays = {name: _of_jax(array) for name, array in score.arrays.items()}
    if all(array.dtype == score.arrays[name].dtype for name, array in arrays.items()):
        return score._with_arrays(arrays)
    return Score._of_reserved(score.function, **arrays)


def _varying_alike(arrays: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return arrays that vary, within `jax.shard_map`, over all mesh axes over which `others` vary."""
    kinds = [jax.typeof(other) for other in others if isinstance(other, jax.core.Tracer)]
    axes = frozenset[str]().union(*map(_varying_axes, kinds))
    if not axes:
        return list(arrays)
    return [jax.lax.pcast(array, tuple(axes - _varying_axes(jax.typeof(array))), to="varying") for array in arrays]


def _varying_axes(kind: Any) -> frozenset[str]:
    """Return the mesh axes over which values of a type vary."""
    axes = kind.vma if hasattr(kind, "vma") else kind.mat.varying if hasattr(kind, "mat") else ()  # until JAX 0.9
    return frozenset(axes)


class _Call:
    """A call without its arrays: their names, its options, and their platform."""

    def __init__(self, names: tuple[str, ...], options: Options, place: str) -> None:
        score = options.score
        if isinstance(score, Score):  # otherwise it would hold tracers as long as JAX holds this object
            score = score._with_arrays({name: _shape_of(array) for name, array in score.arrays.items()})
        bias = None if options.bias is None else _shape_of(options.bias)  # still separate only if invalid
        self.names, self._place = names, place
        self._options = options._replace(score=score, bias=bias, sink=None)
        self._plans: dict[Hashable, Plan] = {}

    def options(self, wrt: tuple[str, ...], arrays: Sequence[jax.Array]) -> Options:
        """Return the options of the call on arrays with data, with gradients of the operands that `wrt` names."""
        named, score = dict(zip(self.names, arrays)), self._options.score
        if isinstance(score, Score):
            score = score._with_arrays({name: named[name] for name in score.arrays})
        return self._options._replace(score=score, sink=named.get("sink"), wrt=wrt)

    def planned(self, wrt: tuple[str, ...], arrays: Iterable[jax.Array]) -> Plan:
        """Return the plan of a traced call with gradients of the operands that `wrt` names, created once per call.

        Calls with equal shapes and options share it. An index on the host caches the plans of its calls.
        """
        shapes = dict(zip(self.names, map(_shape_of, arrays)))
        of_call = wrt, *shapes.values()
        if of_call not in self._plans:
            options = self._options._replace(wrt=wrt, sink=shapes.get("sink"))
            self._plans[of_call] = self._cached_or_planned(shapes, options)
        return self._plans[of_call]

    def _cached_or_planned(self, shapes: dict[str, ShapeDtype], options: Options) -> Plan:
        looked_up, key = lookup(options, layout_key), None
        if looked_up.contents is None and not checks.is_on():
            key = looked_up.key("jax", (self._place, *shapes.values()), *self.names)
        cached: Plan | None = looked_up.find(key)
        if cached is not None:
            numbers = numbers_of(options.dropout)
            return with_numbers(cached, numbers) if numbers else cached
        if options.executor == "auto":
            options = options._replace(executor="gpu" if self._place == "gpu" else "cpu")
        snapshot = looked_up.snapshot()
        plan = planned(shapes["q"], shapes["k"], shapes["v"], options)
        if key is not None:
            looked_up.keep(key, plan._without_arrays(), snapshot)
        return plan


def _shape_of(array: Any) -> ShapeDtype:
    return ShapeDtype(tuple(array.shape), array.dtype)


class _Forward(NamedTuple):
    """o and lse, the plan that computed them, and the lists that the call built for a mask on a device, if any."""

    results: Sequence[jax.Array]
    ready: Plan
    lists: dict[str, Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, *arrays: jax.Array) -> Sequence[jax.Array]:
    """Compute o and lse of q, k, v and operands."""
    return _forward_of(call, (), arrays).results


def _forward_of(call: _Call, wrt: tuple[str, ...], arrays: Sequence[jax.Array]) -> _Forward:
    """Run the forward pass: on arrays with data like `cuflash.attention`, on traced arrays by a callback."""
    if not _are_traced(arrays):
        q, k, v, *_ = arrays
        ran = run(q, k, v, call.options(wrt, arrays), None)
        lists = {name: array for name, array in ran.arrays.items() if name == AT_CALL}
        return _Forward(_as_jax((ran.o, ran.lse), like=q), ran.plan, lists)
    ready = call.planned(wrt, arrays)

    def forward(q: Array, k: Array, v: Array, *operands: Array) -> Sequence[Array]:
        return ready.forward(q, k, v, **dict(zip(call.names[3:], operands)))

    problem = ready._plan.problem
    shapes = [(problem.o_shape(), problem.dtype), (problem.lse_shape(), problem.accumulator)]
    return _Forward(_traced(forward, shapes, arrays), ready, {})


def _forward(call: _Call, *arguments: Any) -> Any:
    """Return o and lse, and the data of the backward pass with gradients of those operands that JAX needs."""
    arrays = [_held_by_jax(each.value) for each in arguments]
    wrt = tuple(name for name, each in zip(call.names[3:], arguments[3:]) if each.perturbed)
    forward = _forward_of(call, wrt, arrays)
    o, lse = forward.results
    return (o, lse), (jax.tree_util.Partial(partial(_gradients, call, forward.ready, forward.lists)), o, lse, arrays)


def _backward(call: _Call, saved: Any, cotangents: Sequence[Any]) -> Any:
    gradients, o, lse, arrays = saved
    do, dlse = (
        jax.numpy.zeros(each.shape, each.dtype) if isinstance(each, SymbolicZero) else jax.numpy.asarray(each)
        for each in cotangents
    )
    return gradients(do, dlse, o, lse, arrays)


def _gradients(
    call: _Call, ready: Plan, lists: dict[str, Array], do: Any, dlse: Any, o: Any, lse: Any, arrays: Sequence[Any]
) -> Any:
    """Return the gradients of all arrays of a call; None, which JAX treats as zero, for operands without one."""
    wrt = ready._plan.problem.wrt

    def backward(*inputs: Array) -> Sequence[Array]:
        do, dlse, o, lse, q, k, v, *operands = inputs
        gradients = ready.backward(do, q, k, v, o, lse, dlse, **dict(zip(call.names[3:], operands)), **lists)
        return *gradients, *(gradients[name] for name in wrt)

    inputs = do, dlse, o, lse, *arrays
    if _are_traced(inputs):
        shapes = [(each.shape, each.dtype) for name, each in zip(call.names, arrays) if name in ("q", "k", "v", *wrt)]
        results = iter(_traced(backward, shapes, inputs))
    else:
        results = iter(_as_jax(backward(*inputs), like=arrays[0]))
    return tuple(next(results) if name in ("q", "k", "v", *wrt) else None for name in call.names)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


def _are_traced(arrays: Iterable[Any]) -> bool:
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def _as_jax(results: Iterable[Array], like: jax.Array) -> tuple[jax.Array, ...]:
    """Return NumPy or CuPy arrays as JAX arrays on the device of `like`."""
    (device,) = like.devices()
    return tuple(
        jax.device_put(array, device) if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)
        for array in results
    )


def _traced(
    function: Callable[..., Sequence[Array]], results: Sequence[Any], arrays: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Run a pass of a plan on traced arrays by a callback; `results` are pairs of shape and dtype."""

    def on_host(*arrays: Any) -> tuple[Array, ...]:
        return tuple(function(*map(np.asarray, arrays)))

    shapes = tuple(jax.ShapeDtypeStruct(*result) for result in results)
    return tuple(_varying_alike(_called_back(on_host, shapes, *arrays), arrays))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _called_back(on_host: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct], *arrays: jax.Array) -> Any:
    return jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential")


@_called_back.defjvp
def _refused(*arguments: Any) -> Any:
    """Refuse second derivatives, since JAX's own error would be about callbacks."""
    raise TypeError(
        "gradients of cuflash.jax.attention cannot be differentiated: compute second derivatives through "
        "jax.nn.dot_product_attention"
    )


def _platform(arrays: Iterable[jax.Array]) -> str:
    """Return the platform of arrays, or of a traced computation, by its name in JAX: "cpu", "gpu" or another."""
    held = [data for data in map(_data, arrays) if data is not None]
    return str(next(iter(held[0].devices())).platform) if held else _default_platform()


def _default_platform() -> str:
    """Return the platform on which JAX runs traced functions."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return device if isinstance(device, str) else str(device.platform)


def _data(array: jax.Array) -> jax.Array | None:
    """Return the array, or the one behind a tracer of `jax.grad` or `jax.vjp`; None for a tracer without data."""
    value = array.to_concrete_value() if isinstance(array, jax.core.Tracer) else array
    return None if value is None else _held_by_jax(value)


def _held_by_jax(value: Any) -> jax.Array:
    """Return an array or tracer unchanged, and a NumPy argument that a transformation still holds as a JAX array."""
    return value if isinstance(value, jax.Array) else jax.numpy.array(value)


def _traced_reasons(options: Options) -> list[str]:
    """Return why options with tracers are refused: a plan is created from the options while JAX traces the call."""
    mask, window, reasons = options.mask, options.window, []
    if is_tracer(mask) or isinstance(mask, Mask) and any(map(is_tracer, held_arrays(mask))):
        fix = "close over the mask, or pass bias=jnp.where(mask, 0, -jnp.inf)"
        reasons.append(f"mask must be known when JAX traces the call; got a tracer: {fix}")
    if is_tracer(options.scale):
        fix = "name it in static_argnames of jax.jit, or multiply q by it"
        reasons.append(f"scale must be a Python number when JAX traces the call; got a tracer: {fix}")
    others = {"causal": is_tracer(options.causal), "softcap": is_tracer(options.softcap)}
    others["window"] = any(map(is_tracer, window)) if isinstance(window, (tuple, list)) else is_tracer(window)
    for name, is_traced in others.items():
        if is_traced:
            fix = f"name {name} in static_argnames of jax.jit"
            reasons.append(f"{name} must be known when JAX traces the call; got a tracer: {fix}")
    return reasons


def _array_reasons(arrays: dict[str, Any], executor: Any) -> list[str]:
    """Return why q, k, v and operands are not arrays that the executor can access.

    Raises
    ------
    TypeError
        An argument is not a JAX array.
    """
    reasons, platforms = [], set()
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise TypeError(f"{name} must be a jax.Array; got {describe(array)}: convert it with jax.numpy.asarray")
        data = _data(array)
        if data is not None and len(data.devices()) > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
            count = len(data.devices())
            reasons.append(f"{name} must be on one device; got {count} devices: move it with jax.device_put")
        platforms.add(_platform([array]))
        if data is None and _platform([array]) != "cpu":
            reasons.append(
                f"{name} must have data if attention runs on a GPU; got a tracer, {kind_of(array)}: call "
                f"cuflash.jax.attention outside of traced code, or trace it for the CPU within "
                f"jax.default_device(jax.devices('cpu')[0])"
            )
    if not reasons and (len(platforms) > 1 or not platforms <= {"cpu", "gpu"}):
        reasons.append(f"all arrays must be on the CPU or on one GPU; got {', '.join(sorted(platforms))}: move them")
    wanted = {"cpu": {"cpu"}, "sim": {"cpu"}, "gpu": {"gpu"}}.get(executor) if isinstance(executor, str) else None
    if not reasons and wanted is not None and platforms != wanted:
        platform = platforms.pop()
        reasons.append(f"executor={executor!r} takes arrays on {wanted.pop()!r}; got q on {platform!r}: move them")
    return reasons
