"""A score function that uses every feature of score functions."""

from __future__ import annotations

from typing import Any

import numpy as np


def warped(s: Any, b: Any, h: Any, i: Any, j: Any, slope: Any, table: Any, place: Any) -> Any:
    """Return a score that is nonlinear in s, gathers by an integer array, and has two arrays that may be trainable."""
    return 2 * np.tanh(s / 2) - np.exp(slope[h]) * np.abs(i - j) + s * table[h, 3 * np.clip(place[j], 0, 2) + i % 3]
