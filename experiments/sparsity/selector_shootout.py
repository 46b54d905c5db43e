"""How much of the softmax mass does each block selector find, and what does the selection cost?

    python -m experiments selector_shootout                                    # a minute on two cores
    python -m experiments selector_shootout --data minilm --top-ks 2,4         # some of the cases
    python -m experiments selector_shootout --gpu                              # on a GPU, in float16
    python -m experiments selector_shootout --data my.npz --causal --names oracle,pooled,my_module:selector

Data: activations of four heads of layer 2 of a sentence encoder, bidirectional, and of four heads of a layer of a
language model of source text, causal (`language`; data/README.md describes both); and causal heads with a known
structure and noise: in `clusters`, queries and keys belong to one of eight topics that change every 32 tokens; in
`columns`, all queries attend a few keys; in `slashes`, each query attends the keys at a few distances. Every selector
keeps the same number of blocks in each row, including the diagonal if the data is causal. `vertical_slash` keeps equal
numbers of columns and diagonals: the largest power of two for which these cross no more blocks in total than the budget
allows, but at least one. Recall is exact, and averaged over the queries; error is |o_sparse - o_dense| / |o_dense|, and
gradient_error the same for dq, dk and dv together, for a random gradient of o. Times are medians of alternating calls:
both_ms for a selection and attention to it, select_ms for the selection, attention_ms for a call with an existing
index. On a GPU, the data with a known structure has 16 heads of 16384 tokens, in blocks of 64. `quest`, a selector for
decoding, chooses pages of 16 keys for each of the last 32 queries, and is compared with the selectors that assume no
structure. Your own data is an .npz file of q, k and v, [..., heads, tokens, dim], causal with --causal. Your own
selector is given as MODULE:NAME, a function `(q, k, *, block, budget, causal, forced)` that returns an index, like
those of `cuflash.selectors`.

Expect: at equal numbers of blocks per row, nothing is better than the oracle, every selector is better than random, and
antidiagonals are best if the structure is finer than a block.
Found:  with 4 of 16 blocks per row, the oracle keeps 86 % of the encoder's mass, means and antidiagonals 83 %,
compressed keys 82 %, and the blocks nearest to the diagonal 76 %. The language model's heads attend the last
characters: two blocks hold all but 0.2 % of their mass, with `local` as with the oracle, and random blocks 93 %. All
three find clusters of the size of a block. On columns, antidiagonals keep 69 % and means 66 %, where the oracle keeps
78 %. On sharp slashes, antidiagonals keep 48 %, less than the 66 % of random blocks, because they sum over eight
distances of which one matters. Equal numbers of columns and diagonals, by powers of two, keep less than random blocks
on columns (42 % and 57 %), and 91 % on slashes, the most except for the oracle. The times were measured on a busy
machine with one thread.

Cost: A minute on two cores; --gpu half a minute of a GPU.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from block_sparsity import sent
from cuflash import masks, selectors
from cuflash.selectors import Budget, Forced
from cuflash.study.command import load_heads
from cuflash.study.own_patterns import loaded
from harness import (
    Record, check_names, gpu_versions, machine, main, time_alternately, time_on_device, track, why_no_gpu,
)  # fmt: skip
from rich.console import Group
from rich.table import Table
from workloads import activations, language_activations

SELECTORS = ("oracle", "pooled", "antidiagonal", "nsa", "vertical_slash", "local", "random")
OF_PAGES = ("oracle", "quest", "local", "random")
PAGE, LAST = 16, 32  # keys per page, and number of last queries that choose pages
CAPTURED = ("minilm", "language")  # data of 512 captured tokens
CALLS = ("select", "attention", "both", "dense")
Heads = tuple[Any, Any, Any, bool | str]  # q, k, v, and whether the mask is causal, or its alignment


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every combination is a row; fields that start with gpu apply to data of known structure with --gpu."""

    gpu: bool = False
    data: tuple[str, ...] = (*CAPTURED, "clusters", "columns", "slashes")
    names: tuple[str, ...] = (*SELECTORS, "quest")
    top_ks: tuple[int, ...] = (2, 4, 8)
    block: int = 32
    seqlen: int = 512
    repeats: int = 2
    gpu_top_ks: tuple[int, ...] = (16, 32, 64)
    gpu_block: int = 64
    gpu_seqlen: int = 16384
    gpu_num_heads: int = 16
    gpu_repeats: int = 5
    causal: bool = field(default=False, metadata={"help": "queries of one's own data attend no later keys"})

    def __post_init__(self) -> None:
        files = [name for name in self.data if is_file(name)]
        check_names(self, {"data": (*DATA, *files), "names": (*SELECTORS, *OF_PAGES, *self.own)})
        for name in files:
            load_heads(Path(name))
        for name in self.own:
            if not callable(loaded(name)):
                raise ValueError(f"{name} must be a function of (q, k, *, block, budget, causal, forced)")
        counts = (*self.top_ks, *self.gpu_top_ks, self.repeats, self.gpu_num_heads, self.gpu_repeats)
        if min(counts) < 1:
            raise ValueError("top_ks, repeats and gpu_num_heads must be at least 1")
        for block, seqlen in ((self.block, self.seqlen), (self.gpu_block, self.gpu_seqlen)):
            if block < 16 or block % 16 or seqlen < block:
                raise ValueError(f"block must be a multiple of 16 and at most seqlen; got {block} and {seqlen}")

    @property
    def own(self) -> tuple[str, ...]:
        """The user's own selectors."""
        return tuple(name for name in self.names if ":" in name)

    def sizes(self, data: str) -> tuple[int, int, tuple[int, ...], int]:
        """Return tokens, block size, budgets, and the number of heads with known structure."""
        if self.gpu and data not in CAPTURED and not is_file(data):
            return self.gpu_seqlen, self.gpu_block, self.gpu_top_ks, self.gpu_num_heads
        return self.seqlen, self.block, self.top_ks, 4


