"""A score function that uses what a score function can use."""

from __future__ import annotations

from typing import Any

import numpy as np


def warped(s: Any, b: Any, h: Any, i: Any, j: Any, slope: Any, table: Any, place: Any) -> Any:
    """Return a score that is curved in s, gathers by an array of integers, and has two arrays that may be learnt."""
    return 2 * np.tanh(s / 2) - np.exp(slope[h]) * np.abs(i - j) + s * table[h, 3 * np.clip(place[j], 0, 2) + i % 3]
