"""Properties of every exact attention function: each changes a call in a way whose effect on the results is known.

>>> from cuflash import reference
>>> from cuflash.testing import Structure
>>> check_doubling_v_doubles_o(reference.attention, Structure(seqlen_q=3, seqlen_kv=5).example())

The properties need no exact results, only the error bounds of the calls that they compare, so they also apply where an
oracle would be too slow. If a property would round its inputs again, for example by adding a vector to the keys, the
inputs are first rounded to small integers, whose sums are exact. Results are compared bitwise if every implementation
must give the same bits; otherwise they may differ by the sum of their bounds. A property that does not apply to an
example still calls the function and checks the shapes of its results.

Forward passes are called as ``attend(q, k, v, mask=, scale=) -> (o, lse)``, and gradients as
``gradients(q, k, v, do, dlse=, mask=, scale=) -> (dq, dk, dv)``, with a bool array or None as the mask: the signatures
of `cuflash.reference`. The docstring of each property ends with the property's number in parentheses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Protocol

import numpy as np

from ..arrays import Array
from ..bounds import Bounds
from ..planning.problem import MAX_HEAD_DIM
from .assertions import Attend, Example, as_pair, as_results, assert_within, on_lattice
from .non_finite import assert_not_finite_where_due, expected, finite_part, widest


class Pull(Protocol):
    """The signature of a backward pass under test, whose only arguments are the operands."""

    def __call__(
        self, q: Array, k: Array, v: Array, do: Array, *, dlse: Array, mask: np.ndarray | None, scale: float | None
    ) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv."""


# Properties of the positions of keys, queries, heads and batch entries


def check_order_of_keys_does_not_matter(attend: Attend, example: Example) -> None:
    """Check that a common permutation of keys, values and mask columns does not change o and lse (1)."""
    other = _with_keys(example, _shuffled(example.problem.seqlen_kv))
    _same(_run(attend, example), _run(attend, other), example, other)


def check_queries_are_independent(attend: Attend, example: Example) -> None:
    """Check that a common permutation of queries and mask rows permutes o and lse (2)."""
    order = _shuffled(example.problem.seqlen_q)
    other = _with_rows(example, order)
    o, lse = _run(attend, example)
    _same((o[..., order, :], lse[..., order]), _run(attend, other), other, other)


def check_heads_and_batch_entries_are_independent(attend: Attend, example: Example) -> None:
    """Check that reversing every axis before the sequence reverses o and lse (3)."""
    reversed_operands = {name: _reversed(getattr(example, name), 2) for name in "qkv"}
    other = example.but(**reversed_operands, mask=None if example.mask is None else _reversed(example.dense_mask, 2))
    o, lse = _run(attend, example)
    _same((_reversed(o, 2), _reversed(lse, 1)), _run(attend, other), other, other)


def check_a_batch_entry_does_not_see_the_others(attend: Attend, example: Example) -> None:
    """Check that a call with only the first batch entry gives the first entry of the results (4)."""
    if not example.problem.batch or 0 in example.problem.batch:
        _run(attend, example)
        return
    rank = len(example.problem.batch) + 3
    first = {name: x[:1] if x.ndim == rank else x for name, x in (("q", example.q), ("k", example.k), ("v", example.v))}
    other = example.but(**first, mask=None if example.mask is None else example.dense_mask[:1])
    o, lse = _run(attend, example)
    _same((o[:1], lse[:1]), _run(attend, other), other, other)


def check_queries_may_come_in_pieces(attend: Attend, example: Example) -> None:
    """Check that a call without the last query, and a call with only the last one, give the rows of one call (15)."""
    rows = np.arange(example.problem.seqlen_q)
    o, lse = zip(*(_run(attend, _with_rows(example, part)) for part in (rows[:-1], rows[-1:])))
    _same((np.concatenate(o, axis=-2), np.concatenate(lse, axis=-1)), _run(attend, example), example, example)


# Properties of changed scores and values


def check_a_vector_added_to_every_key_moves_only_lse(attend: Attend, example: Example) -> None:
    """Check that k + c does not change o, and adds scale q . c to lse (6)."""
    plain = _on_lattice(example)
    c = np.arange(example.problem.head_dim) % 3
    moved = plain.but(k=plain.k + c.astype(plain.k.dtype))
    o, lse = _run(attend, plain)
    shift = plain.problem.softmax_scale * (widest(plain.q) @ widest(c))
    _same((o, lse + shift), _run(attend, moved), plain, moved)


