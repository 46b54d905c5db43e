"""Comparison of the arguments of all ranks before any data moves, by texts that differ if the arguments differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from ..arrays import describe, is_array, is_number, to_host
from ..blocks.index import BlockIndex
from ..dropout import Dropout
from ..masks.arrays import FromFunction
from ..masks.base import Mask
from ..masks.content import held_arrays, held_masks
from ..scores import Score

_SHOWN = 60  # maximum number of characters of a value in a message


def fingerprint(value: Any) -> str:
    """Return a text that represents an argument; equal arguments have equal texts on all ranks."""
    if is_array(value):
        return f"{describe(value)} with digest {_digest(np.ascontiguousarray(to_host(value)).tobytes())}"
    if isinstance(value, (BlockIndex, Mask)):
        masks = held_masks(value) if isinstance(value, Mask) else ()
        functions = [each.function for each in masks if isinstance(each, FromFunction)]
        return f"{value!r} {[fingerprint(each) for each in (*held_arrays(value), *functions)]}"
    if isinstance(value, Score):
        arrays = {name: fingerprint(each) for name, each in value.arrays.items()}
        return f"{value.name} {value.numbers} {arrays} {value.program!r}"
    if isinstance(value, Dropout):
        return f"{value!r} {fingerprint(value.seed)}"
    if isinstance(value, partial):
        arguments = [*map(fingerprint, value.args)], sorted(value.keywords.items())
        return f"partial of {fingerprint(value.func)}, {arguments}"
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()] + [*(value.__defaults__ or ())]
        known = [fingerprint(each) for each in held if is_number(each) or is_array(each)]
        return f"{value.__name__}() with digest {_digest(f'{_text_of_code(value.__code__)} {known}'.encode())}"
    return repr(value)


def _text_of_code(code: CodeType) -> str:
    """Return a text of compiled code without addresses, which differ between processes."""
    constants = [_text_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()[:8]


def refusal(offers: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> list[str]:
    """Return why a call is refused, from each rank's own reasons and the texts of its arguments by name.

    These are the reasons of all ranks, or the first difference of their texts.
    """
    of_ranks = [list(reasons) for reasons, _ in offers]
    if not any(of_ranks):
        return disagreement([texts for _, texts in offers])
    if all(each == of_ranks[0] for each in of_ranks):
        return of_ranks[0]
    return [f"rank {n}: {reason}" for n, reasons in enumerate(of_ranks) for reason in reasons]


def disagreement(calls: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why ranks do not ask for the same call, from the texts of their arguments by name."""
    for rank, call in enumerate(calls):
        if call == calls[0]:
            continue
        for name, text in call.items():
            if text != calls[0].get(name):
                first, other = (f"{name}={_short(each.get(name))}" for each in (calls[0], call))
                return [f"ranks must ask for the same call: rank 0 has {first}, rank {rank} has {other}"]
    return []


def _short(text: Any) -> str:
    text = str(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
