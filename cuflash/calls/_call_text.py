"""The canonical text of a call: JSON of its records, each with its class name; `Call.parse` reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from ..dropout import Draws, Dropout
from ..masks.base import Mask
from ..masks.content import opaque_values
from ..masks.places import Places
from ..masks.shape import MaskShape
from ..planning.operands import Operand
from ..planning.options import Options
from ..planning.problem import Problem
from ..planning.scales import RowsPerScale
from ..scores.program import ArrayType, Instruction, Program
from ..scores.trace import Traced

_RECORDS = (
    Problem, Places, MaskShape, Operand, Draws, RowsPerScale, Program, Instruction, ArrayType, Options, Dropout, Traced,
)  # fmt: skip
_ROOT = __name__.partition(".")[0]
_PLAIN = (type(None), bool, int, float, str)


def call_text(call: Any) -> str:
    """Return the text of a frozen record.

    Raises
    ------
    TypeError
        The record holds something without a text, such as an array or a function.
    """
    return json.dumps(_encoded(call), separators=(",", ":"))


def call_digest(text: str) -> str:
    """Return 32 hexadecimal digits that practically never collide."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parsed_call(text: str, *kinds: type[Any]) -> Any:
    """Return the record that a text describes, which may contain further records of the classes `kinds`."""
    classes = {each.__name__: each for each in (*kinds, *_RECORDS, *masks_of_library())}
    return _decoded(json.loads(text), classes)


def masks_of_library(kind: type[Mask] = Mask) -> Iterator[type[Mask]]:
    """Yield the classes of masks that every process has."""
    for each in kind.__subclasses__():
        if _is_ours(each):
            yield each
            yield from masks_of_library(each)


def _is_ours(kind: type) -> bool:
    """True if every process has the class: it belongs to the library."""
    return kind.__module__.partition(".")[0] == _ROOT


def _encoded(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        return [_encoded(each) for each in value]
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    name = type(value).__name__
    is_whole = _is_ours(type(value)) and not (isinstance(value, Mask) and opaque_values(value))
    if is_whole and is_dataclass(value):
        return {name: {each.name: _encoded(getattr(value, each.name)) for each in fields(value) if each.init}}
    if is_whole and hasattr(value, "_asdict"):
        return {name: {field: _encoded(each) for field, each in value._asdict().items()}}
    raise TypeError(f"a call with {name} has no text: write a mask in closed form, such as masks.Causal()")


def _decoded(value: Any, classes: dict[str, type[Any]]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return tuple(_decoded(each, classes) for each in value)
    ((name, content),) = value.items()
    if name == "dtype":
        return np.dtype(content)
    return classes[name](**{field: _decoded(each, classes) for field, each in content.items()})
