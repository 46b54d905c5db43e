"""Faults in how NaN, infinities, masked scores and weights of 0 are told apart, in Python and in kernels."""

from __future__ import annotations

from mutations.non_finite_guards import (
    doubles_follow_the_rule,
    floats_follow_the_rule,
    halves_follow_the_rule,
    kept_scores_follow_the_rule,
    merges_are_right,
    non_finite_values_go_where_they_should,
    oracle_is_right,
    parts_follow_the_rule,
    specification_is_right,
    unseen_rows_do_not_matter,
)
from mutations.planting import Edit

FAULTS = {
    non_finite_values_go_where_they_should: {
        "P of a NaN row is NaN where it is masked": Edit(
            "executors/cpu.py", "_HostCall._mask_queries",
            "np.copyto(x[number, :, here], 0, where",
            "np.copyto(x[number, :, here], 0 * x[number, :, here] if x is weights[0] else 0, where",
        ),
        "dS is NaN where it is masked, for its query": Edit(
            "executors/cpu.py", "_HostCall._mask_keys",
            "np.copyto(x[number, here], value, where",
            "np.copyto(x[number, here], value or 0 * x[number, here], where",
        ),
    },
    merges_are_right: {
        "a part that is NaN is an empty one": Edit(
            "merging.py", "_merged", "is_empty = total == 0", "is_empty = ~(total > 0)"
        ),
        "what an empty part holds is merged": Edit("merging.py", "_merged", "xp.isneginf(lse)[..., None]", "False"),
        "a part of weight 0 hides what it holds": Edit(
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
            "reference.py", "attention_vjp",
            "ds = np.where(allowed, probability * (dp - d), 0)",
            "ds = probability * (dp - d)",
        ),
        "the specification counts dlse of a row without a score": Edit(
            "reference.py", "attention_vjp",
            "np.where(np.isneginf(lse[..., None]), 0, widened(dlse).reshape(d.shape))",
            "widened(dlse).reshape(d.shape)",
        ),
    },
    oracle_is_right: {
        "the oracle has an infinite lse": Edit(
            "testing/oracle.py", "_Heads.probabilities", "lse = np.where(lse == np.inf, np.nan, lse)", ""
        ),
        "the oracle takes -inf for a score": Edit(
            "testing/oracle.py", "_Heads.probabilities", "attends = ~np.isneginf(lse)", "attends = allowed.any(axis=-1)"
        ),
        "the oracle counts dlse of a row without a score": Edit(
            "testing/oracle.py", "attention_vjp",
            "np.where(np.isneginf(lse), 0, dlse[head])[:, None]",
            "dlse[head][:, None]",
        ),
    },
    floats_follow_the_rule: {
        "the lesser of a NaN and a number is the number": Edit(
            "tile/element.cuh", "min_or_nan", "return y < x ? y : x;", "return x < y ? x : y;"
        ),
        "a P of 0 hides a row's dS": Edit(
            "attention/score_gradient.cuh", "score_gradient",
            "return p * (dp - delta);",
            "return p == 0 ? T(0) : p * (dp - delta);",
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
        "a part of weight 0 hides what it holds": Edit(
            "sm80/combine.cu", "sm80_combine",
            "if (lse != ptx::negative_infinity<float>()) o[c]",
            "if (factor > 0) o[c]",
        ),
    },
}  # fmt: skip
