"""Arguments of `error_bound` as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import DTYPES, Array, describe, is_array, no_array
from ..errors import refuse
from ..layouts import kind_of
from ..planning.options import Directions
from ..planning.problem import Problem
from ..planning.tangents import shown, tangent_reasons
from ..plans.conversion import as_arrays


def host_arrays(arguments: dict[str, Array]) -> list[Array]:
    """Return the arguments as NumPy arrays; do, dlse and sink may be None."""
    arrays = as_arrays(arguments)
    for name, array in arrays.items():
        if not is_array(array) and name != "sink" and not (array is None and name in ("do", "dlse")):
            raise TypeError(no_array(name, array))
    reasons = [
        f"{name} must be a NumPy array; got {kind_of(array)}: copy it with .get()"
        for name, array in arrays.items()
        if is_array(array) and not isinstance(array, np.ndarray)
    ]
    refuse(reasons)
    return list(arrays.values())


def host_tangents(reasons: list[str], tangents: Any, problem: Problem) -> dict[str, Array]:
    """Return the tangents of a call's arrays by name; append to `reasons` why they are invalid."""
    if not isinstance(tangents, Mapping) or not tangents:
        refusal = f"tangents must be a non-empty dict of arrays by name, or None; got {describe(tangents)}"
        reasons += [] if tangents is None else [f"{refusal}: write tangents={{'q': q_dot}}"]
        return {}
    names = [*tangents]
    arrays = dict(zip(names, host_arrays({shown(name): tangents[name] for name in names})))
    of_results = {"do": problem.o_shape(), "dlse": problem.lse_shape()}
    for name, shape in of_results.items():
        reasons += cotangent_reasons(shown(name), arrays.get(name), shape)
    others = {name: array for name, array in arrays.items() if name not in of_results}
    if others:
        reasons += tangent_reasons(Directions("error_bound", others), problem, "cpu")
    return arrays


def cotangent_reasons(name: str, array: Array | None, shape: tuple[int, ...]) -> list[str]:
    if array is None or array.shape == shape and (array.dtype in DTYPES or array.dtype.kind in "iuf"):
        return []
    result = name.removeprefix("d")
    rule = f"{name} must have {result}'s shape for these q, k and v, {shape}, and hold real numbers"
    return [f"{rule}; got {describe(array)}"]
