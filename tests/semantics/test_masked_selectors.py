"""Selectors under masks: a row's blocks depend only on its queries with a key, and on the keys that they attend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import device_double
import numpy as np
import pytest
from cuflash.selectors import Budget, Forced, masked, pages
from cuflash.selectors.grid import Grid
from hypothesis import given
from hypothesis import strategies as st
from test_selectors import by_sorting

import cuflash
from cuflash import masks

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 6
NONE = Forced(diagonal=False)
NAMES = ("pooled", "alike", "moba", "alike moba", "antidiagonal", "nsa", "vertical_slash", "quest", "oracle")
OPTIONS: dict[str, dict[str, Any]] = {
    "alike": {"self_similarity": 0.2}, "moba": {"pool_queries": False}, "nsa": {"compression": (4, 2)},
    "alike moba": {"pool_queries": False, "self_similarity": 0.2}, "antidiagonal": {"stride": 2},
    "vertical_slash": {"num_queries": 5}, "quest": {"causal": False},
}  # fmt: skip


def selected(name: str, q: Any, k: Any, budget: Any = {"top_k": 2}, library: Any = cuflash, **options: Any) -> Any:
    """Return the blocks of 4 queries and 6 keys that a selector keeps, bool [batch, heads, rows, columns]."""
    of = library.selectors
    given_options = {"block": (1, 6) if name == "quest" else (4, 6), "forced": of.Forced(diagonal=False)}
    given_options |= OPTIONS.get(name, {}) | options
    function = "pooled" if name in ("alike", "moba", "alike moba") else name
    if name == "quest" and "threshold" in budget:
        budget = budget | {"max_blocks": -(-k.shape[-2] // 6)}
    index = getattr(of, function)(q, k, budget=of.Budget(**budget), **given_options)
    if isinstance(index, library.masks.ChosenBlocks):
        index = index.index(k.shape[-2])
    shape = BATCH, HEADS, index.num_q_blocks, index.num_kv_blocks
    return np.broadcast_to(index._on_host.states() > 0, shape)


KINDS = ("lengths", "lengths of entries", "elements", "elements of heads", "elements of all", "keys", "documents",
         "sequences", "blocks", "a function", "a window", "causal", "causal lengths", "causal elements")  # fmt: skip


def problem_of(kind: str, seqlen_q: int, seqlen_kv: int, seed: int, library: Any = cuflash) -> Any:
    """Return q, k, options that hide something, and the mask they imply, bool [batch, heads, seqlen_q, seqlen_kv]."""
    of, rng, lengths = library.masks, np.random.default_rng(seed), (seqlen_q, seqlen_kv)
    documents = [np.sort(rng.integers(0, 4, (BATCH, length)), axis=-1) for length in lengths]
    offsets = [[0, *sorted(rng.integers(0, length + 1, 2).tolist()), length] for length in lengths]
    few_q, few_kv = rng.integers(0, seqlen_q + 1, BATCH), rng.integers(0, seqlen_kv + 1, BATCH)
    blocks = rng.random((HEADS, -(-seqlen_q // 5), -(-seqlen_kv // 4))) < 0.5
    masks_by_name: dict[str, Callable[[], dict[str, Any]]] = {
        "lengths": lambda: {"mask": of.Lengths(q=int(few_q[0]), kv=int(few_kv[0]))},
        "lengths of entries": lambda: {"mask": of.Lengths(q=few_q, kv=few_kv)},
        "elements": lambda: {"mask": rng.random(lengths) < 0.4},
        "elements of heads": lambda: {"mask": of.Dense(rng.random((HEADS, *lengths)) < 0.4)},
        "elements of all": lambda: {"mask": of.Dense(rng.random((BATCH, HEADS, *lengths)) < 0.2)},
        "keys": lambda: {"mask": of.Dense(np.broadcast_to(rng.random(seqlen_kv) < 0.6, lengths))},
        "documents": lambda: {"mask": of.Documents(*documents)},
        "sequences": lambda: {"mask": of.Sequences(*offsets)},
        "blocks": lambda: {"mask": library.BlockIndex.from_blocks(blocks, *lengths, block=(5, 4))},
        "a function": lambda: {"mask": lambda b, h, i, j: (i + 2 * j + h) % 3 != b},
        "a window": lambda: {"window": (3, 2), "causal": "bottom_right"},
        "causal": lambda: {"causal": "top_left" if seqlen_q < seqlen_kv else "bottom_right"},
        "causal lengths": lambda: {"mask": of.Lengths(q=int(few_q[0])), "causal": "top_left"},
        "causal elements": lambda: {"mask": rng.random(lengths) < 0.6, "causal": "bottom_right"},
    }  # fmt: skip
    options = masks_by_name[kind]()
    whole = of.Band() & (of.Band() if options.get("mask") is None else options["mask"])
    if options.get("causal"):
        whole = whole & of.Causal(options["causal"])
    if options.get("window"):
        whole = whole & of.SlidingWindow(*options["window"], "bottom_right")
    allowed = whole.toarray(*lengths, batch=(BATCH,), num_heads=HEADS)
    q = rng.standard_normal((BATCH, HEADS, seqlen_q, DIM))
    k = rng.standard_normal((BATCH, KV_HEADS, seqlen_kv, DIM))
    return q, k, options, allowed


@st.composite
def problems(draw: Any) -> Any:
    seqlen_q, seqlen_kv = draw(st.integers(1, 23)), draw(st.integers(4, 26))
    seqlen_kv += seqlen_kv == seqlen_q  # so that causality alone hides entire rows
    return problem_of(draw(st.sampled_from(KINDS)), seqlen_q, seqlen_kv, draw(st.integers(0, 2**32 - 1)))


JUNK = {"NaN": np.nan, "inf": np.inf, "large": 1e4, "small": -1e4, "others": None}


def hidden_rows_choose_nothing(name: str, problem: Any, row: int, junk: str, library: Any = cuflash) -> None:
    """Assert that a block row keeps its blocks if every row of q and k that it does not attend is replaced."""
    q, k, options, allowed = problem
    side = 1 if name == "quest" else 4
    rows = np.arange(q.shape[-2]) // side == row
    is_causal_alone = options.keys() == {"causal"}
    if is_causal_alone:  # compare all rows: the hidden rows attend nothing, or nothing attends them
        rows[:] = True
    seen = allowed & rows[:, None]
    if name == "vertical_slash":  # its last queries choose for all rows
        for b, h in np.ndindex(BATCH, HEADS):
            seen[b, h, np.flatnonzero(allowed[b, h].any(-1))[-5:]] = True
        seen &= allowed
    # Heads of a group share keys; in nsa they also choose together.
    of_group = seen.reshape(BATCH, KV_HEADS, HEADS // KV_HEADS, *seen.shape[2:]).any(2)
    used_q = np.repeat(of_group.any(-1), HEADS // KV_HEADS, axis=1) if name == "nsa" else seen.any(-1)
    others = [np.random.default_rng(1).standard_normal(x.shape) if JUNK[junk] is None else JUNK[junk] for x in (q, k)]
    new_q = np.where(used_q[..., None], q, others[0])
    new_k = np.where(of_group.any(-2)[..., None], k, others[1])
    chosen = slice(None) if is_causal_alone else slice(row, row + 1)
    for forced in (library.selectors.Forced(diagonal=False), library.selectors.Forced(sink=1)):
        more = {"library": library, "forced": forced, **options}
        with np.errstate(all="raise" if junk == "others" else "ignore"):
            actual = selected(name, new_q, new_k, **more)[:, :, chosen]
        np.testing.assert_array_equal(actual, selected(name, q, k, **more)[:, :, chosen])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_hidden_from_a_block_row_chooses_no_block(name: str) -> None:
    @given(problems(), st.sampled_from(sorted(JUNK)), st.data())
    def check(problem: Any, junk: str, data: Any) -> None:
        num_rows = -(-problem[0].shape[-2] // (1 if name == "quest" else 4))
        hidden_rows_choose_nothing(name, problem, data.draw(st.integers(0, num_rows - 1)), junk)

    check()


def softmax(s: Any, seen: Any) -> Any:
    s = np.where(seen, s, -np.inf)
    e = np.exp(s - np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), -1e300))
    sums = e.sum(-1, keepdims=True)
    return e / np.where(sums == 0, 1, sums)


def cuts(length: int, side: int) -> list[slice]:
    return [slice(start, min(start + side, length)) for start in range(0, length, side)]


def of_pooled(q: Any, k: Any, allowed: Any, options: Any) -> Any:
    """Multiply the mean of each block's live queries by means of the keys that the block row attends, for one head."""
    scores = np.zeros((len(cuts(len(q), 4)), len(cuts(len(k), 6))))
    for row, column in np.ndindex(scores.shape):
        i, j = cuts(len(q), 4)[row], cuts(len(k), 6)[column]
        live, attended = allowed[i].any(-1), allowed[i, j].any(0)
        if attended.any():
            scores[row, column] = q[i][live].mean(0) @ k[j][attended].mean(0) * DIM**-0.5
    return softmax(scores, by_blocks(allowed, 4, 6))


