"""Guards for faults in where NaN and infinities go: small calls, each of whose heads has a fault in an operand.

Guards of Python take a library: the one that is installed, or a copy with a fault under a name of its own. Guards of
kernels run on the simulator, where small calls get the kernels of large ones.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from cuflash.testing import assert_non_finite
from mutations.python_guards import part
from test_non_finite import (
    KINDS, MERGED, WORK, a_fault_a_head, assert_follows_the_rule, assert_merges, assert_parts_follow_the_rule, faulty,
)  # fmt: skip
from test_sm90 import with_fewest_tiles

import cuflash
from cuflash import masks

SIGNS = (AssertionError,)  # exceptions by which guards see a fault


class Passes:
    """A library's calls with the signatures of `cuflash.reference`."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library

    def attention(self, q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> Any:
        return self.library.attention(q, k, v, mask=mask, scale=scale, return_lse=True)

    def attention_vjp(self, q: Any, k: Any, v: Any, do: Any, dlse: Any, mask: Any, scale: float | None) -> Any:
        return self.library.attention_vjp(q, k, v, mask=mask, scale=scale)[1](do, dlse)


def non_finite_values_go_where_they_should(library: ModuleType) -> None:
    """On the cpu executor the rule holds for each element of a small problem that is not finite."""
    for fields in WORK.values():
        assert_follows_the_rule(Passes(library), a_fault_a_head(**fields))


def merges_are_right(library: ModuleType) -> None:
    """Parts give the whole, with NaN and infinities too."""
    for parts in MERGED:
        for dtype in ("float16", "float64"):
            assert_merges(library.merge, *parts, dtype)


def specification_is_right(library: ModuleType) -> None:
    for fields in WORK.values():
        assert_follows_the_rule(part(library, "reference"), a_fault_a_head(**fields))


def oracle_is_right(library: ModuleType) -> None:
    for fields in WORK.values():
        assert_follows_the_rule(part(library, "testing.oracle"), a_fault_a_head(**fields))


@with_fewest_tiles(0)
def calls_are_right(kind: str) -> None:
    """dQ is added up or has a kernel of its own; weights of 0 are behind masks or not."""
    run, fields = KINDS[kind]
    for each in {run, replace(run, deterministic=run.kernel != "naive")}:
        for work in WORK:
            example = faulty(each, fields, work)
            assert_non_finite(example, **each.everything(example))


def floats_follow_the_rule() -> None:
    calls_are_right("float32")


def doubles_follow_the_rule() -> None:
    calls_are_right("float64")


def kept_scores_follow_the_rule() -> None:
    """The naive family, which stores a matrix of scores, follows the rule."""
    calls_are_right("naive")


def unseen_rows_do_not_matter() -> None:
    """In the naive family, rows past the lengths of a mask may hold NaN: results are as if they held zeros."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 1, 90, 32)).astype(np.float32) for _ in range(4))
    results = []
    for unseen in (0, np.nan):
        for array in (q, do):
            array[..., 70:, :] = unseen
        for array in (k, v):
            array[..., 60:, :] = unseen
        options: Any = {"mask": masks.Lengths(q=70, kv=60), "executor": "sim", "kernel": "naive"}
        o, vjp = cuflash.attention_vjp(q, k, v, **options)
        gradients = vjp(do)
        results.append([o, gradients.dq, gradients.dk, gradients.dv])
    for found, expected in zip(*reversed(results), strict=True):
        np.testing.assert_array_equal(found, expected)


def halves_follow_the_rule() -> None:
    """16-bit operands on tensor cores follow the rule."""
    calls_are_right("float16")


@with_fewest_tiles(0)
def parts_follow_the_rule() -> None:
    """Blocks that share keys follow the rule, at a scale where many parts have weight 0."""
    assert_parts_follow_the_rule(scale=30.0)
