"""Kernels of selectors choose the blocks, and compute the means, that array formulas on the host do."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import cupy_machine
import numpy as np
from cached_calls import cached
import pytest
from cuflash import masks, selectors
from cuflash.arrays import DTYPES, accumulator_dtype, to_host
from cuflash.executors import gpu, selecting
from cuflash.executors.launch import run_alone
from cuflash.executors.sim import Simulator
from cuflash.planning import selection_kernels
from cuflash.planning.selection_kernels import ChoiceRule, drawing, means_shape, pooling
from cuflash.selectors import Budget, Forced, baselines, bound, by_query
from cuflash.selectors.budget import Diagonal, choose
from cuflash.selectors.grid import Grid, block_means
from cuflash.sim import Schedule
from executors import in_turn, is_long, needs_compiler, to_device
from hypothesis import given, settings
from hypothesis import strategies as st

EXECUTORS = [pytest.param("sim", marks=needs_compiler), pytest.param("gpu", marks=pytest.mark.gpu)]


def every_budget(most: int) -> Any:
    few = st.integers(0, most // 4)
    limit = st.one_of(st.none(), st.integers(max(1, most // 4), most))
    return st.one_of(
        st.builds(lambda k, m: Budget(top_k=k, min_blocks=m), st.integers(1, most), few),
        st.builds(Budget, mass=st.sampled_from([0.25, 0.5, 0.875, 1.0]), min_blocks=few, max_blocks=limit),
        st.builds(Budget, threshold=st.sampled_from([-1.0, 0.0, 0.5]), min_blocks=few, max_blocks=limit),
    )


@st.composite
def choices(draw: Any, *, is_wide: bool = False) -> Any:
    """Draw scores with ties, NaN and infinities, shares with exact sums, a rule, and blocks that the caller forces.

    Wide rows have a thread block each, runs of 1024 blocks, and many equal scores.
    """
    if is_wide:
        lengths = draw(st.integers(1, 24)), draw(st.integers(1025, 4000))
        block = draw(st.sampled_from([(8, 1), (5, 1)]))
    else:
        lengths = draw(st.integers(1, 90)), draw(st.integers(1, 700))
        block = draw(st.sampled_from([(8, 8), (5, 16), (16, 3)]))
    rows, columns = (-(-length // side) for length, side in zip(lengths, block))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    scores = (rng.integers(-4, 5, (2, rows, columns)) / 4).astype(dtype)
    if draw(st.booleans()):
        scores.reshape(-1)[rng.integers(0, scores.size, 5)] = [np.nan, np.inf, -np.inf, -0.0, -np.nan]
    shares = (rng.integers(0, 5, scores.shape) / 64).astype(dtype) if draw(st.booleans()) else None
    allowed, forced = (rng.random(scores.shape) < odds if draw(st.booleans()) else None for odds in (0.7, 0.1))
    budget = draw(every_budget(columns if is_wide else 40))
    must = Forced(sink=draw(st.integers(0, 2)), local=draw(st.integers(0, 3)), diagonal=draw(st.booleans()))
    offset = draw(st.sampled_from([0, lengths[1] - lengths[0]]))
    return scores, shares, allowed, forced, budget, must, lengths, block, offset, draw(st.booleans())


def rule_of(budget: Budget, must: Forced, lengths: Any, block: Any, offset: int, is_causal: bool) -> ChoiceRule:
    count = max(budget.top_k or 0, budget.min_blocks)
    return ChoiceRule(
        lengths=lengths, block=block, offset=offset, is_causal=is_causal, count=count, mass=budget.mass or 0.0,
        threshold=budget.threshold, num_sinks=must.sink, num_local=must.local, has_diagonal=must.diagonal,
        most=budget.max_blocks or 0,
    )  # fmt: skip


def kept_by_kernel(executor: str, rule: ChoiceRule, *arrays: Any) -> Any:
    if executor == "gpu":
        return selecting.chosen(rule, *(None if x is None else to_device(x) for x in arrays)).get()
    scores, selected = arrays[0], np.full(arrays[0].shape, 7, np.uint8)
    names = ("scores", "shares", "allowed", "forced", "kept")
    run_alone(rule.kernels(scores.shape, scores.dtype), dict(zip(names, (*arrays, selected))), Simulator())
    return selected.view(bool) if selected.max() <= 1 else selected


def check_choice(executor: str, case: Any) -> None:
    scores, shares, allowed, forced, budget, must, lengths, block, offset, is_causal = case
    diagonal = Diagonal.of(np, lengths, block, offset)
    eligible = np.broadcast_to(diagonal.is_met if is_causal else True, scores.shape)
    eligible = eligible if allowed is None else eligible & allowed
    every = diagonal.forced(must) if forced is None else diagonal.forced(must) | forced
    expected = choose(scores, np.ones_like(scores) if shares is None else shares, eligible, every, budget)
    rule = rule_of(budget, must, lengths, block, offset, is_causal)
    if lengths[0] % 2:  # rows shorter than their lists allow, and rows of exactly that length
        length = min(int(expected.sum(-1).max()) + lengths[0] % 4 // 2, expected.shape[-1])
        lists = lists_by_kernel(executor, replace(rule, list_length=length), scores, shares, allowed, forced)
        np.testing.assert_array_equal(lists, by_query.lists_of(expected, length))
        return
    np.testing.assert_array_equal(kept_by_kernel(executor, rule, scores, shares, allowed, forced), expected)


def lists_by_kernel(executor: str, rule: ChoiceRule, *arrays: Any) -> Any:
    """Return the lists of a rule, between guard numbers that must stay unchanged."""
    lists = np.full((*arrays[0].shape[:-1], rule.list_length), 7, np.int32)
    if 0 in lists.shape:
        return lists
    kernels = rule.kernels(arrays[0].shape, arrays[0].dtype)
    run(executor, kernels, *arrays, lists)
    return lists


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("is_wide", [False, True])
def test_the_kernel_keeps_what_the_specification_says(executor: str, is_wide: bool) -> None:
    @settings(max_examples=(5 if is_wide else 30) if executor == "sim" and not is_long() else 60, deadline=None)
    @given(choices(is_wide=is_wide))
    def check(case: Any) -> None:
        scores, block = case[0], case[7]
        entries = list(rule_of(*case[4:]).kernels(scores.shape, scores.dtype).launches)
        assert not is_wide or (block[1], entries) == (1, ["choose_wide"])
        check_choice(executor, case)

    check()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("shape", "entry"), [((1, 257, 3100), "choose"), ((1, 2, 60000), "choose_wide")])
def test_rows_longer_than_shared_memory_are_chosen_from(executor: str, shape: Any, entry: str) -> None:
    scores = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for budget in (Budget(top_k=77), Budget(threshold=2.0)):
        given_rule = budget, Forced(sink=1), (8 * shape[1], 8 * shape[2]), (8, 8), 0, False
        kernels = rule_of(*given_rule).kernels(shape, scores.dtype, 227 << 10)
        (feature,) = kernels.features
        numbers = feature.values if entry == "choose" else feature.values["first"]
        assert (list(kernels.launches), numbers["keeps_places"]) == ([entry], False)
        check_choice(executor, (scores, None, None, None, *given_rule))


def check_local_blocks_past_the_last_key(executor: str = "sim", planning: Any = selection_kernels) -> None:
    """Check queries that are more blocks after the last key than there are blocks of keys."""
    lengths, block, scores = (40, 9), (8, 8), np.zeros((1, 5, 2), np.float32)
    for local in range(1, 8):
        budget, must = Budget(threshold=1.0, min_blocks=0), Forced(local=local, diagonal=False)
        expected = np.array([[[n - local < column <= n for column in range(2)] for n in range(5)]])
        rule = planning.ChoiceRule(**vars(rule_of(budget, must, lengths, block, 0, False)))
        np.testing.assert_array_equal(kept_by_kernel(executor, rule, scores, None, None, None), expected)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_local_blocks_are_counted_from_queries_past_the_last_key(executor: str) -> None:
    check_local_blocks_past_the_last_key(executor)


def check_pair(planning: Any = selection_kernels) -> None:
    """Check that one launch chooses from two grids, each with its own rule, in any order of warps."""
    rng = np.random.default_rng(0)
    grids = [(rng.integers(0, 9, shape) / 16).astype(np.float32) for shape in ((3, 2, 1100), (3, 2, 40))]
    budgets = Budget(mass=0.5), Budget(top_k=7)
    rules = [rule_of(budget, Forced(diagonal=False), (1, x.shape[-1]), (1, 1), 0, False)
             for budget, x in zip(budgets, grids)]  # fmt: skip
    shapes = [x.shape for x in grids]
    kernels = planning.wide_choosing(rules, shapes, grids[0].dtype)
    assert kernels.launches["choose_wide"].grid(1) == 12
    words = [planning.num_words(x.shape) for x in grids]
    for order in ("round_robin", "first_warp", "last_warp"):
        words_out = np.full(sum(words), 7, np.uint32)
        arrays = dict(zip(("scores", "scores_2", "shares", "shares_2"), (*grids, *grids)))
        run_alone(kernels, {**arrays, "kept": words_out}, Simulator(schedule=Schedule(order=order)))
        halves = words_out[: words[0]].reshape(6, -1), words_out[words[0] :].reshape(6, -1)
        for scores, of_grid, budget in zip(grids, halves, budgets):
            expected = choose(scores, scores, None, None, budget).reshape(6, -1)
            np.testing.assert_array_equal(of_grid, words_of(expected))


def words_of(selected: Any) -> Any:
    """Pack the bits of rows [rows, columns] into 32-bit words, the first bit lowest."""
    padded = np.zeros((len(selected), -(-selected.shape[-1] // 32) * 32), bool)
    padded[:, : selected.shape[-1]] = selected
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4")


def check_draws() -> None:
    """Check that the kernel draws the same numbers as Philox on the host, from 64-bit seeds."""
    shape = (2, 7, 19)
    for seed in (0, 3, 5 << 32, 2**64 - 1):
        numbers = np.full(shape, np.nan, np.float32)
        run_alone(drawing(shape, seed), {"numbers": numbers}, Simulator())
        np.testing.assert_array_equal(numbers, baselines._drawn(np, shape, seed))


def check_means() -> None:
    """Check strided rows, several heads and batch entries, and a short last block."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((3, 2, 4, 21, 10)).astype(np.float16)[..., ::2], np.ones((3, 2, 2, 30, 5), np.float16)
    means = [np.full(means_shape(x.shape, side), np.nan, np.float32) for x, side in ((q, 8), (k, 7))]
    run_alone(pooling((q, k), (8, 7)), {"q": q, "means_of_q": means[0], "k": k, "means_of_k": means[1]}, Simulator())
    # To first order, a sum of n rounded terms and its quotient err by n roundoffs of the sum of absolute values.
    exact, sizes = (block_means(x.astype(np.float64), 8) for x in (q, np.abs(q)))
    assert (np.abs(means[0] - exact) <= 8 * np.finfo(np.float32).eps / 2 * sizes).all()
    np.testing.assert_array_equal(means[1], 1)


