"""What do FlashAttention-1's tables look like with our kernels: time and memory from 128 to 65536 tokens?

    python -m experiments flashattention1_tables           # on the host, in under a minute: NumPy and the cpu executor
    python -m experiments flashattention1_tables --gpu     # on a GPU: float16, 16 batch entries, 8 heads of 64

The paper (arXiv 2205.14135, appendix E, tables 18 to 21: no mask, no dropout) times PyTorch's standard attention, its
own kernels, and block-sparse kernels on an A100 with 40 GB. Here "standard" is our naive family, three forward kernels
that store every score; "fa1" is the paper's loop on tensor cores; "dense" is the choice of `kernel="auto"`; "butterfly"
is the same with the pattern of the paper's block-sparse kernels, in blocks of 128 and with all strides, whose density
is in the rows. "pytorch" is PyTorch's standard attention, as in the paper, if PyTorch is installed. On the host,
"standard" is standard attention in a few lines of NumPy, and "dense" is the cpu executor.

Times of the paper are its published milliseconds. Ratios can be compared across machines, but milliseconds cannot:
"over standard" is the time of standard attention divided by a method's time, for this run and for the paper's table.
Memory is the planned memory of all arrays of a call with its gradients. A method that needs more memory than the
machine has gets no row.

Up to 4096 tokens, some rows of results and gradients are checked against their error bounds before they are timed.

Expect: dense is at least twice as fast as standard from 1024 tokens on, and its memory grows linearly.
Found:  the memory of standard attention grows with the square of the length, and that of all other methods linearly.

Cost: Under a minute on two cores; --gpu a minute of a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cpu_speed
import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash import masks, patterns
from cuflash.compiler import nvrtc
from cuflash.executors import gpu
from flash_ladder import Plain, checked
from harness import (
    Record, Timing, check_names, gpu_versions, main, time_alternately, time_on_device, track, why_no_gpu,
)  # fmt: skip
from rich.table import Table
from spot_check import SpotCheck

METHODS = ("standard", "pytorch", "fa1", "dense", "butterfly")
WAYS = ("forward", "backward", "both")
KERNELS = {"standard": "naive", "fa1": "fa1", "dense": "auto", "butterfly": "auto"}
BLOCK = 128
LONGEST_CHECKED = 4096
LENGTHS = tuple(2**exponent for exponent in range(7, 17))  # sequence lengths of the paper's tables
# Milliseconds in tables 18 to 20 of the paper, by our name of the method; a list ends where memory ran out.
PAPER_MS: dict[tuple[str, str], tuple[float, ...]] = {
    ("standard", "forward"): (0.21, 0.22, 0.43, 1.27, 4.32, 16.47, 67.77),
    ("standard", "backward"): (0.26, 0.29, 0.78, 2.44, 8.82, 33.87),
    ("standard", "both"): (0.67, 0.70, 1.18, 3.67, 13.22, 50.44),
    ("fa1", "forward"): (0.08, 0.09, 0.18, 0.68, 2.40, 8.42, 33.54, 134.03, 535.95, 2147.05),
    ("fa1", "backward"): (0.11, 0.16, 0.52, 1.62, 5.45, 21.57, 84.75, 336.00, 1338.56, 5343.19),
    ("fa1", "both"): (0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85),
    ("butterfly", "forward"): (0.56, 0.52, 0.63, 0.65, 0.61, 0.96, 1.69, 3.02, 5.69, 11.77),
    ("butterfly", "backward"): (0.11, 0.12, 0.16, 0.38, 1.20, 2.34, 4.69, 9.10, 18.74, 37.04),
    ("butterfly", "both"): (0.74, 0.77, 0.82, 0.88, 1.71, 3.21, 6.56, 12.60, 24.93, 50.39),
}
# Megabytes in table 21, for both passes.
PAPER_MB: dict[str, tuple[float, ...]] = {
    "standard": (36, 104, 336, 1184, 4416, 17024),
    "fa1": (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13376),
}
# For methods that the paper lacks, the paper's method with which they are compared.
OF_PAPER = {"pytorch": "standard", "dense": "fa1"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Lengths and methods; every combination that fits memory has a row for each pass."""

    gpu: bool = False
    methods: tuple[str, ...] = METHODS
    seqlens: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    num_heads: int = 2
    gpu_seqlens: tuple[int, ...] = LENGTHS
    batch: int = 16
    gpu_num_heads: int = 8
    head_dim: int = 64
    budget_s: float = 3.0
    gpu_budget_s: float = 0.2

    def __post_init__(self) -> None:
        check_names(self, {"methods": METHODS})
        lengths, counts = (*self.seqlens, *self.gpu_seqlens), (self.num_heads, self.batch, self.gpu_num_heads)
        if min(*counts, self.head_dim, *lengths) < 1 or min(self.budget_s, self.gpu_budget_s) <= 0:
            raise ValueError("lengths, batch, num_heads, head_dim and budgets must be positive")
        if any(seqlen % BLOCK for seqlen in lengths):
            raise ValueError(f"lengths must be multiples of {BLOCK}, the blocks of the butterfly; got {lengths}")

    def shape(self, seqlen: int) -> tuple[int, int, int, int]:
        batch, num_heads = (self.batch, self.gpu_num_heads) if self.gpu else (1, self.num_heads)
        return batch, num_heads, seqlen, self.head_dim


