"""How much of real attention do static block patterns keep, and is the time proportional to the blocks?

    python -m experiments block_sparsity            # on the host: `make demo`
    python -m experiments block_sparsity --gpu      # only the GPU part: below which density are blocks faster?

Recall: the softmax mass of dense attention in the kept blocks, exp(lse_sparse - lse_dense), averaged over the rows of
all heads of three layers of a sentence encoder (data/README.md). Error: |o_sparse - o_dense| / |o_dense|, Frobenius
norms. Density: kept blocks divided by all blocks of the grid, where partial blocks count as whole; the encoder is
bidirectional, so any block could be kept. For each budget, a pattern has a row for its densest size within the budget,
unless that size also fits the next smaller budget. Oracle: the blocks with the most softmax mass in every block row of
every head. Speed: medians of alternating calls of existing plans, on sequences of any length with the statistics of the
captured ones (`workloads.same_statistics`). On a GPU: random blocks, the same number in each head and including the
diagonal, standard normal data of 16k tokens, with the level-2 cache flushed before each call. The break-even density,
interpolated between measured densities, is where a block-sparse call takes as long as the dense call.

Expect: windows and sinks do well in local heads, no static pattern comes close to the oracle, and time is proportional
to density.
Found:  with a quarter of the blocks of 32, the first block and a window keep 50 % of the mass (67 % in layer 2, 37 % in
layer 5), random blocks 40 % and the oracle 57 %: most of the lost mass is spread too widely for any choice of blocks.
With an eighth of the blocks, calls are 2.7 to 5.5 times faster than dense calls, not 8 times, because short tiles have
overhead for gathering keys and for Python, especially at head_dim 32.

Cost: About two minutes on two cores; --gpu minutes of a GPU.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import BlockIndex, masks
from harness import Record, Timing, gpu_versions, main, time_alternately, time_on_device, track, why_no_gpu
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from simt_speed import both_passes
from spot_check import SpotCheck
from workloads import (
    FAMILIES, LAYERS, activations, first_heads, flops, num_kept, oracle, random_blocks, same_statistics,
)  # fmt: skip

WAYS = ("forward", "backward")
GPU_DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Budgets are densities; the defaults are those of the published run."""

    blocks: tuple[int, ...] = (32, 64)
    budgets: tuple[float, ...] = (0.125, 0.25, 0.375, 0.5, 0.75)
    speed_patterns: tuple[str, ...] = ("window", "butterfly", "random")
    speed_budgets: tuple[float, ...] = (0.125, 0.25, 0.5)
    speed_blocks: tuple[int, ...] = (128, 64)
    speed_seqlens: tuple[int, ...] = (4096, 8192)
    speed_heads: int = 1
    repeats: int = 5
    executor: str = "auto"
    gpu: bool = False
    gpu_seqlens: tuple[int, ...] = (16384,)
    gpu_blocks: tuple[int, ...] = (128, 64, 32, 16)
    gpu_densities: tuple[float, ...] = (0.031, 0.0625, 0.125, 0.25, 0.5, 1.0)
    gpu_head_dim: int = 128
    gpu_hidden: int = 2048
    gpu_dtype: str = "bfloat16"
    gpu_kernel: str = "auto"
    gpu_repeats: int = 30

    @property
    def gpu_num_heads(self) -> int:
        return self.gpu_hidden // self.gpu_head_dim

    def __post_init__(self) -> None:
        if not all(0 < block and 512 % block == 0 for block in self.blocks):
            raise ValueError(f"blocks must divide the 512 captured tokens; got {self.blocks}")
        if not all(0 < block and seqlen % block == 0 for seqlen in self.speed_seqlens for block in self.speed_blocks):
            raise ValueError(f"speed_blocks must divide speed_seqlens; got {self.speed_blocks}, {self.speed_seqlens}")
        if not 1 <= self.speed_heads <= 12 or self.repeats < 1:
            raise ValueError("speed_heads must be 1..12, as many as the encoder has, and repeats at least 1")
        for budgets in (self.budgets, self.speed_budgets, self.gpu_densities):
            if not all(0 < budget <= 1 for budget in budgets) or list(budgets) != sorted(set(budgets)):
                raise ValueError(f"budgets must lie in (0, 1] and increase; got {budgets}")
        if unknown := set(self.speed_patterns) - set(FAMILIES):
            raise ValueError(f"no pattern {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
        if self.gpu_hidden % self.gpu_head_dim or self.gpu_repeats < 1 or self.gpu_dtype not in GPU_DTYPES:
            raise ValueError(f"gpu_head_dim must divide gpu_hidden, gpu_dtype be one of {', '.join(GPU_DTYPES)}")
        for seqlen, block in itertools.product(self.gpu_seqlens, self.gpu_blocks):
            num_kept(seqlen, block, self.gpu_densities[0])


def within_budgets(
    sizes: Iterable[masks.Mask], budgets: tuple[float, ...], shape: masks.MaskShape, block: int
) -> dict[float, tuple[masks.Mask, BlockIndex]]:
    """Return, for each budget, the densest mask within it and the mask's index.

    Masks within the next smaller budget are left out.
    """
    indices = [(mask, BlockIndex.from_mask(mask, block=block, **shape._asdict())) for mask in sizes]
    indices.sort(key=lambda pair: pair[1].report().density)
    chosen = {}
    for smaller, budget in zip((0.0, *budgets[:-1]), budgets, strict=True):
        fitting = [pair for pair in indices if smaller < pair[1].report().density <= budget]
        if fitting:
            chosen[budget] = fitting[-1]
    return chosen


def run_recall(config: Config) -> list[Record]:
    """Measure the fraction of captured attention that each pattern keeps; return one record per pattern and budget."""
    q, k, v = activations()
    shape = masks.MaskShape(q.shape[:1], *q.shape[1:3], k.shape[2])
    o, lse = cuflash.attention(q, k, v, return_lse=True, executor=config.executor)
    cases = [(block, name) for block in config.blocks for name in (*FAMILIES, "oracle")]
    records = []
    for block, name in track(cases, "recall"):
        grid = shape.seqlen_q // block
        sizes = oracle(q, k, grid) if name == "oracle" else FAMILIES[name](grid, block)
        for budget, (mask, index) in within_budgets(sizes, config.budgets, shape, block).items():
            sparse_o, sparse_lse = cuflash.attention(q, k, v, mask=mask, return_lse=True, executor=config.executor)
            mass = np.exp(sparse_lse - lse)
            row: Record = {"part": "recall", "pattern": name, "block": block, "budget": budget}
            row |= {"seqlen": shape.seqlen_q, "density": index.report().density, "recall": float(mass.mean())}
            row |= {f"recall_layer{layer}": float(x.mean()) for layer, x in zip(LAYERS, mass, strict=True)}
            row |= {"output_error": float(np.linalg.norm(sparse_o - o) / np.linalg.norm(o))}
            records.append(row | {"forward_gflop": 4e-9 * row["density"] * q.size * shape.seqlen_kv})
    return records


def check(mask: masks.Mask, q: np.ndarray, k: np.ndarray, v: np.ndarray, executor: str) -> None:
    """Check the timed calls, forward and backward, against the bounds of the reference, for 64 rows.

    Only these rows have a nonzero gradient of o, so the reference needs no other rows.
    """
    rows = np.linspace(0, q.shape[-2] - 1, 64).astype(int)
    head, row, key = np.ogrid[: len(q), : len(rows), : k.shape[-2]]
    allowed = mask.resolve(masks.MaskShape((), *q.shape[:2], k.shape[-2]))(0, head, rows[row], key)
    do = np.zeros_like(q)
    do[:, rows] = 1 + v[:, rows]
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, mask=mask, return_lse=True, executor=executor)
    dq, dk, dv = vjp(do)
    results = {"o": o[:, rows], "lse": lse[:, rows], "dq": dq[:, rows], "dk": dk, "dv": dv}
    exact = cuflash.reference.attention(q[:, rows], k, v, mask=allowed)
    exact += cuflash.reference.attention_vjp(q[:, rows], k, v, do[:, rows], mask=allowed)
    bounds = cuflash.error_bound(q[:, rows], k, v, do[:, rows], mask=allowed)
    for (name, result), right in zip(results.items(), exact, strict=True):
        if not (np.abs(result - right) <= getattr(bounds, name)).all():
            raise AssertionError(f"{name} of a call to be timed is outside its bound")


