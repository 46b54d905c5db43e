"""Do kernels move the number of bytes of GPU memory that the papers' I/O model predicts?

    python -m experiments memory_traffic           # the model's bytes, from plans: no GPU, a second
    python -m experiments memory_traffic --gpu     # compared with NVIDIA's profiler counters, by ncu

FlashAttention's argument (arXiv 2205.14135, theorem 2) counts the data that moves between a GPU's memory and its chip.
Standard attention moves its matrices of scores, Theta(N d + N^2) elements. FlashAttention-1 keeps M bytes of K and V on
the chip and streams Q and O, Theta(N^2 d^2 / M). FlashAttention-2 and 3 keep Q and O on the chip and stream K and V,
which concurrent thread blocks find in the level-2 cache, so that each array is moved about once.

The model of "fa1" is `traffic` of its family, which `plan.explain()` prints. For other kernels, the model counts each
array that a kernel reads or writes once. The counters are smaller than the model if an array stays in the cache between
two kernels, and larger if an array is read again. At these lengths, the sums of all heads of "fa1" exceed the cache.

The counters are `dram__bytes_read.sum` and `dram__bytes_write.sum` of every kernel of a call, from `ncu --csv` in one
process for all lengths, with caches flushed before each kernel. ncu needs permission to read counters; without it, the
experiment ends with ncu's message.

Found:  on an H100, from 2048 to 16384 tokens, FlashAttention-1's loops move 0.99 to 1.00 of the predicted bytes, and
the passes of sm90 0.95 to 1.13. The former grow with the square of the length, and the latter linearly.

Cost: A second on one core; --gpu half a minute of a GPU under its profiler.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash.executors import gpu
from harness import Record, check_names, gpu_versions, main, track, why_no_gpu
from profiler import Launch, profiled
from rich.table import Table
from traffic_model import WAYS, modelled

KERNELS = ("naive", "fa1", "sm80", "sm90")
MOST_OF_MEMORY = 0.6  # fraction of a GPU's memory for a workspace, because the pool retains that of the forward pass
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every kernel at every length, in float16."""

    gpu: bool = False
    kernels: tuple[str, ...] = KERNELS
    seqlens: tuple[int, ...] = (2048, 4096, 8192, 16384)
    batch: int = 16
    num_heads: int = 8
    head_dim: int = 64
    device: str = "H100"

    def __post_init__(self) -> None:
        check_names(self, {"kernels": KERNELS})
        if min(self.batch, self.num_heads, self.head_dim, *self.seqlens) < 1:
            raise ValueError("seqlens, batch, num_heads and head_dim must be positive")

    def shape(self, seqlen: int) -> tuple[int, int, int, int]:
        return self.batch, self.num_heads, seqlen, self.head_dim


def plan_of(shape: tuple[int, ...], kernel: str, device: cuflash.DeviceSpec) -> Any:
    """Return a GPU plan for these sizes."""
    x = cuflash.ShapeDtype(shape, np.dtype(np.float16))
    return cuflash.plan(x, x, x, kernel=kernel, device=device)


def call(calls: Sequence[tuple[tuple[int, ...], Sequence[str]]]) -> None:
    """Run both passes of each family once at each shape, in the process whose kernels are counted."""
    import cupy

    for shape, kernels in calls:
        q, k, v, do = (cupy.random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(4))
        for kernel in kernels:
            ready = cuflash.plan(q, k, v, executor="gpu", kernel=kernel)
            o, lse = ready.forward(q, k, v)
            ready.backward(do, q, k, v, o, lse)
            del ready, o, lse
    cupy.cuda.Device().synchronize()


def counted(calls: Sequence[tuple[tuple[int, ...], Sequence[str]]]) -> list[dict[str, int]]:
    """Return the bytes that each kernel moves, by name and shape, from the profiler's counters for one call per family.

    Raises
    ------
    RuntimeError
        ncu is missing, may not read counters, or prints an unexpected message.
    """
    launches = profiled("memory_traffic", f"call({calls!r})", METRICS, "^(naive|fa1|sm80|sm90)_")
    return by_shape(totals(launches), len(calls))


def totals(launches: list[Launch]) -> list[tuple[str, int]]:
    """Return each launch's kernel and the bytes that it reads and writes."""
    return [(kernel, round(sum(counters.values()))) for kernel, counters in launches]


def by_shape(launches: list[tuple[str, int]], count: int) -> list[dict[str, int]]:
    """Return the bytes of each kernel by name, for each shape. The first kernel is launched once per shape.

    Raises
    ------
    RuntimeError
        The first kernel was launched another number of times.
    """
    shapes: list[dict[str, int]] = []
    for name, moved in launches:
        if name == launches[0][0]:
            shapes.append({})
        shapes[-1][name] = shapes[-1].get(name, 0) + moved
    if len(shapes) != count:
        raise RuntimeError(f"ncu saw {launches[0][0]} {len(shapes)} times at {count} shapes")
    return shapes


