"""Bitwise reproducible sm90 gradients with score functions and dropout: tiles of keys add to dQ in a fixed order.

Results have the same bits under every schedule, in the simulator and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from cuflash.executors import sim as executor
from cuflash.planning.plan import KernelPlan
from cuflash.sim import Schedule
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import GPU, SIM, Run, holds_for_examples, hostile_schedules, in_turn, is_long, needs_compiler
from test_scores import everything
from test_sm90 import FewBlocks

import cuflash
from cuflash import DeviceSpec, Dropout, masks, scores
from cuflash.scores import Score

REPEATS = {"kernel": "sm90", "deterministic": True}
HOPPER, ON_GPU = replace(SIM, **REPEATS, most_examples=2), replace(GPU, **REPEATS)
DROPOUT = Dropout(0.3, 0x9ABCDEF012345678, 7)
ROWS, KEYS = 330, 400
RNG = np.random.default_rng(5)
TABLE = RNG.standard_normal((4, 17)).astype(np.float32)
SHARED = RNG.standard_normal((ROWS, KEYS)).astype(np.float16)
SLOPES = RNG.standard_normal(4).astype(np.float32)


def of_table(num_heads: int) -> Score:
    return Score(lambda s, b, h, i, j, x: s + x[h, np.clip(j - i, -8, 8) + 8], x=TABLE[:num_heads])


# Functions whose arrays need each kind of sum: fixed-point words for elements that many scores read, and stored parts.
FUNCTIONS: dict[str, tuple[Score | None, Dropout | None]] = {
    "dropout": (None, DROPOUT),
    "cap and dropout": (scores.softcap(2.0), DROPOUT),
    "slopes": (scores.alibi(SLOPES), None),
    "table": (of_table(4), None),
    "shared bias": (scores.bias(SHARED), None),
    "shared bias and dropout": (scores.bias(SHARED), DROPOUT),
}
MASKS = {
    "full": None,
    "causal": masks.Causal("bottom_right"),
    "window": masks.SlidingWindow(128, 64, "top_left"),
    "sequences": masks.Sequences(
        np.array([5, 69, 69, 200, 320]), np.array([0, 64, 64, 320, 400]), allow_gaps=True
    ),
    "lengths": masks.Lengths(kv=np.array([400, 131])),
}
# head_dim and value_dim of the kernels with tiles of 128 queries and with tiles of 64
WIDTHS = {"64": (24, 16), "128": (80, 72)}
IN_ORDER = ("backward_statistics", "backward", "convert_dq")
TOGETHER = [Schedule(seed=seed, order="random", copies="late", resident_blocks=3) for seed in (4, 5)]


def example_of(name: str, mask: str, width: str, **sizes: Any) -> Example:
    head_dim, value_dim = WIDTHS[width]
    dimensions = {"num_heads": 4, "num_kv_heads": 2, "q_batch": (2,), "k_batch": (2,), "v_batch": (2,)} | sizes
    score, dropout = FUNCTIONS[name]
    if name == "table":
        score = of_table(dimensions["num_heads"])
    structure = Structure(
        **dimensions, seqlen_q=ROWS, seqlen_kv=KEYS, head_dim=head_dim, value_dim=value_dim, dtype="float16",
        mask=MASKS[mask], dropout=dropout,
    )  # fmt: skip
    wrt = () if score is None else tuple(x.name for x in score.program.arrays if x.kind == "real")
    return HOPPER.rounded(structure.example()).but(score=score, wrt=wrt)


def plan_of(example: Example, library: Any = cuflash, **options: Any) -> KernelPlan:
    shapes = (library.ShapeDtype(x.shape, x.dtype) for x in (example.q, example.k, example.v))
    arguments = {"kernel": "sm90", "deterministic": True, "executor": "sim"} | options
    return library.plan(
        *shapes, mask=example.mask, score=example.score, wrt=example.wrt, dropout=example.dropout, **arguments
    )._plan


def results_of(run: Run, example: Example) -> dict[str, Any]:
    """Return all results by name, including the gradients of captured arrays."""
    options = {} if example.dropout is None else {"dropout": example.dropout}
    results = everything(run, example, **options)
    return results | results.pop("others")


def assert_right(example: Example, actual: dict[str, Any]) -> None:
    others = {name: actual[name] for name in example.wrt}
    assert_within_bounds(example, **{name: x for name, x in actual.items() if name not in others}, others=others)


def under(machine: Any, example: Example) -> dict[str, Any]:
    """Return all results that a simulator computes."""
    with patch.object(executor, "_SIMULATOR", machine):
        return results_of(HOPPER, example)


def check(name: str, mask: str, width: str, schedules: Iterable[Schedule], **sizes: Any) -> None:
    """Require results within bounds, with equal bits under every schedule and for every number of thread blocks."""
    example = example_of(name, mask, width, **sizes)
    specs = plan_of(example).specs
    assert all(specs[entry].adds_dq_in_order for entry in IN_ORDER)
    first = under(FewBlocks(Schedule(), most=1), example)
    assert_right(example, first)
    assert (schedules := list(schedules)), "results are compared"
    for schedule in schedules:
        again = under(FewBlocks(schedule, most=2 + schedule.seed % 3), example)
        assert {key for key in first if first[key].tobytes() != again[key].tobytes()} == set(), schedule


# A short run has each kind of sum, and dropout, alone.
CASES = [case for case in in_turn(FUNCTIONS, MASKS, WIDTHS) if is_long() or " and " not in case[0]]


@needs_compiler
@pytest.mark.parametrize(("name", "mask", "width"), CASES)
def test_every_result_has_the_same_bits_under_every_schedule(name: str, mask: str, width: str) -> None:
    is_whole = is_long() or mask == "lengths"  # "lengths" has a length for each batch entry
    sizes = {} if is_whole else dict.fromkeys(("q_batch", "k_batch", "v_batch"), ())
    check(name, mask, width, [*hostile_schedules(name, 1), *TOGETHER[:: 1 if is_long() else 2]], **sizes)


def check_one_head() -> None:
    """Check that a block's next tile may have the same head, and read the elements that the last tile ended with."""
    check("table", "full", "128", TOGETHER, num_heads=1, num_kv_heads=1, q_batch=(), k_batch=(), v_batch=())


