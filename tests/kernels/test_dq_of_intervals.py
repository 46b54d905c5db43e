"""dQ of row intervals and bands, where tiles of keys count their arrivals at queries in the sm90 family's gradients.

The first tile that arrives stores its part of dQ, and the last one may finish it. Results are right under every
schedule, in the simulator and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import pytest
from cuflash import masks
from cuflash.planning.families import sm90
from cuflash.planning.families.sm90_dq import ArrivalUse
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import (
    HALVES, Run, holds_for_examples, hostile_schedules, in_turn, needs_compiler, sampled_on_simulator,
)  # fmt: skip
from fused_dq import of_intervals, plans_of_its_own
from poison import call
from test_sm90 import ALIGNED, GPU90, SIM90, FewBlocks, half, on_sm90, plan_of, with_fewest_tiles


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_tiles_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0):
        yield


USES = (ArrivalUse.STORE, ArrivalUse.FINISH)
CUTS = {"cut": 0.0, "whole": inf}  # keys from which on backward tiles end with their sequences


@dataclass(frozen=True, eq=False)
class Chunks(masks.Mask):
    """A mask under which queries see chunks of keys that overlap, of more queries in each further head."""

    def intervals(self, b: Any, h: Any, i: Any) -> Any:
        first = i // (70 + 10 * h) * 50 + 0 * b
        return first, first + 160


def structures() -> dict[str, Structure]:
    heads = {"num_heads": 2, "num_kv_heads": 2}
    narrow, wide = {"head_dim": 64, "value_dim": 40}, {"head_dim": 128, "value_dim": 128}
    square = heads | {"seqlen_q": 520, "seqlen_kv": 520}
    sequences = masks.Sequences(np.array([5, 69, 69, 133, 400, 500]), causal=True, allow_gaps=True)
    return {
        "sequences": Structure(**square, **wide, mask=sequences),
        "long sequences": Structure(**square, **wide, mask=masks.Sequences(np.array([0, 20, 520]), causal=True)),
        "a sequence that ends in a tile": Structure(
            **square, **wide, mask=masks.Sequences(np.array([0, 300, 301, 520]), causal=True)
        ),
        # the numbers of a sequence's tiles are up to 50 more than those of multiples
        "a long sequence after 50 short ones": Structure(
            **heads, **wide, seqlen_q=400, seqlen_kv=400,
            mask=masks.Sequences(np.array([*range(0, 150, 3), 400]), causal=True),
        ),
        "of full sequences": Structure(
            **square, **wide, mask=masks.Sequences(np.array([0, 70, 200, 500]), allow_gaps=True)
        ),
        "sequences in a window": Structure(
            **square, **wide, mask=masks.Sequences(np.array([0, 90, 350, 520]), causal=True, window=(100, None))
        ),
        # 40 queries of the second sequence follow the first one's last tile, and in its slot queries of none
        "an end past the next sequence": Structure(
            **heads, **wide, seqlen_q=200, seqlen_kv=200,
            mask=masks.Sequences(np.array([3, 77, 117]), causal=True, allow_gaps=True),
        ),
        "chunks of keys": Structure(**square, **wide, mask=Chunks()),
        "chunks of heads that share keys": Structure(**square | {"num_kv_heads": 1}, **wide, mask=Chunks()),
        "grouped heads": Structure(**square | {"num_kv_heads": 1}, **wide, mask=sequences),
        "a window": Structure(**square, **wide, mask=masks.SlidingWindow(200, 0)),
        "a window of tiles": Structure(**square, **narrow, mask=masks.SlidingWindow(128, 128, "top_left")),
        "of each entry": Structure(
            **square, **narrow, q_batch=(2,), k_batch=(2,), v_batch=(2,),
            mask=masks.Sequences(np.array([[0, 64, 520], [0, 130, 140]]), allow_gaps=True),
        ),
        "of each entry and wide": Structure(
            **square, **wide, q_batch=(2,), k_batch=(2,), v_batch=(2,),
            mask=masks.Sequences(np.array([[0, 64, 520], [0, 130, 140]]), causal=True, allow_gaps=True),
        ),
        "not aligned": Structure(**square, head_dim=64, value_dim=33, layouts=("padded",) * 5, mask=sequences),
        "queries past all sequences": Structure(
            **heads, **wide, seqlen_q=330, seqlen_kv=300, mask=masks.Sequences(
                np.array([0, 100, 256]), np.array([0, 128, 300]), causal="bottom_right", allow_gaps=True
            ),
        ),
    }  # fmt: skip


STRUCTURES = structures()


@contextmanager
def cut_from(keys: float) -> Iterator[None]:
    """Tiles of sequences with so many keys on average end with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "LONG_SEQUENCE", keys)
        with plans_of_its_own():
            yield


