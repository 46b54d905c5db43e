"""Plans of decoding in which each new token attends to chosen blocks of a KV cache, listed in arrays of the call."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .decoding import (
    CacheLayout, chunked_dim_reasons, decode_spec, part_workspaces, parts_of, pass_of_parts, scale_reasons,
    window_numbers,
)  # fmt: skip
from .device import DeviceSpec
from .families.sm80 import DECODING
from .launches import POINTER, Feature, Pass, structure
from .problem import Problem
from .routing import FAMILIES

TABLES = ("blocks", "block_counts")  # the arrays of block lists and of their lengths
CHOSEN_PAGES = structure(
    (POINTER, *TABLES),
    (np.dtype((np.int64, (4,))), "blocks_strides"),
    (np.dtype((np.int64, (3,))), "block_counts_strides"),
    (np.int32, "num_rows", "num_list_heads", "heads_per_list", "block", "num_blocks", "num_entries"),
    (np.int32, "blocks_itemsize", "counts_itemsize", "is_counts_signed", "padding"),
)
BLOCK_STEP = 16  # the keys per block must be a multiple of this number, so that the keys of a warp are in one block
_MOST_ROWS = 64  # maximum rows of a tile, which are the query heads that share a list
_MOST_WIDE_ROWS = 32  # the same if head_dim or value_dim exceeds 128


class ChosenForm(NamedTuple):
    """The layout of the block lists of new tokens, without their contents.

    Attributes
    ----------
    block : int
        Keys per block.
    num_lists : int
        Lists per new token: 1, the number of key/value heads, or the number of query heads.
    num_entries : int
        Entries per list.
    itemsize : int
        Bytes per entry.
    counts : numpy.dtype, optional
        The dtype of the array with the length of each list, if there is one.
    """

    block: int
    num_lists: int
    num_entries: int
    itemsize: int
    counts: np.dtype[np.generic] | None

    def heads_per_list(self, problem: Problem) -> int:
        """Return how many query heads share both a list and a key/value head."""
        return 1 if self.num_lists > problem.num_kv_heads else problem.group_size

    def num_places(self, layout: CacheLayout) -> int:
        """Return the maximum number of keys in the blocks of one list."""
        return min(self.num_entries, -(-layout.capacity // self.block)) * self.block

    def tile_problem(self, problem: Problem) -> Problem:
        """Return the problem of one new token in which each of its tiles has its own key/value head."""
        return replace(problem, seqlen_q=1, num_kv_heads=problem.num_heads // self.heads_per_list(problem))

    def room_bytes(self, layout: CacheLayout) -> int:
        """Return the bytes of shared memory for one bit per block, the number of chosen blocks and their indices."""
        words = -(-layout.capacity // (32 * self.block))
        return 4 * (words + 1 + self.num_places(layout) // self.block)

    def feature(self, problem: Problem, layout: CacheLayout) -> Feature:
        """Return the record of the lists for a problem of all new tokens."""
        heads = self.heads_per_list(problem)
        counts = np.dtype(np.int32) if self.counts is None else self.counts
        numbers = {
            "num_rows": problem.seqlen_q, "num_list_heads": problem.num_heads // heads, "heads_per_list": heads,
            "block": self.block, "num_blocks": -(-layout.capacity // self.block), "num_entries": self.num_entries,
            "blocks_itemsize": self.itemsize, "counts_itemsize": counts.itemsize,
            "is_counts_signed": int(counts.kind == "i"),
        }  # fmt: skip
        return Feature("chosen_pages", CHOSEN_PAGES, numbers, TABLES)


def chosen_reasons(
    problem: Problem, device: DeviceSpec, layout: CacheLayout, chosen: ChosenForm, part_keys: int | None = None,
    *, is_quantized: bool = False,
) -> list[str]:  # fmt: skip
    """Return why the decode kernel does not serve a problem of new tokens with block lists."""
    reasons = FAMILIES[DECODING.family].reasons(problem, device)
    reasons += chunked_dim_reasons(problem, is_quantized=is_quantized) + scale_reasons(problem)
    rows, is_wide = chosen.heads_per_list(problem), max(problem.head_dim, problem.value_dim) > 128
    most = _MOST_WIDE_ROWS if is_wide else _MOST_ROWS
    if not 1 <= rows <= most or problem.seqlen_q < 1:
        reasons.append(f"q must have rows, and 1 to {most} heads per list; got {problem.seqlen_q} rows, {rows} heads")
    if is_wide and part_keys is not None:
        reasons.append(f"part_keys must be None for rows longer than 128; got {part_keys}")
    if chosen.block % BLOCK_STEP:
        reasons.append(f"block must be a multiple of {BLOCK_STEP}; got {chosen.block}")
    if reasons:
        return reasons
    spec = decode_spec(chosen.tile_problem(problem), device, part_keys, is_quantized=is_quantized)
    nbytes = spec.shared_bytes + chosen.room_bytes(layout)
    if nbytes > device.tile_memory_bytes:
        reasons.append(f"lists must fit in shared memory of {device.tile_memory_bytes} bytes; they need {nbytes}")
    return reasons


def chosen_pass(
    problem: Problem, device: DeviceSpec, layout: CacheLayout, chosen: ChosenForm, *, left: int | None,
    right: int | None, part_keys: int | None = None, is_quantized: bool = False,
) -> Pass:  # fmt: skip
    """Return the launch of the decode kernel for a problem without `chosen_reasons`; parameters as for `decode_pass`.

    The chosen blocks, in ascending order, are divided into parts.
    """
    of_tile, num_places = chosen.tile_problem(problem), chosen.num_places(layout)
    spec = replace(decode_spec(of_tile, device, part_keys, is_quantized=is_quantized), is_chosen=True)
    max_parts = parts_of(of_tile, device, -(-num_places // spec.block_kv))
    if part_keys is not None:
        max_parts = max(1, -(-min(num_places, layout.capacity) // part_keys))
    pairs = problem.mask_shape.num_batch, problem.seqlen_q, of_tile.num_kv_heads
    workspaces = part_workspaces(pairs, of_tile.group_size, spec, max_parts)
    kernels = pass_of_parts(
        problem, layout, spec, workspaces, window_numbers(layout, left, right), chosen.feature(problem, layout)
    )  # fmt: skip
    launch = kernels.launches["decode"]
    reads = (*launch.reads, *TABLES)
    return replace(
        kernels, launches={"decode": replace(launch, reads=reads, row_bytes=chosen.room_bytes(layout))}
    )  # fmt: skip
