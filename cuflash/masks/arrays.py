"""Masks of elements (a boolean array, a scipy.sparse array, a function), and the conversion of values to masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Protocol, runtime_checkable

import numpy as np

from ..arrays import Array, describe, fix_of_numbers, is_array, is_list, is_sparse, namespace, no_array
from ..errors import UnsupportedProblem, without_other_operators
from ..keywords import explains_keywords
from ..layouts import is_foreign
from .base import Mask
from .content import DeviceForm, held_masks
from .block_set import BlockGrid, BlockSet, sorted_places
from .coordinates import LeadingArray, checked_answer, note_call
from .fields import take_arrays
from .shape import MaskShape, broadcasts_to, missing_axes


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean array, True = attend.

    Parameters
    ----------
    allowed : bool array
        Broadcasts against (*batch, num_heads, seqlen_q, seqlen_kv) by NumPy's rules.

    Raises
    ------
    TypeError
        `allowed` is not an array.
    UnsupportedProblem
        `allowed` is not boolean, or its library cannot export it. Calls, and `resolve`, raise it if it does not
        broadcast to the scores.

    Examples
    --------
    >>> import numpy as np
    >>> Dense(np.eye(3, dtype=bool)).toarray(3).astype(int)
    array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """

    allowed: Array

    def __post_init__(self) -> None:
        argument = self.allowed
        take_arrays(self, {"allowed": "mask"}, np.bool_)
        if not is_array(self.allowed):
            raise TypeError(no_array("mask", self.allowed))
        if self.allowed.dtype != np.bool_:
            raise UnsupportedProblem(
                f"mask must be boolean, True = attend; got dtype {self.allowed.dtype}: "
                f"{fix_of_numbers('mask', argument, self.allowed.dtype)}"
            )

    @property
    def _own_lengths(self) -> tuple[int | None, int | None]:
        q, kv = (None if extent == 1 else int(extent) for extent in (1, 1, *self.allowed.shape)[-2:])
        return q, kv

    @property
    def _device_form(self) -> DeviceForm | None:
        return DeviceForm((self.allowed,))

    def resolve(self, shape: MaskShape) -> Mask:
        full = (*shape.batch, *shape[1:])
        axes = tuple(self.allowed.shape)
        if not broadcasts_to(axes, full):
            rule = f"mask must broadcast to (*batch, num_heads, seqlen_q, seqlen_kv) = {full}"
            raise UnsupportedProblem(f"{rule}; got shape {axes}{missing_axes('mask', axes, full)}")
        return BlockGrid(LeadingArray.of(self.allowed, shape.batch, 3))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if self.allowed.ndim > 2:
            raise UnsupportedProblem("Dense with leading axes depends on the batch: call .resolve(shape) first")
        return BlockGrid(LeadingArray.of(self.allowed, (), 3))(b, h, i, j)


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class Sparse(Mask):
    """A scipy.sparse array of elements: a query attends the keys with a nonzero element in its row.

    Parameters
    ----------
    matrix : scipy.sparse array [seqlen_q, seqlen_kv]
        Booleans or numbers, in any format. A stored zero masks its key, just as an element that is not stored.

    Raises
    ------
    TypeError
        `matrix` is not a scipy.sparse array.
    UnsupportedProblem
        `matrix` is not two-dimensional.

    Notes
    -----
    `BlockPattern` accepts a scipy.sparse array of blocks.

    Examples
    --------
    >>> import scipy.sparse
    >>> Sparse(scipy.sparse.eye_array(3)).toarray(3).astype(int)
    array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """

    matrix: Array

    def __post_init__(self) -> None:
        if not is_sparse(self.matrix):
            raise TypeError(f"matrix must be a scipy.sparse array; got {describe(self.matrix)}: use masks.Dense")
        if self.matrix.ndim != 2:
            raise UnsupportedProblem(f"a mask's matrix must have two axes; got shape {self.matrix.shape}")

    @property
    def _own_lengths(self) -> tuple[int | None, int | None]:
        q, kv = self.matrix.shape
        return q, kv

    def resolve(self, shape: MaskShape) -> Mask:
        if self.matrix.shape != shape[2:]:
            raise UnsupportedProblem(
                f"a scipy.sparse mask must have shape (seqlen_q, seqlen_kv) = {shape[2:]}; got "
                f"{self.matrix.shape}: BlockIndex.from_scipy takes blocks"
            )
        return BlockSet((1, 1, *shape[2:]), (1, 1), *sorted_places(self.matrix))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.resolve(MaskShape((), 1, *self.matrix.shape))(b, h, i, j)


