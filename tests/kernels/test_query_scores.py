"""The kernel in which queries choose their own keys selects what NumPy selects, unless scores are within roundoff."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuflash.arrays import as_dtype
from cuflash.executors import selecting
from cuflash.executors.launch import run_alone
from cuflash.executors.sim import Simulator
from cuflash.planning import query_scores
from cuflash.planning.device import DeviceSpec
from cuflash.planning.list_kernels import AT_CALL
from cuflash.planning.query_scores import QueryChoice
from cuflash.planning.selection_kernels import ChoiceRule
from cuflash.selectors import Budget, Forced, by_query
from cuflash.selectors.budget import Diagonal, choose
from cuflash.sim import Schedule
from executors import is_long, needs_compiler, to_device
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

EXECUTORS = [pytest.param("sim", marks=needs_compiler), pytest.param("gpu", marks=pytest.mark.gpu)]
BUDGETS: list[dict[str, Any]] = [
    {"top_k": 3}, {"top_k": 1, "min_blocks": 2}, {"mass": 0.6, "max_blocks": 4}, {"density": 0.3},
    {"threshold": 0.1, "max_blocks": 5}, {"mass": 0.9, "max_blocks": 40},
]  # fmt: skip
FORCED: list[dict[str, Any]] = [{}, {"diagonal": False}, {"sink": 1, "local": 2}]


def case_of(
    group: int, kv_heads: int, width: int, lengths: tuple[int, int], parts: tuple[int, int], causal: bool | str,
    is_shared: bool, is_past_only: bool, has_lse: bool, budget: dict[str, Any], forced: dict[str, Any], seed: int,
    dtype: str = "float16", stride: int = 4, is_tied: bool = False,
) -> dict[str, Any]:  # fmt: skip
    return {name: value for name, value in locals().items()}


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Draw groups whose heads share warps or not, widths of all classes, and runs of keys that overlap or not."""
    parts = draw(st.sampled_from([(1, 1), (2, 4), (3, 2), (1, 3), (4, 4)]))
    return case_of(
        draw(st.sampled_from([1, 2, 3, 5, 8, 16, 20, 48, 64])), draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([8, 40, 130] if is_long() else [8, 40])),
        (draw(st.integers(1, 80)), draw(st.integers(16, 420))), parts,
        draw(st.sampled_from([False, True, "bottom_right"])), draw(st.booleans()),
        parts == (1, 1) and draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(BUDGETS)),
        draw(st.sampled_from(FORCED)), draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from(["float16", "bfloat16"] if is_long() else ["float16"])), draw(st.sampled_from([3, 4])),
    )  # fmt: skip