@needs_compiler
def test_sums_of_an_array_end_with_a_tile() -> None:
    check_one_head()


@needs_compiler
def test_the_default_form_differs_in_the_sums_alone() -> None:
    example = example_of("dropout", "causal", "128", q_batch=(), k_batch=(), v_batch=())
    ours, default = results_of(HOPPER, example), results_of(replace(HOPPER, deterministic=False), example)
    assert not plan_of(example, deterministic=False).kernels.is_repeatable
    assert all(ours[each].tobytes() == default[each].tobytes() for each in ("o", "lse", "dk", "dv"))


on_hopper = pytest.mark.parametrize(
    "run", [pytest.param(HOPPER, marks=needs_compiler), pytest.param(ON_GPU, marks=pytest.mark.gpu(9, 0))], ids=str
)


def check_tiles_that_see_no_key(run: Run = HOPPER) -> None:
    """Check that CUFLASH_CHECK passes if a tile of queries attends no key, and so has no last tile of keys."""
    example = example_of("dropout", "causal", "128")
    # only the last 40 of 330 queries attend a key
    example = example.but(k=example.k[..., :40, :], v=example.v[..., :40, :])
    with patch.dict("os.environ", CUFLASH_CHECK="1"):
        assert_right(example, results_of(run, example))


@on_hopper
def test_checks_pass_where_tiles_of_queries_see_no_key(run: Run) -> None:
    check_tiles_that_see_no_key(run)


@holds_for_examples(
    on_hopper, longest=500, tile=128, most_rows=1200, most_scores=1 << 17, widest=128, max_leaves=2, has_dropout=True
)  # fmt: skip
def test_drawn_masks_are_within_their_bounds(run: Run, example: Example) -> None:
    assert_within_bounds(example, **run.everything(example))


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize(("name", "mask"), in_turn(FUNCTIONS, MASKS))
@pytest.mark.parametrize("width", WIDTHS)
def test_results_repeat_on_a_gpu(name: str, mask: str, width: str) -> None:
    """The GPU cannot run all tiles of keys at once."""
    example = example_of(name, mask, width)
    first = results_of(ON_GPU, example)
    assert_right(example, first)
    for _ in range(20):
        again = results_of(ON_GPU, example)
        assert all(again[key].tobytes() == first[key].tobytes() for key in first)


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("name", ["table", "shared bias and dropout"])
def test_a_thousand_large_calls_repeat_on_a_gpu(name: str) -> None:
    import cupy

    score, dropout = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    q, k, v, do = (cupy.asarray(rng.standard_normal((2, 32, 2048, 128)).astype(np.float16)) for _ in range(4))
    if name == "table":
        own_score = Score(score.function, x=cupy.asarray(rng.standard_normal((32, 17)).astype(np.float32)))
    else:
        own_score = scores.bias(cupy.asarray(rng.standard_normal((2048, 2048)).astype(np.float16)))
    wrt = tuple(x.name for x in own_score.program.arrays)
    _, vjp = cuflash.attention_vjp(q, k, v, score=own_score, dropout=dropout, wrt=wrt, causal=True, deterministic=True)

    def results() -> list[Any]:
        gradients = vjp(do)
        return [*gradients, *(gradients[each] for each in wrt)]

    first = results()
    for _ in range(1000):
        assert all(bool((ours == theirs).all()) for ours, theirs in zip(results(), first, strict=True))


