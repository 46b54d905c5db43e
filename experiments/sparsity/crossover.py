"""At which density does block-sparse attention become faster than dense, by block size and length?

    python -m experiments crossover           # on the host, in under a minute
    python -m experiments crossover --gpu     # on a GPU: float16, 4096 and 16384 tokens, 8 heads of 128

Random blocks, the same number in each head and including the diagonal (`workloads.random_blocks`), on standard normal
data. Both passes of a plan are timed alternately with those of the dense plan. The crossover is the density at which
both times are equal, interpolated linearly between two measured densities. For each length and block size, some rows of
the sparsest call are first checked against their error bounds.

`block_sparsity --gpu` times more block sizes at one length; this experiment combines lengths and block sizes.

Expect: blocks of 128, the size of the kernels' own tiles, are faster at nearly every density, and blocks of 32, whose
tiles are a quarter as long, below one half.
Found:  on two cores, blocks of 128 are faster than dense attention below densities of 0.77 to 0.84, blocks of 64 below
0.72 to 0.78, and blocks of 32 below 0.39 to 0.55.

Cost: Under a minute on two cores; --gpu a minute of a GPU.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cpu_speed
import cuflash
import matplotlib.pyplot as plt
import numpy as np
import simt_speed
from block_sparsity import WAYS, break_even, pays_below
from cuflash import masks
from flash_ladder import checked
from harness import Record, Timing, gpu_versions, main, time_alternately, time_on_device, track, why_no_gpu
from rich.console import Group
from rich.table import Table
from spot_check import SpotCheck
from workloads import num_kept, random_blocks


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every combination of length, block size and density is one row."""

    gpu: bool = False
    blocks: tuple[int, ...] = (32, 64, 128)
    seqlens: tuple[int, ...] = (1024, 2048)
    densities: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 1.0)
    num_heads: int = 1
    head_dim: int = 64
    repeats: int = 25
    gpu_seqlens: tuple[int, ...] = (4096, 16384)
    gpu_densities: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)
    gpu_num_heads: int = 8
    gpu_head_dim: int = 128
    gpu_repeats: int = 20

    def __post_init__(self) -> None:
        counts = (self.num_heads, self.head_dim, self.repeats, *self.seqlens, *self.blocks)
        if min(*counts, self.gpu_num_heads, self.gpu_head_dim, self.gpu_repeats, *self.gpu_seqlens) < 1:
            raise ValueError("lengths, blocks, num_heads, head_dim and repeats must be positive")
        for densities in (self.densities, self.gpu_densities):
            if not all(0 < density <= 1 for density in densities) or list(densities) != sorted(set(densities)):
                raise ValueError(f"densities must lie in (0, 1] and increase; got {densities}")
        for seqlens, densities in ((self.seqlens, self.densities), (self.gpu_seqlens, self.gpu_densities)):
            for seqlen, block in itertools.product(seqlens, self.blocks):
                num_kept(seqlen, block, densities[0])

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[float, ...], int, int]:
        """Lengths, densities, num_heads and head_dim of the part that runs."""
        if self.gpu:
            return self.gpu_seqlens, self.gpu_densities, self.gpu_num_heads, self.gpu_head_dim
        return self.seqlens, self.densities, self.num_heads, self.head_dim


def draw(config: Config, seqlen: int) -> list[Any]:
    """Draw q, k, v and dO, [1, num_heads, seqlen, head_dim], on the device or on the host."""
    _, _, num_heads, head_dim = config.sizes
    if config.gpu:
        return simt_speed.draw(1, num_heads, seqlen, head_dim, dtype=np.float16)
    return [x[None] for x in cpu_speed.draw(num_heads, seqlen, head_dim)]


def calls_of(arrays: list[Any], mask: masks.Mask | None, is_checked: bool) -> dict[str, Callable[[], object]]:
    """Return both passes of a plan on these arrays, ready to time."""
    q, k, v, do = arrays
    plan = cuflash.plan(q, k, v, mask=mask, executor="cpu" if isinstance(q, np.ndarray) else "gpu")
    if is_checked:
        return checked("a block-sparse call", plan, arrays, SpotCheck.of(q, k, v, mask))
    return simt_speed.both_passes(plan, q, k, v, do, *plan.forward(q, k, v))


def timed(config: Config, arrays: list[Any], block: int) -> dict[str, Timing]:
    """Time dense and sparse passes, under names such as "dense forward" and "0.5 backward"."""
    _, densities, num_heads, _ = config.sizes
    seqlen = arrays[0].shape[-2]
    calls = {f"dense {way}": call for way, call in calls_of(arrays, None, False).items()}
    for density in densities:
        mask = masks.BlockPattern(random_blocks(num_heads, seqlen, block, density), block)
        both = calls_of(arrays, mask, density == densities[0])
        calls |= {f"{density} {way}": call for way, call in both.items()}
    if config.gpu:
        return time_on_device(calls, repeats=config.gpu_repeats, warmup=1)
    return time_alternately(calls, repeats=config.repeats, budget_s=5)


