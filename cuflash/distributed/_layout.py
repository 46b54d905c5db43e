"""Layouts: the rank that holds each row, chosen by the cost of rows, and the keys that each rank needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from ..arrays import Array, describe, is_array, is_int, of_list
from ..blocks.index import BlockIndex
from ..errors import UnsupportedProblem
from ..masks.base import Mask
from ..masks.shape import MaskShape
from ._lanes import joint_runs

LAYOUTS = ("auto", "contiguous", "zigzag")
_CHUNKS_OF_RANK = 1, 2, 4, 8  # chunks per rank; as few as possible, since every run of rows needs its own copy
_NEARLY_EQUAL = 1.01  # most work of a rank, divided by the mean, with which few chunks suffice
_COSTLY = 4  # blocks that cost more than this multiple of the mean are assigned one by one
_MOST_EXCHANGES = 64


@dataclass(frozen=True, eq=False)
class Rows:
    """The assignment of a sequence's rows to ranks, in blocks.

    Attributes
    ----------
    owners : int array [num_blocks]
        The rank that holds each block.
    seqlen, block, size : int
        Numbers of rows of the sequence, of rows per block, and of ranks.
    """

    owners: Array
    seqlen: int
    block: int
    size: int

    @cached_property
    def of_rank(self) -> tuple[Array, ...]:
        """The positions of each rank's rows, in ascending order."""
        owners = np.repeat(self.owners, self.block)[: self.seqlen]
        return tuple(np.flatnonzero(owners == rank) for rank in range(self.size))

    def runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the positions first <= i < stop of a rank's rows."""
        return tuple((first, first + count) for _, first, count in self.places[rank])

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Each rank's runs of rows: first row within the rank, first row in the sequence, and number of rows."""
        return tuple(joint_runs(np.arange(len(rows)), rows) for rows in self.of_rank)

    def local(self, rank: int, rows: Array) -> Array:
        """Return the indices of positions among a rank's rows, which must include these positions."""
        return np.searchsorted(self.of_rank[rank], rows)


@dataclass(frozen=True, eq=False)
class Costs:
    """The blocks of a mask by which layouts are chosen.

    Attributes
    ----------
    work : int array [num_q_blocks]
        Number of blocks that the rows of each block attend to, summed over batch entries and heads.
    needs : bool array [num_q_blocks, num_kv_blocks]
        True if a row of the query block attends to a key of the key block.
    """

    work: Array
    needs: Array

    @classmethod
    def of(cls, mask: Mask, shape: MaskShape, block: int) -> Costs:
        """Classify the blocks of a resolved mask."""
        index = BlockIndex.from_mask(
            mask, shape.seqlen_q, shape.seqlen_kv, block, batch=shape.batch, num_heads=shape.num_heads
        )
        states = index.states() > 0
        alike = shape.num_batch * shape.num_heads // max(1, states.shape[0] * states.shape[1])
        return cls(alike * states.sum(axis=(0, 1, 3), dtype=np.int64), states.any(axis=(0, 1)))

    def loads(self, rows: Rows) -> Array:
        """Return the work of each rank."""
        return np.bincount(rows.owners, self.work, rows.size)

    def needed(self, queries: Rows, keys: Rows, rank: int) -> Array:
        """Return which keys a rank needs, bool [seqlen_kv]: all keys of the blocks that its rows attend to."""
        blocks = self.needs[queries.owners == rank].any(axis=0)
        return np.repeat(blocks, keys.block)[: keys.seqlen]