def test_lists_and_wide_heads_have_two_walks_of_another_family() -> None:
    q = cuflash.ShapeDtype((2, 1024, 128), np.dtype(np.float16))
    blocks = masks.BlockPattern(np.tri(8, dtype=bool), 128)

    def backward(x: Any, **options: Any) -> Any:
        arguments = {"kernel": "sm90", "deterministic": True, "device": DeviceSpec.gpu("H100"), "softcap": 2.0}
        plan = cuflash.plan(x, x, x, **arguments | options)._plan
        assert plan.kernels.is_repeatable
        return plan.specs["backward"]

    assert backward(q).adds_dq_in_order and backward(q).family == "sm90"
    for spec in (backward(q, mask=blocks), backward(cuflash.ShapeDtype((2, 1024, 192), q.dtype))):
        assert (spec.family, spec.adds_dq_in_order, spec.dq_atomic_width) == ("sm80", False, 0)
    plain = backward(q, softcap=None)
    assert (plain.family, plain.adds_dq_in_order, plain.dq_atomic_width) == ("sm90", False, 0)


# If batch entries or heads share a gradient, each of them stores its own part of it.


def check_parts(library: Any) -> None:
    """Check that parts have the dtype of the products, and that they are zeroed first if the kernel cannot do so.

    Under a band, the kernel clears what the band hides.
    """

    def planned(bias: Any, **options: Any) -> KernelPlan:
        q = library.ShapeDtype((2, 4, 256, 128), np.dtype(np.float16))
        arguments = {"kernel": "sm90", "deterministic": True, "device": library.DeviceSpec.gpu("H100")} | options
        return library.plan(q, q, q, bias=bias, wrt="bias", **arguments)._plan

    def shape(*axes: int, dtype: Any = np.float16) -> Any:
        return library.ShapeDtype(axes, np.dtype(dtype))

    lengths = library.masks.Lengths(kv=np.array([200, 256]))
    for bias, parts in ((shape(256, 256), (2, 4)), (shape(4, 256, 256), (2,)), (shape(2, 1, 256, 256), (4,))):
        for options in ({}, {"causal": True}, {"mask": lengths}):
            plan = planned(bias, **options)
            sums = plan.kernels.backward.workspaces["sums.bias"]
            assert plan.specs["backward"].score_is_stored
            assert (sums.shape, sums.dtype) == ((*parts, *bias.shape), np.float16)
            assert ("zero.sums.bias" in plan.kernels.backward.launches) == ("mask" in options)
            assert plan.kernel_gradients["dscore.bias"].dtype == np.float16
            assert not planned(bias, deterministic=False, **options).specs["backward"].score_is_stored
    for bias in (shape(256, 256, dtype=np.float32), shape(1, 256)):  # another dtype; a gradient that all queries share
        assert not planned(bias).specs["backward"].score_is_stored
    own = planned(shape(2, 4, 256, 256))
    assert own.specs["backward"].score_is_stored and "dscore.bias" not in own.kernels.backward.zeroed
    assert "dscore.bias" not in planned(shape(2, 4, 256, 256), causal=True).kernels.backward.zeroed
    assert "dscore.bias" in planned(shape(2, 4, 256, 256), mask=lengths).kernels.backward.zeroed


def test_parts_of_a_shared_gradient_are_stored() -> None:
    check_parts(cuflash)


def check_stored_parts(library: Any) -> None:
    """Check that a bias's gradient is the sum over everything that shares the bias, and 0 where a mask hides scores."""
    shapes = [(2, 4, 200, 136), (4, 200, 136), (2, 1, 200, 136), (200, 136)]
    for shape, causal in in_turn(shapes, (False, "top_left")):
        rng = np.random.default_rng(len(shape))
        q, k, v, do = (rng.standard_normal((2, 4, rows, 80)).astype(np.float16) for rows in (200, 136, 136, 200))
        bias = rng.standard_normal(shape).astype(np.float16)
        example = Example(q=q, k=k, v=v, do=do, score=scores.bias(bias), wrt=("bias",))
        mask = masks.Causal("top_left") if causal else None
        _, vjp = library.attention_vjp(q, k, v, bias=bias, wrt="bias", causal=causal, **HOPPER.options)
        dbias = vjp(do)["bias"]
        assert_within_bounds(HOPPER.rounded(example.but(mask=mask)), others={"bias": dbias})
        assert not causal or not dbias[..., np.triu(np.ones((200, 136), bool), 1)].any()


@needs_compiler
def test_stored_parts_are_added_up() -> None:
    check_stored_parts(cuflash)


def check_bound_of_parts(library: Any) -> None:
    """Check that the bound on a sum over heads that cancels is at least the sum of the bounds of its rounded terms."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((2, 8, 4)).astype(np.float16) for _ in range(4))
    for x in (q, k, v):
        x[1] = x[0]
    do[1] = -do[0]

    def bound(*shape: int) -> Any:
        arguments = {"do": do, "bias": np.zeros(shape, np.float16), "wrt": "bias", "product_dtype": np.float16}
        return library.error_bound(q, k, v, **arguments).others["bias"]

    of_sum, of_terms = bound(8, 8), bound(2, 8, 8).sum(0)
    assert (of_sum >= of_terms).all()
    assert (of_sum < 1.1 * of_terms).all()


def test_the_bound_counts_the_rounding_of_parts() -> None:
    check_bound_of_parts(cuflash)
