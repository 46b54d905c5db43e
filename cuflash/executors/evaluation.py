"""Masks on a device in the form that list kernels take: a boolean array, evaluated if necessary, and row intervals.

Every shape is known beforehand, so nothing waits for the device.
"""

from __future__ import annotations

from functools import reduce
from operator import and_

import numpy as np

from ..arrays import Array, Namespace
from ..blocks.classify import extents, row_intervals
from ..masks._chosen import ResolvedChosen
from ..masks.base import And, Mask
from ..masks.block_set import BlockGrid
from ..masks.content import mask_namespace
from ..masks.coordinates import elements
from ..masks.shape import MaskShape
from ..planning.interval_kernels import moving_strides
from ..planning.launches import BATCH_AXES
from ..planning.list_kernels import ListSource

_MAX_ELEMENTS_AT_ONCE = 1 << 24  # maximum per step, which limits the memory of coordinates and intermediate results


def evaluated_source(mask: Mask, shape: MaskShape, block: tuple[int, int]) -> tuple[ListSource, tuple[Array, ...]]:
    """Return the list source of any resolved mask with arrays on a device, and the arrays that the source refers to.

    No extent of the shape may be 0. Masks that consist of whole blocks are evaluated once per block. Masks with a
    closed form become row intervals. Other masks are evaluated at every element, except for a single boolean array.

    Raises
    ------
    MemoryError
        The grid has more blocks than int32 can count.
    """
    xp, over = mask_namespace(mask), extents(mask, shape, mask_namespace(mask))
    grid = (*over, -(-shape.seqlen_q // block[0]), -(-shape.seqlen_kv // block[1]))
    num_blocks = int(np.prod(grid, dtype=object))
    if num_blocks > np.iinfo(np.int32).max:
        raise MemoryError(f"the grid has {num_blocks} blocks, more than int32 can count: use larger blocks")
    factors = mask.operands if type(mask) is And else (mask,)
    closed = tuple(factor for factor in factors if factor._has_intervals)
    others = tuple(factor for factor in factors if not factor._has_intervals)
    rows = row_intervals(And(closed), *shape[2:], *over, xp) if closed else None
    is_whole, element = all(_has_whole(block, factor) for factor in others), (1, 1)
    has_room = len(shape.batch) <= BATCH_AXES
    flat = shape._replace(batch=(shape.num_batch,))
    if is_whole:
        array, element = _by_blocks(others, grid, block, xp), block
    elif len(others) == 1 and isinstance(others[0], BlockGrid) and others[0].block == (1, 1) and has_room:
        array, flat = others[0].blocks.array, shape
    else:
        array = evaluated(And(others), shape, over, xp)
    source = ListSource(
        strides=moving_strides(array), element=element, is_whole=is_whole, rows=None, shape=flat, block=block,
        batch=over[0], num_heads=over[1], given_rows=None if rows is None else rows[0].shape[:2],
    )  # fmt: skip
    return source, (array, *(rows or ()))


def _has_whole(block: tuple[int, int], mask: Mask) -> bool:
    """True if a mask consists of whole blocks, and each block of this size is within one of them."""
    own = mask._natural_block if isinstance(mask, (BlockGrid, ResolvedChosen)) else None
    return own is not None and not any(length % side for length, side in zip(own, block))


def _by_blocks(whole: tuple[Mask, ...], grid: tuple[int, ...], block: tuple[int, int], xp: Namespace) -> Array:
    """Return booleans [batch or 1, heads or 1, block rows, block columns] of an intersection of whole-block masks."""
    first = [
        (xp.arange(extent) * side).reshape([-1 if axis == position else 1 for axis in range(4)])
        for position, (extent, side) in enumerate(zip(grid, (1, 1, *block)))
    ]
    return reduce(and_, (mask(*first) for mask in whole), xp.ones((1, 1, *grid[2:]), dtype=bool))


def evaluated(mask: Mask, shape: MaskShape, over: tuple[int, int], xp: Namespace) -> Array:
    """Evaluate a resolved mask as an array of `xp`, bool [*over, seqlen_q, seqlen_kv].

    `over` counts the batch entries and heads that differ. Each step evaluates several whole matrices, or several rows
    of one.
    """
    (batch, num_heads), (seqlen_q, seqlen_kv) = over, shape[2:]
    allowed = xp.empty((batch * num_heads, seqlen_q, seqlen_kv), dtype=bool)
    height = max(1, min(seqlen_q, _MAX_ELEMENTS_AT_ONCE // seqlen_kv))
    at_once = max(1, _MAX_ELEMENTS_AT_ONCE // (height * seqlen_kv))
    j = xp.arange(seqlen_kv)
    for first in range(0, len(allowed), at_once):
        matrices = slice(first, min(first + at_once, len(allowed)))
        matrix = xp.arange(matrices.start, matrices.stop)[:, None, None]
        for top in range(0, seqlen_q, height):
            strip = slice(top, min(top + height, seqlen_q))
            i = xp.arange(strip.start, strip.stop)[:, None]
            allowed[matrices, strip] = elements(mask, matrix // num_heads, matrix % num_heads, i, j)
    return allowed.reshape(*over, seqlen_q, seqlen_kv)
