"""Pages of a cache that queries choose by the bounds that it keeps are those that its rows give."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import cupy_machine
import ml_dtypes
import numpy as np
import pytest
from cuflash import selectors, sim
from cuflash.compiler.source import source
from cuflash.masks import ChosenBlocks
from cuflash.planning import page_choice
from cuflash.planning.decoding import CacheLayout
from cuflash.planning.list_kernels import AT_CALL
from cuflash.planning.selection_kernels import ChoiceRule
from cuflash.selectors import Budget, Forced
from executors import Run, needs_compiler, on_sim_and_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cache_calls import launch

PAGE = 16
LENGTHS = (37, 0, 70, 64)


@dataclass(frozen=True)
class Case:
    """A choice of pages for queries of a cache with rows of whole numbers, whose products have exact sums."""

    heads: int = 4
    queries: int = 1
    dim: int = 8
    dtype: Any = np.float16
    lengths: tuple[int, ...] = LENGTHS
    budget: Budget = Budget(top_k=2)
    forced: Forced = Forced()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def chosen(self) -> dict[str, Any]:
        return {"budget": self.budget, "forced": self.forced, **self.options}

    @property
    def capacity(self) -> int:
        return max(*self.lengths, 70)

    def arrays(self) -> tuple[Any, Any]:
        """Return queries and keys."""
        rng = np.random.default_rng(0)
        batch = len(self.lengths)
        q = rng.integers(-3, 4, (batch, self.heads, self.queries, 2 * self.dim)).astype(self.dtype)[..., ::2]
        return q, rng.integers(-3, 4, (batch, 2, max(self.lengths), self.dim)).astype(self.dtype)


GROUP = {"share": "group"}
CASES = {
    "one token": Case(),
    "a list of each group": Case(options=GROUP, dtype=ml_dtypes.bfloat16, heads=6),
    "several tokens": Case(queries=3, budget=Budget(top_k=3), forced=Forced(sink=1, local=1, diagonal=False)),
    "longer rows than registers": Case(dim=150, options=GROUP, dtype=np.float32),
    "a share of the pages": Case(queries=2, budget=Budget(density=0.5), dtype=np.float64),
    "a threshold": Case(budget=Budget(threshold=20.0, max_blocks=3, min_blocks=0), forced=Forced(diagonal=False)),
    "a limit": Case(budget=Budget(top_k=1, max_blocks=2), forced=Forced(sink=1)),
    "a negative scale": Case(options={"scale": -0.5}, budget=Budget(top_k=3)),
    "no causal mask": Case(queries=2, options={"causal": False}),
    "more queries than tokens": Case(queries=5, lengths=(3, 1, 5, 40)),
    "many pages": Case(heads=2, lengths=(9601, 700), budget=Budget(top_k=77), forced=Forced(sink=2, local=3)),
}  # fmt: skip


def expected(case: Case, q: Any, k: Any, length: int) -> Any:
    """Return the lists that the rows of each sequence give, of bounds over whole pages, filled with -1."""
    lists = []
    for b, stop in enumerate(case.lengths):
        rows, num_queries = k[b, :, :stop], min(case.queries, stop)
        own = selectors.quest(q[b, :, case.queries - num_queries :], rows, block=PAGE, **case.chosen).blocks
        heads = own.shape[0] if stop else (2 if case.options == GROUP else case.heads)
        full = np.full((heads, case.queries, length), -1, np.int32)
        full[:, case.queries - num_queries :, : own.shape[-1]] = own
        lists.append(full)
    return np.stack(lists)


def check_cache(case: Case, xp: Any = np, is_counted: bool = False, library: Any = cuflash) -> None:
    """Check the lists of a cache whose rows hold NaN, so that its bounds alone are read.

    A cache that the host counts refuses more queries than tokens, so that shorter sequences are empty.
    """
    if not is_counted:
        case = replace(case, lengths=tuple(length * (length >= case.queries) for length in case.lengths))
    q, k = case.arrays()
    cache = library.KVCache(
        batch=len(case.lengths), num_kv_heads=2, head_dim=case.dim, capacity=case.capacity, dtype=case.dtype,
        page_size=PAGE, num_pages=sum(-(-length // PAGE) for length in case.lengths) + 3, keeps_page_bounds=True,
        xp=xp,
    )  # fmt: skip
    for part in (slice(0, 17), slice(17, None)):
        counts = [len(range(length)[part]) for length in case.lengths]
        rows = xp.asarray(np.ascontiguousarray(k[:, :, part]))
        cache.append(rows, rows, counts=counts)
    cache.k[...] = np.nan
    if is_counted:
        cache.count_on_device()
    q_there = xp.asarray(np.ascontiguousarray(q))
    for _ in range(2):
        chosen = library.selectors.quest(q_there, cache, **_of(library, case))
        blocks = chosen.blocks if xp is np else chosen.blocks.get()
        assert chosen.block == PAGE and blocks.dtype == np.int32
        np.testing.assert_array_equal(blocks, expected(case, q, k, blocks.shape[-1]))


def _of(library: Any, case: Case) -> dict[str, Any]:
    """Return the arguments of a case as objects of a library."""
    budget = library.selectors.Budget(**vars(case.budget))
    return case.chosen | {"budget": budget, "forced": library.selectors.Forced(**vars(case.forced))}


@pytest.mark.parametrize("name", CASES)
def test_a_cache_on_the_host_gives_the_pages_of_its_rows(name: str) -> None:
    check_cache(CASES[name])


@pytest.mark.parametrize("is_counted", [False, True], ids=["host counts", "device counts"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "many pages"])
def test_a_cache_on_a_device_gives_the_pages_of_its_rows(xp: Any, name: str, is_counted: bool) -> None:
    check_cache(CASES[name], xp, is_counted)


def check_kernels(run: Run, case: Case, planning: Any = page_choice) -> None:
    """Check lists of pages in any order, with lengths and pages out of range; a page without a number comes last."""
    q, k = case.arrays()
    num_places, share = -(-case.capacity // PAGE), case.options.get("share", "query")
    rng, batch = np.random.default_rng(0), len(case.lengths)
    num_pages = batch * num_places + 2
    table = rng.permutation(num_pages)[: batch * num_places].reshape(batch, num_places).astype(np.int32)
    bounds = np.full((num_pages, 2, 2, case.dim), np.nan, case.dtype)
    for b, length in enumerate(case.lengths):
        for place in range(-(-length // PAGE)):
            keys = k[b, :, place * PAGE : min(length, place * PAGE + PAGE)].astype(np.float64)
            bounds[table[b, place], :, 0], bounds[table[b, place], :, 1] = keys.min(1), keys.max(1)
        table[b, -(-length // PAGE) :] = rng.choice([-1, 2**31 - 1, -(2**31)])
    out_of_range = {0: -5, case.capacity: case.capacity + 99}
    lengths = np.array([out_of_range.get(length, length) for length in case.lengths], np.int32)
    layout = CacheLayout(case.capacity, PAGE, num_pages, num_places)
    lists = np.full((batch, 2 if share == "group" else case.heads, case.queries, num_places), 7, np.int32)
    causal = case.options.get("causal", "bottom_right")
    budget, forced = case.budget, case.forced
    rule = ChoiceRule(
        lengths=(case.queries, case.capacity), block=(1, PAGE), offset=case.capacity - case.queries,
        is_causal=causal is not False, count=max(budget.top_k or 0, budget.min_blocks), mass=float(budget.part or 0),
        threshold=budget.threshold, num_sinks=forced.sink, num_local=forced.local, has_diagonal=forced.diagonal,
        most=budget.max_blocks or 0, list_length=num_places,
    )  # fmt: skip
    kernels = planning.page_choosing(
        q, bounds, layout, rule, heads_of_list=case.heads // 2 if share == "group" else 1,
        is_bottom_right=causal is not False, scale=case.options.get("scale", 1.0),
    )  # fmt: skip
    arrays = {"q": q, "key_bounds": bounds, "table": table, "lengths": lengths, AT_CALL: lists}
    arrays = {name: run.put(array) for name, array in arrays.items()}
    launch(run, kernels, arrays)
    np.testing.assert_array_equal(run.get(arrays[AT_CALL]), expected(case, q, k, num_places))


@on_sim_and_gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_choose_what_the_host_does(run: Run, name: str) -> None:
    check_kernels(run, CASES[name])


def check_far_pages() -> None:
    """Check the bounds of a sequence whose warps have numbers past 2**31, all others being empty.

    Only a thread block of this sequence runs, and the arrays have only the elements that it may touch.
    """
    batch, max_pages, count, dim = 33, 1 << 26, 3, 8
    spec, _ = page_choice._specs(np.dtype(np.float32))
    rng = np.random.default_rng(0)
    q, bounds = rng.standard_normal((dim,)).astype(np.float32), rng.standard_normal((4, 2, dim)).astype(np.float32)
    table, lengths = np.array([2, 0, 3, 1], np.int32), np.zeros(2 * batch, np.int32)
    lengths[-1], scores = count, np.full(4, 7, np.float32)
    first = 4 * (batch - 1) * max_pages  # bytes of the table, and of the scores, before those of the sequence
    record = np.zeros((), page_choice.PAGE_CHOICE)
    record["q"]["data"], record["q"]["column_stride"] = q.ctypes.data, 1
    addresses = {
        "key_bounds": bounds.ctypes.data, "table": table.ctypes.data - first, "scores": scores.ctypes.data - first,
        "lengths": lengths[batch:].ctypes.data,
    }  # fmt: skip
    numbers = {
        "scale": 1, "batch": batch, "num_heads": 1, "num_kv_heads": 1, "heads_of_list": 1, "num_queries": 1,
        "num_columns": dim, "num_pages": 4, "max_pages": max_pages, "page_size": 1, "capacity": max_pages,
    }  # fmt: skip
    for name, value in (addresses | numbers).items():
        record[name] = value
    block = (batch - 1) * max_pages // spec.num_warps
    text = source(spec, host=True).replace("blockIdx.x", f"(blockIdx.x + {block}u)")
    sim.build(text, spec.name, sanitize="undefined")(1, spec.num_threads, (record[()],), 0)
    products = q * bounds[table[:count]]
    np.testing.assert_allclose(scores[:count], products.max(axis=1).sum(axis=-1), rtol=1e-5)
    assert scores[count] == 7


@needs_compiler
def test_pages_have_bounds_where_int32_does_not_number_their_warps() -> None:
    check_far_pages()


def test_bounds_hold_for_all_keys_that_a_shortened_sequence_has_left() -> None:
    """A page whose greatest key was dropped may be chosen, and every page of a list has keys."""
    sizes = {"batch": 1, "num_kv_heads": 1, "head_dim": 4, "capacity": 64, "page_size": PAGE, "num_pages": 4}
    cache = cuflash.KVCache(**sizes, dtype=np.float32, keeps_page_bounds=True)
    k = np.zeros((1, 1, 60, 4), np.float32)
    k[0, 0, 20], k[0, 0, 31] = 2, 9
    cache.append(k, k)
    cache.truncate([30])
    q, none = np.ones((1, 1, 1, 4), np.float32), Forced(diagonal=False)
    assert selectors.quest(q, cache, budget=Budget(top_k=1), forced=none).blocks.tolist() == [[[[1]]]]
    assert selectors.quest(q, cache, budget=Budget(top_k=4)).blocks.tolist() == [[[[0, 1, -1, -1]]]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["query", "group"]), st.integers(1, 4), st.integers(1, 5))
def test_lists_are_those_of_rows_for_any_rows(seed: int, share: str, queries: int, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = {"batch": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 90, "page_size": PAGE, "num_pages": 12}
    caches = [cuflash.KVCache(**sizes, dtype=np.float32, keeps_page_bounds=keeps) for keeps in (True, False)]
    lengths = rng.integers(queries, 91, 2).tolist()
    k, q = (rng.standard_normal((2, *shape, 8), dtype=np.float32) for shape in ((2, 90), (6, queries)))
    for cache in caches:
        cache.append(k, k, counts=lengths)
    few, other = (selectors.quest(q, cache, budget=Budget(top_k=top_k), share=share).blocks for cache in caches)
    length = min(few.shape[-1], other.shape[-1])
    np.testing.assert_array_equal(few[..., :length], other[..., :length])
    assert (few[..., length:] == -1).all() and (other[..., length:] == -1).all()


def test_later_choices_only_launch_and_a_graph_reads_what_it_finds(xp: Any) -> None:
    """Lengths, pages and bounds are those at the replay; nothing waits for the device, and nothing else is launched."""
    rng = np.random.default_rng(0)
    sizes = {"batch": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 200, "page_size": PAGE, "num_pages": 26}
    cache = cuflash.KVCache(**sizes, dtype=np.float16, keeps_page_bounds=True, xp=xp)
    cache.append(*(xp.asarray(x) for x in rng.standard_normal((2, 2, 2, 90, 8)).astype(np.float16)), counts=[90, 33])
    cache.reserve([200, 200])
    cache.count_on_device()
    row = xp.asarray(rng.standard_normal((2, 2, 16, 8)).astype(np.float16))
    q = xp.asarray(rng.standard_normal((2, 4, 1, 8)).astype(np.float16))

    def step() -> tuple[Any, Any]:
        cache.append(row, row)
        chosen = selectors.quest(q, cache, budget=Budget(top_k=3), share="group")
        return chosen.blocks, cache.attention(q, mask=chosen)

    step()
    if xp.__class__ is cupy_machine.Cupy:
        before = xp.allocated
        xp.log.clear()
        selectors.quest(q, cache, budget=Budget(top_k=3), share="group")
        assert xp.log == [("launch", 0, "page_scores"), ("launch", 0, "page_choice")] and xp.allocated == before + 1
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        blocks, o = step()
        graph = stream.end_capture()
        for _ in range(3):
            row[...] = xp.asarray(rng.standard_normal((2, 2, 16, 8)).astype(np.float16))
            q[...] = xp.asarray(rng.standard_normal((2, 4, 1, 8)).astype(np.float16))
            graph.launch(stream)
            stream.synchronize()
            again = selectors.quest(q, cache, budget=Budget(top_k=3), share="group")
            assert np.array_equal(blocks.get(), again.blocks.get()) and (again.blocks.get() >= 0).all()
            assert np.array_equal(o.get(), cache.attention(q, mask=again).get())


def refusals(library: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """Return arguments that `quest` refuses for 2 sequences of 4 query heads and 2 key/value heads, and why."""
    of, few = library.selectors, library.selectors.Budget(top_k=2)
    return {
        "mass": ({"budget": of.Budget(mass=0.5, max_blocks=3)}, "budget must have top_k, density or threshold"),
        "no capacity": ({"budget": of.Budget(threshold=0.5)}, "budget must have max_blocks"),
        "no budget": ({"budget": 3}, "budget must be a Budget; got"),
        "forced": ({"budget": few, "forced": 1}, "forced must be a Forced; got"),
        "share": ({"budget": few, "share": "heads"}, 'share must be "query" or "group"'),
        "few blocks": (
            {"budget": of.Budget(top_k=1, max_blocks=1), "forced": of.Forced(sink=2)}, "max_blocks must be at least 3"
        ),
        "scale": ({"budget": few, "scale": "1"}, "scale"),
        "pages": ({"budget": few, "block": (2, 16)}, "block must be an int or (1, keys)"),
        "heads": ({"budget": few, "q": np.ones((2, 3, 1, 8), np.float32)}, "q's 3 heads must be a multiple of"),
        "dims": ({"budget": few, "q": np.ones((2, 4, 1, 7), np.float32)}, "head_dim"),
        "dtypes": ({"budget": few, "q": np.ones((2, 4, 1, 8), np.float64)}, "dtype"),
        "batch": ({"budget": few, "q": np.ones((3, 4, 1, 8), np.float32)}, "q must have shape (2, num_heads, n, head_"),
    }  # fmt: skip


def check_refusals(library: Any) -> None:
    sizes = {"batch": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 64, "page_size": PAGE, "num_pages": 8}
    cache = library.KVCache(**sizes, dtype=np.float32, keeps_page_bounds=True)
    cache.append(*np.ones((2, 2, 2, 20, 8), np.float32))
    for name, (arguments, message) in refusals(library).items():
        q = arguments.pop("q", np.ones((2, 4, 1, 8), np.float32))
        with pytest.raises(library.UnsupportedProblem) as refused:
            library.selectors.quest(q, cache, **arguments)
        assert message in str(refused.value), (name, str(refused.value))


def test_arguments_are_refused_in_words() -> None:
    check_refusals(cuflash)


def check_tokens(keeps: bool, options: dict[str, Any], library: Any = cuflash) -> None:
    """Check that a choice is refused with the sentence of `attention`, and that an empty sequence has no pages."""
    sizes = {"batch": 2, "num_kv_heads": 1, "head_dim": 4, "capacity": 64, "page_size": PAGE, "num_pages": 8}
    cache = library.KVCache(**sizes, dtype=np.float32, keeps_page_bounds=keeps)
    k, q = np.ones((2, 1, 20, 4), np.float32), np.ones((2, 2, 3, 4), np.float32)
    cache.append(k, k, counts=[20, 2])
    quest, few = library.selectors.quest, library.selectors.Budget(top_k=1)
    sentences = []
    for call in (lambda: quest(q, cache, budget=few, **options), lambda: cache.attention(q)):
        with pytest.raises(library.UnsupportedProblem) as refused:
            call()
        sentences.append(str(refused.value))
    assert sentences[0] == sentences[1] and "q has 3 rows and sequence 1 has 2 tokens" in sentences[0]
    cache.reset([1])
    chosen = quest(q, cache, budget=few, **options)
    assert (chosen.blocks[1] == -1).all() and (chosen.blocks[0] >= 0).all()


@pytest.mark.parametrize("keeps", [True, False], ids=["bounds of pages", "rows"])
@pytest.mark.parametrize("options", [{}, {"block": 8}, {"window": (20, None)}], ids=str)
def test_a_choice_needs_a_token_for_each_query_as_attention_does(keeps: bool, options: dict[str, Any]) -> None:
    check_tokens(keeps, options)


def test_masks_and_other_blocks_read_the_rows() -> None:
    """Bounds of whole pages do not know which keys a mask shows, nor blocks of other sizes."""
    sizes = {"batch": 1, "num_kv_heads": 1, "head_dim": 4, "capacity": 64, "page_size": PAGE, "num_pages": 4}
    cache = cuflash.KVCache(**sizes, dtype=np.float32, keeps_page_bounds=True)
    k = np.random.default_rng(0).standard_normal((1, 1, 60, 4), dtype=np.float32)
    cache.append(k, k)
    q, few = np.ones((1, 2, 1, 4), np.float32), Budget(top_k=2)
    for options in ({"window": (20, None)}, {"mask": cuflash.masks.Lengths(kv=40)}, {"block": 8}):
        chosen = selectors.quest(q, cache, budget=few, **options)
        wanted = selectors.quest(q[0], k[0], budget=few, **{"block": PAGE} | options)
        assert isinstance(chosen, ChosenBlocks)
        np.testing.assert_array_equal(chosen.blocks[0], wanted.blocks)