def by_blocks(allowed: Any, side_q: int, side_kv: int) -> Any:
    return np.array([[allowed[i, j].any() for j in cuts(allowed.shape[1], side_kv)]
                     for i in cuts(allowed.shape[0], side_q)])  # fmt: skip


def of_antidiagonal(q: Any, k: Any, allowed: Any, options: Any) -> Any:
    """Sum over antidiagonals of 2 x 2 cells, of live queries and of keys that the row of cells attends."""
    seen, s = by_blocks(allowed, 2, 2), q @ k.T * DIM**-0.5 / 2
    cells = np.zeros(seen.shape)
    for cell in np.ndindex(cells.shape):
        for x in range(2):
            i, j = 2 * cell[0] + 1 - x, 2 * cell[1] + x
            if i < len(q) and j < len(k) and allowed[i].any() and allowed[2 * cell[0] : 2 * cell[0] + 2, j].any():
                cells[cell] += s[i, j]
    return summed(softmax(cells, seen), seen, 2, 3)


def summed(mass: Any, seen: Any, side_q: int, side_kv: int) -> Any:
    """Sum over blocks of columns, and average over those rows of each block that attend a key."""
    rows = [mass[i].sum(0) / max(1, seen[i].any(-1).sum()) for i in cuts(len(mass), side_q)]
    return np.array([[row[j].sum() for j in cuts(mass.shape[1], side_kv)] for row in rows])


