"""A bias in sm90's kernels: when shared memory stages its elements, and when its gradient is stored from there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from cuflash.planning.launches import Feature
from cuflash.planning.spec import KernelSpec
from cuflash.planning.staged_array import STAGED_BOX, STAGED_MAP
from cuflash.testing import Example, Structure, assert_within_bounds
from cuflash.executors.sim import Simulator
from cuflash.sim import Schedule
from executors import SIM, Run, hostile_schedules, is_long, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scores import everything
from test_sm90 import on_sm90

import cuflash
from cuflash import masks, scores
from cuflash.scores import Score

HALF, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def specs(library: Any, score: Any, wrt: tuple[str, ...] = (), **changes: Any) -> dict[str, KernelSpec]:
    """Return the specifications of the kernels of a float16 problem."""
    sizes = {"heads": 4, "seqlen_q": 300, "seqlen_kv": 512, "dim": 128} | changes
    shapes = ((2, sizes["heads"], sizes[name], sizes["dim"]) for name in ("seqlen_q", "seqlen_kv"))
    q, k = (library.ShapeDtype(shape, HALF) for shape in shapes)
    options = {"executor": "gpu", "device": library.DeviceSpec.gpu("H100"), "kernel": "sm90"}
    return dict(library.plan(q, k, k, mask=sizes.get("mask"), score=score, wrt=wrt, **options)._plan.specs)


def check_plans(library: Any) -> None:
    """Check that kernels stage arrays read at query and key, and store gradients to which only one tile contributes."""

    def bias(*shape: int, dtype: Any = HALF) -> Any:
        return library.scores.bias(library.ShapeDtype(shape, np.dtype(dtype)))

    def staged(score: Any, **changes: Any) -> tuple[bool, bool]:
        spec = specs(library, score, **changes)
        return spec["forward"].score_is_staged, spec["backward"].score_is_staged

    def is_stored(score: Any, wrt: tuple[str, ...] = ("bias",)) -> bool:
        return specs(library, score, wrt)["backward"].score_is_stored

    softcap, blocks = library.scores.softcap(3.0), library.masks.BlockPattern(np.eye(3, 4, dtype=bool), 128)
    assert staged(bias(2, 4, 300, 512)) == (True, True)
    assert staged(bias(300, 512, dtype=BFLOAT16)) == (True, True)  # all heads share it
    assert staged(softcap @ bias(4, 300, 512)) == (True, True)
    assert staged(bias(4, 300, 512), dim=64) == (True, False)
    assert staged(bias(4, 300, 512), mask=blocks) == (False, True)
    table, turned = library.ShapeDtype((4, 300, 512), HALF), library.ShapeDtype((4, 512, 300), HALF)
    for score in (
        bias(4, 300, 512, dtype=np.float32), bias(4, 1, 512), bias(4, 300, 1),
        library.scores.Score(lambda s, b, h, i, j, x: s + x[h, j, i], x=turned),
        library.scores.Score(lambda s, b, h, i, j, x, y: s + x[h, i, j] * y[h, i, j], x=table, y=table),
        library.scores.Score(lambda s, b, h, i, j, x: s + x[h, i, np.maximum(j - 1, 0)], x=table),
    ):  # fmt: skip
        assert staged(score) == (False, False)
    assert staged(bias(4, 300, 509), seqlen_kv=509) == (False, False)  # rows are not a multiple of 16 bytes
    assert staged(bias(4, 300, 512), dim=192) == (False, False)
    own = bias(2, 4, 300, 512)
    assert is_stored(own)
    assert is_stored(softcap @ own)  # the softcap comes after the bias
    assert not is_stored(own, ())
    assert not is_stored(own @ softcap)  # the softcap comes first, so the slopes by score and by bias differ
    assert not is_stored(bias(4, 300, 512))  # two batch entries share it
    assert not is_stored(bias(2, 4, 300, 512, dtype=BFLOAT16))  # dS is float16


def test_kernels_stage_arrays_that_are_as_large_as_the_scores() -> None:
    check_plans(cuflash)


def check_zeros(library: Any) -> None:
    """Check that stored gradients are zeroed only if a mask other than a band hides scores, and added ones always."""
    q, array = library.ShapeDtype((4, 512, 128), HALF), library.ShapeDtype((4, 512, 512), HALF)
    causal, lengths, blocks = (
        library.masks.Causal(), library.masks.Lengths(kv=500),
        library.masks.BlockPattern(np.tri(4, dtype=bool), 128),
    )  # fmt: skip
    for kernel, mask, dtype, zeroed in (
        ("sm90", None, HALF, ()), ("sm90", causal, HALF, ()), ("sm90", causal & lengths, HALF, ("dscore.bias",)),
        ("sm90", blocks, HALF, ("dscore.bias",)), ("sm80", None, np.dtype(np.float32), ("dscore.bias",)),
    ):  # fmt: skip
        options = {"executor": "gpu", "device": library.DeviceSpec.gpu("H100"), "kernel": kernel}
        plan = library.plan(q, q, q, bias=array, wrt="bias", mask=mask, **options)._plan
        assert plan.kernels.backward.zeroed == zeroed
        assert plan.kernel_gradients["dscore.bias"] == library.ShapeDtype((4, 512, 512), dtype)


def test_a_gradient_is_zero_before_kernels_where_they_do_not_write_all_of_it() -> None:
    check_zeros(cuflash)


# Results

LAYOUTS = {
    "rows": lambda x: x,
    "one element further on": lambda x: np.concatenate([x[..., :1], x], -1)[..., 1:],
    "columns": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "every second element": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "padded": lambda x: np.concatenate([x, x[..., :8]], -1)[..., : x.shape[-1]],
    "padded on both sides": lambda x: np.concatenate([x[..., :1], x, x[..., :7]], -1)[..., 1:-7],
}


def problem(mask: Any, dim: int = 72, seqlen_kv: int = 136, seqlen_q: int = 200) -> Example:
    """Return an example with a bias that is -inf in some elements, and in entire rows of every seventh query."""
    structure = Structure(
        q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=2, num_kv_heads=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv,
        head_dim=dim, value_dim=dim, dtype="float16", mask=mask,
    )  # fmt: skip
    array = np.random.default_rng(5).standard_normal((2, 2, seqlen_q, seqlen_kv))
    array[..., ::7, :] = array[..., 5] = -np.inf
    return structure.example().but(score=scores.bias(array.astype(np.float16)), wrt=("bias",))


def check_masks(run: Run, names: tuple[str, ...]) -> None:
    """Check results and the bias's gradient under masks with steps that start and end anywhere."""
    chosen = {
        "nothing": None, "causal": masks.Causal("top_left"), "window": masks.SlidingWindow(37, 21, "top_left"),
        "lengths": masks.Lengths(kv=np.array([136, 61])), "lower": masks.Band(-50, None),
    }  # fmt: skip
    for name in names:
        example = run.rounded(problem(chosen[name]))
        assert_within_bounds(example, **everything(run, example))


