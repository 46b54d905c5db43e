"""Kernel arguments as a launch takes them: records in one buffer, and tables with the addresses of the records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]  # records, in units of 8 bytes


class Place(NamedTuple):
    """The word of a buffer that a call sets to an address or a number plus an offset.

    Attributes
    ----------
    word : int
    offset : int
        Bytes added to an address; for a 4-byte number, the other half of its word.
    number : int
        The position of the address or number among those of the call.
    """

    word: int
    offset: int
    number: int


class KernelArguments(NamedTuple):
    """The arguments of one kernel in a buffer.

    Attributes
    ----------
    table : int
        The address of the table of argument addresses, which the CUDA driver expects.
    records : tuple of arrays
        The bytes of each argument, as an array of one element.
    """

    table: int
    records: tuple[NDArray[np.void], ...]


class Buffer:
    """The arguments of the kernels of one call, in memory.

    Parameters
    ----------
    words : array of uint64
        The records of all kernels; their address tables are appended.
    kernels : sequence of sequences of slices
        The words of each argument of each kernel.
    """

    def __init__(self, words: Words, kernels: Sequence[Sequence[slice]]) -> None:
        starts = list(accumulate(map(len, kernels), initial=len(words)))
        self._words: Words = np.concatenate([words, np.zeros(starts[-1] - len(words), np.uint64)])
        base = int(self._words.ctypes.data)
        self.words: memoryview = self._words.data
        for start, slices in zip(starts, kernels):
            self._words[start : start + len(slices)] = [base + 8 * part.start for part in slices]
        self.kernels = tuple(
            KernelArguments(base + 8 * start, tuple(_as_one(self._words[part]) for part in slices))
            for start, slices in zip(starts, kernels)
        )


def _as_one(words: Words) -> NDArray[np.void]:
    """Return words as an array with one element, which has one field."""
    return words.view(np.dtype([("bytes", np.void, words.nbytes)]))


class Arguments:
    """Kernel arguments for arrays of one layout, complete except for the addresses that each call sets.

    Concurrent calls use separate buffers. A launch copies its arguments, so the buffer is free for the next call.

    Parameters
    ----------
    words : array of uint64
        The records of all kernels.
    kernels : sequence of sequences of slices
        The words of each argument of each kernel.
    places : sequence of Place
        The words to which each call writes addresses.
    """

    def __init__(self, words: Words, kernels: Sequence[Sequence[slice]], places: Sequence[Place]) -> None:
        self._words, self._kernels, self._places = words, kernels, tuple(places)
        self._free: list[Buffer] = []

    def take(self, addresses: Sequence[int]) -> Buffer:
        """Return a buffer with these addresses; no other call uses it until `give_back`."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = Buffer(self._words, self._kernels)
        words = buffer.words
        for word, offset, number in self._places:
            words[word] = addresses[number] + offset
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Make a buffer available to later calls, after all its launches are queued."""
        self._free.append(buffer)
