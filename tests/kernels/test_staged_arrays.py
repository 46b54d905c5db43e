"""A bias in Hopper's kernels: when its elements come through shared memory, and its gradient from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuflash.planning.spec import KernelSpec
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import GPU, SIM, Run, is_long, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scores import everything

import cuflash
from cuflash import Score, ShapeDtype, masks, scores

HOPPER = cuflash.DeviceSpec.gpu("H100")
HALF, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def specs(score: Score, wrt: tuple[str, ...] = (), **changes: Any) -> dict[str, KernelSpec]:
    """The kernels of a problem of float16."""
    sizes = {"heads": 4, "seqlen_q": 300, "seqlen_kv": 512, "dim": 128} | changes
    q, k = (ShapeDtype((2, sizes["heads"], sizes[name], sizes["dim"]), HALF) for name in ("seqlen_q", "seqlen_kv"))
    options = {"mask": sizes.get("mask"), "executor": "gpu", "device": HOPPER, "kernel": "sm90"}
    return dict(cuflash.plan(q, k, k, score=score, wrt=wrt, **options).plan.specs)


def bias(*shape: int, dtype: Any = HALF) -> Score:
    return scores.bias(ShapeDtype(shape, np.dtype(dtype)))


def staged(score: Score, **changes: Any) -> tuple[bool, bool]:
    """Whether the forward kernel and the backward kernel stage an array."""
    made = specs(score, **changes)
    return made["forward"].score_is_staged, made["backward"].score_is_staged


def test_kernels_stage_an_array_that_is_as_large_as_the_scores() -> None:
    assert staged(bias(2, 4, 300, 512)) == (True, True)
    assert staged(bias(300, 512, dtype=BFLOAT16)) == (True, True)  # which all heads share
    assert staged(scores.softcap(3.0) @ bias(4, 300, 512)) == (True, True)
    assert staged(bias(4, 300, 512), dim=64) == (True, False)


def test_kernels_read_other_arrays_where_they_are() -> None:
    table = ShapeDtype((4, 300, 512), HALF)
    turned = Score(lambda s, b, h, i, j, x: s + x[h, j, i], x=ShapeDtype((4, 512, 300), HALF))
    two = Score(lambda s, b, h, i, j, x, y: s + x[h, i, j] * y[h, i, j], x=table, y=table)
    shifted = Score(lambda s, b, h, i, j, x: s + x[h, i, np.maximum(j - 1, 0)], x=table)
    for score in (bias(4, 300, 512, dtype=np.float32), bias(4, 1, 512), bias(4, 300, 1), turned, two, shifted):
        assert staged(score) == (False, False)
    assert staged(bias(4, 300, 509), seqlen_kv=509) == (False, False)  # rows are no whole packets
    assert staged(bias(4, 300, 512), dim=192) == (False, False)
    assert staged(bias(4, 300, 512), mask=masks.BlockPattern(np.eye(3, 4, dtype=bool), 128)) == (False, True)


def test_a_gradient_is_stored_where_it_is_that_of_the_score() -> None:
    def is_stored(score: Score, wrt: tuple[str, ...] = ("bias",)) -> bool:
        return specs(score, wrt)["backward"].score_is_stored

    own = bias(2, 4, 300, 512)
    assert is_stored(own)
    assert is_stored(scores.softcap(3.0) @ own)  # the cap comes after the bias
    assert not is_stored(own, ())
    assert not is_stored(own @ scores.softcap(3.0))  # it comes before: the slope by the score is another
    assert not is_stored(bias(4, 300, 512))  # which two batch entries share
    assert not is_stored(bias(2, 4, 300, 512, dtype=BFLOAT16))  # dS is float16


def test_a_gradient_that_is_stored_needs_zeros_where_a_mask_hides_scores() -> None:
    q, array = ShapeDtype((4, 512, 128), HALF), ShapeDtype((4, 512, 512), HALF)
    for causal, zeroed in ((False, ()), (True, ("dscore.bias",))):
        plan = cuflash.plan(q, q, q, bias=array, wrt="bias", causal=causal, executor="gpu", device=HOPPER,
                            kernel="sm90").plan
        assert plan.kernels.backward.zeroed == zeroed
        assert plan.gradients_made["dscore.bias"] == array
    other = cuflash.plan(q, q, q, bias=array, wrt="bias", executor="gpu", device=HOPPER, kernel="sm80").plan
    assert other.gradients_made["dscore.bias"].dtype == np.float32
    assert other.kernels.backward.zeroed == ("dscore.bias",)


# Results

LAYOUTS = {
    "rows": lambda x: x,
    "one element further on": lambda x: np.concatenate([x[..., :1], x], -1)[..., 1:],
    "columns": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "padded": lambda x: np.concatenate([x, x[..., :8]], -1)[..., : x.shape[-1]],
}
ON_GPU = pytest.param(replace(GPU, kernel="sm90"), marks=pytest.mark.gpu(9, 0))
on_hopper = pytest.mark.parametrize(
    "run", [pytest.param(replace(SIM, kernel="sm90"), marks=needs_compiler), ON_GPU], ids=str
)  # fmt: skip


def problem(mask: Any, dim: int = 72, seqlen_kv: int = 136) -> Example:
    """Of a bias of which some elements, and all of every seventh query, are -inf."""
    structure = Structure(
        q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=2, num_kv_heads=1, seqlen_q=200, seqlen_kv=seqlen_kv,
        head_dim=dim, value_dim=dim, dtype="float16", mask=mask,
    )  # fmt: skip
    array = np.random.default_rng(5).standard_normal((2, 2, 200, seqlen_kv))
    array[..., ::7, :] = array[..., 5] = -np.inf
    return structure.example().but(score=scores.bias(array.astype(np.float16)), wrt=("bias",))


def check_masks(run: Run, names: tuple[str, ...]) -> None:
    """Results and the bias's gradient under masks whose steps start and end anywhere."""
    chosen = {
        "nothing": None, "causal": masks.Causal("top_left"), "window": masks.SlidingWindow(37, 21, "top_left"),
        "lengths": masks.Lengths(kv=np.array([136, 61])), "lower": masks.Band(-50, None),
    }  # fmt: skip
    for name in names:
        example = run.rounded(problem(chosen[name]))
        assert_within_bounds(example, **everything(run, example))


