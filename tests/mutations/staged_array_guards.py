"""Guards for faults of arrays in shared memory, and of tables that are read once a step."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from cuflash.sim import Schedule, SimulationError
from executors import SIM
from test_staged_arrays import (
    check_hidden, check_layouts, check_maps, check_masks, check_plans, check_schedules, check_unaligned, check_zeros
)  # fmt: skip
from test_uniform_steps import check_bins, check_clipped, check_directions

SIGNS = (AssertionError, ValueError, SimulationError)  # exceptions by which guards see a fault
_HOPPER = replace(SIM, kernel="sm90")


def staged_results_are_right() -> None:
    check_masks(_HOPPER, ("window", "lengths"))


def unaligned_steps_are_right() -> None:
    check_unaligned(_HOPPER)


def late_copies_are_waited_for() -> None:
    """Consumers run before the warp that copies a bias has waited for its copies, which land one by one."""
    check_schedules([Schedule(seed=seed, order="priorities", copies="random") for seed in range(2)])


def layouts_change_no_bit() -> None:
    check_layouts(_HOPPER)


def hidden_elements_have_no_gradient() -> None:
    check_hidden(_HOPPER)


def uniform_steps_are_right() -> None:
    check_clipped(_HOPPER)


def arrays_are_staged_where_they_can_be(library: ModuleType) -> None:
    check_plans(library)


def tables_have_bins(library: ModuleType) -> None:
    check_bins(library)


def arrays_have_maps(library: ModuleType) -> None:
    check_maps(library)


def zeros_are_planned(library: ModuleType) -> None:
    check_zeros(library)


def monotone_integers_are_found(library: ModuleType) -> None:
    check_directions(library)
