"""Arguments of kernels as a launch takes them: records in one buffer, and tables of the addresses of records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np


class Place(NamedTuple):
    """The word of a buffer that holds what a call gives, an address or a number, plus an offset.

    Attributes
    ----------
    word : int
    offset : int
        Bytes to add to an address; to a number of four bytes, the other half of its word.
    number : int
        The place of the address or the number among those of a call.
    """

    word: int
    offset: int
    number: int


class KernelArguments(NamedTuple):
    """The arguments of one kernel in a buffer.

    Attributes
    ----------
    table : int
        The address of a table with the address of each argument, which the CUDA driver takes.
    records : tuple of arrays
        The bytes of each argument, as an array of one element.
    """

    table: int
    records: tuple[Any, ...]


class Buffer:
    """Arguments of the kernels of one call in memory.

    Parameters
    ----------
    words : array of uint64
        The records of all kernels; their tables of addresses are made here.
    kernels : sequence of sequences of slices
        The words of each argument of each kernel.
    """

    def __init__(self, words: Any, kernels: Sequence[Sequence[slice]]) -> None:
        starts = list(accumulate(map(len, kernels), initial=len(words)))
        self._words: Any = np.concatenate([words, np.zeros(starts[-1] - len(words), np.uint64)])
        base = int(self._words.ctypes.data)
        self.words: memoryview = self._words.data
        for start, slices in zip(starts, kernels):
            self._words[start : start + len(slices)] = [base + 8 * part.start for part in slices]
        self.kernels = tuple(
            KernelArguments(base + 8 * start, tuple(_as_one(self._words[part]) for part in slices))
            for start, slices in zip(starts, kernels)
        )


def _as_one(words: Any) -> Any:
    """Words as an array of one element with one field."""
    return words.view(np.dtype([("bytes", np.void, words.nbytes)]))


class Arguments:
    """Arguments of kernels for arrays of one layout, complete but for addresses that each call gives.

    Calls at once have a buffer each. A launch copies what is in a buffer, so that it serves the next call.

    Parameters
    ----------
    words : array of uint64
        The records of all kernels.
    kernels : sequence of sequences of slices
        The words of each argument of each kernel.
    places : sequence of Place
        Where addresses go.
    """

    def __init__(self, words: Any, kernels: Sequence[Sequence[slice]], places: Sequence[Place]) -> None:
        self._words, self._kernels, self._places = words, kernels, tuple(places)
        self._free: list[Buffer] = []

    def take(self, addresses: Sequence[int]) -> Buffer:
        """A buffer with these addresses, for this call alone until it is given back."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = Buffer(self._words, self._kernels)
        words = buffer.words
        for word, offset, number in self._places:
            words[word] = addresses[number] + offset
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Let a later call have a buffer whose launches have been made."""
        self._free.append(buffer)
