"""What does each step of the FlashAttention papers gain in time and memory, by length?

    python -m experiments flash_ladder           # on the host: standard attention in NumPy and the cpu executor
    python -m experiments flash_ladder --gpu     # on a GPU: naive, simt, fa1, sm80 and sm90 kernels in float16

The kernels of a run compute the same attention on the same standard normal data. Some rows of their results and
gradients are first checked against their error bounds, then calls are timed alternately. TFLOP/s count the products of
the paper, 2 forward and 5 backward, half of them if causal; on a GPU there is also the fraction of its tensor-core rate
for 16 bits. Peak memory is the largest total allocation of a call in addition to arguments and results: on a GPU in
CuPy's pool, on the host in NumPy arrays, without BLAS's buffers. Workspace is the plan's number for its larger pass.
Moved is the number of bytes of device memory in the papers' model, which `memory_traffic` compares with the profiler's
counters.

"plain" is attention in a few lines of NumPy: it stores the matrix of scores, and its backward pass recomputes the
weights from lse. "naive" are kernels that do the same on a GPU, if the matrices fit into its memory.

Expect: the memory of "plain" and "naive" grows with the square of the length, that of the others at most linearly.
Found:  on the host, at 2048 tokens and without a mask, the cpu executor takes 5 MiB; standard attention takes 64 MiB
forward and 128 MiB backward.

Cost: A minute on two cores; --gpu two minutes of a GPU.
"""

import concurrent.futures
import itertools
import multiprocessing
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import cpu_speed
import cuflash
import matplotlib.pyplot as plt
import numpy as np
import simt_speed
from block_sparsity import sent
from cuflash import masks
from cuflash.compiler import nvrtc
from cuflash.executors import gpu
from device_memory import peak_on_device
from harness import Record, check_names, gpu_versions, main, time_alternately, time_on_device, track, why_no_gpu
from rich.table import Table
from spot_check import SpotCheck
from traffic_model import modelled
from workloads import flops

MASKS, WAYS = ("full", "causal"), ("forward", "backward")
GPU_KERNELS = ("naive", "simt", "fa1", "sm80", "sm90")
Peaks = dict[tuple[str, str, int, str], int]  # peak bytes by kernel, mask, length and pass


@dataclass(frozen=True, kw_only=True)
class Config:
    """The calls to time; every combination is one row."""

    gpu: bool = False
    masks: tuple[str, ...] = MASKS
    seqlens: tuple[int, ...] = (256, 512, 1024, 2048)
    num_heads: int = 4
    head_dim: int = 64
    repeats: int = 25
    gpu_kernels: tuple[str, ...] = GPU_KERNELS
    gpu_seqlens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    gpu_batch: int = 16
    gpu_num_heads: int = 8
    gpu_head_dim: int = 64
    gpu_repeats: int = 5

    def __post_init__(self) -> None:
        check_names(self, {"masks": MASKS, "gpu_kernels": GPU_KERNELS})
        counts = (self.num_heads, self.head_dim, self.repeats, *self.seqlens)
        if min(*counts, self.gpu_batch, self.gpu_num_heads, self.gpu_head_dim, self.gpu_repeats, *self.gpu_seqlens) < 1:
            raise ValueError("lengths, num_heads, head_dim and repeats must be positive")

    @property
    def cases(self) -> list[tuple[int, str]]:
        """Lengths and masks, the shortest first."""
        return list(itertools.product(sorted(self.gpu_seqlens if self.gpu else self.seqlens), self.masks))

    def shape(self, seqlen: int) -> tuple[int, int, int, int]:
        if self.gpu:
            return self.gpu_batch, self.gpu_num_heads, seqlen, self.gpu_head_dim
        return 1, self.num_heads, seqlen, self.head_dim


