"""Tangents and cotangents from other libraries, or in nested lists, converted to arrays."""

from __future__ import annotations

from itertools import product
from typing import Any

from ..arrays import is_array, namespace
from ..errors import UnsupportedProblem
from ..layouts import overlap
from ..planning.options import Directions
from ..planning.tangents import shown
from ..plans.conversion import as_arrays, name_of_out, named_outputs


def arrays_of(tangents: Any) -> list[Any]:
    """Return the arrays of a call's `Directions`; an empty list for a call without tangents."""
    return [*tangents.arrays().values()] if isinstance(tangents, Directions) else []


def known_directions(directions: Directions, arrays: dict[str, Any]) -> Directions:
    """Return tangents and cotangents converted by `as_arrays`; a list gets the dtype of its array.

    Parameters
    ----------
    directions : Directions
    arrays : dict by name
        The other arrays of the call, converted by `as_arrays`.
    """
    known = as_arrays({**arrays, **directions.cotangents})
    named = {shown(name): each for name, each in directions.tangents.items()}
    dtypes = {shown(name): known[name].dtype for name in directions.tangents if hasattr(known.get(name), "dtype")}
    tangents = as_arrays({**known, **named}, dtypes)
    return directions._replace(
        cotangents={name: known[name] for name in directions.cotangents},
        tangents={name: tangents[shown(name)] for name in directions.tangents},
    )


def overwritten_reasons(out: Any, directions: Directions) -> list[str]:
    """Return why a call cannot write to `out`: a later pass reads tangents, which must not change until then."""
    outs = {} if out is None else named_outputs(out)
    named = {name_of_out(result, outs): each for result, each in outs.items()}
    tangents = {shown(name): each for name, each in directions.tangents.items()} if outs else {}
    try:
        arrays = as_arrays({**named, **tangents})
    except UnsupportedProblem:  # the call refuses these arrays
        return []
    return [
        f"{name} must not overlap {tangent} in memory: pass a separate array"
        for name, tangent in product(named, tangents)
        if is_array(arrays[name]) and is_array(arrays[tangent])
        and namespace(arrays[name]) is namespace(arrays[tangent]) and overlap(arrays[name], arrays[tangent])
    ]  # fmt: skip
