"""How much faster is one call on several GPUs than on one, and what does the cost model expect?

    python -m experiments scaling                     # the model alone, without a GPU
    python -m experiments scaling --gpu               # also measures; ranks share a GPU where the machine has too few
    python -m experiments scaling --gpu --gpu-masks causal --gpu-seqlens 65536

Layouts, steps and bytes are those that calls use; the model adds the rates of a `distributed.Machine`: products and
copies overlap where steps allow it. `linear` is the share of linear speed, 1 / (ranks * share of one GPU's time). With
--gpu both passes of one call on one GPU and on all ranks are timed in the same process, alternately, each batch from a
common start until the last device has finished. `gpus` says how many GPUs the ranks have: with one, a row measures what
the exchange and the host cost, and its `linear` is at most 1 / ranks. Rows of the kind "weak" compare with one GPU on
1 / ranks of the sequence: `linear` is the work of the ranks in the time of one, divided by the ranks. `host_us` is the
time until a call has returned, with its work queued. `one_mb` and `ranks_mb` are the peak of the memory of one GPU and
of a rank, with all arguments and results, and `formula_mb` is `workspace_bytes`. Rows of the kind "torch" are PyTorch's
context_parallel on as many processes over NCCL, without multicast, by the fastest of its backends.

Expect: 0.95 and more of linear speed at 64k tokens on 2 GPUs, less on 8, least for short windows.
Found:  on two H200, causal, 32 / 8 heads: both passes reach 0.92 of linear speed at 16k tokens and 0.97 at 64k, the
forward pass 0.78 and 0.90; at 64k, documents reach 0.94 and lists 1.02, at 16k 0.67 and 0.55. With 16 / 16 heads, both
passes reach 0.67 and 0.93. With 32k tokens on each GPU, they reach 0.95 and 0.91 of one GPU's speed. The host takes 0.7
to 1.8 ms to queue a forward pass of both ranks. By the model, one thread that queues the copies of 8 ranks limits them
to 0.69 forward at 64k. A rank's peak is half of one GPU's and what the formula says. With 16 / 16 heads, PyTorch's
context_parallel takes 6.3 and 61 ms for both passes of 16k and 64k tokens, 0.54 and 0.90 of its linear speed; this
library takes 4.2 and 53.

Cost: The model: ten seconds of a core. With --gpu: a minute of the GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from cuflash import masks
from cuflash.distributed import ContextParallel, Machine
from cuflash.distributed import run as run_ranks
from cuflash.distributed._posed import Posed
from cuflash.planning.options import Options
from harness import Record, check_names, gpu_versions, main, track, why_no_gpu
from harness import machine as machine_record
from rich.table import Table

import cuflash

MASKS = ("full", "causal", "window", "documents", "lists")
PASSES = ("forward", "backward")
KINDS = ("measured", "weak", "torch")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Calls and numbers of ranks; the defaults are the published run."""

    masks: tuple[str, ...] = ("causal", "window", "documents", "lists")
    seqlens: tuple[int, ...] = (16384, 65536)
    ranks: tuple[int, ...] = (2, 4, 8)
    num_heads: int = 32
    num_kv_heads: tuple[int, ...] = (8, 32)
    head_dim: int = 128
    block: int = 128
    gpu: bool = False
    gpu_masks: tuple[str, ...] = ("causal", "documents", "lists")
    gpu_seqlens: tuple[int, ...] = (16384, 65536)
    gpu_heads: tuple[str, ...] = ("32/8", "16/16")
    gpu_ranks: int = 2
    gpu_kinds: tuple[str, ...] = KINDS
    repeats: int = 5

    def __post_init__(self) -> None:
        check_names(self, {"masks": MASKS, "gpu_masks": MASKS, "gpu_kinds": KINDS})
        heads = [int(each) for pair in self.gpu_heads for each in pair.split("/")]
        numbers = *self.seqlens, *self.ranks, *self.num_kv_heads, *self.gpu_seqlens, *heads
        others = self.num_heads, self.head_dim, self.block, self.gpu_ranks, self.repeats
        if min(*numbers, *others) < 1:
            raise ValueError("all numbers must be positive")