@dataclass(frozen=True)
class Plain:
    """Standard attention in NumPy, with the methods of a plan."""

    causal: bool
    workspace_bytes: int | None = None

    def scores(self, q: Any, k: Any) -> Any:
        s = q @ k.swapaxes(-1, -2)
        s *= q.dtype.type(q.shape[-1] ** -0.5)
        if self.causal:
            s[..., np.triu(np.ones(s.shape[-2:], bool), 1)] = -np.inf
        return s

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        p = self.scores(q, k)
        largest = p.max(-1, keepdims=True)
        p -= largest
        np.exp(p, out=p)
        total = p.sum(-1, keepdims=True)
        p /= total
        return p @ v, (largest + np.log(total))[..., 0]

    def backward(self, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any) -> tuple[Any, Any, Any]:
        p = self.scores(q, k)
        p -= lse[..., None]
        np.exp(p, out=p)
        dv = p.swapaxes(-1, -2) @ do
        ds = do @ v.swapaxes(-1, -2)
        ds -= (do * o).sum(-1, keepdims=True)
        ds *= p
        ds *= q.dtype.type(q.shape[-1] ** -0.5)
        return ds @ k, ds.swapaxes(-1, -2) @ q, dv


def kernels_of(config: Config, seqlen: int, mask: str) -> dict[str, Any]:
    """Return plans by kernel name, and standard attention on the host."""
    causal, dtype = mask == "causal", np.float16 if config.gpu else np.float32
    x = cuflash.ShapeDtype(config.shape(seqlen), np.dtype(dtype))
    if not config.gpu:
        return {"plain": Plain(causal), "cpu": cuflash.plan(x, x, x, causal=causal, executor="cpu")}
    plans = {
        name: cuflash.plan(x, x, x, causal=causal, executor="gpu", kernel=name)
        for name in GPU_KERNELS
        if name in config.gpu_kernels
    }
    most = 0.6 * memory_of_device()  # the pool still holds the forward pass's workspace
    return {name: ready for name, ready in plans.items() if ready.workspace_bytes < most}


def memory_of_device() -> int:
    import cupy

    return int(cupy.cuda.Device().mem_info[1])


def draw(config: Config, seqlen: int) -> list[Any]:
    """Draw q, k, v and dO, on the device or on the host."""
    if config.gpu:
        return simt_speed.draw(*config.shape(seqlen), dtype=np.float16)
    return [x[None] for x in cpu_speed.draw(*config.shape(seqlen)[1:])]


def host_peaks(config: Config) -> Peaks:
    """Return the peak bytes of NumPy arrays other than arguments and results, measured in a fresh process.

    Buffers that the library keeps for later calls count in each measurement.
    """
    peaks: Peaks = {}
    tracemalloc.start()

    def measured(call: Callable[[], Any], *held: Any) -> tuple[Any, int]:
        tracemalloc.reset_peak()
        results = tuple(call())
        return results, tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in (*held, *results))

    # "plain" runs first, while the library has no buffers.
    for name, (seqlen, mask) in itertools.product(("plain", "cpu"), config.cases):
        arrays, ready = draw(config, seqlen), kernels_of(config, seqlen, mask)[name]
        q, k, v, do = arrays
        (o, lse), peaks[name, mask, seqlen, "forward"] = measured(partial(ready.forward, q, k, v), *arrays)
        backward = partial(ready.backward, do, q, k, v, o, lse)
        peaks[name, mask, seqlen, "backward"] = measured(backward, *arrays, o, lse)[1]
        del arrays, q, k, v, do, o, lse, backward
    tracemalloc.stop()
    return peaks


def device_peaks(ready: Any, arrays: list[Any]) -> dict[str, int]:
    """Return the peak memory of each pass of a plan, without its arguments and results."""
    q, k, v, do = arrays
    ready.compile()

    def in_addition(call: Callable[[], Any]) -> tuple[Any, int]:
        results, peak = peak_on_device(call)
        return results, peak - sum(x.nbytes for x in results)

    (o, lse), forward = in_addition(partial(ready.forward, q, k, v))
    return {"forward": forward, "backward": in_addition(partial(ready.backward, do, q, k, v, o, lse))[1]}