def check_lists(executor: str, case: dict[str, Any], order: str = "round_robin", planning: Any = query_scores) -> float:
    """Check the lists of two batch entries that share keys; rows in which scores are within roundoff are skipped.

    Returns the fraction of rows that are compared.
    """
    rng, (seqlen_q, seqlen_kv), stride = np.random.default_rng(case["seed"]), case["lengths"], case["stride"]
    group, kv_heads, width, (num_parts, of_block) = case["group"], case["kv_heads"], case["width"], case["parts"]
    block, length, dtype = of_block * stride, num_parts * stride, as_dtype("dtype", case["dtype"])
    count = -(-seqlen_kv // block) if case["parts"] == (1, 1) else (seqlen_kv - length) // stride + 1
    q = rng.standard_normal((2, kv_heads * group, seqlen_q, 2 * width)).astype(dtype)[..., ::2]
    # Later keys have larger norms, so that the maximum score of a query grows.
    k = (rng.standard_normal((1, kv_heads, count, width)) * np.linspace(0.5, 2, count)[:, None]).astype(dtype)
    if case["is_tied"]:  # products of small integers are exact, and many are equal
        q, k = (rng.integers(-1, 2, x.shape).astype(dtype) for x in (q, k))
    heads = group if case["is_shared"] else 1
    offset = seqlen_kv - seqlen_q if case["causal"] == "bottom_right" else 0
    is_causal, needed = bool(case["causal"]), length if case["parts"] != (1, 1) or case["is_past_only"] else 1
    budget, must = Budget(**case["budget"]), Forced(**case["forced"])
    sums_weights = heads > 1 or case["parts"] != (1, 1) or budget.mass is not None or budget.threshold is not None
    # Expected choice, from the definition.
    wide_q, wide_k = (x.astype(np.float64) for x in (q, np.broadcast_to(k, (2, *k.shape[1:])).repeat(group, axis=1)))
    scale = width**-0.5
    s = wide_q @ wide_k.swapaxes(-1, -2) * scale
    sizes = (abs(wide_q) @ abs(wide_k).swapaxes(-1, -2) * scale).max()
    i, n = np.arange(seqlen_q)[:, None], np.arange(count)
    seen = (n * stride * (of_block if case["parts"] == (1, 1) else 1) + needed - 1 <= i + offset) | (not is_causal)
    e = np.where(seen, np.exp(np.where(seen, s, 0)), 0)
    sums = e.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(sums).astype(np.float32)
    weights = e / np.where(sums == 0, 1, sums)[..., None] if sums_weights else s
    num_blocks = -(-seqlen_kv // block)
    first, start = np.arange(count)[:, None], np.arange(num_blocks) * of_block
    overlap = np.maximum(0, np.minimum(first + num_parts, start + of_block) - np.maximum(first, start))
    scores = weights @ overlap if case["parts"] != (1, 1) else weights
    scores = scores.reshape(2, -1, heads, seqlen_q, num_blocks).sum(2)
    diagonal = Diagonal.of(np, (seqlen_q, seqlen_kv), (1, block), offset)
    forced_blocks = diagonal.forced(must)
    may = diagonal.is_met | (not is_causal)
    if case["is_past_only"] and is_causal:
        may = may & (((np.arange(num_blocks) + 1) * block <= i + offset + 1) | forced_blocks)
    may, forced_blocks = (np.broadcast_to(x, scores.shape) for x in (may, forced_blocks))
    shares = scores if budget.mass is not None else np.ones_like(scores)
    expected = choose(scores, shares, may, forced_blocks, budget)
    # Errors of a float32 sum on tensor cores, which may truncate, of exponentials within 2^-22, and of their sums.
    error = width * 2.0**-22 * sizes
    if sums_weights:
        error = (2 * error + 2.0**-20 * (1 + sizes) + (count + heads) * 2.0**-23) * max(1, scores.max(initial=0))
    last_taken = np.where(expected & ~forced_blocks, scores, np.inf).min(-1)
    is_close = last_taken - np.where(may & ~expected, scores, -np.inf).max(-1) <= 2 * error
    is_close &= not case["is_tied"]
    if budget.mass is not None:
        every = np.where(may, scores, 0)
        order_of_blocks = np.argsort(-every - np.where(forced_blocks & may, 1e9, 0), axis=-1, kind="stable")
        sums = np.cumsum(np.take_along_axis(every, order_of_blocks, axis=-1), axis=-1)
        is_close |= (abs(sums - budget.mass * sums[..., -1:]) <= 2 * num_blocks * error).any(-1)
    if budget.threshold is not None:
        is_close |= (abs(scores - budget.threshold) <= 2 * error).any(-1)
    # Choice of the kernel.
    is_limited = budget.top_k is None and budget.density is None
    size = budget.max_blocks if is_limited else max(by_query.count_within(budget, num_blocks) or 0, 4)
    rule = ChoiceRule(
        lengths=(seqlen_q, seqlen_kv), block=(1, block), offset=offset, is_causal=is_causal,
        count=max(budget.top_k or 0, budget.min_blocks), mass=float(budget.part or 0), threshold=budget.threshold,
        num_sinks=must.sink, num_local=must.local, has_diagonal=must.diagonal, most=budget.max_blocks or 0,
        list_length=size, is_past_only=case["is_past_only"] and is_causal,
    )  # fmt: skip
    step = block if case["parts"] == (1, 1) else stride
    choice = planning.QueryChoice(
        rule=rule, scale=scale, step=step, length=needed, parts=case["parts"], heads_of_list=heads,
        sums_weights=sums_weights, has_shares=budget.mass is not None,
    )  # fmt: skip
    lists = np.full((*scores.shape[:-1], size), 7, np.int32)
    given_lse = lse if case["has_lse"] and sums_weights else None
    run(executor, choice, q, k, given_lse, lists, order)
    rows = np.sort(np.where(expected, np.arange(num_blocks), num_blocks), axis=-1)[..., :size]
    wanted = np.full(lists.shape, -1)
    wanted[..., : rows.shape[-1]] = np.where(rows < num_blocks, rows, -1)
    np.testing.assert_array_equal(lists[~is_close], wanted[~is_close])
    assert ((lists >= -1) & (lists < num_blocks)).all()
    return float((~is_close).mean())


def run(executor: str, choice: QueryChoice, q: Any, k: Any, lse: Any, lists: Any, order: str) -> None:
    arrays = {"q": q, "k": k, AT_CALL: lists} | ({} if lse is None else {"lse": lse})
    kernels = choice.kernels(q, k, lse, (2,), DeviceSpec.gpu("A100").tile_memory_bytes)
    if executor == "sim":
        run_alone(kernels, arrays, Simulator(schedule=Schedule(order=order, copies="late")))
        return
    on_device = {name: to_device(each) for name, each in arrays.items()}
    selecting.launched(kernels, on_device, str(choice) + str(lse is None) + str((q.shape, k.shape, q.dtype)), "gpu")
    lists[...] = on_device[AT_CALL].get()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_kernel_chooses_by_its_scores(executor: str) -> None:
    @settings(max_examples=5 if executor == "sim" and not is_long() else 200, deadline=None)
    @given(cases())
    def check(case: dict[str, Any]) -> None:
        check_lists(executor, case)

    check()


TELLING = [
    case_of(2, 2, 40, (50, 300), (2, 4), True, True, False, False, {"top_k": 2}, {"sink": 1, "local": 2}, 0),
    case_of(20, 1, 40, (9, 200), (3, 2), "bottom_right", True, False, False, {"mass": 0.3, "max_blocks": 12}, {}, 1),
    case_of(1, 2, 64, (90, 300), (1, 1), True, False, True, False, {"top_k": 4}, {"diagonal": False}, 2),
    case_of(4, 1, 60, (33, 290), (1, 1), "bottom_right", True, False, False, BUDGETS[4], {"diagonal": False}, 3),
    case_of(3, 2, 8, (70, 260), (2, 4), False, True, False, True, {"density": 0.3}, {}, 4),
    case_of(8, 2, 40, (21, 290), (2, 4), True, True, False, False, {"threshold": 0.3, "max_blocks": 30}, {}, 6),
    case_of(
        1, 2, 8, (70, 420), (1, 1), "bottom_right", False, False, False, {"top_k": 7}, {"sink": 2}, 7, is_tied=True
    ),
    case_of(1, 1, 8, (40, 130), (1, 1), False, False, True, False, {"top_k": 5}, {"sink": 2, "local": 2}, 8),
    case_of(16, 1, 1, (9, 150), (1, 1), False, True, False, False, {"top_k": 19}, {"sink": 1}, 9, is_tied=True),
    case_of(16, 1, 64, (11, 400), (2, 4), "bottom_right", True, False, True, {"top_k": 4}, {"diagonal": False}, 5),
    # queries with fewer blocks before them than they must choose
    case_of(
        2, 1, 40, (90, 110), (1, 1), "bottom_right", True, True, False,
        {"mass": 0.3, "min_blocks": 20, "max_blocks": 30}, {"diagonal": False}, 11,
    ),
]


def check_nan_key(executor: str) -> None:
    """Check that a NaN key makes all scores of its queries NaN, as on the host, whichever thread has its scores."""
    q, k = np.random.default_rng(0).standard_normal((2, 4, 80, 16)).astype(np.float16)
    for key in range(4, 80, 8):  # in each of the nine runs of keys
        k_of_key = k[:2].copy()
        k_of_key[1, key, 3] = np.nan
        options: dict[str, Any] = {"block": (1, 16), "compression": (16, 8), "budget": Budget(top_k=2)}
        chosen = [
            cuflash.selectors.nsa(put(q), put(k_of_key), **options, executor=name).blocks
            for name, put in (("cpu", np.asarray), (executor, to_device if executor == "gpu" else np.asarray))
        ]
        actual = chosen[1].get() if executor == "gpu" else chosen[1]
        np.testing.assert_array_equal(np.sort(actual[1]), np.sort(chosen[0][1]))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_nan_key_makes_all_scores_of_its_queries_nan(executor: str) -> None:
    check_nan_key(executor)


@needs_compiler
@pytest.mark.parametrize("order", ["first_warp", "last_warp"])
def test_the_order_of_warps_changes_no_list(order: str) -> None:
    for case in TELLING:
        assert check_lists("sim", case, order) > 0.5


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("width", "dtype"), [(130, "bfloat16"), (72, "float16")])
def test_the_kernel_takes_wide_rows_of_both_dtypes(executor: str, width: int, dtype: str) -> None:
    check_lists(executor, TELLING[0] | {"width": width, "dtype": dtype})


def test_the_kernel_serves_16_bits_that_fit_shared_memory() -> None:
    rule = ChoiceRule(lengths=(9, 64 * 5000), block=(1, 64), offset=0, is_causal=True, count=1, mass=0, threshold=None,
                      num_sinks=0, num_local=0, has_diagonal=True, list_length=1)  # fmt: skip
    facts: dict[str, Any] = {"rule": rule, "scale": 1.0, "step": 64, "length": 1, "parts": (1, 1)}
    facts |= {"sums_weights": False, "has_shares": False}
    h100, t4 = DeviceSpec.gpu("H100"), DeviceSpec.gpu("T4")
    q = np.zeros((1, 9, 64), np.float16)
    choice = QueryChoice(**facts, heads_of_list=16)
    assert choice.is_served(q, 5000, h100) and not choice.is_served(q, 5000, t4)
    assert QueryChoice(**facts, heads_of_list=1).is_served(q, 5000, h100)
    # a row of scores is too long for shared memory
    assert not QueryChoice(**facts, heads_of_list=1).is_served(q, 60000, h100)
    assert not QueryChoice(**facts, heads_of_list=65).is_served(q, 500, h100)
    assert not choice.is_served(q.astype(np.float32), 500, h100)
    assert not choice.is_served(np.zeros((1, 9, 257), np.float16), 500, h100)
