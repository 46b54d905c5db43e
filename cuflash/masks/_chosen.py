"""Blocks of keys that each query chooses, and compressed keys that each stand for a run of keys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ..arrays import (
    Array, describe, int_reasons, is_array, is_integer_dtype, namespace, no_array, to_host, whole_number,
)  # fmt: skip
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from .base import Mask, intersection
from .block_set import BlockGrid, BlockSet
from .content import DeviceForm, held_arrays, held_masks
from .coordinates import UNBOUNDED, Intervals, LeadingArray, as_int64, leading_reasons, widened
from .fields import take_arrays
from .sequences import ResolvedSequences, Sequences
from .shape import MAX_SEQLEN, MaskShape, broadcasts_to

_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_STEP = 16  # kernels join lists of blocks of multiples of 16 keys


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class ChosenBlocks(Mask):
    """A query attends the blocks of keys in its own list: query i attends key j if j // block is in list i.

    A list is a set: results are bitwise identical for any order of the numbers, with or without repetitions.

    Parameters
    ----------
    blocks : int32 or int64 array [..., heads, seqlen_q, n], or [seqlen_q, n]
        The numbers of the blocks that each query attends; entries of -1 are ignored. The extent of the axis of heads is
        1, the number of key/value heads (the query heads of a group then share a list) or the number of query heads.
        Leading axes broadcast over those of the problem.
    block : int
        Keys per block, at least 1. The length may cut off the last block.
    counts : int array [..., heads, seqlen_q], optional
        How many entries at the start of each list are used; by default all. It broadcasts to the axes of `blocks`
        before the last.
    sequences : Sequences, optional
        Packed sequences, each with blocks of its own: block numbers count from the first key of the query's sequence,
        and the other sequences are masked, as by ``& sequences``. Lists of queries outside all sequences are ignored.

    Raises
    ------
    TypeError
        `blocks` or `counts` is not an array, or `sequences` is not a `Sequences`.
    UnsupportedProblem
        `blocks` or `counts` has a wrong dtype or too few axes, or `block` is not a positive int. Calls, and `resolve`,
        raise it if the lists do not fit the problem, or if lists on the host contain a number outside the blocks.

    See Also
    --------
    cuflash.selectors : Choose blocks by estimates of their scores.
    BlockPattern : Blocks of queries that attend the same keys.

    Notes
    -----
    This is the mask of native sparse attention (arXiv 2502.11089, section 3.3), of MoBA (arXiv 2502.13189), whose lists
    differ by query head, and of Quest (arXiv 2406.10774) at block = page size. Integers have no gradients. To train a
    selector, let its scores also multiply something differentiable, such as the gates of branches that `merge_vjp`
    combines.

    Arrays are read at each call and not copied by the mask. The host never inspects arrays on a device: kernels ignore
    numbers outside the blocks and read no memory for them. With ``CUFLASH_CHECK=1`` calls wait for the device and
    refuse such numbers.

    Examples
    --------
    >>> import numpy as np
    >>> chosen = ChosenBlocks(np.array([[0, -1], [0, -1], [1, 0], [2, 1]]), block=2)
    >>> chosen.toarray(4, 6).astype(int)
    array([[1, 1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [1, 1, 1, 1, 0, 0],
           [0, 0, 1, 1, 1, 1]])

    Two sequences of three tokens, in blocks of two:

    >>> from cuflash import masks
    >>> packed = ChosenBlocks(np.array([[0], [0], [1]] * 2), block=2, sequences=masks.Sequences.of([3, 3]))
    >>> packed.toarray(6).astype(int)
    array([[1, 1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [0, 0, 1, 0, 0, 0],
           [0, 0, 0, 1, 1, 0],
           [0, 0, 0, 1, 1, 0],
           [0, 0, 0, 0, 0, 1]])
    """

    blocks: Array
    block: int
    _: KW_ONLY
    counts: Array | None = None
    sequences: Sequences | None = None

    def __post_init__(self) -> None:
        take_arrays(self, {"blocks": "blocks", "counts": "counts"})
        for name in ("blocks", "counts"):
            value = getattr(self, name)
            if (value is not None or name == "blocks") and not is_array(value):
                raise TypeError(no_array(name, value))
        if not isinstance(self.sequences, Sequences | None):
            fix = "write sequences=masks.Sequences(offsets)"
            raise TypeError(f"sequences must be a masks.Sequences or None; got {describe(self.sequences)}: {fix}")
        reasons = []
        if self.blocks.dtype not in _DTYPES or self.blocks.ndim < 2:
            is_narrow = is_integer_dtype(self.blocks.dtype) and self.blocks.ndim >= 2
            fix = ": cast them to int64" if is_narrow else ""
            reasons.append(
                f"blocks must be an int32 or int64 array (..., heads, seqlen_q, n); got {describe(self.blocks)}{fix}"
            )
        if self.counts is not None and not (is_integer_dtype(self.counts.dtype) and self.counts.dtype.isnative):
            fix = ": cast them to int64" if is_integer_dtype(self.counts.dtype) else ""  # kernels do not swap bytes
            reasons.append(f"counts must be an int array (..., heads, seqlen_q); got {describe(self.counts)}{fix}")
        if type(self.block) is not int or not 0 < self.block <= MAX_SEQLEN:
            with collecting(reasons):
                object.__setattr__(self, "block", _size(self.block))
        refuse(reasons)

    @property
    def _natural_block(self) -> tuple[int, int] | None:
        return (1, self.block) if self.sequences is None else None

    @property
    def _own_lengths(self) -> tuple[int | None, int | None]:
        return int(self.blocks.shape[-2]), None

    @property
    def _device_form(self) -> DeviceForm | None:
        if self.sequences is not None:  # whose offsets kernels would have to read
            return None
        counts = () if self.counts is None else (self.counts,)
        return DeviceForm((self.blocks, *counts), (self.block, len(counts)))

    @property
    def num_lists(self) -> int:
        """The number of lists of each query: the extent of the axis of heads.

        Examples
        --------
        >>> import numpy as np
        >>> ChosenBlocks(np.zeros((2, 4, 9, 3), int), block=64).num_lists
        4
        """
        return int((1, *self.blocks.shape)[-3])

    def require_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Refuse a number of lists that is not 1, the number of key/value heads or the number of query heads.

        Parameters
        ----------
        num_heads, num_kv_heads : int
            Numbers of query heads and of key/value heads.

        Raises
        ------
        UnsupportedProblem
            `num_lists` is not one of these numbers.

        Examples
        --------
        >>> import numpy as np
        >>> ChosenBlocks(np.zeros((4, 9, 3), int), block=64).require_heads(64, 4)
        """
        if self.num_lists not in (1, num_kv_heads, num_heads):
            raise UnsupportedProblem(
                f"blocks must have 1, {num_kv_heads} (num_kv_heads) or {num_heads} (num_heads) heads; "
                f"got {self.num_lists}"
            )

    def resolve(self, shape: MaskShape) -> Mask:
        axes = tuple(self.blocks.shape)
        reasons = leading_reasons("blocks", axes[:-3], shape.batch)
        if axes[-2] != shape.seqlen_q:
            reasons.append(f"blocks must have seqlen_q={shape.seqlen_q} rows; got {axes[-2]}")
        if self.num_lists not in (1, shape.num_heads) and shape.num_heads % max(1, self.num_lists):
            reasons.append(
                f"blocks must have 1, num_kv_heads or {shape.num_heads} (num_heads) heads; got {self.num_lists}: "
                "outside of calls, pass num_heads="
            )
        if self.counts is not None and not broadcasts_to(tuple(self.counts.shape), axes[:-1]):
            reasons.append(
                f"counts must broadcast to the axes of blocks before the last, {axes[:-1]}; got shape "
                f"{tuple(self.counts.shape)}"
            )
        sequences = None
        if self.sequences is not None:
            with collecting(reasons):
                sequences = self.sequences.resolve(shape)
        refuse(reasons)
        is_on_host = {namespace(array) for array in held_arrays(self)} == {np}
        if is_on_host:
            self.require_numbers(shape.seqlen_kv)
        if sequences is None:
            return ResolvedChosen(self, shape)
        unit = self._aligned_block() if is_on_host else None
        lists = self if unit is None else self._in_blocks_of(unit, shape.seqlen_kv)
        return intersection((sequences, ResolvedChosen(lists, shape)))

    @property
    def _leading_axes(self) -> tuple[int, ...]:
        of_sequences = () if self.sequences is None else (array.shape[:-1] for array in self.sequences.arrays)
        return np.broadcast_shapes(tuple(self.blocks.shape[:-3]), *map(tuple, of_sequences))

    def _bounds_of_sequences(self, seqlen_kv: int) -> tuple[Array, Array]:
        """Return the first key of each query's sequence, and one past its last key, [..., seqlen_q].

        The first key of a query outside all sequences is not less than the end.
        """
        assert self.sequences is not None
        shape = MaskShape(self._leading_axes, 1, self.blocks.shape[-2], seqlen_kv)
        whole = replace(self.sequences, causal=False, window=None).resolve(shape)
        assert isinstance(whole, ResolvedSequences)
        first, end = whole.bounds
        return first.array, end.array

    def _first_keys(self, seqlen_kv: int) -> Array:
        """Return the first key of each block in lists on the host, or -1 for none, [..., heads, seqlen_q, n]."""
        first, end = (side[..., None, :, None] for side in self._bounds_of_sequences(seqlen_kv))
        is_block = (self.blocks >= 0) & (first < end)
        return np.where(is_block, first + self.blocks.astype(np.int64) * self.block, -1)

    def _aligned_block(self) -> int | None:
        """Return the largest size that divides all blocks of all sequences; None if kernels do not join such blocks."""
        assert self.sequences is not None
        unit = int(np.gcd.reduce(as_int64(self.sequences.arrays[-1])[..., :-1], axis=None, initial=self.block))
        return unit if unit == self.block or unit % _STEP == 0 else None

    def _in_blocks_of(self, unit: int, seqlen_kv: int) -> ChosenBlocks:
        """Return lists of blocks of `unit` keys that count from key 0, without those past the end of a sequence."""
        first, end = self._first_keys(seqlen_kv)[..., None], self._bounds_of_sequences(seqlen_kv)[1]
        keys, parts = first + unit * np.arange(self.block // unit), self.block // unit
        numbers = np.where((first < 0) | (keys >= end[..., None, :, None, None]), -1, keys // unit)
        counts = None if self.counts is None else self.counts.astype(np.int64) * parts
        return ChosenBlocks(numbers.reshape(*first.shape[:-2], first.shape[-2] * parts), unit, counts=counts)

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        raise UnsupportedProblem("ChosenBlocks depends on the shape: call .resolve(shape) first")

    @explains_keywords
    def index(self, seqlen_kv: int, *, num_heads: int | None = None) -> Any:
        """Return the block index with blocks of one query that allows the same elements.

        Parameters
        ----------
        seqlen_kv : int
            Length of the keys in tokens.
        num_heads : int, optional
            Number of query heads. Lists of key/value heads are repeated for the query heads that share them. Default:
            the number of lists.

        Returns
        -------
        BlockIndex
            The index, with blocks of shape (1, block), on the device of the lists.

        Raises
        ------
        UnsupportedProblem
            The lists do not fit the lengths, as for a call with this mask.

        Examples
        --------
        >>> import numpy as np
        >>> chosen = ChosenBlocks(np.array([[0, -1], [2, 1]]), block=2)
        >>> print(chosen.index(6).picture())
        █··
        ·██
        """
        package: Any = sys.modules[__name__.partition(".")[0]]  # avoids a circular import
        num_heads = self.num_lists if num_heads is None else num_heads
        axes = {"batch": self._leading_axes, "num_heads": num_heads}
        return package.BlockIndex.from_mask(self, self.blocks.shape[-2], seqlen_kv, (1, self.block), **axes)

    @explains_keywords
    def distinct(self, queries: int) -> float:
        """Return the number of distinct blocks of a group of neighbouring queries, divided by the blocks of one query.

        A kernel that shares keys among neighbours loads this many times the blocks of one query. The call waits for the
        device.

        Parameters
        ----------
        queries : int
            Queries per group. Groups start at queries 0, `queries`, 2 `queries` and so on.

        Returns
        -------
        float
            From 1, if neighbours choose the same blocks, to `queries`; 0 if no block is chosen. The numerator is a mean
            over groups, the denominator a mean over queries.

        Raises
        ------
        UnsupportedProblem
            `queries` is not an int of at least 1.

        Examples
        --------
        >>> import numpy as np
        >>> chosen = ChosenBlocks(np.array([[0, 1], [1, 0], [0, 1], [2, 3]]), block=64)
        >>> chosen.distinct(queries=2)
        1.5
        """
        queries = whole_number("queries", queries, 1)
        chosen, blocks = self.to(to_host), to_host(self.blocks)
        if chosen.sequences is not None:  # equal numbers in different sequences are different blocks
            blocks = chosen._first_keys(int(chosen.sequences.arrays[-1].max()))
        rows, is_first = sorted_sets(blocks, chosen.counts)
        seqlen_q, num_members = rows.shape[-2], int(is_first.sum())
        if not num_members:
            return 0.0
        queries, place = min(queries, seqlen_q), np.nonzero(is_first)
        num_runs = -(-seqlen_q // queries)
        run = np.ravel_multi_index((*place[:-2], place[-2] // queries), (*rows.shape[:-2], num_runs))
        num_distinct = len(np.unique(np.stack([run, rows[is_first]]), axis=1).T)
        return float(num_distinct / num_runs / (num_members / seqlen_q))

    def require_numbers(self, seqlen_kv: int) -> None:
        """Refuse block numbers that are out of range, and counts beyond the lists; wait for the device.

        Calls check lists on the host, and with CUFLASH_CHECK=1 also lists on a device.

        Parameters
        ----------
        seqlen_kv : int
            Length of the keys in tokens.

        Raises
        ------
        UnsupportedProblem
            A number is out of range; the message names the first one.

        Examples
        --------
        >>> import numpy as np
        >>> ChosenBlocks(np.array([[0, 3]]), block=64).require_numbers(256)
        """
        blocks, n, keys = to_host(self.blocks), self.blocks.shape[-1], np.array(seqlen_kv)
        counts = None if self.counts is None else to_host(self.counts)
        if self.sequences is not None:
            first, end = (to_host(side)[..., None, :, None] for side in self._bounds_of_sequences(seqlen_kv))
            blocks, keys = np.where(first < end, blocks, -1), np.maximum(end - first, 0)
        wrong = (blocks < -1) | (blocks >= -(-keys // self.block))
        if counts is not None:
            if (is_beyond := (counts < 0) | (counts > n)).any():
                place = tuple(map(int, np.argwhere(is_beyond)[0]))
                raise UnsupportedProblem(f"counts must be ints in 0..{n}; got {int(counts[place])} at {place}")
            wrong &= np.arange(n) < counts[..., None]
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            length = int(np.broadcast_to(keys, wrong.shape)[place])
            whose = f"seqlen_kv={length}" if self.sequences is None else f"a sequence of {length} keys"
            raise UnsupportedProblem(
                f"blocks must hold block numbers from -1, which means no block, to {-(-length // self.block) - 1} "
                f"({whose} in blocks of {self.block}); got {int(blocks[place])} at {place}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedChosen(Mask):
    """The resolved form of `ChosenBlocks`: its arrays, and the chosen blocks as a set of cells of shape (1, block).

    If it has sequences, it allows blocks before the first key of a query's sequence, too, which another mask must mask.
    """

    source: ChosenBlocks
    shape: MaskShape

    @property
    def _natural_block(self) -> tuple[int, int] | None:
        return self.source._natural_block

    @cached_property
    def first(self) -> LeadingArray | None:
        """The key of each query from which its blocks count, [*batch, seqlen_q]; None if all count from key 0."""
        if self.source.sequences is None:
            return None
        return LeadingArray.of(self.source._bounds_of_sequences(self.shape.seqlen_kv)[0], self.shape.batch, 1)

    @property
    def heads_of_list(self) -> int:
        """The number of query heads that share a list."""
        return max(1, self.shape.num_heads // max(1, self.source.num_lists))

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.shape.seqlen_kv // self.source.block)

    @cached_property
    def cells(self) -> BlockSet | BlockGrid:
        """The blocks that each query chose: sorted numbers on the host, one boolean per block on a device."""
        source, batch = self.source, self.shape.batch
        blocks = LeadingArray.of(source.blocks, batch, 3).array
        counts = None if source.counts is None else LeadingArray.of(source.counts, batch, 2).array
        if namespace(blocks) is not np:
            cells = _chosen_cells(blocks, counts, self.num_kv_blocks)
            return BlockGrid(LeadingArray(cells, batch), (1, source.block))
        if any(extent > 1 for extent in blocks.shape[:-3]):
            blocks = np.broadcast_to(blocks, (*batch, *blocks.shape[-3:]))
        rows, is_first = sorted_sets(blocks, counts)
        num_rows = prod(rows.shape[:-1])
        keys = (np.arange(num_rows).reshape(*rows.shape[:-1], 1) * self.num_kv_blocks + rows)[is_first]
        grid = prod(rows.shape[:-3]), *rows.shape[-3:-1], self.num_kv_blocks
        return BlockSet(grid, (1, source.block), keys, np.ones(len(keys), bool), (1, source.block))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        if self.first is not None:
            first = self.first.at(b, i)
            j = namespace(first).maximum(j - first, 0)
        return self.cells(b, h // self.heads_of_list, i, j)

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        h = h // self.heads_of_list
        if self.first is None:
            return self.cells.rectangle(b, h, i0, i1, j0, j1)
        first, xp = self.first.at(b, i0), namespace(self.first.array)
        is_within_one = (first == self.first.at(b, i1 - 1)) & (first <= j0)
        keys = xp.maximum(j0 - first, 0), xp.maximum(j1 - first, 1)
        may, must = self.cells.rectangle(b, h, i0, i1, *keys)
        return may | ~is_within_one, must & is_within_one


def sorted_sets(blocks: Array, counts: Array | None) -> tuple[Array, Array]:
    """Sort lists of block numbers on the host, and mark the first occurrence of each block in its list.

    Parameters
    ----------
    blocks : int array [..., n]
        Block numbers; negative ones are ignored.
    counts : int array, optional
        How many entries at the start of each list are used; broadcasts to the axes of `blocks` before the last.

    Returns
    -------
    rows : int64 array [..., n]
        The lists, each sorted.
    is_first : bool array [..., n]
        False for ignored and repeated entries.
    """
    blocks = blocks.astype(np.int64)
    if counts is not None:
        blocks[~np.broadcast_to(np.arange(blocks.shape[-1]) < counts[..., None], blocks.shape)] = -1
    blocks.sort(axis=-1)
    is_first = blocks >= 0
    is_first[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]
    return blocks, is_first


def _chosen_cells(blocks: Array, counts: Array | None, num_blocks: int) -> Array:
    """Return a bool array [..., num_blocks], True for the blocks that a query chose; ignore numbers out of range.

    Works on arrays of any library, does not wait for the device, and never uses a number from the lists as an index.
    """
    xp = namespace(blocks)
    number = xp.arange(num_blocks)
    chosen = xp.zeros((*blocks.shape[:-1], num_blocks), dtype=bool)
    for place in range(blocks.shape[-1]):
        is_equal = blocks[..., place, None] == number
        chosen = chosen | (is_equal if counts is None else is_equal & (place < counts)[..., None])
    return chosen


def chosen_masks(mask: Mask | Array) -> Iterator[ChosenBlocks]:
    """Yield the `ChosenBlocks` among the parts of a mask; yield nothing for a value that is not a mask."""
    parts = held_masks(mask) if isinstance(mask, Mask) else ()
    return (part for part in parts if isinstance(part, ChosenBlocks))


def _size(block: int) -> int:
    """Return the number of keys per block as an int."""
    if isinstance(block, (tuple, list)) and len(block) == 2 and block[0] == 1:
        raise UnsupportedProblem(f"block must be an int of at least 1; got {describe(block)}: write block={block[1]}")
    size = whole_number("block", block, 1)
    if size > MAX_SEQLEN:
        raise UnsupportedProblem(f"block must be at most {MAX_SEQLEN}, the longest length; got {describe(block)}")
    return size


@explains_keywords
@dataclass(frozen=True, eq=False, repr=False)
class Compressed(Mask):
    """A query attends each compressed key that stands for a run of keys ending at or before the query's position.

    Compressed key j stands for `length` keys, from key j * stride on; query i attends it if the last of these is <= i.

    Parameters
    ----------
    length : int
        Number of keys that a compressed key stands for.
    stride : int
        Number of keys from the start of a run to the start of the next.

    Raises
    ------
    UnsupportedProblem
        `length` or `stride` is not an int of at least 1.

    Notes
    -----
    The compressed branch of native sparse attention (arXiv 2502.11089, equation 7) has length 32 and stride 16. The
    first ``length - 1`` queries attend nothing: they have o = 0 and lse = -inf, which `merge` ignores.

    Examples
    --------
    >>> Compressed(length=2, stride=2).toarray(6, 3).astype(int)
    array([[0, 0, 0],
           [1, 0, 0],
           [1, 0, 0],
           [1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    length: int
    stride: int

    def __post_init__(self) -> None:
        refuse(int_reasons(1, length=self.length, stride=self.stride))
        object.__setattr__(self, "length", int(self.length))
        object.__setattr__(self, "stride", int(self.stride))

    def resolve(self, shape: MaskShape) -> Mask:
        return Stairs(1, min(self.stride, UNBOUNDED), 1 - min(self.length, UNBOUNDED))

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        return self.resolve(MaskShape((), 1, 0, 0))._closed_form(b, h, i)


@dataclass(frozen=True, eq=False)
class Stairs(Mask):
    """Row i attends the columns j <= (step_q i + last) / step_kv: a causal mask between groups of queries and keys.

    Parameters
    ----------
    step_q, step_kv : int
        Queries per row and keys per column.
    last : int
        The last key that the last query of row 0 may attend, minus the number of keys after a column's first key that a
        query must reach to attend the column.

    Examples
    --------
    >>> Stairs(2, 4, 1).toarray(4, 3).astype(int)
    array([[1, 0, 0],
           [1, 0, 0],
           [1, 1, 0],
           [1, 1, 0]])
    """

    step_q: int
    step_kv: int
    last: int

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        return 0 * widened(i), (widened(i) * self.step_q + self.last) // self.step_kv + 1
