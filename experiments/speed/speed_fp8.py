"""How fast is FP8 attention, compared with cuDNN's and with our own bfloat16 attention?

    python -m experiments speed_fp8                                    # 64 and 128 columns; full, causal and lists
    python -m experiments speed_fp8 --head-dims 128 --masks full --seqlens 16384

Needs an NVIDIA GPU of compute capability 9.0 and CuPy. cuDNN's kernel needs PyTorch and cuDNN's Python front end;
without them it is left out, with the reason. Every case has `tokens` tokens of `hidden` channels, standard normal.
Operands are quantized in blocks of 128 rows, with q and k rotated; those of cuDNN have one scale of 1. Before a case is
timed, the last 128 rows of a head are compared with float64 attention of the dequantized arrays: `error` is the largest
error divided by its bound. The methods alternate, and each call is timed between CUDA events, with the level-2 cache
flushed before it: medians, and the width of the middle half. `of_cudnn` and `of_bfloat16` are the times of cuDNN and of
our bfloat16 kernel divided by ours. `ratio` is the time of `peer` divided by ours: cuDNN in FP8 if it runs, otherwise
our own bfloat16 kernel. `prepare_ms` is the time of `quantize` for q, k and v, which also transposes v, and
`prepare_share` is this time divided by our time. TFLOP/s count two products of the scores that the mask allows.

Found:  on an H200, full and causal FP8 calls take 0.89 to 0.94 times as long as our own bfloat16 calls at head_dim 128,
and 1.09 to 1.15 times at 64; lists of an eighth of the blocks take 0.87 to 0.98 times as long at 128. cuDNN's FP8 takes
0.86 to 0.93 times our time at head_dim 128, and 0.94 to 1.05 times at 64.

Cost: Minutes of a GPU.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from harness import Record, cases_on_gpu, gpu_versions, main, time_on_device
from peers import versions
from rich.table import Table
from workloads import blocks_name, flops, named_blocks, random_blocks


@dataclass(frozen=True, kw_only=True)
class Config:
    """The cases to time; the defaults are the published run."""

    head_dims: tuple[int, ...] = (128, 64)
    masks: tuple[str, ...] = ("full", "causal", blocks_name(128, 0.125))
    seqlens: tuple[int, ...] = (4096, 8192, 16384)
    tokens: int = 16384
    hidden: int = 2048
    repeats: int = 20

    def __post_init__(self) -> None:
        if min(*self.head_dims, *self.seqlens, self.tokens, self.hidden, self.repeats) < 1:
            raise ValueError("lengths, dims and repeats must be positive")
        if any(self.tokens % seqlen for seqlen in self.seqlens) or any(self.hidden % dim for dim in self.head_dims):
            raise ValueError("seqlens must divide tokens, and head_dims hidden")
        for mask in self.masks:
            named_blocks(mask)


def mask_of(name: str, num_heads: int, seqlen: int) -> masks.Mask | None:
    """Return the cuflash mask of this name."""
    blocks = named_blocks(name)
    if blocks is None:
        return masks.Causal() if name == "causal" else None
    return masks.BlockPattern(random_blocks(num_heads, seqlen, *blocks), blocks[0])


def on_host(x8: cuflash.Quantized, rows: int | None = None) -> cuflash.Quantized:
    """Copy the last rows, or all rows, of the last head of the last batch entry to NumPy arrays."""
    data, scale = x8.data[-1, -1].get().view(ml_dtypes.float8_e4m3fn), x8.scale[-1, -1].get()
    if rows is not None:
        data, scale = data[-rows:], scale[-1:]
    return dataclasses.replace(x8, data=data, scale=scale)


def share_of_bound(x8: tuple[cuflash.Quantized, ...], mask: masks.Mask | None, o: Any) -> float:
    """Return the largest ratio of an error to its bound, for the last queries of the last head."""
    q8, k8, v8 = x8
    batch, num_heads, seqlen, _ = q8.shape
    rows = q8.block
    host = on_host(q8, rows), on_host(k8), on_host(v8)
    allowed = None
    if mask is not None:
        frame = masks.MaskShape((batch,), num_heads, seqlen, seqlen)
        places = np.full((2, 1, 1), [[[batch - 1]], [[num_heads - 1]]])
        allowed = mask.resolve(frame)(*places, np.arange(seqlen - rows, seqlen)[:, None], np.arange(seqlen))
        allowed = np.broadcast_to(allowed, (rows, seqlen))
    exact, _ = cuflash.reference.attention(*(x.scaled(np.float64) for x in host), mask=allowed)
    bound = cuflash.error_bound(*host, mask=allowed, product_dtype=ml_dtypes.float8_e4m3fn).o
    return float((np.abs(o[-1, -1, -rows:].get().astype(np.float64) - exact) / bound).max())


def cudnn_fp8(batch: int, num_heads: int, seqlen: int, head_dim: int, is_causal: bool) -> Callable[[], object]:
    """Return a call of cuDNN's FP8 (e4m3) forward pass on PyTorch tensors.

    Raises
    ------
    Exception
        cuDNN does not support the case, or a package is missing.
    """
    import cudnn
    import torch

    def tokens_first() -> Any:
        drawn = torch.randn(batch, seqlen, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        return drawn.to(torch.float8_e4m3fn).transpose(1, 2)

    def one() -> Any:
        return torch.ones(1, 1, 1, 1, device="cuda")

    q, k, v, o = (tokens_first() for _ in range(4))
    kinds = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT
    )

    def operand(x: Any) -> Any:
        return graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kinds.FP8_E4M3)

    def scalar() -> Any:
        return graph.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kinds.FLOAT)

    operands = {operand(x): x for x in (q, k, v)}
    scales = [scalar() for _ in range(6)]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    result, _, *maxima = graph.sdpa_fp8(
        **dict(zip("qkv", operands)), **dict(zip(names, scales)), is_inference=True, attn_scale=head_dim**-0.5,
        use_causal_mask=is_causal,
    )  # fmt: skip
    result.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride()))
    for maximum in maxima:
        maximum.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(kinds.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
    pack = {**operands, **{scale: one() for scale in scales}, result: o, **{each: one() for each in maxima}}
    return lambda: graph.execute(pack, workspace)


def measured(config: Config, head_dim: int, mask: str, seqlen: int) -> Record:
    """Return the row of one case."""
    import cupy

    batch, num_heads = config.tokens // seqlen, config.hidden // head_dim
    shape = {"seqlen": seqlen, "batch": batch, "num_heads": num_heads, "head_dim": head_dim}
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal((batch, num_heads, seqlen, head_dim), np.float32) for _ in range(3))
    x = [cupy.asarray(each.astype(ml_dtypes.bfloat16)) for each in drawn]
    rotation = cuflash.Rotation(head_dim)
    x8, requested_mask = cuflash.quantize(*x, rotate=rotation), mask_of(mask, num_heads, seqlen)
    index: Any = requested_mask  # block lists are built once, as for all layers of a model
    if requested_mask is not None and (blocks := named_blocks(mask)) is not None:
        sizes = {"batch": (batch,), "num_heads": num_heads}
        index = cuflash.BlockIndex.from_mask(requested_mask, seqlen, seqlen, blocks[0], **sizes)
    error = share_of_bound(x8, requested_mask, cuflash.attention(*x8, mask=index))
    if not error < 1:
        raise RuntimeError(f"a result is {error} of its bound away, with {head_dim} columns, {mask}, {seqlen} tokens")
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: cuflash.attention(*x8, mask=index),
        "bfloat16": lambda: cuflash.attention(*x, mask=index),
        "prepare": lambda: cuflash.quantize(*x, rotate=rotation),
    }
    note = ""
    try:
        if named_blocks(mask) is not None:
            raise ValueError("takes no list of blocks")
        calls["cudnn"] = cudnn_fp8(batch, num_heads, seqlen, head_dim, mask == "causal")
    except Exception as missing:  # raised by packages that are missing or do not support the case
        note = f"cudnn: {str(missing).splitlines()[0][:100] if str(missing) else type(missing).__name__}"
    timings = time_on_device(calls, repeats=config.repeats)
    ours, cudnn, half, prepare = (timings.get(name) for name in ("ours", "cudnn", "bfloat16", "prepare"))
    assert ours is not None and half is not None and prepare is not None
    return {
        "mask": mask, **shape, "ms": ours.median_ms, "spread_ms": ours.spread_ms,
        "tflops": flops("forward", mask, **shape) / ours.median_ms / 1e9,
        "cudnn_ms": "" if cudnn is None else cudnn.median_ms, "bfloat16_ms": half.median_ms,
        "of_cudnn": "" if cudnn is None else cudnn.median_ms / ours.median_ms,
        "of_bfloat16": half.median_ms / ours.median_ms, "peer": "bfloat16" if cudnn is None else "cudnn",
        "ratio": (half if cudnn is None else cudnn).median_ms / ours.median_ms, "prepare_ms": prepare.median_ms,
        "prepare_share": prepare.median_ms / ours.median_ms, "error": error, "repeats": ours.repeats, "note": note,
        **gpu_versions(), **versions(),
    }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    """Yield one row for each head_dim, mask and length."""
    for head_dim, mask, seqlen in cases_on_gpu(config.head_dims, config.masks, config.seqlens):
        yield measured(config, head_dim, mask, seqlen)


def table(records: list[Record]) -> Table:
    shown = Table("columns", "mask", "tokens", "ms", "TFLOP/s", "of cuDNN", "of bfloat16", "prepare")
    for record in records:
        ratios = (record[name] for name in ("of_cudnn", "of_bfloat16"))
        shown.add_row(
            str(record["head_dim"]), record["mask"], str(record["seqlen"]), f"{record['ms']:.3f}",
            f"{record['tflops']:.0f}", *("-" if ratio == "" else f"{ratio:.2f}" for ratio in ratios),
            f"{record['prepare_share']:.1%}",
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main(Config, run, table, replacing=("gpu", "mask", "seqlen", "batch", "num_heads", "head_dim"))
