"""Guards for faults of the kernels that sum block masses on tensor cores; the simulator may report those of sm90."""

from __future__ import annotations

import tempfile
from pathlib import Path

import cupy_machine
import pytest
from cuflash import sim
from test_block_mass import HALVES, check_on_chip
from test_selection_kernels import check_turned_columns

SIGNS = (AssertionError, sim.SimulationError)  # exceptions with which a guard reports a fault


def tensor_cores_sum_masses() -> None:
    """Check lists, chunks of head_dim, blocks cut by steps or tiles, rows without keys, and rising maxima."""
    several = "blocks of odd sides, and a row of several tiles"
    for name in ("chunks of head_dim", several, "a list of blocks", "maxima that rise late"):
        check_on_chip("H100", **HALVES[name])
    check_on_chip("A100", **HALVES["chunks of head_dim"])
    check_on_chip("H100", num_processors=1, **HALVES["rows of one block and of several"])


def groups_of_columns_are_turned() -> None:
    """Run the check on a test double of CuPy that runs kernels on the simulator."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        with cupy_machine.installed(patch, Path(folder) / "cache") as machine:
            check_turned_columns(machine)
