"""Kernels of selectors: they compute means of rows and scores of blocks, and choose blocks within a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import e, log2, prod
from typing import NamedTuple

import numpy as np

from ..arrays import Array, accumulator_dtype
from .launches import BATCH, BATCH_AXES, BATCH_STRIDES, POINTER, Pass, Value, over_batch, structure
from .spec import SIMT, Entry, KernelSpec, untiled

# The following records mirror `kernels_cu/lists/selection.cuh`.
_OF_CHOICE = ("scores", "shares", "allowed", "forced", "kept")  # arrays of the record CHOICE
CHOICE = structure(
    (POINTER, *_OF_CHOICE),
    (np.float64, "mass", "threshold"),
    (np.int64, "offset"),
    (np.int32, "num_rows", "num_q_blocks", "num_kv_blocks", "seqlen_q", "block_q", "block_kv", "count"),
    (np.int32, "has_threshold", "is_causal", "num_sinks", "num_local", "has_diagonal", "keeps_places", "keeps_bits"),
    (np.int32, "most", "list_length", "is_past_only"),
)
CHOICES = structure((CHOICE, "first", "second"))
STRIDED_ROWS = structure(
    (POINTER, "data"), (BATCH_STRIDES, "batch_strides"), (np.int64, "head_stride", "row_stride", "column_stride")
)
POOLED_ROWS = structure(
    (POINTER, "data", "means"),
    (BATCH_STRIDES, "batch_strides"),
    (np.int64, "head_stride", "row_stride", "column_stride"),
    (BATCH, "batch"),
    (np.int32, "num_heads", "num_rows", "num_columns", "block", "num_blocks"),
)
POOLING = structure((POOLED_ROWS, "q", "k"), (np.int64, "num_thread_blocks_of_q"))
SPREAD = structure(
    (POINTER, "masses", "scores"),
    (np.int32, "num_groups", "group_size", "num_q_blocks", "num_kv_blocks", "num_compressed", "num_parts"),
    (np.int32, "parts_of_block", "padding"),
)
SLASH_SUMS = structure(
    (POINTER, "scores", "runs", "of_keys", "of_distances"),
    (np.int64, "first_diagonal_key"),
    (np.int32, "num_matrices", "num_rows", "num_keys", "num_distances", "num_runs", "padding"),
)
CROSSINGS = structure((POINTER, "chosen", "kept"), (CHOICE, "grid"), (np.int32, "seqlen_kv", "num_distances"))
KEY_SCORES = structure(
    (STRIDED_ROWS, "q", "k"),
    (POINTER, "scores", "runs"),
    (np.float64, "scale_log2"),
    (np.int64, "first_diagonal_key"),
    (BATCH, "batch"),
    (np.int32, "num_heads", "group_size", "num_rows", "num_keys", "num_columns", "is_causal", "padding"),
)
PAGE_BOUNDS = structure(
    (STRIDED_ROWS, "q", "k"),
    (POINTER, "bounds"),
    (np.int64, "num_bounds"),
    (BATCH, "batch"),
    (np.int32, "num_heads", "group_size", "num_queries", "num_keys", "num_columns", "num_pages", "page_size"),
)
DRAW = structure((np.uint64, "numbers", "num_cells", "seed"))
_WARPS = 4
# (queries, keys, columns of a tile, warps) of some kernels; other kernels have no tile, and `_WARPS` warps.
_SIZES = {"choose_wide": (0, 0, 0, 32), "key_scores": (64, 64, 32, _WARPS), "slash_sums": (64, 0, 0, 32)}
_ROOM = 48 << 10  # bytes of shared memory that a thread block can use on every chip
_SUM_BYTES = 8  # bytes of a warp's sum, if a whole thread block works on one row
# Each row with more than _WIDE columns gets a thread block if there are at most _FEW rows; see `ChoiceRule.kernels`.
_WIDE, _FEW = 1024, 256


def selection_spec(entry: str, dtype: np.dtype[np.generic]) -> KernelSpec:
    """Return a kernel; `dtype` is that of rows for "pool", "page_bounds" and "key_scores", else of accumulators."""
    block_q, block_kv, head_dim, num_warps = _SIZES.get(entry, (0, 0, 0, _WARPS))
    spec = untiled(Entry(family="lists", name=entry, runs_as=SIMT), dtype, num_warps)
    return replace(spec, head_dim=head_dim, block_q=block_q, block_kv=block_kv)


@dataclass(frozen=True, kw_only=True)
class ChoiceRule:
    """The rule that chooses blocks in each row of a grid, given their scores.

    Attributes
    ----------
    lengths : (int, int)
        Numbers of queries and keys.
    block : (int, int)
        Queries and keys of a block.
    offset : int
        The diagonal consists of query i and key i + offset.
    is_causal : bool
        Blocks after the last diagonal block of a row are not allowed.
    count : int
        Minimum number of kept blocks.
    mass : float
        Minimum fraction of the sum of all shares that kept blocks must reach; 0 for no minimum.
    threshold : float or None
        Minimum score of blocks that are kept regardless of other rules.
    num_sinks, num_local : int
        Numbers of blocks that are kept at the start of the keys, and up to and including the last diagonal block.
    has_diagonal : bool
        Blocks with a diagonal key are kept.
    most : int
        Maximum number of kept blocks; 0 for no maximum.
    list_length : int
        Entries of each row's list of block numbers; 0 if booleans mark the kept blocks.
    is_past_only : bool
        Blocks that end after the last query of a row are kept only if they are forced.
    """

    lengths: tuple[int, int]
    block: tuple[int, int]
    offset: int
    is_causal: bool
    count: int
    mass: float
    threshold: float | None
    num_sinks: int
    num_local: int
    has_diagonal: bool
    most: int = 0
    list_length: int = 0
    is_past_only: bool = False

    def kernels(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], room: int = _ROOM) -> Pass:
        """Return the launch for scores of a shape [..., rows, columns].

        The kernel traverses a row at least 33 times, with about 6 instructions per 32 columns if their sort keys are in
        shared memory. A single warp executes them one after another, but many warps share a multiprocessor. With a
        thread block of 32 warps per row, each warp needs about 30 more instructions per traversal to add up counts, the
        cost of 160 columns. By this estimate, one thread block per row is faster from about 1024 columns, as long as
        there are too few rows to fill a GPU with warps: up to 256.

        Parameters
        ----------
        shape : tuple of int
        dtype : numpy.dtype
            Dtype of scores: float32 or float64.
        room : int
            Bytes of shared memory per thread block for sort keys; if these do not fit, the kernel recomputes them.

        Returns
        -------
        Pass
            It takes the arrays scores, shares, allowed, forced and kept; `kept` holds booleans or int32 lists.
        """
        if shape[-1] > _WIDE and prod(shape[:-1]) <= _FEW:
            return wide_choosing((self,), (shape,), dtype, room)
        places = 4 * _WARPS * shape[-1]
        fits = places <= _ROOM
        return Pass.of_kernel(
            selection_spec("choose", dtype), -(-prod(shape[:-1]) // _WARPS), CHOICE, self.numbers(shape, fits),
            reads=_OF_CHOICE[:-1], writes=("kept",), row_bytes=places if fits else 0,
        )  # fmt: skip

    def numbers(self, shape: tuple[int, ...], keeps_places: bool, *, keeps_bits: bool = False) -> dict[str, Value]:
        *_, num_q_blocks, num_kv_blocks = shape
        return {
            "mass": self.mass, "threshold": self.threshold or 0.0, "offset": self.offset,
            "num_rows": prod(shape[:-1]), "num_q_blocks": num_q_blocks, "num_kv_blocks": num_kv_blocks,
            "seqlen_q": self.lengths[0], "block_q": self.block[0], "block_kv": self.block[1],
            "count": min(self.count, num_kv_blocks), "has_threshold": self.threshold is not None,
            "is_causal": self.is_causal, "num_sinks": min(self.num_sinks, num_kv_blocks),
            "num_local": min(self.num_local, np.iinfo(np.int32).max), "has_diagonal": self.has_diagonal,
            "keeps_places": keeps_places, "keeps_bits": keeps_bits, "most": min(self.most, num_kv_blocks),
            "list_length": self.list_length, "is_past_only": self.is_past_only,
        }  # fmt: skip


def wide_choosing(
    rules: Sequence[ChoiceRule], shapes: Sequence[tuple[int, ...]], dtype: np.dtype[np.generic], room: int = _ROOM
) -> Pass:
    """Return the launch that chooses blocks in one or two grids, with one thread block per row.

    Parameters
    ----------
    rules : one or two ChoiceRule
    shapes : tuple of int for each rule
        [..., rows, columns]
    dtype, room
        As in `ChoiceRule.kernels`.

    Returns
    -------
    Pass
        It takes the arrays that `ChoiceRule.kernels` names, and for a second grid scores_2, shares_2, allowed_2 and
        forced_2. With two grids, kept has one bit per block instead of one byte, lowest bit first. Each grid takes
        `num_words` words, and the second grid comes after the first.
    """
    spec, numbers, names = selection_spec("choose_wide", dtype), dict[str, Value](), dict[str, str]()
    of_sums = most = _SUM_BYTES * spec.num_warps
    for part, suffix, rule, shape in zip(("first", "second"), ("", "_2"), rules, shapes):
        needed = of_sums + 4 * shape[-1]
        numbers[part] = rule.numbers(shape, needed <= room, keeps_bits=len(rules) == 2)
        most = max(most, needed if needed <= room else 0)
        names |= {f"{part}.{name}": name + suffix for name in _OF_CHOICE[:-1]} | {f"{part}.kept": "kept"}
    return Pass.of_kernel(
        spec, sum(prod(shape[:-1]) for shape in shapes), CHOICES, numbers,
        reads=tuple(name for name in names.values() if name != "kept"), writes=("kept",), names=names,
        starts={"second.kept": 4 * num_words(shapes[0])} if len(rules) == 2 else {}, row_bytes=most,
    )  # fmt: skip


def num_words(shape: tuple[int, ...]) -> int:
    """Return the number of 32-bit words that hold one bit per column; each row starts at a new word."""
    return prod(shape[:-1]) * -(-shape[-1] // 32)


def pooling(arrays: tuple[Array, Array], block: tuple[int, int]) -> Pass:
    """Return the launch that computes means of blocks of rows; it takes the arrays q, means_of_q, k and means_of_k.

    Parameters
    ----------
    arrays : (q, k)
        Arrays [*batch, heads, rows, columns], or without batch and heads. Only their layouts are read.
    block : (int, int)
        Rows of a block of q, and of k.
    """
    numbers, names, grids = dict[str, Value](), dict[str, str](), []
    for name, array, side in zip("qk", arrays, block):
        shape = (1,) * max(BATCH_AXES + 3 - array.ndim, 0) + tuple(array.shape)
        steps = (0,) * (len(shape) - array.ndim) + tuple(step // array.dtype.itemsize for step in array.strides)
        num_blocks = -(-shape[-2] // side)
        grids.append(prod(shape[:-2]) * num_blocks)
        numbers[name] = {
            "batch_strides": steps[:-3], **_strides(steps), "batch": shape[:-3], "num_heads": shape[-3],
            "num_rows": shape[-2], "num_columns": shape[-1], "block": side, "num_blocks": num_blocks,
        }  # fmt: skip
        names |= {f"{name}.data": name, f"{name}.means": f"means_of_{name}"}
    return Pass.of_kernel(
        selection_spec("pool", arrays[0].dtype), sum(grids), POOLING, numbers | {"num_thread_blocks_of_q": grids[0]},
        reads=("q", "k"), writes=("means_of_q", "means_of_k"), names=names,
    )  # fmt: skip


def _strides(steps: tuple[int, ...]) -> dict[str, int]:
    """Return the strides of heads, rows and columns by the names of their fields."""
    return {f"{axis}_stride": step for axis, step in zip(("head", "row", "column"), steps[-3:])}


class Rows(NamedTuple):
    """The layout of an array of rows, without its data.

    Attributes
    ----------
    shape : tuple of int
    strides : tuple of int
        Strides in bytes.
    dtype : numpy.dtype
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def runs_of_rows(array: Array, length: int, stride: int) -> Rows:
    """Return the layout [..., runs, length, columns] of the runs that start at every `stride`-th row of an array."""
    *over, num_rows, num_columns = array.shape
    *steps, row_step, column_step = array.strides
    count = (num_rows - length) // stride + 1
    return Rows((*over, count, length, num_columns), (*steps, row_step * stride, row_step, column_step), array.dtype)


