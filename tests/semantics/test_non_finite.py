"""NaN and infinities follow the rule of docs/semantics.md on all executors, in all families, and in merged parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import cuflash
import numpy as np
import pytest
import splitting
from cuflash import masks, reference
from cuflash.executors.launch import run as run_pass
from cuflash.executors.sim import Simulator
from cuflash.testing import (
    Example, Structure, assert_non_finite, assert_within, assert_within_bounds, examples, non_finite, oracle,
)  # fmt: skip
from cuflash.testing.properties import check_non_finite_values_reach_what_they_should
from executors import (
    CPU, GPU, SIM, Run, holds_for_examples, in_turn, is_long, needs_compiler, on_every_backward, on_sim_and_gpu,
)  # fmt: skip
from hypothesis import given
from hypothesis import strategies as st
from poison import PoisonedGpu
from test_sm90 import GPU90, SIM90, with_fewest_tiles


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_kernels_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0):
        yield


# Faults of a head: operand, row, column, value. Some heads have a q or k that is positive in column 0, where -inf in
# the other operand makes every score -inf.
HIDDEN_KEY = ("k", 7, 0, "-inf")
FAULTS: dict[str, tuple[tuple[str, int, int, str], ...]] = {
    **{
        f"{value} in {name}": ((name, 9, 1, value),)
        for name, value in product(("q", "k", "v", "do", "dlse"), ("nan", "inf", "-inf"))
    },
    "q positive, a hidden key": (HIDDEN_KEY,),
    "k positive, a query without a score": (("q", 9, 0, "-inf"),),
    "k positive, a query without a score, inf in dlse": (("q", 9, 0, "-inf"), ("dlse", 9, 0, "inf")),
    "q positive, a hidden key, nan in do": (HIDDEN_KEY, ("do", 9, 1, "nan")),
    "q positive, a hidden key, inf in dlse": (HIDDEN_KEY, ("dlse", 9, 0, "inf")),
    "q positive, a hidden key, inf in its v": (HIDDEN_KEY, ("v", 7, 1, "inf")),
    "q positive, a hidden key, nan in q": (HIDDEN_KEY, ("q", 9, 1, "nan")),
}  # fmt: skip


def a_fault_a_head(group_size: int = 1, **fields: Any) -> Example:
    """Return an example with all faults of the list, each in a separate key/value head.

    group_size query heads share a key/value head, and the last of them has the faults of q, do and dlse.
    """
    heads = {"num_heads": group_size * len(FAULTS), "num_kv_heads": len(FAULTS)}
    example = Structure(**heads, **{"seqlen_q": 70, "seqlen_kv": 130, "head_dim": 8, "value_dim": 8} | fields).example()
    operands = {name: getattr(example, name).copy() for name in ("q", "k", "v", "do", "dlse")}
    for number, (words, places) in enumerate(FAULTS.items()):
        own = slice(number * group_size, (number + 1) * group_size)
        if words.startswith("q positive"):
            operands["q"][own, :, 0] = np.abs(operands["q"][own, :, 0]) + 1
        if words.startswith("k positive"):
            operands["k"][number, :, 0] = np.abs(operands["k"][number, :, 0]) + 1
        for name, row, column, value in places:
            head = number if name in ("k", "v") else own.stop - 1
            at = (head, row) if name == "dlse" else (head, row, column)
            operands[name][at] = float(value)
    return example.but(**operands)


# Full and masked steps, intervals and bits; with a scale of 30, many weights are 0 although no mask hides them.
_SHORT = {"seqlen_q": 20, "seqlen_kv": 40}
WORK = {
    "all keys": {},
    "causal, weights of 0": {"mask": masks.Causal("bottom_right"), "scale": 30.0, **_SHORT},
    "bits, weights of 0": {"mask": masks.Dilated(3, align="bottom_right"), "scale": 30.0, **_SHORT},
}
SIMT, NAIVE, FA1 = (replace(SIM, kernel=kernel) for kernel in ("simt", "naive", "fa1"))
KINDS = {
    "float32": (SIM, {"dtype": "float32"}),
    "float64": (SIM, {"dtype": "float64"}),
    "float16 in float32": (SIMT, {"dtype": "float16"}),
    "naive": (NAIVE, {"dtype": "float32"}),
    "naive, float16": (NAIVE, {"dtype": "float16"}),
    "FlashAttention-1": (FA1, {"dtype": "float16"}),
    "float16": (SIM, {"dtype": "float16"}),
    "bfloat16": (SIM, {"dtype": "bfloat16"}),
    "tf32": (SIM, {"precision": "tf32"}),
    "tf32x3": (SIM, {"precision": "tf32x3"}),
    "Hopper": (SIM90, {"dtype": "float16"}),
    "Hopper, wide": (SIM90, {"dtype": "bfloat16", "head_dim": 136, "value_dim": 130, **_SHORT}),
}


WITH_KERNEL_FOR_DQ = ("float32", "float16", "Hopper", "Hopper, wide")
OF_LONG_RUNS = ("naive, float16", "bfloat16")


def cases() -> Iterator[Any]:
    """Yield every executor and family, with and without a separate kernel for dQ, and all kinds of work lists.

    On the simulator, unless the profile is long, cases take turns with the kinds of lists, only some have a separate
    kernel for dQ, and two kinds are left out.
    """
    for dtype, work in product(("float16", "float32", "float64"), WORK):
        yield pytest.param(CPU, {"dtype": dtype}, work, id=f"cpu-{dtype}-{work}")
    in_turn = itertools.cycle(WORK)
    for name, (run, fields) in KINDS.items():
        on_gpu = GPU90 if run is SIM90 else replace(GPU, kernel=run.kernel)
        mark = pytest.mark.gpu(9, 0) if run is SIM90 else pytest.mark.gpu
        for each in (run, *([] if run in (NAIVE, FA1) else [replace(run, deterministic=True)])):
            is_short = name not in OF_LONG_RUNS if each is run else name in WITH_KERNEL_FOR_DQ
            for work in WORK if is_long() else [next(in_turn)] * is_short:
                yield pytest.param(each, fields, work, id=f"{each}-{name}-{work}", marks=needs_compiler)
            on_device = replace(on_gpu, deterministic=each.deterministic)
            for work in WORK:
                yield pytest.param(on_device, fields, work, id=f"{on_device}-{name}-{work}", marks=mark)


def faulty(run: Run, fields: dict[str, Any], work: str) -> Example:
    fields = {"precision": "ieee"} | fields | WORK[work]
    precision = fields.pop("precision")
    return run.rounded(a_fault_a_head(**fields)).but(precision=precision)


@pytest.mark.parametrize(("run", "fields", "work"), [*cases()])
def test_every_fault_reaches_what_it_should(run: Run, fields: dict[str, Any], work: str) -> None:
    example = faulty(run, fields, work)
    assert_non_finite(example, **run.everything(example))


@holds_for_examples(on_every_backward, has_non_finite=True, most_scores=1 << 13)
def test_what_is_drawn_reaches_what_it_should(run: Run, example: Example) -> None:
    assert_non_finite(example, **run.everything(example))


@holds_for_examples(on_every_backward, has_non_finite=True, has_sink=True, most_scores=1 << 13)
def test_what_is_drawn_reaches_what_it_should_beside_a_sink(run: Run, example: Example) -> None:
    assert_non_finite(example, **run.everything(example))


KERNELS_OF_SINKS = [  # kernels that keep delta in a vector, that compute it, and that keep it next to lse
    (CPU, "float32"), (replace(SIM, kernel="simt"), "float64"), (SIM, "float16"), (NAIVE, "float32"),
    (SIM90, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "dtype"),
    [pytest.param(*each, marks=[] if each[0] is CPU else needs_compiler) for each in KERNELS_OF_SINKS],
    ids=str,
)
@pytest.mark.parametrize(
    ("mask", "has_dlse"),
    in_turn([masks.Lengths(q=20), masks.Sequences([0, 7, 20], allow_gaps=True)], [True, False]),
    ids=str,
)
def test_a_sink_takes_nothing_from_rows_without_keys_but_dlse(run: Run, dtype: str, mask: Any, has_dlse: bool) -> None:
    """dO may be NaN or infinite after the last token, like o; in a row with keys it affects the sink's gradient."""
    structure = Structure(
        num_heads=4, num_kv_heads=2, seqlen_q=30, seqlen_kv=30, dtype=dtype, mask=mask, sink=(4,), has_dlse=has_dlse
    )
    example = run.rounded(structure.example())
    for value in (np.nan, np.inf):
        do = example.do.copy()
        do[:, 20:] = value
        assert_within_bounds(example, dsink=run.everything(example.but(do=do))["dsink"])
    do[1, 3, 2] = np.nan
    most = 18 if dtype == "float16" else 25  # so large a sink that no score changes lse, but o is not 0
    for sink in (example.sink, np.full(4, most, np.float32)):
        dsink = run.everything(example.but(do=do, sink=sink))["dsink"]
        assert np.isnan(dsink).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("run", "dtype"),
    [pytest.param(*each, marks=[] if each[0] is CPU else needs_compiler) for each in KERNELS_OF_SINKS],
    ids=str,
)
def test_a_row_that_weighs_nothing_beside_a_sink_may_count_as_one_without_a_key(run: Run, dtype: str) -> None:
    """If o rounds to 0 and lse to the sink, NaN in dO of that row need not reach the sink's gradient."""
    structure = Structure(num_heads=4, num_kv_heads=2, seqlen_q=30, seqlen_kv=30, dtype=dtype, sink=(4,))
    drawn = run.rounded(structure.example())
    do = drawn.do.copy()
    do[1, 3, 2] = np.nan
    for logit, must in ((0, True), (1000, False)):
        example = drawn.but(do=do, sink=np.full(4, logit, np.float32))
        due = non_finite.expected(example)["dsink"]
        assert (due.is_nan.tolist(), due.may_be_not_finite.tolist()) == (
            [False, must, False, False], [False, True, False, False],
        )  # fmt: skip
        dsink = run.everything(example)["dsink"]
        non_finite.assert_not_finite_where_due(example, dsink=dsink)
        assert np.isnan(dsink).tolist() == due.is_nan.tolist()