def of_paper(numbers: dict[Any, tuple[float, ...]], key: Any, seqlen: int) -> float | None:
    """Return a number of the paper's tables at a length, or None if the tables have none."""
    column = numbers.get(key, ())
    at = LENGTHS.index(seqlen) if seqlen in LENGTHS else len(column)
    return column[at] if at < len(column) else None


def mask_of(method: str, seqlen: int) -> masks.Mask | None:
    return patterns.butterfly(seqlen, block=BLOCK) if method == "butterfly" else None


def density(method: str, seqlen: int) -> float:
    """Return the fraction of blocks that are kept."""
    if method != "butterfly":
        return 1.0
    shape = {"batch": (), "num_heads": 1, "seqlen_q": seqlen, "seqlen_kv": seqlen}
    return cuflash.BlockIndex.from_mask(mask_of(method, seqlen), block=BLOCK, **shape).report(head_dim=1).density


class PyTorch:
    """PyTorch's standard attention: two products and a softmax, with autograd."""

    def __init__(self, q: Any, k: Any, v: Any, do: Any) -> None:
        import torch

        self.q, self.k, self.v = (torch.from_dlpack(x).requires_grad_() for x in (q, k, v))
        self.do, self.scale = torch.from_dlpack(do), q.shape[-1] ** -0.5
        self.o = self.forward()

    def forward(self) -> Any:
        return ((self.q @ self.k.transpose(-1, -2)) * self.scale).softmax(-1) @ self.v

    def backward(self) -> Any:
        import torch

        return torch.autograd.grad(self.o, (self.q, self.k, self.v), self.do, retain_graph=True)

    def both(self) -> Any:
        import torch

        return torch.autograd.grad(self.forward(), (self.q, self.k, self.v), self.do)


def draw(config: Config, seqlen: int) -> list[Any]:
    """Draw normal q, k, v and dO, on the device or on the host."""
    if not config.gpu:
        return [x[None] for x in cpu_speed.draw(*config.shape(seqlen)[1:])]
    import cupy

    cupy.random.seed(0)
    shape = config.shape(seqlen)
    return [cupy.random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(4)]


def plan_of(config: Config, method: str, seqlen: int) -> Any:
    """Return the plan of a method; NumPy's standard attention has a separate class."""
    x = cuflash.ShapeDtype(config.shape(seqlen), np.dtype(np.float16 if config.gpu else np.float32))
    if config.gpu:
        return cuflash.plan(x, x, x, mask=mask_of(method, seqlen), executor="gpu", kernel=KERNELS[method])
    if method == "standard":
        return Plain(causal=False)
    return cuflash.plan(x, x, x, mask=mask_of(method, seqlen), executor="cpu")


def planned_mib(method: str, ready: Any) -> float | None:
    """Return the size of all arrays of a call with gradients; None for standard attention, which has no plan."""
    if method == "pytorch" or isinstance(ready, Plain):
        return None
    planned = cuflash.study.memory(ready)
    return (planned.inputs + planned.results + planned.gradients + planned.workspace) / 2**20


def calls_of(ready: Any, arrays: list[Any]) -> dict[str, Callable[[], object]]:
    """Return functions that run the three passes of a plan."""
    q, k, v, do = arrays
    o, lse = ready.forward(q, k, v)

    def both() -> object:
        o, lse = ready.forward(q, k, v)
        return ready.backward(do, q, k, v, o, lse)

    return {
        "forward": lambda: ready.forward(q, k, v), "backward": lambda: ready.backward(do, q, k, v, o, lse), "both": both
    }  # fmt: skip


