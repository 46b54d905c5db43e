"""Comparison of the arguments of all ranks before any data moves, by texts that differ if the arguments differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import describe, is_array, to_host
from ..blocks.index import BlockIndex
from ..dropout import Dropout
from ..masks.base import Mask
from ..masks.content import held_arrays
from ..scores import Score

_SHOWN = 60  # maximum number of characters of a value in a message


def fingerprint(value: Any) -> str:
    """Return a text that represents an argument; equal arguments have equal texts on all ranks."""
    if is_array(value):
        host = np.ascontiguousarray(to_host(value))
        digest = hashlib.sha1(host.view(np.uint8).tobytes() if host.ndim else host.tobytes()).hexdigest()[:8]
        return f"{describe(value)} with digest {digest}"
    if isinstance(value, (BlockIndex, Mask)):
        return f"{value!r} {[fingerprint(each) for each in held_arrays(value)]}"
    if isinstance(value, Score):
        arrays = {name: fingerprint(each) for name, each in value.arrays.items()}
        return f"{value.name} {value.numbers} {arrays} {value.program!r}"
    if isinstance(value, Dropout):
        return f"{value!r} {fingerprint(value.seed)}"
    if callable(value) and hasattr(value, "__code__"):
        return f"{value.__name__} {value.__code__.co_code.hex()} {value.__code__.co_consts!r}"
    return repr(value)


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