FEW = [replace(each, most_examples=2) for each in (NAIVE, FA1, SIM90, replace(SIM90, deterministic=True))]


@holds_for_examples(
    pytest.mark.parametrize("run", [pytest.param(run, marks=needs_compiler) for run in FEW], ids=str),
    has_non_finite=True, most_scores=1 << 12, dtypes=["float16"],
)  # fmt: skip
def test_what_is_drawn_reaches_what_it_should_in_every_family(run: Run, example: Example) -> None:
    assert_non_finite(example, **run.everything(example))


@holds_for_examples(pytest.mark.parametrize("run", [CPU], ids=str), has_non_finite=True, most_scores=1 << 13)
def test_the_property_holds_of_calls_with_a_bool_array(run: Run, example: Example) -> None:
    check_non_finite_values_reach_what_they_should(run.attend, run.pull, example)


# Tiles with keys that several blocks share, and merged parts


def assert_parts_follow_the_rule(
    run: Run = SIM, group_size: int = 1, seqlen_q: int = 70, scale: float | None = None
) -> None:
    """Assert that parts from thread blocks that share a tile's keys are merged to the result of the whole."""
    fields = {"seqlen_q": seqlen_q, "seqlen_kv": 300, "dtype": "float16", "scale": scale}
    example = splitting.rounded(a_fault_a_head(group_size, **fields))
    plan = splitting.split_plan(example, 3, run)
    assert plan.kernels.num_splits == 3 and plan.specs["forward"].pack_gqa == (group_size > 1)
    q, k, v = (run.put(x) for x in (example.q, example.k, example.v))
    o = run.put(np.zeros(example.exact.o.shape, np.float16))
    lse = run.put(np.zeros(example.exact.lse.shape, np.float32))
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    run_pass(plan, plan.kernels.forward, PoisonedGpu() if run.is_on_device else Simulator(), arrays)
    assert_non_finite(example, o=run.get(o), lse=run.get(lse))


