"""Planted faults in how masks accept numbers, arrays, classes and trees from callers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
from mutations.calls import refuses, takes
from mutations.planting import Edit
from mutations.python_guards import hunt, part
from mutations.python_guards import work_is_right
from test_mask_inputs import (
    check_answers,
    check_classes,
    check_coordinates,
    check_documents,
    check_empty_batches,
    check_indices,
    check_limits,
    check_numbers,
    check_shapes,
    check_tree,
    check_types,
    deep,
    documents,
)
from test_masks import check_aligned_patterns

# Each fault with the guard numbers_are_right shows in one of these masks. Tests in test_mask_inputs.py draw others.
TELLING_NUMBERS = (
    ("window", (np.uint8(3), np.uint8(0))),
    ("window", (0, 2**70)),
    ("band", (None, np.int8(127))),
    ("band", (-(2**70), 2**70)),
    ("prefix", (2**70,)),
    ("dilated", (np.uint8(200), np.uint8(200), np.uint8(200))),
    ("dilated", (2**70, 2**70, 2**70)),
    ("fixed", (2**70, 2**70 - 3)),
    ("compressed", (3, 2)),
    ("compressed", (1, 2**70)),
)

# Exceptions with which a guard reports a fault. A fault may also show as an error of NumPy or Python, instead of the
# expected message or result.
SIGNS = (
    AssertionError, ValueError, ArithmeticError, RecursionError, TypeError, AttributeError, pytest.fail.Exception,
)  # fmt: skip


def numbers_are_right(library: ModuleType) -> None:
    """Check that sides, bounds and lengths of narrow types, and beyond int64, have the meaning of Python ints."""
    for each in TELLING_NUMBERS:
        check_numbers(library, each, "cpu")


def ids_are_right(library: ModuleType) -> None:
    """Check that ids of documents of every integer type are compared as integers."""
    hunt(documents(), seeds=2)(lambda drawn: check_documents(library, drawn))


def coordinates_are_right(library: ModuleType) -> None:
    """Check that masks return the same for coordinates of a narrow dtype as for int64."""
    masks = part(library, "testing.strategies").masks(part(library, "masks.shape").MaskShape((), 1, 9, 9))
    hunt(masks, seeds=1)(lambda drawn: check_coordinates(library, np.uint8, drawn))


def shapes_are_right(library: ModuleType) -> None:
    check_shapes(library, np.uint8)


def indices_are_counted(library: ModuleType) -> None:
    check_indices(library, np.uint8)


def empty_batches_are_taken(library: ModuleType) -> None:
    check_empty_batches(library, (2, 0), "cpu")


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


def aligned_patterns_are_right(library: ModuleType) -> None:
    check_aligned_patterns(library)


def deep_trees_are_right(library: ModuleType) -> None:
    with usual_stack():
        check_tree(library, *deep(library, 400))


def has_an_empty_intersection(library: ModuleType) -> bool:
    both = library.masks.Band(5, 9) & library.masks.Band(-3, 0)
    return not library.attention(*3 * [np.ones((12, 2), np.float32)], mask=both).any()


FAULTS = {
    aligned_patterns_are_right: {
        "positions of queries are their indices": Edit(
            "patterns.py", "Positioned.resolve", "Places(q_start=offset)", "Places()"
        ),
        "queries before the first key are in the sequence": Edit(
            "patterns.py", "Positioned.resolve", "if offset > 0 else", "if offset else"
        ),
    },
    empty_batches_are_taken: {
        "the lengths of an empty batch are read": Edit("masks/coordinates.py", "per_batch", "0 if 0 in batch else", ""),
        "an index of an empty batch has one entry": Edit(
            "selectors/grid.py", "Grid.leading", "x.shape[0] != 1", "x.shape[0] > 1"
        ),
    },
    refuses(lambda library: library.masks.Band(3, 1), "exchange them"): {
        "a band that attends nothing is taken": Edit(
            "masks/base.py", "Band.__post_init__", "self.lower > self.upper", "False"
        ),
    },
    takes(has_an_empty_intersection): {
        "an empty intersection of bands is refused": Edit(
            "masks/base.py", "intersection", "Band(UNBOUNDED, None) if is_empty else", ""
        ),
    },
    refuses(lambda library: library.masks.Causal() + 1, "masks have no +: combine them with &"): {
        "masks leave other operators to Python": Edit(
            "masks/arrays.py", None, 'without_other_operators(Mask, "masks", COMBINED)', ""
        ),
    },
    shapes_are_right: {
        "processors are counted in a narrow dtype": Edit(
            "planning/device.py", "DeviceSpec.__post_init__", "object.__setattr__(self, name, int(value))", "pass"
        ),
    },
    indices_are_counted: {
        "a head of an index wraps around": Edit(
            "blocks/index.py", "BlockIndex._row", "int(b) * self.num_heads + int(h)", "b * self.num_heads + h"
        ),
    },
    numbers_are_right: {
        "bounds of a band stay as narrow as they are": Edit(
            "masks/base.py", "Band.__post_init__", "object.__setattr__(self, name, int(bound))", "pass"
        ),
        "bounds beyond int64 are added as they are": Edit(
            "masks/coordinates.py", "clipped", "max(-UNBOUNDED, min(number, UNBOUNDED))", "number"
        ),
        "a length beyond int64 is compared as it is": Edit(
            "masks/coordinates.py", "per_batch", "min(int(value), UNBOUNDED)", "int(value)"
        ),
        "sides of a window wrap around": Edit(
            "masks/fields.py", "converted_side", "whole_number(name, side, 0, meaning, fix)", "side"
        ),
        "stretches beyond int64 divide as they are": Edit(
            "patterns.py", "fixed",
            "min(stride, UNBOUNDED), min(stride - num_summary, UNBOUNDED)",
            "stride, stride - num_summary",
        ),
        "sides beyond int64 reach kernels": Edit(
            "masks/diagonal.py", "_band", "clipped(offset + right)", "offset + right"
        ),
    },
    coordinates_are_right: {
        "narrow coordinates wrap around": Edit(
            "masks/coordinates.py", "widened", "else coordinate.astype(np.int64)", "else coordinate"
        ),
        "narrow keys wrap around before a stretch": Edit(
            "patterns.py", "StretchEnds.__call__", "widened(j) % self.stride >=", "j % self.stride >="
        ),
    },
    work_is_right: {
        "counts of an entry stay as narrow as they are": Edit(
            "masks/coordinates.py", "of_batch", "as_int64(value.at(b))", "value.at(b)"
        ),
    },
    ids_are_right: {
        "ids of unlike signs meet as float64": Edit(
            "masks/documents.py", "_share_integers", 'y.dtype).kind in "iu"', 'y.dtype).kind in "iuf"'
        ),
        "ids that the keys' kind does not hold wrap around": Edit(
            "masks/documents.py", "_document_bounds", "places = xp.where(is_out, end, places)", "pass"
        ),
        "a negative id is a large one": Edit("masks/documents.py", "_are_equal", "(x >= 0) & (y >= 0) & (", "("),
    },
    limits_are_kept: {
        "an index takes lengths that int32 does not hold": Edit(
            "blocks/index.py", "BlockIndex.from_mask", "(shape) or length_reasons(shape)", "(shape)"
        ),
        "a plan takes tiles that int32 does not count": Edit(
            "planning/plan.py", "_tile_reasons", "if launch.tiles * num_batch > MAX_TILES", "if False"
        ),
    },
    answers_are_checked: {
        "answers of a wrong shape are taken": Edit(
            "masks/coordinates.py", "checked_answer", "if not broadcasts_to(shape, wanted):", "if False:"
        ),
        "what a function answers is taken as it is": Edit(
            "masks/arrays.py", "FromFunction.__call__",
            "return checked_answer(\"FromFunction's function\", allowed, b, h, i, j)",
            "return allowed",
        ),
    },
    types_are_told_apart: {
        "1 and True are one": Edit(
            "masks/content.py", "token",
            "if kind in (int, bool, str, bytes, type(None)):\n    return kind, value",
            "if kind in (int, bool, str, bytes, type(None)):\n    return int, value",
        ),
        "0.0 and -0.0 are one": Edit("masks/content.py", "token", "return kind, repr(value)", "return kind, value"),
    },
    classes_are_told_apart: {
        "masks that are not dataclasses are remembered": Edit(
            "masks/content.py", "_undeclared", "if not layout.is_declared:", "if False:"
        ),
        "closed forms of a parent answer for its child": Edit(
            "masks/base.py", "Mask.__init_subclass__", "if place(name) > newest and", "if False and"
        ),
        "calls are distinguished as masks distinguish themselves": Edit(
            "planning/options.py", "Options.key", "else content(mask)", "else mask"
        ),
        "what is in no field is left out": Edit(
            "masks/content.py", "_undeclared",
            'f"{name} is not hashed, since it holds {sorted(besides)}, which are not fields" if besides else',
            'f"{name} is not hashed, since it holds {sorted(besides)}, " if False else',
        ),
    },
    deep_trees_are_right: {
        "a tree is pickled as it is": Edit(
            "masks/base.py", "_Composed.__reduce__", "__reduce__(self) -> tuple[Any,", "reduced(self) -> tuple[Any,"
        ),
        "a negated rectangle may hold what it must": Edit(
            "masks/base.py", "_Composed.rectangle.negated",
            "return namespace(must, i0).logical_not(must), namespace(may, i0).logical_not(may)",
            "return namespace(may, i0).logical_not(may), namespace(must, i0).logical_not(must)",
        ),
    },
    refuses(lambda library: library.masks.Lengths(3), "masks.Lengths(kv=lengths)"): {
        "a length without a name is taken": Edit(
            "masks/lengths.py", None, "repr=False, kw_only=True", "repr=False"
        ),
    },
    refuses(lambda library: library.masks.Lengths(q=None), "got None for both"): {
        "lengths of neither side are taken": Edit(
            "masks/lengths.py", "Lengths.__post_init__", "if self.q is None and self.kv is None:", "if False:"
        ),
    },
    refuses(lambda library: library.masks.Band(8), "masks.Band(-8, 8)"): {
        "one bound by its place is taken": Edit("masks/base.py", None, "num_positional != 1", "True"),
    },
}  # fmt: skip
