"""Tables whose gradient a backward kernel accumulates in shared memory, in one bin per element and thread.

If many scores read few elements, such as a table of relative positions, atomic additions to global memory contend. A
table has bins if only its last index depends on the query and the key, so that all scores of a head read one row.
"""

from __future__ import annotations

from ..scores.program import depends, derived, gradient_loads
from .problem import Problem

MAX_BINS = 32  # maximum elements of a row; for eight warps, they take 32 KiB of shared memory
WARP_LANES = 32


def num_bins(problem: Problem) -> int:
    """Return the number of elements in a row of the table that has bins, or 0 if no table has bins."""
    program = problem.score
    wrt = [operand.name for operand in problem.operands if operand.is_captured and operand.name in problem.wrt]
    if program is None or not wrt:
        return 0
    slopes = derived(program, tuple(wrt))
    dependencies = depends(slopes)
    loads = [n for n in gradient_loads(slopes, wrt) if dependencies[n] >= {"i", "j"}]
    if len(loads) != 1:
        return 0
    load = slopes.instructions[loads[0]]
    *leading, last = (dependencies[a] for a in load.args)
    if not last >= {"i", "j"} or any(names & {"i", "j", "s"} for names in leading):
        return 0
    operand = problem.operand(slopes.arrays[load.value].name)
    assert operand is not None
    extent = operand.shape[-1]
    return extent if extent <= MAX_BINS else 0
