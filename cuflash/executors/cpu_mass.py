"""Softmax mass of blocks on the host, computed with the tiles, masks and scores of the cpu executor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import Array
from ..planning.plan import KernelPlan
from ._host_tiles import BatchHead, KeptTiles, Tile, row_numbers
from .cpu import HostCall, RowIndex
from .host_threads import run


def block_mass(plan: KernelPlan, arrays: Mapping[str, Array], block: tuple[int, int], *, has_lse: bool) -> None:
    """Add the weights of each block to mass [*batch, heads, num_q_blocks, num_kv_blocks]; write lse unless `has_lse`.

    If query tiles share a block of the grid, they add to the same masses, so tiles are then visited in order.
    """

    call = HostCall.of(KeptTiles(plan), **arrays)
    mass = call.arrays["mass"]

    def visit(tiles: list[Tile], scratch: Array) -> None:
        at = call.rows_of(tiles)
        shift, factor = _from_lse(call, at[0]) if has_lse else _from_scores(call, tiles, at, scratch)
        for steps, _, s in call.score_steps(tiles, *at, scratch[0]):
            s -= shift[..., None, :]
            p = call.power(s, out=s)
            p *= factor[..., None, :]
            for tile, step, weights in zip(tiles, steps, p):
                masses = mass[(*call.batch_indices[tile.b], tile.h)]
                _add_to_grid(masses, row_numbers(tile.rows), row_numbers(step.rows), weights, block)

    run(call.tiles.tiling, (visit, call.tiles.of_rows()), in_order=plan.work.block_q % block[0] != 0)


def _from_lse(call: HostCall, rows: RowIndex) -> tuple[Array, Array]:
    """Return the terms to subtract from scores, and the factors of the weights, [tiles, queries]."""
    lse = call.read("lse", rows)
    has_key = lse != -np.inf
    return np.where(has_key, lse / call.wide(call.natural), 0), has_key.astype(lse.dtype)


def _from_scores(
    call: HostCall, tiles: list[Tile], at: tuple[RowIndex, list[BatchHead]], scratch: Array
) -> tuple[Array, Array]:
    """Return the terms and factors of `_from_lse` from the row maximum and row sum over all keys, and write lse."""
    wide = call.arrays["lse"].dtype.type
    row_max = np.full(call.read("lse", at[0]).shape, wide(-np.inf))
    row_sum = np.zeros_like(row_max)
    for _, _, s in call.score_steps(tiles, *at, scratch[0]):
        new_max = np.maximum(row_max, s.max(axis=-2))
        shift = np.where(new_max == -np.inf, wide(0), new_max)
        s -= shift[..., None, :]
        row_sum = row_sum * call.power(row_max - shift) + call.power(s, out=s).sum(axis=-2)
        row_max = new_max
    has_key = row_max != -np.inf
    lse = np.where(has_key, row_max * call.wide(call.natural) + np.log(row_sum), -np.inf)
    call.arrays["lse"][at[0]] = lse
    return np.where(has_key, row_max, wide(0)), np.where(has_key, 1 / row_sum, wide(0))


def _add_to_grid(masses: Array, rows: Array, keys: Array, weights: Array, block: tuple[int, int]) -> None:
    """Sum weights [keys, queries] over their blocks, and add the sums to the masses."""
    q_blocks, q_starts = np.unique(rows // block[0], return_index=True)
    kv_blocks, kv_starts = np.unique(keys // block[1], return_index=True)
    sums = np.add.reduceat(np.add.reduceat(weights, kv_starts, axis=0), q_starts, axis=1)
    masses[np.ix_(q_blocks, kv_blocks)] += sums.T
