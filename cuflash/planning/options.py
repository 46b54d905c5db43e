"""The arguments of a call other than q, k and v: their types, and a class that holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypedDict

import numpy as np

from ..arrays import Array, is_finite
from ..blocks.index import BlockIndex
from ..dropout import Dropout
from ..masks.base import Mask
from ..masks.content import content
from ..masks.places import Places
from ..scores.score import Score

Causality: TypeAlias = bool | Literal["bottom_right", "top_left"]
Window: TypeAlias = tuple[int | None, int | None]
KernelFamily: TypeAlias = Literal["auto", "sm90", "sm80", "simt", "fa1", "naive"]
ExecutorName: TypeAlias = Literal["auto", "cpu", "gpu", "sim"]
Precision: TypeAlias = Literal["ieee", "tf32", "tf32x3"]


class AnyArray(Protocol):
    """An array of any library, or an object that has only a shape and a dtype."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


MaskLike: TypeAlias = Mask | BlockIndex | AnyArray | Callable[[Any, Any, Any, Any], Any]
ScoreLike: TypeAlias = Score | Callable[[Any, Any, Any, Any, Any], Any]


Tangents: TypeAlias = Mapping[str, AnyArray]


class CallOptions(TypedDict, total=False):
    """Keyword arguments of `attention`, in every library, as a type checker sees them."""

    mask: MaskLike | None
    causal: Causality
    window: Window | None
    scale: float | None
    score: ScoreLike | None
    softcap: float | None
    bias: AnyArray | None
    sink: AnyArray | None
    dropout: Dropout | None
    kernel: KernelFamily
    executor: ExecutorName
    precision: Precision
    deterministic: bool
    q_start: int
    kv_start: int


class VjpOptions(CallOptions, total=False):
    """Keyword arguments of `attention_vjp`."""

    wrt: str | Sequence[str]


# Accepted types of scales and flags in keys. Values of other types may compare equal and still mean something else:
# 1 == True, and 0.5 + 0j == 0.5.
_SCALES = {type(None), int, float, *(np.dtype(code).type for code in "efdbhilqBHILQ")}
_FLAGS = {bool, np.bool}
_DROPOUTS = {type(None), Dropout}


DOT = ".dot"  # suffix of the name of an array's tangent


class Directions(NamedTuple):
    """Tangents and cotangents along which a call is differentiated.

    Attributes
    ----------
    caller : str
        Name of the public function, for error messages.
    tangents : dict of arrays
        Tangents, by the names of the arrays that they belong to.
    cotangents : dict of arrays
        "do" and "dlse" if the gradients of the call are differentiated.
    """

    caller: str
    tangents: dict[str, Array]
    cotangents: dict[str, Array] = {}

    def arrays(self) -> dict[str, Array]:
        """Return all arrays, by the names under which passes read them."""
        return self.cotangents | {f"{name}{DOT}": tangent for name, tangent in self.tangents.items()}


class Options(NamedTuple):
    """All arguments of a call except q, k, v and output arrays, unchecked and as the caller passed them.

    The public functions list these arguments with their types, and pass them on as this one value. An argument of all
    calls is a field of this class, a key of `CallOptions`, and a parameter of each public function.
    """

    mask: MaskLike | None = None
    causal: Causality = False
    window: Window | None = None
    scale: float | None = None
    score: ScoreLike | None = None
    softcap: float | None = None
    bias: AnyArray | None = None
    sink: AnyArray | None = None
    dropout: Dropout | None = None
    wrt: str | Sequence[str] = ()
    kernel: str = "auto"
    executor: str = "auto"
    precision: str = "ieee"
    deterministic: bool = False
    q_start: int = 0
    kv_start: int = 0
    tangents: Directions | str | Sequence[str] = ()  # names, or a `Directions`
    places: Places | None = None  # replaces q_start and kv_start in calls on one of several devices

    def key(self, layout: Hashable, *more: Hashable) -> Hashable:
        """Return the key of a call in the cache; it does not depend on the call's data.

        Parameters
        ----------
        layout : hashable
            Shapes, strides and dtypes of q, k, v and operands; None if unknown.
        *more : hashable
            Other values that the plan depends on, such as the operands' names.

        Returns
        -------
        hashable
            None if the call cannot be cached: an option has a type whose equal values may have different meanings (1
            and True), softcap and bias have not been merged into one Score, or the mask's contents may change.
        """
        mask, causal, window, scale, score, softcap, bias, _, dropout, wrt = self[:_FIRST_WORD]
        kernel, executor, precision, deterministic, q_start, kv_start, tangents, places = words = self[_FIRST_WORD:]
        if layout is None or not (softcap is bias is None and (mask is None or isinstance(mask, Mask))):
            return None
        if type(scale) not in _SCALES or type(deterministic) not in _FLAGS or type(causal) not in (bool, str):
            return None
        if not (type(kernel) is type(executor) is type(precision) is str and type(dropout) in _DROPOUTS):
            return None
        if type(scale) is int and not is_finite(scale):
            return None
        if type(q_start) is not int or type(kv_start) is not int or places is not None:
            return None
        scale = None if self.scale is None else float(self.scale)  # 0.1 == np.float32(0.1), a different number
        wrt = tuple(wrt) if isinstance(wrt, list) else wrt
        if type(wrt) is not str and (type(wrt) is not tuple or wrt and set(map(type, wrt)) != {str}):
            return None
        if window is not None and (type(window) is not tuple or not set(map(type, window)) <= {int, type(None)}):
            return None
        if tangents != ():  # the layouts of these arrays are part of `layout`
            names = tuple(tangents.arrays()) if type(tangents) is Directions else tangents
            if type(names) is not tuple or set(map(type, names)) != {str}:
                return None
            words = *words[:-2], names
        program = None
        if score is not None:
            if not isinstance(score, Score):
                return None
            program = score.program, score.numbers, score.facts
        try:
            who = None if mask is None else content(mask)
        except TypeError:
            return None
        draws = dropout._draws if isinstance(dropout, Dropout) else None  # each call passes its own seed and offset
        return layout, who, causal, window, scale, program, draws, wrt, words, more


_FIRST_WORD = Options._fields.index("kernel")
