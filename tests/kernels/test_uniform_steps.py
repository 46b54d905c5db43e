"""The sm90 kernels read a table once for a whole warp's tile if the clipped distance is the same throughout it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from cuflash.masks.shape import MaskShape
from cuflash.scores.program import depends
from cuflash.scores.uniform import of_distance, uniform
from cuflash.scores.values import Operands, run as evaluated
from cuflash.testing import Structure, assert_within_bounds
from cuflash.testing.formulas import formulas
from executors import Run, is_long
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scores import everything
from test_sm90 import on_sm90

import cuflash
from cuflash import masks, scores
from cuflash.scores import Score

TABLE = np.random.default_rng(2).standard_normal((2, 9)).astype(np.float32)
NEAR = Score(lambda s, b, h, i, j, near: s + near[h, np.clip(j - i, -4, 4) + 4], near=TABLE)


def check_directions(library: Any) -> None:
    """Check which index expressions of functions with a table of 100 elements are monotone, and in which directions."""
    module = importlib.import_module(f"{library.__name__}.scores.uniform")

    def program(index: Any) -> Any:
        table = np.zeros(100, np.float32)
        return library.scores.Score(lambda s, b, h, i, j, table: s + table[index(h, i, j)], table=table).program

    def directions(index: Any) -> list[tuple[int, int]]:
        return sorted(map(tuple, module.uniform(program(index)).roots.values()))

    def is_distance(index: Any) -> bool:
        instructions = program(index).instructions
        (load,) = (n for n, each in enumerate(instructions) if each.op == "load")
        return load in module.of_distance(program(index))

    assert directions(lambda h, i, j: np.clip(j - i, 0, 9)) == [(-1, 1)]
    assert directions(lambda h, i, j: np.clip(3 * i - -2 * j, 0, 9)) == [(1, 1)]
    assert directions(lambda h, i, j: np.minimum((i + j) // 4, 9)) == [(1, 1)]
    assert directions(lambda h, i, j: np.maximum(i, j)) == [(1, 1)]
    assert directions(lambda h, i, j: h + np.clip(-(i - j), 0, 3)) == [(-1, 1)]
    assert directions(lambda h, i, j: 10 * np.clip(i + j, 0, 3) + np.clip(j - i, 0, 3)) == [(-1, 1), (1, 1)]
    assert directions(lambda h, i, j: np.clip((i - j) % 7, 0, 9)) == []
    for never in (np.abs, lambda x: x % 7, lambda x: x * x):
        assert directions(lambda h, i, j, never=never: np.clip(never(i - j), 0, 9)) == []
    assert directions(lambda h, i, j: i) == []
    for distance in (lambda i, j: j - i, lambda i, j: 9 + abs(i - j) % 7, lambda i, j: np.clip(i - j, -3, 3) + 3):
        assert is_distance(lambda h, i, j, index=distance: index(i, j) + 2 * h)
    for other in (lambda i, j: i, lambda i, j: i + j, lambda i, j: i - j + j, lambda i, j: abs(i - j) * i):
        assert not is_distance(lambda h, i, j, index=other: index(i, j))


def test_integers_that_are_monotone_are_found() -> None:
    check_directions(cuflash)


@settings(max_examples=300 if is_long() else 60, deadline=None)
@given(formulas(), st.data())
def test_values_are_uniform_where_their_roots_are_equal_at_two_corners(formula: Any, data: st.DataObject) -> None:
    """Random functions, and tables of clipped distances, are evaluated on tiles of queries and keys."""
    if data.draw(st.booleans()):
        score = NEAR
    else:
        score = Score(formula, **formula.arrays(MaskShape((2,), 2, 40, 50), 0, np.dtype(np.float64)))
    program, results = score.program, uniform(score.program)
    first_i, first_j = data.draw(st.integers(0, 39)), data.draw(st.integers(0, 49))
    i = np.arange(first_i, min(first_i + data.draw(st.integers(1, 16)), 40))[:, None]
    j = np.arange(first_j, min(first_j + data.draw(st.integers(1, 30)), 50))
    operands = Operands(score.numbers, tuple(score.arrays.values()), (2,))
    values = evaluated(program, operands, np.zeros((i.size, j.size)), 1, 1, i, j)
    values = [np.broadcast_to(x, (i.size, j.size)) for x in values]

    def corner(n: int, end: int) -> Any:
        query, key = (0 if (sign >= 0) != bool(end) else -1 for sign in results.roots[n])
        return values[n][query, key]

    for n in of_distance(program):
        np.testing.assert_array_equal(values[n][:-1, :-1], values[n][1:, 1:])
    for n in results.roots:
        assert corner(n, 0) == values[n].min() and corner(n, 1) == values[n].max()
    if all(corner(n, 0) == corner(n, 1) for n in results.roots):
        for n in results.values:
            np.testing.assert_array_equal(values[n], values[n][0, 0])
    assert all({"i", "j"} <= depends(program)[n] and "s" not in depends(program)[n] for n in results.values)


def check_bins(library: Any) -> None:
    """Check that only the gradient of a table with one short row has bins in shared memory."""
    device, x = library.DeviceSpec.gpu("H100"), library.ShapeDtype((2, 4, 300, 128), np.dtype(np.float16))

    def bins(function: Any, wrt: Any, deterministic: bool = False, **shapes: tuple[int, ...]) -> tuple[int, int]:
        arrays = {n: library.ShapeDtype(s, np.dtype(np.float32)) for n, s in shapes.items()}
        score = library.scores.Score(function, **arrays)
        options = {"executor": "gpu", "device": device, "kernel": "sm90", "deterministic": deterministic}
        spec = library.plan(x, x, x, score=score, wrt=wrt, **options)._plan.specs["backward"]
        return spec.score_bins, spec.num_stages

    def near(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return s + t[h, np.clip(j - i, 0, 8)]

    def both(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any, u: Any) -> Any:
        return s * t[h, np.clip(j - i, 0, 8)] + u[h, np.clip(j - i, 0, 8)]

    assert bins(near, "t", t=(4, 9)) == (9, 3)  # few bins leave room for all stages
    assert bins(near, "t", t=(4, 32)) == (32, 2)
    assert bins(near, "t", t=(4, 33)) == (0, 3)
    assert bins(near, (), t=(4, 9)) == (0, 3)
    assert bins(near, "t", deterministic=True, t=(4, 9))[0] == 0
    assert bins(both, ("t", "u"), t=(4, 9), u=(4, 9)) == (0, 3)
    assert bins(both, "u", t=(4, 9), u=(4, 9)) == (9, 3)
    assert bins(lambda s, b, h, i, j, t: s + t[np.clip(j - i, 0, 8), h], "t", t=(9, 4)) == (0, 3)
    assert bins(lambda s, b, h, i, j, t: s + t[h, i // 100, np.clip(j - i, 0, 8)], "t", t=(4, 3, 9)) == (0, 3)


def test_gradients_of_short_tables_have_bins() -> None:
    check_bins(cuflash)


def check_clipped(run: Run, dim: int = 72) -> None:
    """Check steps far from the diagonal, and a function with an extra term that has a slope other than 1."""
    structure = Structure(
        num_heads=2, num_kv_heads=1, seqlen_q=200, seqlen_kv=300, head_dim=dim, value_dim=dim, dtype="float16",
        mask=masks.SlidingWindow(150, 120, "bottom_right"),
    )  # fmt: skip
    mixed = Score(
        lambda s, b, h, i, j, near, slope: s * (1 + near[h, np.clip(j - i, -4, 4) + 4]) + slope[h] * np.abs(i - j),
        near=TABLE / 8, slope=np.array([0.01, -0.02], np.float32),
    )  # fmt: skip
    plain = run.rounded(structure.example())
    for score in (NEAR, mixed):
        example = plain.but(score=score, wrt=tuple(score.arrays))
        assert_within_bounds(example, **everything(run, example))


def check_distances(run: Run, dim: int = 72) -> None:
    """Check tables with more elements than a lane has bins, whose gradients are summed by distance.

    One is clipped, so that some steps read one element. The other is as long as all distances, and the slopes depend on
    the scores.
    """
    structure = Structure(
        num_heads=2, num_kv_heads=1, seqlen_q=200, seqlen_kv=300, head_dim=dim, value_dim=dim, dtype="float16",
        mask=masks.SlidingWindow(150, 120, "bottom_right"),
    )  # fmt: skip
    clipped = Score(NEAR.function, near=np.tile(TABLE, (1, 4)))
    every = np.random.default_rng(3).standard_normal((2, 500)).astype(np.float32)
    bent = Score(lambda s, b, h, i, j, every: np.tanh(s) * every[h, j - i + 200], every=every)
    plain = run.rounded(structure.example())
    for score in (clipped, bent):
        example = plain.but(score=score, wrt=tuple(score.arrays))
        assert_within_bounds(example, **everything(run, example))


def check_zero_weights(run: Run) -> None:
    """Check that scores whose weight is 0 add nothing to a table, whatever their slope and dP are."""
    structure = Structure(num_heads=2, num_kv_heads=2, seqlen_q=128, seqlen_kv=128, head_dim=72, dtype="float16")
    plain = run.rounded(structure.example())
    every = np.random.default_rng(4).uniform(0.5, 1, (2, 255)).astype(np.float32)
    steep = Score(
        lambda s, b, h, i, j, every: s - every[h, j - i + 127] * np.where(j == 5, np.inf, 1.0), every=every
    )  # fmt: skip
    gradient = everything(run, plain.but(score=steep, wrt=("every",)))["others"]["every"]
    assert np.isfinite(gradient).all()
    every[:, 127] = -np.inf  # hides the keys on the diagonal
    table = Score(lambda s, b, h, i, j, every: s + every[h, j - i + 127], every=every)
    v = plain.v.copy()
    v[..., 7, :] = np.nan  # so that dP of key 7 is NaN
    gradient = everything(run, plain.but(score=table, v=v, wrt=("every",)))["others"]["every"]
    assert not gradient[:, 127].any() and np.isnan(gradient[:, 128]).all()


@on_sm90
def test_scores_without_weight_add_nothing_to_a_table(run: Run) -> None:
    check_zero_weights(run)


@on_sm90
def test_sums_by_distance_are_within_their_bounds(run: Run) -> None:
    check_distances(run)


@on_sm90
def test_clipped_tables_are_within_their_bounds(run: Run) -> None:
    check_clipped(run)


@on_sm90
def test_a_clipped_table_is_a_bias(run: Run) -> None:
    """A table gives the same results as a bias with its elements, whose gradient is summed by element."""
    if run.executor == "sim" and not is_long():
        pytest.skip("a short run draws other functions")
    structure = Structure(num_heads=2, num_kv_heads=2, seqlen_q=150, seqlen_kv=264, head_dim=80, dtype="float16")
    plain = run.rounded(structure.example())
    place = np.clip(np.arange(264) - np.arange(150)[:, None], -4, 4) + 4
    table = plain.but(score=NEAR, wrt=("near",))
    array = plain.but(score=scores.bias(TABLE.astype(np.float16)[:, place]), wrt=("bias",))
    halves = table.but(score=Score(NEAR.function, near=TABLE.astype(np.float16).astype(np.float32)))
    one, other = everything(run, halves), everything(run, array)
    assert_within_bounds(halves, **one)
    assert_within_bounds(array, **other)
