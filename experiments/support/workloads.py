"""Data and masks of experiments: captured and normally distributed arrays, patterns in all sizes, masks by name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cuflash import masks, patterns

ARCHIVE = Path(__file__).parents[1] / "data" / "minilm_activations.npz"
LANGUAGE = ARCHIVE.with_name("language_activations.npz")
LAYERS, NUM_HEADS = (0, 2, 5), 12  # contents of the archive
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def activations() -> Arrays:
    """Load q, k, v of a sentence encoder on 512 tokens of English, float32 (3 layers, 12 heads, 512, 32)."""
    with np.load(ARCHIVE) as archive:
        q, k, v = (archive[name].astype(np.float32) for name in "qkv")
    return q, k, v


def language_activations() -> Arrays:
    """Load q, k, v of a layer of the language model on 512 characters of source code, float32 (4 heads, 512, 32)."""
    with np.load(LANGUAGE) as archive:
        q, k, v = (archive[name].astype(np.float32) for name in "qkv")
    return q, k, v


def draw(*shape: int, dtype: Any = np.float32) -> list[Any]:
    """Draw normal q, k, v and do on the device."""
    import cupy

    rng = np.random.default_rng(0)
    return [cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(4)]


def same_statistics(seqlen: int, num_heads: int) -> Arrays:
    """Draw float32 q, k, v (num_heads, seqlen, 32) of any length with the statistics of the first heads of layer 2.

    Token t is the captured token x = t mod 512, changed to (x - mean + z) / sqrt(2) + mean, where z is normal with the
    joint covariance of q, k and v of this head. Mean and covariance are preserved, and no two tokens are equal.
    """
    joint = np.concatenate([x[1, :num_heads] for x in activations()], axis=-1)
    rng = np.random.default_rng(0)
    tokens = np.empty((num_heads, seqlen, joint.shape[-1]), np.float32)
    for head, captured in enumerate(joint):
        centred = captured - captured.mean(0)
        noise = rng.multivariate_normal(np.zeros(len(centred.T)), np.cov(centred.T), seqlen, method="cholesky")
        tokens[head] = captured.mean(0) + (np.resize(centred, noise.shape) + noise) * 0.5**0.5
    q, k, v = np.split(tokens, 3, axis=-1)
    return q, k, v


# Patterns in all their sizes, on a square grid of blocks, bidirectional like the encoder.


def window(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield bands of blocks around the diagonal."""
    for side in range(grid):
        yield masks.SlidingWindow(side, side).on_blocks(block)


def sink_local(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield the first block and a window."""
    for side in range(grid):
        yield patterns.sink_local(1, (side, side)).on_blocks(block)


def longformer(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield a window, and one block that attends to all and is attended by all."""
    for side in range(grid):
        yield patterns.longformer((side, side), 1).on_blocks(block)


def bigbird(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield a window of three blocks, one global block at either end, and random blocks that differ by head."""
    for num_random in range(grid):
        yield patterns.bigbird(grid * block, block=block, num_random_blocks=num_random, num_heads=NUM_HEADS)


def butterfly(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield blocks whose row and column numbers differ in at most one of the low bits."""
    for bits in range(grid.bit_length() + 1):
        yield patterns.butterfly(grid * block, block=block, max_stride=2**bits)


def strided(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield the last `stride` blocks and every `stride`-th block, joined with the transpose, as they are causal."""
    for stride in range(1, grid + 1):
        yield patterns.strided(stride).on_blocks(block, mirrored=True)


def fixed(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield segments of `stride` blocks and the last block of each, joined with the transpose, as they are causal."""
    for stride in range(1, grid + 1):
        yield patterns.fixed(stride, 1).on_blocks(block, mirrored=True)


def random(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield masks of random blocks: the same number in every row, including the diagonal; heads differ."""
    for count in range(1, grid + 1):
        yield patterns.random(grid * block, block=block, density=count / grid, num_heads=NUM_HEADS)


def oracle(q: np.ndarray, k: np.ndarray, grid: int) -> Iterator[masks.Mask]:
    """Yield the blocks with the most softmax mass in every block row and head, which no static pattern can know."""
    s = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    block = p.shape[-1] // grid
    mass = p.reshape(*p.shape[:-2], grid, block, grid, block).sum((-3, -1))
    rank = np.argsort(np.argsort(-mass, axis=-1), axis=-1)
    for count in range(1, grid + 1):
        yield masks.BlockPattern(rank < count, block)


FAMILIES = {f.__name__: f for f in (window, sink_local, longformer, bigbird, butterfly, strided, fixed, random)}


def first_heads(pattern: masks.Mask, num_heads: int) -> masks.Mask:
    """Restrict a pattern with head-specific blocks to its first heads."""
    if not isinstance(pattern, masks.BlockPattern) or len(pattern.blocks.shape) <= 2:
        return pattern
    return masks.BlockPattern(pattern.blocks[:num_heads], pattern.block)


# Masks by name: "full", "causal", and random blocks of a size and density, such as "blocks128_0.125".


def blocks_name(block: int, density: float) -> str:
    """Return the name of a mask of random blocks."""
    return f"blocks{block}_{density:g}"


def named_blocks(mask: str) -> tuple[int, float] | None:
    """Parse block size and density from the name of a mask; return None for "full" and "causal"."""
    if mask in ("full", "causal"):
        return None
    named = re.fullmatch(r"blocks([1-9]\d*)_(\d*\.?\d+)", mask)
    if named is None or not 0 < float(named[2]) <= 1:
        raise ValueError(f"masks are full, causal and blocks<size>_<density in (0, 1]>; got {mask!r}")
    return int(named[1]), float(named[2])


def num_kept(seqlen: int, block: int, density: float) -> int:
    """Return the number of blocks of a square grid that a head keeps: the rounded fraction, at least the diagonal.

    Raises
    ------
    ValueError
        The blocks do not divide the length, or the diagonal has more blocks than the fraction.
    """
    grid = seqlen // block
    count = round(density * grid**2)
    if seqlen % block or count < grid:
        raise ValueError(f"{seqlen} tokens in blocks of {block}: the diagonal must fit in a share of {density:g}")
    return count


def random_blocks(num_heads: int, seqlen: int, block: int, density: float) -> np.ndarray:
    """Draw random blocks, bool [num_heads, grid, grid], the same number in each head, including the diagonal."""
    grid, count = seqlen // block, num_kept(seqlen, block, density)
    rank = np.random.default_rng(0).random((num_heads, grid * grid), np.float32)
    rank[:, :: grid + 1] = -1
    blocks = np.zeros(rank.shape, bool)
    np.put_along_axis(blocks, np.argpartition(rank, count - 1)[:, :count], True, axis=-1)
    return blocks.reshape(num_heads, grid, grid)


def share_kept(mask: str, seqlen: int) -> float:
    """Return the fraction of scores that counts as computed: one half if causal."""
    blocks = named_blocks(mask)
    if blocks is None:
        return {"full": 1.0, "causal": 0.5}[mask]
    return num_kept(seqlen, *blocks) / (seqlen // blocks[0]) ** 2


def flops(way: str, mask: str, *, seqlen: int, batch: int, num_heads: int, head_dim: int) -> float:
    """Return the paper's operations: 2 products forward and 5 backward, for each score that the mask allows."""
    products = {"forward": 2, "backward": 5}[way]
    return products * 2 * batch * num_heads * seqlen**2 * head_dim * share_kept(mask, seqlen)
