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
from ..executors.selecting import (
    Chooser, Crosser, FixedSelection, Pooler, PositionChooser, Scoring, Selection, bound_kernel,
)  # fmt: skip
from ..planning._call_cache import CALLS
from ..planning.launches import Workspace
from ..planning.options import Options
from ..planning.selection_kernels import (
    ChoiceRule, drawing, key_scoring, num_distances, num_key_runs, page_bounding, runs_of_rows, slash_summing,
    spreading,
)  # fmt: skip
from ..study.block_mass import MAX_DIM, BoundMass, bound_block_mass
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
    pool, xp = Pooler(grid.q, grid.k, grid.block, gpu.current_target()), namespace(grid.q)
    means = [xp.empty(each.shape, each.dtype) for each in pool.means]  # their layouts alone matter
    mass = bound_block_mass(means[0], means[1], (1, 1), grid.stairs(*grid.block), grid.scale)
    if mass is None:
        return None
    launch_mass = mass.launches.launch

    def score(q: Array, k: Array, room: Sequence[int], stream: Any) -> list[Array]:
        of_mass, of_lse, of_q, of_k = room
        pool(q.data.ptr, of_q, k.data.ptr, of_k, stream)
        return launch_mass([of_q, of_k, of_mass, of_lse], stream)

    workspaces = _workspaces(mass) | dict(zip(("means_of_q", "means_of_k"), pool.means))
    return _by_scores(grid, Scoring(workspaces, score, has_shares=True), budget, forced)