def of_nsa(q: Any, k: Any, allowed: Any, options: Any) -> Any:
    """Return block scores from means of the keys that a query attends, in runs of 4 keys with a stride of 2."""
    starts = range(0, len(k) - 4 + 1, 2)
    offset = len(k) - len(q) if options.get("causal") == "bottom_right" else 0
    seen = np.array([[allowed[i, c : c + 4].any() and (not options.get("causal") or c + 3 <= i + offset)
                      for c in starts] for i in range(len(q))])  # fmt: skip
    s = np.zeros(seen.shape)
    for i, c in zip(*np.nonzero(seen)):
        s[i, c] = q[i] @ k[2 * c : 2 * c + 4][allowed[i, 2 * c : 2 * c + 4]].mean(0) * DIM**-0.5
    mass, pieces = softmax(s, seen), np.zeros((len(q), 3 * len(cuts(len(k), 6))))
    for c in range(len(starts)):
        pieces[:, c] += mass[:, c]
        pieces[:, c + 1] += mass[:, c]
    counts = np.array([max(1, seen[i].any(-1).sum()) for i in cuts(len(q), 4)])
    return np.array([pieces[i].sum(0) for i in cuts(len(q), 4)]).reshape(len(counts), -1, 3).sum(-1) / counts[:, None]


def of_quest(q: Any, k: Any, allowed: Any, options: Any) -> Any:
    bounds = np.full((len(q), len(cuts(len(k), 6))), -np.inf)
    for i, column in np.ndindex(bounds.shape):
        keys = k[cuts(len(k), 6)[column]][allowed[i, cuts(len(k), 6)[column]]]
        if len(keys):
            bounds[i, column] = np.maximum(q[i] * keys.min(0), q[i] * keys.max(0)).sum()
    return bounds


