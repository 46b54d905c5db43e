"""Score functions in a plan: the specifications of kernels that apply one, and the record of its arrays and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..scores.program import Program, derived, pushed
from .captured_sums import OWN, address_rank, kinds_of_sums, sums_name, with_captured_sums
from .launches import Feature, Kernels, Launch, Pass, Value
from .problem import Problem
from .spec import KernelSpec
from .staged_array import STAGED_BOX, STAGED_MAP, staged_array

NAME = "score"  # name of the feature with the score function
MAP_NAME = "staged_map"  # name of the feature with the tensor map of a staged array


def array_name(name: str) -> str:
    """Return the name of a captured array among the arrays of a pass; the prefix avoids clashes with "delta" etc."""
    return f"score.{name}"


def gradient_name(name: str) -> str:
    """Return the name of a captured array's gradient among the arrays of a pass."""
    return f"d{array_name(name)}"


def num_leading(program: Program) -> int:
    """Return the maximum number of batch axes that a load of the program indexes with the batch entry."""
    loads = (each for each in program.instructions if each.op == "load")
    return max((program.num_leading_axes(load) for load in loads), default=0)


def layout(
    program: Program, wrt: Sequence[str], accumulator: np.dtype[np.generic], sums: Sequence[str] = (),
    is_placed: bool = False,
) -> np.dtype[np.generic]:  # fmt: skip
    """Return the dtype of the record of a program's arrays and numbers, which `compiler.score_text` declares in CUDA.

    The field ``numbers`` holds the program's numbers in the dtype that kernels compute in, padded with zeros to a
    multiple of 8 bytes; ``batch_extents`` holds the extents of the batch axes. ``starts`` holds the first batch entry,
    head, query and key of a call that is a part of a larger one. Each array has a field with its address,
    and one with its strides in elements.
    """
    fields: list[tuple[Any, ...]] = []
    if program.num_numbers:
        fields.append(("numbers", accumulator, (_room_for_numbers(program, accumulator),)))
    if num_leading(program):
        fields.append(("batch_extents", np.int64, (num_leading(program),)))
    if is_placed:
        fields.append(("starts", np.int32, (4,)))
    for name, rank in _pointers(program, wrt, sums):
        fields.append((name, np.uint64))
        if rank:
            fields.append((f"{name}_strides", np.int64, (rank,)))
    return np.dtype(fields or [("unused", np.uint64)], align=True)


