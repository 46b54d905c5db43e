"""Attention on PyTorch tensors, differentiable by PyTorch: `cuflash.torch.attention`.

Importing this module imports PyTorch. Tensors on the CPU are used as NumPy arrays, without a copy. Tensors on a GPU run
the same bound passes as CuPy arrays, with memory from PyTorch's allocator and on PyTorch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, overload

import numpy as np
import torch
from torch.autograd.graph import increment_version

from .calls._forward import run, with_one_score
from .calls._call import planned
from .calls.model_options import model_options
from .arrays import Array, ShapeDtype, describe, flag_reasons, is_array, is_integer_dtype
from .dropout import Dropout
from .errors import UnsupportedProblem, refuse
from .executors._bound_plan import BoundPlan
from .executors._layout_key import layout_key
from .executors import checks, gpu, torch_gpu
from .executors.torch_gpu import NUMPY_DTYPES, TORCH_DTYPES, Layout
from .keywords import explains_keywords
from .layouts import dtype_of, has_dual_level, is_batched, is_tensor, taken, tensor_reasons
from .masks.one_array import at_each_call
from .planning.dropout_launches import numbers_of, require_number
from .planning.list_kernels import AT_CALL, WorkAtCall
from .planning._call_cache import CALLS
from .planning.lookup import Lookup, lookup
from .planning.options import (
    AnyArray, CallOptions, Causality, ExecutorName, KernelFamily, MaskLike, Options, Precision, ScoreLike, Window,
)  # fmt: skip
from .plans import Plan, backward_names
from .scores import Score

__all__ = ["attention", "transformers_attention"]


def __dir__() -> list[str]:
    return __all__


Tensor: TypeAlias = torch.Tensor

_PLAIN = {torch.Tensor, torch.nn.Parameter}


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, out: Any = None, return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, out: Any = None, return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, out: Any = None, return_lse: bool,
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
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Compute exact attention of PyTorch tensors; PyTorch can differentiate o and lse.

    Parameters
    ----------
    q, k, v : torch.Tensor
        Tensors of one dtype, float16, bfloat16, float32 or float64, on the CPU or on PyTorch's current CUDA device.
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
        As in `cuflash.attention`; its seed must be a number.
    kernel : {"auto", "sm90", "sm80", "simt", "fa1", "naive"}
        As in `cuflash.attention`.
    executor : {"auto", "cpu", "gpu", "sim"}
        "auto" selects "cpu" or "gpu" by the tensors' device. "sim" runs the GPU kernels on a simulator.
    precision, deterministic, q_start, kv_start : optional
        As in `cuflash.attention`.
    out : torch.Tensor, or pair (o, lse), optional
        Tensors for the results, instead of new ones; must not overlap the inputs, nor require gradients. The returned
        tensors share their memory, and carry the gradients.
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
        The arguments are invalid or not supported, such as sparse, quantized, nested, meta or traced tensors. Lists
        every reason; nothing is computed.
    RuntimeError
        The tensors are on a GPU and CuPy is missing, or the stream is captured before the same call has run once.

    Notes
    -----
    On a GPU, the memory order of o's axes is that of q, and those of the gradients are those of q, k and v, if these
    tensors are dense: a model that stores tokens before heads needs no copies.
    q, k, v, bias, sink and the real tensors of a score have gradients if they require them. Those of bias, sink and
    score tensors are computed only on request. On a GPU no call synchronizes. Once a call has run forward and backward,
    identical calls can be captured by `torch.cuda.graph`. Second derivatives are not available.

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
    if torch.compiler.is_compiling():
        called: Any = torch.compiler.disable(_called)(q, k, v, options, out, return_lse)
        return called
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention for Hugging Face transformers models; register it with their `AttentionInterface`.

    Models call it with the options of their attention. An unknown option that could change results is refused.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer; its `is_causal` is used if the call has none.
    query, key, value : torch.Tensor [batch, num_heads, seqlen, head_dim]
        As in `attention`; keys and values may have fewer heads.
    attention_mask : torch.Tensor, optional
        True means attend; a floating-point mask is added to the scores. A mask must include the restrictions of
        `is_causal` and `sliding_window`, which are then ignored. Without a mask, several queries are aligned to the
        first key, like those of a prompt with a static cache, and a single query to the last key.
    scaling : float, optional
        The factor of q . k; default: 1 / sqrt(head_dim).
    dropout : float
        Probability with which a weight is dropped; the seed comes from PyTorch's generator.
    is_causal : bool, optional
        True if a call without a mask is causal; default: the module's `is_causal`, or True if it has none.
    position_bias : torch.Tensor, optional
        Added to the scores; has a gradient if it requires one.
    sliding_window : int, optional
        Number of keys that a query attends without a mask, including its own; without `is_causal`, on each side.
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
    dropped = Dropout(dropout, seed=int(torch.randint(1 << 62, (), device="cpu"))) if dropout else None
    o = attention(
        query, key, value, **options, scale=scaling, softcap=softcap, sink=s_aux, dropout=dropped,
        deterministic=bool(deterministic),
    )  # fmt: skip
    return o.transpose(1, 2).contiguous(), None


def _called(q: Tensor, k: Tensor, v: Tensor, options: Options, out: Any, return_lse: bool) -> Any:
    """Compute `attention` with its options as one value."""
    refuse(flag_reasons("return_lse", return_lse))
    require_number(options.dropout)
    outs = tuple(out) if isinstance(out, (tuple, list)) and len(out) == 2 else (out, None)
    options, operands = with_one_score(options)
    if operands and is_tensor(q):
        operands = {name: _own_integers(name, each, q) for name, each in operands.items()}
    tensors = {"q": q, "k": k, "v": v, **operands}
    has_graph = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in tensors.values())
    if has_graph and operands:
        needed = (name for name, each in operands.items() if getattr(each, "requires_grad", False))
        options = options._replace(wrt=tuple(needed))
    wants_lse = has_graph or return_lse
    try:
        looked_up = lookup(options, _mask_layout)
        contents, key = looked_up.contents, _key(tensors, outs, looked_up, wants_lse)
        call: _Call | None = looked_up.find(key)
        if call is None:
            lists_at_call = key is not None and contents is not None
            call = _first(looked_up, key, tensors, outs, options, lists_at_call, wants_lse)
        if isinstance(call, _OnGpu) and (contents is not None or options.dropout is not None):
            lists_of = call.lists_of
            lists = () if contents is None or lists_of is None else (lists_of(*contents.arrays),)
            call = _WithContents(call, lists, numbers_of(options.dropout))
        if has_graph:
            o, lse = _Attention.apply(call, outs, *tensors.values())
        else:
            o, lse = call.forward(outs, *tensors.values())
    except RuntimeError as error:
        reasons = _tensor_reasons(tensors, outs)
        if reasons:
            raise UnsupportedProblem(reasons) from error
        raise
    return (o, lse) if return_lse else o


def _own_integers(name: str, array: Any, q: Tensor) -> Any:
    """Return integers that a Score captured as NumPy or CuPy arrays, such as those of `scores.within`, as a tensor."""
    if type(array) in _PLAIN or name in ("bias", "sink") or is_tensor(array) or not is_array(array):
        return array
    if not is_integer_dtype(array.dtype):
        return array
    return torch.tensor(array, device=q.device) if type(array) is np.ndarray else torch.from_dlpack(array)


class _Attention(torch.autograd.Function):
    """A call with gradients: PyTorch protects its saved tensors against in-place changes, and frees them."""

    @staticmethod
    def forward(ctx: Any, call: _Call, outs: _Outs, *tensors: Tensor) -> Any:
        o, lse = call.forward(outs, *tensors)
        if outs[0] is not None or outs[1] is not None:
            o, lse = o.detach(), lse.detach()
        ctx.call = call
        ctx.save_for_backward(o, lse, *tensors)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        o, lse, *tensors = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do.resolve_neg()
        dlse = None if dlse is None else dlse.resolve_neg()
        gradients = _Gradients.apply if torch.is_grad_enabled() else _gradients  # true with create_graph=True
        if has_dual_level():
            _require_cotangents(do=do, dlse=dlse)
        try:
            results = gradients(ctx.call, do, dlse, o, lse, *tensors)
        except RuntimeError:
            _require_cotangents(do=do, dlse=dlse)
            raise
        more, needed = iter(results[3:]), ctx.needs_input_grad[5:]
        return None, None, *results[:3], *(next(more) if is_needed else None for is_needed in needed)


def _gradients(
    call: _Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and of operands that require them."""
    q, k, v, *operands = tensors
    return tuple(call.backward(dlse is not None, do, q, k, v, o, lse, *([] if dlse is None else [dlse]), *operands))