@on_sim_and_gpu
@pytest.mark.parametrize("scale", [None, 30.0])
@pytest.mark.parametrize(("group_size", "seqlen_q"), [(1, 70), (2, 10)])
def test_parts_of_keys_give_what_all_give(run: Run, group_size: int, seqlen_q: int, scale: float | None) -> None:
    assert_parts_follow_the_rule(run, group_size, seqlen_q, scale)


@given(
    examples(has_non_finite=True, dtypes=["float32"], most_scores=1 << 12),
    st.lists(st.integers(0, 300), max_size=3).map(sorted),
)
def test_merge_says_what_the_whole_says(example: Example, cuts: list[int]) -> None:
    """Parts are computed in float64, so that the float32 bounds leave room for the merge."""
    keys = example.problem.seqlen_kv
    ends = [0, *(min(cut, keys) for cut in cuts), keys]
    parts = [
        reference.attention(
            example.q, example.k[..., start:stop, :], example.v[..., start:stop, :],
            example.allowed[..., start:stop], example.problem.softmax_scale,
        )
        for start, stop in zip(ends, ends[1:])
    ]  # fmt: skip
    with np.errstate(all="raise"):
        o, lse = cuflash.merge(*zip(*parts))
    assert_non_finite(example, o=o, lse=lse)