def run(config: Config) -> Iterator[Record]:
    """Yield one record per length, block size, pass and density."""
    if config.gpu and (reason := why_no_gpu()):
        sys.exit(f"crossover --gpu times kernels on a GPU: {reason}")
    seqlens, densities, num_heads, head_dim = config.sizes
    constants = gpu_versions() if config.gpu else {}
    for seqlen, block in track(list(itertools.product(seqlens, config.blocks)), "lengths and blocks"):
        arrays = draw(config, seqlen)
        times = timed(config, arrays, block)
        for way in WAYS:
            dense = times[f"dense {way}"].median_ms
            exact = {density: num_kept(seqlen, block, density) / (seqlen // block) ** 2 for density in densities}
            points = [(exact[density], times[f"{density} {way}"].median_ms / dense) for density in densities]
            crossover = break_even(points)
            for density, (share, of_dense) in zip(densities, points):
                timing = times[f"{density} {way}"]
                yield {
                    "pass": way, "seqlen": seqlen, "block": block, "density": share, "dtype": arrays[0].dtype.name,
                    "num_heads": num_heads, "head_dim": head_dim, "ms": timing.median_ms,
                    "spread_ms": timing.spread_ms, "dense_ms": dense, "of_dense": of_dense, "crossover": crossover,
                    **constants,
                }  # fmt: skip


def series(records: list[Record]) -> dict[tuple[str, int, int], list[Record]]:
    """Group the rows by pass, length and block size."""
    series_of: dict[tuple[str, int, int], list[Record]] = {}
    for row in records:
        series_of.setdefault((row["pass"], row["seqlen"], row["block"]), []).append(row)
    return series_of


def table(records: list[Record]) -> Group:
    """Tabulate time relative to dense by density, and the density at which it reaches 1."""
    panels = []
    for seqlen in dict.fromkeys(row["seqlen"] for row in records):
        of_length = [row for row in records if row["seqlen"] == seqlen]
        densities = sorted({row["density"] for row in of_length})
        shown = Table(title=f"time / dense time, {seqlen} tokens")
        for column in ("pass", "block", "dense ms", *(f"{density:.3g}" for density in densities), "wins below"):
            shown.add_column(column, justify="left" if column == "pass" else "right")
        for (way, _, block), rows in series(of_length).items():
            ratios = {row["density"]: f"{row['of_dense']:.2f}" for row in rows}
            cells = (ratios.get(density, "") for density in densities)
            wins = pays_below(rows[0]["crossover"], rows[0]["density"])
            shown.add_row(way, str(block), f"{rows[0]['dense_ms']:.4g}", *cells, wins)
        panels.append(shown)
    return Group(*panels)


def plot(records: list[Record]) -> Any:
    """Plot relative time over density, one row per pass and one column per length, with dots where it reaches 1."""
    seqlens = list(dict.fromkeys(row["seqlen"] for row in records))
    size = (3.8 * len(seqlens), 5.8)
    figure, axes = plt.subplots(len(WAYS), len(seqlens), figsize=size, sharex=True, squeeze=False)
    for (way, seqlen, block), rows in series(records).items():
        ax = axes[WAYS.index(way)][seqlens.index(seqlen)]
        (line,) = ax.plot(*zip(*((row["density"], row["of_dense"]) for row in rows)), "-o", markersize=3)
        wins = rows[0]["crossover"]
        line.set_label(f"blocks of {block}: {pays_below(wins, rows[0]['density'])}")
        if wins is not None and wins < 1:
            ax.plot([wins], [1], "D", color=line.get_color())
        ax.set(title=f"{way}, {seqlen} tokens", xlim=(0, 1.02))
    for ax in axes.flat:
        ax.axhline(1, color="black", linewidth=0.8)
        ax.axline((0, 0), slope=1, color="grey", linestyle=":")
        ax.set_ylim(0, None)
        ax.legend(fontsize="x-small", title="faster than dense below", title_fontsize="x-small", loc="upper left")
    for ax in axes[-1]:
        ax.set_xlabel("density: blocks kept / all blocks")
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("time / dense time")
    figure.tight_layout()
    return figure


# Columns that distinguish the rows of a result.
ROW = ("gpu", "pass", "seqlen", "block", "density", "dtype", "num_heads", "head_dim")

if __name__ == "__main__":
    main(
        Config, run, table, plot, replacing=lambda config: ROW if config.gpu else (),
        name=lambda config: "crossover_gpu" if config.gpu else "crossover",
    )  # fmt: skip
