"""Hypothesis strategies for masks of every kind, single and combined, some with rows that attend no key."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from ..arrays import Array, whole_number
from ..keywords import explains_keywords
from ..masks._chosen import ChosenBlocks, Compressed
from ..masks.arrays import Dense, FromFunction
from ..masks.base import Mask
from ..masks.block_pattern import BlockPattern
from ..masks.diagonal import Causal, Dilated, PrefixLM, SlidingWindow
from ..masks.documents import Documents
from ..masks.lengths import Lengths
from ..masks.sequences import Sequences
from ..masks.shape import MaskShape

Integer: TypeAlias = int | np.integer
INTEGER_TYPES = (
    np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64
)  # fmt: skip


@lru_cache(1 << 12)
def shared(build: Callable[..., st.SearchStrategy[Any]], *arguments: Hashable) -> st.SearchStrategy[Any]:
    """Return the strategy that `build` returns for arguments, which later draws with equal arguments share.

    Hypothesis examines each new strategy when it is first drawn from, which takes longer than a draw.
    """
    return build(*arguments)


@dataclass(frozen=True)
class Checkered:
    """A mask function that hides every `period`-th key, starting at a key that depends on query and head."""

    period: int
    by_head: bool

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return (i + 2 * j + (h + b if self.by_head else 0)) % self.period != 0


@explains_keywords
@st.composite
def masks(draw: st.DrawFn, shape: MaskShape, max_leaves: int = 3) -> Mask:
    """Draw masks of every kind for a shape, single or combined by ``& | ^ - ~``, some with rows that attend no key.

    Parameters
    ----------
    shape : MaskShape
        Batch, heads and lengths of the masks.
    max_leaves : int
        How many masks may be combined into one.

    Returns
    -------
    hypothesis.strategies.SearchStrategy
        A strategy that draws a `Mask`.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> from cuflash.masks import MaskShape
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(masks(MaskShape((), 2, 3, 5)))
    ... def test(mask):
    ...     assert mask.toarray(3, 5, num_heads=2).shape[-2:] == (3, 5)
    >>> test()
    """
    max_leaves = whole_number("max_leaves", max_leaves, 1)
    mask = _leaf(draw, shape)
    for _ in range(draw(shared(st.integers, 0, max_leaves - 1))):
        combine = draw(shared(st.sampled_from, (operator.and_, operator.or_, operator.xor, operator.sub)))
        mask = combine(mask, _leaf(draw, shape))
        mask = ~mask if draw(st.booleans()) else mask
    return mask


def _leaf(draw: st.DrawFn, shape: MaskShape) -> Mask:
    kind: Callable[[st.DrawFn, MaskShape], Mask] = draw(shared(st.sampled_from, _LEAVES))
    mask = kind(draw, shape)
    return ~mask if draw(shared(st.sampled_from, (False, False, False, True))) else mask


def _align(draw: st.DrawFn, shape: MaskShape) -> str | None:
    is_square = shape.seqlen_q == shape.seqlen_kv
    align: str | None = draw(shared(st.sampled_from, (*[None] * is_square, "bottom_right", "top_left")))
    return align


INTEGER_KINDS = st.sampled_from((int, *INTEGER_TYPES))


def as_kind(number: int, kind: type[int] | type[np.integer]) -> Integer:
    """Convert a number to an integer type if the type can represent it."""
    return kind(number) if kind is int or np.iinfo(kind).min <= number <= np.iinfo(kind).max else number


def _numbers(least: int, most: int) -> st.SearchStrategy[Any]:
    """Return a strategy for integers of Python and of every NumPy type."""
    return st.builds(as_kind, st.integers(least, most), INTEGER_KINDS)


def _sides(draw: st.DrawFn, shape: MaskShape) -> tuple[int | None, int | None]:
    """Draw the two sides of a window, some of which exceed the number of keys."""
    side = shared(_side, shape.seqlen_kv)
    return draw(side), draw(side)


def _side(seqlen_kv: int) -> st.SearchStrategy[int | None]:
    return st.none() | _numbers(0, seqlen_kv + 1) | st.sampled_from((2**31, 2**63 - 1, 2**70))


def _count(draw: st.DrawFn, shape: MaskShape, most: int) -> Array:
    """Draw one count, or an array with a count for each batch entry."""
    if not shape.batch or draw(st.booleans()):
        return draw(shared(_numbers, 0, most))
    counts = [draw(shared(st.integers, 0, most)) for _ in range(math.prod(shape.batch))]
    kind = _integers_that_hold(draw, most)
    if np.issubdtype(kind, np.signedinteger):  # negative numbers count as 0
        counts = [count or -2 for count in counts]
    return np.array(counts, kind).reshape(shape.batch)


def _integers_that_hold(draw: st.DrawFn, most: int) -> type[np.integer]:
    kinds = (np.int64, *(kind for kind in INTEGER_TYPES if most <= np.iinfo(kind).max))
    kind: type[np.integer] = draw(shared(st.sampled_from, kinds))
    return kind


def _generator(draw: st.DrawFn) -> np.random.Generator:
    return np.random.default_rng(draw(shared(st.integers, 0, 2**32 - 1)))


def _causal(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return Causal(_align(draw, shape))


def _sliding_window(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return SlidingWindow(*_sides(draw, shape), _align(draw, shape))


def _lengths(draw: st.DrawFn, shape: MaskShape) -> Mask:
    names = draw(shared(st.sampled_from, (("q",), ("kv",), ("q", "kv"))))
    mosts = {"q": shape.seqlen_q, "kv": shape.seqlen_kv}
    return Lengths(**{name: _count(draw, shape, mosts[name]) for name in names})


def _prefix_lm(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return PrefixLM(_count(draw, shape, shape.seqlen_kv), _align(draw, shape))


def _dilated(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return Dilated(draw(shared(_numbers, 1, 5)), *_sides(draw, shape), _align(draw, shape))


def _documents(draw: st.DrawFn, shape: MaskShape) -> Mask:
    rng, count = _generator(draw), draw(shared(st.integers, 1, 5))
    leading = shape.batch if draw(st.booleans()) else ()
    q_ids = rng.integers(0, count, (*leading, shape.seqlen_q), _integers_that_hold(draw, count))
    kv_ids = rng.integers(0, count + 1, (*leading, shape.seqlen_kv), _integers_that_hold(draw, count))
    if q_ids.dtype.kind == kv_ids.dtype.kind == "i":  # the same documents, with ids of both signs
        q_ids, kv_ids = q_ids - (count + 1) // 2, kv_ids - (count + 1) // 2
    if draw(st.booleans()):
        q_ids, kv_ids = np.sort(q_ids), np.sort(kv_ids)
    is_one_sequence = shape.seqlen_q == shape.seqlen_kv and draw(st.booleans())
    return Documents(q_ids) if is_one_sequence else Documents(q_ids, kv_ids)


def _sequences(draw: st.DrawFn, shape: MaskShape) -> Sequences:
    rng, count = _generator(draw), draw(shared(st.integers, 0, 5))
    leading = shape.batch if draw(st.booleans()) else ()
    left, right = _sides(draw, shape) if draw(st.booleans()) else (None, None)
    q_offsets, kv_offsets = (
        np.sort(rng.integers(0, length, (*leading, count + 1), _integers_that_hold(draw, length), endpoint=True))
        for length in shape[2:]
    )
    has_gaps = not count or draw(st.booleans())
    if not has_gaps:
        for offsets, length in zip((q_offsets, kv_offsets), shape[2:]):
            offsets[..., 0], offsets[..., -1] = 0, length
    fits_keys = (q_offsets <= shape.seqlen_kv).all() if has_gaps else shape.seqlen_q == shape.seqlen_kv
    if draw(st.booleans()) and fits_keys:
        return Sequences(q_offsets, causal=draw(st.booleans()), window=(left, right), allow_gaps=has_gaps)
    causal: Any = draw(shared(st.sampled_from, ("bottom_right", "top_left", False)))
    window = (left, right) if causal else None
    return Sequences(q_offsets, kv_offsets, causal=causal, window=window, allow_gaps=has_gaps)


def _block_pattern(draw: st.DrawFn, shape: MaskShape) -> Mask:
    sizes = shared(st.sampled_from, (1, 2, 3, 16, 17, 64, 100))
    block = draw(sizes), draw(sizes)
    grid = -(-shape.seqlen_q // block[0]), -(-shape.seqlen_kv // block[1])
    return BlockPattern(_random_bools(draw, shape, grid), block)


def _on_blocks(draw: st.DrawFn, shape: MaskShape) -> Mask:
    sizes = shared(st.sampled_from, (1, 2, 3, 16, 17))
    block = draw(sizes), draw(sizes)
    grid = -(-shape.seqlen_q // block[0]), -(-shape.seqlen_kv // block[1])
    kind: Callable[[st.DrawFn, MaskShape], Mask] = draw(shared(st.sampled_from, (_causal, _dilated, _dense)))
    pattern = kind(draw, MaskShape(shape.batch, shape.num_heads, *grid))
    return pattern.on_blocks(block, mirrored=grid[0] == grid[1] and draw(st.booleans()))


CHOICES = ("random", "shared", "disjoint", "the same", "the first by all")  # which blocks neighbouring queries choose


@st.composite
def chosen_blocks(draw: st.DrawFn, shape: MaskShape, num_kv_heads: int = 1) -> ChosenBlocks:
    """Draw lists of chosen blocks of every kind for a shape, some with repeated numbers, unused entries or empty rows.

    Parameters
    ----------
    shape : MaskShape
        Batch, heads and lengths of the lists.
    num_kv_heads : int
        Number of key/value heads; some lists are shared by the query heads of a key/value head.

    Returns
    -------
    hypothesis.strategies.SearchStrategy
        A strategy that draws a `ChosenBlocks`.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(chosen_blocks(MaskShape((), 4, 3, 50), num_kv_heads=2))
    ... def test(mask):
    ...     assert mask.num_lists in (1, 2, 4)
    >>> test()
    """
    block = draw(shared(st.sampled_from, (1, 8, 16, 24, 32, 64, 128)))
    num_blocks = -(-shape.seqlen_kv // block)
    num_entries = draw(shared(st.integers, 0, min(num_blocks, 8) + 3))
    heads = draw(shared(st.sampled_from, (1, num_kv_heads, shape.num_heads)))
    stretched = (*shape.batch[:-1], 1) if shape.batch else ()
    leading = draw(shared(st.sampled_from, ((), stretched, shape.batch[1:], shape.batch)))
    rng, axes = _generator(draw), (*leading, heads, shape.seqlen_q, num_entries)
    blocks = _choice(rng, draw(shared(st.sampled_from, CHOICES)), axes, num_blocks)
    counts = rng.integers(0, num_entries, axes[:-1], endpoint=True) if draw(st.booleans()) else None
    if counts is not None:
        unused = shared(st.sampled_from, (-1, -7, num_blocks, 2**31 - 1))
        blocks[np.arange(num_entries) >= counts[..., None]] = draw(unused)
    if draw(st.booleans()):
        blocks[..., _some_rows(draw, shape), :] = -1
    blocks = blocks.astype(draw(shared(st.sampled_from, (np.int32, np.int64))))
    if draw(st.booleans()):  # the strides of an array stored as (batch, length, heads, entries)
        blocks = np.ascontiguousarray(blocks.swapaxes(-3, -2)).swapaxes(-3, -2)
    is_flat = heads == 1 and not leading and draw(st.booleans())
    if counts is None:
        return ChosenBlocks(blocks[0] if is_flat else blocks, block)
    counts = counts.astype(_integers_that_hold(draw, num_entries))
    return ChosenBlocks(blocks[0], block, counts=counts[0]) if is_flat else ChosenBlocks(blocks, block, counts=counts)


def _choice(rng: np.random.Generator, kind: str, axes: tuple[int, ...], num_blocks: int) -> np.ndarray:
    """Draw block numbers as int64, some of which are -1, an unused entry."""
    blocks = rng.integers(-1, num_blocks, axes)
    queries = np.arange(axes[-2])[:, None]
    if kind == "shared":  # queries choose most of the blocks that the first of eight neighbours chooses
        is_shared = rng.random(axes) < 0.8
        blocks = np.where(is_shared, blocks[..., queries[:, 0] // 8 * 8, :], blocks)
    elif kind == "disjoint":
        blocks = np.where(blocks < 0, -1, (queries * axes[-1] + np.arange(axes[-1])) % max(1, num_blocks))
    elif kind == "the same":
        blocks = np.broadcast_to(blocks[..., :1, :], axes).copy()
    elif kind == "the first by all" and num_blocks:
        blocks[..., :1] = 0
    return blocks


def _chosen_blocks(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return draw(chosen_blocks(shape))


@st.composite
def chosen_in_sequences(draw: st.DrawFn, shape: MaskShape, num_kv_heads: int = 1) -> ChosenBlocks:
    """Draw lists whose numbers count from the first key of a packed sequence; parameters as for `chosen_blocks`.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(chosen_in_sequences(MaskShape((), 1, 3, 50)))
    ... def test(mask):
    ...     assert mask.sequences is not None
    >>> test()
    """
    sequences = _sequences(draw, shape)
    if draw(st.booleans()):  # sequences begin at multiples of 16 keys, so that kernels can join the lists
        offsets = sequences.arrays[-1]
        rounded = np.concatenate([offsets[..., :-1] // 16 * 16, offsets[..., -1:]], axis=-1)
        has_own = sequences.kv_offsets is not None
        sequences = replace(sequences, kv_offsets=rounded) if has_own else replace(sequences, q_offsets=rounded)
    mask = replace(draw(chosen_blocks(shape, num_kv_heads)), sequences=sequences)
    first, end = mask._bounds_of_sequences(shape.seqlen_kv)
    num_blocks = -(-np.maximum(end - first, 0) // mask.block)[..., None, :, None]
    has_number = (mask.blocks >= 0) & (num_blocks > 0)
    blocks = np.where(has_number, mask.blocks % np.maximum(num_blocks, 1), mask.blocks).astype(mask.blocks.dtype)
    return replace(mask, blocks=blocks[0] if mask.blocks.ndim == 2 and blocks.shape[:-2] == (1,) else blocks)


def _chosen_in_sequences(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return draw(chosen_in_sequences(shape))


def _compressed(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return Compressed(draw(shared(_numbers, 1, 40)), draw(shared(_numbers, 1, 20)))


def _dense(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return Dense(_random_bools(draw, shape, shape[2:]))


def _single_cell(draw: st.DrawFn, shape: MaskShape) -> Mask:
    allowed = np.zeros(shape[2:], bool)
    if allowed.size:
        allowed.flat[draw(shared(st.integers, 0, allowed.size - 1))] = True
    return Dense(allowed)


def _some_rows(draw: st.DrawFn, shape: MaskShape) -> slice:
    third = -(-shape.seqlen_q // 3)
    first, middle, last, every_other = slice(third), slice(third, -third), slice(-third, None), slice(0, None, 2)
    return draw(st.sampled_from((first, middle, last, every_other)))


def _without_rows(draw: st.DrawFn, shape: MaskShape) -> Mask:
    """Draw a mask that allows everything except in some rows, which attend no key."""
    allowed = np.ones((shape.seqlen_q, 1), bool)
    allowed[_some_rows(draw, shape)] = False
    return Dense(allowed)


def _without_first_keys(draw: st.DrawFn, shape: MaskShape) -> Mask:
    """Draw a mask that allows everything except the first keys in some rows."""
    allowed = np.ones(shape[2:], bool)
    allowed[_some_rows(draw, shape), : draw(shared(st.integers, 0, shape.seqlen_kv))] = False
    return Dense(allowed)


def _checkered(draw: st.DrawFn, shape: MaskShape) -> Mask:
    return FromFunction(Checkered(draw(shared(st.integers, 2, 7)), draw(st.booleans())))


_LEAVES = (
    _causal,
    _sliding_window,
    _lengths,
    _prefix_lm,
    _dilated,
    _documents,
    _sequences,
    _block_pattern,
    _chosen_blocks,
    _chosen_in_sequences,
    _compressed,
    _on_blocks,
    _dense,
    _single_cell,
    _without_rows,
    _without_first_keys,
    _checkered,
)


def _random_bools(draw: st.DrawFn, shape: MaskShape, last: tuple[int, ...]) -> np.ndarray:
    leading = _leading(shape, draw(shared(st.integers, 0, 3)))
    density: float = draw(shared(st.sampled_from, (0.5, 0.05, 0.95, 0.0, 1.0)))
    bools: np.ndarray = _generator(draw).random((*leading, *last)) < density
    return bools


def _leading(shape: MaskShape, axes: int) -> tuple[int, ...]:
    """Return leading axes of an array: (), (num_heads,), (*batch, 1) or (*batch, num_heads) for `axes` from 0 to 3."""
    full = (*shape.batch, shape.num_heads)
    return (*full[:-1], 1) if axes == 2 and len(full) > 1 else full[len(full) - min(axes, len(full)) :]
