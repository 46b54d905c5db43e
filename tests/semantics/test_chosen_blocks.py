"""Blocks of keys that each query chooses: the mask, results on every executor, lists that neighbors share, and errors.

Checks take the library as an argument, so that they can also guard copies of it with planted faults.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import device_double
import numpy as np
import pytest
from executors import Run, needs_compiler, on_every_executor
from hypothesis import given, settings
from hypothesis import strategies as st
from library_parts import part

import cuflash
from cuflash import BlockIndex, ShapeDtype, UnsupportedProblem, masks, reference, testing
from cuflash.blocks._chosen_work import ChosenWork, Unions
from cuflash.calls._call import _posed
from cuflash.masks import ChosenBlocks, MaskShape
from cuflash.planning.options import Options
from cuflash.testing import Example, assert_within, assert_within_bounds
from cuflash.testing.mask_strategies import chosen_blocks, chosen_in_sequences

DRAWN = {"dtypes": ["float32", "float64"], "most_scores": 1 << 13, "longest": 150}
SHAPES = st.builds(
    lambda batch, group, num_kv_heads, q, kv: (MaskShape(batch, group * num_kv_heads, q, kv), num_kv_heads),
    st.sampled_from([(), (1,), (2,), (2, 3)]), st.sampled_from([1, 2, 3, 8]), st.integers(1, 3), st.integers(0, 90),
    st.integers(0, 150),
)  # fmt: skip
SHAPES_AND_LISTS = SHAPES.flatmap(lambda pair: st.tuples(st.just(pair[0]), chosen_blocks(*pair)))
PACKED = SHAPES.flatmap(lambda pair: st.tuples(st.just(pair[0]), chosen_in_sequences(*pair)))


def sets_of(mask: Any, shape: MaskShape) -> np.ndarray[Any, Any]:
    """Return each query's set of blocks, as objects [*batch, num_heads, seqlen_q], from the definition."""
    blocks, counts = np.asarray(mask.blocks), mask.counts
    num_lists = 1 if blocks.ndim == 2 else blocks.shape[-3]
    lists = np.broadcast_to(blocks, (*shape.batch, num_lists, *blocks.shape[-2:]))
    counts = np.broadcast_to(blocks.shape[-1] if counts is None else counts, lists.shape[:-1])
    results = np.empty((*shape.batch, shape.num_heads, shape.seqlen_q), object)
    for *leading, h, i in np.ndindex(results.shape):
        place = (*leading, h * num_lists // shape.num_heads, i)
        results[(*leading, h, i)] = {int(number) for number in lists[place][: counts[place]]} - {-1}
    return results


def keys_of(mask: Any, axes: tuple[int, ...], batch: Any, i: int) -> slice:
    """Return the keys of a query's sequence, none for a query outside all sequences; `axes` are those of the batch."""
    q, kv = mask.sequences.arrays[0], mask.sequences.arrays[-1]
    q, kv = (np.broadcast_to(x, (*axes, x.shape[-1]))[tuple(batch)] for x in (q, kv))
    number = int(np.searchsorted(q, i, side="right")) - 1
    return slice(int(kv[number]), int(kv[number + 1])) if 0 <= number < len(q) - 1 else slice(0, 0)


def table_of(mask: Any, shape: MaskShape) -> np.ndarray[Any, Any]:
    """Return the mask from the definition, bool [*batch, num_heads, seqlen_q, seqlen_kv]."""
    sets = sets_of(mask, shape)
    table = np.zeros((*sets.shape, shape.seqlen_kv), bool)
    for *batch, h, i in np.ndindex(sets.shape):
        row = table[(*batch, h, i)]
        if mask.sequences is not None:
            row = row[keys_of(mask, shape.batch, batch, i)]
        for number in sets[(*batch, h, i)]:
            row[number * mask.block : (number + 1) * mask.block] = True
    if mask.sequences is not None:
        table &= mask.sequences.toarray(*shape[2:], batch=shape.batch)[..., None, :, :]
    return table


def results(library: Any, example: Example, **changed: Any) -> dict[str, Any]:
    """Return o, lse, dq, dk and dv of an example on the host."""
    given_ = {"mask": example.mask, "scale": example.scale} | changed
    (o, lse), vjp = library.attention_vjp(example.q, example.k, example.v, return_lse=True, **given_)
    gradients = vjp(example.do, example.dlse)
    return {"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


def assert_same_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name], err_msg=name)


# The mask


def check_table(library: Any, shape_and_lists: tuple[MaskShape, Any]) -> None:
    shape, mask = shape_and_lists
    table, axes = table_of(mask, shape), shape._asdict()
    assert (mask.toarray(**axes) == table).all()
    assert ((~mask).toarray(**axes) == ~table).all()
    index = mask.index(shape.seqlen_kv, num_heads=shape.num_heads)
    assert index.block == (1, mask.block)
    lists = library.BlockIndex.from_mask(mask, block=(3, 5), **axes)
    leading = mask._leading_axes  # broadcast over the batch
    dense = index.toarray().reshape(*(leading if index.batch > 1 else ()), *index.shape[1:])
    assert (np.broadcast_to(dense, table.shape) == table).all()
    whole = (shape.num_batch, *shape[1:])
    assert (np.broadcast_to(lists.toarray(), whole) == table.reshape(whole)).all()


