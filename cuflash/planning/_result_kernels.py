"""Kernels that read results of attention: one merges parts over disjoint keys, one measures a mask's effect."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from .launches import POINTER, Pass, Workspace, structure
from .spec import SIMT, Entry, KernelSpec, untiled

MOST_PARTS = 128  # maximum number of parts that one launch merges
# These records mirror `kernels_cu/results/params.cuh`.
MERGE = structure(
    (structure((POINTER, *map(str, range(MOST_PARTS)))), "outs", "lses"),
    (POINTER, "o", "lse"),
    (np.int64, "num_rows"),
    (np.int32, "num_parts", "num_columns", "threads_per_row", "padding"),
)
COMPARED = ("o", "lse", "kept_o", "kept_lse")  # inputs of the kernel "compare"
COMPARISON = structure(
    (POINTER, *COMPARED, "sums", "num_arrived", "mass", "error"), (np.int64, "num_rows", "num_elements")
)
_COLUMNS = 4  # columns per thread of the kernel "merge"
_ELEMENTS, _MOST_BLOCKS = 16, 1024  # elements per thread, and maximum number of thread blocks, of the kernel "compare"
_BYTES_OF_SQUARES = 16  # size of two float64 sums


def _sum_bytes(spec: KernelSpec) -> int:
    """Return the bytes of shared memory for all warps' sums and for the flag that marks the last thread block."""
    return _BYTES_OF_SQUARES * spec.num_warps + 8


# Kernels by name, each with its number of warps per thread block.
_KERNELS = {
    "merge": (Entry(family="results", name="merge", runs_as=SIMT), 4),
    "compare": (Entry(family="results", name="compare", runs_as=SIMT, shared_bytes=_sum_bytes), 8),
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
