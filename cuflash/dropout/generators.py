"""Random numbers of a seed, or of `rng=`, as in NumPy's and SciPy's functions (SPEC 7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import describe, is_int
from ..errors import UnsupportedProblem, refuse

Rng = np.random.Generator | int


def generator_of(seed: Any, rng: Any) -> np.random.Generator:
    """Return the generator that a call draws from: `rng`, or a new one of a seed.

    Parameters
    ----------
    seed : int, or sequence of int
        As `numpy.random.default_rng` takes it; ignored if there is an `rng`.
    rng : numpy.random.Generator or int, optional
        A generator is drawn from, and so changes; an int is a seed.

    Raises
    ------
    UnsupportedProblem
        `seed` is not an int of at least 0, nor a sequence of such, or `rng` is neither a generator nor an int.

    Examples
    --------
    >>> bool(generator_of(0, None).random() == generator_of(1, 0).random())
    True
    """
    if rng is not None:
        refuse(rng_reasons(rng))
        return np.random.default_rng(rng)
    ints = seed if isinstance(seed, (tuple, list)) else [seed]
    if ints and all(is_int(each) and each >= 0 for each in ints):
        return np.random.default_rng(seed)
    fix = ": pass it as rng=" if isinstance(seed, np.random.Generator) else ""
    raise UnsupportedProblem([f"seed must be an int of at least 0, or several in a list; got {describe(seed)}{fix}"])


def seed_drawn_from(rng: Any) -> int:
    """Return a seed of 64 bits, drawn from `rng`.

    Raises
    ------
    UnsupportedProblem
        `rng` is neither a generator nor an int.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> seed_drawn_from(rng) == seed_drawn_from(rng)
    False
    """
    refuse(rng_reasons(rng))
    return int(np.random.default_rng(rng).integers(1 << 64, dtype=np.uint64))


def rng_reasons(rng: Any) -> list[str]:
    """Return why `rng` is refused."""
    if isinstance(rng, np.random.Generator) or is_int(rng) and rng >= 0:
        return []
    fix = ": np.random.default_rng() makes one"
    return [f"rng must be a numpy.random.Generator, or an int of at least 0; got {describe(rng)}{fix}"]
