"""Native sparse attention's selection of blocks by attention to compressed keys."""

from __future__ import annotations

from typing import Any

from ..arrays import Array, describe, is_int
from ..blocks.index import BlockIndex
from ..errors import UnsupportedProblem, collecting
from ..keywords import explains_keywords
from ..study._masses import block_mass, require_served
from . import bound, masked
from .budget import Budget, Forced
from .grid import Grid, block_means

_INITIAL_AND_LOCAL = Forced(sink=1, local=2)


@explains_keywords
def nsa(
    q: Array,
    k: Array,
    *,
    budget: Budget,
    block: Any = (128, 128),
    compression: tuple[int, int] = (32, 16),
    forced: Forced = _INITIAL_AND_LOCAL,
    causal: bool | str = False,
    mask: Any = None,
    window: Any = None,
    scale: float | None = None,
    executor: str = "auto",
) -> BlockIndex:
    """Choose blocks by attention to compressed keys, the same for all query heads that share a key/value head.

    Parameters
    ----------
    q, k : arrays
        As in `attention`; k must have at least `compression[0]` keys.
    budget : Budget
        The number of blocks to keep per row; NSA keeps 16, including forced blocks.
    block : int or (int, int)
        Sides block_q and block_kv in tokens; NSA has block_q = 1. block_kv is a multiple of the stride.
    compression : (int, int)
        Number of keys that a compressed key represents, and the stride between compressed keys, which must divide it.
    forced : Forced
        Blocks that are always kept.
    causal, mask, window, scale : optional
        As in `attention`; the index applies them, and masked queries and keys do not affect the estimates.
    executor : {"auto", "cpu", "gpu", "sim"}
        As in `block_mass`, which computes the products.

    Returns
    -------
    BlockIndex
        As `pooled` returns it.

    Raises
    ------
    TypeError, UnsupportedProblem
        As `attention`; an option of the selector is out of range.

    Notes
    -----
    Native sparse attention, arXiv 2502.11089, equations 8 to 12, with means instead of the learned compression. The
    softmax over compressed keys (with `causal`, over those that end by the query) is distributed to their blocks, and
    summed over the heads of a group and the queries of a block.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.selectors import Budget, nsa
    >>> q, k = np.random.default_rng(0).standard_normal((2, 4, 64, 16))
    >>> index = nsa(q, k[:2], block=8, compression=(8, 4), budget=Budget(top_k=4), causal=True)
    >>> index.num_heads, bool((index.states()[0, 0] == index.states()[0, 1]).all())
    (4, True)
    """
    key = bound.key_of("nsa", q, k, block, budget, forced, causal, mask, window, scale, executor, compression)
    if (index := bound.selected(key, q, k)) is not None:
        return index
    reasons: list[str] = []
    grid = None
    with collecting(reasons):
        grid = Grid.of(q, k, block, {"budget": budget}, forced, causal, mask, window, scale)
    with collecting(reasons):
        compression = _checked_compression(compression)
    if not reasons and grid is not None:
        if grid.block[1] % compression[1]:
            reasons.append(f"block_kv must be a multiple of the stride {compression[1]}; got {grid.block[1]}")
        if grid.shape.seqlen_kv < compression[0]:
            reasons.append(f"k must have at least {compression[0]} keys to compress; got {grid.shape.seqlen_kv}")
    if reasons or grid is None:
        raise UnsupportedProblem(reasons)
    if grid.has_own_mask:
        require_served(grid.q, grid.k, grid.scale, executor)
        return _chosen(grid, masked.mass_of_runs(grid, *compression), budget, forced)
    index = bound.first_selected(key, grid, lambda: bound.of_compressed_keys(grid, compression, budget, forced))
    if index is not None:
        return index
    length, stride = compression
    num_parts, num_keys = length // stride, grid.shape.seqlen_kv
    count = (num_keys - length) // stride + 1
    parts = block_means(grid.k[..., : num_keys // stride * stride, :], stride)
    compressed = sum(parts[..., n : n + count, :] for n in range(num_parts)) / num_parts
    mass = block_mass(
        grid.q.astype(parts.dtype), compressed, block=(grid.block[0], 1), scale=grid.scale,
        mask=grid.stairs(1, stride, length), executor=executor,
    )  # fmt: skip
    return _chosen(grid, masked.mass_of_blocks(grid, mass, num_parts, stride), budget, forced)


def _chosen(grid: Grid, scores: Array, budget: Budget, forced: Forced) -> BlockIndex:
    """Choose blocks by their masses, summed over the heads of a group, and return their index."""
    if grid.has_heads:
        groups = grid.k.shape[-3]
        size = grid.shape.num_heads // groups if groups else 1
        scores = scores.reshape(*grid.shape.batch, groups, size, *grid.size).sum(axis=-3)
        scores = grid.xp.repeat(scores, size, axis=-3)
    return grid.index(grid.chosen(scores, scores, budget, forced))


def _checked_compression(compression: Any) -> tuple[int, int]:
    is_pair = isinstance(compression, (tuple, list)) and len(compression) == 2
    if not is_pair or not all(is_int(each) and each >= 1 for each in compression) or compression[0] % compression[1]:
        raise UnsupportedProblem(
            [
                f"compression must be two ints of at least 1, keys and a stride that divides them; got "
                f"{describe(compression)}: NSA uses (32, 16)"
            ]
        )
    return int(compression[0]), int(compression[1])