@given(SHAPES_AND_LISTS)
def test_a_query_attends_the_blocks_in_its_list(shape_and_lists: Any) -> None:
    check_table(cuflash, shape_and_lists)


@given(PACKED)
def test_numbers_count_from_the_first_key_of_a_sequence(shape_and_lists: Any) -> None:
    check_table(cuflash, shape_and_lists)


@given(SHAPES_AND_LISTS | PACKED)
def test_lists_on_a_device_hold_the_same_and_nothing_waits(shape_and_lists: Any) -> None:
    shape, mask = shape_and_lists
    on_device = mask.to(device_double.to_device)
    actual = device_double.to_host(on_device.toarray(**shape._asdict()))
    assert (actual == mask.toarray(**shape._asdict())).all()


def check_far_numbers_on_a_device(library: Any) -> None:
    """Check that out-of-range block numbers and counts are ignored if the host does not inspect them."""
    blocks = device_double.to_device(np.array([[0, 3, 2**31 - 1], [-5, 1, 2], [7, 7, 0]]))
    counts = device_double.to_device(np.array([9, 2, -1]))
    mask = part(library, "masks").ChosenBlocks(blocks, 2)
    table = [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert device_double.to_host(mask.toarray(3, 5)).astype(int).tolist() == table
    table[1], table[2] = [0, 0, 1, 1, 0], [0] * 5
    mask = part(library, "masks").ChosenBlocks(blocks, 2, counts=counts)
    assert device_double.to_host(mask.toarray(3, 5)).astype(int).tolist() == table


def test_numbers_outside_the_blocks_are_ignored_on_a_device() -> None:
    check_far_numbers_on_a_device(cuflash)


def check_index(library: Any, shape_and_lists: tuple[MaskShape, Any]) -> None:
    """Check that an index with blocks of one query converts to lists with the same elements."""
    shape, mask = shape_and_lists
    index = mask.index(shape.seqlen_kv)
    lists = index.chosen()
    assert lists.blocks.dtype == np.int32 and lists.block == mask.block
    again = lists.index(shape.seqlen_kv)
    assert (np.broadcast_to(again.toarray(), index.shape) == index.toarray()).all()


@given(SHAPES_AND_LISTS)
def test_an_index_in_blocks_of_one_query_becomes_lists(shape_and_lists: Any) -> None:
    check_index(cuflash, shape_and_lists)


def check_distinct(library: Any, shape_and_lists: tuple[MaskShape, Any], queries: int) -> None:
    shape, mask = shape_and_lists
    sets = sets_of(mask, MaskShape(mask._leading_axes, mask.num_lists, *shape[2:]))
    for place in np.ndindex(sets.shape if mask.sequences is not None else 0):
        keys = keys_of(mask, mask._leading_axes, place[:-2], place[-1])
        sets[place] = {(keys.start, number) for number in sets[place] if keys.start < keys.stop}
    rows = [sets[place] for place in np.ndindex(sets.shape[:-1])]
    unions = [set().union(*row[i : i + queries]) for row in rows for i in range(0, shape.seqlen_q, queries)]
    members = [len(each) for each in sets.reshape(-1)]
    expected = np.mean([len(each) for each in unions]) / np.mean(members) if any(members) else 0.0
    assert mask.distinct(queries=queries) == pytest.approx(expected)


@given(SHAPES_AND_LISTS | PACKED, st.integers(1, 20))
def test_distinct_counts_unions(shape_and_lists: Any, queries: int) -> None:
    check_distinct(cuflash, shape_and_lists, queries)


@given(st.integers(1, 64), st.integers(1, 90), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_unions_are_the_sets_of_their_tiles(height: int, rows: int, numbers: int, matrices: int, seed: int) -> None:
    is_listed = np.random.default_rng(seed).random((matrices, rows, numbers)) < 0.1
    unions = Unions.of(*np.nonzero(is_listed), height, is_listed.shape)
    num_tiles = -(-rows // height)
    assert len(unions.pointers) == matrices * num_tiles + 1 and unions.pointers[-1] == len(unions.numbers)
    for place in np.ndindex(matrices, num_tiles):
        inside = is_listed[place[0], place[1] * height : (place[1] + 1) * height]
        listed, words = unions.tile(place[0] * num_tiles + place[1])
        assert listed.tolist() == np.unique(np.nonzero(inside)[1]).tolist()
        bits = [sum(1 << int(row) for row in np.flatnonzero(column)) for column in inside.T[listed]]
        assert words.tolist() == bits


def test_the_shape_of_compressed_keys() -> None:
    """A query attends the runs that end at or before it."""
    for length, stride in ((32, 16), (1, 1), (4, 2), (3, 5), (200, 7), (2**70, 2**70)):
        table = masks.Compressed(length, stride).toarray(60, 20)
        for i, j in np.ndindex(table.shape):
            assert table[i, j] == (j * stride + length - 1 <= i)


# Results


def check_results(library: Any, example: Example) -> None:
    part(library, "testing.assertions").assert_within_bounds(example, **results(library, example))


@given(testing.chosen(**DRAWN))
def test_results_are_within_their_bounds(example: Example) -> None:
    check_results(cuflash, example)


def check_narrow_steps(library: Any, example: Example, block_kv: int) -> None:
    """Check that tiles that visit few rows at a time give the same results."""
    host, plan, problems = (part(library, f"planning.{name}") for name in ("host", "plan", "problem"))
    device = part(library, "planning.device").DeviceSpec(name="test", num_processors=1, tile_memory_bytes=1 << 20)
    problem = problems.Problem.of(example.q, example.k, example.v, scale=example.scale)
    shape = problem.mask_shape
    mask = part(library, "blocks.work_list").requested_mask(example.mask, False, None, shape)
    work = part(library, "blocks._chosen_work").chosen_work(mask, shape)
    if work is None:
        return
    tiling = host.HostTiling(problem, device, max(64, work.block_kv), max(block_kv, work.block_kv), work)
    kernels = plan.KernelPlan(problem=problem, mask=mask, device=device, work=work, tiling=tiling)
    ready = part(library, "plans").Plan(kernels)
    o, lse = ready.forward(example.q, example.k, example.v)
    dq, dk, dv = ready.backward(example.do, example.q, example.k, example.v, o, lse, example.dlse)
    part(library, "testing.assertions").assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


@given(testing.chosen(**DRAWN), st.integers(8, 24))
def test_steps_of_few_rows_give_the_same(example: Example, block_kv: int) -> None:
    check_narrow_steps(cuflash, example, block_kv)


@given(testing.chosen(**DRAWN, has_sink=True, has_score=True, has_dropout=True))
def test_sinks_scores_and_dropout_are_within_their_bounds(example: Example) -> None:
    sink = {} if example.sink is None else {"sink": example.sink}
    options = {"mask": example.mask, "scale": example.scale, "score": example.score, "dropout": example.dropout}
    names = (*(["sink"] if sink else []), *example.wrt)
    (o, lse), vjp = cuflash.attention_vjp(
        example.q, example.k, example.v, return_lse=True, wrt=names, **options, **sink
    )
    gradients = vjp(example.do, example.dlse)
    others = {name: gradients[name] for name in example.wrt}
    dsink = {"dsink": gradients["sink"]} if sink else {}
    assert_within_bounds(
        example, o=o, lse=lse, dq=gradients.dq, dk=gradients.dk, dv=gradients.dv, others=others, **dsink
    )


@on_every_executor
def test_lists_are_the_boolean_mask_that_they_stand_for(run: Run) -> None:
    drawn = DRAWN if run.executor == "cpu" else {"dtypes": ["float32"], "longest": 70, "most_scores": 1 << 12}

    @run.settings
    @given(testing.chosen(**drawn, widest=16))
    def check(example: Example) -> None:
        assert_within_bounds(example, **run.everything(example))

    check()


@needs_compiler
@pytest.mark.parametrize("kernel", ["simt", "sm80", "sm90"])
def test_kernels_take_lists_of_every_size_of_blocks(kernel: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 70, 16)).astype(np.float16)
    for block in (16, 64):
        mask = ChosenBlocks(rng.integers(-1, -(-70 // block), (1, 70, 2)), block)
        example = Example(q=q, k=k, v=v, mask=mask & masks.Causal(), product_dtype=q.dtype)
        o, lse = cuflash.attention(q, k, v, mask=mask, causal=True, return_lse=True, executor="sim", kernel=kernel)
        assert_within_bounds(example, o=o, lse=lse)


def rewritten(rng: np.random.Generator, mask: Any) -> Any:
    """Return equal sets of blocks: lists in another order, with repeated entries and with gaps of -1 anywhere."""
    blocks = np.array(mask.blocks)
    if mask.counts is not None:
        blocks[np.arange(blocks.shape[-1]) >= mask.counts[..., None]] = -1
    blocks = np.concatenate([blocks, blocks[..., ::2], np.full((*blocks.shape[:-1], 2), -1)], axis=-1)
    return ChosenBlocks(rng.permuted(blocks, axis=-1), mask.block)


@given(testing.chosen(**DRAWN, has_intervals=False), st.integers(0, 2**32 - 1))
def test_order_and_repetition_change_no_bit(example: Example, seed: int) -> None:
    same = rewritten(np.random.default_rng(seed), example.mask)
    assert_same_bits(results(cuflash, example), results(cuflash, example, mask=same))


@needs_compiler
@settings(max_examples=3)
@given(
    testing.chosen(dtypes=["float32"], longest=60, most_scores=1 << 12, widest=16, has_intervals=False),
    st.integers(0, 2**32 - 1),
)
def test_order_and_repetition_change_no_bit_of_kernels(example: Example, seed: int) -> None:
    same = rewritten(np.random.default_rng(seed), example.mask)
    first, second = (
        cuflash.attention(example.q, example.k, example.v, mask=each, scale=example.scale, executor="sim")
        for each in (example.mask, same)
    )
    np.testing.assert_array_equal(first, second)


@given(testing.chosen(**DRAWN, has_intervals=False))
def test_an_index_of_one_query_a_block_has_the_same_bits(example: Example) -> None:
    index = example.mask.index(example.problem.seqlen_kv, num_heads=example.problem.num_heads)
    if index.batch not in (1, example.problem.mask_shape.num_batch):
        return
    assert_same_bits(results(cuflash, example), results(cuflash, example, mask=index))


@given(testing.chosen(**DRAWN, has_intervals=False))
def test_all_blocks_are_no_mask(example: Example) -> None:
    mask, problem = example.mask, example.problem
    num_blocks = -(-problem.seqlen_kv // mask.block)
    every = np.broadcast_to(np.arange(num_blocks), (problem.seqlen_q, num_blocks))
    assert_within_bounds(example.but(mask=None), **results(cuflash, example, mask=ChosenBlocks(every, mask.block)))


@given(testing.chosen(**DRAWN, has_intervals=False), st.integers(0, 2**16))
def test_one_block_of_all_queries_is_a_slice_of_the_keys(example: Example, number: int) -> None:
    block, (seqlen_q, seqlen_kv) = example.mask.block, example.problem.mask_shape[2:]
    number %= max(1, -(-seqlen_kv // block))
    rows = slice(number * block, (number + 1) * block)
    part_of = example.but(k=example.k[..., rows, :], v=example.v[..., rows, :], mask=None)
    mask = ChosenBlocks(np.full((seqlen_q, 1), number if seqlen_kv else -1), block)
    actual = results(cuflash, example, mask=mask)
    outside = [j for j in range(seqlen_kv) if not rows.start <= j < rows.stop]
    assert not any(actual[name][..., outside, :].any() for name in ("dk", "dv"))
    actual |= {name: actual[name][..., rows, :] for name in ("dk", "dv")}
    assert_within_bounds(part_of, **actual)


@given(testing.chosen(**DRAWN, has_intervals=False))
def test_a_list_of_a_group_is_the_same_list_of_each_head(example: Example) -> None:
    mask, num_heads = example.mask, example.problem.num_heads
    if mask.blocks.ndim == 2:
        return
    repeated = {
        name: np.repeat(getattr(mask, name), num_heads // mask.num_lists, axis=axis)
        for name, axis in (("blocks", -3), ("counts", -2))
        if getattr(mask, name) is not None
    }
    assert_same_bits(
        results(cuflash, example), results(cuflash, example, mask=ChosenBlocks(block=mask.block, **repeated))
    )


def check_other_rows(library: Any, example: Example, row: int, seed: int) -> None:
    """Check that lists and numbers of other queries change a query's results only within their bounds."""
    problem = example.problem
    if not problem.seqlen_q:
        return
    row %= problem.seqlen_q
    rng, others = np.random.default_rng(seed), np.arange(problem.seqlen_q) != row
    mask = example.mask
    blocks = np.array(mask.blocks)
    num_blocks = -(-problem.seqlen_kv // mask.block)
    blocks[..., others, :] = rng.integers(-1, num_blocks, blocks[..., others, :].shape)
    kind = part(library, "masks").ChosenBlocks
    counts = None
    if mask.counts is not None:
        counts = np.array(mask.counts)
        counts[..., others] = rng.integers(0, blocks.shape[-1], counts[..., others].shape, endpoint=True)
    q = example.q.copy()
    q[..., others, :] = np.nan
    first = results(library, example)
    (o, lse), vjp = library.attention_vjp(
        q, example.k, example.v, mask=kind(blocks, mask.block, counts=counts), scale=example.scale, return_lse=True
    )
    second = {"o": o, "lse": lse, "dq": vjp(example.do, example.dlse).dq}
    for name in second:
        places = (..., row, slice(None)) if name != "lse" else (..., row)
        bound = getattr(example.bounds, name)[places]
        assert_within(name, second[name][places], first[name][places], 2 * bound, example)


@given(testing.chosen(**DRAWN, has_intervals=False), st.integers(0, 2**16), st.integers(0, 2**32 - 1))
def test_a_query_does_not_see_the_lists_of_others(example: Example, row: int, seed: int) -> None:
    check_other_rows(cuflash, example, row, seed)


def test_keys_that_no_query_chose_may_be_nan() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 130, 8))
    blocks = rng.integers(0, 7, (2, 130, 2))
    blocks[blocks == 3] = 4  # no query chooses block 3
    mask = ChosenBlocks(blocks, 16)
    expected, vjp = cuflash.attention_vjp(q, k, v, mask=mask)
    k[:, 48:64] = v[:, 48:64] = np.nan
    o, other_vjp = cuflash.attention_vjp(q, k, v, mask=mask)
    np.testing.assert_array_equal(o, expected)
    for one, other in zip(vjp_of(q, k, v, mask), other_vjp(q)):
        assert np.isfinite(other).all() and one.shape == other.shape


def vjp_of(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return cuflash.attention_vjp(q, np.nan_to_num(k), np.nan_to_num(v), mask=mask)[1](q)


# How the host visits lists


def planned_work(mask: Any, **options: Any) -> Any:
    shapes = [ShapeDtype((heads, length, 16), np.float32) for heads, length in ((8, 100), (2, 200), (2, 200))]
    return cuflash.plan(*shapes, mask=mask, **options)._plan.work


def test_the_host_gathers_lists_and_lists_other_masks() -> None:
    rng = np.random.default_rng(0)
    lists = ChosenBlocks(rng.integers(-1, 4, (2, 100, 3)), 64)
    index = lists.index(200, num_heads=8)
    aligned = {"causal": "bottom_right"}
    for mask in (lists, index, lists & masks.Lengths(kv=150), index & masks.Lengths(kv=150)):
        assert isinstance(planned_work(mask), ChosenWork) and isinstance(planned_work(mask, **aligned), ChosenWork)
    cut = BlockIndex.from_mask(lists & masks.Causal("bottom_right"), 100, 200, (1, 64), num_heads=8)
    assert isinstance(planned_work(cut), ChosenWork)
    packed = {start: masks.Sequences([0, 50, 100], [0, start, 200], causal="top_left") for start in (48, 50)}
    in_step, out_of_step = (ChosenBlocks(np.zeros((100, 1), int), 32, sequences=packed[start]) for start in (48, 50))
    assert isinstance(planned_work(in_step), ChosenWork)
    others = ~lists, lists | masks.Lengths(kv=3), lists & lists, ChosenBlocks(np.zeros((100, 1), int), 600), out_of_step
    for mask in others:
        assert not isinstance(planned_work(mask), ChosenWork)
    mask = ChosenBlocks(rng.integers(0, 2, (100, 1)), 64)
    text = cuflash.plan(*[ShapeDtype((8, 100, 16), np.float32)] * 3, mask=mask).explain()
    assert "100 full and 0 partial blocks of (1, 64)" in text
    assert "64 neighbouring queries visit the union of their blocks" in text


def test_heads_of_a_group_share_what_a_tile_visits() -> None:
    lists = ChosenBlocks(np.random.default_rng(0).integers(-1, 4, (2, 100, 3)), 64)
    owners = {planned_work(lists).owner(0, h) for h in range(8)}
    assert owners == {(0, 0), (0, 4)}
    by_head = planned_work(lists & masks.FromFunction(lambda b, h, i, j: j >= 0))
    assert {by_head.owner(0, h) for h in range(8)} != owners


def test_a_tile_of_keys_visits_the_queries_that_chose_it_alone() -> None:
    lists = ChosenBlocks(np.array([[0], [2], [0], [1]] * 25), 64)
    work = planned_work(lists)
    assert [work.column(0, 0, start, start + 64)[0].rows.tolist() for start in (0, 64, 128)] == [
        [i for i in range(100) if i % 4 in (0, 2)], [i for i in range(100) if i % 4 == 3],
        [i for i in range(100) if i % 4 == 1],
    ]  # fmt: skip
    assert not work.column(0, 0, 192, 200)
    assert all(each.words is None for start in (0, 64, 128) for each in work.column(0, 0, start, start + 64))


# Merged branches


def check_merge(library: Any, example: Example, seed: int) -> None:
    """Check that attention to disjoint lists, merged, equals attention to their union, with all gradients.

    All results are computed in float64, and compared within the bounds of the example's float32.
    """
    mask, problem = example.mask, example.problem
    num_blocks = -(-problem.seqlen_kv // mask.block)
    is_first = np.random.default_rng(seed).random(num_blocks + 1) < 0.5  # the last entry stands for -1, no block
    q, k, v, do = (getattr(example, name).astype(np.float64) for name in ("q", "k", "v", "do"))
    calls = []
    for side in (True, False):
        blocks = np.clip(mask.blocks, -1, num_blocks)
        own_blocks = np.where(is_first[blocks] == side, mask.blocks, -1)
        lists = part(library, "masks").ChosenBlocks(own_blocks, mask.block, counts=mask.counts)
        calls.append(library.attention_vjp(q, k, v, mask=lists, scale=example.scale, return_lse=True))
    (parts, vjps) = zip(*calls)
    (o, lse), vjp = library.merge_vjp(*zip(*parts))
    for one, other in zip((o, lse), library.merge(*zip(*parts))):
        np.testing.assert_array_equal(one, other)
    pairs = zip(*vjp(do, None if example.dlse is None else example.dlse.astype(np.float64)))
    first, second = (pull(*pair) for pull, pair in zip(vjps, pairs))
    summed = {name: getattr(first, name) + getattr(second, name) for name in ("dq", "dk", "dv")}
    for name, x in {"o": o, "lse": lse, **summed}.items():
        assert_within(name, x, getattr(example.exact, name), getattr(example.bounds, name), example)


DRAWN_FOR_MERGES = {"dtypes": ["float32"], "longest": 150, "most_scores": 1 << 14, "has_intervals": False}


@given(testing.chosen(**DRAWN_FOR_MERGES), st.integers(0, 2**32 - 1))
def test_disjoint_lists_merge_to_their_union(example: Example, seed: int) -> None:
    check_merge(cuflash, example, seed)


def gated(outs: Any, lses: Any, gates: Any) -> tuple[Any, Any]:
    """Return the merge of parts whose weights are multiplied by gates, from the definition, in the widest dtype."""
    weights = [np.exp(lse) * gate for lse, gate in zip(lses, gates)]
    total = sum(weights)
    return sum(weight[..., None] * out for weight, out in zip(weights, outs)) / total[..., None], np.log(total)


def check_merge_by_steps(library: Any) -> None:
    """Check that merge_vjp returns the derivatives of o, of lse, and by the logarithms of gates."""
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 2, 5, 4)), rng.standard_normal((3, 2, 5))
    gates = rng.uniform(0.1, 1, (3, 2, 5))
    do, dlse = rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 5))
    (o, lse), vjp = library.merge_vjp(list(outs), list(lses + np.log(gates)))
    for one, other in zip((o, lse), gated(outs, lses, gates)):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    for with_dlse in (True, False):
        douts, dlses = vjp(do, dlse if with_dlse else None)
        for number, place in ((n, p) for n in range(3) for p in np.ndindex(2, 5)):
            steps = []
            for which, at in ((0, (*place, 2)), (1, place), (2, place)):
                moved = [np.array(each, complex) for each in (outs, lses, gates)]
                moved[which][(number, *at)] += 1e-20j
                new_o, new_lse = gated(*moved)
                steps.append(((new_o * do).sum() + with_dlse * (new_lse * dlse).sum()).imag / 1e-20)
            by_log_gate = dlses[number][place] / gates[(number, *place)]
            gradients = douts[number][(*place, 2)], dlses[number][place], by_log_gate
            np.testing.assert_allclose(gradients, steps, rtol=1e-10, atol=1e-13)


def test_gradients_of_a_merge_are_derivatives() -> None:
    check_merge_by_steps(cuflash)


def check_empty_parts(library: Any) -> None:
    """Check that a part that is empty in a row gets gradient 0 there, as do all parts of a row without a key."""
    outs = [np.array([[1.0, 2], [np.nan, 3], [4, 5]]), np.array([[np.inf, 1], [np.nan, 1], [6, 7]])]
    lses = [np.array([0.5, -np.inf, 1]), np.array([-np.inf, -np.inf, 2])]
    (o, lse), vjp = library.merge_vjp(outs, lses)
    douts, dlses = vjp(np.ones((3, 2)), np.array([2.0, np.nan, 1]))
    assert (o[:2] == [[1, 2], [0, 0]]).all() and lse[1] == -np.inf
    assert (douts[0][:2] == [[1, 1], [0, 0]]).all() and (douts[1][:2] == 0).all()
    assert (dlses[0][:2] == [2, 0]).all() and (dlses[1][:2] == 0).all()
    assert np.isfinite(douts[1][2]).all() and np.isfinite(dlses[0][2])


def test_empty_parts_have_no_gradient() -> None:
    check_empty_parts(cuflash)


def test_merged_parts_keep_their_dtypes_and_a_vjp_is_pickled() -> None:
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((2, 3, 4)).astype(np.float16)
    lses = rng.standard_normal((2, 3)).astype(np.float32)
    (o, lse), vjp = cuflash.merge_vjp(outs, lses)
    assert o.dtype == np.float16 and lse.dtype == np.float32
    results = vjp(o, lse)
    assert {x.dtype.name for x in results[0]} == {"float16"} and {x.dtype.name for x in results[1]} == {"float32"}
    again = pickle.loads(pickle.dumps(vjp))(o, lse)
    for one, other in zip((*results[0], *results[1]), (*again[0], *again[1])):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("given_", "kind", "message"),
    [
        ((None,), TypeError, "do must be an array; got None"),
        ((np.ones((2, 4)),), UnsupportedProblem, "do must have o's shape (3, 4) and dtype float64; got (2, 4), float6"),
        ((np.ones((3, 4), np.float32),), UnsupportedProblem, "do must have o's shape (3, 4) and dtype float64; got (3"),
        ((np.ones((3, 4)), np.ones(4)), UnsupportedProblem, "dlse must have lse's shape (3,) and dtype float64; got"),
        ((np.ones((2, 4)), np.ones(4)), UnsupportedProblem, "dlse must have lse's shape (3,)"),
    ],
)  # fmt: skip
def test_cotangents_of_a_merge_are_checked(given_: Any, kind: Any, message: str) -> None:
    _, vjp = cuflash.merge_vjp(np.ones((2, 3, 4)), np.ones((2, 3)))
    with pytest.raises(kind) as refused:
        vjp(*given_)
    assert message in str(refused.value)


def test_three_branches_with_gates_are_trained() -> None:
    """Compressed, chosen and local keys in one softmax, gated through their lse, against the specification."""
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, 4, 48, 8))
    k, v = rng.standard_normal((2, 2, 48, 8))
    k_compressed, v_compressed = (x.reshape(2, 6, 8, 8).mean(axis=2) for x in (k, v))
    chosen = ChosenBlocks(rng.integers(-1, 6, (2, 48, 2)), 8)
    gates = rng.uniform(0.2, 1, (3, 4, 48))
    branches = [
        (k_compressed, v_compressed, masks.Compressed(8, 8)),
        (k, v, chosen & masks.Causal()),
        (k, v, masks.SlidingWindow(5, 0)),
    ]
    calls = [cuflash.attention_vjp(q, *keys, mask=mask, return_lse=True) for *keys, mask in branches]
    (parts, vjps) = zip(*calls)
    outs, lses = zip(*parts)
    (o, _), vjp = cuflash.merge_vjp(outs, [lse + np.log(gate) for lse, gate in zip(lses, gates)])
    douts, dlses = vjp(do)
    gradients = [pull(*pair) for pull, *pair in zip(vjps, douts, dlses)]
    all_k, all_v = (np.concatenate([each[n] for each in branches], axis=-2) for n in range(2))
    allowed = np.concatenate([m.toarray(48, each_k.shape[-2], num_heads=4) for each_k, _, m in branches], axis=-1)
    gate_of_key = np.concatenate([np.repeat(g[..., None], b[0].shape[-2], -1) for g, b in zip(gates, branches)], -1)

    def score(s: Any) -> Any:
        return s + np.log(gate_of_key)

    expected, _ = reference.attention(q, all_k, all_v, mask=allowed, score=score)
    by_all = reference.attention_vjp(q, all_k, all_v, do, mask=allowed, score=score, score_slope=np.ones_like)
    np.testing.assert_allclose(o, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(sum(each.dq for each in gradients), by_all[0], rtol=1e-9, atol=1e-12)
    for number, name in ((1, "dk"), (2, "dv")):
        gradient = np.concatenate([getattr(each, name) for each in gradients], axis=-2)
        np.testing.assert_allclose(gradient, by_all[number], rtol=1e-9, atol=1e-12)


# What calls refuse


Q, K = np.ones((8, 6, 4), np.float32), np.ones((2, 10, 4), np.float32)
LISTS = np.zeros((2, 6, 3), np.int64)
REFUSED_LISTS = {
    "floats": (
        lambda: ChosenBlocks(LISTS.astype(np.float32), 2), UnsupportedProblem,
        "blocks must be an int32 or int64 array (..., heads, seqlen_q, n); got an array of shape (2, 6, 3) and dtype f",
    ),
    "narrow integers": (
        lambda: ChosenBlocks(LISTS.astype(np.uint8), 2), UnsupportedProblem,
        "dtype uint8: cast them to int64",
    ),
    "booleans": (lambda: ChosenBlocks(LISTS == 0, 2), UnsupportedProblem, "and dtype bool"),
    "one axis": (lambda: ChosenBlocks(LISTS[0, 0], 2), UnsupportedProblem, "got an array of shape (3,) and dtype int6"),
    "no array": (lambda: ChosenBlocks(None, 2), TypeError, "blocks must be an array; got None"),
    "a word": (lambda: ChosenBlocks("0", 2), TypeError, "blocks must be an array; got '0'"),
    "a block of no key": (lambda: ChosenBlocks(LISTS, 0), UnsupportedProblem, "block must be an int of at least 1"),
    "a block of floats": (lambda: ChosenBlocks(LISTS, 2.0), UnsupportedProblem, "block must be an int of at least 1"),
    "a block of two sides": (
        lambda: ChosenBlocks(LISTS, (1, 64)), UnsupportedProblem,
        "block must be an int of at least 1; got (1, 64): write block=64",
    ),
    "a block beyond all": (lambda: ChosenBlocks(LISTS, 2**40), UnsupportedProblem, "block must be at most 107374182"),
    "counts of floats": (
        lambda: ChosenBlocks(LISTS, 2, counts=np.ones((2, 6))), UnsupportedProblem,
        "counts must be an int array (..., heads, seqlen_q); got an array of shape (2, 6) and dtype float64",
    ),
    "counts of swapped bytes": (
        lambda: ChosenBlocks(LISTS, 2, counts=np.ones((2, 6), ">i4")), UnsupportedProblem,
        "got an array of shape (2, 6) and dtype >i4: cast them to int64",
    ),
    "counts that are one": (lambda: ChosenBlocks(LISTS, 2, counts=3), TypeError, "counts must be an array; got 3"),
    "offsets of sequences": (
        lambda: ChosenBlocks(LISTS, 2, sequences=[0, 6]), TypeError,
        "sequences must be a masks.Sequences or None; got [0, 6]: write sequences=masks.Sequences(offsets)",
    ),
    "a run of no key": (lambda: masks.Compressed(0, 1), UnsupportedProblem, "length must be an int of at least 1"),
    "a stride of half a key": (
        lambda: masks.Compressed(2, 0.5), UnsupportedProblem, "stride must be an int of at least 1; got 0.5"
    ),
    "elements of one head": (
        lambda: ChosenBlocks(LISTS, 2).toarray(6, 10), UnsupportedProblem,
        "blocks must have 1, num_kv_heads or 1 (num_heads) heads; got 2: outside of calls, pass num_heads=",
    ),
    "neighbours that are none": (
        lambda: ChosenBlocks(LISTS, 2).distinct(queries=0), UnsupportedProblem, "queries must be an int of at least 1"
    ),
    "an index of several queries a block": (
        lambda: BlockIndex.from_blocks(np.eye(2, dtype=bool), block=2).chosen(), UnsupportedProblem,
        "the index must have blocks of one query, such as (1, 64); got block=(2, 2)",
    ),
    "an index with partial blocks": (
        lambda: BlockIndex.from_mask(masks.Causal(), 4, 4, (1, 2)).chosen(), UnsupportedProblem,
        "the index must have only full blocks; got partial ones: write index.filled().chosen() & mask",
    ),
}  # fmt: skip


def at(*place: int, value: int) -> Any:
    lists = LISTS.copy()
    lists[place] = value
    return lists


CALLED_WRONGLY = {
    "heads": (
        ChosenBlocks(np.zeros((4, 6, 1), int), 2), "blocks must have 1, 2 (num_kv_heads) or 8 (num_heads) heads; got 4"
    ),
    "heads that divide none": (
        ChosenBlocks(np.zeros((3, 6, 1), int), 2), "blocks must have 1, 2 (num_kv_heads) or 8 (num_heads) heads; got 3"
    ),
    "heads in a part of a mask": (
        masks.Lengths(kv=3) & ~ChosenBlocks(np.zeros((4, 6, 1), int), 2), "or 8 (num_heads) heads; got 4"
    ),
    "rows": (ChosenBlocks(LISTS[:, :5], 2), "blocks must have seqlen_q=6 rows; got 5"),
    "leading axes": (ChosenBlocks(LISTS[None].repeat(3, 0), 2), "axes of blocks must broadcast to (); got (3,)"),
    "a number after the last block": (
        ChosenBlocks(at(1, 4, 2, value=5), 2),
        "blocks must hold block numbers from -1, which means no block, to 4 (seqlen_kv=10 in blocks of 2); "
        "got 5 at (1, 4, 2)",
    ),
    "a number after the last block of a sequence": (
        ChosenBlocks(at(1, 4, 2, value=2), 2, sequences=masks.Sequences([0, 4, 6], [0, 6, 10])),
        "to 1 (a sequence of 4 keys in blocks of 2); got 2 at (1, 4, 2)",
    ),
    "sequences of other lengths": (
        ChosenBlocks(LISTS, 2, sequences=masks.Sequences([0, 5], [0, 10])), "q_offsets must end at seqlen_q=6"
    ),
    "a number before none": (ChosenBlocks(at(0, 3, 0, value=-2), 2), "got -2 at (0, 3, 0)"),
    "counts beyond the lists": (
        ChosenBlocks(LISTS, 2, counts=np.full((2, 6), 4)), "counts must be ints in 0..3; got 4 at (0, 0)"
    ),
    "counts below 0": (
        ChosenBlocks(LISTS, 2, counts=np.full((2, 6), -1)), "counts must be ints in 0..3; got -1 at (0, 0)"
    ),
    "counts of other rows": (
        ChosenBlocks(LISTS, 2, counts=np.zeros((2, 5), int)),
        "counts must broadcast to the axes of blocks before the last, (2, 6); got shape (2, 5)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_LISTS)
def test_what_is_wrong_by_itself_is_refused_when_it_is_made(name: str) -> None:
    make, kind, message = REFUSED_LISTS[name]
    with pytest.raises(kind) as refused:
        make()
    assert message in str(refused.value) and str(refused.value).count("\n") == 0


@pytest.mark.parametrize("executor", ["cpu", pytest.param("sim", marks=needs_compiler)])
@pytest.mark.parametrize("name", CALLED_WRONGLY)
def test_what_does_not_fit_is_refused_by_the_call(name: str, executor: str) -> None:
    mask, message = CALLED_WRONGLY[name]
    for call in (cuflash.attention, cuflash.attention_vjp, cuflash.plan):
        with pytest.raises(UnsupportedProblem) as refused:
            call(Q, K, K, mask=mask, executor=executor)
        assert message in str(refused.value) and len(refused.value.reasons) == 1


@pytest.mark.parametrize("mask, message", [CALLED_WRONGLY[name] for name in CALLED_WRONGLY if "number" in name])
def test_numbers_on_a_device_are_named_where_calls_are_checked(
    mask: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device = mask.to(device_double.to_device)
    given_ = *(ShapeDtype(x.shape, x.dtype) for x in (Q, K, K)), Options(mask=on_device)
    pose = partial(_posed, None, None, given_[-1], None, "ieee", on_device, *given_[:-1])
    assert pose()[-1] == [], "nothing waits for the device"
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    with device_double.transfers_allowed():
        (reason,) = pose()[-1]
    assert message in reason


def test_entries_behind_the_counts_are_not_looked_at() -> None:
    mask = ChosenBlocks(at(1, 4, 2, value=99), 2, counts=np.full((2, 6), 2))
    assert (cuflash.attention(Q, K, K, mask=mask) == cuflash.attention(Q, K, K, mask=ChosenBlocks(LISTS, 2))).all()


def test_edited_lists_are_read_by_the_next_call() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 20, 4))
    lists = np.zeros((20, 1), np.int64)
    mask = ChosenBlocks(lists, 4)
    for number in (0, 3, 4):
        lists[:] = number
        expected = cuflash.attention(q, k[:, 4 * number : 4 * number + 4], v[:, 4 * number : 4 * number + 4])
        np.testing.assert_allclose(cuflash.attention(q, k, v, mask=mask), expected)


def test_lists_of_numbers_become_arrays() -> None:
    mask = ChosenBlocks([[0, -1], [1, 0]], block=2, counts=[1, 2])
    assert mask.toarray(2, 4).astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert repr(mask) == "ChosenBlocks(array([[ 0, -1], [ 1, 0]]), 2, counts=array([1, 2]))"
