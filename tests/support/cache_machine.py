"""Operations of a KV cache in random order, drawn from a seed, whose results are compared with a list of arrays.

Checks take the library as an argument, so that they can also guard copies of it with planted faults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from cuflash.planning.decoding import MOST_ROWS
from cuflash.testing import Example, assert_within_bounds

BATCH, HEADS, DIM, VALUE_DIM, CAPACITY, PAGE, NUM_PAGES = 3, 2, 4, 3, 70, 16, 9
KINDS = ("contiguous", "pages", "over contiguous pages", "over strided pages", "8 bits", "8 bits in pages", "in parts")

# Shapes of sinks on the host. Cache kernels do not support the last two, which differ between sequences.
SINKS = (None, (2 * HEADS,), (1,), (BATCH, 2 * HEADS), (BATCH, 1))


def rounded_to_8_bits(rows: Any) -> Any:
    """Return rows as a float8_e4m3fn cache stores them, scaled by the least power of two that keeps a row below 449."""
    largest = np.abs(rows).max(axis=-1, keepdims=True).astype(np.float64)
    scale = np.where(largest == 0, 1, 2.0 ** np.ceil(np.log2(np.where(largest == 0, 448, largest) / 448)))
    return ((rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).astype(np.float32)


class CheckedCache:
    """A cache, and the arrays whose contents it must have; each operation is applied to both.

    A cache of CuPy arrays holds 16-bit or FP8 rows, with dimensions that its kernels support.
    """

    def __init__(self, library: Any, kind: str, seed: int, xp: Any = np) -> None:
        self.library, self.kind, self.rng, self.xp = library, kind, np.random.default_rng(seed), xp
        self.has_8_bits, self.is_on_host = kind.startswith("8 bits"), xp is np
        self.dtype = np.float32 if self.is_on_host else np.float16
        self.dim, self.value_dim = (DIM, VALUE_DIM) if self.is_on_host else (16, 32)
        of_rows = np.float32 if self.has_8_bits else self.dtype
        self.keys = [np.empty((HEADS, 0, self.dim), of_rows) for _ in range(BATCH)]
        self.values = [np.empty((HEADS, 0, self.value_dim), of_rows) for _ in range(BATCH)]
        self.held = [0] * BATCH  # number of pages of each sequence, shared or not
        if kind.startswith("over"):
            self.cache = self._over(kind == "over strided pages")
        else:
            pages = {"page_size": PAGE, "num_pages": NUM_PAGES}
            self.cache = self._new_cache(BATCH, pages if kind.endswith("pages") else {})
            for array in (self.cache.k, self.cache.v, self.cache.k_scale, self.cache.v_scale):
                if array is not None:
                    array[...] = 0x7F if array.dtype == np.uint8 else np.nan

    def _new_cache(self, batch: int, pages: dict[str, int], capacity: int = CAPACITY) -> Any:
        pages = pages | ({"part_keys": 64} if self.kind == "in parts" else {})
        return self.library.KVCache(
            batch=batch, num_kv_heads=HEADS, head_dim=self.dim, value_dim=self.value_dim, capacity=capacity,
            dtype=ml_dtypes.float8_e4m3fn if self.has_8_bits else self.dtype, xp=self.xp, **pages,
        )  # fmt: skip

    def _over(self, is_strided: bool) -> Any:
        """Return a cache over pages of an owner who has more pages than the cache uses, and has written to the rest."""
        arrays = []
        for dim in (self.dim, self.value_dim):
            shape = (2 * NUM_PAGES, PAGE, HEADS, dim) if is_strided else (2 * NUM_PAGES, HEADS, PAGE, dim)
            pages = self.xp.full(shape, np.nan, self.dtype)
            arrays.append(pages.swapaxes(1, 2) if is_strided else pages)
        self.of_others = arrays[0][NUM_PAGES:]
        self.of_others[...] = 7
        table = np.full((BATCH, -(-CAPACITY // PAGE)), -1)
        for row, pages in zip(table, np.split(self.rng.permutation(NUM_PAGES), BATCH)):
            row[: len(pages)] = pages
        self.held = [NUM_PAGES // BATCH] * BATCH
        return self.library.KVCache.over(*arrays, table, [0] * BATCH)

    def lengths(self) -> list[int]:
        return [keys.shape[1] for keys in self.keys]

    def _normal(self, *shape: int) -> Any:
        """Return a random array on the cache's device."""
        return self.xp.asarray(self.rng.standard_normal(shape).astype(self.dtype))

    def _on_host(self, array: Any) -> Any:
        return array if self.is_on_host else array.get()

    def _is_taken(self, stops: list[int], call: Callable[[], None]) -> bool:
        """Return whether a call that needs pages is accepted; it may be refused only if there are too few pages."""
        held = [max(pages, -(-stop // PAGE)) for pages, stop in zip(self.held, stops)]
        is_long = max(stops) > self.cache.capacity
        try:
            call()
        except self.library.UnsupportedProblem as error:
            # Sequences may share pages, so more pages can be free than this count suggests.
            assert is_long or self.kind not in ("contiguous", "8 bits", "in parts") and sum(held) > NUM_PAGES, error
            assert "sequence" in str(error) and "must fit the" in str(error)
            return False
        assert not is_long
        self.held = held
        return True

    def append(self, num_rows: int, counts: list[int] | None, is_strided: bool) -> None:
        k, v = (
            self._normal(BATCH, num_rows, HEADS, dim).swapaxes(1, 2) if is_strided
            else self._normal(BATCH, HEADS, num_rows, dim)
            for dim in (self.dim, self.value_dim)
        )  # fmt: skip
        news = [num_rows] * BATCH if counts is None else counts
        stops = [length + new for length, new in zip(self.lengths(), news)]
        if self._is_taken(stops, lambda: self.cache.append(k, v, counts=counts)):
            k, v = map(self._on_host, (k, v))
            k, v = (rounded_to_8_bits(x) if self.has_8_bits and x.size else x for x in (k, v))
            for b, new in enumerate(news):
                self.keys[b] = np.concatenate([self.keys[b], k[b, :, :new]], axis=1)
                self.values[b] = np.concatenate([self.values[b], v[b, :, :new]], axis=1)

    def reserve(self, stops: list[int]) -> None:
        wanted = [max(stop, length) for stop, length in zip(stops, self.lengths())]
        if self._is_taken(wanted, lambda: self.cache.reserve(stops)):
            before = self.cache.num_free_pages
            self.cache.reserve(stops)
            assert self.cache.num_free_pages == before

    def truncate(self, lengths: list[int]) -> None:
        self.cache.truncate(np.array(lengths))
        for b, length in enumerate(lengths):
            self.keys[b], self.values[b] = self.keys[b][:, :length], self.values[b][:, :length]
        self.held = [-(-length // PAGE) for length in lengths]

    def reset(self, rows: list[int] | None) -> None:
        self.cache.reset(rows)
        for b in range(BATCH) if rows is None else rows:
            self.keys[b], self.values[b], self.held[b] = self.keys[b][:, :0], self.values[b][:, :0], 0

    def fork(self, source: int, target: int) -> None:
        free = self.cache.num_free_pages
        if not self.lengths()[source]:
            try:
                self.cache.fork(source, target)
            except self.library.UnsupportedProblem:
                return
            raise AssertionError("an empty sequence was forked")
        self.cache.fork(source, target)
        assert self.cache.num_free_pages >= free
        self.keys[target], self.values[target] = self.keys[source], self.values[source]
        self.held[target] = -(-self.lengths()[source] // PAGE)

    def attend(
        self, num_rows: int, counts: list[int] | None, causal: bool, window: Any, sink_shape: tuple[int, ...] | None
    ) -> None:
        q = self._normal(BATCH, 2 * HEADS, num_rows, self.dim)
        out = self.xp.full((BATCH, 2 * HEADS, num_rows, self.value_dim), np.nan, self.dtype)
        sink = None if sink_shape is None else self._normal(*sink_shape).astype(np.float32)
        requested = [num_rows] * BATCH if counts is None else counts
        if any(new > length for new, length in zip(requested, self.lengths())):
            self._assert_refused(q, counts, causal, window, sink, out)
            counts = list(map(min, requested, self.lengths()))
        o, lse = self.cache.attention(
            q, counts=counts, causal=causal, window=window, sink=sink, out=out, return_lse=True
        )
        assert o is out and lse.shape == o.shape[:-1]
        sinks = None if sink is None else np.broadcast_to(self._on_host(sink), (BATCH, 2 * HEADS))
        q, o, lse = map(self._on_host, (q, o, lse))
        bounded = self.rng.integers(BATCH)
        for b, new in enumerate([num_rows] * BATCH if counts is None else counts):
            # calls with more rows than this use other kernels
            queries = q[b] if 2 * num_rows > MOST_ROWS else q[b, :, :new]
            own = None if sinks is None else np.ascontiguousarray(sinks[b])
            one, other = (x[:, :new] for x in self._alone(queries, b, [new], causal, window, own))
            if b == bounded:  # the slowest check, so only for one sequence
                self._assert_within_bounds(q[b, :, :new], b, causal, window, own, one, other)
            assert np.array_equal(o[b, :, :new], one) and np.array_equal(lse[b, :, :new], other)
            of_no_row = np.full(2 * HEADS, -np.inf, np.float32) if own is None else own
            assert not o[b, :, new:].any() and (lse[b, :, new:] == of_no_row[:, None]).all()

    def _assert_refused(
        self, q: Any, counts: list[int] | None, causal: bool, window: Any, sink: Any, out: Any
    ) -> None:
        """Assert that a call is refused, and writes nothing, if a sequence has more queries than tokens."""
        try:
            self.cache.attention(q, counts=counts, causal=causal, window=window, sink=sink, out=out)
        except self.library.UnsupportedProblem as error:
            assert "append their keys and values first" in str(error)
            assert np.isnan(self._on_host(out)).all()
            return
        raise AssertionError("queries were taken whose keys were not appended")

    def _alone(self, q: Any, b: int, counts: list[int], causal: bool, window: Any, sink: Any) -> Any:
        """Compute the attention of one sequence with a separate cache that is not paged."""
        alone = self._new_cache(1, {}, self.cache.capacity)
        alone.append(*(self.xp.asarray(rows[b][None]) for rows in (self.keys, self.values)))
        q, sink = self.xp.asarray(q[None]), None if sink is None else self.xp.asarray(sink)
        o, lse = alone.attention(q, counts=counts, causal=causal, window=window, sink=sink, return_lse=True)
        return self._on_host(o)[0], self._on_host(lse)[0]

    def _assert_within_bounds(
        self, q: Any, b: int, causal: bool, window: Any, sink: Any, o: Any, lse: Any
    ) -> None:
        keys, values = self.keys[b], self.values[b]
        positions = keys.shape[1] - q.shape[1] + np.arange(q.shape[1])[:, None]
        at, (left, right) = np.arange(keys.shape[1]) - positions, window or (None, None)
        most = self.cache.capacity  # as large as any distance between positions
        allowed = (positions >= 0) & (at <= (0 if causal else most))
        allowed &= (at >= -(most if left is None else left)) & (at <= (most if right is None else right))
        rounded = {} if self.is_on_host else {"product_dtype": ml_dtypes.bfloat16 if self.has_8_bits else self.dtype}
        keys, values = keys.astype(self.dtype), values.astype(self.dtype)  # exact: numbers around 1 with few bits
        assert_within_bounds(Example(q=q, k=keys, v=values, mask=allowed, sink=sink, **rounded), o=o, lse=lse)

    def assert_holds(self) -> None:
        """Assert that the rows found through the block table equal those of the arrays."""
        self.cache.check()
        lengths = self._on_host(self.cache.lengths)
        assert lengths.tolist() == self.lengths() and lengths.dtype == np.int32
        table, k, v = map(self._on_host, (self.cache.block_table, self.cache.k, self.cache.v))
        size = k.shape[2]
        if self.has_8_bits:
            scales = map(self._on_host, (self.cache.k_scale, self.cache.v_scale))
            k, v = (pages.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale[..., None]
                    for pages, scale in zip((k, v), scales))  # fmt: skip
        for b, length in enumerate(self.lengths()):
            for held, pages in ((self.keys[b], k), (self.values[b], v)):
                starts = range(0, length, size)
                parts = [pages[table[b, start // size], :, : length - start] for start in starts]
                assert np.array_equal(np.concatenate(parts, axis=1) if parts else held[:, :0], held)
        if self.kind.startswith("over"):
            assert (self._on_host(self.of_others) == 7).all()


def walk(library: Any, kind: str, seed: int, steps: int, xp: Any = np, most_rows: int = 20) -> None:
    """Apply random operations of at most `most_rows` rows to a cache and to arrays, and compare them."""
    checked, rng = CheckedCache(library, kind, seed, xp), np.random.default_rng(seed)

    def counted(most: int) -> list[int] | None:
        return rng.integers(0, most + 1, BATCH).tolist() if rng.random() < 0.5 else None

    def side() -> int | None:
        return None if rng.random() < 0.3 else int(rng.integers(0, 20))

    for _ in range(steps):
        name = rng.choice(["append"] * 3 + ["attend"] * 3 + ["reserve", "truncate", "reset", "fork", "fork"])
        num_rows, share = int(rng.integers(0, most_rows)), rng.random(BATCH)
        if name == "append":
            checked.append(num_rows, counted(num_rows), bool(rng.random() < 0.5))
        elif name == "attend":
            window = (side(), side()) if rng.random() < 0.5 else None
            sink = SINKS[rng.integers(0, len(SINKS))] if xp is np else None
            checked.attend(num_rows, counted(num_rows), bool(rng.random() < 0.7), window, sink)
        elif name == "reserve":
            checked.reserve(rng.integers(0, 75, BATCH).tolist())
        elif name == "truncate":
            checked.truncate([int(length * min(1, 0.5 + x)) for length, x in zip(checked.lengths(), share)])
        elif name == "reset":
            checked.reset([int(rng.integers(0, BATCH))])
        else:
            source = int(rng.integers(0, BATCH))
            checked.fork(source, (source + 1 + int(rng.integers(0, BATCH - 1))) % BATCH)
        checked.assert_holds()
