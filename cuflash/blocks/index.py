"""Block indices: the blocks of a mask at a block size of the user's choice, independent of kernels and dtypes."""

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
from ..layouts import is_differentiated, other_device_reasons
from ..masks._chosen import ChosenBlocks
from ..masks.arrays import COMBINED, Sparse, as_mask, without_padding
from ..masks.base import Band, Mask
from ..masks.block_pattern import BlockPattern
from ..masks.content import Memoized, mask_namespace
from ..masks.fields import with_cupy_arrays
from ..masks.pictures import as_svg, as_text, coarser, place_reasons, plotted
from ..masks.shape import BlockSize, MaskShape, block_pair, count_reasons, length_reasons, shape_reasons
from .carried import CarriedLists, KeptIndex, Owner
from .classify import BlockKind, classify, list_reasons, pack, pointers, transposed_intervals, unpack
from .index_mask import IndexMask, chosen_lists
from .report import IndexReport, elements_of, report_of, row_counts_of

_EVERYTHING = Band()
_OF_LISTS = ("indptr", "indices", "kinds", "tiles", "bits")  # fields that are views of an index's device lists

# The executors set these two functions, because this package must not import them. The first returns the cache key of
# an index of a mask on a device, built from the mask and the text of all other arguments, and the cached index or None.
# The second builds an index on a device from the chosen blocks (None for all), a mask, its shape, a block, and the key.
find_on_device: Callable[[Any, tuple[Any, ...]], tuple[Hashable, BlockIndex | None]] | None = None
make_on_device: Callable[[Array | None, Mask, MaskShape, tuple[int, int], Hashable], BlockIndex] | None = None


