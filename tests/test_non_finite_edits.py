"""Faults planted where kernels tell NaN, infinities and weights of 0 apart: every one must be seen on the simulator.

As in test_kernel_edits.py, by a call whose heads have a fault each in an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cuflash.testing import assert_non_finite
from executors import needs_compiler
from planting import chosen, planted, without_their_line
from test_non_finite import KINDS, WORK, assert_parts_follow_the_rule, faulty
from test_sm90 import with_fewest_tiles

pytestmark = needs_compiler


@pytest.fixture(autouse=True, scope="module")
def small_calls_get_the_kernels_of_large_ones() -> Iterator[None]:
    with with_fewest_tiles(0):
        yield


def calls_are_right(*kinds: str) -> None:
    """In one walk and in two, with weights of 0 behind masks and without."""
    for kind in kinds:
        run, fields = KINDS[kind]
        for each in {run, replace(run, deterministic=run.kernel != "naive")}:
            for work in WORK:
                example = faulty(each, fields, work)
                assert_non_finite(example, **each.everything(example))


SIMT, DOUBLE, NAIVE, AMPERE = (partial(calls_are_right, kind) for kind in ("float32", "float64", "naive", "float16"))
EDITS: dict[str, tuple[Callable[[], None], tuple[str, str, str]]] = {
    "the lesser of a NaN and a number is the number": (
        SIMT, ("tile/element.cuh", "return y < x ? y : x;", "return x < y ? x : y;")
    ),
    "a P of 0 hides a row's dS": (
        SIMT, ("attention/score_gradient.cuh", "return p * (dp - delta);", "return p == 0 ? T(0) : p * (dp - delta);")
    ),
    "a P of 0 is masked": (SIMT, ("attention/score_gradient.cuh", "is_masked(p(i, j)) ? ", "p(i, j) == 0 ? ")),
    "a double P of 0 is masked": (
        DOUBLE, ("attention/score_gradient.cuh", "(p)) == 0x8000000000000000ull;", "(p)) << 1 == 0;")
    ),
    "a float P of 0 is masked": (
        SIMT, ("attention/score_gradient.cuh", "return __float_as_uint(p) == 0x80000000u;", "return p == 0;")
    ),
    "a score of -inf is masked where the matrix of scores is kept": (
        NAIVE, (
            "naive/gradient_scores.cu", "is_seen = seen.has(i, j);",
            "is_seen = seen.has(i, j) && p.at(row, s.column(j)) != ptx::negative_infinity<Accumulator>();",
        ),
    ),
    "dlse of a query without a score counts": (
        NAIVE, ("naive/gradient_scores.cu", "if (is_empty) delta = 0;\n    else ", "")
    ),
    "absent blocks are asked of the matrix of scores": (
        NAIVE, ("naive/gradient_scores.cu", "seen = seen_by_rows<Scores>(params, work, step);", "seen.bits = ~0ull;")
    ),
    "a score of -inf is masked on tensor cores": (
        AMPERE, ("attention/fragments.cuh", "kMaskedScore = 0x7fc5a5a5u;", "kMaskedScore = 0xff800000u;")
    ),
    "a part of weight 0 hides what it holds": (
        partial(assert_parts_follow_the_rule, scale=30.0),
        ("sm80/combine.cu", "if (lse != ptx::negative_infinity<float>()) o[c]", "if (by > 0) o[c]"),
    ),
}  # fmt: skip
LINES = {name: edit for name, (_, edit) in EDITS.items()}


@pytest.mark.parametrize("name", chosen(LINES))
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    guard, edit = EDITS[name]
    with planted(tmp_path / "kernels_cu", *edit), pytest.raises(AssertionError):
        guard()


def test_every_edit_has_its_line() -> None:
    assert without_their_line(LINES) == []
