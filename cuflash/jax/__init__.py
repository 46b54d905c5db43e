"""Attention on JAX arrays, differentiable by JAX: `cuflash.jax.attention`. Importing this module imports JAX.

Each pass is a JAX primitive. Its arrays, including those of masks and scores, are operands of a call that XLA makes: on
the CPU to the `cpu` executor, on a GPU to a function that launches kernels on XLA's buffers and stream.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
import numpy as np

from ..arrays import flag_reasons, is_array
from ..errors import refuse
from ..keywords import explains_keywords
from ..layouts import is_tracer
from ..planning.options import (
    AnyArray, CallOptions, Causality, ExecutorName, KernelFamily, MaskLike, Options, Precision, ScoreLike, Window,
)  # fmt: skip
from ..dropout import Dropout
from ..scores import Score
from ._batching import batch_passes
from ._call import JaxCall
from ._checks import array_reasons, has_no_data, holds_data, require, traced_reasons
from ._derivatives import differentiate_passes
from ._primitives import bind, executed, pass_of

__all__ = ["attention"]

differentiate_passes()
batch_passes()


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
        Arrays of one dtype, float16, bfloat16, float32 or float64, on the CPU or on one CUDA device, traced or not;
        shapes as in `cuflash.attention`. NumPy arrays and lists are converted by `jax.numpy.array`; the same
        holds for bias, sink and score.
    mask : optional
        As in `cuflash.attention`. Its arrays may be JAX arrays, traced or not. On a GPU, kernels must be able to list
        the blocks of a mask with such arrays: one mask of arrays, possibly intersected with masks in closed form.
    causal, window, scale : optional
        As in `cuflash.attention`, but must be known when the call is traced.
    score : Score, or callable (s, b, h, i, j), optional
        As in `cuflash.attention`; captured arrays must be JAX arrays on q's device, and may be traced.
    softcap : float, optional
        As in `cuflash.attention`.
    bias, sink : jax.Array, optional
        As in `cuflash.attention`.
    dropout : Dropout, optional
        As in `cuflash.attention`. Its seed may also be a key of `jax.random.key` or an array of two uint32, traced or
        not; p and offset must be known when the call is traced.
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
        The arguments are invalid or not supported. The message lists all reasons; nothing is computed.
    RuntimeError
        The arrays are on a GPU and CuPy is missing.

    Notes
    -----
    q, k, v, bias, sink and the real arrays of a score have gradients. The gradients of bias, sink and score arrays
    are computed only if JAX differentiates with respect to them. Forward mode and second derivatives are available, but
    not third derivatives or `jax.jvp` of `jax.jvp`. `jax.vmap` adds a batch axis to one call; a call with dropout, or
    with a score function or mask that reads b, runs once per entry.

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
    options = Options(
        mask, causal, window, scale, _with_arrays_of_jax(score), softcap, _of_jax(bias), _of_jax(sink), dropout, (),
        kernel, executor, precision, deterministic, q_start, kv_start,
    )  # fmt: skip
    refuse(flag_reasons("return_lse", return_lse) + traced_reasons(options))
    call, arrays, options = JaxCall.of(_of_jax(q), _of_jax(k), _of_jax(v), options)
    if isinstance(executor, str) and all(map(holds_data, map(type, arrays.values()))):
        o, lse = executed(pass_of(call, "forward", arrays), list(arrays.values()))
        return (o, lse) if return_lse else o
    refuse(array_reasons(arrays))
    if not isinstance(executor, str) or any(map(has_no_data, arrays.values())):
        require(arrays, options)
    o, lse = bind(call, "forward", arrays)
    return (o, lse) if return_lse else o


def _of_jax(value: Any) -> Any:
    """Return a NumPy array, or a list of numbers, as a JAX array in a dtype that JAX supports; other values unchanged.

    The result is a copy, since later changes of the NumPy array must not affect gradients. Tracers that hold a NumPy
    array are copied, too.
    """
    kind: Any = type(value)
    if value is None or holds_data(kind):
        return value
    held = value.to_concrete_value() if is_tracer(value) else value
    is_numpy = isinstance(held, np.ndarray) and is_array(held)
    return jax.numpy.array(value) if is_numpy or isinstance(value, list) else value


def _with_arrays_of_jax(score: Any) -> Any:
    """Return a Score over JAX arrays instead of NumPy arrays; any other value unchanged."""
    if not isinstance(score, Score) or not any(isinstance(array, np.ndarray) for array in score.arrays.values()):
        return score
    arrays = {name: _of_jax(array) for name, array in score.arrays.items()}
    if all(array.dtype == score.arrays[name].dtype for name, array in arrays.items()):
        return score._with_arrays(arrays)
    return Score._of_reserved(score.function, **arrays)