@explains_keywords(advice="make an index with BlockIndex.from_blocks, BlockIndex.from_mask or BlockIndex.from_scipy")
@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class BlockIndex(Memoized):
    """The blocks of a mask: absent, full or partial, and the elements of the partial blocks.

    ``& | ^ - ~`` combine indices of one block size into an index. On either side of a mask, a boolean array, a
    scipy.sparse array of elements or a function of (b, h, i, j), an index results in a mask. Indices are equal if they
    have the same shape and block size and allow the same elements.

    Parameters
    ----------
    seqlen_q, seqlen_kv : int
        Lengths in tokens.
    block : (int, int)
        Sizes block_q and block_kv in tokens; the length may cut off the last block of a side.
    batch, num_heads : int
        1 if the index is the same for every batch entry or head. batch is the product of the leading axes, in C order.
    indptr : int32 array [batch * num_heads * num_q_blocks + 1]
        The start of each block row's entries in the arrays below (compressed sparse rows).
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

    Raises
    ------
    UnsupportedProblem
        Arrays on the host are not such lists; the error lists all reasons. Arrays on a device are not inspected.

    Notes
    -----
    The arrays of an index on the host are read-only: calls with the same index read them once, and cache their device
    copies until the index is deleted. The arrays are views: do not write to arrays that were passed to the constructor.

    An index of device arrays stays on the device and is built without waiting for it, so the host does not know the
    number of entries. Its lists have space for the whole grid, with zeros after the last entry, and each block has its
    own bit tile, unless all blocks are known to be full or cut by row intervals; kernels can then join the lists of
    blocks of one query. Methods that show the index or count its entries (`num_entries`, `row_counts`, `report`,
    `picture`, `to_scipy`) wait for the device and copy to the host; no other method does.

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

    __array_priority__ = 1000.0  # higher than NumPy's and CuPy's arrays, so that their operators defer to indices

    def __post_init__(self) -> None:
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                object.__setattr__(self, name, _read_only(array))
        if isinstance(self.indptr, np.ndarray):
            refuse(list_reasons(self))

    @classmethod
    def _of_lists(cls, carried: CarriedLists | None, **facts: Any) -> BlockIndex:
        """Build an index from block lists on a device; its arrays are views of them, created on first use.

        Parameters
        ----------
        carried : CarriedLists or None
            The block lists. None if `facts` include arrays that only have shapes and dtypes, which nothing inspects.
        **facts
            The other fields.

        Returns
        -------
        BlockIndex
        """
        index = object.__new__(cls)
        vars(index).update(facts, _carried=carried)
        return index

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            carried = vars(self).get("_carried")
            if carried is None or name not in _OF_LISTS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            vars(self).update(carried.fields)
            return vars(self)[name]

    def __getstate__(self) -> Any:
        assert self.indptr is not None  # creates the arrays, since a copy has these instead of the device lists
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    # Constructors

    @classmethod
    def from_mask(
        cls, mask: Mask | Array, seqlen_q: int, seqlen_kv: int, block: BlockSize, *, batch: tuple[int, ...] = (),
        num_heads: int = 1,
    ) -> BlockIndex:
        """Classify every block of a mask exactly: by closed forms if they decide, else element by element.

        Parameters
        ----------
        mask : Mask, BlockIndex, bool array, scipy.sparse array of elements, or function of (b, h, i, j)
            The keys that each query attends to.
        seqlen_q, seqlen_kv : int
            Lengths in tokens.
        block : int or (int, int)
            Size of a block in tokens, or block_q and block_kv.
        batch : tuple of int
            Extents of the leading axes, if the mask depends on the batch.
        num_heads : int
            Number of query heads, if the mask depends on the head.

        Returns
        -------
        BlockIndex
            The index, with arrays on the device of the mask's arrays.

        Raises
        ------
        TypeError
            `mask` cannot be converted to a mask.
        UnsupportedProblem
            The mask does not fit the lengths, batch and heads; one of these is not an int of at least 0, or exceeds the
            range of int32; or `block` is not a positive int or a pair of these.

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
            converted = with_cupy_arrays(as_mask(mask))
        with collecting(reasons):
            sides = block_pair(block)
        with collecting(reasons):
            shape = MaskShape(batch, num_heads, seqlen_q, seqlen_kv)
            reasons += shape_reasons(shape) or length_reasons(shape)
        refuse(reasons)
        return cls._of_mask(converted, shape, sides, key)

    @classmethod
    def _of_mask(cls, mask: Mask, shape: MaskShape, block: tuple[int, int], key: Hashable = None) -> BlockIndex:
        """Classify every block of a mask, after the shape and the block have been checked."""
        if mask_namespace(mask) is not np:
            assert make_on_device is not None  # set when the executors are imported
            return make_on_device(None, mask, shape, block, key)
        blocks = classify(mask.resolve(shape), shape, block)
        return cls(seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv, block=block, **blocks)

    @classmethod
    def from_blocks(
        cls, blocks: Array, seqlen_q: int | None = None, seqlen_kv: int | None = None, block: BlockSize | None = None
    ) -> BlockIndex:
        """Make an index of whole blocks.

        Parameters
        ----------
        blocks : bool array [..., num_q_blocks, num_kv_blocks]
            True if the block is kept; the axes before the last two are batch axes and heads.
        seqlen_q, seqlen_kv : int, optional
            Lengths in tokens, which may cut off the last block. Default: the total length of all blocks.
        block : int or (int, int)
            Size of a block in tokens, or block_q and block_kv.

        Returns
        -------
        BlockIndex
            An index whose blocks are all full.

        Raises
        ------
        UnsupportedProblem
            `blocks` is not a boolean array, or does not fit the lengths. The message lists all reasons.

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
    def from_scipy(cls, matrix: Array, seqlen_q: int, seqlen_kv: int, block: BlockSize | None = None) -> BlockIndex:
        """Make an index from a scipy.sparse array of elements or of blocks, depending on its shape.

        Parameters
        ----------
        matrix : scipy.sparse array
            Elements, in any format, if the shape is [seqlen_q, seqlen_kv], or these lengths padded to whole blocks as
            in the result of `to_scipy` with elements=True. Full blocks if the shape is [num_q_blocks, num_kv_blocks].
            Stored zeros are masked, just like elements that are not stored.
        seqlen_q, seqlen_kv : int
            Lengths in tokens.
        block : int or (int, int), optional
            Size of a block in tokens, or block_q and block_kv. Default: the blocksize of a BSR array of elements.

        Returns
        -------
        BlockIndex
            An index that is the same for every batch entry and head.

        Raises
        ------
        TypeError
            `matrix` is not a scipy.sparse array.
        UnsupportedProblem
            The shape matches none of these, elements beyond the lengths are nonzero, or `block` is missing.

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
        sides = 1, 1
        if block is None and matrix.format != "bsr":
            rule = "block must be an int or a pair if matrix is not a BSR array of elements"
            reasons.append(f"{rule}; got None: pass block=, or convert with matrix.tobsr((16, 16))")
        with collecting(reasons):
            sides = block_pair(getattr(matrix, "blocksize", 1) if block is None else block)
        refuse(reasons)
        lengths = int(seqlen_q), int(seqlen_kv)
        grid = tuple(-(-length // side) for length, side in zip(lengths, sides))
        padded = tuple(blocks * side for blocks, side in zip(grid, sides))
        if matrix.shape in (lengths, padded):
            return cls.from_mask(Sparse(without_padding(matrix, lengths)), *lengths, sides)
        if matrix.shape == grid:
            return cls.from_blocks(matrix, *lengths, sides)
        shapes = f"{lengths} if it holds elements, or {grid} if it holds blocks of {sides}"
        raise UnsupportedProblem(f"matrix must have shape {shapes}; got {matrix.shape}")

    # Properties and conversions

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The batch, heads and lengths: the shape of `toarray()`.

        Examples
        --------
        >>> from cuflash import masks
        >>> BlockIndex.from_mask(masks.Causal(), 6, 6, block=4).shape
        (1, 1, 6, 6)
        """
        return self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv

    @property
    def nnz(self) -> int:
        """The number of allowed elements, over batch and heads; waits for a device. `num_entries` counts blocks.

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
        """The number of listed blocks; waits for a device.

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
        """The fraction of blocks that are listed, full or partial, as in `report`; waits for a device.

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
        """Convert each array: `cupy.asarray` copies an index to the device, and `cupy.asnumpy` copies it to the host.

        Parameters
        ----------
        convert : callable
            Takes an array and returns the converted array.

        Returns
        -------
        BlockIndex
            The same index with the converted arrays.

        Raises
        ------
        TypeError
            `convert` is not callable. Exceptions that it raises are not caught.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index.to(np.copy).picture() == index.picture()
        True
        """
        require_callable("convert", convert)
        arrays = {name: convert(array) for name, array in self._arrays.items()}
        if not self.is_on_host and isinstance(arrays["indptr"], np.ndarray):  # drop space after the last entry
            listed = slice(int(arrays["indptr"][-1]))
            arrays |= {name: arrays[name][listed] for name in ("indices", "kinds", "tiles")}
        return replace(self, **arrays)

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
        """A copy of the index in NumPy arrays, without unused space after the last entry; waits for a device.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index._on_host is index
        True
        """
        return self if self.is_on_host else self.to(to_host)

    @cached_property
    def _kept(self) -> KeptIndex | None:
        """The record that calls with an index on the host share; None for an index on a device.

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
        """The block lists of an index on a device that calls read, built with the index; None if calls build them.

        If the arrays were not built on the device, but the index evidently has no partial blocks, its lists are built
        on first use.

        Raises
        ------
        ValueError
            The arrays are not on the current device.

        Examples
        --------
        >>> import numpy as np
        >>> BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)._carried is None
        True
        """
        if self.is_on_host or len(self.bits) or self.lo is not None or not len(self.indices):
            return None
        refuse(other_device_reasons(self.indices))
        return self._like(BlockPattern(self.as_mask().entries()[0], self.block), self.batch, self.num_heads)._carried

    @cached_property
    def _block_rows(self) -> Array:
        """The block row of each entry, numbered consecutively over batch and heads.

        Examples
        --------
        >>> import numpy as np
        >>> index = BlockIndex.from_blocks(np.eye(2, dtype=bool), 4, 4, block=2)
        >>> index._block_rows
        array([0, 1])
        """
        if not self.is_on_host:  # unused space after the last entry is assigned to the last row
            xp, last = namespace(self.indptr), max(len(self.indptr) - 2, 0)
            rows = xp.searchsorted(self.indptr, xp.arange(len(self.indices), dtype=np.int32), side="right") - 1
            return xp.clip(rows, 0, last).astype(np.int32)
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    @cached_property
    def _columns(self) -> tuple[Array, Array]:
        """The entries of each block column, over batch and heads: pointers and entry numbers, int32; rows increase.

        On a device, zeros follow the last entry.
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
        """Return the state of every block of the grid.

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
        """Return the mask element by element, for small problems.

        Returns
        -------
        bool array [batch, num_heads, seqlen_q, seqlen_kv]
            True if the query attends to the key.

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
        """Convert one batch entry and head of the index to a scipy.sparse array.

        Parameters
        ----------
        b, h : int
            Batch entry and head; 0 for an index that is the same for all of them.
        elements : bool
            Return elements instead of blocks.

        Returns
        -------
        scipy.sparse.csr_array or scipy.sparse.bsr_array
            A CSR array of blocks, 1 if full and 2 if partial; or a BSR array of the elements as booleans, whose shape
            is padded to whole blocks.

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
        from scipy.sparse import bsr_array, csr_array  # imported on use, since SciPy is slow to import

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
        """Count the keys that each query attends to.

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

    # Operations on sets of elements

    def as_mask(self) -> IndexMask:
        """Return the index as a mask, to combine it with other masks or to list it at another block size.

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
        """Convert an index with blocks of one query to a list of blocks for each query; waits for a device.

        Returns
        -------
        ChosenBlocks
            Lists [num_heads, seqlen_q, n], or [batch, num_heads, seqlen_q, n] if the index has several batch entries,
            in ascending order and padded with -1.

        Raises
        ------
        UnsupportedProblem
            The blocks have several queries, or one is not full.

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
        """True if the other is a block index of the same shape and block that allows the same elements."""
        if not isinstance(other, BlockIndex):
            return NotImplemented
        has_same_grid = (self.shape, self.block) == (other.shape, other.block)
        return self is other or has_same_grid and (self ^ other)._on_host.num_entries == 0

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
        # zeros after the last entry stay zeros
        listed = namespace(self.kinds).minimum(self.kinds, np.uint8(BlockKind.FULL))
        return replace(
            self, kinds=listed, tiles=-listed.astype(np.int32), bits=self.bits[:0], lo=None, hi=None
        )

    @property
    def T(self) -> BlockIndex:
        """The transposed index, as returned by `transpose()`.

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
        """Exchange queries and keys: block row c of the result lists the query blocks that attend to key block c.

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

    # Reports and pictures

    def report(
        self, *, head_dim: int = 64, value_dim: int | None = None, itemsize: int = 4, eligible: BlockIndex | None = None
    ) -> IndexReport:
        """Report density, blocks per row, empty rows, FLOPs and bytes.

        Parameters
        ----------
        head_dim, value_dim : int
            Sizes for FLOPs and bytes; value_dim is head_dim by default.
        itemsize : int
            Bytes per element of q, k and v.
        eligible : BlockIndex, optional
            An index whose listed blocks are the denominator of `density`. Default: all blocks of the grid.

        Returns
        -------
        IndexReport
            A record that prints as a table.

        Raises
        ------
        UnsupportedProblem
            A number is too small, or `eligible` is not an index with the same lengths and blocks.

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
        """Return one batch entry and head as text: █ full, ▒ partial, · absent.

        Parameters
        ----------
        b, h : int
            Batch entry and head; 0 for an index that is the same for all of them.
        width : int
            Maximum number of characters per line; a wider grid is drawn coarser.

        Returns
        -------
        str
            One line per block row.

        Raises
        ------
        UnsupportedProblem
            There is no such batch entry or head, or `width` is not an int of at least 1.

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
        """Plot one batch entry and head with matplotlib, an optional dependency; queries run downwards.

        Parameters
        ----------
        b, h : int
            Batch entry and head; 0 for an index that is the same for all of them.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default new ones.

        Returns
        -------
        matplotlib.axes.Axes
            The axes with the plot.

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
        """Return two lines, as SciPy's sparse arrays do; does not read an index on a device."""
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
        """Return a picture of the first matrix for notebooks; waits for a device."""
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
        """Combine two block indices into an index, or an index and another mask or array into a mask."""
        if not isinstance(other, BlockIndex):
            return combine(self.as_mask(), other)
        ours, theirs = ((x.seqlen_q, x.seqlen_kv, x.block) for x in (self, other))
        extents = [{x, y} for x, y in ((self.batch, other.batch), (self.num_heads, other.num_heads))]
        if ours != theirs or any(len(extent - {1}) > 1 for extent in extents):
            raise UnsupportedProblem(
                f"block indices to combine must share lengths, block, batch and heads (or have 1); got "
                f"{(*ours, self.batch, self.num_heads)} and {(*theirs, other.batch, other.num_heads)}: combine "
                f"their as_mask() instead"
            )
        return self._like(combine(self.as_mask(), other.as_mask()), *map(max, extents))

    def _like(self, mask: Mask, batch: int, num_heads: int) -> BlockIndex:
        """Build the index of a mask with the lengths and blocks of this index."""
        return BlockIndex.from_mask(mask, *self.shape[2:], self.block, batch=(batch,), num_heads=num_heads)


def _read_only(array: Array) -> Array:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view


without_other_operators(BlockIndex, "block indices", COMBINED)
