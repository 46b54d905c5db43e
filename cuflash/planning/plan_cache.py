"""The cache of plans: calls with the same problem, mask, device, kernel and `deterministic` share one plan."""

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
    """Return the plan of a call, on the host if `kernel` is None, else on a GPU."""
    if kernel is None:
        return host_plan(problem, mask, device)
    return gpu_plan(problem, mask, device, kernel, deterministic)


@dataclass(frozen=True, eq=False, slots=True)
class _MaskKey:
    """A mask that compares equal to all masks with the same content."""

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
    """Return the plan of a call, from the cache if possible; plans for masks that hold arrays are not cached."""
    mask_key = None
    with suppress(TypeError):
        mask_key = _MaskKey(mask, content(mask))
    if mask_key is None:  # not in an except clause, so that errors of a mask's function have no unrelated context
        return _new_plan(problem, mask, device, kernel, deterministic)
    return _cached_plan(problem, mask_key, device, kernel, deterministic)
