"""The arguments of a call beside q, k and v: their types, and all of them as one value."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypedDict

import numpy as np

from ..blocks.index import BlockIndex
from ..dropout import Dropout
from ..masks.base import Mask
from ..masks.content import content
from ..scores.score import Score

Causality: TypeAlias = bool | Literal["bottom_right", "top_left"]
Window: TypeAlias = tuple[int | None, int | None]
KernelFamily: TypeAlias = Literal["auto", "sm90", "sm80", "simt", "fa1", "naive"]
ExecutorName: TypeAlias = Literal["auto", "cpu", "gpu", "sim"]
Precision: TypeAlias = Literal["ieee", "tf32", "tf32x3"]


class AnyArray(Protocol):
    """An array of any library, or its shape and dtype alone."""

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


class VjpOptions(CallOptions, total=False):
    """Keyword arguments of `attention_vjp`."""

    wrt: str | Sequence[str]


# Types of a scale and of a flag whose equal values mean the same; 1 equals True, and 0.5 + 0j equals 0.5.
_SCALES = {type(None), int, float, *(np.dtype(code).type for code in "efdbhilqBHILQ")}
_FLAGS = {bool, np.bool}
_DROPOUTS = {type(None), Dropout}


DOT = ".dot"  # the tangent of an array is named like the array, with this behind


class Directions(NamedTuple):
    """What a call is differentiated along.

    Attributes
    ----------
    caller : str
        The public function, for messages.
    tangents : dict of arrays
        By the names of the arrays whose tangents they are.
    cotangents : dict of arrays
        "do" and "dlse" of a call whose gradients are differentiated.
    """

    caller: str
    tangents: dict[str, Any]
    cotangents: dict[str, Any] = {}

    def arrays(self) -> dict[str, Any]:
        """Return all arrays by the names that passes have for them."""
        return self.cotangents | {f"{name}{DOT}": tangent for name, tangent in self.tangents.items()}


class Options(NamedTuple):
    """Every argument of a call beside q, k, v and what it writes to, as it was given and unchecked.

    The public functions name these arguments, with their types, and hand them on as this one value. An argument that
    all calls have is a field here, a key of `CallOptions`, and a parameter of each public function.
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
    tangents: Directions | str | Sequence[str] = ()  # names, or a `Directions`

    def key(self, layout: Hashable, *more: Hashable) -> Hashable:
        """Key of a call, without its data.

        Parameters
        ----------
        layout : hashable
            How q, k, v and operands lie; None if that is not known.
        *more : hashable
            What else decides, as the operands' names.

        Returns
        -------
        hashable
            None where equal values may mean different things, as 1 and True do, where softcap and bias are not part of
            one Score yet, or where a mask's contents may change.
        """
        mask, causal, window, scale, score, softcap, bias, _, dropout, wrt = self[:_FIRST_WORD]
        kernel, executor, precision, deterministic, tangents = words = self[_FIRST_WORD:]
        if layout is None or not (softcap is bias is None and (mask is None or isinstance(mask, Mask))):
            return None
        if type(scale) not in _SCALES or type(deterministic) not in _FLAGS or type(causal) not in (bool, str):
            return None
        if not (type(kernel) is type(executor) is type(precision) is str and type(dropout) in _DROPOUTS):
            return None
        wrt = tuple(wrt) if isinstance(wrt, list) else wrt
        if type(wrt) is not str and (type(wrt) is not tuple or wrt and set(map(type, wrt)) != {str}):
            return None
        if window is not None and (type(window) is not tuple or not set(map(type, window)) <= {int, type(None)}):
            return None
        if tangents != ():  # the layouts of these arrays are part of `layout`
            names = tuple(tangents.arrays()) if type(tangents) is Directions else tangents
            if type(names) is not tuple or set(map(type, names)) != {str}:
                return None
            words = *words[:-1], names
        program = None
        if score is not None:
            if not isinstance(score, Score):
                return None
            program = score.program, score.numbers, score.facts
        try:
            who = None if mask is None else content(mask)
        except TypeError:
            return None
        draws = dropout._draws if isinstance(dropout, Dropout) else None  # seed and offset are handed over by each call
        return layout, who, causal, window, scale, program, draws, wrt, words, more


_FIRST_WORD = Options._fields.index("kernel")