def dealt(layout: str | Array, work: Array, seqlen: int, block: int, size: int) -> Rows:
    """Return the assignment of rows for a layout, which is a name or has the rank of each block.

    Raises
    ------
    UnsupportedProblem
        The layout is neither a known name nor a list of ranks.
    """
    num_blocks = -(-seqlen // block)
    if isinstance(layout, str) and layout in LAYOUTS:
        numbers = np.arange(num_blocks)
        if layout == "contiguous":
            owners = numbers * size // max(1, num_blocks)
        elif layout == "zigzag":
            chunk = numbers * 2 * size // max(1, num_blocks)
            owners = np.minimum(chunk, 2 * size - 1 - chunk)
        else:
            owners = _by_cost(work, size)
        return Rows(owners, seqlen, block, size)
    owners = of_list("layout", layout, np.int64)
    if not (is_array(owners) and owners.shape == (num_blocks,) and owners.dtype.kind in "iu"):
        names = ", ".join(map(repr, LAYOUTS))
        raise UnsupportedProblem(
            [f"layout must be {names}, or the rank of each of the {num_blocks} blocks; got {describe(layout)}"]
        )
    if num_blocks and not (owners.min() >= 0 and owners.max() < size):
        raise UnsupportedProblem(
            [f"layout must have ranks from 0 to {size - 1}; got {int(owners.min())} to {int(owners.max())}"]
        )
    return Rows(np.asarray(owners, np.int64), seqlen, block, size)


def _by_cost(work: Array, size: int) -> Array:
    """Return the rank of each block, in as few chunks as make the work of ranks nearly equal.

    No rank gets more blocks than an equal share plus one of the smallest chunks.
    """
    most = -(-len(work) // size) + -(-len(work) // (_CHUNKS_OF_RANK[-1] * size)) - 1
    best, least = np.zeros(len(work), np.int64), np.inf
    for chunks in _CHUNKS_OF_RANK:
        owners = _dealt_chunks(work, size, -(-len(work) // (chunks * size)), most)
        loads, counts = np.bincount(owners, work, size), np.bincount(owners, minlength=size)
        is_last = chunks == _CHUNKS_OF_RANK[-1]
        if loads.max() < least and (is_last or counts.max() <= most):
            best, least = owners, loads.max()
        if least <= _NEARLY_EQUAL * loads.mean():
            break
    return best


def _dealt_chunks(work: Array, size: int, chunk: int, most: int) -> Array:
    """Assign chunks of blocks, the costliest first, to the rank with the least work; return the rank of each block.

    Positions break ties, so that all ranks agree.
    """
    pieces = _pieces(work, chunk)
    owners, loads, counts = np.zeros(len(work), np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    costs = [int(work[first:stop].sum()) for first, stop in pieces]
    piece_owners = [0] * len(pieces)
    for number in sorted(range(len(pieces)), key=lambda n: (-costs[n], n)):
        first, stop = pieces[number]
        fits = [rank for rank in range(size) if counts[rank] + stop - first <= most] or list(range(size))
        rank = min(fits, key=lambda r: (loads[r], counts[r], r))
        piece_owners[number] = rank
        loads[rank] += costs[number]
        counts[rank] += stop - first
    _exchange(pieces, costs, piece_owners, loads)
    for (first, stop), rank in zip(pieces, piece_owners):
        owners[first:stop] = rank
    return owners


def _pieces(work: Array, chunk: int) -> list[tuple[int, int]]:
    """Return ranges of blocks that stay together: chunks without costly blocks, and single costly blocks."""
    if not len(work):
        return []
    is_costly = work > _COSTLY * work.mean()
    is_first = np.arange(len(work)) % chunk == 0
    is_first[1:] |= is_costly[1:] | is_costly[:-1]
    firsts = np.flatnonzero(is_first)
    return [(int(first), int(stop)) for first, stop in zip(firsts, [*firsts[1:], len(work)])]


def _exchange(pieces: list[tuple[int, int]], costs: list[int], owners: list[int], loads: Array) -> None:
    """Exchange pieces of equal length between the busiest rank and another while the largest load decreases."""
    for _ in range(_MOST_EXCHANGES):
        most = int(loads.argmax())
        best, gain = None, 0
        for one, two in combinations(range(len(pieces)), 2):
            if owners[two] == most:
                one, two = two, one
            if owners[one] != most or owners[two] == most or _length(pieces[one]) != _length(pieces[two]):
                continue
            moved = costs[one] - costs[two]
            improved = min(moved, int(loads[most]) - int(loads[owners[two]]) - moved)
            if improved > gain:
                best, gain = (one, two), improved
        if best is None:
            return
        one, two = best
        moved = costs[one] - costs[two]
        loads[most] -= moved
        loads[owners[two]] += moved
        owners[one], owners[two] = owners[two], owners[one]


def _length(piece: tuple[int, int]) -> int:
    return piece[1] - piece[0]


def block_reasons(block: Any) -> list[str]:
    """Return why a value cannot be the number of rows per block."""
    if is_int(block) and block >= 1:
        return []
    return [f"block must be an int of at least 1; got {describe(block)}"]
