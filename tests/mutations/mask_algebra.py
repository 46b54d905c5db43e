"""Planted faults in operators, coarsening, pictures, recall and scipy.sparse arrays."""

from __future__ import annotations

from types import ModuleType

import pytest
from mutations.planting import Edit
from mutations.python_guards import hunt, part
from test_mask_algebra import (
    check_coarsening,
    check_index_operators,
    check_indices_of_masks,
    check_operators,
    check_scipy,
    drawn_for,
    operations,
    tables,
)
from test_pictures import check_functions_of_heads
from test_recall import check_recall, check_scored, problems

# Exceptions with which a guard reports a fault.
SIGNS = (AssertionError, ValueError, TypeError, IndexError, pytest.fail.Exception)


def operators_are_right(library: ModuleType) -> None:
    hunt(operations(), seeds=1)(lambda drawn: check_operators(library, drawn))


def index_operators_are_right(library: ModuleType) -> None:
    hunt(tables(), seeds=1)(lambda drawn: check_index_operators(library, drawn))


def closed_forms_are_right(library: ModuleType) -> None:
    masks = part(library, "masks")
    telling = masks.MaskShape((), 1, 8, 40), masks.Causal("bottom_right").on_blocks((2, 8)), (4, 8)
    hunt(drawn_for(library), first=[(telling,)], seeds=2)(lambda drawn: check_indices_of_masks(library, drawn))


def coarsening_is_right(library: ModuleType) -> None:
    hunt(tables(), seeds=1)(lambda drawn: check_coarsening(library, drawn))


def functions_of_heads_are_shown(library: ModuleType) -> None:
    check_functions_of_heads(library)


def recall_is_right(library: ModuleType) -> None:
    hunt(problems(library), seeds=2)(lambda drawn: check_recall(library, drawn))


def recall_has_scores(library: ModuleType) -> None:
    hunt(problems(library), seeds=2)(lambda drawn: check_scored(library, drawn))


def scipy_is_read(library: ModuleType) -> None:
    hunt(tables(), seeds=1)(lambda drawn: check_scipy(library, drawn, "coo"))


FAULTS = {
    operators_are_right: {
        "a difference is turned round": Edit(
            "masks/base.py", "Mask.__rsub__", "((self._mask_of(other), Not(self))", "((self, Not(self._mask_of(other)))"
        ),
        "an exclusive or is a union": Edit("masks/base.py", "Mask.__xor__", "Xor((", "Or(("),
        "elements of exclusive ors are united": Edit("masks/base.py", "_Composed.__call__", "Xor: xor", "Xor: or_"),
        "NumPy's arrays take operators": Edit(
            "masks/base.py", "Mask", "__array_priority__ = 1000.0", "__array_priority__ = -1.0"
        ),
        "a difference with an index is turned round": Edit(
            "blocks/index.py", "BlockIndex.__rsub__", "sub(other, self.as_mask())", "sub(self.as_mask(), other)"
        ),
        "functions are not masks": Edit("masks/arrays.py", "as_mask", "if callable(value):", "if False:"),
    },
    index_operators_are_right: {
        "a complement is the index": Edit(
            "blocks/index.py", "BlockIndex.__invert__", "~self.as_mask()", "self.as_mask()"
        ),
        "all indices of a shape are equal": Edit(
            "blocks/index.py", "BlockIndex.__eq__", "(self ^ other)._on_host.num_entries == 0", "True"
        ),
        "hashes are of objects": Edit(
            "blocks/index.py", "BlockIndex.__hash__", "hash((self.shape, self.block))", "id(self)"
        ),
    },
    closed_forms_are_right: {
        "exclusive ors may be nothing where both may": Edit(
            "masks/base.py", "_Composed.rectangle.apart", "(x[0] | y[0]) & (x_not | y_not)", "(x[0] ^ y[0])"
        ),
        "a pattern's rectangle ends a block early": Edit(
            "masks/base.py", "OnBlocks.rectangle", "0], (i1 - 1) // self.block[0] + 1", "0], (i1 - 1) // self.block[0]"
        ),
    },
    coarsening_is_right: {
        "a mirrored rectangle must be full both ways round": Edit(
            "masks/base.py", "OnBlocks.rectangle", "may | may_back, must | must_back", "may, must | must_back"
        ),
        "rows and columns of a pattern's blocks are exchanged": Edit(
            "masks/base.py", "OnBlocks.__call__", "[0], widened(j) // self.block[1]", "[1], widened(j) // self.block[0]"
        ),
        "patterns on blocks are listed in other blocks": Edit(
            "masks/base.py", "OnBlocks._natural_block", "return block_q, block_kv", "return block_kv, block_q + 1"
        ),
    },
    functions_of_heads_are_shown: {
        "functions get Python's ints": Edit(
            "masks/pictures.py", "states_of", "b, h = xp.asarray(b), xp.asarray(h)", "pass"
        ),
    },
    recall_is_right: {
        "the mask's causal part is not all keys'": Edit(
            "study/_recall.py", "recall", "mask=mask, **options", "mask=mask, **options | {'causal': False}"
        ),
        "queries without a key lose all": Edit(
            "study/_recall.py", "compared", "np.where(is_empty, 1,", "np.where(is_empty, 0,"
        ),
        "the mass is the inverse": Edit(
            "study/_recall.py", "compared", "kept_lse - lse, 0", "lse - kept_lse, 0"
        ),
        "the error is of the masked output": Edit(
            "study/_recall.py", "compared", "for x in (kept_o - o, o))", "for x in (kept_o - o, kept_o))"
        ),
    },
    recall_has_scores: {
        "all keys have plain scores": Edit(
            "study/_recall.py", "recall", "(q, k, v, **options", "(q, k, v, **options | {'bias': None}"
        ),
        "a score function is left out": Edit("study/_recall.py", "recall", '"score": score', '"score": None'),
        "a softcap is left out": Edit("study/_recall.py", "recall", '"softcap": softcap', '"softcap": None'),
        "a window holds for the kept keys alone": Edit(
            "study/_recall.py", "recall", "(q, k, v, **options", "(q, k, v, **options | {'window': None}"
        ),
    },
    scipy_is_read: {
        "stored zeros allow": Edit(
            "masks/block_set.py", "sorted_places", "stored.data != 0", "stored.data == stored.data"
        ),
        "padded arrays are refused": Edit(
            "blocks/index.py", "BlockIndex.from_scipy", "in (lengths, padded)", "in (lengths, lengths)"
        ),
        "cells are numbered by rows": Edit(
            "masks/block_set.py", "sorted_places", "* matrix.shape[1]", "* matrix.shape[0]"
        ),
    },
}
