"""The vertical-slash selection of MInference and FlexPrefill: whole columns and diagonals, from the last queries."""

from __future__ import annotations


import numpy as np

from ..arrays import Array, describe, Namespace, whole_number
from ..blocks.index import BlockIndex
from ..errors import UnsupportedProblem, collecting
from ..keywords import explains_keywords
from ..masks import ChosenBlocks, Dense
from ..masks.shape import BlockSize
from ..planning.options import Causality, MaskLike, Window
from ..study._masses import block_mass
from . import bound, masked
from .budget import DIAGONAL, Budget, Forced, choose
from .by_query import count_within, list_length, result
from .grid import Grid


@np.errstate(all="ignore")
@explains_keywords
def vertical_slash(
    q: Array,
    k: Array,
    *,
    budget: Budget | None = None,
    vertical: Budget | None = None,
    slash: Budget | None = None,
    block: BlockSize = (128, 128),
    forced: Forced = DIAGONAL,
    causal: Causality = False,
    mask: MaskLike | None = None,
    window: Window | None = None,
    scale: float | None = None,
    num_queries: int = 64,
    executor: str = "auto",
) -> BlockIndex | ChosenBlocks:
    """Choose columns and diagonals that the last queries attend, and keep the blocks that they cross.

    Parameters
    ----------
    q, k : arrays
        As in `attention`.
    budget : Budget, optional
        The total number of keys and diagonals to keep: half of them keys and half diagonals, at least one of each. Half
        of an odd `top_k` is rounded up for keys. A threshold applies to both.
    vertical, slash : Budget, optional
        The numbers of keys and of diagonals to keep, instead of half of `budget` each. A diagonal is the set of
        elements with the same distance, at least 0, between query and key.
    block : int or (int, int)
        Sides block_q and block_kv in tokens. If block_q is 1, each query has its own list of blocks.
    forced : Forced
        Blocks that are always kept.
    causal, mask, window, scale : optional
        As in `attention`; the index applies them, and masked queries and keys do not affect the estimates.
    num_queries : int
        Number of queries over which weights are summed: the last ones that attend a key, or all if there are fewer.
    executor : {"auto", "cpu", "gpu", "sim"}
        As in `block_mass`, which computes the products.

    Returns
    -------
    BlockIndex, or ChosenBlocks if block_q is 1
        As `pooled` returns it.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`, or because an option of the selector is out of range.

    Notes
    -----
    MInference, arXiv 2407.02490, algorithm 2, with ``Budget(top_k=...)`` as `vertical` and as `slash`; FlexPrefill,
    arXiv 2502.20766, algorithm 3, with ``Budget(mass=...)`` as both. Keys after a query are not on any of the
    diagonals.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.selectors import Budget, vertical_slash
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 64, 16))
    >>> index = vertical_slash(q, k, block=8, budget=Budget(top_k=4), num_queries=16, causal=True)
    >>> bool((index.states()[0, 0].diagonal() > 0).all())
    True
    """
    vertical, slash = _budgets_of(budget, vertical, slash)
    key = None
    if type(slash) is Budget and slash.threshold is None:
        more = mask, window, scale, executor, slash, num_queries
        key = bound.key_of("vertical_slash", q, k, block, vertical, forced, causal, *more)
    if (index := bound.selected(key, q, k)) is not None:
        return index
    reasons: list[str] = []
    with collecting(reasons):
        num_queries = whole_number("num_queries", num_queries, 1)
    budgets = {"vertical": vertical, "slash": slash}
    grid = Grid.of(q, k, block, budgets, forced, causal, mask, window, scale, reasons)
    seqlen_q, seqlen_kv = grid.shape.seqlen_q, grid.shape.seqlen_kv
    # For each query, a key lies in one block, and so does a diagonal.
    counts = count_within(vertical, seqlen_kv), count_within(slash, max(seqlen_q + grid.offset, 0))
    length = list_length(grid, forced, *counts)
    index = bound.first_selected(key, grid, lambda: bound.of_slashes(grid, vertical, slash, num_queries, forced))
    if index is not None:
        return index
    xp, (block_q, block_kv), (num_rows, num_columns) = grid.xp, grid.block, grid.size
    if not seqlen_kv:
        return result(grid, xp.zeros((*grid.heads, num_rows, num_columns), bool), length)
    by_key, by_distance = _sums(grid, num_queries, executor)
    keys = choose(by_key, by_key, None, None, vertical)
    distances = choose(by_distance, by_distance, None, None, slash)
    start_q, start_kv = xp.arange(num_rows)[:, None] * block_q, xp.arange(num_columns)[None, :] * block_kv
    stop_q, stop_kv = xp.minimum(start_q + block_q, seqlen_q), xp.minimum(start_kv + block_kv, seqlen_kv)
    has_key = _has_any(xp, keys, start_kv, stop_kv)
    # The distances between queries and keys of a block increase from its upper right to its lower left corner.
    has_distance = _has_any(xp, distances, start_q + grid.offset - stop_kv + 1, stop_q + grid.offset - start_kv)
    chosen, eligible = grid.forced(forced) | has_key | has_distance, grid.eligible()
    chosen = xp.broadcast_to(chosen if eligible is None else chosen & eligible, (*grid.heads, num_rows, num_columns))
    return result(grid, chosen, length)