def methods_of(config: Config, seqlen: int) -> list[str]:
    """Return the methods that run on this machine and fit its memory.

    Standard attention needs one matrix of scores in the forward pass, which CuPy's pool retains, and two in the
    backward pass.
    """
    chosen = [name for name in METHODS if name in config.methods]
    if not config.gpu:
        return [name for name in chosen if name not in ("pytorch", "fa1")]
    import cupy

    free, _ = cupy.cuda.Device().mem_info
    batch, num_heads, _, _ = config.shape(seqlen)
    matrices = {"standard": 3 * 4, "pytorch": 5 * 2}  # bytes per score; PyTorch has several copies in 16 bits
    fits = {name: batch * num_heads * seqlen**2 * size < 0.85 * free for name, size in matrices.items()}
    try:
        import torch  # noqa: F401
    except ImportError:
        fits["pytorch"] = False
    return [name for name in chosen if fits.get(name, True)]


def passes(
    config: Config, method: str, arrays: list[Any], checks: dict[bool, SpotCheck]
) -> tuple[Any, dict[str, Callable[[], object]]]:
    """Return a plan and its passes; up to a maximum length, some rows of the results are checked first.

    `checks` stores the expected results: all methods with a mask share one entry, and all methods without a mask
    another.
    """
    if method == "pytorch":
        model = PyTorch(*arrays)
        return model, {way: getattr(model, way) for way in WAYS}
    seqlen = arrays[0].shape[-2]
    ready, mask = plan_of(config, method, seqlen), mask_of(method, seqlen)
    if seqlen <= LONGEST_CHECKED:
        if (mask is None) not in checks:
            checks[mask is None] = SpotCheck.of(*arrays[:3], mask)
        checked(method, ready, arrays, checks[mask is None])
    return ready, calls_of(ready, arrays)


def measured(config: Config, seqlen: int, arrays: list[Any]) -> dict[str, tuple[dict[str, Timing], float | None]]:
    """Time the passes and plan the memory of each method, alternately on the host, and one after another on a GPU."""
    results: dict[str, tuple[dict[str, Timing], float | None]] = {}
    in_turn: dict[str, Callable[[], object]] = {}
    checks: dict[bool, SpotCheck] = {}
    for method in methods_of(config, seqlen):
        ready, calls = passes(config, method, arrays, checks)
        results[method] = timed_on_device(config, calls) if config.gpu else {}, planned_mib(method, ready)
        if not config.gpu:
            in_turn |= {f"{method} {way}": call for way, call in calls.items()}
        del ready, calls
        release(config)
    for name, timing in time_alternately(in_turn, repeats=25, budget_s=config.budget_s).items():
        method, way = name.split()
        results[method][0][way] = timing
    return results


def timed_on_device(config: Config, calls: dict[str, Callable[[], object]]) -> dict[str, Timing]:
    """Time the passes of a method: as many repeats as the budget allows, but at least three, or one long call.

    If the first call takes more than a second, it is the measurement, because one-time work then takes a hundredth of
    it.
    """
    timings = time_on_device(calls, repeats=1, warmup=0)
    total_s = sum(timing.median_ms for timing in timings.values()) / 1e3
    if total_s > max(1.0, config.gpu_budget_s):
        return timings
    repeats = 1 if total_s > config.gpu_budget_s else max(3, min(25, int(config.gpu_budget_s / total_s)))
    return time_on_device(calls, repeats=repeats, warmup=0)


def rows(config: Config, seqlen: int) -> Iterator[Record]:
    """Yield a record for each method and pass at one length."""
    arrays = draw(config, seqlen)
    results = measured(config, seqlen, arrays)
    batch, num_heads, _, head_dim = config.shape(seqlen)
    for method, (times, mib) in results.items():
        column = OF_PAPER.get(method, method)
        for way in WAYS:
            standard = results["standard"][0][way].median_ms if "standard" in results else None
            paper, paper_standard = (of_paper(PAPER_MS, (name, way), seqlen) for name in (column, "standard"))
            yield {
                "method": method, "pass": way, "seqlen": seqlen, "dtype": arrays[0].dtype.name, "batch": batch,
                "num_heads": num_heads, "head_dim": head_dim, "density": density(method, seqlen),
                "ms": times[way].median_ms, "spread_ms": times[way].spread_ms, "repeats": times[way].repeats,
                "over_standard": None if standard is None else standard / times[way].median_ms,
                "paper_ms": paper,
                "paper_over_standard": None if paper is None or paper_standard is None else paper_standard / paper,
                "memory_mib": mib, "paper_memory_mb": of_paper(PAPER_MB, column, seqlen),
            }  # fmt: skip