def calls_of(name: str, mask: Any, arrays: tuple[np.ndarray, ...], executor: str) -> dict[str, Callable[[], object]]:
    """Return functions that run the forward and backward pass of one plan."""
    q, k, v = arrays
    plan = cuflash.plan(q, k, v, mask=mask, executor=executor)
    o, lse = plan.forward(q, k, v)
    return {
        f"{name} forward": lambda: plan.forward(q, k, v),
        f"{name} backward": lambda: plan.backward(o, q, k, v, o, lse),
    }


def run_speed(config: Config) -> list[Record]:
    """Time each pattern against dense attention, one record per pattern, length, block size and budget."""
    records = []
    cases = [(seqlen, block) for seqlen in config.speed_seqlens for block in config.speed_blocks]
    for seqlen, block in track(cases, "speed"):
        arrays = same_statistics(seqlen, config.speed_heads)
        shape = masks.MaskShape((), config.speed_heads, seqlen, seqlen)
        calls, rows = calls_of("dense", None, arrays, config.executor), []
        for name in config.speed_patterns:
            sizes = (first_heads(mask, config.speed_heads) for mask in FAMILIES[name](seqlen // block, block))
            for budget, (mask, index) in within_budgets(sizes, config.speed_budgets, shape, block).items():
                check(mask, *arrays, config.executor)
                calls |= calls_of(f"{name} {budget}", mask, arrays, config.executor)
                row: Record = {"part": "speed", "pattern": name, "block": block, "budget": budget, "seqlen": seqlen}
                rows.append(row | {"density": index.report().density})
        times = time_alternately(calls, repeats=config.repeats, budget_s=20)
        for row in rows:
            for way in WAYS:
                timing, dense = times[f"{row['pattern']} {row['budget']} {way}"], times[f"dense {way}"].median_ms
                row |= {f"{way}_ms": timing.median_ms, f"{way}_spread_ms": timing.spread_ms, f"dense_{way}_ms": dense}
                row |= {f"{way}_speedup": dense / timing.median_ms}
                row |= {f"{way}_over_density": timing.median_ms / dense / row["density"]}
        records += rows
    return records


def on_gpu(mask: Any, config: Config, arrays: tuple[Any, ...]) -> tuple[str, dict[str, Callable[[], object]]]:
    """Return the kernel families of a plan and functions that run its passes, after a spot check of the results."""
    q, k, v, do = arrays
    plan = cuflash.plan(q, k, v, mask=mask, kernel=config.gpu_kernel)
    o, lse = plan.forward(q, k, v)
    check = SpotCheck.of(q, k, v, mask)
    gradients = plan.backward(sent(check.do), q, k, v, o, lse)
    share = check.share(o=o, lse=lse, dq=gradients.dq, dk=gradients.dk, dv=gradients.dv)
    if not share <= 1:
        raise AssertionError(f"a call to be timed is wrong: {share:.3g} times its bound, {mask}")
    # the passes of a call with a list may use two families
    families = dict.fromkeys(plan._plan.specs[way].family for way in WAYS)
    return ", ".join(families), both_passes(plan, q, k, v, do, o, lse)


def sent(x: np.ndarray) -> Any:
    """Copy an array to the device."""
    import cupy

    return cupy.asarray(x)


def run_gpu(config: Config) -> list[Record]:
    """Time block-sparse calls alternately with the dense call; return one record per length, block size and density."""
    if reason := why_no_gpu():
        sys.exit(f"the GPU part needs one: {reason}")
    records: list[Record] = []
    for seqlen in config.gpu_seqlens:
        rng, shape = np.random.default_rng(0), (1, config.gpu_num_heads, seqlen, config.gpu_head_dim)
        drawn = (rng.standard_normal(shape, np.float32).astype(GPU_DTYPES[config.gpu_dtype]) for _ in range(4))
        arrays = tuple(map(sent, drawn))
        _, dense = on_gpu(None, config, arrays)
        for block in track(config.gpu_blocks, f"blocks, {seqlen} tokens"):
            calls = {f"dense {way}": call for way, call in dense.items()}
            for density in config.gpu_densities:
                blocks = random_blocks(config.gpu_num_heads, seqlen, block, density)
                kernel, sparse = on_gpu(masks.BlockPattern(blocks, block), config, arrays)
                calls |= {f"{density} {way}": call for way, call in sparse.items()}
            times = time_on_device(calls, repeats=config.gpu_repeats)
            rows = [gpu_row(config, seqlen, block, density, times) for density in config.gpu_densities]
            shared = {"kernel": kernel} | {
                f"{way}_break_even": break_even([(row["density"], 1 / row[f"{way}_speedup"]) for row in rows])
                for way in WAYS
            }
            records += [row | shared for row in rows]
    return [record | gpu_versions() for record in records]


def gpu_row(config: Config, seqlen: int, block: int, density: float, times: Mapping[str, Timing]) -> Record:
    """Return the times and rates at one density, and those of the dense call."""
    exact = num_kept(seqlen, block, density) / (seqlen // block) ** 2
    shape = {"seqlen": seqlen, "num_heads": config.gpu_num_heads, "head_dim": config.gpu_head_dim}
    row: Record = {"part": "gpu", **shape, "dtype": config.gpu_dtype, "block": block, "density": exact}
    for way in WAYS:
        timing, dense = times[f"{density} {way}"], times[f"dense {way}"].median_ms
        row |= {f"{way}_ms": timing.median_ms, f"{way}_spread_ms": timing.spread_ms, f"dense_{way}_ms": dense}
        row |= {f"{way}_speedup": dense / timing.median_ms, f"{way}_over_density": timing.median_ms / dense / exact}
        row |= {f"{way}_tflops": exact * flops(way, "full", batch=1, **shape) / timing.median_ms / 1e9}
    return row


def break_even(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the density at which the time reaches the dense time, from points (density, time) sorted by density.

    The density is interpolated linearly between two points; 1 if even the densest point is faster than dense attention,
    and None if no point is.
    """
    if points[0][1] >= 1:
        return None
    for (thin, fast), (thick, slow) in itertools.pairwise(points):
        if slow >= 1:
            return thin + (thick - thin) * (1 - fast) / (slow - fast)
    return 1.0


def run(config: Config) -> list[Record]:
    """Measure recall, then speed; or only the GPU part."""
    return run_gpu(config) if config.gpu else run_recall(config) + run_speed(config)


def part(records: list[Record], name: str) -> list[Record]:
    """Select the records of one part; for recall, those of the first block size."""
    rows = [row for row in records if row["part"] == name]
    return [row for row in rows if row["block"] == rows[0]["block"]] if name == "recall" else rows


def finding(records: list[Record]) -> str:
    """Describe the results in two sentences."""
    recall, speed = part(records, "recall"), part(records, "speed")
    budget = min((row["budget"] for row in recall if row["pattern"] == "oracle"), key=lambda x: abs(x - 0.25))
    at_budget = {row["pattern"]: row for row in recall if row["budget"] == budget}
    true = at_budget.pop("oracle")
    best = max(at_budget.values(), key=lambda row: row["recall"])
    times = {way: [row[f"{way}_over_density"] for row in speed] for way in WAYS}
    return (
        f"with at most {budget:.0%} of the blocks of {best['block']} the best static pattern, {best['pattern']}, keeps "
        f"{best['recall']:.0%} of the softmax mass (output error {best['output_error']:.0%}); blocks chosen by their "
        f"true mass keep {true['recall']:.0%} ({true['output_error']:.0%}). Block-sparse forward "
        f"takes {min(times['forward']):.2f} to {max(times['forward']):.2f} of density times the dense time, backward "
        f"{min(times['backward']):.2f} to {max(times['backward']):.2f}."
    )


def gpu_table(records: list[Record]) -> Table:
    """Tabulate times, rates and break-even densities of the GPU part."""
    result = Table(title="block-sparse on a GPU; x is speed-up over dense, TFLOP/s are of kept blocks")
    measures = [f"{way} {name}" for way in WAYS for name in ("ms", "x", "TFLOP/s", "pays below")]
    for column in ("seqlen", "block", "density", *measures):
        result.add_column(column, justify="right")
    for row in records:
        cells = [str(row["seqlen"]), str(row["block"]), f"{row['density']:.3f}"]
        for way in WAYS:
            cells += [f"{row[f'{way}_{name}']:.4g}" for name in ("ms", "speedup", "tflops")]
            cells.append(pays_below(row[f"{way}_break_even"], records[0]["density"]))
        result.add_row(*cells)
    return result


def pays_below(density: float | None, smallest: float) -> str:
    """Describe a break-even density in words."""
    return f"< {smallest:.2g}" if density is None else "any" if density == 1 else f"{density:.2f}"


def table(records: list[Record]) -> Group | Table:
    """Tabulate recall by pattern and budget, speed by pattern and length, and the finding; or the GPU part."""
    if records[0]["part"] == "gpu":
        return gpu_table(records)
    recall, speed = part(records, "recall"), part(records, "speed")
    budgets = sorted({row["budget"] for row in recall})
    recall_table = Table(title=f"recall, output error @ density; blocks of {recall[0]['block']}")
    for column in ("pattern", *(f"at most {budget:g}" for budget in budgets)):
        recall_table.add_column(column, justify="left" if column == "pattern" else "right")
    for name in dict.fromkeys(row["pattern"] for row in recall):
        rows = {row["budget"]: row for row in recall if row["pattern"] == name}
        form = "{recall:.2f}, {output_error:.2f} @ {density:.2f}"
        recall_table.add_row(name, *(form.format(**rows[budget]) if budget in rows else "" for budget in budgets))
    timed = Table(title="time; x is speed-up over dense, ∝ is time over density times dense")
    for column in ("pattern", "seqlen", "block", "density", "forward ms", "x", "∝", "backward ms", "x", "∝"):
        timed.add_column(column, justify="left" if column == "pattern" else "right")
    for row in speed:
        numbers = [f"{row[f'{way}_{name}']:.2f}" for way in WAYS for name in ("ms", "speedup", "over_density")]
        timed.add_row(row["pattern"], str(row["seqlen"]), str(row["block"]), f"{row['density']:.3f}", *numbers)
    return Group(recall_table, timed, f"Found: {finding(records)}")


def gpu_plot(records: list[Record]) -> Figure:
    """Plot time relative to dense over density, one panel per pass."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, way in zip(figure.subplots(1, 2), WAYS, strict=True):
        for seqlen, block in dict.fromkeys((row["seqlen"], row["block"]) for row in records):
            rows = [row for row in records if (row["seqlen"], row["block"]) == (seqlen, block)]
            points = [(row["density"], 1 / row[f"{way}_speedup"]) for row in rows]
            axes.plot(*zip(*points, strict=True), marker="o", label=f"blocks of {block}, {seqlen} tokens")
        axes.axline((0, 0), slope=1, color="grey", linestyle=":", label="proportional")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xlabel="density: blocks kept / all blocks", ylabel="time / dense time", title=way, xlim=(0, 1))
        axes.set_ylim(0, None)
        axes.legend(fontsize="small")
    return figure


def plot(records: list[Record]) -> Figure:
    """Plot recall over density and time over density; for the GPU part only the latter."""
    if records[0]["part"] == "gpu":
        return gpu_plot(records)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    recall, speed = part(records, "recall"), part(records, "speed")
    for name, marker in zip(dict.fromkeys(row["pattern"] for row in recall), "osD^v<>PX", strict=True):
        points = [(row["density"], row["recall"]) for row in recall if row["pattern"] == name]
        left.plot(*zip(*points, strict=True), marker=marker, label=name, color="black" if name == "oracle" else None)
    left.set(xlabel="density: blocks kept / all blocks", ylabel="softmax mass kept", xlim=(0, 0.8), ylim=(0, 1))
    left.set_title(f"real attention: MiniLM, 512 tokens, blocks of {recall[0]['block']}", fontsize="medium")
    for color, seqlen in enumerate(dict.fromkeys(row["seqlen"] for row in speed)):
        rows = [row for row in speed if row["seqlen"] == seqlen]
        for way, marker in zip(WAYS, "os", strict=True):
            points = [(row["density"], 1 / row[f"{way}_speedup"]) for row in rows]
            style: dict[str, Any] = {"color": f"C{color}", "marker": marker, "linestyle": "none", "alpha": 0.7}
            right.plot(*zip(*points, strict=True), label=f"{way}, {seqlen} tokens", **style)
    right.set(xlabel="density: blocks kept / all blocks", ylabel="time / dense time", xlim=(0, 0.6), ylim=(0, None))
    right.set_title("cuflash, block-sparse against dense", fontsize="medium")
    for axes, label in ((left, "even attention"), (right, "proportional")):
        axes.axline((0, 0), slope=1, color="grey", linestyle=":", label=label)
        axes.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main(Config, run, table, plot, name=lambda config: "block_sparsity_gpu" if config.gpu else "block_sparsity")
