"""Attention to chosen blocks of a cache: the rules for their lists, and the path for calls that no kernel supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..api import attention
from ..arrays import Array, describe, namespace
from ..errors import collecting
from ..executors import checks
from ..masks import Band, ChosenBlocks, MaskShape
from ..planning.chosen_pages import BLOCK_STEP, ChosenForm
from ..scores.places import in_cache, names_in_cache
from ..scores.score import Score
from ._passes import DecodeOptions
from ._state import CacheState
from .arguments import place_reasons
from .one_by_one import results_without_keys, sink_of
from .steps import AttendStep, lists_of

_WORDS = ("scale", "kernel", "executor", "precision")


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


class ChosenRowsStep(AttendStep):
    """A call of `attention` on chosen blocks: one call per sequence and query, with the keys of that sequence only.

    Parameters
    ----------
    cache : CacheState
    arrays : dict by name
        q, o, lse and sink, where sink may be None, the arrays of the lists, and those of the score function.
    options : DecodeOptions
    captured : sequence of str
        The names of the score function's arrays.
    """

    def __init__(
        self, cache: CacheState, arrays: Mapping[str, Array], options: DecodeOptions, captured: Sequence[str]
    ) -> None:
        super().__init__(arrays, captured)
        self._options, self._dtype = options, cache.rows.gathered_dtype(arrays["q"].dtype)

    def attend(
        self, cache: CacheState, q: Array, o: Array, lse: Array | None, counts: Sequence[int] | None,
        sink: Array | None, score: Score | None, chosen: ChosenBlocks | None,
    ) -> None:  # fmt: skip
        """Compute o and lse; the first counts[b] rows of q belong to sequence b, or all rows if `counts` is None."""
        assert chosen is not None
        lse, options = self.make_lse() if lse is None else lse, self._options
        words: dict[str, Any] = {name: getattr(options, name) for name in _WORDS}
        for sequence, (table, length) in enumerate(zip(cache.pages.tables, cache.lengths)):
            own, new = sink_of(sink, sequence), q.shape[2] if counts is None else counts[sequence]
            if new < q.shape[2]:
                o[sequence], lse[sequence] = results_without_keys(own, lse)
            for row in range(new):
                position = length - new + row
                first = 0 if options.left is None else max(0, position - options.left)
                stop = length if options.right is None else min(length, position + options.right + 1)
                k, v = cache.rows.gather(table, 0, stop, q.dtype)
                o[sequence, :, row : row + 1], lse[sequence, :, row : row + 1] = attention(
                    q[sequence, :, row : row + 1].astype(self._dtype, copy=False), k, v,
                    mask=_list_of(chosen, sequence, row, stop) & Band(first, stop - 1), sink=own,
                    score=self._placed(cache, score, sequence, position), return_lse=True, **words,
                )  # fmt: skip

    def _placed(self, cache: CacheState, score: Score | None, sequence: int, position: int) -> Score | None:
        """Return the score function for one sequence and the position of its query."""
        if score is None:
            return None
        placed = in_cache(score, len(cache.lengths), cache.capacity)
        xp = namespace(*placed.arrays.values())
        held = {name: score.arrays[of_call] for of_call, name in names_in_cache(score).items()}
        return placed._with_arrays({**held, "place": xp.asarray(np.array([sequence, position, 0], np.int32))})


def _list_of(chosen: ChosenBlocks, sequence: int, row: int, stop: int) -> ChosenBlocks:
    """Return the list of one query, without the numbers of blocks that start at or after position `stop`."""
    lists = lists_of(chosen)
    blocks = _own(lists["blocks"], sequence)[:, row : row + 1]
    xp, counts = namespace(blocks), None
    if "block_counts" in lists:
        own = _own(lists["block_counts"], sequence)
        counts = own[:, row : row + 1] if own.shape[1] > 1 else own
    is_block = blocks < -(-stop // chosen.block)
    return ChosenBlocks(xp.where(is_block, blocks, xp.asarray(-1, blocks.dtype)), chosen.block, counts=counts)


def _own(array: Array, sequence: int) -> Array:
    return array[sequence if array.shape[0] > 1 else 0]
