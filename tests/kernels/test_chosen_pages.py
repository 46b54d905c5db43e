"""Attention to chosen blocks of a cache: results, bits, and what is never read; checks that planted faults have too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import NEW, Drawn, cache_of, drawn, same_bits
from cuflash.cache import _passes
from cuflash.cache import one_by_one as calls_of_queries
from cuflash.executors.sim import Simulator
from cuflash.masks import ChosenBlocks
from cuflash.scores import Score
from cuflash.testing import Example, assert_within_bounds
from executors import RUNS, SIM, Run, blocks_together, hostile_schedules, needs_compiler, on_sim_and_gpu
from scored_caches import arrays_of, mixed, of_one
from test_chosen_kernels import INTEGERS

from cuflash import KVCache, UnsupportedProblem, masks

LENGTHS = (300, 0, 65, 193)
on_every_run = pytest.mark.parametrize("run", RUNS, ids=str)


@dataclass(frozen=True)
class Kind:
    """Lists of a call on a cache, and its pages."""

    changed: dict[str, Any] = field(default_factory=dict)  # as in `NEW`
    block: int = 64
    num_lists: int = 1
    num_chosen: int = 3
    dtype: Any = np.int32
    batch: int = len(LENGTHS)  # of the lists
    has_counts: bool = False
    pages: dict[str, int] = field(default_factory=dict)

    def call(self) -> Drawn:
        return drawn(NEW | {"heads": 4} | self.changed, LENGTHS).fitting()

    def lists(self) -> ChosenBlocks:
        rng, rows = np.random.default_rng(0), self.changed.get("rows", 1)
        shape = self.batch, self.num_lists, rows, self.num_chosen
        blocks = rng.integers(-1, -(-300 // self.block), shape).astype(self.dtype)
        counts = rng.integers(0, self.num_chosen, shape[:-1], endpoint=True).astype(np.uint8)
        return ChosenBlocks(blocks, self.block, counts=counts if self.has_counts else None)


OF_64 = {"page_size": 64, "num_pages": 30}
KINDS = {
    "one list": Kind(),
    "a list of each key/value head": Kind({"rows": 3}, num_lists=2, dtype=np.int64, pages=OF_64),
    "a list of each query head": Kind({"dtype": ml_dtypes.bfloat16, "sink": True}, num_lists=4, pages=OF_64),
    "a quarter of a page": Kind({"rows": 2}, block=16, num_lists=2, num_chosen=9, has_counts=True, pages=OF_64),
    "four pages": Kind(block=64, batch=1, pages={"page_size": 16, "num_pages": 90}),
    "blocks of two steps": Kind({"rows": 3, "window": (70, None)}, block=128),
    "large blocks": Kind({"dim": 256, "dtype": ml_dtypes.bfloat16}, block=48, num_chosen=6),
}


def attended(
    run: Run, call: Drawn, chosen: ChosenBlocks, pages: dict[str, int], cache: KVCache | None = None, **options: Any
) -> tuple[Any, Any]:
    cache = cache or hidden(run, call, chosen, pages)
    lists = replace(chosen, blocks=run.put(chosen.blocks), counts=_put(run, chosen.counts))
    output = cache.attention(
        run.put(call.q), mask=lists, window=call.window, sink=_put(run, call.sink), counts=call.counts,
        executor=run.executor, return_lse=True, **options,
    )  # fmt: skip
    return tuple(run.get(x) for x in output)


def _put(run: Run, array: Any) -> Any:
    return None if array is None else run.put(array)


def hidden(run: Run, call: Drawn, chosen: ChosenBlocks, pages: dict[str, int]) -> KVCache:
    """Return a cache that holds NaN in all blocks that no query of a key/value head chose."""
    cache, batch, kv_heads = cache_of(run, call, pages), len(call.lengths), call.k.shape[1]
    allowed = chosen.resolve(masks.MaskShape((batch,), call.q.shape[1], call.q.shape[2], 300))
    allowed = allowed.toarray(batch=(batch,), num_heads=call.q.shape[1], seqlen_q=call.q.shape[2], seqlen_kv=300)
    is_read = allowed.reshape(batch, kv_heads, -1, 300).any(axis=2)
    table, size = run.get(cache.block_table), cache.k.shape[2]
    for b, length in enumerate(call.lengths):
        for j in range(0, length, 16):
            for head in np.flatnonzero(~is_read[b, :, j]):
                where = int(table[b, j // size]), int(head), slice(j % size, j % size + min(16, length - j))
                cache.k[where] = cache.v[where] = np.nan
    return cache


def of_sequence(chosen: ChosenBlocks, b: int, count: int) -> ChosenBlocks:
    """Return the lists of the first `count` queries of a sequence."""
    own = [None if x is None else x[b if x.shape[0] > 1 else 0][:, :count] for x in (chosen.blocks, chosen.counts)]
    return ChosenBlocks(own[0], chosen.block, counts=own[1])


def assert_is_attention(
    rounded: Callable[[Example], Example], call: Drawn, chosen: ChosenBlocks, o: Any, lse: Any,
    arrays: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Assert that the results of each sequence are within bounds, those of its own keys, lists and window.

    `rounded` returns an example with the dtype to which weights are rounded.
    """
    for b, length in enumerate(call.lengths):
        count = call.q.shape[2] if call.counts is None else call.counts[b]
        own = of_sequence(chosen, b, count)
        past = own.blocks >= -(-length // own.block)
        own = replace(own, blocks=np.where(past, np.array(-1, own.blocks.dtype), own.blocks))
        mask = own & masks.Causal("bottom_right")
        mask = mask if call.window is None else mask & masks.SlidingWindow(*call.window, "bottom_right")
        score = None if arrays is None else of_one(arrays, b, max(0, length - count))
        example = Example(
            q=call.q[b, :, :count], k=call.k[b, :, :length], v=call.v[b, :, :length], mask=mask, sink=call.sink,
            score=score,
        )  # fmt: skip
        assert_within_bounds(rounded(example), o=o[b, :, :count], lse=lse[b, :, :count])
        assert not o[b, :, count:].any()


def check_results(run: Run, kind: Kind) -> None:
    """Check bounds, and equal bits for sequences alone, other pages, and lists in another order with repetitions."""
    call, chosen = kind.call(), kind.lists()
    results = attended(run, call, chosen, kind.pages)
    assert_is_attention(run.rounded, call, chosen, *results)
    alone = replace(chosen, blocks=chosen.blocks[-1:], counts=None if chosen.counts is None else chosen.counts[-1:])
    assert same_bits(attended(run, call.of([3]), alone, kind.pages), [x[3:] for x in results])
    other = {} if kind.pages else OF_64
    if not other or not (kind.block % 64 and 64 % kind.block):
        assert same_bits(attended(run, call, chosen, other), results)
    if chosen.counts is None:
        twice = np.concatenate([chosen.blocks[..., ::-1], chosen.blocks[..., :1]], axis=-1)
        assert same_bits(attended(run, call, replace(chosen, blocks=twice), kind.pages), results)


@on_every_run
@pytest.mark.parametrize("name", KINDS)
def test_results_are_those_of_the_chosen_blocks_alone(run: Run, name: str) -> None:
    check_results(run, KINDS[name])


def check_signs(run: Run, dtype: str) -> None:
    """Check that counts below 0 are 0, and those past the end all entries; only calls check those on the host."""
    kind = Kind({"rows": 2}, num_lists=2, pages=OF_64)
    call, chosen = kind.call(), kind.lists()
    numbers = [0, 1, 2, 3, 4, np.iinfo(dtype).min, np.iinfo(dtype).max]
    counts = np.resize(np.array(numbers, dtype), chosen.blocks.shape[:-1])
    is_used = np.arange(3) < np.resize(np.array(numbers, object), counts.shape)[..., None]
    expected = attended(run, call, replace(chosen, blocks=np.where(is_used, chosen.blocks, np.int32(-1))), kind.pages)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChosenBlocks, "require_numbers", lambda *lengths: None)
        assert same_bits(attended(run, call, replace(chosen, counts=counts), kind.pages), expected)


