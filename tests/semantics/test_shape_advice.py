"""Errors about shapes say what to write, and their advice works: for masks, biases, and arrays of another layout."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import masks

LAYOUT = r"; if your arrays are \({}seqlen, heads, dim\), pass x.swapaxes\(-3, -2\)$"


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def refusal(*arrays: Any, **options: Any) -> str:
    """Return the reason why a call is refused, or an empty string if it is accepted."""
    try:
        cuflash.attention(*arrays, **options)
    except (cuflash.UnsupportedProblem, TypeError) as error:
        return str(error)
    return ""


PLACES = {  # masks and biases for q (2, 8, 50, 16) and 50 keys, or for q (2, 3, 8, 40, 16) and 50 keys
    (2, 50): "for padding of shape (batch, seqlen_kv) write {}[:, None, None, :]",
    (2, 1, 50): "an axis of heads is missing, write {}[:, None]",
    (2, 50, 50): "an axis of heads is missing, write {}[:, None]",
    (2, 50, 1): "an axis of heads is missing, write {}[:, None]",
    (8, 50): "for one row of each head write {}[:, None, :]",
    (2, 8, 50): "an axis of queries is missing, write {}[..., None, :]",
    (3, 50): "",
    (8, 50, 49): "",
    (2, 8, 50, 49): "",
    (2, 3, 50): "for padding of shape (batch, seqlen_kv) write {}[..., None, None, :]",
    (2, 3, 40): "for a shape (batch, seqlen_q) write {}[..., None, :, None]",
    (2, 3, 40, 50): "an axis of heads is missing, write {}[..., None, :, :]",
    (2, 3, 8, 50): "an axis of queries is missing, write {}[..., None, :]",
    (50, 40): "queries come before keys, write {}.swapaxes(-1, -2)",
    (2, 3, 8, 50, 40): "queries come before keys, write {}.swapaxes(-1, -2)",
}


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", PLACES, ids=str)
def test_missing_axes_are_named(shape: tuple[int, ...], name: str) -> None:
    is_deep = 40 in shape or shape[:2] == (2, 3)
    q, k = (zeros(2, 3, 8, 40, 16), zeros(2, 3, 8, 50, 16)) if is_deep else (zeros(2, 8, 50, 16),) * 2
    message = refusal(q, k, k, **{name: np.zeros(shape, bool if name == "mask" else np.float32)})
    advice = PLACES[shape].format(name)
    lengths = ", or masks.Lengths(kv=lengths)" if name == "mask" and "padding" in advice else ""
    assert message.startswith(f"{name} must broadcast to (*batch, num_heads, seqlen_q, seqlen_kv) = ")
    assert message.endswith(f"{shape}: {advice}{lengths}" if advice else f"{shape}")


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 3), max_size=2), st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(st.integers(1, 5), max_size=5), st.sampled_from(["mask", "bias"]),
)  # fmt: skip
def test_what_a_message_says_to_write_is_taken(batch: Any, of_scores: Any, shape: Any, name: str) -> None:
    heads, seqlen_q, seqlen_kv = of_scores
    q, k = zeros(*batch, heads, seqlen_q, 4), zeros(*batch, heads, seqlen_kv, 4)
    array = np.ones(shape, bool if name == "mask" else np.float32)
    message = refusal(q, k, k, **{name: array})
    written = re.search(rf"write ({name}[^;]*?)(, or|;|$)", message)
    if written is not None:
        array = eval(written[1], {name: array})
        assert refusal(q, k, k, **{name: array}) == ""


@pytest.mark.parametrize(
    ("shapes", "options", "start"),
    [
        (((2, 50, 8, 16), (2, 50, 2, 16)), {"causal": True}, "causal=True is for equal lengths"),
        (((50, 8, 16), (50, 2, 16)), {"causal": True}, "causal=True is for equal lengths"),
        (((2, 8, 8, 16), (2, 8, 2, 16)), {"mask": masks.Causal()}, "Causal is for equal lengths"),
        (((2, 50, 8, 16), (2, 50, 2, 16)), {"window": (3, 0)}, r"window=\(3, 0\) is for equal lengths"),
        (((2, 50, 8, 16), (2, 60, 2, 16)), {}, "q's 50 heads must be a multiple of k's 60"),
        (((2, 50, 8, 16), (2, 50, 8, 16)), {"mask": np.ones((50, 50), bool)}, "mask must broadcast"),
        (((2, 50, 8, 16), (2, 50, 8, 16)), {"mask": masks.Documents(np.arange(50))}, "q_ids must have shape"),
        (((2, 50, 8, 16), (2, 50, 8, 16)), {"bias": zeros(8, 50, 50)}, "bias must broadcast"),
        (((2, 50, 8, 16), (2, 50, 8, 16)), {"sink": zeros(8)}, "sink must have shape"),
    ],
)
def test_arrays_that_look_like_tokens_before_heads_are_told_how_to_be_passed(shapes, options, start) -> None:
    q, k = (zeros(*shape) for shape in shapes)
    layout = LAYOUT.format("" if q.ndim == 3 else "batch, ")
    for more in ({}, {"scale": "1"}):  # alone and together with another reason
        reasons = [line.removeprefix("- ") for line in refusal(q, k, k, **options, **more).split("\n")]
        assert any(re.match(start, reason) and re.search(layout, reason) for reason in reasons)
    turned = q.swapaxes(-3, -2), k.swapaxes(-3, -2), k.swapaxes(-3, -2)
    assert refusal(*turned, **options) == ""
    with pytest.raises(cuflash.UnsupportedProblem, match=layout):
        cuflash.plan(*(cuflash.ShapeDtype(x.shape, x.dtype) for x in (q, k, k)), **options)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 8, 100, 16), (2, 8, 50, 16)), {"causal": True}),
        (((2, 8, 1, 16), (2, 8, 50, 16)), {"causal": True}),
        (((2, 8, 50, 16), (2, 3, 50, 16)), {}),
        (((2, 50, 8, 16), (2, 50, 8, 16)), {"mask": np.ones((7, 7), bool)}),
        (((2, 50, 8, 16), (2, 50, 2, 16)), {"causal": "right"}),
        (((8, 16), (2, 16)), {"causal": True}),
    ],
)
def test_the_layout_is_not_named_where_it_would_not_help(shapes, options) -> None:
    q, k = (zeros(*shape) for shape in shapes)
    message = refusal(q, k, k, **options)
    assert message and "swapaxes(-3, -2)" not in message


@pytest.mark.parametrize(
    ("dtype", "to"),
    [("int64", "float32"), ("bool", "float32"), (">f4", "float32"), (">f8", "float64"), ("O", "float32")],
)
def test_a_wrong_dtype_is_told_the_cast(dtype: str, to: str) -> None:
    q = np.ones((2, 5, 4), dtype)
    message = refusal(q, q, q)
    assert f"cast it to {to}" in message
    x = q.astype(to)
    assert refusal(x, x, x) == ""


@pytest.mark.parametrize("value", ["abc", 3.0, None, {}, b"q", [["1.0"]], np.ma.ones((4, 4), np.float32)])
def test_what_numpy_makes_no_array_of_is_told_no_such_thing(value: Any) -> None:
    message = refusal(value, zeros(2, 5, 4), zeros(2, 5, 4))
    assert message.startswith("q must be an array; got ") and "asarray" not in message


def test_a_cache_in_the_place_of_keys_is_told_its_method() -> None:
    cache = cuflash.KVCache(batch=1, num_kv_heads=2, head_dim=4, capacity=8, dtype=np.float32)
    for message in (refusal(zeros(1, 2, 1, 4), cache, cache), refusal(cache, cache, cache)):
        assert "must be an array; got a KVCache: call cache.attention(q), or pass the keys and values of one" in message


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_mask_of_numbers_is_told_where_they_go(dtype: str) -> None:
    message = refusal(*[zeros(2, 5, 4)] * 3, mask=np.ones((5, 5), dtype))
    assert message.endswith("convert 0/1 numbers to booleans with mask != 0")
    assert ("pass additive numbers as bias=" in message) == (dtype == "float32")
