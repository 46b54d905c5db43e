"""Masks describe which keys each query attends.

Masks are frozen descriptions and combine by ``& | ^ - ~``. Most masks hold no lengths, so one mask serves many
problems. `Mask` documents their methods.

>>> mask = Causal() & SlidingWindow(1, 0)
>>> mask.toarray(4).astype(int)
array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [0, 1, 1, 0],
       [0, 0, 1, 1]])
"""

from ._chosen import ChosenBlocks, Compressed
from .arrays import Dense, FromFunction, Sparse
from .base import Band, Mask
from .block_pattern import BlockPattern
from .diagonal import Causal, Dilated, PrefixLM, SlidingWindow
from .documents import Documents
from .lengths import Lengths
from .sequences import Sequences
from .shape import MaskShape

__all__ = [
    "Band",
    "BlockPattern",
    "Causal",
    "ChosenBlocks",
    "Compressed",
    "Dense",
    "Dilated",
    "Documents",
    "FromFunction",
    "Lengths",
    "Mask",
    "MaskShape",
    "PrefixLM",
    "Sequences",
    "SlidingWindow",
    "Sparse",
]


def __dir__() -> list[str]:
    return __all__
