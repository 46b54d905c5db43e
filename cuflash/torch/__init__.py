"""Attention on PyTorch tensors, differentiable by PyTorch: `cuflash.torch.attention`.

Importing this module imports PyTorch. Tensors on the CPU are used as NumPy arrays, without a copy. Tensors on a GPU run
the same bound passes as CuPy arrays, with memory from PyTorch's allocator and on PyTorch's current stream.
"""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch
from torch._C import (
    _are_functorch_transforms_active as _is_transforming, _is_any_autocast_enabled as _is_any_autocast,
    _len_torch_dispatch_stack as _num_modes,
)  # fmt: skip

from ..arrays import flag_reasons
from ..calls._forward import with_one_score
from ..calls.model_options import model_options
from ..dropout import Dropout
from ..errors import refuse
from ..keywords import explains_keywords
from ..layouts import has_dual_level, is_tensor
from ..masks import Causal
from ..planning.options import (
    AnyArray, CallOptions, Causality, ExecutorName, KernelFamily, MaskLike, Options, Precision, ScoreLike, Window,
)  # fmt: skip
from ._context_parallel import ContextParallel
from ._functions import Attention, Recorded
from ._operators import compiled, leave_to_python, trace
from ._passes import ran
from ._tensors import NEW, Out, Tensor, in_autocast, own_integers
from ._transformed import Transformed

__all__ = ["ContextParallel", "attention", "transformers_attention"]


def __dir__() -> list[str]:
    return __all__


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, out: Out = None, return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, out: Out = None, return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, out: Out = None, return_lse: bool,
    **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


@explains_keywords
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention of PyTorch tensors; PyTorch can differentiate o and lse twice, in both modes.

    Parameters
    ----------
    q, k, v : torch.Tensor
        Tensors of one dtype, float16, bfloat16, float32 or float64, on the CPU or on one CUDA device.
        Shapes as in `cuflash.attention`, with any strides.
    mask, causal, window, scale : optional
        As in `cuflash.attention`; a mask's arrays may be tensors, or arrays of any library with DLPack, on q's device.
    score : Score, or callable (s, b, h, i, j), optional
        As in `cuflash.attention`; captured arrays must be tensors on q's device.
    softcap : float, optional
        As in `cuflash.attention`.
    bias, sink : torch.Tensor, optional
        As in `cuflash.attention`.
    dropout : Dropout, optional
        As in `cuflash.attention`; its seed may be a tensor on q's device.
    kernel : {"auto", "sm90", "sm80", "simt", "fa1", "naive"}
        As in `cuflash.attention`.
    executor : {"auto", "cpu", "gpu", "sim"}
        "auto" selects "cpu" or "gpu" by the tensors' device. "sim" runs the GPU kernels on a simulator.
    precision, deterministic, q_start, kv_start : optional
        As in `cuflash.attention`.
    out : torch.Tensor, or pair (o, lse), optional
        Tensors for the results, instead of new ones; they must not overlap the inputs or require gradients. The
        returned tensors share their memory, and carry the gradients.
    return_lse : bool
        If True, also return lse.

    Returns
    -------
    o : torch.Tensor [..., num_heads, seqlen_q, value_dim]
        In q's dtype and on its device. 0 in rows without a key.
    lse : torch.Tensor [..., num_heads, seqlen_q]
        In float32 (float64 for float64), as returned by `cuflash.attention`.

    Raises
    ------
    TypeError
        An argument is not a tensor.
    UnsupportedProblem
        The arguments are invalid or not supported, such as sparse, quantized, nested, meta or traced tensors. The
        message lists all reasons; nothing is computed.
    RuntimeError
        The tensors are on a GPU and CuPy is missing, or the stream is captured before the same call has run once.

    Notes
    -----
    On a GPU, o has the same memory order of axes as q, and each gradient the same as its tensor, if these tensors are
    dense: a model that stores tokens before heads needs no copies.
    q, k, v, bias, sink and the real tensors of a score have gradients if they require them. The gradients of bias,
    sink and score tensors are computed only on request. On a GPU no call synchronizes. Once a call has run forward and
    backward, identical calls can be captured by `torch.cuda.graph`.
    Tangents of `torch.func.jvp` and `torch.autograd.forward_ad`, second derivatives in every order except a tangent of
    a tangent, and `torch.vmap` run passes of the library, with memory linear in the length. Third derivatives
    are refused, and so are, on a GPU, second derivatives with respect to the bias and score tensors. `torch.compile`
    sees one operator per pass. Under `torch.autocast` q, k and v are cast like those of `scaled_dot_product_attention`.

    Examples
    --------
    >>> import torch, cuflash.torch
    >>> q, k, v = torch.randn(3, 2, 4, 100, 64).requires_grad_()
    >>> bias = torch.zeros(4, 100, 100, requires_grad=True)
    >>> o, lse = cuflash.torch.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    >>> o.shape, lse.shape
    (torch.Size([2, 4, 100, 64]), torch.Size([2, 4, 100]))
    >>> dq, dbias = torch.autograd.grad(o.sum() + lse.sum(), (q, bias))
    >>> dq.shape, dbias.shape
    (torch.Size([2, 4, 100, 64]), torch.Size([4, 100, 100]))
    """
    options = Options(
        mask, causal, window, scale, score, softcap, bias, sink, dropout, (), kernel, executor, precision,
        deterministic, q_start, kv_start,
    )  # fmt: skip
    if torch.compiler.is_compiling() and out is None:
        results = compiled(q, k, v, options)
        if results is not None:
            return results if return_lse else results[0]
    return _called(q, k, v, options, out, return_lse)


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    deterministic: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute attention for Hugging Face transformers models; register it with their `AttentionInterface`.

    Models call it with the options of their attention. An unknown option that could change results is refused.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer; its `is_causal` is used if the call does not pass one.
    query, key, value : torch.Tensor [batch, num_heads, seqlen, head_dim]
        As in `attention`; keys and values may have fewer heads.
    attention_mask : torch.Tensor, optional
        True means that the query attends to the key; a floating-point mask is added to the scores. A mask must include
        the restrictions of `is_causal` and `sliding_window`, which are then ignored. Without a mask, several queries
        are aligned to the first key, like those of a prompt with a static cache, and a single query to the last key.
    scaling : float, optional
        The factor of q . k; default: 1 / sqrt(head_dim).
    dropout : float
        Probability with which a weight is dropped; the seed comes from PyTorch's generator.
    is_causal : bool, optional
        True if a call without a mask is causal; default: the module's `is_causal`, or True if it has none.
    position_bias : torch.Tensor, optional
        Added to the scores; has a gradient if it requires one.
    sliding_window : int, optional
        Number of keys that a query attends to without a mask, including its own; without `is_causal`, on each side.
    softcap : float, optional
        As in `attention`.
    s_aux : torch.Tensor [num_heads], optional
        Sink logits, like `sink` of `attention`.
    cu_seq_lens_q, cu_seq_lens_k : torch.Tensor, optional
        Offsets of sequences that are packed into a batch of 1.
    deterministic : bool, optional
        As in `attention`; default: False.
    **others : object
        None, False, or an option that does not affect the weights, such as `position_ids` and `use_cache`.

    Returns
    -------
    o : torch.Tensor [batch, seqlen, num_heads, value_dim]
        The output, with tokens before heads.
    weights : None
        Attention weights are never stored.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`, or an option is unknown.

    Examples
    --------
    >>> import torch, cuflash.torch
    >>> layer = torch.nn.Module()
    >>> q, k, v = torch.randn(3, 2, 4, 16, 8)
    >>> o, weights = cuflash.torch.transformers_attention(layer, q, k, v, is_causal=True, use_cache=False)
    >>> o.shape, weights
    (torch.Size([2, 16, 4, 8]), None)
    """
    options = model_options(
        module, query, key, attention_mask, is_causal=is_causal, position_bias=position_bias,
        sliding_window=sliding_window, cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k, others=others,
    )  # fmt: skip
    is_in_graph = torch.compiler.is_compiling()
    seed = torch.randint(1 << 62, (), device=query.device if is_in_graph else "cpu") if dropout else 0
    dropped = Dropout(dropout, seed if is_in_graph else int(seed)) if dropout else None
    o = attention(
        query, key, value, **options, scale=scaling, softcap=softcap, sink=s_aux, dropout=dropped,
        deterministic=bool(deterministic),
    )  # fmt: skip
    return o.transpose(1, 2).contiguous(), None


