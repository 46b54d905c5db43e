"""Patterns of the literature in all sizes on a square grid of blocks, and the oracle, which keeps the most mass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import numpy as np

from .. import patterns
from ..arrays import Array
from ..masks import Mask, SlidingWindow

ORACLE = "oracle"


class Family(NamedTuple):
    """A pattern in all its sizes.

    Attributes
    ----------
    make : callable (grid, size, num_heads) -> Mask
        Returns a mask of the blocks that one size keeps. Causal patterns are made symmetric, because causal attention
        never visits the blocks above the diagonal.
    sizes : callable (grid) -> range
        Returns all sizes on a grid.
    grows : bool
        True if a larger size keeps all blocks of a smaller size.
    has_heads : bool
        True if heads keep different blocks.
    """

    make: Callable[[int, int, int], Mask]
    sizes: Callable[[int], range]
    grows: bool = True
    has_heads: bool = False

    def blocks(self, grid: int, size: int, num_heads: int) -> Array:
        """Return the blocks that one size keeps, bool [grid, grid] or [num_heads, grid, grid]."""
        return self.make(grid, size, num_heads).toarray(grid, num_heads=num_heads if self.has_heads else None)


def _bigbird(grid: int, size: int, num_heads: int) -> Mask:
    return patterns.bigbird(grid, block=1, num_random_blocks=size, num_heads=num_heads)


def _random(grid: int, size: int, num_heads: int) -> Mask:
    return patterns.random(grid, block=1, density=size / grid, num_heads=num_heads)


FAMILIES = {
    "window": Family(lambda grid, size, _: SlidingWindow(size, size), range),
    "sink_local": Family(lambda grid, size, _: patterns.sink_local(1, (size, size)), range),
    "longformer": Family(lambda grid, size, _: patterns.longformer((size, size), 1), range),
    "bigbird": Family(_bigbird, range, has_heads=True),
    "butterfly": Family(
        lambda grid, size, _: patterns.butterfly(grid, block=1, max_stride=2**size),
        lambda grid: range(grid.bit_length() + 1),
    ),
    "strided": Family(
        lambda grid, size, _: patterns.strided(size).on_blocks(1, mirrored=True),
        lambda grid: range(1, grid + 1), grows=False,
    ),
    "fixed": Family(
        lambda grid, size, _: patterns.fixed(size, 1).on_blocks(1, mirrored=True),
        lambda grid: range(1, grid + 1), grows=False,
    ),
    "random": Family(_random, lambda grid: range(1, grid + 1), has_heads=True),
}  # fmt: skip


def densest(family: Family, densities: Iterable[float], eligible: Array, num_heads: int) -> dict[float, Array]:
    """Return the densest size of a pattern within each density limit.

    Parameters
    ----------
    family : Family
        The pattern.
    densities : iterable of float
        Upper limits of kept blocks divided by eligible blocks, increasing.
    eligible : bool array [grid, grid]
        The blocks that attention without the pattern visits.
    num_heads : int
        Number of query heads; some patterns have different blocks for each head.

    Returns
    -------
    dict of float to bool array
        Kept blocks, [grid, grid] or [num_heads, grid, grid], by limit. Limits with the same size share an array, and
        limits that every size exceeds are absent.
    """
    grid = len(eligible)

    @cache
    def density(size: int) -> float:
        return density_of(family.blocks(grid, size, num_heads), eligible)

    sizes = family.sizes(grid) if family.grows else sorted(family.sizes(grid), key=density)
    fitting = {limit: bisect_right(sizes, limit, key=density) for limit in densities}
    patterns_of = {count: family.blocks(grid, sizes[count - 1], num_heads) for count in {*fitting.values()} if count}
    return {limit: patterns_of[count] for limit, count in fitting.items() if count}


def smallest_density(family: Family, eligible: Array, num_heads: int) -> float:
    """Return the density of a pattern's smallest size; the arguments are those of `densest`."""
    grid = len(eligible)
    sizes = family.sizes(grid)[:1] if family.grows else family.sizes(grid)
    return min(density_of(family.blocks(grid, size, num_heads), eligible) for size in sizes)


def heaviest(mass: Array, densities: Iterable[float], eligible: Array) -> dict[float, Array]:
    """Return the blocks with the most mass: the same number of blocks in every block row of every head.

    Parameters
    ----------
    mass : float array [..., grid, grid]
        The softmax mass of each block.
    densities : iterable of float
        Upper limits of kept blocks divided by eligible blocks, increasing.
    eligible : bool array [grid, grid]
        The blocks that attention visits.

    Returns
    -------
    dict of float to bool array [..., grid, grid]
        Kept blocks by limit. Limits with the same number of blocks share an array, and limits that do not allow one
        block per row are absent.
    """
    rank = np.argsort(np.argsort(-np.where(eligible, mass, -1.0), axis=-1), axis=-1)
    in_row = eligible.sum(-1)
    shares = [np.minimum(in_row, count).sum() / in_row.sum() for count in range(1, len(eligible) + 1)]
    counts = {limit: bisect_right(shares, limit) for limit in densities}
    chosen = {count: (rank < count) & eligible for count in {*counts.values()} if count}
    return {limit: chosen[count] for limit, count in counts.items() if count}


def density_of(blocks: Array, eligible: Array) -> float:
    """Return the number of kept blocks divided by the number of eligible blocks.

    >>> density_of(np.eye(2, dtype=bool), np.tri(2, dtype=bool))
    0.6666666666666666
    """
    return float((blocks & eligible).mean() / eligible.mean())
