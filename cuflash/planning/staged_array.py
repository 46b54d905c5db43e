"""The captured array that producers copy to shared memory, and the rule for storing its gradient from there.

An array of 16-bit numbers that a score function reads at the query and the key, such as a bias, is as large as all
scores. Its elements of a step come like the step's keys, by TMA, and not one by one for each score.
"""

from __future__ import annotations

import numpy as np

from ..arrays import HALVES
from ..scores.program import ArrayType, Program, derived
from .captured_sums import OWN, axes_of_parts, kinds_of_sums
from .launches import TENSOR_MAP_PARAM
from .problem import Problem

# The record StagedMap of sm90/staged_array.cuh, and queries and keys of a box that it copies.
STAGED_MAP = np.dtype([("array", TENSOR_MAP_PARAM)])
STAGED_BOX = (64, 64)
_NAMES = tuple(dtype.name for dtype in HALVES)
_PACKET = 8  # TMA copies rows in multiples of 16 bytes, which are this many elements


def staged_load(program: Program) -> int | None:
    """The instruction that reads the array to stage, or None if no array can be staged.

    The last two indices are the query and the key, and the others do not depend on them. A program that reads several
    arrays so, or one in several ways, stages none.
    """
    found = []
    for n, load in enumerate(program.instructions):
        if load.op != "load" or program.arrays[load.value].dtype not in _NAMES:
            continue
        *leading, query, key = ["", "", *(program.instructions[a].op for a in load.args)]
        if (query, key) == ("i", "j") and {*leading} <= {"", "b", "h", "const"}:
            found.append(n)
    return found[0] if len(found) == 1 else None


def staged_array(program: Program | None) -> ArrayType | None:
    """The array to stage, or None if there is no score function or none of its arrays can be staged."""
    if program is None or (load := staged_load(program)) is None:
        return None
    array: ArrayType = program.arrays[program.instructions[load].value]
    return array


def can_stage(problem: Problem) -> bool:
    """Return whether the problem's score function reads an array that can be staged: rows are whole packets."""
    array = staged_array(problem.score)
    operand = None if array is None else problem.operand(array.name)
    return operand is not None and operand.shape[-1] % _PACKET == 0


def gradient_in_parts(problem: Problem) -> str | None:
    """The array whose gradient kernels may round for each batch entry or head before they add these up, if any."""
    array = staged_array(problem.score)
    is_in_parts = not can_store_gradient(problem) and can_store_gradient(problem, in_parts=True)
    return array.name if array is not None and is_in_parts else None


def can_store_gradient(problem: Problem, *, in_parts: bool = False) -> bool:
    """Return whether the gradient of the staged array is asked for and is dS, rounded as dQ's product takes it.

    It is where each element is read for one score, or with `in_parts` for one of each batch entry or head, the slope of
    the array is that of the score, and the array has the dtype of the products.
    """
    program, array = problem.score, staged_array(problem.score)
    if program is None or array is None or not can_stage(problem):
        return False
    is_read = [each.op == "load" and program.arrays[each.value] == array for each in program.instructions]
    if array.name not in problem.wrt or array.dtype != problem.dtype.name or sum(is_read) != 1:
        return False
    _, slope, slope_of_array = derived(program, (array.name,)).results
    (kind,) = kinds_of_sums(problem, (array.name,))
    return slope == slope_of_array and (kind == OWN or (in_parts and axes_of_parts(kind) != ""))
