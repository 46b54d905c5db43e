"""Tensors as arguments and results of calls: their checks, and their conversion to and from arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ..arrays import Array, describe, is_array, is_integer_dtype
from ..errors import refuse
from ..executors.torch_gpu import NUMPY_DTYPES, TORCH_DTYPES
from ..layouts import is_batched, is_tensor, tensor_reasons

Tensor: TypeAlias = torch.Tensor
Outs: TypeAlias = tuple[Any, Any]  # o and lse, each None if the call allocates it
NEW: Outs = (None, None)

_CAST = {torch.float16, torch.bfloat16, torch.float32}
PLAIN = {torch.Tensor, torch.nn.Parameter}


def own_integers(name: str, array: Any, q: Tensor) -> Any:
    """Return integers that a Score captured as NumPy or CuPy arrays, as a tensor; other values unchanged."""
    if type(array) in PLAIN or name in ("bias", "sink") or is_tensor(array) or not is_array(array):
        return array
    if not is_integer_dtype(array.dtype):
        return array
    return torch.tensor(array, device=q.device) if type(array) is np.ndarray else torch.from_dlpack(array)


def in_autocast(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Return q, k and v in the dtype of autocast if that is enabled, as for `scaled_dot_product_attention`."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    narrow = torch.get_autocast_dtype(device)
    return [each.to(narrow) if each.dtype in _CAST else each for each in (q, k, v)]


def executor_reasons(device: Any, executor: Any) -> list[str]:
    """Return why an executor cannot access tensors on a device."""
    wanted = {"cpu": "cpu", "sim": "cpu", "gpu": "cuda"}.get(executor) if isinstance(executor, str) else None
    if wanted in (None, device.type):
        return []
    fix = f"move them with .to({wanted!r})"
    return [f"executor={executor!r} takes tensors on {wanted!r}; got q on {str(device)!r}: {fix}"]


def argument_reasons(tensors: dict[str, Tensor], outs: Outs) -> list[str]:
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
    return reasons


def _kind_reasons(name: str, tensor: Tensor, is_captured: bool) -> list[str]:
    if type(tensor) not in PLAIN:
        kind = type(tensor).__name__
        return [f"{name} must be a plain torch.Tensor; got a {kind}: convert it with .as_subclass(torch.Tensor)"]
    if tensor.device.type not in ("cpu", "cuda"):
        return [f"{name} must be on 'cpu' or 'cuda'; got {str(tensor.device)!r}: move it with .to('cpu')"]
    if tensor.dtype not in NUMPY_DTYPES and not is_captured:  # Score checks captured tensors
        is_mask = name == "bias" and tensor.dtype == torch.bool
        fix = "a bool tensor is a mask: write mask=bias" if is_mask else "convert it with .float()"
        return [f"{name} must be float16, bfloat16, float32 or float64; got {tensor.dtype}: {fix}"]
    if name.startswith("out") and not is_captured and tensor.requires_grad:
        return [f"{name} must not require gradients; got a tensor that does: pass its .detach()"]
    return []


def require_cotangents(**cotangents: Tensor | None) -> None:
    """Refuse gradients of o and lse that are batched, or whose own derivatives would be lost."""
    reasons = []
    for name, each in cotangents.items():
        if each is not None and is_batched(each):
            fix = "call torch.autograd.grad for each, without is_grads_batched=True or vectorize=True"
            reasons.append(f"{name} must be one gradient, outside of torch.vmap; got a batch of them: {fix}")
        else:
            reasons += tensor_reasons(name, each)
    refuse(reasons)


def returned(outs: Outs, new_tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return o and lse: new tensors, or the caller's outputs, after PyTorch is informed of the writes to them."""
    increment_version([each for each in outs if each is not None])
    others = iter(new_tensors)
    return tuple(next(others, None) if each is None else each for each in outs)


def as_tensor(array: Array) -> Tensor:
    """Return a tensor that shares an array's memory."""
    if array.dtype.kind == "V":  # a dtype of ml_dtypes, which DLPack lacks
        return torch.from_dlpack(array.view(f"i{array.dtype.itemsize}")).view(TORCH_DTYPES[array.dtype])
    return torch.from_dlpack(array)
