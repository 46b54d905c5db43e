"""Selectors with blocks of one query return the lists of their NumPy definitions, query by query."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuflash.selectors import Budget, Forced, by_query, masked
from executors import Run, on_every_executor
from hypothesis import example, given
from hypothesis import strategies as st
from test_selectors import by_sorting

import cuflash
from cuflash import masks, selectors

BLOCK, RUN, STRIDE = 6, 4, 2  # keys per block, keys per compressed key, and distance between compressed keys
HEADS, KV_HEADS, DIM = 4, 2, 6
NAMES = ("pooled", "moba", "nsa", "quest", "oracle", "antidiagonal", "random", "local")
SHARED = ("pooled", "moba", "quest", "oracle", "random", "local")  # selectors with the argument share=
OPTIONS: dict[str, dict[str, Any]] = {
    "moba": {"pool_queries": False}, "nsa": {"compression": (RUN, STRIDE)}, "antidiagonal": {"stride": 1},
    "random": {"seed": 5},
}  # fmt: skip
ON_KERNELS = ("pooled", "moba", "nsa")  # selectors with the argument executor=
BUDGETS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 3}, {"top_k": 9, "max_blocks": 9}, {"density": 0.4}, {"density": 0.9, "max_blocks": 3},
    {"mass": 0.6, "max_blocks": 3}, {"mass": 0.97, "max_blocks": 8}, {"threshold": 0.2, "max_blocks": 2},
    {"threshold": 0.2, "max_blocks": 9},
]  # fmt: skip


def softmax(s: Any, seen: Any) -> Any:
    e = np.where(seen, np.exp(np.where(seen, s, 0)), 0)
    return e / max(e.sum(), 1e-300)


def runs(length: int, side: int) -> list[slice]:
    return [slice(start, min(start + side, length)) for start in range(0, length, side)]


def scores_of_query(
    name: str, q: Any, k: Any, last: int | None, compressed_k: Any = None
) -> tuple[Any, Any]:
    """Return the scores of the blocks for one query [dim] of one head, and which blocks are eligible.

    `last` is the last key that the query attends, or None if it attends all keys.
    """
    length, scale, is_causal = len(k), DIM**-0.5, last is not None
    columns, last = runs(length, BLOCK), length - 1 if last is None else last
    met = np.array([each.start <= last for each in columns])
    if name in ("pooled", "moba"):
        s = np.array([q @ k[each].mean(0) for each in columns]) * scale
        if name == "pooled":
            return softmax(s, met), met
        past = np.array([(n + 1) * BLOCK <= last + 1 for n in range(len(columns))]) | (not is_causal)
        return softmax(s, past), past
    if name == "nsa":
        starts = np.arange(0, length - RUN + 1, STRIDE)
        keys = np.stack([k[start : start + RUN].mean(0) for start in starts]) if compressed_k is None else compressed_k
        p = softmax(keys @ q * scale, starts + RUN - 1 <= last)
        parts = [range(start, start + RUN, STRIDE) for start in starts]
        return np.array([sum(p[c] * sum(each.start <= at < each.stop for at in parts[c]) for c in range(len(starts)))
                         for each in columns]), met  # fmt: skip
    if name == "quest":
        return np.array([np.maximum(q * k[each].min(0), q * k[each].max(0)).sum() for each in columns]), met
    mass = softmax(k @ q * scale, np.arange(length) <= last)
    return np.array([mass[each].sum() for each in columns]), met


def expected_lists(
    name: str, q: Any, k: Any, causal: Any, forced: Any, budget: Any, share: str, numbers: Any,
    compressed_k: Any = None,
) -> Any:  # fmt: skip
    """Return each list's blocks in ascending order, or None if scores are too close to compare."""
    (num_heads, seqlen_q, _), (kv_heads, seqlen_kv, _) = q.shape, k.shape
    group, offset = num_heads // kv_heads, seqlen_kv - seqlen_q if causal == "bottom_right" else 0
    num_lists = kv_heads if share == "group" else num_heads
    lists = np.empty((num_lists, seqlen_q), object)
    columns = np.arange(-(-seqlen_kv // BLOCK))
    for number, i in np.ndindex(lists.shape):
        heads = range(number * group, number * group + group) if share == "group" else [number]
        each = []
        last = min(i + offset, seqlen_kv - 1) if causal else None
        for h in heads:
            of_keys = None if compressed_k is None else compressed_k[h // group]
            scores, may = scores_of_query(name, q[h, i], k[h // group], last, of_keys)
            if name == "random":
                scores = numbers[h, i].astype(float)
            if name == "local":
                scores = -abs(i + 0.5 + offset - (columns + 0.5) * BLOCK)
            each.append(scores)
        scores = np.max(each, axis=0) if name == "quest" else np.sum(each, axis=0)
        own, place = (i + offset) // BLOCK, i + offset
        must = (columns < forced.sink) | ((columns > own - forced.local) & (columns <= own))
        must = must | (forced.diagonal & (columns == own)) if place >= 0 else columns < forced.sink
        if name == "moba":  # a query keeps its own block only if that is forced
            may = may | (must & (columns * BLOCK <= (seqlen_kv if last is None else last)))
        order = np.sort(scores[may & ~must])
        is_close = np.any(np.diff(order) < 1e-6) and name != "local"
        if budget.mass is not None:
            sums = np.cumsum(np.sort(scores[may])[::-1])
            is_close |= np.any(abs(sums[:-1] - budget.mass * sums[-1:]) < 1e-6)
        if budget.threshold is not None:
            is_close |= np.any(abs(scores - budget.threshold) < 1e-6)
        equal = np.ones(len(columns))
        shares = equal if name in ("random", "local", "quest") else scores
        lists[number, i] = None if is_close else by_sorting(scores, shares, may, must, budget)
    return lists


def check(
    run: Run, name: str, lengths: tuple[int, int], causal: Any, forced: dict[str, Any], budget: dict[str, Any],
    share: str, seed: int, dtype: Any = np.float64, library: Any = cuflash, **more: Any,
) -> None:  # fmt: skip
    """Check the lists of a selector for a batch of two; lists whose scores are too close are skipped."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((2, heads, n, DIM)).astype(dtype) for heads, n in zip((HEADS, KV_HEADS), lengths))
    options = OPTIONS.get(name, {}) | more
    if name in SHARED:
        options = options | {"share": share}
    elif name == "nsa":
        share = "group"
    else:
        share = "query"
    if name in ON_KERNELS:
        options = options | {"executor": run.executor}
    must, of = library.selectors.Forced(**forced), library.selectors.Budget(**budget)
    arrays = {name: run.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    select = getattr(library.selectors, "pooled" if name == "moba" else name)
    chosen = select(run.put(q), run.put(k), block=(1, BLOCK), budget=of, forced=must, causal=causal, **arrays)
    assert isinstance(chosen, library.masks.ChosenBlocks) and chosen.block == BLOCK
    blocks = run.get(chosen.blocks)
    assert blocks.dtype == np.int32 and blocks.shape[:-1] == (2, KV_HEADS if share == "group" else HEADS, lengths[0])
    num_blocks = -(-lengths[1] // BLOCK)
    numbers = selectors.baselines._drawn(np, (2, HEADS, lengths[0], num_blocks), 5)
    assert blocks.shape[-1] <= num_blocks
    for b in range(2):
        of_keys = options["compressed_k"][b].astype(float) if "compressed_k" in options else None
        wide = q[b].astype(float), k[b].astype(float)
        expected = expected_lists(name, *wide, causal, must, of, share, numbers[b], of_keys)
        for place in np.ndindex(expected.shape):
            if expected[place] is not None:
                row = blocks[b][place]
                wanted = expected[place] + [-1] * (blocks.shape[-1] - len(expected[place]))
                assert row.tolist() == wanted, (name, b, place)


@pytest.mark.parametrize("name", NAMES)
@on_every_executor
def test_lists_are_those_of_the_definition(run: Run, name: str) -> None:
    """Cases have all kinds of causality, budgets with a maximum, forced blocks, and choices by head and by group."""

    @run.settings
    @example(1, RUN, True, {"diagonal": False}, {"mass": 0.6, "max_blocks": 3}, "query", 0)  # query 0 has no block
    @given(
        st.integers(1, 40), st.integers(RUN, 44), st.sampled_from([False, True, "bottom_right"]),
        st.sampled_from([{}, {"diagonal": False}, {"sink": 1, "local": 2}, {"local": 2, "diagonal": False}]),
        st.sampled_from(BUDGETS), st.sampled_from(["query", "group"]), st.integers(0, 2**32 - 1),
    )  # fmt: skip
    def drawn(
        seqlen_q: int, seqlen_kv: int, causal: Any, forced: Any, budget: Any, share: str, seed: int
    ) -> None:
        if name == "quest" and "mass" in budget:
            return
        if len(forced) == 2 and budget.get("max_blocks") == 2:
            return  # more blocks are forced than the budget allows
        lengths = (seqlen_q, seqlen_q + RUN if causal is True else max(seqlen_kv, seqlen_q if causal else 0))
        lengths = (lengths[1], lengths[1]) if causal is True else lengths  # so that the last query attends the last key
        check(run, name, lengths, causal, forced, budget, share, seed)

    drawn()


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_chosen_some_at_a_time(name: str, monkeypatch: Any) -> None:
    """Pieces of five rows choose the same blocks as one piece, so no array needs an element per query and block."""
    pieces = []

    def steps(grid: Any, num_rows: int, numbers_of_row: int) -> Any:
        starts = range(0, num_rows, 5)
        pieces.extend(starts)
        return [(first, min(first + 5, num_rows)) for first in starts]

    monkeypatch.setattr(by_query, "row_steps", steps)
    for causal in (False, True, "bottom_right"):
        check(Run("cpu"), name, (23, 23), causal, {"sink": 1}, {"top_k": 3}, "group", 3)
    assert len(pieces) == 15


def test_pieces_are_of_bounded_size() -> None:
    q, k = np.zeros((2, 3, 4096, 8), np.float32), np.zeros((2, 3, 16384, 8), np.float32)
    grid = by_query.Grid.of(q, k, (1, 16), {}, Forced(), "bottom_right", None, None, None)
    sizes = [piece.shape.seqlen_q * grid.size[1] * 6 for piece in by_query._pieces(grid, 1)]
    assert len(sizes) > 1 and max(sizes) <= 8 * masked._MOST_NUMBERS
    assert sum(piece.shape.seqlen_q for piece in by_query._pieces(grid, 1)) == 4096


@on_every_executor
def test_compressed_keys_and_their_lse_replace_means(run: Run) -> None:
    """A layer's compressed keys replace the means, and the lse of attention to them changes no list."""
    rng = np.random.default_rng(0)
    for causal, seqlen in ((True, 40), (False, 33)):
        count = (seqlen - RUN) // STRIDE + 1
        keys = rng.standard_normal((2, KV_HEADS, count, DIM))
        for budget in ({"top_k": 2}, {"mass": 0.5, "max_blocks": 4}):
            check(run, "nsa", (seqlen, seqlen), causal, {}, budget, "group", 1, compressed_k=keys)
            q = np.random.default_rng(1).standard_normal((2, HEADS, seqlen, DIM))
            mask = masks.Compressed(RUN, STRIDE) if causal else None
            _, lse = cuflash.attention(q, keys, keys, mask=mask, return_lse=True)
            check(run, "nsa", (seqlen, seqlen), causal, {}, budget, "group", 1, compressed_k=keys, lse=lse)


def test_an_lse_that_is_passed_is_used() -> None:
    """A larger lse scales down all masses of a query, which changes the choice by threshold."""
    q, k = np.random.default_rng(0).standard_normal((2, 2, 32, DIM))
    keys = cuflash.selectors.compressed.means_of_runs(k, RUN, STRIDE)
    _, lse = cuflash.attention(q, keys, keys, return_lse=True)
    options: dict[str, Any] = {"block": (1, 8), "compression": (RUN, STRIDE), "forced": Forced(diagonal=False)}
    options["budget"] = Budget(threshold=0.01, max_blocks=4, min_blocks=0)
    every, none = (selectors.nsa(q, k, **options, lse=lse + more).blocks for more in (0, 50))
    assert (every >= 0).all() and (none == -1).all()


@pytest.mark.parametrize("name", NAMES)
def test_masks_limit_the_choice(name: str) -> None:
    """Queries without a key choose only forced blocks that the mask meets; NaN in hidden rows has no effect."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, HEADS, 31, DIM))
    k = k[:, :KV_HEADS]
    hidden_q, hidden_k = q.copy(), k.copy()
    hidden_q[:, :, 20:], hidden_k[:, :, 23:] = np.nan, np.nan
    options: dict[str, Any] = OPTIONS.get(name, {}) | {"block": (1, BLOCK), "budget": Budget(top_k=2), "causal": True}
    options["mask"] = masks.Lengths(q=20, kv=23)
    for share in ("query", "group") if name in SHARED else (None,):
        more = options | ({} if share is None else {"share": share})
        select = getattr(selectors, "pooled" if name == "moba" else name)
        blocks = select(q, k, **more).blocks
        np.testing.assert_array_equal(select(hidden_q, hidden_k, **more).blocks, blocks)
        assert (blocks[..., 20:, :] == -1).all() and (blocks[..., :20, :] >= 0).any(-1).all() and blocks.max() <= 3


def check_pages_of_a_group(library: Any) -> None:
    """Check that the bound of a page counts only for the heads of a group that attend one of its keys."""
    of, allowed = library.selectors, np.array([[[True, False, False]], [[False, True, True]]])
    options = {"budget": of.Budget(top_k=1), "forced": of.Forced(diagonal=False), "causal": False, "share": "group"}
    q, k = np.array([[[1.0]], [[-1.0]]]), np.array([[[0.1], [-2.0], [5.0]]])
    assert of.quest(q, k, page_size=1, mask=allowed, **options).blocks.tolist() == [[[1]]]


def test_pages_of_a_group() -> None:
    check_pages_of_a_group(cuflash)


def test_lists_of_columns_and_diagonals_are_the_blocks_that_they_cross() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, HEADS, 40, DIM))
    options: dict[str, Any] = {"causal": True, "forced": Forced(sink=1), "num_queries": 8}
    options |= {"vertical": Budget(top_k=3), "slash": Budget(mass=0.3, max_blocks=2)}
    chosen = selectors.vertical_slash(q, k[:KV_HEADS], block=(1, BLOCK), **options)
    elements = selectors.vertical_slash(q, k[:KV_HEADS], block=(1, 1), **options | {"forced": Forced()})
    assert chosen.blocks.shape == (HEADS, 40, 7) and elements.blocks.shape[-1] == 6
    for h, i in np.ndindex(HEADS, 40):
        wanted = {0, *(int(j) // BLOCK for j in elements.blocks[h, i] if j >= 0)}
        assert {int(j) for j in chosen.blocks[h, i] if j >= 0} == wanted


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_choice_of_blocks_of_queries_is_the_same_for_a_group(name: str) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, HEADS, 48, DIM))
    if name == "quest":
        return  # the selector's blocks have one query
    select = getattr(selectors, "pooled" if name == "moba" else name)
    index = select(q, k[:KV_HEADS], block=8, budget=Budget(top_k=2), share="group", **OPTIONS.get(name, {}))
    states = index.states()[0]
    np.testing.assert_array_equal(states[::2], states[1::2])
    assert index.num_heads == HEADS


def test_lists_serve_attention_and_its_gradients() -> None:
    q, k, v, do = np.random.default_rng(0).standard_normal((4, HEADS, 40, DIM))
    k, v = k[:KV_HEADS], v[:KV_HEADS]
    chosen = selectors.nsa(q, k, block=(1, BLOCK), compression=(RUN, STRIDE), budget=Budget(top_k=3), causal=True)
    o, vjp = cuflash.attention_vjp(q, k, v, mask=chosen, causal=True)
    allowed = (chosen & masks.Causal()).toarray(40, 40, num_heads=HEADS)
    expected, of_dense = cuflash.attention_vjp(q, k, v, mask=masks.Dense(allowed))
    for actual, wanted in zip((o, *vjp(do)), (expected, *of_dense(do))):
        np.testing.assert_allclose(actual, wanted, atol=1e-12)


Q = np.ones((2, 32, 4))
FEW: dict[str, Any] = {"block": (1, 8), "budget": Budget(top_k=2)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: selectors.pooled(Q, Q, block=(1, 8), budget=Budget(mass=0.5)),
         r"^budget must have max_blocks, the length of each query's list, with block=\(1, 8\)"),
        (lambda: selectors.quest(Q, Q, block=8, budget=Budget(threshold=0.5)), "write Budget.*max_blocks=16"),
        (lambda: selectors.vertical_slash(Q, Q, block=(1, 8), vertical=Budget(mass=0.5), slash=Budget(top_k=1)),
         "^budget must have max_blocks"),
        (lambda: selectors.pooled(Q, Q, **FEW, self_similarity=0.5), "max_blocks.* with self_similarity, which keeps"),
        (lambda: selectors.local(Q, Q, block=(1, 8), budget=Budget(mass=0.5, max_blocks=2), forced=Forced(sink=2)),
         "max_blocks must be at least 3, the blocks that forced keeps for each query; got 2"),
        (lambda: Budget(top_k=5, max_blocks=4), "max_blocks must be an int of at least 5, .*; got 4"),
        (lambda: Budget(mass=0.5, min_blocks=3, max_blocks=2), "max_blocks must be an int of at least 3"),
        (lambda: Budget(mass=0.5, max_blocks=0), "max_blocks must be an int of at least 1"),
        (lambda: Budget(mass=0.5, max_blocks=2.5), "max_blocks must be an int of at least 1, .*; got 2.5"),
        (lambda: selectors.pooled(Q, Q, **FEW, share="kv"), 'share must be "query" or "group"; got '),
        (lambda: selectors.oracle(Q, Q, **FEW, share=1), 'share must be "query" or "group"; got 1'),
        (lambda: selectors.random(Q, Q, **FEW, share=None), "share must be"),
        *(
            (lambda name=name: getattr(selectors, name)(Q, Q, **FEW, share=np.ones(3)), "share must be .* an array of")
            for name in SHARED if name != "moba"
        ),
        *(
            (lambda name=name: getattr(selectors, name)(Q, Q, **FEW, executor=np.ones(3)), "executor must be 'auto'")
            for name in ("pooled", "oracle", "vertical_slash")
        ),
        (lambda: selectors.local(Q, Q, **FEW, share=("group",)), "share must be"),
        (lambda: selectors.quest(Q, Q, budget=Budget(top_k=1), share="head"), "share must be"),
        (lambda: selectors.nsa(Q, Q, **FEW, compression=(8, 4), compressed_k=Q),
         r"compressed_k must be on q's device, with shape \(2, 7, 4\) and dtype float64; got"),
        (lambda: selectors.nsa(Q, Q, **FEW, compression=(8, 4), lse=Q[..., 0].astype("f4")),
         r"lse must be on q's device, with shape \(2, 32\) and dtype float64"),
        (lambda: selectors.nsa(Q, Q, **FEW, compression=(8, 4), lse=Q[..., 0], mask=masks.Lengths(kv=9)),
         "lse must be None with mask or window"),
        (lambda: selectors.nsa(Q, Q, **FEW, compression=(8, 4), compressed_k=Q[:, :7], window=(3, 0)),
         "compressed_k must be None with mask or window"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_any_work(call: Any, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(by_query, "kept_blocks", None)
    monkeypatch.setattr(masked, "softmax", None)
    with pytest.raises(cuflash.UnsupportedProblem, match=message):
        call()


@pytest.mark.parametrize("name", ["compressed_k", "lse"])
def test_what_is_no_array_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an array; got 3"):
        selectors.nsa(Q, Q, **FEW, compression=(8, 4), **{name: 3})
