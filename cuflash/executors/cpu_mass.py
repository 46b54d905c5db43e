"""Softmax mass of blocks on the host, computed with the tiles, masks and scores of the cpu executor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import Array
from ..planning.plan import KernelPlan
from .cpu import QueryTiles, over_queries


def block_mass(plan: KernelPlan, arrays: Mapping[str, Array], block: tuple[int, int], *, has_lse: bool) -> None:
    """Add the weights of each block to mass [*batch, heads, num_q_blocks, num_kv_blocks]; write lse unless `has_lse`.

    If query tiles share a block of the grid, they add to the same masses, so tiles are then visited in order.
    """

    def visit(tiles: QueryTiles) -> None:
        shift, factor = _from_lse(tiles) if has_lse else _from_scores(tiles)
        for keys, s in tiles.scores():
            s -= shift[..., None, :]
            p = tiles.power(s, out=s)
            p *= factor[..., None, :]
            for (matrix, rows), numbers, weights in zip(tiles, keys, p):
                _add_to_grid(tiles.array("mass")[matrix], np.arange(rows.start, rows.stop), numbers, weights, block)

    over_queries(plan, arrays, visit, in_order=plan.work.block_q % block[0] != 0)


def _from_lse(tiles: QueryTiles) -> tuple[Array, Array]:
    """Return the terms to subtract from scores, and the factors of the weights, [tiles, queries]."""
    lse = tiles.read("lse")
    has_key = lse != -np.inf
    return np.where(has_key, lse / tiles.natural, 0), has_key.astype(lse.dtype)


def _from_scores(tiles: QueryTiles) -> tuple[Array, Array]:
    """Return the terms and factors of `_from_lse` from the row maximum and row sum over all keys, and write lse."""
    wide = tiles.array("lse").dtype.type
    row_max = np.full(tiles.read("lse").shape, wide(-np.inf))
    row_sum = np.zeros_like(row_max)
    for _, s in tiles.scores():
        new_max = np.maximum(row_max, s.max(axis=-2))
        shift = np.where(new_max == -np.inf, wide(0), new_max)
        s -= shift[..., None, :]
        row_sum = row_sum * tiles.power(row_max - shift) + tiles.power(s, out=s).sum(axis=-2)
        row_max = new_max
    has_key = row_max != -np.inf
    tiles.write("lse", np.where(has_key, row_max * tiles.natural + np.log(row_sum), -np.inf))
    return np.where(has_key, row_max, wide(0)), np.where(has_key, 1 / row_sum, wide(0))


def _add_to_grid(masses: Array, rows: Array, keys: Array, weights: Array, block: tuple[int, int]) -> None:
    """Sum weights [keys, queries] over their blocks, and add the sums to the masses."""
    q_blocks, q_starts = np.unique(rows // block[0], return_index=True)
    kv_blocks, kv_starts = np.unique(keys // block[1], return_index=True)
    sums = np.add.reduceat(np.add.reduceat(weights, kv_starts, axis=0), q_starts, axis=1)
    masses[np.ix_(q_blocks, kv_blocks)] += sums.T