def run(executor: str, kernels: Any, *arrays: Any) -> None:
    """Run a kernel on arrays in the order in which it reads and writes them; None marks an array that is left out."""
    (launch,) = kernels.launches.values()
    names = (*launch.reads, *launch.writes)
    if executor == "gpu":
        on_device, target = [None if each is None else to_device(each) for each in arrays], gpu.current_target()
        addresses = [0 if each is None else each.data.ptr for each in on_device]
        selecting.bound_kernel(kernels, target).launch(addresses, target.stream())
        for each, result in zip(arrays[len(launch.reads) :], on_device[len(launch.reads) :]):
            each[...] = result.get()
        return
    run_alone(kernels, dict(zip(names, arrays, strict=True)), Simulator())


def check_spread(executor: str = "sim", planning: Any = selection_kernels) -> None:
    """Check that compressed key c covers parts c, c + 1 and c + 2, where a block has four parts; sums are exact."""
    masses = np.random.default_rng(0).integers(0, 9, (2, 6, 5, 17)).astype(np.float32)
    scores = np.full((2, 6, 5, 5), np.nan, np.float32)
    run(executor, planning.spreading(masses.shape, 5, 3, (3, 4), masses.dtype), masses, scores)
    of_parts = np.zeros((2, 6, 5, 20))
    for n in range(3):
        of_parts[..., n : n + 17] += masses
    of_groups = of_parts.reshape(2, 2, 3, 5, 5, 4).sum((-1, 2))
    np.testing.assert_array_equal(scores, of_groups.repeat(3, axis=1))


