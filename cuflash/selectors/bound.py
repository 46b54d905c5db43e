"""Selections on a GPU that are remembered: later calls of one layout launch kernels and do nothing else."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..arrays import Array, namespace
from ..blocks.index import BlockIndex
from ..executors import checks, gpu
from ..executors.index_maker import maker_of
from ..executors.selecting import Chooser, Drawer, Pooler, Selection
from ..planning.options import Options
from ..plans import layout_key
from ..study.block_mass import bound_block_mass
from .budget import Budget, Forced
from .grid import Grid

_MAX_SELECTIONS = 256
_MOST_AXES = 6  # that the kernel of means takes

_selections: dict[Hashable, Selection] = {}


def key_of(
    name: str, q: Any, k: Any, block: Any, budget: Any, forced: Any, causal: Any, scale: Any, executor: Any, *more: Any
) -> Hashable:
    """Key of a call of a selector without a mask of its own; None where kernels alone do not serve it."""
    if not (type(budget) is Budget and type(forced) is Forced and executor in ("auto", "gpu")) or checks.is_on():
        return None
    if isinstance(q, np.ndarray) or budget.threshold is not None:
        return None
    return Options(None, causal, scale=scale).key(layout_key(q, k), name, repr(block), budget, forced, repr(more))


def selected(key: Hashable, q: Array, k: Array) -> BlockIndex | None:
    """The index of a remembered selection; None where there is none, or where arrays lie at odd addresses."""
    found = _selections.get(key)
    if found is None or (q.data.ptr | k.data.ptr) % q.dtype.itemsize:
        return None
    return found(q, k)


def remember(key: Hashable, selection: Selection | None) -> bool:
    """Keep a selection for calls with the same key, and tell whether there is one."""
    if selection is None:
        return False
    if len(_selections) >= _MAX_SELECTIONS:
        _selections.clear()
    _selections[key] = selection
    return True


def of_means(grid: Grid, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by the softmax of means of blocks; None where the kernels do not serve it."""
    if _is_empty(grid) or grid.q.ndim > _MOST_AXES:
        return None
    target = gpu.current_target()
    pool = Pooler(grid.q, grid.k, grid.block, target)
    means = pool(grid.q, grid.k, target.stream())
    return _selection(grid, pool, means, (1, 1), grid.scale, grid.stairs(*grid.block), budget, forced)


def of_antidiagonals(grid: Grid, stride: int, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by the softmax of antidiagonal sums; None where the kernels do not serve it."""
    if _is_empty(grid) or grid.shape.seqlen_q % stride or grid.shape.seqlen_kv % stride:
        return None

    def turn(q: Array, k: Array, stream: Any) -> tuple[Array, Array]:
        return of_strides(q, stride, turned=True), of_strides(k, stride, turned=False)

    def keep(q: Array, k: Array, stream: Any) -> tuple[Array, Array]:
        return q, k  # which lie as rows of strides do

    block_q, block_kv = (side // stride for side in grid.block)
    given = (block_q, block_kv), grid.scale / stride, grid.stairs(stride, stride), budget, forced
    if grid.q.flags.c_contiguous and grid.k.flags.c_contiguous:
        rows = tuple(of_strides(x, stride, turned=False) for x in (grid.q, grid.k))
        found = _selection(grid, keep, rows, *given, turned_columns=grid.q.shape[-1])
        if found is not None:
            return found
    return _selection(grid, turn, turn(grid.q, grid.k, None), *given)


def of_chance(grid: Grid, seed: int, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by numbers that the kernel draws; None where the kernels do not serve it."""
    if _is_empty(grid):
        return None
    draw = Drawer((*grid.heads, *grid.size), seed, gpu.current_target())
    return _by_scores(grid, lambda q, k, stream: [draw(stream)], False, np.dtype(np.float32), budget, forced)


def of_strides(x: Array, stride: int, *, turned: bool) -> Array:
    """Rows of so many rows of x beside each other, in their order or in the reverse one."""
    groups = x.reshape(*x.shape[:-2], -1, stride, x.shape[-1])
    groups = groups[..., ::-1, :] if turned else groups
    return groups.reshape(*groups.shape[:-2], stride * x.shape[-1])


def _is_empty(grid: Grid) -> bool:
    return 0 in (grid.shape.num_batch, grid.shape.num_heads, grid.shape.seqlen_q, grid.shape.seqlen_kv)


def _selection(
    grid: Grid, prepare: Any, prepared: tuple[Array, ...], block: tuple[int, int], scale: float, mask: Any,
    budget: Budget, forced: Forced, turned_columns: int = 0,
) -> Selection | None:  # fmt: skip
    """A selection by the masses of rows that `prepare` makes of q and k, or of what lies as they do.

    `prepared` is an example of them; `turned_columns` is as `bound_block_mass` takes it.
    """
    q, k = prepared
    mass = bound_block_mass(q, k, block, mask, scale, turned_columns)
    if mass is None:
        return None
    dtype = np.dtype(np.float64 if grid.q.dtype == np.float64 else np.float32)
    return _by_scores(grid, lambda q, k, stream: mass(*prepare(q, k, stream)), True, dtype, budget, forced)


def _by_scores(
    grid: Grid, score: Callable[[Array, Array, Any], list[Array]], has_shares: bool, dtype: np.dtype[Any],
    budget: Budget, forced: Forced,
) -> Selection | None:  # fmt: skip
    """A selection by scores of a dtype, as `Selection` takes them; None where no kernels make the index."""
    target, shape = gpu.current_target(), (*grid.heads, *grid.size)
    make_index = maker_of(namespace(grid.q).empty(shape, bool), grid.mask, grid.shape, grid.block)
    if make_index is None:
        return None
    choose = Chooser(grid.rule(budget, forced), shape, dtype, target)
    return Selection(score, has_shares, choose, make_index, target)
