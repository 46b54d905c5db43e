"""`score=`, `softcap=` and `bias=` of a call as one Score, which equal calls do not trace again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..arrays import Array
from .library import composed
from .score import Score

_MAX_KEPT = 256


class _Kept(NamedTuple):
    """A composed score without its arrays, and the names of the arrays that a call has to give it."""

    score: Score
    names: tuple[str, ...]


_without_score: dict[Hashable, _Kept] = {}
_with_score: WeakKeyDictionary[Score, dict[Hashable, _Kept]] = WeakKeyDictionary()


def composition(
    score: Score | Callable[..., Array] | None, softcap: float | None, bias: Array | None,
    take: Callable[[Array], Array],
) -> Score | None:
    """`library.composed`, which is looked up for a Score, or for no score, with what was composed before.

    Caps are equal by their type and value, biases by their type, dtype and shape.

    Parameters
    ----------
    score, softcap, bias : object
        As the call gives them.
    take : callable
        Returns a bias of another library as an array of NumPy's or CuPy's, and any other as it is.

    Raises
    ------
    TypeError
        The score is no function, or the bias no array.
    UnsupportedProblem
        One of them cannot be; all reasons at once.
    """
    if softcap is bias is None and isinstance(score, Score):
        return score
    key = _key(softcap, bias)
    if key is None or not (score is None or isinstance(score, Score) and "bias" not in score.arrays):
        return composed(score, softcap, take(bias))
    kept, arrays = (_without_score, {}) if score is None else (_with_score.setdefault(score, {}), score.arrays)
    found = kept.get(key)
    if found is not None and not found.names:
        return found.score
    if found is not None:
        return found.score._over({name: bias if name == "bias" else arrays[name] for name in found.names})
    taken = take(bias)
    made = composed(score, softcap, taken)
    if made is not None and taken is bias:
        if len(kept) >= _MAX_KEPT:
            kept.clear()
        kept[key] = _Kept(made._over({}), tuple(made.arrays))
    return made


def _key(softcap: float | None, bias: Array | None) -> Hashable:
    """Return what decides about a composition beside the score; None where it cannot be a key."""
    try:
        key = type(softcap), softcap, *(() if bias is None else (type(bias), bias.dtype, tuple(bias.shape)))
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key
