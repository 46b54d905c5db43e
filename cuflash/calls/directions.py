"""Tangents and cotangents from other libraries, or in nested lists, converted to arrays."""

from __future__ import annotations

from typing import Any

from ..arrays import is_array, namespace
from ..layouts import overlap
from ..planning.options import Directions
from ..planning.tangents import shown
from ..plans.conversion import as_arrays, name_of_out


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


def overwritten_reasons(outs: dict[str, Any], tangents: Any) -> list[str]:
    """Return why a call cannot write its results: a later pass reads tangents, which must not change until then."""
    if not outs or not isinstance(tangents, Directions):
        return []
    return [
        f"{name_of_out(result, outs)} must not overlap {shown(name)} in memory: pass a separate array"
        for result, out in outs.items()
        for name, tangent in tangents.tangents.items()
        if is_array(out) and is_array(tangent) and namespace(out) is namespace(tangent) and overlap(out, tangent)
    ]
