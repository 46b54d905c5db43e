"""Cached selections on a GPU: later calls with the same layout only launch kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from ..arrays import Array, accumulator_dtype, namespace
from ..blocks.index import BlockIndex
from ..executors._layout_key import layout_key
from ..executors import checks, gpu
from ..executors.index_maker import IndexMaker, maker_of
from ..executors.selecting import FixedSelection, Lists, Selection, Step
from ..masks import ChosenBlocks
from ..masks.base import Mask
from ..planning._call_cache import CALLS
from ..planning.launches import Workspace
from ..planning.list_kernels import AT_CALL
from ..planning.options import Causality, MaskLike, Options, Window
from ..planning.selection_kernels import (
    ChoiceRule, crossing, drawing, key_scoring, means_shape, num_distances, num_key_runs, num_words, page_bounding,
    pooling, runs_of_rows, slash_summing, spreading, wide_choosing,
)  # fmt: skip
from ..study._masses import MAX_DIM, BoundMass, bound_block_mass
from .budget import Budget, Forced
from .by_query import length_within
from .grid import Grid, of_strides

_MOST_AXES = 6  # maximum number of axes for the kernel of means


def key_of(
    name: str, q: Array, k: Array, block: Hashable, budget: Budget, forced: Forced, causal: Causality,
    mask: MaskLike | None, window: Window | None, scale: float | None, executor: str = "auto", *more: Hashable,
    share: str = "query",
) -> Hashable:  # fmt: skip
    """Return the cache key of a selector's call; None if it has a mask, or cannot run with kernels only."""
    if mask is not None or window is not None or str(share) != "query":
        return None
    if not (type(budget) is Budget and type(forced) is Forced and str(executor) in ("auto", "gpu")) or checks.is_on():
        return None
    if isinstance(q, np.ndarray) or budget.threshold is not None:
        return None
    key = Options(None, causal, scale=scale).key(layout_key(q, k), name, repr(block), budget, forced, repr(more))
    return None if key is None else ("select", key)


def selected(key: Hashable, q: Array, k: Array) -> BlockIndex | ChosenBlocks | None:
    """Return the result of a cached selection; None if none is cached, or if the arrays' addresses are misaligned."""
    selection: Selection | FixedSelection | None = CALLS.get(key)
    if selection is None or (q.data.ptr | k.data.ptr) % q.dtype.itemsize:
        return None
    result: BlockIndex | ChosenBlocks = selection(q, k)
    return result


def first_selected(
    key: Hashable, grid: Grid, make: Callable[[], Selection | FixedSelection | None]
) -> BlockIndex | ChosenBlocks | None:
    """Bind and cache a selection for a new key, and return its result; None if the key or the selection is None."""
    selection = None if key is None else make()
    if selection is None:
        return None
    CALLS.put(key, selection)
    return selected(key, grid.q, grid.k)


