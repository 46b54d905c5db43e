"""The kernel for few queries: when plans use it, and attention to keys and values in arrays of any layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuflash.executors.launch import run as run_pass
from cuflash.executors.sim import Simulator
from cuflash.planning.plan import KernelPlan
from cuflash.testing import Example, Structure, assert_within_bounds
from cuflash.testing.memory_layouts import LAYOUTS
from executors import SIM, Run, blocks_together, hostile_schedules, needs_compiler, on_sim_and_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import MARGIN, Guarded, PoisonedGpu
from test_score_kernels import Probe

import cuflash
from cuflash import DeviceSpec, masks

_TWO = {"q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
_FEW: dict[str, Any] = {
    **_TWO, "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 4, "seqlen_kv": 300, "head_dim": 24, "value_dim": 40,
    "dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class WindowsOfHeads(masks.Mask):
    """A mask under which each query head attends a different interval of keys."""

    def intervals(self, b: Any, h: Any, i: Any) -> tuple[Any, Any]:
        return 10 * h + 0 * (b + i), 100 + 40 * h + 0 * (b + i)


STRUCTURES = {
    "dense": Structure(**_FEW),
    "causal": Structure(**_FEW, mask=masks.Causal("bottom_right")),
    "causal, across steps": Structure(**{**_FEW, "seqlen_kv": 130}, mask=masks.Causal("bottom_right")),
    "causal, from the first key": Structure(**_FEW, mask=masks.Causal("top_left")),
    "window": Structure(**_FEW, mask=masks.SlidingWindow(70, 20, "bottom_right")),
    "more queries than keys": Structure(**{**_FEW, "seqlen_kv": 3}, mask=masks.Causal("bottom_right")),
    "no key": Structure(**_FEW, mask=masks.Band(400, None)),
    "lengths": Structure(**_FEW, mask=masks.Lengths(kv=np.array([0, 170]))),
    "lengths, causal": Structure(
        **_FEW, mask=masks.Lengths(q=np.array([3, 4]), kv=np.array([170, 1])) & masks.Causal("bottom_right")
    ),
    "documents": Structure(**_FEW, mask=masks.Documents(np.arange(4) // 2, np.arange(300) // 80)),
    "windows of each head": Structure(
        **{**_FEW, "num_kv_heads": 4},
        mask=WindowsOfHeads(),
    ),
    "one query of eight heads": Structure(**{**_FEW, "seqlen_q": 1, "num_heads": 8, "num_kv_heads": 1}),
    "strides of two": Structure(**_FEW, layouts=("odd_strides",) * 5),
    "columns first": Structure(**_FEW, layouts=("transposed",) * 5),
    "from the last element": Structure(**_FEW, layouts=("negative",) * 5),
    "padded rows": Structure(**_FEW, layouts=("padded",) * 5),
    "without heads": Structure(has_heads=False, seqlen_q=8, seqlen_kv=300, head_dim=8, value_dim=32, dtype="float16"),
    "axes that do not fold": Structure(
        q_batch=(2, 1, 3, 1), k_batch=(1, 2, 1, 2), v_batch=(2, 2, 1, 1), num_heads=2, num_kv_heads=1, seqlen_q=3,
        seqlen_kv=150, dtype="bfloat16", mask=masks.Causal("bottom_right"),
    ),
    "wide": Structure(**{**_FEW, "head_dim": 200, "value_dim": 256}),
    "scale of a negative sign": Structure(**_FEW, scale=-3.0, values="outliers"),
    "a scale far from 1": Structure(**_FEW, scale=1e36),
}  # fmt: skip
_DRAWN = ("causal", "causal, from the first key", "window", "no key")
_SCHEDULED = ("causal", "lengths, causal", "strides of two")


def planned(example: Example, run: Run = SIM) -> KernelPlan:
    return run.kernel_plan(example, kernel="auto", deterministic=False)


def takes_the_kernel(plan: KernelPlan) -> bool:
    return plan.specs["forward"].name == "sm80_few_queries"


def forward(example: Example, run: Run = SIM, machine: Any = None) -> tuple[Any, Any]:
    """Run a forward pass on guarded memory, with workspaces that hold NaN at first."""
    machine = machine or (PoisonedGpu() if run.is_on_device else Simulator())
    plan = planned(example, run)
    o = Guarded.of(plan.problem.o_shape(), plan.problem.dtype, run, MARGIN)
    lse = Guarded.of(plan.problem.lse_shape(), plan.problem.accumulator, run, MARGIN)
    arrays = {name: run.put(getattr(example, name)) for name in "qkv"} | {"o": o.view, "lse": lse.view}
    if example.sink is not None:
        arrays["sink"] = run.put(example.sink)
    run_pass(plan, plan.kernels.forward, machine, arrays)
    return o.result("o", run), lse.result("lse", run)


@on_sim_and_gpu
@pytest.mark.parametrize("name", STRUCTURES)
def test_results_are_within_their_bounds(run: Run, name: str) -> None:
    example = run.rounded(STRUCTURES[name].example())
    assert takes_the_kernel(planned(example, run))
    o, lse = run.attend(example.q, example.k, example.v, mask=example.mask, scale=example.scale)
    assert_within_bounds(example, o=o, lse=lse)
    if example.scale in (None, -3.0):
        again = forward(example, run)
        assert (again[0].tobytes(), again[1].tobytes()) == (o.tobytes(), lse.tobytes())


@st.composite
def drawn(draw: st.DrawFn) -> Example:
    """Draw the example of a call that uses the kernel for few queries."""
    group, kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 2))
    dims = st.integers(1, 8).map(lambda chunks: 8 * chunks)
    batches = draw(st.sampled_from([((), (), ()), ((2,), (2,), (1,)), ((2, 1), (1, 2), (2, 2))]))
    return Structure(
        **dict(zip(("q_batch", "k_batch", "v_batch"), batches)), num_heads=group * kv_heads, num_kv_heads=kv_heads,
        seqlen_q=draw(st.integers(1, 8 // group)), seqlen_kv=draw(st.integers(1, 400)), head_dim=draw(dims),
        value_dim=draw(dims), dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        mask=draw(st.sampled_from([None, *(each.mask for each in (STRUCTURES[name] for name in _DRAWN))])),
        layouts=tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(5)),
    ).example()  # fmt: skip


@on_sim_and_gpu
@settings(max_examples=15)
@given(example=drawn())
def test_any_call_that_takes_the_kernel_is_within_its_bounds(run: Run, example: Example) -> None:
    example = run.rounded(example)
    assert takes_the_kernel(planned(example, run))
    o, lse = run.attend(example.q, example.k, example.v, mask=example.mask, scale=example.scale)
    assert_within_bounds(example, o=o, lse=lse)


@on_sim_and_gpu
def test_a_sink_joins_the_softmax(run: Run) -> None:
    example = run.rounded(replace(STRUCTURES["lengths"], sink=(2, 4)).example())
    sink = run.put(example.sink)
    assert example.sink is not None
    o, lse = run.attention(example.q, example.k, example.v, mask=example.mask, sink=sink, return_lse=True)
    assert_within_bounds(example, o=o, lse=lse)


@needs_compiler
@pytest.mark.parametrize("name", _SCHEDULED)
def test_every_schedule_gives_the_same_bits(name: str) -> None:
    example = SIM.rounded(STRUCTURES[name].example())
    results = forward(example)
    for machine in (*map(Simulator, hostile_schedules(name)), *blocks_together(name)):
        assert all(x.tobytes() == y.tobytes() for x, y in zip(forward(example, machine=machine), results))


@on_sim_and_gpu
def test_keys_that_no_query_attends_never_matter(run: Run) -> None:
    example = run.rounded(STRUCTURES["lengths"].example())
    k, v = example.k.copy(), example.v.copy()
    k[0], v[0], k[1, :, 170:], v[1, :, 170:] = np.nan, np.inf, np.nan, np.inf
    results, again = forward(example, run), forward(example.but(k=k, v=v), run)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(results, again))


@on_sim_and_gpu
@pytest.mark.parametrize("mask", [None, masks.Lengths(kv=np.array([31, 600]))], ids=["dense", "lengths"])
def test_score_functions_know_positions(run: Run, mask: masks.Mask | None) -> None:
    probe = Probe("float16", mask, batch=(2,), heads=(4, 1), lengths=(2, 600))
    assert takes_the_kernel(cuflash.plan(probe.q, probe.k, probe.v, mask=mask, device=DeviceSpec.gpu("H100"))._plan)
    probe.check(probe.run_results(run, is_backward=False))


# Which plans use the kernel. Checks that are guards of planted faults take the library as an argument.


def plan_of(
    library: Any, rows: int = 1, dim: int = 64, dtype: Any = np.float16, batch: int = 2, **options: Any
) -> KernelPlan:
    shape = library.ShapeDtype
    q, k = shape((batch, 8, rows, dim), dtype), shape((batch, 2, 1000, dim), dtype)
    return library.plan(q, k, k, **{"device": library.DeviceSpec.gpu("H100"), **options})._plan


def other_calls(library: Any) -> dict[str, dict[str, Any]]:
    """Return the options of calls that the kernel does not support."""

    class Heads(library.masks.Mask):  # type: ignore[misc]
        intervals = WindowsOfHeads.intervals

    return {
        "too many rows": {"rows": 3},
        "a family's name": {"kernel": "sm80"},
        "dropout": {"dropout": library.Dropout(0.1, seed=0)},
        "float32": {"dtype": np.float32},
        "an odd head_dim": {"dim": 36},
        "a mask of each head": {"mask": Heads()},
        "a block list": {"mask": library.masks.Dilated(2, align="bottom_right")},
        "chosen blocks": {"mask": library.masks.ChosenBlocks(np.zeros((1, 2), np.int32), block=64)},
        "an old chip": {"device": library.DeviceSpec.gpu("T4")},
    }


def check_plans(library: Any) -> None:
    assert takes_the_kernel(plan_of(library))
    for name, options in other_calls(library).items():
        assert not takes_the_kernel(plan_of(library, **options)), name


def test_other_calls_take_other_kernels() -> None:
    check_plans(cuflash)


def check_rule(library: Any) -> None:
    """Check that a plan names the kernel, that it merges its own parts, and that gradients keep their kernels."""
    plan, by_name = plan_of(library), plan_of(library, kernel="sm80")
    assert "few queries" in plan.rule and "few queries" not in by_name.rule
    assert plan.kernels.backward.specs == by_name.kernels.backward.specs
    assert list(plan.kernels.forward.launches) == ["forward"]
    # enough tiles for all multiprocessors, although sm90's tiles would be nearly empty
    many = {"rows": 16, "batch": 64}
    plan, by_name = plan_of(library, **many), plan_of(library, **many, kernel="sm90")
    assert plan.rule.startswith("sm90") and "few queries: sm80_forward" in plan.rule
    assert plan.specs["forward"].is_split and plan.kernels.backward.specs == by_name.kernels.backward.specs
    assert plan_of(library, **many | {"rows": 17}).specs["forward"].name == "sm90_forward"


def test_the_rule_names_the_kernel_and_gradients_keep_theirs() -> None:
    check_rule(cuflash)


def check_parts(library: Any) -> None:
    """Check that the number of parts follows from the chip, the heads and the number of keys that a query attends."""
    for batch, keys, parts in ((1, 64, 1), (1, 65, 2), (1, 1 << 16, 64), (40, 1 << 16, 4), (300, 1 << 16, 1)):
        q, k = (library.ShapeDtype((batch, 2, length, 128), ml_dtypes.bfloat16) for length in (1, keys))
        plan = library.plan(q, k, k, device=library.DeviceSpec.gpu("H100"))._plan
        assert plan.kernels.num_splits == parts
        assert plan.kernels.forward.launches["forward"].grid(batch) == 2 * batch * parts
    window = plan_of(library, mask=library.masks.SlidingWindow(100, 0, "bottom_right"))
    assert window.kernels.num_splits == 2 < plan_of(library).kernels.num_splits


def test_parts_follow_from_the_chip_the_heads_and_the_keys() -> None:
    check_parts(cuflash)
