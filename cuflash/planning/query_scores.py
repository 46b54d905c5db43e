"""The kernel that chooses blocks for each query, by its products with keys that represent runs of keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import numpy as np

from ..arrays import Array, accumulator_dtype
from .device import DeviceSpec
from .launches import BATCH, Pass, Value, over_batch, structure
from .list_kernels import AT_CALL
from .selection_kernels import CHOICE, STRIDED_ROWS, ChoiceRule, layout_of_rows
from .spec import SM80, Entry, KernelSpec

# This record mirrors `kernels_cu/lists/query_scores.cuh`.
QUERY_SCORES = structure(
    (STRIDED_ROWS, "q", "k", "lse"),
    (CHOICE, "choice"),
    (np.float64, "scale_log2"),
    (BATCH, "batch"),
    (np.int32, "num_heads", "group_size", "heads_of_list", "num_keys", "num_columns", "step", "length", "num_parts"),
    (np.int32, "parts_of_block", "sums_weights", "has_shares", "place_columns", "queries_per_tile", "keeps_places"),
    (np.int32, "uses_lanes"),
)
_ROWS, _KEYS, _WARPS = 64, 64, 4  # rows and keys of a tile, and warps
_ROWS_OF_LANES = 16  # queries of a tile from which pairs of lanes choose, as many as a warp then has rows
_IN_REGISTERS = (1, 8, 16)  # heads of a list whose weights are summed in registers
_WIDTHS = (64, 128, 256)  # columns that the kernel is compiled for


@dataclass(frozen=True, kw_only=True)
class QueryChoice:
    """The rule by which each query chooses blocks, from its products with keys that represent runs of keys.

    Attributes
    ----------
    rule : ChoiceRule
        A rule with a `list_length` that is not 0.
    scale : float
        The softmax scale.
    step, length : int
        With a causal rule, the product with representative n counts if the query attends to key n * step + length - 1.
    parts : (int, int)
        Number of parts of keys that representative n stands for, starting with part n, and number of parts per block.
    heads_of_list : int
        Query heads that share a list: 1, or the heads of a key/value head.
    sums_weights : bool
        Scores are sums of softmax weights; otherwise they are products.
    has_shares : bool
        The scores also serve as the shares of `ChoiceRule.mass`.
    """

    rule: ChoiceRule
    scale: float
    step: int
    length: int
    parts: tuple[int, int]
    heads_of_list: int
    sums_weights: bool
    has_shares: bool

    def kernels(self, q: Array, k: Array, lse: Array, batch: tuple[int, ...], room: int) -> Pass:
        """Return the launch; it takes the arrays q, k, lse and the lists, under the name `AT_CALL`.

        Parameters
        ----------
        q, k : arrays or Rows
            Queries, and keys that represent runs. Only their layouts are read.
        lse : array or Rows, optional
            [..., heads, queries] in the accumulator's dtype.
        batch : tuple of int
            The shape to which the leading axes broadcast.
        room : int
            Maximum bytes of shared memory per thread block.
        """
        spec, rule = _spec(q.dtype, q.shape[-1]), self.rule
        num_matrices, numbers = layout_of_rows(q, k, batch)
        num_blocks = -(-rule.lengths[1] // rule.block[1])
        of_tile, num_lists = self._queries_per_tile(spec, k.shape[-2], room), num_matrices // self.heads_of_list
        choice = rule.numbers((num_lists, rule.lengths[0], num_blocks), True)
        of_lse: dict[str, Value] = {"lse": {"column_stride": 0}} if lse is None else {"lse": _layout_of_lse(lse)}
        numbers = numbers | of_lse | {
            "choice": choice, "scale_log2": self.scale * log2(e), "heads_of_list": self.heads_of_list,
            "num_keys": k.shape[-2], "step": self.step, "length": self.length, "num_parts": self.parts[0],
            "parts_of_block": self.parts[1], "sums_weights": self.sums_weights, "has_shares": self.has_shares,
            "place_columns": _place_columns(num_blocks), "queries_per_tile": of_tile,
            "keeps_places": not _reuses_keys(spec, num_blocks),
            "uses_lanes": self.parts == (1, 1) and k.shape[-2] == num_blocks and of_tile >= _ROWS_OF_LANES,
        }  # fmt: skip
        reads = ("q", "k") if lse is None else ("q", "k", "lse")
        names = {f"{name}.data": name for name in reads} | {"choice.kept": AT_CALL}
        return Pass.of_kernel(
            spec, num_lists * -(-rule.lengths[0] // of_tile), QUERY_SCORES, numbers, reads=reads, writes=(AT_CALL,),
            names=names, row_bytes=self._shared_bytes(spec, k.shape[-2], of_tile),
        )  # fmt: skip

    def is_served(self, q: Array, num_keys: int, device: DeviceSpec) -> bool:
        """True if the kernel supports the dtype, the widths, and rows of `num_keys` keys on a device."""
        if q.dtype.itemsize != 2 or not 1 <= q.shape[-1] <= _WIDTHS[-1] or self.heads_of_list > _ROWS:
            return False
        of_tile = self._queries_per_tile(_spec(q.dtype, q.shape[-1]), num_keys, device.tile_memory_bytes)
        return (device.compute_capability or (0, 0)) >= (8, 0) and of_tile > 0

    def _queries_per_tile(self, spec: KernelSpec, num_keys: int, room: int) -> int:
        """Return the queries per thread block: the most that fit, or up to a quarter fewer if two blocks then fit."""
        fixed = self._shared_bytes(spec, num_keys, 0)
        of_query = self._shared_bytes(spec, num_keys, 1) - fixed
        most = _ROWS // self.heads_of_list
        of_one, of_two = (min(most, max(0, (each - fixed) // of_query)) for each in (room, room // 2 - 1024))
        return of_two if 4 * of_two >= 3 * of_one else of_one

    def _shared_bytes(self, spec: KernelSpec, num_keys: int, num_queries: int) -> int:
        """Return the bytes of operands, weights, scores of `num_queries` queries, and sort keys of one row per warp."""
        num_blocks = -(-self.rule.lengths[1] // self.rule.block[1])
        operands = (_ROWS + 2 * _KEYS) * spec.head_dim * spec.dtype.itemsize
        weights = 4 * _ROWS * (_KEYS + 4) if self.heads_of_list not in _IN_REGISTERS else 0
        places = 0 if _reuses_keys(spec, num_blocks) else 4 * _WARPS * _place_columns(num_blocks)
        return operands + weights + places + 4 * num_queries * (-(-num_keys // 32) * 32 + 1)


def _spec(dtype: np.dtype[np.generic], width: int) -> KernelSpec:
    return KernelSpec(
        entry=Entry(family="lists", name="query_scores", runs_as=SM80), dtype=dtype,
        head_dim=next(each for each in _WIDTHS if width <= each), value_dim=0, block_q=_ROWS, block_kv=_KEYS,
        num_warps=_WARPS, min_blocks=1,
    )  # fmt: skip


def _place_columns(num_blocks: int) -> int:
    return -(-num_blocks // 32) * 32


def _reuses_keys(spec: KernelSpec, num_blocks: int) -> bool:
    """True if the sort keys of one row per warp fit in the memory of the key tiles."""
    return 4 * _WARPS * _place_columns(num_blocks) <= 2 * _KEYS * spec.head_dim * spec.dtype.itemsize


def _layout_of_lse(lse: Array) -> dict[str, Value]:
    """Return the strides of an array [..., heads, queries] as the layout of rows with one column."""
    steps = tuple(step // lse.dtype.itemsize for step in lse.strides)
    head = steps[-2] if lse.ndim > 1 else 0
    over = over_batch(steps[:-2], 0)
    return {"batch_strides": over, "head_stride": head, "row_stride": steps[-1], "column_stride": 0}


def every_query_spec(dtypes: tuple[np.dtype[np.generic], ...]) -> set[KernelSpec]:
    """Return the specifications of the kernel for arrays of these dtypes."""
    narrow = [dtype for dtype in dtypes if dtype.itemsize == 2 and accumulator_dtype(dtype).itemsize == 4]
    return {_spec(dtype, width) for dtype in narrow for width in _WIDTHS}