def options_of(mask: str, seqlen: int, block: int) -> dict[str, Any]:
    """Return the options of a call; documents and lists have rows of unequal cost."""
    if mask == "documents":
        shares = np.array([32, 12, 8, 6, 3, 2, 1])
        return {"mask": masks.Sequences.of((seqlen * shares // 64).tolist(), allow_gaps=True, causal=True)}
    if mask == "lists":
        blocks = -(-seqlen // block)
        densities = np.linspace(0.02, 0.23, blocks)  # 1/8 on average
        chosen = np.random.default_rng(0).random((blocks, blocks)) < densities[:, None]
        return {"mask": masks.BlockPattern(chosen, block)}
    return {"full": {}, "causal": {"causal": True}, "window": {"window": (4095, 0)}}[mask]


def modelled(config: Config) -> Iterator[Record]:
    """Yield a row for each call, number of ranks and pass."""
    cases = [
        (mask, seqlen, kv_heads, ranks)
        for mask in config.masks for seqlen in config.seqlens for kv_heads in config.num_kv_heads
        for ranks in config.ranks
    ]  # fmt: skip
    half, machine = np.dtype(np.float16), Machine()
    for mask, seqlen, kv_heads, ranks in track(cases, "models"):
        posed = posed_of(config, mask, seqlen, config.num_heads, kv_heads, ranks)
        one = posed_of(config, mask, seqlen, config.num_heads, kv_heads, 1)
        traffic, loads = posed.traffic((config.head_dim,) * 2, half), posed.costs.loads(posed.queries)
        for name in PASSES:
            alone, together = (each.seconds(name, config.head_dim, half, machine) for each in (one, posed))
            yield {
                "kind": "model", "mask": mask, "seqlen": seqlen, "num_heads": config.num_heads,
                "num_kv_heads": kv_heads, "head_dim": config.head_dim, "ranks": ranks, "gpus": ranks, "pass": name,
                "method": posed.method, "imbalance": float(loads.max() / loads.mean()),
                "received_mb": int(traffic[name].sum(axis=1).max()) / 1e6, "one_ms": 1e3 * alone,
                "ranks_ms": 1e3 * together, "linear": alone / together / ranks, **machine_record(),
            }  # fmt: skip


def posed_of(config: Config, mask: str, seqlen: int, heads: int, kv_heads: int, ranks: int) -> Posed:
    """Return a call on several ranks without arrays."""
    arguments = {
        "seqlen": seqlen, "seqlen_kv": None, "num_heads": heads, "num_kv_heads": kv_heads, "batch": (),
        "layout": "auto", "method": "auto", "block": config.block,
    }  # fmt: skip
    return Posed.of(arguments, Options(**options_of(mask, seqlen, config.block)), ranks)


def measured(config: Config) -> Iterator[Record]:
    """Yield rows of calls on one GPU and on ranks."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    devices = [rank % count for rank in range(config.gpu_ranks)]
    masks_of = {"measured": config.gpu_masks, "weak": ("causal",), "torch": ()}
    cases = [
        (kind, mask, seqlen, heads)
        for kind in config.gpu_kinds for seqlen in config.gpu_seqlens for heads in config.gpu_heads
        for mask in masks_of[kind]
    ]  # fmt: skip
    for kind, mask, seqlen, pair in track(cases, "calls"):
        heads, kv_heads = map(int, pair.split("/"))
        alone = timed(config, mask, seqlen // (config.gpu_ranks if kind == "weak" else 1), heads, kv_heads, [0])
        together = timed(config, mask, seqlen, heads, kv_heads, devices)
        posed = posed_of(config, mask, seqlen, heads, kv_heads, config.gpu_ranks)
        share = 1.0
        if kind == "weak":
            part = posed_of(config, mask, seqlen // config.gpu_ranks, heads, kv_heads, 1)
            share = posed.costs.work.sum() / part.costs.work.sum()
        traffic, loads = posed.traffic((config.head_dim,) * 2, np.dtype(np.float16)), posed.costs.loads(posed.queries)
        for name in ("forward", "both"):
            nbytes = traffic["forward"] + (traffic["backward"] if name == "both" else 0)
            one, ranks = alone.seconds[name], together.seconds[name]
            yield {
                "kind": kind, "mask": mask, "seqlen": seqlen, "num_heads": heads, "num_kv_heads": kv_heads,
                "head_dim": config.head_dim, "ranks": config.gpu_ranks, "gpus": len({*devices}), "pass": name,
                "method": posed.method, "groups": " ".join(str(stop - first) for first, stop in posed.groups),
                "imbalance": float(loads.max() / loads.mean()), "received_mb": int(nbytes.sum(axis=1).max()) / 1e6,
                "one_ms": 1e3 * one, "ranks_ms": 1e3 * ranks, "linear": one * share / ranks / config.gpu_ranks,
                "host_us": 1e6 * together.host[name], "one_mb": alone.nbytes / 1e6, "ranks_mb": together.nbytes / 1e6,
                "formula_mb": posed.workspace_bytes(config.head_dim, np.dtype(np.float16)) / 1e6,
                **machine_record(), **gpu_versions(),
            }  # fmt: skip


class Times(NamedTuple):
    """Median seconds of a pass until the last rank's GPU has finished and until a call returns, and peak bytes."""

    seconds: dict[str, float]
    host: dict[str, float]
    nbytes: int


def timed(config: Config, mask: str, seqlen: int, heads: int, kv_heads: int, devices: list[int]) -> Times:
    """Time the forward pass and both passes on ranks; one rank is one plain call."""
    import cupy

    options, names = options_of(mask, seqlen, config.block), ("forward", "both")
    pool = cupy.cuda.MemoryPool()  # one for all ranks, since one thread may allocate what the kernels of another need

    def rank(group: Any) -> tuple[dict[str, list[tuple[float, float, float]]], int]:
        cp = ContextParallel(
            group, seqlen=seqlen, num_heads=heads, num_kv_heads=kv_heads, block=config.block, **options
        )
        call: Callable[..., Any] = cp.attention_vjp
        if group.size == 1:
            own = options | {name: each.to(cupy.asarray) for name, each in options.items() if name == "mask"}
            call = lambda *arrays: cuflash.attention_vjp(*arrays, **own)  # noqa: E731
        times = {name: list[tuple[float, float, float]]() for name in names}
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for turn in range(config.repeats + 2):
                if turn < 2:  # the first call compiles and binds; the pool of the second has the size of its peak
                    with cupy.cuda.using_allocator(pool.malloc) if turn else nullcontext():
                        q, k, v = arrays_of(cupy, group.rank, len(cp.rows), config.head_dim, heads, kv_heads)
                        pool.free_all_blocks()
                        o, vjp = call(q, k, v)
                        vjp(o)
                    continue
                for name in names:
                    stream.synchronize()
                    group.exchange("a start", None)
                    start = time.perf_counter()
                    o, vjp = call(q, k, v)
                    if name == "both":
                        vjp(o)
                    queued = time.perf_counter()
                    stream.synchronize()
                    times[name].append((start, queued, time.perf_counter()))
        return times, pool.total_bytes()

    ranks = run_ranks(rank, devices=devices, timeout=120)
    batches = {name: list(zip(*(times[name] for times, _ in ranks))) for name in names}
    seconds, host = dict[str, float](), dict[str, float]()
    for name, each in batches.items():
        seconds[name] = median(max(end for *_, end in batch) - min(start for start, *_ in batch) for batch in each)
        host[name] = median(queued - start for batch in each for start, queued, _ in batch)
    return Times(seconds, host, max(nbytes for _, nbytes in ranks))


def arrays_of(cupy: Any, seed: int, rows: int, head_dim: int, heads: int, kv_heads: int) -> list[Any]:
    """Return q, k and v of a rank."""
    rng, arrays = cupy.random.default_rng(seed), []
    for count in (heads, kv_heads, kv_heads):
        x = cupy.empty((count, rows, head_dim), np.float16)
        for of_head in x:
            of_head[...] = rng.standard_normal(of_head.shape, dtype=np.float32)
        arrays.append(x)
    return arrays


def peers(config: Config) -> Iterator[Record]:
    """Yield rows of PyTorch's context_parallel, 16 heads, for which processes with a GPU each are started."""
    script = Path(__file__).parents[1] / "support" / "context_parallel_peer.py"
    seqlens = ",".join(map(str, config.gpu_seqlens))
    command = [sys.executable, str(script), str(config.gpu_ranks), seqlens, str(config.head_dim), str(config.repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield {
                "kind": "torch", "mask": "causal", "num_heads": 16, "num_kv_heads": 16, "head_dim": config.head_dim,
                "ranks": config.gpu_ranks, "gpus": config.gpu_ranks, **json.loads(line), **machine_record(),
                **gpu_versions(),
            }  # fmt: skip
    if done.returncode:
        print(f"the peers ended with {done.returncode}", file=sys.stderr)


def run(config: Config) -> Iterator[Record]:
    """Yield the rows of the model, and measured ones with `gpu`."""
    if config.gpu and (reason := why_no_gpu()):
        sys.exit(f"this experiment needs a GPU: {reason}")
    yield from modelled(config)
    if config.gpu:
        yield from measured(config)
        yield from peers(config) if "torch" in config.gpu_kinds else ()


def table(records: list[Record]) -> Table:
    """Return a table with a row for each record."""
    columns = ("kind", "mask", "seqlen", "heads", "ranks", "gpus", "pass", "method")
    numbers = {"imbalance": ".3f", "one_ms": ".2f", "ranks_ms": ".2f", "linear": ".3f", "host_us": ".0f"}
    shown = Table(*columns, *numbers)
    for record in records:
        named = record | {"heads": f"{record['num_heads']}/{record['num_kv_heads']}"}
        row = [str(named[name]) for name in columns]
        shown.add_row(*row, *(format(record[name], form) if name in record else "" for name, form in numbers.items()))
    return shown


if __name__ == "__main__":
    main(
        Config, run, table, name=lambda config: "scaling_gpu" if config.gpu else "scaling",
        replacing=("kind", "mask", "seqlen", "num_heads", "num_kv_heads", "ranks", "gpus", "pass"),
    )  # fmt: skip
