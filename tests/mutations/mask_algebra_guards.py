"""Guards that must see faults of operators, of coarsening, of pictures, of recall and of scipy.sparse arrays."""

from __future__ import annotations

from types import ModuleType

import pytest
from mutations.python_guards import hunt
from test_mask_algebra import (
    check_coarsening,
    check_index_operators,
    check_indices_of_masks,
    check_operators,
    check_scipy,
    drawn_for,
    operations,
    tables,
)
from test_recall import check_recall, check_scored, problems

# Exceptions by which guards see a fault.
SIGNS = (AssertionError, ValueError, TypeError, IndexError, pytest.fail.Exception)


def operators_are_right(library: ModuleType) -> None:
    hunt(operations(), seeds=1)(lambda drawn: check_operators(library, drawn))


def index_operators_are_right(library: ModuleType) -> None:
    hunt(tables(), seeds=1)(lambda drawn: check_index_operators(library, drawn))


def closed_forms_are_right(library: ModuleType) -> None:
    hunt(drawn_for(library), seeds=2)(lambda drawn: check_indices_of_masks(library, drawn))


def coarsening_is_right(library: ModuleType) -> None:
    hunt(tables(), seeds=1)(lambda drawn: check_coarsening(library, drawn))


def recall_is_right(library: ModuleType) -> None:
    hunt(problems(library), seeds=2)(lambda drawn: check_recall(library, drawn))


def recall_has_scores(library: ModuleType) -> None:
    hunt(problems(library), seeds=2)(lambda drawn: check_scored(library, drawn))


def scipy_is_read(library: ModuleType) -> None:
    hunt(tables(), seeds=1)(lambda drawn: check_scipy(library, drawn, "coo"))
