"""A mask whose blocks are to be listed at each call of a plan, from what its arrays then hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays import Array
from ..errors import UnsupportedProblem
from .arrays import as_mask
from .base import And, Mask, intersection
from .shape import MaskShape


@dataclass(frozen=True, eq=False, repr=False)
class AtEachCall(Mask):
    """A mask that says so of another one."""

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
