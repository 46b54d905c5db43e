"""Errors of random examples relative to their bounds: the largest of each result, and their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis
from cuflash.testing import assertions, strategies
from harness import Record
from hypothesis import strategies as st
from rich.table import Table


def largest_shares(
    structures: st.SearchStrategy[strategies.Structure],
    shares: Callable[[assertions.Example], dict[str, float]],
    names: Sequence[str],
    *,
    seed: int,
    size: int,
) -> Record:
    """Draw examples from a seed; return the largest relative error of each result with the structure of its example.

    `shares` returns, for each result of an example, the largest error divided by its bound; more than 1 is a violation.
    """
    record: Record = {"examples": 0, "outside": 0} | dict.fromkeys(names, 0.0)
    worst = dict.fromkeys((f"worst_{name}" for name in names), "")

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=size, phases=[hypothesis.Phase.generate], database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(structures)
    def draw(structure: strategies.Structure) -> None:
        by_result = shares(structure.example())
        record["examples"] += 1
        record["outside"] += any(share > 1 for share in by_result.values())
        for name, share in by_result.items():
            if share > record[name]:
                record[name], worst[f"worst_{name}"] = share, repr(structure)

    draw()
    return record | worst


def summary(dtype: str, shards: Sequence[Record], names: Sequence[str]) -> Record:
    """Return one record for all shards of a dtype."""
    total: Record = {"dtype": dtype} | {name: sum(shard[name] for shard in shards) for name in ("examples", "outside")}
    for name in names:
        worst = max(shards, key=lambda shard: shard[name])
        total |= {name: worst[name], f"worst_{name}": worst[f"worst_{name}"]}
    return total


def table(records: list[Record], names: Sequence[str]) -> Table:
    """Return a table of the largest shares, a row for each dtype."""
    result = Table(title="largest error over its bound")
    for column in ("dtype", "examples", "outside", *names):
        result.add_column(column, justify="left" if column == "dtype" else "right")
    for row in records:
        shown = (f"{row[name]:.3f}" for name in names)
        result.add_row(row["dtype"], str(row["examples"]), str(row["outside"]), *shown)
    return result
