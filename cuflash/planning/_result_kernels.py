"""Kernels of results: one merges parts over disjoint keys, one measures a mask's effect, and one adds rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from .launches import POINTER, Pass, Value, Workspace, structure
from .spec import SIMT, Entry, KernelSpec, untiled

MOST_PARTS = 128  # maximum number of parts that one launch merges
# These records mirror `kernels_cu/results/params.cuh`.
MERGE = structure(
    (structure((POINTER, *map(str, range(MOST_PARTS)))), "outs", "lses"),
    (POINTER, "o", "lse"),
    (np.int64, "num_rows"),
    (np.int32, "num_parts", "num_columns", "threads_per_row", "padding"),
)
ROWS = structure(
    (POINTER, "own", "received", "to"),
    (np.dtype((np.int64, 2)), "own_strides", "received_strides", "to_strides"),
    (np.int32, "num_columns", "padding"),
)
ROW_SUMS = structure(
    (structure((ROWS, "0", "1")), "arrays"),
    (POINTER, "table"),
    (np.int32, "num_rows", "num_terms", "num_own_rows", "num_heads", "num_matrices", "rows_per_block", "is_wide"),
    (np.int32, "padding"),
)
COMPARED = ("o", "lse", "kept_o", "kept_lse")  # inputs of the kernel "compare"
COMPARISON = structure(
    (POINTER, *COMPARED, "sums", "num_arrived", "mass", "error"), (np.int64, "num_rows", "num_elements")
)
_COLUMNS = 4  # columns per thread of the kernel "merge"
_ELEMENTS, _MOST_BLOCKS = 16, 1024  # elements per thread, and maximum number of thread blocks, of the kernel "compare"
_ROWS_PER_BLOCK = 64  # of the kernel "add_rows"
_BYTES_OF_SQUARES = 16  # size of two float64 sums


def _sum_bytes(spec: KernelSpec) -> int:
    """Return the bytes of shared memory for all warps' sums and for the flag that marks the last thread block."""
    return _BYTES_OF_SQUARES * spec.num_warps + 8


# Kernels by name, each with its number of warps per thread block.
_KERNELS = {
    "merge": (Entry(family="results", name="merge", runs_as=SIMT), 4),
    "compare": (Entry(family="results", name="compare", runs_as=SIMT, shared_bytes=_sum_bytes), 8),
    "add_rows": (Entry(family="results", name="add_rows", runs_as=SIMT), 8),
}


def result_spec(name: str, dtype: np.dtype[np.generic]) -> KernelSpec:
    """Return the specification of a kernel that reads results of a dtype."""
    entry, num_warps = _KERNELS[name]
    return untiled(entry, dtype, num_warps)


def every_result_spec(dtypes: tuple[np.dtype[np.generic], ...]) -> set[KernelSpec]:
    """Return the specifications of all kernels for results of these dtypes."""
    return {result_spec(name, dtype) for name in _KERNELS for dtype in dtypes}


def merging(num_parts: int, o_shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Pass:
    """Return the kernel that merges parts; it reads "outs.0", "lses.0", "outs.1" etc., and writes "o" and "lse".

    Parameters
    ----------
    num_parts : int
        At most `MOST_PARTS`.
    o_shape : tuple of int
        [..., seqlen_q, value_dim], the shape of each part.
    dtype : numpy.dtype
        Dtype of o.
    """
    spec, num_rows, num_columns = result_spec("merge", dtype), prod(o_shape[:-1]), o_shape[-1]
    threads_per_row = max(1, -(-num_columns // _COLUMNS))
    numbers = {
        "num_rows": num_rows, "num_parts": num_parts, "num_columns": num_columns, "threads_per_row": threads_per_row,
    }  # fmt: skip
    parts = tuple(f"{name}.{part}" for name in ("outs", "lses") for part in range(num_parts))
    grid = -(-num_rows * threads_per_row // spec.num_threads)
    return Pass.of_kernel(spec, grid, MERGE, numbers, reads=parts, writes=("o", "lse"))


def comparing(o_shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Pass:
    """Return the kernel that compares results with a mask to results without it.

    Parameters
    ----------
    o_shape : tuple of int
        [..., seqlen_q, value_dim]
    dtype : numpy.dtype
        Dtype of o.
    """
    spec, num_rows, num_elements = result_spec("compare", dtype), prod(o_shape[:-1]), prod(o_shape)
    needed = -(-max(num_rows, num_elements) // (spec.num_threads * _ELEMENTS))
    grid = min(max(needed, 1), _MOST_BLOCKS)
    kernels = Pass.of_kernel(
        spec, grid, COMPARISON, {"num_rows": num_rows, "num_elements": num_elements}, reads=COMPARED,
        writes=("mass", "error", "sums", "num_arrived"),
    )  # fmt: skip
    sums, arrived = Workspace((grid, 2), np.dtype(np.float64)), Workspace((1,), np.dtype(np.int32), is_zeroed=True)
    return replace(kernels, workspaces={"sums": sums, "num_arrived": arrived})


def adding_rows(
    layouts: Sequence[Mapping[str, Value]], dtype: np.dtype[np.generic], matrices: tuple[int, int],
    table_shape: tuple[int, ...], num_own_rows: int, is_wide: bool,
) -> Pass:  # fmt: skip
    """Return the kernel that writes rows of two arrays as sums of rows, from a table of their places.

    It reads "arrays.0.own", "arrays.0.received", the same of array 1, and "table", and writes "arrays.0.to" and
    "arrays.1.to".

    Parameters
    ----------
    layouts : sequence of dict
        Numbers of the record `ROWS` for both arrays: strides of batch entries and heads in elements, and columns.
    dtype : numpy.dtype
        Dtype of the arrays that are written.
    matrices : (int, int)
        Numbers of batch entries and of heads.
    table_shape : (int, int)
        [num_rows, 1 + num_terms]: a row that is written, and its terms in order; -1 for none.
    num_own_rows : int
        Terms with smaller numbers are rows of "own", and the others rows of "received".
    is_wide : bool
        Terms are accumulators; otherwise, they have `dtype`.
    """
    num_rows, num_terms, num_matrices = table_shape[0], table_shape[1] - 1, prod(matrices)
    numbers: dict[str, Value] = {
        "arrays": dict(zip("01", layouts)), "num_rows": num_rows, "num_terms": num_terms, "num_own_rows": num_own_rows,
        "num_heads": matrices[1], "num_matrices": num_matrices, "rows_per_block": _ROWS_PER_BLOCK, "is_wide": is_wide,
    }  # fmt: skip
    reads = *(f"arrays.{n}.{name}" for n in "01" for name in ("own", "received")), "table"
    return Pass.of_kernel(
        result_spec("add_rows", dtype), 2 * num_matrices * -(-num_rows // _ROWS_PER_BLOCK), ROW_SUMS, numbers,
        reads=reads, writes=("arrays.0.to", "arrays.1.to"),
    )  # fmt: skip
