"""Guards that must see faults of functions of products."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from cuflash.sim import SimulationError
from executors import SIM
from test_score_products import check_plans, check_results, check_values

SIGNS = (AssertionError, ValueError, SimulationError)  # exceptions by which guards see a fault


def distances_are_right() -> None:
    check_results(replace(SIM, kernel="sm90"), ("alibi",))


def factors_are_joined_where_they_can_be(library: ModuleType) -> None:
    check_plans(library)


def values_are_those_of_functions(library: ModuleType) -> None:
    check_values(library)
