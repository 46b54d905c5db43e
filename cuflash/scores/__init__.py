"""Score functions: Python functions that change each score before the softmax, and common ones from the literature.

>>> import numpy as np, cuflash
>>> from cuflash import scores
>>> q = k = v = np.ones((4, 16, 8), np.float32)
>>> capped_alibi = scores.alibi(scores.alibi_slopes(4)) @ scores.softcap(50.0)
>>> cuflash.attention(q, k, v, score=capped_alibi).shape
(4, 16, 8)
"""

from .library import (
    alibi,
    alibi_slopes,
    bias,
    relative_position,
    relative_position_2d,
    softcap,
    temperature,
)
from .places import within
from .score import Score

__all__ = [
    "Score",
    "alibi",
    "alibi_slopes",
    "bias",
    "relative_position",
    "relative_position_2d",
    "softcap",
    "temperature",
    "within",
]


def __dir__() -> list[str]:
    return __all__