_NAN, _INF = float("nan"), float("inf")
MERGED = [  # o and lse of parts, and of the whole
    ([_NAN], [_NAN], _NAN, _NAN),
    ([_NAN, 1], [_NAN, 0.5], _NAN, _NAN),
    ([2, 1], [_NAN, 0.5], _NAN, _NAN),
    ([2, 1], [_NAN, -_INF], _NAN, _NAN),
    ([2, 1], [_INF, 0.5], _NAN, _NAN),
    ([2], [_INF], _NAN, _NAN),
    ([_NAN, 1], [-_INF, 0.5], 1, 0.5),
    ([_NAN, _INF], [-_INF, -_INF], 0, -_INF),
    ([_NAN, 1], [-2000, 0.5], _NAN, 0.5),  # NaN with weight 0
    ([_INF, 1], [0.5, 0.5], _INF, 0.5 + np.log(2)),
    ([_INF, -_INF], [0.5, 0.5], _NAN, 0.5 + np.log(2)),
    ([1, 3], [0.0, -95.0], 1, 0.0),  # a weight below the smallest normal number
]


def assert_merges(merge: Any, outs: list[float], lses: list[float], o: float, lse: float, dtype: str) -> None:
    """Assert that parts are merged to the whole, without warnings, whatever errors the caller makes NumPy raise."""
    kind, wide = np.dtype(dtype), np.float64 if dtype == "float64" else np.float32
    parts = [np.full((1, 2), x).astype(kind) for x in outs], [np.full(1, x, wide) for x in lses]
    try:
        with np.errstate(all="raise"):
            merged_o, merged_lse = merge(*parts)
    except FloatingPointError as error:
        raise AssertionError(error) from error
    np.testing.assert_array_equal(merged_o.astype(np.float64), np.full((1, 2), o))
    # The logarithm of 2 may be off by two roundoffs, and its sum with 0.5 by one more; all other results are exact.
    bound = 2 * np.finfo(wide).eps * lse if lse == 0.5 + np.log(2) else 0
    assert_within("lse", merged_lse, np.full(1, lse), bound)


