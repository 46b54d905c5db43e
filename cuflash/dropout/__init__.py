"""Dropout of attention's weights, by numbers that a seed and the place of a weight determine."""

from .generators import Rng, generator_of, seed_drawn_from
from .philox import philox4x32
from .weights import LEVELS, SEED_DTYPES, Draws, Dropout, kept, seed_of

__all__ = [
    "LEVELS", "SEED_DTYPES", "Draws", "Dropout", "Rng", "generator_of", "kept", "philox4x32", "seed_drawn_from",
    "seed_of",
]  # fmt: skip