def of_antidiagonals(grid: Grid, stride: int, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by the softmax of antidiagonal sums; None where the kernels do not serve it."""
    if _is_empty(grid) or grid.shape.seqlen_q % stride or grid.shape.seqlen_kv % stride:
        return None
    given = (grid.block[0] // stride, grid.block[1] // stride), grid.stairs(stride, stride), grid.scale / stride
    k, mass = of_strides(grid.k, stride, turned=False), None
    if grid.q.flags.c_contiguous and grid.k.flags.c_contiguous:  # q and k lie as rows of strides do
        q = of_strides(grid.q, stride, turned=False)
        mass = bound_block_mass(q, k, *given, turned_columns=grid.q.shape[-1])
    is_turned = mass is None
    if mass is None:
        mass = bound_block_mass(of_strides(grid.q, stride, turned=True), k, *given)
    if mass is None:
        return None
    launch_mass = mass.launches.launch

    def score(q: Array, k: Array, room: Sequence[int], stream: Any) -> list[Array]:
        if is_turned:
            q, k = of_strides(q, stride, turned=True), of_strides(k, stride, turned=False)
        return [q, k, *launch_mass([q.data.ptr, k.data.ptr, *room], stream)]

    return _by_scores(grid, Scoring(_workspaces(mass), score, has_shares=True), budget, forced)


def of_masses(grid: Grid, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by the exact masses; None where the kernels do not serve it."""
    mass = None if _is_empty(grid) else bound_block_mass(grid.q, grid.k, grid.block, grid.mask, grid.scale)
    if mass is None:
        return None
    launch_mass = mass.launches.launch

    def score(q: Array, k: Array, room: Sequence[int], stream: Any) -> list[Array]:
        return launch_mass([q.data.ptr, k.data.ptr, *room], stream)

    return _by_scores(grid, Scoring(_workspaces(mass), score, has_shares=True), budget, forced)


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
    target, xp = gpu.current_target(), namespace(grid.q)
    # Means of one row are queries in the accumulator's dtype, and means of runs are compressed keys.
    pool = Pooler(grid.q, runs_of_rows(grid.k, length, stride), (1, length), target)
    of_queries, of_runs = pool.means
    queries = xp.empty(grid.q.shape, of_queries.dtype)
    keys = xp.empty((*of_runs.shape[:-2], of_runs.shape[-1]), of_runs.dtype)
    mass = bound_block_mass(queries, keys, (grid.block[0], 1), grid.stairs(1, stride, length), grid.scale)
    if mass is None:
        return None
    launch_mass = mass.launches.launch
    group_size = grid.shape.num_heads // grid.k.shape[-3] if grid.has_heads else 1
    parts = length // stride, grid.block[1] // stride
    made, scores = mass.results["mass"], Workspace((*grid.heads, *grid.size), of_queries.dtype)
    spread = bound_kernel(spreading(made.shape, grid.size[1], group_size, parts, made.dtype), target).launch

    def score(q: Array, k: Array, room: Sequence[int], stream: Any) -> list[Array]:
        of_scores, of_mass, of_lse, of_q, of_k = room
        pool(q.data.ptr, of_q, k.data.ptr, of_k, stream)
        kept = launch_mass([of_q, of_k, of_mass, of_lse], stream)
        spread((of_mass, of_scores), stream)
        return kept

    workspaces = {"scores": scores, **_workspaces(mass), "queries": of_queries, "keys": of_runs}
    return _by_scores(grid, Scoring(workspaces, score, has_shares=True), budget, forced)


def of_slashes(grid: Grid, vertical: Budget, slash: Budget, num_queries: int, forced: Forced) -> Selection | None:
    """The selection of blocks that chosen keys and distances cross; None where the kernels do not serve it."""
    (seqlen_q, seqlen_kv), target = (grid.shape.seqlen_q, grid.shape.seqlen_kv), gpu.current_target()
    # The selector calls `block_mass` for all other widths and scales, which refuses those that it does not serve.
    is_served = 1 <= grid.q.shape[-1] <= MAX_DIM and 2**-64 <= abs(grid.scale) <= 2**64
    if _is_empty(grid) or max(grid.q.ndim, grid.k.ndim) > _MOST_AXES or not is_served:
        return None
    make_index = _maker(grid)
    if make_index is None:
        return None
    first, heads, dtype = max(seqlen_q - num_queries, 0), grid.heads, accumulator_dtype(grid.q.dtype)
    diagonal, distances = first + grid.offset, num_distances(seqlen_q, grid.offset)
    last, last_key = grid.q[..., first:, :], diagonal if grid.is_causal else None
    score_keys = bound_kernel(key_scoring(last, grid.k, grid.shape.batch, grid.scale, last_key), target).launch
    score_shape = (*heads, seqlen_q - first, seqlen_kv)
    add = bound_kernel(slash_summing(score_shape, diagonal, distances, dtype), target).launch
    rules = _rule_of_row(vertical, seqlen_kv), _rule_of_row(slash, distances)
    shapes = (*heads, 1, seqlen_kv), (*heads, 1, distances)
    choose = PositionChooser(rules, shapes, dtype, target, tuple(x.density is None for x in (vertical, slash)))
    cross = Crosser(grid.rule(vertical, forced), (*heads, *grid.size), target)
    first_byte = first * grid.q.strides[-2]

    def score(q: Array, k: Array, room: Sequence[int], stream: Any) -> tuple[()]:
        chosen, scores, runs, of_keys, of_distances = room
        score_keys((q.data.ptr + first_byte, k.data.ptr, scores, runs), stream)
        add((scores, runs, of_keys, of_distances), stream)
        choose(chosen, of_keys, of_distances, stream)
        return ()

    workspaces = {
        "chosen": choose.chosen, "key_scores": Workspace(score_shape, dtype),
        "runs": Workspace((*score_shape[:-1], num_key_runs(seqlen_kv), 2), dtype),
        "of_keys": Workspace(shapes[0], dtype), "of_distances": Workspace(shapes[1], dtype),
    }  # fmt: skip
    return Selection(Scoring(workspaces, score, has_shares=False), cross, make_index, target)


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
    made = page_bounding(grid.q, grid.k, grid.shape.batch, grid.block[1])
    bound_pages = bound_kernel(made, gpu.current_target()).launch

    def score(q: Array, k: Array, room: Sequence[int], stream: Any) -> tuple[()]:
        bound_pages((q.data.ptr, k.data.ptr, room[0]), stream)
        return ()

    bounds = Workspace((*grid.heads, *grid.size), accumulator_dtype(grid.q.dtype))
    return _by_scores(grid, Scoring({"bounds": bounds}, score, has_shares=False), budget, forced)


def of_chance(grid: Grid, seed: int, budget: Budget, forced: Forced) -> Selection | None:
    """The selection by numbers that the kernel draws; None where the kernels do not serve it."""
    if _is_empty(grid):
        return None
    shape = (*grid.heads, *grid.size)
    draw = bound_kernel(drawing(shape, seed), gpu.current_target()).launch

    def score(q: Array, k: Array, room: Sequence[int], stream: Any) -> tuple[()]:
        draw((room[0],), stream)
        return ()

    numbers = Workspace(shape, np.dtype(np.float32))
    return _by_scores(grid, Scoring({"numbers": numbers}, score, has_shares=False), budget, forced)


def _is_empty(grid: Grid) -> bool:
    return 0 in (grid.shape.num_batch, grid.shape.num_heads, grid.shape.seqlen_q, grid.shape.seqlen_kv)


def _workspaces(mass: BoundMass) -> dict[str, Workspace]:
    """The memory of masses and of lse."""
    return {name: Workspace(each.shape, each.dtype) for name, each in mass.results.items()}


def _by_scores(grid: Grid, scoring: Scoring, budget: Budget, forced: Forced) -> Selection | None:
    """A selection by scores; None where no kernels make the index."""
    target, make_index = gpu.current_target(), _maker(grid)
    if make_index is None:
        return None
    scoring = scoring._replace(has_shares=scoring.has_shares and budget.density is None)
    dtype = next(iter(scoring.workspaces.values())).dtype
    choose = Chooser(grid.rule(budget, forced), (*grid.heads, *grid.size), dtype, target)
    return Selection(scoring, choose, make_index, target)


def _maker(grid: Grid) -> IndexMaker | None:
    """Return the maker of an index from the kept blocks, bool [*heads, rows, columns]; None if no kernels make one."""
    kept = namespace(grid.q).empty((*grid.heads, *grid.size), bool)
    return maker_of(kept, grid.mask, grid.shape, grid.block)