def run(config: Config) -> Iterator[Record]:
    """Yield one record per length, kernel and pass; on a GPU for the lengths that fit its memory."""
    device, free = cuflash.DeviceSpec.gpu(config.device), float("inf")
    if config.gpu:
        if reason := why_no_gpu():
            sys.exit(f"memory_traffic --gpu counts bytes on a GPU: {reason}")
        import cupy

        device, free = gpu.current_device(), cupy.cuda.Device().mem_info[0]
    plans = {
        seqlen: {
            kernel: ready for kernel in config.kernels
            if (ready := plan_of(config.shape(seqlen), kernel, device)).workspace_bytes < MOST_OF_MEMORY * free
        }
        for seqlen in track(config.seqlens, "plans")
    }  # fmt: skip
    try:  # `reversed` runs the last family first, because it fits the memory at every length
        calls = [(config.shape(seqlen), tuple(reversed(fitting))) for seqlen, fitting in plans.items()]
        counters = counted(calls) if config.gpu else [{} for _ in calls]
    except RuntimeError as error:
        sys.exit(f"memory_traffic: {error}")
    for (seqlen, fitting), measured in zip(plans.items(), counters, strict=True):
        for kernel, ready in fitting.items():
            for row in rows_of(config, kernel, seqlen, modelled(ready), measured):
                yield row | (gpu_versions() if config.gpu else {})


def rows_of(
    config: Config, kernel: str, seqlen: int, moved: dict[tuple[str, str], int], counters: dict[str, int]
) -> Iterator[Record]:
    """Yield one record per pass: modelled bytes, and measured bytes if counters were read."""
    batch, num_heads, _, head_dim = config.shape(seqlen)
    for way in WAYS:
        names = [name for each, name in moved if each == way]
        total = sum(moved[way, name] for name in names)
        measured = sum(counters[name] for name in names) if counters else None
        yield {
            "kernel": kernel, "pass": way, "seqlen": seqlen, "dtype": "float16", "batch": batch,
            "num_heads": num_heads, "head_dim": head_dim, "model_mb": total / 1e6,
            "measured_mb": None if measured is None else measured / 1e6,
            "measured_over_model": None if measured is None else measured / total,
        }  # fmt: skip


def table(records: list[Record]) -> Table:
    result = Table(title="MB of device memory that a pass reads and writes")
    for column in ("pass", "kernel", "tokens", "model", "counters", "counters / model"):
        result.add_column(column, justify="left" if column in ("pass", "kernel") else "right")
    for row in sorted(records, key=lambda row: (row["pass"], row["kernel"], row["seqlen"])):
        measures = (row[name] for name in ("model_mb", "measured_mb", "measured_over_model"))
        numbers = ("" if x is None else f"{x:.4g}" for x in measures)
        result.add_row(row["pass"], row["kernel"], str(row["seqlen"]), *numbers)
    return result


def plot(records: list[Record]) -> Any:
    """Plot bytes over length: lines for the model, circles for the counters."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True)
    for ax, way in zip(axes, WAYS):
        for number, kernel in enumerate(dict.fromkeys(row["kernel"] for row in records)):
            chosen = [row for row in records if (row["kernel"], row["pass"]) == (kernel, way)]
            lengths = [row["seqlen"] for row in chosen]
            values = [row["model_mb"] for row in chosen]
            ax.loglog(lengths, values, "--", color=f"C{number}", label=f"{kernel}, model")
            known = [row for row in chosen if row["measured_mb"] is not None]
            if known:
                lengths, values = zip(*((row["seqlen"], row["measured_mb"]) for row in known))
                ax.loglog(lengths, values, "o", color=f"C{number}", label=f"{kernel}, counters")
        ax.set(title=way, xlabel="tokens")
    lengths = sorted({row["seqlen"] for row in records})
    for ax in axes:
        ax.set_xticks(lengths, [str(x) if x < 4096 else f"{x // 1024}k" for x in lengths])
        ax.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes[0].set_ylabel("MB of device memory")
    axes[0].legend(fontsize="x-small")
    figure.tight_layout()
    return figure


# Columns that distinguish the rows of a result.
ROW = ("gpu", "kernel", "pass", "dtype", "batch", "seqlen", "num_heads", "head_dim")

if __name__ == "__main__":
    main(
        Config, run, table, plot, replacing=lambda config: ROW if config.gpu else (),
        name=lambda config: "memory_traffic_gpu" if config.gpu else "memory_traffic",
    )  # fmt: skip
