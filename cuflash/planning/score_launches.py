"""Puts a score function into the launches of a plan: into specifications, and as an argument of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ..scores.program import Program, derived
from .launches import Feature, Kernels, Launch, Pass
from .problem import Problem

NAME = "score"  # of the feature
_PREFIX, _GRADIENT_PREFIX = "score.", "dscore."
# Kernels that make scores, and of those that make their gradients the one that adds up those of captured arrays.
_FORWARD = ("scores", "forward", "block_mass")
_BACKWARD = ("scores", "gradient_scores", "backward", "backward_rows", "backward_columns")
_ADDING = ("gradient_scores", "backward", "backward_columns")


def array_name(name: str) -> str:
    """Name a captured array among the arrays of a pass, which have names such as "delta" too."""
    return _PREFIX + name


def gradient_name(name: str) -> str:
    """The same of a captured array's gradient, which kernels add to: it is zero before the first of them."""
    return _GRADIENT_PREFIX + name


def num_leading(program: Program) -> int:
    """The most leading axes that a load of the program reads at the batch entry."""
    loads = (each for each in program.instructions if each.op == "load")
    return max((program.num_leading_axes(load) for load in loads), default=0)


def layout(program: Program, wrt: Sequence[str], accumulator: np.dtype[Any]) -> np.dtype[Any]:
    """The record of a program's arrays and numbers, as the structure that `compiler.score_text` prints has them.

    The field ``numbers`` holds the program's numbers in the dtype that kernels compute in, and ``batch_extents`` the
    extents of the leading axes. An array has a field with its address, and one with its strides in elements.
    """
    fields: list[tuple[Any, ...]] = []
    if program.num_numbers:
        fields.append(("numbers", accumulator, (program.num_numbers,)))
    if num_leading(program):
        fields.append(("batch_extents", np.int64, (num_leading(program),)))
    for name, rank in _pointers(program, wrt):
        fields.append((name, np.uint64))
        if rank:
            fields.append((f"{name}_strides", np.int64, (rank,)))
    return np.dtype(fields or [("unused", np.uint64)], align=True)


def tables(program: Program, wrt: Sequence[str]) -> tuple[str, ...]:
    """The fields of `layout` that hold addresses."""
    return tuple(name for name, _ in _pointers(program, wrt))


def _pointers(program: Program, wrt: Sequence[str]) -> list[tuple[str, int]]:
    """Name and rank of each array whose address the record has: captured arrays, then gradients."""
    found = [(array_name(array.name), array.rank) for array in program.arrays]
    return found + [(gradient_name(array.name), array.rank) for array in program.arrays if array.name in wrt]


def with_score(kernels: Kernels, problem: Problem) -> Kernels:
    """The launches with the problem's score function in each kernel that makes scores or their gradients."""
    program = problem.score
    assert program is not None
    wrt = captured_wrt(problem)
    slope, slopes = derived(program), derived(program, wrt)
    forward = {
        role: _changed(launch, program, ()) if launch.spec.entry in _FORWARD else launch
        for role, launch in kernels.forward.launches.items()
    }
    backward = {
        role: _changed(launch, slopes if launch.spec.entry in _ADDING else slope, wrt)
        if launch.spec.entry in _BACKWARD
        else launch
        for role, launch in kernels.backward.launches.items()
    }
    return replace(
        kernels,
        is_repeatable=kernels.is_repeatable and not repeat_reasons(problem),
        forward=_pass(kernels.forward, forward, _feature(program, (), problem)),
        backward=replace(
            _pass(kernels.backward, backward, _feature(slopes, wrt, problem)),
            zeroed=tuple(map(gradient_name, wrt)),
        ),
    )


def captured_wrt(problem: Problem) -> tuple[str, ...]:
    """The captured arrays that have gradients."""
    return tuple(operand.name for operand in problem.operands if operand.is_captured and operand.name in problem.wrt)


def repeat_reasons(problem: Problem) -> list[str]:
    """Why gradients of captured arrays may differ from call to call: several scores add to an element, in any order."""
    if problem.score is None:
        return []
    return [
        f"deterministic=True must be without a gradient of {name}, to whose elements several scores add; got it in "
        f"wrt=: use deterministic=False, or executor='cpu'"
        for name in captured_wrt(problem)
        if not _has_own_elements(problem, name)
    ]


def _has_own_elements(problem: Problem, name: str) -> bool:
    """Return whether each element of a captured array is read for one score at most."""
    program, shape = problem.score, problem.mask_shape
    assert program is not None
    loads = [each for each in program.instructions if each.op == "load" and program.arrays[each.value].name == name]
    if len(loads) != 1:
        return not loads
    (load,) = loads
    read = {program.instructions[n].op for n in load.args}
    operand = problem.operand(name)
    assert operand is not None
    leading = operand.shape[: program.num_leading_axes(load)]
    if prod(leading) == shape.num_batch:
        read.add("b")
    extents = {"b": shape.num_batch, "h": shape.num_heads, "i": shape.seqlen_q, "j": shape.seqlen_kv}
    return all(extent <= 1 or name in read for name, extent in extents.items())


def _changed(launch: Launch, program: Program, wrt: tuple[str, ...]) -> Launch:
    """A launch whose kernel runs the program, and adds up gradients where the program has their slopes."""
    arrays = tuple(array_name(array.name) for array in program.arrays)
    gradients = tuple(map(gradient_name, wrt)) if len(program.results) > 2 else ()
    return replace(
        launch, spec=replace(launch.spec, score=program, score_wrt=wrt), reads=(*launch.reads, *arrays, *gradients),
        writes=(*launch.writes, *gradients), features=(*launch.features, NAME),
    )  # fmt: skip


def _pass(kernels: Pass, launches: Mapping[str, Launch], feature: Feature) -> Pass:
    return replace(kernels, launches=launches, features=(*kernels.features, feature))


def _feature(program: Program, wrt: tuple[str, ...], problem: Problem) -> Feature:
    with np.errstate(over="ignore"):  # a number that float32 lacks is infinite there
        numbers = np.asarray(problem.numbers, problem.accumulator).tolist()
    values = _values(program, numbers, problem.batch)
    return Feature(NAME, layout(program, wrt, problem.accumulator), values, tables(program, wrt))


def _values(program: Program, numbers: Sequence[float], batch: tuple[int, ...]) -> dict[str, Any]:
    """The numbers in a program's record."""
    values: dict[str, Any] = {}
    if program.num_numbers:
        values["numbers"] = list(numbers[: program.num_numbers])
    axes = num_leading(program)
    if axes:
        values["batch_extents"] = [*(1 for _ in range(axes - len(batch))), *batch[max(len(batch) - axes, 0) :]]
    return values
