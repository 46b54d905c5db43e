"""Random generators from a seed or from `rng=`, as in NumPy's and SciPy's functions (SPEC 7)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import describe, is_int
from ..errors import UnsupportedProblem, refuse

Rng = np.random.Generator | int


def generator_of(seed: int | Sequence[int], rng: Rng | None) -> np.random.Generator:
    """Return the generator that a call draws from: `rng`, or a new generator with a seed.

    Parameters
    ----------
    seed : int, or sequence of int
        A seed for `numpy.random.default_rng`; ignored if `rng` is not None.
    rng : numpy.random.Generator or int, optional
        A generator, whose state then advances, or an int, which is used as the seed.

    Raises
    ------
    UnsupportedProblem
        `seed` is neither an int of at least 0 nor a sequence of such ints, or `rng` is neither a generator nor an int.

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
    raise UnsupportedProblem(f"seed must be an int of at least 0, or several in a list; got {describe(seed)}{fix}")


def seed_drawn_from(rng: Rng) -> int:
    """Return a 64-bit seed, drawn from `rng`.

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


def rng_reasons(rng: Rng) -> list[str]:
    """Return the reasons why `rng` is refused."""
    if isinstance(rng, np.random.Generator) or is_int(rng) and rng >= 0:
        return []
    fix = ": pass np.random.default_rng()"
    return [f"rng must be a numpy.random.Generator, or an int of at least 0; got {describe(rng)}{fix}"]
