"""Repeatable gradients of a score function's arrays: sums whose bits do not depend on the order of additions.

Thread blocks add to the gradient of an element that several scores read. In the default form they add numbers, which
are rounded in the order in which blocks come. In the repeatable form each kind of array has sums of its own:

- ``own``: each element is read for one score, so one number is added to it.
- ``parts``: the array is read at the query and the key, and shared over the batch or over heads. Each batch entry or
  head adds to a part of its own, and a kernel adds the parts in their order. Kernels that store a gradient from dS
  (`planning.staged_array`) store parts, in the dtype of the products.
- ``exact``: any other array. Sums are integers wide enough to need no rounding, and a kernel rounds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from .launches import Feature, Launch, Pass, Workspace
from .problem import Problem
from .spec import SIMT, Entry, KernelSpec

# Words of an exact sum by the dtype that is added, as `ExactSum` of kernels_cu/tile/exact_sum.cuh counts them.
EXACT_WORDS = {np.dtype(np.float32): 15, np.dtype(np.float64): 91}
CAPTURED_SUMS = np.dtype(
    [
        ("gradient", np.uint64),
        ("sums", np.uint64),
        ("num_elements", np.int64),
        ("num_parts", np.int64),
        ("operation", np.int64),
    ],
    align=True,
)
OWN, EXACT, PARTS = "own", "exact", "parts"  # "parts" is followed by their axes: "parts b", "parts h" or "parts bh"
_SET_ZERO, _ROUND, _ADD_PARTS = range(3)  # operations of the kernel
_WARPS, _ELEMENTS_OF_THREAD, _MAX_BLOCKS = 4, 8, 1 << 12
_ENTRY = Entry(family=SIMT, name="captured_sums")
_WORD = 4  # bytes that the kernel sets to 0 at a time


def sums_name(name: str) -> str:
    """The workspace of the sums for the gradient of a captured array."""
    return f"sums.{name}"


def kinds_of_sums(problem: Problem, wrt: tuple[str, ...]) -> tuple[str, ...]:
    """The kind of sums for the gradient of each captured array in the repeatable form."""
    return tuple(_kind(problem, name) for name in wrt)


def axes_of_parts(kind: str) -> str:
    """The axes, of "b" and "h", that number the parts of a kind of sums."""
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
    """A backward pass whose kernels add to sums, between kernels that set these to 0 and that write each gradient.

    Parameters
    ----------
    gradients : dict of str by str
        By the name of a captured array, the name of its gradient among the arrays of the pass.
    kinds : tuple of str
        The kinds of their sums.
    stored : str, optional
        The gradient that kernels store, or whose parts they store.
    is_whole : bool
        They store all of it, so that nothing is set to 0 before.
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
            set_zero = _feature(f"zero.{sums}", ("", sums), workspace.nbytes // _WORD, 1, _SET_ZERO)
            features.append(set_zero)
            before[set_zero.name] = _launch(dtype, set_zero, reads=(), writes=(sums,))
        num_parts = prod(_extents_of_parts(problem, kind))
        finish = _feature(sums, (gradient, sums), num_elements, num_parts, _ROUND if kind == EXACT else _ADD_PARTS)
        features.append(finish)
        after[sums] = _launch(dtype, finish, reads=(sums,), writes=(gradient,))
    return Pass({**before, **backward.launches, **after}, workspaces, tuple(features), tuple(zeroed))


def sums_spec(dtype: np.dtype[np.generic]) -> KernelSpec:
    """The kernel that writes a gradient from its sums, parts of a dtype; it reads neither operands nor tiles."""
    return KernelSpec(
        entry=_ENTRY, dtype=dtype, head_dim=32, value_dim=32, block_q=16, block_kv=16, num_warps=_WARPS, min_blocks=1,
    )  # fmt: skip


def address_rank(rank: int, kind: str) -> int:
    """The number of strides that kernels need to find an element's sum, for an array of so many axes."""
    return rank + (1 if kind == EXACT else len(axes_of_parts(kind)))


def _workspace(problem: Problem, shape: tuple[int, ...], kind: str, dtype: np.dtype[np.generic]) -> Workspace:
    if kind == EXACT:
        return Workspace((*shape, EXACT_WORDS[dtype]), np.dtype(np.int64))
    return Workspace((*_extents_of_parts(problem, kind), *shape), dtype)


def _extents_of_parts(problem: Problem, kind: str) -> tuple[int, ...]:
    extents = {"b": problem.mask_shape.num_batch, "h": problem.num_heads}
    return tuple(extents[axis] for axis in axes_of_parts(kind))


def _feature(name: str, arrays: tuple[str, str], num_elements: int, num_parts: int, operation: int) -> Feature:
    """The parameters of a launch; `arrays` are the names of the gradient, or nothing, and of the sums."""
    numbers = {"num_elements": num_elements, "num_parts": num_parts, "operation": operation}
    names = dict(zip(("gradient", "sums"), arrays))
    return Feature(name, CAPTURED_SUMS, numbers, tuple(filter(None, arrays)), names=names)


def _launch(dtype: np.dtype[np.generic], feature: Feature, reads: tuple[str, ...], writes: tuple[str, ...]) -> Launch:
    blocks = -(-feature.values["num_elements"] // (32 * _WARPS * _ELEMENTS_OF_THREAD))
    return Launch(
        spec=sums_spec(dtype), tiles=max(1, min(blocks, _MAX_BLOCKS)), reads=reads, writes=writes,
        features=(feature.name,),
    )  # fmt: skip
