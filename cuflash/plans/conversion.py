"""Conversion of other libraries' arrays, and of lists, to the arrays that executors read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array, is_array, is_list, is_ragged, namespace, of_list
from ..errors import UnsupportedProblem, refuse
from ..executors import gpu
from ..layouts import dtypes_of_lists, is_foreign, is_on_cuda, is_tracer, kind_of, taken
from ..masks.base import Mask
from ..masks.content import held_arrays

Out: TypeAlias = Array | Sequence[Array] | None  # the value of `out=`: the array for o, or a pair for o and lse
NAMESPACES = {"cpu": "numpy", "gpu": "cupy", "sim": "numpy"}


def named_outputs(out: Out) -> dict[str, Array]:
    """Return the arrays of `out=` by result name, without those that are None."""
    pair = out if isinstance(out, (tuple, list)) and len(out) == 2 else (out,)
    return {name: array for name, array in zip(("o", "lse"), pair) if array is not None}


def name_of_out(result: str, outs: Mapping[str, Array]) -> str:
    """Return the name of an array of `out=` in messages."""
    return "out[1]" if result == "lse" else "out[0]" if "lse" in outs else "out"


def outputs_as_arrays(outs: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays that a call writes to, converted by `as_arrays`, by result name."""
    arrays = as_arrays({name_of_out(result, outs): array for result, array in outs.items()})
    return dict(zip(outs, arrays.values()))


def as_arrays(
    values: Mapping[str, Any], dtypes: Mapping[str, DTypeLike] | None = None, like: Array = None
) -> dict[str, Array]:
    """Return other libraries' arrays as CuPy or NumPy arrays, in place and without a copy; other values unchanged.

    Nested lists of numbers become arrays on the device of the other arrays, or of `like`. A list has no dtype of its
    own: q, k, v, o and do get the dtype of the first of them that is an array; lse and dlse that of its accumulator.

    Parameters
    ----------
    values : dict by name
        Arrays, or other values that a call may receive instead of arrays.
    dtypes : dict of dtypes by name, optional
        Dtypes of lists with these names, in the format of `of_list`.
    like : array, optional
        An array that is not among the values.

    Raises
    ------
    UnsupportedProblem
        A value is not supported; the error lists all reasons.
    RuntimeError
        An array is on a GPU, and CuPy is missing.
    """
    arrays, reasons = dict(values), list[str]()
    lists = [name for name, value in values.items() if is_list(value) or is_ragged(value)]
    known = dtypes_of_lists(values) | dict(dtypes or {}) if lists else {}
    for name, value in values.items():
        try:
            if name in known and name in lists:
                arrays[name] = of_list(name, value, known[name])
            elif is_foreign(value):
                arrays[name] = taken(name, value, gpu.namespace() if is_on_cuda(name, value) else np)
            elif is_array(value) and namespace(value).__name__ not in NAMESPACES.values():
                fix = "pass its todense()" if hasattr(value, "todense") else "call this outside of traced code"
                if name in ("q", "k", "v") and is_tracer(value):
                    fix += ", or call cuflash.jax.attention"
                reasons.append(f"{name} must support DLPack export; got {kind_of(value)}: {fix}")
        except UnsupportedProblem as error:
            reasons.extend(error.reasons)
    refuse(reasons)
    if lists and any(namespace(value).__name__ == "cupy" for value in (like, *arrays.values())):
        arrays |= {name: gpu.namespace().asarray(arrays[name]) for name in lists if is_array(arrays[name])}
    return arrays


def as_mask_of_arrays(mask: Any, executor: str, like: Array = None) -> Any:
    """Return the value of `mask=`, with other libraries' arrays converted by `as_arrays`; other values unchanged.

    A list becomes an array on the device of `like`.

    Raises
    ------
    UnsupportedProblem
        An array is not supported, or is on a GPU that the executor does not use.
    RuntimeError
        An array is on a GPU, and CuPy is missing.
    """

    def take(array: Array) -> Array:
        if is_foreign(array) and is_on_cuda("mask", array) and executor != "gpu":
            refusal = f"mask's arrays must be on q's device; got {kind_of(array)} on a CUDA device with q on the host"
            raise UnsupportedProblem([f"{refusal}: copy them to the host, or q, k and v to the device"])
        return as_arrays({"mask": array}, like=like)["mask"]

    if not isinstance(mask, Mask):
        return None if mask is None else take(mask)
    is_known = all(namespace(array).__name__ in NAMESPACES.values() for array in held_arrays(mask))
    return mask if is_known else mask.to(take)
