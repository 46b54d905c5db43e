"""Guards for faults of the sm90 family, on the simulator: a fault gives a wrong number, or breaks a simulated rule.

The simulator itself reports a missing wait, or a wait that never ends. In these guards it runs thread blocks one after
another, so it cannot show that a block fails to wait for others: when the last block runs, all others have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from typing import Any

import numpy as np
from cuflash.executors.sim import Simulator
from cuflash.testing import Example, Structure, assert_within_bounds
from fused_dq import by_last, cut_from
from poison import MARGIN, call
from test_dq_finishing import BANDS as FINISHED
from test_dq_finishing import INTERVALS, WAYS, assert_all_right, outside_poisoned
from test_dq_finishing import LISTS as OF_LISTS
from test_sm90 import (
    ALIGNED, SIM90, TILES, Ends, FewBlocks, on_two_blocks, assert_alike_keys_weigh_alike, forward, half, plan_of,
    with_fewest_tiles,
)  # fmt: skip
from test_sm90_two_walks import (
    BANDS, LISTS, SIM_REPEATS, assert_queries_past_a_step_never_matter, assert_what_lies_past_a_length_never_matters,
)  # fmt: skip

from cuflash import masks, sim

SIGNS = (AssertionError, sim.SimulationError)  # exceptions with which a guard reports a fault


def structures() -> list[Structure]:
    """Return structures for several kernels of the forward pass.

    Two kernels have 128 columns, one of them with a list; one has a single slot for Q; one has three warpgroups, the
    first of which attend no key in a tile's last steps.
    """
    rng = np.random.default_rng(0)
    square = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_kv": 300, "head_dim": 128}
    return [
        Structure(**square | {"num_heads": 4, "num_kv_heads": 2}, value_dim=104, mask=masks.Lengths(q=290, kv=290)),
        Structure(
            **square | {"head_dim": 100}, value_dim=100, mask=masks.Causal(), scale=-0.5, layouts=("odd_strides",) * 5
        ),
        Structure(**square, value_dim=128, scale=-0.1),
        Structure(
            **square | {"seqlen_q": 70}, q_batch=(2, 1), k_batch=(1, 3), v_batch=(3,), value_dim=128,
            mask=masks.Lengths(kv=np.array([[300, 0, 200], [40, 300, 0]])),
        ),
        Structure(
            **square, value_dim=128, mask=masks.BlockPattern(rng.random((3, 4)) < 0.6, (100, 88)), values="outliers"
        ),
        Structure(**square | {"seqlen_q": 60, "seqlen_kv": 200}, value_dim=128, scale=1e9),
        Structure(
            num_heads=2, num_kv_heads=1, seqlen_q=160, seqlen_kv=400, head_dim=136, value_dim=168,
            mask=masks.Lengths(q=150), values="outliers",
        ),
        Structure(**square | {"seqlen_q": 60}, value_dim=128, mask=masks.Lengths(kv=40)),
        Structure(seqlen_q=272, seqlen_kv=272, head_dim=64, value_dim=64, mask=masks.Causal()),
        Structure(**square, value_dim=128, mask=masks.SlidingWindow(70, 20)),
        Structure(seqlen_q=1, seqlen_kv=40, head_dim=128, value_dim=100),
        Structure(
            num_heads=3, seqlen_q=500, seqlen_kv=768, head_dim=40, value_dim=64, mask=masks.Causal("bottom_right")
        ),
    ]  # fmt: skip


def started_oddly(x: Any) -> Any:
    """Return an equal array that starts 8 bytes after a multiple of 16, with a row stride that may be one."""
    wider = np.zeros((*x.shape[:-1], x.shape[-1] + 16), x.dtype)
    start = (8 - wider.ctypes.data) % 16 // 2
    wider[..., start : start + x.shape[-1]] = x
    return wider[..., start : start + x.shape[-1]]


def hostile_schedules(shuffled: int = 0) -> Iterator[tuple[int, sim.Schedule]]:
    """Yield three schedules with their seeds; lanes are shuffled if the seed is less than `shuffled`."""
    for seed, order in enumerate(("random", "last_warp", "first_warp")):
        copies: Any = "late" if order == "last_warp" else "random"
        yield seed, sim.Schedule(seed=seed, order=order, copies=copies, shuffle_lanes=seed < shuffled)


@cache
def cleaned(structures: Callable[[], list[Structure]]) -> list[Example]:
    """Return examples of structures, with their exact results, created once for all edits."""
    return [half(structure) for structure in structures()]


@cache
def with_plain_steps() -> list[Example]:
    """Return examples with unmasked steps, one of them after a step in which some queries attend nothing.

    Scores grow, stay equal, grow large, are large at first, or are too large in steps that some warpgroups mask.
    """
    square, examples = {"num_heads": 1, "seqlen_q": 130, "seqlen_kv": 384, "head_dim": 128, "value_dim": 128}, []
    for scale, first, other in ((0.1, 0.1, 4), (0.1, 1, 1), (400, 0.05, 2), (400, 2, 0.05)):
        clean = half(Structure(**square, scale=scale))
        k = clean.k * np.where(np.arange(384) < 128, first, other)[:, None]
        examples.append(clean.but(k=k.astype(clean.k.dtype)))
    for length in (640, 1700):  # lengths for tiles of four and of three warpgroups
        late = Structure(seqlen_q=200, seqlen_kv=length, head_dim=64, value_dim=64, mask=masks.Causal("bottom_right"))
        clean = half(late)
        # the factor is large in steps that are masked
        k = clean.k * np.where(np.arange(length) < length - 128, 0.1, 6)[:, None]
        examples.append(clean.but(k=k.astype(clean.k.dtype)))
    allowed = np.ones((130, 384), bool)
    allowed[::3, :128] = False
    return [*examples, half(Structure(**square, mask=masks.Dense(allowed)))]


@cache
def with_large_lse() -> list[Example]:
    """Return examples with large lse in the last 128 queries, which only the second copy warp detects.

    Steps have 128 or 64 queries, and the mask hides keys only in the first 128 queries. lse is either so large that any
    P would be within bounds, or just large enough.
    """
    examples, query, causal = [], np.arange(512), masks.Causal("top_left")
    for head_dim, scale in ((64, 1e9), (64, 1e3), (128, 1e3)):
        clean = half(Structure(seqlen_q=512, seqlen_kv=128, head_dim=head_dim, value_dim=40, scale=scale, mask=causal))
        q = clean.q.copy()
        q[..., (query < 384) | (query % 64 < 32), :] = 0
        examples.append(clean.but(q=q))
    return examples


@with_fewest_tiles(0)
@by_last(finishes=False)
def forward_is_right() -> None:
    """Check blocks that go through several tiles, out of order, with NaN past the keys' length."""
    for dim in (128, 192):
        assert_alike_keys_weigh_alike(dim, SIM90)
    for number, clean in enumerate(cleaned(structures) + with_plain_steps()):
        example = clean
        if number in (0, 7):
            v = clean.v.copy()
            v[..., 290 if number == 0 else 40 :, :] = np.nan
            example = clean.but(v=v)
        if number == 2:
            example = clean.but(k=started_oddly(clean.k), v=started_oddly(clean.v))
        plan = on_two_blocks(plan_of(example))
        for seed, schedule in hostile_schedules():
            margin = ALIGNED if seed else MARGIN
            machine = Simulator(schedule, time_limit=5)  # with a fault, a block may request tiles forever
            assert_within_bounds(clean, **forward(plan, example, machine, margin=margin))


