"""Selections on a GPU that are remembered: later calls of one layout launch kernels and do nothing else."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ..arrays import Array, accumulator_dtype, namespace
from ..blocks.index import BlockIndex
from ..executors._layout_key import layout_key
from ..executors import checks, gpu
from ..executors.index_maker import IndexMaker, maker_of
from ..executors.selecting import FixedSelection, Selection, Step
from ..planning._call_cache import CALLS
from ..planning.launches import Workspace
from ..planning.options import Options
from ..planning.selection_kernels import (
    ChoiceRule, crossing, drawing, key_scoring, means_shape, num_distances, num_key_runs, num_words, page_bounding,
    pooling, runs_of_rows, slash_summing, spreading, wide_choosing,
)  # fmt: skip
from ..study._masses import MAX_DIM, BoundMass, bound_block_mass
from .budget import Budget, Forced
from .grid import Grid, of_strides

_MOST_AXES = 6  # that the kernel of means takes


def key_of(
    name: str, q: Any, k: Any, block: Any, budget: Any, forced: Any, causal: Any, mask: Any, window: Any, scale: Any,
    executor: Any = "auto", *more: Any,
) -> Hashable:  # fmt: skip
    """Return the key of a selector's call; None if it has a mask, or needs more than kernels."""
    if mask is not None or window is not None:
        return None
    if not (type(budget) is Budget and type(forced) is Forced and executor in ("auto", "gpu")) or checks.is_on():
        return None
    if isinstance(q, np.ndarray) or budget.threshold is not None:
        return None
    key = Options(None, causal, scale=scale).key(layout_key(q, k), name, repr(block), budget, forced, repr(more))
    return None if key is None else ("select", key)


def selected(key: Hashable, q: Array, k: Array) -> BlockIndex | None:
    """The index of a remembered selection; None where there is none, or where arrays lie at odd addresses."""
    found: Selection | FixedSelection | None = CALLS.get(key)
    if found is None or (q.data.ptr | k.data.ptr) % q.dtype.itemsize:
        return None
    return found(q, k)


def first_selected(
    key: Hashable, grid: Grid, make: Callable[[], Selection | FixedSelection | None]
) -> BlockIndex | None:
    """Return the index of the first call with a key, and keep its selection; None without a key or a selection."""
    selection = None if key is None else make()
    if selection is None:
        return None
    CALLS.put(key, selection)
    return selected(key, grid.q, grid.k)


