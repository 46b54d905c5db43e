"""Kernels that compute tangents agree with the reference, and follow its rules, on the simulator and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuflash import DeviceSpec, ShapeDtype, UnsupportedProblem, masks
from cuflash.compiler import nvrtc as compiling
from cuflash.executors import sim as simulated
from cuflash.executors.sim import Simulator
from cuflash.testing import Example, Structure, assert_within, tangents as of_tests
from cuflash.testing.tangents import Moving, assert_tangents_within_bounds, movings
from executors import (
    GPU, SIM, Run, hostile_schedules, is_long, needs_compiler, on_sim_and_gpu, sampled, sampled_on_simulator,
)  # fmt: skip
from hypothesis import given

import cuflash

QKV = dict.fromkeys("qkv", "normal")
EVERY = QKV | {"sink": "normal"}
TWO = {"q_batch": (2,), "k_batch": (1,), "v_batch": (2,)}
ROWS = np.arange(90)[:, None] % 3 > 0  # rows with keys; the others have none
FULL = Structure(
    **TWO, num_heads=4, num_kv_heads=2, seqlen_q=90, seqlen_kv=150, head_dim=20, value_dim=12, sink=(4,),
    mask=masks.Dense(ROWS) & masks.Causal("bottom_right"), dropout=cuflash.Dropout(0.3, seed=5),
)  # fmt: skip


def moved_along(example: Example, kinds: dict[str, str], seed: int = 11, layout: str = "contiguous") -> Moving:
    """Replace an example's tangents by those of another seed, so that they differ from its arrays."""
    return of_tests.with_tangents(example, kinds, seed, layout)


def put(run: Run, x: Any) -> Any:
    return {name: run.put(each) for name, each in x.items()} if isinstance(x, dict) else run.put(x)


def push(run: Run, moving: Moving, **options: Any) -> dict[str, np.ndarray]:
    """Return o, lse and their tangents."""
    example = moving.example
    keywords = {"scale": example.scale, "score": example.score, "dropout": example.dropout}
    keywords |= {"sink": None if example.sink is None else run.put(example.sink)}
    if run.is_on_device and example.score is not None:
        arrays = {name: run.put(x) for name, x in example.score.arrays.items()}
        keywords["score"] = cuflash.scores.Score._of_reserved(example.score.function, **arrays)
    dots = {name: put(run, x) for name, x in moving.of_call().items()}
    values, pushed = cuflash.attention_jvp(
        *map(run.put, (example.q, example.k, example.v)), **dots, **keywords, **run.options, return_lse=True,
        mask=run.put_mask(example.mask, example.q, example.k, example.v), **options,
    )  # fmt: skip
    return {name: run.get(x) for name, x in zip(("o", "lse", "o_dot", "lse_dot"), (*values, *pushed))}


def check(run: Run, moving: Moving) -> dict[str, np.ndarray]:
    """Assert that the tangents of o and lse are within their bounds."""
    moving = Moving(run.rounded(moving.example), moving.tangents)
    outputs = push(run, moving)
    assert_tangents_within_bounds(moving, o_dot=outputs["o_dot"], lse_dot=outputs["lse_dot"])
    return outputs


def same(first: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name, x in first.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)


def holds_for(run: Run, test: Any, **drawn: Any) -> None:
    """Run a test with drawn examples that are small enough for a run; tangents of do and dlse are left out."""

    def of_kernels(moving: Moving) -> None:
        dots = {name: x for name, x in moving.tangents.items() if name not in ("do", "dlse")}
        test(Moving(moving.example, dots or {"q": np.ones_like(moving.example.q)}))

    of_kernels.__name__ = of_kernels.__qualname__ = test.__name__
    drawn = drawn if is_long() else dict(run.drawn) | drawn
    run.settings(given(movings(**drawn))(of_kernels))()


@on_sim_and_gpu
def test_tangents_are_within_their_bounds(run: Run) -> None:
    def agree(moving: Moving) -> None:
        outputs, example = check(run, moving), moving.example
        sink = {} if example.sink is None else {"sink": run.put(example.sink)}
        o, lse = run.attention(
            example.q, example.k, example.v, mask=example.mask, scale=example.scale, return_lse=True, **sink,
            **({} if example.dropout is None else {"dropout": example.dropout}),
        )  # fmt: skip
        same({"o": o, "lse": lse}, outputs)

    holds_for(run, agree, has_sink=True, has_dropout=True)


@on_sim_and_gpu
def test_tangents_of_score_functions_are_within_their_bounds(run: Run) -> None:
    def agree_with_scores(moving: Moving) -> None:
        check(run, moving)

    holds_for(run, agree_with_scores, has_score=True)