def backward_structures() -> list[Structure]:
    """Return small structures with several steps: both heights of query tiles, and a list."""
    square = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_kv": 150}
    rng = np.random.default_rng(0)
    sees = np.arange(300)[:, None] // 10 % 3 > 0  # the other queries attend no key, in every tile of queries
    return [
        Structure(**square, head_dim=128, value_dim=104, mask=masks.Causal("bottom_right")),
        Structure(
            **square, q_batch=(2,), k_batch=(1,), v_batch=(1,), head_dim=64, value_dim=40,
            mask=masks.Lengths(q=290, kv=np.array([140, 100])),
        ),
        Structure(**square, head_dim=33, value_dim=20, mask=masks.Dense(rng.random((2, 300, 150)) < 0.3)),
        Structure(**square | {"num_heads": 8, "seqlen_q": 60}, head_dim=64, value_dim=40),  # heads with one step each
        Structure(
            num_heads=6, num_kv_heads=6, seqlen_q=60, seqlen_kv=600, head_dim=64, value_dim=40,
            # keys that no query attends, and empty tiles
            mask=masks.BlockPattern(np.array([[True, False, True]]), 256),
        ),
        Structure(
            q_batch=(2, 1, 3), k_batch=(1, 2, 1), v_batch=(3,), num_heads=1, seqlen_q=20, seqlen_kv=140, head_dim=64,
            value_dim=40,
        ),  # needs several launches
        Structure(**square | {"seqlen_q": 140}, head_dim=128, value_dim=104, mask=Ends(np.array([130, 70]))),
        Structure(
            num_heads=1, seqlen_q=300, seqlen_kv=400, head_dim=64, value_dim=40,
            mask=masks.SlidingWindow(left=50, right=0, align="top_left"),
        ),  # no query attends the last keys
        Structure(**square, head_dim=64, value_dim=64, mask=masks.Dense(sees & (rng.random((300, 150)) < 0.7))),
        Structure(
            **square, head_dim=64, value_dim=40, mask=masks.BlockPattern(np.array([[1, 1], [0, 0], [1, 0]], bool), 128)
        ),  # no tile of keys visits the middle queries
    ]  # fmt: skip


