"""Philox4x32-10 in NumPy, which computes four random 32-bit words from a key and a counter of four words.

This is the generator of Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011). NumPy's own generator,
`numpy.random.Philox`, has 64-bit words instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array


_MASK = (1 << 32) - 1
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85  # each round adds these to the two words of the key
_ROUNDS = 10


def philox4x32(key: int, counter: Sequence[Array]) -> list[Array]:
    """Return four random words for each counter of four words.

    All words are uint64 arrays with values below 2^32. The arrays of the counter broadcast against each other.

    >>> [f"{int(word):08x}" for word in philox4x32(0, np.zeros(4, np.uint64))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    mask, shift = np.uint64(_MASK), np.uint64(32)
    c0, c1, c2, c3 = counter
    keys = np.array(_round_keys(key), np.uint64)
    for k0, k1 in zip(keys[::2], keys[1::2]):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & mask, (p0 >> shift) ^ c3 ^ k1, p0 & mask
    return [c0, c1, c2, c3]


def _round_keys(key: int) -> list[int]:
    """Return the two key words of each Philox round, in the order of the rounds."""
    halves = zip((key & _MASK, key >> 32), _WEYL, strict=True)
    words = [[(half + number * step) & _MASK for number in range(_ROUNDS)] for half, step in halves]
    return [word for pair in zip(*words) for word in pair]
