"""Arrays of other libraries that a call is given, before it is looked up."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..arrays import namespace
from ..errors import UnsupportedProblem
from ..planning.options import Options
from ..plans import as_arrays, as_mask_of_arrays


def with_known_arrays(
    given: dict[str, Any], outs: tuple[Any, ...], options: Options
) -> tuple[dict[str, Any], tuple[Any, ...], Options]:
    """The arrays of a call with those of other libraries as `as_arrays` takes them; the plan says what cannot be."""
    given = as_arrays(given)
    if outs:
        names = ("out",) if len(outs) == 1 else ("out[0]", "out[1]")
        with suppress(UnsupportedProblem):
            outs = tuple(as_arrays(dict(zip(names, outs))).values())
    if options.mask is not None:
        with suppress(UnsupportedProblem):
            where = "gpu" if namespace(given["q"]).__name__ == "cupy" else "cpu"
            options = options._replace(mask=as_mask_of_arrays(options.mask, where, given["q"]))
    return given, outs, options