@with_fewest_tiles(0)
@cut_from(inf)
@by_last(finishes=False)
def gradients_are_right() -> None:
    """Check steps at multiples of their size, with NaN in queries without a key, unseen keys, and past the lengths."""
    for number, clean in enumerate(cleaned(backward_structures) + with_large_lse()):
        changed = {x: getattr(clean, x).copy() for x in ("q", "k", "v", "do")}
        if number == 0:
            changed["do"][..., :150, :] = np.nan
        if number == 1:
            for x, end in (("q", 290), ("k", 140), ("v", 140), ("do", 290)):
                changed[x][..., end:, :] = np.nan
        if number == 7:
            for x in ("k", "v"):
                changed[x][..., 300:, :] = np.nan
        if number == 8:
            for x in ("q", "do"):
                changed[x][..., np.arange(300) // 10 % 3 == 0, :] = np.nan
        for seed, schedule in hostile_schedules(shuffled=2):
            machine = FewBlocks(schedule, most=1 + seed)
            assert_within_bounds(clean, **call(clean.but(**changed), SIM90, machine, margin=ALIGNED))


def wide_structures() -> list[Structure]:
    """Return structures with one stage of dO and two, shared panels, a list, and heads that attend different keys."""
    square = {"num_heads": 2, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_kv": 150}
    rng = np.random.default_rng(0)
    return [
        Structure(**square, head_dim=256, value_dim=200, mask=masks.Causal("bottom_right")),
        Structure(
            **square | {"seqlen_q": 140}, q_batch=(2,), k_batch=(1,), v_batch=(1,), head_dim=192, value_dim=131,
            mask=masks.Lengths(q=130, kv=np.array([140, 100])),
        ),
        Structure(
            **square | {"seqlen_q": 100}, head_dim=250, value_dim=130, mask=masks.Dense(rng.random((2, 100, 150)) < 0.3)
        ),
        Structure(**square | {"seqlen_q": 140}, head_dim=192, value_dim=128, mask=Ends(np.array([130, 70]))),
    ]  # fmt: skip


@with_fewest_tiles(0)
@by_last(finishes=False)
def wide_gradients_are_right() -> None:
    """Check results with NaN in queries without a key, and past the lengths."""
    for number, clean in enumerate(cleaned(wide_structures)):
        changed = {x: getattr(clean, x).copy() for x in ("q", "k", "v", "do")}
        if number == 0:
            changed["do"][..., :150, :] = np.nan
        if number == 1:
            for x, end in (("q", 130), ("k", 140), ("v", 140), ("do", 130)):
                changed[x][..., end:, :] = np.nan
        for seed, schedule in hostile_schedules():
            machine, margin = FewBlocks(schedule, most=1 + seed), ALIGNED if seed else MARGIN
            assert_within_bounds(clean, **call(clean.but(**changed), SIM90, machine, margin=margin))


def _all_are_right(way: str, structures: Iterable[Structure]) -> None:
    """Check a way to share or finish dQ with few thread blocks that run out of order."""
    for number, structure in enumerate(structures):
        example = half(structure)
        for seed, schedule in hostile_schedules():
            assert_all_right(way, example, SIM90, FewBlocks(schedule, most=1 + (seed + number) % 3))


def finished_gradients_are_right() -> None:
    names = ("dense", "causal, 128 columns", "more keys", "a launch for each of two", "grouped heads, dense")
    _all_are_right("order", [FINISHED[name] for name in names])


def gradients_of_lists_are_right() -> None:
    _all_are_right("lists", OF_LISTS.values())


def gradients_of_intervals_are_right() -> None:
    cases = {
        "queries past all sequences": "whole", "a window of tiles": "whole", "sequences": "whole",
        "a sequence that ends in a tile": "cut, adding",
    }  # fmt: skip
    for number, (name, way) in enumerate(cases.items()):
        assert_all_right(way, half(INTERVALS[name]), SIM90, FewBlocks(sim.Schedule(seed=number), most=2))


def gradients_of_cut_sequences_are_right() -> None:
    """Check results with NaN in rows outside all sequences."""
    names = (
        "sequences", "an end past the next sequence", "sequences in a window", "of each entry and wide",
        "queries past all sequences", "chunks of keys", "chunks of heads that share keys",
        "a long sequence after 50 short ones",
    )  # fmt: skip
    for (number, name), way in product(enumerate(names), ("cut", "cut, adding")):
        clean = half(INTERVALS[name])
        example = outside_poisoned(clean) if number < 2 else clean
        with WAYS[way].plans():
            results = call(example, SIM90, FewBlocks(sim.Schedule(seed=number), most=2), margin=ALIGNED)
        assert_within_bounds(clean, **results)


def structures_of_two_walks() -> list[Structure]:
    names = ("causal", "not aligned", "broadcast", "a wide window", "every row without a key", "documents")
    lists = ("blocks of 64, 128 columns", "blocks of 64, not aligned", "blocks of 64, bits", "blocks of 100")
    # Rows of dO are copied by threads, and are longer than those of Q.
    negative = replace(BANDS["causal"], scale=-0.125, head_dim=33, value_dim=41)
    return [*(BANDS[name] for name in names), *(LISTS[name] for name in lists), negative]


def gradients_in_two_walks_are_right() -> None:
    for kv in (190, 40):
        assert_what_lies_past_a_length_never_matters(TILES["dense"], SIM_REPEATS, kv=kv)
    for number, structure in enumerate(structures_of_two_walks()):
        example = half(structure)
        for seed, schedule in hostile_schedules():
            machine, margin = FewBlocks(schedule, most=1 + (seed + number) % 3), ALIGNED if seed else MARGIN
            assert_within_bounds(example, **call(example, SIM_REPEATS, machine, margin=margin))
    assert_queries_past_a_step_never_matter(SIM_REPEATS)
