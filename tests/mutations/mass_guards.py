"""What must see the faults of the kernels that sum masses on tensor cores; on Hopper also by a rule that they break."""

from __future__ import annotations

from cuflash import sim
from test_block_mass import HALVES, check_on_chip

SIGNS = (AssertionError, sim.SimulationError)


def tensor_cores_sum_masses() -> None:
    """Lists, chunks of head_dim, blocks that steps cut and that lie across tiles, and rows without a key."""
    for name in ("chunks of head_dim", "blocks of odd sides, and a row of several tiles", "a list of blocks"):
        check_on_chip("H100", **HALVES[name])
    check_on_chip("A100", **HALVES["chunks of head_dim"])
