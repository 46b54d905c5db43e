"""How long does one step of decoding take, compared with other libraries' kernels?

    python -m experiments decode                             # all sizes
    python -m experiments decode --csv decode.csv --quick    # the smallest size, with few repeats

It needs an NVIDIA GPU and CuPy. A row is one new token for each sequence of a batch, with 32 query heads that share 8
key/value heads of head_dim 128, in bfloat16. Calls are captured into a CUDA graph, in rotation over caches that
together exceed the level-2 cache, and the graph is replayed; `us` is the median over the replays in microseconds,
divided by the number of calls. `gb_per_s` counts the keys and values that a call reads. `ratio` is the time of the
fastest other library divided by the row's time: above 1, the row is faster than all of them.

Rows of `cuflash` are `KVCache.attention` on a contiguous cache and on pages of 64 and of 16 tokens in random order, and
`KVCache.append`; FP8 calls use caches of float8_e4m3fn, whose bytes include the scales. If they can be imported, there
are also rows of PyTorch's scaled_dot_product_attention with FlashAttention-2 and with cuDNN, of the packages of
FlashAttention-2, -3 and -4, and of FlashInfer on pages of 16. The last rows have the host time of `append` and
`attention` without a graph, on CuPy arrays and on PyTorch tensors. A plot of GB/s by size is written next to the CSV.

Found:  cuflash and the fastest other libraries read long caches at nearly the rate of the GPU's memory;
docs/kv_cache.md has the table.

Cost: Minutes of a GPU.
"""

import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import cuflash
import ml_dtypes
import numpy as np
from command_line import Parser, check_writable
from graph_times import captured_by_cupy, captured_by_torch, sizes_of
from harness import UNPUBLISHED, atomic_path, machine, why_no_gpu
from matplotlib.figure import Figure

SIZES = ((1, 1024), (1, 16384), (1, 131072), (16, 4096), (32, 4096), (64, 8192))
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
COLUMNS = (
    "library", "operation", "batch", "keys", "us", "gb_per_s", "ratio", "calls", "replays", "gpu", "versions",
    "commit", "date",
)  # fmt: skip
_ROTATED_BYTES = 128 << 20  # more than twice the level-2 cache of an H100
_MOST_CALLS = 20
_MANY_BYTES = 1 << 30  # bytes read by a call; above this, a graph has few calls
_ROOM = 1 << 13  # number of cache positions reserved for appended rows


class Case(NamedTuple):
    """A benchmark case: `prepare` returns a call on new arrays, `capture` a function that replays and times calls."""

    library: str
    operation: str
    prepare: Callable[[], Callable[[], Any]]
    capture: Callable[[list[Callable[[], Any]]], Callable[[], float]]
    position_bytes: int = 4 * HEAD_DIM  # bytes per position and key/value head