def of_means(grid: Grid, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by the softmax of means of blocks; None where the kernels do not serve it."""
    if _is_empty(grid) or grid.q.ndim > _MOST_AXES:
        return None
    of_q, of_k = (_means(x, side) for x, side in zip((grid.q, grid.k), grid.block))
    mass = _masses(grid, of_q, of_k, (1, 1), grid.stairs(*grid.block))
    if mass is None:
        return None
    steps: list[Step] = [
        (pooling((grid.q, grid.k), grid.block), {}), (mass.launches, {"q": "means_of_q", "k": "means_of_k"}),
    ]  # fmt: skip
    return _by_scores(grid, steps, _workspaces(mass) | {"means_of_q": of_q, "means_of_k": of_k}, budget, forced)


def of_antidiagonals(grid: Grid, stride: int, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by the softmax of antidiagonal sums; None where the kernels do not serve it."""
    if _is_empty(grid) or grid.shape.seqlen_q % stride or grid.shape.seqlen_kv % stride:
        return None
    given = (grid.block[0] // stride, grid.block[1] // stride), grid.stairs(stride, stride), grid.scale / stride

    def turned(q: Array, k: Array) -> tuple[Array, Array]:
        return of_strides(q, stride, turned=True), of_strides(k, stride, turned=False)

    mass = prepare = None
    if grid.q.flags.c_contiguous and grid.k.flags.c_contiguous:  # q and k lie as rows of strides do
        q, k = (of_strides(x, stride, turned=False) for x in (grid.q, grid.k))
        mass = bound_block_mass(q, k, *given, turned_columns=grid.q.shape[-1])
    if mass is None:
        q, k = turned(grid.q, grid.k)
        mass, prepare = bound_block_mass(q, k, *given), turned
    return None if mass is None else _by_scores(
        grid, [(mass.launches, {})], _workspaces(mass), budget, forced, prepare=prepare
    )


def of_masses(grid: Grid, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by the exact masses; None where the kernels do not serve it."""
    mass = None if _is_empty(grid) else bound_block_mass(grid.q, grid.k, grid.block, grid.mask, grid.scale)
    if mass is None:
        return None
    return _by_scores(grid, [(mass.launches, {})], _workspaces(mass), budget, forced)


def of_places(grid: Grid, kept: Any) -> FixedSelection | None:
    """The selection of the same blocks in each head, a NumPy array; None where no kernels make the index.

    Nor is there one inside a stream capture, where the copy of the blocks would be a part of the graph.
    """
    if _is_empty(grid) or gpu.current_target().stream().is_capturing():
        return None

    def maker(of_head: Array) -> IndexMaker | None:
        of_heads = namespace(of_head).broadcast_to(of_head, (*grid.heads, *grid.size))
        return maker_of(of_heads, grid.mask, grid.shape, grid.block)

    selection = FixedSelection(kept, maker, gpu.current_target())
    return selection if selection.makes_index else None


def of_compressed_keys(grid: Grid, compression: tuple[int, int], budget: Budget, forced: Forced) -> Selection | None:
    """The selection by masses of means of overlapping runs of keys; None where the kernels do not serve it."""
    length, stride = compression
    if _is_empty(grid) or grid.q.ndim > _MOST_AXES or grid.k.ndim >= _MOST_AXES:
        return None
    # Means of one row are queries in the accumulator's dtype, and means of runs are compressed keys.
    runs = runs_of_rows(grid.k, length, stride)
    queries, keys = _means(grid.q, 1), _means(runs, length)
    keys = keys._replace(shape=(*keys.shape[:-2], keys.shape[-1]))
    mass = _masses(grid, queries, keys, (grid.block[0], 1), grid.stairs(1, stride, length))
    if mass is None:
        return None
    group_size = grid.shape.num_heads // grid.k.shape[-3] if grid.has_heads else 1
    masses, parts = mass.results["mass"], (length // stride, grid.block[1] // stride)
    steps = (
        (pooling((grid.q, runs), (1, length)), {"means_of_q": "queries", "means_of_k": "keys"}),
        (mass.launches, {"q": "queries", "k": "keys"}),
        (spreading(masses.shape, grid.size[1], group_size, parts, masses.dtype), {"masses": "mass"}),
    )
    workspaces = {"scores": Workspace((*grid.heads, *grid.size), queries.dtype), **_workspaces(mass)}
    return _by_scores(grid, steps, workspaces | {"queries": queries, "keys": keys}, budget, forced)


def of_slashes(grid: Grid, vertical: Budget, slash: Budget, num_queries: int, forced: Forced) -> Selection | None:
    """The selection of blocks that chosen keys and distances cross; None where the kernels do not serve it."""
    seqlen_q, seqlen_kv = grid.shape.seqlen_q, grid.shape.seqlen_kv
    # The selector calls `block_mass` for all other widths and scales, which refuses those that it does not serve.
    is_served = 1 <= grid.q.shape[-1] <= MAX_DIM and 2**-64 <= abs(grid.scale) <= 2**64
    if _is_empty(grid) or max(grid.q.ndim, grid.k.ndim) > _MOST_AXES or not is_served:
        return None
    make_index = _maker(grid)
    if make_index is None:
        return None
    first, heads, dtype = max(seqlen_q - num_queries, 0), grid.heads, accumulator_dtype(grid.q.dtype)
    diagonal, distances = first + grid.offset, num_distances(seqlen_q, grid.offset)
    last_key, score_shape = diagonal if grid.is_causal else None, (*heads, seqlen_q - first, seqlen_kv)
    rules = _rule_of_row(vertical, seqlen_kv), _rule_of_row(slash, distances)
    shapes = (*heads, 1, seqlen_kv), (*heads, 1, distances)
    of_scores, blocks = {"scores": "key_scores"}, (*heads, *grid.size)
    of_choice = {"scores": "of_keys", "scores_2": "of_distances", "kept": "chosen"}
    of_choice |= {} if vertical.density is not None else {"shares": "of_keys"}
    of_choice |= {} if slash.density is not None else {"shares_2": "of_distances"}
    steps: list[Step] = [
        (key_scoring(grid.q, grid.k, grid.shape.batch, grid.scale, last_key, first), of_scores),
        (slash_summing(score_shape, diagonal, distances, dtype), of_scores),
        (wide_choosing(rules, shapes, dtype, gpu.current_device().tile_memory_bytes), of_choice),
        (crossing(grid.rule(vertical, forced), blocks), {}),
    ]
    workspaces = {
        "chosen": Workspace((sum(map(num_words, shapes)),), np.dtype(np.uint32)),
        "key_scores": Workspace(score_shape, dtype),
        "runs": Workspace((*score_shape[:-1], num_key_runs(seqlen_kv), 2), dtype),
        "of_keys": Workspace(shapes[0], dtype), "of_distances": Workspace(shapes[1], dtype),
        "kept": Workspace(blocks, np.dtype(bool)),
    }  # fmt: skip
    return Selection(steps, workspaces, make_index, gpu.current_target())


def _rule_of_row(budget: Budget, length: int) -> ChoiceRule:
    """The rule that chooses among the numbers of one row by a budget alone."""
    return ChoiceRule(
        lengths=(1, length), block=(1, 1), offset=0, is_causal=False, count=max(budget.top_k or 0, budget.min_blocks),
        mass=float(budget.part or 0), threshold=None, num_sinks=0, num_local=0, has_diagonal=False,
    )  # fmt: skip


def of_page_bounds(grid: Grid, budget: Budget, forced: Forced) -> Selection | None:
    """The selection of pages by bounds of their scores; None where the kernels do not serve it."""
    if _is_empty(grid) or max(grid.q.ndim, grid.k.ndim) > _MOST_AXES:
        return None
    bounds = Workspace((*grid.heads, *grid.size), accumulator_dtype(grid.q.dtype))
    kernels = page_bounding(grid.q, grid.k, grid.shape.batch, grid.block[1])
    return _by_scores(grid, [(kernels, {})], {"bounds": bounds}, budget, forced, has_shares=False)


def of_chance(grid: Grid, seed: int, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by numbers that the kernel draws; None where the kernels do not serve it."""
    if _is_empty(grid):
        return None
    shape = (*grid.heads, *grid.size)
    numbers = {"numbers": Workspace(shape, np.dtype(np.float32))}
    return _by_scores(grid, [(drawing(shape, seed), {})], numbers, budget, forced, has_shares=False)


def _is_empty(grid: Grid) -> bool:
    return 0 in (grid.shape.num_batch, grid.shape.num_heads, grid.shape.seqlen_q, grid.shape.seqlen_kv)


def _means(rows: Any, side: int) -> Workspace:
    """The memory of means of blocks of so many rows."""
    return Workspace(means_shape(rows.shape, side), accumulator_dtype(rows.dtype))


def _masses(grid: Grid, q: Workspace, k: Workspace, block: tuple[int, int], mask: Any) -> BoundMass | None:
    """The masses of rows that lie in workspaces."""
    rows = [namespace(grid.q).empty(each.shape, each.dtype) for each in (q, k)]
    return bound_block_mass(rows[0], rows[1], block, mask, grid.scale)


def _workspaces(mass: BoundMass) -> dict[str, Workspace]:
    """The memory of masses and of lse."""
    return {name: Workspace(each.shape, each.dtype) for name, each in mass.results.items()}


def _by_scores(
    grid: Grid, steps: Sequence[Step], workspaces: dict[str, Workspace], budget: Budget, forced: Forced,
    *, has_shares: bool = True, prepare: Callable[[Array, Array], tuple[Array, Array]] | None = None,
) -> Selection | None:  # fmt: skip
    """A selection by scores, which the first workspace holds; None where no kernels make the index.

    Parameters
    ----------
    has_shares : bool
        Whether scores are masses, or multiples of them in each row; else all blocks count alike.
    """
    make_index = _maker(grid)
    if make_index is None:
        return None
    scores, shape = next(iter(workspaces)), (*grid.heads, *grid.size)
    rule, room = grid.rule(budget, forced), gpu.current_device().tile_memory_bytes
    names = {"scores": scores} | ({"shares": scores} if has_shares and budget.density is None else {})
    steps = (*steps, (rule.kernels(shape, workspaces[scores].dtype, room), names))
    return Selection(
        steps, workspaces | {"kept": Workspace(shape, np.dtype(bool))}, make_index, gpu.current_target(), prepare
    )


def _maker(grid: Grid) -> IndexMaker | None:
    """Return the maker of an index from the kept blocks, bool [*heads, rows, columns]; None if no kernels make one."""
    kept = namespace(grid.q).empty((*grid.heads, *grid.size), bool)
    return maker_of(kept, grid.mask, grid.shape, grid.block)
