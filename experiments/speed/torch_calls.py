"""How fast are short calls and block lists through cuflash.torch, compared with PyTorch and FlashAttention-4?

    python -m experiments torch_calls                              # all rows
    python -m experiments torch_calls --tokens 1024 --densities 0.5

It needs an NVIDIA GPU with CuPy and PyTorch; FlashAttention-4's rows are left out, with a message, if the package is
missing. All libraries are called as users call them, one call after another: a time is measured for a batch of calls,
from the first call until the device has finished the last one, divided by the number of calls, so that host time counts
if it exceeds device time. The backward pass is `torch.autograd.grad` on a retained graph, and `both` is a forward pass
followed by it. Rows of `host_tokens` are calls so short that their times are the host's. `of_best` is the best time of
the other libraries divided by ours.

Found:  on an H200, PyTorch's SDPA takes 1.05 to 1.31 times as long at 1024 tokens, and 0.65 to 0.76 times as long at
256 tokens, where times are the host's; results/torch_calls.csv has all times.

Cost: Minutes of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import peers
from harness import Record, check_names, gpu_versions, main, time_alternately, track, why_no_gpu
from rich.table import Table
from workloads import random_blocks

PASSES = ("forward", "backward", "both")
OTHERS = ("sdpa", "flash_attn_4")
ROW = ("library", "pass", "mask", "tokens", "head_dim")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The cases to time; the defaults are the published run."""

    tokens: int = 1024
    all_tokens: int = 16384  # total number of tokens in a batch of all_tokens / tokens sequences
    width: int = 2048  # num_heads * head_dim
    host_tokens: int = 256  # of one sequence
    host_heads: int = 8
    head_dims: tuple[int, ...] = (64, 128)
    list_tokens: int = 16384
    densities: tuple[float, ...] = (0.5, 0.125, 0.031)
    passes: tuple[str, ...] = PASSES
    others: tuple[str, ...] = OTHERS
    calls: int = 20
    repeats: int = 15

    def __post_init__(self) -> None:
        check_names(self, {"passes": PASSES, "others": OTHERS})


@dataclass(frozen=True, eq=False)
class Case:
    """A mask, and tensors [batch, heads, tokens, head_dim]."""

    wanted: peers.Wanted
    mask: str
    q: Any
    k: Any
    v: Any
    do: Any


def ours(case: Case) -> peers.Attend:
    """Return `cuflash.torch.attention` with the mask of a case, created once."""
    import cuflash
    import cuflash.torch

    blocks = case.wanted.blocks
    mask = None
    if blocks is not None:
        mask = cuflash.BlockIndex.from_blocks(blocks, case.q.shape[-2], case.k.shape[-2], case.wanted.block)
    return lambda q, k, v: cuflash.torch.attention(q, k, v, mask=mask, causal=case.wanted.is_causal)


def sdpa(case: Case) -> peers.Attend:
    """Return PyTorch's attention with its own choice of kernels."""
    from torch.nn.functional import scaled_dot_product_attention

    if case.wanted.blocks is not None:
        raise peers.Unavailable("takes no list of blocks")
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=case.wanted.is_causal)


def flash_attn_4(case: Case) -> peers.Attend:
    return peers.flash_attn_4(case.wanted)


LIBRARIES: dict[str, Callable[[Case], peers.Attend]] = {"cuflash": ours, "sdpa": sdpa, "flash_attn_4": flash_attn_4}


def drawn(batch: int, heads: int, tokens: int, head_dim: int) -> list[Any]:
    import torch

    return [torch.randn(batch, heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def cases(config: Config) -> Iterator[Case]:
    for is_causal in (False, True):
        arrays = drawn(1, config.host_heads, config.host_tokens, 64)
        yield Case(peers.Wanted(is_causal), "causal" if is_causal else "full", *arrays)
    for head_dim in config.head_dims:
        shape = config.all_tokens // config.tokens, config.width // head_dim, config.tokens, head_dim
        arrays = drawn(*shape)
        for is_causal in (False, True):
            yield Case(peers.Wanted(is_causal), "causal" if is_causal else "full", *arrays)
    heads = config.width // 128
    for density in config.densities:
        blocks = random_blocks(heads, config.list_tokens, 128, density)
        wanted = peers.Wanted(False, blocks, 128)
        yield Case(wanted, f"128-blocks at {density:g}", *drawn(1, heads, config.list_tokens, 128))


def calls_of(library: str, case: Case, name: str) -> Callable[[], object]:
    """Return a function that calls one pass."""
    import torch

    attend = LIBRARIES[library](case)
    q, k, v = case.q, case.k, case.v
    if name == "forward":

        def forward() -> object:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if name == "both":
        return lambda: torch.autograd.grad(attend(*leaves), leaves, case.do)
    o = attend(*leaves)
    return lambda: torch.autograd.grad(o, leaves, case.do, retain_graph=True)


def batch_of(call: Callable[[], object], count: int) -> Callable[[], None]:
    """Return a function that makes many calls, then synchronizes the device."""
    import torch

    def calls() -> None:
        for _ in range(count):
            call()
        torch.cuda.synchronize()

    return calls


def run(config: Config) -> Iterator[Record]:
    missing = why_no_gpu()
    if missing:
        raise SystemExit(f"torch_calls needs an NVIDIA GPU: {missing}")
    import torch

    versions = gpu_versions() | {"torch": torch.__version__}
    torch.manual_seed(0)
    for case in track(list(cases(config)), "cases"):
        for name in config.passes:
            calls = {}
            for library in ("cuflash", *config.others):
                try:
                    calls[library] = calls_of(library, case, name)
                    calls[library]()
                except (peers.Unavailable, ImportError) as error:
                    print(f"no rows of {library}, {name}, {case.mask}: {error}")
                    calls.pop(library, None)
            batches = {library: batch_of(call, config.calls) for library, call in calls.items()}
            timings = time_alternately(batches, repeats=config.repeats)
            us = {library: timing.median_ms * 1e3 / config.calls for library, timing in timings.items()}
            best = min((value for library, value in us.items() if library != "cuflash"), default=None)
            for library, value in us.items():
                yield {
                    "library": library, "pass": name, "mask": case.mask, "tokens": case.q.shape[-2],
                    "head_dim": case.q.shape[-1], "batch": case.q.shape[0], "heads": case.q.shape[1], "us": value,
                    "spread_us": timings[library].spread_ms * 1e3 / config.calls,
                    "of_best": best / value if library == "cuflash" and best is not None else None,
                    "calls": config.calls, **versions,
                }  # fmt: skip


def table(records: list[Record]) -> Table:
    result = Table(title="us of a call")
    for column in (*ROW, "us", "of_best"):
        result.add_column(column)
    for row in records:
        ratio = "" if row["of_best"] is None else f"{row['of_best']:.2f}"
        result.add_row(*(str(row[column]) for column in ROW), f"{row['us']:.1f}", ratio)
    return result


if __name__ == "__main__":
    main(Config, run, table, replacing=ROW)
