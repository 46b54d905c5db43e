"""Properties that attention has whatever computes it: each changes a call in a way whose effect is known.

>>> from cuflash import reference
>>> from cuflash.testing import Structure
>>> check_doubling_v_doubles_o(reference.attention, Structure(seqlen_q=3, seqlen_kv=5).example())

No exact answer is needed, only the bounds of the calls that are compared, so that these also judge what no oracle can
reach. Where a property would round its inputs again (moving keys, adding outputs), they are first put on a lattice of
small integers, where nothing rounds. "Bitwise" stands where any implementation owes it; else the two sides may differ
by the sum of their bounds. A property that says nothing about an example still calls the function, which must return
arrays of the right shapes.

Forward passes are called as ``attend(q, k, v, mask=, scale=) -> (o, lse)``, gradients as
``gradients(q, k, v, do, dlse=, mask=, scale=) -> (dq, dk, dv)``, with the mask a bool array or None: the signatures of
`cuflash.reference`. The numbers in brackets count the properties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..arrays import Array
from ..bounds import Bounds
from ..planning.problem import MAX_HEAD_DIM
from .assertions import Attend, Example, as_pair, as_results, assert_within, on_lattice
from .non_finite import assert_not_finite_where_due, expected, finite_part, widest

__all__ = ["FORWARD_PROPERTIES", "GRADIENT_PROPERTIES", "PAIR_PROPERTIES", "Pull"]


class Pull(Protocol):
    """A backward pass under test, from the operands alone."""

    def __call__(
        self, q: Array, k: Array, v: Array, do: Array, *, dlse: Array, mask: np.ndarray | None, scale: float | None
    ) -> tuple[Array, Array, Array]:
        """dq, dk and dv."""


# Properties of the positions of keys, queries, heads and batch entries


def check_order_of_keys_does_not_matter(attend: Attend, example: Example) -> None:
    """Keys, values and mask columns permuted together leave o and lse. (1)"""
    other = _with_keys(example, _shuffled(example.problem.seqlen_kv))
    _same(_run(attend, example), _run(attend, other), example, other)


def check_queries_are_independent(attend: Attend, example: Example) -> None:
    """Queries and mask rows permuted together permute o and lse. (2)"""
    order = _shuffled(example.problem.seqlen_q)
    other = _with_rows(example, order)
    o, lse = _run(attend, example)
    _same((o[..., order, :], lse[..., order]), _run(attend, other), other, other)


def check_heads_and_batch_entries_are_independent(attend: Attend, example: Example) -> None:
    """Every axis before the sequence reversed reverses o and lse. (3)"""
    turned = {name: _reversed(getattr(example, name), 2) for name in "qkv"}
    other = example.but(**turned, mask=None if example.mask is None else _reversed(example.dense_mask, 2))
    o, lse = _run(attend, example)
    _same((_reversed(o, 2), _reversed(lse, 1)), _run(attend, other), other, other)


def check_a_batch_entry_does_not_see_the_others(attend: Attend, example: Example) -> None:
    """The first entry of the first leading axis alone gives the first entry of the results. (4)"""
    if not example.problem.batch or 0 in example.problem.batch:
        _run(attend, example)
        return
    rank = len(example.problem.batch) + 3
    first = {name: x[:1] if x.ndim == rank else x for name, x in (("q", example.q), ("k", example.k), ("v", example.v))}
    other = example.but(**first, mask=None if example.mask is None else example.dense_mask[:1])
    o, lse = _run(attend, example)
    _same((o[:1], lse[:1]), _run(attend, other), other, other)


def check_queries_may_come_in_pieces(attend: Attend, example: Example) -> None:
    """All rows but the last in one call, and the last in another as in decode, are the rows of one call. (15)"""
    rows = np.arange(example.problem.seqlen_q)
    o, lse = zip(*(_run(attend, _with_rows(example, part)) for part in (rows[:-1], rows[-1:])))
    _same((np.concatenate(o, axis=-2), np.concatenate(lse, axis=-1)), _run(attend, example), example, example)


# Properties of changed scores and values


def check_a_vector_added_to_every_key_moves_only_lse(attend: Attend, example: Example) -> None:
    """k + c leaves o and adds scale q . c to lse. (6)"""
    plain = _on_lattice(example)
    c = np.arange(example.problem.head_dim) % 3
    moved = plain.but(k=plain.k + c.astype(plain.k.dtype))
    o, lse = _run(attend, plain)
    shift = plain.problem.softmax_scale * (widest(plain.q) @ widest(c))
    _same((o, lse + shift), _run(attend, moved), plain, moved)


def check_doubling_v_doubles_o(attend: Attend, example: Example) -> None:
    """2 v gives 2 o, bitwise where neither under- nor overflows. (7)"""
    plain = _on_lattice(example)
    o, doubled = (widest(_run(attend, each)[0]) for each in (plain, plain.but(v=plain.v + plain.v)))
    is_normal = np.abs(o) > float(np.finfo(np.float16).smallest_normal)  # far from underflow in the other dtypes
    _bitwise("o", np.where(is_normal, 2 * o, 0), np.where(is_normal, doubled, 0), example)


def check_a_vector_added_to_every_value_moves_o(attend: Attend, example: Example) -> None:
    """v + b gives o + b in rows that attend a key. (8)"""
    plain = _on_lattice(example)
    b = np.arange(plain.v.shape[-1]) % 4
    moved = plain.but(v=plain.v + b.astype(plain.v.dtype))
    o, lse = _run(attend, plain)
    _same((widest(o) + b * _has_keys(plain)[..., None], lse), _run(attend, moved), plain, moved)


def check_o_is_linear_in_v(attend: Attend, example: Example) -> None:
    """Attention to v + w is attention to v plus attention to w. (9)"""
    first = _on_lattice(example)
    second = first.but(v=np.flip(first.v, axis=(-1, -2)))
    both = first.but(v=first.v + second.v)
    o, other, total = (widest(_run(attend, each)[0]) for each in (first, second, both))
    assert_within("o", total, o + other, sum(_forward_bounds(each).o for each in (first, second, both)), example)


def check_o_is_a_mean_of_values(attend: Attend, example: Example) -> None:
    """o lies between the smallest and the largest value that is attended, at any magnitude of the scores. (11)"""
    is_seen, has_keys = example.allowed.any(axis=-2)[..., None], _has_keys(example)[..., None]
    values = np.broadcast_to(widest(_repeated(example, example.v)), (*is_seen.shape[:-1], example.v.shape[-1]))
    lowest, highest = (
        reduce(np.where(is_seen, values, start), axis=-2, keepdims=True, initial=start)
        for reduce, start in ((np.min, np.inf), (np.max, -np.inf))
    )
    # Rounding alone is what the bound leaves when all scores are equal and all values the largest.
    largest = np.full(example.v.shape, np.abs(widest(example.v)).max(initial=0)).astype(example.v.dtype)
    rounding = _forward_bounds(example.but(q=np.zeros_like(example.q), v=largest)).o
    for scale in (example.scale, 1e6, 1e9):
        o = widest(_run(attend, example.but(scale=scale))[0])
        inside = np.where(has_keys, np.clip(o, lowest, highest), 0)
        assert_within("o", o, inside, rounding, example.but(scale=scale))


def check_scale_may_move_between_q_and_the_score(attend: Attend, example: Example) -> None:
    """(2 q, scale / 2) is (q, scale), bitwise. (12)"""
    scale = example.problem.softmax_scale
    plain = _on_lattice(example).but(scale=scale)
    other = plain.but(q=plain.q + plain.q, scale=scale / 2)
    _same_bits(_run(attend, plain), _run(attend, other), example)


def check_head_dims_may_be_permuted_and_negated(attend: Attend, example: Example) -> None:
    """q and k under one signed permutation of head_dim give the same o and lse. (13)"""
    order = _shuffled(example.problem.head_dim)
    sign = np.where(order % 2, -1, 1).astype(example.q.dtype)
    other = example.but(q=example.q[..., order] * sign, k=example.k[..., order] * sign)
    _same(_run(attend, example), _run(attend, other), example, other)


def check_zeros_may_pad_the_head_dim(attend: Attend, example: Example) -> None:
    """A further head dim of zeros changes nothing at the same scale. (25)"""
    if example.problem.head_dim == MAX_HEAD_DIM:
        _run(attend, example)
        return
    plain = example.but(scale=example.problem.softmax_scale)
    padded = {name: np.insert(getattr(example, name), 0, 0, axis=-1) for name in "qk"}
    other = plain.but(**padded)
    _same(_run(attend, plain), _run(attend, other), plain, other)


# Properties of the set of keys


def check_parts_of_the_keys_merge_to_the_whole(attend: Attend, example: Example) -> None:
    """Attention to the first keys and to the others, merged by lse, is attention to all. (14)"""
    keys = np.arange(example.problem.seqlen_kv)
    cut = len(keys) // 3
    _check_merge(attend, example, [_with_keys(example, part) for part in (keys[:cut], keys[cut:])])


def check_disjoint_masks_merge_to_their_union(attend: Attend, example: Example) -> None:
    """Two masks without a common key, merged by lse, are their union. (18)"""
    half = np.random.default_rng(0).random(example.allowed.shape) < 0.5
    _check_merge(attend, example, [example.but(mask=example.allowed & part) for part in (half, ~half)])


def check_a_mask_of_all_keys_is_no_mask(attend: Attend, example: Example) -> None:
    """A mask that is True everywhere gives what no mask gives. (16)"""
    plain = example.but(mask=None)
    other = plain.but(mask=plain.allowed)
    _same(_run(attend, plain), _run(attend, other), plain, other)


def check_masked_keys_may_be_removed(attend: Attend, example: Example) -> None:
    """Further keys that no query attends change nothing. (17)"""
    if not example.problem.seqlen_kv:
        _run(attend, example)
        return
    keys = np.arange(example.problem.seqlen_kv)
    longer = _with_keys(example, np.append(keys, keys[:1]))
    longer = longer.but(mask=np.where(np.arange(len(keys) + 1) < len(keys), longer.allowed, False))
    _same(_run(attend, example), _run(attend, longer), example, longer)


def check_a_query_depends_only_on_its_keys(attend: Attend, example: Example) -> None:
    """Another key and value at one position leave the rows that do not attend it, bitwise. (19, 21)"""
    if not example.problem.seqlen_kv:
        _run(attend, example)
        return
    position = example.problem.seqlen_kv // 2
    plain = _in_c_order(example)
    other = plain.but(k=_overwritten(plain.k, position), v=_overwritten(plain.v, position))
    is_blind = ~example.allowed[..., position]
    first, second = (
        (np.where(is_blind[..., None], o, 0), np.where(is_blind, lse, 0))
        for o, lse in (_run(attend, plain), _run(attend, other))
    )
    _same_bits(first, second, example)


def check_copies_of_every_key_move_only_lse(attend: Attend, example: Example) -> None:
    """Each key and value three times leaves o and adds log 3 to lse. (22)"""
    other = _with_keys(example, np.repeat(np.arange(example.problem.seqlen_kv), 3))
    o, lse = _run(attend, example)
    _same((o, lse + np.log(np.longdouble(3))), _run(attend, other), example, other)


def check_equal_keys_give_the_mean(attend: Attend, example: Example) -> None:
    """With all keys equal, o is the mean of the values, and lse is score + log(number of keys). (23)"""
    if not example.problem.seqlen_kv:
        _run(attend, example)
        return
    other = example.but(k=np.broadcast_to(example.k[..., :1, :], example.k.shape))
    flat = other.but(q=np.zeros_like(other.q))
    mean, log_count = _run(attend, flat)
    score = other.problem.softmax_scale * (widest(other.q) * widest(_repeated(other, other.k))[..., :1, :]).sum(axis=-1)
    _same((mean, log_count + score), _run(attend, other), flat, other)


def check_a_further_key_never_lowers_lse(attend: Attend, example: Example) -> None:
    """Letting every query attend one more key raises lse, or leaves it. (36)"""
    keys = np.arange(example.problem.seqlen_kv)
    other = example.but(mask=example.allowed | (keys == len(keys) // 2))
    lse, higher = _run(attend, example)[1], _run(attend, other)[1]
    bound = _forward_bounds(example).lse + _forward_bounds(other).lse
    assert_within("lse", higher, np.maximum(lse, higher), bound, example)


# Properties of the layout and the grouping of operands


def check_grouped_heads_are_repeated_heads(attend: Attend, example: Example) -> None:
    """Key/value heads read by a group are the same heads given once for each query head. (24)"""
    other = example.but(k=_repeated(example, example.k), v=_repeated(example, example.v))
    _same(_run(attend, example), _run(attend, other), example, other)


def check_memory_layout_does_not_matter(attend: Attend, example: Example) -> None:
    """Views with any strides give what contiguous copies give. (26)"""
    _same(_run(attend, example), _run(attend, other := _in_c_order(example)), example, other)


def check_calls_repeat_bitwise(attend: Attend, example: Example) -> None:
    """A call repeated after another one gives the same bits. (33)"""
    first = _run(attend, example)
    _run(attend, example.but(q=example.q[..., ::-1, :]))
    _same_bits(first, _run(attend, example), example)


def check_operands_are_left_as_they_were(attend: Attend, example: Example) -> None:
    """No call writes to its operands. (35)"""
    before = _in_c_order(example)
    _run(attend, example)
    for name in "qkv":
        _bitwise(name, getattr(before, name), getattr(example, name), example)


# Gradients


def check_gradients_follow_the_order_of_keys(pull: Pull, example: Example) -> None:
    """Keys permuted permute dk and dv and leave dq. (1)"""
    order = _shuffled(example.problem.seqlen_kv)
    other = _with_keys(example, order)
    dq, dk, dv = _pull(pull, example)
    _same_gradients((dq, dk[..., order, :], dv[..., order, :]), _pull(pull, other), other.bounds, other)


def check_gradients_follow_the_order_of_queries(pull: Pull, example: Example) -> None:
    """Queries permuted permute dq and leave dk and dv. (2)"""
    order = _shuffled(example.problem.seqlen_q)
    other = _with_rows(example, order)
    dq, dk, dv = _pull(pull, example)
    _same_gradients((dq[..., order, :], dk, dv), _pull(pull, other), other.bounds, other)


def check_grouped_gradients_are_summed(pull: Pull, example: Example) -> None:
    """dk and dv of a key/value head are the sums over the query heads that read it. (24)"""
    other = example.but(k=_repeated(example, example.k), v=_repeated(example, example.v))
    dq, dk, dv = (widest(x) for x in _pull(pull, other))
    b = other.bounds
    bounds = Bounds(o=b.o, lse=b.lse, dq=b.dq, dk=_group_sum(example, b.dk), dv=_group_sum(example, b.dv))
    _same_gradients((dq, _group_sum(example, dk), _group_sum(example, dv)), _pull(pull, example), bounds, example)


def check_dk_sums_to_what_dlse_asks(pull: Pull, example: Example) -> None:
    """dk summed over the keys is scale * sum of dlse q, as each row of dS sums to dlse: 0 without one. (28, 30)"""
    if _is_stretched(example):
        _pull(pull, example)
        return
    dlse = np.zeros(example.problem.lse_shape()) if example.dlse is None else example.dlse
    rows = np.where(_has_keys(example), dlse, 0)[..., None] * widest(example.q)
    exact = example.problem.softmax_scale * _group_sum(example, rows.sum(axis=-2, keepdims=True))
    dk = _sum(_pull(pull, example)[1], axis=-2, keepdims=True)
    assert_within("sum of dk", dk, exact, example.bounds.dk.sum(axis=-2, keepdims=True), example)


def check_dv_sums_to_do(pull: Pull, example: Example) -> None:
    """dv summed over the keys is the sum of do over the rows that attend a key. (28)"""
    if _is_stretched(example):
        _pull(pull, example)
        return
    rows = np.where(_has_keys(example)[..., None], widest(_do(example)), 0)
    exact = _group_sum(example, rows.sum(axis=-2, keepdims=True))
    dv = _sum(_pull(pull, example)[2], axis=-2, keepdims=True)
    assert_within("sum of dv", dv, exact, example.bounds.dv.sum(axis=-2, keepdims=True), example)


def check_q_and_k_share_their_slope(pull: Pull, example: Example) -> None:
    """<dq, q> = <dk, k>: both are scale times the derivative by scale. (29)"""
    dq, dk, _ = _pull(pull, example)
    left, left_bound = _inner(dq, example.bounds.dq, example.q)
    right, right_bound = _inner(dk, example.bounds.dk, example.k)
    assert_within("<dq, q>", left, right, left_bound + right_bound, example)


def check_gradients_are_linear_in_do(pull: Pull, example: Example) -> None:
    """The gradients of do + do' are those of do, with dlse, plus those of do'. (30)"""
    first = _on_lattice(example)
    second = first.but(do=np.flip(_do(first), axis=(-1, -2)), dlse=None)
    both = first.but(do=first.do + second.do)
    results = [_pull(pull, each) for each in (first, second, both)]
    for name, x, y, total in zip(("dq", "dk", "dv"), *results):
        bound = sum(getattr(each.bounds, name) for each in (first, second, both))
        assert_within(name, total, _sum([widest(x), widest(y)], axis=0), bound, example)


def check_no_gradient_in_no_gradient_out(pull: Pull, example: Example) -> None:
    """do = 0 without dlse gives zeros, bitwise. (30)"""
    still = example.but(do=np.zeros_like(_do(example)), dlse=None)
    gradients = _pull(pull, still)
    _same_bits([np.zeros_like(x) for x in gradients], gradients, still)


def check_dlse_leaves_dv(pull: Pull, example: Example) -> None:
    """dv does not depend on dlse, bitwise. (30)"""
    ones = np.ones(example.problem.lse_shape(), example.problem.accumulator)
    first, second = (_pull(pull, example.but(dlse=dlse))[2] for dlse in (ones, 3 * ones))
    _bitwise("dv", first, second, example)


def check_empty_rows_give_nothing(pull: Pull, example: Example) -> None:
    """Rows without a key have dq = 0, and what their do and dlse hold does not matter, bitwise. (32)"""
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
    """Views with any strides give what contiguous copies give. (26)"""
    _same_gradients(_pull(pull, example), _pull(pull, _in_c_order(example)), example.bounds, example)


def check_gradients_repeat_bitwise(pull: Pull, example: Example) -> None:
    """A call repeated gives the same bits, where the implementation promises determinism. (33)"""
    _same_bits(_pull(pull, example), _pull(pull, example), example)


# Both passes together


def check_o_and_dv_share_their_product(attend: Attend, pull: Pull, example: Example) -> None:
    """<o, do> = <dv, v>: ties the forward pass to the backward. (29)"""
    left, left_bound = _inner(_run(attend, example)[0], example.bounds.o, _do(example))
    right, right_bound = _inner(_pull(pull, example)[2], example.bounds.dv, example.v)
    assert_within("<o, do>", left, right, left_bound + right_bound, example)


def check_a_unit_do_reads_a_row_of_probabilities(attend: Attend, pull: Pull, example: Example) -> None:
    """do = 1 at one row and column puts that row of P = exp(score - lse) into that column of dv. (31)"""
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
    """With all keys equal, o is the same for every q, and dq is 0 without dlse. (23)"""
    if not example.problem.seqlen_kv:
        _run(attend, example)
        _pull(pull, example)
        return
    other = example.but(k=np.broadcast_to(example.k[..., :1, :], example.k.shape), dlse=None)
    turned = other.but(q=other.q[..., ::-1, :])
    dq = _pull(pull, other)[0]
    assert_within("dq", dq, np.zeros(dq.shape), other.bounds.dq, example)
    bound = _forward_bounds(other).o + _forward_bounds(turned).o
    assert_within("o", _run(attend, turned)[0], _run(attend, other)[0], bound, example)


def check_non_finite_values_reach_what_they_should(attend: Attend, pull: Pull, example: Example) -> None:
    """NaN and infinities of operands go where the rule of docs/semantics.md has them go; see `non_finite`. (37)"""
    finite, names = finite_part(example), ("o", "lse", "dq", "dk", "dv")
    results, others = (
        dict(zip(names, (*_run(attend, each), *_pull(pull, each)), strict=True)) for each in (example, finite)
    )
    assert_not_finite_where_due(example, **results)
    for name, classes in expected(example).items():
        is_free = classes.may_be_not_finite
        result, other = (np.where(is_free, 0, widest(each[name])) for each in (results, others))
        assert_within(name, result, other, 2 * getattr(finite.bounds, name), example)


FORWARD_PROPERTIES = (
    check_order_of_keys_does_not_matter,
    check_queries_are_independent,
    check_heads_and_batch_entries_are_independent,
    check_a_batch_entry_does_not_see_the_others,
    check_queries_may_come_in_pieces,
    check_a_vector_added_to_every_key_moves_only_lse,
    check_doubling_v_doubles_o,
    check_a_vector_added_to_every_value_moves_o,
    check_o_is_linear_in_v,
    check_o_is_a_mean_of_values,
    check_scale_may_move_between_q_and_the_score,
    check_head_dims_may_be_permuted_and_negated,
    check_zeros_may_pad_the_head_dim,
    check_parts_of_the_keys_merge_to_the_whole,
    check_disjoint_masks_merge_to_their_union,
    check_a_mask_of_all_keys_is_no_mask,
    check_masked_keys_may_be_removed,
    check_a_query_depends_only_on_its_keys,
    check_copies_of_every_key_move_only_lse,
    check_equal_keys_give_the_mean,
    check_a_further_key_never_lowers_lse,
    check_grouped_heads_are_repeated_heads,
    check_memory_layout_does_not_matter,
    check_calls_repeat_bitwise,
    check_operands_are_left_as_they_were,
)
GRADIENT_PROPERTIES = (
    check_gradients_follow_the_order_of_keys,
    check_gradients_follow_the_order_of_queries,
    check_grouped_gradients_are_summed,
    check_dk_sums_to_what_dlse_asks,
    check_dv_sums_to_do,
    check_q_and_k_share_their_slope,
    check_gradients_are_linear_in_do,
    check_no_gradient_in_no_gradient_out,
    check_dlse_leaves_dv,
    check_empty_rows_give_nothing,
    check_gradients_do_not_depend_on_layout,
    check_gradients_repeat_bitwise,
)
PAIR_PROPERTIES = (
    check_o_and_dv_share_their_product,
    check_a_unit_do_reads_a_row_of_probabilities,
    check_equal_keys_have_no_slope,
    check_non_finite_values_reach_what_they_should,
)


# Calls


def _run(attend: Attend, example: Example) -> tuple[Array, Array]:
    return as_pair(attend(example.q, example.k, example.v, mask=example.dense_mask, scale=example.scale), example)


def _pull(pull: Pull, example: Example) -> list[Array]:
    operands = example.q, example.k, example.v, _do(example)
    results = pull(*operands, dlse=example.dlse, mask=example.dense_mask, scale=example.scale)
    return as_results(results, {f"d{name}": getattr(example, name).shape for name in "qkv"}, example)


def _do(example: Example) -> Array:
    """The example's do, without which there are no gradients."""
    if example.do is None:
        raise TypeError("gradients need an example with do")
    return example.do