def curved(s, b, h, i, j, temperature, slope):
    return temperature[h] * 3 * np.tanh(s / 3) - slope[h] * np.abs(i - j)


@sampled_on_simulator(on_sim_and_gpu, "dtype", ["float32", "float64", "float16"], 2)
def test_every_feature_at_once_is_within_its_bounds(run: Run, dtype: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {"temperature": 1 + 0.3 * rng.standard_normal(4), "slope": 0.1 * rng.standard_normal(4)}
    score = cuflash.scores.Score(curved, **{name: x.astype(np.float32) for name, x in arrays.items()})
    example = replace(FULL, dtype=dtype).example().but(score=score)
    kinds = EVERY | {"temperature": "normal", "slope": "lattice"}
    for names in (kinds, ("slope",), ("v",)):
        check(run, moved_along(example, {name: kinds[name] for name in names}, layout="padded"))


@on_sim_and_gpu
def test_an_absent_tangent_is_one_of_zeros(run: Run) -> None:
    example = replace(FULL, dtype="float16").example()
    every = moved_along(example, EVERY).tangents
    for names in (("v",), ("k", "sink"), ("q",), ("sink",)):
        own = {name: every[name] for name in names}
        full = {name: own.get(name, np.zeros_like(x)) for name, x in every.items()}
        same(push(run, Moving(example, own)), push(run, Moving(example, full)))


@on_sim_and_gpu
def test_a_drift_that_all_keys_share_costs_no_digits(run: Run) -> None:
    """Tangents of scores are relative to a center of their row; else their common drift would multiply o's rounding."""
    mask = masks.Dense(np.arange(700) % 70 <= np.arange(60)[:, None])
    example = Structure(num_heads=2, seqlen_q=60, seqlen_kv=700, head_dim=16, dtype="float16", mask=mask).example()
    moving = moved_along(run.rounded(example), {"k": "drift"})
    check(run, moving)
    drift = np.abs(moving.exact.lse_dot).max() * np.finfo(np.float16).eps * np.abs(moving.example.exact.o).max()
    assert moving.bounds.o_dot.max() < drift / 4


@on_sim_and_gpu
def test_rows_of_several_steps_have_one_center(run: Run) -> None:
    """A row's center comes from its first step, even while other rows of the tile wait for their first keys."""
    rng = np.random.default_rng(0)
    for mask in (None, masks.Dense(np.arange(700) >= 8 * np.arange(50)[:, None])):
        example = Structure(seqlen_q=50, seqlen_kv=700, head_dim=8, value_dim=4, mask=mask).example()
        later = np.where(np.arange(700)[:, None] < 300, 0 * example.k, np.float32(4))
        q_dot = rng.standard_normal(example.q.shape).astype(np.float32)
        check(run, Moving(example, {"q": q_dot, "v": example.v, "k": later}))


@on_sim_and_gpu
def test_rows_without_a_key_have_tangents_of_zero(run: Run) -> None:
    example = replace(FULL, dropout=None, mask=masks.Dense(ROWS)).example()
    without = moved_along(example.but(sink=None), {"q": "normal", "v": "normal"})
    for moving in (moved_along(example, EVERY), without):
        outputs = push(run, moving)
        assert not outputs["o_dot"][..., ::3, :].any()
        sink_dot = moving.tangents.get("sink", np.zeros(4, np.float32))
        np.testing.assert_array_equal(outputs["lse_dot"][..., ::3], np.broadcast_to(sink_dot[:, None], (2, 4, 30)))


@on_sim_and_gpu
def test_absent_keys_do_not_matter(run: Run) -> None:
    blocks = masks.BlockPattern(np.array([[1, 0], [1, 0]], bool), (64, 512))
    for mask, seen in ((blocks, 512), (masks.Lengths(kv=600), 600)):
        example = Structure(num_heads=2, seqlen_q=128, seqlen_kv=1024, head_dim=4, mask=mask).example()
        moving = moved_along(example, QKV)
        poisoned = {name: x.copy() for name, x in moving.tangents.items()}
        for name in "kv":
            poisoned[name][:, seen:] = np.nan
        same(push(run, moving), push(run, Moving(example, poisoned)))


@on_sim_and_gpu
def test_nan_and_infinities_reach_what_they_should(run: Run) -> None:
    q = k = v = np.ones((3, 4), np.float32)
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1]], bool)
    moved = np.zeros_like(q)
    moved[1] = np.nan

    def pushed(q: Any, **options: Any) -> tuple[Any, ...]:
        options = {name: put(run, x) if isinstance(x, (dict, np.ndarray)) else x for name, x in options.items()}
        values, dots = cuflash.attention_jvp(*map(run.put, (q, k, v)), **options, **run.options, return_lse=True)
        return tuple(map(run.get, (*values, *dots)))

    for name in ("q_dot", "k_dot", "v_dot"):
        _, _, o_dot, lse_dot = pushed(q, **{name: moved}, mask=mask)
        rows = [1] if name == "q_dot" else [1, 2]
        assert np.isnan(o_dot[rows]).all(), name
        assert not np.isnan(np.delete(lse_dot, rows)).any()
        assert np.isnan(lse_dot[rows]).all() == (name != "v_dot")
    _, lse, o_dot, lse_dot = pushed(q, q_dot=np.zeros_like(q), sink=np.array([np.nan], np.float32))
    assert np.isnan(lse).all() and np.isnan(o_dot).all() and np.isnan(lse_dot).all()
    first = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 1]], bool)
    assert not pushed(q, v_dot=moved, sink=np.ones(1, np.float32), mask=first)[2][0].any()
    infinite = np.array([-np.inf], np.float32)
    assert not pushed(q, tangents={"sink": -infinite}, sink=infinite)[2].any()
    hidden = np.where(np.eye(3) > 0, 0, -np.inf).astype(np.float32)
    dots = np.where(hidden == 0, 1, np.nan).astype(np.float32)
    assert np.isfinite(pushed(q, q_dot=q, bias=hidden, tangents={"bias": dots})[2]).all()
    lost = np.array([[-np.inf, 1, 1, 1], [1, 1, 1, 1]], np.float32)
    _, lse, o_dot, lse_dot = pushed(lost, q_dot=q[:2], k_dot=k)
    assert np.isneginf(lse[0]) and not o_dot[0].any() and lse_dot[0] == 0 and np.isfinite(lse_dot[1])