def checked(name: str, ready: Any, arrays: list[Any], check: SpotCheck) -> dict[str, Callable[[], object]]:
    """Return both passes ready to time, after checking some rows of their results.

    Raises
    ------
    RuntimeError
        A result exceeds its bound.
    """
    q, k, v, do = arrays
    o, lse = ready.forward(q, k, v)
    cotangent = check.do if isinstance(q, np.ndarray) else sent(check.do)
    dq, dk, dv = ready.backward(cotangent, q, k, v, o, lse)
    share = check.share(o=o, lse=lse, dq=dq, dk=dk, dv=dv)
    if not share <= 1:
        raise RuntimeError(f"{name} is wrong by {share:.3g} times its bound, and is not timed")
    return simt_speed.both_passes(ready, q, k, v, do, o, lse)


def passes_moved(ready: Any) -> dict[str, int]:
    """Return the device-memory traffic of each pass in bytes, by the papers' model."""
    each = modelled(ready)
    return {way: sum(moved for (of_way, _), moved in each.items() if of_way == way) for way in WAYS}


def tensor_core_rate() -> float:
    """Return the FLOP/s of the device's tensor cores for 16-bit elements."""
    device = gpu.current_device()
    peaks = cuflash.study.Peaks.of(device)
    return peaks.tensor_16 * peaks.clock * device.num_processors


def rows(config: Config, seqlen: int, mask: str, peaks: Peaks) -> Iterator[Record]:
    """Yield a record for each kernel and pass, at one length and mask."""
    arrays, kernels = draw(config, seqlen), kernels_of(config, seqlen, mask)
    check = SpotCheck.of(*arrays[:3], masks.Causal() if mask == "causal" else None)
    calls = dict[str, Callable[[], object]]()
    for name, ready in kernels.items():
        if config.gpu:
            measured = device_peaks(ready, arrays)
            peaks |= {(name, mask, seqlen, way): peak for way, peak in measured.items()}
        calls |= {f"{name} {way}": call for way, call in checked(name, ready, arrays, check).items()}
    if config.gpu:
        times = time_on_device(calls, repeats=config.gpu_repeats, warmup=1)
    else:
        times = time_alternately(calls, repeats=config.repeats, budget_s=2.5)
    moved = {name: passes_moved(ready) if config.gpu else {} for name, ready in kernels.items()}
    rate = tensor_core_rate() if config.gpu else None
    batch, num_heads, _, head_dim = config.shape(seqlen)
    shape = {"batch": batch, "seqlen": seqlen, "num_heads": num_heads, "head_dim": head_dim}
    for (name, ready), way in itertools.product(kernels.items(), WAYS):
        timing, planned = times[f"{name} {way}"], ready.workspace_bytes
        tflops = flops(way, mask, **shape) / timing.median_ms / 1e9
        yield {
            "kernel": name, "mask": mask, "pass": way, "dtype": arrays[0].dtype.name, **shape,
            "ms": timing.median_ms, "spread_ms": timing.spread_ms,
            "tflops": tflops, "share_of_peak": None if rate is None else 1e12 * tflops / rate,
            "peak_mib": peaks[name, mask, seqlen, way] / 2**20,
            "workspace_mib": None if planned is None else planned / 2**20,
            "moved_mb": moved[name][way] / 1e6 if config.gpu else None,
        }  # fmt: skip


