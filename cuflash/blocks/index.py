"""Masks turned into lists of blocks, at the block size the user chose; no kernel, no device, no dtype here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from html import escape
from operator import and_, or_, sub, xor
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Array, flag_reasons, is_array, is_sparse, namespace, require_callable, to_host, whole_number
from ..errors import UnsupportedProblem, collecting, refuse, without_other_operators
from ..keywords import explains_keywords
from ..layouts import is_differentiated
from ..masks._chosen import ChosenBlocks
from ..masks.arrays import COMBINED, Sparse, as_mask, without_padding
from ..masks.base import Band, Mask
from ..masks.block_pattern import BlockPattern
from ..masks.content import mask_namespace, without_memos
from ..masks.fields import with_cupy_arrays
from ..masks.pictures import as_svg, as_text, coarser, place_reasons, plotted
from ..masks.shape import MaskShape, block_pair, count_reasons, length_reasons, shape_reasons
from .carried import CarriedLists, KeptIndex, Owner
from .classify import BlockKind, classify, pack, pointers, transposed_intervals, unpack
from .index_mask import IndexMask, chosen_lists
from .report import IndexReport, elements_of, report_of, row_counts_of

_EVERYTHING = Band()
_OF_LISTS = ("indptr", "indices", "kinds", "tiles", "bits")  # fields that are views of lists which an index carries

# The executors, which this room does not import, set two functions. The first returns the key of an index of a mask on
# a device, made of the mask and of all other arguments as a text, and the index itself if one with this key was made.
# The second makes an index on a device from the blocks chosen (None for all), a mask, its shape, a block, and the key.
find_on_device: Callable[[Any, tuple[Any, ...]], tuple[Hashable, BlockIndex | None]] | None = None
make_on_device: Callable[[Array | None, Mask, MaskShape, tuple[int, int], Hashable], BlockIndex] | None = None


@explains_keywords(advice="make an index with BlockIndex.from_blocks, BlockIndex.from_mask or BlockIndex.from_scipy")
@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class BlockIndex:
    """The blocks of a mask: absent, full or partial, and the elements of the partial ones.

    Indices of one block size combine by ``& | ^ - ~`` to an index. An index and a mask, a boolean array, a scipy.sparse
    array of elements or a function of (b, h, i, j), on either side, combine to a mask. Indices are equal if they allow
    the same elements in the same blocks.

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
        `BlockKind` of each entry.
    tiles : int32 array [num_entries]
        Row of `bits` for entries of kind BITS, else -1.
    bits : uint8 array [num_tiles, block_q, ceil(block_kv / 8)]
        Bit tiles, each stored once; key 8 c + r of a tile is bit r of byte c.
    lo, hi : int32 array [batch or 1, num_heads or 1, seqlen_q], or None
        Row intervals of the entries of kind INTERVAL.

    Notes
    -----
    The arrays of an index on the host are read-only: calls with the same index read them once, and keep their copies on
    a device until the index is gone. They are views: arrays that an index is made of directly must not be written to
    afterwards.

    An index made from device arrays stays on the device and is made without waiting for it, so the host does not know
    how many entries there are: lists then have room for the whole grid, zeros stand behind the last entry, and each
    block has a bit tile of its own. What shows an index or counts its entries (`num_entries`, `row_counts`, `report`,
    `picture`, `to_scipy`) waits and copies; nothing else does.

    Examples
    --------
    >>> from cuflash import masks
    >>> index = BlockIndex.from_mask(masks.Causal(), 8, 8, block=2)
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

    __array_priority__ = 1000.0  # above the arrays of NumPy and CuPy, which so leave operators to indices

    def __post_init__(self) -> None:
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                object.__setattr__(self, name, _read_only(array))

    @classmethod
    def _of_lists(cls, carried: CarriedLists, **facts: Any) -> BlockIndex:
        """An index of lists on a device, whose arrays are views of these, made when one of them is used first.

        Parameters
        ----------
        carried : CarriedLists
        **facts
            The other fields.

        Returns
        -------
        BlockIndex
        """
        made = object.__new__(cls)
        vars(made).update(facts, _carried=carried)
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            carried = vars(self).get("_carried")
            if carried is None or name not in _OF_LISTS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            vars(self).update(carried.fields)
            return vars(self)[name]

    def __getstate__(self) -> Any:
        assert self.indptr is not None  # a copy has the arrays, and not the lists
        return without_memos(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    # Making one

    @classmethod
    def from_mask(
        cls, mask: Mask | Array, seqlen_q: int, seqlen_kv: int, block: Any, *, batch: tuple[int, ...] = (),
        num_heads: int = 1,
    ) -> BlockIndex:
        """Classify every block of a mask exactly: by closed forms where they decide, else element by element.

        Parameters
        ----------
        mask : Mask, BlockIndex, bool array, scipy.sparse array of elements, or function of (b, h, i, j)
            Who attends whom.
        seqlen_q, seqlen_kv : int
            Lengths in tokens.
        block : int or (int, int)
            Size of a block in tokens, or block_q and block_kv.
        batch : tuple of int
            Extents of the leading axes that the mask varies over, if any.
        num_heads : int
            Number of query heads, where the mask differs from head to head.

        Returns
        -------
        BlockIndex
            The index, in arrays where the mask's arrays are.

        Raises
        ------
        TypeError
            `mask` does not stand for a mask.
        UnsupportedProblem
            The mask does not fit the lengths, batch and heads; one of them is not an int of at least 0, or more than
            int32 counts; or the block is not a pair of positive ints.

        Examples
        --------
        >>> from cuflash import masks
        >>> print(BlockIndex.from_mask(masks.SlidingWindow(1, 0), 6, 6, block=2).picture())
        ▒··
        ▒▒·
        ·▒▒
        """
        key: Hashable = None
        if find_on_device is not None:
            key, index = find_on_device(mask, (seqlen_q, seqlen_kv, block, batch, num_heads))
            if index is not None:
                return index
        reasons: list[str] = []
        with collecting(reasons):
            given = with_cupy_arrays(as_mask(mask))
        with collecting(reasons):
            sides = block_pair(block)
        with collecting(reasons):
            shape = MaskShape(batch, num_heads, seqlen_q, seqlen_kv)
            reasons += shape_reasons(shape) or length_reasons(shape)
        refuse(reasons)
        return cls._of_mask(given, shape, sides, key)

    @classmethod
    def _of_mask(cls, mask: Mask, shape: MaskShape, block: tuple[int, int], key: Hashable = None) -> BlockIndex:
        """Classify every block of a mask, whose shape and block were checked."""
        if mask_namespace(mask) is not np:
            assert make_on_device is not None  # set when the executors are imported
            return make_on_device(None, mask, shape, block, key)
        found = classify(mask.resolve(shape), shape, block)
        return cls(seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv, block=block, **found._asdict())

    @classmethod
    def from_blocks(
        cls, blocks: Array, seqlen_q: int | None = None, seqlen_kv: int | None = None, block: Any = None
    ) -> BlockIndex:
        """Make an index of whole blocks.

        Parameters
        ----------
        blocks : bool array [..., num_q_blocks, num_kv_blocks]
            True where the block is kept; the axes before the last two are batch axes and heads.
        seqlen_q, seqlen_kv : int, optional
            Lengths in tokens, which may cut off the last block; those of whole blocks by default.
        block : int or (int, int)
            Size of a block in tokens, or block_q and block_kv.

        Returns
        -------
        BlockIndex
            An index whose blocks are all full.

        Raises
        ------
        UnsupportedProblem
            The blocks are no boolean array, or do not fit the lengths; all reasons at once.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.num_entries
        2
        >>> BlockIndex.from_blocks(np.eye(2, dtype=bool), block=2) == index
        True
        """
        pattern = BlockPattern(blocks, block)
        if is_differentiated(pattern.blocks):
            pattern = with_cupy_arrays(pattern)
        leading = (1, 1, *pattern.blocks.shape[:-2])
        lengths: Any = (own if n is None else n for own, n in zip(pattern._own_lengths, (seqlen_q, seqlen_kv)))
        shape = MaskShape(tuple(leading[2:-1]), int(leading[-1]), *lengths)
        if is_array(pattern.blocks) and namespace(pattern.blocks).__name__ == "cupy":
            if not (shape_reasons(shape) or length_reasons(shape)):
                pattern._require_fit(shape)
                assert make_on_device is not None
                return make_on_device(pattern.blocks, _EVERYTHING, shape, pattern.block, None)
        return cls.from_mask(pattern, block=pattern.block, **shape._asdict())

    @classmethod
    def from_scipy(cls, matrix: Array, seqlen_q: int, seqlen_kv: int, block: Any = None) -> BlockIndex:
        """Make an index from a scipy.sparse array of elements, or of blocks: its shape says which.

        Parameters
        ----------
        matrix : scipy.sparse array
            Of shape [seqlen_q, seqlen_kv] it holds elements, in any format; so it does if its shape is these lengths
            padded to whole blocks, as `to_scipy` with elements=True returns. Of shape [num_q_blocks, num_kv_blocks] it
            holds full blocks. A stored zero hides, as an absent one does.
        seqlen_q, seqlen_kv : int
            Lengths in tokens.
        block : int or (int, int), optional
            Size of a block in tokens, or block_q and block_kv; a BSR array of elements has its blocksize if it is not
            given.

        Returns
        -------
        BlockIndex
            An index for every batch entry and head.

        Raises
        ------
        TypeError
            `matrix` is not a scipy.sparse array.
        UnsupportedProblem
            Its shape is none of these, it keeps elements beyond the lengths, or the block is missing.

        Examples
        --------
        >>> import scipy.sparse
        >>> BlockIndex.from_scipy(scipy.sparse.eye_array(6), 6, 6, block=4).nnz
        6
        >>> BlockIndex.from_scipy(scipy.sparse.eye_array(2), 6, 6, block=4).nnz
        20
        """
        if not is_sparse(matrix):
            raise TypeError(f"matrix must be a scipy.sparse array; got {type(matrix).__name__}: use from_blocks")
        reasons = count_reasons(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        with collecting(reasons):
            if block is None and matrix.format != "bsr":
                fix = "matrix.tobsr((16, 16)) is one"
                reasons.append(f"block must be given unless matrix is a BSR array of elements; got None: {fix}")
            else:
                block = block_pair(tuple(map(int, matrix.blocksize)) if block is None else block)
        refuse(reasons)
        lengths = int(seqlen_q), int(seqlen_kv)
        grid = tuple(-(-length // side) for length, side in zip(lengths, block))
        padded = tuple(blocks * side for blocks, side in zip(grid, block))
        if matrix.shape in (lengths, padded):
            return cls.from_mask(Sparse(without_padding(matrix, lengths)), *lengths, block)
        if matrix.shape == grid:
            return cls.from_blocks(matrix, *lengths, block)
        shapes = f"{lengths} if it holds elements, or {grid} if it holds blocks of {block}"
        raise UnsupportedProblem([f"matrix must have shape {shapes}; got {matrix.shape}"])

    # Asking it

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads and lengths: the shape of `toarray()`.

        Examples
        --------
        >>> from cuflash import masks
        >>> BlockIndex.from_mask(masks.Causal(), 6, 6, block=4).shape
        (1, 1, 6, 6)
        """
        return self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv

    @property
    def nnz(self) -> int:
        """The number of allowed elements, over batch and heads; on a device it waits. `num_entries` counts blocks.

        Examples
        --------
        >>> from cuflash import masks
        >>> BlockIndex.from_mask(masks.Causal(), 6, 6, block=4).nnz
        21
        """
        return int(self.row_counts().sum())

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
        >>> BlockIndex.from_blocks(np.eye(2, dtype=bool), block=2) == index
        True
        """
        return len(self.indices) if self.is_on_host else int(to_host(self.indptr[-1:])[0])

    @property
    def density(self) -> float:
        """Listed blocks over all blocks, full ones and partial ones alike, as in `report`; waits for a device.

        Examples
        --------
        >>> import numpy as np
        >>> BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2).density
        0.5
        """
        return self.num_entries / max(1, self.batch * self.num_heads * self.num_q_blocks * self.num_kv_blocks)

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

        Raises
        ------
        TypeError
            `convert` cannot be called. What it raises itself passes through.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.to(np.copy).picture() == index.picture()
        True
        """
        require_callable("convert", convert)
        return replace(self, **{name: convert(array) for name, array in self._arrays.items()})

    @property
    def _arrays(self) -> dict[str, Array]:
        """The arrays of the index by the names of its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if is_array(value)}

    @property
    def _nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    @cached_property
    def _on_host(self) -> BlockIndex:
        """A copy of the index in NumPy arrays, without the room behind the last entry; making it waits for a device.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index._on_host is index
        True
        """
        if self.is_on_host:
            return self
        here = self.to(to_host)
        listed = slice(int(here.indptr[-1]))
        return replace(here, indices=here.indices[listed], kinds=here.kinds[listed], tiles=here.tiles[listed])

    @cached_property
    def _kept(self) -> KeptIndex | None:
        """Return the record that calls with an index on the host share, or None for an index on a device.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index._kept.mask.index == index
        True
        """
        return KeptIndex(IndexMask(replace(self)), Owner()) if self.is_on_host else None

    @cached_property
    def _carried(self) -> CarriedLists | None:
        """Lists that were made with an index on a device; None for an index that calls list anew.

        Examples
        --------
        >>> import numpy as np
        >>> BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)._carried is None
        True
        """
        return None

    @cached_property
    def _block_rows(self) -> Array:
        """Block row of each entry, counted through batch and heads.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index._block_rows
        array([0, 1])
        """
        if not self.is_on_host:  # what stands behind the last entry is given the last row
            xp, last = namespace(self.indptr), max(len(self.indptr) - 2, 0)
            rows = xp.searchsorted(self.indptr, xp.arange(len(self.indices), dtype=np.int32), side="right") - 1
            return xp.clip(rows, 0, last).astype(np.int32)
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    @cached_property
    def _columns(self) -> tuple[Array, Array]:
        """Pointers and entry numbers, int32, of each block column, counted through batch and heads; rows increase.

        On a device zeros stand behind the last entry.
        """
        num_columns = self.batch * self.num_heads * self.num_kv_blocks
        if self.is_on_host:
            column = self._block_rows // max(self.num_q_blocks, 1) * self.num_kv_blocks + self.indices
            return pointers(column, num_columns), np.argsort(column, kind="stable").astype(np.int32)
        if self._carried is not None:
            lists = self._carried.arrays
            return lists["column_pointers"], lists["column_entries"]
        if not len(self.indices):
            return namespace(self.indptr).zeros(num_columns + 1, dtype=np.int32), self.indices
        is_listed, _ = self.as_mask().entries()
        starts, entries = self._like(BlockPattern(is_listed, self.block), self.batch, self.num_heads)._columns
        return starts, entries[: len(self.indices)]

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
            is_listed, kinds = self.as_mask().entries()
            return (is_listed * namespace(kinds).where(kinds == int(BlockKind.FULL), 1, 2)).astype(np.uint8)
        states = np.zeros((len(self.indptr) - 1, self.num_kv_blocks), np.uint8)
        states[self._block_rows, self.indices] = np.minimum(self.kinds, 2)
        return states.reshape(self.batch, self.num_heads, self.num_q_blocks, self.num_kv_blocks)

    def toarray(self) -> Array:
        """The mask element by element: for small problems.

        Returns
        -------
        bool array [batch, num_heads, seqlen_q, seqlen_kv]
            True where the query attends the key.

        Examples
        --------
        >>> from cuflash import masks
        >>> BlockIndex.from_mask(masks.Causal(), 3, 3, block=2).toarray()[0, 0].astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]])
        """
        return self.as_mask().toarray(self.seqlen_q, self.seqlen_kv, batch=(self.batch,), num_heads=self.num_heads)

    def to_scipy(self, b: int = 0, h: int = 0, *, elements: bool = False) -> Array:
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

        Raises
        ------
        UnsupportedProblem
            There is no such batch entry or head, or `elements` is neither True nor False.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.to_scipy().toarray()
        array([[1, 0],
               [0, 1]], dtype=uint8)
        """
        if not self.is_on_host:
            return self._on_host.to_scipy(b, h, elements=elements)
        from scipy.sparse import bsr_array, csr_array  # late: few calls need SciPy, which is slow to import

        row = self._row(b, h)
        refuse(flag_reasons("elements", elements))
        starts = self.indptr[row : row + self.num_q_blocks + 1]
        start, stop = int(starts[0]), int(starts[-1])
        rows, cols = starts - start, self.indices[start:stop]
        grid = (self.num_q_blocks, self.num_kv_blocks)
        if not elements:
            return csr_array((np.minimum(self.kinds[start:stop], 2), cols, rows), shape=grid)
        blocks = np.array([elements_of(self, entry) for entry in range(start, stop)], bool)
        shape = (grid[0] * self.block[0], grid[1] * self.block[1])
        return bsr_array((blocks.reshape(-1, *self.block), cols, rows), shape=shape, blocksize=self.block)

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
        return row_counts_of(self._on_host)

    # Sets

    def as_mask(self) -> IndexMask:
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
        >>> (index.as_mask() & masks.Causal()).toarray(4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 0, 1, 1]])
        """
        return IndexMask(self)

    def chosen(self) -> ChosenBlocks:
        """Return the blocks of each query as lists of an index in blocks of one query; waits for a device.

        Returns
        -------
        ChosenBlocks
            Lists [num_heads, seqlen_q, n], or [batch, num_heads, seqlen_q, n] of an index of several batch entries, in
            ascending order and with -1 behind them.

        Raises
        ------
        UnsupportedProblem
            A block is of several queries, or not full.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.array([[1, 0, 1], [0, 1, 0]], bool), 2, 6, block=(1, 2))
        >>> index.chosen().blocks.tolist()
        [[[0, 2], [1, -1]]]
        """
        return ChosenBlocks(namespace(self.indptr).asarray(chosen_lists(self._on_host)), self.block[1])

    def __and__(self, other: BlockIndex | Mask | Array) -> Any:
        return self._combined(other, and_)

    def __rand__(self, other: Mask | Array) -> Any:
        return and_(other, self.as_mask())

    def __or__(self, other: BlockIndex | Mask | Array) -> Any:
        return self._combined(other, or_)

    def __ror__(self, other: Mask | Array) -> Any:
        return or_(other, self.as_mask())

    def __xor__(self, other: BlockIndex | Mask | Array) -> Any:
        return self._combined(other, xor)

    def __rxor__(self, other: Mask | Array) -> Any:
        return xor(other, self.as_mask())

    def __sub__(self, other: BlockIndex | Mask | Array) -> Any:
        return self._combined(other, sub)

    def __rsub__(self, other: Mask | Array) -> Any:
        return sub(other, self.as_mask())

    def __invert__(self) -> BlockIndex:
        return self._like(~self.as_mask(), self.batch, self.num_heads)

    def __bool__(self) -> bool:
        raise TypeError("a block index has no truth value: combine indices with & | ^ - ~, count elements with nnz")

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a block index of the same shape and block that allows the same elements."""
        if not isinstance(other, BlockIndex):
            return NotImplemented
        alike = (self.shape, self.block) == (other.shape, other.block)
        return self is other or alike and (self ^ other)._on_host.num_entries == 0

    def __hash__(self) -> int:
        return hash((self.shape, self.block))

    def filled(self) -> BlockIndex:
        """Make every listed block full: the smallest set of whole blocks that covers the elements.

        Returns
        -------
        BlockIndex
            The index of full blocks.

        Examples
        --------
        >>> from cuflash import masks
        >>> print(BlockIndex.from_mask(masks.Causal(), 6, 6, block=2).filled().picture())
        █··
        ██·
        ███
        """
        # zeros stand behind the last entry
        listed = namespace(self.kinds).minimum(self.kinds, np.uint8(BlockKind.FULL))
        return replace(
            self, kinds=listed, tiles=-listed.astype(np.int32), bits=self.bits[:0], lo=None, hi=None
        )

    @property
    def T(self) -> BlockIndex:
        """The index transposed, as `transpose()`.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.array([[1, 1], [0, 1]], bool), 4, 4, block=2)
        >>> print(index.T.picture())
        █·
        ██
        """
        return self.transpose()

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
        starts, entries = self._columns
        is_entry = namespace(starts).arange(len(entries), dtype=np.int32) < starts[-1]
        rows = self._block_rows % max(self.num_q_blocks, 1)
        lo, hi = (None, None) if self.lo is None else transposed_intervals(self.lo, self.hi, self.seqlen_kv)
        return replace(
            self,
            seqlen_q=self.seqlen_kv,
            seqlen_kv=self.seqlen_q,
            block=self.block[::-1],
            indptr=starts,
            indices=(rows[entries] * is_entry).astype(np.int32),
            kinds=self.kinds[entries] * is_entry,
            tiles=self.tiles[entries] * is_entry,
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

        Raises
        ------
        UnsupportedProblem
            A number is too small, or `eligible` is no index of the same blocks.

        Examples
        --------
        >>> import numpy as np
        >>> BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2).report(head_dim=8).density
        0.5
        """
        sizes = {"head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim, "itemsize": itemsize}
        counts = {name: whole_number(name, size, 0) for name, size in sizes.items()}
        return report_of(self._on_host, **counts, eligible=eligible)

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

        Raises
        ------
        UnsupportedProblem
            There is no such batch entry or head, or `width` is no int of at least 1.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> print(index.picture())
        █·
        ·█
        """
        step = max(1, -(-self.num_kv_blocks // whole_number("width", width, 1)))
        return as_text(coarser(self._states_of(b, h), step))

    def plot(self, b: int = 0, h: int = 0, *, ax: Any = None) -> Any:
        """One batch entry and head drawn with matplotlib, which is optional; queries run downwards.

        Parameters
        ----------
        b, h : int
            Batch entry and head; an index that serves all of them has one.
        ax : matplotlib.axes.Axes, optional
            Where to draw; new axes unless given.

        Returns
        -------
        matplotlib.axes.Axes
            The axes that hold the drawing.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        UnsupportedProblem
            There is no such batch entry or head.

        Examples
        --------
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.plot(ax=Figure().add_subplot()).get_xlabel()
        'key'
        """
        return plotted(self._states_of(b, h), (self.seqlen_q, self.seqlen_kv), self.block, ax)

    def __repr__(self) -> str:
        """Two lines, as SciPy's sparse arrays have; an index on a device is not looked at."""
        block = " x ".join(map(str, self.block))
        held = f"in blocks of {block} on a device"
        if self.is_on_host:
            num_full = int((self.kinds == BlockKind.FULL).sum())
            share = f"{self.density:.1%}".replace("%", " %")
            held = f"of {num_full} full and {self.num_entries - num_full} partial blocks of {block}, {share} of all"
        return (
            f"<BlockIndex {held}\n    with lengths ({self.seqlen_q}, {self.seqlen_kv}), batch {self.batch}, num_heads "
            f"{self.num_heads}>"
        )

    def _repr_html_(self) -> str:
        """The first matrix, for notebooks; waits for a device."""
        picture = as_svg(self._states_of(0, 0)) if self.batch * self.num_heads else ""
        return f"<pre>{escape(repr(self))}</pre>{picture}"

    def _states_of(self, b: int, h: int) -> Array:
        self._row(b, h)
        return self._on_host.states()[b, h]

    def _row(self, b: int, h: int) -> int:
        refuse(place_reasons(b, h, self.batch, self.num_heads))
        return (int(b) * self.num_heads + int(h)) * self.num_q_blocks

    def _combined(
        self, other: BlockIndex | Mask | Array, combine: Callable[[Mask, Mask | Array], Mask]
    ) -> Any:
        """A block index of two of them, a mask of an index and anything else that stands for one."""
        if not isinstance(other, BlockIndex):
            return combine(self.as_mask(), other)
        ours, theirs = ((x.seqlen_q, x.seqlen_kv, x.block) for x in (self, other))
        extents = [{x, y} for x, y in ((self.batch, other.batch), (self.num_heads, other.num_heads))]
        if ours != theirs or any(len(extent - {1}) > 1 for extent in extents):
            raise UnsupportedProblem(
                [
                    f"block indices to combine must share lengths, block, batch and heads (or have 1); got "
                    f"{(*ours, self.batch, self.num_heads)} and {(*theirs, other.batch, other.num_heads)}: their "
                    f"as_mask() combine for any"
                ]
            )
        return self._like(combine(self.as_mask(), other.as_mask()), *map(max, extents))

    def _like(self, mask: Mask, batch: int, num_heads: int) -> BlockIndex:
        """A mask in the blocks of this index."""
        return BlockIndex.from_mask(mask, *self.shape[2:], self.block, batch=(batch,), num_heads=num_heads)


def _read_only(array: Array) -> Array:
    """Return a view of an array through which its memory cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


without_other_operators(BlockIndex, "block indices", COMBINED)
