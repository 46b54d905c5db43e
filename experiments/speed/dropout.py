"""What does dropout cost? Times attention with dropout and plain attention, forward and backward.

    python -m experiments dropout                                          # 8192 tokens, 16 heads of 64 and of 128
    python -m experiments dropout --head-dims 128 --seqlens 1024,8192

Needs an NVIDIA GPU and CuPy. Before a case is timed, the weights that the kernels keep are compared bitwise with those
of `Dropout.keep`: with q = 0 and an identity matrix as v, o shows them. Times are device times of `attention` and of a
`vjp` on CuPy arrays, alternating with plain attention, with the level-2 cache flushed before each call. TFLOP/s count
the products of plain attention; `of_plain` is the time of plain attention divided by that with dropout. If another
family serves the backward pass with dropout, `plain` is still the time of plain attention with its default family, and
plain_same_ms is the time of plain attention with the family that serves dropout.

Found:  on an H100, a forward pass of 8192 tokens takes 1.6 to 2.0 times as long as plain attention, and a backward pass
1.2 to 1.5 times, since kernels draw random bits for each weight; docs/dropout.md has the table.

Cost: Two minutes of a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import cuflash
import ml_dtypes
import numpy as np
from harness import Record, cases_on_gpu, check_names, gpu_versions, main, time_on_device
from rich.table import Table
from workloads import flops


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; the defaults are those of the published run."""

    p: float = 0.1
    head_dims: tuple[int, ...] = (64, 128)
    masks: tuple[str, ...] = ("full", "causal")
    seqlens: tuple[int, ...] = (8192,)
    num_heads: int = 16
    repeats: int = 20

    def __post_init__(self) -> None:
        check_names(self, {"masks": ("full", "causal")})
        if min(self.num_heads, self.repeats, *self.head_dims, *self.seqlens) < 1:
            raise ValueError("lengths, dims and repeats must be positive")


def check(dropout: cuflash.Dropout, head_dim: int) -> None:
    """Compare the weights that kernels keep with the host's.

    Raises
    ------
    RuntimeError
        A weight differs.
    """
    import cupy

    heads, queries = 3, 400
    zeros = cupy.zeros((heads, queries, head_dim), ml_dtypes.bfloat16)
    identity = cupy.asarray(np.broadcast_to(np.eye(head_dim), zeros[:, :head_dim].shape).astype(ml_dtypes.bfloat16))
    o = cuflash.attention(zeros, zeros[:, :head_dim], identity, dropout=dropout)
    if not np.array_equal(cupy.asnumpy(o) != 0, dropout.keep((heads, queries, head_dim))):
        raise RuntimeError(f"kernels keep other weights than the host, with {head_dim} columns")


def measured(config: Config, head_dim: int, mask: str, seqlen: int) -> Iterator[Record]:
    """Yield the rows of one case: forward and backward."""
    import cupy

    dropout, causal = cuflash.Dropout(config.p, seed=1), mask == "causal"
    check(dropout, head_dim)
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((4, config.num_heads, seqlen, head_dim), np.float32)
    *operands, do = map(cupy.asarray, drawn.astype(ml_dtypes.bfloat16))
    plan = cuflash.plan(*operands, causal=causal, dropout=dropout)
    _, vjp = cuflash.attention_vjp(*operands, causal=causal, dropout=dropout)
    _, plain_vjp = cuflash.attention_vjp(*operands, causal=causal)
    family = {way: getattr(plan._plan.kernels, way).specs[way].family for way in ("forward", "backward")}
    _, same_vjp = cuflash.attention_vjp(*operands, causal=causal, kernel=family["backward"])
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {
            "plain": lambda: cuflash.attention(*operands, causal=causal),
            "same": lambda: cuflash.attention(*operands, causal=causal, kernel=family["forward"]),
            "ours": lambda: cuflash.attention(*operands, causal=causal, dropout=dropout),
        },
        "backward": {"plain": lambda: plain_vjp(do), "same": lambda: same_vjp(do), "ours": lambda: vjp(do)},
    }
    for way, timed in calls.items():
        timings = time_on_device(timed, repeats=config.repeats)
        ours, plain = timings["ours"], timings["plain"]
        shape = {"seqlen": seqlen, "num_heads": config.num_heads, "head_dim": head_dim}
        yield {
            "p": dropout.p, "mask": mask, "pass": way, "kernel": family[way], **shape, "ms": ours.median_ms,
            "spread_ms": ours.spread_ms, "tflops": flops(way, mask, batch=1, **shape) / ours.median_ms / 1e9,
            "plain_ms": plain.median_ms, "plain_same_ms": timings["same"].median_ms,
            "of_plain": plain.median_ms / ours.median_ms, **gpu_versions(),
        }  # fmt: skip


def run(config: Config) -> Iterator[Record]:
    """Yield one row for each head_dim, mask, length and pass."""
    for head_dim, mask, seqlen in cases_on_gpu(config.head_dims, config.masks, config.seqlens):
        yield from measured(config, head_dim, mask, seqlen)


def table(records: list[Record]) -> Table:
    shown = Table("columns", "mask", "tokens", "pass", "kernel", "ms", "TFLOP/s", "of plain")
    for record in records:
        shown.add_row(
            str(record["head_dim"]), record["mask"], str(record["seqlen"]), record["pass"], record["kernel"],
            f"{record['ms']:.3f}", f"{record['tflops']:.0f}", f"{record['of_plain']:.2f}",
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main(Config, run, table, replacing=("gpu", "p", "mask", "pass", "seqlen", "num_heads", "head_dim"))
