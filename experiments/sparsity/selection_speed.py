"""What do block masses and selections cost on a GPU, compared with dense attention and attention to the selection?

    python -m experiments selection_speed --publish                    # 4 heads of 128, 16384 and 65536 tokens, float16
    python -m experiments selection_speed --seqlens 16384              # a part of it
    python -m experiments selection_speed --kinds queries --query-seqlens 16384,32768    # choices of each query alone

Every row is a call on the device, timed alternately with the dense call of the same length: `block_mass` in blocks of
128, with and without the lse of an earlier call; a selection of 128-token blocks that keeps at most a quarter of the
dense call's blocks; and the selection followed by attention to the selected blocks. Each call repeats the selection.
Times are measured between CUDA events. `us` is the host time of a warm call in microseconds. Random q and k do not
affect the time, because the number of kept blocks per row does not depend on q and k.

Rows with "per query" are choices of each query among blocks of 64 keys, in lists, for 64 query heads of bfloat16 that
share 4 key/value heads, with a causal mask: `nsa` with compressed keys and their lse, of which a layer has both, and
MoBA (`pooled` with ``pool_queries=False``) for each query head and for each key/value head.

Expect: block masses need half of the products of attention, and so half of its time or slightly more; means cost almost
nothing; antidiagonals of 8 need a sixteenth of the products.
Found:  at 65536 tokens a selection by means takes 0.04 of the dense call's time, and 0.08 with a causal mask;
antidiagonals of 8, limited by the level-2 cache, take 0.18 and 0.33; masses take 0.76 to 1.22. Selection and attention
together are faster than dense attention from 16384 tokens on; selection_steps.log at commit b648872e lists the
experiments.

Cost: Half a minute of a GPU.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
import simt_speed
from cuflash import selectors
from cuflash.selectors import Budget
from harness import Record, check_names, gpu_versions, machine, main, time_on_device, track, why_no_gpu
from rich.table import Table

BLOCK = 128
QUERY_BLOCK, COMPRESSION = 64, (32, 16)  # of choices per query
SELECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "pooled": ("pooled", {}),
    "antidiagonal, stride 8": ("antidiagonal", {"stride": 8}),
    "antidiagonal, stride 16": ("antidiagonal", {"stride": 16}),
    "random": ("random", {}),
    "oracle": ("oracle", {}),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The lengths to measure; each of `seqlens` has a dense call and the selections, with and without a causal mask."""

    kinds: tuple[str, ...] = ("blocks", "queries")
    seqlens: tuple[int, ...] = (16384, 65536)
    query_seqlens: tuple[int, ...] = (16384,)
    num_heads: int = 4
    query_heads: int = 64
    query_kv_heads: int = 4
    query_top_k: int = 16
    head_dim: int = 128
    share: int = 4
    repeats: int = 10
    host_calls: int = 50

    def __post_init__(self) -> None:
        check_names(self, {"kinds": ("blocks", "queries")})
        sizes = self.num_heads, self.head_dim, self.share, self.query_kv_heads, self.query_top_k
        if min(*self.seqlens, *self.query_seqlens, *sizes, self.repeats, self.host_calls) < 1:
            raise ValueError("lengths, numbers of heads, head_dim, share, repeats and host_calls must be positive")
        if self.query_heads < 1 or self.query_heads % self.query_kv_heads:
            raise ValueError("query_kv_heads must divide query_heads")
        if any(seqlen % BLOCK for seqlen in self.seqlens):
            raise ValueError(f"seqlens must be multiples of {BLOCK}; got {self.seqlens}")


