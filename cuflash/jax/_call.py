"""Calls as parameters of primitives: everything except arrays, which are operands of the primitives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np

from ..arrays import Array, Namespace, ShapeDtype
from ..calls._call import planned
from ..calls._forward import with_one_score
from ..dropout import Dropout, is_key, seed_of
from ..executors import checks
from ..executors._layout_key import layout_key
from ..masks.arrays import Dense
from ..masks.base import Mask
from ..masks.content import has_content, held_arrays
from ..planning.dropout_launches import SEED, numbers_of
from ..planning.lookup import Lookup, lookup
from ..planning.options import MaskLike, Options
from ..planning.tangents import tangents_among
from ..plans.plan import Plan, with_numbers
from ..scores import Score
from ..scores.program import ArrayType

_Value = TypeVar("_Value")
MASK = "mask."  # prefix of the names of a mask's arrays
_SEED = ShapeDtype((), np.dtype(np.uint64))


class Slot:
    """A placeholder for one of a mask's arrays, in a mask without arrays."""

    def __init__(self, number: int, array: jax.Array) -> None:
        self.number, self.shape, self.dtype = number, tuple(array.shape), np.dtype(array.dtype)
        self.ndim = len(self.shape)

    def __array_namespace__(self) -> Namespace:
        return jax.numpy


def separated(q: Array, k: Array, v: Array, options: Options) -> tuple[Options, dict[str, Array]]:
    """Return options in which shapes (slots in masks) replace arrays of JAX, and all arrays by name."""
    arrays, mask, dropout, seed = {"q": q, "k": k, "v": v}, options.mask, options.dropout, None
    if isinstance(dropout, Dropout) and dropout._draws.threshold:
        seed = _seed_words(dropout.seed)
        options = options._replace(dropout=_with_array(dropout.p, dropout.offset))
    options, operands = with_one_score(options)
    if operands:
        arrays |= operands
        score = options.score
        if isinstance(score, Score) and score.arrays:
            score = score._over({name: _shape_of(array) for name, array in score.arrays.items()})
        options = options._replace(score=score, sink=None)
    if seed is not None:
        arrays[SEED] = seed
    if mask is not None:
        slots: dict[str, jax.Array] = {}
        if isinstance(mask, jax.Array):
            options = options._replace(mask=Dense(_slot_of(mask, slots)))
        elif isinstance(mask, Mask) and any(isinstance(each, jax.Array) for each in held_arrays(mask)):
            options = options._replace(mask=mask.to(lambda array: _slot_of(array, slots)))
        arrays |= slots
    return options, arrays


def from_cache(looked_up: Lookup, key: Hashable, make: Callable[[], _Value]) -> _Value:
    """Return the object of a key from the cache of calls, or a new one, which is kept if there is a key."""
    known: _Value | None = looked_up.find(key)
    if known is None:
        snapshot = looked_up.snapshot()
        known = make()
        if key is not None:
            looked_up.keep(key, known, snapshot)
    return known


def has_key(looked_up: Lookup, arrays: Collection[str]) -> bool:
    """True if calls with equal keys are equal, because JAX passes all arrays of the mask that the key leaves out."""
    return (f"{MASK}0" in arrays) == (looked_up.contents is not None)