def run_host(config: Config) -> Iterator[Record]:
    """Measure memory in a separate process, then times."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        peaks = pool.submit(host_peaks, config).result()
    for case in track(config.cases, "lengths and masks"):
        yield from rows(config, *case, peaks)


def run_gpu(config: Config) -> Iterator[Record]:
    """Compile all kernels in parallel, then measure."""
    if reason := why_no_gpu():
        sys.exit(f"flash_ladder --gpu times kernels on a GPU: {reason}")
    import cupy

    device = gpu.current_device()
    tensor_cores = simt_speed.tensor_core_families(device)
    available = ["naive", "simt", *(["fa1"] if tensor_cores else []), *tensor_cores]
    if missing := [name for name in config.gpu_kernels if name not in available]:
        sys.exit(f"{device.name} does not run {', '.join(missing)}: choose --gpu-kernels among {','.join(available)}")
    plans = {(case, name): ready for case in config.cases for name, ready in kernels_of(config, *case).items()}
    specs = {spec for ready in plans.values() for spec in ready._plan.specs.values()}
    nvrtc.precompile(specs, device.compute_capability)
    for case in track(config.cases, "lengths and masks"):
        for row in rows(config, *case, {}):
            yield row | gpu_versions()
        cupy.get_default_memory_pool().free_all_blocks()


def run(config: Config) -> Iterator[Record]:
    """Run the part for the host, or the part for a GPU."""
    return run_gpu(config) if config.gpu else run_host(config)


def table(records: list[Record]) -> Table:
    result = Table(title="peak and workspace in MiB without arguments and results")
    for column in ("mask", "pass", "tokens", "kernel", "ms", "TFLOP/s", "share", "peak", "workspace", "moved MB"):
        result.add_column(column, justify="left" if column in ("mask", "pass", "kernel") else "right")
    order = sorted(records, key=lambda row: (row["mask"], row["pass"], row["seqlen"]))
    for row in order:
        measures = (row[name] for name in ("ms", "tflops", "share_of_peak", "peak_mib", "workspace_mib", "moved_mb"))
        numbers = ("" if x is None else f"{x:.4g}" for x in measures)
        result.add_row(row["mask"], row["pass"], str(row["seqlen"]), row["kernel"], *numbers)
    return result


def plot(records: list[Record]) -> Any:
    """Plot rate, memory and, on a GPU, traffic over length; one column per pass and mask, one line per kernel."""
    columns = list(dict.fromkeys((row["mask"], row["pass"]) for row in records))
    measures = {"tflops": "TFLOP/s", "peak_mib": "peak MiB without arrays", "moved_mb": "MB moved"}
    if any(row["moved_mb"] is None for row in records):
        del measures["moved_mb"]
    figure, axes = plt.subplots(
        len(measures), len(columns), figsize=(2.7 * len(columns), 2.6 * len(measures)), sharex=True, sharey="row",
        squeeze=False,
    )  # fmt: skip
    lengths = sorted({row["seqlen"] for row in records})
    for column, (mask, way) in zip(axes.T, columns):
        chosen = [row for row in records if (row["mask"], row["pass"]) == (mask, way)]
        for name in dict.fromkeys(row["kernel"] for row in chosen):
            of_kernel = [row for row in chosen if row["kernel"] == name]
            for ax, measure in zip(column, measures):
                values = [row[measure] for row in of_kernel]
                ax.loglog([row["seqlen"] for row in of_kernel], values, "-o", label=name, markersize=4)
        column[0].set_title(f"{way}, {mask}", fontsize="medium")
        column[-1].set_xticks(lengths, [str(x) if x < 4096 else f"{x // 1024}k" for x in lengths], fontsize="small")
        column[-1].tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        column[-1].set_xlabel("tokens")
    for row_of_axes, label in zip(axes, measures.values()):
        row_of_axes[0].set_ylabel(label)
    if not all(row["peak_mib"] > 0 for row in records):
        axes[1][0].set_yscale("symlog", linthresh=2.0**-6)
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, ncols=len(names), loc="upper center", fontsize="small")
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    return figure


# Columns that distinguish the rows of a result.
ROW = ("gpu", "kernel", "mask", "pass", "dtype", "batch", "seqlen", "num_heads", "head_dim")

if __name__ == "__main__":
    main(
        Config, run, table, plot, replacing=lambda config: ROW if config.gpu else (),
        name=lambda config: "flash_ladder_gpu" if config.gpu else "flash_ladder",
    )  # fmt: skip