def check_doubling_v_doubles_o(attend: Attend, example: Example) -> None:
    """Check that 2 v gives 2 o, bitwise if neither underflows nor overflows (7)."""
    plain = _on_lattice(example)
    o, doubled = (widest(_run(attend, each)[0]) for each in (plain, plain.but(v=plain.v + plain.v)))
    is_normal = np.abs(o) > float(np.finfo(np.float16).smallest_normal)  # wider dtypes do not underflow either
    _bitwise("o", np.where(is_normal, 2 * o, 0), np.where(is_normal, doubled, 0), example)


def check_a_vector_added_to_every_value_moves_o(attend: Attend, example: Example) -> None:
    """Check that v + b gives o + b in rows that attend a key (8)."""
    plain = _on_lattice(example)
    b = np.arange(plain.v.shape[-1]) % 4
    moved = plain.but(v=plain.v + b.astype(plain.v.dtype))
    o, lse = _run(attend, plain)
    _same((widest(o) + b * _has_keys(plain)[..., None], lse), _run(attend, moved), plain, moved)


def check_o_is_linear_in_v(attend: Attend, example: Example) -> None:
    """Check that attention with values v + w is the sum of attention with v and attention with w (9)."""
    first = _on_lattice(example)
    second = first.but(v=np.flip(first.v, axis=(-1, -2)))
    both = first.but(v=first.v + second.v)
    o, other, total = (widest(_run(attend, each)[0]) for each in (first, second, both))
    assert_within("o", total, o + other, sum(_forward_bounds(each).o for each in (first, second, both)), example)


def check_o_is_a_mean_of_values(attend: Attend, example: Example) -> None:
    """Check that o is between the smallest and the largest attended value, for scores of any magnitude (11)."""
    is_seen, has_keys = example.allowed.any(axis=-2)[..., None], _has_keys(example)[..., None]
    values = np.broadcast_to(widest(_repeated(example, example.v)), (*is_seen.shape[:-1], example.v.shape[-1]))
    lowest, highest = (
        reduce(np.where(is_seen, values, start), axis=-2, keepdims=True, initial=start)
        for reduce, start in ((np.min, np.inf), (np.max, -np.inf))
    )
    # For equal scores and values that are all the largest, the error bound contains only rounding.
    largest = np.full(example.v.shape, np.abs(widest(example.v)).max(initial=0)).astype(example.v.dtype)
    rounding = _forward_bounds(example.but(q=np.zeros_like(example.q), v=largest)).o
    for scale in (example.scale, 1e6, 1e9):
        o = widest(_run(attend, example.but(scale=scale))[0])
        inside = np.where(has_keys, np.clip(o, lowest, highest), 0)
        assert_within("o", o, inside, rounding, example.but(scale=scale))


def check_scale_may_move_between_q_and_the_score(attend: Attend, example: Example) -> None:
    """Check that 2 q with scale / 2 gives the bits of q with scale (12)."""
    scale = example.problem.softmax_scale
    plain = _on_lattice(example).but(scale=scale)
    other = plain.but(q=plain.q + plain.q, scale=scale / 2)
    _same_bits(_run(attend, plain), _run(attend, other), example)


def check_head_dims_may_be_permuted_and_negated(attend: Attend, example: Example) -> None:
    """Check that a common signed permutation of the last axis of q and k does not change o and lse (13)."""
    order = _shuffled(example.problem.head_dim)
    sign = np.where(order % 2, -1, 1).astype(example.q.dtype)
    other = example.but(q=example.q[..., order] * sign, k=example.k[..., order] * sign)
    _same(_run(attend, example), _run(attend, other), example, other)


def check_zeros_may_pad_the_head_dim(attend: Attend, example: Example) -> None:
    """Check that zeros appended to the last axis of q and k change nothing if the scale stays the same (25)."""
    if example.problem.head_dim == MAX_HEAD_DIM:
        _run(attend, example)
        return
    plain = example.but(scale=example.problem.softmax_scale)
    padded = {name: np.insert(getattr(example, name), 0, 0, axis=-1) for name in "qk"}
    other = plain.but(**padded)
    _same(_run(attend, plain), _run(attend, other), plain, other)


