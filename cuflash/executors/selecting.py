"""Launches the kernels of selectors on the current CUDA device, without a wait."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..arrays import Array, accumulator_dtype, namespace
from ..blocks.index import BlockIndex
from ..compiler import nvrtc
from ..planning.selection_kernels import (
    CHOICE, DRAW, POOLING, ChoiceRule, drawing_launch, means_shape, pooling_launch,
)  # fmt: skip
from . import gpu
from .bound_launch import BoundLaunch
from .decoding import offset_of
from .index_maker import IndexMaker
from .launch import LaunchTarget

_MAX_CHOOSERS = 256

_choosers: dict[Hashable, Chooser] = {}


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
        launch, grid, record = rule.launch(shape, dtype)
        gpu.compile_kernels([launch.spec], target)
        names = ("scores", "shares", "allowed", "forced", "kept")
        places = [(0, offset_of(CHOICE, name)) for name in names]
        self._launch = BoundLaunch(launch, grid, [record], places, target)
        self._make, self._address = target.maker(shape, np.dtype(bool)), target.address

    def __call__(self, scores: int, shares: int, stream: Any, allowed: int = 0, forced: int = 0) -> Array:
        """Return the blocks that are kept, bool, for arrays at these addresses; 0 where there is none."""
        kept = self._make()
        self._launch((scores, shares, allowed, forced, self._address(kept)), stream)
        return kept


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
    key = nvrtc.current_device()[1], rule, scores.shape, scores.dtype
    chooser = _choosers.get(key)
    if chooser is None:
        if len(_choosers) >= _MAX_CHOOSERS:
            _choosers.clear()
        chooser = _choosers[key] = Chooser(rule, scores.shape, scores.dtype, target)
    given = [xp.ascontiguousarray(scores), None if shares is None else xp.ascontiguousarray(shares)]
    for each in (allowed, forced):
        given.append(None if each is None else xp.ascontiguousarray(xp.broadcast_to(each, scores.shape)))
    of_scores, of_shares, of_allowed, of_forced = (0 if each is None else target.address(each) for each in given)
    return chooser(of_scores, of_shares, target.stream(), of_allowed, of_forced)


class Pooler:
    """The kernel that makes means of blocks of rows, for q and k of one layout.

    Parameters
    ----------
    q, k : arrays
        Their layouts alone matter.
    block : (int, int)
        Rows of a block of each.
    target : Gpu
        The device; the kernel is compiled now.
    """

    def __init__(self, q: Array, k: Array, block: tuple[int, int], target: gpu.Gpu) -> None:
        launch, grid, record = pooling_launch((q, k), block)
        gpu.compile_kernels([launch.spec], target)
        start = [offset_of(POOLING, name) for name in "qk"]
        of_means = offset_of(POOLING["q"], "means")
        places = [(0, at + inner) for at in start for inner in (0, of_means)]
        self._launch = BoundLaunch(launch, grid, [record], places, target)
        self._address, dtype = target.address, accumulator_dtype(q.dtype)
        self._makers = [target.maker(means_shape(x.shape, side), dtype) for x, side in zip((q, k), block)]

    def __call__(self, q: Array, k: Array, stream: Any) -> tuple[Array, Array]:
        """Return the means of q and of k."""
        of_q, of_k = (make() for make in self._makers)
        self._launch([self._address(each) for each in (q, of_q, k, of_k)], stream)
        return of_q, of_k


class Drawer:
    """The kernel that draws scores for the blocks of a grid of one shape, by a seed.

    Parameters
    ----------
    shape : tuple of int
    seed : int
    target : Gpu
        The device; the kernel is compiled now.
    """

    def __init__(self, shape: tuple[int, ...], seed: int, target: gpu.Gpu) -> None:
        launch, grid, record = drawing_launch(shape, seed)
        gpu.compile_kernels([launch.spec], target)
        self._launch = BoundLaunch(launch, grid, [record], [(0, offset_of(DRAW, "numbers"))], target)
        self._make, self._address = target.maker(shape, np.dtype(np.float32)), target.address

    def __call__(self, stream: Any) -> Array:
        """Return the numbers, float32 in [0, 1)."""
        numbers = self._make()
        self._launch((self._address(numbers),), stream)
        return numbers


def drawn(shape: tuple[int, ...], seed: int) -> Array:
    """Draw scores for the blocks of a grid by the kernel, on the current device."""
    target = gpu.current_target()
    return Drawer(shape, seed, target)(target.stream())


class Selection:
    """A selection of blocks by kernels alone, for q and k of one layout.

    Parameters
    ----------
    score : callable
        Takes q, k and the stream, and returns scores of blocks, and whatever else is kept alive.
    has_shares : bool
        Whether scores are masses, or multiples of them in each row; else all blocks count alike.
    choose : Chooser
    make_index : IndexMaker
    target : LaunchTarget
    """

    def __init__(
        self,
        score: Callable[[Array, Array, Any], list[Array]],
        has_shares: bool,
        choose: Chooser,
        make_index: IndexMaker,
        target: LaunchTarget,
    ) -> None:
        self._score, self._has_shares, self._choose, self._make_index = score, has_shares, choose, make_index
        self._target = target

    def __call__(self, q: Array, k: Array) -> BlockIndex:
        """The blocks chosen, in an index on the device."""
        stream, address = self._target.stream(), self._target.address
        scores = address(made := self._score(q, k, stream)[0])
        kept = self._choose(scores, scores if self._has_shares else 0, stream)
        index = self._make_index(address(kept), stream)
        del made  # the stream reads it before the next owner of its memory writes
        return index
