"""Quest's selection of pages for decoding, by an upper bound of a query's scores from the least and greatest keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import DTYPES, Array, accumulator_dtype, namespace, require_arrays, whole_number
from ..cache import KVCache
from ..cache.bounded_pages import BoundedPages, require_tokens
from ..errors import UnsupportedProblem, collecting
from ..keywords import explains_keywords
from ..masks import ChosenBlocks
from ..masks.shape import block_pair, BlockSize
from ..planning.options import Causality, MaskLike, Window
from ..plans.conversion import as_arrays
from . import bound, masked
from .budget import DIAGONAL, Budget, Forced
from .by_query import Estimate, selected, share_reasons
from .cache_pages import PageOptions, chosen_again, chosen_pages
from .grid import Grid


@np.errstate(all="ignore")
@explains_keywords
def page_bounds(q: Array, k: Array, *, page_size: int = 16) -> Array:
    """Compute upper bounds of q . k over the keys of each page, without a scale.

    Parameters
    ----------
    q, k : arrays
        As in `attention`.
    page_size : int
        Number of keys per page.

    Returns
    -------
    array [..., num_heads, seqlen_q, num_pages]
        Sums over columns c of max(q_c least_c, q_c greatest_c), in the accumulator's dtype.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`, or because `page_size` is not an int of at least 1.

    Notes
    -----
    Quest, arXiv 2406.10774, section 3.3.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.array([[[1.0, -1.0]]]), np.array([[[1.0, 2.0], [3.0, 4.0], [0.0, 5.0]]])
    >>> page_bounds(q, k, page_size=2)
    array([[[ 1., -5.]]])
    """
    page_size = whole_number("page_size", page_size, 1)
    return _bounds(Grid.of(q, k, (1, page_size), {}, DIAGONAL, False, None, None, None))


@np.errstate(all="ignore")
@explains_keywords
def quest(
    q: Array,
    k: Array | KVCache,
    *,
    budget: Budget,
    block: BlockSize | None = None,
    page_size: int | None = None,
    forced: Forced = DIAGONAL,
    causal: Causality = "bottom_right",
    mask: MaskLike | None = None,
    window: Window | None = None,
    scale: float | None = None,
    share: str = "query",
) -> ChosenBlocks:
    """Choose pages of keys by an upper bound of each query's scores.

    Parameters
    ----------
    q : array [..., num_heads, seqlen_q, head_dim]
        A few queries, as in decoding; bounds are computed from two keys per page. For a cache, an array
        [batch, num_heads, n, head_dim] as for its `attention`.
    k : array as in `attention`, or KVCache
        Keys, or a cache; pages are chosen for each of its sequences.
    budget : Budget
        The number of pages that a query keeps: `top_k`, `density` or `threshold`, which is compared with the bound.
    block : int or (1, int), optional
        Number of keys per page, or (1, keys per page), as for other selectors; blocks always have one query.
    page_size : int, optional
        Number of keys per page. Default: the page size of the cache if it has pages, otherwise 16.
    forced : Forced
        Pages that are always kept.
    causal : bool, "bottom_right" or "top_left"
        As in `attention`. The default aligns the last query with the last key.
    mask, window : optional
        As in `attention`; bounds are over the keys that a query attends. A mask for a cache applies to each of its
        sequences.
    scale : float, optional
        The factor by which q . k, and therefore its bound, is multiplied. Default: no factor.
    share : {"query", "group"}
        "query": each query head chooses its own pages. "group": the query heads that share a key/value head choose
        together, by the greatest of their bounds.

    Returns
    -------
    ChosenBlocks
        The pages that each query keeps, in lists of ascending page numbers for query heads, or for key/value heads with
        ``share="group"``, on the device of q; -1 fills the rest. Pass `causal`, `mask` and `window` to `attention`,
        too. For a cache, page numbers start at the first key of each sequence.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`, or because an option of the selector is out of range.

    Notes
    -----
    Quest, arXiv 2406.10774, algorithm 1. Each call computes the least and greatest keys of all pages, unless a cache
    keeps them (``keeps_page_bounds=True``). Then a call without `mask` and `window`, with the cache's pages, reads no
    keys: bounds are over whole pages, and after `truncate` may be higher than those of the keys that are left. Lists
    are as long as for a sequence of the cache's capacity.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.selectors import Budget, quest
    >>> q, k = np.random.default_rng(0).standard_normal((2, 4, 64, 16))
    >>> chosen = quest(q[:, -1:], k, budget=Budget(top_k=2), block=8)
    >>> chosen.block, chosen.blocks.shape
    (8, (4, 1, 2))
    """
    if isinstance(k, KVCache):
        return _of_cache(q, k, block, page_size, budget=budget, forced=forced, causal=causal, mask=mask,
                         window=window, scale=scale, share=share)  # fmt: skip
    key = None
    if scale is None and str(share) == "query" and isinstance(budget, Budget) and budget.mass is None:
        key = bound.key_of("quest", q, k, (block, page_size), budget, forced, causal, mask, window, None)
    if isinstance(chosen := bound.selected(key, q, k), ChosenBlocks):
        return chosen
    reasons = share_reasons(share)
    sides = 1, 16
    with collecting(reasons):
        sides = _sides(block, page_size)
    reasons += mass_reasons(budget)
    grid = Grid.of(q, k, sides, {"budget": budget}, forced, causal, mask, window, scale, reasons)
    key = None if grid.is_masked else key
    chosen = bound.first_selected(key, grid, lambda: bound.of_page_bounds(grid, budget, forced))
    if isinstance(chosen, ChosenBlocks):
        return chosen
    if scale is not None:
        grid = replace(grid, q=grid.q.astype(accumulator_dtype(grid.q.dtype)) * grid.scale)

    def estimate(piece: Grid) -> Estimate:
        bounds, allowed = _bounds(piece), None
        if grid.is_masked:
            bounds, allowed = masked.bounds_of_pages(piece, bounds)
        return Estimate(bounds, None, allowed=allowed)

    chosen = selected(grid, budget, forced, estimate, share=share, by="max", columns=max(1, grid.q.shape[-1]))
    assert isinstance(chosen, ChosenBlocks)
    return chosen


def mass_reasons(budget: Budget) -> list[str]:
    """Return why a budget cannot be used with bounds of scores."""
    if not isinstance(budget, Budget) or budget.mass is None:
        return []
    return ["budget must have top_k, density or threshold, since bounds are not masses; got mass"]


def _sides(block: BlockSize | None, page_size: int | None) -> tuple[int, int]:
    """Return the block size, (1, keys per page).

    Raises
    ------
    UnsupportedProblem
        One of the arguments is not a number of keys, or they differ.
    """
    if page_size is not None:
        page_size = whole_number("page_size", page_size, 1)
    if block is None:
        return 1, 16 if page_size is None else page_size
    keys = block_pair(block)[1]
    if isinstance(block, (tuple, list)) and block[0] != 1:
        raise UnsupportedProblem(f"block must be an int or (1, keys), since each query chooses; got {block}")
    if page_size not in (None, keys):
        raise UnsupportedProblem(f"block must equal page_size if both are passed; got {block} and {page_size}")
    return 1, keys


def _bounds(grid: Grid) -> Array:
    """Compute upper bounds of scores, [*heads, seqlen_q, num_pages]."""
    xp, (_, page) = grid.xp, grid.block
    wide = accumulator_dtype(grid.q.dtype)
    num_pages, length = grid.size[1], grid.shape.seqlen_kv
    # Fill an incomplete last page with copies of the last key.
    keys = xp.minimum(xp.arange(num_pages * page), max(length - 1, 0))
    pages = grid.k[..., keys, :].astype(wide).reshape(*grid.k.shape[:-2], num_pages, page, grid.k.shape[-1])
    least, greatest = map(grid.of_query_heads, (pages.min(axis=-2), pages.max(axis=-2)))
    q = grid.q.astype(wide)[..., :, None, :]
    return xp.maximum(q * least[..., None, :, :], q * greatest[..., None, :, :]).sum(axis=-1)


def _of_cache(
    q: Array, cache: KVCache, block: BlockSize | None, page_size: int | None, **options: Any
) -> ChosenBlocks:
    """Choose the pages of each sequence of a cache."""
    pages = BoundedPages.of(cache) if options["mask"] is options["window"] is None else None
    of_pages = PageOptions(*(options[name] for name in PageOptions._fields))
    if pages is not None and block is page_size is None:
        chosen = chosen_again(q, pages, of_pages)
        if chosen is not None:
            require_tokens(cache, q.shape[2])
            return chosen
    batch = len(cache.lengths)
    of_list = {"q": cache.k.dtype if cache.k.dtype in DTYPES else np.float32}
    q = as_arrays({"q": q}, of_list, like=cache.k)["q"]
    require_arrays({"q": q})
    if q.ndim != 4 or q.shape[0] != batch:
        raise UnsupportedProblem(f"q must have shape ({batch}, num_heads, n, head_dim); got shape {tuple(q.shape)}")
    require_tokens(cache, q.shape[2])
    if block is None and page_size is None:
        page_size = cache.page_size
    if pages is not None:
        reasons = share_reasons(of_pages.share) + mass_reasons(of_pages.budget)
        sides = 1, 0
        with collecting(reasons):
            sides = _sides(block, page_size)
        if reasons or sides[1] == cache.page_size:
            return chosen_pages(q, pages, of_pages, reasons)
    if cache.k_scale is not None:  # the rows of a quantized cache are float32; the conversion of q is exact
        q = q.astype(np.float32, copy=False)
    each_chosen = [
        quest(q[sequence], cache.rows(sequence)[0], block=block, page_size=page_size, **options)
        for sequence in range(batch)
    ]
    xp, length = namespace(q), max(each.blocks.shape[-1] for each in each_chosen)
    lists = xp.full((batch, *each_chosen[0].blocks.shape[:-1], length), -1, dtype=np.int32)
    for sequence, each in enumerate(each_chosen):
        lists[sequence, ..., : each.blocks.shape[-1]] = each.blocks
    return ChosenBlocks(lists, each_chosen[0].block)
