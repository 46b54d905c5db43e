"""Masks whose arrays are on a device, without the contents of these arrays, which kernels read at each call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..errors import UnsupportedProblem
from .arrays import as_mask
from .base import And, Mask, intersection
from .content import DeviceForm, content
from .shape import MaskShape


class MaskContents(NamedTuple):
    """A mask on a device without the contents of its arrays, and these arrays."""

    key: Hashable
    arrays: tuple[Array, ...]


def mask_contents(mask: Mask | Array, layout_of: Callable[..., Hashable]) -> MaskContents | None:
    """Return the contents of a mask that has a `_device_form`, or intersects one that has; None of any other mask.

    `layout_of` tells how arrays lie; masks that differ in nothing but the contents of their arrays have equal keys.
    """
    keys: list[Hashable] = []
    found: tuple[Array, ...] | None = None
    parts: tuple[Mask | Array, ...] = mask.operands if type(mask) is And else (mask,)
    for part in parts:
        form = _own_form(part) if isinstance(part, Mask) else DeviceForm((part,))
        if form is None:
            try:
                keys.append(content(part))
            except TypeError:  # it holds what is not looked at here
                return None
            continue
        layout = None if any(isinstance(array, np.ndarray) for array in form.arrays) else layout_of(*form.arrays)
        if layout is None or found is not None:
            return None
        keys.append((type(part), *form.facts, layout))
        found = form.arrays
    return None if found is None else MaskContents(tuple(keys), found)


def _own_form(mask: Mask) -> DeviceForm | None:
    """Return the `_device_form` that the class of a mask itself defines: a subclass may have other elements."""
    return mask._device_form if "_device_form" in vars(type(mask)) else None


@dataclass(frozen=True, eq=False, repr=False)
class AtEachCall(Mask):
    """A mask whose blocks are to be listed at each call of a plan."""

    mask: Mask

    def resolve(self, shape: MaskShape) -> Mask:
        return AtEachCall(self.mask.resolve(shape))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.mask(b, h, i, j)


def at_each_call(mask: Mask | Array) -> Mask | Array:
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
