"""How many blocks a selector keeps, and which it must: one rule for all of them, in arrays of any namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array, describe, is_flag, is_int, is_number, namespace
from ..errors import UnsupportedProblem

_LARGEST = np.uint32(0xFFFFFFFF)
_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many blocks of each block row are kept: exactly one of `top_k`, `mass` and `threshold`.

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

    Raises
    ------
    UnsupportedProblem
        Not exactly one of the three is given, or a number is out of its range.

    Examples
    --------
    >>> Budget(top_k=8)
    Budget(top_k=8, mass=None, threshold=None, min_blocks=1)
    >>> Budget(mass=0.9, min_blocks=2).mass
    0.9
    """

    top_k: int | None = None
    mass: float | None = None
    threshold: float | None = None
    min_blocks: int = 1

    def __post_init__(self) -> None:
        reasons = []
        given = [name for name in ("top_k", "mass", "threshold") if getattr(self, name) is not None]
        if len(given) != 1:
            told = " and ".join(given) or "none of them"
            reasons.append(f"a budget must be given exactly one of top_k, mass and threshold; got {told}")
        if self.top_k is not None and not (is_int(self.top_k) and self.top_k >= 1):
            reasons.append(f"top_k must be an int of at least 1; got {describe(self.top_k)}")
        if self.mass is not None and not (is_number(self.mass) and 0 < self.mass <= 1):
            reasons.append(f"mass must be a number above 0 and at most 1; got {describe(self.mass)}")
        if self.threshold is not None and not (is_number(self.threshold) and np.isfinite(self.threshold)):
            reasons.append(f"threshold must be a finite number; got {describe(self.threshold)}")
        if not (is_int(self.min_blocks) and self.min_blocks >= 0):
            reasons.append(f"min_blocks must be an int of at least 0; got {describe(self.min_blocks)}")
        if reasons:
            raise UnsupportedProblem(reasons)


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
        if reasons:
            raise UnsupportedProblem(reasons)


def forced_blocks(xp: Any, forced: Forced, lengths: tuple[int, int], block: tuple[int, int], offset: int) -> Array:
    """Which blocks are forced, bool [num_q_blocks, num_kv_blocks]; query i meets key i + offset on the diagonal."""
    num_rows, num_columns = (-(-length // side) for length, side in zip(lengths, block))
    first_query = xp.arange(num_rows)[:, None] * block[0]
    last_query = xp.minimum(first_query + block[0], lengths[0]) - 1
    first, last = ((query + offset) // block[1] for query in (first_query, last_query))
    column = xp.arange(num_columns)[None, :]
    kept = (column < forced.sink) & (first_query >= 0)
    kept = kept | (column > last - forced.local) & (column <= last)
    return kept | (column >= first) & (column <= last) if forced.diagonal else kept


def choose(scores: Array, weights: Array, eligible: Array, forced: Array, budget: Budget) -> Array:
    """Which blocks of each row are kept, bool [..., num_kv_blocks].

    Parameters
    ----------
    scores : array [..., num_kv_blocks]
        What decides the order; NaN comes last.
    weights : array of that shape
        The share of each block, which counts for ``Budget(mass=)``.
    eligible, forced : bool arrays that broadcast against them
        Blocks that may be kept, and blocks that must be if they may.
    """
    xp = namespace(scores)
    eligible = xp.broadcast_to(eligible, scores.shape)
    forced = eligible & forced
    keys = xp.where(forced, _LARGEST, xp.where(eligible, _ordered(scores), np.uint32(0)))
    counts = eligible.astype(np.float64)
    kept = forced
    if budget.top_k is not None:
        kept = kept | _first_to_reach(keys, counts, float(budget.top_k))
    elif budget.mass is not None:
        shares = weights.astype(np.float64) * eligible
        kept = kept | _first_to_reach(keys, shares, budget.mass * shares.sum(axis=-1)[..., None])
    else:
        assert budget.threshold is not None
        kept = kept | (scores >= budget.threshold)
    if budget.min_blocks > (budget.top_k or 0):
        kept = kept | _first_to_reach(keys, counts, float(budget.min_blocks))
    return kept & eligible


def _ordered(scores: Array) -> Array:
    """Numbers, uint32, in the order of scores as float32; -0 and 0 are equal, and NaN is the least."""
    xp = namespace(scores)
    finite = xp.where(scores == scores, scores, -np.inf).astype(np.float32) + np.float32(0)
    bits = finite.view(np.uint32)
    return xp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _first_to_reach(keys: Array, weights: Array, goal: Any) -> Array:
    """The fewest places of each row, highest key first and of equal keys the lower place, whose weights reach a goal.

    The key of the last of them is found bit by bit, so that no sort and no synchronisation with a device is needed.
    """
    xp = namespace(keys)
    last = xp.zeros((*keys.shape[:-1], 1), dtype=np.uint32)
    for bit in reversed(range(32)):
        candidate = last | np.uint32(1 << bit)
        reached = xp.where(keys >= candidate, weights, 0.0).sum(axis=-1)[..., None] >= goal
        last = xp.where(reached, candidate, last)
    above, is_last = keys > last, keys == last
    of_last = xp.where(is_last, weights, 0.0)
    before = xp.where(above, weights, 0.0).sum(axis=-1)[..., None] + xp.cumsum(of_last, axis=-1) - of_last
    return above | is_last & (before < goal)
