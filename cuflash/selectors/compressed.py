"""Native sparse attention's selection of blocks by attention to compressed keys."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, accumulator_dtype, describe, is_array, is_int, namespace, no_array
from ..blocks.index import BlockIndex
from ..errors import UnsupportedProblem, collecting
from ..keywords import explains_keywords
from ..masks import ChosenBlocks
from ..masks.shape import BlockSize
from ..planning.options import Causality, MaskLike, Window
from ..plans.conversion import as_arrays
from ..study._masses import block_mass, require_served
from . import bound, masked
from .budget import Budget, Forced
from .by_query import GROUP, Estimate, selected
from .grid import Grid, block_means
from .query_scores import RunKeys, chosen_by_kernel

_INITIAL_AND_LOCAL = Forced(sink=1, local=2)


@np.errstate(all="ignore")
@explains_keywords
def nsa(
    q: Array,
    k: Array,
    *,
    budget: Budget,
    block: BlockSize = (128, 128),
    compression: tuple[int, int] = (32, 16),
    forced: Forced = _INITIAL_AND_LOCAL,
    causal: Causality = False,
    mask: MaskLike | None = None,
    window: Window | None = None,
    scale: float | None = None,
    compressed_k: Array | None = None,
    lse: Array | None = None,
    executor: str = "auto",
) -> BlockIndex | ChosenBlocks:
    """Choose blocks by attention to compressed keys, the same for all query heads that share a key/value head.

    Parameters
    ----------
    q, k : arrays
        As in `attention`; k must have at least `compression[0]` keys.
    budget : Budget
        The number of blocks to keep per row; NSA keeps 16, including forced blocks.
    block : int or (int, int)
        Sides block_q and block_kv in tokens; block_kv must be a multiple of the stride. NSA uses block_q = 1, so that
        each query has its own list.
    compression : (int, int)
        Number of keys that a compressed key represents, and the stride between compressed keys, which must divide it.
    forced : Forced
        Blocks that are always kept.
    causal, mask, window, scale : optional
        As in `attention`; the index applies them, and masked queries and keys do not affect the estimates.
    compressed_k : array [..., num_kv_heads, runs, head_dim], optional
        Compressed keys to use instead of means, such as the output of a learned layer. Not allowed with `mask` or
        `window`.
    lse : array [..., num_heads, seqlen_q], optional
        The lse that `attention` returns for the same compressed keys, with ``mask=masks.Compressed(*compression)`` if
        `causal`. It saves one of two passes over the compressed keys. Not allowed with `mask` or `window`.
    executor : {"auto", "cpu", "gpu", "sim"}
        As in `block_mass`, which computes the products.

    Returns
    -------
    BlockIndex, or ChosenBlocks if block_q is 1
        As `pooled` returns it; lists are for key/value heads.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`, or because an option of the selector is out of range.

    Notes
    -----
    Native sparse attention, arXiv 2502.11089, equations 8 to 12, with means unless `compressed_k` is set. The softmax
    over compressed keys (with `causal`, over those that end by the query) is distributed to their blocks, and summed
    over the heads of a group and the queries of a block. A score that is NaN or +inf makes all scores of its query NaN,
    so that its blocks are chosen in order.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.selectors import Budget, nsa
    >>> q, k = np.random.default_rng(0).standard_normal((2, 4, 64, 16))
    >>> index = nsa(q, k[:2], block=8, compression=(8, 4), budget=Budget(top_k=4), causal=True)
    >>> index.num_heads, bool((index.states()[0, 0] == index.states()[0, 1]).all())
    (4, True)
    """
    key = None
    if compressed_k is None and lse is None:
        key = bound.key_of("nsa", q, k, block, budget, forced, causal, mask, window, scale, executor, compression)
    if (index := bound.selected(key, q, k)) is not None:
        return index
    reasons, grid = list[str](), None
    with collecting(reasons):
        grid = Grid.of(q, k, block, {"budget": budget}, forced, causal, mask, window, scale)
    with collecting(reasons):
        compression = _checked_compression(compression)
    if not reasons and grid is not None:
        if grid.block[1] % compression[1]:
            reasons.append(f"block_kv must be a multiple of the stride {compression[1]}; got {grid.block[1]}")
        if grid.shape.seqlen_kv < compression[0]:
            reasons.append(f"k must have at least {compression[0]} keys to compress; got {grid.shape.seqlen_kv}")
    if reasons or grid is None:
        raise UnsupportedProblem(reasons)
    compressed_k, lse = _optional_arrays(grid, compression, compressed_k, lse)
    if grid.has_own_mask:
        require_served(grid.q, grid.k, grid.scale, executor)
    index = bound.first_selected(key, grid, lambda: bound.of_compressed_keys(grid, compression, budget, forced))
    if index is not None:
        return index
    length, stride = compression
    if compressed_k is None and not grid.has_own_mask:
        compressed_k = means_of_runs(grid.k, length, stride)
        compressed_k = compressed_k.astype(grid.k.dtype) if grid.block[0] == 1 else compressed_k  # the dtype of k
    if compressed_k is not None:
        runs = RunKeys(compressed_k, stride, length, (length // stride, grid.block[1] // stride), lse)
        if (chosen := chosen_by_kernel(grid, runs, budget, forced, executor, share=GROUP)) is not None:
            return chosen

    def estimate(piece: Grid) -> Estimate:
        if compressed_k is None:
            mass = masked.mass_of_runs(piece, length, stride)
            return Estimate(mass, mass)
        rows = slice(piece.first_query, piece.first_query + piece.shape.seqlen_q)
        mass = block_mass(
            piece.q.astype(compressed_k.dtype), compressed_k, block=(piece.block[0], 1), scale=piece.scale,
            mask=piece.stairs(1, stride, length), lse=None if lse is None else lse[..., rows], executor=executor,
        )  # fmt: skip
        mass = masked.mass_of_blocks(piece, mass, length // stride, stride)
        return Estimate(mass, mass)

    return selected(grid, budget, forced, estimate, share=GROUP)


def means_of_runs(k: Array, length: int, stride: int) -> Array:
    """Compute the means of runs of `length` keys that start at every `stride`-th key, in the accumulator's dtype."""
    num_parts, num_keys = length // stride, k.shape[-2]
    count = (num_keys - length) // stride + 1
    parts = block_means(k[..., : num_keys // stride * stride, :], stride)
    total: Array = sum(parts[..., n : n + count, :] for n in range(num_parts)) / num_parts
    return total


def _optional_arrays(
    grid: Grid, compression: tuple[int, int], compressed_k: Array, lse: Array
) -> tuple[Array | None, Array | None]:
    """Return the checked compressed keys and their lse.

    Raises
    ------
    TypeError
        One of them is not an array.
    UnsupportedProblem
        One of them does not fit q and k, or there is a mask.
    """
    count = (grid.shape.seqlen_kv - compression[0]) // compression[1] + 1
    of_k = (*grid.k.shape[:-2], count, grid.k.shape[-1])
    of_lse = (*grid.heads, grid.shape.seqlen_q)
    wide, reasons, arrays = accumulator_dtype(grid.q.dtype), [], []
    for name, x, shape, dtypes in (
        ("compressed_k", compressed_k, of_k, {grid.q.dtype, wide}), ("lse", lse, of_lse, {wide})
    ):  # fmt: skip
        if x is not None:
            x = as_arrays({name: x})[name]
            if not is_array(x):
                raise TypeError(no_array(name, x))
            if grid.has_own_mask:
                reasons.append(f"{name} must be None with mask or window, which change the compressed keys")
            elif x.shape != shape or x.dtype not in dtypes or namespace(x) is not grid.xp:
                kinds = " or ".join(sorted(map(str, dtypes)))
                reasons.append(f"{name} must be on q's device, with shape {shape} and dtype {kinds}; got {describe(x)}")
        arrays.append(x)
    if reasons:
        raise UnsupportedProblem(reasons)
    return arrays[0], arrays[1]


def _checked_compression(compression: tuple[int, int]) -> tuple[int, int]:
    is_pair = isinstance(compression, (tuple, list)) and len(compression) == 2
    if not is_pair or not all(is_int(each) and each >= 1 for each in compression) or compression[0] % compression[1]:
        raise UnsupportedProblem(
            f"compression must be two ints of at least 1, keys and a stride that divides them; got "
            f"{describe(compression)}: NSA uses (32, 16)"
        )
    return int(compression[0]), int(compression[1])
