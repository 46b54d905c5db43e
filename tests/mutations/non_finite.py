"""Planted faults in how Python and kernels distinguish NaN, infinities, masked scores and zero weights.

Guards of Python take a library: the installed one, or a copy with a fault under another name. Guards of kernels run on
the simulator, where small calls use the kernels of large ones.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from cuflash.testing import assert_non_finite
from mutations.planting import Edit
from mutations.python_guards import part
from test_non_finite import (
    KINDS, MERGED, WORK, OfHeads, a_fault_a_head, assert_follows_the_rule, assert_keys_reach_their_queries_only,
    assert_merges, assert_parts_follow_the_rule, faulty,
)  # fmt: skip
from test_sm90 import with_fewest_tiles

import cuflash
from cuflash import masks

SIGNS = (AssertionError,)  # exceptions with which a guard reports a fault


class Passes:
    """A library's calls with the signatures of `cuflash.reference`."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library

    def attention(self, q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> Any:
        return self.library.attention(q, k, v, mask=mask, scale=scale, return_lse=True)

    def attention_vjp(self, q: Any, k: Any, v: Any, do: Any, dlse: Any, mask: Any, scale: float | None) -> Any:
        return self.library.attention_vjp(q, k, v, mask=mask, scale=scale)[1](do, dlse)


def non_finite_values_go_where_they_should(library: ModuleType) -> None:
    """Check the rule on the cpu executor for each element of a small problem that is not finite."""
    for fields in WORK.values():
        assert_follows_the_rule(Passes(library), a_fault_a_head(**fields))
    assert_keys_reach_their_queries_only(library)


def merges_are_right(library: ModuleType) -> None:
    """Check that merged parts equal the whole, also with NaN and infinity."""
    for parts in MERGED:
        for dtype in ("float16", "float64"):
            assert_merges(library.merge, *parts, dtype)


def specification_is_right(library: ModuleType) -> None:
    for fields in WORK.values():
        assert_follows_the_rule(part(library, "reference"), a_fault_a_head(**fields))


def oracle_is_right(library: ModuleType) -> None:
    for fields in WORK.values():
        assert_follows_the_rule(OfHeads(part(library, "testing.oracle").Heads), a_fault_a_head(**fields))


@with_fewest_tiles(0)
def calls_are_right(kind: str) -> None:
    """Check accumulated dQ and dQ from a separate kernel, with zero weights both behind masks and elsewhere."""
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
    """Check that the naive family, which stores a matrix of scores, follows the rule."""
    calls_are_right("naive")


def unseen_rows_do_not_matter() -> None:
    """Check that in the naive family, rows past a mask's lengths may hold NaN, and give the same results as zeros."""
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
    for actual, expected in zip(*reversed(results), strict=True):
        np.testing.assert_array_equal(actual, expected)


def halves_follow_the_rule() -> None:
    """Check that 16-bit operands on tensor cores follow the rule."""
    calls_are_right("float16")


@with_fewest_tiles(0)
def parts_follow_the_rule() -> None:
    """Check that split-KV follows the rule, with a scale for which many parts have weight 0."""
    assert_parts_follow_the_rule(scale=30.0)


FAULTS = {
    non_finite_values_go_where_they_should: {
        "P of a NaN row is NaN where it is masked": Edit(
            "executors/cpu.py", "HostCall.mask_queries", "], 0",
            "], 0 * x[numbers, :, each.rows] if x is weights[0] and len(weights) == 2 else 0",
        ),
        "keys past a length reach dq": Edit(
            "executors/cpu.py", "HostCall.column_terms", "np.isfinite(k).all()", "True"
        ),
        "infinite keys reach all queries of their tile": Edit(
            "executors/cpu.py", "HostCall.by_attended_keys", "queries = seen[tile, key]", "queries = slice(None)"
        ),
        "infinite keys reach no query": Edit(
            "executors/cpu.py", "HostCall.by_attended_keys", "for tile, key in np.argwhere(~is_finite):",
            "for tile, key in ():"
        ),
        "dS of a NaN row is NaN where it is masked": Edit(
            "executors/cpu.py", "HostCall.mask_queries", "for x in weights:",
            "for x in weights[:1]:",
        ),
    },
    merges_are_right: {
        "a part that is NaN is an empty one": Edit(
            "merging.py", "_merged", "is_empty = total == 0", "is_empty = ~(total > 0)"
        ),
        "what an empty part holds is merged": Edit("merging.py", "_merged", "xp.isneginf(lse)[..., None]", "False"),
        "a part of weight 0 hides its contents": Edit(
            "merging.py", "_merged", "xp.isneginf(lse)[..., None]", "(weight == 0)[..., None]"
        ),
        "the caller hears of weights that are 0": Edit(
            "merging.py", "merge", 'np.errstate(all="ignore")', "np.errstate()"
        ),
    },
    specification_is_right: {
        "a row whose scores are all -inf is NaN": Edit(
            "reference.py", "_softmax", "empty = row_sum == 0", "empty = ~np.any(allowed, axis=-1, keepdims=True)"
        ),
        "the specification's P of a NaN row is NaN where it is masked": Edit(
            "reference.py", "_softmax", "np.where(allowed, weight / row_sum_or_one, 0)", "weight / row_sum_or_one"
        ),
        "the specification's dS is NaN where it is masked": Edit(
            "reference.py", "attention_vjp", "= np.where(allowed, probability * (dp - d), 0", "= probability * (dp - d"
        ),
        "the specification counts dlse of a row without a score": Edit(
            "reference.py", "attention_vjp",
            "np.where(np.isneginf(lse[..., None]), 0, widened(dlse).reshape(d.shape))",
            "widened(dlse).reshape(d.shape)",
        ),
    },
    oracle_is_right: {
        "the oracle has an infinite lse": Edit(
            "testing/oracle.py", "Heads._softmax", "lse = np.where(lse == np.inf, np.nan, lse)", ""
        ),
        "the oracle takes -inf for a score": Edit(
            "testing/oracle.py", "Heads._softmax", "np.where(np.isneginf(lse), 1, np.nan)", "np.nan"
        ),
        "the oracle counts dlse of a row without a score": Edit(
            "testing/oracle.py", "Heads.vjp", "np.where(np.isneginf(lse), 0, dlse[head])[:,", "dlse[head][:,"
        ),
    },
    floats_follow_the_rule: {
        "the lesser of a NaN and a number is the number": Edit(
            "tile/element.cuh", "min_or_nan", "return y < x ? y : x;", "return x < y ? x : y;"
        ),
        "a P of 0 hides a row's dS": Edit(
            "attention/score_gradient.cuh", "score_gradient", "p * (dp - delta);", "p == 0 ? T(0) : p * (dp - delta);"
        ),
        "a P of 0 is masked": Edit(
            "attention/score_gradient.cuh", "score_gradients_of_keys", "is_masked(p(i, j)) ?", "p(i, j) == 0 ?"
        ),
        "a float P of 0 is masked": Edit(
            "attention/score_gradient.cuh", "is_masked", "return __float_as_uint(p) == 0x80000000u;", "return p == 0;"
        ),
    },
    doubles_follow_the_rule: {
        "a double P of 0 is masked": Edit(
            "attention/score_gradient.cuh", "is_masked", "(p)) == 0x8000000000000000ull;", "(p)) << 1 == 0;"
        ),
    },
    kept_scores_follow_the_rule: {
        "a score of -inf is masked where the matrix of scores is kept": Edit(
            "naive/gradient_scores.cu", "naive_gradient_scores",
            "is_seen = row_mask.allows(i, j);",
            "is_seen = row_mask.allows(i, j) && p.at(row, s.column(j)) != ptx::negative_infinity<Accumulator>();",
        ),
        "dlse of a query without a score counts": Edit(
            "naive/gradient_scores.cu", "naive_gradient_scores", "if (is_empty) delta = 0; else", ""
        ),
        "absent blocks are asked of the matrix of scores": Edit(
            "naive/gradient_scores.cu", "naive_gradient_scores",
            "row_mask = score_mask_of_queries<Scores>(params, work, block);",
            "row_mask.bits = ~0ull;",
        ),
    },
    unseen_rows_do_not_matter: {
        "rows of keys that no query visits are multiplied": Edit(
            "naive/products.cuh", "add_weighted_rows", "return is_row_valid[row] != 0;", "return true;"
        ),
        "rows of queries that visit no key are multiplied": Edit(
            "naive/gradient_keys.cu", "naive_gradient_keys", "return is_row_valid[row] != 0;", "return true;"
        ),
    },
    halves_follow_the_rule: {
        "a score of -inf is masked on tensor cores": Edit(
            "attention/mask_softmax_mma.cuh", None, "kMaskedScore = 0x7fc5a5a5u;", "kMaskedScore = 0xff800000u;"
        ),
    },
    parts_follow_the_rule: {
        "a part of weight 0 hides its contents": Edit(
            "sm80/combine.cu", "sm80_combine", "if (lse != ptx::negative_infinity<float>()) o[c", "if (factor > 0) o[c"
        ),
    },
}  # fmt: skip
