"""Checks of the offsets of packed sequences."""

from __future__ import annotations


import numpy as np

from ..arrays import Array, describe, is_array, is_integer_dtype, namespace


_MOST_SHOWN = 8  # maximum number of offsets in a message


def offset_reasons(name: str, offsets: Array, allow_gaps: bool) -> list[str]:
    """Return the reasons why a value is not an array of offsets; the contents of device arrays are not inspected.

    Unless gaps are allowed, the first sequence must start at row 0.
    """
    if not (is_array(offsets) and offsets.ndim >= 1 and offsets.shape[-1] and is_integer_dtype(offsets.dtype)):
        fix = "for lengths use masks.Sequences.of(lengths)"
        rule = "a list of ints, or an integer array (..., num_sequences + 1)"
        return [f"{name} must be {rule}; got {describe(offsets)}: {fix}"]
    if namespace(offsets) is not np or not offsets.size:
        return []
    reasons = []
    starts = offsets[..., 0]
    has_gap = starts.any()
    if has_gap and (starts < 0).any():
        reasons.append(f"{name} must start at 0 or later; got {int(starts.min())}")
    elif has_gap and not allow_gaps:
        shown = _shown(starts != 0, offsets)
        reasons.append(
            f"{name} must start at 0, the start of the first sequence; got {shown}: for lengths write "
            f"masks.Sequences.of({shown}), or np.cumsum([0, *lengths]); for rows before the first sequence pass "
            f"allow_gaps=True"
        )
    falls = np.argwhere(offsets[..., 1:] < offsets[..., :-1])
    if len(falls):
        place = tuple(falls[0].tolist())
        before, after = int(offsets[place]), int(offsets[(*place[:-1], place[-1] + 1)])
        reasons.append(
            f"{name} must never decrease; got {after} after {before} at the end of sequence {place[-1]}: offsets are "
            "the start of each sequence and the end of the last one; for lengths use masks.Sequences.of"
        )
    return reasons


def end_reasons(name: str, offsets: Array, of_length: str, length: int, allow_gaps: bool) -> list[str]:
    """Return the reasons why host offsets do not end at the length, which messages call `of_length`.

    Unless gaps are allowed, the last sequence must end at the last row.
    """
    if namespace(offsets) is not np or not offsets.size:
        return []
    ends = offsets[..., -1]
    if (ends == length).all():
        return []
    if (ends > length).any():
        rule = f"{of_length}={length} or before" if allow_gaps else f"{of_length}={length}"
        return [f"{name} must end at {rule}; got {_shown(ends > length, offsets)}"]
    if allow_gaps:
        return []
    fix = "for rows after the last sequence pass allow_gaps=True"
    return [f"{name} must end at {of_length}={length}; got {_shown(ends != length, offsets)}: {fix}"]


def _shown(is_wrong: Array, offsets: Array) -> str:
    """Format the offsets of the first batch entry that breaks a rule, or its first and last offsets."""
    wrong = offsets[tuple(np.argwhere(is_wrong)[0])].tolist()
    if len(wrong) <= _MOST_SHOWN:
        return str(wrong)
    return f"[{', '.join(map(str, wrong[: _MOST_SHOWN - 1]))}, ..., {wrong[-1]}]"


def pair_reasons(q_offsets: Array, kv_offsets: Array) -> list[str]:
    """Return the reasons why valid offsets of queries and of keys cannot belong to the same sequences."""
    of_queries, of_keys = (int(offsets.shape[-1]) - 1 for offsets in (q_offsets, kv_offsets))
    if of_queries != of_keys:
        return [f"kv_offsets must have as many sequences as q_offsets, {of_queries}; got {of_keys}"]
    spaces = {namespace(offsets).__name__ for offsets in (q_offsets, kv_offsets)}
    if len(spaces - {"jax.numpy"}) > 1:  # JAX passes arrays that it traces on the device of q
        return ["kv_offsets must be on the same device as q_offsets: copy one of them"]
    return []