def calls_of(q: Any, k: Any, v: Any, causal: bool, share: int) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return the calls by name, and the fraction of the dense call's blocks that a selection keeps."""
    num_blocks = q.shape[-2] // BLOCK
    every = num_blocks * (num_blocks + 1) // 2 if causal else num_blocks**2
    top_k = max(1, num_blocks // share // (2 if causal else 1))
    _, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    calls: dict[str, Callable[[], Any]] = {
        "dense attention": lambda: cuflash.attention(q, k, v, causal=causal),
        "block_mass with lse": lambda: cuflash.study.block_mass(q, k, block=BLOCK, causal=causal, lse=lse),
        "block_mass": lambda: cuflash.study.block_mass(q, k, block=BLOCK, causal=causal),
    }
    densities = {}
    for name, (selector, options) in SELECTIONS.items():
        arguments = {"block": BLOCK, "budget": Budget(top_k=top_k), "causal": causal, **options}

        def select(selector: str = selector, arguments: dict[str, Any] = arguments) -> Any:
            return getattr(selectors, selector)(q, k, **arguments)

        calls[name] = select
        calls[f"{name}, and attention"] = lambda select=select: cuflash.attention(q, k, v, mask=select())
        densities[name] = densities[f"{name}, and attention"] = select().num_entries / (every * q.shape[0])
    return calls, densities


def calls_per_query(q: Any, k: Any, top_k: int) -> dict[str, Callable[[], Any]]:
    """Return the calls of choices per query by name, and dense attention; the keys are also the values."""
    length, stride = COMPRESSION
    compressed_k = normal(k.shape[0], (k.shape[1] - length) // stride + 1, k.shape[2])
    mask = cuflash.masks.Compressed(*COMPRESSION)
    _, lse = cuflash.attention(q, compressed_k, compressed_k, mask=mask, return_lse=True)
    options: dict[str, Any] = {"block": (1, QUERY_BLOCK), "budget": Budget(top_k=top_k), "causal": True}
    of_nsa = {"compression": COMPRESSION, "compressed_k": compressed_k}
    moba = {"pool_queries": False, **options}
    selections: dict[str, Callable[[], Any]] = {
        "nsa per query, lse given": lambda: selectors.nsa(q, k, **of_nsa, lse=lse, **options),
        "nsa per query": lambda: selectors.nsa(q, k, **of_nsa, **options),
        "moba per query": lambda: selectors.pooled(q, k, **moba),
        "moba per query and group": lambda: selectors.pooled(q, k, share="group", **moba),
    }
    calls: dict[str, Callable[[], Any]] = {"dense attention": lambda: cuflash.attention(q, k, k, causal=True)}
    for name, select in selections.items():
        calls[name] = select
        calls[f"{name}, and attention"] = lambda select=select: cuflash.attention(q, k, k, mask=select(), causal=True)
    return calls


def host_us(call: Callable[[], Any], count: int) -> float:
    """Return the median host time of a call in microseconds; the device is synchronized between calls."""
    import cupy

    spent = []
    for _ in range(count):
        cupy.cuda.get_current_stream().synchronize()
        begin = time.perf_counter()
        result = call()
        spent.append(time.perf_counter() - begin)
        del result
    return statistics.median(spent) * 1e6


def run(config: Config) -> Iterator[Record]:
    """Yield one record per call."""
    if reason := why_no_gpu():
        sys.exit(f"selection_speed times kernels on a GPU: {reason}")
    cases = list(itertools.product(config.seqlens, (False, True))) if "blocks" in config.kinds else []
    for seqlen, causal in track(cases, "lengths"):
        q, k, v, _ = (x[0] for x in simt_speed.draw(1, config.num_heads, seqlen, config.head_dim, dtype=np.float16))
        calls, densities = calls_of(q, k, v, causal, config.share)
        of_size = {"seqlen": seqlen, "causal": causal, "block": BLOCK, "num_heads": config.num_heads}
        yield from rows_of(calls, densities, config, of_size | {"head_dim": config.head_dim, "dtype": "float16"})
    of_queries = list(config.query_seqlens) if "queries" in config.kinds else []
    for seqlen in track(of_queries, "lengths of choices per query"):
        heads, dim = (config.query_heads, config.query_kv_heads), config.head_dim
        q, k = (normal(count, seqlen, dim) for count in heads)
        calls = calls_per_query(q, k, config.query_top_k)
        num_blocks = -(-seqlen // QUERY_BLOCK)
        num_chosen = sum(min(config.query_top_k, block + 1) for block in range(num_blocks))
        of_size = {"seqlen": seqlen, "causal": True, "block": QUERY_BLOCK, "num_heads": heads[0]}
        densities = dict.fromkeys(list(calls)[1:], num_chosen / (num_blocks * (num_blocks + 1) / 2))
        yield from rows_of(calls, densities, config, of_size | {"head_dim": dim, "dtype": "bfloat16"})


def normal(heads: int, seqlen: int, dim: int) -> Any:
    """Draw rows of bfloat16 on the device."""
    import cupy

    return cupy.random.standard_normal((heads, seqlen, dim), dtype=np.float32).astype(ml_dtypes.bfloat16)


def rows_of(
    calls: dict[str, Callable[[], Any]], densities: dict[str, float], config: Config, of_size: Record
) -> Iterator[Record]:
    """Yield the rows of calls that are timed alternately with the dense one."""
    times = time_on_device(calls, repeats=config.repeats, warmup=2)
    dense = times["dense attention"].median_ms
    for name, call in calls.items():
        yield {
            "call": name, **of_size, "density": densities.get(name, 1.0), "ms": times[name].median_ms,
            "spread_ms": times[name].spread_ms, "dense_ms": dense, "of_dense": times[name].median_ms / dense,
            "us": host_us(call, config.host_calls), **machine(), **gpu_versions(),
        }  # fmt: skip


def table(records: list[Record]) -> Table:
    """Tabulate times, absolute and relative to the dense call, by length."""
    result = Table(title="ms, and time / dense time")
    for column in ("tokens", "causal", "call", "density", "ms", "of dense", "host us"):
        result.add_column(column, justify="left" if column == "call" else "right")
    for row in records:
        cells = (f"{row['density']:.2f}", f"{row['ms']:.3g}", f"{row['of_dense']:.3f}", f"{row['us']:.0f}")
        result.add_row(str(row["seqlen"]), str(row["causal"]), row["call"], *cells)
    return result


# Columns that distinguish the rows of the result.
ROW = ("gpu", "call", "seqlen", "causal", "block", "num_heads", "head_dim", "dtype")

if __name__ == "__main__":
    main(Config, run, table, replacing=lambda config: ROW, name=lambda config: "selection_speed")
