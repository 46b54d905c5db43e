"""Masks of one array on a device: what is decided by how the array lies, and what by its contents."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from .arrays import Dense
from .base import And, Mask
from .block_pattern import BlockPattern
from .content import content


class MaskContents(NamedTuple):
    """A mask on a device without the contents of its array, and the array."""

    key: Hashable
    array: Any


def mask_contents(mask: Any, layout_of: Callable[..., Hashable]) -> MaskContents | None:
    """Contents of a mask that is, or intersects, one array of elements or of blocks; None of any other mask.

    `layout_of` tells how an array lies; masks that differ in nothing but the contents of their arrays have equal keys.
    """
    keys: list[Any] = []
    arrays: list[Any] = []
    parts: tuple[Any, ...] = mask.operands if type(mask) is And else (mask,)
    for part in parts:
        if isinstance(part, Mask) and type(part) not in (Dense, BlockPattern):
            try:
                keys.append(content(part))
            except TypeError:  # it holds what is not looked at here
                return None
            continue
        array = part.allowed if type(part) is Dense else part.blocks if type(part) is BlockPattern else part
        layout = None if isinstance(array, np.ndarray) else layout_of(array)
        if layout is None:
            return None
        keys.append((type(part), getattr(part, "block", None), layout))
        arrays.append(array)
    return MaskContents(tuple(keys), arrays[0]) if len(arrays) == 1 else None
