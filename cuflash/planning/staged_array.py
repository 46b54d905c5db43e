"""The captured array that producer warps copy to shared memory, and the rule for storing its gradient from there.

An array of 16-bit numbers whose indices are the query and the key, such as a bias, is as large as the matrix of scores.
TMA copies its elements for each step, like the step's keys, instead of threads loading them one by one.
"""

from __future__ import annotations

import numpy as np

from ..arrays import HALVES
from ..scores.program import ArrayType, Program, derived
from .captured_sums import OWN, axes_of_parts, kinds_of_sums
from .launches import TENSOR_MAP_PARAM
from .problem import Problem

# The record StagedMap of sm90/staged_array.cuh, and the numbers of queries and keys in a box.
STAGED_MAP = np.dtype([("array", TENSOR_MAP_PARAM)])
STAGED_BOX = (64, 64)
_NAMES = tuple(dtype.name for dtype in HALVES)
_PACKET = 8  # elements in 16 bytes: TMA requires rows of a multiple of 16 bytes


def staged_load(program: Program) -> int | None:
    """Return the instruction that reads the array to stage, or None if no array can be staged.

    The last two indices must be the query and the key, and the others must not depend on them. If several loads of a
    program qualify, no array is staged.
    """
    candidates = []
    for n, load in enumerate(program.instructions):
        if load.op != "load" or program.arrays[load.value].dtype not in _NAMES:
            continue
        *leading, query, key = ["", "", *(program.instructions[a].op for a in load.args)]
        if (query, key) == ("i", "j") and {*leading} <= {"", "b", "h", "const"}:
            candidates.append(n)
    return candidates[0] if len(candidates) == 1 else None


def staged_array(program: Program | None) -> ArrayType | None:
    """Return the array to stage, or None if there is no score function or none of its arrays can be staged."""
    if program is None or (load := staged_load(program)) is None:
        return None
    array: ArrayType = program.arrays[program.instructions[load].value]
    return array


def can_stage(problem: Problem) -> bool:
    """True if the problem's score function reads an array that can be staged, and TMA can copy its rows.

    Copies start at the positions of the call, so a part of a larger call does not stage arrays.
    """
    array = staged_array(problem.score)
    operand = None if array is None else problem.operand(array.name)
    return operand is not None and operand.shape[-1] % _PACKET == 0 and problem.places is None


def gradient_in_parts(problem: Problem) -> str | None:
    """Return the array whose gradient kernels may store in rounded parts, one per batch entry or head, or None."""
    array = staged_array(problem.score)
    is_in_parts = not can_store_gradient(problem) and can_store_gradient(problem, in_parts=True)
    return array.name if array is not None and is_in_parts else None


def can_store_gradient(problem: Problem, *, in_parts: bool = False) -> bool:
    """True if the staged array's requested gradient equals dS as rounded for dQ's product, so that it can be stored.

    The conditions: each element is read by one score (with `in_parts`, by one per batch entry or head), the array and
    the score have the same derivative, and the array has the dtype of the products.
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
