"""Launches the kernels of selectors on the current CUDA device, without a wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, accumulator_dtype, namespace
from ..blocks.index import BlockIndex
from ..compiler import nvrtc
from ..planning._call_cache import CALLS
from ..planning.launches import Pass, Workspace
from ..planning.selection_kernels import (
    ChoiceRule, Rows, crossing, drawing, means_shape, num_words, pooling, wide_choosing,
)  # fmt: skip
from . import gpu
from .index_maker import IndexMaker
from .launch import BoundPass


class Chooser:
    """The kernel that chooses blocks, for scores of one shape and one rule.

    Parameters
    ----------
    rule : ChoiceRule
    shape : tuple of int
        [..., rows, columns]
    dtype : numpy.dtype
        Of scores and shares: float32 or float64.
    target : Gpu
        The device; the kernel is compiled now.
    """

    def __init__(self, rule: ChoiceRule, shape: tuple[int, ...], dtype: np.dtype[Any], target: gpu.Gpu) -> None:
        kernels = rule.kernels(shape, dtype, gpu.current_device().tile_memory_bytes)
        self._launch = bound_kernel(kernels, target, ("scores", "shares", "allowed", "forced", "kept")).launch
        self.kept = Workspace(shape, np.dtype(bool))

    def __call__(self, kept: int, scores: int, shares: int, stream: Any, allowed: int = 0, forced: int = 0) -> None:
        """Write the blocks that are kept, for arrays at these addresses; 0 where there is none."""
        self._launch((scores, shares, allowed, forced, kept), stream)


class PositionChooser:
    """The kernel that chooses keys, and distances between queries and keys, by sums of their masses, in one launch.

    Parameters
    ----------
    rules : (ChoiceRule, ChoiceRule)
        For keys and for distances.
    shapes : (tuple of int, tuple of int)
        [..., 1, keys] and [..., 1, distances]
    dtype : numpy.dtype
        Of sums: float32 or float64.
    target : Gpu
        The device; the kernel is compiled now.
    has_shares : (bool, bool)
        Whether sums are the shares that count for a rule's mass, of keys and of distances; else each counts alike.
    """

    def __init__(
        self, rules: tuple[ChoiceRule, ChoiceRule], shapes: tuple[tuple[int, ...], tuple[int, ...]],
        dtype: np.dtype[Any], target: gpu.Gpu, has_shares: tuple[bool, ...] = (True, True),
    ) -> None:  # fmt: skip
        self._has_shares = has_shares
        kernels = wide_choosing(rules, shapes, dtype, gpu.current_device().tile_memory_bytes, keeps_bits=True)
        names = [name + of_grid for of_grid in ("", ".second") for name in ("scores", "shares", "kept")]
        self._launch = bound_kernel(kernels, target, names).launch
        self._start_of_distances = 4 * num_words(shapes[0])
        self.chosen = Workspace((sum(map(num_words, shapes)),), np.dtype(np.uint32))

    def __call__(self, chosen: int, keys: int, distances: int, stream: Any) -> None:
        """Write a bit for each that is chosen, all keys before all distances, for arrays at these addresses."""
        of_keys, of_distances = (x if has else 0 for x, has in zip((keys, distances), self._has_shares))
        self._launch((keys, of_keys, chosen, distances, of_distances, chosen + self._start_of_distances), stream)


class Crosser:
    """The kernel that keeps the blocks which chosen keys and distances cross.

    Parameters
    ----------
    rule : ChoiceRule
        Which blocks are forced, and which may be kept.
    shape : tuple of int
        [..., rows, columns] of the blocks.
    target : Gpu
        The device; the kernel is compiled now.
    """

    def __init__(self, rule: ChoiceRule, shape: tuple[int, ...], target: gpu.Gpu) -> None:
        self._launch = bound_kernel(crossing(rule, shape), target).launch
        self.kept = Workspace(shape, np.dtype(bool))

    def __call__(self, kept: int, chosen: int, shares: int, stream: Any) -> None:
        """Write the blocks that are kept, as `Chooser` does; what is chosen has the place of scores, without shares."""
        self._launch((chosen, kept), stream)


def chosen(
    rule: ChoiceRule, scores: Array, shares: Array | None, allowed: Array | None = None, forced: Array | None = None
) -> Array:
    """Choose blocks of each row by the kernel.

    Parameters
    ----------
    rule : ChoiceRule
    scores : CuPy array [..., rows, columns]
        Float32 or float64.
    shares : CuPy array of that shape and dtype, optional
        What counts for the rule's mass; each block counts alike unless it is given.
    allowed, forced : CuPy bool arrays that broadcast against them, optional
        Blocks that may be kept, and blocks that must be if they may, beside those that the rule names.

    Returns
    -------
    CuPy bool array of the scores' shape

    Raises
    ------
    RuntimeError
        The stream is captured, and the kernel is not compiled yet.
    """
    xp = namespace(scores)
    if 0 in scores.shape:
        return xp.zeros(scores.shape, bool)
    target = gpu.current_target()
    key = "choose", nvrtc.current_device()[1], rule, scores.shape, scores.dtype
    chooser: Chooser | None = CALLS.get(key)
    if chooser is None:
        chooser = Chooser(rule, scores.shape, scores.dtype, target)
        CALLS.put(key, chooser)
    given = [xp.ascontiguousarray(scores), None if shares is None else xp.ascontiguousarray(shares)]
    for each in (allowed, forced):
        given.append(None if each is None else xp.ascontiguousarray(xp.broadcast_to(each, scores.shape)))
    of_scores, of_shares, of_allowed, of_forced = (0 if each is None else target.address(each) for each in given)
    kept = xp.empty(scores.shape, bool)
    chooser(target.address(kept), of_scores, of_shares, target.stream(), of_allowed, of_forced)
    return kept


class Pooler:
    """The kernel that makes means of blocks of rows, for q and k of one layout.

    Parameters
    ----------
    q, k : arrays or Rows
        Their layouts alone matter.
    block : (int, int)
        Rows of a block of each.
    target : Gpu
        The device; the kernel is compiled now.
    """

    def __init__(self, q: Array | Rows, k: Array | Rows, block: tuple[int, int], target: gpu.Gpu) -> None:
        self._launch = bound_kernel(pooling((q, k), block), target, ("q", "means_of_q", "k", "means_of_k")).launch
        dtype = accumulator_dtype(q.dtype)
        self.means = tuple(Workspace(means_shape(x.shape, side), dtype) for x, side in zip((q, k), block))

    def __call__(self, q: int, means_of_q: int, k: int, means_of_k: int, stream: Any) -> None:
        """Write the means of q and of k, for arrays at these addresses."""
        self._launch((q, means_of_q, k, means_of_k), stream)


def bound_kernel(kernels: Pass, target: gpu.Gpu, names: Sequence[str] = ()) -> BoundPass:
    """A kernel, compiled now, that takes the addresses of what it reads and then of what it writes.

    Parameters
    ----------
    kernels : Pass
        Of one launch.
    target : Gpu
    names : sequence of str, optional
        The arrays whose addresses the kernel takes instead.
    """
    gpu.compile_kernels(kernels.specs.values(), target)
    (launch,) = kernels.launches.values()
    return BoundPass.of(kernels, {}, names or (*launch.reads, *launch.writes), target)


def drawn(shape: tuple[int, ...], seed: int) -> Array:
    """Draw scores for the blocks of a grid by the kernel, on the current device."""
    target = gpu.current_target()
    numbers = gpu.namespace().empty(shape, np.float32)
    bound_kernel(drawing(shape, seed), target).launch((target.address(numbers),), target.stream())
    return numbers


class Scoring(NamedTuple):
    """Kernels that score blocks, for q and k of one layout, in memory that they are given.

    Attributes
    ----------
    workspaces : dict of Workspace by name
        The first one holds the scores, or what else blocks are chosen by.
    launch : callable (q, k, addresses, stream)
        `addresses` are those of the workspaces. It returns the arrays that the kernels read or write besides.
    has_shares : bool
        Whether scores are masses, or multiples of them in each row; else all blocks count alike.
    """

    workspaces: Mapping[str, Workspace]
    launch: Callable[[Array, Array, Sequence[int], Any], Sequence[Array]]
    has_shares: bool


class Selection:
    """A selection of blocks by kernels alone, for q and k of one layout.

    Its kernels share memory that the stream keeps. A call allocates the lists of the index and nothing else.

    Parameters
    ----------
    scoring : Scoring
    choose : Chooser or Crosser
    make_index : IndexMaker
    target : Gpu
    """

    def __init__(self, scoring: Scoring, choose: Chooser | Crosser, make_index: IndexMaker, target: gpu.Gpu) -> None:
        self._score, self._has_shares = scoring.launch, scoring.has_shares
        self._choose, self._make_index = choose, make_index
        self._workspaces = target.workspaces({**scoring.workspaces, "kept": choose.kept})
        self._current_stream = target.current_stream
        self._captured: list[Array] = []

    def __call__(self, q: Array, k: Array) -> BlockIndex:
        """The blocks chosen, in an index on the device."""
        stream = self._current_stream()
        taken = self._workspaces.take(stream)
        *room, kept = taken.addresses
        made = self._score(q, k, room, stream)
        self._choose(kept, room[0], room[0] if self._has_shares else 0, stream)
        index = self._make_index(kept, stream)
        self._workspaces.give_back(stream, taken)
        if stream.is_capturing():  # each replay writes there, and reads what lists are made of
            self._captured += [*taken.arrays, *made]
            gpu.hold(self)
        return index


class FixedSelection:
    """A selection of blocks that depend on the layout of q and k alone: a call makes their index, and chooses nothing.

    Each index is a new one, since a caller may write to the arrays of an index on a device.

    Parameters
    ----------
    kept : NumPy bool array [num_q_blocks, num_kv_blocks]
        The blocks that every head keeps. They are copied to the device now.
    maker_of : callable
        Returns what makes the index of blocks that lie as a given array of the device does, or None.
    target : Gpu
    """

    def __init__(self, kept: Any, maker_of: Callable[[Array], IndexMaker | None], target: gpu.Gpu) -> None:
        self._lists = target.guarded(self, {"kept": target.sent(kept)})
        self._make_index = maker_of(self._lists.arrays["kept"])
        self._address = target.mask_address(self._lists.arrays["kept"])
        self._current_stream = target.current_stream

    @property
    def makes_index(self) -> bool:
        """Return whether there are kernels that make the index."""
        return self._make_index is not None

    def __call__(self, q: Array, k: Array) -> BlockIndex:
        """The blocks, in a new index on the device."""
        assert self._make_index is not None
        stream = self._current_stream()
        self._lists.use(stream)
        if stream.is_capturing():  # each replay reads the blocks, and what lists are made of
            gpu.hold(self)
        return self._make_index(self._address, stream)
