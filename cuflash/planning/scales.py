"""The record that passes the scales of FP8 operands to kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .launches import MATRICES, Feature, structure

SCALE_ARRAYS = ("q_scale", "k_scale", "v_scale")
_ROWS = ("q_rows", "k_rows", "v_rows")
SCALES = structure((MATRICES, *SCALE_ARRAYS), (np.int64, *_ROWS))


class RowsPerScale(NamedTuple):
    """Numbers of consecutive rows of q, k and v that share a scale, counted from the first row of a head.

    >>> RowsPerScale(128, 128, 128).feature().values["q_rows"]
    128
    """

    q: int
    k: int
    v: int

    def feature(self) -> Feature:
        """Return the feature whose record passes the scales to kernels."""
        return Feature("scales", SCALES, dict(zip(_ROWS, self)))