def of_oracle(q: Any, k: Any, allowed: Any, options: Any) -> Any:
    return summed(softmax(q @ k.T * DIM**-0.5, allowed), allowed, 4, 6)


BUDGETS = st.sampled_from([{"top_k": 1}, {"top_k": 3}, {"mass": 0.3}, {"mass": 0.8}, {"threshold": 0.3}])
REFERENCES = {
    "pooled": of_pooled, "antidiagonal": of_antidiagonal, "nsa": of_nsa, "quest": of_quest, "oracle": of_oracle
}


def estimates_are_right(name: str, problem: Any, budget: dict[str, float], library: Any = cuflash) -> None:
    """Assert that blocks follow from their definition, element by element, in float64."""
    q, k, options, allowed = problem
    results = selected(name, q, k, budget, library, **options)
    side = 1 if name == "quest" else 4
    for b, g in np.ndindex(BATCH, KV_HEADS):
        heads = range(2 * g, 2 * g + 2)
        scores = [REFERENCES[name](q[b, h], k[b, g], allowed[b, h], options) for h in heads]
        scores = [scores[0] + scores[1]] * 2 if name == "nsa" else scores
        of_heads = {h: by_blocks(allowed[b, h], side, 6) for h in heads}
        for h, of_head in zip(heads, scores):
            # In nsa, heads of a group choose together; then each keeps what it may attend.
            eligible = of_heads[heads[0]] | of_heads[heads[1]] if name == "nsa" else of_heads[h]
            for row, each in enumerate(of_head):
                order = np.sort(each[eligible[row]])[::-1]
                if np.any(np.diff(order) > -1e-9):
                    continue  # roundoff decides ties, for example between masses that are 0
                chosen = by_sorting(each, each, eligible[row], np.zeros(len(each), bool), Budget(**budget))
                assert np.flatnonzero(results[b, h, row]).tolist() == [j for j in chosen if of_heads[h][row, j]]


@pytest.mark.parametrize("name", REFERENCES)
def test_estimates_are_those_of_attended_elements(name: str) -> None:
    @given(problems(), BUDGETS.filter(lambda budget: name != "quest" or "mass" not in budget))
    def check(problem: Any, budget: dict[str, float]) -> None:
        estimates_are_right(name, problem, budget)

    check()


def queries_choose_alone(problem: Any, budget: dict[str, float], library: Any = cuflash) -> None:
    """Assert that a block row keeps what each of its queries chose by means of the keys that it attends."""
    q, k, options, allowed = problem
    results = selected("moba", q, k, budget, library, **options)
    offset = k.shape[-2] - q.shape[-2] if options.get("causal") == "bottom_right" else 0
    columns = cuts(k.shape[-2], 6)
    for b, h in np.ndindex(BATCH, HEADS):
        chosen = np.zeros((results.shape[-2] * 4, len(columns)), bool)
        for i in range(q.shape[-2]):
            seen = [allowed[b, h, i, j] for j in columns]
            scores = [q[b, h, i] @ k[b, h // 2, j][each].mean(0) * DIM**-0.5 if each.any() else 0
                      for j, each in zip(columns, seen)]  # fmt: skip
            is_past = (np.arange(len(columns)) + 1) * 6 <= i + offset + 1
            may = np.array([each.any() for each in seen]) & (is_past | (not options.get("causal")))
            mass = softmax(np.array(scores), may)
            chosen[i, by_sorting(mass, mass, may, np.zeros(len(may), bool), Budget(**budget))] = True
        np.testing.assert_array_equal(results[b, h], chosen.reshape(-1, 4, len(columns)).any(1))


@given(problems(), BUDGETS)
def test_queries_choose_by_the_keys_that_they_attend(problem: Any, budget: dict[str, float]) -> None:
    queries_choose_alone(problem, budget)


@pytest.mark.parametrize("name", ["pooled", "moba", "antidiagonal", "nsa", "vertical_slash", "quest"])
def test_a_mask_that_hides_nothing_changes_nothing(name: str) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, BATCH, HEADS, 24, DIM))
    options = {"causal": True, "block": (1, 6) if name == "quest" else 6}
    expected = selected(name, q, k, **options)
    for mask in (masks.Band(), masks.Lengths(q=24, kv=24), lambda b, h, i, j: i < 24):
        actual = selected(name, q, k, **options, mask=mask)
        if name == "quest":  # under a mask its bounds cover only keys up to the query
            actual, expected = (np.array(x[:, :, 5::6]) for x in (actual, selected(name, q, k, **options)))
        np.testing.assert_array_equal(actual, expected)


