"""Calls of cache kernels: decode, where unused rows hold NaN, and append."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuflash import DeviceSpec, KVCache, masks
from cuflash.executors import gpu
from cuflash.executors.launch import run_alone
from cuflash.executors.sim import Simulator
from cuflash.fp8.rows import quantized_rows
from cuflash.planning.appending import append_pass
from cuflash.planning.decoding import CacheLayout, decode_pass, decode_reasons
from cuflash.planning.launches import Pass
from cuflash.planning.problem import Problem, with_operands
from cuflash.testing import Example, assert_within_bounds
from executors import Run

CAPACITY = 300
LENGTHS = (300, 0, 1, 63, 64, 65, 192, 193)
FEW = replace(DeviceSpec.gpu("H100"), num_processors=4)  # at most two parts of several steps each, for two heads
NEW = {"dtype": np.float16, "rows": 1, "heads": 2, "dim": 64, "window": None, "sink": False, "device": FEW}
KINDS = {
    "one token": NEW,
    "many parts": NEW | {"dtype": ml_dtypes.bfloat16, "device": DeviceSpec.gpu("H100"), "sink": True},
    "several tokens, grouped heads": NEW | {"rows": 5, "heads": 12},  # 30 rows in a tile of 32
    "a full tile": NEW | {"rows": 16, "heads": 8, "dtype": ml_dtypes.bfloat16, "sink": True},  # fills a tile of 64 rows
    "a window": NEW | {"rows": 3, "window": (70, None)},
    "dims that are padded": NEW | {"dim": 40, "rows": 2},
}


@dataclass(frozen=True)
class Drawn:
    """A call on a cache: host arrays, with keys and values as long as the capacity."""

    q: Any
    k: Any
    v: Any
    sink: Any
    lengths: Sequence[int]
    window: tuple[int | None, int | None] | None = None
    counts: Sequence[int] | None = None

    def fitting(self) -> Drawn:
        """Return the call without queries whose keys were not appended, which caches refuse."""
        return replace(self, counts=[min(self.q.shape[2], length) for length in self.lengths])

    def of(self, rows: Sequence[int]) -> Drawn:
        """Return the call for some of the sequences."""
        q, k, v = (x[list(rows)] for x in (self.q, self.k, self.v))
        counts = None if self.counts is None else [self.counts[b] for b in rows]
        return replace(self, q=q, k=k, v=v, lengths=[self.lengths[b] for b in rows], counts=counts)


def drawn(kind: dict[str, Any], lengths: Sequence[int] = LENGTHS, capacity: int = CAPACITY) -> Drawn:
    rng, batch, dim = np.random.default_rng(0), len(lengths), kind["dim"]
    shapes = (kind["heads"], kind["rows"], dim), (2, capacity, dim), (2, capacity, dim)
    q, k, v = (rng.standard_normal((batch, *shape)).astype(kind["dtype"]) for shape in shapes)
    sink = rng.standard_normal(kind["heads"]).astype(np.float32) if kind["sink"] else None
    return Drawn(q, k, v, sink, lengths, kind["window"])


def hidden(call: Drawn) -> tuple[Any, Any]:
    """Return keys and values with NaN in all rows that the call must not read."""
    k, v, rows = call.k.copy(), call.v.copy(), call.q.shape[2]
    for b, length in enumerate(call.lengths):
        new = rows if call.counts is None else call.counts[b]
        first = 0 if call.window is None or call.window[0] is None else max(0, length - new - call.window[0])
        for array in (k, v):
            array[b, :, max(length, 0) :] = array[b, :, :first] = np.nan
    return k, v


def paged(call: Drawn, page_size: int, seed: int) -> tuple[Any, Any, Any]:
    """Return keys and values in randomly ordered pages; everything that the call must not read is NaN or junk."""
    rng, batch = np.random.default_rng(seed), len(call.lengths)
    max_pages = -(-call.k.shape[2] // page_size)
    table = rng.permutation(batch * max_pages + 3)[: batch * max_pages].reshape(batch, max_pages).astype(np.int32)
    arrays = []
    for rows in hidden(call):
        pages = np.full((batch * max_pages + 3, 2, page_size, rows.shape[-1]), np.nan, rows.dtype)
        for b, length in enumerate(call.lengths):
            for j in range(length):
                pages[table[b, j // page_size], :, j % page_size] = rows[b, :, j]
        arrays.append(pages)
    for b, length in enumerate(call.lengths):
        table[b, -(-length // page_size) :] = rng.choice([-1, 2**31 - 1, -(2**31)])
    return *arrays, table


def attended(
    run: Run,
    call: Drawn,
    pages: tuple[Any, Any, Any] | None = None,
    *,
    device: DeviceSpec = FEW,
    target: Any = None,
    is_quantized: bool = False,
) -> tuple[Any, Any, int]:
    """Return o, lse and the kernel's fault count; NaN fills results at first, and inputs that it must not read.

    For the FP8 kernel, keys and values are first rounded to FP8.
    """
    k, v, table = (*hidden(call), None) if pages is None else pages
    scales = {}
    if is_quantized:
        (k, k_scale), (v, v_scale) = quantized_rows(k), quantized_rows(v)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    layout = CacheLayout(call.k.shape[2], k.shape[2], k.shape[0], 1 if table is None else table.shape[1])
    problem = Problem.of(call.q, call.k, call.v)
    sink = {} if call.sink is None else {"sink": call.sink}
    problem = with_operands(problem, sink)
    assert decode_reasons(problem, device, is_quantized=is_quantized) == []
    left, right = call.window or (None, None)
    kernels = decode_pass(problem, device, layout, left=left, right=0, is_quantized=is_quantized)
    arrays = {
        "q": call.q, "k": k, "v": v, "o": np.full_like(call.q, np.nan), "table": table,
        "lse": np.full(call.q.shape[:3], np.nan, np.float32), "lengths": np.array(call.lengths, np.int32),
        "counts": None if call.counts is None else np.array(call.counts, np.int32),
        "num_faults": np.zeros(1, np.int32), **sink, **scales,
    }  # fmt: skip
    arrays = {name: run.put(bits_of(array)) for name, array in arrays.items()}
    launch(run, kernels, arrays, target)
    return run.get(arrays["o"]), run.get(arrays["lse"]), int(run.get(arrays["num_faults"])[0])


def launch(run: Run, kernels: Pass, arrays: dict[str, Any], target: Any = None) -> None:
    """Launch kernels on arrays; zeroed workspaces must hold zeros again afterwards."""
    zeros = {name: each for name, each in kernels.workspaces.items() if each.is_zeroed}
    inputs = {name: run.put(np.zeros(each.shape, each.dtype)) for name, each in zeros.items()}
    run_alone(kernels, {**arrays, **inputs}, target or (gpu.current_target() if run.is_on_device else Simulator()))
    assert not any(run.get(array).any() for array in inputs.values())


Attend = Callable[..., tuple[Any, Any, int]]  # (call, pages=None) -> o, lse and the number of faults


def assert_is_attention(
    call: Drawn,
    o: Any,
    lse: Any,
    rounded: Callable[[Example], Example],
    stored: Callable[[Any], Any] = lambda rows: rows,
) -> None:
    """Assert that each sequence's results are within bounds, and that o is 0 for queries before its first position.

    Parameters
    ----------
    rounded : callable
        Returns an example with the dtype to which the kernels round weights.
    kept : callable
        Returns rows of k and v as the cache stores them.
    """
    mask: masks.Mask = masks.Causal("bottom_right")
    mask = mask if call.window is None else mask & masks.SlidingWindow(*call.window, "bottom_right")
    rows = call.q.shape[2]
    for b, length in enumerate(call.lengths):
        count = rows if call.counts is None else call.counts[b]
        seen = slice(max(0, count - length), count)
        k, v = (stored(x[b, :, :length]) for x in (call.k, call.v))
        example = rounded(Example(q=call.q[b, :, seen], k=k, v=v, mask=mask, sink=call.sink))
        assert_within_bounds(example, o=o[b, :, seen], lse=lse[b, :, seen])
        assert not o[b, :, : seen.start].any() and not o[b, :, count:].any()


def assert_bits_are_of_own_sequences(
    attend: Attend, call: Drawn, results: tuple[Any, Any], parts: Iterable[Sequence[int]], page_sizes: Iterable[int]
) -> None:
    """Assert that sequences have equal bits alone, in another order, and in pages of any size and place."""
    for rows in parts:
        assert same_bits(attend(call.of(rows))[:2], [x[list(rows)] for x in results])
    for seed, page_size in enumerate(page_sizes):
        *paged_results, faults = attend(call, paged(call, page_size, seed))
        assert same_bits(paged_results, results) and not faults


def assert_rows_may_be_fewer(attend: Attend, call: Drawn) -> None:
    """Assert that a sequence's rows have the bits that they have alone, and that rows of no sequence are empty."""
    o, lse, faults = attend(call)
    for b, count in enumerate(call.counts or ()):
        one = replace(call.of([b]), q=call.q[b : b + 1, :, :count], counts=None)
        if count:
            assert same_bits(attend(one)[:2], (o[b : b + 1, :, :count], lse[b : b + 1, :, :count]))
        assert not o[b, :, count:].any() and np.isneginf(lse[b, :, count:]).all()
    assert not faults


