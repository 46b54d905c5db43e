"""Guards for faults in how masks take numbers, arrays, classes and trees from callers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
from mutations.python_guards import hunt, part
from test_mask_inputs import (
    check_answers,
    check_classes,
    check_coordinates,
    check_documents,
    check_indices,
    check_limits,
    check_numbers,
    check_shapes,
    check_tree,
    check_types,
    deep,
    documents,
)

# Each fault of numbers_are_right shows in one of these masks. Tests of test_mask_inputs.py draw others.
TELLING_NUMBERS = (
    ("window", (np.uint8(3), np.uint8(0))),
    ("window", (0, 2**70)),
    ("band", (None, np.int8(127))),
    ("band", (-(2**70), 2**70)),
    ("prefix", (2**70,)),
    ("dilated", (np.uint8(200), np.uint8(200), np.uint8(200))),
    ("dilated", (2**70, 2**70, 2**70)),
    ("fixed", (2**70, 2**70 - 3)),
)

# A fault may also show as an error of NumPy or Python where a sentence or a result is due.
# Exceptions by which guards see a fault.
SIGNS = (
    AssertionError, ValueError, ArithmeticError, RecursionError, TypeError, AttributeError, pytest.fail.Exception,
)  # fmt: skip


def numbers_are_right(library: ModuleType) -> None:
    """Sides, bounds and lengths of narrow types, and beyond int64, mean what Python's ints mean."""
    for each in TELLING_NUMBERS:
        check_numbers(library, each, "cpu")


def ids_are_right(library: ModuleType) -> None:
    """Ids of documents of every integer type are compared as integers."""
    hunt(documents(), seeds=2)(lambda drawn: check_documents(library, drawn))


def coordinates_are_right(library: ModuleType) -> None:
    """Masks return for coordinates of a narrow dtype what they return for int64."""
    masks = part(library, "testing.strategies").masks(part(library, "masks.shape").MaskShape((), 1, 9, 9))
    hunt(masks, seeds=1)(lambda drawn: check_coordinates(library, np.uint8, drawn))


def shapes_are_right(library: ModuleType) -> None:
    check_shapes(library, np.uint8)


def indices_are_counted(library: ModuleType) -> None:
    check_indices(library, np.uint8)


def limits_are_kept(library: ModuleType) -> None:
    check_limits(library)


def answers_are_checked(library: ModuleType) -> None:
    check_answers(library)


def types_are_told_apart(library: ModuleType) -> None:
    check_types(library)


def classes_are_told_apart(library: ModuleType) -> None:
    check_classes(library)


@contextmanager
def usual_stack() -> Iterator[None]:
    """Set Python's usual recursion limit, which Hypothesis may have raised in this process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def deep_trees_are_right(library: ModuleType) -> None:
    with usual_stack():
        check_tree(library, *deep(library, 400))
