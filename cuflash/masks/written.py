"""The repr of a mask: the call that constructs it, without defaults, and with long arrays as shape and dtype."""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import FunctionType
from typing import Any

import numpy as np

from ..arrays import is_array, is_sparse
from .coordinates import LeadingArray

_MOST_LISTED = 8  # larger arrays are shown by shape and dtype, and so are those without elements


def written(mask: Any) -> str:
    """Format a mask as a call of its class: fields without a default by position, others by name if they differ."""
    arguments = []
    for field in fields(mask):
        value = getattr(mask, field.name)
        if field.default is MISSING and not field.kw_only:
            arguments.append(_value(value))
        elif not _is_default(value, field.default):
            arguments.append(f"{field.name}={_value(value)}")
    return f"{type(mask).__name__}({', '.join(arguments)})"


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not is_array(value) and bool(value == default))


def _value(value: Any) -> str:
    if isinstance(value, LeadingArray):
        return _value(value.array)
    if isinstance(value, np.ndarray) and 0 < value.size <= _MOST_LISTED:
        return " ".join(repr(value).split())
    if is_array(value):
        return f"<{value.dtype} array of shape {tuple(value.shape)}>"
    if is_sparse(value):
        return f"<{type(value).__name__} of shape {value.shape}, {value.nnz} stored>"
    if type(value) is tuple:
        return f"({', '.join(map(_value, value))}{',' * (len(value) == 1)})"
    return value.__name__ if isinstance(value, FunctionType) else repr(value)
