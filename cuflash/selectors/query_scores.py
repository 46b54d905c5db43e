"""The choice of blocks by a kernel that scores them for each query, without an array of scores."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..executors import gpu
from ..executors._layout_key import layout_key
from ..executors.selecting import launched
from ..masks import ChosenBlocks
from ..planning.device import DeviceSpec
from ..planning.list_kernels import AT_CALL
from ..planning.query_scores import QueryChoice
from .budget import Budget, Forced
from .by_query import GROUP, length_within
from .grid import Grid


class RunKeys(NamedTuple):
    """Keys that each represent a run of keys.

    Attributes
    ----------
    keys : array [..., num_kv_heads, runs, head_dim]
        In the dtype of q.
    step, length : int
        Under a causal mask, a query sees key n if it attends key n * step + length - 1.
    parts : (int, int)
        Number of parts, each of `step` keys, in a run and in a block.
    lse : array [..., num_heads, seqlen_q], optional
        The lse of the scores of all runs.
    """

    keys: Array
    step: int
    length: int
    parts: tuple[int, int]
    lse: Array | None = None


def chosen_by_kernel(
    grid: Grid, runs: RunKeys, budget: Budget, forced: Forced, executor: str, *, share: str, is_past_only: bool = False,
) -> ChosenBlocks | None:  # fmt: skip
    """Choose blocks for each query by a kernel; return None if block_q is not 1, or if no kernel supports the call.

    Parameters
    ----------
    grid : Grid
    runs : RunKeys
    budget : Budget
    forced : Forced
    executor : str
        As in `pooled`.
    share : "query" or "group"
        As in `pooled`.
    is_past_only : bool
        Under a causal mask, blocks that end after a query are kept only if they are forced.
    """
    length = length_within(grid, budget, forced)
    is_on_device = grid.xp is not np
    if length is None or str(executor) not in (("auto", "gpu", "sim") if is_on_device else ("sim",)):
        return None
    if 0 in (*runs.keys.shape, *grid.heads, *grid.size) or runs.keys.dtype != grid.q.dtype:
        return None
    group = grid.shape.num_heads // grid.k.shape[-3] if grid.has_heads else 1
    heads = group if share == GROUP else 1
    rule = replace(
        grid.rule(budget, forced), list_length=length, is_past_only=is_past_only and grid.is_causal,
        is_causal=grid.is_causal,
    )  # fmt: skip
    choice = QueryChoice(
        rule=rule, scale=grid.scale, step=runs.step, length=runs.length, parts=runs.parts, heads_of_list=heads,
        sums_weights=heads > 1 or runs.parts != (1, 1) or budget.mass is not None or budget.threshold is not None,
        has_shares=budget.mass is not None,
    )  # fmt: skip
    device = DeviceSpec.gpu("H100") if executor == "sim" else gpu.current_device()
    if not choice.is_served(grid.q, runs.keys.shape[-2], device):
        return None
    num_lists = (grid.shape.num_heads // heads,) if grid.has_heads else ()
    lists = grid.xp.empty((*grid.shape.batch, *num_lists, grid.size[0], length), np.int32)
    arrays = {"q": grid.q, "k": runs.keys, AT_CALL: lists} | ({} if runs.lse is None else {"lse": runs.lse})
    kernels = choice.kernels(grid.q, runs.keys, runs.lse, grid.shape.batch, device.tile_memory_bytes)
    launched(kernels, arrays, (choice, layout_key(*arrays.values())), executor)
    return ChosenBlocks(lists, grid.block[1])