@on_sim_and_gpu
@pytest.mark.parametrize("dtype", INTEGERS)
def test_counts_of_every_dtype_keep_their_sign(run: Run, dtype: str) -> None:
    check_signs(run, dtype)


@on_sim_and_gpu
def test_a_cache_takes_the_kernel_where_it_serves(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_of_queries, "attention", None)  # what else would serve
    for kind in KINDS.values():
        call, chosen = kind.call(), kind.lists()
        results = attended(run, call, chosen, kind.pages)
        assert [x.shape for x in results] == [call.q.shape, call.q.shape[:-1]]
        assert_is_attention(run.rounded, call, chosen, *results)


def check_all_chosen(run: Run) -> None:
    """Check that a list of all blocks gives the bits of a call without one."""
    for pages, rows, block in ((OF_64, 1, 64), ({}, 3, 128)):
        call = drawn(NEW | {"heads": 4, "rows": rows}, (300, 64, 193))
        every = ChosenBlocks(np.tile(np.arange(-(-300 // block)), (1, rows, 1)), block)
        cache = cache_of(run, call, pages)
        expected = cache.attention(run.put(call.q), executor=run.executor, return_lse=True)
        assert same_bits(attended(run, call, every, pages, cache), [run.get(x) for x in expected])


@on_sim_and_gpu
def test_all_blocks_give_the_bits_of_a_call_without_lists(run: Run) -> None:
    check_all_chosen(run)


@needs_compiler
@pytest.mark.parametrize("name", ["a list of each key/value head", "a quarter of a page"])
def test_every_schedule_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    call, chosen = kind.call(), kind.lists()
    results = attended(SIM, call, chosen, kind.pages)
    for machine in (*map(Simulator, hostile_schedules(name)), *blocks_together(name)):
        monkeypatch.setattr(_passes, "Simulator", lambda machine=machine: machine)
        assert same_bits(attended(SIM, call, chosen, kind.pages), results)


@on_every_run
@pytest.mark.parametrize("name", ["a list of each key/value head", "a quarter of a page"])
def test_score_functions_have_positions_of_the_cache(run: Run, name: str) -> None:
    check_scores(run, name)


def check_scores(run: Run, name: str) -> None:
    kind, arrays = KINDS[name], arrays_of(len(LENGTHS), 4)
    call, chosen = kind.call(), kind.lists()
    score = Score(mixed, **{name: run.put(array) for name, array in arrays.items()})
    results = attended(run, call, chosen, kind.pages, score=score)
    assert_is_attention(run.rounded, call, chosen, *results, arrays)


@on_every_run
def test_eight_bits_are_attended_as_their_rows(run: Run) -> None:
    check_eight_bits(run)


def check_eight_bits(run: Run) -> None:
    """Check that results are those of the rows that the cache returns."""
    kind = Kind({"rows": 3}, num_lists=2)
    call, chosen = kind.call(), kind.lists()
    sizes = {"batch": 4, "num_kv_heads": 2, "head_dim": 64, "capacity": 300, "dtype": ml_dtypes.float8_e4m3fn}
    cupy = {"xp": pytest.importorskip("cupy")} if run.is_on_device else {}
    cache = KVCache(**sizes, **OF_64, **cupy)
    cache.append(run.put(call.k), run.put(call.v), counts=call.lengths)
    rows = [[run.get(x) for x in cache.rows(b)] for b in range(4)]
    k, v = np.zeros_like(call.k), np.zeros_like(call.v)
    for b, length in enumerate(call.lengths):
        k[b, :, :length], v[b, :, :length] = rows[b]
    results = attended(run, call, chosen, {}, cache)
    rounded = run.rounded
    if run.executor != "cpu":  # weights are rounded to bfloat16, whose range includes that of the scales
        rounded = partial(Example.but, product_dtype=np.dtype(ml_dtypes.bfloat16))
    assert_is_attention(rounded, replace(call, k=k, v=v), chosen, *results)


@pytest.mark.gpu
def test_a_graph_reads_lists_at_each_replay() -> None:
    cupy = pytest.importorskip("cupy")
    call, kind = drawn(NEW | {"heads": 4}, (300, 64, 193)), KINDS["a list of each key/value head"]
    blocks = cupy.asarray(np.random.default_rng(0).integers(-1, 5, (3, 2, 1, 3)).astype(np.int32))
    cache, q = cache_of(Run("gpu"), call, kind.pages), cupy.asarray(call.q)
    cache.count_on_device()
    cache.attention(q, mask=ChosenBlocks(blocks, 64))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()  # the other stream does not wait for rows, lengths and counters
    with stream:
        stream.begin_capture()
        o = cache.attention(q, mask=ChosenBlocks(blocks, 64))
        graph = stream.end_capture()
        for seed in range(3):
            blocks[...] = cupy.asarray(np.random.default_rng(seed).integers(-1, 5, blocks.shape).astype(np.int32))
            graph.launch()
            assert same_bits([o.get()], [cache.attention(q, mask=ChosenBlocks(blocks, 64)).get()])


# Refusals


def refusals(library: Any) -> dict[str, tuple[Any, str]]:
    """Return masks that a cache of 2 sequences, 2 key/value heads and pages of 64 refuses, and why."""

    def lists(*shape: int, block: int = 64, value: int = 0) -> Any:
        return library.masks.ChosenBlocks(np.full(shape, value, np.int32), block)

    return {
        "no lists": (library.masks.Causal(), "mask must be a masks.ChosenBlocks with blocks of each sequence's"),
        "an array": (np.zeros((1, 1, 1), bool), "mask must be a masks.ChosenBlocks with blocks of each sequence's"),
        "other heads": (lists(3, 1, 2), "blocks must have 1, 2 (num_kv_heads) or 4 (num_heads) heads; got 3"),
        "other rows": (lists(1, 2, 2), "blocks must have seqlen_q=1 rows; got 2"),
        "another batch": (lists(3, 1, 1, 2), "blocks"),
        "blocks across pages": (lists(1, 1, 2, block=96), "mask must have blocks that are multiples or divisors of a "),
        "blocks of 8": (lists(1, 1, 2, block=8), "a page of 64 positions, in multiples of 16; got block=8"),
        "lists of packed sequences": (
            library.masks.ChosenBlocks(lists(1, 1, 2).blocks, 64, sequences=library.masks.Sequences([0, 1], [0, 300])),
            "from each sequence's first position; got sequences=Sequences(",
        ),
        "no such block": (lists(1, 1, 2, value=5), "blocks must hold block numbers from -1, which means no block, to"),
    }


def check_refusals(library: Any) -> None:
    cache = library.KVCache(batch=2, num_kv_heads=2, head_dim=8, capacity=300, dtype=np.float16, **OF_64)
    rows = np.ones((2, 2, 2, 100, 8), np.float16)
    cache.append(*rows)
    q = np.ones((2, 4, 1, 8), np.float16)
    cache.attention(q, mask=library.masks.ChosenBlocks(np.zeros((1, 1, 2), np.int32), 64))  # later calls could reuse it
    for name, (mask, message) in refusals(library).items():
        with pytest.raises(library.UnsupportedProblem) as refused:
            cache.attention(q, mask=mask)
        assert message in str(refused.value), name


def test_lists_that_do_not_fit_are_refused() -> None:
    import cuflash

    check_refusals(cuflash)


def test_numbers_of_a_repeated_call_are_checked_too() -> None:
    cache = KVCache(batch=1, num_kv_heads=1, head_dim=8, capacity=300, dtype=np.float32)
    cache.append(*np.ones((2, 1, 1, 100, 8), np.float32))
    blocks = np.zeros((1, 1, 2), np.int64)
    q, mask = np.ones((1, 1, 1, 8), np.float32), ChosenBlocks(blocks, 24)  # which no kernel takes
    assert (cache.attention(q, mask=mask) == 1).all()
    blocks[...] = 13
    with pytest.raises(UnsupportedProblem, match="to 12"):
        cache.attention(q, mask=mask)
