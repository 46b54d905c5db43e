"""Selectors that estimate the mass of blocks from pooled rows and from antidiagonals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arrays import Array, accumulator_dtype, describe, is_number, whole_number
from ..blocks.index import BlockIndex
from ..errors import collecting, refuse
from ..keywords import explains_keywords
from ..masks import ChosenBlocks
from ..masks.base import Mask
from ..masks.shape import BlockSize
from ..planning.options import Causality, MaskLike, Window
from ..study._masses import block_mass, require_served
from . import bound, masked
from .budget import DIAGONAL, Budget, Forced
from .by_query import Estimate, kept_blocks, selected, share_reasons
from .grid import Grid, block_means, of_strides, padded
from .query_scores import RunKeys, chosen_by_kernel


@np.errstate(all="ignore")
@explains_keywords
def pooled(
    q: Array,
    k: Array,
    *,
    budget: Budget,
    block: BlockSize = (128, 128),
    forced: Forced = DIAGONAL,
    causal: Causality = False,
    mask: MaskLike | None = None,
    window: Window | None = None,
    scale: float | None = None,
    pool_queries: bool = True,
    self_similarity: float | None = None,
    share: str = "query",
    executor: str = "auto",
) -> BlockIndex | ChosenBlocks:
    """Choose blocks by the softmax of mean-pooled queries and keys.

    Parameters
    ----------
    q, k : arrays
        As in `attention`.
    budget : Budget
        The number of blocks to keep per row.
    block : int or (int, int)
        Sides block_q and block_kv in tokens. If block_q is 1, each query has its own list of blocks.
    forced : Forced
        Blocks that are always kept.
    causal, mask, window, scale : optional
        As in `attention`; the index applies them, and masked queries and keys do not affect the estimates.
    pool_queries : bool
        If False, each query chooses its own blocks by their mean keys (with `causal`, only blocks that end at or before
        the query), and a block of queries keeps the union of its queries' choices.
    self_similarity : float, optional
        A threshold from -1 to 1 for the mean cosine similarity between the rows of a block. The mean represents a block
        with a lower similarity poorly: such a block of keys is kept in every row and excluded from the softmax, and
        such a block of queries keeps all blocks.
    share : {"query", "group"}
        "query": each query head chooses its own blocks. "group": the query heads that share a key/value head choose
        together, by the sum of their masses.
    executor : {"auto", "cpu", "gpu", "sim"}
        As in `block_mass`, which computes the products.

    Returns
    -------
    BlockIndex, or ChosenBlocks if block_q is 1
        The result is on the device of q, and is built without synchronization if `mask` holds no host arrays. An index
        applies the masks. `ChosenBlocks` holds only the chosen blocks, in lists of ascending block numbers for query
        heads, or for key/value heads with ``share="group"``: pass `causal`, `mask` and `window` to `attention`, too.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`, or because an option of the selector is out of range.

    Notes
    -----
    ==============================  ==================================================================================
    MInference's block-sparse head  ``block=64, budget=Budget(top_k=...)`` (arXiv 2407.02490, algorithm 3)
    MoBA                            ``block=(1, c), pool_queries=False, budget=Budget(top_k=...)`` (arXiv 2502.13189,
                                    equations 5, 6)
    VSA                             ``block=64, budget=Budget(top_k=...)`` after reordering tokens into cubes (arXiv
                                    2505.13389, section 2)
    SpargeAttn's prediction         ``block=(128, 64), self_similarity=0.6, budget=Budget(mass=0.98)`` (arXiv
                                    2502.18137, section 3.3)
    ==============================  ==================================================================================

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.selectors import Budget, pooled
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 64, 16))
    >>> index = pooled(q, k, block=8, budget=Budget(top_k=3), causal=True)
    >>> [int(count) for count in (index.states() > 0).sum(-1)[0, 0]]
    [1, 2, 3, 3, 3, 3, 3, 3]
    """
    key = None
    if pool_queries is True and self_similarity is None and str(share) == "query":
        key = bound.key_of("pooled", q, k, block, budget, forced, causal, mask, window, scale, executor)
    if (index := bound.selected(key, q, k)) is not None:
        return index
    reasons = _similarity_reasons(self_similarity) + share_reasons(share)
    if not isinstance(pool_queries, (bool, np.bool)):
        reasons.append(f"pool_queries must be True or False; got {describe(pool_queries)}")
    grid = Grid.of(q, k, block, {"budget": budget}, forced, causal, mask, window, scale, reasons)
    if grid.is_masked or self_similarity is not None:
        require_served(grid.q, grid.k, grid.scale, executor)
        key = None
    if (index := bound.first_selected(key, grid, lambda: bound.of_means(grid, budget, forced))) is not None:
        return index
    estimates = _ByMeans(grid, forced, self_similarity, executor)
    if grid.block[0] == 1 and not grid.is_masked and self_similarity is None:
        chosen = estimates.chosen(budget, share, not pool_queries)
        if chosen is not None:
            return chosen
    if pool_queries or grid.block[0] == 1:
        estimate = estimates.of_blocks if pool_queries else estimates.of_queries
        return selected(grid, budget, forced, estimate, share=share, has_extra=self_similarity is not None)
    of_queries = replace(grid, block=(1, grid.block[1]))
    chosen = kept_blocks(of_queries, estimates.of_queries(of_queries), budget, forced, share)
    rows = grid.xp.zeros((*chosen.shape[:-2], grid.size[0] * grid.block[0], chosen.shape[-1]), dtype=bool)
    rows[..., : grid.shape.seqlen_q, :] = chosen
    rows = rows.reshape(*chosen.shape[:-2], grid.size[0], grid.block[0], chosen.shape[-1]).any(axis=-2)
    return grid.index(rows if share == "query" else grid.of_query_heads(rows))


@np.errstate(all="ignore")
@explains_keywords
def antidiagonal(
    q: Array,
    k: Array,
    *,
    budget: Budget,
    block: BlockSize = (128, 128),
    stride: int = 8,
    forced: Forced = DIAGONAL,
    causal: Causality = False,
    mask: MaskLike | None = None,
    window: Window | None = None,
    scale: float | None = None,
    executor: str = "auto",
) -> BlockIndex | ChosenBlocks:
    """Choose blocks by the softmax of sums of scores along antidiagonals, as XAttention does.

    The sum along the antidiagonal of a cell of stride by stride elements represents the scores of the cell, since the
    antidiagonal crosses every column and every diagonal of the cell.

    Parameters
    ----------
    q, k : arrays
        As in `attention`.
    budget : Budget
        The number of blocks to keep per row.
    block : int or (int, int)
        Sides block_q and block_kv in tokens, multiples of `stride`. If block_q is 1, each query has its own list.
    stride : int
        Side of a cell, at most 4096 / head_dim.
    forced : Forced
        Blocks that are always kept.
    causal, mask, window, scale : optional
        As in `attention`; the index applies them, and masked queries and keys do not affect the estimates.
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
    XAttention, arXiv 2503.16428, algorithm 1, which uses ``budget=Budget(mass=0.9)``.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.selectors import Budget, antidiagonal
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 64, 16))
    >>> index = antidiagonal(q, k, block=16, stride=4, budget=Budget(top_k=2), causal=True)
    >>> (index.states() > 0).sum(-1)[0, 0].tolist()
    [1, 2, 2, 2]
    """
    key = bound.key_of("antidiagonal", q, k, block, budget, forced, causal, mask, window, scale, executor, stride)
    if (index := bound.selected(key, q, k)) is not None:
        return index
    reasons: list[str] = []
    with collecting(reasons):
        stride = whole_number("stride", stride, 1)
    grid = Grid.of(q, k, block, {"budget": budget}, forced, causal, mask, window, scale, reasons)
    if any(side % stride for side in grid.block):
        fix = "pass stride=1" if grid.block[0] == 1 else "pass another stride="
        reasons.append(f"block must be a multiple of stride={stride} along each axis; got {grid.block}: {fix}")
    if grid.q.shape[-1] * stride > 4096:
        reasons.append(f"stride must be at most 4096 / head_dim={4096 // grid.q.shape[-1]}; got {stride}")
    refuse(reasons)
    if grid.is_masked:
        require_served(grid.q, grid.k, grid.scale, executor)
        key = None
    index = bound.first_selected(key, grid, lambda: bound.of_antidiagonals(grid, stride, budget, forced))
    if index is not None:
        return index

    def estimate(piece: Grid) -> Estimate:
        if grid.is_masked:
            mass = masked.mass_of_antidiagonals(piece, stride)
            return Estimate(mass, mass)
        rows, columns = (
            of_strides(padded(x, -(-x.shape[-2] // stride) * stride), stride, turned=turned)
            for x, turned in ((piece.q, True), (piece.k, False))
        )
        mass = block_mass(
            rows, columns, block=(grid.block[0] // stride, grid.block[1] // stride), scale=grid.scale / stride,
            mask=piece.stairs(stride, stride), executor=executor,
        )  # fmt: skip
        return Estimate(mass, mass)

    return selected(grid, budget, forced, estimate)


class _ByMeans:
    """Estimates from the mean key of each block, for the blocks of a whole grid or of some of its rows."""

    def __init__(self, grid: Grid, forced: Forced, threshold: float | None, executor: str) -> None:
        self._whole, self._forced, self._threshold, self._executor = grid, forced, threshold, executor
        self._left_out: Array | None = None  # blocks of dissimilar keys
        if grid.is_masked:
            return
        self._means = block_means(grid.k, grid.block[1])
        if grid.block[0] == 1:  # the dtype of attention's keys
            self._means = self._means.astype(grid.k.dtype)
        if threshold is not None:
            of_keys = _self_similarity(grid.k, grid.block[1]) < threshold
            self._left_out = grid.of_query_heads(of_keys[..., None])[..., 0][..., None, :]

    def chosen(self, budget: Budget, share: str, is_past_only: bool) -> ChosenBlocks | None:
        """Return the blocks that a kernel chooses for each query; None if no kernel supports the call."""
        block_kv = self._whole.block[1]
        runs = RunKeys(self._means, block_kv, block_kv if is_past_only else 1, (1, 1))
        return chosen_by_kernel(
            self._whole, runs, budget, self._forced, self._executor, share=share, is_past_only=is_past_only
        )

    def of_blocks(self, grid: Grid) -> Estimate:
        """Estimate the mass of blocks by the softmax of mean queries times mean keys."""
        if self._whole.is_masked:
            mass, unlike = masked.mass_of_means(grid, self._threshold)
            return Estimate(mass, mass, unlike)
        queries = block_means(grid.q, grid.block[0]).astype(self._means.dtype, copy=False)
        mass = self._mass(queries, grid.stairs(*grid.block), grid)
        if self._threshold is None:
            return Estimate(mass, mass)
        return Estimate(
            mass, mass, self._left_out | (_self_similarity(grid.q, grid.block[0]) < self._threshold)[..., :, None]
        )

    def of_queries(self, grid: Grid) -> Estimate:
        """Estimate the mass of blocks by the softmax of each query times mean keys; `grid` has blocks of one query."""
        xp, (_, block_kv) = grid.xp, grid.block
        # A block that ends after the query is chosen only if it is forced.
        ends = (xp.arange(grid.size[1]) + 1)[None, :] * block_kv
        is_past = ends <= xp.arange(grid.shape.seqlen_q)[:, None] + grid.offset + 1
        if self._whole.is_masked:
            whole = self._whole
            mass, may, left_out = masked.mass_by_query(whole, is_past if grid.is_causal else None, self._threshold)
        else:
            may, left_out = grid.eligible(), self._left_out
            mass = self._mass(grid.q.astype(self._means.dtype), grid.stairs(1, block_kv, block_kv), grid)
        must = grid.forced(self._forced)
        must = must if left_out is None else must | left_out
        allowed = is_past | must | (not grid.is_causal)
        return Estimate(mass, mass, left_out, allowed if may is None else may & allowed)

    @np.errstate(invalid="ignore", over="ignore")  # of rows that are not finite
    def _mass(self, queries: Array, mask: Mask | None, grid: Grid) -> Array:
        if self._left_out is None:
            return block_mass(queries, self._means, block=1, scale=grid.scale, mask=mask, executor=self._executor)
        is_seen = ~self._left_out
        if mask is not None:
            rows, columns = (grid.xp.arange(x.shape[-2]) for x in (queries, self._means))
            is_seen = is_seen & mask(0, 0, rows[:, None], columns)
        scores = masked.products(queries, grid.of_query_heads(self._means))
        return masked.softmax(scores * scores.dtype.type(grid.scale), is_seen)


def _self_similarity(x: Array, side: int) -> Array:
    """Compute the mean cosine over all pairs of rows of each block, including equal rows, [..., num_blocks]."""
    means = block_means(masked.directions_of(x.astype(accumulator_dtype(x.dtype))), side)
    return (means * means).sum(axis=-1)


def _similarity_reasons(self_similarity: float | None) -> list[str]:
    if self_similarity is None or is_number(self_similarity) and -1 <= self_similarity <= 1:
        return []
    return [f"self_similarity must be None or a number from -1 to 1; got {describe(self_similarity)}"]
