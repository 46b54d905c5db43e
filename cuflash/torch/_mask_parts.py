"""The classes, numbers and tensors of masks that compiled functions create or pass to calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import torch

from ..calls._call_text import masks_of_library
from ..masks.base import Mask
from ..masks.content import UNCHECKED
from ._tensors import Tensor

Parts: TypeAlias = tuple[Any, ...]  # as in `MaskOfTensors`
MASK = "mask="  # the name of a boolean tensor as mask, and the start of those of a mask's tensors; no score has it
_DEEPEST = 16
_TUPLE = "tuple"
_KINDS = {kind.__name__: kind for kind in masks_of_library()}
_FIELDS = {kind: tuple([each.name for each in fields(kind) if each.init]) for kind in _KINDS.values()}


class MaskOfTensors(NamedTuple):
    """A mask that a compiled function creates from tensors, which are inputs of its graph.

    Attributes
    ----------
    parts : tuple
        For a mask, the name of its class and a tuple with the parts of its fields; for a tuple, "tuple" and the parts
        of its elements. Otherwise one value: the name of a tensor, a number, another string, or None.
    """

    parts: Parts

    def over(self, tensors: Mapping[str, Tensor]) -> Mask:
        """Return the mask of these tensors.

        Raises
        ------
        UnsupportedProblem
            A field of the mask is invalid.
        """
        mask: Mask = _whole(self.parts, tensors)
        return mask


def _whole(parts: Parts, tensors: Mapping[str, Tensor]) -> Any:
    if len(parts) == 1:
        (value,) = parts
        return tensors[value] if isinstance(value, str) and value.startswith(MASK) else value
    name, rest = parts
    values = [_whole(each, tensors) for each in rest]
    return tuple(values) if name == _TUPLE else _KINDS[name](**dict(zip(_FIELDS[_KINDS[name]], values)))


def parts_of(value: Any, tensors: dict[str, Tensor], depth: int = _DEEPEST) -> Parts | None:
    """Return the parts of a mask as in `MaskOfTensors`, and add its tensors by name; None if it has other parts.

    `torch.compile` traces this function, and compares the parts by value.
    """
    if isinstance(value, torch.Tensor):
        name = f"{MASK}{len(tensors)}"
        tensors[name] = value
        return (name,)
    if value is None or isinstance(value, (str, int, float)):
        return (constant(value),)
    names = _FIELDS.get(type(value))
    if not depth or names is None and type(value) is not tuple:
        return None
    rest = value if names is None else [getattr(value, name) for name in names]
    parts = tuple([parts_of(each, tensors, depth - 1) for each in rest])
    return None if None in parts else (type(value).__name__, parts)


def constant(value: Any) -> Any:
    """Return a value without symbols: a graph would take numbers that differ between calls as inputs."""
    if isinstance(value, tuple):
        return tuple([constant(each) for each in value])
    is_number = isinstance(value, (int, float, torch.SymInt)) and not isinstance(value, bool)
    return torch.fx.experimental.symbolic_shapes.guard_scalar(value) if is_number else value


def _unless_compiling(check: Callable[[Mask], None]) -> Callable[[Mask], None]:
    @wraps(check)
    def checked(self: Mask) -> None:
        if torch.compiler.is_dynamo_compiling():
            object.__setattr__(self, UNCHECKED, True)
        else:
            check(self)

    return checked


def trace_masks(trace: Callable[..., None]) -> None:
    """Let compiled functions create masks without their checks, which run when a call creates the masks again.

    `trace` lets `torch.compile` trace a function within a graph, and only there.
    """
    for kind in _KINDS.values():
        own = vars(kind)
        if "__post_init__" in own:
            setattr(kind, "__post_init__", _unless_compiling(own["__post_init__"]))
            trace(own["__post_init__"])
        if "__init__" in own:
            trace(own["__init__"])
