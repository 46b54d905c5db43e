"""The arrays of a KV cache: keys and values in pages, and for FP8 the scale of each row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import BFLOAT16, E4M3, Array, Namespace, namespace
from ..fp8.rows import dequantized_rows, quantized_rows
from .pages import Copy, Growth


class PagedRows:
    """Keys and values [num_pages, num_kv_heads, page_size, dim], with functions to copy, write and gather rows.

    Parameters
    ----------
    k, v : arrays
    k_scale, v_scale : arrays [num_pages, num_kv_heads, page_size], optional
        Powers of two by which FP8 rows are multiplied.

    Attributes
    ----------
    key_bounds : array [num_pages, num_kv_heads, 2, head_dim], optional
        The least and the greatest keys of each page, if `keep_bounds` was called.
    """

    def __init__(self, k: Array, v: Array, k_scale: Array | None = None, v_scale: Array | None = None) -> None:
        self.k, self.v, self.k_scale, self.v_scale = k, v, k_scale, v_scale
        self.key_bounds: Array | None = None

    def keep_bounds(self) -> None:
        """Keep the least and the greatest keys of each page from now on; call it before rows are written."""
        num_pages, heads, _, head_dim = self.k.shape
        self.key_bounds = namespace(self.k).empty((num_pages, heads, 2, head_dim), self.k.dtype)

    @classmethod
    def empty(
        cls, xp: Namespace, shape: tuple[int, int, int], dims: tuple[int, int], dtype: np.dtype[np.generic]
    ) -> PagedRows:
        """Allocate uninitialized rows; FP8 numbers are uint8 in CuPy, which has no such dtype."""
        stored = np.dtype(np.uint8) if dtype == E4M3 and xp is not np else dtype
        if prod(shape) * max(dims) * stored.itemsize >= 1 << 63:  # NumPy raises a ValueError, and CuPy overflows
            raise MemoryError(f"pages of shape {shape} and rows of {max(dims)} numbers exceed 2^63 bytes")
        k, v = (xp.empty((*shape, dim), stored) for dim in dims)
        return cls(k, v, *(xp.empty(shape, np.float32) for _ in dims)) if dtype == E4M3 else cls(k, v)

    @property
    def is_quantized(self) -> bool:
        return self.k_scale is not None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype in which the rows are stored."""
        stored: np.dtype[np.generic] = E4M3 if self.is_quantized else np.dtype(self.k.dtype)
        return stored

    def gathered_dtype(self, dtype: DTypeLike) -> np.dtype[np.generic]:
        """Return the dtype of gathered rows for queries of a dtype."""
        if not self.is_quantized:
            return self.dtype
        return BFLOAT16 if dtype == BFLOAT16 else np.dtype(np.float32)

    @property
    def arrays(self) -> list[Array]:
        """The arrays that hold the rows."""
        return [array for array in (self.k, self.v, self.k_scale, self.v_scale) if array is not None]

    @property
    def held(self) -> list[Array]:
        """The arrays that hold the rows, and the bounds of pages."""
        return self.arrays + ([] if self.key_bounds is None else [self.key_bounds])

    @property
    def scales(self) -> dict[str, Array]:
        """The scales by their names in kernels; empty for plain rows."""
        return {name: x for name, x in (("k_scale", self.k_scale), ("v_scale", self.v_scale)) if x is not None}

    def copy(self, copy: Copy) -> None:
        """Copy the first rows of a page to another page, bit for bit."""
        for array in self.arrays:
            array[copy.target, :, : copy.rows] = array[copy.source, :, : copy.rows]
        if self.key_bounds is not None:
            self.key_bounds[copy.target] = self.key_bounds[copy.source]

    def write(self, k: Array, v: Array, growths: Sequence[Growth], tables: Sequence[Sequence[int]]) -> None:
        """Write the first rows of each sequence to its new positions, for all sequences at once."""
        if not growths:
            return
        size, places = self.k.shape[2], []
        for sequence, length, stop in growths:
            positions = np.arange(length, stop)
            pages = np.array(tables[sequence])[positions // size]
            places.append((np.full(len(positions), sequence), positions - length, pages, positions % size))
        xp = namespace(self.k)
        sequences, sources, pages, rows = (xp.asarray(np.concatenate(each)) for each in zip(*places))
        for to, scale, array in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            new = array[sequences, :, sources]
            if scale is not None:
                new, scale[pages, :, rows] = quantized_rows(new)
            to[pages, :, rows] = new
        if self.key_bounds is not None:
            for growth in growths:
                self._widen(k, growth, tables[growth.sequence])

    def _widen(self, k: Array, growth: Growth, table: Sequence[int]) -> None:
        """Add new keys of a sequence, the first rows of k, to the bounds of their pages."""
        xp, size = namespace(self.k), self.k.shape[2]
        assert self.key_bounds is not None
        for start in range(growth.length - growth.length % size, growth.stop, size):
            bounds = self.key_bounds[table[start // size]]
            first = max(start, growth.length) - growth.length
            keys = k[growth.sequence, :, first : min(start + size, growth.stop) - growth.length]
            for side, of in ((0, xp.minimum), (1, xp.maximum)):
                known = bounds[:, side : side + 1] if start < growth.length else keys[:, :1]
                with np.errstate(invalid="ignore"):  # NaN in keys of bfloat16
                    bounds[:, side] = of.reduce(xp.concatenate([known, keys], axis=1), axis=1)

    def gather(self, table: Sequence[int], start: int, stop: int, dtype: DTypeLike = np.float32) -> tuple[Array, Array]:
        """Return the keys and values at positions start <= j < stop of a sequence, contiguous.

        Plain rows are a view if they are contiguous in one page, otherwise a copy; attention returns the same bits for
        both. FP8 rows are multiplied by their scales, which is exact in bfloat16 and float32: the result is bfloat16 if
        `dtype` is, otherwise float32.
        """
        k, v = (self._gathered(array, table, start, stop) for array in (self.k, self.v))
        if not self.is_quantized:
            return k, v
        gathered_dtype = self.gathered_dtype(dtype)
        k_scale, v_scale = (
            self._gathered(scale[..., None], table, start, stop)[..., 0] for scale in self.scales.values()
        )
        return dequantized_rows(k, k_scale, gathered_dtype), dequantized_rows(v, v_scale, gathered_dtype)

    def _gathered(self, array: Array, table: Sequence[int], start: int, stop: int) -> Array:
        xp, size = namespace(array), self.k.shape[2]
        if start >= stop:
            return xp.empty((array.shape[1], 0, array.shape[3]), array.dtype)
        first = start // size
        pages = table[first : -(-stop // size)]
        cut = slice(start - first * size, stop - first * size)
        if len(pages) == 1:
            rows = array[pages[0], :, cut]
            return rows if rows[0].flags.c_contiguous else xp.ascontiguousarray(rows)
        gathered = array[xp.asarray(np.array(pages))].transpose(1, 0, 2, 3)
        return gathered.reshape(array.shape[1], len(pages) * size, array.shape[3])[:, cut]