@dataclass(frozen=True, eq=False)
class JaxCall:
    """A call without its arrays.

    Attributes
    ----------
    options : Options
        Options in which shapes and dtypes (slots in masks) replace all arrays except NumPy arrays in masks.
    dtypes : dict by name
        The dtypes of all arrays.
    looked_up : Lookup
        The parts of the call's key.
    has_key : bool
        As in `has_key`. If False, calls may share `own` instead.
    tokens_first : bool
        True if q, k, v, o and their gradients have tokens before heads in memory.
    own : dict
        Objects that depend on the call, of calls without a key.
    """

    options: Options
    dtypes: Mapping[str, Any]
    looked_up: Lookup
    has_key: bool
    tokens_first: bool = False
    own: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options, arrays: Mapping[str, jax.Array], tokens_first: bool) -> JaxCall:
        """Return the call of options and arrays from `separated`."""
        looked_up = lookup(options, layout_of)
        return cls(options, dtypes_of(arrays), looked_up, has_key(looked_up, arrays), tokens_first)

    @property
    def holds_contents(self) -> bool:
        """True if calls with masks of other contents differ although all their shapes and arrays are equal."""
        mask = self.options.mask
        if mask is None or self.has_slots and has_key(self.looked_up, self.dtypes):
            return False
        return not (isinstance(mask, Mask) and has_content(mask))

    @property
    def held(self) -> tuple[Array, ...]:
        """The arrays of CuPy from which kernels list the mask's blocks."""
        contents = self.looked_up.contents
        return () if contents is None or self.has_slots else contents.arrays

    @property
    def has_slots(self) -> bool:
        """True if the mask's arrays are among the operands."""
        return any(name.startswith(MASK) for name in self.dtypes)

    def cached(self, what: str, make: Callable[[], _Value], *key: Hashable, is_general: bool = False) -> _Value:
        """Return an object that depends on the call and on a key, from the cache of calls if possible.

        If it is general, it does not depend on the contents of the arrays in `held`.
        """
        full, key = None, (*key, *self.dtypes.items())
        if (self.has_key or is_general) and not checks.is_on():
            full = self.looked_up.key(what, key, numbers_of(self.options.dropout))
        if full is not None:
            return from_cache(self.looked_up, full, make)
        if (what, key) not in self.own:
            self.own[what, key] = make()
        own: _Value = self.own[what, key]
        return own

    def cached_plan(
        self, executor: str, shapes: Mapping[str, tuple[int, ...]], wrt: tuple[str, ...],
        mask: Callable[[], MaskLike | None],
    ) -> Plan:  # fmt: skip
        """Return a plan for arrays of these shapes; passes that read more or fewer arrays share it.

        `mask` returns the mask for the plan.
        """
        own = tuple((name, shapes.get(name)) for name in self.dtypes)
        key = executor, own, wrt, tuple(tangents_among(shapes))
        return self.cached("jax plan", lambda: self.planned(executor, shapes, wrt, mask()), *key)

    def planned(
        self, executor: str, shapes: Mapping[str, tuple[int, ...]], wrt: tuple[str, ...], mask: MaskLike | None
    ) -> Plan:
        """Return a new plan for arrays of these shapes, with a mask that holds its arrays."""
        of = {name: ShapeDtype(shape, self.dtypes[name]) for name, shape in shapes.items() if name in self.dtypes}
        score = self.options.score
        if isinstance(score, Score):
            score = _with_leading_axes(score, of)
        options = self.options._replace(
            mask=mask, score=score, sink=of.get("sink"), wrt=wrt, executor=executor,
            tangents=tuple(name for name in tangents_among(shapes) if name in of),
        )  # fmt: skip
        ready = planned(of["q"], of["k"], of["v"], options)._without_arrays()
        return with_numbers(ready, numbers_of(self.options.dropout))


def dtypes_of(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: getattr(array, "dtype", None) for name, array in arrays.items()}


def mask_over(mask: MaskLike | None, arrays: Mapping[str, Array]) -> MaskLike | None:
    """Return a mask with arrays in its slots; `arrays` has them by the names of operands."""
    if not isinstance(mask, Mask):
        return mask
    return mask.to(lambda each: arrays[f"{MASK}{each.number}"] if isinstance(each, Slot) else each)


def _slot_of(array: Array, slots: dict[str, jax.Array]) -> Array | Slot:
    """Return the slot of a mask's array, after adding it to `slots`; return an array of another library unchanged."""
    if not isinstance(array, jax.Array):
        return array
    slot = Slot(len(slots), array)
    slots[f"{MASK}{slot.number}"] = array
    return slot


def layout_of(*arrays: Array | Slot) -> Hashable:
    if all(isinstance(array, Slot) for array in arrays):
        return tuple((array.shape, array.dtype) for array in arrays)
    return layout_key(*arrays)


def _shape_of(array: Array) -> ShapeDtype:
    return ShapeDtype(tuple(array.shape), array.dtype)


def _seed_words(seed: Array | int) -> Array:
    """Return a seed as two 32-bit words, the lower one first; a 64-bit array is returned unchanged."""
    if isinstance(seed, jax.Array):
        return jax.random.key_data(seed) if is_key(seed) else seed
    number = seed if isinstance(seed, int) else seed_of(seed)
    return np.array([number & 0xFFFFFFFF, number >> 32], np.uint32)


@lru_cache(maxsize=64)
def _with_array(p: float, offset: int) -> Dropout:
    """Return dropout whose seed is an array that each call passes."""
    return Dropout(p, _SEED, offset)


def _with_leading_axes(score: Score, shapes: Mapping[str, ShapeDtype]) -> Score:
    """Return a score over arrays that may have further leading axes, which broadcast over the batch."""
    arrays = tuple(_with_rank(kind, shapes[kind.name].shape) for kind in score.program.arrays)
    over = score._over({name: shapes[name] for name in score.arrays})
    if arrays != score.program.arrays:
        over.program = replace(score.program, arrays=arrays)
    return over


def _with_rank(kind: ArrayType, shape: tuple[int, ...]) -> ArrayType:
    missing = len(shape) - kind.rank
    is_single = (*(extent == 1 for extent in shape[:missing]), *kind.is_single)
    return kind._replace(rank=len(shape), is_single=is_single) if missing else kind
