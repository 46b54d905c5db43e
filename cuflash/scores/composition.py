"""Composition of a call's `score=`, `softcap=` and `bias=` into a Score, cached so that equal calls do not trace it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..arrays import Array
from .library import composed
from .score import Score

_MAX_CACHED = 256


class _Composition(NamedTuple):
    """A composed score without its arrays, and the names of the arrays that a call must pass to it."""

    score: Score
    names: tuple[str, ...]


_without_score: dict[Hashable, _Composition] = {}
_with_score: WeakKeyDictionary[Score, dict[Hashable, _Composition]] = WeakKeyDictionary()


def composition(
    score: Score | Callable[..., Array] | None, softcap: float | None, bias: Array | None,
    take: Callable[[Array], Array],
) -> Score | None:
    """Compose the arguments as `library.composed` does; compositions with a Score, or without a score, are cached.

    The cache compares caps by type and value, and biases by type, dtype and shape.

    Parameters
    ----------
    score, softcap, bias : object
        The arguments of the call.
    take : callable
        Converts a bias of another library to NumPy or CuPy, and returns others unchanged.

    Raises
    ------
    TypeError
        The score is not a function, or the bias is not an array.
    UnsupportedProblem
        An argument is not supported; the error lists all reasons.
    """
    if softcap is bias is None and isinstance(score, Score):
        return score
    key = _key(softcap, bias)
    if key is None or not (score is None or isinstance(score, Score) and "bias" not in score.arrays):
        return composed(score, softcap, take(bias))
    cache, arrays = (_without_score, {}) if score is None else (_with_score.setdefault(score, {}), score.arrays)
    cached = cache.get(key)
    if cached is not None and not cached.names:
        return cached.score
    if cached is not None:
        return cached.score._over({name: bias if name == "bias" else arrays[name] for name in cached.names})
    taken = take(bias)
    composite = composed(score, softcap, taken)
    if composite is not None and taken is bias:
        if len(cache) >= _MAX_CACHED:
            cache.clear()
        cache[key] = _Composition(composite._over({}), tuple(composite.arrays))
    return composite


def _key(softcap: float | None, bias: Array | None) -> Hashable:
    """Return a cache key of the cap and the bias; None if they cannot be part of a key."""
    try:
        key = type(softcap), softcap, *(() if bias is None else (type(bias), bias.dtype, tuple(bias.shape)))
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key
