"""Planted faults in packed sequences: their mask's closed form, what it refuses, and packing."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from mutations.calls import refuses, takes
from mutations.planting import Edit
from mutations.python_guards import hunt, part
from test_packed_sequences import OFFSETS, check_mask, sequences

SIGNS = (AssertionError, ValueError, IndexError, ArithmeticError)  # exceptions with which a guard reports a fault


def sequences_are_right(library: ModuleType) -> None:
    """Check that a mask of sequences equals its definition."""
    hunt(sequences(), seeds=2)(lambda drawn: check_mask(library, drawn))


def what_is_after_the_last_sequence_is_not_visited(library: ModuleType) -> None:
    x = np.ones((1, 40, 4), np.float32)
    x[:, 30:] = np.nan
    mask = library.masks.Sequences(np.array([0, 20, 30]), causal=True, allow_gaps=True)
    o, vjp = library.attention_vjp(x, x, x, mask=mask)
    assert np.isfinite(o).all() and all(np.isfinite(gradient).all() for gradient in vjp(x))


def offsets_of_any_size_are_right(library: ModuleType) -> None:
    mask = library.masks.Sequences(np.array([0, 2, 2**64 - 1], np.uint64), causal=True)
    assert mask(0, 0, np.arange(4)[:, None], np.arange(4)).astype(int).tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]
    ]  # fmt: skip


def batch_entries_have_offsets_of_their_own(library: ModuleType) -> None:
    mask = library.masks.Sequences(np.array([[0, 2, 3], [0, 1, 3]]), np.array([[0, 1, 3]]))
    shape = part(library, "masks.base").MaskShape((2,), 1, 3, 3)
    assert mask.toarray(**shape._asdict())[:, 0].astype(int).tolist() == [
        [[1, 0, 0], [1, 0, 0], [0, 1, 1]], [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    ]  # fmt: skip


def _shape(library: ModuleType, seqlen_q: int, seqlen_kv: int) -> object:
    return part(library, "masks.base").MaskShape((), 1, seqlen_q, seqlen_kv)


def has_offsets_of_more_rows(library: ModuleType) -> None:
    x, score = np.ones((5, 2), np.float32), library.scores.within(lambda s, b, h, i, j: s + i, [0, 6])
    library.attention(x, x, x, score=library.scores.softcap(1.0) @ score)


FILE, RULES = "masks/sequences.py", "scores/offsets.py"
FAULTS = {
    sequences_are_right: {
        "the last key before the window's left side is seen": Edit(
            FILE, "Sequences._keys_of", "diagonal - clipped(left)", "diagonal - clipped(left) - 1"
        ),
        "bounds fall below their sequence": Edit(
            FILE, "Sequences._keys_of",
            "hi = xp.clip(diagonal + min(right, UNBOUNDED) + 1, start, stop)",
            "hi = xp.minimum(diagonal + min(right, UNBOUNDED) + 1, stop)",
        ),
        "sides beyond int64 are taken as they are": Edit(
            FILE, "Sequences._keys_of", "clipped(left), start", "left, start"
        ),
        "causal lets a window look ahead": Edit(
            FILE, "Sequences._keys_of", "min(right, 0)", "right"
        ),
    },
    what_is_after_the_last_sequence_is_not_visited: {
        "queries after all sequences are visited": Edit(
            FILE, "Sequences._keys_of", "xp.where(after > last, UNBOUNDED, lo)", "lo"
        ),
    },
    offsets_of_any_size_are_right: {
        "offsets beyond int64 wrap around": Edit(
            "masks/coordinates.py", "as_int64", "if is_widest else numbers)", "if False else numbers)"
        ),
    },
    batch_entries_have_offsets_of_their_own: {
        "queries of the first entry serve all": Edit(
            FILE, "ResolvedSequences.bounds", "(rows, q[entry], kv[entry])", "(rows, q[(0,) * len(entry)], kv[entry])"
        ),
    },
    refuses(lambda library: library.masks.Sequences(np.array([0, 5, 3])), "q_offsets must never decrease"): {
        "offsets may decrease": Edit(RULES, "offset_reasons", "if len(falls):", "if False:"),
    },
    refuses(lambda library: library.masks.Sequences([-1, 3], allow_gaps=True), "q_offsets must start at 0 or later"): {
        "offsets may be negative": Edit(RULES, "offset_reasons", "has_gap and (starts < 0).any()", "False"),
    },
    takes(lambda library: library.masks.Sequences([20, 30], allow_gaps=True).toarray(50).sum() == 100): {
        "no gaps are allowed before the first sequence": Edit(
            RULES, "offset_reasons", "has_gap and not allow_gaps", "has_gap"
        ),
    },
    refuses(
        lambda library: library.masks.Sequences(OFFSETS).resolve(_shape(library, 12, 12)), "must end at seqlen_q=12"
    ): {
        "rows behind the last sequence are left out": Edit(RULES, "end_reasons", "if allow_gaps:", "if True:"),
    },
    refuses(lambda library: library.unpack(np.ones((12, 2)), OFFSETS), "packed.shape[-2]=12", "allow_gaps=True"): {
        "rows of no sequence are left out": Edit(
            "packing.py", "unpack", 'or _end_reasons(ends, packed, axis, allow_gaps)', "or []"
        ),
    },
    refuses(lambda library: library.scores.within(lambda s, b, h, i, j: s + i, [0, 4], seqlen_q=5), "seqlen_q=5"): {
        "positions behind the last sequence are taken": Edit(
            "scores/places.py", "_starts",
            "end_reasons(name, offsets, of_length, least if length is None else int(length), allow_gaps)", "[]",
        ),
    },
    refuses(has_offsets_of_more_rows, "must end at seqlen_q=5", "got offsets of 6 rows"): {
        "a composed score has no facts": Edit(
            "scores/score.py", "Score.__matmul__", "self.facts | other.facts", "self.facts"
        ),
    },
    refuses(lambda library: library.masks.Sequences(OFFSETS, OFFSETS[:2]), "as many sequences"): {
        "sequences of queries may have no keys": Edit(
            RULES, "pair_reasons", "if of_queries != of_keys:", "if False:"
        ),
    },
    refuses(lambda library: library.masks.Sequences(OFFSETS, 2 * OFFSETS, window=(1, 0)), "causal must be"): {
        "a window without an alignment is taken": Edit(
            FILE, "Sequences._pair_reasons", "(self.window is not None and not self.causal)", "False"
        ),
    },
    refuses(lambda library: library.pack([np.ones((2, 3))], 2), "axis must be an axis of arrays[0]"): {
        "an axis that there is not is packed": Edit(
            "packing.py", "_axis_reasons", "if not -array.ndim <= axis < array.ndim:", "if False:"
        ),
    },
    refuses(lambda library: library.pack([np.ones((2, 3)), np.ones((2, 4))]), "arrays[1] must have"): {
        "sequences of other dims are joined": Edit(
            "packing.py", "_mismatch_reasons", "not _match(array, first, axis) or", ""
        ),
    },
    refuses(
        lambda library: library.masks.Sequences(OFFSETS).resolve(_shape(library, 10, 9)), "must end at seqlen_kv=9"
    ): {
        "offsets may reach beyond the keys": Edit(
            RULES, "end_reasons", "if (ends > length).any():", "if True:\n    return []\nif False:"
        ),
    },
    refuses(lambda library: library.masks.Sequences([20, 30]), "must start at 0", "masks.Sequences.of([20, 30])"): {
        "lengths are taken as offsets": Edit(RULES, "offset_reasons", "has_gap and not allow_gaps", "False"),
    },
}  # fmt: skip
