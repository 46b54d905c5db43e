"""Arguments of masks: arrays of other libraries, numbers of keys on either side, lengths a batch entry."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import describe, is_array, is_int, is_integer_dtype, whole_number
from ..errors import UnsupportedProblem, collecting
from ..memory import is_foreign, is_on_cuda, kind_of, taken
from .base import Mask


def take_arrays(mask: Mask, names: dict[str, str]) -> None:
    """Take the host arrays of other libraries in some fields of a mask being made, where they lie; names of fields, and
    what messages call them.

    What is on a CUDA device is taken by the call that knows which library reads it there.
    """
    reasons: list[str] = []
    for field, name in names.items():
        value = getattr(mask, field)
        with collecting(reasons):
            if not is_foreign(value):
                continue
            if not is_on_cuda(name, value):
                object.__setattr__(mask, field, taken(name, value, np))
            elif not is_array(value):
                reasons.append(f"{name} lies on a CUDA device, as {kind_of(value)}: give cupy.from_dlpack({name})")
    if reasons:
        raise UnsupportedProblem(reasons)


def convert_sides(mask: Mask, meaning: str) -> None:
    for name in ("left", "right"):
        side = getattr(mask, name)
        if side is not None:
            object.__setattr__(mask, name, whole_number(name, side, 0, meaning))


def converted_length(name: str, value: Any) -> Any:
    if is_int(value) and value >= 0:
        return int(value)
    if not (is_array(value) and is_integer_dtype(value.dtype)):
        raise UnsupportedProblem(
            [f"{name} must be an int of at least 0, or an integer array over the leading axes; got {describe(value)}"]
        )
    return value