@on_sm90
def test_results_are_within_their_bounds_under_any_mask(run: Run) -> None:
    everywhere = ("nothing", "causal", "window", "lengths", "lower")
    check_masks(run, everywhere if is_long() or run.executor == "gpu" else ("causal", "window"))


def check_unaligned(run: Run) -> None:
    """Check steps that start at keys 35, 163 and 3, where a 16-byte copy would be misaligned."""
    for mask, seqlen_kv in ((masks.SlidingWindow(37, 200, "top_left"), 392), (masks.Lengths(kv=131), 136)):
        example = run.rounded(problem(mask, seqlen_kv=seqlen_kv))
        assert_within_bounds(example, **everything(run, example))


@on_sm90
def test_steps_may_start_between_multiples_of_16_bytes(run: Run) -> None:
    check_unaligned(run)


def check_schedules(schedules: list[Schedule]) -> None:
    """Check warps in any order, late copies, and several tiles of queries, the last of them short."""
    for schedule in schedules:
        with patch("cuflash.executors.sim._SIMULATOR", Simulator(schedule)):
            run = replace(SIM, kernel="sm90")
            check_masks(run, ("window",))
            example = run.rounded(problem(None, 24, 392))  # more steps than pipeline slots
            assert_within_bounds(example, **everything(run, example))


@needs_compiler
def test_schedules_and_late_copies_change_nothing() -> None:
    check_schedules(hostile_schedules("staged"))


