"""The number of blocks that a selector keeps, and the blocks that it must keep: one rule for all selectors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..arrays import Array, describe, is_flag, is_int, is_number, namespace
from ..errors import refuse
from ..keywords import explains_keywords

# Halves of the keys by which blocks are ordered, and where keys of blocks that are not forced, or not eligible, begin.
_MAGNITUDE, _FORCED = np.int32((1 << 31) - 1), np.int32(-1 << 31)
_BLOCK = (1 << 32) - 1
_NOT_FORCED, _NOT_ELIGIBLE = (int(_FORCED) + 1) << 32, int(_MAGNITUDE) << 32


@explains_keywords
@dataclass(frozen=True, kw_only=True)
class Budget:
    """The number of blocks that each block row keeps: exactly one of `top_k`, `mass`, `threshold` and `density`.

    Blocks are taken in the order of their scores, the highest first; of equal ones the lower number. Blocks that are
    forced come before all others and count. Scores are compared in float32.

    Parameters
    ----------
    top_k : int, optional
        So many blocks, or all that are eligible where there are fewer, or all that are forced where there are more.
    mass : float, optional
        The fewest blocks whose estimated shares of the softmax add up to this part, in (0, 1], of all eligible ones.
    threshold : float, optional
        The blocks of at least this score.
    min_blocks : int
        At least so many blocks, where there are as many eligible ones.
    density : float, optional
        This share, in (0, 1], of the blocks that are eligible in the row, rounded up: the fewest blocks whose number
        over that of the eligible ones is at least `density`. Eligible are the blocks of which the masks allow a key,
        under `causal` those up to the diagonal.

    Raises
    ------
    UnsupportedProblem
        Not exactly one of the four is given, or a number is out of its range.

    Examples
    --------
    >>> Budget(top_k=8)
    Budget(top_k=8, mass=None, threshold=None, min_blocks=1, density=None)
    >>> Budget(density=0.25).density
    0.25
    >>> Budget(mass=0.9, min_blocks=2).mass
    0.9
    """

    top_k: int | None = None
    mass: float | None = None
    threshold: float | None = None
    min_blocks: int = 1
    density: float | None = None

    def __post_init__(self) -> None:
        reasons = []
        given = [name for name in ("top_k", "mass", "threshold", "density") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            reasons.append(f"a budget must have exactly one of top_k, mass, threshold and density; got {got}")
        if self.top_k is not None and not (is_int(self.top_k) and self.top_k >= 1):
            reasons.append(f"top_k must be an int of at least 1; got {describe(self.top_k)}")
        for name, part in (("mass", self.mass), ("density", self.density)):
            if part is not None and not (is_number(part) and 0 < part <= 1):
                reasons.append(f"{name} must be a number above 0 and at most 1; got {describe(part)}")
        if self.threshold is not None and not (is_number(self.threshold) and np.isfinite(self.threshold)):
            reasons.append(f"threshold must be a finite number; got {describe(self.threshold)}")
        if not (is_int(self.min_blocks) and self.min_blocks >= 0):
            reasons.append(f"min_blocks must be an int of at least 0; got {describe(self.min_blocks)}")
        refuse(reasons)

    @property
    def part(self) -> float | None:
        """The part of all shares that the kept blocks hold; every block has the same share for a density.

        A density is lowered by less than any number of blocks can tell, so that 0.55 of 100 blocks, whose product is
        rounded to more than 55, are 55.

        Examples
        --------
        >>> Budget(mass=0.9).part, Budget(top_k=3).part
        (0.9, None)
        """
        return self.mass if self.density is None else float(self.density) * (1 - 2**-50)

    @lru_cache(maxsize=64)
    def halves(self) -> tuple[Budget, Budget]:
        """Split the budget into a half, rounded up, and the rest, of one block at least; a threshold is that of both.

        Returns
        -------
        first, second : Budget

        Examples
        --------
        >>> [half.top_k for half in Budget(top_k=5).halves()]
        [3, 2]
        """
        if self.threshold is not None:
            return self, self
        name, whole = next((name, x) for name in ("top_k", "mass", "density") if (x := getattr(self, name)) is not None)
        parts = (whole - whole // 2, max(whole // 2, 1)) if name == "top_k" else (whole / 2, whole / 2)
        few = self.min_blocks - self.min_blocks // 2, self.min_blocks // 2
        of_both = [replace(self, **{name: part}, min_blocks=least) for part, least in zip(parts, few)]
        return of_both[0], of_both[1]


@explains_keywords
@dataclass(frozen=True, kw_only=True)
class Forced:
    """Blocks that every selector keeps, whatever their scores, as far as the masks allow a key of them.

    Parameters
    ----------
    sink : int
        So many blocks at the start of the keys.
    local : int
        So many blocks that end with the block of the row's last diagonal key.
    diagonal : bool
        All blocks that hold a diagonal key of the row: key i, or with ``causal="bottom_right"`` the key that query i
        meets in that alignment.

    Raises
    ------
    UnsupportedProblem
        A count is not an int of at least 0, or `diagonal` is neither True nor False.

    Examples
    --------
    >>> Forced(sink=1, local=2)
    Forced(sink=1, local=2, diagonal=True)
    """

    sink: int = 0
    local: int = 0
    diagonal: bool = True

    def __post_init__(self) -> None:
        reasons = [
            f"{name} must be an int of at least 0; got {describe(count)}"
            for name, count in (("sink", self.sink), ("local", self.local))
            if not (is_int(count) and count >= 0)
        ]
        if not is_flag(self.diagonal):
            reasons.append(f"diagonal must be True or False; got {describe(self.diagonal)}")
        refuse(reasons)


@dataclass(frozen=True, eq=False)
class Diagonal:
    """The blocks that hold diagonal keys of each block row, made once for what is eligible and what is forced.

    Attributes
    ----------
    column : int64 array [num_kv_blocks]
        Numbers of the blocks.
    first, last : int64 array [num_q_blocks, 1]
        The first and the last block that hold a diagonal key of the row.
    is_met : bool array [num_q_blocks, num_kv_blocks]
        Blocks up to the last one: those that a causal mask allows a key of.
    """

    column: Array
    first: Array
    last: Array
    is_met: Array

    @classmethod
    def of(cls, xp: Any, lengths: tuple[int, int], block: tuple[int, int], offset: int) -> Diagonal:
        """Make the diagonal of a grid of blocks where query i meets key i + offset."""
        num_rows, num_columns = (-(-length // side) for length, side in zip(lengths, block))
        column = xp.arange(num_columns)
        stops = xp.arange(block[0], (num_rows + 1) * block[0], block[0])[:, None]
        first = (stops + (offset - block[0])) // block[1]
        last = (xp.minimum(stops, lengths[0]) + (offset - 1)) // block[1]
        return cls(column, first, last, column <= last)

    def forced(self, forced: Forced) -> Array:
        """Return the blocks that are forced, bool [num_q_blocks, num_kv_blocks]."""
        # Local and diagonal blocks are two runs that end with the same block, so that the longer one is both.
        first = self.first
        if forced.local or not forced.diagonal:
            first = self.last - (forced.local - 1)
            first = namespace(first).minimum(first, self.first) if forced.diagonal else first
        kept = (self.column >= first) & self.is_met
        return kept | (self.column < forced.sink) if forced.sink else kept


def choose(scores: Array, weights: Array, eligible: Any, forced: Any, budget: Budget) -> Array:
    """Return which blocks of each row are kept, bool [..., num_kv_blocks].

    Parameters
    ----------
    scores : array [..., num_kv_blocks]
        What decides the order; NaN comes last.
    weights : array of that shape
        The share of each block, which counts for ``Budget(mass=)``; for ``Budget(density=)`` all count alike.
    eligible, forced : bool arrays that broadcast against them, or None
        Blocks that may be kept, and blocks that must be if they may; None for all, and for none.
    """
    xp = namespace(scores)
    if 0 in scores.shape:
        return xp.zeros(scores.shape, dtype=bool)
    keys = _keys(scores, eligible, forced)
    count = min(max(budget.top_k or 0, budget.min_blocks), scores.shape[-1])
    last: Any = _NOT_FORCED - 1
    part = budget.part
    if count or part is not None:
        in_order = xp.sort(keys, axis=-1)
        if count:
            last = in_order[..., count - 1 : count]
        if part is not None:
            shares = weights.astype(np.float64) if budget.density is None else xp.ones(scores.shape)
            of_mass = _last_needed(in_order, shares if eligible is None else shares * eligible, part)
            last = xp.maximum(last, of_mass) if count else of_mass
        last = xp.clip(last, _NOT_FORCED - 1, _NOT_ELIGIBLE - 1)
    kept = keys <= last
    if budget.threshold is None:
        return kept
    above = scores >= budget.threshold
    return kept | (above if eligible is None else above & eligible)


def _keys(scores: Array, eligible: Any, forced: Any) -> Array:
    """Numbers, int64, all of a row different, whose order is the one in which blocks are taken.

    The upper half is the place of the score as float32, where -0 and 0 are equal and NaN is the least, and the lower
    half is the number of the block. Forced blocks are below `_NOT_FORCED`, and those that are not eligible are not
    below `_NOT_ELIGIBLE`.
    """
    xp = namespace(scores)
    negated = np.float32(0) - xp.fmax(scores, -np.inf).astype(np.float32, copy=False)
    bits = negated.view(np.int32)
    places = bits ^ ((bits >> 31) & _MAGNITUDE)  # in the order of the numbers that the bits stand for
    if forced is not None:
        places = xp.where(forced, _FORCED, places)
    if eligible is not None:
        places = xp.where(eligible, places, _MAGNITUDE)
    return (places.astype(np.int64) << 32) | xp.arange(scores.shape[-1])


def _last_needed(in_order: Array, shares: Array, mass: float) -> Array:
    """The greatest of the fewest first keys whose blocks hold a part of the shares of a row, int64 [..., 1]."""
    xp, num_blocks = namespace(shares), shares.shape[-1]
    starts = xp.arange(0, shares.size, num_blocks).reshape(*shares.shape[:-1], 1)
    sums = xp.cumsum(xp.take(shares.reshape(-1), (in_order & _BLOCK) + starts), axis=-1)
    before = xp.zeros(shares.shape, dtype=np.float64)
    before[..., 1:] = sums[..., :-1]
    is_needed = ~(before >= mass * sums[..., -1:])  # every block is where the sum is NaN
    return xp.where(is_needed, in_order, _NOT_FORCED - 1).max(axis=-1)[..., None]
