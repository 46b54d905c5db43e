"""Data and masks: captured activations, more of their kind, normal arrays, families of blocks, masks by name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cuflash import masks, patterns

ARCHIVE = Path(__file__).parents[1] / "data" / "minilm_activations.npz"
LANGUAGE = ARCHIVE.with_name("language_activations.npz")
LAYERS, NUM_HEADS = (0, 2, 5), 12  # what the archive holds
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def activations() -> Arrays:
    """q, k, v of a sentence encoder on 512 tokens of English, float32 (3 layers, 12 heads, 512, 32)."""
    with np.load(ARCHIVE) as archive:
        q, k, v = (archive[name].astype(np.float32) for name in "qkv")
    return q, k, v


def language_activations() -> Arrays:
    """q, k, v of a layer of the language model on 512 characters of source text, float32 (4 heads, 512, 32)."""
    with np.load(LANGUAGE) as archive:
        q, k, v = (archive[name].astype(np.float32) for name in "qkv")
    return q, k, v


def draw(*shape: int, dtype: Any = np.float32) -> list[Any]:
    """q, k, v, do on the device, normal."""
    import cupy

    rng = np.random.default_rng(0)
    return [cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(4)]


def same_statistics(seqlen: int, num_heads: int) -> Arrays:
    """q, k, v, float32 (num_heads, seqlen, 32), like those of the first heads of layer 2, for any length.

    Token t is captured token t mod 512, (x - mean + z) / sqrt(2) + mean, with z normal of the covariance that q, k and
    v of this head have together: mean and covariance stay what they were, and no two tokens are alike.
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


# Families: one pattern in all its sizes, on a square grid of blocks, bidirectional as the encoder is


def window(grid: int, block: int) -> Iterator[masks.Mask]:
    """The blocks around the diagonal."""
    for side in range(grid):
        yield masks.SlidingWindow((side, side)).on_blocks(block)


def sink_local(grid: int, block: int) -> Iterator[masks.Mask]:
    """The first block and a window."""
    for side in range(grid):
        yield patterns.sink_local(1, (side, side)).on_blocks(block)


def longformer(grid: int, block: int) -> Iterator[masks.Mask]:
    """A window, and one block that sees all and is seen by all."""
    for side in range(grid):
        yield patterns.longformer((side, side), 1).on_blocks(block)


def bigbird(grid: int, block: int) -> Iterator[masks.Mask]:
    """A window of three, one global block at either end, and random blocks of each head's own."""
    for num_random in range(grid):
        yield patterns.bigbird(grid * block, block=block, num_random_blocks=num_random, num_heads=NUM_HEADS)


def butterfly(grid: int, block: int) -> Iterator[masks.Mask]:
    """Block numbers that differ in one of the low bits, or in none."""
    for bits in range(grid.bit_length() + 1):
        yield patterns.butterfly(grid * block, block=block, max_stride=2**bits)


def strided(grid: int, block: int) -> Iterator[masks.Mask]:
    """The last `stride` blocks and every `stride`-th one; causal, so joined with its transpose."""
    for stride in range(1, grid + 1):
        yield patterns.strided(stride).on_blocks(block, mirrored=True)


def fixed(grid: int, block: int) -> Iterator[masks.Mask]:
    """Stretches of `stride` blocks and the last block of each; causal, so joined with its transpose."""
    for stride in range(1, grid + 1):
        yield patterns.fixed(stride, 1).on_blocks(block, mirrored=True)


def random(grid: int, block: int) -> Iterator[masks.Mask]:
    """Yield masks of random blocks: as many in every row, the diagonal one among them, in each head others."""
    for count in range(1, grid + 1):
        yield patterns.random(grid * block, block=block, density=count / grid, num_heads=NUM_HEADS)


def oracle(q: np.ndarray, k: np.ndarray, grid: int) -> Iterator[masks.Mask]:
    """The blocks of most true softmax mass in every block row of every head: what no static pattern can know."""
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
    """A pattern for fewer heads, where it has blocks of every head's own."""
    if not isinstance(pattern, masks.BlockPattern) or len(pattern.blocks.shape) <= 2:
        return pattern
    return masks.BlockPattern(pattern.blocks[:num_heads], pattern.block)


# Masks by name: "full", "causal", and random blocks of one size and density, "blocks128_0.125"


def blocks_name(block: int, density: float) -> str:
    """The name of a mask of random blocks."""
    return f"blocks{block}_{density:g}"


def named_blocks(mask: str) -> tuple[int, float] | None:
    """Block size and density of a mask by its name; None for "full" and "causal"."""
    if mask in ("full", "causal"):
        return None
    named = re.fullmatch(r"blocks([1-9]\d*)_(\d*\.?\d+)", mask)
    if named is None or not 0 < float(named[2]) <= 1:
        raise ValueError(f"masks are full, causal and blocks<size>_<density in (0, 1]>; got {mask!r}")
    return int(named[1]), float(named[2])


def num_kept(seqlen: int, block: int, density: float) -> int:
    """Blocks that a head keeps of a square grid: a share of all, to the nearest, and at least the diagonal.

    Raises
    ------
    ValueError
        The blocks do not divide the length, or the diagonal is more than the share.
    """
    grid = seqlen // block
    count = round(density * grid**2)
    if seqlen % block or count < grid:
        raise ValueError(f"{seqlen} tokens in blocks of {block}: the diagonal must fit in a share of {density:g}")
    return count


def random_blocks(num_heads: int, seqlen: int, block: int, density: float) -> np.ndarray:
    """Random blocks, bool [num_heads, grid, grid]: equally many in each head, the diagonal among them."""
    grid, count = seqlen // block, num_kept(seqlen, block, density)
    rank = np.random.default_rng(0).random((num_heads, grid * grid), np.float32)
    rank[:, :: grid + 1] = -1
    kept = np.zeros(rank.shape, bool)
    np.put_along_axis(kept, np.argpartition(rank, count - 1)[:, :count], True, axis=-1)
    return kept.reshape(num_heads, grid, grid)


def share_kept(mask: str, seqlen: int) -> float:
    """The scores that count as computed, of all: half of them when causal."""
    blocks = named_blocks(mask)
    if blocks is None:
        return {"full": 1.0, "causal": 0.5}[mask]
    return num_kept(seqlen, *blocks) / (seqlen // blocks[0]) ** 2


def flops(way: str, mask: str, *, seqlen: int, batch: int, num_heads: int, head_dim: int) -> float:
    """Return the paper's operations: 2 products forward and 5 backward, for each score that the mask keeps."""
    products = {"forward": 2, "backward": 5}[way]
    return products * 2 * batch * num_heads * seqlen**2 * head_dim * share_kept(mask, seqlen)
