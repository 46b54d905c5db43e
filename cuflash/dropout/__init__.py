"""Dropout of attention weights, by random bits that depend only on a seed and on the position of a weight."""

from .philox import philox4x32
from .weights import LEVELS, SEED_DTYPES, Draws, Dropout, keep_mask, seed_of

__all__ = ["LEVELS", "SEED_DTYPES", "Draws", "Dropout", "keep_mask", "philox4x32", "seed_of"]
