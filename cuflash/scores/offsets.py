"""Offsets of sequences that are packed one after the other: what they must be."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, describe, is_array, is_integer_dtype, namespace


def offset_reasons(name: str, offsets: Any) -> list[str]:
    """Why a value is no array of offsets; what offsets on a device hold is not looked at."""
    if not (is_array(offsets) and offsets.ndim >= 1 and offsets.shape[-1] and is_integer_dtype(offsets.dtype)):
        made = "masks.Sequences.of(lengths) makes the mask from lengths, with its offsets"
        rule = "a list of ints, or an integer array (..., num_sequences + 1)"
        return [f"{name} must be {rule}; got {describe(offsets)}: {made}"]
    if namespace(offsets) is not np or not offsets.size:
        return []
    reasons = []
    if (offsets[..., 0] < 0).any():
        reasons.append(f"{name} must start at 0 or later; got {int(offsets[..., 0].min())}")
    falls = np.argwhere(offsets[..., 1:] < offsets[..., :-1])
    if len(falls):
        place = tuple(falls[0].tolist())
        before, after = int(offsets[place]), int(offsets[(*place[:-1], place[-1] + 1)])
        reasons.append(
            f"{name} must never decrease; got {after} after {before} at the end of sequence {place[-1]}: they say "
            "where each sequence starts, and the last one ends; masks.Sequences.of takes lengths"
        )
    return reasons


def pair_reasons(q_offsets: Array, kv_offsets: Array) -> list[str]:
    """Why offsets of queries and of keys, each of which is fine, are not those of the same sequences."""
    of_queries, of_keys = (int(offsets.shape[-1]) - 1 for offsets in (q_offsets, kv_offsets))
    if of_queries != of_keys:
        return [f"kv_offsets must hold as many sequences as q_offsets, {of_queries}; got {of_keys}"]
    if namespace(q_offsets) is not namespace(kv_offsets):
        return ["kv_offsets must be where q_offsets is: copy either"]
    return []
