"""Dropout in a plan: kernel parameters and, if the seed is an array, the seed operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import describe, is_flag, is_number
from ..dropout import SEED_DTYPES, Draws, Dropout, is_key
from ..errors import UnsupportedProblem
from ..masks.places import Places
from ..masks.shape import MaskShape
from .launches import Feature, Kernels, Launch, Pass, Value, structure
from .operands import Operand

NAME = "dropout"  # the feature's name
SEED = "dropout_seed"  # the operand's name
NUMBERS = ("seed", "offset")  # fields that each call passes, in the order of `Dropout._numbers`
DROPOUT = structure(
    (np.uint64, "seed", SEED),
    (np.uint32, "offset"),
    (np.dtype((np.uint32, (8,))), "either"),
    (np.float64, "factor"),
    (np.float32, "single_factor"),
    (np.uint32, "first_row", "first_column", "first_head", "num_heads", "num_heads_of_all"),
)


def dropout_of(dropout: Any) -> tuple[Draws | None, tuple[Operand, ...]]:
    """Return how a problem's dropout draws weights (None if it drops none), and the operand with the seed, if any.

    Raises
    ------
    UnsupportedProblem
        The value is not a `Dropout`, or its seed is an array that is not 0-d or has another dtype.
    """
    if not isinstance(dropout, Dropout):
        raise UnsupportedProblem([_no_dropout(dropout)])
    if not dropout._draws.threshold:
        return None, ()
    if dropout._array is None:
        return dropout._draws, ()
    dtype = dropout._array.dtype
    if tuple(dropout._array.shape) or dtype not in SEED_DTYPES:
        rule = "seed must be a 0-d array of int64 or uint64"
        raise UnsupportedProblem([f"{rule}; got {describe(dropout._array)}: use np.array(3), for example"])
    return dropout._draws, (Operand(SEED, (), np.dtype(dtype)),)


def seed_array(dropout: Any) -> dict[str, Any]:
    """Return the array that holds the seed, under the name of its operand; empty if the seed is a number.

    Raises
    ------
    UnsupportedProblem
        The seed is a JAX key.
    """
    is_read = isinstance(dropout, Dropout) and dropout._draws.threshold and dropout._array is not None
    if is_read and is_key(dropout._array):
        rule = "seed must be an int, or a 0-d array of int64 or uint64, for this function; got a key of JAX"
        raise UnsupportedProblem([f"{rule}: call cuflash.jax.attention"])
    return {SEED: dropout._array} if is_read else {}


def numbers_of(dropout: Dropout | None) -> tuple[int, ...]:
    """Return the numbers that a call with dropout passes to kernels, in the order of `NUMBERS`; () without dropout."""
    return dropout._numbers if isinstance(dropout, Dropout) and dropout._draws.threshold else ()


def dropout_places(places: Places | None, num_heads: int, of_all: MaskShape) -> dict[str, int]:
    """Return the place of a call in a larger one as kernels read it; empty if the call is not a part of another.

    Kernels draw cells of 4 x 4 weights, four of which make a tile of 16 x 16: the first query and key are multiples of
    16.
    """
    if places is None:
        return {}
    batch, head, query, key = places.starts
    return {
        "first_row": query // 4, "first_column": key // 4, "first_head": batch * of_all.num_heads + head,
        "num_heads": max(1, num_heads), "num_heads_of_all": of_all.num_heads,
    }  # fmt: skip


def with_dropout(kernels: Kernels, draws: Draws, places: Mapping[str, int]) -> Kernels:
    """Return the launches with dropout in each kernel that computes weights or gradients of scores."""
    forward, backward = (pass_with_dropout(each, draws, places) for each in (kernels.forward, kernels.backward))
    return replace(kernels, forward=forward, backward=backward)


def pass_with_dropout(kernels: Pass, draws: Draws, places: Mapping[str, int]) -> Pass:
    """Return a pass with dropout in each kernel that computes weights or gradients of scores."""
    tables = (SEED,) if draws.reads_seed else ()

    def change(_: str, launch: Launch) -> Launch:
        if not launch.spec.entry.draws_dropout:
            return launch
        return launch.taking(
            NAME, reads=tables, has_dropout=True, reads_dropout_seed=draws.reads_seed, dropout_is_placed=bool(places)
        )

    values: dict[str, Value] = {
        "either": [0 if draws.threshold >> bit & 1 else (1 << 32) - 1 for bit in range(8)],
        "factor": draws.factor, "single_factor": draws.factor, **places,
    }  # fmt: skip
    return kernels.changed(change, Feature(NAME, DROPOUT, values, tables, numbers=NUMBERS))


def _no_dropout(value: Any) -> str:
    fix = "write dropout=cuflash.Dropout(0.1, seed=0)"
    if is_number(value) and 0 < value < 1:
        fix = f"write dropout=cuflash.Dropout({value}, seed=0)"
    elif is_flag(value) or is_number(value) and value == 0:
        fix = "omit dropout= to drop no weights"
    return f"dropout must be a Dropout; got {describe(value)}: {fix}"
