"""Selectors equal their definitions in float64; causality, forced blocks and budgets are exact for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cupy_machine
import device_double
import numpy as np
from cuflash.planning._call_cache import CALLS
import pytest
from cuflash.selectors import Budget, Forced, budget as budgets, grid as grids
from cuflash.testing import Example, assert_within_bounds
from foreign import Foreign
from executors import CPU, RUNS, Run, needs_compiler, on_every_executor
from hypothesis import given
from hypothesis import strategies as st
from test_device_masks_gpu import captured
from test_recall import weights

import cuflash
from cuflash import masks, selectors

ON_KERNELS = ("pooled", "antidiagonal", "nsa", "vertical_slash", "oracle")
FORCED = Forced(sink=1, local=2)
FEW = Budget(top_k=2)


def select(name: str, run: Run, q: Any, k: Any, *, top_k: int = 3, **options: Any) -> Any:
    """Return the index that the selector with this name chooses, with blocks of 8."""
    given_budget = {"budget": Budget(top_k=top_k)}
    if name == "moba":
        name, options = "pooled", {"pool_queries": False} | options
    if name == "nsa":
        options = {"compression": (8, 4)} | options
    if name == "antidiagonal":
        options = {"stride": 4} | options
    if name == "vertical_slash":
        given_budget = {"vertical": Budget(top_k=top_k), "slash": Budget(top_k=top_k)}
        options = {"num_queries": 8} | options
    if name in (*ON_KERNELS, "moba"):
        options["executor"] = run.executor
    options = {"block": 8, "forced": FORCED} | options
    if name == "quest":
        options["page_size"] = options.pop("block")
    q, k = (run.put(x) if isinstance(x, np.ndarray) else x for x in (q, k))
    return indexed(getattr(selectors, name)(q, k, **given_budget, **options), q, k, options)


def indexed(chosen: Any, q: Any, k: Any, options: Any) -> Any:
    """Return the index of the blocks that queries chose, under the masks of the call; return an index unchanged."""
    if not isinstance(chosen, masks.ChosenBlocks):
        return chosen
    causal, mask = options.get("causal", "bottom_right"), chosen & options.get("mask", masks.Band())
    if causal:
        mask = mask & masks.Causal(causal if isinstance(causal, str) else None)
    if "window" in options:
        mask = mask & masks.SlidingWindow(*options["window"], "bottom_right")
    axes = {"batch": q.shape[:-3], "num_heads": q.shape[-3] if q.ndim > 2 else 1}
    return cuflash.BlockIndex.from_mask(mask, q.shape[-2], k.shape[-2], (1, chosen.block), **axes)


def by_sorting(
    scores: Any, shares: Any, eligible: Any, forced: Any, budget: Budget
) -> list[int]:
    """Return the blocks that a row keeps, by the definition of `Budget`."""
    forced = forced & eligible
    scores = np.where(np.isnan(scores), -np.inf, scores)
    order = sorted(np.flatnonzero(eligible), key=lambda j: (not forced[j], 0 if forced[j] else -scores[j], j))
    count = int(forced.sum())
    if budget.top_k is not None:
        count = max(count, budget.top_k)
    elif budget.mass is not None:
        sums = np.cumsum([0, *shares[order]])
        count = max(count, int(np.argmax(sums >= budget.mass * shares[eligible].sum())))
    elif budget.density is not None and order:
        count = max(count, min(n for n in range(len(order) + 1) if n / len(order) >= budget.density))
    chosen = set(order[: max(count, budget.min_blocks)])
    if budget.threshold is not None:
        chosen |= {j for j in order if scores[j] >= budget.threshold}
    if budget.max_blocks is not None:
        chosen = set([j for j in order if j in chosen][: budget.max_blocks])
    return sorted(int(j) for j in chosen)


SCORES = st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, -1.0, 3.0, np.inf, -np.inf, np.nan])
MAXIMA = st.one_of(st.none(), st.integers(4, 12))
FEWEST = st.integers(0, 4)
BUDGETS = st.one_of(
    st.builds(Budget, top_k=st.integers(1, 9), min_blocks=FEWEST),
    st.builds(Budget, mass=st.sampled_from([0.125, 0.5, 0.75, 1.0]), min_blocks=FEWEST, max_blocks=MAXIMA),
    st.builds(Budget, threshold=st.sampled_from([-1.0, 0.25, 2.0]), min_blocks=FEWEST, max_blocks=MAXIMA),
    st.builds(
        Budget, density=st.sampled_from([0.1, 0.25, 0.29, 1 / 3, 0.55, 0.6, 1.0]), min_blocks=FEWEST, max_blocks=MAXIMA
    ),
)


@given(st.data(), st.integers(1, 9), BUDGETS)
def test_budgets_are_exact_to_the_block(data: Any, length: int, budget: Budget) -> None:
    """Of equal scores, the lower block number is kept; shares are eighths, so their sums are exact."""
    check_budget(cuflash, data, length, budget)


def check_budget(library: Any, data: Any, length: int, budget: Any) -> None:
    def row(values: st.SearchStrategy[Any], dtype: Any) -> Any:
        return np.array(data.draw(st.lists(values, min_size=length, max_size=length)), dtype)

    scores, shares = row(SCORES, np.float32), row(st.integers(0, 8), np.float32) / 8
    eligible, forced = row(st.booleans(), bool), row(st.booleans(), bool)
    chosen = library.selectors.budget.choose(scores, shares, eligible, forced, budget)
    assert np.flatnonzero(chosen).tolist() == by_sorting(scores, shares, eligible, forced, budget)


@given(st.integers(0, 2**32 - 1), BUDGETS)
def test_a_device_chooses_without_waiting(seed: int, budget: Budget) -> None:
    rng = np.random.default_rng(seed)
    scores, eligible = rng.random((2, 5, 7), np.float32), rng.random((5, 7)) < 0.7
    host_inputs = [scores, scores, eligible, budgets.Diagonal.of(np, (20, 28), (4, 4), 8).forced(FORCED)]
    diagonal = budgets.Diagonal.of(device_double.namespace, (20, 28), (4, 4), 8)
    device_inputs = [*map(device_double.to_device, host_inputs[:3]), diagonal.forced(FORCED)]
    chosen = device_double.to_host(budgets.choose(*device_inputs, budget))
    np.testing.assert_array_equal(chosen, budgets.choose(*host_inputs, budget))


@pytest.mark.parametrize(
    ("budget", "most"), [(Budget(top_k=3), 15), (Budget(mass=0.9), 30), (Budget(threshold=0.5), 18)]
)
def test_choosing_takes_operations_that_do_not_follow_the_blocks(budget: Budget, most: int) -> None:
    counts = []
    for num_blocks in (4, 64):
        scores = device_double.to_device(np.random.default_rng(0).random((2, num_blocks, num_blocks), np.float32))
        diagonal = budgets.Diagonal.of(device_double.namespace, (8 * num_blocks,) * 2, (8, 8), 0)
        forced = diagonal.forced(FORCED)
        with device_double.counted() as operations:
            budgets.choose(scores, scores, diagonal.is_met, forced, budget)
        counts.append(operations())
    assert counts[0] == counts[1] <= most, counts


@given(
    st.integers(1, 40), st.integers(1, 40), st.sampled_from([(4, 8), (8, 4), (5, 5)]), st.sampled_from([0, 3, -2]),
    st.builds(Forced, sink=st.integers(0, 2), local=st.integers(0, 3), diagonal=st.booleans()),
)  # fmt: skip
def test_forced_blocks_are_those_of_their_words(
    seqlen_q: int, seqlen_kv: int, block: tuple[int, int], offset: int, forced: Forced
) -> None:
    forced_blocks = budgets.Diagonal.of(np, (seqlen_q, seqlen_kv), block, offset).forced(forced)
    expected = np.zeros(forced_blocks.shape, bool)
    expected[:, : forced.sink] = True
    for row in range(forced_blocks.shape[0]):
        columns = [(i + offset) // block[1] for i in range(row * block[0], min((row + 1) * block[0], seqlen_q))]
        wanted = range(columns[-1] - forced.local + 1, columns[-1] + 1)
        for column in {*wanted, *(columns if forced.diagonal else ())}:
            if 0 <= column < forced_blocks.shape[1]:
                expected[row, column] = True
    np.testing.assert_array_equal(forced_blocks, expected)


@pytest.mark.parametrize("name", [*ON_KERNELS, "moba", "random", "local", "quest"])
@on_every_executor
def test_what_must_be_exact_is(run: Run, name: str) -> None:
    """Causality, forced blocks and counts are exact for groups of heads, a batch, and short last blocks."""

    @run.settings
    @given(
        st.sampled_from([False, True, "bottom_right"]), st.integers(9, 77), st.integers(9, 77),
        st.sampled_from([np.float16, np.float32]), st.integers(0, 2**32 - 1),
    )  # fmt: skip
    def check(causal: Any, seqlen_q: int, seqlen_kv: int, dtype: Any, seed: int) -> None:
        check_exactness(run, name, causal, (seqlen_q, seqlen_q if causal is True else seqlen_kv), dtype, seed)

    check()


def check_exactness(run: Run, name: str, causal: Any, lengths: tuple[int, int], dtype: Any, seed: int) -> None:
    rng, (seqlen_q, seqlen_kv) = np.random.default_rng(seed), lengths
    q = rng.standard_normal((2, 4, seqlen_q, 8)).astype(dtype)
    k = rng.standard_normal((1, 2, seqlen_kv, 8)).astype(dtype)
    index = select(name, run, q, k, causal=causal)
    allowed = masks.Causal(causal if isinstance(causal, str) else None).toarray(seqlen_q, seqlen_kv) if causal else True
    listed = run.get(index.states()) > 0
    block = index.block
    eligible = cuflash.BlockIndex.from_mask(masks.Dense(np.broadcast_to(allowed, (seqlen_q, seqlen_kv))), seqlen_q,
                                            seqlen_kv, block).states()[0, 0] > 0  # fmt: skip
    offset = seqlen_kv - seqlen_q if causal == "bottom_right" else 0
    must = budgets.Diagonal.of(np, (seqlen_q, seqlen_kv), block, offset).forced(FORCED) & eligible
    elements = index._on_host.toarray()
    assert not (elements & ~np.broadcast_to(allowed, elements.shape)).any()
    assert not (must & ~listed).any() and not (listed & ~eligible).any()
    if name in ("moba", "vertical_slash"):  # these selectors keep unions over queries, keys and diagonals
        return
    expected = np.minimum(eligible.sum(-1), np.maximum(must.sum(-1), 3))
    np.testing.assert_array_equal(listed.sum(-1), np.broadcast_to(expected, listed.shape[:-1]))


def means(x: Any, side: int) -> Any:
    starts = range(0, x.shape[-2], side)
    counts = np.diff([*starts, x.shape[-2]])
    return np.add.reduceat(x, starts, axis=-2) / counts[:, None]


def of_pooled(q: Any, k: Any) -> Any:
    return weights(means(q, 8), means(k, 8), np.tri(8, dtype=bool))


def of_antidiagonal(q: Any, k: Any) -> Any:
    """Sum scores over the antidiagonals of 4 x 4 cells, take the softmax over cells, and sum that over blocks."""
    s = (q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5).reshape(*q.shape[:-2], 16, 4, 16, 4)
    cells = sum(s[..., 3 - n, :, n] for n in range(4)) / 4
    e = np.exp(cells) * np.tri(16)
    return (e / e.sum(-1, keepdims=True)).reshape(*q.shape[:-2], 8, 2, 8, 2).sum((-1, -3))


def of_nsa(q: Any, k: Any) -> Any:
    """Take the softmax over means of 8 keys with a stride of 4, and distribute it to blocks by overlap."""
    starts = np.arange(0, 64 - 8 + 1, 4)
    compressed = np.stack([k[..., start : start + 8, :].mean(-2) for start in starts], axis=-2)
    p = weights(q, compressed, starts + 7 <= np.arange(64)[:, None])
    overlap = [[max(0, min(start + 8, 8 * j + 8) - max(start, 8 * j)) / 4 for j in range(8)] for start in starts]
    by_query = p @ np.array(overlap)
    return by_query.reshape(2, 2, 8, 8, 8).sum((1, 3)).repeat(2, axis=0)


@on_every_executor
@pytest.mark.parametrize(
    ("name", "scores_of"), [("pooled", of_pooled), ("antidiagonal", of_antidiagonal), ("nsa", of_nsa)]
)
def test_scores_are_those_of_the_paper(run: Run, name: str, scores_of: Callable[..., Any]) -> None:
    q, k = np.random.default_rng(1).standard_normal((2, 4, 64, 16))
    k = k[:2]
    scores = scores_of(q, k if name == "nsa" else k.repeat(2, axis=0)) if name != "pooled" else scores_of(q, k)
    eligible, must = np.tri(8, dtype=bool), budgets.Diagonal.of(np, (64, 64), (8, 8), 0).forced(FORCED)
    expected = budgets.choose(scores, scores, eligible, must, Budget(top_k=5))
    listed = run.get(select(name, run, q, k, causal=True, top_k=5).states())[0] > 0
    np.testing.assert_array_equal(listed, expected)


@on_every_executor
def test_queries_choose_for_themselves_as_in_moba(run: Run) -> None:
    """Affinities are products of a query with block means of keys before it; the query's own block counts."""
    q, k = np.random.default_rng(2).standard_normal((2, 2, 64, 16))
    s = q @ means(k, 8).swapaxes(-1, -2)
    allowed = np.zeros((2, 64, 8), bool)
    for h, i in np.ndindex(2, 64):
        past = sorted(range(i // 8 if i % 8 < 7 else i // 8 + 1), key=lambda j: -s[h, i, j])
        others = [j for j in past if j != i // 8]
        allowed[h, i, [i // 8, *others[:2]]] = True
    listed = run.get(select("moba", run, q, k, causal=True, forced=Forced()).states())[0] > 0
    np.testing.assert_array_equal(listed, allowed.reshape(2, 8, 8, 8).any(2))


@on_every_executor
def test_columns_and_diagonals_of_the_last_queries_are_kept(run: Run) -> None:
    q, k = np.random.default_rng(3).standard_normal((2, 2, 60, 16))
    p = weights(q, k, np.tri(60, dtype=bool))[:, -8:]
    listed = run.get(select("vertical_slash", run, q, k, causal=True, top_k=2, forced=Forced(diagonal=False)).states())
    i, j = np.arange(52, 60)[:, None], np.arange(60)
    for h in range(2):
        columns = np.argsort(-p[h].sum(0), kind="stable")[:2]
        distances = np.argsort([-p[h][i - j == o].sum() for o in range(60)], kind="stable")[:2]
        elements = np.isin(np.arange(60)[:, None] - j, distances) | np.isin(j, columns)
        elements &= np.tri(60, dtype=bool)
        expected = np.add.reduceat(np.add.reduceat(elements, range(0, 60, 8), axis=0), range(0, 60, 8), axis=1) > 0
        expected |= np.isin(np.arange(8), columns // 8) & np.tri(8, dtype=bool)
        np.testing.assert_array_equal(listed[0, h] > 0, expected)


def check_unlike_keys(library: Any) -> None:
    """Check that a block of unlike keys, which would have nearly all of the mass, changes nothing for the others."""
    of, same = library.selectors, [[1, 0], [1, 0], [3, 0], [3, 0], [2, 0], [2, 0]]
    q, k = np.array([[[5, 0], [5, 0]]], np.float32), np.array([[[60, 30], [60, -30], *same]], np.float32)
    options = {"block": 2, "forced": of.Forced(diagonal=False), "self_similarity": 0.9, "scale": 1.0}
    rules = {"top_k": 2}, {"threshold": 0.3}, {"mass": 0.9}
    for rule, pools, mask in itertools.product(rules, (True, False), (None, np.ones((2, 8), bool))):
        index = of.pooled(q, k, budget=of.Budget(**rule), pool_queries=pools, mask=mask, **options)
        assert index.states().tolist() == [[[[1, 0, 1, 0]]]]


def test_unlike_keys() -> None:
    check_unlike_keys(cuflash)


def test_blocks_of_unlike_rows_are_kept_and_take_no_part() -> None:
    """Keys of block 1 point everywhere, all others in one direction. SpargeAttn always keeps blocks like block 1."""
    k = np.ones((1, 32, 8)) + np.arange(4).repeat(8)[:, None] * 0.1
    k[:, 8:16] = np.eye(8) * 4
    q = np.ones((1, 32, 8))
    q[:, 16:24] = -np.eye(8)
    index = selectors.pooled(q, k, block=8, budget=Budget(top_k=2), forced=Forced(diagonal=False), self_similarity=0.5)
    expected = np.array([[0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]])
    np.testing.assert_array_equal(index.states()[0, 0], expected)


@pytest.mark.parametrize("run", [CPU, pytest.param(Run("gpu"), marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def test_no_score_of_a_page_exceeds_its_bound(run: Run) -> None:
    @run.settings
    @given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.sampled_from([1, 4, 16]), st.booleans())
    def check(seed: int, seqlen_kv: int, page_size: int, is_grouped: bool) -> None:
        check_bounds(run, seed, seqlen_kv, page_size, is_grouped)

    check()


def check_bounds(run: Run, seed: int, seqlen_kv: int, page_size: int, is_grouped: bool) -> None:
    """Check that page bounds are at least the largest scores of pages; products of integers are exact."""
    rng = np.random.default_rng(seed)
    shapes = (4, 3, 5), (2 - is_grouped, seqlen_kv, 5)
    q, k = (rng.integers(-9, 10, shape).astype(np.float32) for shape in shapes)
    bounds = run.get(selectors.page_bounds(run.put(q), run.put(k), page_size=page_size))
    s = q @ np.repeat(k, 4 // len(k), axis=0).swapaxes(-1, -2)
    highest = np.maximum.reduceat(s, range(0, seqlen_kv, page_size), axis=-1)
    assert bounds.shape == highest.shape and (bounds >= highest).all()
    if page_size == 1:
        np.testing.assert_array_equal(bounds, s)


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([3, 4, 16]), st.sampled_from([1, 7, 64]),
    st.sampled_from([np.float16, np.float32, np.float64]), st.integers(-12, 12),
)  # fmt: skip
def test_rounding_lifts_no_score_above_its_bound(
    seed: int, seqlen_kv: int, page_size: int, head_dim: int, dtype: Any, exponent: int
) -> None:
    """Bounds are rounded like scores, which are the bounds of pages of one key; rounding preserves order."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((2, length, head_dim)) * 2.0**exponent for length in (3, seqlen_kv))
    q, k = q.astype(dtype), k.astype(dtype)
    bounds, scores = (selectors.page_bounds(q, k, page_size=size) for size in (page_size, 1))
    assert (bounds >= np.maximum.reduceat(scores, range(0, seqlen_kv, page_size), axis=-1)).all()


def test_pages_of_a_cache_are_those_of_its_rows() -> None:
    rng = np.random.default_rng(5)
    cache = cuflash.KVCache(batch=2, num_kv_heads=2, head_dim=8, capacity=90, dtype="f4", page_size=16, num_pages=12)
    k, v = rng.standard_normal((2, 2, 2, 70, 8), np.float32)
    cache.append(k, v, counts=[70, 0])
    cache.append(v, k, counts=[3, 41])
    q = rng.standard_normal((2, 4, 1, 8), np.float32)
    actual = selectors.quest(q, cache, budget=Budget(top_k=2))
    assert actual.block == 16 and actual.blocks.shape == (2, 4, 1, 2)
    for sequence in range(2):
        rows, values = cache.rows(sequence)
        assert rows.shape[-2] == (73, 41)[sequence]
        again = selectors.quest(q[sequence], rows, budget=Budget(top_k=2))
        np.testing.assert_array_equal(actual.blocks[sequence], again.blocks)
        assert np.isfinite(cuflash.attention(q[sequence], rows, values, mask=again, causal="bottom_right")).all()


@on_every_executor
def test_an_index_serves_both_passes(run: Run) -> None:
    q, k, v = np.random.default_rng(6).standard_normal((3, 2, 64, 8))
    index = select("pooled", run, q, k, causal=True)
    o, vjp = cuflash.attention_vjp(*map(run.put, (q, k, v)), mask=index, executor=run.executor)
    dq, dk, dv = (run.get(x) for x in vjp(run.put(np.ones_like(v))))
    example = Example(q=q, k=k, v=v, do=np.ones_like(v), mask=index._on_host.toarray()[0])
    assert_within_bounds(example, o=run.get(o), dq=dq, dk=dk, dv=dv)


def test_calls_of_one_layout_are_not_mixed_up(monkeypatch: Any) -> None:
    """A later call skips the checks of an earlier one only if the two differ just in addresses and budgets."""
    q = np.zeros((2, 32, 8))
    usual: dict[str, Any] = dict.fromkeys(("mask", "window", "scale"))
    usual |= {"block": 8, "budgets": {"budget": FEW}, "forced": Forced(), "causal": True}
    changes: list[dict[str, Any]] = [
        {}, {"causal": False}, {"causal": "bottom_right"}, {"block": (8, 16)}, {"scale": 3.0},
        {"mask": masks.SlidingWindow(9, 0)}, {"mask": masks.SlidingWindow(3, 0)},
        {"window": (9, 0)}, {"window": (3, 0)},
    ]  # fmt: skip

    def selected_with(change: dict[str, Any]) -> Any:
        grid = grids.Grid.of(q, q, **usual | change)
        allowed = grid.mask.toarray(32, 32).tolist()
        return grid.block, grid.is_causal, grid.offset, grid.has_own_mask, grid.scale, grid.size, allowed

    fresh = []
    for change in changes:
        CALLS.clear()
        fresh.append(selected_with(change))
    assert [selected_with(change) for change in changes * 2] == fresh * 2 and len({str(each) for each in fresh}) > 5
    with pytest.raises(cuflash.UnsupportedProblem, match="budget must be a Budget"):
        grids.Grid.of(q, q, **usual | {"budgets": {"budget": 8}})


@needs_compiler
def test_budgets_of_narrow_numbers_are_not_mixed_up(monkeypatch: Any, tmp_path: Any) -> None:
    """NumPy compares a narrow number with a Python number in its own dtype: float16(0.3), above 0.3, equals 0.3."""
    x = np.random.default_rng(0).standard_normal((1, 160, 16)).astype(np.float16)
    assert Budget(density=0.3) != Budget(density=np.float16(0.3))
    with cupy_machine.installed(monkeypatch, tmp_path) as xp:
        q = xp.asarray(x)
        indices = [selectors.pooled(q, q, budget=Budget(density=each(0.3)), block=16) for each in (float, np.float16)]
        assert [int((index._on_host.states() > 0).sum()) for index in indices] == [30, 40]


def test_two_axes_are_one_head() -> None:
    q = np.random.default_rng(8).standard_normal((32, 8))
    for name in (*ON_KERNELS, "moba", "random", "local", "quest"):
        assert select(name, CPU, q, q, causal=True).shape == (1, 1, 32, 32)


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("name", [*ON_KERNELS, "moba", "random", "local", "quest"])
@pytest.mark.parametrize(("heads", "seqlen_q", "seqlen_kv"), [(0, 20, 20), (2, 0, 20), (2, 20, 0)])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_what_is_empty_has_an_empty_index(
    run: Run, name: str, heads: int, seqlen_q: int, seqlen_kv: int, causal: Any
) -> None:
    q, k = np.ones((3, heads, seqlen_q, 8), np.float32), np.ones((3, heads, seqlen_kv, 8), np.float32)
    if name == "nsa" and not seqlen_kv:
        with pytest.raises(cuflash.UnsupportedProblem, match="k must have at least 8 keys to compress; got 0"):
            select(name, run, q, k, causal=causal)
        return
    index = select(name, run, q, k, causal=causal)
    assert index.shape[2:] == (seqlen_q, seqlen_kv) and index.num_entries == 0
    o = run.get(cuflash.attention(*(run.put(x) for x in (q, k, k)), mask=index, **run.options))
    assert o.shape == q.shape and not o.any()


WRONG = [
    ({"budget": 8}, "budget must be a Budget; got 8"),
    ({"forced": (1, 2)}, "forced must be a Forced; got"),
    ({"block": 0}, "block must be an int of at least 1"),
    ({"causal": "down"}, "causal must be"),
    ({"scale": "1"}, "scale must be a finite number"),
    ({"k": np.ones((3, 32, 4))}, "must be a multiple of k's 3"),
]


@pytest.mark.parametrize("name", ["pooled", "antidiagonal", "nsa", "oracle", "random", "local"])
@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_every_selector_refuses_wrong_inputs(name: str, changes: dict[str, Any], message: str) -> None:
    q = np.ones((2, 32, 4))
    with pytest.raises(cuflash.UnsupportedProblem, match=message):
        getattr(selectors, name)(**{"q": q, "k": q, "budget": Budget(top_k=2)} | changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: selectors.pooled(q, q, budget=FEW, self_similarity=2), "self_similarity must be None or"),
        (lambda q: selectors.pooled(q, q, budget=FEW, pool_queries=1), "pool_queries must be True or False"),
        (lambda q: selectors.antidiagonal(q, q, budget=FEW, stride=0), "stride must be an int of at least 1"),
        (lambda q: selectors.antidiagonal(q, q, budget=FEW, block=12), "block must be a multiple of stride=8"),
        (lambda q: selectors.antidiagonal(q, q, budget=FEW, block=2048, stride=2048), "at most 4096 / head_dim"),
        (lambda q: selectors.nsa(q, q, budget=FEW, compression=(32, 5)), "compression must be two ints"),
        (lambda q: selectors.nsa(q, q, budget=FEW, block=24), "block_kv must be a multiple of the stride 16"),
        (lambda q: selectors.nsa(q[:, :8], q[:, :8], budget=FEW), "k must have at least 32 keys"),
        (lambda q: selectors.vertical_slash(q, q, vertical=2, slash=FEW), "vertical must be a Budget"),
        (lambda q: selectors.vertical_slash(q, q, vertical=FEW, slash=FEW, num_queries=0),
         "num_queries must be an int of at least 1"),
        (lambda q: selectors.random(q, q, budget=FEW, seed=-1), "seed must be an int of at least 0"),
        (lambda q: selectors.quest(q, q, budget=Budget(mass=0.5)), "budget must have top_k, density or threshold"),
        (lambda q: selectors.quest(q, q, budget=FEW, page_size=0), "page_size must be an int of at least 1"),
        (lambda q: Budget(), "exactly one of top_k, mass, threshold and density; got none of them"),
        (lambda q: Budget(top_k=1, mass=0.5), "got top_k and mass"),
        (lambda q: Budget(top_k=0), "top_k must be an int of at least 1; got 0"),
        (lambda q: Budget(density=1.5), "density must be a number above 0 and at most 1; got 1.5"),
        (lambda q: selectors.vertical_slash(q, q), "got None, without vertical and slash: write budget="),
        (lambda q: selectors.vertical_slash(q, q, slash=FEW), "got None, without vertical: write budget="),
        (lambda q: selectors.vertical_slash(q, q, budget=8), "budget must be a Budget; got 8: write selectors.Budget"),
        (lambda q: selectors.quest(q, q, budget=FEW, block=0), "block must be an int of at least 1"),
        (lambda q: selectors.quest(q, q, budget=FEW, block=(2, 16)), r"block must be an int or \(1, keys\)"),
        (lambda q: selectors.quest(q, q, budget=FEW, block=8, page_size=16), "block must equal page_size if both"),
        (lambda q: selectors.pooled(q, q, budget=FEW, window=3), "window must be"),
        (lambda q: Budget(mass=1.5), "mass must be a number above 0 and at most 1; got 1.5"),
        (lambda q: Budget(threshold=np.nan), "threshold must be a finite number; got nan"),
        (lambda q: Budget(top_k=1, min_blocks=-1), "min_blocks must be an int of at least 0; got -1"),
        (lambda q: Forced(sink=-1, local=0.5), "2 reasons:"),
        (lambda q: Forced(diagonal=1), "diagonal must be True or False; got 1"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(cuflash.UnsupportedProblem, match=message):
        call(np.ones((2, 32, 4)))


@pytest.mark.parametrize("name", ["pooled", "antidiagonal", "nsa", "oracle", "random", "local", "quest"])
def test_what_is_no_array_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"k must be an array; got \['a'\]"):
        getattr(selectors, name)(np.ones((2, 32, 4)), ["a"], budget=FEW)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ON_KERNELS, "moba", "local", "quest"])
def test_a_selection_waits_for_nothing(name: str) -> None:
    """A selection runs inside a stream capture, which any wait would break, and its index equals the host's."""
    import cupy

    q, k = np.random.default_rng(9).standard_normal((2, 4, 64, 16))
    device_q, device_k = cupy.asarray(q), cupy.asarray(k[:2])
    gpu = Run("gpu")
    index = captured(cupy, lambda: select(name, gpu, device_q, device_k, causal=True))
    expected = select(name, CPU, q, k[:2], causal=True)
    np.testing.assert_array_equal(index.states().get(), expected.states())


CHOOSING = sorted(set(selectors.__all__) - {"Budget", "Forced", "page_bounds"})


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize("budget", [Budget(top_k=3), Budget(density=0.3), Budget(threshold=0.1)], ids=str)
def test_all_selectors_take_the_same_arguments(name: str, budget: Budget) -> None:
    """One loop calls all selectors with blocks, a budget, causality, a window and a mask, as `attention` takes them."""
    q, k = np.random.default_rng(0).standard_normal((2, 2, 130, 8), np.float32)
    if name == "quest" and budget.threshold is not None:
        budget = replace(budget, max_blocks=5)  # five pages
    options: dict[str, Any] = {"block": 32, "budget": budget, "forced": Forced(diagonal=False)}
    limits = {"causal": "bottom_right", "window": (50, 0), "mask": masks.Lengths(q=100, kv=90), "scale": 0.5}
    select = getattr(selectors, name)
    for more in ({}, *({name: value} for name, value in limits.items()), limits):
        index = indexed(select(q, k, **options, **more), q, k, more)
        accepted = {name: value for name, value in more.items() if name != "scale"}
        accepted.setdefault("causal", "bottom_right" if name == "quest" else False)
        both = masks.Band() & accepted.get("mask", masks.Band())
        if accepted["causal"]:
            both = both & masks.Causal("bottom_right")
        if "window" in accepted:
            both = both & masks.SlidingWindow(50, 0, "bottom_right")
        allowed = both.toarray(130, 130)
        assert index.block[1] == 32 and not (index.toarray() & ~allowed).any()
        if budget.density is not None and name != "vertical_slash":
            eligible = cuflash.BlockIndex.from_mask(both, 130, 130, index.block).states()[0, 0] > 0
            expected = np.ceil(eligible.sum(-1) * 3 / 10)
            assert (np.broadcast_to(expected, index.states().shape[:-1]) == (index.states() > 0).sum(-1)).all()


@pytest.mark.parametrize(
    "budget",
    [Budget(top_k=5), Budget(top_k=1), Budget(mass=0.5), Budget(density=0.2, min_blocks=3), Budget(threshold=0.1)],
    ids=str,
)
def test_one_budget_of_columns_and_diagonals_is_split_in_halves(budget: Budget) -> None:
    q, k = np.random.default_rng(4).standard_normal((2, 2, 64, 8))
    options: dict[str, Any] = {"block": 8, "causal": True, "forced": Forced(diagonal=False), "num_queries": 16}
    vertical, slash = {
        5: (Budget(top_k=3), Budget(top_k=2)), 1: (Budget(top_k=1), Budget(top_k=1)),
    }.get(budget.top_k or 0, (budget, budget))  # fmt: skip
    if budget.mass:
        vertical, slash = Budget(mass=0.25, min_blocks=1), Budget(mass=0.25, min_blocks=0)
    if budget.density:
        vertical, slash = Budget(density=0.1, min_blocks=2), Budget(density=0.1, min_blocks=1)
    expected = selectors.vertical_slash(q, k, vertical=vertical, slash=slash, **options)
    assert selectors.vertical_slash(q, k, budget=budget, **options) == expected
    few = Budget(top_k=7)
    assert selectors.vertical_slash(q, k, budget=budget, slash=few, **options) == selectors.vertical_slash(
        q, k, vertical=vertical, slash=few, **options
    )
    assert selectors.vertical_slash(q, k, budget=budget, vertical=few, **options) == selectors.vertical_slash(
        q, k, vertical=few, slash=slash, **options
    )


def test_a_page_of_quest_is_a_block() -> None:
    q, k = np.random.default_rng(4).standard_normal((2, 2, 64, 8))
    expected = selectors.quest(q[:, -2:], k, page_size=8, budget=FEW)
    for given_options in ({"block": 8}, {"block": (1, 8)}, {"block": 8, "page_size": 8}):
        assert_equal_lists(selectors.quest(q[:, -2:], k, budget=FEW, **given_options), expected)
    flipped = selectors.quest(-q[:, -2:], k, block=8, budget=FEW)
    assert_equal_lists(selectors.quest(q[:, -2:], k, block=8, budget=FEW, scale=-2.0), flipped)


def assert_equal_lists(actual: Any, expected: Any) -> None:
    assert actual.block == expected.block
    np.testing.assert_array_equal(actual.blocks, expected.blocks)


PAGED = {
    "one page": (64, 64, 64), "a longer page": (100, 128, 128), "a cut page": (60, 64, 64), "pages": (64, 16, 16),
    "no pages": (64, None, 16),
}  # fmt: skip


@pytest.mark.parametrize("case", PAGED)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_pages_of_quest_are_those_of_the_cache(case: str, dtype: str) -> None:
    """The queries are those that attend to the cache: 16-bit with FP8 rows, and arrays of other libraries."""
    capacity, page_size, expected = PAGED[case]
    pages = {} if page_size is None else {"page_size": page_size, "num_pages": 8}
    cache = cuflash.KVCache(batch=1, num_kv_heads=2, head_dim=8, capacity=capacity, dtype=dtype, **pages)
    dtypes = ("float16", "bfloat16", "float32") if dtype == "float8_e4m3fn" else (dtype,)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((1, 2, 40, 8)).astype(dtypes[-1])
    cache.append(rows, rows)
    for each in dtypes:
        q = rng.standard_normal((1, 4, 1, 8)).astype(each)
        cache.attention(q)
        chosen = selectors.quest(q, cache, budget=FEW)
        assert chosen.block == expected
        assert selectors.quest(q, cache, budget=FEW, block=4).block == 4
        if each != "bfloat16":
            assert_equal_lists(selectors.quest(Foreign(q), cache, budget=FEW), chosen)
    over = cuflash.KVCache.over(np.zeros((3, 2, 16, 8)), np.zeros((3, 2, 16, 8)), np.array([[2], [1]]), [3, 16])
    assert selectors.quest(np.zeros((2, 2, 1, 8)), over, budget=FEW).block == 16


@pytest.mark.parametrize("sequence", [-1, 2, 0.0, "0"])
def test_rows_of_no_sequence_are_refused(sequence: Any) -> None:
    cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=8, dtype="f4")
    with pytest.raises(cuflash.UnsupportedProblem, match="sequence must be a sequence's number, from 0 to 1"):
        cache.rows(sequence)


@pytest.mark.parametrize("q", [np.ones((2, 1, 4), np.float32), np.ones((3, 1, 1, 4), np.float32)])
def test_queries_that_are_not_one_entry_a_sequence_are_refused(q: Any) -> None:
    cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=8, dtype="f4")
    with pytest.raises(cuflash.UnsupportedProblem, match=r"q must have shape \(2, num_heads, n, head_dim\)"):
        selectors.quest(q, cache, budget=FEW)


@pytest.mark.parametrize("name", ["pooled", "quest", "oracle", "vertical_slash", "antidiagonal", "nsa"])
@pytest.mark.parametrize("factors", [(np.inf, 1), (1, -np.inf), (np.nan, np.nan)], ids=str)
@pytest.mark.parametrize("options", [{}, {"mask": np.tri(64, dtype=bool)}], ids=["no mask", "a mask"])
def test_rows_that_are_not_finite_raise_nothing(name, factors, options):
    q, k = np.random.default_rng(0).standard_normal((2, 2, 64, 8))
    with np.errstate(all="raise"):
        getattr(selectors, name)(q * factors[0], k * factors[1], block=16, budget=Budget(top_k=2), **options)
