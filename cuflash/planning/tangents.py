"""The tangents of a call's arrays: their names, and the checks that they fit the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array, describe, is_array, namespace, no_array
from ..errors import UnsupportedProblem
from ..layouts import COPIES, kind_of, layout_reasons
from ..masks.shape import broadcasts_to
from .options import DOT, Directions
from .problem import ArrayLayout, Problem

_OF_PARAMETERS = ("q", "k", "v", "do", "dlse")  # arrays whose tangents have their own parameters, such as q_dot
_OF_PASSES = ("o", "lse")


def gathered(tangents: Mapping[str, Array] | None, **parameters: Array) -> dict[str, Array]:
    """Return tangents by the names of their arrays, without those that are None.

    Parameters
    ----------
    tangents : mapping of str to array, or None
        The value of `tangents=`.
    **parameters : array, or None
        Tangents that have their own parameters, by the names of their arrays.

    Raises
    ------
    UnsupportedProblem
        `tangents` is not a mapping, or names an array whose tangent has its own parameter. The message lists all
        reasons.
    """
    if tangents is not None and not isinstance(tangents, Mapping):
        rule = f"tangents must be a dict of arrays by name, or None; got {describe(tangents)}"
        raise UnsupportedProblem([f"{rule}: write tangents={{'bias': bias_dot}}"])
    own = {name: tangent for name, tangent in parameters.items() if tangent is not None}
    others = {name: tangent for name, tangent in (tangents or {}).items() if tangent is not None}
    twice = [name for name in others if name in _OF_PARAMETERS]
    if twice:
        raise UnsupportedProblem([f"tangents must not name {name!r}: pass {name}_dot=" for name in twice])
    return own | others


def names_of_tangents(tangents: Any, problem: Problem) -> tuple[str, ...]:
    """Return the names of a problem's arrays that have tangents, in the problem's order; `tangents` must be valid."""
    names = tangents.tangents if isinstance(tangents, Directions) else tangents
    names = (names,) if isinstance(names, str) else names
    return tuple(name for name in arrays_with_tangents(problem) if name in names)


def tangent_reasons(tangents: Any, problem: Problem | None, executor: str) -> list[str]:
    """Return why the tangents of a call, or of a plan, are refused.

    Parameters
    ----------
    tangents : Directions, or names
        The arrays of a call, or the value of `tangents=` of a plan.
    problem : Problem, optional
        If it is None, because the call is invalid for other reasons, names and arrays are not checked.
    executor : str
        The resolved executor, not "auto".
    """
    reasons = []
    if isinstance(tangents, Directions):
        names = [*tangents.tangents]
        if not names:
            fix = "pass q_dot=, k_dot=, v_dot= or tangents="
            reasons.append(f"{tangents.caller} needs at least one tangent; got none: {fix}, or call attention")
    else:
        listed = (tangents,) if isinstance(tangents, str) else tangents
        if not isinstance(listed, (tuple, list)) or not all(isinstance(name, str) for name in listed):
            rule = "tangents must be a name, or a tuple or list of names"
            return [f"{rule}; got {describe(tangents)}: write tangents=('q', 'k', 'v')"]
        names = [*listed]
    cotangents = tangents.cotangents if isinstance(tangents, Directions) else {}
    if problem is None:
        return reasons
    wanted = arrays_with_tangents(problem)
    known = [name for name in wanted if name in cotangents or name not in ("do", "dlse")]
    reasons += [reason for name in dict.fromkeys(names) for reason in _name_reasons(name, known, problem)]
    if isinstance(tangents, Directions):
        for name, array in cotangents.items():
            reasons += _array_reasons(name, name, array, *wanted[name], executor)
        for name, array in tangents.tangents.items():
            reasons += _array_reasons(name, shown(name), array, *wanted[name], executor) if name in known else []
    return reasons


def arrays_with_tangents(problem: Problem) -> dict[str, ArrayLayout]:
    """Return the shape and dtype of each array that may have a tangent, by name."""
    names = {*_OF_PARAMETERS, *real_operands(problem)}
    return {name: layout for name, layout in problem.array_layouts().items() if name in names}


def real_operands(problem: Problem) -> list[str]:
    """Return the names of the operands that hold real numbers."""
    kinds = {} if problem.score is None else {array.name: array.kind for array in problem.score.arrays}
    return [each.name for each in problem.operands if each.name == "sink" or kinds.get(each.name) == "real"]


def shown(name: str) -> str:
    """Return the name of an array's tangent in error messages."""
    return f"{name}_dot" if name in (*_OF_PARAMETERS, *_OF_PASSES) else f"tangents[{name!r}]"


def with_dots(tangents: Mapping[str, Array]) -> dict[str, Array]:
    """Return tangents by the names under which passes read them."""
    return {f"{name}{DOT}": tangent for name, tangent in tangents.items()}


def tangents_among(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tangents among the arrays of a pass, by the names of their arrays, except tangents of results."""
    names = {name: name.removesuffix(DOT) for name in arrays if name.endswith(DOT)}
    return {of: arrays[name] for name, of in names.items() if of not in _OF_PASSES}


def _name_reasons(name: str, known: list[str], problem: Problem) -> list[str]:
    """Return why no array of this name can have a tangent."""
    if name in known:
        return []
    is_cotangent = name in ("do", "dlse")
    is_name = isinstance(name, str) and not is_cotangent
    if is_name and name.removesuffix("_dot") in (*known, *_OF_PASSES, *_OF_PARAMETERS):
        rule = f"tangents must not name {name!r}, the tangent of a tangent, since third derivatives are not supported"
        return [f"{rule}: use finite differences of the second derivative"]
    operand = problem.operand(name)
    if operand is not None:
        return [f"tangents must name real arrays; got {name!r}, which holds {operand.dtype}: omit it"]
    arrays = ", ".join(map(repr, known))
    fix = f": pass {name}_dot= together with {name}=" if is_cotangent else ""
    return [f"tangents must name arrays of this call, which are {arrays}; got {describe(name)}{fix}"]


def _array_reasons(
    name: str, label: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[np.generic], executor: str
) -> list[str]:
    """Return why an array cannot be the tangent of array `name`, or the gradient of a result; `label` is its name."""
    if not is_array(array):
        raise TypeError(no_array(label, array))
    place = "cupy" if executor == "gpu" else "numpy"
    if namespace(array).__name__ != place:
        rule = f"{label} must be a {place} array for executor={executor!r}"
        return [f"{rule}; got {kind_of(array)}: copy it with {COPIES[place]}"]
    reasons, actual = [] if executor == "cpu" else layout_reasons(label, array), tuple(array.shape)
    if actual == shape and array.dtype == dtype:
        return reasons
    like = f"{name}'s" if label != name else "o's" if name == "do" else "lse's"
    fixes = []
    if actual != shape and broadcasts_to(actual, shape):
        fixes.append(f"np.broadcast_to({label}, {shape}) repeats it along further axes")
    if array.dtype != dtype:
        fixes.append(f"cast it to {dtype.name}")
    rule, fix = f"{label} must have {like} shape {shape} and dtype {dtype}", f": {', '.join(fixes)}" if fixes else ""
    return [*reasons, f"{rule}; got {actual} and {array.dtype}{fix}"]