def of_means(grid: Grid, budget: Budget, forced: Forced) -> Selection | None:
    """Bind the selection by the softmax of block means; return None if kernels do not support it."""
    if grid.is_empty or grid.q.ndim > _MOST_AXES or grid.block[0] == 1:
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
    """Bind the selection by the softmax of antidiagonal sums; return None if kernels do not support it."""
    if grid.is_empty or grid.shape.seqlen_q % stride or grid.shape.seqlen_kv % stride:
        return None
    options = (grid.block[0] // stride, grid.block[1] // stride), grid.stairs(stride, stride), grid.scale / stride

    def turned(q: Array, k: Array) -> tuple[Array, Array]:
        return of_strides(q, stride, turned=True), of_strides(k, stride, turned=False)

    mass = prepare = None
    if grid.q.flags.c_contiguous and grid.k.flags.c_contiguous:  # joined rows are then views
        q, k = (of_strides(x, stride, turned=False) for x in (grid.q, grid.k))
        mass = bound_block_mass(q, k, *options, turned_columns=grid.q.shape[-1])
    if mass is None:
        q, k = turned(grid.q, grid.k)
        mass, prepare = bound_block_mass(q, k, *options), turned
    return None if mass is None else _by_scores(
        grid, [(mass.launches, {})], _workspaces(mass), budget, forced, prepare=prepare
    )


def of_masses(grid: Grid, budget: Budget, forced: Forced) -> Selection | None:
    """Bind the selection by exact masses; return None if kernels do not support it."""
    mass = None if grid.is_empty else bound_block_mass(grid.q, grid.k, grid.block, grid.mask, grid.scale)
    if mass is None:
        return None
    return _by_scores(grid, [(mass.launches, {})], _workspaces(mass), budget, forced)


def of_places(grid: Grid, blocks: np.ndarray) -> FixedSelection | None:
    """Bind the selection of blocks, a NumPy array that all heads share; return None if no kernel builds the index.

    The result is also None during stream capture, because the copy of the blocks would become part of the graph.
    """
    if grid.is_empty or gpu.current_target().stream().is_capturing() or grid.block[0] == 1:
        return None

    def maker(of_head: Array) -> IndexMaker | None:
        of_heads = namespace(of_head).broadcast_to(of_head, (*grid.heads, *grid.size))
        return maker_of(of_heads, grid.mask, grid.shape, grid.block)

    selection = FixedSelection(blocks, maker, gpu.current_target())
    return selection if selection.makes_index else None


def of_compressed_keys(grid: Grid, compression: tuple[int, int], budget: Budget, forced: Forced) -> Selection | None:
    """Bind the selection by masses of means of overlapping runs of keys; return None if kernels do not support it."""
    length, stride = compression
    if grid.is_empty or grid.q.ndim > _MOST_AXES or grid.k.ndim >= _MOST_AXES or grid.block[0] == 1:
        return None
    # Means over single rows only convert queries to the accumulator's dtype; means over runs are the compressed keys.
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
    """Bind the selection of blocks that contain chosen keys and distances; return None if kernels do not support it."""
    seqlen_q, seqlen_kv = grid.shape.seqlen_q, grid.shape.seqlen_kv
    # For other head_dims and scales, the selector calls `block_mass`, which refuses the ones that it does not support.
    is_served = 1 <= grid.q.shape[-1] <= MAX_DIM and 2**-64 <= abs(grid.scale) <= 2**64
    if grid.is_empty or max(grid.q.ndim, grid.k.ndim) > _MOST_AXES or not is_served or grid.block[0] == 1:
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
    return Selection(steps, workspaces, Lists.of_index(make_index), gpu.current_target())


def _rule_of_row(budget: Budget, length: int) -> ChoiceRule:
    """Return the rule that chooses elements of a single row by a budget alone."""
    return ChoiceRule(
        lengths=(1, length), block=(1, 1), offset=0, is_causal=False, count=max(budget.top_k or 0, budget.min_blocks),
        mass=float(budget.part or 0), threshold=None, num_sinks=0, num_local=0, has_diagonal=False,
    )  # fmt: skip


def of_page_bounds(grid: Grid, budget: Budget, forced: Forced) -> Selection | None:
    """Bind the selection of pages by bounds of their scores; return None if kernels do not support it."""
    if grid.is_empty or max(grid.q.ndim, grid.k.ndim) > _MOST_AXES:
        return None
    bounds = Workspace((*grid.heads, *grid.size), accumulator_dtype(grid.q.dtype))
    kernels = page_bounding(grid.q, grid.k, grid.shape.batch, grid.block[1])
    return _by_scores(grid, [(kernels, {})], {"bounds": bounds}, budget, forced, has_shares=False)


def of_chance(grid: Grid, seed: int, budget: Budget, forced: Forced) -> Selection | None:
    """Bind the selection by random numbers that a kernel draws; return None if kernels do not support it."""
    if grid.is_empty:
        return None
    shape = (*grid.heads, *grid.size)
    numbers = {"numbers": Workspace(shape, np.dtype(np.float32))}
    return _by_scores(grid, [(drawing(shape, seed), {})], numbers, budget, forced, has_shares=False)


def _means(rows: Array, side: int) -> Workspace:
    """Return the workspace for means of blocks of `side` rows."""
    return Workspace(means_shape(rows.shape, side), accumulator_dtype(rows.dtype))


def _masses(grid: Grid, q: Workspace, k: Workspace, block: tuple[int, int], mask: Mask | None) -> BoundMass | None:
    """Bind the computation of masses from rows in workspaces."""
    rows = [namespace(grid.q).empty(each.shape, each.dtype) for each in (q, k)]
    return bound_block_mass(rows[0], rows[1], block, mask, grid.scale)


def _workspaces(mass: BoundMass) -> dict[str, Workspace]:
    """Return the workspaces for masses and lse."""
    return {name: Workspace(each.shape, each.dtype) for name, each in mass.results.items()}


def _by_scores(
    grid: Grid, steps: Sequence[Step], workspaces: dict[str, Workspace], budget: Budget, forced: Forced,
    *, has_shares: bool = True, prepare: Callable[[Array, Array], tuple[Array, Array]] | None = None,
) -> Selection | None:  # fmt: skip
    """Bind a selection by the scores in the first workspace; return None if no kernel builds the index.

    Parameters
    ----------
    has_shares : bool
        True if scores are proportional to the masses of their row; else all blocks have equal weight.
    """
    scores, shape, target = next(iter(workspaces)), (*grid.heads, *grid.size), gpu.current_target()
    rule, room = grid.rule(budget, forced), gpu.current_device().tile_memory_bytes
    names = {"scores": scores} | ({"shares": scores} if has_shares and budget.density is None else {})
    length = length_within(grid, budget, forced)
    if length is None:
        make_index = _maker(grid)
        if make_index is None:
            return None
        lists, workspaces = Lists.of_index(make_index), workspaces | {"kept": Workspace(shape, np.dtype(bool))}
    else:
        rule, names["kept"] = replace(rule, list_length=length), AT_CALL
        lists = Lists.of_queries((*shape[:-1], length), grid.block[1], target)
    steps = (*steps, (rule.kernels(shape, workspaces[scores].dtype, room), names))
    return Selection(steps, workspaces, lists, target, prepare)


def _maker(grid: Grid) -> IndexMaker | None:
    """Return the builder of an index from blocks, bool [*heads, rows, columns]; None if no kernel builds the index."""
    blocks = namespace(grid.q).empty((*grid.heads, *grid.size), bool)
    return maker_of(blocks, grid.mask, grid.shape, grid.block)
