"""Cache keys of masks with device arrays, which exclude the arrays' contents because kernels read them at each call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..errors import UnsupportedProblem
from ._chosen import ChosenBlocks
from .arrays import as_mask
from .base import And, Mask, intersection
from .content import DeviceForm, content
from .shape import MaskShape


class MaskContents(NamedTuple):
    """A cache key of a mask that excludes the contents of its device arrays, and these arrays."""

    key: Hashable
    arrays: tuple[Array, ...]


def mask_contents(mask: Mask | Array, layout_of: Callable[..., Hashable]) -> MaskContents | None:
    """Return key and arrays of a mask with a `_device_form`, or of an intersection with such a mask; otherwise None.

    Block lists per query may be intersected with a second such mask, whose arrays follow theirs. `layout_of` returns
    the layout of arrays. Masks that differ only in the contents of their arrays have equal keys.
    """
    keys: list[Hashable] = []
    arrays: tuple[Array, ...] = ()
    num_forms = num_lists = 0
    parts: tuple[Mask | Array, ...] = mask.operands if type(mask) is And else (mask,)
    for part in parts:
        form = _own_form(part) if isinstance(part, Mask) else DeviceForm((part,))
        if form is None:
            try:
                keys.append(content(part))
            except TypeError:  # the mask holds values whose contents are not hashed
                return None
            continue
        layout = None if np.ndarray in map(type, form.arrays) else layout_of(*form.arrays)
        if layout is None:
            return None
        keys.append((type(part), *form.facts, layout))
        num_forms += 1
        if type(part) is ChosenBlocks:
            num_lists += 1
            arrays = *form.arrays, *arrays
        else:
            arrays += form.arrays
    return MaskContents(tuple(keys), arrays) if num_forms == 1 or (num_forms, num_lists) == (2, 1) else None


def _own_form(mask: Mask) -> DeviceForm | None:
    """Return the `_device_form` if the mask's own class defines it; the elements of a subclass may differ."""
    return mask._device_form if "_device_form" in vars(type(mask)) else None


@dataclass(frozen=True, eq=False, repr=False)
class AtEachCall(Mask):
    """A mask whose block lists a plan builds again at each call."""

    mask: Mask

    def resolve(self, shape: MaskShape) -> Mask:
        return AtEachCall(self.mask.resolve(shape))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.mask(b, h, i, j)


def at_each_call(mask: Mask | Array) -> Mask | Array:
    """Wrap a mask so that its blocks are listed at each call; return any other value, which the plan then refuses."""
    try:
        return AtEachCall(as_mask(mask))
    except UnsupportedProblem:
        return mask


def without_at_each_call(mask: Mask) -> tuple[Mask, bool]:
    """Return a resolved mask without the wrappers of `at_each_call`, and whether it had any."""
    parts = mask.operands if type(mask) is And else (mask,)
    inner = [part.mask if isinstance(part, AtEachCall) else part for part in parts]
    return intersection(inner), any(isinstance(part, AtEachCall) for part in parts)