def is_file(data: str) -> bool:
    return data.endswith(".npz")


def of_file(path: Path, causal: bool) -> Heads:
    """Load heads from a file; those of all batch entries are concatenated."""
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in load_heads(path))
    return q, k, v, causal


def minilm(seqlen: int, num_heads: int) -> Heads:
    q, k, v = (x[1, :4] for x in activations())
    return q, k, v, False


def language(seqlen: int, num_heads: int) -> Heads:
    return *language_activations(), True


def _noise(seqlen: int, num_heads: int) -> list[np.ndarray]:
    """Draw q, k and v of heads with head_dim 32."""
    return list(np.random.default_rng(0).standard_normal((3, num_heads, seqlen, 32), dtype=np.float32))


def clusters(seqlen: int, num_heads: int) -> Heads:
    q, k, v = _noise(seqlen, num_heads)
    rng = np.random.default_rng(1)
    topics = np.resize(rng.integers(0, 8, -(-seqlen // 32)).repeat(32), seqlen)
    means = 2 * rng.standard_normal((8, 32), dtype=np.float32)
    return q + means[topics], k + means[topics], v, True


def columns(seqlen: int, num_heads: int) -> Heads:
    q, k, v = _noise(seqlen, num_heads)
    direction = np.full(32, 32**-0.5, np.float32)
    k[:, np.random.default_rng(1).choice(seqlen, 12, replace=False)] += 18 * direction
    return q + 3 * direction, k, v, True


def slashes(seqlen: int, num_heads: int) -> Heads:
    """Return heads with rotary positions, whose scores depend only on the distance, with peaks at three distances."""
    q, k, v = _noise(seqlen, num_heads)
    frequencies = 2 * np.pi * np.random.default_rng(1).integers(1, seqlen // 2, 16) / seqlen
    angles = np.arange(seqlen)[:, None] * frequencies
    turned = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    shifted = sum(np.roll(turned, distance, axis=0) for distance in (0, seqlen // 8, seqlen // 3))
    return 3 * shifted + 0.3 * q, 3 * turned + 0.3 * k, v, True


HEADS = (minilm, language, clusters, columns, slashes)
DATA: dict[str, Callable[[int, int], Heads]] = {each.__name__: each for each in HEADS}


def selection(name: str, heads: Heads, block: int | tuple[int, int], top_k: int) -> Callable[[], Any]:
    """Return a function that runs the selector and returns the block index or the lists that it chose."""
    q, k, _, causal = heads
    options: dict[str, Any] = {"block": block, "causal": causal, "forced": Forced(diagonal=bool(causal))}
    if name == "quest":
        options["page_size"] = options.pop("block")[1]
    if name != "vertical_slash":
        selector = loaded(name) if ":" in name else getattr(selectors, name)
        return lambda: under(causal, selector(q, k, budget=Budget(top_k=top_k), **options))
    most = selectors.local(q, k, budget=Budget(top_k=top_k), **options).num_entries
    count = 1
    while True:
        wider = selectors.vertical_slash(q, k, **_lines(2 * count), **options)
        if wider.num_entries > most or 2 * count > q.shape[-2]:
            return lambda: selectors.vertical_slash(q, k, **_lines(count), **options)
        count *= 2


def under(causal: bool | str, chosen: Any) -> Any:
    """Return the blocks that queries chose, under their causal mask; an index already includes the mask."""
    if not causal or not isinstance(chosen, masks.ChosenBlocks):
        return chosen
    return chosen & masks.Causal(causal if isinstance(causal, str) else None)


def density(mask: Any, heads: Heads, block: Any) -> float:
    """Return the fraction of all blocks that is kept."""
    q, k, *_ = heads
    index = mask if isinstance(mask, cuflash.BlockIndex) else cuflash.BlockIndex.from_mask(
        mask, q.shape[-2], k.shape[-2], block, num_heads=len(q)
    )  # fmt: skip
    return index.num_entries / (index.num_q_blocks * index.num_kv_blocks * index.num_heads)


def _lines(count: int) -> dict[str, Budget]:
    return {"vertical": Budget(top_k=count), "slash": Budget(top_k=count)}


def gradients(heads: Heads, index: Any = None) -> list[Any]:
    """Compute dq, dk and dv of dense attention, or of attention with an index."""
    q, k, v, causal = heads
    do = np.random.default_rng(2).standard_normal(q.shape, dtype=np.float32).astype(q.dtype)
    _, vjp = cuflash.attention_vjp(q, k, v, mask=index, causal=index is None and causal)
    return list(vjp(do if isinstance(q, np.ndarray) else sent(do)))


def distance(actual: list[Any], right: list[Any]) -> float:
    """Return the norm of the difference divided by the norm of the right-hand arrays."""
    wide = [(x.astype(np.float32), y.astype(np.float32)) for x, y in zip(actual, right, strict=True)]
    apart = sum(float(((x - y) ** 2).sum()) for x, y in wide)
    return (apart / sum(float((y * y).sum()) for _, y in wide)) ** 0.5


def timed(config: Config, heads: Heads, select: Callable[[], Any], index: Any) -> dict[str, float]:
    """Return the milliseconds of each call."""
    q, k, v, causal = heads
    calls: dict[str, Callable[[], object]] = {
        "select": select,
        "attention": lambda: cuflash.attention(q, k, v, mask=index),
        "both": lambda: cuflash.attention(q, k, v, mask=select()),
        "dense": lambda: cuflash.attention(q, k, v, causal=causal),
    }
    if config.gpu:
        times = time_on_device(calls, repeats=config.gpu_repeats, warmup=1)
    else:
        times = time_alternately(calls, repeats=config.repeats)
    return {f"{call}_ms": timing.median_ms for call, timing in times.items()}


def run(config: Config) -> Iterator[Record]:
    """Yield one row per data, selector and budget: for blocks of all queries, then for pages of the last queries."""
    if config.gpu and (reason := why_no_gpu()):
        sys.exit(f"selector_shootout --gpu times kernels on a GPU: {reason}")
    constants = machine() | (gpu_versions() if config.gpu else {})
    of_blocks = (*SELECTORS, *config.own)
    cases = [(data, names) for names in (of_blocks, OF_PAGES) for data in config.data]
    for data, names in track(cases, "data"):
        seqlen, block, top_ks, num_heads = config.sizes(data)
        heads = of_file(Path(data), config.causal) if is_file(data) else DATA[data](seqlen, num_heads)
        q, k, v, causal = heads
        if config.gpu:
            q, k, v = (sent(x.astype(np.float16)) for x in (q, k, v))
        if names == OF_PAGES and "quest" in config.names:
            heads = q[:, -LAST:], k, v, causal and "bottom_right"
            pages = [top_k * block // PAGE for top_k in top_ks]
            yield from rows(config, data, names, heads, (1, PAGE), pages, constants)
        elif names == of_blocks:
            yield from rows(config, data, names, (q, k, v, causal), block, top_ks, constants)


def rows(
    config: Config, data: str, names: tuple[str, ...], heads: Heads, block: Any, top_ks: Sequence[int],
    constants: Record,
) -> Iterator[Record]:  # fmt: skip
    """Yield one row per selector and budget, for one set of heads."""
    q, k, v, causal = heads
    right = gradients(heads)
    for name, top_k in itertools.product((name for name in names if name in config.names), top_ks):
        select = selection(name, heads, block, top_k)
        index = select()
        recalled = cuflash.study.recall(q, k, v, mask=index, causal=causal)
        yield {
            "data": data, "selector": name, "top_k": top_k, "block": f"1 x {PAGE}" if names == OF_PAGES else block,
            "seqlen": k.shape[-2], "num_heads": len(q), "dtype": q.dtype.name, "density": density(index, heads, block),
            "recall": float(recalled.mass.mean()), "error": float(recalled.output_error),
            "gradient_error": distance(gradients(heads, index), right),
            **timed(config, heads, select, index), **constants,
        }  # fmt: skip


def table(records: list[Record]) -> Group:
    """Tabulate, per data and block size, recall and errors by budget, and the times for the largest budget."""
    panels = []
    for data, block in dict.fromkeys((row["data"], row["block"]) for row in records):
        of_data = [row for row in records if (row["data"], row["block"]) == (data, block)]
        budgets = sorted({row["top_k"] for row in of_data})
        sizes = f"{data}, {of_data[0]['seqlen']} tokens in blocks of {block}"
        shown = Table(title=f"{sizes}: recall (error, of gradients) by blocks a row")
        for column in ("selector", *map(str, budgets), *(f"{call} ms" for call in CALLS)):
            shown.add_column(column, justify="left" if column == "selector" else "right")
        for name in dict.fromkeys(row["selector"] for row in of_data):
            rows = sorted((row for row in of_data if row["selector"] == name), key=lambda row: row["top_k"])
            cells = (f"{row['recall']:.2f} ({row['error']:.2f}, {row['gradient_error']:.2f})" for row in rows)
            shown.add_row(name, *cells, *(f"{rows[-1][f'{call}_ms']:.3g}" for call in CALLS))
        panels.append(shown)
    return Group(*panels)


def plot(records: list[Record]) -> Any:
    """Plot recall over the fraction of blocks, and the time of selection and attention relative to dense, by data."""
    blocks = [row for row in records if "x" not in str(row["block"])]
    names = list(dict.fromkeys(row["data"] for row in blocks))
    figure, axes = plt.subplots(2, len(names), figsize=(2 * len(names), 3.8), sharex="col", squeeze=False)
    for column, data in zip(axes.T, names):
        for name in dict.fromkeys(row["selector"] for row in blocks):
            rows = [row for row in blocks if (row["data"], row["selector"]) == (data, name)]
            shares = [row["density"] for row in rows]
            style = ":" if name in ("local", "random") else "--" if name == "oracle" else "-"
            column[0].plot(shares, [row["recall"] for row in rows], style, marker="o", markersize=3, label=name)
            column[1].plot(shares, [row["both_ms"] / row["dense_ms"] for row in rows], style, marker="o", markersize=3)
        column[0].set(title=data, ylim=(0, 1.03))
        column[1].axhline(1, color="black", linewidth=0.8)
        column[1].set(xlabel="density", yscale="log")
    axes[0][0].set_ylabel("recall")
    axes[1][0].set_ylabel("selection and attention / dense")
    lines, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, ncols=len(labels), loc="upper center", fontsize="small")
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    return figure


# Columns that distinguish the rows of a result.
ROW = ("gpu", "data", "selector", "top_k", "block", "seqlen")

if __name__ == "__main__":
    main(
        Config, run, table, plot, replacing=lambda config: ROW if config.gpu else (),
        name=lambda config: "selector_shootout_gpu" if config.gpu else "selector_shootout",
    )  # fmt: skip
