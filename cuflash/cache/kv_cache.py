"""The cache of keys and values that decoding steps append to and attend to."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array, Namespace, describe, flag_reasons
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from ..masks import ChosenBlocks
from ..planning.options import ScoreLike
from ._changes import fork, reserve, reset, rows_of, state_over, truncate
from ._doors import checked_queries, checked_rows
from ._state import CacheState
from .arguments import (
    PAGE_SIZE, Counts, bound_reasons, dtype_of, not_served, page_reasons, part_reasons, shown_numbers, size_reasons,
)  # fmt: skip
from .paged_rows import PagedRows
from .pages import OwnPages, PagePool, growths
from .scoring import score_of
from .steps import DecodeStep, Request, RequestedOptions


@explains_keywords
class KVCache:
    """Keys and values of earlier tokens of several sequences, contiguous or in pages.

    Parameters
    ----------
    batch : int
        Number of sequences, each with its own length.
    num_kv_heads, head_dim : int
        Number of heads of keys and values, and size of each key.
    capacity : int
        The largest number of positions of a sequence.
    dtype : dtype
        Dtype of keys and values: float16, bfloat16, float32 or float64; or float8_e4m3fn (FP8), with one scale per
        row.
    value_dim : int, optional
        Default: `head_dim`.
    page_size : int, optional
        Positions per page: a multiple of 16, at most 1024. Default: 64 if `num_pages` is set; otherwise the cache is
        contiguous and allocates `capacity` positions for every sequence at once.
    num_pages : int, optional
        Number of pages that all sequences share; required for a cache with pages.
    part_keys : int, optional
        Split keys at multiples of `part_keys`, which must be a multiple of 64 with capacity / part_keys <= 128. Then
        a result does not depend on how far its sequence grows later: decoding token by token is bitwise identical to
        decoding in chunks of up to 64 rows per key/value head. Short sequences then have fewer parts, which occupy
        less of a GPU. By default the split depends on the sequence's length.
    keeps_page_bounds : bool
        If True, `append` keeps the least and the greatest keys of each page in `page_bounds`, from which
        `selectors.quest` chooses pages without reading their keys. This requires pages, and a dtype other than FP8.
    xp : module
        `numpy`, or `cupy` for a cache on CuPy's current device.

    Raises
    ------
    UnsupportedProblem
        An argument breaks its rule; the error lists all reasons.
    MemoryError
        The arrays do not fit into memory.

    Notes
    -----
    By default rows are counted on the host: lengths and page tables are Python ints, no call waits for the device, and
    invalid arguments are refused before anything is written. A cache on a GPU can be counted there instead
    (`count_on_device`), and can then be captured into CUDA graphs; until then a capture raises a RuntimeError. Calls on
    one cache must follow each other: order calls on several streams by events. An interrupted call leaves each sequence
    with its old rows, its new rows, or none.

    On a GPU, one kernel appends rows to all sequences, one decodes, and others compute attention of longer chunks; all
    of them access the rows in place. They support float16 and bfloat16 with head_dim and value_dim in multiples of 8,
    and score functions at positions of the cache. Up to 64 query rows per key/value head are decoded. Any other call of
    `attention` calls `cuflash.attention` once per sequence on its own rows, which are first gathered into contiguous
    memory if they are in several pages; a score function is then compiled again for a different batch or capacity. In
    both cases the result of a sequence depends only on its own queries, keys and values: not on other sequences, their
    number or their order, nor on unused rows, which may hold NaN. On the host and with the cache's kernels it is
    bitwise identical for every page table, and with or without pages.

    A float8_e4m3fn cache takes rows of float16, bfloat16 or float32 and rounds them once, when they are appended. Each
    row of a key/value head has a float32 scale, a power of two, so scaling is exact. Later operations move a row's FP8
    numbers and scale unchanged. Queries may have any of the three dtypes; the result is attention to the rows that
    `rows` returns, in q's dtype.

    Arrays of other libraries, such as PyTorch tensors, are used in place, as in `attention`.

    On a GPU the cache keeps the launches of its calls, one for each layout and options, and the workspace of the
    largest of them. A repeated call only checks the addresses of its arrays.

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

    With pages, memory is allocated as sequences grow, and a fork shares the pages of its source:

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
        dtype: DTypeLike,
        value_dim: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        part_keys: int | None = None,
        keeps_page_bounds: bool = False,
        xp: Namespace = np,
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
        reasons += bound_reasons(keeps_page_bounds, is_paged, dtype)
        if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
            reasons.append(f"xp must be the module numpy or cupy; got {describe(xp)}")
        refuse(dict.fromkeys(reasons))
        num_own, num_positions = (batch, capacity) if num_pages is None or page_size is None else (num_pages, page_size)
        shape = int(num_own), int(num_kv_heads), int(num_positions)
        # Arrays are allocated before page tables: too large arrays raise MemoryError, but too long lists may not.
        arrays = PagedRows.empty(xp, shape, (int(head_dim), int(value_dim)), dtype)
        if keeps_page_bounds:
            arrays.keep_bounds()
        pages: OwnPages | PagePool = OwnPages(int(batch), int(capacity))
        if page_size is not None and num_pages is not None:
            pages = PagePool(int(page_size), int(num_pages), [[] for _ in range(batch)])
        self._state = CacheState(arrays, pages, [0] * int(batch), int(capacity), part_keys)

    def __copy__(self) -> KVCache:
        """Return a deep copy: two caches that share arrays would overwrite each other's rows."""
        return deepcopy(self)

    @classmethod
    def over(
        cls, k_pages: Array, v_pages: Array, block_table: Array, lengths: Counts, *, part_keys: int | None = None
    ) -> KVCache:
        """Return a cache over existing pages, which are used in place without a copy.

        Parameters
        ----------
        k_pages : array [num_pages, num_kv_heads, page_size, head_dim]
            Pages of keys, with any strides, but not overlapping each other.
        v_pages : array [num_pages, num_kv_heads, page_size, value_dim]
            Pages of values, with any strides. They must not overlap the pages of keys, since both are written.
        block_table : int array [batch, max_pages]
            Pages of each sequence in the order of its positions, up to the first negative number. The sequence may
            write to all of its pages, except to those that the table names twice.
        lengths : list or int array [batch]
            Number of positions of each sequence. The table and the lengths are read once; if they are on a device, the
            call waits for them. Later values are in `cache.block_table` and `cache.lengths`.
        part_keys : int, optional
            As in `KVCache`.

        Returns
        -------
        KVCache
            Its capacity is max_pages * page_size. It uses only the pages in the table.

        Raises
        ------
        TypeError
            The pages or the table are not arrays.
        UnsupportedProblem
            Shapes or dtypes do not match, or a sequence has fewer pages than its length needs; the error lists all
            reasons.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> pages = np.zeros((9, 16, 2, 8), np.float32).transpose(0, 2, 1, 3)    # 9 pages of 16 tokens, 2 heads
        >>> cache = cuflash.KVCache.over(pages, pages.copy(), np.array([[3, 7, -1], [4, -1, -1]]), [20, 5])
        >>> cache.append(*np.ones((2, 2, 2, 1, 8), np.float32))
        >>> pages[[7, 4], 0, [4, 5], 0], cache.lengths
        (array([1., 1.], dtype=float32), array([21,  6], dtype=int32))
        """
        cache = cls.__new__(cls)
        cache._state = state_over(k_pages, v_pages, block_table, lengths, part_keys)
        return cache

    # The content

    @property
    def k(self) -> Array:
        """Keys, [batch, num_kv_heads, capacity, head_dim], or with pages [num_pages, num_kv_heads, page_size, ...].

        Unused positions are uninitialized. ``rows(b)`` returns the keys of sequence b. FP8 keys are float8_e4m3fn in
        NumPy, and uint8 with the same bits in CuPy.

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
        """Values, like `k` but with value_dim. ``rows(b)`` returns those of sequence b.

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
        """Scales of the rows of FP8 keys, float32, in `k`'s shape without its last axis; None for other dtypes.

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
        """Scales of the rows of FP8 values, with the same shape and dtype as `k_scale`.

        Examples
        --------
        >>> import cuflash, ml_dtypes
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=ml_dtypes.float8_e4m3fn)
        >>> cache.v_scale.dtype
        dtype('float32')
        """
        return self._state.rows.v_scale

    @property
    def page_bounds(self) -> Array | None:
        """The least and the greatest keys of each page, [num_pages, num_kv_heads, 2, head_dim], in the keys' dtype.

        None if the cache does not keep them. Each number bounds one column of a page's keys; it is NaN if the column
        contains NaN. After `truncate`, the bounds may be wider than the remaining keys require.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(
        ...     batch=1, num_kv_heads=1, head_dim=2, capacity=64, dtype=np.float32, page_size=16, num_pages=4,
        ...     keeps_page_bounds=True,
        ... )
        >>> k = np.array([[[[1, 5], [2, 3]]]], np.float32)
        >>> cache.append(k, k)
        >>> cache.page_bounds[0, 0]
        array([[1., 3.],
               [2., 5.]], dtype=float32)
        """
        return self._state.rows.key_bounds

    @property
    def lengths(self) -> Array:
        """Number of positions of each sequence, int32 [batch], on the device of the cache.

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
        """Pages of each sequence in the order of its positions, int32 [batch, max_pages], on the device of the cache.

        Missing pages are -1. A contiguous cache has one page per sequence.

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
            The number of the sequence, starting at 0.

        Returns
        -------
        k : array [num_kv_heads, length, head_dim]
            A view if the rows are contiguous in one page, otherwise a copy. FP8 rows are multiplied by their scales, in
            float32. If rows are counted on the device, the call waits for it.
        v : array [num_kv_heads, length, value_dim]
            Values, like k.

        Raises
        ------
        UnsupportedProblem
            The cache has no such sequence.
        RuntimeError
            The device has counted rows of the sequence that are in no page.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(np.ones((2, 1, 3, 4), np.float32), np.ones((2, 1, 3, 4), np.float32), counts=[3, 2])
        >>> cache.rows(1)[0].shape
        (1, 2, 4)
        """
        return rows_of(self._state, sequence)

    @property
    def capacity(self) -> int:
        """The largest number of positions of a sequence.

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
        """Positions per page; None for a contiguous cache.

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
        """Number of pages that no sequence uses; 0 for a contiguous cache.

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
        """Size in bytes of all keys and values, and of their scales, used or not.

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

    def append(self, k: Array, v: Array, *, counts: Counts | None = None) -> None:
        """Append rows to each sequence.

        Parameters
        ----------
        k : array [batch, num_kv_heads, n, head_dim]
            Keys in the cache's dtype and on its device, with any strides; for FP8: float16, bfloat16 or float32.
        v : array [batch, num_kv_heads, n, value_dim]
            Values, in k's dtype.
        counts : list or int array [batch], optional
            The first counts[b] of the n rows belong to sequence b; default: all n. With an int32 array on the cache's
            device, rows are counted there from then on, as after `count_on_device`; a host array does not change this.

        Raises
        ------
        TypeError
            k or v is not an array.
        UnsupportedProblem
            Arrays do not fit, or a sequence would exceed its capacity or pages. The error lists all reasons, and
            nothing is written.

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
        step_call, k, v = state.steps.append(k, v)
        if step_call is None:
            k, v = checked_rows(state, k, v, counts)
        news = state.counted(counts, int(k.shape[2]))
        if state.is_counted_on_device:
            state.on_device().append(k, v, news if counts is not None else None, None, step_call)
            return
        lengths = [length + new for length, new in zip(state.lengths, news)]
        if max(lengths) > state.capacity or not state.pages.hold(state.lengths, lengths):
            state.make_room("k", lengths)
        if state.device is None:
            state.rows.write(k, v, list(growths(state.lengths, lengths)), state.pages.tables)
        elif lengths != state.lengths:
            state.on_device().append(k, v, news if counts is not None else None, lengths, step_call)
        state.lengths = lengths

    def count_on_device(self) -> None:
        """Count rows on the GPU from now on, so that calls can be captured into CUDA graphs and never wait for lengths.

        From then on, rows that exceed the capacity or the pages of a sequence are dropped, and `check` reports them.
        `append` no longer allocates pages: call `reserve` for that, before a capture. Passing device arrays as `counts`
        to `append` or `attention`, or as `lengths` to `truncate`, has the same effect.

        Raises
        ------
        UnsupportedProblem
            The cache is on the host; or a sequence would write to a page that it shares, and no page is free.

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

    def truncate(self, lengths: Counts) -> None:
        """Shorten sequences and free the pages beyond their new lengths, including reserved ones.

        If rows are counted on the device, sequences shorter than `lengths` stay unchanged, and all sequences keep their
        pages: the call does not wait for the device, and can be captured into a CUDA graph, like `append`. Then no
        length may end on a page that a sequence shares, since later rows would overwrite it for all; a list is checked.

        Parameters
        ----------
        lengths : list or int array [batch]
            Positions that remain. A device array has the same effect as for `append`.

        Raises
        ------
        UnsupportedProblem
            A sequence that is counted on the host is already shorter, or one that is counted on the device would end on
            a shared page; the error lists all reasons, and changes nothing.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32))
        >>> cache.truncate([2, 5])
        >>> cache.lengths
        array([2, 5], dtype=int32)
        """
        truncate(self._state, lengths)

    def reset(self, rows: Counts | None = None) -> None:
        """Empty some sequences, or all of them, and free their pages, including reserved ones.

        If rows are counted on the device, call `reserve` to allocate pages for emptied sequences before appending.

        Parameters
        ----------
        rows : list or int array, optional
            Sequences to empty; default: all.

        Raises
        ------
        UnsupportedProblem
            There is no such sequence (the error lists all reasons), or a stream is being captured, and the cache has
            pages and is counted on the device.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cache = cuflash.KVCache(batch=2, num_kv_heads=1, head_dim=4, capacity=9, dtype=np.float32)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32))
        >>> cache.reset([0])
        >>> cache.lengths
        array([0, 5], dtype=int32)
        """
        reset(self._state, rows)

    def fork(self, source: int, target: int) -> None:
        """Replace the contents of a sequence by those of another one.

        With pages, the two share them, and the first to write to a shared page gets a copy of it. A contiguous cache
        copies the rows immediately.

        Parameters
        ----------
        source, target : int
            Two different sequences.

        Raises
        ------
        UnsupportedProblem
            There is no such sequence, the source is empty, or the cache is counted on the device.

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
        fork(self._state, source, target)

    def reserve(self, lengths: Counts) -> None:
        """Allocate pages now, so that appending up to these lengths cannot fail. Has no effect on a contiguous cache.

        Parameters
        ----------
        lengths : list or int array [batch]
            Numbers of positions to allocate for each sequence; longer sequences are unchanged.

        Raises
        ------
        UnsupportedProblem
            The lengths exceed the capacity, or too few pages are free: the error lists all reasons, and nothing is
            allocated. Or a stream is being captured, and the cache has pages and is counted on the device.

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
        reserve(self._state, lengths)

    def check(self) -> None:
        """Check that lengths, page tables and page counts agree, and that no rows were dropped; waits for the device.

        Raises
        ------
        RuntimeError
            They do not agree, or rows were dropped; the error lists every contradiction.

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
        counts: Counts | None = None,
        mask: ChosenBlocks | None = None,
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
        out: Array | None = None,
        return_lse: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Compute attention of the last positions of each sequence to all of its positions.

        Query t of n has position lengths[b] - n + t in sequence b, so its key must have been appended before. A call
        with more queries than a sequence has tokens is refused, with and without `causal`: for further queries, call
        `cuflash.attention` on the keys and values that `rows` returns. For a sequence that is idle in this step, pass a
        count of 0.

        If rows are counted on the device, the call does not wait for lengths: queries at positions below 0 attend no
        key, their results are 0, and only ``CUFLASH_CHECK=1`` refuses them.

        Parameters
        ----------
        q : array [batch, num_heads, n, head_dim]
            In the cache's dtype (for FP8: float16, bfloat16 or float32) and on its device. Query head h reads key/value
            head h // (num_heads / num_kv_heads).
        counts : list or int array [batch], optional
            The first counts[b] of the n rows belong to sequence b: row t has position lengths[b] - counts[b] + t. The
            other rows are empty. A device array has the same effect as for `append`.
        mask : masks.ChosenBlocks, optional
            The blocks of positions that each query attends, within what the other arguments allow: block n of
            sequence b has positions n * block <= j < (n + 1) * block. With pages, the block size is a multiple of the
            page size, or a divisor of it that is a multiple of 16. A block that no query chose is not read, so its
            rows may hold NaN. Lists are arrays of the cache's library, and are read at each call.
        causal : bool
            If True, no query attends keys after its own position.
        window : (left, right), optional
            Numbers of keys before and after a query's own position, inclusive; None is unlimited.
        scale : float, optional
            As in `cuflash.attention`.
        score, softcap, bias : optional
            As in `cuflash.attention`, at positions of the cache: b is the sequence, and i and j are the positions of
            query and key, so row t of q has i = lengths[b] - n + t. A bias must broadcast to (batch, num_heads,
            capacity, capacity), and is read at these positions. Arrays must be on the device of the cache.
        sink, kernel, executor : optional
            As in `cuflash.attention`. If a sink differs between sequences, with shape (batch, num_heads), the call
            computes one sequence after the other.
        precision : str
            As in `cuflash.attention`.
        out : array [batch, num_heads, n, value_dim], optional
            Array for the result, instead of a new one; must overlap neither q nor the cache.
        return_lse : bool
            If True, also return lse.

        Returns
        -------
        o : array [batch, num_heads, n, value_dim]
            0 in rows that attend no key, such as those that `counts` excludes.
        lse : array [batch, num_heads, n]
            -inf in such rows, or their head's sink logit.

        Raises
        ------
        TypeError
            q is not an array.
        UnsupportedProblem
            The arguments are invalid or not supported, or q has rows whose keys were not appended. The error lists
            every reason; nothing is computed.

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
        options = RequestedOptions(causal, window, scale, kernel, executor, precision)
        scored, reasons, step_call = None, list[str](), None
        if score is not None or softcap is not None or bias is not None:
            with collecting(reasons):
                scored = score_of(score, softcap, bias, state.rows.k)
        request = Request(q, out, sink, options, scored, mask)
        is_list = type(mask) is ChosenBlocks and mask.sequences is None
        if not reasons and type(return_lse) is bool and (mask is None or is_list):
            step_call, request = state.steps.decode(request)
        if step_call is None:
            reasons += flag_reasons("return_lse", return_lse)
            step_call, request = checked_queries(state, request, counts, reasons)
        elif mask is not None and state.device is None:
            mask.require_numbers(state.capacity)
        is_decoded = isinstance(step_call.step, DecodeStep)
        # An earlier call may have bound a step that reads the host's lengths.
        if state.device is not None and not is_decoded and state.counts_on_device(counts):
            raise UnsupportedProblem(not_served(request.q, kernel, request.sink))
        news = state.queried(counts, request.q.shape[2])
        news = None if counts is None else news
        o, lse = step_call.step.make_o() if out is None else out, step_call.step.make_lse() if return_lse else None
        if is_decoded:
            state.on_device().decode(step_call, request, o, lse, news)
        else:
            step_call.step.attend(state, request, o, lse, news)
        return (o, lse) if return_lse else o
