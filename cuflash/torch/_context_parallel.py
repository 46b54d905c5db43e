"""Context parallelism of PyTorch's processes: `cuflash.torch.ContextParallel`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Unpack

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from ..arrays import Array
from ..distributed import ContextParallel as OfArrays
from ..distributed import Group, group_of
from ..errors import refuse
from ..executors import torch_gpu
from ..keywords import explains_keywords
from ..layouts import is_tensor, taken, tensor_reasons
from ..planning.options import CallOptions
from ._tensors import Results, Tensor, as_tensor


@explains_keywords
class ContextParallel(OfArrays):
    """One call of attention on tensors whose rows are on the processes of a process group.

    Every process creates this object with equal arguments, and calls the same methods in the same order. All other
    methods are those of `cuflash.distributed.ContextParallel`; `attention_vjp` takes arrays only, since PyTorch
    differentiates `attention`.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup or cuflash.distributed.Group, optional
        Default: all processes. Its backend moves the rows: gloo those on the CPU, NCCL those on GPUs.
    seqlen, num_heads, num_kv_heads, seqlen_kv, batch, layout, method, block : optional
        As in `cuflash.distributed.ContextParallel`.
    **options : optional
        Options of `cuflash.torch.attention`. Arrays among them must be whole on every process; they have no gradients.

    Raises
    ------
    UnsupportedProblem
        An argument breaks its rule, or processes pass different arguments; every process raises it.
    PeerLost
        Another process raised an error, ended, or did not answer within the timeout of the group.

    Examples
    --------
    >>> import torch, cuflash.torch                                                              # doctest: +SKIP
    >>> torch.distributed.init_process_group("gloo")                                             # doctest: +SKIP
    >>> cp = cuflash.torch.ContextParallel(seqlen=4096, num_heads=8, causal=True)                # doctest: +SKIP
    >>> q, k, v = (cp.shard(x).requires_grad_() for x in torch.randn(3, 8, 4096, 64))            # doctest: +SKIP
    >>> cp.attention(q, k, v).square().mean().backward()                                         # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: Group | torch.distributed.ProcessGroup | None = None,
        *,
        seqlen: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        seqlen_kv: int | None = None,
        batch: tuple[int, ...] = (),
        layout: str | Array = "auto",
        method: str = "auto",
        block: int = 128,
        **options: Unpack[CallOptions],
    ) -> None:
        group = process_group if isinstance(process_group, Group) else group_of(process_group)
        refuse([
            f"{name} must not require gradients, which ContextParallel does not compute: pass {name}.detach()"
            for name, each in options.items() if is_tensor(each) and getattr(each, "requires_grad")
        ])  # fmt: skip
        arrays = {name: _as_array(group, name, each) for name, each in options.items()}
        super().__init__(
            group, seqlen=seqlen, num_heads=num_heads, num_kv_heads=num_kv_heads, seqlen_kv=seqlen_kv, batch=batch,
            layout=layout, method=method, block=block, **arrays,
        )  # fmt: skip

    def shard(self, x: Tensor) -> Tensor:
        """Return this process's rows of a tensor of the whole sequence; PyTorch can differentiate it.

        Parameters
        ----------
        x : torch.Tensor [..., seqlen, dim]
            Its rows are queries if axis -2 has `seqlen` elements, and keys otherwise.

        Returns
        -------
        torch.Tensor [..., local rows, dim]
            A copy.

        Raises
        ------
        UnsupportedProblem
            The tensor has a different number of rows.

        Examples
        --------
        >>> cp.shard(torch.zeros(8, 4096, 64)).shape                                             # doctest: +SKIP
        torch.Size([8, 2048, 64])
        """
        rows = torch.from_numpy(self._rows_of(x)).to(x.device)
        return x.index_select(-2, rows)

    def unshard(self, x: Tensor) -> Tensor:
        """Collect the rows of queries of all processes in order, without gradients.

        Parameters
        ----------
        x : torch.Tensor [..., local rows, dim]
            Such as o, or a gradient of q.

        Returns
        -------
        torch.Tensor [..., seqlen, dim]
            A new tensor.

        Raises
        ------
        UnsupportedProblem
            A tensor does not have the rows of its process.
        PeerLost
            Another process is lost.

        Examples
        --------
        >>> cp.unshard(cp.attention(q, k, v)).shape                                              # doctest: +SKIP
        torch.Size([8, 4096, 64])
        """
        with _stream_of(x):
            return as_tensor(super().unshard(_as_array(self._group, "x", x)))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention of this process's queries to the keys of all processes; PyTorch can differentiate it once.

        Parameters
        ----------
        q : torch.Tensor [*batch, num_heads, local rows, head_dim]
            This process's queries, as `shard` returns them.
        k, v : torch.Tensor [*batch, num_kv_heads, local rows, head_dim or value_dim]
            This process's keys and values.
        return_lse : bool
            If True, also return lse.

        Returns
        -------
        o : torch.Tensor [*batch, num_heads, local rows, value_dim]
            This process's rows of the result of `cuflash.torch.attention` for the whole sequence.
        lse : torch.Tensor [*batch, num_heads, local rows]
            Only with `return_lse`.

        Raises
        ------
        UnsupportedProblem
            Tensors do not fit the layout or the tensors of other processes; every process raises it.
        PeerLost
            Another process is lost.

        Notes
        -----
        The backward pass is a call of all processes, too: either all of them differentiate o or lse, or none does.

        Examples
        --------
        >>> o, lse = cp.attention(q, k, v, return_lse=True)                                      # doctest: +SKIP
        """
        o, lse = _Attention.apply(self, q, k, v)
        return (o, lse) if return_lse else o

    def _array_reasons(self, name: str, array: Array | Tensor) -> list[str]:
        if not is_tensor(array):
            return super()._array_reasons(name, array)
        wanted = "cpu" if self._group._is_on_host else "cuda"
        reason = f"{name} must be on {wanted!r}, where the group moves arrays; got a tensor on {str(array.device)!r}"
        if array.device.type == wanted:  # `attention` has converted such tensors
            reason = f"{name} must be an array; got a tensor: call attention, which PyTorch differentiates"
        return tensor_reasons(name, array) or [reason]


class _Attention(Function):
    """A call on all processes, and its gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, cp: ContextParallel, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        with _stream_of(tensors[0]):
            arrays = (_as_array(cp._group, name, each) for name, each in zip("qkv", tensors))
            (o, lse), ctx.vjp = OfArrays.attention_vjp(cp, *arrays, return_lse=True)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*tensors)
            return as_tensor(o), as_tensor(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, do: Tensor | None, dlse: Tensor | None) -> Results:
        q, _, _ = ctx.saved_tensors  # raises if a tensor was changed in place
        group = ctx.vjp._prepared.group
        with _stream_of(q):
            cotangents = [_as_array(group, name, each) for name, each in (("do", do), ("dlse", dlse))]
            if do is None:
                cotangents[0] = group._lanes.namespace.zeros_like(ctx.vjp._o)
            return None, *map(as_tensor, ctx.vjp(*cotangents))


def _as_array(group: Group, name: str, value: Array | Tensor) -> Array:
    """Return a tensor as an array at the same address if the group can move it; other values unchanged."""
    if not is_tensor(value) or value.is_cuda == group._is_on_host or tensor_reasons(name, value):
        return value
    return taken(name, value.detach(), group._lanes.namespace)


def _stream_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which CuPy's current stream is PyTorch's, if a tensor is on a GPU."""
    return torch_gpu.stream() if is_tensor(tensor) and tensor.is_cuda else nullcontext()
