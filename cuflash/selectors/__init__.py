"""Selectors estimate from q and k which blocks hold most of the softmax, at a lower cost than that of all scores.

Each takes q and k and returns a `BlockIndex` for the argument `mask` of `attention` and of its gradients. For device
arrays the index is built on the device without synchronization.

>>> import numpy as np, cuflash
>>> from cuflash import selectors
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 256, 32), dtype=np.float32)
>>> index = selectors.pooled(q, k, block=32, budget=selectors.Budget(top_k=4), causal=True)
>>> cuflash.attention(q, k, v, mask=index).shape
(2, 256, 32)
"""

from .baselines import local, oracle, random
from .budget import Budget, Forced
from .compressed import nsa
from .estimates import antidiagonal, pooled
from .pages import page_bounds, quest
from .slashes import vertical_slash

__all__ = [
    "Budget",
    "Forced",
    "antidiagonal",
    "local",
    "nsa",
    "oracle",
    "page_bounds",
    "pooled",
    "quest",
    "random",
    "vertical_slash",
]


def __dir__() -> list[str]:
    return __all__