def check_layouts(run: Run) -> None:
    """Check that all memory layouts of a bias give the same bits."""
    example = problem(masks.SlidingWindow(90, 90, "top_left"))
    array = example.score.arrays["bias"]
    expected = everything(run, example)
    for name, lay_out in LAYOUTS.items():
        actual = everything(run, example.but(score=scores.bias(lay_out(array))))
        for result in ("o", "lse", "dv"):
            np.testing.assert_array_equal(actual[result], expected[result], err_msg=f"{result}, {name}")
        np.testing.assert_array_equal(actual["others"]["bias"], expected["others"]["bias"], err_msg=name)
    shared = np.broadcast_to(array[:, :1], array.shape)  # all heads share one matrix
    results = [everything(run, example.but(score=scores.bias(x))) for x in (shared, shared.copy())]
    np.testing.assert_array_equal(results[0]["o"], results[1]["o"])
    np.testing.assert_array_equal(results[0]["others"]["bias"], results[1]["others"]["bias"])


def check_maps(library: Any) -> None:
    """Check the tensor maps of arrays that TMA can copy, and the axes with which kernels locate a tile's matrix."""
    records, tensor_map = import_module(f"{library.__name__}.executors._records"), import_module(
        f"{library.__name__}.executors.tensor_map"
    )
    array, maps = np.zeros((2, 3, 72, 136), HALF), []
    feature = Feature("staged_map", STAGED_MAP, boxes={"array": ("score.bias", STAGED_BOX)})

    def is_mapped(array: Any) -> bool:
        views = {"score.bias": records.View.of("score.bias", array)}
        make = partial(tensor_map.template, tensor_map.simulated)
        argument = records.Argument.of(feature, views, lambda boxed: maps.append(boxed) or make(boxed))
        assert bool(argument.addresses) == bool(argument.record["array"]["is_valid"])
        return bool(argument.addresses)

    can_map = {name: is_mapped(lay_out(array)) for name, lay_out in LAYOUTS.items()}
    assert [name for name, can in can_map.items() if can] == ["rows", "padded", "padded on both sides"]
    assert is_mapped(np.broadcast_to(array[:, :1], array.shape))
    assert maps[-1].shape == (1, 2, 1, 72, 136)
    assert maps[-1].box == (1, 1, 1, 64, 64)
    assert not is_mapped(array[None, None])  # four leading axes


def test_arrays_that_tma_can_copy_have_a_map() -> None:
    check_maps(cuflash)


@on_sm90
def test_the_layout_of_a_bias_changes_no_bit(run: Run) -> None:
    check_layouts(run)


def nan_filled(shape: Any, dtype: Any = float, *args: Any, **options: Any) -> Any:
    """Return an array as `np.empty` does; arrays of float16 hold NaN instead of arbitrary numbers."""
    array = np.zeros(shape, dtype, *args, **options)
    if array.dtype == HALF:
        array.fill(np.nan)
    return array


def check_hidden(run: Run) -> None:
    """Check that gradients of hidden elements alone are 0: in visited tiles, in skipped ones, if no query sees a key.

    Results start as numbers other than 0, on a GPU because of CUFLASH_CHECK.
    """
    for mask, sizes in (
        (masks.Band(-20, 20), {}), (masks.Causal("top_left"), {"seqlen_q": 70, "seqlen_kv": 264}),
        (masks.Causal("bottom_right"), {"seqlen_q": 300}),
    ):  # fmt: skip
        example = run.rounded(problem(mask, **sizes))
        with patch("numpy.empty", nan_filled), patch.dict("os.environ", CUFLASH_CHECK="1"):
            results = everything(run, example)
        assert_within_bounds(example, **results)
        gradient = results["others"]["bias"]
        assert not gradient[np.broadcast_to(~example.allowed, gradient.shape)].any()
        assert gradient.any() and np.isfinite(gradient).all()


@on_sm90
def test_hidden_elements_have_no_gradient(run: Run) -> None:
    check_hidden(run)


@on_sm90
def test_wide_steps_of_narrow_heads_have_their_own_elements(run: Run) -> None:
    """Up to 64 columns, a step has 128 keys, and kernels have two or three consumer warpgroups."""
    for mask in (None, masks.Causal("top_left")):
        example = run.rounded(problem(mask, 24, 264))
        assert_within_bounds(example, **everything(run, example))


@needs_compiler
@settings(max_examples=20 if is_long() else 4, deadline=None)
@given(st.data())
def test_lengths_and_functions_do_not_matter(data: st.DataObject) -> None:
    """Functions scale or bend the score, so that their slopes need the staged elements again."""
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
