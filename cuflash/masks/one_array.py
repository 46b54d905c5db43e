"""Masks on a device that vary by the contents of one array, or of offsets; all else is decided by how these lie.

Their blocks may be listed at each call of a plan, from what the arrays then hold.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..errors import UnsupportedProblem
from .arrays import Dense, as_mask
from .base import And, Mask, intersection
from .block_pattern import BlockPattern
from .content import content
from .sequences import Sequences
from .shape import MaskShape


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


@dataclass(frozen=True, eq=False, repr=False)
class AtEachCall(Mask):
    """A mask whose blocks are to be listed at each call of a plan."""

    mask: Mask

    def resolve(self, shape: MaskShape) -> Mask:
        return AtEachCall(self.mask.resolve(shape))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.mask(b, h, i, j)


def at_each_call(mask: Any) -> Any:
    """Return a mask that is listed at each call, in place of an argument; what is no mask is left to the plan."""
    try:
        return AtEachCall(as_mask(mask))
    except UnsupportedProblem:
        return mask


def without_at_each_call(mask: Mask) -> tuple[Mask, bool]:
    """A resolved mask as it was before `at_each_call`, and whether a part of it came from there."""
    parts = mask.operands if type(mask) is And else (mask,)
    inner = [part.mask if isinstance(part, AtEachCall) else part for part in parts]
    return intersection(inner), any(isinstance(part, AtEachCall) for part in parts)