def _forward_bounds(example: Example) -> Bounds:
    return example.but(do=None, dlse=None).bounds


# Comparisons


def _same(first: tuple[Array, Array], second: tuple[Array, Array], example: Example, other: Example) -> None:
    """o and lse of two calls agree within the bounds of both."""
    __tracebackhide__ = True
    bounds = _forward_bounds(example), _forward_bounds(other)
    for name, x, y in zip(("o", "lse"), first, second, strict=True):
        assert_within(name, y, widest(x), sum(getattr(each, name) for each in bounds), other)


def _same_gradients(first: Sequence[Array], second: Sequence[Array], bounds: Bounds, example: Example) -> None:
    """Gradients of two calls agree within the example's bounds and those given for the other."""
    __tracebackhide__ = True
    for name, x, y in zip(("dq", "dk", "dv"), first, second, strict=True):
        assert_within(name, y, widest(x), getattr(bounds, name) + getattr(example.bounds, name), example)


def _same_bits(first: Sequence[Array], second: Sequence[Array], example: Example) -> None:
    __tracebackhide__ = True
    for place, (x, y) in enumerate(zip(first, second, strict=True)):
        _bitwise(f"result {place}", x, y, example)


def _bitwise(name: str, first: np.ndarray, second: np.ndarray, example: Example) -> None:
    """Equal values; zeros of either sign are one, and so are all NaNs."""
    __tracebackhide__ = True
    assert_within(name, second, first, 0.0, example)