# Properties of the set of keys


def check_parts_of_the_keys_merge_to_the_whole(attend: Attend, example: Example) -> None:
    """Check that attention to the first keys and to the other keys, merged by lse, is attention to all keys (14)."""
    keys = np.arange(example.problem.seqlen_kv)
    cut = len(keys) // 3
    _check_merge(attend, example, [_with_keys(example, part) for part in (keys[:cut], keys[cut:])])


def check_disjoint_masks_merge_to_their_union(attend: Attend, example: Example) -> None:
    """Check that attention with two disjoint masks, merged by lse, is attention with their union (18)."""
    half = np.random.default_rng(0).random(example.allowed.shape) < 0.5
    _check_merge(attend, example, [example.but(mask=example.allowed & part) for part in (half, ~half)])


def check_a_mask_of_all_keys_is_no_mask(attend: Attend, example: Example) -> None:
    """Check that a mask that is True everywhere gives the results of a call without a mask (16)."""
    plain = example.but(mask=None)
    other = plain.but(mask=plain.allowed)
    _same(_run(attend, plain), _run(attend, other), plain, other)


def check_masked_keys_may_be_removed(attend: Attend, example: Example) -> None:
    """Check that additional keys that no query attends change nothing (17)."""
    if not example.problem.seqlen_kv:
        _run(attend, example)
        return
    keys = np.arange(example.problem.seqlen_kv)
    longer = _with_keys(example, np.append(keys, keys[:1]))
    longer = longer.but(mask=np.where(np.arange(len(keys) + 1) < len(keys), longer.allowed, False))
    _same(_run(attend, example), _run(attend, longer), example, longer)


def check_a_query_depends_only_on_its_keys(attend: Attend, example: Example) -> None:
    """Check that a new key and value at one position do not change the bits of rows that do not attend it (19, 21)."""
    if not example.problem.seqlen_kv:
        _run(attend, example)
        return
    position = example.problem.seqlen_kv // 2
    plain = _in_c_order(example)
    other = plain.but(k=_overwritten(plain.k, position), v=_overwritten(plain.v, position))
    is_unaffected = ~example.allowed[..., position]
    first, second = (
        (np.where(is_unaffected[..., None], o, 0), np.where(is_unaffected, lse, 0))
        for o, lse in (_run(attend, plain), _run(attend, other))
    )
    _same_bits(first, second, example)


def check_copies_of_every_key_move_only_lse(attend: Attend, example: Example) -> None:
    """Check that three copies of each key and value do not change o, and add log 3 to lse (22)."""
    other = _with_keys(example, np.repeat(np.arange(example.problem.seqlen_kv), 3))
    o, lse = _run(attend, example)
    _same((o, lse + np.log(np.longdouble(3))), _run(attend, other), example, other)


def check_equal_keys_give_the_mean(attend: Attend, example: Example) -> None:
    """Check that with equal keys, o is the mean of the values, and lse is the score + log(number of keys) (23)."""
    if not example.problem.seqlen_kv:
        _run(attend, example)
        return
    other = example.but(k=np.broadcast_to(example.k[..., :1, :], example.k.shape))
    flat = other.but(q=np.zeros_like(other.q))
    mean, log_count = _run(attend, flat)
    score = other.problem.softmax_scale * (widest(other.q) * widest(_repeated(other, other.k))[..., :1, :]).sum(axis=-1)
    _same((mean, log_count + score), _run(attend, other), flat, other)


