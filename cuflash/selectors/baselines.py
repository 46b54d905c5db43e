"""Baselines for selectors: the exact masses as an upper bound, random and local blocks as lower bounds."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from ..arrays import Array, Namespace, whole_number
from ..blocks.index import BlockIndex
from ..dropout import Rng, philox4x32, seed_drawn_from
from ..errors import collecting
from ..executors.selecting import FixedSelection, drawn
from ..keywords import explains_keywords
from ..masks import ChosenBlocks
from ..masks.shape import BlockSize
from ..planning.options import Causality, MaskLike, Window
from ..study._masses import block_mass
from . import bound
from .budget import DIAGONAL, Budget, Forced
from .by_query import Estimate, selected, share_reasons
from .grid import Grid


@np.errstate(all="ignore")
@explains_keywords
def oracle(
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
    share: str = "query",
    executor: str = "auto",
) -> BlockIndex | ChosenBlocks:
    """Choose the blocks with the largest exact mass.

    With the same forced blocks and the same number of blocks in each row, no selector has a higher recall.

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
        As in `attention`; the index allows what they allow.
    share : {"query", "group"}
        As in `pooled`.
    executor : {"auto", "cpu", "gpu", "sim"}
        As in `block_mass`, which computes the masses.

    Returns
    -------
    BlockIndex, or ChosenBlocks if block_q is 1
        As `pooled` returns it.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.selectors import Budget, local, oracle
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 16))
    >>> few = {"block": 8, "budget": Budget(top_k=3), "causal": True}
    >>> best, near = (cuflash.study.recall(q, k, v, mask=select(q, k, **few)) for select in (oracle, local))
    >>> bool(best.mass.mean() >= near.mass.mean())
    True
    """
    key = bound.key_of("oracle", q, k, block, budget, forced, causal, mask, window, scale, executor, share=share)
    if (index := bound.selected(key, q, k)) is not None:
        return index
    grid = Grid.of(q, k, block, {"budget": budget}, forced, causal, mask, window, scale, share_reasons(share))
    if (index := bound.first_selected(key, grid, lambda: bound.of_masses(grid, budget, forced))) is not None:
        return index

    def estimate(piece: Grid) -> Estimate:
        mass = block_mass(piece.q, piece.k, block=piece.block, mask=piece.mask, scale=piece.scale, executor=executor)
        return Estimate(mass, mass)

    return selected(grid, budget, forced, estimate, share=share)


@explains_keywords
def random(
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
    share: str = "query",
    seed: int = 0,
    rng: Rng | None = None,
) -> BlockIndex | ChosenBlocks:
    """Choose blocks at random, each block of a row with equal probability.

    Parameters
    ----------
    q, k : arrays
        As in `attention`; only their shapes matter.
    budget : Budget
        The number of blocks to keep per row. All eligible blocks have the same mass, and random scores from 0 to 1.
    block : int or (int, int)
        Sides block_q and block_kv in tokens. If block_q is 1, each query has its own list of blocks.
    forced : Forced
        Blocks that are always kept.
    causal, mask, window, scale : optional
        As in `attention`; the index allows what they allow.
    share : {"query", "group"}
        As in `pooled`.
    seed : int
        Equal seeds choose equal blocks, on the host and on any device.
    rng : numpy.random.Generator or int, optional
        The generator from which the seed is drawn, instead of `seed`.

    Returns
    -------
    BlockIndex, or ChosenBlocks if block_q is 1
        As `pooled` returns it.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import selectors
    >>> q = k = np.zeros((1, 64, 16))
    >>> (selectors.random(q, k, block=16, budget=selectors.Budget(top_k=2)).states() > 0).sum(-1)[0, 0].tolist()
    [2, 2, 2, 2]
    """
    if rng is not None:
        seed = seed_drawn_from(rng)
    key = None
    if type(seed) is int and str(share) == "query":
        key = bound.key_of("random", q, k, block, budget, forced, causal, mask, window, scale, "auto", seed)
    if (index := bound.selected(key, q, k)) is not None:
        return index
    reasons = share_reasons(share)
    with collecting(reasons):
        seed = whole_number("seed", seed, 0)
    grid = Grid.of(q, k, block, {"budget": budget}, forced, causal, mask, window, scale, reasons)
    if (index := bound.first_selected(key, grid, lambda: bound.of_chance(grid, seed, budget, forced))) is not None:
        return index
    shape = (*grid.heads, *grid.size)

    def estimate(piece: Grid) -> Estimate:
        if piece is grid and grid.xp.__name__ == "cupy" and 0 not in shape:
            return Estimate(drawn(shape, seed), None)
        rows = slice(piece.first_query, piece.first_query + piece.size[0])
        return Estimate(_drawn(grid.xp, shape, seed, rows), None)

    return selected(grid, budget, forced, estimate, share=share)


def _drawn(xp: Namespace, shape: tuple[int, ...], seed: int, rows: slice | None = None) -> Array:
    """Return uniform 24-bit numbers in [0, 1), float32, that depend only on the position and the seed.

    Parameters
    ----------
    xp : module
        The namespace of the result.
    shape : tuple of int
        [..., rows, columns]
    seed : int
        The seed.
    rows : slice, optional
        The rows to return; all by default.
    """
    *over, num_rows, num_columns = shape
    of_rows = xp.arange(num_rows, dtype=np.uint64)[slice(None) if rows is None else rows]
    matrix = xp.arange(prod(over), dtype=np.uint64)[:, None, None]
    place = (matrix * np.uint64(num_rows) + of_rows[:, None]) * np.uint64(num_columns)
    place = (place + xp.arange(num_columns, dtype=np.uint64)).reshape(*over, len(of_rows), num_columns)
    zero = xp.zeros(1, dtype=np.uint64)
    word, *_ = philox4x32(seed % (1 << 64), [place & np.uint64(0xFFFFFFFF), place >> np.uint64(32), zero, zero])
    return (word >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)


@explains_keywords
def local(
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
    share: str = "query",
) -> BlockIndex | ChosenBlocks:
    """Choose the blocks nearest to the diagonal.

    Parameters
    ----------
    q, k : arrays
        As in `attention`; only their shapes matter.
    budget : Budget
        The number of blocks to keep per row. All eligible blocks have the same mass; the score is the negative distance
        in tokens between the middle of the block and the middle of the row's diagonal.
    block : int or (int, int)
        Sides block_q and block_kv in tokens. If block_q is 1, each query has its own list of blocks.
    forced : Forced
        Blocks that are always kept.
    causal, mask, window, scale : optional
        As in `attention`; the index allows what they allow.
    share : {"query", "group"}
        As in `pooled`.

    Returns
    -------
    BlockIndex, or ChosenBlocks if block_q is 1
        As `pooled` returns it.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.selectors import Budget, local
    >>> q = k = np.zeros((1, 64, 16))
    >>> print(local(q, k, block=16, budget=Budget(top_k=2), causal=True).picture())
    ▒···
    █▒··
    ·█▒·
    ··█▒
    """
    key = bound.key_of("local", q, k, block, budget, forced, causal, mask, window, scale, share=share)
    if (index := bound.selected(key, q, k)) is not None:
        return index
    grid = Grid.of(q, k, block, {"budget": budget}, forced, causal, mask, window, scale, share_reasons(share))

    def of_places() -> FixedSelection | None:
        on_host = replace(grid, q=np.empty(0))  # the chosen blocks do not depend on the elements of q and k
        return bound.of_places(grid, on_host.chosen(_nearness(on_host), None, budget, forced))

    if (index := bound.first_selected(key, grid, of_places)) is not None:
        return index

    def estimate(piece: Grid) -> Estimate:
        return Estimate(piece.xp.broadcast_to(_nearness(piece), (*piece.heads, *piece.size)), None)

    return selected(grid, budget, forced, estimate, share=share)


def _nearness(grid: Grid) -> Array:
    """Return the negative distance between the middle of each block and the middle of its row's diagonal, float32."""
    xp, (num_rows, num_columns) = grid.xp, grid.size
    query = (xp.arange(num_rows)[:, None] + 0.5) * grid.block[0] + grid.offset
    distance = abs(query - (xp.arange(num_columns)[None, :] + 0.5) * grid.block[1])
    return -distance.astype(np.float32)
