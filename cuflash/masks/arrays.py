"""Masks of elements: a boolean array, and any rule as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse

from ..arrays import Array, is_array, namespace
from ..errors import UnsupportedProblem
from .base import Mask
from .coordinates import LeadingArray, checked_answer
from .fields import take_arrays
from .shape import MaskShape


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array, True = attend.

    Parameters
    ----------
    allowed : bool array
        Broadcasts against (*batch, num_heads, seqlen_q, seqlen_kv) by NumPy's rules.

    Examples
    --------
    >>> import numpy as np
    >>> Dense(np.eye(3, dtype=bool)).dense(MaskShape((), 1, 3, 3))[0].astype(int)
    array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """

    allowed: Array

    def __post_init__(self) -> None:
        take_arrays(self, {"allowed": "mask"})
        if not is_array(self.allowed):
            fix = ": masks.BlockPattern takes it as blocks, its toarray() as elements"
            fix = fix if scipy.sparse.issparse(self.allowed) else ""
            kind = type(self.allowed).__name__
            raise TypeError(f"mask must be a Mask, a BlockIndex or a boolean array; got {kind}{fix}")
        if self.allowed.dtype != np.bool_:
            raise UnsupportedProblem(
                [
                    f"mask must be boolean, True = attend; got dtype {self.allowed.dtype}: write mask != 0 for a 0/1 "
                    f"array, or mask == 0 for an additive one of 0 and -inf"
                ]
            )

    def resolve(self, shape: MaskShape) -> Mask:
        full = (*shape.batch, *shape[1:])
        given = tuple(self.allowed.shape)
        fits = len(given) <= len(full) and all(extent in (1, wanted) for extent, wanted in zip(given[::-1], full[::-1]))
        if not fits:
            raise UnsupportedProblem(
                [f"mask must broadcast to (*batch, num_heads, seqlen_q, seqlen_kv) = {full}; got shape {given}"]
            )
        return ResolvedDense(LeadingArray.of(self.allowed, shape.batch, 3))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if self.allowed.ndim > 2:
            raise UnsupportedProblem(["Dense with leading axes depends on the batch: call .resolve(shape) first"])
        return ResolvedDense(LeadingArray.of(self.allowed, (), 3))(b, h, i, j)


@dataclass(frozen=True, eq=False)
class ResolvedDense(Mask):
    """What `Dense` resolves to."""

    allowed: LeadingArray

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.allowed.at(b, h, i, j)


@dataclass(frozen=True, eq=False)
class FromFunction(Mask):
    """Any rule, as a function of the four coordinates.

    Parameters
    ----------
    function : callable (b, h, i, j) -> bool array
        Element-wise over integer arrays that broadcast against each other. What it returns may keep an extent of 1
        along an axis that the rule does not depend on: a rule that ignores b and h is evaluated once for all.

    Notes
    -----
    Every element is evaluated, tile by tile, never sampled. The function runs as given: it is code, not data.
    Coordinates are NumPy arrays unless the rule is combined with masks whose arrays are on a device; the answer must
    be an array of their kind.

    Examples
    --------
    >>> FromFunction(lambda b, h, i, j: (i + j) % 2 == 0).dense(MaskShape((), 1, 2, 3))[0].astype(int)
    array([[1, 0, 1],
           [0, 1, 0]])
    """

    function: Callable[[Array, Array, Array, Array], Array]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable as f(b, h, i, j); got {type(self.function).__name__}")

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        allowed = self.function(b, h, i, j)
        asked, answered = namespace(b, h, i, j).__name__, namespace(allowed).__name__
        if asked != answered and is_array(allowed):
            raise UnsupportedProblem(
                [
                    f"FromFunction's function must answer coordinates of {asked} with an array of {asked}; got one of "
                    f"{answered}: use arrays of {asked}, or make a BlockIndex of the mask with NumPy and pass that"
                ]
            )
        return checked_answer("FromFunction's function", allowed, b, h, i, j)
