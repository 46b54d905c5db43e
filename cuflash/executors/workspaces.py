"""Workspace memory of a pass on a GPU, which calls on one stream use one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array
from ..planning.launches import Workspace

_PER_THREAD = 2  # cudaStreamPerThread, a single handle for the streams of many threads
MOST_KEPT = 8 << 20  # maximum bytes of a piece that a stream keeps for its calls
_ALIGNMENT = 256  # alignment in bytes of each workspace within a piece


class Stream(Protocol):
    """A CUDA stream, with CuPy's names."""

    @property
    def ptr(self) -> int:
        """The handle of the stream."""

    def is_capturing(self) -> bool:
        """True if work on the stream is recorded in a graph."""


class Piece(NamedTuple):
    """A piece of memory on a device."""

    nbytes: int
    array: Array
    address: int


class Memory(Protocol):
    """Allocator of the current device, with the memory that its streams keep."""

    def maker(self, shape: tuple[int, ...], dtype: DTypeLike, axes: Sequence[int] | None = None) -> Callable[[], Array]:
        """Return a function that allocates an array."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new array of zeros on the current device, for one call."""

    def lasting(self, nbytes: int) -> Piece:
        """Return a new piece of zeros on the current device, in memory that may outlive the call."""

    def kept_zeros(self, number: int, nbytes: int) -> dict[int, Piece]:
        """Return, by stream, the pieces that stay zero between calls, for one of several of a size that a call has."""

    def kept_pieces(self) -> dict[int, list[Piece]]:
        """Return, by stream, the pieces that no call is using at present to launch kernels."""

    @property
    def address(self) -> Callable[[Array], int]:
        """A function that returns the address of an array."""


def kept_bytes(workspace: Workspace) -> int:
    """Return the size of the array of zeros for a workspace: a power of two, so that unlike calls share few arrays."""
    return max(_ALIGNMENT, 1 << (workspace.nbytes - 1).bit_length())


class Taken(NamedTuple):
    """The workspaces of one call: their addresses, the arrays that hold them, and the piece to return to the stream."""

    addresses: list[int]
    arrays: list[Array]
    piece: Piece | None = None


class SeparateWorkspaces:
    """A separate array for each workspace of a call, so that no out-of-bounds write hits another workspace.

    Parameters
    ----------
    needs : dict of Workspace by name
    make : callable (Workspace) -> array
    address : callable (array) -> int
    """

    def __init__(
        self, needs: Mapping[str, Workspace], make: Callable[[Workspace], Array], address: Callable[[Array], int]
    ) -> None:
        self._needs, self._make, self._address = list(needs.values()), make, address

    def take(self, stream: Stream) -> Taken:
        """Allocate new arrays for a call on a stream."""
        arrays = list(map(self._make, self._needs))
        return Taken(list(map(self._address, arrays)), arrays)

    def give_back(self, stream: Stream, taken: Taken) -> None:
        """Return immediately: a later call allocates its own arrays."""


class Workspaces:
    """Workspace memory of a pass: one piece for all of them, except those that must be zero.

    Kernels of a stream run one after another, so a call may use a piece before the kernels of the previous call have
    run; but while a call launches its kernels, no other thread gets the piece. Workspaces that must be zero are zero
    again after the kernels, so a stream keeps an array for each of them. This saves a memset of 6 µs per call.

    A call under capture allocates its own memory, since replays may overlap with other calls of the stream. So does a
    call on cudaStreamPerThread, and one that needs a large piece. Memory that a stream keeps never belongs to a call's
    allocator: the first call may be the last one before a capture, whose allocator reuses what that call allocated.

    Parameters
    ----------
    needs : dict of Workspace by name
    memory : Memory
    """

    def __init__(self, needs: Mapping[str, Workspace], memory: Memory) -> None:
        self._memory, self._address = memory, memory.address
        sizes = [0 if need.is_zeroed else need.nbytes for need in needs.values()]
        self._starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))[:-1]
        zeroed = [(place, kept_bytes(need)) for place, need in enumerate(needs.values()) if need.is_zeroed]
        self._zeros = [
            (place, nbytes, memory.kept_zeros(number, nbytes)) for number, (place, nbytes) in enumerate(zeroed)
        ]
        self._nbytes = max((start + size for start, size in zip(self._starts, sizes)), default=0)
        self._make = memory.maker((self._nbytes,), np.dtype(np.uint8))
        self._pieces = memory.kept_pieces()

    def take(self, stream: Stream) -> Taken:
        """Return the workspaces of a call on a stream."""
        number = stream.ptr
        is_apart = number == _PER_THREAD or bool(stream.is_capturing())
        is_kept = not is_apart and self._nbytes <= MOST_KEPT
        piece, base = None, 0
        if self._nbytes:
            try:
                piece = self._pieces[number].pop() if is_kept else None
            except (KeyError, IndexError):  # no piece is free, or another thread has just taken the last
                piece = None
            if piece is None or piece.nbytes < self._nbytes:
                piece = self._memory.lasting(self._nbytes) if is_kept else self._own()
            base = piece.address
        addresses = [base + start for start in self._starts]
        arrays = [] if piece is None else [piece.array]
        for place, nbytes, by_stream in self._zeros:
            if is_apart:
                zeros = self._memory.zeros((nbytes,), np.dtype(np.uint8))
                addresses[place] = self._address(zeros)
                arrays.append(zeros)
                continue
            of_stream = by_stream.get(number)
            if of_stream is None:
                of_stream = by_stream.setdefault(number, self._memory.lasting(nbytes))
            addresses[place] = of_stream.address
        return Taken(addresses, arrays, piece if is_kept else None)

    def _own(self) -> Piece:
        array = self._make()
        return Piece(self._nbytes, array, self._address(array))

    def give_back(self, stream: Stream, taken: Taken) -> None:
        """Make the memory of a call that has launched its kernels available to later calls on the stream."""
        if taken.piece is not None:
            self._pieces.setdefault(stream.ptr, []).append(taken.piece)
