"""Masks on a device that vary by the contents of one array, or of offsets; all else is decided by how these lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from .arrays import Dense
from .base import And, Mask
from .block_pattern import BlockPattern
from .content import content
from .sequences import Sequences


class MaskContents(NamedTuple):
    """A mask on a device without the contents of its arrays, and these arrays."""

    key: Hashable
    arrays: tuple[Any, ...]


def mask_contents(mask: Any, layout_of: Callable[..., Hashable]) -> MaskContents | None:
    """Contents of a mask that is, or intersects, one array of elements or of blocks, or sequences; None of any other.

    `layout_of` tells how arrays lie; masks that differ in nothing but the contents of their arrays have equal keys.
    """
    keys: list[Any] = []
    found: tuple[Any, ...] | None = None
    parts: tuple[Any, ...] = mask.operands if type(mask) is And else (mask,)
    for part in parts:
        if isinstance(part, Mask) and type(part) not in (Dense, BlockPattern, Sequences):
            try:
                keys.append(content(part))
            except TypeError:  # it holds what is not looked at here
                return None
            continue
        arrays, more = _arrays_of(part)
        layout = None if any(isinstance(array, np.ndarray) for array in arrays) else layout_of(*arrays)
        if layout is None or found is not None:
            return None
        keys.append((type(part), *more, layout))
        found = arrays
    return None if found is None else MaskContents(tuple(keys), found)


def _arrays_of(part: Any) -> tuple[tuple[Array, ...], tuple[Hashable, ...]]:
    """The arrays of a part of a mask, and what decides it beside them."""
    if type(part) is Sequences:
        return part.arrays, (part.causal, part.window)
    array = part.allowed if type(part) is Dense else part.blocks if type(part) is BlockPattern else part
    return (array,), (getattr(part, "block", None),)
