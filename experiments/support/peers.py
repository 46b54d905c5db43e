"""Attention of other libraries: PyTorch's three fused kernels, FlexAttention, and FlashAttention's packages.

Each peer is a function of a mask that returns `attend(q, k, v) -> o`. Arrays have shape [batch, heads, seqlen,
head_dim], and each peer's preferred memory layout: heads first, or tokens first (`TOKENS_FIRST`; the conversions are
views). The backward pass is `torch.autograd.grad` on a retained graph: it runs the same kernels as a direct call, and
autograd's overhead is host time, which is not measured. PyTorch is imported on demand, since that takes seconds.
"""

import importlib.metadata
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from harness import Record

Attend = Callable[[Any, Any, Any], Any]
FLEX_BLOCK = 128  # FlexAttention's default block size, a multiple of its tiles


class Unavailable(Exception):
    """The error of a peer that does not support a case, with the reason as its text."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """The call that a peer should make: the kind of its mask, and the random blocks, if any.

    Attributes
    ----------
    is_causal : bool
    blocks : bool array [heads, grid, grid], optional
    block : int
        Tokens per block; 0 without blocks.
    """

    is_causal: bool
    blocks: np.ndarray | None = None
    block: int = 0


def sdpa_flash(wanted: Wanted) -> Attend:
    """Return FlashAttention-2 as built into PyTorch."""
    return _sdpa(wanted, "FLASH_ATTENTION")


def sdpa_efficient(wanted: Wanted) -> Attend:
    """Return xFormers' memory-efficient kernels as built into PyTorch, its only fused kernels for float32."""
    return _sdpa(wanted, "EFFICIENT_ATTENTION")


def sdpa_cudnn(wanted: Wanted) -> Attend:
    """Return cuDNN's fused attention."""
    return _sdpa(wanted, "CUDNN_ATTENTION")


def _sdpa(wanted: Wanted, backend: str) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if wanted.blocks is not None:
        raise Unavailable("takes no list of blocks, only a matrix of all scores")

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=wanted.is_causal)

    return attend


def flex(wanted: Wanted) -> Attend:
    """Return FlexAttention, compiled for the shape, with the mask as a BlockMask of its default block size, 128.

    Blocks of 128 are listed as full, so no rule is evaluated. Smaller blocks give partial blocks, for whose elements
    the compiled kernel reads the block table.
    """
    import torch
    from torch.nn.attention import flex_attention as flexible

    torch._dynamo.reset()  # otherwise the eighth shape of a process would exceed the recompilation limit
    compiled = torch.compile(flexible.flex_attention, dynamic=False, fullgraph=True)
    block_masks: dict[int, Any] = {}

    def attend(q: Any, k: Any, v: Any) -> Any:
        if not block_masks:
            block_masks[0] = _flex_mask(flexible, wanted, q.shape[-2], q.device)
        return compiled(q, k, v, block_mask=block_masks[0])

    return attend