def test_the_last_queries_are_those_that_attend_a_key() -> None:
    last_queries_choose(cuflash)


def last_queries_choose(library: Any) -> None:
    """Assert that queries past the lengths of a batch entry choose no keys or diagonals."""
    of = library.selectors
    q, k = np.random.default_rng(0).standard_normal((2, BATCH, HEADS, 40, DIM))
    lengths = np.array([17, 33])
    options: dict[str, Any] = {"block": 4, "budget": of.Budget(top_k=4), "num_queries": 6, "causal": True}
    options["forced"] = of.Forced(diagonal=False)
    index = of.vertical_slash(q, k, **options, mask=library.masks.Lengths(q=lengths, kv=lengths))
    for b, length in enumerate(lengths):
        own = of.vertical_slash(q[b, :, :length], k[b, :, :length], **options)
        whole = length // 4  # number of blocks that the length does not cut
        np.testing.assert_array_equal(index.states()[b, :, :whole, :whole] > 0, own.states()[0, :, :whole, :whole] > 0)


ESTIMATES: dict[str, Callable[[Any], Any]] = {
    "means": lambda grid: masked.mass_of_means(grid, None)[0],
    "unlike means": lambda grid: masked.mass_of_means(grid, 0.2)[1],
    "queries": lambda grid: masked.mass_by_query(grid, None, 0.2)[0],
    "runs": lambda grid: masked.mass_of_runs(grid, 4, 2),
    "antidiagonals": lambda grid: masked.mass_of_antidiagonals(grid, 2),
    "last queries": lambda grid: masked.last_queries(grid, 5)[1],
    "their keys": lambda grid: masked.last_queries(grid, 5)[2],
}


@pytest.mark.parametrize("estimate", [*ESTIMATES, "pages"])
@given(problems())
def test_a_device_estimates_what_the_host_does(estimate: str, problem: Any) -> None:
    """Nothing waits for the device if the mask is there, and NumPy's functions never get device arrays."""
    q, k, options, allowed = problem
    given_options = {"budgets": {}, "forced": NONE, "causal": False, "mask": None, "window": None, "scale": None}
    host_grid = Grid.of(q, k, (1, 6) if estimate == "pages" else (4, 6), **given_options | options)
    by_elements = masks.Dense(device_double.to_device(allowed)).resolve(host_grid.shape)
    device_grid = replace(host_grid, q=device_double.to_device(q), k=device_double.to_device(k))

    def estimated(grid: Any) -> Any:
        if estimate == "pages":
            return masked.bounds_of_pages(grid, pages._bounds(grid))[0]
        return ESTIMATES[estimate](grid)

    expected, actual = estimated(host_grid), device_double.to_host(estimated(replace(device_grid, mask=by_elements)))
    with device_double.transfers_allowed():  # copies what the host knows about its own mask
        others = device_double.to_host(estimated(device_grid))
    eligible = np.broadcast_to(True, expected.shape)
    if estimate == "unlike means":  # this estimate is undefined for other blocks
        eligible = np.broadcast_to(host_grid.eligible(), expected.shape)
    for each in (actual, others):
        each, wanted = (np.broadcast_to(x, np.broadcast_shapes(expected.shape, each.shape)) for x in (each, expected))
        np.testing.assert_allclose(each[np.broadcast_to(eligible, each.shape)],
                                   wanted[np.broadcast_to(eligible, each.shape)], atol=1e-12)  # fmt: skip
