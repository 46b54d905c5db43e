"""How much more mass do blocks keep if each query chooses its own, compared with one choice for a row of blocks?

    python -m experiments chosen_recall                             # under a minute on two cores
    python -m experiments chosen_recall --data language --ns 2,4    # some of the cases

Activations of four heads of a sentence encoder, bidirectional, and of four heads of a language model, causal, each of
512 tokens (data/README.md), in blocks of 16 keys. A row of 1, 4, 16 or 64 queries keeps `n` blocks, chosen by exact
masses (`oracle`), by compressed keys (`nsa`, from runs of 8 keys with a stride of 4), by mean keys (`pooled`) and, for
rows of one query, by bounds of pages (`quest`). Recall is the mass of the kept blocks, averaged over queries; error is
|o_sparse - o_dense| / |o_dense|, and gradient_error the same for dq, dk and dv together, for a normally distributed
gradient of o. The ratio "4 / n" is the number of distinct blocks that four neighboring queries choose, which a kernel
loads for a tile of four queries, divided by the number for one query. With causal heads, the blocks on the diagonal are
always kept, so that a row of 64 queries keeps at least four.

Expect: a choice per query recalls the most; rows of 16 lose little on the encoder, whose neighboring queries choose
similar blocks, and rows of 64 lose the most with few blocks, because the diagonal uses up the budget.
Found:  as expected. With four blocks per query, the encoder's heads keep 83.0 % of their mass by exact masses, 81.9 %
with rows of 4, 79.3 % with rows of 16 and 67.8 % with rows of 64; with two blocks, 70.8, 69.2, 65.9 and 38.9 %.
Estimates lose more than rows of 16 with exact masses: `quest` keeps 79.9 %, compressed keys 79.0 % and mean keys 78.7 %
of the mass with four blocks per query. The language model's heads keep 99.6 % with two blocks per query and 99.2 % with
two per row of 16. Four neighbors choose 1.3 to 1.5 times as many distinct blocks as one query on the encoder, and 1.05
times on the language model; 64 neighbors 3 to 5.7 and 1.4 to 2.7 times.

Cost: A minute on two cores.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
from cuflash import masks, selectors
from cuflash.selectors import Budget, Forced
from harness import Record, check_names, machine, main, track
from rich.table import Table
from selector_shootout import DATA, Heads, distance, gradients, under

NAMES = ("oracle", "nsa", "pooled", "quest")
OPTIONS: dict[str, dict[str, Any]] = {"nsa": {"compression": (8, 4)}}
NEIGHBORS = (4, 16, 64)  # group sizes of neighboring queries whose distinct blocks are counted


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every combination is a row of the result; `quest` has rows of one query."""

    data: tuple[str, ...] = ("minilm", "language")
    names: tuple[str, ...] = NAMES
    ns: tuple[int, ...] = (2, 4, 8)
    rows: tuple[int, ...] = (1, 4, 16, 64)
    block: int = 16

    def __post_init__(self) -> None:
        check_names(self, {"data": tuple(DATA), "names": NAMES})
        if min(*self.ns, *self.rows) < 1:
            raise ValueError("ns and rows must be at least 1")
        if self.block < 8 or self.block % 8:
            raise ValueError(f"block must be a multiple of 8; got {self.block}")


def chosen_by(name: str, heads: Heads, rows: int, block: int, n: int) -> Any:
    """Return the blocks that a selector keeps: lists per query, or an index of rows."""
    q, k, _, causal = heads
    forced = Forced(diagonal=bool(causal))
    options: dict[str, Any] = {"block": (rows, block), "budget": Budget(top_k=n), "forced": forced, "causal": causal}
    return getattr(selectors, name)(q, k, **options, **OPTIONS.get(name, {}))


def run(config: Config) -> Iterator[Record]:
    """Yield one row for each selection."""
    cases = list(itertools.product(config.data, config.names, config.rows, config.ns))
    cases = [case for case in cases if case[1] != "quest" or case[2] == 1]
    dense: dict[str, tuple[Heads, list[Any]]] = {}
    for data, name, rows, n in track(cases, "selections"):
        if data not in dense:
            heads = DATA[data](512, 4)
            dense[data] = heads, gradients(heads)
        heads, right = dense[data]
        q, k, v, causal = heads
        chosen = chosen_by(name, heads, rows, config.block, n)
        mask = under(causal, chosen)
        recalled = cuflash.study.recall(q, k, v, mask=mask, causal=causal)
        distinct = {f"distinct_{count}": "" for count in NEIGHBORS}
        if isinstance(chosen, masks.ChosenBlocks):
            distinct = {f"distinct_{count}": chosen.distinct(queries=count) for count in NEIGHBORS}
        yield {
            "data": data, "selector": name, "rows": rows, "n": n, "block": config.block, "seqlen": k.shape[-2],
            "num_heads": len(q), "recall": float(recalled.mass.mean()), "error": float(recalled.output_error),
            "gradient_error": distance(gradients(heads, mask), right), **distinct, **machine(),
        }  # fmt: skip


def table(records: list[Record]) -> Table:
    """Tabulate recall by the number of queries in a row, with the errors, and the distinct blocks of neighbors."""
    result = Table(title="recall (error of o, of gradients) by queries that share a choice")
    rows = sorted({row["rows"] for row in records})
    for column in ("data", "n", "selector", *map(str, rows), *(f"{count} / n" for count in NEIGHBORS)):
        result.add_column(column, justify="left" if column in ("data", "selector") else "right")
    for key in dict.fromkeys((row["data"], row["n"], row["selector"]) for row in records):
        of_key = {row["rows"]: row for row in records if (row["data"], row["n"], row["selector"]) == key}
        cells = [
            f"{row['recall']:.3f} ({row['error']:.2f}, {row['gradient_error']:.2f})" if (row := of_key.get(n)) else ""
            for n in rows
        ]
        one = of_key.get(1)
        shared = [f"{one[f'distinct_{count}']:.2f}" if one else "" for count in NEIGHBORS]
        result.add_row(key[0], str(key[1]), key[2], *cells, *shared)
    return result


def plot(records: list[Record]) -> Any:
    """Plot recall over the number of queries in a row, by data and number of blocks."""
    import matplotlib.pyplot as plt

    data, ns = (list(dict.fromkeys(row[name] for row in records)) for name in ("data", "n"))
    figure, axes = plt.subplots(1, len(data) * len(ns), figsize=(2.2 * len(data) * len(ns), 2.6), squeeze=False)
    for axis, (of_data, n) in zip(axes[0], itertools.product(data, ns)):
        for name in dict.fromkeys(row["selector"] for row in records):
            rows = [row for row in records if (row["data"], row["n"], row["selector"]) == (of_data, n, name)]
            axis.plot([row["rows"] for row in rows], [row["recall"] for row in rows], marker=".", label=name)
        axis.set_xscale("log", base=4)
        axis.set_title(f"{of_data}, {n} blocks", fontsize=8)
        axis.set_xlabel("queries of a row", fontsize=8)
    axes[0][0].set_ylabel("recall")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main(Config, run, table, plot)
