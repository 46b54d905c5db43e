"""The number of blocks that a selector keeps, and the blocks that it must keep: one rule for all selectors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..arrays import Array, describe, int_reasons, is_flag, is_int, is_number, Namespace, namespace
from ..errors import refuse
from ..keywords import explains_keywords

# Bit masks for the halves of sort keys (see `_keys`), and the least keys of blocks that are not forced or not eligible.
_MAGNITUDE, _FORCED = np.int32((1 << 31) - 1), np.int32(-1 << 31)
_BLOCK = (1 << 32) - 1
_NOT_FORCED, _NOT_ELIGIBLE = (int(_FORCED) + 1) << 32, int(_MAGNITUDE) << 32


@explains_keywords
@dataclass(frozen=True, kw_only=True)
class Budget:
    """The number of blocks that each block row keeps: exactly one of `top_k`, `mass`, `threshold` and `density`.

    Blocks are kept in descending order of their scores; among equal scores, the lower block number comes first. Forced
    blocks come before all others and count toward the budget. Scores are compared in float32.

    Parameters
    ----------
    top_k : int, optional
        Number of blocks per row; fewer if fewer are eligible, more if more are forced.
    mass : float, optional
        Keep the fewest blocks that hold at least this fraction, in (0, 1], of the estimated mass of eligible blocks.
    threshold : float, optional
        Keep the blocks with at least this score.
    min_blocks : int
        Minimum number of blocks per row; fewer if fewer are eligible.
    density : float, optional
        Fraction, in (0, 1], of the row's eligible blocks to keep, rounded up to whole blocks. A block is eligible if
        the masks allow a key in it; with `causal`, these are the blocks up to the diagonal.
    max_blocks : int, optional
        Maximum number of blocks per row. If blocks have one query, this is the length of each query's list, and is
        required with `mass` and `threshold`.

    Raises
    ------
    UnsupportedProblem
        Not exactly one of the four is set, or a number is out of range.

    Examples
    --------
    >>> Budget(top_k=8)
    Budget(top_k=8, mass=None, threshold=None, min_blocks=1, density=None, max_blocks=None)
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
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        reasons = []
        set_names = [name for name in ("top_k", "mass", "threshold", "density") if getattr(self, name) is not None]
        if len(set_names) != 1:
            got = " and ".join(set_names) or "none of them"
            reasons.append(f"a budget must have exactly one of top_k, mass, threshold and density; got {got}")
        reasons += [] if self.top_k is None else int_reasons(1, top_k=self.top_k)
        for name, part in (("mass", self.mass), ("density", self.density)):
            if part is not None and not (is_number(part) and 0 < part <= 1):
                reasons.append(f"{name} must be a number above 0 and at most 1; got {describe(part)}")
        if self.threshold is not None and not (is_number(self.threshold) and np.isfinite(self.threshold)):
            reasons.append(f"threshold must be a finite number; got {describe(self.threshold)}")
        reasons += int_reasons(0, min_blocks=self.min_blocks)
        if self.max_blocks is not None and not reasons:
            least = max(1, self.min_blocks, self.top_k or 0)
            if not (is_int(self.max_blocks) and self.max_blocks >= least):
                reasons.append(
                    f"max_blocks must be an int of at least {least}, the minimum of the other arguments; got "
                    f"{describe(self.max_blocks)}"
                )
        refuse(reasons)
        for name in ("mass", "threshold", "density"):
            number = getattr(self, name)
            object.__setattr__(self, name, None if number is None else float(number))  # 0.1 == np.float32(0.1)

    @property
    def part(self) -> float | None:
        """The fraction of the total weight that the kept blocks must hold; for a density, all blocks have equal weight.

        A density is reduced by a tiny amount, so that 0.55 of 100 blocks is 55 although the rounded product exceeds 55.

        Examples
        --------
        >>> Budget(mass=0.9).part, Budget(top_k=3).part
        (0.9, None)
        """
        return self.mass if self.density is None else self.density * (1 - 2**-50)

    @lru_cache(maxsize=64)
    def halves(self) -> tuple[Budget, Budget]:
        """Split the budget into a half, rounded up, and the rest, at least one block; both halves have the threshold.

        Returns
        -------
        first, second : Budget
            The two halves.

        Examples
        --------
        >>> [half.top_k for half in Budget(top_k=5).halves()]
        [3, 2]
        """
        most = self.max_blocks
        many = (None, None) if most is None else (most - most // 2, max(most // 2, 1))
        if self.threshold is not None:
            few = [self.min_blocks if limit is None else min(self.min_blocks, limit) for limit in many]
            of_both = [replace(self, min_blocks=least, max_blocks=limit) for least, limit in zip(few, many)]
            return of_both[0], of_both[1]
        name, whole = next((name, x) for name in ("top_k", "mass", "density") if (x := getattr(self, name)) is not None)
        parts = (whole - whole // 2, max(whole // 2, 1)) if name == "top_k" else (whole / 2, whole / 2)
        few = [self.min_blocks - self.min_blocks // 2, self.min_blocks // 2]
        of_both = [
            replace(self, **{name: part}, min_blocks=least, max_blocks=limit)
            for part, least, limit in zip(parts, few, many)
        ]
        return of_both[0], of_both[1]


@explains_keywords
@dataclass(frozen=True, kw_only=True)
class Forced:
    """Blocks that are always kept, unless the mask excludes them entirely.

    Parameters
    ----------
    sink : int
        Number of blocks at the start of the keys.
    local : int
        Number of blocks that end with the block of the row's last diagonal key.
    diagonal : bool
        If True, keep all blocks with a diagonal key of the row: key i for query i, or with ``causal="bottom_right"``
        key i + seqlen_kv - seqlen_q.

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
        reasons = int_reasons(0, sink=self.sink, local=self.local)
        if not is_flag(self.diagonal):
            reasons.append(f"diagonal must be True or False; got {describe(self.diagonal)}")
        refuse(reasons)


DIAGONAL = Forced()  # the blocks that every selector forces by default


@dataclass(frozen=True, eq=False)
class Diagonal:
    """The blocks with diagonal keys of each block row, from which eligible and forced blocks are computed.

    Attributes
    ----------
    column : int64 array [num_kv_blocks]
        The numbers of the blocks.
    first, last : int64 array [num_q_blocks, 1]
        The first and the last block with a diagonal key of the row.
    is_met : bool array [num_q_blocks, num_kv_blocks]
        True for the blocks up to `last`; a causal mask allows keys only in these.
    """

    column: Array
    first: Array
    last: Array
    is_met: Array

    @classmethod
    def of(cls, xp: Namespace, lengths: tuple[int, int], block: tuple[int, int], offset: int) -> Diagonal:
        """Create the diagonal of a grid of blocks that aligns query i with key i + offset."""
        num_rows, num_columns = (-(-length // side) for length, side in zip(lengths, block))
        column = xp.arange(num_columns)
        stops = xp.arange(block[0], (num_rows + 1) * block[0], block[0])[:, None]
        first = (stops + (offset - block[0])) // block[1]
        last = (xp.minimum(stops, lengths[0]) + (offset - 1)) // block[1]
        return cls(column, first, last, column <= last)

    def forced(self, forced: Forced) -> Array:
        """Return the blocks that are forced, bool [num_q_blocks, num_kv_blocks]."""
        # The local and the diagonal blocks are runs that end with the same block, so the longer one contains the other.
        first = self.first
        if forced.local or not forced.diagonal:
            first = self.last - (forced.local - 1)
            first = namespace(first).minimum(first, self.first) if forced.diagonal else first
        is_forced = (self.column >= first) & self.is_met
        return is_forced | (self.column < forced.sink) if forced.sink else is_forced


def choose(scores: Array, weights: Array, eligible: Array | None, forced: Array | None, budget: Budget) -> Array:
    """Return which blocks of each row are kept, bool [..., num_kv_blocks].

    Parameters
    ----------
    scores : array [..., num_kv_blocks]
        The scores that determine the order; NaN comes last.
    weights : array [..., num_kv_blocks]
        The mass of each block for ``Budget(mass=)``; for ``Budget(density=)`` all blocks have equal weight.
    eligible, forced : bool arrays that broadcast against the scores, or None
        Blocks that may be kept (None: all), and eligible blocks that must be kept (None: none).
    """
    xp = namespace(scores)
    if 0 in scores.shape:
        return xp.zeros(scores.shape, dtype=bool)
    keys = _keys(scores, eligible, forced)
    count = min(max(budget.top_k or 0, budget.min_blocks), scores.shape[-1])
    last: Array | int = _NOT_FORCED - 1
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
    is_kept = keys <= last
    if budget.threshold is not None:
        above = scores >= budget.threshold
        is_kept = is_kept | (above if eligible is None else above & eligible)
    if budget.max_blocks is None or budget.max_blocks >= scores.shape[-1]:
        return is_kept
    return is_kept & (keys <= xp.sort(keys, axis=-1)[..., budget.max_blocks - 1 : budget.max_blocks])


def _keys(scores: Array, eligible: Array | None, forced: Array | None) -> Array:
    """Compute sort keys, int64 and distinct within a row, in whose ascending order blocks are kept.

    The upper half encodes the float32 score in descending order, where -0 equals 0 and NaN is the least; the lower half
    is the block number. Keys of forced blocks are less than `_NOT_FORCED`, and those of ineligible blocks are at least
    `_NOT_ELIGIBLE`.
    """
    xp = namespace(scores)
    negated = np.float32(0) - xp.fmax(scores, -np.inf).astype(np.float32, copy=False)
    bits = negated.view(np.int32)
    places = bits ^ ((bits >> 31) & _MAGNITUDE)  # integers that compare like the floats with these bits
    if forced is not None:
        places = xp.where(forced, _FORCED, places)
    if eligible is not None:
        places = xp.where(eligible, places, _MAGNITUDE)
    return (places.astype(np.int64) << 32) | xp.arange(scores.shape[-1])


def _last_needed(in_order: Array, shares: Array, mass: float) -> Array:
    """Return the sort key of the last block that is needed to hold a fraction of the row's mass, int64 [..., 1]."""
    xp, num_blocks = namespace(shares), shares.shape[-1]
    starts = xp.arange(0, shares.size, num_blocks).reshape(*shares.shape[:-1], 1)
    sums = xp.cumsum(xp.take(shares.reshape(-1), (in_order & _BLOCK) + starts), axis=-1)
    before = xp.zeros(shares.shape, dtype=np.float64)
    before[..., 1:] = sums[..., :-1]
    is_needed = ~(before >= mass * sums[..., -1:])  # all blocks are needed if the sum is NaN
    return xp.where(is_needed, in_order, _NOT_FORCED - 1).max(axis=-1)[..., None]