def assert_numbers_out_of_range_lead_nowhere(attend: Attend, call: Drawn) -> None:
    """Assert that invalid pages and lengths of sequence 1 are counted, and change only its result, which is finite."""
    k, v, table = paged(call, 16, 0)
    others = [b for b in range(len(call.lengths)) if b != 1]
    right = attend(call, (k, v, table))
    assert right[2] == 0
    for junk in (-1, len(k), 2**31 - 1, -(2**31)):
        wrong = table.copy()
        wrong[1, 3] = junk
        o, lse, faults = attend(call, (k, v, wrong))
        assert faults > 0 and np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
        assert same_bits([x[others] for x in (o, lse)], [x[others] for x in right[:2]])
    for length in (CAPACITY + 1, 2**31 - 1, -7):
        lengths = [length if b == 1 else each for b, each in enumerate(call.lengths)]
        assert attend(replace(call, lengths=lengths), (k, v, table * 0))[2] > 0


def cache_of(run: Run, call: Drawn, pages: dict[str, int]) -> KVCache:
    """Return a cache with a call's keys and values, contiguous or in pages, in arrays that held NaN."""
    longest, (batch, num_kv_heads, _, head_dim) = max(call.lengths), call.k.shape
    sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": call.q.dtype}
    cupy = {"xp": pytest.importorskip("cupy")} if run.is_on_device else {}
    cache = KVCache(**sizes, capacity=CAPACITY, **pages, **cupy)
    cache.k[...], cache.v[...] = np.nan, np.nan
    cache.append(run.put(call.k[:, :, :longest]), run.put(call.v[:, :, :longest]), counts=call.lengths)
    return cache


