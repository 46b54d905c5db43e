"""The sm90 family: drawn examples, and all work lists at every width, in poisoned memory and under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cuflash.executors._records import View
from cuflash.executors.params import templates_of
from cuflash.planning.launches import Pass
from cuflash.planning import plan_cache
from cuflash.planning.plan import KernelPlan
from cuflash.executors.sim import Simulator
from cuflash.planning.families.sm90 import backward_specs
from cuflash.planning.spec import KernelSpec
from cuflash.executors.tensor_map import BoxedArray, simulated, template
from cuflash.testing import (
    FORWARD_PROPERTIES,
    PAIR_PROPERTIES,
    Example,
    Structure,
    assert_exact_probes,
    assert_within_bounds,
)
from cuflash.testing.properties import check_non_finite_values_reach_what_they_should
from executors import (
    GPU, HALVES, SIM, Run, holds_for_examples, hostile_schedules, in_turn, is_long, needs_compiler, sampled,
    sampled_on_simulator,
)  # fmt: skip
from fused_dq import by_last, on_few_processors, plans_of_its_own
from poison import MARGIN, STRUCTURES, Guarded, PoisonedGpu, call

import cuflash
from cuflash import DeviceSpec, UnsupportedProblem, masks, sim
from cuflash.executors.launch import run as run_pass
from cuflash.planning.families import sm90

SIM90, GPU90 = (replace(run, kernel="sm90") for run in (SIM, GPU))
on_sm90 = pytest.mark.parametrize(
    "run", [pytest.param(SIM90, marks=needs_compiler), pytest.param(GPU90, marks=pytest.mark.gpu(9, 0))], ids=str
)


@holds_for_examples(on_sm90)
def test_every_result_is_within_its_bound(run: Run, example: Example) -> None:
    assert_within_bounds(example, **run.everything(example))


@holds_for_examples(on_sm90)
def test_the_exact_probes_pass(run: Run, example: Example) -> None:
    assert_exact_probes(run.attend, example)


@contextmanager
def with_fewest_tiles(number: int) -> Iterator[None]:
    """Use large calls' tiles for calls with this many tiles per multiprocessor, and cut all packed sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "MIN_TILES_PER_PROCESSOR", number)
        patch.setattr(sm90, "LONG_SEQUENCE", 0)
        patch.setattr(sm90, "CUT_WIDTHS", {64, 128, 192, 256})
        with plans_of_its_own():
            yield


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_kernels_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0), by_last(finishes=False):
        yield


on_long = pytest.mark.parametrize(
    "run",
    [pytest.param(replace(each.values[0], drawn=(), most_examples=most), marks=each.marks)
     for each, most in zip(on_sm90.args[1], (8, 40))],
    ids=str,
)


@holds_for_examples(on_long, tile=128, longest=900, most_rows=500, max_leaves=2, widest=64)
def test_results_of_many_steps_are_within_their_bounds(run: Run, example: Example) -> None:
    """Only calls with many keys use tiles of four or three warpgroups, and have steps that need no mask."""
    for fewest in (0, 1 << 30):
        with with_fewest_tiles(fewest):
            o, lse = run.attend(example.q, example.k, example.v, mask=example.mask, scale=example.scale)
        assert_within_bounds(example, o=o, lse=lse)


@holds_for_examples(sampled_on_simulator(on_sm90, "check", FORWARD_PROPERTIES, 3, 2))
def test_forward(run: Run, example: Example, check: Any) -> None:
    check(run.attend, example)


OF_FINITE_OPERANDS = [check for check in PAIR_PROPERTIES if check is not check_non_finite_values_reach_what_they_should]


@pytest.mark.parametrize("check", OF_FINITE_OPERANDS, ids=lambda check: check.__name__.removeprefix("check_"))
@holds_for_examples(on_sm90, most_scores=1 << 13)
def test_both_passes(run: Run, example: Example, check: Any) -> None:
    check(run.attend, run.pull, example)


def test_a_failure_under_other_tiles_leaves_no_plan_behind() -> None:
    """A test that fails inside a patch leaves no plan in the cache, so later tests create their own plans."""
    for other in (with_fewest_tiles(1), by_last(finishes=True), on_few_processors()):
        with pytest.raises(ZeroDivisionError), other:
            planned(2, 300, 64)
            assert plan_cache._cached_plan.cache_info().currsize == 1
            raise ZeroDivisionError
        assert plan_cache._cached_plan.cache_info().currsize == 0


