"""How long does decoding from a sixteenth of a cache's pages take, with and without Quest's choice of these pages?

    python -m experiments chosen_decode --publish                                # one sequence, 16384 and 65536 keys
    python -m experiments chosen_decode --keys 4096,131072 --parts 4,16,64       # other lengths and shares
    python -m experiments chosen_decode --batch 16 --lists query                 # a list for each query head
    python -m experiments chosen_decode --host --keys 2048                       # on NumPy arrays, as called only

It needs an NVIDIA GPU of compute capability 8.0 or newer, and CuPy, unless `--host` is passed. A cache has pages of
`page` keys and keeps their bounds; the dtype is bfloat16 (on the host float32) and head_dim is 128. Each call attends
from one new token of each sequence. A graph has calls on caches in turn whose chosen pages together are larger than the
level-2 cache. `us` is the median over its replays, divided by the number of calls. `called_us` is the time of a call
outside of a graph, in a row of calls without waits. `of_all` and `called_of_all` are ratios to the times of all pages.

Ways: `all pages` is attention without a list; `chosen` has lists of random pages; `quest` is Quest's choice alone, by
the bounds; `quest and chosen` is the choice and attention to it. Lists are for each key/value head ("group") or for
each query head ("query"). First, results of both attentions to lists are compared with attention to the same rows.

Expect: the kernel reads a sixteenth of the keys and values, 16.8 MB of 268 at 65536 keys, for which it needs about 14
microseconds; the choice reads 4.2 MB of bounds in two launches, in about 8.

Found:  on an H200 with 65536 keys and lists per key/value head, attention to the chosen pages takes 14.6 us of device
time, 0.22 times that of all pages, and 0.30 times as called. Quest's choice alone takes 22 us, and with attention 37
us. At 16384 keys, attention to the chosen pages takes 0.44 times the device time of all pages, and 0.89 times as
called.

Cost: A minute of a GPU.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash.masks import ChosenBlocks
from cuflash.selectors import Budget, quest
from graph_times import Call, captured_by_cupy, times_of
from harness import Record, gpu_versions, machine, main, tabulated, why_no_gpu
from rich.table import Table

DIM = 128
SHARES = ("group", "query")
ALL, CHOSEN, CHOICE, BOTH = "all pages", "chosen", "quest", "quest and chosen"
_ROTATED_BYTES, _MOST_CACHES, _CALLS = 128 << 20, 20, 20  # more than twice the level-2 cache of an H200


@dataclass(frozen=True, kw_only=True)
class Config:
    """Lengths, shares of the pages, sequences, heads and kinds of lists; the defaults are the published form."""

    keys: tuple[int, ...] = (16384, 65536)
    parts: tuple[int, ...] = (16,)
    batch: tuple[int, ...] = (1,)
    lists: tuple[str, ...] = SHARES
    heads: int = 32
    kv_heads: int = 8
    page: int = 64
    replays: int = 15
    host: bool = False

    def __post_init__(self) -> None:
        if min((*self.keys, *self.parts, *self.batch, self.heads, self.kv_heads, self.replays)) < 1:
            raise ValueError("keys, parts, batch, heads, kv_heads and replays must be positive")
        if self.page < 16 or self.page % 16 or self.heads % self.kv_heads:
            raise ValueError("page must be a multiple of 16, and kv_heads must divide heads")
        if not set(self.lists) <= set(SHARES):
            raise ValueError(f"lists are {' and '.join(SHARES)}")


class Case:
    """Calls on caches of one size, in turn."""

    def __init__(self, config: Config, batch: int, keys: int, part: int) -> None:
        self.config, self.batch, self.keys = config, batch, keys
        self.num_pages = -(-keys // config.page)
        self.top_k = max(1, self.num_pages // part)
        self._rng = np.random.default_rng(0)
        self.xp: Any = np
        if not config.host:
            import cupy

            self.xp = cupy
        self.dtype = np.dtype(np.float32 if config.host else ml_dtypes.bfloat16)
        self.chosen_bytes = 2 * batch * config.kv_heads * self.top_k * config.page * DIM * self.dtype.itemsize
        num_caches = 1 if config.host else min(_MOST_CACHES, max(2, -(-_ROTATED_BYTES // self.chosen_bytes)))
        self.q, rows = self._normal(config.heads, 1), self._normal(config.kv_heads, keys)
        self.caches = [self._cache(rows) for _ in range(num_caches)]
        self.given_lists = {
            share: [self._lists(config.kv_heads if share == "group" else config.heads) for _ in self.caches]
            for share in config.lists
        }

    def _normal(self, heads: int, rows: int) -> Any:
        shape, random = (self.batch, heads, rows, DIM), self.xp.random
        if self.xp is np:
            return self._rng.standard_normal(shape, dtype=np.float32)
        return random.standard_normal(shape, dtype=np.float32).astype(self.dtype)

    def _cache(self, rows: Any) -> cuflash.KVCache:
        """Return a cache whose keys are also its values."""
        config, capacity = self.config, self.num_pages * self.config.page
        cache = cuflash.KVCache(
            batch=self.batch, num_kv_heads=config.kv_heads, head_dim=DIM, capacity=capacity, dtype=self.dtype,
            page_size=config.page, num_pages=self.batch * self.num_pages, keeps_page_bounds=True, xp=self.xp,
        )  # fmt: skip
        cache.append(rows, rows)
        if self.xp is not np:
            cache.count_on_device()
        return cache

    def _lists(self, num_lists: int) -> ChosenBlocks:
        """Return random pages, ascending, of which the last one is always one."""
        order = self._rng.random((self.batch, num_lists, 1, self.num_pages)).argsort(axis=-1)[..., : self.top_k]
        order[..., 0] = np.where((order == self.num_pages - 1).any(axis=-1), order[..., 0], self.num_pages - 1)
        return ChosenBlocks(self.xp.asarray(np.sort(order, axis=-1).astype(np.int32)), self.config.page)

    def ways(self, share: str) -> dict[str, list[Call]]:
        """Return the calls of each way, one for each cache."""
        budget = Budget(top_k=self.top_k)
        result: dict[str, list[Call]] = {ALL: [], CHOSEN: [], CHOICE: [], BOTH: []}
        for cache, lists in zip(self.caches, self.given_lists[share]):

            def choose(cache: cuflash.KVCache = cache) -> ChosenBlocks:
                return quest(self.q, cache, budget=budget, share=share)

            result[ALL].append(lambda cache=cache: cache.attention(self.q))
            result[CHOSEN].append(lambda cache=cache, lists=lists: cache.attention(self.q, mask=lists))
            result[CHOICE].append(choose)
            result[BOTH].append(lambda cache=cache, choose=choose: cache.attention(self.q, mask=choose()))
        return result

    def check(self, share: str) -> None:
        """Compare the results of a cache's calls with attention to its rows."""
        ways, cache = self.ways(share), self.caches[0]
        for way, lists in ((CHOSEN, self.given_lists[share][0]), (BOTH, ways[CHOICE][0]())):
            o = ways[way][0]().astype(np.float32)
            for b in range(self.batch):
                mask = ChosenBlocks(lists.blocks[b], self.config.page)
                wanted = cuflash.attention(self.q[b], *cache.rows(b), mask=mask).astype(np.float32)
                error = float(abs(o[b] - wanted).max() / abs(wanted).max())
                assert error < 0.02, f"{way}, lists of each {share}: results differ by {error}"


