"""Arguments of `error_bound` as arrays of NumPy."""

from __future__ import annotations


import numpy as np

from ..arrays import Array, is_array, no_array
from ..errors import refuse
from ..layouts import kind_of
from ..plans import as_arrays


def host_arrays(given: dict[str, Array]) -> list[Array]:
    """The arguments as NumPy's arrays; None where do, dlse and sink are not given."""
    arrays = as_arrays(given)
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