def check_key_scores(dtype: Any, executor: str = "sim", planning: Any = selection_kernels) -> None:
    """Check shared keys, strided rows, short last tiles of queries and keys, and queries without a key.

    Products of integers are exact, and exponentials with a scale of log 2 are powers of two, so their sums are exact
    too.
    """
    rng, scale = np.random.default_rng(0), np.log(2)
    for num_columns, first_key in ((40, None), (5, -3), (72, 60)):
        q = rng.integers(-1, 2, (2, 3, 4, 70, 2 * num_columns)).astype(dtype)[..., ::2]
        k = (rng.integers(-1, 2, (1, 3, 2, 131, num_columns)) * (np.arange(num_columns) % 7 == 4)).astype(dtype)
        launch = planning.key_scoring(q, k, (2, 3), scale, first_key)
        shape, of_sums = (2, 3, 4, 70, 131), accumulator_dtype(q.dtype)
        scores, runs = np.full(shape, 7, of_sums), np.full((*shape[:-1], planning.num_key_runs(131), 2), 7, of_sums)
        run(executor, launch, q, k, scores, runs)
        expected = q.astype(np.float64) @ np.swapaxes(k.astype(np.float64).repeat(2, axis=2), -1, -2)
        if first_key is not None:
            expected[..., np.arange(131) > np.arange(70)[:, None] + first_key] = -np.inf
        np.testing.assert_array_equal(scores, expected)
        expected = np.concatenate([expected, np.full((*shape[:-1], 3 * 64 - 131), -np.inf)], axis=-1)
        of_runs = expected.reshape(*shape[:-1], 3, 64)
        greatest = of_runs.max(-1)
        assert np.ptp(scores[scores > -np.inf]) < 24
        np.testing.assert_array_equal(runs[..., 0], greatest)
        shift = np.where(greatest > -np.inf, greatest, 0)
        np.testing.assert_array_equal(runs[..., 1], np.exp2(of_runs - shift[..., None]).sum(-1))