def assert_all_right(
    example: Example, run: Run, use: ArrivalUse, machine: Any = None, margin: int = ALIGNED
) -> dict[str, Any]:
    with of_intervals(use):
        specs = plan_of(example, run).specs
        assert specs["backward"].counts_dq_arrivals and specs["backward_statistics"].counts_dq_arrivals
        finishes = use is ArrivalUse.FINISH
        assert specs["backward"].fuses_dq_epilogue == finishes == ("convert_dq" not in specs)
        found = call(example, run, machine, margin=margin)
    assert_within_bounds(example, **found)
    return found


@sampled_on_simulator(on_sm90, "name, cut, dtype, use", in_turn(STRUCTURES, CUTS, HALVES, USES), 3)
def test_gradients_are_within_their_bounds(run: Run, name: str, cut: str, dtype: str, use: ArrivalUse) -> None:
    example = half(STRUCTURES[name], dtype)
    with cut_from(CUTS[cut]):
        expects_cut = cut == "cut" and isinstance(example.mask, masks.Sequences | Chunks) and example.q.shape[-1] == 128
        with of_intervals(use):
            specs = plan_of(example, run).specs
        assert specs["backward"].cuts_sequences == specs["backward_statistics"].cuts_sequences == expects_cut
        # those of dK and dV add the same parts in the same order, whatever counts arrivals
        other = next(each for each in USES if each is not use) if expects_cut else ArrivalUse.NONE
        with of_intervals(other):
            expected = call(example, run, margin=ALIGNED)
        found = assert_all_right(example, run, use)
    assert all(found[each].tobytes() == expected[each].tobytes() for each in ("o", "lse", "dk", "dv"))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "cut", "use"), in_turn(["sequences", "a window", "grouped heads", "of full sequences"], CUTS, USES)
)
def test_gradients_are_within_their_bounds_under_every_schedule(name: str, cut: str, use: ArrivalUse) -> None:
    example = half(STRUCTURES[name])
    with cut_from(CUTS[cut]):
        for schedule in hostile_schedules(name):
            assert_all_right(example, SIM90, use, FewBlocks(schedule, most=1 + schedule.seed % 3))


def outside_poisoned(example: Example) -> Example:
    """Return the example with NaN in all that belongs to no sequence, and in tiles that hold ends of sequences too."""
    assert isinstance(example.mask, masks.Sequences)
    changed = {name: getattr(example, name).copy() for name in ("q", "k", "v", "do")}
    for each in changed.values():
        each[..., : example.mask.q_offsets[0], :] = each[..., example.mask.q_offsets[-1] :, :] = np.nan
    return example.but(**changed)


@on_sm90
@pytest.mark.parametrize(
    ("name", "cut", "use"), in_turn(["sequences", "an end past the next sequence"], CUTS, USES)
)
def test_what_belongs_to_no_sequence_never_matters(run: Run, name: str, cut: str, use: ArrivalUse) -> None:
    clean = half(STRUCTURES[name])
    with cut_from(CUTS[cut]), of_intervals(use):
        found = call(outside_poisoned(clean), run, margin=ALIGNED)
    assert_within_bounds(clean, **found)


@needs_compiler
@pytest.mark.parametrize("name", ["sequences", "of full sequences"])
def test_results_that_must_repeat_do_so_where_sequences_are_cut(name: str) -> None:
    """Forward, tiles end with sequences; backward, those kernels cut keys at multiples."""
    example, run = half(STRUCTURES[name]), replace(SIM90, deterministic=True)
    with cut_from(0):
        specs = plan_of(example, run).specs
        assert specs["forward"].cuts_sequences and not specs["backward"].cuts_sequences
        first = call(example, run, margin=ALIGNED)
        assert_within_bounds(example, **first)
        for schedule in hostile_schedules(name):
            found = call(example, run, FewBlocks(schedule, most=1 + schedule.seed % 3), margin=ALIGNED)
            assert all(found[each].tobytes() == first[each].tobytes() for each in found)


@holds_for_examples(on_sm90, longest=500, tile=128, most_rows=1200, most_scores=1 << 18, widest=128, max_leaves=2)
def test_drawn_masks_are_within_their_bounds(run: Run, example: Example) -> None:
    for keys in CUTS.values():
        for use in USES:
            with cut_from(keys), of_intervals(use):
                assert_within_bounds(example, **run.everything(example))


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_that_come_at_once_are_waited_for(dim: int, use: ArrivalUse) -> None:
    """There are more tiles of keys than the GPU works on at a time. All results but dQ repeat bit for bit."""
    mask = masks.Sequences(np.sort(np.random.default_rng(0).integers(0, 1025, 9)), causal=True, allow_gaps=True)
    example = half(Structure(num_heads=40, seqlen_q=1024, seqlen_kv=1024, head_dim=dim, value_dim=dim, mask=mask))
    first = assert_all_right(example, GPU90, use)
    for _ in range(20):
        found = assert_all_right(example, GPU90, use)
        assert all(found[each].tobytes() == first[each].tobytes() for each in ("o", "lse", "dk", "dv"))
