"""Rules for the lists of chosen blocks of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, describe
from ..errors import collecting
from ..executors import checks
from ..masks import ChosenBlocks, MaskShape
from ..planning.chosen_pages import BLOCK_STEP, ChosenForm
from ._state import CacheState
from .arguments import place_reasons
from .steps import lists_of


def form_of(chosen: ChosenBlocks) -> ChosenForm:
    """Return the form of a mask's lists: everything except their contents."""
    counts = None if chosen.counts is None else np.dtype(chosen.counts.dtype)
    blocks = chosen.blocks
    return ChosenForm(chosen.block, chosen.num_lists, int(blocks.shape[-1]), int(blocks.dtype.itemsize), counts)


def mask_reasons(cache: CacheState, mask: Any, q: Array) -> list[str]:
    """Return why a mask cannot be used for queries [batch, num_heads, n, head_dim] of a cache."""
    if mask is None:
        return []
    if type(mask) is not ChosenBlocks:
        return [
            "mask must be a masks.ChosenBlocks with blocks of each sequence's positions, or None; got "
            f"{describe(mask)}: pass causal= and window= for other masks"
        ]
    reasons: list[str] = []
    with collecting(reasons):
        mask.require_heads(int(q.shape[1]), int(cache.rows.k.shape[1]))
        mask.resolve(MaskShape((int(q.shape[0]),), int(q.shape[1]), int(q.shape[2]), cache.capacity))
    for name, array in lists_of(mask).items():
        reasons += place_reasons("counts" if name == "block_counts" else name, array, cache.rows.k)
    page_size, block = cache.pages.page_size, mask.block
    if cache.is_paged and (block % BLOCK_STEP or block % page_size and page_size % block):
        reasons.append(
            f"mask must have blocks that are multiples or divisors of a page of {page_size} positions, in multiples of "
            f"{BLOCK_STEP}; got block={block}"
        )
    if checks.is_on() and not reasons:
        with collecting(reasons):
            mask.require_numbers(cache.capacity)
    return reasons
