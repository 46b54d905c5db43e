"""Tangents of the arrays of a call: their names, and why they are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import describe, is_array, namespace, no_array
from ..errors import UnsupportedProblem
from .options import DOT, Directions
from .problem import Problem

_OF_PARAMETERS = ("q", "k", "v", "do", "dlse")  # whose tangents are parameters of their own, as q_dot
_OF_PASSES = ("o", "lse")


def gathered(tangents: Any, **parameters: Any) -> dict[str, Any]:
    """Return tangents by the names of their arrays, without those that are None.

    Parameters
    ----------
    tangents : mapping of str to array, or None
        What `tangents=` was given.
    **parameters : array, or None
        Tangents that have parameters of their own, by the names of their arrays.

    Raises
    ------
    UnsupportedProblem
        `tangents` is no mapping, or names an array whose tangent is a parameter of its own; all reasons at once.
    """
    if tangents is not None and not isinstance(tangents, Mapping):
        told = f"tangents must be a dict of arrays by name, or None; got {describe(tangents)}"
        raise UnsupportedProblem([f"{told}: write tangents={{'bias': bias_dot}}"])
    given = {name: tangent for name, tangent in parameters.items() if tangent is not None}
    others = {name: tangent for name, tangent in (tangents or {}).items() if tangent is not None}
    twice = [name for name in others if name in _OF_PARAMETERS]
    if twice:
        raise UnsupportedProblem([f"tangents must not name {name!r}: pass {name}_dot=" for name in twice])
    return given | others


def names_of_tangents(tangents: Any, problem: Problem) -> tuple[str, ...]:
    """The names of the arrays of a problem that have tangents, in its order, from tangents that are not refused."""
    names = tangents.tangents if isinstance(tangents, Directions) else tangents
    names = (names,) if isinstance(names, str) else names
    return tuple(name for name in arrays_with_tangents(problem) if name in names)


def tangent_reasons(tangents: Any, problem: Problem | None, executor: str) -> list[str]:
    """Why a call, or a plan, is refused for its tangents.

    Parameters
    ----------
    tangents : Directions, or names
        Arrays of a call, or what `tangents=` of a plan was given.
    problem : Problem, optional
        Without one, as for a call that is refused already, names and arrays are not compared with it.
    executor : str
        "auto" is resolved.
    """
    reasons = []
    if isinstance(tangents, Directions):
        names = [*tangents.tangents]
        if not names:
            fix = "pass q_dot=, k_dot=, v_dot= or tangents="
            reasons.append(f"{tangents.caller} must be given a tangent; got none: {fix}, or call attention")
    else:
        listed = (tangents,) if isinstance(tangents, str) else tangents
        if not isinstance(listed, (tuple, list)) or not all(isinstance(name, str) for name in listed):
            rule = "tangents must be a name, or a tuple or list of names"
            return [f"{rule}; got {describe(tangents)}: write tangents=('q', 'k', 'v')"]
        names = [*listed]
    if executor in ("gpu", "sim"):
        fix = "pass NumPy arrays, as cupy.asnumpy makes them, or take finite differences"
        reasons.append(f"executor must be 'cpu' for tangents, which no family of kernels has; got {executor!r}: {fix}")
    if problem is None:
        return reasons
    cotangents = tangents.cotangents if isinstance(tangents, Directions) else {}
    wanted = arrays_with_tangents(problem)
    known = [name for name in wanted if name in cotangents or name not in ("do", "dlse")]
    reasons += [reason for name in dict.fromkeys(names) for reason in _name_reasons(name, known, problem)]
    if isinstance(tangents, Directions):
        for name, array in cotangents.items():
            reasons += _array_reasons(name, name, array, *wanted[name])
        for name, array in tangents.tangents.items():
            reasons += _array_reasons(name, shown(name), array, *wanted[name]) if name in known else []
    return reasons


def arrays_with_tangents(problem: Problem) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """The shape and dtype of each array that may have a tangent, by name."""
    return {
        **{name: (shape, problem.dtype) for name, shape in problem.argument_shapes().items()},
        **{each.name: (each.shape, each.dtype) for each in problem.operands if each.name in real_operands(problem)},
        "do": (problem.o_shape(), problem.dtype),
        "dlse": (problem.lse_shape(), problem.accumulator),
    }


def real_operands(problem: Problem) -> list[str]:
    """The names of the operands that hold reals."""
    kinds = {} if problem.score is None else {array.name: array.kind for array in problem.score.arrays}
    return [each.name for each in problem.operands if each.name == "sink" or kinds.get(each.name) == "real"]


def shown(name: str) -> str:
    """What messages call the tangent of an array."""
    return f"{name}_dot" if name in (*_OF_PARAMETERS, *_OF_PASSES) else f"tangents[{name!r}]"


def with_dots(tangents: Mapping[str, Any]) -> dict[str, Any]:
    """Tangents by the names that passes have for them."""
    return {f"{name}{DOT}": tangent for name, tangent in tangents.items()}


def tangents_among(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The tangents among the arrays of a pass, by the names of their arrays, without those that a pass made."""
    names = {name: name.removesuffix(DOT) for name in arrays if name.endswith(DOT)}
    return {of: arrays[name] for name, of in names.items() if of not in _OF_PASSES}


def _name_reasons(name: str, known: list[str], problem: Problem) -> list[str]:
    """Why no array of this name can have a tangent."""
    if name in known:
        return []
    if name.removesuffix("_dot") in (*known, *_OF_PASSES, *_OF_PARAMETERS):
        told = f"tangents names {name!r}, the tangent of a tangent, which a third derivative has"
        return [f"{told}: attention has first and second ones; take finite differences of the second"]
    operand = problem.operand(name)
    if operand is not None:
        return [f"tangents names {name!r}, which holds {operand.dtype}, no reals, and has no tangent: leave it out"]
    arrays = ", ".join(map(repr, known))
    return [f"tangents names {describe(name)}, which is no array of this call: its arrays are {arrays}"]


def _array_reasons(name: str, told: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[str]:
    """Why an array cannot be the tangent of another one, or the gradient of a result."""
    if not is_array(array):
        raise TypeError(no_array(told, array))
    if namespace(array).__name__ != "numpy":
        return [f"{told} must be a NumPy array, as those of executor='cpu' are; got CuPy's: copy it with its get()"]
    came = tuple(array.shape)
    if came == shape and array.dtype == dtype:
        return []
    like = f"{name}'s" if told != name else "o's" if name == "do" else "lse's"
    fixes = []
    if came != shape:
        fixes.append(f"np.broadcast_to({told}, {shape}) repeats it along further axes")
    if array.dtype != dtype:
        fixes.append(f"cast it with {told}.astype({dtype.name!r})")
    rule = f"{told} must have {like} shape {shape} and dtype {dtype}"
    return [f"{rule}; got {came} and {array.dtype}: {', '.join(fixes)}"]
