"""The choice of a cache's pages by the least and greatest keys that the cache keeps for each page."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import Array, accumulator_dtype, namespace
from ..cache.bounded_pages import BoundedPages
from ..executors import gpu
from ..executors.launch import BoundPass
from ..executors.selecting import Lists, Selection
from ..masks import ChosenBlocks, MaskShape
from ..planning._call_cache import CALLS
from ..planning.list_kernels import AT_CALL
from ..planning.page_choice import page_choosing
from . import bound
from .budget import Budget, Forced
from .by_query import GROUP, Estimate, kept_blocks, length_within, lists_of
from .grid import Grid

_BOTTOM_RIGHT = "bottom_right"


def chosen_pages(
    q: Array, pages: BoundedPages, *, budget: Budget, forced: Forced, causal: bool | str, scale: float | None,
    share: str, reasons: list[str],
) -> ChosenBlocks:  # fmt: skip
    """Choose pages of each sequence for queries [batch, heads, queries, dim] of a cache by bounds of their scores.

    Parameters
    ----------
    q : array
    pages : BoundedPages
    budget, forced, causal, scale, share
        As in `quest`.
    reasons : list of str
        Reasons to refuse other arguments.

    Raises
    ------
    UnsupportedProblem
        For the same reasons as in `quest`.
    """
    key = bound.key_of(
        "pages", q, pages.key_bounds, id(pages.owner), budget, forced, causal, None, None, scale, "auto", share
    )
    selection: Selection | None = None if reasons else CALLS.get(key)
    if selection is not None and not q.data.ptr % q.dtype.itemsize:
        chosen: ChosenBlocks = selection(q, pages.key_bounds)
        return chosen
    size, xp = pages.layout.page_size, namespace(pages.key_bounds)
    # Placeholder keys for the longest possible sequence, which give the grid the right number of blocks.
    kv_heads, dim = pages.key_bounds.shape[1], pages.key_bounds.shape[3]
    keys = xp.broadcast_to(xp.zeros((1,), pages.key_bounds.dtype), (q.shape[0], kv_heads, pages.layout.capacity, dim))
    grid = Grid.of(q, keys, (1, size), {"budget": budget}, forced, causal, None, None, scale, reasons)
    length = length_within(grid, budget, forced)
    assert length is not None
    if scale is None:
        grid = replace(grid, scale=1.0)
    is_bottom_right = isinstance(causal, str) and causal == _BOTTOM_RIGHT
    if xp is not np:
        return _on_device(grid, pages, budget, forced, share, length, is_bottom_right, key)
    lists = [
        _of_sequence(grid, pages, sequence, budget, forced, share, length, is_bottom_right)
        for sequence in range(q.shape[0])
    ]
    return ChosenBlocks(np.stack(lists), size)


def _of_sequence(
    grid: Grid, pages: BoundedPages, sequence: int, budget: Budget, forced: Forced, share: str, length: int,
    is_bottom_right: bool,
) -> Any:  # fmt: skip
    """Return the lists of the queries of a sequence, int32 [lists, queries, length]."""
    num_queries, num_keys = grid.shape.seqlen_q, int(pages.lengths[sequence])
    one = replace(
        grid, q=grid.q[sequence], k=grid.k[sequence, :, :num_keys],
        shape=MaskShape((), grid.shape.num_heads, num_queries, num_keys),
        offset=num_keys - num_queries if is_bottom_right else 0,
    )  # fmt: skip
    wide = accumulator_dtype(grid.q.dtype)
    bounds = pages.key_bounds[pages.table[sequence, : one.size[1]]].astype(wide)
    least, greatest = (one.of_query_heads(bounds[:, :, side].swapaxes(0, 1)) for side in range(2))
    q = (one.q.astype(wide) * wide.type(grid.scale))[..., :, None, :]
    scores = np.maximum(q * least[..., None, :, :], q * greatest[..., None, :, :]).sum(axis=-1)
    lists = np.full((scores.shape[0] if share != GROUP else bounds.shape[1], num_queries, length), -1, np.int32)
    own = lists_of(kept_blocks(one, Estimate(scores, None), budget, forced, share, "max"), length)
    lists[..., : own.shape[-1]] = own
    return lists


def _on_device(
    grid: Grid, pages: BoundedPages, budget: Budget, forced: Forced, share: str, length: int, is_bottom_right: bool,
    key: Hashable,
) -> ChosenBlocks:  # fmt: skip
    """Bind the kernels, cache them under a key unless it is None, and return the lists of the queries."""
    target, kv_heads = gpu.current_target(), pages.key_bounds.shape[1]
    heads_of_list = grid.shape.num_heads // kv_heads if share == GROUP else 1
    kernels = page_choosing(
        grid.q, pages.key_bounds, pages.layout, replace(grid.rule(budget, forced), list_length=length),
        heads_of_list=heads_of_list, is_bottom_right=is_bottom_right, scale=grid.scale,
    )  # fmt: skip
    gpu.compile_kernels(kernels.specs.values(), target)
    arrays = {"key_bounds": pages.key_bounds, "table": pages.table, "lengths": pages.lengths}
    launches = BoundPass.of(kernels, arrays, ("q", AT_CALL), target)
    shape = grid.shape.num_batch, grid.shape.num_heads // heads_of_list, grid.shape.seqlen_q, length
    selection = Selection([(launches, {})], {}, Lists.of_queries(shape, grid.block[1], target), target)
    if key is not None:
        CALLS.put(key, selection, pages.owner)
    chosen: ChosenBlocks = selection(grid.q, pages.key_bounds)
    return chosen