def _check_merge(attend: Attend, example: Example, parts: Sequence[Example]) -> None:
    """The weighted mean of the parts' o, by their lse, is the example's o."""
    __tracebackhide__ = True
    (o, lse), (other, other_lse) = ((widest(x) for x in _run(attend, part)) for part in parts)
    bound, other_bound = (_forward_bounds(part) for part in parts)
    total = np.logaddexp(lse, other_lse)
    shift = np.where(np.isneginf(total), 0, total)
    weight, other_weight = (np.exp(x - shift)[..., None] for x in (lse, other_lse))
    whole = _forward_bounds(example)
    # An error e in the difference of the two lse moves their weights by up to w w' (exp(e) - 1).
    moved = weight * other_weight * np.expm1(bound.lse + other_bound.lse)[..., None] * np.abs(o - other)
    o_bound = whole.o + weight * bound.o + other_weight * other_bound.o + moved
    merged_o, merged_lse = _run(attend, example)
    assert_within("o", merged_o, weight * o + other_weight * other, o_bound, example)
    assert_within("lse", merged_lse, total, whole.lse + np.maximum(bound.lse, other_bound.lse), example)


def _inner(x: np.ndarray, bound: np.ndarray, y: np.ndarray) -> tuple[Array, Array]:
    """<x, y> and its bound; where y is 0, x may be anything."""
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
    """Every axis but the last ones backwards."""
    return np.flip(x, axis=tuple(range(x.ndim - trailing)))


def _repeated(example: Example, x: np.ndarray) -> Array:
    """A key/value head for each query head."""
    return np.repeat(x, example.problem.group_size, axis=-3) if example.problem.has_heads else x


def _group_sum(example: Example, x: np.ndarray) -> Array:
    """Summed over the query heads that share a key/value head."""
    if not example.problem.has_heads:
        return x
    *batch, _, rows, columns = x.shape
    groups = example.problem.num_kv_heads, example.problem.group_size
    return _sum(x.reshape(*batch, *groups, rows, columns), axis=-3)


def _is_stretched(example: Example) -> bool:
    """Return whether an operand lacks leading axes of the results."""
    problem = example.problem
    return any(batch != problem.batch for batch in (problem.q_batch, problem.k_batch, problem.v_batch))


def _has_keys(example: Example) -> Array:
    return example.allowed.any(axis=-1)


def _shuffled(count: int) -> Array:
    return np.random.default_rng(0).permutation(count)


def _sum(x: Array, **options: int | tuple[int, ...] | bool) -> Array:
    """A wide sum; of results that overflowed it is NaN, within a bound that is infinite."""
    with np.errstate(invalid="ignore"):
        return widest(x).sum(**options)