@on_sim_and_gpu
def test_grouped_heads_are_repeated_ones(run: Run) -> None:
    moving = moved_along(replace(FULL, dropout=None).example(), EVERY)
    repeated = {name: np.repeat(getattr(moving.example, name), 2, axis=-3) for name in "kv"}
    dots = {name: np.repeat(x, 2, axis=-3) if name in "kv" else x for name, x in moving.tangents.items()}
    same(push(run, moving), push(run, Moving(moving.example.but(**repeated), dots)))


@on_sim_and_gpu
def test_packed_sequences_are_one_call_each(run: Run) -> None:
    offsets = np.array([0, 30, 31, 90])
    example = Structure(num_heads=2, seqlen_q=90, seqlen_kv=90, mask=masks.Sequences(offsets, causal=True)).example()
    moving = moved_along(example, QKV)
    outputs = check(run, moving)
    for start, stop in zip(offsets, offsets[1:]):
        part = {name: getattr(example, name)[:, start:stop] for name in "qkv"}
        cut = replace(example, **part, do=None, dlse=None, mask=masks.Causal())
        alone = push(run, Moving(cut, {name: x[:, start:stop] for name, x in moving.tangents.items()}))
        for name in ("o_dot", "lse_dot"):
            bound = getattr(moving.bounds, name)[:, start:stop]
            assert_within(name, alone[name], outputs[name][:, start:stop], 2 * bound)


@sampled_on_simulator(on_sim_and_gpu, "dtype", ["float32", "float16"], 2)
def test_masks_of_every_kind_are_their_dense_mask(run: Run, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for mask in (
        masks.BlockPattern(rng.random((4, 7, 8)) < 0.6, 24) & masks.Dilated(2, align="top_left"),
        masks.BlockPattern(np.array([[1, 0, 1], [0, 1, 1], [0, 0, 0]], bool), (64, 64)),
        masks.SlidingWindow(50, 20, "top_left"),
        masks.Causal("bottom_right") & masks.Lengths(q=np.array([150, 60]), kv=np.array([130, 170])),
    ):
        example = Structure(
            **TWO, num_heads=4, num_kv_heads=2, seqlen_q=150, seqlen_kv=180, mask=mask, dtype=dtype
        ).example()  # fmt: skip
        check(run, moved_along(example, QKV))


@on_sim_and_gpu
@pytest.mark.parametrize(("dtype", "dims"), [("float16", (128, 128)), ("bfloat16", (64, 48)), ("float16", (136, 200))])
def test_wide_rows_are_within_their_bounds(run: Run, dtype: str, dims: tuple[int, int]) -> None:
    """Full tiles of 16-bit rows, and tiles of more than 128 columns."""
    sizes = {"seqlen_q": 140, "seqlen_kv": 200, "head_dim": dims[0], "value_dim": dims[1], "dtype": dtype}
    for mask in (None, masks.Causal("bottom_right")):
        check(run, moved_along(Structure(num_heads=2, num_kv_heads=1, mask=mask, **sizes).example(), QKV))


@on_sim_and_gpu
def test_powers_of_two_come_through_exactly(run: Run) -> None:
    moving = moved_along(FULL.example(), EVERY)
    once, scaled = push(run, moving), push(run, moving.scaled(2.0**-4))
    for name in ("o_dot", "lse_dot"):
        np.testing.assert_array_equal(scaled[name], 2.0**-4 * once[name], err_msg=name)


@on_sim_and_gpu
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0**40])
def test_scales_of_any_size_are_taken(run: Run, scale: float) -> None:
    small = 2.0**-40 if scale > 1 else 1.0
    example = Structure(num_heads=2, seqlen_q=40, seqlen_kv=50, scale=scale).example()
    example = example.but(q=(example.q * small).astype(np.float32))
    moving = moved_along(example, QKV)
    factors = {"q": small, "k": small, "v": 1}
    check(run, Moving(example, {name: x * np.float32(factors[name]) for name, x in moving.tangents.items()}))


