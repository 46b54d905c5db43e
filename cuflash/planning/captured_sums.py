"""Bitwise reproducible gradients of a score function's arrays: sums that do not depend on the order of additions.

If several scores read an element, several thread blocks add to its gradient. By default they add floating-point
numbers, and the rounding depends on the order of the blocks. In the reproducible form, the kind of the sums depends on
how the score function reads the array:

- ``own``: each element is read by one score, so only one number is added to its gradient.
- ``parts``: the query and the key are indices of the array, and batch entries or heads share it. Each batch entry or
  head adds to its own part, and a kernel adds the parts in a fixed order. Kernels that store a gradient from dS
  (`planning.staged_array`) store the parts, in the dtype of the products.
- ``exact``: any other array. Sums are integers that are wide enough to be exact, and a kernel rounds them at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from .launches import POINTER, Feature, Launch, Pass, Workspace, structure
from .problem import Problem
from .spec import SIMT, Entry, KernelSpec, smallest

# 64-bit words of an exact sum, by the dtype of its terms; must equal those of `ExactSum` in tile/exact_sum.cuh.
EXACT_WORDS = {np.dtype(np.float32): 15, np.dtype(np.float64): 91}
CAPTURED_SUMS = structure((POINTER, "gradient", "sums"), (np.int64, "num_elements", "num_parts", "operation"))
OWN, EXACT, PARTS = "own", "exact", "parts"  # "parts" is followed by axes: "parts b", "parts h" or "parts bh"
_SET_ZERO, _ROUND, _ADD_PARTS = range(3)  # operations of the kernel "captured_sums"
_WARPS, _ELEMENTS_OF_THREAD, _MAX_BLOCKS = 4, 8, 1 << 12
_ENTRY = Entry(family=SIMT, name="captured_sums")
_WORD = 4  # bytes that the kernel sets to 0 at a time


def sums_name(name: str) -> str:
    """Return the name of the workspace with the sums for a captured array's gradient."""
    return f"sums.{name}"


def kinds_of_sums(problem: Problem, wrt: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kind of the sums for the gradient of each captured array in the reproducible form."""
    return tuple(_kind(problem, name) for name in wrt)


def axes_of_parts(kind: str) -> str:
    """Return the axes along which sums of a kind are divided into parts: "b", "h", "bh" or ""."""
    return kind.removeprefix(PARTS).strip() if kind.startswith(PARTS) else ""


def _kind(problem: Problem, name: str) -> str:
    program, shape = problem.score, problem.mask_shape
    assert program is not None
    loads = [each for each in program.instructions if each.op == "load" and program.arrays[each.value].name == name]
    if len(loads) != 1:
        return EXACT if loads else OWN
    read = {program.instructions[n].op for n in loads[0].args}
    operand = problem.operand(name)
    assert operand is not None
    if prod(operand.shape[: program.num_leading_axes(loads[0])]) == shape.num_batch:
        read.add("b")
    extents = {"b": shape.num_batch, "h": shape.num_heads, "i": shape.seqlen_q, "j": shape.seqlen_kv}
    shared = "".join(axis for axis, extent in extents.items() if extent > 1 and axis not in read)
    if not shared:
        return OWN
    return f"{PARTS} {shared}" if set(shared) <= {"b", "h"} else EXACT


def with_captured_sums(
    backward: Pass, problem: Problem, gradients: Mapping[str, str], kinds: tuple[str, ...], stored: str | None,
    is_whole: bool,
) -> Pass:  # fmt: skip
    """Add the sums to a backward pass: kernels before it that set them to 0, and kernels after it that write gradients.

    Parameters
    ----------
    gradients : dict of str by str
        The name of each gradient among the arrays of the pass, by the name of the captured array.
    kinds : tuple of str
        The kind of each gradient's sums.
    stored : str, optional
        The gradient that kernels store as a whole or in parts.
    is_whole : bool
        Kernels store all elements of that gradient, so that it need not be set to 0 first.
    """
    before, after, workspaces = {}, {}, dict(backward.workspaces)
    features, zeroed = list(backward.features), list(backward.zeroed)
    for (name, gradient), kind in zip(gradients.items(), kinds):
        needs_zeros = gradient != stored or not is_whole
        if kind == OWN:
            zeroed += [gradient] * needs_zeros
            continue
        operand = problem.operand(name)
        assert operand is not None
        num_elements, sums = prod(operand.shape), sums_name(name)
        dtype = problem.dtype if gradient == stored else problem.accumulator
        workspace = workspaces[sums] = _workspace(problem, operand.shape, kind, dtype)
        if needs_zeros:
            role, num_words = f"zero.{sums}", workspace.nbytes // _WORD
            features.append(_feature(role, ("", sums), num_words, 1, _SET_ZERO))
            before[role] = _launch(dtype, role, num_words, (), (sums,))
        num_parts = prod(_extents_of_parts(problem, kind))
        operation = _ROUND if kind == EXACT else _ADD_PARTS
        features.append(_feature(sums, (gradient, sums), num_elements, num_parts, operation))
        after[sums] = _launch(dtype, sums, num_elements, (sums,), (gradient,))
    return Pass({**before, **backward.launches, **after}, workspaces, tuple(features), tuple(zeroed))


def sums_spec(dtype: np.dtype[np.generic]) -> KernelSpec:
    """Return the kernel that computes a gradient from its sums; `dtype` is that of parts. The kernel has no tiles."""
    return smallest(_ENTRY, dtype, _WARPS)


def address_rank(rank: int, kind: str) -> int:
    """Return the number of strides that locate the sum of an element, for an array with `rank` axes."""
    return rank + (1 if kind == EXACT else len(axes_of_parts(kind)))


def _workspace(problem: Problem, shape: tuple[int, ...], kind: str, dtype: np.dtype[np.generic]) -> Workspace:
    if kind == EXACT:
        return Workspace((*shape, EXACT_WORDS[dtype]), np.dtype(np.int64))
    return Workspace((*_extents_of_parts(problem, kind), *shape), dtype)


def _extents_of_parts(problem: Problem, kind: str) -> tuple[int, ...]:
    extents = {"b": problem.mask_shape.num_batch, "h": problem.num_heads}
    return tuple(extents[axis] for axis in axes_of_parts(kind))


def _feature(name: str, arrays: tuple[str, str], num_elements: int, num_parts: int, operation: int) -> Feature:
    """Return the parameters of a launch; `arrays` are the names of the gradient (empty if unused) and of the sums."""
    numbers = {"num_elements": num_elements, "num_parts": num_parts, "operation": operation}
    names = dict(zip(("gradient", "sums"), arrays))
    return Feature(name, CAPTURED_SUMS, numbers, tuple(filter(None, arrays)), names=names)


def _launch(
    dtype: np.dtype[np.generic], feature: str, num_elements: int, reads: tuple[str, ...], writes: tuple[str, ...]
) -> Launch:
    blocks = max(1, min(-(-num_elements // (32 * _WARPS * _ELEMENTS_OF_THREAD)), _MAX_BLOCKS))
    return Launch(spec=sums_spec(dtype), tiles=blocks, reads=reads, writes=writes, features=(feature,))