def bits_of(array: Any) -> Any:
    """Return an array, or its bytes if CuPy lacks its dtype."""
    return array.view(np.uint8) if array is not None and array.dtype == ml_dtypes.float8_e4m3fn else array


def same_bits(one: Any, other: Any) -> bool:
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(one, other))


# Appending

_RNG = np.random.default_rng(0)
HEADS, PAGE, PAGES, ROOM = 2, 16, 11, 40
TABLE = np.array([[3, 1, 0], [7, -1, 0], [9, PAGES, 2], [5, 6, 8]], np.int32)
HELD = [14, 3, 15, 36]


HARD = np.float32([0, -0.0, 1e-42, 1e-38, 2e-38, -1e-37, 5e-36, 1, 448, 448.00003, 464, 1.75, 1.7500001, 3.4e38, 1e-30,
                   2**-9, 2**-10, 3 * 2**-11, 2**-7, 0.0156, 0.0155, 13, 17, 19, -21, 239, 240, 241, 455.99, -1e38,
                   np.nan, -np.nan, np.inf, -np.inf])  # fmt: skip


def _hard(shape: tuple[int, ...]) -> Any:
    """Return ties, subnormals, limits of both formats, NaN and infinities, in rows of one or many nonzero numbers."""
    rng, (_, num_rows, heads, _) = np.random.default_rng(0), shape
    near = (rng.integers(0, 2**32, shape, dtype=np.uint32) >> 5 | 0x3A000000).view(np.float32)
    rows = np.where(rng.random(shape) < 0.5, near, HARD[rng.integers(0, len(HARD) - 4, shape)])
    any_bits = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    rows[:, ::4] = any_bits[:, ::4]
    rows[0, 1::2] = np.resize(HARD, (num_rows // 2, heads, 1))
    rows[1, 4::9] = HARD[rng.integers(0, len(HARD), shape)][1, 4::9]
    rows[1, :4] = HARD[-4 * heads :].reshape(4, heads, 1)
    return rows


def appended(
    run: Run,
    dtype: Any,
    dims: tuple[int, int],
    counts: Any,
    num_rows: int = 5,
    target: Any = None,
    is_quantized: bool = False,
    is_hard: bool = False,
) -> Any:
    """Return the new rows, and the pages, lengths and faults after the kernel; with FP8 pages also the scales."""
    batch = len(HELD)
    draw = _hard if is_hard else _RNG.standard_normal
    rows = [draw((batch, num_rows, HEADS, dim)).astype(dtype).swapaxes(1, 2) for dim in dims]
    pages = [np.zeros((PAGES, HEADS, PAGE, dim), np.uint8 if is_quantized else dtype) for dim in dims]
    scales = {name: np.zeros(pages[0].shape[:3], np.float32) for name in ("k_scale", "v_scale") if is_quantized}
    host = {
        "k": rows[0], "v": rows[1], "cache_k": pages[0], "cache_v": pages[1], "table": TABLE,
        "lengths": np.array(HELD, np.int32), "num_faults": np.zeros(1, np.int32),
        "counts": None if counts is None else np.array(counts, np.int32), **scales,
    }  # fmt: skip
    arrays = {name: run.put(array) for name, array in host.items()}
    layout = CacheLayout(ROOM, PAGE, PAGES, 3)
    kernels = append_pass(rows[0].shape, dims[1], np.dtype(dtype), layout, is_quantized=is_quantized)
    launch(run, kernels, arrays, target)
    return rows, *(run.get(arrays[name]) for name in ("cache_k", "cache_v", "lengths", "num_faults", *scales))


def expected(rows: Any, counts: Any) -> tuple[list[Any], list[int]]:
    """Return the pages after rows are written one by one, and the lengths."""
    pages = [np.zeros((PAGES, HEADS, PAGE, *x.shape[3:]), x.dtype) for x in rows]
    lengths = []
    for b, (length, count) in enumerate(zip(HELD, counts)):
        lengths.append(min(length + count, ROOM))
        for position in range(length, lengths[-1]):
            page = TABLE[b, position // PAGE]
            for array, row_values in zip(pages, rows):
                if 0 <= page < PAGES:
                    array[page, :, position % PAGE] = row_values[b, :, position - length]
    return pages, lengths
