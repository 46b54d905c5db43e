"""How close to their bounds are the errors of random score functions?

    python -m experiments score_bounds                     # 20,000 examples a dtype
    python -m experiments score_bounds --examples 500      # minutes

Draws examples from `cuflash.testing.structures` with a random score function, whose real arrays all have gradients, or
with a sink; runs both passes on the host, and records the largest error divided by its bound for every dtype and
result. `captured` covers the gradients of the function's arrays. The number of a shard is the seed of its examples.

Every finished shard is stored in build/results/score_bounds_shards.csv, so that an interrupted run continues: shards of
the same size and commit are not drawn again, unless the commit has uncommitted changes. The result is written after
each shard, and its column `examples` is the number of examples so far.

Expect: never above 1.
Found:  at most 0.67 of the bound over the 20,000 published examples of each dtype.

Cost: 40 ms per example on one core.
"""

import functools
import math
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import bound_shares
import cuflash
from cuflash.testing import assertions, strategies
from harness import UNPUBLISHED, Record, machine, main, read_csv, track, write_csv
from hypothesis import strategies as st
from rich.table import Table

RESULTS = ("o", "lse", "dq", "dk", "dv", "captured", "dsink")
DTYPES = ("float16", "bfloat16", "float32", "float64")
SHARDS = UNPUBLISHED / "score_bounds_shards.csv"
OF_A_SHARD = ("dtype", "shard", "shard_size", "commit")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The number of examples to draw; the defaults are the published run."""

    examples: int = field(default=20_000, metadata={"help": "examples of each dtype"})
    shard_size: int = 250
    dtypes: tuple[str, ...] = DTYPES
    processes: int = 2

    def __post_init__(self) -> None:
        if min(self.examples, self.shard_size, self.processes) < 1:
            raise ValueError("examples, shard_size and processes must be positive")
        if unknown := set(self.dtypes) - {*DTYPES}:
            raise ValueError(f"unknown dtype {', '.join(sorted(unknown))}")


def shares(example: assertions.Example) -> dict[str, float]:
    """Return the largest error over its bound for each result of an example; infinite if the bound is violated."""
    names = tuple(example.wrt) + ("sink",) * (example.sink is not None)
    (o, lse), vjp = cuflash.attention_vjp(
        example.q, example.k, example.v, mask=example.mask, scale=example.scale, score=example.score,
        sink=example.sink, wrt=names, return_lse=True,
    )  # fmt: skip
    gradients = vjp(example.do, example.dlse)
    dq, dk, dv = gradients
    results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    arguments: dict[str, dict[str, object]] = {name: {name: array} for name, array in results.items()}
    if example.wrt:
        arguments["captured"] = {"others": {name: gradients[name] for name in example.wrt}}
    if example.sink is not None:
        arguments["dsink"] = {"dsink": gradients["sink"]}
    worst = {}
    for name, compared in arguments.items():
        try:
            worst[name] = assertions.assert_within_bounds(example, **compared)
        except AssertionError:
            worst[name] = math.inf
    return worst


def draw_shard(shard: tuple[str, int], size: int) -> Record:
    """Draw examples of one dtype, seeded by the shard number; return the largest shares and their examples."""
    dtype, number = shard
    drawn = functools.partial(
        strategies.structures, dtypes=(dtype,), most_scores=1 << 8, longest=40, widest=16
    )
    with_function, with_sink = drawn(has_score=True), drawn(has_sink=True)
    structures = st.one_of(with_function, with_function, with_function, with_sink)
    return {"dtype": dtype} | bound_shares.largest_shares(structures, shares, RESULTS, seed=number, size=size)


def run(config: Config) -> Iterator[Record]:
    """Yield the largest shares per dtype and result, updated after each shard."""
    count = math.ceil(config.examples / config.shard_size)
    wanted = [(dtype, number) for number in range(count) for dtype in config.dtypes]
    stored = kept_shards(config.shard_size)
    done = {shard: stored[shard] for shard in wanted if shard in stored}
    todo = [shard for shard in wanted if shard not in stored]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # for the processes started below, of which each has one core
    with multiprocessing.get_context("spawn").Pool(config.processes) as pool:
        results = pool.imap(functools.partial(draw_shard, size=config.shard_size), todo)
        for dtype, number in track(todo, "shards"):
            done[dtype, number] = record = next(results)
            write_csv(SHARDS, [record | {"shard": number, "shard_size": config.shard_size}], OF_A_SHARD)
            yield _summary(dtype, done)
    for dtype in config.dtypes:
        yield _summary(dtype, done)


def kept_shards(size: int) -> dict[tuple[str, int], Record]:
    """Return the shards of this size that this commit has drawn before, by dtype and number."""
    commit = machine()["commit"]
    if commit.endswith("-dirty") or not SHARDS.exists():
        return {}
    shards = {}
    for row in read_csv(SHARDS):
        if row["commit"] == commit and row["shard_size"] == str(size):
            worst: Record = {f"worst_{name}": row[f"worst_{name}"] for name in RESULTS}
            numbers: Record = {name: int(row[name]) for name in ("examples", "outside")}
            record = numbers | {name: float(row[name]) for name in RESULTS} | worst
            shards[row["dtype"], int(row["shard"])] = {"dtype": row["dtype"]} | record
    return shards


def _summary(dtype: str, shards: dict[tuple[str, int], Record]) -> Record:
    return bound_shares.summary(dtype, [record for (of, _), record in shards.items() if of == dtype], RESULTS)


def table(records: list[Record]) -> Table:
    """Tabulate the last record of each dtype."""
    return bound_shares.table(list({record["dtype"]: record for record in records}.values()), RESULTS)


if __name__ == "__main__":
    main(Config, run, table, replacing=("dtype",))