def _flex_mask(flexible: ModuleType, wanted: Wanted, seqlen: int, device: Any) -> Any:
    import torch

    if wanted.is_causal:
        return flexible.create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device=device)
    if wanted.blocks is None:
        return None
    if seqlen % FLEX_BLOCK or FLEX_BLOCK % wanted.block:
        raise Unavailable(f"lists blocks of {FLEX_BLOCK}, which must divide the length and be divided by the mask's")
    blocks, block = torch.from_numpy(wanted.blocks).to(device), wanted.block
    lists = [_lists(torch.from_numpy(x).to(device)) for x in partial_and_full(wanted.blocks, FLEX_BLOCK // block)]
    return flexible.BlockMask.from_kv_blocks(
        *(x for pair in lists for x in pair), BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, i, j: blocks[h, i // block, j // block],
    )  # fmt: skip


def partial_and_full(blocks: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, at `factor` times the size, the blocks with some and with only kept parts: bool [heads, grid, grid]."""
    heads, grid, _ = blocks.shape
    coarse = grid // factor
    parts = blocks.reshape(heads, coarse, factor, coarse, factor)
    full = parts.all((2, 4))
    return parts.any((2, 4)) & ~full, full


def _lists(blocks: Any) -> tuple[Any, Any]:
    """Return int32 counts [1, heads, grid], and column numbers [1, heads, grid, grid] with the kept ones first."""
    order = (~blocks).int().argsort(dim=-1, stable=True)
    return blocks.sum(-1).int()[None].contiguous(), order.int()[None].contiguous()


def flash_attn_2(wanted: Wanted) -> Attend:
    """Return the function of the package flash-attn, FlashAttention-2."""
    from flash_attn import flash_attn_func

    if wanted.blocks is not None:
        raise Unavailable("takes no blocks")
    return _tokens_first(lambda q, k, v: flash_attn_func(q, k, v, causal=wanted.is_causal))


def flash_attn_4(wanted: Wanted) -> Attend:
    """Return the function of the package flash-attn-4, whose kernels for Hopper are FlashAttention-3's."""
    import torch
    from flash_attn.cute import flash_attn_func

    if wanted.blocks is None:
        return _tokens_first(lambda q, k, v: flash_attn_func(q, k, v, causal=wanted.is_causal))
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    if wanted.block != 128:
        raise Unavailable("takes blocks of 128 only")
    blocks = torch.from_numpy(wanted.blocks).cuda()
    rows, columns = (_all_full(BlockSparseTensorsTorch, *_lists(x)) for x in (blocks, blocks.transpose(1, 2)))
    return _tokens_first(
        lambda q, k, v: flash_attn_func(q, k, v, block_sparse_tensors=rows, block_sparse_tensors_bwd=columns)
    )


def _all_full(make: Callable[..., Any], counts: Any, order: Any) -> Any:
    import torch

    return make(torch.zeros_like(counts), torch.zeros_like(order), counts, order, block_size=(128, 128))


def _tokens_first(attend: Attend) -> Attend:
    """Wrap a function of [batch, seqlen, heads, head_dim]; some functions return a tuple that starts with o."""

    def attended(q: Any, k: Any, v: Any) -> Any:
        result = attend(*(x.transpose(1, 2) for x in (q, k, v)))
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return attended


def flash_attn_3(wanted: Wanted) -> Attend:
    """Return FlashAttention-3's own kernels for head_dim 128, from flash-attn3-jax, which takes JAX arrays."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the device's memory
    import flash_attn3_jax

    if wanted.blocks is not None:
        raise Unavailable("takes no blocks")
    return lambda q, k, v: flash_attn3_jax.flash_mha(q, k, v, is_causal=wanted.is_causal)


PEERS: dict[str, Callable[[Wanted], Attend]] = {
    peer.__name__: peer
    for peer in (sdpa_flash, sdpa_efficient, sdpa_cudnn, flex, flash_attn_2, flash_attn_3, flash_attn_4)
}
TOKENS_FIRST = {"sdpa_flash", "sdpa_efficient", "flash_attn_2", "flash_attn_4"}


class Peer:
    """A peer's passes on arrays [batch, heads, seqlen, head_dim], which are copied to the peer's layout."""

    num_calls = 1  # number of calls in one timed call

    def __init__(self, name: str, wanted: Wanted, q: Any, k: Any, v: Any) -> None:
        self._attend, self._is_tokens_first = PEERS[name](wanted), name in TOKENS_FIRST
        self._inputs = [self._laid_out(x) for x in (q, k, v)]

    def _laid_out(self, x: Any) -> Any:
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self._is_tokens_first else x.contiguous()

    def forward(self) -> dict[str, Any]:
        """Return o by name; nothing is stored for a backward pass."""
        import torch

        with torch.no_grad():
            return {"o": self._attend(*self._inputs)}

    def backward(self, do: Any) -> Callable[[], dict[str, Any]]:
        """Return the backward pass after a forward pass on the current stream; its result has dq, dk and dv by name."""
        import torch

        inputs = [x.detach().requires_grad_() for x in self._inputs]  # new leaf tensors, which belong to this stream
        o, do = self._attend(*inputs), self._laid_out(do)

        def backward() -> dict[str, Any]:
            gradients = torch.autograd.grad(o, inputs, do, retain_graph=True)
            return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

        return backward

    def timed(self, way: str, do: Any) -> Callable[[], object]:
        """Return a function that makes `num_calls` calls of a pass."""
        return self.forward if way == "forward" else self.backward(do)

    def replay(self, make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        """Capture a pass as a CUDA graph; `make` prepares it on the captured stream."""
        import torch

        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            call = make()
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()

        def replayed() -> Callable[[], object]:
            graph.replay()
            return call  # keeps the arrays that the graph reads alive

        return replayed


class JaxPeer:
    """The passes of a peer that takes JAX arrays [batch, seqlen, heads, head_dim], called with PyTorch tensors.

    JAX's kernels run on JAX's own stream, which our events do not cover. So a timed call queues `num_calls` calls,
    which together take about `TIMED_S` seconds, and waits for the last one: the host time of the first call, and of
    waiting, is then negligible.
    """

    TIMED_S = 0.05

    def __init__(self, name: str, wanted: Wanted, q: Any, k: Any, v: Any) -> None:
        if q.shape[-1] != 128:
            raise Unavailable("was built for 128 dims alone")
        attend = PEERS[name](wanted)
        import jax

        self.num_calls = 1
        self._attend = jax.jit(attend)
        self._vjp = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1])
        self._pull = jax.jit(lambda pull, do: pull(do))
        self._inputs = [self._of_jax(x) for x in (q, k, v)]

    @staticmethod
    def _of_jax(x: Any) -> Any:
        import jax
        import torch

        contiguous = x.transpose(1, 2).contiguous()
        torch.cuda.synchronize()
        return jax.block_until_ready(jax.dlpack.from_dlpack(contiguous).copy())

    @staticmethod
    def _of_torch(x: Any) -> Any:
        import jax
        import torch

        return torch.from_dlpack(jax.block_until_ready(x)).transpose(1, 2)

    def forward(self) -> dict[str, Any]:
        """Return o by name."""
        return {"o": self._of_torch(self._attend(*self._inputs))}

    def backward(self, do: Any) -> Callable[[], dict[str, Any]]:
        """Return the backward pass alone, after a forward pass: a function that returns dq, dk and dv by name."""
        call = self._backward(do)
        return lambda: dict(zip(("dq", "dk", "dv"), map(self._of_torch, call()), strict=True))

    def timed(self, way: str, do: Any) -> Callable[[], object]:
        """Set `num_calls`, and return a function that makes this number of calls of a pass."""
        import jax
        import torch

        call = self._backward(do) if way == "backward" else lambda: self._attend(*self._inputs)
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        self.num_calls = max(4, math.ceil(self.TIMED_S / (time.perf_counter() - start)))

        def calls() -> object:
            torch.cuda.synchronize()  # finishes the work on PyTorch's stream first
            return jax.block_until_ready([call() for _ in range(self.num_calls)][-1])

        return calls

    def _backward(self, do: Any) -> Callable[[], Any]:
        pull, cotangent = self._vjp(*self._inputs), self._of_jax(do)
        return lambda: self._pull(pull, cotangent)


def peer_of(name: str, wanted: Wanted, q: Any, k: Any, v: Any) -> Peer | JaxPeer:
    """Return the passes of a peer on PyTorch tensors [batch, heads, seqlen, head_dim]."""
    return (JaxPeer if name == "flash_attn_3" else Peer)(name, wanted, q, k, v)


def versions() -> Record:
    """Return the versions of PyTorch, its libraries and other packages; empty for those that are missing."""
    import torch

    result = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for package in ("triton", "flash-attn", "flash-attn-4", "flash-attn3-jax"):
        try:
            result[package.replace("-", "_")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            result[package.replace("-", "_")] = ""
    return result
