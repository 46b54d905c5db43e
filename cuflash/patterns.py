"""Block-sparse patterns of the literature, as masks.

Patterns of windows, prefixes and strides fit any sequence length. Patterns of blocks are made for fixed lengths.

>>> sink_local(1, (1, 0)).toarray(4).astype(int)
array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [1, 1, 1, 0],
       [1, 0, 1, 1]])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array, describe, flag_reasons, int_reasons, is_int, is_number, whole_number
from .dropout import Rng, generator_of
from .errors import UnsupportedProblem, collecting, refuse
from .keywords import explains_keywords
from .masks.base import Band, Mask
from .masks.block_pattern import BlockPattern
from .masks.coordinates import UNBOUNDED, Intervals, widened
from .masks.diagonal import Causal, Dilated, SlidingWindow
from .masks.lengths import Lengths
from .masks.places import Places, placed
from .masks.shape import MAX_SEQLEN, BlockSize, MaskShape, block_pair, count_reasons

__all__ = ["bigbird", "butterfly", "checkerboard", "fixed", "longformer", "random", "sink_local", "strided"]


def __dir__() -> list[str]:
    return __all__


@explains_keywords
def butterfly(
    seqlen_q: int, seqlen_kv: int | None = None, *, block: BlockSize = 128, max_stride: int | None = None
) -> Mask:
    """Return the flat block butterfly: block row I keeps block I and the blocks whose number differs in one bit.

    Parameters
    ----------
    seqlen_q, seqlen_kv : int
        Lengths in tokens. Default of seqlen_kv: seqlen_q. If a length in blocks is not a power of two, the pattern of
        the next power is cut off.
    block : int or (int, int)
        Size of a block in tokens, or block_q and block_kv.
    max_stride : int, optional
        Keep only blocks at distances below this number of blocks, a power of two. Default: all distances.

    Returns
    -------
    Mask
        The pattern.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Notes
    -----
    Pixelated Butterfly, arXiv 2112.00029, section 3.2; the pattern of FlashAttention's block-sparse experiments,
    arXiv 2205.14135, section 3.3. A row has about log2(number of blocks) + 1 blocks.

    Examples
    --------
    >>> butterfly(8, block=1).toarray(8).astype(int)
    array([[1, 1, 1, 0, 1, 0, 0, 0],
           [1, 1, 0, 1, 0, 1, 0, 0],
           [1, 0, 1, 1, 0, 0, 1, 0],
           [0, 1, 1, 1, 0, 0, 0, 1],
           [1, 0, 0, 0, 1, 1, 1, 0],
           [0, 1, 0, 0, 1, 1, 0, 1],
           [0, 0, 1, 0, 1, 0, 1, 1],
           [0, 0, 0, 1, 0, 1, 1, 1]])
    """
    grid, sides = _grid(seqlen_q, seqlen_kv, block)
    reach = max(grid) if max_stride is None else min(whole_number("max_stride", max_stride, 1), max(grid))
    rows = np.arange(grid[0])
    cols = [rows, *(rows ^ (1 << bit) for bit in range(max(reach - 1, 0).bit_length()))]
    return _pattern_of(np.tile(rows, len(cols)), np.concatenate(cols), grid, sides)


@explains_keywords
def bigbird(
    seqlen_q: int,
    seqlen_kv: int | None = None,
    *,
    block: BlockSize = 128,
    num_window_blocks: int = 3,
    num_global_blocks: int = 1,
    num_random_blocks: int = 3,
    num_heads: int = 1,
    seed: int = 0,
    rng: Rng | None = None,
) -> Mask:
    """Return BigBird: a window of blocks, global blocks at both ends as rows and columns, and random blocks per row.

    Parameters
    ----------
    seqlen_q, seqlen_kv : int
        Lengths in tokens. Default of seqlen_kv: seqlen_q.
    block : int or (int, int)
        Size of a block in tokens, or block_q and block_kv.
    num_window_blocks : int
        Odd number of blocks around the diagonal.
    num_global_blocks : int
        Number of blocks at each end that attend all blocks and that all blocks attend.
    num_random_blocks : int
        Number of random blocks in each row, drawn without replacement from the remaining blocks; fewer if fewer remain.
    num_heads : int
        Number of heads with different random blocks; with 1, all heads have the same blocks.
    seed : int
        Seed of NumPy's generator.
    rng : numpy.random.Generator or int, optional
        A generator to draw from, or a seed, instead of `seed`.

    Returns
    -------
    Mask
        The pattern.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Notes
    -----
    arXiv 2007.14062, section 2 and appendix D (internal transformer construction).

    Examples
    --------
    >>> mask = bigbird(8, block=1, num_random_blocks=1)
    >>> mask.toarray(8, num_heads=1).sum(axis=-1)       # 3 window + 2 global + 1 random, and two global rows
    array([[8, 5, 6, 6, 6, 6, 5, 8]])
    """
    grid, sides = _grid(seqlen_q, seqlen_kv, block)
    num_window, num_global, num_random = _counts_of_blocks(
        num_window_blocks=num_window_blocks, num_global_blocks=num_global_blocks, num_random_blocks=num_random_blocks
    )
    if num_window % 2 == 0:
        raise UnsupportedProblem(
            f"num_window_blocks must be odd, so that the window is centered on the diagonal; got {num_window}"
        )
    (num_heads,) = _counts_of_blocks(num_heads=whole_number("num_heads", num_heads, 1))
    row, col = np.ogrid[: grid[0], : grid[1]]
    base = abs(row - col) <= num_window // 2
    for number, extent in ((row, grid[0]), (col, grid[1])):
        base = base | (number < num_global) | (number >= extent - num_global)
    drawn_from = generator_of(seed, rng)
    heads = [base | _random_rows(drawn_from, ~base, num_random) for _ in range(num_heads)]
    return BlockPattern(np.stack(heads) if num_heads > 1 else heads[0], sides)


@explains_keywords
def random(
    seqlen_q: int,
    seqlen_kv: int | None = None,
    *,
    block: BlockSize = 128,
    density: float,
    num_heads: int = 1,
    seed: int = 0,
    rng: Rng | None = None,
    diagonal: bool = True,
) -> Mask:
    """Return random blocks, the same number in each row: a common benchmark of block-sparse kernels.

    Parameters
    ----------
    seqlen_q, seqlen_kv : int
        Lengths in tokens. Default of seqlen_kv: seqlen_q.
    block : int or (int, int)
        Size of a block in tokens, or block_q and block_kv.
    density : float
        Kept blocks divided by all blocks, 0 to 1, rounded to whole blocks per row.
    num_heads : int
        Number of heads with different blocks; with 1, all heads have the same blocks.
    seed : int
        Seed of NumPy's generator.
    rng : numpy.random.Generator or int, optional
        A generator to draw from, or a seed, instead of `seed`.
    diagonal : bool
        True to keep the diagonal block of every row; it counts toward the density.

    Returns
    -------
    Mask
        The pattern.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Examples
    --------
    >>> random(8, block=1, density=0.25).toarray(8, num_heads=1).sum(axis=-1)
    array([[2, 2, 2, 2, 2, 2, 2, 2]])
    """
    grid, sides = _grid(seqlen_q, seqlen_kv, block)
    if not (is_number(density) and 0 <= density <= 1):
        raise UnsupportedProblem(f"density must be a number from 0 to 1; got {describe(density)}")
    refuse(flag_reasons("diagonal", diagonal))
    (num_heads,) = _counts_of_blocks(num_heads=whole_number("num_heads", num_heads, 1))
    count = round(float(density) * grid[1])
    drawn_from = generator_of(seed, rng)
    forced = np.eye(*grid, dtype=bool) if diagonal and count else np.zeros(grid, bool)
    drawn = [forced | _random_rows(drawn_from, ~forced, count - forced.sum(axis=1)) for _ in range(num_heads)]
    return BlockPattern(np.stack(drawn) if num_heads > 1 else drawn[0], sides)


@explains_keywords
def longformer(
    window: tuple[int, int], num_global: int = 0, *, dilation: int = 1, align: str | None = None
) -> Mask:
    """Return Longformer: a window of keys around each query, and global tokens, which attend all and all attend.

    Parameters
    ----------
    window : (int, int)
        Tokens before and after the query, inclusive: (left, right) is left + 1 + right keys.
    num_global : int
        Number of global tokens at the start of the sequence.
    dilation : int
        Distance between the keys of the window. Both sides of the window must be multiples of it.
    align : "bottom_right", "top_left" or None
        Alignment as in `masks.Causal`; required if the lengths differ.

    Returns
    -------
    Mask
        The pattern.

    Raises
    ------
    UnsupportedProblem
        The window is not two ints of at least 0 and multiples of the dilation, or a count is not an int.

    Notes
    -----
    arXiv 2004.05150, section 3.1. The paper's window of w keys is ``window=(w // 2, w // 2)``.

    Examples
    --------
    >>> longformer((1, 1), 1).toarray(5).astype(int)
    array([[1, 1, 1, 1, 1],
           [1, 1, 1, 0, 0],
           [1, 1, 1, 1, 0],
           [1, 0, 1, 1, 1],
           [1, 0, 0, 1, 1]])
    """
    reasons: list[str] = []
    with collecting(reasons):
        left, right = _window(window)
    with collecting(reasons):
        (num_global,) = _counts(num_global=num_global)
    with collecting(reasons):
        dilation = whole_number("dilation", dilation, 1)
    refuse(reasons)
    if left % dilation or right % dilation:
        raise UnsupportedProblem(f"window must be two multiples of dilation={dilation}; got {describe((left, right))}")
    local: Mask = SlidingWindow(left, right, align)
    if dilation > 1:
        local = Dilated(dilation, left // dilation, right // dilation, align)
    return local | Lengths(kv=num_global) | Positioned(Lengths(q=num_global), align) if num_global else local


@explains_keywords
def strided(stride: int, *, align: str | None = None) -> Mask:
    """Return the strided Sparse Transformer: the last `stride` keys, and every `stride`-th key before them.

    Parameters
    ----------
    stride : int
        Number of last keys, and distance between the keys that are kept before them.
    align : "bottom_right", "top_left" or None
        Alignment as in `masks.Causal`.

    Returns
    -------
    Mask
        The pattern.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid.

    Notes
    -----
    arXiv 1904.10509, section 4.3: the key sets of both heads in one mask.

    Examples
    --------
    >>> strided(2).toarray(5).astype(int)
    array([[1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0],
           [1, 1, 1, 0, 0],
           [0, 1, 1, 1, 0],
           [1, 0, 1, 1, 1]])
    """
    stride = whole_number("stride", stride, 1)
    return SlidingWindow(stride - 1, 0, align) | Dilated(stride, None, 0, align)


@explains_keywords
def fixed(stride: int, num_summary: int, *, align: str | None = None) -> Mask:
    """Return the fixed Sparse Transformer: a query's segment of `stride` tokens, and the last keys of earlier segments.

    Parameters
    ----------
    stride : int
        Length of a segment in tokens.
    num_summary : int
        Number of keys at the end of every segment that all later queries attend, at most `stride`.
    align : "bottom_right", "top_left" or None
        Alignment as in `masks.Causal`.

    Returns
    -------
    Mask
        The pattern.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Notes
    -----
    arXiv 1904.10509, section 4.3, where the arguments are called l and c: the key sets of both heads in one mask.

    Examples
    --------
    >>> fixed(3, 1).toarray(6).astype(int)
    array([[1, 0, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [1, 1, 1, 0, 0, 0],
           [0, 0, 1, 1, 0, 0],
           [0, 0, 1, 1, 1, 0],
           [0, 0, 1, 1, 1, 1]])
    """
    stride, num_summary = whole_number("stride", stride, 1), whole_number("num_summary", num_summary, 0)
    if num_summary > stride:
        raise UnsupportedProblem(f"num_summary must be at most stride={stride}; got {num_summary}")
    stride, num_others = min(stride, UNBOUNDED), min(stride - num_summary, UNBOUNDED)
    return Causal(align) & (Positioned(SameStretch(stride), align) | StretchEnds(stride, stride - num_others))


@explains_keywords
def sink_local(num_sink_tokens: int, window: tuple[int, int], *, align: str | None = None) -> Mask:
    """Return attention sinks and a window: the keys inside a window, and those of the first keys that precede it.

    Parameters
    ----------
    num_sink_tokens : int
        Number of keys at the start of the sequence that queries attend at any distance.
    window : (int, int)
        Tokens before and after the query, inclusive; (left, 0) is causal.
    align : "bottom_right", "top_left" or None
        Alignment as in `masks.Causal`.

    Returns
    -------
    Mask
        The pattern.

    Raises
    ------
    UnsupportedProblem
        `num_sink_tokens` is not an int of at least 0, or the window is not two such ints.

    Notes
    -----
    StreamingLLM, arXiv 2309.17453, section 3.2. The paper's window of w keys is ``window=(w - 1, 0)``.

    Examples
    --------
    >>> sink_local(1, (1, 0)).toarray(4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
    """
    reasons: list[str] = []
    with collecting(reasons):
        (num_sink_tokens,) = _counts(num_sink_tokens=num_sink_tokens)
    with collecting(reasons):
        left, right = _window(window)
    refuse(reasons)
    reach = Causal(align) if right == 0 else SlidingWindow(None, right, align)
    return reach & (Lengths(kv=num_sink_tokens) | SlidingWindow(left, right, align))


@explains_keywords
def checkerboard(seqlen_q: int, seqlen_kv: int | None = None, *, block: BlockSize = 128) -> Mask:
    """Return a checkerboard: every other block of each row, which is the worst case for contiguous reads of keys.

    Parameters
    ----------
    seqlen_q, seqlen_kv : int
        Lengths in tokens. Default of seqlen_kv: seqlen_q.
    block : int or (int, int)
        Size of a block in tokens, or block_q and block_kv.

    Returns
    -------
    Mask
        The pattern.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Examples
    --------
    >>> checkerboard(3, block=1).toarray(3).astype(int)
    array([[1, 0, 1],
           [0, 1, 0],
           [1, 0, 1]])
    """
    grid, sides = _grid(seqlen_q, seqlen_kv, block)
    return BlockPattern((np.arange(grid[0])[:, None] + np.arange(grid[1])) % 2 == 0, sides)


@dataclass(frozen=True, eq=False, repr=False)
class Positioned(Mask):
    """A mask in which a query's position is that of its diagonal's key; queries before the first key attend nothing."""

    mask: Mask
    align: str | None

    def resolve(self, shape: MaskShape) -> Mask:
        mask, causal = self.mask.resolve(shape), Causal(self.align).resolve(shape)
        offset = causal.upper if isinstance(causal, Band) else None
        if not offset:
            return mask
        mask = placed(mask, Places(q_start=offset))
        return mask if offset > 0 else mask & ~Lengths(q=-offset).resolve(shape)

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals | None:
        return self.mask.intervals(b, h, i)


@dataclass(frozen=True, eq=False, repr=False)
class SameStretch(Mask):
    """A mask that allows a key if the query is in the same stretch of `stride` tokens."""

    stride: int

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        lo = widened(i) // self.stride * self.stride
        return lo, lo + self.stride


@dataclass(frozen=True, eq=False, repr=False)
class StretchEnds(Mask):
    """A mask that allows the last `count` keys of every stretch of `stride` keys."""

    stride: int
    count: int

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        return widened(j) % self.stride >= self.stride - self.count

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        num_keys = (
            (j1 - 1) // self.stride * self.count
            + self._into(j1 - 1)
            - (j0 // self.stride * self.count + self._into(j0))
        )
        ends = num_keys + (j0 % self.stride >= self.stride - self.count)
        return ends > 0, ends == j1 - j0

    def _into(self, j: Array) -> Array:
        """Count the keys at or before key j among the last keys of its own stretch."""
        into = j % self.stride - (self.stride - self.count) + 1
        return into * (into > 0)


def _grid(seqlen_q: int, seqlen_kv: int | None, block: BlockSize) -> tuple[tuple[int, int], tuple[int, int]]:
    seqlen_q, seqlen_kv = _counts(seqlen_q=seqlen_q, seqlen_kv=seqlen_q if seqlen_kv is None else seqlen_kv)
    if max(seqlen_q, seqlen_kv) > MAX_SEQLEN:
        lengths = f"seqlen_q={describe(seqlen_q)} and seqlen_kv={describe(seqlen_kv)}"
        raise UnsupportedProblem(f"lengths must be at most {MAX_SEQLEN}; got {lengths}")
    sides = block_pair(block)
    return (-(-seqlen_q // sides[0]), -(-seqlen_kv // sides[1])), sides


def _pattern_of(rows: Array, cols: Array, grid: tuple[int, int], sides: tuple[int, int]) -> Mask:
    """Return the mask that keeps the blocks with these rows and columns, without columns outside the grid."""
    from scipy.sparse import coo_array  # imported late, since it takes as long as the import of cuflash itself

    inside = cols < grid[1]
    rows, cols = rows[inside], cols[inside]
    return BlockPattern(coo_array((np.ones(len(rows), bool), (rows, cols)), shape=grid), sides)


def _random_rows(rng: np.random.Generator, candidates: Array, count: Array | int) -> Array:
    """Draw `count` candidates of each row without replacement, or all of them if there are fewer."""
    order = np.where(candidates, rng.random(candidates.shape), 2.0)
    rank = order.argsort(axis=1).argsort(axis=1)
    return candidates & (rank < np.reshape(count, (-1, 1)))


def _window(window: tuple[int, int]) -> tuple[int, int]:
    """Return the numbers of tokens of a window before and after the query."""
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not is_pair or not all(is_int(side) and side >= 0 for side in window):
        fix = ""
        if is_int(window) and 0 <= window <= MAX_SEQLEN:
            fix = f": use ({window}, 0) for {window} tokens before the query and the query's own token"
        raise UnsupportedProblem(
            f"window must be (left, right), two ints of at least 0, in tokens, inclusive; got {describe(window)}{fix}"
        )
    return int(window[0]), int(window[1])


def _counts(**values: int) -> list[int]:
    """Return ints of at least 0, or raise an error with all reasons."""
    refuse(int_reasons(0, **values))
    return list(map(int, values.values()))


def _counts_of_blocks(**values: int) -> list[int]:
    """Return numbers of blocks or heads, ints of at least 0 that fit int64, or raise an error with all reasons."""
    counts = _counts(**values)
    refuse(count_reasons(**values))
    return counts