def check_a_further_key_never_lowers_lse(attend: Attend, example: Example) -> None:
    """Check that lse does not fall if every query attends one more key (36)."""
    keys = np.arange(example.problem.seqlen_kv)
    other = example.but(mask=example.allowed | (keys == len(keys) // 2))
    lse, higher = _run(attend, example)[1], _run(attend, other)[1]
    bound = _forward_bounds(example).lse + _forward_bounds(other).lse
    assert_within("lse", higher, np.maximum(lse, higher), bound, example)


# Properties of the layout and the grouping of operands


def check_grouped_heads_are_repeated_heads(attend: Attend, example: Example) -> None:
    """Check that grouped query heads give the results of key/value heads repeated for each query head (24)."""
    other = example.but(k=_repeated(example, example.k), v=_repeated(example, example.v))
    _same(_run(attend, example), _run(attend, other), example, other)


def check_memory_layout_does_not_matter(attend: Attend, example: Example) -> None:
    """Check that views with any strides give the results of contiguous copies (26)."""
    _same(_run(attend, example), _run(attend, other := _in_c_order(example)), example, other)


def check_calls_repeat_bitwise(attend: Attend, example: Example) -> None:
    """Check that a call gives the same bits again after a different call (33)."""
    first = _run(attend, example)
    _run(attend, example.but(q=example.q[..., ::-1, :]))
    _same_bits(first, _run(attend, example), example)


def check_operands_are_left_as_they_were(attend: Attend, example: Example) -> None:
    """Check that a call does not write to its operands (35)."""
    before = _in_c_order(example)
    _run(attend, example)
    for name in "qkv":
        _bitwise(name, getattr(before, name), getattr(example, name), example)


# Gradients


def check_gradients_follow_the_order_of_keys(pull: Pull, example: Example) -> None:
    """Check that a permutation of the keys permutes dk and dv, and does not change dq (1)."""
    order = _shuffled(example.problem.seqlen_kv)
    other = _with_keys(example, order)
    dq, dk, dv = _pull(pull, example)
    _same_gradients((dq, dk[..., order, :], dv[..., order, :]), _pull(pull, other), other.bounds, other)


def check_gradients_follow_the_order_of_queries(pull: Pull, example: Example) -> None:
    """Check that a permutation of the queries permutes dq, and does not change dk and dv (2)."""
    order = _shuffled(example.problem.seqlen_q)
    other = _with_rows(example, order)
    dq, dk, dv = _pull(pull, example)
    _same_gradients((dq[..., order, :], dk, dv), _pull(pull, other), other.bounds, other)


def check_grouped_gradients_are_summed(pull: Pull, example: Example) -> None:
    """Check that dk and dv of a key/value head are sums over the query heads that read it (24)."""
    other = example.but(k=_repeated(example, example.k), v=_repeated(example, example.v))
    dq, dk, dv = (widest(x) for x in _pull(pull, other))
    b = other.bounds
    bounds = Bounds(o=b.o, lse=b.lse, dq=b.dq, dk=_group_sum(example, b.dk), dv=_group_sum(example, b.dv))
    _same_gradients((dq, _group_sum(example, dk), _group_sum(example, dv)), _pull(pull, example), bounds, example)


def check_dk_sums_to_what_dlse_asks(pull: Pull, example: Example) -> None:
    """Check that dk summed over keys is scale times the sum of dlse q, because a row of dS sums to dlse (28, 30)."""
    if _is_stretched(example):
        _pull(pull, example)
        return
    dlse = np.zeros(example.problem.lse_shape()) if example.dlse is None else example.dlse
    rows = np.where(_has_keys(example), dlse, 0)[..., None] * widest(example.q)
    exact = example.problem.softmax_scale * _group_sum(example, rows.sum(axis=-2, keepdims=True))
    dk = _sum(_pull(pull, example)[1], axis=-2, keepdims=True)
    assert_within("sum of dk", dk, exact, example.bounds.dk.sum(axis=-2, keepdims=True), example)


def check_dv_sums_to_do(pull: Pull, example: Example) -> None:
    """Check that dv summed over the keys is the sum of do over the rows that attend a key (28)."""
    if _is_stretched(example):
        _pull(pull, example)
        return
    rows = np.where(_has_keys(example)[..., None], widest(_do(example)), 0)
    exact = _group_sum(example, rows.sum(axis=-2, keepdims=True))
    dv = _sum(_pull(pull, example)[2], axis=-2, keepdims=True)
    assert_within("sum of dv", dv, exact, example.bounds.dv.sum(axis=-2, keepdims=True), example)


def check_q_and_k_share_their_slope(pull: Pull, example: Example) -> None:
    """Check that <dq, q> = <dk, k>: both are scale times the derivative with respect to scale (29)."""
    dq, dk, _ = _pull(pull, example)
    left, left_bound = _inner(dq, example.bounds.dq, example.q)
    right, right_bound = _inner(dk, example.bounds.dk, example.k)
    assert_within("<dq, q>", left, right, left_bound + right_bound, example)


def check_gradients_are_linear_in_do(pull: Pull, example: Example) -> None:
    """Check that the gradients for do + do' are those for do, with dlse, plus those for do' (30)."""
    first = _on_lattice(example)
    second = first.but(do=np.flip(_do(first), axis=(-1, -2)), dlse=None)
    both = first.but(do=first.do + second.do)
    results = [_pull(pull, each) for each in (first, second, both)]
    for name, x, y, total in zip(("dq", "dk", "dv"), *results):
        bound = sum(getattr(each.bounds, name) for each in (first, second, both))
        assert_within(name, total, _sum([widest(x), widest(y)], axis=0), bound, example)


def check_no_gradient_in_no_gradient_out(pull: Pull, example: Example) -> None:
    """Check that do = 0 without dlse gives gradients that are exactly 0 (30)."""
    zero = example.but(do=np.zeros_like(_do(example)), dlse=None)
    gradients = _pull(pull, zero)
    _same_bits([np.zeros_like(x) for x in gradients], gradients, zero)


def check_dlse_leaves_dv(pull: Pull, example: Example) -> None:
    """Check that dlse does not change the bits of dv (30)."""
    ones = np.ones(example.problem.lse_shape(), example.problem.accumulator)
    first, second = (_pull(pull, example.but(dlse=dlse))[2] for dlse in (ones, 3 * ones))
    _bitwise("dv", first, second, example)


def check_empty_rows_give_nothing(pull: Pull, example: Example) -> None:
    """Check that rows without a key have dq = 0, and that their do and dlse do not change any bit (32)."""
    is_empty = np.arange(example.problem.seqlen_q) % 2 == 0
    plain = _in_c_order(example).but(mask=example.allowed & ~is_empty[:, None])
    one, zero = (np.full(plain.problem.lse_shape(), value, plain.problem.accumulator) for value in (1, 0))
    dlse = zero if example.dlse is None else example.dlse
    other = plain.but(
        do=np.where(is_empty[:, None], np.ones_like(_do(plain)), plain.do), dlse=np.where(is_empty, one, dlse)
    )
    first, second = _pull(pull, plain.but(dlse=dlse)), _pull(pull, other)
    _same_bits(first, second, example)
    _bitwise("dq", np.where(is_empty[:, None], 0, first[0]), first[0], example)


def check_gradients_do_not_depend_on_layout(pull: Pull, example: Example) -> None:
    """Check that views with any strides give the gradients of contiguous copies (26)."""
    _same_gradients(_pull(pull, example), _pull(pull, _in_c_order(example)), example.bounds, example)


def check_gradients_repeat_bitwise(pull: Pull, example: Example) -> None:
    """Check that a repeated call gives the same bits, for implementations that promise determinism (33)."""
    _same_bits(_pull(pull, example), _pull(pull, example), example)


# Both passes together


def check_o_and_dv_share_their_product(attend: Attend, pull: Pull, example: Example) -> None:
    """Check that <o, do> = <dv, v>, which connects the forward pass with the backward pass (29)."""
    left, left_bound = _inner(_run(attend, example)[0], example.bounds.o, _do(example))
    right, right_bound = _inner(_pull(pull, example)[2], example.bounds.dv, example.v)
    assert_within("<o, do>", left, right, left_bound + right_bound, example)


def check_a_unit_do_reads_a_row_of_probabilities(attend: Attend, pull: Pull, example: Example) -> None:
    """Check that do = 1 at one row and column gives this row of P = exp(score - lse) in this column of dv (31)."""
    if not example.problem.seqlen_q or _is_stretched(example) or example.problem.group_size > 1:
        _run(attend, example)
        _pull(pull, example)
        return
    row = example.problem.seqlen_q // 2
    do = np.zeros_like(_do(example))
    do[..., row, 0] = 1
    other = example.but(do=do, dlse=None)
    lse, dv = _run(attend, other)[1][..., row, None], _pull(pull, other)[2][..., 0]
    score = other.problem.softmax_scale * (widest(other.k) * widest(other.q)[..., row, None, :]).sum(axis=-1)
    p = np.exp(np.where(other.allowed[..., row, :], score - np.where(np.isneginf(lse), 0, lse), -np.inf))
    assert_within("dv", dv, p, other.bounds.dv[..., 0] + p * np.expm1(other.bounds.lse[..., row, None]), example)


def check_equal_keys_have_no_slope(attend: Attend, pull: Pull, example: Example) -> None:
    """Check that with equal keys, o is the same for every q, and dq is 0 without dlse (23)."""
    if not example.problem.seqlen_kv:
        _run(attend, example)
        _pull(pull, example)
        return
    other = example.but(k=np.broadcast_to(example.k[..., :1, :], example.k.shape), dlse=None)
    reversed_q = other.but(q=other.q[..., ::-1, :])
    dq = _pull(pull, other)[0]
    assert_within("dq", dq, np.zeros(dq.shape), other.bounds.dq, example)
    bound = _forward_bounds(other).o + _forward_bounds(reversed_q).o
    assert_within("o", _run(attend, reversed_q)[0], _run(attend, other)[0], bound, example)


def check_non_finite_values_reach_what_they_should(attend: Attend, pull: Pull, example: Example) -> None:
    """Check that NaN and infinities reach results by the rule of docs/semantics.md; see `non_finite` (37)."""
    finite, names = finite_part(example), ("o", "lse", "dq", "dk", "dv")
    results, others = (
        dict(zip(names, (*_run(attend, each), *_pull(pull, each)), strict=True)) for each in (example, finite)
    )
    assert_not_finite_where_due(example, **results)
    for name, classes in expected(example).items():
        is_free = classes.may_be_not_finite
        result, other = (np.where(is_free, 0, widest(each[name])) for each in (results, others))
        assert_within(name, result, other, 2 * getattr(finite.bounds, name), example)


def _taking(*functions: str) -> tuple[Callable[..., None], ...]:
    """Return the properties of this module whose parameters are these functions and an example."""
    checks = [each for name, each in globals().items() if name.startswith("check_")]
    return tuple(each for each in checks if [*signature(each).parameters] == [*functions, "example"])


FORWARD_PROPERTIES, GRADIENT_PROPERTIES, PAIR_PROPERTIES = _taking("attend"), _taking("pull"), _taking("attend", "pull")


# Calls


def _run(attend: Attend, example: Example) -> tuple[Array, Array]:
    return as_pair(attend(example.q, example.k, example.v, mask=example.dense_mask, scale=example.scale), example)


def _pull(pull: Pull, example: Example) -> list[Array]:
    operands = example.q, example.k, example.v, _do(example)
    results = pull(*operands, dlse=example.dlse, mask=example.dense_mask, scale=example.scale)
    return as_results(results, {f"d{name}": getattr(example, name).shape for name in "qkv"}, example)


def _do(example: Example) -> Array:
    """Return the example's do, or raise an error if it is None."""
    if example.do is None:
        raise TypeError("gradients need an example with do")
    return example.do


def _forward_bounds(example: Example) -> Bounds:
    return example.but(do=None, dlse=None).bounds


# Comparisons


def _same(first: tuple[Array, Array], second: tuple[Array, Array], example: Example, other: Example) -> None:
    """Assert that o and lse of two calls differ by at most the sum of their bounds."""
    __tracebackhide__ = True
    bounds = _forward_bounds(example), _forward_bounds(other)
    for name, x, y in zip(("o", "lse"), first, second, strict=True):
        assert_within(name, y, widest(x), sum(getattr(each, name) for each in bounds), other)


def _same_gradients(first: Sequence[Array], second: Sequence[Array], bounds: Bounds, example: Example) -> None:
    """Assert that gradients of two calls differ by at most the sum of the example's bounds and `bounds`."""
    __tracebackhide__ = True
    for name, x, y in zip(("dq", "dk", "dv"), first, second, strict=True):
        assert_within(name, y, widest(x), getattr(bounds, name) + getattr(example.bounds, name), example)


def _same_bits(first: Sequence[Array], second: Sequence[Array], example: Example) -> None:
    __tracebackhide__ = True
    for number, (x, y) in enumerate(zip(first, second, strict=True)):
        _bitwise(f"result {number}", x, y, example)


def _bitwise(name: str, first: np.ndarray, second: np.ndarray, example: Example) -> None:
    """Assert that values are equal, where -0 equals 0 and NaN equals NaN."""
    __tracebackhide__ = True
    assert_within(name, second, first, 0.0, example)


def _check_merge(attend: Attend, example: Example, parts: Sequence[Example]) -> None:
    """Assert that the o of two parts, averaged with weights from their lse, is the o of the example."""
    __tracebackhide__ = True
    (o, lse), (other, other_lse) = ((widest(x) for x in _run(attend, part)) for part in parts)
    bound, other_bound = (_forward_bounds(part) for part in parts)
    total = np.logaddexp(lse, other_lse)
    shift = np.where(np.isneginf(total), 0, total)
    weight, other_weight = (np.exp(x - shift)[..., None] for x in (lse, other_lse))
    whole = _forward_bounds(example)
    # An error e of the difference of the two lse changes their weights w and w' by at most w w' (exp(e) - 1).
    moved = weight * other_weight * np.expm1(bound.lse + other_bound.lse)[..., None] * np.abs(o - other)
    o_bound = whole.o + weight * bound.o + other_weight * other_bound.o + moved
    merged_o, merged_lse = _run(attend, example)
    assert_within("o", merged_o, weight * o + other_weight * other, o_bound, example)
    assert_within("lse", merged_lse, total, whole.lse + np.maximum(bound.lse, other_bound.lse), example)


def _inner(x: np.ndarray, bound: np.ndarray, y: np.ndarray) -> tuple[Array, Array]:
    """Return <x, y> and its bound; elements of x count as 0 if y is 0, even if they are NaN."""
    is_zero = y == 0
    x, y = widest(x), widest(y)
    return _sum(np.where(is_zero, 0, x) * y), _sum(np.where(is_zero, 0, bound) * np.abs(y))


# Changes


def _with_keys(example: Example, keys: np.ndarray) -> Example:
    mask = None if example.mask is None else example.dense_mask[..., keys]
    return example.but(k=example.k[..., keys, :], v=example.v[..., keys, :], mask=mask)


def _with_rows(example: Example, rows: np.ndarray) -> Example:
    return example.but(
        q=example.q[..., rows, :],
        do=None if example.do is None else example.do[..., rows, :],
        dlse=None if example.dlse is None else example.dlse[..., rows],
        mask=None if example.mask is None else example.dense_mask[..., rows, :],
    )


def _on_lattice(example: Example) -> Example:
    names = [name for name in ("q", "k", "v", "do") if getattr(example, name) is not None]
    return example.but(**{name: on_lattice(getattr(example, name)) for name in names})


def _in_c_order(example: Example) -> Example:
    names = [name for name in ("q", "k", "v", "do", "dlse") if getattr(example, name) is not None]
    return example.but(**{name: np.array(getattr(example, name), order="C") for name in names})


def _overwritten(x: np.ndarray, position: int) -> Array:
    changed = x.copy()
    changed[..., position, :] = np.arange(x.shape[-1]) % 5
    return changed


def _reversed(x: np.ndarray, trailing: int) -> Array:
    """Reverse every axis except the last `trailing` ones."""
    return np.flip(x, axis=tuple(range(x.ndim - trailing)))


def _repeated(example: Example, x: np.ndarray) -> Array:
    """Repeat each key/value head for each query head of its group."""
    return np.repeat(x, example.problem.group_size, axis=-3) if example.problem.has_heads else x


def _group_sum(example: Example, x: np.ndarray) -> Array:
    """Sum over the query heads that share a key/value head."""
    if not example.problem.has_heads:
        return x
    *batch, _, rows, columns = x.shape
    groups = example.problem.num_kv_heads, example.problem.group_size
    return _sum(x.reshape(*batch, *groups, rows, columns), axis=-3)


def _is_stretched(example: Example) -> bool:
    """True if the batch axes of an operand are broadcast."""
    problem = example.problem
    return any(batch != problem.batch for batch in (problem.q_batch, problem.k_batch, problem.v_batch))


def _has_keys(example: Example) -> Array:
    return example.allowed.any(axis=-1)


def _shuffled(count: int) -> Array:
    return np.random.default_rng(0).permutation(count)


def _sum(x: Array, **options: int | tuple[int, ...] | bool) -> Array:
    """Sum in long double; the sum of overflowed results may be NaN, for which the bound is infinite."""
    with np.errstate(invalid="ignore"):
        return widest(x).sum(**options)
