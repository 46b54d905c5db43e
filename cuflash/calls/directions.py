"""Tangents and cotangents of other libraries, and in nested lists, as arrays."""

from __future__ import annotations

from typing import Any

from ..planning.options import Directions
from ..planning.tangents import shown
from ..plans import as_arrays


def known_directions(directions: Directions, arrays: dict[str, Any]) -> Directions:
    """Return tangents and cotangents as `as_arrays` takes them; a list has the dtype of the array beside it.

    Parameters
    ----------
    directions : Directions
    arrays : dict by name
        The other arrays of the call.
    """
    cotangents, named = directions.cotangents, {shown(name): each for name, each in directions.tangents.items()}
    primals = {told: getattr(arrays.get(name), "dtype", None) for told, name in zip(named, directions.tangents)}
    dtypes = {told: dtype for told, dtype in primals.items() if dtype is not None}
    known = list(as_arrays({**arrays, **cotangents, **named}, dtypes).values())
    first, middle = len(arrays), len(arrays) + len(cotangents)
    return directions._replace(
        cotangents=dict(zip(cotangents, known[first:middle])), tangents=dict(zip(directions.tangents, known[middle:]))
    )
