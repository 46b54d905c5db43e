"""The properties of attention, each on `cuflash.attention`; its bounds; and what mask objects must agree on."""

import numpy as np
import pytest
from hypothesis import given, target

import cuflash
from cuflash import masks
from cuflash.testing import (
    FORWARD_PROPERTIES,
    GRADIENT_PROPERTIES,
    PAIR_PROPERTIES,
    Structure,
    assert_exact_probes,
    assert_within,
    assert_within_bounds,
    examples,
)

LONG = Structure(
    num_heads=2, seqlen_q=700, seqlen_kv=1100, head_dim=40, value_dim=24, dtype="float16",
    mask=masks.SlidingWindow(600, 0, "bottom_right") | masks.Dilated(7, align="bottom_right"),
)  # fmt: skip


def attend(q, k, v, *, mask, scale):
    return cuflash.attention(q, k, v, mask=mask, scale=scale, return_lse=True)


def pull(q, k, v, do, *, dlse, mask, scale):
    _, vjp = cuflash.attention_vjp(q, k, v, mask=mask, scale=scale)
    return vjp(do, dlse)


def everything(example):
    """All results of a call, with the mask as it was drawn: an object, with its closed forms."""
    (o, lse), vjp = cuflash.attention_vjp(
        example.q, example.k, example.v, mask=example.mask, scale=example.scale, return_lse=True
    )
    dq, dk, dv = vjp(example.do, example.dlse)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@given(examples())
def test_every_result_is_within_its_bound(example):
    target(assert_within_bounds(example, **everything(example)))


def test_every_result_is_within_its_bound_over_many_tiles():
    example = LONG.example()
    assert_within_bounds(example, **everything(example), probable=True)


@given(examples())
def test_the_exact_probes_pass(example):
    assert_exact_probes(attend, example)


@pytest.mark.parametrize("check", FORWARD_PROPERTIES, ids=lambda check: check.__name__.removeprefix("check_"))
@given(example=examples())
def test_forward(check, example):
    check(attend, example)


@pytest.mark.parametrize("check", GRADIENT_PROPERTIES, ids=lambda check: check.__name__.removeprefix("check_"))
@given(example=examples(most_scores=1 << 15))
def test_gradients(check, example):
    check(pull, example)


@pytest.mark.parametrize("check", PAIR_PROPERTIES, ids=lambda check: check.__name__.removeprefix("check_"))
@given(example=examples(most_scores=1 << 15))
def test_both_passes(check, example):
    check(attend, pull, example)


# Masks that say the same (20), and padding that is never read


def same_results(example, first, second):
    results = [everything(example.but(mask=mask)) for mask in (first, second)]
    bounds = example.but(mask=first).bounds
    for name, result in results[0].items():
        assert_within(name, results[1][name], result, 2 * getattr(bounds, name), example)


@given(examples())
def test_a_window_as_long_as_the_sequence_is_causal(example):
    window = masks.SlidingWindow(example.problem.seqlen_kv, 0, "bottom_right")
    same_results(example, window, masks.Causal("bottom_right"))


@given(examples())
def test_a_mask_object_and_its_array_give_the_same(example):
    same_results(example, example.mask, example.dense_mask)


@given(examples())
def test_a_window_of_nothing_but_the_diagonal_gives_its_value(example):
    if example.problem.seqlen_q != example.problem.seqlen_kv:
        return
    o = cuflash.attention(example.q, example.k, example.v, window=(0, 0), scale=example.scale)
    only = example.but(mask=masks.SlidingWindow(0, 0))
    assert_within_bounds(only, o=o)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("where", ["queries", "keys"])
def test_padding_past_an_end_may_hold_nan(where, dtype):
    lengths = {"q": 70} if where == "queries" else {"kv": 70}
    example = Structure(num_heads=2, seqlen_q=200, seqlen_kv=200, dtype=dtype, mask=masks.Lengths(**lengths)).example()
    names = ("q", "do") if where == "queries" else ("k", "v")
    poisoned = {name: getattr(example, name).copy() for name in names}
    for array in poisoned.values():
        array[..., 70:, :] = np.nan
    clean, other = everything(example), everything(example.but(**poisoned))
    assert all(np.array_equal(clean[name], other[name]) for name in clean)


@given(examples())
def test_out_receives_the_same_bits(example):
    o, lse = attend(example.q, example.k, example.v, mask=example.mask, scale=example.scale)
    out = np.full_like(o, np.nan), np.full_like(lse, np.nan)
    options = {"mask": example.mask, "scale": example.scale, "out": out}
    cuflash.attention(example.q, example.k, example.v, **options)
    assert out[0].tobytes() == o.tobytes() and out[1].tobytes() == lse.tobytes()