def _room_for_numbers(program: Program, accumulator: np.dtype[np.generic]) -> int:
    """Return the length of the record's array of numbers, whose size is a multiple of 8 bytes."""
    in_a_word = 8 // accumulator.itemsize
    return -(-program.num_numbers // in_a_word) * in_a_word


def tables(program: Program, wrt: Sequence[str], sums: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the fields of `layout` that hold addresses."""
    return tuple(name for name, _ in _pointers(program, wrt, sums))


def _pointers(program: Program, wrt: Sequence[str], sums: Sequence[str]) -> list[tuple[str, int]]:
    """Return the name and number of strides of each array in the record: captured arrays, then gradients or sums."""
    pointers = [(array_name(array.name), array.rank) for array in program.arrays]
    kinds = dict(zip(wrt, sums))
    for array in program.arrays:
        if array.name in wrt:
            kind = kinds.get(array.name, OWN)
            name = gradient_name(array.name) if kind == OWN else sums_name(array.name)
            pointers.append((name, address_rank(array.rank, kind)))
    return pointers


def with_score(
    kernels: Kernels, problem: Problem, *, deterministic: bool = False, is_whole: bool = False
) -> Kernels:
    """Return the launches with the problem's score function in each kernel that computes scores or their gradients.

    Parameters
    ----------
    deterministic : bool
        Gradients of captured arrays must be bitwise reproducible.
    is_whole : bool
        Kernels that store a gradient store all of its elements, so that it need not be set to 0 first.
    """
    program = problem.score
    assert program is not None
    wrt = captured_wrt(problem)
    slope, slopes = derived(program), derived(program, wrt)
    kinds = kinds_of_sums(problem, wrt)
    is_repeatable = kernels.is_repeatable and (deterministic or all(kind == OWN for kind in kinds))
    sums = kinds if deterministic else ()

    def of_backward(_: str, launch: Launch) -> Launch:
        applied = slopes if launch.spec.entry.adds_gradients else slope
        return _applying(launch, problem, applied, wrt, sums) if launch.spec.entry.applies_score else launch

    scored = _changed(kernels.backward, of_backward, _feature(slopes, wrt, problem, sums))
    gradients = {name: gradient_name(name) for name in wrt}
    stored = stored_gradient(scored)
    if deterministic:
        scored = with_captured_sums(scored, problem, gradients, sums, stored, is_whole)
    else:
        scored = replace(scored, zeroed=tuple(each for each in gradients.values() if each != stored or not is_whole))
    return replace(
        kernels, is_repeatable=is_repeatable, backward=scored,
        forward=_with_program(kernels.forward, problem, program),
    )  # fmt: skip


def stored_gradient(backward: Pass) -> str | None:
    """Return the name of the captured array's gradient that a kernel stores in the array's dtype, or None."""
    for launch in backward.launches.values():
        if launch.spec.score_is_stored and (array := staged_array(launch.spec.score)) is not None:
            return gradient_name(array.name)
    return None


def captured_wrt(problem: Problem) -> tuple[str, ...]:
    """Return the names of the captured arrays that have gradients."""
    return tuple(operand.name for operand in problem.operands if operand.is_captured and operand.name in problem.wrt)


def _applying(
    launch: Launch, problem: Problem, program: Program, wrt: tuple[str, ...] = (), sums: tuple[str, ...] = ()
) -> Launch:
    """Return a launch whose kernel runs the program, and accumulates gradients if the program returns their slopes."""
    arrays = tuple(array_name(array.name) for array in program.arrays)
    gradients = tables(program, wrt, sums)[len(program.arrays) :] if len(program.results) > 2 else ()
    return launch.taking(
        NAME, *[MAP_NAME] * launch.spec.score_is_staged, reads=(*arrays, *gradients), writes=gradients,
        score=program, score_wrt=wrt, score_sums=sums, score_is_placed=problem.places is not None,
    )  # fmt: skip


def with_pushed_score(kernels: Pass, problem: Problem) -> Pass:
    """Return a pass whose kernels apply the problem's score function, differentiated along the tangents.

    In a pass that loads dO, kernels apply the function's derivative instead.
    """
    program = problem.score
    if program is None:
        return kernels
    if any(launch.spec.entry.loads_do for launch in kernels.launches.values()):
        program = derived(program)
    names = [operand.name for operand in problem.operands if operand.is_captured and operand.name in problem.tangents]
    moves_score = not {"q", "k"}.isdisjoint(problem.tangents)
    if names or moves_score:
        program = pushed(program, names, moves_score=moves_score)
    return _with_program(kernels, problem, program)


def with_score_argument(kernels: Pass, problem: Problem) -> Pass:
    """Return a pass whose kernels that compute scores apply the problem's score function, if there is one."""
    return kernels if problem.score is None else _with_program(kernels, problem, problem.score)


def _with_program(kernels: Pass, problem: Problem, program: Program) -> Pass:
    """Return a pass whose kernels that compute scores run a program without gradients of arrays."""

    def change(_: str, launch: Launch) -> Launch:
        return _applying(launch, problem, program) if launch.spec.entry.applies_score else launch

    return _changed(kernels, change, _feature(program, (), problem, ()))


def _changed(kernels: Pass, change: Callable[[str, Launch], Launch], feature: Feature) -> Pass:
    """Return a pass with changed launches, the feature of its score function, and tensor maps of staged arrays."""
    changed = kernels.changed(change, feature)
    maps = [_map_feature(launch.spec) for launch in changed.launches.values() if launch.spec.score_is_staged]
    return replace(changed, features=(*changed.features, *maps))


def _map_feature(spec: KernelSpec) -> Feature:
    """Return the feature with the tensor map of a kernel's staged array; a box has the queries of one warpgroup."""
    array = staged_array(spec.score)
    assert array is not None
    return Feature(MAP_NAME, STAGED_MAP, boxes={"array": (array_name(array.name), STAGED_BOX)})


def _feature(program: Program, wrt: tuple[str, ...], problem: Problem, sums: tuple[str, ...]) -> Feature:
    with np.errstate(over="ignore"):  # numbers beyond float32's range become infinite
        numbers = np.asarray(problem.numbers, problem.accumulator).tolist()
    values = _values(program, numbers, problem.whole_shape.batch, _room_for_numbers(program, problem.accumulator))
    if problem.places is not None:
        values["starts"] = list(problem.places.starts)
    record = layout(program, wrt, problem.accumulator, sums, problem.places is not None)
    return Feature(NAME, record, values, tables(program, wrt, sums))


def _values(program: Program, numbers: Sequence[float], batch: tuple[int, ...], room: int) -> dict[str, Value]:
    """Return the values in a program's record, which has room for `room` numbers."""
    values: dict[str, Value] = {}
    if program.num_numbers:
        values["numbers"] = list(numbers[: program.num_numbers]) + [0.0] * (room - program.num_numbers)
    axes = num_leading(program)
    if axes:
        values["batch_extents"] = [*(1 for _ in range(axes - len(batch))), *batch[max(len(batch) - axes, 0) :]]
    return values