# Calls in poisoned memory.


def plan_of(example: Example, run: Run = SIM90) -> KernelPlan:
    return run.kernel_plan(example)


def on_two_blocks(plan: KernelPlan) -> KernelPlan:
    """Return the plan with only two thread blocks per kernel, which compute all tiles."""

    def limited(kernels: Pass) -> Pass:
        return replace(kernels, launches={x: replace(launch, max_blocks=2) for x, launch in kernels.launches.items()})

    limited_kernels = replace(
        plan.kernels, forward=limited(plan.kernels.forward), backward=limited(plan.kernels.backward)
    )
    return replace(plan, kernels=limited_kernels)


# kernels whose blocks take several tiles
GO_ON = ("sm90_forward", "sm90_forward_fp8", "sm90_backward", "sm90_backward_rows", "sm90_backward_wide")


@dataclass(frozen=True)
class FewBlocks(Simulator):
    """A simulator that gives each kernel at most `most` thread blocks, each of which takes several tiles."""

    most: int = 1

    def launch(self, spec: KernelSpec, grid: int, *rest: Any) -> None:
        super().launch(spec, min(grid, self.most) if spec.name in GO_ON else grid, *rest)


class FewBlocksGpu(PoisonedGpu):
    """A GPU that gives each kernel at most `most` thread blocks, each of which takes several tiles."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def launch(self, spec: KernelSpec, grid: int, *rest: Any) -> None:
        super().launch(spec, min(grid, self.most) if spec.name in GO_ON else grid, *rest)


ALIGNED = 8  # guard elements around each row, so that aligned rows start at multiples of 16 bytes


def forward(
    plan: KernelPlan, example: Example, machine: Any = None, run: Run = SIM90, margin: int = MARGIN
) -> dict[str, Any]:
    """Run the forward pass of a plan on guarded memory; return o and lse."""
    o = Guarded.of(plan.problem.o_shape(), plan.problem.dtype, run, margin)
    lse = Guarded.of(plan.problem.lse_shape(), plan.problem.accumulator, run, MARGIN)
    arrays = {name: run.put(getattr(example, name)) for name in "qkv"} | {"o": o.view, "lse": lse.view}
    run_pass(plan, plan.kernels.forward, machine or (PoisonedGpu() if run.is_on_device else Simulator()), arrays)
    return {"o": o.result("o", run), "lse": lse.result("lse", run)}


def half(structure: Structure, dtype: str = "float16") -> Example:
    return SIM90.rounded(replace(structure, dtype=dtype).example())


def has_own_backward(plan: KernelPlan) -> bool:
    return plan.specs["backward"].family == "sm90"


@sampled_on_simulator(on_sm90, "name", STRUCTURES, 8)  # test_sm90_two_walks runs others, and test_poison all
def test_poison_around_every_array_is_neither_read_nor_overwritten(run: Run, name: str) -> None:
    structure = STRUCTURES[name]
    example = half(structure, structure.dtype if structure.dtype in HALVES else "float16")
    plan = plan_of(example, run)
    # Blocks that finish dQ write 16-byte vectors; the library allocates results at multiples of 16 bytes.
    margin = ALIGNED if plan.specs["backward"].finishes_dq else MARGIN
    results = call(example, run, margin=margin) if has_own_backward(plan) else forward(plan, example, run=run)
    assert_within_bounds(example, **results)


def test_a_dq_of_rows_that_are_not_aligned_is_refused_where_kernels_finish_it() -> None:
    example = half(STRUCTURES["mask: a band"])
    with by_last(finishes=True):
        assert plan_of(example).specs["backward"].finishes_dq
        with pytest.raises(ValueError, match="dq's rows must start at multiples of 16 bytes"):
            call(example, SIM90, margin=2)


_DIMS = {"num_heads": 2, "seqlen_q": 330, "seqlen_kv": 270}
WIDE = {
    f"dims {head_dim} and {value_dim}, {kind}": Structure(**_DIMS, head_dim=head_dim, value_dim=value_dim, mask=mask)
    for head_dim, value_dim in (
        (32, 32), (64, 64), (80, 96), (128, 128), (192, 128), (64, 256), (256, 256), (192, 192), (200, 136), (129, 255),
    )
    for kind, mask in (("dense", None), ("causal", masks.Causal("bottom_right")))
}


@sampled_on_simulator(on_sm90, "name, dtype", in_turn(WIDE, HALVES), 5)  # other tests cover other widths
def test_every_width_is_within_its_bound(run: Run, name: str, dtype: str) -> None:
    example = half(WIDE[name], dtype)
    assert has_own_backward(plan_of(example, run))
    assert_within_bounds(example, **call(example, run, margin=ALIGNED))


def tile_structures() -> dict[str, Structure]:
    """Return structures whose blocks go from tile to tile, with arbitrary data past the end of a step."""
    rng = np.random.default_rng(0)
    square = {"num_heads": 4, "num_kv_heads": 2, "seqlen_q": 300, "seqlen_kv": 300}
    long = {"num_heads": 3, "num_kv_heads": 1, "seqlen_q": 900, "seqlen_kv": 900}
    dims = {"head_dim": 64, "value_dim": 40}
    return {
        "dense": Structure(**square, **dims),
        "few queries": Structure(**square | {"seqlen_q": 5}, **dims),
        "not aligned": Structure(**square, head_dim=33, value_dim=20),
        "padded": Structure(**square, **dims, layouts=("padded",) * 5),
        "v alone is not aligned": Structure(**square, head_dim=64, value_dim=33),
        "causal": Structure(**square, **dims, mask=masks.Causal()),
        "blocks of 100 x 88": Structure(
            **square, **dims, mask=masks.BlockPattern(rng.random((4, 3, 4)) < 0.6, (100, 88)) & masks.Causal()
        ),
        "blocks of 256": Structure(**square, **dims, mask=masks.BlockPattern(rng.random((2, 2)) < 0.7, 256)),
        "blocks of 64": Structure(**square, **dims, mask=masks.BlockPattern(rng.random((4, 5, 5)) < 0.4, 64)),
        "documents": Structure(**square, **dims, mask=masks.Documents(np.arange(300) // 70)),
        "bits of heads": Structure(**square, **dims, mask=masks.Dense(rng.random((4, 300, 300)) < 0.3)),
        "broadcast": Structure(
            q_batch=(2, 1, 3), k_batch=(1, 2, 1), v_batch=(3,), num_heads=2, num_kv_heads=1, seqlen_q=70, seqlen_kv=90,
            **dims,
        ),
        "documents, a launch for each of four": Structure(  # launches that share one tile counter
            q_batch=(2, 1, 2, 1, 2), k_batch=(1, 2, 1, 2, 1), num_heads=1, seqlen_q=70, seqlen_kv=70, **dims,
            mask=masks.Documents(np.arange(70) // 20),
        ),
        "every row without a key": Structure(**square, **dims, mask=masks.Lengths(kv=0)),
        # Tiles of three warpgroups, each of which attends different keys.
        "causal, long": Structure(**long | {"seqlen_kv": 1200}, **dims, mask=masks.Causal("bottom_right")),
        "a wide window": Structure(**long, **dims, mask=masks.SlidingWindow(700, 100)),
        "long documents": Structure(**long, **dims, mask=masks.Documents(np.arange(900) // 590)),
    }  # fmt: skip


TILES = tile_structures()


@needs_compiler
@pytest.mark.parametrize("name", sampled(TILES, 4))
def test_blocks_that_go_on_to_further_tiles_give_the_same_bits_under_every_schedule(name: str) -> None:
    example = half(TILES[name])
    expected = forward(plan_of(example), example)
    assert_within_bounds(example, **expected)
    plan = on_two_blocks(plan_of(example))
    for schedule in hostile_schedules(name, 1):
        results = forward(plan, example, Simulator(schedule))
        assert all(results[each].tobytes() == expected[each].tobytes() for each in expected), schedule


def of_dims(structure: Structure, dims: tuple[int, int] | None) -> Structure:
    """Return a structure with other dimensions, or unchanged if `dims` is None; odd dimensions stay odd."""
    if dims is None:
        return structure
    is_odd = structure.head_dim % 8 != 0
    return replace(structure, head_dim=dims[0] - is_odd, value_dim=dims[1] - is_odd)


NARROW_AND_WIDE = (None, (256, 200), (192, 136))  # original dimensions, and dimensions with tiles of 80 and 96 keys
narrow_and_wide = pytest.mark.parametrize("dims", NARROW_AND_WIDE)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dims"),
    sampled(in_turn(
        [
            "dense", "not aligned", "padded", "causal", "blocks of 256", "bits of heads", "broadcast",
            "every row without a key",
        ],
        NARROW_AND_WIDE,
    ), 2),
)  # fmt: skip
def test_gradients_are_within_their_bounds_under_every_schedule(name: str, dims: tuple[int, int] | None) -> None:
    example = half(of_dims(TILES[name], dims))
    assert has_own_backward(plan_of(example))
    for schedule in hostile_schedules(f"{name} {dims}", most=1):
        machine = FewBlocks(schedule, most=1 + schedule.seed % 3)
        assert_within_bounds(example, **call(example, SIM90, machine, margin=ALIGNED))


_GROWING = {"num_heads": 2, "seqlen_q": 200, "seqlen_kv": 640}
GROWING = {
    **{f"{dim} columns": Structure(**_GROWING, head_dim=dim, value_dim=dim) for dim in (64, 80, 128, 192, 256)},
    "64 columns, many keys": Structure(**_GROWING | {"seqlen_kv": 1700}, head_dim=64, value_dim=64),
    "blocks of 64": Structure(
        **_GROWING, head_dim=64, value_dim=64, mask=masks.BlockPattern(np.tri(4, 10, 7) > 0, 64)
    ),
    "negative scale": Structure(**_GROWING, head_dim=64, value_dim=64, scale=-0.125),
}


@sampled_on_simulator(on_sm90, "name, dtype", in_turn(GROWING, HALVES), 2)
def test_scores_may_grow_from_step_to_step(run: Run, name: str, dtype: str) -> None:
    """Some queries of some warps have weights that would be too large under the maxima of the previous steps."""
    clean = half(GROWING[name], dtype)
    query, key = np.arange(200), np.arange(clean.k.shape[-2])
    q = clean.q * np.where((query % 3 == 0) & (query // 16 % 3 > 0), 1, 0.01)[:, None]
    example = clean.but(q=q.astype(clean.q.dtype), k=(clean.k * 3.0 ** (key // 100 % 7)[:, None]).astype(clean.k.dtype))
    assert_within_bounds(example, **forward(plan_of(example, run), example, run=run))


@on_sm90
@pytest.mark.parametrize(("dim", "block"), in_turn([64, 80, 128, 192, 256], [128, 64]))
def test_queries_may_see_none_of_the_first_keys(run: Run, dim: int, block: int) -> None:
    """Some queries reach an unmasked step without a maximum, because previous steps hid all their keys."""
    query = np.arange(200)
    allowed = np.ones((200, 640), bool)
    allowed[(query % 3 == 0) & (query // 16 % 3 > 0), :128] = False
    allowed[32:48, :256] = False
    mask = masks.Dense(allowed) & masks.BlockPattern(np.ones((-(-200 // block), 640 // block), bool), block)
    example = half(Structure(**_GROWING, head_dim=dim, value_dim=dim, mask=mask))
    assert_within_bounds(example, **forward(plan_of(example, run), example, run=run))


SIZES = ((64, 640), (64, 1700), (128, 4400), (192, 640), (256, 640))  # head_dim and keys


@sampled_on_simulator(
    on_sm90, "dim, seqlen_kv, grows", [(*sizes, grows) for sizes in SIZES for grows in (False, True)], 3
)
def test_warpgroups_of_a_tile_may_have_different_last_keys(run: Run, dim: int, seqlen_kv: int, grows: bool) -> None:
    """Each warpgroup has its own mask. If scores grow, weights become too large in steps that some warpgroups mask."""
    causal = masks.Causal("bottom_right")
    example = half(Structure(seqlen_q=200, seqlen_kv=seqlen_kv, head_dim=dim, value_dim=dim, mask=causal))
    if grows:
        k = example.k * np.where(np.arange(seqlen_kv) < seqlen_kv - 128, 0.1, 6)[:, None]
        example = example.but(k=k.astype(example.k.dtype))
    assert_within_bounds(example, **forward(plan_of(example, run), example, run=run))


def assert_alike_keys_weigh_alike(dim: int, run: Run) -> None:
    """Assert that keys with equal, exact scores of up to 2^21 have equal weights.

    Error bounds cannot show this: they allow for the rounding of such large scores, and so for equally wrong weights.
    """
    clean = half(Structure(seqlen_q=130, seqlen_kv=384, head_dim=dim, value_dim=dim, scale=3e4))
    q, k, v = np.zeros_like(clean.q), np.ones_like(clean.k), np.full_like(clean.v, -1)
    q[..., :8] = 1 + np.arange(130)[:, None] * np.arange(3, 11) % 7
    v[..., 128:256, :] = 1
    example = clean.but(q=q, k=k, v=v)
    o = np.asarray(forward(plan_of(example, run), example, run=run)["o"], np.float32)
    assert np.abs(o + 1 / 3).max() < 2**-10


@on_sm90
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_keys_that_are_alike_weigh_alike_however_large_their_scores(run: Run, dim: int) -> None:
    assert_alike_keys_weigh_alike(dim, run)


@sampled_on_simulator(
    on_sm90, "dims, name",
    in_turn([None, (192, 136), (256, 200), (128, 128)], ["broadcast", "causal", "blocks of 256"]), 2,
)  # fmt: skip
def test_whichever_block_works_on_a_tile_all_but_dq_is_the_same(
    run: Run, name: str, dims: tuple[int, int] | None
) -> None:
    example = half(of_dims(TILES[name], dims))
    assert has_own_backward(plan_of(example, run))
    expected = call(example, run, margin=ALIGNED)
    for most in (1, 3):
        results = call(example, run, FewBlocksGpu(most) if run.is_on_device else FewBlocks(most=most), margin=ALIGNED)
        assert_within_bounds(example, **results)
        assert all(results[each].tobytes() == expected[each].tobytes() for each in ("o", "lse", "dk", "dv"))


def past_lengths(structure: Structure, dtype: str = "float16") -> tuple[Example, Example]:
    """Return an example with 290 queries and 190 keys, and the same one with NaN in the rows after them."""
    lengths = masks.Lengths(q=290, kv=190)
    example = half(replace(structure, mask=lengths if structure.mask is None else structure.mask & lengths), dtype)
    poisoned = {x: getattr(example, x).copy() for x in ("q", "k", "v", "do")}
    for x, end in (("q", 290), ("k", 190), ("v", 190), ("do", 290)):
        poisoned[x][..., end:, :] = np.nan
    return example, example.but(**poisoned)


@on_sm90
@pytest.mark.parametrize(("name", "dims"), in_turn(["dense", "not aligned", "causal"], NARROW_AND_WIDE))
def test_what_lies_past_a_length_never_matters_to_gradients(
    run: Run, name: str, dims: tuple[int, int] | None
) -> None:
    example, poisoned = past_lengths(of_dims(TILES[name], dims))
    assert has_own_backward(plan_of(example, run))
    assert_within_bounds(example, **call(poisoned, run, margin=ALIGNED))


@dataclass(frozen=True, eq=False)
class Ends(masks.Mask):
    """A mask under which query head h attends the first ends[h] keys, from its fifth query on."""

    ends: Any

    def intervals(self, b: Any, h: Any, i: Any) -> Any:
        return 0 * (b + h + i), self.ends[h] * (i >= 4) + 0 * b


@dataclass(frozen=True, eq=False)
class RowsOfHeads(masks.Mask):
    """A mask under which queries from starts[h] to stops[h] of query head h attend keys."""

    starts: Any
    stops: Any
    num_keys: int

    def intervals(self, b: Any, h: Any, i: Any) -> Any:
        return np.where(i < self.stops[h], 0, self.num_keys) + 0 * b, np.where(i < self.starts[h], 0, self.num_keys)


class KeysOfHeads(Ends):
    """A mask under which each query of head h attends the first ends[h] keys."""

    def intervals(self, b: Any, h: Any, i: Any) -> Any:
        return 0 * (b + h + i), self.ends[h] + 0 * (b + i)


@sampled_on_simulator(
    on_sm90, "seqlen_q, dims", in_turn([1024, 1, 8, 9, 10, 18, 72, 73, 81, 129, 162], NARROW_AND_WIDE), 4
)
def test_queries_that_see_keys_are_found_among_any_number(
    run: Run, seqlen_q: int, dims: tuple[int, int] | None
) -> None:
    starts, stops = np.minimum(np.linspace(0, seqlen_q, 20).astype(int), seqlen_q), np.full(20, seqlen_q)
    starts[10:], stops[10:] = 0, seqlen_q - np.arange(10) % (seqlen_q + 1)
    if seqlen_q == 1024:  # boundaries are the last query of each of eight parts with a ninth of the queries
        starts[:8], stops[10:18] = np.arange(113, 912, 114), np.arange(113, 912, 114)
    shape = {"num_heads": 20, "num_kv_heads": 20, "seqlen_q": seqlen_q, "seqlen_kv": 8}
    mask = RowsOfHeads(starts, stops, 8)
    example = half(of_dims(Structure(**shape, head_dim=32, value_dim=32, mask=mask), dims))
    assert has_own_backward(plan_of(example, run))
    assert_within_bounds(example, **call(example, run, margin=ALIGNED))


def heads_of_one_step(dims: tuple[int, int] | None) -> Structure:
    """Return a structure in which copy warps load K of every other head, and TMA loads all other K."""
    ends = KeysOfHeads(np.array([70, 128, 40, 128, 100, 128, 20, 128]))
    shape = {"num_heads": 8, "num_kv_heads": 1, "seqlen_q": 60, "seqlen_kv": 128, "head_dim": 64, "value_dim": 40}
    return of_dims(Structure(**shape, mask=ends), dims)


@on_sm90
@narrow_and_wide
def test_heads_that_share_keys_may_see_other_ones_of_them(run: Run, dims: tuple[int, int] | None) -> None:
    structure = replace(of_dims(TILES["dense"], dims), num_kv_heads=1, mask=Ends(np.array([130, 70, 300, 180])))
    clean = half(structure)
    assert has_own_backward(plan_of(clean, run))
    do = clean.do.copy()
    do[..., :4, :] = np.nan  # rows of queries without a key
    assert_within_bounds(clean, **call(clean.but(do=do), run, margin=ALIGNED))


def heads_without_a_step(dims: tuple[int, int] | None) -> Structure:
    """Return a structure with full tiles, in which the second head has no step for the second tile of keys."""
    ends = Ends(np.array([256, 70, 256, 256]))
    shape = {"num_heads": 4, "num_kv_heads": 1, "seqlen_q": 256, "seqlen_kv": 256, "head_dim": 64, "value_dim": 40}
    return of_dims(Structure(**shape, mask=ends), dims)


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "order", "dims"),
    sampled([
        (variant, *case) for variant in (heads_of_one_step, heads_without_a_step)
        for case in in_turn(["first_warp", "last_warp", "random", "priorities"], NARROW_AND_WIDE)
    ], 3),
)  # fmt: skip
def test_no_helper_is_a_head_ahead_of_another(variant: Any, order: Any, dims: tuple[int, int] | None) -> None:
    example = half(variant(dims))
    assert has_own_backward(plan_of(example))
    for seed in range(6 if is_long() else 2):
        schedule = sim.Schedule(seed=seed, order=order, copies="random")
        assert_within_bounds(example, **call(example, SIM90, Simulator(schedule), margin=ALIGNED))


class Watched(Simulator):
    """A simulator that compiles sm90 kernels with the watchdog that CUFLASH_CHECK enables."""

    def launch(self, spec: KernelSpec, *rest: Any) -> None:
        super().launch(replace(spec, has_watchdog=spec.family == "sm90"), *rest)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dims"), sampled(in_turn(["not aligned", "causal", "blocks of 100 x 88"], NARROW_AND_WIDE), 3)
)
def test_watched_kernels_count_every_lane_that_arrives(name: str, dims: tuple[int, int] | None) -> None:
    example = half(of_dims(TILES[name], dims))
    machine = Watched(sim.Schedule(order="random", copies="random"))
    assert_within_bounds(example, **call(example, SIM90, machine, margin=ALIGNED))


@sampled_on_simulator(
    on_sm90, "name, dtype", in_turn(["dense", "not aligned", "causal", "blocks of 100 x 88"], HALVES), 1
)
def test_what_lies_past_a_length_never_matters(run: Run, name: str, dtype: str) -> None:
    example, poisoned = past_lengths(TILES[name], dtype)
    clean, other = (forward(plan_of(example, run), each, run=run) for each in (example, poisoned))
    assert_within_bounds(example, **clean)
    assert all(clean[x].tobytes() == other[x].tobytes() for x in clean)


# Tensor maps.

BOXES = BoxedArray(np.dtype(np.float16), (1, 2, 4, 100, 64), (0, 51200, 12800, 128, 2), (1, 1, 1, 64, 64))


def test_a_map_is_its_template_with_another_address() -> None:
    tensor_map = template(simulated, BOXES)
    words = np.array(tensor_map.words, np.uint64)
    words[tensor_map.offset] = 1 << 20
    assert words.tobytes() == simulated(BOXES, 1 << 20).tobytes()


def test_a_driver_whose_maps_hide_their_address_is_refused() -> None:
    with pytest.raises(RuntimeError, match="addresses of tensor maps in an unknown format"):
        template(lambda tiles, address: np.full(16, address // 16, np.uint64).view("V128")[0], BOXES)


@pytest.mark.parametrize(
    ("layout", "mapped"),
    [("contiguous", {"q", "k", "v"}), ("odd_strides", {"q", "k", "v"}), ("padded", set()), ("negative", set())],
)
def test_arrays_that_hardware_can_walk_have_a_map(layout: str, mapped: set[str]) -> None:
    example = half(Structure(num_heads=2, seqlen_q=70, seqlen_kv=90, head_dim=64, value_dim=64, layouts=(layout,) * 5))
    plan = plan_of(example)
    views = tuple(View.of(name, getattr(example, name)) for name in ("q", "k", "v"))
    assert plan.kernels is not None
    (tensor_map,) = templates_of(plan, plan.kernels.forward, views, Simulator().tensor_map)
    maps = tensor_map["maps 0"]
    assert {name for _, name in maps.addresses} == mapped == {x for x in ("q", "k", "v") if maps.record[x]["is_valid"]}


# Choice and errors.


def planned(*shape: int, dtype: str = "float16", kernel: Any = "sm90", **options: Any) -> KernelPlan:
    x = cuflash.ShapeDtype(shape, dtype)
    return cuflash.plan(x, x, x, kernel=kernel, device=DeviceSpec.gpu("H100"), **options)._plan


def steps_taken(num_heads: int, heads_per_group: int, steps: list[int], num_blocks: int) -> np.ndarray:
    """Return how many steps each thread block takes if it always takes the next tile, longest first, once it is idle.

    Tiles are numbered as in attention/tile_scheduler.cuh.
    """
    taken = np.zeros(num_blocks, int)
    for first in range(0, num_heads, heads_per_group):
        for length in reversed(steps):
            for _ in range(min(heads_per_group, num_heads - first)):
                taken[taken.argmin()] += length
    return taken


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen, num_heads", [(1024, 256), (4096, 64), (16384, 16), (16384, 8), (200, 5)])
def test_blocks_of_a_causal_call_end_together(dim: int, seqlen: int, num_heads: int) -> None:
    plan = planned(num_heads, seqlen, dim, causal=True)
    spec = plan.specs["forward"]
    steps = [2 + -(-stop // spec.block_kv) for stop in range(seqlen, 0, -spec.block_q)][::-1]
    heads_per_group = plan.kernels.order.heads_per_group
    taken = steps_taken(num_heads, heads_per_group, steps, 132)
    assert taken.max() <= max(1.05 * taken.mean(), steps[-1])
    keys_and_values = 2 * seqlen * dim * 2
    assert heads_per_group <= 8 or heads_per_group * keys_and_values <= plan.device.cache_bytes / 3
    assert planned(num_heads, seqlen, dim).kernels.order.heads_per_group == 1  # all tiles have the same length


@pytest.mark.parametrize(("head_dim", "value_dim"), [(256, 256), (256, 192), (192, 192), (192, 128), (64, 256)])
@pytest.mark.parametrize("block", [64, 80, 96, 128, 160, 192, 256, 512, None])
def test_tiles_of_keys_are_even_parts_of_a_list_s_blocks(head_dim: int, value_dim: int, block: int | None) -> None:
    largest = None if block is None else (block, block)
    specs = backward_specs(np.dtype(np.float16), (head_dim, value_dim), largest, deterministic=False)
    block_kv = specs["backward"].block_kv
    assert block_kv in ((64,) if block is not None and block % 80 and block % 96 else (64, 80, 96))
    assert block is None or block_kv == 64 or block % block_kv == 0
    assert specs["backward"].shared_bytes <= DeviceSpec.gpu("H100").tile_memory_bytes


@pytest.mark.parametrize("chip", ["A100", "B200"])
def test_other_chips_are_refused(chip: str) -> None:
    x = cuflash.ShapeDtype((2, 300, 64), "float16")
    with pytest.raises(UnsupportedProblem, match=r"kernel='sm90' needs compute capability 9\.0"):
        cuflash.plan(x, x, x, kernel="sm90", device=DeviceSpec.gpu(chip))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="kernel='sm90' takes float16 or bfloat16; got float32"):
        planned(2, 300, 64, dtype="float32")
