"""Guards for faults of gradients to which tiles of keys add in their order, and of parts that heads store."""

from __future__ import annotations

import importlib
from types import ModuleType

import cuflash
from cuflash.compiler import source as sources
from cuflash.sim import SimulationError
from test_dq_in_order import (
    TOGETHER, check, check_bound_of_parts, check_one_head, check_parts, check_stored_parts, check_tiles_that_see_no_key
)  # fmt: skip

SIGNS = (AssertionError, RuntimeError, SimulationError)


def sums_of_dq_are_in_order() -> None:
    """Blocks run together, so that one that does not wait for another has other bits, or a sum that is not there."""
    check("dropout", "causal", "128", TOGETHER)


def checks_pass_where_no_key_is_seen() -> None:
    check_tiles_that_see_no_key()


def sums_of_arrays_end_with_a_tile() -> None:
    check_one_head()


def stored_parts_are_right() -> None:
    check_stored_parts(cuflash)


def parts_are_printed(library: ModuleType) -> None:
    """The copy of the library prints the functions; its kernels are those of the installed one."""
    importlib.import_module(f"{library.__name__}.compiler.source").KERNELS = sources.KERNELS
    check_stored_parts(library)


def parts_are_planned(library: ModuleType) -> None:
    check_parts(library)


def roundings_of_parts_are_counted(library: ModuleType) -> None:
    check_bound_of_parts(library)