class _Gradients(torch.autograd.Function):
    """The backward pass as a function that refuses to be differentiated; PyTorch would treat it as a constant."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> Any:
        return _gradients(call, *tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise RuntimeError(
            "gradients of cuflash.torch.attention cannot be differentiated: compute second derivatives through "
            "torch.nn.functional.scaled_dot_product_attention"
        )


def _require_cotangents(**cotangents: Tensor | None) -> None:
    """Refuse gradients of o and lse that are batched, or whose own derivatives would be lost."""
    reasons = []
    for name, each in cotangents.items():
        if each is not None and is_batched(each):
            fix = "call torch.autograd.grad for each, without is_grads_batched=True or vectorize=True"
            reasons.append(f"{name} must be one gradient, outside of torch.vmap; got a batch of them: {fix}")
        else:
            reasons += tensor_reasons(name, each)
    refuse(reasons)


_Outs = tuple[Any, Any]  # o and lse, each None if the call allocates it


class _ByArrays:
    """A call on NumPy or CuPy arrays that share the tensors' memory, for calls that are not cached on a GPU."""

    def __init__(self, names: Iterable[str], options: Options, is_on_gpu: bool) -> None:
        self._names, self._options, self._is_on_gpu = tuple(names), options, is_on_gpu
        self._ready: Plan | None = None

    def _array(self, tensor: Tensor) -> Array:
        return taken("q", tensor.detach(), gpu.namespace() if self._is_on_gpu else np)

    def _within(self) -> Any:
        return torch_gpu.stream() if self._is_on_gpu else nullcontext()

    def forward(self, outs: _Outs, *tensors: Tensor) -> tuple[Tensor, ...]:
        with self._within():
            out = None if outs == (None, None) else tuple(None if each is None else self._array(each) for each in outs)
            arrays = dict(zip(self._names, map(self._array, tensors)))
            q, k, v = (arrays[name] for name in self._names[:3])
            self._ready, _, *results = run(q, k, v, _over(arrays, self._options), out)
        return _returned(outs, (_as_tensor(array) for array, each in zip(results, outs) if each is None))

    def backward(self, has_dlse: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert self._ready is not None
        with self._within():
            arrays = dict(zip(backward_names(has_dlse, self._names[3:]), map(self._array, tensors)))
            gradients = self._ready.backward(**arrays)
            return tuple(map(_as_tensor, (*gradients, *(gradients[name] for name in self._ready._plan.problem.wrt))))


class _OnGpu:
    """A call on GPU tensors of one layout: a plan whose passes are bound once, and then run repeatedly."""

    def __init__(
        self,
        ready: Plan,
        layouts: dict[str, Layout],
        outs: dict[str, Layout],
        lists_of: Callable[[Any], Tensor] | None,
        wants_lse: bool,
    ) -> None:
        work, problem = ready._plan.work, ready._plan.problem
        self._ready, self._outs, self.lists_of = ready, tuple(outs), lists_of
        self._lists = {AT_CALL: Layout.of_lists(work.source.nbytes)} if isinstance(work, WorkAtCall) else {}
        self._names = *layouts, *self._lists
        self._read = [(place, name) for place, name in enumerate([*layouts][3:]) if not problem.is_of_forward(name)]
        q_axes = torch_gpu.axes_in_memory(layouts["q"])
        axes = {"o": q_axes} if q_axes is not None and len(q_axes) == len(problem.o_shape()) else {}
        self._forward = ready._bind(
            "forward", layouts | self._lists, outs, wants_lse=wants_lse, pins=True, axes=axes, machine=torch_gpu.MACHINE
        )

    def forward(
        self, outs: _Outs, *tensors: Tensor, lists: Sequence[Tensor] = (), numbers: Sequence[int] = ()
    ) -> Sequence[Any]:
        """Return o and lse; lse is None if it was not requested."""
        arrays = dict(zip(self._names, (*tensors, *lists)))
        written = dict(zip(self._outs, (each for each in outs if each is not None)))
        results = self._forward.run(arrays, written, numbers)
        return results if len(results) == 2 else (results[0], None)

    def backward(
        self, has_dlse: bool, *tensors: Tensor, lists: Sequence[Tensor] = (), numbers: Sequence[int] = ()
    ) -> Sequence[Tensor]:
        first = 6 + has_dlse
        tensors = *tensors[:first], *(tensors[first + place] for place, _ in self._read)
        key = "torch backward", id(self), has_dlse, torch_gpu.layout_key(*tensors)
        names = *backward_names(has_dlse, (name for _, name in self._read)), *self._lists
        bound: BoundPlan | None = CALLS.get(key)
        if bound is None:
            bound = self._bound_backward(dict(zip(names, map(Layout.of, tensors))))
            CALLS.put(key, bound, self)
        return bound.run(dict(zip(names, (*tensors, *lists))), numbers=numbers)

    def _bound_backward(self, layouts: dict[str, Layout]) -> BoundPlan:
        plan = self._ready._plan
        with torch_gpu.stream():
            self._ready._require_ready(torch_gpu.MACHINE)
            in_memory = {f"d{name}": torch_gpu.axes_in_memory(layouts[name]) for name in ("q", "k", "v")}
            wanted, results = plan.results("backward"), plan.kernel_results("backward")
            axes = {name: each for name, each in in_memory.items() if each and wanted[name] == results[name]}
            return self._ready._bind(
                "backward", layouts | self._lists, pins=True, axes=axes, machine=torch_gpu.MACHINE
            )


class _WithContents(NamedTuple):
    """A GPU call with the other inputs of both passes: the lists of its mask, and dropout's seed and offset."""

    call: _OnGpu
    lists: tuple[Tensor, ...]
    numbers: tuple[int, ...]

    def forward(self, outs: _Outs, *tensors: Tensor) -> Sequence[Tensor]:
        return self.call.forward(outs, *tensors, lists=self.lists, numbers=self.numbers)

    def backward(self, has_dlse: bool, *tensors: Tensor) -> Sequence[Tensor]:
        return self.call.backward(has_dlse, *tensors, lists=self.lists, numbers=self.numbers)


_Call = _OnGpu | _ByArrays | _WithContents


def _mask_layout(array: Any) -> Hashable:
    """Return the key of the layout of a mask's array, a tensor on a GPU or a CuPy array; None otherwise."""
    if type(array) in _PLAIN:
        return torch_gpu.layout_key(array) if array.is_cuda else None
    return layout_key(array)


def _over(arrays: Mapping[str, Any], options: Options) -> Options:
    """Return the options of a call with other arrays instead of its tensors, by name."""
    score, bias = options.score, options.bias
    if isinstance(score, Score) and score.arrays.keys() <= arrays.keys():
        score = score._with_arrays(arrays)
    if bias is not None and is_tensor(bias):  # still separate only if the score or the bias is invalid
        bias = ShapeDtype(tuple(bias.shape), dtype_of(bias))
    return options._replace(score=score, bias=bias, sink=arrays.get("sink"))


def _key(arrays: dict[str, Any], outs: _Outs, looked_up: Lookup, wants_lse: bool) -> Hashable:
    """Return the key of a call on a GPU, which contains everything except its data; None for other calls."""
    o, lse = outs
    tensors: tuple[Any, ...] = tuple(arrays.values())
    if o is not None or lse is not None:
        tensors += tuple(each for each in outs if each is not None)
    if not _PLAIN.issuperset(map(type, tensors)) or not tensors[0].is_cuda or checks.is_on():
        return None
    if has_dual_level() or any(map(torch.Tensor.is_neg, tensors)):  # the memory does not define such tensors
        return None
    layout = torch_gpu.layout_key(*tensors), o is None, lse is None, wants_lse
    return looked_up.key("torch", layout, *arrays)


def _first(
    looked_up: Lookup,
    key: Hashable,
    tensors: dict[str, Any],
    outs: _Outs,
    options: Options,
    lists_at_call: bool,
    wants_lse: bool,
) -> _OnGpu | _ByArrays:
    """Check the arguments of a call with a new layout or new options, and return the function that runs it."""
    refuse(_tensor_reasons(tensors, outs) or _executor_reasons(tensors["q"].device, options.executor))
    snapshot = looked_up.snapshot()
    is_on_gpu = tensors["q"].is_cuda
    if not is_on_gpu or checks.is_on():
        return _ByArrays(tensors, options, is_on_gpu)
    with torch_gpu.stream():
        layouts: dict[str, Any] = {name: Layout.of(tensor) for name, tensor in tensors.items()}
        ready = _planned(layouts, options, lists_at_call)
        written = {name: Layout.of(each) for name, each in zip(("o", "lse"), outs) if each is not None}
        ready._require("forward", layouts, written, torch_gpu.MACHINE)
        if not ready._plan.is_kernels_alone:
            return _ByArrays(tensors, options, is_on_gpu)
        work, lists_of = ready._plan.work, None
        if isinstance(work, WorkAtCall):
            lists_of = gpu.lists_of_calls(ready._plan, work, torch_gpu.MACHINE)
        call = _OnGpu(ready._without_arrays(), layouts, written, lists_of, wants_lse)
    if key is not None and (lists_of is not None or not lists_at_call):
        looked_up.keep(key, call, snapshot)
    return call


def _planned(layouts: dict[str, Any], options: Options, lists_at_call: bool) -> Plan:
    """Return the plan of a call; it builds its mask's lists itself if kernels can and its passes can be bound."""
    shapes = {name: ShapeDtype(layout.shape, layout.dtype) for name, layout in layouts.items()}
    q, k, v, options = layouts["q"], layouts["k"], layouts["v"], _over(shapes, options)
    if lists_at_call:
        ready = planned(q, k, v, options._replace(mask=at_each_call(options.mask)))
        if ready._plan.is_kernels_alone:
            return ready
    return planned(q, k, v, options)


def _executor_reasons(device: Any, executor: Any) -> list[str]:
    """Return why an executor cannot access tensors on a device."""
    wanted = {"cpu": "cpu", "sim": "cpu", "gpu": "cuda"}.get(executor) if isinstance(executor, str) else None
    if wanted in (None, device.type):
        return []
    fix = f"move them with .to({wanted!r})"
    return [f"executor={executor!r} takes tensors on {wanted!r}; got q on {str(device)!r}: {fix}"]


def _tensor_reasons(tensors: dict[str, Any], outs: _Outs) -> list[str]:
    """Return why q, k, v, operands and outputs are not tensors that a kernel can read and write.

    Raises
    ------
    TypeError
        An argument is not a tensor.
    """
    names = ("out" if outs[1] is None else "out[0]", "out[1]")
    written = {name: each for name, each in zip(names, outs) if each is not None}
    tensors, captured = tensors | written, [name for name in tensors if name not in ("q", "k", "v", "sink", "bias")]
    reasons = []
    for name, tensor in tensors.items():
        if not is_tensor(tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {describe(tensor)}: convert it with torch.as_tensor")
        reasons += tensor_reasons(name, tensor) or _kind_reasons(name, tensor, name in captured)
    if not reasons and len({tensor.device for tensor in tensors.values()}) > 1:
        places = ", ".join(f"{name} on {str(tensor.device)!r}" for name, tensor in tensors.items())
        reasons.append(f"all tensors must be on one device; got {places}: move them with .to(q.device)")
    device = tensors["q"].device
    if not reasons and device.type == "cuda" and device.index != torch.cuda.current_device():
        reasons.append(
            f"tensors must be on the current device, 'cuda:{torch.cuda.current_device()}'; got {str(device)!r}: call "
            f"within torch.cuda.device({device.index})"
        )
    return reasons


def _kind_reasons(name: str, tensor: Tensor, is_captured: bool) -> list[str]:
    if type(tensor) not in _PLAIN:
        kind = type(tensor).__name__
        return [f"{name} must be a plain torch.Tensor; got a {kind}: convert it with .as_subclass(torch.Tensor)"]
    if tensor.device.type not in ("cpu", "cuda"):
        return [f"{name} must be on 'cpu' or 'cuda'; got {str(tensor.device)!r}: move it with .to('cpu')"]
    if tensor.dtype not in NUMPY_DTYPES and not is_captured:  # Score checks captured tensors
        return [f"{name} must be float16, bfloat16, float32 or float64; got {tensor.dtype}: convert it with .float()"]
    if name.startswith("out") and not is_captured and tensor.requires_grad:
        return [f"{name} must not require gradients; got a tensor that does: pass its .detach()"]
    return []


def _returned(outs: _Outs, new_tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return o and lse: the passed outputs, which PyTorch is informed were written to, or new tensors."""
    increment_version([each for each in outs if each is not None])
    others = iter(new_tensors)
    return tuple(next(others, None) if each is None else each for each in outs)


def _as_tensor(array: Array) -> Tensor:
    """Return a tensor that shares an array's memory."""
    if array.dtype.kind == "V":  # a dtype of ml_dtypes, which DLPack lacks
        return torch.from_dlpack(array.view(f"i{array.dtype.itemsize}")).view(TORCH_DTYPES[array.dtype])
    return torch.from_dlpack(array)