def spreading(
    mass_shape: tuple[int, ...], num_kv_blocks: int, group_size: int, parts: tuple[int, int],
    dtype: np.dtype[np.generic],
) -> Pass:
    """Return the launch that turns masses of compressed keys into block scores; it takes the arrays masses and scores.

    Parameters
    ----------
    mass_shape : tuple of int
        [..., heads, rows, compressed keys], or without heads.
    num_kv_blocks : int
        Blocks per row.
    group_size : int
        Number of neighboring heads that share their scores.
    parts : (int, int)
        Number of parts of keys that a compressed key covers, and number of parts per block.
    dtype : numpy.dtype
        Dtype of masses and scores.
    """
    *heads, num_q_blocks, num_compressed = mass_shape
    num_groups = prod(heads) // group_size
    numbers = {
        "num_groups": num_groups, "group_size": group_size, "num_q_blocks": num_q_blocks,
        "num_kv_blocks": num_kv_blocks, "num_compressed": num_compressed, "num_parts": parts[0],
        "parts_of_block": parts[1],
    }  # fmt: skip
    num_cells = num_groups * num_q_blocks * num_kv_blocks
    return _pass_of_threads("spread", dtype, SPREAD, numbers, num_cells, reads=("masses",), writes=("scores",))


def key_scoring(
    q: Array | Rows, k: Array | Rows, batch: tuple[int, ...], scale: float, first_diagonal_key: int | None,
    first_row: int = 0,
) -> Pass:  # fmt: skip
    """Return the launch that scores single keys; it takes the arrays q, k, scores and runs.

    Parameters
    ----------
    q, k : arrays or Rows
        Only their layouts are read.
    batch : tuple of int
        The shape that the leading axes of q and k broadcast to.
    scale : float
        The softmax scale.
    first_diagonal_key : int or None
        The last key (possibly out of range) that the first query attends to under a causal mask; None without a mask.
    first_row : int
        The row of q that is the first query.
    """
    num_rows, num_keys = q.shape[-2] - first_row, k.shape[-2]
    num_matrices, numbers = layout_of_rows(q, k, batch)
    numbers |= {
        "scale_log2": scale * log2(e), "first_diagonal_key": first_diagonal_key or 0, "num_rows": num_rows,
        "num_keys": num_keys, "is_causal": first_diagonal_key is not None,
    }  # fmt: skip
    spec = selection_spec("key_scores", q.dtype)
    pitch = spec.head_dim + 16 // spec.accumulator.itemsize  # each row of a tile is padded by 16 bytes
    return Pass.of_kernel(
        spec, num_matrices * -(-num_rows // spec.block_q) * num_key_runs(num_keys), KEY_SCORES, numbers,
        reads=("q", "k"), writes=("scores", "runs"), names=_OF_ROWS, starts={"q.data": first_row * q.strides[-2]},
        row_bytes=(spec.block_q + spec.block_kv) * pitch * spec.accumulator.itemsize,
    )  # fmt: skip


def num_key_runs(num_keys: int) -> int:
    """Return the number of runs of keys over which the kernel "key_scores" sums exponentials."""
    return -(-num_keys // _SIZES["key_scores"][1])


def slash_summing(
    score_shape: tuple[int, ...], first_diagonal_key: int, num_distances: int, dtype: np.dtype[np.generic]
) -> Pass:
    """Return the launch that sums masses by key and by distance.

    It takes the arrays scores, runs, of_keys and of_distances.

    Parameters
    ----------
    score_shape : tuple of int
        [..., rows, keys]
    first_diagonal_key : int
        The key (possibly out of range) at distance 0 from the first row.
    num_distances : int
        Number of distances, starting at 0.
    dtype : numpy.dtype
        Dtype of scores and sums.
    """
    *heads, num_rows, num_keys = score_shape
    spec = selection_spec("slash_sums", dtype)
    numbers = {
        "first_diagonal_key": first_diagonal_key, "num_matrices": prod(heads), "num_rows": num_rows,
        "num_keys": num_keys, "num_distances": num_distances, "num_runs": num_key_runs(num_keys),
    }  # fmt: skip
    return Pass.of_kernel(
        spec, prod(heads) * -(-(num_keys + num_distances) // spec.num_threads), SLASH_SUMS, numbers,
        reads=("scores", "runs"), writes=("of_keys", "of_distances"),
        row_bytes=2 * spec.block_q * dtype.itemsize,
    )  # fmt: skip


def crossing(rule: ChoiceRule, shape: tuple[int, ...]) -> Pass:
    """Return the launch that keeps all blocks with a chosen key or distance; it takes the arrays chosen and kept.

    Parameters
    ----------
    rule : ChoiceRule
        Its budget is ignored.
    shape : tuple of int
        [..., rows, columns], in blocks.
    """
    numbers: dict[str, Value] = {
        "grid": rule.numbers(shape, False), "seqlen_kv": rule.lengths[1],
        "num_distances": num_distances(rule.lengths[0], rule.offset),
    }  # fmt: skip
    dtype = np.dtype(np.float32)  # unused, since the kernel reads no scores
    return _pass_of_threads("crossings", dtype, CROSSINGS, numbers, prod(shape), reads=("chosen",), writes=("kept",))


def page_bounding(q: Array | Rows, k: Array | Rows, batch: tuple[int, ...], page_size: int) -> Pass:
    """Return the launch that computes upper bounds of pages' scores; it takes the arrays q, k and bounds.

    Parameters
    ----------
    q, k : arrays or Rows
        Only their layouts are read.
    batch : tuple of int
        The shape that the leading axes of q and k broadcast to.
    page_size : int
        Keys per page.
    """
    num_pages = -(-k.shape[-2] // page_size)
    num_matrices, numbers = layout_of_rows(q, k, batch)
    num_bounds = num_matrices * q.shape[-2] * num_pages
    numbers |= {
        "num_queries": q.shape[-2], "num_keys": k.shape[-2], "num_pages": num_pages, "page_size": page_size,
        "num_bounds": num_bounds,
    }  # fmt: skip
    return Pass.of_kernel(
        selection_spec("page_bounds", q.dtype), -(-num_bounds // _WARPS), PAGE_BOUNDS, numbers, reads=("q", "k"),
        writes=("bounds",), names=_OF_ROWS,
    )  # fmt: skip


_OF_ROWS = {"q.data": "q", "k.data": "k"}


def layout_of_rows(q: Array | Rows, k: Array | Rows, batch: tuple[int, ...]) -> tuple[int, dict[str, Value]]:
    """Return the number of (batch, head) pairs, and the fields of a record that describe the layouts of q and k."""
    sizes = over_batch(batch, 1)
    num_heads, kv_heads = (array.shape[-3] if array.ndim > 2 else 1 for array in (q, k))
    numbers: dict[str, Value] = {
        "batch": sizes, "num_heads": num_heads, "group_size": num_heads // kv_heads, "num_columns": q.shape[-1]
    }  # fmt: skip
    for name, array in (("q", q), ("k", k)):
        missing = (0,) * (BATCH_AXES + 3 - array.ndim)
        steps = missing + tuple(step // array.dtype.itemsize for step in array.strides)
        extents = missing + tuple(array.shape)
        over = tuple(step if extent == size else 0 for step, extent, size in zip(steps, extents, sizes))
        numbers[name] = {"batch_strides": over, **_strides(steps)}
    return prod(sizes) * num_heads, numbers


def num_distances(seqlen_q: int, offset: int) -> int:
    """Return the number of distances, starting at 0, between queries and the keys at or before their positions."""
    return seqlen_q + offset


def _pass_of_threads(
    entry: str, dtype: np.dtype[np.generic], layout: np.dtype[np.generic], numbers: Mapping[str, Value],
    num_threads: int, *, reads: tuple[str, ...], writes: tuple[str, ...],
) -> Pass:  # fmt: skip
    """Return a launch of `num_threads` threads."""
    spec = selection_spec(entry, dtype)
    return Pass.of_kernel(spec, -(-num_threads // spec.num_threads), layout, numbers, reads=reads, writes=writes)


def drawing(shape: tuple[int, ...], seed: int) -> Pass:
    """Return the launch that draws a random number for each cell; it takes the array numbers."""
    dtype, numbers = np.dtype(np.float32), {"num_cells": prod(shape), "seed": seed % (1 << 64)}
    return _pass_of_threads("draw", dtype, DRAW, numbers, prod(shape), reads=(), writes=("numbers",))


def means_shape(shape: tuple[int, ...], side: int) -> tuple[int, ...]:
    """Return the shape of the means of blocks of `side` rows."""
    return (*shape[:-2], -(-shape[-2] // side), shape[-1])


def every_selection_spec(dtypes: tuple[np.dtype[np.generic], ...]) -> set[KernelSpec]:
    """Return the specifications of all kernels for arrays of these dtypes."""
    of_masses = ("choose", "choose_wide", "spread", "slash_sums")
    choosing = {selection_spec(entry, accumulator_dtype(dtype)) for entry in of_masses for dtype in dtypes}
    of_none = {selection_spec(entry, np.dtype(np.float32)) for entry in ("draw", "crossings")}
    of_rows = {selection_spec(entry, dtype) for entry in ("pool", "page_bounds", "key_scores") for dtype in dtypes}
    return choosing | of_none | of_rows