def _budgets_of(budget: Budget | None, vertical: Budget | None, slash: Budget | None) -> tuple[Budget, Budget]:
    """Return the budgets of keys and of diagonals; half of the common budget replaces a missing one.

    Raises
    ------
    UnsupportedProblem
        A budget is missing, and there is no common budget.
    """
    if budget is None and vertical is not None and slash is not None:
        return vertical, slash
    if not isinstance(budget, Budget):
        missing = [name for name, part in (("vertical", vertical), ("slash", slash)) if part is None]
        if budget is None:
            raise UnsupportedProblem(
                f"budget must be a Budget unless vertical and slash both are; got None, without "
                f"{' and '.join(missing)}: write budget=selectors.Budget(top_k=8)"
            )
        raise UnsupportedProblem(f"budget must be a Budget; got {describe(budget)}: write selectors.Budget(top_k=8)")
    of_keys, of_diagonals = budget.halves()
    return of_keys if vertical is None else vertical, of_diagonals if slash is None else slash


def _sums(grid: Grid, num_queries: int, executor: str) -> tuple[Array, Array]:
    """Sum the masses of the last queries by key, and by distance between query and key."""
    xp, seqlen_q, seqlen_kv = grid.xp, grid.shape.seqlen_q, grid.shape.seqlen_kv
    if grid.has_own_mask:
        positions, last, allowed = masked.last_queries(grid, num_queries)
        mass = block_mass(last, grid.k, block=1, scale=grid.scale, mask=Dense(allowed), executor=executor)
    else:
        first = max(seqlen_q - num_queries, 0)
        positions, last = xp.arange(first, seqlen_q)[:, None], grid.q[..., first:, :]
        mass = block_mass(last, grid.k, block=1, scale=grid.scale, mask=grid.stairs(1, 1, 1 - first), executor=executor)
    # The key at distance o from the query at a position is in column position + offset - o.
    column = positions + grid.offset - xp.arange(max(seqlen_q + grid.offset, 0))
    exists, column = (column >= 0) & (column < seqlen_kv), xp.clip(column, 0, seqlen_kv - 1)
    if grid.has_own_mask:
        of_distance = xp.take_along_axis(mass, xp.broadcast_to(column, (*grid.heads, *column.shape[-2:])), axis=-1)
    else:
        of_distance = mass[..., xp.arange(mass.shape[-2])[:, None], column]
    return mass.sum(axis=-2), (of_distance * exists).sum(axis=-2)


def _has_any(xp: Namespace, chosen: Array, start: Array, stop: Array) -> Array:
    """Return for each row whether a position start <= x < stop is chosen; start and stop may be out of range."""
    length = chosen.shape[-1]
    sums = xp.zeros((*chosen.shape[:-1], length + 1), dtype=np.int64)
    sums[..., 1:] = xp.cumsum(chosen, axis=-1)
    return sums[..., xp.clip(stop, 0, length)] > sums[..., xp.clip(start, 0, length)]
