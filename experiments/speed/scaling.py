"""How much faster is one call on several GPUs than on one, and what does the cost model expect?

    python -m experiments scaling                     # the model alone, without a GPU
    python -m experiments scaling --gpu               # also measures; ranks share a GPU where the machine has too few
    python -m experiments scaling --gpu --gpu-masks causal --gpu-seqlens 65536

Layouts, steps and bytes are those that calls use; the model adds the rates of a `distributed.Machine`: products and
copies overlap where steps allow it. `linear` is the share of linear speed, 1 / (ranks * share of one GPU's time). With
--gpu both passes of one call on one GPU and on all ranks are timed in the same process, alternately, each batch from a
common start until the last device has finished. `gpus` says how many GPUs the ranks have: with one, a row measures what
the exchange and the host cost, and its `linear` is at most 1 / ranks.

Expect: the model's 0.95 and more of linear speed at 64k tokens on 2 GPUs, less on 8, least for short windows.
Found:  by the model, 0.99 of linear speed at 64k causal with 32 / 8 heads on 2 GPUs and 0.97 on 8 in either pass. On
two H200, 0.84 forward and 0.88 for both passes at 64k, but 0.29 and 0.27 at 16k, where the host takes longer than the
kernels.

Cost: The model: ten seconds of a core. With --gpu: a minute of the GPUs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

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
    gpu_num_heads: int = 16
    gpu_num_kv_heads: tuple[int, ...] = (16,)
    gpu_ranks: int = 2
    repeats: int = 7

    def __post_init__(self) -> None:
        check_names(self, {"masks": MASKS, "gpu_masks": MASKS})
        numbers = *self.seqlens, *self.ranks, *self.num_kv_heads, *self.gpu_seqlens, *self.gpu_num_kv_heads
        others = self.num_heads, self.head_dim, self.block, self.gpu_num_heads, self.gpu_ranks, self.repeats
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
    cases = [
        (mask, seqlen, kv_heads)
        for mask in config.gpu_masks for seqlen in config.gpu_seqlens for kv_heads in config.gpu_num_kv_heads
    ]  # fmt: skip
    for mask, seqlen, kv_heads in track(cases, "calls"):
        seconds = {name: timed(config, mask, seqlen, kv_heads, each) for name, each in (("one", [0]), ("all", devices))}
        posed = posed_of(config, mask, seqlen, config.gpu_num_heads, kv_heads, config.gpu_ranks)
        traffic = posed.traffic((config.head_dim,) * 2, np.dtype(np.float16))
        loads = posed.costs.loads(posed.queries)
        for number, name in enumerate(("forward", "both")):
            alone, together = seconds["one"][number], seconds["all"][number]
            nbytes = traffic["forward"] + (traffic["backward"] if name == "both" else 0)
            yield {
                "kind": "measured", "mask": mask, "seqlen": seqlen, "num_heads": config.gpu_num_heads,
                "num_kv_heads": kv_heads, "head_dim": config.head_dim, "ranks": config.gpu_ranks,
                "gpus": len({*devices}), "pass": name, "method": posed.method,
                "imbalance": float(loads.max() / loads.mean()), "received_mb": int(nbytes.sum(axis=1).max()) / 1e6,
                "one_ms": 1e3 * alone, "ranks_ms": 1e3 * together, "linear": alone / together / config.gpu_ranks,
                **machine_record(), **gpu_versions(),
            }  # fmt: skip


def timed(config: Config, mask: str, seqlen: int, kv_heads: int, devices: list[int]) -> tuple[float, float]:
    """Return the median seconds of the forward pass and of both passes on ranks; one rank is one plain call."""
    import cupy

    options = options_of(mask, seqlen, config.block)

    def rank(group: Any) -> list[list[tuple[float, float]]]:
        cp = ContextParallel(
            group, seqlen=seqlen, num_heads=config.gpu_num_heads, num_kv_heads=kv_heads, block=config.block, **options
        )
        with cupy.cuda.Stream(non_blocking=True) as stream:
            rng = cupy.random.default_rng(group.rank)
            q, k, v = (
                rng.standard_normal((heads, len(cp.rows), config.head_dim), dtype=np.float32).astype(np.float16)
                for heads in (config.gpu_num_heads, kv_heads, kv_heads)
            )
            call: Callable[..., Any] = cp.attention_vjp
            if group.size == 1:
                call = lambda *arrays: cuflash.attention_vjp(*arrays, **options)  # noqa: E731
            times = [], []  # type: tuple[list[tuple[float, float]], list[tuple[float, float]]]
            for turn in range(config.repeats + 2):
                for number in range(2):
                    stream.synchronize()
                    group.exchange("a start", None)
                    start = time.perf_counter()
                    o, vjp = call(q, k, v)
                    if number:
                        vjp(o)
                    stream.synchronize()
                    if turn > 1:  # the first calls compile and bind
                        times[number].append((start, time.perf_counter()))
        return list(times)

    ranks = run_ranks(rank, devices=devices, timeout=120)
    results = []
    for number in range(2):
        batches = zip(*(each[number] for each in ranks))
        results.append(median(max(end for _, end in batch) - min(start for start, _ in batch) for batch in batches))
    return results[0], results[1]


def run(config: Config) -> Iterator[Record]:
    """Yield the rows of the model, and measured ones with `gpu`."""
    if config.gpu and (reason := why_no_gpu()):
        sys.exit(f"this experiment needs a GPU: {reason}")
    yield from modelled(config)
    if config.gpu:
        yield from measured(config)


def table(records: list[Record]) -> Table:
    """Return a table with a row for each record."""
    columns = ("kind", "mask", "seqlen", "num_heads", "num_kv_heads", "ranks", "gpus", "pass", "method")
    numbers = {"imbalance": ".3f", "received_mb": ".1f", "one_ms": ".2f", "ranks_ms": ".2f", "linear": ".3f"}
    shown = Table(*columns, *numbers)
    for record in records:
        row = [str(record[name]) for name in columns]
        shown.add_row(*row, *(format(record[name], form) for name, form in numbers.items()))
    return shown


if __name__ == "__main__":
    main(Config, run, table, name=lambda config: "scaling_gpu" if config.gpu else "scaling")