def without_padding(matrix: Array, lengths: tuple[int, int]) -> Array:
    """Remove the padding of a scipy.sparse array of elements; refuse it if an element of the padding is nonzero."""
    rows = matrix.tocsr()
    inside = rows[: lengths[0], : lengths[1]]
    if (rows != 0).sum() > (inside != 0).sum():
        raise UnsupportedProblem(f"matrix must have no nonzero beyond the lengths {lengths}; got some in its padding")
    return inside


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class FromFunction(Mask):
    """Any rule, as a function of the four coordinates.

    Parameters
    ----------
    function : callable (b, h, i, j) -> bool array
        Element-wise over integer arrays that broadcast against each other. The result may have an extent of 1 along an
        axis on which the rule does not depend: a rule that ignores b and h is evaluated once for all of them.

    Raises
    ------
    TypeError
        The function cannot be called with the four coordinates.

    Notes
    -----
    Every element is evaluated, tile by tile; none is sampled. The function runs unchanged in Python: use only functions
    that you trust. Coordinates are NumPy arrays, unless the mask is combined with masks whose arrays are on a device.
    The result must be an array of the same library.

    Examples
    --------
    >>> FromFunction(lambda b, h, i, j: (i + j) % 2 == 0).toarray(2, 3).astype(int)
    array([[1, 0, 1],
           [0, 1, 0]])
    """

    function: Callable[[Array, Array, Array, Array], Array]

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise TypeError(f"function must be callable as f(b, h, i, j); got {describe(self.function)}")
        try:
            taken = signature(self.function)
        except ValueError:  # functions written in C may not have a signature
            return
        try:
            taken.bind(0, 0, 0, 0)
        except TypeError as error:
            raise TypeError(
                f"a mask's function must take the four coordinates (b, h, i, j); got a function of {taken}: "
                f"write lambda b, h, i, j: ..."
            ) from error

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        try:
            allowed = self.function(b, h, i, j)
        except Exception as error:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            note_call(error, f"the mask function {name}", b, h, i, j)
            if isinstance(error, ValueError) and "truth value" in str(error):
                error.add_note(
                    "A mask's function receives arrays of indices: write &, |, ~ and numpy.where instead of and, or, "
                    "not and if, with parentheses around comparisons."
                )
            raise
        library, answered = namespace(b, h, i, j).__name__, namespace(allowed).__name__
        if library != answered and is_array(allowed):
            raise UnsupportedProblem(
                f"FromFunction's function must return {library} arrays for {library} coordinates; got an array of "
                f"{answered}: use arrays of {library}, or build a BlockIndex of the mask with NumPy and pass that"
            )
        return checked_answer("FromFunction's function", allowed, b, h, i, j)


def as_mask(value: Mask | Array) -> Mask:
    """Convert a value to a mask: a mask, a block index, an array, a scipy.sparse array, or a function.

    Raises
    ------
    TypeError
        The value is none of these.
    UnsupportedProblem
        An array does not hold booleans.
    """
    if isinstance(value, Mask):
        return value
    if not isinstance(value, type):
        if isinstance(value, Indexed):
            return value.as_mask()
        if is_sparse(value):
            return Sparse(value)
        if is_array(value) or is_foreign(value) or is_list(value):
            return Dense(value)
        if callable(value):
            return FromFunction(value)
    fix = ""
    if isinstance(value, type):
        fix = ": call it"
    elif isinstance(value, np.ma.MaskedArray):
        fix = ": pass mask.filled(False)"
    raise TypeError(
        f"mask must be a Mask, a BlockIndex, a boolean or scipy.sparse array, or a function of (b, h, i, j); got "
        f"{describe(value)}{fix}"
    )


@runtime_checkable
class Indexed(Protocol):
    """An object that converts itself to a mask, such as a block index."""

    def as_mask(self) -> Mask: ...


COMBINED = "combine them with & (both), | (either), ^ (one of two), - (without) and ~ (not)"
setattr(Mask, "_mask_of", staticmethod(as_mask))
without_other_operators(Mask, "masks", COMBINED)


_OF_LIBRARY = Mask.__module__.rpartition(".")[0]


def reads_numbers(mask: Mask) -> bool:
    """True if a mask may read the number of a batch entry or head: it holds a function, or a user's mask."""
    kinds = {type(each) for each in held_masks(mask)}
    return FromFunction in kinds or any(kind.__module__.rpartition(".")[0] != _OF_LIBRARY for kind in kinds)
