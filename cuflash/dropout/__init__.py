"""Dropout of attention weights, by random bits that depend only on a seed and on the position of a weight."""

from .generators import Rng, generator_of, seed_drawn_from
from .philox import philox4x32
from .weights import LEVELS, SEED_DTYPES, Draws, Dropout, is_key, keep_mask, seed_of

__all__ = [
    "LEVELS", "SEED_DTYPES", "Draws", "Dropout", "Rng", "generator_of", "is_key", "keep_mask", "philox4x32",
    "seed_drawn_from", "seed_of",
]  # fmt: skip
