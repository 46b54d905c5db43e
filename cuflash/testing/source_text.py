"""Python source of the parts of an example, which messages show, so that the example can be run again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from .. import masks
from ..arrays import is_array, to_host
from ..dropout import Dropout
from ..masks.base import And, Mask, Not, OnBlocks, Or, Xor
from .formulas import Formula
from .mask_strategies import Checkered


_OPERATORS: dict[type[Mask], str] = {And: " & ", Or: " | ", Xor: " ^ "}
_PREFIXES = {Formula: "testing.formulas.", Dropout: "cuflash.", Checkered: "testing.mask_strategies."}
_MOST_LISTED = 64  # arrays with more elements are written as bytes instead of numbers


def source_text(value: Any) -> str:
    """Return Python source of a value, which uses the names `np`, `cuflash`, `masks` and `testing`.

    Functions, and masks or arrays of types that this library does not define, are written as their repr, which may not
    be valid source.

    Examples
    --------
    >>> source_text(masks.Causal() - masks.Dense(np.eye(2, dtype=bool)))
    "(masks.Causal() & ~masks.Dense(allowed=np.array([[True, False], [False, True]], '|b1')))"
    """
    if type(value) in _OPERATORS:
        return f"({_OPERATORS[type(value)].join(map(source_text, value.operands))})"
    if type(value) is Not:
        return f"~{source_text(value.operand)}"
    if type(value) is OnBlocks:
        return f"{source_text(value.mask)}.on_blocks({value.block!r}, mirrored={value.mirrored!r})"
    name = type(value).__name__
    if is_dataclass(value) and getattr(masks, name, None) is type(value):
        values = ((each, getattr(value, each.name)) for each in fields(value) if each.init)
        parts = (f"{each.name}={source_text(part)}" for each, part in values if part is not each.default)
        return f"masks.{name}({', '.join(parts)})"
    if is_array(value) and value.dtype.kind in "biuf":
        return _array_text(np.asarray(to_host(value)))
    return f"{_PREFIXES.get(type(value), '')}{value!r}"


def _array_text(array: np.ndarray) -> str:
    dtype = array.dtype.str
    if not array.size:
        return f"np.zeros({array.shape}, {dtype!r})"
    if array.size <= _MOST_LISTED:
        return f"np.array({array.tolist()}, {dtype!r})"
    if array.dtype == bool:
        packed = f"np.frombuffer(bytes.fromhex('{np.packbits(array).tobytes().hex()}'), '|u1')"
        return f"np.unpackbits({packed}, count={array.size}).astype(bool).reshape({array.shape})"
    return f"np.frombuffer(bytes.fromhex('{array.tobytes().hex()}'), {dtype!r}).reshape({array.shape})"