def check_slashes(
    lengths: tuple[int, int], offset: int, executor: str = "sim", planning: Any = selection_kernels
) -> None:
    """Check different keys and distances in each head; sums of powers of two are exact.

    The exponentials of a row add up to 4, or the row has no key.
    """
    rng, (seqlen_q, seqlen_kv), first = np.random.default_rng(0), lengths, 23
    count, num_runs = planning.num_distances(seqlen_q, offset), -(-seqlen_kv // 64)
    assert count == seqlen_q + offset
    shift = rng.integers(-9, 10, (2, seqlen_q - first, 1)).astype(np.float32)
    shift[:, 5] = -np.inf
    scores = np.where(shift > -np.inf, shift, -np.inf) + rng.integers(-3, 1, (2, seqlen_q - first, seqlen_kv))
    scores = scores.astype(np.float32)
    runs = np.zeros((2, seqlen_q - first, num_runs, 2), np.float32)
    # each run but the last adds 1/64 to the row's sum; the last run makes it 4
    runs[..., 0], runs[..., 1] = shift - 1, 1 / 32
    runs[..., -1, 0], runs[..., -1, 1] = shift[..., 0], 4 - (num_runs - 1) / 64
    runs[:, 5, :, 1] = 0
    masses = np.exp2(scores - np.where(shift > -np.inf, shift, 0)) / 4
    of_keys, of_distances = (np.full((2, length), np.nan, np.float32) for length in (seqlen_kv, count))
    launch = planning.slash_summing(scores.shape, first + offset, count, scores.dtype)
    run(executor, launch, scores, runs, of_keys, of_distances)
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_kv)
    distance = i + offset - j
    np.testing.assert_array_equal(of_keys, masses.sum(1))
    has_distance = distance[first:] >= 0
    expected = [np.bincount(distance[first:][has_distance], of_head[has_distance], count) for of_head in masses]
    np.testing.assert_array_equal(of_distances, expected)
    keys, distances = np.zeros((2, seqlen_kv), bool), np.zeros((2, count), bool)
    keys[0, [0, 8, 23]], distances[1, [0, 7, 21, 33]] = True, True
    keys[0, -1], distances[:, -1] = True, True  # the last distance of a head is adjacent to those of the next head
    chosen = np.concatenate([words_of(keys).reshape(-1), words_of(distances).reshape(-1)])
    shape = 2, -(-seqlen_q // 4), -(-seqlen_kv // 8)
    elements = np.zeros((2, 4 * shape[1], 8 * shape[2]), bool)
    for head, of_head in enumerate(elements[:, :seqlen_q, :seqlen_kv]):
        of_head |= np.isin(j, np.flatnonzero(keys[head])) | np.isin(distance, np.flatnonzero(distances[head]))
    crossed = elements.reshape(2, shape[1], 4, -1, 8).any((2, 4))
    diagonal = Diagonal.of(np, lengths, (4, 8), offset)
    for must, is_causal in ((Forced(sink=1, local=2, diagonal=False), True), (Forced(), True), (Forced(), False)):
        selected, rule = np.full(shape, 7, np.uint8), rule_of(Budget(top_k=1), must, lengths, (4, 8), offset, is_causal)
        run(executor, planning.crossing(rule, shape), chosen, selected)
        np.testing.assert_array_equal(selected, (crossed | diagonal.forced(must)) & (diagonal.is_met | (not is_causal)))


def check_page_bounds(executor: str = "sim", planning: Any = selection_kernels) -> None:
    """Check shared keys, strided rows and a short last page; products of integers are exact."""
    rng = np.random.default_rng(0)
    q = rng.integers(-9, 10, (2, 3, 4, 5, 80)).astype(np.float16)[..., ::2]
    k = rng.integers(-9, 10, (1, 3, 2, 19, 40)).astype(np.float16)
    k[0, 1, 0, 7, 3], q[1, 2, 3, 4, 39] = np.nan, np.nan
    bounds = np.full((2, 3, 4, 5, 4), 7, np.float32)
    run(executor, planning.page_bounding(q, k, (2, 3), 6), q, k, bounds)
    np.testing.assert_array_equal(bounds, selectors.page_bounds(q, k, page_size=6))
    assert np.isnan(bounds).any()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rounding_lifts_no_score_above_the_bound_of_its_page(executor: str) -> None:
    """Column sums have the same order for all page sizes, and rounding preserves the order of numbers."""

    @settings(max_examples=30, deadline=None)
    @given(
        st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([3, 4, 16]), st.sampled_from([1, 7, 64]),
        st.sampled_from([np.float16, np.float32, np.float64]),
    )  # fmt: skip
    def check(seed: int, seqlen_kv: int, page_size: int, head_dim: int, dtype: Any) -> None:
        rng = np.random.default_rng(seed)
        q, k = (rng.standard_normal((2, length, head_dim)).astype(dtype) for length in (3, seqlen_kv))
        page_bounds = []
        for size in (page_size, 1):
            bounds = np.full((2, 3, -(-seqlen_kv // size)), np.nan, accumulator_dtype(q.dtype))
            run(executor, selection_kernels.page_bounding(q, k, (), size), q, k, bounds)
            page_bounds.append(bounds)
        assert (page_bounds[0] >= np.maximum.reduceat(page_bounds[1], range(0, seqlen_kv, page_size), axis=-1)).all()

    check()


def check_runs(planning: Any = selection_kernels) -> None:
    """Check runs of 12 rows at every fourth row of strided arrays; sums of integers are exact."""
    rng = np.random.default_rng(0)
    q, k = rng.integers(-9, 10, (2, 3, 9, 10)).astype(np.float32)[..., ::2], rng.integers(-9, 10, (2, 3, 31, 5))
    k = k.astype(np.float32)
    outputs = np.full(q.shape, np.nan, np.float32), np.full((2, 3, 5, 5), np.nan, np.float32)
    arrays = {"q": q, "means_of_q": outputs[0], "k": k, "means_of_k": outputs[1]}
    run_alone(planning.pooling((q, planning.runs_of_rows(k, 12, 4)), (1, 12)), arrays, Simulator())
    np.testing.assert_array_equal(outputs[0], q)
    sums = np.stack([k[..., start : start + 12, :].sum(-2) for start in range(0, 20, 4)], axis=-2)
    np.testing.assert_array_equal(outputs[1], sums / np.float32(12))


@needs_compiler
@pytest.mark.parametrize("check", [check_pair, check_draws, check_means, check_runs])
def test_the_kernel_does_what_the_host_does(check: Any) -> None:
    check()


SLASHES = [((30, 41), 11), ((41, 38), -3), ((41, 30), 0), ((160, 150), 0), ((41, 1400), 1359)]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("check", "given_case"), [
    (check_spread, ()), (check_page_bounds, ()), *((check_key_scores, (dtype,)) for dtype in DTYPES),
    *((check_slashes, case) for case in SLASHES),
])  # fmt: skip
def test_the_kernel_does_on_each_executor_what_the_host_does(executor: str, check: Any, given_case: Any) -> None:
    check(*given_case, executor)


@pytest.fixture
def cupy(tmp_path: Any, monkeypatch: Any) -> Any:
    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        yield machine


def budgets_of(name: str, budget: Budget) -> dict[str, Budget]:
    return dict.fromkeys(("vertical", "slash") if name == "vertical_slash" else ("budget",), budget)


def numbers_of(selection: Any) -> Any:
    """Return the lists of queries, or the states of an index, on the host."""
    return to_host(selection.blocks) if isinstance(selection, masks.ChosenBlocks) else selection._on_host.states()


def check_selections(machine: Any, num_budgets: int = 3) -> None:
    """Check selections in first and later calls, for q and k with short last blocks and strided rows.

    Each selector takes turns with three budgets.
    """
    rng = np.random.default_rng(0)
    for number, (name, options) in enumerate({
        "pooled": {"block": (16, 24), "causal": "bottom_right"},
        "antidiagonal": {"block": (16, 32), "stride": 4},
        "random": {"block": 16, "causal": "bottom_right", "seed": 2**64 - 5},
        "local": {"block": (16, 24), "causal": "bottom_right"},
        "oracle": {"block": (16, 24), "causal": "bottom_right"},
        "nsa": {"block": (16, 24), "compression": (12, 4), "causal": "bottom_right"},
        "vertical_slash": {"block": (4, 8), "num_queries": 9, "causal": "bottom_right"},
        "quest": {"page_size": 12, "causal": "bottom_right"},
    }.items()):
        select = getattr(selectors, name)
        of_mass = Budget(mass=0.5, min_blocks=2) if name != "quest" else Budget(top_k=5)
        budgets = [Budget(top_k=3), of_mass, Budget(density=0.3)]
        for budget in [*budgets, *budgets][number % 3 :][:num_budgets]:
            for _ in range(2):
                q, k = rng.standard_normal((4, 84, 24))[..., ::2], rng.standard_normal((2, 92, 12))
                q, k = np.array([q, 2 * q]), np.array([k, k])
                more = budgets_of(name, budget) | {"forced": Forced(sink=1, local=1)} | options
                index = select(machine.asarray(q), machine.asarray(k), **more)
                np.testing.assert_array_equal(numbers_of(index), numbers_of(select(q, k, **more)))


def test_selections_on_a_device_are_those_of_the_host(cupy: Any, monkeypatch: Any) -> None:
    num_budgets = 3 if is_long() else 1
    check_selections(cupy, num_budgets)
    assert len(cached("select")) == 8 * num_budgets


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", ["pooled", "moba", "antidiagonal", "nsa", "vertical_slash", "quest", "oracle"])
def test_masked_selections_on_a_device_are_those_of_the_host(cupy: Any, name: str, where: str) -> None:
    """Masks are on the host, and are copied, or hold device arrays; NaN that they hide affects no choice."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 4, 40, 6)), rng.standard_normal((2, 2, 52, 6))
    q[:, :, 33:], k[:, :, 45:] = np.nan, np.nan
    options: dict[str, Any] = {"block": (1, 8) if name == "quest" else (4, 8), "budget": Budget(density=0.4)}
    options |= {"nsa": {"compression": (8, 4)}, "antidiagonal": {"stride": 4}, "moba": {"pool_queries": False},
                "vertical_slash": {"num_queries": 7}}.get(name, {})  # fmt: skip
    select = selectors.pooled if name == "moba" else getattr(selectors, name)
    mask: masks.Mask = masks.Lengths(q=np.array([33, 20]), kv=np.array([45, 31]))
    if where == "host":
        mask = masks.Lengths(q=33, kv=45) & masks.SlidingWindow(9, 7, "top_left")
    actual = select(cupy.asarray(q), cupy.asarray(k), **options, mask=mask.to(cupy.asarray))
    np.testing.assert_array_equal(numbers_of(actual), numbers_of(select(q, k, **options, mask=mask)))


@pytest.mark.parametrize(("num_queries", "budget"), in_turn([64, 100], [Budget(top_k=20), Budget(mass=0.25)]))
def test_keys_and_distances_of_long_rows_are_those_of_the_host(cupy: Any, budget: Budget, num_queries: int) -> None:
    """Thousands of keys span many runs, and several rounds of a thread block; one head contains NaN."""
    rng = np.random.default_rng(0)
    q, k = (3 * rng.standard_normal((2, 2, length, 40)) for length in (150, 2300))
    q[1, 0, -5, 3] = np.nan
    options = budgets_of("vertical_slash", budget) | {"block": (16, 32), "causal": "bottom_right"}
    options["num_queries"] = num_queries
    index = selectors.vertical_slash(cupy.asarray(q), cupy.asarray(k), **options)
    expected = selectors.vertical_slash(q, k, **options).states()
    np.testing.assert_array_equal(index._on_host.states(), expected)
    assert 0.02 < (expected[0] > 0).mean() < 0.8


@pytest.mark.parametrize("name", ["local", "oracle", "nsa", "vertical_slash", "quest"])
def test_kernels_select_what_formulas_do(cupy: Any, name: str) -> None:
    """Lengths cut blocks off, heads share keys, diagonals start before key 0, and blocks are forced, in float64."""
    blocks = st.sampled_from([(8, 8), (5, 16), (16, 4)])
    more = {
        "nsa": st.fixed_dictionaries({"block": blocks, "compression": st.sampled_from([(4, 4), (8, 4), (12, 2)])}),
        "vertical_slash": st.fixed_dictionaries({"block": blocks, "num_queries": st.sampled_from([1, 9, 300])}),
        "quest": st.fixed_dictionaries({"page_size": st.sampled_from([1, 7, 16])}),
    }
    most = st.builds(Budget, top_k=st.integers(1, 9), min_blocks=st.integers(0, 4))
    masses = st.builds(Budget, mass=st.sampled_from([0.3, 0.9]), min_blocks=st.integers(0, 4))

    @settings(max_examples=20 if is_long() else 6, deadline=None)
    @given(
        st.integers(1, 70), st.integers(12, 90), st.sampled_from([False, "top_left", "bottom_right"]),
        st.builds(Forced, sink=st.integers(0, 2), local=st.integers(0, 2), diagonal=st.booleans()),
        most if name == "quest" else most | masses, more.get(name, st.fixed_dictionaries({"block": blocks})),
        st.integers(0, 2**32 - 1),
    )  # fmt: skip
    def check(
        seqlen_q: int, seqlen_kv: int, causal: Any, forced: Forced, budget: Budget, options: dict[str, Any], seed: int
    ) -> None:
        rng, select = np.random.default_rng(seed), getattr(selectors, name)
        batch = (2,) if is_long() else ()  # other tests cover batch entries, and thread blocks of 32 warps are slow
        q, k = rng.standard_normal((*batch, 4, seqlen_q, 6)), rng.standard_normal((*batch, 2, seqlen_kv, 6))
        given_options = budgets_of(name, budget) | {"forced": forced, "causal": causal} | options
        actual = select(cupy.asarray(q), cupy.asarray(k), **given_options)
        expected = select(q, k, **given_options)
        np.testing.assert_array_equal(numbers_of(actual), numbers_of(expected))

    check()


def check_turned_columns(machine: Any) -> None:
    """Check groups of columns in reverse order: contiguous copies with that order have the same masses."""

    def masses(q: Any, *others: Any, **options: Any) -> Any:
        masses_bound = bound.bound_block_mass(q, k, *others, **options)
        results = [machine.empty(each.shape, each.dtype) for each in masses_bound.results.values()]
        masses_bound.launches.launch([x.data.ptr for x in (q, k, *results)], machine.cuda.get_current_stream())
        return results[0].get()

    rng = np.random.default_rng(1)
    q, k = (machine.asarray(rng.standard_normal((2, 40, 256)).astype(np.float16)) for _ in range(2))
    for width in (64, 128):
        turned = machine.asarray(q.get().reshape(2, 40, -1, width)[:, :, ::-1].reshape(q.shape))
        mass = masses(q, (8, 16), None, 0.1, turned_columns=width)
        np.testing.assert_array_equal(mass, masses(turned, (8, 16), None, 0.1))
        assert (mass <= 8.001).all()  # a block has eight queries, each with a mass of at most 1
    assert bound.bound_block_mass(q, k, (8, 16), None, 0.1, turned_columns=32) is None


def test_rows_of_turned_groups_have_the_masses_of_their_copies(cupy: Any) -> None:
    check_turned_columns(cupy)


@pytest.mark.gpu
def test_a_gpu_turns_groups_of_columns() -> None:
    import cupy

    check_turned_columns(cupy)


LISTS = ["classify", "ranks", "pointers", "entries"]
LAUNCHES = {
    "pooled": ["pool", "block_mass", "choose", *LISTS],
    "oracle": ["block_mass", "choose", *LISTS],
    "nsa": ["pool", "block_mass", "spread", "choose", *LISTS],
    "local": LISTS,
    "quest": ["page_bounds", "choose"],
    "vertical_slash": ["key_scores", "slash_sums", "choose_wide", "crossings", *LISTS],
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_later_selections_launch_kernels_alone(cupy: Any, monkeypatch: Any, name: str) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 2, 64, 8)).astype(np.float16)
    on_device, options = (cupy.asarray(q), cupy.asarray(k)), budgets_of(name, Budget(top_k=2)) | {"causal": True}
    options |= {"page_size": 16} if name == "quest" else {"block": 16}
    select = getattr(selectors, name)
    first = select(*on_device, **options)
    monkeypatch.setattr(sys.modules[select.__module__], "Grid", None)
    cupy.log.clear()
    before = cupy.allocated
    again = select(*on_device, **options)
    assert [entry for kind, *_, entry in cupy.log if kind == "launch"] == LAUNCHES[name]
    assert cupy.allocated == before + 1  # the lists of the index
    np.testing.assert_array_equal(numbers_of(again), numbers_of(first))


def test_an_index_that_is_written_to_changes_no_later_one(cupy: Any) -> None:
    """The blocks of `local` are cached, but each call creates new lists."""
    q, options = cupy.asarray(np.zeros((2, 64, 8), np.float16)), {"block": 16, "budget": Budget(top_k=2)}
    expected = selectors.local(q.get(), q.get(), **options).states()
    for _ in range(3):
        index = selectors.local(q, q, **options)
        np.testing.assert_array_equal(index._on_host.states(), expected)
        index.indptr[...] = 0
        index.kinds[...] = 0


def test_streams_wait_for_blocks_that_another_stream_copied(cupy: Any) -> None:
    """Other streams wait for a copy that is in progress; once it has finished, a captured call may read its result."""
    q, options = cupy.asarray(np.zeros((2, 64, 8), np.float16)), {"block": 16, "budget": Budget(top_k=2)}
    cupy.events_are_reached = False
    selectors.local(q, q, **options)
    (selection,) = cached("select").values()
    (event,) = [number for kind, *_, number in cupy.log if kind == "record"]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.log.clear()
        selectors.local(q, q, **options)
        assert cupy.log[0] == ("wait", stream.ptr, event)
        selection._lists._copied.is_reached = True
        stream.begin_capture()
        index = selectors.local(q, q, **options)
        graph = stream.end_capture()
    assert selection in gpu._pinned
    graph.launch()
    np.testing.assert_array_equal(index._on_host.states(), selectors.local(q.get(), q.get(), **options).states())


def test_blocks_are_not_remembered_from_within_a_capture(cupy: Any) -> None:
    q = cupy.asarray(np.zeros((2, 64, 8), np.float16))
    grid = Grid.of(q, q, 16, {"budget": Budget(top_k=2)}, Forced(), False, None, None, None)
    blocks = np.eye(4, dtype=bool)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        assert bound.of_places(grid, blocks) is None
        stream.end_capture()
    assert bound.of_places(grid, blocks) is not None


@pytest.mark.gpu
def test_a_gpu_selects_what_the_host_does() -> None:
    import cupy

    check_selections(cupy)
