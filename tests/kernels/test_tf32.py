"""float32 on tensor cores: precision='tf32' and 'tf32x3' are within their bounds, and refused on older chips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuflash import DeviceSpec, ShapeDtype, UnsupportedProblem, masks
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import (
    DETERMINISTIC, Run, in_turn, needs_compiler, on_kernels, on_kernels_for, on_sim_and_gpu, sampled_on_simulator,
)  # fmt: skip
from hypothesis import given, target
from poison import call

import cuflash

PRECISIONS = ("tf32", "tf32x3")
RNG = np.random.default_rng(0)
at_both = pytest.mark.parametrize("precision", PRECISIONS)


MASKS = {
    "none": None,
    "causal": masks.Causal("bottom_right"),
    "intervals, rows without a key": masks.Lengths(q=np.array([170, 60]), kv=np.array([130, 200])),
    "blocks of 16": masks.BlockPattern(RNG.random((4, 11, 13)) < 0.4, 16),
    "blocks of 64 under a diagonal": masks.BlockPattern(RNG.random((3, 4)) < 0.7, 64) & masks.Causal("bottom_right"),
    "bits": masks.Dilated(3, align="bottom_right"),
}


def structure(mask: masks.Mask | None, **changes: Any) -> Structure:
    """Return a problem with two batch entries, GQA, lengths that fill no tile, and dimensions that fill no chunk."""
    return replace(
        Structure(
            q_batch=(2,), k_batch=(2,), v_batch=(2,), num_heads=4, num_kv_heads=2, seqlen_q=170, seqlen_kv=200,
            head_dim=24, value_dim=22, mask=mask,
        ),
        **changes,
    )  # fmt: skip


@on_kernels_for("name, precision", in_turn(MASKS, PRECISIONS))
def test_every_mask_is_served_within_the_bounds(run: Run, precision: str, name: str) -> None:
    example = structure(MASKS[name], layouts=("padded",) * 5).example().but(precision=precision)
    call(example, run, check=partial(assert_within_bounds, example))


@on_kernels
@at_both
def test_whatever_is_drawn_is_within_the_bounds(run: Run, precision: str) -> None:
    @run.settings
    @given(run.examples(dtypes=["float32"]))
    def check(example: Example) -> None:
        example = example.but(precision=precision)
        target(assert_within_bounds(example, **run.everything(example)))

    check()


def one_entry(mask: masks.Mask | None, **changes: Any) -> Structure:
    return structure(mask, q_batch=(), k_batch=(), v_batch=(), **changes)


def tame() -> Iterator[Structure]:
    for values in ("normal", "outliers"):
        yield one_entry(MASKS["causal"], values=values)


@on_sim_and_gpu
def test_three_products_are_as_good_as_float32_and_one_is_not(run: Run) -> None:
    for each in tame():
        example = each.example()
        assert_within_bounds(example, **run.everything(example.but(precision="tf32x3")))
        for name, result in run.everything(example.but(precision="tf32")).items():
            with pytest.raises(AssertionError, match="times its bound"):
                assert_within_bounds(example, **{name: result})


@sampled_on_simulator(on_kernels, "head_dim, value_dim", [(1, 96), (130, 64), (90, 180), (30, 200)], 3)
def test_all_dims_are_served(run: Run, head_dim: int, value_dim: int) -> None:
    example = one_entry(None, head_dim=head_dim, value_dim=value_dim, seqlen_q=70, seqlen_kv=90).example()
    example = example.but(precision="tf32x3")
    assert_within_bounds(example, **run.everything(example))


@on_sim_and_gpu
@at_both
def test_nan_is_seen_by_those_who_attend_it(run: Run, precision: str) -> None:
    example = structure(masks.SlidingWindow(5, 0, "bottom_right")).example().but(precision=precision)
    v = example.v.copy()
    # the NaN that GPUs produce; rounding its bits would overflow
    v[..., 100, :] = np.uint32(0x7FFFFFFF).view(np.float32)
    o = run.attention(example.q, example.k, v, mask=example.mask, scale=example.scale, precision=precision)
    # and rows of queries that share a tile with them: 0 * NaN is NaN
    assert np.isnan(o[example.allowed[..., 100]]).all()


@pytest.mark.parametrize("run", DETERMINISTIC, ids=str)
@at_both
def test_every_bit_is_repeated_where_that_is_asked_for(run: Run, precision: str) -> None:
    example = one_entry(MASKS["causal"]).example().but(precision=precision)
    first, second = run.everything(example), run.everything(example)
    assert_within_bounds(example, **first)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@needs_compiler
def test_the_tiles_of_a_chip_with_little_shared_memory_are_right() -> None:
    example = one_entry(MASKS["causal"], head_dim=192, value_dim=100).example().but(precision="tf32x3")
    arrays, device = (example.q, example.k, example.v), DeviceSpec.gpu("RTX 4090")
    ready = cuflash.plan(*arrays, mask=example.mask, executor="sim", precision="tf32x3", device=device)
    o, lse = ready.forward(*arrays)
    dq, dk, dv = ready.backward(example.do, *arrays, o, lse, example.dlse)
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


def plan(dtype: Any = np.float32, **options: Any) -> Any:
    shape = ShapeDtype((8, 256, 64), dtype)
    return cuflash.plan(shape, shape, shape, **{"device": DeviceSpec.gpu("H100")} | options)


@at_both
def test_auto_takes_the_kernels_that_have_the_precision(precision: str) -> None:
    ready = plan(precision=precision)
    assert ready._plan.family.name == "sm80" and f"float32 at precision {precision}" in ready.explain()
    assert {ready._plan.specs[entry].precision for entry in ("forward", "backward")} == {precision}
    assert plan()._plan.family.name == "simt"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "tf64"}, ["precision must be 'ieee', 'tf32', 'tf32x3'", "'tf64'"]),
        ({"dtype": np.float16}, ["precision='tf32' is for float32", "float16", "use precision='ieee'"]),
        ({"dtype": np.float64}, ["precision='tf32' is for float32", "float64"]),
        ({"kernel": "simt"}, ["kernel='simt' needs precision='ieee'", "'tf32'", "use kernel='auto'"]),
        ({"kernel": "naive"}, ["kernel='naive' needs precision='ieee'", "use kernel='auto'"]),
        ({"kernel": "sm80", "precision": "ieee"}, ["kernel='sm80' takes float16 or bfloat16", "precision='tf32x3'"]),
        ({"device": DeviceSpec.gpu("T4")}, ["needs compute capability 8.0", "T4", "use precision='ieee'"]),
        ({"device": DeviceSpec.host()}, ["precision='tf32' needs a GPU's tensor cores", "executor='cpu'"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        plan(**{"precision": "tf32"} | options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
