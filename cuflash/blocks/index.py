"""Masks turned into lists of blocks, at the block size the user chose; no kernel, no device, no dtype here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse

from ..arrays import Array, describe, is_array, namespace, to_host, whole_number
from ..errors import UnsupportedProblem, collecting
from ..masks.base import Mask
from ..masks.block_pattern import BlockPattern
from ..masks.block_set import BlockSet, block_pair
from ..masks.content import mask_namespace, without_memos
from ..masks.coordinates import LeadingArray
from ..masks.shape import MaskShape, count_reasons, length_reasons, shape_reasons
from .classify import Kind, classify, pack, pointers, unpack
from .classify_on_device import classify_grid, column_lists, entry_grid, entry_rows, transposed_tiles


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockIndex:
    """The blocks of a mask: absent, full or partial, and the elements of the partial ones.

    Parameters
    ----------
    seqlen_q, seqlen_kv : int
        Lengths in tokens.
    block : (int, int)
        Sizes block_q and block_kv in tokens; the length may cut off the last block of a side.
    batch, num_heads : int
        1 where the index serves every batch entry or head; batch counts the leading axes as one, in C order.
    indptr : int32 array [batch * num_heads * num_q_blocks + 1]
        Where each block row's entries start in the arrays below (compressed sparse rows, ragged).
    indices : int32 array [num_entries]
        Key block of each entry, increasing within a row.
    kinds : uint8 array [num_entries]
        `Kind` of each entry.
    tiles : int32 array [num_entries]
        Row of `bits` for entries of kind BITS, else -1.
    bits : uint8 array [num_tiles, block_q, ceil(block_kv / 8)]
        Bit tiles, each stored once; key 8 c + r of a tile is bit r of byte c.
    lo, hi : int32 array [batch or 1, num_heads or 1, seqlen_q], or None
        Row intervals of the entries of kind INTERVAL.

    Notes
    -----
    An index made from device arrays stays on the device and is made without waiting for it, so the host does not know
    how many entries there are: lists then have room for the whole grid, zeros stand behind the last entry, and each
    block has a bit tile of its own. What shows an index or counts its entries (`num_entries`, `row_counts`, `report`,
    `picture`, `to_scipy`) waits and copies; nothing else does.

    Examples
    --------
    >>> from cuflash import masks
    >>> index = BlockIndex.from_mask(masks.Causal(), masks.MaskShape((), 1, 8, 8), block=2)
    >>> print(index.picture())
    ▒···
    █▒··
    ██▒·
    ███▒
    >>> index.to_scipy().toarray()
    array([[2, 0, 0, 0],
           [1, 2, 0, 0],
           [1, 1, 2, 0],
           [1, 1, 1, 2]], dtype=uint8)
    """

    seqlen_q: int
    seqlen_kv: int
    block: tuple[int, int]
    batch: int
    num_heads: int
    indptr: Array
    indices: Array
    kinds: Array
    tiles: Array
    bits: Array
    lo: Array | None = None
    hi: Array | None = None

    def __getstate__(self) -> Any:
        return without_memos(self)

    # Making one

    @classmethod
    def from_mask(cls, mask: Mask, shape: MaskShape, block: Any) -> BlockIndex:
        """Classify every block of a mask exactly: by closed forms where they decide, else element by element.

        Parameters
        ----------
        mask : Mask
            The mask, which may hold arrays on the host or on a device.
        shape : MaskShape
            The batch, heads and lengths that the index is for.
        block : int or (int, int)
            Size of a block in tokens, or block_q and block_kv.

        Returns
        -------
        BlockIndex
            The index, in arrays where the mask's arrays are.

        Raises
        ------
        TypeError
            `mask` is no mask.
        UnsupportedProblem
            The mask does not fit the shape, a length is more than int32 counts, the shape is none, or the block is no
            pair of positive ints.

        Examples
        --------
        >>> from cuflash import masks
        >>> print(BlockIndex.from_mask(masks.SlidingWindow(1, 0), masks.MaskShape((), 1, 6, 6), block=2).picture())
        ▒··
        ▒▒·
        ·▒▒
        """
        if not isinstance(mask, Mask):
            fix = "masks.Dense makes one of a boolean array, its as_mask() of a BlockIndex"
            raise TypeError(f"mask must be a Mask; got {describe(mask)}: {fix}")
        reasons = shape_reasons(shape) or length_reasons(shape)
        with collecting(reasons):
            sides = block_pair(block)
        if reasons:
            raise UnsupportedProblem(reasons)
        is_on_host = mask_namespace(mask) is np
        found = (classify if is_on_host else classify_grid)(mask.resolve(shape), shape, sides)
        return cls(seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv, block=sides, **found._asdict())

    @classmethod
    def from_blocks(cls, blocks: Array, seqlen_q: int, seqlen_kv: int, block: Any) -> BlockIndex:
        """Make an index of whole blocks.

        Parameters
        ----------
        blocks : bool array [..., num_q_blocks, num_kv_blocks]
            True where the block is kept; the axes before the last two are batch axes and heads.
        seqlen_q, seqlen_kv : int
            Lengths in tokens.
        block : int or (int, int)
            Size of a block in tokens, or block_q and block_kv.

        Returns
        -------
        BlockIndex
            An index whose blocks are all full.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.num_entries
        2
        """
        pattern = BlockPattern(blocks, block)
        leading = (1, 1, *pattern.blocks.shape[:-2])
        shape = MaskShape(tuple(leading[2:-1]), int(leading[-1]), seqlen_q, seqlen_kv)
        return cls.from_mask(pattern, shape, pattern.block)

    @classmethod
    def from_scipy(cls, matrix: Any, seqlen_q: int, seqlen_kv: int, block: Any = None) -> BlockIndex:
        """Make an index from a scipy.sparse array: of blocks, or, as BSR, of elements.

        Parameters
        ----------
        matrix : scipy.sparse array [num_q_blocks, num_kv_blocks]
            Every stored non-zero is a full block. A BSR array given without `block` holds elements instead, its
            blocksize is the block, and its shape the padded lengths: what `to_scipy(elements=True)` returns.
        seqlen_q, seqlen_kv : int
            Lengths in tokens.
        block : int or (int, int), optional
            Size of a block in tokens, or block_q and block_kv.

        Returns
        -------
        BlockIndex
            An index for every batch entry and head.

        Raises
        ------
        TypeError
            `matrix` is no scipy.sparse array.
        UnsupportedProblem
            `block` is missing and `matrix` is not BSR, or the lengths do not fit.

        Examples
        --------
        >>> import scipy.sparse
        >>> BlockIndex.from_scipy(scipy.sparse.eye_array(3), 6, 6, block=2).num_entries
        3
        """
        if not scipy.sparse.issparse(matrix):
            raise TypeError(f"matrix must be a scipy.sparse array; got {type(matrix).__name__}: use from_blocks")
        if block is not None:
            return cls.from_blocks(matrix, seqlen_q, seqlen_kv, block)
        if matrix.format != "bsr":
            raise UnsupportedProblem(["block must be given unless matrix is a BSR array of elements"])
        if reasons := count_reasons(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv):
            raise UnsupportedProblem(reasons)
        return _from_bsr(matrix, seqlen_q, seqlen_kv)

    # Asking it

    @property
    def num_q_blocks(self) -> int:
        return -(-self.seqlen_q // self.block[0])

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.seqlen_kv // self.block[1])

    @property
    def num_entries(self) -> int:
        """Number of listed blocks; waits for a device.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.num_entries
        2
        """
        return len(self.indices) if self.is_on_host else int(to_host(self.indptr[-1:])[0])

    @property
    def is_on_host(self) -> bool:
        return namespace(self.indptr) is np

    def to(self, convert: Callable[[Array], Array]) -> BlockIndex:
        """Convert each array: ``index.to(cupy.asarray)`` copies an index to the device.

        Parameters
        ----------
        convert : callable
            Takes an array and returns another.

        Returns
        -------
        BlockIndex
            The same index with the converted arrays.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.to(np.copy).picture() == index.picture()
        True
        """
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: convert(value) for name, value in arrays.items() if is_array(value)})

    @cached_property
    def on_host(self) -> BlockIndex:
        """The same index in NumPy arrays, without the room behind the last entry; waits for a device and copies.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.on_host is index
        True
        """
        if self.is_on_host:
            return self
        here = self.to(to_host)
        listed = slice(int(here.indptr[-1]))
        return replace(here, indices=here.indices[listed], kinds=here.kinds[listed], tiles=here.tiles[listed])

    @cached_property
    def block_rows(self) -> Array:
        """Block row of each entry, counted through batch and heads.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.block_rows
        array([0, 1])
        """
        if not self.is_on_host:
            return entry_rows(self.indptr, len(self.indices))
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    def states(self) -> Array:
        """State of every block of the grid.

        Returns
        -------
        uint8 array [batch, num_heads, num_q_blocks, num_kv_blocks]
            0 for an absent block, 1 for a full one, 2 for a partial one.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.states()[0, 0]
        array([[1, 0],
               [0, 1]], dtype=uint8)
        """
        if not self.is_on_host:
            there, kinds = IndexGrid(self).entries()
            return (there * namespace(kinds).where(kinds == int(Kind.FULL), 1, 2)).astype(np.uint8)
        states = np.zeros((len(self.indptr) - 1, self.num_kv_blocks), np.uint8)
        states[self.block_rows, self.indices] = np.minimum(self.kinds, 2)
        return states.reshape(self.batch, self.num_heads, self.num_q_blocks, self.num_kv_blocks)

    def dense(self) -> Array:
        """The mask element by element, for tests and small problems.

        Returns
        -------
        bool array [batch, num_heads, seqlen_q, seqlen_kv]
            True where the query attends the key.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.dense()[0, 0].astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 1],
               [0, 0, 1, 1]])
        """
        return self.as_mask().dense(MaskShape((self.batch,), self.num_heads, self.seqlen_q, self.seqlen_kv))

    def to_scipy(self, b: int = 0, h: int = 0, *, elements: bool = False) -> Any:
        """The index of one batch entry and head as a scipy.sparse array.

        Parameters
        ----------
        b, h : int
            Batch entry and head; an index that serves all of them has one.
        elements : bool
            Whether the array holds elements instead of blocks.

        Returns
        -------
        scipy.sparse.csr_array or scipy.sparse.bsr_array
            CSR of blocks, 1 for a full one and 2 for a partial one; or BSR of booleans, exact, its shape
            padded to whole blocks.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.to_scipy().toarray()
        array([[1, 0],
               [0, 1]], dtype=uint8)
        """
        if not self.is_on_host:
            return self.on_host.to_scipy(b, h, elements=elements)
        start, stop = self._entries_of(b, h)
        rows = self.indptr[self._row(b, h) : self._row(b, h) + self.num_q_blocks + 1] - start
        cols = self.indices[start:stop]
        grid = (self.num_q_blocks, self.num_kv_blocks)
        if not elements:
            return scipy.sparse.csr_array((np.minimum(self.kinds[start:stop], 2), cols, rows), shape=grid)
        blocks = np.zeros((stop - start, *self.block), bool)
        for place in range(stop - start):
            blocks[place] = self._elements(start + place)
        shape = (grid[0] * self.block[0], grid[1] * self.block[1])
        return scipy.sparse.bsr_array((blocks, cols, rows), shape=shape, blocksize=self.block)

    def row_counts(self) -> Array:
        """Number of keys that each query attends.

        Returns
        -------
        int64 array [batch, num_heads, seqlen_q]
            The counts, on the host.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.row_counts()
        array([[[2, 2, 2, 2]]])
        """
        if not self.is_on_host:
            return self.on_host.row_counts()
        block_q, block_kv = self.block
        counts = np.zeros((len(self.indptr) - 1, block_q), np.int64)
        first_key = self.indices.astype(np.int64) * block_kv
        num_keys = np.minimum(block_kv, self.seqlen_kv - first_key)
        full = self.kinds == Kind.FULL
        np.add.at(counts, self.block_rows[full], num_keys[full, None])
        partial = self.kinds == Kind.INTERVAL
        lo, hi = self._entry_intervals(partial)
        inside = np.minimum(hi, (first_key + num_keys)[partial, None]) - np.maximum(lo, first_key[partial, None])
        np.add.at(counts, self.block_rows[partial], np.maximum(inside, 0))
        bits = self.kinds == Kind.BITS
        tile_counts = np.bitwise_count(self.bits).sum(-1, dtype=np.int64)
        np.add.at(counts, self.block_rows[bits], tile_counts[self.tiles[bits]])
        rows = counts.reshape(self.batch, self.num_heads, self.num_q_blocks * block_q)
        return rows[..., : self.seqlen_q]

    # Sets

    def as_mask(self) -> IndexMask | IndexGrid:
        """The index as a mask, to combine it with others or to compile it at another block size.

        Returns
        -------
        Mask
            A mask with the same elements.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> from cuflash import masks
        >>> (index.as_mask() & masks.Causal()).dense(masks.MaskShape((), 1, 4, 4))[0].astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 0, 1, 1]])
        """
        return IndexMask.of_index(self) if self.is_on_host else IndexGrid(self)

    def __and__(self, other: BlockIndex) -> BlockIndex:
        """Elements allowed by both; the indices must share lengths and block."""
        return self._combined(other, lambda x, y: x & y)

    def __or__(self, other: BlockIndex) -> BlockIndex:
        """Elements allowed by either; the indices must share lengths and block."""
        return self._combined(other, lambda x, y: x | y)

    def transpose(self) -> BlockIndex:
        """Exchange queries and keys: block row c of the result lists the query blocks that attend key block c.

        Returns
        -------
        BlockIndex
            The transposed index.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.array([[1, 1], [0, 1]], bool), 4, 4, block=2)
        >>> print(index.transpose().picture())
        █·
        ██
        """
        if not self.is_on_host:
            return _transposed_grid(self)
        num_q, num_kv = self.num_q_blocks, self.num_kv_blocks
        matrix, row = np.divmod(self.block_rows, max(num_q, 1))
        new_row = matrix * num_kv + self.indices
        order = np.lexsort((row, new_row))
        lo, hi = (None, None) if self.lo is None else _transposed_intervals(self.lo, self.hi, self.seqlen_kv)
        return BlockIndex(
            seqlen_q=self.seqlen_kv,
            seqlen_kv=self.seqlen_q,
            block=(self.block[1], self.block[0]),
            batch=self.batch,
            num_heads=self.num_heads,
            indptr=pointers(new_row, self.batch * self.num_heads * num_kv),
            indices=row[order].astype(np.int32),
            kinds=self.kinds[order],
            tiles=self.tiles[order],
            bits=pack(unpack(self.bits, self.block[1]).swapaxes(-1, -2)),
            lo=lo,
            hi=hi,
        )

    # Showing it

    def report(
        self, *, head_dim: int = 64, value_dim: int | None = None, itemsize: int = 4, eligible: BlockIndex | None = None
    ) -> IndexReport:
        """Density, load of the rows, empty rows, FLOPs and bytes.

        Parameters
        ----------
        head_dim, value_dim : int
            For FLOPs and bytes; value_dim is head_dim unless given.
        itemsize : int
            Bytes of one element of q, k and v.
        eligible : BlockIndex, optional
            The denominator of `density`: the causal index, say. Every block of the grid unless given.

        Returns
        -------
        IndexReport
            A record that prints itself.

        Examples
        --------
        >>> import numpy as np
        >>> BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2).report(head_dim=8).density
        0.5
        """
        if not self.is_on_host:
            return self.on_host.report(head_dim=head_dim, value_dim=value_dim, itemsize=itemsize, eligible=eligible)
        head_dim, itemsize = whole_number("head_dim", head_dim, 0), whole_number("itemsize", itemsize, 0)
        value_dim = head_dim if value_dim is None else whole_number("value_dim", value_dim, 0)
        matrices = self.batch * self.num_heads
        rows = np.minimum(self.block[0], self.seqlen_q - (self.block_rows % max(self.num_q_blocks, 1)) * self.block[0])
        keys = np.minimum(self.block[1], self.seqlen_kv - self.indices.astype(np.int64) * self.block[1])
        visited = int((rows * keys).sum())
        counts = self.row_counts()
        load = np.diff(self.indptr)
        num_eligible = self.num_q_blocks * self.num_kv_blocks * matrices
        if eligible is not None:
            num_eligible = eligible.num_entries * matrices // (eligible.batch * eligible.num_heads)
        return IndexReport(
            num_full=int((self.kinds == Kind.FULL).sum()),
            num_partial=int((self.kinds != Kind.FULL).sum()),
            num_eligible=num_eligible,
            denominator="all blocks" if eligible is None else "eligible blocks",
            elements_visited=visited,
            elements_allowed=int(counts.sum()),
            num_elements=matrices * self.seqlen_q * self.seqlen_kv,
            row_load=(int(load.min()), float(load.mean()), int(load.max())) if len(load) else (0, 0.0, 0),
            empty_rows=int((counts == 0).sum()),
            forward_flops=2 * visited * (head_dim + value_dim),
            backward_flops=2 * visited * (3 * head_dim + 2 * value_dim),
            kv_bytes=int(keys.sum()) * (head_dim + value_dim) * itemsize,
            index_bytes=sum(
                a.nbytes
                for a in (self.indptr, self.indices, self.kinds, self.tiles, self.bits, self.lo, self.hi)
                if a is not None
            ),
        )

    def picture(self, b: int = 0, h: int = 0, *, width: int = 64) -> str:
        """One batch entry and head as text: █ full, ▒ partial, · absent.

        Parameters
        ----------
        b, h : int
            Batch entry and head; an index that serves all of them has one.
        width : int
            Most characters of a line; a wider grid is drawn coarser.

        Returns
        -------
        str
            A line for each block row.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> print(index.picture())
        █·
        ·█
        """
        states = self.on_host.states()[b, h]
        step = max(1, -(-self.num_kv_blocks // whole_number("width", width, 1)))
        cells = []
        for row in range(0, self.num_q_blocks, step):
            strip = states[row : row + step]
            groups = [strip[:, col : col + step] for col in range(0, self.num_kv_blocks, step)]
            cells.append("".join("·" if not g.any() else "█" if (g == Kind.FULL).all() else "▒" for g in groups))
        return "\n".join(cells)

    def _row(self, b: int, h: int) -> int:
        if not (0 <= b < self.batch and 0 <= h < self.num_heads):
            raise UnsupportedProblem([f"b, h must be below ({self.batch}, {self.num_heads}); got ({b}, {h})"])
        return (int(b) * self.num_heads + int(h)) * self.num_q_blocks

    def _entries_of(self, b: int, h: int) -> tuple[int, int]:
        row = self._row(b, h)
        return int(self.indptr[row]), int(self.indptr[row + self.num_q_blocks])

    def _elements(self, entry: int) -> Array:
        """One listed block as booleans [block_q, block_kv], False past the lengths."""
        block_q, block_kv = self.block
        matrix, row = divmod(int(self.block_rows[entry]), self.num_q_blocks)
        b, h = divmod(matrix, self.num_heads)
        i = np.minimum(row * block_q + np.arange(block_q), self.seqlen_q - 1)[:, None]
        j = int(self.indices[entry]) * block_kv + np.arange(block_kv)
        exists = ((row * block_q + np.arange(block_q)) < self.seqlen_q)[:, None] & (j < self.seqlen_kv)
        return exists & self.as_mask()(b, h, i, np.minimum(j, self.seqlen_kv - 1))

    def _entry_intervals(self, entries: Array) -> tuple[Array, Array]:
        """Row intervals [num_entries, block_q] of the chosen entries; empty for rows past the end."""
        if self.lo is None or self.hi is None:
            return np.zeros((0, self.block[0]), np.int64), np.zeros((0, self.block[0]), np.int64)
        matrix, row = np.divmod(self.block_rows[entries], self.num_q_blocks)
        b, h = np.divmod(matrix, self.num_heads)
        i = row[:, None] * self.block[0] + np.arange(self.block[0])
        place = (
            b[:, None] if self.lo.shape[0] > 1 else 0,
            h[:, None] if self.lo.shape[1] > 1 else 0,
            np.minimum(i, self.seqlen_q - 1),
        )
        return self.lo[place].astype(np.int64), np.where(i < self.seqlen_q, self.hi[place], 0).astype(np.int64)

    def _combined(self, other: BlockIndex, combine: Any) -> BlockIndex:
        if not isinstance(other, BlockIndex):
            return NotImplemented
        ours, theirs = ((x.seqlen_q, x.seqlen_kv, x.block) for x in (self, other))
        extents = [{x, y} for x, y in ((self.batch, other.batch), (self.num_heads, other.num_heads))]
        if ours != theirs or any(len(extent - {1}) > 1 for extent in extents):
            raise UnsupportedProblem(
                [
                    f"block indices to combine must share lengths, block, batch and heads (or have 1); got "
                    f"{(*ours, self.batch, self.num_heads)} and {(*theirs, other.batch, other.num_heads)}"
                ]
            )
        shape = MaskShape((max(extents[0]),), max(extents[1]), self.seqlen_q, self.seqlen_kv)
        return BlockIndex.from_mask(combine(self.as_mask(), other.as_mask()), shape, self.block)


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """The counts of `BlockIndex.report`, summed over the index's batch and heads.

    Examples
    --------
    >>> from cuflash import masks
    >>> index = BlockIndex.from_mask(masks.Causal(), masks.MaskShape((), 1, 4, 4), block=2)
    >>> print(index.report(head_dim=8))
    density             75.0 % of all blocks (1 full + 2 partial of 4)
    elements            10 allowed of 12 visited of 16
    blocks in a row     1 to 2, mean 1.50
    rows without a key  0
    FLOPs               384 forward, 960 backward
    bytes               384 of k and v read, 71 of index
    """

    num_full: int
    num_partial: int
    num_eligible: int
    denominator: str
    elements_visited: int
    elements_allowed: int
    num_elements: int
    row_load: tuple[int, float, int]
    empty_rows: int
    forward_flops: int
    backward_flops: int
    kv_bytes: int
    index_bytes: int

    @property
    def density(self) -> float:
        """Blocks kept over eligible blocks (`denominator` says which those are)."""
        return (self.num_full + self.num_partial) / self.num_eligible if self.num_eligible else 0.0

    @property
    def element_density(self) -> float:
        """Elements allowed over all elements."""
        return self.elements_allowed / self.num_elements if self.num_elements else 0.0

    def __str__(self) -> str:
        least, mean, most = self.row_load
        kept = f"({self.num_full} full + {self.num_partial} partial of {self.num_eligible})"
        return "\n".join(
            [
                f"density             {self.density:.1%} of {self.denominator} {kept}".replace("%", " %"),
                f"elements            {self.elements_allowed} allowed of {self.elements_visited} visited "
                f"of {self.num_elements}",
                f"blocks in a row     {least} to {most}, mean {mean:.2f}",
                f"rows without a key  {self.empty_rows}",
                f"FLOPs               {self.forward_flops} forward, {self.backward_flops} backward",
                f"bytes               {self.kv_bytes} of k and v read, {self.index_bytes} of index",
            ]
        )


@dataclass(frozen=True, eq=False)
class IndexMask(BlockSet):
    """A block index as a mask."""

    index: Any = None

    rectangle = BlockSet.rectangle
    natural_block = BlockSet.natural_block

    @classmethod
    def of_index(cls, index: BlockIndex) -> IndexMask:
        grid = (index.batch, index.num_heads, index.num_q_blocks, index.num_kv_blocks)
        keys = index.block_rows * grid[3] + index.indices
        return cls(grid, index.block, keys, index.kinds == Kind.FULL, index)

    def resolve(self, shape: MaskShape) -> Mask:
        _check_fit(self.index, shape)
        return self

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        place, hit = self._place(0, b, h, i // self.block[0], j // self.block[1])
        return _allowed(self.index, place, hit, b, h, i, j)


@dataclass(frozen=True, eq=False)
class IndexGrid(Mask):
    """A block index on a device as a mask: a table of all blocks says which entry each is."""

    index: BlockIndex

    @cached_property
    def table(self) -> LeadingArray:
        """Entry of each block, one past the room for entries where there is none."""
        index = self.index
        grid = (index.batch, index.num_heads, index.num_q_blocks, index.num_kv_blocks)
        return LeadingArray(entry_grid(index.indptr, index.indices, grid[3]).reshape(grid), (index.batch,), 3)

    @property
    def natural_block(self) -> tuple[int, int]:
        return self.index.block

    def resolve(self, shape: MaskShape) -> Mask:
        _check_fit(self.index, shape)
        return self

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        entry = self.table.at(b, h, i // self.index.block[0], j // self.index.block[1])
        return _allowed(self.index, *self._clipped(entry), b, h, i, j)

    def entries(self) -> tuple[Array, Array]:
        """Of each block whether it is listed, and the kind of its entry."""
        place, there = self._clipped(self.table.array)
        return there, self.index.kinds[place] if len(self.index.kinds) else there

    def _clipped(self, entry: Array) -> tuple[Array, Array]:
        """A place in the lists, whatever there is none for, and whether there is one."""
        room = len(self.index.indices)
        return namespace(entry).minimum(entry, max(room - 1, 0)), entry < room


def _check_fit(index: BlockIndex, shape: MaskShape) -> None:
    reasons = []
    if (index.seqlen_q, index.seqlen_kv) != (shape.seqlen_q, shape.seqlen_kv):
        reasons.append(
            f"the block index must be for lengths (seqlen_q={shape.seqlen_q}, seqlen_kv={shape.seqlen_kv}); "
            f"got one for ({index.seqlen_q}, {index.seqlen_kv})"
        )
    for name, have, want in (
        ("batch", index.batch, shape.num_batch),
        ("num_heads", index.num_heads, shape.num_heads),
    ):
        if have not in (1, want):
            reasons.append(f"the block index must have {name} 1 or {want}; got {have}")
    if reasons:
        raise UnsupportedProblem(reasons)


def _allowed(index: BlockIndex, place: Array, hit: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
    """Elements of an index, given the entry of the block that each lies in and whether it is listed."""
    if len(index.indices) == 0:
        return hit
    block_q, block_kv = index.block
    kinds = index.kinds[place]
    allowed = hit & (kinds == int(Kind.FULL))
    if index.lo is not None and index.hi is not None:
        rows = (b if index.lo.shape[0] > 1 else 0, h if index.lo.shape[1] > 1 else 0, i)
        allowed = allowed | hit & (kinds == int(Kind.INTERVAL)) & (index.lo[rows] <= j) & (j < index.hi[rows])
    if len(index.bits):
        tile = namespace(index.bits).clip(index.tiles[place], 0, len(index.bits) - 1)
        byte = index.bits[tile, i % block_q, j % block_kv // 8]
        bit = (byte >> (j % 8 if block_kv % 8 == 0 else j % block_kv % 8)) & 1
        allowed = allowed | hit & (kinds == int(Kind.BITS)) & (bit == 1)
    return allowed


def _transposed_grid(index: BlockIndex) -> BlockIndex:
    """`BlockIndex.transpose` of an index on a device."""
    xp, grid = namespace(index.indptr), (index.num_q_blocks, index.num_kv_blocks)
    indptr, entries = column_lists(index.indptr, index.indices, index.batch * index.num_heads, *grid)
    is_entry = xp.arange(len(entries), dtype=np.int32) < indptr[-1]
    rows = index.block_rows % max(grid[0], 1)
    lo, hi = (None, None) if index.lo is None else _transposed_intervals(index.lo, index.hi, index.seqlen_kv)
    return replace(
        index,
        seqlen_q=index.seqlen_kv,
        seqlen_kv=index.seqlen_q,
        block=index.block[::-1],
        indptr=indptr,
        indices=rows[entries] * is_entry,
        kinds=index.kinds[entries] * is_entry,
        tiles=index.tiles[entries] * is_entry,
        bits=transposed_tiles(index.bits, index.block[1]),
        lo=lo,
        hi=hi,
    )


def _transposed_intervals(lo: Array, hi: Array, seqlen_kv: int) -> tuple[Array, Array]:
    """Row intervals seen from the keys: lo and hi never decrease, so the queries of a key are an interval too."""
    xp, leading = namespace(lo), lo.shape[:-1]
    keys = xp.arange(seqlen_kv)
    first, end = (xp.empty((*leading, seqlen_kv), dtype=np.int32) for _ in range(2))
    for place in np.ndindex(leading):
        first[place] = xp.searchsorted(hi[place], keys, side="right")
        end[place] = xp.searchsorted(lo[place], keys, side="right")
    return first, end


def _from_bsr(matrix: Any, seqlen_q: int, seqlen_kv: int) -> BlockIndex:
    shape = MaskShape((), 1, seqlen_q, seqlen_kv)
    seqlen_q, seqlen_kv = shape.seqlen_q, shape.seqlen_kv
    block = block_pair(tuple(matrix.blocksize))
    padded = tuple(-(-length // side) * side for length, side in zip((seqlen_q, seqlen_kv), block))
    if tuple(matrix.shape) != padded:
        raise UnsupportedProblem(
            [f"matrix must have shape {padded}, the lengths padded to whole blocks of {block}; got {matrix.shape}"]
        )
    matrix = matrix.copy()
    matrix.sum_duplicates()
    rows = np.repeat(np.arange(padded[0] // block[0]), np.diff(matrix.indptr))
    i = rows[:, None, None] * block[0] + np.arange(block[0])[:, None]
    j = matrix.indices[:, None, None] * block[1] + np.arange(block[1])
    exists = (i < seqlen_q) & (j < seqlen_kv)
    allowed = (matrix.data != 0) & exists
    some, every = allowed.any((1, 2)), (allowed == exists).all((1, 2))
    partial = some & ~every
    tiles, inverse = np.unique(pack(allowed[partial]), axis=0, return_inverse=True)
    tile = np.full(len(rows), -1, np.int32)
    tile[partial] = inverse.reshape(-1)
    return BlockIndex(
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        block=block,
        batch=1,
        num_heads=1,
        indptr=pointers(rows[some], padded[0] // block[0]),
        indices=matrix.indices[some].astype(np.int32),
        kinds=np.where(every, Kind.FULL, Kind.BITS)[some].astype(np.uint8),
        tiles=tile[some],
        bits=tiles,
    )