@pytest.mark.parametrize(("outs", "lses", "o", "lse"), MERGED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_merge_of(outs: list[float], lses: list[float], o: float, lse: float, dtype: str) -> None:
    assert_merges(cuflash.merge, outs, lses, o, lse, dtype)


def test_merge_rounds_what_is_small_without_a_word() -> None:
    outs, lses = np.full((2, 1, 2), 1e-7, np.float16), np.array([[0.0], [-20.0]], np.float32)
    with np.errstate(all="raise"):
        o, _ = cuflash.merge(outs, lses)
    assert (o == outs[0]).all()


class OfHeads:
    """The results of the oracle's `Heads`, by functions with the signatures of `cuflash.reference`."""

    def __init__(self, heads: type[oracle.Heads]) -> None:
        self.heads = heads

    def attention(self, *operands: Any) -> Any:
        return self.heads(*operands).attention()

    def attention_vjp(self, q: Any, k: Any, v: Any, do: Any, dlse: Any, *options: Any) -> Any:
        return self.heads(q, k, v, *options).vjp(do, dlse, ())


def assert_follows_the_rule(room: Any, example: Example) -> None:
    """Assert that the functions of `reference`, or those of the oracle, follow the rule."""
    options = example.dense_mask, example.scale
    o, lse = room.attention(example.q, example.k, example.v, *options)
    dq, dk, dv = room.attention_vjp(example.q, example.k, example.v, example.do, example.dlse, *options)
    assert_non_finite(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


ROOMS = pytest.mark.parametrize("room", [reference, OfHeads(oracle.Heads)], ids=["reference", "oracle"])


@ROOMS
@pytest.mark.parametrize("work", WORK)
def test_the_specification_and_the_oracle_follow_the_rule(room: Any, work: str) -> None:
    assert_follows_the_rule(room, a_fault_a_head(**WORK[work]))


@ROOMS
def test_the_specification_and_the_oracle_follow_the_rule_for_what_is_drawn(room: Any) -> None:
    @given(examples(has_non_finite=True, dtypes=["float32"], most_scores=1 << 12))
    def check(example: Example) -> None:
        assert_follows_the_rule(room, example)

    check()


# The assertion itself: it makes no claim about many elements only where a mask hides keys


def test_without_a_mask_every_element_is_claimed_but_of_hidden_keys_and_rows_without_a_score() -> None:
    """dk and dv of a key with an infinity may be anything, as may o in columns where v of a hidden key has one."""
    example = a_fault_a_head()
    free = {
        name: (each.may_be_not_finite & ~each.is_not_finite).any(axis=tuple(range(1, each.is_nan.ndim)))
        for name, each in non_finite.expected(example).items()
    }
    heads = dict(zip(FAULTS, zip(*free.values())))
    assert not free["lse"].any()
    for words, weights in heads.items():
        if "positive" not in words:
            assert not any(weights), words
    in_v = heads["q positive, a hidden key, inf in its v"]
    assert [name for name, is_free in zip(free, in_v) if is_free] == ["o", "dk", "dv"]


def test_a_wrong_element_is_noticed() -> None:
    """A number is detected where NaN is due, and so is NaN or another number where a number is due."""
    example = a_fault_a_head()
    results = CPU.everything(example)
    assert_non_finite(example, **results)
    for name, must in non_finite.expected(example).items():
        for places, wrong in ((must.is_nan, 1), (~must.may_be_not_finite, np.nan), (~must.may_be_not_finite, 1e6)):
            changed = results[name].copy()
            changed[tuple(np.argwhere(places)[3])] = wrong
            with pytest.raises(AssertionError, match=rf"{name}\["):
                assert_non_finite(example, **{name: changed})


def assert_keys_reach_their_queries_only(library: Any) -> None:
    """Assert that NaN and infinite keys on the host change dq of the queries that attend them, and of no other."""
    rng, rows = np.random.default_rng(0), np.arange(40)
    q, k, v, do = rng.standard_normal((4, 2, 40, 8)).astype(np.float32)
    for mask in (library.masks.Lengths(kv=30), library.masks.SlidingWindow(5, 0), library.masks.Causal()):
        _, vjp = library.attention_vjp(q, k, v, mask=mask)
        expected, seen = vjp(do).dq, mask.toarray(seqlen_q=40, seqlen_kv=40)
        for key, value in ((33, np.nan), (12, np.inf), (25, -np.inf)):
            changed = k.copy()
            changed[0, key, 3] = value
            _, vjp = library.attention_vjp(q, changed, v, mask=mask)
            dq = vjp(do).dq
            attends = seen.reshape(-1, 40, 40)[0, :, key]
            np.testing.assert_array_equal(dq[1], expected[1])
            np.testing.assert_allclose(dq[0, ~attends], expected[0, ~attends], rtol=1e-4, atol=1e-6)
            assert not np.isfinite(dq[0, rows[attends], 3]).any()


def test_keys_that_are_not_finite_reach_their_queries_only() -> None:
    assert_keys_reach_their_queries_only(cuflash)
