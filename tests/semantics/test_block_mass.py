"""Block masses equal those of the softmax in float64 on every executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from executors import CPU, DTYPES, SIM, Run, needs_compiler, on_every_executor, to_device
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from test_recall import EXACT, problems, tolerance, weights

import cuflash
from cuflash import DeviceSpec, masks
from cuflash.calls import _call
from cuflash.planning._call_cache import CALLS


def summed(p: Any, block: tuple[int, int]) -> Any:
    """Sum weights over each block's keys, and average over the block's queries that have a key."""
    (num_q, num_kv), (block_q, block_kv) = p.shape[-2:], block
    q_starts, kv_starts = range(0, num_q, block_q), range(0, num_kv, block_kv)
    sums = np.add.reduceat(np.add.reduceat(p, q_starts, axis=-2), kv_starts, axis=-1)
    has_key = (p > 0).any(-1)
    return sums / np.maximum(np.add.reduceat(has_key.astype(int), q_starts, axis=-1), 1)[..., None]


def masses(
    run: Run, q: Any, k: Any, *, mask: Any = None, lse: Any = None, library: Any = cuflash, **options: Any
) -> Any:
    lse = None if lse is None else run.put(lse)
    own_mask = run.put_mask(mask, q, k, k)
    options |= {"mask": own_mask, "lse": lse, "executor": run.executor}
    return run.get(library.study.block_mass(run.put(q), run.put(k), **options))


def check_masses(library: Any, run: Run, problem: Any, block: tuple[int, int]) -> None:
    q, k, v, mask, causal = problem
    lengths = q.shape[-2], k.shape[-2]
    elements = mask.toarray(*lengths, batch=q.shape[:-3], num_heads=q.shape[-3])
    allowed = np.broadcast_to(elements, (*q.shape[:-1], lengths[1]))
    if causal:
        allowed = allowed & library.masks.Causal(causal).toarray(*lengths)
    p = weights(q, k, allowed)
    mass, bound = masses(run, q, k, mask=mask, causal=causal, block=block), tolerance(q, k, EXACT, block)
    np.testing.assert_allclose(mass, summed(p, block), rtol=bound)
    rows = mass.sum(-1)
    assert np.logical_or(np.abs(rows - 1) <= bound, rows == 0).all()
    _, lse = library.attention(q, k, v, mask=mask, causal=causal, return_lse=True)
    again = masses(run, q, k, mask=mask, causal=causal, block=block, lse=lse)
    np.testing.assert_allclose(again, mass, rtol=2 * bound)


@on_every_executor
def test_masses_are_sums_of_the_softmax(run: Run) -> None:
    sides = st.sampled_from([1, 3, 8, 70])

    @run.settings
    @given(problems(), st.tuples(sides, sides))
    def check(problem: Any, block: tuple[int, int]) -> None:
        check_masses(cuflash, run, problem, block)

    check()


@on_every_executor
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_errs_by_what_its_sums_round(run: Run, dtype: str) -> None:
    """A weight's relative error is at most the sum of the errors of its score and of its row's lse."""
    rng = np.random.default_rng(1)
    element = np.dtype(bfloat16 if dtype == "bfloat16" else dtype)
    q, k = rng.standard_normal((2, 4, 150, 40)).astype(element), rng.standard_normal((2, 2, 133, 40)).astype(element)
    allowed = masks.Causal("bottom_right").toarray(150, 133)
    wide_q = q.astype(np.float64)
    mass = masses(run, q, k, block=(48, 32), causal="bottom_right")
    expected = summed(weights(wide_q, k.astype(np.float64), allowed), (48, 32))
    assert mass.dtype == (np.float64 if dtype == "float64" else np.float32)
    np.testing.assert_allclose(mass, expected, rtol=tolerance(q, k, np.finfo(mass.dtype).eps, (48, 32)))


HALVES = {
    "rows of one block and of several": {"shape": (150, 133, 40), "block": (48, 32), "causal": "bottom_right"},
    "whole tiles": {"shape": (130, 260, 64), "block": (128, 128)},
    "chunks of head_dim": {"shape": (200, 300, 200), "block": (16, 16), "causal": "top_left"},
    "blocks of odd sides, and a row of several tiles": {"shape": (200, 70, 32), "block": (150, 13)},
    "maxima that rise late": {"shape": (70, 260, 32), "block": (64, 128), "rise": 8},
    "a list of blocks": {"shape": (230, 300, 64), "block": (40, 200), "listed": 48},
    "a list of elements, and rows without a key": {"shape": (77, 100, 64), "block": (32, 24), "listed": 1},
    "blocks that each query chooses": {"shape": (77, 100, 64), "block": (32, 24), "chosen": 16},
}


@on_every_executor
@pytest.mark.parametrize("case", HALVES.values(), ids=HALVES)
def test_halves_have_the_masses_of_their_exact_scores(run: Run, case: dict[str, Any]) -> None:
    check_halves(run, **case)


@needs_compiler
@pytest.mark.parametrize("case", HALVES.values(), ids=HALVES)
def test_chips_before_hopper_have_these_masses(case: dict[str, Any]) -> None:
    check_on_chip("A100", **case)


@needs_compiler
@pytest.mark.parametrize("chip", ["A100", "H100"])
def test_thread_blocks_take_tiles_until_none_is_left(chip: str) -> None:
    check_on_chip(chip, num_processors=1, **HALVES["rows of one block and of several"])


def check_on_chip(chip: str, num_processors: int | None = None, **case: Any) -> None:
    """Check masses on a simulator of another chip, or of a chip with fewer multiprocessors."""
    device = replace(DeviceSpec.gpu(chip), name="simulator")
    device = device if num_processors is None else replace(device, num_processors=num_processors)
    CALLS.clear()  # which do not tell simulated chips apart
    with patch.object(_call, "_SIMULATED", device):
        check_halves(SIM, **case)
    CALLS.clear()


def check_halves(
    run: Run, shape: Any, block: Any, causal: Any = False, listed: int = 0, chosen: int = 0, rise: int = 1,
    library: Any = cuflash,
) -> None:  # fmt: skip
    """Check masses of 16-bit q and k within the rounding of scores and sums in float32.

    The masses are checked without an lse, and with an lse that corresponds to twice as many allowed weights.
    """
    (seqlen_q, seqlen_kv, dim), rng = shape, np.random.default_rng(6)
    q = (3 * rng.standard_normal((4, seqlen_q, dim))).astype(np.float16)
    k = rng.standard_normal((2, seqlen_kv, dim)).astype(np.float16)
    k[:, seqlen_kv // 2 :] *= rise
    allowed, mask = np.ones((4, seqlen_q, seqlen_kv), bool), None
    if listed or chosen:
        sides = (1, chosen) if chosen else (listed, listed)
        blocks = rng.random((4, *(-(-length // side) for length, side in zip((seqlen_q, seqlen_kv), sides)))) < 0.5
        blocks[:, 0] = False
        allowed = blocks.repeat(sides[0], axis=-2).repeat(sides[1], axis=-1)[:, :seqlen_q, :seqlen_kv]
        mask = library.masks.BlockPattern(blocks, listed) if listed > 1 else allowed
        if chosen:
            mask = library.BlockIndex.from_blocks(blocks, seqlen_q, seqlen_kv, sides).chosen()
    if causal:
        allowed = allowed & masks.Band(None, seqlen_kv - seqlen_q if causal == "bottom_right" else 0).toarray(
            seqlen_q, seqlen_kv
        )
    p = weights(q.astype(np.float64), k.astype(np.float64), allowed)
    relative = tolerance(q, k, np.finfo(np.float32).eps, block)
    options = {"block": block, "mask": mask, "causal": causal}
    mass = masses(run, q, k, library=library, **options)
    least = np.finfo(np.float32).tiny  # smaller masses are subnormal and rounded more coarsely
    np.testing.assert_allclose(mass, summed(p, block), rtol=relative, atol=least)
    assert np.logical_or(np.abs(mass.sum(-1) - 1) <= relative, mass.sum(-1) == 0).all()
    with np.errstate(divide="ignore"):
        scores = np.where(allowed, q.astype(float) @ k.astype(float).repeat(2, axis=0).swapaxes(-1, -2), -np.inf)
        lse = (np.logaddexp.reduce(scores * dim**-0.5, axis=-1) + np.log(2)).astype(np.float32)
    again = masses(run, q, k, lse=lse, library=library, **options)
    np.testing.assert_allclose(again, summed(p, block) / 2, rtol=relative, atol=least)


@on_every_executor
def test_head_dims_wider_than_a_tile_are_summed_in_chunks(run: Run) -> None:
    q, k = np.random.default_rng(2).standard_normal((2, 2, 70, 300))
    expected = summed(weights(q, k, np.ones((70, 70), bool)), (16, 16))
    np.testing.assert_allclose(masses(run, q, k, block=16), expected, rtol=tolerance(q, k, EXACT, (16, 16)))


@on_every_executor
def test_scores_change_masses_as_they_change_weights(run: Run) -> None:
    q, k = np.random.default_rng(3).standard_normal((2, 3, 50, 8))
    slope = run.put(np.array([0.5, 0.25, 0.125]))
    alibi = cuflash.scores.Score(lambda s, b, h, i, j, slope: s - slope[h] * (i - j), slope=slope)
    mass = masses(run, q, k, block=(10, 20), causal=True, score=alibi)
    i, j = np.ogrid[:50, :50]
    s = q @ k.swapaxes(-1, -2) * 8**-0.5 - run.get(slope)[:, None, None] * (i - j)
    e = np.exp(s) * (j <= i)
    # The score function rounds the number that it subtracts, of up to 25, and the difference.
    bound = tolerance(q, k, EXACT, (10, 20)) + 4 * EXACT * 25
    np.testing.assert_allclose(mass, summed(e / e.sum(-1, keepdims=True), (10, 20)), rtol=bound)


@pytest.mark.gpu
def test_calls_that_lie_alike_read_their_own_arrays() -> None:
    rng = np.random.default_rng(4)
    for _ in range(3):
        q, k = rng.standard_normal((2, 2, 40, 8))
        expected = summed(weights(q, k, np.tri(40, dtype=bool)), (8, 8))
        mass = cuflash.study.block_mass(to_device(q), to_device(k), block=8, causal=True).get()
        np.testing.assert_allclose(mass, expected, rtol=tolerance(q, k, EXACT, (8, 8)))


def test_rows_that_are_cut_in_two_by_a_tile_add_up() -> None:
    """Tiles of the host executor have 512 queries, so some blocks of 300 queries span two tiles."""
    q, k = np.random.default_rng(5).standard_normal((2, 1, 1100, 4))
    expected = summed(weights(q, k, np.ones((1100, 1100), bool)), (300, 64))
    np.testing.assert_allclose(masses(CPU, q, k, block=(300, 64)), expected, rtol=tolerance(q, k, EXACT, (300, 64)))


def test_nothing_to_attend_has_no_mass() -> None:
    q = np.ones((2, 4, 3))
    assert cuflash.study.block_mass(q, q[:, :0], block=2).shape == (2, 2, 0)
    assert (cuflash.study.block_mass(q, q, block=2, mask=~masks.Band()) == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 0}, "block must be an int of at least 1"),
        ({"block": (2, 2, 2)}, "block must be an int of at least 1"),
        ({"lse": np.ones((2, 3))}, r"lse must be on q's device, with shape \(2, 4\) and dtype float64"),
        ({"lse": np.ones((2, 4), np.float32)}, "lse must be on"),
        ({"k": np.ones((2, 4, 2))}, "k must have q's head_dim=3"),
        ({"q": np.ones((2, 4, 5000))}, r"head_dim\) must be 1..4096"),
        ({"q": np.ones((2, 4, 3), int)}, "q's dtype must be one of"),
        ({"q": np.ones((3, 4, 3))}, "q's 3 heads must be a multiple of k's 2"),
        ({"scale": 1e200}, "scale must have a magnitude from"),
        ({"scale": np.nan}, "scale must be a finite number"),
        ({"executor": "tpu"}, "executor must be"),
        ({"causal": "up"}, "causal must be"),
        ({"q": np.ones(3)}, r"q must have shape \(..., heads, seqlen, dim\)"),
    ],
)
def test_wrong_inputs_are_refused(changes: dict[str, Any], message: str) -> None:
    q = np.ones((2, 4, 3))
    with pytest.raises(cuflash.UnsupportedProblem, match=message):
        cuflash.study.block_mass(**{"q": q, "k": q, "block": 2} | changes)


@pytest.mark.parametrize("name", ["q", "k", "lse"])
def test_what_is_no_array_is_refused(name: str) -> None:
    q = np.ones((2, 4, 3))
    with pytest.raises(TypeError, match=rf"{name} must be an array; got \['a'\]"):
        cuflash.study.block_mass(**{"q": q, "k": q, "block": 2} | {name: ["a"]})


OPERANDS_THAT_DIFFER = {
    "axes of heads": ((4, 3), (2, 4, 3), float, "q and k must all have an axis of heads, or none of them; got q"),
    "a batch": ((3, 2, 4, 3), (5, 2, 4, 3), float, "the axes before heads of q and k must broadcast"),
    "dtypes": ((2, 4, 3), (2, 4, 3), np.float32, "q and k must share one dtype; got q float64, k float32"),
    "no axis of keys": ((2, 4, 3), (3,), float, "k must have shape (..., heads, seqlen, dim) or (seqlen, dim); got (3"),
}


@pytest.mark.parametrize("name", OPERANDS_THAT_DIFFER)
@pytest.mark.parametrize("call", [cuflash.study.block_mass, cuflash.selectors.pooled])
def test_errors_tell_of_q_and_k_alone_as_they_were_given(call: Any, name: str) -> None:
    of_q, of_k, dtype, reason = OPERANDS_THAT_DIFFER[name]
    options = {} if call is cuflash.study.block_mass else {"budget": cuflash.selectors.Budget(top_k=1)}
    with pytest.raises(cuflash.UnsupportedProblem) as caught:
        call(np.ones(of_q), np.ones(of_k, dtype), block=2, scale=np.inf, **options)
    reasons = [each for each in caught.value.reasons if not each.startswith("scale must be")]
    assert len(caught.value.reasons) == 2 and reasons[0].startswith(reason), caught.value.reasons


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(cuflash.UnsupportedProblem) as caught:
        cuflash.study.block_mass(np.ones((2, 4, 3)), np.ones((2, 4, 2)), block=0, scale=np.inf)
    assert len(caught.value.reasons) == 3
