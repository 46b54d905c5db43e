"""The operands of a call, which are its arrays other than q, k and v: their rules, and which of them have gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import DTYPES, Array, ShapeDtype, describe, is_array, is_number
from ..errors import UnsupportedProblem, refuse
from ..masks.shape import broadcasts_to


class Operand(NamedTuple):
    """The name, shape and dtype of an array of a call other than q, k and v.

    >>> Operand("sink", (8,), np.dtype(np.float32))
    Operand(name='sink', shape=(8,), dtype=dtype('float32'), is_captured=False)
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    is_captured: bool = False  # the score function reads it

    @property
    def key(self) -> str:
        """The name under which executors read the operand; its gradient is named ``d<key>``."""
        return f"score.{self.name}" if self.is_captured else self.name


def operands_of(arrays: Mapping[str, Array], heads_shape: tuple[int, ...]) -> tuple[Operand, ...]:
    """Return the operands of a problem from the arrays, or `ShapeDtype`, of a call.

    Parameters
    ----------
    arrays : dict by name
        None means that the call does not have this operand.
    heads_shape : tuple of int
        (*batch, num_heads); (1,) for two-dimensional q, k and v.

    Raises
    ------
    TypeError
        An operand is not an array of a known kind.
    UnsupportedProblem
        Shapes or dtypes do not fit. The message lists all reasons.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    for name, array in present.items():
        if not (is_array(array) or isinstance(array, ShapeDtype)):
            raise TypeError(_no_operand(name, array, heads_shape))
    reasons = list[str]()
    for name, array in present.items():
        reasons += _sink_reasons(name, array, heads_shape)
    refuse(reasons)
    return tuple(Operand(name, tuple(map(int, x.shape)), np.dtype(x.dtype)) for name, x in present.items())


def _no_operand(name: str, value: Any, heads_shape: tuple[int, ...]) -> str:
    """Return why a value that is not an array cannot be an operand with one number per head."""
    fix = f": write np.full({heads_shape[-1]}, {describe(value)})" if is_number(value) else ""
    return f"{name} must be an array of shape (num_heads,) = ({heads_shape[-1]},); got {describe(value)}{fix}"


def _sink_reasons(name: str, array: Array, heads_shape: tuple[int, ...]) -> list[str]:
    reasons, shape = [], tuple(array.shape)
    if not broadcasts_to(shape, heads_shape):
        leading = f" or one that broadcasts to (*batch, num_heads) = {heads_shape}" if len(heads_shape) > 1 else ""
        reasons.append(f"{name} must have shape (num_heads,) = ({heads_shape[-1]},){leading}; got {shape}")
    if array.dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        reasons.append(f"{name} must be {known}; got {array.dtype}: cast it to float32")
    return reasons


def wrt_of(wrt: Any, known: Sequence[str], integers: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the operands that have gradients, from the value of `wrt=` and the names of all operands.

    Operands named in `integers`, which hold integers or bools, have no gradients.

    >>> wrt_of("sink", ["sink"])
    ('sink',)

    Raises
    ------
    UnsupportedProblem
        `wrt` is neither a name nor a sequence of names, or the call has no operand of that name.
    """
    names = (wrt,) if isinstance(wrt, str) else wrt
    is_sequence = isinstance(names, Sequence) and not isinstance(names, memoryview)
    if not is_sequence or not all(isinstance(name, str) for name in names):
        rule = "wrt must be a name, or a sequence of names"
        raise UnsupportedProblem([f"{rule}; got {describe(wrt)}: write wrt='sink'"])
    reasons = [
        f"wrt must name real arrays; got {name!r}, which does not hold real numbers and so has no gradient"
        if name in integers
        else _no_gradient(name, known)
        for name in dict.fromkeys(names)
        if name not in known
    ]
    refuse(reasons)
    return tuple(name for name in known if name in names)


def _no_gradient(name: str, known: Sequence[str]) -> str:
    if name in ("q", "k", "v"):
        return f"wrt must not name {name}: dq, dk and dv are always computed"
    names = f"; there are {', '.join(map(repr, known))}" if known else ", and there is none"
    rule = f"wrt must name array arguments of the call other than q, k and v{names}"
    return f"{rule}; got {describe(name)}: pass this array as an argument too"
