"""Lists of the blocks that each query chooses for itself, and the choice by a budget that all selectors share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from ..arrays import Array, describe, namespace
from ..blocks.index import BlockIndex
from ..errors import UnsupportedProblem
from ..masks import Band, ChosenBlocks, MaskShape
from .budget import Budget, Forced
from .grid import Grid
from .masked import row_steps

GROUP, QUERY = "group", "query"  # values of share=


class Estimate(NamedTuple):
    """Estimates of the blocks of a grid.

    Attributes
    ----------
    scores : array [*heads, rows, columns]
        Blocks with higher scores come first.
    shares : array with the shape of `scores`, optional
        The mass of each block; None if all blocks have equal weight.
    extra : bool array that broadcasts against the scores, optional
        Blocks that must be kept in addition to the forced ones.
    allowed : bool array that broadcasts against the scores, optional
        The blocks that may be kept, if fewer than the masks allow.
    """

    scores: Array
    shares: Array | None
    extra: Array | None = None
    allowed: Array | None = None


Estimates = Callable[[Grid], Estimate]


def selected(
    grid: Grid, budget: Budget, forced: Forced, estimate: Estimates, *, share: str = QUERY, by: str = "sum",
    has_extra: bool = False, columns: int = 1,
) -> BlockIndex | ChosenBlocks:  # fmt: skip
    """Choose blocks by a budget; return their index or, if blocks have one query, a list of blocks for each query.

    If blocks have one query, and the caller passes no mask, a few rows are estimated at a time, so that no array has an
    element for each query and block.

    Parameters
    ----------
    grid : Grid
    budget : Budget
    forced : Forced
    estimate : callable
        Estimates the blocks of a grid, which is `grid` or some of its rows.
    share : "query" or "group"
        "query": each query head chooses its own blocks. "group": the heads that share a key/value head choose together.
    by : "sum" or "max"
        How the scores of the heads of a group are combined.
    has_extra : bool
        True if estimates have `extra` blocks.
    columns : int
        Number of array elements per query and block that an estimate needs.
    """
    length = length_within(grid, budget, forced, has_extra)
    if length is None:
        blocks = kept_blocks(grid, estimate(grid), budget, forced, share, by)
        return grid.index(blocks if share == QUERY else grid.of_query_heads(blocks))
    rows = [
        lists_of(kept_blocks(piece, estimate(piece), budget, forced, share, by), length)
        for piece in _pieces(grid, columns)
    ]
    return ChosenBlocks(rows[0] if len(rows) == 1 else grid.xp.concatenate(rows, axis=-2), grid.block[1])


def result(grid: Grid, blocks: Array, length: int | None) -> BlockIndex | ChosenBlocks:
    """Return the index of the kept blocks, or their lists if `length` is not None."""
    return grid.index(blocks) if length is None else ChosenBlocks(lists_of(blocks, length), grid.block[1])


def kept_blocks(
    grid: Grid, estimate: Estimate, budget: Budget, forced: Forced, share: str = QUERY, by: str = "sum"
) -> Array:
    """Return which blocks are kept, bool [*heads, rows, columns]; the heads are key/value heads if share="group"."""
    if share == QUERY:
        return grid.chosen(estimate.scores, estimate.shares, budget, forced, estimate.extra, estimate.allowed)
    allowed = grid.eligible() if estimate.allowed is None else estimate.allowed
    scores, extra, allowed = (
        None if each is None else _of_groups(grid, each, how)
        for each, how in ((estimate.scores, by), (estimate.extra, "any"), (allowed, "any"))
    )
    shares = None if estimate.shares is None else scores
    return grid.chosen(scores, shares, budget, forced, extra, allowed)


def _of_groups(grid: Grid, x: Array, how: str) -> Array:
    """Reduce an array of query heads [..., heads or 1, rows, columns] to key/value heads."""
    if not grid.has_heads or x.ndim < 3 or x.shape[-3] != grid.shape.num_heads:
        return x
    kv_heads = grid.k.shape[-3]
    size = x.shape[-3] // kv_heads if kv_heads else 1
    reduced: Array = getattr(x.reshape(*x.shape[:-3], kv_heads, size, *x.shape[-2:]), how)(axis=-3)
    return reduced


def count_within(budget: Budget, num_blocks: int) -> int | None:
    """Return the maximum number of blocks that a row keeps, if none are forced; None if it depends on the scores.

    Examples
    --------
    >>> [count_within(budget, 10) for budget in (Budget(top_k=8), Budget(density=0.25), Budget(mass=0.5))]
    [8, 3, None]
    """
    most = num_blocks if budget.max_blocks is None else min(budget.max_blocks, num_blocks)
    if budget.top_k is None and budget.density is None:
        return None if budget.max_blocks is None else most
    return min(max(budget.top_k or ceil((budget.part or 0) * num_blocks), budget.min_blocks), most)


def list_length(grid: Grid, forced: Forced, *counts: int | None) -> int | None:
    """Return the length of each query's list for budgets that keep these numbers of blocks; None if block_q is not 1.

    Raises
    ------
    UnsupportedProblem
        A count is None, because its budget does not limit the number of blocks.
    """
    if grid.block[0] != 1:
        return None
    if None in counts:
        raise UnsupportedProblem(
            f"budget must have max_blocks, the length of each query's list, with block={grid.block} and a mass or "
            "a threshold; got None: write Budget(..., max_blocks=16)"
        )
    return min(sum(count or 0 for count in counts) + _num_forced(forced), grid.size[1])


def _num_forced(forced: Forced) -> int:
    """Return the maximum number of blocks that are forced for a query."""
    return forced.sink + max(forced.local, int(forced.diagonal))


def length_within(grid: Grid, budget: Budget, forced: Forced, has_extra: bool = False) -> int | None:
    """Return the length of each query's list, whose forced blocks count in the budget; None if block_q is not 1.

    Raises
    ------
    UnsupportedProblem
        The budget does not limit the number of blocks, or `max_blocks` is less than the number of forced blocks.
    """
    if grid.block[0] != 1:
        return None
    num_blocks, must, most = grid.size[1], _num_forced(forced), budget.max_blocks
    if most is not None and most < min(must, num_blocks):
        raise UnsupportedProblem(
            f"max_blocks must be at least {must}, the blocks that forced keeps for each query; got {most}"
        )
    if has_extra and most is None:
        raise UnsupportedProblem(
            "budget must have max_blocks, the length of each query's list, with self_similarity, which keeps any "
            "number of blocks; got None: write Budget(..., max_blocks=16)"
        )
    list_length(grid, forced, count := count_within(budget, num_blocks))
    count = most if has_extra else count
    return min(max(count or 0, must), num_blocks)


def lists_of(blocks: Array, length: int) -> Array:
    """Return the numbers of the blocks that are kept, int32 [..., length], ascending; -1 fills the rest."""
    xp, num_blocks = namespace(blocks), blocks.shape[-1]
    numbers = xp.where(blocks, xp.arange(num_blocks, dtype=np.int32), np.int32(num_blocks))
    first = xp.sort(numbers, axis=-1)[..., :length]
    return xp.where(first < num_blocks, first, np.int32(-1)).astype(np.int32)


def _pieces(grid: Grid, columns: int) -> Iterator[Grid]:
    """Yield grids of some rows each, of bounded size; the whole grid if estimates depend on the mask."""
    if grid.is_masked:
        yield grid
        return
    steps = list(row_steps(grid, grid.size[0], grid.size[1] * columns))
    if len(steps) < 2:
        yield grid
        return
    for first, stop in steps:
        offset = grid.offset + first
        piece = replace(
            grid, q=grid.q[..., first:stop, :], offset=offset, first_query=first,
            shape=MaskShape(grid.shape.batch, grid.shape.num_heads, stop - first, grid.shape.seqlen_kv),
        )  # fmt: skip
        stairs = piece.stairs(1, 1)
        yield replace(piece, mask=Band() if stairs is None else stairs)


def share_reasons(share: str) -> list[str]:
    """Return why a value of share= is refused; an empty list if it is valid."""
    if isinstance(share, str) and share in (QUERY, GROUP):
        return []
    return [f'share must be "query" or "group"; got {describe(share)}']
