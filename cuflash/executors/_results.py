"""Kernels that merge and compare results, and add rows, on the current CUDA device: one launch each, asynchronous."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import or_

import numpy as np

from ..arrays import Array, namespace
from ..planning._call_cache import CALLS
from ..planning.launches import Pass
from ..planning._result_kernels import COMPARED, adding_rows, comparing, merging
from . import checks, gpu
from ._layout_key import layout_key
from .launch import BoundPass
from .selecting import bound_kernel


class _Allocating:
    """The launches of a pass whose results each call allocates.

    Parameters
    ----------
    kernels : Pass
    results : sequence of (shape, dtype)
        The results, which come last among the arrays of the pass.
    target : Gpu
        The device; the kernel is compiled immediately.
    names : sequence of str
        As in `bound_kernel`.
    """

    def __init__(
        self, kernels: Pass, results: Sequence[tuple[tuple[int, ...], np.dtype[np.generic]]], target: gpu.Gpu,
        names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._launches = bound_kernel(kernels, target, names)
        self._makers = [target.maker(*each) for each in results]
        self.address, self._stream = target.address, target.stream
        self._captured: list[Array] = []

    def __call__(self, addresses: Sequence[int], read: Sequence[Array], is_empty: bool = False) -> list[Array]:
        """Return the results of inputs at these addresses; a graph keeps the arrays `read`. Launch nothing if empty."""
        results = [make() for make in self._makers]
        if is_empty:
            return results
        stream = self._stream()
        workspaces = self._launches.launch([*addresses, *map(self.address, results)], stream)
        if stream.is_capturing():  # each replay reads and writes these arrays
            self._captured += [*read, *results, *workspaces]
            gpu.hold(self)
        if checks.is_on():
            self._launches.wait()
        return results


class BoundMerge:
    """The kernel that merges parts, for parts of one layout.

    Parameters
    ----------
    outs, lses : sequence of CuPy arrays
        Only their layouts matter.
    target : Gpu
        The device; the kernel is compiled immediately.
    """

    def __init__(self, outs: Sequence[Array], lses: Sequence[Array], target: gpu.Gpu) -> None:
        like = outs[0], lses[0]
        kernels = merging(len(outs), outs[0].shape, outs[0].dtype)
        self._merge = _Allocating(kernels, [(each.shape, each.dtype) for each in like], target)
        self._is_empty = lses[0].size == 0
        self._odd_bits = [each.dtype.itemsize - 1 for each in like]
        self._is_dense = all(each.flags.c_contiguous for each in (*outs, *lses))

    def __call__(self, outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array] | None:
        """Return o and lse of the union of these parts, or None if an array's address is misaligned."""
        copies: list[Array] = []
        if not self._is_dense:
            outs, lses = (list(map(namespace(outs[0]).ascontiguousarray, each)) for each in (outs, lses))
            copies = [*outs, *lses]
        of_outs, of_lses = (list(map(self._merge.address, each)) for each in (outs, lses))
        if reduce(or_, of_outs) & self._odd_bits[0] or reduce(or_, of_lses) & self._odd_bits[1]:
            return None
        o, lse = self._merge((*of_outs, *of_lses), copies, self._is_empty)
        return o, lse


def compared(o: Array, lse: Array, kept_o: Array, kept_lse: Array) -> tuple[Array, Array]:
    """Compare the results of two calls of attention on CuPy arrays, one without a mask and one with it.

    Returns
    -------
    mass : CuPy array of lse's shape and dtype
        exp(kept_lse - lse), or 1 in rows that have no key even without the mask.
    error : CuPy float64 array of shape ()
        Frobenius norm of the change of o, divided by the norm of o.
    """
    results = o, lse, kept_o, kept_lse

    def make() -> _Allocating:
        of_results = (lse.shape, lse.dtype), ((), np.dtype(np.float64))
        names = *COMPARED, "mass", "error"
        return _Allocating(comparing(o.shape, o.dtype), of_results, gpu.current_target(), names)

    compare: _Allocating = CALLS.get_or_make(("compare", layout_key(*results)), make)
    mass, error = compare(list(map(compare.address, results)), ())
    return mass, error


def bound_row_sums(arrays: Sequence[Sequence[Array]], table: Array, target: gpu.Gpu) -> BoundPass:
    """Return the kernel that writes rows of two arrays as sums of rows.

    It takes the addresses of the own and received terms of both arrays, of the table, and of both arrays.

    Parameters
    ----------
    arrays : sequence of (CuPy array, CuPy array, CuPy array)
        For each of the two arrays [..., heads, rows, columns]: the array, its own terms, and its received terms. Terms
        have the dtype of the array or are accumulators. Rows are dense, and so are batch axes, one to the other.
    table : int32 CuPy array [rows, 1 + terms]
        A row that is written, and its terms in order: own rows, then received rows after all own ones, -1 for none.
    target : Gpu
        The device; the kernel is compiled immediately.
    """
    to, own, _ = arrays[0]
    matrices = prod(to.shape[:-3]), to.shape[-3]
    layouts = [
        {f"{name}_strides": _matrix_strides(each) for name, each in zip(("to", "own", "received"), parts)}
        | {"num_columns": parts[0].shape[-1]}
        for parts in arrays
    ]
    is_wide = own.dtype != to.dtype
    return bound_kernel(adding_rows(layouts, to.dtype, matrices, table.shape, own.shape[-2], is_wide), target)


def _matrix_strides(array: Array) -> tuple[int, int]:
    """Return the strides of batch entries and of heads, in elements."""
    batch, head, *_ = (0, *(step // array.dtype.itemsize for step in array.strides))[-4:]
    return batch, head
