"""The cache of keys and values that decoding appends to and attends to."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np

from ..arrays import Array, describe, flag_reasons
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from ..planning.options import ScoreLike
from ..plans import as_arrays
from ._doors import checked_queries, checked_rows
from ._state import CacheState
from .arguments import (
    PAGE_SIZE, dtype_of, growth_reasons, listed_ints, numbers, page_reasons, part_reasons, sequence_reasons,
    shown_numbers, size_reasons,
)  # fmt: skip
from .given_pages import checked_pages
from .on_device import capture_reasons
from .paged_rows import PagedRows
from .pages import OwnPages, PagePool, growths, length_faults
from .scoring import score_of
from .steps import AskedOptions, DecodeStep


@explains_keywords
class KVCache:
    """Keys and values of earlier tokens of several sequences, contiguous or in pages.

    Parameters
    ----------
    batch : int
        Sequences, each with a length of its own.
    num_kv_heads, head_dim : int
        Of keys; values have as many heads.
    capacity : int
        The most positions that a sequence may have.
    dtype : dtype
        Of keys and values: float16, bfloat16, float32 or float64; or float8_e4m3fn, for rows of 8 bits with a scale
        each.
    value_dim : int, optional
        `head_dim` unless given.
    page_size : int, optional
        Positions of a page: a multiple of 16, at most 1024; 64 if only `num_pages` is given. Without either the cache
        is contiguous: it takes the memory of `capacity` positions for every sequence at once.
    num_pages : int, optional
        Pages that all sequences share; needed for a cache with pages.
    part_keys : int, optional
        Keys are cut into parts at multiples of this number of positions, a multiple of 64 of which at most 128 reach
        the capacity; unless given, the length of a sequence decides. Then a result depends on no later growth of its
        sequence: decoding token by token has the bits of decoding in chunks of up to 64 rows for each key/value head.
        Parts of short sequences are fewer, so that they keep less of a GPU busy.
    xp : module
        `numpy`, or `cupy` for a cache on CuPy's current device.

    Raises
    ------
    UnsupportedProblem
        An argument breaks its rule; all reasons at once.
    MemoryError
        There is no room for the arrays.

    Notes
    -----
    Rows are counted on the host: lengths and page tables are Python's ints, nothing waits for a device, and whatever
    does not fit is refused before anything is written. A cache on a GPU can be counted there instead
    (`count_on_device`), and then be captured into CUDA graphs. Calls on one cache follow each other: those on several
    streams must be ordered by events.

    On a GPU one kernel appends for all sequences, one decodes, and others attend from more new tokens: all of them read
    rows where they lie. They serve float16 and bfloat16 with dims in multiples of 8; up to 64 query rows for each
    key/value head are decoded. They take score functions, at positions of the cache. Every other call of `attention` is
    one call of `cuflash.attention` for each sequence, on its own rows alone, which are gathered into contiguous memory
    where they lie in several pages; a score function is compiled anew there for another batch or capacity. Either way
    the result of a sequence depends on nothing but its own queries, keys and values: not on the other sequences, nor on
    their number or order, nor on rows that are not in use, which may hold NaN. On the host and by the cache's kernels
    it is the same bit for bit for any page table, with pages or without.

    A cache of float8_e4m3fn takes rows of float16, bfloat16 or float32 and rounds them once, when they are appended.
    Each row of a key/value head has a scale in float32, a power of two, so that rows are scaled exactly. Whatever the
    cache does with a row afterwards moves its 8-bit numbers and its scale. Queries are of any of the three dtypes, and
    the result is attention to what `rows` returns, in q's dtype.

    Arrays of other libraries, such as PyTorch's tensors, are taken where they lie, as `attention` takes them.

    On a GPU the cache keeps the launches of its calls, one for each layout and options, and the memory that the kernels
    of the largest of them need. A later call of the same kind checks nothing but where its arrays lie.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> cache = cuflash.KVCache(batch=2, num_kv_heads=2, head_dim=8, capacity=100, dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 2, 5, 8), dtype=np.float32)        # a prompt of 5 tokens
    >>> cache.append(k, v)
    >>> k, v = rng.standard_normal((2, 2, 2, 1, 8), dtype=np.float32)        # the next token, with 4 query heads
    >>> q = rng.standard_normal((2, 4, 1, 8), dtype=np.float32)
    >>> cache.append(k, v)
    >>> cache.attention(q).shape, cache.lengths
    ((2, 4, 1, 8), array([6, 6], dtype=int32))

    With pages, memory is taken as sequences grow, and a fork shares the pages of what it was forked from:

    >>> cache = cuflash.KVCache(
    ...     batch=2, num_kv_heads=2, head_dim=8, capacity=100, dtype=np.float32, page_size=16, num_pages=5
    ... )
    >>> k = v = np.ones((2, 2, 40, 8), np.float32)
    >>> cache.append(k, v, counts=[40, 0])
    >>> cache.fork(0, 1)
    >>> cache.lengths, cache.num_free_pages
    (array([40, 40], dtype=int32), 2)
    """

    def __init__(
        self,
        *,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: Any,
        value_dim: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        part_keys: int | None = None,
        xp: Any = np,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        reasons = size_reasons(**sizes, capacity=capacity) + part_reasons(part_keys, capacity)
        with collecting(reasons):
            dtype = dtype_of(dtype)
        is_paged = page_size is not None or num_pages is not None
        if is_paged:
            page_size = PAGE_SIZE if page_size is None else page_size
            reasons += page_reasons(page_size, num_pages)
        if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
            reasons.append(f"xp must be the module numpy or cupy; got {describe(xp)}")
        refuse(dict.fromkeys(reasons))
        num_own, num_positions = (batch, capacity) if num_pages is None or page_size is None else (num_pages, page_size)
        shape = int(num_own), int(num_kv_heads), int(num_positions)
        # Made before the page tables: an array for which there is no room is an error, a list of as many items is none.
        arrays = PagedRows.empty(xp, shape, (int(head_dim), int(value_dim)), dtype)
        pages: OwnPages | PagePool = OwnPages(int(batch), int(capacity))
        if page_size is not None and num_pages is not None:
            pages = PagePool(int(page_size), int(num_pages), [[] for _ in range(batch)])
        own_part_keys = None if part_keys is None else int(part_keys)
        self._state = CacheState(arrays, pages, [0] * int(batch), int(capacity), own_part_keys)

    _state: CacheState

    def __copy__(self) -> KVCache:
        """A cache with arrays of its own: two that share arrays would write over each other's rows."""
        return deepcopy(self)

    @classmethod
    def over(
        cls, k_pages: Array, v_pages: Array, block_table: Array, lengths: Any, *, part_keys: int | None = None
    ) -> KVCache:
        """A cache over pages that exist, which are used where they lie and not copied.

        Parameters
        ----------
        k_pages : array [num_pages, num_kv_heads, page_size, head_dim]
            Pages of keys, of any strides.
        v_pages : array [num_pages, num_kv_heads, page_size, value_dim]
            Pages of values, of any strides. They share no memory with those of keys, as rows of both are written.
        block_table : int array [batch, max_pages]
            Pages of each sequence in the order of its positions, up to the first negative number: all of them are the
            sequence's to write to. A page of several sequences is written to by none of them.
        lengths : list or int array [batch]
            Positions that each sequence has. The table and the lengths are read once, and waited for if they are on a
            device; `cache.block_table` and `cache.lengths` have what becomes of them.
        part_keys : int, optional
            As in `KVCache`.

        Returns
        -------
        KVCache
            Its capacity is max_pages * page_size. It takes no pages but those of the table.

        Raises
        ------
        TypeError
            The pages or the table are no arrays.
        UnsupportedProblem
            Shapes or dtypes do not fit each other, or a sequence has fewer pages than it has positions; all reasons at
            once.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> pages = np.zeros((9, 16, 2, 8), np.float32).transpose(0, 2, 1, 3)    # 9 pages of 16 tokens, 2 heads
        >>> cache = cuflash.KVCache.over(pages, pages.copy(), np.array([[3, 7, -1], [4, -1, -1]]), [20, 5])
        >>> cache.append(*np.ones((2, 2, 2, 1, 8), np.float32))
        >>> pages[[7, 4], 0, [4, 5], 0], cache.lengths
        (array([1., 1.], dtype=float32), array([21,  6], dtype=int32))
        """
        arrays, tables, positions, max_pages = checked_pages(k_pages, v_pages, block_table, lengths)
        page_size, num_pages = int(arrays.k.shape[2]), int(arrays.k.shape[0])
        refuse(part_reasons(part_keys, max_pages * page_size))
        cache = cls.__new__(cls)
        pages = PagePool(page_size, num_pages, tables, owns_rest=False)
        own_part_keys = None if part_keys is None else int(part_keys)
        cache._state = CacheState(arrays, pages, positions, max_pages * page_size, own_part_keys)
        return cache

    # The content

    @property
    def k(self) -> Array:
        """Keys, [batch, num_kv_heads, capacity, head_dim], or with pages [num_pages, num_kv_heads, page_size, ...].

        Positions that nothing was appended to hold uninitialised memory. ``rows(b)`` returns the keys of sequence b.
        Those of 8 bits are float8_e4m3fn in NumPy, and uint8 with the same bits in CuPy.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.k.shape
        (2, 1, 9, 4)
        """
        return self._state.rows.k

    @property
    def v(self) -> Array:
        """Values, as `k` with value_dim. ``rows(b)`` returns those that sequence b has.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, value_dim=8, capacity=9, dtype=np.float32)
        >>> cache.v.shape
        (2, 1, 9, 8)
        """
        return self._state.rows.v

    @property
    def k_scale(self) -> Array | None:
        """Scales of rows of 8-bit keys, float32, of `k`'s shape without its last axis; None for other dtypes.

        Examples
        --------
        >>> import cuflash, ml_dtypes
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=ml_dtypes.float8_e4m3fn)
        >>> cache.k_scale.shape
        (2, 1, 9)
        """
        return self._state.rows.k_scale

    @property
    def v_scale(self) -> Array | None:
        """Scales of rows of 8-bit values, of the form of `k_scale`.

        Examples
        --------
        >>> import cuflash, ml_dtypes
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=ml_dtypes.float8_e4m3fn)
        >>> cache.v_scale.dtype
        dtype('float32')
        """
        return self._state.rows.v_scale

    @property
    def lengths(self) -> Array:
        """Positions of each sequence, int32 [batch], where the cache is.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32), counts=[5, 3])
        >>> cache.lengths
        array([5, 3], dtype=int32)
        """
        return self._state.length_array()

    @property
    def block_table(self) -> Array:
        """Pages of each sequence in the order of its positions, int32 [batch, max_pages], where the cache is.

        -1 stands for no page. A contiguous cache has a page for each sequence.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(
        ...     batch=2, num_kv_heads=1, head_dim=4, capacity=64, dtype=np.float32, page_size=16, num_pages=5
        ... )
        >>> cache.append(*np.ones((2, 2, 1, 20, 4), np.float32), counts=[20, 3])
        >>> cache.block_table
        array([[ 0,  1, -1, -1],
               [ 2, -1, -1, -1]], dtype=int32)
        """
        return self._state.block_table()

    def rows(self, sequence: int) -> tuple[Array, Array]:
        """Return the keys and values of a sequence, in the order of its positions.

        Parameters
        ----------
        sequence : int
            The sequence, from 0 on.

        Returns
        -------
        k : array [num_kv_heads, length, head_dim]
            A view if the rows lie next to each other in one page, else a copy. Rows of 8 bits are multiplied by their
            scales, in float32. If the device counts rows, its length is waited for.
        v : array [num_kv_heads, length, value_dim]
            As k.

        Raises
        ------
        UnsupportedProblem
            The cache has no such sequence.
        RuntimeError
            The device has counted rows of the sequence that have no page.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(np.ones((2, 1, 3, 4), np.float32), np.ones((2, 1, 3, 4), np.float32), counts=[3, 2])
        >>> cache.rows(1)[0].shape
        (1, 2, 4)
        """
        state = self._state
        refuse(sequence_reasons("sequence", sequence, len(state.lengths)))
        length, table = state.lengths_now()[sequence], state.pages.tables[sequence]
        if faults := length_faults(state.pages, sequence, length, state.capacity):
            raise RuntimeError("the cache contradicts itself: " + "; ".join(faults))
        return state.rows.gather(table, 0, length)

    @property
    def capacity(self) -> int:
        """The most positions that a sequence may have.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.capacity
        9
        """
        return self._state.capacity

    @property
    def page_size(self) -> int | None:
        """Positions of a page; None for a contiguous cache.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(
        ...     batch=2, num_kv_heads=1, head_dim=4, capacity=64, dtype=np.float32, page_size=16, num_pages=5
        ... )
        >>> cache.page_size
        16
        """
        return self._state.pages.page_size if self._state.is_paged else None

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence has; 0 for a contiguous cache, which takes none.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(
        ...     batch=2, num_kv_heads=1, head_dim=4, capacity=64, dtype=np.float32, page_size=16, num_pages=5
        ... )
        >>> cache.append(*np.ones((2, 2, 1, 20, 4), np.float32))
        >>> cache.num_free_pages
        1
        """
        return self._state.pages.num_free

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, and of their scales, in use or not.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.nbytes    # 2 sequences of 9 positions, 4 + 4 numbers each
        576
        """
        return sum(int(array.nbytes) for array in self._state.rows.arrays)

    def __repr__(self) -> str:
        state = self._state
        batch, (num_pages, heads, page_size, head_dim) = len(state.lengths), state.rows.k.shape
        pages = f", page_size={page_size}, num_pages={num_pages}" if state.is_paged else ""
        pages += "" if state.part_keys is None else f", part_keys={state.part_keys}"
        lengths = "counted on the device" if state.is_counted_on_device else shown_numbers(state.lengths)
        return (
            f"KVCache(batch={batch}, num_kv_heads={heads}, head_dim={head_dim}, value_dim={state.rows.v.shape[-1]}, "
            f"capacity={state.capacity}, dtype={state.rows.dtype}{pages}, lengths={lengths})"
        )

    # Changes of the content

    def append(self, k: Array, v: Array, *, counts: Any = None) -> None:
        """Add rows at the end of each sequence.

        Parameters
        ----------
        k : array [batch, num_kv_heads, n, head_dim]
            Keys of the cache's dtype, where it is; any strides. For a cache of 8 bits of float16, bfloat16 or float32.
        v : array [batch, num_kv_heads, n, value_dim]
            Values, of k's dtype.
        counts : list or int array [batch], optional
            Of the n rows the first counts[b] belong to sequence b; all of them unless given. An int32 array on the
            cache's device counts rows there from now on, as `count_on_device` does; one on the host does not.

        Raises
        ------
        TypeError
            k or v is no array.
        UnsupportedProblem
            Arrays do not fit, or a sequence has no room; all reasons at once, before anything is written.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=3, dtype=np.float32)
        >>> k = v = np.ones((2, 1, 2, 4), np.float32)
        >>> cache.append(k, v, counts=[2, 1])
        >>> cache.append(k, v)    # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        cuflash.errors.UnsupportedProblem: k must fit the room of sequence 0; got 2 rows, which need 4 positions, ...
        """
        state = self._state
        found, k, v = state.steps.append(k, v)
        if found is None:
            k, v = checked_rows(state, k, v, counts)
        news = state.counted(counts, int(k.shape[2]))
        if state.is_counted_on_device:
            state.on_device().append(k, v, news if counts is not None else None, None, found)
            return
        lengths = [length + new for length, new in zip(state.lengths, news)]
        if max(lengths) > state.capacity or not state.pages.hold(state.lengths, lengths):
            state.make_room("k", lengths)
        if state.device is None:
            state.rows.write(k, v, list(growths(state.lengths, lengths)), state.pages.tables)
        elif lengths != state.lengths:
            state.on_device().append(k, v, news if counts is not None else None, lengths, found)
        state.lengths = lengths

    def count_on_device(self) -> None:
        """Count rows on the GPU from now on, so that calls can be captured into CUDA graphs and read nothing back.

        From then on rows that have no room, because the capacity or the pages of a sequence end, are left out, and
        `check` tells. No page is taken by `append` any more: `reserve` takes them, before a capture. Giving `append` or
        `attention` counts on the device, or `truncate` lengths, does the same.

        Raises
        ------
        UnsupportedProblem
            The cache is on the host, or a sequence would write to a page that another one has, and no page is free.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.count_on_device()    # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        cuflash.errors.UnsupportedProblem: the cache must be on a GPU to be counted there; got NumPy arrays...
        """
        self._state.count_on_device()

    def truncate(self, lengths: Any) -> None:
        """Shorten sequences; pages that no position needs any more are free, those that were reserved too.

        If the device counts rows, sequences that are shorter than `lengths` stay as they are, and all keep their pages:
        nothing waits for the device, and the call can be captured into a CUDA graph, as `append` can.

        Parameters
        ----------
        lengths : list or int array [batch]
            Positions that remain. An int32 array on the cache's device is taken as by `append`.

        Raises
        ------
        UnsupportedProblem
            A sequence is shorter than that, by the host's count; all reasons at once, before anything is changed.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32))
        >>> cache.truncate([2, 5])
        >>> cache.lengths
        array([2, 5], dtype=int32)
        """
        state = self._state
        kept = state.numbers("lengths", lengths)
        if state.is_counted_on_device:
            state.on_device().truncate(kept)
            return
        refuse(growth_reasons(kept, state.lengths))
        for sequence, length in enumerate(kept):
            state.pages.shrink(sequence, length)
        state.lengths = kept

    def reset(self, rows: Any = None) -> None:
        """Empty some sequences, or all of them; their pages are free, those that were reserved too.

        If the device counts rows, `reserve` gives emptied sequences pages again, before anything is appended to them.

        Parameters
        ----------
        rows : list or int array, optional
            Sequences; all unless given.

        Raises
        ------
        UnsupportedProblem
            There is no such sequence; all reasons at once. Or a stream is being captured, and the cache has pages that
            are counted on the device.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32))
        >>> cache.reset([0])
        >>> cache.lengths
        array([0, 5], dtype=int32)
        """
        state = self._state
        batch = len(state.lengths)
        listed = listed_ints(range(batch) if rows is None else as_arrays({"rows": rows})["rows"])
        if listed is None:
            raise UnsupportedProblem([f"rows must be a list of sequences, or None for all; got {describe(rows)}"])
        reasons = [reason for row in listed for reason in sequence_reasons("rows", row, batch)]
        reasons += capture_reasons("reset", state.pages) if state.is_counted_on_device else []
        refuse(reasons)
        for row in listed:
            state.pages.shrink(row, 0)
            state.lengths[row] = 0
            if state.device is not None and state.is_counted_on_device:
                state.device.lengths[row] = 0
        if state.is_counted_on_device:
            state.on_device()  # now, since a graph that is replayed next sends nothing

    def fork(self, source: int, target: int) -> None:
        """Let a sequence hold what another holds, in place of what it held.

        With pages it shares them, and whichever of the two writes to a shared page first gets a copy of it. A
        contiguous cache copies at once.

        Parameters
        ----------
        source, target : int
            Sequences, not the same.

        Raises
        ------
        UnsupportedProblem
            There is no such sequence, or the source is empty.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(
        ...     batch=2, num_kv_heads=1, head_dim=4, capacity=64, dtype=np.float32, page_size=16, num_pages=5
        ... )
        >>> cache.append(*np.ones((2, 2, 1, 20, 4), np.float32), counts=[20, 0])
        >>> cache.fork(0, 1)
        >>> cache.lengths, cache.num_free_pages
        (array([20, 20], dtype=int32), 3)
        """
        state = self._state
        if state.is_counted_on_device:
            raise UnsupportedProblem(
                ["fork must have lengths on the host; got a cache that is counted on the device: make another one"]
            )
        batch = len(state.lengths)
        reasons = sequence_reasons("source", source, batch) + sequence_reasons("target", target, batch)
        if not reasons and source == target:
            reasons.append(f"target must be another sequence than source; got {target}")
        if not reasons and not state.lengths[source]:
            reasons.append(f"source must hold rows; got sequence {source}, which is empty: reset empties the target")
        refuse(reasons)
        for copy in state.pages.fork(source, target, state.lengths[source]):
            state.rows.copy(copy)
        state.lengths[target] = state.lengths[source]

    def reserve(self, lengths: Any) -> None:
        """Take pages now, so that appending up to these lengths cannot fail. A contiguous cache has them already.

        Parameters
        ----------
        lengths : list or int array [batch]
            Positions that sequences will have; those that have more already keep what they have.

        Raises
        ------
        UnsupportedProblem
            They exceed the capacity, or too few pages are free; all reasons at once, before any is taken. Or a stream
            is being captured, and the cache has pages that are counted on the device.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(
        ...     batch=2, num_kv_heads=1, head_dim=4, capacity=64, dtype=np.float32, page_size=16, num_pages=5
        ... )
        >>> cache.reserve([40, 10])
        >>> cache.num_free_pages
        1
        """
        state = self._state
        stops = numbers("lengths", as_arrays({"lengths": lengths})["lengths"], len(state.lengths))
        if state.is_counted_on_device and (reasons := capture_reasons("reserve", state.pages)):
            raise UnsupportedProblem(reasons)
        state.make_room("lengths", stops)
        if state.is_counted_on_device:
            state.on_device()  # now, since a graph that is replayed next sends nothing

    def check(self) -> None:
        """Prove that lengths, tables and counts of pages agree, and that nothing was left out; waits for a device.

        Raises
        ------
        RuntimeError
            They do not; each contradiction is named.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32))
        >>> cache.check()
        """
        faults = self._state.faults()
        if faults:
            raise RuntimeError("the cache contradicts itself: " + "; ".join(faults))

    # Attention

    def attention(
        self,
        q: Array,
        *,
        counts: Any = None,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        score: ScoreLike | None = None,
        softcap: float | None = None,
        bias: Array | None = None,
        sink: Array | None = None,
        kernel: str = "auto",
        executor: str = "auto",
        precision: str = "ieee",
        out: Any = None,
        return_lse: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Attention of the last positions of each sequence to all of its positions.

        Query t of n stands at position lengths[b] - n + t of sequence b, whose keys must have been appended before. A
        call with more queries than a sequence has tokens is refused, with and without `causal`: to attend from further
        queries, call `cuflash.attention` on the keys and values that `rows` returns. A sequence that is idle in this
        step has a count of 0.

        If rows are counted on the device, nothing waits for the lengths: there queries at positions below 0 attend no
        key, their results are 0, and only ``CUFLASH_CHECK=1`` refuses them.

        Parameters
        ----------
        q : array [batch, num_heads, n, head_dim]
            Of the cache's dtype, or for 8 bits of float16, bfloat16 or float32, where the cache is. Query head h reads
            key/value head h // (num_heads / num_kv_heads).
        counts : list or int array [batch], optional
            Of the n rows the first counts[b] belong to sequence b: row t stands at lengths[b] - counts[b] + t. The
            rows after them are empty. An int32 array on the cache's device is taken as by `append`.
        causal : bool
            No key after a query's own position.
        window : (left, right), optional
            Keys before and after a query's own position, inclusive; None is unlimited.
        scale : float, optional
            As in `cuflash.attention`.
        score, softcap, bias : optional
            As in `cuflash.attention`, with positions of the cache: b is the sequence, and i and j are the positions of
            query and key, so that row t of q has i = lengths[b] - n + t. A bias broadcasts against
            (batch, num_heads, capacity, capacity), and is read at these positions. Arrays lie where the cache is.
        sink, kernel, executor : optional
            As in `cuflash.attention`. A sink with numbers of its own for each sequence, (batch, num_heads), takes one
            call for each sequence.
        precision : str
            As in `cuflash.attention`.
        out : array [batch, num_heads, n, value_dim], optional
            Written to instead of a new array; overlaps neither q nor the cache.
        return_lse : bool
            Also return lse.

        Returns
        -------
        o : array [batch, num_heads, n, value_dim]
            0 in rows that attend no key: those that `counts` leaves out.
        lse : array [batch, num_heads, n]
            -inf in such rows, or their head's sink.

        Raises
        ------
        TypeError
            q is no array.
        UnsupportedProblem
            The arguments are invalid or not supported, or q has rows whose keys were not appended. It lists every
            reason; nothing has been computed.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32))
        >>> q = np.ones((2, 3, 1, 4), np.float32)    # one token of each sequence, 3 query heads
        >>> cache.attention(q).shape
        (2, 3, 1, 4)
        """
        state = self._state
        options = AskedOptions(causal, window, scale, kernel, executor, precision)
        scored, reasons, found = None, list[str](), None
        if score is not None or softcap is not None or bias is not None:
            with collecting(reasons):
                scored = score_of(score, softcap, bias, state.rows.k)
        if not reasons and type(return_lse) is bool:
            found, q, sink = state.steps.decode(q, out, sink, options, scored)
        if found is None:
            reasons += flag_reasons("return_lse", return_lse)
            found, q, sink = checked_queries(state, q, counts, out, sink, options, scored, reasons)
        news = state.queried(counts, q.shape[2])
        news = None if counts is None else news
        o, lse = found.step.make_o() if out is None else out, found.step.make_lse() if return_lse else None
        if isinstance(found.step, DecodeStep):
            state.on_device().decode(found, q, o, lse, news, sink, scored)
        else:
            found.step.attend(state, q, o, lse, news, sink, scored)
        return (o, lse) if return_lse else o
