"""How much of the softmax does each selector of blocks find, and what does finding it cost?

    python -m experiments selector_shootout                                    # a minute on two cores
    python -m experiments selector_shootout --data minilm --top-ks 2,4         # a part of it

Data: activations of four heads of layer 2 of a sentence encoder, bidirectional, and of four heads of a layer of a
language model of source text, causal (`language`; data/README.md has both); and heads of known structure, causal:
`clusters`, whose queries and keys belong to one of eight topics that change every 32 tokens;
`columns`, where all queries attend a few keys; `slashes`, where each attends the keys at a few distances. All hold
noise beside.
Every selector keeps as many blocks in each row, those on the diagonal among them if the data is causal; of
`vertical_slash`, which keeps columns and diagonals, as many of both, a power of two, as cross no more blocks over all
than the budget has, and one of both at least. Recall is exact, the mean over queries; error is |o_sparse - o_dense|
over |o_dense|. Times are medians of calls made in turn, with a new index each time: attention_ms of a call with the
index made before.

Expect: nothing with as many blocks in each row above the oracle, every selector above random, antidiagonals where
structure is finer than a block.
Found:  with 4 of 16 blocks a row the oracle keeps 86 % of the encoder's mass, means and antidiagonals 83 %, compressed
keys 82 %, and the blocks nearest to the diagonal 76 %. The language model's heads look at the last characters: two
blocks hold all but 0.2 % of their mass, by `local` as by the oracle, and random blocks 94 %. Clusters of a block's size
all three find. On columns antidiagonals keep 69 % and means 66 % of what the oracle finds in 78 %. Antidiagonals of
sharp slashes keep 48 %, less than random blocks with 65 %: a sum over eight distances of which one counts. Columns and
diagonals in equal numbers, by powers of two, keep less than random blocks on columns (42 % and 55 %), and the most, 91
%, on slashes but for the oracle. The times are of a busy machine with one thread.

Cost: A minute on two cores.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import numpy as np
from cuflash import selectors
from cuflash.selectors import Budget, Forced
from harness import Record, check_names, machine, main, time_alternately, track
from rich.table import Table
from workloads import activations, language_activations

SELECTORS = ("oracle", "pooled", "antidiagonal", "nsa", "vertical_slash", "local", "random")
Heads = tuple[np.ndarray, np.ndarray, np.ndarray, bool]  # q, k, v and whether the mask is causal


@dataclass(frozen=True, kw_only=True)
class Config:
    data: tuple[str, ...] = ("minilm", "language", "clusters", "columns", "slashes")
    names: tuple[str, ...] = SELECTORS
    top_ks: tuple[int, ...] = (2, 4, 8)
    block: int = 32
    seqlen: int = 512
    repeats: int = 2

    def __post_init__(self) -> None:
        check_names(self, {"data": DATA, "names": SELECTORS})
        if min(self.top_ks, default=0) < 1 or self.repeats < 1:
            raise ValueError("top_ks and repeats must be at least 1")
        if self.block < 16 or self.block % 16 or self.seqlen < self.block:
            raise ValueError(f"block must be a multiple of 16 and at most seqlen; got {self.block} and {self.seqlen}")


def minilm(seqlen: int) -> Heads:
    q, k, v = (x[1, :4] for x in activations())
    return q, k, v, False


def language(seqlen: int) -> Heads:
    return *language_activations(), True


def _noise(seqlen: int) -> list[np.ndarray]:
    """q, k and v of four heads of 32 columns."""
    return list(np.random.default_rng(0).standard_normal((3, 4, seqlen, 32), dtype=np.float32))


def clusters(seqlen: int) -> Heads:
    q, k, v = _noise(seqlen)
    rng = np.random.default_rng(1)
    topics = np.resize(rng.integers(0, 8, -(-seqlen // 32)).repeat(32), seqlen)
    means = 2 * rng.standard_normal((8, 32), dtype=np.float32)
    return q + means[topics], k + means[topics], v, True


def columns(seqlen: int) -> Heads:
    q, k, v = _noise(seqlen)
    direction = np.full(32, 32**-0.5, np.float32)
    k[:, np.random.default_rng(1).choice(seqlen, 12, replace=False)] += 18 * direction
    return q + 3 * direction, k, v, True


def slashes(seqlen: int) -> Heads:
    """Rotations by position, whose products depend on the distance alone and peak at three of them."""
    q, k, v = _noise(seqlen)
    frequencies = 2 * np.pi * np.random.default_rng(1).integers(1, seqlen // 2, 16) / seqlen
    angles = np.arange(seqlen)[:, None] * frequencies
    turned = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    shifted = sum(np.roll(turned, distance, axis=0) for distance in (0, seqlen // 8, seqlen // 3))
    return 3 * shifted + 0.3 * q, 3 * turned + 0.3 * k, v, True


HEADS = (minilm, language, clusters, columns, slashes)
DATA: dict[str, Callable[[int], Heads]] = {each.__name__: each for each in HEADS}


def selection(name: str, heads: Heads, config: Config, top_k: int) -> Callable[[], Any]:
    """A function that makes the index of a selector."""
    q, k, _, causal = heads
    options: dict[str, Any] = {"block": config.block, "causal": causal, "forced": Forced(diagonal=causal)}
    if name != "vertical_slash":
        return lambda: getattr(selectors, name)(q, k, budget=Budget(top_k=top_k), **options)
    most = selectors.local(q, k, budget=Budget(top_k=top_k), **options).num_entries
    count = 1
    while True:
        wider = selectors.vertical_slash(q, k, **_lines(2 * count), **options)
        if wider.num_entries > most or 2 * count > q.shape[-2]:
            return lambda: selectors.vertical_slash(q, k, **_lines(count), **options)
        count *= 2


def _lines(count: int) -> dict[str, Budget]:
    return {"vertical": Budget(top_k=count), "slash": Budget(top_k=count)}


def run(config: Config) -> Iterator[Record]:
    cases = [(data, name, top_k) for data in config.data for name in config.names for top_k in config.top_ks]
    for data, name, top_k in track(cases, "selectors"):
        heads = DATA[data](config.seqlen)
        q, k, v, causal = heads
        select = selection(name, heads, config, top_k)
        index = select()
        kept = cuflash.recall(q, k, v, index, causal=causal)
        calls: dict[str, Callable[[], object]] = {
            "select": select,
            "attention": lambda: cuflash.attention(q, k, v, mask=index),
            "dense": lambda: cuflash.attention(q, k, v, causal=causal),
        }
        times = time_alternately(calls, repeats=config.repeats)
        grid = index.num_q_blocks * index.num_kv_blocks * index.num_heads
        yield {
            "data": data, "selector": name, "top_k": top_k, "block": config.block, "seqlen": q.shape[-2],
            "density": index.num_entries / grid, "recall": float(kept.mass.mean()), "error": kept.output_error,
            **{f"{call}_ms": time.median_ms for call, time in times.items()}, **machine(),
        }  # fmt: skip


def table(records: list[Record]) -> Table:
    """Recall and error by data and budget, and times of the largest budget."""
    made = Table(title="recall (error) with top_k blocks a row; ms of selection and attention against dense")
    budgets = sorted({row["top_k"] for row in records})
    for column in ("data", "selector", *map(str, budgets), "select", "attention", "dense"):
        made.add_column(column, justify="left" if column in ("data", "selector") else "right")
    for data, name in dict.fromkeys((row["data"], row["selector"]) for row in records):
        rows = [row for row in records if (row["data"], row["selector"]) == (data, name)]
        cells = [f"{row['recall']:.2f} ({row['error']:.2f})" for row in sorted(rows, key=lambda row: row["top_k"])]
        cells += [f"{rows[-1][f'{call}_ms']:.1f}" for call in ("select", "attention", "dense")]
        made.add_row(data, name, *cells)
    return made


if __name__ == "__main__":
    main(Config, run, table)
