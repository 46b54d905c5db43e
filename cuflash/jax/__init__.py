"""Attention on JAX arrays, differentiable by JAX: `cuflash.jax.attention`. Importing this module imports JAX.

Each pass is a JAX primitive. Its arrays, including those of masks and scores, are operands of a call that XLA makes: on
the CPU to the `cpu` executor, on a GPU to a function that launches kernels on XLA's buffers and stream.
"""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax

from ..keywords import explains_keywords
from ..planning.options import (
    AnyArray, CallOptions, Causality, ExecutorName, KernelFamily, MaskLike, Options, Precision, ScoreLike, Window,
)  # fmt: skip
from ..dropout import Dropout
from ._batching import batch_passes
from ._context_parallel import context_parallel
from ._derivatives import differentiate_passes
from ._entry import Memory, called

__all__ = ["attention", "context_parallel"]

differentiate_passes()
batch_passes()


def __dir__() -> list[str]:
    return __all__


@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, memory: Memory = ..., return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> jax.Array: ...


@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, memory: Memory = ..., return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, memory: Memory = ..., return_lse: bool,
    **options: Unpack[CallOptions],
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
    memory: Memory = "heads_first",
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
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
    memory : {"heads_first", "tokens_first"}
        The memory order of q, k, v, o and their gradients within `jax.jit`. "tokens_first" avoids copies in a model
        that stores `[batch, tokens, heads, head_dim]` and swaps axes for this call; results are the same.
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
    >>> @jax.jit
    ... def layer(*stored):  # [batch, tokens, heads, head_dim]
    ...     q, k, v = (array.swapaxes(1, 2) for array in stored)
    ...     return cuflash.jax.attention(q, k, v, memory="tokens_first").swapaxes(1, 2)
    >>> layer(*jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 64))).shape
    (2, 100, 4, 64)
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, (), kernel, executor, precision,
        deterministic, q_start, kv_start,
    )  # fmt: skip
    return called(q, k, v, options, memory, return_lse)
