"""Score functions and dropout in sm90's gradients: each form of function, both tile sizes, each kind of mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import GPU, SIM, Run, in_turn, is_long, needs_compiler
from test_score_kernels import Probe, check_shared_bias
from test_scores import TEN, everything

import cuflash
from cuflash import Dropout, masks, scores
from cuflash.scores import Score

pytestmark = needs_compiler
DROPOUT = Dropout(0.3, 0x9ABCDEF012345678, 7)
BLOCKS = masks.BlockPattern(np.array([[True, False], [True, True]]), 128)
UNALIGNED = masks.BlockPattern(np.array([[True, False], [True, True]]), (136, 152))
# Masks for each kind of work list that a kernel walks, for 150 queries and 200 keys.
MASKS = {
    "full": None,
    "causal": masks.Causal("bottom_right"),
    "window": masks.SlidingWindow(70, 9, "top_left"),
    "lengths": masks.Lengths(kv=np.array([200, 131])),
    "list": BLOCKS & masks.Dilated(3, align="top_left"),
    "unaligned": UNALIGNED,
}
HIDDEN = np.where(np.arange(150)[:, None] % 7 == 0, -np.inf, np.random.default_rng(3).standard_normal((150, 200)))
# Functions with slopes that are 1, constant or variable, and with arrays that are read at each kind of position.
FUNCTIONS = {
    name: score for name, score in TEN.items() if name not in ("bias", "boost", "polynomial")
} | {
    "bias": scores.bias(HIDDEN.astype(np.float16)),  # a bias that leaves some queries without a key
    "no slope": Score(lambda s, b, h, i, j: 0.125 * (i % 3) - 0.25 * (j % 2)),
}  # fmt: skip
# head_dim and value_dim of the kernels with tiles of 128 queries and with tiles of 64
WIDTHS = {"64": (24, 16), "128": (80, 72)}
CASES = in_turn(
    FUNCTIONS, MASKS, ["64", "64", "128", "128"], [None, DROPOUT, DROPOUT, None, DROPOUT], ["float16", "bfloat16"] * 2
)
SHORT = [("softcap", "causal", "128", DROPOUT, "bfloat16")]


def cases() -> Any:
    """Yield all cases for a GPU, and few for the simulator, where building a kernel takes seconds."""
    for run, chosen, marks in (
        (replace(SIM, kernel="sm90"), CASES if is_long() else SHORT, ()),
        (replace(GPU, kernel="sm90"), CASES, pytest.mark.gpu(9, 0)),
    ):
        for name, mask, width, dropout, dtype in chosen:
            about = f"{run}-{name}-{mask}-{width}-{'dropped' if dropout else 'kept'}"
            yield pytest.param(run, name, mask, width, dropout, dtype, id=about, marks=marks)


def check(run: Run, name: str, mask: str, width: str, dropout: Dropout | None, dtype: str) -> None:
    """Require that all results of sm90's own kernels are within their bounds."""
    head_dim, value_dim = WIDTHS[width]
    plain = run.rounded(Structure(
        q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=4, num_kv_heads=2, seqlen_q=150, seqlen_kv=200,
        head_dim=head_dim, value_dim=value_dim, dtype=dtype, mask=MASKS[mask], dropout=dropout,
    ).example())  # fmt: skip
    score = FUNCTIONS[name]
    example = plain.but(score=score, wrt=tuple(x.name for x in score.program.arrays if x.kind == "real"))
    options = {} if dropout is None else {"dropout": dropout}
    plan = cuflash.plan(
        *(cuflash.ShapeDtype(x.shape, x.dtype) for x in (example.q, example.k, example.v)), mask=MASKS[mask],
        score=score, wrt=example.wrt, executor="sim", kernel="sm90", **options,
    )._plan  # fmt: skip
    backward = plan.kernels.backward.launches["backward"].spec
    assert (backward.family, backward.block_q) == ("sm90", {"64": 128, "128": 64}[width])
    assert_within_bounds(example, **everything(run, example, **options))


@pytest.mark.parametrize(("run", "name", "mask", "width", "dropout", "dtype"), list(cases()))
def test_gradients_are_within_their_bounds(
    run: Run, name: str, mask: str, width: str, dropout: Dropout | None, dtype: str
) -> None:
    check(run, name, mask, width, dropout, dtype)


ON_GPU = pytest.param(replace(GPU, kernel="sm90"), marks=pytest.mark.gpu(9, 0))
on_hopper = pytest.mark.parametrize("run", [replace(SIM, kernel="sm90"), ON_GPU], ids=str)
# Building a kernel for the simulator takes seconds. In a short run, other tests and the guards of planted faults run
# similar kernels.
on_hopper_in_long = pytest.mark.parametrize("run", [*[replace(SIM, kernel="sm90")] * is_long(), ON_GPU], ids=str)
LONG = {"batch": (2,), "heads": (2, 1), "lengths": (150, 140)}


@on_hopper_in_long
@pytest.mark.parametrize("mask", ["full", "list"])
def test_every_slope_and_gradient_is_its_own_in_tiles_of_64_queries(run: Run, mask: str) -> None:
    probe = Probe("float16", BLOCKS if mask == "list" else None, dim=80, **LONG)
    probe.check(probe.run_results(run))


@on_hopper_in_long
def test_gradients_of_a_bias_are_summed_over_what_shares_it(run: Run) -> None:
    check_shared_bias(run)


def check_hidden_queries(run: Run) -> None:
    """Check a function that is -inf for every third query, and infinite or NaN for the zeros of padding.

    NaN in dO of such a query must not reach any result. One function has slopes that depend on scores, and an array
    with a gradient.
    """
    rng = np.random.default_rng(0)
    zeros, factors = np.zeros((37, 150), np.float32), np.ones(37, np.float32)
    factors[::3] = np.inf
    for dim, scale, arrays, wrt, function in (
        (32, 0.125, {"x": zeros}, ("x",), lambda s, b, h, i, j, x: np.where(s > 1.0, -np.inf, 1 / s) + x[i, j]),
        (80, -0.125, {"x": factors}, (), lambda s, b, h, i, j, x: s * x[i]),
    ):
        q, k = (rng.uniform(0.25, 0.5, (1, rows, dim)).astype(np.float16) for rows in (37, 150))
        v, do = (rng.standard_normal((1, rows, dim)).astype(np.float16) for rows in (150, 37))
        q[:, ::3] *= 16

        example = run.rounded(Example(q=q, k=k, v=v, do=do, scale=scale, score=Score(function, **arrays), wrt=wrt))
        with_nan = do.copy()
        with_nan[:, ::3] = np.nan
        assert_within_bounds(example, **everything(run, example.but(do=with_nan)))


@on_hopper
def test_queries_that_a_function_hides_reach_nothing(run: Run) -> None:
    check_hidden_queries(run)


@on_hopper
def test_weights_are_dropped_in_lists_whose_blocks_start_anywhere(run: Run) -> None:
    """With q = 0 and an identity matrix as dO, dV shows which weights are kept."""
    example = Structure(
        seqlen_q=150, seqlen_kv=200, value_dim=64, dtype="float16", mask=UNALIGNED, dropout=DROPOUT
    ).example()  # fmt: skip
    pulled = np.broadcast_to(np.eye(150, 64), example.do.shape).astype(np.float16)
    results = run.everything(example.but(q=np.zeros_like(example.q), do=pulled, scale=None))
    kept_weights = DROPOUT.keep((*example.q.shape[:-1], 200)) & example.allowed
    np.testing.assert_array_equal(results["dv"][..., :64] != 0, kept_weights[..., :64, :].swapaxes(-1, -2))
