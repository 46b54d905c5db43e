"""Thread blocks that share a tile's keys: partial and merged results, when plans split keys, and workspaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuflash.plans import Plan
from cuflash.planning.plan import KernelPlan
from cuflash.executors.sim import Simulator
from cuflash.testing import Example, assert_within, assert_within_bounds, examples
from executors import Run, is_long, needs_compiler, on_sim_and_gpu, sampled_on_simulator
from hypothesis import given, settings
from hypothesis import strategies as st
from splitting import STRUCTURES, forward, rounded, split_plan

import cuflash
from cuflash import DeviceSpec, ShapeDtype, masks, sim

SPLITS = (1, 2, 3, 9)  # parts of 300 keys in steps of 128; with 9 parts, some have no step


@sampled_on_simulator(on_sim_and_gpu, "name", STRUCTURES, 3)
def test_results_are_within_their_bounds_for_any_number_of_splits(run: Run, name: str) -> None:
    example = rounded(STRUCTURES[name].example())
    number = list(STRUCTURES).index(name)
    for num_splits in SPLITS if is_long() else (SPLITS[number % len(SPLITS)],):
        left = forward(example, num_splits, run)
        assert_within_bounds(example, o=left.o, lse=left.lse)


@needs_compiler
@settings(max_examples=15)
@given(
    example=examples(dtypes=["float16", "bfloat16", "float32"], widest=32, most_scores=1 << 13, most_rows=400),
    num_splits=st.integers(1, 6),
)
def test_every_call_may_be_split(example: Example, num_splits: int) -> None:
    example = rounded(example)
    if not split_plan(example, 1).is_empty:
        left = forward(example, num_splits)
        assert_within_bounds(example, o=left.o, lse=left.lse)


@on_sim_and_gpu
@pytest.mark.parametrize("name", ["dense", "window", "bits", "few queries, lengths"])
def test_what_is_made_of_parts_is_what_merge_makes_of_them(run: Run, name: str) -> None:
    example = rounded(STRUCTURES[name].example())
    left = forward(example, 3, run)
    *batch, heads, seqlen_q, value_dim = left.o.shape
    lses = np.moveaxis(left.lse_parts.reshape(*batch, heads, 3, seqlen_q), -2, 0)
    outs = np.moveaxis(left.o_parts.reshape(*batch, heads, 3, seqlen_q, -1), -3, 0)[..., :value_dim]
    is_written = ~np.isneginf(lses)
    assert not np.isnan(lses).any() and not np.isnan(outs[is_written]).any()
    if name in ("window", "few queries, lengths"):
        assert is_written.any() and not is_written.all()
    if not run.is_on_device:
        assert np.isnan(outs[~is_written]).all()  # parts without a key are not written
    outs = np.where(is_written[..., None], outs, 0)
    o, lse = cuflash.merge(outs, lses)
    tol_o, tol_lse = merging_tolerances(outs.astype(np.float64), lses.astype(np.float64))
    assert_within("lse", left.lse, lse, 2 * tol_lse, example)
    half_ulp = float(ml_dtypes.finfo(left.o.dtype).eps) / 2
    assert_within("o", left.o, o, 2 * tol_o + half_ulp * (np.abs(o) + 2 * tol_o), example)


def merging_tolerances(outs: Any, lses: Any) -> tuple[Any, Any]:
    """Return how far merged o and lse may be from the exact merge of these parts, due to float32 roundoff.

    The weight of a part is exp(lse - m), where m is the largest lse. It errs by one roundoff for the difference, two
    for the change of base, and four for the exponential. A sum adds a roundoff per part. O is the quotient of two sums,
    to which the products and the division add roundoffs, and lse is m plus a logarithm with a relative error of four
    roundoffs.
    """
    roundoff, parts = np.finfo(np.float32).eps / 2, len(lses)
    has_key = ~np.isneginf(lses)
    largest = lses.max(axis=0)
    largest = np.where(np.isneginf(largest), 0, largest)
    below = np.where(has_key, largest - lses, 0)
    weights = np.exp(-below) * has_key
    total = np.maximum(weights.sum(axis=0), 1)
    shares, etas = weights / total, (3 * below + 4) * roundoff
    r = (shares * etas).sum(axis=0) + parts * roundoff
    tol_lse = r + roundoff * (4 * np.log(total) + np.abs(largest + np.log(total)))
    tol_o = (shares * (etas + r + (parts + 2) * roundoff))[..., None] * np.abs(outs)
    return tol_o.sum(axis=0), tol_lse


@needs_compiler
@pytest.mark.parametrize("name", ["causal", "bits", "few queries, lengths"])
def test_results_and_parts_repeat_bit_for_bit_under_any_schedule(name: str) -> None:
    example = rounded(STRUCTURES[name].example())
    first = forward(example, 3)
    for seed in range(3):
        again = forward(example, 3, machine=Simulator(sim.Schedule(seed=seed, order="random", copies="random")))
        assert all(one.tobytes() == other.tobytes() for one, other in zip(first, again))


@needs_compiler
def test_what_a_part_may_not_see_never_matters() -> None:
    example = rounded(STRUCTURES["few queries, lengths"].example())
    expected = forward(example, 3)
    k, v = example.k.copy(), example.v.copy()
    k[0], v[0], k[1, :, 170:], v[1, :, 170:] = np.nan, np.inf, np.nan, np.inf
    again = forward(example.but(k=k, v=v), 3)
    assert again.o.tobytes() == expected.o.tobytes() and again.lse.tobytes() == expected.lse.tobytes()
    assert (expected.o[0] == 0).all() and np.isneginf(expected.lse[0]).all()


@needs_compiler
def test_nan_in_one_part_goes_where_arithmetic_takes_it() -> None:
    example = rounded(STRUCTURES["few queries, causal"].example())
    k = example.k.copy()
    k[0, 0, 299] = np.nan  # the last key, which only the last query attends
    o, lse = Plan(split_plan(example, 3), "sim").forward(example.q, k, example.v)
    assert np.isnan(o[0, :2, 4].astype(np.float32)).all() and np.isnan(lse[0, :2, 4]).all()
    assert np.isfinite(o[0, :2, :4].astype(np.float32)).all() and np.isfinite(lse[1]).all()


# Whether a plan splits the keys, and into how many parts.


def planned(
    batch: int, num_heads: int, num_kv_heads: int, seqlen_q: int, seqlen_kv: int, dim: int = 128, **options: Any
) -> KernelPlan:
    q = ShapeDtype((batch, num_heads, seqlen_q, dim), ml_dtypes.bfloat16)
    k = ShapeDtype((batch, num_kv_heads, seqlen_kv, dim), ml_dtypes.bfloat16)
    device = options.pop("device", "H100")
    return cuflash.plan(q, k, k, kernel="sm80", device=DeviceSpec.gpu(device), **options)._plan


def test_keys_are_shared_where_tiles_do_not_fill_the_gpu() -> None:
    assert planned(8, 32, 32, 4096, 4096).kernels.num_splits == planned(32, 32, 32, 1, 1 << 16).kernels.num_splits == 1
    one, many = planned(1, 32, 8, 1, 1 << 16), planned(8, 32, 8, 1, 1 << 16)
    assert one.specs["forward"].pack_gqa and one.kernels.num_splits > many.kernels.num_splits > 1
    tiles = one.kernels.forward.launches["forward"].grid(1)
    assert tiles == 8 * one.kernels.num_splits  # a tile for each key/value head
    assert planned(1, 4, 4, 1, 8 * 64).kernels.num_splits == 8  # one step per part
    assert planned(1, 4, 4, 1, 1 << 16, mask=masks.SlidingWindow(500, 0, "bottom_right")).kernels.num_splits == 8


@settings(max_examples=200)
@given(
    sizes=st.tuples(*(st.sampled_from([1, 2, 3, 8, 16]) for _ in range(3))),
    seqlen_q=st.integers(1, 600),
    steps=st.integers(1, 3000),
    dim=st.sampled_from([32, 64, 128, 256]),
    device=st.sampled_from(["A100", "RTX 4090", "H100", "B200"]),
)
def test_splitting_fills_the_gpu_better_and_takes_little_room(
    sizes: tuple[int, int, int], seqlen_q: int, steps: int, dim: int, device: str
) -> None:
    batch, num_kv_heads, group_size = sizes
    plan = planned(batch, num_kv_heads * group_size, num_kv_heads, seqlen_q, 64 * steps, dim, device=device)
    forward = plan.specs["forward"]
    assert forward.is_split == ("combine" in plan.specs) and (plan.kernels.num_splits == 1 or forward.is_split)
    if not forward.is_split:
        return
    tiles = plan.kernels.forward.launches["forward"].grid(batch) // plan.kernels.num_splits
    keys = 64 * steps * 2 * dim * 2 * tiles  # bytes that the tiles load
    parts = plan.kernels.forward.nbytes
    assert plan.kernels.num_splits == 1 or parts <= keys
    assert plan.kernels.num_splits <= 128 and plan.workspace_bytes >= parts
    rows = seqlen_q * (group_size if forward.pack_gqa else 1)
    assert not forward.pack_gqa or group_size > 1 and rows <= forward.block_q


def test_heads_are_packed_where_they_share_masks_and_fit_a_tile() -> None:
    def packs(*sizes: int, **options: Any) -> bool:
        return planned(*sizes, **options).specs["forward"].pack_gqa

    assert packs(1, 8, 2, 32, 4096) and not packs(1, 8, 2, 33, 4096)
    assert packs(1, 8, 2, 32, 4096, 256) and not packs(1, 8, 2, 33, 4096, 256)
    assert not packs(1, 8, 8, 1, 4096)
    lengths = np.array([[100], [4000]])
    assert packs(2, 8, 2, 1, 4096, mask=masks.Lengths(kv=lengths[:, 0]))
    by_head = masks.FromFunction(lambda b, h, i, j: j >= h)
    assert not packs(2, 8, 2, 1, 4096, mask=by_head)
    assert not packs(2, 8, 2, 1, 4096, mask=masks.Dilated(2, align="top_left"))


def test_explain_says_how_keys_are_shared() -> None:
    q, k = ShapeDtype((1, 32, 1, 128), np.float16), ShapeDtype((1, 8, 1 << 14, 128), np.float16)
    ready = cuflash.plan(q, k, k, kernel="sm80", device=DeviceSpec.gpu("H100"))
    splits = ready._plan.kernels.num_splits
    assert f"splits     {splits} blocks share the keys of a tile, which holds a group's heads" in ready.explain()
    assert f"grid {8 * splits}," in ready.explain() and "sm80_combine" in ready.explain()
    assert ready.workspace_bytes == splits * 32 * 129 * 4


@needs_compiler
def test_backward_takes_the_results_of_split_plans() -> None:
    example = rounded(replace(STRUCTURES["few queries, causal"], seqlen_kv=600).example())
    (o, lse), vjp = cuflash.attention_vjp(
        example.q, example.k, example.v, mask=example.mask, kernel="sm80", executor="sim", return_lse=True
    )
    assert split_plan(example, None).kernels.num_splits > 1
    dq, dk, dv = vjp(example.do, example.dlse)
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)