@on_sim_and_gpu
def test_pushing_forward_is_dual_to_pulling_back(run: Run) -> None:
    moving = moved_along(FULL.example(), EVERY)
    example, outputs = moving.example, push(run, moving)
    pulled = run.everything(example)
    pairs = [(example.do, outputs["o_dot"], moving.bounds.o_dot)]
    pairs.append((example.dlse, outputs["lse_dot"], moving.bounds.lse_dot))
    for name, x in moving.tangents.items():
        pairs.append((-x, pulled[f"d{name}"], getattr(example.bounds, f"d{name}")))
    inner = [np.sum(np.float64(x) * np.float64(y)) for x, y, _ in pairs]
    assert abs(sum(inner)) <= 2 * sum(np.sum(np.abs(x) * bound) for x, _, bound in pairs)


@on_sim_and_gpu
def test_axes_that_do_not_fold_take_several_launches(run: Run) -> None:
    example = Structure(
        q_batch=(2, 2, 2, 2), k_batch=(2, 1, 2, 1), v_batch=(1, 2, 1, 2), num_heads=2, seqlen_q=20, seqlen_kv=30,
        sink=(2,), mask=masks.Causal("bottom_right"),
    ).example()  # fmt: skip
    check(run, moved_along(example, EVERY))


@on_sim_and_gpu
def test_calls_without_keys_have_tangents_of_zero(run: Run) -> None:
    example = Structure(num_heads=2, seqlen_q=5, seqlen_kv=0, sink=(2,)).example()
    moving = moved_along(example, EVERY)
    outputs = push(run, moving)
    assert not outputs["o_dot"].any()
    np.testing.assert_array_equal(outputs["lse_dot"], np.repeat(moving.tangents["sink"][:, None], 5, axis=1))


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_bits_do_not_depend_on_the_schedule(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    moving = moved_along(replace(FULL, dtype=dtype).example(), EVERY)
    expected = push(SIM, moving)
    for schedule in hostile_schedules(f"tangents {dtype}", 1):
        monkeypatch.setattr(simulated, "_SIMULATOR", Simulator(schedule))
        same(push(SIM, moving), expected)


# Kernels for Hopper


SM90 = (
    pytest.param(replace(SIM, kernel="sm90"), marks=needs_compiler),
    pytest.param(replace(GPU, kernel="sm90"), marks=pytest.mark.gpu(9, 0)),
)
on_hopper = pytest.mark.parametrize("run", SM90, ids=["sim", "gpu"])
HOPPER = replace(
    FULL, seqlen_q=200, seqlen_kv=270, head_dim=72, value_dim=100, dtype="float16", dropout=None,
    mask=masks.Dense(np.arange(200)[:, None] % 3 > 0) & masks.Causal("bottom_right"),
)  # fmt: skip
HOPPER_MASKS = {
    "full": None,
    "causal": masks.Causal("bottom_right"),
    "few keys": masks.Causal("top_left") & masks.Lengths(q=np.array([100, 200]), kv=np.array([30, 150])),
    "window": masks.Band(-30, 20),
    "list": masks.BlockPattern(np.array([[[1, 0, 1], [0, 0, 1]]] * 3 + [[[1, 1, 0], [0, 0, 0]]], bool), 128),
    "elements": masks.Dilated(3, align="top_left"),
}


def tiles_of(run: Run, mask: str) -> list[tuple[str, tuple[int, int], str]]:
    """Return dtypes, dims and layouts for both widths of tiles; a short run on the simulator has one for each mask."""
    every = [("float16", (128, 128), "contiguous"), ("bfloat16", (40, 64), "padded")]
    return every if run.is_on_device else sampled(every, 2, [*HOPPER_MASKS].index(mask) % 2)


@sampled_on_simulator(on_hopper, "name", HOPPER_MASKS, 3)
def test_sm90_tangents_are_within_their_bounds(run: Run, name: str) -> None:
    """Both widths of tiles; tangents whose strides differ from those of their arrays."""
    for dtype, dims, layout in tiles_of(run, name):
        sizes = {"head_dim": dims[0], "value_dim": dims[1], "dtype": dtype, "sink": None, "mask": HOPPER_MASKS[name]}
        check(run, moved_along(replace(HOPPER, **sizes).example(), QKV, layout=layout))


def with_zeros(run: Run, every: Moving, subsets: list[tuple[str, ...]]) -> Iterator[tuple[Moving, Moving]]:
    """Yield tangents of some arrays, without and with zeros for all others; a short run on the simulator has half."""
    for names in subsets if run.is_on_device else sampled(subsets, 2):
        own = {name: every.tangents[name] for name in names}
        full = {name: own.get(name, np.zeros_like(x)) for name, x in every.tangents.items()}
        yield Moving(every.example, own), Moving(every.example, full)


@on_hopper
def test_sm90_tangents_of_some_arrays_are_those_with_zeros(run: Run) -> None:
    every = moved_along(HOPPER.example(), EVERY)
    check(run, every)
    for own, full in with_zeros(run, every, [("v",), ("sink",), ("q",), ("k", "sink")]):
        same(push(run, own), push(run, full))


@on_hopper
def test_sm90_serves_few_queries_and_packed_sequences(run: Run) -> None:
    packed = masks.Sequences(np.array([0, 30, 31, 200]), causal=True)
    for lengths, mask in (((50, 270), None), ((200, 200), packed)):
        sizes = {"seqlen_q": lengths[0], "seqlen_kv": lengths[1], "sink": None, "mask": mask}
        check(run, moved_along(replace(HOPPER, **sizes).example(), QKV))


@on_hopper
def test_sm90_takes_axes_that_do_not_fold_and_tangents_that_are_repeated(run: Run) -> None:
    example = Structure(
        q_batch=(2, 2, 2), k_batch=(2, 1, 2), v_batch=(1, 2, 1), num_heads=2, seqlen_q=70, seqlen_kv=90, head_dim=64,
        value_dim=64, dtype="float16",
    ).example()  # fmt: skip
    moving = moved_along(example, QKV)
    dots = moving.tangents | {"q": np.broadcast_to(moving.tangents["q"][:1, :1, :1], example.q.shape)}
    check(run, Moving(example, dots))


@on_hopper
def test_sm90_keeps_a_drift_that_all_keys_share_exact(run: Run) -> None:
    mask = masks.Dense(np.arange(700) % 70 <= np.arange(60)[:, None])
    example = Structure(num_heads=2, seqlen_q=60, seqlen_kv=700, head_dim=16, dtype="float16", mask=mask).example()
    check(run, moved_along(example, {"k": "drift"}))


@needs_compiler
def test_bits_of_sm90_tangents_do_not_depend_on_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    run, moving = replace(SIM, kernel="sm90"), moved_along(HOPPER.example(), EVERY)
    expected = push(run, moving)
    for schedule in hostile_schedules("sm90 tangents"):
        monkeypatch.setattr(simulated, "_SIMULATOR", Simulator(schedule))
        same(push(run, moving), expected)


def test_sm90_leaves_other_calls_to_sm80() -> None:
    device, entries, seconds = DeviceSpec.gpu("H100"), {}, {}
    wide = ShapeDtype((8, 1000, 136), np.dtype(np.float16))
    lists = {size: masks.BlockPattern(np.ones((2, 2), bool), size) for size in (32, 512)}
    for name, (x, options) in {
        "plain": (HALF, {}), "wide": (wide, {}), "scored": (HALF, {"softcap": 9.0}),
        "dropped": (HALF, {"dropout": cuflash.Dropout(0.1, seed=1)}), "listed": (HALF, {"mask": lists[512]}),
    }.items():  # fmt: skip
        plan = cuflash.plan(x, x, x, device=device, kernel="sm90", tangents=("q", "k", "v"), **options)
        kernels = ("jvp", "backward_jvp_rows", "backward_jvp_columns")
        entries[name], *seconds[name] = (plan._plan.specs[entry].name.partition("_")[0] for entry in kernels)
    families = {"plain": "sm90", "listed": "sm90", "wide": "sm80", "scored": "sm80", "dropped": "sm80"}
    assert entries == families
    assert seconds == {name: [family] * 2 for name, family in (families | {"wide": "simt"}).items()}


# Tangents of gradients


def pull(run: Run, moving: Moving, **options: Any) -> dict[str, np.ndarray]:
    """Return the tangents of the gradients."""
    example = moving.example
    keywords = {"scale": example.scale, "score": example.score, "dropout": example.dropout}
    arrays = {"sink": example.sink, "dlse": example.dlse, **moving.of_call(has_gradients=True)}
    if example.sink is not None:
        keywords["wrt"] = "sink"
    if run.is_on_device and example.score is not None:
        captured = {name: run.put(x) for name, x in example.score.arrays.items()}
        keywords["score"] = cuflash.scores.Score._of_reserved(example.score.function, **captured)
    _, _, dots = cuflash.attention_hvp(
        *map(run.put, (example.q, example.k, example.v, example.do)), **keywords, **run.options,
        **{name: put(run, x) for name, x in arrays.items() if x is not None},
        mask=run.put_mask(example.mask, example.q, example.k, example.v), **options,
    )  # fmt: skip
    named = dict(zip(("dq_dot", "dk_dot", "dv_dot"), dots)) | {f"d{name}_dot": dots[name] for name in dots.others}
    return {name: run.get(x) for name, x in named.items()}


def check_gradients(run: Run, moving: Moving) -> None:
    """Assert that tangents of gradients are within their bounds."""
    moving = Moving(run.rounded(moving.example), moving.tangents)
    assert_tangents_within_bounds(moving, **pull(run, moving))


@on_sim_and_gpu
def test_tangents_of_gradients_are_within_their_bounds(run: Run) -> None:
    def agree_second(moving: Moving) -> None:
        check_gradients(run, moving)

    drawn = {"has_sink": True, "has_dropout": True}
    run.settings(given(movings(**(drawn if is_long() else dict(run.drawn) | drawn)))(agree_second))()


@sampled_on_simulator(on_sim_and_gpu, "dtype", ["float64", "float16"], 2, 1)
def test_tangents_of_gradients_have_every_feature(run: Run, dtype: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {"temperature": 1 + 0.3 * rng.standard_normal(4), "slope": 0.1 * rng.standard_normal(4)}
    score = cuflash.scores.Score(curved, **{name: x.astype(np.float32) for name, x in arrays.items()})
    example = replace(FULL, dtype=dtype).example().but(score=score)
    kinds = EVERY | dict.fromkeys(("temperature", "do", "dlse"), "normal")
    for names in (kinds, ("temperature",) if dtype == "float64" else ("v", "do")):
        check_gradients(run, moved_along(example, {name: kinds[name] for name in names}, layout="padded"))


@sampled_on_simulator(on_sim_and_gpu, "dtype", ["float32", "float16"], 2, 1)
def test_masks_of_every_kind_serve_second_derivatives(run: Run, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for mask in (
        masks.BlockPattern(rng.random((4, 7, 8)) < 0.6, 24) & masks.Dilated(2, align="top_left"),
        masks.SlidingWindow(50, 20, "top_left"),
        masks.Causal("bottom_right") & masks.Lengths(q=np.array([150, 60]), kv=np.array([130, 170])),
    ):
        example = Structure(
            **TWO, num_heads=4, num_kv_heads=2, seqlen_q=150, seqlen_kv=180, mask=mask, dtype=dtype
        ).example()  # fmt: skip
        for names in ("qkv", ("k", "do")) if dtype == "float32" else (("q", "k", "v", "do"),):
            check_gradients(run, moved_along(example, dict.fromkeys(names, "normal")))


@sampled_on_simulator(
    on_sim_and_gpu, "dtype, dims", [("float16", (128, 128)), ("bfloat16", (64, 48)), ("float16", (136, 20))], 2
)
def test_wide_rows_have_second_derivatives(run: Run, dtype: str, dims: tuple[int, int]) -> None:
    """Full tiles of 16-bit rows, and tiles of more than 128 columns."""
    sizes = {"seqlen_q": 140, "seqlen_kv": 200, "head_dim": dims[0], "value_dim": dims[1], "dtype": dtype}
    example = Structure(num_heads=2, num_kv_heads=1, mask=masks.Causal("bottom_right"), **sizes).example()
    check_gradients(run, moved_along(example, QKV | {"do": "normal"}))


@on_sim_and_gpu
def test_the_hessian_is_symmetric(run: Run) -> None:
    example = FULL.example()
    first, other = (moved_along(example, EVERY, seed=seed) for seed in (1, 2))
    products, off = [], 0.0
    for one, two in ((first, other), (other, first)):
        dots = pull(run, one)
        wide = {name: np.float64(x) for name, x in two.tangents.items()}
        products.append(sum(np.sum(np.float64(dots[f"d{name}_dot"]) * x) for name, x in wide.items()))
        off += sum(np.sum(getattr(one.bounds, f"d{name}_dot") * np.abs(x)) for name, x in two.tangents.items())
    assert abs(products[0] - products[1]) <= off


@on_sim_and_gpu
def test_rows_without_a_key_have_no_second_derivative(run: Run) -> None:
    """In such rows do and its tangent have no effect, even as NaN; for the sink's gradient only dlse_dot matters."""
    example = replace(FULL, dropout=None, mask=masks.Dense(ROWS)).example()
    moving = moved_along(example, EVERY | {"do": "normal", "dlse": "normal"})
    wanted = pull(run, moving)
    assert not wanted["dq_dot"][..., ::3, :].any()
    do, do_dot = example.do.copy(), moving.tangents["do"].copy()
    do[..., ::3, :] = do_dot[..., ::3, :] = np.nan
    outputs = pull(run, Moving(example.but(do=do), {**moving.tangents, "do": do_dot}))
    for name in ("dq_dot", "dsink_dot"):
        np.testing.assert_array_equal(outputs[name], wanted[name], err_msg=name)


@on_sim_and_gpu
def test_absent_tangents_of_gradients_are_zeros(run: Run) -> None:
    every = moved_along(FULL.example(), EVERY | {"do": "normal", "dlse": "normal"})
    for own, full in with_zeros(run, every, [("v", "dlse"), ("k", "sink"), ("q", "do")]):
        same(pull(run, own), pull(run, full))


@needs_compiler
def test_bits_of_second_derivatives_do_not_depend_on_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    moving = moved_along(FULL.example(), EVERY | {"do": "normal"})
    expected = pull(SIM, moving)
    for schedule in hostile_schedules("tangents of gradients"):
        monkeypatch.setattr(simulated, "_SIMULATOR", Simulator(schedule))
        same(pull(SIM, moving), expected)


@sampled_on_simulator(on_hopper, "name", HOPPER_MASKS, 3, 1)
def test_sm90_tangents_of_gradients_are_within_their_bounds(run: Run, name: str) -> None:
    """Both widths of tiles, without and with the tangent of do; tangents whose strides differ from those of arrays."""
    for dtype, dims, layout in tiles_of(run, name):
        sizes = {"head_dim": dims[0], "value_dim": dims[1], "dtype": dtype, "sink": None, "mask": HOPPER_MASKS[name]}
        kinds = QKV if dims[0] == 128 else QKV | {"do": "normal", "dlse": "normal"}
        check_gradients(run, moved_along(replace(HOPPER, **sizes).example(), kinds, layout=layout))


@on_hopper
def test_sm90_tangents_of_gradients_along_some_arrays_are_those_with_zeros(run: Run) -> None:
    every = moved_along(HOPPER.example(), EVERY | {"do": "normal", "dlse": "normal"})
    check_gradients(run, every)
    for own, full in with_zeros(run, every, [("k", "sink"), ("v", "dlse"), ("q", "do")]):
        same(pull(run, own), pull(run, full))


@on_hopper
def test_sm90_pulls_tangents_back_in_packed_sequences_and_few_queries(run: Run) -> None:
    packed = masks.Sequences(np.array([0, 30, 31, 200]), causal=True)
    for lengths, mask in (((50, 270), None), ((200, 200), packed)):
        sizes = {"seqlen_q": lengths[0], "seqlen_kv": lengths[1], "sink": None, "mask": mask}
        check_gradients(run, moved_along(replace(HOPPER, **sizes).example(), QKV | {"do": "normal"}))


@on_hopper
def test_sm90_pulls_tangents_back_along_axes_that_do_not_fold(run: Run) -> None:
    example = Structure(
        q_batch=(2, 2, 2), k_batch=(2, 1, 2), v_batch=(1, 2, 1), num_heads=2, seqlen_q=70, seqlen_kv=90, head_dim=64,
        value_dim=64, dtype="float16",
    ).example()  # fmt: skip
    moving = moved_along(example, QKV | {"do": "normal"})
    repeated = {name: np.broadcast_to(moving.tangents[name][:1, :1, :1], example.q.shape) for name in ("q", "do")}
    check_gradients(run, Moving(example, moving.tangents | repeated))


@on_hopper
@pytest.mark.parametrize("differentiate", [push, pull])
def test_sm90_ignores_tangents_of_absent_keys(run: Run, differentiate: Any) -> None:
    """Tangents of absent keys hold NaN, after sequences that are shorter and longer than a step of the kernel."""
    for length in (30, 150):
        structure = replace(HOPPER, value_dim=104, sink=None, mask=masks.Lengths(kv=length))  # rows that TMA can copy
        moving = moved_along(structure.example(), QKV)
        poisoned = {name: x.copy() for name, x in moving.tangents.items()}
        for name in "kv":
            poisoned[name][..., length:, :] = np.nan
        same(differentiate(run, moving), differentiate(run, Moving(moving.example, poisoned)))


@on_hopper
def test_sm90_rows_without_a_key_have_no_second_derivative(run: Run) -> None:
    mask = masks.Dense(np.arange(200)[:, None] % 3 > 0)
    example = replace(HOPPER, value_dim=104, sink=None, mask=mask).example()  # rows that TMA can copy
    moving = moved_along(example, QKV | {"do": "normal"})
    wanted = pull(run, moving)
    assert not wanted["dq_dot"][..., ::3, :].any()
    do, do_dot = example.do.copy(), moving.tangents["do"].copy()
    do[..., ::3, :] = do_dot[..., ::3, :] = np.nan
    same(pull(run, Moving(example.but(do=do), {**moving.tangents, "do": do_dot})), wanted)


@needs_compiler
def test_bits_of_sm90_second_derivatives_do_not_depend_on_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    run, moving = replace(SIM, kernel="sm90"), moved_along(HOPPER.example(), EVERY | {"do": "normal"})
    expected = pull(run, moving)
    for schedule in hostile_schedules("sm90 tangents of gradients"):
        monkeypatch.setattr(simulated, "_SIMULATOR", Simulator(schedule))
        same(pull(run, moving), expected)


# Plans


SHAPE = ShapeDtype((8, 1000, 64), np.dtype(np.float32))
HALF = ShapeDtype((8, 1000, 64), np.dtype(np.float16))


@needs_compiler
def test_a_plan_takes_tangents_that_it_was_not_planned_for() -> None:
    moving = moved_along(replace(FULL, dropout=None, sink=None).example(), QKV)
    example = moving.example
    arrays = example.q, example.k, example.v
    plain = cuflash.plan(*arrays, mask=example.mask, executor="sim")
    planned = cuflash.plan(*arrays, mask=example.mask, executor="sim", tangents=("q", "k", "v"))
    assert "simt_jvp" in planned.explain() and "simt_jvp" not in plain.explain()
    o, lse = plain.forward(*arrays)
    for ready in (plain, planned):
        for names in ("qkv", "v"):
            own = {name: x for name, x in moving.tangents.items() if name in names}
            o_dot, lse_dot = ready.jvp(*arrays, o, lse, **{f"{name}_dot": x for name, x in own.items()})
            same({"o_dot": o_dot, "lse_dot": lse_dot}, push(SIM, Moving(example, own)))


@pytest.mark.parametrize(("kernel", "counter"), [("sm90", 4), ("sm80", 0), ("simt", 0)])
def test_workspaces_are_two_numbers_for_each_query(kernel: Any, counter: int) -> None:
    """The tangent needs no workspace, and that of gradients delta and its tangent; a counter deals tiles to blocks."""
    arrays = [ShapeDtype((16, 8192, 128), np.dtype(np.float16))] * 3
    options: dict[str, Any] = {"device": DeviceSpec.gpu("H200"), "kernel": kernel, "causal": True}
    passes = cuflash.plan(*arrays, **options, tangents=("q", "k", "v"))._plan.passes
    assert passes["jvp"].nbytes == counter
    assert passes["backward_jvp"].nbytes == 2 * 4 * 16 * 8192 + counter


def test_precompile_compiles_what_tangents_names(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "Used 9 registers\n0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    monkeypatch.setattr(compiling, "_nvrtc", lambda spec, architecture: (b"", log))
    monkeypatch.setattr(compiling, "_compiled", {})
    options = {"device": DeviceSpec.gpu("A100"), "causal": True}
    names = [
        [each.spec.entry.name for each in cuflash.precompile(SHAPE, SHAPE, SHAPE, **options, **more)]
        for more in ({}, {"tangents": ("q", "v")})
    ]
    assert "jvp" in names[1] and "jvp" not in names[0]


@pytest.mark.parametrize(
    ("x", "options", "rule"),
    [
        (HALF, {"kernel": "fa1"}, "kernel='fa1' does not support tangents; got some: use kernel='auto'"),
        (SHAPE, {"kernel": "naive"}, "kernel='naive' does not support tangents; got some: use kernel='auto'"),
        (SHAPE, {"precision": "tf32"}, "precision='tf32' does not support tangents: use precision='ieee'"),
    ],
)
def test_what_has_no_kernel_is_refused(x: Any, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rule):
        cuflash.plan(x, x, x, device=DeviceSpec.gpu("H100"), tangents="q", **options)


def test_gradients_of_captured_arrays_have_no_second_kernel() -> None:
    x, bias = np.ones((2, 20, 8), np.float32), np.zeros((2, 20, 20), np.float32)
    with pytest.raises(UnsupportedProblem, match="wrt must not name 'bias' in second derivatives on a GPU"):
        cuflash.attention_hvp(x, x, x, x, x, bias=bias, wrt="bias", executor="sim")
