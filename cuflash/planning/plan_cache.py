"""A cache of plans: calls of one problem, mask, device, kernel and setting of `deterministic` plan once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from ..masks.base import Mask
from ..masks.content import Content, content
from .device import DeviceSpec
from .plan import KernelPlan, gpu_plan, host_plan
from .problem import Problem


def _new_plan(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str | None, deterministic: bool) -> KernelPlan:
    """Return the plan of a call on the host where `kernel` is None, else on a GPU."""
    if kernel is None:
        return host_plan(problem, mask, device)
    return gpu_plan(problem, mask, device, kernel, deterministic)


@dataclass(frozen=True, eq=False, slots=True)
class _MaskKey:
    """A mask that counts as equal to all of its content."""

    mask: Mask
    content: Content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MaskKey) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


@lru_cache(maxsize=256)
def _cached_plan(
    problem: Problem, mask_key: _MaskKey, device: DeviceSpec, kernel: str | None, deterministic: bool
) -> KernelPlan:
    return _new_plan(problem, mask_key.mask, device, kernel, deterministic)


def plan_for(problem: Problem, mask: Mask, device: DeviceSpec, kernel: str | None, deterministic: bool) -> KernelPlan:
    """Return the plan of a call, from the cache where one is there; masks that hold arrays are not cached."""
    mask_key = None
    with suppress(TypeError):
        mask_key = _MaskKey(mask, content(mask))
    if mask_key is None:  # outside of what caught the error, which would be the context of those of a mask's function
        return _new_plan(problem, mask, device, kernel, deterministic)
    return _cached_plan(problem, mask_key, device, kernel, deterministic)
