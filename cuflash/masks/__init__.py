"""Masks describe which keys each query attends.

>>> import numpy as np
>>> mask = Causal() & SlidingWindow(1, 0)
>>> mask.dense(MaskShape((), 1, 4, 4))[0].astype(int)
array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [0, 1, 1, 0],
       [0, 0, 1, 1]])
"""

from .base import Band, Mask, MaskShape
from .library import (
    BlockPattern,
    Causal,
    Dense,
    Dilated,
    Documents,
    FromFunction,
    Lengths,
    PrefixLM,
    SlidingWindow,
)

__all__ = [
    "Band",
    "BlockPattern",
    "Causal",
    "Dense",
    "Dilated",
    "Documents",
    "FromFunction",
    "Lengths",
    "Mask",
    "MaskShape",
    "PrefixLM",
    "SlidingWindow",
]