def timed(calls: list[Call], replays: int, host: bool) -> tuple[float | None, float]:
    """Return the microseconds of a call in a graph, None on the host, and as called."""
    for call in calls:
        call()
    if host:
        return times_of(calls, replays, None)
    return times_of([calls[i % len(calls)] for i in range(_CALLS)], replays, captured_by_cupy)


def run(config: Config) -> Iterator[Record]:
    """Check results, then yield the rows of all cases."""
    if not config.host and (reason := why_no_gpu()):
        sys.exit(f"chosen_decode times kernels on a GPU: {reason}: pass --host for NumPy's arrays")
    for batch in config.batch:
        for keys in config.keys:
            for part in config.parts:
                case = Case(config, batch, keys, part)
                for share in config.lists:
                    yield from rows_of(case, part, share)
                del case
                if not config.host:
                    import cupy

                    cupy.get_default_memory_pool().free_all_blocks()


def rows_of(case: Case, part: int, share: str) -> Iterator[Record]:
    """Yield a row for each way."""
    config = case.config
    case.check(share)
    every: tuple[float | None, float] = (None, 0.0)
    for way, calls in case.ways(share).items():
        us, called_us = timed(calls, config.replays, config.host)
        every = (us, called_us) if way == ALL else every
        record = {
            "batch": case.batch, "keys": case.keys, "page": config.page, "heads": config.heads,
            "kv_heads": config.kv_heads, "part": part, "pages": case.top_k, "lists": share, "way": way, "us": us,
            "called_us": called_us, "of_all": None if us is None or every[0] is None else us / every[0],
            "called_of_all": called_us / every[1], "device": "host" if config.host else "gpu",
        }  # fmt: skip
        print(*record.values(), flush=True)
        yield record | machine() | ({} if config.host else gpu_versions())


def table(records: list[Record]) -> Table:
    """Tabulate the times of this run."""
    columns = "batch", "keys", "part", "lists", "way", "us", "called_us", "of_all", "called_of_all"
    return tabulated("Decoding from chosen pages", columns, records)


# Columns that distinguish the rows of the result.
ROW = ("device", "gpu", "batch", "keys", "page", "heads", "kv_heads", "part", "lists", "way")

if __name__ == "__main__":
    main(Config, run, table, replacing=lambda config: ROW[:1] + ROW[2:] if config.host else ROW)