def release(config: Config) -> None:
    """Free memory, so that all of it is available to the next method."""
    if not config.gpu:
        return
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def run(config: Config) -> Iterator[Record]:
    """Yield the records of all lengths, the shortest first."""
    if not config.gpu:
        for seqlen in track(sorted(config.seqlens), "lengths"):
            yield from rows(config, seqlen)
        return
    if reason := why_no_gpu():
        sys.exit(f"flashattention1_tables --gpu times kernels on a GPU: {reason}")
    methods = [name for name in config.methods if name != "pytorch"]
    specs = {
        spec for seqlen in config.gpu_seqlens for name in methods
        for spec in plan_of(config, name, seqlen)._plan.specs.values()
    }  # fmt: skip
    nvrtc.precompile(specs, gpu.current_device().compute_capability)
    for seqlen in track(sorted(config.gpu_seqlens), "lengths"):
        for row in rows(config, seqlen):
            yield row | gpu_versions()
        release(config)


def table(records: list[Record]) -> Table:
    result = Table(title="milliseconds, and speed over standard attention's, and the paper's on an A100")
    names = ("pass", "tokens", "method", "density", "ms", "paper's ms", "over standard", "paper's", "MiB", "paper's MB")
    for column in names:
        result.add_column(column, justify="left" if column in ("pass", "method") else "right")
    shown = ("ms", "paper_ms", "over_standard", "paper_over_standard", "memory_mib", "paper_memory_mb")
    for row in sorted(records, key=lambda row: (WAYS.index(row["pass"]), row["seqlen"])):
        numbers = ("" if row[name] is None else f"{row[name]:.4g}" for name in shown)
        result.add_row(row["pass"], str(row["seqlen"]), row["method"], f"{row['density']:.3g}", *numbers)
    return result


def plot(records: list[Record]) -> Any:
    """Plot the times of each pass over length, the paper's dashed, and memory."""
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.4))
    for ax, way in zip(axes, WAYS):
        for number, method in enumerate(METHODS):
            chosen = [row for row in records if (row["method"], row["pass"]) == (method, way)]
            draw_line(ax, chosen, "ms", method, f"C{number}", "-o")
            if method not in OF_PAPER:
                draw_line(ax, chosen, "paper_ms", f"{method}, paper (A100)", f"C{number}", ":")
        ax.set(title=way, xlabel="tokens")
    for number, method in enumerate(METHODS):
        chosen = [row for row in records if (row["method"], row["pass"]) == (method, "both")]
        draw_line(axes[3], chosen, "memory_mib", method, f"C{number}", "-o")
    axes[0].set_ylabel("ms")
    axes[3].set(title="memory of both passes, MiB", xlabel="tokens")
    lengths = sorted({row["seqlen"] for row in records})[:: 2 if len(records) > 60 else 1]
    for ax in axes:
        ax.set_xticks(lengths, [str(x) if x < 4096 else f"{x // 1024}k" for x in lengths], fontsize="small")
        ax.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, ncols=4, loc="upper center", fontsize="small")
    figure.tight_layout(rect=(0, 0, 1, 0.86))
    return figure


def draw_line(ax: Any, chosen: list[Record], measure: str, label: str, color: str, style: str) -> None:
    """Draw the rows that have this measurement, on logarithmic axes."""
    known = [row for row in chosen if row[measure] is not None]
    if known:
        lengths, values = zip(*((row["seqlen"], row[measure]) for row in known))
        ax.loglog(lengths, values, style, color=color, label=label, markersize=3.5)


# Columns that distinguish the rows of a result.
ROW = ("gpu", "method", "pass", "dtype", "batch", "seqlen", "num_heads", "head_dim")

if __name__ == "__main__":
    main(
        Config, run, table, plot, replacing=lambda config: ROW if config.gpu else (),
        name=lambda config: "flashattention1_tables_gpu" if config.gpu else "flashattention1_tables",
    )  # fmt: skip
