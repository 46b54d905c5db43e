"""How long does attention of a few queries to keys and values in arrays take, compared with other methods?

    python -m experiments plain_decode                                     # one query, five sizes
    python -m experiments plain_decode --sizes 16x4096 --queries 1,4,16
    python -m experiments plain_decode --sizes 1x1024,1x16384 --heads 32 --kv-heads 32

It needs an NVIDIA GPU of compute capability 8.0 or newer, and CuPy. The dtype is bfloat16 and head_dim is 128. A size
is a number of sequences and of keys per sequence. Each call is captured into a CUDA graph, in rotation over arrays that
together exceed the level-2 cache, and the graph is replayed: `us` is the median over the replays in microseconds,
divided by the number of calls. `called_us` is the time of a call outside a graph, in a sequence of calls without
synchronization.

Methods: `few queries` is the kernel that `cuflash.attention` selects; `split` is `kernel="sm80"`, which splits the keys
of a tile among thread blocks; `cache` is `KVCache.attention` on a contiguous cache; `FlashAttention-2` and `cuDNN` are
PyTorch's kernels. `of_flash` is the time divided by that of FlashAttention-2.

Found:  on an H200, with 16 parts as in cache kernels, one query takes 0.64 of FlashAttention-2's time at 64 x 8192
keys, 0.89 at 1 x 65536 and 1.09 at 16 x 4096, where more parts than can run concurrently only add the cost of their
merge.

Cost: A minute of a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from graph_times import Call, captured_by_cupy, captured_by_torch, sizes_of, times_of
from harness import Record, gpu_versions, main, tabulated, why_no_gpu
from rich.table import Table

DIM = 128
FLASH = "FlashAttention-2"
# bytes of all arrays of a graph; bytes of a call above which a graph has few calls
_ROTATED_BYTES, _MOST_BYTES = 256 << 20, 1 << 30
_CALLS, _FEW_CALLS = 20, 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes as sequences x keys, queries per sequence, and heads."""

    sizes: tuple[str, ...] = ("1x1024", "1x16384", "1x65536", "16x4096", "64x8192")
    queries: tuple[int, ...] = (1,)
    heads: int = 32
    kv_heads: int = 8
    replays: int = 15

    def __post_init__(self) -> None:
        try:
            sizes_of(",".join(self.sizes))
        except ValueError:
            raise ValueError("sizes are sequences x keys, such as 16x4096") from None
        if min((*self.queries, self.heads, self.kv_heads, self.replays)) < 1:
            raise ValueError("queries, heads, kv_heads and replays must be positive")
        if self.heads % self.kv_heads:
            raise ValueError("kv_heads must divide heads")


Way = tuple[Callable[[], Call], Callable[[list[Call]], Callable[[], float]]]


def ways_of_cuflash(batch: int, keys: int, queries: int, config: Config) -> dict[str, Way]:
    """Return cuflash's methods by name: a function that creates a call on new arrays, and one that captures calls."""
    import cupy

    def normal(heads: int, rows: int) -> Any:
        shape = batch, heads, rows, DIM
        return cupy.random.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)

    q = normal(config.heads, queries)

    def attends(**options: Any) -> Call:
        k, v = normal(config.kv_heads, keys), normal(config.kv_heads, keys)
        return lambda: cuflash.attention(q, k, v, causal="bottom_right", **options)

    def of_cache() -> Call:
        sizes: dict[str, Any] = {"batch": batch, "num_kv_heads": config.kv_heads, "head_dim": DIM, "capacity": keys}
        cache = cuflash.KVCache(**sizes, dtype=ml_dtypes.bfloat16, xp=cupy)
        cache.append(normal(config.kv_heads, keys), normal(config.kv_heads, keys))
        cache.count_on_device()
        return lambda: cache.attention(q)

    return {
        "few queries": (attends, captured_by_cupy), "split": (lambda: attends(kernel="sm80"), captured_by_cupy),
        "cache": (of_cache, captured_by_cupy),
    }  # fmt: skip


def ways_of_torch(batch: int, keys: int, queries: int, config: Config) -> dict[str, Way]:
    """Return PyTorch's methods; without a causal mask for fewer queries than keys, several queries attend all keys."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, config.heads, queries, DIM, **options)

    def attends(backend: Any) -> Call:
        k, v = (torch.randn(batch, config.kv_heads, keys, DIM, **options) for _ in range(2))

        def call() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return call

    backends = {FLASH: SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {
        name: (lambda backend=backend: attends(backend), captured_by_torch) for name, backend in backends.items()
    }  # fmt: skip


def timed(way: Way, nbytes: int, replays: int) -> tuple[float | None, float]:
    """Return the microseconds of a call in a graph, and outside one."""
    prepare, capture = way
    calls = [prepare() for _ in range(max(2, min(_CALLS, -(-_ROTATED_BYTES // nbytes))))]
    num_calls = _CALLS if nbytes < _MOST_BYTES else _FEW_CALLS
    return times_of([calls[number % len(calls)] for number in range(num_calls)], replays, capture)


def run(config: Config) -> Iterator[Record]:
    """Yield the rows of all sizes; libraries that cannot be imported are left out."""
    if reason := why_no_gpu():
        sys.exit(f"plain_decode times kernels on a GPU: {reason}")
    import cupy

    for batch, keys in sizes_of(",".join(config.sizes)):
        for queries in config.queries:
            ways = ways_of_cuflash(batch, keys, queries, config)
            try:
                ways = ways_of_torch(batch, keys, queries, config) | ways
            except ImportError as error:
                print(f"no rows of PyTorch: {error}")
            flash = None
            for name, way in ways.items():
                nbytes = 4 * batch * keys * config.kv_heads * DIM
                try:
                    us, called_us = timed(way, nbytes, config.replays)
                except RuntimeError as error:
                    print(f"no row of {name}: {str(error).splitlines()[0][:200]}")
                    continue
                flash = us if name == FLASH else flash
                record = {
                    "batch": batch, "keys": keys, "queries": queries, "heads": config.heads,
                    "kv_heads": config.kv_heads, "way": name, "us": us, "called_us": called_us,
                    "gb_per_s": nbytes / us / 1e3, "of_flash": None if flash is None else us / flash,
                }  # fmt: skip
                print(*record.values(), flush=True)
                yield record | gpu_versions()
                cupy.get_default_memory_pool().free_all_blocks()


def table(records: list[Record]) -> Table:
    """Tabulate the times of this run."""
    columns = (
        "batch", "keys", "queries", "heads", "kv_heads", "way", "us", "called_us", "gb_per_s", "of_flash",
    )  # fmt: skip
    return tabulated("Attention of a few queries", columns, records)


if __name__ == "__main__":
    main(Config, run, table, replacing=("gpu", "batch", "keys", "queries", "heads", "kv_heads", "way"))