def cases_of_cuflash(batch: int, keys: int) -> Iterator[Case]:
    """Yield attention to caches of each layout, in random order, and `append`."""
    import cupy

    dtype = np.dtype(ml_dtypes.bfloat16)

    def normal(heads: int, rows: int) -> Any:
        return cupy.random.standard_normal((batch, heads, rows, HEAD_DIM), dtype=np.float32).astype(dtype)

    q, row = normal(HEADS, 1), normal(KV_HEADS, 1)

    def filled(capacity: int, page_size: int | None, cache_dtype: np.dtype[Any] = dtype) -> Any:
        sizes: dict[str, Any] = {"batch": batch, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "capacity": capacity}
        if page_size is None or cache_dtype != dtype:
            num_pages = batch * -(-capacity // (page_size or capacity))
            pages = {} if page_size is None else {"page_size": page_size, "num_pages": num_pages}
            cache = cuflash.KVCache(**sizes, **pages, dtype=cache_dtype, xp=cupy)
        else:
            table = np.random.default_rng(0).permutation(batch * capacity // page_size).reshape(batch, -1)
            pages = cupy.empty((2, table.size, KV_HEADS, page_size, HEAD_DIM), dtype)
            cache = cuflash.KVCache.over(pages[0], pages[1], table, [0] * batch)
        rows = normal(KV_HEADS, keys)
        cache.append(rows, rows)
        cache.count_on_device()
        return cache

    for name, page_size in (("contiguous", None), ("pages of 64", 64), ("pages of 16", 16)):

        def attends(page_size: int | None = page_size) -> Callable[[], Any]:
            cache = filled(keys, page_size)
            return lambda: cache.attention(q)

        yield Case("cuflash", f"attention, {name}", attends, captured_by_cupy)

    def appends() -> Callable[[], Any]:
        cache = filled(keys + _ROOM, 64)
        return lambda: cache.append(row, row)

    yield Case("cuflash", "append, pages of 64", appends, captured_by_cupy)
    eight, position_bytes = np.dtype(ml_dtypes.float8_e4m3fn), 2 * (HEAD_DIM + 4)

    for name, page_size in (("contiguous", None), ("pages of 64", 64)):

        def attends_to_bytes(page_size: int | None = page_size) -> Callable[[], Any]:
            cache = filled(keys, page_size, eight)
            return lambda: cache.attention(q)

        operation = f"attention, 8 bits, {name}"
        yield Case("cuflash", operation, attends_to_bytes, captured_by_cupy, position_bytes)

    def appends_bytes() -> Callable[[], Any]:
        cache = filled(keys + _ROOM, 64, eight)
        return lambda: cache.append(row, row)

    yield Case("cuflash", "append, 8 bits, pages of 64", appends_bytes, captured_by_cupy, position_bytes)


def cases_of_torch(batch: int, keys: int) -> Iterator[Case]:
    """Yield PyTorch's own kernels, and those of installed packages for its tensors."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, **options)

    def pair() -> Any:
        return [torch.randn(batch, KV_HEADS, keys, HEAD_DIM, **options) for _ in range(2)]

    for name, backend in (("FlashAttention-2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def attends(backend: Any = backend) -> Callable[[], Any]:
            k, v = pair()

            def call() -> Any:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

            return call

        yield Case(f"PyTorch, {name}", "attention, contiguous", attends, captured_by_torch)

    for package in ("flash_attn", "flash_attn_interface"):

        def by_kvcache(package: str = package) -> Callable[[], Any]:
            attend = getattr(import_module(package), "flash_attn_with_kvcache", None)
            if attend is None:  # FlashAttention-4's package creates an empty module with the same name
                raise ImportError(f"{package} has no flash_attn_with_kvcache")
            k, v = (x.transpose(1, 2).contiguous() for x in pair())
            lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
            return lambda: attend(q.transpose(1, 2), k, v, cache_seqlens=lengths)

        yield Case(package, "attention, contiguous", by_kvcache, captured_by_torch)

    def by_flash_attn_4() -> Callable[[], Any]:
        attend = import_module("flash_attn.cute").flash_attn_func
        k, v = (x.transpose(1, 2).contiguous() for x in pair())
        return lambda: attend(q.transpose(1, 2), k, v)

    yield Case("flash_attn.cute", "attention, contiguous", by_flash_attn_4, captured_by_torch)

    def by_flashinfer() -> Callable[[], Any]:
        import flashinfer

        page, pages = 16, keys // 16
        room = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        options = {"use_tensor_cores": True, "backend": "fa2"}  # fa3, the default on Hopper, does not split keys
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", **options)
        starts = torch.arange(0, batch + 1, dtype=torch.int32, device="cuda") * pages
        last = torch.full((batch,), page, dtype=torch.int32, device="cuda")
        wrapper.plan(
            starts, torch.randperm(batch * pages, device="cuda").int(), last, HEADS, KV_HEADS, HEAD_DIM, page,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        k, v = (x.transpose(1, 2).reshape(batch * pages, page, KV_HEADS, HEAD_DIM).contiguous() for x in pair())
        return lambda: wrapper.run(q[:, :, 0], (k, v))

    yield Case("FlashInfer", "attention, pages of 16", by_flashinfer, captured_by_torch)


def timed(case: Case, nbytes: int, replays: int) -> dict[str, Any]:
    """Time a call in microseconds: the median over replays of a graph of several calls."""
    places = max(2, min(_MOST_CALLS, -(-_ROTATED_BYTES // nbytes)))
    calls = [case.prepare() for _ in range(places)]
    is_short = nbytes < _MANY_BYTES or case.operation.startswith("append")
    num_calls = _MOST_CALLS if is_short else places
    replay = case.capture([calls[number % places] for number in range(num_calls)])
    replay()
    us = statistics.median(replay() for _ in range(replays)) / num_calls
    read = nbytes / us / 1e3 if case.operation.startswith("attention") else None
    return {
        "us": f"{us:.2f}", "gb_per_s": "" if read is None else f"{read:.0f}", "calls": num_calls, "replays": replays,
    }  # fmt: skip


def zeros_of_cupy(*shape: int) -> Any:
    import cupy

    return cupy.zeros(shape, np.dtype(ml_dtypes.bfloat16))


def zeros_of_torch(*shape: int) -> Any:
    import torch

    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda")


HOST_ROWS = {
    "append and attention, host": zeros_of_cupy,
    "append and attention of PyTorch's tensors, host": zeros_of_torch,
}


def host_time(calls: int, zeros: Callable[..., Any]) -> dict[str, Any]:
    """Return host microseconds of one `append` and one `attention` call, for a cache whose lengths are on the host."""
    import cupy

    dtype = np.dtype(ml_dtypes.bfloat16)
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "capacity": calls + 8, "dtype": dtype}
    cache = cuflash.KVCache(batch=1, **sizes, xp=cupy)
    q, row = (zeros(1, heads, 1, HEAD_DIM) for heads in (HEADS, KV_HEADS))
    spent = []
    for _ in range(calls):
        begin = time.perf_counter()
        cache.append(row, row)
        cache.attention(q)
        spent.append(time.perf_counter() - begin)
        cupy.cuda.runtime.deviceSynchronize()
    return {"us": f"{statistics.median(spent) * 1e6:.2f}", "calls": calls, "replays": 1}


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the rows of one size the ratio of the fastest other library's time to their own.

    >>> rows = [{"library": "cuflash", "operation": "attention", "us": "8"}]
    >>> with_ratios([*rows, {"library": "other", "operation": "attention", "us": "10"}])[0]["ratio"]
    '1.250'
    """
    others = [float(row["us"]) for row in rows if row["library"] != "cuflash"]
    is_ours = [row["library"] == "cuflash" and row["operation"].startswith("attention") for row in rows]
    return [
        row | {"ratio": f"{min(others) / float(row['us']):.3f}" if ours and others else ""}
        for row, ours in zip(rows, is_ours)
    ]


def rows_of(batch: int, keys: int, replays: int, operations: str = "") -> list[dict[str, Any]]:
    """Time one size, for operations whose names start with a prefix; failed calls are printed and left out."""
    import cupy

    cases, rows = list(cases_of_cuflash(batch, keys)), []
    try:
        cases += cases_of_torch(batch, keys)
    except ImportError as error:
        print(f"no rows of PyTorch: {error}")
    for case in cases:
        if not case.operation.startswith(operations):
            continue
        try:
            times = timed(case, batch * keys * KV_HEADS * case.position_bytes, replays)
        except (ImportError, RuntimeError, ValueError, TypeError) as error:
            print(f"no row of {case.library}, {case.operation}: {str(error).splitlines()[0][:200]}")
            continue
        rows.append({"library": case.library, "operation": case.operation, "batch": batch, "keys": keys, **times})
        print(*rows[-1].values(), flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
    return with_ratios(rows)


def versions() -> dict[str, str]:
    """Return the GPU, the versions of installed libraries, and the commit and date of the run."""
    import cupy

    packages = [f"cuflash {cuflash.__version__}", f"cupy {cupy.__version__}"]
    packages += [f"{name} {sys.modules[name].__version__}" for name in ("torch", "flash_attn", "flashinfer")
                 if hasattr(sys.modules.get(name), "__version__")]  # fmt: skip
    of_run = {name: machine()[name] for name in ("commit", "date")}
    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return {"gpu": gpu, "versions": ", ".join(packages)} | of_run


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--csv", type=Path, default=UNPUBLISHED / "decode.csv", help="default build/results/decode.csv")
    parser.add_argument("--quick", action="store_true", help="only the smallest size, with few replays")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--sizes", type=sizes_of, default=SIZES, help="sequences x keys, such as 1x1024,16x4096")
    parser.add_argument("--operations", default="", help="only operations with this prefix, and host times")
    chosen = parser.parse_args()
    if chosen.replays < 1:
        parser.error(f"replays must be positive; got {chosen.replays}")
    check_writable(chosen.csv.parent)
    reason = why_no_gpu()
    if reason:
        sys.exit(f"decode.py times kernels on a GPU, and there is none: {reason}")
    replays = 3 if chosen.quick else chosen.replays
    rows: list[dict[str, Any]] = []
    for batch, keys in chosen.sizes[: 1 if chosen.quick else None]:
        rows += rows_of(batch, keys, replays, chosen.operations)
        write(chosen.csv, rows)
    for operation, zeros in HOST_ROWS.items():
        try:
            host_us = host_time(100 if chosen.quick else 1000, zeros)
        except ImportError as error:
            print(f"no row of {operation}: {error}")
            continue
        rows.append({"library": "cuflash", "operation": operation, "batch": 1, "keys": 1, **host_us})
        print(*rows[-1].values())
    write(chosen.csv, rows)
    with atomic_path(chosen.csv.with_suffix(".png")) as partial:
        plot(rows).savefig(partial, dpi=150)


def plot(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot GB/s of attention to 16-bit caches: a group of bars per size, a bar per library and layout."""
    rates = {
        (f"{row['library']}, {row['operation'].split(', ', 1)[1]}", f"{row['batch']} x {row['keys']}"): row["gb_per_s"]
        for row in rows
        if row.get("gb_per_s") and "8 bits" not in row["operation"]
    }
    kinds, sizes = (list(dict.fromkeys(each)) for each in (zip(*rates) if rates else ((), ())))
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    ours = iter(("black", "dimgrey", "silver"))
    for place, kind in enumerate(kinds):
        at = [number + place / (len(kinds) + 1) for number, size in enumerate(sizes) if (kind, size) in rates]
        heights = [float(rates[kind, size]) for size in sizes if (kind, size) in rates]
        color = next(ours) if kind.startswith("cuflash") else f"C{place}"
        axes.bar(at, heights, 1 / (len(kinds) + 1), label=kind, color=color, align="edge")
    axes.set_xticks([number + 0.4 for number in range(len(sizes))], sizes)
    axes.set(xlabel="sequences x keys of each", ylabel="GB/s")
    if kinds:
        axes.legend(fontsize="x-small")
    return figure


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the current rows atomically."""
    with atomic_path(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(row | versions() for row in rows)


if __name__ == "__main__":
    main()