@on_hopper
def test_results_are_within_their_bounds_under_any_mask(run: Run) -> None:
    everywhere = ("nothing", "causal", "window", "lengths", "lower")
    check_masks(run, everywhere if is_long() or run.executor == "gpu" else ("causal", "window"))


def check_layouts(run: Run) -> None:
    """The same bits whatever way a bias lies in memory."""
    example = problem(masks.SlidingWindow(90, 90, "top_left"))
    array = example.score.arrays["bias"]
    expected = everything(run, example)
    for name, lay_out in LAYOUTS.items():
        found = everything(run, example.but(score=scores.bias(lay_out(array))))
        for result in ("o", "lse", "dv"):
            np.testing.assert_array_equal(found[result], expected[result], err_msg=f"{result}, {name}")
        np.testing.assert_array_equal(found["others"]["bias"], expected["others"]["bias"], err_msg=name)


@on_hopper
def test_the_layout_of_a_bias_changes_no_bit(run: Run) -> None:
    check_layouts(run)


def check_hidden(run: Run) -> None:
    """The gradient of what a mask hides is 0, in tiles that kernels visit and in those that they do not."""
    example = problem(masks.Band(-20, 20))
    gradient = everything(run, example)["others"]["bias"]
    assert not gradient[np.broadcast_to(~example.allowed, gradient.shape)].any()
    assert gradient.any()


@on_hopper
def test_hidden_elements_have_no_gradient(run: Run) -> None:
    check_hidden(run)


@on_hopper
def test_wide_steps_of_narrow_heads_have_their_own_elements(run: Run) -> None:
    """Up to 64 columns a step has 128 keys; two consumers and three."""
    for mask in (None, masks.Causal("top_left")):
        example = run.rounded(problem(mask, 24, 264))
        assert_within_bounds(example, **everything(run, example))


@needs_compiler
@settings(max_examples=20 if is_long() else 4, deadline=None)
@given(st.data())
def test_lengths_and_functions_do_not_matter(data: st.DataObject) -> None:
    """Of a scaled and a curved function too, whose slopes need the staged number."""
    seqlen_kv = 8 * data.draw(st.integers(1, 20))
    structure = Structure(
        num_heads=2, num_kv_heads=1, seqlen_q=data.draw(st.integers(65, 140)), seqlen_kv=seqlen_kv, head_dim=72,
        value_dim=72, dtype="bfloat16", mask=data.draw(st.sampled_from([None, masks.Causal("bottom_right")])),
    )  # fmt: skip
    function = data.draw(st.sampled_from([
        lambda s, b, h, i, j, x: s * x[h, i, j],
        lambda s, b, h, i, j, x: s + np.exp(x[h, i, j]),
        lambda s, b, h, i, j, x: 2 * np.tanh(s * x[h, i, j]),
    ]))  # fmt: skip
    array = np.random.default_rng(0).standard_normal((2, structure.seqlen_q, seqlen_kv)).astype(BFLOAT16)
    run = replace(SIM, kernel="sm90")
    example = run.rounded(structure.example()).but(score=Score(function, x=array), wrt=("x",))
    assert_within_bounds(example, **everything(run, example))
