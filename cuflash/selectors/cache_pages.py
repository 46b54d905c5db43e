"""The choice of a cache's pages by the least and greatest keys that the cache keeps for each page."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..arrays import Array, accumulator_dtype, namespace
from ..cache.bounded_pages import BoundedPages
from ..executors import checks, gpu
from ..executors._layout_key import layout_key
from ..executors.launch import BoundPass
from ..executors.selecting import Lists, Selection
from ..masks import ChosenBlocks, MaskShape
from ..planning._call_cache import CALLS
from ..planning.list_kernels import AT_CALL
from ..planning.options import Causality
from ..planning.page_choice import page_choosing
from .budget import Budget, Forced
from .by_query import GROUP, Estimate, kept_blocks, length_within, lists_of
from .grid import Grid

_CAUSAL, _SCALES = {bool, str}, {type(None), float, int}  # types of plain arguments


class PageOptions(NamedTuple):
    """The arguments of `quest` for pages of a cache, as the caller passed them."""

    budget: Budget
    forced: Forced
    causal: Causality
    scale: float | None
    share: str

    def key(self, q: Array, pages: BoundedPages) -> Hashable:
        """Return the key of the choice for queries of this layout; None for other than plain arguments.

        Types are checked, since 1 == True.
        """
        kinds = type(self.budget), type(self.forced), type(self.share)
        if kinds != (Budget, Forced, str) or type(self.causal) not in _CAUSAL or type(self.scale) not in _SCALES:
            return None
        layout = None if checks.is_on() else layout_key(q, pages.key_bounds)
        return None if layout is None or isinstance(q, np.ndarray) else ("pages", layout, id(pages.owner), self)

    @property
    def is_bottom_right(self) -> bool:
        return isinstance(self.causal, str) and self.causal == "bottom_right"


def chosen_again(q: Array, pages: BoundedPages, options: PageOptions) -> ChosenBlocks | None:
    """Choose as an earlier call did for queries of this layout, with launches alone; return None if there was none."""
    selection: Selection | None = CALLS.get(options.key(q, pages))
    if selection is None or q.data.ptr % q.dtype.itemsize:
        return None
    pages.table_and_lengths()
    chosen: ChosenBlocks = selection(q, pages.key_bounds)
    return chosen


def chosen_pages(q: Array, pages: BoundedPages, options: PageOptions, reasons: list[str]) -> ChosenBlocks:
    """Choose pages of each sequence for queries [batch, heads, queries, dim] of a cache by bounds of their scores.

    `reasons` are the reasons to refuse other arguments.

    Raises
    ------
    UnsupportedProblem
        For the same reasons as in `quest`.
    """
    if not reasons and (chosen := chosen_again(q, pages, options)) is not None:
        return chosen
    bounds, layout, (table, lengths) = pages.key_bounds, pages.layout, pages.table_and_lengths()
    # Keys without content, for the whole capacity: the grid has the blocks of the longest possible sequence.
    kv_heads, dim = bounds.shape[1], bounds.shape[3]
    xp = namespace(bounds)
    keys = xp.broadcast_to(xp.zeros((1,), bounds.dtype), (q.shape[0], kv_heads, layout.capacity, dim))
    budget, forced = options.budget, options.forced
    grid = Grid.of(
        q, keys, (1, layout.page_size), {"budget": budget}, forced, options.causal, None, None, options.scale, reasons
    )
    length = length_within(grid, budget, forced)
    assert length is not None
    if options.scale is None:
        grid = replace(grid, scale=1.0)
    if xp is np:
        every = [
            _of_sequence(grid, bounds[own[: -(-count // layout.page_size)]], count, sequence, options, length)
            for sequence, (own, count) in enumerate(zip(table, lengths.tolist()))
        ]
        return ChosenBlocks(np.stack(every), layout.page_size)
    target = gpu.current_target()
    heads_of_list = grid.shape.num_heads // kv_heads if options.share == GROUP else 1
    kernels = page_choosing(
        grid.q, bounds, layout, replace(grid.rule(budget, forced), list_length=length), heads_of_list=heads_of_list,
        is_bottom_right=options.is_bottom_right, scale=grid.scale, room=gpu.current_device().tile_memory_bytes,
    )  # fmt: skip
    gpu.compile_kernels(kernels.specs.values(), target)
    launches = BoundPass.of(
        kernels, {"key_bounds": bounds, "table": table, "lengths": lengths}, ("q", AT_CALL), target
    )
    shape = grid.shape.num_batch, grid.shape.num_heads // heads_of_list, grid.shape.seqlen_q, length
    selection = Selection([(launches, {})], {}, Lists.of_queries(shape, layout.page_size, target), target)
    if (key := options.key(grid.q, pages)) is not None:
        CALLS.put(key, selection, pages.owner)
    result: ChosenBlocks = selection(grid.q, bounds)
    return result


def _of_sequence(
    grid: Grid, bounds: Array, num_keys: int, sequence: int, options: PageOptions, length: int
) -> Array:  # fmt: skip
    """Return the lists of the queries of a sequence, int32 [lists, queries, length], from the bounds of its pages."""
    num_queries, wide = grid.shape.seqlen_q, accumulator_dtype(grid.q.dtype)
    one = replace(
        grid, q=grid.q[sequence], k=grid.k[sequence, :, :num_keys],
        shape=MaskShape((), grid.shape.num_heads, num_queries, num_keys),
        offset=num_keys - num_queries if options.is_bottom_right else 0,
    )  # fmt: skip
    bounds = bounds.astype(wide)
    least, greatest = (one.of_query_heads(bounds[:, :, side].swapaxes(0, 1)) for side in range(2))
    q = (one.q.astype(wide) * wide.type(grid.scale))[..., :, None, :]
    scores = np.maximum(q * least[..., None, :, :], q * greatest[..., None, :, :]).sum(axis=-1)
    blocks = kept_blocks(one, Estimate(scores, None), options.budget, options.forced, options.share, "max")
    own = lists_of(blocks, length)
    lists = np.full((*own.shape[:-1], length), -1, np.int32)
    lists[..., : own.shape[-1]] = own
    return lists