def _called(
    q: Tensor, k: Tensor, v: Tensor, options: Options, out: Out, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention`, whose options are one value."""
    if type(return_lse) is not bool:
        refuse(flag_reasons("return_lse", return_lse))
    if _is_any_autocast() and is_tensor(q) and is_tensor(k) and is_tensor(v):
        q, k, v = in_autocast(q, k, v)
    if _is_transforming() or _num_modes() or has_dual_level():
        o, lse = _of_transforms(q, k, v, options, out)
        return (o, lse) if return_lse else o
    outs = NEW if out is None else tuple(out) if isinstance(out, (tuple, list)) and len(out) == 2 else (out, None)
    options, operands = with_one_score(options)
    tensors = {"q": q, "k": k, "v": v}
    if operands:
        tensors |= {name: own_integers(name, each, q) for name, each in operands.items()} if is_tensor(q) else operands
    has_graph = torch.is_grad_enabled() and any([getattr(each, "requires_grad", False) for each in tensors.values()])
    if has_graph and operands:
        needed = (name for name, each in operands.items() if getattr(each, "requires_grad", False))
        options = options._replace(wrt=tuple(needed))
    _, o, lse = ran(tensors, outs, options, has_graph or return_lse, Recorded.apply if has_graph else None)
    return (o, lse) if return_lse else o


def _of_transforms(q: Tensor, k: Tensor, v: Tensor, options: Options, out: Out) -> tuple[Tensor, Tensor]:
    """Return o and lse of tensors that have tangents, or belong to a transformation of torch.func."""
    if out is not None:
        fix = "leave it out, and use the returned tensors"
        refuse([f"out must be None for tensors with tangents and within torch.func; got {type(out).__name__}: {fix}"])
    call, tensors = Transformed.of(q, k, v, options)
    o, lse = Attention.apply(call, (), *tensors)
    return o, lse


trace(attention, transformers_attention, Causal.__init__, Dropout.__init__)
leave_to_python(_called)
